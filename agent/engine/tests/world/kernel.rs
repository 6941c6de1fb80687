//! The fake kernel: devices, the registry, the maps, the links of our program, and a forwarder that treats packets as
//! the program does. It knows operations only by their documentation.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::rc::Rc;

use holdfast_engine::belief::{Audited, Belief, Difference, There};
use holdfast_engine::model::{
    Adoption, Backend, BackendId, Boot, Device, Entry, Identity, Ifindex, IntentProof, Link, LinkKind, Mac,
    NameHash, Op, OpDone, OpError, OpResult, PolicySlot, RegistryRead, RouteKey, Row, Selected, SlotId,
    Token, UidHash,
};

use crate::script::{DESTINATIONS, PACKETS, Packet, SERVICES, Setup, Tamper, contains, own_address, route};

/// Names one device for as long as it lives, whatever its number, name and address are: what no real program knows.
pub(crate) type Instance = u64;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dev {
    pub(crate) instance: Instance,
    pub(crate) link: Link,
}

impl Dev {
    pub(crate) const fn device(&self) -> Device {
        Device {
            ifindex: self.link.ifindex,
            mac: self.link.mac,
        }
    }
}

/// What the program does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Takes the default path: no program, no row, no entry.
    Pass,
    /// A gate is closed and the policy lets pass.
    PassHeld,
    /// A gate is closed.
    DropHeld,
    /// The set has nobody for this packet.
    DropNoProducer,
    /// The source is none of the attachment's.
    DropSpoofed,
    /// To this backend.
    Deliver(BackendId),
}

impl Verdict {
    pub(crate) const fn delivers(self) -> bool {
        matches!(self, Self::Deliver(_))
    }

    /// Whether the packet takes the default path.
    pub(crate) const fn leaks(self) -> bool {
        matches!(self, Self::Pass | Self::PassHeld)
    }
}

/// What the program does with the packets of one kind: one verdict for each member of the set (one in all if no set is
/// asked), since the hash of a flow may lead to any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fate {
    /// The slot of the policy that the entry leads to.
    pub(crate) policy: Option<SlotId>,
    /// The destination by which it goes there.
    pub(crate) key: Option<RouteKey>,
    pub(crate) verdicts: Vec<Verdict>,
}

impl Fate {
    fn one(by: Option<(RouteKey, SlotId)>, verdict: Verdict) -> Self {
        Self {
            policy: by.map(|(_, policy)| policy),
            key: by.map(|(key, _)| key),
            verdicts: vec![verdict],
        }
    }

    /// Whether every packet is delivered.
    pub(crate) fn serves(&self) -> bool {
        self.verdicts.iter().all(|verdict| verdict.delivers())
    }

    /// Whether some packet is delivered.
    pub(crate) fn delivers(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.delivers())
    }

    /// Whether some packet takes the default path.
    pub(crate) fn leaks(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.leaks())
    }

    pub(crate) fn backends(&self) -> impl Iterator<Item = BackendId> + '_ {
        self.verdicts.iter().filter_map(|verdict| match verdict {
            Verdict::Deliver(backend) => Some(*backend),
            _ => None,
        })
    }
}

/// An established flow, as the consumer's packet made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Flow {
    pub(crate) consumer: Ifindex,
    pub(crate) key: RouteKey,
    pub(crate) consumer_token: Token,
    pub(crate) producer: Ifindex,
    pub(crate) producer_token: Token,
    pub(crate) epoch: u32,
    pub(crate) backend: BackendId,
    pub(crate) policy: SlotId,
}

/// What goes wrong with operations until it is mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Kinds of operation that are refused, for one interface's number or for all (0).
    pub(crate) refused: BTreeSet<(OpKind, Ifindex)>,
    /// Registry rows that cannot be read.
    pub(crate) unreadable: BTreeSet<Ifindex>,
}

/// The kinds of what the kernel is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum OpKind {
    Attach,
    Detach,
    ClearInterface,
    WriteRow,
    WriteSources,
    WriteLocals,
    WriteEntries,
    DeleteEntries,
    WriteBackends,
    WriteSlots,
    WritePolicy,
    DeleteIdentity,
    ProveSet,
    ProveIntent,
    ReadRegistry,
    AskLink,
    Audit,
    DumpLinks,
}

impl OpKind {
    pub(crate) const ALL: [Self; 18] = [
        Self::Attach,
        Self::Detach,
        Self::ClearInterface,
        Self::WriteRow,
        Self::WriteSources,
        Self::WriteLocals,
        Self::WriteEntries,
        Self::DeleteEntries,
        Self::WriteBackends,
        Self::WriteSlots,
        Self::WritePolicy,
        Self::DeleteIdentity,
        Self::ProveSet,
        Self::ProveIntent,
        Self::ReadRegistry,
        Self::AskLink,
        Self::Audit,
        Self::DumpLinks,
    ];
    /// Those that are operations.
    pub(crate) const OPS: [Self; 14] = {
        let mut ops = [Self::Attach; 14];
        let mut at = 0;
        while at < ops.len() {
            ops[at] = Self::ALL[at];
            at += 1;
        }
        ops
    };

    pub(crate) const fn of(op: &Op) -> Self {
        match op {
            Op::Attach { .. } => Self::Attach,
            Op::Detach { .. } => Self::Detach,
            Op::ClearInterface { .. } => Self::ClearInterface,
            Op::WriteRow { .. } => Self::WriteRow,
            Op::WriteSources { .. } => Self::WriteSources,
            Op::WriteLocals { .. } => Self::WriteLocals,
            Op::WriteEntries { .. } => Self::WriteEntries,
            Op::DeleteEntries { .. } => Self::DeleteEntries,
            Op::WriteBackends { .. } => Self::WriteBackends,
            Op::WriteSlots { .. } => Self::WriteSlots,
            Op::WritePolicy { .. } => Self::WritePolicy,
            Op::DeleteIdentity { .. } => Self::DeleteIdentity,
            Op::ProveSet { .. } => Self::ProveSet,
            Op::ProveIntent(_) => Self::ProveIntent,
        }
    }
}

/// The device that an operation is about; none for those about policies.
pub(crate) fn ifindex_of(op: &Op) -> Option<Ifindex> {
    match op {
        Op::Attach { device } => Some(device.ifindex),
        Op::Detach { ifindex }
        | Op::ClearInterface { ifindex }
        | Op::WriteRow { ifindex, .. }
        | Op::WriteSources { ifindex, .. }
        | Op::WriteEntries { ifindex, .. }
        | Op::DeleteEntries { ifindex, .. }
        | Op::DeleteIdentity { ifindex, .. } => Some(*ifindex),
        Op::ProveIntent(proof) => Some(proof.device.ifindex),
        Op::WriteLocals { .. }
        | Op::WriteBackends { .. }
        | Op::WriteSlots { .. }
        | Op::WritePolicy { .. }
        | Op::ProveSet { .. } => None,
    }
}

/// How one operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Outcome {
    /// As it should.
    Done,
    /// Refused, and nothing happened.
    Refused,
    /// Refused after it had happened.
    RefusedAfter,
    /// Refused half way, where there is a half way.
    RefusedHalf,
}

/// All of it.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) devices: BTreeMap<Ifindex, Dev>,
    /// Devices that were moved to another network namespace.
    pub(crate) elsewhere: BTreeMap<String, Dev>,
    pub(crate) registry: BTreeMap<Ifindex, Identity>,
    /// For which device each row was registered.
    pub(crate) registered: BTreeMap<Ifindex, Instance>,
    /// Pinned links by the number of their pin, and the device that holds the program by it.
    pub(crate) pins: BTreeMap<Ifindex, Instance>,
    pub(crate) rows: BTreeMap<Ifindex, Row>,
    pub(crate) sources: BTreeMap<Ifindex, BTreeSet<IpAddr>>,
    /// The node's own addresses, as the program knows them.
    pub(crate) locals: BTreeSet<IpAddr>,
    pub(crate) entries: BTreeMap<Ifindex, BTreeMap<RouteKey, Entry>>,
    pub(crate) policies: BTreeMap<SlotId, PolicySlot>,
    pub(crate) backends: BTreeMap<BackendId, Backend>,
    pub(crate) slots: Vec<BackendId>,
    pub(crate) flows: BTreeSet<Flow>,
    /// Entries that fit into `services`.
    pub(crate) services_capacity: u32,
    pub(crate) faults: Faults,
    /// Devices from which somebody else took our program.
    pub(crate) stripped: BTreeSet<Instance>,
    /// Somebody else's programs before ours.
    pub(crate) foreign: BTreeMap<Ifindex, Vec<String>>,
    /// What somebody else wrote where no operation had written.
    planted: BTreeSet<Planted>,
    /// How many of [`crate::script::packet`] are looked at.
    pub(crate) packets: u8,
    /// How many policy slots and backends there can be.
    arenas: (u32, u32),
    /// Raised whenever a map or a link really changed.
    pub(crate) changes: u64,
    /// The different backends of ranges of slots, until slots are written.
    members: RefCell<BTreeMap<Range, Members>>,
}

/// An element of our maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Planted {
    Row(Ifindex),
    Source(Ifindex, IpAddr),
    Entry(Ifindex, RouteKey),
    Policy(SlotId),
    Backend(BackendId),
}

/// Base and length of a range of slots.
type Range = (u32, u16);
/// The different backends in a range.
type Members = Rc<[BackendId]>;

impl Kernel {
    pub(crate) fn new(setup: Setup) -> Self {
        Self {
            devices: BTreeMap::new(),
            elsewhere: BTreeMap::new(),
            registry: BTreeMap::new(),
            registered: BTreeMap::new(),
            pins: BTreeMap::new(),
            rows: BTreeMap::new(),
            sources: BTreeMap::new(),
            locals: BTreeSet::new(),
            entries: BTreeMap::new(),
            policies: BTreeMap::new(),
            backends: BTreeMap::new(),
            slots: vec![0; setup.slots as usize],
            flows: BTreeSet::new(),
            services_capacity: u32::MAX,
            faults: Faults::default(),
            stripped: BTreeSet::new(),
            foreign: BTreeMap::new(),
            planted: BTreeSet::new(),
            packets: if setup.prefixes { PACKETS } else { SERVICES },
            arenas: (setup.policies, setup.backends),
            changes: 0,
            members: RefCell::default(),
        }
    }

    pub(crate) fn named(&self, name: &str) -> Option<&Dev> {
        self.devices.values().find(|dev| dev.link.name == name)
    }

    pub(crate) fn named_mut(&mut self, name: &str) -> Option<&mut Dev> {
        self.devices.values_mut().find(|dev| dev.link.name == name)
    }

    /// Whether our program is at the device that has this number.
    pub(crate) fn attached(&self, ifindex: Ifindex) -> bool {
        self.devices
            .get(&ifindex)
            .is_some_and(|dev| self.pins.get(&ifindex) == Some(&dev.instance))
    }

    /// Numbers of devices from which somebody else took our program.
    pub(crate) fn stripped(&self) -> impl Iterator<Item = Ifindex> + '_ {
        self.devices
            .values()
            .filter(|dev| self.stripped.contains(&dev.instance))
            .map(|dev| dev.link.ifindex)
    }

    pub(crate) fn links(&self) -> Vec<Link> {
        self.devices.values().map(|dev| dev.link.clone()).collect()
    }

    fn device_is(&self, device: Device) -> bool {
        self.devices
            .get(&device.ifindex)
            .is_some_and(|dev| dev.link.mac == device.mac)
    }

    /// Whether the registered row is about the device that has this number.
    pub(crate) fn row_is_of_device(&self, ifindex: Ifindex) -> bool {
        match (self.registry.get(&ifindex), self.devices.get(&ifindex)) {
            (Some(identity), Some(dev)) => identity.host_mac_shared || identity.host_mac == dev.link.mac,
            _ => false,
        }
    }

    pub(crate) fn read_registry(&self, ifindex: Ifindex) -> RegistryRead {
        if self.faults.unreadable.contains(&ifindex) {
            return RegistryRead::Failed("EIO".into());
        }
        match self.registry.get(&ifindex) {
            Some(identity) => RegistryRead::Row(*identity),
            None => RegistryRead::Absent,
        }
    }

    /// What a new life reads back. Defunct links go.
    pub(crate) fn adopt(&mut self) -> Adoption {
        let devices = &self.devices;
        self.pins
            .retain(|ifindex, instance| devices.get(ifindex).is_some_and(|dev| dev.instance == *instance));
        // Whoever reads everything back knows of everything.
        self.planted.clear();
        self.adoption()
    }

    fn adoption(&self) -> Adoption {
        Adoption {
            attached: self
                .pins
                .keys()
                .copied()
                .filter(|ifindex| self.attached(*ifindex))
                .collect(),
            rows: self.rows.clone(),
            sources: self.sources.clone(),
            locals: self.locals.clone(),
            entries: self.entries.clone(),
            policies: self.policies.clone(),
            backends: self.backends.clone(),
            slots: self
                .policies
                .values()
                .filter(|policy| policy.selected.length > 0)
                .map(|policy| (policy.selected.base, self.range(policy.selected)))
                .collect(),
            identities: self.registry.clone(),
        }
    }

    /// What the slots of a selector hold; shorter at the end of the arena.
    pub(crate) fn range(&self, selected: Selected) -> Vec<BackendId> {
        let base = selected.base as usize;
        self.slots
            .iter()
            .skip(base)
            .take(usize::from(selected.length))
            .copied()
            .collect()
    }

    /// The different backends in the slots of a selector, in order.
    pub(crate) fn members(&self, selected: Selected) -> Rc<[BackendId]> {
        let mut members = self.members.borrow_mut();
        let range = members
            .entry((selected.base, selected.length))
            .or_insert_with(|| {
                let different: BTreeSet<BackendId> = self.range(selected).into_iter().collect();
                different.into_iter().collect()
            });
        Rc::clone(range)
    }

    fn services_len(&self) -> u32 {
        let services = |entries: &BTreeMap<RouteKey, Entry>| {
            entries.keys().filter(|key| !key.is_prefix()).count() as u32
        };
        self.entries.values().map(services).sum()
    }

    // --- operations ----------------------------------------------------------------------------------------

    /// Carries an operation out.
    pub(crate) fn carry_out(&mut self, op: &Op, outcome: Outcome) -> OpResult {
        if !self.planted.is_empty() {
            self.own(op);
        }
        let kind = OpKind::of(op);
        let persistent = self.faults.refused.contains(&(kind, 0))
            || ifindex_of(op).is_some_and(|ifindex| self.faults.refused.contains(&(kind, ifindex)));
        let refusal = || OpError::Refused {
            message: format!("{kind:?}: EIO"),
        };
        if persistent {
            return Err(refusal());
        }
        match outcome {
            Outcome::Done => self.apply(op),
            Outcome::Refused => Err(refusal()),
            Outcome::RefusedAfter => {
                self.apply(op)?;
                Err(refusal())
            }
            Outcome::RefusedHalf => {
                if let Some(half) = half(op) {
                    self.apply(&half)?;
                }
                Err(refusal())
            }
        }
    }

    /// Does it. Nothing but what the operation's documentation says.
    fn apply(&mut self, op: &Op) -> OpResult {
        let mut writes = 0;
        match op {
            Op::Attach { device } => {
                if !self.device_is(*device) {
                    return Err(OpError::NoDevice);
                }
                let instance = self.devices[&device.ifindex].instance;
                self.stripped.remove(&instance);
                writes += put(&mut self.pins, device.ifindex, instance);
            }
            Op::Detach { ifindex } => writes += take(&mut self.pins, ifindex),
            Op::ClearInterface { ifindex } => {
                writes += self
                    .entries
                    .remove(ifindex)
                    .map_or(0, |entries| entries.len() as u32);
                writes += self
                    .sources
                    .remove(ifindex)
                    .map_or(0, |sources| sources.len() as u32);
                writes += take(&mut self.rows, ifindex);
            }
            Op::WriteRow { ifindex, row } => writes += put(&mut self.rows, *ifindex, *row),
            Op::WriteSources { ifindex, add, delete } => {
                let sources = self.sources.entry(*ifindex).or_default();
                for address in add {
                    writes += u32::from(sources.insert(*address));
                }
                for address in delete.difference(add) {
                    writes += u32::from(sources.remove(address));
                }
                if sources.is_empty() {
                    self.sources.remove(ifindex);
                }
            }
            Op::WriteLocals { add, delete } => {
                for address in delete.difference(add) {
                    writes += u32::from(self.locals.remove(address));
                }
                for address in add {
                    writes += u32::from(self.locals.insert(*address));
                }
            }
            Op::WriteEntries { ifindex, entries } => {
                let there = self.entries.get(ifindex);
                let missing = entries
                    .keys()
                    .filter(|key| !key.is_prefix() && !there.is_some_and(|there| there.contains_key(key)))
                    .count() as u32;
                let need = self.services_len() + missing;
                if missing > 0 && need > self.services_capacity {
                    return Err(OpError::Full {
                        map: "services".into(),
                        need,
                        have: self.services_capacity,
                    });
                }
                let there = self.entries.entry(*ifindex).or_default();
                for (key, entry) in entries {
                    writes += put(there, *key, *entry);
                }
            }
            Op::DeleteEntries { ifindex, keys } => {
                if let Some(there) = self.entries.get_mut(ifindex) {
                    for key in keys {
                        writes += take(there, key);
                    }
                    if there.is_empty() {
                        self.entries.remove(ifindex);
                    }
                }
            }
            Op::WriteBackends { backends } => {
                for (id, backend) in backends {
                    writes += match backend {
                        Some(backend) => put(&mut self.backends, *id, backend.clone()),
                        None => take(&mut self.backends, id),
                    };
                }
            }
            Op::WriteSlots { base, slots } => {
                let base = *base as usize;
                if base + slots.len() > self.slots.len() {
                    return Err(OpError::Full {
                        map: "slots".into(),
                        need: (base + slots.len()) as u32,
                        have: self.slots.len() as u32,
                    });
                }
                self.members.borrow_mut().clear();
                for (slot, backend) in self.slots[base..].iter_mut().zip(slots) {
                    writes += u32::from(*slot != *backend);
                    *slot = *backend;
                }
            }
            Op::WritePolicy { slot, value } => {
                writes += match value {
                    Some(value) => put(&mut self.policies, *slot, value.clone()),
                    None => take(&mut self.policies, slot),
                };
            }
            Op::DeleteIdentity { ifindex, token } => {
                if self
                    .registry
                    .get(ifindex)
                    .is_some_and(|identity| identity.token == *token)
                {
                    self.registry.remove(ifindex);
                    writes += 1;
                }
            }
            Op::ProveSet {
                policy,
                device,
                selected,
                backends,
                slots,
            } => self.prove_set(*policy, *device, *selected, backends, slots)?,
            Op::ProveIntent(proof) => self.prove_intent(proof)?,
        }
        self.changes += u64::from(writes);
        Ok(OpDone { writes })
    }

    // --- audits, and what they are for -----------------------------------------------------------------------

    /// What an audit sees.
    pub(crate) fn look(&self, beliefs: &[Belief]) -> Audited {
        let pins = self.adoption();
        let there = There {
            pins: &pins,
            registry: &self.registry,
            foreign: &self.foreign,
        };
        let mut audited = Audited::default();
        for belief in beliefs {
            match belief {
                Belief::Identity { ifindex, .. } if self.faults.unreadable.contains(ifindex) => {
                    audited.unreadable = Some("EIO".into());
                }
                Belief::Table { slot, base, table } => {
                    let found = self.slots.iter().skip(*base as usize).take(table.len());
                    if !found.eq(table) {
                        audited.differences.push(Difference::Table { slot: *slot });
                    }
                }
                Belief::Nothing { links } => {
                    let pinned = self.pins.keys().filter(|ifindex| !links.contains(ifindex));
                    audited
                        .differences
                        .extend(pinned.map(|ifindex| Difference::Link { ifindex: *ifindex }));
                    audited
                        .differences
                        .extend(self.planted.iter().filter_map(|planted| self.stray(*planted)));
                }
                belief => audited.differences.extend(there.differs(belief)),
            }
        }
        audited
    }

    fn stray(&self, planted: Planted) -> Option<Difference> {
        Some(match planted {
            Planted::Row(ifindex) => Difference::Row {
                ifindex,
                found: Some(*self.rows.get(&ifindex)?),
            },
            Planted::Source(ifindex, address) => {
                self.sources.get(&ifindex)?.get(&address)?;
                Difference::Source {
                    ifindex,
                    address,
                    found: true,
                }
            }
            Planted::Entry(ifindex, key) => Difference::Entry {
                ifindex,
                key,
                found: Some(*self.entries.get(&ifindex)?.get(&key)?),
            },
            Planted::Policy(slot) => Difference::Policy {
                slot,
                found: Some(self.policies.get(&slot)?.clone()),
            },
            Planted::Backend(id) => Difference::Backend {
                id,
                found: Some(self.backends.get(&id)?.clone()),
            },
        })
    }

    /// What an operation writes or deletes is nobody else's any more; nor are flows that it has let through before anybody
    /// saw it.
    fn own(&mut self, op: &Op) {
        if let Op::WriteEntries { ifindex, entries } = op {
            let planted = &self.planted;
            self.flows.retain(|flow| {
                let by = Planted::Entry(flow.consumer, flow.key);
                flow.consumer != *ifindex || !entries.contains_key(&flow.key) || !planted.contains(&by)
            });
        }
        self.planted.retain(|planted| match (*planted, op) {
            (
                Planted::Row(at) | Planted::Source(at, _) | Planted::Entry(at, _),
                Op::ClearInterface { ifindex },
            ) => at != *ifindex,
            (Planted::Row(at), Op::WriteRow { ifindex, .. }) => at != *ifindex,
            (Planted::Source(at, address), Op::WriteSources { ifindex, add, delete }) => {
                at != *ifindex || !(add.contains(&address) || delete.contains(&address))
            }
            (Planted::Entry(at, key), Op::WriteEntries { ifindex, entries }) => {
                at != *ifindex || !entries.contains_key(&key)
            }
            (Planted::Entry(at, key), Op::DeleteEntries { ifindex, keys }) => {
                at != *ifindex || !keys.contains(&key)
            }
            (Planted::Policy(at), Op::WritePolicy { slot, .. }) => at != *slot,
            (Planted::Backend(id), Op::WriteBackends { backends }) => !backends.contains_key(&id),
            _ => true,
        });
    }

    /// Somebody changes our maps. Says whether that is about one device only; none if nothing changed.
    pub(crate) fn tamper(&mut self, ifindex: Ifindex, how: Tamper) -> Option<bool> {
        let changed = match self.tamper_with_device(ifindex, how) {
            Some(changed) => changed.then_some(true),
            None => self.tamper_with_policies(ifindex, how).then_some(false),
        };
        // Sets that are empty are none.
        self.entries.retain(|_, entries| !entries.is_empty());
        changed
    }

    /// None if it is about more than a device; else whether anything changed.
    fn tamper_with_device(&mut self, ifindex: Ifindex, how: Tamper) -> Option<bool> {
        let entries = self.entries.get_mut(&ifindex);
        let open = |entries: Option<&mut BTreeMap<RouteKey, Entry>>, open| {
            let mut changed = false;
            for entry in entries.into_iter().flat_map(BTreeMap::values_mut) {
                changed |= std::mem::replace(&mut entry.open, open) != open;
            }
            changed
        };
        Some(match how {
            Tamper::RowGone => self.rows.remove(&ifindex).is_some(),
            Tamper::RowOpen | Tamper::RowClosed => {
                let token = self.registry.get(&ifindex).map(|identity| identity.token);
                let token = token.filter(|_| how == Tamper::RowOpen);
                self.rows
                    .get_mut(&ifindex)
                    .is_some_and(|row| std::mem::replace(&mut row.token, token) != token)
            }
            Tamper::EntriesGone => self.entries.remove(&ifindex).is_some(),
            Tamper::EntriesOpened => open(entries, true),
            Tamper::EntriesClosed => open(entries, false),
            Tamper::EntriesElsewhere => {
                let entries = entries.into_iter().flat_map(BTreeMap::values_mut);
                entries.map(|entry| entry.policy ^= 1).count() > 0
            }
            Tamper::SourcesGone => self.sources.remove(&ifindex).is_some(),
            Tamper::StraySource => {
                let address = own_address(77);
                self.planted.insert(Planted::Source(ifindex, address));
                self.sources.entry(ifindex).or_default().insert(address)
            }
            Tamper::StrayRow => {
                let row = Row {
                    token: self.registry.get(&ifindex).map(|identity| identity.token),
                    epoch: 7,
                    has_services: true,
                    has_prefixes_v4: false,
                    has_prefixes_v6: false,
                    has_sources: false,
                    via: None,
                };
                let stray = !self.rows.contains_key(&ifindex);
                if stray {
                    self.planted.insert(Planted::Row(ifindex));
                    self.rows.insert(ifindex, row);
                }
                stray
            }
            Tamper::StrayEntry => {
                let entries = self.entries.entry(ifindex).or_default();
                let key = (0..DESTINATIONS)
                    .map(route)
                    .find(|key| !entries.contains_key(key));
                if let Some(key) = key {
                    let policy = self.policies.keys().next().copied().unwrap_or(0);
                    entries.insert(key, Entry { policy, open: true });
                    self.planted.insert(Planted::Entry(ifindex, key));
                }
                key.is_some()
            }
            Tamper::StrayLink => {
                let instance = self.devices.get(&ifindex).map(|dev| dev.instance);
                let pinned = self.pins.contains_key(&ifindex);
                if let Some(instance) = instance.filter(|_| !pinned) {
                    self.pins.insert(ifindex, instance);
                }
                instance.is_some() && !pinned
            }
            _ => return None,
        })
    }

    fn tamper_with_policies(&mut self, ifindex: Ifindex, how: Tamper) -> bool {
        let nth = ifindex as usize;
        let policy = self
            .policies
            .keys()
            .copied()
            .nth(nth % self.policies.len().max(1));
        let backend = self
            .backends
            .keys()
            .copied()
            .nth(nth % self.backends.len().max(1));
        match (how, policy, backend) {
            (Tamper::SelectorEmpty, Some(slot), _) => {
                let policy = self.policies.get_mut(&slot);
                policy.is_some_and(|policy| std::mem::replace(&mut policy.selected.length, 0) != 0)
            }
            (Tamper::PassFlag, Some(slot), _) => {
                if let Some(policy) = self.policies.get_mut(&slot) {
                    policy.pass_while_held ^= true;
                }
                true
            }
            (Tamper::PolicyGone, Some(slot), _) => self.policies.remove(&slot).is_some(),
            (Tamper::StrayPolicy, Some(slot), _) => {
                let Some(mut copy) = self.policies.get(&slot).cloned() else {
                    return false;
                };
                copy.uid = UidHash([9; 16]);
                let Some(free) = (0..self.arenas.0)
                    .rev()
                    .find(|slot| !self.policies.contains_key(slot))
                else {
                    return false;
                };
                self.planted.insert(Planted::Policy(free));
                self.policies.insert(free, copy).is_none()
            }
            (Tamper::Slots, Some(slot), _) => {
                let selected = self.policies[&slot].selected;
                self.members.borrow_mut().clear();
                let slots = self.slots.iter_mut().skip(selected.base as usize);
                slots
                    .take(usize::from(selected.length))
                    .map(|slot| *slot = 77)
                    .count()
                    > 0
            }
            (Tamper::BackendGone, _, Some(id)) => self.backends.remove(&id).is_some(),
            (Tamper::BackendElsewhere, _, Some(id)) => {
                let backend = self.backends.get_mut(&id);
                backend.is_some_and(|backend| std::mem::replace(&mut backend.ifindex, ifindex) != ifindex)
            }
            (Tamper::StrayBackend, _, Some(id)) => {
                let copy = self.backends[&id].clone();
                let Some(free) = (1..=self.arenas.1)
                    .rev()
                    .find(|id| !self.backends.contains_key(id))
                else {
                    return false;
                };
                self.planted.insert(Planted::Backend(free));
                self.backends.insert(free, copy).is_none()
            }
            (Tamper::LocalGone, ..) => self.locals.pop_first().is_some(),
            (Tamper::StrayLocal, ..) => self.locals.insert(own_address(99)),
            _ => false,
        }
    }

    fn holds_program(&self, device: Device) -> Result<(), OpError> {
        if !self.device_is(device) {
            return Err(OpError::NoDevice);
        }
        if !self.attached(device.ifindex) {
            return Err(not_attached(device));
        }
        Ok(())
    }

    fn prove_set(
        &self,
        policy: SlotId,
        device: Device,
        selected: Selected,
        backends: &BTreeMap<BackendId, Backend>,
        slots: &[BackendId],
    ) -> Result<(), OpError> {
        self.holds_program(device)?;
        for (id, backend) in backends {
            same(&format!("backend {id}"), Some(backend), self.backends.get(id))?;
        }
        same("slots", Some(&slots.to_vec()), Some(&self.range(selected)))?;
        // The probe uses these slots instead of the selector, but the generation that the selector has now.
        let generation = self
            .policies
            .get(&policy)
            .map_or(0, |policy| policy.selected.generation);
        let members: BTreeSet<BackendId> = backends.keys().copied().collect();
        let asked: BTreeSet<BackendId> = slots.iter().copied().collect();
        for id in &asked {
            // No consumer asks: the member may well be the device whose program is run.
            let verdict = self.backend_verdict(0, policy, generation, *id);
            same(
                "the way through the set",
                Some(&Verdict::Deliver(*id)),
                Some(&verdict),
            )?;
        }
        same("members", Some(&members), Some(&asked))
    }

    fn prove_intent(&self, proof: &IntentProof) -> Result<(), OpError> {
        self.holds_program(proof.device)?;
        let ifindex = proof.device.ifindex;
        same("row", Some(&proof.row), self.rows.get(&ifindex))?;
        let identity = self.registry.get(&ifindex);
        same(
            "token",
            Some(&proof.token),
            identity.map(|identity| &identity.token),
        )?;
        same(
            "registered device",
            Some(&true),
            Some(&self.row_is_of_device(ifindex)),
        )?;
        for source in &proof.sources {
            let there = self
                .sources
                .get(&ifindex)
                .is_some_and(|sources| sources.contains(source));
            same("source", Some(&true), Some(&there))?;
        }
        for (key, entry) in &proof.entries {
            let there = self.entries.get(&ifindex).and_then(|entries| entries.get(key));
            same("entry", Some(entry), there)?;
            let selected = self.policies.get(&entry.policy).map(|policy| policy.selected);
            same(
                "selector",
                Some(&proof.selected),
                Some(&selected.unwrap_or_default()),
            )?;
        }
        for slot in proof.takeovers.values() {
            let selected = self.policies.get(slot).map(|policy| policy.selected);
            same(
                "selector",
                Some(&proof.selected),
                Some(&selected.unwrap_or_default()),
            )?;
        }
        for (id, backend) in &proof.backends {
            same(&format!("backend {id}"), Some(backend), self.backends.get(id))?;
        }
        for id in self.members(proof.selected).iter() {
            same(
                "members of the slots",
                Some(&true),
                Some(&proof.backends.contains_key(id)),
            )?;
        }
        let taken = proof.takeovers.iter().map(|(key, slot)| {
            let policy = *slot;
            (*key, Entry { policy, open: true })
        });
        for (key, entry) in &proof.entries.clone().into_iter().chain(taken).collect::<Vec<_>>() {
            let known: Vec<IpAddr> = proof
                .sources
                .iter()
                .copied()
                .filter(|source| source.is_ipv4() == key.address().is_ipv4())
                .collect();
            let spoofed = known.is_empty() && proof.row.has_sources;
            let sources = if known.is_empty() {
                vec![stranger(key.address())]
            } else {
                known
            };
            for source in sources {
                let fate = self.route(ifindex, proof.row, source, key, *entry, true);
                let right = fate.verdicts.iter().all(|verdict| match verdict {
                    Verdict::DropSpoofed => spoofed,
                    Verdict::Deliver(id) => !spoofed && proof.backends.contains_key(id),
                    _ => false,
                });
                same(&format!("the way of {key:?}"), Some(&true), Some(&right))?;
            }
        }
        Ok(())
    }

    // --- packets -------------------------------------------------------------------------------------------

    /// What happens to packets of a kind that arrive at a device. A generation of the clock is not needed: this is about
    /// first packets.
    pub(crate) fn forward(&self, ifindex: Ifindex, source: IpAddr, packet: Packet) -> Fate {
        let found = || {
            let row = self.rows.get(&ifindex)?;
            let entries = self.entries.get(&ifindex)?;
            if !self.attached(ifindex) || self.locals.contains(&packet.address) {
                return None;
            }
            Some((row, way(row, entries, packet)?))
        };
        match found() {
            Some((row, (key, entry))) => self.route(ifindex, *row, source, &key, entry, false),
            None => Fate::one(None, Verdict::Pass),
        }
    }

    fn route(
        &self,
        ifindex: Ifindex,
        row: Row,
        source: IpAddr,
        key: &RouteKey,
        entry: Entry,
        as_if_open: bool,
    ) -> Fate {
        let free = PolicySlot {
            name: NameHash(0),
            uid: UidHash([0; 16]),
            selected: Selected::default(),
            pass_while_held: false,
            served_generation: 0,
            served_since_ms: 0,
            waiting_since: None,
            last_set_generation: 0,
        };
        let policy = self.policies.get(&entry.policy).unwrap_or(&free);
        let closed = |drop| {
            let verdict = if policy.pass_while_held {
                Verdict::PassHeld
            } else {
                drop
            };
            Fate::one(Some((*key, entry.policy)), verdict)
        };
        let open = self.row_open(ifindex, row) && entry.open;
        if !as_if_open && !open {
            return closed(Verdict::DropHeld);
        }
        if row.has_sources
            && !self
                .sources
                .get(&ifindex)
                .is_some_and(|sources| sources.contains(&source))
        {
            return Fate::one(Some((*key, entry.policy)), Verdict::DropSpoofed);
        }
        let slots = self.members(policy.selected);
        if slots.is_empty() {
            return closed(Verdict::DropNoProducer);
        }
        // A slot that leads to somebody unusable is passed over for the next.
        let verdicts: Vec<Verdict> = slots
            .iter()
            .map(|id| self.backend_verdict(ifindex, entry.policy, policy.selected.generation, *id))
            .filter(|verdict| verdict.delivers())
            .collect();
        if verdicts.is_empty() {
            return closed(Verdict::DropNoProducer);
        }
        Fate {
            policy: Some(entry.policy),
            key: Some(*key),
            verdicts,
        }
    }

    fn backend_verdict(&self, from: Ifindex, policy: SlotId, generation: u32, id: BackendId) -> Verdict {
        let Some(backend) = self.backends.get(&id) else {
            return Verdict::DropNoProducer;
        };
        let member = backend.policy == policy && at_least(backend.last_generation, generation);
        let registered = self
            .registry
            .get(&backend.ifindex)
            .is_some_and(|identity| identity.token == backend.token);
        if member && registered && backend.ifindex != from {
            Verdict::Deliver(id)
        } else {
            Verdict::DropNoProducer
        }
    }

    fn row_open(&self, ifindex: Ifindex, row: Row) -> bool {
        row.token.is_some_and(|token| {
            self.registry
                .get(&ifindex)
                .is_some_and(|identity| identity.token == token)
        })
    }

    /// Lets a packet through: established flows are made by it.
    pub(crate) fn establish(&mut self, ifindex: Ifindex, fate: &Fate) {
        let (Some(policy), Some(key), Some(row)) = (fate.policy, fate.key, self.rows.get(&ifindex)) else {
            return;
        };
        let (Some(consumer_token), epoch) = (row.token, row.epoch) else {
            return;
        };
        for id in fate.backends() {
            let Some(backend) = self.backends.get(&id) else {
                continue;
            };
            self.flows.insert(Flow {
                consumer: ifindex,
                key,
                consumer_token,
                producer: backend.ifindex,
                producer_token: backend.token,
                epoch,
                backend: id,
                policy,
            });
        }
        while self.flows.len() > 256 {
            self.flows.pop_first();
        }
    }

    /// Whether packets of a flow are still delivered without a look at its route.
    pub(crate) fn flow_holds(&self, flow: &Flow, now: Boot) -> bool {
        let Some(row) = self.rows.get(&flow.consumer) else {
            return false;
        };
        let current = self.attached(flow.consumer)
            && row.token == Some(flow.consumer_token)
            && row.epoch == flow.epoch
            && self.row_open(flow.consumer, *row);
        let (Some(policy), Some(backend)) =
            (self.policies.get(&flow.policy), self.backends.get(&flow.backend))
        else {
            return false;
        };
        let owned = backend.token == flow.producer_token
            && backend.policy == flow.policy
            && backend.ifindex == flow.producer;
        let member =
            policy.selected.length != 0 && at_least(backend.last_generation, policy.selected.generation);
        let drains = backend.drain_until.is_some_and(|until| until > now);
        let registered = self
            .registry
            .get(&flow.producer)
            .is_some_and(|identity| identity.token == flow.producer_token);
        current && owned && (member || drains) && registered
    }
}

/// The entry by which a packet goes, as the program looks it up: the service, then the longest range that has it.
fn way(row: &Row, entries: &BTreeMap<RouteKey, Entry>, packet: Packet) -> Option<(RouteKey, Entry)> {
    let Packet {
        address,
        protocol,
        port,
    } = packet;
    let service = RouteKey::Service {
        address,
        protocol,
        port,
    };
    if let Some(entry) = entries.get(&service).filter(|_| row.has_services) {
        return Some((service, *entry));
    }
    let ranges = if address.is_ipv4() {
        row.has_prefixes_v4
    } else {
        row.has_prefixes_v6
    };
    if !ranges {
        return None;
    }
    entries
        .iter()
        .filter_map(|(key, entry)| match key {
            RouteKey::Prefix {
                address: range,
                length,
            } if contains(*range, *length, address) => Some((*length, *key, *entry)),
            _ => None,
        })
        .max_by_key(|(length, _, _)| *length)
        .map(|(_, key, entry)| (key, entry))
}

/// Whether set generation `a` (24 bits, wraps) is at least `b`.
fn at_least(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) & 0x00ff_ffff) < 0x0080_0000
}

/// An address that is nobody's.
pub(crate) fn stranger(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    }
}

fn not_attached(device: Device) -> OpError {
    OpError::Detached {
        message: format!("device {} does not hold the program", device.ifindex),
    }
}

fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    wanted: Option<&T>,
    found: Option<&T>,
) -> Result<(), OpError> {
    if wanted == found {
        Ok(())
    } else {
        Err(OpError::Disproved {
            message: format!("{what}: wanted {wanted:?}, found {found:?}"),
        })
    }
}

/// Writes unless it is there; says how many elements were written.
fn put<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: V) -> u32 {
    match map.get_mut(&key) {
        Some(there) if *there == value => 0,
        Some(there) => {
            *there = value;
            1
        }
        None => {
            map.insert(key, value);
            1
        }
    }
}

fn take<K: Ord, V>(map: &mut BTreeMap<K, V>, key: &K) -> u32 {
    u32::from(map.remove(key).is_some())
}

/// The first half of an operation that has several elements and is not all or nothing.
fn half(op: &Op) -> Option<Op> {
    fn first<T: Clone>(items: impl ExactSizeIterator<Item = T>) -> Vec<T> {
        let half = items.len().div_ceil(2);
        items.take(half).collect()
    }
    Some(match op {
        Op::DeleteEntries { ifindex, keys } => Op::DeleteEntries {
            ifindex: *ifindex,
            keys: first(keys.iter().copied()).into_iter().collect(),
        },
        Op::WriteSources { ifindex, add, .. } => Op::WriteSources {
            ifindex: *ifindex,
            add: add.clone(),
            delete: BTreeSet::new(),
        },
        Op::WriteLocals { add, .. } => Op::WriteLocals {
            add: add.clone(),
            delete: BTreeSet::new(),
        },
        Op::WriteBackends { backends } => Op::WriteBackends {
            backends: first(backends.iter())
                .into_iter()
                .map(|(id, backend)| (*id, backend.clone()))
                .collect(),
        },
        Op::WriteSlots { base, slots } => Op::WriteSlots {
            base: *base,
            slots: first(slots.iter().copied()),
        },
        _ => return None,
    })
}

/// A link as this world makes them.
pub(crate) fn link(ifindex: Ifindex, name: &str, mac: Mac, kind: LinkKind) -> Link {
    Link {
        ifindex,
        name: name.into(),
        mac,
        up: true,
        carrier: true,
        kind,
        master: None,
        mtu: 1500,
        ipv6: true,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::model::{NameHash, Protocol, UidHash};

    use super::*;

    const CONSUMER: Ifindex = 5;
    const PRODUCER: Ifindex = 6;
    const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 5));
    const VETH: LinkKind = LinkKind::Veth { peer_elsewhere: true };

    fn key() -> RouteKey {
        RouteKey::Service {
            address: IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)),
            protocol: Protocol::Udp,
            port: 53,
        }
    }

    fn token(ifindex: Ifindex) -> Token {
        Token::new(u64::from(ifindex) + 100).unwrap()
    }

    fn mac(ifindex: Ifindex) -> Mac {
        Mac([2, 0, 0, 0, 0, ifindex as u8])
    }

    fn device(ifindex: Ifindex) -> Device {
        Device {
            ifindex,
            mac: mac(ifindex),
        }
    }

    fn backend(last_generation: u32) -> Backend {
        Backend {
            policy: 2,
            ifindex: PRODUCER,
            token: token(PRODUCER),
            mac: Mac::default(),
            address_v4: None,
            address_v6: None,
            via: None,
            last_generation,
            drain_until: None,
        }
    }

    const ROW: Row = Row {
        token: None,
        epoch: 3,
        has_services: true,
        has_prefixes_v4: false,
        has_prefixes_v6: false,
        has_sources: true,
        via: None,
    };

    fn row() -> Row {
        Row {
            token: Some(token(CONSUMER)),
            ..ROW
        }
    }

    fn policy(generation: u32) -> PolicySlot {
        PolicySlot {
            name: NameHash(1),
            uid: UidHash([1; 16]),
            selected: Selected {
                base: 4,
                length: 1,
                generation,
            },
            pass_while_held: false,
            served_generation: 1,
            served_since_ms: 0,
            waiting_since: None,
            last_set_generation: generation,
        }
    }

    fn entries(open: bool) -> BTreeMap<RouteKey, Entry> {
        BTreeMap::from([(key(), Entry { policy: 2, open })])
    }

    /// A kernel that serves.
    fn serving() -> Kernel {
        let mut kernel = Kernel::new(Setup {
            prefixes: true,
            slots: 16,
            ..Setup::default()
        });
        for ifindex in [CONSUMER, PRODUCER] {
            let name = format!("hf{ifindex}");
            kernel.devices.insert(
                ifindex,
                Dev {
                    instance: u64::from(ifindex),
                    link: link(ifindex, &name, mac(ifindex), VETH),
                },
            );
            kernel.registry.insert(
                ifindex,
                Identity {
                    token: token(ifindex),
                    mac: Mac::default(),
                    host_mac: mac(ifindex),
                    host_mac_shared: false,
                    incarnation: None,
                },
            );
        }
        for op in [
            Op::WriteBackends {
                backends: BTreeMap::from([(7, Some(backend(1)))]),
            },
            Op::WriteSlots {
                base: 4,
                slots: vec![7],
            },
            Op::WritePolicy {
                slot: 2,
                value: Some(policy(1)),
            },
            Op::WriteSources {
                ifindex: CONSUMER,
                add: BTreeSet::from([SOURCE]),
                delete: BTreeSet::new(),
            },
            Op::WriteEntries {
                ifindex: CONSUMER,
                entries: entries(true),
            },
            Op::WriteRow {
                ifindex: CONSUMER,
                row: row(),
            },
            Op::Attach {
                device: device(CONSUMER),
            },
        ] {
            assert_eq!(
                kernel.carry_out(&op, Outcome::Done),
                Ok(OpDone { writes: 1 }),
                "{op:?}"
            );
            assert_eq!(
                kernel.carry_out(&op, Outcome::Done),
                Ok(OpDone { writes: 0 }),
                "{op:?}"
            );
        }
        kernel
    }

    fn verdict(kernel: &Kernel) -> Vec<Verdict> {
        kernel
            .forward(CONSUMER, SOURCE, crate::script::packet(0))
            .verdicts
    }

    fn done(kernel: &mut Kernel, op: Op) {
        assert!(kernel.carry_out(&op, Outcome::Done).is_ok(), "{op:?}");
    }

    #[test]
    fn every_gate_closes() {
        let kernel = serving();
        assert_eq!(verdict(&kernel), [Verdict::Deliver(7)]);
        assert_eq!(
            kernel
                .forward(CONSUMER, stranger(SOURCE), crate::script::packet(0))
                .verdicts,
            [Verdict::DropSpoofed]
        );
        type Change = fn(&mut Kernel);
        let cases: [(Change, Verdict); 10] = [
            (
                |k| k.rows.get_mut(&CONSUMER).unwrap().token = None,
                Verdict::DropHeld,
            ),
            (
                |k| k.registry.get_mut(&CONSUMER).unwrap().token = token(99),
                Verdict::DropHeld,
            ),
            (
                |k| {
                    done(
                        k,
                        Op::WriteEntries {
                            ifindex: CONSUMER,
                            entries: entries(false),
                        },
                    );
                },
                Verdict::DropHeld,
            ),
            (
                |k| {
                    k.rows.get_mut(&CONSUMER).unwrap().token = None;
                    k.policies.get_mut(&2).unwrap().pass_while_held = true;
                },
                Verdict::PassHeld,
            ),
            (
                |k| k.policies.get_mut(&2).unwrap().selected.length = 0,
                Verdict::DropNoProducer,
            ),
            (
                |k| k.policies.get_mut(&2).unwrap().selected.generation = 2,
                Verdict::DropNoProducer,
            ),
            (
                |k| {
                    k.registry.remove(&PRODUCER);
                },
                Verdict::DropNoProducer,
            ),
            (
                |k| k.backends.get_mut(&7).unwrap().ifindex = CONSUMER,
                Verdict::DropNoProducer,
            ),
            (
                |k| done(k, Op::ClearInterface { ifindex: CONSUMER }),
                Verdict::Pass,
            ),
            (|k| done(k, Op::Detach { ifindex: CONSUMER }), Verdict::Pass),
        ];
        for (number, (change, wanted)) in cases.into_iter().enumerate() {
            let mut kernel = serving();
            change(&mut kernel);
            assert_eq!(verdict(&kernel), [wanted], "case {number}");
        }
    }

    #[test]
    fn the_program_dies_with_its_device_and_a_new_one_has_none() {
        let mut kernel = serving();
        kernel.devices.get_mut(&CONSUMER).unwrap().instance = 50;
        assert_eq!(verdict(&kernel), [Verdict::Pass]);
        assert!(kernel.adopt().attached.is_empty());
        kernel.devices.get_mut(&CONSUMER).unwrap().link.mac = mac(77);
        let op = Op::Attach {
            device: device(CONSUMER),
        };
        assert_eq!(kernel.carry_out(&op, Outcome::Done), Err(OpError::NoDevice));
    }

    fn proof() -> IntentProof {
        IntentProof {
            device: device(CONSUMER),
            row: row(),
            token: token(CONSUMER),
            sources: BTreeSet::from([SOURCE]),
            entries: entries(true),
            takeovers: BTreeMap::new(),
            selected: policy(1).selected,
            backends: BTreeMap::from([(7, backend(1))]),
        }
    }

    #[test]
    fn a_proof_holds_only_if_everything_is_so() {
        let mut kernel = serving();
        let prove = |kernel: &mut Kernel, proof: IntentProof| {
            kernel.carry_out(&Op::ProveIntent(proof), Outcome::Done)
        };
        assert!(prove(&mut kernel, proof()).is_ok());
        // As if open: a closed row and closed entries are proven too, if that is what is said of them.
        let mut closed = serving();
        closed.rows.insert(CONSUMER, ROW);
        let wanted = IntentProof { row: ROW, ..proof() };
        assert!(prove(&mut closed, wanted).is_ok());
        assert!(prove(&mut closed, proof()).is_err());
        let wrong = [
            IntentProof {
                token: token(1),
                ..proof()
            },
            IntentProof {
                entries: entries(false),
                ..proof()
            },
            IntentProof {
                selected: policy(2).selected,
                ..proof()
            },
            IntentProof {
                backends: BTreeMap::from([(7, backend(2))]),
                ..proof()
            },
            IntentProof {
                backends: BTreeMap::new(),
                ..proof()
            },
        ];
        for wrong in wrong {
            assert!(matches!(
                prove(&mut kernel, wrong),
                Err(OpError::Disproved { .. })
            ));
        }
        kernel.registry.get_mut(&CONSUMER).unwrap().host_mac = mac(9);
        assert!(prove(&mut kernel, proof()).is_err());
        kernel.devices.remove(&CONSUMER);
        assert_eq!(prove(&mut kernel, proof()), Err(OpError::NoDevice));
    }

    #[test]
    fn a_set_is_proven_before_the_selector_leads_to_it() {
        let mut kernel = serving();
        kernel.policies.get_mut(&2).unwrap().selected = Selected::default();
        let op = |last| Op::ProveSet {
            policy: 2,
            device: device(CONSUMER),
            selected: policy(2).selected,
            backends: BTreeMap::from([(7, backend(last))]),
            slots: vec![7],
        };
        assert!(kernel.carry_out(&op(1), Outcome::Done).is_ok());
        assert!(kernel.carry_out(&op(2), Outcome::Done).is_err());
        done(
            &mut kernel,
            Op::WriteSlots {
                base: 4,
                slots: vec![8],
            },
        );
        assert!(kernel.carry_out(&op(1), Outcome::Done).is_err());
    }

    #[test]
    fn a_full_map_takes_nothing_of_a_write() {
        let mut kernel = serving();
        kernel.services_capacity = 2;
        let other = |port| RouteKey::Service {
            address: key().address(),
            protocol: Protocol::Udp,
            port,
        };
        let entry = Entry {
            policy: 2,
            open: false,
        };
        let op = Op::WriteEntries {
            ifindex: PRODUCER,
            entries: BTreeMap::from([(other(1), entry), (other(2), entry)]),
        };
        assert_eq!(
            kernel.carry_out(&op, Outcome::Done),
            Err(OpError::Full {
                map: "services".into(),
                need: 3,
                have: 2
            })
        );
        assert!(!kernel.entries.contains_key(&PRODUCER));
        // What is there already may be rewritten.
        let op = Op::WriteEntries {
            ifindex: CONSUMER,
            entries: entries(false),
        };
        assert!(kernel.carry_out(&op, Outcome::Done).is_ok());
    }

    #[test]
    fn flows_end_with_tokens_epoch_membership_and_drain() {
        let mut kernel = serving();
        let fate = kernel.forward(CONSUMER, SOURCE, crate::script::packet(0));
        kernel.establish(CONSUMER, &fate);
        let flow = *kernel.flows.first().unwrap();
        assert!(kernel.flow_holds(&flow, Boot(0)));
        type Change = fn(&mut Kernel);
        let ends: [Change; 5] = [
            |k| k.rows.get_mut(&CONSUMER).unwrap().epoch += 1,
            |k| {
                k.registry.remove(&PRODUCER);
            },
            |k| k.rows.get_mut(&CONSUMER).unwrap().token = None,
            |k| k.backends.get_mut(&7).unwrap().policy = 3,
            |k| k.policies.get_mut(&2).unwrap().selected.generation = 2,
        ];
        for end in ends {
            let mut kernel = kernel.clone();
            end(&mut kernel);
            assert!(!kernel.flow_holds(&flow, Boot(0)));
        }
        kernel.policies.get_mut(&2).unwrap().selected.generation = 2;
        kernel.backends.get_mut(&7).unwrap().drain_until = Some(Boot(10));
        assert!(kernel.flow_holds(&flow, Boot(9)));
        assert!(!kernel.flow_holds(&flow, Boot(10)));
    }

    #[test]
    fn faults_do_what_they_say() {
        let mut kernel = serving();
        let op = Op::DeleteEntries {
            ifindex: CONSUMER,
            keys: BTreeSet::from([key()]),
        };
        assert!(kernel.carry_out(&op, Outcome::Refused).is_err());
        assert_eq!(verdict(&kernel), [Verdict::Deliver(7)]);
        assert!(kernel.carry_out(&op, Outcome::RefusedAfter).is_err());
        assert_eq!(verdict(&kernel), [Verdict::Pass]);
        kernel.faults.refused.insert((OpKind::WriteRow, CONSUMER));
        let op = Op::WriteRow {
            ifindex: CONSUMER,
            row: ROW,
        };
        assert!(kernel.carry_out(&op, Outcome::Done).is_err());
        kernel.faults.unreadable.insert(CONSUMER);
        assert_eq!(kernel.read_registry(CONSUMER), RegistryRead::Failed("EIO".into()));
    }
}
