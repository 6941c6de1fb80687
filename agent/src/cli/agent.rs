//! `holdfast agent`.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::{Answer, output};
use crate::app::{self, Running, Settings};
use crate::config::{AgentArgs, AgentConfig, Directories, Source};
use crate::fault;
use crate::telemetry::{self, LogFormat};

/// Flags are [`AgentArgs`]: what they are is the business of the configuration.
pub(super) const EXAMPLES: &str = "\
It ends on SIGTERM and SIGINT, and detaches nothing then: what is programmed goes on serving, and the next agent \
takes it over.

Exit codes: 0 it was told to end, 1 it could not start or had to end, 2 the flags are wrong.

Examples:
  holdfast agent --source dir:/etc/holdfast/objects --node edge-1
  HOLDFAST_LISTEN=127.0.0.1:9700 HOLDFAST_LOG=debug holdfast agent";

/// How long an orderly end may take; what serves is in the kernel, so nothing depends on it.
const ENDING: Duration = Duration::from_secs(5);

/// Kernel calls have threads of their own, file writes the blocking pool: two are enough for all tasks.
const WORKERS: usize = 2;

pub(super) fn run(directories: Directories, args: AgentArgs) -> Answer {
    let config = match AgentConfig::new(directories, args) {
        Ok(config) => config,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    if let Err(error) = telemetry::init(config.log_format, &config.log) {
        output::complain(error);
        return Answer::Unknown;
    }
    fault::end_process_on_panic();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let answer = runtime.block_on(live(config));
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

async fn live(config: AgentConfig) -> Answer {
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
    let mut running = match app::start(settings(config)).await {
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
    // Cancel safety: each branch is only waited for.
    let answer = tokio::select! {
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
    tracing::info!("the agent ends; what is programmed goes on serving");
    if tokio::time::timeout(ENDING, running.stop()).await.is_err() {
        tracing::warn!("the last report could not be written within {ENDING:?}");
    }
}

fn settings(config: AgentConfig) -> Settings {
    let Source::Directory(objects) = config.source;
    Settings {
        node: config.node,
        objects,
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
    }
}
