//! The way of a packet up to the decision.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::__sk_buff;
use holdfast_ebpf::abi::{ConsumerRow, FAMILY_V4, FAMILY_V6, Flow, FlowKey, ServiceKey, Verdict};
use holdfast_ebpf::parse::{self, ETHERTYPE_V4, ETHERTYPE_V6, Headers, Kind};

use super::flow::Kept;
use super::frame::Frame;
use super::lookup::Row;
use super::probe::Probe;
use super::{Decision, flow, lookup, route};

/// What is known of a packet.
#[derive(Clone, Copy)]
pub(super) struct Packet<'a> {
    pub(super) headers: &'a Headers,
    /// Hash of the flow's key.
    pub(super) hash: u64,
    /// Row of the interface where it arrived.
    pub(super) row: Row,
    pub(super) probe: Probe,
}

/// What is to be done with this packet.
#[inline(always)]
pub(super) fn decide(skb: *mut __sk_buff, probe: Probe) -> Decision {
    // SAFETY: the kernel hands a valid context to the program.
    let (ifindex, protocol, tagged) = unsafe { ((*skb).ifindex, (*skb).protocol, (*skb).vlan_present) };
    let row = lookup::row(ifindex);
    // Nobody's consumer, and nobody was ever served from there.
    if !row.is_there() && !probe.is_of_set() && !flow::may_answer(ifindex) {
        return Decision::new(Verdict::Pass);
    }
    let family = match u16::from_be(protocol as u16) {
        ETHERTYPE_V4 => FAMILY_V4,
        ETHERTYPE_V6 => FAMILY_V6,
        _ => return Decision::new(Verdict::Pass),
    };
    // The tag of a real packet is here and not in its bytes.
    if tagged != 0 {
        return Decision::new(Verdict::Pass);
    }
    let mut space = MaybeUninit::<Headers>::uninit();
    // SAFETY: zero is a valid value of every field.
    let headers = unsafe {
        zero(space.as_mut_ptr());
        space.assume_init_mut()
    };
    let kind = Kind::from_u32(read_headers(skb, headers));
    headers.key.ifindex = ifindex;
    // Without an Ethernet header (a tun) we would read other bytes than the kernel.
    let contradicts = kind == Kind::NotIp || headers.key.family != family;
    match kind {
        _ if contradicts => return malformed(row),
        Kind::NeverCaptured | Kind::NotIp => return Decision::new(Verdict::Pass),
        Kind::Malformed => return malformed(row),
        Kind::Opaque => return without_ports(row, headers, Verdict::DropMalformed),
        Kind::LaterFragment => {
            if !flow::recall_ports(headers) {
                return without_ports(row, headers, Verdict::DropFragment);
            }
        }
        Kind::Complete => {}
    }
    if !matches!(headers.key.protocol, parse::TCP | parse::UDP) {
        return Decision::new(Verdict::Pass);
    }
    if headers.first_fragment && !probe.is_one() {
        flow::remember_ports(headers);
    }
    with_ports(Packet {
        headers,
        hash: headers.key.hash(),
        row,
        probe,
    })
}

/// Decides on a packet whose protocol and ports are known.
#[inline(always)]
fn with_ports(packet: Packet<'_>) -> Decision {
    if packet.probe.is_of_set() {
        return route::of_set(packet);
    }
    let mut space = MaybeUninit::<Flow>::uninit();
    if !packet.probe.is_one()
        && let Some(entry) = flow::find(&packet.headers.key, packet.hash, &mut space)
    {
        // SAFETY: found, and so filled in.
        let flow = unsafe { space.assume_init_mut() };
        if flow.flags & Flow::ANSWER != 0 {
            let decision = flow::answer(packet, flow);
            if decision.verdict == Verdict::Answered || !packet.row.is_there() {
                return decision;
            }
            // Not an answer to anybody who is still there: perhaps a request of its own.
        } else if has_services(packet.row) && !packet.headers.opens_connection() {
            if let Some(decision) = flow::established(packet, flow, entry) {
                return decision;
            }
            // The route is looked up anew; the producer stays if it still may.
            let kept = flow::kept(packet, flow);
            return route::of_request(packet, kept, &mut space);
        }
    }
    if !has_services(packet.row) {
        return Decision::new(Verdict::Pass);
    }
    route::of_request(packet, Kept::NONE, &mut space)
}

#[inline(always)]
const fn has_services(row: Row) -> bool {
    row.flags & ConsumerRow::HAS_SERVICES != 0
}

/// Fills with zeroes, eight bytes at a time. What the compiler makes of a plain assignment is a call of a `memset` that
/// writes byte by byte.
///
/// # Safety
/// `value` points to space for a `T`, for which zeroes are valid.
#[inline(always)]
unsafe fn zero<T>(value: *mut T) {
    const { assert!(size_of::<T>() % 8 == 0 && align_of::<T>() == 8) };
    let words = value.cast::<u64>();
    let mut index = 0;
    while index < size_of::<T>() / 8 {
        // SAFETY: within the value, aligned.
        unsafe { words.add(index).write_volatile(0) };
        index += 1;
    }
}

/// The parser as a global function: the verifier checks it once, alone, and what follows once for all that it can
/// give, instead of once for each way through it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_headers(skb: *mut __sk_buff, headers: *mut Headers) -> u32 {
    // SAFETY: the caller's headers; the verifier asks for the test that it is not null.
    match unsafe { headers.as_mut() } {
        Some(headers) => parse::parse(&mut Frame::new(skb), headers) as u32,
        None => Kind::Malformed as u32,
    }
}

/// A frame whose headers cannot be read never passes around a policy.
#[inline(always)]
fn malformed(row: Row) -> Decision {
    Decision::new(if row.is_there() {
        Verdict::DropMalformed
    } else {
        Verdict::Pass
    })
}

/// A packet whose ports nobody can tell: dropped if it may be for a port that is claimed.
#[inline(always)]
fn without_ports(row: Row, headers: &Headers, drop: Verdict) -> Decision {
    let FlowKey {
        ifindex,
        family,
        destination,
        ..
    } = headers.key;
    let claimed = has_services(row) && lookup::is_claimed(&ServiceKey::claim(ifindex, family, destination));
    Decision::new(if claimed { drop } else { Verdict::Pass })
}
