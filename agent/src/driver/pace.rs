//! When something that costs may be done again.

use holdfast_engine::model::Boot;

/// First change at once, then not before a gap that grows with what the work costs.
#[derive(Debug)]
pub(super) struct Pace {
    least_gap: u64,
    factor: u64,
    marked: bool,
    not_before: Boot,
}

impl Pace {
    /// At least `least_gap` nanoseconds, and `factor` times the last cost, between two times.
    pub(super) const fn new(least_gap: u64, factor: u64) -> Self {
        Self {
            least_gap,
            factor,
            marked: false,
            not_before: Boot(0),
        }
    }

    /// There is something to do.
    pub(super) const fn mark(&mut self) {
        self.marked = true;
    }

    /// When it is due; none = there is nothing to do.
    pub(super) fn due(&self) -> Option<Boot> {
        self.marked.then_some(self.not_before)
    }

    /// Whether it is due now.
    pub(super) fn is_due(&self, now: Boot) -> bool {
        self.marked && now >= self.not_before
    }

    /// It was done, at the cost of so many nanoseconds.
    pub(super) fn done(&mut self, now: Boot, cost: u64) {
        self.marked = false;
        self.not_before = now.plus(self.least_gap.max(cost.saturating_mul(self.factor)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_change_goes_at_once_and_the_next_waits_for_the_gap() {
        let mut pace = Pace::new(100, 20);
        assert!(!pace.is_due(Boot(5)));
        pace.mark();
        assert!(pace.is_due(Boot(5)));
        pace.done(Boot(5), 1);
        pace.mark();
        assert_eq!(pace.due(), Some(Boot(105)));
        assert!(!pace.is_due(Boot(104)));
        assert!(pace.is_due(Boot(105)));
    }

    #[test]
    fn costly_work_is_done_less_often() {
        let mut pace = Pace::new(100, 20);
        pace.mark();
        pace.done(Boot(0), 50);
        pace.mark();
        assert_eq!(pace.due(), Some(Boot(1_000)));
    }
}
