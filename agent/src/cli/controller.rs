//! `holdfast controller`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rand::TryRng;
use rand::rngs::SysRng;
use tokio::signal::unix::{SignalKind, signal};

use super::Answer;
use super::output;
use crate::apiserver::ApiServer;
use crate::clock::System;
use crate::controller::run::{self, Settings};
use crate::fault;
use crate::telemetry::{self, Control, LogFormat};

/// Flags of `holdfast controller`. They have ids of their own: what the file of settings says of the agent's flags of the
/// same name is not about them.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
It needs no privileges and no node of its own. Several can run: one leads, the others know as much and stand by.

Exit codes: 0 it was told to end, 1 it could not start or had to end, 2 a flag or a variable is wrong.

Examples:
  holdfast controller                                     in a pod
  holdfast controller --kubeconfig ~/.kube/config         outside")]
pub struct Args {
    /// The API server to talk to [default: that of KUBECONFIG, or else the pod's own]
    #[arg(
        id = "controller-kubeconfig",
        long = "kubeconfig",
        env = "HOLDFAST_KUBECONFIG",
        value_name = "FILE"
    )]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the lease by which one of several leads
    #[arg(
        id = "controller-namespace",
        long = "namespace",
        env = "HOLDFAST_NAMESPACE",
        value_name = "NAME",
        default_value = "holdfast-system"
    )]
    pub namespace: String,
    /// Name by which it stands for that lease, which no other has [default: the host name, and something random]
    #[arg(
        id = "controller-identity",
        long = "identity",
        env = "HOLDFAST_IDENTITY",
        value_name = "NAME"
    )]
    pub identity: Option<String>,
    /// Namespace of the nodes' leases
    #[arg(
        id = "controller-lease-namespace",
        long = "lease-namespace",
        env = "HOLDFAST_LEASE_NAMESPACE",
        value_name = "NAME",
        default_value = "holdfast-node-lease"
    )]
    pub lease_namespace: String,
    /// Address of `/metrics`, `/livez` and `/readyz`
    #[arg(
        id = "controller-listen",
        long = "listen",
        env = "HOLDFAST_LISTEN",
        value_name = "ADDR:PORT",
        default_value = "127.0.0.1:9644"
    )]
    pub listen: SocketAddr,
    /// How lines are written
    #[arg(
        id = "controller-log-format",
        long = "log-format",
        env = "HOLDFAST_LOG_FORMAT",
        value_name = "LOG_FORMAT",
        value_enum,
        default_value_t
    )]
    pub log_format: LogFormat,
    /// Which lines are written, as in `debug` or `info,holdfast::controller=debug`
    #[arg(
        id = "controller-log",
        long = "log",
        env = "HOLDFAST_LOG",
        value_name = "FILTER",
        default_value = "info",
        value_parser = telemetry::filter
    )]
    pub log: String,
}

pub(super) fn run(args: &Args) -> Answer {
    let log = match telemetry::init(args.log_format, &args.log) {
        Ok(log) => log,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    fault::end_process_on_panic();
    // One task owns everything, and the rest waits for a server: one thread is enough.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(live(args, &log)),
        Err(error) => {
            tracing::error!(%error, "no event loop");
            Answer::No
        }
    }
}

async fn live(args: &Args, log: &Control) -> Answer {
    // Before the start, so that no signal meets the default action half-way.
    let (mut terminate, mut interrupt) =
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(%error, "signals cannot be received");
                return Answer::No;
            }
        };
    let api = match ApiServer::configured(args.kubeconfig.as_deref()).await {
        Ok(api) => api,
        Err(error) => {
            tracing::error!(%error, "the controller does not start");
            return Answer::No;
        }
    };
    let settings = Settings {
        api,
        lease_namespace: args.lease_namespace.clone(),
        namespace: args.namespace.clone(),
        identity: args.identity.clone().unwrap_or_else(identity),
        listen: args.listen,
        clock: Arc::new(System),
    };
    let mut running = match run::start(settings).await {
        Ok(running) => running,
        Err(error) => {
            tracing::error!(%error, "the controller does not start");
            return Answer::No;
        }
    };
    tracing::info!(address = %running.address, "the controller runs");
    // Cancel safety: each branch is only waited for.
    let answer = tokio::select! {
        _ = terminate.recv() => Answer::Yes,
        _ = interrupt.recv() => Answer::Yes,
        () = running.ended() => {
            tracing::error!("the controller's task has ended by itself");
            Answer::No
        }
    };
    running.end().await;
    tracing::info!("the controller ends");
    log.flush();
    answer
}

/// The pod's name, for people, and something that no other has: a pod of a stateful set comes back under its name.
fn identity() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let random = SysRng.try_next_u32().unwrap_or_default();
    format!("{host}_{random:08x}")
}
