//! Requests that belong to no established flow: route, gates, source, producer.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use holdfast_ebpf::abi::{
    Backend, ConsumerRow, FAMILY_V4, Flow, PolicySlot, RouteEntry, Selector, ServiceKey, Target, Verdict,
    control, generation_at_least,
};

use super::decide::Packet;
use super::lookup::{self, NO_ROUTE, Row};
use super::rewrite::Rewrite;
use super::{Decision, flow, maps, once};

/// A producer, read once.
#[derive(Clone, Copy)]
pub(super) struct Producer {
    pub(super) backend: u32,
    pub(super) token: u64,
    pub(super) ifindex: u32,
    /// Where packets leave to it as a neighbour; 0 = to the peer of `ifindex`.
    pub(super) device: u32,
    pub(super) mac: u64,
}

impl Producer {
    pub(super) const NONE: Self = Self {
        backend: 0,
        token: 0,
        ifindex: 0,
        device: 0,
        mac: 0,
    };
}

/// The boot clock: the agent's deadlines are on it, and it goes on in suspend.
#[inline(always)]
pub(super) fn boot_ns() -> u64 {
    // SAFETY: takes nothing.
    unsafe { bpf_ktime_get_boot_ns() }
}

/// Whether the policy's bound of staleness has passed.
#[inline(always)]
pub(super) fn is_expired(slot: *const PolicySlot) -> bool {
    // SAFETY: a map value.
    let (bound, deadline) = unsafe {
        (
            once(&raw const (*slot).max_staleness),
            once(&raw const (*slot).stale_after),
        )
    };
    if bound == 0 && deadline == 0 {
        return false;
    }
    let now = boot_ns();
    if deadline != 0 && now > deadline {
        return true;
    }
    let current = maps::control(control::LAST_CURRENT);
    bound != 0 && now > current && now - current > bound
}

/// Decides on a request that belongs to no established flow, and makes its flow. `is_known`: it has one in `space`, whose
/// route may have changed.
#[inline(always)]
pub(super) fn of_request(packet: Packet<'_>, is_known: bool, space: &mut MaybeUninit<Flow>) -> Decision {
    let key = &packet.headers.key;
    let service = ServiceKey {
        ifindex: key.ifindex,
        port: key.destination_port,
        protocol: key.protocol,
        family: key.family,
        address: key.destination,
    };
    let entry = lookup::route(&service, packet.row, packet.writes);
    if entry == NO_ROUTE || lookup::is_local(&service) {
        return Decision::new(Verdict::Pass);
    }
    let policy = lookup::policy_of(entry);
    let mut decision = Decision::new(Verdict::DropHeld);
    decision.policy = policy;
    let Some(slot) = maps::POLICIES.get_ptr(policy) else {
        return decision;
    };
    // SAFETY: a map value.
    let (selector, flags) = unsafe { (once(&raw const (*slot).selector), once(&raw const (*slot).flags)) };
    decision.generation = Selector::unpack(selector).generation;
    if !packet.probe.as_if_open() {
        let open = is_open(key.ifindex, packet.row, !packet.probe.is_one());
        if !open || lookup::flags_of(entry) & RouteEntry::OPEN == 0 {
            decision.verdict = closed(flags, Verdict::DropHeld);
            return decision;
        }
    }
    if is_expired(slot) {
        decision.verdict = Verdict::DropExpired;
        return decision;
    }
    if packet.row.flags & ConsumerRow::HAS_SOURCES != 0 && !lookup::is_own_source(key) {
        decision.verdict = Verdict::DropSpoofed;
        return decision;
    }
    let mut producer = Producer::NONE;
    let mut port = 0;
    if is_known {
        // SAFETY: known, and so filled in.
        let flow = unsafe { space.assume_init_ref() };
        producer = flow::kept(packet, flow, policy);
        port = flow.port;
    }
    let keeps = producer.token != 0;
    if !keeps {
        port = 0;
        producer = choose(packet, policy, selector);
    }
    if producer.token == 0 {
        decision.verdict = closed(flags, Verdict::DropNoProducer);
        return decision;
    }
    decision.deliver_to(&producer);
    if packet.probe.is_one() {
        decision.verdict = Verdict::Delivered;
        return decision;
    }
    decision.verdict = flow::open(packet, policy, producer, !keeps, port, space);
    // SAFETY: `open` writes it first of all, but where the rate binds; nothing is rewritten then.
    decision.rewrite = if decision.verdict == Verdict::Delivered {
        Rewrite::of(packet.headers, unsafe { space.assume_init_ref() })
    } else {
        Rewrite::NONE
    };
    decision
}

impl Decision {
    #[inline(always)]
    pub(super) const fn deliver_to(&mut self, producer: &Producer) {
        self.target = producer.ifindex;
        self.device = producer.device;
        self.mac = producer.mac;
        self.backend = producer.backend;
    }
}

/// Answers a probe of a set: no row, no route.
#[inline(always)]
pub(super) fn of_set(packet: Packet<'_>) -> Decision {
    let policy = packet.probe.policy();
    let mut decision = Decision::new(Verdict::DropNoProducer);
    decision.policy = policy;
    let Some(slot) = maps::POLICIES.get_ptr(policy) else {
        return decision;
    };
    // SAFETY: a map value.
    let selector = unsafe { once(&raw const (*slot).selector) };
    decision.generation = Selector::unpack(selector).generation;
    let producer = choose(packet, policy, selector);
    if producer.token != 0 {
        decision.verdict = Verdict::Delivered;
        decision.deliver_to(&producer);
    }
    decision
}

/// What becomes of a packet at a closed gate.
#[inline(always)]
const fn closed(policy_flags: u64, drop: Verdict) -> Verdict {
    if policy_flags & PolicySlot::PASS_WHILE_HELD != 0 {
        Verdict::PassedHeld
    } else {
        drop
    }
}

/// The consumer's own gate: its row is open for the incarnation that is registered now.
#[inline(always)]
pub(super) fn is_open(ifindex: u32, row: Row, wake: bool) -> bool {
    let registered = lookup::token(ifindex, row.token);
    if registered != row.token && wake {
        lookup::wake(ifindex);
    }
    row.token != 0 && registered == row.token
}

/// The producer that serves a new flow; none has token 0.
#[inline(always)]
fn choose(packet: Packet<'_>, policy: u32, selector: u64) -> Producer {
    let selector = Selector::unpack(selector);
    let probe = packet.probe;
    let (base, length) = if probe.length != 0 {
        (probe.base, probe.length)
    } else {
        (selector.base, u32::from(selector.length))
    };
    if length == 0 {
        return Producer::NONE;
    }
    let slot = base.wrapping_add((((packet.hash >> 32) * u64::from(length)) >> 32) as u32);
    // SAFETY: a map value.
    let backend = match maps::SLOTS.get_ptr(slot) {
        Some(backend) => unsafe { once(backend) },
        None => return Producer::NONE,
    };
    let Some(value) = maps::BACKENDS.get_ptr(backend) else {
        return Producer::NONE;
    };
    let value: *const Backend = value;
    // SAFETY: a map value.
    let (token, target, owner, mac) = unsafe {
        (
            once(&raw const (*value).token),
            Target::unpack(once(&raw const (*value).target)),
            once(&raw const (*value).policy),
            backend_mac(value),
        )
    };
    // SAFETY: a map value.
    let way = unsafe { way_to(value, target.kind, packet.headers.key.family) };
    // A member of the set that the selector names: a slot that has not been written since says nothing.
    let member = owner == policy && generation_at_least(target.last_generation, selector.generation);
    // A consumer is never its own producer. A set as such has no consumer: any device that holds the program is asked.
    let own = target.ifindex == packet.headers.key.ifindex && !probe.is_of_set();
    if token == 0 || !member || way == NO_WAY || own {
        return Producer::NONE;
    }
    if lookup::token(target.ifindex, token) != token {
        if !probe.is_one() {
            lookup::wake(target.ifindex);
        }
        return Producer::NONE;
    }
    Producer {
        backend,
        token,
        ifindex: target.ifindex,
        device: way as u32,
        mac,
    }
}

/// Nothing can be delivered to the backend.
pub(super) const NO_WAY: u64 = u64::MAX;

/// Where packets of a family leave for a backend as [`Producer::device`], or [`NO_WAY`].
///
/// # Safety
/// `value` is a map value.
#[inline(always)]
pub(super) unsafe fn way_to(value: *const Backend, kind: u8, family: u8) -> u64 {
    if kind == Target::PEER {
        return 0;
    }
    // SAFETY: a map value. Both addresses lie at multiples of eight.
    let (device, v4, v6) = unsafe {
        let v6 = (&raw const (*value).address_v6).cast::<u64>();
        (
            once(&raw const (*value).device),
            u64::from(once((&raw const (*value).address_v4).cast::<u32>())),
            once(v6) | once(v6.add(1)),
        )
    };
    let address = if family == FAMILY_V4 { v4 } else { v6 };
    if kind == Target::NEIGH && device != 0 && address != 0 {
        u64::from(device)
    } else {
        NO_WAY
    }
}

/// # Safety
/// `value` is a map value.
#[inline(always)]
pub(super) unsafe fn backend_mac(value: *const Backend) -> u64 {
    // SAFETY: the two bytes behind the MAC are padding of the same value. It lies at a multiple of four.
    unsafe {
        let low = once((&raw const (*value).mac).cast::<u32>());
        let high = once((&raw const (*value).mac).cast::<u32>().add(1));
        u64::from(low) | u64::from(high & 0xffff) << 32
    }
}
