//! The world around one engine: a fake kernel, a source of objects, a link monitor, three workers, a clock; and what
//! an action does to them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use holdfast_engine::Engine;
use holdfast_engine::belief::{Belief, Drift};
use holdfast_engine::model::{
    Attachment, BackendId, Boot, Capacity, Config, Covers, Effect, Event, FailReason, Features, Hashes,
    Identity, Ifindex, Link, LinkKind, Mac, NameHash, Now, ObjectChange, ObjectName, Op, OpError, OpId,
    Policy, PolicySpec, Refusal, RegistryRead, Remembered, Selected, State, Token, Uid, UidHash,
};

use crate::coverage::{Coverage, End, EventKind, Stage};
use crate::kernel::{Dev, Kernel, OpKind, Outcome, ifindex_of, link};
use crate::oracle::{Checked, Oracle, Reading, Violation, ensure};
use crate::script::{
    Action, Addresses, ExpectedState, SECOND, Setup, Spec, Tamper, WorldLane, incarnation, object_name,
    own_address, selector,
};

/// An engine that has to be given up: it did something that no engine does.
const NO_PANIC: &str = "the engine never panics";

/// What a worker has to do.
#[derive(Clone, Debug)]
enum Job {
    Op(OpId, Op),
    /// Rows to read, and which device each number stood for when they were asked for.
    Read(BTreeSet<Ifindex>, BTreeMap<Ifindex, u64>),
    Audit(OpId, Vec<Belief>),
}

impl Job {
    const fn kind(&self) -> OpKind {
        match self {
            Self::Op(_, op) => OpKind::of(op),
            Self::Read(..) => OpKind::ReadRegistry,
            Self::Audit(..) => OpKind::Audit,
        }
    }
}

/// What a worker has done.
#[derive(Clone, Debug)]
struct Answer {
    event: Event,
    asked: BTreeMap<Ifindex, u64>,
    kind: OpKind,
}

#[derive(Clone, Debug, Default)]
struct Worker {
    jobs: VecDeque<Job>,
    answers: VecDeque<Answer>,
    hangs: bool,
}

/// What the link monitor has to tell.
#[derive(Clone, Debug)]
enum LinkNews {
    Present(Link),
    Gone(Ifindex),
    Dump(Vec<Link>),
    Locals(BTreeSet<IpAddr>),
    Drifted(BTreeSet<Ifindex>),
    Hooks(Option<Ifindex>),
}

/// What the source has to tell.
#[derive(Clone, Debug)]
enum SourceNews {
    Change(Box<ObjectChange>),
    SavedComplete,
    Complete,
}

/// All objects that there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Objects {
    pub(crate) policies: BTreeMap<ObjectName, Policy>,
    pub(crate) attachments: BTreeMap<ObjectName, Attachment>,
}

impl Objects {
    fn changes(&self, policies_first: bool) -> Vec<ObjectChange> {
        let policies = self.policies.values().cloned().map(ObjectChange::Policy);
        let attachments = self.attachments.values().cloned().map(ObjectChange::Attachment);
        if policies_first {
            policies.chain(attachments).collect()
        } else {
            attachments.chain(policies).collect()
        }
    }
}

/// What happened since the world was last at rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SinceRest {
    /// The number of changes in the kernel then; none if it has not been at rest.
    changes: Option<u64>,
    /// Nothing happened that means anything.
    nothing: bool,
}

/// Sees what goes into engines, and what comes out. (What it makes of that is not for every suite that has a world.)
pub(crate) trait Witness: std::fmt::Debug + Send {
    /// A life begins.
    fn made(&mut self, engine: &Engine, now: Now);
    /// This is going to be handled.
    fn handled(&mut self, event: &Event, now: Now);
    /// The engine was polled.
    fn polled(&mut self, engine: &Engine, now: Now, effects: &[Effect]);
}

/// All of it.
#[derive(Debug)]
pub(crate) struct World {
    setup: Setup,
    pub(crate) now: Now,
    pub(crate) kernel: Kernel,
    pub(crate) objects: Objects,
    saved_objects: Objects,
    saved_times: Vec<Remembered>,
    pub(crate) engine: Option<Engine>,
    links: VecDeque<LinkNews>,
    source: VecDeque<SourceNews>,
    pokes: VecDeque<Ifindex>,
    asks: VecDeque<Ifindex>,
    /// Devices of which answers to questions wait to be told.
    answers: BTreeSet<Ifindex>,
    /// A dump of all devices is to be compared with what was told.
    checking: bool,
    workers: [Worker; 4],
    pub(crate) oracle: Oracle,
    /// The node's own addresses.
    pub(crate) own: BTreeSet<IpAddr>,
    counter: u64,
    next_ifindex: Ifindex,
    /// Something was handled since the last poll.
    handled: bool,
    since_rest: SinceRest,
    /// Events handled.
    pub(crate) steps: u64,
    /// Effects, as text, for the comparison of two runs.
    pub(crate) digest: Option<u64>,
    /// Tell what happens.
    pub(crate) verbose: bool,
    /// Who is told what goes into the engines.
    pub(crate) witness: Option<Box<dyn Witness>>,
}

/// How often the kernel is compared with what is believed of it.
const AUDIT_EVERY: u64 = 30 * SECOND;

pub(crate) fn config(setup: &Setup) -> Config {
    Config {
        capacity: Capacity {
            policies: setup.policies,
            slots: setup.slots,
            backends: setup.backends,
        },
        features: Features {
            prefixes: setup.prefixes,
            translate: false,
            several_producers: setup.several_producers,
            neighbour_delivery: true,
            max_staleness: false,
        },
        neighbour_only: false,
        // Where there are none, silent changes are told of by hand.
        audit_every: if setup.audits { AUDIT_EVERY } else { 0 },
        hashes: Hashes {
            name: |name| NameHash(fnv(name.to_string().as_bytes()) | 1),
            uid: |uid| {
                let mut hash = [0; 16];
                hash[..4].copy_from_slice(&crate::rules::number(uid).to_be_bytes());
                hash[15] = 1;
                UidHash(hash)
            },
        },
    }
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Takes text and keeps its hash.
struct Hasher(u64);

impl Write for Hasher {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 = text.bytes().fold(self.0, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Ok(())
    }
}

/// Interfaces of this world, `hf0` and so on, have numbers too.
fn number_in(name: &str) -> u8 {
    name.bytes()
        .rev()
        .find(u8::is_ascii_digit)
        .map_or(0, |digit| digit - b'0')
}

impl World {
    pub(crate) fn new(setup: Setup) -> Self {
        let config = config(&setup);
        let oracle = Oracle::new(config.features, setup);
        Self {
            kernel: Kernel::new(setup),
            setup,
            now: Now {
                boot: Boot(100 * SECOND),
                wall_ms: 1_700_000_000_000,
            },
            objects: Objects::default(),
            saved_objects: Objects::default(),
            saved_times: Vec::new(),
            engine: None,
            links: VecDeque::new(),
            source: VecDeque::new(),
            pokes: VecDeque::new(),
            asks: VecDeque::new(),
            answers: BTreeSet::new(),
            checking: false,
            workers: Default::default(),
            oracle,
            own: BTreeSet::from([own_address(0)]),
            counter: 0,
            next_ifindex: 10,
            handled: false,
            since_rest: SinceRest::default(),
            steps: 0,
            digest: None,
            verbose: false,
            witness: None,
        }
    }

    fn count(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn worker(&mut self, lane: WorldLane) -> &mut Worker {
        &mut self.workers[lane as usize]
    }

    pub(crate) const fn is_up(&self) -> bool {
        self.engine.is_some()
    }

    /// How much waits in each queue: for the generator.
    pub(crate) fn waiting(&self) -> Waiting {
        let worker = |lane: WorldLane| &self.workers[lane as usize];
        Waiting {
            links: self.links.len(),
            source: self.source.len(),
            pokes: self.pokes.len(),
            asks: self.asks.len(),
            checking: self.checking,
            fronts: WorldLane::ALL.map(|lane| {
                let front = worker(lane).jobs.front().filter(|_| !worker(lane).hangs);
                front.map(Job::kind)
            }),
            jobs: WorldLane::ALL.map(|lane| {
                if worker(lane).hangs {
                    0
                } else {
                    worker(lane).jobs.len()
                }
            }),
            answers: WorldLane::ALL.map(|lane| worker(lane).answers.len()),
            handled: self.handled,
        }
    }

    // --- the agent's side ----------------------------------------------------------------------------------

    fn say(&self, what: impl FnOnce() -> String) {
        if self.verbose {
            eprintln!("[{:>10.6}] {}", self.now.boot.0 as f64 / 1e9, what());
        }
    }

    fn handle(&mut self, event: Event, asked: &BTreeMap<Ifindex, u64>) -> Checked {
        let Some(engine) = &mut self.engine else {
            return Ok(());
        };
        self.steps += 1;
        self.handled = true;
        let mut op = None;
        let mut asked = asked.clone();
        if let Event::Answer(id, result) = &event
            && let Some(sent) = self.oracle.flights.get(id).map(|flight| flight.sent)
        {
            let flight = self.oracle.answered(*id, result, &self.kernel);
            if let Some(flight) = flight {
                asked = flight.device;
                op = Some(flight.op);
            }
            let late = self.now.boot.since(sent) >= 10 * SECOND;
            if let (Some(op), true) = (&op, late) {
                self.oracle.coverage.end(OpKind::of(op), End::Late);
            }
        }
        for kind in kinds(&event) {
            concerned(&mut self.oracle, &event, op.as_ref(), kind);
        }
        if self.verbose {
            eprintln!("[{:>10.6}]   <- {event:?}", self.now.boot.0 as f64 / 1e9);
        }
        self.oracle.told.take(&event, op.as_ref(), &asked);
        let now = self.now;
        if let Some(witness) = &mut self.witness {
            witness.handled(&event, now);
        }
        catch_unwind(AssertUnwindSafe(|| engine.handle(event, now))).map_err(panicked)
    }

    fn poll(&mut self) -> Checked {
        let Some(engine) = &mut self.engine else {
            return Ok(());
        };
        let due = engine
            .next_deadline()
            .is_some_and(|deadline| deadline <= self.now.boot);
        let now = self.now;
        self.oracle.give_up(&self.kernel, now);
        self.oracle.told.judge_barrier();
        let effects = catch_unwind(AssertUnwindSafe(|| engine.poll(now))).map_err(panicked)?;
        if let Some(witness) = &mut self.witness {
            witness.polled(engine, now, &effects);
        }
        ensure!(
            self.handled || due || effects.is_empty(),
            "DESIGN 2.18: own doings are no news",
            "nothing happened and nothing was due, and {effects:?}"
        );
        self.handled = false;
        self.oracle.refresh();
        if let Some(digest) = &mut self.digest {
            let mut hasher = Hasher(*digest);
            let _ = write!(hasher, "{now:?} {effects:?}");
            *digest = hasher.0;
        }
        for effect in &effects {
            if self.verbose && !matches!(effect, Effect::Measured(..)) {
                eprintln!("[{:>10.6}]   -> {effect:?}", now.boot.0 as f64 / 1e9);
            }
            self.take(effect)?;
        }
        let Some(engine) = &self.engine else { return Ok(()) };
        self.oracle.polled(engine, &effects, &self.kernel, now)
    }

    fn take(&mut self, effect: &Effect) -> Checked {
        match effect {
            Effect::Kernel(id, op) => {
                self.oracle.sent(*id, op, &self.kernel, self.now)?;
                let lane = WorldLane::of(op.lane());
                self.worker(lane).jobs.push_back(Job::Op(*id, op.clone()));
            }
            Effect::ReadRegistry(ifindexes) => {
                let since = self.now.boot;
                let told = &self.oracle.told;
                let devices: BTreeMap<Ifindex, u64> = ifindexes
                    .iter()
                    .map(|ifindex| (*ifindex, told.devices.get(ifindex).copied().unwrap_or(0)))
                    .collect();
                for (ifindex, device) in &devices {
                    let out = self.oracle.reading.entry(*ifindex).or_default();
                    out.push_back(Reading {
                        since,
                        device: *device,
                    });
                }
                self.worker(WorldLane::Write)
                    .jobs
                    .push_back(Job::Read(ifindexes.clone(), devices));
            }
            Effect::AskLink(ifindex) => self.asks.push_back(*ifindex),
            Effect::Audit(..) | Effect::DumpLinks if !self.setup.audits => {
                ensure!(false, "no audits where none are asked for", "{effect:?}");
            }
            Effect::Audit(id, beliefs) => {
                let jobs = &mut self.worker(WorldLane::Audit).jobs;
                ensure!(
                    jobs.is_empty(),
                    "ENGINE 29: one question of an audit at a time",
                    "{id:?} while {jobs:?} is out"
                );
                jobs.push_back(Job::Audit(*id, beliefs.clone()));
            }
            Effect::DumpLinks => self.checking = true,
            Effect::Report(_) | Effect::Measured(..) | Effect::Log(_) => {}
        }
        Ok(())
    }

    fn tell_link(&mut self, skip: bool, twice: bool) -> Checked {
        let Some(news) = self.links.pop_front() else {
            return Ok(());
        };
        let ifindex = match &news {
            LinkNews::Present(link) => Some(link.ifindex),
            LinkNews::Gone(ifindex) => Some(*ifindex),
            LinkNews::Dump(_) | LinkNews::Locals(_) | LinkNews::Drifted(_) | LinkNews::Hooks(_) => None,
        };
        let newer = self.links.iter().any(|news| match news {
            LinkNews::Present(link) => Some(link.ifindex) == ifindex,
            LinkNews::Gone(gone) => Some(*gone) == ifindex,
            LinkNews::Dump(_) => true,
            LinkNews::Locals(_) | LinkNews::Drifted(_) | LinkNews::Hooks(_) => false,
        });
        if let Some(ifindex) = ifindex.filter(|_| !newer) {
            self.answers.remove(&ifindex);
        }
        if skip && newer && ifindex.is_some() {
            return Ok(());
        }
        let event = match news {
            LinkNews::Present(link) => Event::Link(link),
            LinkNews::Gone(ifindex) => Event::LinkGone(ifindex),
            LinkNews::Dump(links) => Event::LinkDump(links),
            LinkNews::Locals(addresses) => Event::Locals(addresses),
            LinkNews::Drifted(devices) => {
                self.oracle.coverage.drift(Drift::Device);
                Event::DevicesDrifted(devices)
            }
            LinkNews::Hooks(Some(ifindex)) => Event::HooksChanged(BTreeSet::from([ifindex])),
            LinkNews::Hooks(None) => Event::HooksUnknown,
        };
        if twice {
            self.handle(event.clone(), &BTreeMap::new())?;
        }
        self.handle(event, &BTreeMap::new())
    }

    fn tell_objects(&mut self, count: u8) -> Checked {
        let mut changes = Vec::new();
        for _ in 0..count.max(1) {
            match self.source.front() {
                Some(SourceNews::Change(_)) => {
                    if let Some(SourceNews::Change(change)) = self.source.pop_front() {
                        changes.push(*change);
                    }
                }
                _ => break,
            }
        }
        if !changes.is_empty() {
            return self.handle(Event::Objects(changes), &BTreeMap::new());
        }
        match self.source.pop_front() {
            Some(SourceNews::SavedComplete) => self.handle(Event::SavedComplete, &BTreeMap::new()),
            Some(SourceNews::Complete) => self.handle(Event::SourceComplete, &BTreeMap::new()),
            _ => Ok(()),
        }
    }

    fn tell_poke(&mut self) -> Checked {
        match self.pokes.pop_front() {
            Some(ifindex) => self.handle(Event::Poke(ifindex), &BTreeMap::new()),
            None => Ok(()),
        }
    }

    fn tell_answer(&mut self, lane: WorldLane) -> Checked {
        let Some(answer) = self.worker(lane).answers.pop_front() else {
            return Ok(());
        };
        if let Event::Registry(reads) = &answer.event {
            let mut late = false;
            for (ifindex, _) in reads {
                self.oracle.just_read.insert(*ifindex);
                if let Some(out) = self.oracle.reading.get_mut(ifindex) {
                    let read = out.pop_front();
                    late |= read.is_some_and(|read| self.now.boot.since(read.since) >= 10 * SECOND);
                    if out.is_empty() {
                        self.oracle.reading.remove(ifindex);
                    }
                }
            }
            if late {
                self.oracle.coverage.end(OpKind::ReadRegistry, End::Late);
            }
        }
        if let Event::Audited(_, audited) = &answer.event {
            for difference in &audited.differences {
                self.oracle.coverage.drift(difference.kind());
            }
        }
        self.handle(answer.event, &answer.asked)
    }

    fn answer_ask(&mut self) -> Checked {
        let Some(ifindex) = self.asks.pop_front() else {
            return Ok(());
        };
        let (news, end) = match self.kernel.devices.get(&ifindex) {
            Some(dev) => (LinkNews::Present(dev.link.clone()), End::Done),
            None => (LinkNews::Gone(ifindex), End::Error),
        };
        self.oracle.coverage.end(OpKind::AskLink, end);
        self.links.push_back(news);
        self.answers.insert(ifindex);
        Ok(())
    }

    /// All devices are compared with what was told of them, or is about to be.
    fn check_links(&mut self) {
        if !std::mem::take(&mut self.checking) {
            return;
        }
        self.oracle.coverage.end(OpKind::DumpLinks, End::Done);
        let mut known = self.oracle.told.links.clone();
        for news in &self.links {
            match news {
                LinkNews::Present(link) => drop(known.insert(link.ifindex, link.clone())),
                LinkNews::Gone(ifindex) => drop(known.remove(ifindex)),
                LinkNews::Dump(links) => {
                    known = links.iter().map(|link| (link.ifindex, link.clone())).collect();
                }
                LinkNews::Locals(_) | LinkNews::Drifted(_) | LinkNews::Hooks(_) => {}
            }
        }
        let there = |ifindex: &Ifindex| self.kernel.devices.get(ifindex).map(|dev| &dev.link);
        let drifted: BTreeSet<Ifindex> = known
            .keys()
            .chain(self.kernel.devices.keys())
            .copied()
            .filter(|ifindex| known.get(ifindex) != there(ifindex))
            .collect();
        if drifted.is_empty() {
            return;
        }
        let news: Vec<LinkNews> = drifted
            .iter()
            .map(|ifindex| match there(ifindex) {
                Some(link) => LinkNews::Present(link.clone()),
                None => LinkNews::Gone(*ifindex),
            })
            .collect();
        self.links.push_back(LinkNews::Drifted(drifted));
        self.links.extend(news);
    }

    /// A worker does its next work.
    fn work(&mut self, lane: WorldLane, outcome: Outcome) -> Checked {
        if self.worker(lane).hangs {
            return Ok(());
        }
        let Some(job) = self.worker(lane).jobs.pop_front() else {
            return Ok(());
        };
        match job {
            Job::Read(ifindexes, asked) => {
                let failed = outcome != Outcome::Done;
                let reads: Vec<(Ifindex, RegistryRead)> = ifindexes
                    .iter()
                    .map(|ifindex| {
                        let read = if failed {
                            RegistryRead::Failed("EIO".into())
                        } else {
                            self.kernel.read_registry(*ifindex)
                        };
                        (*ifindex, read)
                    })
                    .collect();
                let any_failed = reads
                    .iter()
                    .any(|(_, read)| matches!(read, RegistryRead::Failed(_)));
                self.oracle.coverage.end(
                    OpKind::ReadRegistry,
                    if any_failed { End::Error } else { End::Done },
                );
                if any_failed {
                    self.mark_unreadable(&reads);
                }
                self.worker(lane).answers.push_back(Answer {
                    event: Event::Registry(reads),
                    asked,
                    kind: OpKind::ReadRegistry,
                });
            }
            Job::Audit(id, beliefs) => {
                let mut audited = self.kernel.look(&beliefs);
                if outcome != Outcome::Done {
                    audited.differences.clear();
                    audited.unreadable = Some("EIO".into());
                }
                let unreadable = audited.unreadable.is_some();
                let end = if unreadable { End::Error } else { End::Done };
                self.oracle.coverage.end(OpKind::Audit, end);
                self.worker(lane).answers.push_back(Answer {
                    event: Event::Audited(id, audited),
                    asked: BTreeMap::new(),
                    kind: OpKind::Audit,
                });
            }
            Job::Op(id, op) => {
                let result = self.execute(id, &op, outcome)?;
                let kind = OpKind::of(&op);
                self.oracle
                    .coverage
                    .end(kind, if result.is_ok() { End::Done } else { End::Error });
                self.worker(lane).answers.push_back(Answer {
                    event: Event::Answer(id, result),
                    asked: BTreeMap::new(),
                    kind,
                });
            }
        }
        Ok(())
    }

    /// What cannot be read may be reported as such until the world has been at rest.
    fn mark_unreadable(&mut self, reads: &[(Ifindex, RegistryRead)]) {
        for (ifindex, read) in reads {
            if matches!(read, RegistryRead::Failed(_)) {
                self.oracle.trouble.unreadable(*ifindex, &self.kernel);
            }
        }
    }

    fn execute(
        &mut self,
        id: OpId,
        op: &Op,
        outcome: Outcome,
    ) -> Result<Result<holdfast_engine::model::OpDone, OpError>, Violation> {
        if self.verbose {
            eprintln!(
                "[{:>10.6}]   ** {id:?} {op:?} {outcome:?}",
                self.now.boot.0 as f64 / 1e9
            );
        }
        self.oracle.refresh();
        if self.oracle.fates_are_old() {
            self.oracle.world_changed(&mut self.kernel);
        }
        self.oracle.before(op, &self.kernel, self.now)?;
        let selection = |kernel: &Kernel| match op {
            Op::WritePolicy { slot, .. } => {
                let selected = kernel
                    .policies
                    .get(slot)
                    .map(|policy| policy.selected)
                    .unwrap_or_default();
                Some((selected, kernel.members(selected)))
            }
            _ => None,
        };
        let selected = selection(&self.kernel);
        let writes = self.kernel.changes;
        let result = self.kernel.carry_out(op, outcome);
        if result.is_ok() && outcome == Outcome::Done {
            let changed = self.kernel.changes - writes;
            ensure!(
                result
                    .as_ref()
                    .is_ok_and(|done| u64::from(done.writes) == changed),
                "the fake kernel counts its writes",
                "{result:?}"
            );
        }
        if let (Some((before, members)), Some((after, now_members))) = (selected, selection(&self.kernel)) {
            self.stages(op, before, &members, after);
            self.oracle
                .deselected((before, &members), (after, &now_members), self.now);
        }
        if let Some(flight) = self.oracle.flights.get(&id).cloned() {
            self.oracle.after(&flight, &result, &mut self.kernel, self.now)?;
            self.grants_and_drains(op);
        }
        Ok(result)
    }

    fn stages(&mut self, op: &Op, before: Selected, members: &[BackendId], after: Selected) {
        let Op::WritePolicy {
            value: Some(value), ..
        } = op
        else {
            return;
        };
        let coverage = &mut self.oracle.coverage;
        match (before.length, after.length) {
            (0, 0) => {}
            (0, _) if value.selected.generation <= 1 => coverage.stage(Stage::First),
            (0, _) => coverage.stage(Stage::Refilled),
            (_, 0) => coverage.stage(Stage::Emptied),
            _ if before != after && !members.is_empty() => coverage.stage(Stage::Switched),
            _ => {}
        }
    }

    fn grants_and_drains(&mut self, op: &Op) {
        match op {
            Op::WriteEntries { ifindex, entries } => {
                let open = self
                    .kernel
                    .rows
                    .get(ifindex)
                    .is_some_and(|row| row.token.is_some());
                if open && entries.values().any(|entry| entry.open) {
                    self.oracle.coverage.stage(Stage::Granted);
                }
            }
            Op::WriteBackends { backends } if backends.values().any(Option::is_none) => {
                self.oracle.coverage.stage(Stage::Drained);
            }
            _ => {}
        }
    }

    fn start(&mut self, policies_first: bool, saved: bool) -> Checked {
        if self.engine.is_some() {
            return Ok(());
        }
        self.pass(1_000);
        let engine = self.engine.insert(Engine::new(config(&self.setup)));
        if let Some(witness) = &mut self.witness {
            witness.made(engine, self.now);
        }
        self.oracle.begin_life(&self.saved_times, &self.kernel);
        self.links.clear();
        self.source.clear();
        self.pokes.clear();
        self.asks.clear();
        self.answers.clear();
        self.checking = false;
        self.workers = Default::default();
        let adoption = self.kernel.adopt();
        self.oracle.world_changed(&mut self.kernel);
        self.handle(Event::Adopted(Box::new(adoption)), &BTreeMap::new())?;
        self.handle(Event::Remembered(self.saved_times.clone()), &BTreeMap::new())?;
        self.links.push_back(LinkNews::Dump(self.kernel.links()));
        self.links.push_back(LinkNews::Locals(self.own.clone()));
        let change = |change| SourceNews::Change(Box::new(change));
        if saved {
            // What is out of date is believed until the source has spoken.
            self.since_rest.nothing &= self.saved_objects == self.objects;
            let known = self.saved_objects.changes(policies_first);
            self.source.extend(known.into_iter().map(change));
            self.source.push_back(SourceNews::SavedComplete);
            for name in self.saved_objects.policies.keys() {
                if !self.objects.policies.contains_key(name) {
                    self.source
                        .push_back(SourceNews::Change(Box::new(ObjectChange::PolicyGone(
                            name.clone(),
                        ))));
                }
            }
            for name in self.saved_objects.attachments.keys() {
                if !self.objects.attachments.contains_key(name) {
                    self.source
                        .push_back(SourceNews::Change(Box::new(ObjectChange::AttachmentGone(
                            name.clone(),
                        ))));
                }
            }
        }
        let present = self.objects.changes(policies_first);
        self.source.extend(
            present
                .into_iter()
                .map(|change| SourceNews::Change(Box::new(change))),
        );
        self.source.push_back(SourceNews::Complete);
        self.poll()
    }

    fn save(&mut self) {
        let Some(engine) = &self.engine else { return };
        self.saved_times = engine.view().remembered();
        if self.oracle.told.complete {
            self.saved_objects = Objects {
                policies: self
                    .oracle
                    .told
                    .policies
                    .iter()
                    .map(|(name, policy)| (name.clone(), policy.object.clone()))
                    .collect(),
                attachments: self.oracle.told.attachments.clone(),
            };
        }
    }

    fn crash(&mut self, done: [u8; 3]) -> Checked {
        if self.engine.is_none() {
            return Ok(());
        }
        for intent in self
            .oracle
            .view
            .intents
            .values()
            .map(|intent| intent.state)
            .collect::<Vec<State>>()
        {
            self.oracle.coverage.event(intent, EventKind::Crash);
        }
        self.crash_stages();
        for _ in &self.asks {
            self.oracle.coverage.end(OpKind::AskLink, End::CrashBefore);
        }
        if self.checking {
            self.oracle.coverage.end(OpKind::DumpLinks, End::CrashBefore);
        }
        for (lane, done) in WorldLane::ALL.into_iter().zip(done.into_iter().chain([0])) {
            let mut left = usize::from(done);
            while let Some(job) = self.worker(lane).jobs.pop_front() {
                let Job::Op(id, op) = job else {
                    self.oracle.coverage.end(job.kind(), End::CrashBefore);
                    continue;
                };
                let happens = left > 0 && !self.worker(lane).hangs;
                left = left.saturating_sub(1);
                if happens {
                    drop(self.execute(id, &op, Outcome::Done)?);
                }
                let end = if happens {
                    End::CrashAfter
                } else {
                    End::CrashBefore
                };
                self.oracle.coverage.end(OpKind::of(&op), end);
            }
            while let Some(answer) = self.worker(lane).answers.pop_front() {
                let look = matches!(answer.kind, OpKind::ReadRegistry | OpKind::Audit);
                let end = if look { End::CrashBefore } else { End::CrashAfter };
                self.oracle.coverage.end(answer.kind, end);
            }
        }
        self.engine = None;
        self.handled = false;
        self.links.clear();
        self.source.clear();
        self.pokes.clear();
        self.asks.clear();
        self.answers.clear();
        self.checking = false;
        self.workers = Default::default();
        self.oracle.flights.clear();
        Ok(())
    }

    fn crash_stages(&mut self) {
        let waiting = self
            .kernel
            .policies
            .values()
            .any(|policy| policy.waiting_since.is_some());
        let prepared = self
            .oracle
            .flights
            .values()
            .any(|flight| matches!(flight.op, Op::WriteSlots { .. } | Op::ProveSet { .. }));
        let draining = self
            .kernel
            .backends
            .values()
            .any(|backend| backend.drain_until.is_some_and(|until| until > self.now.boot));
        for (is, stage) in [
            (waiting, Stage::CrashWhileWaiting),
            (prepared, Stage::CrashWhilePrepared),
            (draining, Stage::CrashWhileDraining),
        ] {
            if is {
                self.oracle.coverage.stage(stage);
            }
        }
    }

    /// A worker hangs in its next operation and takes no other.
    fn hang(&mut self, lane: WorldLane, done: bool) -> Checked {
        if self.worker(lane).hangs {
            return Ok(());
        }
        let Some(job) = self.worker(lane).jobs.pop_front() else {
            return Ok(());
        };
        self.worker(lane).hangs = true;
        match job {
            Job::Op(id, op) => {
                if done {
                    drop(self.execute(id, &op, Outcome::Done)?);
                }
                self.oracle.coverage.end(OpKind::of(&op), End::Never);
            }
            Job::Audit(..) => self.oracle.coverage.end(OpKind::Audit, End::Never),
            Job::Read(ifindexes, _) => {
                self.oracle.trouble.devices.extend(ifindexes);
                self.oracle.coverage.end(OpKind::ReadRegistry, End::Never);
            }
        }
        if lane == WorldLane::Write {
            self.oracle.trouble.everything = true;
        }
        Ok(())
    }

    // --- devices -------------------------------------------------------------------------------------------

    fn link_changed(&mut self, news: LinkNews) {
        if self.engine.is_some() {
            self.links.push_back(news);
        }
        self.oracle.world_changed(&mut self.kernel);
    }

    fn create(&mut self, name: &str, ifindex: Option<Ifindex>, up: bool, carrier: bool, kind: LinkKind) {
        if self.kernel.named(name).is_some() || self.kernel.elsewhere.contains_key(name) {
            return;
        }
        let ifindex = ifindex.unwrap_or_else(|| {
            self.next_ifindex += 1;
            self.next_ifindex
        });
        let instance = self.count();
        let mac = self.new_mac();
        let mut link = link(ifindex, name, mac, kind);
        link.up = up;
        link.carrier = carrier && up;
        self.kernel.devices.insert(
            ifindex,
            Dev {
                instance,
                link: link.clone(),
            },
        );
        self.link_changed(LinkNews::Present(link));
    }

    fn new_mac(&mut self) -> Mac {
        let [.., a, b, c] = self.count().to_be_bytes();
        Mac([2, 0, 0, a, b, c])
    }

    fn lowest_free(&self) -> Ifindex {
        (2..)
            .find(|ifindex| !self.kernel.devices.contains_key(ifindex))
            .unwrap_or(2)
    }

    fn delete(&mut self, name: &str) -> Option<Ifindex> {
        if self.kernel.elsewhere.remove(name).is_some() {
            return None;
        }
        let ifindex = self.kernel.named(name)?.link.ifindex;
        self.kernel.devices.remove(&ifindex);
        self.kernel
            .flows
            .retain(|flow| flow.consumer != ifindex && flow.producer != ifindex);
        self.link_changed(LinkNews::Gone(ifindex));
        Some(ifindex)
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Link)) {
        let Some(dev) = self.kernel.named_mut(name) else {
            return;
        };
        let before = dev.link.clone();
        change(&mut dev.link);
        if dev.link != before {
            let link = dev.link.clone();
            self.link_changed(LinkNews::Present(link));
        }
    }

    fn register(&mut self, name: &str, identity: Option<u8>, shared: bool, poke: bool) {
        let Some(dev) = self.kernel.named(name) else {
            return;
        };
        let (ifindex, host_mac) = (dev.link.ifindex, dev.link.mac);
        self.kernel.registered.insert(ifindex, dev.instance);
        let number = self.count();
        let Some(token) = Token::new(0x7000_0000 + number) else {
            return;
        };
        let [.., a, b] = number.to_be_bytes();
        self.kernel.registry.insert(
            ifindex,
            Identity {
                token,
                mac: Mac([6, 0, 0, 0, a, b]),
                host_mac,
                host_mac_shared: shared,
                incarnation: identity.map(incarnation),
            },
        );
        self.oracle.world_changed(&mut self.kernel);
        if poke {
            self.poke(ifindex);
        }
    }

    fn poke(&mut self, ifindex: Ifindex) {
        if self.engine.is_some() {
            self.pokes.push_back(ifindex);
        }
    }

    // --- objects -------------------------------------------------------------------------------------------

    fn tell(&mut self, change: ObjectChange) {
        if self.engine.is_some() {
            self.source.push_back(SourceNews::Change(Box::new(change)));
        }
    }

    fn uid(&mut self, prefix: char) -> Uid {
        Uid(format!("{prefix}{}", self.count()))
    }

    fn put_attachment(
        &mut self,
        name: &str,
        interface: &str,
        identity: Option<u8>,
        app: &str,
        addresses: Addresses,
        fresh: bool,
    ) {
        let name = object_name(name);
        let before = self.objects.attachments.get(&name).filter(|_| !fresh).cloned();
        let (uid, generation, created_ms) = match &before {
            Some(before) => (before.uid.clone(), before.generation + 1, before.created_ms),
            None => (self.uid('a'), 1, self.now.wall_ms),
        };
        let seed = fnv(format!("{uid}/{generation}").as_bytes());
        let attachment = Attachment {
            uid,
            generation,
            created_ms,
            interface: interface.into(),
            expected: identity.map(incarnation),
            addresses: addresses.of(number_in(&name.name)),
            labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            covers: Covers {
                consumer: seed,
                producer: seed.rotate_left(17),
            },
            name: name.clone(),
        };
        let same = before.is_some_and(|before| {
            (
                &before.interface,
                &before.expected,
                &before.addresses,
                &before.labels,
            ) == (
                &attachment.interface,
                &attachment.expected,
                &attachment.addresses,
                &attachment.labels,
            )
        });
        if !same {
            self.objects.attachments.insert(name, attachment.clone());
            self.tell(ObjectChange::Attachment(attachment));
        }
    }

    fn put_policy(&mut self, name: &str, content: Content, fresh: bool, old: bool) {
        let name = object_name(name);
        let before = self.objects.policies.get(&name).filter(|_| !fresh).cloned();
        let content = match content {
            Content::Spec(spec) => Ok(*spec),
            Content::Refused(refusal) => Err(refusal),
            Content::Same => match &before {
                Some(before) => before.content.clone(),
                None => return,
            },
        };
        let (uid, generation, created_ms) = match &before {
            Some(before) => (before.uid.clone(), before.generation + 1, before.created_ms),
            None => {
                let age = if old { 1_000_000_000 } else { 0 };
                (self.uid('p'), 1, self.now.wall_ms - age)
            }
        };
        let policy = Policy {
            name: name.clone(),
            uid,
            generation,
            created_ms,
            origin: None,
            content,
        };
        self.objects.policies.insert(name, policy.clone());
        self.tell(ObjectChange::Policy(policy));
    }

    // --- time ----------------------------------------------------------------------------------------------

    fn pass(&mut self, nanos: u64) {
        let millis_before = self.now.boot.0 / Boot::MILLI;
        self.now.boot = self.now.boot.plus(nanos);
        self.now.wall_ms += (self.now.boot.0 / Boot::MILLI - millis_before) as i64;
    }

    /// Keeps the deadlines that are due.
    fn keep_deadline(&mut self) -> Checked {
        let due = self
            .engine
            .as_ref()
            .and_then(Engine::next_deadline)
            .is_some_and(|deadline| deadline <= self.now.boot);
        if due {
            self.handle(Event::Tick, &BTreeMap::new())?;
            self.poll()?;
        }
        Ok(())
    }

    fn advance(&mut self, nanos: u64, jump: bool) -> Checked {
        if self.handled {
            // The driver never sleeps over what it has handled.
            self.poll()?;
        }
        let until = self.now.boot.plus(nanos);
        if !jump {
            for _ in 0..10_000 {
                let deadline = self.engine.as_ref().and_then(Engine::next_deadline);
                let Some(deadline) = deadline.filter(|deadline| *deadline <= until) else {
                    break;
                };
                self.pass(deadline.since(self.now.boot));
                self.keep_deadline()?;
            }
        }
        self.pass(until.since(self.now.boot));
        self.keep_deadline()
    }

    /// Packets flow on every path; the program tells of tokens that are not those it was programmed for.
    fn packets_flow(&mut self) {
        if self.oracle.fates_are_old() {
            self.oracle.world_changed(&mut self.kernel);
        }
        let mismatch = |ifindex: &Ifindex, token: Option<Token>| {
            token.is_some() && self.kernel.registry.get(ifindex).map(|identity| identity.token) != token
        };
        let mut wakes: BTreeSet<Ifindex> = self
            .kernel
            .rows
            .iter()
            .filter(|(ifindex, row)| self.kernel.attached(**ifindex) && mismatch(ifindex, row.token))
            .map(|(ifindex, _)| *ifindex)
            .collect();
        let asked: BTreeSet<BackendId> = self
            .oracle
            .fates
            .values()
            .filter_map(|fate| self.kernel.policies.get(&fate.policy?))
            .flat_map(|policy| self.kernel.members(policy.selected).to_vec())
            .collect();
        wakes.extend(
            asked
                .iter()
                .filter_map(|id| self.kernel.backends.get(id))
                .filter(|backend| mismatch(&backend.ifindex, Some(backend.token)))
                .map(|backend| backend.ifindex),
        );
        for ifindex in wakes {
            self.poke(ifindex);
        }
    }

    /// Everything that waits is told, done and answered.
    fn settle(&mut self) -> Checked {
        for round in 0.. {
            ensure!(
                round < 400,
                "ENGINE, The model world: rest is reached",
                "after {round} rounds there is still something to do"
            );
            self.pass(1_000);
            let before = self.steps;
            while !self.asks.is_empty() {
                self.answer_ask()?;
            }
            self.check_links();
            while !self.links.is_empty() {
                self.tell_link(false, false)?;
            }
            while !self.source.is_empty() {
                self.tell_objects(32)?;
            }
            while !self.pokes.is_empty() {
                self.tell_poke()?;
            }
            for lane in WorldLane::ALL {
                while !self.worker(lane).answers.is_empty() {
                    self.tell_answer(lane)?;
                }
            }
            self.poll()?;
            let mut worked = false;
            for lane in WorldLane::ALL {
                let jobs = self.worker(lane).jobs.len();
                if self.worker(lane).hangs {
                    continue;
                }
                for _ in 0..jobs {
                    self.work(lane, Outcome::Done)?;
                    worked = true;
                }
            }
            self.pass(20_000);
            self.keep_deadline()?;
            if self.steps == before && !worked && self.waiting().is_nothing() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn calm(&mut self) -> Checked {
        if self.engine.is_none() {
            return Ok(());
        }
        self.settle()?;
        let hangs = self.workers.iter().any(|worker| worker.hangs);
        if hangs {
            return Ok(());
        }
        let Some(engine) = &self.engine else { return Ok(()) };
        self.oracle.world_changed(&mut self.kernel);
        self.oracle.calm(engine, &self.kernel, self.now)?;
        if let (Some(changes), true) = (self.since_rest.changes, self.since_rest.nothing)
            && self.oracle.told.passed
        {
            ensure!(
                self.kernel.changes == changes,
                "DESIGN 2.17, 2.18, ENGINE 27: what changes nothing writes nothing",
                "{} elements were written",
                self.kernel.changes - changes
            );
        }
        Ok(())
    }

    /// Faults are mended and time passes until nothing happens any more.
    fn rest(&mut self) -> Checked {
        self.mend();
        if self.workers.iter().any(|worker| worker.hangs) {
            // Its heartbeat fails, and whoever watches it starts it anew.
            self.crash([0; 3])?;
        }
        self.start(false, false)?;
        self.calm()?;
        self.time_passes(75 * SECOND)?;
        self.still_time()?;
        if !self.setup.audits {
            // An audit would find what nobody waits for.
            for ifindex in self.oracle.silent_changes(&self.kernel) {
                self.poke(ifindex);
            }
        }
        self.packets_flow();
        self.settle()?;
        self.time_passes(20 * SECOND)?;
        let Some(engine) = &self.engine else { return Ok(()) };
        self.oracle.put_right(&self.kernel);
        if self.setup.audits {
            self.kernel.stripped.clear();
        }
        self.oracle.forgive(&self.kernel);
        self.oracle.world_changed(&mut self.kernel);
        self.oracle.calm(engine, &self.kernel, self.now)?;
        self.oracle.rest(engine, &self.kernel, self.now)?;
        self.since_rest = SinceRest {
            changes: Some(self.kernel.changes),
            // What only an audit finds, a restart finds too.
            // What a policy said before it could not be used any more dies with the agent.
            nothing: self.kernel.stripped().next().is_none()
                // A new life deletes identities whose devices died unseen.
                && self.kernel.registry.keys().all(|ifindex| self.kernel.devices.contains_key(ifindex))
                && self
                    .oracle
                    .wants
                    .policies
                    .values()
                    .all(|policy| policy.refused.is_none())
                // Whose claim lost may have lost it to one that was let go live at once: flows are looked up anew.
                && self.oracle.wants.intents.values().all(|intent| !intent.must.may_be(FailReason::Conflict)),
        };
        Ok(())
    }

    /// At rest but for what nobody was told.
    fn still_time(&mut self) -> Checked {
        let Some(engine) = &self.engine else { return Ok(()) };
        if self.oracle.silent_changes(&self.kernel).is_empty() && self.oracle.tampered.is_empty() {
            self.oracle.forgive(&self.kernel);
            self.oracle.world_changed(&mut self.kernel);
            self.oracle.calm(engine, &self.kernel, self.now)?;
        }
        Ok(())
    }

    fn time_passes(&mut self, nanos: u64) -> Checked {
        let until = self.now.boot.plus(nanos);
        for _ in 0..1_000 {
            self.packets_flow();
            self.settle()?;
            let deadline = self.engine.as_ref().and_then(Engine::next_deadline);
            let Some(deadline) = deadline.filter(|deadline| *deadline <= until) else {
                self.pass(until.since(self.now.boot));
                return Ok(());
            };
            self.pass(deadline.since(self.now.boot));
            self.keep_deadline()?;
        }
        ensure!(
            false,
            "ENGINE, The model world: rest is reached",
            "more than 1,000 deadlines in {} s",
            nanos / SECOND
        );
        Ok(())
    }

    /// Nothing happens, and nothing must be done but look at those that wait for an identity, exactly when that is due.
    fn quiet(&mut self, seconds: u16) -> Checked {
        if self.since_rest.changes.is_none() || !self.since_rest.nothing {
            return Ok(());
        }
        if !self.waiting().is_nothing() || !self.oracle.told.passed || !self.oracle.told.complete {
            return Ok(());
        }
        // Those who are tried again and again are not at rest.
        if !self.oracle.trouble.is_empty() {
            return Ok(());
        }
        let contested = self
            .oracle
            .wants
            .attachments
            .values()
            .any(|judged| judged.right != crate::rules::Right::Fine);
        let until = self.now.boot.plus(u64::from(seconds) * SECOND);
        let changes = self.kernel.changes;
        let mut wakes = 0_u32;
        while let Some(deadline) = self.engine.as_ref().and_then(Engine::next_deadline) {
            if deadline > until {
                break;
            }
            wakes += 1;
            self.pass(deadline.since(self.now.boot).max(1));
            let expected = self.oracle.due_reads(self.now.boot);
            self.handle(Event::Tick, &BTreeMap::new())?;
            let now = self.now;
            let Some(engine) = &mut self.engine else {
                return Ok(());
            };
            let effects = catch_unwind(AssertUnwindSafe(|| engine.poll(now))).map_err(panicked)?;
            if let Some(witness) = &mut self.witness {
                witness.polled(engine, now, &effects);
            }
            self.handled = false;
            for effect in &effects {
                match effect {
                    Effect::ReadRegistry(reads) => {
                        let extra: Vec<_> = reads.difference(&expected).collect();
                        ensure!(
                            extra.is_empty()
                                || contested
                                || self.oracle.schedules.len() < self.held_policies(),
                            "ENGINE 19: a recheck reads what waits for an identity, when it is due",
                            "{extra:?} are read, due are {expected:?}"
                        );
                    }
                    Effect::Audit(..) | Effect::DumpLinks | Effect::Kernel(_, Op::ProveIntent(_))
                        if self.setup.audits => {}
                    Effect::Log(line) => ensure!(
                        matches!(line.what, holdfast_engine::model::Happening::Summary { .. }),
                        "DESIGN 2.6: never a line a retry",
                        "{line:?}"
                    ),
                    _ => ensure!(
                        false,
                        "ENGINE, The model world: a quiet world is not written to",
                        "{effect:?}"
                    ),
                }
                self.take(effect)?;
            }
            let Some(engine) = &self.engine else { return Ok(()) };
            self.oracle.polled(engine, &effects, &self.kernel, now)?;
            self.settle()?;
        }
        self.pass(until.since(self.now.boot));
        ensure!(
            self.kernel.changes == changes,
            "ENGINE, The model world: a quiet world is not written to",
            "{} elements were written",
            self.kernel.changes - changes
        );
        // Rechecks end at 30 s each and share whole seconds; summaries and contests are once in a while.
        let most = 8 + 2 * u32::from(seconds);
        ensure!(
            wakes <= most && (contested || self.setup.audits || self.held_policies() > 0 || wakes == 0),
            "DESIGN 7: at most one wake-up a second at rest",
            "{wakes} wake-ups in {seconds} s"
        );
        Ok(())
    }

    fn held_policies(&self) -> usize {
        self.oracle
            .view
            .policies
            .values()
            .filter(|view| view.intents.held > 0 || view.intents.failed > 0)
            .count()
    }

    fn mend(&mut self) {
        self.kernel.faults = crate::kernel::Faults::default();
        self.kernel.services_capacity = u32::MAX;
    }

    // --- actions -------------------------------------------------------------------------------------------

    /// Does one action, and everything that is due by then.
    pub(crate) fn act(&mut self, action: &Action) -> Checked {
        self.say(|| format!("{action:?}"));
        if !is_meaningless(action) {
            self.since_rest.nothing = false;
        }
        self.pass(20_000);
        self.act_on_world(action)?;
        self.keep_deadline()
    }

    fn act_on_world(&mut self, action: &Action) -> Checked {
        match action {
            Action::Create {
                interface,
                reuse,
                down,
                no_carrier,
                tap,
            } => {
                let kind = if *tap {
                    LinkKind::Tap
                } else {
                    LinkKind::Veth { peer_elsewhere: true }
                };
                let ifindex = reuse.then(|| self.lowest_free());
                self.create(interface, ifindex, !down, !no_carrier, kind);
            }
            Action::Delete { interface } => drop(self.delete(interface)),
            Action::Replace { interface } => {
                if let Some(ifindex) = self.delete(interface) {
                    self.create(
                        interface,
                        Some(ifindex),
                        true,
                        true,
                        LinkKind::Veth { peer_elsewhere: true },
                    );
                }
            }
            Action::Rename { interface, to } => {
                if self.kernel.named(to).is_none() && !self.kernel.elsewhere.contains_key(to) {
                    self.change(interface, |link| link.name.clone_from(to));
                }
            }
            Action::MoveOut { interface } => self.move_out(interface),
            Action::MoveBack { interface } => self.move_back(interface),
            Action::Up { interface, up } => self.change(interface, |link| {
                link.up = *up;
                link.carrier = *up;
            }),
            Action::Carrier { interface, carrier } => {
                self.change(interface, |link| link.carrier = *carrier && link.up)
            }
            Action::ChangeMac { interface } => {
                let mac = self.new_mac();
                self.change(interface, |link| link.mac = mac);
            }
            Action::ChangeMtu { interface } => {
                self.change(interface, |link| link.mtu = 1500 + (link.mtu + 1) % 9)
            }
            Action::Own { number } => {
                let address = own_address(*number);
                if !self.own.remove(&address) {
                    self.own.insert(address);
                }
                if self.engine.is_some() {
                    self.links.push_back(LinkNews::Locals(self.own.clone()));
                }
            }
            Action::Register {
                interface,
                identity,
                poke,
                shared,
            } => self.register(interface, *identity, *shared, *poke),
            Action::Unregister { interface, poke } => {
                if let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) {
                    self.kernel.registry.remove(&ifindex);
                    self.oracle.world_changed(&mut self.kernel);
                    if *poke {
                        self.poke(ifindex);
                    }
                }
            }
            Action::UnregisterNumber { ifindex } => {
                if !self.kernel.devices.contains_key(ifindex) {
                    self.kernel.registry.remove(ifindex);
                    self.oracle.world_changed(&mut self.kernel);
                }
            }
            Action::Poke { interface } => {
                if let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) {
                    self.poke(ifindex);
                }
            }
            Action::Readable { interface, readable } => {
                if let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) {
                    if *readable {
                        self.kernel.faults.unreadable.remove(&ifindex);
                    } else {
                        self.kernel.faults.unreadable.insert(ifindex);
                    }
                }
            }
            Action::PutAttachment {
                name,
                interface,
                identity,
                app,
                addresses,
                fresh,
            } => self.put_attachment(name, interface, *identity, app, *addresses, *fresh),
            Action::DropAttachment { name } => {
                let name = object_name(name);
                if self.objects.attachments.remove(&name).is_some() {
                    self.tell(ObjectChange::AttachmentGone(name));
                }
            }
            Action::PutPolicy {
                name,
                spec,
                fresh,
                old,
            } => {
                self.put_policy(name, Content::of(spec), *fresh, *old);
            }
            Action::SpoilPolicy {
                name,
                unsupported,
                consumers,
            } => {
                let refusal = Refusal {
                    reason: if *unsupported {
                        FailReason::Unsupported
                    } else {
                        FailReason::Invalid
                    },
                    message: "spec.destinations[0]: refused".into(),
                    consumers: consumers.as_deref().map(selector),
                };
                self.put_policy(name, Content::Refused(refusal), false, false);
            }
            Action::TouchPolicy { name } => self.put_policy(name, Content::Same, false, false),
            Action::DropPolicy { name } => {
                let name = object_name(name);
                if self.objects.policies.remove(&name).is_some() {
                    self.tell(ObjectChange::PolicyGone(name));
                }
            }
            Action::Relist => {
                for change in self.objects.changes(false) {
                    self.tell(change);
                }
            }
            Action::Expect {
                policy,
                consumer,
                state,
            } => return self.expect(policy, consumer, *state),
            _ => return self.act_on_agent(action),
        }
        Ok(())
    }

    fn act_on_agent(&mut self, action: &Action) -> Checked {
        match action {
            Action::Crash { done } => self.crash(*done)?,
            Action::Start {
                policies_first,
                saved,
            } => self.start(*policies_first, *saved)?,
            Action::Save => self.save(),
            Action::Refuse { kind, interface } => {
                let ifindex = match interface {
                    Some(interface) => self.kernel.named(interface).map(|dev| dev.link.ifindex),
                    None => Some(0),
                };
                if let Some(ifindex) = ifindex {
                    self.kernel.faults.refused.insert((*kind, ifindex));
                }
            }
            Action::Capacity { services } => self.kernel.services_capacity = *services,
            Action::Hang { lane, done } => self.hang(*lane, *done)?,
            Action::Strip { interface } => {
                if let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) {
                    if let Some(instance) = self.kernel.pins.remove(&ifindex) {
                        // Nobody tells the agent: the next proof or audit does.
                        self.kernel.stripped.insert(instance);
                        self.oracle.trouble.devices.insert(ifindex);
                        if self.setup.audits {
                            self.oracle.tampered.devices.insert(ifindex);
                        }
                    }
                    self.oracle.world_changed(&mut self.kernel);
                }
            }
            Action::Tamper { .. }
            | Action::Foreign { .. }
            | Action::HooksUnknown
            | Action::LoseLink
            | Action::CheckLinks => self.act_behind_its_back(action),
            Action::Mend => self.mend(),
            Action::TellLink { skip, twice } => self.tell_link(*skip, *twice)?,
            Action::TellObjects { count } => self.tell_objects(*count)?,
            Action::TellPoke => self.tell_poke()?,
            Action::TellAnswer { lane } => self.tell_answer(*lane)?,
            Action::Poll => self.poll()?,
            Action::Work { lane, outcome } => self.work(*lane, *outcome)?,
            Action::AnswerAsk => self.answer_ask()?,
            // Where nobody looks at the programs a device that was replaced before the first dump is not told apart.
            Action::Overrun if self.engine.is_some() && (self.oracle.told.dumped || self.setup.audits) => {
                self.links.clear();
                self.links.push_back(LinkNews::Dump(self.kernel.links()));
                self.links.push_back(LinkNews::Locals(self.own.clone()));
            }
            Action::Advance { ms, jump } => self.advance(u64::from(*ms) * Boot::MILLI, *jump)?,
            Action::Calm => self.calm()?,
            Action::Rest => self.rest()?,
            Action::Quiet { seconds } => self.quiet(*seconds)?,
            _ => {}
        }
        Ok(())
    }

    /// What nobody tells of, but an audit finds.
    fn act_behind_its_back(&mut self, action: &Action) {
        if !self.setup.audits {
            return;
        }
        match action {
            Action::Tamper { interface, how } => self.tamper(interface, *how),
            Action::Foreign {
                interface,
                there,
                tell,
            } => {
                let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) else {
                    return;
                };
                if *there {
                    self.kernel.foreign.insert(ifindex, vec!["another".to_owned()]);
                } else {
                    self.kernel.foreign.remove(&ifindex);
                }
                if *tell && self.engine.is_some() {
                    self.links.push_back(LinkNews::Hooks(Some(ifindex)));
                }
            }
            Action::HooksUnknown if self.engine.is_some() => self.links.push_back(LinkNews::Hooks(None)),
            Action::LoseLink => {
                // An answer to a question is not lost.
                if let Some(LinkNews::Present(Link { ifindex, .. }) | LinkNews::Gone(ifindex)) =
                    self.links.front()
                    && !self.answers.contains(ifindex)
                {
                    self.oracle.trouble.devices.insert(*ifindex);
                    self.oracle.tampered.devices.insert(*ifindex);
                    self.links.pop_front();
                }
            }
            Action::CheckLinks => self.check_links(),
            _ => {}
        }
    }

    fn tamper(&mut self, interface: &str, how: Tamper) {
        let Some(ifindex) = self.kernel.named(interface).map(|dev| dev.link.ifindex) else {
            return;
        };
        let Some(alone) = self.kernel.tamper(ifindex, how) else {
            return;
        };
        if alone {
            self.oracle.trouble.devices.insert(ifindex);
            self.oracle.tampered.devices.insert(ifindex);
        } else {
            self.oracle.trouble.everything = true;
            self.oracle.tampered.everything = true;
        }
        self.oracle.world_changed(&mut self.kernel);
    }

    fn move_out(&mut self, name: &str) {
        let Some(ifindex) = self.kernel.named(name).map(|dev| dev.link.ifindex) else {
            return;
        };
        if let Some(dev) = self.kernel.devices.remove(&ifindex) {
            self.kernel.elsewhere.insert(name.to_owned(), dev);
            self.link_changed(LinkNews::Gone(ifindex));
        }
    }

    /// A device keeps its number if that is free; its program too, unless somebody has detached it meanwhile.
    fn move_back(&mut self, name: &str) {
        if self.kernel.named(name).is_some() {
            return;
        }
        let Some(mut dev) = self.kernel.elsewhere.remove(name) else {
            return;
        };
        if self.kernel.devices.contains_key(&dev.link.ifindex) {
            let instance = dev.instance;
            self.kernel.pins.retain(|_, pinned| *pinned != instance);
            dev.link.ifindex = self.lowest_free();
        }
        let link = dev.link.clone();
        self.kernel.devices.insert(link.ifindex, dev);
        self.link_changed(LinkNews::Present(link));
    }

    fn expect(&self, policy: &str, consumer: &str, state: ExpectedState) -> Checked {
        let key = (object_name(policy), object_name(consumer));
        let shown = self.oracle.view.intents.get(&key).map(|intent| intent.state);
        let wanted = match state {
            ExpectedState::Pending => State::Pending,
            ExpectedState::Programmed => State::Programmed,
            ExpectedState::Held(reason) => State::Held(reason),
            ExpectedState::Failed(reason) => State::Failed(reason),
        };
        ensure!(
            shown == Some(wanted),
            "a script's own expectation",
            "{key:?} is {shown:?}, expected {wanted:?}"
        );
        Ok(())
    }

    pub(crate) fn coverage(&self) -> &Coverage {
        &self.oracle.coverage
    }
}

/// Content of a policy that is put.
enum Content {
    Spec(Box<PolicySpec>),
    Refused(Refusal),
    Same,
}

impl Content {
    fn of(spec: &Spec) -> Self {
        Self::Spec(Box::new(spec.build()))
    }
}

/// How much waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) links: usize,
    pub(crate) source: usize,
    pub(crate) pokes: usize,
    pub(crate) asks: usize,
    pub(crate) checking: bool,
    /// What each worker does next.
    pub(crate) fronts: [Option<OpKind>; 4],
    pub(crate) jobs: [usize; 4],
    pub(crate) answers: [usize; 4],
    pub(crate) handled: bool,
}

impl Waiting {
    fn is_nothing(self) -> bool {
        self.links + self.source + self.pokes + self.asks == 0
            && self.jobs == [0; 4]
            && self.answers == [0; 4]
            && !self.checking
            && !self.handled
    }
}

/// Whether an action at rest must leave the kernel as it is.
const fn is_meaningless(action: &Action) -> bool {
    matches!(
        action,
        Action::ChangeMtu { .. }
            | Action::Poke { .. }
            | Action::TouchPolicy { .. }
            | Action::Relist
            | Action::Crash { .. }
            | Action::Start { .. }
            | Action::Save
            | Action::TellLink { .. }
            | Action::TellObjects { .. }
            | Action::TellPoke
            | Action::TellAnswer { .. }
            | Action::Poll
            | Action::Work {
                outcome: Outcome::Done,
                ..
            }
            | Action::AnswerAsk
            | Action::CheckLinks
            | Action::Overrun
            | Action::Advance { .. }
            | Action::Calm
            | Action::Rest
            | Action::Quiet { .. }
            | Action::Expect { .. }
            | Action::Mend
    )
}

fn panicked(payload: Box<dyn std::any::Any + Send>) -> Violation {
    let text = payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default();
    Violation {
        rule: NO_PANIC,
        story: text,
    }
}

/// What kinds of news an event brings.
fn kinds(event: &Event) -> Vec<EventKind> {
    match event {
        Event::Objects(changes) => changes
            .iter()
            .map(|change| match change {
                ObjectChange::Policy(_) => EventKind::Policy,
                ObjectChange::PolicyGone(_) => EventKind::PolicyGone,
                ObjectChange::Attachment(_) => EventKind::Attachment,
                ObjectChange::AttachmentGone(_) => EventKind::AttachmentGone,
            })
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
        Event::Link(_) => vec![EventKind::Link],
        Event::LinkGone(_) => vec![EventKind::LinkGone],
        Event::LinkDump(_) => vec![EventKind::LinkDump],
        Event::Locals(_) => vec![EventKind::Locals],
        Event::Registry(reads) => reads
            .iter()
            .map(|(_, read)| match read {
                RegistryRead::Row(_) => EventKind::Row,
                RegistryRead::Absent => EventKind::NoRow,
                RegistryRead::Failed(_) => EventKind::Unreadable,
            })
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
        Event::Poke(_) => vec![EventKind::Poke],
        Event::Answer(_, Ok(_)) => vec![EventKind::Done],
        Event::Answer(_, Err(_)) => vec![EventKind::Failed],
        Event::Tick => vec![EventKind::Tick],
        Event::SavedComplete => vec![EventKind::Saved],
        Event::SourceComplete => vec![EventKind::Complete],
        Event::Audited(_, audited) if audited.differences.is_empty() => vec![EventKind::Audited],
        Event::Audited(..) => vec![EventKind::Drifted],
        Event::DevicesDrifted(_) => vec![EventKind::DevicesDrifted],
        Event::HooksChanged(_) => vec![EventKind::HooksChanged],
        Event::HooksUnknown => vec![EventKind::HooksUnknown],
        Event::Adopted(_) | Event::Remembered(_) => Vec::new(),
    }
}

/// Counts the event for the state of every intent that it is about.
fn concerned(oracle: &mut Oracle, event: &Event, op: Option<&Op>, kind: EventKind) {
    let mut states: Vec<State> = Vec::new();
    for ((policy, consumer), intent) in &oracle.view.intents {
        let device = |ifindex: Ifindex| intent.ifindex == Some(ifindex);
        let about = match event {
            Event::Objects(changes) => changes.iter().any(|change| match (change, kind) {
                (ObjectChange::Policy(changed), EventKind::Policy) => changed.name == *policy,
                (ObjectChange::PolicyGone(gone), EventKind::PolicyGone) => gone == policy,
                (ObjectChange::Attachment(changed), EventKind::Attachment) => changed.name == *consumer,
                (ObjectChange::AttachmentGone(gone), EventKind::AttachmentGone) => gone == consumer,
                _ => false,
            }),
            Event::Link(link) => device(link.ifindex) || link.name == intent.interface,
            Event::LinkGone(ifindex) | Event::Poke(ifindex) => device(*ifindex),
            Event::Registry(reads) => reads.iter().any(|(ifindex, read)| {
                let same = match read {
                    RegistryRead::Row(_) => EventKind::Row,
                    RegistryRead::Absent => EventKind::NoRow,
                    RegistryRead::Failed(_) => EventKind::Unreadable,
                };
                device(*ifindex) && same == kind
            }),
            Event::Answer(..) => op.is_none_or(|op| ifindex_of(op).is_none_or(device)),
            _ => true,
        };
        if about {
            states.push(intent.state);
        }
    }
    for state in states {
        oracle.coverage.event(state, kind);
    }
}
