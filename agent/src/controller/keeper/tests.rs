//! The keeper on a virtual clock, with an API server that has versions and refuses what is out of date.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::api::hash;
use crate::api::node_report::Ack;
use crate::api::status::{Condition, ConditionKind, Truth};

const SECOND: Mono = 1_000_000_000;
const EPOCH: &str = "e1";

/// What the API server does with the next write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Good,
    /// It is refused as out of date, although nothing is seen to have changed.
    Conflict,
    Down,
}

struct Rig {
    keeper: Keeper,
    now: Mono,
    version: u64,
    policies: BTreeMap<String, Value>,
    writes: Vec<(Mono, Write)>,
    mood: Mood,
    /// Nodes that renew their lease every ten seconds.
    living: BTreeSet<String>,
    next_renewal: Mono,
}

fn object<B: crate::apiserver::object::Body>(value: &Value) -> Object<B> {
    serde_json::from_value(value.clone()).unwrap()
}

fn boxed<B: crate::apiserver::object::Body>(value: &Value) -> Box<Object<B>> {
    Box::new(object(value))
}

/// Of the one attachment of a node.
fn covers(node: &str) -> u64 {
    hash::covers(&Uid(format!("a-{node}")), 1).consumer
}

impl Rig {
    /// Everything is listed and empty, and this controller leads.
    fn new() -> Self {
        let mut rig = Self::unlisted();
        rig.list();
        rig.keeper.lead(true);
        rig
    }

    fn unlisted() -> Self {
        Self {
            keeper: Keeper::default(),
            now: 1_000 * SECOND,
            version: 1,
            policies: BTreeMap::new(),
            writes: Vec::new(),
            mood: Mood::Good,
            living: BTreeSet::new(),
            next_renewal: 1_000 * SECOND,
        }
    }

    fn list(&mut self) {
        for seen in [
            Seen::Policies(News::All(self.policies.values().map(object).collect())),
            Seen::Attachments(News::All(Vec::new())),
            Seen::Nodes(News::All(Vec::new())),
            Seen::Reports(News::All(Vec::new())),
            Seen::Leases(News::All(Vec::new())),
        ] {
            self.take(seen);
        }
    }

    fn clock(&self) -> Clock {
        Clock {
            mono: self.now,
            distance_ms: 1_700_000_000_000,
        }
    }

    fn take(&mut self, seen: Seen) {
        let clock = self.clock();
        self.keeper.take(seen, clock);
    }

    /// A policy for everything that is called web.
    fn policy(&mut self, name: &str, generation: u64, annotations: &Value) {
        self.version += 1;
        let status = self.policies.get(name).map(|policy| policy["status"].clone());
        let policy = json!({
            "metadata": {
                "namespace": "shop", "name": name, "uid": format!("3f-{name}"), "generation": generation,
                "resourceVersion": self.version.to_string(), "annotations": annotations,
            },
            "spec": {
                "consumers": {"matchLabels": {"app": "web"}},
                "producers": {"matchLabels": {"app": "dns"}},
                "destinations": [{"address": "10.96.0.10", "protocol": "UDP", "port": 53}],
            },
            "status": status.unwrap_or_default(),
        });
        self.policies.insert(name.to_owned(), policy.clone());
        self.take(Seen::Policies(News::Changed(boxed(&policy))));
    }

    fn edit(&mut self, generation: u64) {
        self.policy("dns", generation, &Value::Null);
    }

    /// A node with one consumer, alive.
    fn node(&mut self, node: &str) {
        self.take(Seen::Nodes(News::Changed(boxed(
            &json!({"metadata": {"name": node}}),
        ))));
        self.attachment(node);
        self.living.insert(node.to_owned());
        self.renew(node);
    }

    fn attachment(&mut self, node: &str) {
        let uid = format!("a-{node}");
        let attachment = json!({
            "metadata": {"namespace": "shop", "name": uid, "uid": uid, "generation": 1, "labels": {"app": "web"}},
            "spec": {"node": node, "interface": "hfweb0", "identity": "i"},
        });
        self.take(Seen::Attachments(News::Changed(boxed(&attachment))));
    }

    fn renew(&mut self, node: &str) {
        let wall = jiff::Timestamp::from_millisecond(self.clock().wall_ms()).unwrap();
        let lease = json!({
            "metadata": {"name": node},
            "spec": {"holderIdentity": format!("{node}/{EPOCH}"), "renewTime": wall.to_string()},
        });
        self.take(Seen::Leases(News::Changed(boxed(&lease))));
    }

    fn ack(&mut self, node: &str, generation: u64) {
        self.ack_of(node, generation, None);
    }

    fn ack_of(&mut self, node: &str, generation: u64, origin: Option<u64>) {
        let ack = Ack {
            generation,
            covers: covers(node),
            origin: origin.map(|generation| holdfast_engine::model::Origin {
                uid: Uid("hub".to_owned()),
                generation,
            }),
        };
        self.report(node, &json!({"programmed": {"3f-dns": ack.to_string()}}));
    }

    fn held(&mut self, node: &str, generation: u64) {
        let held = json!({
            "namespace": "shop", "name": "dns", "uid": "3f-dns", "generation": generation,
            "covers": format!("{:016x}", covers(node)), "state": "Held", "reason": "InterfaceMissing",
            "intents": {"desired": 1, "programmed": 0, "held": 1, "failed": 0, "pending": 0},
            "since": "2023-11-14T22:13:20.000Z",
        });
        self.report(node, &json!({"others": [held]}));
    }

    fn report(&mut self, node: &str, said: &Value) {
        let mut report = json!({
            "metadata": {"name": format!("{node}.r")},
            "node": node,
            "epoch": {"id": EPOCH, "bootID": "b", "agentStart": "", "agentVersion": "", "layoutVersion": 1},
        });
        for (field, value) in said.as_object().unwrap() {
            report[field] = value.clone();
        }
        self.take(Seen::Reports(News::Changed(boxed(&report))));
    }

    /// Lets time pass: whoever lives renews, what is due is written.
    fn pass(&mut self, time: Mono) {
        let end = self.now + time;
        loop {
            let clock = self.clock();
            for write in self.keeper.decide(clock) {
                self.write(write);
            }
            let next = self.keeper.next_deadline(self.now).unwrap_or(end);
            let next = next.min(self.next_renewal).max(self.now).min(end);
            if next == self.now && next == end {
                return;
            }
            self.now = next;
            if self.now == self.next_renewal {
                self.next_renewal += 10 * SECOND;
                for node in self.living.clone() {
                    self.renew(&node);
                }
            }
        }
    }

    /// What is due at this moment is written.
    fn settle(&mut self) {
        self.pass(0);
    }

    fn write(&mut self, write: Write) {
        self.writes.push((self.now, write.clone()));
        let policy = self.policies.get_mut(&write.name.name).unwrap();
        let present = policy["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
        let outcome = match self.mood {
            Mood::Down => Outcome::Failed,
            Mood::Conflict => Outcome::Conflict,
            Mood::Good if present != write.version => Outcome::Conflict,
            Mood::Good => {
                self.version += 1;
                policy["metadata"]["resourceVersion"] = self.version.to_string().into();
                policy["status"] = serde_json::to_value(&write.status).unwrap();
                Outcome::Written {
                    version: self.version.to_string(),
                    status: Box::new(write.status.clone()),
                }
            }
        };
        let event = policy.clone();
        self.keeper.written(&write.uid, outcome, self.now);
        if self.mood == Mood::Good {
            self.take(Seen::Policies(News::Changed(boxed(&event))));
        }
    }

    fn status(&self) -> RoutePolicyStatus {
        serde_json::from_value(self.policies["dns"]["status"].clone()).unwrap()
    }

    fn programmed(&self) -> Condition {
        self.status()
            .condition(ConditionKind::Programmed)
            .unwrap()
            .clone()
    }

    fn writes_since(&self, count: usize) -> Vec<f64> {
        self.writes[count..]
            .iter()
            .map(|(at, _)| *at as f64 / SECOND as f64)
            .collect()
    }
}

/// `nodes` nodes, all of them programmed at generation 1.
fn programmed(nodes: usize) -> Rig {
    let mut rig = Rig::new();
    rig.edit(1);
    for node in 0..nodes {
        rig.node(&format!("n{node}"));
        rig.ack(&format!("n{node}"), 1);
    }
    rig.pass(60 * SECOND);
    assert_eq!(rig.programmed().status, Truth::True, "{:?}", rig.status());
    rig
}

#[test]
fn an_edit_costs_at_most_four_writes_at_any_size() {
    for nodes in [1, 10, 200] {
        for spread in [1, 4, 9, 30] {
            let mut rig = programmed(nodes);
            let before = rig.writes.len();
            let began = rig.now;
            rig.edit(2);
            rig.settle();
            for node in 0..nodes {
                let at = began + spread * SECOND * (node as u64 + 1) / nodes as u64;
                rig.pass(at - rig.now);
                rig.ack(&format!("n{node}"), 2);
                rig.settle();
            }
            let done = rig.now;
            assert_eq!(rig.programmed().status, Truth::True);
            assert_eq!(rig.status().nodes.programmed, nodes as u64);
            rig.pass(120 * SECOND);
            let writes = rig.writes_since(before);
            assert!(
                (2..=4).contains(&writes.len()),
                "{nodes} nodes in {spread} s: {writes:?}"
            );
            assert_eq!(writes[0], began as f64 / SECOND as f64, "the first at once");
            assert_eq!(
                writes.last(),
                Some(&(done as f64 / SECOND as f64)),
                "the last at once"
            );
            for (_, write) in &rig.writes[before..] {
                assert!(
                    write
                        .status
                        .conditions
                        .iter()
                        .all(|condition| condition.observed_generation == 2)
                );
            }
        }
    }
}

#[test]
fn ten_edits_in_a_row_are_told_in_the_end_and_not_one_by_one() {
    let mut rig = programmed(10);
    let before = rig.writes.len();
    for generation in 2..12 {
        rig.edit(generation);
        rig.settle();
        rig.pass(SECOND / 5);
    }
    for node in 0..10 {
        rig.ack(&format!("n{node}"), 11);
        rig.settle();
    }
    let done = rig.now;
    assert_eq!(rig.programmed().status, Truth::True);
    rig.pass(60 * SECOND);
    let writes = rig.writes_since(before);
    assert!(writes.len() <= 4, "{writes:?}");
    assert_eq!(writes.last(), Some(&(done as f64 / SECOND as f64)));
}

#[test]
fn what_goes_on_and_off_is_told_every_five_seconds() {
    let mut rig = programmed(1);
    let before = rig.writes.len();
    for _ in 0..100 {
        rig.held("n0", 1);
        rig.pass(SECOND / 2);
        rig.ack("n0", 1);
        rig.pass(SECOND / 2);
    }
    let writes = rig.writes_since(before);
    assert!((20..=45).contains(&writes.len()), "{}: {writes:?}", writes.len());
}

#[test]
fn what_is_as_it_was_is_not_written() {
    let mut rig = programmed(3);
    let before = rig.writes.len();
    // The same again from every watch, and all of it derived anew.
    rig.edit(1);
    rig.ack("n1", 1);
    rig.keeper.lead(false);
    rig.keeper.lead(true);
    rig.pass(600 * SECOND);
    assert_eq!(rig.writes_since(before), Vec::<f64>::new());
}

#[test]
fn nothing_is_said_before_every_list_is_there() {
    let mut rig = Rig::unlisted();
    rig.keeper.lead(true);
    rig.edit(1);
    for seen in [
        Seen::Attachments(News::All(Vec::new())),
        Seen::Nodes(News::All(Vec::new())),
        Seen::Reports(News::All(Vec::new())),
    ] {
        rig.take(seen);
        rig.settle();
    }
    assert!(rig.writes.is_empty());
    assert_eq!(rig.keeper.behind().count(), 0);
    assert_eq!(
        rig.keeper.missing().collect::<Vec<_>>(),
        [Watched::Policies, Watched::Leases]
    );
}

#[test]
fn who_does_not_lead_writes_nothing_and_knows_as_much() {
    let mut rig = Rig::new();
    rig.keeper.lead(false);
    rig.edit(1);
    rig.node("n0");
    rig.settle();
    assert_eq!(rig.keeper.behind().count(), 1);
    rig.ack("n0", 1);
    rig.pass(10 * SECOND);
    assert_eq!(
        rig.keeper.behind().count(),
        0,
        "nobody is behind, as it knows itself"
    );
    assert!(rig.writes.is_empty());
    rig.keeper.lead(true);
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
    assert_eq!(rig.writes.len(), 1);
}

#[test]
fn a_conflict_is_decided_again_on_the_newer_version() {
    let mut rig = programmed(1);
    rig.mood = Mood::Conflict;
    let before = rig.writes.len();
    rig.held("n0", 1);
    rig.settle();
    rig.settle();
    assert_eq!(rig.writes.len(), before + 1, "not again on the same version");
    rig.mood = Mood::Good;
    rig.edit(2);
    rig.settle();
    assert_eq!(rig.writes.len(), before + 2, "at once on another");
    assert_eq!(rig.programmed().observed_generation, 2);
    // Where the newer version does not come, it is tried again.
    rig.held("n0", 2);
    rig.mood = Mood::Conflict;
    rig.pass(6 * SECOND);
    rig.mood = Mood::Good;
    rig.pass(10 * SECOND);
    assert_eq!(rig.programmed().reason, "Held");
}

#[test]
fn f51_a_write_that_fails_is_tried_again_more_and_more_seldom() {
    let mut rig = programmed(1);
    rig.mood = Mood::Down;
    let before = rig.writes.len();
    rig.held("n0", 1);
    rig.pass(600 * SECOND);
    let writes = rig.writes_since(before);
    assert!((15..=30).contains(&writes.len()), "{writes:?}");
    rig.mood = Mood::Good;
    rig.pass(31 * SECOND);
    assert_eq!(rig.programmed().reason, "Held");
}

#[test]
fn somebody_elses_status_is_put_right() {
    let mut rig = programmed(1);
    rig.version += 1;
    let mut policy = rig.policies["dns"].clone();
    policy["metadata"]["resourceVersion"] = rig.version.to_string().into();
    policy["status"] = json!({"observedGeneration": 1});
    rig.policies.insert("dns".to_owned(), policy.clone());
    rig.take(Seen::Policies(News::Changed(boxed(&policy))));
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
}

#[test]
fn f27_a_node_without_power_is_unknown_and_a_deleted_one_does_not_count() {
    let mut rig = programmed(3);
    rig.living.remove("n2");
    rig.pass(60 * SECOND);
    let status = rig.status();
    assert_eq!(rig.programmed().status, Truth::Unknown);
    assert_eq!(rig.programmed().reason, "NodeUnknown");
    assert_eq!((status.nodes.programmed, status.nodes.unknown), (2, 1));
    assert_eq!(
        (
            status.laggards[0].node.as_str(),
            status.laggards[0].state.as_str()
        ),
        ("n2", "Unknown")
    );
    assert!(
        rig.programmed().message.contains("n2"),
        "{}",
        rig.programmed().message
    );
    assert_eq!(rig.keeper.lives(rig.now).unknown, 1);
    rig.take(Seen::Nodes(News::Gone(boxed(
        &json!({"metadata": {"name": "n2"}}),
    ))));
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
    assert_eq!(rig.status().nodes.desired, 2);
    // It comes back, and has to say so itself.
    rig.take(Seen::Nodes(News::Changed(boxed(
        &json!({"metadata": {"name": "n2"}}),
    ))));
    rig.pass(6 * SECOND);
    assert_eq!(rig.programmed().status, Truth::Unknown);
    rig.living.insert("n2".to_owned());
    rig.pass(20 * SECOND);
    assert_eq!(rig.programmed().status, Truth::True);
}

#[test]
fn f27_a_node_that_never_was_is_waited_for_five_minutes() {
    let mut rig = programmed(1);
    rig.attachment("typo");
    rig.settle();
    assert_eq!(rig.programmed().reason, "NodeUnknown");
    assert!(
        rig.programmed().message.contains("do not exist: typo"),
        "{}",
        rig.programmed().message
    );
    rig.pass(301 * SECOND);
    assert_eq!(rig.programmed().status, Truth::True);
    assert!(
        rig.programmed().message.contains("typo"),
        "{}",
        rig.programmed().message
    );
}

#[test]
fn f26_a_copy_is_acknowledged_by_its_origin() {
    let annotations = |generation: u64| json!({"holdfast.dev/origin-uid": "hub", "holdfast.dev/origin-generation": generation.to_string()});
    let mut rig = Rig::new();
    rig.policy("dns", 1, &annotations(4));
    rig.node("n0");
    rig.ack_of("n0", 1, Some(4));
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
    assert_eq!(rig.status().origin.unwrap().generation, 4);
    // Another origin raises no generation here, and is not served all the same.
    rig.policy("dns", 1, &annotations(5));
    rig.pass(6 * SECOND);
    assert_eq!(
        (rig.programmed().status, rig.programmed().reason.as_str()),
        (Truth::False, "Pending")
    );
    assert_eq!(rig.status().origin.unwrap().generation, 5);
    rig.ack_of("n0", 1, Some(5));
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
    // An origin that cannot be read counts as none, and is said.
    rig.policy("dns", 1, &json!({"holdfast.dev/origin-uid": "hub"}));
    rig.pass(6 * SECOND);
    let status = rig.status();
    assert_eq!(status.origin, None);
    let accepted = status.condition(ConditionKind::Accepted).unwrap();
    assert_eq!(accepted.status, Truth::True);
    assert!(accepted.message.contains("origin-generation"), "{accepted:?}");
}

#[test]
fn an_api_server_that_is_away_withdraws_nothing() {
    let mut rig = programmed(3);
    let before = rig.writes.len();
    for away in [30, 60, 600] {
        let living = std::mem::take(&mut rig.living);
        let failure = Failure::garbled("what is this");
        rig.take(Seen::Leases(News::Failing(failure)));
        rig.pass(away * SECOND);
        // The watch is back, and the agents take their time to be.
        rig.take(Seen::Leases(News::Alive));
        rig.pass(25 * SECOND);
        rig.living = living;
        rig.pass(60 * SECOND);
    }
    assert_eq!(rig.writes_since(before), Vec::<f64>::new());
    // But who does not come back is missed.
    rig.living.remove("n0");
    rig.pass(60 * SECOND);
    assert_eq!(rig.programmed().status, Truth::Unknown);
}

#[test]
fn many_nodes_without_power_do_not_cost_as_many_writes() {
    let mut rig = programmed(300);
    let before = rig.writes.len();
    for node in 0..300 {
        rig.living.remove(&format!("n{node}"));
        rig.pass(SECOND / 15);
    }
    rig.take(Seen::Leases(News::Alive));
    rig.pass(15 * SECOND);
    rig.take(Seen::Leases(News::Alive));
    rig.pass(15 * SECOND);
    rig.take(Seen::Leases(News::Alive));
    rig.pass(15 * SECOND);
    assert_eq!(rig.status().nodes.unknown, 300, "{:?}", rig.status());
    let writes = rig.writes_since(before);
    assert!(writes.len() <= 12, "{writes:?}");
}

#[test]
fn after_a_start_a_lease_that_looks_old_is_waited_for() {
    let mut rig = Rig::new();
    rig.edit(1);
    rig.node("n0");
    rig.ack("n0", 1);
    // The node's clock is an hour behind, so every lease of it looks old.
    rig.living.clear();
    rig.take(Seen::Leases(News::All(Vec::new())));
    let lease = |second: u64| {
        boxed(&json!({
            "metadata": {"name": "n0"},
            "spec": {"holderIdentity": "n0/e1", "renewTime": format!("2020-01-01T00:00:{second:02}Z")},
        }))
    };
    rig.take(Seen::Leases(News::Changed(lease(1))));
    rig.pass(10 * SECOND);
    assert!(
        rig.writes.is_empty(),
        "nobody can say yet, and nothing is said: {:?}",
        rig.writes
    );
    rig.take(Seen::Leases(News::Changed(lease(2))));
    rig.settle();
    assert_eq!(rig.programmed().status, Truth::True);
}
