//! `holdfast agent`.

use std::time::Duration;

use holdfast_engine::model::Boot;
use tokio::signal::unix::{SignalKind, signal};

use super::Answer;
use super::client::{Client, ClientError, block_on};
use super::output::{self, Format, FormatArgs};
use crate::app::{self, Running, Settings};
use crate::config::layers::Setting;
use crate::config::{AgentArgs, AgentConfig, Directories};
use crate::serve::wire::{LogFilter, SetLog};
use crate::telemetry::{self, Control, LogFormat};
use crate::{fault, service};

/// Flags are [`AgentArgs`]: what they are is the business of the configuration.
pub(super) const EXAMPLES: &str = "\
It ends on SIGTERM and SIGINT, and detaches nothing then: what is programmed goes on serving, and the next agent \
takes it over.

Every flag is also a variable and a key of the file: `--audit-interval 10s`, HOLDFAST_AUDIT_INTERVAL=10s and the line \
`audit-interval = \"10s\"` of /etc/holdfast/agent.toml say the same. The flag goes before the variable, and that \
before the file. A key that does not exist is refused, with its line.

Exit codes: 0 it was told to end, 1 it could not start or had to end, 2 a flag, a variable or the file is wrong.

Examples:
  holdfast agent --source dir:/etc/holdfast/objects --node edge-1
  holdfast agent --source kube --kubeconfig /etc/holdfast/kubeconfig
  HOLDFAST_LISTEN=127.0.0.1:9700 HOLDFAST_LOG=debug holdfast agent
  holdfast agent --config edge.toml --print-config        what would it run with, and why?
  holdfast agent --print-config > /etc/holdfast/agent.toml
                                                          a file with all settings to begin with";

/// Flags of `holdfast agent`, and what can be said to one that runs.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// What it is run with.
    #[command(flatten)]
    pub flags: AgentArgs,
    /// What is said to the one that runs.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Subcommands of `holdfast agent`.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum Command {
    /// Show or change which lines the running agent writes
    Log(LogArgs),
}

/// Flags of `holdfast agent log`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
A change holds until the agent ends: the next one starts with what is configured (`--log`).

Exit codes: 0 here it is, or it is in force; 2 the agent could not be asked.

Examples:
  holdfast agent log                                      which lines are written now?
  holdfast agent log info,holdfast::netlink=debug         more of one part
  holdfast agent log --reset                              back to what is configured")]
pub struct LogArgs {
    /// Which lines, as in `debug` or `info,holdfast::netlink=debug`; without it nothing is changed
    #[arg(value_name = "FILTER", value_parser = telemetry::filter)]
    pub filter: Option<String>,
    /// Go back to what the agent was started with
    #[arg(long, conflicts_with = "filter")]
    pub reset: bool,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How long the agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an orderly end may take; what serves is in the kernel, so nothing depends on it.
const ENDING: Duration = Duration::from_secs(5);

/// How long the engine may take to say how things are at the end.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// Kernel calls have threads of their own, file writes the blocking pool: two are enough for all tasks.
const WORKERS: usize = 2;

pub(super) fn run(directories: Directories, args: Args, settings: &[Setting]) -> Answer {
    match args.command {
        Some(Command::Log(log)) => change_log(&directories, &log),
        None => run_agent(directories, args.flags, settings),
    }
}

fn change_log(directories: &Directories, args: &LogArgs) -> Answer {
    let client = Client::new(&directories.run_dir);
    let answer: Result<LogFilter, ClientError> = if args.filter.is_some() || args.reset {
        let wanted = SetLog {
            filter: args.filter.clone(),
        };
        block_on(client.put("/v1/log", &wanted, PATIENCE))
    } else {
        block_on(client.get("/v1/log", PATIENCE))
    };
    match answer {
        Ok(log) => match args.format.output {
            Format::Json => output::json(&log),
            Format::Table => {
                output::print(&said(&log));
                Answer::Yes
            }
        },
        Err(error) => {
            output::complain(error);
            Answer::Unknown
        }
    }
}

fn said(log: &LogFilter) -> String {
    if log.filter == log.configured {
        format!("{}\n", log.filter)
    } else {
        format!("{} (configured: {})\n", log.filter, log.configured)
    }
}

fn run_agent(directories: Directories, args: AgentArgs, settings: &[Setting]) -> Answer {
    let print_config = args.print_config;
    let config = match AgentConfig::new(directories, args) {
        Ok(config) => config,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    if print_config {
        for setting in settings {
            output::print(&format!("{setting}\n"));
        }
        // What has no value of its own is the host's.
        if settings
            .iter()
            .any(|setting| setting.key == "node" && setting.value.is_none())
        {
            output::print(&format!("# node: the host name, {}\n", config.node));
        }
        return Answer::Yes;
    }
    let log = match telemetry::init(config.log_format, &config.log) {
        Ok(log) => log,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    fault::end_process_on_panic();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let answer = runtime.block_on(live(config, log.clone()));
            log.flush();
            // A file system that hangs keeps its thread, not the process.
            runtime.shutdown_background();
            answer
        }
        Err(error) => {
            tracing::error!(%error, "no event loop");
            Answer::No
        }
    }
}

async fn live(config: AgentConfig, log: Control) -> Answer {
    // Before the start, so that no signal meets the default action half-way.
    let (mut terminate, mut interrupt) =
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(%error, "signals cannot be received");
                return Answer::No;
            }
        };
    let log_format = config.log_format;
    let node = config.node.clone();
    let mut running = match app::start(settings(config, log)).await {
        Ok(running) => running,
        Err(error) => {
            match log_format {
                // A list of what is missing has lines.
                LogFormat::Human => output::complain(error),
                LogFormat::Json => tracing::error!(%error, "the agent does not start"),
            }
            return Answer::No;
        }
    };
    service::running(&node);
    let watchdog = service::watchdog(running.sources().clone());
    // Cancel safety: each branch is only waited for.
    let answer = tokio::select! {
        () = watchdog => Answer::No,
        _ = terminate.recv() => Answer::Yes,
        _ = interrupt.recv() => Answer::Yes,
        () = running.ended() => {
            tracing::error!("the engine's loop has ended by itself");
            Answer::No
        }
    };
    end(running).await;
    answer
}

async fn end(running: Running) {
    service::ending();
    let metrics = tokio::time::timeout(LAST_LOOK, running.handle.metrics(false)).await;
    let metrics = metrics.ok().and_then(Result::ok).unwrap_or_default();
    let started = running.sources().started.boot;
    let counts = metrics.summary.intents;
    tracing::info!(
        programmed = counts.programmed,
        held = counts.held,
        failed = counts.failed,
        pending = counts.pending,
        up = ?Duration::from_secs(Boot(metrics.now_boot_ns).since(started) / Boot::SECOND),
        "the agent ends; what is programmed goes on serving"
    );
    if tokio::time::timeout(ENDING, running.stop()).await.is_err() {
        tracing::warn!("the last report could not be written within {ENDING:?}");
    }
}

fn settings(config: AgentConfig, log: Control) -> Settings {
    Settings {
        node: config.node,
        source: config.source,
        kubeconfig: config.kubeconfig,
        bpffs_dir: config.directories.bpffs_dir,
        state_dir: config.directories.state_dir,
        run_dir: config.directories.run_dir,
        listen: config.listen,
        metrics_listen: config.metrics_listen,
        sizes: config.sizes,
        attach: config.attach,
        neighbour_only: config.neighbour_only,
        allow_foreign_before: config.allow_foreign_before,
        all_policies: config.all_policies,
        audit_interval: config.audit_interval,
        debug: config.packet_log,
        journal_bytes: config.journal_bytes,
        log,
    }
}
