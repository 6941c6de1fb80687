//! `cargo xtask coverage`: which lines of the engine its own tests run.
//!
//! The compiler's instrumentation and LLVM's tools of the same release, nothing else. A line is what a tool of LLVM
//! calls one: it has code, and it ran if any test executable ran it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};

use crate::args::Args;
use crate::cache::BuildDir;
use crate::tools;

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "coverage",
    summary: "Show which lines of the engine its tests run",
    help: "\
Usage: cargo xtask coverage [--missed]

Builds the engine with the compiler's coverage in a directory of its own, runs its tests (the model world for a short
while), and prints lines and covered lines of each file of agent/engine/src, without its unit tests. Less than
95 % in all fails the command.

  --missed  also name the lines that did not run",
    run,
};

/// So much of the engine must be run by its tests, in percent.
const LEAST: f64 = 95.0;

/// What runs. The tests of costs measure time, which instrumentation distorts.
const TARGETS: [&str; 5] = ["lib", "table", "audit", "first_world", "world"];

/// The tools of the LLVM in the compiler, as Debian calls them.
const PROFDATA: &str = "llvm-profdata-22";
const COV: &str = "llvm-cov-22";

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let missed = args.switch("--missed");
    args.finish()?;
    let good = measure(&BuildDir::open()?, missed)?;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Measures and prints; says whether it is enough.
pub(crate) fn measure(build: &BuildDir, missed: bool) -> anyhow::Result<bool> {
    let place = build.path().join("coverage");
    let executables = build_tests(build, &place)?;
    let profile = run_tests(&executables, &place.join("profiles"))?;
    let files = read_lines(&executables, &profile)?;
    Ok(print(&files, missed))
}

fn build_tests(build: &BuildDir, place: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = build.cargo()?;
    command
        .env("CARGO_TARGET_DIR", place)
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Cinstrument-coverage")
        // With a target named, build scripts and macros are not instrumented.
        .args(["test", "--no-run", "--target", &tools::host()?])
        .args([
            "--message-format=json-render-diagnostics",
            "--package",
            "holdfast-engine",
        ]);
    for target in TARGETS {
        match target {
            "lib" => command.arg("--lib"),
            target => command.args(["--test", target]),
        };
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the build failed");
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .collect())
}

/// Runs the tests and names their merged profile.
fn run_tests(executables: &[PathBuf], place: &Path) -> anyhow::Result<PathBuf> {
    if place.exists() {
        fs::remove_dir_all(place).with_context(|| format!("cannot empty {}", place.display()))?;
    }
    fs::create_dir_all(place).with_context(|| format!("cannot create {}", place.display()))?;
    for (number, executable) in executables.iter().enumerate() {
        let output = tools::clean(executable)
            .arg("--quiet")
            .current_dir(tools::workspace_root()?.join("agent/engine"))
            .env("LLVM_PROFILE_FILE", place.join(format!("{number}.profraw")))
            .output()
            .with_context(|| format!("cannot run {}", executable.display()))?;
        if !output.status.success() {
            println!("{}", String::from_utf8_lossy(&output.stdout));
            bail!("the tests of {} fail", executable.display());
        }
    }
    let merged = place.join("merged.profdata");
    let mut merge = Command::new(PROFDATA);
    merge.args(["merge", "--sparse", "--output"]).arg(&merged);
    for number in 0..executables.len() {
        merge.arg(place.join(format!("{number}.profraw")));
    }
    tools::run(&mut merge).with_context(missing)?;
    Ok(merged)
}

fn missing() -> String {
    format!("{PROFDATA} and {COV} read what rustc's LLVM 22 wrote (`cargo xtask setup` installs them)")
}

/// Of each file its lines with code, and whether they ran.
type Files = BTreeMap<String, BTreeMap<u32, bool>>;

fn read_lines(executables: &[PathBuf], profile: &Path) -> anyhow::Result<Files> {
    let sources = tools::workspace_root()?.join("agent/engine/src");
    let mut export = Command::new(COV);
    export
        .args(["export", "--format=lcov", "--instr-profile"])
        .arg(profile);
    for (number, executable) in executables.iter().enumerate() {
        if number > 0 {
            export.arg("--object");
        }
        export.arg(executable);
    }
    let output = export
        .arg(&sources)
        .stderr(Stdio::inherit())
        .output()
        .with_context(missing)?;
    if !output.status.success() {
        bail!("{COV} ended with {}; {}", output.status, missing());
    }
    let mut files = parse(&String::from_utf8_lossy(&output.stdout));
    for (path, lines) in &mut files {
        let source = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        let end = code_lines(&source);
        lines.retain(|line, _| *line <= end);
    }
    if files.values().all(BTreeMap::is_empty) {
        bail!("nothing of {} was measured", sources.display());
    }
    Ok(files)
}

/// Reads what `llvm-cov export --format=lcov` writes.
fn parse(lcov: &str) -> Files {
    let mut files = Files::new();
    let mut lines = None;
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            lines = Some(files.entry(path.to_owned()).or_default());
        } else if let Some((number, count)) = line.strip_prefix("DA:").and_then(|rest| rest.split_once(','))
            && let (Some(lines), Ok(number)) = (&mut lines, number.parse())
        {
            *lines.entry(number).or_default() |= count != "0";
        }
    }
    files
}

/// How many lines of a source come before its unit tests.
fn code_lines(source: &str) -> u32 {
    let lines = source.lines().take_while(|line| *line != "#[cfg(test)]").count();
    u32::try_from(lines).unwrap_or(u32::MAX)
}

fn print(files: &Files, missed: bool) -> bool {
    let (mut all, mut all_covered) = (0, 0);
    println!("{:16} {:>6} {:>8}", "agent/engine/src", "lines", "covered");
    for (path, lines) in files {
        let name = Path::new(path)
            .file_name()
            .and_then(OsStr::to_str)
            .unwrap_or(path);
        let covered = lines.values().filter(|ran| **ran).count();
        (all, all_covered) = (all + lines.len(), all_covered + covered);
        println!(
            "{name:16} {:6} {:7.2} %",
            lines.len(),
            percent(covered, lines.len())
        );
        if missed {
            let lines = lines.iter().filter(|(_, ran)| !**ran).map(|(line, _)| *line);
            println!("{}", ranges(&lines.collect()));
        }
    }
    let share = percent(all_covered, all);
    println!("{:16} {all:6} {share:7.2} % (at least {LEAST} %)", "all");
    share >= LEAST
}

#[expect(clippy::cast_precision_loss, reason = "lines are few")]
fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 {
        100.0
    } else {
        100.0 * part as f64 / whole as f64
    }
}

/// `3-5, 9`.
fn ranges(lines: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for line in lines {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *line => *last = *line,
            _ => ranges.push((*line, *line)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_any_instance_ran_are_covered() {
        let files = parse("SF:/a.rs\nDA:1,0\nDA:2,7\nDA:4,0\nend_of_record\nSF:/a.rs\nDA:1,3\n");
        assert_eq!(files["/a.rs"], BTreeMap::from([(1, true), (2, true), (4, false)]));
    }

    #[test]
    fn unit_tests_are_no_code() {
        assert_eq!(code_lines("fn a() {}\n\n#[cfg(test)]\nmod tests {}\n"), 2);
        assert_eq!(code_lines("fn a() {}\n"), 1);
    }

    #[test]
    fn lines_are_shown_in_ranges() {
        assert_eq!(ranges(&BTreeSet::from([3, 4, 5, 9])), "3-5, 9");
        assert_eq!(ranges(&BTreeSet::new()), "");
    }
}
