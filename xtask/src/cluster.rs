//! `cargo xtask cluster`: a real Kubernetes for people. What it is made of, the tests use too: `tests/cluster`.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, bail};
use holdfast_cluster::{Binaries, Cluster, Lacking, Options};

use crate::args::Args;
use crate::{go, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "cluster",
    summary: "A real Kubernetes of several nodes, in namespaces",
    help: "\
Usage: cargo xtask cluster up [--nodes N] [--no-setup]
       cargo xtask cluster kubectl ARGUMENT...
       cargo xtask cluster load IMAGE.tar
       cargo xtask cluster on NODE COMMAND...
       cargo xtask cluster status
       cargo xtask cluster down
       cargo xtask cluster build [--no-setup]

etcd, API server, controller manager and scheduler, and nodes (edge-a, edge-b, ...) with containerd, kubelet and the
bridge plugin, each in network and mount namespaces of its own. As root; without Docker; nothing of the machine's own
network is touched. It stays until `down`, which leaves nothing, also after an `up` that was broken off.

  up        builds what is missing, starts it, and waits until the nodes are Ready
  kubectl   as the cluster's administrator (help of kubectl itself: cargo xtask cluster kubectl -- --help)
  load      gives an image to all nodes: a docker-archive tar, as `cargo xtask image` makes it. Pods need
            `imagePullPolicy: Never`
  on        a command on a node, in its network, with its mounts
  status    its processes, nodes and pods, and where its logs are
  down      removes it
  build     builds Kubernetes, etcd and containerd from their Go modules, once: about ten minutes on two processors, into
            $XDG_CACHE_HOME/holdfast (~/.cache/holdfast)

Options:
  --nodes N   so many nodes (default 2); two take about 1.5 GB of memory, each further one about 100 MB. With more than
              14 the machine's fs.inotify.max_user_instances must be above 128
  --no-setup  install nothing; for people who manage their machine themselves",
    run,
};

/// The cluster of people. Those of tests have names of their own, beside it.
pub(crate) const NAME: &str = "hfk";

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let Some(word) = args.subcommand() else {
        bail!("what? (cargo xtask cluster --help)");
    };
    match word.as_str() {
        "up" => up(args),
        "kubectl" => kubectl(args),
        "load" => load(args),
        "on" => on(args),
        "status" => status(args),
        "down" => down(args),
        "build" => {
            let no_setup = args.switch("--no-setup");
            args.finish()?;
            if !no_setup {
                setup::install(setup::For::Cluster)?;
            }
            build()?;
            Ok(ExitCode::SUCCESS)
        }
        other => bail!("there is no `cargo xtask cluster {other}` (see --help)"),
    }
}

/// Whether what a cluster is made of is there.
pub(crate) fn is_built() -> bool {
    tools::cache_dir().is_ok_and(|cache| Binaries::built(&cache).is_some())
}

/// Builds what a cluster is made of.
pub(crate) fn build() -> anyhow::Result<()> {
    if is_built() {
        return Ok(());
    }
    let cache = tools::cache_dir()?;
    let go = go::find().context(
        "no Go of 1.21 or later is there, with which Kubernetes is built: `cargo xtask setup` fetches one",
    )?;
    println!(
        "Kubernetes is built from its Go modules, once, into {}: about ten minutes on two processors",
        cache.display()
    );
    let started = Instant::now();
    let minutes = || started.elapsed().as_secs_f64() / 60.0;
    holdfast_cluster::make(&cache, &go, &mut |step| println!("{:4.1} min: {step}", minutes()))?;
    println!("{:4.1} min: built", minutes());
    Ok(())
}

fn up(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    let nodes = args.value("--nodes")?;
    args.finish()?;
    let nodes: usize = nodes
        .map_or(Ok(2), |text| text.parse())
        .context("--nodes needs a number")?;
    if Cluster::open(NAME).is_ok() {
        bail!("it is up already (cargo xtask cluster status)");
    }
    if !no_setup {
        setup::install(setup::For::Cluster)?;
    }
    build()?;
    // What an earlier `up` has left that was broken off.
    Cluster::remove(NAME)?;
    let started = Instant::now();
    println!("starting {nodes} nodes");
    let options = Options {
        nodes: (0..nodes).map(node_name).collect(),
        name: Some(NAME.to_owned()),
    };
    let mut cluster = Cluster::start(&options).map_err(explain)?;
    cluster.outlive()?;
    print!("{}", cluster.kubectl().run(&["get", "nodes", "--output=wide"])?);
    println!("up after {:.1} s", started.elapsed().as_secs_f64());
    println!("\ncargo xtask cluster kubectl get pods -A\ncargo xtask cluster down");
    Ok(ExitCode::SUCCESS)
}

/// `edge-a` to `edge-z`, then `edge-26` and on.
fn node_name(index: usize) -> String {
    match u8::try_from(index) {
        Ok(index @ 0..26) => format!("edge-{}", char::from(b'a' + index)),
        _ => format!("edge-{index}"),
    }
}

/// All that is missing, not only the first.
fn explain(error: anyhow::Error) -> anyhow::Error {
    if error.downcast_ref::<Lacking>().is_none() {
        return error;
    }
    let all: Vec<String> = tools::cache_dir()
        .map(|cache| holdfast_cluster::lacking(&cache))
        .unwrap_or_default()
        .iter()
        .map(|lacking| format!("  {lacking}"))
        .collect();
    error.context(format!("this machine cannot run a cluster:\n{}", all.join("\n")))
}

fn kubectl(args: Args) -> anyhow::Result<ExitCode> {
    let words = args.all();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    pass_on(&mut Cluster::open(NAME)?.kubectl().command(&words))
}

fn on(mut args: Args) -> anyhow::Result<ExitCode> {
    let node = args.subcommand().context("on which node?")?;
    let words = args.all();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    pass_on(&mut Cluster::open(NAME)?.command_on(&node, &words)?)
}

/// Runs a command as if it had been typed.
fn pass_on(command: &mut Command) -> anyhow::Result<ExitCode> {
    let status = command.status().context("cannot run nsenter")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

fn load(args: Args) -> anyhow::Result<ExitCode> {
    let images = args.rest()?;
    if images.is_empty() {
        bail!("which image?");
    }
    let cluster = Cluster::open(NAME)?;
    for image in &images {
        cluster.load(Path::new(image))?;
        println!("{image} is on every node");
    }
    Ok(ExitCode::SUCCESS)
}

fn status(args: Args) -> anyhow::Result<ExitCode> {
    args.finish()?;
    let cluster = Cluster::open(NAME)?;
    let mut all_run = true;
    for (name, runs) in cluster.processes()? {
        println!("{name:24} {}", if runs { "runs" } else { "has ended" });
        all_run &= runs;
    }
    println!("logs: {}\n", cluster.logs().display());
    for what in ["nodes", "pods"] {
        print!(
            "{}",
            cluster
                .kubectl()
                .run(&["get", what, "--all-namespaces", "--output=wide"])?
        );
    }
    Ok(if all_run {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn down(args: Args) -> anyhow::Result<ExitCode> {
    args.finish()?;
    match Cluster::remove(NAME)?.as_slice() {
        [] => println!("there is none"),
        removed => println!("removed: {}", removed.join(" ")),
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_names_of_their_own() {
        assert_eq!(node_name(0), "edge-a");
        assert_eq!(node_name(25), "edge-z");
        assert_eq!(node_name(26), "edge-26");
    }
}
