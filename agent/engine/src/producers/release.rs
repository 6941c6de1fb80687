//! What comes out of use: slots of nobody, and backends that have drained.

use std::collections::BTreeSet;

use super::{GRACE, Orphan, Phase, Release};
use crate::backoff::Backoff;
use crate::engine::Engine;
use crate::model::{BackendId, Boot, Happening, Level, LogLine, Op, SlotId};
use crate::plan::What;

impl Engine {
    /// Tries again to free what could not be freed.
    pub(crate) fn free_again(&mut self) {
        let out = self.backends_out();
        let ids: Vec<BackendId> = self
            .backends
            .iter()
            .filter(|(id, state)| state.phase == Phase::Freeing && !out.contains(id))
            .map(|(id, _)| *id)
            .collect();
        if ids.is_empty() {
            self.settled_orphan(Orphan::Backends);
        } else {
            self.free(ids);
        }
    }

    /// Backends that are being written or freed.
    fn backends_out(&self) -> BTreeSet<BackendId> {
        self.flights
            .values()
            .filter_map(|flight| match &flight.what {
                What::Free(ids) | What::Backends(_, ids) => Some(ids),
                _ => None,
            })
            .flatten()
            .copied()
            .collect()
    }

    pub(super) fn free(&mut self, ids: Vec<BackendId>) {
        let backends = ids.iter().map(|id| (*id, None)).collect();
        self.send(What::Free(ids), None, Op::WriteBackends { backends });
    }

    /// Removes a slot that nobody owns: entries first, then the selector, then the rest.
    pub(crate) fn plan_orphan_slot(&mut self, slot: SlotId) {
        if !self.may_remove() {
            return;
        }
        let Some(state) = self.slots.get(&slot) else {
            return;
        };
        if state.owner.is_some() || self.slot_ports.contains_key(&slot) || state.out() {
            return;
        }
        if !self.frozen_members(slot).is_empty() {
            // Whoever sits in it has not been read yet: it stays as it was adopted.
            return;
        }
        if state.cell.is(&None) {
            self.slot_free(slot);
            return;
        }
        if state.blocked() {
            return;
        }
        let op = self.send(What::Policy(slot), None, Op::WritePolicy { slot, value: None });
        if let Some(state) = self.slots.get_mut(&slot) {
            state.cell.send(op, None);
            state.touched = op;
        }
    }

    /// The kernel has nothing in this slot any more.
    pub(super) fn slot_free(&mut self, slot: SlotId) {
        if self.slots.get(&slot).is_some_and(|state| state.owner.is_some()) {
            // Somebody took it over while the answer was out: it starts again, empty.
            if let Some(owner) = self.slots.get(&slot).and_then(|state| state.owner) {
                self.dirty.policies.insert(owner);
            }
            return;
        }
        let Some(state) = self.slots.remove(&slot) else {
            return;
        };
        if state.removed > 0 {
            self.out.log.push(LogLine {
                level: Level::Info,
                what: Happening::PolicyRemoved(state.removed),
                policy: state.of,
                consumer: None,
                ifindex: None,
            });
        }
        if self.slot_by_uid.get(&state.uid) == Some(&slot) {
            self.slot_by_uid.remove(&state.uid);
        }
        let due = self.now.boot.plus(GRACE);
        let sets = state
            .sets
            .into_iter()
            .chain(state.building.map(|building| building.set));
        for set in sets {
            if set.selected.length > 0 {
                self.release_at(
                    due,
                    Release::Range(set.selected.base, u32::from(set.selected.length)),
                );
            }
        }
        let backends: Vec<BackendId> = self
            .backends
            .iter_mut()
            .filter(|(_, backend)| backend.content.policy == slot && backend.phase != Phase::Freeing)
            .map(|(id, backend)| {
                backend.phase = Phase::Draining;
                *id
            })
            .collect();
        for id in backends {
            self.release_at(due, Release::Drained(id));
        }
        self.release_at(due, Release::Slot(slot));
        self.settled_orphan(Orphan::Slot(slot));
    }

    pub(crate) fn release_at(&mut self, due: Boot, release: Release) {
        self.releases.entry(due).or_default().push(release);
    }

    /// Something is there after all: its number is given out again once that is gone.
    pub(super) fn not_released(&mut self, release: Release) {
        self.releases.retain(|_, releases| {
            releases.retain(|other| *other != release);
            !releases.is_empty()
        });
    }

    /// What has been out of use for long enough is given out again.
    pub(crate) fn release(&mut self) {
        let mut free = Vec::new();
        while let Some(entry) = self.releases.first_entry() {
            if *entry.key() > self.now.boot {
                break;
            }
            for release in entry.remove() {
                match release {
                    Release::Slot(slot) => self.slot_ids.give(slot),
                    Release::Range(base, length) => self.arena.give(base, length),
                    Release::Backend(id) => self.backend_ids.give(id),
                    Release::Drained(id) => {
                        let due = self.now.boot;
                        let passed = self.passed;
                        if let Some(state) = self.backends.get_mut(&id)
                            && state.phase == Phase::Draining
                        {
                            let until = state.content.drain_until.unwrap_or(due);
                            if until > due {
                                // It came back and left once more since.
                                self.release_at(until.plus(GRACE), Release::Drained(id));
                            } else if passed {
                                state.phase = Phase::Freeing;
                                free.push(id);
                            } else {
                                self.release_at(due.plus(Backoff::begin(due).due().since(due)), release);
                            }
                        }
                    }
                }
            }
        }
        if !free.is_empty() {
            free.sort_unstable();
            free.dedup();
            // One that is being written is freed after the answer.
            let out = self.backends_out();
            free.retain(|id| !out.contains(id));
        }
        if !free.is_empty() {
            self.free(free);
        }
    }
}
