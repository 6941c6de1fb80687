//! `cargo xtask mutants`: breaks the engine one line at a time, and demands that a test notices each.
//!
//! A rule that no test guards is a wish. Each mutant names the rule that it breaks and the tests that must
//! fail, and what fails must name that rule, too.

mod copy;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::args::Args;
use crate::cache::BuildDir;
use crate::tools;
use copy::{Copy, Outcome};

/// This command.
pub(crate) const COMMAND: crate::Command = crate::Command {
    name: "mutants",
    summary: "Break the engine one line at a time: each time a test must fail",
    help: "\
Usage: cargo xtask mutants [--list] [--part N/M | --quarter] [NAME...]

tests/mutants/engine.toml names the rules of the engine, one-line changes of it, the rule that each breaks, and the tests
that must fail then. A mutant that all of its tests pass has survived, and fails the command; so does one whose line
is not found exactly once, one that does not compile, one that takes more than 30 s to be noticed, and one that is
noticed only by what does not name its rule (a test `rule_13_...`, or the model world's \"ENGINE 13: ...\").

Copies of the engine, one a core, are broken, built and tested side by side in the build directory.

  NAME         only these
  --list       each rule with its mutants, and what must notice them; runs nothing
  --part N/M   every M-th of them, beginning with the N-th
  --quarter    the quarter whose turn it is, as `cargo xtask test` does: it turns with the revision",
    run,
};

/// So soon a mutant must be noticed.
const PATIENCE: Duration = Duration::from_secs(30);

/// More copies than this would only wait for the disk.
const MOST_COPIES: usize = 4;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    /// Every rule that a mutant breaks, and what it says.
    rules: BTreeMap<String, String>,
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

impl Mutant {
    /// The test target and the filter of names.
    fn killer(&self) -> (&str, &str) {
        self.killed_by.split_once("::").unwrap_or((&self.killed_by, ""))
    }
}

/// How it went with one.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// By these.
    Killed(String),
    /// Only by what names other rules.
    Misnamed(String),
    Survived,
    TooLate,
    NotFound(usize),
    DoesNotCompile,
}

impl Fate {
    fn shown(&self) -> String {
        match self {
            Self::Killed(by) => format!("killed by {by}"),
            Self::Misnamed(by) => format!("NOTICED ONLY BY {by}"),
            Self::Survived => "SURVIVED".to_owned(),
            Self::TooLate => format!("NOT NOTICED IN {} s", PATIENCE.as_secs()),
            Self::NotFound(times) => format!("STALE: ITS TEXT IS THERE {times} TIMES"),
            Self::DoesNotCompile => "DOES NOT COMPILE".to_owned(),
        }
    }
}

/// What a worker does next.
enum Job<'a> {
    /// The tests that are asked must pass without a mutant.
    Unbroken(&'a str, BTreeSet<&'a str>),
    Broken(&'a Mutant),
}

fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    let list_only = args.switch("--list");
    let quarter = args.switch("--quarter");
    let part = args.value("--part")?.map(|part| parse_part(&part)).transpose()?;
    let wanted = args.rest()?;
    let list = read_list()?;
    for name in &wanted {
        if !list.mutant.iter().any(|mutant| mutant.name == *name) {
            bail!("there is no mutant `{name}` (cargo xtask mutants --list names them)");
        }
    }
    let part = if quarter { Some(turn(4)) } else { part };
    let mut chosen = part_of(&list.mutant, part);
    chosen.retain(|mutant| wanted.is_empty() || wanted.contains(&mutant.name));
    if list_only {
        print_list(&list, &chosen);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some((at, of)) = part {
        println!("part {}/{of} of {} mutants", at + 1, list.mutant.len());
    }
    let good = try_all(&BuildDir::open()?, &chosen)?;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Tries the quarter whose turn it is; says whether each was killed.
pub(crate) fn a_quarter(build: &BuildDir) -> anyhow::Result<bool> {
    let list = read_list()?;
    let (at, of) = turn(4);
    println!("part {}/{of} of {} mutants", at + 1, list.mutant.len());
    try_all(build, &part_of(&list.mutant, Some((at, of))))
}

fn part_of(mutants: &[Mutant], part: Option<(usize, usize)>) -> Vec<&Mutant> {
    let (first, of) = part.unwrap_or((0, 1));
    mutants.iter().skip(first).step_by(of).collect()
}

fn parse_part(part: &str) -> anyhow::Result<(usize, usize)> {
    let (first, of) = part.split_once('/').context("--part is N/M, such as 1/4")?;
    let (first, of): (usize, usize) = (first.parse()?, of.parse()?);
    if first == 0 || first > of {
        bail!("--part is N/M with N from 1 to M, not `{part}`");
    }
    Ok((first - 1, of))
}

/// Whose turn it is: the number of commits tells, or the commit's name where a shallow clone cannot count them.
fn turn(of: usize) -> (usize, usize) {
    let git = |words: &[&str]| {
        let root = tools::workspace_root().ok()?;
        tools::answer(tools::clean("git").current_dir(root).args(words))
    };
    let number = if git(&["rev-parse", "--is-shallow-repository"]).as_deref() == Some("false") {
        git(&["rev-list", "--count", "HEAD"]).and_then(|count| count.parse().ok())
    } else {
        git(&["rev-parse", "HEAD"]).and_then(|name| usize::from_str_radix(name.get(..8)?, 16).ok())
    };
    (number.unwrap_or(0) % of, of)
}

fn read_list() -> anyhow::Result<List> {
    let path = tools::workspace_root()?.join("tests/mutants/engine.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let list: List =
        toml::from_str(&text).with_context(|| format!("{} is not well formed", path.display()))?;
    check(&list)?;
    Ok(list)
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
        if !list.rules.contains_key(&mutant.rule) {
            bail!("mutant `{}` breaks a rule that is not among [rules]", mutant.name);
        }
    }
    for rule in list.rules.keys() {
        if !list.mutant.iter().any(|mutant| mutant.rule == *rule) {
            bail!("no mutant breaks rule {rule}");
        }
    }
    Ok(())
}

/// Rules in the order in which people count: 2 before 10.
fn in_order(list: &List) -> Vec<(&String, &String)> {
    let mut rules: Vec<_> = list.rules.iter().collect();
    rules.sort_by_key(|(rule, _)| {
        let (book, number) = rule.split_once(' ').unwrap_or((rule, ""));
        let number: Vec<u32> = number.split('.').filter_map(|part| part.parse().ok()).collect();
        (book, number)
    });
    rules
}

fn print_list(list: &List, chosen: &[&Mutant]) {
    for (rule, what) in in_order(list) {
        let mut mutants = chosen.iter().filter(|mutant| mutant.rule == *rule).peekable();
        if mutants.peek().is_none() {
            continue;
        }
        println!("{rule}: {what}");
        for mutant in mutants {
            println!("    {:58} {}", mutant.name, mutant.killed_by);
        }
    }
    println!("{} mutants of {} rules", chosen.len(), list.rules.len());
}

/// Says whether each was killed.
fn try_all(build: &BuildDir, chosen: &[&Mutant]) -> anyhow::Result<bool> {
    let started = Instant::now();
    let cores = thread::available_parallelism().map_or(2, usize::from);
    let copies = cores.min(MOST_COPIES);
    let work = &Work {
        place: build.path().join("mutants"),
        cores_each: cores.div_ceil(copies),
        jobs: Mutex::new(jobs(chosen)),
        total: chosen.len(),
        tried: AtomicUsize::new(0),
        killed: AtomicUsize::new(0),
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (1..=copies)
            .map(|number| scope.spawn(move || work.share(number)))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            let done = worker.join();
            done.unwrap_or_else(|_| bail!("a worker panicked"))
        })
    })?;
    let killed = work.killed.load(Ordering::Relaxed);
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} mutants: {killed} killed, {} not, in {seconds:.0} s",
        chosen.len(),
        chosen.len() - killed
    );
    Ok(killed == chosen.len())
}

/// Test target by test target: first its tests without a mutant, then its mutants.
fn jobs<'a>(chosen: &[&'a Mutant]) -> VecDeque<Job<'a>> {
    let mut by_target: BTreeMap<&str, Vec<&Mutant>> = BTreeMap::new();
    for mutant in chosen {
        by_target.entry(mutant.killer().0).or_default().push(mutant);
    }
    let mut jobs = VecDeque::new();
    for (target, mutants) in by_target {
        let filters: BTreeSet<&str> = mutants.iter().map(|mutant| mutant.killer().1).collect();
        jobs.push_back(Job::Unbroken(target, filters));
        jobs.extend(mutants.into_iter().map(Job::Broken));
    }
    jobs
}

/// What the workers share.
struct Work<'a> {
    /// Where the copies are.
    place: PathBuf,
    cores_each: usize,
    jobs: Mutex<VecDeque<Job<'a>>>,
    total: usize,
    tried: AtomicUsize,
    killed: AtomicUsize,
}

impl<'a> Work<'a> {
    /// One worker's share. When it cannot go on, nobody begins anything new.
    fn share(&self, number: usize) -> anyhow::Result<()> {
        let done = self.try_share(number);
        if done.is_err() {
            self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        done
    }

    fn try_share(&self, number: usize) -> anyhow::Result<()> {
        let place = self.place.join(number.to_string());
        let copy = Copy::make(&tools::workspace_root()?, place, self.cores_each)?;
        while let Some(job) = self.next(number) {
            let started = Instant::now();
            match job {
                Job::Unbroken(target, filters) => {
                    copy.must_pass(target, &filters, 4 * PATIENCE)?;
                    let seconds = started.elapsed().as_secs_f64();
                    println!(
                        "without a mutant {} checks of `{target}` pass ({seconds:.1} s)",
                        filters.len()
                    );
                }
                Job::Broken(mutant) => {
                    let fate = try_mutant(&copy, mutant)?;
                    self.tell(mutant, &fate, started.elapsed());
                }
            }
        }
        Ok(())
    }

    /// From both ends, so that not every copy builds every test target.
    fn next(&self, number: usize) -> Option<Job<'a>> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        match number % 2 {
            0 => jobs.pop_back(),
            _ => jobs.pop_front(),
        }
    }

    fn tell(&self, mutant: &Mutant, fate: &Fate, took: Duration) {
        let tried = self.tried.fetch_add(1, Ordering::Relaxed) + 1;
        if matches!(fate, Fate::Killed(_)) {
            self.killed.fetch_add(1, Ordering::Relaxed);
        }
        println!(
            "{tried:3}/{} {:12} {}: {} ({:.1} s)",
            self.total,
            mutant.rule,
            mutant.name,
            fate.shown(),
            took.as_secs_f64()
        );
    }
}

fn try_mutant(copy: &Copy, mutant: &Mutant) -> anyhow::Result<Fate> {
    let (target, filter) = mutant.killer();
    let fate = copy.with_change(&mutant.file, &mutant.find, &mutant.replace, || {
        let Some(executable) = copy.build(target)? else {
            return Ok(Fate::DoesNotCompile);
        };
        Ok(match copy.test(&executable, filter, PATIENCE)? {
            Outcome::Passed => Fate::Survived,
            Outcome::Late => Fate::TooLate,
            Outcome::Failed(said) => fate_of(&mutant.rule, &said),
        })
    })?;
    Ok(fate.unwrap_or_else(Fate::NotFound))
}

/// What failed must name the rule: by the name of a test, or by what the model world says.
fn fate_of(rule: &str, said: &str) -> Fate {
    let failed: Vec<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
        .collect();
    let tag = tag(rule);
    if let Some(name) = failed.iter().find(|name| name.contains(&tag)) {
        return Fate::Killed((*name).to_owned());
    }
    if let Some(line) = said.lines().find(|line| speaks_of(line, rule)) {
        return Fate::Killed(line.trim().to_owned());
    }
    let world = said
        .lines()
        .find_map(rules_said)
        .map_or_else(String::new, |rules| format!(", which says {rules}"));
    Fate::Misnamed(format!("{}{world}", failed.join(", ")))
}

/// What the names of a rule's tests contain: `rule_13_` of `ENGINE 13`, `design_2_10_` of `DESIGN 2.10`.
fn tag(rule: &str) -> String {
    let tag = rule.replace("ENGINE", "rule").replace([' ', '.'], "_");
    format!("{}_", tag.to_lowercase())
}

/// The rules that the model world names: of `12 actions: DESIGN 2.7, 2.8, ENGINE 9: nothing is left ...` those before
/// the colon.
fn rules_said(line: &str) -> Option<&str> {
    let said = line.split_once(" actions: ").map_or(line, |(_, said)| said);
    let (rules, _) = said.trim().split_once(": ")?;
    ["ENGINE", "DESIGN"]
        .iter()
        .any(|book| rules.starts_with(book))
        .then_some(rules)
}

/// Whether the model world names the rule there.
fn speaks_of(line: &str, rule: &str) -> bool {
    let Some(rules) = rules_said(line) else {
        return false;
    };
    let mut book = "";
    rules == rule
        || rules.split(", ").any(|one| {
            let number = one.split_once(' ').map_or(one, |(named, number)| {
                book = named;
                number
            });
            rule.split_once(' ') == Some((book, number))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_well_formed_and_its_lines_are_there() {
        let root = tools::workspace_root().unwrap();
        let list = read_list().unwrap();
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

    #[test]
    fn what_fails_must_name_the_rule() {
        let killed = |rule, said| match fate_of(rule, said) {
            Fate::Killed(by) => Some(by),
            _ => None,
        };
        let said = "test rule_13_a_switch_waits ... FAILED\ntest rule_1_one_poll ... ok\n";
        assert_eq!(
            killed("ENGINE 13", said).as_deref(),
            Some("rule_13_a_switch_waits")
        );
        assert_eq!(killed("ENGINE 1", said), None);
        assert_eq!(killed("DESIGN 2.13", said), None);
        let said = "test random_worlds ... FAILED\nsurvey 1 12 actions: DESIGN 2.7, 2.8, ENGINE 9: nothing is left\n";
        assert!(killed("DESIGN 2.8", said).is_some());
        assert!(killed("ENGINE 9", said).is_some());
        assert_eq!(killed("ENGINE 2.8", said), None);
        let said = "test rest ... FAILED\n  ENGINE, The model world: rest is reached, in the state that the rules want\n";
        assert!(killed("ENGINE, The model world", said).is_some());
        assert_eq!(killed("ENGINE 9", said), None);
    }
}
