//! What a developer of Holdfast runs: `cargo xtask COMMAND`.
//!
//! To add a command: a module with a `COMMAND` constant, and its line in [`COMMANDS`].
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool talks to people"
)]

mod args;
mod bench;
mod bpf;
mod cache;
mod cluster;
mod codegen;
mod coverage;
mod demo;
mod elf;
mod fuzz;
mod go;
mod image;
mod mutants;
mod setup;
mod test;
mod tools;

use std::process::ExitCode;

use args::Args;

/// One command.
struct Command {
    /// As typed.
    name: &'static str,
    /// One line in the list of commands.
    summary: &'static str,
    /// What `--help` says below the summary: usage, options, what it does.
    help: &'static str,
    /// Does it. What could not be done is an error; a "no" of a check is an exit code.
    run: fn(Args) -> anyhow::Result<ExitCode>,
}

/// All commands, in the order in which one meets them.
const COMMANDS: &[Command] = &[
    setup::COMMAND,
    bpf::COMMAND,
    demo::COMMAND,
    test::COMMAND,
    test::LINT,
    codegen::COMMAND,
    mutants::COMMAND,
    coverage::COMMAND,
    fuzz::COMMAND,
    bench::COMMAND,
    image::COMMAND,
    cluster::COMMAND,
];

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let Some(name) = words.next() else {
        print_commands();
        return ExitCode::from(2);
    };
    if matches!(name.as_str(), "-h" | "--help" | "help") {
        print_commands();
        return ExitCode::SUCCESS;
    }
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        eprintln!("error: there is no command `{name}`\n");
        print_commands();
        return ExitCode::from(2);
    };
    let args = Args::new(words);
    if args.wants_help() {
        println!("{}\n\n{}", command.summary, command.help);
        return ExitCode::SUCCESS;
    }
    match (command.run)(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn print_commands() {
    println!("What a developer of Holdfast runs.\n\nUsage: cargo xtask COMMAND [OPTIONS]\n\nCommands:");
    for command in COMMANDS {
        println!("  {:12} {}", command.name, command.summary);
    }
    println!("\n`cargo xtask COMMAND --help` says more.");
}
