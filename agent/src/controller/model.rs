//! The model of "when is a policy programmed?": a user, nodes with two watches that lag, a controller with five, and
//! every order in which their steps can come.
//!
//! A status that says True must be about something that each of its nodes has really served: this uid, this generation
//! and exactly this set of attachments, in the life that the lease speaks of. And when all have caught up, it is True.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{Hash, Hasher};

use holdfast_engine::model::{ObjectName, Origin, Selector, Uid};
use proptest::prelude::*;

use super::index::{Attachment, Index, Lease, Life, Policy, Said, Selectors};
use super::rollup::{Clock, rollup};
use crate::api::hash;
use crate::api::node_report::{Ack, Epoch, NodeReport};
use crate::api::status::{ConditionKind, RoutePolicyStatus, Truth};

const NAMESPACE: &str = "shop";
const CLOCK: Clock = Clock {
    mono: 1_000_000_000,
    distance_ms: 1_700_000_000_000,
};

/// An attachment, by its place in [`MEMBERS`].
type Member = u8;

struct About {
    uid: &'static str,
    /// Place in [`NODES`].
    node: u8,
    role: &'static str,
}

const NODES: [&str; 2] = ["n1", "n2"];

const MEMBERS: [About; 5] = [
    about("a1", 0, "web"),
    about("a2", 0, "web"),
    about("b1", 1, "web"),
    about("p1", 0, "dns"),
    about("p2", 1, "dns"),
];

const fn about(uid: &'static str, node: u8, role: &'static str) -> About {
    About { uid, node, role }
}

const A1: Member = 0;
const A2: Member = 1;
const B1: Member = 2;
const P1: Member = 3;
const P2: Member = 4;
const N1: u8 = 0;

/// Attachments, a bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Members(u8);

impl Members {
    fn iter(self) -> impl Iterator<Item = &'static About> {
        (0..)
            .zip(&MEMBERS)
            .filter(move |(at, _)| self.has(*at))
            .map(|(_, about)| about)
    }

    fn has(self, member: Member) -> bool {
        self.0 & 1 << member != 0
    }

    fn with(self, member: Member) -> Self {
        Self(self.0 | 1 << member)
    }

    fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    fn on(self, node: u8) -> Self {
        (0..MEMBERS.len() as u8)
            .filter(|at| self.has(*at) && MEMBERS[usize::from(*at)].node == node)
            .fold(Self(0), Self::with)
    }

    fn has_consumer(self) -> bool {
        self.iter().any(|about| about.role == "web")
    }

    fn covers(self) -> u64 {
        self.iter().fold(0, |sum, about| {
            let covers = hash::covers(&Uid(about.uid.to_owned()), 1);
            let summand = if about.role == "web" {
                covers.consumer
            } else {
                covers.producer
            };
            sum.wrapping_add(summand)
        })
    }
}

/// What a user does, and what happens to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Add(Member),
    Remove(Member),
    /// The policy has another generation.
    Edit,
    /// The policy is deleted and made again under its own name.
    Recreate,
    /// The policy is a copy, and its origin has another generation: ours does not move.
    Origin,
    /// Pins and memory are gone, the report and the lease in the API server are not.
    Reboot(u8),
    /// The report is spread over shards.
    Split(u8),
}

/// One version of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Version {
    life: u8,
    generation: u8,
    origin: u8,
}

impl Version {
    fn uid(self) -> Uid {
        // With hex digits, so that it has a shard.
        Uid(format!("3f-{}", self.life))
    }

    fn origin(self) -> Option<Origin> {
        (self.origin > 0).then(|| Origin {
            uid: Uid("hub".to_owned()),
            generation: self.origin.into(),
        })
    }
}

/// What a node serves: a version of the policy, and its own part of the attachments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Served {
    version: Version,
    members: Members,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Node {
    epoch: u8,
    /// How far its watches are; none before its lists are there.
    policy: Option<u8>,
    members: Option<u8>,
    serves: Option<Served>,
    reported: Option<Served>,
    /// Whether the lease is renewed in this life.
    leased: bool,
    split: bool,
}

impl Node {
    const fn new(epoch: u8) -> Self {
        Self {
            epoch,
            policy: None,
            members: None,
            serves: None,
            reported: None,
            leased: false,
            split: false,
        }
    }
}

/// A report that a node wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Written {
    node: u8,
    /// Whether it is the shard of the uid's first digit.
    child: bool,
    epoch: u8,
    ack: Option<Served>,
}

/// What the API server has had, in its order: four watches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct History {
    policies: Vec<Version>,
    members: Vec<Members>,
    reports: Vec<Written>,
    leases: Vec<(u8, u8)>,
}

/// The API server, the nodes, and how far the controller is. All of it is small, because there are many.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    /// How many nodes do anything at all.
    active: u8,
    done: u8,
    history: History,
    nodes: [Node; 2],
    /// What each node has served in each of its lives.
    served: BTreeSet<(u8, u8, Served)>,
    /// How far the controller's watches are.
    seen: [u8; 4],
}

/// One step of somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Script,
    AgentPolicy(u8),
    AgentMembers(u8),
    Apply(u8),
    Report(u8),
    Lease(u8),
    Controller(usize),
}

fn labels(role: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("app".to_owned(), role.to_owned())])
}

fn selector(role: &str) -> Selector {
    Selector {
        match_labels: labels(role),
        match_expressions: Vec::new(),
    }
}

fn name(name: &str) -> ObjectName {
    ObjectName {
        namespace: NAMESPACE.to_owned(),
        name: name.to_owned(),
    }
}

/// Whether a rule counts a policy as programmed; the real one, or one that is too simple.
type Rule = fn(&Index, Version) -> bool;

impl World {
    fn new(active: u8) -> Self {
        Self {
            active,
            done: 0,
            history: History {
                policies: vec![Version {
                    life: 1,
                    generation: 1,
                    origin: 0,
                }],
                members: vec![Members(0).with(A1).with(P1)],
                reports: Vec::new(),
                leases: Vec::new(),
            },
            nodes: [Node::new(1); 2],
            served: BTreeSet::new(),
            seen: [1, 1, 0, 0],
        }
    }

    fn steps(&self, script: &[Action]) -> Vec<Step> {
        let mut steps = Vec::new();
        if usize::from(self.done) < script.len() {
            steps.push(Step::Script);
        }
        let behind = |at: Option<u8>, all: usize| at.is_none_or(|at| usize::from(at) + 1 < all);
        for (name, node) in (0..self.active).zip(&self.nodes) {
            if behind(node.policy, self.history.policies.len()) {
                steps.push(Step::AgentPolicy(name));
            }
            if behind(node.members, self.history.members.len()) {
                steps.push(Step::AgentMembers(name));
            }
            if self.wants(name).is_some_and(|wants| node.serves != Some(wants)) {
                steps.push(Step::Apply(name));
            }
            if node.serves.is_some() && node.serves != node.reported {
                steps.push(Step::Report(name));
            }
            if node.reported.is_some() && !node.leased {
                steps.push(Step::Lease(name));
            }
        }
        let lengths = self.history.lengths();
        steps.extend(
            (0..4)
                .filter(|at| self.seen[*at] < lengths[*at])
                .map(Step::Controller),
        );
        steps
    }

    /// What a node would serve by what it has seen.
    fn wants(&self, name: u8) -> Option<Served> {
        let node = self.nodes[usize::from(name)];
        Some(Served {
            version: self.history.policies[usize::from(node.policy?)],
            members: self.history.members[usize::from(node.members?)].on(name),
        })
    }

    fn take(&mut self, step: Step, script: &[Action]) {
        let last = |length: usize| length as u8 - 1;
        match step {
            Step::Script => {
                let action = script[usize::from(self.done)];
                self.done += 1;
                self.act(action);
            }
            Step::AgentPolicy(name) => {
                let last = last(self.history.policies.len());
                let node = self.node(name);
                // The first is a list, what follows is a watch.
                node.policy = Some(node.policy.map_or(last, |at| at + 1));
            }
            Step::AgentMembers(name) => {
                let last = last(self.history.members.len());
                let node = self.node(name);
                node.members = Some(node.members.map_or(last, |at| at + 1));
            }
            Step::Apply(name) => {
                let wants = self.wants(name).expect("both lists are there");
                let node = self.node(name);
                node.serves = Some(wants);
                let epoch = node.epoch;
                self.served.insert((name, epoch, wants));
            }
            Step::Report(name) => self.report(name),
            Step::Lease(name) => {
                let node = self.node(name);
                node.leased = true;
                let epoch = node.epoch;
                self.history.leases.push((name, epoch));
            }
            Step::Controller(watch) => self.seen[watch] += 1,
        }
    }

    fn act(&mut self, action: Action) {
        let History {
            policies, members, ..
        } = &mut self.history;
        let version = *policies.last().expect("one at least");
        let present = *members.last().expect("one at least");
        match action {
            Action::Add(member) => members.push(present.with(member)),
            Action::Remove(member) => members.push(present.without(Members(0).with(member))),
            Action::Edit => policies.push(Version {
                generation: version.generation + 1,
                ..version
            }),
            Action::Origin => policies.push(Version {
                origin: version.origin + 1,
                ..version
            }),
            Action::Recreate => policies.push(Version {
                life: version.life + 1,
                generation: 1,
                origin: 0,
            }),
            Action::Reboot(name) => {
                let node = self.node(name);
                // Which shards there are a new life reads first: one of before would stay the authority.
                *node = Node {
                    split: node.split,
                    ..Node::new(node.epoch + 1)
                };
            }
            Action::Split(name) => self.node(name).split = true,
        }
    }

    fn node(&mut self, name: u8) -> &mut Node {
        &mut self.nodes[usize::from(name)]
    }

    fn report(&mut self, name: u8) {
        let node = self.node(name);
        let serves = node.serves.expect("it serves something");
        node.reported = Some(serves);
        let (epoch, split) = (node.epoch, node.split);
        // A node without a consumer says nothing of the policy.
        let ack = Some(serves).filter(|serves| serves.members.has_consumer());
        let mut write = |child, ack| {
            self.history.reports.push(Written {
                node: name,
                child,
                epoch,
                ack,
            });
        };
        if split {
            // Children first: the deepest shard that exists is the only authority.
            write(true, ack);
            write(false, None);
        } else {
            write(false, ack);
        }
    }

    /// The version and the attachments that the controller has.
    fn known(&self) -> (Version, Members) {
        let last = |at: usize| usize::from(self.seen[at]) - 1;
        (self.history.policies[last(0)], self.history.members[last(1)])
    }

    /// What a True, if it is said now, would speak of that was not served.
    fn not_served(&self) -> Option<String> {
        let (version, members) = self.known();
        let leases = &self.history.leases[..usize::from(self.seen[3])];
        for name in 0..NODES.len() as u8 {
            let members = members.on(name);
            if !members.has_consumer() {
                continue;
            }
            let leased = leases.iter().rev().find(|(node, _)| *node == name);
            let Some((_, epoch)) = leased else {
                return Some(format!("{name} has no lease"));
            };
            // Without an origin the generation alone names the content, whatever origin the node has seen since.
            let is_it = |served: &Served| {
                let same = (served.version.life, served.version.generation, served.members)
                    == (version.life, version.generation, members);
                same && (version.origin == 0 || served.version.origin == version.origin)
            };
            let mut lived = self
                .served
                .iter()
                .filter(|(node, life, _)| (*node, *life) == (name, *epoch));
            if !lived.any(|(.., served)| is_it(served)) {
                return Some(format!(
                    "{name} in life {epoch} never served {version:?} for {members:?}"
                ));
            }
        }
        None
    }
}

impl History {
    fn lengths(&self) -> [u8; 4] {
        [
            self.policies.len() as u8,
            self.members.len() as u8,
            self.reports.len() as u8,
            self.leases.len() as u8,
        ]
    }

    /// What the controller has seen of it.
    fn until(&self, seen: [u8; 4]) -> Self {
        let [policies, members, reports, leases] = seen.map(usize::from);
        Self {
            policies: self.policies[..policies].to_vec(),
            members: self.members[..members].to_vec(),
            reports: self.reports[..reports].to_vec(),
            leases: self.leases[..leases].to_vec(),
        }
    }

    /// The controller that has seen all of it, one watch after the other.
    fn index(&self) -> Index {
        let mut index = first_index();
        for (watch, length) in self.lengths().into_iter().enumerate() {
            for at in 0..length {
                self.see(&mut index, watch, at);
            }
        }
        index
    }

    /// The controller sees one more of a watch.
    fn see(&self, index: &mut Index, watch: usize, at: u8) {
        let at = usize::from(at);
        match watch {
            0 => see_policy(index, self.policies[at]),
            1 => {
                let before = at.checked_sub(1).map_or(Members(0), |at| self.members[at]);
                see_members(index, before, self.members[at]);
            }
            2 => see_report(index, self.reports[at]),
            _ => {
                let (node, epoch) = self.leases[at];
                let node = NODES[usize::from(node)];
                let lease = Lease {
                    holder: format!("{node}/{epoch}"),
                    renewed: at.to_string(),
                    apparent_age_ms: 0,
                };
                index.lease(node, &lease, CLOCK.mono);
            }
        }
    }
}

fn first_index() -> Index {
    let mut index = Index::default();
    for node in NODES {
        index.node(node);
    }
    index
}

fn see_policy(index: &mut Index, version: Version) {
    let policy = Policy {
        name: name("dns"),
        uid: version.uid(),
        generation: version.generation.into(),
        origin: version.origin(),
        origin_problem: None,
        content: Ok(Selectors {
            consumers: selector("web"),
            producers: selector("dns"),
        }),
    };
    index.policy(policy, CLOCK.mono);
}

fn see_members(index: &mut Index, before: Members, now: Members) {
    for gone in before.without(now).iter() {
        index.attachment_gone(&name(gone.uid));
    }
    for new in now.without(before).iter() {
        let attachment = Attachment {
            name: name(new.uid),
            node: NODES[usize::from(new.node)].to_owned(),
            labels: labels(new.role),
            covers: hash::covers(&Uid(new.uid.to_owned()), 1),
        };
        index.attachment(attachment, CLOCK.mono);
    }
}

fn see_report(index: &mut Index, written: Written) {
    let node = NODES[usize::from(written.node)];
    let acks = written.ack.into_iter().map(|served| {
        let ack = Ack {
            generation: served.version.generation.into(),
            covers: served.members.covers(),
            origin: served.version.origin(),
        };
        (served.version.uid(), ack.to_string())
    });
    let report = NodeReport {
        node: node.to_owned(),
        epoch: Epoch {
            id: written.epoch.to_string(),
            ..Epoch::default()
        },
        programmed: acks.collect(),
        others: Vec::new(),
    };
    let shard = if written.child { "r3" } else { "r" };
    index.report(&format!("{node}.{shard}"), &report);
}

fn said_true(index: &Index, version: Version) -> bool {
    let roll = rollup(index, &version.uid(), &RoutePolicyStatus::default(), CLOCK);
    roll.is_some_and(|roll| {
        let condition = roll.status.condition(ConditionKind::Programmed);
        roll.sure && condition.is_some_and(|condition| condition.status == Truth::True)
    })
}

fn key(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Goes every way that there is from a script. The states seen, and the first violation with the steps to it.
///
/// What the controller says depends on what it has seen and not on the order of it (the test of longer lives looks
/// into that), so it is asked once for each of these.
fn explore(active: u8, script: &[Action], rule: Rule) -> (usize, Option<String>) {
    let mut said: HashMap<u64, bool> = HashMap::new();
    // Each state with the one before it.
    let mut seen: HashMap<u64, Option<(u64, Step)>> = HashMap::new();
    let first = World::new(active);
    let mut open = vec![(key(&first), first)];
    seen.insert(open[0].0, None);
    let told = |seen: &HashMap<u64, Option<(u64, Step)>>, what: String, mut at: u64| {
        let mut way = Vec::new();
        while let Some(Some((before, step))) = seen.get(&at) {
            way.push(*step);
            at = *before;
        }
        way.reverse();
        (
            seen.len(),
            Some(format!("{what}\nscript {script:?}\nway {way:?}")),
        )
    };
    while let Some((at, world)) = open.pop() {
        let prefix = world.history.until(world.seen);
        let says = *said
            .entry(key(&prefix))
            .or_insert_with(|| rule(&prefix.index(), world.known().0));
        if says && let Some(violation) = world.not_served() {
            return told(&seen, violation, at);
        }
        let steps = world.steps(script);
        if steps.is_empty() && !says {
            return told(&seen, "all is served and it is not True".to_owned(), at);
        }
        for step in steps {
            let mut next = world.clone();
            next.take(step, script);
            let after = key(&next);
            if let Entry::Vacant(entry) = seen.entry(after) {
                entry.insert(Some((at, step)));
                open.push((after, next));
            }
        }
    }
    (seen.len(), None)
}

/// The small scripts: each thing that a user does, and what makes it hard; with the nodes that they need.
fn scripts() -> Vec<(u8, Vec<Action>)> {
    vec![
        (1, vec![Action::Add(A2)]),
        (1, vec![Action::Remove(A1), Action::Add(A2)]),
        (1, vec![Action::Edit, Action::Add(A2)]),
        (1, vec![Action::Recreate, Action::Edit]),
        (1, vec![Action::Edit, Action::Reboot(N1)]),
        (1, vec![Action::Add(A2), Action::Reboot(N1)]),
        (1, vec![Action::Origin, Action::Edit]),
        (1, vec![Action::Split(N1), Action::Edit]),
        (1, vec![Action::Split(N1), Action::Reboot(N1)]),
        (2, vec![Action::Edit]),
        (2, vec![Action::Recreate]),
        (2, vec![Action::Add(B1)]),
        (2, vec![Action::Add(P2), Action::Add(B1)]),
        (2, vec![Action::Add(A2), Action::Remove(A1)]),
        (2, vec![Action::Reboot(N1)]),
    ]
}

#[test]
fn f44_f45_never_true_too_early_in_any_order() {
    let mut states = 0;
    for (active, script) in scripts() {
        let (seen, violation) = explore(active, &script, said_true);
        assert_eq!(violation, None);
        println!("{seen:>8} {active} {script:?}");
        states += seen;
    }
    println!("{states:>8} states");
    assert!(
        states >= 36_000,
        "only {states} states: too few orders were tried"
    );
}

/// The rule without one of its parts.
fn weak(index: &Index, version: Version, with_covers: bool, with_epoch: bool) -> bool {
    let uid = version.uid();
    let Some(entry) = index.entry(&uid) else {
        return false;
    };
    let desired = entry.shares.iter().filter(|(_, share)| share.consumers > 0);
    desired.clone().count() > 0
        && desired.into_iter().all(|(node, share)| {
            let Some((epoch, Some(said @ Said::Programmed(_)))) = index.said(node, &uid) else {
                return false;
            };
            said.generation() == u64::from(version.generation)
                && (!with_covers || said.covers() == Some(share.covers))
                && (!with_epoch || index.life(node, CLOCK.mono) == Life::Live(epoch))
        })
}

#[test]
fn the_model_finds_a_rule_that_is_too_weak() {
    let weak_rules: [(&str, Rule); 2] = [
        ("generations alone", |index, version| {
            weak(index, version, false, true)
        }),
        ("without the epoch", |index, version| {
            weak(index, version, true, false)
        }),
    ];
    for (what, rule) in weak_rules {
        let found = scripts()
            .iter()
            .any(|(active, script)| explore(*active, script, rule).1.is_some());
        assert!(found, "{what}: no order makes it say True too early");
    }
    let whole: Rule = |index, version| weak(index, version, true, true);
    let (_, violation) = explore(2, &[Action::Add(A2)], whole);
    assert_eq!(violation, None);
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let member = prop::sample::select(vec![A1, A2, B1, P1, P2]);
    let node = 0..NODES.len() as u8;
    let action = prop_oneof![
        3 => member.prop_map(Action::Remove),
        2 => Just(Action::Edit),
        1 => Just(Action::Recreate),
        1 => Just(Action::Origin),
        2 => node.clone().prop_map(Action::Reboot),
        1 => node.prop_map(Action::Split),
    ];
    let adds = Just(vec![Action::Add(A2), Action::Add(B1), Action::Add(P2)]);
    (prop::collection::vec(action, 0..8), adds).prop_flat_map(|(mut actions, adds)| {
        actions.splice(0..0, adds);
        Just(actions).prop_shuffle()
    })
}

/// A world, and a controller that sees of it what comes in the order in which it comes.
struct Lived {
    script: Vec<Action>,
    world: World,
    index: Index,
}

impl Lived {
    fn new(script: Vec<Action>) -> Self {
        let world = World::new(NODES.len() as u8);
        let index = world.history.until(world.seen).index();
        Self { script, world, index }
    }

    fn steps(&self) -> Vec<Step> {
        self.world.steps(&self.script)
    }

    fn take(&mut self, step: Step) {
        if let Step::Controller(watch) = step {
            self.world
                .history
                .see(&mut self.index, watch, self.world.seen[watch]);
        }
        self.world.take(step, &self.script);
    }

    fn check(&self) -> Result<bool, TestCaseError> {
        let (version, _) = self.world.known();
        let says = said_true(&self.index, version);
        let other = self.world.history.until(self.world.seen).index();
        prop_assert_eq!(says, said_true(&other, version), "it depends on the order");
        if says {
            prop_assert_eq!(self.world.not_served(), None);
        }
        Ok(says)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn f44_f45_never_true_too_early_in_longer_lives(
        script in actions(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 300),
    ) {
        let mut removed = Members(0);
        // Each attachment comes once: uids are never used again.
        let script = script
            .into_iter()
            .filter(|action| match action {
                Action::Remove(member) => {
                    let first = !removed.has(*member);
                    removed = removed.with(*member);
                    first
                }
                Action::Add(member) => !removed.has(*member),
                _ => true,
            })
            .collect();
        let mut lived = Lived::new(script);
        for choice in choices {
            let steps = lived.steps();
            if steps.is_empty() {
                break;
            }
            lived.take(steps[choice.index(steps.len())]);
            lived.check()?;
        }
        while let Some(step) = lived.steps().pop() {
            lived.take(step);
            lived.check()?;
        }
        let (_, members) = lived.world.known();
        prop_assert_eq!(lived.check()?, members.has_consumer());
    }
}
