//! `holdfast replay`.

use std::io::{self, Write};
use std::path::PathBuf;

use super::{Answer, output};
use crate::api::hash;
use crate::config::Directories;
use crate::journal;

/// Flags of `holdfast replay`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Lines that begin with # say where segments, lives and gaps are. The same journal gives the same lines, to the byte;
only the release that wrote a journal reads it.

Exit codes: 0 replayed, 1 a state that was written down is not the one that the records before it lead to,
2 the journal could not be read.

Examples:
  holdfast replay
  holdfast replay /var/lib/holdfast/journal/00000007.journal")]
pub struct Args {
    /// A segment, or a directory of segments; without it the journal in the state directory
    #[arg(value_name = "FILE|DIR")]
    pub journal: Option<PathBuf>,
}

/// Prints what the engine decided.
#[must_use]
pub fn run(directories: &Directories, args: &Args) -> Answer {
    let path = args
        .journal
        .clone()
        .unwrap_or_else(|| directories.state_dir.join(journal::DIRECTORY));
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut closed = false;
    let replayed = journal::replay(&path, hash::hashes(), |line| {
        let written = writeln!(out, "{line}");
        closed |= matches!(&written, Err(error) if error.kind() == io::ErrorKind::BrokenPipe);
        written
    });
    match replayed {
        Ok(found) => {
            let summary = writeln!(
                out,
                "# {} lives, {} events, {} polls, {} decisions; {} records missing, {} torn ends, {} states differ",
                found.lives,
                found.events,
                found.polls,
                found.decisions,
                found.missing,
                found.torn,
                found.differing
            );
            if let Err(error) = summary.and_then(|()| out.flush()) {
                output::complain(error);
                return Answer::Unknown;
            }
            if found.differing == 0 {
                Answer::Yes
            } else {
                Answer::No
            }
        }
        // A reader that has seen enough (`| head`) is no error.
        Err(_) if closed => Answer::Yes,
        Err(error) => {
            output::complain(error);
            Answer::Unknown
        }
    }
}
