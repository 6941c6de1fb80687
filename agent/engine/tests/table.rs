//! Every transition, with the exact effects or the whole state.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use holdfast_engine::model::*;
use holdfast_engine::view::{PolicyView, Settled};
use support::*;

#[test]
fn a_policy_goes_from_hold_to_programmed_to_redeployed_to_gone() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(Event::Objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    // The policy comes before the interface.
    assert_eq!(bench.rounds(), [["policy 0 -> 0+0g0 serving 1"]]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );

    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 5 closed epoch 0", "entries 5 1->0:open", "attach 6"],
            vec!["attach 5"],
        ]
    );
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );

    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Poke(6));
    assert_eq!(
        bench.rounds(),
        [
            vec!["slots 0 [1]", "backends 1:6/106g1"],
            vec!["prove set 0 0+1g1 at 6"],
            vec!["policy 0 -> 0+1g1 serving 1"],
        ]
    );
    bench.registry.insert(5, identity(105, 5));
    bench.give(Event::Poke(5));
    assert_eq!(
        bench.rounds(),
        [
            vec!["prove 5 for 105 1->0:open by 0+1g1"],
            vec!["row 5 105 epoch 0"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.engine.view().settled(5, Some(token(105))), Settled::Done);
    assert_eq!(bench.engine.next_deadline(), None);

    // The same name, another device, another token.
    bench.go_to(Boot(5 * SECOND));
    bench.registry.remove(&5);
    bench.give(Event::LinkGone(5));
    assert_eq!(
        bench.rounds(),
        [vec!["clear 5", "delete identity 5 105"], vec!["detach 5"]]
    );
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 7 closed epoch 4768", "entries 7 1->0:open"],
            vec!["attach 7"],
            vec!["prove 7 for 107 1->0:open by 0+1g1"],
            vec!["row 7 107 epoch 4768"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);

    // The policy goes, then the attachments.
    bench.give(Event::Objects(vec![ObjectChange::PolicyGone(named("dns"))]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 7 closed epoch 4769"],
            vec!["clear 7"],
            vec!["policy 0 free"],
        ]
    );
    bench.give(Event::Objects(vec![
        ObjectChange::AttachmentGone(named("web")),
        ObjectChange::AttachmentGone(named("dns")),
    ]));
    assert_eq!(bench.rounds(), [["detach 6", "detach 7"]]);
    let later = bench.pass(5 * SECOND);
    assert_eq!(briefs(&later), ["backends 1:free"]);
    bench.run();
    bench.pass(5 * SECOND);
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn a_restart_with_everything_right_writes_nothing() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.go_to(Boot(5 * SECOND));
    let before = bench.policy("dns");
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds(), [["prove 5 for 105 1->0:open by 0+1g1"]]);
    assert_eq!(bench.policy("dns"), before);
    assert_eq!(bench.engine.next_deadline(), None);
}

fn objects(changes: Vec<ObjectChange>) -> Event {
    Event::Objects(changes)
}

fn refused(message: &str) -> OpResult {
    Err(OpError::Refused {
        message: message.into(),
    })
}

fn edit(policy: &Policy, edit: impl FnOnce(&mut PolicySpec)) -> ObjectChange {
    let mut policy = policy.clone();
    policy.generation += 1;
    edit(policy.content.as_mut().unwrap());
    ObjectChange::Policy(policy)
}

// --- rule 1 --------------------------------------------------------------------------------------------------

#[test]
fn rule_1_handle_never_emits_and_one_poll_takes_a_whole_batch() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    for round in 0..50_u8 {
        let mut link = veth(5, "hfweb", 5);
        link.mtu = 1400 + u32::from(round);
        bench.give(Event::Link(link));
    }
    let down = Link {
        up: false,
        ..veth(5, "hfweb", 5)
    };
    bench.give(Event::Link(down));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    // A bounce within one batch is no news at the end of it.
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

// --- rule 2 --------------------------------------------------------------------------------------------------

#[test]
fn rule_2_nothing_goes_before_everything_is_known() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    // While the agent is down everything that it serves goes away.
    bench.links.clear();
    bench.crash();
    assert_eq!(bench.poll(), []);
    bench.give(Event::LinkDump(Vec::new()));
    assert_eq!(bench.poll(), []);
    bench.give(Event::SourceComplete);
    assert_eq!(bench.rounds(), [["clear 5"], ["policy 0 free"]]);
}

#[test]
fn rule_2_a_row_that_cannot_be_read_keeps_its_interface_and_its_sets() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(5, RegistryRead::Failed("EIO".into()));
    bench.registry.insert(6, RegistryRead::Failed("EIO".into()));
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    assert_eq!(
        bench.state("dns", "web"),
        State::Failed(FailReason::RegistryUnreadable)
    );
    // The producer is read, the consumer still is not: nothing moves.
    bench.registry.insert(6, identity(106, 6));
    assert_eq!(bench.pass(2 * SECOND), []);
    assert_eq!(
        bench.state("dns", "web"),
        State::Failed(FailReason::RegistryUnreadable)
    );
    bench.registry.insert(5, identity(105, 5));
    assert_eq!(
        briefs(&bench.pass(5 * SECOND)),
        ["prove 5 for 105 1->0:open by 0+1g1"]
    );
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_2_a_saved_set_counts_for_additions_and_holds_but_removes_nothing() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "two",
        "web",
        "dns",
        &[2],
    ))]));
    bench.run();
    bench.crash();
    let links = bench.links.values().cloned().collect();
    bench.give(Event::LinkDump(links));
    // The saved set lacks policy `two`.
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
        ObjectChange::Policy(policy("three", "web", "dns", &[3])),
    ]));
    bench.give(Event::SavedComplete);
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.state("three", "web"), State::Programmed);
    assert!(bench.kernel.pins.entries[&5][&key(2)].open, "nothing was removed");
    // A hold by link is obeyed.
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    let sent = bench.run();
    assert_eq!(sent.len(), 1);
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    // The live list is complete: what it lacks goes.
    bench.give(Event::SourceComplete);
    bench.run();
    assert!(!bench.kernel.pins.entries[&5].contains_key(&key(2)));
}

// --- rule 3 --------------------------------------------------------------------------------------------------

#[test]
fn rule_3_a_failed_read_is_no_news() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(5, RegistryRead::Failed("EIO".into()));
    bench.give(Event::Poke(5));
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // It is read again until that works.
    bench.effects.clear();
    bench.pass(3 * SECOND);
    let reads = bench
        .effects
        .iter()
        .filter(|effect| matches!(effect, Effect::ReadRegistry(_)))
        .count();
    assert_eq!(reads, 2, "after 1 and 3 seconds");
}

#[test]
fn rule_3_only_an_intent_that_was_never_judged_fails_by_it() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(7, RegistryRead::Failed("EIO".into()));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "new", "hfnew", "web",
    ))]));
    bench.run();
    assert_eq!(
        bench.state("dns", "new"),
        State::Failed(FailReason::RegistryUnreadable)
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

// --- rule 4 --------------------------------------------------------------------------------------------------

#[test]
fn rule_4_enodev_is_a_fact_about_links() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.poll();
    while !bench.out.values().any(|op| matches!(op, Op::Attach { .. })) {
        bench.yes();
    }
    bench.effects.clear();
    bench.answer(|op| matches!(op, Op::Attach { .. }), Err(OpError::NoDevice));
    bench.poll();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
    assert!(bench.effects.contains(&Effect::AskLink(5)));
    // If the answer is that it is there all the same, there is no haste.
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    let sent = bench.run();
    assert!(!sent.iter().any(|op| matches!(op, Op::Attach { .. })));
    let sent = bench.pass(SECOND);
    assert_eq!(briefs(&sent), ["attach 5"]);
}

// --- rule 5 --------------------------------------------------------------------------------------------------

#[test]
fn rule_5_a_row_of_another_device_is_no_identity() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    // The number goes to another device; the old row is still there.
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(5, "hfweb", 9)));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
}

#[test]
fn rule_5_another_mac_is_another_device() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(veth(5, "hfweb", 9)));
    assert_eq!(bench.rounds(), [vec!["row 5 closed epoch 1"], vec!["attach 5"]]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );
    bench.registry.insert(5, identity(205, 9));
    bench.give(Event::Poke(5));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.kernel.pins.rows[&5].token, Some(token(205)));
}

#[test]
fn rule_5_a_rename_is_another_device() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(veth(5, "other", 5)));
    assert_eq!(
        bench.rounds(),
        [vec!["row 5 closed epoch 1"], vec!["clear 5"], vec!["detach 5"]]
    );
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
}

// --- rule 6 --------------------------------------------------------------------------------------------------

#[test]
fn rule_6_attached_only_after_the_answer_that_the_row_is_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(5, "hfweb", 9)));
    assert_eq!(briefs(&bench.poll()), ["clear 5", "delete identity 5 105"]);
    bench.answer(|op| matches!(op, Op::ClearInterface { .. }), refused("EIO"));
    // The close failed: no attach, whatever else is answered.
    let sent = bench.run();
    assert_eq!(briefs(&sent), [""; 0]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    let sent = bench.pass(SECOND);
    assert_eq!(briefs(&sent), ["clear 5"]);
    let sent = bench.run();
    assert!(sent.iter().any(|op| matches!(op, Op::Attach { .. })));
}

#[test]
fn rule_6_a_late_attach_of_the_old_device_is_not_believed() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "web", "hfweb", "web",
    ))]));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    assert_eq!(briefs(&bench.poll()), ["attach 5"]);
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(5, "hfweb", 9)));
    assert_eq!(bench.poll(), []);
    assert_eq!(briefs(&bench.yes()), ["attach 5"]);
    assert!(!bench.engine.view().attachments().next().unwrap().attached);
    bench.yes();
    assert!(bench.engine.view().attachments().next().unwrap().attached);
}

// --- rule 7 --------------------------------------------------------------------------------------------------

#[test]
fn rule_7_under_an_open_row_entries_are_closed_then_proven_then_opened() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let first = policy("dns", "web", "dns", &[1]);
    bench.give(objects(vec![edit(&first, |spec| {
        spec.destinations.insert(service(2));
    })]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["entries 5 2->0:closed"],
            vec!["prove 5 for 105 1->0:open 2->0:closed by 0+1g1"],
            vec!["entries 5 2->0:open"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_7_one_bad_intent_keeps_no_other_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "bad",
        "web",
        "dns",
        &[2],
    ))]));
    bench.run();
    // A redeploy: both are proven anew, one of them wrongly.
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.poll();
    for _ in 0..20 {
        let bad = bench
            .out
            .iter()
            .find(|(_, op)| matches!(op, Op::ProveIntent(proof) if proof.entries.contains_key(&key(2))))
            .map(|(id, _)| *id);
        if let Some(id) = bad {
            bench.out.remove(&id);
            bench.give(Event::Answer(
                id,
                Err(OpError::Disproved {
                    message: "verdict held".into(),
                }),
            ));
        }
        bench.yes();
    }
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.state("bad", "web"), State::Failed(FailReason::ProofFailed));
    assert_eq!(bench.kernel.pins.rows[&7].token, Some(token(107)));
    assert!(bench.kernel.pins.entries[&7][&key(1)].open);
    assert!(!bench.kernel.pins.entries[&7][&key(2)].open);
}

// --- rule 8 --------------------------------------------------------------------------------------------------

#[test]
fn rule_8_what_could_not_be_written_is_taken_back_and_said() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "bad",
        "web",
        "dns",
        &[2],
    ))]));
    bench.poll();
    while !bench.out.values().any(|op| matches!(op, Op::WriteEntries { .. })) {
        bench.yes();
    }
    bench.answer(|op| matches!(op, Op::WriteEntries { .. }), refused("EINVAL"));
    assert_eq!(briefs(&bench.poll()), ["delete entries 5 2"]);
    bench.run();
    let intent = &bench.intents("bad")[0];
    assert_eq!(intent.state, State::Failed(FailReason::MapWriteFailed));
    assert_eq!(
        intent.message.as_deref(),
        Some("EINVAL; the traffic to what could not be claimed takes the default path")
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_8_a_policy_that_does_not_fit_fails_as_a_whole_and_recovers() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "new", "hfnew", "web",
    ))]));
    bench.poll();
    let full = Err(OpError::Full {
        map: "services".into(),
        need: 1,
        have: 64,
    });
    bench.answer(|op| matches!(op, Op::WriteEntries { .. }), full);
    bench.run();
    for consumer in ["web", "new"] {
        assert_eq!(bench.state("dns", consumer), State::Failed(FailReason::MapFull));
    }
    assert!(!bench.kernel.pins.entries[&5][&key(1)].open, "claimed, closed");
    assert!(!bench.kernel.pins.entries.contains_key(&7));
    let message = bench.policy("dns").message.unwrap();
    assert!(message.contains("1 entries needed, 64 in all"), "{message}");
    assert!(message.contains("needs 2 entries on this node"), "{message}");
    // There is room after all.
    bench.pass(SECOND);
    bench.run();
    for consumer in ["web", "new"] {
        assert_eq!(bench.state("dns", consumer), State::Programmed);
    }
}

// --- rules 9 and 13 to 15 ------------------------------------------------------------------------------------

/// Policy `dns` at generation 1 with producer `dns`; generation 2 wants producer `next`, who is not there.
fn waiting(edit_more: impl FnOnce(&mut PolicySpec)) -> Bench {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.go_to(Boot(100 * SECOND));
    let first = policy("dns", "web", "dns", &[1]);
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("next", "hfnext", "next")),
        edit(&first, |spec| {
            spec.producers = selector("app", "next");
            edit_more(spec);
        }),
    ]));
    bench
}

#[test]
fn rule_13_a_switch_waits_for_a_ready_producer_and_the_old_set_serves() {
    let mut bench = waiting(|_| {});
    bench.effects.clear();
    assert_eq!(
        bench.rounds(),
        [["policy 0 -> 0+1g1 serving 1 waiting since 100"]]
    );
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    let view = bench.policy("dns");
    assert_eq!(view.generation, 2);
    assert_eq!(view.serving.unwrap().generation, 1);
    assert_eq!(view.proven, 1);
    assert_eq!(view.behind_since, None, "held at this generation is not behind");
    // Rule 14: after the deadline it goes on; one line says so.
    assert_eq!(bench.pass(29 * SECOND), []);
    bench.effects.clear();
    assert_eq!(bench.pass(60 * SECOND), []);
    let overdue: Vec<Happening> = bench
        .log()
        .into_iter()
        .map(|line| line.what)
        .filter(|what| matches!(what, Happening::SwitchOverdue(_)))
        .collect();
    assert_eq!(overdue, [Happening::SwitchOverdue(OnDeadline::KeepOld)]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    // A ready producer ends it.
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfnext", 8)));
    assert_eq!(
        bench.rounds(),
        [
            vec!["attach 8"],
            vec!["slots 1 [2]", "backends 1:6/106g1~249 2:8/108g2"],
            vec!["prove set 0 1+1g2 at 8"],
            vec!["policy 0 -> 1+1g2 serving 2"],
            vec!["prove 5 for 105 1->0:open by 1+1g2"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.policy("dns").serving, None);
    // The old one drains, then its id is freed.
    let sent = bench.pass(61 * SECOND);
    assert_eq!(briefs(&sent), ["backends 1:free"]);
    bench.run();
    bench.pass(2 * SECOND);
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn rule_13_the_wait_survives_a_restart_and_later_edits() {
    let mut bench = waiting(|_| {});
    bench.run();
    bench.go_to(Boot(120 * SECOND));
    let before = bench.policy("dns");
    bench.crash();
    bench.wake();
    // The old set still serves the consumer, although this life knows nothing of its content.
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    assert_eq!(
        bench.policy("dns"),
        PolicyView {
            proven: 0,
            applied: 2,
            ..before
        }
    );
    let again = policy("dns", "web", "next", &[1]);
    let mut third = again.clone();
    third.generation = 2;
    bench.give(objects(vec![edit(&third, |spec| spec.switchover.drain = 0)]));
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    assert_eq!(
        bench.kernel.pins.policies[&0].waiting_since,
        Some(Boot(100 * SECOND))
    );
}

#[test]
fn rule_13_members_that_die_leave_at_once_and_nobody_left_is_the_empty_set() {
    let mut bench = waiting(|_| {});
    bench.run();
    bench.give(Event::LinkGone(6));
    assert_eq!(
        bench.rounds(),
        [[
            "detach 6",
            "delete identity 6 106",
            "policy 0 -> 0+0g2 serving 1 waiting since 100"
        ]]
    );
    assert_eq!(bench.policy("dns").serving, None);
}

#[test]
fn rule_14_cut_selects_the_empty_set_at_the_deadline() {
    let mut bench = waiting(|spec| spec.switchover.on_deadline = OnDeadline::Cut);
    bench.run();
    let sent = bench.pass(30 * SECOND);
    assert_eq!(briefs(&sent), ["policy 0 -> 0+0g2 serving 1 waiting since 100"]);
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(bench.policy("dns").serving, None);
    // The old producer is still there; that changes nothing any more.
    assert_eq!(
        bench
            .pass(100 * SECOND)
            .iter()
            .filter(|op| matches!(op, Op::WritePolicy { .. }))
            .count(),
        0
    );
}

#[test]
fn rule_9_f55_what_is_new_in_a_generation_reaches_nobody_of_the_old_set() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "new", "hfnew", "new",
    ))]));
    bench.run();
    bench.go_to(Boot(100 * SECOND));
    let first = policy("dns", "web", "dns", &[1]);
    // Generation 2 adds a consumer and a destination, and moves to producers that are not ready.
    bench.give(objects(vec![edit(&first, |spec| {
        spec.producers = selector("app", "next");
        spec.consumers = Selector {
            match_labels: labels(&[]),
            match_expressions: vec![Requirement {
                key: "app".into(),
                operator: Operator::In(["web".to_owned(), "new".to_owned()].into()),
            }],
        };
        spec.destinations.insert(service(2));
    })]));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        bench.state("dns", "new"),
        State::Held(HoldReason::NoReadyProducer)
    );
    let entries = &bench.kernel.pins.entries;
    assert!(entries[&5][&key(1)].open, "the old pair goes on");
    assert!(!entries[&5][&key(2)].open, "a new destination waits");
    assert!(!entries[&7][&key(1)].open, "a new consumer waits");
    assert_eq!(bench.kernel.pins.rows[&7].token, None);
    // The old consumer is redeployed meanwhile: it was served by the old generation and still is.
    bench.registry.insert(9, identity(109, 9));
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(9, "hfweb", 9)));
    bench.run();
    assert_eq!(bench.kernel.pins.rows[&9].token, Some(token(109)));
    assert!(bench.kernel.pins.entries[&9][&key(1)].open);
    assert!(!bench.kernel.pins.entries[&9][&key(2)].open);
    // What this generation takes away closes at once, also while it waits.
    let mut second = first.clone();
    second.generation = 2;
    bench.give(objects(vec![edit(&second, |spec| {
        spec.producers = selector("app", "next");
        spec.destinations = [service(2)].into();
    })]));
    bench.run();
    assert!(!bench.kernel.pins.entries[&9].contains_key(&key(1)));
    // The switch comes: everything opens.
    bench.registry.insert(8, identity(108, 8));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "next", "hfnext", "next",
    ))]));
    bench.give(Event::Link(veth(8, "hfnext", 8)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert!(bench.kernel.pins.entries[&9][&key(2)].open);
}

#[test]
fn rule_15_a_producer_that_goes_withdraws_what_was_programmed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(Link {
        carrier: false,
        ..veth(6, "hfdns", 6)
    }));
    assert_eq!(bench.rounds(), [["policy 0 -> 0+0g2 serving 1"]]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(
        bench.kernel.pins.rows[&5].token,
        Some(token(105)),
        "the consumer is ready"
    );
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    assert_eq!(
        bench.rounds(),
        [
            vec!["slots 1 [1]", "backends 1:6/106g3"],
            vec!["prove set 0 1+1g3 at 6"],
            vec!["policy 0 -> 1+1g3 serving 1"],
            vec!["prove 5 for 105 1->0:open by 1+1g3"],
        ]
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}
