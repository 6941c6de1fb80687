//! `cases.toml`: which failures from the field are tested, by which tests, and which figures were scaled.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// The file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cases {
    /// Its cases.
    #[serde(default)]
    pub case: Vec<Case>,
}

/// One failure from the field.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its id.
    pub id: String,
    /// What is done and what is expected, in a line or two.
    pub about: String,
    /// Tests: suite, as `cargo xtask test --list` names it, a space, and the test's name.
    #[serde(default)]
    pub tests: Vec<String>,
    /// Figures that the tests scale.
    #[serde(default)]
    pub scaled: Vec<Scaled>,
}

/// A figure that a test scales.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaled {
    /// What it is, with its unit.
    pub what: String,
    /// What the case says.
    pub case: f64,
    /// What the tests do.
    pub here: f64,
}

impl Cases {
    /// Reads the file.
    ///
    /// # Errors
    /// When it makes no sense or names a case twice.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let cases: Self = toml::from_str(text)?;
        let mut ids = BTreeSet::new();
        for case in &cases.case {
            ensure!(ids.insert(&case.id), "{} is there twice", case.id);
        }
        Ok(cases)
    }

    /// What is wrong: a case without a test, a test that does not exist. `tests` are the names by suite.
    #[must_use]
    pub fn faults(&self, tests: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
        let mut faults = Vec::new();
        for case in &self.case {
            if case.tests.is_empty() {
                faults.push(format!("{} has no test", case.id));
            }
            for test in &case.tests {
                let (suite, name) = test.split_once(' ').unwrap_or((test, ""));
                match tests.get(suite) {
                    None => faults.push(format!("{}: there is no suite `{suite}`", case.id)),
                    Some(names) if !names.contains(name) => {
                        faults.push(format!("{}: `{suite}` has no test `{name}`", case.id));
                    }
                    Some(_) => {}
                }
            }
        }
        faults
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}  {}", self.id, self.about)?;
        for test in &self.tests {
            writeln!(f, "     test    {test}")?;
        }
        for Scaled { what, case, here } in &self.scaled {
            writeln!(
                f,
                "     scaled  {what}: {here} instead of {case} (factor {:.3})",
                here / case
            )?;
        }
        Ok(())
    }
}

/// Names of all tests of the workspace by suite: builds them, and asks each executable.
///
/// # Errors
/// When something does not build.
pub fn tests_by_suite() -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
    let mut tests = BTreeMap::new();
    for (suite, executable) in executables()? {
        let output = Command::new(&executable)
            .arg("--list")
            .output()
            .with_context(|| format!("cannot run {}", executable.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.insert(suite, names.map(str::to_owned).collect());
    }
    Ok(tests)
}

/// One of cargo's messages about what it has built.
#[derive(Deserialize)]
struct Artifact {
    target: Target,
    profile: Profile,
    manifest_path: PathBuf,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

fn executables() -> anyhow::Result<Vec<(String, PathBuf)>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "test",
            "--workspace",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "the tests do not build");
    let text = String::from_utf8_lossy(&output.stdout);
    let artifacts = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    Ok(artifacts.filter_map(suite_of).collect())
}

/// The name that `cargo xtask test --list` gives it.
fn suite_of(artifact: Artifact) -> Option<(String, PathBuf)> {
    let executable = artifact.executable.filter(|_| artifact.profile.test)?;
    let package = artifact.manifest_path.parent().and_then(Path::file_name)?;
    let package = package.to_string_lossy();
    let is = |kind: &str| artifact.target.kind.iter().any(|found| found == kind);
    let suite = if is("test") {
        format!("{package}:{}", artifact.target.name)
    } else if is("bin") {
        format!("{package}:bin")
    } else {
        package.into_owned()
    };
    Some((suite, executable))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_without_a_test_and_a_test_that_does_not_exist_are_faults() {
        let cases = Cases::parse(
            "[[case]]\nid = 'A'\nabout = 'a'\n\
             [[case]]\nid = 'B'\nabout = 'b'\ntests = ['s one', 's two', 't one']\n",
        )
        .unwrap();
        let tests = BTreeMap::from([("s".to_owned(), BTreeSet::from(["one".to_owned()]))]);
        assert_eq!(
            cases.faults(&tests),
            [
                "A has no test",
                "B: `s` has no test `two`",
                "B: there is no suite `t`"
            ]
        );
    }

    #[test]
    fn no_case_is_there_twice() {
        assert!(Cases::parse("[[case]]\nid='A'\nabout=''\n[[case]]\nid='A'\nabout=''\n").is_err());
    }
}
