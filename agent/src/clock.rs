//! The two clocks of the node, read together.

use holdfast_engine::model::{Boot, Now};

/// Tells the time. The real one is [`System`]; tests bring their own.
pub trait Clock: Send + Sync + 'static {
    /// Boot clock and wall clock.
    fn now(&self) -> Now;
}

/// `CLOCK_BOOTTIME` and `CLOCK_REALTIME`.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Clock for System {
    fn now(&self) -> Now {
        let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        // Neither clock is ever negative on a running Linux.
        let nanos = u64::try_from(boot.tv_sec)
            .unwrap_or(0)
            .saturating_mul(Boot::SECOND)
            + u64::try_from(boot.tv_nsec).unwrap_or(0);
        let wall_ms = wall.tv_sec * 1_000 + wall.tv_nsec / 1_000_000;
        #[cfg(any(test, feature = "chaos"))]
        let wall_ms = wall_ms + faults::WALL_AHEAD_MS.load(std::sync::atomic::Ordering::Relaxed);
        Now {
            boot: Boot(nanos),
            wall_ms,
        }
    }
}

/// Faults on purpose, for tests.
#[cfg(any(test, feature = "chaos"))]
pub(crate) mod faults {
    use std::sync::atomic::AtomicI64;

    /// How far the wall clock is ahead of the right time, milliseconds: it cannot be set for one process.
    pub(crate) static WALL_AHEAD_MS: AtomicI64 = AtomicI64::new(0);
}
