//! The gates: who passes, who is held, who is delivered.

use std::net::IpAddr;

use anyhow::{Context, ensure};
use holdfast_ebpf::abi::{ConsumerRow, PolicySlot, RouteEntry, Verdict, capacity, control};

use crate::frame::Transport;
use crate::plane::{
    BASE, CONSUMER_MAC, CONSUMER_TOKEN, GENERATION, KINDS, OTHER_TOKEN, POLICY, PORT, PRODUCER_MAC,
    PRODUCER_TOKEN, Plane, boot_ns, data, is, request, served,
};

pub(crate) fn whoever_is_not_known_passes() -> anyhow::Result<()> {
    served(|plane| {
        let stranger = plane.stranger;
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            is(
                plane.send(stranger, &frame.bytes())?,
                Verdict::Pass,
                "a stranger's packet",
            )?;
            is(plane.ask(&frame)?, Verdict::Delivered, "the consumer's")?;
            // A producer may answer from now on, and still sends what it likes.
            is(plane.tell(&frame)?, Verdict::Pass, "a producer's own packet")?;
        }
        Ok(())
    })
}

pub(crate) fn what_is_not_claimed_passes() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let elsewhere: IpAddr = if v6 {
                "fd00:53::2".parse()?
            } else {
                "10.96.0.11".parse()?
            };
            is(plane.ask(&frame.to_port(54))?, Verdict::Pass, "another port")?;
            is(plane.ask(&frame.to(elsewhere))?, Verdict::Pass, "another address")?;
            let echo = frame.with(Transport::Other(if v6 { 58 } else { 1 }, 8));
            is(plane.ask(&echo)?, Verdict::Pass, "another protocol")?;
        }
        // Without its flag no entry is looked up.
        plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, 0)?;
        is(
            plane.ask(&request(Transport::Udp, false))?,
            Verdict::Pass,
            "no services",
        )?;
        ensure!(plane.flows()?.is_empty());
        Ok(())
    })
}

pub(crate) fn requests_are_delivered_and_answers_come_back() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let answer = frame.answer();
            is(plane.tell(&answer)?, Verdict::Pass, "an answer to nothing")?;
            let (verdict, run) = plane.send_whole(plane.consumer, &frame.bytes(), 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "the first packet")?;
            ensure!(run.frame[..6] == PRODUCER_MAC, "the MAC of the producer");
            ensure!(run.frame[6..] == frame.bytes()[6..], "nothing else was changed");
            ensure!(run.mark == 0, "the mark is cleared");
            for _ in 0..3 {
                is(plane.ask(&data(&frame))?, Verdict::Delivered, "the next")?;
                let (verdict, run) = plane.send_whole(plane.producer, &answer.bytes(), 7, [0; 5])?;
                is(verdict, Verdict::Answered, "an answer")?;
                ensure!(run.frame[..6] == CONSUMER_MAC, "the MAC of the consumer");
                ensure!(run.frame[6..] == answer.bytes()[6..] && run.mark == 0);
            }
            is(
                plane.tell(&answer.to_port(1))?,
                Verdict::Pass,
                "an answer to another port",
            )?;
            let (stranger, other) = (plane.stranger, plane.other);
            is(
                plane.send(stranger, &answer.bytes())?,
                Verdict::Pass,
                "a stranger's answer",
            )?;
            is(
                plane.send(other, &answer.bytes())?,
                Verdict::Pass,
                "another producer's",
            )?;
        }
        ensure!(plane.flows()?.len() == 2 * KINDS.len(), "two entries a flow");
        Ok(())
    })
}

/// Closes by `close`, expects `held` for new and old flows, opens by `open`, expects delivery.
fn held_and_released(
    plane: &mut Plane,
    close: impl Fn(&mut Plane) -> anyhow::Result<()>,
    open: impl Fn(&mut Plane) -> anyhow::Result<()>,
    held: Verdict,
) -> anyhow::Result<()> {
    for (transport, v6) in KINDS {
        let frame = request(transport, v6);
        is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
        close(plane)?;
        is(plane.ask(&data(&frame))?, held, "an established flow")?;
        is(plane.ask(&frame.with_source_port(40_001))?, held, "a new flow")?;
        is(
            plane.ask(&frame.to_port(54))?,
            Verdict::Pass,
            "what is not claimed",
        )?;
        open(plane)?;
        is(
            plane.ask(&data(&frame))?,
            Verdict::Delivered,
            "the established flow, released",
        )?;
        is(plane.tell(&frame.answer())?, Verdict::Answered, "its answer")?;
        is(
            plane.ask(&frame.with_source_port(40_001))?,
            Verdict::Delivered,
            "the new flow, released",
        )?;
        plane.forget_flows()?;
    }
    Ok(())
}

pub(crate) fn a_closed_row_holds() -> anyhow::Result<()> {
    served(|plane| {
        held_and_released(
            plane,
            |plane| plane.row(0, 1),
            |plane| plane.row(CONSUMER_TOKEN, 1),
            Verdict::DropHeld,
        )
    })
}

pub(crate) fn another_token_holds() -> anyhow::Result<()> {
    served(|plane| {
        let consumer = plane.consumer;
        held_and_released(
            plane,
            |plane| plane.register(consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC),
            |plane| plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC),
            Verdict::DropHeld,
        )?;
        held_and_released(
            plane,
            |plane| plane.unregister(consumer),
            |plane| plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC),
            Verdict::DropHeld,
        )?;
        // A row that was never opened is not opened by an identity that is not there either.
        plane.unregister(consumer)?;
        plane.row(0, 1)?;
        is(
            plane.ask(&request(Transport::Udp, false))?,
            Verdict::DropHeld,
            "0 and 0",
        )
    })
}

pub(crate) fn a_closed_entry_holds_its_own_destination_alone() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let (address, protocol) = (frame.destination.0, transport.number());
            plane.entry(address, protocol, 54, POLICY, RouteEntry::OPEN)?;
            plane.entry(address, protocol, PORT, POLICY, 0)?;
            is(plane.ask(&frame)?, Verdict::DropHeld, "closed")?;
            is(
                plane.ask(&frame.to_port(54))?,
                Verdict::Delivered,
                "its neighbour",
            )?;
            plane.entry(address, protocol, PORT, POLICY, RouteEntry::OPEN)?;
            is(plane.ask(&frame)?, Verdict::Delivered, "opened")?;
        }
        Ok(())
    })
}

pub(crate) fn held_traffic_passes_where_the_policy_says_so() -> anyhow::Result<()> {
    served(|plane| {
        plane.policy(POLICY, BASE, 1, GENERATION, PolicySlot::PASS_WHILE_HELD)?;
        held_and_released(
            plane,
            |plane| plane.row(0, 1),
            |plane| plane.row(CONSUMER_TOKEN, 1),
            Verdict::PassedHeld,
        )?;
        plane.policy(POLICY, BASE, 0, GENERATION, PolicySlot::PASS_WHILE_HELD)?;
        is(
            plane.ask(&request(Transport::Udp, false))?,
            Verdict::PassedHeld,
            "an empty set",
        )
    })
}

pub(crate) fn an_empty_set_is_no_producer() -> anyhow::Result<()> {
    served(|plane| {
        held_and_released(
            plane,
            |plane| plane.policy(POLICY, BASE, 0, GENERATION + 1, 0),
            |plane| plane.policy(POLICY, BASE, 1, GENERATION, 0),
            Verdict::DropNoProducer,
        )
    })
}

pub(crate) fn a_producer_that_is_not_the_programmed_one_is_none() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        let fine = move |plane: &mut Plane| {
            plane.register(producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
            plane.slots(BASE, &[0])?;
            plane.backend(0, producer, PRODUCER_TOKEN, GENERATION)
        };
        type Change = fn(&mut Plane, u32, u32) -> anyhow::Result<()>;
        let changes: [(&str, Change); 7] = [
            ("another incarnation", |plane, _, producer| {
                plane.register(producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)
            }),
            ("no identity", |plane, _, producer| plane.unregister(producer)),
            ("a freed backend", |plane, _, _| {
                plane.backend_with(0, |backend| backend.token = 0)
            }),
            ("a backend of another policy", |plane, _, _| {
                plane.backend_with(0, |backend| backend.policy = POLICY + 1)
            }),
            ("a backend of an older set", |plane, _, producer| {
                plane.backend(0, producer, PRODUCER_TOKEN, GENERATION - 1)
            }),
            ("a slot that leads nowhere", |plane, _, _| {
                plane.slots(BASE, &[capacity::BACKENDS])
            }),
            ("the consumer itself", |plane, consumer, _| {
                plane.backend(0, consumer, CONSUMER_TOKEN, GENERATION)
            }),
        ];
        for (what, change) in changes {
            let frame = request(Transport::Udp, false);
            is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
            change(plane, consumer, producer)?;
            is(
                plane.ask(&frame.with_source_port(40_001))?,
                Verdict::DropNoProducer,
                what,
            )?;
            fine(plane)?;
            is(plane.ask(&frame)?, Verdict::Delivered, "after")?;
            plane.forget_flows()?;
        }
        Ok(())
    })
}

pub(crate) fn another_slot_is_tried_where_one_does_not_serve() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, other) = (plane.consumer, plane.other);
        plane.backend(1, other, OTHER_TOKEN, GENERATION)?;
        type Change = fn(&mut Plane) -> anyhow::Result<()>;
        let changes: [(&str, Change); 4] = [
            ("the consumer itself", |plane| {
                plane.backend(0, plane.consumer, CONSUMER_TOKEN, GENERATION)
            }),
            ("a neighbour of the other family", |plane| {
                plane.neighbour(0, plane.producer, Some([10, 0, 0, 21].into()), None)
            }),
            ("another incarnation", |plane| {
                plane.register(plane.producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)
            }),
            ("a freed backend", |plane| {
                plane.backend_with(0, |backend| backend.token = 0)
            }),
        ];
        for length in [2u32, 3, 16, 1_024, 4_096] {
            // Members by turns, and each with one contiguous part.
            let shapes: [fn(u32, u32) -> u32; 3] = [
                |slot, _| slot % 2,
                |slot, length| u32::from(slot >= length / 2),
                |slot, length| u32::from(slot < length / 2),
            ];
            for shape in shapes {
                let slots: Vec<u32> = (0..length).map(|slot| shape(slot, length)).collect();
                plane.slots(BASE, &slots)?;
                plane.policy(POLICY, BASE, length as u16, GENERATION, 0)?;
                for (what, change) in changes {
                    change(plane)?;
                    for port in 20_000..20_032 {
                        let frame = request(Transport::Udp, true).with_source_port(port);
                        let answer = plane.probe(consumer, &frame, 0, 0, 0)?;
                        ensure!(
                            (answer.verdict, answer.target, answer.backend) == (Verdict::Delivered, other, 1),
                            "{what}: {answer:?} with {length} slots"
                        );
                        is(plane.ask(&frame)?, Verdict::Delivered, what)?;
                        let flow = plane.flow(consumer, &frame)?.context("no flow")?;
                        ensure!(flow.producer == other, "{what}: {flow:?}");
                    }
                    // One slot is one answer.
                    let bad = slots
                        .iter()
                        .position(|backend| *backend == 0)
                        .context("no slot")?;
                    let alone =
                        plane.probe(consumer, &request(Transport::Udp, true), BASE + bad as u32, 1, 0)?;
                    ensure!(alone.verdict == Verdict::DropNoProducer);
                    plane.forget_flows()?;
                    plane.register(plane.producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
                    plane.backend(0, plane.producer, PRODUCER_TOKEN, GENERATION)?;
                }
            }
        }
        // Nobody at all.
        plane.unregister(plane.producer)?;
        plane.unregister(other)?;
        is(
            plane.ask(&request(Transport::Udp, true))?,
            Verdict::DropNoProducer,
            "nobody",
        )
    })
}

pub(crate) fn sources_of_others_are_spoofed() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let mut spoofed = frame.clone();
            spoofed.source.0 = if v6 {
                "fd00::12".parse()?
            } else {
                "10.0.0.12".parse()?
            };
            is(plane.ask(&spoofed)?, Verdict::DropSpoofed, "another source")?;
            is(
                plane.ask(&spoofed.to_port(54))?,
                Verdict::Pass,
                "to what is not claimed",
            )?;
            is(plane.ask(&frame)?, Verdict::Delivered, "the own source")?;
        }
        // Addresses that nobody knows are not checked.
        plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ConsumerRow::HAS_SERVICES)?;
        let mut frame = request(Transport::Udp, false);
        frame.source.0 = "10.0.0.12".parse()?;
        is(plane.ask(&frame)?, Verdict::Delivered, "no addresses given")
    })
}

pub(crate) fn a_bound_of_staleness_ends_service() -> anyhow::Result<()> {
    served(|plane| {
        let frame = request(Transport::Udp, false);
        let second = 1_000_000_000;
        let expired = |plane: &mut Plane, expected: bool, what: &str| {
            let (out, back) = if expected {
                (Verdict::DropExpired, Verdict::DropExpired)
            } else {
                (Verdict::Delivered, Verdict::Answered)
            };
            is(plane.ask(&frame)?, out, what)?;
            is(plane.ask(&frame.with_source_port(40_001))?, out, what)?;
            is(plane.tell(&frame.answer())?, back, what)
        };
        expired(plane, false, "no bound")?;
        plane.policy_with(POLICY, |slot| slot.max_staleness = 10 * second)?;
        plane.set_control(control::LAST_CURRENT, boot_ns()?)?;
        expired(plane, false, "current")?;
        plane.set_control(control::LAST_CURRENT, boot_ns()? - 20 * second)?;
        expired(plane, true, "20 s ago")?;
        plane.set_control(control::LAST_CURRENT, boot_ns()?)?;
        expired(plane, false, "current again")?;
        let now = boot_ns()?;
        plane.policy_with(POLICY, |slot| slot.stale_after = now - 1)?;
        expired(plane, true, "the policy's own deadline")?;
        plane.policy_with(POLICY, |slot| slot.stale_after = now + 60 * second)?;
        expired(plane, false, "before it")
    })
}
