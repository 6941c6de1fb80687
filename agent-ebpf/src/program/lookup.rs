//! Reads of hash maps, whose values move under replacement: they tear, turn into another key's, or are missed.
//! A value is believed only if it proves its key, and counts as missing only if nothing was written meanwhile.

use aya_ebpf::helpers::{bpf_jiffies64, bpf_ktime_get_coarse_ns};
use holdfast_ebpf::abi::{Address, ConsumerRow, FlowKey, RouteEntry, ServiceKey, SourceKey, TICK, control};

use super::{maps, once};

/// A consumer row; all zero if there is none (no `Option`, as in [`super::probe::Probe`]).
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// 1 if there is one. A word, for padding would be copied byte by byte.
    there: u64,
    pub(super) token: u64,
    pub(super) epoch: u32,
    pub(super) flags: u32,
}

impl Row {
    pub(super) const NONE: Self = Self {
        there: 0,
        token: 0,
        epoch: 0,
        flags: 0,
    };

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
            there: 1,
            token: once(&raw const (*value).token),
            epoch: once(&raw const (*value).epoch),
            flags: once(&raw const (*value).flags),
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

/// Where a destination leads, as [`route`], for where it is rarely asked.
#[inline(never)]
pub(super) fn route_seldom(key: &ServiceKey) -> u64 {
    route(key, writes())
}

/// Where a destination leads: policy and flags.
#[inline(always)]
pub(super) fn route(key: &ServiceKey, writes: u64) -> u64 {
    let check = key.check();
    match route_once(key, check) {
        NO_ROUTE if !is_final(writes) => route_once(key, check),
        found => found,
    }
}

/// No entry. Policies are numbers below 2^24.
pub(super) const NO_ROUTE: u64 = u64::MAX;

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
fn route_once(key: &ServiceKey, check: u32) -> u64 {
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

/// Whether some port of an address is claimed.
#[inline(always)]
pub(super) fn is_claimed(key: &ServiceKey) -> bool {
    let route = route_seldom(key);
    route != NO_ROUTE && flags_of(route) & RouteEntry::CLAIM != 0
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
