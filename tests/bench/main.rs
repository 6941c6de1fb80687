//! Measures Holdfast, in the kernel beside what else there is, and prints a table. `cargo xtask bench` builds and runs it.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool talks to people"
)]

mod asm;
mod classifier;
mod packets;
mod path;
mod plane;
mod report;
mod scene;
mod scrape;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Measures Holdfast.
#[derive(Debug, Parser)]
struct Arguments {
    /// What is measured.
    suite: Suite,
    /// Few rounds of less: shows that it works, measures little.
    #[arg(long)]
    smoke: bool,
    /// Also writes what was found as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Which sources this was built from.
    #[arg(long, default_value = "unknown")]
    revision: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Suite {
    /// What a packet costs in the program, by test runs.
    Classifier,
    /// What a packet costs from socket to socket, beside other ways through a node.
    Path,
    /// What a scrape of a large node costs.
    Scrape,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    pin().context("cannot stay on one CPU")?;
    let report = match arguments.suite {
        Suite::Classifier => {
            use classifier::Scale;
            let scale = if arguments.smoke {
                &Scale::SMOKE
            } else {
                &Scale::FULL
            };
            classifier::measure(scale, arguments.revision)?
        }
        Suite::Path => {
            use path::Scale;
            let scale = if arguments.smoke {
                &Scale::SMOKE
            } else {
                &Scale::FULL
            };
            path::measure(scale, arguments.revision)?
        }
        Suite::Scrape => scrape::measure(if arguments.smoke { 2 } else { 30 }, arguments.revision)?,
    };
    println!("{report}");
    if let Some(path) = arguments.json {
        std::fs::write(&path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let far_off = report.far_off(arguments.smoke);
    for line in &far_off {
        eprintln!("off by a factor of two: {line}");
    }
    Ok(if far_off.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// From now on everything happens on one CPU, the last of those that there are: threads that are started inherit it.
fn pin() -> anyhow::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let last = (0..CpuSet::MAX_CPU)
        .rev()
        .find(|cpu| allowed.is_set(*cpu))
        .context("no CPU is allowed")?;
    let mut one = CpuSet::new();
    one.set(last);
    sched_setaffinity(None, &one)?;
    Ok(())
}
