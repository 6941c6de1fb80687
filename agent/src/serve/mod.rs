//! What others may ask of a running agent: metrics and health by HTTP, everything else on the local socket.

pub mod diff;
pub mod health;
pub mod http;
pub mod look;
pub mod metrics;
pub mod socket;
#[cfg(test)]
mod tests;
pub mod why;
pub mod wire;

use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::Now;
use tokio::sync::{oneshot, watch};

use crate::clock::Clock;
use crate::datapath;
use crate::driver::lanes::LanesHealth;
use crate::driver::{Handle, Snapshot};
use crate::report::Stamps;
use crate::telemetry;

/// Version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How long the driver may take to answer a question of a scrape or a health check.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the answers come from.
#[derive(Clone)]
pub struct Sources {
    /// The engine's task.
    pub driver: Handle,
    /// The kernel's lanes.
    pub lanes: LanesHealth,
    /// Asks the loop that hears of network devices to come round.
    pub links: Arc<dyn Fn() -> oneshot::Receiver<()> + Send + Sync>,
    /// Numbers of the kernel side.
    pub stats: Arc<dyn Fn() -> datapath::Stats + Send + Sync>,
    /// Looks at the kernel.
    pub looker: look::Looker,
    /// Changes with every report.
    pub reports: watch::Receiver<Arc<Snapshot>>,
    /// Both clocks.
    pub clock: Arc<dyn Clock>,
    /// One for all who stamp.
    pub stamps: Stamps,
    /// When this life began.
    pub started: Now,
    /// Label `source`, and what `status` shows.
    pub source: &'static str,
    /// Series for every policy, not only for those in trouble.
    pub all_policies: bool,
    /// Whether a foreign program before ours is allowed.
    pub foreign_allowed: bool,
    /// Which lines are written.
    pub log: telemetry::Control,
}
