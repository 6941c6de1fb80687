//! The command line. One file a subcommand; what they print is in [`output`], whom they ask in [`client`].

pub mod agent;
pub mod attachment;
pub mod client;
pub mod completion;
pub mod diff;
pub mod down;
pub mod output;
pub mod preflight;
pub mod replay;
pub mod status;
pub mod uninstall;
pub mod wait;
pub mod why;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{AgentArgs, Directories};

/// Answers of a command, as its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is so, or it was done.
    Yes,
    /// It is not so, or it could not be done.
    No,
    /// It could not be found out.
    Unknown,
}

impl From<Answer> for ExitCode {
    fn from(answer: Answer) -> Self {
        Self::from(match answer {
            Answer::Yes => 0,
            Answer::No => 1,
            Answer::Unknown => 2,
        })
    }
}

/// Steers the traffic of workloads to the services they may use, and holds it while a workload is not ready
///
/// The agent watches interfaces, identities and policies of one node, and tells per policy whether it is programmed,
/// held or failed. All other commands ask it over its socket, or work on the registry of identities directly.
#[derive(Parser, Debug)]
#[command(name = "holdfast", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// Where everything is kept.
    #[command(flatten)]
    pub directories: Directories,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Exit codes: 0 yes, 1 no, 2 could not tell.

Examples:
  holdfast preflight                                      what does this machine lack?
  holdfast agent --source dir:/etc/holdfast/objects       run the agent
  holdfast attachment register --interface hfweb0 --identity 3f0c6a1e
                                                          as a CNI does when a workload starts
  holdfast status                                         the node in a screen
  holdfast status shop/dns                                one policy, with every consumer
  holdfast why shop/dns shop/web-0                        what is missing, and what to do about it
  holdfast diff                                           is the kernel as it should be?
  holdfast wait shop/dns --timeout 30s                    until the kernel serves it";

/// Subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the agent of this node
    #[command(after_help = agent::EXAMPLES)]
    Agent(Box<AgentArgs>),
    /// Say which workload is behind an interface
    #[command(subcommand, after_help = attachment::EXAMPLES)]
    Attachment(attachment::Command),
    /// Show how the node is doing
    Status(status::Args),
    /// Say why a consumer is held, or why not
    Why(why::Args),
    /// Compare what is wanted, what is believed and what the kernel has
    Diff(diff::Args),
    /// Wait until a policy is in a state
    Wait(wait::Args),
    /// Print what the engine decided, from its journal
    Replay(replay::Args),
    /// Try everything that the agent needs of this machine
    Preflight(preflight::Args),
    /// Take everything of holdfast from this node
    Uninstall(uninstall::Args),
    /// Print a completion script for a shell
    Completion(completion::Args),
}

/// Runs a command to its end.
#[must_use]
pub fn run(cli: Cli) -> Answer {
    let directories = cli.directories;
    match cli.command {
        Command::Agent(args) => agent::run(directories, *args),
        Command::Attachment(command) => attachment::run(&directories, command),
        Command::Status(args) => status::run(&directories, &args),
        Command::Why(args) => why::run(&directories, &args),
        Command::Diff(args) => diff::run(&directories, &args),
        Command::Wait(args) => wait::run(&directories, &args),
        Command::Replay(args) => replay::run(&directories, &args),
        Command::Preflight(args) => preflight::run(&directories, &args),
        Command::Uninstall(args) => uninstall::run(&directories, &args),
        Command::Completion(args) => completion::run(&args),
    }
}
