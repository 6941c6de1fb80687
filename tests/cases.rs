//! Prints each case of `cases.toml` with its tests, and fails on a case without one.
#![allow(clippy::print_stdout, reason = "what this is for")]

use std::process::ExitCode;

use anyhow::Context;
use holdfast_tests::cases::{Cases, tests_by_suite};

fn main() -> anyhow::Result<ExitCode> {
    let cases = Cases::parse(include_str!("cases.toml")).context("tests/cases.toml")?;
    for case in &cases.case {
        println!("{case}");
    }
    let faults = cases.faults(&tests_by_suite()?);
    for fault in &faults {
        println!("fault: {fault}");
    }
    println!("{} cases, {} faults", cases.case.len(), faults.len());
    Ok(if faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
