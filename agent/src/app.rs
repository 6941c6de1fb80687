//! The composition root: the only place that knows everybody.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use holdfast_ebpf::abi::LAYOUT_VERSION;
use holdfast_engine::Engine;
use holdfast_engine::model::{Config, Event, Now, Remembered};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::api::hash;
use crate::api::node_report::Epoch;
use crate::apiserver::{ApiServer, ConnectError, OtherNode};
use crate::clock::{Clock, System};
use crate::config::Source;
use crate::datapath::{
    self, AgentLock, AttachMode, Datapath, DatapathError, Hook, Kernel, Opened, PinError, Sizes, filter,
};
use crate::driver::lanes::Lanes;
use crate::driver::{self, Driver, Handle, Identification, Inputs, MetricsSnapshot, Outputs, Snapshot};
use crate::journal::{self, Journal};
use crate::loops::{self, Counter};
use crate::netlink::hooks::{self, HookNews};
use crate::netlink::{self, Counters, Monitor, NetlinkError};
use crate::preflight;
use crate::report::file::WriteCounts;
use crate::report::{self, memory};
use crate::serve::http::{self, ListenError};
use crate::serve::look::{self, Looker};
use crate::serve::socket::{self, SocketError};
use crate::serve::{self};
use crate::source::SourceNews;
use crate::source::{dir, kube};
use crate::telemetry;

/// What an agent is run with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the node.
    pub node: String,
    /// Where objects come from.
    pub source: Source,
    /// How to reach the API server, if that is not said by the environment.
    pub kubeconfig: Option<PathBuf>,
    /// Where pins go.
    pub bpffs_dir: PathBuf,
    /// What survives a reboot.
    pub state_dir: PathBuf,
    /// Sockets, locks, the report.
    pub run_dir: PathBuf,
    /// `/metrics`, `/livez`, `/readyz`.
    pub listen: SocketAddr,
    /// A second address for `/metrics` alone.
    pub metrics_listen: Option<SocketAddr>,
    /// Sizes of the maps that are made.
    pub sizes: Sizes,
    /// Where the program is attached.
    pub attach: AttachMode,
    /// Every packet is delivered as to a neighbour.
    pub neighbour_only: bool,
    /// A foreign program before ours does not fail a proof.
    pub allow_foreign_before: bool,
    /// Per-policy series for every policy, not only for those in trouble.
    pub all_policies: bool,
    /// Time between audits.
    pub audit_interval: Duration,
    /// Debug level of the BPF program; 0 = no lines.
    pub debug: u64,
    /// Largest size of the journal; 0 = none.
    pub journal_bytes: u64,
    /// Which lines are written.
    pub log: telemetry::Control,
}

/// Why an agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The machine lacks something.
    #[error(transparent)]
    Preflight(#[from] preflight::Missing),
    /// The bpffs directory, or another agent has it.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The kernel side.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// The links.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// An address to listen on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The local socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The instructions in `HOLDFAST_CHAOS`, which only a build for tests reads.
    #[cfg(feature = "chaos")]
    #[error(transparent)]
    Chaos(#[from] datapath::chaos::BadInstruction),
    /// The API server's address and credentials.
    #[error(transparent)]
    ApiServer(#[from] ConnectError),
    /// Credentials of another node's agent.
    #[error(transparent)]
    OtherNode(#[from] OtherNode),
    /// A directory of ours.
    #[error("cannot make {}: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A thread.
    #[error("cannot start a worker thread: {0}")]
    Thread(#[source] io::Error),
    /// The id of this boot.
    #[error(transparent)]
    Boot(#[from] crate::files::FileError),
}

/// An agent that runs. Its addresses are what was really bound.
pub struct Running {
    /// Health and metrics.
    pub address: SocketAddr,
    /// Metrics besides.
    pub metrics_address: Option<SocketAddr>,
    /// Asks the engine's task.
    pub handle: Handle,
    sources: serve::Sources,
    stop: oneshot::Sender<()>,
    driver: JoinHandle<()>,
    threads: Vec<thread::JoinHandle<()>>,
    writers: Vec<JoinHandle<()>>,
    _http: http::Servers,
    _socket: socket::Socket,
}

impl Running {
    /// What everything that is served is made from.
    #[must_use]
    pub const fn sources(&self) -> &serve::Sources {
        &self.sources
    }

    /// Returns when the engine's task has ended by itself, which only a fault of ours makes it do.
    pub async fn ended(&mut self) {
        // A panic ends the process already (see `fault`); a cancelled task counts as ended.
        let _ = (&mut self.driver).await;
    }

    /// Ends it: detaches nothing, closes nothing, lets the kernel finish what it has begun, writes report and memory a
    /// last time.
    pub async fn stop(self) {
        // A driver that has ended by itself is as good as stopped.
        let _ = self.stop.send(());
        if !self.driver.is_finished() {
            let _ = self.driver.await;
        }
        let threads = self.threads;
        // A panic in one has ended the process already.
        let _ = tokio::task::spawn_blocking(move || {
            threads.into_iter().for_each(|thread| drop(thread.join()));
        })
        .await;
        for writer in self.writers {
            let _ = writer.await;
        }
    }
}

/// Starts an agent. Nothing that serves is touched before all that can fail has succeeded.
///
/// # Errors
/// [`StartError`]: each says what to do.
pub async fn start(settings: Settings) -> Result<Running, StartError> {
    for (path, mode) in [(&settings.run_dir, 0o755), (&settings.state_dir, 0o700)] {
        make_directory(path, mode)?;
    }
    preflight::require(&preflight::Wants {
        bpffs_dir: settings.bpffs_dir.clone(),
        run_dir: settings.run_dir.clone(),
        state_dir: settings.state_dir.clone(),
        attach: settings.attach,
    })?;
    let objects = objects(&settings).await?;
    let lock = AgentLock::take(&settings.bpffs_dir)?;
    // Links are subscribed to before the pins are read: a device that dies in between is told of.
    let monitor = Monitor::start(netlink::Options::default())?;
    let clock: Arc<dyn Clock> = Arc::new(System);
    let boot_id = memory::boot_id()?;
    let remembered = memory::load(&settings.state_dir, &boot_id).unwrap_or_else(|error| {
        tracing::warn!(%error, "the times of intents begin anew");
        memory::Memory::default()
    });
    let stamps = remembered.stamps;
    stamps.observe(clock.now());

    let Opened {
        kernel,
        wakes,
        logs,
        epoch,
        capacity,
    } = Kernel::open(
        &datapath::Options {
            bpffs_dir: settings.bpffs_dir.clone(),
            run_dir: settings.run_dir.clone(),
            sizes: settings.sizes,
            attach: settings.attach,
            allow_foreign_before: settings.allow_foreign_before,
        },
        lock,
    )?;
    kernel.set_debug(settings.debug)?;
    let hooks = hook_news(&kernel)?;
    let datapath = decorate(kernel)?;
    let adoption = datapath.adopt()?;
    let engine = Engine::new(Config {
        capacity,
        features: Kernel::FEATURES,
        neighbour_only: settings.neighbour_only,
        hashes: hash::hashes(),
        audit_every: nanos(settings.audit_interval),
    });

    let (wake_sender, wake_receiver) = mpsc::channel(QUEUE);
    let loops = Loops::new();
    loops.watch(loops::WAKES, wakes.run(wake_sender));
    if let Some(logs) = logs {
        loops.watch(loops::LOGS, logs.run());
    }

    let (source_sender, source_receiver) = mpsc::channel::<SourceNews>(QUEUE);
    let mut writers = Vec::new();
    let mut api = None;
    // A source ends by itself when the driver, which holds the other end, has ended.
    let rounds = loops.counter(loops::SOURCE);
    match objects {
        Objects::Directory(config) => {
            let _source = dir::spawn(config, source_sender, Arc::clone(&clock), rounds);
        }
        Objects::Kube(config) => {
            api = Some(config.api.clone());
            writers.push(kube::spawn(config, source_sender, Arc::clone(&clock), rounds));
        }
    }

    let (command_sender, command_receiver) = mpsc::channel(QUEUE);
    let (answer_sender, answer_receiver) = mpsc::channel(QUEUE);
    let (lanes, lane_threads) =
        Lanes::start(&datapath, &clock, &answer_sender).map_err(StartError::Thread)?;
    drop(answer_sender);
    let health = lanes.health();
    let handle = Handle::new(command_sender);
    let (report_sender, report_receiver) = watch::channel(Arc::new(Snapshot::default()));
    let (memory_sender, memory_receiver) = watch::channel(Arc::new(Vec::<Remembered>::new()));

    let report_counts = WriteCounts::default();
    if let Some(api) = api {
        let config = report::kube::Config {
            api,
            node: settings.node.clone(),
            epoch: Epoch {
                id: epoch.clone(),
                boot_id: boot_id.clone(),
                agent_start: stamps.rfc3339(clock.now()),
                agent_version: serve::VERSION.to_owned(),
                layout_version: LAYOUT_VERSION,
            },
            stamps: stamps.clone(),
        };
        writers.extend(report::kube::spawn(
            config,
            report_receiver.clone(),
            report_counts.clone(),
            loops.counter(loops::REPORT),
        ));
    }
    writers.extend([
        report::file::spawn(
            &settings.run_dir,
            report_receiver.clone(),
            stamps.clone(),
            report_counts.clone(),
        ),
        memory::spawn(
            &settings.state_dir,
            boot_id,
            memory_receiver,
            stamps.clone(),
            loops.counter(loops::MEMORY),
        ),
    ]);

    let sources = serve::Sources {
        driver: handle.clone(),
        lanes: health,
        links: {
            let asker = monitor.asker.clone();
            Arc::new(move || asker.ping())
        },
        stats: {
            // The lanes alone keep it alive: with them it ends.
            let datapath = Arc::downgrade(&datapath);
            Arc::new(move || {
                datapath
                    .upgrade()
                    .map(|datapath| datapath.stats())
                    .unwrap_or_default()
            })
        },
        looker: Looker::new(look::Kernel(Arc::downgrade(&datapath))),
        reports: report_receiver,
        clock: Arc::clone(&clock),
        stamps,
        started: clock.now(),
        source: settings.source.label(),
        all_policies: settings.all_policies,
        foreign_allowed: settings.allow_foreign_before,
        log: settings.log.clone(),
    };
    let servers = http::serve(sources.clone(), settings.listen, settings.metrics_listen).await?;
    let socket = socket::serve(sources.clone(), &settings.run_dir)?;

    let mut threads = lane_threads;
    let journal = keep_journal(&settings, &engine, clock.now());
    let journal = journal.map(|(journal, thread)| {
        threads.push(thread);
        journal
    });
    let (asker, checker) = (monitor.asker.clone(), monitor.asker);
    let driver = Driver::new(
        engine,
        vec![
            Event::Adopted(Box::new(adoption)),
            Event::Remembered(remembered.intents),
        ],
        clock,
        Identification {
            node: settings.node.clone(),
            epoch,
        },
        Inputs {
            commands: command_receiver,
            answers: answer_receiver,
            links: monitor.news,
            source: source_receiver,
            wakes: wake_receiver,
            hooks,
        },
        Outputs {
            lanes,
            ask_link: Box::new(move |ifindex| asker.ask(ifindex)),
            check_links: Box::new(move || checker.check()),
            report: report_sender,
            remembered: memory_sender,
            journal,
        },
        Box::new(Telltales {
            links: monitor.counters,
            reports: report_counts,
            loops,
        }),
    );
    let (stop, stopped) = oneshot::channel::<()>();
    let driver = tokio::spawn(driver.run(async {
        // A dropped sender is a stop too.
        let _ = stopped.await;
    }));
    tracing::info!(node = settings.node, address = %servers.address, "the agent runs");
    Ok(Running {
        address: servers.address,
        metrics_address: servers.metrics_address,
        handle,
        sources,
        stop,
        driver,
        threads,
        writers,
        _http: servers,
        _socket: socket,
    })
}

/// How long a start waits to learn whose credentials these are: an API server that is away keeps no agent from its work.
const WHO_AM_I: Duration = Duration::from_secs(2);

/// Where objects come from, made ready. Credentials of another node's agent are refused, if the API server says so soon; if
/// not, the source asks again before it believes anything.
async fn objects(settings: &Settings) -> Result<Objects, StartError> {
    match &settings.source {
        Source::Directory(directory) => Ok(Objects::Directory(dir::Config {
            directory: directory.clone(),
            state_dir: settings.state_dir.clone(),
            node: settings.node.clone(),
        })),
        Source::Kube => {
            let api = ApiServer::configured(settings.kubeconfig.as_deref()).await?;
            if let Ok(Ok(identity)) = tokio::time::timeout(WHO_AM_I, api.who_am_i()).await {
                identity.of_node(&settings.node)?;
            }
            Ok(Objects::Kube(kube::Config {
                api,
                state_dir: settings.state_dir.clone(),
                node: settings.node.clone(),
            }))
        }
    }
}

enum Objects {
    Directory(dir::Config),
    Kube(kube::Config),
}

/// Begins the journal of this life. It is for whoever looks later: without one the agent runs all the same.
fn keep_journal(settings: &Settings, engine: &Engine, now: Now) -> Option<(Journal, thread::JoinHandle<()>)> {
    if settings.journal_bytes == 0 {
        return None;
    }
    let options = journal::Options {
        directory: settings.state_dir.join(journal::DIRECTORY),
        limit: settings.journal_bytes,
    };
    journal::start(options, engine, now)
        .inspect_err(|error| tracing::warn!(%error, "no journal is kept"))
        .ok()
}

/// News of what others do at the hook that the program is at. What they do in the chain of tcx nobody tells, and their
/// filters come after it.
fn hook_news(kernel: &Kernel) -> Result<mpsc::Receiver<HookNews>, NetlinkError> {
    match kernel.hook() {
        Hook::Tcx => Ok(mpsc::channel(1).1),
        Hook::Clsact => {
            let program = kernel.program_id();
            hooks::watch(Box::new(move |filter| filter::is_ours(filter, program)))
        }
    }
}

/// Length of each queue to the driver. Who finds it full waits; nothing is dropped.
const QUEUE: usize = 1024;

/// The real data path; in a build for tests, inside the decorator that fails on purpose.
#[cfg(feature = "chaos")]
fn decorate(kernel: Kernel) -> Result<Arc<dyn Datapath>, StartError> {
    Ok(datapath::chaos::Chaos::from_environment(Arc::new(kernel))?)
}

/// The real data path.
#[cfg(not(feature = "chaos"))]
#[expect(
    clippy::unnecessary_wraps,
    reason = "the build for tests reads instructions here, which can be wrong"
)]
fn decorate(kernel: Kernel) -> Result<Arc<dyn Datapath>, StartError> {
    Ok(Arc::new(kernel))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn make_directory(path: &Path, mode: u32) -> Result<(), StartError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|source| StartError::Directory {
            path: path.to_owned(),
            source,
        })
}

/// Rounds of tasks that run beside the driver, by name.
#[derive(Clone, Debug)]
struct Loops(BTreeMap<&'static str, Arc<Counter>>);

impl Loops {
    fn new() -> Self {
        let names = [
            loops::SOURCE,
            loops::WAKES,
            loops::LOGS,
            loops::MEMORY,
            loops::REPORT,
        ];
        Self(names.map(|name| (name, Arc::default())).into())
    }

    fn counter(&self, name: &'static str) -> Arc<Counter> {
        self.0.get(name).cloned().unwrap_or_default()
    }

    /// Runs a loop; its end is an error that is counted and said. Nothing depends on it but promptness.
    fn watch(&self, name: &'static str, run: impl Future<Output = io::Result<()>> + Send + 'static) {
        let counter = self.counter(name);
        tokio::spawn(async move {
            counter.run();
            if let Err(error) = run.await {
                counter.error();
                tracing::error!(r#loop = name, %error, "a loop has ended");
            }
        });
    }
}

/// What the driver does not count itself.
struct Telltales {
    links: Arc<Counters>,
    reports: WriteCounts,
    loops: Loops,
}

impl driver::Telltales for Telltales {
    fn fill(&self, metrics: &mut MetricsSnapshot) {
        metrics.netlink_overruns = self.links.overruns();
        metrics.netlink_resyncs = self.links.resyncs();
        metrics.report_writes = self.reports.by_result();
        metrics.loops.insert(loops::NETLINK, self.links.rounds());
        let counted = self.loops.0.iter();
        metrics
            .loops
            .extend(counted.map(|(name, counter)| (*name, counter.read())));
    }
}
