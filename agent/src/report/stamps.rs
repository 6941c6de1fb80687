//! Wall-clock stamps of moments on the boot clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use holdfast_engine::model::Now;

/// Turns moments into wall-clock stamps: a stamp is now minus the moment's age, so that a clock that is set right
/// later puts earlier stamps right too.
///
/// The distance of the two clocks is kept until the wall clock steps: read anew each time it would jitter by a
/// millisecond, and every stamp with it. One for all who stamp (report, metrics, local API), so that they agree.
#[derive(Clone, Debug, Default)]
pub struct Stamps {
    /// Wall clock less boot clock, milliseconds.
    distance: Arc<AtomicI64>,
}

/// A step of the wall clock smaller than this is jitter.
const STEP_MS: i64 = 500;

impl Stamps {
    /// Stamps at this distance of the clocks (milliseconds), as an earlier life used it.
    #[must_use]
    pub fn resume(distance_ms: i64) -> Self {
        Self {
            distance: Arc::new(AtomicI64::new(distance_ms)),
        }
    }

    /// Looks at both clocks. Called before stamping.
    pub fn observe(&self, now: Now) {
        let seen = now.wall_ms.saturating_sub(milliseconds(now.boot.0));
        if self.distance_ms().abs_diff(seen) >= STEP_MS.unsigned_abs() {
            self.distance.store(seen, Ordering::Relaxed);
        }
    }

    /// Wall clock less boot clock, milliseconds.
    #[must_use]
    pub fn distance_ms(&self) -> i64 {
        self.distance.load(Ordering::Relaxed)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub fn wall_ms(&self, at: Now) -> i64 {
        self.distance_ms().saturating_add(milliseconds(at.boot.0))
    }

    /// As text.
    #[must_use]
    pub fn rfc3339(&self, at: Now) -> String {
        rfc3339(self.wall_ms(at))
    }
}

fn milliseconds(nanos: u64) -> i64 {
    i64::try_from(nanos / 1_000_000).unwrap_or(i64::MAX)
}

/// Milliseconds since the Unix epoch as text: UTC, three digits of the second.
#[must_use]
pub fn rfc3339(wall_ms: i64) -> String {
    match jiff::Timestamp::from_millisecond(wall_ms) {
        Ok(timestamp) => format!("{timestamp:.3}"),
        // Beyond the year 9999: a clock that is this wrong is shown as the number it gives.
        Err(_) => format!("@{wall_ms}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_engine::model::Boot;

    fn now(boot_ms: u64, wall_ms: i64) -> Now {
        Now {
            boot: Boot(boot_ms * 1_000_000),
            wall_ms,
        }
    }

    #[test]
    fn stamps_do_not_jitter_with_the_clocks() {
        let stamps = Stamps::default();
        stamps.observe(now(1_000, 1_700_000_001_000));
        let first = stamps.rfc3339(now(400, 0));
        assert_eq!(first, "2023-11-14T22:13:20.400Z");
        stamps.observe(now(2_000, 1_700_000_002_001));
        stamps.observe(now(3_000, 1_700_000_002_999));
        assert_eq!(stamps.rfc3339(now(400, 0)), first);
    }

    #[test]
    fn a_clock_that_is_put_right_puts_stamps_right() {
        let stamps = Stamps::default();
        stamps.observe(now(1_000, 1_700_000_001_000));
        stamps.observe(now(2_000, 1_700_000_602_000));
        assert_eq!(stamps.rfc3339(now(400, 0)), "2023-11-14T22:23:20.400Z");
    }

    /// Every age is the difference of two stamps, and so of two moments on the boot clock.
    #[test]
    fn f47_ages_stay_right_whatever_the_wall_clock_does() {
        const BOOTED: i64 = 1_700_000_000_000;
        let minutes = |minutes: i64| minutes * 60_000;
        let mut stamps = Stamps::default();
        let mut held = None;
        // Right, ten minutes ahead, behind, a slew of less than a step, right again.
        for (boot_ms, wrong) in [
            (100_000, 0),
            (200_000, minutes(10)),
            (300_000, minutes(-10)),
            (400_000, minutes(-10) + 200),
            (500_000, 0),
        ] {
            // Another life of the agent begins where this one was.
            stamps = Stamps::resume(stamps.distance_ms());
            let at = now(boot_ms, BOOTED + boot_ms as i64 + wrong);
            stamps.observe(at);
            let since = *held.get_or_insert(at);
            assert_eq!(
                stamps.wall_ms(at) - stamps.wall_ms(since),
                boot_ms as i64 - 100_000
            );
            assert!((stamps.wall_ms(at) - at.wall_ms).abs() < STEP_MS, "{boot_ms}");
        }
    }

    #[test]
    fn whole_seconds_have_their_digits_too() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(i64::MAX), format!("@{}ms", i64::MAX));
    }
}
