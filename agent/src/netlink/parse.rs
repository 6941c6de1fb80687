//! From the bytes of a datagram to messages about devices and addresses.
//!
//! Only the attributes that we use are read, each with its length checked: an attribute that a newer kernel adds, or
//! makes longer, must never turn every message into an undecodable one. All numbers are in host byte order
//! (`linux/netlink.h`, `linux/rtnetlink.h`, `linux/if_link.h`, `linux/if_addr.h`), addresses in network order.

use std::net::IpAddr;

use holdfast_engine::model::{Ifindex, Link, LinkKind, Mac};

use super::addresses::Own;

const NLMSG_HEADER: usize = 16;
const IFINFO_HEADER: usize = 16;
const IFADDR_HEADER: usize = 8;
const ATTRIBUTE_HEADER: usize = 4;

/// From `linux/if_link.h` and `linux/ipv6.h`: an array of the settings of a device, by these numbers.
const IFLA_INET6_CONF: u16 = 2;
const DEVCONF_DISABLE_IPV6: usize = 26;

const NLMSG_NOOP: u16 = libc::NLMSG_NOOP as u16;
pub(super) const NLMSG_ERROR: u16 = libc::NLMSG_ERROR as u16;
pub(super) const NLMSG_DONE: u16 = libc::NLMSG_DONE as u16;
const NLMSG_OVERRUN: u16 = libc::NLMSG_OVERRUN as u16;
const NLM_F_DUMP_INTR: u16 = libc::NLM_F_DUMP_INTR as u16;

/// Upper two bits of an attribute type are flags (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
const ATTRIBUTE_TYPE: u16 = 0x3fff;

/// One message of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Which request it answers; 0 for a notification.
    pub(super) sequence: u32,
    /// What is being dumped changed meanwhile (`NLM_F_DUMP_INTR`).
    pub(super) interrupted: bool,
    /// What it says.
    pub(super) content: Content,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A device is there.
    Present(Link),
    /// A veth is there and has no other end any more: it is being deleted, and of what kind it was is no longer said.
    Orphaned(Link),
    /// A device is there, but what the message says about it makes no sense.
    Unreadable(Ifindex),
    /// A device is gone from this namespace.
    Gone(Ifindex),
    /// The node has an address, whatever its state: a tentative one is its own already.
    Address(Own),
    /// It has it no more.
    AddressGone(Own),
    /// End of a dump; an errno if the kernel gave up in the middle, else 0.
    Done(i32),
    /// A request was refused with this errno, or acknowledged with 0.
    Answer(i32),
    /// The kernel lost messages.
    Overrun,
    /// Nothing of ours, such as a bridge's view of its port.
    Other,
}

/// A datagram that does not hold what its own lengths say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The messages of a datagram, in order. After a [`Malformed`] nothing follows.
pub(super) struct Messages<'a> {
    rest: &'a [u8],
}

/// Splits a datagram.
pub(super) const fn messages(datagram: &[u8]) -> Messages<'_> {
    Messages { rest: datagram }
}

impl Iterator for Messages<'_> {
    type Item = Result<Message, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let taken = take_message(self.rest);
        self.rest = taken.as_ref().map_or(&[], |(_, rest)| rest);
        Some(taken.map(|(message, _)| message))
    }
}

/// A message as it is framed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    pub(super) payload: &'a [u8],
}

/// The first message of a datagram, and what comes after it.
pub(super) fn take_frame(bytes: &[u8]) -> Result<(Frame<'_>, &[u8]), Malformed> {
    let length = u32_at(bytes, 0).ok_or(Malformed)? as usize;
    let frame = Frame {
        kind: u16_at(bytes, 4).ok_or(Malformed)?,
        flags: u16_at(bytes, 6).ok_or(Malformed)?,
        sequence: u32_at(bytes, 8).ok_or(Malformed)?,
        payload: bytes.get(NLMSG_HEADER..length).ok_or(Malformed)?,
    };
    // The padding behind the last message may be missing.
    let rest = bytes.get(aligned(length)..).unwrap_or_default();
    Ok((frame, rest))
}

fn take_message(bytes: &[u8]) -> Result<(Message, &[u8]), Malformed> {
    let (frame, rest) = take_frame(bytes)?;
    let Frame {
        kind,
        flags,
        sequence,
        payload,
    } = frame;
    let content = match kind {
        NLMSG_DONE => Content::Done(i32_at(payload, 0).unwrap_or(0).saturating_neg()),
        NLMSG_ERROR => Content::Answer(i32_at(payload, 0).ok_or(Malformed)?.saturating_neg()),
        NLMSG_OVERRUN => Content::Overrun,
        NLMSG_NOOP => Content::Other,
        libc::RTM_NEWLINK | libc::RTM_DELLINK => link_message(kind, payload)?,
        libc::RTM_NEWADDR | libc::RTM_DELADDR => address_message(kind, payload)?,
        _ => Content::Other,
    };
    let message = Message {
        sequence,
        interrupted: flags & NLM_F_DUMP_INTR != 0,
        content,
    };
    Ok((message, rest))
}

fn link_message(kind: u16, payload: &[u8]) -> Result<Content, Malformed> {
    let attributes = payload.get(IFINFO_HEADER..).ok_or(Malformed)?;
    // A bridge tells of its ports with RTM_NEWLINK and RTM_DELLINK of its own family: a port that leaves its bridge
    // is no device that is gone.
    if payload.first().copied() != Some(libc::AF_UNSPEC as u8) {
        return Ok(Content::Other);
    }
    let ifindex = i32_at(payload, 4)
        .and_then(|ifindex| u32::try_from(ifindex).ok())
        .filter(|&ifindex| ifindex != 0)
        .ok_or(Malformed)?;
    if kind == libc::RTM_DELLINK {
        return Ok(Content::Gone(ifindex));
    }
    let flags = u32_at(payload, 8).ok_or(Malformed)?;
    Ok(link(ifindex, flags, attributes).unwrap_or(Content::Unreadable(ifindex)))
}

fn link(ifindex: Ifindex, flags: u32, attributes: &[u8]) -> Option<Content> {
    let mut name = None;
    let mut mac = Mac::default();
    let mut carrier = false;
    let mut kind = None;
    let mut peer_elsewhere = false;
    let mut peer = None;
    let mut master = None;
    let mut mtu = None;
    let mut ipv6 = false;
    for attribute in (Attributes { rest: attributes }) {
        let (kind_of, value) = attribute?;
        match kind_of {
            libc::IFLA_IFNAME => name = Some(device_name(value)?),
            // Some devices have no address, or one of another length: it stays unknown.
            libc::IFLA_ADDRESS => mac = <[u8; 6]>::try_from(value).map(Mac).unwrap_or_default(),
            libc::IFLA_CARRIER => carrier = *value.first()? != 0,
            libc::IFLA_MTU => mtu = Some(u32_at(value, 0)?),
            libc::IFLA_MASTER => master = Some(u32_at(value, 0)?).filter(|&ifindex| ifindex != 0),
            libc::IFLA_LINK => peer = Some(u32_at(value, 0)?),
            // Only there when the other end is in another namespace, whether that has a number yet or not.
            libc::IFLA_LINK_NETNSID => peer_elsewhere = true,
            libc::IFLA_LINKINFO => kind = info_kind(value)?,
            libc::IFLA_AF_SPEC => ipv6 = speaks_ipv6(value)?,
            _ => {}
        }
    }
    let link = Link {
        ifindex,
        name: name?,
        mac,
        up: flags & libc::IFF_UP as u32 != 0,
        carrier,
        kind: match kind {
            Some(b"veth") => LinkKind::Veth { peer_elsewhere },
            Some(b"tun") => LinkKind::Tap,
            Some(b"bridge") => LinkKind::Bridge,
            _ => LinkKind::Other,
        },
        master,
        mtu: mtu?,
        ipv6,
    };
    // `veth_dellink` cuts the two ends apart before it tells of either (`veth_get_iflink` then says 0).
    let is_veth = matches!(link.kind, LinkKind::Veth { .. });
    Some(if is_veth && peer == Some(0) {
        Content::Orphaned(link)
    } else {
        Content::Present(link)
    })
}

fn address_message(kind: u16, payload: &[u8]) -> Result<Content, Malformed> {
    let attributes = payload.get(IFADDR_HEADER..).ok_or(Malformed)?;
    let (family, length) = (payload.first().copied(), payload.get(1).copied());
    let family = family.map(i32::from).ok_or(Malformed)?;
    if family != libc::AF_INET && family != libc::AF_INET6 {
        return Ok(Content::Other);
    }
    let ifindex = u32_at(payload, 4).ok_or(Malformed)?;
    let (mut local, mut other) = (None, None);
    for attribute in (Attributes { rest: attributes }) {
        let (kind_of, value) = attribute.ok_or(Malformed)?;
        match kind_of {
            libc::IFA_LOCAL => local = Some(ip_address(family, value)?),
            libc::IFA_ADDRESS => other = Some(ip_address(family, value)?),
            _ => {}
        }
    }
    // `IFA_LOCAL` is the own address wherever it is there; IPv6 leaves it out where there is no peer, and then
    // `IFA_ADDRESS` is. The address of nobody, which IPv4 allows, has neither.
    let Some(address) = local.or(other) else {
        return Ok(Content::Other);
    };
    let network = (family == libc::AF_INET).then_some(length.zip(other)).flatten();
    let own = Own {
        address,
        ifindex,
        network,
    };
    Ok(if kind == libc::RTM_NEWADDR {
        Content::Address(own)
    } else {
        Content::AddressGone(own)
    })
}

fn ip_address(family: i32, value: &[u8]) -> Result<IpAddr, Malformed> {
    if family == libc::AF_INET {
        let octets: [u8; 4] = value.try_into().map_err(|_| Malformed)?;
        Ok(octets.into())
    } else {
        let octets: [u8; 16] = value.try_into().map_err(|_| Malformed)?;
        Ok(octets.into())
    }
}

/// The value of `IFLA_INFO_KIND` within `IFLA_LINKINFO`; the outer `None` = malformed.
#[expect(
    clippy::option_option,
    reason = "malformed and absent are different things here"
)]
fn info_kind(nested: &[u8]) -> Option<Option<&[u8]>> {
    for attribute in (Attributes { rest: nested }) {
        let (kind_of, value) = attribute?;
        if kind_of == libc::IFLA_INFO_KIND {
            return Some(Some(until_nul(value)));
        }
    }
    Some(None)
}

/// Whether there is IPv6 on a device, from its `IFLA_AF_SPEC`: it has a part for the family (not, for instance, with an MTU
/// below 1280), and `disable_ipv6` is not set. `None` = malformed.
fn speaks_ipv6(nested: &[u8]) -> Option<bool> {
    let settings = |part| -> Option<bool> {
        for attribute in (Attributes { rest: part }) {
            let (kind, value) = attribute?;
            if kind == IFLA_INET6_CONF {
                return Some(i32_at(value, DEVCONF_DISABLE_IPV6 * size_of::<i32>())? == 0);
            }
        }
        Some(true)
    };
    for attribute in (Attributes { rest: nested }) {
        let (family, part) = attribute?;
        if i32::from(family) == libc::AF_INET6 {
            return settings(part);
        }
    }
    Some(false)
}

/// The kernel takes any 1 to 15 bytes but `/`, `:` and white space (`dev_valid_name`). One that is not UTF-8 is spelled
/// out in a form that no device can have, so that it never equals the name in an object.
fn device_name(value: &[u8]) -> Option<String> {
    let bytes = until_nul(value);
    if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ {
        return None;
    }
    let spelled_out = || {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("not UTF-8: {hex}")
    };
    Some(std::str::from_utf8(bytes).map_or_else(|_| spelled_out(), str::to_owned))
}

pub(super) fn until_nul(value: &[u8]) -> &[u8] {
    value.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Attributes (type, value), in order; a `None` = malformed, after which nothing follows.
pub(super) struct Attributes<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Option<(u16, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let taken = take_attribute(self.rest);
        self.rest = taken.map_or(&[], |(_, _, rest)| rest);
        Some(taken.map(|(kind, value, _)| (kind, value)))
    }
}

fn take_attribute(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::from(u16_at(bytes, 0)?);
    let kind = u16_at(bytes, 2)? & ATTRIBUTE_TYPE;
    let value = bytes.get(ATTRIBUTE_HEADER..length)?;
    let rest = bytes.get(aligned(length)..).unwrap_or_default();
    Some((kind, value, rest))
}

/// Messages and attributes begin at multiples of four (`NLMSG_ALIGNTO`, `NLA_ALIGNTO`).
const fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

pub(super) fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..)?.first_chunk().copied().map(i32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages that a Linux 6.18 sent, as hexadecimal lines.
    fn recorded(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn contents(datagram: &[u8]) -> Vec<Content> {
        messages(datagram)
            .map(|message| message.unwrap().content)
            .collect()
    }

    fn veth() -> Link {
        Link {
            ifindex: 2,
            name: "hfweb0".into(),
            mac: Mac([2, 0, 0, 0, 0, 1]),
            up: true,
            carrier: true,
            kind: LinkKind::Veth { peer_elsewhere: true },
            master: None,
            mtu: 1500,
            ipv6: true,
        }
    }

    const VETH_UP: &str = include_str!("recorded/veth_up.hex");

    #[test]
    fn a_veth_with_its_peer_in_another_namespace() {
        let datagram = recorded(VETH_UP);
        assert_eq!(contents(&datagram), [Content::Present(veth())]);
        let message = messages(&datagram).next().unwrap().unwrap();
        assert_eq!((message.sequence, message.interrupted), (0, false));
    }

    #[test]
    fn a_veth_that_is_being_deleted() {
        let peer_elsewhere = false;
        assert_eq!(
            contents(&recorded(include_str!("recorded/veth_dying.hex"))),
            [Content::Orphaned(Link {
                up: false,
                carrier: false,
                kind: LinkKind::Veth { peer_elsewhere },
                ..veth()
            })]
        );
    }

    #[test]
    fn a_veth_in_a_bridge() {
        let master = Some(5);
        assert_eq!(
            contents(&recorded(include_str!("recorded/veth_in_bridge.hex"))),
            [Content::Present(Link { master, ..veth() })]
        );
    }

    #[test]
    fn a_tap_and_a_tun_without_an_address() {
        let tap = contents(&recorded(include_str!("recorded/tap.hex")));
        let [Content::Present(tap)] = tap.as_slice() else {
            panic!("{tap:?}")
        };
        assert_eq!((tap.name.as_str(), tap.kind), ("hftap0", LinkKind::Tap));
        assert!(!tap.up && !tap.mac.is_unknown());
        let tun = contents(&recorded(include_str!("recorded/tun_no_address.hex")));
        let [Content::Present(tun)] = tun.as_slice() else {
            panic!("{tun:?}")
        };
        assert_eq!((tun.name.as_str(), tun.kind), ("hftun0", LinkKind::Tap));
        assert!(tun.mac.is_unknown());
    }

    #[test]
    fn a_bridges_view_of_its_port_is_not_the_device() {
        assert_eq!(
            contents(&recorded(include_str!("recorded/bridge_port_new.hex"))),
            [Content::Other]
        );
        assert_eq!(
            contents(&recorded(include_str!("recorded/bridge_port_gone.hex"))),
            [Content::Other]
        );
    }

    #[test]
    fn a_device_moved_to_another_namespace_is_gone() {
        assert_eq!(
            contents(&recorded(include_str!("recorded/moved_away.hex"))),
            [Content::Gone(2)]
        );
    }

    #[test]
    fn a_dump_and_a_refusal() {
        let first = contents(&recorded(include_str!("recorded/dump_0.hex")));
        let names: Vec<&str> = first
            .iter()
            .map(|content| match content {
                Content::Present(link) => link.name.as_str(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(names, ["lo", "hftap0", "hftun0"]);
        let rest = contents(&recorded(include_str!("recorded/dump_1.hex")));
        assert!(matches!(rest.as_slice(), [Content::Present(bridge)] if bridge.kind == LinkKind::Bridge));
        assert_eq!(
            contents(&recorded(include_str!("recorded/dump_2.hex"))),
            [Content::Done(0)]
        );
        assert_eq!(
            contents(&recorded(include_str!("recorded/no_such_device.hex"))),
            [Content::Answer(libc::ENODEV)]
        );
    }

    fn own(address: &str, ifindex: Ifindex, network: Option<(u8, &str)>) -> Own {
        Own {
            address: address.parse().unwrap(),
            ifindex,
            network: network.map(|(length, address)| (length, address.parse().unwrap())),
        }
    }

    #[test]
    fn addresses_with_and_without_a_peer() {
        for (hex, address) in [
            (
                include_str!("recorded/v4_address.hex"),
                own("10.0.0.1", 2, Some((24, "10.0.0.1"))),
            ),
            (
                include_str!("recorded/v4_peer.hex"),
                own("10.0.1.1", 2, Some((32, "10.0.1.2"))),
            ),
            (include_str!("recorded/v6_tentative.hex"), own("fd00::3", 2, None)),
            (include_str!("recorded/v6_peer.hex"), own("fd00::1", 2, None)),
        ] {
            assert_eq!(contents(&recorded(hex)), [Content::Address(address)]);
        }
        assert_eq!(
            contents(&recorded(include_str!("recorded/v4_address_gone.hex"))),
            [Content::AddressGone(own("10.0.0.1", 2, Some((24, "10.0.0.1"))))]
        );
    }

    #[test]
    fn a_dump_of_addresses_has_both_families() {
        let said = contents(&recorded(include_str!("recorded/address_dump.hex")));
        let addresses = [
            own("127.0.0.1", 1, Some((8, "127.0.0.1"))),
            own("10.0.1.1", 2, Some((32, "10.0.1.2"))),
            own("::1", 1, None),
            own("fd00::3", 2, None),
            own("fd00::1", 2, None),
            own("fe80::e02b:3bff:fe39:6f28", 2, None),
        ];
        assert_eq!(said, addresses.map(Content::Address));
    }

    #[test]
    fn an_address_that_makes_no_sense_is_not_guessed() {
        let good = recorded(include_str!("recorded/v4_address.hex"));
        // The attribute IFA_ADDRESS is the first: its length, then its family.
        let mut long = good.clone();
        long[24] = 0xff;
        assert_eq!(messages(&long).next(), Some(Err(Malformed)));
        let mut other_family = good.clone();
        other_family[16] = libc::AF_INET6 as u8;
        assert_eq!(messages(&other_family).next(), Some(Err(Malformed)));
        let mut unknown_family = good.clone();
        unknown_family[16] = libc::AF_PHONET as u8;
        assert_eq!(contents(&unknown_family), [Content::Other]);
        // Neither IFA_ADDRESS nor IFA_LOCAL: 0.0.0.0.
        let mut nobodys = good;
        nobodys.truncate(24);
        nobodys[..4].copy_from_slice(&24_u32.to_ne_bytes());
        assert_eq!(contents(&nobodys), [Content::Other]);
    }

    #[test]
    fn an_attribute_of_a_newer_kernel_changes_nothing() {
        let mut datagram = recorded(VETH_UP);
        datagram.extend([8, 0, 0xff, 0x3f, 1, 2, 3, 4]);
        let length = u32::try_from(datagram.len()).unwrap();
        datagram[..4].copy_from_slice(&length.to_ne_bytes());
        assert_eq!(contents(&datagram), [Content::Present(veth())]);
    }

    #[test]
    fn names_that_no_object_can_have() {
        assert_eq!(device_name(b"eth0\0"), Some("eth0".into()));
        assert_eq!(device_name(b"\0"), None);
        assert_eq!(device_name(&[b'a'; 16]), None);
        assert_eq!(device_name(&[0xff, 0xfe, 0]), Some("not UTF-8: fffe".into()));
    }

    #[test]
    fn a_device_that_makes_no_sense_is_named_and_no_more() {
        let mut datagram = recorded(VETH_UP);
        // The first attribute is the name; its length goes beyond the message.
        datagram[32..34].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert_eq!(contents(&datagram), [Content::Unreadable(2)]);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_do_harm(bytes: Vec<u8>) {
            for _ in messages(&bytes) {}
        }

        #[test]
        fn no_cut_and_no_flipped_byte_does_harm(at in 0_usize..1504, with: u8, cut in 0_usize..1504) {
            for hex in [VETH_UP, include_str!("recorded/address_dump.hex")] {
                let mut datagram = recorded(hex);
                if let Some(byte) = datagram.get_mut(at) {
                    *byte = with;
                }
                datagram.truncate(cut);
                for _ in messages(&datagram) {}
            }
        }
    }
}
