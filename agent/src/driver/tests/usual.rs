//! What a driver does when everything goes as it should, or a lane is slow.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{Device, FailReason, HoldReason, Identity, Lane, Link, Op, State, Token};
use holdfast_engine::view::Settled;

use super::*;

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
