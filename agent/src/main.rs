//! The one binary: `holdfast`.

use std::process::ExitCode;

use clap::Parser;
use holdfast::cli::{self, Cli};

fn main() -> ExitCode {
    cli::run(Cli::parse()).into()
}
