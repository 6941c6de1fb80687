//! The audit: its turns, what voids an answer, and that every kind of difference is told, withdrawn, put right and
//! acknowledged again.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use holdfast_engine::belief::{Audited, Belief, Difference, Drift};
use holdfast_engine::model::*;
use support::*;

const EVERY: u64 = 30 * SECOND;

/// A bench that audits; nothing is there yet.
fn bench() -> Bench {
    let mut bench = Bench::of(Config {
        audit_every: EVERY,
        capacity: Capacity {
            policies: 64,
            slots: 65_536,
            backends: 8_192,
        },
        ..config(ALL_FEATURES)
    });
    bench.complete();
    bench
}

/// One consumer (device 5, with an address) of `dns`, another one (device 7) of `web`, one producer (device 6); the
/// audits of the start are over.
fn programmed() -> Bench {
    let mut bench = bench();
    bench.three_devices();
    bench.give(Event::Objects(vec![
        ObjectChange::Policy(policy("dns", "web", "dns", &[1, 2])),
        ObjectChange::Policy(policy("web", "api", "dns", &[3])),
    ]));
    bench.run();
    rest(&mut bench);
    assert_eq!(states(&bench), [State::Programmed; 2]);
    bench.effects.clear();
    bench
}

fn states(bench: &Bench) -> [State; 2] {
    [bench.state("dns", "web"), bench.state("web", "api")]
}

/// Everything that is out is answered, audits too.
fn rest(bench: &mut Bench) {
    for _ in 0..100 {
        bench.run();
        if bench.audits.is_empty()
            && bench
                .engine
                .next_deadline()
                .is_some_and(|due| due > bench.now.boot)
        {
            return;
        }
        if bench.audits.is_empty() {
            bench.give(Event::Tick);
        } else {
            bench.audit();
        }
    }
    unreachable!("never at rest");
}

/// Time passes until the next audit is out.
fn next_audit(bench: &mut Bench) -> Vec<Belief> {
    let due = bench.engine.next_deadline().unwrap();
    bench.go_to(due.max(bench.now.boot));
    bench.give(Event::Tick);
    let sent: Vec<Op> = bench.poll();
    assert_eq!(sent, [], "only a look");
    bench.audits.front().unwrap().1.clone()
}

fn drift(bench: &Bench) -> BTreeMap<Drift, u64> {
    let mut drift = bench.engine.view().summary().drift;
    assert_eq!(drift.len(), Drift::ALL.len(), "every kind is there, also at 0");
    drift.retain(|_, count| *count > 0);
    drift
}

/// What was said about drift, in short.
fn said(bench: &mut Bench) -> Vec<(Drift, String)> {
    bench
        .log()
        .into_iter()
        .filter_map(|line| match line.what {
            Happening::Drift(kind, message) => {
                assert_eq!(line.level, Level::Warn);
                Some((kind, message))
            }
            _ => None,
        })
        .collect()
}

// --- turns -------------------------------------------------------------------------------------------------

#[test]
fn rule_29_at_the_start_and_every_30_s_everything_is_looked_at() {
    let mut bench = bench();
    bench.poll();
    bench.give(Event::Tick);
    bench.poll();
    assert_eq!(bench.effects, [Effect::DumpLinks]);
    let (_, beliefs) = bench.audits.front().unwrap().clone();
    let nothing = Belief::Nothing {
        links: BTreeSet::new(),
    };
    assert_eq!(
        beliefs,
        [
            Belief::Locals {
                addresses: BTreeSet::new()
            },
            nothing
        ]
    );
    bench.audit();
    assert_eq!(bench.engine.next_deadline(), Some(Boot(EVERY)));
    assert_eq!(bench.engine.view().summary().audit.unwrap().found, 0);

    let mut bench = programmed();
    let begun = bench.now.boot;
    let beliefs = next_audit(&mut bench);
    assert_eq!(bench.now.boot, begun.plus(EVERY));
    assert_eq!(bench.effects, [Effect::DumpLinks]);
    for ifindex in [5, 6, 7] {
        assert!(beliefs.contains(&Belief::Program {
            ifindex,
            before: Some(Vec::new())
        }));
        let about = |belief: &&Belief| matches!(belief, Belief::Row { ifindex: of, .. } if *of == ifindex);
        assert_eq!(beliefs.iter().filter(about).count(), 1);
        let about = |belief: &&Belief| matches!(belief, Belief::Identity { ifindex: of, identity: Some(_) } if *of == ifindex);
        assert_eq!(beliefs.iter().filter(about).count(), 1);
    }
    let count = |like: fn(&Belief) -> bool| beliefs.iter().filter(|belief| like(belief)).count();
    assert_eq!(count(|belief| matches!(belief, Belief::Entries { .. })), 2);
    assert_eq!(count(|belief| matches!(belief, Belief::Sources { .. })), 1);
    assert_eq!(count(|belief| matches!(belief, Belief::Policy { .. })), 2);
    assert_eq!(count(|belief| matches!(belief, Belief::Table { .. })), 2);
    assert_eq!(count(|belief| matches!(belief, Belief::Backend { .. })), 2);
    assert_eq!(count(|belief| matches!(belief, Belief::Locals { .. })), 1);
    assert_eq!(count(|belief| matches!(belief, Belief::Nothing { .. })), 1);
}

#[test]
fn rule_29_there_is_no_second_audit_while_one_is_out() {
    let mut bench = programmed();
    next_audit(&mut bench);
    bench.effects.clear();
    bench.pass(5 * EVERY);
    assert_eq!(bench.audits.len(), 1);
    assert_eq!(bench.effects, []);
    // Nor for what is to be looked at at once.
    bench.give(Event::Objects(vec![ObjectChange::Policy(Policy {
        generation: 2,
        ..policy("dns", "web", "dns", &[1, 2, 4])
    })]));
    let mut sent = bench.poll();
    while !sent.iter().any(|op| matches!(op, Op::ProveIntent(_))) {
        assert_ne!(sent, [], "nothing is proven");
        sent = bench.yes();
    }
    let disproved = OpError::Disproved {
        message: "service 4 of device 5".into(),
    };
    bench.answer(|op| matches!(op, Op::ProveIntent(_)), Err(disproved));
    bench.poll();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::ProofFailed));
    assert_eq!(bench.audits.len(), 1);
    bench.audit();
    assert_eq!(bench.audits.len(), 1, "now it is looked at");
    rest(&mut bench);
    let due = bench.engine.next_deadline().unwrap();
    assert!(due.since(bench.now.boot) <= EVERY);
    // An answer to a question that was never asked, or was answered before, says nothing.
    let difference = Difference::Row {
        ifindex: 5,
        found: None,
    };
    bench.give(Event::Audited(OpId(1), audited(vec![difference])));
    assert_eq!(bench.poll(), []);
    assert_eq!(drift(&bench), BTreeMap::new());
}

const fn audited(differences: Vec<Difference>) -> Audited {
    Audited {
        differences,
        unreadable: None,
    }
}

#[test]
fn rule_29_a_quiet_world_is_looked_at_and_not_written_to() {
    let mut bench = programmed();
    let (before, view) = (bench.kernel.clone(), bench.policy("dns"));
    let mut looks = 0;
    let mut proofs = BTreeSet::new();
    let end = bench.now.boot.plus(300 * SECOND);
    while bench.now.boot < end {
        next_audit(&mut bench);
        looks += 1;
        while !bench.audits.is_empty() {
            let (found, sent) = bench.audit();
            assert_eq!(found, []);
            for op in &sent {
                match op {
                    Op::ProveIntent(proof) => drop(proofs.insert(proof.device.ifindex)),
                    other => unreachable!("a quiet world is written to: {other:?}"),
                }
            }
            bench.run();
            assert_eq!(states(&bench), [State::Programmed; 2]);
        }
    }
    assert_eq!(looks, 10);
    assert_eq!(
        proofs,
        BTreeSet::from([5, 7]),
        "within five minutes every intent is proven again"
    );
    assert_eq!(bench.kernel, before);
    assert_eq!(bench.policy("dns"), view);
    bench.effects.retain(|effect| *effect != Effect::DumpLinks);
    bench
        .effects
        .retain(|effect| !matches!(effect, Effect::Measured(..)));
    assert_eq!(bench.effects, [], "no report, no line");
}

#[test]
fn rule_29_a_large_node_is_looked_at_in_bounded_pieces_and_in_turn() {
    const MANY: u32 = 1_300;
    let mut bench = bench();
    let mut objects = vec![
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ];
    bench.registry.insert(10, identity(10, 6));
    bench.give(Event::Link(veth(10, "hfdns", 6)));
    for ifindex in 11..10 + MANY {
        let name = format!("w{ifindex}");
        objects.push(ObjectChange::Attachment(attachment(&name, &name, "web")));
        bench.registry.insert(ifindex, identity(u64::from(ifindex), 5));
        bench.give(Event::Link(veth(ifindex, &name, 5)));
    }
    bench.give(Event::Objects(objects));
    bench.run();
    rest(&mut bench);
    assert_eq!(bench.policy("dns").state, State::Programmed);

    let (mut whole, mut proven, mut swept, mut dumps) = (BTreeSet::new(), BTreeSet::new(), 0, 0);
    for _ in 0..10 {
        let mut rows = BTreeSet::new();
        bench.effects.clear();
        next_audit(&mut bench);
        while let Some((_, beliefs)) = bench.audits.front() {
            // A batch, and one more interface at the most.
            assert!(beliefs.len() < 1_024 + 8, "{} at once", beliefs.len());
            for belief in beliefs {
                match belief {
                    Belief::Row { ifindex, .. } => drop(rows.insert(*ifindex)),
                    Belief::Entries { ifindex, .. } => drop(whole.insert(*ifindex)),
                    Belief::Nothing { .. } => swept += 1,
                    _ => {}
                }
            }
            let (_, sent) = bench.audit();
            for op in sent {
                if let Op::ProveIntent(proof) = op {
                    proven.insert(proof.device.ifindex);
                }
            }
            bench.run();
        }
        dumps += bench
            .effects
            .iter()
            .filter(|effect| **effect == Effect::DumpLinks)
            .count();
        assert_eq!(rows.len(), MANY as usize, "rows in full in every turn");
    }
    assert_eq!(
        (whole.len(), proven.len()),
        (MANY as usize - 1, MANY as usize - 1)
    );
    assert_eq!(
        (swept, dumps),
        (1, 1),
        "what costs most is done once in five minutes"
    );
}

#[test]
fn rule_29_lost_news_have_everything_looked_at_at_once() {
    let mut bench = programmed();
    bench.pass(7 * SECOND);
    let links: Vec<Link> = bench.links.values().cloned().collect();
    bench.give(Event::LinkDump(links));
    assert_eq!(bench.poll(), []);
    assert!(bench.audits.front().unwrap().1.len() > 10, "at once");
    rest(&mut bench);
    bench.effects.clear();

    // The same if a look at the devices finds that nobody told of one; at most once in five seconds.
    bench.give(Event::DevicesDrifted(BTreeSet::from([5])));
    bench.give(Event::Link(Link {
        mtu: 9000,
        ..veth(5, "hfweb", 5)
    }));
    bench.poll();
    let begun = bench.now.boot;
    assert_eq!(drift(&bench), BTreeMap::from([(Drift::Device, 1)]));
    assert_eq!(said(&mut bench).len(), 1);
    next_audit(&mut bench);
    assert_eq!(bench.now.boot.since(begun), 5 * SECOND);
}

// --- what voids an answer ----------------------------------------------------------------------------------

#[test]
fn rule_29_news_of_a_hook_has_it_looked_at_at_once() {
    let mut bench = programmed();
    // Of a device that is nobody's here nothing is asked.
    bench.give(Event::HooksChanged(BTreeSet::from([99])));
    assert_eq!(bench.poll(), []);
    assert!(bench.audits.is_empty());
    bench.give(Event::HooksChanged(BTreeSet::from([5, 99])));
    assert_eq!(bench.poll(), [], "only a look");
    let (_, beliefs) = bench.audits.front().unwrap().clone();
    assert!(
        matches!(
            beliefs.first(),
            Some(Belief::Program {
                ifindex: 5,
                before: Some(_)
            })
        ),
        "{beliefs:?}"
    );
    rest(&mut bench);
    assert_eq!(drift(&bench), BTreeMap::new());
    // News that were lost may have been about any.
    bench.pass(7 * SECOND);
    bench.give(Event::HooksUnknown);
    rest(&mut bench);
    assert!(bench.effects.contains(&Effect::DumpLinks));
}

#[test]
fn rule_29_what_was_written_meanwhile_is_no_drift() {
    let mut bench = programmed();
    next_audit(&mut bench);
    // The look sees the row before the write that is sent now.
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    assert_eq!(briefs(&bench.poll()), ["row 5 closed epoch 1 sources"]);
    let (id, beliefs) = bench.audits.pop_front().unwrap();
    bench.yes();
    let differences = bench.look(&beliefs);
    assert!(
        !differences.is_empty(),
        "the row is another than it was believed then"
    );
    bench.give(Event::Audited(id, audited(differences)));
    assert_eq!(bench.poll(), []);
    assert_eq!(drift(&bench), BTreeMap::new());
    // It is looked at once more in this turn.
    let again = bench.audits.front().unwrap().1.clone();
    assert!(
        again
            .iter()
            .any(|belief| matches!(belief, Belief::Row { ifindex: 5, .. }))
    );
    assert!(
        !again
            .iter()
            .any(|belief| matches!(belief, Belief::Row { ifindex: 7, .. }))
    );
    assert_eq!(bench.audit(), (vec![], vec![]));
}

#[test]
fn rule_29_what_has_an_operation_out_waits_for_its_answer() {
    let mut bench = programmed();
    bench.go_to(bench.engine.next_deadline().unwrap());
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    bench.poll();
    let about_5 = |beliefs: &[Belief]| {
        let about = |belief: &Belief| matches!(belief, Belief::Row { ifindex: 5, .. });
        beliefs.iter().any(about)
    };
    assert!(!about_5(&bench.audits.front().unwrap().1));
    bench.audit();
    assert_eq!(bench.audits.len(), 0);
    bench.yes();
    assert!(
        about_5(&bench.audits.front().unwrap().1),
        "after the answer it is looked at"
    );
}

#[test]
fn rule_29_what_cannot_be_looked_at_is_no_news_and_said_once() {
    let mut bench = programmed();
    for _ in 0..3 {
        next_audit(&mut bench);
        let (id, _) = bench.audits.pop_front().unwrap();
        let unreadable = Some("EIO".to_owned());
        bench.give(Event::Audited(
            id,
            Audited {
                differences: Vec::new(),
                unreadable,
            },
        ));
        bench.run();
        assert_eq!(states(&bench), [State::Programmed; 2]);
    }
    let lines = bench.log();
    let unreadable = |line: &&LogLine| matches!(line.what, Happening::AuditUnreadable(_));
    assert_eq!(lines.iter().filter(unreadable).count(), 1);
}

// --- each kind ---------------------------------------------------------------------------------------------

/// Somebody changes the kernel; the next audit tells it as this, and these intents are no longer programmed at once.
struct Tampering {
    name: &'static str,
    tamper: fn(&mut Bench),
    kind: Drift,
    withdrawn: [bool; 2],
}

fn entry_of(bench: &mut Bench, ifindex: Ifindex, n: u8) -> &mut Entry {
    bench
        .kernel
        .pins
        .entries
        .get_mut(&ifindex)
        .unwrap()
        .get_mut(&key(n))
        .unwrap()
}

const TAMPERINGS: [Tampering; 14] = [
    Tampering {
        name: "an entry that leads to another policy",
        tamper: |bench| entry_of(bench, 5, 1).policy ^= 1,
        kind: Drift::Entry,
        withdrawn: [true, false],
    },
    Tampering {
        name: "an entry that is closed",
        tamper: |bench| entry_of(bench, 5, 2).open = false,
        kind: Drift::Entry,
        withdrawn: [true, false],
    },
    Tampering {
        name: "an entry that is gone",
        tamper: |bench| _ = bench.kernel.pins.entries.get_mut(&7).unwrap().remove(&key(3)),
        kind: Drift::Entry,
        withdrawn: [false, true],
    },
    Tampering {
        name: "a row that is gone",
        tamper: |bench| _ = bench.kernel.pins.rows.remove(&5),
        kind: Drift::Row,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a row that is closed",
        tamper: |bench| bench.kernel.pins.rows.get_mut(&5).unwrap().token = None,
        kind: Drift::Row,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a row that is open for somebody else",
        tamper: |bench| bench.kernel.pins.rows.get_mut(&7).unwrap().token = Some(token(999)),
        kind: Drift::Row,
        withdrawn: [false, true],
    },
    Tampering {
        name: "a source that is gone",
        tamper: |bench| drop(bench.kernel.pins.sources.remove(&5)),
        kind: Drift::Source,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a selector of another generation",
        tamper: |bench| {
            bench
                .kernel
                .pins
                .policies
                .get_mut(&0)
                .unwrap()
                .selected
                .generation += 1
        },
        kind: Drift::Policy,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a policy slot that is free",
        tamper: |bench| {
            // The same table, from which no selector leads.
            let value = bench.kernel.pins.policies.remove(&0).unwrap();
            let selected = value.selected;
            bench.kernel.pins.slots.insert(selected.base, vec![1]);
        },
        kind: Drift::Policy,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a policy that lets pass what is held",
        tamper: |bench| bench.kernel.pins.policies.get_mut(&1).unwrap().pass_while_held = true,
        kind: Drift::Policy,
        withdrawn: [false, true],
    },
    Tampering {
        name: "a slot that leads to another backend",
        tamper: |bench| {
            let base = bench.kernel.pins.policies[&0].selected.base;
            bench.kernel.set_slot(base, 99);
        },
        kind: Drift::Slot,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a backend at another device",
        tamper: |bench| {
            let backends = bench.kernel.pins.backends.values_mut();
            backends
                .filter(|backend| backend.policy == 0)
                .for_each(|backend| backend.ifindex = 7);
        },
        kind: Drift::Backend,
        withdrawn: [true, false],
    },
    Tampering {
        name: "a consumer's program that is gone",
        tamper: |bench| _ = bench.kernel.pins.attached.remove(&5),
        kind: Drift::Program,
        withdrawn: [true, false],
    },
    Tampering {
        name: "the producer's program that is gone",
        tamper: |bench| _ = bench.kernel.pins.attached.remove(&6),
        kind: Drift::Program,
        withdrawn: [true, true],
    },
];

/// All but epochs and set generations, which only rise.
fn content(bench: &Bench) -> Adoption {
    let mut pins = bench.kernel.adoption(&bench.links.keys().copied().collect());
    for row in pins.rows.values_mut() {
        row.epoch = 0;
    }
    pins
}

#[test]
fn rule_29_whatever_differs_is_told_withdrawn_put_right_and_acknowledged_again() {
    for case in TAMPERINGS {
        let name = case.name;
        let mut bench = programmed();
        let before = content(&bench);
        (case.tamper)(&mut bench);
        assert_ne!(content(&bench), before, "{name}");
        assert_eq!(states(&bench), [State::Programmed; 2], "{name}: nobody has told");
        next_audit(&mut bench);
        let (found, _) = bench.audit();
        let kinds: Vec<Drift> = found.iter().map(Difference::kind).collect();
        assert_eq!(kinds, [case.kind], "{name}");
        let withdrawn = states(&bench).map(|state| state != State::Programmed);
        assert_eq!(withdrawn, case.withdrawn, "{name}: {:?}", states(&bench));
        assert_eq!(drift(&bench), BTreeMap::from([(case.kind, 1)]), "{name}");
        let lines = said(&mut bench);
        assert_eq!(lines.len(), 1, "{name}: once: {lines:?}");
        rest(&mut bench);
        // Nothing of it lasts, but what a policy without a producer for a moment does.
        bench.pass(2 * SECOND);
        rest(&mut bench);
        assert_eq!(states(&bench), [State::Programmed; 2], "{name}");
        if case.withdrawn != [true; 2] {
            assert_eq!(content(&bench), before, "{name}");
        }
        assert_eq!(said(&mut bench), [], "{name}");
        assert_eq!(drift(&bench), BTreeMap::from([(case.kind, 1)]), "{name}");
    }
}

#[test]
fn rule_29_a_row_that_was_set_back_gets_an_epoch_above_both() {
    let mut bench = programmed();
    // Flows of before a revocation must not come to life again.
    for up in [false, true, false, true] {
        bench.give(Event::Link(Link {
            up,
            ..veth(5, "hfweb", 5)
        }));
        bench.run();
    }
    rest(&mut bench);
    let before = bench.kernel.pins.rows[&5].epoch;
    assert!(before > 0);
    bench.kernel.pins.rows.get_mut(&5).unwrap().epoch = 0;
    next_audit(&mut bench);
    let (_, sent) = bench.audit();
    assert_eq!(
        briefs(&sent),
        [format!("row 5 closed epoch {} sources", before + 1)]
    );
    rest(&mut bench);
    assert!(bench.kernel.pins.rows[&5].epoch > before);
    assert_eq!(states(&bench), [State::Programmed; 2]);
}

#[test]
fn rule_29_a_tampered_entry_stays_closed_until_it_is_proven() {
    let to_another: fn(&mut Bench) = |bench| entry_of(bench, 5, 1).policy = 1;
    let closed: fn(&mut Bench) = |bench| entry_of(bench, 5, 1).open = false;
    let away: fn(&mut Bench) = |bench| {
        bench.kernel.pins.entries.get_mut(&5).unwrap().remove(&key(1));
    };
    for tamper in [to_another, closed, away] {
        let mut bench = programmed();
        tamper(&mut bench);
        next_audit(&mut bench);
        let (_, sent) = bench.audit();
        assert_eq!(
            briefs(&sent),
            ["entries 5 1->0:closed"],
            "the other destination stays open"
        );
        let rounds = bench.rounds();
        assert_eq!(
            rounds[1],
            ["row 5 105 epoch 1 sources"],
            "flows that it let through are looked up anew"
        );
        let of = |what: &str| {
            rounds
                .iter()
                .position(|round| round.iter().any(|op| op.starts_with(what)))
        };
        let (proven, opened) = (of("prove 5"), of("entries 5 1->0:open"));
        assert!(proven.is_some() && opened > proven, "{rounds:#?}");
        assert_eq!(states(&bench), [State::Programmed; 2]);
    }
}

#[test]
fn rule_29_a_silent_change_of_identity_is_found() {
    let mut bench = programmed();
    bench.registry.insert(5, identity(205, 5));
    next_audit(&mut bench);
    let (found, sent) = bench.audit();
    assert_eq!(found, [Difference::Identity { ifindex: 5 }]);
    assert_eq!(briefs(&sent), ["row 5 closed epoch 1 sources"]);
    assert_eq!(states(&bench), [State::Pending, State::Programmed]);
    assert_eq!(drift(&bench), BTreeMap::from([(Drift::Identity, 1)]));
    rest(&mut bench);
    assert_eq!(states(&bench), [State::Programmed; 2]);
    assert_eq!(bench.kernel.pins.rows[&5].token, Some(token(205)));

    bench.registry.remove(&5);
    next_audit(&mut bench);
    bench.audit();
    rest(&mut bench);
    assert_eq!(states(&bench)[0], State::Held(HoldReason::IdentityMissing));
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
}

#[test]
fn rule_29_the_nodes_own_addresses_are_put_right() {
    let mut bench = programmed();
    let (mine, another) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
    bench.give(Event::Locals(BTreeSet::from([mine])));
    bench.run();
    assert_eq!(bench.kernel.pins.locals, BTreeSet::from([mine]));
    bench.kernel.pins.locals = BTreeSet::from([another]);
    next_audit(&mut bench);
    bench.audit();
    rest(&mut bench);
    assert_eq!(bench.kernel.pins.locals, BTreeSet::from([mine]));
    assert_eq!(drift(&bench), BTreeMap::from([(Drift::Local, 2)]));
}

#[test]
fn rule_29_a_foreign_program_before_ours_is_named_once_and_withdraws_until_it_is_gone() {
    let mut bench = programmed();
    bench.foreign.insert(5, vec!["program 77".to_owned()]);
    next_audit(&mut bench);
    let (_, sent) = bench.audit();
    assert_eq!(briefs(&sent), ["prove 5 for 105 1->0:open 2->0:open by 0+1g1"]);
    assert_eq!(states(&bench), [State::Pending, State::Programmed]);
    assert_eq!(
        said(&mut bench),
        [(
            Drift::Foreign,
            "program 77 is asked before our program and could let packets pass".to_owned()
        )]
    );
    bench.answer(
        |op| matches!(op, Op::ProveIntent(_)),
        Err(OpError::Disproved {
            message: "foreign program 77 runs before ours".into(),
        }),
    );
    bench.run();
    assert_eq!(
        states(&bench),
        [State::Failed(FailReason::ProofFailed), State::Programmed]
    );
    // Nobody says it twice, however often it is found.
    for _ in 0..3 {
        next_proofs_fail(&mut bench);
    }
    assert_eq!(said(&mut bench), []);
    assert_eq!(drift(&bench), BTreeMap::from([(Drift::Foreign, 1)]));

    bench.foreign.clear();
    while bench.state("dns", "web") != State::Programmed {
        bench.pass(SECOND);
        rest(&mut bench);
    }
    // A proof may have been first; the audit that finds the chain clean says so.
    for _ in 0..2 {
        bench.pass(EVERY);
        rest(&mut bench);
    }
    assert_eq!(
        said(&mut bench),
        [(
            Drift::Foreign,
            "nobody is asked before our program any more".to_owned()
        )]
    );
}

/// Half a minute, in which every proof of device 5 fails.
fn next_proofs_fail(bench: &mut Bench) {
    let end = bench.now.boot.plus(EVERY);
    while bench.now.boot < end {
        bench.pass(SECOND);
        for (id, op) in std::mem::take(&mut bench.out) {
            let fails = matches!(&op, Op::ProveIntent(proof) if proof.device.ifindex == 5);
            let result = if fails {
                Err(OpError::Disproved {
                    message: "foreign program 77 runs before ours".into(),
                })
            } else {
                bench.kernel.carry_out(&op);
                Ok(OpDone { writes: 1 })
            };
            bench.give(Event::Answer(id, result));
        }
        bench.poll();
        while !bench.audits.is_empty() {
            bench.audit();
        }
    }
}

#[test]
fn rule_29_what_nobody_wants_goes() {
    let mut bench = programmed();
    let before = content(&bench);
    let pins = &mut bench.kernel.pins;
    let row = pins.rows[&5];
    let stray_slot = PolicySlot {
        name: NameHash(5),
        uid: UidHash([5; 16]),
        ..pins.policies[&0].clone()
    };
    let entry = Entry {
        policy: 0,
        open: true,
    };
    pins.rows.insert(40, row);
    pins.entries.entry(40).or_default().insert(key(9), entry);
    pins.entries.entry(5).or_default().insert(key(9), entry);
    pins.sources
        .entry(5)
        .or_default()
        .insert(IpAddr::from([10, 9, 9, 9]));
    pins.policies.insert(30, stray_slot.clone());
    pins.backends.insert(40, pins.backends[&1].clone());
    bench.strays = vec![
        Difference::Row {
            ifindex: 40,
            found: Some(row),
        },
        Difference::Entry {
            ifindex: 40,
            key: key(9),
            found: Some(entry),
        },
        Difference::Entry {
            ifindex: 5,
            key: key(9),
            found: Some(entry),
        },
        Difference::Source {
            ifindex: 5,
            address: IpAddr::from([10, 9, 9, 9]),
            found: true,
        },
        Difference::Policy {
            slot: 30,
            found: Some(stray_slot),
        },
        Difference::Backend {
            id: 40,
            found: Some(bench.kernel.pins.backends[&40].clone()),
        },
    ];
    // A link for a device that is there, and has no attachment.
    bench.give(Event::Link(veth(50, "stranger", 50)));
    bench.kernel.pins.attached.insert(50);
    bench.run();
    next_audit(&mut bench);
    let (found, _) = bench.audit();
    assert_eq!(found.len(), 7, "{found:#?}");
    bench.strays.clear();
    rest(&mut bench);
    bench.pass(5 * SECOND);
    rest(&mut bench);
    assert_eq!(content(&bench), before);
    assert_eq!(states(&bench), [State::Programmed; 2]);
}

// --- proofs ------------------------------------------------------------------------------------------------

/// Audits, until the intents of a device are proven once more.
fn until_asked_again(bench: &mut Bench, ifindex: Ifindex) {
    loop {
        next_audit(bench);
        let (_, sent) = bench.audit();
        if sent
            .iter()
            .any(|op| matches!(op, Op::ProveIntent(proof) if proof.device.ifindex == ifindex))
        {
            break;
        }
        bench.run();
    }
}

#[test]
fn rule_29_a_proof_that_no_longer_holds_withdraws_and_has_what_it_stood_on_looked_at() {
    let mut bench = programmed();
    until_asked_again(&mut bench, 5);
    assert_eq!(
        states(&bench),
        [State::Programmed; 2],
        "a question withdraws nothing"
    );
    bench.kernel.pins.sources.remove(&5);
    let disproved = OpError::Disproved {
        message: "source of device 5".into(),
    };
    bench.answer(|op| matches!(op, Op::ProveIntent(_)), Err(disproved));
    bench.poll();
    assert_eq!(
        states(&bench),
        [State::Failed(FailReason::ProofFailed), State::Programmed]
    );
    let before = bench.now;
    rest(&mut bench);
    assert_eq!(
        states(&bench),
        [State::Programmed; 2],
        "put right without waiting for a turn"
    );
    assert_eq!(drift(&bench), BTreeMap::from([(Drift::Source, 1)]));
    assert_eq!(bench.now, before);
}

#[test]
fn rule_29_a_proof_that_was_asked_for_again_is_void_if_its_ground_has_moved() {
    let mut bench = programmed();
    until_asked_again(&mut bench, 5);
    for up in [false, true] {
        bench.give(Event::Link(Link {
            up,
            ..veth(5, "hfweb", 5)
        }));
        bench.poll();
    }
    // The write of the row overtakes the proof, which sees it closed.
    bench.answer(|op| matches!(op, Op::WriteRow { .. }), Ok(OpDone { writes: 1 }));
    let disproved = OpError::Disproved {
        message: "row of device 5".into(),
    };
    let oldest = bench.out.keys().next().copied().unwrap();
    bench.out.remove(&oldest);
    bench.give(Event::Answer(oldest, Err(disproved)));
    bench.run();
    rest(&mut bench);
    assert_eq!(states(&bench), [State::Programmed; 2]);
    let failed = bench
        .log()
        .into_iter()
        .any(|line| matches!(line.what, Happening::Failed(..)));
    assert!(!failed, "never failed");
}
