//! What is wanted, believed and there, thing by thing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use holdfast_engine::belief::{Belief, Difference};
use holdfast_engine::compare::{Compared, NoSuchPolicy, Page, Scope, Thing, Value};
use holdfast_engine::model::*;

use crate::support::*;

const NOTHING: [&str; 0] = [];
const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

/// Consumer `web` (device 5, with an address) of `dns` and `log`, consumer `api` (device 7) of `tea`, all served by
/// producer `dns` (device 6); everything is programmed, and the audits of the start are over.
fn programmed() -> Bench {
    let mut bench = Bench::audited(ALL_FEATURES, 30 * SECOND);
    bench.give(Event::Locals(BTreeSet::from([OWN])));
    bench.three_devices();
    bench.give(Event::Objects(vec![
        ObjectChange::Policy(policy("dns", "web", "dns", &[1, 2])),
        ObjectChange::Policy(policy("log", "web", "dns", &[3])),
        ObjectChange::Policy(policy("tea", "api", "dns", &[4])),
    ]));
    rest(&mut bench);
    for (policy, consumer) in [("dns", "web"), ("log", "web"), ("tea", "api")] {
        assert_eq!(bench.state(policy, consumer), State::Programmed);
    }
    bench
}

/// Everything that is out is answered, audits too.
fn rest(bench: &mut Bench) {
    bench.run();
    while !bench.audits.is_empty() {
        bench.audit();
        bench.run();
    }
}

/// An audit sees everything, and what is sent upon it is not answered.
fn audit(bench: &mut Bench) {
    let due = bench.engine.next_deadline().unwrap();
    bench.go_to(due.max(bench.now.boot));
    bench.give(Event::Tick);
    bench.poll();
    bench.audit();
}

fn compare(bench: &Bench, scope: &Scope) -> Page {
    bench.engine.view().compare(scope).unwrap()
}

/// All pages, in the order in which they lead to each other.
fn pages(bench: &Bench) -> Vec<Page> {
    let mut pages = vec![compare(bench, &Scope::Interfaces(0))];
    while let Some(next) = pages.last().unwrap().next.clone() {
        assert!(pages.len() < 50, "never at the end: {next:?}");
        pages.push(compare(bench, &next));
    }
    pages
}

/// Everything.
fn whole(bench: &Bench) -> Vec<Compared> {
    pages(bench).into_iter().flat_map(|page| page.things).collect()
}

/// What is in the kernel, as whoever compares finds it.
fn there(bench: &Bench, compared: &Compared) -> Value {
    let found = bench.look(std::slice::from_ref(&compared.look));
    match &found[..] {
        [] => compared.looked.clone(),
        [difference] => {
            let (thing, there) = difference.found();
            assert_eq!(thing, compared.thing, "what was asked about");
            there
        }
        more => unreachable!("{more:?}"),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Absent => "nothing".to_owned(),
        Value::Present => "there".to_owned(),
        Value::Program(before) => format!("after {before:?}"),
        Value::Other(found) => found.clone(),
        Value::Row(row) => {
            let token = row.token.map_or(0, Token::get);
            let mut text = format!("for {token} epoch {}", row.epoch);
            for (is, what) in [
                (row.has_services, " services"),
                (row.has_prefixes_v4, " v4"),
                (row.has_prefixes_v6, " v6"),
                (row.has_sources, " sources"),
            ] {
                text.push_str(if is { what } else { "" });
            }
            row.via.map_or(text.clone(), |via| format!("{text} via {via}"))
        }
        Value::Entry(entry) if entry.open => format!("{} open", entry.policy),
        Value::Entry(entry) => format!("{} closed", entry.policy),
        Value::Policy(policy) => {
            let Selected {
                base,
                length,
                generation,
            } = policy.selected;
            let pass = if policy.pass_while_held { " pass" } else { "" };
            format!(
                "{base}+{length}g{generation} serving {}{pass}",
                policy.served_generation
            )
        }
        Value::Set(devices) => format!("set of {devices:?}"),
        Value::Slots(table) if table.len() > 4 => {
            let kinds: BTreeSet<&BackendId> = table.iter().collect();
            format!("{kinds:?} x{}", table.len())
        }
        Value::Slots(table) => format!("{table:?}"),
        Value::Backend(backend) => {
            let drains = if backend.drain_until.is_some() { "~" } else { "" };
            format!(
                "{}/{} of {} g{}{drains}",
                backend.ifindex,
                backend.token.get(),
                backend.policy,
                backend.last_generation
            )
        }
    }
}

/// One thing; what is the same three times is said once.
fn line(bench: &Bench, compared: &Compared) -> String {
    let mut line = compared.thing.to_string();
    for name in compared.policy.iter() {
        line = format!("{line} [{name}]");
    }
    for name in compared.interface.iter() {
        line = format!("{line} ({name})");
    }
    let wanted = shown(&compared.wanted);
    if same(bench, compared) {
        return format!("{line}: {wanted}");
    }
    let believed = compared.believed.as_ref().map_or("?".to_owned(), shown);
    format!(
        "{line}: {wanted} | {believed} | {}",
        shown(&there(bench, compared))
    )
}

fn same(bench: &Bench, compared: &Compared) -> bool {
    compared.believed.as_ref() == Some(&compared.wanted) && there(bench, compared) == compared.wanted
}

fn lines(bench: &Bench, things: &[Compared]) -> Vec<String> {
    things.iter().map(|compared| line(bench, compared)).collect()
}

/// What is not the same three times; then what is found beside.
fn differing(bench: &Bench) -> Vec<String> {
    let pages = pages(bench);
    let things = pages.iter().flat_map(|page| &page.things);
    let differ = things.filter(|compared| !same(bench, compared));
    let beside = pages.iter().flat_map(|page| bench.look(&page.beside));
    let beside = beside.map(|difference| {
        let (thing, there) = difference.found();
        format!("beside: {thing}: {}", shown(&there))
    });
    differ
        .map(|compared| line(bench, compared))
        .chain(beside)
        .collect()
}

// --- at rest -----------------------------------------------------------------------------------------------

#[test]
fn what_is_programmed_is_wanted_believed_and_there() {
    let bench = programmed();
    assert_eq!(
        lines(&bench, &whole(&bench)),
        [
            "program at device 5 (hfweb): after []",
            "row of device 5 (hfweb): for 105 epoch 0 services sources",
            "identity of device 5 (hfweb): there",
            "source 10.0.0.5 of device 5 (hfweb): there",
            "entry 10.96.0.1 UDP 53 of device 5 [shop/dns] (hfweb): 0 open",
            "entry 10.96.0.2 UDP 53 of device 5 [shop/dns] (hfweb): 0 open",
            "entry 10.96.0.3 UDP 53 of device 5 [shop/log] (hfweb): 1 open",
            // A producer has a program and an identity, and consumes nothing.
            "program at device 6 (hfdns): after []",
            "identity of device 6 (hfdns): there",
            "program at device 7 (hfapi): after []",
            "row of device 7 (hfapi): for 107 epoch 0 services",
            "identity of device 7 (hfapi): there",
            "entry 10.96.0.4 UDP 53 of device 7 [shop/tea] (hfapi): 2 open",
            "selector 0 [shop/dns]: 0+1g1 serving 1",
            "set of selector 0 [shop/dns]: [1]",
            "producer 1 [shop/dns] (hfdns): 6/106 of 0 g1",
            "selector 1 [shop/log]: 1+1g1 serving 1",
            "set of selector 1 [shop/log]: [2]",
            "producer 2 [shop/log] (hfdns): 6/106 of 1 g1",
            "selector 2 [shop/tea]: 2+1g1 serving 1",
            "set of selector 2 [shop/tea]: [3]",
            "producer 3 [shop/tea] (hfdns): 6/106 of 2 g1",
        ]
    );
    assert_eq!(differing(&bench), NOTHING);
    let rest = compare(&bench, &Scope::Rest);
    assert_eq!(
        rest,
        Page {
            things: Vec::new(),
            beside: vec![
                Belief::Nothing {
                    links: BTreeSet::from([5, 6, 7])
                },
                Belief::Locals {
                    addresses: BTreeSet::from([OWN])
                },
            ],
            next: None,
        }
    );
}

#[test]
fn a_thing_says_whose_it_is_and_what_to_look_at() {
    let bench = programmed();
    let things = whole(&bench);
    let of = |thing| {
        things
            .iter()
            .find(|compared| compared.thing == thing)
            .unwrap()
            .clone()
    };
    let row = bench.kernel.pins.rows[&5];
    assert_eq!(row.token, Some(token(105)));
    assert_eq!(
        of(Thing::Row(5)),
        Compared {
            thing: Thing::Row(5),
            policy: None,
            interface: Some("hfweb".into()),
            wanted: Value::Row(row),
            believed: Some(Value::Row(row)),
            look: Belief::Row {
                ifindex: 5,
                row: Some(row)
            },
            looked: Value::Row(row),
        }
    );
    let entry = Entry {
        policy: 0,
        open: true,
    };
    assert_eq!(
        of(Thing::Entry(5, key(1))),
        Compared {
            thing: Thing::Entry(5, key(1)),
            policy: Some(named("dns")),
            interface: Some("hfweb".into()),
            wanted: Value::Entry(entry),
            believed: Some(Value::Entry(entry)),
            look: Belief::Entries {
                ifindex: 5,
                entries: BTreeMap::from([(key(1), entry)]),
            },
            looked: Value::Entry(entry),
        }
    );
    let selector = bench.kernel.pins.policies[&1].clone();
    let value = Value::Policy(Box::new(selector.clone()));
    assert_eq!(
        of(Thing::Selector(1)),
        Compared {
            thing: Thing::Selector(1),
            policy: Some(named("log")),
            interface: None,
            wanted: value.clone(),
            believed: Some(value.clone()),
            look: Belief::Policy {
                slot: 1,
                value: selector.clone(),
            },
            looked: value,
        }
    );
    assert_eq!(
        of(Thing::Slots(1)).look,
        Belief::Table {
            slot: 1,
            base: selector.selected.base,
            table: vec![2],
        }
    );
}

// --- what is there is something else -----------------------------------------------------------------------

struct Tampering {
    tamper: fn(&mut Bench),
    /// Before anybody has told.
    silent: &'static [&'static str],
    /// An audit has told, and what was sent upon it is out.
    told: &'static [&'static str],
}

fn pins(bench: &mut Bench) -> &mut Adoption {
    &mut bench.kernel.pins
}

fn entry(bench: &mut Bench, n: u8) -> &mut Entry {
    let mut entries = pins(bench).entries.values_mut().flatten();
    entries
        .find_map(|(at, entry)| (*at == key(n)).then_some(entry))
        .unwrap()
}

const TAMPERINGS: &[Tampering] = &[
    Tampering {
        tamper: |bench| _ = pins(bench).attached.remove(&5),
        silent: &["program at device 5 (hfweb): after [] | after [] | no link is pinned for the device"],
        told: &[
            "program at device 5 (hfweb): after [] | ? | no link is pinned for the device",
            "row of device 5 (hfweb): for 0 epoch 1 services sources | ? | for 105 epoch 0 services sources",
        ],
    },
    Tampering {
        tamper: |bench| _ = bench.foreign.insert(5, vec!["acl".into()]),
        silent: &["program at device 5 (hfweb): after [] | after [] | after [\"acl\"]"],
        told: &["program at device 5 (hfweb): after [] | after [\"acl\"] | after [\"acl\"]"],
    },
    Tampering {
        tamper: |bench| _ = pins(bench).rows.remove(&5),
        silent: &[
            "row of device 5 (hfweb): for 105 epoch 0 services sources | for 105 epoch 0 services sources | nothing",
        ],
        told: &["row of device 5 (hfweb): for 105 epoch 1 services sources | ? | nothing"],
    },
    Tampering {
        tamper: |bench| pins(bench).rows.get_mut(&7).unwrap().token = Some(token(999)),
        silent: &[
            "row of device 7 (hfapi): for 107 epoch 0 services | for 107 epoch 0 services | for 999 epoch 0 services",
        ],
        told: &["row of device 7 (hfapi): for 107 epoch 1 services | ? | for 999 epoch 0 services"],
    },
    Tampering {
        tamper: |bench| drop(pins(bench).sources.remove(&5)),
        silent: &["source 10.0.0.5 of device 5 (hfweb): there | there | nothing"],
        told: &["source 10.0.0.5 of device 5 (hfweb): there | ? | nothing"],
    },
    Tampering {
        tamper: |bench| entry(bench, 1).policy = 1,
        silent: &["entry 10.96.0.1 UDP 53 of device 5 [shop/dns] (hfweb): 0 open | 0 open | 1 open"],
        told: &["entry 10.96.0.1 UDP 53 of device 5 [shop/dns] (hfweb): 0 closed | ? | 1 open"],
    },
    Tampering {
        tamper: |bench| _ = pins(bench).entries.get_mut(&5).unwrap().remove(&key(3)),
        silent: &["entry 10.96.0.3 UDP 53 of device 5 [shop/log] (hfweb): 1 open | 1 open | nothing"],
        told: &["entry 10.96.0.3 UDP 53 of device 5 [shop/log] (hfweb): 1 closed | ? | nothing"],
    },
    Tampering {
        tamper: |bench| entry(bench, 4).open = false,
        silent: &["entry 10.96.0.4 UDP 53 of device 7 [shop/tea] (hfapi): 2 open | 2 open | 2 closed"],
        told: &["entry 10.96.0.4 UDP 53 of device 7 [shop/tea] (hfapi): 2 closed | ? | 2 closed"],
    },
    Tampering {
        tamper: |bench| _ = bench.registry.insert(5, identity(205, 5)),
        silent: &["identity of device 5 (hfweb): there | there | another row than was read last"],
        told: &[
            "row of device 5 (hfweb): for 205 epoch 1 services sources | ? | for 105 epoch 0 services sources",
        ],
    },
    Tampering {
        tamper: |bench| pins(bench).policies.get_mut(&1).unwrap().pass_while_held = true,
        silent: &["selector 1 [shop/log]: 1+1g1 serving 1 | 1+1g1 serving 1 | 1+1g1 serving 1 pass"],
        told: &["selector 1 [shop/log]: 1+1g1 serving 1 | ? | 1+1g1 serving 1 pass"],
    },
    Tampering {
        tamper: |bench| {
            // The same table, from which no selector leads.
            let value = pins(bench).policies.remove(&1).unwrap();
            pins(bench).slots.insert(value.selected.base, vec![2]);
        },
        silent: &["selector 1 [shop/log]: 1+1g1 serving 1 | 1+1g1 serving 1 | nothing"],
        told: &[
            "entry 10.96.0.3 UDP 53 of device 5 [shop/log] (hfweb): 1 closed | ? | 1 open",
            "selector 1 [shop/log]: 1+1g1 serving 1 | ? | nothing",
        ],
    },
    Tampering {
        tamper: |bench| bench.kernel.set_slot(2, 9),
        silent: &["set of selector 2 [shop/tea]: [3] | [3] | another table"],
        told: &[
            "selector 2 [shop/tea]: set of {6} | 2+1g1 serving 1 | 2+1g1 serving 1",
            "set of selector 2 [shop/tea]: [3] | ? | another table",
        ],
    },
    Tampering {
        tamper: |bench| pins(bench).backends.get_mut(&1).unwrap().ifindex = 7,
        silent: &["producer 1 [shop/dns] (hfdns): 6/106 of 0 g1 | 6/106 of 0 g1 | 7/106 of 0 g1"],
        told: &[
            "selector 0 [shop/dns]: set of {6} | 0+1g1 serving 1 | 0+1g1 serving 1",
            "producer 1 [shop/dns] (hfdns): 6/106 of 0 g1 | ? | 7/106 of 0 g1",
        ],
    },
    Tampering {
        tamper: |bench| _ = pins(bench).backends.remove(&2),
        silent: &["producer 2 [shop/log] (hfdns): 6/106 of 1 g1 | 6/106 of 1 g1 | nothing"],
        told: &[
            "selector 1 [shop/log]: set of {6} | 1+1g1 serving 1 | 1+1g1 serving 1",
            "producer 2 [shop/log] (hfdns): 6/106 of 1 g1 | ? | nothing",
        ],
    },
    Tampering {
        tamper: |bench| pins(bench).locals = BTreeSet::from([SOURCE]),
        silent: &[
            "beside: the node's own address 192.0.2.1: nothing",
            "beside: the node's own address 10.0.0.5: there",
        ],
        told: &[],
    },
    Tampering {
        tamper: |bench| {
            bench.give(Event::Link(veth(9, "hfold", 9)));
            bench.poll();
            pins(bench).attached.insert(9);
        },
        silent: &["beside: program at device 9: there"],
        told: &["program at device 9 (hfold): nothing | ? | after []"],
    },
];

#[test]
fn whatever_differs_is_named_and_in_doubt_until_it_is_put_right() {
    for case in TAMPERINGS {
        let mut bench = programmed();
        (case.tamper)(&mut bench);
        let silent = differing(&bench);
        assert_eq!(silent, case.silent);
        audit(&mut bench);
        assert_eq!(differing(&bench), case.told, "after {silent:?}");
        rest(&mut bench);
        // A policy without a producer for a moment takes a little longer.
        bench.pass(2 * SECOND);
        rest(&mut bench);
        assert_eq!(differing(&bench), NOTHING, "after {silent:?}");
    }
}

#[test]
fn who_is_asked_before_may_be_there_once_it_lets_pass() {
    let mut bench = programmed();
    bench.foreign.insert(5, vec!["acl".into(), "qos".into()]);
    audit(&mut bench);
    assert_eq!(
        differing(&bench),
        [r#"program at device 5 (hfweb): after [] | after ["acl", "qos"] | after ["acl", "qos"]"#]
    );
    rest(&mut bench);
    bench.pass(2 * SECOND);
    rest(&mut bench);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(
        lines(&bench, &whole(&bench))[0],
        r#"program at device 5 (hfweb): after ["acl", "qos"]"#
    );
    // It goes without a word, and others come.
    bench.foreign.insert(5, vec!["nat".into()]);
    assert_eq!(
        differing(&bench),
        [r#"program at device 5 (hfweb): after ["acl", "qos"] | after ["acl", "qos"] | after ["nat"]"#]
    );
}

/// What kernels have that no life of this agent knows is told in the same words.
#[test]
fn every_difference_is_of_a_thing() {
    let found = |difference: Difference| {
        let (thing, there) = difference.found();
        format!("{thing}: {}", shown(&there))
    };
    let address = SOURCE;
    let row = Row {
        token: None,
        epoch: 3,
        has_services: false,
        has_prefixes_v4: true,
        has_prefixes_v6: true,
        has_sources: false,
        via: Some(2),
    };
    let range = RouteKey::Prefix {
        address: [10, 0, 0, 0].into(),
        length: 8,
    };
    for (difference, text) in [
        (Difference::Link { ifindex: 9 }, "program at device 9: there"),
        (
            Difference::Row {
                ifindex: 9,
                found: Some(row),
            },
            "row of device 9: for 0 epoch 3 v4 v6 via 2",
        ),
        (
            Difference::Source {
                ifindex: 9,
                address,
                found: true,
            },
            "source 10.0.0.5 of device 9: there",
        ),
        (
            Difference::Entry {
                ifindex: 9,
                key: range,
                found: None,
            },
            "entry 10.0.0.0/8 of device 9: nothing",
        ),
        (Difference::Policy { slot: 4, found: None }, "selector 4: nothing"),
        (Difference::Table { slot: 4 }, "set of selector 4: another table"),
        (Difference::Backend { id: 8, found: None }, "producer 8: nothing"),
    ] {
        assert_eq!(found(difference), text);
    }
}

// --- what is on its way --------------------------------------------------------------------------------

fn edited(name: &str, consumers: &str, destinations: &[u8]) -> Event {
    let policy = policy(name, consumers, "dns", destinations);
    Event::Objects(vec![ObjectChange::Policy(Policy {
        generation: 2,
        ..policy
    })])
}

#[test]
fn a_write_is_wanted_at_once_and_believed_when_it_is_answered() {
    let mut bench = programmed();
    bench.give(edited("tea", "api", &[4, 5]));
    let mut steps = vec![differing(&bench)];
    bench.poll();
    steps.push(differing(&bench));
    // Whether it was carried out nobody knows.
    let refused = OpError::Refused { message: "no".into() };
    bench.answer(|op| matches!(op, Op::WriteEntries { .. }), Err(refused));
    steps.push(differing(&bench));
    bench.poll();
    steps.push(differing(&bench));
    rest(&mut bench);
    steps.push(differing(&bench));
    // It is tried again.
    bench.pass(2 * SECOND);
    rest(&mut bench);
    steps.push(differing(&bench));
    assert_eq!(
        steps,
        [
            vec!["entry 10.96.0.5 UDP 53 of device 7 [shop/tea] (hfapi): 2 open | nothing | nothing"],
            // Under an open row it comes closed.
            vec!["entry 10.96.0.5 UDP 53 of device 7 [shop/tea] (hfapi): 2 closed | ? | nothing"],
            vec!["entry 10.96.0.5 UDP 53 of device 7 [shop/tea] (hfapi): 2 closed | ? | nothing"],
            // The policy fails as a whole.
            vec![
                "entry 10.96.0.4 UDP 53 of device 7 [shop/tea] (hfapi): 2 closed | ? | 2 open",
                "entry 10.96.0.5 UDP 53 of device 7 [shop/tea] (hfapi): 2 open | ? | nothing",
            ],
            vec!["entry 10.96.0.5 UDP 53 of device 7 [shop/tea] (hfapi): 2 open | nothing | nothing"],
            vec![],
        ]
    );
}

#[test]
fn whose_identity_goes_has_a_row_that_is_to_be_closed() {
    let mut bench = programmed();
    bench.registry.remove(&5);
    bench.give(Event::Poke(5));
    bench.poll();
    let mut steps = vec![differing(&bench)];
    bench.run();
    steps.push(differing(&bench));
    steps.push(lines(&bench, &whole(&bench))[..4].to_vec());
    // Nobody can read it any more: what was read last stands.
    bench.registry.insert(5, RegistryRead::Failed("no".into()));
    bench.give(Event::Poke(5));
    bench.run();
    steps.push(lines(&bench, &whole(&bench))[..4].to_vec());
    let closed = [
        "program at device 5 (hfweb): after []",
        "row of device 5 (hfweb): for 0 epoch 1 services sources",
        "identity of device 5 (hfweb): nothing",
        "source 10.0.0.5 of device 5 (hfweb): there",
    ];
    assert_eq!(
        steps,
        [
            vec![
                "row of device 5 (hfweb): for 0 epoch 1 services sources | ? | for 105 epoch 0 services sources"
            ],
            vec![],
            closed.to_vec(),
            closed.to_vec(),
        ]
    );
}

#[test]
fn what_was_never_read_is_not_compared() {
    let mut bench = programmed();
    bench.registry.insert(9, RegistryRead::Failed("no".into()));
    bench.give(Event::Link(veth(9, "hfnew", 9)));
    let new = attachment("new", "hfnew", "api");
    bench.give(Event::Objects(vec![ObjectChange::Attachment(new)]));
    let of_9 = |bench: &Bench| {
        let page = compare(bench, &Scope::Interfaces(8));
        assert_eq!(page.next, Some(Scope::Slots(0)));
        lines(bench, &page.things)
    };
    bench.poll();
    let mut steps = vec![of_9(&bench)];
    bench.run();
    steps.push(of_9(&bench));
    bench.registry.insert(9, identity(109, 9));
    bench.give(Event::Poke(9));
    bench.poll();
    steps.push(of_9(&bench));
    rest(&mut bench);
    steps.push(of_9(&bench));
    // The device dies: its identity is nobody's.
    bench.give(Event::LinkGone(9));
    bench.poll();
    steps.push(of_9(&bench));
    bench.run();
    steps.push(of_9(&bench));
    assert_eq!(
        steps,
        [
            vec![
                "program at device 9 (hfnew): after [] | nothing | no link is pinned for the device",
                "row of device 9 (hfnew): for 0 epoch 0 services | ? | nothing",
                "entry 10.96.0.4 UDP 53 of device 9 [shop/tea] (hfnew): 2 open | ? | nothing",
            ],
            vec![
                "program at device 9 (hfnew): after []",
                "row of device 9 (hfnew): for 0 epoch 0 services",
                "entry 10.96.0.4 UDP 53 of device 9 [shop/tea] (hfnew): 2 open",
            ],
            vec![
                "program at device 9 (hfnew): after []",
                "row of device 9 (hfnew): for 109 epoch 0 services | for 0 epoch 0 services | for 0 epoch 0 services",
                "identity of device 9 (hfnew): there",
                "entry 10.96.0.4 UDP 53 of device 9 [shop/tea] (hfnew): 2 open",
            ],
            vec![
                "program at device 9 (hfnew): after []",
                "row of device 9 (hfnew): for 109 epoch 0 services",
                "identity of device 9 (hfnew): there",
                "entry 10.96.0.4 UDP 53 of device 9 [shop/tea] (hfnew): 2 open",
            ],
            vec![
                "program at device 9: nothing | ? | no link is pinned for the device",
                "row of device 9: nothing | ? | for 109 epoch 0 services",
            ],
            vec![],
        ]
    );
}

#[test]
fn a_set_that_is_to_change_is_told_by_its_devices() {
    let mut bench = programmed();
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfdnt", 8)));
    let second = attachment("dnt", "hfdnt", "dns");
    bench.give(Event::Objects(vec![ObjectChange::Attachment(second)]));
    bench.poll();
    bench.yes();
    let of_dns = |bench: &Bench| {
        let things = compare(bench, &Scope::Policy(named("dns"))).things;
        let slots = things
            .iter()
            .position(|compared| compared.thing == Thing::Selector(0));
        lines(bench, &things[slots.unwrap()..])
    };
    let mut steps = vec![of_dns(&bench)];
    rest(&mut bench);
    steps.push(of_dns(&bench));
    // The first one leaves, and lives: its flows may stay with it.
    let first = attachment("dns", "hfdns", "old");
    bench.give(Event::Objects(vec![ObjectChange::Attachment(Attachment {
        generation: 2,
        ..first
    })]));
    rest(&mut bench);
    steps.push(of_dns(&bench));
    // The second one dies.
    bench.registry.remove(&8);
    bench.give(Event::Poke(8));
    bench.poll();
    steps.push(of_dns(&bench));
    rest(&mut bench);
    steps.push(of_dns(&bench));
    bench.pass(70 * SECOND);
    rest(&mut bench);
    steps.push(of_dns(&bench));
    assert_eq!(
        steps,
        [
            // What it will be is not written yet; who stays in it is told of its generation.
            vec![
                "selector 0 [shop/dns]: set of {6, 8} | 0+1g1 serving 1 | 0+1g1 serving 1",
                "set of selector 0 [shop/dns]: [1]",
                "producer 1 [shop/dns] (hfdns): 6/106 of 0 g2 | ? | 6/106 of 0 g1",
            ],
            vec![
                "selector 0 [shop/dns]: 64512+1024g2 serving 1",
                "set of selector 0 [shop/dns]: {1, 4} x1024",
                "producer 1 [shop/dns] (hfdns): 6/106 of 0 g2",
                "producer 4 [shop/dns] (hfdnt): 8/108 of 0 g2",
            ],
            vec![
                "selector 0 [shop/dns]: 3+1g3 serving 1",
                "set of selector 0 [shop/dns]: [4]",
                "producer 1 [shop/dns] (hfdns): 6/106 of 0 g2~",
                "producer 4 [shop/dns] (hfdnt): 8/108 of 0 g3",
            ],
            vec![
                "selector 0 [shop/dns]: set of {} | ? | 3+1g3 serving 1",
                "producer 1 [shop/dns] (hfdns): 6/106 of 0 g2~",
            ],
            vec![
                "selector 0 [shop/dns]: 0+0g4 serving 1",
                "producer 1 [shop/dns] (hfdns): 6/106 of 0 g2~",
                "producer 4 [shop/dns] (hfdnt): 8/108 of 0 g3",
            ],
            // All of it is over.
            vec!["selector 0 [shop/dns]: 0+0g4 serving 1"],
        ]
    );
}

#[test]
fn a_policy_that_goes_is_not_wanted() {
    let mut bench = programmed();
    bench.give(Event::Objects(vec![ObjectChange::PolicyGone(named("tea"))]));
    let mut steps = Vec::new();
    bench.poll();
    for _ in 0..3 {
        steps.push(differing(&bench));
        bench.yes();
    }
    assert_eq!(
        bench.engine.view().compare(&Scope::Policy(named("tea"))),
        Err(NoSuchPolicy)
    );
    assert_eq!(
        steps,
        [
            vec![
                "row of device 7 (hfapi): nothing | ? | for 107 epoch 0 services",
                "entry 10.96.0.4 UDP 53 of device 7 [shop/tea] (hfapi): nothing | 2 open | 2 open",
                "selector 2 [shop/tea]: nothing | 2+1g1 serving 1 | 2+1g1 serving 1",
            ],
            vec![
                "row of device 7 (hfapi): nothing | ? | for 0 epoch 1 services",
                "selector 2 [shop/tea]: nothing | 2+1g1 serving 1 | 2+1g1 serving 1",
            ],
            vec![],
        ]
    );
    let things = whole(&bench);
    let left = things
        .iter()
        .filter(|compared| compared.policy == Some(named("tea")));
    assert_eq!(left.count(), 0);
    assert!(things.iter().all(|compared| compared.thing != Thing::Row(7)));
}

#[test]
fn until_everything_is_known_what_is_there_is_wanted() {
    let mut bench = programmed();
    bench.crash();
    bench.poll();
    let nameless = [
        // Which device it is at nobody has said.
        "program at device 5: after [] | ? | after []",
        "row of device 5: for 105 epoch 0 services sources",
        "source 10.0.0.5 of device 5: there",
        "entry 10.96.0.1 UDP 53 of device 5: 0 open",
        "entry 10.96.0.2 UDP 53 of device 5: 0 open",
        "entry 10.96.0.3 UDP 53 of device 5: 1 open",
        "program at device 6: after [] | ? | after []",
        "program at device 7: after [] | ? | after []",
        "row of device 7: for 107 epoch 0 services",
        "entry 10.96.0.4 UDP 53 of device 7: 2 open",
        "selector 0: 0+1g1 serving 1",
        "set of selector 0: [1]",
        "producer 1: 6/106 of 0 g1",
        "selector 1: 1+1g1 serving 1",
        "set of selector 1: [2]",
        "producer 2: 6/106 of 1 g1",
        "selector 2: 2+1g1 serving 1",
        "set of selector 2: [3]",
        "producer 3: 6/106 of 2 g1",
    ];
    assert_eq!(lines(&bench, &whole(&bench)), nameless);
    // What an earlier life saved names nobody: that removes nothing.
    bench.give(Event::LinkDump(bench.links.values().cloned().collect()));
    bench.give(Event::SavedComplete);
    assert_eq!(bench.poll(), []);
    assert_eq!(differing(&bench), NOTHING);
    assert_eq!(whole(&bench).len(), nameless.len() + 3, "identities, too");
    // But what is of a device that dies goes.
    bench.give(Event::LinkGone(7));
    bench.poll();
    assert_eq!(
        differing(&bench),
        [
            "program at device 7: nothing | ? | no link is pinned for the device",
            "row of device 7: nothing | ? | for 107 epoch 0 services",
        ]
    );
    bench.run();
    assert_eq!(differing(&bench), NOTHING);
    // Now it is certain.
    bench.give(Event::SourceComplete);
    bench.poll();
    assert_eq!(
        differing(&bench)[..4],
        [
            "program at device 5 (hfweb): nothing | after [] | after []",
            "row of device 5 (hfweb): nothing | ? | for 105 epoch 0 services sources",
            "source 10.0.0.5 of device 5 (hfweb): nothing | there | there",
            "entry 10.96.0.1 UDP 53 of device 5 (hfweb): nothing | 0 open | 0 open",
        ]
    );
    rest(&mut bench);
    assert_eq!(
        lines(&bench, &whole(&bench)),
        [5, 6].map(|ifindex| format!(
            "identity of device {ifindex} ({}): there",
            bench.links[&ifindex].name
        ))
    );
}

// --- scopes and pages --------------------------------------------------------------------------------------

#[test]
fn of_a_policy_its_own_is_compared() {
    let bench = programmed();
    let of = |name: &str| {
        let page = compare(&bench, &Scope::Policy(named(name)));
        assert_eq!((page.beside, page.next), (Vec::new(), None));
        lines(&bench, &page.things)
    };
    assert_eq!(
        of("dns"),
        [
            "program at device 5 (hfweb): after []",
            "row of device 5 (hfweb): for 105 epoch 0 services sources",
            "identity of device 5 (hfweb): there",
            "source 10.0.0.5 of device 5 (hfweb): there",
            "entry 10.96.0.1 UDP 53 of device 5 [shop/dns] (hfweb): 0 open",
            "entry 10.96.0.2 UDP 53 of device 5 [shop/dns] (hfweb): 0 open",
            "selector 0 [shop/dns]: 0+1g1 serving 1",
            "set of selector 0 [shop/dns]: [1]",
            "producer 1 [shop/dns] (hfdns): 6/106 of 0 g1",
        ]
    );
    // The interface is both policies', the entries are not.
    assert_eq!(
        of("log")[4..],
        [
            "entry 10.96.0.3 UDP 53 of device 5 [shop/log] (hfweb): 1 open",
            "selector 1 [shop/log]: 1+1g1 serving 1",
            "set of selector 1 [shop/log]: [2]",
            "producer 2 [shop/log] (hfdns): 6/106 of 1 g1",
        ]
    );
    assert_eq!(of("tea").len(), 7);
    let unknown = Scope::Policy(named("dnt"));
    assert_eq!(bench.engine.view().compare(&unknown), Err(NoSuchPolicy));
}

/// So many interfaces with a program, and policies of the first of them.
fn large(interfaces: u32, policies: u8) -> Bench {
    let mut bench = Bench::started_with(Capacity {
        policies: 128,
        slots: 65_536,
        backends: 256,
    });
    let mut objects = Vec::new();
    for number in 1..=interfaces {
        let name = format!("hf{number}");
        // Numbers of devices have gaps.
        let (ifindex, mac) = (10 * number, u8::try_from(number).unwrap());
        bench.give(Event::Link(veth(ifindex, &name, mac)));
        bench.registry.insert(ifindex, identity(u64::from(ifindex), mac));
        let app = match number {
            1 => "web",
            2 => "dns",
            _ => "other",
        };
        objects.push(ObjectChange::Attachment(attachment(&name, &name, app)));
    }
    for number in 1..=policies {
        let policy = policy(&format!("p{number}"), "web", "dns", &[number]);
        objects.push(ObjectChange::Policy(policy));
    }
    bench.give(Event::Objects(objects));
    bench.run();
    assert_eq!(differing(&bench), NOTHING);
    bench
}

#[test]
fn pages_lead_to_each_other_and_are_the_whole() {
    let bench = large(130, 70);
    let pages = pages(&bench);
    let next: Vec<Option<Scope>> = pages.iter().map(|page| page.next.clone()).collect();
    assert_eq!(
        next,
        [
            Some(Scope::Interfaces(640)),
            Some(Scope::Interfaces(1280)),
            Some(Scope::Slots(0)),
            Some(Scope::Slots(64)),
            Some(Scope::Rest),
            None,
        ]
    );
    let mut expected = BTreeSet::new();
    for number in 1..=130 {
        expected.extend([Thing::Program(10 * number), Thing::Identity(10 * number)]);
    }
    expected.insert(Thing::Row(10));
    for number in 0..70_u8 {
        let slot = SlotId::from(number);
        expected.extend([
            Thing::Entry(10, key(number + 1)),
            Thing::Selector(slot),
            Thing::Slots(slot),
            Thing::Backend(slot + 1),
        ]);
    }
    let found: Vec<Thing> = whole(&bench).iter().map(|compared| compared.thing).collect();
    assert_eq!(found.len(), expected.len(), "each once");
    assert_eq!(found.into_iter().collect::<BTreeSet<Thing>>(), expected);
    let sizes: Vec<usize> = pages.iter().map(|page| page.things.len()).collect();
    assert_eq!(sizes, [64 * 2 + 71, 64 * 2, 2 * 2, 64 * 3, 6 * 3, 0]);
    let beside: Vec<usize> = pages.iter().map(|page| page.beside.len()).collect();
    assert_eq!(beside, [0, 0, 0, 0, 0, 2]);
}

#[test]
fn a_page_that_is_just_full_is_followed_by_an_empty_one() {
    let mut bench = large(64, 64);
    let sizes = |bench: &Bench| -> Vec<usize> { pages(bench).iter().map(|page| page.things.len()).collect() };
    assert_eq!(sizes(&bench), [64 * 2 + 65, 0, 64 * 3, 0, 0]);
    // Who goes on where a device has gone meanwhile misses none.
    let next = compare(&bench, &Scope::Interfaces(0)).next.unwrap();
    assert_eq!(next, Scope::Interfaces(640));
    bench.give(Event::LinkGone(640));
    bench.give(Event::Link(veth(641, "hf641", 65)));
    bench.give(Event::Objects(vec![ObjectChange::Attachment(attachment(
        "late", "hf641", "other",
    ))]));
    bench.run();
    let page = compare(&bench, &next);
    assert_eq!(
        lines(&bench, &page.things),
        [
            "program at device 641 (hf641): after []",
            "identity of device 641 (hf641): nothing",
        ]
    );
}
