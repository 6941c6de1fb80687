//! The engine as its driver sees it: events in, effects out, one deadline.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::audit::Audit;
use crate::backoff::Backoff;
use crate::belief::Drift;
use crate::gate::Known;
use crate::interfaces::{Change, Interfaces};
use crate::locals::Locals;
use crate::model::{
    BackendId, Boot, Config, Device, Effect, Event, FailReason, Happening, HoldReason, Identity, Ifindex,
    Leg, Level, Link, Mac, Now, ObjectName, Op, OpId, RegistryRead, Remembered, SlotId, State, Token, Uid,
    UidHash,
};
use crate::objects::{AttachmentId, Objects, PolicyId, PolicyState};
use crate::plan::{Flight, Out, SILENCE, What};
use crate::ports::{Port, Read};
use crate::producers::{BackendState, Orphan, Release, SlotState};
use crate::slots::{Arena, Ids};
use crate::view::{Barrier, Summary, View};

/// How often held intents are summed up in the log.
const SUMMARY_EVERY: u64 = 60 * Boot::SECOND;
/// How soon claimants of one name are asked for again.
const CONTEST_EVERY: u64 = Boot::SECOND;

/// Something that happens although nothing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Timer {
    /// An operation is given up.
    Silence,
    /// Something that was taken out of use can be given out again.
    Release,
    /// A policy that holds or failed is looked at again.
    Recheck(PolicyId),
    /// A switch has waited for its deadline.
    Deadline(PolicyId),
    /// Registry rows that could not be read.
    Reads,
    /// What belongs to no policy and failed.
    Orphans,
    /// Claimants of one name are asked for again.
    Contest,
    /// Held intents are summed up in the log.
    Summary,
    /// The kernel is compared with what is believed of it.
    Audit,
}

/// How complete the desired objects are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Completeness {
    /// Not at all.
    #[default]
    Partial,
    /// A saved set: nothing may be removed because it is not in it.
    Saved,
    /// Complete.
    Complete,
}

/// An identity whose device is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dead {
    token: Token,
    /// The address that its row names: a device that has it is the same, back again. None where all devices have one.
    mac: Option<Mac>,
}

impl Dead {
    /// What is kept of a row that speaks of a device that is gone.
    fn of(identity: &Identity) -> Self {
        Self {
            token: identity.token,
            mac: (!identity.host_mac_shared).then_some(identity.host_mac),
        }
    }
}

/// What must be planned again.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Dirty {
    /// Interface names whose attachments must be judged.
    pub(crate) names: BTreeSet<String>,
    pub(crate) policies: BTreeSet<PolicyId>,
    /// Policies that are planned once more after the interfaces.
    pub(crate) late: BTreeSet<PolicyId>,
    pub(crate) slots: BTreeSet<SlotId>,
    pub(crate) ports: BTreeSet<Ifindex>,
    /// Interfaces that were planned, and whose intents are to be judged when all are.
    pub(crate) judged: BTreeSet<Ifindex>,
    /// Those of them with intents that may be proven.
    pub(crate) proofs: BTreeSet<Ifindex>,
    /// Interfaces on which the program may be missing.
    pub(crate) programs: BTreeSet<Ifindex>,
    /// Attachments without a device.
    pub(crate) loose: BTreeSet<AttachmentId>,
    /// Policies whose view may be another.
    pub(crate) touched: BTreeSet<PolicyId>,
    /// Names that must be reported.
    pub(crate) reports: BTreeSet<ObjectName>,
}

impl Dirty {
    fn is_empty(&self) -> bool {
        self.names.is_empty()
            && self.policies.is_empty()
            && self.slots.is_empty()
            && self.ports.is_empty()
            && self.loose.is_empty()
            && self.touched.is_empty()
    }
}

/// Desired and plumbed state, and the way from the one to the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Engine {
    /// Given anew to an engine that is read back.
    #[serde(skip, default = "Config::nothing")]
    pub(crate) config: Config,
    pub(crate) now: Now,

    // The start barrier.
    adopted: bool,
    dumped: bool,
    pub(crate) objects_known: Completeness,
    /// The barrier has passed.
    pub(crate) passed: bool,
    /// When it did; for people.
    #[serde(skip)]
    pub(crate) passed_at: Option<Boot>,

    // Facts.
    pub(crate) interfaces: Interfaces,
    /// Devices that the kernel denied although they are in the table.
    pub(crate) denied: BTreeMap<Ifindex, Device>,
    asked: BTreeSet<Ifindex>,
    /// Identities of devices that an operation did not find; the kernel has not said yet whether they are gone.
    suspects: BTreeMap<Ifindex, (Device, Dead)>,
    /// Identities that were registered before this life, of devices that nobody has told of. One whose number stands for
    /// no device, as the kernel says when it is asked after that, died while no agent looked.
    unattended: BTreeMap<Ifindex, Dead>,
    /// Identities of devices that are gone: whatever the registry says, they are no other device's.
    pub(crate) dead: BTreeMap<Ifindex, Dead>,
    /// The node's own addresses.
    pub(crate) locals: Locals,
    pub(crate) objects: Objects,
    /// Proofs that are out of intents that have ended, by interface and policy.
    pub(crate) proofs_left: BTreeMap<(Ifindex, PolicyId), OpId>,
    /// Times that an earlier life knew.
    pub(crate) memory: BTreeMap<(Uid, Uid), Remembered>,

    // The kernel.
    pub(crate) ports: BTreeMap<Ifindex, Port>,
    /// Interfaces at which a recheck has something to do, as of when they were planned last.
    pub(crate) unwell: BTreeSet<Ifindex>,
    pub(crate) slots: BTreeMap<SlotId, SlotState>,
    /// Slots of policies whose content was refused and of which no good one is known: they stay as they are.
    pub(crate) kept_slots: BTreeSet<SlotId>,
    pub(crate) slot_by_uid: BTreeMap<UidHash, SlotId>,
    /// Per slot, the interfaces with entries that may lead to it.
    pub(crate) slot_ports: BTreeMap<SlotId, BTreeSet<Ifindex>>,
    pub(crate) backends: BTreeMap<BackendId, BackendState>,
    /// Per device, slots with a backend there.
    pub(crate) backed: BTreeMap<Ifindex, BTreeMap<SlotId, u32>>,
    pub(crate) slot_ids: Ids,
    pub(crate) backend_ids: Ids,
    pub(crate) arena: Arena,
    pub(crate) releases: BTreeMap<Boot, Vec<Release>>,

    // Operations.
    pub(crate) last_op: u64,
    pub(crate) flights: BTreeMap<OpId, Flight>,
    /// Those that were not given up yet.
    pub(crate) unsilenced: BTreeSet<OpId>,
    pub(crate) orphans: BTreeSet<Orphan>,
    pub(crate) orphan_recheck: Option<Backoff>,
    /// Registry rows to be read once the barrier has passed, or whose device is gone.
    doomed: BTreeSet<(Ifindex, Token)>,
    reads_due: BTreeSet<(Boot, Ifindex)>,

    pub(crate) audit: Audit,

    pub(crate) timers: BTreeMap<Timer, Boot>,
    queue: BTreeSet<(Boot, Timer)>,
    pub(crate) dirty: Dirty,
    /// Empty after a poll, which is when an engine may be written down.
    #[serde(skip)]
    pub(crate) out: Out,

    pub(crate) summary: Summary,
    pub(crate) troubled: BTreeSet<ObjectName>,
}

impl Engine {
    /// An engine that knows nothing yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let capacity = config.capacity;
        let mut engine = Self {
            config,
            now: Now::default(),
            adopted: false,
            dumped: false,
            objects_known: Completeness::Partial,
            passed: false,
            passed_at: None,
            interfaces: Interfaces::default(),
            denied: BTreeMap::new(),
            asked: BTreeSet::new(),
            suspects: BTreeMap::new(),
            unattended: BTreeMap::new(),
            dead: BTreeMap::new(),
            locals: Locals::default(),
            objects: Objects::default(),
            proofs_left: BTreeMap::new(),
            memory: BTreeMap::new(),
            ports: BTreeMap::new(),
            unwell: BTreeSet::new(),
            slots: BTreeMap::new(),
            kept_slots: BTreeSet::new(),
            slot_by_uid: BTreeMap::new(),
            slot_ports: BTreeMap::new(),
            backends: BTreeMap::new(),
            backed: BTreeMap::new(),
            slot_ids: Ids::new(0, capacity.policies),
            // A slot that was never written says 0: no backend has that id.
            backend_ids: Ids::new(1, capacity.backends),
            arena: Arena::new(capacity.slots),
            releases: BTreeMap::new(),
            last_op: 0,
            flights: BTreeMap::new(),
            unsilenced: BTreeSet::new(),
            orphans: BTreeSet::new(),
            orphan_recheck: None,
            doomed: BTreeSet::new(),
            reads_due: BTreeSet::new(),
            audit: Audit::default(),
            timers: BTreeMap::new(),
            queue: BTreeSet::new(),
            dirty: Dirty::default(),
            out: Out::default(),
            summary: Summary::default(),
            troubled: BTreeSet::new(),
        };
        for reason in HoldReason::ALL {
            engine.summary.held.insert(reason, 0);
            engine.summary.holds_begun.insert(reason, 0);
        }
        for reason in FailReason::ALL {
            engine.summary.failed.insert(reason, 0);
        }
        for kind in Drift::ALL {
            engine.summary.drift.insert(kind, 0);
        }
        engine.summary.waiting_for = engine.waiting_for();
        engine
    }

    /// Takes one event in. Never emits: call [`Engine::poll`] after a batch.
    pub fn handle(&mut self, event: Event, now: Now) {
        self.now = now;
        match event {
            Event::Adopted(mut adoption) => {
                self.find_unattended(std::mem::take(&mut adoption.identities));
                self.adopt(*adoption);
                self.adopted = true;
                self.strand();
                self.everything_dirty();
            }
            Event::Remembered(all) => {
                for one in all {
                    self.memory
                        .insert((one.policy.clone(), one.attachment.clone()), one);
                }
            }
            Event::Objects(changes) => self.objects_changed(changes),
            Event::SavedComplete => self.completeness(Completeness::Saved),
            Event::SourceComplete => self.completeness(Completeness::Complete),
            Event::Link(link) => {
                self.asked.remove(&link.ifindex);
                self.link_seen(link);
            }
            Event::LinkGone(ifindex) => {
                self.asked.remove(&ifindex);
                self.link_lost(ifindex, true);
            }
            Event::LinkDump(links) => self.link_dump(links),
            Event::Locals(addresses) => self.locals_told(addresses),
            Event::Registry(reads) => {
                for (ifindex, read) in reads {
                    self.registry_answered(ifindex, read);
                }
            }
            Event::Poke(ifindex) => self.poked(ifindex),
            Event::Answer(op, result) => self.answered(op, result),
            Event::Audited(id, audited) => self.audited(id, audited),
            Event::DevicesDrifted(ifindexes) => self.devices_drifted(&ifindexes),
            Event::HooksChanged(ifindexes) => self.hooks_changed(&ifindexes),
            Event::HooksUnknown => self.audit_everything(),
            Event::Tick => {}
        }
    }

    /// What is to be done now, in order.
    pub fn poll(&mut self, now: Now) -> Vec<Effect> {
        self.now = now;
        self.fire();
        self.settle();
        if !self.passed && self.adopted && self.dumped && self.objects_known > Completeness::Partial {
            let unread = self
                .ports
                .values()
                .any(|port| !port.attachments.is_empty() && port.known == Known::Unread);
            if !unread {
                self.passed = true;
                self.passed_at = Some(now.boot);
                self.everything_dirty();
                self.settle();
                self.audit_everything();
            }
        }
        self.plan_locals();
        self.doom();
        self.audit_on();
        if self.timers.get(&Timer::Audit).is_some_and(|due| *due <= now.boot) {
            // The start, or the end of a turn, has made the next one due.
            self.fire();
            self.audit_on();
        }
        self.finish();
        self.out.take()
    }

    /// When to poll next although nothing happened; none = only an event changes anything.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Boot> {
        self.queue.first().map(|(due, _)| *due)
    }

    /// What it was made with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// What is known.
    #[must_use]
    pub const fn view(&self) -> View<'_> {
        View::new(self)
    }

    /// Whether events were handled that no poll has looked at yet.
    pub(crate) fn unplanned(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Whether a device is being asked for.
    pub(crate) fn is_asked(&self, ifindex: Ifindex) -> bool {
        self.asked.contains(&ifindex)
    }

    /// Whether something may be removed because no object wants it.
    pub(crate) fn may_remove(&self) -> bool {
        self.passed && self.objects_known == Completeness::Complete
    }

    /// Sets a timer, or takes it away.
    pub(crate) fn timer(&mut self, timer: Timer, due: Option<Boot>) {
        let old = match due {
            Some(due) => self.timers.insert(timer, due),
            None => self.timers.remove(&timer),
        };
        if old == due {
            return;
        }
        if let Some(old) = old {
            self.queue.remove(&(old, timer));
        }
        if let Some(due) = due {
            self.queue.insert((due, timer));
        }
    }

    fn completeness(&mut self, completeness: Completeness) {
        if completeness > self.objects_known {
            self.objects_known = completeness;
            self.everything_dirty();
        }
    }

    /// Only at the few moments of a start.
    fn everything_dirty(&mut self) {
        self.dirty.names.extend(self.objects.by_interface.keys().cloned());
        self.dirty.policies.extend(self.objects.policies.keys());
        self.dirty.touched.extend(self.objects.policies.keys());
        self.dirty.slots.extend(self.slots.keys());
        self.dirty.ports.extend(self.ports.keys());
    }

    // --- links ---------------------------------------------------------------------------------------------

    fn link_seen(&mut self, link: Link) {
        let ifindex = link.ifindex;
        self.unattended.remove(&ifindex);
        // An identity whose address does not tell devices apart may be that of the one which is there now.
        if let Some((device, identity)) = self.suspects.remove(&ifindex)
            && device != link.device()
            && identity.mac.is_some()
        {
            self.identity_died(ifindex, identity);
        }
        self.revive(ifindex, link.mac);
        if let Some(change) = self.interfaces.present(link) {
            self.link_changed(ifindex, change);
        }
        let contested = self.interfaces.contested();
        if !contested.is_empty() && !self.timers.contains_key(&Timer::Contest) {
            self.ask(contested);
            self.timer(Timer::Contest, Some(self.now.boot.plus(CONTEST_EVERY)));
        }
    }

    /// A device is gone. `sure`: the kernel's links say so, not only an operation that did not find it.
    pub(crate) fn link_lost(&mut self, ifindex: Ifindex, sure: bool) {
        if let Some((_, identity)) = self.suspects.remove(&ifindex) {
            self.identity_died(ifindex, identity);
        }
        if sure {
            self.denied.remove(&ifindex);
        }
        if sure && let Some(identity) = self.unattended.remove(&ifindex) {
            self.identity_died(ifindex, identity);
        }
        let dead = self.interfaces.link(ifindex).cloned();
        let Some(change) = self.interfaces.gone(ifindex) else {
            if let Some(port) = self.ports.get_mut(&ifindex).filter(|_| sure) {
                port.gone();
                self.dirty.ports.insert(ifindex);
            }
            return;
        };
        if let (Some(dead), Some(port)) = (dead, self.ports.get(&ifindex))
            && let Known::Row(row) = &port.known
            && let Some(identity) = crate::gate::of_device(&dead, row.as_ref())
        {
            let identity = Dead::of(&identity);
            if sure {
                self.identity_died(ifindex, identity);
            } else {
                self.suspects.insert(ifindex, (dead.device(), identity));
            }
        }
        self.link_changed(ifindex, change);
    }

    /// Identities of devices that may have gone while no agent ran.
    fn find_unattended(&mut self, identities: BTreeMap<Ifindex, Identity>) {
        let unseen = identities
            .iter()
            .filter(|(ifindex, _)| self.interfaces.link(**ifindex).is_none());
        self.unattended = unseen
            .map(|(ifindex, identity)| (*ifindex, Dead::of(identity)))
            .collect();
    }

    /// An identity dies with its device, unless somebody else has its row by now.
    fn identity_died(&mut self, ifindex: Ifindex, dead: Dead) {
        self.doomed.insert((ifindex, dead.token));
        self.dead.insert(ifindex, dead);
    }

    /// A device with this address is there. If it is one that had gone, as to another namespace and back, its
    /// identity lives on, unless its row is being deleted.
    fn revive(&mut self, ifindex: Ifindex, mac: Mac) {
        let Some(dead) = self
            .dead
            .get(&ifindex)
            .filter(|dead| dead.mac == Some(mac))
            .copied()
        else {
            return;
        };
        if self.is_deleting(ifindex) {
            return;
        }
        self.dead.remove(&ifindex);
        self.doomed.remove(&(ifindex, dead.token));
        self.settled_orphan(Orphan::Identity(ifindex, dead.token));
        self.read(ifindex, false);
    }

    /// Whether a registry row of this number is being deleted.
    fn is_deleting(&self, ifindex: Ifindex) -> bool {
        self.flights
            .values()
            .any(|flight| matches!(flight.what, What::DeleteIdentity(other, _) if other == ifindex))
    }

    /// The row of an identity that died could not be deleted: later, unless its device is back.
    pub(crate) fn identity_not_deleted(&mut self, ifindex: Ifindex, token: Token) {
        self.orphaned(Orphan::Identity(ifindex, token));
        if let Some(mac) = self.interfaces.link(ifindex).map(|link| link.mac) {
            self.revive(ifindex, mac);
        }
    }

    /// The row of an identity that died is gone.
    pub(crate) fn identity_deleted(&mut self, ifindex: Ifindex) {
        if self.ports.contains_key(&ifindex) {
            // A read that is under way may still bring it, and is not believed.
            self.read(ifindex, false);
        } else {
            self.dead.remove(&ifindex);
        }
    }

    fn link_dump(&mut self, links: Vec<Link>) {
        let there: BTreeSet<Ifindex> = links.iter().map(|link| link.ifindex).collect();
        let gone: Vec<Ifindex> = self
            .interfaces
            .ifindexes()
            .chain(self.suspects.keys().copied())
            .chain(self.denied.keys().copied())
            .chain(self.unattended.keys().copied().filter(|_| self.dumped))
            .filter(|ifindex| !there.contains(ifindex))
            .collect();
        for ifindex in gone {
            self.link_lost(ifindex, true);
        }
        for link in links {
            self.link_seen(link);
        }
        self.asked.clear();
        if !self.dumped {
            self.dumped = true;
            self.strand();
            self.everything_dirty();
            // A dump may be older than a row of which it knows no device.
            self.ask(self.unattended.keys().copied().collect());
        } else if self.passed {
            // News were lost: what they would have changed may be wrong, too.
            self.audit_everything();
        }
    }

    /// Once both are known: what earlier lives left for devices that are not there.
    fn strand(&mut self) {
        if self.adopted && self.dumped {
            for port in self.ports.values_mut() {
                port.stranded();
            }
        }
    }

    fn link_changed(&mut self, ifindex: Ifindex, change: Change) {
        self.stir_port(ifindex);
        let device = self.interfaces.link(ifindex).map(Link::device);
        if let Some(port) = self.ports.get_mut(&ifindex) {
            let last = OpId(self.last_op);
            // While it is being asked for, what is told may be older than the denial.
            let asking = self.asked.contains(&ifindex) || self.out.asks.contains(&ifindex);
            let denied = self.denied.get(&ifindex).copied();
            if change.replaced {
                port.device_changed(device, denied, asking, last);
            } else {
                port.unblock();
            }
            self.dirty.ports.insert(ifindex);
            // Its own events cut through: an identity may have come with it.
            if device.is_some() && (change.replaced || port.hangs_on_identity) {
                self.read(ifindex, change.replaced);
            }
            self.unblock_intents(ifindex);
        }
        self.dirty.names.extend(change.names);
        self.dirty_producers_of(ifindex);
    }

    pub(crate) fn ask(&mut self, ifindexes: BTreeSet<Ifindex>) {
        self.asked.extend(&ifindexes);
        self.out.asks.extend(ifindexes);
    }

    /// Policies that have, or may want, this device in their sets must be planned again.
    pub(crate) fn dirty_producers_of(&mut self, ifindex: Ifindex) {
        for slot in self.backed.get(&ifindex).into_iter().flat_map(BTreeMap::keys) {
            match self.slots.get(slot).and_then(|slot| slot.owner) {
                Some(owner) => self.dirty.policies.insert(owner),
                None => self.dirty.slots.insert(*slot),
            };
        }
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in &port.attachments {
            if let Some(state) = self.objects.attachments.get(attachment) {
                self.dirty.policies.extend(&state.produces);
            }
        }
    }

    /// Sets that failed with this device as it was are another matter with it as it is now.
    fn unblock_sets_of(&mut self, ifindex: Ifindex) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        let attachments = port
            .attachments
            .iter()
            .filter_map(|id| self.objects.attachments.get(id));
        for policy in attachments.flat_map(|state| &state.produces) {
            let slot = self.objects.policies.get(policy).and_then(|state| state.slot);
            let trouble = slot
                .and_then(|slot| self.slots.get_mut(&slot))
                .and_then(|slot| slot.trouble.as_mut());
            if let Some(trouble) = trouble {
                trouble.blocked = false;
            }
        }
    }

    /// The attachments of a device must be judged again.
    pub(crate) fn dirty_interface_of(&mut self, ifindex: Ifindex) {
        if let Some(link) = self.interfaces.link(ifindex) {
            self.dirty.names.insert(link.name.clone());
        }
    }

    // --- registry ------------------------------------------------------------------------------------------

    /// Asks for the registry row of an interface. `fresh`: what is under way may be about an earlier device.
    pub(crate) fn read(&mut self, ifindex: Ifindex, fresh: bool) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let handed_over = !self.out.reads.contains(&ifindex);
        if fresh {
            port.read.void = port.read.unanswered - u32::from(!handed_over);
        }
        if !handed_over {
            // It will be carried out after this moment.
            return;
        }
        if port.read.out.is_some() {
            port.read.again = true;
            return;
        }
        port.read.unanswered += 1;
        self.reads_due.remove(&(port.read.due, ifindex));
        port.read.out = Some(self.now.boot);
        port.read.due = self.now.boot.plus(SILENCE);
        self.reads_due.insert((port.read.due, ifindex));
        self.out.reads.insert(ifindex);
    }

    /// Whether this is the identity of a device that is gone.
    fn is_dead(&self, ifindex: Ifindex, token: Token) -> bool {
        self.dead.get(&ifindex).is_some_and(|dead| dead.token == token)
    }

    /// A read of the registry was answered, maybe late, maybe about an earlier device of that number.
    fn registry_answered(&mut self, ifindex: Ifindex, read: RegistryRead) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return self.registry_read(ifindex, read);
        };
        let Read { unanswered, void, .. } = port.read;
        port.read.unanswered = unanswered.saturating_sub(1);
        port.read.void = void.saturating_sub(1);
        if void == 0 {
            self.registry_read(ifindex, read);
        } else if port.read.unanswered == port.read.void {
            // None is out that was asked for since.
            self.reads_due.remove(&(port.read.due, ifindex));
            port.read.out = None;
            port.read.again = false;
            if port.attachments.is_empty() {
                self.dirty.ports.insert(ifindex);
            } else {
                self.read(ifindex, false);
            }
        }
    }

    fn registry_read(&mut self, ifindex: Ifindex, read: RegistryRead) {
        self.stir_port(ifindex);
        let read = match read {
            RegistryRead::Row(identity) if self.is_dead(ifindex, identity.token) => RegistryRead::Absent,
            RegistryRead::Row(_) | RegistryRead::Absent => {
                self.dead.remove(&ifindex);
                read
            }
            RegistryRead::Failed(_) => read,
        };
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let again = port.read.again;
        // Nobody's port may have stayed for the sake of this read alone.
        let mut plan = port.attachments.is_empty();
        self.reads_due.remove(&(port.read.due, ifindex));
        port.read.out = None;
        port.read.again = false;
        let before = port.known.clone();
        let failed = match &read {
            RegistryRead::Failed(error) => Some(error.clone()),
            RegistryRead::Row(_) | RegistryRead::Absent => None,
        };
        port.known = before.clone().after(read);
        if let Some(error) = failed {
            let backoff = port
                .read
                .backoff
                .map_or_else(|| Backoff::begin(self.now.boot), |b| b.next(self.now.boot));
            if port.read.backoff.is_none() {
                self.say(Level::Warn, Happening::RegistryUnreadable(error));
            }
            if let Some(port) = self.ports.get_mut(&ifindex) {
                port.read.backoff = Some(backoff);
                port.read.due = backoff.due();
                self.reads_due.insert((backoff.due(), ifindex));
            }
        } else {
            port.read.backoff = None;
        }
        if let Some(port) = self.ports.get(&ifindex)
            && port.known != before
        {
            plan = true;
            self.dirty_interface_of(ifindex);
            self.dirty_producers_of(ifindex);
            self.unblock_sets_of(ifindex);
            self.forget_disproofs(ifindex);
        }
        // A row that is as it was is no news: whoever waits goes on waiting, and costs nothing.
        if plan {
            self.dirty.ports.insert(ifindex);
        }
        if again {
            self.read(ifindex, false);
        }
    }

    fn poked(&mut self, ifindex: Ifindex) {
        if self.interfaces.link(ifindex).is_none() {
            self.ask(BTreeSet::from([ifindex]));
        }
        self.read(ifindex, false);
    }

    /// Deletes identities whose device is gone.
    fn doom(&mut self) {
        if !self.passed {
            return;
        }
        for (ifindex, token) in std::mem::take(&mut self.doomed) {
            if self.is_deleting(ifindex) {
                // One operation per row: this one waits for the answer to the other.
                self.doomed.insert((ifindex, token));
                continue;
            }
            self.send(
                What::DeleteIdentity(ifindex, token),
                None,
                Op::DeleteIdentity { ifindex, token },
            );
        }
    }

    // --- time ----------------------------------------------------------------------------------------------

    fn fire(&mut self) {
        let mut rechecks = BTreeSet::new();
        while let Some(&(due, timer)) = self.queue.first() {
            if due > self.now.boot {
                break;
            }
            self.queue.pop_first();
            self.timers.remove(&timer);
            match timer {
                Timer::Silence => self.silence(),
                Timer::Release => self.release(),
                Timer::Recheck(policy) => _ = rechecks.insert(policy),
                Timer::Deadline(policy) => {
                    self.dirty.policies.insert(policy);
                }
                Timer::Reads => self.reads_overdue(),
                Timer::Orphans => self.recheck_orphans(),
                Timer::Contest => {
                    let contested = self.interfaces.contested();
                    if !contested.is_empty() {
                        self.ask(contested);
                        self.timer(Timer::Contest, Some(self.now.boot.plus(CONTEST_EVERY)));
                    }
                }
                Timer::Audit => self.begin_audit(),
                Timer::Summary => {
                    let counts = self.summary.intents;
                    if counts.held > 0 {
                        self.say(
                            Level::Info,
                            Happening::Summary {
                                programmed: counts.programmed,
                                held: counts.held,
                                failed: counts.failed,
                                pending: counts.pending,
                            },
                        );
                    }
                }
            }
        }
        if !rechecks.is_empty() {
            self.recheck(&rechecks);
        }
    }

    /// Reads that failed are tried again; reads without an answer have failed.
    fn reads_overdue(&mut self) {
        while let Some(&(due, ifindex)) = self.reads_due.first() {
            if due > self.now.boot {
                break;
            }
            self.reads_due.pop_first();
            let Some(port) = self.ports.get_mut(&ifindex) else {
                continue;
            };
            if port.read.out.is_some() && port.read.unanswered > port.read.void {
                self.registry_read(ifindex, RegistryRead::Failed("no answer".to_owned()));
            } else {
                // None that counts is out.
                port.read.out = None;
                port.read.again = false;
                self.read(ifindex, false);
            }
        }
    }

    /// Policies that hold or failed are looked at again: one batched read for all of them, and what failed is tried
    /// again. What is merely held costs nothing: what there is to be read or tried is found by whichever way is
    /// shorter, over the policies that are due or over the interfaces at which there is anything to do.
    fn recheck(&mut self, due: &BTreeSet<PolicyId>) {
        let mut concerned = 0;
        for id in due {
            concerned += self.reschedule(*id);
        }
        // What has changed since it was planned is not in the list yet, or not any more.
        let concerning: BTreeSet<Ifindex> = if concerned > self.unwell.len() + self.dirty.ports.len() {
            self.unwell.union(&self.dirty.ports).copied().collect()
        } else {
            due.iter()
                .flat_map(|id| self.ports_of_concern(*id))
                .filter(|ifindex| self.unwell.contains(ifindex) || self.dirty.ports.contains(ifindex))
                .collect()
        };
        for ifindex in concerning {
            self.recheck_port(ifindex, due);
        }
    }

    /// The next recheck of a policy is planned; what failed of its own is tried again. How many attachments it is about.
    fn reschedule(&mut self, id: PolicyId) -> usize {
        let Some(state) = self.objects.policies.get_mut(&id) else {
            return 0;
        };
        let recheck = state
            .recheck
            .map_or_else(|| Backoff::begin(self.now.boot), |r| r.next(self.now.boot));
        state.recheck = Some(recheck);
        let trouble = state
            .slot
            .and_then(|slot| self.slots.get_mut(&slot)?.trouble.as_mut());
        for trouble in [state.slot_trouble.as_mut(), trouble].into_iter().flatten() {
            trouble.blocked = false;
            self.dirty.policies.insert(id);
        }
        let worst = usize::try_from(state.counts.held + state.counts.failed).unwrap_or(usize::MAX);
        let concerned = worst + state.producers.len();
        self.timer(Timer::Recheck(id), Some(recheck.due()));
        concerned
    }

    /// Interfaces of the consumers of a policy that are not served, and of its producers that are not ready.
    fn ports_of_concern(&self, id: PolicyId) -> impl Iterator<Item = Ifindex> {
        let state = self.objects.policies.get(&id);
        let worst = state.into_iter().flat_map(PolicyState::worst);
        let others = state.into_iter().flat_map(PolicyState::unready_producers);
        worst
            .chain(others)
            .filter_map(|attachment| self.objects.attachments.get(&attachment)?.port)
    }

    /// What failed about an interface is tried again, and its identity is read if it hangs on that, if one of these
    /// policies has to do with it.
    fn recheck_port(&mut self, ifindex: Ifindex, due: &BTreeSet<PolicyId>) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        let look_at_all = port.intents_unwell || self.dirty.ports.contains(&ifindex);
        let mut concerned = false;
        let mut failed = Vec::new();
        for id in &port.attachments {
            let Some(attachment) = self.objects.attachments.get(id) else {
                continue;
            };
            for (policy, state) in self.due_among(&attachment.consumes, due) {
                let Some(intent) = state.intents.get(id) else {
                    continue;
                };
                if !intent.is_worst() {
                    continue;
                }
                concerned = true;
                if !look_at_all {
                    break;
                }
                if intent.has_trouble() {
                    failed.push((policy, *id));
                }
            }
            concerned = concerned
                || self
                    .due_among(&attachment.produces, due)
                    .any(|(_, state)| state.is_concerned_by(id));
        }
        if !failed.is_empty() {
            self.dirty.ports.insert(ifindex);
        }
        for (policy, attachment) in failed {
            if let Some(intent) = self.intent_mut(policy, attachment) {
                intent.unblock();
            }
        }
        let Some(port) = self.ports.get_mut(&ifindex).filter(|_| concerned) else {
            return;
        };
        if !port.troubles.is_empty() {
            port.unblock();
            self.dirty.ports.insert(ifindex);
        }
        if port.hangs_on_identity && port.read.out.is_none() {
            self.read(ifindex, false);
        }
    }

    /// Those of these policies that are due.
    fn due_among<'a>(
        &'a self,
        policies: &'a BTreeSet<PolicyId>,
        due: &'a BTreeSet<PolicyId>,
    ) -> impl Iterator<Item = (PolicyId, &'a PolicyState)> {
        let (few, many) = if policies.len() <= due.len() {
            (policies, due)
        } else {
            (due, policies)
        };
        few.iter()
            .filter(|id| many.contains(id))
            .filter_map(|id| Some((*id, self.objects.policies.get(id)?)))
    }

    fn recheck_orphans(&mut self) {
        let Some(recheck) = self.orphan_recheck else {
            return;
        };
        let recheck = recheck.next(self.now.boot);
        self.orphan_recheck = Some(recheck);
        self.timer(Timer::Orphans, Some(recheck.due()));
        for orphan in self.orphans.clone() {
            match orphan {
                Orphan::Slot(slot) => {
                    if let Some(trouble) = self.slots.get_mut(&slot).and_then(|s| s.trouble.as_mut()) {
                        trouble.blocked = false;
                    }
                    self.dirty.slots.insert(slot);
                }
                Orphan::Port(ifindex) => match self.ports.get_mut(&ifindex) {
                    Some(port) => {
                        port.unblock();
                        self.dirty.ports.insert(ifindex);
                    }
                    None => self.settled_orphan(orphan),
                },
                Orphan::Backends => self.free_again(),
                Orphan::Locals => self.locals.unblock(),
                Orphan::Identity(ifindex, token) => {
                    self.doomed.insert((ifindex, token));
                }
            }
        }
    }

    // --- planning ------------------------------------------------------------------------------------------

    /// Plans until nothing is left to be planned. Facts come first, then sets, then interfaces.
    fn settle(&mut self) {
        loop {
            if let Some(name) = self.dirty.names.pop_first() {
                self.judge_interface(&name);
            } else if let Some(policy) = self.dirty.policies.pop_first() {
                self.plan_policy(policy);
            } else if let Some(slot) = self.dirty.slots.pop_first() {
                self.plan_orphan_slot(slot);
            } else if let Some(ifindex) = self.dirty.ports.pop_first() {
                self.plan_port(ifindex);
            } else if let Some(attachment) = self.dirty.loose.pop_first() {
                self.judge_loose(attachment);
            } else if let Some(policy) = self.dirty.late.pop_first() {
                self.plan_policy(policy);
            } else if let Some(ifindex) = self.dirty.judged.pop_first() {
                self.conclude(ifindex);
            } else if let Some(ifindex) = self.dirty.programs.pop_first() {
                self.attach(ifindex);
            } else {
                break;
            }
        }
    }

    /// Views, timers that hang on states, reports.
    fn finish(&mut self) {
        let touched = std::mem::take(&mut self.dirty.touched);
        for policy in touched {
            self.view_policy(policy);
        }
        self.date_reads();
        let mut reports = std::mem::take(&mut self.dirty.reports);
        self.out.reports.append(&mut reports);
        self.timer(Timer::Silence, self.silence_due());
        self.timer(Timer::Reads, self.reads_due.first().map(|(due, _)| *due));
        self.timer(Timer::Release, self.releases.keys().next().copied());
        if self.summary.intents.held == 0 {
            self.timer(Timer::Summary, None);
        } else if !self.timers.contains_key(&Timer::Summary) {
            let due = self.now.boot.plus(SUMMARY_EVERY);
            let due = Boot(due.0.div_ceil(Boot::SECOND).saturating_mul(Boot::SECOND));
            self.timer(Timer::Summary, Some(due));
        }
        self.summary.waiting_for = self.waiting_for();
        if self.passed && self.summary.intents.pending == 0 {
            self.summary.first_pass_done = true;
        }
        if self.may_remove() {
            // What is in no complete list has no times to be remembered.
            self.memory.clear();
        }
    }

    /// Patience with a read begins when it is handed over, not when it was wanted.
    fn date_reads(&mut self) {
        let due = self.now.boot.plus(SILENCE);
        for ifindex in &self.out.reads {
            if let Some(port) = self.ports.get_mut(ifindex) {
                self.reads_due.remove(&(port.read.due, *ifindex));
                port.read.out = Some(self.now.boot);
                port.read.due = due;
                self.reads_due.insert((due, *ifindex));
            }
        }
    }

    /// What the start barrier still waits for.
    fn waiting_for(&self) -> Vec<Barrier> {
        if self.passed {
            // Complete lists are waited for even after a saved set has let the rest pass.
            return if self.objects_known == Completeness::Complete {
                Vec::new()
            } else {
                vec![Barrier::Objects]
            };
        }
        let mut waiting = Vec::new();
        if !self.adopted {
            waiting.push(Barrier::Adoption);
        }
        if self.objects_known < Completeness::Complete {
            waiting.push(Barrier::Objects);
        }
        if !self.dumped {
            waiting.push(Barrier::Links);
        }
        if self
            .ports
            .values()
            .any(|port| !port.attachments.is_empty() && port.known == Known::Unread)
        {
            waiting.push(Barrier::Registry);
        }
        waiting
    }

    /// Brings the view of a policy, its schedule and its bookkeeping up to date with its intents.
    fn view_policy(&mut self, id: PolicyId) {
        let now = self.now;
        let Some(state) = self.objects.policies.get_mut(&id) else {
            return;
        };
        // Nothing held, nothing failed: no timer.
        let slot_trouble = state
            .slot
            .and_then(|slot| self.slots.get(&slot))
            .is_some_and(|slot| slot.trouble.is_some());
        let failing = state
            .order
            .iter()
            .take_while(|(rank, _, _)| *rank == 0)
            .filter_map(|(_, _, attachment)| state.intents.get(attachment))
            .any(|intent| {
                // What failed under it is tried again, also where nothing else can be hoped for.
                intent.hindered
                    || matches!(intent.state, State::Failed(reason) if crate::intent::retriable(reason))
            });
        let wanted = state.counts.held > 0
            || failing
            || state.producer_trouble
            || (!state.intents.is_empty() && (slot_trouble || state.slot_trouble.is_some()));
        let mut recheck = None;
        if wanted {
            let schedule = *state.recheck.get_or_insert_with(|| Backoff::begin(now.boot));
            recheck = Some(schedule.due());
        } else {
            state.recheck = None;
        }
        let generation = state.object.generation;
        let shown = !state.intents.is_empty() || (state.refused.is_some() && state.consumers().is_none());
        if self.passed && state.counts.pending == 0 {
            state.behind_since = None;
            state.applied = generation;
        } else if state.behind_since.is_none() {
            state.behind_since = Some(now);
        }
        let view = shown.then(|| crate::view::policy_view(state, &self.slots));
        if let Some(view) = &view
            && view.state == State::Programmed
            && state.proven != generation
        {
            state.proven = generation;
            self.out
                .measured
                .push((Leg::SeenToProgrammed, now.boot.since(state.seen.boot)));
        }
        let view = view.map(|mut view| {
            view.proven = state.proven;
            view
        });
        let name = state.object.name.clone();
        let troubled = view.as_ref().is_some_and(|view| {
            view.behind_since.is_some() || matches!(view.state, State::Held(_) | State::Failed(_))
        });
        if state.view != view {
            self.out.reports.insert(name.clone());
            state.view = view;
        }
        if troubled {
            self.troubled.insert(name);
        } else {
            self.troubled.remove(&name);
        }
        self.timer(Timer::Recheck(id), recheck);
    }
}
