//! What a journal keeps, and what a replay makes of it. (That it leads to the same decisions, whatever happens in a life,
//! is shown in the model world.)

use std::borrow::Cow;

use holdfast_engine::journal::{At, Made, Played, Record, Replay};
use holdfast_engine::model::*;
use proptest::prelude::*;

use crate::support::journal::{Journal, read, state, written};
use crate::support::*;

fn moment(boot: u64, wall_ms: i64) -> Now {
    Now {
        boot: Boot(boot),
        wall_ms,
    }
}

/// What is read back after `last`, through the bytes of a record.
fn back(last: Now, now: Now) -> Now {
    let bytes = written(&Record::Polled(At::from(last, now)));
    match read(&bytes) {
        Record::Polled(at) => at.after(last),
        record => unreachable!("{record:?}"),
    }
}

#[test]
fn the_wall_clock_may_step_and_each_moment_is_what_it_was() {
    let last = moment(5 * SECOND + 999_999, 1_700_000_000_000);
    // Where both clocks run alike, nothing is written but the distance.
    let next = moment(7 * SECOND + 999_999, 1_700_000_002_000);
    assert_eq!(written(&Record::Polled(At::from(last, last))), [3, 0, 0]);
    assert_eq!(written(&Record::Polled(At::from(last, next))).len(), 7);
    for now in [
        last,
        next,
        // Put back by an hour, and to before 1970.
        moment(6 * SECOND, 1_699_996_400_000),
        moment(6 * SECOND, -1),
        // Put ahead.
        moment(6 * SECOND, 1_900_000_000_000),
        // As wrong as it can be.
        moment(u64::MAX, i64::MIN),
        moment(u64::MAX, i64::MAX),
    ] {
        assert_eq!(back(last, now), now);
    }
    // The boot clock never goes back. If it were to, time would stand still, and the wall clock would not mind.
    assert_eq!(back(last, moment(SECOND, 7)), Now { wall_ms: 7, ..last });
}

proptest! {
    #[test]
    fn every_moment_is_read_back(boot: u64, wall: i64, then: u64, wall_then: i64) {
        let (last, now) = (moment(boot.min(then), wall), moment(boot.max(then), wall_then));
        prop_assert_eq!(back(last, now), now);
    }
}

const HASHES: Hashes = Hashes {
    name: name_hash,
    uid: uid_hash,
};

/// A journal of two lives: policy `dns` is programmed, its producer goes, the process dies, the next one finds all that.
fn two_lives(config: Config) -> (Bench, Journal) {
    let mut bench = Bench::recorded(config);
    bench.give(Event::Adopted(Box::default()));
    bench.give(Event::LinkDump(Vec::new()));
    bench.give(Event::SourceComplete);
    bench.poll();
    bench.program();
    // By a wall clock that is put back.
    bench.pass(SECOND);
    bench.now.wall_ms -= 3_600_000;
    bench.registry.remove(&6);
    bench.give(Event::Poke(6));
    bench.run();
    bench.pass(SECOND);
    bench.crash();
    bench.wake();
    bench.run();
    let journal = bench.journal.clone().unwrap();
    (bench, journal)
}

fn play(replay: &mut Replay, journal: &Journal, from: usize, to: usize) -> Vec<Played> {
    let records = journal.records[from..to].iter();
    records.map(|kept| replay.play(read(&kept.bytes))).collect()
}

fn brought(journal: &Journal, from: usize, to: usize) -> Vec<Played> {
    let records = journal.records[from..to].iter();
    records.map(|kept| kept.brings.clone()).collect()
}

/// Where the second life begins.
fn second_life(journal: &Journal) -> usize {
    let lives = journal.records.iter().enumerate();
    let mut lives = lives.filter(|(_, kept)| kept.brings == Played::Began);
    lives.nth(1).unwrap().0
}

#[test]
fn two_lives_are_played_as_they_were_lived() {
    let (bench, journal) = two_lives(config(FIRST_FEATURES));
    journal.check("two lives", HASHES);
    let mut replay = Replay::new(HASHES);
    assert!(replay.engine().is_none());
    assert_eq!(replay.now(), moment(0, 0));
    let all = journal.records.len();
    assert_eq!(play(&mut replay, &journal, 0, all), brought(&journal, 0, all));
    assert_eq!(replay.now(), bench.now);
    let engine = replay.engine().unwrap();
    assert!(
        state(engine, bench.now) == state(&bench.engine, bench.now),
        "the same engine"
    );
    assert_eq!(engine.view().policy(&named("dns")).unwrap(), bench.policy("dns"));
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
}

#[test]
fn from_the_state_after_any_poll_it_goes_on_as_it_went() {
    let (_, journal) = two_lives(config(FIRST_FEATURES));
    let mut whole = Replay::new(HASHES);
    let all = journal.records.len();
    for (number, kept) in journal.records.iter().enumerate() {
        whole.play(read(&kept.bytes));
        if !matches!(kept.brings, Played::Decided(_)) {
            continue;
        }
        let cut = state(whole.engine().unwrap(), whole.now());
        let mut replay = Replay::new(HASHES);
        assert_eq!(replay.play(read(&cut)), Played::Resumed);
        assert_eq!(replay.now(), kept.now);
        let from = number + 1;
        assert_eq!(
            play(&mut replay, &journal, from, all),
            brought(&journal, from, all),
            "from record {from} of {all}"
        );
    }
}

#[test]
fn what_follows_a_gap_means_nothing_until_a_life_begins_or_a_state_is_read() {
    let (bench, journal) = two_lives(config(FIRST_FEATURES));
    let (life, all) = (second_life(&journal), journal.records.len());
    let meaningless = |count| vec![Played::Meaningless; count];

    // Who begins in the middle of a life knows nothing of it.
    let mut replay = Replay::new(HASHES);
    assert_eq!(play(&mut replay, &journal, 5, life), meaningless(life - 5));
    assert!(replay.engine().is_none());
    assert_eq!(
        play(&mut replay, &journal, life, all),
        brought(&journal, life, all)
    );

    // So is it after a gap, which is told with its length.
    let mut replay = Replay::new(HASHES);
    play(&mut replay, &journal, 0, 10);
    let lost = read(&written(&Record::Lost(7)));
    assert_eq!(replay.play(lost), Played::Lost(7));
    assert!(replay.engine().is_none());
    assert_eq!(play(&mut replay, &journal, 17, life), meaningless(life - 17));
    assert_eq!(
        play(&mut replay, &journal, life, all),
        brought(&journal, life, all)
    );

    // And where somebody who reads sees that the end of a segment is missing.
    replay.interrupt();
    assert!(replay.engine().is_none());
    assert_eq!(replay.play(Record::Polled(At::default())), Played::Meaningless);
    assert_eq!(
        replay.play(Record::Handled(At::default(), Cow::Owned(Event::Tick))),
        Played::Meaningless
    );
    let cut = state(&bench.engine, bench.now);
    assert_eq!(replay.play(read(&cut)), Played::Resumed);
    assert_eq!(
        replay.play(Record::Polled(At::default())),
        Played::Decided(Vec::new())
    );
}

/// What an engine was made with is in the journal, all but its hashes: it decides by them.
#[test]
fn an_engine_is_made_again_with_what_it_was_made_with() {
    let usual = config(ALL_FEATURES);
    let small = Capacity {
        policies: 0,
        ..usual.capacity
    };
    let others = [
        config(FIRST_FEATURES),
        Config {
            capacity: small,
            ..usual.clone()
        },
        Config {
            neighbour_only: true,
            ..usual.clone()
        },
        Config {
            audit_every: 30 * SECOND,
            ..usual.clone()
        },
    ];
    let mut bench = Bench::recorded(usual.clone());
    bench.complete();
    bench.program();
    let mut ranges = policy("ranges", "web", "dns", &[]);
    if let Ok(spec) = &mut ranges.content {
        let address = [10, 0, 0, 0].into();
        spec.destinations
            .insert(Destination::Prefix { address, length: 8 });
    }
    bench.give(Event::Objects(vec![ObjectChange::Policy(ranges)]));
    bench.run();
    let journal = bench.journal.take().unwrap();
    let all = journal.records.len();
    let decided = |config: &Config| {
        let mut replay = Replay::new(HASHES);
        let made = Record::Made(journal.records[0].now, Made::of(config));
        assert_eq!(replay.play(read(&written(&made))), Played::Began);
        play(&mut replay, &journal, 1, all)
    };
    assert_eq!(decided(&usual), brought(&journal, 1, all));
    for other in &others {
        assert_ne!(decided(other), brought(&journal, 1, all), "{other:?}");
    }
}
