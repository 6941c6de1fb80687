//! `cargo xtask demo`: sets up, builds, and shows the main job.

use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::args::Args;
use crate::cache::BuildDir;
use crate::{bpf, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "demo",
    summary: "Set up what is missing, build, and show the main job step by step",
    help: "\
Usage: cargo xtask demo [--no-setup]

Runs the real agent on the real kernel, in network and mount namespaces of its own, as root: a policy before its
interface, the interface, the identity, traffic, a redeploy, a switch, a kill and restart, and what is reported.
Nothing of the machine is touched, and nothing is left behind.

Options:
  --no-setup  install nothing; for people who manage their machine themselves",
    run,
};

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    args.finish()?;
    if !no_setup {
        setup::install(setup::For::Testing)?;
    }
    let build = BuildDir::open()?;
    println!("building the BPF object");
    bpf::build(&build, None)?;
    println!("building the agent (a few minutes the first time)");
    tools::run(build.cargo()?.args(["build", "--workspace", "--bins"]))?;
    let demo = build.path().join("debug").join("demo");
    let status = tools::clean(&demo)
        .status()
        .with_context(|| format!("cannot run {}", demo.display()))?;
    if status.code().is_none() {
        bail!("the demo was ended by a signal");
    }
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
