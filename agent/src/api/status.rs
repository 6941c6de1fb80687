//! `RoutePolicy.status`: what the controller says of a policy over all nodes.

use holdfast_engine::model::Uid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema;
use crate::report::{IntentCounts, OriginReport};

/// Status of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RoutePolicyStatus {
    /// Generation that all of this was computed from.
    pub observed_generation: u64,
    /// The object that the policy is a copy of, as the conditions speak of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginReport>,
    /// `Accepted`, `Programmed`, and `Ready`, which mirrors `Programmed`.
    #[schemars(transform = schema::conditions)]
    pub conditions: Vec<Condition>,
    /// Nodes that have a consumer, by state.
    pub nodes: NodeCounts,
    /// Nodes that are programmed of those that should be, for people: `3/5`.
    pub programmed_nodes: String,
    /// Intents by state, over all these nodes.
    pub intents: IntentCounts,
    /// At most five nodes that are not programmed, worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = schema::atomic_list)]
    pub laggards: Vec<Laggard>,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Which.
    #[serde(rename = "type")]
    pub kind: ConditionKind,
    /// What it says.
    pub status: Truth,
    /// Generation that this was computed from. Without it, whoever waits for a condition would be content with the
    /// answer to an earlier question.
    pub observed_generation: u64,
    /// When `status` last changed, RFC 3339.
    pub last_transition_time: String,
    /// Why, in one word.
    pub reason: String,
    /// Why, for people.
    pub message: String,
}

/// See [`Condition::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ConditionKind {
    /// The object is well formed.
    Accepted,
    /// Every node that should serves exactly this generation.
    Programmed,
    /// The same, for tools that look only there.
    Ready,
}

/// See [`Condition::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Truth {
    /// Yes.
    True,
    /// No.
    False,
    /// Nobody can say.
    Unknown,
}

/// Nodes by state: programmed + held + failed + pending + unknown = desired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeCounts {
    /// All that have a consumer.
    pub desired: u64,
    /// Serve exactly this.
    pub programmed: u64,
    /// Have a consumer that is not ready, or no producer.
    pub held: u64,
    /// Cannot.
    pub failed: u64,
    /// Have not said yet.
    pub pending: u64,
    /// Are not heard of.
    pub unknown: u64,
}

/// A node that is not programmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Laggard {
    /// Its name.
    pub node: String,
    /// `Failed`, `Held`, `Pending` or `Unknown`.
    pub state: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The generation that it reported last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Since when, RFC 3339, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

impl RoutePolicyStatus {
    /// One of the conditions.
    #[must_use]
    pub fn condition(&self, kind: ConditionKind) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind)
    }
}

impl From<&holdfast_engine::model::Origin> for OriginReport {
    fn from(origin: &holdfast_engine::model::Origin) -> Self {
        Self {
            uid: Uid(origin.uid.0.clone()),
            generation: origin.generation,
        }
    }
}
