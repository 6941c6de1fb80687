//! `cargo xtask image`: the agent as a container image, without a daemon.

use std::path::PathBuf;
use std::process::ExitCode;

use holdfast_cluster::{AGENT_IMAGE, Image};

use crate::args::Args;
use crate::cache::BuildDir;
use crate::{bpf, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "image",
    summary: "Make a container image of the agent, without a daemon",
    help: "\
Usage: cargo xtask image [--release] [--output FILE.tar] [--no-setup]

Writes target/image/holdfast.tar, a docker-archive with the image localhost/holdfast:dev, and the same files as a folder
beside it (target/image/root), which deploy/image/Containerfile copies. In it are the program, the libraries that it is
linked to, and the names of users: no shell. The same program and libraries give the same bytes.

Options:
  --release      built as it is shipped: optimised, which takes many minutes, and without what tests use to make it fail.
                 Else as the tests have it built already
  --output FILE  writes the archive there
  --no-setup     install nothing; for people who manage their machine themselves",
    run,
};

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    let release = args.switch("--release");
    let output = args.value("--output")?;
    args.finish()?;
    if !no_setup {
        setup::install(setup::For::Building)?;
    }
    let archive = write(release, output.map(PathBuf::from))?;
    let size = archive.metadata()?.len();
    println!("{AGENT_IMAGE} in {} ({} MiB)", archive.display(), size >> 20);
    Ok(ExitCode::SUCCESS)
}

/// Builds the agent and its image; gives the archive.
pub(crate) fn write(release: bool, output: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let folder = tools::workspace_root()?.join("target/image");
    let archive = output.unwrap_or_else(|| folder.join("holdfast.tar"));
    let build = BuildDir::open()?;
    bpf::build(&build, None)?;
    let image = Image::of_agent(&build_agent(&build, release)?)?;
    image.write_tree(&folder.join("root"))?;
    image.write(&archive, &folder.join("scratch"))?;
    Ok(archive)
}

/// As the tests build it, with one set of features for all; or as it is shipped.
fn build_agent(build: &BuildDir, release: bool) -> anyhow::Result<PathBuf> {
    let mut command = build.cargo()?;
    let profile = if release {
        command.args([
            "build",
            "--locked",
            "--release",
            "--package",
            "holdfast",
            "--bin",
            "holdfast",
        ]);
        "release"
    } else {
        command.args(["build", "--workspace", "--bins"]);
        "debug"
    };
    tools::run(&mut command)?;
    Ok(build.path().join(profile).join("holdfast"))
}
