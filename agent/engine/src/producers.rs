//! Producer sets: who is in a policy's set, and how the policy moves from one set to another.
//!
//! A set is never changed: a new one is written beside it, proven, and one write of the policy slot switches.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::cell::Cell;
use crate::conflict::routes;
use crate::engine::{Engine, Timer};
use crate::families::Families;
use crate::gate::Known;
use crate::model::{
    Adoption, Backend, BackendId, Boot, Delivery, Destination, Device, FailReason, Happening, Ifindex, Level,
    LogLine, Mac, NameHash, ObjectName, OnDeadline, Op, OpError, OpId, OpResult, PolicySlot, PolicySpec,
    Selected, SlotId, Token, UidHash, WhileHeld,
};
use crate::objects::{AttachmentId, PolicyId, PolicyState, Served};
use crate::plan::{Trouble, What};
use crate::ports::Ready;
use crate::slots::{size_class, table};

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
        let blocked = self.trouble.as_ref().is_some_and(|trouble| trouble.blocked);
        !blocked && matches!(&self.building, Some(building) if building.stage == Stage::Proven)
    }

    /// Whether nothing is to be written into the slot itself before its timer says so. That its set finds no room does
    /// not concern it.
    fn blocked(&self) -> bool {
        let trouble = self.trouble.as_ref();
        trouble.is_some_and(|trouble| trouble.blocked && trouble.reason != FailReason::MapFull)
    }

    /// Whether packets reach somebody.
    pub(crate) fn serves(&self) -> bool {
        self.sets.last().is_some_and(|set| set.selected.length > 0)
    }

    /// Members that the selector leads to for sure, and that the kernel has as they should be.
    fn members(&self) -> impl Iterator<Item = (MemberKey, BackendId)> + '_ {
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
        if self.ready.is_empty() || self.current || self.waiting || self.is_outdated() {
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

/// What the data plane does not do yet.
fn unsupported(spec: &PolicySpec, features: crate::model::Features) -> Option<String> {
    if spec.delivery == Delivery::Translate && !features.translate {
        return Some("delivery: Translate comes with a later version; this one delivers Direct".to_owned());
    }
    if spec.max_staleness.is_some() && !features.max_staleness {
        return Some("maxStaleness comes with a later version".to_owned());
    }
    spec.destinations.iter().find_map(|destination| match destination {
        Destination::Prefix { address, length } if !features.prefixes => Some(format!(
            "destination {address}/{length}: prefixes come with a later version, and until then their traffic takes the default path; this one takes an address with protocol and port"
        )),
        Destination::Prefix { .. } | Destination::Service { .. } => None,
    })
}

/// Whether set generation `a` is later than `b` (24 bits, wrapping).
const fn later(a: u32, b: u32) -> bool {
    let ahead = a.wrapping_sub(b) & GENERATION_MASK;
    ahead != 0 && ahead < 0x0080_0000
}

impl Engine {
    // --- adoption ------------------------------------------------------------------------------------------

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
        if let Some(state) = self.slots.get_mut(&slot) {
            state.sets.push(Set {
                selected,
                table,
                members,
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

    fn add_backend(&mut self, id: BackendId, content: Backend, phase: Phase) {
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

    // --- policies ------------------------------------------------------------------------------------------

    /// Plans the set of a policy.
    pub(crate) fn plan_policy(&mut self, id: PolicyId) {
        self.recall_served(id);
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let mut ready: BTreeMap<MemberKey, Wanted> = BTreeMap::new();
        let mut ready_ids = BTreeMap::new();
        let mut coming = BTreeSet::new();
        let mut trouble = false;
        // Until an identity has been read that an earlier life knew, the set stays as that life left it.
        let mut stays = false;
        let mut unreadable = None;
        let mut undeliverable = None;
        let features = self.config.features;
        let families = state.spec.as_deref().map_or_else(Families::default, |spec| {
            Families::of(routes(spec, features).map(|route| route.address()))
        });
        let mut unreached = None;
        for producer in &state.producers {
            let Some(attachment) = self.objects.attachments.get(producer) else {
                continue;
            };
            let Some(port) = attachment.port.and_then(|ifindex| self.ports.get(&ifindex)) else {
                continue;
            };
            trouble |= port.hindered;
            if port.coming && port.winner == Some(*producer) {
                coming.insert(*producer);
            }
            if self.frozen(port) {
                stays = true;
                if matches!(port.known, Known::Unreadable(_)) {
                    unreadable = Some(format!(
                        "the identity of producer {} could not be read yet",
                        attachment.object.name
                    ));
                }
            }
            let Some(member) = port
                .ready
                .as_ref()
                .filter(|member| member.attachment == *producer)
            else {
                continue;
            };
            let Some(ifindex) = attachment.port else {
                continue;
            };
            if member.via.is_some() && !features.neighbour_delivery {
                undeliverable = Some(format!(
                    "producer {} ({}) is not a veth with its peer in another namespace: such producers come with a later version (neighbour delivery)",
                    attachment.object.name, attachment.object.interface
                ));
            }
            let serves = member.families().within(families);
            let lacks = families.without(serves);
            if !lacks.is_empty() {
                let named = Families::of(attachment.object.addresses.iter().copied());
                let why = if lacks.within(named).is_empty() {
                    format!("names none of {lacks}")
                } else {
                    "there is no IPv6 on the way to it".to_owned()
                };
                unreached = Some(format!(
                    "producer {} is reached by its address on interface {}, and {why}",
                    attachment.object.name, attachment.object.interface
                ));
            }
            if serves.is_empty() && features.neighbour_delivery {
                continue;
            }
            ready_ids.insert(*producer, serves);
            ready.insert((ifindex, member.token), Wanted::of(member));
        }
        let several = (ready.len() > 1 && !features.several_producers).then(|| {
            format!(
                "{} producers are ready: more than one comes with a later version",
                ready.len()
            )
        });
        let refused = state
            .spec
            .as_deref()
            .and_then(|spec| unsupported(spec, features))
            .or(undeliverable)
            .or(several);
        let has_intents = !state.intents.is_empty();
        // Whom an outdated content selects says nothing about whom the later one does, nor whether that can be done.
        let outdated = state.is_outdated();
        let knows_content = state.spec.is_some() && !outdated;
        let refused = refused.filter(|_| !outdated);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.unsupported = refused.clone();
            state.families = families;
            state.ready = ready_ids;
            state.supplied.note(!state.ready.is_empty(), self.now.boot);
            state.unreached = unreached;
            state.coming = coming;
            if std::mem::replace(&mut state.producer_trouble, trouble) != trouble {
                if trouble {
                    state.recheck = Some(Backoff::begin(self.now.boot));
                }
                self.dirty.touched.insert(id);
            }
        }
        if self.passed {
            let wanted = has_intents || !knows_content;
            self.plan_slot(id, wanted, knows_content, &ready, stays, unreadable);
        }
        self.look(id);
    }

    fn plan_slot(
        &mut self,
        id: PolicyId,
        wanted: bool,
        knows_content: bool,
        ready: &BTreeMap<MemberKey, Wanted>,
        mut stays: bool,
        mut unreadable: Option<String>,
    ) {
        if !wanted {
            self.timer(Timer::Deadline(id), None);
            if !self.may_remove() {
                return;
            }
            if let Some(state) = self.objects.policies.get_mut(&id) {
                state.slot_trouble = None;
                state.unread = false;
                state.unreadable = None;
                state.current = false;
                state.waiting = false;
                state.waiting_since = None;
                state.served = None;
                if let Some(slot) = state.slot.take() {
                    self.disown(slot);
                }
            }
            return;
        }
        let Some(slot) = self.own_slot(id, knows_content) else {
            return;
        };
        // What is known is older than what is there.
        let outdated = self.is_outdated(id);
        let knows_content = knows_content && !outdated;
        if knows_content {
            let kept = self.kept_slots.remove(&slot);
            if kept && let Some(ports) = self.slot_ports.get(&slot) {
                // What was kept because nobody knew better is judged now.
                self.dirty.ports.extend(ports);
            }
            if kept {
                // No audit has looked at it as long as nothing could be put right there.
                self.audit_slot_at_once(slot);
            }
        } else {
            self.kept_slots.insert(slot);
        }
        for ifindex in self.frozen_members(slot) {
            stays = true;
            if let Some(Known::Unreadable(_)) = self.ports.get(&ifindex).map(|port| &port.known) {
                unreadable = Some(format!(
                    "the identity behind interface {ifindex}, which serves, could not be read yet"
                ));
            }
        }
        stays |= outdated;
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.unread = stays && unreadable.is_none();
            state.unreadable = unreadable;
        }
        if !knows_content {
            return;
        }
        if !stays {
            self.drive(id, slot, ready);
            return;
        }
        self.not_current(id);
        if self.slots.get(&slot).is_some_and(|slot| slot.cell.is(&None)) {
            // There is nothing yet that could stay; destinations can be claimed all the same.
            self.write_selector(id, slot, Selected::default(), None, true);
        }
    }

    /// What an earlier life served, as soon as that is known.
    fn recall_served(&mut self, id: PolicyId) {
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        if self.passed || state.served.is_some() {
            return;
        }
        let uid = (self.config.hashes.uid)(&state.object.uid);
        let slot = self.slot_by_uid.get(&uid).and_then(|slot| self.slots.get(slot));
        let served = slot
            .and_then(|slot| slot.cell.sure()?.as_ref())
            .map(Served::before);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.served = served;
        }
    }

    /// Whether an earlier life served a later generation than the last one that is known and can be used, as after a
    /// saved set: what it wanted is not known, and stays.
    pub(crate) fn is_outdated(&self, id: PolicyId) -> bool {
        self.objects
            .policies
            .get(&id)
            .is_some_and(PolicyState::is_outdated)
    }

    /// The selector does not lead to what this generation wants, or nobody has looked.
    fn not_current(&mut self, id: PolicyId) {
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.current = false;
        }
    }

    /// Interfaces of members of the selected set whose identity an earlier life knew and this one has not read yet.
    fn frozen_members(&self, slot: SlotId) -> BTreeSet<Ifindex> {
        let sets = self.slots.get(&slot).into_iter().flat_map(|slot| &slot.sets);
        sets.flat_map(|set| set.members.keys())
            .map(|(ifindex, _)| *ifindex)
            .filter(|ifindex| self.ports.get(ifindex).is_some_and(|port| self.frozen(port)))
            .collect()
    }

    /// The slot of a policy: the one that an earlier life gave it, or a new one.
    fn own_slot(&mut self, id: PolicyId, may_take: bool) -> Option<SlotId> {
        let state = self.objects.policies.get(&id)?;
        if let Some(slot) = state.slot {
            return Some(slot);
        }
        let uid = (self.config.hashes.uid)(&state.object.uid);
        let name = (self.config.hashes.name)(&state.object.name);
        let known = self.slot_by_uid.get(&uid).copied().filter(|slot| {
            self.slots
                .get(slot)
                .is_some_and(|slot| slot.owner.is_none() && slot.in_kernel())
        });
        let slot = match known {
            Some(slot) => slot,
            None if !may_take => return None,
            None => {
                let Some(slot) = self.slot_ids.take() else {
                    let have = self.config.capacity.policies;
                    let error = OpError::Full {
                        map: "policies".to_owned(),
                        need: have + 1,
                        have,
                    };
                    self.no_room(id, &error);
                    return None;
                };
                self.slots.insert(slot, SlotState::new(name, uid));
                self.slot_by_uid.insert(uid, slot);
                slot
            }
        };
        let of = state.object.name.clone();
        let value = {
            let slot_state = self.slots.get_mut(&slot)?;
            slot_state.owner = Some(id);
            slot_state.of = Some(of);
            slot_state.policy_gone = false;
            slot_state.removed = 0;
            slot_state.name = name;
            slot_state.trouble = None;
            slot_state.cell.sure().cloned().flatten()
        };
        self.settled_orphan(Orphan::Slot(slot));
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.slot = Some(slot);
            state.slot_trouble = None;
            if let Some(value) = value {
                state.waiting_since = value.waiting_since;
                state.served = Some(Served::before(&value));
            }
        }
        // Entries that lead there have an owner again.
        if let Some(ports) = self.slot_ports.get(&slot) {
            self.dirty.ports.extend(ports);
        }
        Some(slot)
    }

    fn no_room(&mut self, id: PolicyId, error: &OpError) {
        let trouble = Trouble::of(error, FailReason::MapFull);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.slot_trouble = Some(trouble);
            self.dirty.touched.insert(id);
        }
    }

    /// What nobody owns any more is removed once no entry leads there.
    pub(crate) fn disown(&mut self, slot: SlotId) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.owner = None;
            // To remove it is a new operation, whatever failed before.
            state.trouble = None;
        }
        self.kept_slots.remove(&slot);
        if let Some(ports) = self.slot_ports.get(&slot) {
            self.dirty.ports.extend(ports);
        }
        self.dirty.slots.insert(slot);
    }

    /// Members of the serving set that are still the same ready incarnation, selected or not.
    fn still_ready(&self, slot: &SlotState, families: Families) -> BTreeMap<MemberKey, Wanted> {
        slot.sets
            .iter()
            .flat_map(|set| set.members.keys())
            .filter_map(|(ifindex, token)| {
                let ready = self.ports.get(ifindex)?.ready.as_ref()?;
                let serves = ready.token == *token && !ready.families().within(families).is_empty();
                serves.then(|| ((*ifindex, *token), Wanted::of(ready)))
            })
            .collect()
    }

    /// Families for which the selector leads to a member that is like this.
    pub(crate) fn families_reached(&self, slot: &SlotState, like: impl Fn(MemberKey) -> bool) -> Families {
        slot.members()
            .filter(|(member, _)| like(*member))
            .filter_map(|(_, id)| self.backends.get(&id))
            .map(|BackendState { content, .. }| reached(content.via, content.address_v4, content.address_v6))
            .fold(Families::default(), Families::with)
    }

    /// Moves a policy towards the set that it wants.
    fn drive(&mut self, id: PolicyId, slot: SlotId, ready: &BTreeMap<MemberKey, Wanted>) {
        let now = self.now;
        let (Some(state), Some(slot_state)) = (self.objects.policies.get(&id), self.slots.get(&slot)) else {
            return;
        };
        let Some(spec) = state.spec.clone() else {
            return;
        };
        if slot_state.cell.is(&None) {
            // The slot comes first, empty: from now on destinations can be claimed.
            self.write_selector(id, slot, Selected::default(), None, true);
            return;
        }
        if self.passes_wrongly(slot, &spec) {
            // Whoever is held leaks until this is written: nothing goes before it, and nobody looks at the set.
            let selected = slot_state
                .cell
                .sure()
                .and_then(|value| value.as_ref().map(|v| v.selected));
            self.write_selector(id, slot, selected.unwrap_or_default(), None, false);
            self.not_current(id);
            return;
        }
        if state.unsupported.is_some() {
            // Nobody is served; the slot is there for the claims, which stay closed.
            self.timer(Timer::Deadline(id), None);
            if let Some(state) = self.objects.policies.get_mut(&id) {
                state.waiting = false;
                state.waiting_since = None;
            }
            self.move_to(id, slot, &BTreeMap::new());
            return;
        }
        let serving = self.still_ready(slot_state, state.families);
        let waits = ready.is_empty() && !serving.is_empty();
        let since = if ready.is_empty() {
            state.waiting_since.or(waits.then_some(now.boot))
        } else {
            None
        };
        let deadline = since.map(|since| since.plus(spec.switchover.deadline));
        let overdue = waits && deadline.is_some_and(|deadline| now.boot >= deadline);
        let cut = overdue && spec.switchover.on_deadline == OnDeadline::Cut;
        let wanted = match (waits, cut) {
            (false, _) => ready.clone(),
            (true, false) => serving,
            (true, true) => BTreeMap::new(),
        };
        self.timer(Timer::Deadline(id), deadline.filter(|_| waits && !overdue));
        // A switch that was cut off waits on: there is no set of this generation to serve.
        let was_cut = ready.is_empty() && since.is_some() && !waits;
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.waiting = waits || (was_cut && state.waiting);
            state.waiting_since = since;
            if !waits && ready.is_empty() && !state.waiting {
                state.overdue_said = false;
            }
            if overdue && !state.overdue_said {
                state.overdue_said = true;
                self.out.log.push(LogLine {
                    level: Level::Info,
                    what: Happening::SwitchOverdue(spec.switchover.on_deadline),
                    policy: Some(state.object.name.clone()),
                    consumer: None,
                    ifindex: None,
                });
            }
            if !ready.is_empty() {
                state.overdue_said = false;
            }
        }
        self.move_to(id, slot, &wanted);
    }

    /// Whether a slot lets packets of held consumers pass although its policy does not any more, and can be written.
    fn passes_wrongly(&self, slot: SlotId, spec: &PolicySpec) -> bool {
        self.slots.get(&slot).is_some_and(|slot| {
            matches!(slot.cell.sure(), Some(Some(value)) if value.pass_while_held)
                && spec.while_held == WhileHeld::Drop
                && !slot.blocked()
        })
    }

    /// Brings the selected set to exactly these members.
    fn move_to(&mut self, id: PolicyId, slot: SlotId, wanted: &BTreeMap<MemberKey, Wanted>) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        let right = |set: &Set| {
            set.members.len() == wanted.len()
                && usize::from(size_class(set.members.len())) == set.table.len()
                && wanted.iter().all(|(key, wanted)| {
                    set.members
                        .get(key)
                        .and_then(|id| self.backends.get(id))
                        .is_some_and(|backend| wanted.matches(&backend.content))
                })
        };
        let last_right = slot_state.sets.last().is_some_and(right);
        let building_right = slot_state
            .building
            .as_ref()
            .is_some_and(|building| right(&building.set));
        let sure = slot_state.cell.sure().is_some();
        if !slot_state.cell.idle() {
            // What a switch waits with is right as long as it waits, and yet is no set of this generation: it entitles
            // nobody, whatever is being written.
            let waiting = self.objects.policies.get(&id).is_some_and(|state| state.waiting);
            if !last_right || waiting {
                self.not_current(id);
            }
            return;
        }
        if last_right {
            self.give_up_building(slot);
            if sure {
                self.keep_set(id, slot);
            } else {
                // The write of this very selector failed: once more.
                self.resend_selector(id, slot);
            }
            return;
        }
        self.not_current(id);
        if wanted.is_empty() {
            self.give_up_building(slot);
            self.select_nothing(id, slot);
            return;
        }
        if building_right {
            self.advance(id, slot);
        } else if self.give_up_building(slot) {
            self.build(id, slot, wanted);
        }
    }

    /// The selector leads where it should. What else the slot and its backends say is brought up to date.
    fn keep_set(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        let blocked = slot_state.trouble.as_ref().is_some_and(|trouble| trouble.blocked);
        if slot_state.table_wrong {
            if slot_state.table_out.is_none() && !blocked {
                self.rewrite_table(slot);
            }
            self.not_current(id);
            return;
        }
        let unsure: Vec<BackendId> = slot_state
            .sets
            .last()
            .into_iter()
            .flat_map(|set| set.members.values())
            .chain(slot_state.draining.iter().filter(|id| self.drains(id)))
            .filter(|id| self.backends.get(id).is_some_and(|backend| backend.unsure))
            .copied()
            .collect();
        if !unsure.is_empty() {
            if slot_state.backends_out.is_empty() && !blocked {
                let backends = unsure
                    .into_iter()
                    .filter_map(|id| self.backends.get(&id).map(|state| (id, state.content.clone())))
                    .collect();
                self.write_backends(slot, backends);
            }
            self.not_current(id);
            return;
        }
        let Some(state) = self.objects.policies.get_mut(&id) else {
            return;
        };
        if !state.waiting {
            let generation = state.spec_generation;
            match &mut state.served {
                Some(served) if served.generation == generation => served.spec = state.spec.clone(),
                served => {
                    *served = Some(Served {
                        generation,
                        since_ms: self.now.wall_ms,
                        spec: state.spec.clone(),
                    });
                }
            }
        }
        state.current = !state.waiting;
        let Some(Some(value)) = slot_state.cell.sure() else {
            return;
        };
        let pass = state
            .spec
            .as_ref()
            .is_some_and(|spec| spec.while_held == WhileHeld::Pass);
        if pass && !value.pass_while_held && self.has_dirty_ports(slot) {
            // It cannot be said yet; it can once those are planned.
            self.dirty.late.insert(id);
        }
        let pass = pass && (value.pass_while_held || self.may_pass(id, slot));
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let described = value.pass_while_held == pass
            && value.waiting_since == state.waiting_since
            && value.uid == slot_state.uid
            && value.name == slot_state.name;
        if described {
            if let Some(slot_state) = self.slots.get_mut(&slot)
                && slot_state.building.is_none()
            {
                slot_state.trouble = None;
            }
        } else if !blocked {
            let selected = value.selected;
            self.write_selector(id, slot, selected, None, false);
        }
    }

    /// Whether flows may still stay with a backend that left.
    fn drains(&self, id: &BackendId) -> bool {
        self.backends.get(id).is_some_and(|backend| {
            let until = backend.content.drain_until;
            backend.phase == Phase::Draining && until.is_some_and(|until| until > self.now.boot)
        })
    }

    /// Writes the slots of the selected set once more, in their place.
    fn rewrite_table(&mut self, slot: SlotId) {
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

    /// Whether this slot may let packets of held consumers pass: not while entries still lead to it that are
    /// somebody else's by now, whose policy may say Drop.
    fn may_pass(&self, id: PolicyId, slot: SlotId) -> bool {
        let planned = self
            .objects
            .policies
            .get(&id)
            .is_some_and(|state| state.face.as_ref().is_some_and(|face| face.spec == state.spec));
        if !self.slot_ports.contains_key(&slot) {
            return true;
        }
        planned
            && !self.has_dirty_ports(slot)
            && self.slots.get(&slot).is_some_and(|state| state.claimed_away == 0)
    }

    /// Whether interfaces with entries that lead to this slot are still to be planned.
    fn has_dirty_ports(&self, slot: SlotId) -> bool {
        self.slot_ports
            .get(&slot)
            .is_some_and(|ports| ports.iter().any(|ifindex| self.dirty.ports.contains(ifindex)))
    }

    fn resend_selector(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        // What was taken back of a later set may still be writing into backends of this one.
        if slot_state.out() || slot_state.trouble.as_ref().is_some_and(|trouble| trouble.blocked) {
            return;
        }
        if let Some(selected) = slot_state.sets.last().map(|set| set.selected) {
            self.write_selector(id, slot, selected, None, true);
        }
    }

    /// Nobody is left (or the old set is cut off): the empty set.
    fn select_nothing(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get_mut(&slot) else {
            return;
        };
        if slot_state.out() || slot_state.trouble.as_ref().is_some_and(|trouble| trouble.blocked) {
            return;
        }
        let generation = slot_state.last_generation.wrapping_add(1) & GENERATION_MASK;
        slot_state.last_generation = generation;
        let selected = Selected {
            base: 0,
            length: 0,
            generation,
        };
        let set = Set {
            selected,
            table: Vec::new(),
            members: BTreeMap::new(),
        };
        self.write_selector(id, slot, selected, Some(set), true);
    }

    /// Writes a new set beside the present one.
    fn build(&mut self, id: PolicyId, slot: SlotId, wanted: &BTreeMap<MemberKey, Wanted>) {
        let now = self.now.boot;
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        if slot_state.out() || slot_state.trouble.as_ref().is_some_and(|trouble| trouble.blocked) {
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
    fn advance(&mut self, id: PolicyId, slot: SlotId) {
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
    fn give_up_building(&mut self, slot: SlotId) -> bool {
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
    fn retire(&mut self, slot: SlotId, set: Set, backends: &BTreeSet<BackendId>) {
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

    fn write_backends(&mut self, slot: SlotId, backends: BTreeMap<BackendId, Backend>) -> OpId {
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

    /// Writes the policy slot. `set`: the selector leads there from now on. `moves`: not where it led before.
    fn write_selector(
        &mut self,
        id: PolicyId,
        slot: SlotId,
        selected: Selected,
        set: Option<Set>,
        moves: bool,
    ) {
        let wall_ms = self.now.wall_ms;
        let may_pass = self.may_pass(id, slot);
        let (Some(state), Some(slot_state)) = (self.objects.policies.get(&id), self.slots.get_mut(&slot))
        else {
            return;
        };
        if slot_state.blocked() {
            return;
        }
        // A selector that moves serves the present generation, unless that one still waits.
        let served = match &state.served {
            Some(served) if !moves || state.waiting => served.clone(),
            Some(served) if served.generation == state.spec_generation => Served {
                spec: state.spec.clone(),
                ..served.clone()
            },
            Some(_) | None => Served {
                generation: state.spec_generation,
                since_ms: wall_ms,
                spec: state.spec.clone(),
            },
        };
        let value = PolicySlot {
            name: slot_state.name,
            uid: slot_state.uid,
            selected,
            pass_while_held: state
                .spec
                .as_ref()
                .is_some_and(|spec| spec.while_held == WhileHeld::Pass)
                && (may_pass || matches!(slot_state.cell.sure(), Some(Some(value)) if value.pass_while_held)),
            served_generation: served.generation,
            served_since_ms: served.since_ms,
            waiting_since: state.waiting_since,
            last_set_generation: slot_state.last_generation,
        };
        if slot_state.sets.is_empty() && set.is_none() {
            slot_state.sets.push(Set {
                selected,
                table: Vec::new(),
                members: BTreeMap::new(),
            });
        }
        slot_state.sets.extend(set);
        let op = self.send(
            What::Policy(slot),
            None,
            Op::WritePolicy {
                slot,
                value: Some(value.clone()),
            },
        );
        if let Some(slot_state) = self.slots.get_mut(&slot) {
            slot_state.cell.send(op, Some(value));
            slot_state.sent = moves.then_some(served);
            slot_state.touched = op;
        }
    }

    /// Devices of the producers of a policy that are ready.
    pub(crate) fn devices_of_ready(&self, policy: &PolicyState) -> BTreeSet<Ifindex> {
        let ready = policy.ready.keys();
        ready
            .filter_map(|id| self.objects.attachments.get(id)?.port)
            .collect()
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

    // --- answers -------------------------------------------------------------------------------------------

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

    fn free(&mut self, ids: Vec<BackendId>) {
        let backends = ids.iter().map(|id| (*id, None)).collect();
        self.send(What::Free(ids), None, Op::WriteBackends { backends });
    }

    // --- slots of nobody -----------------------------------------------------------------------------------

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
        if state.trouble.as_ref().is_some_and(|trouble| trouble.blocked) {
            return;
        }
        let op = self.send(What::Policy(slot), None, Op::WritePolicy { slot, value: None });
        if let Some(state) = self.slots.get_mut(&slot) {
            state.cell.send(op, None);
            state.touched = op;
        }
    }

    /// The kernel has nothing in this slot any more.
    fn slot_free(&mut self, slot: SlotId) {
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
    fn not_released(&mut self, release: Release) {
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

    // --- face ----------------------------------------------------------------------------------------------

    /// Compares what the intents of a policy see of it, and has them planned again if it changed.
    fn look(&mut self, id: PolicyId) {
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let outdated = state.is_outdated();
        let another = |face: &Face| face.spec != state.spec || face.outdated != outdated;
        if state.face.as_ref().is_none_or(another) {
            // Once its interfaces are planned by the new content, it may let held consumers pass.
            self.dirty.late.insert(id);
        }
        let slot = state.slot.and_then(|slot| self.slots.get(&slot));
        let face = Face {
            slot: state.slot,
            value: slot
                .and_then(|slot| slot.cell.sure().cloned().flatten())
                .map(|value| (value.selected, value.pass_while_held)),
            current: state.current,
            waiting: state.waiting,
            ready: state.ready.clone(),
            unreached: state.unreached.clone(),
            coming: state.coming.clone(),
            refusal: state
                .refusal()
                .map(|(reason, message)| (reason, message.to_owned())),
            unread: state.unread,
            unreadable: state.unreadable.clone(),
            trouble: state
                .slot_trouble
                .clone()
                .or_else(|| slot.and_then(|slot| slot.trouble.clone())),
            full: state.full.clone(),
            settled: slot.is_some_and(SlotState::settled),
            progressing: state.progressing(self),
            touched: slot.map_or(OpId(0), |slot| slot.touched),
            spec: state.spec.clone(),
            outdated,
        };
        if state.face.as_ref() == Some(&face) {
            return;
        }
        let consumers: Vec<AttachmentId> = state.intents.keys().copied().collect();
        if let Some(state) = self.objects.policies.get_mut(&id) {
            let other = state
                .face
                .as_ref()
                .is_none_or(|before| before.value != face.value || before.spec != face.spec);
            state.face = Some(face);
            if other {
                // What was disproved of another set, or of another content, says nothing about this one.
                for intent in state.intents.values_mut() {
                    intent.proof_trouble = None;
                }
            }
        }
        for consumer in consumers {
            self.dirty_attachment(consumer);
        }
        self.dirty.touched.insert(id);
    }
}
