//! What goes over the local socket: the JSON of `holdfast status -o json` and of its siblings. Fields are added,
//! never renamed or removed within `/v1`.

use std::collections::BTreeMap;

use holdfast_engine::model::{FailReason, HoldReason, Now, ObjectName};
use holdfast_engine::view::{AttachmentView, IntentView, Settled, Summary};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::health;
use crate::driver::{PolicyStatus, Snapshot};
use crate::report::{IntentCounts, PolicyReport, Stamps, rfc3339, state_and_reason};
use crate::source::SourceProblem;

/// Answer of `GET /v1/status`: the node in a screen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Name of the node.
    pub node: String,
    /// Names the life of the pins.
    pub epoch: String,
    /// The agent.
    pub agent: Agent,
    /// Whether it is ready, and what is missing.
    pub ready: Ready,
    /// Where objects come from.
    pub source: Source,
    /// Intents by state.
    pub intents: NodeIntents,
    /// The last audit of the kernel that came to its end; none = there was none yet.
    #[serde(default)]
    pub audit: Option<Audit>,
    /// Every policy that selects a consumer here.
    pub policies: Vec<PolicyReport>,
    /// Every attachment of this node.
    pub attachments: Vec<Attachment>,
}

/// See [`Status::agent`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Agent {
    /// Its version.
    pub version: String,
    /// When it was started, RFC 3339.
    pub started: String,
    /// Its clock at the time of the answer, RFC 3339.
    pub now: String,
}

/// See [`Status::ready`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// The answer of `/readyz`.
    pub ready: bool,
    /// What is missing for it.
    pub missing: Vec<String>,
}

/// See [`Status::source`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// `dir` or `kube`.
    pub kind: String,
    /// Last proof of life, RFC 3339.
    pub last_activity: Option<String>,
    /// Until when the saved set was what the source has, RFC 3339; absent for a source that saves none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<String>,
    /// Objects in force by kind.
    pub objects: BTreeMap<String, u64>,
    /// Input that could not be used.
    pub problems: Vec<SourceProblem>,
}

/// See [`Status::intents`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeIntents {
    /// By state.
    #[serde(flatten)]
    pub counts: IntentCounts,
    /// On the way out; outside the sum.
    pub removing: u64,
    /// Held ones by reason.
    #[schemars(with = "BTreeMap<String, u64>")]
    pub held_by_reason: BTreeMap<HoldReason, u64>,
    /// Failed ones by reason.
    #[schemars(with = "BTreeMap<String, u64>")]
    pub failed_by_reason: BTreeMap<FailReason, u64>,
}

/// See [`Status::audit`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Audit {
    /// When it ended, RFC 3339.
    pub ended: String,
    /// How much it found otherwise than it was left.
    pub found: u64,
    /// What all audits of this agent found, by kind; kinds with nothing are left out.
    pub found_by_kind: BTreeMap<String, u64>,
}

/// One attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid.
    pub uid: String,
    /// Host-side interface.
    pub interface: String,
    /// Its number, if it is there.
    pub ifindex: Option<u32>,
    /// Its own hardware address.
    pub mac: Option<String>,
    /// Link and identity are there.
    pub ready: bool,
    /// Why not.
    #[schemars(with = "Option<String>")]
    pub reason: Option<HoldReason>,
    /// Whether the program is attached, as the kernel answered.
    pub attached: bool,
    /// Whether its consumer row is open, as the kernel answered.
    pub open: bool,
}

/// Answer of `GET /v1/policies/{namespace}/{name}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyDetail {
    /// As in the report.
    pub policy: PolicyReport,
    /// Its intents.
    pub intents: Vec<Intent>,
}

/// One intent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Intent {
    /// The consumer's attachment, `namespace/name`.
    pub consumer: String,
    /// Uid of it.
    pub consumer_uid: String,
    /// Its host-side interface.
    pub interface: String,
    /// Its number, if it is there.
    pub ifindex: Option<u32>,
    /// `Programmed`, `Held`, `Failed` or `Pending`.
    pub state: String,
    /// Why.
    pub reason: Option<String>,
    /// Start of the present state and reason, RFC 3339.
    pub since: String,
    /// Start of the hold, RFC 3339.
    pub held_since: Option<String>,
    /// For people.
    pub message: Option<String>,
}

/// Body of `POST /v1/poke`: the identity of this interface may have changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Poke {
    /// Which.
    pub ifindex: u32,
    /// The token that was registered, 16 hex digits; absent = unregistered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Whether the answer comes when the engine is done with the interface, or at once.
    #[serde(default = "yes")]
    pub wait: bool,
}

const fn yes() -> bool {
    true
}

/// Answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Poked {
    /// `Done`; `NotOurs` if no attachment of this node names the interface; `Working` if it was not waited for.
    pub settled: Settled,
}

/// Query of `GET /v1/why`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AskWhy {
    /// `namespace/name`.
    pub policy: String,
    /// Only this consumer, `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumer: Option<String>,
    /// Every consumer, also those that are programmed.
    #[serde(default)]
    pub all: bool,
}

/// Query of `GET /v1/diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AskDiff {
    /// Only this policy, `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Also what does not differ.
    #[serde(default)]
    pub all: bool,
}

/// Query of `GET /v1/wait`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Wait {
    /// `namespace/name`.
    pub policy: String,
    /// Only this consumer of it, `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<String>,
    /// What is waited for.
    #[serde(rename = "for")]
    pub goal: Goal,
    /// At this generation or a later one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// How long, milliseconds.
    pub timeout_ms: u64,
}

/// A state that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    /// Every intent is in the kernel and proven.
    Programmed,
    /// An intent is held, and none has failed.
    Held,
    /// An intent has failed.
    Failed,
    /// Not everything has been answered yet.
    Pending,
}

impl Goal {
    /// As [`PolicyReport::state`] spells it.
    #[must_use]
    pub const fn state(self) -> &'static str {
        match self {
            Self::Programmed => "Programmed",
            Self::Held => "Held",
            Self::Failed => "Failed",
            Self::Pending => "Pending",
        }
    }

    /// Whether a policy, or one consumer of it, is in this `state` at this generation.
    #[must_use]
    pub fn is_met(self, state: &str, generation: u64, least: Option<u64>) -> bool {
        state == self.state() && least.is_none_or(|least| generation >= least)
    }
}

/// Answer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Waited {
    /// Whether it came true in time.
    pub met: bool,
    /// The policy as it is now; none if it selects no consumer here.
    pub policy: Option<PolicyReport>,
    /// The consumer that was waited for, as it is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intent: Option<Intent>,
}

/// Body of `PUT /v1/log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SetLog {
    /// The filter that is to be in force; absent = the one that the agent was started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
}

/// Answer of `GET /v1/log`, and of `PUT /v1/log`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LogFilter {
    /// The filter that is in force.
    pub filter: String,
    /// The filter that the agent was started with, and starts with again.
    pub configured: String,
}

/// Body of every answer that is not 200.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// What is wrong.
    pub error: String,
}

impl Status {
    /// What is said of a node.
    #[must_use]
    pub fn new(snapshot: &Snapshot, stamps: &Stamps, started: Now, source: &str, version: &str) -> Self {
        let missing = health::missing(&snapshot.summary);
        let age_ms = |nanos: u64| i64::try_from(nanos / 1_000_000).unwrap_or(i64::MAX);
        Self {
            node: snapshot.node.clone(),
            epoch: snapshot.epoch.clone(),
            agent: Agent {
                version: version.to_owned(),
                started: stamps.rfc3339(started),
                now: rfc3339(snapshot.now_wall_ms),
            },
            ready: Ready {
                ready: missing.is_empty(),
                missing,
            },
            source: Source {
                kind: source.to_owned(),
                last_activity: snapshot
                    .source_age_ns
                    .map(|age| rfc3339(snapshot.now_wall_ms.saturating_sub(age_ms(age)))),
                saved: snapshot
                    .saved_age_ns
                    .map(|age| rfc3339(snapshot.now_wall_ms.saturating_sub(age_ms(age)))),
                objects: snapshot.source.objects.clone(),
                problems: snapshot.source.problems.clone(),
            },
            intents: NodeIntents::new(&snapshot.summary),
            audit: Audit::new(&snapshot.summary, stamps),
            policies: snapshot
                .policies
                .iter()
                .map(|policy| PolicyReport::new(policy, stamps))
                .collect(),
            attachments: snapshot.attachments.iter().map(Attachment::from).collect(),
        }
    }
}

impl NodeIntents {
    fn new(summary: &Summary) -> Self {
        Self {
            counts: summary.intents.into(),
            removing: summary.intents.removing,
            held_by_reason: HoldReason::ALL
                .into_iter()
                .map(|reason| (reason, summary.held.get(&reason).copied().unwrap_or(0)))
                .collect(),
            failed_by_reason: FailReason::ALL
                .into_iter()
                .map(|reason| (reason, summary.failed.get(&reason).copied().unwrap_or(0)))
                .collect(),
        }
    }
}

impl Audit {
    fn new(summary: &Summary, stamps: &Stamps) -> Option<Self> {
        let last = summary.audit?;
        let found = summary.drift.iter().filter(|(_, count)| **count > 0);
        Some(Self {
            ended: stamps.rfc3339(last.ended),
            found: last.found,
            found_by_kind: found
                .map(|(kind, count)| (kind.label().to_owned(), *count))
                .collect(),
        })
    }
}

impl From<&AttachmentView> for Attachment {
    fn from(view: &AttachmentView) -> Self {
        Self {
            namespace: view.name.namespace.clone(),
            name: view.name.name.clone(),
            uid: view.uid.to_string(),
            interface: view.interface.clone(),
            ifindex: view.ifindex,
            mac: view.mac.map(|mac| mac.to_string()),
            ready: view.hold.is_none(),
            reason: view.hold,
            attached: view.attached,
            open: view.open,
        }
    }
}

impl Waited {
    /// How far it is.
    #[must_use]
    pub fn new(
        found: Option<&PolicyStatus>,
        attachment: Option<&ObjectName>,
        wait: &Wait,
        stamps: &Stamps,
    ) -> Self {
        let policy = found.map(|found| PolicyReport::new(&found.policy, stamps));
        let of_consumer = |name: &ObjectName| found?.intents.iter().find(|intent| intent.consumer == *name);
        let intent = attachment
            .and_then(of_consumer)
            .map(|view| Intent::new(view, stamps));
        let state = match attachment {
            Some(_) => intent.as_ref().map(|intent| &intent.state),
            None => policy.as_ref().map(|policy| &policy.state),
        };
        let generation = policy.as_ref().map_or(0, |policy| policy.generation);
        Self {
            met: state.is_some_and(|state| wait.goal.is_met(state, generation, wait.generation)),
            policy,
            intent,
        }
    }
}

impl PolicyDetail {
    /// What is said of a policy and its intents.
    #[must_use]
    pub fn new(status: &PolicyStatus, stamps: &Stamps) -> Self {
        Self {
            policy: PolicyReport::new(&status.policy, stamps),
            intents: status
                .intents
                .iter()
                .map(|view| Intent::new(view, stamps))
                .collect(),
        }
    }
}

impl Intent {
    pub(super) fn new(view: &IntentView, stamps: &Stamps) -> Self {
        let (state, reason) = state_and_reason(view.state);
        Self {
            consumer: view.consumer.to_string(),
            consumer_uid: view.consumer_uid.to_string(),
            interface: view.interface.clone(),
            ifindex: view.ifindex,
            state: state.to_owned(),
            reason,
            since: stamps.rfc3339(view.since),
            held_since: view.held_since.map(|at| stamps.rfc3339(at)),
            message: view.message.clone(),
        }
    }
}
