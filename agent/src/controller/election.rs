//! Which of several controllers writes.
//!
//! As everywhere here, no clock is held against another: a candidate takes the lease over when *it* has seen no renewal
//! for as long as the lease says, however old the lease looks, and whoever leads stops well before others may begin.
//! Nothing depends on there being only one leader, because every status is written on condition of the version that it was
//! decided on; two would merely disagree for a while. (`kube-lease-manager` compares the holder's time with ours, frees a
//! lease that looks old without a condition, which takes it from whoever has just won it, and goes on leading while the API
//! server is away.)

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::apiserver::chain;

/// Name of the lease.
pub const LEASE: &str = "holdfast-controller";
/// How long others wait after the last renewal that they have seen.
const DURATION: Duration = Duration::from_secs(15);
/// How long the leader leads after its last renewal.
const LEADING: Duration = Duration::from_secs(10);
/// Time between attempts.
const RETRY: Duration = Duration::from_secs(2);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// A candidate that runs.
#[derive(Debug)]
pub struct Candidate {
    /// Whether it leads.
    pub leads: watch::Receiver<bool>,
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Candidate {
    /// Starts to stand for a lease of this namespace under a name that nobody else has.
    #[must_use]
    pub fn spawn(client: Client, namespace: &str, identity: String) -> Self {
        let (sender, leads) = watch::channel(false);
        let (end, ended) = oneshot::channel();
        let election = Election {
            api: Api::namespaced(client, namespace),
            identity,
            leads: sender,
            leads_until: None,
            seen: None,
            failing: false,
        };
        Self {
            leads,
            end,
            task: tokio::spawn(election.run(ended)),
        }
    }

    /// Ends it, and frees the lease if it has it, so that another need not wait.
    pub async fn end(self) {
        // A task that is gone already has nothing to be told.
        let _ = self.end.send(());
        if self.task.await.is_err() {
            tracing::warn!("the election has not come to its end");
        }
    }
}

/// What makes one renewal another than the last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    holder: Option<String>,
    renewed: Option<Timestamp>,
}

struct Election {
    api: Api<Lease>,
    identity: String,
    leads: watch::Sender<bool>,
    /// Until when we lead without another renewal.
    leads_until: Option<Instant>,
    /// The last renewal that was seen, and when it was seen first.
    seen: Option<(Record, Instant)>,
    failing: bool,
}

impl Election {
    async fn run(mut self, mut ended: oneshot::Receiver<()>) {
        loop {
            let began = Instant::now();
            // Who leads must have stopped when its time is over, also if the server does not answer.
            let deadline = self
                .leads_until
                .map_or(began + ATTEMPT, |until| until.min(began + ATTEMPT));
            // Cancel safety: an attempt that was cut off may have been carried out; then its renewal is seen by the next.
            let attempt = tokio::select! {
                attempt = timeout_at(deadline, self.attempt()) => attempt,
                _ = &mut ended => break,
            };
            match attempt {
                Ok(Ok(true)) => {
                    self.answered();
                    self.leads_until = Some(began + LEADING);
                }
                Ok(Ok(false)) => {
                    self.answered();
                    self.leads_until = None;
                }
                Ok(Err(error)) => self.failed(&chain(&error)),
                Err(_) => self.failed("no answer in time"),
            }
            self.leads_until = self.leads_until.filter(|until| *until > Instant::now());
            self.tell();
            let next = Instant::now() + RETRY;
            let next = self.leads_until.map_or(next, |until| until.min(next));
            tokio::select! {
                () = sleep_until(next) => {}
                _ = &mut ended => break,
            }
        }
        if self.leads_until.take().is_some() {
            self.tell();
            match timeout_at(Instant::now() + ATTEMPT, self.release()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(error = chain(&error), "the lease is not freed: it runs out")
                }
                Err(_) => tracing::warn!("the lease is not freed in time: it runs out"),
            }
        }
    }

    fn answered(&mut self) {
        if std::mem::take(&mut self.failing) {
            tracing::info!("the leader's lease can be read and written again");
        }
    }

    fn failed(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(reason, "the leader's lease cannot be read or written");
        }
    }

    fn tell(&self) {
        let leads = self.leads_until.is_some();
        let changed = self
            .leads
            .send_if_modified(|told| std::mem::replace(told, leads) != leads);
        if changed && leads {
            tracing::info!(
                identity = self.identity,
                "leads: this controller writes the status of policies"
            );
        } else if changed {
            tracing::info!(identity = self.identity, "leads no more");
        }
    }

    /// Takes the lease or renews it; whether we have it.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let Some(lease) = self.api.get_opt(LEASE).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.ours(None)),
            };
            return won(self.api.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let record = Record {
            holder: spec.holder_identity.clone().filter(|holder| !holder.is_empty()),
            renewed: spec.renew_time.as_ref().map(|time| time.0),
        };
        let ours = record.holder.as_ref() == Some(&self.identity);
        let free = record.holder.is_none() || self.has_run_out(record, &spec);
        if !ours && !free {
            return Ok(false);
        }
        // With the version that was read: if it is another one by now, somebody else was faster.
        let lease = Lease {
            spec: Some(self.ours(Some(&spec))),
            ..lease
        };
        won(self.api.replace(LEASE, &PostParams::default(), &lease).await)
    }

    /// Whether a renewal is the last one that was seen for as long as the lease says.
    fn has_run_out(&mut self, record: Record, spec: &LeaseSpec) -> bool {
        let now = Instant::now();
        let since = match &self.seen {
            Some((seen, since)) if *seen == record => *since,
            _ => {
                self.seen = Some((record, now));
                now
            }
        };
        let said = spec
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok());
        now.duration_since(since) >= said.map_or(DURATION, Duration::from_secs)
    }

    fn ours(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let kept = before.filter(|before| before.holder_identity.as_ref() == Some(&self.identity));
        let changes = before.and_then(|before| before.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: kept
                .and_then(|kept| kept.acquire_time.clone())
                .or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if kept.is_some() {
                changes
            } else {
                changes.saturating_add(1)
            }),
            ..LeaseSpec::default()
        }
    }

    async fn release(&self) -> Result<(), kube::Error> {
        let mut lease = self.api.get(LEASE).await?;
        let Some(spec) = &mut lease.spec else {
            return Ok(());
        };
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            return Ok(());
        }
        spec.holder_identity = None;
        won(self.api.replace(LEASE, &PostParams::default(), &lease).await).map(|_| ())
    }
}

fn won(written: Result<Lease, kube::Error>) -> Result<bool, kube::Error> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
