//! How everybody else asks the driver.

use std::collections::BTreeSet;

use holdfast_engine::compare::{NoSuchPolicy, Page, Scope};
use holdfast_engine::explain::{Asked, Explained, Unexplained};
use holdfast_engine::model::{Boot, Ifindex, Now, ObjectName, Token, UidHash};
use holdfast_engine::view::{AttachmentView, Counts, IntentView, PolicyView, Settled, Summary};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::loops;
use crate::source::{SavedAt, SourceStatus};

/// What others may ask of the driver.
#[derive(Debug)]
pub enum Command {
    /// The identity of this interface may have changed. Answered when the engine is done with it.
    Poke {
        /// Which.
        ifindex: Ifindex,
        /// The token that was registered; none = unregistered.
        token: Option<Token>,
        /// The answer.
        reply: oneshot::Sender<Settled>,
    },
    /// Are you there? For `/livez`.
    Ping(oneshot::Sender<()>),
    /// Everything, for `status` and the report.
    Snapshot(oneshot::Sender<Snapshot>),
    /// One policy.
    Policy(ObjectName, oneshot::Sender<Option<PolicyStatus>>),
    /// Why a policy is as it is.
    Explain(
        ObjectName,
        Asked,
        oneshot::Sender<Result<Box<Explained>, Unexplained>>,
    ),
    /// What is wanted of the kernel beside what is believed of it.
    Compare(Scope, oneshot::Sender<Result<Page, NoSuchPolicy>>),
    /// Totals and the policies in trouble, for the metrics (all policies if `true`).
    Metrics(bool, oneshot::Sender<MetricsSnapshot>),
}

/// A policy with its intents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyStatus {
    /// The policy.
    pub policy: PolicyView,
    /// Its intents.
    pub intents: Vec<IntentView>,
}

/// What the engine knows at one moment, but for the single intents: at 100,000 of them a look would cost a pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Name of the node.
    pub node: String,
    /// Names the life of the pins: survives restart and upgrade, not reboot or a wiped bpffs.
    pub epoch: String,
    /// Now, milliseconds since the Unix epoch.
    pub now_wall_ms: i64,
    /// Now, nanoseconds on the boot clock.
    pub now_boot_ns: u64,
    /// Totals.
    pub summary: Summary,
    /// Every policy that selects a consumer here.
    pub policies: Vec<PolicyView>,
    /// Every attachment of this node.
    pub attachments: Vec<AttachmentView>,
    /// How the source is doing.
    pub source: SourceStatus,
    /// Age of the source's last sign of life, nanoseconds; none = never.
    pub source_age_ns: Option<u64>,
    /// The first pass over live lists is done: what is said of the policies is of this life.
    pub settled: bool,
    /// Policies that are gone and of which the kernel still has something.
    pub removing: BTreeSet<UidHash>,
    /// Age of the saved set, nanoseconds; none = the source has none.
    pub saved_age_ns: Option<u64>,
}

/// What a scrape needs from the engine's task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricsSnapshot {
    /// Now, milliseconds since the Unix epoch.
    pub now_wall_ms: i64,
    /// Now, nanoseconds on the boot clock.
    pub now_boot_ns: u64,
    /// Totals.
    pub summary: Summary,
    /// Policies that are held, failed or behind (or all).
    pub policies: Vec<PolicyFigures>,
    /// How the source is doing.
    pub source: SourceStatus,
    /// The source's last sign of life.
    pub source_last_activity: Option<Now>,
    /// What the disk has of the source's set.
    pub saved: Option<SavedAt>,
    /// `holdfast_programming_duration_seconds`: per leg the count, the sum in nanoseconds, and counts per bucket.
    pub durations: std::collections::BTreeMap<holdfast_engine::model::Leg, Histogram>,
    /// From the time that the origins of policies name to the first sight here.
    pub origin_to_seen: Histogram,
    /// Events waiting for the engine.
    pub queue_depth: u64,
    /// Seconds that the events of the last batch waited.
    pub queue_wait: Histogram,
    /// Duration of passes (handle + poll).
    pub pass_duration: Histogram,
    /// Reports written: result (`ok`, `error`) -> count.
    pub report_writes: std::collections::BTreeMap<&'static str, u64>,
    /// Rounds of each loop.
    pub loops: std::collections::BTreeMap<&'static str, loops::Count>,
    /// Interfaces at which somebody else's program comes before ours.
    pub foreign_before: u64,
    /// Netlink receive overruns.
    pub netlink_overruns: u64,
    /// Complete dumps beyond the first.
    pub netlink_resyncs: u64,
}

/// What a scrape shows of a policy. The engine waits while it is copied: no texts but its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyFigures {
    /// Its name.
    pub name: ObjectName,
    /// Its intents on this node.
    pub intents: Counts,
    /// The generation that was seen last.
    pub generation: u64,
    /// The last one that was tried on every intent.
    pub applied: u64,
    /// The last one that was proven.
    pub proven: u64,
    /// Start of its oldest hold.
    pub held_since: Option<Now>,
    /// The oldest moment that is not served yet.
    pub behind_since: Option<Now>,
}

impl PolicyFigures {
    /// Those of this policy.
    #[must_use]
    pub fn new(policy: &PolicyView) -> Self {
        Self {
            name: policy.name.clone(),
            intents: policy.intents,
            generation: policy.generation,
            applied: policy.applied,
            proven: policy.proven,
            held_since: policy.held_since,
            behind_since: policy.behind_since,
        }
    }
}

impl MetricsSnapshot {
    /// When it was taken.
    #[must_use]
    pub const fn now(&self) -> Now {
        Now {
            boot: Boot(self.now_boot_ns),
            wall_ms: self.now_wall_ms,
        }
    }
}

/// A histogram with the buckets [`Histogram::BOUNDS_NS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Observations.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub sum_ns: u64,
    /// Observations not above each bound (cumulative), in the order of the bounds.
    pub buckets: [u64; 16],
}

impl Histogram {
    /// Upper bounds, nanoseconds: 10 us to about 5 min, factor of about 3.
    pub const BOUNDS_NS: [u64; 16] = [
        10_000,
        30_000,
        100_000,
        300_000,
        1_000_000,
        3_000_000,
        10_000_000,
        30_000_000,
        100_000_000,
        300_000_000,
        1_000_000_000,
        3_000_000_000,
        10_000_000_000,
        30_000_000_000,
        100_000_000_000,
        300_000_000_000,
    ];

    /// Adds one observation.
    pub fn observe(&mut self, nanos: u64) {
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanos);
        for (bucket, bound) in self.buckets.iter_mut().zip(Self::BOUNDS_NS) {
            if nanos <= bound {
                *bucket += 1;
            }
        }
    }
}

/// Asks the driver. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
}

/// The driver has ended: the agent is shutting down.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the agent is shutting down")]
pub struct Gone;

impl Handle {
    /// A handle on this queue.
    #[must_use]
    pub const fn new(commands: mpsc::Sender<Command>) -> Self {
        Self { commands }
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Gone> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| Gone)?;
        answer.await.map_err(|_| Gone)
    }

    /// Returns when the driver has come round to it.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn ping(&self) -> Result<(), Gone> {
        self.ask(Command::Ping).await
    }

    /// Says that an identity may have changed; returns when the engine is done with the interface.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn poke(&self, ifindex: Ifindex, token: Option<Token>) -> Result<Settled, Gone> {
        self.ask(|reply| Command::Poke {
            ifindex,
            token,
            reply,
        })
        .await
    }

    /// Everything.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn snapshot(&self) -> Result<Snapshot, Gone> {
        self.ask(Command::Snapshot).await
    }

    /// One policy.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn policy(&self, name: ObjectName) -> Result<Option<PolicyStatus>, Gone> {
        self.ask(|reply| Command::Policy(name, reply)).await
    }

    /// Why a policy is as it is.
    ///
    /// # Errors
    /// [`Gone`]; inside, that there is nothing to explain.
    pub async fn explain(
        &self,
        policy: ObjectName,
        asked: Asked,
    ) -> Result<Result<Box<Explained>, Unexplained>, Gone> {
        self.ask(|reply| Command::Explain(policy, asked, reply)).await
    }

    /// A page of what is wanted of the kernel beside what is believed of it.
    ///
    /// # Errors
    /// [`Gone`]; inside, that there is no such policy.
    pub async fn compare(&self, scope: Scope) -> Result<Result<Page, NoSuchPolicy>, Gone> {
        self.ask(|reply| Command::Compare(scope, reply)).await
    }

    /// What a scrape needs; all policies if `all`, else those in trouble.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn metrics(&self, all: bool) -> Result<MetricsSnapshot, Gone> {
        self.ask(|reply| Command::Metrics(all, reply)).await
    }
}
