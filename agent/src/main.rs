//! The one binary: `holdfast`.

use std::process::ExitCode;

fn main() -> ExitCode {
    holdfast::cli::main(std::env::args_os())
}
