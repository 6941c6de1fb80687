//! The way of a packet up to the decision.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::__sk_buff;
use holdfast_ebpf::abi::{ConsumerRow, FAMILY_V4, FAMILY_V6, Flow, Verdict};
use holdfast_ebpf::parse::{self, ETHERTYPE_V4, ETHERTYPE_V6, Headers, Kind};

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
pub(super) fn decide(skb: *mut __sk_buff, headers: &mut Headers, probe: Probe) -> Decision {
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
    let is_error = kind == Kind::Error;
    if is_error && (probe.is_one() || !is_about_a_flow(skb, interface, headers)) {
        return Decision::new(Verdict::Pass);
    }
    if kind != Kind::Complete && !is_error {
        return without_ports(interface, headers, kind);
    }
    // Services have ports; only prefixes take what has none.
    let has_ports = matches!(headers.key.protocol, parse::TCP | parse::UDP);
    if !has_ports && !is_error && !interface.answers && !lookup::has_prefixes(interface.row, family) {
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

/// Gives an ICMP error the key of the flow of the packet that it quotes; false if it is about none.
#[inline(always)]
fn is_about_a_flow(skb: *mut __sk_buff, interface: Interface, headers: &mut Headers) -> bool {
    let source_is_known = interface.row().flags & ConsumerRow::HAS_SOURCES != 0;
    headers.is_spoofed = source_is_known && !lookup::is_own_source(&headers.key);
    read_quote(skb, headers) != 0
}

/// Decides on a packet whose protocol and ports are known, or on an error about one: whoever sent that is told. About no
/// flow of ours an error passes, whatever claims its destination.
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
    let is_error = headers.quoted != 0;
    let mut space = MaybeUninit::<Flow>::uninit();
    let mut is_known = false;
    let mut nothing = Verdict::Pass;
    // A closed row has no request that could be established, but it may have errors about one.
    let may_be_known = interface.answers || packet.row.token != 0 || is_error;
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
            if headers.is_spoofed {
                return Decision::new(Verdict::DropSpoofed);
            }
            if lookup::has_routes(packet.row) && !headers.opens_connection() {
                if let Some(decision) = flow::established(packet, flow, entry) {
                    return decision;
                }
                is_known = true;
            }
            if is_error {
                nothing = Verdict::DropStale;
            }
        }
    } else {
        packet.row = interface.row();
    }
    if is_error || !lookup::has_routes(packet.row) {
        return Decision::new(nothing);
    }
    let decision = route::of_request(packet, is_known, &mut space);
    if decision.verdict == Verdict::Pass {
        return Decision::new(nothing);
    }
    decision
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

/// [`parse::parse_quote`] as a global function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn read_quote(skb: *mut __sk_buff, headers: *mut Headers) -> u32 {
    // SAFETY: the caller's headers; the verifier asks for the test that it is not null.
    match unsafe { headers.as_mut() } {
        Some(headers) => u32::from(parse::parse_quote(&mut Frame::new(skb), headers)),
        None => 0,
    }
}

/// A packet whose ports nobody can tell. A frame that cannot be read never passes around a policy; others are dropped
/// if they may be for what is claimed.
#[inline(always)]
fn without_ports(interface: Interface, headers: &Headers, kind: Kind) -> Decision {
    let row = interface.row();
    let drop = if kind == Kind::LaterFragment {
        Verdict::DropFragment
    } else {
        Verdict::DropMalformed
    };
    let ours = if kind == Kind::Malformed {
        row.is_there()
    } else {
        lookup::has_routes(row) && lookup::is_claimed(&headers.key, row)
    };
    Decision::new(if ours { drop } else { Verdict::Pass })
}
