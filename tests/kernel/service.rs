//! What a node's operator and its service manager do with the agent: start, watch, ask, change, end.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast_tests::lab::{DNS, WEB};
use holdfast_tests::process::program;
use holdfast_tests::space::ROOT;
use holdfast_tests::{EVENT_BUDGET, Lab, Node, throughout, unit, until};
use rustix::process::Signal;

holdfast_tests::suite!(needs [Agent];
    a_service_manager_is_told,
    the_unit_forbids_nothing_that_the_agent_does,
    a_loop_that_hangs_turns_livez_and_starves_the_watchdog,
    levels_change_while_it_runs_and_go_back_with_the_next_life,
    a_second_agent_refuses_to_start,
    an_end_is_quick_and_sums_up,
    wrong_settings_start_nothing,
);

/// How long an agent may take to start.
const START: Duration = Duration::from_secs(20);

// --- a service manager ---------------------------------------------------------------------------------------

/// Name of its socket, under the node's root.
const SOCKET: &str = "manager";

/// Who hears what the agent of a node says to its service manager.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<String>,
}

impl Manager {
    fn new(node: &Node) -> anyhow::Result<Self> {
        let socket = UnixDatagram::bind(node.outside(SOCKET)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            heard: Vec::new(),
        })
    }

    /// What systemd puts into the environment of its service.
    fn variables() -> [(&'static str, String); 2] {
        let socket = Path::new(ROOT).join(SOCKET).display().to_string();
        [("NOTIFY_SOCKET", socket), ("WATCHDOG_USEC", "1000000".to_owned())]
    }

    fn count(&mut self, line: &str) -> anyhow::Result<usize> {
        let mut datagram = [0; 4096];
        loop {
            match self.socket.recv(&mut datagram) {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&datagram[..length]).into_owned();
                    self.heard.extend(text.lines().map(str::to_owned));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.heard.iter().filter(|heard| *heard == line).count())
    }

    fn until(&mut self, line: &str, times: usize, deadline: Duration) -> anyhow::Result<()> {
        until(deadline, format!("{line} is heard {times} times"), || {
            Ok((self.count(line)? >= times).then_some(()))
        })
    }
}

fn with<'a>(variables: &'a [(&'a str, String)]) -> Vec<(&'a str, &'a str)> {
    variables
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect()
}

/// Started by the words of the unit, with its rights, on a node that has no objects yet.
fn a_service_manager_is_told() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        let mut manager = Manager::new(&lab.node)?;
        lab.node
            .launch_service(&unit::command()?[1..], &with(&Manager::variables()))?;
        manager.until("READY=1", 1, START)?;
        manager.until("WATCHDOG=1", 3, START)?;
        ensure!(manager.count("STOPPING=1")? == 0);
        lab.put_objects()?;
        lab.create_workloads()?;
        lab.node.until_ready()?;
        lab.register_all()?;
        lab.until_programmed()?;
        lab.served(0, 0)?;
        lab.node.end_agent(Signal::TERM)?;
        manager.until("STOPPING=1", 1, EVENT_BUDGET)?;
        lab.served(0, 0)
    })
}

/// What the service manager's filter would refuse, under the node's root.
const REFUSED: &str = "refused";

/// What runs a command as under a filter of system calls: all but these are refused with EPERM, and written down. The
/// command ends with it.
fn filter(allowed: &BTreeSet<String>) -> anyhow::Result<Vec<OsString>> {
    // `?`: not every name is a call of this machine.
    let names: Vec<String> = allowed.iter().map(|name| format!("?{name}")).collect();
    let forbidden = format!("!{}", names.join(","));
    let mut words: Vec<OsString> = vec![program("strace")?.into()];
    words.extend(["-f", "--seccomp-bpf", "-qq", "-o"].map(OsString::from));
    words.push(Path::new(ROOT).join(REFUSED).into());
    words.extend([
        format!("--trace={forbidden}").into(),
        format!("--inject={forbidden}:error=EPERM").into(),
    ]);
    words.push(program("setpriv")?.into());
    words.extend(["--pdeathsig", "KILL"].map(OsString::from));
    Ok(words)
}

/// Started by the words of the unit, with its rights, under its filter of system calls, it does all that it does: attaches,
/// programs, serves, holds, looks at the kernel, writes its report and its journal, and takes over what another has left.
fn the_unit_forbids_nothing_that_the_agent_does() -> anyhow::Result<()> {
    let allowed = unit::system_calls()?;
    Lab::new()?.run(|lab| {
        let refused = |lab: &Lab| anyhow::Ok(std::fs::read_to_string(lab.node.outside(REFUSED)?)?);
        let words = &unit::command()?[1..];
        lab.put_objects()?;
        lab.create_workloads()?;
        for _ in 0..2 {
            lab.node
                .launch_service_under(&filter(&allowed)?, words, &[("HOLDFAST_AUDIT_INTERVAL", "1s")])?;
            lab.node.until_ready()?;
            lab.register_all()?;
            lab.node.until_verdict(DNS, "Programmed", START)?;
            lab.node.until_verdict(WEB, "Programmed", START)?;
            lab.served(0, 0)?;
            lab.node.unregister("hfc0")?;
            lab.node.until_verdict(DNS, "Held(IdentityMissing)", START)?;
            lab.not_served(0, 0)?;
            until(START, "the kernel was looked at", || {
                Ok((lab
                    .node
                    .metrics()?
                    .count("holdfast_loop_runs_total", &[("loop", "audit")])
                    > 2)
                .then_some(()))
            })?;
            lab.node.end_agent(Signal::KILL)?;
            until(START, "the agent has ended with what started it", || {
                Ok(lab.node.get("/livez").is_err().then_some(()))
            })?;
            let refused = refused(lab)?;
            ensure!(refused.is_empty(), "the unit forbids: {refused}");
        }
        // And the filter is one: without a call that the agent needs there is no agent.
        let less: BTreeSet<String> = allowed.iter().filter(|name| *name != "bpf").cloned().collect();
        lab.node.launch_service_under(&filter(&less)?, words, &[])?;
        lab.node.until_ended()?;
        lab.node.forgive_errors();
        let refused = refused(lab)?;
        let line = refused.lines().next().context("nothing was refused")?;
        ensure!(line.contains("bpf(") && line.contains("EPERM"), "{line}");
        Ok(())
    })
}

/// The write of a row hangs in the kernel: bpf(2) cannot be cancelled, so only a new life helps, and that is what has to be
/// asked for. When the call returns, all is well again.
fn a_loop_that_hangs_turns_livez_and_starves_the_watchdog() -> anyhow::Result<()> {
    let lab = Lab::new()?.set_up(|lab| {
        lab.node.chaos("")?;
        lab.program(&with(&Manager::variables()))
    })?;
    lab.run(|lab| {
        let mut manager = Manager::new(&lab.node)?;
        manager.until("WATCHDOG=1", 2, START)?;
        ensure!(lab.node.get("/livez")?.body == "ok\n");
        let begun = Instant::now();
        lab.node.chaos("row=slow 16s")?;
        lab.node.unregister_silently("hfc0")?;
        lab.node.poke("hfc0")?;
        let said = until(START, "/livez has turned", || {
            // What is not heard fills the socket, and whoever waits for room in it is heard late.
            manager.count("WATCHDOG=1")?;
            let answer = lab.node.get("/livez")?;
            Ok((answer.status == 503).then_some(answer.body))
        })?;
        lab.node.chaos("")?;
        ensure!(
            said.starts_with("writes: one call to the kernel has lasted for 1"),
            "{said}"
        );
        ensure!(begun.elapsed() > Duration::from_secs(10), "{said}");
        let verbose = lab.node.get("/livez?verbose")?.body;
        ensure!(
            verbose.contains("[+]engine ok\n") && verbose.contains("[-]writes failed: "),
            "{verbose}"
        );
        // A round of the watchdog that had looked before may still be under way.
        std::thread::sleep(EVENT_BUDGET);
        let fed = manager.count("WATCHDOG=1")?;
        throughout(EVENT_BUDGET, "the watchdog is not fed", || {
            Ok(manager.count("WATCHDOG=1")? == fed)
        })?;
        // The others go on meanwhile.
        lab.served(1, 1)?;
        until(START, "the call has returned", || {
            Ok((lab.node.get("/livez")?.status == 200).then_some(()))
        })?;
        manager.until("WATCHDOG=1", fed + 1, START)?;
        lab.node.forgive_errors();
        lab.node.register("hfc0", "again")?;
        lab.node.until_verdict(DNS, "Programmed", 40 * EVENT_BUDGET)?;
        lab.served(0, 0)
    })
}

// --- an operator ---------------------------------------------------------------------------------------------

fn log_command(lab: &Lab, words: &[&str]) -> anyhow::Result<String> {
    let output = lab.node.cli("agent", &[&["log"], words].concat())?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn lines_about(lab: &Lab, what: &str) -> usize {
    lab.node.log().iter().filter(|line| line.contains(what)).count()
}

fn levels_change_while_it_runs_and_go_back_with_the_next_life() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        ensure!(log_command(lab, &[])? == "info\n");
        let held = |lab: &mut Lab| -> anyhow::Result<usize> {
            let before = lines_about(lab, ": held ");
            lab.node.unregister("hfc0")?;
            lab.node
                .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
            lab.node.register("hfc0", "again")?;
            lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
            Ok(lines_about(lab, ": held ") - before)
        };
        ensure!(held(lab)? == 1);
        ensure!(
            log_command(lab, &["holdfast::engine=warn"])? == "holdfast::engine=warn (configured: info)\n"
        );
        ensure!(held(lab)? == 0);
        // What makes no sense is refused, and changes nothing.
        let refused = lab.node.cli("agent", &["log", "holdfast=loud"])?;
        ensure!(refused.status.code() == Some(2));
        ensure!(held(lab)? == 0);
        ensure!(log_command(lab, &["--reset"])? == "info\n");
        ensure!(held(lab)? == 1);
        log_command(lab, &["off"])?;
        lab.node.end_agent(Signal::TERM)?;
        lab.node.start_agent()?;
        ensure!(log_command(lab, &[])? == "info\n");
        ensure!(held(lab)? == 1);
        lab.served(0, 0)
    })
}

fn a_second_agent_refuses_to_start() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        let pins = lab.node.pinned()?;
        let second = lab.node.agent_command()?.output()?;
        let said = String::from_utf8_lossy(&second.stderr);
        ensure!(second.status.code() == Some(1), "{}: {said}", second.status);
        ensure!(
            said.contains("holdfast: another holdfast agent uses ") && said.contains("one agent a node"),
            "{said}"
        );
        // The first goes on, and can be asked.
        ensure!(lab.node.pinned()? == pins);
        ensure!(log_command(lab, &[])? == "info\n");
        ensure!(lab.node.get("/readyz")?.body == "ok\n");
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

fn an_end_is_quick_and_sums_up() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)?;
        let begun = Instant::now();
        lab.node.end_agent(Signal::TERM)?;
        let took = begun.elapsed();
        ensure!(took < 2 * EVENT_BUDGET, "{took:?}");
        let sums = lines_about(
            lab,
            "the agent ends; what is programmed goes on serving programmed=3 held=1 failed=0 pending=0 up=",
        );
        ensure!(sums == 1, "{:?}", lab.node.log().last());
        lab.served(1, 1)?;
        lab.not_served(0, 0)
    })
}

/// Nothing is attached, pinned or written by an agent whose settings are wrong.
fn wrong_settings_start_nothing() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        std::fs::write(
            lab.node.outside("agent.toml")?,
            "audit-interval = \"1s\"\nnodes = 1\n",
        )?;
        let path = Path::new(ROOT).join("agent.toml").display().to_string();
        lab.node
            .launch_service(&["agent"], &[("HOLDFAST_CONFIG", &path)])?;
        let status = lab.node.until_ended()?;
        ensure!(status.code() == Some(2), "{status}");
        let said = lab.node.log();
        ensure!(
            said == [format!(
                "holdfast: {path}:2: there is no key \"nodes\"; is \"node\" meant?"
            )],
            "{said:?}"
        );
        ensure!(!lab.node.outside("bpf/holdfast")?.try_exists()?);
        ensure!(!lab.node.outside("holdfast")?.try_exists()?);
        // The same file without its mistake.
        std::fs::write(lab.node.outside("agent.toml")?, "audit-interval = \"1s\"\n")?;
        lab.node
            .launch_service(&["agent"], &[("HOLDFAST_CONFIG", &path)])?;
        lab.node.until_ready()?;
        lab.put_objects()?;
        lab.create_workloads()?;
        lab.register_all()?;
        lab.until_programmed()?;
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}
