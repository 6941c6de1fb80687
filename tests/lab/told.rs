//! What a node tells: metrics and report, read as others read them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use serde::Deserialize;

use crate::Space;

/// Where the agent listens inside its node.
pub const PORT: u16 = 9643;

/// How often the sampler looks.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// An answer to an HTTP request.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Body.
    pub body: String,
}

/// Asks the agent of the namespace that the calling thread is in.
///
/// # Errors
/// When it does not answer.
pub fn get(path: &str) -> anyhow::Result<Answer> {
    get_from(PORT, path)
}

/// Asks whoever listens at this port in the namespace that the calling thread is in.
///
/// # Errors
/// When nobody answers.
pub fn get_from(port: u16, path: &str) -> anyhow::Result<Answer> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("nobody listens")?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    // By the old version the whole body comes in one piece.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: lab\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("half an answer")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Answer {
        status: status.context("no status")?,
        body: body.to_owned(),
    })
}

/// One scrape: value by series, as the text format spells it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads the text format.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Self(
            lines
                .filter_map(|line| {
                    let (series, value) = line.rsplit_once(' ')?;
                    Some((series.to_owned(), value.parse().ok()?))
                })
                .collect(),
        )
    }

    /// The value of the series of this name that has all these labels; their sum if there are several. None: there is
    /// no such series.
    #[must_use]
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}=\"{value}\""))
            .collect();
        let matching = self.0.iter().filter(|(series, _)| {
            let (found, rest) = series.split_once('{').unwrap_or((series, ""));
            found == name && labels.iter().all(|label| rest.contains(label))
        });
        matching.map(|(_, value)| *value).reduce(|a, b| a + b)
    }

    /// The same as a whole number; 0 if there is no such series.
    #[must_use]
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.get(name, labels).unwrap_or_default() as u64
    }

    /// How many series there are.
    #[must_use]
    pub fn series(&self) -> usize {
        self.0.len()
    }

    /// How many series have this label.
    #[must_use]
    pub fn with(&self, label: &str, value: &str) -> usize {
        let label = format!("{label}=\"{value}\"");
        self.0.keys().filter(|series| series.contains(&label)).count()
    }

    /// Intents held for this reason.
    #[must_use]
    pub fn held(&self, reason: &str) -> u64 {
        self.count("holdfast_held_intents", &[("reason", reason)])
    }

    /// Holds begun, of all reasons.
    #[must_use]
    pub fn holds_begun(&self) -> u64 {
        self.count("holdfast_holds_total", &[])
    }

    /// Intents in this state.
    #[must_use]
    pub fn intents(&self, state: &str) -> u64 {
        self.count("holdfast_intents", &[("state", state)])
    }
}

/// `report.yaml`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Report {
    /// Node.
    pub node: String,
    /// Life of its pins.
    pub epoch: String,
    /// Policies that select a consumer here.
    #[serde(default)]
    pub policies: Vec<PolicyLine>,
}

/// A policy in the report.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyLine {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Uid.
    pub uid: String,
    /// Generation.
    pub generation: u64,
    /// State.
    pub state: String,
    /// Its intents.
    pub intents: Intents,
    /// Start of state and reason.
    pub since: String,
    /// Start of the oldest hold.
    #[serde(default)]
    pub held_since: Option<String>,
    /// Why.
    #[serde(default)]
    pub reason: Option<String>,
    /// Why, for people.
    #[serde(default)]
    pub message: Option<String>,
    /// What the kernel serves, if that is another generation.
    #[serde(default)]
    pub serving: Option<Serving>,
}

/// Another generation that the kernel serves.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Serving {
    /// It.
    pub generation: u64,
    /// Since when.
    pub since: String,
}

/// Intents of a policy by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Intents {
    /// All.
    pub desired: u64,
    /// Programmed.
    pub programmed: u64,
    /// Held.
    pub held: u64,
    /// Failed.
    pub failed: u64,
    /// Pending.
    pub pending: u64,
}

impl Report {
    /// Reads the file; none if there is none yet.
    ///
    /// # Errors
    /// When it cannot be read or makes no sense: it is replaced as a whole, so that this never is half a report.
    pub fn read(path: &std::path::Path) -> anyhow::Result<Option<Self>> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_saphyr::from_str(&text)
                .map(Some)
                .with_context(|| format!("the report makes no sense:\n{text}")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context("cannot read the report"),
        }
    }

    /// What it says of this policy.
    #[must_use]
    pub fn policy(&self, name: &str) -> Option<&PolicyLine> {
        self.policies.iter().find(|policy| policy.name == name)
    }
}

impl PolicyLine {
    /// State, and reason if there is one: `Held(NoCarrier)`.
    #[must_use]
    pub fn verdict(&self) -> String {
        match &self.reason {
            Some(reason) => format!("{}({reason})", self.state),
            None => self.state.clone(),
        }
    }
}

/// Metrics and report of one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// The scrape; none if the agent did not answer.
    pub metrics: Option<Metrics>,
    /// The report; none if there is none.
    pub report: Option<Report>,
}

/// Reads metrics and report every 20 ms.
#[derive(Debug)]
pub struct Sampler {
    samples: Arc<Mutex<Vec<Sample>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Sampler {
    /// Starts it.
    #[must_use]
    pub fn start(space: &Space, report: PathBuf) -> Self {
        let samples = Arc::<Mutex<Vec<Sample>>>::default();
        let stop = Arc::<AtomicBool>::default();
        let thread = std::thread::spawn({
            let (samples, stop, space) = (Arc::clone(&samples), Arc::clone(&stop), space.clone());
            move || {
                space.enter().context("cannot enter a namespace")?;
                let mut next = Instant::now();
                while !stop.load(Ordering::Relaxed) {
                    let metrics = get("/metrics").ok().map(|answer| Metrics::parse(&answer.body));
                    let sample = Sample {
                        at: Instant::now(),
                        metrics,
                        report: Report::read(&report)?,
                    };
                    samples
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(sample);
                    next += SAMPLE_EVERY;
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                }
                Ok(())
            }
        });
        Self {
            samples,
            stop,
            thread: Some(thread),
        }
    }

    /// Samples since this moment.
    #[must_use]
    pub fn since(&self, moment: Instant) -> Vec<Sample> {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let from = samples.partition_point(|sample| sample.at < moment);
        samples[from..].to_vec()
    }

    /// Ends it.
    ///
    /// # Errors
    /// When it had to give up: half a report, for instance.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take() {
            Some(thread) => thread.join().map_err(|_| anyhow!("the sampler panicked"))?,
            None => Ok(()),
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_found_by_their_labels() {
        let metrics = Metrics::parse(
            "# HELP holdfast_holds_total Holds begun\n\
             holdfast_holds_total{reason=\"NoCarrier\"} 2\n\
             holdfast_holds_total{reason=\"IdentityMissing\"} 3\n\
             holdfast_holds 9\n",
        );
        assert_eq!(
            metrics.get("holdfast_holds_total", &[("reason", "NoCarrier")]),
            Some(2.0)
        );
        assert_eq!(metrics.holds_begun(), 5);
        assert_eq!(
            metrics.get("holdfast_holds_total", &[("reason", "InterfaceDown")]),
            None
        );
    }
}
