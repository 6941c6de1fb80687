//! `holdfast preflight`.

use super::Answer;
use super::output::{self, BAD, Format, FormatArgs, GOOD, paint};
use crate::config::Directories;
use crate::datapath::AttachMode;
use crate::preflight::{self, Check, Wants};

/// Flags of `holdfast preflight`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Exit codes: 0 nothing is missing, 1 something is.

Everything is found out by trying it; nothing stays behind. The agent refuses to start with the same list.

Examples:
  holdfast preflight
  holdfast preflight --attach tcx
  holdfast preflight -o json | jq -r '.[] | select(.ok | not) | .remedy'")]
pub struct Args {
    /// Hook that the program is to be attached to
    #[arg(long, env = "HOLDFAST_ATTACH", value_enum, default_value_t)]
    pub attach: AttachMode,
    /// Form of the output.
    #[command(flatten)]
    pub format: FormatArgs,
}

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    let checks = preflight::run(&Wants {
        bpffs_dir: directories.bpffs_dir.clone(),
        run_dir: directories.run_dir.clone(),
        state_dir: directories.state_dir.clone(),
        attach: args.attach,
    });
    match args.format.output {
        Format::Json => {
            output::json(&checks);
        }
        Format::Table => output::print(&table(&checks)),
    }
    if checks.iter().all(|check| check.ok) {
        Answer::Yes
    } else {
        Answer::No
    }
}

fn table(checks: &[Check]) -> String {
    let rows = checks
        .iter()
        .map(|check| {
            let verdict = if check.ok {
                paint(GOOD, "ok")
            } else {
                paint(BAD, "MISSING")
            };
            vec![check.name.clone(), verdict, check.detail.clone()]
        })
        .collect();
    let mut text = output::table(&["CHECK", "", "FOUND"], rows);
    for check in checks {
        if let Some(remedy) = &check.remedy {
            text.push_str(&format!("\n{}: {remedy}\n", check.name));
        }
    }
    text
}
