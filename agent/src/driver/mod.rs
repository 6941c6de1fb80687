//! The one task that owns the engine.
//!
//! One wait (events or the engine's next deadline), one place that carries effects out. What takes long runs
//! elsewhere: kernel operations and audits on a thread per lane ([`lanes`]), reports and state files in tasks of their own.

pub mod handle;
pub mod lanes;
mod pace;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::Engine;
use holdfast_engine::model::{Boot, Effect, Event, Ifindex, Lane, Leg, Now, Remembered, Token};
use holdfast_engine::view::Settled;
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock::Clock;
use crate::journal::Journal;
use crate::loops;
use crate::netlink::LinkNews;
use crate::netlink::hooks::HookNews;
use crate::source::{SavedAt, SourceNews, SourceStatus};
use crate::telemetry;

pub use handle::{Command, Gone, Handle, Histogram, MetricsSnapshot, PolicyFigures, PolicyStatus, Snapshot};
use lanes::{Answers, Job, Lanes};
use pace::Pace;

/// At most so many events are handled before the engine is polled (ENGINE rule on batches) ...
const BATCH_EVENTS: usize = 256;
/// ... or for so long.
const BATCH_NANOS: u64 = Boot::MILLI;

/// So many queues lead to the driver.
const KINDS: usize = 6;

/// Everything that comes to the driver.
pub struct Inputs {
    /// Questions of others.
    pub commands: mpsc::Receiver<Command>,
    /// Answers of the lanes.
    pub answers: mpsc::Receiver<Answers>,
    /// Network devices.
    pub links: mpsc::Receiver<LinkNews>,
    /// Desired objects.
    pub source: mpsc::Receiver<SourceNews>,
    /// Ifindexes of which the program saw a token that is not its row's.
    pub wakes: mpsc::Receiver<Ifindex>,
    /// Devices at whose hooks somebody has changed something; nothing comes where that cannot matter.
    pub hooks: mpsc::Receiver<HookNews>,
}

impl Inputs {
    /// How much waits, in all queues.
    fn waiting(&self) -> usize {
        self.commands.len()
            + self.answers.len()
            + self.links.len()
            + self.source.len()
            + self.wakes.len()
            + self.hooks.len()
    }
}

/// Everything that the driver sends to.
pub struct Outputs {
    /// Kernel operations.
    pub lanes: Lanes,
    /// Asks for one device; the answer comes as [`LinkNews`].
    pub ask_link: Box<dyn Fn(Ifindex) + Send>,
    /// Asks for a comparison of all devices with what was told of them; only what differs comes as [`LinkNews`].
    pub check_links: Box<dyn Fn() + Send>,
    /// The newest report; readers take the latest.
    pub report: watch::Sender<Arc<Snapshot>>,
    /// What must survive a restart; readers take the latest.
    pub remembered: watch::Sender<Arc<Vec<Remembered>>>,
    /// Everything that goes into the engine.
    pub journal: Option<Journal>,
}

/// Counters that others keep and a scrape reads together with the engine's.
pub trait Telltales: Send + 'static {
    /// Fills in what the driver does not know itself.
    fn fill(&self, metrics: &mut MetricsSnapshot);
}

/// Who this agent is.
#[derive(Clone, Debug)]
pub struct Identification {
    /// Name of the node.
    pub node: String,
    /// Life of the pins.
    pub epoch: String,
}

/// Owns the engine.
pub struct Driver {
    engine: Engine,
    clock: Arc<dyn Clock>,
    who: Identification,
    inputs: Inputs,
    outputs: Outputs,
    telltales: Box<dyn Telltales>,
    waiters: Vec<Waiter>,
    source: SourceStatus,
    source_activity: Option<Now>,
    saved: Option<SavedAt>,
    /// The first pass over live lists is done.
    settled: bool,
    /// Intents on their way out, when that was looked at last.
    removing: u64,
    durations: BTreeMap<Leg, Histogram>,
    origin_to_seen: Histogram,
    /// Rounds of the lanes.
    loops: BTreeMap<&'static str, loops::Count>,
    queue_wait: Histogram,
    pass_duration: Histogram,
    report: Pace,
    remember: Pace,
    /// Which queue is looked into next.
    turn: usize,
}

/// Somebody waits until the engine is done with an interface.
struct Waiter {
    ifindex: Ifindex,
    token: Option<Token>,
    /// The device has been asked for since, so that a registration that overtook its link event is not "not ours".
    link_seen: bool,
    reply: oneshot::Sender<Settled>,
}

/// What one wait brought.
enum Input {
    Command(Command),
    Answers(Answers),
    Link(LinkNews),
    Source(SourceNews),
    Wake(Ifindex),
    Hooks(HookNews),
    Deadline,
    Stop,
}

impl Driver {
    /// A driver for this engine. `first` are the events that go before all others: adoption, remembered times.
    #[must_use]
    pub fn new(
        engine: Engine,
        first: Vec<Event>,
        clock: Arc<dyn Clock>,
        who: Identification,
        inputs: Inputs,
        outputs: Outputs,
        telltales: Box<dyn Telltales>,
    ) -> Self {
        let now = clock.now();
        let mut driver = Self {
            engine,
            clock,
            who,
            inputs,
            outputs,
            telltales,
            waiters: Vec::new(),
            source: SourceStatus::default(),
            source_activity: None,
            saved: None,
            settled: false,
            removing: 0,
            durations: BTreeMap::new(),
            origin_to_seen: Histogram::default(),
            loops: BTreeMap::new(),
            queue_wait: Histogram::default(),
            pass_duration: Histogram::default(),
            // A report that costs much to build is built less often: at most a twentieth of one core.
            report: Pace::new(20 * Boot::MILLI, 20),
            remember: Pace::new(Boot::SECOND, 100),
            turn: 0,
        };
        for event in first {
            driver.handle(event, now);
        }
        driver
    }

    /// The one way into the engine.
    fn handle(&mut self, event: Event, now: Now) {
        if let Some(journal) = &mut self.outputs.journal {
            journal.handled(&event, now);
        }
        self.engine.handle(event, now);
    }

    /// Runs until `stop` resolves or every sender is gone. Detaches nothing, closes nothing.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        self.report.mark();
        self.pass();
        loop {
            let input = self.wait(&mut stop).await;
            if matches!(input, Input::Stop) {
                break;
            }
            let started = self.clock.now().boot;
            self.outputs.lanes.round_begins(started);
            self.take(input);
            // What is queued already belongs to the same batch.
            let mut taken = 1;
            while taken < BATCH_EVENTS && self.clock.now().boot.since(started) < BATCH_NANOS {
                let Some(input) = self.queued() else { break };
                self.take(input);
                taken += 1;
            }
            self.pass();
            let nanos = self.clock.now().boot.since(started);
            self.pass_duration.observe(nanos);
            self.outputs.lanes.round_ends();
            // However much is queued, others have their turn at the processor.
            tokio::task::yield_now().await;
        }
        self.publish_report();
        self.publish_remembered();
    }

    async fn wait(&mut self, stop: &mut (impl Future<Output = ()> + Unpin)) -> Input {
        let queued = self.queued();
        let deadline = self.next_deadline();
        let sleep = async {
            match deadline {
                Some(nanos) => tokio::time::sleep(Duration::from_nanos(nanos)).await,
                None => std::future::pending().await,
            }
        };
        // Cancel safety: `recv` of each channel loses nothing when another branch wins. Biased, so that stopping goes
        // before everything (what is queued is nobody's then), and what is there already before what may come.
        tokio::select! {
            biased;
            () = stop => Input::Stop,
            Some(input) = std::future::ready(queued) => input,
            Some(answers) = self.inputs.answers.recv() => Input::Answers(answers),
            Some(command) = self.inputs.commands.recv() => Input::Command(command),
            Some(news) = self.inputs.links.recv() => Input::Link(news),
            Some(news) = self.inputs.source.recv() => Input::Source(news),
            Some(ifindex) = self.inputs.wakes.recv() => Input::Wake(ifindex),
            Some(news) = self.inputs.hooks.recv() => Input::Hooks(news),
            () = sleep => Input::Deadline,
            else => Input::Stop,
        }
    }

    /// The next input that is there already. Each kind has its turn, so that a flood of one keeps no other waiting.
    fn queued(&mut self) -> Option<Input> {
        (0..KINDS).find_map(|_| {
            let kind = self.turn;
            self.turn = (self.turn + 1) % KINDS;
            match kind {
                0 => self.inputs.answers.try_recv().ok().map(Input::Answers),
                1 => self.inputs.commands.try_recv().ok().map(Input::Command),
                2 => self.inputs.links.try_recv().ok().map(Input::Link),
                3 => self.inputs.source.try_recv().ok().map(Input::Source),
                4 => self.inputs.wakes.try_recv().ok().map(Input::Wake),
                _ => self.inputs.hooks.try_recv().ok().map(Input::Hooks),
            }
        })
    }

    /// Nanoseconds until something is due although nothing happens.
    fn next_deadline(&self) -> Option<u64> {
        let now = self.clock.now().boot;
        [
            self.engine.next_deadline(),
            self.report.due(),
            self.remember.due(),
        ]
        .into_iter()
        .flatten()
        .min()
        .map(|due| due.since(now))
    }

    fn take(&mut self, input: Input) {
        let now = self.clock.now();
        match input {
            Input::Answers(answers) => {
                self.queue_wait.observe(now.boot.since(answers.at));
                self.outputs.lanes.idle(answers.lane);
                let rounds = self.loops.entry(lanes::name(answers.lane)).or_default();
                for event in &answers.events {
                    rounds.ran(lanes::failed(event));
                }
                for event in answers.events {
                    self.handle(event, now);
                }
            }
            Input::Command(command) => self.command(command, now),
            Input::Link(news) => {
                self.link_seen(&news);
                let event = match news {
                    LinkNews::Dump(links) => Event::LinkDump(links),
                    LinkNews::Present(link) => Event::Link(link),
                    LinkNews::Gone(ifindex) => Event::LinkGone(ifindex),
                    LinkNews::Locals(addresses) => Event::Locals(addresses),
                    LinkNews::Drifted(ifindexes) => Event::DevicesDrifted(ifindexes),
                };
                self.handle(event, now);
            }
            Input::Source(news) => {
                match news {
                    SourceNews::Changes(changes) => self.handle(Event::Objects(changes), now),
                    SourceNews::SavedComplete => self.handle(Event::SavedComplete, now),
                    SourceNews::Complete => {
                        self.handle(Event::SourceComplete, now);
                        // Also if there is no policy left: the report of the life before may name some.
                        self.report.mark();
                    }
                    SourceNews::Arrived(ages) => {
                        ages.into_iter().for_each(|age| self.origin_to_seen.observe(age));
                    }
                    SourceNews::Status(status) => {
                        self.source = status;
                        self.source_activity = Some(now);
                    }
                    SourceNews::Condition(status) => self.source = status,
                    SourceNews::Alive(at) => self.source_activity = Some(at),
                    SourceNews::Saved(at) => self.saved = Some(at),
                }
            }
            Input::Wake(ifindex) => self.handle(Event::Poke(ifindex), now),
            Input::Hooks(HookNews::Changed(ifindexes)) => {
                self.handle(Event::HooksChanged(ifindexes), now);
            }
            Input::Hooks(HookNews::Lost) => self.handle(Event::HooksUnknown, now),
            Input::Deadline => self.handle(Event::Tick, now),
            Input::Stop => {}
        }
    }

    fn link_seen(&mut self, news: &LinkNews) {
        let ifindex = match news {
            LinkNews::Present(link) => link.ifindex,
            LinkNews::Gone(ifindex) => *ifindex,
            LinkNews::Dump(_) | LinkNews::Locals(_) | LinkNews::Drifted(_) => return,
        };
        for waiter in &mut self.waiters {
            waiter.link_seen |= waiter.ifindex == ifindex;
        }
    }

    /// Polls the engine, carries its effects out, and tells whoever waits.
    fn pass(&mut self) {
        let now = self.clock.now();
        if let Some(journal) = &mut self.outputs.journal {
            journal.polled(now);
        }
        let effects = self.engine.poll(now);
        if let Some(journal) = &mut self.outputs.journal {
            journal.flush(&self.engine, now);
        }
        for effect in effects {
            self.carry_out(effect);
        }
        self.outputs.lanes.feed();
        self.answer_waiters();
        if !self.settled && self.engine.view().settled_in() {
            // From now on it can be reported at the API server, also that there is nothing.
            self.settled = true;
            self.report.mark();
        }
        let removing = self.engine.view().removing();
        if std::mem::replace(&mut self.removing, removing) != removing {
            // Of a policy that is gone the engine has nothing more to report, but when the kernel has nothing left of it.
            self.report.mark();
        }
        if self.report.is_due(now.boot) {
            self.publish_report();
        }
        if self.remember.is_due(now.boot) {
            self.publish_remembered();
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Kernel(id, op) => self.outputs.lanes.push(op.lane(), Job::Op(id, op)),
            Effect::ReadRegistry(ifindexes) => {
                self.outputs.lanes.push(Lane::Write, Job::ReadRegistry(ifindexes))
            }
            Effect::AskLink(ifindex) => (self.outputs.ask_link)(ifindex),
            Effect::DumpLinks => (self.outputs.check_links)(),
            Effect::Audit(id, beliefs) => self.outputs.lanes.push(Lane::Audit, Job::Audit(id, beliefs)),
            Effect::Report(_) => {
                self.report.mark();
                self.remember.mark();
            }
            Effect::Measured(leg, nanos) => self.durations.entry(leg).or_default().observe(nanos),
            Effect::Log(line) => telemetry::log(&line),
        }
    }

    fn answer_waiters(&mut self) {
        let engine = &self.engine;
        let mut at = 0;
        while let Some(waiter) = self.waiters.get(at) {
            let settled = engine.view().settled(waiter.ifindex, waiter.token);
            if (waiter.link_seen && settled != Settled::Working) || waiter.reply.is_closed() {
                let waiter = self.waiters.swap_remove(at);
                // The asker may have gone away: nothing is owed to it then.
                let _ = waiter.reply.send(settled);
            } else {
                at += 1;
            }
        }
    }

    fn command(&mut self, command: Command, now: Now) {
        match command {
            Command::Poke {
                ifindex,
                token,
                reply,
            } => {
                (self.outputs.ask_link)(ifindex);
                self.handle(Event::Poke(ifindex), now);
                self.waiters.push(Waiter {
                    ifindex,
                    token,
                    link_seen: false,
                    reply,
                });
            }
            Command::Ping(reply) => {
                let _ = reply.send(());
            }
            Command::Snapshot(reply) => {
                let _ = reply.send(self.snapshot());
            }
            Command::Policy(name, reply) => {
                let found = self.engine.view().policy(&name).map(|policy| PolicyStatus {
                    policy,
                    intents: self.engine.view().intents_of(&name).collect(),
                });
                let _ = reply.send(found);
            }
            Command::Explain(name, asked, reply) => {
                let explained = self.engine.view().explain(&name, &asked);
                let _ = reply.send(explained.map(Box::new));
            }
            Command::Compare(scope, reply) => {
                let _ = reply.send(self.engine.view().compare(&scope));
            }
            Command::Metrics(all, reply) => {
                let _ = reply.send(self.metrics(all, now));
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let now = self.clock.now();
        Snapshot {
            attachments: self.engine.view().attachments().collect(),
            source: self.source.clone(),
            source_age_ns: self.source_activity.map(|at| now.boot.since(at.boot)),
            saved_age_ns: self.saved.map(|saved| saved.age_ns(now)),
            ..self.report_snapshot(now)
        }
    }

    /// What the report needs: no attachments.
    fn report_snapshot(&self, now: Now) -> Snapshot {
        Snapshot {
            node: self.who.node.clone(),
            epoch: self.who.epoch.clone(),
            now_wall_ms: now.wall_ms,
            now_boot_ns: now.boot.0,
            summary: self.engine.view().summary(),
            policies: self.engine.view().policies().cloned().collect(),
            settled: self.settled,
            removing: self.engine.view().leaving().collect(),
            ..Snapshot::default()
        }
    }

    fn metrics(&self, all: bool, now: Now) -> MetricsSnapshot {
        let mut metrics = MetricsSnapshot {
            now_wall_ms: now.wall_ms,
            now_boot_ns: now.boot.0,
            summary: self.engine.view().summary(),
            policies: if all {
                self.engine.view().policies().map(PolicyFigures::new).collect()
            } else {
                self.engine.view().troubled().map(PolicyFigures::new).collect()
            },
            source: self.source.clone(),
            source_last_activity: self.source_activity,
            saved: self.saved,
            durations: self.durations.clone(),
            origin_to_seen: self.origin_to_seen.clone(),
            queue_depth: self.inputs.waiting() as u64,
            queue_wait: self.queue_wait.clone(),
            pass_duration: self.pass_duration.clone(),
            loops: self.loops.clone(),
            foreign_before: self.engine.view().foreign_before(),
            ..MetricsSnapshot::default()
        };
        self.telltales.fill(&mut metrics);
        metrics
    }

    fn publish_report(&mut self) {
        let started = self.clock.now();
        let snapshot = Arc::new(self.report_snapshot(started));
        self.outputs.report.send_replace(snapshot);
        let now = self.clock.now().boot;
        self.report.done(now, now.since(started.boot));
    }

    fn publish_remembered(&mut self) {
        let started = self.clock.now().boot;
        self.outputs
            .remembered
            .send_replace(Arc::new(self.engine.view().remembered()));
        let now = self.clock.now().boot;
        self.remember.done(now, now.since(started));
    }
}
