//! Map writes: idempotent, counted, and as a whole.
//!
//! Every element is read before it is written, and a row that is right already is not written again: the kernel
//! itself is asked, so that what somebody else changed is mended. What is remembered here is only which keys there are,
//! because a hash cannot be asked for the keys of one interface.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_ebpf::abi::{self, pin};
use holdfast_engine::model::{
    Backend, BackendId, Entry, Ifindex, OpError, PolicySlot, RouteKey, Row, SlotId,
};
use rustix::io::Errno;

use super::convert;
use super::maps::Maps;
use super::raw::{Map, Plain};

/// Which keys there are.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) rows: BTreeSet<Ifindex>,
    /// Routes, and the claim of each address that has any.
    services: BTreeSet<Service>,
    prefixes: BTreeSet<Prefix>,
    pub(super) locals: BTreeSet<IpAddr>,
    sources: BTreeSet<Source>,
    pub(super) policies: BTreeSet<SlotId>,
    pub(super) backends: BTreeSet<BackendId>,
}

/// A key of `services` in an order that keeps an interface, and in it an address, together: its claim first.
type Service = (Ifindex, u8, abi::Address, u8, u16);

/// A key of `prefixes`: interface, family, address, and how many bits count. Behind a prefix come those within it.
type Prefix = (Ifindex, u8, abi::Address, u32);

/// A key of `sources`: interface, family, address.
type Source = (Ifindex, u8, abi::Address);

const fn service(key: &abi::ServiceKey) -> Service {
    (key.ifindex, key.family, key.address, key.protocol, key.port)
}

const fn prefix(key: &abi::PrefixKey) -> Prefix {
    (convert::interface_of(key), key.family, key.address, key.length)
}

const fn source(key: &abi::SourceKey) -> Source {
    (key.ifindex, key.family, key.address)
}

impl Known {
    /// Elements of `services`: routes and claims.
    pub(super) fn services_len(&self) -> u64 {
        self.services.len() as u64
    }

    pub(super) fn sources_len(&self) -> u64 {
        self.sources.len() as u64
    }

    pub(super) fn add_service(&mut self, key: &abi::ServiceKey) {
        self.services.insert(service(key));
    }

    pub(super) fn prefixes_len(&self) -> u64 {
        self.prefixes.len() as u64
    }

    pub(super) fn add_prefix(&mut self, key: &abi::PrefixKey) {
        self.prefixes.insert(prefix(key));
    }

    pub(super) fn add_source(&mut self, key: &abi::SourceKey) {
        self.sources.insert(source(key));
    }

    pub(super) fn has_prefix(&self, key: &abi::PrefixKey) -> bool {
        self.prefixes.contains(&prefix(key))
    }

    pub(super) fn has_source(&self, key: &abi::SourceKey) -> bool {
        self.sources.contains(&source(key))
    }

    /// Whether some route of the key's address is there.
    fn has_routes(&self, key: &abi::ServiceKey) -> bool {
        let first = (key.ifindex, key.family, key.address, 0, 0);
        let last = (key.ifindex, key.family, key.address, u8::MAX, u16::MAX);
        self.services
            .range(first..=last)
            .any(|&(.., protocol, port)| (protocol, port) != (0, 0))
    }

    /// Every key of `services` that an interface has: routes before the claim of their address.
    fn services_of(&self, ifindex: Ifindex) -> Vec<abi::ServiceKey> {
        let first = (ifindex, 0, [0; 16], 0, 0);
        let last = (ifindex, u8::MAX, [u8::MAX; 16], u8::MAX, u16::MAX);
        self.services
            .range(first..=last)
            .rev()
            .map(|&(ifindex, family, address, protocol, port)| abi::ServiceKey {
                ifindex,
                port,
                protocol,
                family,
                address,
            })
            .collect()
    }

    /// Every key of `prefixes` that an interface has.
    fn prefixes_of(&self, ifindex: Ifindex) -> Vec<abi::PrefixKey> {
        self.prefixes
            .range((ifindex, 0, [0; 16], 0)..=(ifindex, u8::MAX, [u8::MAX; 16], u32::MAX))
            .map(|&(ifindex, family, address, length)| abi::PrefixKey {
                length,
                ifindex: ifindex.to_be(),
                family,
                pad: [0; 3],
                address,
            })
            .collect()
    }

    /// The prefixes of an interface that lie within one, but for itself.
    pub(super) fn within(&self, key: &abi::PrefixKey) -> Vec<(IpAddr, u8)> {
        let (ifindex, family, first, length) = prefix(key);
        self.prefixes
            .range((ifindex, family, first, length + 1)..)
            .take_while(|&&(of, of_family, address, _)| {
                (of, of_family) == (ifindex, family)
                    && abi::PrefixKey::new(ifindex, family, &address, length - abi::PrefixKey::HEAD) == *key
            })
            .filter_map(|&(.., address, length)| {
                let address = convert::address_of(family, address)?;
                Some((address, u8::try_from(length - abi::PrefixKey::HEAD).ok()?))
            })
            .collect()
    }

    /// Whether this very packet has a service.
    pub(super) fn has_service(&self, key: &abi::ServiceKey) -> bool {
        self.services.contains(&service(key))
    }

    fn sources_of(&self, ifindex: Ifindex) -> Vec<abi::SourceKey> {
        self.sources
            .range((ifindex, 0, [0; 16])..=(ifindex, u8::MAX, [u8::MAX; 16]))
            .map(|&(ifindex, family, address)| abi::SourceKey {
                ifindex,
                family,
                pad: [0; 3],
                address,
            })
            .collect()
    }
}

/// Elements written and deleted since the start, per map.
#[derive(Debug, Default)]
pub(super) struct Tally {
    counts: [(AtomicU64, AtomicU64); NAMES.len()],
}

/// Maps that this process writes, in the order of [`Tally`].
const NAMES: [&str; 8] = [
    pin::CONSUMERS,
    pin::SOURCES,
    pin::LOCALS,
    pin::SERVICES,
    pin::PREFIXES,
    pin::POLICIES,
    pin::SLOTS,
    pin::BACKENDS,
];

impl Tally {
    fn of(&self, name: &str) -> Option<&(AtomicU64, AtomicU64)> {
        let position = NAMES.iter().position(|known| *known == name)?;
        self.counts.get(position)
    }

    fn updated(&self, name: &str) {
        if let Some((updates, _)) = self.of(name) {
            updates.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn deleted(&self, name: &str) {
        if let Some((_, deletes)) = self.of(name) {
            deletes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Elements written and deleted.
    pub(super) fn read(&self, name: &str) -> (u64, u64) {
        self.of(name).map_or((0, 0), |(updates, deletes)| {
            (updates.load(Ordering::Relaxed), deletes.load(Ordering::Relaxed))
        })
    }
}

/// Writes on behalf of one operation.
pub(super) struct Writer<'a> {
    pub(super) maps: &'a Maps,
    pub(super) known: &'a mut Known,
    pub(super) tally: &'a Tally,
    /// Elements really written or deleted.
    pub(super) writes: u32,
}

/// What an element was before it was written.
enum Before<V> {
    /// The same: it was not written.
    Same,
    /// Another.
    Other(V),
    /// Not there.
    Absent,
}

impl<V> Before<V> {
    /// What there was instead, if anything; none when nothing was replaced.
    #[expect(
        clippy::option_option,
        reason = "nothing done and nothing there before are different things here"
    )]
    fn replaced(self) -> Option<Option<V>> {
        match self {
            Self::Same => None,
            Self::Other(before) => Some(Some(before)),
            Self::Absent => Some(None),
        }
    }
}

/// One element of `services` or `prefixes`.
enum Element {
    Service(abi::ServiceKey, abi::RouteEntry),
    Prefix(abi::PrefixKey, abi::PrefixEntry),
}

impl Element {
    fn service(&self) -> Option<Service> {
        match self {
            Self::Service(key, _) => Some(service(key)),
            Self::Prefix(..) => None,
        }
    }

    fn prefix(&self) -> Option<Prefix> {
        match self {
            Self::Service(..) => None,
            Self::Prefix(key, _) => Some(prefix(key)),
        }
    }
}

/// An element that was written, and what there was before.
enum Written {
    Service(abi::ServiceKey, Option<abi::RouteEntry>),
    Prefix(abi::PrefixKey, Option<abi::PrefixEntry>),
}

/// The elements of entries, in the order in which they are written.
fn elements(ifindex: Ifindex, entries: &BTreeMap<RouteKey, Entry>) -> Vec<Element> {
    let mut elements = Vec::new();
    for (key, entry) in entries {
        if let Some(key) = convert::service_key(ifindex, key) {
            let claim = convert::claim_key(&key);
            // The claim goes first: a fragment of a claimed destination must never find no mark.
            elements.push(Element::Service(claim, abi::RouteEntry::claim(&claim)));
            elements.push(Element::Service(key, convert::entry(&key, *entry)));
        }
        if let Some(key) = convert::prefix_key(ifindex, key) {
            elements.push(Element::Prefix(key, convert::prefix_entry(&key, *entry)));
        }
    }
    elements
}

impl Writer<'_> {
    fn put<K: Plain, V: Plain + PartialEq>(
        &mut self,
        name: &'static str,
        map: &Map<K, V>,
        key: &K,
        value: &V,
    ) -> Result<Before<V>, Errno> {
        let before = map.lookup(key)?;
        if before.as_ref() == Some(value) {
            return Ok(Before::Same);
        }
        self.maps.writing(|| map.update(key, value))?;
        self.writes += 1;
        self.tally.updated(name);
        Ok(before.map_or(Before::Absent, Before::Other))
    }

    fn take<K: Plain, V: Plain>(
        &mut self,
        name: &'static str,
        map: &Map<K, V>,
        key: &K,
    ) -> Result<(), OpError> {
        let deleted = self.maps.writing(|| map.delete(key));
        self.taken(name, deleted)
    }

    fn taken(&mut self, name: &'static str, deleted: Result<bool, Errno>) -> Result<(), OpError> {
        match deleted {
            Ok(true) => {
                self.writes += 1;
                self.tally.deleted(name);
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(errno) => Err(refused("deleting from", name, errno)),
        }
    }

    pub(super) fn write_row(&mut self, ifindex: Ifindex, row: &Row) -> Result<(), OpError> {
        let maps = self.maps;
        let value = convert::row(ifindex, row);
        self.put(pin::CONSUMERS, &maps.consumers, &ifindex, &value)
            .map_err(|errno| {
                let need = self.known.rows.len() as u64 + 1;
                full_or_refused(
                    pin::CONSUMERS,
                    need,
                    maps.consumers.info().shape.max_entries,
                    errno,
                )
            })?;
        self.known.rows.insert(ifindex);
        Ok(())
    }

    fn delete_row(&mut self, ifindex: Ifindex) -> Result<(), OpError> {
        self.take(pin::CONSUMERS, &self.maps.consumers, &ifindex)?;
        self.known.rows.remove(&ifindex);
        Ok(())
    }

    /// Adds before it deletes, so that an address that stays under another spelling is never away.
    pub(super) fn write_sources(
        &mut self,
        ifindex: Ifindex,
        add: &BTreeSet<IpAddr>,
        delete: &BTreeSet<IpAddr>,
    ) -> Result<(), OpError> {
        let maps = self.maps;
        for &source in add {
            let key = convert::source_key(ifindex, source);
            self.put(pin::SOURCES, &maps.sources, &key, &key.check())
                .map_err(|errno| {
                    let need = self.known.sources_len() + 1;
                    full_or_refused(pin::SOURCES, need, maps.sources.info().shape.max_entries, errno)
                })?;
            self.known.add_source(&key);
        }
        for &source in delete.difference(add) {
            self.delete_source(&convert::source_key(ifindex, source))?;
        }
        Ok(())
    }

    fn delete_source(&mut self, key: &abi::SourceKey) -> Result<(), OpError> {
        self.take(pin::SOURCES, &self.maps.sources, key)?;
        self.known.sources.remove(&source(key));
        Ok(())
    }

    /// All or nothing: what was written in this call is taken back when a later element fails.
    pub(super) fn write_entries(
        &mut self,
        ifindex: Ifindex,
        entries: &BTreeMap<RouteKey, Entry>,
    ) -> Result<(), OpError> {
        let mut done = Vec::new();
        for element in elements(ifindex, entries) {
            match self.put_element(&element) {
                Ok(written) => done.extend(written),
                Err(errno) => {
                    self.undo(&done);
                    return Err(self.not_written(ifindex, entries, &element, errno));
                }
            }
        }
        Ok(())
    }

    /// How to take it back; none when it was so already.
    fn put_element(&mut self, element: &Element) -> Result<Option<Written>, Errno> {
        let maps = self.maps;
        match element {
            Element::Service(key, value) => {
                let before = self.put(pin::SERVICES, &maps.services, key, value)?;
                self.known.add_service(key);
                Ok(before.replaced().map(|before| Written::Service(*key, before)))
            }
            Element::Prefix(key, value) => {
                let before = self.put_prefix(key, value)?;
                self.known.add_prefix(key);
                Ok(before.replaced().map(|before| Written::Prefix(*key, before)))
            }
        }
    }

    fn put_prefix(
        &mut self,
        key: &abi::PrefixKey,
        value: &abi::PrefixEntry,
    ) -> Result<Before<abi::PrefixEntry>, Errno> {
        let maps = self.maps;
        // A value that is not this key's is a shorter prefix's, or senseless and no loss.
        let before = maps
            .prefixes
            .lookup_longest(key)?
            .filter(|found| convert::prefix_entry_of(key, found).is_some());
        if before.as_ref() == Some(value) {
            return Ok(Before::Same);
        }
        let is_new = !self.known.prefixes.contains(&prefix(key));
        if is_new && self.known.prefixes_len() >= u64::from(maps.room_for_prefixes()) {
            return Err(Errno::NOSPC);
        }
        maps.writing(|| maps.prefixes.update(key, value))?;
        self.writes += 1;
        self.tally.updated(pin::PREFIXES);
        Ok(before.map_or(Before::Absent, Before::Other))
    }

    /// Why the entries could not be written, and how much room they want.
    fn not_written(
        &self,
        ifindex: Ifindex,
        entries: &BTreeMap<RouteKey, Entry>,
        element: &Element,
        errno: Errno,
    ) -> OpError {
        let wanted = elements(ifindex, entries);
        match element {
            Element::Service(..) => {
                let wanted: BTreeSet<Service> = wanted.iter().filter_map(Element::service).collect();
                let missing = wanted.difference(&self.known.services).count() as u64;
                let need = self.known.services_len() + missing;
                let have = self.maps.services.info().shape.max_entries;
                full_or_refused(pin::SERVICES, need, have, errno)
            }
            Element::Prefix(..) => {
                let wanted: BTreeSet<Prefix> = wanted.iter().filter_map(Element::prefix).collect();
                let missing = wanted.difference(&self.known.prefixes).count() as u64;
                let need = self.known.prefixes_len() + missing;
                full_or_refused(pin::PREFIXES, need, self.maps.room_for_prefixes(), errno)
            }
        }
    }

    /// Back to what was there, last first. What cannot be taken back stays known, so that it is cleared later.
    fn undo(&mut self, done: &[Written]) {
        for written in done.iter().rev() {
            if let Err((ifindex, errno)) = self.take_back(written) {
                tracing::warn!(ifindex, %errno, "an entry of a failed write could not be taken back");
            }
        }
    }

    fn take_back(&mut self, written: &Written) -> Result<(), (Ifindex, Errno)> {
        let maps = self.maps;
        match written {
            Written::Service(key, Some(before)) => {
                maps.writing(|| maps.services.update(key, before))
                    .map_err(|errno| (key.ifindex, errno))?;
                self.tally.updated(pin::SERVICES);
            }
            Written::Service(key, None) => {
                maps.writing(|| maps.services.delete(key))
                    .map_err(|errno| (key.ifindex, errno))?;
                self.tally.deleted(pin::SERVICES);
                self.known.services.remove(&service(key));
            }
            Written::Prefix(key, Some(before)) => {
                maps.writing(|| maps.prefixes.update(key, before))
                    .map_err(|errno| (convert::interface_of(key), errno))?;
                self.tally.updated(pin::PREFIXES);
            }
            Written::Prefix(key, None) => {
                maps.writing(|| maps.prefixes.delete(key))
                    .map_err(|errno| (convert::interface_of(key), errno))?;
                self.tally.deleted(pin::PREFIXES);
                self.known.prefixes.remove(&prefix(key));
            }
        }
        Ok(())
    }

    pub(super) fn delete_entries(
        &mut self,
        ifindex: Ifindex,
        keys: &BTreeSet<RouteKey>,
    ) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for key in keys {
            // One that fails does not keep the others.
            if let Some(key) = convert::service_key(ifindex, key) {
                outcome = outcome.and(self.delete_service(&key));
            }
            if let Some(key) = convert::prefix_key(ifindex, key) {
                outcome = outcome.and(self.delete_prefix(&key));
            }
        }
        outcome
    }

    fn delete_prefix(&mut self, key: &abi::PrefixKey) -> Result<(), OpError> {
        let deleted = self.maps.writing(|| self.maps.prefixes.delete(key));
        self.taken(pin::PREFIXES, deleted)?;
        self.known.prefixes.remove(&prefix(key));
        Ok(())
    }

    /// Adds before it deletes.
    pub(super) fn write_locals(
        &mut self,
        add: &BTreeSet<IpAddr>,
        delete: &BTreeSet<IpAddr>,
    ) -> Result<(), OpError> {
        let maps = self.maps;
        for &address in add {
            let key = convert::local_key(address);
            self.put(pin::LOCALS, &maps.locals, &key, &key.check())
                .map_err(|errno| {
                    let need = self.known.locals.union(add).count() as u64;
                    full_or_refused(pin::LOCALS, need, maps.locals.info().shape.max_entries, errno)
                })?;
            self.known.locals.insert(address);
        }
        for address in delete.difference(add) {
            self.take(pin::LOCALS, &maps.locals, &convert::local_key(*address))?;
            self.known.locals.remove(address);
        }
        Ok(())
    }

    /// Deletes a route, and the claim of its address with the last one; or a claim that has no route.
    fn delete_service(&mut self, key: &abi::ServiceKey) -> Result<(), OpError> {
        let claim = convert::claim_key(key);
        if !convert::is_claim(key) {
            self.take(pin::SERVICES, &self.maps.services, key)?;
            self.known.services.remove(&service(key));
        }
        if self.known.services.contains(&service(&claim)) && !self.known.has_routes(key) {
            self.take(pin::SERVICES, &self.maps.services, &claim)?;
            self.known.services.remove(&service(&claim));
        }
        Ok(())
    }

    /// Everything that is keyed by an interface: entries of both kinds, sources, row. One that fails does not keep the others.
    pub(super) fn clear(&mut self, ifindex: Ifindex) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for key in self.known.services_of(ifindex) {
            let deleted = self.delete_service(&key);
            outcome = outcome.and(deleted);
        }
        for key in self.known.prefixes_of(ifindex) {
            let deleted = self.delete_prefix(&key);
            outcome = outcome.and(deleted);
        }
        for key in self.known.sources_of(ifindex) {
            let deleted = self.delete_source(&key);
            outcome = outcome.and(deleted);
        }
        let deleted = self.delete_row(ifindex);
        outcome.and(deleted)
    }

    pub(super) fn write_backends(
        &mut self,
        backends: &BTreeMap<BackendId, Option<Backend>>,
    ) -> Result<(), OpError> {
        let maps = self.maps;
        for (id, backend) in backends {
            let value = backend.as_ref().map(convert::backend).unwrap_or_default();
            self.put(pin::BACKENDS, &maps.backends, id, &value)
                .map_err(|errno| {
                    outside(pin::BACKENDS, *id, maps.backends.info().shape.max_entries, errno)
                })?;
            if backend.is_some() {
                self.known.backends.insert(*id);
            } else {
                self.known.backends.remove(id);
            }
        }
        Ok(())
    }

    pub(super) fn write_slots(&mut self, base: u32, slots: &[BackendId]) -> Result<(), OpError> {
        let maps = self.maps;
        let have = maps.slots.info().shape.max_entries;
        for (offset, backend) in slots.iter().enumerate() {
            let index = u32::try_from(offset)
                .ok()
                .and_then(|offset| base.checked_add(offset))
                .ok_or_else(|| outside(pin::SLOTS, u32::MAX, have, Errno::TOOBIG))?;
            self.put(pin::SLOTS, &maps.slots, &index, backend)
                .map_err(|errno| outside(pin::SLOTS, index, have, errno))?;
        }
        Ok(())
    }

    /// One write of the whole slot: its selector is one word of it, and so is switched at one moment.
    pub(super) fn write_policy(&mut self, slot: SlotId, value: Option<&PolicySlot>) -> Result<(), OpError> {
        let maps = self.maps;
        let raw = value.map(convert::policy).unwrap_or_default();
        self.put(pin::POLICIES, &maps.policies, &slot, &raw)
            .map_err(|errno| outside(pin::POLICIES, slot, maps.policies.info().shape.max_entries, errno))?;
        if value.is_some() {
            self.known.policies.insert(slot);
        } else {
            self.known.policies.remove(&slot);
        }
        Ok(())
    }
}

/// E2BIG and, on some map types, ENOSPC say that a hash takes no more.
fn full_or_refused(map: &'static str, need: u64, have: u32, errno: Errno) -> OpError {
    match errno {
        Errno::TOOBIG | Errno::NOSPC => OpError::Full {
            map: map.to_owned(),
            need: u32::try_from(need).unwrap_or(u32::MAX),
            have,
        },
        errno => refused("writing to", map, errno),
    }
}

/// An index beyond an array is E2BIG too.
fn outside(map: &'static str, index: u32, have: u32, errno: Errno) -> OpError {
    full_or_refused(map, u64::from(index) + 1, have, errno)
}

pub(super) fn refused(operation: &str, map: &str, errno: Errno) -> OpError {
    OpError::Refused {
        message: format!("{operation} map {map}: {}", io::Error::from(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(ifindex: u32, last: u8, port: u16) -> abi::ServiceKey {
        let (family, address) = convert::address(IpAddr::from([10, 96, 0, last]));
        abi::ServiceKey {
            ifindex,
            port: port.to_be(),
            protocol: 17,
            family,
            address,
        }
    }

    #[test]
    fn an_address_has_routes_until_the_last_is_gone() {
        let mut known = Known::default();
        for key in [key(7, 10, 53), key(7, 10, 80), key(7, 11, 53)] {
            known.add_service(&convert::claim_key(&key));
            known.add_service(&key);
        }
        assert_eq!(known.services_len(), 5);
        known.services.remove(&service(&key(7, 10, 53)));
        assert!(known.has_routes(&key(7, 10, 53)));
        known.services.remove(&service(&key(7, 10, 80)));
        assert!(!known.has_routes(&key(7, 10, 53)));
        assert!(known.has_routes(&key(7, 11, 53)));
    }

    #[test]
    fn the_keys_of_an_interface_are_its_own_and_claims_come_last() {
        let mut known = Known::default();
        for ifindex in [6, 7, 8] {
            let key = key(ifindex, 10, 53);
            known.add_service(&convert::claim_key(&key));
            known.add_service(&key);
            known.add_source(&convert::source_key(ifindex, IpAddr::from([10, 0, 0, 1])));
        }
        let keys = known.services_of(7);
        assert_eq!(keys, [key(7, 10, 53), convert::claim_key(&key(7, 10, 53))]);
        assert_eq!(known.sources_of(7).len(), 1);
        assert_eq!(known.services_of(9), []);
    }

    fn prefix_of(ifindex: u32, network: [u8; 4], length: u8) -> abi::PrefixKey {
        let address = IpAddr::from(network);
        convert::prefix_key(ifindex, &RouteKey::Prefix { address, length }).unwrap()
    }

    #[test]
    fn the_prefixes_within_a_prefix_are_its_own_interfaces_longer_ones() {
        let mut known = Known::default();
        for ifindex in [6, 7, 8] {
            for (network, length) in [
                ([0, 0, 0, 0], 0),
                ([9, 0, 0, 0], 8),
                ([10, 0, 0, 0], 8),
                ([10, 0, 0, 0], 16),
                ([10, 255, 255, 255], 32),
                ([11, 0, 0, 0], 8),
            ] {
                known.add_prefix(&prefix_of(ifindex, network, length));
            }
            let v6 = RouteKey::Prefix {
                address: IpAddr::from([0_u16; 8]),
                length: 0,
            };
            known.add_prefix(&convert::prefix_key(ifindex, &v6).unwrap());
        }
        let within = |network, length| known.within(&prefix_of(7, network, length));
        assert_eq!(
            within([10, 0, 0, 0], 8),
            [
                (IpAddr::from([10, 0, 0, 0]), 16),
                (IpAddr::from([10, 255, 255, 255]), 32)
            ]
        );
        assert_eq!(within([0, 0, 0, 0], 0).len(), 5);
        assert_eq!(within([10, 0, 0, 0], 16), []);
        assert_eq!(known.prefixes_of(7).len(), 7);
        assert!(
            known
                .prefixes_of(7)
                .iter()
                .all(|key| convert::interface_of(key) == 7)
        );
    }

    #[test]
    fn both_ways_in_which_a_map_says_full_are_full() {
        for errno in [Errno::TOOBIG, Errno::NOSPC] {
            assert_eq!(
                full_or_refused("services", 70, 64, errno),
                OpError::Full {
                    map: "services".to_owned(),
                    need: 70,
                    have: 64
                }
            );
        }
        assert!(matches!(
            full_or_refused("services", 70, 64, Errno::INVAL),
            OpError::Refused { .. }
        ));
    }
}
