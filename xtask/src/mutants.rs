//! `cargo xtask mutants`: breaks the engine one line at a time, and demands that a test notices each.
//!
//! A rule that no test guards is a wish. Each mutant names the rule that it breaks and the tests that must
//! fail; they run on a copy of the engine, so that an interrupted run leaves nothing broken behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::args::Args;
use crate::tools;

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "mutants",
    summary: "Break the engine one line at a time: each time a test must fail",
    help: "\
Usage: cargo xtask mutants [--list] [--part N/M] [NAME...]

tests/mutants/engine.toml names one-line changes of the engine, the rule that each breaks, and the tests that must
fail then. A mutant that all of its tests pass has survived, and fails the command; so does one whose line is
not found any more, one that does not compile, and one that takes more than 30 s to be noticed.

  NAME         only these
  --list       name them and stop
  --part N/M   every M-th of them, beginning with the N-th (CI runs a quarter in turn)",
    run,
};

/// So soon a mutant must be noticed.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutant: Vec<Mutant>,
}

/// One change.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    name: String,
    /// What it breaks.
    rule: String,
    /// Below `agent/engine`.
    file: String,
    /// Found exactly once in the file.
    find: String,
    replace: String,
    /// A test target and what the names of the tests begin with or contain: `table::rule_3`, `lib::backoff`.
    killed_by: String,
}

/// How it went with one.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Killed,
    Survived,
    TooLate,
    NotFound(usize),
    DoesNotCompile,
}

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let list_only = args.switch("--list");
    let part = args.value("--part")?.map(|part| parse_part(&part)).transpose()?;
    let wanted = args.rest()?;
    let root = tools::workspace_root()?;
    let path = root.join("tests/mutants/engine.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let list: List =
        toml::from_str(&text).with_context(|| format!("{} is not well formed", path.display()))?;
    check(&list)?;
    for name in &wanted {
        if !list.mutant.iter().any(|mutant| mutant.name == *name) {
            bail!("there is no mutant `{name}` (cargo xtask mutants --list names them)");
        }
    }
    let chosen: Vec<&Mutant> = list
        .mutant
        .iter()
        .enumerate()
        .filter(|(at, mutant)| {
            part.is_none_or(|(first, of)| at % of == first)
                && (wanted.is_empty() || wanted.contains(&mutant.name))
        })
        .map(|(_, mutant)| mutant)
        .collect();
    if list_only {
        for mutant in chosen {
            println!("{:50} {:12} {}", mutant.name, mutant.rule, mutant.killed_by);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let copy = Copy::make(&root)?;
    let filters: BTreeSet<&str> = chosen.iter().map(|mutant| mutant.killed_by.as_str()).collect();
    println!("==> without a mutant");
    for filter in filters {
        copy.must_pass(filter)?;
    }
    let mut bad = 0;
    for (at, mutant) in chosen.iter().enumerate() {
        let started = Instant::now();
        let fate = copy.try_mutant(mutant)?;
        let seconds = started.elapsed().as_secs_f64();
        let said = match &fate {
            Fate::Killed => "killed".to_owned(),
            Fate::Survived => "SURVIVED".to_owned(),
            Fate::TooLate => format!("NOT NOTICED in {} s", PATIENCE.as_secs()),
            Fate::NotFound(times) => format!("LINE FOUND {times} TIMES in {}", mutant.file),
            Fate::DoesNotCompile => "DOES NOT COMPILE".to_owned(),
        };
        println!(
            "{:3}/{} {:50} {:12} {said} ({seconds:.1} s)",
            at + 1,
            chosen.len(),
            mutant.name,
            mutant.rule
        );
        bad += usize::from(fate != Fate::Killed);
    }
    println!("{} killed, {bad} not", chosen.len() - bad);
    Ok(if bad == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn parse_part(part: &str) -> anyhow::Result<(usize, usize)> {
    let (first, of) = part.split_once('/').context("--part is N/M, such as 1/4")?;
    let (first, of): (usize, usize) = (first.parse()?, of.parse()?);
    if first == 0 || first > of {
        bail!("--part is N/M with N from 1 to M, not `{part}`");
    }
    Ok((first - 1, of))
}

fn check(list: &List) -> anyhow::Result<()> {
    let mut names = BTreeSet::new();
    for mutant in &list.mutant {
        if !names.insert(&mutant.name) {
            bail!("two mutants are called `{}`", mutant.name);
        }
        if mutant.find == mutant.replace {
            bail!("mutant `{}` changes nothing", mutant.name);
        }
        if !mutant.killed_by.contains("::") {
            bail!("killed_by of `{}` is TARGET::FILTER", mutant.name);
        }
    }
    Ok(())
}

/// The engine alone, in a workspace of its own.
struct Copy {
    root: PathBuf,
}

impl Copy {
    fn make(workspace: &Path) -> anyhow::Result<Self> {
        let root = tools::cache_dir()?.join("mutants");
        let engine = root.join("agent/engine");
        if engine.exists() {
            fs::remove_dir_all(&engine).with_context(|| format!("cannot empty {}", engine.display()))?;
        }
        copy_tree(&workspace.join("agent/engine"), &engine)?;
        fs::copy(workspace.join("Cargo.lock"), root.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
        let manifest = fs::read_to_string(workspace.join("Cargo.toml")).context("cannot read Cargo.toml")?;
        let mut manifest: toml::Table = manifest.parse().context("Cargo.toml is not well formed")?;
        if let Some(table) = manifest.get_mut("workspace").and_then(toml::Value::as_table_mut) {
            table.insert("members".into(), toml::Value::Array(vec!["agent/engine".into()]));
        }
        // Mutants are built more often than they run.
        manifest.remove("profile");
        fs::write(root.join("Cargo.toml"), manifest.to_string())
            .context("cannot write the copy's Cargo.toml")?;
        Ok(Self { root })
    }

    /// Builds a test target. None: it does not compile.
    fn build(&self, target: &str) -> anyhow::Result<Option<PathBuf>> {
        let mut command = tools::clean(tools::cargo());
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", self.root.join("target"))
            .args([
                "test",
                "--no-run",
                "--message-format=json",
                "--package",
                "holdfast-engine",
            ]);
        match target {
            "lib" => command.arg("--lib"),
            target => command.args(["--test", target]),
        };
        let output = command
            .stderr(Stdio::null())
            .output()
            .context("cannot run cargo")?;
        if !output.status.success() {
            return Ok(None);
        }
        let executable = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
            .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
            .next_back()
            .context("cargo names no test executable")?;
        Ok(Some(executable))
    }

    /// Runs tests by name. None: they took too long, and were ended.
    fn passes(&self, executable: &Path, names: &str) -> anyhow::Result<Option<bool>> {
        let mut child = Command::new(executable)
            .arg(names)
            .current_dir(self.root.join("agent/engine"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", executable.display()))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status.success()));
            }
            if Instant::now() > deadline {
                child.kill().context("cannot end the tests")?;
                child.wait().context("cannot wait for the tests")?;
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A filter that finds no test, or tests that fail anyway, would kill every mutant.
    fn must_pass(&self, filter: &str) -> anyhow::Result<()> {
        let (target, names) = filter.split_once("::").context("a filter is TARGET::FILTER")?;
        let executable = self
            .build(target)?
            .with_context(|| format!("the engine does not compile with test target `{target}`"))?;
        let listed = Command::new(&executable).args([names, "--list"]).output()?;
        if !String::from_utf8_lossy(&listed.stdout).contains(": test") {
            bail!("`{filter}` names no test");
        }
        match self.passes(&executable, names)? {
            Some(true) => Ok(()),
            Some(false) => bail!("`{filter}` fails without a mutant"),
            None => bail!("`{filter}` takes more than {} s", PATIENCE.as_secs()),
        }
    }

    fn try_mutant(&self, mutant: &Mutant) -> anyhow::Result<Fate> {
        let path = self.root.join("agent/engine").join(&mutant.file);
        let good = fs::read_to_string(&path).with_context(|| format!("cannot read {}", mutant.file))?;
        let times = good.matches(&mutant.find).count();
        if times != 1 {
            return Ok(Fate::NotFound(times));
        }
        fs::write(&path, good.replacen(&mutant.find, &mutant.replace, 1))?;
        let fate = self.judge(mutant);
        fs::write(&path, good)?;
        fate
    }

    fn judge(&self, mutant: &Mutant) -> anyhow::Result<Fate> {
        let (target, names) = mutant
            .killed_by
            .split_once("::")
            .context("a filter is TARGET::FILTER")?;
        let Some(executable) = self.build(target)? else {
            return Ok(Fate::DoesNotCompile);
        };
        Ok(match self.passes(&executable, names)? {
            Some(true) => Fate::Survived,
            Some(false) => Fate::Killed,
            None => Fate::TooLate,
        })
    }
}

fn copy_tree(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_tree(&from, &to)?;
        } else {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_well_formed_and_its_lines_are_there() {
        let root = tools::workspace_root().unwrap();
        let text = fs::read_to_string(root.join("tests/mutants/engine.toml")).unwrap();
        let list: List = toml::from_str(&text).unwrap();
        check(&list).unwrap();
        for mutant in &list.mutant {
            let file = fs::read_to_string(root.join("agent/engine").join(&mutant.file)).unwrap();
            assert_eq!(file.matches(&mutant.find).count(), 1, "{}", mutant.name);
        }
    }

    #[test]
    fn parts_are_counted_from_one() {
        assert_eq!(parse_part("1/4").unwrap(), (0, 4));
        assert!(parse_part("0/4").is_err());
        assert!(parse_part("5/4").is_err());
        assert!(parse_part("4").is_err());
    }
}
