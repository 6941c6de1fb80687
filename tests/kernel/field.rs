//! Failures that systems of this kind really had. Each test carries the id of its case in `cases.toml`, where the
//! figures that are scaled here are named.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::ensure;
use holdfast::datapath::{AttachMode, filter, raw};
use holdfast_tests::lab::{DNS, WEB};
use holdfast_tests::objects::Policy;
use holdfast_tests::tc::{self, Place};
use holdfast_tests::told::Sampler;
use holdfast_tests::traffic::{Flow, ask};
use holdfast_tests::{EVENT_BUDGET, Lab, Workload, say, suite, throughout, until};
use rustix::process::Signal;

suite! {
    needs [Namespaces, Agent];
    f03_one_write_fails_and_one_interface_is_missing,
    f03_a_failed_cleanup_stops_no_other,
    f04_down_when_the_policy_comes,
    f04_gone_while_it_is_attached,
    f06_rechecks_find_what_nobody_tells,
    f06_a_silent_identity_is_found_at_its_first_packet,
    f08_attaching_fails_for_a_while,
    f10_traffic_survives_sigterm,
    f10_traffic_survives_sigkill,
    f10_traffic_survives_a_panic,
    f19_a_late_delete_of_the_earlier_incarnation_touches_nothing,
    f36_services_that_do_not_fit_fail_as_a_whole,
    f36_prefixes_that_do_not_fit_fail_as_a_whole,
    f53_an_old_token_never_serves_a_new_device_of_its_number,
    f53_nor_one_of_its_name,
    f54_a_failed_read_closes_nothing,
    f54_all_reads_fail_at_start,
    f25_uninstalled_beside_others,
    f41_a_foreign_program_is_put_before_ours,
    each_fails_with_its_rule_broken;
    tc [
        f04_gone_while_it_is_attached,
        f08_attaching_fails_for_a_while,
        f10_traffic_survives_sigterm,
        f10_traffic_survives_sigkill,
        f10_traffic_survives_a_panic,
        f19_a_late_delete_of_the_earlier_incarnation_touches_nothing,
        f25_our_filter_is_deleted_by_hand,
        f25_uninstalled_beside_others,
        f41_a_foreign_program_is_put_before_ours,
        f53_an_old_token_never_serves_a_new_device_of_its_number,
        f53_nor_one_of_its_name,
    ]
}

/// Packets a second of a flow that must not suffer.
const RATE: u64 = 5_500;

// --- F03 ---------------------------------------------------------------------------------------------------

const MANY: &str = "many";
const MEMBERS: u8 = 50;

/// Fifty consumers of one policy, of which the last one's interface is missing.
fn many() -> Vec<Workload> {
    let member = |n: u8| Workload::new(&format!("m{n:02}"), 50 + n, &[(MANY, "yes")], &[]);
    (0..MEMBERS).map(member).collect()
}

/// Everything is there and attached, all of [`many`] but the last, and no policy yet.
fn ready_for_many(lab: &mut Lab, members: &mut [Workload]) -> anyhow::Result<()> {
    for workload in lab.consumers.iter().chain(&lab.producers).chain(&*members) {
        lab.node.put_attachment(&workload.attachment())?;
    }
    lab.create_workloads()?;
    if let Some((_missing, there)) = members.split_last_mut() {
        for member in there {
            member.create(&mut lab.node)?;
        }
    }
    lab.node.start_agent()?;
    lab.register_all()?;
    if let Some((_missing, there)) = members.split_last() {
        for member in there {
            member.register(&lab.node)?;
        }
    }
    Ok(())
}

fn policy_of_many(lab: &Lab) -> Policy {
    Policy {
        name: MANY.to_owned(),
        consumers: (MANY.to_owned(), "yes".to_owned()),
        ..lab.policy(DNS)
    }
}

fn f03_one_write_fails_and_one_interface_is_missing() -> anyhow::Result<()> {
    let mut members = many();
    Lab::new()?.run(|lab| {
        lab.node.chaos("entries@hfm17=EINVAL")?;
        ready_for_many(lab, &mut members)?;
        lab.node.put_policy(&policy_of_many(lab))?;
        lab.node.put_policy(&lab.policy(WEB))?;
        // The other policy is behind it, and does not wait for it.
        lab.node.until_verdict(WEB, "Programmed", EVENT_BUDGET)?;
        let counts = |lab: &Lab| -> anyhow::Result<Option<_>> {
            let report = lab.node.report()?;
            let line = report.as_ref().and_then(|report| report.policy(MANY));
            let counts = line.map(|line| line.intents);
            Ok(counts.map(|counts| (counts.programmed, counts.held, counts.failed, counts.pending)))
        };
        until(
            EVENT_BUDGET,
            "48 programmed, 1 held, 1 failed, in one report",
            || Ok((counts(lab)? == Some((48, 1, 1, 0))).then_some(())),
        )?;
        let metrics = lab.node.metrics()?;
        ensure!(metrics.held("InterfaceMissing") == 1);
        ensure!(metrics.count("holdfast_failed_intents", &[("reason", "MapWriteFailed")]) == 1);
        let service = lab.services[0].v4();
        for n in [0, 16, 18, 48] {
            let by = ask(members[n].space()?, service, EVENT_BUDGET)?;
            ensure!(by == Some(1), "m{n:02} is answered by {by:?}");
        }
        let by = ask(members[17].space()?, service, Duration::from_millis(100))?;
        ensure!(by.is_none(), "m17 has failed and is served");

        lab.node.chaos("")?;
        until(
            4 * EVENT_BUDGET,
            "the failed one recovers by its own retries",
            // Not to have failed any more is not to be served yet.
            || Ok((counts(lab)? == Some((49, 1, 0, 0))).then_some(())),
        )?;
        ensure!(ask(members[17].space()?, service, EVENT_BUDGET)? == Some(1));
        lab.node.rtnl.delete("hfm17")?;
        until(EVENT_BUDGET, "and is held again", || {
            Ok((lab.node.metrics()?.held("InterfaceMissing") == 2).then_some(()))
        })
    })
}

fn f03_a_failed_cleanup_stops_no_other() -> anyhow::Result<()> {
    let mut members = many();
    Lab::new()?.run(|lab| {
        lab.node.chaos("")?;
        ready_for_many(lab, &mut members)?;
        let entries = |lab: &Lab| -> anyhow::Result<u64> {
            Ok(lab
                .node
                .metrics()?
                .count("holdfast_map_entries", &[("map", "services")]))
        };
        let before = entries(lab)?;
        lab.node.put_policy(&policy_of_many(lab))?;
        until(EVENT_BUDGET, "49 programmed", || {
            Ok((lab.node.metrics()?.intents("programmed") == 49).then_some(()))
        })?;
        // Of each consumer.
        let entries_of_one = (entries(lab)? - before) / u64::from(MEMBERS - 1);
        lab.node.chaos("delete-entries@hfm03=EIO; clear@hfm03=EIO")?;
        lab.node.remove_file("policy-many.yaml")?;
        until(EVENT_BUDGET, "all entries are gone but those of one", || {
            Ok((entries(lab)? == before + entries_of_one).then_some(()))
        })?;
        throughout(EVENT_BUDGET, "it is not forgotten", || {
            Ok(lab.node.metrics()?.intents("removing") > 0)
        })?;
        let by = ask(
            members[3].space()?,
            lab.services[0].v4(),
            Duration::from_millis(100),
        )?;
        ensure!(by.is_none(), "its policy is gone, and it is served");
        lab.node.chaos("")?;
        until(8 * EVENT_BUDGET, "the last ones are gone", || {
            Ok((entries(lab)? == before && lab.node.metrics()?.intents("removing") == 0).then_some(()))
        })
    })
}

// --- F04 ---------------------------------------------------------------------------------------------------

fn f04_down_when_the_policy_comes() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        lab.node.rtnl.down("hfc0")?;
        lab.node.start_agent()?;
        lab.register_all()?;
        lab.put_objects()?;
        lab.node.until_verdict(DNS, "Held(InterfaceDown)", EVENT_BUDGET)?;
        lab.node.until_verdict(WEB, "Programmed", EVENT_BUDGET)?;
        // The neighbour in the same policy.
        lab.served(1, 0)?;
        lab.consumers[0].up(&mut lab.node)?;
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
        lab.served(0, 0)?;
        lab.node.rtnl.down("hfc0")?;
        lab.node.until_verdict(DNS, "Held(InterfaceDown)", EVENT_BUDGET)
    })
}

fn f04_gone_while_it_is_attached() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        // Between the look at the device and the attach something happens: the device goes.
        lab.node.chaos("attach@hfc0=slow 500ms")?;
        lab.node.start_agent()?;
        lab.put_objects()?;
        until(EVENT_BUDGET, "the agent knows c0", || {
            Ok((lab.node.metrics()?.intents("held") > 0).then_some(()))
        })?;
        lab.consumers[0].delete(&mut lab.node)?;
        lab.consumers[1].register(&lab.node)?;
        lab.consumers[2].register(&lab.node)?;
        lab.producers[0].register(&lab.node)?;
        lab.producers[1].register(&lab.node)?;
        lab.node
            .until_verdict(DNS, "Held(InterfaceMissing)", 2 * EVENT_BUDGET)?;
        lab.node.until_verdict(WEB, "Programmed", 2 * EVENT_BUDGET)?;
        lab.served(1, 0)?;
        lab.node.chaos("")?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register(&lab.node)?;
        lab.served_at_once(0, 0)?;
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)
    })
}

// --- F06 ---------------------------------------------------------------------------------------------------

fn f06_rechecks_find_what_nobody_tells() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.put_objects()?;
        for workload in lab.consumers.iter_mut().skip(1).chain(&mut lab.producers) {
            workload.create(&mut lab.node)?;
        }
        lab.serve()?;
        lab.node.start_agent()?;
        for workload in lab.consumers.iter().skip(1).chain(&lab.producers) {
            workload.register(&lab.node)?;
        }
        lab.node
            .until_verdict(DNS, "Held(InterfaceMissing)", EVENT_BUDGET)?;
        // Missing for a while: rechecks after 1, 2, 4 s.
        throughout(Duration::from_secs(5), "held", || {
            Ok(lab.node.verdict(DNS)? == "Held(InterfaceMissing)")
        })?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        // The identity comes, and nobody is told. The hold has entered IdentityMissing: the next look is after 1 s.
        let silent = Instant::now();
        lab.consumers[0].register_silently(&lab.node)?;
        lab.node.until_verdict(DNS, "Programmed", 2 * EVENT_BUDGET)?;
        say(format_args!(
            "a silent identity was found after {:?}",
            silent.elapsed()
        ));
        lab.served(0, 0)?;

        // Held again for longer, so that the looks are rarer; then again, and the schedule starts anew.
        for held in [5, 0] {
            let pins = lab.node.rows()?;
            let ifindex = lab.node.rtnl.ifindex("hfc0")?;
            lab.node.unregister_silently("hfc0")?;
            lab.node.poke("hfc0")?;
            lab.node
                .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
            ensure!(
                pins.lookup(&ifindex)?.is_some_and(|row| row.token == 0),
                "the row is open"
            );
            throughout(Duration::from_secs(held), "held", || {
                Ok(lab.node.verdict(DNS)? == "Held(IdentityMissing)")
            })?;
            let silent = Instant::now();
            lab.consumers[0].register_silently(&lab.node)?;
            // After 5 s the look at 7 s is the next.
            let budget = if held == 0 {
                2 * EVENT_BUDGET
            } else {
                4 * EVENT_BUDGET
            };
            lab.node.until_verdict(DNS, "Programmed", budget)?;
            say(format_args!(
                "after {held} s of hold it was found after {:?}",
                silent.elapsed()
            ));
            lab.served(0, 0)?;
        }
        Ok(())
    })
}

/// Time between two wakes by one interface.
const WAKES_APART: Duration = Duration::from_secs(1);

fn f06_a_silent_identity_is_found_at_its_first_packet() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        // Long enough that the next look is 4 s away.
        throughout(Duration::from_millis(3_200), "held", || {
            Ok(lab.node.verdict(DNS)? == "Held(IdentityMissing)")
        })?;
        lab.consumers[0].register_silently(&lab.node)?;
        let first = Instant::now();
        until(EVENT_BUDGET, "a packet wakes the agent", || {
            lab.answered(0, 0, Duration::from_millis(10))
        })?;
        say(format_args!(
            "answered {:?} after the first packet",
            first.elapsed()
        ));
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
        // The same for an identity that changes: the row is for the old one, so the new one is held until it is looked at.
        // An interface wakes the agent at most once a second, and it has just done so.
        lab.consumers[0].register_silently(&lab.node)?;
        until(
            WAKES_APART + EVENT_BUDGET,
            "a packet wakes the agent again",
            || lab.answered(0, 0, Duration::from_millis(10)),
        )?;
        lab.node.unregister_silently("hfc0")?;
        lab.not_served(0, 0)
    })
}

// --- F08 ---------------------------------------------------------------------------------------------------

fn f08_attaching_fails_for_a_while() -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        lab.create_workloads()?;
        lab.put_objects()?;
        // Attempts come at 0, 1, 3 s.
        lab.node.chaos("attach@hfc0=EPERM:2")?;
        let sampler = Sampler::start(lab.node.space(), lab.node.report_path()?);
        let begun = Instant::now();
        lab.node.launch_agent(&[])?;
        lab.node.until_ready()?;
        for workload in lab.consumers.iter().skip(1).chain(&lab.producers) {
            workload.register(&lab.node)?;
        }
        // Its registration is not taken in as long as its program is not attached.
        lab.consumers[0].register_silently(&lab.node)?;
        lab.node.poke("hfc0")?;
        lab.node
            .until_verdict(DNS, "Failed(AttachFailed)", EVENT_BUDGET)?;
        lab.served(1, 0)?;
        ensure!(
            lab.node.programs("hfc0")?.is_empty(),
            "attached, although it fails"
        );
        let failed = Instant::now();
        lab.node.until_verdict(DNS, "Programmed", 5 * EVENT_BUDGET)?;
        say(format_args!(
            "recovered {:?} after it was said to have failed",
            failed.elapsed()
        ));
        ensure!(
            lab.node.programs("hfc0")?.len() == 1,
            "programmed without a program"
        );
        lab.served(0, 0)?;
        let early = sampler.since(begun).into_iter().find(|sample| {
            let line = sample.report.as_ref().and_then(|report| report.policy(DNS));
            sample.at < failed && line.is_some_and(|line| line.state == "Programmed")
        });
        ensure!(
            early.is_none(),
            "acked as programmed before it was attached: {early:?}"
        );
        sampler.finish()?;

        lab.consumers[0].delete(&mut lab.node)?;
        lab.node
            .until_verdict(DNS, "Held(InterfaceMissing)", EVENT_BUDGET)?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register(&lab.node)?;
        lab.served_at_once(0, 0)?;
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)
    })
}

// --- F10 ---------------------------------------------------------------------------------------------------

/// How long the agent is away.
const AWAY: Duration = Duration::from_secs(3);

fn f10_traffic_survives_sigterm() -> anyhow::Result<()> {
    f10(|lab| lab.node.end_agent(Signal::TERM))
}

fn f10_traffic_survives_sigkill() -> anyhow::Result<()> {
    f10(|lab| lab.node.end_agent(Signal::KILL))
}

fn f10_traffic_survives_a_panic() -> anyhow::Result<()> {
    f10(|lab| {
        // The next row that is written is written by a thread that panics: c2's, which nobody asks for.
        lab.node.chaos("row@hfc2=panic")?;
        lab.node.unregister_silently("hfc2")?;
        lab.node.poke("hfc2")?;
        let status = lab.node.until_ended()?;
        ensure!(!status.success(), "a panic, and it ends with success");
        lab.node.forgive_errors();
        lab.node.chaos("")?;
        lab.consumers[2].register_silently(&lab.node)
    })
}

/// Links and maps; programs are pinned once more under each life's own. Filters, in which nothing may change at all.
fn pinned(lab: &mut Lab) -> anyhow::Result<(BTreeMap<String, u32>, Vec<tc::Filter>)> {
    let mut pinned = lab.node.pinned()?;
    pinned.retain(|name, _| !name.contains("classifier"));
    let mut filters = Vec::new();
    for device in ["hfc0", "hfc1", "hfc2", "hfp0", "hfp1"] {
        filters.extend(lab.node.rtnl.filters(device, tc::INGRESS)?);
    }
    let links = pinned.keys().filter(|name| name.contains("links/")).count();
    let by_tc = lab.node.way.attach == AttachMode::Tc;
    ensure!(
        if by_tc {
            (links, filters.len()) == (0, 5)
        } else {
            links == 5 && filters.is_empty()
        },
        "{links} links are pinned, {filters:?}"
    );
    Ok((pinned, filters))
}

fn f10(end: impl Fn(&mut Lab) -> anyhow::Result<()>) -> anyhow::Result<()> {
    Lab::programmed_with_chaos(&[])?.run(|lab| {
        let before = pinned(lab)?;
        let flows = [
            lab.flow(0, 0, RATE)?,
            lab.flow(1, 1, 500)?,
            Flow::start(lab.consumers[1].space()?, lab.services[0].v6(), 500, 1)?,
        ];
        flows[0].flows(RATE / 2, 2 * EVENT_BUDGET)?;
        end(lab)?;
        let away = Instant::now();
        flows[0].flows(RATE * AWAY.as_secs(), 2 * AWAY)?;
        say(format_args!("away for {:?}", away.elapsed()));
        ensure!(pinned(lab)? == before, "pins changed while the agent was away");
        lab.node.start_agent()?;
        lab.until_programmed()?;
        flows[0].flows(RATE, 2 * EVENT_BUDGET)?;
        ensure!(
            pinned(lab)? == before,
            "other pins after than before: {before:?}, {:?}",
            pinned(lab)?
        );
        for (flow, service) in flows.into_iter().zip([0, 1, 0]) {
            let tally = flow.finish(lab.serving.get(service))?;
            say(&tally);
            tally.perfect()?;
        }
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.not_served(0, 0)
    })
}

// --- F19 ---------------------------------------------------------------------------------------------------

fn f19_a_late_delete_of_the_earlier_incarnation_touches_nothing() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        let flow = lab.flow(1, 0, RATE)?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        // The next incarnation gets another number, and then the same one again.
        for next in [0, ifindex] {
            let earlier = lab.node.last_registered("hfc0")?;
            lab.consumers[0].delete(&mut lab.node)?;
            lab.consumers[0].create_as(&mut lab.node, next)?;
            lab.consumers[0].up(&mut lab.node)?;
            lab.consumers[0].register(&lab.node)?;
            lab.served_at_once(0, 0)?;
            // The delete comes late, and twice; where the number is the same it says that another one is there.
            let code = i32::from(lab.node.rtnl.ifindex("hfc0")? == earlier.ifindex);
            for _ in 0..2 {
                lab.node.unregister_incarnation(&earlier, code)?;
                lab.served_at_once(0, 0)?;
            }
            ensure!(lab.node.programs("hfc0")?.len() == 1, "one program");
            lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
        }
        let tally = flow.finish(lab.serving.first())?;
        tally.perfect()?;
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.not_served(0, 0)
    })
}

// --- F25 ---------------------------------------------------------------------------------------------------

/// Somebody else's filters, at both hooks of c0: of a later priority than ours, and at the other hook.
fn others_filters(lab: &mut Lab) -> anyhow::Result<()> {
    let (program, _) = tc::program(tc::NEXT)?;
    if lab.node.rtnl.qdisc_of("hfc0")?.is_none() {
        lab.node.rtnl.qdisc("hfc0", "clsact")?;
    }
    for parent in [tc::INGRESS, tc::EGRESS] {
        let place = Place {
            parent,
            ..Place::ingress(7, 1)
        };
        lab.node.rtnl.filter("hfc0", place, "others", program.as_fd())?;
    }
    Ok(())
}

fn filters_of_others(lab: &mut Lab) -> anyhow::Result<Vec<tc::Filter>> {
    let mut filters = lab.node.rtnl.filters("hfc0", tc::INGRESS)?;
    filters.extend(lab.node.rtnl.filters("hfc0", tc::EGRESS)?);
    filters.retain(|filter| filter.name == "others");
    ensure!(filters.len() == 2, "{filters:?}");
    Ok(filters)
}

fn f25_our_filter_is_deleted_by_hand() -> anyhow::Result<()> {
    Lab::programmed_with_chaos(&[])?.run(|lab| {
        let ours = Place::ingress(filter::PRIORITY, filter::HANDLE);
        for whole_qdisc in [true, false] {
            lab.served(0, 0)?;
            // So slow that what is said meanwhile can be read.
            lab.node.chaos("attach@hfc0=slow 700ms")?;
            if whole_qdisc {
                lab.node.rtnl.delete_qdisc("hfc0")?;
            } else {
                lab.node.rtnl.delete_filter("hfc0", ours)?;
            }
            let deleted = Instant::now();
            until(EVENT_BUDGET, "the ack is withdrawn", || {
                Ok((lab.node.verdict(DNS)? != "Programmed").then_some(()))
            })?;
            say(format_args!("withdrawn after {:?}", deleted.elapsed()));
            ensure!(lab.node.verdict(WEB)? == "Programmed");
            lab.node.until_verdict(DNS, "Programmed", 2 * EVENT_BUDGET)?;
            ensure!(lab.node.programs("hfc0")?.len() == 1);
            lab.served(0, 0)?;
        }
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.not_served(0, 0)
    })
}

fn f25_uninstalled_beside_others() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        others_filters(lab)?;
        let others = filters_of_others(lab)?;
        lab.served(0, 0)?;
        let uninstall = |lab: &Lab, arguments: &[&str], code| -> anyhow::Result<String> {
            let output = lab.node.cli("uninstall", arguments)?;
            let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.code() == Some(code), "{}: {said}", output.status);
            Ok(said.into_owned())
        };
        let said = uninstall(lab, &["--yes"], 1)?;
        ensure!(said.contains("another holdfast agent uses"), "{said}");
        lab.served(0, 0)?;
        lab.node.end_agent(Signal::TERM)?;
        // Nobody answers: nothing happens.
        uninstall(lab, &[], 1)?;
        lab.served(0, 0)?;

        let said = uninstall(lab, &["--yes"], 0)?;
        let counted = if lab.node.way.attach == AttachMode::Tc {
            "0 links, 5 filters"
        } else {
            "5 links, 0 filters"
        };
        ensure!(said.contains(counted), "{said}");
        ensure!(
            lab.node.pinned().is_err(),
            "pins are left: {:?}",
            lab.node.pinned()?
        );
        ensure!(filters_of_others(lab)? == others);
        ensure!(lab.node.programs("hfc0")?.len() == 1, "ours is still there");
        for device in ["hfc1", "hfc2", "hfp0", "hfp1"] {
            ensure!(lab.node.programs(device)?.is_empty() && lab.node.rtnl.qdisc_of(device)?.is_none());
        }
        let by = lab.answered(0, 0, EVENT_BUDGET / 10)?;
        ensure!(by.is_none(), "still steered: answered by {by:?}");
        let said = uninstall(lab, &["--yes"], 0)?;
        ensure!(said.contains("nothing of holdfast is here"), "{said}");

        // And it can be there again.
        lab.node.start_agent()?;
        lab.register_all()?;
        lab.until_programmed()?;
        lab.served(0, 0)?;
        ensure!(filters_of_others(lab)? == others);
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.not_served(0, 0)
    })
}

// --- F36 ---------------------------------------------------------------------------------------------------

/// Maps of 64 entries, policies that fill most of one, and one that does not fit any more. Each has two consumers.
fn a_full_map(map: &str, first: &Policy, big: &Policy, need: u32, have: u32) -> anyhow::Result<()> {
    Lab::new()?.run(|lab| {
        let sizes = [("HOLDFAST_MAP_SERVICES", "64"), ("HOLDFAST_MAP_PREFIXES", "64")];
        lab.program(&sizes)?;
        lab.node.put_policy(first)?;
        lab.node.until_verdict(&first.name, "Programmed", EVENT_BUDGET)?;
        let entries =
            |lab: &Lab| anyhow::Ok(lab.node.metrics()?.count("holdfast_map_entries", &[("map", map)]));
        let before = entries(lab)?;
        let flow = lab.flow(0, 0, RATE)?;

        lab.node.put_policy(big)?;
        lab.node
            .until_verdict(&big.name, "Failed(MapFull)", EVENT_BUDGET)?;
        let report = lab.node.report()?;
        let line = report.as_ref().and_then(|report| report.policy(&big.name));
        let message = line.and_then(|line| line.message.clone()).unwrap_or_default();
        let expected = format!("map {map} is full: {need} entries needed, {have} in all");
        ensure!(
            message.contains(&expected),
            "{message:?} does not say: {expected}"
        );
        // Nothing of it stays, and the others are as they were: also those that change now.
        ensure!(
            entries(lab)? == before,
            "{} entries, before {before}",
            entries(lab)?
        );
        for name in [DNS, WEB, &first.name] {
            ensure!(lab.node.verdict(name)? == "Programmed", "{name}");
        }
        lab.node.unregister("hfc1")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.consumers[1].register(&lab.node)?;
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;

        // Room is made, and it recovers by its own retries: 0, 1, 3, 7 s after it failed.
        lab.node.remove_file(&format!("policy-{}.yaml", first.name))?;
        lab.node
            .until_verdict(&big.name, "Programmed", 8 * EVENT_BUDGET)?;
        let tally = flow.finish(lab.serving.first())?;
        say(&tally);
        tally.perfect()?;
        lab.served(1, 0)
    })
}

/// A policy of the two consumers and the producer of DNS.
fn beside_dns(name: &str) -> Policy {
    Policy {
        name: name.to_owned(),
        consumers: (DNS.to_owned(), "yes".to_owned()),
        producers: ("app".to_owned(), DNS.to_owned()),
        ..Policy::default()
    }
}

fn f36_services_that_do_not_fit_fail_as_a_whole() -> anyhow::Result<()> {
    // An address with UDP and TCP takes three elements a consumer: two entries and the claim. DNS and WEB have 24.
    let policy = |name, addresses: std::ops::Range<u8>| Policy {
        services: addresses.map(|last| ([10, 99, 0, last].into(), 53)).collect(),
        ..beside_dns(name)
    };
    a_full_map(
        "services",
        &policy("first", 1..6),
        &policy("big", 6..10),
        24 + 30 + 12,
        64,
    )
}

fn f36_prefixes_that_do_not_fit_fail_as_a_whole() -> anyhow::Result<()> {
    let policy = |name, networks: std::ops::Range<u8>| Policy {
        prefixes: networks.map(|third| format!("10.99.{third}.0/24")).collect(),
        ..beside_dns(name)
    };
    // One of the 64 stays free.
    a_full_map(
        "prefixes",
        &policy("first", 0..20),
        &policy("big", 20..44),
        40 + 24,
        63,
    )
}

// --- F41 ---------------------------------------------------------------------------------------------------

/// By then an audit every second, or news of a filter, have found what is wrong.
const NOTICED: Duration = EVENT_BUDGET.saturating_mul(2);

/// Somebody's program in front of ours at c0, that lets every packet pass; and its id.
enum Intruder {
    Link { _link: OwnedFd },
    Filter(Place),
}

fn intrude(lab: &mut Lab) -> anyhow::Result<(Intruder, u32)> {
    let (program, id) = tc::program(tc::PASS)?;
    if lab.node.way.attach == AttachMode::Tc {
        // Of filters of one priority the newest is asked first.
        let place = Place::ingress(filter::PRIORITY, 1);
        lab.node.rtnl.filter("hfc0", place, "intruder", program.as_fd())?;
        return Ok((Intruder::Filter(place), id));
    }
    let ifindex = lab.node.rtnl.ifindex("hfc0")?;
    let attach = || Ok(raw::link_create(program.as_fd(), ifindex)?);
    let _link = lab.node.space().inside(attach)?;
    Ok((Intruder::Link { _link }, id))
}

fn expel(lab: &mut Lab, intruder: Intruder) -> anyhow::Result<()> {
    match intruder {
        Intruder::Link { .. } => Ok(()),
        Intruder::Filter(place) => lab.node.rtnl.delete_filter("hfc0", place),
    }
}

fn f41_a_foreign_program_is_put_before_ours() -> anyhow::Result<()> {
    // Of filters the kernel tells: no audit is needed. Of the chain of tcx it does not.
    let every = |lab: &Lab| {
        if lab.node.way.attach == AttachMode::Tc {
            "30s"
        } else {
            "1s"
        }
    };
    Lab::new()?
        .set_up(|lab| {
            lab.node.chaos("")?;
            let every = every(lab);
            lab.program(&[("HOLDFAST_AUDIT_INTERVAL", every)])
        })?
        .run(|lab| {
            lab.served(0, 0)?;
            let (intruder, id) = intrude(lab)?;
            let ours = lab.node.programs("hfc1")?;
            lab.node.until_verdict(DNS, "Failed(ProofFailed)", NOTICED)?;
            let report = lab.node.report()?;
            let line = report.as_ref().and_then(|report| report.policy(DNS));
            let message = line.and_then(|line| line.message.as_deref()).unwrap_or_default();
            ensure!(
                message.contains(&format!("program {id} (")) && message.contains("--allow-foreign-before"),
                "{message}"
            );
            // What was said is true, and nothing of somebody else's was touched.
            ensure!(
                lab.answered(0, 0, EVENT_BUDGET / 10)?.is_none(),
                "it does not let packets pass"
            );
            ensure!(lab.node.programs("hfc0")? == [&[id][..], &ours].concat());
            lab.served(1, 0)?;
            expel(lab, intruder)?;
            lab.node.until_verdict(DNS, "Programmed", NOTICED)?;
            lab.served(0, 0)?;

            // Where it is allowed, it is none of our business.
            lab.node.end_agent(Signal::TERM)?;
            let (intruder, _) = intrude(lab)?;
            let every = every(lab);
            lab.node.launch_agent(&[
                ("HOLDFAST_AUDIT_INTERVAL", every),
                ("HOLDFAST_ALLOW_FOREIGN_BEFORE", "true"),
            ])?;
            lab.node.until_ready()?;
            until(NOTICED, "the first audit has seen it", || {
                let seen = [("kind", "foreign")];
                Ok((lab.node.metrics()?.count("holdfast_drift_repairs_total", &seen) > 0).then_some(()))
            })?;
            lab.until_programmed()?;
            throughout(NOTICED, "programmed", || {
                Ok(lab.node.verdict(DNS)? == "Programmed")
            })?;
            expel(lab, intruder)?;
            lab.served(0, 0)?;
            lab.node.unregister("hfc0")?;
            lab.node
                .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
            lab.not_served(0, 0)
        })
}

// --- F53 ---------------------------------------------------------------------------------------------------

fn f53_an_old_token_never_serves_a_new_device_of_its_number() -> anyhow::Result<()> {
    let mut stranger = Workload::new("x0", 31, &[(DNS, "yes")], &[]);
    Lab::programmed()?.run(|lab| {
        lab.served(0, 0)?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        lab.node.end_agent(Signal::KILL)?;
        // The device dies, the CNI's delete is lost, the number goes to somebody else.
        lab.consumers[0].delete(&mut lab.node)?;
        stranger.create_as(&mut lab.node, ifindex)?;
        stranger.up(&mut lab.node)?;
        lab.node.put_attachment(&stranger.attachment())?;
        lab.node.start_agent()?;
        until(EVENT_BUDGET, "both are held", || {
            let metrics = lab.node.metrics()?;
            Ok((metrics.held("InterfaceMissing") == 1 && metrics.held("IdentityMissing") == 1).then_some(()))
        })?;
        never_served(lab, &stranger)?;
        stranger.register(&lab.node)?;
        let by = ask(stranger.space()?, lab.services[0].v4(), EVENT_BUDGET)?;
        ensure!(by == Some(1), "registered, and answered by {by:?}");
        Ok(())
    })
}

fn f53_nor_one_of_its_name() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        lab.served(0, 0)?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        lab.node.end_agent(Signal::KILL)?;
        lab.consumers[0].delete(&mut lab.node)?;
        lab.consumers[0].create_as(&mut lab.node, ifindex)?;
        lab.consumers[0].up(&mut lab.node)?;
        lab.node.start_agent()?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        never_served(lab, &lab.consumers[0])?;
        lab.consumers[0].register(&lab.node)?;
        lab.served_at_once(0, 0)?;
        lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)
    })
}

/// For longer than a recheck, nothing of it arrives.
fn never_served(lab: &Lab, stranger: &Workload) -> anyhow::Result<()> {
    let received = lab.serving[0].received();
    let end = Instant::now() + 2 * EVENT_BUDGET;
    while Instant::now() < end {
        let by = ask(stranger.space()?, lab.services[0].v4(), Duration::from_millis(20))?;
        ensure!(by.is_none(), "the token of the dead device serves the new one");
    }
    ensure!(
        lab.serving[0].received() == received,
        "packets of the new device arrived"
    );
    Ok(())
}

// --- F54 ---------------------------------------------------------------------------------------------------

fn f54_a_failed_read_closes_nothing() -> anyhow::Result<()> {
    Lab::programmed_with_chaos(&[])?.run(|lab| {
        let flow = lab.flow(0, 0, RATE)?;
        flow.flows(RATE / 10, EVENT_BUDGET)?;
        lab.node.chaos("registry@hfc0=EIO")?;
        // A look that fails is no news.
        for _ in 0..3 {
            lab.node.poke("hfc0")?;
            throughout(Duration::from_millis(500), "programmed", || {
                Ok(lab.node.verdict(DNS)? == "Programmed")
            })?;
        }
        lab.node.chaos("")?;
        lab.node.poke("hfc0")?;
        let tally = flow.finish(lab.serving.first())?;
        say(&tally);
        tally.perfect()?;
        // A look that succeeds is.
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.not_served(0, 0)
    })
}

fn f54_all_reads_fail_at_start() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        let before = pinned(lab)?;
        let flow = lab.flow(0, 0, RATE)?;
        flow.flows(RATE / 10, EVENT_BUDGET)?;
        lab.node.end_agent(Signal::KILL)?;
        // While nothing can be read, one object goes: its end must wait, too.
        lab.node.remove_file("policy-web.yaml")?;
        lab.node.chaos("registry=EIO")?;
        lab.node.launch_agent(&[])?;
        until(5 * EVENT_BUDGET, "the agent listens", || {
            Ok(lab.node.get("/livez").ok().map(drop))
        })?;
        let rows = lab.node.rows()?;
        let numbers: Vec<u32> = ["hfc0", "hfc1", "hfc2"]
            .into_iter()
            .map(|interface| lab.node.rtnl.ifindex(interface))
            .collect::<Result<_, _>>()?;
        throughout(2 * EVENT_BUDGET, "every row is open", || {
            for ifindex in &numbers {
                if rows.lookup(ifindex)?.is_none_or(|row| row.token == 0) {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        lab.served(2, 1)?;
        lab.node.chaos("")?;
        lab.node.until_ready()?;
        lab.node.until_verdict(DNS, "Programmed", 4 * EVENT_BUDGET)?;
        let tally = flow.finish(lab.serving.first())?;
        say(&tally);
        tally.perfect()?;
        until(4 * EVENT_BUDGET, "now it goes", || {
            Ok(lab.node.verdict(WEB)?.is_empty().then_some(()))
        })?;
        lab.not_served(2, 1)?;
        lab.served(0, 0)?;
        ensure!(pinned(lab)? == before);
        Ok(())
    })
}

// --- and the proof that they test something ----------------------------------------------------------------

/// Each test, and the rule of the agent that must be broken for it to fail.
const GUARDED: [(&str, &str); 9] = [
    ("f08_attaching_fails_for_a_while", "believe-attach"),
    ("f10_traffic_survives_sigterm", "detach-on-exit"),
    ("tc::f10_traffic_survives_sigterm", "detach-on-exit"),
    ("tc::f25_our_filter_is_deleted_by_hand", "blind-audit"),
    ("f41_a_foreign_program_is_put_before_ours", "believe-proofs"),
    ("tc::f41_a_foreign_program_is_put_before_ours", "believe-proofs"),
    ("f53_nor_one_of_its_name", "ignore-host-mac"),
    ("f54_a_failed_read_closes_nothing", "failed-read-is-absent"),
    ("f54_all_reads_fail_at_start", "failed-read-is-absent"),
];

fn each_fails_with_its_rule_broken() -> anyhow::Result<()> {
    suite::each_fails(&GUARDED)
}
