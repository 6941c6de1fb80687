//! Reports and lease at an API server in this process, on a paused clock.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::{Boot, HoldReason, Now, ObjectName, Origin, State, Uid};
use holdfast_engine::view::{Counts, PolicyView};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{Config, spawn};
use crate::api::hash::uid_hash;
use crate::api::node_report::Epoch;
use crate::apiserver::mock::{Fault, Mock};
use crate::driver::Snapshot;
use crate::report::Stamps;
use crate::report::file::WriteCounts;

const SOON: Duration = Duration::from_secs(1);

fn uid(number: usize) -> Uid {
    Uid(format!(
        "{:08x}-0000-4000-8000-000000000000",
        (number as u32).wrapping_mul(0x9e37_79b1)
    ))
}

fn policy(number: usize, generation: u64) -> PolicyView {
    PolicyView {
        name: ObjectName {
            namespace: "shop".to_owned(),
            name: format!("p{number}"),
        },
        uid: uid(number),
        generation,
        origin: None,
        covers: 0xff,
        state: State::Programmed,
        intents: Counts {
            programmed: 1,
            ..Counts::default()
        },
        since: Now {
            boot: Boot(Boot::SECOND),
            wall_ms: 1_000,
        },
        held_since: None,
        serving: None,
        message: None,
        applied: generation,
        proven: generation,
        behind_since: None,
    }
}

fn held(number: usize, generation: u64) -> PolicyView {
    PolicyView {
        state: State::Held(HoldReason::InterfaceMissing),
        message: Some("ü".repeat(2_000)),
        ..policy(number, generation)
    }
}

/// The reporting half of an agent.
struct Rig {
    mock: Mock,
    node: String,
    send: watch::Sender<Arc<Snapshot>>,
    counts: WriteCounts,
    tasks: [JoinHandle<()>; 2],
}

impl Rig {
    fn new(mock: &Mock, node: &str, epoch: &str) -> Self {
        let (send, receive) = watch::channel(Arc::new(Snapshot::default()));
        let counts = WriteCounts::default();
        let config = Config {
            api: mock.api(),
            node: node.to_owned(),
            epoch: Epoch {
                id: epoch.to_owned(),
                boot_id: "boot".to_owned(),
                agent_start: "2026-01-01T00:00:00.000Z".to_owned(),
                agent_version: "1".to_owned(),
                layout_version: 1,
            },
            stamps: Stamps::default(),
        };
        let tasks = spawn(config, receive, counts.clone(), Arc::default());
        Self {
            mock: mock.clone(),
            node: node.to_owned(),
            send,
            counts,
            tasks,
        }
    }

    fn show(&self, policies: Vec<PolicyView>) {
        self.show_removing(policies, &[]);
    }

    fn show_removing(&self, policies: Vec<PolicyView>, removing: &[Uid]) {
        let removing: BTreeSet<_> = removing.iter().map(uid_hash).collect();
        self.send.send_replace(Arc::new(Snapshot {
            policies,
            removing,
            settled: true,
            ..Snapshot::default()
        }));
    }

    fn report(&self) -> Option<Value> {
        self.mock.get("nodereports", "", &format!("{}.r", self.node))
    }

    fn ack(&self, number: usize) -> Option<String> {
        let report = self.report()?;
        Some(report["programmed"][&uid(number).0].as_str()?.to_owned())
    }

    fn lease(&self) -> Option<Value> {
        self.mock.get("leases", super::LEASES, &self.node)
    }

    fn writes(&self) -> usize {
        self.mock.asked("POST", "nodereports").len() + self.patches().len()
    }

    fn patches(&self) -> Vec<Value> {
        let asked = self.mock.asked("PATCH", "nodereports").into_iter();
        asked.map(|asked| asked.body).collect()
    }

    async fn until(&self, what: &str, most: Duration, so: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !so(self) {
            assert!(
                began.elapsed() < most,
                "{what}: not within {most:?}: {:#?}",
                self.report()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn end(self) {
        drop(self.send);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn f07_an_edit_that_changes_nothing_here_is_acknowledged_by_one_small_write() {
    let mock = Mock::default();
    mock.bind("edge-1");
    let rig = Rig::new(&mock, "edge-1", "e1");
    let mut copy = policy(2, 3);
    copy.origin = Some(Origin {
        uid: Uid("hub".to_owned()),
        generation: 8,
    });
    rig.show(vec![policy(1, 1), copy.clone()]);
    rig.until("reported", SOON, |rig| rig.ack(1).is_some()).await;
    assert_eq!(rig.ack(1).unwrap(), "1 00000000000000ff");
    // F26: what is a copy carries its origin's.
    assert_eq!(rig.ack(2).unwrap(), "3 00000000000000ff hub 8");
    let report = rig.report().unwrap();
    assert_eq!(report["node"], "edge-1");
    assert_eq!(report["epoch"]["id"], "e1");
    assert_eq!(report["metadata"]["ownerReferences"][0]["uid"], "uid-of-node");
    assert_eq!(rig.writes(), 1);

    rig.show(vec![policy(1, 2), copy.clone()]);
    rig.until("acknowledged", SOON, |rig| {
        rig.ack(1).as_deref() == Some("2 00000000000000ff")
    })
    .await;
    let patch = rig.patches().pop().unwrap();
    assert_eq!(patch["programmed"].as_object().unwrap().len(), 1);
    // The same again is nothing.
    for _ in 0..10 {
        rig.show(vec![policy(1, 2), copy.clone()]);
        sleep(SOON).await;
    }
    assert_eq!(rig.writes(), 2);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn f16_at_rest_nothing_is_written_but_the_lease() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    rig.show(vec![policy(1, 1), held(2, 1)]);
    sleep(Duration::from_secs(5)).await;
    mock.forget();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(rig.writes(), 0);
    assert!(mock.asked("PATCH", "nodereports").is_empty());
    let renewals = mock.asked("PATCH", "leases").len();
    assert!((29..=34).contains(&renewals), "{renewals}");
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_policies_that_churn_are_one_write_a_second_and_none_when_quiet() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    let all = |generation| {
        (0..10_000)
            .map(|number| policy(number, generation))
            .collect::<Vec<_>>()
    };
    let began = Instant::now();
    for generation in 1..=40 {
        rig.show(all(generation));
        sleep(Duration::from_millis(500)).await;
    }
    let churned = began.elapsed().as_secs() as usize;
    let writes = rig.writes();
    assert!(writes <= churned + 5, "{writes} writes in {churned} s");
    assert!(writes >= churned - 2, "{writes} writes in {churned} s");
    // All is said in the end, by reports that are not too large, and then nothing.
    sleep(Duration::from_secs(600)).await;
    let names = mock.names("nodereports");
    let mut said = 0;
    for name in &names {
        let report = mock.get("nodereports", "", name).unwrap();
        let acks = report["programmed"].as_object().unwrap();
        assert!(acks.values().all(|ack| *ack == "40 00000000000000ff"), "{name}");
        said += acks.len();
        assert!(
            report.to_string().len() < 20 << 10,
            "{name}: {}",
            report.to_string().len()
        );
    }
    assert_eq!(said, 10_000);
    mock.forget();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(rig.writes(), 0);
}

#[tokio::test(start_paused = true)]
async fn f45_after_a_reboot_the_lease_waits_for_the_first_pass_and_its_report() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    rig.show(vec![policy(1, 1)]);
    rig.until("the lease", Duration::from_secs(2), |rig| rig.lease().is_some())
        .await;
    assert_eq!(rig.lease().unwrap()["spec"]["holderIdentity"], "edge-1/e1");
    rig.end().await;

    let rig = Rig::new(&mock, "edge-1", "e2");
    // The first pass takes its time: neither the old report nor the old lease is touched.
    let before = (rig.report(), rig.lease());
    sleep(Duration::from_secs(60)).await;
    assert_eq!((rig.report(), rig.lease()), before);
    // Its report is lost at first.
    rig.show(vec![policy(1, 1)]);
    mock.plan("PATCH", "nodereports/edge-1.r", 40, Fault::Status(500));
    sleep(Duration::from_secs(20)).await;
    assert_eq!(rig.lease(), before.1);
    mock.heal();
    rig.until("the report", Duration::from_secs(40), |rig| {
        rig.report().is_some_and(|report| report["epoch"]["id"] == "e2")
    })
    .await;
    rig.until("the lease", SOON, |rig| {
        rig.lease()
            .is_some_and(|lease| lease["spec"]["holderIdentity"] == "edge-1/e2")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f18_what_was_not_written_is_not_written_later_only_the_latest_is() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    rig.show(vec![policy(1, 1)]);
    rig.until("reported", SOON, |rig| rig.ack(1).is_some()).await;
    for verb in ["GET", "PATCH", "POST"] {
        mock.plan(verb, "", 1_000_000, Fault::Hang);
    }
    for generation in 2..=60 {
        rig.show(vec![policy(1, generation)]);
        sleep(Duration::from_secs(30)).await;
    }
    assert!(rig.counts.by_result()["error"] > 10);
    mock.forget();
    mock.heal();
    rig.until("the latest", Duration::from_secs(45), |rig| {
        rig.ack(1).as_deref() == Some("60 00000000000000ff")
    })
    .await;
    assert!(
        rig.patches()
            .iter()
            .all(|patch| patch["programmed"][&uid(1).0] == "60 00000000000000ff")
    );
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_is_lost_is_read_back_and_not_repeated_blindly() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    mock.plan("POST", "nodereports", 1, Fault::Lost);
    rig.show(vec![policy(1, 1)]);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(mock.asked("POST", "nodereports").len(), 1);
    assert_eq!(rig.patches().len(), 0, "it was written");
    assert!(rig.lease().is_some());
    mock.plan("PATCH", "nodereports", 1, Fault::Lost);
    rig.show(vec![policy(1, 2)]);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(rig.patches().len(), 1);
    assert_eq!(rig.ack(1).as_deref(), Some("2 00000000000000ff"));
    // Somebody else's write in between.
    let mut foreign = rig.report().unwrap();
    foreign["programmed"] = serde_json::json!({"other": "1 0000000000000000"});
    mock.put("nodereports", foreign);
    rig.show(vec![policy(1, 3)]);
    rig.until("put right", Duration::from_secs(5), |rig| {
        rig.report()
            .is_some_and(|report| report["programmed"].as_object().unwrap().len() == 1)
            && rig.ack(1).as_deref() == Some("3 00000000000000ff")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f12_a_policy_that_is_gone_is_said_to_leave_until_the_kernel_has_nothing_of_it() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    rig.show(vec![policy(1, 1), policy(2, 1)]);
    rig.until("reported", SOON, |rig| rig.ack(2).is_some()).await;
    rig.show_removing(vec![policy(1, 1)], &[uid(2)]);
    rig.until("it leaves", SOON, |rig| rig.ack(2).is_none()).await;
    let others = rig.report().unwrap()["others"].clone();
    assert_eq!(others[0]["state"], "Removing");
    assert_eq!(others[0]["uid"], uid(2).0.as_str());
    sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.report().unwrap()["others"], others);
    rig.show(vec![policy(1, 1)]);
    rig.until("it is gone", SOON, |rig| {
        rig.report().unwrap()["others"] == serde_json::json!([])
    })
    .await;
    assert_eq!(rig.ack(1).as_deref(), Some("1 00000000000000ff"));
}

#[tokio::test(start_paused = true)]
async fn a_success_is_withdrawn_and_a_message_has_a_bound() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    rig.show(vec![policy(1, 1)]);
    rig.until("reported", SOON, |rig| rig.ack(1).is_some()).await;
    rig.show(vec![held(1, 1)]);
    rig.until("withdrawn", SOON, |rig| rig.ack(1).is_none()).await;
    let other = rig.report().unwrap()["others"][0].clone();
    assert_eq!(
        (&other["state"], &other["reason"]),
        (&"Held".into(), &"InterfaceMissing".into())
    );
    let message = other["message"].as_str().unwrap();
    assert!(
        message.len() <= 1_024 && message.ends_with("..."),
        "{}",
        message.len()
    );
}

#[tokio::test(start_paused = true)]
async fn f51_reports_and_leases_that_are_not_to_be_had_are_tried_again() {
    let mock = Mock::default();
    let rig = Rig::new(&mock, "edge-1", "e1");
    for verb in ["GET", "PATCH", "POST"] {
        mock.plan(verb, "nodereports", 1_000, Fault::Status(404));
    }
    rig.show(vec![policy(1, 1)]);
    sleep(Duration::from_secs(600)).await;
    assert!(rig.lease().is_none(), "nothing is reported");
    let tries = mock.asked("GET", "nodereports").len();
    assert!((20..=60).contains(&tries), "{tries}");
    mock.heal();
    mock.plan("PATCH", "leases", 1_000, Fault::Status(403));
    rig.until("the report without a lease", Duration::from_secs(40), |rig| {
        rig.ack(1).is_some()
    })
    .await;
    sleep(Duration::from_secs(300)).await;
    rig.show(vec![policy(1, 2)]);
    rig.until("reports go on", SOON, |rig| {
        rig.ack(1).as_deref() == Some("2 00000000000000ff")
    })
    .await;
    assert!(rig.lease().is_none());
    mock.heal();
    rig.until("the lease", Duration::from_secs(40), |rig| rig.lease().is_some())
        .await;
    // The report is deleted under it: it comes back with the next word.
    mock.delete("nodereports", "", "edge-1.r");
    rig.show(vec![policy(1, 3)]);
    rig.until("made again", Duration::from_secs(5), |rig| {
        rig.ack(1).as_deref() == Some("3 00000000000000ff")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f15_two_hundred_agents_acknowledge_one_policy_at_once() {
    let mock = Mock::default();
    let rigs: Vec<Rig> = (0..200)
        .map(|number| Rig::new(&mock, &format!("n{number}"), "e"))
        .collect();
    for rig in &rigs {
        rig.show(vec![policy(1, 1)]);
    }
    sleep(Duration::from_secs(10)).await;
    for generation in 2..=4 {
        mock.forget();
        let began = Instant::now();
        // The policy comes, is pending for a moment, and is programmed.
        for rig in &rigs {
            let mut pending = policy(1, generation);
            pending.state = State::Pending;
            rig.show(vec![pending]);
        }
        sleep(Duration::from_millis(20)).await;
        for rig in &rigs {
            rig.show(vec![policy(1, generation)]);
        }
        let wanted = format!("{generation} 00000000000000ff");
        for rig in &rigs {
            rig.until("acknowledged", Duration::from_secs(30), |rig| {
                rig.ack(1).as_ref() == Some(&wanted)
            })
            .await;
        }
        sleep(Duration::from_secs(10)).await;
        let mut times: Vec<Duration> = Vec::new();
        for rig in &rigs {
            let own = format!("nodereports/{}.r", rig.node);
            let asked = mock.asked("PATCH", &own);
            let asked: Vec<_> = asked.iter().filter(|asked| asked.path.ends_with(&own)).collect();
            assert!((1..=2).contains(&asked.len()), "{}: {}", rig.node, asked.len());
            times.extend(asked.iter().map(|asked| asked.at - began));
        }
        times.sort();
        assert!(
            times[times.len() - 1] - times[0] > Duration::from_millis(100),
            "all at once"
        );
    }
}
