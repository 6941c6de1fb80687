//! What is said of a policy, as `kubectl get --watch` brings it: every change, with the moment it came.

use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use holdfast_cluster::Kubectl;
use serde::Deserialize;

use crate::until;

/// A policy, as far as stories read it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// See [`Metadata`].
    pub metadata: Metadata,
    /// See [`Status`].
    pub status: Status,
}

/// What the API server keeps of every object.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Counts what was written of it.
    pub generation: u64,
    /// Names it for ever.
    pub uid: String,
}

/// What the controller says of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    /// What it speaks of.
    pub observed_generation: u64,
    /// See [`Condition`].
    pub conditions: Vec<Condition>,
    /// See [`Nodes`].
    pub nodes: Nodes,
    /// Worst first.
    pub laggards: Vec<Laggard>,
}

/// One condition.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    /// Which.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, `Unknown`.
    pub status: String,
    /// Why, in one word.
    pub reason: String,
    /// Why, for people.
    pub message: String,
    /// What it speaks of.
    pub observed_generation: u64,
}

/// How many nodes are how far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Nodes {
    /// That have consumers.
    pub desired: u64,
    /// That serve all of them.
    pub programmed: u64,
    /// That hold some.
    pub held: u64,
    /// Of which nothing is known.
    pub unknown: u64,
}

/// A node that is behind.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Laggard {
    /// Its name.
    pub node: String,
    /// How far it is.
    pub state: String,
    /// Why it is no further.
    pub reason: String,
}

impl Policy {
    /// The condition that says whether it is in the kernels.
    #[must_use]
    pub fn programmed(&self) -> Condition {
        let found = self
            .status
            .conditions
            .iter()
            .find(|condition| condition.kind == "Programmed");
        found.cloned().unwrap_or_default()
    }

    /// True for the generation that the object has.
    #[must_use]
    pub fn is_programmed(&self) -> bool {
        let condition = self.programmed();
        condition.status == "True" && condition.observed_generation == self.metadata.generation
    }
}

/// A policy, and when it was so.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When it was told.
    pub at: Instant,
    /// What.
    pub policy: Policy,
}

/// Every version of a policy that the API server has told since the start.
#[derive(Debug)]
pub struct Recorder {
    seen: Arc<Mutex<Vec<Seen>>>,
    kubectl: Child,
}

impl Recorder {
    /// Watches this policy until dropped.
    ///
    /// # Errors
    /// When kubectl cannot be run.
    pub fn start(kubectl: &Kubectl, namespace: &str, name: &str) -> anyhow::Result<Self> {
        let mut child = kubectl
            .command(&[
                "get",
                "routepolicies",
                // One that is named must be there already.
                &format!("--field-selector=metadata.name={name}"),
                "--namespace",
                namespace,
                "--watch",
                "-o",
                "json",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdout = child.stdout.take().context("kubectl has no output")?;
        let seen = Arc::default();
        let told: Arc<Mutex<Vec<Seen>>> = Arc::clone(&seen);
        std::thread::spawn(move || {
            let versions = serde_json::Deserializer::from_reader(stdout).into_iter::<Policy>();
            for policy in versions.map_while(Result::ok) {
                let at = Instant::now();
                told.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(Seen { at, policy });
            }
        });
        Ok(Self { seen, kubectl: child })
    }

    /// What came since then.
    #[must_use]
    pub fn since(&self, moment: Instant) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|seen| seen.at >= moment).cloned().collect()
    }

    /// The newest one.
    #[must_use]
    pub fn last(&self) -> Option<Policy> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.last().map(|seen| seen.policy.clone())
    }

    /// Waits for a version like this, beginning with the newest there is.
    ///
    /// # Errors
    /// When none comes within the deadline; with the last that came.
    pub fn until(
        &self,
        deadline: Duration,
        what: &str,
        wanted: impl Fn(&Policy) -> bool,
    ) -> anyhow::Result<Policy> {
        until(deadline, what, || Ok(self.last().filter(|policy| wanted(policy))))
            .with_context(|| format!("the last that was said: {:#?}", self.last()))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        _ = self.kubectl.kill();
        _ = self.kubectl.wait();
    }
}
