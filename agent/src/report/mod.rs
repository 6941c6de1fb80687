//! What this node says about its policies.

pub mod file;
pub mod kube;
pub mod memory;
mod stamps;

use holdfast_engine::model::{State, Uid};
use holdfast_engine::view::{Counts, PolicyView};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use stamps::{Stamps, rfc3339};

/// One policy that selects a consumer here: an acknowledgment, or why there is none yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyReport {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid.
    #[schemars(with = "String")]
    pub uid: Uid,
    /// Generation that this is about.
    pub generation: u64,
    /// The object that it is a copy of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginReport>,
    /// Which attachments of this node, at which generations, went into it: 16 hex digits.
    pub covers: String,
    /// `Programmed`, `Held`, `Failed` or `Pending`.
    pub state: String,
    /// Its intents here.
    pub intents: IntentCounts,
    /// Start of the present state and reason, RFC 3339.
    pub since: String,
    /// Start of the oldest hold, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_since: Option<String>,
    /// What the kernel serves, if that is another generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving: Option<ServingReport>,
    /// Why it is held or has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// See [`PolicyReport::origin`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OriginReport {
    /// Uid.
    #[schemars(with = "String")]
    pub uid: Uid,
    /// Generation.
    pub generation: u64,
}

/// See [`PolicyReport::serving`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServingReport {
    /// Generation that the kernel serves.
    pub generation: u64,
    /// Since when, RFC 3339.
    pub since: String,
}

/// Intents of a policy by state: programmed + held + failed + pending = desired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct IntentCounts {
    /// All.
    pub desired: u64,
    /// In the kernel and proven.
    pub programmed: u64,
    /// Not ready.
    pub held: u64,
    /// Could not be done.
    pub failed: u64,
    /// Not answered yet.
    pub pending: u64,
}

impl From<Counts> for IntentCounts {
    fn from(counts: Counts) -> Self {
        Self {
            desired: counts.desired(),
            programmed: counts.programmed,
            held: counts.held,
            failed: counts.failed,
            pending: counts.pending,
        }
    }
}

impl PolicyReport {
    /// What is said of a policy.
    #[must_use]
    pub fn new(view: &PolicyView, stamps: &Stamps) -> Self {
        let (state, reason) = state_and_reason(view.state);
        Self {
            namespace: view.name.namespace.clone(),
            name: view.name.name.clone(),
            uid: view.uid.clone(),
            generation: view.generation,
            origin: view.origin.as_ref().map(|origin| OriginReport {
                uid: origin.uid.clone(),
                generation: origin.generation,
            }),
            covers: format!("{:016x}", view.covers),
            state: state.to_owned(),
            intents: view.intents.into(),
            since: stamps.rfc3339(view.since),
            held_since: view.held_since.map(|at| stamps.rfc3339(at)),
            serving: view.serving.map(|serving| ServingReport {
                generation: serving.generation,
                since: rfc3339(serving.since_ms),
            }),
            reason,
            message: view.message.clone(),
        }
    }
}

/// The state in one word, and its reason.
#[must_use]
pub fn state_and_reason(state: State) -> (&'static str, Option<String>) {
    match state {
        State::Pending => ("Pending", None),
        State::Programmed => ("Programmed", None),
        State::Held(reason) => ("Held", Some(reason.to_string())),
        State::Failed(reason) => ("Failed", Some(reason.to_string())),
    }
}
