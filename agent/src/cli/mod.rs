//! The command line. One file a subcommand; what they print is in [`output`], whom they ask in [`client`].

pub mod agent;
pub mod attachment;
pub mod client;
pub mod completion;
pub mod controller;
pub mod crds;
pub mod diff;
pub mod down;
pub mod fields;
pub mod output;
pub mod preflight;
pub mod replay;
pub mod status;
pub mod uninstall;
pub mod wait;
pub mod why;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::Directories;
use crate::config::layers::{self, Layered, Refusal, Setting};

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
    /// File of settings, each by the name of its flag, as in `audit-interval = "30s"`; a variable goes before the file, a
    /// flag before both [default: /etc/holdfast/agent.toml, if it is there]
    #[arg(long, global = true, env = "HOLDFAST_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
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
    #[command(after_help = agent::EXAMPLES, args_conflicts_with_subcommands = true)]
    Agent(Box<agent::Args>),
    /// Roll up what all nodes say into the status of each policy
    Controller(Box<controller::Args>),
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
    /// Print the definitions of the objects for an API server
    Crds(crds::Args),
    /// Print a completion script for a shell
    Completion(completion::Args),
}

/// A command line, with the settings of the agent if it is to run one.
#[derive(Debug)]
pub struct Invocation {
    /// What was said.
    pub cli: Cli,
    /// Each setting of the agent with its origin.
    pub settings: Vec<Setting>,
}

/// Reads a command line, variables and the file of settings.
///
/// # Errors
/// [`Refusal`].
pub fn read(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Invocation, Refusal> {
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    let Layered { matches, settings } = layers::read(&Cli::command(), &words)?;
    let cli = Cli::from_arg_matches(&matches)?;
    Ok(Invocation { cli, settings })
}

/// Reads a command line and runs it to its end.
#[must_use]
pub fn main(words: impl IntoIterator<Item = impl Into<OsString>>) -> ExitCode {
    match read(words) {
        Ok(invocation) => run(invocation).into(),
        Err(Refusal::Words(error)) => error.exit(),
        Err(refusal @ Refusal::Settings { .. }) => {
            output::complain(&refusal);
            refused(&refusal).into()
        }
    }
}

/// The answer to what is not even tried.
#[must_use]
pub fn refused(refusal: &Refusal) -> Answer {
    match refusal {
        // To a CNI 2 would say that the workload is registered.
        Refusal::Settings { subcommand, .. } if subcommand == "attachment" => Answer::No,
        _ => Answer::Unknown,
    }
}

/// Runs a command to its end.
#[must_use]
pub fn run(invocation: Invocation) -> Answer {
    let Invocation { cli, settings } = invocation;
    let directories = cli.directories;
    match cli.command {
        Command::Agent(args) => agent::run(directories, *args, &settings),
        Command::Controller(args) => controller::run(&args),
        Command::Attachment(command) => attachment::run(&directories, command),
        Command::Status(args) => status::run(&directories, &args),
        Command::Why(args) => why::run(&directories, &args),
        Command::Diff(args) => diff::run(&directories, &args),
        Command::Wait(args) => wait::run(&directories, &args),
        Command::Replay(args) => replay::run(&directories, &args),
        Command::Preflight(args) => preflight::run(&directories, &args),
        Command::Uninstall(args) => uninstall::run(&directories, &args),
        Command::Crds(args) => crds::run(&args),
        Command::Completion(args) => completion::run(&args),
    }
}
