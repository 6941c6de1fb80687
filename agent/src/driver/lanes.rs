//! One thread a lane: the kernel's slowness stays there.
//!
//! bpf(2) cannot be cancelled, so a call that hangs keeps its thread; the engine notices the missing answer, and
//! [`Lanes::stuck`] tells `/livez`.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use holdfast_engine::belief::Belief;
use holdfast_engine::model::{Boot, Event, Ifindex, Lane, Op, OpError, OpId, RegistryRead};
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::datapath::Datapath;

/// Work for a lane.
#[derive(Debug)]
pub enum Job {
    /// Carry this out.
    Op(OpId, Op),
    /// Read these registry rows. In the write lane, so that reads and writes keep their order.
    ReadRegistry(BTreeSet<Ifindex>),
    /// Compare these with the kernel.
    Audit(OpId, Vec<Belief>),
}

impl Job {
    /// Does it, and says what came of it.
    pub(super) fn carry_out(self, datapath: &dyn Datapath) -> Event {
        match self {
            Self::Op(id, op) => Event::Answer(id, datapath.carry_out(&op)),
            Self::Audit(id, beliefs) => Event::Audited(id, datapath.audit(&beliefs)),
            Self::ReadRegistry(ifindexes) => Event::Registry(datapath.read_registry(&ifindexes)),
        }
    }
}

/// What a lane did with one batch.
#[derive(Debug)]
pub struct Answers {
    /// Which lane; it is idle now.
    pub lane: Lane,
    /// Answers, in the order of the jobs.
    pub events: Vec<Event>,
    /// When they were given.
    pub at: Boot,
}

/// A call that takes longer than this is a lane that hangs.
const STUCK_NANOS: u64 = 10 * Boot::SECOND;

/// The queues of the lanes, as the driver sees them.
///
/// A lane has at most one batch out: what the engine wants meanwhile waits here, where it is bounded by the engine's
/// rule of one operation an item.
pub struct Lanes {
    lanes: [LaneQueue; LANES],
    health: LanesHealth,
}

struct LaneQueue {
    lane: Lane,
    batch: usize,
    waiting: VecDeque<Job>,
    busy: bool,
    jobs: mpsc::Sender<Vec<Job>>,
}

/// Since when each lane is inside one call, and the driver inside one round; for `/livez`.
#[derive(Clone, Debug, Default)]
pub struct LanesHealth {
    /// Boot clock, nanoseconds; 0 = idle.
    since: Arc<[AtomicU64; LANES]>,
    /// The same of the driver.
    round: Arc<AtomicU64>,
}

impl LanesHealth {
    /// A lane begins a call.
    pub(super) fn busy(&self, lane: Lane, now: Boot) {
        self.since[index(lane)].store(now.0, Ordering::Relaxed);
    }

    /// A lane is inside no call any more.
    pub(super) fn idle(&self, lane: Lane) {
        self.since[index(lane)].store(0, Ordering::Relaxed);
    }

    /// The lanes that have been inside one call for more than 10 s.
    #[must_use]
    pub fn stuck(&self, now: Boot) -> Vec<Lane> {
        ALL.into_iter()
            .filter(|lane| self.busy_for(*lane, now).is_some_and(|nanos| nanos > STUCK_NANOS))
            .collect()
    }

    /// For how many nanoseconds a lane has been inside one call; none = it is idle.
    #[must_use]
    pub fn busy_for(&self, lane: Lane, now: Boot) -> Option<u64> {
        age(&self.since[index(lane)], now)
    }

    /// The same of the driver and its present round.
    #[must_use]
    pub fn round_for(&self, now: Boot) -> Option<u64> {
        age(&self.round, now)
    }
}

fn age(since: &AtomicU64, now: Boot) -> Option<u64> {
    let since = since.load(Ordering::Relaxed);
    (since != 0).then(|| now.since(Boot(since)))
}

/// How many lanes there are.
const LANES: usize = 4;

/// In the order of [`index`].
pub(super) const ALL: [Lane; LANES] = [Lane::Write, Lane::Attach, Lane::Prove, Lane::Audit];

const fn index(lane: Lane) -> usize {
    match lane {
        Lane::Write => 0,
        Lane::Attach => 1,
        Lane::Prove => 2,
        Lane::Audit => 3,
    }
}

/// Label `loop` of a lane.
pub(super) const fn name(lane: Lane) -> &'static str {
    match lane {
        Lane::Write => "write",
        Lane::Attach => "attach",
        Lane::Prove => "prove",
        Lane::Audit => "audit",
    }
}

/// Whether an answer says that the kernel refused. A device that is gone is a fact, not a refusal.
pub(super) fn failed(answer: &Event) -> bool {
    match answer {
        Event::Answer(_, Err(error)) => *error != OpError::NoDevice,
        Event::Audited(_, audited) => audited.unreadable.is_some(),
        Event::Registry(reads) => reads
            .iter()
            .any(|(_, read)| matches!(read, RegistryRead::Failed(_))),
        _ => false,
    }
}

/// Jobs of one batch, as a worker receives them.
pub type Jobs = mpsc::Receiver<Vec<Job>>;

impl Lanes {
    /// The queues, and what the workers of the write, attach, prove and audit lanes receive.
    #[must_use]
    pub fn new() -> (Self, [Jobs; LANES], LanesHealth) {
        let health = LanesHealth::default();
        let (write, write_jobs) = mpsc::channel(1);
        // About 10 ms each: every answer is worth having by itself.
        let (attach, attach_jobs) = mpsc::channel(1);
        let (prove, prove_jobs) = mpsc::channel(1);
        let (audit, audit_jobs) = mpsc::channel(1);
        let queue = |lane, batch, jobs| LaneQueue {
            lane,
            batch,
            waiting: VecDeque::new(),
            busy: false,
            jobs,
        };
        let lanes = [
            queue(Lane::Write, 256, write),
            queue(Lane::Attach, 1, attach),
            queue(Lane::Prove, 16, prove),
            // There is never more than one.
            queue(Lane::Audit, 1, audit),
        ];
        (
            Self {
                lanes,
                health: health.clone(),
            },
            [write_jobs, attach_jobs, prove_jobs, audit_jobs],
            health,
        )
    }

    /// The queues with a thread behind each, and the threads. They end when this value is dropped; one that is inside
    /// a call ends after it.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        datapath: &Arc<dyn Datapath>,
        clock: &Arc<dyn Clock>,
        answers: &mpsc::Sender<Answers>,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let (lanes, jobs, health) = Self::new();
        let mut threads = Vec::new();
        for (lane, jobs) in ALL.into_iter().zip(jobs) {
            let worker = Worker {
                lane,
                datapath: Arc::clone(datapath),
                clock: Arc::clone(clock),
                health: health.clone(),
                answers: answers.clone(),
            };
            let builder = thread::Builder::new().name(format!("hf-{}", name(lane)));
            threads.push(builder.spawn(move || worker.run(jobs))?);
        }
        Ok((lanes, threads))
    }

    /// For `/livez`.
    #[must_use]
    pub fn health(&self) -> LanesHealth {
        self.health.clone()
    }

    /// The driver begins a round.
    pub fn round_begins(&self, now: Boot) {
        self.health.round.store(now.0, Ordering::Relaxed);
    }

    /// The driver waits for news.
    pub fn round_ends(&self) {
        self.health.round.store(0, Ordering::Relaxed);
    }

    /// Queues a job.
    pub fn push(&mut self, lane: Lane, job: Job) {
        self.lanes[index(lane)].waiting.push_back(job);
    }

    /// The lane has answered its batch.
    pub fn idle(&mut self, lane: Lane) {
        self.lanes[index(lane)].busy = false;
    }

    /// Gives every idle lane its next batch.
    pub fn feed(&mut self) {
        for queue in &mut self.lanes {
            if queue.busy || queue.waiting.is_empty() {
                continue;
            }
            let batch: Vec<Job> = queue
                .waiting
                .drain(..queue.waiting.len().min(queue.batch))
                .collect();
            match queue.jobs.try_send(batch) {
                Ok(()) => queue.busy = true,
                // An idle lane has an empty channel; a closed one has lost its thread to a panic, which ends the process.
                Err(mpsc::error::TrySendError::Full(batch) | mpsc::error::TrySendError::Closed(batch)) => {
                    tracing::error!(lane = ?queue.lane, "a worker takes no work");
                    for job in batch.into_iter().rev() {
                        queue.waiting.push_front(job);
                    }
                }
            }
        }
    }
}

struct Worker {
    lane: Lane,
    datapath: Arc<dyn Datapath>,
    clock: Arc<dyn Clock>,
    health: LanesHealth,
    answers: mpsc::Sender<Answers>,
}

impl Worker {
    fn run(self, mut jobs: Jobs) {
        while let Some(batch) = jobs.blocking_recv() {
            let events = batch
                .into_iter()
                .map(|job| {
                    self.health.busy(self.lane, self.clock.now().boot);
                    job.carry_out(&*self.datapath)
                })
                .collect();
            self.health.idle(self.lane);
            let at = self.clock.now().boot;
            if self
                .answers
                .blocking_send(Answers {
                    lane: self.lane,
                    events,
                    at,
                })
                .is_err()
            {
                return;
            }
        }
    }
}
