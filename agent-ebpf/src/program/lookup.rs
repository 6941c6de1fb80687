//! Reads of hash maps, whose values move under replacement: they tear, turn into another key's, or are missed.
//! A value is believed only if it proves its key, and counts as missing only if nothing was written meanwhile.

use aya_ebpf::helpers::{bpf_jiffies64, bpf_ktime_get_coarse_ns};
use aya_ebpf::maps::lpm_trie::Key;
use holdfast_ebpf::abi::{
    Address, ConsumerRow, FAMILY_V4, FlowKey, LocalKey, PrefixEntry, PrefixKey, RouteEntry, ServiceKey,
    SourceKey, TICK, control,
};
use holdfast_ebpf::parse::{TCP, UDP};

use super::{maps, once};

/// A consumer row; all zero if there is none (no `Option`, as in [`super::probe::Probe`]).
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) token: u64,
    pub(super) epoch: u32,
    pub(super) flags: u32,
    /// Where answers leave to a neighbour, if the flags say so.
    device: u32,
    /// 1 if there is one. No byte, for padding would be copied byte by byte.
    there: u32,
}

impl Row {
    pub(super) const NONE: Self = Self {
        token: 0,
        epoch: 0,
        flags: 0,
        device: 0,
        there: 0,
    };

    /// Where answers leave to a neighbour, and whether they do: 0 and false stands for the peer.
    #[inline(always)]
    pub(super) const fn way(self) -> (u32, bool) {
        if self.flags & ConsumerRow::NEIGH == 0 {
            (0, false)
        } else {
            (self.device, true)
        }
    }

    /// Whether there is one.
    #[inline(always)]
    pub(super) const fn is_there(self) -> bool {
        self.there != 0
    }
}

/// The count of writes, for [`is_final`]. To be read before the look-up.
#[inline(always)]
pub(super) fn writes() -> u64 {
    maps::control(control::WRITES)
}

/// Whether nothing has been written since `before` that could have hidden an element.
///
/// (Where loads may pass each other, as on arm64, a look-up can still be final one time too often: some in 10^7 misses
/// under constant replacement, times the chance of that.)
#[inline(always)]
fn is_final(before: u64) -> bool {
    before & 1 == 0 && writes() == before
}

/// The consumer row of an interface.
#[inline(always)]
pub(super) fn row(ifindex: u32, writes: u64) -> Row {
    let row = row_once(ifindex);
    if row.is_there() || is_final(writes) {
        row
    } else {
        row_once(ifindex)
    }
}

#[inline(always)]
fn row_once(ifindex: u32) -> Row {
    let Some(value) = maps::CONSUMERS.get_ptr(ifindex) else {
        return Row::NONE;
    };
    let value: *const ConsumerRow = value;
    // SAFETY: a map value.
    unsafe {
        let row = Row {
            token: once(&raw const (*value).token),
            epoch: once(&raw const (*value).epoch),
            flags: once(&raw const (*value).flags),
            device: once(&raw const (*value).device),
            there: 1,
        };
        if once(&raw const (*value).ifindex) == ifindex {
            row
        } else {
            Row::NONE
        }
    }
}

/// The registered token of an interface; 0 = none. Tokens are random, so the expected one proves itself.
#[inline(always)]
pub(super) fn token(ifindex: u32, expected: u64) -> u64 {
    let token = token_once(ifindex);
    if token == expected {
        token
    } else {
        token_once(ifindex)
    }
}

#[inline(always)]
fn token_once(ifindex: u32) -> u64 {
    match maps::REGISTRY.get_ptr(ifindex) {
        // SAFETY: a map value.
        Some(value) => unsafe { once(&raw const (*value).token) },
        None => 0,
    }
}

/// MAC of the workload behind an interface, if the registered token is the expected one.
#[inline(always)]
pub(super) fn mac_of(ifindex: u32, expected: u64) -> Option<u64> {
    mac_once(ifindex, expected).or_else(|| mac_once(ifindex, expected))
}

#[inline(always)]
fn mac_once(ifindex: u32, expected: u64) -> Option<u64> {
    let value = maps::REGISTRY.get_ptr(ifindex)?;
    // SAFETY: a map value. The eight bytes at the MAC's offset lie within it; the upper two are the next field's.
    unsafe {
        let before = once(&raw const (*value).token);
        let mac = once((&raw const (*value).mac).cast::<u64>()) & 0xffff_ffff_ffff;
        let after = once(&raw const (*value).token);
        (before == expected && after == expected && expected != 0).then_some(mac)
    }
}

/// Whether an interface has route entries at all.
#[inline(always)]
pub(super) const fn has_routes(row: Row) -> bool {
    const ROUTES: u32 =
        ConsumerRow::HAS_SERVICES | ConsumerRow::HAS_PREFIXES_V4 | ConsumerRow::HAS_PREFIXES_V6;
    row.flags & ROUTES != 0
}

/// Whether an interface has entries for prefixes of this family.
#[inline(always)]
pub(super) const fn has_prefixes(row: Row, family: u8) -> bool {
    let flag = if family == FAMILY_V4 {
        ConsumerRow::HAS_PREFIXES_V4
    } else {
        ConsumerRow::HAS_PREFIXES_V6
    };
    row.flags & flag != 0
}

/// Where packets with this key lead: an exact service before a prefix, and of prefixes the longest. `row`: of the
/// key's interface.
#[inline(always)]
pub(super) fn route(key: &ServiceKey, row: Row, writes: u64) -> u64 {
    if row.flags & ConsumerRow::HAS_SERVICES != 0 && matches!(key.protocol, TCP | UDP) {
        let found = service(key, writes);
        if found != NO_ROUTE {
            return found;
        }
    }
    if has_prefixes(row, key.family) {
        find_prefix(key)
    } else {
        NO_ROUTE
    }
}

/// As [`route`], for where it is rarely asked.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn find_route(key: *const ServiceKey, flags: u32) -> u64 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    match unsafe { key.as_ref() } {
        Some(key) => route(key, Row { flags, ..Row::NONE }, writes()),
        None => NO_ROUTE,
    }
}

/// As [`route`], for where it is rarely asked.
#[inline(always)]
pub(super) fn route_seldom(key: &ServiceKey, row: Row) -> u64 {
    find_route(key, row.flags)
}

/// The entry of an exact service.
#[inline(always)]
fn service(key: &ServiceKey, writes: u64) -> u64 {
    let check = key.check();
    match service_once(key, check) {
        NO_ROUTE if !is_final(writes) => service_once(key, check),
        found => found,
    }
}

/// No entry. Policies are numbers below 2^24.
pub(super) const NO_ROUTE: u64 = u64::MAX;

/// The longest prefix that covers the destination of a key.
///
/// Once is enough: a trie, unlike a hash, hides nothing while it is written. Each node is complete before one pointer
/// puts it in its place, takes the place of another, or takes one away; a walk that stands on a node that has just been
/// replaced goes on by the same children (`kernel/bpf/lpm_trie.c`: `trie_update_elem`, `trie_delete_elem`). Nor does a
/// value become another key's within a run: nodes are freed behind a grace period. Who replaces an entry must not
/// delete it first, or a shorter prefix takes its packets meanwhile.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn find_prefix(key: *const ServiceKey) -> u64 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return NO_ROUTE;
    };
    let [a, b, c, d] = words(&key.address);
    let family = u32::from_ne_bytes([key.family, 0, 0, 0]);
    let bits = PrefixKey::HEAD + 128;
    let words = [bits, key.ifindex.to_be(), family, a, b, c, d];
    // SAFETY: words without padding, in the order of the fields of both.
    let (trie_key, key) = unsafe {
        (
            &*words.as_ptr().cast::<Key<[u32; 6]>>(),
            &*words.as_ptr().cast::<PrefixKey>(),
        )
    };
    let Some(value) = maps::PREFIXES.get(trie_key) else {
        return NO_ROUTE;
    };
    let value: *const PrefixEntry = value;
    // SAFETY: a map value.
    let (check, length, policy, flags) = unsafe {
        (
            once(&raw const (*value).check),
            once(&raw const (*value).length),
            once(&raw const (*value).policy),
            once(&raw const (*value).flags),
        )
    };
    if length <= 128 && check == key.check_of(length) {
        u64::from(flags) << 32 | u64::from(policy)
    } else {
        NO_ROUTE
    }
}

/// The policy of what [`route`] gave.
#[inline(always)]
pub(super) const fn policy_of(route: u64) -> u32 {
    route as u32
}

/// The flags of what [`route`] gave.
#[inline(always)]
pub(super) const fn flags_of(route: u64) -> u32 {
    (route >> 32) as u32
}

#[inline(always)]
fn service_once(key: &ServiceKey, check: u32) -> u64 {
    let Some(value) = maps::SERVICES.get_ptr(key) else {
        return NO_ROUTE;
    };
    let value: *const RouteEntry = value;
    // SAFETY: a map value. Policy and flags are one aligned word.
    unsafe {
        let word = once((&raw const (*value).policy).cast::<u64>());
        if once(&raw const (*value).check) == check {
            word
        } else {
            NO_ROUTE
        }
    }
}

/// Whether some packet to the destination of this key would be captured, whatever its protocol and ports.
#[inline(always)]
pub(super) fn is_claimed(key: &FlowKey, row: Row) -> bool {
    let claim = ServiceKey::claim(key.ifindex, key.family, key.destination);
    find_claim(&claim, row.flags) != 0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn find_claim(claim: *const ServiceKey, flags: u32) -> u32 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    let Some(key) = (unsafe { claim.as_ref() }) else {
        return 0;
    };
    let row = Row { flags, ..Row::NONE };
    let found = if row.flags & ConsumerRow::HAS_SERVICES != 0 {
        service(key, writes())
    } else {
        NO_ROUTE
    };
    let is_claimed = found != NO_ROUTE || has_prefixes(row, key.family) && find_prefix(key) != NO_ROUTE;
    u32::from(is_claimed && !is_local(key))
}

/// Whether the address of a key is one of the node's own: those are never captured, or the answers to the node's own
/// questions would be, and the node could not be reached.
#[inline(always)]
pub(super) fn is_local(key: &ServiceKey) -> bool {
    find_local(key) != 0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn find_local(key: *const ServiceKey) -> u32 {
    // SAFETY: the caller's key; the verifier asks for the test that it is not null.
    let Some(key) = (unsafe { key.as_ref() }) else {
        return 0;
    };
    let writes = writes();
    let [a, b, c, d] = words(&key.address);
    let family = u32::from_ne_bytes([key.family, 0, 0, 0]);
    // SAFETY: words without padding, in the order of the fields.
    let key = unsafe { core::mem::transmute::<[u32; 5], LocalKey>([family, a, b, c, d]) };
    let found = local_once(&key) || !is_final(writes) && local_once(&key);
    u32::from(found)
}

#[inline(always)]
fn local_once(key: &LocalKey) -> bool {
    match maps::LOCALS.get_ptr(key) {
        // SAFETY: a map value.
        Some(value) => unsafe { once(value) == key.check() },
        None => false,
    }
}

/// Whether the source of a packet is one of the interface's own addresses.
#[inline(always)]
pub(super) fn is_own_source(key: &FlowKey) -> bool {
    let [a, b, c, d] = words(&key.source);
    let family = u32::from_ne_bytes([key.family, 0, 0, 0]);
    // SAFETY: words without padding, in the order of the fields. (Three bytes of padding by themselves would be
    // zeroed by a call.)
    let key = unsafe { core::mem::transmute::<[u32; 6], SourceKey>([key.ifindex, family, a, b, c, d]) };
    let check = key.check();
    source_once(&key) == check || source_once(&key) == check
}

#[inline(always)]
fn words(address: &Address) -> [u32; 4] {
    // SAFETY: sixteen bytes, at a multiple of four in every key.
    unsafe { *core::ptr::from_ref(address).cast::<[u32; 4]>() }
}

#[inline(always)]
fn source_once(key: &SourceKey) -> u64 {
    match maps::SOURCES.get_ptr(key) {
        // SAFETY: a map value.
        Some(value) => unsafe { once(value) },
        None => 0,
    }
}

/// The coarse clock: as good as free, exact to a few milliseconds, stands still in suspend.
#[inline(always)]
pub(super) fn coarse_ns() -> u64 {
    // SAFETY: takes nothing.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Ticks: about a second each, see [`TICK`].
#[inline(always)]
pub(super) fn ticks() -> u32 {
    // SAFETY: takes nothing.
    (unsafe { bpf_jiffies64() } >> TICK) as u32
}

/// Tells the agent that the registered token of an interface is not the one it was programmed for, at most once a
/// second each.
#[inline(never)]
pub(super) fn wake(ifindex: u32) -> u32 {
    const SECOND: u64 = 1_000_000_000;
    let now = coarse_ns();
    match maps::WAKE_MARKS.get_ptr_mut(ifindex) {
        // SAFETY: a map value; one word, and a lost race only means one wake more.
        Some(mark) => unsafe {
            if now - once(mark) < SECOND {
                return 0;
            }
            *mark = now;
        },
        None => {
            let _ = maps::WAKE_MARKS.insert(ifindex, now, 0);
        }
    }
    let _ = maps::WAKES.output(ifindex, 0);
    1
}
