//! Asking the kernel itself: read back what was written, then run the very program that a device holds.
//!
//! A probe is a test run with a mark and a random nonce that no packet can carry: the program says what it would do and
//! changes nothing. It proves the decision, not the redirect itself (the peer down, its MTU).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use holdfast_ebpf::abi::{PrefixKey, Verdict, control, pin, probe};
use holdfast_engine::model::{
    Backend, BackendId, Device, Entry, Ifindex, IntentProof, OpError, Protocol, RouteKey, Selected, SlotId,
    Token,
};
use rustix::io::Errno;

use super::attach::{Inspection, Links, Program, failed, is_still, refused};
use super::convert;
use super::gap::{self, Prefix};
use super::maps::Maps;
use super::pins::Pins;
use super::raw::{self, SkbContext};
use super::write::{self, Known};
use crate::registry::Registry;

/// Carries proofs out.
pub(super) struct Prover<'a> {
    pub(super) pins: &'a Pins,
    pub(super) links: &'a Links,
    pub(super) maps: &'a Maps,
    pub(super) registry: &'a Registry,
    /// The program of this life, which most devices hold.
    pub(super) program: &'a Program,
    /// Which prefixes and services there are: more specific ones take what a less specific one is asked about.
    pub(super) known: &'a Mutex<Known>,
    /// A foreign program before ours is no reason to fail.
    pub(super) allow_foreign_before: bool,
}

/// What the program answered to a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What it would do.
    pub verdict: Verdict,
    /// Where to; 0 = nowhere.
    pub target: Ifindex,
    /// For which policy slot.
    pub policy: SlotId,
    /// In which generation of its set.
    pub generation: u32,
    /// To which backend.
    pub backend: BackendId,
}

/// A packet that a probe is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Where from.
    pub source: IpAddr,
    /// Where to: of the same family.
    pub destination: IpAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Destination port.
    pub port: u16,
}

/// How a probe wants to be judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Question {
    base: u32,
    length: u32,
    flags: u32,
}

impl Question {
    /// As a packet would be.
    pub(super) const AS_IS: Self = Self {
        base: 0,
        length: 0,
        flags: 0,
    };
    /// As if the consumer's row and the entry were open.
    const AS_IF_OPEN: Self = Self {
        base: 0,
        length: 0,
        flags: probe::AS_IF_OPEN,
    };

    /// One slot for a policy: no route, no row.
    const fn slot(slot: u32, policy: SlotId) -> Self {
        Self {
            base: slot,
            length: 1,
            flags: probe::SET_ONLY | policy << 8,
        }
    }
}

fn disproved(message: impl Into<String>) -> OpError {
    OpError::Disproved {
        message: message.into(),
    }
}

/// The device does not hold our program: it has to be attached anew.
fn detached(message: impl Into<String>) -> OpError {
    OpError::Detached {
        message: message.into(),
    }
}

fn compare<T: PartialEq + std::fmt::Debug>(
    what: impl Display,
    wanted: &T,
    found: Option<&T>,
) -> Result<(), OpError> {
    match found {
        Some(found) if found == wanted => Ok(()),
        Some(found) => Err(disproved(format!(
            "{what}: wanted {wanted:?}, the kernel has {found:?}"
        ))),
        None => Err(disproved(format!(
            "{what}: wanted {wanted:?}, the kernel has none"
        ))),
    }
}

/// The very program that a device holds.
pub(super) enum Held<'a> {
    /// That of this life: an id names one program for as long as it lives, and ours lives.
    Current(&'a Program),
    /// Another that is pinned.
    Other(Program),
}

impl Deref for Held<'_> {
    type Target = Program;

    fn deref(&self) -> &Program {
        match self {
            Self::Current(program) => program,
            Self::Other(program) => program,
        }
    }
}

impl Prover<'_> {
    /// The program that the device holds, if ours is in its place.
    pub(super) fn program_of(&self, device: Device) -> Result<Held<'_>, OpError> {
        let Device { ifindex, .. } = device;
        is_still(device)?;
        let Inspection { program, before } = self.links.inspect(ifindex)?;
        let id = program.map_err(detached)?;
        // What stands before ours could let every packet pass without asking ours.
        if !before.is_empty() && !self.allow_foreign_before {
            let before: Vec<String> = before.iter().map(ToString::to_string).collect();
            return Err(disproved(format!(
                "device {ifindex}: {} is asked before our program {id} and could let packets pass: put it behind ours, or \
                 give the agent --allow-foreign-before",
                before.join(" and ")
            )));
        }
        if id == self.program.info.id {
            return Ok(Held::Current(self.program));
        }
        let program = Program::open(self.pins, id).map_err(|error| refused(&error))?;
        program.map(Held::Other).ok_or_else(|| {
            detached(format!(
                "device {ifindex} holds program {id}, which is none that is pinned here"
            ))
        })
    }

    pub(super) fn intent(&self, proof: &IntentProof) -> Result<(), OpError> {
        let program = self.program_of(proof.device)?;
        let Device { ifindex, .. } = proof.device;

        let row = self
            .maps
            .consumers
            .lookup(&ifindex)
            .map_err(|errno| write::refused("reading", pin::CONSUMERS, errno))?;
        compare(
            format_args!("row of device {ifindex}"),
            &convert::row(ifindex, &proof.row),
            row.as_ref(),
        )?;
        self.identity(proof.device, proof.token)?;
        self.sources(ifindex, &proof.sources)?;
        self.entries(ifindex, &proof.entries)?;
        for policy in proof.policies() {
            self.selector(policy, proof.selected)?;
        }
        self.backends(&proof.backends)?;
        self.slots(proof.selected, &proof.backends)?;

        for (key, entry) in &proof.entries {
            self.destination(&program, proof, key, *entry)?;
        }
        for (key, policy) in &proof.takeovers {
            self.takeover(&program, proof, key, *policy)?;
        }
        Ok(())
    }

    fn identity(&self, device: Device, token: Token) -> Result<(), OpError> {
        let found = self
            .registry
            .read(device.ifindex)
            .map_err(|errno| OpError::Refused {
                message: format!("reading the registry: {errno}"),
            })?;
        let what = format!("registered token of device {}", device.ifindex);
        compare(&what, &token, found.as_ref().map(|found| &found.token))?;
        match found {
            Some(found) if !found.host_mac_shared && found.host_mac != device.mac => Err(disproved(format!(
                "the identity of device {} was registered for another device, {}",
                device.ifindex, found.host_mac
            ))),
            _ => Ok(()),
        }
    }

    fn sources(&self, ifindex: Ifindex, sources: &BTreeSet<IpAddr>) -> Result<(), OpError> {
        for &source in sources {
            let key = convert::source_key(ifindex, source);
            let found = self
                .maps
                .sources
                .lookup(&key)
                .map_err(|errno| write::refused("reading", pin::SOURCES, errno))?;
            compare(
                format_args!("source {source} of device {ifindex}"),
                &key.check(),
                found.as_ref(),
            )?;
        }
        Ok(())
    }

    fn entries(&self, ifindex: Ifindex, entries: &BTreeMap<RouteKey, Entry>) -> Result<(), OpError> {
        for (route, entry) in entries {
            let what = format_args!("entry {route} of device {ifindex}");
            if let Some(key) = convert::service_key(ifindex, route) {
                let found = self
                    .maps
                    .services
                    .lookup(&key)
                    .map_err(|errno| write::refused("reading", pin::SERVICES, errno))?;
                compare(what, &convert::entry(&key, *entry), found.as_ref())?;
            }
            if let Some(key) = convert::prefix_key(ifindex, route) {
                let wanted = convert::prefix_entry(&key, *entry);
                let found = self
                    .maps
                    .prefixes
                    .lookup_longest(&key)
                    .map_err(|errno| write::refused("reading", pin::PREFIXES, errno))?
                    // That of a shorter prefix is none.
                    .filter(|found| found.length == wanted.length);
                compare(what, &wanted, found.as_ref())?;
            }
        }
        Ok(())
    }

    fn selector(&self, policy: SlotId, selected: Selected) -> Result<(), OpError> {
        let found = self
            .maps
            .policies
            .lookup(&policy)
            .map_err(|errno| write::refused("reading", pin::POLICIES, errno))?;
        let found = found.map(|found| found.selector);
        compare(
            format_args!("selector of policy slot {policy}"),
            &convert::selector(selected),
            found.as_ref(),
        )
    }

    fn backends(&self, backends: &BTreeMap<BackendId, Backend>) -> Result<(), OpError> {
        for (id, backend) in backends {
            let found = self
                .maps
                .backends
                .lookup(id)
                .map_err(|errno| write::refused("reading", pin::BACKENDS, errno))?;
            compare(
                format_args!("backend {id}"),
                &convert::backend(backend),
                found.as_ref(),
            )?;
        }
        Ok(())
    }

    /// Every slot of the set leads to one of its members.
    fn slots(&self, selected: Selected, backends: &BTreeMap<BackendId, Backend>) -> Result<(), OpError> {
        for offset in 0..u32::from(selected.length) {
            let index = selected.base.saturating_add(offset);
            let found = self
                .maps
                .slots
                .lookup(&index)
                .map_err(|errno| write::refused("reading", pin::SLOTS, errno))?;
            if !found.is_some_and(|backend| backends.contains_key(&backend)) {
                return Err(disproved(format!(
                    "slot {index}: the kernel has {found:?}, which is no backend of the set"
                )));
            }
        }
        Ok(())
    }

    /// Asks about a destination that another policy has still, as if its entry led to this one: for each member of the
    /// set but the consumer itself. One that takes such packets is enough, as it is for the program.
    fn takeover(
        &self,
        program: &Program,
        proof: &IntentProof,
        key: &RouteKey,
        policy: SlotId,
    ) -> Result<(), OpError> {
        let ifindex = proof.device.ifindex;
        let packet = taken_over(key);
        let mut asked = BTreeSet::new();
        for index in (proof.selected.base..).take(usize::from(proof.selected.length)) {
            let found = self
                .maps
                .slots
                .lookup(&index)
                .map_err(|errno| write::refused("reading", pin::SLOTS, errno))?;
            let member = found.and_then(|id| Some((id, proof.backends.get(&id)?.ifindex)));
            let Some((backend, target)) =
                member.filter(|(id, target)| *target != ifindex && asked.insert(*id))
            else {
                continue;
            };
            let answer = self.ask(program, ifindex, &packet, Question::slot(index, policy))?;
            let right = Answer {
                verdict: Verdict::Delivered,
                target,
                policy,
                generation: proof.selected.generation,
                backend,
            };
            if answer == right {
                return Ok(());
            }
            if answer.verdict == Verdict::Delivered {
                return Err(disproved(format!(
                    "asked for {key} by slot {index} of policy slot {policy}, the program of device {ifindex} answers \
                     {answer:?}"
                )));
            }
        }
        Err(disproved(format!(
            "asked for {key} as if it led to policy slot {policy}, the program of device {ifindex} delivers to none of \
             backends {asked:?}"
        )))
    }

    /// Asks about one destination.
    fn destination(
        &self,
        program: &Program,
        proof: &IntentProof,
        key: &RouteKey,
        entry: Entry,
    ) -> Result<(), OpError> {
        match *key {
            RouteKey::Service {
                address,
                protocol,
                port,
            } => self.service(program, proof, entry, (address, protocol, port)),
            RouteKey::Prefix { address, length } => self.prefix(program, proof, entry, (address, length)),
        }
    }

    /// Asks about an address of a prefix to which nothing more specific leads. Where everything in it belongs to more
    /// specific ones, there is no packet to ask about.
    fn prefix(
        &self,
        program: &Program,
        proof: &IntentProof,
        entry: Entry,
        prefix: Prefix,
    ) -> Result<(), OpError> {
        /// Another policy's entries, and the node's addresses, may change between the choice and the question.
        const ATTEMPTS: u32 = 4;
        self.own_pass(program, proof, prefix)?;
        let mut chosen = self.inside(proof.device.ifindex, prefix);
        for _ in 0..ATTEMPTS {
            let Some(destination) = chosen else { return Ok(()) };
            let outcome = self.service(program, proof, entry, destination);
            if outcome.is_ok() {
                return outcome;
            }
            let again = self.inside(proof.device.ifindex, prefix);
            if again == chosen {
                return outcome;
            }
            chosen = again;
        }
        Err(disproved(format!(
            "{}/{} of device {}: what is more specific never rests",
            prefix.0, prefix.1, proof.device.ifindex
        )))
    }

    /// Asks about the node's own addresses in a prefix, the first of them: they are not captured.
    fn own_pass(&self, program: &Program, proof: &IntentProof, prefix: Prefix) -> Result<(), OpError> {
        let Some(destination) = self.own_in(prefix) else {
            return Ok(());
        };
        let of_family = |source: &&IpAddr| source.is_ipv4() == destination.is_ipv4();
        let source = proof.sources.iter().find(of_family).copied();
        let packet = Packet {
            source: source.unwrap_or(made_up(destination)),
            destination,
            protocol: Protocol::Udp,
            port: *INSIDE_PORTS.start(),
        };
        let answer = self.ask(program, proof.device.ifindex, &packet, Question::AS_IF_OPEN)?;
        // It may have been taken away meanwhile.
        if answer.verdict == Verdict::Pass || self.own_in(prefix) != Some(destination) {
            return Ok(());
        }
        Err(disproved(format!(
            "asked for {destination}, one of the node's own addresses, the program of device {} answers {answer:?}",
            proof.device.ifindex
        )))
    }

    /// The first of the node's own addresses in a prefix.
    fn own_in(&self, prefix: Prefix) -> Option<IpAddr> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locals = known.locals.iter().copied();
        locals.find(|local| gap::contains(prefix, *local))
    }

    /// What a packet to a prefix itself goes to.
    fn inside(&self, ifindex: Ifindex, prefix: Prefix) -> Option<(IpAddr, Protocol, u16)> {
        let (family, network) = convert::address(prefix.0);
        let key = PrefixKey::new(ifindex, family, &network, u32::from(prefix.1));
        // Nothing is written while this is held.
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let locals = known.locals.iter().map(|local| (*local, gap::bits(*local)));
        let address = gap::free_address(prefix, known.within(&key).into_iter().chain(locals))?;
        let protocol = Protocol::Udp;
        let is_free = |port: &u16| {
            let port = *port;
            let route = RouteKey::Service {
                address,
                protocol,
                port,
            };
            convert::service_key(ifindex, &route).is_some_and(|key| !known.has_service(&key))
        };
        let port = INSIDE_PORTS.into_iter().find(is_free)?;
        Some((address, protocol, port))
    }

    /// Asks about one address, protocol and port, from every source address of its family.
    fn service(
        &self,
        program: &Program,
        proof: &IntentProof,
        entry: Entry,
        (destination, protocol, port): (IpAddr, Protocol, u16),
    ) -> Result<(), OpError> {
        let of_family: Vec<IpAddr> = proof
            .sources
            .iter()
            .copied()
            .filter(|source| source.is_ipv4() == destination.is_ipv4())
            .collect();
        // A consumer whose addresses are known, none of them of this family, cannot send such a packet: whatever
        // comes is spoofed, and that is what the program must say.
        let spoofed = of_family.is_empty() && proof.row.has_sources;
        let sources = if of_family.is_empty() {
            vec![made_up(destination)]
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
            let answer = self.ask(program, proof.device.ifindex, &packet, Question::AS_IF_OPEN)?;
            let right = if spoofed {
                answer.verdict == Verdict::DropSpoofed
            } else {
                answer.verdict == Verdict::Delivered
                    && answer.policy == entry.policy
                    && answer.generation == proof.selected.generation
                    && proof
                        .backends
                        .get(&answer.backend)
                        .is_some_and(|backend| backend.ifindex == answer.target)
                    // A member of the set may be the consumer itself: it is never its own producer.
                    && answer.target != proof.device.ifindex
            };
            if !right {
                return Err(disproved(format!(
                    "asked for {destination} {protocol} port {port} from {source}, the program of device {} answers \
                     {answer:?}",
                    proof.device.ifindex
                )));
            }
        }
        Ok(())
    }

    /// Asks for each slot singly, before a selector leads to them.
    pub(super) fn set(
        &self,
        policy: SlotId,
        device: Device,
        selected: Selected,
        backends: &BTreeMap<BackendId, Backend>,
        slots: &[BackendId],
    ) -> Result<(), OpError> {
        let program = self.program_of(device)?;
        if slots.len() != usize::from(selected.length) {
            return Err(disproved(format!(
                "a set of {} slots was to be proven by {} answers",
                selected.length,
                slots.len()
            )));
        }
        self.backends(backends)?;
        let mut asked = BTreeSet::new();
        for (offset, wanted) in (0..).zip(slots) {
            let index = selected.base.saturating_add(offset);
            let found = self
                .maps
                .slots
                .lookup(&index)
                .map_err(|errno| write::refused("reading", pin::SLOTS, errno))?;
            compare(format_args!("slot {index}"), wanted, found.as_ref())?;
            // Of the slots of one backend the first is asked: the others lead to the same words.
            if !asked.insert(wanted) {
                continue;
            }
            let backend = backends.get(wanted).ok_or_else(|| {
                disproved(format!(
                    "slot {index} leads to backend {wanted}, which is not in the set"
                ))
            })?;
            let families = families(backend);
            if families.is_empty() {
                return Err(disproved(format!(
                    "backend {wanted} is reached as a neighbour, and has no address"
                )));
            }
            for destination in families {
                let packet = Packet {
                    source: made_up(destination),
                    destination,
                    protocol: Protocol::Udp,
                    port: 9,
                };
                // From the loopback device, which is nobody's: from its own a producer is never its own consumer's.
                let answer = self.ask(&program, LOOPBACK, &packet, Question::slot(index, policy))?;
                let right = answer.verdict == Verdict::Delivered
                    && answer.policy == policy
                    && answer.backend == *wanted
                    && answer.target == backend.ifindex;
                if !right {
                    return Err(disproved(format!(
                        "asked for slot {index} of policy slot {policy}, which should lead to backend {wanted} at device \
                         {}, the program of device {} answers {answer:?}",
                        backend.ifindex, device.ifindex
                    )));
                }
            }
        }
        let members: BTreeSet<&BackendId> = backends.keys().collect();
        if asked == members {
            Ok(())
        } else {
            Err(disproved(format!(
                "slots lead to backends {asked:?}, the set is {members:?}"
            )))
        }
    }

    /// One test run.
    pub(super) fn ask(
        &self,
        program: &Program,
        ifindex: Ifindex,
        packet: &Packet,
        question: Question,
    ) -> Result<Answer, OpError> {
        let nonce = self.maps.control.load(control::NONCE);
        let context = SkbContext::new(
            probe::MARK,
            ifindex,
            [
                question.base,
                question.length,
                question.flags,
                nonce as u32,
                (nonce >> 32) as u32,
            ],
        );
        let run =
            raw::test_run(program.fd.as_fd(), &frame(packet), &context, 1).map_err(|errno| match errno {
                Errno::NODEV => OpError::NoDevice,
                errno => failed("a test run for", ifindex, errno),
            })?;
        let [verdict, target, policy, generation, backend] = run.context.cb;
        let verdict = Verdict::from_u32(verdict & 0xff).ok_or_else(|| {
            disproved(format!(
                "the program of device {ifindex} gives an answer that is none: {:?}",
                run.context.cb
            ))
        })?;
        Ok(Answer {
            verdict,
            target,
            policy,
            generation,
            backend,
        })
    }
}

/// An address that packets may come from, for a consumer whose addresses are not known. Documentation ranges
/// (RFC 5737, RFC 3849): nobody's.
const fn made_up(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    }
}

/// A packet to a destination whose route is not looked up: of a prefix, its family alone makes a difference.
const fn taken_over(key: &RouteKey) -> Packet {
    let (destination, protocol, port) = match *key {
        RouteKey::Service {
            address,
            protocol,
            port,
        } => (address, protocol, port),
        RouteKey::Prefix {
            address: IpAddr::V4(_),
            ..
        } => (DESTINATION_V4, Protocol::Udp, 9),
        RouteKey::Prefix {
            address: IpAddr::V6(_),
            ..
        } => (DESTINATION_V6, Protocol::Udp, 9),
    };
    Packet {
        source: made_up(destination),
        destination,
        protocol,
        port,
    }
}

/// The first device of every network namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: Ifindex = 1;

/// Where a packet goes whose route is not looked up. Documentation ranges (RFC 5737, RFC 3849).
const DESTINATION_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1));
const DESTINATION_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));

/// A destination of each family in which a backend is to be asked for: a neighbour is reached by its addresses; of the
/// others the family makes no difference.
fn families(backend: &Backend) -> Vec<IpAddr> {
    if backend.via.is_none() {
        return vec![DESTINATION_V4];
    }
    let v4 = backend.address_v4.map(|_| DESTINATION_V4);
    let v6 = backend.address_v6.map(|_| DESTINATION_V6);
    v4.into_iter().chain(v6).collect()
}

/// Ports that are tried for a packet into a prefix, at an address that may have services: more than one interface has.
pub(super) const INSIDE_PORTS: std::ops::RangeInclusive<u16> = 20_000..=u16::MAX;

/// Source port of probes: ephemeral, no service's.
pub(super) const SOURCE_PORT: u16 = 49_152;

/// An Ethernet frame with complete IP and transport headers. Checksums are left out: the program looks at none, and
/// a probe goes nowhere.
pub(super) fn frame(packet: &Packet) -> Vec<u8> {
    // Locally administered addresses, unicast both.
    let mut frame = vec![0x02, 0, 0, 0, 0, 0x02, 0x02, 0, 0, 0, 0, 0x01];
    let transport = transport(packet);
    let length = transport.len() as u16;
    match (packet.source, packet.destination) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend(0x86dd_u16.to_be_bytes());
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([packet.protocol.number(), 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        (source, destination) => {
            frame.extend(0x0800_u16.to_be_bytes());
            frame.extend([0x45, 0]);
            frame.extend((20 + length).to_be_bytes());
            // Identification 0, do not fragment; time to live 64.
            frame.extend([0, 0, 0x40, 0, 64, packet.protocol.number(), 0, 0]);
            frame.extend(v4(source).octets());
            frame.extend(v4(destination).octets());
        }
    }
    frame.extend(transport);
    frame
}

fn v4(address: IpAddr) -> Ipv4Addr {
    match address {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => address.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED),
    }
}

fn transport(packet: &Packet) -> Vec<u8> {
    let mut header = Vec::with_capacity(20);
    header.extend(SOURCE_PORT.to_be_bytes());
    header.extend(packet.port.to_be_bytes());
    match packet.protocol {
        // Sequence 0, acknowledgment 0, five words, SYN, window.
        Protocol::Tcp => header.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0]),
        Protocol::Udp => header.extend([0, 8, 0, 0]),
    }
    header
}

#[cfg(test)]
mod tests {
    use holdfast_ebpf::abi;
    use holdfast_ebpf::parse::{self, Headers, Kind};

    use super::*;

    fn packet(source: &str, destination: &str, protocol: Protocol) -> Packet {
        Packet {
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            protocol,
            port: 53,
        }
    }

    #[test]
    fn a_frame_says_its_own_length() {
        let udp4 = frame(&packet("10.0.0.1", "10.96.0.10", Protocol::Udp));
        assert_eq!(udp4.len(), 14 + 20 + 8);
        assert_eq!(udp4[16..18], 28_u16.to_be_bytes());
        let tcp6 = frame(&packet("fd00::1", "fd00::10", Protocol::Tcp));
        assert_eq!(tcp6.len(), 14 + 40 + 20);
        assert_eq!(tcp6[18..20], 20_u16.to_be_bytes());
    }

    #[test]
    fn ports_follow_the_addresses() {
        let frame = frame(&packet("10.0.0.1", "10.96.0.10", Protocol::Udp));
        assert_eq!(frame[30..34], [10, 96, 0, 10]);
        assert_eq!(frame[36..38], 53_u16.to_be_bytes());
    }

    /// What the program reads in the frame of a probe.
    fn read(packet: &Packet) -> (Kind, Headers) {
        let mut headers = Headers::default();
        let frame = frame(packet);
        (parse::parse(&mut frame.as_slice(), &mut headers), headers)
    }

    #[test]
    fn the_program_reads_in_a_probe_what_was_meant() {
        for (source, destination, family) in [
            ("10.0.0.1", "10.96.0.10", abi::FAMILY_V4),
            ("fd00::1", "fd00::10", abi::FAMILY_V6),
        ] {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let packet = packet(source, destination, protocol);
                let (kind, headers) = read(&packet);
                assert_eq!(kind, Kind::Complete);
                let key = headers.key;
                assert_eq!((key.family, key.protocol), (family, protocol.number()));
                assert_eq!(convert::address_of(family, key.source), Some(packet.source));
                assert_eq!(
                    convert::address_of(family, key.destination),
                    Some(packet.destination)
                );
                assert_eq!(u16::from_be(key.destination_port), 53);
            }
        }
    }

    #[test]
    fn made_up_addresses_are_none_that_are_never_captured() {
        let set_probe = Packet {
            source: made_up(DESTINATION_V4),
            destination: DESTINATION_V4,
            protocol: Protocol::Udp,
            port: 9,
        };
        assert_eq!(read(&set_probe).0, Kind::Complete);
        let v6 = Packet {
            source: made_up(DESTINATION_V6),
            destination: DESTINATION_V6,
            ..set_probe
        };
        assert_eq!(read(&v6).0, Kind::Complete);
    }

    #[test]
    fn a_comparison_names_both_sides() {
        let error = compare("slot 3", &7, Some(&9)).unwrap_err();
        assert_eq!(error.to_string(), "slot 3: wanted 7, the kernel has 9");
        let error = compare("slot 3", &7, None).unwrap_err();
        assert_eq!(error.to_string(), "slot 3: wanted 7, the kernel has none");
        assert!(compare("slot 3", &7, Some(&7)).is_ok());
    }
}
