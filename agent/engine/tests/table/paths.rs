//! Every path that a packet can take: prefixes, several producers, and workloads that are reached by their address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use holdfast_engine::Engine;
use holdfast_engine::model::*;

use crate::support::*;
use crate::{edit, objects, refused};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn prefix(text: &str) -> Destination {
    let (network, length) = text.split_once('/').unwrap();
    Destination::Prefix {
        address: address(network),
        length: length.parse().unwrap(),
    }
}

fn route(text: &str) -> RouteKey {
    match prefix(text) {
        Destination::Prefix { address, length } => RouteKey::Prefix { address, length },
        Destination::Service { .. } => unreachable!(),
    }
}

/// A policy like [`policy`] that claims these.
fn claiming(name: &str, destinations: &[Destination]) -> Policy {
    let mut policy = policy(name, "web", "dns", &[]);
    policy.content.as_mut().unwrap().destinations = destinations.iter().copied().collect();
    policy
}

fn younger(mut policy: Policy) -> ObjectChange {
    policy.created_ms = 2_000;
    ObjectChange::Policy(policy)
}

fn tap(ifindex: Ifindex, name: &str, n: u8) -> Link {
    Link {
        kind: LinkKind::Tap,
        ..veth(ifindex, name, n)
    }
}

fn bridge(ifindex: Ifindex, name: &str, n: u8) -> Link {
    Link {
        kind: LinkKind::Bridge,
        ..veth(ifindex, name, n)
    }
}

fn with(mut attachment: Attachment, addresses: &[&str]) -> ObjectChange {
    attachment.addresses = addresses.iter().map(|text| address(text)).collect();
    ObjectChange::Attachment(attachment)
}

/// Consumer `web` (interface 5) and producer `dns` (interface 6), both ready, and no policy.
fn ready() -> Bench {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
    ]));
    bench
}

fn message(bench: &Bench, policy: &str) -> String {
    bench.policy(policy).message.unwrap_or_default()
}

// --- prefixes ------------------------------------------------------------------------------------------------

#[test]
fn dataplane_a_prefix_goes_live_once_the_nodes_own_addresses_are_in_the_kernel() {
    let mut bench = ready();
    bench.give(objects(vec![ObjectChange::Policy(claiming(
        "all",
        &[prefix("0.0.0.0/0"), prefix("fd00::/8"), service(1)],
    ))]));
    bench.run();
    assert_eq!(
        bench.state("all", "web"),
        State::Pending,
        "nobody has said what they are"
    );
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    assert!(
        bench.kernel.pins.attached.contains(&5),
        "and it is claimed all the same"
    );
    bench.give(Event::Locals([address("10.1.1.1")].into()));
    assert_eq!(
        bench.rounds(),
        [
            vec!["locals +{10.1.1.1} -{}"],
            vec!["prove 5 for 105 1->0:open 0.0.0.0/0->0:open fd00::/8->0:open by 0+1g1"],
            vec!["row 5 105 epoch 0 v4 v6"],
        ]
    );
    assert_eq!(bench.state("all", "web"), State::Programmed);
    // One more address: what serves goes on, and nothing is said anew.
    bench.give(Event::Locals([address("10.1.1.1"), address("10.1.1.2")].into()));
    assert_eq!(briefs(&bench.poll()), ["locals +{10.1.1.2} -{}"]);
    assert_eq!(bench.state("all", "web"), State::Programmed);
    // While it is out nothing new is captured.
    bench.give(objects(vec![ObjectChange::Policy(claiming(
        "more",
        &[prefix("192.0.2.0/24")],
    ))]));
    let sent = bench.poll();
    assert!(!sent.iter().any(|op| matches!(op, Op::ProveIntent(_))));
    bench.run();
    assert_eq!(bench.state("more", "web"), State::Programmed);
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn rule_8_addresses_that_cannot_be_written_close_the_prefixes_and_nothing_else() {
    let mut bench = ready();
    bench.give(Event::Locals([address("10.1.1.1")].into()));
    bench.give(objects(vec![
        ObjectChange::Policy(claiming("all", &[prefix("0.0.0.0/0")])),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.run();
    assert_eq!(bench.state("all", "web"), State::Programmed);
    bench.give(Event::Locals([address("10.1.1.2")].into()));
    assert_eq!(briefs(&bench.poll()), ["locals +{10.1.1.2} -{10.1.1.1}"]);
    bench.answer(|op| matches!(op, Op::WriteLocals { .. }), refused("EIO"));
    bench.run();
    assert_eq!(
        bench.state("all", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    assert!(!bench.kernel.pins.entries[&5][&route("0.0.0.0/0")].open);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert!(bench.kernel.pins.entries[&5][&key(1)].open);
    let sent = bench.pass(SECOND);
    assert_eq!(
        briefs(&sent)[0],
        "locals +{10.1.1.2} -{10.1.1.1}",
        "what may be there of either is made right"
    );
    bench.run();
    assert_eq!(bench.state("all", "web"), State::Programmed);
    assert_eq!(bench.kernel.pins.locals, BTreeSet::from([address("10.1.1.2")]));
}

#[test]
fn a_restart_over_prefixes_with_everything_right_writes_nothing() {
    let mut bench = ready();
    bench.give(Event::Locals([address("10.1.1.1")].into()));
    bench.give(objects(vec![ObjectChange::Policy(claiming(
        "all",
        &[prefix("0.0.0.0/0")],
    ))]));
    bench.run();
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new(), "nothing is taken back");
    assert_eq!(bench.state("all", "web"), State::Pending);
    assert_eq!(bench.kernel.pins.rows[&5].token, Some(token(105)));
    bench.give(Event::Locals([address("10.1.1.1")].into()));
    assert_eq!(bench.rounds(), [["prove 5 for 105 0.0.0.0/0->0:open by 0+1g1"]]);
    assert_eq!(bench.state("all", "web"), State::Programmed);
}

#[test]
fn rule_22_prefixes_that_overlap_are_no_conflict_and_equal_ones_are() {
    let mut bench = ready();
    bench.give(Event::Locals(BTreeSet::new()));
    bench.give(objects(vec![
        ObjectChange::Policy(claiming("wide", &[prefix("10.0.0.0/8"), prefix("10.96.0.0/16")])),
        younger(claiming(
            "narrow",
            &[prefix("10.96.0.0/24"), prefix("10.96.0.1/32"), service(1)],
        )),
        younger(claiming(
            "equal",
            &[prefix("10.96.0.0/16"), prefix("10.97.0.0/16")],
        )),
    ]));
    bench.run();
    assert_eq!(bench.state("wide", "web"), State::Programmed);
    assert_eq!(bench.state("narrow", "web"), State::Programmed);
    assert_eq!(bench.state("equal", "web"), State::Failed(FailReason::Conflict));
    assert_eq!(
        message(&bench, "equal"),
        "10.96.0.0/16 of this consumer belongs to the older policy shop/wide"
    );
    let entries = &bench.kernel.pins.entries[&5];
    assert!(
        !entries[&route("10.97.0.0/16")].open,
        "claimed as far as nobody takes it"
    );
}

#[test]
fn design_2_12_a_row_announces_what_there_is_before_it_counts_and_no_longer_than_it_lasts() {
    let mut bench = ready();
    bench.give(Event::Locals(BTreeSet::new()));
    let first = policy("dns", "web", "dns", &[1]);
    bench.give(objects(vec![ObjectChange::Policy(first.clone())]));
    bench.run();
    assert!(!bench.kernel.pins.rows[&5].has_prefixes_v4);
    // Under an open row.
    bench.give(objects(vec![edit(&first, |spec| {
        spec.destinations.insert(prefix("10.0.0.0/8"));
    })]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["entries 5 10.0.0.0/8->0:closed", "row 5 105 epoch 0 v4"],
            vec!["prove 5 for 105 1->0:open 10.0.0.0/8->0:closed by 0+1g1"],
            vec!["entries 5 10.0.0.0/8->0:open"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // Taken away: one write says that flows are looked up anew and that there are no prefixes any more.
    let mut second = first.clone();
    second.generation = 2;
    bench.give(objects(vec![edit(&second, |_| {})]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["entries 5 10.0.0.0/8->0:closed"],
            vec!["row 5 105 epoch 1"],
            vec![
                "delete entries 5 10.0.0.0/8",
                "prove 5 for 105 1->0:open by 0+1g1"
            ],
        ]
    );
    // Under a closed row of a consumer that is held.
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    bench.run();
    bench.give(objects(vec![ObjectChange::Policy(claiming(
        "v6",
        &[prefix("fd00::/8")],
    ))]));
    let rounds = bench.rounds();
    assert_eq!(
        rounds[0],
        ["row 5 closed epoch 2 v6", "policy 1 -> 0+0g0 serving 1"],
        "{rounds:#?}"
    );
    assert!(bench.kernel.pins.entries[&5].contains_key(&route("fd00::/8")));
}

#[test]
fn a_prefix_that_does_not_fit_fails_its_policy_as_a_whole() {
    let mut bench = ready();
    bench.give(Event::Locals(BTreeSet::new()));
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "dns",
        "web",
        "dns",
        &[1],
    ))]));
    bench.run();
    bench.give(objects(vec![ObjectChange::Policy(claiming(
        "all",
        &[prefix("10.0.0.0/8"), service(2)],
    ))]));
    bench.poll();
    bench.yes();
    let full = Err(OpError::Full {
        map: "prefixes".into(),
        need: 65,
        have: 64,
    });
    bench.answer(|op| matches!(op, Op::WriteEntries { .. }), full);
    bench.run();
    assert_eq!(bench.state("all", "web"), State::Failed(FailReason::MapFull));
    assert!(message(&bench, "all").contains("map prefixes is full: 65 entries needed, 64 in all"));
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.pass(SECOND);
    bench.run();
    assert_eq!(bench.state("all", "web"), State::Programmed);
}

// --- several producers ---------------------------------------------------------------------------------------

/// Policy `dns` with consumer `web` (5) and producers `dns` (6) and `two` (7), both in the set.
fn two_producers() -> Bench {
    let mut bench = ready();
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hftwo", 7)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("two", "hftwo", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench
}

/// Which producers the selected set of slot 0 has, by ifindex, and how many slots each.
fn shares(bench: &Bench) -> Vec<(Ifindex, usize)> {
    let devices = bench.links.keys().copied().collect();
    let pins = bench.kernel.adoption(&devices);
    let selected = pins.policies[&0].selected;
    let mut shares = std::collections::BTreeMap::new();
    if selected.length > 0 {
        for id in &pins.slots[&selected.base] {
            *shares.entry(pins.backends[id].ifindex).or_insert(0) += 1;
        }
    }
    shares.into_iter().collect()
}

#[test]
fn rule_12_every_ready_producer_is_in_the_set_and_one_that_comes_joins_without_moving_the_others() {
    let mut bench = two_producers();
    assert_eq!(shares(&bench), [(6, 512), (7, 512)]);
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfthree", 8)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "three", "hfthree", "dns",
    ))]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["attach 8"],
            // Those that stay are members of the new generation before the selector says it: their flows go on.
            vec!["slots 63488 x1024", "backends 1:6/106g2 2:7/107g2 3:8/108g2"],
            vec!["prove set 0 63488+1024g2 at 6"],
            vec!["policy 0 -> 63488+1024g2 serving 1"],
            vec!["prove 5 for 105 1->0:open by 63488+1024g2"],
        ]
    );
    assert_eq!(shares(&bench), [(6, 342), (7, 341), (8, 341)]);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_13_a_producer_that_goes_leaves_the_set_at_once_and_the_others_serve_on() {
    let mut bench = two_producers();
    bench.give(Event::LinkGone(7));
    let rounds = bench.rounds();
    assert_eq!(rounds[0][..2], ["detach 7", "slots 0 [1]"]);
    assert_eq!(rounds[0][2], "backends 1:6/106g2", "who is dead drains nothing");
    assert_eq!(rounds[0][3], "delete identity 7 107");
    assert_eq!(rounds[1], ["prove set 0 0+1g2 at 6"]);
    assert_eq!(rounds[2], ["policy 0 -> 0+1g2 serving 1"]);
    assert_eq!(shares(&bench), [(6, 1)]);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // The last one goes: the empty set, and held.
    bench.give(Event::Link(Link {
        carrier: false,
        ..veth(6, "hfdns", 6)
    }));
    assert_eq!(bench.rounds(), [["policy 0 -> 0+0g3 serving 1"]]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(message(&bench, "dns"), "no selected producer is ready");
    // One comes back: in place.
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(shares(&bench), [(6, 1)]);
}

#[test]
fn design_2_10_a_producer_that_is_deselected_drains_while_it_is_ready() {
    let mut bench = two_producers();
    bench.go_to(Boot(100 * SECOND));
    bench.give(objects(vec![ObjectChange::Attachment(Attachment {
        generation: 2,
        ..attachment("two", "hftwo", "other")
    })]));
    let rounds = bench.rounds();
    assert_eq!(
        rounds[0],
        ["slots 0 [1]", "backends 1:6/106g2 2:7/107g1~160"],
        "its flows may stay for a minute"
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    let sent = bench.pass(62 * SECOND);
    assert_eq!(briefs(&sent), ["backends 2:free"]);
}

#[test]
fn rule_12_a_consumer_in_its_own_set_is_served_by_the_others_and_held_without_them() {
    let mut bench = two_producers();
    // The producer `two` becomes a consumer, too.
    let mut both = Attachment {
        generation: 2,
        ..attachment("two", "hftwo", "dns")
    };
    both.labels.insert("role".into(), "web".into());
    let first = policy("dns", "web", "dns", &[1]);
    bench.give(objects(vec![
        ObjectChange::Attachment(both),
        edit(&first, |spec| {
            spec.consumers = Selector {
                match_labels: labels(&[]),
                match_expressions: vec![Requirement {
                    key: "app".into(),
                    operator: Operator::Exists,
                }],
            };
        }),
    ]));
    bench.run();
    // `dns` is its own producer as well.
    for consumer in ["web", "two", "dns"] {
        assert_eq!(bench.state("dns", consumer), State::Programmed);
    }
    assert_eq!(bench.kernel.pins.rows[&7].token, Some(token(107)));
    // Alone in the set it has no producer; the others have one.
    bench.give(Event::LinkGone(6));
    bench.run();
    assert_eq!(
        bench.state("dns", "two"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn a_restart_over_several_producers_writes_nothing_and_keeps_every_slot() {
    let mut bench = two_producers();
    let before = shares(&bench);
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds(), [["prove 5 for 105 1->0:open by 64512+1024g1"]]);
    assert_eq!(shares(&bench), before);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

// --- workloads that are reached by their address -------------------------------------------------------------

#[test]
fn dataplane_a_tap_is_reached_by_its_address_on_its_interface_or_its_bridge() {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(tap(5, "hfweb", 5)));
    let port = Link {
        master: Some(20),
        ..tap(6, "hfdns", 6)
    };
    bench.give(Event::Link(port.clone()));
    bench.give(objects(vec![
        with(attachment("web", "hfweb", "web"), &["10.0.0.5"]),
        with(attachment("dns", "hfdns", "dns"), &["10.0.0.6"]),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.run();
    // A master that nobody has shown to be a bridge does not count.
    let backend = bench.kernel.pins.backends[&1].clone();
    assert_eq!(
        (backend.via, backend.address_v4),
        (Some(6), Some(address("10.0.0.6")))
    );
    assert_eq!(bench.kernel.pins.rows[&5].via, Some(5));
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // It is one: the set is written anew, and flows of the old way may stay for a while.
    bench.give(Event::Link(bridge(20, "hfbr", 20)));
    let rounds = bench.rounds();
    assert!(
        rounds[0].contains(&"backends 1:6/106g1~60 via 6 2:6/106g2 via 20".to_owned()),
        "{rounds:#?}"
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // The consumer goes behind the bridge, too: its row says so.
    bench.give(Event::Link(Link {
        master: Some(20),
        ..tap(5, "hfweb", 5)
    }));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 5 105 epoch 0 sources via 20"],
            vec!["prove 5 for 105 1->0:open by 1+1g2"],
        ]
    );
}

#[test]
fn dataplane_with_delivery_neigh_a_veth_is_reached_by_its_address_too() {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.engine = Engine::new(Config {
        neighbour_only: true,
        ..config(ALL_FEATURES)
    });
    for event in [
        Event::Adopted(Box::default()),
        Event::LinkDump(vec![veth(5, "hfweb", 5), veth(6, "hfdns", 6)]),
        Event::SourceComplete,
    ] {
        bench.give(event);
    }
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(objects(vec![
        with(attachment("web", "hfweb", "web"), &["10.0.0.5"]),
        with(attachment("dns", "hfdns", "dns"), &["10.0.0.6"]),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.run();
    assert_eq!(bench.kernel.pins.backends[&1].via, Some(6));
    assert_eq!(bench.kernel.pins.rows[&5].via, Some(5));
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

/// Policy `dns` claims a service of each family; `dns` (6) is a tap with these addresses.
fn both_families(consumer: &[&str], producer: &[&str]) -> Bench {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.give(Event::Link(tap(6, "hfdns", 6)));
    let v6 = Destination::Service {
        address: address("fd00:53::1"),
        protocol: Protocol::Udp,
        port: 53,
        target_port: None,
    };
    bench.give(objects(vec![
        with(attachment("web", "hfweb", "web"), consumer),
        with(attachment("dns", "hfdns", "dns"), producer),
        ObjectChange::Policy(claiming("dns", &[service(1), v6])),
    ]));
    bench.run();
    bench
}

#[test]
fn rule_12_a_family_without_a_producer_is_held_and_the_other_one_serves() {
    let mut bench = both_families(&[], &["10.0.0.6"]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        message(&bench, "dns"),
        "producer shop/dns is reached by its address on interface hfdns, and names none of IPv6"
    );
    assert_eq!(
        bench.kernel.pins.rows[&5].token,
        Some(token(105)),
        "IPv4 is served"
    );
    // Another producer has the other family.
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(tap(7, "hftwo", 7)));
    bench.give(objects(vec![with(
        attachment("two", "hftwo", "dns"),
        &["fd00::7"],
    )]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(shares(&bench).len(), 2);
}

#[test]
fn rule_12_a_family_that_the_consumer_cannot_send_needs_no_producer() {
    let bench = both_families(&["10.0.0.5"], &["10.0.0.6"]);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_13_a_producer_of_no_family_of_the_policy_is_not_ready_for_it_and_cuts_nobody_off() {
    let mut bench = both_families(&[], &["10.0.0.6"]);
    let mut first = policy("only4", "web", "dns", &[2]);
    bench.give(objects(vec![ObjectChange::Policy(first.clone())]));
    bench.run();
    assert_eq!(bench.state("only4", "web"), State::Programmed);
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(tap(7, "hftwo", 7)));
    first = policy("only4", "web", "dns", &[2]);
    bench.give(objects(vec![
        with(attachment("two", "hftwo", "six"), &["fd00::7"]),
        edit(&first, |spec| spec.producers = selector("app", "six")),
    ]));
    bench.run();
    assert_eq!(
        bench.state("only4", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        bench.policy("only4").serving.unwrap().generation,
        1,
        "the old set serves on"
    );
    assert_eq!(bench.kernel.pins.policies[&1].selected.length, 1);
}

#[test]
fn a_producer_without_any_address_is_not_ready_and_says_why() {
    let bench = both_families(&[], &[]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        message(&bench, "dns"),
        "producer shop/dns is reached by its address on interface hfdns, and names none of IPv4 or IPv6"
    );
    assert_eq!(bench.kernel.pins.policies[&0].selected.length, 0);
}

#[test]
fn rule_8_a_consumer_that_no_answer_reaches_fails_closed_and_is_held_while_it_is_not_ready() {
    let mut bench = ready();
    bench.give(Event::Link(tap(5, "hfweb", 9)));
    bench.registry.insert(5, identity(109, 9));
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "dns",
        "web",
        "dns",
        &[1],
    ))]));
    bench.give(Event::Poke(5));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::Unsupported));
    assert_eq!(
        message(&bench, "dns"),
        "answers reach interface hfweb by the address of its workload, and attachment shop/web names none"
    );
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    assert!(bench.kernel.pins.entries[&5].contains_key(&key(1)), "claimed");
    // What is not ready is held first.
    bench.give(Event::Link(Link {
        up: false,
        ..tap(5, "hfweb", 9)
    }));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Held(HoldReason::InterfaceDown));
    // It says its address.
    bench.give(Event::Link(tap(5, "hfweb", 9)));
    bench.give(objects(vec![with(
        Attachment {
            generation: 2,
            ..attachment("web", "hfweb", "web")
        },
        &["10.0.0.5"],
    )]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn f39_a_device_without_ipv6_leads_to_no_ipv6_neighbour() {
    let without = |link| Link { ipv6: false, ..link };
    let mut bench = both_families(&["10.0.0.5", "fd00::5"], &["10.0.0.6", "fd00::6"]);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.give(Event::Link(without(tap(6, "hfdns", 6))));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        message(&bench, "dns"),
        "producer shop/dns is reached by its address on interface hfdns, and there is no IPv6 on the way to it"
    );
    bench.give(Event::Link(tap(6, "hfdns", 6)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);

    // Behind a bridge it is the bridge that counts; and answers have the same way.
    let port = |link| Link {
        master: Some(9),
        ..without(link)
    };
    let bridge = Link {
        kind: LinkKind::Bridge,
        ..veth(9, "hfbr", 9)
    };
    bench.give(Event::Link(bridge.clone()));
    bench.give(Event::Link(port(tap(6, "hfdns", 6))));
    bench.give(Event::Link(port(tap(5, "hfweb", 5))));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.give(Event::Link(without(bridge)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::Unsupported));
    assert_eq!(
        message(&bench, "dns"),
        "answers reach interface hfweb by the address of its workload, and device 9, by which they leave, has no IPv6"
    );
}
