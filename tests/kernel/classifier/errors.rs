//! ICMP errors: who is told, and what it sees quoted.

use std::net::IpAddr;

use anyhow::ensure;
use holdfast_ebpf::abi::{ConsumerRow, RouteEntry, Verdict, control};

use crate::checksum;
use crate::frame::{Frame, Transport, error};
use crate::plane::{
    BASE, CONSUMER_MAC, CONSUMER_TOKEN, CONSUMER_V4, CONSUMER_V6, GENERATION, KINDS, POLICY, PRODUCER_MAC,
    PRODUCER_TOKEN, Plane, SECOND_MAC, is, request, served,
};

/// ICMP types that are errors.
fn numbers(v6: bool) -> &'static [u8] {
    if v6 { &[1, 2, 3, 4, 100] } else { &[3, 4, 11, 12] }
}

/// The least that must be quoted, and more than there is.
fn lengths(v6: bool) -> [usize; 2] {
    [if v6 { 48 } else { 28 }, 1_000]
}

/// The error of whoever got a frame, about it.
fn about(frame: &Frame, number: u8, keep: usize) -> Vec<u8> {
    error(frame.destination.0, frame.source.0, number, &frame.bytes(), keep)
}

pub(crate) fn errors_reach_who_sent_what_they_quote() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let answer = frame.answer();
            is(plane.ask(&frame)?, Verdict::Delivered, "a request")?;
            is(plane.tell(&answer)?, Verdict::Answered, "its answer")?;
            for &number in numbers(v6) {
                for keep in lengths(v6) {
                    let sent = about(&frame, number, keep);
                    let (verdict, run) = plane.send_whole(producer, &sent, 7, [0; 5])?;
                    is(verdict, Verdict::Answered, "the producer's error")?;
                    ensure!(run.frame[..6] == CONSUMER_MAC && run.frame[6..] == sent[6..]);
                    let sent = about(&answer, number, keep);
                    let (verdict, run) = plane.send_whole(consumer, &sent, 7, [0; 5])?;
                    is(verdict, Verdict::Delivered, "the consumer's error")?;
                    ensure!(run.frame[..6] == PRODUCER_MAC && run.frame[6..] == sent[6..]);
                }
            }
            // A router behind the producer may tell, too; one behind the consumer is not an address of the consumer.
            let router: IpAddr = if v6 {
                "fd00::99".parse()?
            } else {
                "10.0.0.99".parse()?
            };
            let keep = lengths(v6)[0];
            let number = numbers(v6)[0];
            let sent = error(router, frame.source.0, number, &frame.bytes(), keep);
            is(
                plane.send(producer, &sent)?,
                Verdict::Answered,
                "a router's error",
            )?;
            let sent = error(router, answer.source.0, number, &answer.bytes(), keep);
            is(
                plane.send(consumer, &sent)?,
                Verdict::DropSpoofed,
                "from another source",
            )?;
        }
        Ok(())
    })
}

pub(crate) fn quotes_show_the_port_that_their_reader_knows() -> anyhow::Result<()> {
    served(|plane| {
        let (producer, second) = (plane.producer, plane.second_consumer()?);
        plane.set_control(control::PORTS, control::DEFAULT_PORTS)?;
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            is(plane.ask(&frame)?, Verdict::Delivered, "the owner")?;
            let (_, run) = plane.send_whole(second, &frame.summed(), 7, [0; 5])?;
            let at = if v6 { 54 } else { 34 };
            let port = u16::from_be_bytes([run.frame[at], run.frame[at + 1]]);
            ensure!(port != 40_000);
            let (number, keep) = (numbers(v6)[0], lengths(v6)[1]);
            let quoted = at + 8 + if v6 { 40 } else { 20 };
            // What the producer saw, and what the second consumer sent.
            let seen = frame.with_source_port(port);
            let (verdict, run) = plane.send_whole(producer, &about(&seen, number, keep), 7, [0; 5])?;
            is(verdict, Verdict::Answered, "the producer's error")?;
            ensure!(run.frame[..6] == SECOND_MAC);
            ensure!(run.frame[quoted..quoted + 2] == 40_000u16.to_be_bytes());
            checksum::check(&run.frame)?;
            ensure!(run.frame[quoted + 2..] == about(&frame, number, keep)[quoted + 2..]);
            // What the second consumer saw, and what the producer sent.
            let answer = frame.answer();
            let (verdict, run) = plane.send_whole(second, &about(&answer, number, keep), 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "the consumer's error")?;
            ensure!(run.frame[..6] == PRODUCER_MAC);
            ensure!(run.frame[quoted + 2..quoted + 4] == port.to_be_bytes());
            checksum::check(&run.frame)?;
            // The owner's are left alone.
            let sent = about(&frame, number, keep);
            let (verdict, run) = plane.send_whole(producer, &sent, 7, [0; 5])?;
            is(verdict, Verdict::Answered, "about the owner's")?;
            ensure!(run.frame[..6] == CONSUMER_MAC && run.frame[6..] == sent[6..]);
            plane.forget_flows()?;
        }
        Ok(())
    })
}

pub(crate) fn errors_about_flows_that_are_not_current_are_stale() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        type Change = fn(&mut Plane) -> anyhow::Result<()>;
        let changes: [(&str, Change); 4] = [
            ("the consumer is held", |plane| plane.row(0, 1)),
            ("the consumer is another", |plane| {
                plane.register(plane.consumer, CONSUMER_TOKEN + 1, CONSUMER_MAC)
            }),
            ("the producer is another", |plane| {
                plane.register(plane.producer, PRODUCER_TOKEN + 1, PRODUCER_MAC)
            }),
            ("the set is empty", |plane| {
                plane.policy(POLICY, BASE, 0, GENERATION, 0)
            }),
        ];
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let (number, keep) = (numbers(v6)[0], lengths(v6)[0]);
            for (what, change) in changes {
                is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
                change(plane)?;
                is(
                    plane.send(producer, &about(&frame, number, keep))?,
                    Verdict::DropStale,
                    what,
                )?;
                is(
                    plane.send(consumer, &about(&frame.answer(), number, keep))?,
                    Verdict::DropStale,
                    what,
                )?;
                plane.register(consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
                plane.register(producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
                plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
                plane.row(CONSUMER_TOKEN, 1)?;
                is(plane.ask(&frame)?, Verdict::Delivered, "after")?;
                is(
                    plane.send(producer, &about(&frame, number, keep))?,
                    Verdict::Answered,
                    "after",
                )?;
                plane.forget_flows()?;
            }
        }
        Ok(())
    })
}

pub(crate) fn errors_about_nothing_of_ours_pass() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        let all = ConsumerRow::HAS_SERVICES
            | ConsumerRow::HAS_SOURCES
            | ConsumerRow::HAS_PREFIXES_V4
            | ConsumerRow::HAS_PREFIXES_V6;
        plane.prefix("0.0.0.0".parse()?, 0, POLICY, RouteEntry::OPEN)?;
        plane.prefix("::".parse()?, 0, POLICY, RouteEntry::OPEN)?;
        for token in [CONSUMER_TOKEN, 0] {
            plane.row_of(consumer, token, 1, all)?;
            for (transport, v6) in KINDS {
                let frame = request(transport, v6);
                let own = if v6 { CONSUMER_V6 } else { CONSUMER_V4 };
                let (number, keep) = (numbers(v6)[0], lengths(v6)[0]);
                if token != 0 {
                    is(plane.ask(&frame)?, Verdict::Delivered, "a request")?;
                }
                // About somebody else's packet to the consumer; with too little of one; about none at all.
                let foreign = frame.answer().to_port(41_000);
                for keep in [keep, keep - 6, 12, 0] {
                    let sent = error(own, foreign.source.0, number, &foreign.bytes(), keep);
                    is(
                        plane.send(consumer, &sent)?,
                        Verdict::Pass,
                        "about nothing of ours",
                    )?;
                    is(plane.send(plane.stranger, &sent)?, Verdict::Pass, "a stranger's")?;
                }
                let mut senseless = about(&frame.answer(), number, keep);
                senseless[if v6 { 62 } else { 42 }] = 0x12;
                is(
                    plane.send(consumer, &senseless)?,
                    Verdict::Pass,
                    "a quote of no version",
                )?;
                // About a packet that was not sent by whom the error is for.
                let mut other = frame.clone();
                other.source.0 = frame.destination.0;
                let sent = error(frame.destination.0, own, number, &other.bytes(), keep);
                is(plane.send(producer, &sent)?, Verdict::Pass, "for somebody else")?;
                // A later fragment shows no ports.
                let sent = about(&frame.answer().fragment(8, false, 3), number, keep + 8);
                is(
                    plane.send(consumer, &sent)?,
                    Verdict::Pass,
                    "about a later fragment",
                )?;
                plane.forget_flows()?;
            }
        }
        // Not an error: captured by the prefix.
        plane.row_of(consumer, CONSUMER_TOKEN, 1, all)?;
        for (number, v6) in [(8, false), (128, true)] {
            let echo = request(Transport::Other(if v6 { 58 } else { 1 }, number), v6);
            is(
                plane.ask(&echo.with_source_port(0).to_port(0))?,
                Verdict::Delivered,
                "an echo",
            )?;
        }
        Ok(())
    })
}
