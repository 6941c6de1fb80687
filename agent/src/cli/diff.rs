//! `holdfast diff`.

use std::time::Duration;

use holdfast_engine::model::ObjectName;
use hyper::StatusCode;

use super::client::{Client, ClientError, block_on};
use super::output::{self, BAD, Format, FormatArgs, OPEN, or_dash, paint};
use super::wait::policy_name;
use super::{Answer, down};
use crate::config::Directories;
use crate::serve::diff::{Diff, Line};
use crate::serve::why::Told;

/// Flags of `holdfast diff`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Compares, thing by thing, what is wanted (from objects, devices and identities), what the agent believes of the kernel \
(its own answered writes) and what the kernel has now. What the agent is just writing is told as `?`. It changes \
nothing: the agent's audit puts right what differs.

While no agent runs it shows what the kernel has, and exits with 2.

WHAT is one of: program (at an interface, and who is asked before it), row (of a consumer), source (its address), entry \
(one destination), identity (the registry), selector, slots and producer (of a policy's set), address (of the node \
itself). In JSON: `same`, `compared`, `differing`, and `things` with `kind`, `key`, `policy`, `interface`, `ifindex`, \
`wanted`, `believed`, `kernel`, `differs`.

Exit codes: 0 nothing differs, 1 something does, 2 could not tell.

Examples:
  holdfast diff
  holdfast diff shop/dns --all
  holdfast diff -o json | jq '.things[] | select(.kind == \"entry\")'")]
pub struct Args {
    /// Only this policy: its set, and what its consumers have of it
    #[arg(value_name = "NAMESPACE/NAME", value_parser = policy_name)]
    pub policy: Option<ObjectName>,
    /// Everything, not only what differs
    #[arg(long)]
    pub all: bool,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

/// How long the agent may take: it reads every map.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    let mut path = format!("/v1/diff?all={}", args.all);
    if let Some(policy) = &args.policy {
        path.push_str(&format!("&policy={policy}"));
    }
    let diff: Diff = match block_on(Client::new(&directories.run_dir).get(&path, PATIENCE)) {
        Ok(diff) => diff,
        Err(error) => {
            output::complain(&error);
            return match error {
                ClientError::NotRunning { .. } => down::diff(directories, args),
                ClientError::Refused { status, .. } if status == StatusCode::NOT_FOUND => Answer::No,
                _ => Answer::Unknown,
            };
        }
    };
    match args.format.output {
        Format::Json => {
            output::json(&diff);
        }
        Format::Table => output::print(&text(&diff)),
    }
    diff.same.into()
}

/// For people.
#[must_use]
pub fn text(diff: &Diff) -> String {
    let mut text = String::new();
    if !diff.things.is_empty() {
        let rows = diff.things.iter().map(line).collect();
        text.push_str(&output::table(
            &[
                "WHAT",
                "KEY",
                "POLICY",
                "INTERFACE",
                "WANTED",
                "BELIEVED",
                "KERNEL",
            ],
            rows,
        ));
        text.push('\n');
    }
    text.push_str(&format!(
        "{} compared, {} differ{}\n",
        diff.compared,
        diff.differing,
        match diff.left_off {
            0 => String::new(),
            more => format!(" ({more} not shown; --all shows them)"),
        }
    ));
    if let Some(why) = &diff.unreadable {
        text.push_str(&format!("not everything could be looked at: {why}\n"));
    } else if diff.same == Told::Unknown {
        text.push_str("some of it was being changed while it was compared\n");
    }
    text
}

fn line(line: &Line) -> Vec<String> {
    let unknown = || paint(OPEN, "?");
    let shown = |value: &Option<String>, right: &Option<String>| match value {
        None => unknown(),
        Some(value) if line.differs && Some(value) != right.as_ref() => paint(BAD, value),
        Some(value) => value.clone(),
    };
    let interface = match (&line.interface, line.ifindex) {
        (Some(name), _) => name.clone(),
        (None, Some(ifindex)) => format!("#{ifindex}"),
        (None, None) => "-".to_owned(),
    };
    vec![
        line.kind.clone(),
        or_dash(line.key.as_ref()),
        or_dash(line.policy.as_ref()),
        interface,
        line.wanted.clone().unwrap_or_else(unknown),
        shown(&line.believed, &line.wanted),
        shown(&line.kernel, &line.believed),
    ]
}
