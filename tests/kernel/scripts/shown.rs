//! What the world and a node show, in the same words: names instead of ids, "open" instead of tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Context;
use holdfast::api::hash;
use holdfast::datapath::raw::{Map, Plain};
use holdfast_ebpf::abi::{self, pin};
use holdfast_engine::model::{
    Hashes, Ifindex, ObjectName, PolicySlot, Protocol, RouteKey, SlotId, State, Uid,
};
use holdfast_tests::told::{Intents, PolicyLine};

use crate::files;
use crate::place::{Place, in_world, on_node};
use crate::script::{Action, Script, object_name};
use crate::world::{World, config};

/// What is shown, by what it is about.
pub(crate) type Shown = BTreeMap<String, String>;

/// What is not the same.
pub(crate) fn differences(world: &Shown, node: &Shown) -> String {
    let subjects: BTreeSet<&String> = world.keys().chain(node.keys()).collect();
    let nothing = "nothing".to_owned();
    let lines = subjects.into_iter().filter_map(|subject| {
        let (wanted, found) = (world.get(subject), node.get(subject));
        (wanted != found).then(|| {
            format!(
                "{subject}: the world shows {}, the node shows {}",
                wanted.unwrap_or(&nothing),
                found.unwrap_or(&nothing)
            )
        })
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// What may be said of a policy whose intents are in one state for several reasons. The oldest one's is said; how old they
/// are is known for sure only as long as no agent has died, since times are kept but once a second.
pub(crate) type Either = BTreeMap<String, BTreeSet<String>>;

/// See [`Either`].
pub(crate) fn either(world: &World) -> Either {
    let Some(engine) = &world.engine else {
        return Either::new();
    };
    let view = engine.view();
    let policies = view.policies().map(|policy| {
        let alike = view.intents_of(&policy.name).map(|intent| intent.state);
        let alike =
            alike.filter(|state| std::mem::discriminant(state) == std::mem::discriminant(&policy.state));
        (
            policy.name.to_string(),
            alike.map(verdict).collect::<BTreeSet<_>>(),
        )
    });
    policies.filter(|(_, verdicts)| verdicts.len() > 1).collect()
}

/// Names of policies by their hashes, in the world and on the node.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    world: BTreeMap<u64, String>,
    node: BTreeMap<u64, String>,
    /// Of the hashes of uids on the node.
    uids: BTreeMap<[u8; 16], u32>,
    hashes: fn(&Uid) -> [u8; 16],
}

impl Names {
    /// All that a script names.
    pub(crate) fn of(script: &Script) -> Self {
        let names: BTreeSet<ObjectName> = script
            .actions
            .iter()
            .filter_map(|action| match action {
                Action::PutPolicy { name, .. } | Action::SpoilPolicy { name, .. } => Some(object_name(name)),
                _ => None,
            })
            .collect();
        let by = |hashes: Hashes| {
            names
                .iter()
                .map(|name| ((hashes.name)(name).0, name.to_string()))
                .collect()
        };
        Self {
            world: by(config(&script.setup).hashes),
            node: by(hash::hashes()),
            uids: BTreeMap::new(),
            hashes: |uid| hash::uid_hash(uid).0,
        }
    }

    /// Learns the uids that the world has given.
    pub(crate) fn learn(&mut self, world: &World) {
        for policy in world.objects.policies.values() {
            let hash = (self.hashes)(&Uid(files::uid(&policy.uid)));
            self.uids.insert(hash, crate::rules::number(&policy.uid));
        }
    }
}

fn name(names: &BTreeMap<u64, String>, hash: u64) -> String {
    names
        .get(&hash)
        .cloned()
        .unwrap_or_else(|| format!("unknown {hash:016x}"))
}

/// Whether set generation `a` (24 bits, wraps) is at least `b`.
const fn at_least(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) & 0x00ff_ffff) < 0x0080_0000
}

/// What a member of a set is, if it serves.
#[derive(Clone, Copy, Debug)]
struct Member {
    ifindex: Ifindex,
    /// Its token is the registered one.
    current: bool,
    /// It is this policy's, and of this generation of the set.
    own: bool,
}

/// What there is of a policy in the kernel.
#[derive(Clone, Debug)]
struct Slot {
    policy: String,
    uid: u32,
    pass: bool,
    waits: bool,
    served: u64,
    members: Vec<Member>,
}

impl Slot {
    /// Whether it delivers packets of this consumer, which is no producer of its own.
    fn serves(&self, consumer: Ifindex) -> bool {
        let mut members = self.members.iter();
        members.any(|member| member.current && member.own && member.ifindex != consumer)
    }
}

/// Puts into words what is put together alike for both.
#[derive(Debug)]
struct Words<'a> {
    shown: Shown,
    either: &'a Either,
}

impl Words<'_> {
    fn say(&mut self, subject: String, what: impl Into<String>) {
        self.shown.insert(subject, what.into());
    }

    fn slot(&mut self, slot: &Slot) {
        let members: BTreeSet<String> = slot
            .members
            .iter()
            .map(|member| {
                let current = if member.current {
                    ""
                } else {
                    " of another incarnation"
                };
                let own = if member.own {
                    ""
                } else {
                    " that is none of the set"
                };
                format!("{}{current}{own}", member.ifindex)
            })
            .collect();
        let held = if slot.pass { "pass" } else { "drop" };
        let waits = if slot.waits { ", a switch waits" } else { "" };
        // What an empty set last served says nothing.
        let served = if members.is_empty() { 0 } else { slot.served };
        self.say(
            format!("set of {} (p{})", slot.policy, slot.uid),
            format!("{held} while held, serves generation {served} by {members:?}{waits}"),
        );
    }

    fn row(
        &mut self,
        ifindex: Ifindex,
        token: Option<u64>,
        registered: Option<u64>,
        services: bool,
        sources: bool,
    ) {
        let gate = match token {
            None => "closed",
            Some(_) if token == registered => "open",
            Some(_) => "open for another incarnation",
        };
        self.say(
            format!("row of {ifindex}"),
            format!("{gate}, services: {services}, sources: {sources}"),
        );
    }

    fn entry(&mut self, ifindex: Ifindex, key: &RouteKey, slot: Option<&Slot>, open: bool) {
        let policy = slot.map_or("nobody", |slot| &slot.policy);
        // One that leads to nobody may have been left open, or be closed already.
        let gate = match slot {
            Some(slot) if !slot.serves(ifindex) => "leading to nobody",
            _ if open => "open",
            _ => "closed",
        };
        self.say(
            format!("entry of {ifindex} for {key}"),
            format!("{policy}, {gate}"),
        );
    }

    /// The mark that some port of an address is claimed.
    fn claim(&mut self, ifindex: Ifindex, address: IpAddr) {
        self.say(format!("claim of {ifindex} for {address}"), "yes");
    }

    fn sources(&mut self, ifindex: Ifindex, sources: &BTreeSet<IpAddr>) {
        self.say(format!("sources of {ifindex}"), format!("{sources:?}"));
    }

    fn local(&mut self, address: IpAddr) {
        // The node has others, too.
        if matches!(address, IpAddr::V4(v4) if v4.octets()[..3] == [172, 16, 0]) {
            self.say(format!("own address {address}"), "yes");
        }
    }

    fn policy(
        &mut self,
        name: &str,
        verdict: &str,
        uid: &str,
        generation: u64,
        intents: Intents,
        serving: Option<u64>,
    ) {
        let Intents {
            desired,
            programmed,
            held,
            failed,
            pending,
        } = intents;
        let verdict = match self.either.get(name) {
            Some(either) if either.contains(verdict) => format!("{either:?}"),
            _ => verdict.to_owned(),
        };
        let serving = serving.map_or_else(String::new, |serving| format!(", serving {serving}"));
        self.say(
            format!("report of {name}"),
            format!(
                "{verdict}, {uid} generation {generation}, {desired} intents: {programmed} programmed, {held} held, \
                 {failed} failed, {pending} pending{serving}"
            ),
        );
    }
}

// --- the world ---------------------------------------------------------------------------------------------

/// What the world shows.
pub(crate) fn by_world(world: &World, names: &Names, either: &Either) -> Shown {
    let mut words = Words {
        shown: Shown::new(),
        either,
    };
    let kernel = &world.kernel;
    let registered = |ifindex: Ifindex| kernel.registry.get(&ifindex).map(|identity| identity.token.get());
    for ifindex in kernel.devices.keys().filter(|ifindex| kernel.attached(**ifindex)) {
        words.say(format!("programs of {ifindex}"), "ours");
    }
    for (ifindex, identity) in &kernel.registry {
        // What is left of others may have been deleted by an agent that died over it.
        if !kernel.row_is_of_device(*ifindex) {
            continue;
        }
        let incarnation = identity
            .incarnation
            .map(|incarnation| files::identity(incarnation.0[0]));
        words.say(
            format!("identity of {ifindex}"),
            format!("{:?}", incarnation.unwrap_or_default()),
        );
    }
    for (ifindex, row) in &kernel.rows {
        let token = row.token.map(holdfast_engine::model::Token::get);
        words.row(
            *ifindex,
            token,
            registered(*ifindex),
            row.has_services,
            row.has_sources,
        );
    }
    let slots = slots_of_world(world, names);
    slots.values().for_each(|slot| words.slot(slot));
    for (ifindex, entries) in &kernel.entries {
        for (key, entry) in entries {
            words.entry(*ifindex, key, slots.get(&entry.policy), entry.open);
            words.claim(*ifindex, key.address());
        }
    }
    for (ifindex, sources) in &kernel.sources {
        words.sources(*ifindex, sources);
    }
    for address in &kernel.locals {
        words.local(*address);
    }
    if let Some(engine) = &world.engine {
        for policy in engine.view().policies() {
            let counts = policy.intents;
            let intents = Intents {
                desired: counts.desired(),
                programmed: counts.programmed,
                held: counts.held,
                failed: counts.failed,
                pending: counts.pending,
            };
            words.policy(
                &policy.name.to_string(),
                &verdict(policy.state),
                &files::uid(&policy.uid),
                policy.generation,
                intents,
                policy.serving.map(|serving| serving.generation),
            );
        }
    }
    words.shown
}

fn slots_of_world(world: &World, names: &Names) -> BTreeMap<SlotId, Slot> {
    let kernel = &world.kernel;
    let slot = |(id, slot): (&SlotId, &PolicySlot)| {
        let members = kernel.members(slot.selected);
        let members = members.iter().filter_map(|member| kernel.backends.get(member));
        let members = members.map(|backend| Member {
            ifindex: backend.ifindex,
            current: kernel
                .registry
                .get(&backend.ifindex)
                .is_some_and(|identity| identity.token == backend.token),
            own: backend.policy == *id && at_least(backend.last_generation, slot.selected.generation),
        });
        let [a, b, c, d, ..] = slot.uid.0;
        let slot = Slot {
            policy: name(&names.world, slot.name.0),
            uid: u32::from_be_bytes([a, b, c, d]),
            pass: slot.pass_while_held,
            waits: slot.waiting_since.is_some(),
            served: slot.served_generation,
            members: members.collect(),
        };
        (*id, slot)
    };
    kernel.policies.iter().map(slot).collect()
}

fn verdict(state: State) -> String {
    match state {
        State::Pending => "Pending".into(),
        State::Programmed => "Programmed".into(),
        State::Held(reason) => format!("Held({reason})"),
        State::Failed(reason) => format!("Failed({reason})"),
    }
}

// --- the node ----------------------------------------------------------------------------------------------

/// What a node shows.
pub(crate) fn by_node(
    place: &mut Place,
    world: &World,
    names: &Names,
    either: &Either,
) -> anyhow::Result<Shown> {
    let mut words = Words {
        shown: Shown::new(),
        either,
    };
    let registry: BTreeMap<Ifindex, abi::RegistryRow> = registry(place)?;
    for dev in world.kernel.devices.values() {
        let ifindex = dev.link.ifindex;
        match place.node.programs(&dev.link.name)?.len() {
            0 => {}
            1 => words.say(format!("programs of {ifindex}"), "ours"),
            more => words.say(format!("programs of {ifindex}"), format!("{more}")),
        }
        let device = place
            .node
            .rtnl
            .device(&dev.link.name)?
            .context("a device is gone")?;
        let Some(row) = registry.get(&on_node(ifindex)) else {
            continue;
        };
        if row.host_mac != device.mac && row.flags & abi::RegistryRow::FLAG_HOST_MAC_SHARED == 0 {
            continue;
        }
        let identity = (0..=u8::MAX)
            .map(files::identity)
            .find(|identity| hash::incarnation(identity).0 == row.incarnation);
        words.say(
            format!("identity of {ifindex}"),
            format!("{:?}", identity.unwrap_or_default()),
        );
    }
    let registered = |ifindex: Ifindex| registry.get(&ifindex).map(|row| row.token);
    for (ifindex, row) in dump::<u32, abi::ConsumerRow>(place, pin::CONSUMERS)? {
        let has = |flag| row.flags & flag != 0;
        words.row(
            number(ifindex)?,
            (row.token != 0).then_some(row.token),
            registered(ifindex),
            has(abi::ConsumerRow::HAS_SERVICES),
            has(abi::ConsumerRow::HAS_SOURCES),
        );
    }
    let slots = slots_of_node(place, names, &registry)?;
    slots.values().for_each(|slot| words.slot(slot));
    entries(place, &mut words, &slots)?;
    let mut sources: BTreeMap<Ifindex, BTreeSet<IpAddr>> = BTreeMap::new();
    for (key, _) in dump::<abi::SourceKey, u64>(place, pin::SOURCES)? {
        let address = address(key.family, key.address);
        sources.entry(number(key.ifindex)?).or_default().insert(address);
    }
    for (ifindex, sources) in &sources {
        words.sources(*ifindex, sources);
    }
    for (key, _) in dump::<abi::LocalKey, u64>(place, pin::LOCALS)? {
        words.local(address(key.family, key.address));
    }
    if place.is_up {
        for policy in place
            .node
            .report()?
            .into_iter()
            .flat_map(|report| report.policies)
        {
            line(&mut words, &policy);
        }
    }
    Ok(words.shown)
}

fn line(words: &mut Words<'_>, policy: &PolicyLine) {
    words.policy(
        &format!("{}/{}", policy.namespace, policy.name),
        &policy.verdict(),
        &policy.uid,
        policy.generation,
        policy.intents,
        policy.serving.as_ref().map(|serving| serving.generation),
    );
}

fn number(ifindex: Ifindex) -> anyhow::Result<Ifindex> {
    in_world(ifindex).with_context(|| format!("device {ifindex} is the node's own"))
}

/// All elements of a pinned map; none while no agent has made it.
fn dump<K: Plain, V: Plain>(place: &Place, name: &str) -> anyhow::Result<Vec<(K, V)>> {
    if !place.node.pins()?.map(name).exists() {
        return Ok(Vec::new());
    }
    Ok(place.node.map::<K, V>(name)?.dump()?)
}

fn registry(place: &Place) -> anyhow::Result<BTreeMap<Ifindex, abi::RegistryRow>> {
    let path = place.node.pins()?.registry();
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let map: Map<u32, abi::RegistryRow> = Map::new(holdfast::datapath::raw::obj_get(&path)?)?;
    Ok(map.dump()?.into_iter().collect())
}

fn entries(place: &Place, words: &mut Words<'_>, slots: &BTreeMap<SlotId, Slot>) -> anyhow::Result<()> {
    for (key, entry) in dump::<abi::ServiceKey, abi::RouteEntry>(place, pin::SERVICES)? {
        let ifindex = number(key.ifindex)?;
        let address = address(key.family, key.address);
        let protocol = match key.protocol {
            6 => Protocol::Tcp,
            17 => Protocol::Udp,
            _ => {
                words.claim(ifindex, address);
                continue;
            }
        };
        let route = RouteKey::Service {
            address,
            protocol,
            port: u16::from_be(key.port),
        };
        let open = entry.flags & abi::RouteEntry::OPEN != 0;
        words.entry(ifindex, &route, slots.get(&entry.policy), open);
    }
    Ok(())
}

fn slots_of_node(
    place: &Place,
    names: &Names,
    registry: &BTreeMap<Ifindex, abi::RegistryRow>,
) -> anyhow::Result<BTreeMap<SlotId, Slot>> {
    let mut slots = BTreeMap::new();
    for (id, slot) in dump::<u32, abi::PolicySlot>(place, pin::POLICIES)? {
        if slot.name_hash == 0 {
            continue;
        }
        let selected = abi::Selector::unpack(slot.selector);
        let slot = Slot {
            policy: name(&names.node, slot.name_hash),
            uid: names.uids.get(&slot.uid).copied().unwrap_or_default(),
            pass: slot.flags & abi::PolicySlot::PASS_WHILE_HELD != 0,
            waits: slot.waiting_since != 0,
            served: slot.served_generation,
            members: members(place, id, selected, registry)?,
        };
        slots.insert(id, slot);
    }
    Ok(slots)
}

/// The different backends in the slots of a set.
fn members(
    place: &Place,
    policy: SlotId,
    selected: abi::Selector,
    registry: &BTreeMap<Ifindex, abi::RegistryRow>,
) -> anyhow::Result<Vec<Member>> {
    let arena: Map<u32, u32> = place.node.map(pin::SLOTS)?;
    let backends: Map<u32, abi::Backend> = place.node.map(pin::BACKENDS)?;
    let mut ids = BTreeSet::new();
    for offset in 0..u32::from(selected.length) {
        ids.extend(arena.lookup(&(selected.base + offset))?);
    }
    let mut members = Vec::new();
    for id in ids {
        let Some(backend) = backends.lookup(&id)?.filter(|backend| backend.token != 0) else {
            continue;
        };
        let target = abi::Target::unpack(backend.target);
        members.push(Member {
            ifindex: number(target.ifindex)?,
            current: registry
                .get(&target.ifindex)
                .is_some_and(|row| row.token == backend.token),
            own: backend.policy == policy && at_least(target.last_generation, selected.generation),
        });
    }
    Ok(members)
}

fn address(family: u8, bytes: abi::Address) -> IpAddr {
    if family == abi::FAMILY_V4 {
        Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into()
    } else {
        Ipv6Addr::from(bytes).into()
    }
}
