//! What the engine's lines say.

use std::time::Duration;

use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, Happening, HoldReason, Level, LogLine, OnDeadline, State};

use crate::report::state_and_reason;

/// What the engine's lines are filtered by.
pub(super) const ENGINE: &str = "holdfast::engine";

/// An event whose level is known only at run time.
macro_rules! event {
    ($level:expr, $($rest:tt)+) => {
        match $level {
            Level::Debug => tracing::debug!(target: ENGINE, $($rest)+),
            Level::Info => tracing::info!(target: ENGINE, $($rest)+),
            Level::Warn => tracing::warn!(target: ENGINE, $($rest)+),
            Level::Error => tracing::error!(target: ENGINE, $($rest)+),
        }
    };
}

/// What a line of the engine says, in the fields that people search for.
#[derive(Debug, Default)]
struct Said<'a> {
    what: &'static str,
    reason: Option<&'static str>,
    state: Option<&'static str>,
    duration: Option<Duration>,
    entries: Option<u32>,
    kind: Option<&'static str>,
    message: Option<&'a str>,
}

/// Writes one line of the engine.
pub fn log(line: &LogLine) {
    if let Happening::Summary {
        programmed,
        held,
        failed,
        pending,
    } = line.what
    {
        event!(
            line.level,
            programmed,
            held,
            failed,
            pending,
            "intents on this node"
        );
        return;
    }
    let said = said(&line.what);
    event!(
        line.level,
        policy = line.policy.as_ref().map(display),
        consumer = line.consumer.as_ref().map(display),
        ifindex = line.ifindex,
        reason = said.reason,
        state = said.state,
        duration = said.duration.map(tracing::field::debug),
        entries = said.entries,
        kind = said.kind,
        detail = said.message,
        "{}",
        said.what
    );
}

fn said(what: &Happening) -> Said<'_> {
    match what {
        Happening::HoldStarted(reason) => Said {
            what: "held",
            reason: Some(hold_reason(*reason)),
            ..Said::default()
        },
        Happening::HoldChanged(reason) => Said {
            what: "still held, for another reason",
            reason: Some(hold_reason(*reason)),
            ..Said::default()
        },
        Happening::HoldEnded(nanos, state) => Said {
            what: "no longer held",
            reason: match state {
                State::Failed(reason) => Some(fail_reason(*reason)),
                _ => None,
            },
            state: Some(state_and_reason(*state).0),
            duration: Some(Duration::from_nanos(*nanos)),
            ..Said::default()
        },
        Happening::Programmed => Said {
            what: "programmed",
            ..Said::default()
        },
        Happening::Failed(reason, message) => Said {
            what: "failed",
            reason: Some(fail_reason(*reason)),
            message: Some(message),
            ..Said::default()
        },
        Happening::Recovered => Said {
            what: "no longer failed",
            ..Said::default()
        },
        Happening::SwitchOverdue(OnDeadline::KeepOld) => Said {
            what: "a switch has waited for its deadline: the old producers go on serving",
            ..Said::default()
        },
        Happening::SwitchOverdue(OnDeadline::Cut) => Said {
            what: "a switch has waited for its deadline: the old producers are cut off",
            ..Said::default()
        },
        Happening::Removed(entries) => Said {
            what: "a consumer is no longer selected: its entries are removed",
            entries: Some(*entries),
            ..Said::default()
        },
        Happening::PolicyRemoved(entries) => Said {
            what: "a policy is gone: its entries are removed",
            entries: Some(*entries),
            ..Said::default()
        },
        Happening::Summary { .. } => Said::default(),
        Happening::RegistryUnreadable(message) => Said {
            what: "an identity could not be read: what was known stays",
            message: Some(message),
            ..Said::default()
        },
        Happening::Drift(kind, message) => Said {
            what: match kind {
                Drift::Foreign => "the chain of a device was changed",
                _ => "not as it was left: it is put right",
            },
            kind: Some(kind.label()),
            message: Some(message),
            ..Said::default()
        },
        Happening::MoreDrift(more) => Said {
            what: "and more was not as it was left",
            entries: Some(*more),
            ..Said::default()
        },
        Happening::AuditUnreadable(message) => Said {
            what: "an audit could not look at something: what was known stays",
            message: Some(message),
            ..Said::default()
        },
        Happening::CleanupFailed(message) => Said {
            what: "a cleanup failed and will be tried again",
            message: Some(message),
            ..Said::default()
        },
    }
}

const fn hold_reason(reason: HoldReason) -> &'static str {
    match reason {
        HoldReason::InterfaceMissing => "InterfaceMissing",
        HoldReason::InterfaceDown => "InterfaceDown",
        HoldReason::NoCarrier => "NoCarrier",
        HoldReason::IdentityMissing => "IdentityMissing",
        HoldReason::IdentityMismatch => "IdentityMismatch",
        HoldReason::NoReadyProducer => "NoReadyProducer",
    }
}

const fn fail_reason(reason: FailReason) -> &'static str {
    match reason {
        FailReason::AttachFailed => "AttachFailed",
        FailReason::MapWriteFailed => "MapWriteFailed",
        FailReason::MapFull => "MapFull",
        FailReason::ProofFailed => "ProofFailed",
        FailReason::RegistryUnreadable => "RegistryUnreadable",
        FailReason::Conflict => "Conflict",
        FailReason::Invalid => "Invalid",
        FailReason::Unsupported => "Unsupported",
    }
}
