//! Operations that are out: what they write, and what they stand on.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use holdfast_engine::model::{BackendId, Boot, Ifindex, Op, RouteKey, SlotId};

use crate::kernel::Kernel;
use crate::rules::{Triple, Wants};

/// What was known when an operation was sent.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) wants: Rc<Wants>,
    /// Who may reach whom: see [`crate::oracle::Oracle::granted`].
    pub(crate) granted: Rc<BTreeSet<Triple>>,
}

/// An operation without an answer.
#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub(crate) op: Op,
    pub(crate) sent: Boot,
    /// For those about a device: which one its number stood for when it was sent ([`crate::told::Told::devices`]).
    pub(crate) device: BTreeMap<Ifindex, u64>,
    pub(crate) context: Context,
}

/// Something of which at most one operation may be out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Item {
    Program(Ifindex),
    Row(Ifindex),
    Sources(Ifindex),
    Locals,
    Entry(Ifindex, RouteKey),
    Entries(Ifindex),
    Policy(SlotId),
    Backend(BackendId),
    /// First and number.
    Slots(u32, u32),
    Identity(Ifindex),
    ProofOf(Ifindex, SlotId),
    ProofOfSet(SlotId),
}

impl Item {
    pub(crate) fn overlaps(self, other: Self) -> bool {
        match (self, other) {
            (Self::Entries(a), Self::Entry(b, _) | Self::Entries(b))
            | (Self::Entry(a, _), Self::Entries(b)) => a == b,
            (Self::Slots(a, m), Self::Slots(b, n)) => a < b + n && b < a + m,
            (a, b) => a == b,
        }
    }
}

/// Whether two lists have something in common.
pub(crate) fn overlap(some: &[Item], others: &[Item]) -> Option<Item> {
    some.iter()
        .copied()
        .find(|item| others.iter().any(|other| item.overlaps(*other)))
}

/// What an operation changes (or, for a proof, the question that it is).
pub(crate) fn writes(op: &Op) -> Vec<Item> {
    match op {
        Op::Attach { device } => vec![Item::Program(device.ifindex)],
        Op::Detach { ifindex } => vec![Item::Program(*ifindex)],
        Op::ClearInterface { ifindex } => vec![
            Item::Row(*ifindex),
            Item::Sources(*ifindex),
            Item::Entries(*ifindex),
        ],
        Op::WriteRow { ifindex, .. } => vec![Item::Row(*ifindex)],
        Op::WriteSources { ifindex, .. } => vec![Item::Sources(*ifindex)],
        Op::WriteLocals { .. } => vec![Item::Locals],
        Op::WriteEntries { ifindex, entries } => {
            entries.keys().map(|key| Item::Entry(*ifindex, *key)).collect()
        }
        Op::DeleteEntries { ifindex, keys } => keys.iter().map(|key| Item::Entry(*ifindex, *key)).collect(),
        Op::WriteBackends { backends } => backends.keys().map(|id| Item::Backend(*id)).collect(),
        Op::WriteSlots { base, slots } => vec![Item::Slots(*base, slots.len() as u32)],
        Op::WritePolicy { slot, .. } => vec![Item::Policy(*slot)],
        Op::DeleteIdentity { ifindex, .. } => vec![Item::Identity(*ifindex)],
        Op::ProveSet { policy, .. } => vec![Item::ProofOfSet(*policy)],
        Op::ProveIntent(proof) => {
            let of = |slot| Item::ProofOf(proof.device.ifindex, slot);
            proof.policies().into_iter().map(of).collect()
        }
    }
}

/// What an operation stands on: nothing of this may be unanswered when it is sent.
pub(crate) fn stands_on(op: &Op, kernel: &Kernel) -> Vec<Item> {
    match op {
        Op::Attach { device } => vec![Item::Row(device.ifindex), Item::Entries(device.ifindex)],
        Op::WriteEntries { ifindex, entries } => {
            let row_open = kernel.rows.get(ifindex).is_some_and(|row| row.token.is_some());
            entries
                .values()
                .filter(|entry| entry.open && row_open)
                .map(|entry| Item::Policy(entry.policy))
                .collect()
        }
        Op::WritePolicy { slot, value } => {
            let selected = value.as_ref().map(|value| value.selected).unwrap_or_default();
            let before = kernel
                .policies
                .get(slot)
                .map(|policy| policy.selected)
                .unwrap_or_default();
            if selected.length == 0 || selected == before {
                return Vec::new();
            }
            let mut items = vec![Item::Slots(selected.base, u32::from(selected.length))];
            items.extend(kernel.members(selected).iter().map(|id| Item::Backend(*id)));
            items
        }
        Op::ProveSet {
            policy,
            device,
            selected,
            backends,
            ..
        } => {
            let mut items = vec![
                Item::Program(device.ifindex),
                Item::Policy(*policy),
                Item::Slots(selected.base, u32::from(selected.length)),
            ];
            items.extend(backends.keys().map(|id| Item::Backend(*id)));
            items
        }
        Op::ProveIntent(proof) => {
            let ifindex = proof.device.ifindex;
            let mut items = vec![
                Item::Program(ifindex),
                Item::Row(ifindex),
                Item::Sources(ifindex),
                Item::Slots(proof.selected.base, u32::from(proof.selected.length)),
            ];
            let asked = proof.entries.keys().chain(proof.takeovers.keys());
            items.extend(asked.map(|key| Item::Entry(ifindex, *key)));
            items.extend(proof.policies().into_iter().map(Item::Policy));
            items.extend(proof.backends.keys().map(|id| Item::Backend(*id)));
            items
        }
        _ => Vec::new(),
    }
}
