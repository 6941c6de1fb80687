//! The model world: the engine, alone, in a world that goes wrong in every way.
//!
//! A seed makes a tape of choices, the tape makes world actions, and an oracle that knows the rules and nothing of the
//! engine checks every step. A failing run is shrunk to its list of actions; such lists are kept in `tests/scripts` and
//! replayed. `HF_SEED=n` runs one seed (add `HF_VERBOSE=1` to see all of it), `HF_STEPS=n` a number of steps (from
//! `HF_SEED` on), `HF_WHOLE=1` five million; `HF_FAILURES=n` stops at the n-th failing seed, `HF_SURVEY=1` only counts
//! them.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "this is a test, and it tells its seed"
)]

mod coverage;
mod flight;
mod generate;
mod kernel;
mod oracle;
mod rules;
mod run;
mod script;
mod still;
mod tape;
mod told;
mod world;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use coverage::Coverage;
use run::{Run, random, replay};
use script::{Script, stored, write};
use tape::Tape;

/// Steps of one seed.
const STEPS_A_SEED: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.replace('_', "").parse().expect("a number"))
}

fn verbose() -> bool {
    std::env::var_os("HF_VERBOSE").is_some()
}

/// Where scripts of failing runs go.
fn found(seed: u64, script: &Script) -> PathBuf {
    let folder = std::env::var_os("HF_FOUND")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let path = folder.join(format!("found-{seed}.json"));
    std::fs::write(&path, write(script)).expect("a place for scripts");
    path
}

/// What is left of a failing seed.
fn tell(seed: u64, run: &Run) -> String {
    let violation = run.violation.clone().expect("a failing run");
    if std::env::var_os("HF_SURVEY").is_some() {
        return format!("survey {seed} {} actions: {}", run.actions.len(), violation.rule);
    }
    let script = run::script(run, &violation);
    let path = found(seed, &script);
    format!(
        "seed {seed} broke a rule\n  {}\n  {}\n  {} actions, shrunk to {}: {}\n",
        script.rule,
        script.story,
        run.actions.len(),
        script.actions.len(),
        path.display()
    )
}

#[derive(Default)]
struct Totals {
    steps: AtomicU64,
    seeds: AtomicU64,
    next: AtomicU64,
    stop: AtomicBool,
}

/// Runs seeds until there are enough steps and seeds, on every core that there is.
fn run_seeds(first: u64, steps: u64, seeds: u64) -> (Coverage, Vec<String>) {
    let totals = Totals::default();
    let coverage = Mutex::new(Coverage::default());
    let failures = Mutex::new(Vec::new());
    let most = number("HF_FAILURES").unwrap_or(1) as usize;
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut seen = Coverage::default();
                while !totals.stop.load(Ordering::Relaxed) {
                    let number = totals.next.fetch_add(1, Ordering::Relaxed);
                    let enough = totals.steps.load(Ordering::Relaxed) >= steps;
                    if enough && number >= seeds {
                        break;
                    }
                    let seed = first + number;
                    // Every eighth seed runs twice: the same tape gives the same effects.
                    let twice = number % 8 == 0;
                    let run = random(Tape::from_seed(seed), STEPS_A_SEED, twice);
                    totals.steps.fetch_add(run.world.steps, Ordering::Relaxed);
                    totals.seeds.fetch_add(1, Ordering::Relaxed);
                    seen.add(run.world.coverage());
                    let mut failure = run.violation.is_some().then(|| tell(seed, &run));
                    if twice && run.violation.is_none() {
                        let (again, _) = replay(run.setup, &run.actions, false);
                        if again.digest != run.world.digest {
                            failure = Some(format!(
                                "seed {seed} broke a rule\n  ENGINE 28: deterministic: two runs gave other effects\n"
                            ));
                        }
                    }
                    if let Some(failure) = failure {
                        let mut failures = failures.lock().expect("no panic elsewhere");
                        failures.push(failure);
                        if failures.len() >= most {
                            totals.stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
                coverage.lock().expect("no panic elsewhere").add(&seen);
            });
        }
    });
    println!(
        "{} seeds from {first}, {} steps",
        totals.seeds.load(Ordering::Relaxed),
        totals.steps.load(Ordering::Relaxed)
    );
    (
        coverage.into_inner().expect("no panic elsewhere"),
        failures.into_inner().expect("no panic elsewhere"),
    )
}

#[test]
fn random_worlds_obey_the_rules() {
    if let Some(seed) = number("HF_SEED")
        && number("HF_STEPS").is_none()
    {
        let run = random(Tape::from_seed(seed), STEPS_A_SEED, false);
        println!(
            "seed {seed}: {} steps, {} actions",
            run.world.steps,
            run.actions.len()
        );
        if let Some(violation) = &run.violation {
            let text = tell(seed, &run);
            if verbose() {
                let script = run::script(&run, violation);
                drop(replay(script.setup, &script.actions, true));
            }
            panic!("{text}");
        }
        return;
    }
    // The whole, or what nobody minds to wait for.
    let whole = std::env::var_os("HF_WHOLE").is_some();
    let (steps, seeds) = if whole { (5_000_000, 5_000) } else { (60_000, 0) };
    let steps = number("HF_STEPS").unwrap_or(steps);
    let first = number("HF_SEED").unwrap_or(1);
    let clock = Clock::start();
    let (coverage, failures) = run_seeds(first, steps, seeds);
    println!("{:.1} s", clock.elapsed().as_secs_f64());
    let empty = coverage.empty();
    println!("{}", coverage.table());
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    println!("empty cells: {empty:?}");
    assert!(
        empty.is_empty() || steps < 5_000_000,
        "nobody looked at {empty:#?}"
    );
}

#[test]
fn every_script_obeys_the_rules() {
    let scripts = stored();
    for (name, script) in &scripts {
        let (world, violation) = replay(script.setup, &script.actions, verbose());
        if let Some(violation) = violation {
            panic!(
                "{name} breaks a rule\n  {}\n  {}\n{}",
                violation.rule,
                violation.story,
                world.oracle.shown_fates()
            );
        }
    }
}

/// A wall clock for the figures that are printed; the world's own clock is virtual.
#[expect(clippy::disallowed_types, reason = "only for what is printed")]
struct Clock(std::time::Instant);

#[expect(clippy::disallowed_types, reason = "only for what is printed")]
impl Clock {
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

#[test]
fn a_tape_of_bytes_runs_too() {
    let bytes: Vec<u8> = (0..4000_u32).map(|number| ((number * 7919) >> 3) as u8).collect();
    let run = random(Tape::from_bytes(&bytes), 300, false);
    assert_eq!(run.violation, None);
    assert!(run.world.steps > 100);
}
