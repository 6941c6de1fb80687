//! A Prometheus that watches the agent of a node, in the node's own namespaces.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::alerts::{Alerts, Pace};
use crate::process::{Log, Running, confine, program};
use crate::space::ROOT;
use crate::told::{self, PORT};
use crate::{Node, Space, throughout, until};

/// Where it listens inside the node.
const LISTEN: u16 = 9090;
/// Its directory, under the node's root.
const DIRECTORY: &str = "prometheus";
/// How long it may take to start.
const START: Duration = Duration::from_secs(30);
/// What an alert may be late on a busy machine.
pub const LATE: Duration = Duration::from_secs(20);

/// A Prometheus that runs.
#[derive(Debug)]
pub struct Prometheus {
    running: Running,
    log: Log,
    space: Space,
    pace: Pace,
}

/// An alert that fires, by its labels.
pub type Firing = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Answered {
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    #[serde(default)]
    alerts: Vec<Active>,
    #[serde(default)]
    result: Vec<Sample>,
}

#[derive(Deserialize)]
struct Active {
    labels: Firing,
    state: String,
}

#[derive(Deserialize)]
struct Sample {
    value: (f64, String),
}

impl Prometheus {
    /// Starts it with the rules at this pace, and waits until it has scraped the agent.
    ///
    /// # Errors
    /// When it is not installed, or does not start.
    pub fn start(node: &Node, pace: Pace) -> anyhow::Result<Self> {
        let program = program("prometheus")?;
        let directory = node.outside(DIRECTORY)?;
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join("rules.yaml"), Alerts::read()?.rules(pace)?)?;
        let every = pace.time(pace.scrape).as_millis();
        std::fs::write(
            directory.join("prometheus.yaml"),
            format!(
                "global: {{scrape_interval: {every}ms, scrape_timeout: {every}ms, evaluation_interval: {every}ms}}\n\
                 rule_files: [rules.yaml]\n\
                 scrape_configs:\n\
                 - job_name: holdfast-agent\n  \
                   honor_labels: true\n  \
                   static_configs: [{{targets: ['127.0.0.1:{PORT}']}}]\n"
            ),
        )?;
        let inside = Path::new(ROOT).join(DIRECTORY);
        let mut command = Command::new(program);
        command
            .env_clear()
            .current_dir("/")
            .arg(format!(
                "--config.file={}",
                inside.join("prometheus.yaml").display()
            ))
            .arg(format!("--storage.tsdb.path={}", inside.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{LISTEN}"))
            .arg("--log.level=warn");
        confine(&mut command, node.space(), None);
        let log = Log::default();
        let mut prometheus = Self {
            running: Running::start(command, &log)?,
            log,
            space: node.space().clone(),
            pace,
        };
        until(START, "Prometheus scrapes the agent", || {
            if let Some(status) = prometheus.running.ended()? {
                bail!(
                    "Prometheus has ended: {status}\n{}",
                    prometheus.log.lines().join("\n")
                );
            }
            Ok((prometheus.value("up").unwrap_or_default() == Some(1.0)).then_some(()))
        })?;
        Ok(prometheus)
    }

    fn ask(&self, path: &str) -> anyhow::Result<Data> {
        let answer = self.space.inside(|| told::get_from(LISTEN, path))?;
        ensure!(
            answer.status == 200,
            "Prometheus says {}: {}",
            answer.status,
            answer.body
        );
        let answered: Answered = serde_json::from_str(&answer.body).with_context(|| answer.body.clone())?;
        Ok(answered.data)
    }

    /// The value of a query without spaces; none if there is none.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn value(&self, query: &str) -> anyhow::Result<Option<f64>> {
        let data = self.ask(&format!("/api/v1/query?query={query}"))?;
        let first = data.result.first();
        first.map(|sample| Ok(sample.value.1.parse()?)).transpose()
    }

    /// Alerts of this name that fire.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn firing(&self, alert: &str) -> anyhow::Result<Vec<Firing>> {
        let active = self.ask("/api/v1/alerts")?.alerts.into_iter();
        Ok(active
            .filter(|active| active.state == "firing")
            .map(|active| active.labels)
            .filter(|labels| labels.get("alertname").is_some_and(|name| name == alert))
            .collect())
    }

    /// The alert does not fire, for four scrapes.
    ///
    /// # Errors
    /// When it does.
    pub fn silent(&self, alert: &str) -> anyhow::Result<()> {
        let scrapes = self.pace.time(4 * self.pace.scrape);
        throughout(scrapes, format!("{alert} is silent"), || {
            self.pause();
            Ok(self.firing(alert)?.is_empty())
        })
    }

    /// Waits until the alert fires with these labels, which may take so long at a real pace.
    ///
    /// # Errors
    /// When it does not.
    pub fn until_firing(&self, alert: &str, labels: &[(&str, &str)], time: Duration) -> anyhow::Result<()> {
        until(
            self.pace.time(time) + LATE,
            format!("{alert} {labels:?} fires"),
            || {
                self.pause();
                let firing = self.firing(alert)?;
                let found = firing.iter().any(|found| {
                    labels
                        .iter()
                        .all(|(key, value)| found.get(*key).is_some_and(|found| found == value))
                });
                Ok(found.then_some(()))
            },
        )
    }

    /// Waits until the alert no longer fires, which may take so long at a real pace.
    ///
    /// # Errors
    /// When it goes on.
    pub fn until_resolved(&self, alert: &str, time: Duration) -> anyhow::Result<()> {
        until(
            self.pace.time(time) + LATE,
            format!("{alert} is resolved"),
            || {
                self.pause();
                Ok(self.firing(alert)?.is_empty().then_some(()))
            },
        )
    }

    /// Asking without a break would take the time of those who are to answer.
    fn pause(&self) {
        std::thread::sleep(self.pace.time(self.pace.scrape) / 4);
    }
}
