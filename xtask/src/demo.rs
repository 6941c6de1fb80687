//! `cargo xtask demo`: sets up, builds, and shows the main job.

use std::process::ExitCode;

use anyhow::{Context, bail};
use holdfast_cluster::Cluster;

use crate::args::Args;
use crate::cache::BuildDir;
use crate::{bpf, cluster, image, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "demo",
    summary: "Set up what is missing, build, and show the main job step by step",
    help: "\
Usage: cargo xtask demo [--no-setup]
       cargo xtask demo --cluster [--keep] [--no-setup]

Runs the real agent on the real kernel, in network and mount namespaces of its own, as root: a policy before its
interface, the interface, the identity, traffic, a redeploy, a switch, a kill and restart, and what is reported.
Nothing of the machine is touched, and nothing is left behind.

With --cluster, on a Kubernetes of two nodes (`cargo xtask cluster` says what that is, and needs), through kubectl: install,
hold, interface and identity, redeploy, switch, acknowledgment. About a minute, once Kubernetes is built. The cluster is gone
at the end, whatever that end is.

Options:
  --cluster   on a cluster
  --keep      leaves the cluster up when all went well: `cargo xtask cluster kubectl`, `cargo xtask cluster down`
  --no-setup  install nothing; for people who manage their machine themselves",
    run,
};

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    let on_cluster = args.switch("--cluster");
    let keep = args.switch("--keep");
    args.finish()?;
    if keep && !on_cluster {
        bail!("--keep is for --cluster: without, nothing is there to be kept");
    }
    if keep && Cluster::open(cluster::NAME).is_ok() {
        bail!("a cluster is up already (cargo xtask cluster down)");
    }
    if !no_setup {
        setup::install(if on_cluster {
            setup::For::Cluster
        } else {
            setup::For::Testing
        })?;
    }
    let build = BuildDir::open()?;
    let mut demo = tools::clean(build.path().join("debug").join("demo"));
    if on_cluster {
        cluster::build()?;
        demo.arg("cluster");
        println!("building the agent and its image (a few minutes the first time)");
        demo.arg(image::write(false, None)?);
    } else {
        println!("building the BPF object");
        bpf::build(&build, None)?;
        println!("building the agent (a few minutes the first time)");
        tools::run(build.cargo()?.args(["build", "--workspace", "--bins"]))?;
    }
    if keep {
        // What an earlier one has left that was broken off.
        Cluster::remove(cluster::NAME)?;
        demo.arg(cluster::NAME);
    }
    let status = demo.status().context("cannot run the demo")?;
    if status.code().is_none() {
        bail!("the demo was ended by a signal");
    }
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
