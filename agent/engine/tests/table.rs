//! Every transition, with the exact effects or the whole state.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "table/compare.rs"]
mod compare;
#[path = "table/journal.rs"]
mod journal;
#[path = "table/paths.rs"]
mod paths;
#[path = "table/since.rs"]
mod since;
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
fn rule_18_and_rule_27_a_restart_with_everything_right_writes_nothing() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.go_to(Boot(5 * SECOND));
    let before = bench.policy("dns");
    bench.crash();
    bench.wake();
    assert_eq!(briefs(&bench.poll()), ["prove 5 for 105 1->0:open by 0+1g1"]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Pending,
        "our own memory is no proof"
    );
    assert_eq!(bench.yes(), []);
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
    bench.give(Event::SourceComplete);
    assert_eq!(bench.poll(), []);
    bench.give(Event::LinkDump(Vec::new()));
    assert_eq!(bench.rounds(), [["clear 5"], ["policy 0 free"]]);
}

#[test]
fn rule_2_what_is_listed_in_part_is_not_acted_on() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.crash();
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("two", "web", "dns", &[2])),
    ]));
    bench.give(Event::LinkDump(bench.links.values().cloned().collect()));
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.state("two", "web"), State::Pending);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "dns",
        "web",
        "dns",
        &[1],
    ))]));
    bench.give(Event::SourceComplete);
    bench.run();
    assert_eq!(bench.state("two", "web"), State::Programmed);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
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

/// The next life knows the links, and of objects what is saved: consumer and producer of [`Bench::program`], and these.
fn wake_saved(bench: &mut Bench, policies: Vec<ObjectChange>) {
    bench.crash();
    let links = bench.links.values().cloned().collect();
    bench.give(Event::LinkDump(links));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
    ]));
    bench.give(objects(policies));
    bench.give(Event::SavedComplete);
    bench.run();
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
    // The saved set lacks policy `two`.
    wake_saved(
        &mut bench,
        vec![
            ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
            ObjectChange::Policy(policy("three", "web", "dns", &[3])),
        ],
    );
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

#[test]
fn rule_2_a_saved_set_makes_no_room() {
    let mut bench = Bench::started_with(Capacity {
        policies: 2,
        ..config(ALL_FEATURES).capacity
    });
    bench.program();
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "two",
        "web",
        "dns",
        &[2],
    ))]));
    bench.give(Event::Link(Link {
        carrier: false,
        ..veth(5, "hfweb", 5)
    }));
    bench.run();
    let before = bench.kernel.pins.entries[&5].clone();
    assert_eq!(before.len(), 2);
    // In the saved set policy `two`, which has the last slot, leaves its destination to one that finds no slot.
    wake_saved(
        &mut bench,
        vec![
            ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
            edit(&policy("two", "web", "dns", &[4]), |_| {}),
            ObjectChange::Policy(policy("three", "web", "dns", &[2])),
        ],
    );
    assert_eq!(bench.state("three", "web"), State::Failed(FailReason::MapFull));
    let now = &bench.kernel.pins.entries[&5];
    assert_eq!(now[&key(2)], before[&key(2)], "nothing was removed");
    bench.give(Event::SourceComplete);
    bench.run();
    assert!(!bench.kernel.pins.entries[&5].contains_key(&key(2)));
}

#[test]
fn design_2_1_who_is_not_in_a_dump_is_held() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    // News were lost: of the consumer's device nobody has said that it went.
    bench.give(Event::LinkDump(vec![veth(6, "hfdns", 6)]));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
    assert!(
        !bench.kernel.pins.rows.contains_key(&5),
        "{:?}",
        bench.kernel.pins.rows
    );
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
    bench.until_out(|op| matches!(op, Op::Attach { .. }));
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
    // Neither number nor MAC tells devices apart.
    bench.give(Event::Link(veth(5, "hfweb", 5)));
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

#[test]
fn rule_7_no_row_opens_over_what_is_not_proven_while_it_cannot_be_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut none = policy("none", "web", "nobody", &[2]);
    none.content.as_mut().unwrap().while_held = WhileHeld::Pass;
    bench.give(objects(vec![ObjectChange::Policy(none.clone())]));
    bench.run();
    // A redeploy: under the closed row everything is written open.
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.poll();
    bench.until_out(|op| matches!(op, Op::ProveIntent(_)));
    assert!(bench.kernel.pins.entries[&7][&key(2)].open);
    // What is closed while its slot may still let pass leaks: it waits.
    bench.give(objects(vec![edit(&none, |spec| {
        spec.while_held = WhileHeld::Drop
    })]));
    let sent = briefs(&bench.poll());
    assert_eq!(sent.len(), 1, "{sent:?}");
    bench.answer(|op| matches!(op, Op::ProveIntent(_)), Ok(OpDone { writes: 0 }));
    assert_eq!(bench.poll(), [], "an entry is open that nobody has proven");
    assert_eq!(
        bench.rounds(),
        [vec![], vec!["entries 7 2->1:closed"], vec!["row 7 107 epoch 0"]]
    );
}

#[test]
fn rule_7_no_row_opens_over_entries_that_lead_to_another_policy() {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.three_devices();
    let mut taken_over = policy("taken-over", "web", "api", &[1, 2]);
    taken_over.content.as_mut().unwrap().while_held = WhileHeld::Pass;
    bench.give(objects(vec![
        ObjectChange::Policy(taken_over.clone()),
        ObjectChange::Policy(policy("usual", "web", "dns", &[3])),
    ]));
    bench.run();
    assert_eq!(bench.state("taken-over", "web"), State::Programmed);
    // An older policy wins one of its destinations.
    bench.give(objects(vec![ObjectChange::Policy(Policy {
        created_ms: 1,
        ..policy("older", "web", "dns", &[1])
    })]));
    bench.run();
    assert_eq!(
        bench.state("taken-over", "web"),
        State::Failed(FailReason::Conflict)
    );
    let older = bench.kernel.pins.entries[&5][&key(1)];
    assert!(older.open);
    // The consumer loses its carrier, the loser its only producer.
    let without_carrier = Link {
        carrier: false,
        ..veth(5, "hfweb", 5)
    };
    bench.give(Event::Link(without_carrier));
    bench.give(Event::LinkGone(7));
    bench.run();
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    assert_eq!(
        bench.kernel.pins.entries[&5][&key(1)],
        older,
        "under a closed row"
    );
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.poll();
    bench.until_out(|op| matches!(op, Op::ProveIntent(_)));
    // The winner goes while the slot of the one that comes after it is being written.
    bench.give(objects(vec![
        ObjectChange::PolicyGone(named("older")),
        edit(&taken_over, |spec| spec.while_held = WhileHeld::Drop),
    ]));
    assert_eq!(briefs(&bench.poll()), ["policy 0 -> 0+0g2 serving 1"]);
    bench.answer(
        |op| matches!(op, Op::ProveIntent(proof) if proof.entries.contains_key(&key(3))),
        Ok(OpDone { writes: 0 }),
    );
    assert_eq!(bench.poll(), [], "one leads to whoever was there before");
    assert_eq!(
        bench.rounds(),
        [
            vec![],
            vec!["entries 5 1->0:closed"],
            vec!["policy 2 free", "row 5 105 epoch 2 sources"],
        ]
    );
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
    bench.until_out(|op| matches!(op, Op::WriteEntries { .. }));
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
fn design_2_13_a_policy_that_does_not_fit_fails_as_a_whole_and_recovers() {
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
            "policy 0 -> 0+0g2 serving 1 waiting since 100",
            "delete identity 6 106"
        ]]
    );
    assert_eq!(bench.policy("dns").serving, None);
}

#[test]
fn rule_13_another_incarnation_on_the_same_device_serves_nobody_on() {
    let mut bench = waiting(|_| {});
    bench.run();
    bench.registry.insert(6, identity(206, 6));
    bench.give(Event::Poke(6));
    bench.run();
    assert_eq!(bench.kernel.pins.policies[&0].selected.length, 0);
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

// --- rules 10 and 11 -----------------------------------------------------------------------------------------

#[test]
fn rule_10_a_destination_passes_in_one_write_to_a_policy_whose_set_is_selected() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut younger = policy("younger", "web", "dns", &[1, 2]);
    younger.created_ms = 2_000;
    bench.give(objects(vec![ObjectChange::Policy(younger)]));
    bench.run();
    // The loser fails as a whole, keeps its set written, and claims what nobody else takes.
    assert_eq!(bench.state("younger", "web"), State::Failed(FailReason::Conflict));
    assert_eq!(
        bench.policy("younger").message.as_deref(),
        Some("10.96.0.1 UDP 53 of this consumer belongs to the older policy shop/dns")
    );
    assert_eq!(bench.kernel.pins.policies[&1].selected.length, 1);
    assert_eq!(
        bench.kernel.pins.entries[&5][&key(2)],
        Entry {
            policy: 1,
            open: false
        }
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.give(objects(vec![ObjectChange::PolicyGone(named("dns"))]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["prove 5 for 105 2->1:closed 1->1:taken by 1+1g1"],
            vec!["entries 5 1->1:open 2->1:open"],
            vec!["policy 0 free", "row 5 105 epoch 1"],
            vec!["prove 5 for 105 1->1:open 2->1:open by 1+1g1"],
        ]
    );
    assert_eq!(bench.state("younger", "web"), State::Programmed);
}

#[test]
fn rule_10_else_it_is_claimed_in_between() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut second = policy("second", "web", "dns", &[1]);
    second.created_ms = 2_000;
    bench.give(objects(vec![
        ObjectChange::PolicyGone(named("dns")),
        ObjectChange::Policy(second),
    ]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["policy 1 -> 0+0g0 serving 1", "entries 5 1->0:closed"],
            vec![
                "slots 1 [2]",
                "backends 2:6/106g1",
                "entries 5 1->1:closed",
                "row 5 105 epoch 1"
            ],
            vec!["policy 0 free", "prove set 1 1+1g1 at 6"],
            vec!["policy 1 -> 1+1g1 serving 1"],
            vec!["prove 5 for 105 1->1:closed by 1+1g1"],
            vec!["entries 5 1->1:open"],
        ]
    );
}

#[test]
fn rule_11_a_new_uid_under_the_same_name_is_another_policy() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut again = policy("dns", "web", "dns", &[1]);
    again.uid = Uid("another".into());
    bench.give(objects(vec![ObjectChange::Policy(again)]));
    let rounds = bench.rounds();
    for round in &rounds {
        assert!(
            !round.iter().any(|line| line.starts_with("delete entries")),
            "{rounds:#?}"
        );
    }
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.kernel.pins.entries[&5][&key(1)].policy, 1);
    assert_eq!(
        bench.kernel.pins.policies.keys().copied().collect::<Vec<_>>(),
        [1]
    );
}

// --- rule 12 -------------------------------------------------------------------------------------------------

#[test]
fn rule_12_a_consumer_is_never_its_own_producer() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfboth", 5)));
    bench.give(Event::Link(veth(6, "hfweb", 6)));
    let mut both = attachment("both", "hfboth", "web");
    both.labels.insert("role".into(), "dns".into());
    let mut policy = policy("dns", "web", "dns", &[1]);
    policy.content.as_mut().unwrap().producers = selector("role", "dns");
    bench.give(objects(vec![
        ObjectChange::Attachment(both),
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Policy(policy),
    ]));
    bench.run();
    assert_eq!(
        bench.state("dns", "both"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
}

#[test]
fn rule_12_a_producer_counts_only_when_its_program_is_attached() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.poll();
    assert_eq!(bench.state("dns", "web"), State::Pending, "it is on its way");
    bench.answer(
        |op| matches!(op, Op::Attach { device } if device.ifindex == 6),
        refused("EPERM"),
    );
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    let sent = bench.pass(SECOND);
    assert_eq!(
        briefs(&sent),
        ["attach 6"],
        "the policy's timer looks after its producers"
    );
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn design_2_17_f07_an_edit_that_changes_nothing_here_is_acked_without_a_write() {
    let mut bench = Bench::started(ALL_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    let first = policy("dns", "web", "dns", &[1, 2, 3]);
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(first.clone()),
    ]));
    bench.run();
    bench.go_to(Boot(100 * SECOND));
    let before = bench.intents("dns")[0].since;
    // Destinations in another order, and a consumer that is on another node.
    let mut again = policy("dns", "web", "dns", &[3, 1, 2]);
    again.generation = 2;
    again.content.as_mut().unwrap().consumers = Selector {
        match_labels: labels(&[]),
        match_expressions: vec![Requirement {
            key: "app".into(),
            operator: Operator::In(["web".to_owned(), "elsewhere".to_owned()].into()),
        }],
    };
    bench.effects.clear();
    bench.give(objects(vec![ObjectChange::Policy(again)]));
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    let view = bench.policy("dns");
    assert_eq!(
        (view.state, view.generation, view.proven),
        (State::Programmed, 2, 2)
    );
    assert_eq!(bench.intents("dns")[0].since, before);
    assert!(
        bench
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Report(names) if names.contains(&named("dns")))),
        "and reported"
    );
}

#[test]
fn f30_a_consumer_that_is_deselected_is_gone_and_its_entries_are_counted() {
    let mut bench = Bench::programmed(ALL_FEATURES);
    let first = policy("dns", "web", "dns", &[1, 2, 3]);
    bench.give(objects(vec![edit(&first, |_| {})]));
    bench.run();
    assert_eq!(bench.kernel.pins.entries[&5].len(), 3);
    bench.effects.clear();
    bench.give(objects(vec![ObjectChange::Attachment(Attachment {
        generation: 2,
        ..attachment("web", "hfweb", "other")
    })]));
    bench.poll();
    assert_eq!(bench.engine.view().summary().intents.desired(), 0, "at once");
    assert_eq!(bench.engine.view().summary().intents.removing, 1);
    bench.run();
    assert!(!bench.kernel.pins.entries.contains_key(&5));
    assert_eq!(bench.engine.view().summary().intents.removing, 0);
    let line = bench
        .log()
        .into_iter()
        .find(|line| line.what == Happening::Removed(3))
        .unwrap();
    assert_eq!(
        (line.policy, line.consumer),
        (Some(named("dns")), Some(named("web")))
    );
}

#[test]
fn f32_a_thousand_incarnations_with_ever_new_errors_leave_nothing_behind() {
    let mut bench = Bench::programmed(ALL_FEATURES);
    let mut sizes = Vec::new();
    for life in 0..1_000_u32 {
        let (ifindex, number) = (100 + life, u8::try_from(life % 250).unwrap());
        let before = if life == 0 { 5 } else { ifindex - 1 };
        bench.give(Event::LinkGone(before));
        // Its row goes by the operation that the engine asks for.
        bench.registry.remove(&before);
        bench
            .registry
            .insert(ifindex, identity(u64::from(1_000 + life), number));
        bench.give(Event::Link(veth(ifindex, "hfweb", number)));
        bench.poll();
        bench.until_out(|op| matches!(op, Op::Attach { .. }));
        // Attaching fails once, each time with another text.
        bench.answer(
            |op| matches!(op, Op::Attach { .. }),
            refused(&format!("errno {}", life % 50)),
        );
        bench.run();
        assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::AttachFailed));
        bench.pass(2 * SECOND);
        bench.run();
        assert_eq!(bench.state("dns", "web"), State::Programmed);
        bench.effects.clear();
        sizes.push(format!("{:?}", bench.engine).len());
    }
    assert!(
        sizes[999] < sizes[9] + sizes[9] / 20,
        "{} {}: {:#?}",
        sizes[9],
        sizes[999],
        bench.engine
    );
    assert_eq!(bench.engine.view().remembered().len(), 1);
    bench.pass(10 * SECOND);
    assert_eq!(bench.engine.next_deadline(), None);
}

#[test]
fn rule_18_nothing_is_written_to_an_interface_while_its_clear_is_out() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::PolicyGone(named("dns"))]));
    assert_eq!(briefs(&bench.poll()), ["row 5 closed epoch 1"]);
    assert_eq!(briefs(&bench.yes()), ["clear 5"]);
    // Somebody selects the consumer before the answer.
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "other",
        "web",
        "dns",
        &[2],
    ))]));
    bench.poll();
    bench.answer(
        |op| matches!(op, Op::WritePolicy { .. }),
        Ok(OpDone { writes: 1 }),
    );
    let sent = bench.poll();
    assert!(
        !sent.iter().any(|op| matches!(
            op,
            Op::WriteEntries { .. } | Op::WriteRow { .. } | Op::WriteSources { .. }
        )),
        "{sent:#?}"
    );
    bench.run();
    assert_eq!(bench.state("other", "web"), State::Programmed);
    assert_eq!(
        bench.kernel.pins.entries[&5].keys().copied().collect::<Vec<_>>(),
        [key(2)]
    );
}

#[test]
fn design_2_6_a_policy_that_goes_is_one_line_however_many_consumers_it_had() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("new", "hfnew", "web")),
        ObjectChange::Policy(policy("two", "web", "dns", &[2, 3])),
    ]));
    bench.run();
    bench.log();
    // On one consumer it leaves entries beside another policy's, on the other as well.
    bench.give(objects(vec![ObjectChange::PolicyGone(named("two"))]));
    bench.run();
    let removals = |bench: &mut Bench| -> Vec<(Happening, Option<String>, Option<String>)> {
        bench
            .log()
            .into_iter()
            .filter(|line| matches!(line.what, Happening::Removed(_) | Happening::PolicyRemoved(_)))
            .map(|line| {
                (
                    line.what,
                    line.policy.map(|name| name.name),
                    line.consumer.map(|name| name.name),
                )
            })
            .collect()
    };
    assert_eq!(
        removals(&mut bench),
        [(Happening::PolicyRemoved(4), Some("two".into()), None)]
    );
    // A consumer that is no longer selected has its own line, and names the policy.
    bench.give(objects(vec![ObjectChange::Attachment(Attachment {
        generation: 2,
        ..attachment("new", "hfnew", "other")
    })]));
    bench.run();
    assert_eq!(
        removals(&mut bench),
        [(Happening::Removed(1), Some("dns".into()), Some("new".into()))]
    );
    // So has the last one of a policy that stays.
    bench.give(objects(vec![ObjectChange::Attachment(Attachment {
        generation: 2,
        ..attachment("web", "hfweb", "other")
    })]));
    bench.run();
    assert_eq!(
        removals(&mut bench),
        [(Happening::Removed(1), Some("dns".into()), Some("web".into()))]
    );
    // Whoever had nothing in the kernel leaves no line.
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "none",
        "nobody",
        "dns",
        &[9],
    ))]));
    bench.run();
    bench.give(objects(vec![ObjectChange::PolicyGone(named("none"))]));
    bench.run();
    assert_eq!(removals(&mut bench), []);
}

// --- rules 16 to 18 ------------------------------------------------------------------------------------------

#[test]
fn rule_16_a_row_that_cannot_be_closed_is_failed_above_held() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    assert_eq!(briefs(&bench.poll()), ["row 5 closed epoch 1"]);
    assert_eq!(bench.state("dns", "web"), State::Held(HoldReason::InterfaceDown));
    bench.answer(|op| matches!(op, Op::WriteRow { .. }), refused("EIO"));
    // The second line: what it would deliver is closed.
    assert_eq!(briefs(&bench.poll()), ["entries 5 1->0:closed"]);
    assert_eq!(
        bench.state("dns", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    bench.run();
    assert_eq!(briefs(&bench.pass(SECOND)), ["row 5 closed epoch 2"]);
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Held(HoldReason::InterfaceDown));
}

#[test]
fn rule_16_removing_counts_until_the_kernel_has_answered() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "two",
        "web",
        "dns",
        &[2],
    ))]));
    bench.run();
    bench.effects.clear();
    bench.give(objects(vec![ObjectChange::PolicyGone(named("two"))]));
    assert_eq!(briefs(&bench.poll()), ["entries 5 2->1:closed"]);
    assert_eq!(bench.engine.view().summary().intents.removing, 1);
    assert_eq!(bench.engine.view().summary().intents.desired(), 1);
    assert_eq!(briefs(&bench.yes()), ["row 5 105 epoch 1"]);
    assert_eq!(
        briefs(&bench.yes()),
        ["delete entries 5 2", "prove 5 for 105 1->0:open by 0+1g1"]
    );
    assert_eq!(bench.engine.view().summary().intents.removing, 1);
    bench.yes();
    assert_eq!(bench.engine.view().summary().intents.removing, 0);
    bench.run();
    assert!(
        bench
            .log()
            .iter()
            .any(|line| line.what == Happening::PolicyRemoved(1))
    );
}

#[test]
fn rule_16_invalid_is_failed_at_the_refused_generation_and_the_last_good_serves() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut broken = policy("dns", "web", "dns", &[1]);
    broken.generation = 2;
    broken.content = Err(Refusal {
        reason: FailReason::Invalid,
        message: "destinations[0]: host bits are set".into(),
        consumers: None,
    });
    bench.give(objects(vec![ObjectChange::Policy(broken)]));
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    let view = bench.policy("dns");
    assert_eq!(view.state, State::Failed(FailReason::Invalid));
    assert_eq!(view.generation, 2);
    assert_eq!(view.serving.unwrap().generation, 1);
    assert_eq!(
        view.message.as_deref(),
        Some("destinations[0]: host bits are set")
    );
    assert_eq!(bench.engine.next_deadline(), None, "trying again cannot help");
    // The next life does not know the last good content: it leaves everything as it is.
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    assert_eq!(bench.policy("dns").state, State::Failed(FailReason::Invalid));
}

#[test]
fn rule_17_since_and_held_since() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let programmed = bench.intents("dns")[0].since;
    bench.go_to(Boot(10 * SECOND));
    // An edit that changes nothing here.
    bench.give(objects(vec![edit(&policy("dns", "web", "dns", &[1]), |_| {})]));
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    bench.give(Event::Link(Link {
        mtu: 1400,
        ..veth(5, "hfweb", 5)
    }));
    assert_eq!(bench.rounds(), Vec::<Vec<String>>::new());
    assert_eq!(bench.intents("dns")[0].since, programmed);
    assert_eq!(bench.policy("dns").proven, 2, "and it is acked");
    bench.give(Event::LinkGone(5));
    bench.run();
    let held = bench.intents("dns")[0].held_since.unwrap();
    assert_eq!(held.boot, Boot(10 * SECOND));
    bench.go_to(Boot(20 * SECOND));
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.run();
    let intent = &bench.intents("dns")[0];
    assert_eq!(intent.state, State::Held(HoldReason::IdentityMissing));
    assert_eq!(intent.since.boot, Boot(20 * SECOND));
    assert_eq!(
        intent.held_since,
        Some(held),
        "whatever reasons it passes through"
    );
    let before = intent.clone();
    bench.go_to(Boot(30 * SECOND));
    bench.crash();
    bench.wake();
    bench.run();
    assert_eq!(bench.intents("dns")[0], before, "a restart moves neither");
    assert_eq!(
        bench.engine.view().summary().holds_begun[&HoldReason::IdentityMissing],
        0
    );
    bench.go_to(Boot(40 * SECOND));
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Poke(7));
    bench.run();
    let intent = &bench.intents("dns")[0];
    assert_eq!((intent.state, intent.held_since), (State::Programmed, None));
    assert_eq!(intent.since.boot, Boot(40 * SECOND));
}

#[test]
fn rule_17_a_hold_keeps_its_age_over_a_reboot() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.go_to(Boot(100 * SECOND));
    bench.give(Event::LinkGone(5));
    bench.run();
    let held = bench.intents("dns")[0].held_since.unwrap();
    bench.go_to(Boot(130 * SECOND));
    // The boot clock begins anew, the wall clock goes on.
    bench.now.boot = Boot(50 * SECOND);
    bench.crash();
    bench.wake();
    bench.run();
    let since = bench.intents("dns")[0].held_since.unwrap();
    assert_eq!(since.wall_ms, held.wall_ms);
    assert_eq!(since.boot, Boot(20 * SECOND), "30 s ago");
}

#[test]
fn rule_18_f56_never_programmed_while_an_answer_is_out() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    assert_eq!(briefs(&bench.poll()), ["row 5 closed epoch 1"]);
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    // The close is out: nothing more is sent for the row, and nothing is claimed.
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.state("dns", "web"), State::Pending);
    assert_eq!(briefs(&bench.yes()), ["prove 5 for 105 1->0:open by 0+1g1"]);
    assert_eq!(bench.state("dns", "web"), State::Pending);
    assert_eq!(briefs(&bench.yes()), ["row 5 105 epoch 1"]);
    assert_eq!(bench.state("dns", "web"), State::Pending);
    bench.yes();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

// --- rules 19 to 21 ------------------------------------------------------------------------------------------

/// Deadlines that the engine keeps within this time, in seconds since the start.
fn deadlines(bench: &mut Bench, nanos: u64) -> Vec<u64> {
    let end = bench.now.boot.plus(nanos);
    let mut seen = Vec::new();
    while let Some(due) = bench.engine.next_deadline().filter(|due| *due <= end) {
        seen.push(due.0 / SECOND);
        bench.go_to(due);
        bench.give(Event::Tick);
        bench.poll();
    }
    bench.go_to(end);
    seen
}

#[test]
fn rule_19_f05_f06_rechecks_double_to_30_s_whatever_others_do() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.run();
    // A thousand events a second of others, and echoes of the policy.
    let mut rechecks = Vec::new();
    for step in 0..10_000_u64 {
        bench.give(Event::Link(Link {
            mtu: 1400 + u32::try_from(step % 9).unwrap(),
            ..veth(99, "other", 99)
        }));
        bench.give(objects(vec![ObjectChange::Policy(policy(
            "dns",
            "web",
            "dns",
            &[1],
        ))]));
        rechecks.extend(deadlines(&mut bench, SECOND / 1000));
    }
    assert_eq!(rechecks, [1, 3, 7]);
    // Twenty minutes: every 30 s, and once a minute the summary.
    let later = deadlines(&mut bench, 1200 * SECOND);
    assert_eq!(later[..6], [15, 31, 60, 61, 91, 120]);
    // It comes: at once. Then only the identity comes, silently: at most 30 s; waits begin at 1 s again.
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );
    let start = bench.now.boot.0 / SECOND;
    let waits: Vec<u64> = deadlines(&mut bench, 16 * SECOND)
        .iter()
        .map(|at| at - start)
        .collect();
    assert_eq!(waits, [1, 3, 7, 15]);
    bench.registry.insert(5, identity(105, 5));
    let sent = bench.pass(16 * SECOND);
    assert!(!sent.is_empty());
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(
        bench.engine.next_deadline(),
        None,
        "a policy that holds nothing has no timer"
    );
    // Held again: 1 s again. After a virtual day it has not stopped.
    bench.give(Event::LinkGone(5));
    bench.run();
    let start = bench.now.boot.0 / SECOND;
    let day = deadlines(&mut bench, 86_400 * SECOND);
    assert_eq!(day[0] - start, 1);
    assert!(day.len() > 86_400 / 30);
}

#[test]
fn rule_19_long_pauses_end_at_whole_seconds() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.go_to(Boot(100 * SECOND + 300));
    bench.registry.remove(&5);
    bench.give(Event::Poke(5));
    bench.run();
    let mut due = Vec::new();
    for _ in 0..5 {
        due.extend(bench.engine.next_deadline().map(|due| due.0 - 100 * SECOND));
        bench.pass(due.last().unwrap() + 100 * SECOND - bench.now.boot.0);
    }
    assert_eq!(
        due,
        [
            SECOND + 300,
            3 * SECOND + 300,
            7 * SECOND + 300,
            16 * SECOND,
            32 * SECOND
        ],
        "from 8 s on wake-ups are shared"
    );
}

#[test]
fn rule_19_own_events_cut_through_and_do_not_advance() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.remove(&5);
    bench.give(Event::Poke(5));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );
    assert_eq!(deadlines(&mut bench, 4 * SECOND), [1, 3]);
    bench.effects.clear();
    bench.give(Event::Link(Link {
        mtu: 1400,
        ..veth(5, "hfweb", 5)
    }));
    bench.poll();
    assert!(bench.effects.contains(&Effect::ReadRegistry([5].into())));
    assert_eq!(deadlines(&mut bench, 20 * SECOND), [7, 15]);
}

#[test]
fn rule_20_f28_an_add_that_always_fails_is_tried_at_0_1_3_7_15_31_s() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "bad",
        "web",
        "dns",
        &[2],
    ))]));
    let mut attempts = Vec::new();
    let fail = |bench: &mut Bench, attempts: &mut Vec<u64>, sent: Vec<Op>| {
        let mut sent = sent;
        while !sent.is_empty() || !bench.out.is_empty() {
            let adds: Vec<OpId> = bench
                .out
                .iter()
                .filter(|(_, op)| matches!(op, Op::WriteEntries { .. }))
                .map(|(id, _)| *id)
                .collect();
            assert!(attempts.len() < 100, "{attempts:?}");
            for id in adds {
                attempts.push(bench.now.boot.0 / SECOND);
                bench.out.remove(&id);
                bench.give(Event::Answer(id, refused("EINVAL")));
            }
            sent = bench.yes();
        }
    };
    let sent = bench.poll();
    fail(&mut bench, &mut attempts, sent);
    while let Some(due) = bench.engine.next_deadline().filter(|due| due.0 <= 60 * SECOND) {
        bench.go_to(due);
        bench.give(Event::Tick);
        let sent = bench.poll();
        fail(&mut bench, &mut attempts, sent);
    }
    assert_eq!(attempts, [0, 1, 3, 7, 15, 31]);
    assert_eq!(
        bench.state("bad", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    let failures = bench
        .log()
        .iter()
        .filter(|line| matches!(line.what, Happening::Failed(..)))
        .count();
    assert_eq!(failures, 1, "one line, not one per retry");
}

#[test]
fn rule_20_a_set_that_failed_arms_the_timer_although_nothing_is_held() {
    let mut bench = Bench::programmed(ALL_FEATURES);
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfmore", 8)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "more", "hfmore", "dns",
    ))]));
    bench.poll();
    bench.yes();
    bench.answer(|op| matches!(op, Op::WriteSlots { .. }), refused("EIO"));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Failed(FailReason::MapWriteFailed)
    );
    assert_eq!(
        bench.kernel.pins.policies[&0].selected.generation, 1,
        "the old set serves on"
    );
    assert!(bench.kernel.pins.entries[&5][&key(1)].open);
    let sent = bench.pass(SECOND);
    assert!(
        sent.iter().any(|op| matches!(op, Op::WriteSlots { .. })),
        "{:?}",
        briefs(&sent)
    );
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn design_2_3_a_producer_that_comes_wakes_the_policies_that_select_it() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.registry.insert(5, identity(105, 5));
    bench.registry.insert(6, identity(106, 6));
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    bench.give(Event::Link(veth(6, "hfdns", 6)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn design_2_9_a_policy_that_cannot_be_written_holds_up_no_other() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "bad",
        "web",
        "dns",
        &[8],
    ))]));
    bench.poll();
    bench.answer(|op| matches!(op, Op::WritePolicy { .. }), refused("EIO"));
    bench.run();
    let failed = State::Failed(FailReason::MapWriteFailed);
    assert_eq!(bench.state("bad", "web"), failed);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "good",
        "web",
        "dns",
        &[9],
    ))]));
    bench.run();
    assert_eq!(bench.state("good", "web"), State::Programmed);
    assert_eq!(bench.state("bad", "web"), failed);
}

#[test]
fn rule_20_an_intent_that_was_disproved_is_proven_again_although_nothing_else_is_wrong() {
    let mut bench = Bench::programmed(ALL_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "log",
        "web",
        "dns",
        &[2],
    ))]));
    bench.poll();
    bench.until_out(|op| matches!(op, Op::ProveIntent(_)));
    bench.answer(
        |op| matches!(op, Op::ProveIntent(_)),
        Err(OpError::Disproved {
            message: "verdict held".into(),
        }),
    );
    bench.run();
    assert_eq!(bench.state("log", "web"), State::Failed(FailReason::ProofFailed));
    let mut sent = bench.pass(SECOND);
    sent.extend(bench.run());
    assert!(
        sent.iter().any(|op| matches!(op, Op::ProveIntent(_))),
        "{:?}",
        briefs(&sent)
    );
    assert_eq!(bench.state("log", "web"), State::Programmed);
}

#[test]
fn rule_20_an_interface_event_retries_only_its_own_items() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(Event::Link(veth(5, "hfa", 5)));
    bench.give(Event::Link(veth(6, "hfb", 6)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("a", "hfa", "web")),
        ObjectChange::Attachment(attachment("b", "hfb", "web")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    bench.poll();
    while bench
        .out
        .values()
        .filter(|op| matches!(op, Op::Attach { .. }))
        .count()
        < 2
    {
        bench.yes();
    }
    for ifindex in [5, 6] {
        bench.answer(
            |op| matches!(op, Op::Attach { device } if device.ifindex == ifindex),
            refused("EPERM"),
        );
    }
    assert_eq!(bench.run(), []);
    assert_eq!(bench.state("dns", "a"), State::Failed(FailReason::AttachFailed));
    bench.give(Event::Link(Link {
        mtu: 1400,
        ..veth(5, "hfa", 5)
    }));
    assert_eq!(briefs(&bench.poll()), ["attach 5"]);
}

#[test]
fn rule_21_no_answer_in_10_s_fails_and_a_late_one_counts_if_the_device_is_the_same() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(Link {
        up: false,
        ..veth(5, "hfweb", 5)
    }));
    assert_eq!(briefs(&bench.poll()), ["row 5 closed epoch 1"]);
    assert_eq!(deadlines(&mut bench, 10 * SECOND).last(), Some(&10));
    let intent = &bench.intents("dns")[0];
    assert_eq!(intent.state, State::Failed(FailReason::MapWriteFailed));
    assert_eq!(
        intent.message.as_deref(),
        Some("no answer from the kernel in 10 s")
    );
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Held(HoldReason::InterfaceDown));
}

// --- rules 22 and 23 -----------------------------------------------------------------------------------------

#[test]
fn rule_22_f43_of_two_attachments_of_one_interface_the_registered_identity_wins() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let mut a = attachment("a", "hfshared", "web");
    a.expected = Some(incarnation("a"));
    let mut b = attachment("b", "hfshared", "web");
    b.expected = Some(incarnation("b"));
    bench.give(Event::Link(veth(7, "hfshared", 7)));
    bench.give(objects(vec![
        ObjectChange::Attachment(a),
        ObjectChange::Attachment(b),
    ]));
    bench.run();
    assert_eq!(bench.state("dns", "a"), State::Held(HoldReason::IdentityMissing));
    assert_eq!(bench.state("dns", "b"), State::Held(HoldReason::IdentityMissing));
    let registered = |who: &str| match identity(107, 7) {
        RegistryRead::Row(row) => RegistryRead::Row(Identity {
            incarnation: Some(incarnation(who)),
            ..row
        }),
        other => other,
    };
    bench.registry.insert(7, registered("b"));
    bench.give(Event::Poke(7));
    bench.run();
    assert_eq!(bench.state("dns", "b"), State::Programmed);
    assert_eq!(bench.state("dns", "a"), State::Failed(FailReason::Conflict));
    assert_eq!(
        bench
            .intents("dns")
            .iter()
            .find(|i| i.consumer == named("a"))
            .unwrap()
            .message
            .as_deref(),
        Some("interface hfshared belongs to attachment shop/b: its identity is the registered one")
    );
    bench.registry.insert(7, registered("c"));
    bench.give(Event::Poke(7));
    bench.run();
    for who in ["a", "b"] {
        assert_eq!(bench.state("dns", who), State::Held(HoldReason::IdentityMismatch));
    }
    assert_eq!(bench.kernel.pins.rows[&7].token, None);
}

#[test]
fn rule_22_f43_of_two_attachments_with_one_address_the_younger_fails() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let shared = std::net::IpAddr::from([10, 0, 0, 9]);
    let mut older = attachment("web", "hfweb", "web");
    older.generation = 2;
    older.addresses.insert(shared);
    let mut younger = attachment("young", "hfyoung", "web");
    younger.created_ms = 2_000;
    younger.addresses.insert(shared);
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::Link(veth(7, "hfyoung", 7)));
    bench.give(objects(vec![
        ObjectChange::Attachment(younger),
        ObjectChange::Attachment(older),
    ]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(bench.state("dns", "young"), State::Failed(FailReason::Conflict));
    assert!(!bench.kernel.pins.entries[&7][&key(1)].open, "claimed, closed");
    assert_eq!(bench.kernel.pins.rows[&7].token, None);
    bench.give(objects(vec![ObjectChange::AttachmentGone(named("web"))]));
    bench.run();
    assert_eq!(bench.state("dns", "young"), State::Programmed);
}

#[test]
fn rule_23_labels_make_intents_come_and_go() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.effects.clear();
    let mut relabelled = attachment("web", "hfweb", "nobody");
    relabelled.generation = 2;
    bench.give(objects(vec![ObjectChange::Attachment(relabelled)]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 5 closed epoch 1"],
            vec!["clear 5"],
            vec!["policy 0 free"]
        ]
    );
    assert_eq!(bench.engine.view().policies().count(), 0);
    assert!(bench.log().iter().any(|line| line.what == Happening::Removed(1)));
    assert!(
        bench.kernel.pins.attached.contains(&5),
        "rule 30: the program follows the attachment"
    );
}

#[test]
fn rule_23_covers_follows_selection_and_generations() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let web = attachment("web", "hfweb", "web").covers;
    let dns = attachment("dns", "hfdns", "dns").covers;
    assert_eq!(
        bench.policy("dns").covers,
        web.consumer.wrapping_add(dns.producer)
    );
    let mut edited = attachment("dns", "hfdns", "dns");
    edited.generation = 2;
    edited.covers.producer = 77;
    bench.give(objects(vec![ObjectChange::Attachment(edited)]));
    bench.run();
    assert_eq!(bench.policy("dns").covers, web.consumer.wrapping_add(77));
}

// --- rules 27, 28, 30 ----------------------------------------------------------------------------------------

/// Kills the agent after every number of answers of a run, and lets the next life finish it.
fn killed_everywhere(start: impl Fn() -> Bench, change: impl Fn(&mut Bench)) {
    let mut bench = start();
    change(&mut bench);
    bench.run();
    let wanted = bench.kernel.pins.clone();
    for steps in 0..60 {
        for carried_out in [false, true] {
            let mut bench = start();
            change(&mut bench);
            bench.poll();
            let mut over = false;
            for _ in 0..steps {
                let Some((id, op)) = bench.out.pop_first() else {
                    over = true;
                    break;
                };
                bench.kernel.carry_out(&op);
                bench.give(Event::Answer(id, Ok(OpDone { writes: 1 })));
                bench.poll();
            }
            if carried_out && let Some((_, op)) = bench.out.pop_first() {
                bench.kernel.carry_out(&op);
            }
            bench.crash();
            bench.wake();
            bench.run();
            bench.pass(120 * SECOND);
            bench.run();
            let there = &bench.kernel.pins;
            assert_eq!(there.attached, wanted.attached, "after {steps}");
            assert_eq!(there.entries, wanted.entries, "after {steps}");
            assert_eq!(
                there
                    .rows
                    .iter()
                    .map(|(i, row)| (*i, row.token))
                    .collect::<Vec<_>>(),
                wanted
                    .rows
                    .iter()
                    .map(|(i, row)| (*i, row.token))
                    .collect::<Vec<_>>(),
                "after {steps}"
            );
            assert_eq!(there.policies.len(), wanted.policies.len(), "after {steps}");
            if over {
                return;
            }
        }
    }
}

#[test]
fn rule_27_f31_a_kill_at_every_step_of_an_apply_heals() {
    killed_everywhere(
        || Bench::started(FIRST_FEATURES),
        |bench| {
            bench.registry.insert(5, identity(105, 5));
            bench.registry.insert(6, identity(106, 6));
            bench.give(Event::Link(veth(5, "hfweb", 5)));
            bench.give(Event::Link(veth(6, "hfdns", 6)));
            bench.give(objects(vec![
                ObjectChange::Attachment(attachment("web", "hfweb", "web")),
                ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
                ObjectChange::Policy(policy("dns", "web", "dns", &[1, 2])),
            ]));
        },
    );
}

#[test]
fn rule_27_f31_a_kill_at_every_step_of_a_switch_heals() {
    killed_everywhere(
        || {
            let mut bench = Bench::programmed(FIRST_FEATURES);
            bench.registry.insert(8, identity(108, 8));
            bench.give(Event::Link(veth(8, "hfnext", 8)));
            bench.give(objects(vec![ObjectChange::Attachment(attachment(
                "next", "hfnext", "next",
            ))]));
            bench.run();
            bench
        },
        |bench| {
            bench.give(objects(vec![edit(&policy("dns", "web", "dns", &[1]), |spec| {
                spec.producers = selector("app", "next");
                spec.destinations = [service(2)].into();
            })]));
        },
    );
}

#[test]
fn rule_27_f31_a_kill_at_every_step_of_a_removal_heals() {
    killed_everywhere(
        || {
            let mut bench = Bench::programmed(FIRST_FEATURES);
            bench.give(objects(vec![ObjectChange::Policy(policy(
                "two",
                "web",
                "dns",
                &[2],
            ))]));
            bench.run();
            bench
        },
        |bench| {
            bench.give(objects(vec![ObjectChange::PolicyGone(named("dns"))]));
        },
    );
}

#[test]
fn rule_27_f53_the_token_of_a_dead_device_never_serves_the_next_one() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    // While the agent is down the device dies, its delete is lost, and the number goes to another workload.
    bench.links.remove(&5);
    bench.crash();
    bench.links.insert(5, veth(5, "hfweb", 9));
    bench.wake();
    bench.run();
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::IdentityMissing)
    );
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    bench.registry.insert(5, identity(205, 9));
    bench.give(Event::Poke(5));
    bench.run();
    assert_eq!(bench.kernel.pins.rows[&5].token, Some(token(205)));
}

#[test]
fn rule_28_two_runs_give_equal_effects() {
    let run = || {
        let mut bench = waiting(|_| {});
        let mut all = bench.rounds();
        bench.give(Event::LinkGone(6));
        all.extend(bench.rounds());
        (all, format!("{:?}", bench.effects), format!("{:?}", bench.engine))
    };
    assert_eq!(run(), run());
}

#[test]
fn rule_30_the_program_goes_with_the_attachment_after_its_entries() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::AttachmentGone(named("web"))]));
    assert_eq!(
        bench.rounds(),
        [
            vec!["row 5 closed epoch 1"],
            vec!["clear 5"],
            vec!["detach 5", "policy 0 free"],
        ]
    );
}

// --- what the data plane does not do yet ---------------------------------------------------------------------

#[test]
fn rule_8_unsupported_is_said_and_fails_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let translate = edit(&policy("dns", "web", "dns", &[1]), |spec| {
        spec.delivery = Delivery::Translate;
    });
    bench.give(objects(vec![translate]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::Unsupported));
    assert!(!bench.kernel.pins.entries[&5][&key(1)].open, "claimed, closed");
    assert_eq!(bench.kernel.pins.rows[&5].token, None);
    assert_eq!(bench.kernel.pins.policies[&0].selected.length, 0);
    let view = bench.policy("dns");
    assert_eq!((view.applied, view.behind_since), (2, None));
    bench.pass(3 * SECOND);
    bench.run();
    bench.pass(3 * SECOND);
    assert_eq!(bench.engine.next_deadline(), None, "trying again cannot help");
    let mut back = policy("dns", "web", "dns", &[1]);
    back.generation = 3;
    bench.give(objects(vec![ObjectChange::Policy(back)]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // A second ready producer, a tap, a prefix.
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfmore", 8)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "more", "hfmore", "dns",
    ))]));
    bench.run();
    assert_eq!(
        bench.policy("dns").message.as_deref(),
        Some("2 producers are ready: more than one comes with a later version")
    );
    bench.give(Event::LinkGone(8));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.give(Event::Link(Link {
        kind: LinkKind::Tap,
        ..veth(5, "hfweb", 5)
    }));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::Unsupported));
}

// --- cases ---------------------------------------------------------------------------------------------------

#[test]
fn design_2_7_f19_in_every_order_of_news_only_the_living_incarnation_is_served() {
    // add(X, 10, T1), add(X, 11, T2), delete(X, 10), each once and one of them twice, in every order.
    let events = [0, 1, 2];
    let mut orders = Vec::new();
    for twice in events {
        let all = [0, 1, 2, twice];
        for a in 0..4 {
            for b in (0..4).filter(|b| *b != a) {
                for c in (0..4).filter(|c| *c != a && *c != b) {
                    let d = 6 - a - b - c;
                    orders.push([all[a], all[b], all[c], all[d]]);
                }
            }
        }
    }
    for order in orders {
        for batched in [true, false] {
            let mut bench = Bench::started(FIRST_FEATURES);
            bench.registry.insert(6, identity(106, 6));
            bench.registry.insert(10, identity(1, 10));
            bench.registry.insert(11, identity(2, 11));
            bench.give(Event::Link(veth(6, "hfdns", 6)));
            bench.give(objects(vec![
                ObjectChange::Attachment(attachment("web", "hfx", "web")),
                ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
                ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
            ]));
            bench.run();
            for event in order {
                bench.give(match event {
                    0 => Event::Link(veth(10, "hfx", 10)),
                    1 => Event::Link(veth(11, "hfx", 11)),
                    _ => Event::LinkGone(10),
                });
                if !batched {
                    bench.run();
                }
            }
            // The kernel answers what it is asked: 10 is gone, 11 is there.
            for _ in 0..3 {
                bench.run();
                for effect in std::mem::take(&mut bench.effects) {
                    match effect {
                        Effect::AskLink(11) => bench.give(Event::Link(veth(11, "hfx", 11))),
                        Effect::AskLink(ifindex) => bench.give(Event::LinkGone(ifindex)),
                        _ => {}
                    }
                }
            }
            bench.run();
            assert_eq!(bench.state("dns", "web"), State::Programmed, "{order:?}");
            let open: Vec<(Ifindex, Option<Token>)> = bench
                .kernel
                .pins
                .rows
                .iter()
                .map(|(ifindex, row)| (*ifindex, row.token))
                .collect();
            assert_eq!(open, [(11, Some(token(2)))], "{order:?}");
        }
    }
}

#[test]
fn f29_200_held_for_an_hour_cost_one_line_each_and_a_summary_a_minute() {
    let mut bench = Bench::started(FIRST_FEATURES);
    let mut all = vec![ObjectChange::Policy(policy("dns", "web", "dns", &[1]))];
    for n in 0..200 {
        all.push(ObjectChange::Attachment(attachment(
            &format!("web-{n}"),
            &format!("hf{n}"),
            "web",
        )));
    }
    bench.give(objects(all));
    bench.run();
    for second in 0..3600_u32 {
        for event in 0..100 {
            bench.give(Event::Link(Link {
                mtu: 1000 + second % 400 + event,
                ..veth(9_000 + event % 7, "unknown", 1)
            }));
        }
        if second == 1800 {
            // The interfaces come, and are down: another reason, once.
            for n in 0..200 {
                bench.give(Event::Link(Link {
                    up: false,
                    carrier: false,
                    ..veth(1_000 + n, &format!("hf{n}"), 1)
                }));
            }
        }
        bench.pass(SECOND);
        bench.run();
    }
    let log = bench.log();
    let count = |wanted: fn(&Happening) -> bool| log.iter().filter(|line| wanted(&line.what)).count();
    let starts = count(|what| matches!(what, Happening::HoldStarted(HoldReason::InterfaceMissing)));
    let changes = count(|what| matches!(what, Happening::HoldChanged(HoldReason::InterfaceDown)));
    let summaries = count(|what| matches!(what, Happening::Summary { held: 200, .. }));
    assert_eq!((starts, changes, summaries, log.len()), (200, 200, 60, 460));
    assert!(log.iter().all(|line| line.level <= Level::Info));
}

#[test]
fn f54_one_failed_read_closes_nothing() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(5, RegistryRead::Failed("EIO".into()));
    bench.registry.insert(6, RegistryRead::Failed("EIO".into()));
    bench.give(Event::Poke(5));
    bench.give(Event::Poke(6));
    assert_eq!(bench.pass(60 * SECOND), []);
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    bench.crash();
    bench.wake();
    assert_eq!(bench.pass(60 * SECOND), []);
    assert_eq!(bench.kernel.pins.rows[&5].token, Some(token(105)));
}

// --- what is told --------------------------------------------------------------------------------------------

#[test]
fn rule_16_precedence_failed_held_pending_programmed_and_the_oldest_of_the_worst_speaks() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    assert_eq!(bench.policy("dns").state, State::Programmed);
    bench.go_to(Boot(SECOND));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "lost", "hflost", "web",
    ))]));
    bench.run();
    let view = bench.policy("dns");
    assert_eq!(view.state, State::Held(HoldReason::InterfaceMissing));
    assert_eq!(view.held_since.map(|since| since.boot), Some(Boot(SECOND)));
    bench.go_to(Boot(2 * SECOND));
    let mut younger = attachment("other", "hfweb", "web");
    younger.created_ms = 9_000;
    bench.give(objects(vec![ObjectChange::Attachment(younger)]));
    bench.run();
    let view = bench.policy("dns");
    assert_eq!(view.state, State::Failed(FailReason::Conflict));
    assert_eq!(view.since.boot, Boot(2 * SECOND));
    assert_eq!(
        (view.intents.programmed, view.intents.held, view.intents.failed),
        (1, 1, 1)
    );
}

#[test]
fn design_2_19_troubled_names_what_is_held_failed_or_behind() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let troubled = |bench: &Bench| {
        bench
            .engine
            .view()
            .troubled()
            .map(|view| view.name.name.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(troubled(&bench), [""; 0]);
    bench.give(objects(vec![
        ObjectChange::Policy(Policy {
            created_ms: 9_000,
            ..policy("loser", "web", "dns", &[1])
        }),
        ObjectChange::Policy(policy("held", "web", "nobody", &[3])),
        ObjectChange::Policy(policy("elsewhere", "nobody", "nobody", &[4])),
    ]));
    bench.poll();
    assert_eq!(troubled(&bench), ["held", "loser"]);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "new",
        "web",
        "dns",
        &[5],
    ))]));
    bench.poll();
    assert_eq!(troubled(&bench), ["held", "loser", "new"]);
    let behind = bench.policy("new").behind_since;
    assert!(behind.is_some());
    bench.go_to(bench.now.boot.plus(SECOND));
    bench.give(objects(vec![edit(&policy("new", "web", "dns", &[5]), |_| {})]));
    bench.poll();
    let view = bench.policy("new");
    assert_eq!(view.generation, 2);
    assert_eq!(
        view.behind_since, behind,
        "since the oldest moment that is not served"
    );
    bench.run();
    assert_eq!(troubled(&bench), ["held", "loser"]);
    let summary = bench.engine.view().summary();
    assert_eq!(summary.policies, 5);
    assert_eq!(summary.held[&HoldReason::NoReadyProducer], 1);
    assert_eq!(summary.failed[&FailReason::Conflict], 1);
}

#[test]
fn design_2_10_a_range_is_given_out_again_after_the_grace() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    // A redeploy of the producer within the grace takes another range and another id.
    bench.give(Event::LinkGone(6));
    bench.run();
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::Link(veth(8, "hfdns", 8)));
    bench.run();
    assert_eq!(bench.kernel.pins.policies[&0].selected.base, 1);
    assert_eq!(
        bench.kernel.pins.backends.keys().copied().collect::<Vec<_>>(),
        [1, 2]
    );
    bench.pass(5 * SECOND);
    bench.run();
    bench.pass(5 * SECOND);
    assert_eq!(
        bench.kernel.pins.backends.keys().copied().collect::<Vec<_>>(),
        [2]
    );
    bench.give(Event::LinkGone(8));
    bench.run();
    bench.registry.insert(9, identity(109, 9));
    bench.give(Event::Link(veth(9, "hfdns", 9)));
    bench.run();
    assert_eq!(bench.kernel.pins.policies[&0].selected.base, 0);
}

#[test]
fn rule_27_a_crash_between_a_revocation_and_the_new_epoch_is_seen_by_the_next_life() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "two",
        "web",
        "dns",
        &[2],
    ))]));
    bench.run();
    bench.give(objects(vec![ObjectChange::PolicyGone(named("two"))]));
    assert_eq!(briefs(&bench.poll()), ["entries 5 2->1:closed"]);
    bench.answer(
        |op| matches!(op, Op::WriteEntries { .. }),
        Ok(OpDone { writes: 1 }),
    );
    bench.crash();
    bench.wake();
    assert_eq!(bench.rounds()[0], ["row 5 105 epoch 1"]);
    assert_eq!(bench.kernel.pins.entries[&5].len(), 1);
}

#[test]
fn unsupported_on_a_consumer_that_is_held_is_not_behind() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    let mut translate = policy("new", "new", "dns", &[1]);
    translate.content.as_mut().unwrap().delivery = Delivery::Translate;
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("new", "hfnew", "new")),
        ObjectChange::Policy(translate),
    ]));
    bench.run();
    let view = bench.policy("new");
    assert_eq!(view.state, State::Failed(FailReason::Unsupported));
    assert_eq!((view.applied, view.behind_since), (1, None));
    bench.crash();
    bench.wake();
    bench.run();
    let view = bench.policy("new");
    assert_eq!(
        (view.applied, view.behind_since),
        (1, None),
        "in the next life too"
    );
}

#[test]
fn rule_22_conflicts_are_judged_without_a_device() {
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Policy(policy("older", "web", "dns", &[1])),
        ObjectChange::Policy(Policy {
            created_ms: 9_000,
            ..policy("younger", "web", "dns", &[1])
        }),
    ]));
    bench.run();
    assert_eq!(
        bench.state("older", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
    assert_eq!(bench.state("younger", "web"), State::Failed(FailReason::Conflict));
}

#[test]
fn a_reason_that_changed_over_a_restart_has_its_line() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::LinkGone(5));
    bench.run();
    bench.crash();
    bench.links.insert(7, veth(7, "hfweb", 7));
    bench.wake();
    bench.effects.clear();
    bench.run();
    let lines: Vec<Happening> = bench.log().into_iter().map(|line| line.what).collect();
    assert_eq!(lines, [Happening::HoldChanged(HoldReason::IdentityMissing)]);
}

#[test]
fn rule_18_an_identity_is_not_deleted_twice_while_the_answer_is_out() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::LinkGone(5));
    bench.poll();
    let delete = |op: &Op| matches!(op, Op::DeleteIdentity { .. });
    let sent = bench.pass(60 * SECOND);
    assert!(!sent.iter().any(delete), "{:?}", briefs(&sent));
    bench.answer(delete, refused("EIO"));
    let sent = bench.pass(60 * SECOND);
    assert_eq!(sent.iter().filter(|op| delete(op)).count(), 1);
    bench.run();
}

#[test]
fn rule_5_an_identity_dies_with_its_device_even_where_all_macs_are_one() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let shared = |value| match identity(value, 1) {
        RegistryRead::Row(row) => RegistryRead::Row(Identity {
            host_mac_shared: true,
            ..row
        }),
        other => other,
    };
    bench.registry.insert(7, shared(107));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    bench.give(objects(vec![ObjectChange::Attachment(attachment(
        "new", "hfnew", "web",
    ))]));
    bench.run();
    assert_eq!(bench.state("dns", "new"), State::Programmed);
    // The device is made anew under the same number and MAC; the registry still has the old row when it is read.
    bench.give(Event::LinkGone(7));
    bench.give(Event::Link(veth(7, "hfnew", 7)));
    let sent = bench.run();
    let deleted = Op::DeleteIdentity {
        ifindex: 7,
        token: token(107),
    };
    assert!(sent.contains(&deleted), "{:?}", briefs(&sent));
    assert_eq!(
        bench.state("dns", "new"),
        State::Held(HoldReason::IdentityMissing)
    );
    bench.registry.insert(7, shared(207));
    bench.give(Event::Poke(7));
    bench.run();
    assert_eq!(bench.state("dns", "new"), State::Programmed);
    assert_eq!(bench.kernel.pins.rows[&7].token, Some(token(207)));
}

/// Identities that are deleted, as number and token.
fn deleted(sent: &[Op]) -> Vec<(Ifindex, Token)> {
    let identities = sent.iter().filter_map(|op| match op {
        Op::DeleteIdentity { ifindex, token } => Some((*ifindex, *token)),
        _ => None,
    });
    identities.collect()
}

#[test]
fn design_2_7_an_identity_dies_with_its_device_also_while_no_agent_runs() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let living = bench.links.keys().map(|ifindex| (*ifindex, u64::from(*ifindex)));
    for (ifindex, value) in living.chain([(7, 107), (8, 108)]) {
        let n = u8::try_from(ifindex).unwrap();
        if let RegistryRead::Row(row) = identity(value, n) {
            bench.kernel.pins.identities.insert(ifindex, row);
        }
    }
    bench.crash();
    bench.wake();
    bench.effects.clear();
    // The dump may be older than the rows: whether a device is there is asked once more.
    assert_eq!(deleted(&bench.run()), []);
    let asked = bench.effects.iter().filter_map(|effect| match effect {
        Effect::AskLink(ifindex) => Some(*ifindex),
        _ => None,
    });
    assert_eq!(asked.collect::<Vec<_>>(), [7, 8]);
    bench.give(Event::LinkGone(7));
    bench.give(Event::Link(veth(8, "hfnew", 8)));
    assert_eq!(deleted(&bench.run()), [(7, token(107))]);
}

#[test]
fn rule_4_an_operation_that_finds_no_device_deletes_no_identity_of_a_living_one() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![edit(&policy("dns", "web", "dns", &[1]), |spec| {
        spec.destinations.insert(service(2));
    })]));
    bench.poll();
    bench.yes();
    bench.answer(|op| matches!(op, Op::ProveIntent(_)), Err(OpError::NoDevice));
    let sent = bench.run();
    assert!(!sent.iter().any(|op| matches!(op, Op::DeleteIdentity { .. })));
    assert_eq!(
        bench.state("dns", "web"),
        State::Held(HoldReason::InterfaceMissing)
    );
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    bench.run();
    bench.pass(SECOND);
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    // Asked, the kernel says that it is gone: then it is.
    let mut third = policy("dns", "web", "dns", &[1]);
    third.generation = 2;
    bench.give(objects(vec![edit(&third, |spec| {
        spec.destinations.insert(service(3));
    })]));
    bench.poll();
    bench.until_out(|op| matches!(op, Op::ProveIntent(_)));
    bench.answer(|op| matches!(op, Op::ProveIntent(_)), Err(OpError::NoDevice));
    bench.run();
    // Until then it might have been there under another address, program and all: its claims stayed.
    assert!(bench.kernel.pins.entries.contains_key(&5));
    bench.give(Event::LinkGone(5));
    assert_eq!(briefs(&bench.poll()), ["clear 5", "delete identity 5 105"]);
}

#[test]
fn rule_2_lists_alone_are_not_enough() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.crash();
    let all = [
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Attachment(attachment("dns", "hfdns", "dns")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ];
    bench.give(objects(all.to_vec()));
    bench.give(Event::SourceComplete);
    // A device came before the dump: the other is not missing, it is not known yet.
    let links = bench.links.clone();
    bench.give(Event::Link(veth(5, "hfweb", 5)));
    assert_eq!(bench.poll(), []);
    assert_eq!(bench.state("dns", "web"), State::Pending);
    bench.give(Event::LinkDump(links.into_values().collect()));
    assert_eq!(bench.rounds(), [["prove 5 for 105 1->0:open by 0+1g1"]]);
}

#[test]
fn rule_7_an_intent_without_producers_keeps_no_other_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(objects(vec![ObjectChange::Policy(policy(
        "none",
        "web",
        "nobody",
        &[2],
    ))]));
    bench.run();
    bench.registry.insert(7, identity(107, 7));
    bench.give(Event::LinkGone(5));
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Programmed);
    assert_eq!(
        bench.state("none", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    // Nothing unproven goes live when its producer comes.
    assert!(!bench.kernel.pins.entries[&7][&key(2)].open);
}

#[test]
fn rule_10_an_older_policy_without_producers_claims_closed() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let older = Policy {
        created_ms: 1,
        ..policy("older", "web", "nobody", &[3])
    };
    bench.give(objects(vec![ObjectChange::Policy(older.clone())]));
    bench.run();
    bench.give(objects(vec![edit(&older, |spec| {
        spec.destinations.insert(service(1));
    })]));
    assert_eq!(bench.rounds(), [["entries 5 1->1:closed"], ["row 5 105 epoch 1"]]);
    assert_eq!(
        bench.state("older", "web"),
        State::Held(HoldReason::NoReadyProducer)
    );
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::Conflict));
    assert_eq!(
        bench.kernel.pins.entries[&5][&key(1)],
        Entry {
            policy: 1,
            open: false
        }
    );
}

#[test]
fn rule_11_a_new_uid_finds_room_although_all_slots_are_taken() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    for n in 0..63 {
        let name = format!("filler-{n}");
        bench.give(objects(vec![ObjectChange::Policy(policy(
            &name,
            "web",
            "dns",
            &[100 + n],
        ))]));
    }
    bench.run();
    assert_eq!(bench.kernel.pins.policies.len(), 64);
    let mut again = policy("dns", "web", "dns", &[1]);
    again.uid = Uid("another".into());
    bench.give(objects(vec![ObjectChange::Policy(again)]));
    bench.run();
    assert_eq!(bench.state("dns", "web"), State::Failed(FailReason::MapFull));
    for _ in 0..5 {
        bench.pass(SECOND);
        bench.run();
    }
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_25_a_set_that_is_disproved_is_never_selected() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.registry.insert(8, identity(108, 8));
    bench.give(Event::LinkGone(6));
    bench.give(Event::Link(veth(8, "hfdns", 8)));
    bench.poll();
    bench.until_out(|op| matches!(op, Op::ProveSet { .. }));
    bench.answer(
        |op| matches!(op, Op::ProveSet { .. }),
        Err(OpError::Disproved {
            message: "slot 1 leads nowhere".into(),
        }),
    );
    let sent = bench.run();
    assert!(
        !sent.iter().any(|op| matches!(op, Op::WritePolicy { .. })),
        "{:?}",
        briefs(&sent)
    );
    let view = bench.policy("dns");
    assert_eq!(view.state, State::Failed(FailReason::ProofFailed));
    assert_eq!(view.message.as_deref(), Some("slot 1 leads nowhere"));
    let mut sent = bench.pass(SECOND);
    sent.extend(bench.run());
    assert!(
        sent.iter().any(|op| matches!(op, Op::ProveSet { .. })),
        "{:?}",
        briefs(&sent)
    );
    assert_eq!(bench.state("dns", "web"), State::Programmed);
}

#[test]
fn rule_25_the_program_comes_after_the_claims() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    bench.give(Event::LinkGone(5));
    bench.run();
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.poll();
    bench.answer(|op| matches!(op, Op::WriteRow { .. }), Ok(OpDone { writes: 1 }));
    assert_eq!(bench.poll(), [], "a packet would take the default path");
    assert_eq!(briefs(&bench.yes()), ["attach 7"]);
    // The slot is not there yet: neither are the claims.
    let mut bench = Bench::started(FIRST_FEATURES);
    bench.give(Event::Link(veth(7, "hfweb", 7)));
    bench.give(objects(vec![
        ObjectChange::Attachment(attachment("web", "hfweb", "web")),
        ObjectChange::Policy(policy("dns", "web", "dns", &[1])),
    ]));
    assert_eq!(
        briefs(&bench.poll()),
        ["row 7 closed epoch 0", "policy 0 -> 0+0g0 serving 1"]
    );
    bench.answer(|op| matches!(op, Op::WriteRow { .. }), Ok(OpDone { writes: 1 }));
    assert_eq!(bench.poll(), []);
}

#[test]
fn design_2_12_a_slot_lets_nobody_pass_before_what_is_somebody_elses_has_left_it() {
    let mut bench = Bench::programmed(FIRST_FEATURES);
    let younger = Policy {
        created_ms: 9_000,
        ..policy("younger", "web", "nobody", &[2])
    };
    bench.give(objects(vec![ObjectChange::Policy(younger.clone())]));
    bench.run();
    // The older policy takes destination 2 while the younger one, which gives it up, turns to Pass.
    bench.give(objects(vec![
        edit(&policy("dns", "web", "dns", &[1]), |spec| {
            spec.destinations.insert(service(2));
        }),
        edit(&younger, |spec| {
            spec.destinations = [service(3)].into();
            spec.while_held = WhileHeld::Pass;
        }),
    ]));
    let rounds = bench.rounds();
    let passes = rounds
        .iter()
        .position(|round| round.iter().any(|line| line.ends_with("pass")));
    let leaves = rounds
        .iter()
        .position(|round| round.iter().any(|line| line.contains("2->0:closed")));
    assert!(leaves < passes, "{rounds:#?}");
    assert!(bench.kernel.pins.policies[&1].pass_while_held);
}
