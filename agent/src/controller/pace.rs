//! When a status may be written: the beginning and the end of a change at once, what is between seldom.
//!
//! A status write is sent to every agent that watches the policy, so at a thousand nodes each is a load on the API
//! server. An edit that every node has answered within half a minute costs at most four: that it began, twice how far it
//! is, and that it is done.

use super::index::Mono;
use crate::api::status::{ConditionKind, RoutePolicyStatus, Truth};

/// Least time between a write and one that only follows it.
pub const SPACING: Mono = 5 * SECOND;
const SECOND: Mono = 1_000_000_000;

/// How long after a write each further one comes that says how far a change is.
const PROGRESS: [Mono; 3] = [SPACING, 30 * SECOND, 300 * SECOND];
/// The same where the reason of a condition changes: nobody should have to wait for it.
const TURN: [Mono; 3] = [SPACING, SPACING, 30 * SECOND];

/// How many beginnings and ends may come at once in a row; then they come in [`SPACING`], too.
const BURST: Mono = 4;

/// The first pause after a write that failed; each further one is twice as long.
const FIRST_PAUSE: Mono = SECOND;
const LONGEST_PAUSE: Mono = 30 * SECOND;

/// What a status that is to be written is, beside the one that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Something that all nodes had answered is not answered any more: the beginning.
    Begins,
    /// All nodes have answered, or have answered well: the end.
    Ends,
    /// Another generation, while the one before was not answered yet.
    Overtakes,
    /// A condition says something else while some have not answered.
    Turns,
    /// More or other nodes have answered.
    Goes,
    /// All had answered, and some have another answer.
    Shifts,
}

impl Change {
    /// Between two statuses.
    #[must_use]
    pub fn between(written: &RoutePolicyStatus, wanted: &RoutePolicyStatus) -> Self {
        let open = |status: &RoutePolicyStatus| status.nodes.pending > 0;
        let another =
            (written.observed_generation, &written.origin) != (wanted.observed_generation, &wanted.origin);
        let word = |status: &RoutePolicyStatus| {
            let condition = status.condition(ConditionKind::Programmed);
            condition.map(|condition| (condition.status, condition.reason.clone()))
        };
        match (open(written), open(wanted)) {
            (false, true) => Self::Begins,
            (true, false) => Self::Ends,
            (false, false) if another || is_true(wanted) => Self::Ends,
            (false, false) => Self::Shifts,
            (true, true) if another => Self::Overtakes,
            (true, true) if word(written) != word(wanted) => Self::Turns,
            (true, true) => Self::Goes,
        }
    }
}

fn is_true(status: &RoutePolicyStatus) -> bool {
    let condition = status.condition(ConditionKind::Programmed);
    condition.is_some_and(|condition| condition.status == Truth::True)
}

/// The writes of one policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// The last one.
    last: Option<Mono>,
    /// How many have followed the beginning of the change that is going on.
    followed: usize,
    /// Up to when beginnings and ends have been spent.
    spent: Mono,
    failures: u32,
    /// Not before this, after a failure.
    paused: Mono,
}

impl Pace {
    /// When this change may be written.
    #[must_use]
    pub fn due(&self, change: Change) -> Mono {
        let Some(last) = self.last else {
            return self.paused;
        };
        let after = |waits: [Mono; 3]| last.saturating_add(waits[self.followed.min(waits.len() - 1)]);
        let due = match change {
            Change::Begins | Change::Ends => self.spent.saturating_sub((BURST - 1) * SPACING),
            Change::Overtakes | Change::Shifts => last.saturating_add(SPACING),
            Change::Turns => after(TURN),
            Change::Goes => after(PROGRESS),
        };
        due.max(self.paused)
    }

    /// It is being written.
    pub fn written(&mut self, change: Change, now: Mono) {
        self.last = Some(now);
        match change {
            Change::Begins | Change::Ends => {
                self.spent = self.spent.max(now).saturating_add(SPACING);
                self.followed = 0;
            }
            Change::Overtakes | Change::Shifts => self.followed = 0,
            Change::Turns | Change::Goes => self.followed += 1,
        }
    }

    /// The write has failed, or what it was decided on was out of date.
    pub fn failed(&mut self, now: Mono) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(6));
        self.failures += 1;
        self.paused = now.saturating_add(pause.min(LONGEST_PAUSE));
    }

    /// The write has succeeded, or the object has another version than the write that failed knew.
    pub fn unpause(&mut self) {
        self.failures = 0;
        self.paused = 0;
    }
}
