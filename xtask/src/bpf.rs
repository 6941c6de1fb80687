//! `cargo xtask build-ebpf`: builds the object that the agent embeds.
//!
//! The BPF target has no prebuilt `core`, so a compiler together with its library sources is needed. Two are
//! known: rustup's nightly with the component `rust-src`, and Debian's `rustc-web` with `rust-web-src`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, ExitCode};

use anyhow::{Context, bail};

use crate::args::{Args, one_of};
use crate::cache::BuildDir;
use crate::{elf, tools};

pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "build-ebpf",
    summary: "Build the BPF object that the agent embeds",
    help: "\
Usage: cargo xtask build-ebpf [--toolchain auto|nightly|debian]

Writes the object to target/bpf/classifier (to $CARGO_TARGET_DIR/bpf/classifier if that is set, to
$HOLDFAST_BPF_OBJECT if that is). Quick when nothing has changed.

Options:
  --toolchain auto     nightly if it is there with its sources, else Debian's (default)
  --toolchain nightly  rustup's nightly with the component rust-src
  --toolchain debian   the packages rustc-web and rust-web-src

Also needed: bpf-linker. `cargo xtask setup` installs what is missing.",
    run,
};

/// The version that is known to work, and that `setup` installs.
pub(crate) const LINKER_VERSION: &str = "0.13.0";

/// Where Debian's compiler and its sources are (packages rustc-web and rust-web-src).
pub(crate) const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const TARGET: &str = "bpfel-unknown-none";

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let wanted = match args.value("--toolchain")? {
        None => None,
        Some(value) => one_of(
            "--toolchain",
            &value,
            &[
                ("auto", None),
                ("nightly", Some(Road::Nightly)),
                ("debian", Some(Road::Debian)),
            ],
        )?,
    };
    args.finish()?;
    let build_dir = BuildDir::open()?;
    let built = build(&build_dir, wanted)?;
    println!(
        "{} {} ({} KiB, BTF {} KiB)",
        if built.changed { "wrote" } else { "unchanged:" },
        built.path.display(),
        built.size >> 10,
        built.btf_size >> 10,
    );
    Ok(ExitCode::SUCCESS)
}

/// What a build gave.
pub(crate) struct Built {
    /// The object.
    pub(crate) path: PathBuf,
    /// Whether it differs from the one that was there.
    pub(crate) changed: bool,
    size: u64,
    btf_size: u64,
}

/// Builds the object and checks that it is complete.
pub(crate) fn build(build_dir: &BuildDir, wanted: Option<Road>) -> anyhow::Result<Built> {
    let road = choose(wanted)?;
    let linker = tools::find("bpf-linker").with_context(|| {
        format!(
            "bpf-linker is missing. `cargo xtask setup` installs it, or by hand:\n  {}",
            linker_install_command()
        )
    })?;
    let target_dir = build_dir.path().join("ebpf");
    if road == Road::Nightly {
        eprintln!(
            "building with rustup's nightly: not verified (releases are built with Debian's rustc-web)"
        );
    }
    compile(road, &linker, &target_dir)?;
    let made = target_dir.join(TARGET).join("bpf").join("classifier");
    let object = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
    let btf_size = check(&object).with_context(|| format!("{} cannot be used", made.display()))?;
    let path = build_dir.bpf_object()?;
    let changed = put(&object, &path)?;
    Ok(Built {
        path,
        changed,
        size: object.len() as u64,
        btf_size,
    })
}

/// A compiler together with the sources of its `core`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Road {
    /// rustup's nightly with rust-src.
    Nightly,
    /// Debian's packages.
    Debian,
}

impl Road {
    /// Whether it can be taken on this machine.
    pub(crate) fn is_there(self) -> bool {
        match self {
            Self::Nightly => nightly_sysroot().is_some_and(|sysroot| has_core_sources(&sysroot)),
            Self::Debian => tools::answer(tools::clean(DEBIAN_RUSTC).args(["--print", "sysroot"]))
                .is_some_and(|sysroot| has_core_sources(Path::new(&sysroot))),
        }
    }
}

/// The sources of `core` are where `-Z build-std` looks for them.
fn has_core_sources(sysroot: &Path) -> bool {
    sysroot
        .join("lib/rustlib/src/rust/library/core/src/lib.rs")
        .exists()
}

fn nightly_sysroot() -> Option<PathBuf> {
    // `rustup run nightly` would install a toolchain that is not there: ask first.
    let list = tools::answer(tools::clean("rustup").args(["toolchain", "list"]))?;
    list.lines().find(|line| line.starts_with("nightly"))?;
    tools::answer(tools::clean("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]))
        .map(PathBuf::from)
}

fn choose(wanted: Option<Road>) -> anyhow::Result<Road> {
    let roads = match wanted {
        Some(road) => vec![road],
        None => vec![Road::Nightly, Road::Debian],
    };
    match roads.into_iter().find(|road| road.is_there()) {
        Some(road) => Ok(road),
        None => bail!(
            "no compiler for the BPF target. `cargo xtask setup` installs one, or by hand, either\n  \
             rustup toolchain install nightly --component rust-src\n\
             or on Debian 12, whose security archive (bookworm-security) has them,\n  \
             apt-get install -y rustc-web rust-web-src\n\
             and the linker:\n  {}",
            linker_install_command()
        ),
    }
}

/// How the linker is installed by hand.
pub(crate) fn linker_install_command() -> String {
    format!(
        "apt-get install -y {} && LLVM_PREFIX=/usr/lib/llvm-22 cargo install --locked bpf-linker@{LINKER_VERSION} \
         --no-default-features --features llvm-22",
        crate::setup::LLVM_PACKAGES.join(" ")
    )
}

fn compile(road: Road, linker: &Path, target_dir: &Path) -> anyhow::Result<()> {
    let root = tools::workspace_root()?;
    let mut command = match road {
        Road::Nightly => {
            let mut command = tools::clean("rustup");
            command.args(["run", "nightly", "cargo"]);
            command.env_remove("RUSTC");
            command
        }
        Road::Debian => {
            let mut command = tools::clean(tools::cargo());
            command.env("RUSTC", DEBIAN_RUSTC);
            // Lets a stable compiler take the unstable options below.
            command.env("RUSTC_BOOTSTRAP", "1");
            command
        }
    };
    command.current_dir(&root);
    command.args(["build", "--locked", "--profile", "bpf", "-Z", "build-std=core"]);
    command.args([
        "--target",
        TARGET,
        "--package",
        "holdfast-ebpf",
        "--bin",
        "classifier",
    ]);
    command.arg("--target-dir").arg(target_dir);
    if target_dir.exists() {
        command.arg("--quiet");
    } else {
        eprintln!("building the BPF object; the first time takes a minute or two");
    }
    rustflags(&mut command, linker, &root);
    tools::run(&mut command)
}

/// Flags for the BPF build alone; the user's own are for the host.
fn rustflags(command: &mut Process, linker: &Path, root: &Path) {
    let flags = [
        // Registers and system calls of the machine that the program will run on: this one.
        "--cfg".to_owned(),
        format!("bpf_target_arch=\"{}\"", std::env::consts::ARCH),
        "-C".to_owned(),
        format!("linker={}", linker.display()),
        "-C".to_owned(),
        "link-arg=--btf".to_owned(),
        // Same bytes from every clone.
        format!("--remap-path-prefix={}=.", root.display()),
    ];
    command.env_remove("RUSTFLAGS");
    command.env_remove("RUSTC_WRAPPER");
    // 0x1f separates: a flag may hold spaces and quotes.
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
}

/// Sections without which the object is of no use to the agent.
const SECTIONS: [&str; 5] = ["classifier/ingress", ".maps", "license", ".BTF", ".BTF.ext"];

/// Checks that the object is complete; gives the size of its type information.
fn check(object: &[u8]) -> anyhow::Result<u64> {
    let sections = elf::sections(object)?;
    let size = |name: &str| {
        sections
            .iter()
            .find(|(section, _)| section == name)
            .map_or(0, |(_, size)| *size)
    };
    for name in SECTIONS {
        if size(name) == 0 {
            bail!("section {name} is missing or empty (was it linked without --btf?)");
        }
    }
    Ok(size(".BTF"))
}

/// Writes the object unless it is there already: a new time stamp would rebuild the agent.
fn put(object: &[u8], path: &Path) -> anyhow::Result<bool> {
    if fs::read(path).is_ok_and(|old| old == object) {
        return Ok(false);
    }
    let dir = path.parent().context("the object has no directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let new = path.with_extension("new");
    fs::write(&new, object).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}
