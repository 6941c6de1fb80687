//! The programs of Kubernetes: where they are, and what is missing.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Which Kubernetes this is.
pub(crate) const KUBERNETES: &str = "1.36.3";

/// What an API server needs.
pub(crate) const FOR_API: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];
/// What the rest of a cluster needs.
pub(crate) const FOR_NODES: [&str; 7] = [
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "pause.tar",
];

/// What of the machine a node calls, and Debian's package with it.
const OF_THE_MACHINE: [(&str, &str); 9] = [
    ("/usr/bin/openssl", "openssl"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("/usr/sbin/conntrack", "conntrack"),
    ("/usr/sbin/iptables", "iptables"),
    ("/usr/sbin/ethtool", "ethtool"),
    ("/usr/bin/socat", "socat"),
    ("/bin/busybox", "busybox-static"),
    ("/sbin/ip", "iproute2"),
];

/// Why a cluster cannot run here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// Namespaces need root.
    Root,
    /// Kubernetes is not built.
    Kubernetes,
    /// A Debian package is not installed.
    Package(&'static str),
    /// A cluster's memory does not fit.
    Memory,
}

impl fmt::Display for Lacking {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => write!(out, "namespaces need root"),
            Self::Kubernetes => write!(
                out,
                "Kubernetes {KUBERNETES} is not built (cargo xtask cluster build)"
            ),
            Self::Package(name) => write!(out, "the package {name} is not installed (cargo xtask setup)"),
            Self::Memory => write!(out, "two nodes take about 1.5 GB of memory, and there is less"),
        }
    }
}

impl std::error::Error for Lacking {}

/// The folder that holds the programs.
#[derive(Clone, Debug)]
pub struct Binaries(PathBuf);

impl Binaries {
    /// What [`make`](crate::make()) has built in this cache; none if anything is missing.
    #[must_use]
    pub fn built(cache: &Path) -> Option<Self> {
        let folder = Self::folder(cache).join("bin");
        let all = FOR_API
            .iter()
            .chain(&FOR_NODES)
            .all(|name| folder.join(name).is_file());
        all.then_some(Self(folder))
    }

    /// Those for an API server alone: of `$KUBEBUILDER_ASSETS` if that is set, as other projects' tests have it, else
    /// of the cache.
    #[must_use]
    pub fn for_api(cache: &Path) -> Option<Self> {
        let folder = match std::env::var_os("KUBEBUILDER_ASSETS") {
            Some(assets) => PathBuf::from(assets),
            None => Self::folder(cache).join("bin"),
        };
        FOR_API
            .iter()
            .all(|name| folder.join(name).is_file())
            .then_some(Self(folder))
    }

    /// Those in this folder.
    pub(crate) const fn at(folder: PathBuf) -> Self {
        Self(folder)
    }

    /// Where they are built.
    pub(crate) fn folder(cache: &Path) -> PathBuf {
        cache.join(format!("k8s-{KUBERNETES}"))
    }

    /// The folder.
    pub(crate) fn path_of_all(&self) -> &Path {
        &self.0
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// One of them, as a word of a command.
    pub(crate) fn word(&self, name: &str) -> String {
        self.get(name).to_string_lossy().into_owned()
    }

    /// A search path that finds them first.
    pub(crate) fn path(&self) -> String {
        format!(
            "{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            self.0.display()
        )
    }
}

/// What a cluster calls of the machine, as Debian's packages.
pub fn packages() -> impl Iterator<Item = &'static str> {
    OF_THE_MACHINE.into_iter().map(|(_, package)| package)
}

/// Holdfast's folder in the user's cache.
///
/// # Errors
/// When neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| Path::new(value).is_absolute()) {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
            .join(".cache"),
    };
    Ok(base.join("holdfast"))
}

/// What keeps an API server from running on this machine.
#[must_use]
pub fn lacking_for_api(cache: &Path) -> Option<Lacking> {
    if !is_root() {
        return Some(Lacking::Root);
    }
    Binaries::for_api(cache).is_none().then_some(Lacking::Kubernetes)
}

/// All that keeps a whole cluster from running on this machine.
#[must_use]
pub fn lacking(cache: &Path) -> Vec<Lacking> {
    let mut all = Vec::new();
    if !is_root() {
        all.push(Lacking::Root);
    }
    if available_memory().is_some_and(|kilobytes| kilobytes < 1_500_000) {
        all.push(Lacking::Memory);
    }
    if Binaries::built(cache).is_none() {
        all.push(Lacking::Kubernetes);
    }
    all.extend(
        OF_THE_MACHINE
            .into_iter()
            .filter(|(file, _)| !Path::new(file).exists())
            .map(|(_, package)| Lacking::Package(package)),
    );
    all
}

/// Whether this process may do everything.
fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

fn available_memory() -> Option<u64> {
    let all = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse().ok()
}
