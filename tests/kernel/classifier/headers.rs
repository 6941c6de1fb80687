//! What the headers say: what is never captured, what cannot be read, fragments.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::ensure;
use holdfast_ebpf::abi::{RouteEntry, Verdict};

use crate::frame::{Frame, Transport};
use crate::plane::{
    CONSUMER_TOKEN, CONSUMER_V4, CONSUMER_V6, KINDS, POLICY, SERVICE_V4, SERVICE_V6, is,
    later_fragments_follow_the_first, request, served,
};

pub(crate) fn f33_what_is_never_captured_passes_also_while_held() -> anyhow::Result<()> {
    served(|plane| {
        let any_v6: IpAddr = Ipv6Addr::UNSPECIFIED.into();
        let link_local: IpAddr = "fe80::2".parse()?;
        let v6 = |source: IpAddr, destination: &str, transport| -> anyhow::Result<Vec<u8>> {
            Ok(Frame::new((source, 5353), (destination.parse()?, 5353), transport).bytes())
        };
        let icmp = |kind| Transport::Other(58, kind);
        let udp = |source: IpAddr, destination: IpAddr, from, to| {
            Frame::new((source, from), (destination, to), Transport::Udp).bytes()
        };
        let broadcast: IpAddr = Ipv4Addr::BROADCAST.into();
        let nobody: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        let frames = [
            ("ARP", arp()),
            ("VLAN", vlan(&request(Transport::Udp, false).bytes())),
            (
                "neighbour solicitation",
                v6(CONSUMER_V6, "ff02::1:ff00:1", icmp(135))?,
            ),
            (
                "neighbour solicitation to the service",
                v6(CONSUMER_V6, "fd00:53::1", icmp(135))?,
            ),
            (
                "neighbour advertisement",
                v6(CONSUMER_V6, "fd00:53::1", icmp(136))?,
            ),
            (
                "duplicate address probe",
                v6(any_v6, "ff02::1:ff00:11", icmp(135))?,
            ),
            ("router solicitation", v6(link_local, "ff02::2", icmp(133))?),
            ("redirect", v6(link_local, "fd00:53::1", icmp(137))?),
            ("IPv6 multicast", v6(CONSUMER_V6, "ff02::fb", Transport::Udp)?),
            ("IPv6 link-local", v6(link_local, "fe80::1", Transport::Udp)?),
            (
                "IPv4 multicast",
                udp(CONSUMER_V4, "224.0.0.251".parse()?, 5353, 5353),
            ),
            (
                "IPv4 link-local",
                udp(CONSUMER_V4, "169.254.1.1".parse()?, 5353, 5353),
            ),
            ("limited broadcast", udp(CONSUMER_V4, broadcast, 5353, 5353)),
            ("DHCP discover", udp(nobody, broadcast, 68, 67)),
            ("DHCP renewal", udp(CONSUMER_V4, SERVICE_V4, 68, 67)),
            ("DHCPv6", v6(link_local, "ff02::1:2", Transport::Udp)?),
            ("DHCPv6 renewal", udp(CONSUMER_V6, SERVICE_V6, 546, 547)),
        ];
        // Claimed all the same, so that it is the list that lets them pass.
        let claimed: [(&str, u16); 10] = [
            ("ff02::fb", 5353),
            ("fe80::1", 5353),
            ("224.0.0.251", 5353),
            ("169.254.1.1", 5353),
            ("255.255.255.255", 5353),
            ("255.255.255.255", 67),
            ("10.96.0.10", 67),
            ("ff02::1:2", 5353),
            ("fd00:53::1", 547),
            ("fd00:53::1", 5353),
        ];
        for (address, port) in claimed {
            plane.entry(address.parse()?, 17, port, POLICY, RouteEntry::OPEN)?;
            plane.claim(address.parse()?)?;
        }
        for token in [CONSUMER_TOKEN, 0, CONSUMER_TOKEN] {
            plane.row(token, 1)?;
            for (what, frame) in &frames {
                is(plane.send(plane.consumer, frame)?, Verdict::Pass, what)?;
            }
            let expected = if token == 0 {
                Verdict::DropHeld
            } else {
                Verdict::Delivered
            };
            is(
                plane.ask(&request(Transport::Udp, true))?,
                expected,
                "what is captured",
            )?;
        }
        Ok(())
    })
}

fn arp() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 2, 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.resize(60, 0);
    frame
}

fn vlan(frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0x00, 0, 42], &frame[12..]].concat()
}

pub(crate) fn headers_that_cannot_be_read_do_not_pass() -> anyhow::Result<()> {
    served(|plane| {
        for (transport, v6) in KINDS {
            let good = request(transport, v6).bytes();
            let mut broken = vec![(
                "cut in the transport header",
                good[..if v6 { 58 } else { 38 }].to_vec(),
            )];
            let mut wrong = |what, at: usize, value| {
                let mut frame = good.clone();
                frame[at] = value;
                broken.push((what, frame));
            };
            wrong("another version", 14, if v6 { 0x45 } else { 0x65 });
            wrong("longer than the frame", if v6 { 18 } else { 16 }, 0x40);
            if !v6 {
                wrong("a header of four words", 14, 0x44);
            }
            for (what, frame) in broken {
                let (consumer, stranger) = (plane.consumer, plane.stranger);
                is(plane.send(consumer, &frame)?, Verdict::DropMalformed, what)?;
                is(plane.send(stranger, &frame)?, Verdict::Pass, what)?;
            }
            is(
                plane.ask(&request(transport, v6))?,
                Verdict::Delivered,
                "the whole packet",
            )?;
        }
        Ok(())
    })
}

pub(crate) fn later_fragments_follow_their_first() -> anyhow::Result<()> {
    served(|plane| {
        for address in [SERVICE_V4, SERVICE_V6] {
            plane.claim(address)?;
        }
        for v6 in [false, true] {
            let frame = request(Transport::Udp, v6);
            later_fragments_follow_the_first(plane, &frame)?;
            is(
                plane.ask(&frame.fragment(8, false, 2))?,
                Verdict::DropFragment,
                "of another datagram",
            )?;
            let answer = frame.answer();
            is(
                plane.tell(&answer.fragment(0, true, 9))?,
                Verdict::Answered,
                "the answer's first",
            )?;
            is(
                plane.tell(&answer.fragment(8, false, 9))?,
                Verdict::Answered,
                "the answer's last",
            )?;
            // A port of the same address that nobody claims.
            let unclaimed = frame.to_port(54);
            is(
                plane.ask(&unclaimed.fragment(0, true, 3))?,
                Verdict::Pass,
                "an unclaimed first",
            )?;
            is(
                plane.ask(&unclaimed.fragment(8, false, 3))?,
                Verdict::Pass,
                "an unclaimed last",
            )?;
            // Held, first and last.
            plane.row(0, 1)?;
            is(
                plane.ask(&frame.fragment(0, true, 4))?,
                Verdict::DropHeld,
                "a held first",
            )?;
            is(
                plane.ask(&frame.fragment(8, false, 4))?,
                Verdict::DropHeld,
                "a held last",
            )?;
            plane.row(CONSUMER_TOKEN, 1)?;
        }
        Ok(())
    })
}

pub(crate) fn packets_without_ports_do_not_get_around_a_claim() -> anyhow::Result<()> {
    served(|plane| {
        let elsewhere: [IpAddr; 2] = ["10.96.0.11".parse()?, "fd00:53::2".parse()?];
        for (service, elsewhere, v6) in [
            (SERVICE_V4, elsewhere[0], false),
            (SERVICE_V6, elsewhere[1], true),
        ] {
            plane.claim(service)?;
            let later = request(Transport::Udp, v6).fragment(8, false, 7);
            is(plane.ask(&later)?, Verdict::DropFragment, "to a claimed address")?;
            is(plane.ask(&later.to(elsewhere))?, Verdict::Pass, "to another")?;
            is(
                plane.send(plane.stranger, &later.bytes())?,
                Verdict::Pass,
                "a stranger's",
            )?;
            // The mark itself is no route, whatever its numbers look like to a packet.
            let bare = request(Transport::Other(0, 0), v6).to_port(0);
            ensure!(v6 || plane.ask(&bare)? == Verdict::Pass);
        }
        let mut opaque = request(Transport::Udp, true);
        opaque.extensions = 8;
        is(plane.ask(&opaque)?, Verdict::Delivered, "eight extension headers")?;
        opaque.extensions = 9;
        is(
            plane.ask(&opaque)?,
            Verdict::DropMalformed,
            "nine, to a claimed address",
        )?;
        is(
            plane.ask(&opaque.to(elsewhere[1]))?,
            Verdict::Pass,
            "nine, to another",
        )
    })
}
