//! What is said of a policy, as `kubectl get --watch` brings it: every change, with the moment it came.

use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use holdfast_tests::kubernetes::Kubectl;
use holdfast_tests::until;
use serde::Deserialize;

/// A policy, as far as this suite reads it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Policy {
    pub(crate) metadata: Metadata,
    pub(crate) status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Metadata {
    pub(crate) generation: u64,
    pub(crate) uid: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Status {
    pub(crate) observed_generation: u64,
    pub(crate) conditions: Vec<Condition>,
    pub(crate) nodes: Nodes,
    pub(crate) laggards: Vec<Laggard>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) observed_generation: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Nodes {
    pub(crate) desired: u64,
    pub(crate) programmed: u64,
    pub(crate) held: u64,
    pub(crate) unknown: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Laggard {
    pub(crate) node: String,
    pub(crate) state: String,
    pub(crate) reason: String,
}

impl Policy {
    /// The condition that says whether it is in the kernels.
    pub(crate) fn programmed(&self) -> Condition {
        let found = self
            .status
            .conditions
            .iter()
            .find(|condition| condition.kind == "Programmed");
        found.cloned().unwrap_or_default()
    }

    /// True for the generation that the object has.
    pub(crate) fn is_programmed(&self) -> bool {
        let condition = self.programmed();
        condition.status == "True" && condition.observed_generation == self.metadata.generation
    }
}

/// A policy, and when it was so.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) policy: Policy,
}

/// Every version of a policy that the API server has told since the start.
pub(crate) struct Recorder {
    seen: Arc<Mutex<Vec<Seen>>>,
    kubectl: Child,
}

impl Recorder {
    /// Watches this policy until dropped.
    pub(crate) fn start(kubectl: &Kubectl, namespace: &str, name: &str) -> anyhow::Result<Self> {
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
    pub(crate) fn since(&self, moment: Instant) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|seen| seen.at >= moment).cloned().collect()
    }

    /// The newest one.
    pub(crate) fn last(&self) -> Option<Policy> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.last().map(|seen| seen.policy.clone())
    }

    /// Waits for a version like this, beginning with the newest there is.
    pub(crate) fn until(
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
