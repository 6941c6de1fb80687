//! Slots and backends that earlier lives left.

use std::collections::{BTreeMap, BTreeSet};

use super::{BackendState, GRACE, Phase, Release, Set, SlotState, later};
use crate::cell::Cell;
use crate::engine::Engine;
use crate::model::{Adoption, Backend, BackendId, Boot, Ifindex, PolicySlot, Selected, SlotId};

impl Engine {
    /// Takes in what earlier lives left: everything counts as the kernel's own answer.
    pub(crate) fn adopt(&mut self, adoption: Adoption) {
        self.locals.adopt(adoption.locals);
        let ifindexes: BTreeSet<Ifindex> = adoption
            .attached
            .iter()
            .chain(adoption.rows.keys())
            .chain(adoption.sources.keys())
            .chain(adoption.entries.keys())
            .copied()
            .collect();
        for ifindex in ifindexes {
            let before = self.ports.remove(&ifindex).unwrap_or_default();
            let port = before.adopted(
                adoption.attached.contains(&ifindex),
                adoption.rows.get(&ifindex).copied(),
                adoption.sources.get(&ifindex).cloned().unwrap_or_default(),
                adoption.entries.get(&ifindex).cloned().unwrap_or_default(),
                self.interfaces.link(ifindex).map(|link| link.device()),
            );
            self.ports.insert(ifindex, port);
        }
        for (slot, value) in &adoption.policies {
            self.slot_ids.adopt(*slot);
            let mut state = SlotState::new(value.name, value.uid);
            state.cell = Cell::Sure(Some(value.clone()));
            state.last_generation = value.last_set_generation;
            self.slot_by_uid.insert(value.uid, *slot);
            self.slots.insert(*slot, state);
        }
        for (id, backend) in &adoption.backends {
            self.backend_ids.adopt(*id);
            self.add_backend(*id, backend.clone(), Phase::Draining);
            if let Some(state) = self.slots.get_mut(&backend.policy)
                && later(backend.last_generation, state.last_generation)
            {
                // A set that was being built when the earlier life ended.
                state.last_generation = backend.last_generation;
            }
        }
        for (slot, value) in adoption.policies {
            self.adopt_set(slot, value.selected, &adoption.slots);
        }
        let now = self.now.boot;
        let left: Vec<(BackendId, Option<Boot>)> = self
            .backends
            .iter()
            .filter(|(_, state)| state.phase == Phase::Draining)
            .map(|(id, state)| (*id, state.content.drain_until))
            .collect();
        for (id, until) in left {
            if let Some(owner) = self.backends.get(&id).map(|state| state.content.policy)
                && let Some(slot) = self.slots.get_mut(&owner)
            {
                slot.draining.insert(id);
            }
            let due = until.unwrap_or(now).max(now).plus(GRACE);
            self.release_at(due, Release::Drained(id));
        }
        for ifindex in self.ports.keys().copied().collect::<Vec<_>>() {
            self.dirty.ports.insert(ifindex);
        }
    }

    fn adopt_set(&mut self, slot: SlotId, selected: Selected, slots: &BTreeMap<u32, Vec<BackendId>>) {
        let table = slots.get(&selected.base).cloned().unwrap_or_default();
        let table = if selected.length == 0 { Vec::new() } else { table };
        let mut members = BTreeMap::new();
        for id in table.iter().collect::<BTreeSet<_>>() {
            if let Some(state) = self.backends.get_mut(id)
                && state.content.policy == slot
            {
                members.insert((state.content.ifindex, state.content.token), *id);
                state.phase = Phase::Member;
            }
        }
        self.arena.adopt(selected.base, u32::from(selected.length));
        let known: BTreeSet<BackendId> = members.values().copied().collect();
        let torn = !table.iter().all(|id| known.contains(id));
        if let Some(state) = self.slots.get_mut(&slot) {
            state.sets.push(Set {
                selected,
                table,
                members,
                torn,
            });
        }
    }

    /// A policy slot that nobody has asked for: it is nobody's, and goes as such.
    pub(crate) fn adopt_stray_slot(&mut self, slot: SlotId, value: &PolicySlot) {
        self.slot_ids.adopt(slot);
        self.not_released(Release::Slot(slot));
        let mut state = SlotState::new(value.name, value.uid);
        state.cell = Cell::Sure(Some(value.clone()));
        state.last_generation = value.last_set_generation;
        self.slots.insert(slot, state);
        self.dirty.slots.insert(slot);
    }

    /// A backend that nobody has asked for: it is in no set, and is freed.
    pub(crate) fn adopt_stray_backend(&mut self, id: BackendId, content: &Backend) {
        self.backend_ids.adopt(id);
        self.not_released(Release::Backend(id));
        let content = Backend {
            drain_until: None,
            ..content.clone()
        };
        self.add_backend(id, content, Phase::Draining);
        self.release_at(self.now.boot.plus(GRACE), Release::Drained(id));
    }

    pub(super) fn add_backend(&mut self, id: BackendId, content: Backend, phase: Phase) {
        *self
            .backed
            .entry(content.ifindex)
            .or_default()
            .entry(content.policy)
            .or_default() += 1;
        self.backends.insert(
            id,
            BackendState {
                content,
                phase,
                unsure: false,
            },
        );
    }
}
