//! What the agent asks and is told: probes, wakes, debug lines.

use std::time::{Duration, Instant};

use anyhow::ensure;
use holdfast_ebpf::abi::{RouteEntry, Verdict, capacity, control, probe};

use crate::frame::Transport;
use crate::plane::{
    Answer, BASE, CONSUMER_MAC, CONSUMER_TOKEN, GENERATION, KINDS, NONCE, OTHER_TOKEN, POLICY, PORT,
    PRODUCER_MAC, PRODUCER_TOKEN, Plane, is, request, served,
};

pub(crate) fn probes_ask_and_change_nothing() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer, other) = (plane.consumer, plane.producer, plane.other);
        let delivered = |backend, target| Answer {
            verdict: Verdict::Delivered,
            target,
            policy: POLICY,
            generation: GENERATION,
            backend,
        };
        let nothing = |verdict| Answer {
            verdict,
            target: probe::NO_TARGET,
            policy: POLICY,
            generation: GENERATION,
            backend: 0,
        };
        plane.backend(1, other, OTHER_TOKEN, GENERATION + 1)?;
        plane.slots(BASE + 1, &[1, 0])?;
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            ensure!(plane.probe(consumer, &frame, 0, 0, 0)? == delivered(0, producer));
            // The next set before the switch, and each of its producers.
            ensure!(plane.probe(consumer, &frame, BASE + 1, 1, 0)? == delivered(1, other));
            ensure!(plane.probe(consumer, &frame, BASE + 2, 1, 0)? == delivered(0, producer));
            // Unclaimed, spoofed.
            let unclaimed = plane.probe(consumer, &frame.to_port(54), 0, 0, 0)?;
            ensure!(
                unclaimed
                    == Answer {
                        policy: 0,
                        generation: 0,
                        ..nothing(Verdict::Pass)
                    }
            );
            let mut spoofed = frame.clone();
            spoofed.source.0 = frame.destination.0;
            ensure!(plane.probe(consumer, &spoofed, 0, 0, 0)? == nothing(Verdict::DropSpoofed));
            // Held, by row or entry, and as if it were open.
            let (address, protocol) = (frame.destination.0, transport.number());
            for token in [0, CONSUMER_TOKEN] {
                plane.row(token, 1)?;
                for flags in [0, RouteEntry::OPEN] {
                    plane.entry(address, protocol, PORT, POLICY, flags)?;
                    let open = token != 0 && flags != 0;
                    let expected = if open {
                        delivered(0, producer)
                    } else {
                        nothing(Verdict::DropHeld)
                    };
                    ensure!(plane.probe(consumer, &frame, 0, 0, 0)? == expected);
                    ensure!(
                        plane.probe(consumer, &frame, 0, 0, probe::AS_IF_OPEN)? == delivered(0, producer)
                    );
                    let overridden = plane.probe(consumer, &frame, BASE + 1, 1, probe::AS_IF_OPEN)?;
                    ensure!(overridden == delivered(1, other));
                }
            }
            // The set alone, which has no consumer: on any device, also one without a row and the producer's own.
            let set_only = probe::SET_ONLY | POLICY << 8;
            for ifindex in [consumer, producer, plane.stranger] {
                let asked = plane.probe(ifindex, &frame, BASE + 1, 1, set_only)?;
                ensure!(asked == delivered(1, other), "{asked:?}");
                ensure!(plane.probe(ifindex, &frame, 0, 0, set_only)? == delivered(0, producer));
            }
            let unknown = plane.probe(consumer, &frame, 0, 0, probe::SET_ONLY | capacity::POLICIES << 8)?;
            ensure!(unknown.verdict == Verdict::DropNoProducer);
            // Flows are for packets: a probe does not follow one.
            is(plane.ask(&frame)?, Verdict::Delivered, "a real packet")?;
            plane.policy(POLICY, BASE + 1, 1, GENERATION, 0)?;
            ensure!(plane.probe(consumer, &frame, 0, 0, 0)? == delivered(1, other));
            plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
            // Gone.
            plane.unregister(producer)?;
            ensure!(plane.probe(consumer, &frame, 0, 0, 0)? == nothing(Verdict::DropNoProducer));
            ensure!(plane.wakes()?.is_empty(), "a probe wakes nobody");
            plane.register(producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
            plane.policy(POLICY, BASE, 0, GENERATION, 0)?;
            ensure!(plane.probe(consumer, &frame, 0, 0, 0)? == nothing(Verdict::DropNoProducer));
            plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
        }
        Ok(())
    })
}

pub(crate) fn only_the_nonce_makes_a_probe() -> anyhow::Result<()> {
    served(|plane| {
        let consumer = plane.consumer;
        let frame = request(Transport::Udp, false).bytes();
        let (low, high) = (NONCE as u32, (NONCE >> 32) as u32);
        plane.row(0, 1)?;
        let as_if_open = probe::AS_IF_OPEN;
        for (mark, cb) in [
            (probe::MARK, [0, 0, as_if_open, low, high ^ 1]),
            (probe::MARK, [0, 0, as_if_open, low ^ 1, high]),
            (probe::MARK, [0, 0, as_if_open, 0, 0]),
            (probe::MARK + 1, [0, 0, as_if_open, low, high]),
            (0, [0, 0, as_if_open, low, high]),
        ] {
            let (verdict, run) = plane.send_whole(consumer, &frame, mark, cb)?;
            is(verdict, Verdict::DropHeld, "no probe")?;
            ensure!(run.cb == cb, "answered");
        }
        // Without a nonce there are no probes, also none with nonce 0.
        plane.set_control(control::NONCE, 0)?;
        let cb = [0, 0, as_if_open, 0, 0];
        is(
            plane.send_whole(consumer, &frame, probe::MARK, cb)?.0,
            Verdict::DropHeld,
            "nonce 0",
        )
    })
}

pub(crate) fn a_mismatch_wakes_once_a_second() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        let frame = request(Transport::Udp, false);
        is(plane.ask(&frame)?, Verdict::Delivered, "nothing is wrong")?;
        ensure!(plane.wakes()?.is_empty());
        // A silent rotation.
        plane.register(consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC)?;
        let started = Instant::now();
        for _ in 0..100 {
            is(plane.ask(&frame)?, Verdict::DropHeld, "rotated")?;
        }
        ensure!(started.elapsed() < Duration::from_millis(900), "too slow to tell");
        ensure!(plane.wakes()? == [consumer]);
        while started.elapsed() < Duration::from_millis(1_100) {
            std::thread::sleep(Duration::from_millis(20));
        }
        is(plane.ask(&frame)?, Verdict::DropHeld, "rotated")?;
        ensure!(plane.wakes()? == [consumer]);
        // A producer's rotation wakes for the producer; a silent identity for the consumer that waits for it.
        plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
        plane.register(producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)?;
        is(
            plane.ask(&frame)?,
            Verdict::DropNoProducer,
            "the producer rotated",
        )?;
        ensure!(plane.wakes()? == [producer]);
        // Held without an identity: there is nothing to tell.
        std::thread::sleep(Duration::from_millis(1_100));
        plane.unregister(consumer)?;
        plane.row(0, 1)?;
        is(plane.ask(&frame)?, Verdict::DropHeld, "no identity")?;
        ensure!(plane.wakes()?.is_empty());
        plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
        is(plane.ask(&frame)?, Verdict::DropHeld, "a silent identity")?;
        ensure!(plane.wakes()? == [consumer]);
        Ok(())
    })
}

pub(crate) fn debug_lines_have_a_switch() -> anyhow::Result<()> {
    served(|plane| {
        let frame = request(Transport::Udp, false);
        let send_both = |plane: &mut Plane, level: u64, expected: usize| {
            plane.set_control(control::DEBUG, level)?;
            plane.row(CONSUMER_TOKEN, 1)?;
            is(plane.ask(&frame)?, Verdict::Delivered, "open")?;
            plane.row(0, 1)?;
            is(plane.ask(&frame)?, Verdict::DropHeld, "closed")?;
            let lines = plane.lines()?;
            ensure!(
                lines == expected,
                "{lines} lines at level {level} instead of {expected}"
            );
            Ok(())
        };
        send_both(plane, 0, 0)?;
        send_both(plane, 1, 1)?;
        send_both(plane, 2, 2)?;
        send_both(plane, 0, 0)
    })
}
