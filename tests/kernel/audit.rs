//! Somebody changes behind the agent's back what it has left in the kernel: the audit finds it, names it, withdraws the
//! acknowledgment, puts it right, and acknowledges again; packets say whether that is so.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast::datapath::raw;
use holdfast_ebpf::abi::{self, RouteEntry, ServiceKey, pin};
use holdfast_tests::lab::{DNS, WEB};
use holdfast_tests::tamper::{foreign, key_of_c0, service};
use holdfast_tests::{EVENT_BUDGET, Lab, say, suite, throughout, until};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rustix::process::Signal;

suite! {
    needs [Namespaces, Agent];
    a_tampered_entry_is_named_and_put_right,
    a_deleted_row_lets_nobody_pass_for_long,
    a_link_that_is_gone_is_made_again,
    a_swapped_program_is_replaced_in_its_place,
    a_program_before_ours_is_named_and_left_alone,
    an_identity_that_changes_in_silence_is_found_without_a_packet,
    what_nobody_wants_is_removed,
    selectors_slots_and_backends_are_put_right,
    f02_news_of_a_device_are_lost,
    f01_two_hundred_new_incarnations,
    f09_the_next_life_takes_over_whatever_happened_meanwhile,
    f16_a_quiet_node_is_looked_at_and_not_written_to,
    each_fails_with_its_rule_broken;
    tc [a_tampered_entry_is_named_and_put_right, f02_news_of_a_device_are_lost]
}

/// Time between audits here.
const EVERY: Duration = Duration::from_secs(1);
/// By then an audit has found what differs.
const FOUND: Duration = EVERY.saturating_add(EVENT_BUDGET);
/// How long a proof takes, so that a withdrawn acknowledgment can be seen.
const SLOW: &str = "prove-intent=slow 300ms";

/// The usual scene, with audits every second.
fn audited() -> anyhow::Result<Lab> {
    Lab::programmed_with_chaos(&[("HOLDFAST_AUDIT_INTERVAL", "1s")])
}

fn found(lab: &Lab, kind: &str) -> anyhow::Result<u64> {
    let metrics = lab.node.metrics()?;
    Ok(metrics.count("holdfast_drift_repairs_total", &[("kind", kind)]))
}

/// The policy of c0 and c1 loses its acknowledgment within a turn and has it back after that; this kind is counted, and
/// one line says it.
fn withdrawn_and_back(lab: &Lab, kind: &str, count: u64) -> anyhow::Result<()> {
    let changed = Instant::now();
    until(FOUND, format!("{DNS} is no longer programmed"), || {
        Ok((lab.node.verdict(DNS)? != "Programmed").then_some(()))
    })?;
    let withdrawn = changed.elapsed();
    until(4 * EVENT_BUDGET, format!("{DNS} is programmed again"), || {
        Ok((lab.node.verdict(DNS)? == "Programmed").then_some(()))
    })?;
    say(format_args!(
        "{kind}: withdrawn after {withdrawn:?}, back after {:?}",
        changed.elapsed()
    ));
    ensure!(
        found(lab, kind)? == count,
        "{kind} was found {} times",
        found(lab, kind)?
    );
    let lines = lab.node.log();
    let label = format!("kind=\"{kind}\"");
    let lines = lines.iter().filter(|line| line.contains(&label)).count() as u64;
    ensure!(lines == count, "{kind}: {lines} lines, not {count}");
    ensure!(lab.node.verdict(WEB)? == "Programmed");
    Ok(())
}

fn a_tampered_entry_is_named_and_put_right() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        lab.served(0, 0)?;
        let key = key_of_c0(lab)?;
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let right = services.lookup(&key)?.context("c0 has no entry")?;
        for (round, wrong) in (1..).zip([
            // The other policy's producer does not serve this address: an answer would be a miracle.
            RouteEntry {
                policy: 1 - right.policy,
                ..right
            },
            RouteEntry { flags: 0, ..right },
        ]) {
            lab.node.chaos(SLOW)?;
            services.update(&key, &wrong)?;
            let by = lab.answered(0, 0, Duration::from_millis(50))?;
            ensure!(by.is_none(), "the entry is wrong, and {by:?} answers");
            withdrawn_and_back(lab, "entry", round)?;
            ensure!(services.lookup(&key)? == Some(right), "it is not as it was");
            lab.node.chaos("")?;
            lab.served(0, 0)?;
        }
        services.delete(&key)?;
        withdrawn_and_back_quickly(lab, "entry", 3)?;
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

/// The same where the proof may be so quick that nobody sees the acknowledgment withdrawn: what was found is counted, and
/// what it was withdrawn from is said to be programmed that often.
fn withdrawn_and_back_quickly(lab: &Lab, kind: &str, count: u64) -> anyhow::Result<()> {
    until(FOUND, format!("{kind} is found"), || {
        Ok((found(lab, kind)? == count).then_some(()))
    })?;
    until(4 * EVENT_BUDGET, format!("{DNS} is programmed again"), || {
        let lines = lab.node.log();
        let said = lines
            .iter()
            .filter(|line| line.contains("engine: programmed policy=lab/dns consumer=lab/c0"));
        Ok((said.count() as u64 == count).then_some(()))
    })?;
    lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)
}

fn a_deleted_row_lets_nobody_pass_for_long() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let rows = lab.node.rows()?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let right = rows.lookup(&ifindex)?.context("no row")?;
        lab.node.chaos(SLOW)?;
        rows.delete(&ifindex)?;
        withdrawn_and_back(lab, "row", 1)?;
        let mended = rows.lookup(&ifindex)?.context("no row")?;
        ensure!(mended.token == right.token, "{mended:?}, before {right:?}");
        ensure!(
            mended.epoch > right.epoch,
            "flows of before must be looked up anew"
        );
        lab.served(0, 0)?;
        // A row that is open for nobody's token delivers nothing, and is put right too.
        rows.update(
            &ifindex,
            &abi::ConsumerRow {
                token: mended.token ^ 1,
                ..mended
            },
        )?;
        lab.not_served(0, 0)?;
        withdrawn_and_back_quickly(lab, "row", 2)?;
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

fn a_link_that_is_gone_is_made_again() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let before = lab.node.programs("hfc0")?;
        lab.node.chaos(SLOW)?;
        // This reference is the last one: the link goes with it at once.
        let pin = lab.node.pins()?.link(ifindex);
        let link = raw::obj_get(&pin)?;
        std::fs::remove_file(pin)?;
        drop(link);
        ensure!(lab.node.programs("hfc0")?.is_empty(), "it is attached still");
        withdrawn_and_back(lab, "program", 1)?;
        ensure!(lab.node.programs("hfc0")? == before);
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

fn a_swapped_program_is_replaced_in_its_place() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let before = lab.node.programs("hfc0")?;
        let program = foreign()?;
        let link = raw::obj_get(&lab.node.pins()?.link(ifindex))?;
        let id = raw::link_info(link.as_fd())?.id;
        lab.node.chaos(SLOW)?;
        raw::link_update(link.as_fd(), program.as_fd())?;
        ensure!(lab.node.programs("hfc0")? != before);
        withdrawn_and_back(lab, "program", 1)?;
        ensure!(lab.node.programs("hfc0")? == before, "ours is not in its place");
        ensure!(raw::link_info(link.as_fd())?.id == id, "the link is another");
        lab.served(0, 0)
    })
}

fn a_program_before_ours_is_named_and_left_alone() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let program = foreign()?;
        let id = raw::prog_info(program.as_fd())?.id;
        let link = lab
            .node
            .space()
            .inside(|| Ok(raw::link_create(program.as_fd(), ifindex)?))?;
        ensure!(
            lab.node.programs("hfc0")?.first() == Some(&id),
            "it is not the first"
        );
        lab.node.until_verdict(DNS, "Failed(ProofFailed)", FOUND)?;
        ensure!(lab.node.verdict(WEB)? == "Programmed");
        let report = lab.node.report()?.context("no report")?;
        let message = report
            .policy(DNS)
            .and_then(|line| line.message.clone())
            .unwrap_or_default();
        ensure!(message.contains(&format!("program {id}")), "not named: {message}");
        throughout(3 * EVERY, "counted and said once", || {
            Ok(found(lab, "foreign")? == 1)
        })?;
        let named = format!("program {id}");
        let lines = lab.node.log();
        let said = lines
            .iter()
            .filter(|line| line.contains("kind=\"foreign\"") && line.contains(&named));
        ensure!(said.count() == 1, "{lines:#?}");
        ensure!(
            lab.node.programs("hfc0")?.first() == Some(&id),
            "somebody else's program was touched"
        );
        drop(link);
        lab.node.until_verdict(DNS, "Programmed", FOUND)?;
        lab.served(0, 0)
    })
}

fn an_identity_that_changes_in_silence_is_found_without_a_packet() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let rows = lab.node.rows()?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let before = rows.lookup(&ifindex)?.context("no row")?.token;
        // An audit may have come between the row and the poke of an ordinary registration, when the scene was set up.
        let found_before = found(lab, "identity")?;
        lab.consumers[0].register_silently(&lab.node)?;
        let now = lab.node.last_registered("hfc0")?.token;
        until(FOUND, "the row is for the new identity", || {
            let token = rows.lookup(&ifindex)?.context("no row")?.token;
            Ok((format!("{token:016x}") == now).then_some(()))
        })?;
        ensure!(format!("{before:016x}") != now);
        ensure!(found(lab, "identity")? == found_before + 1);
        lab.served_at_once(0, 0)?;
        lab.node.unregister_silently("hfc0")?;
        lab.node.until_verdict(DNS, "Held(IdentityMissing)", FOUND)?;
        lab.not_served(0, 0)
    })
}

fn what_nobody_wants_is_removed() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let rows = lab.node.rows()?;
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let row = rows.lookup(&ifindex)?.context("no row")?;
        let (rows_before, services_before) = (rows.dump()?.len(), services.dump()?.len());
        // Of a device that has no attachment, and of one that never was.
        let bystander = lab.node.rtnl.ifindex("hfb0")?;
        for stray in [bystander, 70_000] {
            rows.update(
                &stray,
                &abi::ConsumerRow {
                    ifindex: stray,
                    ..row
                },
            )?;
            let key = service(stray, IpAddr::from([10, 96, 0, 99]), 53);
            let entry = RouteEntry {
                policy: 0,
                flags: RouteEntry::OPEN,
                check: key.check(),
                pad: 0,
            };
            services.update(&key, &entry)?;
        }
        // And a mark of an address that no policy names.
        let mark = ServiceKey::claim(
            ifindex,
            abi::FAMILY_V4,
            service(0, IpAddr::from([10, 96, 0, 98]), 0).address,
        );
        services.update(&mark, &RouteEntry::claim(&mark))?;
        until(FOUND, "all of it is gone", || {
            let gone = rows.dump()?.len() == rows_before && services.dump()?.len() == services_before;
            Ok(gone.then_some(()))
        })?;
        ensure!(found(lab, "row")? == 2 && found(lab, "entry")? == 3);
        ensure!(
            lab.node.verdict(DNS)? == "Programmed",
            "nobody's affair but the strays'"
        );
        lab.served(0, 0)
    })
}

fn selectors_slots_and_backends_are_put_right() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let policies = lab.node.map::<u32, abi::PolicySlot>(pin::POLICIES)?;
        let slots = lab.node.map::<u32, u32>(pin::SLOTS)?;
        let backends = lab.node.map::<u32, abi::Backend>(pin::BACKENDS)?;
        let policy = services.lookup(&key_of_c0(lab)?)?.context("no entry")?.policy;
        let right = policies.lookup(&policy)?.context("no slot")?;
        let selector = abi::Selector::unpack(right.selector);
        let backend = slots.lookup(&selector.base)?.context("no slot")?;
        let producer = backends.lookup(&backend)?.context("no backend")?;

        lab.node.chaos(SLOW)?;
        let nobody = abi::Selector {
            length: 0,
            ..selector
        };
        policies.update(
            &policy,
            &abi::PolicySlot {
                selector: nobody.pack(),
                ..right
            },
        )?;
        withdrawn_and_back(lab, "policy", 1)?;
        ensure!(policies.lookup(&policy)? == Some(right));
        slots.update(&selector.base, &0)?;
        withdrawn_and_back(lab, "slot", 1)?;
        ensure!(slots.lookup(&selector.base)? == Some(backend));
        let other = lab.node.rtnl.ifindex("hfp1")?;
        backends.update(
            &backend,
            &abi::Backend {
                target: abi::Target {
                    ifindex: other,
                    ..abi::Target::unpack(producer.target)
                }
                .pack(),
                ..producer
            },
        )?;
        withdrawn_and_back(lab, "backend", 1)?;
        ensure!(backends.lookup(&backend)? == Some(producer));
        lab.node.chaos("")?;
        lab.served(0, 0)
    })
}

// --- F02 ---------------------------------------------------------------------------------------------------

fn f02_news_of_a_device_are_lost() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        lab.served(0, 0)?;
        let dead = lab.node.rtnl.ifindex("hfc0")?;
        let pin = lab.node.pins()?.link(dead);
        let pinned = pin.exists();
        lab.node.chaos("deaf-links")?;
        // It is in force from the next look on.
        throughout(2 * EVERY, "programmed", || {
            Ok(lab.node.verdict(DNS)? == "Programmed")
        })?;
        ensure!(found(lab, "device")? == 0);
        lab.consumers[0].delete(&mut lab.node)?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register_silently(&lab.node)?;
        let begun = Instant::now();
        until(2 * FOUND, "the new device is attached and served", || {
            let served = lab.answered(0, 0, Duration::from_millis(20))? == Some(lab.serving[0].id());
            Ok(served.then_some(()))
        })?;
        say(format_args!(
            "served {:?} after the new device was registered",
            begun.elapsed()
        ));
        ensure!(found(lab, "device")? >= 2, "one device is gone, another has come");
        until(EVENT_BUDGET, "the dead device's link is gone", || {
            Ok((!pin.exists()).then_some(()))
        })?;
        let now = lab.node.rtnl.ifindex("hfc0")?;
        ensure!(now != dead && lab.node.programs("hfc0")?.len() == 1);
        ensure!(lab.node.pins()?.link(now).exists() == pinned);
        ensure!(
            lab.node.rows()?.lookup(&dead)?.is_none(),
            "a row of the dead device is left"
        );
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
        lab.node.chaos("")?;
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

// --- F01 ---------------------------------------------------------------------------------------------------

/// New incarnations of one interface, one after the other.
const INCARNATIONS: u32 = 200;

fn f01_two_hundred_new_incarnations() -> anyhow::Result<()> {
    let seed = 1;
    say(format_args!("seed {seed}, {INCARNATIONS} incarnations"));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    audited()?.run(|lab| {
        let mut policy = lab.policy(DNS);
        let rows = lab.node.rows()?;
        let (mut generation, mut slowest) = (1, Duration::ZERO);
        for round in 0..INCARNATIONS {
            let earlier = lab.node.last_registered("hfc0")?;
            // When the CNI unregisters the old one: before the delete, between, before or after the new one's.
            let moment = random.next_u32() % 4;
            let pause = Duration::from_millis(u64::from(random.next_u32() % 51));
            let bumped = random.next_u32() % 3;
            let mut at = |lab: &mut Lab, step: u32| -> anyhow::Result<()> {
                if step == moment {
                    lab.node.forget(&earlier)?;
                }
                if step == bumped {
                    policy.pass_while_held = !policy.pass_while_held;
                    generation += 1;
                    lab.node.put_policy(&policy)?;
                }
                Ok(())
            };
            at(lab, 0)?;
            lab.consumers[0].delete(&mut lab.node)?;
            at(lab, 1)?;
            // What happens in those milliseconds is up to the agent.
            throughout(pause, "time passes", || Ok(true))?;
            lab.consumers[0].create(&mut lab.node)?;
            at(lab, 2)?;
            lab.consumers[0].register_silently(&lab.node)?;
            let registered = Instant::now();
            lab.node.poke("hfc0")?;
            at(lab, 3)?;
            let expected = lab.serving[0].id();
            until(EVENT_BUDGET, format!("round {round}: served"), || {
                let by = lab.answered(0, 0, Duration::from_millis(10))?;
                ensure!(
                    by.is_none_or(|by| by == expected),
                    "round {round}: answered by {by:?}"
                );
                Ok(by.map(drop))
            })?;
            until(
                EVENT_BUDGET,
                format!("round {round}: programmed at {generation}"),
                || {
                    let report = lab.node.report()?;
                    let line = report.as_ref().and_then(|report| report.policy(DNS));
                    Ok(line
                        .is_some_and(|line| line.verdict() == "Programmed" && line.generation == generation)
                        .then_some(()))
                },
            )?;
            slowest = slowest.max(registered.elapsed());
            let ifindex = lab.node.rtnl.ifindex("hfc0")?;
            let token = lab.node.last_registered("hfc0")?.token;
            let row = rows.lookup(&ifindex)?.context("no row")?;
            ensure!(
                format!("{:016x}", row.token) == token,
                "round {round}: open for another"
            );
            if ifindex != earlier.ifindex {
                let old = rows.lookup(&earlier.ifindex)?;
                ensure!(
                    old.is_none_or(|old| old.token == 0),
                    "round {round}: {old:?} of the dead device"
                );
            }
            ensure!(
                lab.node.programs("hfc0")?.len() == 1,
                "round {round}: one program"
            );
        }
        say(format_args!("registered to programmed at most {slowest:?}"));
        if policy.pass_while_held {
            lab.node.put_policy(&lab.policy(DNS))?;
            generation += 1;
            until(EVENT_BUDGET, "the policy drops again what is held", || {
                let report = lab.node.report()?;
                let line = report.as_ref().and_then(|report| report.policy(DNS));
                Ok(line
                    .is_some_and(|line| line.generation == generation)
                    .then_some(()))
            })?;
        }
        lab.served(0, 0)?;
        lab.served(1, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

// --- F09 ---------------------------------------------------------------------------------------------------

fn f09_the_next_life_takes_over_whatever_happened_meanwhile() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        lab.node.end_agent(Signal::KILL)?;
        // While nobody looks: one interface is made anew, an entry is changed, another one's program is gone.
        lab.consumers[0].delete(&mut lab.node)?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register_silently(&lab.node)?;
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let c1 = lab.node.rtnl.ifindex("hfc1")?;
        let key = service(c1, lab.services[0].addresses[0], lab.services[0].port);
        services.delete(&key)?;
        let c2 = lab.node.rtnl.ifindex("hfc2")?;
        std::fs::remove_file(lab.node.pins()?.link(c2))?;
        // And the identity of one cannot be read at first.
        lab.node.chaos("registry@hfc1=EIO for 2s")?;
        launch_unready(lab)?;
        // Not by the report, which may still be the earlier life's.
        lab.until_intents("programmed", 4, 10 * EVENT_BUDGET)?;
        for (consumer, service) in [(0, 0), (1, 0), (1, 1), (2, 1)] {
            lab.served(consumer, service)?;
        }
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

fn launch_unready(lab: &mut Lab) -> anyhow::Result<()> {
    lab.node.launch_agent(&[("HOLDFAST_AUDIT_INTERVAL", "1s")])?;
    until(5 * EVENT_BUDGET, "the agent listens", || {
        Ok(lab.node.get("/livez").ok().map(drop))
    })
}

// --- F16 ---------------------------------------------------------------------------------------------------

/// Writes to maps that every agent has made.
fn writes(lab: &Lab) -> anyhow::Result<u64> {
    Ok(lab.node.metrics()?.count("holdfast_map_writes_total", &[]))
}

fn f16_a_quiet_node_is_looked_at_and_not_written_to() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        // Times of intents are saved, and the first audits are over.
        throughout(3 * EVERY, "programmed", || {
            Ok(lab.node.verdict(DNS)? == "Programmed")
        })?;
        let passes = |lab: &Lab| -> anyhow::Result<u64> {
            Ok(lab
                .node
                .metrics()?
                .count("holdfast_engine_pass_duration_seconds_count", &[]))
        };
        let report = std::fs::metadata(lab.node.report_path()?)?.modified()?;
        let (before, written, begun) = (passes(lab)?, writes(lab)?, Instant::now());
        throughout(QUIET, "quiet", || Ok(lab.node.verdict(DNS)? == "Programmed"))?;
        let turns = begun.elapsed().as_secs() + 1;
        let after = passes(lab)?;
        say(format_args!("{} passes in {turns} turns", after - before));
        // Of each turn: it is due, it is answered, and a proof is. Two scrapes are ours.
        ensure!(
            after - before <= 3 * turns + 4,
            "{} passes in {turns} turns",
            after - before
        );
        ensure!(writes(lab)? == written, "a quiet node is written to");
        ensure!(
            std::fs::metadata(lab.node.report_path()?)?.modified()? == report,
            "the report was written"
        );
        let status = lab.node.cli::<&str>("status", &[])?;
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        ensure!(
            status.contains("audit ") && status.contains("0 not as it was left"),
            "{status}"
        );
        lab.served(0, 0)?;
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

/// How long nothing happens.
const QUIET: Duration = Duration::from_secs(10);

// --- and the proof that they test something ----------------------------------------------------------------

/// Each test, and the rule of the agent that must be broken for it to fail.
const GUARDED: [(&str, &str); 6] = [
    ("a_tampered_entry_is_named_and_put_right", "blind-audit"),
    ("a_deleted_row_lets_nobody_pass_for_long", "blind-audit"),
    ("a_swapped_program_is_replaced_in_its_place", "blind-audit"),
    (
        "an_identity_that_changes_in_silence_is_found_without_a_packet",
        "blind-audit",
    ),
    ("f02_news_of_a_device_are_lost", "blind-audit"),
    ("f01_two_hundred_new_incarnations", "keep-rows"),
];

fn each_fails_with_its_rule_broken() -> anyhow::Result<()> {
    suite::each_fails(&GUARDED)
}
