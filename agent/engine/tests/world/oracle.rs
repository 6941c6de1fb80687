//! What is checked at every step. The oracle follows what was told, sent, done and answered, and what the view says; it
//! knows the rules and nothing of how the engine follows them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use holdfast_engine::Engine;
use holdfast_engine::model::{
    Backend, BackendId, Boot, Device, Effect, Entry, FailReason, Features, Happening, HoldReason, Ifindex,
    IntentProof, Level, LogLine, Now, ObjectName, OnDeadline, Op, OpError, OpId, OpResult, Remembered,
    RouteKey, Row, Selected, SlotId, State, Token, UidHash,
};
use holdfast_engine::view::{IntentView, PolicyView, Summary};

use crate::coverage::{Coverage, Stage};
use crate::flight::{Context, Flight, Item, overlap, stands_on, writes};
use crate::kernel::{Fate, Kernel, Verdict};
use crate::rules::{Gate, Intent, Must, Triple, Wants, wants};
use crate::script::{DESTINATIONS, SECOND, Setup, number_of, packet, route};
use crate::told::Told;

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) rule: &'static str,
    pub(crate) story: String,
}

pub(crate) type Checked = Result<(), Violation>;

/// Returns with a violation unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $rule:expr, $($story:tt)+) => {
        if !$holds {
            return Err($crate::oracle::Violation { rule: $rule, story: format!($($story)+) });
        }
    };
}
pub(crate) use ensure;

/// After so long without an answer an operation is given up (ENGINE 21).
const SILENCE: u64 = 10 * SECOND;
/// What was taken out of use is not used again for so long.
const GRACE: u64 = SECOND;

/// The number behind the uid hash of this world.
pub(crate) fn number_of_hash(hash: UidHash) -> u32 {
    u32::from_be_bytes([hash.0[0], hash.0[1], hash.0[2], hash.0[3]])
}

/// The slot of a policy. One that could not be taken away may be there beside it: to that nothing leads any more.
pub(crate) fn slot_of(policy: u32, kernel: &Kernel) -> Option<SlotId> {
    let slots = kernel.policies.iter();
    let mut slots = slots
        .filter(|(_, slot)| number_of_hash(slot.uid) == policy)
        .map(|(id, _)| *id);
    let first = slots.next()?;
    let entries = || kernel.entries.values().flat_map(BTreeMap::values);
    let led_to = |id: &SlotId| entries().any(|entry| entry.policy == *id);
    Some(slots.find(led_to).unwrap_or(first))
}

/// What failures have touched since the world was last at rest without any: nobody promises anything about that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) devices: BTreeSet<Ifindex>,
    pub(crate) policies: BTreeSet<u32>,
    pub(crate) pairs: BTreeSet<(u32, Ifindex)>,
    pub(crate) locals: bool,
    pub(crate) everything: bool,
}

impl Trouble {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// A registry row cannot be read: its device, and every set that it sits in, may stay as they are.
    pub(crate) fn unreadable(&mut self, ifindex: Ifindex, kernel: &Kernel) {
        self.devices.insert(ifindex);
        let sets = kernel
            .backends
            .values()
            .filter(|backend| backend.ifindex == ifindex);
        let owners = sets.filter_map(|backend| kernel.policies.get(&backend.policy));
        self.policies
            .extend(owners.map(|owner| number_of_hash(owner.uid)));
    }

    fn of(&mut self, op: &Op, kernel: &Kernel) {
        let uid_of = |slot: &SlotId| kernel.policies.get(slot).map(|policy| number_of_hash(policy.uid));
        match op {
            Op::Attach { device } => drop(self.devices.insert(device.ifindex)),
            Op::Detach { ifindex }
            | Op::ClearInterface { ifindex }
            | Op::WriteRow { ifindex, .. }
            | Op::WriteSources { ifindex, .. }
            | Op::DeleteIdentity { ifindex, .. }
            | Op::DeleteEntries { ifindex, .. } => drop(self.devices.insert(*ifindex)),
            Op::WriteEntries { ifindex, entries } => {
                for entry in entries.values() {
                    match uid_of(&entry.policy) {
                        Some(uid) => drop(self.pairs.insert((uid, *ifindex))),
                        None => drop(self.devices.insert(*ifindex)),
                    }
                }
            }
            Op::ProveIntent(proof) => {
                for policy in proof.policies() {
                    match uid_of(&policy) {
                        Some(uid) => drop(self.pairs.insert((uid, proof.device.ifindex))),
                        None => drop(self.devices.insert(proof.device.ifindex)),
                    }
                }
            }
            Op::WritePolicy { slot, value } => {
                self.policies.extend(uid_of(slot));
                self.policies
                    .extend(value.as_ref().map(|value| number_of_hash(value.uid)));
            }
            Op::ProveSet { policy, .. } => match uid_of(policy) {
                Some(uid) => drop(self.policies.insert(uid)),
                None => self.everything = true,
            },
            Op::WriteLocals { .. } => self.locals = true,
            Op::WriteBackends { .. } | Op::WriteSlots { .. } => self.everything = true,
        }
    }
}

/// What somebody changed behind the engine's back, and what depends on it, until audits have put it right.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tampered {
    pub(crate) devices: BTreeSet<Ifindex>,
    pub(crate) everything: bool,
}

impl Tampered {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn is(&self, ifindex: Option<Ifindex>) -> bool {
        self.everything || ifindex.is_some_and(|ifindex| self.devices.contains(&ifindex))
    }
}

/// What the view said last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) summary: Summary,
    pub(crate) policies: BTreeMap<ObjectName, PolicyView>,
    pub(crate) intents: BTreeMap<(ObjectName, ObjectName), IntentView>,
    pub(crate) troubled: BTreeSet<ObjectName>,
}

impl Snapshot {
    fn of(engine: &Engine) -> Self {
        let view = engine.view();
        Self {
            summary: view.summary(),
            policies: view
                .policies()
                .map(|policy| (policy.name.clone(), policy.clone()))
                .collect(),
            intents: view
                .intents()
                .map(|intent| ((intent.policy.clone(), intent.consumer.clone()), intent))
                .collect(),
            troubled: view.troubled().map(|policy| policy.name.clone()).collect(),
        }
    }
}

/// A set that the kernel has proven.
#[derive(Clone, Debug)]
struct ProvenSet {
    base: u32,
    slots: Vec<BackendId>,
    backends: BTreeMap<BackendId, Backend>,
}

/// A read of a registry row that is out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) since: Boot,
    /// [`Told::devices`] then.
    pub(crate) device: u64,
}

/// When a policy is looked at again although nothing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Schedule {
    step: u32,
    pub(crate) due: Boot,
}

impl Schedule {
    const fn begin(now: Boot) -> Self {
        Self {
            step: 0,
            due: now.plus(SECOND),
        }
    }

    fn next(self, now: Boot) -> Self {
        let step = self.step + 1;
        let pause = [1, 2, 4, 8, 16].get(step as usize).copied().unwrap_or(30) * SECOND;
        let due = now.plus(pause);
        Self {
            step,
            due: if pause < 8 * SECOND {
                due
            } else {
                Boot(due.0.div_ceil(SECOND) * SECOND)
            },
        }
    }
}

/// Identifies an intent over edits: uids of policy and consumer.
type Uids = (String, String);

/// A hold, as the log tells of it.
#[derive(Clone, Copy, Debug)]
struct Hold {
    reason: HoldReason,
    since: Now,
}

/// Everything that is followed.
#[derive(Debug)]
pub(crate) struct Oracle {
    features: Features,
    /// The arenas are smaller than what is asked for now and then.
    pub(crate) tight: bool,
    /// There are audits: something is always due.
    pub(crate) audits: bool,
    pub(crate) told: Told,
    pub(crate) wants: Rc<Wants>,
    wants_version: u64,
    fates_version: u64,
    /// Who may reach whom: what some version of the objects allowed as a whole, as long as the pair has been wanted
    /// ever since (while a switch is under way, its set may still be the earlier one).
    pub(crate) granted: Rc<BTreeSet<Triple>>,
    /// Who was named on each incarnation, in this life and earlier ones: uid, and the interface it named.
    incarnations: BTreeMap<(Ifindex, Token), BTreeSet<(u32, String)>>,
    pub(crate) flights: BTreeMap<OpId, Flight>,
    proofs: BTreeMap<(Ifindex, SlotId), IntentProof>,
    sets: BTreeMap<SlotId, Vec<ProvenSet>>,
    pub(crate) view: Snapshot,
    remembered: BTreeMap<Uids, Remembered>,
    judged: BTreeSet<Uids>,
    /// Intents of which nobody can say whether they continue one of an earlier life.
    doubtful: BTreeSet<Uids>,
    holds: BTreeMap<Uids, Hold>,
    /// Intents of which nobody can say whether their hold goes on or is a new one, until the next line about them.
    vague: BTreeSet<Uids>,
    /// Start of the last hold, for those that have not been Programmed since.
    hold_starts: BTreeMap<Uids, Now>,
    holds_begun: u64,
    pub(crate) trouble: Trouble,
    pub(crate) tampered: Tampered,
    /// An operation failed in this life, or was given up.
    errors: bool,
    pub(crate) schedules: BTreeMap<ObjectName, Schedule>,
    pub(crate) fates: BTreeMap<(Ifindex, u8), Fate>,
    /// For which consumer each path has been delivering, without an interruption, since the world was calm.
    pub(crate) served: BTreeMap<(Ifindex, u8), u32>,
    released_slots: Vec<(u32, u32, Boot)>,
    released_backends: BTreeMap<BackendId, Boot>,
    released_policies: BTreeMap<SlotId, Boot>,
    /// Reads that are out.
    pub(crate) reading: BTreeMap<Ifindex, VecDeque<Reading>>,
    /// What reads said since the last poll: it need not be read again at once.
    pub(crate) just_read: BTreeSet<Ifindex>,
    /// Ids of operations of this life.
    ids: BTreeSet<OpId>,
    /// When the view was looked at last: what was handled since belongs to one batch.
    last_poll: Boot,
    /// [`Told::version`] then.
    viewed: u64,
    /// Polls since.
    unviewed: u32,

    pub(crate) coverage: Coverage,
}

impl Oracle {
    pub(crate) fn new(features: Features, setup: Setup) -> Self {
        Self {
            features,
            tight: setup.is_tight(),
            audits: setup.audits,
            told: Told::default(),
            wants: Rc::default(),
            wants_version: 0,
            fates_version: 0,
            granted: Rc::default(),
            incarnations: BTreeMap::new(),
            flights: BTreeMap::new(),
            proofs: BTreeMap::new(),
            sets: BTreeMap::new(),
            view: Snapshot::default(),
            remembered: BTreeMap::new(),
            judged: BTreeSet::new(),
            doubtful: BTreeSet::new(),
            holds: BTreeMap::new(),
            vague: BTreeSet::new(),
            hold_starts: BTreeMap::new(),
            holds_begun: 0,
            trouble: Trouble::default(),
            tampered: Tampered::default(),
            errors: false,
            schedules: BTreeMap::new(),
            fates: BTreeMap::new(),
            served: BTreeMap::new(),
            released_slots: Vec::new(),
            released_backends: BTreeMap::new(),
            released_policies: BTreeMap::new(),
            reading: BTreeMap::new(),
            just_read: BTreeSet::new(),
            ids: BTreeSet::new(),
            last_poll: Boot(0),
            viewed: 0,
            unviewed: 0,
            coverage: Coverage::default(),
        }
    }

    /// What the earlier life was about to take away, and the kernel still delivers: the next one cannot know of it.
    fn recall(&mut self, kernel: &Kernel) {
        let mut granted = BTreeSet::clone(&self.granted);
        for ((ifindex, _), fate) in &self.fates {
            let policy = fate.policy.and_then(|slot| kernel.policies.get(&slot));
            let Some((policy, number)) = policy.zip(fate.key.as_ref().and_then(number_of)) else {
                continue;
            };
            let uids = |ifindex: Ifindex| self.wants.of_device.get(&ifindex).into_iter().flatten();
            for backend in fate.backends().filter_map(|id| kernel.backends.get(&id)) {
                for consumer in uids(*ifindex) {
                    granted.extend(
                        uids(backend.ifindex)
                            .map(|producer| (number_of_hash(policy.uid), *consumer, number, *producer)),
                    );
                }
            }
        }
        self.granted = Rc::new(granted);
    }

    /// A new life of the agent.
    pub(crate) fn begin_life(&mut self, remembered: &[Remembered], kernel: &Kernel) {
        self.recall(kernel);
        self.told = self.told.anew();
        self.flights.clear();
        self.proofs.clear();
        self.sets.clear();
        self.view = Snapshot::default();
        self.remembered = remembered
            .iter()
            .map(|one| ((one.policy.0.clone(), one.attachment.0.clone()), one.clone()))
            .collect();
        self.judged.clear();
        self.doubtful.clear();
        self.holds.clear();
        self.vague.clear();
        self.hold_starts.clear();
        self.holds_begun = 0;
        self.errors = false;
        self.schedules.clear();
        self.reading.clear();
        self.just_read.clear();
        // To load the program is to wait for every reader of what the earlier life took out of use.
        self.released_slots.clear();
        self.released_backends.clear();
        self.released_policies.clear();
        self.ids.clear();
        self.refresh();
    }

    /// Nothing is excused any more, but for what only an audit finds.
    pub(crate) fn forgive(&mut self, kernel: &Kernel) {
        self.trouble = Trouble {
            devices: kernel.stripped().collect(),
            ..Trouble::default()
        };
        self.too_small();
    }

    /// Brings what is wanted up to date with what was told.
    pub(crate) fn refresh(&mut self) {
        if self.wants_version == self.told.version {
            return;
        }
        self.wants_version = self.told.version;
        // Another interface or identity of a consumer is another incarnation: it closes, whatever its uid says.
        for consumer in &self.told.reborn {
            if let Some(attachment) = self.told.attachments.get(consumer) {
                let uid = crate::rules::number(&attachment.uid);
                self.served.retain(|_, served| *served != uid);
            }
        }
        self.wants = Rc::new(wants(&self.told, self.features));
        // What was taken away and given back in one batch may count as new.
        for (place, intent) in &self.wants.owners {
            let (policy, consumer) = intent;
            let changed = self.told.changes(policy) > 1 || self.told.changes(consumer) > 1;
            // What the set of an earlier version allowed it may be what it has the labels for no more.
            if changed || self.told.relabelled.contains(consumer) {
                self.served.remove(place);
            }
        }
        let renamed = self.renamed();
        let pairs = &self.wants.pairs;
        // A policy whose content nobody knows keeps what it had; before the barrier nobody loses anything.
        let unknown: BTreeSet<u32> = self
            .wants
            .policies
            .values()
            .filter(|policy| policy.spec.is_none())
            .map(|policy| policy.uid)
            .collect();
        let barrier = self.told.passed && self.told.complete;
        let keeps = |&&(policy, consumer, service, _): &&Triple| {
            !barrier || unknown.contains(&policy) || pairs.contains(&(policy, consumer, service))
        };
        let mut granted: BTreeSet<Triple> = self
            .granted
            .iter()
            .filter(keeps)
            .chain(&self.wants.triples)
            .copied()
            .collect();
        for (old, new) in renamed {
            let theirs: Vec<Triple> = granted.iter().filter(|triple| triple.3 == old).copied().collect();
            granted.extend(
                theirs
                    .into_iter()
                    .map(|(policy, consumer, service, _)| (policy, consumer, service, new)),
            );
        }
        self.granted = Rc::new(granted);
    }

    /// Attachments of one and the same incarnation: a producer is who it was, whatever object names it.
    fn renamed(&mut self) -> Vec<(u32, u32)> {
        let mut renamed = Vec::new();
        for (ifindex, uids) in &self.wants.of_device {
            let Some(token) = self.wants.tokens.get(ifindex) else {
                continue;
            };
            let known = self.incarnations.entry((*ifindex, *token)).or_default();
            for new in uids {
                let Some(interface) = self.wants.interface(*new) else {
                    continue;
                };
                let others = known
                    .iter()
                    .filter(|(old, theirs)| old != new && theirs == interface);
                renamed.extend(others.map(|(old, _)| (*old, *new)));
                known.insert((*new, interface.to_owned()));
            }
        }
        renamed
    }

    /// Whether there may be no policy slot for an intent, whatever else is said of it.
    pub(crate) fn has_no_room(&self, intent: &Intent, kernel: &Kernel) -> bool {
        self.tight && slot_of(intent.policy_uid, kernel).is_none()
    }

    pub(crate) fn context(&self) -> Context {
        Context {
            wants: Rc::clone(&self.wants),
            granted: Rc::clone(&self.granted),
        }
    }

    // --- effects -------------------------------------------------------------------------------------------

    /// The engine sends an operation.
    pub(crate) fn sent(&mut self, id: OpId, op: &Op, kernel: &Kernel, now: Now) -> Checked {
        ensure!(
            self.ids.insert(id),
            "ENGINE 28: an id names one operation of a life",
            "{id:?} is used again"
        );
        let written = writes(op);
        let needed = stands_on(op, kernel);
        for (other, flight) in &self.flights {
            let theirs = writes(&flight.op);
            let same = overlap(&written, &theirs).filter(|item| match item {
                // Another consumer on that interface is another intent, and its proof another question.
                Item::ProofOf(ifindex, _) => {
                    flight.context.wants.of_device.get(ifindex) == self.wants.of_device.get(ifindex)
                }
                _ => true,
            });
            ensure!(
                same.is_none(),
                "ENGINE 18: no second operation on an item that is unanswered",
                "{op:?} while {other:?} {:?} is out: {same:?}",
                flight.op
            );
            // A slot that keeps its selector stands, whatever else is written of it.
            let keeps = matches!(&flight.op, Op::WritePolicy { slot, value: Some(value) }
                if kernel.policies.get(slot).is_some_and(|there| there.selected == value.selected));
            let tampered = self.tampered.is(crate::kernel::ifindex_of(op));
            let stands = overlap(&needed, &theirs).filter(|_| !keeps && !tampered);
            ensure!(
                stands.is_none(),
                "ENGINE 25: a dependent operation only after the answer of what it stands on",
                "{op:?} while {other:?} {:?} is out: {stands:?}",
                flight.op
            );
        }
        self.not_before_the_barrier(op, kernel)?;
        match op {
            Op::Attach { device } => self.may_attach(*device, kernel)?,
            Op::WriteRow { ifindex, row }
                if row.token.is_some()
                    && kernel
                        .rows
                        .get(ifindex)
                        .is_none_or(|there| there.token != row.token) =>
            {
                let open = self.flights.values().find(|flight| {
                    matches!(&flight.op, Op::WriteEntries { ifindex: other, entries }
                        if other == ifindex && entries.values().any(|entry| entry.open))
                });
                ensure!(
                    open.is_none(),
                    "ENGINE 25: a dependent operation only after the answer of what it stands on",
                    "row {ifindex} opens while {open:?} is out"
                );
            }
            _ => {}
        }
        if matches!(op, Op::WriteSlots { .. }) {
            self.coverage.stage(Stage::Prepared);
        }
        match op {
            Op::Detach { ifindex } => self.told.detaches(*ifindex),
            Op::DeleteIdentity { ifindex, token } => self.told.deletes(*ifindex, *token),
            _ => {}
        }
        self.flights.insert(
            id,
            Flight {
                op: op.clone(),
                sent: now.boot,
                device: self.told.number_of(op),
                context: self.context(),
            },
        );
        Ok(())
    }

    /// Nothing is closed, removed, deselected or switched before the start is complete, nor on an interface whose
    /// registry row could not be read since.
    fn not_before_the_barrier(&self, op: &Op, kernel: &Kernel) -> Checked {
        const RULE: &str = "ENGINE 2: nothing is closed, removed or switched before the start is complete";
        if !takes_away(op, kernel) || !self.tampered.is_empty() {
            return Ok(());
        }
        let known = |hash: UidHash| {
            let uid = number_of_hash(hash);
            self.wants.policies.values().any(|policy| policy.uid == uid)
        };
        if !(self.told.passed && self.told.complete) {
            if self.told.passed {
                // A saved set is a reason for everything but a removal.
                let removal = match op {
                    Op::WritePolicy { slot, .. } => {
                        kernel.policies.get(slot).is_some_and(|slot| !known(slot.uid))
                    }
                    Op::DeleteEntries { ifindex, keys } => {
                        self.told.links.contains_key(ifindex)
                            && kernel.entries.get(ifindex).is_some_and(|entries| {
                                keys.iter().filter_map(|key| entries.get(key)).any(|entry| {
                                    kernel
                                        .policies
                                        .get(&entry.policy)
                                        .is_some_and(|slot| !known(slot.uid))
                                })
                            })
                    }
                    Op::WriteEntries { ifindex, entries } => {
                        self.told.links.contains_key(ifindex)
                            && kernel.entries.get(ifindex).is_some_and(|there| {
                                entries.iter().any(|(key, entry)| {
                                    there.get(key).is_some_and(|there| {
                                        there != entry
                                            && kernel
                                                .policies
                                                .get(&there.policy)
                                                .is_some_and(|slot| !known(slot.uid))
                                    })
                                })
                            })
                    }
                    _ => false,
                };
                ensure!(!removal, RULE, "only a saved set is known: {op:?}");
                return Ok(());
            }
            ensure!(false, RULE, "{op:?}");
        }
        let frozen = |ifindex: &Ifindex| {
            self.told.left_behind.contains(ifindex)
                && self.wants.of_device.contains_key(ifindex)
                && !self.told.attachments.values().any(|attachment| {
                    // Whoever asks for another interface by an edit gives up this one.
                    self.told.named(&attachment.interface).map(|link| link.ifindex) == Some(*ifindex)
                        && self.wants.attachments[&attachment.name].right != crate::rules::Right::Fine
                })
        };
        let ifindex = crate::kernel::ifindex_of(op);
        ensure!(
            !ifindex.is_some_and(|ifindex| frozen(&ifindex)),
            RULE,
            "the registry row of {ifindex:?} was never read: {op:?}"
        );
        if let Op::WritePolicy { slot, value } = op
            && let Some(policy) = kernel.policies.get(slot)
            && known(policy.uid)
        {
            let members = kernel.members(policy.selected);
            let member = members
                .iter()
                .filter_map(|id| kernel.backends.get(id))
                .find(|backend| frozen(&backend.ifindex));
            let selected = member.is_some_and(|member| {
                let owners = self.wants.of_device.get(&member.ifindex);
                self.wants.policies.values().any(|wanted| {
                    // Without a consumer the policy wants no set, whoever is in it.
                    let wants_none = value.is_none() && wanted.consumers.is_empty();
                    wanted.uid == number_of_hash(policy.uid)
                        && !wants_none
                        && owners
                            .into_iter()
                            .flatten()
                            .any(|uid| wanted.producers.contains(uid))
                })
            });
            ensure!(
                !selected,
                RULE,
                "the registry row of member {member:?} was never read: {op:?}"
            );
        }
        Ok(())
    }

    /// Attach after an answered close, and only over what is right for this very device.
    fn may_attach(&self, device: Device, kernel: &Kernel) -> Checked {
        const RULE: &str = "ENGINE 6: attach only over a closed row and entries of this device";
        let ifindex = device.ifindex;
        if kernel.attached(ifindex) || self.trouble.devices.contains(&ifindex) || self.trouble.everything {
            return Ok(());
        }
        let row = kernel.rows.get(&ifindex);
        let open = row.and_then(|row| row.token);
        ensure!(
            open.is_none() || self.told.identity(ifindex).map(|identity| identity.token) == open,
            RULE,
            "{device:?} has row {row:?}"
        );
        let current = self.told.device(ifindex) == Some(device);
        for number in 0..DESTINATIONS {
            let key = route(number);
            let entry = kernel.entries.get(&ifindex).and_then(|entries| entries.get(&key));
            let owner = self.wants.owners.get(&(ifindex, number));
            if let Some(entry) = entry {
                let uid = kernel
                    .policies
                    .get(&entry.policy)
                    .map(|policy| number_of_hash(policy.uid));
                let wanted = self.wants.intents.values().any(|intent| {
                    intent.device.map(|device| device.ifindex) == Some(ifindex)
                        && Some(intent.policy_uid) == uid
                        && intent.may_claim.contains(&number)
                });
                let unknown = self
                    .wants
                    .policies
                    .values()
                    .any(|policy| Some(policy.uid) == uid && policy.spec.is_none());
                let waits = owner.is_some_and(|(policy, consumer)| {
                    self.is_troubled(policy, &self.wants.intents[&(policy.clone(), consumer.clone())])
                });
                ensure!(
                    wanted || unknown || waits || !current || !self.told.complete,
                    RULE,
                    "{device:?} has {key:?} -> {entry:?}"
                );
            } else if let Some((policy, consumer)) = owner.filter(|_| current) {
                let intent = &self.wants.intents[&(policy.clone(), consumer.clone())];
                let excused = self.is_troubled(policy, intent) || !self.told.passed || self.tight;
                ensure!(
                    excused,
                    "DESIGN 2.12: from the attach on nothing leaks",
                    "{device:?} is attached before {policy}'s claim of {key:?} is written"
                );
            }
        }
        Ok(())
    }

    /// The kernel is about to carry an operation out.
    pub(crate) fn before(&self, op: &Op, kernel: &Kernel, now: Now) -> Checked {
        const BESIDE: &str = "DESIGN 2.10: a new set is written beside the one that is selected";
        const REUSE: &str = "DATAPLANE: a freed slot range, backend or policy id is reused only after 1 s";
        if !self.tampered.is_empty() {
            return Ok(());
        }
        // A backend serves its own policy alone, whoever's slots have its number.
        let in_use = |id: &BackendId, backend: &Backend| {
            let policy = kernel.policies.get(&backend.policy);
            policy.is_some_and(|policy| kernel.members(policy.selected).contains(id))
        };
        match op {
            Op::WriteBackends { backends } => {
                for (id, backend) in backends {
                    let Some(there) = kernel.backends.get(id) else {
                        continue;
                    };
                    let same = backend
                        .as_ref()
                        .is_some_and(|backend| is_same_producer(backend, there));
                    ensure!(
                        same || !in_use(id, there),
                        BESIDE,
                        "backend {id} {there:?} is in use and becomes {backend:?}"
                    );
                    let alive = kernel
                        .registry
                        .get(&there.ifindex)
                        .is_some_and(|identity| identity.token == there.token);
                    let owner = kernel.policies.get(&there.policy);
                    let wanted = owner.is_some_and(|owner| {
                        let uid = number_of_hash(owner.uid);
                        self.wants
                            .policies
                            .values()
                            .any(|policy| policy.uid == uid && policy.spec.is_some())
                    });
                    let drains = there.drain_until.is_some_and(|until| until > now.boot);
                    let ready = self.wants.tokens.get(&there.ifindex) == Some(&there.token);
                    let troubled = self.trouble.everything
                        || owner
                            .is_some_and(|owner| self.trouble.policies.contains(&number_of_hash(owner.uid)));
                    ensure!(
                        same || !drains || !alive || !wanted || !ready || troubled,
                        "DESIGN 2.10: established flows stay on a leaving producer for the drain time",
                        "backend {id} {there:?} becomes {backend:?}"
                    );
                    let released = self.released_backends.get(id);
                    ensure!(
                        same || backend.is_none()
                            || released.is_none_or(|released| now.boot.since(*released) >= GRACE),
                        REUSE,
                        "backend {id} was released at {released:?}, and it is {now:?}"
                    );
                }
            }
            Op::WriteSlots { base, slots } => {
                let length = slots.len() as u32;
                for policy in kernel.policies.values() {
                    let (theirs, count) = (policy.selected.base, u32::from(policy.selected.length));
                    ensure!(
                        theirs + count <= *base || base + length <= theirs,
                        BESIDE,
                        "slots {base}+{length} are written over {:?}",
                        policy.selected
                    );
                }
                for (theirs, count, released) in &self.released_slots {
                    ensure!(
                        theirs + count <= *base
                            || base + length <= *theirs
                            || now.boot.since(*released) >= GRACE,
                        REUSE,
                        "slots {base}+{length} were released at {released:?}, and it is {now:?}"
                    );
                }
            }
            Op::WritePolicy { slot, value: None } => {
                let user = kernel
                    .entries
                    .iter()
                    .find(|(_, entries)| entries.values().any(|entry| entry.policy == *slot));
                ensure!(
                    user.is_none(),
                    "ENGINE 25: closing goes row, entries, selector, slots",
                    "slot {slot} is freed while {user:?} leads there"
                );
            }
            Op::WritePolicy {
                slot,
                value: Some(value),
            } => {
                let there = kernel.policies.get(slot);
                let released = self.released_policies.get(slot);
                ensure!(
                    there.is_some() || released.is_none_or(|released| now.boot.since(*released) >= GRACE),
                    REUSE,
                    "policy slot {slot} was released at {released:?}, and it is {now:?}"
                );
                if let Some(there) = there {
                    ensure!(
                        there.uid == value.uid,
                        "ENGINE 11: a new uid has a new slot",
                        "slot {slot}: {there:?} becomes {value:?}"
                    );
                }
                let before = there.map(|there| there.selected).unwrap_or_default();
                if value.selected.length > 0 && value.selected != before {
                    self.is_proven_set(*slot, value.selected, kernel)?;
                }
            }
            Op::DeleteIdentity { ifindex, token } => {
                let this = kernel
                    .registry
                    .get(ifindex)
                    .is_some_and(|identity| identity.token == *token);
                // What came back while the deletion was out is late.
                let told = self.told.deleting.get(&(*ifindex, *token)).copied().flatten();
                let device = kernel.devices.get(ifindex);
                let alive = kernel.row_is_of_device(*ifindex)
                    && device.map(|dev| dev.instance) == kernel.registered.get(ifindex).copied()
                    && device.map(|dev| dev.link.mac) == told;
                ensure!(
                    !(this && alive),
                    "DESIGN 2.7: late deletes never touch a living incarnation",
                    "the identity of device {ifindex}, which is there, is deleted"
                );
            }
            _ => {}
        }
        Ok(())
    }

    fn is_proven_set(&self, slot: SlotId, selected: Selected, kernel: &Kernel) -> Checked {
        let range = kernel.range(selected);
        let proven = self.sets.get(&slot).into_iter().flatten().any(|set| {
            set.base == selected.base
                && set.slots == range
                && kernel.members(selected).iter().all(|id| {
                    match (set.backends.get(id), kernel.backends.get(id)) {
                        (Some(proven), Some(there)) => is_same_producer(proven, there),
                        _ => false,
                    }
                })
        });
        ensure!(
            proven,
            "ENGINE 25: a set is proven before the selector leads to it",
            "slot {slot} selects {selected:?} = {range:?}; proven: {:?}",
            self.sets.get(&slot)
        );
        Ok(())
    }

    /// The kernel has carried an operation out.
    pub(crate) fn after(
        &mut self,
        flight: &Flight,
        result: &OpResult,
        kernel: &mut Kernel,
        now: Now,
    ) -> Checked {
        let op = &flight.op;
        if let (Op::WritePolicy { .. } | Op::WriteBackends { .. } | Op::WriteSlots { .. }, Ok(_)) =
            (op, result)
        {
            self.bookkeeping(op, now);
        }
        let after = self.compute_fates(kernel);
        let before = std::mem::replace(&mut self.fates, after);
        if before != self.fates {
            for (place, fate) in &self.fates {
                let earlier = &before[place];
                if earlier != fate {
                    self.change_by_op(flight, *place, earlier, fate, kernel, now)?;
                }
            }
            self.establish(kernel);
        }
        if let (Op::WritePolicy { slot, .. }, Ok(_)) = (op, result) {
            self.purge(*slot, kernel);
        }
        Ok(())
    }

    fn bookkeeping(&mut self, op: &Op, now: Now) {
        self.released_slots
            .retain(|(_, _, released)| now.boot.since(*released) < GRACE);
        match op {
            Op::WriteBackends { backends } => {
                for (id, backend) in backends {
                    if backend.is_none() {
                        self.released_backends.insert(*id, now.boot);
                    }
                }
            }
            Op::WritePolicy { slot, value: None } => {
                self.released_policies.insert(*slot, now.boot);
            }
            _ => {}
        }
    }

    /// A selector has been moved away from a range and its members: they must not be written for a while.
    pub(crate) fn deselected(
        &mut self,
        before: (Selected, &[BackendId]),
        after: (Selected, &[BackendId]),
        now: Now,
    ) {
        let (selected, members) = before;
        if selected.length > 0 && (selected.base, selected.length) != (after.0.base, after.0.length) {
            self.released_slots
                .push((selected.base, u32::from(selected.length), now.boot));
        }
        for id in members.iter().filter(|id| !after.1.contains(id)) {
            self.released_backends.insert(*id, now.boot);
        }
    }

    /// A policy whose selected set is all of its present producers has nothing left of an earlier version.
    fn purge(&mut self, slot: SlotId, kernel: &Kernel) {
        // What somebody else has put into a set says nothing about whom the engine left there.
        if self.tampered.everything {
            return;
        }
        let Some(policy) = kernel.policies.get(&slot) else {
            return;
        };
        let uid = number_of_hash(policy.uid);
        let Some(wanted) = self.wants.policies.values().find(|policy| policy.uid == uid) else {
            return;
        };
        let current = kernel.members(policy.selected).iter().all(|id| {
            kernel.backends.get(id).is_some_and(|backend| {
                self.wants
                    .of_device
                    .get(&backend.ifindex)
                    .is_some_and(|uids| uids.iter().any(|uid| wanted.producers.contains(uid)))
            })
        });
        if current && self.told.passed && self.told.complete && wanted.spec.is_some() {
            let triples = &self.wants.triples;
            let kept = self
                .granted
                .iter()
                .filter(|triple| triple.0 != uid || triples.contains(*triple))
                .copied()
                .collect();
            self.granted = Rc::new(kept);
        }
    }

    /// Audits have put right what somebody changed.
    pub(crate) fn put_right(&mut self, kernel: &Kernel) {
        self.tampered = Tampered::default();
        for slot in kernel.policies.keys() {
            self.purge(*slot, kernel);
        }
    }

    /// What happens to every packet of this world.
    fn compute_fates(&self, kernel: &Kernel) -> BTreeMap<(Ifindex, u8), Fate> {
        let mut fates = BTreeMap::new();
        for ifindex in kernel.devices.keys() {
            for number in 0..kernel.packets {
                let packet = packet(number);
                let source = self
                    .wants
                    .source(*ifindex, packet.address)
                    .unwrap_or_else(|| crate::kernel::stranger(packet.address));
                fates.insert((*ifindex, number), kernel.forward(*ifindex, source, packet));
            }
        }
        fates
    }

    /// Whether what was told since may have changed where packets come from.
    pub(crate) const fn fates_are_old(&self) -> bool {
        self.fates_version != self.wants_version
    }

    /// Something that is no operation changed what happens to packets.
    pub(crate) fn world_changed(&mut self, kernel: &mut Kernel) {
        self.fates_version = self.wants_version;
        self.fates = self.compute_fates(kernel);
        self.establish(kernel);
    }

    /// Lets packets flow, so that there are established flows.
    fn establish(&mut self, kernel: &mut Kernel) {
        for (place, fate) in &self.fates {
            if !fate.delivers() {
                self.served.remove(place);
            }
        }
        for ((ifindex, _), fate) in &self.fates {
            if fate.delivers() {
                kernel.establish(*ifindex, fate);
            }
        }
    }

    fn change_by_op(
        &self,
        flight: &Flight,
        (ifindex, number): (Ifindex, u8),
        before: &Fate,
        after: &Fate,
        kernel: &Kernel,
        now: Now,
    ) -> Checked {
        let op = &flight.op;
        let what = || format!("device {ifindex}, packet {number}, by {op:?}: {before:?} becomes {after:?}");
        let owner = |wants: &Wants| {
            wants
                .owner(ifindex, number)
                .map(|(_, key)| (key.0.clone(), wants.intents[key].clone()))
        };
        let owners = owner(&flight.context.wants).zip(owner(&self.wants));
        let troubled = owners.as_ref().is_some_and(|((name, then), (other, now))| {
            self.is_troubled(name, then)
                || self.is_troubled(other, now)
                || self.has_no_room(then, kernel)
                || self.has_no_room(now, kernel)
        });
        let same_device = self.told.device(ifindex).is_some_and(|device| {
            kernel.devices.get(&ifindex).map(crate::kernel::Dev::device) == Some(device)
        });
        if let Some(((_, then), (_, today))) = &owners
            && !troubled
            && same_device
            && then.device == today.device
        {
            // What the owner before let pass while held may do so until the entry leads elsewhere.
            let by_choice = before.policy == after.policy
                && after
                    .policy
                    .and_then(|slot| kernel.policies.get(&slot))
                    .is_some_and(|slot| slot.pass_while_held && number_of_hash(slot.uid) != today.policy_uid);
            let leaks = !before.leaks() && after.leaks() && then.drop && today.drop && !by_choice;
            // Whose a device is that shares its name with another is asked for first.
            let spec_was_in_force = self.told.passed && self.told.names_are_clear();
            ensure!(
                !(leaks && spec_was_in_force),
                "DESIGN 2.12: a claimed destination never leaks",
                "{}",
                what()
            );
            // Packets to a device that is gone arrive nowhere, whoever has its number now.
            let alive = before.backends().all(|id| {
                let backend = kernel.backends.get(&id);
                backend.is_some_and(|backend| {
                    let device = kernel.devices.get(&backend.ifindex).map(|dev| dev.instance);
                    device.is_some() && device == kernel.registered.get(&backend.ifindex).copied()
                })
            });
            // Where an edit makes a destination more exact, or less, packets to it go live anew: proven first.
            let same_way = before.key == self.wants.owner(ifindex, number).map(|(by, _)| route(by));
            let breaks = before.serves()
                && alive
                && same_way
                && !after.serves()
                && !Self::leads_to_another(op, kernel)
                && self.served.get(&(ifindex, number)) == Some(&today.consumer_uid);
            if breaks && then.policy_uid == today.policy_uid && then.consumer_uid == today.consumer_uid {
                let served = self.must_go_on(&flight.context.wants, then, before, kernel, now)
                    && self.must_go_on(&self.wants, today, before, kernel, now);
                ensure!(
                    !served,
                    "ENGINE, The model world: own operations never break a path that should serve",
                    "{}",
                    what()
                );
            }
        }
        self.grants(flight, ifindex, before, after, kernel)
    }

    /// Whether a set is selected of which a member has become another since it was proven.
    fn leads_to_another(op: &Op, kernel: &Kernel) -> bool {
        let Op::WritePolicy {
            value: Some(value), ..
        } = op
        else {
            return false;
        };
        let members = kernel.members(value.selected);
        members
            .iter()
            .filter_map(|id| kernel.backends.get(id))
            .any(|backend| {
                let registered = kernel.registry.get(&backend.ifindex);
                registered.map(|identity| identity.token) != Some(backend.token)
            })
    }

    /// Whether what is delivered now has to be delivered on, to whomever.
    fn must_go_on(&self, wants: &Wants, intent: &Intent, before: &Fate, kernel: &Kernel, now: Now) -> bool {
        if !intent.valid || !matches!(intent.gate, Gate::Ready(_)) {
            return false;
        }
        let Some(slot) = before.policy.and_then(|slot| kernel.policies.get(&slot)) else {
            return false;
        };
        if number_of_hash(slot.uid) != intent.policy_uid {
            return false;
        }
        if !intent.producers.is_empty() {
            return true;
        }
        // No selected producer is ready: the old set serves on, if one of its members is still who it was.
        let Some(policy) = wants
            .policies
            .values()
            .find(|policy| policy.uid == intent.policy_uid)
        else {
            return false;
        };
        let Some(spec) = &policy.spec else { return false };
        let over = spec.switchover.on_deadline == OnDeadline::Cut
            && slot
                .waiting_since
                .is_some_and(|since| now.boot >= since.plus(spec.switchover.deadline));
        let alive = before.backends().any(|id| {
            kernel.backends.get(&id).is_some_and(|backend| {
                let judged = wants.attachments.values().find(|judged| {
                    judged.device.map(|device| device.ifindex) == Some(backend.ifindex)
                        && judged.right == crate::rules::Right::Fine
                });
                let reached = |judged: &crate::rules::Judged| {
                    intent.keys.iter().any(|service| {
                        self.granted
                            .contains(&(intent.policy_uid, intent.consumer_uid, *service, judged.uid))
                    })
                };
                // Whoever has lost its program leaves the set until that is back.
                let stripped = self.trouble.devices.contains(&backend.ifindex);
                !stripped
                    && wants.tokens.get(&backend.ifindex) == Some(&backend.token)
                    && judged.is_some_and(|judged| {
                        // Whose addresses were taken away is no producer any more, whoever it is.
                        let usable = judged.attached && !judged.doubted && judged.reachable;
                        usable && judged.uid != intent.consumer_uid && reached(judged)
                    })
            })
        });
        alive && !over && policy.ready.is_empty() && !policy.unclear
    }

    /// Every new delivery must have been allowed, and proven.
    fn grants(
        &self,
        flight: &Flight,
        ifindex: Ifindex,
        before: &Fate,
        after: &Fate,
        kernel: &Kernel,
    ) -> Checked {
        let (Some(slot), Some(key)) = (after.policy, after.key) else {
            return Ok(());
        };
        let Some(number) = number_of(&key).filter(|_| !self.tampered.is(Some(ifindex))) else {
            return Ok(());
        };
        // What could not be taken away from a device stays there until it can.
        if self.trouble.devices.contains(&ifindex) {
            return Ok(());
        }
        let spoofed = before.policy == after.policy && before.verdicts == [Verdict::DropSpoofed];
        if matches!(flight.op, Op::WriteSources { .. })
            || (spoofed && matches!(flight.op, Op::WriteRow { .. }))
        {
            // Other addresses of the same consumer reach what it reaches.
            return Ok(());
        }
        let target = |id: BackendId| {
            kernel
                .backends
                .get(&id)
                .map(|backend| (backend.ifindex, backend.token))
        };
        let earlier: BTreeSet<_> = before.backends().filter_map(target).collect();
        let wants = &flight.context.wants;
        let Some(policy) = kernel.policies.get(&slot) else {
            return Ok(());
        };
        let uid = number_of_hash(policy.uid);
        if self.is_unknown(uid) {
            // Whose wishes nobody knows keeps what it had, also where nobody else stands before it any more.
            return Ok(());
        }
        let what = || {
            format!(
                "device {ifindex}, destination {number}, policy {uid}, by {:?}: {before:?} becomes {after:?}",
                flight.op
            )
        };
        for id in after.backends() {
            let Some((producer, token)) = target(id).filter(|target| !earlier.contains(target)) else {
                continue;
            };
            // A member that has just died leaves the set in a moment; who is served by others need not wait for that.
            let others = wants
                .policies
                .values()
                .any(|policy| policy.uid == uid && !policy.ready.is_empty());
            if others && !wants.of_device.contains_key(&producer) {
                continue;
            }
            ensure!(
                others || wants.tokens.get(&producer) == Some(&token),
                "DESIGN 2.1: delivery only to an incarnation that is ready",
                "{}; device {producer} has {:?}",
                what(),
                wants.tokens.get(&producer)
            );
            let consumers = wants.of_device.get(&ifindex);
            let producers = wants.of_device.get(&producer);
            let allowed = consumers.into_iter().flatten().any(|consumer| {
                producers.into_iter().flatten().any(|producer| {
                    flight
                        .context
                        .granted
                        .contains(&(uid, *consumer, number, *producer))
                })
            });
            ensure!(
                allowed,
                "ENGINE 9: grants after the switch: nobody reaches what no version of its policy allows it",
                "{}",
                what()
            );
            let row = kernel.rows.get(&ifindex);
            if matches!(flight.op, Op::WriteRow { .. }) {
                ensure!(
                    row.and_then(|row| row.token) == wants.tokens.get(&ifindex).copied(),
                    "DESIGN 2.1: a row opens only for the incarnation that is ready",
                    "{}",
                    what()
                );
            }
            if matches!(flight.op, Op::WriteRow { .. } | Op::WriteEntries { .. }) {
                let proven = self.proofs.get(&(ifindex, slot)).is_some_and(|proof| {
                    Some(proof.token) == row.and_then(|row| row.token)
                        && proof.asks(&key)
                        && proof.selected == policy.selected
                });
                ensure!(proven, "ENGINE 7: nothing unproven goes live", "{}", what());
            }
        }
        Ok(())
    }

    /// An operation was answered.
    pub(crate) fn answered(&mut self, id: OpId, result: &OpResult, kernel: &Kernel) -> Option<Flight> {
        let flight = self.flights.remove(&id)?;
        match (&flight.op, result) {
            (Op::ProveIntent(proof), Ok(_)) => {
                for slot in proof.policies() {
                    self.proofs.insert((proof.device.ifindex, slot), proof.clone());
                }
            }
            (
                Op::ProveSet {
                    policy,
                    selected,
                    backends,
                    slots,
                    ..
                },
                Ok(_),
            ) => {
                let sets = self.sets.entry(*policy).or_default();
                sets.push(ProvenSet {
                    base: selected.base,
                    slots: slots.clone(),
                    backends: backends.clone(),
                });
                if sets.len() > 4 {
                    sets.remove(0);
                }
                self.coverage.stage(Stage::Proven);
            }
            // A fact about links, no failure.
            (_, Err(OpError::NoDevice)) => {}
            (op, Err(error)) => {
                if let (Op::WriteEntries { entries, .. }, OpError::Full { .. }) = (op, error) {
                    // A policy that does not fit fails as a whole.
                    let slots = entries
                        .values()
                        .filter_map(|entry| kernel.policies.get(&entry.policy));
                    self.trouble
                        .policies
                        .extend(slots.map(|slot| number_of_hash(slot.uid)));
                }
                self.errors = true;
                self.trouble.of(op, kernel);
                self.deliver_on(&flight, kernel);
            }
            (_, Ok(_)) => {}
        }
        Some(flight)
    }

    /// What nobody wants may deliver on because it could not be taken away: all of its interface closes.
    fn deliver_on(&mut self, flight: &Flight, kernel: &Kernel) {
        let Op::WriteEntries { ifindex, entries } = &flight.op else {
            return;
        };
        let wanted = |key: &RouteKey, slot: SlotId| {
            let owner = number_of(key).and_then(|number| self.wants.owners.get(&(*ifindex, number)));
            let uid = kernel
                .policies
                .get(&slot)
                .map(|policy| number_of_hash(policy.uid));
            owner.is_some_and(|owner| Some(self.wants.intents[owner].policy_uid) == uid)
        };
        if entries
            .iter()
            .any(|(key, entry)| !entry.open && !wanted(key, entry.policy))
        {
            self.trouble.devices.insert(*ifindex);
        }
    }

    // --- the view ------------------------------------------------------------------------------------------

    /// Whether failures excuse an intent.
    pub(crate) fn is_troubled(&self, policy: &ObjectName, intent: &Intent) -> bool {
        let trouble = &self.trouble;
        if trouble.is_empty() {
            return false;
        }
        let ifindex = intent.device.map(|device| device.ifindex);
        let producers = self.wants.policies.get(policy).is_some_and(|policy| {
            self.wants.attachments.values().any(|judged| {
                policy.producers.contains(&judged.uid)
                    && judged
                        .device
                        .is_some_and(|device| trouble.devices.contains(&device.ifindex))
            })
        });
        trouble.everything
            || producers
            || (intent.ranges && trouble.locals)
            || trouble.policies.contains(&intent.policy_uid)
            || ifindex.is_some_and(|ifindex| {
                trouble.devices.contains(&ifindex) || trouble.pairs.contains(&(intent.policy_uid, ifindex))
            })
    }

    /// Whether what an intent hangs on was changed behind the engine's back.
    fn is_tampered(&self, policy: &ObjectName, intent: &Intent) -> bool {
        if self.tampered.is_empty() {
            return false;
        }
        let touched = |device: Option<Device>| self.tampered.is(device.map(|device| device.ifindex));
        touched(intent.device)
            || self.wants.policies.get(policy).is_some_and(|policy| {
                let attachments = self.wants.attachments.values();
                attachments
                    .filter(|judged| policy.producers.contains(&judged.uid))
                    .any(|judged| touched(judged.device))
            })
    }

    /// Arenas of which more is asked than there is.
    fn too_small(&mut self) {
        if !self.tight {
            return;
        }
        for intent in self.view.intents.values() {
            if intent.state == State::Failed(FailReason::MapFull) {
                self.trouble
                    .policies
                    .insert(crate::rules::number(&intent.policy_uid));
            }
        }
    }

    /// What changes without an effect, as of policies that nobody is told of, is not looked at in every poll.
    pub(crate) fn look_again(&mut self, engine: &Engine) -> Checked {
        let view = Snapshot::of(engine);
        ensure!(
            view.policies == self.view.policies && view.intents == self.view.intents,
            "DESIGN 2.15: what changes is reported",
            "shown {view:?}, reported {:?}",
            self.view
        );
        self.view = view;
        Ok(())
    }

    /// The engine was polled.
    pub(crate) fn polled(
        &mut self,
        engine: &Engine,
        effects: &[Effect],
        kernel: &Kernel,
        now: Now,
    ) -> Checked {
        self.refresh();
        ensure!(
            engine.next_deadline().is_none_or(|deadline| deadline > now.boot),
            "ENGINE 1: a poll leaves nothing due",
            "due at {:?}, and it is {now:?}",
            engine.next_deadline()
        );
        if self.is_idle(effects) {
            self.unviewed += 1;
            let checked = self.the_schedules(None, effects, engine, now);
            self.just_read.clear();
            return checked;
        }
        self.unviewed = 0;
        self.viewed = self.told.version;
        let before = std::mem::replace(&mut self.view, Snapshot::of(engine));
        self.too_small();
        self.the_sum()?;
        self.the_policies()?;
        self.the_reports(&before, effects)?;
        for (key, intent) in &self.view.intents {
            let wanted = &self.wants.intents[key];
            if self.is_tampered(&key.0, wanted) {
                continue;
            }
            // What failed may say so until something else is answered.
            let failed = matches!(intent.state, State::Failed(_));
            let stays = before
                .intents
                .get(key)
                .is_some_and(|earlier| earlier.state == intent.state);
            if !(failed && stays) {
                self.the_state(key, intent, wanted)?;
            }
            if intent.state == State::Programmed && self.told.names_are_clear() {
                self.programmed(key, intent, wanted, kernel)?;
            }
        }
        self.the_times(&before, now)?;
        self.the_log(effects, now)?;
        self.the_schedules(Some(&before), effects, engine, now)?;
        self.just_read.clear();
        self.forget();
        self.last_poll = now.boot;
        self.told.batch_ends();
        Ok(())
    }

    /// Whether nothing was told and nothing comes of it: the view is what it was. (If it is not, that is seen the next
    /// time, and at the latest after so many polls.)
    fn is_idle(&self, effects: &[Effect]) -> bool {
        const AT_MOST: u32 = 8;
        let idle = |effect: &Effect| {
            matches!(
                effect,
                Effect::ReadRegistry(_) | Effect::AskLink(_) | Effect::Audit(..) | Effect::DumpLinks
            )
        };
        self.unviewed < AT_MOST && self.viewed == self.told.version && effects.iter().all(idle)
    }

    /// Times of an earlier life are kept for what the complete lists name, and for nothing that became another.
    fn forget(&mut self) {
        let prunes = self.told.passed && self.told.complete && !self.remembered.is_empty();
        let mut kept = BTreeSet::new();
        for intent in self.view.intents.values() {
            let anew = self.told.may_be_anew(&intent.policy, &intent.consumer);
            if !prunes && !anew {
                continue;
            }
            let uids = (intent.policy_uid.0.clone(), intent.consumer_uid.0.clone());
            if anew && !self.judged.contains(&uids) {
                self.doubtful.insert(uids.clone());
            }
            kept.insert(uids);
        }
        if prunes {
            self.remembered.retain(|uids, _| kept.contains(uids));
        }
    }

    /// Whether a moment lies in the present batch.
    fn is_new(&self, moment: Now, now: Now) -> bool {
        moment.boot > self.last_poll && moment.boot <= now.boot
    }

    /// What was given up is unknown: whoever needs it may say that it failed.
    pub(crate) fn give_up(&mut self, kernel: &Kernel, now: Now) {
        let silent: Vec<Op> = self
            .flights
            .values()
            .filter(|flight| now.boot.since(flight.sent) >= SILENCE)
            .map(|flight| flight.op.clone())
            .collect();
        for op in silent {
            self.errors = true;
            self.trouble.of(&op, kernel);
        }
        self.give_up_reads(kernel, now);
    }

    /// A read that is not answered is a read that failed.
    fn give_up_reads(&mut self, kernel: &Kernel, now: Now) {
        let silent: Vec<Ifindex> = self
            .reading
            .iter()
            .filter(|(ifindex, out)| {
                let device = self.told.devices.get(ifindex).copied().unwrap_or(0);
                out.iter()
                    .any(|read| read.device == device && now.boot.since(read.since) >= SILENCE)
            })
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in silent {
            self.errors = true;
            self.trouble.unreadable(ifindex, kernel);
            self.told.unreadable(ifindex);
        }
    }

    fn the_sum(&self) -> Checked {
        const RULE: &str = "DESIGN 1: the states sum to what is desired";
        let (desired, shown) = (self.wants.intents.keys(), self.view.intents.keys());
        ensure!(
            desired.clone().eq(shown.clone()),
            RULE,
            "desired {desired:?}, shown {shown:?}"
        );
        for (key, intent) in &self.view.intents {
            let uids = (
                crate::rules::number(&intent.policy_uid),
                crate::rules::number(&intent.consumer_uid),
            );
            let wanted = &self.wants.intents[key];
            ensure!(
                uids == (wanted.policy_uid, wanted.consumer_uid),
                "ENGINE 11: a new uid of a name is another object",
                "{key:?} is shown with uids {uids:?}, told {wanted:?}"
            );
        }
        let summary = &self.view.summary;
        let count = |is: &dyn Fn(State) -> bool| {
            self.view
                .intents
                .values()
                .filter(|intent| is(intent.state))
                .count() as u64
        };
        let counted = (
            count(&|state| state == State::Pending),
            count(&|state| state == State::Programmed),
            count(&|state| matches!(state, State::Held(_))),
            count(&|state| matches!(state, State::Failed(_))),
        );
        let said = &summary.intents;
        let told = (said.pending, said.programmed, said.held, said.failed);
        ensure!(told == counted, RULE, "summary {told:?}, counted {counted:?}");
        for reason in HoldReason::ALL {
            let said = summary.held.get(&reason).copied();
            let counted = count(&|state| state == State::Held(reason));
            ensure!(
                said == Some(counted),
                RULE,
                "{reason}: summary {said:?}, counted {counted}"
            );
        }
        for reason in FailReason::ALL {
            let said = summary.failed.get(&reason).copied();
            let counted = count(&|state| state == State::Failed(reason));
            ensure!(
                said == Some(counted),
                RULE,
                "{reason}: summary {said:?}, counted {counted}"
            );
        }
        ensure!(
            summary.policies == self.told.policies.len() as u64
                && summary.attachments == self.told.attachments.len() as u64,
            RULE,
            "{summary:?}"
        );
        let passed = self.told.passed;
        ensure!(
            !summary.waiting_for.is_empty() || passed,
            "ENGINE 2: four things before the barrier passes",
            "nothing is waited for, told: {:?}",
            (
                self.told.adopted,
                self.told.complete,
                self.told.saved,
                self.told.dumped,
                &self.told.rows
            )
        );
        Ok(())
    }

    fn the_policies(&self) -> Checked {
        const RULE: &str = "ENGINE 16: one state a policy, from its worst and oldest intent";
        for (name, wanted) in &self.wants.policies {
            let Some(view) = self.view.policies.get(name) else {
                ensure!(
                    wanted.consumers.is_empty(),
                    RULE,
                    "{name} has consumers and is not shown"
                );
                continue;
            };
            let intents: Vec<&IntentView> = self
                .view
                .intents
                .range((name.clone(), first_name())..)
                .take_while(|((policy, _), _)| policy == name)
                .map(|(_, intent)| intent)
                .collect();
            ensure!(
                view.uid.0[1..].parse() == Ok(wanted.uid)
                    && view.generation == wanted.generation
                    && view.covers == wanted.covers,
                "DESIGN 2.16: an ack carries uid, generation and covers",
                "{view:?}, wanted {wanted:?}"
            );
            ensure!(
                view.intents.desired() == intents.len() as u64,
                RULE,
                "{view:?} of {intents:?}"
            );
            let rank = |state: State| match state {
                State::Failed(_) => 0,
                State::Held(_) => 1,
                State::Pending => 2,
                State::Programmed => 3,
            };
            let worst = intents.iter().map(|intent| rank(intent.state)).min();
            if let Some(worst) = worst {
                let oldest = intents
                    .iter()
                    .filter(|intent| rank(intent.state) == worst)
                    .map(|intent| intent.since.boot)
                    .min();
                let matching = intents.iter().any(|intent| {
                    Some(intent.since.boot) == oldest
                        && intent.state == view.state
                        && intent.since == view.since
                });
                ensure!(matching, RULE, "{view:?} of {intents:?}");
            } else {
                ensure!(
                    wanted.refused.is_some() && matches!(view.state, State::Failed(_)),
                    RULE,
                    "{view:?} has no intent"
                );
            }
            let held = intents
                .iter()
                .filter_map(|intent| intent.held_since)
                .min_by_key(|since| since.boot);
            ensure!(
                view.held_since.map(|since| since.boot) == held.map(|since| since.boot),
                "ENGINE 17: heldSince is the start of the oldest hold",
                "{view:?} of {intents:?}"
            );
            ensure!(
                view.applied <= view.generation
                    && view.proven <= view.generation
                    && (view.state != State::Programmed || view.proven == view.generation),
                "DESIGN 2.14: proven says what was proven",
                "{view:?}"
            );
            ensure!(
                view.serving
                    .is_none_or(|serving| serving.generation != view.generation),
                "CONTROLPLANE: serving is there when another generation flows",
                "{view:?}"
            );
            if view.state == State::Programmed {
                ensure!(
                    view.serving.is_none() && view.behind_since.is_none(),
                    "ENGINE 14: never Programmed while another generation is served",
                    "{view:?}"
                );
            }
        }
        let unknown = self
            .view
            .policies
            .keys()
            .find(|name| !self.wants.policies.contains_key(name));
        ensure!(unknown.is_none(), RULE, "{unknown:?} is shown and not there");
        let troubled: BTreeSet<ObjectName> = self
            .view
            .policies
            .values()
            .filter(|view| {
                matches!(view.state, State::Failed(_) | State::Held(_)) || view.behind_since.is_some()
            })
            .map(|view| view.name.clone())
            .collect();
        ensure!(
            troubled == self.view.troubled,
            "CONTROLPLANE: the policies that are held, failed or behind",
            "shown {:?}, are {troubled:?}",
            self.view.troubled
        );
        Ok(())
    }

    fn the_reports(&self, before: &Snapshot, effects: &[Effect]) -> Checked {
        let names: BTreeSet<&ObjectName> = before.policies.keys().chain(self.view.policies.keys()).collect();
        let changed: BTreeSet<ObjectName> = names
            .into_iter()
            .filter(|name| before.policies.get(name) != self.view.policies.get(name))
            .cloned()
            .collect();
        let mut reported = BTreeSet::new();
        for effect in effects {
            if let Effect::Report(names) = effect {
                reported.extend(names.iter().cloned());
            }
        }
        let missing: Vec<_> = changed.difference(&reported).collect();
        ensure!(
            missing.is_empty(),
            "DESIGN 2.15: what changes is reported",
            "{missing:?} changed and were not reported"
        );
        let idle: Vec<_> = reported.difference(&changed).collect();
        ensure!(
            idle.is_empty(),
            "DESIGN 2.18: an identical status is not written again",
            "{idle:?} were reported and did not change"
        );
        Ok(())
    }

    fn the_state(&self, key: &(ObjectName, ObjectName), intent: &IntentView, wanted: &Intent) -> Checked {
        const HELD: &str = "DESIGN 2.1: what is not ready is held at once, with its reason";
        let state = intent.state;
        let ifindex = wanted.device.map(|device| device.ifindex);
        let read_again = ifindex.is_some_and(|ifindex| self.reading.contains_key(&ifindex));
        let by_identity = matches!(
            wanted.gate,
            Gate::Held(HoldReason::IdentityMissing | HoldReason::IdentityMismatch) | Gate::Unreadable
        );
        if read_again && by_identity && matches!(state, State::Held(_) | State::Pending) {
            // What the answer to come says may be another thing.
            return Ok(());
        }
        let troubled = self.is_troubled(&key.0, wanted);
        let failed = matches!(state, State::Failed(_));
        if !self.told.names_are_clear() || (troubled && failed) {
            return Ok(());
        }
        let story = || format!("{key:?} is {state:?}, wanted {:?}; {intent:?}", wanted.must);
        match &wanted.must {
            Must::NotDeliver => ensure!(wanted.must.allows(state), HELD, "{}", story()),
            Must::Be(states) if *states == [State::Programmed] => {
                ensure!(
                    matches!(state, State::Programmed | State::Pending),
                    "ENGINE 18: what is ready is Pending or Programmed",
                    "{}",
                    story()
                );
            }
            Must::Be(states) if states.iter().any(|state| matches!(state, State::Failed(_))) => {
                let dynamic = wanted.gate;
                let held = matches!((state, dynamic), (State::Held(a), Gate::Held(b)) if a == b);
                let soft = *states == [State::Failed(FailReason::Unsupported)] && held;
                ensure!(
                    states.contains(&state) || soft,
                    "ENGINE 8, 22: refused and conflicting intents are Failed at once",
                    "{}",
                    story()
                );
            }
            Must::Be(states) => {
                // What has not been settled yet may be Pending only if nothing says that it is held.
                let soon = state == State::Pending && states.contains(&State::Programmed);
                ensure!(soon || states.contains(&state), HELD, "{}", story());
            }
        }
        Ok(())
    }

    /// Programmed is never said but of what the kernel has, answered and proven.
    fn programmed(
        &self,
        key: &(ObjectName, ObjectName),
        intent: &IntentView,
        wanted: &Intent,
        kernel: &Kernel,
    ) -> Checked {
        const RULE: &str = "DESIGN 2.14: Programmed is said of what the kernel has";
        const OUT: &str = "ENGINE 18: never Programmed while an answer is out";
        const PROOF: &str = "ENGINE 25: Programmed only on the strength of a proof of what is there";
        let Some(device) = wanted.device else {
            ensure!(false, RULE, "{key:?} has no device");
            return Ok(());
        };
        let ifindex = device.ifindex;
        let Gate::Ready(token) = wanted.gate else {
            ensure!(false, RULE, "{key:?} is not ready: {:?}", wanted.gate);
            return Ok(());
        };
        ensure!(
            intent.token == Some(token),
            RULE,
            "{intent:?}, told token {token:?}"
        );
        let slot = slot_of(wanted.policy_uid, kernel);
        let Some((slot, policy)) = slot.and_then(|slot| Some((slot, kernel.policies.get(&slot)?))) else {
            ensure!(false, RULE, "{key:?} has no policy slot");
            return Ok(());
        };
        let members = kernel.members(policy.selected);
        let mut used = vec![
            Item::Row(ifindex),
            Item::Sources(ifindex),
            Item::Program(ifindex),
            Item::Policy(slot),
            Item::Slots(policy.selected.base, u32::from(policy.selected.length)),
        ];
        used.extend(wanted.keys.iter().map(|key| Item::Entry(ifindex, route(*key))));
        used.extend(members.iter().map(|id| Item::Backend(*id)));
        for flight in self.flights.values() {
            if matches!(flight.op, Op::ProveIntent(_) | Op::ProveSet { .. }) {
                continue;
            }
            let out = overlap(&used, &writes(&flight.op));
            ensure!(out.is_none(), OUT, "{key:?}: {:?} is out", flight.op);
        }
        let row = kernel.rows.get(&ifindex);
        ensure!(
            row.is_some_and(|row| row.token == Some(token) && announces(*row, &wanted.keys)),
            RULE,
            "{key:?} has row {row:?}, token {token:?}"
        );
        ensure!(!members.is_empty(), RULE, "{key:?} has an empty set");
        let wanted_policy = &self.wants.policies[&key.0];
        for id in members.iter() {
            let backend = kernel.backends.get(id);
            let right = backend.is_some_and(|backend| {
                wanted_policy
                    .ready
                    .values()
                    .any(|(device, token)| (backend.ifindex, backend.token) == (device.ifindex, *token))
            });
            ensure!(
                right || wanted_policy.unclear,
                RULE,
                "{key:?} has member {backend:?}, ready are {:?}",
                wanted_policy.ready
            );
        }
        ensure!(
            !wanted.keys.is_empty() || !wanted.must.programmed(),
            RULE,
            "{key:?} claims nothing"
        );
        let proof = self.proofs.get(&(ifindex, slot));
        for key in wanted.keys.iter().map(|key| route(*key)) {
            let entry = kernel.entries.get(&ifindex).and_then(|entries| entries.get(&key));
            ensure!(
                entry
                    == Some(&Entry {
                        policy: slot,
                        open: true
                    }),
                RULE,
                "{key:?} has {entry:?}, not open in slot {slot}"
            );
            ensure!(
                proof.is_some_and(|proof| proof.entries.contains_key(&key)),
                PROOF,
                "{key:?} was not proven: {proof:?}"
            );
        }
        let proven = proof.is_some_and(|proof| {
            proof.device == device
                && proof.token == token
                && proof.selected == policy.selected
                && members
                    .iter()
                    .all(|id| match (proof.backends.get(id), kernel.backends.get(id)) {
                        (Some(proven), Some(there)) => is_same_producer(proven, there),
                        _ => false,
                    })
        });
        ensure!(
            proven || members.is_empty(),
            PROOF,
            "{key:?}: there is {:?}, proven {proof:?}",
            policy.selected
        );
        Ok(())
    }

    fn the_times(&mut self, before: &Snapshot, now: Now) -> Checked {
        const SINCE: &str = "ENGINE 17: since is the start of the present state and reason";
        const HELD: &str =
            "ENGINE 17: heldSince is the start of the hold, whatever reasons it passes through";
        for (key, intent) in &self.view.intents {
            let uids = (intent.policy_uid.0.clone(), intent.consumer_uid.0.clone());
            let earlier = before.intents.get(key).filter(|earlier| {
                earlier.policy_uid == intent.policy_uid && earlier.consumer_uid == intent.consumer_uid
            });
            let first = intent.state != State::Pending && self.judged.insert(uids.clone());
            let anew = self.told.may_be_anew(&intent.policy, &intent.consumer);
            let memory = self.remembered.get(&uids).filter(|_| first);
            if memory.is_some() && (anew || self.doubtful.contains(&uids)) {
                continue;
            }
            match earlier {
                Some(earlier) if earlier.state == intent.state => {
                    let reborn = self.told.may_be_anew(&intent.policy, &intent.consumer)
                        && self.is_new(intent.since, now);
                    ensure!(
                        intent.since == earlier.since || reborn,
                        SINCE,
                        "{intent:?} was {earlier:?}, and nothing changed"
                    );
                }
                _ => {
                    let same =
                        memory.filter(|memory| memory.state == intent.state && memory.token == intent.token);
                    match same {
                        Some(memory) => ensure!(
                            intent.since == memory.since,
                            SINCE,
                            "{intent:?} was the same in an earlier life: {memory:?}"
                        ),
                        None => ensure!(
                            self.is_new(intent.since, now),
                            SINCE,
                            "{intent:?} is new at {now:?}"
                        ),
                    }
                }
            }
            let held = matches!(intent.state, State::Held(_));
            ensure!(held == intent.held_since.is_some(), HELD, "{intent:?}");
            let Some(since) = intent.held_since else {
                if intent.state == State::Programmed {
                    self.hold_starts.remove(&uids);
                }
                continue;
            };
            let was_held = earlier.and_then(|earlier| earlier.held_since);
            match was_held {
                Some(earlier) => ensure!(
                    since == earlier
                        || (self.told.may_be_anew(&intent.policy, &intent.consumer)
                            && self.is_new(since, now)),
                    HELD,
                    "{intent:?} was held since {earlier:?}"
                ),
                None => {
                    let remembered = memory.and_then(|memory| memory.held_since);
                    let same = memory.is_some_and(|memory| memory.token == intent.token);
                    let start = self.hold_starts.get(&uids).copied();
                    let right = if same && remembered.is_some() {
                        Some(since) == remembered
                    } else {
                        self.is_new(since, now) || Some(since) == start || Some(since) == remembered
                    };
                    ensure!(
                        right,
                        HELD,
                        "{intent:?} begins to be held at {now:?}; remembered {memory:?}, hold begun {start:?}"
                    );
                }
            }
            self.hold_starts.insert(uids, since);
        }
        Ok(())
    }

    fn uids_of(&self, line: &LogLine) -> Option<Uids> {
        let key = (line.policy.clone()?, line.consumer.clone()?);
        let intent = self.view.intents.get(&key)?;
        Some((intent.policy_uid.0.clone(), intent.consumer_uid.0.clone()))
    }

    fn the_log(&mut self, effects: &[Effect], now: Now) -> Checked {
        const RULE: &str = "DESIGN 2.6: one line when a hold starts, when its reason changes, when it ends";
        for intent in self.view.intents.values() {
            if self.told.may_be_anew(&intent.policy, &intent.consumer) && self.is_new(intent.since, now) {
                self.vague
                    .insert((intent.policy_uid.0.clone(), intent.consumer_uid.0.clone()));
            }
        }
        for effect in effects {
            let Effect::Log(line) = effect else { continue };
            ensure!(
                line.level < Level::Error || self.errors,
                "DESIGN 2.6: nothing at error level where nothing failed",
                "{line:?}"
            );
            let (reason, begins) = match line.what {
                Happening::HoldStarted(reason) => (Some(reason), true),
                Happening::HoldChanged(reason) => (Some(reason), false),
                Happening::HoldEnded(..) => (None, false),
                // A failure ends a hold too, and needs no second line.
                Happening::Failed(..) => {
                    if let Some(uids) = self.uids_of(line) {
                        self.holds.remove(&uids);
                    }
                    continue;
                }
                _ => continue,
            };
            ensure!(
                line.level <= Level::Info && line.policy.is_some() && line.consumer.is_some(),
                RULE,
                "{line:?}"
            );
            self.holds_begun += u64::from(begins);
            let Some(uids) = self.uids_of(line) else {
                // The last line of an intent that is gone.
                ensure!(reason.is_none(), RULE, "{line:?} is about no intent");
                continue;
            };
            let known = self.holds.get(&uids).copied();
            // A hold that goes on over a restart needs no line of its own.
            let goes_on = self
                .remembered
                .get(&uids)
                .is_some_and(|memory| memory.held_since.is_some());
            match reason {
                _ if self.vague.remove(&uids) => {}
                Some(_) if begins => ensure!(known.is_none(), RULE, "{line:?} although {known:?}"),
                Some(reason) => ensure!(
                    known.is_some_and(|known| known.reason != reason) || (known.is_none() && goes_on),
                    RULE,
                    "{line:?} although {known:?}"
                ),
                None => ensure!(
                    known.is_some() || goes_on,
                    RULE,
                    "{line:?} although there was none"
                ),
            }
            match reason {
                Some(reason) => {
                    let since = known.map_or(now, |known| known.since);
                    self.holds.insert(uids, Hold { reason, since });
                }
                None => drop(self.holds.remove(&uids)),
            }
        }
        let mut there = BTreeSet::new();
        for intent in self.view.intents.values() {
            let uids = (intent.policy_uid.0.clone(), intent.consumer_uid.0.clone());
            let said = self.holds.get(&uids).map(|hold| hold.reason);
            let memory = self.remembered.get(&uids).map(|memory| memory.state);
            match intent.state {
                State::Held(reason) => {
                    ensure!(
                        said == Some(reason)
                            || (said.is_none() && memory == Some(intent.state))
                            || self.vague.contains(&uids),
                        RULE,
                        "{intent:?}, the log said {said:?}"
                    );
                }
                State::Programmed if self.vague.remove(&uids) => drop(self.holds.remove(&uids)),
                State::Programmed => ensure!(said.is_none(), RULE, "{intent:?}, the log still says {said:?}"),
                State::Pending | State::Failed(_) => {}
            }
            there.insert(uids);
        }
        self.holds.retain(|uids, _| there.contains(uids));
        self.vague.retain(|uids| there.contains(uids));
        self.hold_starts.retain(|uids, _| there.contains(uids));
        let counted: u64 = self.view.summary.holds_begun.values().sum();
        ensure!(
            counted == self.holds_begun,
            "DESIGN 4: holds_total counts the holds that began",
            "{counted} counted, {} lines",
            self.holds_begun
        );
        Ok(())
    }

    /// Interfaces whose identity a policy waits for.
    fn waits_for_identity(&self, policy: &ObjectName) -> BTreeSet<Ifindex> {
        let identity = |gate: Gate| {
            matches!(
                gate,
                Gate::Held(HoldReason::IdentityMissing | HoldReason::IdentityMismatch)
            )
        };
        let mut waits = BTreeSet::new();
        let mut producers = false;
        for ((name, _), intent) in &self.view.intents {
            if name != policy {
                continue;
            }
            match intent.state {
                State::Held(HoldReason::IdentityMissing | HoldReason::IdentityMismatch) => {
                    waits.extend(intent.ifindex);
                }
                State::Held(HoldReason::NoReadyProducer) => producers = true,
                _ => {}
            }
        }
        if producers && let Some(wanted) = self.wants.policies.get(policy) {
            for judged in self.wants.attachments.values() {
                if wanted.producers.contains(&judged.uid) && identity(judged.gate) {
                    waits.extend(judged.device.map(|device| device.ifindex));
                }
            }
        }
        waits
    }

    /// Rechecks at 1, 2, 4, 8, 16 and then every 30 s, from the start of a hold or of a wait for an identity.
    fn the_schedules(
        &mut self,
        before: Option<&Snapshot>,
        effects: &[Effect],
        engine: &Engine,
        now: Now,
    ) -> Checked {
        const RULE: &str =
            "DESIGN 2.4, ENGINE 19: a policy that holds is looked at after 1 s, doubling to 30 s";
        if !self.trouble.is_empty() || !self.told.passed || !self.told.names_are_clear() {
            self.schedules.clear();
            return Ok(());
        }
        let mut reads: BTreeSet<Ifindex> = self.reading.keys().chain(&self.just_read).copied().collect();
        for effect in effects {
            if let Effect::ReadRegistry(ifindexes) = effect {
                reads.extend(ifindexes);
            }
        }
        for (policy, view) in &self.view.policies {
            if view.intents.held == 0 {
                self.schedules.remove(policy);
                continue;
            }
            let due = self
                .schedules
                .get(policy)
                .filter(|schedule| schedule.due <= now.boot)
                .copied();
            if let Some(schedule) = due {
                let missing: Vec<Ifindex> = self
                    .waits_for_identity(policy)
                    .difference(&reads)
                    .copied()
                    .collect();
                ensure!(
                    missing.is_empty(),
                    RULE,
                    "{policy} is due at {:?}, it is {now:?}, and {missing:?} are not read",
                    schedule.due
                );
                self.schedules.insert(policy.clone(), schedule.next(now.boot));
            }
            let begins = before.is_some_and(|before| {
                self.view.intents.iter().any(|(key, intent)| {
                    let missing = State::Held(HoldReason::IdentityMissing);
                    let earlier = || before.intents.get(key).map(|earlier| earlier.state);
                    key.0 == *policy && intent.state == missing && earlier() != Some(missing)
                })
            });
            let started = effects.iter().any(|effect| match effect {
                Effect::Log(line) => {
                    line.policy.as_ref() == Some(policy) && matches!(line.what, Happening::HoldStarted(_))
                }
                _ => false,
            });
            if begins || started {
                self.schedules.insert(policy.clone(), Schedule::begin(now.boot));
            }
            if let Some(schedule) = self.schedules.get(policy)
                && !self.waits_for_identity(policy).is_empty()
            {
                ensure!(
                    engine
                        .next_deadline()
                        .is_some_and(|deadline| deadline <= schedule.due),
                    RULE,
                    "{policy} is due at {:?}, the engine sleeps until {:?}",
                    schedule.due,
                    engine.next_deadline()
                );
            }
        }
        self.schedules
            .retain(|policy, _| self.view.policies.contains_key(policy));
        Ok(())
    }

    /// Which registry rows may be read at this moment if nothing happened but that time passed.
    pub(crate) fn due_reads(&self, now: Boot) -> BTreeSet<Ifindex> {
        let mut reads = BTreeSet::new();
        for (policy, schedule) in &self.schedules {
            let Some(wanted) = self.wants.policies.get(policy).filter(|_| schedule.due <= now) else {
                continue;
            };
            for judged in self.wants.attachments.values() {
                if wanted.producers.contains(&judged.uid) || wanted.consumers.contains(&judged.uid) {
                    reads.extend(judged.device.map(|device| device.ifindex));
                }
            }
        }
        reads
    }
}

fn first_name() -> ObjectName {
    ObjectName {
        namespace: String::new(),
        name: String::new(),
    }
}

/// Whether a row says that there are entries of the kinds of these destinations.
pub(crate) fn announces(row: Row, keys: &BTreeSet<u8>) -> bool {
    keys.iter().all(|key| match route(*key) {
        RouteKey::Service { .. } => row.has_services,
        RouteKey::Prefix { address, .. } if address.is_ipv4() => row.has_prefixes_v4,
        RouteKey::Prefix { .. } => row.has_prefixes_v6,
    })
}

/// Whether two values of a backend stand for one incarnation of a producer in one policy.
pub(crate) fn is_same_producer(a: &Backend, b: &Backend) -> bool {
    (a.policy, a.ifindex, a.token) == (b.policy, b.ifindex, b.token)
}

/// Whether an operation closes, removes, deselects or switches something that the kernel has.
fn takes_away(op: &Op, kernel: &Kernel) -> bool {
    match op {
        Op::Detach { ifindex } => kernel.attached(*ifindex),
        Op::ClearInterface { ifindex } => {
            kernel.rows.contains_key(ifindex)
                || kernel.entries.contains_key(ifindex)
                || kernel.sources.contains_key(ifindex)
        }
        Op::WriteRow { ifindex, row } => kernel
            .rows
            .get(ifindex)
            .is_some_and(|there| there.token.is_some() && there.token != row.token),
        Op::WriteSources { ifindex, delete, add } => kernel
            .sources
            .get(ifindex)
            .is_some_and(|there| delete.difference(add).any(|address| there.contains(address))),
        Op::WriteLocals { delete, add } => delete
            .difference(add)
            .any(|address| kernel.locals.contains(address)),
        Op::WriteEntries { ifindex, entries } => kernel.entries.get(ifindex).is_some_and(|there| {
            entries.iter().any(|(key, entry)| {
                there
                    .get(key)
                    .is_some_and(|there| there.policy != entry.policy || (there.open && !entry.open))
            })
        }),
        Op::DeleteEntries { ifindex, keys } => kernel
            .entries
            .get(ifindex)
            .is_some_and(|there| keys.iter().any(|key| there.contains_key(key))),
        Op::WriteBackends { backends } => backends.iter().any(|(id, backend)| {
            kernel.backends.get(id).is_some_and(|there| {
                !backend
                    .as_ref()
                    .is_some_and(|backend| is_same_producer(backend, there))
            })
        }),
        Op::WritePolicy { slot, value } => kernel.policies.get(slot).is_some_and(|there| {
            value.is_none()
                || (there.selected.length > 0
                    && value
                        .as_ref()
                        .is_some_and(|value| value.selected != there.selected))
        }),
        Op::DeleteIdentity { ifindex, token } => kernel
            .registry
            .get(ifindex)
            .is_some_and(|identity| identity.token == *token),
        Op::Attach { .. } | Op::WriteSlots { .. } | Op::ProveSet { .. } | Op::ProveIntent(_) => false,
    }
}
