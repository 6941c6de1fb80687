//! From the bytes of a datagram to messages about devices.
//!
//! Only the attributes that we use are read, each with its length checked: an attribute that a newer kernel adds, or
//! makes longer, must never turn every message into an undecodable one. All numbers are in host byte order
//! (`linux/netlink.h`, `linux/rtnetlink.h`, `linux/if_link.h`).

use holdfast_engine::model::{Ifindex, Link, LinkKind, Mac};

const NLMSG_HEADER: usize = 16;
const IFINFO_HEADER: usize = 16;
const ATTRIBUTE_HEADER: usize = 4;

const NLMSG_NOOP: u16 = libc::NLMSG_NOOP as u16;
const NLMSG_ERROR: u16 = libc::NLMSG_ERROR as u16;
const NLMSG_DONE: u16 = libc::NLMSG_DONE as u16;
const NLMSG_OVERRUN: u16 = libc::NLMSG_OVERRUN as u16;
const NLM_F_DUMP_INTR: u16 = libc::NLM_F_DUMP_INTR as u16;

/// Upper two bits of an attribute type are flags (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
const ATTRIBUTE_TYPE: u16 = 0x3fff;

/// One message of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Which request it answers; 0 for a notification.
    pub(super) sequence: u32,
    /// The list of devices changed while it was being dumped (`NLM_F_DUMP_INTR`).
    pub(super) interrupted: bool,
    /// What it says.
    pub(super) content: Content,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A device is there.
    Present(Link),
    /// A device is there, but what the message says about it makes no sense.
    Unreadable(Ifindex),
    /// A device is gone from this namespace.
    Gone(Ifindex),
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

fn take_message(bytes: &[u8]) -> Result<(Message, &[u8]), Malformed> {
    let length = u32_at(bytes, 0).ok_or(Malformed)? as usize;
    let kind = u16_at(bytes, 4).ok_or(Malformed)?;
    let flags = u16_at(bytes, 6).ok_or(Malformed)?;
    let sequence = u32_at(bytes, 8).ok_or(Malformed)?;
    let payload = bytes.get(NLMSG_HEADER..length).ok_or(Malformed)?;
    // The padding behind the last message may be missing.
    let rest = bytes.get(aligned(length)..).unwrap_or_default();
    let content = match kind {
        NLMSG_DONE => Content::Done(i32_at(payload, 0).unwrap_or(0).saturating_neg()),
        NLMSG_ERROR => Content::Answer(i32_at(payload, 0).ok_or(Malformed)?.saturating_neg()),
        NLMSG_OVERRUN => Content::Overrun,
        NLMSG_NOOP => Content::Other,
        libc::RTM_NEWLINK | libc::RTM_DELLINK => link_message(kind, payload)?,
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
    Ok(link(ifindex, flags, attributes).map_or(Content::Unreadable(ifindex), Content::Present))
}

fn link(ifindex: Ifindex, flags: u32, attributes: &[u8]) -> Option<Link> {
    let mut name = None;
    let mut mac = Mac::default();
    let mut carrier = false;
    let mut kind = None;
    let mut peer_elsewhere = false;
    let mut master = None;
    let mut mtu = None;
    for attribute in (Attributes { rest: attributes }) {
        let (kind_of, value) = attribute?;
        match kind_of {
            libc::IFLA_IFNAME => name = Some(device_name(value)?),
            // Some devices have no address, or one of another length: it stays unknown.
            libc::IFLA_ADDRESS => mac = <[u8; 6]>::try_from(value).map(Mac).unwrap_or_default(),
            libc::IFLA_CARRIER => carrier = *value.first()? != 0,
            libc::IFLA_MTU => mtu = Some(u32_at(value, 0)?),
            libc::IFLA_MASTER => master = Some(u32_at(value, 0)?).filter(|&ifindex| ifindex != 0),
            // Only there when the other end is in another namespace, whether that has a number yet or not.
            libc::IFLA_LINK_NETNSID => peer_elsewhere = true,
            libc::IFLA_LINKINFO => kind = info_kind(value)?,
            _ => {}
        }
    }
    Some(Link {
        ifindex,
        name: name?,
        mac,
        up: flags & libc::IFF_UP as u32 != 0,
        carrier,
        kind: match kind {
            Some(b"veth") => LinkKind::Veth { peer_elsewhere },
            Some(b"tun") => LinkKind::Tap,
            _ => LinkKind::Other,
        },
        master,
        mtu: mtu?,
    })
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

fn until_nul(value: &[u8]) -> &[u8] {
    value.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Attributes (type, value), in order; a `None` = malformed, after which nothing follows.
struct Attributes<'a> {
    rest: &'a [u8],
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

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..)?.first_chunk().copied().map(i32::from_ne_bytes)
}
