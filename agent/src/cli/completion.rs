//! `holdfast completion`.

use clap::CommandFactory;
use clap_complete::Shell;

use super::{Answer, Cli, output};

/// Flags of `holdfast completion`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Example:
  holdfast completion bash > /etc/bash_completion.d/holdfast")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

pub(super) fn run(args: &Args) -> Answer {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "holdfast", &mut script);
    output::print(&String::from_utf8_lossy(&script));
    Answer::Yes
}
