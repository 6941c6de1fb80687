//! The header parser: from the bytes of a frame to the key of its flow.
//!
//! Pure code over anything that gives bytes, so that tests and fuzzers run on the host what the kernel runs. It has
//! no path that panics and no unbounded loop: the verifier follows each.
#![cfg_attr(
    target_arch = "bpf",
    expect(unsafe_code, reason = "the compiler would read a packet byte by byte")
)]

use crate::abi::{Address, FAMILY_V4, FAMILY_V6, FlowKey};

/// A frame.
pub trait Bytes {
    /// Bytes of the whole frame, also those that are not in one piece.
    fn size(&self) -> u32;

    /// `N` bytes from offset `at`; none if the frame ends before.
    fn window<const N: usize>(&mut self, at: u32) -> Option<&[u8; N]>;
}

impl Bytes for &[u8] {
    fn size(&self) -> u32 {
        self.len() as u32
    }

    fn window<const N: usize>(&mut self, at: u32) -> Option<&[u8; N]> {
        self.get(at as usize..)?.first_chunk()
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Not IP (ARP, VLAN-tagged, anything else): never ours.
    NotIp,
    /// IP that is never captured: multicast, link-local, limited broadcast, neighbour and router discovery, DHCP.
    NeverCaptured,
    /// The key is complete. Ports are 0 for protocols other than TCP and UDP.
    Complete,
    /// A fragment that is not the first of its datagram: addresses and protocol are known, the ports are not.
    LaterFragment,
    /// A valid header, but more extension headers than we follow: addresses are known, protocol and ports are not.
    Opaque,
    /// An ICMP or ICMPv6 error: it is about the packet that it quotes ([`parse_quote`]).
    Error,
    /// Not a valid header, or the frame ends in the middle of one.
    Malformed,
}

impl Kind {
    /// From its number; whatever is none is malformed.
    #[inline(always)]
    pub const fn from_u32(number: u32) -> Self {
        match number {
            0 => Self::NotIp,
            1 => Self::NeverCaptured,
            2 => Self::Complete,
            3 => Self::LaterFragment,
            4 => Self::Opaque,
            5 => Self::Error,
            _ => Self::Malformed,
        }
    }
}

/// What the headers say. Only meaningful as far as [`Kind`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Headers {
    /// The key of the flow; its ifindex is left alone.
    pub key: FlowKey,
    /// TCP flags ([`Headers::SYN`], [`Headers::ACK`]); 0 for other protocols.
    pub tcp_flags: u8,
    /// More fragments follow this one.
    pub first_fragment: bool,
    /// Left to whoever judges the sender of an error: its source is none of the interface's.
    pub is_spoofed: bool,
    /// Protocol as all fragments of the datagram carry it.
    pub fragment_protocol: u8,
    /// Identification of the datagram, network order.
    pub fragment_id: u32,
    /// Where in the frame the transport header begins; 0 if this packet has none.
    pub transport: u16,
    /// Where in the frame the transport header that an ICMP error quotes begins; 0 if nothing is quoted.
    pub quoted: u16,
}

impl Headers {
    /// TCP: opens a connection.
    pub const SYN: u8 = 0x02;
    /// TCP: acknowledges.
    pub const ACK: u8 = 0x10;

    /// Whether it is the first packet of a TCP connection.
    #[inline(always)]
    pub const fn opens_connection(&self) -> bool {
        self.tcp_flags & (Self::SYN | Self::ACK) == Self::SYN
    }
}

/// Bytes of an Ethernet header.
pub const ETHERNET: u32 = 14;
/// Extension headers that are followed.
pub const EXTENSION_HEADERS: u32 = 8;
/// EtherType of IPv4.
pub const ETHERTYPE_V4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_V6: u16 = 0x86dd;
/// Protocol number of TCP.
pub const TCP: u8 = 6;
/// Protocol number of UDP.
pub const UDP: u8 = 17;
/// Protocol number of ICMP.
pub const ICMP: u8 = 1;
/// Protocol number of ICMPv6.
pub const ICMP_V6: u8 = 58;
/// Bytes of an ICMP or ICMPv6 header, behind which an error quotes the packet that it is about.
pub const ICMP_HEADER: u32 = 8;

const V4_HEADER: u32 = 20;
const V6_HEADER: u32 = 40;
const TCP_HEADER: u32 = 20;
const UDP_HEADER: u32 = 8;
/// What every extension header has at least.
const EXTENSION_HEADER: u32 = 8;

/// IPv6 next header values that are extension headers (RFC 8200, IANA "IPv6 Extension Header Types").
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
const MOBILITY: u8 = 135;
const HIP: u8 = 139;
const SHIM6: u8 = 140;

/// Reads the headers of a frame into `out`.
#[inline(always)]
pub fn parse(frame: &mut impl Bytes, out: &mut Headers) -> Kind {
    let Some(ethertype) = frame.window::<2>(12) else {
        return Kind::Malformed;
    };
    match u16::from_be(half::<2, 0>(ethertype)) {
        ETHERTYPE_V4 => parse_v4(frame, out),
        ETHERTYPE_V6 => parse_v6(frame, out),
        _ => Kind::NotIp,
    }
}

#[inline(always)]
fn parse_v4(frame: &mut impl Bytes, out: &mut Headers) -> Kind {
    let size = frame.size();
    let Some(header) = frame.window::<20>(ETHERNET) else {
        return Kind::Malformed;
    };
    let header_length = u32::from(header[0] & 0x0f) * 4;
    if header[0] >> 4 != 4 || header_length < V4_HEADER {
        return Kind::Malformed;
    }
    let total = u32::from(u16::from_be(half::<20, 2>(header)));
    let Some(end) = end_of_datagram(size, total, header_length) else {
        return Kind::Malformed;
    };
    let destination = word::<20, 16>(header);
    let key = &mut out.key;
    key.family = FAMILY_V4;
    key.protocol = header[9];
    key.source = v4_address(word::<20, 12>(header));
    key.destination = v4_address(destination);
    if v4_is_never_captured(u32::from_be(destination)) {
        return Kind::NeverCaptured;
    }
    let fragment = u16::from_be(half::<20, 6>(header));
    out.fragment_id = u32::from(half::<20, 4>(header));
    out.fragment_protocol = header[9];
    if fragment & 0x1fff != 0 {
        return Kind::LaterFragment;
    }
    out.first_fragment = fragment & 0x2000 != 0;
    parse_transport(frame, ETHERNET + header_length, end, out)
}

#[inline(always)]
fn parse_v6(frame: &mut impl Bytes, out: &mut Headers) -> Kind {
    let size = frame.size();
    let Some(header) = frame.window::<40>(ETHERNET) else {
        return Kind::Malformed;
    };
    if header[0] >> 4 != 6 {
        return Kind::Malformed;
    }
    let payload = u32::from(u16::from_be(half::<40, 4>(header)));
    let total = if payload == 0 { 0 } else { V6_HEADER + payload };
    let Some(end) = end_of_datagram(size, total, V6_HEADER) else {
        return Kind::Malformed;
    };
    let start = word::<40, 24>(header);
    out.key.family = FAMILY_V6;
    out.key.source = address([double::<40, 8>(header), double::<40, 16>(header)]);
    out.key.destination = address([double::<40, 24>(header), double::<40, 32>(header)]);
    let mut next = header[6];
    if v6_is_never_captured(u32::from_be(start)) {
        return Kind::NeverCaptured;
    }
    let mut at = ETHERNET + V6_HEADER;
    for _ in 0..=EXTENSION_HEADERS {
        let Some(unit) = extension_unit(next) else {
            out.key.protocol = next;
            return parse_transport(frame, at, end, out);
        };
        let Some(extension) = frame.window::<8>(at) else {
            return Kind::Malformed;
        };
        at += EXTENSION_HEADER + u32::from(extension[1]) * unit;
        // A header that reaches beyond its datagram has nothing behind it, of whatever protocol.
        if at > end {
            return Kind::Malformed;
        }
        if next == FRAGMENT {
            let fragment = u16::from_be(half::<8, 2>(extension));
            out.fragment_id = word::<8, 4>(extension);
            out.fragment_protocol = extension[0];
            if fragment & 0xfff8 != 0 {
                out.key.protocol = extension[0];
                return Kind::LaterFragment;
            }
            out.first_fragment = fragment & 1 != 0;
        }
        next = extension[0];
    }
    Kind::Opaque
}

/// Bytes for each unit that an extension header counts beyond its first eight bytes; none if `next` is no extension
/// header.
#[inline(always)]
const fn extension_unit(next: u8) -> Option<u32> {
    match next {
        HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HIP | SHIM6 => Some(8),
        AUTHENTICATION => Some(4),
        FRAGMENT => Some(0),
        _ => None,
    }
}

/// Reads the packet that an ICMP error quotes. The key in `out`, so far the error's own, becomes that of the flow as
/// packets from here have it: the quoted one with its ends exchanged. False if nothing useful is quoted, or a packet
/// that was not sent by whom the error is for.
#[inline(always)]
pub fn parse_quote(frame: &mut impl Bytes, out: &mut Headers) -> bool {
    let at = u32::from(out.transport) + ICMP_HEADER;
    // No header that was read begins there; and the verifier follows no pointer further than 64 KiB into a packet.
    if at > 0x8000 {
        return false;
    }
    let transport = if out.key.family == FAMILY_V4 {
        quoted_v4(frame, at, out)
    } else {
        quoted_v6(frame, at, out)
    };
    let Some(transport) = transport else {
        return false;
    };
    if matches!(out.key.protocol, TCP | UDP) {
        // All that must be quoted of a transport header is its first eight bytes (RFC 792).
        let Some(ports) = frame.window::<4>(transport) else {
            return false;
        };
        out.key.destination_port = half::<4, 0>(ports);
        out.key.source_port = half::<4, 2>(ports);
    }
    out.quoted = transport as u16;
    true
}

/// Addresses and protocol of a quoted IPv4 packet, and where its transport header begins.
#[inline(always)]
fn quoted_v4(frame: &mut impl Bytes, at: u32, out: &mut Headers) -> Option<u32> {
    let header = frame.window::<20>(at)?;
    let header_length = u32::from(header[0] & 0x0f) * 4;
    let is_later_fragment = u16::from_be(half::<20, 6>(header)) & 0x1fff != 0;
    if header[0] >> 4 != 4 || header_length < V4_HEADER || is_later_fragment {
        return None;
    }
    let source = v4_address(word::<20, 12>(header));
    if source != out.key.destination {
        return None;
    }
    out.key.source = v4_address(word::<20, 16>(header));
    out.key.protocol = header[9];
    Some(at + header_length)
}

/// As [`quoted_v4`].
#[inline(always)]
fn quoted_v6(frame: &mut impl Bytes, mut at: u32, out: &mut Headers) -> Option<u32> {
    let header = frame.window::<40>(at)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let source = address([double::<40, 8>(header), double::<40, 16>(header)]);
    if source != out.key.destination {
        return None;
    }
    out.key.source = address([double::<40, 24>(header), double::<40, 32>(header)]);
    let mut next = header[6];
    at += V6_HEADER;
    for _ in 0..=EXTENSION_HEADERS {
        let Some(unit) = extension_unit(next) else {
            out.key.protocol = next;
            return Some(at);
        };
        let extension = frame.window::<8>(at)?;
        if next == FRAGMENT && u16::from_be(half::<8, 2>(extension)) & 0xfff8 != 0 {
            return None;
        }
        at += EXTENSION_HEADER + u32::from(extension[1]) * unit;
        next = extension[0];
    }
    None
}

/// Where the datagram ends in the frame; none if it is longer than the frame or shorter than its own header.
///
/// 0 stands for "as long as the frame": GSO packets above 64 KiB say that (BIG TCP, Linux 5.19 and 6.3).
#[inline(always)]
fn end_of_datagram(size: u32, total: u32, header_length: u32) -> Option<u32> {
    let end = if total == 0 { size } else { ETHERNET + total };
    (end <= size && ETHERNET + header_length <= end).then_some(end)
}

#[inline(always)]
fn parse_transport(frame: &mut impl Bytes, at: u32, end: u32, out: &mut Headers) -> Kind {
    // Eight extension headers of 2 KiB each fit.
    out.transport = at as u16;
    match out.key.protocol {
        TCP => {
            // Also refuses first fragments that end within the header: nobody sends such in good faith (RFC 1858).
            if at + TCP_HEADER > end {
                return Kind::Malformed;
            }
            let Some(header) = frame.window::<14>(at) else {
                return Kind::Malformed;
            };
            out.key.source_port = half::<14, 0>(header);
            out.key.destination_port = half::<14, 2>(header);
            out.tcp_flags = header[13];
            Kind::Complete
        }
        UDP => {
            if at + UDP_HEADER > end {
                return Kind::Malformed;
            }
            let Some(header) = frame.window::<4>(at) else {
                return Kind::Malformed;
            };
            let (source, destination) = (half::<4, 0>(header), half::<4, 2>(header));
            out.key.source_port = source;
            out.key.destination_port = destination;
            if is_dhcp(out.key.family, u16::from_be(source), u16::from_be(destination)) {
                Kind::NeverCaptured
            } else {
                Kind::Complete
            }
        }
        ICMP if out.key.family == FAMILY_V4 => parse_icmp(frame, at, end, kind_of_icmp),
        ICMP_V6 if out.key.family == FAMILY_V6 => parse_icmp(frame, at, end, kind_of_icmp_v6),
        _ => Kind::Complete,
    }
}

#[inline(always)]
fn parse_icmp(frame: &mut impl Bytes, at: u32, end: u32, kind_of: impl Fn(u8) -> Kind) -> Kind {
    if at + 1 > end {
        return Kind::Malformed;
    }
    match frame.window::<1>(at) {
        Some([number]) => kind_of(*number),
        None => Kind::Malformed,
    }
}

/// By the ICMP type: destination unreachable, source quench, time exceeded, parameter problem (RFC 792); redirect, router
/// advertisement and solicitation (RFC 792, 1256).
#[inline(always)]
const fn kind_of_icmp(number: u8) -> Kind {
    match number {
        3 | 4 | 11 | 12 => Kind::Error,
        5 | 9 | 10 => Kind::NeverCaptured,
        _ => Kind::Complete,
    }
}

/// By the ICMPv6 type: errors (RFC 4443); router and neighbour solicitation and advertisement, redirect (RFC 4861).
#[inline(always)]
const fn kind_of_icmp_v6(number: u8) -> Kind {
    match number {
        0..128 => Kind::Error,
        133..=137 => Kind::NeverCaptured,
        _ => Kind::Complete,
    }
}

/// Multicast (224.0.0.0/4), link-local (169.254.0.0/16), limited broadcast.
#[inline(always)]
const fn v4_is_never_captured(address: u32) -> bool {
    address >> 28 == 0xe || address >> 16 == 0xa9fe || address == u32::MAX
}

/// Multicast (ff00::/8), link-local (fe80::/10), by the first 32 bits.
#[inline(always)]
const fn v6_is_never_captured(start: u32) -> bool {
    start >> 24 == 0xff || start >> 22 == 0xfe80 >> 6
}

/// Between a DHCP client and a server or relay, as the ports say.
#[inline(always)]
const fn is_dhcp(family: u8, source: u16, destination: u16) -> bool {
    let (client, server) = if family == FAMILY_V4 { (68, 67) } else { (546, 547) };
    (source == client || source == server) && (destination == client || destination == server)
}

/// Two bytes of a window as they lie in memory.
#[inline(always)]
fn half<const N: usize, const AT: usize>(window: &[u8; N]) -> u16 {
    const { assert!(AT + 2 <= N) };
    #[cfg(target_arch = "bpf")]
    // SAFETY: within the window, as asserted. BPF loads need no alignment: the verifier checks it as far as the
    // machine asks for it, and knows that the kernel aligns IP headers.
    return unsafe { core::ptr::read_volatile(window.as_ptr().add(AT).cast()) };
    #[cfg(not(target_arch = "bpf"))]
    u16::from_ne_bytes([window[AT], window[AT + 1]])
}

/// Four bytes of a window as they lie in memory.
#[inline(always)]
fn word<const N: usize, const AT: usize>(window: &[u8; N]) -> u32 {
    const { assert!(AT + 4 <= N) };
    #[cfg(target_arch = "bpf")]
    // SAFETY: as in `half`.
    return unsafe { core::ptr::read_volatile(window.as_ptr().add(AT).cast()) };
    #[cfg(not(target_arch = "bpf"))]
    u32::from_ne_bytes([window[AT], window[AT + 1], window[AT + 2], window[AT + 3]])
}

/// Eight bytes of a window as they lie in memory.
#[inline(always)]
fn double<const N: usize, const AT: usize>(window: &[u8; N]) -> u64 {
    const { assert!(AT + 8 <= N) };
    #[cfg(target_arch = "bpf")]
    // SAFETY: as in `half`.
    return unsafe { core::ptr::read_volatile(window.as_ptr().add(AT).cast()) };
    #[cfg(not(target_arch = "bpf"))]
    {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&window[AT..AT + 8]);
        u64::from_ne_bytes(bytes)
    }
}

/// Two words as they lay in memory. Written as words: a word that is read back as it was written does not wait.
#[inline(always)]
fn address(words: [u64; 2]) -> Address {
    #[cfg(target_arch = "bpf")]
    // SAFETY: both are sixteen bytes without padding or forbidden values.
    return unsafe { core::mem::transmute::<[u64; 2], Address>(words) };
    #[cfg(not(target_arch = "bpf"))]
    {
        let mut address = Address::default();
        for (bytes, word) in address.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        address
    }
}

/// An IPv4 address as it lay in memory, and zeroes.
#[inline(always)]
fn v4_address(word: u32) -> Address {
    let word = u64::from(word);
    address([
        if cfg!(target_endian = "little") {
            word
        } else {
            word << 32
        },
        0,
    ])
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// A frame to be built.
    #[derive(Clone, Debug)]
    struct Frame {
        v6: bool,
        source: [u8; 16],
        destination: [u8; 16],
        /// IPv4: words of options. IPv6: extension headers (kind, further units).
        options: u8,
        extensions: Vec<(u8, u8)>,
        /// Offset (in units of 8 bytes), more fragments, identification.
        fragment: Option<(u16, bool, u32)>,
        protocol: u8,
        source_port: u16,
        destination_port: u16,
        flags: u8,
        payload: usize,
        /// Ethernet padding behind the datagram.
        padding: usize,
        /// The length field says 0 (BIG TCP).
        no_length: bool,
    }

    impl Frame {
        fn transport(&self) -> Vec<u8> {
            let mut bytes = Vec::new();
            bytes.extend(self.source_port.to_be_bytes());
            bytes.extend(self.destination_port.to_be_bytes());
            match self.protocol {
                TCP => {
                    bytes.extend([0; 8]);
                    bytes.extend([0x50, self.flags, 0, 0, 0, 0, 0, 0]);
                }
                UDP => bytes.extend([0; 4]),
                // An ICMP message of the type that `flags` says; enough for anything else.
                _ => bytes = vec![self.flags, 0, 0, 0, 0, 0, 0, 0],
            }
            bytes.resize(bytes.len() + self.payload, 0xaa);
            bytes
        }

        fn bytes(&self) -> Vec<u8> {
            let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
            let later = self.fragment.is_some_and(|(offset, _, _)| offset != 0);
            let rest = if later {
                vec![0x55; self.payload]
            } else {
                self.transport()
            };
            if self.v6 {
                self.v6_bytes(&mut bytes, &rest);
            } else {
                self.v4_bytes(&mut bytes, &rest);
            }
            bytes.resize(bytes.len() + self.padding, 0);
            bytes
        }

        /// Where the transport header begins.
        fn transport_at(&self) -> usize {
            let mut at = if self.v6 {
                54
            } else {
                34 + usize::from(self.options) * 4
            };
            if self.v6 {
                for &(kind, units) in &self.extensions {
                    at += 8 + usize::from(units) * if kind == AUTHENTICATION { 4 } else { 8 };
                }
                at += self.fragment.map_or(0, |_| 8);
            }
            at
        }

        fn v4_bytes(&self, bytes: &mut Vec<u8>, rest: &[u8]) {
            bytes.extend(ETHERTYPE_V4.to_be_bytes());
            let words = 5 + self.options;
            let total = if self.no_length {
                0
            } else {
                usize::from(words) * 4 + rest.len()
            };
            let (offset, more, id) = self.fragment.unwrap_or_default();
            bytes.extend([0x40 | words, 0]);
            bytes.extend((total as u16).to_be_bytes());
            bytes.extend((id as u16).to_be_bytes());
            bytes.extend((offset | if more { 0x2000 } else { 0 }).to_be_bytes());
            bytes.extend([64, self.protocol, 0, 0]);
            bytes.extend(&self.source[..4]);
            bytes.extend(&self.destination[..4]);
            bytes.resize(bytes.len() + usize::from(self.options) * 4, 1);
            bytes.extend(rest);
        }

        fn v6_bytes(&self, bytes: &mut Vec<u8>, rest: &[u8]) {
            bytes.extend(ETHERTYPE_V6.to_be_bytes());
            let mut chain: Vec<(u8, Vec<u8>)> = self
                .extensions
                .iter()
                .map(|&(kind, units)| {
                    let length = match kind {
                        AUTHENTICATION => 8 + usize::from(units) * 4,
                        _ => 8 + usize::from(units) * 8,
                    };
                    let mut header = vec![0; length];
                    header[1] = units;
                    (kind, header)
                })
                .collect();
            if let Some((offset, more, id)) = self.fragment {
                let mut header = vec![0, 0];
                header.extend((offset << 3 | u16::from(more)).to_be_bytes());
                header.extend(id.to_be_bytes());
                chain.push((FRAGMENT, header));
            }
            let kinds: Vec<u8> = chain
                .iter()
                .map(|(kind, _)| *kind)
                .chain([self.protocol])
                .collect();
            let mut payload = Vec::new();
            for (index, (_, mut header)) in chain.into_iter().enumerate() {
                header[0] = kinds[index + 1];
                payload.extend(header);
            }
            payload.extend(rest);
            let length = if self.no_length { 0 } else { payload.len() };
            bytes.extend([0x60, 0, 0, 0]);
            bytes.extend((length as u16).to_be_bytes());
            bytes.extend([kinds[0], 64]);
            bytes.extend(self.source);
            bytes.extend(self.destination);
            bytes.extend(payload);
        }

        fn expected(&self) -> (Kind, Headers) {
            let mut headers = Headers::default();
            let mut kind = Kind::Complete;
            let never = if self.v6 {
                matches!(self.destination, [0xff, ..] | [0xfe, 0x80..=0xbf, ..])
            } else {
                matches!(
                    self.destination,
                    [224..=239, ..] | [169, 254, ..] | [255, 255, 255, 255, ..]
                )
            };
            let key = &mut headers.key;
            key.family = if self.v6 { FAMILY_V6 } else { FAMILY_V4 };
            (key.source, key.destination) = if self.v6 {
                (self.source, self.destination)
            } else {
                let cut = |address: &Address| {
                    let mut cut = Address::default();
                    cut[..4].copy_from_slice(&address[..4]);
                    cut
                };
                (cut(&self.source), cut(&self.destination))
            };
            if never {
                kind = Kind::NeverCaptured;
                if self.v6 {
                    return (kind, headers);
                }
            }
            key.protocol = self.protocol;
            if never {
                return (kind, headers);
            }
            let (offset, more, id) = self.fragment.unwrap_or_default();
            if !self.v6 {
                headers.fragment_id = u32::from((id as u16).to_be());
                headers.fragment_protocol = self.protocol;
            } else if self.fragment.is_some() {
                headers.fragment_id = id.to_be();
                headers.fragment_protocol = self.protocol;
            }
            if offset != 0 {
                return (Kind::LaterFragment, headers);
            }
            headers.first_fragment = more;
            headers.transport = self.transport_at() as u16;
            if self.protocol == ICMP && !self.v6 || self.protocol == ICMP_V6 && self.v6 {
                let error = if self.v6 {
                    self.flags < 128
                } else {
                    matches!(self.flags, 3 | 4 | 11 | 12)
                };
                let never = if self.v6 {
                    matches!(self.flags, 133..=137)
                } else {
                    matches!(self.flags, 5 | 9 | 10)
                };
                kind = match (error, never) {
                    (true, _) => Kind::Error,
                    (_, true) => Kind::NeverCaptured,
                    _ => Kind::Complete,
                };
            }
            if matches!(self.protocol, TCP | UDP) {
                key.source_port = self.source_port.to_be();
                key.destination_port = self.destination_port.to_be();
            }
            if self.protocol == TCP {
                headers.tcp_flags = self.flags;
            }
            if self.protocol == UDP && is_dhcp(key.family, self.source_port, self.destination_port) {
                kind = Kind::NeverCaptured;
            }
            (kind, headers)
        }
    }

    fn read(bytes: &[u8]) -> (Kind, Headers) {
        let mut headers = Headers::default();
        let kind = parse(&mut &*bytes, &mut headers);
        (kind, headers)
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let extension = (
            prop_oneof![
                Just(HOP_BY_HOP),
                Just(ROUTING),
                Just(AUTHENTICATION),
                Just(DESTINATION_OPTIONS),
                Just(MOBILITY),
                Just(HIP),
                Just(SHIM6)
            ],
            0u8..6,
        );
        let port = prop_oneof![
            Just(53u16),
            Just(67),
            Just(68),
            Just(546),
            Just(547),
            any::<u16>()
        ];
        (
            (any::<bool>(), any::<[u8; 16]>(), any::<[u8; 16]>(), 0u8..=10),
            prop::collection::vec(extension, 0..=7),
            prop::option::weighted(0.3, (0u16..0x2000, any::<bool>(), any::<u32>())),
            (
                prop_oneof![
                    Just(TCP),
                    Just(UDP),
                    Just(ICMP),
                    Just(ICMP_V6),
                    Just(50),
                    Just(59),
                    Just(132)
                ],
                port.clone(),
                port,
                any::<u8>(),
            ),
            (0usize..200, 0usize..20, prop::bool::weighted(0.1)),
        )
            .prop_map(
                |(
                    (v6, source, destination, options),
                    extensions,
                    fragment,
                    (protocol, source_port, destination_port, flags),
                    (payload, padding, no_length),
                )| Frame {
                    v6,
                    source,
                    destination,
                    options,
                    extensions,
                    // A later fragment has a payload that its offset leaves room for; the parser does not ask.
                    fragment,
                    protocol,
                    source_port,
                    destination_port,
                    flags,
                    payload,
                    // Without a length nothing tells padding from payload.
                    padding: if no_length { 0 } else { padding },
                    no_length,
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

        #[test]
        fn frames_are_read_as_they_were_built(frame in frames()) {
            prop_assert_eq!(read(&frame.bytes()), frame.expected());
        }

        /// An error that quotes what somebody sent, from its first bytes on.
        #[test]
        fn a_quote_is_read_as_the_flow_of_who_sends_it(sent in frames(), keep in 8usize..64, other: bool) {
            let mut error = udp(sent.v6);
            error.protocol = if sent.v6 { ICMP_V6 } else { ICMP };
            error.flags = if sent.v6 { 1 } else { 3 };
            error.destination = sent.source;
            if other {
                error.destination[3] ^= 1;
            }
            error.payload = 0;
            let mut bytes = error.bytes();
            let quote = sent.bytes();
            let quote = &quote[ETHERNET as usize..(sent.transport_at() + keep).min(quote.len())];
            bytes.extend(quote);
            let length = (bytes.len() - ETHERNET as usize) as u16;
            let (at, length) = if sent.v6 { (18, length - 40) } else { (16, length) };
            bytes[at..at + 2].copy_from_slice(&length.to_be_bytes());
            let (kind, mut headers) = read(&bytes);
            // Who asked is not reached by multicast.
            prop_assume!(kind == Kind::Error);
            let found = parse_quote(&mut &*bytes, &mut headers);
            let later = sent.fragment.is_some_and(|(offset, _, _)| offset != 0);
            prop_assert_eq!(found, !later && !other);
            if found {
                let (_, expected) = Frame { destination: [10; 16], ..sent.clone() }.expected();
                let destination = Frame { source: sent.destination, destination: [10; 16], ..sent.clone() };
                prop_assert_eq!(headers.key.protocol, sent.protocol);
                prop_assert_eq!(headers.key.source, destination.expected().1.key.source);
                prop_assert_eq!(headers.key.destination, expected.key.source);
                prop_assert_eq!(headers.key.source_port, expected.key.destination_port);
                prop_assert_eq!(headers.key.destination_port, expected.key.source_port);
                let outer = if sent.v6 { 40 } else { 20 };
                prop_assert_eq!(usize::from(headers.quoted), sent.transport_at() + outer + 8);
            }
        }

        #[test]
        fn a_frame_that_is_cut_off_is_never_taken_for_a_complete_one(frame in frames(), at in any::<prop::sample::Index>()) {
            let mut frame = frame;
            frame.no_length = false;
            frame.padding = 0;
            let (kind, _) = frame.expected();
            let bytes = frame.bytes();
            let cut = &bytes[..at.index(bytes.len())];
            let (cut_kind, _) = read(cut);
            prop_assert!(
                matches!(cut_kind, Kind::Malformed),
                "{kind:?} became {cut_kind:?} when cut from {} to {}", bytes.len(), cut.len()
            );
        }

        #[test]
        fn any_bytes_give_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..300), v6 in any::<bool>()) {
            let mut bytes = bytes;
            read(&bytes);
            if bytes.len() > 14 {
                let ethertype = if v6 { ETHERTYPE_V6 } else { ETHERTYPE_V4 };
                bytes[12..14].copy_from_slice(&ethertype.to_be_bytes());
                bytes[14] = if v6 { 0x60 } else { 0x45 };
                let (_, mut headers) = read(&bytes);
                parse_quote(&mut &*bytes, &mut headers);
            }
        }
    }

    fn udp(v6: bool) -> Frame {
        let mut source = [0; 16];
        let mut destination = [0; 16];
        if v6 {
            source[..2].copy_from_slice(&[0xfd, 0]);
            destination[..2].copy_from_slice(&[0xfd, 0x53]);
        } else {
            source[..4].copy_from_slice(&[10, 0, 0, 11]);
            destination[..4].copy_from_slice(&[10, 96, 0, 10]);
        }
        Frame {
            v6,
            source,
            destination,
            options: 0,
            extensions: Vec::new(),
            fragment: None,
            protocol: UDP,
            source_port: 5000,
            destination_port: 53,
            flags: 0,
            payload: 4,
            padding: 0,
            no_length: false,
        }
    }

    #[test]
    fn eight_extension_headers_are_followed_and_not_nine() {
        let mut frame = udp(true);
        frame.extensions = vec![(DESTINATION_OPTIONS, 1); EXTENSION_HEADERS as usize];
        assert_eq!(read(&frame.bytes()).0, Kind::Complete);
        frame.extensions.push((DESTINATION_OPTIONS, 1));
        let (kind, headers) = read(&frame.bytes());
        assert_eq!(kind, Kind::Opaque);
        assert_eq!(headers.key.destination, frame.destination);
    }

    #[test]
    fn never_captured() {
        let v4_destinations = [
            [224, 0, 0, 1],
            [239, 255, 255, 250],
            [255, 255, 255, 255],
            [169, 254, 1, 2],
        ];
        for address in v4_destinations {
            let mut frame = udp(false);
            frame.destination[..4].copy_from_slice(&address);
            assert_eq!(read(&frame.bytes()).0, Kind::NeverCaptured, "{address:?}");
        }
        for start in [[0xff, 0x02], [0xfe, 0x80], [0xfe, 0xbf]] {
            let mut frame = udp(true);
            frame.destination[..2].copy_from_slice(&start);
            assert_eq!(read(&frame.bytes()).0, Kind::NeverCaptured, "{start:?}");
        }
        for start in [[0xfe, 0xc0], [0xfd, 0x80]] {
            let mut frame = udp(true);
            frame.destination[..2].copy_from_slice(&start);
            assert_eq!(read(&frame.bytes()).0, Kind::Complete, "{start:?}");
        }
        // Neighbour solicitation to a unicast address, as probes of reachability are.
        let mut frame = udp(true);
        frame.protocol = ICMP_V6;
        let mut bytes = frame.bytes();
        for kind in 133..=137 {
            bytes[54] = kind;
            assert_eq!(read(&bytes).0, Kind::NeverCaptured, "{kind}");
        }
        bytes[54] = 128;
        assert_eq!(read(&bytes).0, Kind::Complete);
        // Redirects and router discovery of IPv4.
        let mut frame = udp(false);
        frame.protocol = ICMP;
        let mut bytes = frame.bytes();
        for kind in [5, 9, 10] {
            bytes[34] = kind;
            assert_eq!(read(&bytes).0, Kind::NeverCaptured, "{kind}");
        }
        bytes[34] = 8;
        assert_eq!(read(&bytes).0, Kind::Complete);
    }

    #[test]
    fn other_ethertypes_are_not_ip() {
        for ethertype in [0x0806u16, 0x8100, 0x88a8, 0x0026, 0x86dc] {
            let mut bytes = udp(false).bytes();
            bytes[12..14].copy_from_slice(&ethertype.to_be_bytes());
            assert_eq!(read(&bytes).0, Kind::NotIp, "{ethertype:#x}");
        }
    }

    #[test]
    fn headers_that_contradict_themselves_are_malformed() {
        let good = udp(false).bytes();
        for (at, value) in [(14, 0x65), (14, 0x44), (16, 0xff), (17, 10)] {
            let mut bytes = good.clone();
            bytes[at] = value;
            assert_eq!(read(&bytes).0, Kind::Malformed, "byte {at} = {value}");
        }
        let mut bytes = udp(true).bytes();
        bytes[14] = 0x45;
        assert_eq!(read(&bytes).0, Kind::Malformed);
    }

    #[test]
    fn an_extension_header_that_reaches_beyond_the_datagram_is_malformed() {
        let mut frame = udp(true);
        // ESP: nothing of what would be behind the header is looked at.
        frame.protocol = 50;
        frame.extensions = vec![(AUTHENTICATION, 1)];
        let mut bytes = frame.bytes();
        assert_eq!(read(&bytes).0, Kind::Complete);
        let length = &mut bytes[55];
        assert_eq!(*length, 1);
        *length = 0x32;
        assert_eq!(read(&bytes).0, Kind::Malformed);
    }

    #[test]
    fn a_first_fragment_that_ends_within_the_tcp_header_is_malformed() {
        let mut frame = udp(false);
        frame.protocol = TCP;
        frame.fragment = Some((0, true, 7));
        let mut bytes = frame.bytes();
        // 20 bytes of header, 16 of TCP.
        bytes[17] = 36;
        assert_eq!(read(&bytes).0, Kind::Malformed);
    }
}
