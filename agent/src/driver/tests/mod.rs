//! The driver on a paused clock, with the real engine and a data path in memory whose lanes are as slow as a test wants.

mod batches;
mod chaos;
mod lanes_fail;
mod stops;
mod usual;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_engine::Engine;
use holdfast_engine::model::{
    Attachment, Boot, Capacity, Config, Covers, Delivery, Destination, Device, Event, Identity, Ifindex,
    Lane, Link, LinkKind, Mac, Now, ObjectChange, ObjectName, OnDeadline, Op, OpError, Policy, PolicySpec,
    Protocol, Remembered, Selector, State, Switchover, Token, Uid, WhileHeld,
};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::lanes::{self, Answers, Job, Jobs, Lanes, LanesHealth};
use super::{Driver, Handle, Identification, Inputs, MetricsSnapshot, Outputs, Snapshot, Telltales};
use crate::api::hash;
use crate::clock::Clock;
use crate::datapath::fake::Fake;
use crate::datapath::{Datapath, Kernel, Packet, Sizes};
use crate::netlink::LinkNews;
use crate::source::SourceNews;

/// Time between audits.
const AUDIT: Duration = Duration::from_secs(30);

const CONSUMER: Ifindex = 11;
const PRODUCER: Ifindex = 21;
const OTHER: Ifindex = 12;

/// Length of each queue to the driver.
const QUEUE: usize = 1_024;

/// The paused clock as both clocks of a node.
#[derive(Clone)]
struct Paused {
    start: Instant,
    /// Called at each look at it; says how many nanoseconds have gone by since the last one although nobody slept.
    look: Arc<dyn Fn() -> u64 + Send + Sync>,
    gone_by: Arc<AtomicU64>,
}

impl Paused {
    fn new() -> Self {
        Self::looked_at(|| 0)
    }

    fn looked_at(look: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self {
            start: Instant::now(),
            look: Arc::new(look),
            gone_by: Arc::default(),
        }
    }
}

impl Clock for Paused {
    fn now(&self) -> Now {
        let gone_by = self.gone_by.fetch_add((self.look)(), Ordering::Relaxed);
        let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap() + gone_by;
        Now {
            boot: Boot(1_000 * Boot::SECOND + nanos),
            wall_ms: 1_700_000_000_000 + (nanos / 1_000_000) as i64,
        }
    }
}

/// What becomes of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Course {
    /// It is carried out after so long, and answered.
    After(Duration),
    /// It is carried out at once, and answered after so long.
    Late(Duration),
    /// It fails after so long, and changes nothing.
    Fails(Duration, OpError),
    /// It is carried out, and nobody hears of it.
    Unheard,
    /// The call never returns.
    Hangs,
    /// The worker ends, as a thread does that panics.
    Dies,
}

impl From<Duration> for Course {
    fn from(delay: Duration) -> Self {
        Self::After(delay)
    }
}

/// What becomes of each job, by a rule of the test.
type Rule = Arc<dyn Fn(&Job) -> Course + Send + Sync>;

struct Nothing;

impl Telltales for Nothing {
    fn fill(&self, _: &mut MetricsSnapshot) {}
}

/// Places at which a life can be ended: an event was given, a job reached its lane, was carried out, was answered.
#[derive(Debug, Default)]
struct Points {
    reached: AtomicUsize,
    /// Where it ends; none = nowhere.
    at: Option<usize>,
    /// Whoever gets there does not go on.
    freeze: bool,
    there: Notify,
}

impl Points {
    async fn reach(&self) {
        let number = self.reached.fetch_add(1, Ordering::Relaxed);
        if Some(number) == self.at {
            self.there.notify_one();
            if self.freeze {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Called with every operation that was carried out.
type Watch = Arc<dyn Fn(&Fake) + Send + Sync>;

/// What a rig is made of.
#[derive(Clone)]
struct Parts {
    /// What the kernel has: outlives a driver.
    fake: Arc<Fake>,
    remembered: Vec<Remembered>,
    clock: Paused,
    rule: Rule,
    points: Arc<Points>,
    watch: Watch,
    /// Time between audits; zero = none.
    audit: Duration,
}

impl Parts {
    fn new<C: Into<Course>>(rule: impl Fn(&Job) -> C + Send + Sync + 'static) -> Self {
        Self {
            fake: Arc::new(Fake::new(Sizes::default())),
            remembered: Vec::new(),
            clock: Paused::new(),
            rule: Arc::new(move |job| rule(job).into()),
            points: Arc::default(),
            watch: Arc::new(|_| {}),
            audit: AUDIT,
        }
    }
}

/// A driver that runs, and everything around it.
struct Rig {
    fake: Arc<Fake>,
    handle: Handle,
    links: mpsc::Sender<LinkNews>,
    source: mpsc::Sender<SourceNews>,
    wakes: mpsc::Sender<Ifindex>,
    asked: Arc<Mutex<Vec<Ifindex>>>,
    /// Comparisons of all devices with what was told that were asked for.
    checks: Arc<AtomicU64>,
    reports: watch::Receiver<Arc<Snapshot>>,
    remembered: watch::Receiver<Arc<Vec<Remembered>>>,
    health: LanesHealth,
    /// Jobs that the lanes were given, and those that they carried out.
    given: Arc<AtomicU64>,
    carried_out: Arc<AtomicU64>,
    clock: Paused,
    points: Arc<Points>,
    stop: Option<oneshot::Sender<()>>,
    driver: Option<JoinHandle<()>>,
    workers: Vec<JoinHandle<()>>,
}

impl Rig {
    /// A first life.
    fn start<C: Into<Course>>(rule: impl Fn(&Job) -> C + Send + Sync + 'static) -> Self {
        Self::begin(Parts::new(rule))
    }

    /// A life that adopts what it finds.
    fn begin(parts: Parts) -> Self {
        let clock = parts.clock.clone();
        let given = Arc::new(AtomicU64::new(0));
        let carried_out = Arc::new(AtomicU64::new(0));
        let (lanes, jobs, health) = Lanes::new();
        let (answer_sender, answers) = mpsc::channel(64);
        let mut workers = Vec::new();
        for (lane, jobs) in lanes::ALL.into_iter().zip(jobs) {
            let worker = Worker {
                lane,
                parts: parts.clone(),
                health: health.clone(),
                given: Arc::clone(&given),
                carried_out: Arc::clone(&carried_out),
            };
            workers.push(tokio::spawn(worker.run(jobs, answer_sender.clone())));
        }
        let (links, link_receiver) = mpsc::channel(QUEUE);
        let (source, source_receiver) = mpsc::channel(QUEUE);
        let (wakes, wake_receiver) = mpsc::channel(QUEUE);
        let (command_sender, commands) = mpsc::channel(QUEUE);
        let (report, reports) = watch::channel(Arc::new(Snapshot::default()));
        let (remembered_sender, remembered) = watch::channel(Arc::new(parts.remembered.clone()));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let checks = Arc::new(AtomicU64::new(0));
        let engine = Engine::new(Config {
            capacity: Capacity {
                policies: 64,
                slots: 4_096,
                backends: 64,
            },
            features: Kernel::FEATURES,
            neighbour_only: false,
            hashes: hash::hashes(),
            audit_every: parts.audit.as_nanos() as u64,
        });
        let driver = Driver::new(
            engine,
            vec![
                Event::Adopted(Box::new(parts.fake.adopt().unwrap())),
                Event::Remembered(parts.remembered),
            ],
            Arc::new(clock.clone()),
            Identification {
                node: "edge-1".to_owned(),
                epoch: "e".to_owned(),
            },
            Inputs {
                commands,
                answers,
                links: link_receiver,
                source: source_receiver,
                wakes: wake_receiver,
                hooks: mpsc::channel(1).1,
            },
            Outputs {
                lanes,
                ask_link: {
                    let asked = Arc::clone(&asked);
                    Box::new(move |ifindex| asked.lock().unwrap().push(ifindex))
                },
                check_links: {
                    let checks = Arc::clone(&checks);
                    Box::new(move || _ = checks.fetch_add(1, Ordering::Relaxed))
                },
                report,
                remembered: remembered_sender,
                journal: None,
            },
            Box::new(Nothing),
        );
        let (stop, stopped) = oneshot::channel::<()>();
        let driver = tokio::spawn(driver.run(async {
            let _ = stopped.await;
        }));
        Self {
            fake: parts.fake,
            handle: Handle::new(command_sender),
            links,
            source,
            wakes,
            asked,
            checks,
            reports,
            remembered,
            health,
            given,
            carried_out,
            clock,
            points: parts.points,
            stop: Some(stop),
            driver: Some(driver),
            workers,
        }
    }

    /// Devices, identities, objects: all there, in the order in which a node usually learns of them.
    async fn with_everything(&self) {
        for (ifindex, number) in [(CONSUMER, 1), (OTHER, 2), (PRODUCER, 3)] {
            self.fake.add_device(Device {
                ifindex,
                mac: mac(number),
            });
            self.fake.register(ifindex, identity(number));
        }
        self.objects(everything()).await;
        self.source.send(SourceNews::Complete).await.unwrap();
        let links = vec![
            link(CONSUMER, "hfc", 1),
            link(OTHER, "hfo", 2),
            link(PRODUCER, "hfp", 3),
        ];
        self.links.send(LinkNews::Dump(links)).await.unwrap();
    }

    async fn objects(&self, changes: Vec<ObjectChange>) {
        self.source.send(SourceNews::Changes(changes)).await.unwrap();
    }

    async fn state(&self, policy: &str) -> State {
        self.handle
            .policy(named(policy))
            .await
            .unwrap()
            .unwrap()
            .policy
            .state
    }

    /// Waits, on the paused clock, until the policy is in this state; how long that took.
    async fn until(&self, policy: &str, wanted: State) -> Duration {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(60) {
            if let Some(found) = self.handle.policy(named(policy)).await.unwrap()
                && found.policy.state == wanted
            {
                return started.elapsed();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{policy} is {:?}, not {wanted:?}", self.state(policy).await);
    }

    async fn passes(&self) -> u64 {
        self.handle.metrics(false).await.unwrap().pass_duration.count
    }

    async fn link(&self, link: Link) {
        self.links.send(LinkNews::Present(link)).await.unwrap();
    }

    /// The driver ends as it does when the process is told to.
    async fn end(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        self.driver.take().unwrap().await.unwrap();
    }

    /// The whole process ends so: the lanes finish what they have begun.
    async fn end_all(&mut self) {
        self.end().await;
        for worker in self.workers.drain(..) {
            worker.await.unwrap();
        }
    }

    /// The process is gone, in the middle of whatever it did.
    async fn crash(mut self) {
        let tasks = self.workers.drain(..).chain(self.driver.take());
        for task in tasks {
            task.abort();
            assert!(task.await.is_err_and(|error| error.is_cancelled()));
        }
    }
}

/// A lane as a task: does what the test says.
struct Worker {
    lane: Lane,
    parts: Parts,
    health: LanesHealth,
    given: Arc<AtomicU64>,
    carried_out: Arc<AtomicU64>,
}

impl Worker {
    async fn run(self, mut jobs: Jobs, answers: mpsc::Sender<Answers>) {
        while let Some(batch) = jobs.recv().await {
            let mut events = Vec::new();
            self.given.fetch_add(batch.len() as u64, Ordering::Relaxed);
            for job in batch {
                self.health.busy(self.lane, self.parts.clock.now().boot);
                let course = (self.parts.rule)(&job);
                self.parts.points.reach().await;
                match course {
                    Course::After(delay) => {
                        tokio::time::sleep(delay).await;
                        events.push(self.carry_out(job));
                    }
                    Course::Late(delay) => {
                        events.push(self.carry_out(job));
                        tokio::time::sleep(delay).await;
                    }
                    Course::Fails(delay, error) => {
                        tokio::time::sleep(delay).await;
                        events.push(match job {
                            Job::Op(id, _) => Event::Answer(id, Err(error)),
                            job => self.carry_out(job),
                        });
                    }
                    Course::Unheard => drop(self.carry_out(job)),
                    Course::Hangs => std::future::pending().await,
                    Course::Dies => return,
                }
                self.parts.points.reach().await;
            }
            self.health.idle(self.lane);
            let answered = Answers {
                lane: self.lane,
                events,
                at: self.parts.clock.now().boot,
            };
            if answers.send(answered).await.is_err() {
                return;
            }
            self.parts.points.reach().await;
        }
    }

    fn carry_out(&self, job: Job) -> Event {
        self.carried_out.fetch_add(1, Ordering::Relaxed);
        let event = job.carry_out(&*self.parts.fake);
        (self.parts.watch)(&self.parts.fake);
        event
    }
}

fn named(name: &str) -> ObjectName {
    ObjectName {
        namespace: "n".to_owned(),
        name: name.to_owned(),
    }
}

const fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn identity(number: u8) -> Identity {
    Identity {
        token: Token::new(u64::from(number)).unwrap(),
        mac: Mac::default(),
        host_mac: mac(number),
        host_mac_shared: false,
        incarnation: None,
    }
}

fn link(ifindex: Ifindex, name: &str, number: u8) -> Link {
    Link {
        ifindex,
        name: name.to_owned(),
        mac: mac(number),
        up: true,
        carrier: true,
        kind: LinkKind::Veth { peer_elsewhere: true },
        master: None,
        mtu: 1500,
        ipv6: true,
    }
}

fn attachment(name: &str, interface: &str, app: &str) -> ObjectChange {
    ObjectChange::Attachment(Attachment {
        name: named(name),
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        created_ms: 1,
        interface: interface.to_owned(),
        expected: None,
        addresses: BTreeSet::new(),
        labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
        covers: Covers::default(),
    })
}

fn selector(app: &str) -> Selector {
    Selector {
        match_labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
        match_expressions: Vec::new(),
    }
}

const SERVICE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 96, 0, 10));

fn policy(name: &str, consumers: &str, port: u16) -> ObjectChange {
    ObjectChange::Policy(Policy {
        name: named(name),
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        created_ms: 1,
        origin: None,
        content: Ok(PolicySpec {
            consumers: selector(consumers),
            producers: selector("p"),
            destinations: BTreeSet::from([Destination::Service {
                address: SERVICE,
                protocol: Protocol::Udp,
                port,
                target_port: None,
            }]),
            delivery: Delivery::Direct,
            while_held: WhileHeld::Drop,
            switchover: Switchover {
                deadline: 30 * Boot::SECOND,
                on_deadline: OnDeadline::KeepOld,
                drain: 60 * Boot::SECOND,
            },
            max_staleness: None,
        }),
    })
}

fn everything() -> Vec<ObjectChange> {
    vec![
        attachment("consumer", "hfc", "c"),
        attachment("other", "hfo", "o"),
        attachment("producer", "hfp", "p"),
        policy("first", "c", 53),
        policy("second", "o", 54),
    ]
}

fn question(port: u16) -> Packet {
    Packet {
        source: IpAddr::from([10, 0, 0, 1]),
        destination: SERVICE,
        protocol: Protocol::Udp,
        port,
    }
}

fn quick(_: &Job) -> Duration {
    Duration::from_micros(50)
}

/// The lane that a job is for.
const fn lane_of(job: &Job) -> Lane {
    match job {
        Job::Op(_, op) => op.lane(),
        Job::ReadRegistry(_) => Lane::Write,
        Job::Audit(..) => Lane::Audit,
    }
}

/// Whether an operation is about attaching to this device.
fn attaches(job: &Job, ifindex: Ifindex) -> bool {
    matches!(job, Job::Op(_, Op::Attach { device }) if device.ifindex == ifindex)
}
