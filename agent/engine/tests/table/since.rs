//! Since when each link of a consumer's chain is as it is.

use holdfast_engine::explain::{Asked, Explained};
use holdfast_engine::model::*;
use holdfast_engine::since::Since;

use crate::support::*;

/// Policy `dns` of consumer `web` and producer `dns`, programmed a second after the start.
fn programmed() -> Bench {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.pass(SECOND);
    bench.program();
    bench
}

fn why(bench: &Bench) -> Explained {
    let view = bench.engine.view();
    view.explain(&named("dns"), &Asked::One(named("web"))).unwrap()
}

/// Seconds since then; negative: since then at least.
fn age(bench: &Bench, since: Option<Since>) -> Option<i64> {
    let since = since?;
    let age = i64::try_from(bench.now.boot.since(since.at.boot) / SECOND).unwrap();
    Some(if since.earlier { -age } else { age })
}

/// Of interface, identity, attach, position, row and entries.
fn ages(bench: &Bench) -> [Option<i64>; 6] {
    let times = why(bench).consumers[0].times;
    [
        times.interface,
        times.identity,
        times.attach,
        times.position,
        times.row,
        times.entries,
    ]
    .map(|since| age(bench, since))
}

#[test]
fn each_link_of_the_chain_has_its_own_time() {
    let mut bench = programmed();
    bench.pass(100 * SECOND);
    assert_eq!(ages(&bench), [Some(100); 6]);
    assert_eq!(age(&bench, Some(why(&bench).seen)), Some(100));

    // The identity goes: what hangs on it is of now, the rest as old as before.
    bench.registry.remove(&5);
    bench.give(Event::Poke(5));
    bench.run();
    bench.pass(10 * SECOND);
    assert_eq!(
        ages(&bench),
        [Some(110), Some(10), Some(110), Some(110), Some(10), Some(110)]
    );

    // So does the interface: it is there, and not up.
    let mut link = veth(5, "hfweb", 5);
    link.up = false;
    bench.give(Event::Link(link));
    bench.run();
    bench.pass(SECOND);
    assert_eq!(ages(&bench)[..2], [Some(1), Some(11)]);

    // Gone: nobody can tell since when what does not exist has not got a program.
    bench.give(Event::LinkGone(5));
    bench.run();
    assert_eq!(age(&bench, why(&bench).consumers[0].times.attach), None);
}

#[test]
fn an_edit_moves_what_it_changes() {
    let mut bench = programmed();
    bench.pass(100 * SECOND);
    let mut edited = policy("dns", "web", "dns", &[1, 2]);
    edited.generation = 2;
    bench.give(Event::Objects(vec![ObjectChange::Policy(edited)]));
    bench.run();
    bench.pass(10 * SECOND);
    assert_eq!(
        ages(&bench),
        [Some(110), Some(110), Some(110), Some(110), Some(110), Some(10)]
    );
    assert_eq!(age(&bench, Some(why(&bench).seen)), Some(10));
}

#[test]
fn producers_come_and_go() {
    let mut bench = programmed();
    bench.pass(100 * SECOND);
    assert_eq!(age(&bench, why(&bench).set.supplied), Some(100));
    bench.registry.remove(&6);
    bench.give(Event::Poke(6));
    bench.run();
    bench.pass(10 * SECOND);
    let set = why(&bench).set;
    assert_eq!((set.ready, age(&bench, set.supplied)), (0, Some(10)));
    assert_eq!(set.waiting, None);
}

/// What a life finds at its start may be so since long before.
#[test]
fn what_is_found_at_the_start_is_older() {
    let mut bench = programmed();
    bench.pass(100 * SECOND);
    bench.crash();
    bench.wake();
    bench.run();
    bench.pass(10 * SECOND);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(ages(&bench), [Some(-10); 6]);
    assert_eq!(age(&bench, Some(why(&bench).seen)), Some(-10));
    bench.registry.remove(&5);
    bench.give(Event::Poke(5));
    bench.run();
    assert_eq!(
        ages(&bench),
        [Some(-10), Some(0), Some(-10), Some(-10), Some(0), Some(-10)]
    );
}
