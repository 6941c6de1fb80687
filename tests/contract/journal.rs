//! A long life of the engine, kept as it was recorded: the same inputs give the same decisions, for ever.
//!
//! `golden/long.journal` is a journal of more than 100,000 inputs with a crash in it; `golden/long.decisions` has one
//! byte for each line that a replay of it prints, and the SHA-256 of all of them. `HOLDFAST_BLESS=1` lives such a life
//! anew, over the data path in memory, and writes both: a change there is a change of what the engine decides.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use holdfast::api::hash::{self, sha256};
use holdfast::datapath::{Datapath, Kernel, Sizes, fake::Fake};
use holdfast::journal::{Encoder, replay, text, write_segment};
use holdfast_engine::Engine;
use holdfast_engine::model::{
    Attachment, Boot, Capacity, Config, Delivery, Destination, Device, Effect, Event, Identity, Ifindex,
    Link, LinkKind, Mac, Now, ObjectChange, ObjectName, OnDeadline, Op, OpError, OpId, OpResult, Policy,
    PolicySpec, Protocol, Remembered, Selector, Switchover, Token, Uid, WhileHeld,
};

/// At least so many inputs.
const INPUTS: u64 = 100_000;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("contract/golden")
        .join(name)
}

pub(crate) fn a_long_journal_gives_the_same_decisions() -> anyhow::Result<()> {
    let journal = path("long.journal");
    let blessing = std::env::var_os("HOLDFAST_BLESS").is_some();
    let lived = if blessing { Some(live(&journal)?) } else { None };
    let mut lines = Vec::new();
    let found = replay(&journal, hash::hashes(), |line| {
        lines.push(line.to_owned());
        Ok(())
    })?;
    ensure!(found.events >= INPUTS, "{} events", found.events);
    ensure!(found.lives == 2, "{} lives", found.lives);
    ensure!(
        (found.missing, found.torn, found.differing) == (0, 0, 0),
        "{found:?}"
    );
    if let Some(lived) = lived {
        let decisions = lines.iter().filter(|line| !line.starts_with('#'));
        ensure!(
            decisions.eq(&lived),
            "the replay decides otherwise than the life did"
        );
    }
    let hashes: Vec<u8> = lines.iter().map(|line| sha256(line.as_bytes())[0]).collect();
    let all = sha256(lines.join("\n").as_bytes());
    let text = [&all[..], &hashes].concat();
    let decisions = path("long.decisions");
    if blessing {
        return std::fs::write(&decisions, text).context("cannot write the decisions");
    }
    let expected =
        std::fs::read(&decisions).with_context(|| format!("cannot read {}", decisions.display()))?;
    let (sum, expected) = expected
        .split_at_checked(32)
        .context("the decisions are too short")?;
    let first = (0..hashes.len().max(expected.len())).find(|at| hashes.get(*at) != expected.get(*at));
    if let Some(at) = first {
        let from = at.saturating_sub(3);
        let before = lines.get(from..at).unwrap_or_default().join("\n  ");
        let now = lines.get(at).map_or("(nothing more)", String::as_str);
        anyhow::bail!(
            "the engine decides otherwise from line {} on; after\n  {before}\nit is now\n+ {now}\n\
             if that is meant: HOLDFAST_BLESS=1 cargo test -p holdfast-tests --test contract",
            at + 1
        );
    }
    ensure!(
        sum == all,
        "the decisions are others, in a line whose first byte of SHA-256 is the same"
    );
    Ok(())
}

// --- a life --------------------------------------------------------------------------------------------------

/// Random numbers (splitmix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

struct World {
    dice: Dice,
    fake: Fake,
    engine: Engine,
    encoder: Encoder,
    batches: Vec<Vec<u8>>,
    decided: Vec<String>,
    now: Now,
    events: u64,
    /// Answers and other news that come with one of the next batches.
    coming: Vec<Event>,
    links: BTreeMap<Ifindex, Link>,
    identities: BTreeMap<Ifindex, Identity>,
    policies: BTreeMap<u64, Policy>,
    next_ifindex: Ifindex,
    next_token: u64,
}

/// Workloads: the last three are producers.
const WORKLOADS: u64 = 12;
const PRODUCERS: u64 = 3;

fn engine() -> Engine {
    Engine::new(Config {
        capacity: Capacity {
            policies: 64,
            slots: 65_536,
            backends: 1_024,
        },
        features: Kernel::FEATURES,
        neighbour_only: false,
        hashes: hash::hashes(),
        audit_every: 0,
    })
}

fn name(text: String) -> ObjectName {
    ObjectName {
        namespace: "s".to_owned(),
        name: text,
    }
}

fn role(workload: u64) -> String {
    if workload >= WORKLOADS - PRODUCERS {
        "p".to_owned()
    } else {
        (workload % 3).to_string()
    }
}

fn attachment(workload: u64) -> ObjectChange {
    let uid = Uid(format!("a{workload}"));
    ObjectChange::Attachment(Attachment {
        name: name(format!("w{workload}")),
        generation: 1,
        created_ms: 0,
        interface: format!("w{workload}"),
        expected: None,
        addresses: [std::net::IpAddr::from([10, 0, 0, workload as u8 + 1])].into(),
        labels: [("app".to_owned(), role(workload))].into(),
        covers: hash::covers(&uid, 1),
        uid,
    })
}

fn policy(number: u64, generation: u64, destinations: u64) -> Policy {
    let selector = |value: String| Selector {
        match_labels: [("app".to_owned(), value)].into(),
        match_expressions: Vec::new(),
    };
    let service = |at: u64| Destination::Service {
        address: std::net::IpAddr::from([10, 96, number as u8 % 5, at as u8]),
        protocol: Protocol::Udp,
        port: 53,
        target_port: None,
    };
    Policy {
        name: name(format!("p{number}")),
        uid: Uid(format!("p{number}")),
        generation,
        created_ms: number as i64,
        origin: None,
        content: Ok(PolicySpec {
            consumers: selector((number % 3).to_string()),
            producers: selector("p".to_owned()),
            destinations: (0..destinations).map(service).collect(),
            delivery: Delivery::Direct,
            while_held: WhileHeld::Drop,
            switchover: Switchover {
                deadline: 30 * Boot::SECOND,
                on_deadline: OnDeadline::KeepOld,
                drain: 5 * Boot::SECOND,
            },
            max_staleness: None,
        }),
    }
}

/// Lives a life of so many inputs with a crash in the middle, and says what was decided in it.
fn live(journal: &Path) -> anyhow::Result<Vec<String>> {
    let mut world = World::new();
    world.begin(Vec::new())?;
    while world.events < INPUTS / 2 {
        world.step()?;
    }
    // In the middle of a batch: what was handled last was never polled, and what was out is not answered.
    world.something_happens()?;
    let remembered = world.engine.view().remembered();
    world.coming.clear();
    world.batches.push(world.encoder.take().0);
    world.engine = engine();
    world.begin(remembered)?;
    while world.events < INPUTS + 100 {
        world.step()?;
    }
    write_segment(journal, world.batches)?;
    Ok(world.decided)
}

impl World {
    fn new() -> Self {
        Self {
            dice: Dice(1),
            fake: Fake::new(Sizes::default()),
            engine: engine(),
            encoder: Encoder::new(usize::MAX),
            batches: Vec::new(),
            decided: Vec::new(),
            now: Now {
                boot: Boot(60 * Boot::SECOND),
                wall_ms: 1_700_000_000_000,
            },
            events: 0,
            coming: Vec::new(),
            links: BTreeMap::new(),
            identities: BTreeMap::new(),
            policies: BTreeMap::new(),
            next_ifindex: 2,
            next_token: 1,
        }
    }

    /// A life begins: all that there is is told.
    fn begin(&mut self, remembered: Vec<Remembered>) -> anyhow::Result<()> {
        self.encoder
            .made(&self.engine, self.now)
            .ok()
            .context("too large")?;
        let adoption = self.fake.adopt()?;
        let objects = (0..WORKLOADS).map(attachment);
        let policies = self.policies.values().cloned().map(ObjectChange::Policy);
        let objects = objects.chain(policies).collect();
        for event in [
            Event::Adopted(Box::new(adoption)),
            Event::Remembered(remembered),
            Event::LinkDump(self.links.values().cloned().collect()),
            Event::Locals(BTreeSet::new()),
            Event::Objects(objects),
            Event::SourceComplete,
        ] {
            self.handle(event)?;
        }
        self.poll()
    }

    fn handle(&mut self, event: Event) -> anyhow::Result<()> {
        self.events += 1;
        self.encoder.handled(&event, self.now).ok().context("too large")?;
        self.engine.handle(event, self.now);
        Ok(())
    }

    fn poll(&mut self) -> anyhow::Result<()> {
        self.encoder.polled(self.now).ok().context("too large")?;
        let effects = self.engine.poll(self.now);
        self.batches.push(self.encoder.take().0);
        for effect in effects {
            self.decided
                .push(format!("{} {}", text::moment(self.now), text::effect(&effect)));
            match effect {
                Effect::Kernel(id, op) => self.carry_out(id, &op),
                Effect::ReadRegistry(ifindexes) => {
                    let reads = self.fake.read_registry(&ifindexes);
                    self.coming.push(Event::Registry(reads));
                }
                Effect::AskLink(ifindex) => {
                    let link = self.links.get(&ifindex).cloned();
                    self.coming
                        .push(link.map_or(Event::LinkGone(ifindex), Event::Link));
                }
                Effect::Report(_)
                | Effect::Measured(..)
                | Effect::Log(_)
                | Effect::Audit(..)
                | Effect::DumpLinks => {}
            }
        }
        Ok(())
    }

    /// One in a hundred is refused.
    fn carry_out(&mut self, id: OpId, op: &Op) {
        let result: OpResult = if self.dice.below(100) == 0 {
            Err(OpError::Refused {
                message: "EIO".to_owned(),
            })
        } else {
            self.fake.carry_out(op)
        };
        if let Op::DeleteIdentity { ifindex, .. } = op {
            self.identities.remove(ifindex);
        }
        self.coming.push(Event::Answer(id, result));
    }

    /// Time passes, some of what is coming comes or something happens, and the engine is polled.
    fn step(&mut self) -> anyhow::Result<()> {
        let step = match self.dice.below(40) {
            0 => Boot::SECOND * (1 + self.dice.below(4)),
            _ => 50_000,
        };
        self.now.boot = self.now.boot.plus(step);
        self.now.wall_ms += (step / Boot::MILLI) as i64;
        if self.coming.is_empty() || self.dice.below(4) == 0 {
            self.something_happens()?;
        }
        let some = self.coming.len().min(1 + self.dice.below(24) as usize);
        for event in self.coming.drain(..some).collect::<Vec<_>>() {
            self.handle(event)?;
        }
        self.poll()
    }

    fn something_happens(&mut self) -> anyhow::Result<()> {
        let workload = self.dice.below(WORKLOADS);
        let interface = format!("w{workload}");
        let link = self.links.values().find(|link| link.name == interface).cloned();
        match (self.dice.below(24), link) {
            (0..10, None) => self.create(interface),
            (0, Some(link)) => {
                self.links.remove(&link.ifindex);
                self.identities.remove(&link.ifindex);
                self.fake.remove_device(link.ifindex);
                self.handle(Event::LinkGone(link.ifindex))
            }
            (1..4, Some(link)) => {
                let link = Link {
                    carrier: !link.carrier,
                    ..link
                };
                self.links.insert(link.ifindex, link.clone());
                self.handle(Event::Link(link))
            }
            (4..10, Some(link)) => self.register(&link),
            (10, _) => self.edit(),
            (12, _) if self.dice.below(8) == 0 => {
                let dump = self.links.values().cloned().collect();
                self.handle(Event::LinkDump(dump))
            }
            (_, link) => match link {
                Some(link) if self.identities.contains_key(&link.ifindex) => {
                    self.handle(Event::Poke(link.ifindex))
                }
                _ => self.handle(Event::Tick),
            },
        }
    }

    fn create(&mut self, interface: String) -> anyhow::Result<()> {
        let ifindex = self.next_ifindex;
        self.next_ifindex = 2 + (self.next_ifindex - 1) % 100;
        if self.links.contains_key(&ifindex) {
            return Ok(());
        }
        let mac = Mac([2, 0, 0, 0, self.dice.below(256) as u8, ifindex as u8]);
        let link = Link {
            ifindex,
            name: interface,
            mac,
            up: true,
            carrier: true,
            kind: LinkKind::Veth { peer_elsewhere: true },
            master: None,
            mtu: 1500,
            ipv6: true,
        };
        self.fake.add_device(Device { ifindex, mac });
        self.links.insert(ifindex, link.clone());
        self.handle(Event::Link(link))
    }

    fn register(&mut self, link: &Link) -> anyhow::Result<()> {
        self.next_token += 1;
        let identity = Identity {
            token: Token::new(self.next_token).context("a token is 0")?,
            mac: Mac::default(),
            host_mac: link.mac,
            host_mac_shared: false,
            incarnation: None,
        };
        self.identities.insert(link.ifindex, identity);
        self.fake.register(link.ifindex, identity);
        self.handle(Event::Poke(link.ifindex))
    }

    fn edit(&mut self) -> anyhow::Result<()> {
        let number = self.dice.below(8);
        let change = match self.policies.get(&number) {
            Some(_) if self.dice.below(3) == 0 => {
                self.policies.remove(&number);
                ObjectChange::PolicyGone(name(format!("p{number}")))
            }
            before => {
                let generation = before.map_or(1, |policy| policy.generation + 1);
                let policy = policy(number, generation, 1 + self.dice.below(3));
                self.policies.insert(number, policy.clone());
                ObjectChange::Policy(policy)
            }
        };
        self.handle(Event::Objects(vec![change]))
    }
}
