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
    /// [`lookup::writes`] when it came.
    pub(super) writes: u64,
    pub(super) probe: Probe,
}

/// What is to be done with this packet.
#[inline(always)]
pub(super) fn decide(skb: *mut __sk_buff, probe: Probe) -> Decision {
    // SAFETY: the kernel hands a valid context to the program.
    let (ifindex, protocol, tagged) = unsafe { ((*skb).ifindex, (*skb).protocol, (*skb).vlan_present) };
    let mut interface = Interface {
        ifindex,
        writes: lookup::writes(),
        answers: flow::may_answer(ifindex),
        row: Row::NONE,
    };
    // Where answers come from, the flow is looked for first: it needs no row.
    if !interface.answers {
        interface.row = lookup::row(ifindex, interface.writes);
        if !interface.row.is_there() && !probe.is_of_set() {
            return Decision::new(Verdict::Pass);
        }
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
    let mut kind = Kind::from_u32(read_headers(skb, headers));
    headers.key.ifindex = ifindex;
    if kind == Kind::NeverCaptured {
        return Decision::new(Verdict::Pass);
    }
    if kind == Kind::NotIp || headers.key.family != family {
        // Without an Ethernet header (a tun) we would read other bytes than the kernel.
        kind = Kind::Malformed;
    }
    if kind == Kind::LaterFragment && flow::recall_ports(headers) {
        kind = Kind::Complete;
    }
    if kind != Kind::Complete {
        return without_ports(interface, headers, kind);
    }
    if !matches!(headers.key.protocol, parse::TCP | parse::UDP) {
        return Decision::new(Verdict::Pass);
    }
    if headers.first_fragment && !probe.is_one() {
        flow::remember_ports(headers);
    }
    with_ports(interface, headers, probe)
}

/// Where a packet arrived.
#[derive(Clone, Copy)]
struct Interface {
    ifindex: u32,
    /// [`lookup::writes`] when the packet came.
    writes: u64,
    /// Answers may come from here.
    answers: bool,
    /// Its row, unless answers may come from here: then it is looked up when it is needed.
    row: Row,
}

impl Interface {
    #[inline(always)]
    fn row(self) -> Row {
        if self.answers {
            lookup::row(self.ifindex, self.writes)
        } else {
            self.row
        }
    }
}

/// Decides on a packet whose protocol and ports are known.
#[inline(always)]
fn with_ports(interface: Interface, headers: &Headers, probe: Probe) -> Decision {
    let mut packet = Packet {
        headers,
        hash: headers.key.hash(),
        row: interface.row,
        writes: interface.writes,
        probe,
    };
    if probe.is_of_set() {
        return route::of_set(packet);
    }
    let mut space = MaybeUninit::<Flow>::uninit();
    let mut kept = Kept::NONE;
    let mut nothing = Verdict::Pass;
    // A closed row has no request that could be established.
    let may_be_known = interface.answers || packet.row.token != 0;
    if may_be_known
        && !probe.is_one()
        && let Some(entry) = flow::find(&headers.key, packet.hash, &mut space)
    {
        // SAFETY: found, and so filled in.
        let flow = unsafe { space.assume_init_mut() };
        if flow.flags & Flow::ANSWER != 0 {
            let decision = flow::answer(packet, flow);
            if decision.verdict != Verdict::DropStale {
                return decision;
            }
            // Nobody is there any more who asked. Perhaps it is a request of its own.
            nothing = Verdict::DropStale;
            packet.row = interface.row();
        } else {
            packet.row = interface.row();
            if has_services(packet.row) && !headers.opens_connection() {
                if let Some(decision) = flow::established(packet, flow, entry) {
                    return decision;
                }
                kept = flow::kept(packet, flow);
            }
        }
    } else {
        packet.row = interface.row();
    }
    if !has_services(packet.row) {
        return Decision::new(nothing);
    }
    let decision = route::of_request(packet, kept, &mut space);
    if decision.verdict == Verdict::Pass {
        return Decision::new(nothing);
    }
    decision
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

/// A packet whose ports nobody can tell. A frame that cannot be read never passes around a policy; others are dropped
/// if they may be for a port that is claimed.
#[inline(always)]
fn without_ports(interface: Interface, headers: &Headers, kind: Kind) -> Decision {
    let row = interface.row();
    let drop = if kind == Kind::LaterFragment {
        Verdict::DropFragment
    } else {
        Verdict::DropMalformed
    };
    let FlowKey {
        ifindex,
        family,
        destination,
        ..
    } = headers.key;
    let ours = if kind == Kind::Malformed {
        row.is_there()
    } else {
        has_services(row) && lookup::is_claimed(&ServiceKey::claim(ifindex, family, destination))
    };
    Decision::new(if ours { drop } else { Verdict::Pass })
}
