//! What families there are: the one list that the collector encodes by and the documentation is written from.

use std::collections::BTreeSet;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, HoldReason, Leg};

use crate::api::v1alpha1::Kind;
use crate::controller::keeper::Watched;
use crate::loops;

/// One family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Name, as Prometheus knows it.
    pub name: &'static str,
    /// Type.
    pub kind: Type,
    /// What it means, with its unit; also its `HELP` line.
    pub help: &'static str,
    /// Its labels.
    pub labels: &'static [Label],
    /// When a series of it is absent; empty: never.
    pub absent: &'static str,
}

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Goes up and down.
    Gauge,
    /// Only goes up, from 0 at each start of the agent.
    Counter,
    /// Counts by upper bound, seconds.
    Histogram,
}

/// A label.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub values: Values,
}

/// Values of a label.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// Exactly these.
    Closed(fn() -> Vec<String>),
    /// Whatever there is.
    Open(&'static str),
}

/// States of intents, in the order in which they are exported.
pub(super) const STATES: [&str; 5] = ["pending", "programmed", "held", "failed", "removing"];
/// Legs that the engine measures.
pub(super) const LEGS: [(Leg, &str); 3] = [
    (Leg::SeenToProgrammed, "seen_to_programmed"),
    (Leg::ReadyToProgrammed, "ready_to_programmed"),
    (Leg::WrittenToProven, "written_to_proven"),
];
/// The leg that the source measures.
pub(super) const ORIGIN_TO_SEEN: &str = "origin_to_seen";
pub(super) const WRITE_RESULTS: [&str; 2] = ["ok", "error"];
pub(super) const PROOF_RESULTS: [&str; 2] = ["ok", "failed"];

const STATE: Label = closed("state", || owned(STATES));
const NAMESPACE: Label = open("namespace", "the policy's");
const POLICY: Label = open("policy", "its name");
const MAP: Label = open("map", "a map of the data plane, by the name of its pin");
const HOLD_REASON: Label = closed("reason", || owned(HoldReason::ALL));
const LOOP: Label = closed("loop", || owned(loops::NAMES));

const TROUBLED: &str = "for a policy that is not held, failed or behind, unless `--policy-metrics all`";

const fn closed(name: &'static str, values: fn() -> Vec<String>) -> Label {
    let values = Values::Closed(values);
    Label { name, values }
}

const fn open(name: &'static str, what: &'static str) -> Label {
    let values = Values::Open(what);
    Label { name, values }
}

fn owned<T: ToString>(values: impl IntoIterator<Item = T>) -> Vec<String> {
    values.into_iter().map(|value| value.to_string()).collect()
}

/// Each once, although several verdicts share one.
fn distinct(label: fn(Verdict) -> &'static str) -> Vec<String> {
    let labels: BTreeSet<&str> = Verdict::ALL.into_iter().map(label).collect();
    owned(labels)
}

const fn gauge(name: &'static str, help: &'static str, labels: &'static [Label]) -> Family {
    family(name, Type::Gauge, help, labels)
}

const fn counter(name: &'static str, help: &'static str, labels: &'static [Label]) -> Family {
    family(name, Type::Counter, help, labels)
}

const fn histogram(name: &'static str, help: &'static str, labels: &'static [Label]) -> Family {
    family(name, Type::Histogram, help, labels)
}

const fn family(name: &'static str, kind: Type, help: &'static str, labels: &'static [Label]) -> Family {
    Family {
        name,
        kind,
        help,
        labels,
        absent: "",
    }
}

impl Family {
    const fn absent(self, absent: &'static str) -> Self {
        Self { absent, ..self }
    }
}

pub(super) const INTENTS: Family = gauge(
    "holdfast_intents",
    "Intents on this node by state: one policy and one consumer each.",
    &[STATE],
);
pub(super) const HELD_INTENTS: Family = gauge(
    "holdfast_held_intents",
    "Intents held on this node by reason.",
    &[HOLD_REASON],
);
pub(super) const FAILED_INTENTS: Family = gauge(
    "holdfast_failed_intents",
    "Intents failed on this node by reason.",
    &[closed("reason", || owned(FailReason::ALL))],
);
pub(super) const HOLDS: Family = counter(
    "holdfast_holds_total",
    "Holds begun since the agent started, by their first reason.",
    &[HOLD_REASON],
);
pub(super) const POLICY_INTENTS: Family = gauge(
    "holdfast_policy_intents",
    "Intents of a policy on this node by state.",
    &[NAMESPACE, POLICY, STATE],
)
.absent(TROUBLED);
pub(super) const POLICY_GENERATION: Family = gauge(
    "holdfast_policy_generation",
    "Highest generation of a policy that was seen, tried on every intent, proven.",
    &[
        NAMESPACE,
        POLICY,
        closed("stage", || owned(["seen", "applied", "proven"])),
    ],
)
.absent(TROUBLED);
pub(super) const POLICY_HOLD_START: Family = gauge(
    "holdfast_policy_hold_start_timestamp_seconds",
    "Start of the oldest hold of a policy, by the node's clock; a restart does not move it.",
    &[NAMESPACE, POLICY],
)
.absent("while nothing of the policy is held");
pub(super) const POLICY_BEHIND_SINCE: Family = gauge(
    "holdfast_policy_behind_since_timestamp_seconds",
    "The oldest moment of a policy that is not served yet, by the node's clock. What is held or failed at its present \
     generation is not behind.",
    &[NAMESPACE, POLICY],
)
.absent("while the policy is current");
pub(super) const PROGRAMMING_DURATION: Family = histogram(
    "holdfast_programming_duration_seconds",
    "Time of each leg of the way into the kernel: from the first sight of a generation to Programmed at it, from ready \
     (interface, identity, program) to the open gate, from the last write to its proof; and from the origin's time \
     (annotation holdfast.dev/origin-time) to the first sight, by the clocks of two machines.",
    &[closed("leg", || {
        owned(LEGS.map(|(_, label)| label).into_iter().chain([ORIGIN_TO_SEEN]))
    })],
);
pub(super) const QUEUE_DEPTH: Family = gauge(
    "holdfast_engine_queue_depth",
    "Events that wait for the engine.",
    &[],
);
pub(super) const QUEUE_WAIT: Family = histogram(
    "holdfast_engine_queue_wait_seconds",
    "How long answers of the kernel waited for the engine.",
    &[],
);
pub(super) const PASS_DURATION: Family = histogram(
    "holdfast_engine_pass_duration_seconds",
    "How long the engine took for a batch of events.",
    &[],
);
pub(super) const LOOP_RUNS: Family = counter(
    "holdfast_loop_runs_total",
    "Rounds of each loop of the agent: what errors are a share of.",
    &[LOOP],
);
pub(super) const LOOP_ERRORS: Family = counter(
    "holdfast_loop_errors_total",
    "Rounds of each loop of the agent that failed.",
    &[LOOP],
);
pub(super) const REPORT_WRITES: Family = counter(
    "holdfast_report_writes_total",
    "Reports written, by result.",
    &[closed("result", || owned(WRITE_RESULTS))],
);
pub(super) const NETLINK_OVERRUNS: Family = counter(
    "holdfast_netlink_overruns_total",
    "Times that the kernel dropped notifications of network devices.",
    &[],
);
pub(super) const NETLINK_RESYNCS: Family = counter(
    "holdfast_netlink_resyncs_total",
    "Complete lists of the network devices beyond the first.",
    &[],
);
pub(super) const DRIFT_REPAIRS: Family = counter(
    "holdfast_drift_repairs_total",
    "What an audit found otherwise than it was left, by kind. All of it is put right but foreign: somebody else's \
     program before ours is named and left alone.",
    &[closed("kind", || owned(Drift::ALL.map(Drift::label)))],
);
pub(super) const FOREIGN_BEFORE: Family = gauge(
    "holdfast_foreign_before_interfaces",
    "Interfaces at which somebody else's program comes before ours, as the last audit found, by whether that is allowed \
     (--allow-foreign-before).",
    &[closed("allowed", || owned(["false", "true"]))],
);
pub(super) const MAP_ENTRIES: Family = gauge("holdfast_map_entries", "Entries in use of each map.", &[MAP])
    .absent("for maps that cannot be counted for nothing: flows, and what the program keeps for itself");
pub(super) const MAP_CAPACITY: Family = gauge("holdfast_map_capacity", "Capacity of each map.", &[MAP]);
pub(super) const MAP_WRITES: Family = counter(
    "holdfast_map_writes_total",
    "Map elements written and deleted by this agent.",
    &[MAP, closed("op", || owned(["update", "delete"]))],
);
pub(super) const PACKETS: Family = counter(
    "holdfast_packets_total",
    "Packets seen at the interfaces of attachments, by what was done with them and why. Counted by the kernel: the end \
     of the agent does not reset it.",
    &[
        closed("verdict", || distinct(Verdict::verdict_label)),
        closed("reason", || distinct(Verdict::reason_label)),
    ],
)
.absent("for a verdict and a reason that do not go together");
pub(super) const PROOFS: Family = counter(
    "holdfast_proofs_total",
    "Proofs by test run of the attached program, by result.",
    &[closed("result", || owned(PROOF_RESULTS))],
);
pub(super) const SOURCE_LAST_ACTIVITY: Family = gauge(
    "holdfast_source_last_activity_timestamp_seconds",
    "Last proof of life of the source of objects, by the node's clock.",
    &[open(
        "source",
        "`dir`: a directory of files, `kube`: an API server",
    )],
)
.absent("before the first");
pub(super) const SAVED_SET: Family = gauge(
    "holdfast_saved_set_timestamp_seconds",
    "Until when the set of objects on the disk was the one that the source has, by the node's clock: what a boot without \
     the API server would serve.",
    &[],
)
.absent("for a directory, which is its own, and before the first set is saved");
pub(super) const SOURCE_OBJECTS: Family = gauge(
    "holdfast_source_objects",
    "Objects in force on this node by kind.",
    &[closed("kind", || owned(Kind::ALL))],
);
pub(super) const SOURCE_PROBLEMS: Family = gauge(
    "holdfast_source_problems",
    "Pieces of input that could not be used; what they said last stays in force.",
    &[],
);
pub(super) const TIME: Family = gauge(
    "holdfast_time_seconds",
    "The clock of whoever is scraped, to half a second: what ages are computed against.",
    &[],
);
pub(super) const AGENT_START: Family = gauge(
    "holdfast_agent_start_timestamp_seconds",
    "When this life of the agent began, by the node's clock.",
    &[],
);
pub(super) const BUILD_INFO: Family = gauge(
    "holdfast_build_info",
    "Version of whoever is scraped; always 1.",
    &[open("version", "of the program")],
);

/// Whether nodes are heard of.
pub(super) const LIVES: [&str; 2] = ["live", "unknown"];
pub(super) const STATUS_WRITE_RESULTS: [&str; 3] = ["ok", "conflict", "error"];

pub(super) const CONTROLLER_LEADER: Family = gauge(
    "holdfast_controller_leader",
    "1 for the controller that writes the status of policies, 0 for one that stands by.",
    &[],
);
pub(super) const CONTROLLER_NODES: Family = gauge(
    "holdfast_controller_nodes",
    "Nodes that exist and have a consumer of a policy, by whether they renew their lease.",
    &[closed("state", || owned(LIVES))],
);
pub(super) const CONTROLLER_LAGGARDS: Family = gauge(
    "holdfast_controller_laggards",
    "Nodes that are not programmed, counted once for each policy that has a consumer there.",
    &[],
);
pub(super) const CONTROLLER_STATUS_WRITES: Family = counter(
    "holdfast_controller_status_writes_total",
    "Writes of the status of policies by result; a conflict is a policy that had changed by then, and is decided again.",
    &[closed("result", || owned(STATUS_WRITE_RESULTS))],
);
pub(super) const CONTROLLER_POLICY_BEHIND_SINCE: Family = gauge(
    "holdfast_controller_policy_behind_since_timestamp_seconds",
    "The oldest moment of a policy that not every node has answered yet, by the controller's clock: from the first sight \
     of a generation to the last node's answer. What is held or failed at its present generation is not behind.",
    &[NAMESPACE, POLICY],
)
.absent("while every node has answered");
pub(super) const CONTROLLER_WATCH_LAST_ACTIVITY: Family = gauge(
    "holdfast_controller_watch_last_activity_timestamp_seconds",
    "Last proof of life of each watch, by the controller's clock; there is one a minute at least.",
    &[closed("watch", || owned(Watched::ALL.map(Watched::as_str)))],
)
.absent("before the first");

/// All families of `holdfast controller`, in the order in which they are exported.
pub const CONTROLLER_FAMILIES: [&Family; 8] = [
    &CONTROLLER_LEADER,
    &CONTROLLER_NODES,
    &CONTROLLER_LAGGARDS,
    &CONTROLLER_STATUS_WRITES,
    &CONTROLLER_POLICY_BEHIND_SINCE,
    &CONTROLLER_WATCH_LAST_ACTIVITY,
    &TIME,
    &BUILD_INFO,
];

/// All families of the agent, in the order in which they are exported.
pub const FAMILIES: [&Family; 31] = [
    &INTENTS,
    &HELD_INTENTS,
    &FAILED_INTENTS,
    &HOLDS,
    &POLICY_INTENTS,
    &POLICY_GENERATION,
    &POLICY_HOLD_START,
    &POLICY_BEHIND_SINCE,
    &PROGRAMMING_DURATION,
    &QUEUE_DEPTH,
    &QUEUE_WAIT,
    &PASS_DURATION,
    &LOOP_RUNS,
    &LOOP_ERRORS,
    &REPORT_WRITES,
    &NETLINK_OVERRUNS,
    &NETLINK_RESYNCS,
    &DRIFT_REPAIRS,
    &FOREIGN_BEFORE,
    &MAP_ENTRIES,
    &MAP_CAPACITY,
    &MAP_WRITES,
    &PACKETS,
    &PROOFS,
    &SOURCE_LAST_ACTIVITY,
    &SAVED_SET,
    &SOURCE_OBJECTS,
    &SOURCE_PROBLEMS,
    &TIME,
    &AGENT_START,
    &BUILD_INFO,
];
