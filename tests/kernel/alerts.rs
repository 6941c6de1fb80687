//! Each alert of the agent, fired by the real agent, watched by a real Prometheus, in fast motion: three minutes are three
//! seconds. Silent before, fires, resolves.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, ensure};
use holdfast::datapath::raw;
use holdfast_ebpf::abi::{RouteEntry, ServiceKey, pin};
use holdfast_tests::alerts::{Alerts, Pace};
use holdfast_tests::codegen::in_repository;
use holdfast_tests::kubernetes::{ApiServer, api_server_in};
use holdfast_tests::lab::{DNS, WEB};
use holdfast_tests::objects::Policy;
use holdfast_tests::prometheus::{LATE, Prometheus};
use holdfast_tests::tamper::{foreign, key_of_c0};
use holdfast_tests::told::PolicyLine;
use holdfast_tests::{Lab, Workload, say, throughout, until};
use rustix::process::Signal;

holdfast_tests::suite! {
    needs [Namespaces, Agent];
    // Most of the time they wait for a rule.
    together 2;
    // The longest first.
    a_data_plane_that_hangs_tampering_and_overruns,
    f17_a_hold_a_storm_and_what_is_deleted,
    failures_proofs_and_foreign_programs,
    f47_a_hold_while_the_clock_is_wrong,
    f48_a_hold_through_a_crash_loop,
    a_source_and_a_report_that_fail,
    a_saved_set_that_ages,
    a_map_that_fills,
    an_agent_that_is_gone,
    every_alert_of_the_agent_is_fired_here,
}

/// A scrape every half second; an hour is a minute.
const PACE: Pace = Pace {
    divisor: 60,
    ..Pace::SHIPPED
};
/// The same for alerts about what the agent itself does every few seconds.
const SLOWER: Pace = Pace {
    divisor: 30,
    ..Pace::SHIPPED
};
const MINUTE: Duration = Duration::from_secs(60);
/// How long an agent may take to find an API server again, in real time.
const RECONNECTED: Duration = Duration::from_secs(30);
/// How long every alert goes on after its cause is gone, and a scrape.
const AFTERWARDS: Duration = Duration::from_secs(150);

/// The usual scene, with audits every second, whose agent can be made to fail, and a Prometheus beside it.
fn watched(environment: &[(&str, &str)], pace: Pace) -> anyhow::Result<(Lab, Prometheus)> {
    let mut all = vec![("HOLDFAST_AUDIT_INTERVAL", "1s")];
    all.extend(environment);
    let lab = Lab::programmed_with_chaos(&all)?;
    let prometheus = Prometheus::start(&lab.node, pace)?;
    Ok((lab, prometheus))
}

/// Tries an edit of a policy that changes what is in the kernel: another port, and back.
fn edit(lab: &Lab, policy: &str, round: u16) -> anyhow::Result<()> {
    let mut edited = lab.policy(policy);
    let addresses: Vec<IpAddr> = edited.services.iter().map(|(address, _)| *address).collect();
    for address in addresses {
        edited.services.push((address, 10_000 + round));
    }
    lab.node.put_policy(&edited)
}

// --- holds -------------------------------------------------------------------------------------------------

/// How many policies a storm has beside the usual one: ten are none.
const STORM: u16 = 11;

fn of_storm(lab: &Lab, number: u16) -> Policy {
    Policy {
        name: format!("storm-{number:02}"),
        services: vec![(Ipv4Addr::new(10, 96, 1, 1).into(), 1_000 + number)],
        ..lab.policy(DNS)
    }
}

fn f17_a_hold_a_storm_and_what_is_deleted() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        // One policy, one alert: not before its time.
        prometheus.silent("HoldfastPolicyHeld")?;
        prometheus.silent("HoldfastNodeHolds")?;
        lab.node.unregister("hfc0")?;
        let held = Instant::now();
        prometheus.until_firing("HoldfastPolicyHeld", &[("policy", DNS)], 3 * MINUTE)?;
        ensure!(
            held.elapsed() >= PACE.time(3 * MINUTE),
            "too early: {:?}",
            held.elapsed()
        );
        lab.consumers[0].register(&lab.node)?;
        prometheus.until_resolved("HoldfastPolicyHeld", AFTERWARDS)?;
        // A storm: one alert of the node.
        for number in 0..STORM {
            lab.node.put_policy(&of_storm(lab, number))?;
        }
        lab.until_intents("programmed", 4 + 2 * u64::from(STORM), LATE)?;
        lab.node.unregister("hfc0")?;
        prometheus.until_firing("HoldfastNodeHolds", &[], 3 * MINUTE)?;
        prometheus.until_resolved("HoldfastPolicyHeld", AFTERWARDS)?;
        prometheus.silent("HoldfastPolicyHeld")?;
        for number in 0..STORM {
            lab.node.remove_file(&format!("policy-storm-{number:02}.yaml"))?;
        }
        prometheus.until_resolved("HoldfastNodeHolds", AFTERWARDS)?;
        // The one that is left is held; its consumer is deleted, then the policy.
        prometheus.until_firing("HoldfastPolicyHeld", &[("policy", DNS)], 3 * MINUTE)?;
        lab.node.remove_file("attachment-c0.yaml")?;
        until(LATE, "no series says since when", || {
            let metrics = lab.node.metrics()?;
            let start = metrics.get("holdfast_policy_hold_start_timestamp_seconds", &[]);
            Ok(start.is_none().then_some(()))
        })?;
        prometheus.until_resolved("HoldfastPolicyHeld", AFTERWARDS)?;
        lab.node.remove_file(&format!("policy-{DNS}.yaml"))?;
        cycles(lab)
    })
}

/// Policies that come and go, a hundred at a time.
const CYCLES: u16 = 1_000;
const AT_ONCE: u16 = 100;

/// A thousand policies come, held at first, and go: the number of series is what it was.
fn cycles(lab: &Lab) -> anyhow::Result<()> {
    let objects = |lab: &Lab| -> anyhow::Result<u64> {
        let metrics = lab.node.metrics()?;
        Ok(metrics.count("holdfast_source_objects", &[("kind", "RoutePolicy")]))
    };
    until(LATE, "one policy is left", || {
        Ok((objects(lab)? == 1).then_some(()))
    })?;
    let baseline = lab.node.metrics()?.series();
    lab.node.unregister("hfc1")?;
    let mut most = 0;
    for first in (0..CYCLES).step_by(usize::from(AT_ONCE)) {
        let file = format!("cycle-{first}.yaml");
        let policies: Vec<String> = (first..first + AT_ONCE)
            .map(|number| {
                let policy = Policy {
                    name: format!("cycle-{number}"),
                    services: vec![(Ipv4Addr::new(10, 96, 2, 1).into(), 2_000 + number)],
                    ..lab.policy(DNS)
                };
                policy.to_string()
            })
            .collect();
        lab.node.put_file(&file, &policies.join("---\n"))?;
        until(LATE, "all of them are held", || {
            Ok((lab.node.metrics()?.held("IdentityMissing") > u64::from(AT_ONCE)).then_some(()))
        })?;
        most = most.max(lab.node.metrics()?.series());
        lab.node.remove_file(&file)?;
        until(LATE, "all of them are gone", || {
            Ok((objects(lab)? == 1).then_some(()))
        })?;
    }
    lab.consumers[1].register(&lab.node)?;
    until(LATE, "as many series as before", || {
        Ok((lab.node.metrics()?.series() == baseline).then_some(()))
    })?;
    say(format_args!(
        "{baseline} series at rest, {most} with {AT_ONCE} policies in trouble"
    ));
    Ok(())
}

/// Seconds that an age may be off: what a busy machine takes to notice, well below what a wrong clock or a life makes of it.
const OFF: f64 = 1.5;

/// Seconds since the oldest hold of the policy began, as a scrape says it.
fn hold_age(lab: &Lab) -> anyhow::Result<Option<f64>> {
    let metrics = lab.node.metrics()?;
    let start = metrics.get("holdfast_policy_hold_start_timestamp_seconds", &[("policy", DNS)]);
    let now = metrics.get("holdfast_time_seconds", &[]).context("no time")?;
    Ok(start.map(|start| now - start))
}

fn f47_a_hold_while_the_clock_is_wrong() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        let right = lab
            .node
            .metrics()?
            .get("holdfast_time_seconds", &[])
            .context("no time")?;
        lab.node.chaos("wall=+600s")?;
        until(LATE, "the clock is ten minutes ahead", || {
            let now = lab.node.metrics()?.get("holdfast_time_seconds", &[]);
            Ok(now.is_some_and(|now| now > right + 599.0).then_some(()))
        })?;
        prometheus.silent("HoldfastPolicyHeld")?;
        lab.node.unregister("hfc0")?;
        let held = Instant::now();
        let right_age = |lab: &Lab| -> anyhow::Result<()> {
            let age = hold_age(lab)?.context("nothing is held")?;
            let expected = held.elapsed().as_secs_f64();
            ensure!((age - expected).abs() < OFF, "{age} s old, not {expected}");
            Ok(())
        };
        until(LATE, "it is held", || Ok(hold_age(lab)?.map(drop)))?;
        right_age(lab)?;
        prometheus.until_firing("HoldfastPolicyHeld", &[("policy", DNS)], 3 * MINUTE)?;
        ensure!(held.elapsed() >= PACE.time(3 * MINUTE), "too early");
        // The clock is put right, and then steps too far: the same hold, of the same age, one alert.
        for step in ["", "wall=-600s"] {
            lab.node.chaos(step)?;
            throughout(PACE.time(3 * MINUTE), "the alert goes on", || {
                std::thread::sleep(Duration::from_millis(100));
                right_age(lab)?;
                Ok(prometheus.firing("HoldfastPolicyHeld")?.len() == 1)
            })?;
        }
        // A life that begins with the wrong clock.
        lab.node.end_agent(Signal::KILL)?;
        lab.node.launch_agent(&[("HOLDFAST_AUDIT_INTERVAL", "1s")])?;
        lab.node.until_ready()?;
        until(LATE, "held since then", || Ok(hold_age(lab)?.map(drop)))?;
        right_age(lab)?;
        let status = lab.node.cli("status", &["-o", "json"])?;
        ensure!(status.status.success());
        lab.consumers[0].register(&lab.node)?;
        prometheus.until_resolved("HoldfastPolicyHeld", AFTERWARDS)?;
        lab.node.chaos("")
    })
}

/// Times are kept a second after they change.
const KEPT: Duration = Duration::from_secs(2);
/// Lives of the agent, each about two minutes at the pace of the alerts.
const LIVES: u32 = 8;

fn f48_a_hold_through_a_crash_loop() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastPolicyHeld")?;
        lab.node.unregister("hfc0")?;
        let held = Instant::now();
        until(LATE, "it is held", || Ok(hold_age(lab)?.map(drop)))?;
        throughout(KEPT, "held", || Ok(hold_age(lab)?.is_some()))?;
        let mut fired = 0;
        for _ in 0..LIVES {
            lab.node.end_agent(Signal::KILL)?;
            lab.node.launch_agent(&[("HOLDFAST_AUDIT_INTERVAL", "1s")])?;
            lab.node.until_ready()?;
            let ready = Instant::now();
            let age = until(LATE, "it is held", || hold_age(lab))?;
            let expected = held.elapsed().as_secs_f64();
            ensure!((age - expected).abs() < OFF, "{age} s old, not {expected}");
            let life = PACE.time(2 * MINUTE);
            std::thread::sleep(life.saturating_sub(ready.elapsed()));
            fired += usize::from(!prometheus.firing("HoldfastPolicyHeld")?.is_empty());
        }
        say(format_args!(
            "held for {:?} in {LIVES} lives; at the end of {fired} the alert fired",
            held.elapsed()
        ));
        prometheus.until_firing("HoldfastPolicyHeld", &[("policy", DNS)], MINUTE)?;
        ensure!(
            fired + 2 >= usize::try_from(LIVES)?,
            "fired in {fired} of {LIVES} lives"
        );
        lab.consumers[0].register(&lab.node)?;
        prometheus.until_resolved("HoldfastPolicyHeld", AFTERWARDS + 10 * MINUTE)
    })
}

// --- failures ----------------------------------------------------------------------------------------------

fn failures_proofs_and_foreign_programs() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastIntentsFailed")?;
        prometheus.silent("HoldfastProofFailed")?;
        prometheus.silent("HoldfastForeignProgram")?;
        lab.node.chaos("entries=EINVAL")?;
        edit(lab, WEB, 1)?;
        let reason = [("reason", "MapWriteFailed")];
        prometheus.until_firing("HoldfastIntentsFailed", &reason, MINUTE)?;
        lab.node.chaos("")?;
        lab.node.put_policy(&lab.policy(WEB))?;
        prometheus.until_resolved("HoldfastIntentsFailed", AFTERWARDS)?;

        lab.node.chaos("prove-intent=EIO")?;
        edit(lab, DNS, 1)?;
        prometheus.until_firing("HoldfastProofFailed", &[], MINUTE)?;
        lab.node.chaos("")?;
        lab.node.put_policy(&lab.policy(DNS))?;
        lab.node.until_verdict(DNS, "Programmed", LATE)?;

        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let program = foreign()?;
        let space = lab.node.space();
        let link = space.inside(|| Ok(raw::link_create(program.as_fd(), ifindex)?))?;
        prometheus.until_firing("HoldfastForeignProgram", &[], MINUTE)?;
        drop(link);
        prometheus.until_resolved("HoldfastForeignProgram", AFTERWARDS)?;
        prometheus.until_resolved("HoldfastIntentsFailed", AFTERWARDS)?;
        // Failures of the last ten minutes are still counted.
        prometheus.until_resolved("HoldfastProofFailed", AFTERWARDS + 10 * MINUTE)?;
        lab.served(0, 0)
    })
}

// --- behind, drift and overruns ----------------------------------------------------------------------------

fn a_data_plane_that_hangs_tampering_and_overruns() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastPolicyBehind")?;
        prometheus.silent("HoldfastEditsSlow")?;
        prometheus.silent("HoldfastDriftRepeated")?;
        prometheus.silent("HoldfastNetlinkOverruns")?;
        hang(lab, &prometheus)?;
        tamper(lab)?;
        prometheus.until_firing("HoldfastDriftRepeated", &[("kind", "entry")], MINUTE)?;
        flood(lab)?;
        prometheus.until_firing("HoldfastNetlinkOverruns", &[], MINUTE)?;
        edit_slowly(lab)?;
        prometheus.until_firing("HoldfastEditsSlow", &[], 5 * MINUTE)?;
        // By then all of it is beyond the window of half an hour.
        let resolved = AFTERWARDS + 30 * MINUTE;
        prometheus.until_resolved("HoldfastDriftRepeated", resolved)?;
        prometheus.until_resolved("HoldfastNetlinkOverruns", resolved)?;
        prometheus.until_resolved("HoldfastEditsSlow", resolved)?;
        lab.served(0, 0)
    })
}

/// One operation hangs, just below the ten seconds after which the engine takes it for failed.
fn hang(lab: &Lab, prometheus: &Prometheus) -> anyhow::Result<()> {
    lab.node.chaos("entries@hfc0=slow 9s:1")?;
    let begun = Instant::now();
    edit(lab, DNS, 1)?;
    let stage = |stage: &str| -> anyhow::Result<Option<f64>> {
        let labels = [("policy", DNS), ("stage", stage)];
        Ok(lab.node.metrics()?.get("holdfast_policy_generation", &labels))
    };
    until(LATE, "seen and applied diverge", || {
        let (seen, applied) = (stage("seen")?, stage("applied")?);
        Ok((seen == Some(2.0) && applied == Some(1.0)).then_some(()))
    })?;
    prometheus.until_firing("HoldfastPolicyBehind", &[("policy", DNS)], 5 * MINUTE)?;
    ensure!(begun.elapsed() >= PACE.time(5 * MINUTE), "too early");
    ensure!(
        lab.node.verdict(DNS)? != "Programmed" || begun.elapsed() >= Duration::from_secs(9),
        "it hangs, and is said to be programmed"
    );
    lab.node.until_verdict(DNS, "Programmed", LATE)?;
    ensure!(stage("applied")?.is_none_or(|applied| applied == 2.0));
    lab.node.chaos("")?;
    prometheus.until_resolved("HoldfastPolicyBehind", AFTERWARDS)
}

/// Edits that take longer than half a second, which is 30 s at the pace of the alerts.
const SLOW_EDITS: u16 = 7;

fn edit_slowly(lab: &Lab) -> anyhow::Result<()> {
    lab.node.chaos("entries=slow 600ms")?;
    for round in 0..SLOW_EDITS {
        edit(lab, WEB, 2 + round)?;
        let generation = u64::from(round) + 2;
        until(LATE, "it is done", || {
            let report = lab.node.report()?;
            let line = report.as_ref().and_then(|report| report.policy(WEB));
            let done = |line: &PolicyLine| line.generation == generation && line.verdict() == "Programmed";
            Ok(line.is_some_and(done).then_some(()))
        })?;
    }
    lab.node.chaos("")
}

/// More notifications than the buffer of the agent takes.
const BURST: u32 = 16_000;

/// An entry is deleted, until the audit has found it so four times.
fn tamper(lab: &mut Lab) -> anyhow::Result<()> {
    let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
    let key = key_of_c0(lab)?;
    let repairs = |lab: &Lab| -> anyhow::Result<u64> {
        let metrics = lab.node.metrics()?;
        Ok(metrics.count("holdfast_drift_repairs_total", &[("kind", "entry")]))
    };
    for _ in 0..4 {
        let before = repairs(lab)?;
        until(LATE, "the audit finds it", || {
            if repairs(lab)? > before {
                return Ok(Some(()));
            }
            // A proof that comes before the audit finds it too, and then it is no drift.
            services.delete(&key)?;
            std::thread::sleep(Duration::from_millis(50));
            Ok(None)
        })?;
        // Each is a scrape's own.
        throughout(PACE.time(MINUTE), "time passes", || Ok(true))?;
    }
    Ok(())
}

/// The agent stands still while more notifications come than its buffer takes, four times.
fn flood(lab: &mut Lab) -> anyhow::Result<()> {
    let count = |lab: &Lab, family: &str| anyhow::Ok(lab.node.metrics()?.count(family, &[]));
    let overruns = |lab: &Lab| count(lab, "holdfast_netlink_overruns_total");
    let dumps = |lab: &Lab| count(lab, "holdfast_netlink_resyncs_total");
    for _ in 0..4 {
        let (before, dumps_before) = (overruns(lab)?, dumps(lab)?);
        lab.node.stop_agent()?;
        for number in 0..BURST {
            // Of a device that is up: of others the kernel says nothing.
            lab.node.rtnl.set_alias("hfb0", &number.to_string())?;
        }
        lab.node.signal_agent(Signal::CONT)?;
        until(LATE, "the overrun is counted", || {
            Ok((overruns(lab)? > before).then_some(()))
        })?;
        // Before it listens again nothing overruns it.
        until(LATE, "it has dumped again", || {
            Ok((dumps(lab)? > dumps_before).then_some(()))
        })?;
        throughout(PACE.time(MINUTE), "time passes", || Ok(true))?;
    }
    Ok(())
}

// --- what the agent reads and writes -----------------------------------------------------------------------

fn a_source_and_a_report_that_fail() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], SLOWER)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastSourceSilent")?;
        prometheus.silent("HoldfastLoopErrors")?;
        prometheus.silent("HoldfastReportWritesFailing")?;
        let (objects, elsewhere) = (lab.node.outside("objects")?, lab.node.outside("elsewhere")?);
        std::fs::rename(&objects, &elsewhere)?;
        // A directory is in the way of the report, and there is something to report.
        let report = lab.node.report_path()?;
        std::fs::remove_file(&report)?;
        std::fs::create_dir(&report)?;
        lab.node.unregister("hfc0")?;
        prometheus.until_firing("HoldfastReportWritesFailing", &[], 5 * MINUTE)?;
        prometheus.until_firing("HoldfastLoopErrors", &[("loop", "source")], 5 * MINUTE)?;
        prometheus.until_firing("HoldfastSourceSilent", &[], 6 * MINUTE)?;
        std::fs::remove_dir(&report)?;
        std::fs::rename(&elsewhere, &objects)?;
        lab.consumers[0].register(&lab.node)?;
        lab.node.until_verdict(DNS, "Programmed", LATE)?;
        prometheus.until_resolved("HoldfastReportWritesFailing", AFTERWARDS + 5 * MINUTE)?;
        prometheus.until_resolved("HoldfastLoopErrors", AFTERWARDS + 5 * MINUTE)?;
        prometheus.until_resolved("HoldfastSourceSilent", AFTERWARDS)
    })
}

/// Something to save, of an interface that never comes.
const OBJECTS: &str = "\
apiVersion: holdfast.dev/v1alpha1
kind: Attachment
metadata: {namespace: default, name: web-0, labels: {app: web}}
spec: {node: edge-1, interface: hfweb0, identity: 3f0c6a1e, addresses: [10.0.0.11]}
---
apiVersion: holdfast.dev/v1alpha1
kind: RoutePolicy
metadata: {namespace: default, name: dns}
spec:
  consumers: {matchLabels: {app: web}}
  producers: {matchLabels: {app: dns}}
  destinations: [{address: 10.96.0.10, protocol: UDP, port: 53}]
";

/// A node that was off for two hours boots without its API server.
fn a_saved_set_that_ages() -> anyhow::Result<()> {
    let api_away = |api: &ApiServer, lab: &Lab| -> anyhow::Result<()> {
        api.away()?;
        let saved = lab.node.outside("state")?.join("kube-objects.json");
        let hours_ago = SystemTime::now() - PACE.time(120 * MINUTE);
        Ok(std::fs::File::options()
            .append(true)
            .open(saved)?
            .set_modified(hours_ago)?)
    };
    Lab::new()?.run(|lab| {
        let api = api_server_in(lab.node.space())?;
        let kubectl = api.kubectl();
        let definitions = in_repository("deploy/crds").display().to_string();
        kubectl.run(&["apply", "-f", &definitions])?;
        kubectl.run(&["wait", "--for=condition=Established", "-f", &definitions])?;
        kubectl.feed(&["apply", "-f", "-"], OBJECTS)?;
        let kubeconfig = kubectl.kubeconfig().display().to_string();
        let variables = [("HOLDFAST_SOURCE", "kube"), ("HOLDFAST_KUBECONFIG", &*kubeconfig)];
        let held = |lab: &Lab| lab.until_intents("held", 1, LATE);
        lab.node.launch_service(&["agent"], &variables)?;
        lab.node.until_ready()?;
        held(lab)?;
        let prometheus = Prometheus::start(&lab.node, PACE)?;
        prometheus.silent("HoldfastSavedSetOld")?;
        lab.node.end_agent(Signal::TERM)?;
        api_away(&api, lab)?;
        lab.node.launch_service(&["agent"], &variables)?;
        lab.node.until_ready()?;
        held(lab)?;
        prometheus.until_firing("HoldfastSavedSetOld", &[], MINUTE)?;
        api.again()?;
        prometheus.until_resolved("HoldfastSavedSetOld", AFTERWARDS + RECONNECTED * PACE.divisor)
    })
}

fn a_map_that_fills() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[("HOLDFAST_MAP_CONSUMERS", "8")], PACE)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastMapFilling")?;
        let entries = |lab: &Lab| -> anyhow::Result<u64> {
            let map = [("map", pin::CONSUMERS)];
            Ok(lab.node.metrics()?.count("holdfast_map_entries", &map))
        };
        let (before, mut more) = (entries(lab)?, Vec::new());
        // More consumers, up to seven eighths.
        for number in before..7 {
            let name = format!("m{number}");
            let mut member = Workload::new(&name, 50 + u8::try_from(number)?, &[(DNS, "yes")], &[]);
            member.create(&mut lab.node)?;
            lab.node.put_attachment(&member.attachment())?;
            member.register(&lab.node)?;
            more.push(member);
        }
        until(LATE, "seven of eight", || Ok((entries(lab)? == 7).then_some(())))?;
        prometheus.until_firing("HoldfastMapFilling", &[("map", pin::CONSUMERS)], 5 * MINUTE)?;
        for member in &more {
            lab.node
                .remove_file(&format!("attachment-{}.yaml", member.name))?;
        }
        prometheus.until_resolved("HoldfastMapFilling", AFTERWARDS)
    })
}

// --- no agent ----------------------------------------------------------------------------------------------

fn an_agent_that_is_gone() -> anyhow::Result<()> {
    let (lab, prometheus) = watched(&[], PACE)?;
    lab.run(|lab| {
        prometheus.silent("HoldfastAgentDown")?;
        lab.node.end_agent(Signal::KILL)?;
        let gone = Instant::now();
        prometheus.until_firing("HoldfastAgentDown", &[], 5 * MINUTE)?;
        ensure!(gone.elapsed() >= PACE.time(4 * MINUTE), "too early");
        lab.served(0, 0)?;
        lab.node.start_agent()?;
        prometheus.until_resolved("HoldfastAgentDown", MINUTE)
    })
}

// --- and none is forgotten ---------------------------------------------------------------------------------

fn every_alert_of_the_agent_is_fired_here() -> anyhow::Result<()> {
    let here = include_str!("alerts.rs");
    for alert in Alerts::read()?.alert {
        if alert.is_the_controllers() {
            continue;
        }
        for what in ["silent", "until_firing", "until_resolved"] {
            let call = format!("{what}(\"{}\"", alert.name);
            ensure!(here.contains(&call), "nothing here says {call}");
        }
    }
    Ok(())
}
