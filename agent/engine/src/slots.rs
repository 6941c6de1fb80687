//! Slot tables (which backend serves which hash) and the arenas that ids and slots are handed out of.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::model::{BackendId, Ifindex, Token};

/// Number of slots for so many members.
pub(crate) const fn size_class(members: usize) -> u16 {
    match members {
        0 => 0,
        1 => 1,
        2..=16 => 1_024,
        _ => 4_096,
    }
}

/// The table of a set.
///
/// Without a previous table it is a pure function of the members. With one, only what must move moves:
/// slots of members that left, and what each of the others has above its fair share.
pub(crate) fn table(
    members: &BTreeMap<(Ifindex, Token), BackendId>,
    previous: &[BackendId],
) -> Vec<BackendId> {
    let length = usize::from(size_class(members.len()));
    if length == 0 {
        return Vec::new();
    }
    let staying: BTreeSet<BackendId> = members.values().copied().collect();
    if previous.iter().any(|backend| staying.contains(backend)) {
        adjust(&staying, previous, length)
    } else {
        fill(members, length)
    }
}

/// First fill: each member in turn takes the next free slot of its own permutation (as Maglev does).
fn fill(members: &BTreeMap<(Ifindex, Token), BackendId>, length: usize) -> Vec<BackendId> {
    let mask = length as u64 - 1;
    // The length is a power of two, so an odd step visits every slot.
    let mut walks: Vec<(u64, u64, BackendId)> = members
        .iter()
        .map(|((ifindex, token), backend)| {
            let first = scatter(scatter(u64::from(*ifindex)) ^ token.get());
            let second = scatter(first);
            (first & mask, (second | 1) & mask.max(1), *backend)
        })
        .collect();
    let mut slots: Vec<Option<BackendId>> = vec![None; length];
    let mut left = length;
    while left > 0 {
        for (at, step, backend) in &mut walks {
            if left == 0 {
                break;
            }
            let mut slot = *at as usize;
            while slots[slot].is_some() {
                *at = (*at + *step) & mask;
                slot = *at as usize;
            }
            slots[slot] = Some(*backend);
            left -= 1;
        }
    }
    slots.into_iter().flatten().collect()
}

/// Keeps what can stay of the previous table.
fn adjust(staying: &BTreeSet<BackendId>, previous: &[BackendId], length: usize) -> Vec<BackendId> {
    let mut slots: Vec<Option<BackendId>> = (0..length)
        .map(|slot| previous.get(slot * previous.len() / length).copied())
        .map(|backend| backend.filter(|backend| staying.contains(backend)))
        .collect();
    let mut counts: BTreeMap<BackendId, usize> = staying.iter().map(|backend| (*backend, 0)).collect();
    for backend in slots.iter().flatten() {
        if let Some(count) = counts.get_mut(backend) {
            *count += 1;
        }
    }
    // Those with most slots get the shares that are one larger: they have less to give up.
    let mut order: Vec<(usize, BackendId)> =
        counts.iter().map(|(backend, count)| (*count, *backend)).collect();
    order.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let (share, larger) = (length / staying.len(), length % staying.len());
    let mut wanted: BTreeMap<BackendId, usize> = BTreeMap::new();
    for (rank, (_, backend)) in order.iter().enumerate() {
        wanted.insert(*backend, share + usize::from(rank < larger));
    }
    for slot in slots.iter_mut().rev() {
        if let Some(backend) = *slot
            && let (Some(count), Some(wanted)) = (counts.get_mut(&backend), wanted.get(&backend))
            && *count > *wanted
        {
            *count -= 1;
            *slot = None;
        }
    }
    let mut takers: Vec<(BackendId, usize)> = wanted
        .iter()
        .map(|(backend, wanted)| (*backend, wanted - counts.get(backend).copied().unwrap_or(0)))
        .filter(|(_, missing)| *missing > 0)
        .collect();
    let mut turn = 0;
    for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
        if takers.is_empty() {
            break;
        }
        turn %= takers.len();
        let (backend, missing) = &mut takers[turn];
        *slot = Some(*backend);
        *missing -= 1;
        if *missing == 0 {
            takers.remove(turn);
        } else {
            turn += 1;
        }
    }
    slots.into_iter().flatten().collect()
}

/// Spreads bits (the finaliser of splitmix64).
const fn scatter(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Hands out numbers, the lowest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ids {
    free: BTreeSet<u32>,
    next: u32,
    end: u32,
}

impl Ids {
    /// Numbers from `first` to below `end`.
    pub(crate) const fn new(first: u32, end: u32) -> Self {
        Self {
            free: BTreeSet::new(),
            next: first,
            end,
        }
    }

    /// One that nobody has; none when all are given out.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(id) = self.free.pop_first() {
            return Some(id);
        }
        if self.next >= self.end {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// Gives one back.
    pub(crate) fn give(&mut self, id: u32) {
        self.free.insert(id);
    }

    /// How many could still be taken.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + (self.end.saturating_sub(self.next)) as usize
    }

    /// An earlier life has this one.
    pub(crate) fn adopt(&mut self, id: u32) {
        while self.next <= id {
            self.free.insert(self.next);
            self.next += 1;
        }
        self.free.remove(&id);
    }
}

/// Hands out ranges of slots: single ones from the low end, large ones from the high end, so that
/// thousands of small sets do not break the room for large ones into pieces.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Arena {
    /// Length of each free range, by its base.
    free: BTreeMap<u32, u32>,
    /// Ranges that an earlier life has left in use twice: nobody can say when the last user has left them.
    contested: Vec<(u32, u32)>,
}

impl Arena {
    /// All of it is free.
    pub(crate) fn new(length: u32) -> Self {
        Self {
            free: if length == 0 {
                BTreeMap::new()
            } else {
                BTreeMap::from([(0, length)])
            },
            contested: Vec::new(),
        }
    }

    /// The base of a range that nobody has.
    pub(crate) fn take(&mut self, length: u32) -> Option<u32> {
        if length == 0 {
            return Some(0);
        }
        let fits = |(_, free): &(&u32, &u32)| **free >= length;
        let (base, free) = if length == 1 {
            self.free.iter().find(fits)
        } else {
            self.free.iter().rev().find(fits)
        }
        .map(|(base, free)| (*base, *free))?;
        self.free.remove(&base);
        let taken = if length == 1 { base } else { base + free - length };
        if taken > base {
            self.free.insert(base, taken - base);
        }
        let end = taken + length;
        if end < base + free {
            self.free.insert(end, base + free - end);
        }
        Some(taken)
    }

    /// Gives a range back. What is contested nobody gets again in this life.
    pub(crate) fn give(&mut self, base: u32, length: u32) {
        let contested = |(other, count): &(u32, u32)| {
            u64::from(base) < u64::from(*other) + u64::from(*count)
                && u64::from(*other) < u64::from(base) + u64::from(length)
        };
        if length == 0 || self.contested.iter().any(contested) {
            return;
        }
        let (mut base, mut length) = (base, length);
        if let Some(after) = self.free.remove(&(base + length)) {
            length += after;
        }
        if let Some((before, free)) = self.free.range(..base).next_back().map(|(b, l)| (*b, *l))
            && before + free == base
        {
            self.free.remove(&before);
            base = before;
            length += free;
        }
        self.free.insert(base, length);
    }

    /// An earlier life has this range. Says whether all of it was free.
    pub(crate) fn adopt(&mut self, base: u32, length: u32) -> bool {
        let whole = length == 0 || self.cut_out(base, length);
        if !whole {
            self.contested.push((base, length));
        }
        whole
    }

    fn cut_out(&mut self, base: u32, length: u32) -> bool {
        let Some((from, free)) = self.free.range(..=base).next_back().map(|(b, l)| (*b, *l)) else {
            return false;
        };
        let (end, free_end) = (
            u64::from(base) + u64::from(length),
            u64::from(from) + u64::from(free),
        );
        if end > free_end {
            return false;
        }
        self.free.remove(&from);
        if base > from {
            self.free.insert(from, base - from);
        }
        if end < free_end {
            self.free.insert(base + length, from + free - base - length);
        }
        true
    }

    /// Number of free slots.
    #[cfg(test)]
    fn available(&self) -> u64 {
        self.free.values().map(|length| u64::from(*length)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn members(ids: impl IntoIterator<Item = u32>) -> BTreeMap<(Ifindex, Token), BackendId> {
        ids.into_iter()
            .map(|id| ((id, Token::new(u64::from(id) * 77 + 1).unwrap()), id))
            .collect()
    }

    fn shares(table: &[BackendId]) -> BTreeMap<BackendId, usize> {
        let mut shares = BTreeMap::new();
        for backend in table {
            *shares.entry(*backend).or_insert(0) += 1;
        }
        shares
    }

    #[test]
    fn one_member_needs_one_slot_and_none_needs_none() {
        assert_eq!(table(&members([5]), &[]), [5]);
        assert_eq!(table(&members([]), &[5]), []);
    }

    #[test]
    fn a_second_member_takes_half_and_the_first_keeps_half() {
        let one = table(&members([5]), &[]);
        let two = table(&members([5, 6]), &one);
        assert_eq!(shares(&two), BTreeMap::from([(5, 512), (6, 512)]));
    }

    proptest! {
        #[test]
        fn shares_are_equal_to_one_slot(ids in prop::collection::btree_set(1_u32..500, 1..40)) {
            let table = table(&members(ids.clone()), &[]);
            prop_assert_eq!(table.len(), usize::from(size_class(ids.len())));
            let shares = shares(&table);
            prop_assert_eq!(shares.keys().copied().collect::<BTreeSet<_>>(), ids);
            let (least, most) = (shares.values().min().unwrap(), shares.values().max().unwrap());
            prop_assert!(most - least <= 1);
        }

        #[test]
        fn only_what_must_move_moves(
            before in prop::collection::btree_set(1_u32..60, 2..16),
            after in prop::collection::btree_set(1_u32..60, 2..16),
        ) {
            let old = table(&members(before.clone()), &[]);
            let new = table(&members(after.clone()), &old);
            let after_shares = shares(&new);
            let (least, most) = (after_shares.values().min().unwrap(), after_shares.values().max().unwrap());
            prop_assert!(most - least <= 1);
            if before.intersection(&after).count() > 0 {
                let old_shares = shares(&old);
                let left: usize = before.difference(&after).map(|id| old_shares[id]).sum();
                // Above its fair share by at most what rounding gives.
                let surplus: usize = before
                    .intersection(&after)
                    .map(|id| old_shares[id].saturating_sub(after_shares[id]))
                    .sum();
                let moved = old.iter().zip(&new).filter(|(a, b)| a != b).count();
                prop_assert_eq!(moved, left + surplus);
            }
        }

        #[test]
        fn an_arena_never_gives_a_slot_twice(script in prop::collection::vec((0_usize..3, 0_usize..8), 1..60)) {
            let mut arena = Arena::new(10_000);
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (class, pick) in script {
                if pick < 5 {
                    let length = [1, 1_024, 4_096][class];
                    if let Some(base) = arena.take(length) {
                        for (other, other_length) in &held {
                            prop_assert!(base + length <= *other || other + other_length <= base);
                        }
                        prop_assert!(base + length <= 10_000);
                        held.push((base, length));
                    }
                } else if !held.is_empty() {
                    let (base, length) = held.remove(pick % held.len());
                    arena.give(base, length);
                }
                let used: u64 = held.iter().map(|(_, length)| u64::from(*length)).sum();
                prop_assert_eq!(arena.available() + used, 10_000);
            }
            let mut adopted = Arena::new(10_000);
            for (base, length) in &held {
                prop_assert!(adopted.adopt(*base, *length));
                prop_assert!(!adopted.adopt(*base, *length));
            }
            prop_assert_eq!(adopted.available(), arena.available());
        }
    }

    #[test]
    fn a_range_that_two_have_is_given_out_to_nobody() {
        let mut arena = Arena::new(4);
        assert!(arena.adopt(0, 1));
        assert!(!arena.adopt(0, 1));
        arena.give(0, 1);
        arena.give(0, 1);
        assert_eq!(arena.available(), 3);
        assert_eq!(arena.take(1), Some(1));
    }

    #[test]
    fn ids_come_lowest_first_and_skip_adopted_ones() {
        let mut ids = Ids::new(1, 5);
        ids.adopt(2);
        assert_eq!(ids.available(), 3);
        assert_eq!(
            [ids.take(), ids.take(), ids.take(), ids.take()],
            [Some(1), Some(3), Some(4), None]
        );
        ids.give(3);
        assert_eq!(ids.take(), Some(3));
    }
}
