//! Which situations a run has seen. A cell that stays empty is a part of the engine that nobody looked at; one that
//! can never be filled says why.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, HoldReason, State};

use crate::kernel::OpKind;

/// What is told, for the table. The two events that begin a life are not in it: there is no intent yet.
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
    /// A saved set is complete.
    Saved,
    /// The source is.
    Complete,
    /// An audit found nothing.
    Audited,
    /// An audit found something.
    Drifted,
    DevicesDrifted,
    HooksChanged,
    HooksUnknown,
    Crash,
}

impl EventKind {
    pub(crate) const ALL: [Self; 23] = [
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
        Self::Saved,
        Self::Complete,
        Self::Audited,
        Self::Drifted,
        Self::DevicesDrifted,
        Self::HooksChanged,
        Self::HooksUnknown,
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
    drifts: BTreeMap<Drift, u64>,
}

/// All states that an intent can be in.
fn states() -> Vec<State> {
    let mut states = vec![State::Pending, State::Programmed];
    states.extend(HoldReason::ALL.map(State::Held));
    states.extend(FailReason::ALL.map(State::Failed));
    states
}

/// Why a cell can never be filled.
const fn impossible_event(state: State, event: EventKind) -> Option<&'static str> {
    const REFUSED: FailReason = FailReason::Invalid;
    match (state, event) {
        (State::Pending | State::Failed(REFUSED | FailReason::Unsupported | FailReason::Conflict), _) => None,
        (_, EventKind::Saved) => Some("until a set is complete, an intent is Pending or refused"),
        _ => None,
    }
}

const fn impossible_end(kind: OpKind, end: End) -> Option<&'static str> {
    match (kind, end) {
        (OpKind::ReadRegistry | OpKind::AskLink | OpKind::Audit | OpKind::DumpLinks, End::CrashAfter) => {
            Some("a look leaves nothing behind: whether it was before the crash or not makes no difference")
        }
        (OpKind::AskLink | OpKind::Audit | OpKind::DumpLinks, End::Late) => {
            Some("nothing is given up if it is not answered in time")
        }
        (OpKind::AskLink | OpKind::DumpLinks, End::Never) => {
            Some("a netlink socket that does not answer is opened anew")
        }
        (OpKind::DumpLinks, End::Error) => Some("a dump that fails is taken again"),
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

    pub(crate) fn drift(&mut self, kind: Drift) {
        *self.drifts.entry(kind).or_default() += 1;
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
        for (cell, count) in &other.drifts {
            *self.drifts.entry(*cell).or_default() += count;
        }
    }

    /// All cells that can be filled, and how often they were.
    fn cells(&self) -> Vec<(String, u64)> {
        let mut cells = Vec::new();
        for state in states() {
            for event in EventKind::ALL {
                if impossible_event(state, event).is_none() {
                    let count = self.events.get(&(state, event)).copied().unwrap_or(0);
                    cells.push((format!("{state:?} x {event:?}"), count));
                }
            }
        }
        for kind in OpKind::ALL {
            for end in End::ALL {
                if impossible_end(kind, end).is_none() {
                    let count = self.ends.get(&(kind, end)).copied().unwrap_or(0);
                    cells.push((format!("{kind:?} x {end:?}"), count));
                }
            }
        }
        for stage in Stage::ALL {
            let count = self.stages.get(&stage).copied().unwrap_or(0);
            cells.push((format!("switch stage {stage:?}"), count));
        }
        for kind in Drift::ALL {
            let count = self.drifts.get(&kind).copied().unwrap_or(0);
            cells.push((format!("drift {kind:?}"), count));
        }
        cells
    }

    /// Cells that were never filled although they can be.
    pub(crate) fn empty(&self) -> Vec<String> {
        let empty = self.cells().into_iter().filter(|(_, count)| *count == 0);
        empty.map(|(cell, _)| cell).collect()
    }

    /// The cells that were filled least often.
    pub(crate) fn rarest(&self, count: usize) -> String {
        let mut cells = self.cells();
        cells.sort_by_key(|(_, count)| *count);
        let rarest = cells
            .iter()
            .take(count)
            .map(|(cell, count)| format!("{cell} {count}"));
        format!(
            "{} cells, the rarest: {}",
            cells.len(),
            rarest.collect::<Vec<_>>().join(", ")
        )
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
        let mut reasons = BTreeSet::new();
        let mut cell = |impossible: Option<&'static str>, count: Option<&u64>| match impossible {
            Some(reason) => {
                reasons.insert(reason);
                "-".to_owned()
            }
            None => count.copied().unwrap_or(0).to_string(),
        };
        row(
            "state x event",
            EventKind::ALL.map(|event| format!("{event:?}")).into(),
        );
        for state in states() {
            let cells = EventKind::ALL
                .map(|event| cell(impossible_event(state, event), self.events.get(&(state, event))));
            row(&format!("{state:?}"), cells.into());
        }
        row("effect x end", End::ALL.map(|end| format!("{end:?}")).into());
        for kind in OpKind::ALL {
            let cells = End::ALL.map(|end| cell(impossible_end(kind, end), self.ends.get(&(kind, end))));
            row(&format!("{kind:?}"), cells.into());
        }
        for stage in Stage::ALL {
            row(
                &format!("switch stage {stage:?}"),
                vec![cell(None, self.stages.get(&stage))],
            );
        }
        for kind in Drift::ALL {
            row(
                &format!("drift {kind:?}"),
                vec![cell(None, self.drifts.get(&kind))],
            );
        }
        for reason in reasons {
            let _ = writeln!(text, "-: {reason}");
        }
        text
    }
}
