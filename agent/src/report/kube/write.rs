//! Writes the reports: at most one request a second and node, only what changed, always the newest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::{State, Uid, UidHash};
use holdfast_engine::view::PolicyView;
use hyper::http::Request;
use kube::core::params::ListParams;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Config;
use super::shards::{Outcome, Said, Shards, Step, Stored};
use crate::api::hash;
use crate::api::node_report::{Ack, Shard};
use crate::api::v1alpha1::API_VERSION;
use crate::apiserver::{ApiServer, Backoff, Cause, Failure, jitter};
use crate::driver::Snapshot;
use crate::loops::Counter;
use crate::report::file::WriteCounts;
use crate::report::{OriginReport, PolicyReport};

/// How long one request may take.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// Writes a second, over long times.
const RATE: f64 = 1.0;
/// Writes at once, after a rest.
const BURST: f64 = 4.0;
/// The first write after a rest is spread over so long: one edit of a policy is news to many nodes.
const SPREAD: Duration = Duration::from_millis(250);
/// Longest message of a report, in bytes.
const MAX_MESSAGE: usize = 1_024;

/// Says each kind of failure once, until it is over.
#[derive(Debug)]
pub(super) struct Complaints {
    what: &'static str,
    said: BTreeSet<Cause>,
}

impl Complaints {
    pub(super) const fn new(what: &'static str) -> Self {
        Self {
            what,
            said: BTreeSet::new(),
        }
    }

    pub(super) fn say(&mut self, failure: &Failure) {
        if self.said.insert(failure.cause) {
            tracing::warn!("{}: {failure}; it is tried again", self.what);
        }
    }

    pub(super) fn over(&mut self) {
        if !std::mem::take(&mut self.said).is_empty() {
            tracing::info!("over: {}", self.what);
        }
    }
}

/// The node's object as an owner, so that what is about the node goes with it; none if the token does not name its uid.
pub(super) async fn owner(api: &ApiServer, node: &str) -> Value {
    let identity = tokio::time::timeout(TIMEOUT, api.who_am_i()).await;
    match identity
        .ok()
        .and_then(Result::ok)
        .and_then(|identity| identity.node_uid)
    {
        Some(uid) => json!([{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}]),
        None => json!([]),
    }
}

/// So many writes a second, a few at once.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn new() -> Self {
        Self {
            tokens: BURST,
            at: Instant::now(),
        }
    }

    /// When the next write may go.
    fn due(&mut self) -> Instant {
        let now = Instant::now();
        self.tokens = (self.tokens + (now - self.at).as_secs_f64() * RATE).min(BURST);
        self.at = now;
        now + Duration::from_secs_f64(((1.0 - self.tokens) / RATE).max(0.0))
    }

    fn take(&mut self) {
        self.tokens -= 1.0;
    }
}

/// Writes the reports of this node.
pub(super) struct Writer {
    config: Config,
    counts: WriteCounts,
    rounds: Arc<Counter>,
    reported: watch::Sender<bool>,
    shards: Shards,
    /// The policies of the last look, with what was said of them: what is gone is still said to be on its way out.
    known: BTreeMap<Uid, (PolicyView, Said)>,
    leaving: BTreeMap<Uid, Said>,
    /// The clocks' distance at that time: a step of the clock changes every stamp.
    distance: i64,
    bucket: Bucket,
    backoff: Backoff,
    not_before: Instant,
    /// Nothing is to be written.
    at_rest: bool,
    complaints: Complaints,
}

impl Writer {
    pub(super) fn new(
        config: Config,
        counts: WriteCounts,
        rounds: Arc<Counter>,
        reported: watch::Sender<bool>,
    ) -> Self {
        Self {
            shards: Shards::new(&config.node, config.epoch.clone()),
            distance: config.stamps.distance_ms(),
            config,
            counts,
            rounds,
            reported,
            known: BTreeMap::new(),
            leaving: BTreeMap::new(),
            bucket: Bucket::new(),
            backoff: Backoff::default(),
            not_before: Instant::now(),
            at_rest: true,
            complaints: Complaints::new("the node's reports cannot be written"),
        }
    }

    /// Runs until the sender is gone.
    pub(super) async fn run(mut self, mut snapshots: watch::Receiver<Arc<Snapshot>>) {
        loop {
            let snapshot = Arc::clone(&snapshots.borrow_and_update());
            // Before the first pass over live lists an acknowledgment would be an earlier life's.
            let due = if snapshot.settled {
                self.turn(&snapshot).await
            } else {
                None
            };
            let sleep = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            // Cancel safety: `changed` loses no value, it only skips to the newest.
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if std::mem::take(&mut self.at_rest) {
                        self.not_before = self.not_before.max(Instant::now() + jitter(SPREAD));
                    }
                }
                () = sleep => {}
            }
        }
    }

    /// Does what may be done now; gives when to come back, none when there is nothing to do.
    async fn turn(&mut self, snapshot: &Snapshot) -> Option<Instant> {
        let due = self.not_before.max(self.bucket.due());
        if Instant::now() < due {
            return Some(due);
        }
        let began = Instant::now();
        let wanted = self.wanted(snapshot);
        let step = self.shards.next(&wanted);
        // However large the node, and however often something changes on it: at most a twentieth of one core.
        self.not_before = began + began.elapsed() * 20;
        if self.shards.is_reported() {
            self.reported
                .send_if_modified(|reported| !std::mem::replace(reported, true));
        }
        let Some(step) = step else {
            self.at_rest = true;
            return None;
        };
        self.at_rest = false;
        let is_write = !matches!(step, Step::List | Step::Read(_));
        if is_write {
            self.bucket.take();
        }
        self.rounds.run();
        let (shard, done) = match step {
            Step::List => return Some(self.list_all().await),
            Step::Read(shard) => {
                let read = self.read(&shard).await;
                (shard, read)
            }
            Step::Create(shard, report) => {
                let created = self.create(&shard, report).await;
                (shard, created)
            }
            Step::Patch(shard, patch) => {
                let patched = self.patch(&shard, &patch).await;
                (shard, patched)
            }
        };
        match done {
            Ok(outcome) => {
                // Somebody else's write is no failure of this one.
                if is_write && !matches!(outcome, Outcome::Unsure) {
                    self.counts.count(true);
                    self.complaints.over();
                    self.backoff.reset();
                }
                self.shards.done(&shard, outcome);
            }
            Err(failure) => {
                if is_write {
                    // It may have been written all the same.
                    self.shards.done(&shard, Outcome::Unsure);
                }
                self.failed(&failure);
            }
        }
        Some(self.not_before.max(Instant::now()))
    }

    fn failed(&mut self, failure: &Failure) {
        self.rounds.error();
        // Also of a report that could not be read: it cannot be written then.
        self.counts.count(false);
        self.complaints.say(failure);
        self.not_before = Instant::now() + self.backoff.next(failure.retry_after);
    }

    /// Reads all reports of the node; gives when to go on.
    async fn list_all(&mut self) -> Instant {
        match self.list().await {
            Ok(reports) => self.shards.listed(reports),
            Err(failure) => self.failed(&failure),
        }
        self.not_before.max(Instant::now())
    }

    // --- what is to be said ----------------------------------------------------------------------------------

    fn wanted(&mut self, snapshot: &Snapshot) -> BTreeMap<Uid, Said> {
        if self.distance != self.config.stamps.distance_ms() {
            self.distance = self.config.stamps.distance_ms();
            self.known.clear();
        }
        let mut before = std::mem::take(&mut self.known);
        for policy in &snapshot.policies {
            let said = match before.remove(&policy.uid) {
                Some((view, said)) if view == *policy => said,
                _ => self.said(policy),
            };
            self.known.insert(policy.uid.clone(), (policy.clone(), said));
        }
        let removing = &snapshot.removing;
        for (uid, (view, _)) in before {
            if removing.contains(&hash::uid_hash(&uid)) && self.shards.speaks_of(&uid) {
                self.leaving.insert(uid, self.removing(&view));
            }
        }
        let known = &self.known;
        self.leaving
            .retain(|uid, _| is_leaving(removing, uid) && !known.contains_key(uid));
        let said = self
            .known
            .iter()
            .map(|(uid, (_, said))| (uid.clone(), said.clone()));
        said.chain(self.leaving.clone()).collect()
    }

    fn said(&self, policy: &PolicyView) -> Said {
        if policy.state == State::Programmed {
            let ack = Ack {
                generation: policy.generation,
                covers: policy.covers,
                origin: policy.origin.clone(),
            };
            return Said::Programmed(ack.to_string());
        }
        let mut report = PolicyReport::new(policy, &self.config.stamps);
        if let Some(message) = &mut report.message {
            shorten(message);
        }
        // A struct of texts and numbers is always JSON.
        Said::Other(serde_json::to_value(&report).unwrap_or_default())
    }

    /// What is said of a policy that is gone, while the kernel still has something of it.
    fn removing(&self, policy: &PolicyView) -> Said {
        let report = PolicyReport {
            state: "Removing".to_owned(),
            origin: policy.origin.as_ref().map(|origin| OriginReport {
                uid: origin.uid.clone(),
                generation: origin.generation,
            }),
            intents: super::super::IntentCounts::default(),
            held_since: None,
            serving: None,
            reason: None,
            message: None,
            ..PolicyReport::new(policy, &self.config.stamps)
        };
        Said::Other(serde_json::to_value(&report).unwrap_or_default())
    }

    // --- requests --------------------------------------------------------------------------------------------

    async fn list(&self) -> Result<BTreeMap<Shard, Stored>, Failure> {
        let node = &self.config.node;
        let params = ListParams::default().fields(&format!("node={node}"));
        let request = kube::core::Request::new(path()).list(&params);
        let request = request.map_err(|error| Failure::garbled(error.to_string()))?;
        let list: List = self.config.api.read(request, TIMEOUT).await?;
        let mut reports = BTreeMap::new();
        for object in list.items {
            let answer: Answer =
                serde_json::from_str(object.get()).map_err(|error| Failure::garbled(error.to_string()))?;
            let stored = Stored::read(object.get().as_bytes());
            let stored = stored.map_err(|error| Failure::garbled(error.to_string()))?;
            // Of another name is somebody else's, whatever node it speaks of.
            if let Some(shard) = Shard::of(&answer.metadata.name, node) {
                reports.insert(shard, stored);
            }
        }
        Ok(reports)
    }

    async fn read(&self, shard: &Shard) -> Result<Outcome, Failure> {
        let name = shard.name(&self.config.node);
        let request = Request::get(format!("{}/{name}", path()))
            .body(Vec::new())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        match self.config.api.ask(request, TIMEOUT).await {
            Ok(object) => Stored::read(&object)
                .map(|stored| Outcome::Now(Some(stored)))
                .map_err(|error| Failure::garbled(error.to_string())),
            Err(failure) if failure.code() == Some(404) => Ok(Outcome::Now(None)),
            Err(failure) => Err(failure),
        }
    }

    async fn patch(&self, shard: &Shard, patch: &Value) -> Result<Outcome, Failure> {
        let name = shard.name(&self.config.node);
        let request = Request::patch(format!("{}/{name}", path()))
            .header("content-type", "application/merge-patch+json")
            .body(patch.to_string().into_bytes())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        match self.config.api.ask(request, TIMEOUT).await {
            Ok(object) => version(&object),
            Err(failure) => match failure.code() {
                Some(404) => Ok(Outcome::Now(None)),
                Some(409) => Ok(Outcome::Unsure),
                _ => Err(failure),
            },
        }
    }

    async fn create(&self, shard: &Shard, mut report: Value) -> Result<Outcome, Failure> {
        report["apiVersion"] = API_VERSION.into();
        report["kind"] = "NodeReport".into();
        report["metadata"] = json!({
            "name": shard.name(&self.config.node),
            "ownerReferences": owner(&self.config.api, &self.config.node).await,
        });
        let request = Request::post(path())
            .header("content-type", "application/json")
            .body(report.to_string().into_bytes())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        match self.config.api.ask(request, TIMEOUT).await {
            Ok(object) => version(&object),
            Err(failure) if failure.code() == Some(409) => Ok(Outcome::Unsure),
            Err(failure) => Err(failure),
        }
    }
}

fn is_leaving(removing: &BTreeSet<UidHash>, uid: &Uid) -> bool {
    removing.contains(&hash::uid_hash(uid))
}

fn path() -> String {
    format!("/apis/{API_VERSION}/nodereports")
}

#[derive(Deserialize)]
struct Answer {
    metadata: AnswerMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnswerMetadata {
    name: String,
    resource_version: String,
}

#[derive(Deserialize)]
struct List {
    items: Vec<Box<RawValue>>,
}

fn version(object: &[u8]) -> Result<Outcome, Failure> {
    serde_json::from_slice::<Answer>(object)
        .map(|answer| Outcome::Written(answer.metadata.resource_version))
        .map_err(|error| Failure::garbled(error.to_string()))
}

fn shorten(message: &mut String) {
    if message.len() > MAX_MESSAGE {
        let end = (0..=MAX_MESSAGE - 3)
            .rev()
            .find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or(0));
        message.push_str("...");
    }
}
