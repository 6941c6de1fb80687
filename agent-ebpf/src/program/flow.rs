//! Flows: what was decided for a flow's first packet, for both directions.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::BPF_ANY;
use holdfast_ebpf::abi::{
    Answerers, Backend, Flow, FlowKey, Fragment, FragmentKey, RouteEntry, Selector, ServiceKey, Target,
    Verdict, control, generation_at_least,
};
use holdfast_ebpf::parse::Headers;

use super::decide::Packet;
use super::lookup::{self, NO_ROUTE};
use super::route::{self, Producer};
use super::{Decision, maps, once};

/// Copies the flow entry under a key whose hash is given.
#[inline(always)]
pub(super) fn find(key: &FlowKey, hash: u64, copy: &mut MaybeUninit<Flow>) -> Option<*mut Flow> {
    const { assert!(size_of::<Flow>() == 7 * 8) };
    let entry = maps::FLOWS.get_ptr_mut(key)?;
    let (from, to) = (entry.cast::<u64>(), copy.as_mut_ptr().cast::<u64>());
    let mut index = 7;
    while index > 0 {
        index -= 1;
        // SAFETY: a map value, and space for one. From the end: the check, which stands first, is read last.
        unsafe { to.add(index).write(once(from.add(index))) };
    }
    // SAFETY: just written.
    (unsafe { (*copy.as_ptr()).check } == hash).then_some(entry)
}

/// Whether a flow was ever made towards this interface.
#[inline(always)]
pub(super) fn may_answer(ifindex: u32) -> bool {
    // SAFETY: within a map value.
    answerer(ifindex).is_none_or(|byte| unsafe { once(byte) } != 0)
}

/// From now on answers may come from this interface.
#[inline(always)]
fn expect_answers(ifindex: u32) {
    if let Some(byte) = answerer(ifindex) {
        // SAFETY: within a map value; whoever else writes writes the same.
        unsafe { byte.write_volatile(1) };
    }
}

#[inline(always)]
fn answerer(ifindex: u32) -> Option<*mut u8> {
    let bytes: *mut Answerers = maps::ANSWERERS.get_ptr_mut(0)?;
    // SAFETY: 16 bits are within the value.
    Some(unsafe { bytes.cast::<u8>().add((ifindex & 0xffff) as usize) })
}

/// What serves a flow.
pub(super) struct Serving {
    pub(super) producer: Producer,
    /// The policy's bound of staleness has passed.
    expired: bool,
}

/// The producer of a flow, if it still serves it: in the set that is selected, or draining.
#[inline(always)]
fn serving(flow: &Flow) -> Option<Serving> {
    let slot = maps::POLICIES.get_ptr(flow.policy)?;
    let value: *const Backend = maps::BACKENDS.get_ptr(flow.backend)?;
    // SAFETY: map values.
    let (selector, token, target, owner, mac) = unsafe {
        (
            Selector::unpack(once(&raw const (*slot).selector)),
            once(&raw const (*value).token),
            Target::unpack(once(&raw const (*value).target)),
            once(&raw const (*value).policy),
            route::backend_mac(value),
        )
    };
    if token == 0 || token != flow.producer_token || owner != flow.policy || target.ifindex != flow.producer {
        return None;
    }
    let member = selector.length != 0 && generation_at_least(target.last_generation, selector.generation);
    if !member {
        // SAFETY: a map value.
        let drain_until = unsafe { once(&raw const (*value).drain_until) };
        if drain_until == 0 || drain_until <= route::boot_ns() {
            return None;
        }
    }
    if lookup::token(target.ifindex, token) != token {
        lookup::wake(target.ifindex);
        return None;
    }
    Some(Serving {
        producer: Producer {
            backend: flow.backend,
            token,
            ifindex: target.ifindex,
            mac,
        },
        expired: route::is_expired(slot),
    })
}

/// Decides on a request of an established flow; none if anything that its route was decided by has changed.
#[inline(always)]
pub(super) fn established(packet: Packet<'_>, flow: &mut Flow, entry: *mut Flow) -> Option<Decision> {
    if flow.consumer_token != packet.row.token || flow.epoch != packet.row.epoch {
        return None;
    }
    if !route::is_open(packet.headers.key.ifindex, packet.row, true) {
        return None;
    }
    let Serving { producer, expired } = serving(flow)?;
    let now = lookup::ticks();
    let mut decision = Decision::new(if expired {
        Verdict::DropExpired
    } else {
        Verdict::Delivered
    });
    decision.target = producer.ifindex;
    decision.mac = producer.mac;
    decision.policy = flow.policy;
    decision.backend = flow.backend;
    if flow.twin_checked != now {
        // SAFETY: a map value. If it is another flow's by now, that one's check is late by a second.
        unsafe { (*entry).twin_checked = now };
        flow.twin_checked = now;
        // Requests alone keep only their own entry from being evicted. What the twin's key is used for by others
        // now is their business.
        write_twin(&packet.headers.key, flow, true);
    }
    Some(decision)
}

/// The producer that a flow may keep although its route has to be looked up anew: if that still leads to the same
/// policy.
#[inline(always)]
pub(super) fn kept(packet: Packet<'_>, flow: &Flow) -> Kept {
    if flow.consumer_token != packet.row.token {
        return Kept::NONE;
    }
    match serving(flow) {
        Some(serving) => Kept {
            policy: flow.policy,
            producer: serving.producer,
        },
        None => Kept::NONE,
    }
}

/// A producer that stays if the route still leads to its policy. No `Option`, as in [`super::probe::Probe`].
#[derive(Clone, Copy)]
pub(super) struct Kept {
    pub(super) policy: u32,
    /// Its token is 0 if there is none.
    pub(super) producer: Producer,
}

impl Kept {
    pub(super) const NONE: Self = Self {
        policy: 0,
        producer: Producer::NONE,
    };
}

/// Decides on an answer: both ends must be the incarnations that the flow was made between, and the consumer's
/// route must still lead to the flow's policy.
#[inline(always)]
pub(super) fn answer(packet: Packet<'_>, flow: &mut Flow) -> Decision {
    match answer_checked(packet, flow) {
        Some(decision) => decision,
        None => Decision::new(Verdict::DropStale),
    }
}

#[inline(always)]
fn answer_checked(packet: Packet<'_>, flow: &mut Flow) -> Option<Decision> {
    let key = &packet.headers.key;
    if flow.producer != key.ifindex {
        return None;
    }
    let expired = serving(flow)?.expired;
    let row = lookup::row(flow.consumer, lookup::writes());
    if row.token != flow.consumer_token || row.token == 0 {
        return None;
    }
    let mac = lookup::mac_of(flow.consumer, flow.consumer_token)?;
    if row.epoch != flow.epoch {
        let service = ServiceKey {
            ifindex: flow.consumer,
            port: key.source_port,
            protocol: key.protocol,
            family: key.family,
            address: key.source,
        };
        let entry = lookup::route_seldom(&service);
        let open = lookup::flags_of(entry) & (RouteEntry::OPEN | RouteEntry::CLAIM) == RouteEntry::OPEN;
        if entry == NO_ROUTE || !open || lookup::policy_of(entry) != flow.policy {
            return None;
        }
        flow.epoch = row.epoch;
        insert(key, flow);
    }
    let mut decision = Decision::new(if expired {
        Verdict::DropExpired
    } else {
        Verdict::Answered
    });
    decision.target = flow.consumer;
    decision.mac = mac;
    decision.policy = flow.policy;
    decision.backend = flow.backend;
    Some(decision)
}

/// Makes both entries of a flow. `fresh`: its producer has just been chosen.
#[inline(always)]
pub(super) fn open(
    packet: Packet<'_>,
    policy: u32,
    producer: Producer,
    fresh: bool,
    space: &mut MaybeUninit<Flow>,
) -> Verdict {
    let key = &packet.headers.key;
    if fresh && !may_open(key.ifindex) {
        return Verdict::DropFlowRate;
    }
    let flow = space.write(Flow {
        check: 0,
        consumer_token: packet.row.token,
        producer_token: producer.token,
        consumer: key.ifindex,
        producer: producer.ifindex,
        epoch: packet.row.epoch,
        backend: producer.backend,
        policy,
        twin_checked: lookup::ticks(),
        flags: 0,
        port: 0,
        pad: 0,
    });
    if !write_twin(key, flow, false) {
        return Verdict::DropFlowCollision;
    }
    flow.flags = 0;
    flow.check = packet.hash;
    insert(key, flow);
    Verdict::Delivered
}

/// Writes the entry for the answers to `flow`; false if its key belongs to another living flow. `mend`: leaves
/// alone what is there.
#[inline(never)]
fn write_twin(key: &FlowKey, flow: &mut Flow, mend: bool) -> bool {
    let twin = FlowKey {
        ifindex: flow.producer,
        source_port: key.destination_port,
        destination_port: key.source_port,
        source: key.destination,
        destination: key.source,
        protocol: key.protocol,
        family: key.family,
        pad: [0; 2],
    };
    let hash = twin.hash();
    let mut space = MaybeUninit::<Flow>::uninit();
    if find(&twin, hash, &mut space).is_some() {
        if mend {
            return true;
        }
        // SAFETY: found, and so filled in.
        let other = unsafe { space.assume_init_ref() };
        let ours = other.flags & Flow::ANSWER != 0
            && other.consumer == flow.consumer
            && other.consumer_token == flow.consumer_token;
        if !ours && is_living(other) {
            return false;
        }
    }
    flow.flags = Flow::ANSWER;
    flow.check = hash;
    insert(&twin, flow);
    expect_answers(flow.producer);
    true
}

/// Whether both ends of a flow are still the incarnations that it was made between, and the one serves the other.
#[inline(always)]
fn is_living(flow: &Flow) -> bool {
    flow.consumer_token != 0
        && lookup::row(flow.consumer, lookup::writes()).token == flow.consumer_token
        && lookup::token(flow.consumer, flow.consumer_token) == flow.consumer_token
        && serving(flow).is_some()
}

/// Writes an entry. When even the LRU has no room, the next packet tries again.
#[inline(always)]
fn insert(key: &FlowKey, flow: &Flow) {
    let _ = maps::FLOWS.insert(key, flow, u64::from(BPF_ANY));
}

/// Takes one new flow from a consumer's allowance; false if there is none left.
///
/// The word is the time at which the allowance is full again (the generic cell rate algorithm). CPUs may overwrite
/// each other's: a few flows more than the limit then.
#[inline(never)]
fn may_open(consumer: u32) -> bool {
    let interval = maps::control(control::FLOW_INTERVAL);
    if interval == 0 {
        return true;
    }
    let burst = maps::control(control::FLOW_BURST);
    let now = lookup::coarse_ns();
    let Some(word) = maps::RATES.get_ptr_mut(consumer) else {
        let _ = maps::RATES.insert(consumer, now + interval, u64::from(BPF_ANY));
        return true;
    };
    // SAFETY: a map value.
    unsafe {
        let full_at = once(word).max(now);
        if full_at - now > burst {
            return false;
        }
        *word = full_at + interval;
    }
    true
}

#[inline(always)]
const fn fragment_key(headers: &Headers) -> FragmentKey {
    FragmentKey {
        ifindex: headers.key.ifindex,
        id: headers.fragment_id,
        source: headers.key.source,
        destination: headers.key.destination,
        protocol: headers.fragment_protocol,
        family: headers.key.family,
        pad: [0; 2],
    }
}

/// Keeps the ports of a first fragment for those that follow.
#[inline(never)]
pub(super) fn remember_ports(headers: &Headers) -> bool {
    let key = fragment_key(headers);
    let value = Fragment {
        check: key.hash(),
        seen: lookup::ticks() as u16,
        protocol: headers.key.protocol,
        pad: 0,
        source_port: headers.key.source_port,
        destination_port: headers.key.destination_port,
    };
    maps::FRAGMENTS.insert(&key, &value, u64::from(BPF_ANY)).is_ok()
}

/// Gives a later fragment the protocol and ports of its first; false if that is not known.
#[inline(never)]
pub(super) fn recall_ports(headers: &mut Headers) -> bool {
    let key = fragment_key(headers);
    let Some(value) = maps::FRAGMENTS.get_ptr(&key) else {
        return false;
    };
    // SAFETY: a map value.
    let (seen, protocol, source_port, destination_port, check) = unsafe {
        (
            once(&raw const (*value).seen),
            once(&raw const (*value).protocol),
            once(&raw const (*value).source_port),
            once(&raw const (*value).destination_port),
            once(&raw const (*value).check),
        )
    };
    if check != key.hash() || (lookup::ticks() as u16).wrapping_sub(seen) > Fragment::TICKS {
        return false;
    }
    headers.key.protocol = protocol;
    headers.key.source_port = source_port;
    headers.key.destination_port = destination_port;
    true
}
