//! Scripts of the model world, run against the real kernel.
//!
//! What happens in a script happens twice: in the model world, to the engine and its fake kernel, and in a lab, to the
//! real agent, real devices and real maps. Wherever both have taken it in they must show the same: what is reported of
//! every policy, rows, entries, sets, programs; and a real packet of every consumer to every destination must arrive where
//! the fake kernel forwards it. So engine and fake kernel cannot merely agree with each other.
//!
//! Scripts are made from seeds (`HF_SEED=n` is the first, `HF_COUNT=n` how many), or are those that once broke a rule
//! (`agent/engine/tests/scripts`; `HF_SCRIPTS` names another folder). `HF_LABS=n` says how many run at a time,
//! `HF_FAILURES=n` that only the n-th failure ends it.

/// Includes modules of the model world.
macro_rules! included {
    ($($name:ident = $path:literal,)+) => {
        $(
            #[allow(
                dead_code,
                unused_imports,
                clippy::expect_used,
                clippy::panic,
                clippy::print_stderr,
                clippy::unwrap_used,
                reason = "another test's"
            )]
            #[path = $path]
            mod $name;
        )+
    };
}

included! {
    coverage = "../../../agent/engine/tests/world/coverage.rs",
    flight = "../../../agent/engine/tests/world/flight.rs",
    generate = "../../../agent/engine/tests/world/generate.rs",
    kernel = "../../../agent/engine/tests/world/kernel.rs",
    oracle = "../../../agent/engine/tests/world/oracle.rs",
    rules = "../../../agent/engine/tests/world/rules.rs",
    script = "../../../agent/engine/tests/world/script.rs",
    still = "../../../agent/engine/tests/world/still.rs",
    tape = "../../../agent/engine/tests/world/tape.rs",
    told = "../../../agent/engine/tests/world/told.rs",
    world = "../../../agent/engine/tests/world/world.rs",
}

mod both;
mod files;
mod place;
mod shown;
mod traffic;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, ensure};
use generate::node_script;
use holdfast_tests::{say, suite};
use script::Script;

suite! {
    needs [Namespaces, Agent];
    generated_scripts_end_as_in_the_world,
    stored_scripts_end_as_in_the_world,
    a_broken_agent_is_seen,
}

/// Generated scripts.
const COUNT: u64 = 50;
/// Labs at a time. They wait for most of their time, but more of them wait for each other: agents that start, devices that go.
const LABS: u64 = 4;

fn number(name: &str, usual: u64) -> anyhow::Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text}: no number")),
        Err(_) => Ok(usual),
    }
}

fn generated_scripts_end_as_in_the_world() -> anyhow::Result<()> {
    let (first, count) = (number("HF_SEED", 1)?, number("HF_COUNT", COUNT)?);
    say(format_args!("seeds {first} to {}", first + count - 1));
    let scripts = (first..first + count).map(|seed| (format!("seed-{seed}"), node_script(seed)));
    run_all(scripts.collect())
}

/// Two holds begin with the end of one device there, and the older one is told. A device of a real node is down before it
/// is gone, so that the hold of who was behind it changes its reason and is the younger one.
const DOWN_FIRST: &str = "an-audit-is-believed-before-the-news-of-a-dead-device";

fn stored_scripts_end_as_in_the_world() -> anyhow::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/engine/tests/scripts");
    let stored = script::stored(&folder);
    let all = stored.len();
    let possible = stored
        .into_iter()
        .filter(|(name, _)| name != DOWN_FIRST)
        .filter_map(|(name, script)| Some((name, script.on_a_node()?)));
    let possible: BTreeMap<String, Script> = possible.collect();
    say(format_args!(
        "{} of {all} are something for a real node",
        possible.len()
    ));
    run_all(possible)
}

/// Runs scripts in labs of their own, several at a time, until one fails.
fn run_all(scripts: BTreeMap<String, Script>) -> anyhow::Result<()> {
    let started = Instant::now();
    let scripts: Vec<(String, Script)> = scripts.into_iter().collect();
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failures = Mutex::new(Vec::new());
    let (labs, most) = (number("HF_LABS", LABS)?, number("HF_FAILURES", 1)?);
    std::thread::scope(|scope| {
        for _ in 0..labs {
            // Processes die with the thread that started them: each lab has one of its own.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((name, script)) = scripts.get(number) else {
                        break;
                    };
                    let outcome = both::run(script, &stop);
                    let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(error) = outcome.err().filter(|_| !stop.load(Ordering::Relaxed)) else {
                        continue;
                    };
                    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
                    let failure = format!(
                        "{}\n  because: {}",
                        replay(name, script),
                        causes.join("\n  because: ")
                    );
                    failures.push(failure);
                    stop.fetch_or(failures.len() as u64 >= most, Ordering::Relaxed);
                }
            });
        }
    });
    say(format_args!(
        "{} scripts in {:.1} s",
        next.into_inner().min(scripts.len()),
        started.elapsed().as_secs_f64()
    ));
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(failures.is_empty(), "{}", failures.join("\n\n"));
    Ok(())
}

/// Writes a script that fails to a file, and says how to run it again.
fn replay(name: &str, script: &Script) -> String {
    let written = write(name, script);
    let folder = match written {
        Ok(folder) => folder,
        Err(error) => return format!("{name} fails, and cannot be written: {error:#}"),
    };
    let folder = folder.display();
    format!(
        "{name} fails\n  \
         in a lab:  HF_SCRIPTS={folder} cargo test -p holdfast-tests --test scripts stored\n  \
         the world: HF_SCRIPTS={folder} HF_VERBOSE=1 cargo test -p holdfast-engine --test world every_script"
    )
}

fn write(name: &str, script: &Script) -> anyhow::Result<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("scripts").join(name);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(format!("{name}.json")), script::write(script))?;
    Ok(folder)
}

/// Rules of the agent: with each of them broken some script must fail.
const BROKEN: [&str; 4] = ["keep-rows", "ignore-host-mac", "deaf-links", "forget-sources"];

fn a_broken_agent_is_seen() -> anyhow::Result<()> {
    let guarded = BROKEN.map(|rule| ("generated_scripts_end_as_in_the_world", rule));
    suite::each_fails(&guarded)
}
