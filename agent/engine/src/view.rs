//! What the engine knows, as the outside may see it: for metrics, reports, the local API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::belief::Drift;
use crate::engine::Engine;
use crate::gate::{Gate, Known, classify, of_device};
use crate::intent::Intent;
use crate::model::{
    FailReason, HoldReason, Ifindex, Mac, Now, ObjectName, Origin, Remembered, SlotId, State, Token, Uid,
    UidHash,
};
use crate::objects::{AttachmentState, PolicyState};
use crate::plan::Goal;
use crate::ports::Port;
use crate::producers::SlotState;

/// A look at an [`Engine`]. Costs follow what is asked for.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> View<'a> {
    pub(crate) const fn new(engine: &'a Engine) -> Self {
        Self { engine }
    }

    /// Totals, kept up to date with every change.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.engine.summary.clone()
    }

    /// Whether the first pass over complete lists is done.
    #[must_use]
    pub fn settled_in(&self) -> bool {
        let summary = &self.engine.summary;
        summary.first_pass_done && summary.waiting_for.is_empty()
    }

    /// How many intents are on their way out: [`Counts::removing`] of the node.
    #[must_use]
    pub fn removing(&self) -> u64 {
        self.engine.summary.intents.removing
    }

    /// Policies that went in this life and of which the kernel still has entries, by the hash of their uid.
    pub fn leaving(&self) -> impl Iterator<Item = UidHash> + use<'a> {
        let gone = |slot: &&SlotState| slot.policy_gone && slot.removing > 0;
        self.engine.slots.values().filter(gone).map(SlotState::uid)
    }

    /// Every policy that selects a consumer here (or that was refused before anybody could know), by name.
    pub fn policies(&self) -> impl Iterator<Item = &'a PolicyView> + use<'a> {
        let objects = &self.engine.objects;
        objects
            .policy_names
            .values()
            .filter_map(|id| objects.policies.get(id)?.view.as_ref())
    }

    /// One policy; none if it selects no consumer here.
    #[must_use]
    pub fn policy(&self, name: &ObjectName) -> Option<PolicyView> {
        self.named(name).cloned()
    }

    fn named(&self, name: &ObjectName) -> Option<&'a PolicyView> {
        let objects = &self.engine.objects;
        let id = objects.policy_names.get(name)?;
        objects.policies.get(id)?.view.as_ref()
    }

    /// The policies that are held, failed or behind, by name. Costs follow their number.
    pub fn troubled(&self) -> impl Iterator<Item = &'a PolicyView> + use<'a> {
        let view = *self;
        self.engine
            .troubled
            .iter()
            .filter_map(move |name| view.named(name))
    }

    /// How many interfaces have somebody else's program before ours, as the last audit found.
    #[must_use]
    pub fn foreign_before(&self) -> u64 {
        let ports = self.engine.ports.values();
        ports.filter(|port| !port.foreign.is_empty()).count() as u64
    }

    /// Every intent, by policy and consumer.
    pub fn intents(&self) -> impl Iterator<Item = IntentView> + use<'a> {
        let view = *self;
        let objects = &self.engine.objects;
        objects
            .policy_names
            .values()
            .filter_map(|id| objects.policies.get(id))
            .flat_map(move |policy| view.intents_in(policy))
    }

    /// The intents of one policy, in the order in which its consumers came.
    pub fn intents_of(&self, policy: &ObjectName) -> impl Iterator<Item = IntentView> + use<'a> {
        let view = *self;
        let objects = &self.engine.objects;
        objects
            .policy_names
            .get(policy)
            .and_then(|id| objects.policies.get(id))
            .into_iter()
            .flat_map(move |policy| view.intents_in(policy))
    }

    fn intents_in(self, policy: &'a PolicyState) -> impl Iterator<Item = IntentView> + use<'a> {
        let attachments = &self.engine.objects.attachments;
        policy.intents.iter().filter_map(move |(id, intent)| {
            let consumer = attachments.get(id)?;
            Some(IntentView::of(policy, consumer, intent))
        })
    }

    /// Every attachment of this node, by name.
    pub fn attachments(&self) -> impl Iterator<Item = AttachmentView> + use<'a> {
        let engine = self.engine;
        engine
            .objects
            .attachment_names
            .values()
            .filter_map(|id| engine.objects.attachments.get(id))
            .map(move |state| {
                let port = state.port.and_then(|ifindex| engine.ports.get(&ifindex));
                let link = state.port.and_then(|ifindex| engine.interfaces.link(ifindex));
                let known = port.map_or(Known::Unread, |port| port.known.clone());
                let hold = match classify(link, &known, state.object.expected) {
                    Gate::Ready(_) => None,
                    Gate::Held(reason) => Some(reason),
                    Gate::Unread | Gate::Unreadable(_) => Some(HoldReason::IdentityMissing),
                };
                AttachmentView {
                    name: state.object.name.clone(),
                    uid: state.object.uid.clone(),
                    interface: state.object.interface.clone(),
                    ifindex: state.port,
                    mac: link.map(|link| link.mac),
                    hold,
                    attached: port.is_some_and(Port::has_program),
                    open: port.is_some_and(|port| port.open_for().is_some()),
                }
            })
    }

    /// Whether the engine is done with an interface after this token was registered (none: unregistered).
    ///
    /// Done means: the token has been read, the program is attached, nothing is out for the interface, and no
    /// intent that uses it, as a consumer or as a producer, is Pending.
    #[must_use]
    pub fn settled(&self, ifindex: Ifindex, token: Option<Token>) -> Settled {
        let engine = self.engine;
        if engine.is_asked(ifindex) || engine.unplanned() {
            return Settled::Working;
        }
        let (Some(port), Some(link)) = (engine.ports.get(&ifindex), engine.interfaces.link(ifindex)) else {
            return Settled::NotOurs;
        };
        if port.attachments.is_empty() {
            return Settled::NotOurs;
        }
        let Known::Row(row) = &port.known else {
            return Settled::Working;
        };
        let registered = of_device(link, row.as_ref()).map(|identity| identity.token);
        let attached = port.has_program() || port.troubles.contains_key(&Goal::Attached);
        if port.busy() || registered != token || !attached {
            return Settled::Working;
        }
        let pending = port
            .attachments
            .iter()
            .filter_map(|id| engine.objects.attachments.get(id).map(|state| (id, state)))
            .any(|(id, state)| {
                let consumes = state
                    .consumes
                    .iter()
                    .filter_map(|policy| engine.intent(*policy, *id))
                    .any(|intent| intent.state == State::Pending);
                let produces = state
                    .produces
                    .iter()
                    .filter_map(|policy| engine.objects.policies.get(policy))
                    .any(|policy| policy.counts.pending > 0);
                consumes || produces
            });
        if pending { Settled::Working } else { Settled::Done }
    }

    /// What the driver keeps over a restart, so that times survive it: give it back as
    /// [`crate::model::Event::Remembered`].
    #[must_use]
    pub fn remembered(&self) -> Vec<Remembered> {
        let objects = &self.engine.objects;
        let mut all = Vec::new();
        for policy in objects.policies.values() {
            for (id, intent) in &policy.intents {
                let Some(consumer) = objects.attachments.get(id) else {
                    continue;
                };
                if let Some(memory) = &intent.memory {
                    // Not judged in this life yet: what the earlier one knew still holds.
                    all.push(Remembered::clone(memory));
                } else if intent.state != State::Pending {
                    all.push(Remembered {
                        policy: policy.object.uid.clone(),
                        attachment: consumer.object.uid.clone(),
                        token: intent.token,
                        state: intent.state,
                        since: intent.since,
                        held_since: intent.held_since(),
                    });
                }
            }
        }
        all.extend(self.engine.memory.values().cloned());
        all
    }
}

/// What is reported of a policy.
pub(crate) fn policy_view(policy: &PolicyState, slots: &BTreeMap<SlotId, SlotState>) -> PolicyView {
    let worst = policy.order.first().and_then(|(_, _, id)| policy.intents.get(id));
    let slot = policy.slot.and_then(|slot| slots.get(&slot));
    let state = worst.map_or(State::Failed(FailReason::Invalid), |intent| intent.state);
    let (state, message) = match (worst, &policy.refused) {
        (None, Some((reason, message))) => (State::Failed(*reason), Some(message.clone())),
        _ => (
            state,
            worst
                .and_then(|intent| intent.message.as_deref())
                .map(str::to_owned),
        ),
    };
    let serving = policy
        .served
        .as_ref()
        .filter(|served| served.generation != policy.object.generation && slot.is_some_and(SlotState::serves))
        .map(|served| Serving {
            generation: served.generation,
            since_ms: served.since_ms,
        });
    let held_since = policy
        .holds
        .first()
        .and_then(|(_, id)| policy.intents.get(id))
        .and_then(Intent::held_since);
    PolicyView {
        name: policy.object.name.clone(),
        uid: policy.object.uid.clone(),
        generation: policy.object.generation,
        origin: policy.object.origin.clone(),
        covers: policy.covers,
        state,
        intents: Counts {
            removing: slot.map_or(0, |slot| slot.removing),
            ..policy.counts
        },
        since: worst.map_or(policy.seen, |intent| intent.since),
        held_since,
        serving,
        message,
        applied: policy.applied,
        proven: policy.proven,
        behind_since: policy.behind_since,
    }
}

/// Intents by state. pending + programmed + held + failed = desired; `removing` is outside that sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Ready, not everything answered and proven yet.
    pub pending: u64,
    /// In the kernel and proven.
    pub programmed: u64,
    /// Not ready.
    pub held: u64,
    /// Could not be done.
    pub failed: u64,
    /// On the way out: the kernel has not answered all deletes yet.
    pub removing: u64,
}

impl Counts {
    /// All intents that are desired.
    #[must_use]
    pub const fn desired(&self) -> u64 {
        self.pending + self.programmed + self.held + self.failed
    }
}

/// Totals over the node. Kept up to date with every change: reading it costs nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Intents by state.
    pub intents: Counts,
    /// Held intents by reason; every reason is there, also at 0.
    pub held: BTreeMap<HoldReason, u64>,
    /// Failed intents by reason; every reason is there, also at 0.
    pub failed: BTreeMap<FailReason, u64>,
    /// Holds begun since the start of this life, by first reason; every reason is there.
    pub holds_begun: BTreeMap<HoldReason, u64>,
    /// Policies known (also those without an intent here).
    pub policies: u64,
    /// Attachments of this node known.
    pub attachments: u64,
    /// What the start barrier still waits for; empty = passed.
    pub waiting_for: Vec<Barrier>,
    /// Whether the first pass is done: the barrier has passed and no intent has been Pending since at least once.
    pub first_pass_done: bool,
    /// What audits found otherwise than it was left, since the start of this life, by kind; every kind is there.
    pub drift: BTreeMap<Drift, u64>,
    /// The last audit that came to its end.
    pub audit: Option<LastAudit>,
}

/// An audit that came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastAudit {
    /// When.
    pub ended: Now,
    /// How long it took, nanoseconds.
    pub took: u64,
    /// How much it found otherwise than it was left.
    pub found: u64,
}

/// One thing that the start barrier waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Barrier {
    /// Read-back of the pins.
    Adoption,
    /// Complete lists from the source.
    Objects,
    /// A complete dump of the links.
    Links,
    /// A successful read of the registry row of every interface that an attachment names.
    Registry,
}

/// What flows while the kernel serves another generation than the policy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serving {
    /// Generation of the policy that the selected set serves.
    pub generation: u64,
    /// Since when, milliseconds since the Unix epoch.
    pub since_ms: i64,
}

/// One policy that selects a consumer here (or that was refused before anybody could know).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyView {
    /// Name.
    pub name: ObjectName,
    /// Uid.
    pub uid: Uid,
    /// Generation that the source showed last.
    pub generation: u64,
    /// The object it is a copy of.
    pub origin: Option<Origin>,
    /// Sum modulo 2^64 over the attachments of this node that it selects.
    pub covers: u64,
    /// State by precedence Failed > Held > Pending > Programmed.
    pub state: State,
    /// Its intents.
    pub intents: Counts,
    /// Start of the present (state, reason).
    pub since: Now,
    /// Start of its oldest hold.
    pub held_since: Option<Now>,
    /// Set when the kernel serves another generation than `generation`.
    pub serving: Option<Serving>,
    /// For people: what is wrong with the oldest intent of the worst state.
    pub message: Option<String>,
    /// Highest generation of which every intent was tried and answered.
    pub applied: u64,
    /// Highest generation at which the policy was Programmed.
    pub proven: u64,
    /// The oldest moment that is not served yet; none when current, and when held or failed at this generation.
    pub behind_since: Option<Now>,
}

/// One intent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntentView {
    /// Policy.
    pub policy: ObjectName,
    /// Uid of the policy.
    pub policy_uid: Uid,
    /// Consumer.
    pub consumer: ObjectName,
    /// Uid of the consumer's attachment.
    pub consumer_uid: Uid,
    /// Interface name of the consumer.
    pub interface: String,
    /// Its device, if it is there.
    pub ifindex: Option<Ifindex>,
    /// The registered token, if known.
    pub token: Option<Token>,
    /// State.
    pub state: State,
    /// Start of the present (state, reason).
    pub since: Now,
    /// Start of the hold, whatever reasons it passed through.
    pub held_since: Option<Now>,
    /// For people.
    pub message: Option<String>,
}

impl IntentView {
    pub(crate) fn of(policy: &PolicyState, consumer: &AttachmentState, intent: &Intent) -> Self {
        Self {
            policy: policy.object.name.clone(),
            policy_uid: policy.object.uid.clone(),
            consumer: consumer.object.name.clone(),
            consumer_uid: consumer.object.uid.clone(),
            interface: consumer.object.interface.clone(),
            ifindex: consumer.port,
            token: intent.token,
            state: intent.state,
            since: intent.since,
            held_since: intent.held_since(),
            message: intent.message.as_deref().map(str::to_owned),
        }
    }
}

/// One attachment of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentView {
    /// Name.
    pub name: ObjectName,
    /// Uid.
    pub uid: Uid,
    /// Interface name.
    pub interface: String,
    /// Its device, if it is there.
    pub ifindex: Option<Ifindex>,
    /// The device's MAC.
    pub mac: Option<Mac>,
    /// Why it is not ready; none = ready (link and identity; attaching is not part of it).
    pub hold: Option<HoldReason>,
    /// Whether the kernel has answered that the program is attached.
    pub attached: bool,
    /// Whether its consumer row is open, as the kernel answered.
    pub open: bool,
}

/// Whether the engine is done with an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Settled {
    /// No attachment of this node names it: there is nothing to do.
    NotOurs,
    /// Something is planned or not answered.
    Working,
    /// This token has been taken in, the program is attached, and every intent that uses the interface is
    /// Programmed, Held or Failed with nothing in flight.
    Done,
}
