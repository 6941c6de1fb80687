//! Operations: what is out, what was answered, and in which order effects are handed over.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::belief::Belief;
use crate::engine::{Engine, Timer};
use crate::model::{
    BackendId, Boot, Device, Effect, FailReason, Happening, Ifindex, Leg, Level, LogLine, ObjectName, Op,
    OpDone, OpError, OpId, OpResult, RouteKey, SlotId, Token,
};
use crate::objects::{AttachmentId, PolicyId};
use crate::ports::Port;
use crate::producers::Orphan;

/// After so long without an answer an operation is given up: its thing is unknown.
pub(crate) const SILENCE: u64 = 10 * Boot::SECOND;

/// Why something could not be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trouble {
    pub(crate) reason: FailReason,
    pub(crate) message: Arc<str>,
    /// Not tried again before the timer says so.
    pub(crate) blocked: bool,
    /// There was no answer: nothing is known to be wrong, and what serves goes on.
    pub(crate) silent: bool,
}

impl Trouble {
    pub(crate) fn new(reason: FailReason, message: impl AsRef<str>) -> Self {
        Self {
            reason,
            message: Arc::from(message.as_ref()),
            blocked: true,
            silent: false,
        }
    }

    pub(crate) fn of(error: &OpError, refused: FailReason) -> Self {
        let reason = match error {
            OpError::Full { .. } => FailReason::MapFull,
            OpError::Disproved { .. } | OpError::Detached { .. } => FailReason::ProofFailed,
            OpError::NoDevice | OpError::Refused { .. } => refused,
        };
        Self::new(reason, error.to_string())
    }

    fn silent() -> Self {
        Self {
            blocked: false,
            silent: true,
            ..Self::new(
                FailReason::MapWriteFailed,
                format!("no answer from the kernel in {} s", SILENCE / Boot::SECOND),
            )
        }
    }
}

/// What is wanted of one interface. A goal that failed is tried again when its timer says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Goal {
    /// The row is closed (or there, closed).
    RowClosed,
    /// The row is open, or rewritten while open.
    RowOpen,
    /// The program is attached.
    Attached,
    /// The source addresses are right.
    Sources,
    /// Entries that nobody wants are gone.
    Unclaimed,
    /// Nothing of an earlier device, or of an attachment that is gone, is left.
    Cleared,
    /// The program is detached.
    Detached,
}

impl Goal {
    /// Whether an intent that uses the interface cannot be right while this goal is failed.
    pub(crate) const fn concerns_intents(self) -> bool {
        match self {
            Self::RowClosed | Self::RowOpen | Self::Attached | Self::Sources | Self::Cleared => true,
            Self::Unclaimed | Self::Detached => false,
        }
    }

    /// Whether it takes something away.
    pub(crate) const fn is_cleanup(self) -> bool {
        matches!(self, Self::Unclaimed | Self::Cleared | Self::Detached)
    }
}

/// Entries that were deleted, for the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// The slot that they led to.
    pub(crate) slot: SlotId,
    pub(crate) consumer: Option<ObjectName>,
    pub(crate) keys: u32,
}

/// What an operation is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    Attach(Ifindex),
    Detach(Ifindex),
    Clear {
        ifindex: Ifindex,
        removed: Vec<Removed>,
    },
    Row {
        ifindex: Ifindex,
        goal: Goal,
        /// From closed to open.
        opening: bool,
        /// Revocations that the new epoch covers.
        revoked: u32,
    },
    Sources(Ifindex),
    /// The node's own addresses.
    Locals,
    /// Entries of one intent.
    Entries {
        ifindex: Ifindex,
        policy: PolicyId,
        attachment: AttachmentId,
        keys: Vec<RouteKey>,
        revoking: bool,
        /// How far the intent had fallen back when it was sent.
        fallback: u8,
    },
    /// Entries that nobody wants, closed before they go.
    Revoke {
        ifindex: Ifindex,
        keys: Vec<RouteKey>,
    },
    Delete {
        ifindex: Ifindex,
        keys: Vec<RouteKey>,
        removed: Vec<Removed>,
    },
    /// Backends of a set.
    Backends(SlotId, Vec<BackendId>),
    /// Backends that nobody uses any more.
    Free(Vec<BackendId>),
    Slots(SlotId),
    Policy(SlotId),
    ProveSet(SlotId),
    ProveIntent(PolicyId, AttachmentId),
    DeleteIdentity(Ifindex, Token),
}

impl What {
    pub(crate) const fn ifindex(&self) -> Option<Ifindex> {
        match self {
            Self::Attach(ifindex)
            | Self::Detach(ifindex)
            | Self::Clear { ifindex, .. }
            | Self::Row { ifindex, .. }
            | Self::Sources(ifindex)
            | Self::Entries { ifindex, .. }
            | Self::Revoke { ifindex, .. }
            | Self::Delete { ifindex, .. } => Some(*ifindex),
            Self::Locals
            | Self::Backends(..)
            | Self::Free(_)
            | Self::Slots(_)
            | Self::Policy(_)
            | Self::ProveSet(_)
            | Self::ProveIntent(..)
            | Self::DeleteIdentity(..) => None,
        }
    }
}

/// An operation that is out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Flight {
    pub(crate) what: What,
    /// The device that it was sent for.
    pub(crate) device: Option<Device>,
    pub(crate) sent: Boot,
    /// It was given up; the answer may still come.
    pub(crate) silent: bool,
}

/// Effects of one poll.
#[derive(Clone, Debug, Default)]
pub(crate) struct Out {
    kernel: Vec<(u8, OpId, Op)>,
    pub(crate) reads: BTreeSet<Ifindex>,
    pub(crate) asks: BTreeSet<Ifindex>,
    pub(crate) dump_links: bool,
    pub(crate) audits: Vec<(OpId, Vec<Belief>)>,
    pub(crate) measured: Vec<(Leg, u64)>,
    pub(crate) log: Vec<LogLine>,
    pub(crate) reports: BTreeSet<ObjectName>,
}

/// What goes first when nothing depends on anything: closes, then removals, then what opens.
const fn urgency(op: &Op) -> u8 {
    match op {
        Op::WriteRow { row, .. } if row.token.is_none() => 0,
        Op::ClearInterface { .. } | Op::DeleteEntries { .. } | Op::Detach { .. } => 1,
        Op::WriteBackends { .. } | Op::WriteSlots { .. } => 2,
        Op::WritePolicy { .. } => 3,
        // Its member then holds whom it served: a slot that must not let these pass says so first.
        Op::DeleteIdentity { .. } => 4,
        Op::WriteSources { .. } | Op::WriteLocals { .. } | Op::WriteEntries { .. } => 5,
        Op::WriteRow { .. } => 6,
        Op::Attach { .. } => 7,
        Op::ProveSet { .. } | Op::ProveIntent(_) => 8,
    }
}

impl Out {
    /// Hands everything over.
    pub(crate) fn take(&mut self) -> Vec<Effect> {
        let mut kernel = std::mem::take(&mut self.kernel);
        kernel.sort_by_key(|(urgency, op, _)| (*urgency, *op));
        let mut effects: Vec<Effect> = kernel
            .into_iter()
            .map(|(_, id, op)| Effect::Kernel(id, op))
            .collect();
        let reads = std::mem::take(&mut self.reads);
        if !reads.is_empty() {
            effects.push(Effect::ReadRegistry(reads));
        }
        effects.extend(std::mem::take(&mut self.asks).into_iter().map(Effect::AskLink));
        if std::mem::take(&mut self.dump_links) {
            effects.push(Effect::DumpLinks);
        }
        let audits = std::mem::take(&mut self.audits);
        effects.extend(audits.into_iter().map(|(id, beliefs)| Effect::Audit(id, beliefs)));
        let reports = std::mem::take(&mut self.reports);
        if !reports.is_empty() {
            effects.push(Effect::Report(reports));
        }
        let measured = std::mem::take(&mut self.measured);
        effects.extend(
            measured
                .into_iter()
                .map(|(leg, nanos)| Effect::Measured(leg, nanos)),
        );
        effects.extend(std::mem::take(&mut self.log).into_iter().map(Effect::Log));
        effects
    }
}

impl Engine {
    /// Sends an operation.
    pub(crate) fn send(&mut self, what: What, device: Option<Device>, op: Op) -> OpId {
        self.last_op += 1;
        let id = OpId(self.last_op);
        self.stir(&what);
        self.out.kernel.push((urgency(&op), id, op));
        self.flights.insert(
            id,
            Flight {
                what,
                device,
                sent: self.now.boot,
                silent: false,
            },
        );
        self.unsilenced.insert(id);
        id
    }

    /// Whether this operation is out and was given up.
    pub(crate) fn is_silent(&self, op: Option<OpId>) -> bool {
        op.and_then(|op| self.flights.get(&op))
            .is_some_and(|flight| flight.silent)
    }

    pub(crate) fn say(&mut self, level: Level, what: Happening) {
        self.out.log.push(LogLine {
            level,
            what,
            policy: None,
            consumer: None,
            ifindex: None,
        });
    }

    /// Gives up what has not been answered for too long.
    pub(crate) fn silence(&mut self) {
        while let Some(&op) = self.unsilenced.first() {
            let Some(flight) = self.flights.get_mut(&op) else {
                self.unsilenced.pop_first();
                continue;
            };
            if self.now.boot.since(flight.sent) < SILENCE {
                break;
            }
            self.unsilenced.pop_first();
            flight.silent = true;
            let what = flight.what.clone();
            self.troubled_by(&what, Trouble::silent());
        }
    }

    /// When the next operation would be given up.
    pub(crate) fn silence_due(&self) -> Option<Boot> {
        let op = self.unsilenced.first()?;
        self.flights.get(op).map(|flight| flight.sent.plus(SILENCE))
    }

    /// Puts a trouble where it belongs.
    fn troubled_by(&mut self, what: &What, trouble: Trouble) {
        match what {
            What::Attach(ifindex) => self.port_trouble(*ifindex, Goal::Attached, trouble),
            What::Detach(ifindex) => self.port_trouble(*ifindex, Goal::Detached, trouble),
            What::Clear { ifindex, .. } => self.port_trouble(*ifindex, Goal::Cleared, trouble),
            What::Row { ifindex, goal, .. } => self.port_trouble(*ifindex, *goal, trouble),
            What::Sources(ifindex) => self.port_trouble(*ifindex, Goal::Sources, trouble),
            What::Revoke { ifindex, .. } | What::Delete { ifindex, .. } => {
                self.port_trouble(*ifindex, Goal::Unclaimed, trouble);
            }
            What::Entries {
                ifindex,
                policy,
                attachment,
                ..
            } => {
                if let Some(intent) = self.intent_mut(*policy, *attachment) {
                    intent.entries_trouble = Some(trouble);
                }
                self.dirty.ports.insert(*ifindex);
            }
            What::Backends(slot, _) | What::Slots(slot) | What::Policy(slot) | What::ProveSet(slot) => {
                self.slot_trouble(*slot, trouble);
            }
            What::Free(_) => self.orphaned(Orphan::Backends),
            What::Locals => self.locals_trouble(trouble),
            What::ProveIntent(policy, attachment) => {
                if let Some(intent) = self.intent_mut(*policy, *attachment) {
                    intent.proof_trouble = Some(trouble);
                }
                self.dirty_attachment(*attachment);
            }
            What::DeleteIdentity(ifindex, token) => self.orphaned(Orphan::Identity(*ifindex, *token)),
        }
    }

    fn port_trouble(&mut self, ifindex: Ifindex, goal: Goal, trouble: Trouble) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let message = trouble.message.clone();
        let new = port.troubles.insert(goal, trouble).is_none();
        if goal.is_cleanup() && new {
            self.out.log.push(LogLine {
                level: Level::Warn,
                what: Happening::CleanupFailed(message.to_string()),
                policy: None,
                consumer: None,
                ifindex: Some(ifindex),
            });
        }
        self.dirty.ports.insert(ifindex);
        if goal == Goal::Attached {
            self.dirty_interface_of(ifindex);
            self.dirty_producers_of(ifindex);
        }
    }

    /// Whether no policy's timer looks after this goal.
    pub(crate) fn nobody_retries(&self, port: &Port, goal: Goal) -> bool {
        goal.is_cleanup()
            || port.attachments.iter().all(|id| {
                self.objects
                    .attachments
                    .get(id)
                    .is_none_or(|state| state.consumes.is_empty() && state.produces.is_empty())
            })
    }

    fn slot_trouble(&mut self, slot: SlotId, trouble: Trouble) {
        let Some(state) = self.slots.get_mut(&slot) else {
            return;
        };
        state.trouble = Some(trouble);
        match state.owner {
            Some(policy) => {
                self.dirty.policies.insert(policy);
            }
            None => {
                self.orphaned(Orphan::Slot(slot));
                self.dirty.slots.insert(slot);
            }
        }
    }

    /// The trouble of an interface that an intent on it cannot live with; the row first.
    pub(crate) fn worst_trouble(troubles: &std::collections::BTreeMap<Goal, Trouble>) -> Option<&Trouble> {
        troubles
            .iter()
            .find(|(goal, _)| goal.concerns_intents())
            .map(|(_, trouble)| trouble)
    }

    /// Takes an answer in.
    pub(crate) fn answered(&mut self, op: OpId, result: OpResult) {
        let Some(flight) = self.flights.remove(&op) else {
            return;
        };
        self.unsilenced.remove(&op);
        self.stir(&flight.what);
        if let Some(ifindex) = flight.what.ifindex() {
            self.port_answered(op, ifindex, flight, result);
            return;
        }
        match flight.what {
            What::Backends(slot, ids) => self.backends_answered(op, slot, &ids, result),
            What::Slots(slot) => self.slots_answered(op, slot, result),
            What::Policy(slot) => self.selector_answered(op, slot, result),
            What::ProveSet(slot) => self.set_proof_answered(op, slot, flight.device, result),
            What::Free(ids) => self.free_answered(ids, result),
            What::Locals => self.locals_answered(op, result),
            What::ProveIntent(policy, attachment) => {
                self.proof_answered(op, policy, attachment, flight.device, flight.sent, result);
            }
            What::DeleteIdentity(ifindex, token) => match result {
                Ok(_) | Err(OpError::NoDevice) => {
                    self.settled_orphan(Orphan::Identity(ifindex, token));
                    self.identity_deleted(ifindex);
                }
                Err(_) => self.identity_not_deleted(ifindex, token),
            },
            _ => {}
        }
    }

    fn port_answered(&mut self, op: OpId, ifindex: Ifindex, flight: Flight, result: OpResult) {
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        self.dirty.ports.insert(ifindex);
        // A late answer counts only if the device is still the one that it was sent for.
        let same = port.is_of_this_device(op);
        match (&flight.what, &result) {
            (What::Attach(_), Ok(_)) if same => {
                port.program.done(op);
                port.troubles.remove(&Goal::Attached);
                self.denied.remove(&ifindex);
            }
            (What::Attach(_), _) => port.program.failed(op),
            // What is gone is detached.
            (What::Detach(_), Ok(_) | Err(OpError::NoDevice)) => {
                port.program.done(op);
                port.troubles.remove(&Goal::Detached);
            }
            (What::Detach(_), Err(_)) => port.program.failed(op),
            (What::Clear { .. }, Ok(_) | Err(OpError::NoDevice)) => {
                port.clearing = None;
                port.cleared(op);
                port.forget_content();
            }
            (What::Clear { .. }, Err(_)) => {
                port.clearing = None;
                port.clear_failed(op);
            }
            (
                What::Row {
                    goal,
                    opening,
                    revoked,
                    ..
                },
                Ok(_),
            ) if same => {
                port.row.done(op);
                port.covered = port.covered.max(*revoked);
                port.troubles.remove(goal);
                if *opening && let Some(since) = port.ready_since.take() {
                    self.out
                        .measured
                        .push((Leg::ReadyToProgrammed, self.now.boot.since(since)));
                }
            }
            (What::Row { .. }, _) => port.row.failed(op),
            (What::Sources(_), Ok(_)) if same => {
                port.sources.done(op);
                port.troubles.remove(&Goal::Sources);
            }
            (What::Sources(_), _) => port.sources.failed(op),
            (What::Entries { keys, .. } | What::Revoke { keys, .. } | What::Delete { keys, .. }, Ok(_))
                if same =>
            {
                port.keys_done(op, keys);
                port.revoking.remove(&op);
            }
            (What::Entries { keys, .. } | What::Revoke { keys, .. } | What::Delete { keys, .. }, _) => {
                port.keys_failed(op, keys);
                port.revoking.remove(&op);
            }
            _ => {}
        }
        if matches!(flight.what, What::Attach(_)) {
            // Whether the device is ready as a producer hangs on it.
            self.dirty_interface_of(ifindex);
        }
        match (flight.what, result) {
            (
                What::Entries {
                    policy,
                    attachment,
                    keys,
                    fallback,
                    ..
                },
                result,
            ) if same => {
                self.entries_answered((policy, attachment), &keys, fallback, result);
            }
            (What::Delete { removed, .. }, Ok(OpDone { .. })) => {
                self.port_goal_met(ifindex, Goal::Unclaimed);
                self.say_removed(ifindex, removed);
            }
            (What::Clear { removed, .. }, Ok(OpDone { .. })) => self.say_removed(ifindex, removed),
            (What::Revoke { .. }, Ok(_)) => self.port_goal_met(ifindex, Goal::Unclaimed),
            (What::Attach(_), Err(OpError::NoDevice)) => self.no_device(op, flight.device),
            (What::Attach(ifindex), Err(error)) if same => {
                let mut trouble = Trouble::of(&error, FailReason::AttachFailed);
                trouble.message =
                    format!("{error}; the traffic of this interface takes the default path").into();
                self.port_trouble(ifindex, Goal::Attached, trouble);
            }
            (What::Detach(_) | What::Clear { .. }, Err(OpError::NoDevice)) => {}
            (what, Err(error)) => self.troubled_by(&what, Trouble::of(&error, FailReason::MapWriteFailed)),
            _ => {}
        }
    }

    fn say_removed(&mut self, ifindex: Ifindex, removed: Vec<Removed>) {
        for Removed { slot, consumer, keys } in removed {
            let Some(slot) = self.slots.get_mut(&slot) else {
                continue;
            };
            let policy = slot.of.clone();
            if slot.policy_gone || policy.is_none() {
                // One line for all consumers, when the last of it has gone. (Without a name: it went before this
                // life began.)
                slot.removed += keys;
                continue;
            }
            self.out.log.push(LogLine {
                level: Level::Info,
                what: Happening::Removed(keys),
                policy,
                consumer,
                ifindex: Some(ifindex),
            });
        }
    }

    fn port_goal_met(&mut self, ifindex: Ifindex, goal: Goal) {
        if let Some(port) = self.ports.get_mut(&ifindex) {
            port.troubles.remove(&goal);
        }
    }

    /// The kernel says that a device is gone: a fact about links, whatever the operation was.
    pub(crate) fn no_device(&mut self, op: OpId, device: Option<Device>) {
        let Some(device) = device else {
            return;
        };
        let present = self
            .ports
            .get(&device.ifindex)
            .is_some_and(|port| port.is_of_this_device(op));
        if present {
            self.denied.insert(device.ifindex, device);
            self.link_lost(device.ifindex, false);
        }
        // What is told before it is answered may be older, also in a later batch.
        self.ask(BTreeSet::from([device.ifindex]));
    }

    /// Something that belongs to nobody failed, and is tried again by the timer of orphans.
    pub(crate) fn orphaned(&mut self, orphan: Orphan) {
        self.orphans.insert(orphan);
        if self.orphan_recheck.is_none() {
            let recheck = crate::backoff::Backoff::begin(self.now.boot);
            self.orphan_recheck = Some(recheck);
            self.timer(Timer::Orphans, Some(recheck.due()));
        }
    }

    /// It was carried out after all.
    pub(crate) fn settled_orphan(&mut self, orphan: Orphan) {
        self.orphans.remove(&orphan);
        if self.orphans.is_empty() {
            self.orphan_recheck = None;
            self.timer(Timer::Orphans, None);
        }
    }
}
