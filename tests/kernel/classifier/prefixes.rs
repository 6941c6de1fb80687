//! Prefix destinations, and the node's own addresses.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast_ebpf::abi::{Backend, ConsumerRow, PrefixEntry, RouteEntry, Verdict};

use crate::frame::{Frame, SYN, Transport};
use crate::plane::{
    BASE, CONSUMER_TOKEN, CONSUMER_V4, CONSUMER_V6, GENERATION, OTHER_TOKEN, POLICY, PORT, Plain, Plane,
    SERVICE_V4, SERVICE_V6, data, is, later_fragments_follow_the_first, request, served, trie_key,
};

const ALL: u32 = ConsumerRow::HAS_SERVICES
    | ConsumerRow::HAS_SOURCES
    | ConsumerRow::HAS_PREFIXES_V4
    | ConsumerRow::HAS_PREFIXES_V6;

/// The second policy, served by the other producer.
const SECOND: u32 = POLICY + 1;

/// TCP, UDP, ICMP echo request, SCTP, ESP, GRE.
fn transports(v6: bool) -> [Transport; 6] {
    let echo = if v6 {
        Transport::Other(58, 128)
    } else {
        Transport::Other(1, 8)
    };
    [
        Transport::Tcp(SYN),
        Transport::Udp,
        echo,
        Transport::Other(132, 0),
        Transport::Other(50, 0),
        Transport::Other(47, 0),
    ]
}

fn to(text: &str, transport: Transport) -> anyhow::Result<Frame> {
    let destination: IpAddr = text.parse()?;
    let source = if destination.is_ipv4() {
        CONSUMER_V4
    } else {
        CONSUMER_V6
    };
    let port = if matches!(transport, Transport::Other(..)) {
        0
    } else {
        7_000
    };
    let source_port = if port == 0 { 0 } else { 40_000 };
    Ok(Frame::new((source, source_port), (destination, port), transport))
}

/// The served plane with the second policy.
fn covered(test: impl FnOnce(&mut Plane) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    served(|plane| {
        plane.backend(1, plane.other, OTHER_TOKEN, GENERATION)?;
        plane.backend_with(1, |backend: &mut Backend| backend.policy = SECOND)?;
        plane.slots(BASE + 1, &[1])?;
        plane.policy(SECOND, BASE + 1, 1, GENERATION, 0)?;
        plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ALL)?;
        test(plane)
    })
}

pub(crate) fn prefixes_take_what_they_cover_of_every_protocol() -> anyhow::Result<()> {
    covered(|plane| {
        let cases = [
            ("10.128.0.0", 16, "10.128.255.255", "10.129.0.0"),
            ("10.128.7.9", 32, "10.128.7.9", "10.128.7.8"),
            ("10.130.0.0", 15, "10.131.1.1", "10.132.0.0"),
            ("0.0.0.0", 0, "9.9.9.9", ""),
            ("fd00:128::", 32, "fd00:128:ffff::1", "fd00:129::"),
            ("fd00:128::9", 128, "fd00:128::9", "fd00:128::8"),
            ("fd00:130::", 63, "fd00:130:0:1::", "fd00:130:0:2::"),
            ("::", 0, "2001:db8::1", ""),
        ];
        for (prefix, length, inside, outside) in cases {
            let v6 = prefix.contains(':');
            plane.prefix(prefix.parse()?, length, POLICY, RouteEntry::OPEN)?;
            for transport in transports(v6) {
                let frame = to(inside, transport)?;
                let what = format!("{prefix}/{length} {transport:?}");
                is(plane.ask(&frame)?, Verdict::Delivered, &what)?;
                is(plane.ask(&data(&frame))?, Verdict::Delivered, &what)?;
                is(plane.tell(&frame.answer())?, Verdict::Answered, &what)?;
                if !outside.is_empty() {
                    is(plane.ask(&to(outside, transport)?)?, Verdict::Pass, &what)?;
                }
                let stranger = plane.stranger;
                is(
                    plane.send(stranger, &frame.bytes())?,
                    Verdict::Pass,
                    "a stranger's",
                )?;
            }
            // The proof of a prefix.
            let probe = plane.probe(plane.consumer, &to(inside, Transport::Udp)?, 0, 0, 0)?;
            ensure!(
                probe.verdict == Verdict::Delivered
                    && probe.policy == POLICY
                    && probe.target == plane.producer
            );
            plane.remove_prefix(prefix.parse()?, length)?;
            plane.forget_flows()?;
            is(plane.ask(&to(inside, Transport::Udp)?)?, Verdict::Pass, "removed")?;
        }
        Ok(())
    })
}

pub(crate) fn the_most_specific_route_wins() -> anyhow::Result<()> {
    covered(|plane| {
        let everything: [IpAddr; 2] = ["0.0.0.0".parse()?, "::".parse()?];
        for all in everything {
            plane.prefix(all, 0, SECOND, RouteEntry::OPEN)?;
        }
        plane.prefix("10.128.0.0".parse()?, 16, POLICY, RouteEntry::OPEN)?;
        plane.prefix("10.128.5.0".parse()?, 24, SECOND, RouteEntry::OPEN)?;
        plane.prefix("10.128.5.7".parse()?, 32, POLICY, RouteEntry::OPEN)?;
        plane.prefix("fd00:128::".parse()?, 32, POLICY, RouteEntry::OPEN)?;
        plane.prefix("fd00:128:5::".parse()?, 48, SECOND, RouteEntry::OPEN)?;
        let mut leads = |text: &str, transport, policy: u32| -> anyhow::Result<()> {
            let frame = to(text, transport)?;
            let answer = plane.probe(plane.consumer, &frame, 0, 0, 0)?;
            ensure!(answer.policy == policy, "{text} leads to {answer:?}");
            is(plane.ask(&frame)?, Verdict::Delivered, text)?;
            let flow = plane.flow(plane.consumer, &frame)?.context("no flow")?;
            ensure!(flow.policy == policy, "{text} has {flow:?}");
            Ok(())
        };
        for (text, policy) in [
            ("10.128.4.1", POLICY),
            ("10.128.5.1", SECOND),
            ("10.128.5.7", POLICY),
            ("10.127.0.1", SECOND),
            ("fd00:128:4::1", POLICY),
            ("fd00:128:5::1", SECOND),
            ("fd00:1::1", SECOND),
        ] {
            leads(text, Transport::Udp, policy)?;
            leads(text, Transport::Other(132, 0), policy)?;
        }
        // An exact service before any prefix, its neighbours by the prefix.
        for (service, length) in [(SERVICE_V4, 32), (SERVICE_V6, 128)] {
            plane.prefix(service, length, SECOND, RouteEntry::OPEN)?;
            for (port, transport, policy) in [
                (PORT, Transport::Udp, POLICY),
                (PORT, Transport::Tcp(SYN), POLICY),
                (54, Transport::Udp, SECOND),
            ] {
                let frame = request(transport, service.is_ipv6()).to_port(port);
                let answer = plane.probe(plane.consumer, &frame, 0, 0, 0)?;
                ensure!(answer.policy == policy, "{service} {port} leads to {answer:?}");
            }
        }
        // Without its flag a family's prefixes are not looked up.
        for (flag, v6) in [
            (ConsumerRow::HAS_PREFIXES_V4, false),
            (ConsumerRow::HAS_PREFIXES_V6, true),
        ] {
            plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ALL & !flag)?;
            for transport in transports(v6) {
                let inside = if v6 { "fd00:128::77" } else { "10.128.0.77" };
                is(plane.ask(&to(inside, transport)?)?, Verdict::Pass, "no prefixes")?;
            }
            let other = if v6 { "10.128.0.78" } else { "fd00:128::78" };
            is(
                plane.ask(&to(other, Transport::Udp)?)?,
                Verdict::Delivered,
                "the other family",
            )?;
            is(
                plane.ask(&request(Transport::Udp, v6))?,
                Verdict::Delivered,
                "a service",
            )?;
        }
        Ok(())
    })
}

pub(crate) fn a_prefix_holds_by_its_own_gates() -> anyhow::Result<()> {
    covered(|plane| {
        for (prefix, length, inside) in [
            ("10.128.0.0", 16, "10.128.1.1"),
            ("fd00:128::", 32, "fd00:128::1"),
        ] {
            let address: IpAddr = prefix.parse()?;
            plane.prefix(address, length, POLICY, 0)?;
            for transport in transports(address.is_ipv6()) {
                let frame = to(inside, transport)?;
                is(plane.ask(&frame)?, Verdict::DropHeld, "a closed entry")?;
                plane.prefix(address, length, POLICY, RouteEntry::OPEN)?;
                is(plane.ask(&frame)?, Verdict::Delivered, "opened")?;
                plane.row_of(plane.consumer, 0, 1, ALL)?;
                is(plane.ask(&data(&frame))?, Verdict::DropHeld, "a closed row")?;
                is(plane.tell(&frame.answer())?, Verdict::DropStale, "its answer")?;
                plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ALL)?;
                is(plane.ask(&data(&frame))?, Verdict::Delivered, "released")?;
                let mut spoofed = frame.with_source_port(frame.source.1);
                spoofed.source.0 = frame.destination.0;
                is(plane.ask(&spoofed)?, Verdict::DropSpoofed, "another source")?;
                plane.prefix(address, length, POLICY, 0)?;
                plane.forget_flows()?;
            }
            // A value of another key is a miss.
            let key = plane.prefix_key(address, length);
            for (check, stored) in [
                (key.check() ^ 1, u32::from(length)),
                (key.check(), 300),
                (key.check(), 8),
            ] {
                let entry = PrefixEntry {
                    check,
                    length: stored,
                    policy: POLICY,
                    flags: RouteEntry::OPEN,
                };
                plane.prefixes()?.insert(&trie_key(&key), Plain(entry), 0)?;
                is(
                    plane.ask(&to(inside, Transport::Udp)?)?,
                    Verdict::Pass,
                    "another key's",
                )?;
            }
        }
        Ok(())
    })
}

pub(crate) fn f33_the_nodes_own_addresses_are_never_captured() -> anyhow::Result<()> {
    covered(|plane| {
        plane.prefix("0.0.0.0".parse()?, 0, POLICY, RouteEntry::OPEN)?;
        plane.prefix("::".parse()?, 0, POLICY, RouteEntry::OPEN)?;
        for node in ["192.0.2.1", "2001:db8::1"] {
            let address: IpAddr = node.parse()?;
            for transport in transports(address.is_ipv6()) {
                let frame = to(node, transport)?;
                is(plane.ask(&frame)?, Verdict::Delivered, "anybody's address")?;
                plane.local(address)?;
                // What was established before is let go at the next tick.
                let deadline = Instant::now() + Duration::from_secs(5);
                while plane.ask(&data(&frame))? != Verdict::Pass {
                    ensure!(Instant::now() < deadline, "an established flow is never let go");
                    std::thread::sleep(Duration::from_millis(50));
                }
                for token in [CONSUMER_TOKEN, 0] {
                    plane.row_of(plane.consumer, token, 1, ALL)?;
                    is(plane.ask(&data(&frame))?, Verdict::Pass, "let go")?;
                    let other = frame.with_source_port(frame.source.1 ^ 1);
                    is(plane.ask(&other)?, Verdict::Pass, "a new flow")?;
                    let later = frame.fragment(8, false, 9);
                    is(plane.ask(&later)?, Verdict::Pass, "a lone fragment")?;
                }
                plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ALL)?;
                plane.remove_local(address)?;
                is(
                    plane.ask(&data(&frame))?,
                    Verdict::Delivered,
                    "no longer the node's",
                )?;
                plane.forget_flows()?;
            }
        }
        // Before an exact service, too.
        for service in [SERVICE_V4, SERVICE_V6] {
            plane.local(service)?;
            for token in [CONSUMER_TOKEN, 0] {
                plane.row_of(plane.consumer, token, 1, ALL)?;
                is(
                    plane.ask(&request(Transport::Udp, service.is_ipv6()))?,
                    Verdict::Pass,
                    "a service of the node",
                )?;
            }
            plane.row_of(plane.consumer, CONSUMER_TOKEN, 1, ALL)?;
        }
        Ok(())
    })
}

pub(crate) fn packets_without_ports_do_not_get_around_a_prefix() -> anyhow::Result<()> {
    covered(|plane| {
        plane.prefix("10.128.0.0".parse()?, 16, POLICY, RouteEntry::OPEN)?;
        plane.prefix("fd00:128::".parse()?, 32, POLICY, RouteEntry::OPEN)?;
        for (inside, outside) in [("10.128.1.1", "10.129.1.1"), ("fd00:128::1", "fd00:129::1")] {
            for transport in transports(inside.contains(':')) {
                let frame = to(inside, transport)?;
                later_fragments_follow_the_first(plane, &frame)?;
                let elsewhere = to(outside, transport)?;
                is(
                    plane.ask(&elsewhere.fragment(8, false, 2))?,
                    Verdict::Pass,
                    "to elsewhere",
                )?;
                // Identifications are of a datagram, not of a transport.
                plane.forget_fragments()?;
            }
        }
        let mut opaque = to("fd00:128::1", Transport::Udp)?;
        opaque.extensions = 9;
        is(
            plane.ask(&opaque)?,
            Verdict::DropMalformed,
            "nine extension headers",
        )?;
        is(
            plane.ask(&opaque.to("fd00:129::1".parse()?))?,
            Verdict::Pass,
            "to elsewhere",
        )
    })
}

pub(crate) fn answers_of_prefixes_are_looked_up_again() -> anyhow::Result<()> {
    covered(|plane| {
        let mut epoch = 1;
        for (prefix, length, inside) in [
            ("10.128.0.0", 16, "10.128.1.1"),
            ("fd00:128::", 32, "fd00:128::1"),
        ] {
            let address: IpAddr = prefix.parse()?;
            for transport in transports(address.is_ipv6()) {
                plane.prefix(address, length, POLICY, RouteEntry::OPEN)?;
                let frame = to(inside, transport)?;
                is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
                epoch += 1;
                plane.row_of(plane.consumer, CONSUMER_TOKEN, epoch, ALL)?;
                is(
                    plane.tell(&frame.answer())?,
                    Verdict::Answered,
                    "the route is still there",
                )?;
                // A longer prefix of another policy takes over.
                plane.prefix(
                    inside.parse()?,
                    if address.is_ipv4() { 32 } else { 128 },
                    SECOND,
                    RouteEntry::OPEN,
                )?;
                epoch += 1;
                plane.row_of(plane.consumer, CONSUMER_TOKEN, epoch, ALL)?;
                is(
                    plane.tell(&frame.answer())?,
                    Verdict::DropStale,
                    "another policy's",
                )?;
                is(
                    plane.ask(&data(&frame))?,
                    Verdict::Delivered,
                    "by the other policy",
                )?;
                ensure!(plane.flow(plane.consumer, &frame)?.context("no flow")?.policy == SECOND);
                plane.remove_prefix(inside.parse()?, if address.is_ipv4() { 32 } else { 128 })?;
                plane.remove_prefix(address, length)?;
                epoch += 1;
                plane.row_of(plane.consumer, CONSUMER_TOKEN, epoch, ALL)?;
                let other = plane.other;
                is(
                    plane.send(other, &frame.answer().bytes())?,
                    Verdict::DropStale,
                    "revoked",
                )?;
                is(plane.ask(&data(&frame))?, Verdict::Pass, "not claimed any more")?;
                plane.forget_flows()?;
            }
        }
        // A producer by way of a neighbour serves prefixes, too.
        plane.prefix("10.128.0.0".parse()?, 16, POLICY, RouteEntry::OPEN)?;
        let device = plane.producer;
        plane.neighbour(0, device, Some([10, 0, 0, 21].into()), None)?;
        is(
            plane.ask(&to("10.128.1.1", Transport::Udp)?)?,
            Verdict::Delivered,
            "a neighbour",
        )
    })
}
