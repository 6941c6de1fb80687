//! What the agent is run with: flags, the same as `HOLDFAST_...` variables, and as keys of a file.

mod file;
pub mod layers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};

use crate::api::validate;
use crate::datapath::{AttachMode, Sizes};
use crate::telemetry::{self, LogFormat};

/// Where everything is kept. Every subcommand takes these.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Directories {
    /// Directory of the pinned maps, programs and links, on a bpffs
    #[arg(
        long,
        global = true,
        env = "HOLDFAST_BPFFS_DIR",
        value_name = "DIR",
        default_value = "/sys/fs/bpf/holdfast",
        help_heading = "Directories"
    )]
    pub bpffs_dir: PathBuf,
    /// Directory of what must survive a reboot
    #[arg(
        long,
        global = true,
        env = "HOLDFAST_STATE_DIR",
        value_name = "DIR",
        default_value = "/var/lib/holdfast",
        help_heading = "Directories"
    )]
    pub state_dir: PathBuf,
    /// Directory of the socket, the locks and the report
    #[arg(
        long,
        global = true,
        env = "HOLDFAST_RUN_DIR",
        value_name = "DIR",
        default_value = "/run/holdfast",
        help_heading = "Directories"
    )]
    pub run_dir: PathBuf,
}

/// Flags of `holdfast agent`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct AgentArgs {
    /// Where desired objects come from: `dir:PATH`, a directory of YAML or JSON files; `kube`, an API server
    #[arg(
        long,
        env = "HOLDFAST_SOURCE",
        value_name = "SOURCE",
        default_value = "dir:/etc/holdfast/objects"
    )]
    pub source: Source,
    /// How to reach the API server [default: what KUBECONFIG names, else the cluster that this is a pod of]
    #[arg(long, env = "HOLDFAST_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Name of this node, as attachments name it [default: the host name]
    #[arg(long, env = "HOLDFAST_NODE", value_name = "NAME", value_parser = node)]
    pub node: Option<String>,
    /// Address of `/metrics`, `/livez` and `/readyz`
    #[arg(
        long,
        env = "HOLDFAST_LISTEN",
        value_name = "ADDR:PORT",
        default_value = "127.0.0.1:9643"
    )]
    pub listen: SocketAddr,
    /// A second address, for `/metrics` alone
    #[arg(long, env = "HOLDFAST_METRICS_LISTEN", value_name = "ADDR:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Hook that the program is attached to: tcx, or a filter of the clsact qdisc
    #[arg(long, env = "HOLDFAST_ATTACH", value_enum, default_value_t)]
    pub attach: AttachMode,
    /// How packets reach a producer
    #[arg(long, env = "HOLDFAST_DELIVERY", value_enum, default_value_t)]
    pub delivery: DeliveryMode,
    /// Which policies have metric series of their own: those that are held, failed or behind, or all
    #[arg(long, env = "HOLDFAST_POLICY_METRICS", value_enum, default_value_t)]
    pub policy_metrics: PolicyMetrics,
    /// Take an interface as programmed although another program comes before ours in its chain
    #[arg(
        long,
        env = "HOLDFAST_ALLOW_FOREIGN_BEFORE",
        value_name = "BOOL",
        action = ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true",
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub allow_foreign_before: bool,
    /// How often the kernel is compared with what it should have, and put right: 1s to 5m
    #[arg(
        long,
        env = "HOLDFAST_AUDIT_INTERVAL",
        value_name = "DURATION",
        default_value = "30s",
        value_parser = audit_interval
    )]
    pub audit_interval: Duration,
    /// How lines are written
    #[arg(long, env = "HOLDFAST_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
    /// Which lines are written, as in `debug` or `info,holdfast::netlink=debug`
    #[arg(
        long,
        env = "HOLDFAST_LOG",
        value_name = "FILTER",
        default_value = "info",
        value_parser = telemetry::filter
    )]
    pub log: String,
    /// Lines of the packet program itself: 0 none (costs nothing), 1 packets that are held or dropped, 2 all packets
    #[arg(
        long,
        env = "HOLDFAST_PACKET_LOG",
        value_name = "LEVEL",
        default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(0..=2)
    )]
    pub packet_log: u64,
    /// Bytes of the journal in the state directory, from which `holdfast replay` tells what was decided; 0 keeps none
    #[arg(
        long,
        env = "HOLDFAST_JOURNAL_BYTES",
        value_name = "BYTES",
        default_value_t = 16 << 20,
        value_parser = journal_bytes
    )]
    pub journal_bytes: u64,
    /// Print the settings and where each is from, in the form of the file, and end
    #[arg(long)]
    pub print_config: bool,
    /// Sizes of the maps that are made.
    #[command(flatten)]
    pub sizes: SizeArgs,
}

/// Sizes of maps. They take effect where a map is made: a pinned one keeps its size until it is removed.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Map sizes (entries)")]
pub struct SizeArgs {
    /// Interfaces with intents
    #[arg(long, env = "HOLDFAST_MAP_CONSUMERS", value_name = "N", default_value_t = Sizes::default().consumers, value_parser = size(1 << 20))]
    pub map_consumers: u32,
    /// Addresses of workloads
    #[arg(long, env = "HOLDFAST_MAP_SOURCES", value_name = "N", default_value_t = Sizes::default().sources, value_parser = size(1 << 24))]
    pub map_sources: u32,
    /// Addresses of the node itself
    #[arg(long, env = "HOLDFAST_MAP_LOCALS", value_name = "N", default_value_t = Sizes::default().locals, value_parser = size(1 << 20))]
    pub map_locals: u32,
    /// Route entries: one for each interface and destination
    #[arg(long, env = "HOLDFAST_MAP_SERVICES", value_name = "N", default_value_t = Sizes::default().services, value_parser = size(1 << 24))]
    pub map_services: u32,
    /// Route entries for prefixes: one for each interface and prefix, and one that stays free
    #[arg(long, env = "HOLDFAST_MAP_PREFIXES", value_name = "N", default_value_t = Sizes::default().prefixes, value_parser = size(1 << 24))]
    pub map_prefixes: u32,
    /// Policies
    #[arg(long, env = "HOLDFAST_MAP_POLICIES", value_name = "N", default_value_t = Sizes::default().policies, value_parser = size(1 << 20))]
    pub map_policies: u32,
    /// Slots of all producer sets
    #[arg(long, env = "HOLDFAST_MAP_SLOTS", value_name = "N", default_value_t = Sizes::default().slots, value_parser = size(1 << 24))]
    pub map_slots: u32,
    /// Producers, counted once for each policy
    #[arg(long, env = "HOLDFAST_MAP_BACKENDS", value_name = "N", default_value_t = Sizes::default().backends, value_parser = size(1 << 24))]
    pub map_backends: u32,
    /// Flow entries, two a flow
    #[arg(long, env = "HOLDFAST_MAP_FLOWS", value_name = "N", default_value_t = Sizes::default().flows, value_parser = size(1 << 24))]
    pub map_flows: u32,
}

fn size(most: i64) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=most)
}

/// Where desired objects come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A directory of files.
    Directory(PathBuf),
    /// An API server.
    Kube,
}

impl Source {
    /// As metrics and `holdfast status` name it.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Directory(_) => "dir",
            Self::Kube => "kube",
        }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("dir", path)) if !path.is_empty() => Ok(Self::Directory(path.into())),
            None if text == "kube" => Ok(Self::Kube),
            _ => Err("this release knows dir:PATH and kube".to_owned()),
        }
    }
}

fn audit_interval(text: &str) -> Result<Duration, String> {
    let interval = Duration::from_nanos(validate::duration(text)?);
    // Everything is looked at within five minutes, whatever the size of the node.
    if (Duration::from_secs(1)..=Duration::from_secs(300)).contains(&interval) {
        Ok(interval)
    } else {
        Err(format!("{text} is not within 1s to 5m"))
    }
}

fn node(text: &str) -> Result<String, String> {
    validate::node_name(text).map(|()| text.to_owned())
}

/// Smallest journal that is any use.
const SMALLEST_JOURNAL: u64 = 64 << 10;

fn journal_bytes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes) if bytes == 0 || bytes >= SMALLEST_JOURNAL => Ok(bytes),
        Ok(_) => Err(format!("0, or at least {SMALLEST_JOURNAL}")),
        Err(_) => Err("a number of bytes".to_owned()),
    }
}

/// How packets reach a producer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeliveryMode {
    /// The best for each producer's interface
    #[default]
    Auto,
    /// As to a neighbour on a link, always: slower, and what is attached to the producers' interfaces as egress sees the packets
    Neigh,
}

/// Which policies have metric series of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PolicyMetrics {
    /// Those that are held, failed or behind
    #[default]
    Troubled,
    /// All
    All,
}

/// What an agent is run with, judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// Where everything is kept.
    pub directories: Directories,
    /// Where desired objects come from.
    pub source: Source,
    /// How to reach the API server.
    pub kubeconfig: Option<PathBuf>,
    /// Name of this node.
    pub node: String,
    /// Health and metrics.
    pub listen: SocketAddr,
    /// Metrics besides.
    pub metrics_listen: Option<SocketAddr>,
    /// Per-policy series for every policy.
    pub all_policies: bool,
    /// Where the program is attached.
    pub attach: AttachMode,
    /// Every packet is delivered as to a neighbour.
    pub neighbour_only: bool,
    /// A foreign program before ours does not fail a proof.
    pub allow_foreign_before: bool,
    /// Time between audits.
    pub audit_interval: Duration,
    /// How lines are written.
    pub log_format: LogFormat,
    /// Which lines are written.
    pub log: String,
    /// Debug level of the packet program.
    pub packet_log: u64,
    /// Largest size of the journal; 0 = none.
    pub journal_bytes: u64,
    /// Sizes of maps.
    pub sizes: Sizes,
}

/// Flags that do not go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The host name cannot be the name of a node.
    #[error("the host name cannot be the name of a node ({0}): give --node")]
    HostName(String),
}

impl AgentConfig {
    /// Judges flags.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(directories: Directories, args: AgentArgs) -> Result<Self, ConfigError> {
        let node = match args.node {
            Some(node) => node,
            None => host_name()?,
        };
        let sizes = args.sizes;
        Ok(Self {
            directories,
            source: args.source,
            kubeconfig: args.kubeconfig,
            node,
            listen: args.listen,
            metrics_listen: args.metrics_listen,
            all_policies: args.policy_metrics == PolicyMetrics::All,
            attach: args.attach,
            neighbour_only: args.delivery == DeliveryMode::Neigh,
            allow_foreign_before: args.allow_foreign_before,
            audit_interval: args.audit_interval,
            log_format: args.log_format,
            log: args.log,
            packet_log: args.packet_log,
            journal_bytes: args.journal_bytes,
            sizes: Sizes {
                consumers: sizes.map_consumers,
                sources: sizes.map_sources,
                locals: sizes.map_locals,
                services: sizes.map_services,
                prefixes: sizes.map_prefixes,
                policies: sizes.map_policies,
                slots: sizes.map_slots,
                backends: sizes.map_backends,
                flows: sizes.map_flows,
            },
        })
    }
}

/// The kernel's host name, in the lower case that node names have.
fn host_name() -> Result<String, ConfigError> {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .to_lowercase();
    node(&name).map_err(ConfigError::HostName)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        directories: Directories,
        #[command(flatten)]
        agent: AgentArgs,
    }

    fn config(flags: &[&str]) -> Result<AgentConfig, String> {
        let flags = Flags::try_parse_from([&["agent"], flags].concat()).map_err(|error| error.to_string())?;
        AgentConfig::new(flags.directories, flags.agent).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_everything_has_a_value() {
        let config = config(&[]).unwrap();
        assert_eq!(config.source, Source::Directory("/etc/holdfast/objects".into()));
        assert_eq!(config.listen.to_string(), "127.0.0.1:9643");
        assert_eq!(config.metrics_listen, None);
        assert_eq!(config.sizes, Sizes::default());
        assert_eq!(config.journal_bytes, 16 << 20);
        assert!(!config.all_policies && !config.allow_foreign_before && !config.neighbour_only);
        assert_eq!(config.audit_interval, Duration::from_secs(30));
        assert_eq!(
            config.directories.bpffs_dir,
            PathBuf::from("/sys/fs/bpf/holdfast")
        );
    }

    #[test]
    fn an_api_server_can_be_the_source() {
        let config = config(&["--source", "kube", "--kubeconfig", "/etc/holdfast/kubeconfig"]).unwrap();
        assert_eq!(config.source, Source::Kube);
        assert_eq!(config.kubeconfig, Some("/etc/holdfast/kubeconfig".into()));
    }

    #[test]
    fn what_does_not_go_is_refused() {
        for flags in [
            ["--attach", "xdp"],
            ["--delivery", "peer"],
            ["--source", "kube:x"],
            ["--source", "dir:"],
            ["--node", "Edge_1"],
            ["--map-flows", "0"],
            ["--journal-bytes", "1000"],
            ["--audit-interval", "0s"],
            ["--audit-interval", "6m"],
            ["--map-slots", "16777217"],
        ] {
            assert!(config(&flags).is_err(), "{flags:?}");
        }
    }
}
