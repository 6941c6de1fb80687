//! Flows: what was decided for a flow's first packet, for both directions.

use core::mem::MaybeUninit;

use aya_ebpf::bindings::BPF_ANY;
use holdfast_ebpf::abi::{
    Answerers, Backend, Flow, FlowKey, Fragment, FragmentKey, RouteEntry, Selector, ServiceKey, Target,
    Verdict, control, generation_at_least,
};
use holdfast_ebpf::parse::{Headers, TCP, UDP};

use super::decide::Packet;
use super::lookup::{self, NO_ROUTE};
use super::rewrite::Rewrite;
use super::route::{self, NO_WAY, Producer};
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

/// The producer of a flow, if it still serves it: in the set that is selected, or draining. `family`: of its packets.
#[inline(always)]
fn serving(flow: &Flow, family: u8) -> Option<Serving> {
    let serving = serving_as(flow, family)?;
    let Producer { ifindex, token, .. } = serving.producer;
    if lookup::token(ifindex, token) != token {
        lookup::wake(ifindex);
        return None;
    }
    Some(serving)
}

/// As [`serving`], if the producer's registered token is still the one that it was programmed for.
#[inline(always)]
fn serving_as(flow: &Flow, family: u8) -> Option<Serving> {
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
    // SAFETY: a map value.
    let way = unsafe { route::way_to(value, target.kind, family) };
    if way == NO_WAY {
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
    Some(Serving {
        producer: Producer {
            backend: flow.backend,
            token,
            ifindex: target.ifindex,
            device: way as u32,
            mac,
        },
        expired: route::is_expired(slot),
    })
}

/// Decides on a request of an established flow; none if anything that its route was decided by has changed.
#[inline(always)]
pub(super) fn established(packet: Packet<'_>, flow: &mut Flow, entry: *mut Flow) -> Option<Decision> {
    let key = &packet.headers.key;
    if flow.consumer_token != packet.row.token || flow.epoch != packet.row.epoch {
        return None;
    }
    if !route::is_open(key.ifindex, packet.row, true) {
        return None;
    }
    let Serving { producer, expired } = serving(flow, key.family)?;
    let now = lookup::ticks();
    if flow.twin_checked != now {
        // The address may have become the node's own since the route was looked up.
        if lookup::is_local(&service_of(key)) {
            return None;
        }
        // SAFETY: a map value. If it is another flow's by now, that one's check is late by a second.
        unsafe { (*entry).twin_checked = now };
        flow.twin_checked = now;
        // Requests alone keep only their own entry from being evicted. What the twin's key is used for by others
        // now is their business.
        write_twin(key, flow, MEND);
    }
    let mut decision = Decision::new(if expired {
        Verdict::DropExpired
    } else {
        Verdict::Delivered
    });
    decision.deliver_to(&producer);
    decision.policy = flow.policy;
    decision.rewrite = Rewrite::of(packet.headers, flow);
    Some(decision)
}

/// The key under which the route of a packet is looked up.
#[inline(always)]
const fn service_of(key: &FlowKey) -> ServiceKey {
    ServiceKey {
        ifindex: key.ifindex,
        port: key.destination_port,
        protocol: key.protocol,
        family: key.family,
        address: key.destination,
    }
}

/// The producer that a flow may keep although its route has been looked up anew: if that still leads to the same policy.
#[inline(always)]
pub(super) fn kept(packet: Packet<'_>, flow: &Flow, policy: u32) -> Producer {
    if flow.consumer_token != packet.row.token || flow.policy != policy {
        return Producer::NONE;
    }
    match serving(flow, packet.headers.key.family) {
        Some(serving) => serving.producer,
        None => Producer::NONE,
    }
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
    let expired = serving(flow, key.family)?.expired;
    let row = lookup::row(flow.consumer, lookup::writes());
    let (device, is_neighbour) = row.way();
    if row.token != flow.consumer_token || row.token == 0 || (is_neighbour && device == 0) {
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
        let entry = lookup::route_seldom(&service, row);
        let open = lookup::flags_of(entry) & RouteEntry::OPEN != 0;
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
    decision.device = device;
    decision.mac = mac;
    decision.policy = flow.policy;
    decision.backend = flow.backend;
    decision.rewrite = Rewrite::of(packet.headers, flow);
    Some(decision)
}

/// Makes both entries of a flow. `fresh`: its producer has just been chosen. `port`: the one that was chosen for it
/// earlier, or 0.
#[inline(always)]
pub(super) fn open(
    packet: Packet<'_>,
    policy: u32,
    producer: Producer,
    fresh: bool,
    port: u16,
    space: &mut MaybeUninit<Flow>,
) -> Verdict {
    let key = &packet.headers.key;
    if fresh && !may_open(key.ifindex) {
        return Verdict::DropFlowRate;
    }
    let flow = space.write(Flow {
        check: packet.hash,
        consumer_token: packet.row.token,
        producer_token: producer.token,
        consumer: key.ifindex,
        producer: producer.ifindex,
        epoch: packet.row.epoch,
        backend: producer.backend,
        policy,
        twin_checked: lookup::ticks(),
        flags: 0,
        port,
        pad: 0,
    });
    if write_twin(key, flow, CLAIM) == 0 && choose_port(key, flow) == 0 {
        return Verdict::DropFlowCollision;
    }
    insert(key, flow);
    Verdict::Delivered
}

/// Source ports that are tried for a flow whose answers would be another's.
const TRIES: u32 = 16;

/// Gives a flow another source port, so that its answers have a key of their own, and writes their entry; 0 if no port
/// was found.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_port(key: *const FlowKey, flow: *mut Flow) -> u32 {
    // SAFETY: the caller's values; the verifier asks for the test that they are not null.
    let (Some(key), Some(flow)) = (unsafe { (key.as_ref(), flow.as_mut()) }) else {
        return 0;
    };
    let range = maps::control(control::PORTS);
    let (first, last) = (range as u16, (range >> 16) as u16);
    if first == 0 || last < first || !matches!(key.protocol, TCP | UDP) {
        return 0;
    }
    let count = u32::from(last - first) + 1;
    let mut place = (flow.check >> 32) as u32;
    for _ in 0..TRIES {
        flow.port = (first + (place % count) as u16).to_be();
        if write_twin(key, flow, CLAIM) != 0 {
            return 1;
        }
        place = place.wrapping_add(STRIDE);
    }
    0
}

/// From one try to the next: neighbours of a port that is taken are, too, where one consumer took it.
const STRIDE: u32 = 0x9e37_79b1;

/// [`write_twin`]: takes the key if no other living flow has it.
const CLAIM: u32 = 0;
/// [`write_twin`]: leaves alone what is there.
const MEND: u32 = 1;

/// Writes the entry for the answers to `flow`, whose request has `key`; 0 if its key belongs to another living flow.
///
/// A global function: it is called for each port that is tried.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn write_twin(key: *const FlowKey, flow: *mut Flow, how: u32) -> u32 {
    // SAFETY: the caller's values; the verifier asks for the test that they are not null.
    let (Some(key), Some(flow)) = (unsafe { (key.as_ref(), flow.as_mut()) }) else {
        return 0;
    };
    let twin = FlowKey {
        ifindex: flow.producer,
        source_port: key.destination_port,
        destination_port: if flow.port == 0 {
            key.source_port
        } else {
            flow.port
        },
        source: key.destination,
        destination: key.source,
        protocol: key.protocol,
        family: key.family,
        pad: [0; 2],
    };
    // What the consumer knows, where that is another.
    let port = if flow.port == 0 { 0 } else { key.source_port };
    let hash = twin.hash();
    let mut space = MaybeUninit::<Flow>::uninit();
    if find(&twin, hash, &mut space).is_some() {
        if how == MEND {
            return 1;
        }
        // SAFETY: found, and so filled in.
        let other = unsafe { space.assume_init_ref() };
        let ours = other.flags & Flow::ANSWER != 0
            && other.consumer == flow.consumer
            && other.consumer_token == flow.consumer_token
            && other.port == port;
        if !ours && is_living(other, key.family) {
            return 0;
        }
    }
    // The caller's value for the moment: the stack has no room for a third.
    let (request_port, request_check, request_flags) = (flow.port, flow.check, flow.flags);
    flow.port = port;
    flow.check = hash;
    flow.flags = Flow::ANSWER;
    insert(&twin, flow);
    flow.port = request_port;
    flow.check = request_check;
    flow.flags = request_flags;
    expect_answers(flow.producer);
    1
}

/// Whether both ends of a flow are still the incarnations that it was made between, and the one serves the other. Wakes
/// nobody: that is for the packets of its own.
#[inline(always)]
fn is_living(flow: &Flow, family: u8) -> bool {
    flow.consumer_token != 0
        && lookup::row(flow.consumer, lookup::writes()).token == flow.consumer_token
        && lookup::token(flow.consumer, flow.consumer_token) == flow.consumer_token
        && lookup::token(flow.producer, flow.producer_token) == flow.producer_token
        && serving_as(flow, family).is_some()
}

/// Writes an entry. When even the LRU has no room, the next packet tries again.
#[inline(always)]
fn insert(key: &FlowKey, flow: &Flow) {
    let _ = maps::FLOWS.insert(key, flow, u64::from(BPF_ANY));
}

/// Takes one new flow from a consumer's allowance; false if there is none left.
#[inline(always)]
fn may_open(consumer: u32) -> bool {
    let interval = maps::control(control::FLOW_INTERVAL);
    interval == 0 || take(consumer, interval, maps::control(control::FLOW_BURST)) != 0
}

/// Takes one of an allowance that grows by one each `interval` up to `burst` (nanoseconds); 0 if there is none left.
///
/// The word is the time at which the allowance is full again (the generic cell rate algorithm). CPUs may overwrite
/// each other's: a few more than the limit then.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn take(whose: u32, interval: u64, burst: u64) -> u32 {
    let now = lookup::coarse_ns();
    let Some(word) = maps::RATES.get_ptr_mut(whose) else {
        let _ = maps::RATES.insert(whose, now + interval, u64::from(BPF_ANY));
        return 1;
    };
    // SAFETY: a map value.
    unsafe {
        let full_at = once(word).max(now);
        if full_at - now > burst {
            return 0;
        }
        *word = full_at + interval;
    }
    1
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
