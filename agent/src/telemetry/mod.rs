//! Lines for people: where they go, how they are written, which are written, and how many.
//!
//! What the engine's lines say is in [`lines`]. Whatever a name or an error text holds, an event is one line, and its fields
//! are those that the code gave it ([`escape`]). A storm is cut, kind by kind, and the cut is said ([`limit`]).

mod escape;
mod limit;
mod lines;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tracing_log::AsLog;
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, reload};

use crate::clock::System;
use limit::{Limit, Limited};
pub use lines::log;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For terminals and journals.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// The log cannot be set up or changed.
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
    /// The thread that says what was left out cannot be started.
    #[error("cannot start the log's thread: {0}")]
    Thread(#[source] io::Error),
}

/// A filter that can be read, as in `debug` or `info,holdfast::netlink=debug`.
///
/// # Errors
/// What is wrong with it.
pub fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

/// A library that writes a line at error level for each request that fails: while a server is away, that is all the time.
/// Whoever made the request says so once, and is the one to know whether it is an error.
const CHATTY: &str = "kube_client";

fn parsed(text: &str) -> Result<EnvFilter, TelemetryError> {
    let asked_for = text.contains(CHATTY);
    let silenced = if asked_for || text.is_empty() {
        text.to_owned()
    } else {
        format!("{text},{CHATTY}=off")
    };
    EnvFilter::try_new(silenced).map_err(|error| TelemetryError::Filter {
        filter: text.to_owned(),
        reason: error.to_string(),
    })
}

/// Sets the log up for the whole process, to standard error. `filter` as in `info`, `debug,holdfast::netlink=trace`.
///
/// # Errors
/// [`TelemetryError`].
pub fn init(format: LogFormat, filter: &str) -> Result<Control, TelemetryError> {
    let limit = Limit::new(Arc::new(System));
    let (subscriber, control) = subscriber(format, filter, limit.clone(), io::stderr)?;
    subscriber.try_init().map_err(|_| TelemetryError::Twice)?;
    limit.spawn().map_err(TelemetryError::Thread)?;
    Ok(control)
}

fn subscriber<W>(
    format: LogFormat,
    filter: &str,
    limit: Limit,
    writer: W,
) -> Result<(impl tracing::Subscriber + Send + Sync, Control), TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (reloaded, handle) = reload::Layer::new(parsed(filter)?);
    let control = Control {
        configured: filter.to_owned(),
        present: Arc::new(Mutex::new(filter.to_owned())),
        apply: Arc::new(move |filter| handle.reload(filter).map_err(|error| error.to_string())),
        limit: limit.clone(),
    };
    let layer = tracing_subscriber::fmt::layer().with_writer(escape::Lines(writer));
    let layer = match format {
        // Escape codes belong to terminals, and the journal is none.
        LogFormat::Human => layer
            .with_ansi(false)
            .fmt_fields(tracing_subscriber::fmt::format::debug_fn(escape::field))
            .boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let layer = Limited { limit, layer }.with_filter(reloaded);
    Ok((Registry::default().with(layer), control))
}

/// Changes what is written while the process runs; what it was started with comes back with the next start.
#[derive(Clone)]
pub struct Control {
    configured: String,
    present: Arc<Mutex<String>>,
    apply: Arc<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>,
    limit: Limit,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("configured", &self.configured)
            .field("present", &self.present)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Controls no log: for tests of whoever passes it on.
    #[must_use]
    pub fn detached(configured: &str) -> Self {
        Self {
            configured: configured.to_owned(),
            present: Arc::new(Mutex::new(configured.to_owned())),
            apply: Arc::new(|_| Ok(())),
            limit: Limit::new(Arc::new(System)),
        }
    }

    /// The filter that the process was started with.
    #[must_use]
    pub fn configured(&self) -> &str {
        &self.configured
    }

    /// The filter that is in force.
    #[must_use]
    pub fn present(&self) -> String {
        self.present
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Puts another filter in force; none = the one that the process was started with.
    ///
    /// # Errors
    /// [`TelemetryError::Filter`].
    pub fn set(&self, filter: Option<&str>) -> Result<(), TelemetryError> {
        let filter = filter.unwrap_or(&self.configured);
        let parsed = parsed(filter)?;
        // Held over both, so that of two callers the second wins in both places.
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        (self.apply)(parsed).map_err(|reason| TelemetryError::Filter {
            filter: filter.to_owned(),
            reason,
        })?;
        // Lines of libraries that write by the `log` crate have a level of their own in front.
        tracing_log::log::set_max_level(LevelFilter::current().as_log());
        filter.clone_into(&mut present);
        Ok(())
    }

    /// Says at once what was left out so far: before the process ends.
    pub fn flush(&self) {
        self.limit.tell();
    }
}

#[cfg(test)]
mod tests;
