//! `holdfast why`.

use std::time::Duration;

use holdfast_engine::model::ObjectName;
use hyper::StatusCode;

use super::client::{Client, ClientError, block_on};
use super::output::{self, BAD, Format, FormatArgs, GOOD, OPEN, STRONG, age, columns, paint, state_style};
use super::wait::{attachment_name, policy_name};
use super::{Answer, down, status};
use crate::config::Directories;
use crate::serve::why::{Chain, Step, Told, Why};

/// Flags of `holdfast why`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
From the interface to the proof every step is answered with yes, no or unknown (in JSON: `steps`, each with `step`, \
`answer`, `since`, `earlier`, `found`, `remedy`, `command`), from what the agent knows and from the kernel, looked at \
now. Beside each stands for how long it has been so: `5m+` when it was so already when the agent looked for the first time, \
`-` when that cannot be told. The steps, in their order:
  policy     accepted, and its destinations are no older policy's
  interface  there, up, with carrier
  identity   the expected incarnation is registered
  producer   one is ready, and the policy leads to it
  attach     the program is attached to the interface
  position   no other program is asked before it
  entries    row and entries are in the kernel, open
  proof      the program, asked by the kernel, gives the right answers

While no agent runs, the same steps of every interface that the kernel has entries of the policy for, as far as the \
pins tell.

Without CONSUMER: every consumer that is not programmed, worst first, of the 20 worst.

Exit codes: 0 programmed, 1 not, 2 could not tell.

Examples:
  holdfast why shop/dns
  holdfast why shop/dns shop/web-0
  holdfast why shop/dns -o json | jq -r '.consumers[] | [.consumer, .cause, .reason] | @tsv'")]
pub struct Args {
    /// The policy
    #[arg(value_name = "NAMESPACE/POLICY", value_parser = policy_name)]
    pub policy: ObjectName,
    /// Only this attachment
    #[arg(value_name = "NAMESPACE/CONSUMER", value_parser = attachment_name)]
    pub consumer: Option<ObjectName>,
    /// Every consumer, also those that are programmed
    #[arg(long, conflicts_with = "consumer")]
    pub all: bool,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How long the agent may take: it looks at the kernel several times.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    let mut path = format!("/v1/why?policy={}&all={}", args.policy, args.all);
    if let Some(consumer) = &args.consumer {
        path.push_str(&format!("&consumer={consumer}"));
    }
    let why: Why = match block_on(Client::new(&directories.run_dir).get(&path, PATIENCE)) {
        Ok(why) => why,
        Err(error) => {
            output::complain(&error);
            return match error {
                ClientError::NotRunning { .. } => down::why(directories, args),
                ClientError::Refused { status, .. } if status == StatusCode::NOT_FOUND => Answer::No,
                _ => Answer::Unknown,
            };
        }
    };
    match args.format.output {
        Format::Json => {
            output::json(&why);
        }
        Format::Table => output::print(&text(&why)),
    }
    why.answer.into()
}

impl From<Told> for Answer {
    fn from(told: Told) -> Self {
        match told {
            Told::Yes => Self::Yes,
            Told::No => Self::No,
            Told::Unknown => Self::Unknown,
        }
    }
}

/// For people.
#[must_use]
pub fn text(why: &Why) -> String {
    let mut text = status::in_a_line(&why.policy) + "\n";
    if why.left_off > 0 {
        text.push_str(&format!(
            "{} of {} consumers were looked at, the worst; --all looks at every one\n",
            why.looked_at,
            why.looked_at + why.left_off
        ));
    }
    for chain in &why.consumers {
        text.push('\n');
        text.push_str(&chain_text(chain, &why.now));
    }
    if why.consumers.is_empty() && why.looked_at > 0 {
        text.push_str("the kernel has all of it, as it should be\n");
    }
    text
}

fn chain_text(chain: &Chain, now: &str) -> String {
    let mut text = format!(
        "{} on {}: {} for {}\n",
        paint(STRONG, &chain.consumer),
        chain.interface,
        paint(state_style(&chain.state), state(chain)),
        age(chain.held_since.as_ref().unwrap_or(&chain.since), now)
    );
    text.push_str(&steps_text(&chain.steps, now));
    let todo = chain.steps.iter().find(|step| Some(step.step) == chain.cause);
    if let Some(remedy) = todo.and_then(|step| step.remedy.as_ref()) {
        text.push_str(&format!("  to do: {remedy}\n"));
    }
    if let Some(command) = todo.and_then(|step| step.command.as_ref()) {
        text.push_str(&format!("    {}\n", paint(STRONG, command)));
    }
    text
}

/// A line a step.
pub(super) fn steps_text(steps: &[Step], now: &str) -> String {
    let lines: Vec<Vec<String>> = steps.iter().map(|step| line(step, now)).collect();
    columns(&lines)
}

fn state(chain: &Chain) -> String {
    match &chain.reason {
        Some(reason) => format!("{} ({reason})", chain.state),
        None => chain.state.clone(),
    }
}

fn line(step: &Step, now: &str) -> Vec<String> {
    let answer = match step.answer {
        Told::Yes => paint(GOOD, "yes"),
        Told::No => paint(BAD, "no"),
        Told::Unknown => paint(OPEN, "?"),
    };
    let since = match &step.since {
        None => "-".to_owned(),
        Some(since) if step.earlier => format!("{}+", age(since, now)),
        Some(since) => age(since, now),
    };
    vec![
        format!("  {}", step.step.name()),
        answer,
        since,
        step.found.clone(),
    ]
}
