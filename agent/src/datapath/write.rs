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
    Backend, BackendId, Entry, Ifindex, OpError, PolicySlot, Row, ServiceKey, SlotId,
};
use rustix::io::Errno;

use super::convert;
use super::maps::Maps;
use super::raw::{Map, Plain};

/// Keys that are in the maps, by interface; and how many elements of each map are in use.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) rows: BTreeSet<Ifindex>,
    /// Destination addresses that are claimed, with the protocols and ports of each.
    pub(super) services: BTreeMap<Ifindex, BTreeMap<Claimed, BTreeSet<(u8, u16)>>>,
    pub(super) sources: BTreeMap<Ifindex, BTreeSet<Claimed>>,
    pub(super) policies: BTreeSet<SlotId>,
    pub(super) backends: BTreeSet<BackendId>,
}

/// Family and address of a key.
pub(super) type Claimed = (u8, abi::Address);

impl Known {
    /// Elements of `services`: routes and claims.
    pub(super) fn services_len(&self) -> u64 {
        self.services
            .values()
            .flat_map(BTreeMap::values)
            .map(|ports| 1 + ports.len() as u64)
            .sum()
    }

    pub(super) fn sources_len(&self) -> u64 {
        self.sources.values().map(|sources| sources.len() as u64).sum()
    }

    pub(super) fn add_service(&mut self, key: &abi::ServiceKey) {
        let ports = self
            .services
            .entry(key.ifindex)
            .or_default()
            .entry((key.family, key.address))
            .or_default();
        if !convert::is_claim(key) {
            ports.insert((key.protocol, key.port));
        }
    }

    fn remove_route(&mut self, key: &abi::ServiceKey) {
        if let Some(ports) = self
            .services
            .get_mut(&key.ifindex)
            .and_then(|addresses| addresses.get_mut(&(key.family, key.address)))
        {
            ports.remove(&(key.protocol, key.port));
        }
    }

    /// Whether an address is claimed without a route, and so no longer has to be.
    fn is_bare_claim(&self, key: &abi::ServiceKey) -> bool {
        self.services
            .get(&key.ifindex)
            .and_then(|addresses| addresses.get(&(key.family, key.address)))
            .is_some_and(BTreeSet::is_empty)
    }

    fn remove_claim(&mut self, key: &abi::ServiceKey) {
        if let Some(addresses) = self.services.get_mut(&key.ifindex) {
            addresses.remove(&(key.family, key.address));
            if addresses.is_empty() {
                self.services.remove(&key.ifindex);
            }
        }
    }

    /// Every key of `services` that an interface has: routes before the claim of their address.
    fn service_keys(&self, ifindex: Ifindex) -> Vec<abi::ServiceKey> {
        let mut keys = Vec::new();
        for (&(family, address), ports) in self.services.get(&ifindex).into_iter().flatten() {
            let claim = abi::ServiceKey::claim(ifindex, family, address);
            keys.extend(ports.iter().map(|&(protocol, port)| abi::ServiceKey {
                protocol,
                port,
                ..claim
            }));
            keys.push(claim);
        }
        keys
    }
}

/// Elements written and deleted since the start, per map.
#[derive(Debug, Default)]
pub(super) struct Tally {
    counts: [(AtomicU64, AtomicU64); NAMES.len()],
}

/// Maps that this process writes, in the order of [`Tally`].
const NAMES: [&str; 6] = [
    pin::CONSUMERS,
    pin::SOURCES,
    pin::SERVICES,
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
        match self.maps.writing(|| map.delete(key)) {
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

    pub(super) fn delete_row(&mut self, ifindex: Ifindex) -> Result<(), OpError> {
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
            let known = self.known.sources.entry(ifindex).or_default();
            known.insert((key.family, key.address));
        }
        for &source in delete.difference(add) {
            self.delete_source(&convert::source_key(ifindex, source))?;
        }
        Ok(())
    }

    fn delete_source(&mut self, key: &abi::SourceKey) -> Result<(), OpError> {
        self.take(pin::SOURCES, &self.maps.sources, key)?;
        if let Some(known) = self.known.sources.get_mut(&key.ifindex) {
            known.remove(&(key.family, key.address));
            if known.is_empty() {
                self.known.sources.remove(&key.ifindex);
            }
        }
        Ok(())
    }

    /// All or nothing: what was written in this call is taken back when a later element fails.
    pub(super) fn write_entries(
        &mut self,
        ifindex: Ifindex,
        entries: &BTreeMap<ServiceKey, Entry>,
    ) -> Result<(), OpError> {
        let maps = self.maps;
        let mut done: Vec<(abi::ServiceKey, Option<abi::RouteEntry>)> = Vec::new();
        for (key, entry) in entries {
            let key = convert::service_key(ifindex, key);
            let claim = convert::claim_key(&key);
            // The claim goes first: a fragment of a claimed destination must never find no mark.
            for (key, value) in [
                (claim, abi::RouteEntry::claim(&claim)),
                (key, convert::entry(&key, *entry)),
            ] {
                match self.put(pin::SERVICES, &maps.services, &key, &value) {
                    Ok(before) => {
                        self.known.add_service(&key);
                        match before {
                            Before::Same => {}
                            Before::Other(before) => done.push((key, Some(before))),
                            Before::Absent => done.push((key, None)),
                        }
                    }
                    Err(errno) => {
                        self.undo(&done);
                        let need = self.known.services_len() + self.missing(ifindex, entries);
                        let have = maps.services.info().shape.max_entries;
                        return Err(full_or_refused(pin::SERVICES, need, have, errno));
                    }
                }
            }
        }
        Ok(())
    }

    /// Elements that `entries` need beyond those that are there.
    fn missing(&self, ifindex: Ifindex, entries: &BTreeMap<ServiceKey, Entry>) -> u64 {
        let mut wanted: BTreeSet<(Claimed, u8, u16)> = BTreeSet::new();
        for key in entries.keys() {
            let key = convert::service_key(ifindex, key);
            wanted.insert(((key.family, key.address), 0, 0));
            wanted.insert(((key.family, key.address), key.protocol, key.port));
        }
        for key in self.known.service_keys(ifindex) {
            wanted.remove(&((key.family, key.address), key.protocol, key.port));
        }
        wanted.len() as u64
    }

    /// Back to what was there, last first. What cannot be taken back stays known, so that it is cleared later.
    fn undo(&mut self, done: &[(abi::ServiceKey, Option<abi::RouteEntry>)]) {
        for (key, before) in done.iter().rev() {
            let undone = match before {
                Some(before) => self.maps.writing(|| self.maps.services.update(key, before)),
                None => self.maps.writing(|| self.maps.services.delete(key)).map(drop),
            };
            match (undone, before) {
                (Ok(()), None) => {
                    self.tally.deleted(pin::SERVICES);
                    if convert::is_claim(key) {
                        self.known.remove_claim(key);
                    } else {
                        self.known.remove_route(key);
                    }
                }
                (Ok(()), Some(_)) => self.tally.updated(pin::SERVICES),
                (Err(errno), _) => {
                    tracing::warn!(ifindex = key.ifindex, %errno, "an entry of a failed write could not be taken back");
                }
            }
        }
    }

    pub(super) fn delete_entries(
        &mut self,
        ifindex: Ifindex,
        keys: &BTreeSet<ServiceKey>,
    ) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for key in keys {
            let key = convert::service_key(ifindex, key);
            // One that fails does not keep the others.
            let deleted = self.delete_route(&key);
            outcome = outcome.and(deleted);
        }
        outcome
    }

    fn delete_route(&mut self, key: &abi::ServiceKey) -> Result<(), OpError> {
        self.take(pin::SERVICES, &self.maps.services, key)?;
        self.known.remove_route(key);
        if self.known.is_bare_claim(key) {
            let claim = convert::claim_key(key);
            self.take(pin::SERVICES, &self.maps.services, &claim)?;
            self.known.remove_claim(&claim);
        }
        Ok(())
    }

    /// Everything that is keyed by an interface: entries, sources, row.
    pub(super) fn clear(&mut self, ifindex: Ifindex) -> Result<(), OpError> {
        let mut outcome = Ok(());
        for key in self.known.service_keys(ifindex) {
            let deleted = if convert::is_claim(&key) {
                self.delete_bare_claim(&key)
            } else {
                self.delete_route(&key)
            };
            outcome = outcome.and(deleted);
        }
        let sources: Vec<Claimed> = self
            .known
            .sources
            .get(&ifindex)
            .map(|sources| sources.iter().copied().collect())
            .unwrap_or_default();
        for (family, address) in sources {
            let deleted = self.delete_source(&abi::SourceKey {
                ifindex,
                family,
                pad: [0; 3],
                address,
            });
            outcome = outcome.and(deleted);
        }
        outcome.and(self.delete_row(ifindex))
    }

    /// A claim goes with the last route of its address; this one never had one.
    fn delete_bare_claim(&mut self, claim: &abi::ServiceKey) -> Result<(), OpError> {
        if self.known.is_bare_claim(claim) {
            self.take(pin::SERVICES, &self.maps.services, claim)?;
            self.known.remove_claim(claim);
        }
        Ok(())
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
    fn an_address_is_claimed_once_whatever_its_ports() {
        let mut known = Known::default();
        known.add_service(&key(7, 10, 53));
        known.add_service(&key(7, 10, 80));
        known.add_service(&key(7, 11, 53));
        assert_eq!(known.services_len(), 5);
        known.remove_route(&key(7, 10, 53));
        assert!(!known.is_bare_claim(&key(7, 10, 53)));
        known.remove_route(&key(7, 10, 80));
        assert!(known.is_bare_claim(&key(7, 10, 53)));
        known.remove_claim(&key(7, 10, 53));
        assert_eq!(known.services_len(), 2);
    }

    #[test]
    fn the_keys_of_an_interface_are_its_own_and_claims_come_last() {
        let mut known = Known::default();
        known.add_service(&key(7, 10, 53));
        known.add_service(&key(8, 10, 53));
        let keys = known.service_keys(7);
        assert_eq!(keys, [key(7, 10, 53), convert::claim_key(&key(7, 10, 53))]);
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
