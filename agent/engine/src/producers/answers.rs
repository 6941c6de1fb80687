//! What the kernel answered about slots, backends and sets.

use std::collections::BTreeSet;

use super::{GRACE, Orphan, Phase, Release, Stage};
use crate::engine::Engine;
use crate::model::{Backend, BackendId, Device, FailReason, OpError, OpId, OpResult, SlotId};
use crate::plan::Trouble;

impl Engine {
    fn slot_answered(&mut self, slot: SlotId, error: Option<OpError>) {
        let owner = self.slots.get(&slot).and_then(|state| state.owner);
        match owner {
            Some(owner) => self.dirty.policies.insert(owner),
            None => self.dirty.slots.insert(slot),
        };
        if let Some(error) = error {
            if let Some(state) = self.slots.get_mut(&slot) {
                state.trouble = Some(Trouble::of(&error, FailReason::MapWriteFailed));
            }
            if owner.is_none() {
                self.orphaned(Orphan::Slot(slot));
            }
        }
    }

    pub(crate) fn backends_answered(&mut self, op: OpId, slot: SlotId, ids: &[BackendId], result: OpResult) {
        let ok = result.is_ok();
        if ok {
            for id in ids {
                if let Some(state) = self.backends.get_mut(id) {
                    state.unsure = false;
                }
            }
        }
        if let Some(state) = self.slots.get_mut(&slot) {
            state.backends_out.remove(&op);
            if let Some(building) = &mut state.building
                && let Stage::Writing { backends, .. } = &mut building.stage
                && *backends == Some(op)
            {
                *backends = None;
            }
        }
        let mut due: Vec<BackendId> = ids.to_vec();
        due.retain(|id| {
            let state = self.backends.get(id);
            state.is_some_and(|state| state.phase == Phase::Freeing)
        });
        if !due.is_empty() {
            self.free(due);
        }
        self.built(slot, ok);
        self.slot_answered(slot, result.err());
    }

    pub(crate) fn slots_answered(&mut self, op: OpId, slot: SlotId, result: OpResult) {
        if let Some(state) = self
            .slots
            .get_mut(&slot)
            .filter(|state| state.table_out == Some(op))
        {
            state.table_out = None;
            if result.is_ok() {
                state.table_wrong = false;
                state.trouble = None;
            }
            self.slot_answered(slot, result.err());
            return;
        }
        if let Some(building) = self
            .slots
            .get_mut(&slot)
            .and_then(|state| state.building.as_mut())
            && let Stage::Writing { slots, .. } = &mut building.stage
            && *slots == Some(op)
        {
            *slots = None;
        }
        self.built(slot, result.is_ok());
        self.slot_answered(slot, result.err());
    }

    /// A step of a set that is being built failed: it is not used; the next attempt is another set.
    fn built(&mut self, slot: SlotId, ok: bool) {
        if let Some(state) = self.slots.get_mut(&slot)
            && !ok
            && let Some(building) = &mut state.building
        {
            // No set is right for it: it is taken back as soon as nothing of it is out.
            building.set.members.clear();
        }
    }

    pub(crate) fn set_proof_answered(
        &mut self,
        op: OpId,
        slot: SlotId,
        device: Option<Device>,
        result: OpResult,
    ) {
        if let Some(state) = self.slots.get_mut(&slot)
            && let Some(building) = &mut state.building
            && building.stage == Stage::Proving(op)
        {
            if result.is_ok() {
                building.stage = Stage::Proven;
                state.trouble = None;
            } else {
                building.stage = Stage::Writing {
                    backends: None,
                    slots: None,
                };
                building.set.members.clear();
            }
        }
        match result {
            Err(OpError::NoDevice) => {
                self.no_device(op, device);
                self.slot_answered(slot, None);
            }
            Err(error) => {
                let of_this_device = |device: &Device| {
                    self.ports
                        .get(&device.ifindex)
                        .is_some_and(|port| port.is_of_this_device(op))
                };
                if let (OpError::Detached { .. }, Some(device)) = (&error, device.filter(of_this_device)) {
                    self.program_gone(device.ifindex);
                }
                self.slot_answered(slot, Some(error.clone()));
                if let Some(state) = self.slots.get_mut(&slot) {
                    state.trouble = Some(Trouble::of(&error, FailReason::ProofFailed));
                }
            }
            Ok(_) => self.slot_answered(slot, None),
        }
    }

    pub(crate) fn selector_answered(&mut self, op: OpId, slot: SlotId, result: OpResult) {
        let Some(state) = self.slots.get_mut(&slot) else {
            return;
        };
        if let Err(error) = result {
            state.cell.failed(op);
            self.slot_answered(slot, Some(error));
            return;
        }
        state.cell.done(op);
        state.trouble = None;
        if state.cell.is(&None) {
            self.slot_free(slot);
            return;
        }
        let mut sets = std::mem::take(&mut state.sets);
        let last = sets.pop();
        if !sets.is_empty() {
            state.table_wrong = false;
        }
        let staying: BTreeSet<BackendId> = last
            .iter()
            .flat_map(|set| set.members.values().copied())
            .collect();
        state.sets.extend(last);
        let owner = state.owner;
        for set in sets {
            let left: BTreeSet<BackendId> = set
                .members
                .values()
                .filter(|id| !staying.contains(id))
                .copied()
                .collect();
            self.retire(slot, set, &left);
        }
        // Whatever was selected on the strength of this generation now serves it.
        let sent = self.slots.get_mut(&slot).and_then(|state| state.sent.take());
        if let Some(state) = owner.and_then(|owner| self.objects.policies.get_mut(&owner))
            && sent.is_some()
        {
            state.served = sent;
        }
        self.slot_answered(slot, None);
    }

    pub(crate) fn free_answered(&mut self, ids: Vec<BackendId>, result: OpResult) {
        if result.is_err() {
            self.orphaned(Orphan::Backends);
            return;
        }
        let due = self.now.boot.plus(GRACE);
        for id in ids {
            let Some(state) = self.backends.remove(&id) else {
                continue;
            };
            let Backend { ifindex, policy, .. } = state.content;
            if let Some(slots) = self.backed.get_mut(&ifindex) {
                if let Some(count) = slots.get_mut(&policy) {
                    *count -= 1;
                    if *count == 0 {
                        slots.remove(&policy);
                    }
                }
                if slots.is_empty() {
                    self.backed.remove(&ifindex);
                }
            }
            if let Some(slot) = self.slots.get_mut(&policy) {
                slot.draining.remove(&id);
            }
            self.release_at(due, Release::Backend(id));
        }
        let left = |engine: &Self| {
            let mut phases = engine.backends.values().map(|state| state.phase);
            phases.any(|phase| phase == Phase::Freeing)
        };
        if self.orphans.contains(&Orphan::Backends) && !left(self) {
            self.settled_orphan(Orphan::Backends);
        }
    }
}
