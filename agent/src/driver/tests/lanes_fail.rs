//! Lanes that answer late, never, or end: everything else goes on.

use std::sync::Weak;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc as std_mpsc;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::{Audited, Belief};
use holdfast_engine::model::{Adoption, FailReason, HoldReason, OpId, OpResult, RegistryRead};

use super::*;
use crate::datapath::chaos::Chaos;
use crate::datapath::{DatapathError, Stats};
use crate::report::Stamps;
use crate::serve::look::{self, Looker};
use crate::serve::{Sources, health};
use crate::telemetry::Control;

/// In this time whatever needs no kernel call is done.
const SOON: Duration = Duration::from_millis(20);

/// A lane hangs from when the switch is on.
fn hanging(lane: Lane, hangs: &Arc<AtomicBool>) -> Rig {
    let hangs = Arc::clone(hangs);
    Rig::start(move |job| {
        if lane_of(job) == lane && hangs.load(Ordering::Relaxed) {
            Course::Hangs
        } else {
            quick(job).into()
        }
    })
}

impl Rig {
    /// What `/livez` would say is wrong.
    async fn not_alive(&self) -> Vec<String> {
        let sources = Sources {
            driver: self.handle.clone(),
            lanes: self.health.clone(),
            links: Arc::new(|| {
                let (reply, answer) = oneshot::channel();
                let _ = reply.send(());
                answer
            }),
            stats: Arc::new(Stats::default),
            looker: Looker::new(look::Kernel(Weak::<Fake>::new())),
            reports: self.reports.clone(),
            clock: Arc::new(self.clock.clone()),
            stamps: Stamps::default(),
            started: Now::default(),
            source: "dir",
            all_policies: false,
            foreign_allowed: false,
            log: Control::detached("info"),
        };
        let checks = health::alive(&sources).await;
        let wrong = |check: health::Check| Some(format!("{}: {}", check.name, check.wrong?));
        checks.into_iter().filter_map(wrong).collect()
    }

    async fn message(&self, policy: &str) -> String {
        let found = self.handle.policy(named(policy)).await.unwrap().unwrap();
        found.policy.message.unwrap_or_default()
    }

    async fn reported(&mut self, policy: &str, state: State) {
        let name = named(policy);
        let reported = self.reports.wait_for(|report| {
            let policy = report.policies.iter().find(|policy| policy.name == name);
            policy.is_some_and(|policy| policy.state == state)
        });
        let _ = tokio::time::timeout(Duration::from_secs(1), reported)
            .await
            .unwrap_or_else(|_| panic!("{policy} is not reported as {state:?}"));
    }
}

fn down(ifindex: Ifindex, name: &str, number: u8) -> Link {
    Link {
        carrier: false,
        ..link(ifindex, name, number)
    }
}

/// Makes work for a lane that `OTHER` and its policy wait for.
async fn work_for(lane: Lane, rig: &Rig) {
    match lane {
        Lane::Write => rig.link(down(OTHER, "hfo", 2)).await,
        // A new device of that number.
        Lane::Attach => {
            let device = Device {
                ifindex: OTHER,
                mac: mac(5),
            };
            rig.fake.add_device(device);
            rig.fake.register(OTHER, identity(5));
            rig.link(link(OTHER, "hfo", 5)).await;
        }
        Lane::Prove => {
            rig.link(down(OTHER, "hfo", 2)).await;
            rig.until("second", State::Held(HoldReason::NoCarrier)).await;
            rig.link(link(OTHER, "hfo", 2)).await;
        }
        Lane::Audit => tokio::time::sleep(AUDIT).await,
    }
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_hangs_holds_up_no_other_lane_and_neither_events_nor_reports() {
    for lane in lanes::ALL {
        let hangs = Arc::new(AtomicBool::new(false));
        let mut rig = hanging(lane, &hangs);
        rig.with_everything().await;
        rig.until("first", State::Programmed).await;
        rig.until("second", State::Programmed).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        hangs.store(true, Ordering::Relaxed);
        work_for(lane, &rig).await;
        tokio::time::sleep(SOON).await;

        // An event of another interface is taken, told and reported at once.
        rig.link(down(CONSUMER, "hfc", 1)).await;
        let took = rig.until("first", State::Held(HoldReason::NoCarrier)).await;
        assert!(took <= SOON, "{lane:?}: {took:?}");
        let reported = Instant::now();
        rig.reported("first", State::Held(HoldReason::NoCarrier)).await;
        assert!(reported.elapsed() <= SOON * 2, "{lane:?}");
        let asked = Instant::now();
        rig.handle.snapshot().await.unwrap();
        assert_eq!(asked.elapsed(), Duration::ZERO, "{lane:?}: a question waits");
        if lane != Lane::Write {
            tokio::time::sleep(SOON).await;
            let verdict = rig.fake.request(CONSUMER, &question(53)).verdict;
            assert_eq!(verdict, Verdict::DropHeld, "{lane:?}: the row is closed");
        }
        // Nothing is wrong yet; after ten seconds this lane is, and no other.
        assert_eq!(rig.not_alive().await, Vec::<String>::new(), "{lane:?}");
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(rig.health.stuck(rig.clock.now().boot), [lane], "{lane:?}");
        let wrong = rig.not_alive().await;
        assert!(
            wrong.len() == 1 && wrong[0].contains(": one call to the kernel has lasted for 1"),
            "{lane:?}: {wrong:?}"
        );
        if lane != Lane::Audit {
            let failed = State::Failed(FailReason::MapWriteFailed);
            assert_eq!(rig.state("second").await, failed, "{lane:?}");
            let message = rig.message("second").await;
            assert!(message.contains("no answer"), "{lane:?}: {message}");
        }
        // It wakes nobody again and again, and it can be told to end.
        let before = rig.passes().await;
        tokio::time::sleep(Duration::from_secs(600)).await;
        let passes = rig.passes().await - before;
        assert!(passes < 150, "{lane:?}: {passes} passes in ten minutes");
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_about_a_device_that_has_gone_says_nothing_of_the_next() {
    let late = Arc::new(AtomicBool::new(true));
    let rig = Rig::start(move |job| {
        if attaches(job, CONSUMER) && late.swap(false, Ordering::Relaxed) {
            // The kernel has done it; the answer comes when another device has the number.
            Course::Late(Duration::from_secs(3))
        } else {
            quick(job).into()
        }
    });
    rig.with_everything().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    rig.fake.add_device(Device {
        ifindex: CONSUMER,
        mac: mac(9),
    });
    rig.fake.register(CONSUMER, identity(9));
    rig.link(link(CONSUMER, "hfc", 9)).await;
    rig.until("first", State::Programmed).await;
    let attached = rig
        .fake
        .take_ops()
        .into_iter()
        .filter(|op| matches!(op, Op::Attach { device } if device.ifindex == CONSUMER))
        .count();
    assert_eq!(
        attached, 2,
        "the answer about the first device says nothing of the second"
    );
    let verdict = rig.fake.request(CONSUMER, &question(53)).verdict;
    assert_eq!(verdict, Verdict::Delivered);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_ends_takes_its_lane_along_and_nothing_else() {
    let dies = Arc::new(AtomicBool::new(false));
    let mut rig = Rig::start({
        let dies = Arc::clone(&dies);
        move |job| {
            if lane_of(job) == Lane::Attach && dies.load(Ordering::Relaxed) {
                Course::Dies
            } else {
                quick(job).into()
            }
        }
    });
    rig.with_everything().await;
    rig.until("first", State::Programmed).await;
    rig.until("second", State::Programmed).await;
    dies.store(true, Ordering::Relaxed);
    work_for(Lane::Attach, &rig).await;
    rig.until("second", State::Failed(FailReason::MapWriteFailed))
        .await;
    // The others do what they did.
    rig.link(down(CONSUMER, "hfc", 1)).await;
    let took = rig.until("first", State::Held(HoldReason::NoCarrier)).await;
    rig.link(link(CONSUMER, "hfc", 1)).await;
    rig.until("first", State::Programmed).await;
    assert!(took <= SOON, "{took:?}");
    assert_eq!(rig.health.stuck(rig.clock.now().boot), [Lane::Attach]);
    let before = rig.passes().await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    let passes = rig.passes().await - before;
    assert!(passes < 150, "{passes} passes in ten minutes");
    let told = Instant::now();
    rig.end_all().await;
    assert!(told.elapsed() <= SOON);
}

// --- the threads themselves ------------------------------------------------------------------------------------

/// A clock that a test sets.
#[derive(Default)]
struct Set(AtomicU64);

impl Clock for Set {
    fn now(&self) -> Now {
        Now {
            boot: Boot(self.0.load(Ordering::Relaxed)),
            wall_ms: 0,
        }
    }
}

/// A data path whose attaches wait for the test, and say when they have begun.
struct Gated {
    inside: Fake,
    begun: std_mpsc::SyncSender<()>,
    go: Mutex<std_mpsc::Receiver<()>>,
}

impl Datapath for Gated {
    fn carry_out(&self, op: &Op) -> OpResult {
        if matches!(op, Op::Attach { .. }) {
            self.begun.send(()).unwrap();
            // An end of the test is an answer too.
            let _ = self.go.lock().unwrap().recv();
        }
        self.inside.carry_out(op)
    }

    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)> {
        self.inside.read_registry(ifindexes)
    }

    fn audit(&self, beliefs: &[Belief]) -> Audited {
        self.inside.audit(beliefs)
    }

    fn look(&self, beliefs: &[Belief]) -> Audited {
        self.inside.look(beliefs)
    }

    fn adopt(&self) -> Result<Adoption, DatapathError> {
        self.inside.adopt()
    }

    fn stats(&self) -> Stats {
        self.inside.stats()
    }

    fn set_debug(&self, level: u64) -> Result<(), DatapathError> {
        self.inside.set_debug(level)
    }
}

const DEVICE: Device = Device {
    ifindex: CONSUMER,
    mac: mac(1),
};

fn row_of(ifindex: Ifindex) -> Job {
    let row = holdfast_engine::model::Row {
        token: None,
        epoch: 1,
        has_services: true,
        has_prefixes_v4: false,
        has_prefixes_v6: false,
        has_sources: false,
        via: None,
    };
    Job::Op(OpId(u64::from(ifindex)), Op::WriteRow { ifindex, row })
}

#[test]
fn a_thread_that_hangs_is_named_after_ten_seconds_and_the_others_answer() {
    let (begun, has_begun) = std_mpsc::sync_channel(1);
    let (go, may_go) = std_mpsc::channel();
    let datapath: Arc<dyn Datapath> = Arc::new(Gated {
        inside: Fake::new(Sizes::default()),
        begun,
        go: Mutex::new(may_go),
    });
    let set = Arc::new(Set(AtomicU64::new(Boot::SECOND)));
    let clock: Arc<dyn Clock> = Arc::clone(&set) as Arc<dyn Clock>;
    let (answers, mut answered) = mpsc::channel(16);
    let (mut lanes, threads) = Lanes::start(&datapath, &clock, &answers).unwrap();
    drop(answers);
    let health = lanes.health();

    lanes.push(Lane::Attach, Job::Op(OpId(1), Op::Attach { device: DEVICE }));
    lanes.feed();
    has_begun.recv().unwrap();
    // A second one waits behind it; a write goes on beside it.
    lanes.push(Lane::Attach, Job::Op(OpId(2), Op::Attach { device: DEVICE }));
    lanes.push(Lane::Write, row_of(CONSUMER));
    lanes.feed();
    let first = answered.blocking_recv().unwrap();
    assert_eq!(first.lane, Lane::Write);
    assert_eq!(health.stuck(Boot(11 * Boot::SECOND)), []);
    set.0.store(12 * Boot::SECOND, Ordering::Relaxed);
    assert_eq!(health.stuck(clock.now().boot), [Lane::Attach]);

    go.send(()).unwrap();
    let second = answered.blocking_recv().unwrap();
    assert_eq!((second.lane, second.at), (Lane::Attach, clock.now().boot));
    assert_eq!(health.stuck(Boot(100 * Boot::SECOND)), []);
    // What waited and was not handed over is not begun any more when the driver ends.
    drop(lanes);
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(has_begun.try_recv().is_err());
    assert!(answered.blocking_recv().is_none());
}

#[test]
fn a_thread_that_panics_stays_in_its_call_for_livez_and_the_others_answer() {
    let fake = Arc::new(Fake::new(Sizes::default()));
    fake.add_device(DEVICE);
    let chaos: Arc<dyn Datapath> = Arc::new(Chaos::new(fake, "row=panic").unwrap());
    let clock: Arc<dyn Clock> = Arc::new(Set(AtomicU64::new(Boot::SECOND)));
    let (answers, mut answered) = mpsc::channel(16);
    let (mut lanes, threads) = Lanes::start(&chaos, &clock, &answers).unwrap();
    drop(answers);
    let health = lanes.health();
    lanes.push(Lane::Write, row_of(CONSUMER));
    lanes.push(Lane::Attach, Job::Op(OpId(1), Op::Attach { device: DEVICE }));
    lanes.feed();
    assert_eq!(answered.blocking_recv().unwrap().lane, Lane::Attach);
    drop(lanes);
    let ends: Vec<bool> = threads.into_iter().map(|thread| thread.join().is_ok()).collect();
    assert_eq!(ends, [false, true, true, true]);
    assert_eq!(health.stuck(Boot(12 * Boot::SECOND)), [Lane::Write]);
    assert!(answered.blocking_recv().is_none(), "nobody answers for it");
}
