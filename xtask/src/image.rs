//! `cargo xtask image`: the agent as a container image, without a daemon.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, ensure};
use holdfast_cluster::{Content, Image};

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

/// As deploy/kustomize/overlays/dev names it.
const NAME: &str = "localhost/holdfast:dev";

/// The program in the image.
const PROGRAM: &str = "/usr/bin/holdfast";

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
    println!("{NAME} in {} ({} MiB)", archive.display(), size >> 20);
    Ok(ExitCode::SUCCESS)
}

/// Builds the agent and its image; gives the archive.
pub(crate) fn write(release: bool, output: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let folder = tools::workspace_root()?.join("target/image");
    let archive = output.unwrap_or_else(|| folder.join("holdfast.tar"));
    let build = BuildDir::open()?;
    bpf::build(&build, None)?;
    let program = folder.join("holdfast");
    fs::create_dir_all(&folder)?;
    strip(&build_agent(&build, release)?, &program)?;
    let image = Image {
        name: NAME.to_owned(),
        entrypoint: vec![PROGRAM.to_owned()],
        user: String::new(),
        environment: vec!["PATH=/usr/bin".to_owned()],
        files: files(&program)?,
    };
    image.write_tree(&folder.join("root"))?;
    image.write(&archive, &folder.join("scratch"))?;
    fs::remove_file(&program)?;
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

/// Line tables make three quarters of what a node would have to unpack.
fn strip(from: &Path, to: &Path) -> anyhow::Result<()> {
    tools::run(
        Command::new("strip")
            .args(["--strip-debug", "-o"])
            .arg(to)
            .arg(from),
    )
}

fn files(program: &Path) -> anyhow::Result<Vec<(PathBuf, Content)>> {
    let mut files = vec![
        (PathBuf::from(PROGRAM), Content::File(program.to_path_buf())),
        ("/etc/passwd".into(), Content::Bytes(PASSWD.into())),
        ("/etc/group".into(), Content::Bytes(GROUP.into())),
        (
            "/etc/nsswitch.conf".into(),
            Content::Bytes(b"hosts: files dns\n".into()),
        ),
        ("/tmp".into(), Content::Folder),
    ];
    let libraries = libraries(program)?;
    files.extend(
        libraries
            .into_iter()
            .map(|path| (path.clone(), Content::File(path))),
    );
    Ok(files)
}

const PASSWD: &str = "root:x:0:0::/:/usr/bin/holdfast\nnonroot:x:65532:65532::/:/usr/bin/holdfast\n";
const GROUP: &str = "root:x:0:\nnonroot:x:65532:\n";

/// The libraries that a program is linked to, and the loader, where it looks for them.
fn libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let said = tools::answer(Command::new("ldd").arg(program)).context("ldd does not answer")?;
    let found = linked(&said)?;
    ensure!(
        !found.is_empty(),
        "{} is linked to nothing: {said}",
        program.display()
    );
    Ok(found)
}

/// Reads what ldd says: `NAME => PATH (ADDRESS)`, or for the loader `PATH (ADDRESS)`.
fn linked(said: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in said.lines() {
        ensure!(!line.contains("not found"), "a library is missing:{line}");
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        let path = path.split_whitespace().next().unwrap_or_default();
        // What has no path is not a file: linux-vdso.
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read() {
        let said = "\tlinux-vdso.so.1 (0x00007f7d)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f7d)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f7d)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(linked(said).unwrap(), expected.map(PathBuf::from));
        assert!(linked("\tlibx.so => not found").is_err());
    }
}
