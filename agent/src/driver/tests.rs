//! The driver on a paused clock, with the real engine and a data path in memory whose lanes are as slow as a test wants.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::Engine;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{
    Attachment, Boot, Config, Covers, Delivery, Destination, Device, Event, FailReason, HoldReason, Identity,
    Ifindex, Lane, Link, LinkKind, Mac, Now, ObjectChange, ObjectName, OnDeadline, Op, Policy, PolicySpec,
    Protocol, Selector, State, Switchover, Token, Uid, WhileHeld,
};
use holdfast_engine::view::Settled;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::lanes::{Answers, Job, Jobs, Lanes, LanesHealth};
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

/// The paused clock as both clocks of a node.
#[derive(Clone, Copy)]
struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Now {
        let nanos = u64::try_from(self.0.elapsed().as_nanos()).unwrap();
        Now {
            boot: Boot(1_000 * Boot::SECOND + nanos),
            wall_ms: 1_700_000_000_000 + (nanos / 1_000_000) as i64,
        }
    }
}

/// How long each operation takes, by a rule of the test.
type Delay = Arc<dyn Fn(&Job) -> Duration + Send + Sync>;

struct Nothing;

impl Telltales for Nothing {
    fn fill(&self, _: &mut MetricsSnapshot) {}
}

/// A driver that runs, and everything around it.
struct Rig {
    fake: Arc<Fake>,
    handle: Handle,
    links: mpsc::Sender<LinkNews>,
    source: mpsc::Sender<SourceNews>,
    /// Keeps the queue open, as the ring buffer's reader does.
    _wakes: mpsc::Sender<Ifindex>,
    asked: Arc<Mutex<Vec<Ifindex>>>,
    /// Comparisons of all devices with what was told that were asked for.
    checks: Arc<AtomicU64>,
    reports: watch::Receiver<Arc<Snapshot>>,
    health: LanesHealth,
    carried_out: Arc<AtomicU64>,
    clock: Paused,
    stop: Option<oneshot::Sender<()>>,
    driver: Option<JoinHandle<()>>,
}

impl Rig {
    fn start(delay: impl Fn(&Job) -> Duration + Send + Sync + 'static) -> Self {
        let clock = Paused(Instant::now());
        let fake = Arc::new(Fake::new(Sizes::default()));
        let delay: Delay = Arc::new(delay);
        let carried_out = Arc::new(AtomicU64::new(0));
        let (lanes, jobs, health) = Lanes::new();
        let (answer_sender, answers) = mpsc::channel(64);
        for (lane, jobs) in [Lane::Write, Lane::Attach, Lane::Prove, Lane::Audit]
            .into_iter()
            .zip(jobs)
        {
            let worker = Worker {
                lane,
                fake: Arc::clone(&fake),
                delay: Arc::clone(&delay),
                clock,
                carried_out: Arc::clone(&carried_out),
            };
            tokio::spawn(worker.run(jobs, answer_sender.clone()));
        }
        let (links, link_receiver) = mpsc::channel(64);
        let (source, source_receiver) = mpsc::channel(64);
        let (wakes, wake_receiver) = mpsc::channel(64);
        let (command_sender, commands) = mpsc::channel(64);
        let (report, reports) = watch::channel(Arc::new(Snapshot::default()));
        let (remembered, _) = watch::channel(Arc::new(Vec::new()));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let checks = Arc::new(AtomicU64::new(0));
        let engine = Engine::new(Config {
            capacity: holdfast_engine::model::Capacity {
                policies: 64,
                slots: 4_096,
                backends: 64,
            },
            features: Kernel::FEATURES,
            neighbour_only: false,
            hashes: hash::hashes(),
            audit_every: AUDIT.as_nanos() as u64,
        });
        let driver = Driver::new(
            engine,
            vec![Event::Adopted(Box::default())],
            Arc::new(clock),
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
                remembered,
                journal: None,
            },
            Box::new(Nothing),
        );
        let (stop, stopped) = oneshot::channel::<()>();
        let driver = tokio::spawn(driver.run(async {
            let _ = stopped.await;
        }));
        Self {
            fake,
            handle: Handle::new(command_sender),
            links,
            source,
            _wakes: wakes,
            asked,
            checks,
            reports,
            health,
            carried_out,
            clock,
            stop: Some(stop),
            driver: Some(driver),
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

    async fn end(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        self.driver.take().unwrap().await.unwrap();
    }
}

/// A lane as a task: waits as long as the test says, then does it.
struct Worker {
    lane: Lane,
    fake: Arc<Fake>,
    delay: Delay,
    clock: Paused,
    carried_out: Arc<AtomicU64>,
}

impl Worker {
    async fn run(self, mut jobs: Jobs, answers: mpsc::Sender<Answers>) {
        while let Some(batch) = jobs.recv().await {
            let mut events = Vec::new();
            for job in batch {
                tokio::time::sleep((self.delay)(&job)).await;
                self.carried_out.fetch_add(1, Ordering::Relaxed);
                events.push(match job {
                    Job::Op(id, op) => Event::Answer(id, self.fake.carry_out(&op)),
                    Job::Audit(id, beliefs) => Event::Audited(id, self.fake.audit(&beliefs)),
                    Job::ReadRegistry(ifindexes) => Event::Registry(self.fake.read_registry(&ifindexes)),
                });
            }
            let at = self.clock.now().boot;
            if answers
                .send(Answers {
                    lane: self.lane,
                    events,
                    at,
                })
                .await
                .is_err()
            {
                return;
            }
        }
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

/// Whether an operation is about attaching to this device.
fn attaches(job: &Job, ifindex: Ifindex) -> bool {
    matches!(job, Job::Op(_, Op::Attach { device }) if device.ifindex == ifindex)
}

#[tokio::test(start_paused = true)]
async fn what_is_there_is_programmed_and_forwards() {
    let mut rig = Rig::start(quick);
    rig.with_everything().await;
    rig.until("first", State::Programmed).await;
    let answer = rig.fake.request(CONSUMER, &question(53));
    assert_eq!((answer.verdict, answer.target), (Verdict::Delivered, PRODUCER));
    // A hold stops it: the row is closed by the time the report says so.
    rig.links
        .send(LinkNews::Present(Link {
            carrier: false,
            ..link(CONSUMER, "hfc", 1)
        }))
        .await
        .unwrap();
    rig.until("first", State::Held(HoldReason::NoCarrier)).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(
        rig.fake.request(CONSUMER, &question(53)).verdict,
        Verdict::DropHeld
    );
    rig.end().await;
    let report = Arc::clone(&rig.reports.borrow());
    let first = report
        .policies
        .iter()
        .find(|policy| policy.name == named("first"))
        .unwrap();
    assert_eq!(first.state, State::Held(HoldReason::NoCarrier));
}

#[tokio::test(start_paused = true)]
async fn an_attach_that_hangs_keeps_nobody_else_waiting() {
    let mut rig = Rig::start(|job| {
        if attaches(job, OTHER) {
            Duration::from_secs(5)
        } else {
            quick(job)
        }
    });
    rig.with_everything().await;
    // The attach lane is one: whoever is behind in it waits. Everything that needs no attach does not.
    rig.until("first", State::Programmed).await;
    rig.links
        .send(LinkNews::Present(Link {
            up: false,
            ..link(CONSUMER, "hfc", 1)
        }))
        .await
        .unwrap();
    let took = rig.until("first", State::Held(HoldReason::InterfaceDown)).await;
    assert!(took < Duration::from_millis(20), "{took:?}");
    rig.links
        .send(LinkNews::Present(link(CONSUMER, "hfc", 1)))
        .await
        .unwrap();
    let took = rig.until("first", State::Programmed).await;
    assert!(took < Duration::from_millis(20), "{took:?}");
    rig.until("second", State::Programmed).await;
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_does_not_answer_fails_its_intents_after_ten_seconds_and_a_late_answer_mends_them() {
    let mut rig = Rig::start(|job| {
        if attaches(job, CONSUMER) {
            Duration::from_secs(25)
        } else {
            quick(job)
        }
    });
    rig.with_everything().await;
    let took = rig
        .until("first", State::Failed(FailReason::MapWriteFailed))
        .await;
    assert!(
        (Duration::from_secs(10)..Duration::from_secs(11)).contains(&took),
        "{took:?}"
    );
    rig.until("first", State::Programmed).await;
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_poke_is_answered_when_the_first_packet_will_be_delivered() {
    let rig = Rig::start(quick);
    rig.with_everything().await;
    rig.until("first", State::Programmed).await;
    // A new incarnation of the same name and number, registered before its link event has come.
    rig.fake.add_device(Device {
        ifindex: CONSUMER,
        mac: mac(9),
    });
    let fresh = Identity {
        token: Token::new(99).unwrap(),
        host_mac: mac(9),
        ..identity(9)
    };
    rig.fake.register(CONSUMER, fresh);
    let handle = rig.handle.clone();
    let poke = tokio::spawn(async move { handle.poke(CONSUMER, Some(fresh.token)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!poke.is_finished(), "answered before the device was looked at");
    assert!(rig.asked.lock().unwrap().contains(&CONSUMER));
    rig.links
        .send(LinkNews::Present(link(CONSUMER, "hfc", 9)))
        .await
        .unwrap();
    assert_eq!(poke.await.unwrap().unwrap(), Settled::Done);
    assert_eq!(
        rig.fake.request(CONSUMER, &question(53)).verdict,
        Verdict::Delivered
    );
}

#[tokio::test(start_paused = true)]
async fn a_poke_for_nobodys_interface_is_answered_too() {
    let rig = Rig::start(quick);
    rig.with_everything().await;
    let handle = rig.handle.clone();
    let poke = tokio::spawn(async move { handle.poke(77, Token::new(5)).await });
    tokio::time::sleep(Duration::from_millis(5)).await;
    rig.links.send(LinkNews::Gone(77)).await.unwrap();
    assert_eq!(poke.await.unwrap().unwrap(), Settled::NotOurs);
}

#[tokio::test(start_paused = true)]
async fn shutting_down_at_any_point_ends_at_once_and_starts_nothing_more() {
    for operations in 0..40 {
        let mut rig = Rig::start(quick);
        rig.with_everything().await;
        let deadline = Instant::now() + Duration::from_secs(1);
        while rig.carried_out.load(Ordering::Relaxed) < operations && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_micros(10)).await;
        }
        let before = Instant::now();
        rig.end().await;
        assert!(
            before.elapsed() < Duration::from_millis(1),
            "after {operations} operations"
        );
        // Each lane ends the batch that it has, and gets no other.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let carried_out = rig.carried_out.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(rig.carried_out.load(Ordering::Relaxed), carried_out);
    }
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_events_is_one_pass_and_rest_is_rest() {
    let rig = Rig::start(quick);
    rig.with_everything().await;
    rig.until("second", State::Programmed).await;
    // Reports and memory have been written.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = rig.passes().await;
    for mtu in 0..50 {
        // The queue is not emptied meanwhile: this task does not give way.
        rig.links
            .try_send(LinkNews::Present(Link {
                mtu,
                ..link(90, "eth0", 90)
            }))
            .unwrap();
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let after = rig.passes().await;
    assert!(after - before <= 3, "{} passes for one burst", after - before);

    rig.fake.take_ops();
    let before = rig.passes().await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let passes = rig.passes().await - before;
    // An audit is due, is answered, and an intent is proven again. One pass is our own question.
    assert!(passes <= 120 * 3 + 1, "{passes} passes in an hour of rest");
    let ops = rig.fake.take_ops();
    let proofs = ops.iter().filter(|op| matches!(op, Op::ProveIntent(_))).count();
    assert_eq!(ops.len(), proofs, "a quiet world is not written to");
    assert!(
        (24..=120).contains(&proofs),
        "{proofs} proofs of two intents in an hour"
    );
    assert_eq!(rig.health.stuck(rig.clock.now().boot), Vec::<Lane>::new());
}

#[tokio::test(start_paused = true)]
async fn an_audit_finds_what_nobody_told_withdraws_and_mends_it() {
    let mut rig = Rig::start(quick);
    rig.with_everything().await;
    rig.until("first", State::Programmed).await;
    rig.until("second", State::Programmed).await;
    // The audit of the start is over.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(rig.checks.load(Ordering::Relaxed), 1);
    let row = rig.fake.row(CONSUMER).unwrap();
    rig.fake.tamper_row(CONSUMER, None);
    assert_eq!(
        rig.fake.request(CONSUMER, &question(53)).verdict,
        Verdict::Pass,
        "it leaks"
    );
    let withdrawn = rig.until("first", State::Pending).await;
    assert!(withdrawn <= AUDIT, "{withdrawn:?}");
    rig.until("first", State::Programmed).await;
    assert_eq!(rig.state("second").await, State::Programmed);
    let mended = rig.fake.row(CONSUMER).unwrap();
    assert!(
        mended.token == row.token && mended.epoch > row.epoch,
        "{mended:?}"
    );
    let answer = rig.fake.request(CONSUMER, &question(53));
    assert_eq!((answer.verdict, answer.target), (Verdict::Delivered, PRODUCER));

    rig.fake.steal_program(OTHER);
    rig.until("second", State::Pending).await;
    rig.until("second", State::Programmed).await;
    let summary = rig.handle.metrics(false).await.unwrap().summary;
    let found: Vec<_> = summary.drift.iter().filter(|(_, count)| **count > 0).collect();
    assert_eq!(found, [(&Drift::Program, &1), (&Drift::Row, &1)]);
    assert_eq!(summary.drift.len(), Drift::ALL.len());
    assert!(
        rig.checks.load(Ordering::Relaxed) >= 3,
        "devices are looked at in every turn"
    );
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_audit_that_hangs_holds_up_nobody() {
    let mut rig = Rig::start(|job| match job {
        Job::Audit(..) => Duration::from_secs(3600),
        job => quick(job),
    });
    rig.with_everything().await;
    rig.until("first", State::Programmed).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(rig.state("first").await, State::Programmed);
    assert_eq!(rig.state("second").await, State::Programmed);
    rig.end().await;
}
