//! Flows: what stays, what moves, what is stale.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast_ebpf::abi::{ConsumerRow, PrefixEntry, PrefixKey, RouteEntry, ServiceKey, Verdict, control};
use holdfast_tests::say;

use crate::checksum;
use crate::frame::{ACK, Frame, SYN, Transport};
use crate::plane::{
    BASE, CONSUMER_MAC, CONSUMER_TOKEN, GENERATION, KINDS, OTHER_TOKEN, POLICY, PRODUCER_MAC, PRODUCER_TOKEN,
    Plain, Plane, SECOND_MAC, SECOND_TOKEN, boot_ns, data, is, request, served, trie_key,
};

pub(crate) fn answers_between_other_incarnations_are_stale() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        let fine = move |plane: &mut Plane| {
            plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
            plane.register(producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
            plane.backend(0, producer, PRODUCER_TOKEN, GENERATION)?;
            plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
            plane.row(CONSUMER_TOKEN, 1)
        };
        type Change = fn(&mut Plane) -> anyhow::Result<()>;
        let changes: [(&str, Change); 7] = [
            ("the consumer is held", |plane| plane.row(0, 1)),
            ("the consumer is another", |plane| {
                plane.register(plane.consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC)
            }),
            ("the consumer and its row are others", |plane| {
                plane.register(plane.consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC)?;
                plane.row(CONSUMER_TOKEN + 1, 1)
            }),
            ("the producer is another", |plane| {
                plane.register(plane.producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)
            }),
            ("the producer and its backend are others", |plane| {
                plane.register(plane.producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)?;
                plane.backend(0, plane.producer, PRODUCER_TOKEN + 1, GENERATION)
            }),
            ("the producer has left its set", |plane| {
                plane.policy(POLICY, BASE, 1, GENERATION + 1, 0)
            }),
            ("the set is empty", |plane| {
                plane.policy(POLICY, BASE, 0, GENERATION, 0)
            }),
        ];
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            for (what, change) in changes {
                is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
                change(plane)?;
                is(plane.tell(&frame.answer())?, Verdict::DropStale, what)?;
                fine(plane)?;
                is(plane.ask(&data(&frame))?, Verdict::Delivered, "after")?;
                is(plane.tell(&frame.answer())?, Verdict::Answered, "after")?;
                plane.forget_flows()?;
            }
        }
        Ok(())
    })
}

pub(crate) fn requests_of_stale_flows_are_chosen_anew() -> anyhow::Result<()> {
    served(|plane| {
        let (producer, other) = (plane.producer, plane.other);
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
            ensure!(plane.flow(plane.consumer, &frame)?.context("no flow")?.producer == producer);
            // The other producer takes over, and the first is gone.
            plane.backend(1, other, OTHER_TOKEN, GENERATION)?;
            plane.slots(BASE, &[1])?;
            plane.unregister(producer)?;
            is(plane.ask(&data(&frame))?, Verdict::Delivered, "after")?;
            ensure!(plane.flow(plane.consumer, &frame)?.context("no flow")?.producer == other);
            is(
                plane.send(other, &frame.answer().bytes())?,
                Verdict::Answered,
                "the new producer's",
            )?;
            is(
                plane.tell(&frame.answer())?,
                Verdict::DropStale,
                "the old producer's",
            )?;
            plane.register(producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
            plane.slots(BASE, &[0])?;
            plane.forget_flows()?;
        }
        Ok(())
    })
}

pub(crate) fn a_new_epoch_looks_every_route_up_again() -> anyhow::Result<()> {
    served(|plane| {
        let mut epoch = 1;
        for (transport, v6) in KINDS {
            let kept = request(transport, v6);
            let (address, protocol) = (kept.destination.0, transport.number());
            let revoked = kept.to_port(54);
            for removed in [false, true] {
                plane.entry(address, protocol, 54, POLICY, RouteEntry::OPEN)?;
                is(plane.ask(&kept)?, Verdict::Delivered, "before")?;
                is(plane.ask(&revoked)?, Verdict::Delivered, "before")?;
                if removed {
                    plane.remove_entry(address, protocol, 54)?;
                } else {
                    plane.entry(address, protocol, 54, POLICY, 0)?;
                }
                epoch += 1;
                plane.row(CONSUMER_TOKEN, epoch)?;
                // Answers first: they are not to wait for the next request.
                is(
                    plane.tell(&kept.answer())?,
                    Verdict::Answered,
                    "the kept one's answer",
                )?;
                is(
                    plane.tell(&revoked.answer())?,
                    Verdict::DropStale,
                    "the revoked one's answer",
                )?;
                let expected = if removed { Verdict::Pass } else { Verdict::DropHeld };
                is(plane.ask(&data(&revoked))?, expected, "the revoked one")?;
                is(plane.ask(&data(&kept))?, Verdict::Delivered, "the kept one")?;
                let flow = plane.flow(plane.consumer, &kept)?.context("no flow")?;
                ensure!(flow.epoch == epoch && flow.backend == 0, "{flow:?}");
                plane.forget_flows()?;
            }
        }
        Ok(())
    })
}

pub(crate) fn a_switch_moves_new_flows_and_drains_the_others() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, other) = (plane.consumer, plane.other);
        let old = request(Transport::Udp, false);
        let cut = old.with_source_port(40_001);
        is(plane.ask(&old)?, Verdict::Delivered, "before")?;
        is(plane.ask(&cut)?, Verdict::Delivered, "before")?;
        // The new set beside the old one, then the selector.
        plane.backend(1, other, OTHER_TOKEN, GENERATION + 1)?;
        plane.slots(BASE + 1, &[1])?;
        let soon = boot_ns()? + 1_500_000_000;
        plane.backend_with(0, |backend| backend.drain_until = soon)?;
        plane.policy(POLICY, BASE + 1, 1, GENERATION + 1, 0)?;

        is(plane.ask(&old)?, Verdict::Delivered, "an established flow")?;
        ensure!(
            plane.flow(consumer, &old)?.context("no flow")?.backend == 0,
            "stays"
        );
        is(plane.tell(&old.answer())?, Verdict::Answered, "its answer")?;
        let new = old.with_source_port(40_002);
        is(plane.ask(&new)?, Verdict::Delivered, "a new flow")?;
        ensure!(
            plane.flow(consumer, &new)?.context("no flow")?.backend == 1,
            "goes to the new set"
        );
        // A new epoch is no reason to move.
        plane.row(CONSUMER_TOKEN, 2)?;
        is(plane.ask(&old)?, Verdict::Delivered, "an established flow")?;
        ensure!(
            plane.flow(consumer, &old)?.context("no flow")?.backend == 0,
            "stays"
        );

        let deadline = Instant::now() + Duration::from_secs(5);
        while plane.flow(consumer, &old)?.context("no flow")?.backend == 0 {
            ensure!(Instant::now() < deadline, "the drain never ends");
            is(plane.ask(&old)?, Verdict::Delivered, "an established flow")?;
        }
        ensure!(boot_ns()? >= soon, "moved before its drain was over");
        is(
            plane.tell(&old.answer())?,
            Verdict::DropStale,
            "the old producer's answer",
        )?;
        is(
            plane.send(other, &old.answer().bytes())?,
            Verdict::Answered,
            "the new producer's",
        )?;
        // No drain: cut at once.
        plane.backend_with(0, |backend| backend.drain_until = 0)?;
        is(
            plane.tell(&cut.answer())?,
            Verdict::DropStale,
            "an answer after the cut",
        )?;
        is(plane.ask(&cut)?, Verdict::Delivered, "a request after the cut")?;
        ensure!(plane.flow(consumer, &cut)?.context("no flow")?.backend == 1);
        // Back to the first set within its life: nobody moves without need.
        plane.backend(0, plane.producer, PRODUCER_TOKEN, GENERATION + 2)?;
        plane.backend_with(1, |backend| backend.drain_until = u64::MAX)?;
        plane.policy(POLICY, BASE, 1, GENERATION + 2, 0)?;
        is(plane.ask(&cut)?, Verdict::Delivered, "after the second switch")?;
        ensure!(plane.flow(consumer, &cut)?.context("no flow")?.backend == 1);
        Ok(())
    })
}

pub(crate) fn flows_spread_over_all_producers_and_stay() -> anyhow::Result<()> {
    served(|plane| {
        const FLOWS: u16 = 1_000;
        let (consumer, other) = (plane.consumer, plane.other);
        plane.backend(1, other, OTHER_TOKEN, GENERATION)?;
        let slots: Vec<u32> = (0..1_024).map(|slot| slot % 2).collect();
        plane.slots(BASE, &slots)?;
        plane.policy(POLICY, BASE, 1_024, GENERATION, 0)?;
        for v6 in [false, true] {
            let frame = request(Transport::Udp, v6);
            let mut shares = [0u32; 2];
            for port in 20_000..20_000 + FLOWS {
                let frame = frame.with_source_port(port);
                is(plane.ask(&frame)?, Verdict::Delivered, "a new flow")?;
                let flow = plane.flow(consumer, &frame)?.context("no flow")?;
                shares[flow.backend as usize] += 1;
                // The proof names the producer that the flow then gets. (Each compares the whole table before and after.)
                if port % 16 == 0 {
                    let answer = plane.probe(consumer, &frame, 0, 0, 0)?;
                    ensure!((answer.backend, answer.target) == (flow.backend, flow.producer));
                }
            }
            say(format!("{FLOWS} flows over two producers: {shares:?}"));
            ensure!(
                shares.iter().all(|share| (400..600).contains(share)),
                "{shares:?}"
            );
        }
        // Another table does not move whom it has already sent away.
        let before = plane.flows()?;
        plane.slots(BASE, &vec![0; 1_024])?;
        for port in 20_000..20_000 + FLOWS {
            is(
                plane.ask(&request(Transport::Udp, false).with_source_port(port))?,
                Verdict::Delivered,
                "established",
            )?;
        }
        let moved = plane
            .flows()?
            .into_iter()
            .filter(|(key, flow)| before.get(key).is_none_or(|old| old.backend != flow.backend))
            .count();
        ensure!(moved == 0, "{moved} flows moved");
        Ok(())
    })
}

pub(crate) fn a_syn_chooses_anew() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, other) = (plane.consumer, plane.other);
        plane.backend(1, other, OTHER_TOKEN, GENERATION)?;
        for v6 in [false, true] {
            let syn = request(Transport::Tcp(SYN), v6);
            plane.slots(BASE, &[0])?;
            is(plane.ask(&syn)?, Verdict::Delivered, "the first connection")?;
            plane.slots(BASE, &[1])?;
            for flags in [ACK, SYN | ACK, 0x11] {
                is(
                    plane.ask(&syn.with(Transport::Tcp(flags)))?,
                    Verdict::Delivered,
                    "its data",
                )?;
                ensure!(
                    plane.flow(consumer, &syn)?.context("no flow")?.backend == 0,
                    "stays"
                );
            }
            is(plane.ask(&syn)?, Verdict::Delivered, "the same ports again")?;
            ensure!(
                plane.flow(consumer, &syn)?.context("no flow")?.backend == 1,
                "chosen anew"
            );
        }
        Ok(())
    })
}

pub(crate) fn an_answer_key_has_one_owner() -> anyhow::Result<()> {
    served(|plane| {
        // A second consumer without known addresses, which sends from the first one's.
        let second = plane.second_consumer()?;
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            is(plane.ask(&frame)?, Verdict::Delivered, "the owner")?;
            is(
                plane.send(second, &frame.bytes())?,
                Verdict::DropFlowCollision,
                "the second",
            )?;
            let other_port = frame.with_source_port(40_001).bytes();
            is(
                plane.send(second, &other_port)?,
                Verdict::Delivered,
                "from another port",
            )?;
            let (verdict, run) = plane.send_whole(plane.producer, &frame.answer().bytes(), 0, [0; 5])?;
            is(verdict, Verdict::Answered, "the answer")?;
            ensure!(run.frame[..6] == CONSUMER_MAC, "to its owner");
            // Once the owner is another incarnation, its key is free.
            plane.register(plane.consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC)?;
            is(
                plane.send(second, &frame.bytes())?,
                Verdict::Delivered,
                "a free key",
            )?;
            plane.register(plane.consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
            is(
                plane.ask(&data(&frame).with_source_port(40_000))?,
                Verdict::Delivered,
                "the first, with its own entry",
            )?;
            plane.forget_flows()?;
        }
        Ok(())
    })
}

pub(crate) fn an_evicted_answer_entry_is_made_again() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
            plane.forget_flow(plane.producer, &frame.answer())?;
            is(plane.tell(&frame.answer())?, Verdict::Pass, "the entry is gone")?;
            let deadline = Instant::now() + Duration::from_secs(5);
            loop {
                is(plane.ask(&data(&frame))?, Verdict::Delivered, "a request")?;
                if plane.tell(&frame.answer())? == Verdict::Answered {
                    break;
                }
                ensure!(Instant::now() < deadline, "it is never made again");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    })
}

pub(crate) fn new_flows_have_a_rate() -> anyhow::Result<()> {
    served(|plane| {
        // 100 at once, then 50 a second.
        plane.set_control(control::FLOW_INTERVAL, 20_000_000)?;
        plane.set_control(control::FLOW_BURST, 2_000_000_000)?;
        let frame = request(Transport::Udp, false);
        let started = Instant::now();
        let mut opened = 0;
        for port in 20_000..20_400 {
            match plane.ask(&frame.with_source_port(port))? {
                Verdict::Delivered => opened += 1,
                verdict => is(verdict, Verdict::DropFlowRate, "beyond the allowance")?,
            }
        }
        let since = started.elapsed().as_secs_f64();
        let allowed = 100.0 + since * 50.0;
        say(format!(
            "400 new flows in {since:.2} s: {opened} opened, {allowed:.0} allowed"
        ));
        ensure!((95.0..allowed + 5.0).contains(&f64::from(opened)));
        is(
            plane.ask(&frame.with_source_port(20_000))?,
            Verdict::Delivered,
            "an established flow",
        )?;
        let deadline = Instant::now() + Duration::from_secs(5);
        while plane.ask(&frame.with_source_port(21_000))? != Verdict::Delivered {
            ensure!(Instant::now() < deadline, "the allowance is never filled again");
            std::thread::sleep(Duration::from_millis(5));
        }
        plane.set_control(control::FLOW_INTERVAL, 0)?;
        for port in 22_000..22_400 {
            is(
                plane.ask(&frame.with_source_port(port))?,
                Verdict::Delivered,
                "without a limit",
            )?;
        }
        Ok(())
    })
}

pub(crate) fn a_workload_can_be_consumer_and_producer() -> anyhow::Result<()> {
    served(|plane| {
        // The producer is also a consumer, and asks the consumer back with the very ports that it answers with.
        let (consumer, producer) = (plane.consumer, plane.producer);
        let there = request(Transport::Udp, false);
        let back = there.answer();
        let (family, address) = crate::plane::address(back.destination.0);
        let key = ServiceKey {
            ifindex: producer,
            port: back.destination.1.to_be(),
            protocol: 17,
            family,
            address,
        };
        plane.row_of(producer, PRODUCER_TOKEN, 1, ConsumerRow::HAS_SERVICES)?;
        plane.entry_at(key, POLICY + 1, RouteEntry::OPEN)?;
        plane.backend(1, consumer, CONSUMER_TOKEN, GENERATION)?;
        plane.backend_with(1, |backend| backend.policy = POLICY + 1)?;
        plane.slots(BASE + 1, &[1])?;
        plane.policy(POLICY + 1, BASE + 1, 1, GENERATION, 0)?;
        is(plane.tell(&back)?, Verdict::Delivered, "a request of its own")?;
        plane.forget_flows()?;
        is(plane.ask(&there)?, Verdict::Delivered, "the consumer's request")?;
        is(plane.tell(&back)?, Verdict::Answered, "its answer")?;
        // What is neither an answer to somebody nor claimed by the producer's own policies stays stale.
        let elsewhere = there.with_source_port(40_001);
        is(plane.ask(&elsewhere)?, Verdict::Delivered, "another flow")?;
        is(plane.tell(&elsewhere.answer())?, Verdict::Answered, "its answer")?;
        // The consumer's flows end: what was an answer is a request of the producer's own again.
        plane.policy(POLICY, BASE, 0, GENERATION, 0)?;
        is(plane.tell(&back)?, Verdict::Delivered, "a request of its own")?;
        is(plane.ask(&there)?, Verdict::Answered, "and the answer to that")?;
        is(
            plane.tell(&elsewhere.answer())?,
            Verdict::DropStale,
            "no request of its own",
        )?;
        // Nor does a bound of staleness let it out another way.
        plane.forget_flows()?;
        plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
        is(plane.ask(&elsewhere)?, Verdict::Delivered, "another flow")?;
        plane.policy_with(POLICY, |slot| slot.stale_after = 1)?;
        is(
            plane.tell(&elsewhere.answer())?,
            Verdict::DropExpired,
            "its answer, too late",
        )
    })
}

/// The port range of the tests.
const PORTS: std::ops::RangeInclusive<u16> = 61_001..=65_535;

/// The port that the second consumer's flow gets, and the packet that the producer sees; the first has the natural one.
fn moved(plane: &mut Plane, second: u32, frame: &Frame) -> anyhow::Result<(u16, Vec<u8>)> {
    let (verdict, run) = plane.send_whole(second, &frame.summed(), 7, [0; 5])?;
    is(verdict, Verdict::Delivered, "the second consumer")?;
    let at = if frame.source.0.is_ipv4() { 34 } else { 54 };
    let port = u16::from_be_bytes([run.frame[at], run.frame[at + 1]]);
    Ok((port, run.frame))
}

pub(crate) fn a_flow_gets_another_port_where_its_answers_would_be_anothers() -> anyhow::Result<()> {
    served(|plane| {
        let (producer, second) = (plane.producer, plane.second_consumer()?);
        plane.set_control(control::PORTS, control::DEFAULT_PORTS)?;
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let whole = |frame: &Frame| frame.summed();
            is(plane.ask(&frame)?, Verdict::Delivered, "the owner")?;
            let (port, seen) = moved(plane, second, &frame)?;
            ensure!(PORTS.contains(&port), "port {port}");
            let mut expected = whole(&frame.with_source_port(port));
            expected[..6].copy_from_slice(&PRODUCER_MAC);
            ensure!(seen == expected, "{seen:02x?} instead of {expected:02x?}");
            // The same flow keeps its port: established, with its route looked up anew, and with its twin made anew.
            ensure!(moved(plane, second, &data(&frame))?.0 == port);
            plane.row_of(second, SECOND_TOKEN, 2, ConsumerRow::HAS_SERVICES)?;
            ensure!(moved(plane, second, &data(&frame))?.0 == port);
            let answer = frame.answer();
            plane.forget_flow(producer, &answer.to_port(port))?;
            let deadline = Instant::now() + Duration::from_secs(5);
            while plane.flow(producer, &answer.to_port(port))?.is_none() {
                ensure!(Instant::now() < deadline, "the twin is never made again");
                ensure!(moved(plane, second, &data(&frame))?.0 == port);
                std::thread::sleep(Duration::from_millis(20));
            }
            // Answers find their way by the port that they are for, and show what was asked with.
            for (to, mac, target) in [(port, SECOND_MAC, second), (40_000, CONSUMER_MAC, plane.consumer)] {
                let sent = whole(&answer.to_port(to));
                let (verdict, run) = plane.send_whole(producer, &sent, 7, [0; 5])?;
                is(verdict, Verdict::Answered, "an answer")?;
                let mut expected = whole(&answer);
                expected[..6].copy_from_slice(&mac);
                ensure!(
                    run.frame == expected,
                    "{:02x?} instead of {expected:02x?}",
                    run.frame
                );
                let flow = plane.flow(producer, &answer.to_port(to))?.context("no flow")?;
                ensure!(flow.consumer == target);
            }
            // The second one asks from that very port, too: another flow, with another port again.
            let natural = frame.with_source_port(port);
            let (other, _) = moved(plane, second, &natural)?;
            ensure!(other != port && PORTS.contains(&other), "port {other}");
            for (to, source) in [(port, 40_000), (other, port)] {
                let sent = whole(&answer.to_port(to));
                let (verdict, run) = plane.send_whole(producer, &sent, 7, [0; 5])?;
                is(verdict, Verdict::Answered, "an answer")?;
                let mut expected = whole(&answer.to_port(source));
                expected[..6].copy_from_slice(&SECOND_MAC);
                ensure!(run.frame == expected);
            }
            plane.row_of(second, SECOND_TOKEN, 1, ConsumerRow::HAS_SERVICES)?;
            plane.forget_flows()?;
        }
        // One port: the second gets it, and nobody else.
        plane.set_control(control::PORTS, control::ports(61_001, 61_001))?;
        let frame = request(Transport::Udp, false);
        is(plane.ask(&frame)?, Verdict::Delivered, "the owner")?;
        ensure!(moved(plane, second, &frame)?.0 == 61_001);
        is(
            plane.ask(&frame.with_source_port(40_001))?,
            Verdict::Delivered,
            "another flow of the owner",
        )?;
        let third = frame.with_source_port(40_001).bytes();
        is(
            plane.send(second, &third)?,
            Verdict::DropFlowCollision,
            "no port is left",
        )?;
        // Other protocols have none.
        let echo = frame.with(Transport::Other(1, 8)).with_source_port(0).to_port(0);
        for ifindex in [plane.consumer, second] {
            let key = PrefixKey {
                ifindex: ifindex.to_be(),
                ..plane.prefix_key(echo.destination.0, 32)
            };
            let entry = PrefixEntry {
                check: key.check(),
                length: 32,
                policy: POLICY,
                flags: RouteEntry::OPEN,
            };
            plane.prefixes()?.insert(&trie_key(&key), Plain(entry), 0)?;
        }
        plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ConsumerRow::HAS_PREFIXES_V4)?;
        plane.row_of(second, SECOND_TOKEN, 1, ConsumerRow::HAS_PREFIXES_V4)?;
        plane.set_control(control::PORTS, control::DEFAULT_PORTS)?;
        is(plane.ask(&echo)?, Verdict::Delivered, "an echo request")?;
        is(
            plane.send(second, &echo.bytes())?,
            Verdict::DropFlowCollision,
            "the same from another",
        )
    })
}

pub(crate) fn ports_are_written_with_their_checksums() -> anyhow::Result<()> {
    served(|plane| {
        let (producer, second) = (plane.producer, plane.second_consumer()?);
        plane.set_control(control::PORTS, control::DEFAULT_PORTS)?;
        for v6 in [false, true] {
            let frame = request(Transport::Udp, v6);
            let checksum_at = if v6 { 60 } else { 40 };
            is(plane.ask(&frame)?, Verdict::Delivered, "the owner")?;
            let (port, _) = moved(plane, second, &frame)?;
            // No checksum stays none.
            let (_, run) = plane.send_whole(second, &frame.bytes(), 7, [0; 5])?;
            ensure!(run.frame[checksum_at..checksum_at + 2] == [0, 0]);
            let (_, run) = plane.send_whole(producer, &frame.answer().to_port(port).bytes(), 7, [0; 5])?;
            ensure!(run.frame[checksum_at..checksum_at + 2] == [0, 0]);
            // One that would become 0 is written as the other zero, or it would be none.
            let mut found = false;
            let mut payload = frame.summed();
            let end = payload.len();
            for word in 0..=u16::MAX {
                payload[end - 2..].copy_from_slice(&word.to_be_bytes());
                let mut after = payload.clone();
                let at = if v6 { 54 } else { 34 };
                after[at..at + 2].copy_from_slice(&port.to_be_bytes());
                checksum::fill(&mut after);
                if after[checksum_at..checksum_at + 2] == [0xff, 0xff] {
                    checksum::fill(&mut payload);
                    let (_, run) = plane.send_whole(second, &payload, 7, [0; 5])?;
                    ensure!(
                        run.frame[14..] == after[14..],
                        "{:02x?} instead of {after:02x?}",
                        run.frame
                    );
                    found = true;
                }
            }
            ensure!(found, "no payload makes such a checksum");
            // Later fragments have neither.
            let first = frame.fragment(0, true, 77);
            let (verdict, run) = plane.send_whole(second, &first.bytes(), 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "a first fragment")?;
            let at = if v6 { 62 } else { 34 };
            ensure!(run.frame[at..at + 2] == port.to_be_bytes());
            let later = frame.fragment(8, false, 77).bytes();
            let (verdict, run) = plane.send_whole(second, &later, 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "a later fragment")?;
            ensure!(run.frame[14..] == later[14..], "was changed");
            plane.forget_flows()?;
        }
        Ok(())
    })
}
