//! The loops of the agent and how often they fail: a loop that goes on failing is seen by its share of errors.

use std::sync::atomic::{AtomicU64, Ordering};

/// Label `loop`: the source of objects, netlink, the two rings of the program, what survives a restart, what is reported at
/// an API server, and the lanes.
pub const NAMES: [&str; 10] = [
    SOURCE, NETLINK, WAKES, LOGS, MEMORY, REPORT, "write", "attach", "prove", "audit",
];
/// Follows the objects.
pub const SOURCE: &str = "source";
/// Follows the network devices.
pub const NETLINK: &str = "netlink";
/// Reads interfaces whose identity has changed from the program.
pub const WAKES: &str = "wakes";
/// Reads debug lines of the program.
pub const LOGS: &str = "logs";
/// Keeps what survives a restart.
pub const MEMORY: &str = "memory";
/// Reports at an API server, and keeps the node's lease.
pub const REPORT: &str = "report";

/// Rounds of a loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// All.
    pub runs: u64,
    /// Those that failed.
    pub errors: u64,
}

impl Count {
    /// One more round.
    pub fn ran(&mut self, failed: bool) {
        self.runs += 1;
        self.errors += u64::from(failed);
    }
}

/// The same, counted by a loop that runs elsewhere.
#[derive(Debug, Default)]
pub struct Counter {
    runs: AtomicU64,
    errors: AtomicU64,
}

impl Counter {
    /// One more round began.
    pub fn run(&self) {
        self.runs.fetch_add(1, Ordering::Relaxed);
    }

    /// A round failed.
    pub fn error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// So far.
    #[must_use]
    pub fn read(&self) -> Count {
        Count {
            runs: self.runs.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
        }
    }
}
