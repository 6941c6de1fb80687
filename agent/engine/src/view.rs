//! What the engine knows, as the outside may see it: for metrics, reports, the local API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::model::{
    FailReason, HoldReason, Ifindex, Mac, Now, ObjectName, Origin, Remembered, State, Token, Uid,
};

/// A look at an [`Engine`]. Costs follow what is asked for.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    engine: &'a Engine,
}

impl<'a> View<'a> {
    pub(crate) const fn new(engine: &'a Engine) -> Self {
        Self { engine }
    }

    /// Totals, kept up to date with every change.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let _ = self.engine;
        Summary::default()
    }

    /// Every policy that selects a consumer here, by name.
    pub fn policies(&self) -> impl Iterator<Item = PolicyView> + use<'a> {
        std::iter::empty()
    }

    /// One policy; none if it selects no consumer here.
    #[must_use]
    pub fn policy(&self, _name: &ObjectName) -> Option<PolicyView> {
        None
    }

    /// The policies that are held, failed or behind, by name. Costs follow their number.
    pub fn troubled(&self) -> impl Iterator<Item = PolicyView> + use<'a> {
        std::iter::empty()
    }

    /// Every intent, by policy and consumer.
    pub fn intents(&self) -> impl Iterator<Item = IntentView> + use<'a> {
        std::iter::empty()
    }

    /// The intents of one policy, by consumer.
    pub fn intents_of(&self, _policy: &ObjectName) -> impl Iterator<Item = IntentView> + use<'a> {
        std::iter::empty()
    }

    /// Every attachment of this node, by name.
    pub fn attachments(&self) -> impl Iterator<Item = AttachmentView> + use<'a> {
        std::iter::empty()
    }

    /// Whether the engine is done with an interface after this token was registered (none: unregistered).
    #[must_use]
    pub fn settled(&self, _ifindex: Ifindex, _token: Option<Token>) -> Settled {
        Settled::Working
    }

    /// What the driver keeps over a restart, so that times survive it: give it back as [`crate::model::Event::Remembered`].
    #[must_use]
    pub fn remembered(&self) -> Vec<Remembered> {
        Vec::new()
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
