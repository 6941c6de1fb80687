//! One intent: a policy for one consumer. Its state, and everything that a change of state brings with it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::engine::{Engine, Timer};
use crate::gate::Gate;
use crate::model::{
    Boot, FailReason, Happening, HoldReason, Level, LogLine, Mac, Now, OpId, Remembered, RouteKey, State,
    Token,
};
use crate::objects::{AttachmentId, PolicyId, PolicyState};
use crate::plan::Trouble;
use crate::since::{Entries, Mark};

/// Tells sets of destinations apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn of(keys: &[RouteKey]) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut take = |bytes: &[u8]| {
            for byte in bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        for key in keys {
            match key.address() {
                IpAddr::V4(address) => take(&address.octets()),
                IpAddr::V6(address) => take(&address.octets()),
            }
            match key {
                RouteKey::Service { protocol, port, .. } => {
                    take(&port.to_be_bytes());
                    take(&[protocol.number(), u8::from(key.address().is_ipv6())]);
                }
                // No protocol has number 0.
                RouteKey::Prefix { length, .. } => {
                    take(&[0, *length, 0, u8::from(key.address().is_ipv6())]);
                }
            }
        }
        Self(hash)
    }
}

/// What the kernel was asked about an intent, and what it said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Proof {
    /// Nothing.
    #[default]
    None,
    /// The question is out: for this incarnation, about these destinations.
    Asked(OpId, Token, Fingerprint),
    /// It gives the verdict that the intent wants, as of this operation.
    Good(OpId, Token, Fingerprint),
}

/// One intent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Intent {
    pub(crate) state: State,
    /// Start of the present state and reason.
    pub(crate) since: Now,
    /// Start of the hold. It outlasts Pending: what becomes ready and is held again before anything
    /// was delivered was held all the time.
    pub(crate) hold: Option<Now>,
    /// Its last reason.
    hold_reason: Option<HoldReason>,
    pub(crate) message: Option<Box<str>>,
    /// What an earlier life knew, until the intent is judged for the first time.
    pub(crate) memory: Option<Box<Remembered>>,
    pub(crate) proof: Proof,
    /// A question that is out although the proof is good: whether it still is.
    pub(crate) asked_again: Option<OpId>,
    /// The last operation on its entries that was not an opening on the strength of a proof.
    pub(crate) touched: OpId,
    /// The incarnation for which a proof has let it go live. Its open entries may stay open for that one.
    pub(crate) vetted: Option<(Mac, Token)>,
    /// The selector has led to exactly what its policy wanted while it had the right to it: of that set it keeps
    /// what it reached while the next one is not there.
    pub(crate) entitled: bool,
    /// Its entries could not be written.
    pub(crate) entries_trouble: Option<Trouble>,
    /// 1: its entries are kept closed because a write of them failed; 2: those that may be there are deleted.
    pub(crate) fallback: u8,
    /// The kernel said something else.
    pub(crate) proof_trouble: Option<Trouble>,
    /// Something that it uses failed and is tried again, whatever its state says.
    pub(crate) hindered: bool,
    /// The registered token when it was last judged.
    pub(crate) token: Option<Token>,
    #[serde(skip)]
    pub(crate) entries: Mark<Entries>,
}

/// Whether producers are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Producers<'a> {
    /// At least one that is not the consumer itself.
    Ready,
    /// None, or none for one family of the destinations; for people, unless no producer is ready at all.
    Missing(Option<&'a str>),
    /// None, and a switch to them waits; the old set goes on serving (or was cut off at the deadline).
    Awaited {
        /// The old set still serves.
        serving: bool,
    },
}

/// Everything that decides the state of one intent.
#[derive(Clone, Debug)]
pub(crate) struct Facts<'a> {
    /// The policy (or this pair) is refused: reason and message.
    pub(crate) refused: Option<(FailReason, &'a str)>,
    /// Another object has the right.
    pub(crate) conflict: Option<&'a str>,
    /// The start barrier has passed.
    pub(crate) passed: bool,
    /// Something that it uses could not be done.
    pub(crate) trouble: Option<&'a Trouble>,
    /// Link and identity.
    pub(crate) gate: &'a Gate,
    /// Answers cannot be delivered to the consumer.
    pub(crate) unreachable: Option<&'a str>,
    /// The identity of a producer could not be read, and never was.
    pub(crate) unreadable: Option<&'a str>,
    /// Producers.
    pub(crate) producers: Producers<'a>,
    /// Everything is in the kernel, answered and proven.
    pub(crate) done: bool,
}

/// The state that the facts give. This is the one place that decides it.
pub(crate) fn judge(before: State, facts: &Facts<'_>) -> (State, Option<String>) {
    let failed = |reason, message: &str| (State::Failed(reason), Some(message.to_owned()));
    match facts {
        Facts {
            refused: Some((reason, message)),
            ..
        } => failed(*reason, message),
        Facts {
            conflict: Some(message),
            ..
        } => failed(FailReason::Conflict, message),
        Facts { passed: false, .. } => (State::Pending, Some("the start is not complete".to_owned())),
        Facts {
            trouble: Some(trouble),
            ..
        } => failed(trouble.reason, &trouble.message),
        Facts {
            gate: Gate::Unreadable(error),
            ..
        } => failed(FailReason::RegistryUnreadable, error),
        Facts {
            unreadable: Some(error),
            ..
        } => failed(FailReason::RegistryUnreadable, error),
        Facts {
            gate: Gate::Held(reason),
            ..
        } => (State::Held(*reason), None),
        // Not read yet is no news for an intent that is held.
        Facts {
            gate: Gate::Unread, ..
        } => match before {
            State::Held(_) => (before, None),
            State::Pending | State::Programmed | State::Failed(_) => (State::Pending, None),
        },
        Facts {
            gate: Gate::Ready(_),
            unreachable: Some(message),
            ..
        } => failed(FailReason::Unsupported, message),
        Facts {
            gate: Gate::Ready(_),
            producers: Producers::Missing(why),
            ..
        } => (
            State::Held(HoldReason::NoReadyProducer),
            Some(why.map_or_else(|| "no selected producer is ready".to_owned(), str::to_owned)),
        ),
        Facts {
            gate: Gate::Ready(_),
            producers: Producers::Awaited { serving },
            ..
        } => (
            State::Held(HoldReason::NoReadyProducer),
            Some(
                if *serving {
                    "the switch waits for a ready producer; the old set goes on serving"
                } else {
                    "a switch waits for a ready producer; nothing of the old set serves any more"
                }
                .to_owned(),
            ),
        ),
        Facts {
            gate: Gate::Ready(_),
            producers: Producers::Ready,
            done: false,
            ..
        } => (State::Pending, None),
        Facts {
            gate: Gate::Ready(_),
            producers: Producers::Ready,
            done: true,
            ..
        } => (State::Programmed, None),
    }
}

/// Worst first.
pub(crate) const fn rank(state: State) -> u8 {
    match state {
        State::Failed(_) => 0,
        State::Held(_) => 1,
        State::Pending => 2,
        State::Programmed => 3,
    }
}

/// Whether trying again without any news can help.
pub(crate) const fn retriable(reason: FailReason) -> bool {
    match reason {
        FailReason::AttachFailed
        | FailReason::MapWriteFailed
        | FailReason::MapFull
        | FailReason::ProofFailed
        | FailReason::RegistryUnreadable => true,
        FailReason::Conflict | FailReason::Invalid | FailReason::Unsupported => false,
    }
}

impl Intent {
    /// The proof that is out.
    fn asked(&self) -> Option<OpId> {
        match self.proof {
            Proof::Asked(op, ..) => Some(op),
            Proof::None | Proof::Good(..) => self.asked_again,
        }
    }

    fn new(now: Now, memory: Option<Remembered>) -> Self {
        Self {
            state: State::Pending,
            since: now,
            hold: None,
            hold_reason: None,
            message: None,
            memory: memory.map(Box::new),
            proof: Proof::None,
            asked_again: None,
            touched: OpId(0),
            vetted: None,
            entitled: false,
            entries_trouble: None,
            fallback: 0,
            proof_trouble: None,
            hindered: false,
            token: None,
            entries: Mark::default(),
        }
    }

    /// Whether it is held or failed.
    pub(crate) const fn is_worst(&self) -> bool {
        rank(self.state) < rank(State::Pending)
    }

    /// Whether something about it alone failed.
    pub(crate) const fn has_trouble(&self) -> bool {
        self.entries_trouble.is_some() || self.proof_trouble.is_some()
    }

    /// Start of the hold, if it is held.
    pub(crate) fn held_since(&self) -> Option<Now> {
        match self.state {
            State::Held(_) => self.hold,
            State::Pending | State::Programmed | State::Failed(_) => None,
        }
    }
}

impl Engine {
    pub(crate) fn intent_mut(&mut self, policy: PolicyId, attachment: AttachmentId) -> Option<&mut Intent> {
        self.objects
            .policies
            .get_mut(&policy)?
            .intents
            .get_mut(&attachment)
    }

    pub(crate) fn intent(&self, policy: PolicyId, attachment: AttachmentId) -> Option<&Intent> {
        self.objects.policies.get(&policy)?.intents.get(&attachment)
    }

    /// A policy selects a consumer.
    pub(crate) fn intent_begins(&mut self, policy: PolicyId, attachment: AttachmentId) {
        let now = self.now;
        let Some(consumer) = self.objects.attachments.get(&attachment) else {
            return;
        };
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let memory = self
            .memory
            .remove(&(state.object.uid.clone(), consumer.object.uid.clone()));
        let intent = Intent::new(now, memory);
        state
            .order
            .insert((rank(intent.state), intent.since.boot, attachment));
        state.intents.insert(attachment, intent);
        state.counts.pending += 1;
        self.summary.intents.pending += 1;
        self.dirty.touched.insert(policy);
        self.dirty.policies.insert(policy);
    }

    /// What an intent has asked is out on, whoever comes in its place.
    pub(crate) fn leave_proof(&mut self, policy: PolicyId, attachment: AttachmentId) {
        let asked = self.intent(policy, attachment).and_then(Intent::asked);
        if let Some(op) = asked
            && let Some(device) = self.flights.get(&op).and_then(|flight| flight.device)
        {
            self.proofs_left.insert((device.ifindex, policy), op);
        }
    }

    /// A policy no longer selects a consumer.
    pub(crate) fn intent_ends(&mut self, policy: PolicyId, attachment: AttachmentId) {
        self.leave_proof(policy, attachment);
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        if let Some(intent) = state.intents.remove(&attachment) {
            state
                .order
                .remove(&(rank(intent.state), intent.since.boot, attachment));
            if let (State::Held(_), Some(hold)) = (intent.state, intent.hold) {
                state.holds.remove(&(hold.boot, attachment));
            }
            if let Some(memory) = intent.memory {
                // Lists that come in pieces deselect for a moment whom they select in the end.
                let uids = (memory.policy.clone(), memory.attachment.clone());
                self.memory.insert(uids, *memory);
            }
            *state_count(&mut state.counts, intent.state) -= 1;
            *state_count(&mut self.summary.intents, intent.state) -= 1;
            match intent.state {
                State::Held(reason) => *self.summary.held.entry(reason).or_default() -= 1,
                State::Failed(reason) => *self.summary.failed.entry(reason).or_default() -= 1,
                State::Pending | State::Programmed => {}
            }
        }
        state.full.remove(&attachment);
        self.dirty.touched.insert(policy);
        self.dirty.policies.insert(policy);
    }

    /// Records whether something that an intent uses is to be tried again. Where its state does not say so, as of one
    /// that is refused, the schedule begins with it.
    pub(crate) fn set_hindered(&mut self, policy: PolicyId, attachment: AttachmentId, hindered: bool) {
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let Some(intent) = state.intents.get_mut(&attachment) else {
            return;
        };
        let before = std::mem::replace(&mut intent.hindered, hindered);
        if before == hindered {
            return;
        }
        if hindered && !matches!(intent.state, State::Failed(reason) if retriable(reason)) {
            state.recheck = Some(Backoff::begin(self.now.boot));
        }
        self.dirty.touched.insert(policy);
    }

    /// Records the state of an intent.
    pub(crate) fn set_state(
        &mut self,
        policy: PolicyId,
        attachment: AttachmentId,
        (new, message): (State, Option<String>),
        token: Option<Token>,
    ) {
        let now = self.now;
        let ifindex = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port);
        let consumer = self
            .objects
            .attachments
            .get(&attachment)
            .map(|s| s.object.name.clone());
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let Some(intent) = state.intents.get_mut(&attachment) else {
            return;
        };
        intent.token = token;
        let message = message.map(String::into_boxed_str);
        if intent.message != message {
            intent.message = message;
            self.dirty.touched.insert(policy);
        }
        let old = intent.state;
        if old == new {
            return;
        }
        self.dirty.touched.insert(policy);
        let old_since = intent.since;
        let old_hold = intent.held_since();
        let hold_before = intent.hold;
        let mut reason_before = intent.hold_reason;
        intent.state = new;
        intent.since = now;
        // The first judgement of this life continues what the earlier one knew.
        let memory = match new {
            State::Pending => None,
            State::Programmed | State::Held(_) | State::Failed(_) => intent.memory.take(),
        };
        if let Some(memory) = memory.filter(|memory| memory.token == token) {
            if memory.state == new {
                intent.since = start_of(now, memory.since);
            }
            if let (State::Held(_), Some(hold)) = (new, memory.held_since) {
                intent.hold = Some(start_of(now, hold));
                if let State::Held(reason) = memory.state {
                    reason_before = Some(reason);
                }
            }
        }
        let mut begins = false;
        match new {
            State::Held(reason) => {
                if intent.hold.is_none() {
                    intent.hold = Some(now);
                    begins = true;
                }
                intent.hold_reason = Some(reason);
            }
            State::Programmed | State::Failed(_) => {
                intent.hold = None;
                intent.hold_reason = None;
            }
            State::Pending => {}
        }
        let (since, hold) = (intent.since, intent.held_since());
        state.order.remove(&(rank(old), old_since.boot, attachment));
        state.order.insert((rank(new), since.boot, attachment));
        if let Some(hold) = old_hold {
            state.holds.remove(&(hold.boot, attachment));
        }
        if let Some(hold) = hold {
            state.holds.insert((hold.boot, attachment));
        }
        *state_count(&mut state.counts, old) -= 1;
        *state_count(&mut state.counts, new) += 1;
        *state_count(&mut self.summary.intents, old) -= 1;
        *state_count(&mut self.summary.intents, new) += 1;
        match old {
            State::Held(reason) => *self.summary.held.entry(reason).or_default() -= 1,
            State::Failed(reason) => *self.summary.failed.entry(reason).or_default() -= 1,
            State::Pending | State::Programmed => {}
        }
        match new {
            State::Held(reason) => *self.summary.held.entry(reason).or_default() += 1,
            State::Failed(reason) => *self.summary.failed.entry(reason).or_default() += 1,
            State::Pending | State::Programmed => {}
        }
        // The schedule begins anew with a hold, with a wait for an identity, and with a failure.
        let anew = match new {
            State::Held(HoldReason::IdentityMissing) => true,
            State::Held(_) => begins,
            State::Failed(reason) => {
                retriable(reason) && !matches!(old, State::Failed(was) if retriable(was))
            }
            State::Pending | State::Programmed => false,
        };
        let name = state.object.name.clone();
        if anew {
            state.recheck = Some(Backoff::begin(now.boot));
        }
        let recheck = state.recheck.map(Backoff::due);
        if begins && let State::Held(reason) = new {
            *self.summary.holds_begun.entry(reason).or_default() += 1;
        }
        let message = intent_message(state, attachment);
        let what = match (old, new) {
            (_, State::Held(reason)) if begins => Some((Level::Info, Happening::HoldStarted(reason))),
            (_, State::Held(reason)) if reason_before.is_some_and(|before| before != reason) => {
                Some((Level::Info, Happening::HoldChanged(reason)))
            }
            // Held again before anything was delivered, or held all the time since an earlier life.
            (_, State::Held(_)) => None,
            (_, State::Failed(reason)) => Some((Level::Warn, Happening::Failed(reason, message))),
            (_, State::Programmed) if hold_before.is_some() => {
                let held_for = hold_before.map_or(0, |hold| now.boot.since(hold.boot));
                Some((Level::Info, Happening::HoldEnded(held_for, new)))
            }
            (State::Failed(_), State::Pending | State::Programmed) => {
                Some((Level::Info, Happening::Recovered))
            }
            (_, State::Programmed) => Some((Level::Info, Happening::Programmed)),
            (_, State::Pending) => None,
        };
        if anew {
            self.timer(Timer::Recheck(policy), recheck);
        }
        if let Some((level, what)) = what {
            self.out.log.push(LogLine {
                level,
                what,
                policy: Some(name),
                consumer,
                ifindex,
            });
        }
    }
}

/// A moment that an earlier life took. The boot clock may have started anew since.
fn start_of(now: Now, then: Now) -> Now {
    if then.boot <= now.boot {
        return then;
    }
    let age_ms = now.wall_ms.saturating_sub(then.wall_ms).max(0);
    let age = u64::try_from(age_ms).unwrap_or(0).saturating_mul(Boot::MILLI);
    Now {
        boot: Boot(now.boot.0.saturating_sub(age)),
        wall_ms: then.wall_ms,
    }
}

fn intent_message(policy: &PolicyState, attachment: AttachmentId) -> String {
    policy
        .intents
        .get(&attachment)
        .and_then(|intent| intent.message.as_deref())
        .unwrap_or_default()
        .to_owned()
}

pub(crate) const fn state_count(counts: &mut crate::view::Counts, state: State) -> &mut u64 {
    match state {
        State::Pending => &mut counts.pending,
        State::Programmed => &mut counts.programmed,
        State::Held(_) => &mut counts.held,
        State::Failed(_) => &mut counts.failed,
    }
}
