//! `holdfast status`.

use std::time::Duration;

use holdfast_engine::model::ObjectName;
use hyper::StatusCode;

use super::Answer;
use super::client::{Client, ClientError, block_on};
use super::output::{self, Format, FormatArgs, age, or_dash};
use super::wait::policy_name;
use crate::config::Directories;
use crate::report::PolicyReport;
use crate::serve::wire::{Audit, PolicyDetail, Status};

/// Flags of `holdfast status`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Exit codes: 0 here it is, 1 no such policy on this node, 2 the agent could not be asked.

Examples:
  holdfast status
  holdfast status shop/dns
  holdfast status -o json | jq '.policies[] | select(.state != \"Programmed\")'")]
pub struct Args {
    /// Only this policy, with its intents
    #[arg(value_name = "NAMESPACE/NAME", value_parser = policy_name)]
    pub policy: Option<ObjectName>,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How long the agent may take.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    let client = Client::new(&directories.run_dir);
    match &args.policy {
        None => answer(block_on(client.get("/v1/status", PATIENCE)), args, node),
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
fn node(status: &Status) -> String {
    let now = &status.agent.now;
    let ready = if status.ready.ready { "ready" } else { "not ready" };
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
    text.push_str(&format!(
        "source {}: {read}; {}\n",
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
    if !status.policies.is_empty() {
        let rows = status
            .policies
            .iter()
            .map(|policy| policy_row(policy, now))
            .collect();
        text.push('\n');
        text.push_str(&output::table(
            &[
                "POLICY",
                "GENERATION",
                "STATE",
                "REASON",
                "FOR",
                "PROGRAMMED",
                "MESSAGE",
            ],
            rows,
        ));
    }
    if !status.attachments.is_empty() {
        let rows = status
            .attachments
            .iter()
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
        text.push('\n');
        text.push_str(&output::table(
            &[
                "ATTACHMENT",
                "INTERFACE",
                "IFINDEX",
                "READY",
                "REASON",
                "ATTACHED",
                "OPEN",
            ],
            rows,
        ));
    }
    for problem in &status.source.problems {
        text.push_str(&format!("\n{problem}\n"));
        text.push_str(problem.excerpt.as_deref().unwrap_or_default());
    }
    text
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
        policy.state.clone(),
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
fn policy(detail: &PolicyDetail) -> String {
    let rows = detail
        .intents
        .iter()
        .map(|intent| {
            vec![
                intent.consumer.clone(),
                intent.interface.clone(),
                or_dash(intent.ifindex),
                intent.state.clone(),
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
