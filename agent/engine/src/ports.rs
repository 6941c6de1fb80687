//! One interface: its program, consumer row, source addresses and route entries, and what is done about them.
//!
//! Planning is level-triggered: it compares what is wanted with what the kernel answered, and sends what
//! may be sent now. What depends on an answer comes when the answer has made the interface dirty again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::cell::Cell;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::families::Families;
use crate::gate::{Gate, Known, classify};
use crate::intent::{Facts, Fingerprint, Intent, Producers, Proof, judge};
use crate::locals::LocalsState;
use crate::model::{
    Boot, Device, Entry, FailReason, Ifindex, IntentProof, Leg, Link, LinkKind, Mac, Op, OpError, OpId,
    OpResult, PolicySlot, RouteKey, Row, SlotId, State, Token, WhileHeld,
};
use crate::objects::{AttachmentId, PolicyId, PolicyState};
use crate::plan::{Goal, Removed, Trouble, What};
use crate::producers::Orphan;
use crate::since::Marks;

/// Reads of the registry row.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Read {
    /// When the one that is under way was asked for.
    pub(crate) out: Option<Boot>,
    /// Another one is wanted after it.
    pub(crate) again: bool,
    /// Answers that are still to come, also those that nobody waits for any more. They come in order.
    pub(crate) unanswered: u32,
    /// What the next so many of them say may be about an earlier device.
    pub(crate) void: u32,
    /// Reads that failed are tried again.
    pub(crate) backoff: Option<Backoff>,
    /// When that, or the end of patience, is.
    pub(crate) due: Boot,
}

/// A device on which packets of an attachment may be delivered, program and all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub(crate) attachment: AttachmentId,
    pub(crate) token: Token,
    /// MAC of the workload's side.
    pub(crate) mac: Mac,
    pub(crate) address_v4: Option<IpAddr>,
    pub(crate) address_v6: Option<IpAddr>,
    /// The device by which packets leave to it; none = straight to its peer.
    pub(crate) via: Option<Ifindex>,
}

/// One interface, by ifindex.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Port {
    pub(crate) device: Option<Device>,
    /// Attachments that name it.
    pub(crate) attachments: BTreeSet<AttachmentId>,
    /// The one that has the right to it.
    pub(crate) winner: Option<AttachmentId>,
    /// Readiness of the winner.
    pub(crate) ready: Option<Ready>,
    /// The winner is ready but for the program.
    pub(crate) coming: bool,
    pub(crate) known: Known,
    pub(crate) read: Read,
    /// Some attachment of it could be judged otherwise by another read of the registry.
    pub(crate) hangs_on_identity: bool,
    /// An earlier life left something here, and the device is still the one it was left on.
    adopted: bool,
    /// It was looked at whether that life ended in the middle of a revocation.
    traced: bool,
    /// The incarnation that that life had let go live, until all intents are known that it may have done so for.
    inheritance: Option<(Mac, Token)>,
    /// What is here belongs to a device that is gone.
    stale: bool,
    /// The program is on this device.
    pub(crate) program: Cell<Option<Mac>>,
    pub(crate) row: Cell<Option<Row>>,
    pub(crate) sources: Cell<BTreeSet<IpAddr>>,
    pub(crate) entries: BTreeMap<RouteKey, Cell<Option<Entry>>>,
    /// How often an open entry was taken away under a row that may be open, and up to which the epoch covers it.
    revoked: u32,
    pub(crate) covered: u32,
    /// Operations that take open entries away.
    pub(crate) revoking: BTreeSet<OpId>,
    /// The clear that is out: until its answer nothing is written that it would delete.
    pub(crate) clearing: Option<OpId>,
    /// The last operation (or change of the device) that makes proofs void.
    pub(crate) touched: OpId,
    /// The last operation before the present device came. Neither number nor MAC tells devices apart.
    before_device: OpId,
    pub(crate) troubles: BTreeMap<Goal, Trouble>,
    /// Something about one of its intents failed, as of when they were judged last.
    pub(crate) intents_unwell: bool,
    /// One of them is of a kind that hinders whoever uses the interface.
    pub(crate) hindered: bool,
    /// Since when link, identity and program are there while the row is closed.
    pub(crate) ready_since: Option<Boot>,
    /// Somebody else's programs before ours, as an audit found them.
    pub(crate) foreign: Vec<String>,
    /// Its intents are to be proven again.
    pub(crate) prove_again: bool,
    /// Policy slots that entries may lead to although nobody wants them to.
    removing: BTreeSet<SlotId>,
    /// Those of them whose entries somebody else claims.
    claimed_away: BTreeSet<SlotId>,
    /// Policy slots to which entries still deliver that are about to be closed.
    delivering_on: BTreeSet<SlotId>,
    slots_used: BTreeSet<SlotId>,
    /// The last epoch before the row was deleted.
    last_epoch: Option<u32>,
    #[serde(skip)]
    pub(crate) marks: Marks,
}

impl Default for Port {
    fn default() -> Self {
        Self {
            device: None,
            attachments: BTreeSet::new(),
            winner: None,
            ready: None,
            coming: false,
            known: Known::Unread,
            read: Read::default(),
            hangs_on_identity: false,
            adopted: false,
            traced: false,
            inheritance: None,
            stale: false,
            program: Cell::Sure(None),
            row: Cell::Sure(None),
            sources: Cell::Sure(BTreeSet::new()),
            entries: BTreeMap::new(),
            revoked: 0,
            covered: 0,
            revoking: BTreeSet::new(),
            clearing: None,
            touched: OpId(0),
            before_device: OpId(0),
            troubles: BTreeMap::new(),
            intents_unwell: false,
            hindered: false,
            ready_since: None,
            foreign: Vec::new(),
            prove_again: false,
            removing: BTreeSet::new(),
            claimed_away: BTreeSet::new(),
            delivering_on: BTreeSet::new(),
            slots_used: BTreeSet::new(),
            last_epoch: None,
            marks: Marks::default(),
        }
    }
}

/// What the row of an interface must say when it is open, beside token and epoch.
struct RowFacts {
    sources: BTreeSet<IpAddr>,
    kinds: Kinds,
    via: Option<Ifindex>,
}

/// What planning needs to know of one intent of an interface.
struct Plan {
    policy: PolicyId,
    attachment: AttachmentId,
    /// The policy slot, if the kernel has it.
    slot: Option<SlotId>,
    /// The consumer and its producers are ready and nothing forbids it.
    deliverable: bool,
    /// A proof of everything that is there holds.
    proven: bool,
    /// Open entries may stay open.
    vetted: bool,
    /// It is about to become deliverable or not.
    undecided: bool,
}

/// Which kinds of entries a row announces: the program looks up no others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kinds {
    services: bool,
    prefixes_v4: bool,
    prefixes_v6: bool,
}

impl Kinds {
    fn of<'a>(keys: impl Iterator<Item = &'a RouteKey>) -> Self {
        keys.fold(Self::default(), |kinds, key| match key {
            RouteKey::Service { .. } => Self {
                services: true,
                ..kinds
            },
            RouteKey::Prefix { address, .. } => Self {
                prefixes_v4: kinds.prefixes_v4 || address.is_ipv4(),
                prefixes_v6: kinds.prefixes_v6 || address.is_ipv6(),
                ..kinds
            },
        })
    }

    const fn of_row(row: &Row) -> Self {
        Self {
            services: row.has_services,
            prefixes_v4: row.has_prefixes_v4,
            prefixes_v6: row.has_prefixes_v6,
        }
    }

    const fn with(self, other: Self) -> Self {
        Self {
            services: self.services || other.services,
            prefixes_v4: self.prefixes_v4 || other.prefixes_v4,
            prefixes_v6: self.prefixes_v6 || other.prefixes_v6,
        }
    }

    fn contain(self, other: Self) -> bool {
        self.with(other) == self
    }

    const fn row(self, token: Option<Token>, epoch: u32, has_sources: bool, via: Option<Ifindex>) -> Row {
        Row {
            token,
            epoch,
            has_services: self.services,
            has_prefixes_v4: self.prefixes_v4,
            has_prefixes_v6: self.prefixes_v6,
            has_sources,
            via,
        }
    }
}

fn is_open(entry: Option<Entry>) -> bool {
    entry.is_some_and(|entry| entry.open)
}

/// What closes an entry that may be open.
fn closed_of(cell: &Cell<Option<Entry>>) -> Option<Entry> {
    let open = cell.values().iter().flatten().find(|entry| entry.open)?;
    Some(Entry { open: false, ..*open })
}

fn row_open(row: Option<Row>) -> bool {
    row.is_some_and(|row| row.token.is_some())
}

impl Port {
    /// Of this device; the kernel has nothing under its number.
    pub(crate) fn new(device: Option<Device>) -> Self {
        Self {
            device,
            ..Self::default()
        }
    }

    /// What an earlier life left.
    pub(crate) fn adopted(
        self,
        program: bool,
        row: Option<Row>,
        sources: BTreeSet<IpAddr>,
        entries: BTreeMap<RouteKey, Entry>,
        device: Option<Device>,
    ) -> Self {
        // Until the device is known its MAC is not: the link that is pinned is alive, so it is this device's.
        let mac = device.map_or(Mac::default(), |device| device.mac);
        Self {
            device,
            adopted: true,
            program: Cell::Sure(program.then_some(mac)),
            row: Cell::Sure(row),
            sources: Cell::Sure(sources),
            entries: entries
                .into_iter()
                .map(|(key, entry)| (key, Cell::Sure(Some(entry))))
                .collect(),
            ..self
        }
    }

    /// What an earlier life left under this number belongs to a device that is gone.
    pub(crate) const fn stranded(&mut self) {
        if self.device.is_none() {
            self.adopted = false;
            self.stale = true;
        }
    }

    /// The incarnation that an earlier life let go live here.
    fn adopted_open(&self) -> Option<(Mac, Token)> {
        let mac = self.program.sure().copied().flatten()?;
        let token = self.row.sure().copied().flatten()?.token?;
        self.adopted.then_some((mac, token))
    }

    /// The device is gone for sure: what is here was its own.
    pub(crate) fn gone(&mut self) {
        self.stale |= self.device.is_none();
    }

    /// Another device has this number now, or none. `denied`: an operation did not find that one. `asking`: nobody has
    /// said yet whether it is there.
    pub(crate) fn device_changed(
        &mut self,
        device: Option<Device>,
        denied: Option<Device>,
        asking: bool,
        last: OpId,
    ) {
        let first = self.adopted && self.device.is_none() && !self.stale;
        self.touched = last;
        self.before_device = last;
        self.ready = None;
        self.ready_since = None;
        self.known = Known::Unread;
        self.troubles.clear();
        self.foreign.clear();
        if denied.is_some() && denied == device && !asking {
            // The kernel says that it is gone, the link table says that it is there: no haste.
            self.troubles.insert(
                Goal::Attached,
                Trouble::new(FailReason::AttachFailed, OpError::NoDevice.to_string()),
            );
        }
        match device {
            Some(device) if first => {
                // The device on which an earlier life left all this.
                if self.program.may(Option::is_some) {
                    self.program = Cell::Sure(Some(device.mac));
                }
            }
            Some(_) => {
                self.adopted = false;
                // Is it there? Only an attach can say.
                if self.program.idle() {
                    self.program.doubt(None);
                }
            }
            None => {
                self.adopted = false;
                self.stale |= denied.is_none();
            }
        }
        self.device = device;
    }

    /// Whether this operation was sent for the present device. An answer about an earlier one says nothing.
    pub(crate) fn is_of_this_device(&self, op: OpId) -> bool {
        op > self.before_device
    }

    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        for trouble in self.troubles.values_mut() {
            trouble.blocked = false;
        }
    }

    /// Whether the kernel has nothing under this number, the program aside.
    fn bare(&self) -> bool {
        self.row.is(&None) && self.sources.sure().is_some_and(BTreeSet::is_empty) && self.entries.is_empty()
    }

    /// Nothing is there any more of what failed, the program aside.
    pub(crate) fn forget_content(&mut self) {
        self.troubles
            .retain(|goal, _| matches!(goal, Goal::Attached | Goal::Detached));
    }

    /// Whether nothing is out that writes what a clear deletes.
    fn quiet(&self) -> bool {
        self.row.idle() && self.sources.idle() && self.entries.values().all(Cell::idle)
    }

    /// Entries deliver that nobody wants and that could not be taken away: nothing else may be delivered here.
    fn stuck(&self, claims: &Claims) -> bool {
        let unwanted = |key: &RouteKey| !claims.keys.contains_key(key) && !claims.kept.contains(key);
        self.blocked(Goal::Unclaimed)
            && self
                .entries
                .iter()
                .any(|(key, cell)| unwanted(key) && cell.may(|entry| is_open(*entry)))
    }

    fn may_be_open(&self) -> bool {
        self.row.may(|row| row_open(*row))
    }

    fn blocked(&self, goal: Goal) -> bool {
        self.troubles.get(&goal).is_some_and(|trouble| trouble.blocked)
    }

    /// The program is on the present device, as the kernel answered.
    pub(crate) fn has_program(&self) -> bool {
        self.device
            .is_some_and(|device| self.program.is(&Some(device.mac)))
    }

    /// Its row is open, as the kernel answered.
    pub(crate) fn open_for(&self) -> Option<Token> {
        self.row.sure().copied().flatten().and_then(|row| row.token)
    }

    pub(crate) fn keys_done(&mut self, op: OpId, keys: &[RouteKey]) {
        for key in keys {
            if let Some(cell) = self.entries.get_mut(key) {
                cell.done(op);
                if cell.is(&None) {
                    self.entries.remove(key);
                }
            }
        }
    }

    pub(crate) fn keys_failed(&mut self, op: OpId, keys: &[RouteKey]) {
        for key in keys {
            if let Some(cell) = self.entries.get_mut(key) {
                cell.failed(op);
            }
        }
    }

    pub(crate) fn cleared(&mut self, op: OpId) {
        self.row.done(op);
        self.sources.done(op);
        let keys: Vec<RouteKey> = self.entries.keys().copied().collect();
        self.keys_done(op, &keys);
        self.covered = self.revoked;
    }

    pub(crate) fn clear_failed(&mut self, op: OpId) {
        self.row.failed(op);
        self.sources.failed(op);
        let keys: Vec<RouteKey> = self.entries.keys().copied().collect();
        self.keys_failed(op, &keys);
    }

    /// Whether a recheck has something to do here: to read its identity, or to try again what failed.
    fn is_unwell(&self) -> bool {
        let failed = !self.troubles.is_empty() || self.intents_unwell;
        !self.attachments.is_empty() && (self.hangs_on_identity || failed)
    }

    /// Something planned, out, or failed.
    pub(crate) fn busy(&self) -> bool {
        // Under a closed row a revocation waits for the next opening.
        let uncovered = self.revoked != self.covered && self.may_be_open();
        !self.quiet() || !self.program.idle() || self.read.out.is_some() || uncovered
    }

    /// The latest epoch that its row may have.
    fn present_epoch(&self) -> Option<u32> {
        let epochs = self.row.values().iter().flatten().map(|row| row.epoch);
        epochs.reduce(later)
    }

    /// The epoch of a row that is written now. `raise`: flows of the present one must be looked up anew.
    fn epoch(&self, now: Boot, raise: bool) -> u32 {
        match self.present_epoch() {
            Some(epoch) if raise => epoch.wrapping_add(1),
            Some(epoch) => epoch,
            None => {
                // About a millisecond each: no row that an earlier life wrote for this interface had it. This life may
                // have raised it faster than time goes.
                let fresh = u32::try_from((now.0 >> 20) & u64::from(u32::MAX)).unwrap_or(0);
                self.last_epoch
                    .map_or(fresh, |last| later(fresh, last.wrapping_add(1)))
            }
        }
    }
}

/// The later of two epochs: they go round.
const fn later(a: u32, b: u32) -> u32 {
    if a.wrapping_sub(b) < 1 << 31 { a } else { b }
}

impl Intent {
    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        self.fallback = 0;
        for trouble in [&mut self.entries_trouble, &mut self.proof_trouble]
            .into_iter()
            .flatten()
        {
            trouble.blocked = false;
        }
    }
}

impl Engine {
    /// An identity that could not be read keeps its interface as an earlier life left it.
    pub(crate) fn frozen(&self, port: &Port) -> bool {
        port.adopted
            && port.device.is_some()
            && !port.attachments.is_empty()
            && matches!(port.known, Known::Unread | Known::Unreadable(_))
    }

    pub(crate) fn unblock_intents(&mut self, ifindex: Ifindex) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in &port.attachments {
            let Some(state) = self.objects.attachments.get(attachment) else {
                continue;
            };
            for policy in &state.consumes {
                if let Some(intent) = self
                    .objects
                    .policies
                    .get_mut(policy)
                    .and_then(|policy| policy.intents.get_mut(attachment))
                {
                    intent.unblock();
                }
            }
        }
    }

    /// What was disproved of an incarnation says nothing about the next one.
    pub(crate) fn forget_disproofs(&mut self, ifindex: Ifindex) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in &port.attachments {
            let state = self.objects.attachments.get(attachment);
            for policy in state.into_iter().flat_map(|state| &state.consumes) {
                let policy = self.objects.policies.get_mut(policy);
                if let Some(intent) = policy.and_then(|policy| policy.intents.get_mut(attachment)) {
                    intent.proof_trouble = None;
                }
            }
        }
    }

    // --- judging -------------------------------------------------------------------------------------------

    /// Finds the device of an interface name, who has the right to it, and whether it is ready.
    pub(crate) fn judge_interface(&mut self, name: &str) {
        let holder = self.interfaces.named(name);
        let ids: Vec<AttachmentId> = self
            .objects
            .by_interface
            .get(name)
            .into_iter()
            .flatten()
            .copied()
            .collect();
        for id in &ids {
            self.move_attachment(*id, holder);
        }
        self.contest_interface(holder, &ids);
        let Some(ifindex) = holder.filter(|_| !ids.is_empty()) else {
            self.dirty.loose.extend(ids);
            return;
        };
        let link = self.interfaces.link(ifindex).cloned();
        let via = link.as_ref().and_then(|link| self.way_to(link));
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        port.winner = ids
            .iter()
            .copied()
            .find(|id| {
                self.objects
                    .attachments
                    .get(id)
                    .is_some_and(|state| state.interface_lost.is_none())
            })
            .filter(|_| {
                // Several that nobody has the right over: none is served.
                ids.iter()
                    .filter(|id| {
                        self.objects
                            .attachments
                            .get(id)
                            .is_some_and(|state| state.interface_lost.is_none())
                    })
                    .count()
                    == 1
            });
        let mut ready = None;
        let mut coming = false;
        // Where there is none, there is no neighbour with such an address.
        let has_ipv6 = via.is_none_or(|device| self.interfaces.speaks_ipv6(device));
        port.hangs_on_identity = false;
        for id in &ids {
            let Some(state) = self.objects.attachments.get(id) else {
                continue;
            };
            let gate = classify(link.as_ref(), &port.known, state.object.expected);
            port.hangs_on_identity |= gate.hangs_on_identity();
            if port.winner == Some(*id)
                && state.address_lost.is_none()
                && let Gate::Ready(token) = gate
            {
                if !port.has_program() {
                    coming = !port.troubles.contains_key(&Goal::Attached);
                    continue;
                }
                let mac = match &port.known {
                    Known::Row(Some(identity)) => identity.mac,
                    Known::Row(None) | Known::Unread | Known::Unreadable(_) => Mac::default(),
                };
                ready = Some(Ready {
                    attachment: *id,
                    token,
                    mac,
                    address_v4: state.object.addresses.iter().find(|a| a.is_ipv4()).copied(),
                    address_v6: state
                        .object
                        .addresses
                        .iter()
                        .find(|a| a.is_ipv6())
                        .copied()
                        .filter(|_| has_ipv6),
                    via,
                });
            }
        }
        if port.ready != ready || port.coming != coming {
            port.ready = ready;
            port.coming = coming;
            self.dirty_producers_of(ifindex);
        }
        self.dirty.ports.insert(ifindex);
    }

    fn move_attachment(&mut self, id: AttachmentId, holder: Option<Ifindex>) {
        let Some(state) = self.objects.attachments.get_mut(&id) else {
            return;
        };
        if state.port == holder {
            return;
        }
        let before = state.port;
        state.port = holder;
        let consumes = state.consumes.clone();
        let produces = state.produces.clone();
        self.dirty.policies.extend(produces);
        if let Some(port) = before.and_then(|ifindex| self.ports.get_mut(&ifindex)) {
            port.attachments.remove(&id);
            if port.winner == Some(id) {
                port.winner = None;
                port.ready = None;
                port.coming = false;
            }
            // What is to be taken away now is a new operation, whatever failed before.
            port.unblock();
        }
        if let Some(before) = before {
            self.dirty_producers_of(before);
        }
        self.dirty.ports.extend(before);
        if let Some(ifindex) = holder {
            let device = self.interfaces.link(ifindex).map(|link| link.device());
            let port = self.ports.entry(ifindex).or_insert_with(|| Port::new(device));
            port.attachments.insert(id);
            let unread = port.known == Known::Unread && port.read.out.is_none();
            if unread {
                self.read(ifindex, false);
            }
        }
        self.forget_tries(id, &consumes);
    }

    /// Whatever was tried for an attachment on an interface says nothing any more: it left, or has no right to it.
    pub(crate) fn forget_tries(&mut self, id: AttachmentId, consumes: &BTreeSet<PolicyId>) {
        for policy in consumes.iter().copied() {
            if let Some(intent) = self.intent_mut(policy, id) {
                intent.proof = Proof::None;
                intent.asked_again = None;
                intent.vetted = None;
                intent.entries_trouble = None;
                intent.proof_trouble = None;
                intent.fallback = 0;
            }
            self.dirty.touched.insert(policy);
            if let Some(state) = self.objects.policies.get_mut(&policy)
                && state.full.remove(&id)
            {
                self.dirty.policies.insert(policy);
            }
        }
    }

    /// Judges the intents of an attachment whose interface is missing.
    pub(crate) fn judge_loose(&mut self, id: AttachmentId) {
        let Some(state) = self.objects.attachments.get(&id) else {
            return;
        };
        if state.port.is_some() {
            return;
        }
        let gate = classify(None, &Known::Unread, state.object.expected);
        let lost = state.lost().cloned();
        let claims = self.claims(&self.nowhere(&state.object.interface));
        for policy in state.consumes.clone() {
            let Some(policy_state) = self.objects.policies.get(&policy) else {
                continue;
            };
            let conflict = claims
                .intents
                .iter()
                .find(|claim| claim.policy == policy && claim.attachment == id)
                .and_then(|claim| claim.conflict.as_deref());
            let full = self.full(policy_state);
            let facts = Facts {
                refused: policy_state.refusal(),
                conflict: lost.as_deref().or(conflict),
                passed: self.passed,
                trouble: full.as_ref().or_else(|| self.set_trouble(policy_state)),
                gate: &gate,
                unreachable: None,
                unreadable: None,
                producers: Producers::Ready,
                done: false,
            };
            let before = policy_state.intents.get(&id).map(|intent| intent.state);
            if let Some(before) = before {
                let judged = judge(before, &facts);
                let hindered = full.is_some();
                self.set_hindered(policy, id, hindered);
                self.set_state(policy, id, judged, None);
            }
        }
    }

    /// An interface that is missing. Conflicts are between objects: they are judged without a device too.
    pub(crate) fn nowhere(&self, interface: &str) -> Port {
        Port {
            attachments: self
                .objects
                .by_interface
                .get(interface)
                .cloned()
                .unwrap_or_default(),
            ..Port::default()
        }
    }

    /// What is wrong with a policy's slot or set.
    pub(crate) fn set_trouble<'a>(&'a self, state: &'a PolicyState) -> Option<&'a Trouble> {
        state.slot_trouble.as_ref().or_else(|| {
            state
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .and_then(|slot| slot.trouble.as_ref())
        })
    }

    /// A policy that does not fit fails as a whole, with need and have.
    pub(crate) fn full(&self, state: &PolicyState) -> Option<Trouble> {
        let first = state.full.first().and_then(|id| state.intents.get(id))?;
        let trouble = first.entries_trouble.clone()?;
        let destinations = state.spec.as_ref().map_or(0, |spec| spec.destinations.len());
        Some(Trouble {
            message: format!(
                "{}; the policy needs {} entries on this node; those of {} consumers were not written and take the default path",
                trouble.message,
                destinations * state.intents.len(),
                state.full.len(),
            )
            .into(),
            ..trouble
        })
    }

    // --- planning ------------------------------------------------------------------------------------------

    /// Plans one interface.
    pub(crate) fn plan_port(&mut self, ifindex: Ifindex) {
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        self.dirty.proofs.remove(&ifindex);
        if self.passed && !self.frozen(&port) {
            self.plan_content(ifindex, &mut port, &claims);
        }
        self.note_troubles(ifindex, &mut port);
        self.dirty.judged.insert(ifindex);
        self.account(ifindex, &mut port, &claims);
        self.mark(&mut port, &claims);
        self.locals.concern(ifindex, &claims);
        let over = port.device.is_none()
            && port.attachments.is_empty()
            && port.bare()
            && port.program.is(&None)
            && port.read.unanswered == 0;
        if over && self.passed {
            self.ports.remove(&ifindex);
            self.locals.forget(ifindex);
            self.settled_orphan(Orphan::Port(ifindex));
        } else if let Some(place) = self.ports.get_mut(&ifindex) {
            if !port.troubles.keys().any(|goal| goal.is_cleanup())
                && self.orphans.contains(&Orphan::Port(ifindex))
                && port.troubles.is_empty()
            {
                *place = port;
                self.settled_orphan(Orphan::Port(ifindex));
            } else {
                *place = port;
            }
        }
    }

    /// Whoever has to try again what failed here is told: the policies of its producers, or nobody's timer.
    fn note_troubles(&mut self, ifindex: Ifindex, port: &mut Port) {
        let hindered = Self::worst_trouble(&port.troubles).is_some();
        if std::mem::replace(&mut port.hindered, hindered) != hindered {
            let attachments = port
                .attachments
                .iter()
                .filter_map(|id| self.objects.attachments.get(id));
            self.dirty
                .policies
                .extend(attachments.flat_map(|state| &state.produces));
        }
        if port.troubles.keys().any(|goal| self.nobody_retries(port, *goal)) {
            self.orphaned(Orphan::Port(ifindex));
        }
    }

    fn plan_content(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        if port.stale {
            // A device with the same address may be the one that went, and still hold the program: there what is
            // here is closed and rewritten, because nothing may leak in between.
            let may_be_the_same = port
                .device
                .is_some_and(|device| port.program.may(|mac| *mac == Some(device.mac)));
            let cleared = port.bare() && port.quiet();
            if !may_be_the_same && !cleared {
                self.clear(ifindex, port);
                return;
            }
            port.stale = false;
            if port.bare() {
                port.revoked = port.covered;
            }
            port.troubles.remove(&Goal::Cleared);
            // What is left of the program is a defunct link.
            if port.program.idle() && !port.program.is(&None) && port.device.is_some() {
                port.program.doubt(None);
            }
        }
        if port.attachments.is_empty() {
            // Nobody wants the program here.
            port.troubles.remove(&Goal::Attached);
        }
        if port.device.is_none() || (port.attachments.is_empty() && self.may_remove()) {
            self.vacate(ifindex, port);
            return;
        }
        // Somebody is here again: nothing is to be detached any more.
        port.troubles.remove(&Goal::Detached);
        if port.attachments.is_empty() || port.clearing.is_some() {
            return;
        }
        if claims.is_empty() {
            if port.bare() {
                port.forget_content();
            } else if self.may_remove() {
                self.empty(ifindex, port);
            }
        } else {
            // A clear that failed was for an earlier wish: what it left unknown is written anew.
            port.troubles.remove(&Goal::Cleared);
            self.inherit(port, claims);
            self.trace(port, claims);
            self.entitle(claims);
            let plans = self.plans(ifindex, port, claims);
            let target = self.target(port, claims);
            let opening = target.is_some()
                && port
                    .row
                    .sure()
                    .copied()
                    .flatten()
                    .is_some_and(|row| row.token.is_none())
                && plans.iter().any(|plan| plan.proven)
                && !plans.iter().any(|plan| plan.undecided);
            self.plan_sources(ifindex, port);
            self.plan_entries(ifindex, port, claims, &plans, target, opening);
            self.plan_row(ifindex, port, claims, &plans, target);
            if port.prove_again || plans.iter().any(|plan| plan.deliverable && !plan.proven) {
                self.dirty.proofs.insert(ifindex);
            }
        }
        self.plan_program(ifindex, port);
    }

    /// Notes which intents may use the set that their policy leads to now.
    fn entitle(&mut self, claims: &Claims) {
        for claim in &claims.intents {
            let right = claim.may_deliver();
            let Some(state) = self.objects.policies.get_mut(&claim.policy) else {
                continue;
            };
            let current = state.current;
            if let Some(intent) = state.intents.get_mut(&claim.attachment) {
                intent.entitled = right && (current || intent.entitled);
            }
        }
    }

    /// Whoever loses its interface to another has no right from before when it wins it back: what it claims is not even
    /// looked at meanwhile.
    pub(crate) fn disentitle(&mut self, id: AttachmentId, consumes: &BTreeSet<PolicyId>) {
        for policy in consumes {
            if let Some(intent) = self.intent_mut(*policy, id) {
                intent.entitled = false;
            }
        }
    }

    /// What an earlier life let go live may stay so, also of intents that only the complete lists name.
    fn inherit(&mut self, port: &mut Port, claims: &Claims) {
        if !port.traced {
            port.inheritance = port.adopted_open();
        }
        let Some(vetted) = port.inheritance.filter(|_| port.adopted) else {
            return;
        };
        if self.may_remove() {
            port.inheritance = None;
        }
        for claim in &claims.intents {
            if let Some(intent) = self.intent_mut(claim.policy, claim.attachment)
                && intent.touched == OpId(0)
            {
                intent.vetted = Some(vetted);
            }
        }
    }

    /// An earlier life may have ended between the closing of an entry and the new epoch: flows may still be
    /// there that no entry allows. Entries that are closed although nobody wants them so are the trace of it.
    fn trace(&mut self, port: &mut Port, claims: &Claims) {
        if !port.adopted || port.traced {
            return;
        }
        port.traced = true;
        let closed = port.entries.iter().any(|(key, cell)| {
            let owner = claims.keys.get(key).and_then(|index| {
                let policy = claims.intents[*index].policy;
                self.objects.policies.get(&policy).and_then(|state| state.slot)
            });
            cell.may(|entry| entry.is_some_and(|entry| !entry.open && Some(entry.policy) != owner))
        });
        let lost = claims.intents.iter().any(|claim| claim.conflict.is_some());
        if port.may_be_open() && (closed || lost) {
            port.revoked = port.revoked.wrapping_add(1);
        }
    }

    /// Makes an interface bare that has nothing to do any more: the row first.
    fn empty(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.may_be_open() {
            self.close_row(ifindex, port, Kinds::default());
        } else {
            self.clear(ifindex, port);
        }
    }

    fn vacate(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.device.is_none() && self.denied.contains_key(&ifindex) {
            // It may be there under another address, program and all: until that is known its claims stay.
            if port.may_be_open() {
                self.close_row(ifindex, port, Kinds::default());
            }
            return;
        }
        if !port.bare() {
            if port.device.is_some() {
                self.empty(ifindex, port);
            } else {
                self.clear(ifindex, port);
            }
            return;
        }
        port.forget_content();
        if port.program.is(&None) {
            port.troubles.remove(&Goal::Detached);
        } else if port.program.idle() && !port.blocked(Goal::Detached) {
            let op = self.send(What::Detach(ifindex), port.device, Op::Detach { ifindex });
            port.program.send(op, None);
            port.touched = op;
        }
    }

    fn clear(&mut self, ifindex: Ifindex, port: &mut Port) {
        if !port.quiet() || port.blocked(Goal::Cleared) {
            return;
        }
        let keys: Vec<RouteKey> = port.entries.keys().copied().collect();
        // With a device that is gone nobody was deselected.
        let removed = if port.device.is_some() && !port.stale {
            self.removed(port, &keys)
        } else {
            Vec::new()
        };
        let op = self.send(
            What::Clear { ifindex, removed },
            port.device,
            Op::ClearInterface { ifindex },
        );
        // A clear without a row says nothing new.
        port.last_epoch = port.present_epoch().or(port.last_epoch);
        port.clearing = Some(op);
        port.row.send(op, None);
        port.sources.send(op, BTreeSet::new());
        for cell in port.entries.values_mut() {
            cell.send(op, None);
        }
        port.touched = op;
    }

    fn close_row(&mut self, ifindex: Ifindex, port: &mut Port, kinds: Kinds) {
        if !port.row.idle() || port.blocked(Goal::RowClosed) {
            return;
        }
        let rows = || port.row.values().iter().flatten();
        let has_sources = rows().any(|row| row.has_sources);
        let kinds = rows().map(Kinds::of_row).fold(kinds, Kinds::with);
        // Whatever is taken away under the closed row, flows of before it are looked up anew.
        let epoch = port.epoch(self.now.boot, true);
        let row = kinds.row(None, epoch, has_sources, self.answers_via(port));
        self.write_row(ifindex, port, row, Goal::RowClosed, false);
    }

    /// The device by which packets leave to the workload behind a link, with its address as the next hop: the bridge
    /// that it is a port of, or the link itself. None = straight to its peer.
    pub(crate) fn way_to(&self, link: &Link) -> Option<Ifindex> {
        let straight = link.kind == LinkKind::Veth { peer_elsewhere: true } && !self.config.neighbour_only;
        (!straight).then(|| self.interfaces.bridge_of(link).unwrap_or(link.ifindex))
    }

    /// The device by which answers leave to the consumer on this interface; none = straight to its peer.
    pub(crate) fn answers_via(&self, port: &Port) -> Option<Ifindex> {
        let link = self.interfaces.link(port.device?.ifindex)?;
        self.way_to(link)
    }

    /// What the row must announce.
    fn kinds(&self, port: &Port, claims: &Claims) -> Kinds {
        let kinds = Kinds::of(claims.keys.keys().chain(&claims.kept));
        if self.may_remove() {
            let left = port.entries.keys().filter(|key| !claims.keys.contains_key(key));
            kinds.with(Kinds::of(
                left.filter(|key| self.stands_in_for_another(port, claims, key)),
            ))
        } else {
            // What nobody claims may yet turn out to be somebody's: it stays as it is.
            kinds.with(Kinds::of(port.entries.keys()))
        }
    }

    fn write_row(&mut self, ifindex: Ifindex, port: &mut Port, row: Row, goal: Goal, opening: bool) {
        // Only another epoch covers what was taken away.
        let raised = port
            .row
            .values()
            .iter()
            .flatten()
            .all(|old| old.epoch != row.epoch);
        let what = What::Row {
            ifindex,
            goal,
            opening,
            revoked: if raised { port.revoked } else { port.covered },
        };
        let op = self.send(what, port.device, Op::WriteRow { ifindex, row });
        port.row.send(op, Some(row));
        if !opening {
            port.touched = op;
        }
    }

    /// The incarnation that the row may be open for.
    fn target(&self, port: &Port, claims: &Claims) -> Option<Token> {
        let ready = port.ready.as_ref()?;
        if port.troubles.contains_key(&Goal::Sources) {
            return None;
        }
        let usable = claims
            .intents
            .iter()
            .any(|claim| claim.attachment == ready.attachment && claim.refused.is_none());
        (usable || !claims.kept.is_empty()).then_some(ready.token)
    }

    /// Whether a packet of this intent may be delivered by what the selector leads to.
    fn granted(&self, state: &PolicyState, port: &Port, claim: &Claim, key: &RouteKey) -> bool {
        if state.current {
            return true;
        }
        let Some(slot) = state.slot.and_then(|slot| self.slots.get(&slot)) else {
            return false;
        };
        // Behind an empty selector nobody is reached.
        let empty = |value: &Option<PolicySlot>| value.as_ref().is_some_and(|v| v.selected.length == 0);
        if slot.cell.values().iter().all(empty) {
            return true;
        }
        // What is new in this generation must not reach the set of an earlier one.
        if let Some(spec) = state.served.as_ref().and_then(|served| served.spec.as_ref()) {
            let Some(consumer) = self.objects.attachments.get(&claim.attachment) else {
                return false;
            };
            let entitled = state
                .intents
                .get(&claim.attachment)
                .is_some_and(|intent| intent.entitled);
            return entitled
                && spec.consumers.matches(&consumer.object.labels)
                && crate::conflict::routes(spec, self.config.features).any(|route| route == *key);
        }
        port.entries.get(key).is_some_and(|cell| {
            cell.sure()
                .copied()
                .flatten()
                .is_some_and(|entry| entry.open && Some(entry.policy) == state.slot)
        })
    }

    fn plans(&self, ifindex: Ifindex, port: &Port, claims: &Claims) -> Vec<Plan> {
        claims
            .intents
            .iter()
            .map(|claim| self.plan_of(ifindex, port, claim))
            .collect()
    }

    fn plan_of(&self, ifindex: Ifindex, port: &Port, claim: &Claim) -> Plan {
        let mut plan = Plan {
            policy: claim.policy,
            attachment: claim.attachment,
            slot: None,
            deliverable: false,
            proven: false,
            vetted: false,
            undecided: false,
        };
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return plan;
        };
        let Some(intent) = state.intents.get(&claim.attachment) else {
            return plan;
        };
        let slot = state
            .slot
            .and_then(|id| self.slots.get(&id).map(|slot| (id, slot)));
        plan.slot = slot
            .filter(|(_, slot)| slot.cell.may(Option::is_some) && slot.in_kernel())
            .map(|(id, _)| id);
        let locals = self.locals.state(claim);
        let allowed = claim.may_deliver()
            && !matches!(locals, LocalsState::Failed(trouble) if !trouble.silent)
            && state.full.is_empty()
            && intent.fallback == 0
            && intent
                .entries_trouble
                .as_ref()
                .is_none_or(|trouble| trouble.silent);
        let token = port
            .ready
            .as_ref()
            .filter(|ready| ready.attachment == claim.attachment)
            .map(|ready| ready.token);
        let Some((_, slot)) = slot else {
            plan.undecided = allowed && token.is_some() && state.progressing(self);
            return plan;
        };
        let reached = self.families_reached(slot, |(member, token)| {
            member != ifindex
                && self
                    .ports
                    .get(&member)
                    .and_then(|port| port.ready.as_ref())
                    .is_some_and(|ready| ready.token == token)
        });
        let reachable = claim.keys.iter().any(|key| reached.contain(key.address()));
        let granted = claim.keys.iter().any(|key| self.granted(state, port, claim, key));
        let known = matches!(locals, LocalsState::Known);
        // Of a set that an earlier life selected nobody can say who had the right to it, but for whom it had let go
        // live.
        let vetted = intent.vetted.is_some()
            && intent.vetted == port.device.map(|d| d.mac).zip(token.or(port.open_for()));
        let heir = vetted || state.current || state.served.as_ref().is_some_and(|s| s.spec.is_some());
        plan.deliverable =
            allowed && known && token.is_some() && reachable && granted && heir && !claim.keys.is_empty();
        if let (Proof::Good(op, proven_for, keys), Some(token)) = (intent.proof, token) {
            plan.proven = allowed
                && proven_for == token
                && keys == Fingerprint::of(&claim.keys)
                && op > port.touched
                && op > intent.touched
                && op > slot.touched
                && !slot.is_about_to_move()
                && intent.proof_trouble.is_none();
        }
        plan.vetted = allowed && vetted && intent.proof_trouble.as_ref().is_none_or(|trouble| trouble.silent);
        let asked = match intent.proof {
            Proof::Asked(op, ..) => !self.is_silent(Some(op)),
            Proof::None | Proof::Good(..) => false,
        };
        plan.undecided = allowed
            && token.is_some()
            && !plan.proven
            && intent.proof_trouble.is_none()
            && (asked
                || plan.deliverable
                || matches!(locals, LocalsState::Awaited)
                || state.progressing(self));
        plan
    }

    fn plan_sources(&mut self, ifindex: Ifindex, port: &mut Port) {
        let wanted = self.wanted_sources(port);
        if port.sources.is(&wanted) {
            port.troubles.remove(&Goal::Sources);
            return;
        }
        if !port.sources.idle() || port.blocked(Goal::Sources) {
            return;
        }
        // A row that still says that sources are known would call everybody spoofed.
        let said = port
            .row
            .may(|row| row.is_some_and(|row| row.has_sources && row.token.is_some()));
        if wanted.is_empty() && said {
            return;
        }
        let there: BTreeSet<IpAddr> = port.sources.values().iter().flatten().copied().collect();
        let add = match port.sources.sure() {
            Some(sure) => wanted.difference(sure).copied().collect(),
            None => wanted.clone(),
        };
        let delete = there.difference(&wanted).copied().collect();
        let op = self.send(
            What::Sources(ifindex),
            port.device,
            Op::WriteSources { ifindex, add, delete },
        );
        port.sources.send(op, wanted);
        port.touched = op;
    }

    pub(crate) fn wanted_sources(&self, port: &Port) -> BTreeSet<IpAddr> {
        port.winner
            .and_then(|id| self.objects.attachments.get(&id))
            .map_or_else(BTreeSet::new, |state| state.object.addresses.clone())
    }

    /// Whether what is at an interface stays as it is, because not everything is known that decides about it.
    pub(crate) fn stays(&self, port: &Port, claims: &Claims) -> bool {
        // What a device that is gone has left is removed whoever it was for.
        let nobodys = port.device.is_some() && (port.attachments.is_empty() || claims.is_empty());
        !self.passed || self.frozen(port) || (nobodys && !self.may_remove())
    }

    /// What the row of an interface should say. What only an operation decides is as it was sent last.
    pub(crate) fn wanted_row(
        &self,
        ifindex: Ifindex,
        port: &Port,
        claims: &Claims,
        last: Option<Row>,
    ) -> Option<Row> {
        if self.stays(port, claims) {
            return last;
        }
        if port.device.is_none() || claims.is_empty() {
            return None;
        }
        let kinds = self.kinds(port, claims);
        let open_for = last.and_then(|row| row.token);
        let plans = self.plans(ifindex, port, claims);
        let deliverable = plans.iter().any(|plan| plan.deliverable);
        let token = self
            .target(port, claims)
            .filter(|token| open_for == Some(*token) || deliverable);
        let epoch = last.map_or(0, |row| row.epoch);
        Some(match (token, last) {
            (None, Some(row)) => kinds
                .with(Kinds::of_row(&row))
                .row(None, epoch, row.has_sources, row.via),
            _ => {
                let has_sources = !self.wanted_sources(port).is_empty();
                kinds.row(token, epoch, has_sources, self.answers_via(port))
            }
        })
    }

    /// Brings the route entries towards what is wanted.
    fn plan_entries(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        claims: &Claims,
        plans: &[Plan],
        target: Option<Token>,
        opening: bool,
    ) {
        let row_may_be_open = port.may_be_open();
        let live = row_may_be_open || opening;
        let uncovered = port.revoked != port.covered;
        // The row is about to be closed: what is open behind it may stay so, unless that fails.
        let closing = row_may_be_open
            && port.open_for().is_none_or(|token| target != Some(token))
            && !port.troubles.contains_key(&Goal::RowClosed);
        let keys: BTreeSet<RouteKey> = claims.keys.keys().chain(port.entries.keys()).copied().collect();
        let mut deletes: Vec<RouteKey> = Vec::new();
        // Of these what a write that failed may have left of what is still wanted: no news, however often it is tried.
        let mut leftovers: BTreeSet<RouteKey> = BTreeSet::new();
        let mut revokes: BTreeMap<RouteKey, Entry> = BTreeMap::new();
        let mut writes: BTreeMap<usize, BTreeMap<RouteKey, Entry>> = BTreeMap::new();
        let nothing = Cell::Sure(None);
        for key in keys {
            let cell = port.entries.get(&key).unwrap_or(&nothing);
            if !cell.idle() {
                continue;
            }
            let may_deliver = row_may_be_open && cell.may(|entry| is_open(*entry));
            let claim = claims.keys.get(&key).copied();
            let slot = claim.and_then(|index| plans[index].slot);
            let (Some(index), Some(slot)) = (claim, slot) else {
                if claims.kept.contains(&key) {
                    // Nobody can say what it wants any more: it does not go live with the others, and what somebody
                    // else changed is put back closed.
                    let goes_live = opening && cell.may(|entry| is_open(*entry));
                    if self.may_remove() && (goes_live || cell.sure().is_none()) {
                        let left = cell.values().last().copied().flatten();
                        revokes.extend(left.map(|entry| (key, Entry { open: false, ..entry })));
                    }
                    continue;
                }
                if claim.is_none() && !self.may_remove() {
                    continue;
                }
                // Nobody's, or its new owner has no slot yet: closed first, so that a crash in the middle
                // leaves a trace, then gone. There is no slot for a new owner as long as entries keep one in
                // use that is nobody's; but a claim that lost stands in for the one that won and has no room.
                let no_room = claim.is_some_and(|index| {
                    let policy = self.objects.policies.get(&plans[index].policy);
                    policy.is_some_and(|state| state.slot_trouble.is_some())
                });
                let stands_in = no_room && self.is_claimed_by_its_owner(cell, claims, &key);
                let stays = (row_may_be_open && uncovered)
                    || cell.is(&None)
                    || self.stands_in_for_another(port, claims, &key);
                let homeless = claim.is_none() || (no_room && !stands_in && self.may_remove());
                if may_deliver || (stands_in && cell.may(|entry| is_open(*entry))) {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                } else if homeless && !stays {
                    deletes.push(key);
                }
                continue;
            };
            let plan = &plans[index];
            let claim = &claims.intents[index];
            let Some(state) = self.objects.policies.get(&plan.policy) else {
                continue;
            };
            let Some(intent) = state.intents.get(&plan.attachment) else {
                continue;
            };
            if intent.fallback == 2 && cell.sure().is_none() {
                // What may be there of it goes.
                deletes.push(key);
                leftovers.insert(key);
                continue;
            }
            if intent.entries_trouble.as_ref().is_some_and(|t| t.blocked) && cell.is(&None) {
                continue;
            }
            let other = cell.may(|entry| entry.is_some_and(|entry| entry.open && entry.policy != slot));
            let forbidden = !claim.may_deliver()
                || !state.full.is_empty()
                || intent.fallback > 0
                || intent
                    .proof_trouble
                    .as_ref()
                    .is_some_and(|trouble| !trouble.silent)
                || !self.granted(state, port, claim, &key);
            let open_here = cell
                .sure()
                .copied()
                .flatten()
                .is_some_and(|entry| entry.open && entry.policy == slot);
            let open = if forbidden {
                false
            } else if !live {
                true
            } else if row_may_be_open && other {
                // A destination passes to another policy: claimed in between, unless it can be proven before
                // that one's set delivers for it.
                let passes_on = self.may_take_over(port, claims, plan, &key, target);
                if passes_on && !plan.proven && plan.undecided {
                    continue;
                }
                passes_on && plan.proven
            } else {
                (plan.proven && plan.deliverable) || (open_here && (plan.vetted || closing))
            };
            let wanted = Entry { policy: slot, open };
            let closes = !open && cell.may(|entry| is_open(*entry));
            let others = cell.may(|entry| entry.is_some_and(|entry| entry.policy != slot));
            if closes && !others && self.stops_passing(claim) {
                continue;
            }
            if others && self.catches_another(port, claims, &key) {
                if may_deliver {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                }
                continue;
            }
            if (!closes || others) && !self.slots.get(&slot).is_some_and(|slot| slot.cell.idle()) {
                // What opens or claims stands on the slot; while that is being written it waits, and what delivers
                // to somebody else's is closed where it is: this one may still let pass what its policy does not.
                if may_deliver && closes {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                }
                continue;
            }
            if !cell.is(&Some(wanted)) {
                writes.entry(index).or_default().insert(key, wanted);
            }
        }
        if revokes.is_empty() && deletes.is_empty() {
            port.troubles.remove(&Goal::Unclaimed);
        }
        if row_may_be_open && !deletes.is_empty() {
            // What a wider one would deliver that is about to be closed goes when that is closed.
            let closed = writes.values().flatten().chain(&revokes);
            let closing: BTreeSet<RouteKey> = closed
                .filter(|(_, entry)| !entry.open)
                .map(|(key, _)| *key)
                .chain(
                    port.entries
                        .iter()
                        .filter(|(_, cell)| !cell.idle())
                        .map(|(key, _)| *key),
                )
                .filter(|key| {
                    port.entries
                        .get(key)
                        .is_some_and(|cell| cell.may(|entry| is_open(*entry)))
                })
                .collect();
            deletes.retain(|key| !closing.iter().any(|other| other != key && other.overlaps(key)));
        }
        for (index, claim) in claims.intents.iter().enumerate() {
            if !writes.contains_key(&index) && self.is_claimed_after_all(port, claim, plans[index].slot) {
                self.entries_right(claim.policy, claim.attachment);
                // What failed kept it from more than its entries.
                self.dirty.ports.insert(ifindex);
            }
        }
        for (index, entries) in writes {
            self.write_entries(ifindex, port, &plans[index], entries, live, target);
        }
        if !port.blocked(Goal::Unclaimed) {
            self.take_entries_away(ifindex, port, revokes, deletes, &leftovers);
        } else if !revokes.is_empty() {
            // It goes on delivering although nobody wants it: the whole interface is closed.
            port.troubles.remove(&Goal::RowOpen);
        }
    }

    /// Whether entries that could not be written once are there although nothing is left to be written.
    fn is_claimed_after_all(&self, port: &Port, claim: &Claim, slot: Option<SlotId>) -> bool {
        let tried_again = self.intent(claim.policy, claim.attachment).is_some_and(|intent| {
            let trouble = intent.entries_trouble.as_ref();
            trouble.is_some_and(|trouble| !trouble.blocked) && intent.fallback == 0
        });
        tried_again
            && claim.keys.iter().all(|key| {
                let entry = port.entries.get(key).and_then(Cell::sure).copied().flatten();
                entry.is_some_and(|entry| Some(entry.policy) == slot)
            })
    }

    /// The entries of an intent are in the kernel.
    fn entries_right(&mut self, policy: PolicyId, attachment: AttachmentId) {
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let trouble = state
            .intents
            .get_mut(&attachment)
            .and_then(|intent| intent.entries_trouble.take());
        if trouble.is_some() {
            self.dirty.touched.insert(policy);
        }
        if state.full.remove(&attachment) {
            self.dirty.policies.insert(policy);
        }
    }

    /// Whether packets to a destination that is claimed, and about to be written, would leak without this entry: of two
    /// that overlap the one goes when the other is there.
    fn stands_in_for_another(&self, port: &Port, claims: &Claims, key: &RouteKey) -> bool {
        claims.keys.iter().any(|(claimed, index)| {
            claimed != key && claimed.overlaps(key) && self.is_coming(port, &claims.intents[*index], claimed)
        })
    }

    /// Whether packets to another destination, whose own entry is about to be written, are caught by this entry until
    /// then: it goes on leading to the policy that has caught them so far.
    fn catches_another(&self, port: &Port, claims: &Claims, key: &RouteKey) -> bool {
        claims.keys.iter().any(|(claimed, index)| {
            claimed != key
                && claimed.overlaps(key)
                && port
                    .entries
                    .get(claimed)
                    .is_none_or(|cell| cell.may(Option::is_none))
                && self.is_coming(port, &claims.intents[*index], claimed)
        })
    }

    /// Whether a destination is not claimed in the kernel yet, and nothing failed that it waits for.
    fn is_coming(&self, port: &Port, claim: &Claim, key: &RouteKey) -> bool {
        let announced = port.row.sure().copied().flatten().is_some_and(|row| {
            let kinds = Kinds::of(std::iter::once(key));
            Kinds::of_row(&row).contain(kinds)
        });
        let nothing = Cell::Sure(None);
        let cell = port.entries.get(key).unwrap_or(&nothing);
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return false;
        };
        let there = cell.sure().copied().flatten().map(|entry| entry.policy);
        if announced && there.is_some() && there == state.slot {
            return false;
        }
        let failed = self.set_trouble(state).is_some()
            || !state.full.is_empty()
            || port.blocked(Goal::RowClosed)
            || port.blocked(Goal::RowOpen)
            || state
                .intents
                .get(&claim.attachment)
                .is_none_or(|intent| intent.entries_trouble.is_some() || intent.fallback > 0);
        !failed || !cell.idle()
    }

    /// Whether the policy that an entry leads to claims this destination too, without the right to it.
    fn is_claimed_by_its_owner(&self, cell: &Cell<Option<Entry>>, claims: &Claims, key: &RouteKey) -> bool {
        cell.values().iter().flatten().all(|entry| {
            let owner = self.slots.get(&entry.policy).and_then(|slot| slot.owner);
            claims
                .intents
                .iter()
                .any(|claim| Some(claim.policy) == owner && claim.wanted.contains(key))
        })
    }

    /// Whether one write may make a destination that another policy has one of this intent: the row is open for it,
    /// its set is selected, and what is left of the old owner will be seen after a crash.
    fn may_take_over(
        &self,
        port: &Port,
        claims: &Claims,
        plan: &Plan,
        key: &RouteKey,
        target: Option<Token>,
    ) -> bool {
        let current = self
            .objects
            .policies
            .get(&plan.policy)
            .is_some_and(|state| state.current);
        let row_right = target.is_some()
            && port.open_for() == target
            && !port.troubles.contains_key(&Goal::RowOpen)
            && !port.troubles.contains_key(&Goal::RowClosed);
        let cell = port.entries.get(key).filter(|cell| cell.sure().is_some());
        plan.deliverable
            && current
            && row_right
            && cell.is_some_and(|cell| self.leaves_a_trace(cell, claims, key))
    }

    /// Whether the next life would see that flows of the old owner may still be there.
    fn leaves_a_trace(&self, cell: &Cell<Option<Entry>>, claims: &Claims, key: &RouteKey) -> bool {
        cell.values().iter().flatten().all(|entry| {
            let owner = self.slots.get(&entry.policy).and_then(|slot| slot.owner);
            match owner {
                None => true,
                Some(owner) => claims.intents.iter().any(|claim| {
                    claim.policy == owner && claim.conflict.is_some() && claim.wanted.contains(key)
                }),
            }
        })
    }

    fn write_entries(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        plan: &Plan,
        entries: BTreeMap<RouteKey, Entry>,
        live: bool,
        target: Option<Token>,
    ) {
        let nothing = Cell::Sure(None);
        let row_may_be_open = port.may_be_open();
        let mut revoking = false;
        let mut only_opens = true;
        for (key, entry) in &entries {
            let cell = port.entries.get(key).unwrap_or(&nothing);
            revoking |= row_may_be_open
                && cell.may(|old| {
                    old.is_some_and(|old| old.open && (!entry.open || old.policy != entry.policy))
                });
            only_opens &= entry.open
                && cell.is(&Some(Entry {
                    open: false,
                    ..*entry
                }));
        }
        let opens = entries.values().any(|entry| entry.open);
        let keys: Vec<RouteKey> = entries.keys().copied().collect();
        let (policy, attachment) = (plan.policy, plan.attachment);
        let fallback = self
            .intent(policy, attachment)
            .map_or(0, |intent| intent.fallback);
        let what = What::Entries {
            ifindex,
            policy,
            attachment,
            keys,
            revoking,
            fallback,
        };
        let op = self.send(
            what,
            port.device,
            Op::WriteEntries {
                ifindex,
                entries: entries.clone(),
            },
        );
        for (key, entry) in entries {
            port.entries
                .entry(key)
                .or_insert(Cell::Sure(None))
                .send(op, Some(entry));
        }
        if revoking {
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
        let mac = port.device.map(|device| device.mac);
        if let Some(intent) = self.intent_mut(policy, attachment) {
            // An opening on the strength of a proof leaves the proof good.
            if !(only_opens && live && plan.proven) {
                intent.touched = op;
            }
            if opens && live {
                intent.vetted = mac.zip(target);
            } else if opens {
                intent.vetted = None;
            }
        }
    }

    fn take_entries_away(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        revokes: BTreeMap<RouteKey, Entry>,
        deletes: Vec<RouteKey>,
        leftovers: &BTreeSet<RouteKey>,
    ) {
        if !revokes.is_empty() {
            let keys: Vec<RouteKey> = revokes.keys().copied().collect();
            let op = self.send(
                What::Revoke { ifindex, keys },
                port.device,
                Op::WriteEntries {
                    ifindex,
                    entries: revokes.clone(),
                },
            );
            for (key, entry) in revokes {
                if let Some(cell) = port.entries.get_mut(&key) {
                    cell.send(op, Some(entry));
                }
            }
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
        if deletes.is_empty() {
            return;
        }
        let unwanted: Vec<RouteKey> = deletes
            .iter()
            .filter(|key| !leftovers.contains(key))
            .copied()
            .collect();
        let removed = self.removed(port, &unwanted);
        let delivering = port.may_be_open()
            && deletes.iter().any(|key| {
                port.entries
                    .get(key)
                    .is_some_and(|cell| cell.may(|entry| is_open(*entry)))
            });
        let op = self.send(
            What::Delete {
                ifindex,
                keys: deletes.clone(),
                removed,
            },
            port.device,
            Op::DeleteEntries {
                ifindex,
                keys: deletes.iter().copied().collect(),
            },
        );
        for key in deletes {
            if let Some(cell) = port.entries.get_mut(&key) {
                cell.send(op, None);
            }
        }
        if delivering {
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
    }

    /// Who loses how many entries.
    fn removed(&self, port: &Port, keys: &[RouteKey]) -> Vec<Removed> {
        let mut counts: BTreeMap<SlotId, u32> = BTreeMap::new();
        for key in keys {
            let slot = port.entries.get(key).and_then(|cell| {
                cell.values()
                    .iter()
                    .flatten()
                    .next_back()
                    .map(|entry| entry.policy)
            });
            if let Some(slot) = slot {
                *counts.entry(slot).or_default() += 1;
            }
        }
        let consumer = port
            .attachments
            .first()
            .and_then(|id| self.objects.attachments.get(id))
            .map(|state| state.object.name.clone());
        counts
            .into_iter()
            .map(|(slot, keys)| Removed {
                slot,
                consumer: consumer.clone(),
                keys,
            })
            .collect()
    }

    /// Whether the slot of a policy that drops is being written and may still let pass: what is closed before the answer
    /// leaks.
    fn stops_passing(&self, claim: &Claim) -> bool {
        self.objects.policies.get(&claim.policy).is_some_and(|state| {
            let spec = state.spec.as_ref();
            let slot = state.slot.and_then(|slot| self.slots.get(&slot));
            spec.is_some_and(|spec| spec.while_held == WhileHeld::Drop)
                && slot.is_some_and(|slot| slot.may_pass() && !slot.cell.idle())
                && !self.is_silent(slot.and_then(|slot| slot.cell.flight()))
        })
    }

    /// Closes, opens or rewrites the consumer row.
    fn plan_row(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        claims: &Claims,
        plans: &[Plan],
        target: Option<Token>,
    ) {
        if !port.row.idle() {
            return;
        }
        let wanted_sources = self.wanted_sources(port);
        let has_sources = !wanted_sources.is_empty();
        let sources_right = port.sources.is(&wanted_sources);
        let raise = port.revoked != port.covered;
        let kinds = self.kinds(port, claims);
        let via = self.answers_via(port);
        let stuck = port.stuck(claims);
        let Some(row) = port.row.sure().copied() else {
            self.close_row(ifindex, port, kinds);
            return;
        };
        let Some(row) = row else {
            // "No row" passes everything: a closed one makes the claims good.
            if !port.blocked(Goal::RowClosed) {
                let epoch = port.epoch(self.now.boot, true);
                let row = kinds.row(None, epoch, has_sources, via);
                self.write_row(ifindex, port, row, Goal::RowClosed, false);
            }
            return;
        };
        let closed = row.token.is_none();
        let announced = Kinds::of_row(&row);
        if closed && !announced.contain(kinds) {
            // What it does not announce takes the default path.
            if !port.blocked(Goal::RowClosed) {
                let row = announced.with(kinds).row(None, row.epoch, row.has_sources, via);
                self.write_row(ifindex, port, row, Goal::RowClosed, false);
            }
            return;
        }
        match target {
            Some(token) if row.token == Some(token) && !stuck => {
                port.ready_since = None;
                let raise = raise && port.revoking.is_empty();
                let says_sources = has_sources && (sources_right || row.has_sources);
                let epoch = row.epoch.wrapping_add(u32::from(raise));
                // What is being taken away is announced until one write can say both.
                let kinds = if port.revoking.is_empty() {
                    kinds
                } else {
                    kinds.with(announced)
                };
                let wanted = kinds.row(Some(token), epoch, says_sources, via);
                if wanted != row && !port.blocked(Goal::RowOpen) {
                    self.write_row(ifindex, port, wanted, Goal::RowOpen, false);
                }
            }
            Some(token) if closed => {
                port.ready_since.get_or_insert(self.now.boot);
                if !plans.iter().any(|plan| plan.deliverable) {
                    // Nobody wants it open any more.
                    port.troubles.remove(&Goal::RowOpen);
                }
                if sources_right
                    && !stuck
                    && !port.blocked(Goal::RowOpen)
                    && self.may_open(port, claims, plans)
                {
                    let epoch = row.epoch.wrapping_add(u32::from(raise));
                    let wanted = kinds.row(Some(token), epoch, has_sources, via);
                    self.write_row(ifindex, port, wanted, Goal::RowOpen, true);
                    let vetted = port.device.map(|device| (device.mac, token));
                    for plan in plans.iter().filter(|plan| plan.proven) {
                        if let Some(intent) = self.intent_mut(plan.policy, plan.attachment) {
                            intent.vetted = vetted;
                        }
                    }
                }
            }
            _ if closed => {
                port.ready_since = None;
                port.troubles.remove(&Goal::RowOpen);
                port.troubles.remove(&Goal::RowClosed);
            }
            _ => {
                port.ready_since = None;
                port.troubles.remove(&Goal::RowOpen);
                if !claims.intents.iter().any(|claim| self.stops_passing(claim)) {
                    self.close_row(ifindex, port, kinds);
                }
            }
        }
    }

    /// Whether nothing but what is proven would go live.
    fn may_open(&self, port: &Port, claims: &Claims, plans: &[Plan]) -> bool {
        if plans.iter().any(|plan| plan.undecided) || !plans.iter().any(|plan| plan.proven) {
            return false;
        }
        let mut anything = false;
        for (key, cell) in &port.entries {
            if !cell.idle() {
                return false;
            }
            if !cell.may(|entry| is_open(*entry)) {
                continue;
            }
            let plan = claims.keys.get(key).map(|index| &plans[*index]);
            let Some(plan) = plan.filter(|plan| plan.proven || plan.vetted) else {
                return false;
            };
            let Some(Some(entry)) = cell.sure() else {
                return false;
            };
            if Some(entry.policy) != plan.slot {
                return false;
            }
            anything |= plan.proven;
        }
        anything
    }

    /// Once nothing more is planned: asks the kernel about the intents of an interface, if there is anything to ask, and
    /// judges them. A state that a later plan takes back at once was never there.
    pub(crate) fn conclude(&mut self, ifindex: Ifindex) {
        let asks = self.dirty.proofs.remove(&ifindex);
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        if asks {
            let plans = self.plans(ifindex, &port, &claims);
            let target = self.target(&port, &claims);
            self.plan_proofs(&mut port, &claims, &plans, target);
        }
        port.intents_unwell = self.judge_port(&port, &claims);
        if port.is_unwell() {
            self.unwell.insert(ifindex);
        } else {
            self.unwell.remove(&ifindex);
        }
        self.ports.insert(ifindex, port);
    }

    /// Asks the kernel about intents that are complete and not proven.
    fn plan_proofs(&mut self, port: &mut Port, claims: &Claims, plans: &[Plan], target: Option<Token>) {
        let again = std::mem::take(&mut port.prove_again);
        let (Some(token), Some(device)) = (target, port.device) else {
            return;
        };
        let sources = self.wanted_sources(port);
        let row = port.row.sure().copied().flatten();
        // The opening of a closed row covers what was revoked.
        let covered = port.revoked == port.covered || !port.may_be_open();
        let quiet = port.has_program() && port.sources.is(&sources) && covered;
        let Some(row) = row.filter(|_| quiet) else {
            return;
        };
        for (index, plan) in plans.iter().enumerate() {
            let again = again && plan.proven && self.may_prove_again(plan);
            if !plan.deliverable || (plan.proven && !again) {
                continue;
            }
            let current = self
                .objects
                .policies
                .get(&plan.policy)
                .is_some_and(|state| state.current);
            let claim = &claims.intents[index];
            if !current && plan.vetted && row.token == Some(token) && !self.is_wrongly_closed(port, claim) {
                // The old set serves on; there is nothing to say and nothing to open.
                continue;
            }
            let Some(intent) = self.intent(plan.policy, plan.attachment) else {
                continue;
            };
            // One question at a time, also where the last one is no longer of use.
            if matches!(intent.proof, Proof::Asked(..))
                || intent.asked_again.is_some()
                || self.proofs_left.contains_key(&(device.ifindex, plan.policy))
                || intent
                    .proof_trouble
                    .as_ref()
                    .is_some_and(|trouble| trouble.blocked)
            {
                continue;
            }
            // What no member can be reached for is not asked about: the answer would be that there is no producer.
            let reached = plan
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .map_or_else(Families::default, |slot| {
                    self.families_reached(slot, |(member, _)| member != device.ifindex)
                });
            let asked = claim.keys.iter().filter(|key| reached.contain(key.address()));
            let questions = self.questions(port, claims, plan, asked, target);
            let Some(((entries, takeovers), (selected, backends))) =
                questions.zip(plan.slot.and_then(|slot| self.proof_of_set(slot, device.ifindex)))
            else {
                continue;
            };
            let proof = IntentProof {
                device,
                row,
                token,
                sources: sources.clone(),
                entries,
                takeovers,
                selected,
                backends,
            };
            let (policy, attachment) = (plan.policy, plan.attachment);
            let keys = Fingerprint::of(&claim.keys);
            let op = self.send(
                What::ProveIntent(policy, attachment),
                Some(device),
                Op::ProveIntent(proof),
            );
            if let Some(intent) = self.intent_mut(policy, attachment) {
                if again {
                    intent.asked_again = Some(op);
                } else {
                    intent.proof = Proof::Asked(op, token, keys);
                }
            }
        }
    }

    /// The entries of an intent that are there, and those that may become its own. None if something is missing.
    fn questions<'a>(
        &self,
        port: &Port,
        claims: &Claims,
        plan: &Plan,
        keys: impl Iterator<Item = &'a RouteKey>,
        target: Option<Token>,
    ) -> Option<(BTreeMap<RouteKey, Entry>, BTreeMap<RouteKey, SlotId>)> {
        let slot = plan.slot?;
        let (mut entries, mut takeovers) = (BTreeMap::new(), BTreeMap::new());
        for key in keys {
            let entry = port.entries.get(key)?.sure().copied().flatten()?;
            if entry.policy == slot {
                entries.insert(*key, entry);
            } else if entry.open && self.may_take_over(port, claims, plan, key, target) {
                takeovers.insert(*key, slot);
            } else {
                return None;
            }
        }
        Some((entries, takeovers))
    }

    /// Whether an entry of this intent is closed that may be open, as after an audit has found it to be another.
    fn is_wrongly_closed(&self, port: &Port, claim: &Claim) -> bool {
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return false;
        };
        claim.keys.iter().any(|key| {
            let cell = port.entries.get(key);
            let closed = cell.and_then(Cell::sure).is_some_and(|entry| !is_open(*entry));
            closed && self.granted(state, port, claim, key)
        })
    }

    /// What is programmed, and not being asked about, may be asked about again: nothing opens meanwhile.
    fn may_prove_again(&self, plan: &Plan) -> bool {
        self.intent(plan.policy, plan.attachment)
            .is_some_and(|intent| intent.state == State::Programmed)
    }

    fn plan_program(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.has_program() {
            port.troubles.remove(&Goal::Attached);
        } else {
            // Once nothing more is planned that the program would stand on.
            self.dirty.programs.insert(ifindex);
        }
    }

    /// Attaches the program to a device, if everything is ready for it.
    pub(crate) fn attach(&mut self, ifindex: Ifindex) {
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        self.attach_over(ifindex, &mut port, &claims);
        self.ports.insert(ifindex, port);
    }

    fn attach_over(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        let Some(device) = port.device else {
            return;
        };
        if port.has_program() || !port.program.idle() || port.blocked(Goal::Attached) {
            return;
        }
        // Only onto an interface whose row is closed and whose entries are what is wanted now.
        let row_right = if claims.is_empty() {
            port.bare() || (!self.may_remove() && port.row.idle() && !port.may_be_open())
        } else {
            let kinds = self.kinds(port, claims);
            port.row
                .sure()
                .copied()
                .flatten()
                .is_some_and(|row| row.token.is_none() && Kinds::of_row(&row).contain(kinds))
        };
        let keys_right = port.entries.iter().all(|(key, cell)| {
            cell.idle() && (claims.keys.contains_key(key) || claims.kept.contains(key) || !self.may_remove())
        }) && claims
            .keys
            .iter()
            .all(|(key, index)| self.claimed(port, key, &claims.intents[*index]));
        if row_right && keys_right {
            let op = self.send(What::Attach(ifindex), Some(device), Op::Attach { device });
            port.program.send(op, Some(device.mac));
            port.touched = op;
        }
    }

    /// Whether a destination is claimed as far as it can be.
    fn claimed(&self, port: &Port, key: &RouteKey, claim: &Claim) -> bool {
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return true;
        };
        let written = port
            .entries
            .get(key)
            .and_then(Cell::sure)
            .copied()
            .flatten()
            .is_some_and(|entry| Some(entry.policy) == state.slot);
        let failed = state
            .intents
            .get(&claim.attachment)
            .is_some_and(|intent| intent.entries_trouble.is_some());
        written || failed || self.set_trouble(state).is_some()
    }

    // --- answers -------------------------------------------------------------------------------------------

    /// The entries of an intent were written, or not.
    pub(crate) fn entries_answered(
        &mut self,
        (policy, attachment): (PolicyId, AttachmentId),
        keys: &[RouteKey],
        fallback: u8,
        result: OpResult,
    ) {
        let port = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port);
        let all_exist = port
            .and_then(|ifindex| self.ports.get(&ifindex))
            .is_some_and(|port| {
                keys.iter()
                    .filter_map(|key| port.entries.get(key))
                    .all(|cell| !cell.may(Option::is_none))
            });
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let Some(intent) = state.intents.get_mut(&attachment) else {
            return;
        };
        match result {
            Ok(_) => {
                if fallback == 0 && intent.fallback == 0 {
                    self.entries_right(policy, attachment);
                }
            }
            Err(error) => {
                if matches!(error, OpError::Full { .. }) && state.full.insert(attachment) {
                    self.dirty.policies.insert(policy);
                }
                let mut trouble = Trouble::of(&error, FailReason::MapWriteFailed);
                if !all_exist {
                    trouble.message =
                        format!("{error}; the traffic to what could not be claimed takes the default path")
                            .into();
                }
                intent.entries_trouble = Some(trouble);
                self.dirty.touched.insert(policy);
                // What may be open is closed if it is sure to exist, else deleted.
                intent.fallback = if all_exist && fallback == 0 { 1 } else { 2 };
            }
        }
    }

    /// The program gave the verdict that an intent wants, or not.
    pub(crate) fn proof_answered(
        &mut self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
        sent: Boot,
        result: OpResult,
    ) {
        self.dirty_attachment(attachment);
        self.proof_left(op, policy, device);
        self.facts_of(op, device, result.as_ref().err());
        let ifindex = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port);
        let known = ifindex
            .and_then(|ifindex| self.ports.get(&ifindex))
            .and_then(|port| port.known.token());
        let current = ifindex
            .and_then(|ifindex| self.ports.get(&ifindex))
            .is_some_and(|port| port.is_of_this_device(op));
        let took = self.now.boot.since(sent);
        let same = self.is_as_asked(op, policy, attachment, device);
        let Some(intent) = self.intent_mut(policy, attachment) else {
            return;
        };
        let again = intent.asked_again == Some(op);
        if again {
            intent.asked_again = None;
        }
        let Proof::Asked(asked, token, keys) = intent.proof else {
            if again && current {
                self.proven_again(op, policy, attachment, device, result);
            }
            return;
        };
        if asked != op {
            return;
        }
        intent.proof = Proof::None;
        if !current {
            return;
        }
        match result {
            Ok(_) => {
                intent.proof = Proof::Good(op, token, keys);
                intent.proof_trouble = None;
                self.out.measured.push((Leg::WrittenToProven, took));
            }
            // What has changed since, by our own doing or because it is another incarnation, is asked about anew.
            Err(error) if error == OpError::NoDevice || known != Some(token) || !same => {}
            Err(error) => self.disproved(policy, attachment, &error),
        }
    }

    /// Whoever came in the place of an intent that had asked may ask now.
    fn proof_left(&mut self, op: OpId, policy: PolicyId, device: Option<Device>) {
        let Some(ifindex) = device.map(|device| device.ifindex) else {
            return;
        };
        if self.proofs_left.get(&(ifindex, policy)) == Some(&op) {
            self.proofs_left.remove(&(ifindex, policy));
            self.dirty.ports.insert(ifindex);
        }
    }

    /// What an answer says about a device and its program, whoever has asked and whether he still wants to know.
    fn facts_of(&mut self, op: OpId, device: Option<Device>, error: Option<&OpError>) {
        match (error, device) {
            (Some(OpError::NoDevice), device) => self.no_device(op, device),
            (Some(OpError::Detached { .. }), Some(device)) => {
                let port = self.ports.get(&device.ifindex);
                if port.is_some_and(|port| port.is_of_this_device(op)) {
                    self.program_gone(device.ifindex);
                }
            }
            _ => {}
        }
    }

    /// Whether nothing was sent since that changes what a proof has asked about.
    fn is_as_asked(
        &self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
    ) -> bool {
        let port = device.and_then(|device| self.ports.get(&device.ifindex));
        let slot = self.objects.policies.get(&policy).and_then(|state| state.slot);
        let slot = slot.and_then(|slot| self.slots.get(&slot));
        let intent = self.intent(policy, attachment);
        port.is_some_and(|port| op > port.touched)
            && slot.is_some_and(|slot| op > slot.touched)
            && intent.is_some_and(|intent| op > intent.touched)
    }

    /// A proof that was good has been asked for again. What was asked about may have changed since.
    fn proven_again(
        &mut self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
        result: OpResult,
    ) {
        let same = self.is_as_asked(op, policy, attachment, device)
            && self
                .intent(policy, attachment)
                .is_some_and(|intent| matches!(intent.proof, Proof::Good(..)));
        match result {
            Ok(_) => {
                if let Some(intent) = self.intent_mut(policy, attachment) {
                    intent.proof_trouble = None;
                }
            }
            Err(error) if same && error != OpError::NoDevice => {
                if let Some(intent) = self.intent_mut(policy, attachment) {
                    intent.proof = Proof::None;
                }
                self.disproved(policy, attachment, &error);
            }
            Err(_) => {}
        }
    }

    /// The kernel says something else than an intent wants.
    fn disproved(&mut self, policy: PolicyId, attachment: AttachmentId, error: &OpError) {
        if let Some(intent) = self.intent_mut(policy, attachment) {
            intent.proof_trouble = Some(Trouble::of(error, FailReason::ProofFailed));
            intent.vetted = None;
        }
        let Some(ifindex) = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port)
        else {
            return;
        };
        // The identity may be another, and nobody has said so.
        self.read(ifindex, false);
        let slot = self.objects.policies.get(&policy).and_then(|state| state.slot);
        self.audit_at_once(ifindex, slot);
    }

    /// A proof found that the program is gone: it is attached anew, under a closed row.
    pub(crate) fn program_gone(&mut self, ifindex: Ifindex) {
        if let Some(port) = self.ports.get_mut(&ifindex)
            && port.program.idle()
        {
            // A link without a device may be left of it.
            port.program.doubt(None);
            self.dirty.ports.insert(ifindex);
        }
        self.dirty_interface_of(ifindex);
    }

    // --- states --------------------------------------------------------------------------------------------

    /// Judges the intents of an interface. Whether something about one of them failed.
    fn judge_port(&mut self, port: &Port, claims: &Claims) -> bool {
        let mut unwell = false;
        let link = port
            .device
            .and_then(|device| self.interfaces.link(device.ifindex))
            .cloned();
        let facts = RowFacts {
            sources: self.wanted_sources(port),
            kinds: self.kinds(port, claims),
            via: self.answers_via(port),
        };
        let stuck = port.troubles.get(&Goal::Unclaimed).filter(|_| port.stuck(claims));
        for id in &port.attachments {
            let Some(attachment) = self.objects.attachments.get(id) else {
                continue;
            };
            let gate = classify(link.as_ref(), &port.known, attachment.object.expected);
            let lost = attachment.lost().cloned();
            let token = match &port.known {
                Known::Row(row) => link
                    .as_ref()
                    .and_then(|link| crate::gate::of_device(link, row.as_ref()))
                    .map(|identity| identity.token),
                Known::Unread | Known::Unreadable(_) => None,
            };
            for policy in attachment.consumes.clone() {
                let Some(state) = self.objects.policies.get(&policy) else {
                    continue;
                };
                let Some(intent) = state.intents.get(id) else {
                    continue;
                };
                unwell |= intent.has_trouble();
                let claim = claims
                    .intents
                    .iter()
                    .find(|claim| claim.policy == policy && claim.attachment == *id);
                let full = self.full(state);
                let refused = claim
                    .and_then(|claim| claim.refused.as_ref())
                    .map(|(reason, message)| (*reason, message.as_str()))
                    .or_else(|| state.refusal());
                let conflict = lost
                    .as_deref()
                    .or_else(|| claim.and_then(|claim| claim.conflict.as_deref()));
                let locals = claim.and_then(|claim| match self.locals.state(claim) {
                    LocalsState::Failed(trouble) => Some(trouble),
                    LocalsState::Known | LocalsState::Awaited => None,
                });
                let of_port = Self::worst_trouble(&port.troubles).or(stuck);
                let hindered = of_port.is_some() || full.is_some() || intent.entries_trouble.is_some();
                let trouble = of_port
                    .or(full.as_ref())
                    .or(locals)
                    .or_else(|| self.set_trouble(state))
                    .or(intent.entries_trouble.as_ref())
                    .or_else(|| {
                        intent
                            .proof_trouble
                            .as_ref()
                            .filter(|_| gate.token().is_some() && state.ready_for(*id) && !state.waiting)
                    });
                let judged = Facts {
                    refused,
                    conflict,
                    passed: self.passed,
                    trouble,
                    gate: &gate,
                    unreachable: claim.and_then(|claim| claim.unreachable.as_deref()),
                    unreadable: state.unreadable.as_deref(),
                    producers: self.producers_of(state, *id),
                    done: claim.is_some_and(|claim| self.done(port, state, intent, claim, &facts)),
                };
                let judged = judge(intent.state, &judged);
                self.set_hindered(policy, *id, hindered);
                self.set_state(policy, *id, judged, token);
            }
        }
        unwell
    }

    pub(crate) fn producers_of<'a>(&self, state: &'a PolicyState, consumer: AttachmentId) -> Producers<'a> {
        let coming = || state.unread || state.coming.iter().any(|coming| *coming != consumer);
        let ready = state.ready_for(consumer);
        let lacking = state.lacking_for(consumer).within(self.families_of(consumer));
        if (ready && lacking.is_empty()) || (!state.waiting && coming()) {
            Producers::Ready
        } else if ready {
            Producers::Missing(state.unreached.as_deref())
        } else if state.waiting {
            let serving = state
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .is_some_and(|slot| slot.serves());
            Producers::Awaited { serving }
        } else {
            Producers::Missing(state.unreached.as_deref())
        }
    }

    /// Families in which a workload can send anything.
    fn families_of(&self, consumer: AttachmentId) -> Families {
        match self.objects.attachments.get(&consumer) {
            Some(state) if !state.object.addresses.is_empty() => {
                Families::of(state.object.addresses.iter().copied())
            }
            Some(_) | None => Families::BOTH,
        }
    }

    /// Everything that the intent needs is in the kernel, answered and proven.
    fn done(
        &self,
        port: &Port,
        state: &PolicyState,
        intent: &Intent,
        claim: &Claim,
        facts: &RowFacts,
    ) -> bool {
        let Some(ready) = port
            .ready
            .as_ref()
            .filter(|ready| ready.attachment == claim.attachment)
        else {
            return false;
        };
        let Some((id, slot)) = state
            .slot
            .and_then(|id| self.slots.get(&id).map(|slot| (id, slot)))
        else {
            return false;
        };
        let epoch = port.row.sure().copied().flatten().map_or(0, |row| row.epoch);
        let row = facts
            .kinds
            .row(Some(ready.token), epoch, !facts.sources.is_empty(), facts.via);
        let proven = match intent.proof {
            Proof::Good(op, token, keys) => {
                token == ready.token
                    && keys == Fingerprint::of(&claim.keys)
                    && op > port.touched
                    && op > intent.touched
                    && op > slot.touched
            }
            Proof::None | Proof::Asked(..) => false,
        };
        proven
            && state.current
            && slot.settled()
            && port.has_program()
            && port.row.is(&Some(row))
            && port.sources.is(&facts.sources)
            && port.revoked == port.covered
            && !claim.keys.is_empty()
            && claim.keys.iter().all(|key| {
                port.entries.get(key).is_some_and(|cell| {
                    cell.is(&Some(Entry {
                        policy: id,
                        open: true,
                    }))
                })
            })
    }

    /// Keeps the indexes of policy slots, and the counts of what is on its way out.
    fn account(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        let mut used = BTreeSet::new();
        let mut removing = BTreeSet::new();
        let mut claimed_away = BTreeSet::new();
        let mut delivering_on = BTreeSet::new();
        let closes = self.passed && port.may_be_open() && !self.frozen(port);
        for (key, cell) in &port.entries {
            let claim = claims.keys.get(key);
            let owner = claim.and_then(|index| {
                let policy = claims.intents[*index].policy;
                self.objects.policies.get(&policy).and_then(|state| state.slot)
            });
            let closes = closes && self.is_to_be_closed(port, claims, key, cell);
            for entry in cell.values().iter().flatten() {
                used.insert(entry.policy);
                let right = owner == Some(entry.policy)
                    && claim.is_some_and(|index| claims.intents[*index].may_deliver());
                if closes && entry.open && !right {
                    delivering_on.insert(entry.policy);
                }
                if owner == Some(entry.policy) || claims.kept.contains(key) || !self.passed {
                    continue;
                }
                removing.insert(entry.policy);
                if claim.is_some() {
                    claimed_away.insert(entry.policy);
                }
            }
        }
        for slot in port.slots_used.difference(&used) {
            if let Some(ports) = self.slot_ports.get_mut(slot) {
                ports.remove(&ifindex);
                if ports.is_empty() {
                    self.slot_ports.remove(slot);
                    self.dirty.slots.insert(*slot);
                }
            }
        }
        for slot in used.difference(&port.slots_used) {
            self.slot_ports.entry(*slot).or_default().insert(ifindex);
        }
        port.slots_used = used;
        for slot in removing.difference(&port.removing) {
            self.summary.intents.removing += 1;
            self.count_removing(*slot, |count| count + 1);
        }
        for slot in port.removing.difference(&removing) {
            self.summary.intents.removing = self.summary.intents.removing.saturating_sub(1);
            self.count_removing(*slot, |count| count.saturating_sub(1));
        }
        for slot in claimed_away.difference(&port.claimed_away) {
            if let Some(state) = self.slots.get_mut(slot) {
                state.claimed_away += 1;
            }
        }
        for slot in port.claimed_away.difference(&claimed_away) {
            if let Some(state) = self.slots.get_mut(slot) {
                state.claimed_away = state.claimed_away.saturating_sub(1);
                if state.claimed_away == 0 {
                    // Its policy may let held consumers pass now.
                    self.dirty.policies.extend(state.owner);
                }
            }
        }
        for slot in delivering_on.difference(&port.delivering_on) {
            if let Some(state) = self.slots.get_mut(slot) {
                state.delivering_on += 1;
            }
        }
        for slot in port.delivering_on.difference(&delivering_on) {
            if let Some(state) = self.slots.get_mut(slot) {
                state.delivering_on = state.delivering_on.saturating_sub(1);
                if state.delivering_on == 0 {
                    // Its selector may move now.
                    self.dirty.policies.extend(state.owner);
                }
            }
        }
        port.removing = removing;
        port.claimed_away = claimed_away;
        port.delivering_on = delivering_on;
    }

    /// Whether an entry that may be open without the right to it will be closed: nobody keeps it, and nothing failed
    /// that this waits for, or it is being tried again.
    fn is_to_be_closed(
        &self,
        port: &Port,
        claims: &Claims,
        key: &RouteKey,
        cell: &Cell<Option<Entry>>,
    ) -> bool {
        if claims.kept.contains(key) {
            return false;
        }
        if !cell.idle() && !self.is_silent(cell.flight()) {
            return true;
        }
        if port.troubles.contains_key(&Goal::Unclaimed) {
            return false;
        }
        // Where nothing is claimed any more the row goes first, and the entries with all the rest.
        let row_is_tried = !port.row.idle() && !self.is_silent(port.row.flight());
        if claims.is_empty() && port.troubles.contains_key(&Goal::RowClosed) && !row_is_tried {
            return false;
        }
        let Some(index) = claims.keys.get(key) else {
            // At the latest once the lists are complete.
            return true;
        };
        let claim = &claims.intents[*index];
        self.intent(claim.policy, claim.attachment)
            .is_none_or(|intent| intent.entries_trouble.is_none() && intent.fallback == 0)
    }

    fn count_removing(&mut self, slot: SlotId, count: impl FnOnce(u64) -> u64) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.removing = count(state.removing);
            self.dirty.touched.extend(state.owner);
        }
    }
}
