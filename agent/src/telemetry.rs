//! Lines for people: where they go, and what the engine's lines say.

use std::io;
use std::time::Duration;

use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, Happening, HoldReason, Level, LogLine, OnDeadline, State};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::report::state_and_reason;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For terminals and journals.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// The log cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be read.
    #[error("log filter {filter:?}: {reason}")]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Another log is set up already.
    #[error("the log is set up already")]
    Twice,
}

/// Sets the log up for the whole process, to standard error. `filter` as in `info`, `debug,holdfast::netlink=trace`.
///
/// # Errors
/// [`TelemetryError`].
pub fn init(format: LogFormat, filter: &str) -> Result<(), TelemetryError> {
    subscriber(format, filter, io::stderr)?
        .try_init()
        .map_err(|_| TelemetryError::Twice)
}

fn subscriber<W>(
    format: LogFormat,
    filter: &str,
    writer: W,
) -> Result<Box<dyn tracing::Subscriber + Send + Sync>, TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(filter).map_err(|error| TelemetryError::Filter {
        filter: filter.to_owned(),
        reason: error.to_string(),
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer);
    Ok(match format {
        // Escape codes belong to terminals, and the journal is none.
        LogFormat::Human => Box::new(builder.with_ansi(false).finish()),
        LogFormat::Json => Box::new(
            builder
                .json()
                .flatten_event(true)
                .with_current_span(false)
                .finish(),
        ),
    })
}

/// What the engine's lines are filtered by.
const ENGINE: &str = "holdfast::engine";

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

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_engine::model::ObjectName;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: LogFormat, filter: &str, lines: &[LogLine]) -> String {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = subscriber(format, filter, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || lines.iter().for_each(log));
        let bytes = buffer.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    fn line(level: Level, what: Happening) -> LogLine {
        let name = |name: &str| ObjectName {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        };
        LogLine {
            level,
            what,
            policy: Some(name("dns")),
            consumer: Some(name("web-0")),
            ifindex: Some(7),
        }
    }

    #[test]
    fn a_line_says_what_people_search_for() {
        let text = written(
            LogFormat::Human,
            "info",
            &[
                line(Level::Info, Happening::HoldStarted(HoldReason::IdentityMissing)),
                line(
                    Level::Info,
                    Happening::HoldEnded(1_500_000_000, State::Programmed),
                ),
                line(Level::Debug, Happening::Programmed),
                line(
                    Level::Warn,
                    Happening::Failed(FailReason::MapFull, "map services is full".to_owned()),
                ),
            ],
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for (line, parts) in lines.iter().zip([
            " INFO holdfast::engine: held policy=shop/dns consumer=shop/web-0 ifindex=7 reason=\"IdentityMissing\"",
            "no longer held policy=shop/dns consumer=shop/web-0 ifindex=7 state=\"Programmed\" duration=1.5s",
            " WARN holdfast::engine: failed policy=shop/dns consumer=shop/web-0 ifindex=7 reason=\"MapFull\" \
             detail=\"map services is full\"",
        ]) {
            assert!(line.ends_with(parts), "{line}\n{parts}");
        }
    }

    #[test]
    fn json_lines_have_the_same_fields() {
        let text = written(
            LogFormat::Json,
            "info",
            &[line(
                Level::Error,
                Happening::Failed(FailReason::AttachFailed, "EPERM".to_owned()),
            )],
        );
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (field, expected) in [
            ("level", "ERROR"),
            ("message", "failed"),
            ("policy", "shop/dns"),
            ("consumer", "shop/web-0"),
            ("reason", "AttachFailed"),
            ("detail", "EPERM"),
        ] {
            assert_eq!(value[field], expected, "{text}");
        }
        assert_eq!(value["ifindex"], 7);
    }

    #[test]
    fn a_summary_is_four_numbers() {
        let summary = LogLine {
            level: Level::Info,
            what: Happening::Summary {
                programmed: 3,
                held: 2,
                failed: 1,
                pending: 0,
            },
            policy: None,
            consumer: None,
            ifindex: None,
        };
        let text = written(LogFormat::Human, "info", &[summary]);
        assert!(
            text.ends_with("intents on this node programmed=3 held=2 failed=1 pending=0\n"),
            "{text}"
        );
    }

    #[test]
    fn a_filter_that_makes_no_sense_is_refused() {
        assert!(subscriber(LogFormat::Human, "holdfast=loud", io::sink).is_err());
    }
}
