//! Between the engine's words and the layout of the maps.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use holdfast_ebpf::abi;
use holdfast_engine::model::{
    Backend, Boot, Entry, Ifindex, Mac, NameHash, PolicySlot, Protocol, RouteKey, Row, Selected, Token,
    UidHash,
};

/// Family and address as keys have them.
pub(super) const fn address(address: IpAddr) -> (u8, abi::Address) {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            let mut bytes = [0; 16];
            [bytes[0], bytes[1], bytes[2], bytes[3]] = [a, b, c, d];
            (abi::FAMILY_V4, bytes)
        }
        IpAddr::V6(v6) => (abi::FAMILY_V6, v6.octets()),
    }
}

/// Back from a key; none when the family is neither, or bytes are set behind an IPv4 address.
pub(super) fn address_of(family: u8, bytes: abi::Address) -> Option<IpAddr> {
    match family {
        abi::FAMILY_V4 => {
            let [a, b, c, d, rest @ ..] = bytes;
            (rest == [0; 12]).then(|| Ipv4Addr::new(a, b, c, d).into())
        }
        abi::FAMILY_V6 => Some(Ipv6Addr::from(bytes).into()),
        _ => None,
    }
}

pub(super) fn source_key(ifindex: Ifindex, source: IpAddr) -> abi::SourceKey {
    let (family, address) = address(source);
    abi::SourceKey {
        ifindex,
        family,
        pad: [0; 3],
        address,
    }
}

/// Key of `services`; none for a prefix.
pub(super) fn service_key(ifindex: Ifindex, key: &RouteKey) -> Option<abi::ServiceKey> {
    let &RouteKey::Service {
        address: destination,
        protocol,
        port,
    } = key
    else {
        return None;
    };
    let (family, address) = address(destination);
    Some(abi::ServiceKey {
        ifindex,
        port: port.to_be(),
        protocol: protocol.number(),
        family,
        address,
    })
}

/// Back from a key of `services`; none for what no agent writes.
pub(super) fn service_key_of(key: &abi::ServiceKey) -> Option<RouteKey> {
    let protocol = match key.protocol {
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        _ => return None,
    };
    Some(RouteKey::Service {
        address: address_of(key.family, key.address)?,
        protocol,
        port: u16::from_be(key.port),
    })
}

/// Key of `prefixes`; none for a service.
pub(super) fn prefix_key(ifindex: Ifindex, key: &RouteKey) -> Option<abi::PrefixKey> {
    let &RouteKey::Prefix {
        address: network,
        length,
    } = key
    else {
        return None;
    };
    let (family, address) = address(network);
    Some(abi::PrefixKey::new(ifindex, family, &address, u32::from(length)))
}

/// The interface that a key of `prefixes` belongs to.
pub(super) const fn interface_of(key: &abi::PrefixKey) -> Ifindex {
    u32::from_be(key.ifindex)
}

/// Back from a key of `prefixes`; none for what no agent writes.
pub(super) fn prefix_key_of(key: &abi::PrefixKey) -> Option<RouteKey> {
    let address = address_of(key.family, key.address)?;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let length = key
        .length
        .checked_sub(abi::PrefixKey::HEAD)
        .filter(|length| *length <= bits)?;
    let route = RouteKey::Prefix {
        address,
        length: length as u8,
    };
    // No host bits are set, and nothing in the padding.
    (prefix_key(interface_of(key), &route).as_ref() == Some(key)).then_some(route)
}

pub(super) const fn prefix_entry(key: &abi::PrefixKey, entry: Entry) -> abi::PrefixEntry {
    abi::PrefixEntry {
        check: key.check(),
        length: key.length.saturating_sub(abi::PrefixKey::HEAD),
        policy: entry.policy,
        flags: if entry.open { abi::RouteEntry::OPEN } else { 0 },
    }
}

/// Back from a value of `prefixes`; none when it is not this key's: a shorter prefix's, or one that the program takes for a
/// miss.
pub(super) fn prefix_entry_of(key: &abi::PrefixKey, value: &abi::PrefixEntry) -> Option<Entry> {
    let entry = Entry {
        policy: value.policy,
        open: value.flags & abi::RouteEntry::OPEN != 0,
    };
    let own = prefix_entry(key, entry);
    ((own.check, own.length) == (value.check, value.length)).then_some(entry)
}

pub(super) const fn local_key(local: IpAddr) -> abi::LocalKey {
    let (family, address) = address(local);
    abi::LocalKey {
        family,
        pad: [0; 3],
        address,
    }
}

/// The mark that some port of this address is claimed.
pub(super) const fn claim_key(key: &abi::ServiceKey) -> abi::ServiceKey {
    abi::ServiceKey::claim(key.ifindex, key.family, key.address)
}

pub(super) const fn is_claim(key: &abi::ServiceKey) -> bool {
    key.protocol == 0 && key.port == 0
}

pub(super) const fn entry(key: &abi::ServiceKey, entry: Entry) -> abi::RouteEntry {
    abi::RouteEntry {
        policy: entry.policy,
        flags: if entry.open { abi::RouteEntry::OPEN } else { 0 },
        check: key.check(),
        pad: 0,
    }
}

/// Back from a value of `services`; none when it is not this key's (the program takes it for a miss).
pub(super) fn entry_of(key: &abi::ServiceKey, value: &abi::RouteEntry) -> Option<Entry> {
    (value.check == key.check()).then_some(Entry {
        policy: value.policy,
        open: value.flags & abi::RouteEntry::OPEN != 0,
    })
}

pub(super) fn row(ifindex: Ifindex, row: &Row) -> abi::ConsumerRow {
    let mut flags = 0;
    if row.has_services {
        flags |= abi::ConsumerRow::HAS_SERVICES;
    }
    if row.has_sources {
        flags |= abi::ConsumerRow::HAS_SOURCES;
    }
    if row.has_prefixes_v4 {
        flags |= abi::ConsumerRow::HAS_PREFIXES_V4;
    }
    if row.has_prefixes_v6 {
        flags |= abi::ConsumerRow::HAS_PREFIXES_V6;
    }
    if row.via.is_some() {
        flags |= abi::ConsumerRow::NEIGH;
    }
    abi::ConsumerRow {
        token: row.token.map_or(0, Token::get),
        ifindex,
        epoch: row.epoch,
        flags,
        device: row.via.unwrap_or(0),
    }
}

/// Back from a value of `consumers`; none when it is not this key's.
pub(super) fn row_of(ifindex: Ifindex, value: &abi::ConsumerRow) -> Option<Row> {
    (value.ifindex == ifindex).then_some(Row {
        token: Token::new(value.token),
        epoch: value.epoch,
        has_services: value.flags & abi::ConsumerRow::HAS_SERVICES != 0,
        has_prefixes_v4: value.flags & abi::ConsumerRow::HAS_PREFIXES_V4 != 0,
        has_prefixes_v6: value.flags & abi::ConsumerRow::HAS_PREFIXES_V6 != 0,
        has_sources: value.flags & abi::ConsumerRow::HAS_SOURCES != 0,
        via: (value.flags & abi::ConsumerRow::NEIGH != 0).then_some(value.device),
    })
}

pub(super) const fn selector(selected: Selected) -> u64 {
    abi::Selector {
        base: selected.base,
        length: selected.length,
        generation: selected.generation,
    }
    .pack()
}

const fn selected(word: u64) -> Selected {
    let selector = abi::Selector::unpack(word);
    Selected {
        base: selector.base,
        length: selector.length,
        generation: selector.generation,
    }
}

pub(super) fn policy(slot: &PolicySlot) -> abi::PolicySlot {
    abi::PolicySlot {
        selector: selector(slot.selected),
        max_staleness: 0,
        flags: if slot.pass_while_held {
            abi::PolicySlot::PASS_WHILE_HELD
        } else {
            0
        },
        stale_after: 0,
        name_hash: slot.name.0,
        uid: slot.uid.0,
        served_generation: slot.served_generation,
        // Milliseconds since 1970: never negative but by a clock before that.
        served_since: u64::try_from(slot.served_since_ms).unwrap_or(0),
        waiting_since: slot.waiting_since.map_or(0, |since| since.0),
        last_set_generation: u64::from(slot.last_set_generation),
        reserved: 0,
    }
}

/// Back from a value of `policies`; none when the slot is free.
pub(super) fn policy_of(value: &abi::PolicySlot) -> Option<PolicySlot> {
    (value.name_hash != 0).then(|| PolicySlot {
        name: NameHash(value.name_hash),
        uid: UidHash(value.uid),
        selected: selected(value.selector),
        pass_while_held: value.flags & abi::PolicySlot::PASS_WHILE_HELD != 0,
        served_generation: value.served_generation,
        served_since_ms: i64::try_from(value.served_since).unwrap_or(i64::MAX),
        waiting_since: (value.waiting_since != 0).then_some(Boot(value.waiting_since)),
        last_set_generation: (value.last_set_generation as u32) & abi::Selector::GENERATION_MASK,
    })
}

pub(super) fn backend(backend: &Backend) -> abi::Backend {
    let address_v4 = match backend.address_v4 {
        Some(IpAddr::V4(address)) => address.octets(),
        _ => [0; 4],
    };
    let address_v6 = match backend.address_v6 {
        Some(IpAddr::V6(address)) => address.octets(),
        _ => [0; 16],
    };
    abi::Backend {
        token: backend.token.get(),
        target: abi::Target {
            ifindex: backend.ifindex,
            kind: if backend.via.is_some() {
                abi::Target::NEIGH
            } else {
                abi::Target::PEER
            },
            last_generation: backend.last_generation,
        }
        .pack(),
        drain_until: backend.drain_until.map_or(0, |until| until.0),
        address_v4,
        mac: backend.mac.0,
        pad: [0; 6],
        address_v6,
        policy: backend.policy,
        device: backend.via.unwrap_or(0),
    }
}

/// Back from a value of `backends`; none when it is free.
pub(super) fn backend_of(value: &abi::Backend) -> Option<Backend> {
    let target = abi::Target::unpack(value.target);
    Some(Backend {
        policy: value.policy,
        ifindex: target.ifindex,
        token: Token::new(value.token)?,
        mac: Mac(value.mac),
        address_v4: (value.address_v4 != [0; 4]).then(|| Ipv4Addr::from(value.address_v4).into()),
        address_v6: (value.address_v6 != [0; 16]).then(|| Ipv6Addr::from(value.address_v6).into()),
        via: (target.kind == abi::Target::NEIGH).then_some(value.device),
        last_generation: target.last_generation,
        drain_until: (value.drain_until != 0).then_some(Boot(value.drain_until)),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn addresses() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(|bytes| IpAddr::from(Ipv4Addr::from(bytes))),
            any::<[u8; 16]>().prop_map(|bytes| IpAddr::from(Ipv6Addr::from(bytes))),
        ]
    }

    fn tokens() -> impl Strategy<Value = Token> {
        (1..=u64::MAX).prop_map(|token| Token::new(token).unwrap())
    }

    proptest! {
        #[test]
        fn a_service_key_comes_back(ifindex: u32, address in addresses(), tcp: bool, port: u16) {
            let key = RouteKey::Service { address, protocol: if tcp { Protocol::Tcp } else { Protocol::Udp }, port };
            let raw = service_key(ifindex, &key).unwrap();
            prop_assert!(!is_claim(&raw));
            prop_assert!(is_claim(&claim_key(&raw)));
            prop_assert_eq!(service_key_of(&raw), Some(key));
        }

        #[test]
        fn an_entry_comes_back_under_its_own_key_only(ifindex: u32, address in addresses(), policy: u32, open: bool) {
            let key = service_key(ifindex, &RouteKey::Service { address, protocol: Protocol::Udp, port: 53 }).unwrap();
            let value = entry(&key, Entry { policy, open });
            prop_assert_eq!(entry_of(&key, &value), Some(Entry { policy, open }));
            let other = abi::ServiceKey { ifindex: ifindex ^ 1, ..key };
            prop_assert_eq!(entry_of(&other, &value), None);
        }

        #[test]
        fn a_prefix_key_comes_back(ifindex: u32, address in addresses(), length: u8, policy: u32, open: bool) {
            let length = length % if address.is_ipv4() { 33 } else { 129 };
            let raw = prefix_key(ifindex, &RouteKey::Prefix { address, length }).unwrap();
            // The address is masked: what is asked for with host bits comes back without them.
            let network = prefix_key_of(&raw).unwrap();
            prop_assert_eq!(interface_of(&raw), ifindex);
            prop_assert_eq!(prefix_key(ifindex, &network), Some(raw));
            let value = prefix_entry(&raw, Entry { policy, open });
            prop_assert_eq!(prefix_entry_of(&raw, &value), Some(Entry { policy, open }));
            // What a longest match finds instead is told apart.
            let shorter = abi::PrefixKey::new(ifindex, raw.family, &raw.address, u32::from(length.saturating_sub(1)));
            if length > 0 {
                let value = prefix_entry(&shorter, Entry { policy, open });
                prop_assert_eq!(prefix_entry_of(&raw, &value), None);
            }
            let other = abi::PrefixKey { ifindex: raw.ifindex ^ 1, ..raw };
            prop_assert_eq!(prefix_entry_of(&other, &value), None);
        }

        #[test]
        fn only_what_an_agent_writes_is_a_prefix(
            ifindex: u32, address in addresses(), length in 0_u32..250, pad: u8, host: [u8; 16],
        ) {
            let (family, bytes) = super::address(address);
            let canonical = abi::PrefixKey::new(ifindex, family, &bytes, length.saturating_sub(64).min(128));
            let given = abi::PrefixKey { length, pad: [0, pad % 2, 0], address: host, ..canonical };
            if let Some(route) = prefix_key_of(&given) {
                prop_assert_eq!(prefix_key(ifindex, &route), Some(given));
            }
        }

        #[test]
        fn a_row_comes_back(
            ifindex: u32, token in proptest::option::of(tokens()), epoch: u32, flags: [bool; 4],
            via in proptest::option::of(1..=u32::MAX),
        ) {
            let [has_services, has_prefixes_v4, has_prefixes_v6, has_sources] = flags;
            let wanted = Row { token, epoch, has_services, has_prefixes_v4, has_prefixes_v6, has_sources, via };
            prop_assert_eq!(row_of(ifindex, &row(ifindex, &wanted)), Some(wanted));
            prop_assert_eq!(row_of(ifindex ^ 1, &row(ifindex, &wanted)), None);
        }

        #[test]
        fn a_policy_slot_comes_back(
            name in 1..=u64::MAX, uid: [u8; 16], base in 0..1u32 << 24, length: u16, generation in 0..1u32 << 24,
            pass_while_held: bool, served_generation: u64, served_since_ms in 0..=i64::MAX,
            waiting_since in proptest::option::of(1..=u64::MAX), last_set_generation in 0..1u32 << 24,
        ) {
            let slot = PolicySlot {
                name: NameHash(name), uid: UidHash(uid), selected: Selected { base, length, generation },
                pass_while_held, served_generation, served_since_ms, waiting_since: waiting_since.map(Boot),
                last_set_generation,
            };
            prop_assert_eq!(policy_of(&policy(&slot)), Some(slot));
        }

        #[test]
        fn a_backend_comes_back(
            policy: u32, ifindex: u32, token in tokens(), mac: [u8; 6], v4 in proptest::option::of(1..=u32::MAX),
            v6 in proptest::option::of(1..=u128::MAX), last_generation in 0..1u32 << 24,
            drain_until in proptest::option::of(1..=u64::MAX), via in proptest::option::of(1..=u32::MAX),
        ) {
            let wanted = Backend {
                policy, ifindex, token, mac: Mac(mac),
                address_v4: v4.map(|bits| Ipv4Addr::from_bits(bits).into()),
                address_v6: v6.map(|bits| Ipv6Addr::from_bits(bits).into()),
                via, last_generation, drain_until: drain_until.map(Boot),
            };
            prop_assert_eq!(backend_of(&backend(&wanted)), Some(wanted));
        }
    }

    #[test]
    fn what_is_free_is_none() {
        assert_eq!(policy_of(&abi::PolicySlot::default()), None);
        assert_eq!(backend_of(&abi::Backend::default()), None);
    }
}
