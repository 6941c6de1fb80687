//! Batches, the one wait, and what a flood of one kind does to the others.

use holdfast_engine::model::{FailReason, HoldReason};

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

/// News of a device that nobody uses.
fn of_no_concern(number: u32) -> LinkNews {
    LinkNews::Present(Link {
        mtu: 1_000 + number,
        ..link(90, "eth0", 90)
    })
}

/// Everything is programmed, and reports and memory have been written.
async fn settled(parts: Parts) -> Rig {
    let rig = Rig::begin(parts);
    rig.with_everything().await;
    rig.until("second", State::Programmed).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    rig
}

/// Passes that so many queued events take; the question for the number is one of them.
async fn passes_for(rig: &Rig, events: u32) -> u64 {
    let before = rig.passes().await;
    for number in 0..events {
        // The queue is not emptied meanwhile: this task does not give way.
        rig.links.try_send(of_no_concern(number)).unwrap();
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    rig.passes().await - before - 1
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_256_events() {
    let rig = settled(Parts::new(quick)).await;
    assert_eq!(passes_for(&rig, 255).await, 1);
    assert_eq!(passes_for(&rig, 257).await, 2);
    assert_eq!(passes_for(&rig, 1_000).await, 4);
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_what_comes_within_a_millisecond() {
    let busy = Arc::new(AtomicU64::new(0));
    let parts = Parts {
        clock: Paused::looked_at({
            let busy = Arc::clone(&busy);
            move || busy.load(Ordering::Relaxed)
        }),
        ..Parts::new(quick)
    };
    let rig = settled(parts).await;
    // Each look at the clock takes 50 us, and an event needs two: ten events are a millisecond.
    busy.store(50 * Boot::MILLI / 1_000, Ordering::Relaxed);
    let passes = passes_for(&rig, 200).await;
    assert!((20..=30).contains(&passes), "{passes}");
}

/// A rig whose consumers hold for ever: nobody has an identity.
async fn held(audit: Duration) -> Rig {
    let rig = Rig::begin(Parts {
        audit,
        ..Parts::new(quick)
    });
    rig.with_everything().await;
    for (ifindex, number) in [(CONSUMER, 1), (OTHER, 2), (PRODUCER, 3)] {
        rig.fake.unregister(ifindex, identity(number).token);
        rig.wakes.send(ifindex).await.unwrap();
    }
    rig.until("first", State::Held(HoldReason::IdentityMissing)).await;
    rig.until("second", State::Held(HoldReason::IdentityMissing))
        .await;
    rig
}

/// Passes, jobs of the lanes, and questions to netlink in ten minutes of rest.
async fn rest(rig: &Rig) -> (u64, u64, usize) {
    // The schedules have come to their longest pause.
    tokio::time::sleep(2 * MINUTE).await;
    rig.asked.lock().unwrap().clear();
    let (passes, jobs) = (rig.passes().await, rig.given.load(Ordering::Relaxed));
    tokio::time::sleep(10 * MINUTE).await;
    let asked = rig.asked.lock().unwrap().len();
    let jobs = rig.given.load(Ordering::Relaxed) - jobs;
    (rig.passes().await - passes - 1, jobs, asked)
}

#[tokio::test(start_paused = true)]
async fn what_is_held_wakes_the_driver_for_its_rechecks_and_asks_netlink_nothing() {
    let rig = held(AUDIT).await;
    let (passes, jobs, asked) = rest(&rig).await;
    println!("held for ten minutes: {passes} passes, {jobs} jobs, {asked} questions to netlink");
    // Twenty rechecks of all together, twenty audits, ten summaries, and the answers of the first two.
    assert!(passes <= 20 * 2 + 20 * 2 + 10, "{passes}");
    assert!((20..=42).contains(&jobs), "{jobs}");
    assert_eq!(asked, 0);
}

#[tokio::test(start_paused = true)]
async fn what_fails_for_ever_costs_what_is_held_costs() {
    let (held, held_jobs, _) = rest(&held(Duration::ZERO).await).await;
    let parts = Parts::new(|job: &Job| match job {
        Job::Op(_, Op::WriteEntries { ifindex: OTHER, .. }) => {
            let message = "EINVAL".to_owned();
            Course::Fails(Duration::from_micros(50), OpError::Refused { message })
        }
        job => quick(job).into(),
    });
    let rig = Rig::begin(Parts {
        audit: Duration::ZERO,
        ..parts
    });
    rig.with_everything().await;
    rig.until("second", State::Failed(FailReason::MapWriteFailed))
        .await;
    let (failing, jobs, asked) = rest(&rig).await;
    println!("ten minutes: failing {failing} passes and {jobs} jobs, held {held} and {held_jobs}");
    assert_eq!(rig.state("first").await, State::Programmed);
    // A try is a write and, as nobody knows what it has left, a delete; what is held is read.
    assert!(jobs <= 2 * held_jobs, "{jobs}, {held_jobs}");
    assert!(failing <= held + held_jobs, "{failing}, {held}");
    assert_eq!(asked, 0);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_one_kind_keeps_no_other_kind_waiting() {
    const FLOOD: u64 = 50_000;
    let (links, sent) = (Arc::new(Mutex::new(None)), Arc::new(AtomicU64::new(0)));
    let parts = Parts {
        // Whenever anybody looks at the clock, as the driver does for each event, the queue is full again.
        clock: Paused::looked_at({
            let (links, sent) = (Arc::clone(&links), Arc::clone(&sent));
            move || {
                let links: Option<mpsc::Sender<LinkNews>> = links.lock().unwrap().clone();
                while let Some(links) = &links {
                    let number = sent.load(Ordering::Relaxed);
                    if number >= FLOOD || links.try_send(of_no_concern(number as u32)).is_err() {
                        break;
                    }
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                0
            }
        }),
        ..Parts::new(quick)
    };
    let rig = settled(parts).await;
    *links.lock().unwrap() = Some(rig.links.clone());
    rig.objects(vec![policy("third", "c", 55)]).await;
    rig.fake.unregister(OTHER, identity(2).token);
    rig.wakes.send(OTHER).await.unwrap();
    while rig.handle.policy(named("third")).await.unwrap().is_none() {
        tokio::task::yield_now().await;
    }
    let waited = sent.load(Ordering::Relaxed);
    println!("an object came through after {waited} events of others");
    assert!(waited < 4 * QUEUE as u64, "{waited}");
    assert!(FLOOD > 10 * QUEUE as u64);
    *links.lock().unwrap() = None;
    rig.until("second", State::Held(HoldReason::IdentityMissing))
        .await;
    rig.until("third", State::Programmed).await;
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_a_lane_is_bounded_whatever_happens_meanwhile() {
    let slow = Arc::new(AtomicU64::new(0));
    let parts = Parts::new({
        let slow = Arc::clone(&slow);
        move |job: &Job| match lane_of(job) {
            Lane::Write => Duration::from_micros(50.max(slow.swap(0, Ordering::Relaxed))),
            _ => quick(job),
        }
    });
    let rig = settled(parts).await;
    // The next write takes five seconds. Meanwhile a carrier comes and goes, and somebody asks for the identities.
    slow.store(5_000_000, Ordering::Relaxed);
    let before = rig.given.load(Ordering::Relaxed);
    for number in 0..20_000_u32 {
        let carrier = Link {
            carrier: number % 2 == 1,
            ..link(CONSUMER, "hfc", 1)
        };
        rig.link(carrier).await;
        rig.wakes.send(CONSUMER).await.unwrap();
    }
    rig.until("first", State::Programmed).await;
    let jobs = rig.given.load(Ordering::Relaxed) - before;
    assert!(jobs <= 30, "{jobs} jobs for one interface");
}
