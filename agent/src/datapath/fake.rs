//! A data path in memory: it keeps what it is told, by the same rules as the kernel, records every operation, and forwards
//! packets as the program does. The kernel suite holds the two against each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_ebpf::abi::{self, Verdict, generation_at_least, pin};
use holdfast_engine::belief::{Audited, Belief, There};
use holdfast_engine::model::{
    Adoption, Backend, BackendId, Device, Entry, Identity, Ifindex, IntentProof, Mac, Op, OpDone, OpError,
    OpResult, PolicySlot, Protocol, RegistryRead, RouteKey, Row, Selected, SlotId, Token,
};

use super::gap::{self, Prefix};
use super::proof::{INSIDE_PORTS, SOURCE_PORT};
use super::{Answer, Datapath, DatapathError, MapStats, Packet, Sizes, Stats, convert};

/// The fake.
#[derive(Debug, Default)]
pub struct Fake {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sizes: Sizes,
    devices: BTreeMap<Ifindex, Mac>,
    registry: BTreeMap<Ifindex, Identity>,
    attached: BTreeSet<Ifindex>,
    foreign_before: BTreeSet<Ifindex>,
    rows: BTreeMap<Ifindex, Row>,
    sources: BTreeSet<(Ifindex, IpAddr)>,
    locals: BTreeSet<IpAddr>,
    entries: BTreeMap<(Ifindex, RouteKey), Entry>,
    policies: BTreeMap<SlotId, PolicySlot>,
    slots: BTreeMap<u32, BackendId>,
    backends: BTreeMap<BackendId, Backend>,
    flows: BTreeMap<AnswerKey, Flow>,
    ops: Vec<Op>,
    packets: BTreeMap<u32, u64>,
    proofs: (u64, u64),
    debug: u64,
}

/// Where the answers of a flow arrive, and what they look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct AnswerKey {
    producer: Ifindex,
    service: RouteKey,
    consumer_address: IpAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flow {
    consumer: Ifindex,
    consumer_token: Token,
    producer_token: Token,
    epoch: u32,
    policy: SlotId,
    backend: BackendId,
}

impl Fake {
    /// A fake with maps of these sizes.
    #[must_use]
    pub fn new(sizes: Sizes) -> Self {
        let state = State {
            sizes,
            ..State::default()
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device appears. One that had its number dies with everything that was attached to it.
    pub fn add_device(&self, device: Device) {
        self.remove_device(device.ifindex);
        self.state().devices.insert(device.ifindex, device.mac);
    }

    /// A device dies. The kernel keeps maps as they are.
    pub fn remove_device(&self, ifindex: Ifindex) {
        let mut state = self.state();
        state.devices.remove(&ifindex);
        state.attached.remove(&ifindex);
        state.foreign_before.remove(&ifindex);
    }

    /// A CNI registers an identity.
    pub fn register(&self, ifindex: Ifindex, identity: Identity) {
        self.state().registry.insert(ifindex, identity);
    }

    /// A CNI unregisters what has this token.
    pub fn unregister(&self, ifindex: Ifindex, token: Token) {
        let mut state = self.state();
        if state
            .registry
            .get(&ifindex)
            .is_some_and(|identity| identity.token == token)
        {
            state.registry.remove(&ifindex);
        }
    }

    /// Somebody puts a program before ours.
    pub fn put_foreign_before(&self, ifindex: Ifindex) {
        self.state().foreign_before.insert(ifindex);
    }

    /// Somebody takes our program away.
    pub fn steal_program(&self, ifindex: Ifindex) {
        self.state().attached.remove(&ifindex);
    }

    /// Somebody writes (or deletes) a consumer row.
    pub fn tamper_row(&self, ifindex: Ifindex, row: Option<Row>) {
        let mut state = self.state();
        match row {
            Some(row) => drop(state.rows.insert(ifindex, row)),
            None => drop(state.rows.remove(&ifindex)),
        }
    }

    /// The consumer row of a device.
    pub fn row(&self, ifindex: Ifindex) -> Option<Row> {
        self.state().rows.get(&ifindex).copied()
    }

    /// Every operation since the last call, in the order in which they were carried out.
    pub fn take_ops(&self) -> Vec<Op> {
        std::mem::take(&mut self.state().ops)
    }

    /// The debug level that was set last.
    pub fn debug(&self) -> u64 {
        self.state().debug
    }

    /// A consumer's packet arrives: what becomes of it, and to whom it goes.
    pub fn request(&self, ifindex: Ifindex, packet: &Packet) -> Answer {
        let mut state = self.state();
        let answer = state.request(ifindex, packet, false);
        state.count(answer.verdict);
        if answer.verdict == Verdict::Delivered {
            state.open_flow(ifindex, packet, answer);
        }
        answer
    }

    /// What a producer answers to `request`: what becomes of it, and to whom it goes.
    pub fn reply(&self, ifindex: Ifindex, request: &Packet) -> Answer {
        let mut state = self.state();
        let answer = state.reply(ifindex, request);
        state.count(answer.verdict);
        answer
    }
}

const fn nowhere(verdict: Verdict) -> Answer {
    Answer {
        verdict,
        target: 0,
        policy: 0,
        generation: 0,
        backend: 0,
    }
}

const fn service(packet: &Packet) -> RouteKey {
    RouteKey::Service {
        address: packet.destination,
        protocol: packet.protocol,
        port: packet.port,
    }
}

const fn done(writes: u32) -> OpResult {
    Ok(OpDone { writes })
}

fn disproved<T>(message: impl Into<String>) -> Result<T, OpError> {
    Err(OpError::Disproved {
        message: message.into(),
    })
}

/// As the program sees a packet.
fn flow_key(ifindex: Ifindex, packet: &Packet) -> abi::FlowKey {
    let (family, source) = convert::address(packet.source);
    let (_, destination) = convert::address(packet.destination);
    abi::FlowKey {
        ifindex,
        source_port: SOURCE_PORT.to_be(),
        destination_port: packet.port.to_be(),
        source,
        destination,
        protocol: packet.protocol.number(),
        family,
        pad: [0; 2],
    }
}

/// A neighbour without an address.
const fn is_unreachable(backend: &Backend) -> bool {
    backend.via.is_some() && backend.address_v4.is_none() && backend.address_v6.is_none()
}

impl State {
    fn count(&mut self, verdict: Verdict) {
        *self.packets.entry(verdict as u32).or_default() += 1;
    }

    fn token(&self, ifindex: Ifindex) -> Option<Token> {
        self.registry.get(&ifindex).map(|identity| identity.token)
    }

    fn is_open(&self, ifindex: Ifindex, row: &Row) -> bool {
        row.token.is_some() && row.token == self.token(ifindex)
    }

    /// In the order of the program: route, gates, source, producer.
    fn request(&self, ifindex: Ifindex, packet: &Packet, as_if_open: bool) -> Answer {
        if !self.attached.contains(&ifindex) {
            return nowhere(Verdict::Pass);
        }
        let Some((row, entry)) = self
            .rows
            .get(&ifindex)
            .and_then(|row| Some((row, self.route(ifindex, row, packet)?)))
        else {
            return nowhere(Verdict::Pass);
        };
        let slot = self.policies.get(&entry.policy);
        let (selected, pass) =
            slot.map_or_else(Default::default, |slot| (slot.selected, slot.pass_while_held));
        let mut answer = Answer {
            policy: entry.policy,
            generation: selected.generation,
            ..nowhere(Verdict::DropHeld)
        };
        let closed = |drop| if pass { Verdict::PassedHeld } else { drop };
        let open = as_if_open || (self.is_open(ifindex, row) && entry.open);
        if !open {
            answer.verdict = closed(Verdict::DropHeld);
            return answer;
        }
        if row.has_sources && !self.sources.contains(&(ifindex, packet.source)) {
            answer.verdict = Verdict::DropSpoofed;
            return answer;
        }
        match self.choose(ifindex, packet, entry.policy, selected) {
            Some((id, target)) => Answer {
                verdict: Verdict::Delivered,
                target,
                backend: id,
                ..answer
            },
            None => {
                answer.verdict = closed(Verdict::DropNoProducer);
                answer
            }
        }
    }

    /// Where a packet leads: an exact service before a prefix, and of prefixes the longest. Never to the node itself.
    fn route(&self, ifindex: Ifindex, row: &Row, packet: &Packet) -> Option<&Entry> {
        if self.locals.contains(&packet.destination) {
            return None;
        }
        let exact = row
            .has_services
            .then(|| self.entries.get(&(ifindex, service(packet))));
        let has_prefixes = if packet.destination.is_ipv4() {
            row.has_prefixes_v4
        } else {
            row.has_prefixes_v6
        };
        let longest = || {
            self.prefixes(ifindex)
                .filter(|(prefix, _)| has_prefixes && gap::contains(*prefix, packet.destination))
                .max_by_key(|((_, length), _)| *length)
                .map(|(_, entry)| entry)
        };
        exact.flatten().or_else(longest)
    }

    /// The prefixes of an interface.
    fn prefixes(&self, ifindex: Ifindex) -> impl Iterator<Item = (Prefix, &Entry)> {
        self.entries
            .iter()
            .filter_map(move |((of, key), entry)| match key {
                RouteKey::Prefix { address, length } if *of == ifindex => Some(((*address, *length), entry)),
                _ => None,
            })
    }

    /// The backend that serves a packet, and its device: the one that the packet's slot leads to or, where that cannot be
    /// given it, that of another slot, in the order of the program (`choose_backend`).
    fn choose(
        &self,
        ifindex: Ifindex,
        packet: &Packet,
        policy: SlotId,
        selected: Selected,
    ) -> Option<(BackendId, Ifindex)> {
        const TRIES: u32 = 32;
        const STEP: u32 = 0x9e37_79b1;
        let length = u64::from(selected.length);
        let first = ((flow_key(ifindex, packet).hash() >> 32) * length) >> 32;
        let tries = if length == 0 { 0 } else { TRIES };
        (0..tries).find_map(|tried| {
            let step = (u64::from(tried.wrapping_mul(STEP)) * length) >> 32;
            let slot = selected.base + ((first + step) % length) as u32;
            // A slot that was never written leads to backend 0.
            let id = self.slots.get(&slot).copied().unwrap_or(0);
            let target = self.serving(id, policy, selected.generation, ifindex)?;
            self.takes(id, packet.destination).then_some((id, target))
        })
    }

    /// Whether a backend can be given packets to this address: a neighbour is reached by one of its own.
    fn takes(&self, id: BackendId, destination: IpAddr) -> bool {
        self.backends.get(&id).is_some_and(|backend| {
            let own = if destination.is_ipv4() {
                backend.address_v4
            } else {
                backend.address_v6
            };
            backend.via.is_none() || own.is_some()
        })
    }

    /// The device of a backend, if it is a member of this generation and still the incarnation that it was.
    fn serving(&self, id: BackendId, policy: SlotId, generation: u32, consumer: Ifindex) -> Option<Ifindex> {
        let backend = self.backends.get(&id)?;
        (backend.policy == policy
            && generation_at_least(backend.last_generation, generation)
            && backend.ifindex != consumer
            && self.token(backend.ifindex) == Some(backend.token))
        .then_some(backend.ifindex)
    }

    fn open_flow(&mut self, ifindex: Ifindex, packet: &Packet, answer: Answer) {
        let row = self.rows.get(&ifindex).copied();
        let producer_token = self.token(answer.target);
        if let (
            Some(Row {
                token: Some(consumer_token),
                epoch,
                ..
            }),
            Some(producer_token),
        ) = (row, producer_token)
        {
            let key = AnswerKey {
                producer: answer.target,
                service: service(packet),
                consumer_address: packet.source,
            };
            let flow = Flow {
                consumer: ifindex,
                consumer_token,
                producer_token,
                epoch,
                policy: answer.policy,
                backend: answer.backend,
            };
            self.flows.insert(key, flow);
        }
    }

    fn reply(&self, ifindex: Ifindex, request: &Packet) -> Answer {
        if !self.attached.contains(&ifindex) {
            return nowhere(Verdict::Pass);
        }
        let service = service(request);
        let key = AnswerKey {
            producer: ifindex,
            service,
            consumer_address: request.source,
        };
        let Some(flow) = self.flows.get(&key) else {
            return nowhere(Verdict::Pass);
        };
        let generation = self
            .policies
            .get(&flow.policy)
            .map(|slot| slot.selected.generation);
        let served = generation
            .and_then(|generation| self.serving(flow.backend, flow.policy, generation, flow.consumer))
            == Some(ifindex)
            && self.takes(flow.backend, request.destination)
            && self.token(ifindex) == Some(flow.producer_token);
        let row = self.rows.get(&flow.consumer);
        let same_consumer = row.is_some_and(|row| row.token == Some(flow.consumer_token))
            && self.token(flow.consumer) == Some(flow.consumer_token);
        let same_route = row.is_some_and(|row| row.epoch == flow.epoch)
            || row
                .and_then(|row| self.route(flow.consumer, row, request))
                .is_some_and(|entry| entry.open && entry.policy == flow.policy);
        if served && same_consumer && same_route {
            Answer {
                verdict: Verdict::Answered,
                target: flow.consumer,
                policy: flow.policy,
                generation: 0,
                backend: flow.backend,
            }
        } else {
            nowhere(Verdict::DropStale)
        }
    }

    /// What is in the maps, and where the program is.
    fn adoption(&self) -> Adoption {
        let mut adoption = Adoption {
            attached: self.attached.clone(),
            rows: self.rows.clone(),
            locals: self.locals.clone(),
            policies: self.policies.clone(),
            backends: self.backends.clone(),
            identities: self.registry.clone(),
            ..Adoption::default()
        };
        for (ifindex, source) in &self.sources {
            adoption.sources.entry(*ifindex).or_default().insert(*source);
        }
        for ((ifindex, key), entry) in &self.entries {
            adoption.entries.entry(*ifindex).or_default().insert(*key, *entry);
        }
        for policy in self.policies.values().filter(|policy| policy.selected.length > 0) {
            let selected = policy.selected;
            let slots = (selected.base..)
                .take(usize::from(selected.length))
                .map(|index| self.slots.get(&index).copied().unwrap_or(0))
                .collect();
            adoption.slots.insert(selected.base, slots);
        }
        adoption
    }

    fn is_still(&self, device: Device) -> Result<(), OpError> {
        if self.devices.get(&device.ifindex) == Some(&device.mac) {
            Ok(())
        } else {
            Err(OpError::NoDevice)
        }
    }

    fn carry_out(&mut self, op: &Op) -> OpResult {
        match op {
            Op::Attach { device } => {
                self.is_still(*device)?;
                done(u32::from(self.attached.insert(device.ifindex)))
            }
            Op::Detach { ifindex } => done(u32::from(self.attached.remove(ifindex))),
            Op::ClearInterface { ifindex } => done(self.clear(*ifindex)),
            Op::WriteRow { ifindex, row } => {
                let full = self.rows.len() as u32 >= self.sizes.consumers && !self.rows.contains_key(ifindex);
                if full {
                    return Err(self.full(pin::CONSUMERS, self.rows.len() as u32 + 1, self.sizes.consumers));
                }
                let before = self.rows.insert(*ifindex, *row);
                done(u32::from(before != Some(*row)))
            }
            Op::WriteSources { ifindex, add, delete } => self.write_sources(*ifindex, add, delete),
            Op::WriteLocals { add, delete } => self.write_locals(add, delete),
            Op::WriteEntries { ifindex, entries } => self.write_entries(*ifindex, entries),
            Op::DeleteEntries { ifindex, keys } => {
                let before = self.routes_len();
                self.entries
                    .retain(|(of, key), _| of != ifindex || !keys.contains(key));
                done(before - self.routes_len())
            }
            Op::WriteBackends { backends } => {
                if let Some(id) = backends.keys().find(|id| **id >= self.sizes.backends) {
                    return Err(self.full(pin::BACKENDS, id + 1, self.sizes.backends));
                }
                let mut writes = 0;
                for (id, backend) in backends {
                    let before = match backend {
                        Some(backend) => self.backends.insert(*id, backend.clone()),
                        None => self.backends.remove(id),
                    };
                    writes += u32::from(before != *backend);
                }
                done(writes)
            }
            Op::WriteSlots { base, slots } => {
                let end = base.saturating_add(slots.len() as u32);
                if end > self.sizes.slots {
                    return Err(self.full(pin::SLOTS, end, self.sizes.slots));
                }
                let mut writes = 0;
                for (index, backend) in (*base..).zip(slots) {
                    // An array's elements are 0 until they are written.
                    let before = self.slots.insert(index, *backend).unwrap_or(0);
                    writes += u32::from(before != *backend);
                }
                done(writes)
            }
            Op::WritePolicy { slot, value } => {
                if *slot >= self.sizes.policies {
                    return Err(self.full(pin::POLICIES, slot + 1, self.sizes.policies));
                }
                let before = match value {
                    Some(value) => self.policies.insert(*slot, value.clone()),
                    None => self.policies.remove(slot),
                };
                done(u32::from(before != *value))
            }
            Op::DeleteIdentity { ifindex, token } => {
                let ours = self.token(*ifindex) == Some(*token);
                if ours {
                    self.registry.remove(ifindex);
                }
                done(u32::from(ours))
            }
            Op::ProveSet {
                policy,
                device,
                selected,
                backends,
                slots,
            } => {
                self.holds_program(*device)?;
                let generation = self
                    .policies
                    .get(policy)
                    .map_or(0, |slot| slot.selected.generation);
                if slots.len() != usize::from(selected.length) {
                    return disproved("the set and its slots differ in length");
                }
                for (index, wanted) in (selected.base..).zip(slots) {
                    let wrong = self.slots.get(&index) != Some(wanted)
                        || self.backends.get(wanted) != backends.get(wanted)
                        || self.serving(*wanted, *policy, generation, 0).is_none()
                        || backends.get(wanted).is_none_or(is_unreachable);
                    if wrong {
                        return disproved(format!("slot {index} does not lead to backend {wanted}"));
                    }
                }
                let members: BTreeSet<&BackendId> = slots.iter().collect();
                if !members.iter().copied().eq(backends.keys()) {
                    return disproved("the slots lead to other backends than the set's");
                }
                done(0)
            }
            Op::ProveIntent(proof) => self.prove_intent(proof),
        }
    }

    fn full(&self, map: &str, need: u32, have: u32) -> OpError {
        OpError::Full {
            map: map.to_owned(),
            need,
            have,
        }
    }

    /// Services, and one claim for each address that has any.
    fn services_len(&self) -> u32 {
        let services = || self.entries.keys().filter(|(_, key)| !key.is_prefix());
        let claims: BTreeSet<(Ifindex, IpAddr)> = services().map(|(of, key)| (*of, key.address())).collect();
        (services().count() + claims.len()) as u32
    }

    fn prefixes_len(&self) -> u32 {
        self.entries.keys().filter(|(_, key)| key.is_prefix()).count() as u32
    }

    fn routes_len(&self) -> u32 {
        self.services_len() + self.prefixes_len()
    }

    fn clear(&mut self, ifindex: Ifindex) -> u32 {
        let before = self.routes_len() + self.sources.len() as u32 + self.rows.len() as u32;
        self.entries.retain(|(of, _), _| *of != ifindex);
        self.sources.retain(|(of, _)| *of != ifindex);
        self.rows.remove(&ifindex);
        before - (self.routes_len() + self.sources.len() as u32 + self.rows.len() as u32)
    }

    fn write_locals(&mut self, add: &BTreeSet<IpAddr>, delete: &BTreeSet<IpAddr>) -> OpResult {
        let mut writes = 0;
        let need = self.locals.union(add).count() as u32;
        for address in add {
            if self.locals.len() as u32 >= self.sizes.locals && !self.locals.contains(address) {
                return Err(self.full(pin::LOCALS, need, self.sizes.locals));
            }
            writes += u32::from(self.locals.insert(*address));
        }
        for address in delete.difference(add) {
            writes += u32::from(self.locals.remove(address));
        }
        done(writes)
    }

    fn write_sources(
        &mut self,
        ifindex: Ifindex,
        add: &BTreeSet<IpAddr>,
        delete: &BTreeSet<IpAddr>,
    ) -> OpResult {
        let mut writes = 0;
        for source in add {
            let key = (ifindex, *source);
            if self.sources.contains(&key) {
                continue;
            }
            let len = self.sources.len() as u32;
            if len >= self.sizes.sources {
                return Err(self.full(pin::SOURCES, len + 1, self.sizes.sources));
            }
            self.sources.insert(key);
            writes += 1;
        }
        for source in delete.difference(add) {
            writes += u32::from(self.sources.remove(&(ifindex, *source)));
        }
        done(writes)
    }

    fn write_entries(&mut self, ifindex: Ifindex, entries: &BTreeMap<RouteKey, Entry>) -> OpResult {
        let before = self.entries.clone();
        let len_before = self.routes_len();
        let mut changed = 0;
        for (key, entry) in entries {
            match self.entries.insert((ifindex, *key), *entry) {
                Some(before) if before != *entry => changed += 1,
                _ => {}
            }
        }
        // One element of the trie stays free.
        for (map, len, size) in [
            (pin::SERVICES, self.services_len(), self.sizes.services),
            (
                pin::PREFIXES,
                self.prefixes_len(),
                self.sizes.prefixes.saturating_sub(1),
            ),
        ] {
            if len > size {
                self.entries = before;
                return Err(self.full(map, len, size));
            }
        }
        done(self.routes_len() - len_before + changed)
    }

    fn holds_program(&self, device: Device) -> Result<(), OpError> {
        self.is_still(device)?;
        if !self.attached.contains(&device.ifindex) {
            return Err(OpError::Detached {
                message: format!("no link is pinned for device {}", device.ifindex),
            });
        }
        if self.foreign_before.contains(&device.ifindex) {
            return disproved(format!(
                "a foreign program runs before ours at device {}",
                device.ifindex
            ));
        }
        Ok(())
    }

    fn prove_intent(&self, proof: &IntentProof) -> OpResult {
        self.holds_program(proof.device)?;
        let Device { ifindex, mac } = proof.device;
        if self.rows.get(&ifindex) != Some(&proof.row) {
            return disproved(format!("the row of device {ifindex} is another"));
        }
        let right_identity = self.registry.get(&ifindex).is_some_and(|identity| {
            identity.token == proof.token && (identity.host_mac_shared || identity.host_mac == mac)
        });
        if !right_identity {
            return disproved(format!("the registered identity of device {ifindex} is another"));
        }
        if !proof
            .sources
            .iter()
            .all(|source| self.sources.contains(&(ifindex, *source)))
        {
            return disproved(format!("a source of device {ifindex} is missing"));
        }
        for (id, backend) in &proof.backends {
            if self.backends.get(id) != Some(backend) {
                return disproved(format!("backend {id} is another"));
            }
        }
        for index in (proof.selected.base..).take(usize::from(proof.selected.length)) {
            let backend = self.slots.get(&index).copied().unwrap_or(0);
            if !proof.backends.contains_key(&backend) {
                return disproved(format!("slot {index} leads to no backend of the set"));
            }
        }
        for (key, entry) in &proof.entries {
            if self.entries.get(&(ifindex, *key)) != Some(entry) {
                return disproved(format!("entry {key:?} of device {ifindex} is another"));
            }
            // A free slot is zeroes: it selects nothing.
            let slot = self.policies.get(&entry.policy);
            if slot.map_or_else(Default::default, |slot| slot.selected) != proof.selected {
                return disproved(format!("the selector of policy slot {} is another", entry.policy));
            }
            self.prove_destination(proof, key, *entry)?;
        }
        for (key, policy) in &proof.takeovers {
            self.prove_takeover(proof, key, *policy)?;
        }
        done(0)
    }

    /// A destination that is another policy's still, as if it led to this one.
    fn prove_takeover(&self, proof: &IntentProof, key: &RouteKey, policy: SlotId) -> Result<(), OpError> {
        let selected = proof.selected;
        if self.policies.get(&policy).map(|slot| slot.selected) != Some(selected) {
            return disproved(format!("the selector of policy slot {policy} is another"));
        }
        let mut slots = (selected.base..).take(usize::from(selected.length));
        let delivers = |slot: u32| {
            let id = self.slots.get(&slot).copied().unwrap_or(0);
            self.serving(id, policy, selected.generation, proof.device.ifindex)
                .is_some()
                && self.takes(id, key.address())
        };
        if slots.any(delivers) {
            Ok(())
        } else {
            disproved(format!(
                "asked for {key:?} as if it led to policy slot {policy}: nobody"
            ))
        }
    }

    fn prove_destination(&self, proof: &IntentProof, key: &RouteKey, entry: Entry) -> Result<(), OpError> {
        let ifindex = proof.device.ifindex;
        let (destination, protocol, port) = match *key {
            RouteKey::Service {
                address,
                protocol,
                port,
            } => (address, protocol, port),
            RouteKey::Prefix { address, length } => match self.inside(ifindex, (address, length)) {
                Some(destination) => destination,
                None => return Ok(()),
            },
        };
        let of_family: Vec<IpAddr> = proof
            .sources
            .iter()
            .copied()
            .filter(|source| source.is_ipv4() == destination.is_ipv4())
            .collect();
        let spoofed = of_family.is_empty() && proof.row.has_sources;
        let sources = if of_family.is_empty() {
            vec![destination]
        } else {
            of_family
        };
        for source in sources {
            let packet = Packet {
                source,
                destination,
                protocol,
                port,
            };
            let answer = self.request(proof.device.ifindex, &packet, true);
            let right = if spoofed {
                answer.verdict == Verdict::DropSpoofed
            } else {
                answer.verdict == Verdict::Delivered
                    && answer.policy == entry.policy
                    && proof
                        .backends
                        .get(&answer.backend)
                        .is_some_and(|backend| backend.ifindex == answer.target)
            };
            if !right {
                return disproved(format!(
                    "asked for {key:?} from {source}, the program answers {answer:?}"
                ));
            }
        }
        Ok(())
    }
}

impl State {
    /// What a packet to a prefix itself goes to.
    fn inside(&self, ifindex: Ifindex, prefix: Prefix) -> Option<(IpAddr, Protocol, u16)> {
        let longer = self
            .prefixes(ifindex)
            .map(|(other, _)| other)
            .filter(|other| other.1 > prefix.1);
        let locals = self.locals.iter().map(|local| (*local, gap::bits(*local)));
        let address = gap::free_address(prefix, longer.chain(locals))?;
        let protocol = Protocol::Udp;
        let port = INSIDE_PORTS.into_iter().find(|&port| {
            let service = RouteKey::Service {
                address,
                protocol,
                port,
            };
            !self.entries.contains_key(&(ifindex, service))
        })?;
        Some((address, protocol, port))
    }
}

impl Datapath for Fake {
    fn carry_out(&self, op: &Op) -> OpResult {
        let mut state = self.state();
        state.ops.push(op.clone());
        let result = state.carry_out(op);
        if matches!(op, Op::ProveSet { .. } | Op::ProveIntent(_)) {
            match result {
                Ok(_) => state.proofs.0 += 1,
                Err(_) => state.proofs.1 += 1,
            }
        }
        result
    }

    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)> {
        let state = self.state();
        ifindexes
            .iter()
            .map(|ifindex| {
                let read = state.registry.get(ifindex);
                (
                    *ifindex,
                    read.map_or(RegistryRead::Absent, |identity| RegistryRead::Row(*identity)),
                )
            })
            .collect()
    }

    fn look(&self, beliefs: &[Belief]) -> Audited {
        self.audit(beliefs)
    }

    fn audit(&self, beliefs: &[Belief]) -> Audited {
        let state = self.state();
        let foreign = state
            .foreign_before
            .iter()
            .map(|ifindex| (*ifindex, vec!["somebody".to_owned()]))
            .collect();
        let there = There {
            pins: &state.adoption(),
            registry: &state.registry,
            foreign: &foreign,
        };
        Audited {
            differences: beliefs.iter().flat_map(|belief| there.differs(belief)).collect(),
            unreadable: None,
        }
    }

    fn adopt(&self) -> Result<Adoption, DatapathError> {
        Ok(self.state().adoption())
    }

    fn stats(&self) -> Stats {
        let state = self.state();
        let map = |entries: usize, capacity: u32| MapStats {
            entries: Some(entries as u64),
            capacity: u64::from(capacity),
            ..MapStats::default()
        };
        Stats {
            maps: BTreeMap::from([
                (pin::CONSUMERS, map(state.rows.len(), state.sizes.consumers)),
                (pin::SOURCES, map(state.sources.len(), state.sizes.sources)),
                (
                    pin::SERVICES,
                    map(state.services_len() as usize, state.sizes.services),
                ),
                (
                    pin::PREFIXES,
                    map(state.prefixes_len() as usize, state.sizes.prefixes),
                ),
                (pin::LOCALS, map(state.locals.len(), state.sizes.locals)),
                (pin::POLICIES, map(state.policies.len(), state.sizes.policies)),
                (pin::BACKENDS, map(state.backends.len(), state.sizes.backends)),
                (pin::REGISTRY, map(state.registry.len(), abi::capacity::REGISTRY)),
            ]),
            packets: Verdict::ALL
                .iter()
                .map(|verdict| state.packets.get(&(*verdict as u32)).copied().unwrap_or(0))
                .collect(),
            proofs_ok: state.proofs.0,
            proofs_failed: state.proofs.1,
        }
    }

    fn set_debug(&self, level: u64) -> Result<(), DatapathError> {
        self.state().debug = level;
        Ok(())
    }
}
