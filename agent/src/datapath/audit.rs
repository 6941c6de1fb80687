//! Comparing the kernel with what the engine believes of it. Changes nothing.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_ebpf::abi::{self, pin};
use holdfast_engine::belief::{Audited, Belief, Difference};
use holdfast_engine::model::{
    Backend, BackendId, Entry, Identity, Ifindex, PolicySlot, Protocol, RouteKey, Row, SlotId,
};
use rustix::io::Errno;

use super::attach::{Hook, Inspection, Links};
use super::convert;
use super::maps::Maps;
use super::raw::{Map, Plain};
use super::write::Known;
use crate::registry::Registry;

/// Carries audits out.
pub(super) struct Auditor<'a> {
    pub(super) links: &'a Links,
    pub(super) maps: &'a Maps,
    pub(super) registry: &'a Registry,
    /// The kernel's id of the program that every link must lead to.
    pub(super) program: u32,
    pub(super) known: &'a Mutex<Known>,
    /// What nobody knows of and is there is known from then on, so that operations can delete it.
    pub(super) learns: bool,
}

/// Something could not be looked at, which is no news.
struct Unreadable(String);

fn unreadable(map: &'static str) -> impl FnOnce(Errno) -> Unreadable {
    move |errno| Unreadable(format!("reading {map}: {errno}"))
}

impl Auditor<'_> {
    /// Looks at everything that is believed. What cannot be read keeps nothing else from being looked at.
    pub(super) fn audit(&self, beliefs: &[Belief]) -> Audited {
        let mut audited = Audited::default();
        for belief in beliefs {
            if let Err(Unreadable(why)) = self.look(belief, &mut audited.differences) {
                audited.unreadable.get_or_insert(why);
            }
        }
        audited
    }

    fn look(&self, belief: &Belief, found: &mut Vec<Difference>) -> Result<(), Unreadable> {
        match belief {
            Belief::Program { ifindex, before } => self.program(*ifindex, before.as_deref(), found),
            Belief::Row { ifindex, row } => self.row(*ifindex, row.as_ref(), found),
            Belief::Sources { ifindex, sources } => self.sources(*ifindex, sources, found),
            Belief::Entries { ifindex, entries } => entries
                .iter()
                .try_for_each(|(key, entry)| self.entry(*ifindex, *key, *entry, found)),
            Belief::Identity { ifindex, identity } => self.identity(*ifindex, identity.as_ref(), found),
            Belief::Policy { slot, value } => self.policy(*slot, value, found),
            Belief::Table { slot, base, table } => self.table(*slot, *base, table, found),
            Belief::Backend { id, backend } => self.backend(*id, backend, found),
            Belief::Locals { addresses } => self.locals(addresses, found),
            Belief::Nothing { links } => self.nothing(links, found),
        }
    }

    fn program(
        &self,
        ifindex: Ifindex,
        before: Option<&[String]>,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let no_program = |found: String| Difference::NoProgram { ifindex, found };
        // Filters are asked for by netlink, device by device: not where a glance was meant.
        if before.is_none() && self.links.hook() == Hook::Clsact {
            return Ok(());
        }
        let Inspection {
            program,
            before: there,
        } = self
            .links
            .inspect(ifindex)
            .map_err(|error| Unreadable(error.to_string()))?;
        match program {
            Err(why) => found.push(no_program(why)),
            Ok(program) if program != self.program => found.push(no_program(format!(
                "device {ifindex} has program {program} in the place of ours, {}",
                self.program
            ))),
            Ok(_) => {
                let programs: Vec<String> = there.iter().map(ToString::to_string).collect();
                if before.is_some_and(|before| *before != programs) {
                    found.push(Difference::Foreign { ifindex, programs });
                }
            }
        }
        Ok(())
    }

    fn row(
        &self,
        ifindex: Ifindex,
        row: Option<&Row>,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let there = self.maps.consumers.lookup(&ifindex);
        let there = there.map_err(unreadable(pin::CONSUMERS))?;
        if there != row.map(|row| convert::row(ifindex, row)) {
            let found_row = there.map(|value| any_row(ifindex, &value));
            found.push(Difference::Row {
                ifindex,
                found: found_row,
            });
        }
        Ok(())
    }

    fn sources(
        &self,
        ifindex: Ifindex,
        sources: &BTreeSet<IpAddr>,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        for &address in sources {
            let key = convert::source_key(ifindex, address);
            let there = self.maps.sources.lookup(&key).map_err(unreadable(pin::SOURCES))?;
            if there != Some(key.check()) {
                found.push(Difference::Source {
                    ifindex,
                    address,
                    found: false,
                });
            }
        }
        Ok(())
    }

    fn entry(
        &self,
        ifindex: Ifindex,
        key: RouteKey,
        entry: Entry,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let (right, there) = if let Some(raw) = convert::service_key(ifindex, &key) {
            self.service(&raw, entry)?
        } else if let Some(raw) = convert::prefix_key(ifindex, &key) {
            self.prefix(&raw, entry)?
        } else {
            return Ok(());
        };
        if !right {
            found.push(Difference::Entry {
                ifindex,
                key,
                found: there,
            });
        }
        Ok(())
    }

    /// Whether a service and the mark that some port of its address is claimed are as believed; and what is there.
    fn service(&self, key: &abi::ServiceKey, entry: Entry) -> Result<(bool, Option<Entry>), Unreadable> {
        let claim = convert::claim_key(key);
        let lookup =
            |key: &abi::ServiceKey| self.maps.services.lookup(key).map_err(unreadable(pin::SERVICES));
        let (there, marked) = (lookup(key)?, lookup(&claim)?);
        let right =
            there == Some(convert::entry(key, entry)) && marked == Some(abi::RouteEntry::claim(&claim));
        Ok((right, there.map(|value| any_entry(key, &value))))
    }

    fn prefix(&self, key: &abi::PrefixKey, entry: Entry) -> Result<(bool, Option<Entry>), Unreadable> {
        let there = self.maps.prefixes.lookup_longest(key);
        let there = there.map_err(unreadable(pin::PREFIXES))?;
        let right = there == Some(convert::prefix_entry(key, entry));
        // A value that is not this key's is a shorter prefix's: this one is not there.
        Ok((
            right,
            there.and_then(|value| convert::prefix_entry_of(key, &value)),
        ))
    }

    fn locals(&self, addresses: &BTreeSet<IpAddr>, found: &mut Vec<Difference>) -> Result<(), Unreadable> {
        let elements = self.maps.locals.dump().map_err(unreadable(pin::LOCALS))?;
        let there: BTreeSet<IpAddr> = elements
            .iter()
            .filter(|(key, value)| *value == key.check())
            .filter_map(|(key, _)| convert::address_of(key.family, key.address))
            .collect();
        let missing = addresses.difference(&there).map(|address| (*address, false));
        let more = there.difference(addresses).map(|address| (*address, true));
        found.extend(
            missing
                .chain(more)
                .map(|(address, found)| Difference::Local { address, found }),
        );
        Ok(())
    }

    fn identity(
        &self,
        ifindex: Ifindex,
        identity: Option<&Identity>,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let there = self.registry.read(ifindex).map_err(unreadable(pin::REGISTRY))?;
        if there.as_ref() != identity {
            found.push(Difference::Identity { ifindex });
        }
        Ok(())
    }

    fn policy(
        &self,
        slot: SlotId,
        value: &PolicySlot,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let there = self
            .maps
            .policies
            .lookup(&slot)
            .map_err(unreadable(pin::POLICIES))?;
        if there != Some(convert::policy(value)) {
            let there = there.as_ref().and_then(convert::policy_of);
            found.push(Difference::Policy { slot, found: there });
        }
        Ok(())
    }

    fn table(
        &self,
        slot: SlotId,
        base: u32,
        table: &[BackendId],
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        for (index, backend) in (base..).zip(table) {
            let there = self.maps.slots.lookup(&index).map_err(unreadable(pin::SLOTS))?;
            if there != Some(*backend) {
                found.push(Difference::Table { slot });
                return Ok(());
            }
        }
        Ok(())
    }

    fn backend(
        &self,
        id: BackendId,
        backend: &Backend,
        found: &mut Vec<Difference>,
    ) -> Result<(), Unreadable> {
        let there = self
            .maps
            .backends
            .lookup(&id)
            .map_err(unreadable(pin::BACKENDS))?;
        if there != Some(convert::backend(backend)) {
            let there = there.as_ref().and_then(convert::backend_of);
            found.push(Difference::Backend { id, found: there });
        }
        Ok(())
    }

    // --- what nobody believes in ---------------------------------------------------------------------------

    /// What is there and was written by no operation.
    fn nothing(&self, links: &BTreeSet<Ifindex>, found: &mut Vec<Difference>) -> Result<(), Unreadable> {
        let strays = self.links.strays(links, self.program);
        let strays = strays.map_err(|error| Unreadable(error.to_string()))?;
        found.extend(strays.into_iter().map(|ifindex| Difference::Link { ifindex }));
        self.stray(pin::CONSUMERS, &self.maps.consumers, found, stray_row)?;
        self.stray(pin::SOURCES, &self.maps.sources, found, stray_source)?;
        self.stray(pin::SERVICES, &self.maps.services, found, stray_service)?;
        self.stray_prefixes(found)?;
        self.stray(pin::POLICIES, &self.maps.policies, found, stray_policy)?;
        self.stray(pin::BACKENDS, &self.maps.backends, found, stray_backend)
    }

    /// Elements of a map that nobody knows of.
    fn stray<K: Plain, V: Plain>(
        &self,
        name: &'static str,
        map: &Map<K, V>,
        found: &mut Vec<Difference>,
        stray: impl Fn(&Known, &K, &V) -> Option<Stray>,
    ) -> Result<(), Unreadable> {
        map.scan(|keys, values| {
            // The writer keeps what is known and what is there the same while it holds this.
            let mut known = self.known();
            for (key, value) in keys.iter().zip(values) {
                if stray(&known, key, value).is_none() {
                    continue;
                }
                // It may have been deleted since the map was read.
                if let Some(value) = map.lookup(key)?
                    && let Some(Stray { difference, learn }) = stray(&known, key, &value)
                {
                    if self.learns {
                        learn(&mut known);
                    }
                    found.push(difference);
                }
            }
            Ok(())
        })
        .map_err(unreadable(name))
    }

    /// The same for a trie: while it is read elements may go, and others may be seen twice.
    fn stray_prefixes(&self, found: &mut Vec<Difference>) -> Result<(), Unreadable> {
        let elements = self.maps.prefixes.dump().map_err(unreadable(pin::PREFIXES))?;
        for (key, _) in elements {
            let mut known = self.known();
            let Some(route) = convert::prefix_key_of(&key).filter(|_| !known.has_prefix(&key)) else {
                continue;
            };
            let there = self.maps.prefixes.lookup_longest(&key);
            let there = there.map_err(unreadable(pin::PREFIXES))?;
            if let Some(entry) = there.and_then(|value| convert::prefix_entry_of(&key, &value)) {
                if self.learns {
                    known.add_prefix(&key);
                }
                found.push(Difference::Entry {
                    ifindex: convert::interface_of(&key),
                    key: route,
                    found: Some(entry),
                });
            }
        }
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // What is known is right after every single element.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An element that nobody knows of.
struct Stray {
    difference: Difference,
    /// Makes it known, so that it can be deleted with whatever it belongs to.
    learn: Box<dyn FnOnce(&mut Known)>,
}

impl Stray {
    fn new(difference: Difference, learn: impl FnOnce(&mut Known) + 'static) -> Option<Self> {
        let learn = Box::new(learn);
        Some(Self { difference, learn })
    }
}

fn stray_row(known: &Known, key: &Ifindex, value: &abi::ConsumerRow) -> Option<Stray> {
    let ifindex = *key;
    let found = Some(any_row(ifindex, value));
    if known.rows.contains(key) {
        return None;
    }
    Stray::new(Difference::Row { ifindex, found }, move |known| {
        known.rows.insert(ifindex);
    })
}

fn stray_source(known: &Known, key: &abi::SourceKey, _: &u64) -> Option<Stray> {
    if known.has_source(key) {
        return None;
    }
    let key = *key;
    let difference = Difference::Source {
        ifindex: key.ifindex,
        address: convert::address_of(key.family, key.address)?,
        found: true,
    };
    Stray::new(difference, move |known| known.add_source(&key))
}

/// A mark of an address without a route is told as an entry of port 0: no policy has that, and with it the mark goes.
fn stray_service(known: &Known, key: &abi::ServiceKey, value: &abi::RouteEntry) -> Option<Stray> {
    if known.has_service(key) {
        return None;
    }
    let key = *key;
    let service = if convert::is_claim(&key) {
        RouteKey::Service {
            address: convert::address_of(key.family, key.address)?,
            protocol: Protocol::Udp,
            port: 0,
        }
    } else {
        convert::service_key_of(&key)?
    };
    let difference = Difference::Entry {
        ifindex: key.ifindex,
        key: service,
        found: Some(any_entry(&key, value)),
    };
    Stray::new(difference, move |known| known.add_service(&key))
}

fn stray_policy(known: &Known, key: &SlotId, value: &abi::PolicySlot) -> Option<Stray> {
    let slot = *key;
    if known.policies.contains(key) {
        return None;
    }
    let found = Some(convert::policy_of(value)?);
    Stray::new(Difference::Policy { slot, found }, move |known| {
        known.policies.insert(slot);
    })
}

fn stray_backend(known: &Known, key: &BackendId, value: &abi::Backend) -> Option<Stray> {
    let id = *key;
    if known.backends.contains(key) {
        return None;
    }
    let found = Some(convert::backend_of(value)?);
    Stray::new(Difference::Backend { id, found }, move |known| {
        known.backends.insert(id);
    })
}

/// What a row says, even if it is no row of its key: the program takes that for a miss, as it would a closed one.
fn any_row(ifindex: Ifindex, value: &abi::ConsumerRow) -> Row {
    convert::row_of(ifindex, value).unwrap_or(Row {
        token: None,
        epoch: value.epoch,
        has_services: false,
        has_prefixes_v4: false,
        has_prefixes_v6: false,
        has_sources: false,
        via: None,
    })
}

/// What an entry says, even if it is no entry of its key: the program takes that for a miss.
fn any_entry(key: &abi::ServiceKey, value: &abi::RouteEntry) -> Entry {
    convert::entry_of(key, value).unwrap_or(Entry {
        policy: value.policy,
        open: false,
    })
}
