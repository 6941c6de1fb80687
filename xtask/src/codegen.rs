//! `cargo xtask codegen`: writes the files of the repository that are made from the code.

use std::process::ExitCode;

use anyhow::Context;

use crate::args::Args;
use crate::cache::BuildDir;

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "codegen",
    summary: "Write the files of the repository that are made from the code",
    help: "\
Usage: cargo xtask codegen [--check]
       cargo xtask codegen --scrape SECONDS

  deploy/crds/                    from the types of the objects and their rules in the agent
  deploy/monitoring/METRICS.md    from the list of metrics in the agent
  deploy/monitoring/rules/        from deploy/monitoring/alerts.toml: a rules file, and an object for the operator

  --check           write nothing; name what is not current, and exit with 1 if anything is
  --scrape SECONDS  write nothing; print the rules file for a Prometheus that scrapes so often (shipped: 30)",
    run,
};

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let check = args.switch("--check");
    let scrape = args.value("--scrape")?;
    args.finish()?;
    let status = BuildDir::open()?
        .cargo()?
        .args([
            "run",
            "--quiet",
            "--package",
            "holdfast-tests",
            "--bin",
            "codegen",
            "--",
        ])
        .args(check.then_some("--check"))
        .args(
            scrape
                .into_iter()
                .flat_map(|seconds| ["--scrape".to_owned(), seconds]),
        )
        .status()
        .context("cannot run cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
