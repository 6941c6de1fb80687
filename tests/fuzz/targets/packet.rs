//! The header parser of the BPF program, against a slow one that was written apart from it, and on frames of which every
//! window is a copy that the next one overwrites.
#![no_main]

use holdfast_ebpf::abi::{FAMILY_V4, FAMILY_V6};
use holdfast_ebpf::parse::{Bytes, Headers, Kind, parse, parse_quote};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    let mut headers = Headers::default();
    let kind = parse(&mut &*frame, &mut headers);

    let mut copied = Headers::default();
    let mut copies = Copies {
        frame,
        window: [0; 64],
    };
    assert_eq!((parse(&mut copies, &mut copied), copied), (kind, headers));

    let said = slow(frame);
    assert_eq!(kind, said.kind, "{said:?}");
    let key = &headers.key;
    match kind {
        Kind::NotIp | Kind::NeverCaptured | Kind::Malformed => {}
        Kind::Complete => {
            assert_eq!(addresses(&headers), said.addresses);
            assert_eq!(key.protocol, said.protocol);
            assert_eq!(
                (u16::from_be(key.source_port), u16::from_be(key.destination_port)),
                said.ports
            );
            assert_eq!(headers.tcp_flags, said.tcp_flags);
            assert_eq!(headers.first_fragment, said.more_fragments);
            if said.more_fragments {
                assert_eq!(headers.fragment_id.to_ne_bytes()[..], said.fragment_id[..4]);
                assert_eq!(headers.fragment_protocol, said.fragment_protocol);
            }
        }
        Kind::LaterFragment => {
            assert_eq!(addresses(&headers), said.addresses);
            assert_eq!(headers.fragment_id.to_ne_bytes()[..], said.fragment_id[..4]);
            assert_eq!(headers.fragment_protocol, said.fragment_protocol);
        }
        Kind::Opaque => assert_eq!(addresses(&headers), said.addresses),
        Kind::Error => {
            assert_eq!(addresses(&headers), said.addresses);
            quote(frame, headers, &mut copies, copied, &said);
        }
    }
});

/// The packet that an error quotes becomes the flow that the error is about, as packets from here have it.
fn quote(frame: &[u8], mut headers: Headers, copies: &mut Copies<'_>, mut copied: Headers, said: &Said) {
    let useful = parse_quote(&mut &*frame, &mut headers);
    assert_eq!((parse_quote(copies, &mut copied), copied), (useful, headers));
    let (family, _, receiver) = &said.addresses;
    // Behind the eight bytes of the error's own header.
    let quoted = said
        .payload
        .get(8..)
        .and_then(|quoted| slow_quote(*family, quoted));
    let sent_by_receiver = quoted.filter(|quoted| quoted.source == *receiver);
    assert_eq!(useful, sent_by_receiver.is_some(), "{said:?}");
    if let Some(quoted) = sent_by_receiver {
        let key = &headers.key;
        assert_eq!(
            addresses(&headers),
            (*family, quoted.destination.to_vec(), receiver.clone())
        );
        assert_eq!(key.protocol, quoted.protocol);
        assert_eq!(
            (u16::from_be(key.destination_port), u16::from_be(key.source_port)),
            quoted.ports
        );
        assert_eq!(
            frame.len().saturating_sub(headers.quoted.into()),
            quoted.transport.len()
        );
    }
}

/// What a quoted packet says.
struct Quoted<'a> {
    source: &'a [u8],
    destination: &'a [u8],
    protocol: u8,
    ports: (u16, u16),
    /// The quote from its transport header on.
    transport: &'a [u8],
}

/// A quote may be cut off anywhere behind its ports. None: it does not say of which flow it is.
fn slow_quote(family: u8, quoted: &[u8]) -> Option<Quoted<'_>> {
    let (source, destination, protocol, transport) = if family == FAMILY_V4 {
        let header = usize::from(quoted.first()? & 15) * 4;
        let is_first = quoted.get(6)? & 0x1f == 0 && *quoted.get(7)? == 0;
        if quoted.len() < 20 || quoted[0] >> 4 != 4 || header < 20 || !is_first {
            return None;
        }
        let behind = quoted.get(header..).unwrap_or_default();
        (&quoted[12..16], &quoted[16..20], quoted[9], behind)
    } else {
        if quoted.len() < 40 || quoted[0] >> 4 != 6 {
            return None;
        }
        let mut next = quoted[6];
        let mut behind = &quoted[40..];
        let mut followed = 0;
        while let Some(unit) = unit_of_extension(next) {
            let header = 8 + usize::from(behind.first_chunk::<8>()?[1]) * unit;
            if next == 44 && (behind[2] != 0 || behind[3] & 0xf8 != 0) {
                return None;
            }
            next = behind[0];
            behind = behind.get(header..).unwrap_or_default();
            followed += 1;
            if followed > 8 {
                return None;
            }
        }
        (&quoted[8..24], &quoted[24..40], next, behind)
    };
    let ports = match (protocol, transport) {
        (6 | 17, [a, b, c, d, ..]) => (u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d])),
        (6 | 17, _) => return None,
        _ => (0, 0),
    };
    Some(Quoted {
        source,
        destination,
        protocol,
        ports,
        transport,
    })
}

/// Family, source, destination.
type Addresses = (u8, Vec<u8>, Vec<u8>);

fn addresses(headers: &Headers) -> Addresses {
    let key = &headers.key;
    let length = if key.family == FAMILY_V4 { 4 } else { 16 };
    for address in [key.source, key.destination] {
        assert!(
            address[length..].iter().all(|byte| *byte == 0),
            "keys are compared whole"
        );
    }
    (
        key.family,
        key.source[..length].to_vec(),
        key.destination[..length].to_vec(),
    )
}

/// A frame of which nothing lies in one piece.
struct Copies<'a> {
    frame: &'a [u8],
    window: [u8; 64],
}

impl Bytes for Copies<'_> {
    fn size(&self) -> u32 {
        self.frame.len() as u32
    }

    fn window<const N: usize>(&mut self, at: u32) -> Option<&[u8; N]> {
        let bytes = self.frame.get(at as usize..)?.get(..N)?;
        self.window = [0xa5; 64];
        self.window[..N].copy_from_slice(bytes);
        self.window.first_chunk()
    }
}

/// What the slow parser says.
#[derive(Debug)]
struct Said {
    kind: Kind,
    addresses: Addresses,
    protocol: u8,
    ports: (u16, u16),
    tcp_flags: u8,
    more_fragments: bool,
    /// As it lies in the packet; two bytes and two zeroes for IPv4.
    fragment_id: Vec<u8>,
    fragment_protocol: u8,
    /// The datagram from its transport header on, and whatever else is in the frame.
    payload: Vec<u8>,
}

impl Said {
    fn new() -> Self {
        Self {
            kind: Kind::Complete,
            addresses: Addresses::default(),
            protocol: 0,
            ports: (0, 0),
            tcp_flags: 0,
            more_fragments: false,
            fragment_id: vec![0; 4],
            fragment_protocol: 0,
            payload: Vec::new(),
        }
    }

    fn of(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }
}

/// From the documents: RFC 791, 8200, 4302, 4861, 2131, 8415. Takes the datagram out of the frame first, and cuts a
/// header off it at a time.
fn slow(frame: &[u8]) -> Said {
    let said = Said::new();
    let Some((ethernet, rest)) = frame.split_at_checked(14) else {
        // Too short even to say what it is, unless the type is there and is none of ours.
        return match frame.get(12..14) {
            Some(kind) if kind != [8, 0] && kind != [0x86, 0xdd] => said.of(Kind::NotIp),
            _ => said.of(Kind::Malformed),
        };
    };
    match ethernet[12..] {
        [0x08, 0x00] => slow_v4(said, rest),
        [0x86, 0xdd] => slow_v6(said, rest),
        _ => said.of(Kind::NotIp),
    }
}

/// The datagram within what the frame carries: behind it there may be padding.
fn datagram(rest: &[u8], length: usize) -> Option<&[u8]> {
    if length == 0 {
        Some(rest)
    } else {
        rest.get(..length)
    }
}

fn slow_v4(mut said: Said, rest: &[u8]) -> Said {
    if rest.len() < 20 || rest[0] >> 4 != 4 {
        return said.of(Kind::Malformed);
    }
    let header = usize::from(rest[0] & 15) * 4;
    let length = usize::from(rest[2]) << 8 | usize::from(rest[3]);
    let Some(datagram) = datagram(rest, length) else {
        return said.of(Kind::Malformed);
    };
    if header < 20 || datagram.len() < header {
        return said.of(Kind::Malformed);
    }
    let destination = &rest[16..20];
    said.addresses = (FAMILY_V4, rest[12..16].to_vec(), destination.to_vec());
    if (224..240).contains(&destination[0]) || destination[..2] == [169, 254] || destination == [255; 4] {
        return said.of(Kind::NeverCaptured);
    }
    said.protocol = rest[9];
    said.fragment_protocol = rest[9];
    said.fragment_id[..2].copy_from_slice(&rest[4..6]);
    said.more_fragments = rest[6] & 0x20 != 0;
    if rest[6] & 0x1f != 0 || rest[7] != 0 {
        return said.of(Kind::LaterFragment);
    }
    said.payload = rest[header..].to_vec();
    slow_transport(said, &datagram[header..])
}

fn slow_v6(mut said: Said, rest: &[u8]) -> Said {
    if rest.len() < 40 || rest[0] >> 4 != 6 {
        return said.of(Kind::Malformed);
    }
    let length = usize::from(rest[4]) << 8 | usize::from(rest[5]);
    let Some(datagram) = datagram(rest, if length == 0 { 0 } else { 40 + length }) else {
        return said.of(Kind::Malformed);
    };
    let destination = &rest[24..40];
    said.addresses = (FAMILY_V6, rest[8..24].to_vec(), destination.to_vec());
    if destination[0] == 0xff || destination[0] == 0xfe && destination[1] & 0xc0 == 0x80 {
        return said.of(Kind::NeverCaptured);
    }
    let mut next = rest[6];
    let mut payload = &datagram[40..];
    let mut followed = 0;
    while let Some(unit) = unit_of_extension(next) {
        if payload.len() < 8 {
            return said.of(Kind::Malformed);
        }
        if next == 44 {
            said.fragment_protocol = payload[0];
            said.fragment_id = payload[4..8].to_vec();
            said.more_fragments = payload[3] & 1 != 0;
            if payload[2] != 0 || payload[3] & 0xf8 != 0 {
                return said.of(Kind::LaterFragment);
            }
        }
        next = payload[0];
        let header = 8 + usize::from(payload[1]) * unit;
        let Some(behind) = payload.get(header..) else {
            return said.of(Kind::Malformed);
        };
        payload = behind;
        followed += 1;
        if followed > 8 {
            return said.of(Kind::Opaque);
        }
    }
    said.protocol = next;
    said.payload = rest[datagram.len() - payload.len()..].to_vec();
    slow_transport(said, payload)
}

/// Bytes for each unit that an extension header says it has beyond its first eight; none if it is no extension header.
fn unit_of_extension(next: u8) -> Option<usize> {
    match next {
        0 | 43 | 60 | 135 | 139 | 140 => Some(8),
        44 => Some(0),
        51 => Some(4),
        _ => None,
    }
}

fn slow_transport(mut said: Said, payload: &[u8]) -> Said {
    let shortest = match (said.protocol, said.addresses.0) {
        (6, _) => 20,
        (17, _) => 8,
        (1, FAMILY_V4) | (58, FAMILY_V6) => 1,
        _ => 0,
    };
    if payload.len() < shortest {
        return said.of(Kind::Malformed);
    }
    let port = |at: usize| u16::from(payload[at]) << 8 | u16::from(payload[at + 1]);
    match said.protocol {
        6 => {
            said.ports = (port(0), port(2));
            said.tcp_flags = payload[13];
        }
        17 => {
            said.ports = (port(0), port(2));
            let dhcp: [u16; 2] = if said.addresses.0 == FAMILY_V4 {
                [67, 68]
            } else {
                [546, 547]
            };
            if dhcp.contains(&said.ports.0) && dhcp.contains(&said.ports.1) {
                return said.of(Kind::NeverCaptured);
            }
        }
        1 if said.addresses.0 == FAMILY_V4 => match payload[0] {
            3 | 4 | 11 | 12 => return said.of(Kind::Error),
            5 | 9 | 10 => return said.of(Kind::NeverCaptured),
            _ => {}
        },
        58 if said.addresses.0 == FAMILY_V6 => match payload[0] {
            0..=127 => return said.of(Kind::Error),
            133..=137 => return said.of(Kind::NeverCaptured),
            _ => {}
        },
        _ => {}
    }
    said
}
