//! When is a policy programmed? The exact rule, for one policy.
//!
//! Equal generations are not enough: a consumer that was just added, one that was swapped for another, and a node that
//! booted again and renewed its lease before it wrote its report would all count too early. So a node counts only if
//! uid, generation, origin and `covers` are what the controller itself has, in a report of the very epoch that the
//! node's lease is renewed for.

use std::cmp::Ordering;

use holdfast_engine::model::Uid;

use super::index::{Index, Life, Mono, Policy, PolicyEntry, Presence, Said, Share};
use crate::api::status::{Condition, ConditionKind, Laggard, NodeCounts, RoutePolicyStatus, Truth};
use crate::report::{IntentCounts, OriginReport, PolicyReport, rfc3339};

/// Most laggards that a status names.
const LAGGARDS: usize = 5;
/// Most nodes that never existed that a message names.
const STRANGERS: usize = 3;

/// What follows from what is known of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rollup {
    /// The status to be written.
    pub status: RoutePolicyStatus,
    /// Whether it may be written. Not while the controller knows itself to be behind a node, and not while all that it
    /// lacks is a sign of life from nodes that it has only just met.
    pub sure: bool,
    /// Some node has not answered for this generation and these attachments.
    pub behind: bool,
}

/// Both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Monotonic.
    pub mono: Mono,
    /// Wall clock less monotonic clock, milliseconds. Kept until the wall clock steps, so that the stamp of a moment is
    /// always the same and no status differs by a millisecond only.
    pub distance_ms: i64,
}

impl Clock {
    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub fn wall_ms(self) -> i64 {
        self.stamp_ms(self.mono)
    }

    fn stamp_ms(self, at: Mono) -> i64 {
        let at = i64::try_from(at / 1_000_000).unwrap_or(i64::MAX);
        self.distance_ms.saturating_add(at)
    }

    fn stamp(self, at: Mono) -> String {
        rfc3339(self.stamp_ms(at))
    }
}

/// What a node is for a policy; worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Failed,
    Held,
    Pending,
    Unknown,
    Programmed,
}

impl State {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "Failed",
            Self::Held => "Held",
            Self::Pending => "Pending",
            Self::Unknown => "Unknown",
            Self::Programmed => "Programmed",
        }
    }
}

struct Verdict<'a> {
    node: &'a str,
    state: State,
    reason: Option<String>,
    generation: Option<u64>,
    since: Option<String>,
    intents: IntentCounts,
    /// See [`Rollup::sure`].
    doubt: Option<Doubt>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// The node knows a generation that we do not.
    Ahead,
    /// We have only just met it.
    JustMet,
}

/// The roll-up of a policy; none if it is not known. `previous` is the status that the object carries.
#[must_use]
pub fn rollup(index: &Index, uid: &Uid, previous: &RoutePolicyStatus, clock: Clock) -> Option<Rollup> {
    let entry = index.entry(uid)?;
    let mut verdicts = Vec::new();
    let mut strangers = Vec::new();
    for (node, share) in entry.shares.iter().filter(|(_, share)| share.consumers > 0) {
        match index.presence(node, clock.mono) {
            Presence::There => verdicts.push(judge(index, entry, node, *share, clock)),
            Presence::Awaited(since) => {
                strangers.push(node.as_str());
                let mut verdict = Verdict::new(node, State::Unknown, share.consumers);
                verdict.reason = Some("NodeMissing".to_owned());
                verdict.since = Some(clock.stamp(since));
                verdicts.push(verdict);
            }
            Presence::NeverCame => strangers.push(node.as_str()),
            Presence::Gone => {}
        }
    }
    verdicts.sort_by(worst_first);
    let nodes = count(&verdicts);
    let (truth, reason) = programmed(nodes);
    let message = message(&entry.policy, nodes, &verdicts, &strangers);
    let met = verdicts
        .iter()
        .any(|verdict| verdict.doubt == Some(Doubt::JustMet));
    let ahead = verdicts.iter().any(|verdict| verdict.doubt == Some(Doubt::Ahead));
    let conditions = conditions(&entry.policy, truth, reason, message, previous, clock);
    Some(Rollup {
        sure: !(ahead || met && truth == Truth::Unknown),
        behind: nodes.pending + nodes.unknown > 0,
        status: RoutePolicyStatus {
            observed_generation: entry.policy.generation,
            origin: entry.policy.origin.as_ref().map(OriginReport::from),
            conditions,
            nodes,
            programmed_nodes: format!("{}/{}", nodes.programmed, nodes.desired),
            intents: sum(&verdicts),
            laggards: verdicts
                .iter()
                .filter(|verdict| verdict.state != State::Programmed)
                .take(LAGGARDS)
                .map(Verdict::laggard)
                .collect(),
        },
    })
}

/// What a node is for a policy of which it has a consumer, by the same rule; also if it is `Programmed`.
#[must_use]
pub fn on_node(index: &Index, uid: &Uid, node: &str, clock: Clock) -> Option<Laggard> {
    let entry = index.entry(uid)?;
    let (node, share) = entry.shares.get_key_value(node)?;
    (share.consumers > 0).then(|| judge(index, entry, node, *share, clock).laggard())
}

/// What one node is for a policy.
fn judge<'a>(index: &Index, entry: &PolicyEntry, node: &'a str, share: Share, clock: Clock) -> Verdict<'a> {
    let mut verdict = Verdict::new(node, State::Pending, share.consumers);
    let epoch = match index.life(node, clock.mono) {
        Life::Live(epoch) => epoch,
        Life::Unsure => {
            verdict.state = State::Unknown;
            verdict.doubt = Some(Doubt::JustMet);
            return verdict;
        }
        Life::Dead(since) => {
            verdict.state = State::Unknown;
            verdict.reason = Some("NotHeardOf".to_owned());
            verdict.since = since.map(|at| clock.stamp(at));
            return verdict;
        }
    };
    let Some((reported_by, Some(said))) = index.said(node, &entry.policy.uid) else {
        return verdict;
    };
    verdict.generation = Some(said.generation());
    // A report of an earlier life says nothing about this one.
    if reported_by != epoch {
        return verdict;
    }
    match said.generation().cmp(&entry.policy.generation) {
        Ordering::Greater => verdict.doubt = Some(Doubt::Ahead),
        Ordering::Equal if is_about(said, &entry.policy, share) => verdict.take(said, share),
        Ordering::Equal | Ordering::Less => {}
    }
    verdict
}

/// Whether what a node said of this generation is about the same origin and the same attachments.
fn is_about(said: &Said, policy: &Policy, share: Share) -> bool {
    let origin = policy
        .origin
        .as_ref()
        .is_none_or(|origin| said.origin() == Some((&origin.uid, origin.generation)));
    // Of a policy that cannot be read nobody knows the attachments for sure.
    let covers = policy.content.is_err() || said.covers() == Some(share.covers);
    origin && covers
}

impl<'a> Verdict<'a> {
    fn new(node: &'a str, state: State, consumers: u64) -> Self {
        Self {
            node,
            state,
            reason: None,
            generation: None,
            since: None,
            intents: IntentCounts {
                desired: consumers,
                pending: consumers,
                ..IntentCounts::default()
            },
            doubt: None,
        }
    }

    /// Takes over what a node said, which is about the right thing.
    fn take(&mut self, said: &Said, share: Share) {
        match said {
            Said::Programmed(_) => {
                self.state = State::Programmed;
                self.intents = IntentCounts {
                    desired: share.consumers,
                    programmed: share.consumers,
                    ..IntentCounts::default()
                };
            }
            Said::Other(report) => {
                self.state = match report.state.as_str() {
                    "Failed" => State::Failed,
                    "Held" => State::Held,
                    _ => State::Pending,
                };
                self.reason.clone_from(&report.reason);
                self.since = Some(report.since.clone());
                self.intents = bounded(report, share.consumers);
            }
        }
    }

    fn laggard(&self) -> Laggard {
        Laggard {
            node: self.node.to_owned(),
            state: self.state.as_str().to_owned(),
            reason: self.reason.clone(),
            generation: self.generation,
            since: self.since.clone(),
        }
    }
}

/// A node's counts, so that they sum to what we know to be desired whatever it says.
fn bounded(report: &PolicyReport, consumers: u64) -> IntentCounts {
    let mut left = consumers;
    let mut take = |count: u64| {
        let taken = count.min(left);
        left -= taken;
        taken
    };
    let failed = take(report.intents.failed);
    let held = take(report.intents.held);
    let programmed = take(report.intents.programmed);
    IntentCounts {
        desired: consumers,
        programmed,
        held,
        failed,
        pending: left,
    }
}

fn worst_first(a: &Verdict<'_>, b: &Verdict<'_>) -> Ordering {
    let known = |verdict: &Verdict<'_>| (verdict.since.is_none(), verdict.since.clone());
    a.state
        .cmp(&b.state)
        .then_with(|| known(a).cmp(&known(b)))
        .then_with(|| a.node.cmp(b.node))
}

fn count(verdicts: &[Verdict<'_>]) -> NodeCounts {
    let mut nodes = NodeCounts::default();
    for verdict in verdicts {
        nodes.desired += 1;
        *match verdict.state {
            State::Failed => &mut nodes.failed,
            State::Held => &mut nodes.held,
            State::Pending => &mut nodes.pending,
            State::Unknown => &mut nodes.unknown,
            State::Programmed => &mut nodes.programmed,
        } += 1;
    }
    nodes
}

fn sum(verdicts: &[Verdict<'_>]) -> IntentCounts {
    let mut sum = IntentCounts::default();
    for IntentCounts {
        desired,
        programmed,
        held,
        failed,
        pending,
    } in verdicts.iter().map(|verdict| verdict.intents)
    {
        sum.desired += desired;
        sum.programmed += programmed;
        sum.held += held;
        sum.failed += failed;
        sum.pending += pending;
    }
    sum
}

const fn programmed(nodes: NodeCounts) -> (Truth, &'static str) {
    match nodes {
        NodeCounts { desired: 0, .. } => (Truth::False, "NoConsumers"),
        NodeCounts { failed: 1.., .. } => (Truth::False, "PartialFailure"),
        NodeCounts { held: 1.., .. } => (Truth::False, "Held"),
        NodeCounts { pending: 1.., .. } => (Truth::False, "Pending"),
        NodeCounts { unknown: 1.., .. } => (Truth::Unknown, "NodeUnknown"),
        _ => (Truth::True, "Programmed"),
    }
}

fn message(policy: &Policy, nodes: NodeCounts, verdicts: &[Verdict<'_>], strangers: &[&str]) -> String {
    let mut text = if nodes.desired == 0 {
        format!("no node has a consumer, generation {}", policy.generation)
    } else {
        format!(
            "{}/{} nodes at generation {}",
            nodes.programmed, nodes.desired, policy.generation
        )
    };
    if let Some(worst) = verdicts.first().filter(|worst| worst.state != State::Programmed) {
        text += &format!("; {}: {}", worst.node, worst.state.as_str());
        if let Some(reason) = &worst.reason {
            text += &format!("({reason})");
        }
    }
    if !strangers.is_empty() {
        let named = strangers.len().min(STRANGERS);
        text += &format!(
            "; attachments name nodes that do not exist: {}",
            strangers[..named].join(", ")
        );
        if strangers.len() > named {
            text += &format!(" and {} more", strangers.len() - named);
        }
    }
    text
}

fn conditions(
    policy: &Policy,
    truth: Truth,
    reason: &str,
    message: String,
    previous: &RoutePolicyStatus,
    clock: Clock,
) -> Vec<Condition> {
    let (accepted, accepted_reason, accepted_message) = match &policy.content {
        Ok(_) => {
            let said = policy.origin_problem.clone().unwrap_or_default();
            (Truth::True, "Accepted".to_owned(), said)
        }
        Err(refusal) => (Truth::False, refusal.reason.to_string(), refusal.message.clone()),
    };
    [
        (
            ConditionKind::Accepted,
            accepted,
            accepted_reason.as_str(),
            accepted_message,
        ),
        (ConditionKind::Programmed, truth, reason, message.clone()),
        (ConditionKind::Ready, truth, reason, message),
    ]
    .map(|(kind, status, reason, message)| {
        let before = previous.condition(kind).filter(|before| before.status == status);
        Condition {
            kind,
            status,
            observed_generation: policy.generation,
            last_transition_time: before.map_or_else(
                || clock.stamp(clock.mono),
                |before| before.last_transition_time.clone(),
            ),
            reason: reason.to_owned(),
            message,
        }
    })
    .into()
}
