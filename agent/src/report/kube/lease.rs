//! The node's lease: that the agent lives, and of which life of the pins its reports are.

use std::sync::Arc;
use std::time::Duration;

use hyper::http::Request;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Config;
use super::write::{Complaints, TIMEOUT, owner};
use crate::apiserver::{ApiServer, Backoff, Failure, jitter};
use crate::loops::Counter;

/// Where the leases of nodes are: in the agents' own namespace each could take the controller's.
pub const NAMESPACE: &str = "holdfast-node-lease";
/// How long it holds.
const SECONDS: u64 = 40;
/// How often it is renewed.
const EVERY: Duration = Duration::from_secs(10);

/// Renews the lease.
pub(super) struct Lease {
    api: ApiServer,
    node: String,
    holder: String,
    rounds: Arc<Counter>,
    complaints: Complaints,
}

impl Lease {
    pub(super) fn new(config: &Config, rounds: Arc<Counter>) -> Self {
        Self {
            api: config.api.clone(),
            node: config.node.clone(),
            holder: format!("{}/{}", config.node, config.epoch.id),
            rounds,
            complaints: Complaints::new(
                "the node's lease cannot be renewed: what it acknowledges does not count",
            ),
        }
    }

    /// Runs until the sender is gone; renews once it has said yes.
    pub(super) async fn run(mut self, mut reported: watch::Receiver<bool>) {
        if reported.wait_for(|reported| *reported).await.is_err() {
            return;
        }
        let mut backoff = Backoff::default();
        loop {
            self.rounds.run();
            let renewed = tokio::select! {
                _ = reported.wait_for(|reported| !*reported) => return,
                renewed = self.renew() => renewed,
            };
            let wait = match renewed {
                Ok(()) => {
                    backoff.reset();
                    self.complaints.over();
                    EVERY - jitter(EVERY / 10)
                }
                Err(failure) => {
                    self.rounds.error();
                    self.complaints.say(&failure);
                    backoff.next(failure.retry_after)
                }
            };
            tokio::select! {
                _ = reported.wait_for(|reported| !*reported) => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    async fn renew(&self) -> Result<(), Failure> {
        match self.patch().await {
            Err(failure) if failure.code() == Some(404) => self.create().await,
            result => result,
        }
    }

    async fn patch(&self) -> Result<(), Failure> {
        let request = Request::patch(format!("{}/{}", path(), self.node))
            .header("content-type", "application/merge-patch+json")
            .body(json!({"spec": self.spec()}).to_string().into_bytes())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        self.api.ask(request, TIMEOUT).await.map(drop)
    }

    async fn create(&self) -> Result<(), Failure> {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self.node,
                "namespace": NAMESPACE,
                "ownerReferences": owner(&self.api, &self.node).await,
            },
            "spec": self.spec(),
        });
        let request = Request::post(path())
            .header("content-type", "application/json")
            .body(lease.to_string().into_bytes())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        self.api.ask(request, TIMEOUT).await.map(drop)
    }

    fn spec(&self) -> Value {
        json!({
            "holderIdentity": self.holder,
            "leaseDurationSeconds": SECONDS,
            // For people: who judges it goes by when it was seen to change.
            "renewTime": format!("{:.6}", jiff::Timestamp::now()),
        })
    }
}

fn path() -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")
}
