//! Flows whose source port was chosen anew: the port is written into each packet, and back into what comes back.

use aya_ebpf::bindings::{__sk_buff, BPF_F_MARK_MANGLED_0};
use aya_ebpf::helpers::{bpf_l4_csum_replace, bpf_skb_load_bytes, bpf_skb_store_bytes};
use holdfast_ebpf::abi::Flow;
use holdfast_ebpf::parse::{self, Headers};

/// A port that is to be written into a packet. Half words, so that it is copied as one word.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Rewrite {
    /// The port, network order; 0 = nothing is to be written.
    port: u16,
    /// Where in the frame.
    at: u16,
    /// Where the checksum is that covers it.
    checksum: u16,
    /// UDP: a checksum of 0 is none, and none becomes 0.
    udp: u16,
}

impl Rewrite {
    pub(super) const NONE: Self = Self {
        port: 0,
        at: 0,
        checksum: 0,
        udp: 0,
    };

    /// Whether there is anything to write.
    #[inline(always)]
    pub(super) const fn is_one(self) -> bool {
        self.port != 0
    }

    /// What a packet of a flow needs: the producer sees another source port than the consumer.
    ///
    /// An error quotes what came the other way. Later fragments have no ports.
    #[inline(always)]
    pub(super) const fn of(headers: &Headers, flow: &Flow) -> Self {
        if flow.port == 0 || headers.transport == 0 {
            return Self::NONE;
        }
        let answer = flow.flags & Flow::ANSWER != 0;
        let quoted = headers.quoted != 0;
        let header = if quoted { headers.quoted } else { headers.transport };
        let udp = !quoted && headers.key.protocol == parse::UDP;
        let checksum = match (quoted, udp) {
            (true, _) => ICMP_CHECKSUM,
            (_, true) => UDP_CHECKSUM,
            _ => TCP_CHECKSUM,
        };
        Self {
            port: flow.port,
            at: header + if answer != quoted { DESTINATION_PORT } else { 0 },
            checksum: headers.transport + checksum,
            udp: udp as u16,
        }
    }
}

const DESTINATION_PORT: u16 = 2;
const ICMP_CHECKSUM: u16 = 2;
const UDP_CHECKSUM: u16 = 6;
const TCP_CHECKSUM: u16 = 16;

/// Writes the port, and corrects the checksum that covers it; false if the packet cannot be written.
///
/// The checksum of a quoted transport header is left alone: what is quoted is cut off, so that nobody can check it.
#[inline(always)]
pub(super) fn port(skb: *mut __sk_buff, rewrite: Rewrite) -> bool {
    let at = u32::from(rewrite.at) << 16 | u32::from(rewrite.checksum);
    rewrite_port(skb, at, u32::from(rewrite.port), u32::from(rewrite.udp)) == 0
}

/// `at`: where the port is (upper half) and the checksum.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn rewrite_port(skb: *mut __sk_buff, at: u32, port: u32, udp: u32) -> u32 {
    let (checksum, at) = (at & 0xffff, at >> 16);
    let (mut old, new) = (0u16, port as u16);
    // Two bytes. Where the checksum is yet to be made by a device, it covers only what is not a port so far, and the
    // helper leaves it alone.
    let flags = 2 | if udp == 0 {
        0
    } else {
        u64::from(BPF_F_MARK_MANGLED_0)
    };
    // SAFETY: the kernel hands a valid context to the program; the helpers check the offsets.
    let failed = unsafe {
        bpf_skb_load_bytes(skb.cast(), at, (&raw mut old).cast(), 2) != 0
            || bpf_l4_csum_replace(skb, checksum, u64::from(old), u64::from(new), flags) != 0
            || bpf_skb_store_bytes(skb, at, (&raw const new).cast(), 2, 0) != 0
    };
    u32::from(failed)
}
