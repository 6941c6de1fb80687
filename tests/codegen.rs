//! Writes the files of the repository that are made from the code.
#![allow(clippy::print_stdout, reason = "what this is for")]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use holdfast_tests::alerts::{Alerts, Pace};
use holdfast_tests::codegen;

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => codegen::write()?.iter().for_each(|path| println!("wrote {path}")),
        ["--check"] => {
            let stale = codegen::stale()?;
            stale.iter().for_each(|path| println!("not current: {path}"));
            if !stale.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
        }
        ["--scrape", seconds] => {
            let scrape = seconds.parse().ok().filter(|seconds| *seconds > 0);
            let pace = Pace {
                scrape: Duration::from_secs(scrape.context("--scrape needs a number of seconds")?),
                ..Pace::SHIPPED
            };
            print!("{}", Alerts::read()?.rules(pace)?);
        }
        _ => bail!("unknown arguments: {}", arguments.join(" ")),
    }
    Ok(ExitCode::SUCCESS)
}
