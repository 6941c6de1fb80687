//! `cargo xtask bench`: builds what measures, runs it, keeps what it found.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::args::Args;
use crate::cache::BuildDir;
use crate::{bpf, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "bench",
    summary: "Measure the data plane beside what else there is, and print a table",
    help: "\
Usage: cargo xtask bench [--no-setup] [--smoke] [--json FILE] [SUITE...]

Runs as root, in namespaces of its own, within a minute a suite. Every figure is measured beside a floor or another way
to the same end, in the same process, round by round; one thing is measured twice, to show what a difference means.
On a machine that does anything else beside it, believe ratios, not nanoseconds.

  classifier   what a packet costs in the BPF program, by test runs of it, beside single look-ups
  path         what a packet costs from socket to socket, beside kernel routing, nftables and a bare hand-over
  scrape       what a scrape of a node with 10,000 policies costs, none of them well

  SUITE        only these (all of them if none is named)
  --smoke      few rounds of less: shows that it works, measures little
  --json FILE  where the result goes (for one suite); else <build directory>/bench/SUITE.json
  --no-setup   install nothing; for people who manage their machine themselves

Exits with 1 if a figure is off its goal by more than a factor of two.",
    run,
};

/// As the program names them.
const SUITES: [&str; 3] = ["classifier", "path", "scrape"];

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    let smoke = args.switch("--smoke");
    let json = args.value("--json")?.map(std::path::absolute).transpose()?;
    let mut suites = args.rest()?;
    if let Some(unknown) = suites.iter().find(|suite| !SUITES.contains(&suite.as_str())) {
        bail!("there is no suite `{unknown}`: {}", SUITES.join(", "));
    }
    if suites.is_empty() {
        suites = SUITES.map(str::to_owned).into();
    }
    if json.is_some() && suites.len() != 1 {
        bail!("--json is for one suite");
    }
    if !no_setup {
        setup::install(setup::For::Testing)?;
    }
    let build = BuildDir::open()?;
    let program = build_program(&build)?;
    let results = build.path().join("bench");
    fs::create_dir_all(&results).with_context(|| format!("cannot create {}", results.display()))?;
    let mut good = true;
    for suite in &suites {
        let json: PathBuf = json
            .clone()
            .unwrap_or_else(|| results.join(format!("{suite}.json")));
        let mut command = tools::clean(&program);
        command.arg(suite).arg("--json").arg(&json);
        command.args(["--revision", &revision()]);
        if smoke {
            command.arg("--smoke");
        }
        let status = command
            .status()
            .with_context(|| format!("cannot run {}", program.display()))?;
        good &= status.success();
        println!("{}\n", json.display());
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Builds the program that measures, with optimisation, which nothing else here needs.
fn build_program(build: &BuildDir) -> anyhow::Result<PathBuf> {
    bpf::build(build, None)?;
    println!("building with optimisation (some minutes the first time)");
    tools::run(
        build
            .cargo()?
            // Nearly all that is measured is in the kernel: optimising across crates would only take time.
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .args([
                "build",
                "--release",
                "--package",
                "holdfast-tests",
                "--bin",
                "bench",
            ]),
    )?;
    Ok(build.path().join("release").join("bench"))
}

/// Names the sources, as well as it can be told.
fn revision() -> String {
    let git = || {
        let root = tools::workspace_root().ok()?;
        tools::answer(
            tools::clean("git")
                .current_dir(root)
                .args(["describe", "--always", "--dirty"]),
        )
    };
    git().unwrap_or_else(|| "unknown".to_owned())
}
