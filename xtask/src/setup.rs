//! `cargo xtask setup`: installs what building and testing need, and says so first.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::args::Args;
use crate::bpf::{self, LINKER_VERSION, Road};
use crate::{cluster, go, tools};

pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "setup",
    summary: "Install what building and testing need",
    help: "\
Usage: cargo xtask setup [--check]

Says what is missing, then installs it: Debian packages (apt-get; with sudo if you are not root), rustup
components, and bpf-linker and Go (which builds Kubernetes) into $XDG_CACHE_HOME/holdfast/tools (~/.cache/holdfast/tools).
What is there stays untouched. Every other command takes --no-setup and then installs nothing.

Options:
  --check  install nothing; exit 1 if something is missing",
    run,
};

/// For bpf-linker. In Debian 12 from bookworm-security.
pub(crate) const LLVM_PACKAGES: [&str; 5] = [
    "llvm-22-dev",
    "libpolly-22-dev",
    "zlib1g-dev",
    "libzstd-dev",
    "libxml2-dev",
];
/// A compiler with the sources of its library. In Debian 12 from bookworm-security.
const RUST_PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];
/// What the tests and the demo call; `nft` is what `bench` measures beside, `g++` builds libFuzzer, llvm-22 reads coverage
/// as rustc's own LLVM writes it, of systemd the judge of units is called, and `strace` refuses what a unit forbids.
const TEST_PACKAGES: [&str; 9] = [
    "bind9-dnsutils",
    "dnsmasq-base",
    "g++",
    "iproute2",
    "llvm-22",
    "nftables",
    "procps",
    "strace",
    "systemd",
];
/// What `.ci/run` and `cargo xtask test` call.
const COMPONENTS: [&str; 2] = ["rustfmt", "clippy"];

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let check_only = args.switch("--check");
    args.finish()?;
    if !check_only {
        install(For::Cluster)?;
        return Ok(ExitCode::SUCCESS);
    }
    let missing = Missing::find(For::Cluster);
    missing.print();
    Ok(if missing.is_nothing() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What something is needed for. Each needs what those before it need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum For {
    /// The BPF object and the agent.
    Building,
    /// The suites and the demo.
    Testing,
    /// A cluster.
    Cluster,
}

/// Says what is missing and installs it.
pub(crate) fn install(purpose: For) -> anyhow::Result<()> {
    let missing = Missing::find(purpose);
    missing.print();
    missing.install()
}

/// What this machine lacks.
#[derive(Debug, Default)]
struct Missing {
    packages: Vec<&'static str>,
    components: Vec<&'static str>,
    linker: bool,
    prometheus: bool,
    go: bool,
}

impl Missing {
    fn find(purpose: For) -> Self {
        let linker = tools::find("bpf-linker").is_none();
        let mut packages = Vec::new();
        if !Road::Nightly.is_there() && !Road::Debian.is_there() {
            packages.extend(RUST_PACKAGES);
        }
        if linker {
            packages.extend(LLVM_PACKAGES);
        }
        if purpose >= For::Testing {
            packages.extend(TEST_PACKAGES);
        }
        if purpose >= For::Cluster {
            packages.extend(holdfast_cluster::packages());
        }
        packages.sort_unstable();
        packages.dedup();
        packages.retain(|package| !is_installed(package));
        let components = COMPONENTS
            .into_iter()
            .filter(|component| !has_component(component))
            .collect();
        Self {
            packages,
            components,
            linker,
            prometheus: purpose >= For::Testing
                && PROMETHEUS.iter().any(|program| tools::find(program).is_none()),
            go: purpose >= For::Cluster && !cluster::is_built() && go::find().is_none(),
        }
    }

    fn is_nothing(&self) -> bool {
        self.packages.is_empty() && self.components.is_empty() && !self.linker && !self.prometheus && !self.go
    }

    fn print(&self) {
        if self.is_nothing() {
            println!("nothing is missing");
            return;
        }
        println!("missing:");
        if !self.packages.is_empty() {
            println!("  Debian packages: {}", self.packages.join(" "));
        }
        if !self.components.is_empty() {
            println!("  rustup components: {}", self.components.join(" "));
        }
        if self.linker {
            println!("  bpf-linker {LINKER_VERSION} (built from crates.io, about a minute)");
        }
        if self.prometheus {
            println!(
                "  {} (from Debian's package prometheus, unpacked: no server is installed)",
                PROMETHEUS.join(", ")
            );
        }
        if self.go {
            println!(
                "  Go {} (fetched as a Go module by Debian's, which is unpacked for that alone)",
                go::VERSION
            );
        }
    }

    fn install(&self) -> anyhow::Result<()> {
        if !self.packages.is_empty() {
            install_packages(&self.packages)?;
        }
        if !self.components.is_empty() {
            println!("installing rustup components: {}", self.components.join(" "));
            tools::run(
                tools::clean("rustup")
                    .args(["component", "add"])
                    .args(&self.components),
            )?;
        }
        if self.linker {
            install_linker()?;
        }
        if self.prometheus {
            unpack_prometheus()?;
        }
        if self.go {
            go::fetch()?;
        }
        Ok(())
    }
}

fn is_installed(package: &str) -> bool {
    tools::answer(tools::clean("dpkg-query").args(["-W", "-f", "${Status}", package]))
        .is_some_and(|status| status == "install ok installed")
}

fn has_component(component: &str) -> bool {
    let program = match component {
        "clippy" => "cargo-clippy",
        other => other,
    };
    tools::answer(tools::clean(program).arg("--version")).is_some()
}

fn install_packages(packages: &[&str]) -> anyhow::Result<()> {
    let by_hand = format!("apt-get update && apt-get install -y {}", packages.join(" "));
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "this is not Debian: install the equivalents of {}",
            packages.join(", ")
        );
    }
    println!("installing: {by_hand}");
    apt(&["-q", "update"])
        .and_then(|()| {
            let mut words = vec!["-q", "install", "-y", "--no-install-recommends"];
            words.extend(packages);
            apt(&words)
        })
        .with_context(|| {
            format!(
                "by hand, as root: {by_hand}\n(rustc-web, rust-web-src and llvm-22 come from Debian 12's security \
                 archive, bookworm-security: is it among your sources?)"
            )
        })
}

fn apt(words: &[&str]) -> anyhow::Result<()> {
    let mut command = if is_root() {
        tools::clean("apt-get")
    } else {
        let mut command = tools::clean("sudo");
        command.arg("apt-get");
        command
    };
    tools::run(command.env("DEBIAN_FRONTEND", "noninteractive").args(words))
}

/// What the tests of the alerts run, of Debian's package prometheus.
const PROMETHEUS: [&str; 2] = ["prometheus", "promtool"];

/// Takes both programs out of their package. Installed, it would start a server on this machine.
fn unpack_prometheus() -> anyhow::Result<()> {
    let bin = tools::tools_dir()?.join("bin");
    let work = tools::cache_dir()?.join("prometheus");
    let by_hand =
        "apt-get download prometheus && dpkg-deb -x prometheus_*.deb DIR, then put DIR/usr/bin on the PATH";
    println!("unpacking {} into {}", PROMETHEUS.join(" and "), bin.display());
    let take = || -> anyhow::Result<()> {
        let tree = unpack(&["prometheus"], &work)?;
        fs::create_dir_all(&bin)?;
        for program in PROMETHEUS {
            fs::copy(tree.join("usr/bin").join(program), bin.join(program))?;
        }
        fs::remove_dir_all(&work)?;
        Ok(())
    };
    take().with_context(|| format!("by hand: {by_hand}"))
}

/// Downloads packages into a folder that is emptied first, and unpacks them there; gives the tree.
pub(crate) fn unpack(packages: &[&str], work: &Path) -> anyhow::Result<PathBuf> {
    if work.exists() {
        fs::remove_dir_all(work)?;
    }
    fs::create_dir_all(work)?;
    // The list of packages may be there and current: an update is only tried when the download fails.
    let download = || {
        let mut command = tools::clean("apt-get");
        tools::run(command.current_dir(work).args(["-q", "download"]).args(packages))
    };
    download().or_else(|_| apt(&["-q", "update"]).and_then(|()| download()))?;
    let tree = work.join("tree");
    for entry in fs::read_dir(work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            tools::run(tools::clean("dpkg-deb").arg("-x").arg(&path).arg(&tree))?;
        }
    }
    Ok(tree)
}

fn is_root() -> bool {
    #[expect(unsafe_code, reason = "std has no call for it")]
    // SAFETY: geteuid takes nothing and cannot fail.
    let euid = unsafe { libc::geteuid() };
    euid == 0
}

fn install_linker() -> anyhow::Result<()> {
    let tools_dir = tools::tools_dir()?;
    println!(
        "building bpf-linker {LINKER_VERSION} into {}",
        tools_dir.display()
    );
    let mut command = tools::clean(tools::cargo());
    command.env("LLVM_PREFIX", "/usr/lib/llvm-22");
    command.env_remove("CARGO_TARGET_DIR");
    command.args([
        "install",
        "--locked",
        "--no-default-features",
        "--features",
        "llvm-22",
    ]);
    command.arg("--root").arg(&tools_dir);
    command.arg(format!("bpf-linker@{LINKER_VERSION}"));
    tools::run(&mut command).with_context(|| format!("by hand: {}", bpf::linker_install_command()))
}
