//! A set that is written beside the present one, and proven before it is selected.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::{Building, GENERATION_MASK, GRACE, MemberKey, Phase, Release, Set, Stage, Wanted};
use crate::engine::Engine;
use crate::model::{Backend, BackendId, FailReason, Ifindex, Op, OpError, OpId, Selected, SlotId};
use crate::objects::PolicyId;
use crate::plan::{Trouble, What};
use crate::slots::{size_class, table};

impl Engine {
    /// Whether flows may still stay with a backend that left.
    pub(super) fn drains(&self, id: &BackendId) -> bool {
        self.backends.get(id).is_some_and(|backend| {
            let until = backend.content.drain_until;
            backend.phase == Phase::Draining && until.is_some_and(|until| until > self.now.boot)
        })
    }

    /// Writes the slots of the selected set once more, in their place.
    pub(super) fn rewrite_table(&mut self, slot: SlotId) {
        let Some(set) = self.slots.get(&slot).and_then(|state| state.sets.last()) else {
            return;
        };
        let (base, slots) = (set.selected.base, set.table.clone());
        let op = self.send(What::Slots(slot), None, Op::WriteSlots { base, slots });
        if let Some(state) = self.slots.get_mut(&slot) {
            state.table_out = Some(op);
            state.touched = op;
        }
    }

    /// Writes a new set beside the present one.
    pub(super) fn build(&mut self, id: PolicyId, slot: SlotId, wanted: &BTreeMap<MemberKey, Wanted>) {
        let now = self.now.boot;
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        if slot_state.out() || slot_state.blocked() {
            return;
        }
        let drain = self
            .objects
            .policies
            .get(&id)
            .and_then(|state| state.spec.as_ref())
            .map_or(0, |spec| spec.switchover.drain);
        let length = size_class(wanted.len());
        let known: Vec<BackendId> = slot_state
            .sets
            .iter()
            .rev()
            .flat_map(|set| set.members.values())
            .chain(&slot_state.draining)
            .copied()
            .collect();
        let mut members: BTreeMap<MemberKey, BackendId> = BTreeMap::new();
        let mut revived = BTreeMap::new();
        for backend in known {
            let Some(state) = self.backends.get(&backend) else {
                continue;
            };
            let key = (state.content.ifindex, state.content.token);
            let fits = state.phase != Phase::Freeing
                && wanted
                    .get(&key)
                    .is_some_and(|wanted| wanted.matches(&state.content));
            if !fits {
                continue;
            }
            if let Entry::Vacant(place) = members.entry(key) {
                place.insert(backend);
                if state.phase == Phase::Draining {
                    revived.insert(backend, state.content.drain_until.unwrap_or(now));
                }
            }
        }
        let missing = wanted.len() - members.len();
        if self.backend_ids.available() < missing {
            self.full_arena(slot, "backends", missing as u64, self.config.capacity.backends);
            return;
        }
        let Some(base) = self.arena.take(u32::from(length)) else {
            self.full_arena(slot, "slots", u64::from(length), self.config.capacity.slots);
            return;
        };
        let Some(slot_state) = self.slots.get_mut(&slot) else {
            return;
        };
        let generation = slot_state.last_generation.wrapping_add(1) & GENERATION_MASK;
        slot_state.last_generation = generation;
        let previous = slot_state
            .sets
            .last()
            .map(|set| set.table.clone())
            .unwrap_or_default();
        let old: BTreeMap<MemberKey, BackendId> = slot_state
            .sets
            .iter()
            .flat_map(|set| set.members.iter().map(|(key, id)| (*key, *id)))
            .collect();
        let mut writes: BTreeMap<BackendId, Backend> = BTreeMap::new();
        let mut new = BTreeSet::new();
        for (key, content) in wanted {
            let backend = match members.get(key) {
                Some(backend) => *backend,
                None => {
                    let Some(backend) = self.backend_ids.take() else {
                        continue;
                    };
                    members.insert(*key, backend);
                    new.insert(backend);
                    backend
                }
            };
            writes.insert(
                backend,
                Backend {
                    policy: slot,
                    ifindex: key.0,
                    token: key.1,
                    mac: content.mac,
                    address_v4: content.address_v4,
                    address_v6: content.address_v6,
                    via: content.via,
                    last_generation: generation,
                    drain_until: None,
                },
            );
        }
        // Established flows may stay with who leaves and is still there.
        if drain > 0 {
            for (key, backend) in &old {
                let ready = self
                    .ports
                    .get(&key.0)
                    .and_then(|port| port.ready.as_ref())
                    .is_some_and(|ready| ready.token == key.1);
                if ready
                    && !writes.contains_key(backend)
                    && let Some(state) = self.backends.get(backend)
                {
                    writes.insert(
                        *backend,
                        Backend {
                            drain_until: Some(now.plus(drain)),
                            ..state.content.clone()
                        },
                    );
                }
            }
        }
        for id in &new {
            if let Some(content) = writes.get(id) {
                self.add_backend(*id, content.clone(), Phase::Member);
            }
        }
        for id in members.values() {
            if let Some(state) = self.backends.get_mut(id) {
                state.phase = Phase::Member;
            }
        }
        let table = table(&members, &previous);
        let slots_op = self.send(
            What::Slots(slot),
            None,
            Op::WriteSlots {
                base,
                slots: table.clone(),
            },
        );
        let backends_op = self.write_backends(slot, writes);
        if let Some(slot_state) = self.slots.get_mut(&slot) {
            for id in members.values() {
                slot_state.draining.remove(id);
            }
            slot_state.building = Some(Building {
                set: Set {
                    selected: Selected {
                        base,
                        length,
                        generation,
                    },
                    table,
                    members,
                    torn: false,
                },
                new,
                revived,
                stage: Stage::Writing {
                    backends: Some(backends_op),
                    slots: Some(slots_op),
                },
            });
        }
    }

    fn full_arena(&mut self, slot: SlotId, map: &str, need: u64, have: u32) {
        let error = OpError::Full {
            map: map.to_owned(),
            need: u32::try_from(need).unwrap_or(u32::MAX),
            have,
        };
        if let Some(state) = self.slots.get_mut(&slot) {
            state.trouble = Some(Trouble::of(&error, FailReason::MapFull));
            self.dirty.touched.extend(state.owner);
        }
    }

    /// The next step of a set that is being built.
    pub(super) fn advance(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        let Some(building) = &slot_state.building else {
            return;
        };
        match building.stage {
            Stage::Writing {
                backends: None,
                slots: None,
            } => {
                let device = building.set.members.keys().find_map(|(ifindex, _)| {
                    let port = self.ports.get(ifindex)?;
                    port.device.filter(|_| port.has_program())
                });
                let Some(device) = device else {
                    return;
                };
                let backends = self.contents(&building.set);
                let (selected, slots) = (building.set.selected, building.set.table.clone());
                let op = self.send(
                    What::ProveSet(slot),
                    Some(device),
                    Op::ProveSet {
                        policy: slot,
                        device,
                        selected,
                        backends,
                        slots,
                    },
                );
                if let Some(building) = self.slots.get_mut(&slot).and_then(|s| s.building.as_mut()) {
                    building.stage = Stage::Proving(op);
                }
            }
            Stage::Proven if !slot_state.is_about_to_move() => {}
            // Whoever loses a destination must not reach the new set by it: what is taken away is closed first.
            Stage::Proven if self.has_dirty_ports(slot) => {
                self.dirty.late.insert(id);
            }
            Stage::Proven if slot_state.delivering_on > 0 => {}
            Stage::Proven => {
                let set = building.set.clone();
                let selected = set.selected;
                if let Some(slot_state) = self.slots.get_mut(&slot) {
                    slot_state.building = None;
                }
                self.write_selector(id, slot, selected, Some(set), true);
            }
            Stage::Writing { .. } | Stage::Proving(_) => {}
        }
    }

    fn contents(&self, set: &Set) -> BTreeMap<BackendId, Backend> {
        set.members
            .values()
            .filter_map(|id| self.backends.get(id).map(|state| (*id, state.content.clone())))
            .collect()
    }

    /// Takes a set that is being built back. Says whether nothing of it is out any more.
    pub(super) fn give_up_building(&mut self, slot: SlotId) -> bool {
        let Some(slot_state) = self.slots.get_mut(&slot) else {
            return true;
        };
        let Some(building) = &slot_state.building else {
            return true;
        };
        if building.stage.op().is_some() || !slot_state.backends_out.is_empty() {
            return false;
        }
        let Some(building) = slot_state.building.take() else {
            return true;
        };
        for (id, until) in &building.revived {
            if let Some(state) = self.backends.get_mut(id) {
                state.phase = Phase::Draining;
            }
            if let Some(slot_state) = self.slots.get_mut(&slot) {
                slot_state.draining.insert(*id);
            }
            self.release_at((*until).max(self.now.boot).plus(GRACE), Release::Drained(*id));
        }
        self.retire(slot, building.set, &building.new);
        true
    }

    /// Takes a set out of use; these of its backends go with it.
    pub(super) fn retire(&mut self, slot: SlotId, set: Set, backends: &BTreeSet<BackendId>) {
        let due = self.now.boot.plus(GRACE);
        if set.selected.length > 0 {
            self.release_at(
                due,
                Release::Range(set.selected.base, u32::from(set.selected.length)),
            );
        }
        for id in backends {
            let Some(state) = self.backends.get_mut(id) else {
                continue;
            };
            state.phase = Phase::Draining;
            let until = state.content.drain_until.unwrap_or(self.now.boot);
            if let Some(slot_state) = self.slots.get_mut(&slot) {
                slot_state.draining.insert(*id);
            }
            self.release_at(until.max(self.now.boot).plus(GRACE), Release::Drained(*id));
        }
    }

    pub(super) fn write_backends(&mut self, slot: SlotId, backends: BTreeMap<BackendId, Backend>) -> OpId {
        let ids: Vec<BackendId> = backends.keys().copied().collect();
        for (id, content) in &backends {
            if let Some(state) = self.backends.get_mut(id) {
                state.content = content.clone();
                state.unsure = true;
            }
        }
        let op = self.send(
            What::Backends(slot, ids),
            None,
            Op::WriteBackends {
                backends: backends
                    .into_iter()
                    .map(|(id, content)| (id, Some(content)))
                    .collect(),
            },
        );
        if let Some(state) = self.slots.get_mut(&slot) {
            state.backends_out.insert(op);
            state.touched = op;
        }
        op
    }

    /// What a proof of an intent on this interface must find in the set.
    pub(crate) fn proof_of_set(
        &self,
        slot: SlotId,
        ifindex: Ifindex,
    ) -> Option<(Selected, BTreeMap<BackendId, Backend>)> {
        let slot = self.slots.get(&slot)?;
        let set = slot.selected_set()?;
        let unsure = |id: &BackendId| self.backends.get(id).is_none_or(|backend| backend.unsure);
        if slot.is_about_to_move()
            || slot.table_wrong
            || !slot.backends_out.is_empty()
            || set.members.values().any(unsure)
        {
            return None;
        }
        let backends = self.contents(set);
        let others = backends.values().any(|backend| backend.ifindex != ifindex);
        others.then_some((set.selected, backends))
    }
}
