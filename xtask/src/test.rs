//! `cargo xtask test`: sets up, builds, runs every suite, and says in one line how it went.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::args::Args;
use crate::cache::BuildDir;
use crate::{bpf, cluster, coverage, fuzz, mutants, setup, tools};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "test",
    summary: "Set up what is missing, build, run every suite",
    help: "\
Usage: cargo xtask test [--no-setup] [--quick] [--cases] [--list] [SUITE...]

The suites that need a kernel run as root, in namespaces and bpffs mounts of their own. Without root, or on a kernel
that lacks something, they say that they did not run; with CI set in the environment that is a failure
wherever this machine could have run them.

The model world of the engine runs 5 million steps, of the same seeds each time, and with --quick 30,000 of them.

When all have run, so do a quarter of the engine's mutants, another one at each revision (`cargo xtask mutants`), its
coverage (`cargo xtask coverage`), and the fuzz targets, for a minute in all (`cargo xtask fuzz`).

  SUITE        only these suites (see --list)
  --list       name the suites and stop
  --quick      only the suites that need neither root nor a lab (within 3 minutes once built)
  --cases      show each case of tests/cases.toml with its tests, and fail if one has none; runs nothing else
  --no-setup   install nothing; for people who manage their machine themselves",
    run,
};

/// A test executable, as cargo names it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Suite {
    /// Suites that need no kernel come first: they are quick to say that something is wrong.
    needs_lab: bool,
    /// `package` or `package:target`.
    name: String,
    executable: PathBuf,
    directory: PathBuf,
}

/// What the suites said.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let no_setup = args.switch("--no-setup");
    let quick = args.switch("--quick");
    let cases = args.switch("--cases");
    let list = args.switch("--list");
    let wanted = args.rest()?;
    let whole = wanted.is_empty() && !list && !cases;

    let mut steps = Steps::default();
    if !no_setup && !list && !cases {
        steps.step("set up", || setup::install(setup::For::Cluster))?;
    }
    let build = BuildDir::open()?;
    if !list && !cases {
        steps.step("BPF object", || bpf::build(&build, None).map(drop))?;
    }
    if whole && !quick {
        // Those suites say themselves that it is not there.
        if let Err(error) = steps.step("Kubernetes", cluster::build) {
            eprintln!("error: Kubernetes is not built: {error:#}");
        }
    }
    let suites = steps.step("build", || build_suites(&build))?;
    if list {
        for suite in &suites {
            println!("{}{}", suite.name, if suite.needs_lab { "  (lab)" } else { "" });
        }
        return Ok(ExitCode::SUCCESS);
    }
    if cases {
        return show_cases(&build);
    }
    for name in &wanted {
        if !suites.iter().any(|suite| suite.name == *name) {
            bail!("there is no suite `{name}` (cargo xtask test --list names them)");
        }
    }

    let mut tally = Tally::default();
    let mut broken = Vec::new();
    for suite in &suites {
        let chosen = if wanted.is_empty() {
            !(quick && suite.needs_lab)
        } else {
            wanted.contains(&suite.name)
        };
        if !chosen {
            continue;
        }
        let ran = steps.step(&suite.name, || run_suite(suite, quick))?;
        tally.passed += ran.tally.passed;
        tally.failed += ran.tally.failed;
        tally.skipped += ran.tally.skipped;
        if !ran.ok {
            broken.push((suite.name.as_str(), ran.last));
        }
    }
    let mut faults = Vec::new();
    if whole && !quick {
        type Check = fn(&BuildDir) -> anyhow::Result<bool>;
        let checks: [(&str, &str, Check); 4] = [
            (
                "cases",
                "tests/cases.toml names a case without a test that passes for it",
                |build| Ok(show_cases(build)? == ExitCode::SUCCESS),
            ),
            (
                "mutants",
                "the engine can be broken and no test that names the rule notices",
                mutants::a_quarter,
            ),
            ("coverage", "too much of the engine is run by no test", |build| {
                coverage::measure(build, false)
            }),
            ("fuzz", "an input breaks what should take any", fuzz::all),
        ];
        for (name, fault, check) in checks {
            if !steps.step(name, || check(&build))? {
                faults.push(fault);
            }
        }
    }

    steps.print();
    // Once more, at the end: where only the end of a long run is kept, it says why.
    for (name, last) in &broken {
        println!("\n{name} failed:");
        for line in last {
            println!("  {line}");
        }
    }
    if !broken.is_empty() {
        let names: Vec<&str> = broken.iter().map(|(name, _)| *name).collect();
        println!("failed suites: {}", names.join(", "));
    }
    for fault in &faults {
        println!("{fault}");
    }
    // A suite that died before its closing line has failed, whatever it had counted.
    tally.failed = tally.failed.max(broken.len() as u64);
    println!(
        "{} passed, {} failed, {} skipped",
        tally.passed, tally.failed, tally.skipped
    );
    Ok(if broken.is_empty() && faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Names each step and keeps how long it took.
#[derive(Default)]
struct Steps {
    done: Vec<(String, f64)>,
}

impl Steps {
    fn step<T>(&mut self, name: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        println!("==> {name}");
        let started = Instant::now();
        let result = work();
        let minutes = started.elapsed().as_secs_f64() / 60.0;
        println!("<== {name}: {minutes:.1} min");
        self.done.push((name.to_owned(), minutes));
        result
    }

    fn print(&self) {
        println!("\nminutes by step:");
        for (name, minutes) in &self.done {
            println!("  {minutes:6.1}  {name}");
        }
    }
}

/// The lines of cargo's JSON messages that matter here.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    target: Option<Target>,
    #[serde(default)]
    profile: Option<Profile>,
    #[serde(default)]
    manifest_path: Option<PathBuf>,
    #[serde(default)]
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds everything (also the agent, which the lab runs) and names the test executables.
fn build_suites(build: &BuildDir) -> anyhow::Result<Vec<Suite>> {
    // One feature set for both, so that nothing is built twice.
    let bins = build
        .cargo()?
        .args(["build", "--workspace", "--bins"])
        .status()
        .context("cannot run cargo")?;
    if !bins.success() {
        bail!("the build failed");
    }
    let mut child = build
        .cargo()?
        .args([
            "test",
            "--workspace",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let stdout = child.stdout.take().context("cargo has no output")?;
    let mut suites = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let Ok(message) = serde_json::from_str::<Message>(&line?) else {
            continue;
        };
        if let Some(suite) = suite_of(message) {
            suites.push(suite);
        }
    }
    if !child.wait()?.success() {
        bail!("the build failed");
    }
    suites.sort();
    Ok(suites)
}

fn suite_of(message: Message) -> Option<Suite> {
    if message.reason != "compiler-artifact" || !message.profile?.test {
        return None;
    }
    let (target, executable) = (message.target?, message.executable?);
    let directory = message.manifest_path?.parent()?.to_path_buf();
    let package = directory.file_name()?.to_string_lossy().into_owned();
    let is_integration = target.kind.iter().any(|kind| kind == "test");
    let name = if is_integration {
        format!("{package}:{}", target.name)
    } else {
        package.clone()
    };
    // A crate with a library and a binary has two unit test executables.
    let name = if target.kind.iter().any(|kind| kind == "bin") {
        format!("{name}:bin")
    } else {
        name
    };
    let needs_lab = ["kernel", "api"].map(|folder| target.src_path.starts_with(directory.join(folder)));
    Some(Suite {
        needs_lab: needs_lab.contains(&true),
        name,
        executable,
        directory,
    })
}

/// How many lines of a suite that fails are shown once more at the end.
const SHOWN_AGAIN: usize = 150;

/// How a suite went.
struct Ran {
    tally: Tally,
    ok: bool,
    /// The last that it said, from its list of failures on if there is one.
    last: VecDeque<String>,
}

/// Runs one executable, shows what it says, and counts.
fn run_suite(suite: &Suite, quick: bool) -> anyhow::Result<Ran> {
    let mut command = tools::clean(&suite.executable);
    if !quick {
        // The model world's five million steps.
        command.env("HF_WHOLE", "1");
    }
    let mut child = command
        .current_dir(&suite.directory)
        .env("PATH", tools::path_with_tools()?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", suite.executable.display()))?;
    let stdout = child.stdout.take().context("the suite has no output")?;
    let mut tally = Tally::default();
    let mut last = VecDeque::new();
    let mut listed = false;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        println!("{line}");
        if let Some(told) = closing_line(&line) {
            tally = told;
        }
        // libtest says it twice: what they printed, then their names.
        if line == "failures:" && !std::mem::replace(&mut listed, true) {
            last.clear();
        }
        last.push_back(line);
        if last.len() > SHOWN_AGAIN {
            last.pop_front();
        }
    }
    let ok = child.wait()?.success();
    Ok(Ran { tally, ok, last })
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; ...`, as libtest and libtest-mimic close.
fn closing_line(line: &str) -> Option<Tally> {
    let rest = line.trim().strip_prefix("test result: ")?;
    let mut tally = Tally::default();
    for part in rest.split(['.', ';']) {
        let mut words = part.split_whitespace();
        let (Some(number), Some(what)) = (words.next(), words.next()) else {
            continue;
        };
        let Ok(number) = number.parse() else { continue };
        match what {
            "passed" => tally.passed = number,
            "failed" => tally.failed = number,
            "ignored" => tally.skipped = number,
            _ => {}
        }
    }
    Some(tally)
}

/// Asks the checker of `tests/cases.toml`.
fn show_cases(build: &BuildDir) -> anyhow::Result<ExitCode> {
    // It is built with all the rest, and asks cargo for the tests in the same environment: in another one, as `cargo run`
    // makes it, build scripts that look at it run again, and half of the dependencies are built anew.
    let status = Command::new(build.path().join("debug/cases"))
        .current_dir(tools::workspace_root()?)
        .env("CARGO", tools::cargo())
        .env("CARGO_TARGET_DIR", build.path())
        .env("HOLDFAST_BPF_OBJECT", build.bpf_object()?)
        .status()
        .context("cannot run the checker of the cases")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// `cargo xtask lint`.
pub(crate) const LINT: crate::Command = crate::Command {
    name: "lint",
    summary: "Check formatting and lints, as CI does",
    help: "\
Usage: cargo xtask lint

cargo fmt --check, cargo clippy with warnings as errors, and cargo deny where it is installed.",
    run: lint,
};

fn lint(args: Args) -> anyhow::Result<ExitCode> {
    args.finish()?;
    let build = BuildDir::open()?;
    let mut steps = Steps::default();
    let mut ok = true;
    let mut check = |name: &str, command: &mut Command| -> anyhow::Result<()> {
        let status = steps.step(name, || {
            command.status().with_context(|| format!("cannot run {name}"))
        })?;
        ok &= status.success();
        Ok(())
    };
    check("cargo fmt", build.cargo()?.args(["fmt", "--all", "--check"]))?;
    check(
        "cargo fmt, fuzz targets",
        build
            .cargo()?
            .args(["fmt", "--manifest-path", "tests/fuzz/Cargo.toml", "--check"]),
    )?;
    check(
        "cargo clippy",
        build
            .cargo()?
            .args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    )?;
    if has_cargo_deny() {
        check(
            "cargo deny",
            build
                .cargo()?
                .args(["deny", "--offline", "check", "bans", "licenses", "sources"]),
        )?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn has_cargo_deny() -> bool {
    tools::find("cargo-deny").is_some_and(|path| Path::exists(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_counted() {
        let line = "test result: FAILED. 12 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s";
        assert_eq!(
            closing_line(line),
            Some(Tally {
                passed: 12,
                failed: 2,
                skipped: 1
            })
        );
        assert_eq!(closing_line("test result is fine"), None);
    }
}
