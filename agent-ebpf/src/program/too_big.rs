//! Packets that are larger than the way to a neighbour takes: whoever sent them is told, as by a router (RFC 1191,
//! RFC 8201). Within a peer's namespace there is no such limit.

use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC;
use aya_ebpf::bindings::bpf_check_mtu_flags::BPF_MTU_CHK_SEGS;
use aya_ebpf::bindings::{__sk_buff, BPF_F_RECOMPUTE_CSUM, TC_ACT_SHOT};
use aya_ebpf::helpers::{
    bpf_check_mtu, bpf_csum_diff, bpf_redirect, bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_load_bytes,
    bpf_skb_pull_data, bpf_skb_store_bytes,
};
use holdfast_ebpf::abi::FAMILY_V4;
use holdfast_ebpf::parse::{ETHERNET, Headers, ICMP, ICMP_HEADER, ICMP_V6, TCP, UDP};

use super::flow;

/// Bytes of the sender's packet that are quoted. A TCP header behind the longest IPv4 header fits.
const QUOTE_V4: u32 = 128;
const QUOTE_V6: u32 = 512 - 48;
/// Bytes that come in front of it.
const HEAD_V4: u32 = 20 + ICMP_HEADER;
const HEAD_V6: u32 = 40 + ICMP_HEADER;
/// One interface is told 100 times a second, and as often at once.
const INTERVAL: u64 = 10_000_000;
const BURST: u64 = 1_000_000_000;
/// Apart from the keys of new flows.
const RATE_KEY: u32 = 1 << 31;

/// The MTU of a device if a packet is larger; 0 if it fits. What is to be cut into segments is judged by these.
#[inline(always)]
pub(super) fn mtu_if_exceeded(skb: *mut __sk_buff, device: u32) -> u32 {
    let mut mtu = 0u32;
    // SAFETY: the kernel hands a valid context to the program.
    let found = unsafe { bpf_check_mtu(skb.cast(), device, &raw mut mtu, 0, u64::from(BPF_MTU_CHK_SEGS)) };
    // A device that is gone is the redirect's business.
    if found > 0 { mtu } else { 0 }
}

/// Makes of a packet the answer to its sender that it is larger than `mtu`, and sends it back where it came from; drops
/// it where no answer may be given (to later fragments and errors, RFC 1122) or too many were.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn tell_sender(skb: *mut __sk_buff, headers: *const Headers, mtu: u32) -> i32 {
    // SAFETY: the caller's headers; the verifier asks for the test that it is not null.
    let Some(headers) = (unsafe { headers.as_ref() }) else {
        return TC_ACT_SHOT as i32;
    };
    // SAFETY: the kernel hands a valid context to the program.
    let ifindex = unsafe { (*skb).ifindex };
    let may_be_answered = headers.transport != 0 && headers.quoted == 0;
    if !may_be_answered || flow::take(ifindex | RATE_KEY, INTERVAL, BURST) == 0 {
        return TC_ACT_SHOT as i32;
    }
    let transport = match headers.key.protocol {
        TCP => u32::from(headers.transport) + 16,
        UDP => u32::from(headers.transport) + 6,
        _ => 0,
    };
    let done = if headers.key.family == FAMILY_V4 {
        answer_v4(skb, mtu, transport)
    } else {
        answer_v6(skb, mtu, transport)
    };
    if done == 0 {
        return TC_ACT_SHOT as i32;
    }
    // SAFETY: takes two numbers.
    unsafe { bpf_redirect(ifindex, 0) as i32 }
}

/// ICMP destination unreachable, fragmentation needed (RFC 1191), from whom the packet was for. `checksum`: where in the
/// packet the checksum of its transport is, or 0. 0 if it could not be made.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn answer_v4(skb: *mut __sk_buff, mtu: u32, checksum: u32) -> u32 {
    const LENGTH: u16 = (HEAD_V4 + QUOTE_V4) as u16;
    if !make_room::<HEAD_V4, QUOTE_V4>(skb) {
        return 0;
    }
    let mut ends = [0u32; 2];
    // SAFETY: the kernel hands a valid context to the program; two addresses of the quoted header.
    if unsafe { bpf_skb_load_bytes(skb.cast(), ETHERNET + HEAD_V4 + 12, ends.as_mut_ptr().cast(), 8) } != 0 {
        return 0;
    }
    // The sum of a valid IPv4 header is 0, so that of the whole quote is that of what is behind it.
    let Some(quote) = sum_in::<QUOTE_V4>(skb, ETHERNET + HEAD_V4) else {
        return 0;
    };
    let Some(quote) = settle(skb, checksum, HEAD_V4, QUOTE_V4, quote, quote) else {
        return 0;
    };
    let [length_high, length_low] = LENGTH.to_be_bytes();
    let [_, _, mtu_high, mtu_low] = mtu.to_be_bytes();
    let mut head = [
        // Version and length, precedence of internetwork control (RFC 1812), length.
        u32::from_ne_bytes([0x45, 0xc0, length_high, length_low]),
        // Not to be fragmented itself.
        u32::from_ne_bytes([0, 0, 0x40, 0]),
        u32::from_ne_bytes([64, ICMP, 0, 0]),
        ends[1],
        ends[0],
        u32::from_ne_bytes([3, 4, 0, 0]),
        u32::from_ne_bytes([0, 0, mtu_high, mtu_low]),
    ];
    let ip = fold(head[0] as u64 + head[1] as u64 + head[2] as u64 + head[3] as u64 + head[4] as u64);
    head[2] |= upper_half(!ip);
    let icmp = fold(head[5] as u64 + head[6] as u64 + u64::from(quote));
    head[5] |= upper_half(!icmp);
    write_head(skb, &head)
}

/// ICMPv6 packet too big (RFC 4443). As [`answer_v4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn answer_v6(skb: *mut __sk_buff, mtu: u32, checksum: u32) -> u32 {
    const LENGTH: u16 = (ICMP_HEADER + QUOTE_V6) as u16;
    const HEADER: u32 = 40;
    if !make_room::<HEAD_V6, QUOTE_V6>(skb) {
        return 0;
    }
    let header = sum_in::<HEADER>(skb, ETHERNET + HEAD_V6);
    let rest = sum_in::<{ QUOTE_V6 - HEADER }>(skb, ETHERNET + HEAD_V6 + HEADER);
    let (Some(header), Some(rest)) = (header, rest) else {
        return 0;
    };
    let quote = fold(u64::from(header) + u64::from(rest));
    let Some(quote) = settle(skb, checksum, HEAD_V6, QUOTE_V6, quote, rest) else {
        return 0;
    };
    let [length_high, length_low] = LENGTH.to_be_bytes();
    let mut head = [0; 12];
    head[0] = u32::from_ne_bytes([0x60, 0, 0, 0]);
    head[1] = u32::from_ne_bytes([length_high, length_low, ICMP_V6, 64]);
    head[10] = u32::from_ne_bytes([2, 0, 0, 0]);
    head[11] = mtu.to_be();
    let (source, destination) = (ETHERNET + HEAD_V6 + 8, ETHERNET + HEAD_V6 + 24);
    // SAFETY: the kernel hands a valid context to the program; addresses of the quoted header, into eight words.
    unsafe {
        let to = head.as_mut_ptr();
        if bpf_skb_load_bytes(skb.cast(), destination, to.add(2).cast(), 16) != 0
            || bpf_skb_load_bytes(skb.cast(), source, to.add(6).cast(), 16) != 0
        {
            return 0;
        }
    }
    // The pseudo-header: addresses, length, next header.
    let mut sum = u64::from(quote)
        + u64::from(u32::from_ne_bytes([0, 0, length_high, length_low]))
        + u64::from(u32::from_ne_bytes([0, 0, 0, ICMP_V6]));
    let mut index = 2;
    while index < 12 {
        sum += u64::from(head[index]);
        index += 1;
    }
    head[10] |= upper_half(!fold(sum));
    write_head(skb, &head)
}

/// Cuts a packet off behind what is quoted, makes room for the headers in front of it, and turns the frame round.
#[inline(always)]
fn make_room<const HEAD: u32, const QUOTE: u32>(skb: *mut __sk_buff) -> bool {
    let mut macs = [0u16; 6];
    // SAFETY: the kernel hands a valid context to the program; the helpers check the offsets. Who asks for a checksum that
    // a device makes gets it within the quote, or nothing is cut (`__bpf_skb_min_len` in `net/core/filter.c`).
    unsafe {
        if (*skb).len < ETHERNET + QUOTE
            || bpf_skb_load_bytes(skb.cast(), 0, macs.as_mut_ptr().cast(), 12) != 0
            || macs[0].to_ne_bytes()[0] & 1 != 0
            || bpf_skb_change_tail(skb, ETHERNET + QUOTE, 0) != 0
            || bpf_skb_adjust_room(skb, HEAD as i32, BPF_ADJ_ROOM_MAC, 0) != 0
            || bpf_skb_pull_data(skb, ETHERNET + HEAD + QUOTE) != 0
        {
            return false;
        }
        let [a, b, c, d, e, f] = macs;
        let macs = [d, e, f, a, b, c];
        bpf_skb_store_bytes(skb, 0, macs.as_ptr().cast(), 12, 0) == 0
    }
}

/// Makes the sum of the quote one that does not change any more, and returns it. `quote`: the sum of all, `rest`: of
/// what is behind the quoted IP header.
///
/// Where a device was to make the transport's checksum, one may still do that on the way back, for the kernel does not
/// forget it: over what is left of the packet, into its field, after the ICMP checksum is made. So the field gets the
/// value that it would be given again: with the sum `r` of the others, `f = -(r + f)`. Nobody checks the checksum of a
/// packet that is cut off.
#[inline(always)]
fn settle(skb: *mut __sk_buff, checksum: u32, head: u32, length: u32, quote: u16, rest: u16) -> Option<u16> {
    if checksum == 0 || checksum + 2 > ETHERNET + length {
        return Some(quote);
    }
    let at = checksum + head;
    let mut old = 0u16;
    // SAFETY: the kernel hands a valid context to the program; the helpers check the offset.
    unsafe {
        if bpf_skb_load_bytes(skb.cast(), at, (&raw mut old).cast(), 2) != 0 {
            return None;
        }
    }
    let others = fold(u64::from(rest) + u64::from(!old));
    let new = half(!others);
    // SAFETY: as above.
    unsafe {
        if bpf_skb_store_bytes(
            skb,
            at,
            (&raw const new).cast(),
            2,
            u64::from(BPF_F_RECOMPUTE_CSUM),
        ) != 0
        {
            return None;
        }
    }
    Some(fold(u64::from(quote) + u64::from(!old) + u64::from(new)))
}

/// Half of a number modulo 65,535.
#[inline(always)]
const fn half(number: u16) -> u16 {
    if number & 1 == 0 {
        number >> 1
    } else {
        ((number as u32 + 0xffff) >> 1) as u16
    }
}

/// The sum of `LENGTH` bytes of the packet from `at` on, which lie in one piece.
#[inline(always)]
fn sum_in<const LENGTH: u32>(skb: *mut __sk_buff, at: u32) -> Option<u16> {
    // SAFETY: the kernel hands a valid context to the program; the bounds are tested as the verifier wants it.
    unsafe {
        let (data, end) = ((*skb).data as usize, (*skb).data_end as usize);
        let start = data + at as usize;
        if start + LENGTH as usize > end {
            return None;
        }
        let sum = bpf_csum_diff(core::ptr::null_mut(), 0, start as *mut u32, LENGTH, 0);
        (sum >= 0).then_some(fold(sum as u64))
    }
}

/// A sum of words as one of half words.
#[inline(always)]
const fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// A half word where the second two bytes of a word in memory are.
#[inline(always)]
const fn upper_half(value: u16) -> u32 {
    let [a, b] = value.to_ne_bytes();
    u32::from_ne_bytes([0, 0, a, b])
}

#[inline(always)]
fn write_head<const WORDS: usize>(skb: *mut __sk_buff, head: &[u32; WORDS]) -> u32 {
    let length = (WORDS * 4) as u32;
    let flags = u64::from(BPF_F_RECOMPUTE_CSUM);
    // SAFETY: the kernel hands a valid context to the program; the helper checks the offset.
    let failed = unsafe { bpf_skb_store_bytes(skb, ETHERNET, head.as_ptr().cast(), length, flags) };
    u32::from(failed == 0)
}
