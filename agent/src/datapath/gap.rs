//! Finds an address in a prefix that nothing more specific covers: what a proof of the prefix asks about.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network address and its prefix length.
pub(super) type Prefix = (IpAddr, u8);

/// Traffic that no route captures, whatever is written: link-local, multicast, limited broadcast. And what no host sends
/// to another: "this network", loopback, the unspecified address.
const NEVER: [Prefix; 8] = [
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8),
    (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8),
    (IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16),
    (IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4),
    (IpAddr::V4(Ipv4Addr::BROADCAST), 32),
    // With IPv4-mapped and -compatible addresses.
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 80),
    (IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10),
    (IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), 8),
];

/// The lowest address of the prefix that is in none of `taken` and could be captured at all; none when there is none.
pub(super) fn free_address(prefix: Prefix, taken: impl IntoIterator<Item = Prefix>) -> Option<IpAddr> {
    let (network, _) = prefix;
    let all = range(prefix);
    let mut taken: Vec<(u128, u128)> = taken
        .into_iter()
        .chain(NEVER)
        .filter(|(address, _)| address.is_ipv4() == network.is_ipv4())
        .map(range)
        .filter(|(_, last)| *last >= all.0)
        .collect();
    taken.sort_unstable();
    let mut free = all.0;
    for (first, last) in taken {
        if first > free {
            break;
        }
        free = free.max(last.checked_add(1)?);
    }
    (free <= all.1).then(|| address(free, network))
}

/// Bits of an address: the prefix length of one alone.
pub(super) const fn bits(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

/// Whether an address is in a prefix.
pub(super) fn contains(prefix: Prefix, address: IpAddr) -> bool {
    let (first, last) = range(prefix);
    let (number, _) = range((address, bits(address)));
    prefix.0.is_ipv4() == address.is_ipv4() && (first..=last).contains(&number)
}

/// The first and the last address of a prefix, as numbers.
fn range((network, length): Prefix) -> (u128, u128) {
    let first = match network {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    };
    let host_bits = u32::from(bits(network).saturating_sub(length));
    let hosts = 1_u128
        .checked_shl(host_bits)
        .map_or(u128::MAX, |size| size.wrapping_sub(1));
    (first & !hosts, first | hosts)
}

/// The address with this number, in the family of `like`.
fn address(number: u128, like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from_bits(number as u32).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(number).into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefix(text: &str) -> Prefix {
        let (address, length) = text.split_once('/').unwrap();
        (address.parse().unwrap(), length.parse().unwrap())
    }

    fn free(of: &str, taken: &[&str]) -> Option<String> {
        let taken: Vec<Prefix> = taken.iter().map(|text| prefix(text)).collect();
        free_address(prefix(of), taken).map(|address| address.to_string())
    }

    #[test]
    fn the_lowest_address_that_is_free() {
        for (of, taken, expected) in [
            ("10.0.0.0/8", &[][..], Some("10.0.0.0")),
            ("10.0.0.0/8", &["10.0.0.0/16"], Some("10.1.0.0")),
            ("10.0.0.0/8", &["10.1.0.0/16"], Some("10.0.0.0")),
            ("10.0.0.0/8", &["10.0.0.1/32", "10.0.0.0/32"], Some("10.0.0.2")),
            (
                "10.0.0.0/8",
                &["10.0.0.0/16", "10.0.0.0/9", "10.128.0.0/32"],
                Some("10.128.0.1"),
            ),
            ("10.0.0.0/31", &["10.0.0.0/32", "10.0.0.1/32"], None),
            ("10.0.0.0/8", &["0.0.0.0/0"], None),
            ("10.0.0.1/32", &["10.0.0.0/32"], Some("10.0.0.1")),
            ("10.0.0.1/32", &["fd00::/64"], Some("10.0.0.1")),
            // Nobody's addresses are not asked about.
            ("0.0.0.0/0", &[], Some("1.0.0.0")),
            ("0.0.0.0/0", &["0.0.0.0/1"], Some("128.0.0.0")),
            ("255.255.255.255/32", &[], None),
            ("192.0.0.0/2", &["192.0.0.0/3"], Some("240.0.0.0")),
            ("::/0", &[], Some("::1:0:0:0")),
            ("::/0", &["::/1"], Some("8000::")),
            ("fd00::/8", &["fd00::/9", "fd80::/9"], None),
            ("ff00::/8", &[], None),
        ] {
            assert_eq!(free(of, taken).as_deref(), expected, "{of} without {taken:?}");
        }
    }

    fn small() -> impl Strategy<Value = Prefix> {
        (0..=255_u8, 24..=32_u8).prop_map(|(last, length)| {
            let mask = (u32::MAX << (32 - u32::from(length))) as u8;
            (Ipv4Addr::new(10, 0, 0, last & mask).into(), length)
        })
    }

    proptest! {
        #[test]
        fn as_if_every_address_were_tried(of in small(), taken in prop::collection::vec(small(), 0..12)) {
            let covers = |prefix: &Prefix, last: u8| contains(*prefix, IpAddr::from([10, 0, 0, last]));
            let tried = (0..=255_u8)
                .find(|last| covers(&of, *last) && !taken.iter().any(|prefix| covers(prefix, *last)))
                .map(|last| IpAddr::from([10, 0, 0, last]));
            prop_assert_eq!(free_address(of, taken), tried);
        }
    }
}
