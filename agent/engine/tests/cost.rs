//! What a change costs follows what it touches, not how much there is.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_types,
    reason = "helpers of tests; here a clock is what measures, not what decides"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant as Clock};

use holdfast_engine::model::*;
use support::*;

/// A bench with room for so many policies.
fn roomy(policies: u32) -> Bench {
    Bench::started_with(Capacity {
        policies: policies + 1,
        slots: 65_536,
        backends: 65_536,
    })
}

/// `policies` policies, each with `consumers` consumers of its own, all served by one producer.
fn world(policies: u32, consumers: u32) -> Bench {
    let mut bench = roomy(policies);
    bench.registry.insert(1, identity(1, 1));
    bench.give(Event::Link(veth(1, "hfdns", 1)));
    let mut objects = vec![ObjectChange::Attachment(attachment("dns", "hfdns", "dns"))];
    for policy_number in 0..policies {
        let app = format!("app-{policy_number}");
        objects.push(ObjectChange::Policy(policy(&app, &app, "dns", &[1])));
        for consumer in 0..consumers {
            let ifindex = 10 + policy_number * consumers + consumer;
            let name = format!("c-{ifindex}");
            bench.registry.insert(ifindex, identity(u64::from(ifindex), 2));
            bench.give(Event::Link(veth(ifindex, &name, 2)));
            objects.push(ObjectChange::Attachment(attachment(&name, &name, &app)));
        }
    }
    bench.give(Event::Objects(objects));
    let start = Clock::now();
    bench.run();
    println!("{policies} x {consumers} from cold: {:?}", start.elapsed());
    bench.pass(5 * SECOND);
    bench.run();
    let counts = bench.engine.view().summary().intents;
    assert_eq!(counts.programmed, u64::from(policies * consumers));
    bench.effects.clear();
    bench
}

/// What was asked for: operations, reads of the registry and how many rows they are about, devices, reports, lines.
type Counts = [usize; 6];

fn counts(ops: usize, effects: &[Effect]) -> Counts {
    let count = |like: fn(&Effect) -> bool| effects.iter().filter(|effect| like(effect)).count();
    let rows = |effect: &Effect| match effect {
        Effect::ReadRegistry(ifindexes) => ifindexes.len(),
        _ => 0,
    };
    [
        ops,
        count(|effect| matches!(effect, Effect::ReadRegistry(_))),
        effects.iter().map(rows).sum(),
        count(|effect| matches!(effect, Effect::AskLink(_))),
        count(|effect| matches!(effect, Effect::Report(_))),
        count(|effect| matches!(effect, Effect::Log(_))),
    ]
}

/// Gives these events, carries everything out, and says what that made the engine ask for and how long it took.
fn touch(bench: &mut Bench, events: Vec<Event>) -> (Counts, Duration) {
    bench.effects.clear();
    let start = Clock::now();
    let mut ops = 0;
    for event in events {
        bench.give(event);
        ops += bench.run().len();
    }
    let took = start.elapsed();
    (counts(ops, &bench.effects), took)
}

/// Everything that can touch one of the intents of [`world`], by what it is; each ends as it began.
fn touches(round: u64) -> [(&'static str, Vec<Event>); 4] {
    let policy = policy("app-7", "app-7", "dns", &[1, 2 + (round % 2) as u8]);
    let edited = Policy {
        generation: round,
        ..policy
    };
    let device = veth(80, "c-80", 2);
    let carrier = |carrier| {
        Event::Link(Link {
            carrier,
            ..device.clone()
        })
    };
    let gone = vec![ObjectChange::AttachmentGone(named("c-80"))];
    let back = vec![ObjectChange::Attachment(attachment("c-80", "c-80", "app-7"))];
    [
        (
            "an edit",
            vec![Event::Objects(vec![ObjectChange::Policy(edited)])],
        ),
        ("a carrier", vec![carrier(false), carrier(true)]),
        ("an identity", vec![Event::Poke(80)]),
        ("an attachment", vec![Event::Objects(gone), Event::Objects(back)]),
    ]
}

#[test]
fn touching_one_of_many_costs_what_touching_one_of_few_costs() {
    let mut few = world(10, 10);
    let mut many = world(10_000, 10);
    let mut best: BTreeMap<&str, [Duration; 2]> = BTreeMap::new();
    let mut asked: BTreeMap<&str, Counts> = BTreeMap::new();
    for round in 2..42 {
        for (what, events) in touches(round) {
            let (few_counts, few_time) = touch(&mut few, events.clone());
            let (many_counts, many_time) = touch(&mut many, events);
            assert_eq!(few_counts, many_counts, "{what}");
            asked.insert(what, many_counts);
            let best = best.entry(what).or_insert([Duration::MAX; 2]);
            *best = [best[0].min(few_time), best[1].min(many_time)];
        }
    }
    for (what, [few, many]) in best {
        let ratio = many.as_secs_f64() / few.as_secs_f64();
        let asked = asked[what];
        println!("{what}: {asked:?}; one of 100 {few:?}, one of 100000 {many:?}: {ratio:.2} (goal 1.2)");
        // The goal is 1.2, the counts are the bar: a time fails only when it is twice off, for machines are busy.
        assert!(many < few * 2, "{what}: {ratio}");
    }
}

/// How 100,000 intents of 10,000 policies are held.
#[derive(Clone, Copy, Debug)]
enum Held {
    /// No device is there.
    Missing,
    /// Everybody's device is there, and nobody's identity; each of them is a consumer of 100 policies.
    Nameless,
}

/// So many devices carry the intents of [`Held::Nameless`].
const SHARED: u32 = 1_000;

fn held(how: Held) -> Bench {
    let mut bench = roomy(10_000);
    let mut objects = Vec::new();
    for policy_number in 0..10_000 {
        // A hundred groups of ten devices, each selected by a hundred policies.
        let app = match how {
            Held::Missing => format!("app-{policy_number}"),
            Held::Nameless => format!("app-{}", policy_number % 100),
        };
        let name = format!("p-{policy_number}");
        objects.push(ObjectChange::Policy(Policy {
            content: Ok(PolicySpec {
                destinations: BTreeSet::from([Destination::Service {
                    address: IpAddr::from([10, 96, 1, (policy_number / 100) as u8]),
                    protocol: Protocol::Udp,
                    port: 53,
                    target_port: None,
                }]),
                ..policy(&name, &app, "dns", &[1]).content.unwrap()
            }),
            ..policy(&name, &app, "dns", &[1])
        }));
        if let Held::Missing = how {
            for consumer in 0..10 {
                let name = format!("c-{policy_number}-{consumer}");
                objects.push(ObjectChange::Attachment(attachment(&name, &name, &app)));
            }
        }
    }
    if let Held::Nameless = how {
        for number in 0..SHARED {
            let name = format!("c-{number}");
            bench.give(Event::Link(veth(10 + number, &name, 2)));
            let app = format!("app-{}", number % 100);
            objects.push(ObjectChange::Attachment(attachment(&name, &name, &app)));
        }
    }
    bench.give(Event::Objects(objects));
    bench.run();
    assert_eq!(bench.engine.view().summary().intents.held, 100_000);
    bench
}

/// Ten minutes in which nothing happens: wake-ups, what was asked for, and how long that took.
fn rest(bench: &mut Bench) -> (u32, Counts, Duration) {
    bench.pass(60 * SECOND);
    bench.effects.clear();
    let end = bench.now.boot.plus(600 * SECOND);
    let (mut wakes, mut busy) = (0, Duration::ZERO);
    while let Some(due) = bench.engine.next_deadline().filter(|due| *due <= end) {
        wakes += 1;
        bench.go_to(due);
        let start = Clock::now();
        bench.give(Event::Tick);
        assert_eq!(bench.poll(), []);
        busy += start.elapsed();
    }
    bench.effects.retain(|effect| {
        let what = match effect {
            Effect::Log(line) => &line.what,
            _ => return true,
        };
        !matches!(what, Happening::Summary { .. })
    });
    (wakes, counts(0, &bench.effects), busy)
}

/// The goal is a thousandth of a core; a build without optimisations, on a busy machine, must not be ten times off.
fn is_at_rest(busy: Duration) -> bool {
    busy < Duration::from_millis(600) * 10
}

#[test]
fn a_hundred_thousand_held_cost_a_wake_up_in_30_s_and_nothing_else() {
    let mut bench = held(Held::Missing);
    let (wakes, asked, busy) = rest(&mut bench);
    println!("without devices: {wakes} wake-ups, {asked:?}, {busy:?} in 10 min");
    // Twenty rechecks, ten summaries.
    assert!(wakes <= 30, "{wakes}");
    assert_eq!(asked, [0; 6]);
    assert!(is_at_rest(busy), "{busy:?}");
}

#[test]
fn a_hundred_thousand_without_an_identity_cost_one_read_of_each_device_in_30_s() {
    let mut bench = held(Held::Nameless);
    let (wakes, asked, busy) = rest(&mut bench);
    println!("without identities: {wakes} wake-ups, {asked:?}, {busy:?} in 10 min");
    assert!(wakes <= 30, "{wakes}");
    let [ops, reads, rows, others @ ..] = asked;
    // One batch at each recheck, and each device once in it although a hundred policies wait for it.
    assert!(reads == 20 || reads == 19, "{reads}");
    assert_eq!((ops, rows, others), (0, reads * SHARED as usize, [0; 3]));
    assert!(is_at_rest(busy), "{busy:?}");
}

/// What a policy costs in the hour after it came.
#[derive(Debug, Default)]
struct Hour {
    wakes: u32,
    /// Operations that failed.
    tries: usize,
    /// All operations, and all reads of the registry.
    asked: usize,
    /// Lines beside summaries.
    lines: usize,
}

/// An hour of a world in which every operation that is like this fails, and everything else is carried out.
fn an_hour(bench: &mut Bench, fails: impl Fn(&Op) -> bool) -> Hour {
    let mut hour = Hour::default();
    let end = bench.now.boot.plus(3_600 * SECOND);
    bench.effects.clear();
    let mut sent = bench.poll();
    loop {
        while !sent.is_empty() || !bench.out.is_empty() {
            hour.tries += sent.iter().filter(|op| fails(op)).count();
            hour.asked += sent.len();
            let failing = bench.out.iter().filter(|(_, op)| fails(op));
            let ids: Vec<OpId> = failing.map(|(id, _)| *id).collect();
            for id in ids {
                bench.out.remove(&id);
                let message = "EINVAL".to_owned();
                bench.give(Event::Answer(id, Err(OpError::Refused { message })));
            }
            sent = bench.yes();
        }
        let Some(due) = bench.engine.next_deadline().filter(|due| *due <= end) else {
            break;
        };
        hour.wakes += 1;
        bench.go_to(due);
        bench.give(Event::Tick);
        sent = bench.poll();
    }
    let [_, reads, ..] = counts(0, &bench.effects);
    hour.asked += reads;
    let lines = bench.log().into_iter();
    hour.lines = lines
        .filter(|line| !matches!(line.what, Happening::Summary { .. }))
        .count();
    hour
}

#[test]
fn design_2_6_a_policy_that_fails_for_ever_costs_what_a_held_one_costs() {
    let bad = |op: &Op| matches!(op, Op::WriteEntries { entries, .. } if entries.contains_key(&key(2)));
    let come = |consumers| Event::Objects(vec![ObjectChange::Policy(policy("bad", consumers, "dns", &[2]))]);

    let mut failing = Bench::programmed(FIRST_FEATURES);
    failing.give(come("web"));
    let failed = an_hour(&mut failing, bad);
    assert_eq!(
        failing.state("bad", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    assert_eq!(failing.state("dns", "web"), State::Programmed);

    let mut holding = Bench::programmed(FIRST_FEATURES);
    holding.give(Event::Link(veth(7, "hflate", 7)));
    holding.give(Event::Objects(vec![ObjectChange::Attachment(attachment(
        "late", "hflate", "late",
    ))]));
    holding.run();
    holding.give(come("late"));
    let held = an_hour(&mut holding, |_| false);
    assert_eq!(
        holding.state("bad", "late"),
        State::Held(HoldReason::IdentityMissing)
    );

    println!("in an hour: failing {failed:?}, held {held:?}");
    // 0, 1, 3, 7, 15, 31 s, then every 30 s.
    assert_eq!(failed.tries, 6 + (3_600 - 31) / 30);
    // A try is a write and, as nobody knows what it has left, a delete; what is held is read.
    assert!(failed.asked <= 2 * held.asked, "{failed:?} {held:?}");
    // The hold is summed up once a minute besides.
    assert!(failed.wakes <= held.wakes, "{failed:?} {held:?}");
    assert_eq!((failed.lines, held.lines), (1, 1));
}
