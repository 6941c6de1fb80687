//! `holdfast status`.

use std::time::Duration;

use holdfast_engine::model::ObjectName;
use hyper::StatusCode;

use super::client::{Client, ClientError, block_on};
use super::output::{self, BAD, Format, FormatArgs, GOOD, age, or_dash, paint, state_style};
use super::wait::policy_name;
use super::{Answer, down};
use crate::config::Directories;
use crate::report::PolicyReport;
use crate::serve::wire::{Audit, PolicyDetail, Status};

/// Flags of `holdfast status`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
What is in trouble is listed, worst first, the oldest hold before younger ones; -o json has everything. While no agent \
runs it says so, since when, and what the pins go on serving (in JSON: `agent` is `down`, with `lastSeen`, `policies`, \
`interfaces`).

Exit codes: 0 here it is, 1 no such policy on this node, 2 the agent could not be asked.

Examples:
  holdfast status
  holdfast status shop/dns
  holdfast status -o json | jq '.policies[] | select(.state != \"Programmed\")'")]
pub struct Args {
    /// Only this policy, with its intents
    #[arg(value_name = "NAMESPACE/NAME", value_parser = policy_name)]
    pub policy: Option<ObjectName>,
    /// Every policy and attachment, not only those in trouble
    #[arg(long)]
    pub all: bool,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How long the agent may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    let client = Client::new(&directories.run_dir);
    match &args.policy {
        None => match block_on(client.get("/v1/status", PATIENCE)) {
            Err(error @ ClientError::NotRunning { .. }) => {
                output::complain(error);
                down::status(directories, args.format.output)
            }
            said => answer(said, args, |status| node(status, args.all)),
        },
        Some(name) => {
            let path = format!("/v1/policies/{name}");
            answer(block_on(client.get(&path, PATIENCE)), args, policy)
        }
    }
}

fn answer<T: serde::Serialize>(
    answer: Result<T, ClientError>,
    args: &Args,
    table: impl FnOnce(&T) -> String,
) -> Answer {
    match answer {
        Ok(value) => match args.format.output {
            Format::Json => output::json(&value),
            Format::Table => {
                output::print(&table(&value));
                Answer::Yes
            }
        },
        Err(error) => {
            output::complain(&error);
            match error {
                ClientError::Refused { status, .. } if status == StatusCode::NOT_FOUND => Answer::No,
                _ => Answer::Unknown,
            }
        }
    }
}

/// The node in a screen.
#[must_use]
pub fn node(status: &Status, all: bool) -> String {
    let now = &status.agent.now;
    let ready = if status.ready.ready {
        paint(GOOD, "ready")
    } else {
        paint(BAD, "not ready")
    };
    let mut text = format!(
        "{}: {ready}, agent {} up {}, epoch {}\n",
        status.node,
        status.agent.version,
        age(&status.agent.started, now),
        status.epoch
    );
    for missing in &status.ready.missing {
        text.push_str(&format!("  waits for {missing}\n"));
    }
    let objects: Vec<String> = status
        .source
        .objects
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    let read = match &status.source.last_activity {
        Some(stamp) => format!("read {} ago", age(stamp, now)),
        None => "never read".to_owned(),
    };
    let saved = match &status.source.saved {
        Some(stamp) => format!(", saved set {} old", age(stamp, now)),
        None => String::new(),
    };
    text.push_str(&format!(
        "source {}: {read}{saved}; {}\n",
        status.source.kind,
        if objects.is_empty() {
            "no objects".to_owned()
        } else {
            objects.join(", ")
        }
    ));
    let counts = status.intents.counts;
    text.push_str(&format!(
        "intents {}: {} programmed, {} held{}, {} failed{}, {} pending; {} removing\n",
        counts.desired,
        counts.programmed,
        counts.held,
        reasons(&status.intents.held_by_reason),
        counts.failed,
        reasons(&status.intents.failed_by_reason),
        counts.pending,
        status.intents.removing
    ));
    text.push_str(&audit(status.audit.as_ref(), now));
    text.push_str(&policies(status, all));
    text.push_str(&attachments(status, all));
    for problem in &status.source.problems {
        text.push_str(&format!("\n{problem}\n"));
        text.push_str(problem.excerpt.as_deref().unwrap_or_default());
    }
    text
}

/// Rows of a table of one screen.
const SCREEN: usize = 15;

/// The first rows, or all, and how many there are beyond.
fn some_rows(mut rows: Vec<Vec<String>>, header: &[&str], all: bool) -> String {
    let more = if all { 0 } else { rows.len().saturating_sub(SCREEN) };
    rows.truncate(rows.len() - more);
    let mut text = format!("\n{}", output::table(header, rows));
    if more > 0 {
        text.push_str(&format!("and {more} more: --all shows them\n"));
    }
    text
}

/// Policies that are not programmed: failed ones first, then the oldest holds.
fn policies(status: &Status, all: bool) -> String {
    let rank = |policy: &PolicyReport| match policy.state.as_str() {
        "Failed" => 0,
        "Held" => 1,
        "Pending" => 2,
        _ => 3,
    };
    let since = |policy: &PolicyReport| policy.held_since.clone().unwrap_or_else(|| policy.since.clone());
    let mut shown: Vec<&PolicyReport> = status
        .policies
        .iter()
        .filter(|policy| all || policy.state != "Programmed")
        .collect();
    if shown.is_empty() {
        return match status.policies.len() {
            0 => "policies: none selects a consumer here\n".to_owned(),
            1 => "policies: the only one is programmed\n".to_owned(),
            many => format!("policies: all {many} are programmed\n"),
        };
    }
    shown.sort_by_cached_key(|policy| {
        (
            rank(policy),
            since(policy),
            policy.namespace.clone(),
            policy.name.clone(),
        )
    });
    let now = &status.agent.now;
    let rows = shown.iter().map(|policy| policy_row(policy, now)).collect();
    let mut text = some_rows(
        rows,
        &[
            "POLICY",
            "GENERATION",
            "STATE",
            "REASON",
            "FOR",
            "PROGRAMMED",
            "MESSAGE",
        ],
        all,
    );
    if let Some(worst) = shown.first().filter(|policy| policy.state != "Programmed") {
        text.push_str(&format!(
            "what is missing: holdfast why {}/{}\n",
            worst.namespace, worst.name
        ));
    }
    text
}

/// Attachments that are not ready, or not attached.
fn attachments(status: &Status, all: bool) -> String {
    let rows: Vec<Vec<String>> = status
        .attachments
        .iter()
        .filter(|attachment| all || !attachment.ready || !attachment.attached)
        .map(|attachment| {
            vec![
                format!("{}/{}", attachment.namespace, attachment.name),
                attachment.interface.clone(),
                or_dash(attachment.ifindex),
                yes(attachment.ready),
                or_dash(attachment.reason),
                yes(attachment.attached),
                yes(attachment.open),
            ]
        })
        .collect();
    match (rows.len(), status.attachments.len()) {
        (0, 0) => "attachments: none\n".to_owned(),
        (0, all) => format!("attachments: {all}, all ready and attached\n"),
        _ => some_rows(
            rows,
            &[
                "ATTACHMENT",
                "INTERFACE",
                "IFINDEX",
                "READY",
                "REASON",
                "ATTACHED",
                "OPEN",
            ],
            all,
        ),
    }
}

/// The last comparison with the kernel, in a line.
fn audit(audit: Option<&Audit>, now: &str) -> String {
    let Some(audit) = audit else {
        return "audit: none yet\n".to_owned();
    };
    format!(
        "audit {} ago: {} not as it was left{}\n",
        age(&audit.ended, now),
        audit.found,
        match reasons(&audit.found_by_kind) {
            all if all.is_empty() => all,
            all => format!("; since the start{all}"),
        }
    )
}

fn reasons<T: std::fmt::Display>(counts: &std::collections::BTreeMap<T, u64>) -> String {
    let some: Vec<String> = counts
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    if some.is_empty() {
        String::new()
    } else {
        format!(" ({})", some.join(", "))
    }
}

fn policy_row(policy: &PolicyReport, now: &str) -> Vec<String> {
    vec![
        format!("{}/{}", policy.namespace, policy.name),
        generation(policy),
        paint(state_style(&policy.state), &policy.state),
        or_dash(policy.reason.as_deref()),
        age(policy.held_since.as_ref().unwrap_or(&policy.since), now),
        format!("{}/{}", policy.intents.programmed, policy.intents.desired),
        policy.message.clone().unwrap_or_default(),
    ]
}

/// The generation, and the one that is served if that is another.
fn generation(policy: &PolicyReport) -> String {
    match &policy.serving {
        Some(serving) => format!("{} (serves {})", policy.generation, serving.generation),
        None => policy.generation.to_string(),
    }
}

fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

/// One policy, with its intents.
#[must_use]
pub fn policy(detail: &PolicyDetail) -> String {
    let rows = detail
        .intents
        .iter()
        .map(|intent| {
            vec![
                intent.consumer.clone(),
                intent.interface.clone(),
                or_dash(intent.ifindex),
                paint(state_style(&intent.state), &intent.state),
                or_dash(intent.reason.as_deref()),
                intent.since.clone(),
                intent.message.clone().unwrap_or_default(),
            ]
        })
        .collect();
    format!(
        "{}\nuid {}, covers {}\n\n{}",
        in_a_line(&detail.policy),
        detail.policy.uid,
        detail.policy.covers,
        output::table(
            &[
                "CONSUMER",
                "INTERFACE",
                "IFINDEX",
                "STATE",
                "REASON",
                "SINCE",
                "MESSAGE"
            ],
            rows
        )
    )
}

/// A policy in a line.
pub(super) fn in_a_line(policy: &PolicyReport) -> String {
    let mut line = format!("{}/{}: {}", policy.namespace, policy.name, policy.state);
    if let Some(reason) = &policy.reason {
        line.push_str(&format!(" ({reason})"));
    }
    line.push_str(&format!(
        " at generation {}, {} of {} programmed, since {}",
        generation(policy),
        policy.intents.programmed,
        policy.intents.desired,
        policy.since
    ));
    if let Some(message) = &policy.message {
        line.push_str(&format!(": {message}"));
    }
    line
}
