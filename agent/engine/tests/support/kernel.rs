//! A kernel that does what it is told: enough to hand its pins to the next life of an engine.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::*;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    pub pins: Adoption,
    slots: BTreeMap<u32, BackendId>,
}

impl Kernel {
    /// Carries one operation out.
    pub fn carry_out(&mut self, op: &Op) {
        let pins = &mut self.pins;
        match op {
            Op::Attach { device } => {
                pins.attached.insert(device.ifindex);
            }
            Op::Detach { ifindex } => {
                pins.attached.remove(ifindex);
            }
            Op::ClearInterface { ifindex } => {
                pins.rows.remove(ifindex);
                pins.sources.remove(ifindex);
                pins.entries.remove(ifindex);
            }
            Op::WriteRow { ifindex, row } => {
                pins.rows.insert(*ifindex, *row);
            }
            Op::WriteSources { ifindex, add, delete } => {
                let sources = pins.sources.entry(*ifindex).or_default();
                sources.extend(add);
                sources.retain(|address| !delete.contains(address));
                if sources.is_empty() {
                    pins.sources.remove(ifindex);
                }
            }
            Op::WriteLocals { add, delete } => {
                pins.locals.extend(add);
                pins.locals.retain(|address| !delete.contains(address));
            }
            Op::WriteEntries { ifindex, entries } => {
                pins.entries.entry(*ifindex).or_default().extend(entries);
            }
            Op::DeleteEntries { ifindex, keys } => {
                let entries = pins.entries.entry(*ifindex).or_default();
                entries.retain(|key, _| !keys.contains(key));
                if entries.is_empty() {
                    pins.entries.remove(ifindex);
                }
            }
            Op::WriteBackends { backends } => {
                for (id, backend) in backends {
                    match backend {
                        Some(backend) => pins.backends.insert(*id, backend.clone()),
                        None => pins.backends.remove(id),
                    };
                }
            }
            Op::WriteSlots { base, slots } => {
                for (slot, backend) in (*base..).zip(slots) {
                    self.slots.insert(slot, *backend);
                }
            }
            Op::WritePolicy { slot, value } => {
                match value {
                    Some(value) => pins.policies.insert(*slot, value.clone()),
                    None => pins.policies.remove(slot),
                };
            }
            Op::DeleteIdentity { .. } | Op::ProveSet { .. } | Op::ProveIntent(_) => {}
        }
    }

    /// Somebody writes a slot.
    pub fn set_slot(&mut self, slot: u32, backend: BackendId) {
        self.slots.insert(slot, backend);
    }

    /// What the next life reads back. Links of devices that are gone are not alive.
    pub fn adoption(&self, devices: &BTreeSet<Ifindex>) -> Adoption {
        let mut pins = self.pins.clone();
        pins.attached.retain(|ifindex| devices.contains(ifindex));
        for value in pins.policies.values() {
            let Selected { base, length, .. } = value.selected;
            if length > 0 {
                let slots = (base..base + u32::from(length))
                    .map(|slot| self.slots.get(&slot).copied().unwrap_or(0))
                    .collect();
                pins.slots.insert(base, slots);
            }
        }
        pins
    }
}
