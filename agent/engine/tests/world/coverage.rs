//! Which situations a run has seen. A cell that stays empty is a part of the engine that nobody looked at.

use std::collections::BTreeMap;
use std::fmt::Write;

use holdfast_engine::model::{FailReason, HoldReason, State};

use crate::kernel::OpKind;

/// What is told, for the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EventKind {
    Policy,
    PolicyGone,
    Attachment,
    AttachmentGone,
    Link,
    LinkGone,
    LinkDump,
    Locals,
    Row,
    NoRow,
    Unreadable,
    Poke,
    Done,
    Failed,
    Tick,
    Crash,
}

impl EventKind {
    pub(crate) const ALL: [Self; 16] = [
        Self::Policy,
        Self::PolicyGone,
        Self::Attachment,
        Self::AttachmentGone,
        Self::Link,
        Self::LinkGone,
        Self::LinkDump,
        Self::Locals,
        Self::Row,
        Self::NoRow,
        Self::Unreadable,
        Self::Poke,
        Self::Done,
        Self::Failed,
        Self::Tick,
        Self::Crash,
    ];
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    Done,
    Error,
    /// Answered after the engine had given it up.
    Late,
    /// Never answered.
    Never,
    /// The agent died before it happened.
    CrashBefore,
    /// The agent died after it had happened, and before the answer was taken in.
    CrashAfter,
}

impl End {
    const ALL: [Self; 6] = [
        Self::Done,
        Self::Error,
        Self::Late,
        Self::Never,
        Self::CrashBefore,
        Self::CrashAfter,
    ];
}

/// Stages of a producer set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The first set is selected.
    First,
    /// Another set is written beside the one that is selected.
    Prepared,
    /// It is proven.
    Proven,
    /// It is selected.
    Switched,
    /// An entry that is new in its generation opens.
    Granted,
    /// Flows stay on a producer that left.
    Draining,
    /// The old set is gone.
    Drained,
    /// It waits for a ready producer.
    Waiting,
    /// It waits for longer than the deadline and the old set serves on.
    KeptOld,
    /// It waited for its deadline and the old set was cut off.
    Cut,
    /// The last producer went.
    Emptied,
    /// A set comes back where there was none.
    Refilled,
    /// The agent died while it waited.
    CrashWhileWaiting,
    /// The agent died between the first write of a set and its selection.
    CrashWhilePrepared,
    /// The agent died while flows drained.
    CrashWhileDraining,
}

impl Stage {
    const ALL: [Self; 15] = [
        Self::First,
        Self::Prepared,
        Self::Proven,
        Self::Switched,
        Self::Granted,
        Self::Draining,
        Self::Drained,
        Self::Waiting,
        Self::KeptOld,
        Self::Cut,
        Self::Emptied,
        Self::Refilled,
        Self::CrashWhileWaiting,
        Self::CrashWhilePrepared,
        Self::CrashWhileDraining,
    ];
}

/// The table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage {
    events: BTreeMap<(State, EventKind), u64>,
    ends: BTreeMap<(OpKind, End), u64>,
    stages: BTreeMap<Stage, u64>,
}

/// All states that an intent can be in.
fn states() -> Vec<State> {
    let mut states = vec![State::Pending, State::Programmed];
    states.extend(HoldReason::ALL.map(State::Held));
    states.extend(FailReason::ALL.map(State::Failed));
    states
}

/// Why a cell can never be filled.
fn impossible_event(state: State, event: EventKind) -> Option<&'static str> {
    match (state, event) {
        (State::Failed(FailReason::RegistryUnreadable), EventKind::LinkGone) => None,
        _ => None,
    }
}

fn impossible_end(kind: OpKind, end: End) -> Option<&'static str> {
    match (kind, end) {
        (OpKind::ReadRegistry, End::CrashBefore | End::CrashAfter) => Some("a read leaves nothing behind"),
        _ => None,
    }
}

impl Coverage {
    pub(crate) fn event(&mut self, state: State, event: EventKind) {
        *self.events.entry((state, event)).or_default() += 1;
    }

    pub(crate) fn end(&mut self, kind: OpKind, end: End) {
        *self.ends.entry((kind, end)).or_default() += 1;
    }

    pub(crate) fn stage(&mut self, stage: Stage) {
        *self.stages.entry(stage).or_default() += 1;
    }

    /// Adds what another run saw.
    pub(crate) fn add(&mut self, other: &Self) {
        for (cell, count) in &other.events {
            *self.events.entry(*cell).or_default() += count;
        }
        for (cell, count) in &other.ends {
            *self.ends.entry(*cell).or_default() += count;
        }
        for (cell, count) in &other.stages {
            *self.stages.entry(*cell).or_default() += count;
        }
    }

    /// Cells that were never filled although they can be.
    pub(crate) fn empty(&self) -> Vec<String> {
        let mut empty = Vec::new();
        for state in states() {
            for event in EventKind::ALL {
                if !self.events.contains_key(&(state, event)) && impossible_event(state, event).is_none() {
                    empty.push(format!("{state:?} x {event:?}"));
                }
            }
        }
        for kind in OpKind::ALL {
            for end in End::ALL {
                if !self.ends.contains_key(&(kind, end)) && impossible_end(kind, end).is_none() {
                    empty.push(format!("{kind:?} x {end:?}"));
                }
            }
        }
        for stage in Stage::ALL {
            if !self.stages.contains_key(&stage) {
                empty.push(format!("switch stage {stage:?}"));
            }
        }
        empty
    }

    /// The table as text.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |head: &str, cells: Vec<String>| {
            let _ = write!(text, "{head:32}");
            for cell in cells {
                let _ = write!(text, "{cell:>15}");
            }
            text.push('\n');
        };
        row(
            "state x event",
            EventKind::ALL.map(|event| format!("{event:?}")).into(),
        );
        for state in states() {
            let cells = EventKind::ALL.map(|event| match impossible_event(state, event) {
                Some(_) => "-".into(),
                None => self.events.get(&(state, event)).copied().unwrap_or(0).to_string(),
            });
            row(&format!("{state:?}"), cells.into());
        }
        row("effect x end", End::ALL.map(|end| format!("{end:?}")).into());
        for kind in OpKind::ALL {
            let cells = End::ALL.map(|end| match impossible_end(kind, end) {
                Some(_) => "-".into(),
                None => self.ends.get(&(kind, end)).copied().unwrap_or(0).to_string(),
            });
            row(&format!("{kind:?}"), cells.into());
        }
        for stage in Stage::ALL {
            let count = self.stages.get(&stage).copied().unwrap_or(0);
            row(&format!("switch stage {stage:?}"), vec![count.to_string()]);
        }
        text
    }
}
