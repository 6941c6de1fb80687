//! When something that did not work, or has not come, is looked at again: 1 s, doubling to 30 s, for ever.

use serde::{Deserialize, Serialize};

use crate::model::Boot;

/// The longest pause.
const LONGEST: u64 = 30 * Boot::SECOND;
/// Pauses from here on end at a whole second of the boot clock, so that ten thousand schedules share wake-ups.
const ROUNDED: u64 = 8 * Boot::SECOND;

/// A running schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Backoff {
    /// How many times it was due already.
    step: u32,
    /// When it is due next.
    due: Boot,
}

impl Backoff {
    /// A schedule that begins now: first due in a second.
    pub(crate) const fn begin(now: Boot) -> Self {
        Self {
            step: 0,
            due: due(now, 0),
        }
    }

    /// The schedule after it was due.
    pub(crate) const fn next(self, now: Boot) -> Self {
        let step = self.step.saturating_add(1);
        Self {
            step,
            due: due(now, step),
        }
    }

    /// When it is due.
    pub(crate) const fn due(self) -> Boot {
        self.due
    }
}

/// Pause after the given number of times, nanoseconds.
const fn pause(step: u32) -> u64 {
    let seconds = if step >= 5 { 32 } else { 1_u64 << step };
    let nanos = seconds * Boot::SECOND;
    if nanos > LONGEST { LONGEST } else { nanos }
}

const fn due(now: Boot, step: u32) -> Boot {
    let pause = pause(step);
    let due = now.plus(pause);
    if pause < ROUNDED {
        due
    } else {
        Boot(due.0.div_ceil(Boot::SECOND).saturating_mul(Boot::SECOND))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_19_attempts_come_at_1_3_7_15_31_seconds_and_then_every_30() {
        let mut backoff = Backoff::begin(Boot(0));
        let mut seen = Vec::new();
        for _ in 0..8 {
            seen.push(backoff.due().0 / Boot::SECOND);
            backoff = backoff.next(backoff.due());
        }
        assert_eq!(seen, [1, 3, 7, 15, 31, 61, 91, 121]);
    }

    #[test]
    fn rule_19_long_pauses_end_at_whole_seconds() {
        let mut backoff = Backoff::begin(Boot(300));
        assert_eq!(backoff.due(), Boot(Boot::SECOND + 300));
        for _ in 0..3 {
            backoff = backoff.next(backoff.due());
        }
        assert_eq!(backoff.due(), Boot(16 * Boot::SECOND));
    }

    proptest::proptest! {
        #[test]
        fn rule_19_pauses_never_shrink_and_stay_within_30_s_and_a_rounding(start in 0..u64::MAX / 4, steps in 1..40_u32) {
            let mut backoff = Backoff::begin(Boot(start));
            let mut last = 0;
            for _ in 0..steps {
                let now = backoff.due();
                backoff = backoff.next(now);
                let gap = backoff.due().since(now);
                proptest::prop_assert!(gap + Boot::SECOND > last);
                proptest::prop_assert!(gap < LONGEST + Boot::SECOND);
                last = gap;
            }
        }
    }
}
