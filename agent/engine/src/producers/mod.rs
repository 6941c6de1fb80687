//! Producer sets: who is in a policy's set, and how the policy moves from one set to another.
//!
//! A set is never changed: a new one is written beside it, proven, and one write of the policy slot switches.

mod adopt;
mod answers;
mod build;
mod policy;
mod release;
mod switch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::cell::Cell;
use crate::engine::Engine;
use crate::families::Families;
use crate::model::{
    Backend, BackendId, Boot, FailReason, Ifindex, Mac, NameHash, ObjectName, OpId, PolicySlot, PolicySpec,
    Selected, SlotId, Token, UidHash,
};
use crate::objects::{AttachmentId, PolicyId, PolicyState, Served};
use crate::plan::Trouble;
use crate::ports::Ready;

/// What the program may still read for a moment is not given out again before this long.
pub(crate) const GRACE: u64 = Boot::SECOND;
/// Set generations count in 24 bits and wrap.
const GENERATION_MASK: u32 = 0x00ff_ffff;

/// Something of nobody's that could not be cleaned up yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Orphan {
    Slot(SlotId),
    Port(Ifindex),
    Backends,
    Locals,
    Identity(Ifindex, Token),
}

/// Something that comes out of use at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Release {
    /// A policy slot can be given out again.
    Slot(SlotId),
    /// A range of slots can be given out again.
    Range(u32, u32),
    /// A backend has drained: it is to be freed, if it still drains.
    Drained(BackendId),
    /// A backend id can be given out again.
    Backend(BackendId),
}

/// Where a backend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// In a set, or in one that is being built.
    Member,
    /// It left; flows may stay.
    Draining,
    /// To be freed: its turn comes, or the write is out.
    Freeing,
}

/// A backend as it was last written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackendState {
    pub(crate) content: Backend,
    pub(crate) phase: Phase,
    /// The last write of it failed or has not been answered, or an audit found another.
    pub(crate) unsure: bool,
}

/// Which incarnation a member is.
pub(crate) type MemberKey = (Ifindex, Token);

/// What a set must say of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    mac: Mac,
    address_v4: Option<IpAddr>,
    address_v6: Option<IpAddr>,
    via: Option<Ifindex>,
}

/// A set that the selector leads to, or may lead to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Set {
    pub(crate) selected: Selected,
    pub(crate) table: Vec<BackendId>,
    pub(crate) members: BTreeMap<MemberKey, BackendId>,
    /// Slots of it, as an earlier life left them, lead to backends that are not there: it is no set to be kept.
    pub(crate) torn: bool,
}

/// How far a new set is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    /// Backends and slots are being written; what is still out.
    Writing {
        backends: Option<OpId>,
        slots: Option<OpId>,
    },
    /// It is being proven.
    Proving(OpId),
    /// The selector may lead to it.
    Proven,
}

/// A new set beside the old one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Building {
    set: Set,
    /// Backends that are in no other set.
    new: BTreeSet<BackendId>,
    /// Backends that had left already, and until when flows could stay with them.
    revived: BTreeMap<BackendId, Boot>,
    stage: Stage,
}

/// One policy slot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SlotState {
    pub(crate) owner: Option<PolicyId>,
    /// The policy that owns it, or owned it last in this life.
    pub(crate) of: Option<ObjectName>,
    /// That policy is gone.
    pub(crate) policy_gone: bool,
    /// Entries that were removed since.
    pub(crate) removed: u32,
    name: NameHash,
    uid: UidHash,
    pub(crate) cell: Cell<Option<PolicySlot>>,
    /// Sets that the selector may lead to; the last one was sent last.
    pub(crate) sets: Vec<Set>,
    pub(crate) building: Option<Building>,
    /// Backends that left and may still drain.
    pub(crate) draining: BTreeSet<BackendId>,
    last_generation: u32,
    /// What is served once the selector that is out has been written.
    sent: Option<Served>,
    pub(crate) trouble: Option<Trouble>,
    /// The last operation that makes proofs void.
    pub(crate) touched: OpId,
    /// A write of its members' backends is out.
    backends_out: BTreeSet<OpId>,
    /// An audit found another table than the selected set's: it is written anew, and by which operation.
    pub(crate) table_wrong: bool,
    table_out: Option<OpId>,
    /// Interfaces with entries that lead here although nobody wants them to.
    pub(crate) removing: u64,
    /// Those of them with entries that somebody else claims.
    pub(crate) claimed_away: u64,
    /// Interfaces with entries that still deliver by this slot and are about to be closed.
    pub(crate) delivering_on: u64,
}

/// What the intents of a policy see of it. When it changes they are planned again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Face {
    slot: Option<SlotId>,
    value: Option<(Selected, bool)>,
    current: bool,
    waiting: bool,
    ready: BTreeMap<AttachmentId, Families>,
    unreached: Option<String>,
    coming: BTreeSet<AttachmentId>,
    refusal: Option<(FailReason, String)>,
    unread: bool,
    unreadable: Option<String>,
    trouble: Option<Trouble>,
    full: BTreeSet<AttachmentId>,
    settled: bool,
    progressing: bool,
    touched: OpId,
    spec: Option<std::sync::Arc<PolicySpec>>,
    /// It claims nothing yet: the same content under a later generation does.
    outdated: bool,
}

impl SlotState {
    fn new(name: NameHash, uid: UidHash) -> Self {
        Self {
            owner: None,
            of: None,
            policy_gone: false,
            removed: 0,
            name,
            uid,
            cell: Cell::Sure(None),
            sets: Vec::new(),
            building: None,
            draining: BTreeSet::new(),
            last_generation: 0,
            sent: None,
            trouble: None,
            touched: OpId(0),
            backends_out: BTreeSet::new(),
            table_wrong: false,
            table_out: None,
            removing: 0,
            claimed_away: 0,
            delivering_on: 0,
        }
    }

    /// Hash of the uid of its policy.
    pub(crate) const fn uid(&self) -> UidHash {
        self.uid
    }

    /// The set that the selector leads to for sure.
    pub(crate) fn selected_set(&self) -> Option<&Set> {
        match self.cell.sure() {
            Some(Some(_)) => self.sets.last(),
            Some(None) | None => None,
        }
    }

    /// Whether entries may lead here: the kernel has it, with this policy's flags.
    pub(crate) fn in_kernel(&self) -> bool {
        !self.cell.may(Option::is_none)
    }

    /// Whether packets of held consumers may pass.
    pub(crate) fn may_pass(&self) -> bool {
        self.cell
            .may(|value| value.as_ref().is_some_and(|value| value.pass_while_held))
    }

    /// Whether nothing that proofs stand on is in doubt.
    pub(crate) fn settled(&self) -> bool {
        matches!(self.cell.sure(), Some(Some(_)))
            && self.backends_out.is_empty()
            && !self.table_wrong
            && self.trouble.is_none()
    }

    /// Whether its selector moves as soon as nobody is in the way: what would be proven now would be so of the old set.
    pub(crate) fn is_about_to_move(&self) -> bool {
        !self.blocked() && matches!(&self.building, Some(building) if building.stage == Stage::Proven)
    }

    /// Whether nothing of its set is to be tried before its timer says so.
    fn blocked(&self) -> bool {
        self.trouble.as_ref().is_some_and(|trouble| trouble.blocked)
    }

    /// Whether nothing is to be written into the slot itself before its timer says so. That its set finds no room does
    /// not concern it.
    fn slot_blocked(&self) -> bool {
        self.blocked() && !self.is_full()
    }

    /// Whether there is no room for the set that is wanted.
    fn is_full(&self) -> bool {
        let trouble = self.trouble.as_ref();
        trouble.is_some_and(|trouble| trouble.reason == FailReason::MapFull)
    }

    /// Whether packets reach somebody.
    pub(crate) fn serves(&self) -> bool {
        self.sets.last().is_some_and(|set| set.selected.length > 0)
    }

    /// Members that the selector leads to for sure, and that the kernel has as they should be.
    pub(crate) fn members(&self) -> impl Iterator<Item = (MemberKey, BackendId)> + '_ {
        let set = self.selected_set().filter(|_| self.backends_out.is_empty());
        set.into_iter()
            .flat_map(|set| &set.members)
            .map(|(key, id)| (*key, *id))
    }

    /// Whether something is out that will move it on.
    pub(crate) fn out(&self) -> bool {
        !self.cell.idle()
            || self.table_out.is_some()
            || !self.backends_out.is_empty()
            || self
                .building
                .as_ref()
                .is_some_and(|building| building.stage.op().is_some())
    }
}

impl Stage {
    /// An operation that is out.
    const fn op(self) -> Option<OpId> {
        match self {
            Self::Writing {
                backends: Some(op), ..
            }
            | Self::Writing {
                backends: None,
                slots: Some(op),
            }
            | Self::Proving(op) => Some(op),
            Self::Writing {
                backends: None,
                slots: None,
            }
            | Self::Proven => None,
        }
    }
}

impl PolicyState {
    /// Whether a producer that is not the consumer itself is ready.
    pub(crate) fn ready_for(&self, consumer: AttachmentId) -> bool {
        self.others_ready(consumer).next().is_some()
    }

    /// Ready producers other than the consumer itself, and families that each serves.
    fn others_ready(&self, consumer: AttachmentId) -> impl Iterator<Item = Families> + '_ {
        let others = self.ready.iter().filter(move |(ready, _)| **ready != consumer);
        others.map(|(_, families)| *families)
    }

    /// Families of its destinations for which no producer is ready that is not the consumer itself.
    pub(crate) fn lacking_for(&self, consumer: AttachmentId) -> Families {
        let served = self
            .others_ready(consumer)
            .fold(Families::default(), Families::with);
        self.families.without(served)
    }

    /// See [`Engine::is_outdated`].
    fn is_outdated(&self) -> bool {
        let served = self.served.as_ref().map(|served| served.generation);
        served.is_some_and(|served| served > self.spec_generation)
    }

    /// Whether its set is on its way and will come without another event.
    pub(crate) fn progressing(&self, engine: &Engine) -> bool {
        let stands_still = self.current || self.waiting || self.unreadable.is_some() || self.is_outdated();
        if self.ready.is_empty() || stands_still {
            return false;
        }
        match self.slot.and_then(|slot| engine.slots.get(&slot)) {
            Some(slot) => slot.trouble.is_none(),
            None => self.slot_trouble.is_none() && self.unsupported.is_none(),
        }
    }
}

impl Wanted {
    const fn of(ready: &Ready) -> Self {
        Self {
            mac: ready.mac,
            address_v4: ready.address_v4,
            address_v6: ready.address_v6,
            via: ready.via,
        }
    }

    fn matches(&self, backend: &Backend) -> bool {
        self.mac == backend.mac
            && self.address_v4 == backend.address_v4
            && self.address_v6 == backend.address_v6
            && self.via == backend.via
    }
}

/// Families of which packets can be delivered: straight to a peer every one, else those of its addresses.
const fn reached(via: Option<Ifindex>, v4: Option<IpAddr>, v6: Option<IpAddr>) -> Families {
    match via {
        None => Families::BOTH,
        Some(_) => Families {
            v4: v4.is_some(),
            v6: v6.is_some(),
        },
    }
}

impl Ready {
    /// Families for which it can be a producer.
    const fn families(&self) -> Families {
        reached(self.via, self.address_v4, self.address_v6)
    }
}

/// Whether set generation `a` is later than `b` (24 bits, wrapping).
const fn later(a: u32, b: u32) -> bool {
    let ahead = a.wrapping_sub(b) & GENERATION_MASK;
    ahead != 0 && ahead < 0x0080_0000
}
