//! Frames, put together by hand: the tests must not build packets with the code that they test.

use std::net::IpAddr;

use crate::checksum;

/// TCP flags.
pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

/// Transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Udp,
    Tcp(u8),
    /// Any other protocol, with eight bytes of payload that start with this one.
    Other(u8, u8),
}

impl Transport {
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Udp => 17,
            Self::Tcp(_) => 6,
            Self::Other(number, _) => number,
        }
    }
}

/// One packet from one socket to another.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) source: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
    pub(crate) transport: Transport,
    /// Offset in units of eight bytes, more fragments, identification.
    pub(crate) fragment: Option<(u16, bool, u16)>,
    /// IPv6 destination options in front.
    pub(crate) extensions: usize,
}

impl Frame {
    pub(crate) fn new(source: (IpAddr, u16), destination: (IpAddr, u16), transport: Transport) -> Self {
        Self {
            source,
            destination,
            transport,
            fragment: None,
            extensions: 0,
        }
    }

    /// What comes back.
    pub(crate) fn answer(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            transport: match self.transport {
                Transport::Tcp(_) => Transport::Tcp(SYN | ACK),
                other => other,
            },
            ..self.clone()
        }
    }

    pub(crate) fn with_source_port(&self, port: u16) -> Self {
        Self {
            source: (self.source.0, port),
            ..self.clone()
        }
    }

    pub(crate) fn to_port(&self, port: u16) -> Self {
        Self {
            destination: (self.destination.0, port),
            ..self.clone()
        }
    }

    pub(crate) fn to(&self, address: IpAddr) -> Self {
        Self {
            destination: (address, self.destination.1),
            ..self.clone()
        }
    }

    pub(crate) fn with(&self, transport: Transport) -> Self {
        Self {
            transport,
            ..self.clone()
        }
    }

    /// A fragment of it.
    pub(crate) fn fragment(&self, offset: u16, more: bool, id: u16) -> Self {
        Self {
            fragment: Some((offset, more, id)),
            ..self.clone()
        }
    }

    #[expect(clippy::panic, reason = "a mistake in a test")]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        let later = self.fragment.is_some_and(|(offset, _, _)| offset != 0);
        let rest = if later {
            vec![0x55; 64]
        } else {
            self.transport_bytes()
        };
        match (self.source.0, self.destination.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let (offset, more, id) = self.fragment.unwrap_or_default();
                bytes.extend([0x08, 0x00, 0x45, 0]);
                bytes.extend((20 + rest.len() as u16).to_be_bytes());
                bytes.extend(id.to_be_bytes());
                bytes.extend((offset | if more { 0x2000 } else { 0 }).to_be_bytes());
                bytes.extend([64, self.transport.number(), 0, 0]);
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend(rest);
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut chain = vec![60; self.extensions];
                chain.extend(self.fragment.map(|_| 44));
                chain.push(self.transport.number());
                let mut payload = Vec::new();
                for pair in chain.windows(2) {
                    match pair[0] {
                        44 => {
                            let (offset, more, id) = self.fragment.unwrap_or_default();
                            payload.extend([pair[1], 0]);
                            payload.extend((offset << 3 | u16::from(more)).to_be_bytes());
                            payload.extend(u32::from(id).to_be_bytes());
                        }
                        _ => payload.extend([pair[1], 0, 1, 4, 0, 0, 0, 0]),
                    }
                }
                payload.extend(rest);
                bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                bytes.extend((payload.len() as u16).to_be_bytes());
                bytes.extend([chain[0], 64]);
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend(payload);
            }
            _ => panic!("both addresses are of one family"),
        }
        bytes
    }

    /// As [`Self::bytes`], with every checksum.
    pub(crate) fn summed(&self) -> Vec<u8> {
        let mut bytes = self.bytes();
        checksum::fill(&mut bytes);
        bytes
    }

    fn transport_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.transport {
            Transport::Other(_, first) => bytes.extend([first, 0, 0, 0, 0, 0, 0, 0]),
            Transport::Udp => {
                bytes.extend(self.source.1.to_be_bytes());
                bytes.extend(self.destination.1.to_be_bytes());
                bytes.extend([0, 24, 0, 0]);
            }
            Transport::Tcp(flags) => {
                bytes.extend(self.source.1.to_be_bytes());
                bytes.extend(self.destination.1.to_be_bytes());
                bytes.extend([0; 8]);
                bytes.extend([0x50, flags, 1, 0, 0, 0, 0, 0]);
            }
        }
        bytes.extend([0xaa; 16]);
        bytes
    }
}

/// An ICMP or ICMPv6 error about a frame, of which `keep` bytes behind the Ethernet header are quoted.
pub(crate) fn error(source: IpAddr, destination: IpAddr, number: u8, about: &[u8], keep: usize) -> Vec<u8> {
    let protocol = if source.is_ipv4() { 1 } else { 58 };
    let mut frame = Frame::new((source, 0), (destination, 0), Transport::Other(protocol, number)).bytes();
    // Behind the eight bytes of its header.
    let header = if source.is_ipv4() { 34 } else { 54 } + 8;
    frame.truncate(header);
    frame.extend(&about[14..about.len().min(14 + keep)]);
    let length = (frame.len() - 14) as u16;
    let (at, length) = if source.is_ipv4() {
        (16, length)
    } else {
        (18, length - 40)
    };
    frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
    checksum::fill(&mut frame);
    frame
}
