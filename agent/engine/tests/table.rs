//! Every transition, with the exact effects or the whole state.

mod support;

use holdfast_engine::model::*;
use holdfast_engine::view::Settled;
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
