//! `holdfast wait`: at this node's agent, or at an API server ([`cluster`]).

mod cluster;

use std::path::PathBuf;
use std::time::Duration;

use holdfast_engine::model::ObjectName;
use hyper::StatusCode;

pub(super) use cluster::Found as WaitedInCluster;

use super::client::{Client, ClientError, block_on};
use super::output::{self, Format, FormatArgs};
use super::{Answer, status};
use crate::api::validate;
use crate::config::Directories;
use crate::serve::wire::{Goal, Intent, Waited};

/// Flags of `holdfast wait`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
The agent of this node is asked what its kernel serves; one that is not running yet is waited for, too. With --kubeconfig \
or --in-cluster the API server is asked what all nodes serve, or all that is for one attachment: without a policy, every \
policy that is about its traffic.

Exit codes: 0 it is so, 1 it was not so in time, 2 nobody could be asked.

Examples:
  holdfast wait shop/dns
  holdfast wait shop/dns --for held --timeout 5s
  holdfast wait shop/dns --generation 8 --timeout 2m
  holdfast wait shop/dns --attachment shop/web-0
  holdfast wait shop/dns --kubeconfig ~/.kube/config      all nodes, at the present generation
  holdfast wait --attachment shop/web-0 --kubeconfig ~/.kube/config")]
pub struct Args {
    /// The policy
    #[arg(
        value_name = "NAMESPACE/NAME",
        value_parser = policy_name,
        required_unless_present_any = ["wait-kubeconfig", "in_cluster"]
    )]
    pub policy: Option<ObjectName>,
    /// Only this consumer of it
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = attachment_name)]
    pub attachment: Option<ObjectName>,
    /// What to wait for
    #[arg(long = "for", value_enum, default_value = "programmed", value_name = "STATE")]
    pub goal: Goal,
    /// At this generation or a later one
    #[arg(long, value_name = "N")]
    pub generation: Option<u64>,
    /// How long: 30s, 5m; 0s looks once
    #[arg(long, default_value = "30s", value_name = "DURATION", value_parser = duration)]
    pub timeout: Duration,
    /// Ask the API server of this kubeconfig instead of the agent of this node
    // An id of its own: what the settings say of the agent's flag of this name is not about this one.
    #[arg(
        id = "wait-kubeconfig",
        long = "kubeconfig",
        value_name = "FILE",
        help_heading = "API server"
    )]
    pub kubeconfig: Option<PathBuf>,
    /// Ask the API server of KUBECONFIG, or else of the pod that this runs in
    #[arg(long, conflicts_with = "wait-kubeconfig", help_heading = "API server")]
    pub in_cluster: bool,
    /// Namespace of the nodes' leases
    #[arg(
        id = "wait-lease-namespace",
        long = "lease-namespace",
        value_name = "NAME",
        default_value = "holdfast-node-lease",
        help_heading = "API server"
    )]
    pub lease_namespace: String,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// `namespace/name` of a policy.
pub(super) fn policy_name(text: &str) -> Result<ObjectName, String> {
    object_name(text, "a policy")
}

/// `namespace/name` of an attachment.
pub(super) fn attachment_name(text: &str) -> Result<ObjectName, String> {
    object_name(text, "an attachment")
}

fn object_name(text: &str, what: &str) -> Result<ObjectName, String> {
    let (namespace, name) = text
        .split_once('/')
        .ok_or_else(|| format!("{what} is named namespace/name"))?;
    let name = ObjectName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    match validate::object_name(&name) {
        Ok(()) => Ok(name),
        Err(problems) => Err(problems.to_string()),
    }
}

/// As policies write durations.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    validate::duration(text).map(Duration::from_nanos)
}

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    match (&args.policy, &args.kubeconfig) {
        (_, Some(kubeconfig)) => cluster::run(Some(kubeconfig), args),
        _ if args.in_cluster => cluster::run(None, args),
        (Some(policy), None) => run_locally(directories, policy, args),
        // The flags do not let this happen.
        (None, None) => Answer::Unknown,
    }
}

fn run_locally(directories: &Directories, policy: &ObjectName, args: &Args) -> Answer {
    let waited = match block_on(ask(&Client::new(&directories.run_dir), policy, args)) {
        Ok(waited) => waited,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    match args.format.output {
        Format::Json => {
            output::json(&waited);
        }
        Format::Table => output::print(&sentence(policy, args, &waited)),
    }
    if waited.met { Answer::Yes } else { Answer::No }
}

/// How often an agent that does not listen yet is asked.
const RETRY: Duration = Duration::from_millis(100);
/// What the agent may take beyond the time that it was given.
const GRACE: Duration = Duration::from_secs(5);

async fn ask(client: &Client, policy: &ObjectName, args: &Args) -> Result<Waited, ClientError> {
    let deadline = tokio::time::Instant::now() + args.timeout;
    loop {
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        let mut path = format!(
            "/v1/wait?policy={}&for={}&timeoutMs={}",
            policy,
            args.goal.state().to_lowercase(),
            left.as_millis()
        );
        if let Some(attachment) = &args.attachment {
            path.push_str(&format!("&attachment={attachment}"));
        }
        if let Some(generation) = args.generation {
            path.push_str(&format!("&generation={generation}"));
        }
        match client.get(&path, left + GRACE).await {
            // Also one that goes away meanwhile: its successor may tell.
            Err(error) if is_restart(&error) && !left.is_zero() => tokio::time::sleep(RETRY.min(left)).await,
            answer => return answer,
        }
    }
}

fn is_restart(error: &ClientError) -> bool {
    match error {
        ClientError::NotRunning { .. } | ClientError::Broken(_) => true,
        ClientError::Refused { status, .. } => *status == StatusCode::SERVICE_UNAVAILABLE,
        ClientError::Denied(_) | ClientError::TooLate(_) => false,
    }
}

fn sentence(name: &ObjectName, args: &Args, waited: &Waited) -> String {
    match (&waited.policy, &args.attachment, &waited.intent) {
        (Some(_), Some(_), Some(intent)) => format!("{name}: {}\n", intent_in_a_line(intent)),
        (Some(_), Some(attachment), None) => {
            format!("{name}: does not select {attachment} on this node\n")
        }
        (Some(policy), None, _) => format!("{}\n", status::in_a_line(policy)),
        (None, ..) => format!("{name}: selects no consumer on this node\n"),
    }
}

fn intent_in_a_line(intent: &Intent) -> String {
    let reason = match &intent.reason {
        Some(reason) => format!(" ({reason})"),
        None => String::new(),
    };
    format!(
        "{} is {}{reason} since {}",
        intent.consumer, intent.state, intent.since
    )
}
