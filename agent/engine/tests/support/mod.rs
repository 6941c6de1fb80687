//! Words that the suites share: objects, devices, identities, and a bench that steps an engine by hand.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "test code that is shared; each suite uses its own part"
)]

pub mod journal;
mod kernel;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use holdfast_engine::Engine;
use holdfast_engine::belief::{Audited, Belief, Difference, There};
use holdfast_engine::model::*;
use holdfast_engine::view::{IntentView, PolicyView};

/// Nanoseconds in a second.
pub const SECOND: u64 = Boot::SECOND;

/// The address of attachment `web` of [`Bench::three_devices`].
pub const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));

/// FNV-1a: stands in for SHA-256.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

pub fn name_hash(name: &ObjectName) -> NameHash {
    NameHash(fnv(&name.to_string()) | 1)
}

pub fn uid_hash(uid: &Uid) -> UidHash {
    let hash = fnv(&uid.0);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&hash.to_be_bytes());
    bytes[8..].copy_from_slice(&hash.rotate_left(17).to_be_bytes());
    UidHash(bytes)
}

/// Everything that the data plane will do one day.
pub const ALL_FEATURES: Features = Features {
    prefixes: true,
    translate: true,
    several_producers: true,
    neighbour_delivery: true,
    max_staleness: true,
};

/// What the first data plane does.
pub const FIRST_FEATURES: Features = Features {
    prefixes: false,
    translate: false,
    several_producers: false,
    neighbour_delivery: false,
    max_staleness: false,
};

pub fn config(features: Features) -> Config {
    Config {
        capacity: Capacity {
            policies: 64,
            slots: 65_536,
            backends: 256,
        },
        features,
        neighbour_only: false,
        hashes: Hashes {
            name: name_hash,
            uid: uid_hash,
        },
        audit_every: 0,
    }
}

pub fn named(name: &str) -> ObjectName {
    ObjectName {
        namespace: "shop".into(),
        name: name.into(),
    }
}

pub fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

pub fn selector(key: &str, value: &str) -> Selector {
    Selector {
        match_labels: labels(&[(key, value)]),
        match_expressions: Vec::new(),
    }
}

pub fn incarnation(text: &str) -> Incarnation {
    let hash = fnv(text);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&hash.to_be_bytes());
    Incarnation(bytes)
}

/// `10.96.0.N`, UDP, port 53.
pub fn service(n: u8) -> Destination {
    Destination::Service {
        address: IpAddr::from([10, 96, 0, n]),
        protocol: Protocol::Udp,
        port: 53,
        target_port: None,
    }
}

/// Its key.
pub fn key(n: u8) -> RouteKey {
    RouteKey::Service {
        address: IpAddr::from([10, 96, 0, n]),
        protocol: Protocol::Udp,
        port: 53,
    }
}

/// A policy whose consumers carry `app: CONSUMERS` and whose producers carry `app: PRODUCERS`.
pub fn policy(name: &str, consumers: &str, producers: &str, destinations: &[u8]) -> Policy {
    Policy {
        name: named(name),
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        created_ms: 1_000,
        origin: None,
        content: Ok(PolicySpec {
            consumers: selector("app", consumers),
            producers: selector("app", producers),
            destinations: destinations.iter().map(|n| service(*n)).collect(),
            delivery: Delivery::Direct,
            while_held: WhileHeld::Drop,
            switchover: Switchover {
                deadline: 30 * SECOND,
                on_deadline: OnDeadline::KeepOld,
                drain: 60 * SECOND,
            },
            max_staleness: None,
        }),
    }
}

/// An attachment with label `app: APP`; no identity is expected, no addresses.
pub fn attachment(name: &str, interface: &str, app: &str) -> Attachment {
    Attachment {
        name: named(name),
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        created_ms: 1_000,
        interface: interface.into(),
        expected: None,
        addresses: BTreeSet::new(),
        labels: labels(&[("app", app)]),
        covers: Covers {
            consumer: fnv(&format!("c/{name}/1")),
            producer: fnv(&format!("p/{name}/1")),
        },
    }
}

pub fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

/// A veth, up, its peer in another namespace; its MAC is made of `n`.
pub fn veth(ifindex: Ifindex, name: &str, n: u8) -> Link {
    Link {
        ifindex,
        name: name.into(),
        mac: mac(n),
        up: true,
        carrier: true,
        kind: LinkKind::Veth { peer_elsewhere: true },
        master: None,
        mtu: 1500,
        ipv6: true,
    }
}

pub fn token(n: u64) -> Token {
    Token::new(n).unwrap()
}

/// A row for the device whose MAC is made of `n`.
pub fn identity(value: u64, n: u8) -> RegistryRead {
    RegistryRead::Row(Identity {
        token: token(value),
        mac: Mac([4, 0, 0, 0, 0, n]),
        host_mac: mac(n),
        host_mac_shared: false,
        incarnation: None,
    })
}

/// An operation in one short line, complete but for hashes.
pub fn brief(op: &Op) -> String {
    let entries = |entries: &BTreeMap<RouteKey, Entry>| {
        entries
            .iter()
            .map(|(key, entry)| {
                let gate = if entry.open { "open" } else { "closed" };
                format!("{}->{}:{gate}", short(key), entry.policy)
            })
            .collect::<Vec<_>>()
            .join(" ")
    };
    let backends = |backends: &BTreeMap<BackendId, Option<Backend>>| {
        backends
            .iter()
            .map(|(id, backend)| match backend {
                None => format!("{id}:free"),
                Some(backend) => {
                    let drain = backend
                        .drain_until
                        .map_or_else(String::new, |until| format!("~{}", until.0 / SECOND));
                    let via = backend.via.map_or_else(String::new, |via| format!(" via {via}"));
                    format!(
                        "{id}:{}/{}g{}{drain}{via}",
                        backend.ifindex,
                        backend.token.get(),
                        backend.last_generation
                    )
                }
            })
            .collect::<Vec<_>>()
            .join(" ")
    };
    let selected =
        |selected: &Selected| format!("{}+{}g{}", selected.base, selected.length, selected.generation);
    match op {
        Op::Attach { device } => format!("attach {}", device.ifindex),
        Op::Detach { ifindex } => format!("detach {ifindex}"),
        Op::ClearInterface { ifindex } => format!("clear {ifindex}"),
        Op::WriteRow { ifindex, row } => {
            let token = row
                .token
                .map_or_else(|| "closed".to_owned(), |token| token.get().to_string());
            let sources = if row.has_sources { " sources" } else { "" };
            let v4 = if row.has_prefixes_v4 { " v4" } else { "" };
            let v6 = if row.has_prefixes_v6 { " v6" } else { "" };
            let via = row.via.map_or_else(String::new, |via| format!(" via {via}"));
            format!("row {ifindex} {token} epoch {}{v4}{v6}{sources}{via}", row.epoch)
        }
        Op::WriteSources { ifindex, add, delete } => format!("sources {ifindex} +{add:?} -{delete:?}"),
        Op::WriteLocals { add, delete } => format!("locals +{add:?} -{delete:?}"),
        Op::WriteEntries {
            ifindex,
            entries: all,
        } => format!("entries {ifindex} {}", entries(all)),
        Op::DeleteEntries { ifindex, keys } => format!(
            "delete entries {ifindex} {}",
            keys.iter().map(short).collect::<Vec<_>>().join(" ")
        ),
        Op::WriteBackends { backends: all } => format!("backends {}", backends(all)),
        Op::WriteSlots { base, slots } if slots.len() > 4 => format!("slots {base} x{}", slots.len()),
        Op::WriteSlots { base, slots } => format!("slots {base} {slots:?}"),
        Op::WritePolicy { slot, value: None } => format!("policy {slot} free"),
        Op::WritePolicy {
            slot,
            value: Some(value),
        } => {
            let pass = if value.pass_while_held { " pass" } else { "" };
            let waiting = value.waiting_since.map_or_else(String::new, |since| {
                format!(" waiting since {}", since.0 / SECOND)
            });
            format!(
                "policy {slot} -> {} serving {}{pass}{waiting}",
                selected(&value.selected),
                value.served_generation
            )
        }
        Op::DeleteIdentity { ifindex, token } => format!("delete identity {ifindex} {}", token.get()),
        Op::ProveSet {
            policy,
            device,
            selected: set,
            ..
        } => format!("prove set {policy} {} at {}", selected(set), device.ifindex),
        Op::ProveIntent(proof) => {
            let asked = std::iter::once(entries(&proof.entries)).filter(|entries| !entries.is_empty());
            let takeovers = proof.takeovers.iter();
            let asked: Vec<String> = asked
                .chain(takeovers.map(|(key, slot)| format!("{}->{slot}:taken", short(key))))
                .collect();
            format!(
                "prove {} for {} {} by {}",
                proof.device.ifindex,
                proof.token.get(),
                asked.join(" "),
                selected(&proof.selected)
            )
        }
    }
}

fn short(key: &RouteKey) -> String {
    match key {
        RouteKey::Service {
            address: IpAddr::V4(address),
            ..
        } => address.octets()[3].to_string(),
        RouteKey::Service { address, .. } => address.to_string(),
        RouteKey::Prefix { .. } => key.to_string(),
    }
}

pub fn briefs(ops: &[Op]) -> Vec<String> {
    ops.iter().map(brief).collect()
}

/// Steps an engine by hand.
pub struct Bench {
    pub engine: Engine,
    pub now: Now,
    /// Operations that are out.
    pub out: BTreeMap<OpId, Op>,
    /// What the registry says; read when asked.
    pub registry: BTreeMap<Ifindex, RegistryRead>,
    /// Operations that were answered with yes were carried out here.
    pub kernel: kernel::Kernel,
    /// Audits that are out, in order.
    pub audits: VecDeque<(OpId, Vec<Belief>)>,
    /// Somebody else's programs before ours, by device.
    pub foreign: BTreeMap<Ifindex, Vec<String>>,
    /// What no operation has written, as long as it is there.
    pub strays: Vec<Difference>,
    /// The devices that were told of.
    pub links: BTreeMap<Ifindex, Link>,
    /// The objects in force.
    objects: BTreeMap<(bool, ObjectName), ObjectChange>,
    /// What each engine is made with.
    config: Config,
    /// Other effects, in order.
    pub effects: Vec<Effect>,
    /// What went into the engines, if it is kept.
    pub journal: Option<journal::Journal>,
}

impl Bench {
    pub fn new(features: Features) -> Self {
        Self::of(config(features))
    }

    /// A bench whose engines are made with this.
    pub fn of(config: Config) -> Self {
        Self {
            engine: Engine::new(config.clone()),
            now: Now {
                boot: Boot(0),
                wall_ms: 1_700_000_000_000,
            },
            out: BTreeMap::new(),
            registry: BTreeMap::new(),
            kernel: kernel::Kernel::default(),
            audits: VecDeque::new(),
            foreign: BTreeMap::new(),
            strays: Vec::new(),
            links: BTreeMap::new(),
            objects: BTreeMap::new(),
            config,
            effects: Vec::new(),
            journal: None,
        }
    }

    /// A bench that keeps a journal; its engine knows nothing yet.
    pub fn recorded(config: Config) -> Self {
        let mut bench = Self::of(config);
        let mut journal = journal::Journal::default();
        journal.made(&bench.engine, bench.now);
        bench.journal = Some(journal);
        bench
    }

    /// A bench that has started over nothing, with maps of this size.
    pub fn started_with(capacity: Capacity) -> Self {
        let mut bench = Self::of(Config {
            capacity,
            ..config(ALL_FEATURES)
        });
        bench.complete();
        bench.poll();
        bench
    }

    /// A bench whose start barrier has passed over nothing.
    pub fn started(features: Features) -> Self {
        let mut bench = Self::new(features);
        bench.complete();
        bench.poll();
        bench
    }

    /// Another process begins.
    fn begin(&mut self) {
        self.engine = Engine::new(self.config.clone());
        if let Some(journal) = &mut self.journal {
            journal.made(&self.engine, self.now);
        }
    }

    /// Nothing is there, and nothing is wanted: the start barrier passes.
    pub fn complete(&mut self) {
        self.give(Event::Adopted(Box::default()));
        self.give(Event::LinkDump(Vec::new()));
        self.give(Event::SourceComplete);
    }

    /// The same as [`Bench::started`], with audits.
    pub fn audited(features: Features, every: u64) -> Self {
        let mut bench = Self::of(Config {
            audit_every: every,
            ..config(features)
        });
        bench.complete();
        bench.poll();
        bench
    }

    /// Devices 5 (`hfweb`), 6 (`hfdns`) and 7 (`hfapi`) with tokens 105, 106 and 107, and their attachments `web`
    /// (with address [`SOURCE`]), `dns` and `api`, each with the label `app` of its name.
    pub fn three_devices(&mut self) {
        for (ifindex, name, number) in [(5, "hfweb", 5), (6, "hfdns", 6), (7, "hfapi", 7)] {
            let read = identity(100 + u64::from(ifindex), number);
            self.registry.insert(ifindex, read);
            self.give(Event::Link(veth(ifindex, name, number)));
        }
        let web = Attachment {
            addresses: BTreeSet::from([SOURCE]),
            ..attachment("web", "hfweb", "web")
        };
        self.give(Event::Objects(vec![
            ObjectChange::Attachment(web),
            ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
            ObjectChange::Attachment(attachment("api", "hfapi", "api")),
        ]));
    }

    pub fn give(&mut self, event: Event) {
        match &event {
            Event::Link(link) => {
                self.links.insert(link.ifindex, link.clone());
            }
            Event::LinkGone(ifindex) => {
                self.links.remove(ifindex);
            }
            Event::LinkDump(links) => {
                self.links = links.iter().map(|link| (link.ifindex, link.clone())).collect();
            }
            Event::Objects(changes) => {
                for change in changes {
                    match change {
                        ObjectChange::Policy(policy) => {
                            self.objects.insert((true, policy.name.clone()), change.clone());
                        }
                        ObjectChange::Attachment(attachment) => {
                            self.objects
                                .insert((false, attachment.name.clone()), change.clone());
                        }
                        ObjectChange::PolicyGone(name) => {
                            self.objects.remove(&(true, name.clone()));
                        }
                        ObjectChange::AttachmentGone(name) => {
                            self.objects.remove(&(false, name.clone()));
                        }
                    }
                }
            }
            _ => {}
        }
        if let Some(journal) = &mut self.journal {
            journal.handled(&event, self.now);
        }
        self.engine.handle(event, self.now);
    }

    /// The process dies; what is out was not carried out. Another one begins, and reads the pins.
    pub fn crash(&mut self) {
        let remembered = self.engine.view().remembered();
        self.begin();
        self.out.clear();
        self.audits.clear();
        let devices = self.links.keys().copied().collect();
        let adoption = self.kernel.adoption(&devices);
        self.give(Event::Adopted(Box::new(adoption)));
        self.give(Event::Remembered(remembered));
    }

    /// Gives the new life all that there is.
    pub fn wake(&mut self) {
        let links = self.links.values().cloned().collect();
        self.give(Event::LinkDump(links));
        let objects = self.objects.values().cloned().collect();
        self.give(Event::Objects(objects));
        self.give(Event::SourceComplete);
    }

    /// Polls, answers reads of the registry, and gives the operations that were sent, in order.
    pub fn poll(&mut self) -> Vec<Op> {
        let mut sent = Vec::new();
        loop {
            let mut reads = Vec::new();
            let effects = self.engine.poll(self.now);
            if let Some(journal) = &mut self.journal {
                journal.polled(&self.engine, self.now, &effects);
            }
            for effect in effects {
                match effect {
                    Effect::Kernel(id, op) => {
                        self.out.insert(id, op.clone());
                        sent.push(op);
                    }
                    Effect::ReadRegistry(ifindexes) => {
                        for ifindex in &ifindexes {
                            let read = self.registry.get(ifindex).cloned();
                            reads.push((*ifindex, read.unwrap_or(RegistryRead::Absent)));
                        }
                        self.effects.push(Effect::ReadRegistry(ifindexes));
                    }
                    Effect::Audit(id, beliefs) => self.audits.push_back((id, beliefs)),
                    other => self.effects.push(other),
                }
            }
            if reads.is_empty() {
                return sent;
            }
            self.give(Event::Registry(reads));
        }
    }

    /// Answers everything that is out with yes, then polls.
    pub fn yes(&mut self) -> Vec<Op> {
        for (id, op) in std::mem::take(&mut self.out) {
            self.kernel.carry_out(&op);
            self.give(Event::Answer(id, Ok(OpDone { writes: 1 })));
        }
        self.poll()
    }

    /// Answers yes until an operation like this is out.
    pub fn until_out(&mut self, like: impl Fn(&Op) -> bool) {
        while !self.out.values().any(&like) {
            self.yes();
        }
    }

    /// Answers yes until nothing more comes; all operations in the order in which they were sent.
    pub fn run(&mut self) -> Vec<Op> {
        let mut all = self.poll();
        while !self.out.is_empty() {
            all.extend(self.yes());
        }
        all
    }

    /// Answers yes until nothing more comes; each round as short lines.
    pub fn rounds(&mut self) -> Vec<Vec<String>> {
        let mut rounds = Vec::new();
        let mut ops = self.poll();
        while !ops.is_empty() || !self.out.is_empty() {
            assert!(rounds.len() < 50, "never at rest: {rounds:#?}");
            rounds.push(briefs(&ops));
            ops = self.yes();
        }
        rounds
    }

    /// What an audit of this finds.
    pub fn look(&self, beliefs: &[Belief]) -> Vec<Difference> {
        let devices = self.links.keys().copied().collect();
        let registry = self.registry.iter().filter_map(|(ifindex, read)| match read {
            RegistryRead::Row(identity) => Some((*ifindex, *identity)),
            RegistryRead::Absent | RegistryRead::Failed(_) => None,
        });
        let there = There {
            pins: &self.kernel.adoption(&devices),
            registry: &registry.collect(),
            foreign: &self.foreign,
        };
        let mut found: Vec<Difference> = beliefs.iter().flat_map(|belief| there.differs(belief)).collect();
        if beliefs
            .iter()
            .any(|belief| matches!(belief, Belief::Nothing { .. }))
        {
            found.extend(self.strays.clone());
        }
        found
    }

    /// Answers the audit that is out as the kernel is now, then polls. What was found, and what is sent upon it.
    pub fn audit(&mut self) -> (Vec<Difference>, Vec<Op>) {
        let (id, beliefs) = self.audits.pop_front().expect("an audit is out");
        let differences = self.look(&beliefs);
        let audited = Audited {
            differences: differences.clone(),
            unreadable: None,
        };
        self.give(Event::Audited(id, audited));
        (differences, self.poll())
    }

    /// What was logged since the last call.
    pub fn log(&mut self) -> Vec<LogLine> {
        std::mem::take(&mut self.effects)
            .into_iter()
            .filter_map(|effect| match effect {
                Effect::Log(line) => Some(line),
                _ => None,
            })
            .collect()
    }

    /// Answers the one operation that is like this.
    pub fn answer(&mut self, like: impl Fn(&Op) -> bool, result: OpResult) {
        let ids: Vec<OpId> = self
            .out
            .iter()
            .filter(|(_, op)| like(op))
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(ids.len(), 1, "one operation like this among {:#?}", self.out);
        if let Some(op) = self.out.remove(&ids[0])
            && result.is_ok()
        {
            self.kernel.carry_out(&op);
        }
        self.give(Event::Answer(ids[0], result));
    }

    /// Lets time pass, polling at every deadline.
    pub fn pass(&mut self, nanos: u64) -> Vec<Op> {
        let end = self.now.boot.plus(nanos);
        let mut sent = Vec::new();
        while let Some(due) = self.engine.next_deadline().filter(|due| *due <= end) {
            self.go_to(due);
            self.give(Event::Tick);
            sent.extend(self.poll());
        }
        self.go_to(end);
        sent
    }

    pub fn go_to(&mut self, moment: Boot) {
        let step = moment.since(self.now.boot);
        self.now.boot = self.now.boot.plus(step);
        self.now.wall_ms += i64::try_from(step / Boot::MILLI).unwrap();
    }

    pub fn policy(&self, name: &str) -> PolicyView {
        self.engine.view().policy(&named(name)).unwrap()
    }

    pub fn intents(&self, policy: &str) -> Vec<IntentView> {
        self.engine.view().intents_of(&named(policy)).collect()
    }

    pub fn state(&self, policy: &str, consumer: &str) -> State {
        self.intents(policy)
            .into_iter()
            .find(|intent| intent.consumer == named(consumer))
            .unwrap()
            .state
    }

    /// A policy `dns` of consumer `web` (interface 5) and producer `dns` (interface 6), programmed.
    pub fn programmed(features: Features) -> Self {
        let mut bench = Self::started(features);
        bench.program();
        bench
    }

    /// Lets that policy, with consumer and producer, come now.
    pub fn program(&mut self) {
        self.registry.insert(5, identity(105, 5));
        self.registry.insert(6, identity(106, 6));
        self.give(Event::Link(veth(5, "hfweb", 5)));
        self.give(Event::Link(veth(6, "hfdns", 6)));
        self.give(Event::Objects(vec![
            ObjectChange::Attachment(attachment("web", "hfweb", "web")),
            ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
            ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
        ]));
        self.run();
        assert_eq!(self.state("dns", "web"), State::Programmed);
    }
}
