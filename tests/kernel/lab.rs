//! The lab itself: it measures what it should, and leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_tests::bulk::{self, Sink};
use holdfast_tests::guest::Frames;
use holdfast_tests::suite::{self, Need};
use holdfast_tests::traffic::{Flow, Producer, ask, ask_tcp, ping};
use holdfast_tests::workload::Link;
use holdfast_tests::{EVENT_BUDGET, Lab, Workload, counters, say, until};
use rustix::process::{Pid, Signal, kill_process};

fn main() -> ExitCode {
    if std::env::var_os(KEEP).is_some() {
        return match keep() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    suite::run(
        &[Need::Namespaces],
        &[
            ("the_bystander_loses_nothing", the_bystander_loses_nothing),
            ("every_link_carries_everything", every_link_carries_everything),
            ("what_is_lost_is_counted", what_is_lost_is_counted),
            (
                "nothing_is_left_when_a_test_is_interrupted",
                nothing_is_left_when_a_test_is_interrupted,
            ),
        ],
        &[],
        &[],
    )
}

/// Set: this process only makes a lab, says so, and waits to be interrupted.
const KEEP: &str = "HOLDFAST_LAB_KEEP";

fn the_bystander_loses_nothing() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        // Without a policy the node routes: the producers' own addresses are reached, by every protocol and family.
        let (from, to) = (&lab.consumers[0], &lab.producers[0]);
        for address in to.addresses {
            let at = (address, 4000).into();
            let producer = Producer::serve(to.space()?, 7, &[at])?;
            let by = ask(from.space()?, at, EVENT_BUDGET)?;
            ensure!(by == Some(7), "{at}: {by:?}");
            ensure!(ask_tcp(from.space()?, at, EVENT_BUDGET)? == 7);
            drop(producer);
        }
        let at = (to.addresses[0], 4000).into();
        let producer = Producer::serve(to.space()?, 7, &[at])?;
        let flow = Flow::start(from.space()?, at, 6_000, 7)?;
        flow.flows(6_000, Duration::from_secs(3))?;
        let tally = flow.finish(Some(&producer))?;
        say(&tally);
        tally.perfect()?;
        ensure!(tally.rate >= 5_000.0, "too slow: {tally}");
        // Nobody serves the services, and nothing arrives.
        lab.not_served(0, 0)
    })
}

fn every_link_carries_everything() -> anyhow::Result<()> {
    let links = [
        Link::Veth,
        Link::Bridged,
        Link::Tap(Frames::Whole),
        Link::Tap(Frames::Scattered),
    ];
    let mut server = Workload::new("s0", 40, &[], &[]);
    Lab::new()?.run(|lab| {
        server.create(&mut lab.node)?;
        let at = server.addresses.map(|address| (address, 4000).into());
        let bulk = server.addresses.map(|address| (address, 4001).into());
        let _producer = Producer::serve(server.space()?, 7, &at)?;
        let _sinks = bulk
            .map(|at| Sink::listen(server.space()?, at))
            .into_iter()
            .collect::<anyhow::Result<Vec<_>>>()?;
        for (number, link) in (41..).zip(links) {
            let mut workload = Workload::new(&format!("w{number}"), number, &[], &[]).linked(link);
            workload.asked_for = true;
            workload.create(&mut lab.node)?;
            let space = workload.space()?;
            for (at, bulk) in at.into_iter().zip(bulk) {
                let carries = || -> anyhow::Result<u64> {
                    ensure!(ping(space, at.ip(), EVENT_BUDGET)?, "no echo");
                    let by = ask(space, at, EVENT_BUDGET)?;
                    ensure!(by == Some(7), "answered by {by:?}");
                    ensure!(ask_tcp(space, at, EVENT_BUDGET)? == 7);
                    let before = counters::sent_by(space, "eth0")?;
                    bulk::send(space, bulk, 20_000_000)?;
                    let after = counters::sent_by(space, "eth0")?;
                    Ok((after.1 - before.1) / (after.0 - before.0))
                };
                let size = carries().with_context(|| format!("by {link:?} to {at}"))?;
                ensure!(size > 3_000, "{link:?} carries packets of {size} bytes");
            }
            workload.delete(&mut lab.node)?;
        }
        Ok(())
    })
}

fn what_is_lost_is_counted() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        let (from, to) = (lab.consumers[0].space()?, &lab.producers[0]);
        let at = (to.addresses[0], 4000).into();
        let producer = Producer::serve(to.space()?, 7, &[at])?;
        let flow = Flow::start(from, at, 1_000, 8)?;
        until(EVENT_BUDGET, "packets arrive", || {
            Ok((producer.received() > 20).then_some(()))
        })?;
        lab.node.rtnl.down(&lab.producers[0].interface)?;
        let sent = flow.sent();
        until(EVENT_BUDGET, "packets are sent", || {
            Ok((flow.sent() > sent + 100).then_some(()))
        })?;
        let tally = flow.finish(Some(&producer))?;
        ensure!(tally.lost >= 100 && tally.misdelivered > 20, "{tally}");
        ensure!(tally.perfect().is_err());
        Ok(())
    })
}

fn keep() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        let namespace = lab
            .node
            .space()
            .inside(|| Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino()))?;
        say(namespace);
        until(Duration::from_secs(60), "interrupted", || Ok(None::<()>))
    })
}

fn nothing_is_left_when_a_test_is_interrupted() -> anyhow::Result<()> {
    for signal in [Signal::INT, Signal::KILL] {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
        let mut child = Command::new(std::env::current_exe()?)
            .env(KEEP, "yes")
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let namespace: u64 = lines
            .map_while(Result::ok)
            .find_map(|line| line.trim().parse().ok())
            .context("the lab was not made")?;
        ensure!(
            in_use(namespace),
            "the namespace of the lab is not found while it is there"
        );
        kill_process(Pid::from_child(&child), signal)?;
        child.wait()?;
        until(EVENT_BUDGET, "the namespace is gone", || {
            Ok((!in_use(namespace)).then_some(()))
        })?;
        ensure!(
            mounts == std::fs::read_to_string("/proc/self/mountinfo")?,
            "a mount is left"
        );
    }
    Ok(())
}

/// Whether any process has this network namespace, or a file of it open.
fn in_use(namespace: u64) -> bool {
    let name = format!("net:[{namespace}]");
    let holds =
        |path: std::path::PathBuf| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy() == name);
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return false;
    };
    processes.flatten().any(|process| {
        let files = std::fs::read_dir(process.path().join("fd"));
        holds(process.path().join("ns/net"))
            || files.is_ok_and(|files| files.flatten().any(|file| holds(file.path())))
    })
}
