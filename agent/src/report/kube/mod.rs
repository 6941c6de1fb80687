//! Acknowledgments at an API server: the reports of this node, and the lease that says whether they still count.
//!
//! | | |
//! | --- | --- |
//! | `shards` | which report says what of which policy, and what is to be written next |
//! | `write` | writes it: at most one a second, only what changed, the newest |
//! | `lease` | renews the node's lease, once everything of this life is reported |

mod lease;
mod shards;
#[cfg(test)]
mod tests;
mod write;

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::Stamps;
use super::file::WriteCounts;
use crate::api::node_report::Epoch;
use crate::apiserver::ApiServer;
use crate::driver::Snapshot;
use crate::loops::Counter;

pub use lease::NAMESPACE as LEASES;

/// Whose reports, and where they go.
#[derive(Clone, Debug)]
pub struct Config {
    /// The API server.
    pub api: ApiServer,
    /// Name of the node.
    pub node: String,
    /// The life of the pins, and this one.
    pub epoch: Epoch,
    /// One for all who stamp.
    pub stamps: Stamps,
}

/// Starts the tasks that report at the API server. They end when the sender of the snapshots is gone. `rounds` counts
/// requests, and those that failed.
#[must_use]
pub fn spawn(
    config: Config,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    counts: WriteCounts,
    rounds: Arc<Counter>,
) -> [JoinHandle<()>; 2] {
    let (reported, is_reported) = watch::channel(false);
    let lease = lease::Lease::new(&config, Arc::clone(&rounds));
    let writer = write::Writer::new(config, counts, rounds, reported);
    [
        tokio::spawn(writer.run(snapshots)),
        tokio::spawn(lease.run(is_reported)),
    ]
}
