//! Each alert against series of a test: it is silent, fires, resolves. And each has a runbook, of commands that there are.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use holdfast::cli::Cli;
use holdfast_tests::alerts::{Alert, Alerts, Pace, RUNBOOKS};
use holdfast_tests::codegen::in_repository;
use holdfast_tests::process::program;
use holdfast_tests::say;
use serde::Deserialize;
use serde::de::IgnoredAny;

holdfast_tests::suite!(needs [];
    every_alert_is_silent_fires_and_resolves,
    rules_are_well_formed_at_every_pace,
    every_alert_has_a_runbook_of_commands_that_there_are,
);

/// A file of `promtool test rules`, as far as it matters here.
#[derive(Deserialize)]
struct TestFile {
    tests: Vec<Scenario>,
}

#[derive(Deserialize)]
struct Scenario {
    alert_rule_test: Vec<Check>,
}

#[derive(Deserialize)]
struct Check {
    alertname: String,
    exp_alerts: Vec<IgnoredAny>,
}

fn every_alert_is_silent_fires_and_resolves() -> anyhow::Result<()> {
    let promtool = program("promtool")?;
    let alerts = Alerts::read()?.alert;
    let files = alerts
        .iter()
        .map(|alert| {
            let path = in_repository(&format!("tests/alerts/{}.yaml", alert.name));
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("{} has no test: {}", alert.name, path.display()))?;
            let file: TestFile = serde_saphyr::from_str(&text).with_context(|| alert.name.clone())?;
            is_whole(alert, &file)?;
            Ok(path)
        })
        .collect::<anyhow::Result<Vec<PathBuf>>>()?;
    let output = Command::new(promtool)
        .args(["test", "rules"])
        .args(&files)
        .output()?;
    ensure!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    say(format_args!("{} alerts", files.len()));
    Ok(())
}

/// One scenario goes the whole way, and another is silent throughout.
fn is_whole(alert: &Alert, file: &TestFile) -> anyhow::Result<()> {
    let fires = |scenario: &Scenario| -> Vec<bool> {
        let checks = scenario.alert_rule_test.iter();
        let own = checks.filter(|check| check.alertname == alert.name);
        own.map(|check| !check.exp_alerts.is_empty()).collect()
    };
    let whole = |fires: Vec<bool>| {
        let at = fires.iter().position(|fires| *fires);
        at.is_some_and(|at| at > 0 && fires.last() == Some(&false))
    };
    ensure!(
        file.tests.iter().map(fires).any(whole),
        "{}: no scenario in which it is silent, fires and resolves",
        alert.name
    );
    let silent = |fires: Vec<bool>| !fires.is_empty() && !fires.contains(&true);
    ensure!(
        file.tests.iter().map(fires).any(silent),
        "{}: no scenario in which it stays silent",
        alert.name
    );
    Ok(())
}

fn rules_are_well_formed_at_every_pace() -> anyhow::Result<()> {
    let promtool = program("promtool")?;
    let alerts = Alerts::read()?;
    let directory = tempfile::tempdir()?;
    for (scrape, divisor) in [(10, 1), (30, 1), (60, 1), (300, 1), (30, 60)] {
        let pace = Pace {
            scrape: Duration::from_secs(scrape),
            divisor,
        };
        let path = directory.path().join("rules.yaml");
        std::fs::write(&path, alerts.rules(pace)?)?;
        let output = Command::new(&promtool)
            .args(["check", "rules"])
            .arg(&path)
            .output()?;
        ensure!(
            output.status.success(),
            "{pace:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

fn every_alert_has_a_runbook_of_commands_that_there_are() -> anyhow::Result<()> {
    let alerts = Alerts::read()?.alert;
    let mut commands = 0;
    for alert in &alerts {
        let path = in_repository(&alert.runbook());
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{} has no runbook", alert.name))?;
        ensure!(
            text.starts_with(&format!("# {}\n", alert.name)),
            "{}: another title",
            alert.name
        );
        for section in ["## What it means", "## What to look at", "## What to do"] {
            ensure!(text.contains(section), "{}: no `{section}`", alert.name);
        }
        for command in commands_in(&text) {
            if let Err(error) = Cli::try_parse_from(command.split_whitespace()) {
                bail!("{}: `{command}`: {error}", alert.name);
            }
            commands += 1;
        }
    }
    let files = std::fs::read_dir(in_repository(RUNBOOKS))?.count();
    ensure!(
        files == alerts.len(),
        "{files} runbooks for {} alerts",
        alerts.len()
    );
    say(format_args!("{files} runbooks, {commands} commands"));
    Ok(())
}

/// The commands of ours in a page, in its code blocks and within its lines, without what they are piped into.
fn commands_in(page: &str) -> impl Iterator<Item = &str> {
    let mut block = false;
    page.lines()
        .flat_map(move |line| {
            let fence = line.starts_with("```");
            block ^= fence;
            // Every other piece between two backticks is code.
            let pieces: Vec<&str> = match (block, fence) {
                (_, true) => Vec::new(),
                (true, false) => vec![line],
                (false, false) => line.split('`').skip(1).step_by(2).collect(),
            };
            pieces
        })
        .filter(|code| code.starts_with("holdfast "))
        .filter_map(|code| code.split(['|', '#', '>']).next())
}
