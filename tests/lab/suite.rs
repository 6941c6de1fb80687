//! Runs a suite: one test after the other, skips with a reason, and a closing line that counts them.

use std::cell::Cell;
use std::fmt;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::ensure;
use holdfast::config::DeliveryMode;
use holdfast::datapath::AttachMode;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::Space;
use crate::node::BREAK;

/// A test that takes longer hangs: the process ends, and with it everything that it started.
const HANGS_AFTER: Duration = Duration::from_secs(600);

/// A test.
pub type Test = fn() -> anyhow::Result<()>;

/// A test by its name.
pub type Named = (&'static str, Test);

/// What the agents of a test are told of their ways. Some tests run a second time, as `tc::NAME` with clsact instead of what
/// the kernel has best, or as `neigh::NAME` with every delivery by neighbour.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Where they attach.
    pub attach: AttachMode,
    /// How they deliver.
    pub delivery: DeliveryMode,
}

impl Way {
    const USUAL: Self = Self {
        attach: AttachMode::Auto,
        delivery: DeliveryMode::Auto,
    };
    const CLSACT: Self = Self {
        attach: AttachMode::Tc,
        ..Self::USUAL
    };
    const NEIGHBOUR: Self = Self {
        delivery: DeliveryMode::Neigh,
        ..Self::USUAL
    };

    /// As the agent's command line says it.
    #[must_use]
    pub const fn arguments(self) -> [&'static str; 4] {
        let attach = match self.attach {
            AttachMode::Auto => "auto",
            AttachMode::Tcx => "tcx",
            AttachMode::Tc => "tc",
        };
        let delivery = match self.delivery {
            DeliveryMode::Auto => "auto",
            DeliveryMode::Neigh => "neigh",
        };
        ["--attach", attach, "--delivery", delivery]
    }
}

thread_local! {
    static WAY: Cell<Way> = const { Cell::new(Way::USUAL) };
}

/// The way of the test that runs on this thread.
#[must_use]
pub fn way() -> Way {
    WAY.get()
}

/// Why a test cannot run here. A closed list: whoever adds a reason says whether the machine could have met it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Namespaces, devices and maps need root.
    #[error("not root")]
    NotRoot,
    /// The kernel gives no network or mount namespaces.
    #[error("this kernel gives no namespaces of its own")]
    NoNamespaces,
    /// The kernel has no bpf(2), or no bpffs.
    #[error("this kernel has no bpf(2)")]
    NoBpf,
    /// There is no `/dev/net/tun`.
    #[error("this kernel has no taps")]
    NoTap,
    /// The agent is not there.
    #[error("the agent is not built (cargo build --workspace --bins)")]
    NoAgent,
    /// The agent has no BPF object in it.
    #[error("the BPF object is not built (cargo xtask build-ebpf)")]
    NoObject,
    /// A program that the test calls is not installed.
    #[error("{0} is not installed (cargo xtask setup)")]
    NoProgram(&'static str),
    /// The programs of Kubernetes are not there.
    #[error("Kubernetes is not built (cargo xtask cluster build)")]
    NoKubernetes,
    /// A cluster needs more memory than there is.
    #[error("a cluster takes about 1.5 GB of memory, and less is free")]
    NoMemory,
}

impl Reason {
    /// Whether this machine could have met it; where CI runs, that is a failure.
    #[must_use]
    pub const fn could_be_met(self) -> bool {
        match self {
            Self::NotRoot | Self::NoAgent | Self::NoObject | Self::NoProgram(_) | Self::NoKubernetes => true,
            Self::NoNamespaces | Self::NoBpf | Self::NoTap | Self::NoMemory => false,
        }
    }
}

/// What a whole suite needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Root, and namespaces.
    Namespaces,
    /// bpf(2), and the BPF object.
    Object,
    /// What [`Need::Object`] says, and an agent.
    Agent,
    /// Namespaces, and the programs of an API server.
    ApiServer,
}

/// Skips the test that returns this error. There is no other way to skip.
#[must_use]
pub fn skip(reason: Reason) -> anyhow::Error {
    reason.into()
}

/// Runs a suite as the test executable's main. Use [`crate::suite!`].
#[must_use]
pub fn run(needs: &[Need], tests: &[Named], by_clsact: &[Named], by_neighbour: &[Named]) -> ExitCode {
    run_together(1, needs, tests, by_clsact, by_neighbour)
}

/// The same, so many at a time.
#[must_use]
pub fn run_together(
    together: usize,
    needs: &[Need],
    tests: &[Named],
    by_clsact: &[Named],
    by_neighbour: &[Named],
) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(together);
    let missing = if arguments.list { None } else { missing(needs) };
    let trials = [
        ("", Way::USUAL, tests),
        ("tc::", Way::CLSACT, by_clsact),
        ("neigh::", Way::NEIGHBOUR, by_neighbour),
    ];
    let trials = trials.into_iter().flat_map(|(prefix, way, tests)| {
        tests.iter().map(move |&(name, test)| {
            let name = format!("{prefix}{name}");
            Trial::ignorable_test(name.clone(), move || {
                WAY.set(way);
                judge(&name, missing, test)
            })
        })
    });
    let trials = trials.collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list {
        say_closing_line(&conclusion);
    }
    conclusion.exit_code()
}

#[allow(clippy::print_stdout, reason = "what a suite is for")]
fn say_closing_line(conclusion: &libtest_mimic::Conclusion) {
    println!(
        "{} passed, {} failed, {} skipped\n",
        conclusion.num_passed, conclusion.num_failed, conclusion.num_ignored
    );
}

fn judge(name: &str, missing: Option<Reason>, test: Test) -> Result<Completion, Failed> {
    let outcome = match missing {
        Some(reason) => Err(skip(reason)),
        None => watched(name, test),
    };
    verdict(outcome, std::env::var_os("CI").is_some())
}

fn verdict(outcome: anyhow::Result<()>, ci: bool) -> Result<Completion, Failed> {
    let Err(error) = outcome else {
        return Ok(Completion::Completed);
    };
    match error.downcast_ref::<Reason>() {
        Some(reason) if ci && reason.could_be_met() => {
            Err(format!("skipped although CI could run it: {reason}").into())
        }
        Some(reason) => Ok(Completion::ignored_with(format_args!("skipped: {reason}"))),
        None => {
            let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
            Err(causes.join("\n  because: ").into())
        }
    }
}

/// Ends the process when the test hangs: the kernel then takes back what it holds.
fn watched(name: &str, test: Test) -> anyhow::Result<()> {
    let (done, waiting) = mpsc::channel::<()>();
    let name = name.to_owned();
    std::thread::spawn(move || {
        if waiting.recv_timeout(HANGS_AFTER) == Err(mpsc::RecvTimeoutError::Timeout) {
            hangs(&name);
        }
    });
    let outcome = test();
    drop(done);
    outcome
}

#[allow(clippy::print_stderr, reason = "the process ends here")]
fn hangs(name: &str) -> ! {
    eprintln!("{name} hangs: no end after {HANGS_AFTER:?}");
    std::process::exit(101);
}

fn missing(needs: &[Need]) -> Option<Reason> {
    needs.iter().find_map(|need| match need {
        Need::Namespaces => no_namespaces(),
        Need::Object => no_object(),
        Need::Agent => no_agent(),
        Need::ApiServer => no_namespaces().or_else(crate::kubernetes::missing),
    })
}

fn no_namespaces() -> Option<Reason> {
    if !rustix::process::geteuid().is_root() {
        return Some(Reason::NotRoot);
    }
    Space::network().is_err().then_some(Reason::NoNamespaces)
}

fn no_object() -> Option<Reason> {
    if Space::node().is_err() {
        return Some(Reason::NoBpf);
    }
    holdfast::datapath::object::object()
        .is_err()
        .then_some(Reason::NoObject)
}

fn no_agent() -> Option<Reason> {
    no_object().or_else(|| crate::node::agent_binary().is_err().then_some(Reason::NoAgent))
}

/// Runs tests of this executable with a rule broken that each guards ([`BREAK`]): every one of them must fail.
///
/// # Errors
/// When one passes, or only fails because the agent ends (a rule of an agent that is older than the test, say), or there
/// is no test of that name.
pub fn each_fails(guarded: &[(&str, &str)]) -> anyhow::Result<()> {
    for (test, rule) in guarded {
        let output = Command::new(std::env::current_exe()?)
            .args(["--exact", test])
            .env(BREAK, rule)
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(said.contains("running 1 test"), "there is no test {test}");
        ensure!(
            said.contains("0 passed, 1 failed, 0 skipped"),
            "{test} does not see that {rule}:\n{said}"
        );
        let why = said.lines().rfind(|line| line.contains("because"));
        let why = why.unwrap_or_default();
        ensure!(
            !why.contains("the agent has ended"),
            "{test} fails because the agent does not live with it: {rule}"
        );
        say(format_args!("{test} sees that {rule}: {}", why.trim()));
    }
    Ok(())
}

/// Lines that a test has to tell besides passing: figures, factors, seeds.
#[allow(clippy::print_stdout, reason = "figures are part of what a test says")]
pub fn say(line: impl fmt::Display) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    println!("    {line}");
}

/// Makes the test executable: what it needs, its tests by name, and those that run again with clsact or with every delivery
/// by neighbour. One after the other, for tests measure time and losses, and two at once would measure each other; those of
/// a suite that only waits may run `together`.
#[macro_export]
macro_rules! suite {
    (needs [$($need:ident),*]; together $together:literal; $($test:path),* $(,)?
     $(; tc [$($tc:path),* $(,)?])? $(; neigh [$($neigh:path),* $(,)?])?) => {
        fn main() -> std::process::ExitCode {
            $crate::suite::run_together(
                $together,
                &[$($crate::suite::Need::$need),*],
                &$crate::named![$($test),*],
                &$crate::named![$($($tc),*)?],
                &$crate::named![$($($neigh),*)?],
            )
        }
    };
    (needs [$($need:ident),*]; $($tests:tt)*) => {
        $crate::suite!(needs [$($need),*]; together 1; $($tests)*);
    };
}

/// Tests by name.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($($test:path),*) => { [$((stringify!($test), $test as $crate::suite::Test)),*] };
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn what_ci_could_run_it_may_not_skip() {
        let skipped = |reason, ci| verdict(Err(skip(reason)), ci);
        assert!(matches!(
            skipped(Reason::NotRoot, false),
            Ok(Completion::Ignored { .. })
        ));
        assert!(skipped(Reason::NotRoot, true).is_err());
        assert!(skipped(Reason::NoObject, true).is_err());
        assert!(matches!(
            skipped(Reason::NoBpf, true),
            Ok(Completion::Ignored { .. })
        ));
        assert!(matches!(verdict(Ok(()), true), Ok(Completion::Completed)));
    }

    #[test]
    fn a_failure_names_its_causes() {
        let error = anyhow!("a").context("b");
        let failed = verdict(Err(error), false).err().unwrap();
        assert_eq!(failed.message(), Some("b\n  because: a"));
    }
}
