//! A life that ends at any point, told to or not: the next one adopts what it finds, and gets to the same end.

use super::world::{Action, Content, Guard, Outside};
use super::*;

/// Until a step has done all that it does.
const QUIET: Duration = Duration::from_millis(300);
/// Until what drains has gone, and the schedules have come round.
const LONG: Duration = Duration::from_secs(200);
/// Within this time a process ends that is told to: the batches that the lanes have begun.
const BOUND: Duration = Duration::from_millis(50);

const SECOND_PRODUCER: Ifindex = 22;

/// What happens in a run: everybody comes, a switch, an incarnation, a hold, and who goes.
fn steps() -> Vec<Action> {
    vec![
        Action::Attachment(CONSUMER, "c"),
        Action::Attachment(PRODUCER, "p"),
        Action::Policy("first", "c", "p"),
        Action::Device(PRODUCER, 3),
        Action::Device(CONSUMER, 1),
        Action::Attachment(OTHER, "o"),
        Action::Device(OTHER, 2),
        Action::Policy("second", "o", "p"),
        Action::Attachment(SECOND_PRODUCER, "q"),
        Action::Device(SECOND_PRODUCER, 4),
        Action::Policy("first", "c", "q"),
        Action::Token(OTHER, 102),
        Action::Carrier(CONSUMER, false),
        Action::Carrier(CONSUMER, true),
        Action::AttachmentGone(OTHER),
        Action::PolicyGone("second"),
    ]
}

fn takes(job: &Job) -> Duration {
    match lane_of(job) {
        Lane::Attach => Duration::from_millis(10),
        Lane::Write | Lane::Prove | Lane::Audit => Duration::from_micros(50),
    }
}

/// Lives through steps. `done` is how many have happened.
async fn live(rig: &Rig, outside: &mut Outside, steps: &[Action], done: &mut usize) {
    for step in &steps[*done..] {
        *done += 1;
        for news in outside.apply(step) {
            rig.give(news).await;
        }
        tokio::time::sleep(QUIET).await;
    }
}

/// A whole run without an end: how many points it has, and what the kernel has then.
async fn undisturbed(steps: &[Action]) -> (usize, Content) {
    let mut rig = Rig::start(takes);
    let mut outside = Outside::new(&rig.fake);
    rig.tell(&outside).await;
    live(&rig, &mut outside, steps, &mut 0).await;
    let points = rig.points.reached.load(Ordering::Relaxed);
    tokio::time::sleep(LONG).await;
    rig.assert_right(&outside, "undisturbed").await;
    rig.end_all().await;
    (points, Content::of(&rig.fake))
}

/// Since when the policy whose consumer never changes is programmed, if it is.
fn programmed_since(report: &Snapshot) -> Option<Now> {
    let mut policies = report.policies.iter();
    let first = policies.find(|policy| policy.name == named("first"))?;
    (first.state == State::Programmed).then_some(first.since)
}

/// One run that ends at a point and is gone on with by a second life.
async fn disturbed(steps: &[Action], point: usize, crash: bool) -> Content {
    let when = format!("point {point}, {}", if crash { "a crash" } else { "told to end" });
    let parts = Parts {
        points: Arc::new(Points {
            at: Some(point),
            freeze: crash,
            ..Points::default()
        }),
        ..Parts::new(takes)
    };
    let mut first = Rig::begin(parts.clone());
    let mut outside = Outside::new(&first.fake);
    let mut done = 0;
    tokio::select! {
        biased;
        () = parts.points.there.notified() => {}
        () = async {
            first.tell(&outside).await;
            live(&first, &mut outside, steps, &mut done).await;
        } => panic!("{when}: never reached"),
    }
    let guard = Guard::of(&outside);
    let (remembered, carried_out) = (first.remembered.clone(), Arc::clone(&first.carried_out));
    let reports = first.reports.clone();
    if crash {
        first.crash().await;
    } else {
        let told = Instant::now();
        first.end_all().await;
        assert!(told.elapsed() <= BOUND, "{when}: {:?}", told.elapsed());
    }
    guard.look(&parts.fake);
    guard.assert_kept(&when);
    let served_since = programmed_since(&reports.borrow());

    let of_the_first = carried_out.load(Ordering::Relaxed);
    let remembered = remembered.borrow().to_vec();
    let mut second = Rig::begin(Parts {
        remembered,
        points: Arc::default(),
        watch: {
            let guard = Arc::clone(&guard);
            Arc::new(move |fake| guard.look(fake))
        },
        ..parts
    });
    second.tell(&outside).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    guard.assert_kept(&when);
    second.assert_right(&outside, &when).await;
    if let (Some(since), Some(still)) = (served_since, programmed_since(&second.reports.borrow())) {
        assert!(crash || since == still, "{when}: {since:?} becomes {still:?}");
    }
    guard.released();
    live(&second, &mut outside, steps, &mut done).await;
    tokio::time::sleep(LONG).await;
    second.assert_right(&outside, &when).await;
    second.end_all().await;
    assert_eq!(
        carried_out.load(Ordering::Relaxed),
        of_the_first,
        "{when}: an operation of the first life"
    );
    Content::of(&second.fake)
}

async fn at_every_point(crash: bool) {
    let steps = steps();
    let (points, content) = undisturbed(&steps).await;
    assert!(points > 120, "{points}");
    for point in 0..points {
        assert_eq!(disturbed(&steps, point, crash).await, content, "point {point}");
    }
    println!("{points} points");
}

#[tokio::test(start_paused = true)]
async fn told_to_end_at_any_point_it_ends_and_the_next_life_gets_to_the_same_end() {
    at_every_point(false).await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_at_any_point_is_mended_by_the_next_life() {
    at_every_point(true).await;
}
