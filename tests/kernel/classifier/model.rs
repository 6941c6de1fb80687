//! The lookup against a plain model of it: random policies, and packets that are aimed at what they say.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::ensure;
use holdfast_ebpf::abi::{
    ConsumerRow, LocalKey, PolicySlot, PrefixEntry, PrefixKey, RouteEntry, ServiceKey, SourceKey, Target,
    Verdict, control, pin, probe,
};
use holdfast_tests::say;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

use crate::frame::{Frame, SYN, Transport};
use crate::plane::{NONCE, Plain, Plane, REDIRECT, SHOT, address, bare, trie_key};

/// Worlds, and packets for each: a million in all.
const WORLDS: u32 = 40;
const PACKETS: u32 = 25_000;
/// Policy slots, backends of each, and the room for its slots.
const POLICIES: u32 = 8;
const BACKENDS: u32 = 4;
const ROOM: u32 = 16;
/// Destinations are near each other, so that prefixes overlap.
const HOSTS: u32 = 64;

struct Dice(ChaCha8Rng);

impl Dice {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0.next_u32() % sides
    }

    fn percent(&mut self, of_hundred: u32) -> bool {
        self.roll(100) < of_hundred
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.roll(from.len() as u32) as usize])
    }
}

/// One of the interfaces that ask.
#[derive(Clone, Debug, Default)]
struct Consumer {
    ifindex: u32,
    row: u64,
    registered: u64,
    flags: u32,
    sources: BTreeSet<IpAddr>,
    services: BTreeMap<(IpAddr, u8, u16), (u32, bool)>,
    prefixes: BTreeMap<(bool, u8, u128), (u32, bool)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Backend {
    ifindex: u32,
    /// Its token is the registered one.
    current: bool,
    member: bool,
    neighbour: bool,
    v4: bool,
    v6: bool,
}

#[derive(Clone, Debug, Default)]
struct Policy {
    passes: bool,
    expired: bool,
    /// Backends by slot.
    slots: Vec<u32>,
}

#[derive(Default)]
struct World {
    consumers: Vec<Consumer>,
    policies: BTreeMap<u32, Policy>,
    backends: BTreeMap<u32, Backend>,
    locals: BTreeSet<IpAddr>,
}

/// What the model says of a packet.
#[derive(Debug, PartialEq, Eq)]
struct Expected {
    verdict: Verdict,
    policy: u32,
    /// The backends that may get it.
    backends: BTreeSet<u32>,
}

/// How a packet's route was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Service,
    Prefix,
    Local,
    Nothing,
}

fn bits(of: IpAddr) -> (bool, u8, u128) {
    match of {
        IpAddr::V4(address) => (false, 32, u128::from(u32::from(address))),
        IpAddr::V6(address) => (true, 128, u128::from(address)),
    }
}

fn covers(prefix: (bool, u8, u128), destination: IpAddr) -> bool {
    let (v6, width, value) = bits(destination);
    let shift = u32::from(width) - u32::from(prefix.1).min(width.into());
    prefix.0 == v6 && (prefix.1 == 0 || value >> shift == prefix.2 >> shift)
}

/// An address near the others.
fn destination(dice: &mut Dice, v6: bool) -> IpAddr {
    let host = dice.roll(HOSTS);
    // Neighbours in the last byte, and in one in the middle.
    let (middle, last) = (host / 8, host % 8 * 37);
    if v6 {
        Ipv6Addr::new(0x2001, 0xdb8, 0, middle as u16, 0, 0, 0, last as u16).into()
    } else {
        Ipv4Addr::new(198, 18, middle as u8, last as u8).into()
    }
}

impl World {
    fn new(plane: &Plane, dice: &mut Dice) -> Self {
        let mut world = Self::default();
        let producers = [plane.producer, plane.stranger, plane.consumer];
        for policy in 0..POLICIES {
            let mut slots = Vec::new();
            let members = 1 + dice.roll(BACKENDS);
            for _ in 0..dice.pick(&[0, 1, 2, 7, ROOM]).unwrap_or_default() {
                slots.push(policy * BACKENDS + dice.roll(members));
            }
            for id in policy * BACKENDS..(policy + 1) * BACKENDS {
                world.backends.insert(
                    id,
                    Backend {
                        ifindex: dice.pick(&producers).unwrap_or_default(),
                        current: dice.percent(80),
                        // No set leaves a member without a slot: flows stay with members.
                        member: slots.contains(&id) && dice.percent(85),
                        neighbour: dice.percent(40),
                        v4: dice.percent(75),
                        v6: dice.percent(75),
                    },
                );
            }
            world.policies.insert(
                policy,
                Policy {
                    passes: dice.percent(25),
                    expired: dice.percent(10),
                    slots,
                },
            );
        }
        for (index, ifindex) in [plane.consumer, plane.other].into_iter().enumerate() {
            world.consumers.push(Consumer::new(index as u8, ifindex, dice));
        }
        for v6 in [false, true] {
            for _ in 0..3 {
                world.locals.insert(destination(dice, v6));
            }
        }
        world
    }

    /// Where a packet leads, by the rules alone.
    fn judge(&self, consumer: &Consumer, frame: &Frame) -> (Found, Expected) {
        let nothing = |found, verdict| {
            let (policy, backends) = (0, BTreeSet::new());
            (
                found,
                Expected {
                    verdict,
                    policy,
                    backends,
                },
            )
        };
        let to = frame.destination.0;
        let Some((found, policy_id, open)) = consumer.route(frame) else {
            return nothing(Found::Nothing, Verdict::Pass);
        };
        if self.locals.contains(&to) {
            return nothing(Found::Local, Verdict::Pass);
        }
        let policy = &self.policies[&policy_id];
        let mut backends = BTreeSet::new();
        let is_open = consumer.row != 0 && consumer.row == consumer.registered && open;
        let verdict = if !is_open {
            if policy.passes {
                Verdict::PassedHeld
            } else {
                Verdict::DropHeld
            }
        } else if policy.expired {
            Verdict::DropExpired
        } else if consumer.flags & ConsumerRow::HAS_SOURCES != 0
            && !consumer.sources.contains(&frame.source.0)
        {
            Verdict::DropSpoofed
        } else {
            backends = policy
                .slots
                .iter()
                .copied()
                .filter(|id| self.serves(consumer, *id, to.is_ipv6()))
                .collect();
            match (backends.is_empty(), policy.passes) {
                (false, _) => Verdict::Delivered,
                (true, true) => Verdict::PassedHeld,
                (true, false) => Verdict::DropNoProducer,
            }
        };
        (
            found,
            Expected {
                verdict,
                policy: policy_id,
                backends,
            },
        )
    }

    fn serves(&self, consumer: &Consumer, id: u32, v6: bool) -> bool {
        let backend = &self.backends[&id];
        let reached = !backend.neighbour || if v6 { backend.v6 } else { backend.v4 };
        backend.current && backend.member && backend.ifindex != consumer.ifindex && reached
    }

    /// Writes all of it, over whatever an earlier world left.
    fn write(&self, plane: &mut Plane, generation: u32) -> anyhow::Result<()> {
        clear(plane)?;
        for (id, backend) in &self.backends {
            let token = u64::from(backend.ifindex) << 8;
            plane.register(backend.ifindex, token, [2, 0, 0, 0, 1, backend.ifindex as u8])?;
            plane.backend_with(*id, |value| {
                value.token = if backend.current { token } else { token + 1 };
                value.policy = id / BACKENDS;
                value.device = if backend.neighbour { backend.ifindex } else { 0 };
                value.address_v4 = if backend.v4 { [10, 0, 0, 9] } else { [0; 4] };
                value.address_v6 = [if backend.v6 { 0xfd } else { 0 }; 16];
                value.target = Target {
                    ifindex: backend.ifindex,
                    kind: if backend.neighbour {
                        Target::NEIGH
                    } else {
                        Target::PEER
                    },
                    last_generation: if backend.member {
                        generation
                    } else {
                        generation - 1
                    },
                }
                .pack();
            })?;
        }
        for (id, policy) in &self.policies {
            plane.slots(id * ROOM, &policy.slots)?;
            let flags = if policy.passes {
                PolicySlot::PASS_WHILE_HELD
            } else {
                0
            };
            plane.policy(*id, id * ROOM, policy.slots.len() as u16, generation, flags)?;
            plane.policy_with(*id, |slot| slot.stale_after = u64::from(policy.expired))?;
        }
        for local in &self.locals {
            plane.local(*local)?;
        }
        for consumer in &self.consumers {
            consumer.write(plane, generation)?;
        }
        Ok(())
    }
}

impl Consumer {
    fn new(index: u8, ifindex: u32, dice: &mut Dice) -> Self {
        // Backends are registered by the same rule.
        let token = u64::from(ifindex) << 8;
        let mut flags = 0;
        for (flag, percent) in [
            (ConsumerRow::HAS_SERVICES, 90),
            (ConsumerRow::HAS_SOURCES, 60),
            (ConsumerRow::HAS_PREFIXES_V4, 90),
            (ConsumerRow::HAS_PREFIXES_V6, 90),
        ] {
            flags |= if dice.percent(percent) { flag } else { 0 };
        }
        let row = match dice.roll(10) {
            0 => 0,
            1 => token + 1,
            _ => token,
        };
        let mut consumer = Self {
            ifindex,
            row,
            registered: token,
            flags,
            ..Self::default()
        };
        for host in 1..3 {
            consumer.sources.insert(Ipv4Addr::new(10, 0, index, host).into());
            consumer
                .sources
                .insert(Ipv6Addr::new(0xfd00, 0, 0, index.into(), 0, 0, 0, host.into()).into());
        }
        let policy = |dice: &mut Dice| (dice.roll(POLICIES), dice.percent(85));
        for v6 in [false, true] {
            for _ in 0..24 {
                let protocol = dice.pick(&[6, 17]).unwrap_or_default();
                let port = dice.pick(&[53, 80, 443]).unwrap_or_default();
                let key = (destination(dice, v6), protocol, port);
                consumer.services.insert(key, policy(dice));
            }
            let lengths: &[u8] = if v6 {
                &[0, 29, 32, 61, 64, 120, 126, 128]
            } else {
                &[0, 8, 16, 21, 24, 27, 30, 32]
            };
            for _ in 0..12 {
                let length = dice.pick(lengths).unwrap_or_default();
                // A default route in every other world: beside it nothing is unmatched.
                if length == 0 && dice.percent(80) {
                    continue;
                }
                let (_, width, value) = bits(destination(dice, v6));
                let shift = u32::from(width - length);
                let network = value
                    .checked_shr(shift)
                    .unwrap_or(0)
                    .checked_shl(shift)
                    .unwrap_or(0);
                consumer.prefixes.insert((v6, length, network), policy(dice));
            }
        }
        consumer
    }

    /// How it is found, the policy, and whether the entry is open.
    fn route(&self, frame: &Frame) -> Option<(Found, u32, bool)> {
        let (to, port) = frame.destination;
        let protocol = frame.transport.number();
        if self.flags & ConsumerRow::HAS_SERVICES != 0
            && let Some(&(policy, open)) = self.services.get(&(to, protocol, port))
        {
            return Some((Found::Service, policy, open));
        }
        let flag = if to.is_ipv4() {
            ConsumerRow::HAS_PREFIXES_V4
        } else {
            ConsumerRow::HAS_PREFIXES_V6
        };
        if self.flags & flag == 0 {
            return None;
        }
        let covering = self.prefixes.iter().filter(|(prefix, _)| covers(**prefix, to));
        let (_, &(policy, open)) = covering.max_by_key(|(prefix, _)| prefix.1)?;
        Some((Found::Prefix, policy, open))
    }

    fn write(&self, plane: &mut Plane, epoch: u32) -> anyhow::Result<()> {
        plane.register(self.ifindex, self.registered, [2, 0, 0, 0, 1, self.ifindex as u8])?;
        for (&(to, protocol, port), &(policy, open)) in &self.services {
            let key = ServiceKey {
                ifindex: self.ifindex,
                ..plane.key(to, protocol, port)
            };
            plane.entry_at(key, policy, if open { RouteEntry::OPEN } else { 0 })?;
        }
        for (&(v6, length, network), &(policy, open)) in &self.prefixes {
            let (family, bytes) = if v6 {
                address(Ipv6Addr::from(network).into())
            } else {
                address(Ipv4Addr::from(network as u32).into())
            };
            let key = PrefixKey::new(self.ifindex, family, &bytes, length.into());
            let entry = PrefixEntry {
                check: key.check(),
                length: length.into(),
                policy,
                flags: if open { RouteEntry::OPEN } else { 0 },
            };
            plane.prefixes()?.insert(&trie_key(&key), Plain(entry), 0)?;
        }
        for source in &self.sources {
            let (family, address) = address(*source);
            let key = SourceKey {
                ifindex: self.ifindex,
                family,
                pad: [0; 3],
                address,
            };
            plane
                .hash(pin::SOURCES)?
                .insert(Plain(key), Plain(key.check()), 0)?;
        }
        plane.row_of(self.ifindex, self.row, epoch, self.flags)
    }

    /// A packet that is aimed at an entry, at one of the node's addresses, or at nothing in particular.
    fn packet(&self, world: &World, dice: &mut Dice) -> Frame {
        let v6 = dice.percent(50);
        let mut to = destination(dice, v6);
        let mut port = dice.pick(&[53, 80, 443, 7_000]).unwrap_or_default();
        let mut transport = match dice.roll(5) {
            0 | 1 => Transport::Udp,
            2 | 3 => Transport::Tcp(if dice.percent(50) { SYN } else { 0x10 }),
            _ => Transport::Other(dice.pick(&[1, 58, 132, 50]).unwrap_or_default(), 200),
        };
        match dice.roll(100) {
            0..45 => {
                let keys: Vec<_> = self.services.keys().copied().collect();
                if let Some((address, protocol, service)) = dice.pick(&keys) {
                    (to, port) = (address, service);
                    transport = if protocol == 17 {
                        Transport::Udp
                    } else {
                        Transport::Tcp(SYN)
                    };
                }
            }
            45..90 => {
                let keys: Vec<_> = self.prefixes.keys().copied().collect();
                if let Some((v6, length, network)) = dice.pick(&keys) {
                    let free = if v6 { 128 } else { 32 } - u32::from(length);
                    let mask = u128::MAX.checked_shr(128 - free).unwrap_or(0);
                    let host =
                        (u128::from(dice.roll(u32::MAX)) | u128::from(dice.roll(u32::MAX)) << 60) & mask;
                    to = if v6 {
                        Ipv6Addr::from(network | host).into()
                    } else {
                        Ipv4Addr::from((network | host) as u32).into()
                    };
                }
            }
            90..95 => {
                let locals: Vec<_> = world.locals.iter().copied().collect();
                to = dice.pick(&locals).unwrap_or(to);
            }
            _ => {}
        }
        if is_never_captured(to) {
            to = destination(dice, to.is_ipv6());
        }
        let own: Vec<_> = self
            .sources
            .iter()
            .copied()
            .filter(|source| source.is_ipv6() == to.is_ipv6())
            .collect();
        let mut source = dice.pick(&own).unwrap_or(to);
        if dice.percent(10) {
            // Another one, but no other consumer's.
            source = match source {
                IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) | 0x80).into(),
                IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) | 0x80).into(),
            };
        }
        if matches!(transport, Transport::Other(..)) {
            port = 0;
        }
        let source_port = if port == 0 {
            0
        } else {
            20_000 + dice.roll(20_000) as u16
        };
        Frame::new((source, source_port), (to, port), transport)
    }
}

/// What the parser lets pass before anything is looked up.
fn is_never_captured(to: IpAddr) -> bool {
    match to {
        IpAddr::V4(to) => to.is_multicast() || to.is_link_local() || to.is_broadcast(),
        IpAddr::V6(to) => to.is_multicast() || to.is_unicast_link_local(),
    }
}

/// Removes what an earlier world wrote under keys that the next may not have.
fn clear(plane: &mut Plane) -> anyhow::Result<()> {
    let mut services = plane.hash::<ServiceKey, RouteEntry>(pin::SERVICES)?;
    let keys: Result<Vec<_>, _> = services.keys().collect();
    for key in keys? {
        services.remove(&key)?;
    }
    let mut locals = plane.hash::<LocalKey, u64>(pin::LOCALS)?;
    let keys: Result<Vec<_>, _> = locals.keys().collect();
    for key in keys? {
        locals.remove(&key)?;
    }
    let mut prefixes = plane.prefixes()?;
    let keys: Result<Vec<_>, _> = prefixes.keys().collect();
    for key in keys? {
        prefixes.remove(&key)?;
    }
    Ok(())
}

/// One packet: what the program says must be what the model says.
fn compare(
    plane: &mut Plane,
    world: &World,
    consumer: &Consumer,
    frame: &Frame,
) -> anyhow::Result<(Found, Verdict)> {
    let (found, expected) = world.judge(consumer, frame);
    let nonce = [NONCE as u32, (NONCE >> 32) as u32];
    let cb = [0, 0, 0, nonce[0], nonce[1]];
    let run = plane.run(consumer.ifindex, &frame.bytes(), probe::MARK, cb, 1)?;
    let [verdict, target, policy, _, backend] = run.cb;
    let delivered = expected.verdict == Verdict::Delivered;
    let right = verdict == expected.verdict as u32
        && policy == expected.policy
        && (!delivered || expected.backends.contains(&backend) && world.backends[&backend].ifindex == target);
    ensure!(
        right,
        "the program says {:?} instead of {expected:?} ({found:?}) of {frame:?} from {consumer:?}",
        run.cb
    );
    Ok((found, expected.verdict))
}

/// The same packet for real, and what the stack sees of it.
fn send(plane: &mut Plane, consumer: &Consumer, frame: &Frame, verdict: Verdict) -> anyhow::Result<()> {
    let run = plane.run(consumer.ifindex, &frame.bytes(), 7, [1, 2, 3, 4, 5], 1)?;
    let right = match verdict {
        Verdict::Pass | Verdict::PassedHeld => run.action == -1,
        Verdict::Delivered => run.action == REDIRECT,
        _ => run.action == SHOT,
    };
    ensure!(
        right,
        "action {} instead of {verdict:?} for {frame:?} from {consumer:?}",
        run.action
    );
    Ok(())
}

pub(crate) fn a_million_packets_go_where_the_model_says() -> anyhow::Result<()> {
    bare(|plane| {
        let seed = std::env::var("HOLDFAST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed =
            seed.unwrap_or_else(|| u64::from(std::process::id()) ^ crate::plane::boot_ns().unwrap_or(1));
        say(format_args!("HOLDFAST_SEED={seed}"));
        let mut dice = Dice(ChaCha8Rng::seed_from_u64(seed));
        plane.set_control(control::NONCE, NONCE)?;
        let mut kinds = BTreeMap::<Found, u32>::new();
        let mut verdicts = BTreeMap::<Verdict, u64>::new();
        let mut sent = BTreeMap::<Verdict, u64>::new();
        for generation in 1..=WORLDS {
            let world = World::new(plane, &mut dice);
            world.write(plane, generation)?;
            for _ in 0..PACKETS {
                let consumer = &world.consumers[dice.roll(2) as usize];
                let frame = consumer.packet(&world, &mut dice);
                let (found, verdict) = compare(plane, &world, consumer, &frame)?;
                *kinds.entry(found).or_default() += 1;
                *verdicts.entry(verdict).or_default() += 1;
                // Probes touch no flow; real packets make them, and follow them.
                if dice.percent(20) {
                    send(plane, consumer, &frame, verdict)?;
                    *sent.entry(verdict).or_default() += 1;
                }
            }
        }
        let all = WORLDS * PACKETS;
        say(format_args!("{all} packets by route: {kinds:?}"));
        say(format_args!("by verdict: {verdicts:?}; sent for real: {sent:?}"));
        for kind in [Found::Service, Found::Prefix] {
            ensure!(
                kinds.get(&kind).is_some_and(|count| count * 10 >= all * 3),
                "too few of {kind:?}"
            );
        }
        for verdict in [
            Verdict::Pass,
            Verdict::Delivered,
            Verdict::PassedHeld,
            Verdict::DropHeld,
            Verdict::DropNoProducer,
            Verdict::DropSpoofed,
            Verdict::DropExpired,
        ] {
            ensure!(
                verdicts
                    .get(&verdict)
                    .is_some_and(|count| count * 200 >= all.into()),
                "too few {verdict:?}"
            );
        }
        let counters = plane.counters()?;
        for verdict in Verdict::ALL {
            let expected = sent.get(&verdict).copied().unwrap_or_default();
            ensure!(
                counters[verdict as usize] == expected,
                "{verdict:?}: {counters:?} instead of {sent:?}"
            );
        }
        Ok(())
    })
}
