//! `cargo xtask demo`: the real agent on the real kernel, step by step, in words for somebody who sees it first.
//!
//! Every step is checked like a test: if one does not come about, the demo says so and fails.
#![allow(clippy::print_stdout, reason = "this is a story that is told")]

mod cluster;
mod node;
mod telling;

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;

fn main() -> ExitCode {
    match tell() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("\nThe demo did not go as it should: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// On a node, or on a cluster with this image of the agent, which stays if it is given a name.
fn tell() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => node::tell(),
        ["cluster", image] => cluster::tell(Path::new(image), None),
        ["cluster", image, name] => cluster::tell(Path::new(image), Some(name)),
        _ => bail!("usage: demo [cluster IMAGE.tar [NAME]]"),
    }
}
