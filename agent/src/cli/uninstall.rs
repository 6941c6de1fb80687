//! `holdfast uninstall`.

use std::io::{self, BufRead};

use super::Answer;
use super::output;
use crate::config::Directories;
use crate::datapath::AgentLock;
use crate::datapath::uninstall::{Installed, UninstallError};

/// Flags of `holdfast uninstall`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Detaches from every interface and removes what is pinned, the identities that CNIs have registered too. Filters, qdiscs \
and pins of others stay, and so do the files in the state directory. Packets that were steered or held go where the \
node's own routing takes them from then on. Works while no agent runs, and refuses while one does.

Exit codes: 0 nothing of holdfast is there any more, 1 something is, 2 it could not be found out.

Examples:
  holdfast uninstall                                      says what there is, and asks
  holdfast uninstall --yes")]
pub struct Args {
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
}

pub(super) fn run(directories: &Directories, args: &Args) -> Answer {
    uninstall(directories, args).unwrap_or_else(|error| {
        output::complain(&error);
        match error {
            // An agent that runs says what is there.
            UninstallError::Pin(crate::datapath::PinError::Locked { .. }) => Answer::No,
            _ => Answer::Unknown,
        }
    })
}

fn uninstall(directories: &Directories, args: &Args) -> Result<Answer, UninstallError> {
    let bpffs_dir = &directories.bpffs_dir;
    let lock = bpffs_dir
        .is_dir()
        .then(|| AgentLock::take(bpffs_dir))
        .transpose()?;
    let installed = Installed::find(bpffs_dir)?;
    for path in &installed.foreign {
        output::print(&format!("not holdfast's, stays: {}\n", path.display()));
    }
    if installed.is_empty() {
        output::print("nothing of holdfast is here\n");
        return Ok(Answer::Yes);
    }
    output::print(&summary(&installed));
    if !args.yes && !confirmed() {
        output::complain("nothing was removed: answer yes, or give --yes");
        return Ok(Answer::No);
    }
    let failures = installed.remove(lock.as_ref());
    for failure in &failures {
        output::complain(failure);
    }
    if failures.is_empty() {
        output::print("removed\n");
        Ok(Answer::Yes)
    } else {
        Ok(Answer::No)
    }
}

fn summary(installed: &Installed) -> String {
    format!(
        "to be removed: {} links, {} filters, {} other pins\n",
        installed.links.len(),
        installed.filters.len(),
        installed.pins.len()
    )
}

/// Asks; whoever says nothing has not agreed.
fn confirmed() -> bool {
    output::print("remove them? what is steered or held takes the node's own routes then [yes/no] ");
    let mut answer = String::new();
    match io::stdin().lock().read_line(&mut answer) {
        Ok(_) => answer.trim() == "yes",
        Err(_) => false,
    }
}
