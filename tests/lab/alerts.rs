//! The alerts: one source, and the rules that are made from it for a scrape interval, or for a test in fast motion.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, bail};
use holdfast::driver::Histogram;
use serde::Deserialize;

/// Where the source is, from the root of the repository.
pub const SOURCE: &str = "deploy/monitoring/alerts.toml";
/// Where the runbooks are.
pub const RUNBOOKS: &str = "deploy/monitoring/runbooks";

/// No range is shorter than so many scrapes: with fewer, one that fails says too much.
const SCRAPES: u32 = 10;

/// How fast time goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time between scrapes, before it is divided.
    pub scrape: Duration,
    /// What all times are divided by.
    pub divisor: u32,
}

impl Pace {
    /// As it is shipped.
    pub const SHIPPED: Self = Self {
        scrape: Duration::from_secs(30),
        divisor: 1,
    };

    /// A time at this pace.
    #[must_use]
    pub fn time(self, time: Duration) -> Duration {
        time / self.divisor
    }

    fn range(self, range: Duration) -> Duration {
        range.max(self.scrape * SCRAPES)
    }
}

/// The source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alerts {
    /// Recording rules, in their order.
    pub record: Vec<Record>,
    /// Alerts.
    pub alert: Vec<Alert>,
}

/// A recording rule.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Name of the new series.
    pub name: String,
    /// What it is.
    pub expr: String,
}

/// An alert.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alert {
    /// Its name, also of its runbook and of its test.
    pub name: String,
    /// `critical` wakes somebody, `warning` waits for the morning.
    pub severity: Severity,
    /// How long it must be so before it fires.
    #[serde(rename = "for")]
    pub hold_off: Option<String>,
    /// How long it goes on firing after it is no longer so.
    pub keep_firing_for: Option<String>,
    /// When it is so.
    pub expr: String,
    /// In a line.
    pub summary: String,
    /// What it means.
    pub description: String,
}

/// See [`Alert::severity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Traffic is wrong, or nobody would know.
    Critical,
    /// It can wait.
    Warning,
}

impl Severity {
    const fn label(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
        }
    }
}

impl Alert {
    /// Whether it is about series of the controller.
    #[must_use]
    pub fn is_the_controllers(&self) -> bool {
        self.expr.contains("holdfast_controller_")
    }

    /// Its runbook, from the root of the repository.
    #[must_use]
    pub fn runbook(&self) -> String {
        format!("{RUNBOOKS}/{}.md", self.name)
    }
}

impl Alerts {
    /// Reads the source of this repository.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn read() -> anyhow::Result<Self> {
        let path = crate::codegen::in_repository(SOURCE);
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).context(SOURCE)
    }

    /// A rules file of Prometheus.
    ///
    /// # Errors
    /// When an expression names a time that is none.
    pub fn rules(&self, pace: Pace) -> anyhow::Result<String> {
        let mut text = format!("{HEAD}groups:\n");
        self.groups(pace, "", &mut text)?;
        Ok(text)
    }

    /// The same as an object for the Prometheus operator.
    ///
    /// # Errors
    /// When an expression names a time that is none.
    pub fn object(&self, pace: Pace) -> anyhow::Result<String> {
        let mut text = format!("{HEAD}{OBJECT}");
        self.groups(pace, "    ", &mut text)?;
        Ok(text)
    }

    fn groups(&self, pace: Pace, indent: &str, text: &mut String) -> anyhow::Result<()> {
        let interval = in_words(pace.time(pace.scrape));
        let mut lines = vec![
            "- name: holdfast".to_owned(),
            format!("  interval: {interval}"),
            "  rules:".to_owned(),
        ];
        for record in &self.record {
            lines.push(format!("  - record: {}", record.name));
            lines.extend(block(
                &expression(&record.expr, pace).context(record.name.clone())?,
            ));
        }
        for alert in &self.alert {
            lines.push(format!("  - alert: {}", alert.name));
            lines.extend(block(&expression(&alert.expr, pace).context(alert.name.clone())?));
            for (key, time) in [
                ("for", &alert.hold_off),
                ("keep_firing_for", &alert.keep_firing_for),
            ] {
                if let Some(time) = time {
                    lines.push(format!("    {key}: {}", in_words(pace.time(duration(time)?))));
                }
            }
            lines.push("    labels:".to_owned());
            lines.push(format!("      severity: {}", alert.severity.label()));
            lines.push("    annotations:".to_owned());
            let runbook = alert.runbook();
            for (key, value) in [
                ("summary", alert.summary.as_str()),
                ("description", alert.description.trim()),
                ("runbook_url", runbook.as_str()),
            ] {
                lines.push(format!("      {key}: '{}'", value.replace('\'', "''")));
            }
        }
        for line in lines {
            // Writing to a string does not fail.
            _ = writeln!(text, "{indent}{line}");
        }
        Ok(())
    }
}

const HEAD: &str = "# Written by `cargo xtask codegen` from deploy/monitoring/alerts.toml. Do not edit.\n";
const OBJECT: &str = "\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: holdfast
  labels: {app.kubernetes.io/name: holdfast}
spec:
  groups:
";

/// An expression as a block of YAML.
fn block(expression: &str) -> Vec<String> {
    let lines = expression.lines().map(|line| format!("      {line}"));
    std::iter::once("    expr: |-".to_owned()).chain(lines).collect()
}

/// An expression with its times at this pace.
fn expression(source: &str, pace: Pace) -> anyhow::Result<String> {
    let mut text = String::new();
    let mut rest = source.trim();
    while let Some(at) = rest.find(['$', '[']) {
        let (before, from) = rest.split_at(at);
        text += before;
        let (open, close) = if from.starts_with('[') {
            ("[", ']')
        } else {
            ("${", '}')
        };
        // `$` without a brace is for the templates of annotations, which are none of this.
        let (inside, behind) = from
            .strip_prefix(open)
            .and_then(|inside| inside.split_once(close))
            .with_context(|| format!("{open} without its end: {from}"))?;
        if open == "[" {
            _ = write!(text, "[{}]", in_words(pace.time(pace.range(duration(inside)?))));
        } else {
            text += &parameter(inside, pace)?;
        }
        rest = behind;
    }
    Ok(text + rest)
}

fn parameter(inside: &str, pace: Pace) -> anyhow::Result<String> {
    Ok(match inside.split_once(' ') {
        Some(("samples", range)) => {
            let samples = pace.range(duration(range)?).as_millis() / pace.scrape.as_millis().max(1);
            (samples * 4 / 5).to_string()
        }
        Some(("le", time)) => bucket(pace.time(duration(time)?))?.to_string(),
        Some(_) => bail!("no such parameter: {inside}"),
        None => pace.time(duration(inside)?).as_secs_f64().to_string(),
    })
}

/// The largest bucket of the durations that is not above this, in seconds.
fn bucket(most: Duration) -> anyhow::Result<f64> {
    let bounds = Histogram::BOUNDS_NS.into_iter().map(Duration::from_nanos);
    let below = bounds.rev().find(|bound| *bound <= most);
    Ok(below.context("below all buckets")?.as_secs_f64())
}

/// As in `90s`, `5m`, `1h`.
fn duration(text: &str) -> anyhow::Result<Duration> {
    let seconds = |unit: char, seconds: u64| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(number * seconds))
    };
    seconds('s', 1)
        .or_else(|| seconds('m', 60))
        .or_else(|| seconds('h', 3_600))
        .with_context(|| format!("no time: {text}"))
}

fn in_words(time: Duration) -> String {
    let ms = time.as_millis();
    match ms {
        ms if ms > 0 && ms.is_multiple_of(3_600_000) => format!("{}h", ms / 3_600_000),
        ms if ms > 0 && ms.is_multiple_of(60_000) => format!("{}m", ms / 60_000),
        ms if ms > 0 && ms.is_multiple_of(1_000) => format!("{}s", ms / 1_000),
        ms => format!("{ms}ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Pace = Pace {
        divisor: 60,
        ..Pace::SHIPPED
    };
    const SELDOM: Pace = Pace {
        scrape: Duration::from_secs(60),
        divisor: 1,
    };

    #[test]
    fn times_go_with_the_pace() {
        let source = "min_over_time(a[5m]) > ${3m} and b >= ${samples 5m} or c{le=\"${le 30s}\"}";
        for (pace, expected) in [
            (
                Pace::SHIPPED,
                "min_over_time(a[5m]) > 180 and b >= 8 or c{le=\"30\"}",
            ),
            (FAST, "min_over_time(a[5s]) > 3 and b >= 8 or c{le=\"0.3\"}"),
            (SELDOM, "min_over_time(a[10m]) > 180 and b >= 8 or c{le=\"30\"}"),
        ] {
            assert_eq!(expression(source, pace).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for wrong in ["a[5x]", "${3}", "a > ${3m", "${most 3m}"] {
            assert!(expression(wrong, Pace::SHIPPED).is_err(), "{wrong}");
        }
    }
}
