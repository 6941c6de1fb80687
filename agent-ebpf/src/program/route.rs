//! Requests that belong to no established flow: route, gates, source, producer.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use holdfast_ebpf::abi::{
    Backend, ConsumerRow, FAMILY_V4, Flow, FlowKey, PolicySlot, RouteEntry, Selector, ServiceKey, Target,
    Verdict, control, generation_at_least,
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
    let key = &packet.headers.key;
    let (base, length) = if probe.length != 0 {
        (probe.base, probe.length)
    } else {
        (selector.base, u32::from(selector.length))
    };
    let slots = u64::from(base) << 32 | u64::from(length);
    let set = u64::from(policy) << 32 | u64::from(selector.generation);
    let how = if probe.is_one() { QUIETLY } else { 0 } | if probe.is_of_set() { FOR_NOBODY } else { 0 };
    let backend = choose_backend(key, slots, packet.hash, set, how) as u32;
    let Some(value) = maps::BACKENDS.get_ptr(backend) else {
        return Producer::NONE;
    };
    let value: *const Backend = value;
    // SAFETY: a map value.
    let (token, target, mac) = unsafe {
        (
            once(&raw const (*value).token),
            Target::unpack(once(&raw const (*value).target)),
            backend_mac(value),
        )
    };
    // SAFETY: a map value.
    let way = unsafe { way_to(value, target.kind, key.family) };
    if way == NO_WAY {
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

/// `how`: wakes nobody.
const QUIETLY: u32 = 1;
/// `how`: there is no consumer. Any device that holds the program is asked of a set.
const FOR_NOBODY: u32 = 1 << 1;

/// Slots that are tried.
const TRIES: u32 = 32;
/// The golden ratio of 2^32: the first steps cross the halves of a table, and all together come everywhere.
const STEP: u32 = 0x9e37_79b1;
/// No backend: beyond every map of them.
const NO_BACKEND: u64 = u32::MAX as u64;

/// The backend that serves a packet with this key, or [`NO_BACKEND`]. `slots`: first (upper half) and number; `set`:
/// policy (upper half) and generation.
///
/// A set holds every producer that serves somebody: one may be the consumer itself, may have no address of the packet's
/// family, or may be gone before the agent has switched. Then other slots are tried.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_backend(key: *const FlowKey, slots: u64, hash: u64, set: u64, how: u32) -> u64 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return NO_BACKEND;
    };
    let (base, length) = ((slots >> 32) as u32, slots & 0xffff_ffff);
    if length == 0 {
        return NO_BACKEND;
    }
    let first = ((hash >> 32) * length) >> 32;
    let mut place = 0u32;
    for _ in 0..TRIES {
        let step = (u64::from(place) * length) >> 32;
        let slot = base.wrapping_add(((first + step) % length) as u32);
        let Some(backend) = maps::SLOTS.get_ptr(slot) else {
            return NO_BACKEND;
        };
        // SAFETY: a map value.
        let backend = unsafe { once(backend) };
        if serves(backend, key, set, how) != 0 {
            return u64::from(backend);
        }
        if length == 1 {
            return NO_BACKEND;
        }
        place = place.wrapping_add(STEP);
    }
    NO_BACKEND
}

/// Whether a backend serves a packet with this key, as [`choose_backend`] has it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn serves(backend: u32, key: *const FlowKey, set: u64, how: u32) -> u32 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    let (Some(value), Some(key)) = (maps::BACKENDS.get_ptr(backend), unsafe { key.as_ref() }) else {
        return 0;
    };
    let value: *const Backend = value;
    let (policy, generation) = ((set >> 32) as u32, set as u32);
    // SAFETY: a map value.
    let (token, target, owner) = unsafe {
        (
            once(&raw const (*value).token),
            Target::unpack(once(&raw const (*value).target)),
            once(&raw const (*value).policy),
        )
    };
    // SAFETY: a map value.
    let way = unsafe { way_to(value, target.kind, key.family) };
    // A member of the set that the selector names: a slot that has not been written since says nothing.
    let member = owner == policy && generation_at_least(target.last_generation, generation);
    // A consumer is never its own producer.
    let own = target.ifindex == key.ifindex && how & FOR_NOBODY == 0;
    if token == 0 || !member || way == NO_WAY || own {
        return 0;
    }
    if lookup::token(target.ifindex, token) != token {
        if how & QUIETLY == 0 {
            lookup::wake(target.ifindex);
        }
        return 0;
    }
    1
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
