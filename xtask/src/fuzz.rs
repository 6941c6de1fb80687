//! `cargo xtask fuzz`: runs the fuzz targets of `tests/fuzz`.
//!
//! What cargo-fuzz would add to a build is a few flags, all of which a stable compiler takes: the coverage that libFuzzer
//! follows. There is no address sanitizer, which a stable compiler does not take: the code under test is safe Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::args::Args;
use crate::cache::BuildDir;
use crate::tools;

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "fuzz",
    summary: "Feed the parsers of untrusted input with whatever breaks them",
    help: "\
Usage: cargo xtask fuzz [--seconds N] [TARGET...]
       cargo xtask fuzz --replay FILE TARGET

  packet       the BPF program's header parser, against a slow one
  objects      files of objects: reading, judging, writing down and reading again
  netlink      datagrams of the kernel about devices

  TARGET       only these (all of them if none is named)
  --seconds N  how long each runs (20)
  --replay FILE  run one input, such as one that was found, and no other

What was tried and led somewhere is kept in the build directory, so that the next run goes on from there. An input that
breaks something is kept too, and named with the command that replays it; mended, it belongs into
tests/fuzz/seeds/TARGET.",
    run,
};

const TARGETS: [&str; 3] = ["packet", "objects", "netlink"];

/// How long each target runs unless somebody says otherwise.
const SECONDS: u32 = 20;

/// Coverage as libFuzzer follows it.
const INSTRUMENTATION: [&str; 7] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    // The pass wants to see a crate whole.
    "-Ccodegen-units=1",
    "--cfg=fuzzing",
];

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let seconds = match args.value("--seconds")? {
        None => SECONDS,
        Some(text) => text.parse().context("--seconds is a number")?,
    };
    let replay = args.value("--replay")?.map(PathBuf::from);
    let named = args.rest()?;
    if let Some(unknown) = named.iter().find(|name| !TARGETS.contains(&name.as_str())) {
        bail!("there is no target `{unknown}`: {}", TARGETS.join(", "));
    }
    let build = BuildDir::open()?;
    if let Some(input) = replay {
        let [target] = &named[..] else {
            bail!("--replay FILE is for one target");
        };
        return Fuzzer::build(&build)?.replay(target, &input);
    }
    let targets: Vec<&str> = TARGETS
        .into_iter()
        .filter(|target| named.is_empty() || named.iter().any(|name| name == target))
        .collect();
    Ok(if run_targets(&build, &targets, seconds)? {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs every target for its usual time; says whether nothing was found.
pub(crate) fn all(build: &BuildDir) -> anyhow::Result<bool> {
    run_targets(build, &TARGETS, SECONDS)
}

fn run_targets(build: &BuildDir, targets: &[&str], seconds: u32) -> anyhow::Result<bool> {
    let fuzzer = Fuzzer::build(build)?;
    let mut good = true;
    for target in targets {
        good &= fuzzer.run(target, seconds)?;
    }
    Ok(good)
}

/// The targets, built.
struct Fuzzer {
    programs: PathBuf,
    seeds: PathBuf,
    /// What earlier runs found worth keeping.
    corpus: PathBuf,
    /// What broke something.
    findings: PathBuf,
}

impl Fuzzer {
    fn build(build: &BuildDir) -> anyhow::Result<Self> {
        let host = tools::host()?;
        let sources = tools::workspace_root()?.join("tests/fuzz");
        let work = build.path().join("fuzz");
        // With a target named, build scripts and macros are not instrumented: they have no fuzzer to talk to.
        tools::run(
            build
                .cargo()?
                .current_dir(&sources)
                .env("CARGO_TARGET_DIR", &work)
                .env_remove("RUSTFLAGS")
                .env("CARGO_ENCODED_RUSTFLAGS", INSTRUMENTATION.join("\x1f"))
                .args(["build", "--quiet", "--locked", "--release", "--target", &host]),
        )
        .context("the fuzz targets (if what lacks is a C++ compiler for libFuzzer: `cargo xtask setup`)")?;
        Ok(Self {
            programs: work.join(&host).join("release"),
            seeds: sources.join("seeds"),
            corpus: work.join("corpus"),
            findings: work.join("findings"),
        })
    }

    fn run(&self, target: &str, seconds: u32) -> anyhow::Result<bool> {
        let corpus = self.corpus.join(target);
        let findings = self.findings.join(target);
        for dir in [&corpus, &findings] {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let output = tools::clean(self.programs.join(target))
            .arg(&corpus)
            .arg(self.seeds.join(target))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={}/", findings.display()))
            // One input that takes longer than this, or more memory, is a finding like any other.
            .args(["-timeout=5", "-rss_limit_mb=1024", "-max_len=8192"])
            .args(["-verbosity=0", "-print_final_stats=1"])
            .output()
            .with_context(|| format!("cannot run {target}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let runs = said
            .lines()
            .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
        println!("{target}: {} inputs in {seconds} s", runs.unwrap_or("?").trim());
        if !output.status.success() {
            println!("{said}");
            println!("{target} is broken by an input; the file is named above. To replay it:");
            println!("  cargo xtask fuzz --replay {}/FILE {target}", findings.display());
        }
        Ok(output.status.success())
    }

    fn replay(&self, target: &str, input: &Path) -> anyhow::Result<ExitCode> {
        if !input.is_file() {
            bail!("{} is no file", input.display());
        }
        let status = tools::clean(self.programs.join(target))
            .arg(input)
            .env("RUST_BACKTRACE", "1")
            .status()
            .with_context(|| format!("cannot run {target}"))?;
        Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}
