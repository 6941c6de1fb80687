//! Delivery to neighbours, up to the redirect; the way from there is the kernel's (`wire`).

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::ensure;
use holdfast_ebpf::abi::{ConsumerRow, Target, Verdict};
use holdfast_tests::rtnl::Rtnl;

use crate::checksum;
use crate::frame::{Frame, Transport};
use crate::plane::{
    CONSUMER_TOKEN, GENERATION, KINDS, PRODUCER_TOKEN, Plane, REDIRECT, SHOT, all_rights, data, is, request,
    served,
};

const V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 21);
const V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x21);
/// The least that IPv6 takes.
const MTU: u16 = 1_280;
const ROW: u32 = ConsumerRow::HAS_SERVICES | ConsumerRow::HAS_SOURCES;

pub(crate) fn neighbours_need_an_address_of_the_family_and_a_device() -> anyhow::Result<()> {
    served(|plane| {
        let (consumer, producer) = (plane.consumer, plane.producer);
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let here = |present: bool| (present.then_some(V4), present.then_some(V6));
            let fine = |plane: &mut Plane| plane.neighbour(0, producer, Some(V4), Some(V6));
            fine(plane)?;
            let (verdict, run) = plane.send_whole(consumer, &frame.bytes(), 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "both addresses")?;
            ensure!(run.frame == frame.bytes(), "the kernel writes the MACs");
            ensure!(run.mark == 7, "the packet stays in this namespace");
            is(plane.tell(&frame.answer())?, Verdict::Answered, "its answer")?;
            // One family is enough for that family, and for new and established flows of it alone.
            for v6_only in [false, true] {
                let (v4_address, v6_address) = here(true);
                let addresses = if v6_only {
                    (None, v6_address)
                } else {
                    (v4_address, None)
                };
                plane.neighbour(0, producer, addresses.0, addresses.1)?;
                let expected = if v6_only == v6 {
                    Verdict::Delivered
                } else {
                    Verdict::DropNoProducer
                };
                is(plane.ask(&data(&frame))?, expected, "an established flow")?;
                is(
                    plane.ask(&frame.with_source_port(40_001))?,
                    expected,
                    "a new flow",
                )?;
                let probe = plane.probe(consumer, &frame, 0, 0, 0)?;
                ensure!(probe.verdict == expected);
            }
            fine(plane)?;
            type Change = fn(&mut Plane) -> anyhow::Result<()>;
            let changes: [(&str, Change); 3] = [
                ("no device", |plane| plane.neighbour(0, 0, Some(V4), Some(V6))),
                ("no address", |plane| {
                    plane.neighbour(0, plane.producer, None, None)
                }),
                ("a way that nobody knows", |plane| {
                    plane.backend_with(0, |backend| {
                        backend.target = Target {
                            kind: 3,
                            ..Target::unpack(backend.target)
                        }
                        .pack();
                    })
                }),
            ];
            for (what, change) in changes {
                change(plane)?;
                is(plane.ask(&data(&frame))?, Verdict::DropNoProducer, what)?;
                is(plane.tell(&frame.answer())?, Verdict::DropStale, what)?;
                fine(plane)?;
                is(plane.ask(&data(&frame))?, Verdict::Delivered, "as before")?;
            }
            // Answers to a consumer that is a neighbour.
            plane.row_with(consumer, CONSUMER_TOKEN, 1, ROW | ConsumerRow::NEIGH, consumer)?;
            let (verdict, run) = plane.send_whole(producer, &frame.answer().bytes(), 7, [0; 5])?;
            is(verdict, Verdict::Answered, "to a neighbour")?;
            ensure!(run.frame == frame.answer().bytes() && run.mark == 7);
            plane.row_with(consumer, CONSUMER_TOKEN, 1, ROW | ConsumerRow::NEIGH, 0)?;
            is(plane.tell(&frame.answer())?, Verdict::DropStale, "no device")?;
            plane.row_of(consumer, CONSUMER_TOKEN, 1, ROW)?;
            // What was for a group of MACs is for one.
            let mut group = frame.bytes();
            group[0] = 0xff;
            let (verdict, run) = plane.send_whole(consumer, &group, 7, [0; 5])?;
            is(verdict, Verdict::Delivered, "for a group")?;
            ensure!(run.frame[0] & 1 == 0 && run.frame[6..] == group[6..]);
            plane.backend(0, producer, PRODUCER_TOKEN, GENERATION)?;
            plane.forget_flows()?;
        }
        Ok(())
    })
}

/// A frame with its datagram made `length` bytes long.
fn of_length(frame: &Frame, length: u16) -> Vec<u8> {
    let mut bytes = frame.bytes();
    bytes.resize(14 + usize::from(length), 0x5a);
    if frame.source.0.is_ipv4() {
        bytes[16..18].copy_from_slice(&length.to_be_bytes());
    } else {
        bytes[18..20].copy_from_slice(&(length - 40).to_be_bytes());
    }
    if frame.transport == Transport::Udp {
        let at = if frame.source.0.is_ipv4() { 34 } else { 54 };
        let payload = (bytes.len() - at) as u16;
        bytes[at + 4..at + 6].copy_from_slice(&payload.to_be_bytes());
    }
    checksum::fill(&mut bytes);
    bytes
}

/// Makes both ends neighbours behind devices that take [`MTU`] bytes.
fn narrow(plane: &mut Plane) -> anyhow::Result<()> {
    all_rights()?;
    let mut rtnl = Rtnl::open(&plane.node)?;
    for name in ["hfc0", "hfp0"] {
        rtnl.set_mtu(name, MTU.into())?;
    }
    plane.neighbour(0, plane.producer, Some(V4), Some(V6))?;
    let consumer = plane.consumer;
    plane.row_with(consumer, CONSUMER_TOKEN, 1, ROW | ConsumerRow::NEIGH, consumer)
}

/// Checks what whoever sent `sent` is told.
fn is_told(sent: &[u8], told: &[u8], mtu: u16) -> anyhow::Result<()> {
    let v6 = sent[12] == 0x86;
    checksum::check(told)?;
    ensure!(told[..6] == sent[6..12] && told[6..12] == sent[..6] && told[12..14] == sent[12..14]);
    let quote = if v6 {
        ensure!(
            told[22..38] == sent[38..54] && told[38..54] == sent[22..38],
            "the ends"
        );
        ensure!(told[20] == 58 && told[54..56] == [2, 0]);
        ensure!(told[58..62] == u32::from(mtu).to_be_bytes());
        62
    } else {
        ensure!(
            told[26..30] == sent[30..34] && told[30..34] == sent[26..30],
            "the ends"
        );
        ensure!(told[23] == 1 && told[34..36] == [3, 4]);
        ensure!(told[38..42] == [0, 0, (mtu >> 8) as u8, mtu as u8]);
        42
    };
    ensure!(told.len() < 576 && told.len() > quote + 60);
    // All but the transport's checksum is as it was sent; that is what a device would make it again.
    let header = if v6 { 40 } else { 20 };
    let protocol = sent[if v6 { 20 } else { 23 }];
    let at = quote + header + if protocol == 6 { 16 } else { 6 };
    let mut expected = sent[14..14 + told.len() - quote].to_vec();
    if matches!(protocol, 6 | 17) {
        expected[at - quote..at - quote + 2].copy_from_slice(&told[at..at + 2]);
        ensure!(checksum::of_range(told, quote + header..told.len()) == [told[at], told[at + 1]]);
    }
    ensure!(
        told[quote..] == expected[..],
        "{told:02x?} quotes {expected:02x?}"
    );
    Ok(())
}

pub(crate) fn whoever_sends_what_is_too_big_is_told() -> anyhow::Result<()> {
    served(|plane| {
        narrow(plane)?;
        let (consumer, producer) = (plane.consumer, plane.producer);
        for (transport, v6) in KINDS {
            let frame = request(transport, v6);
            let answer = frame.answer();
            is(
                plane.send(consumer, &of_length(&frame, MTU))?,
                Verdict::Delivered,
                "what fits",
            )?;
            is(
                plane.send(producer, &of_length(&answer, MTU))?,
                Verdict::Answered,
                "what fits",
            )?;
            for length in [MTU + 1, MTU + 2, 1_499, 1_500] {
                for (ifindex, frame) in [(consumer, &frame), (producer, &answer)] {
                    let sent = of_length(frame, length);
                    let (verdict, run) = plane.send_whole(ifindex, &sent, 7, [0; 5])?;
                    is(verdict, Verdict::DropTooBig, "what does not")?;
                    ensure!(run.action == REDIRECT, "back to where it came from");
                    is_told(&sent, &run.frame, MTU)?;
                }
            }
            // Held, it is not looked at.
            plane.row_with(consumer, 0, 1, ROW | ConsumerRow::NEIGH, consumer)?;
            is(
                plane.send(consumer, &of_length(&frame, 1_500))?,
                Verdict::DropHeld,
                "held",
            )?;
            plane.row_with(consumer, CONSUMER_TOKEN, 1, ROW | ConsumerRow::NEIGH, consumer)?;
            // Later fragments are dropped without a word.
            is(
                plane.ask(&data(&frame).fragment(0, true, 5))?,
                Verdict::Delivered,
                "a first fragment",
            )?;
            let mut later = frame.fragment(8, false, 5).bytes();
            let length = 1_400u16;
            later.resize(14 + usize::from(length), 0);
            let (at, value) = if v6 { (18, length - 40) } else { (16, length) };
            later[at..at + 2].copy_from_slice(&value.to_be_bytes());
            let (verdict, run) = plane.send_whole(consumer, &later, 7, [0; 5])?;
            is(verdict, Verdict::DropTooBig, "a later fragment")?;
            ensure!(run.action == SHOT && run.frame == later);
            // The peer's namespace has no such limit.
            plane.backend(0, producer, PRODUCER_TOKEN, GENERATION)?;
            is(
                plane.send(consumer, &of_length(&data(&frame), 1_500))?,
                Verdict::Delivered,
                "to a peer",
            )?;
            plane.neighbour(0, producer, Some(V4), Some(V6))?;
            plane.forget_flows()?;
        }
        Ok(())
    })
}

pub(crate) fn few_are_told() -> anyhow::Result<()> {
    served(|plane| {
        narrow(plane)?;
        let sent = of_length(&request(Transport::Udp, false), 1_500);
        let started = std::time::Instant::now();
        let mut told = 0;
        for _ in 0..400 {
            let (verdict, run) = plane.send_whole(plane.consumer, &sent, 7, [0; 5])?;
            is(verdict, Verdict::DropTooBig, "too big")?;
            told += u32::from(run.action == REDIRECT);
        }
        let allowed = 100.0 + started.elapsed().as_secs_f64() * 100.0;
        holdfast_tests::say(format!(
            "400 packets too big: {told} answers, {allowed:.0} allowed"
        ));
        ensure!((95.0..allowed + 5.0).contains(&f64::from(told)));
        // Not at the cost of new flows.
        is(
            plane.ask(&request(Transport::Udp, true))?,
            Verdict::Delivered,
            "a new flow",
        )
    })
}
