//! A copy of the engine that may be broken: its sources, what is built of them, and its tests.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::tools;

/// How a copy is built: several times for each second that its tests run.
const PROFILE: &str = "
[profile.dev]
debug = false
incremental = true
opt-level = 0
";

/// The engine alone, in a workspace of its own. An interrupted run leaves nothing broken but a copy.
pub(super) struct Copy {
    root: PathBuf,
    jobs: usize,
}

/// How tests went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    /// With what they said.
    Failed(String),
    /// They took too long, and were ended.
    Late,
}

impl Copy {
    /// Makes it anew in a directory that keeps what is built. Its builds use so many cores.
    pub(super) fn make(workspace: &Path, root: PathBuf, jobs: usize) -> anyhow::Result<Self> {
        let copy = Self { root, jobs };
        mirror(&workspace.join("agent/engine"), &copy.engine())?;
        write_if_new(
            &copy.root.join("Cargo.lock"),
            &fs::read(workspace.join("Cargo.lock"))?,
        )?;
        let manifest = fs::read_to_string(workspace.join("Cargo.toml")).context("cannot read Cargo.toml")?;
        write_if_new(
            &copy.root.join("Cargo.toml"),
            manifest_of_copy(&manifest)?.as_bytes(),
        )?;
        Ok(copy)
    }

    fn engine(&self) -> PathBuf {
        self.root.join("agent/engine")
    }

    /// Does something while one text of a file, found exactly once, is replaced. Err(n): it is there n times.
    pub(super) fn with_change<T>(
        &self,
        file: &str,
        find: &str,
        replace: &str,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<Result<T, usize>> {
        let path = self.engine().join(file);
        let good = fs::read_to_string(&path).with_context(|| format!("cannot read {file}"))?;
        let times = good.matches(find).count();
        if times != 1 {
            return Ok(Err(times));
        }
        fs::write(&path, good.replacen(find, replace, 1))?;
        let result = work();
        fs::write(&path, good)?;
        result.map(Ok)
    }

    /// Builds a test target and names its executable. None: it does not compile.
    pub(super) fn build(&self, target: &str) -> anyhow::Result<Option<PathBuf>> {
        let mut command = tools::clean(tools::cargo());
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", self.root.join("target"))
            .env("CARGO_BUILD_JOBS", self.jobs.to_string())
            .args(["test", "--no-run", "--message-format=json"])
            .args(["--package", "holdfast-engine"]);
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

    /// Runs tests by name.
    pub(super) fn test(&self, executable: &Path, names: &str, patience: Duration) -> anyhow::Result<Outcome> {
        let said = self.root.join("said");
        let mut child = Command::new(executable)
            .arg(names)
            .current_dir(self.engine())
            .env_remove("RUST_BACKTRACE")
            // The model world: a short while, some of the rules that are broken, and no search for the shortest story.
            .envs([("HF_STEPS", "30000"), ("HF_FAILURES", "5"), ("HF_SURVEY", "1")])
            .stdout(File::create(&said)?)
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", executable.display()))?;
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = child.try_wait()? {
                if status.success() {
                    return Ok(Outcome::Passed);
                }
                let said = fs::read(&said)?;
                return Ok(Outcome::Failed(String::from_utf8_lossy(&said).into_owned()));
            }
            if Instant::now() > deadline {
                child.kill().context("cannot end the tests")?;
                child.wait().context("cannot wait for the tests")?;
                return Ok(Outcome::Late);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A filter that finds no test, or tests that fail anyway, would kill every mutant.
    pub(super) fn must_pass(
        &self,
        target: &str,
        filters: &BTreeSet<&str>,
        patience: Duration,
    ) -> anyhow::Result<()> {
        let executable = self
            .build(target)?
            .with_context(|| format!("the engine does not compile with test target `{target}`"))?;
        for filter in filters {
            let listed = Command::new(&executable).args([filter, "--list"]).output()?;
            if !String::from_utf8_lossy(&listed.stdout).contains(": test") {
                bail!("`{target}::{filter}` names no test");
            }
            match self.test(&executable, filter, patience)? {
                Outcome::Passed => {}
                Outcome::Failed(said) => bail!("`{target}::{filter}` fails without a mutant:\n{said}"),
                Outcome::Late => bail!("`{target}::{filter}` takes more than {} s", patience.as_secs()),
            }
        }
        Ok(())
    }
}

/// The workspace's manifest, with the engine as its only member.
fn manifest_of_copy(manifest: &str) -> anyhow::Result<String> {
    let mut manifest: toml::Table = manifest.parse().context("Cargo.toml is not well formed")?;
    if let Some(workspace) = manifest.get_mut("workspace").and_then(toml::Value::as_table_mut) {
        workspace.insert("members".into(), toml::Value::Array(vec!["agent/engine".into()]));
    }
    manifest.remove("profile");
    Ok(format!("{manifest}{PROFILE}"))
}

/// Makes a directory equal to another one. What is equal already keeps its time, and is not built again.
fn mirror(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(to).with_context(|| format!("cannot read {}", to.display()))? {
        let entry = entry?;
        if from.join(entry.file_name()).exists() {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            mirror(&from, &to)?;
        } else {
            let content = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
            write_if_new(&to, &content)?;
        }
    }
    Ok(())
}

fn write_if_new(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}
