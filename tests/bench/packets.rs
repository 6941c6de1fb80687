//! Packets for test runs: of which services, in which order.

use std::net::IpAddr;

use anyhow::bail;

use crate::asm::PACKETS;

/// A port of a consumer.
const CLIENT: u16 = 40_000;

/// In which order destinations are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Each as often as any other.
    Random,
    /// The n-th most popular 1/n as often as the first.
    Zipf,
}

impl Order {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Zipf => "zipf",
        }
    }

    /// Numbers below `count`, one a packet. Always the same ones.
    pub(crate) fn numbers(self, count: u32) -> Vec<u32> {
        /// A prime that divides none of the counts: popular numbers are no neighbours.
        const SCATTER: u64 = 7_919;
        let mut random = Random(0x005e_ed0f_a11c_0de5);
        let mut sums = Vec::new();
        if self == Self::Zipf {
            let mut sum = 0.0;
            sums.extend((1..=count).map(|rank| {
                sum += 1.0 / f64::from(rank);
                sum
            }));
        }
        let total = sums.last().copied().unwrap_or_default();
        (0..PACKETS)
            .map(|_| match self {
                Self::Random => random.below(count),
                Self::Zipf => {
                    let wanted = random.fraction() * total;
                    let rank = sums.partition_point(|sum| *sum < wanted) as u64;
                    (rank * SCATTER % u64::from(count)) as u32
                }
            })
            .collect()
    }
}

/// Steele, Lea and Flood's SplitMix64: the same numbers everywhere.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    const fn below(&mut self, count: u32) -> u32 {
        (((self.next() >> 32) * count as u64) >> 32) as u32
    }

    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// What a TCP packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flags {
    Syn = 0x02,
    Ack = 0x10,
}

/// A TCP packet from a consumer to a service, with 16 bytes of payload.
pub(crate) fn request(source: IpAddr, service: IpAddr, port: u16, flags: Flags) -> anyhow::Result<Vec<u8>> {
    frame((source, CLIENT), (service, port), flags)
}

/// What comes back.
pub(crate) fn answer(source: IpAddr, service: IpAddr, port: u16) -> anyhow::Result<Vec<u8>> {
    frame((service, port), (source, CLIENT), Flags::Ack)
}

fn frame(from: (IpAddr, u16), to: (IpAddr, u16), flags: Flags) -> anyhow::Result<Vec<u8>> {
    const TCP: u8 = 6;
    const TCP_HEADER: u16 = 20;
    const PAYLOAD: u16 = 16;
    let length = TCP_HEADER + PAYLOAD;
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    match (from.0, to.0) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend([0x08, 0x00, 0x45, 0]);
            bytes.extend((20 + length).to_be_bytes());
            bytes.extend([0, 0, 0x40, 0, 64, TCP, 0, 0]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([TCP, 64]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        _ => bail!("both addresses are of one family"),
    }
    bytes.extend(from.1.to_be_bytes());
    bytes.extend(to.1.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend([0x50, flags as u8, 1, 0, 0, 0, 0, 0]);
    bytes.resize(bytes.len() + usize::from(PAYLOAD), 0xaa);
    Ok(bytes)
}

/// The address of a family as bytes.
pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popular_numbers_come_often_and_all_are_in_range() {
        let numbers = Order::Zipf.numbers(10_000);
        assert_eq!(numbers.len(), PACKETS);
        assert!(numbers.iter().all(|number| *number < 10_000));
        let first = numbers.iter().filter(|number| **number == 0).count();
        // 1 / H(10,000) = 10.2 % of them.
        assert!((5_900..7_500).contains(&first), "{first}");
        let uniform = Order::Random.numbers(10_000);
        assert!(uniform.iter().filter(|number| **number == 0).count() < 40);
    }
}
