//! What the controller knows: policies, attachments, nodes, reports and leases, as five watches brought it, each
//! with its own delay.
//!
//! An event costs what it changes: one attachment is matched against the policies of its namespace, one report
//! against what the same report said before. The policies whose roll-up may have changed are collected in between.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Covers, ObjectName, Origin, Refusal, Selector, Uid};

use crate::api::node_report::{Ack, NodeReport, Shard, covers};
use crate::report::PolicyReport;

/// Time on a monotonic clock, nanoseconds.
pub type Mono = u64;

/// How long a lease counts after the controller has seen it change.
pub const LEASE_LIVE: Mono = 40_000_000_000;

/// How long the watch of leases may be silent before its silence says more about the API server than about nodes. It is
/// heard of much oftener.
pub const LEASES_SILENT: Mono = 20_000_000_000;

/// How long a node that attachments name, and that never existed, is waited for.
pub const NODE_MISSING: Mono = 300_000_000_000;

/// A policy as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Namespace and name.
    pub name: ObjectName,
    /// Uid.
    pub uid: Uid,
    /// Generation.
    pub generation: u64,
    /// The object that it is a copy of.
    pub origin: Option<Origin>,
    /// Its annotations about that could not be read: why.
    pub origin_problem: Option<String>,
    /// Whom it is about, or why it cannot be used.
    pub content: Result<Selectors, Refusal>,
}

/// Whom a policy is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selectors {
    /// Whose traffic.
    pub consumers: Selector,
    /// Who serves it.
    pub producers: Selector,
}

impl Policy {
    fn consumers(&self) -> Option<&Selector> {
        match &self.content {
            Ok(selectors) => Some(&selectors.consumers),
            Err(refusal) => refusal.consumers.as_ref(),
        }
    }

    fn producers(&self) -> Option<&Selector> {
        self.content.as_ref().ok().map(|selectors| &selectors.producers)
    }
}

/// An attachment as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Namespace and name.
    pub name: ObjectName,
    /// Its node.
    pub node: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// What it adds to the `covers` of policies that select it.
    pub covers: Covers,
}

/// A node's lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// `NODE/EPOCH`.
    pub holder: String,
    /// Changes with each renewal: its `renewTime` as it is written.
    pub renewed: String,
    /// How old it looks, by the two clocks, in milliseconds; negative if it is of the future. Believed only of a
    /// lease that is seen for the first time, and only to say that it looks fresh.
    pub apparent_age_ms: i64,
}

/// Part of a policy that one node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) consumers: u64,
    producers: u64,
    /// Sum over all attachments of the node that the policy selects.
    pub(super) covers: u64,
}

#[derive(Clone, Debug)]
pub(super) struct PolicyEntry {
    pub(super) policy: Policy,
    pub(super) shares: BTreeMap<String, Share>,
    /// The oldest moment that is not answered by every node yet. A later edit does not move it, or a steady stream of
    /// edits would never look late.
    pub(super) behind_since: Option<Mono>,
}

/// What one shard said of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Programmed(Ack),
    Other(Box<PolicyReport>),
}

impl Said {
    pub(super) const fn generation(&self) -> u64 {
        match self {
            Self::Programmed(ack) => ack.generation,
            Self::Other(report) => report.generation,
        }
    }

    pub(super) fn covers(&self) -> Option<u64> {
        match self {
            Self::Programmed(ack) => Some(ack.covers),
            Self::Other(report) => covers(&report.covers).ok(),
        }
    }

    pub(super) fn origin(&self) -> Option<(&Uid, u64)> {
        match self {
            Self::Programmed(ack) => ack.origin.as_ref().map(|origin| (&origin.uid, origin.generation)),
            Self::Other(report) => report
                .origin
                .as_ref()
                .map(|origin| (&origin.uid, origin.generation)),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct ShardEntry {
    epoch: String,
    said: BTreeMap<Uid, Said>,
}

#[derive(Clone, Debug)]
struct LeaseEntry {
    epoch: Option<String>,
    renewed: String,
    /// When it was last seen to change; none while all that is known is that it looked old when it was first seen.
    changed: Option<Mono>,
    /// When it was first seen.
    first: Mono,
}

impl LeaseEntry {
    /// When nobody can say any more that the node lives.
    fn runs_out(&self) -> Mono {
        self.changed.unwrap_or(self.first).saturating_add(LEASE_LIVE)
    }
}

/// What is known of the life of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Life<'a> {
    /// Its lease is renewed, for this epoch.
    Live(&'a str),
    /// It is too early to say: the lease looked old when it was first seen, a moment ago.
    Unsure,
    /// Its lease is not renewed any more, since then.
    Dead(Option<Mono>),
}

/// See [`Index::lives`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lives {
    /// Renewed.
    pub live: u64,
    /// Not renewed for too long, or not seen yet.
    pub unknown: u64,
}

/// Whether the node of an attachment is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    There,
    /// It never was, and may still come.
    Awaited(Mono),
    /// It never was, for too long.
    NeverCame,
    /// It was.
    Gone,
}

#[derive(Clone, Debug, Default)]
struct Namespace {
    policies: BTreeSet<Uid>,
    attachments: BTreeSet<String>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Index {
    policies: BTreeMap<Uid, PolicyEntry>,
    by_name: BTreeMap<ObjectName, Uid>,
    attachments: BTreeMap<ObjectName, Attachment>,
    namespaces: BTreeMap<String, Namespace>,
    nodes: BTreeSet<String>,
    /// Nodes of attachments that never existed, since when they are waited for.
    awaited: BTreeMap<String, Mono>,
    /// Nodes that were there and are not any more, while they have attachments.
    gone: BTreeSet<String>,
    /// How many attachments each node has.
    attached: BTreeMap<String, u64>,
    /// Policies that have a share on each node.
    on_node: BTreeMap<String, BTreeSet<Uid>>,
    reports: BTreeMap<String, BTreeMap<Shard, ShardEntry>>,
    leases: BTreeMap<String, LeaseEntry>,
    /// When the watch of leases was last heard of; none before it was asked for.
    leases_heard: Option<Mono>,
    /// Up to when [`Self::tick`] has looked, and by the time of leases.
    ticked: Mono,
    ticked_leases: Mono,
    dirty: BTreeSet<Uid>,
}

impl Index {
    // --- policies ------------------------------------------------------------------------------------------

    /// A policy was created or changed.
    pub fn policy(&mut self, policy: Policy, now: Mono) {
        if let Some(known) = self.by_name.get(&policy.name)
            && *known != policy.uid
        {
            let known = known.clone();
            self.remove_policy(&known);
        }
        let uid = policy.uid.clone();
        let behind_since = match self.policies.get(&uid) {
            // A list may be older than the watch before it.
            Some(known) if known.policy.generation > policy.generation => return,
            Some(known) if known.policy == policy => return,
            Some(known) => known.behind_since,
            None => None,
        };
        self.remove_policy(&uid);
        let mut entry = PolicyEntry {
            shares: BTreeMap::new(),
            behind_since: behind_since.or(Some(now)),
            policy,
        };
        let namespace = self
            .namespaces
            .entry(entry.policy.name.namespace.clone())
            .or_default();
        namespace.policies.insert(uid.clone());
        for name in &namespace.attachments {
            let name = ObjectName {
                namespace: entry.policy.name.namespace.clone(),
                name: name.clone(),
            };
            if let Some(attachment) = self.attachments.get(&name) {
                entry.count(attachment, true);
            }
        }
        for node in entry.shares.keys() {
            self.on_node.entry(node.clone()).or_default().insert(uid.clone());
        }
        self.by_name.insert(entry.policy.name.clone(), uid.clone());
        self.policies.insert(uid.clone(), entry);
        self.dirty.insert(uid);
    }

    /// A policy is gone.
    pub fn policy_gone(&mut self, uid: &Uid) {
        self.remove_policy(uid);
        self.dirty.remove(uid);
    }

    fn remove_policy(&mut self, uid: &Uid) {
        let Some(entry) = self.policies.remove(uid) else {
            return;
        };
        for node in entry.shares.keys() {
            drop_from(&mut self.on_node, node, uid);
        }
        if self.by_name.get(&entry.policy.name) == Some(uid) {
            self.by_name.remove(&entry.policy.name);
        }
        if let Some(namespace) = self.namespaces.get_mut(&entry.policy.name.namespace) {
            namespace.policies.remove(uid);
        }
        self.forget_empty(&entry.policy.name.namespace);
    }

    // --- attachments ---------------------------------------------------------------------------------------

    /// An attachment was created or changed.
    pub fn attachment(&mut self, attachment: Attachment, now: Mono) {
        if self.attachments.get(&attachment.name) == Some(&attachment) {
            return;
        }
        self.attachment_gone(&attachment.name.clone());
        self.count(&attachment, true);
        let namespace = self
            .namespaces
            .entry(attachment.name.namespace.clone())
            .or_default();
        namespace.attachments.insert(attachment.name.name.clone());
        *self.attached.entry(attachment.node.clone()).or_default() += 1;
        if !self.nodes.contains(&attachment.node) && !self.gone.contains(&attachment.node) {
            self.awaited.entry(attachment.node.clone()).or_insert(now);
        }
        self.attachments.insert(attachment.name.clone(), attachment);
    }

    /// An attachment is gone.
    pub fn attachment_gone(&mut self, name: &ObjectName) {
        let Some(attachment) = self.attachments.remove(name) else {
            return;
        };
        self.count(&attachment, false);
        if let Some(namespace) = self.namespaces.get_mut(&name.namespace) {
            namespace.attachments.remove(&name.name);
        }
        self.forget_empty(&name.namespace);
        if let Some(count) = self.attached.get_mut(&attachment.node) {
            *count -= 1;
            if *count == 0 {
                self.attached.remove(&attachment.node);
                self.awaited.remove(&attachment.node);
                self.gone.remove(&attachment.node);
            }
        }
    }

    /// All attachments are known: the others are gone.
    pub fn keep_attachments(&mut self, present: &BTreeSet<ObjectName>) {
        let gone: Vec<_> = self
            .attachments
            .keys()
            .filter(|name| !present.contains(name))
            .cloned()
            .collect();
        for name in gone {
            self.attachment_gone(&name);
        }
    }

    /// The node of an attachment, and the policies that select it as a consumer.
    #[must_use]
    pub fn consumer(&self, name: &ObjectName) -> Option<(&str, Vec<&Policy>)> {
        let attachment = self.attachments.get(name)?;
        let policies = self
            .namespaces
            .get(&name.namespace)
            .into_iter()
            .flat_map(|known| &known.policies);
        let selects = |policy: &Policy| {
            policy
                .consumers()
                .is_some_and(|selector| selector.matches(&attachment.labels))
        };
        let selecting = policies
            .filter_map(|uid| self.policies.get(uid))
            .map(|entry| &entry.policy)
            .filter(|policy| selects(policy))
            .collect();
        Some((&attachment.node, selecting))
    }

    /// Adds an attachment to the shares of the policies that select it, or takes it away.
    fn count(&mut self, attachment: &Attachment, add: bool) {
        let Some(namespace) = self.namespaces.get(&attachment.name.namespace) else {
            return;
        };
        for uid in &namespace.policies {
            let Some(entry) = self.policies.get_mut(uid) else {
                continue;
            };
            if !entry.count(attachment, add) {
                continue;
            }
            self.dirty.insert(uid.clone());
            if entry.shares.contains_key(&attachment.node) {
                let policies = self.on_node.entry(attachment.node.clone()).or_default();
                policies.insert(uid.clone());
            } else {
                drop_from(&mut self.on_node, &attachment.node, uid);
            }
        }
    }

    fn forget_empty(&mut self, namespace: &str) {
        let empty = |known: &Namespace| known.policies.is_empty() && known.attachments.is_empty();
        if self.namespaces.get(namespace).is_some_and(empty) {
            self.namespaces.remove(namespace);
        }
    }

    // --- nodes ---------------------------------------------------------------------------------------------

    /// A node exists.
    pub fn node(&mut self, node: &str) {
        if self.nodes.insert(node.to_owned()) {
            self.awaited.remove(node);
            self.gone.remove(node);
            self.touch_node(node);
        }
    }

    /// A node is gone. It leaves every count at once.
    pub fn node_gone(&mut self, node: &str) {
        if self.nodes.remove(node) {
            if self.attached.contains_key(node) {
                self.gone.insert(node.to_owned());
            }
            self.touch_node(node);
        }
    }

    /// All nodes are known: the others are gone.
    pub fn keep_nodes(&mut self, present: &BTreeSet<&str>) {
        let gone: Vec<_> = self
            .nodes
            .iter()
            .filter(|node| !present.contains(node.as_str()))
            .cloned()
            .collect();
        for node in gone {
            self.node_gone(&node);
        }
    }

    fn touch_node(&mut self, node: &str) {
        if let Some(policies) = self.on_node.get(node) {
            self.dirty.extend(policies.iter().cloned());
        }
    }

    // --- reports -------------------------------------------------------------------------------------------

    /// A report was created or changed. What cannot be read of it counts as not said.
    pub fn report(&mut self, name: &str, report: &NodeReport) {
        let Some(shard) = Shard::of(name, &report.node) else {
            return;
        };
        let mut said = BTreeMap::new();
        for (uid, line) in &report.programmed {
            if let Ok(ack) = line.parse() {
                said.insert(uid.clone(), Said::Programmed(ack));
            }
        }
        for other in &report.others {
            // Whatever an agent says twice is not programmed.
            said.insert(other.uid.clone(), Said::Other(Box::new(other.clone())));
        }
        said.retain(|uid, _| shard.may_hold(uid));
        let entry = ShardEntry {
            epoch: report.epoch.id.clone(),
            said,
        };
        self.replace_shard(&report.node, &shard, Some(entry));
    }

    /// A report is gone.
    pub fn report_gone(&mut self, name: &str, node: &str) {
        if let Some(shard) = Shard::of(name, node) {
            self.replace_shard(node, &shard, None);
        }
    }

    /// All reports are known, by their names: the others are gone.
    pub fn keep_reports(&mut self, present: &BTreeSet<&str>) {
        let gone: Vec<_> = self
            .reports
            .iter()
            .flat_map(|(node, shards)| shards.keys().map(move |shard| (node.clone(), shard.clone())))
            .filter(|(node, shard)| !present.contains(shard.name(node).as_str()))
            .collect();
        for (node, shard) in gone {
            self.replace_shard(&node, &shard, None);
        }
    }

    fn replace_shard(&mut self, node: &str, shard: &Shard, entry: Option<ShardEntry>) {
        let shards = self.reports.entry(node.to_owned()).or_default();
        let appears = entry.is_some() != shards.contains_key(shard);
        let epoch = entry.as_ref().map(|entry| entry.epoch.clone());
        let known = match entry {
            Some(entry) => shards.insert(shard.clone(), entry),
            None => shards.remove(shard),
        };
        if appears || epoch != known.as_ref().map(|known| known.epoch.clone()) {
            // A shard that comes or goes changes who speaks for every uid that it may hold.
            let policies = self.on_node.get(node).into_iter().flatten();
            self.dirty
                .extend(policies.filter(|uid| shard.may_hold(uid)).cloned());
        } else {
            let known = known.unwrap_or_default();
            let new = shards.get(shard);
            for (uid, said) in new.iter().flat_map(|new| &new.said) {
                if known.said.get(uid) != Some(said) {
                    self.dirty.insert(uid.clone());
                }
            }
            for uid in known.said.keys() {
                if new.is_none_or(|new| !new.said.contains_key(uid)) {
                    self.dirty.insert(uid.clone());
                }
            }
        }
        if self.reports.get(node).is_some_and(BTreeMap::is_empty) {
            self.reports.remove(node);
        }
    }

    /// What a node said of a policy, and in which epoch. The deepest shard that exists is the only authority.
    pub(super) fn said(&self, node: &str, uid: &Uid) -> Option<(&str, Option<&Said>)> {
        let shards = self.reports.get(node)?;
        let entry = Shard::for_uid(uid).find_map(|shard| shards.get(&shard))?;
        Some((&entry.epoch, entry.said.get(uid)))
    }

    // --- leases --------------------------------------------------------------------------------------------

    /// The watch of leases is alive. After a silence nobody can have been heard of, so every node that was not given up
    /// before has all of its time again: an API server that was away for a minute withdraws nothing.
    pub fn leases_heard(&mut self, now: Mono) {
        let before = self.leases_heard.replace(now);
        let Some(stopped) = before.map(|before| before.saturating_add(LEASES_SILENT)) else {
            return;
        };
        if stopped >= now {
            return;
        }
        for lease in self.leases.values_mut() {
            let at = lease.changed.as_mut().unwrap_or(&mut lease.first);
            if stopped.saturating_sub(*at) < LEASE_LIVE {
                *at = now;
            }
        }
    }

    /// The time by which leases age: it stands still while nothing is heard of them.
    fn lease_time(&self, now: Mono) -> Mono {
        self.leases_heard
            .map_or(now, |heard| now.min(heard.saturating_add(LEASES_SILENT)))
    }

    /// A node's lease was created or renewed.
    pub fn lease(&mut self, node: &str, lease: &Lease, now: Mono) {
        let epoch = lease
            .holder
            .strip_prefix(node)
            .and_then(|rest| rest.strip_prefix('/'))
            .map(str::to_owned);
        let looks_fresh = lease.apparent_age_ms.unsigned_abs() < LEASE_LIVE / 1_000_000;
        let before = self.live_epoch(node, now);
        match self.leases.get_mut(node) {
            Some(known) if known.renewed == lease.renewed && known.epoch == epoch => return,
            Some(known) => {
                known.epoch = epoch;
                known.renewed.clone_from(&lease.renewed);
                known.changed = Some(now);
            }
            None => {
                let entry = LeaseEntry {
                    epoch,
                    renewed: lease.renewed.clone(),
                    changed: looks_fresh.then_some(now),
                    first: now,
                };
                self.leases.insert(node.to_owned(), entry);
                self.touch_node(node);
            }
        }
        if before != self.live_epoch(node, now) {
            self.touch_node(node);
        }
    }

    /// A node's lease is gone.
    pub fn lease_gone(&mut self, node: &str) {
        if self.leases.remove(node).is_some() {
            self.touch_node(node);
        }
    }

    /// All leases are known: the others are gone.
    pub fn keep_leases(&mut self, present: &BTreeSet<&str>) {
        let gone: Vec<_> = self
            .leases
            .keys()
            .filter(|node| !present.contains(node.as_str()))
            .cloned()
            .collect();
        for node in gone {
            self.lease_gone(&node);
        }
    }

    fn live_epoch(&self, node: &str, now: Mono) -> Option<String> {
        match self.life(node, now) {
            Life::Live(epoch) => Some(epoch.to_owned()),
            Life::Unsure | Life::Dead(_) => None,
        }
    }

    pub(super) fn life(&self, node: &str, now: Mono) -> Life<'_> {
        let Some(lease) = self.leases.get(node) else {
            return Life::Dead(None);
        };
        let now = self.lease_time(now);
        match (lease.changed, &lease.epoch) {
            (Some(at), Some(epoch)) if now.saturating_sub(at) < LEASE_LIVE => Life::Live(epoch),
            (Some(at), _) => Life::Dead(Some(at)),
            (None, _) if now.saturating_sub(lease.first) < LEASE_LIVE => Life::Unsure,
            (None, _) => Life::Dead(None),
        }
    }

    // --- answers -------------------------------------------------------------------------------------------

    /// Time passes: leases run out, nodes that never came are given up.
    pub fn tick(&mut self, now: Mono) {
        let before = std::mem::replace(&mut self.ticked, now);
        let passed = |at: Mono, before: Mono, now: Mono| before < at && at <= now;
        let mut touched = Vec::new();
        let lease_time = self.lease_time(now);
        let lease_before = std::mem::replace(&mut self.ticked_leases, lease_time);
        for (node, lease) in &self.leases {
            if passed(lease.runs_out(), lease_before, lease_time) {
                touched.push(node.clone());
            }
        }
        for (node, since) in &self.awaited {
            if passed(since.saturating_add(NODE_MISSING), before, now) {
                touched.push(node.clone());
            }
        }
        for node in touched {
            self.touch_node(&node);
        }
    }

    /// When [`Self::tick`] may have something to do next.
    #[must_use]
    pub fn next_deadline(&self, now: Mono) -> Option<Mono> {
        let leases = self.leases.values().map(LeaseEntry::runs_out);
        let awaited = self
            .awaited
            .values()
            .map(|since| since.saturating_add(NODE_MISSING));
        leases.chain(awaited).filter(|at| *at > now).min()
    }

    /// The policies whose roll-up may have changed since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<Uid> {
        std::mem::take(&mut self.dirty)
    }

    /// Derives one anew: somebody else has written its status, or a write of ours has failed.
    pub fn touch(&mut self, uid: &Uid) {
        if self.policies.contains_key(uid) {
            self.dirty.insert(uid.clone());
        }
    }

    /// Derives everything anew: after a start, and when the leader lease is won.
    pub fn touch_all(&mut self) {
        self.dirty.extend(self.policies.keys().cloned());
    }

    pub(super) fn entry(&self, uid: &Uid) -> Option<&PolicyEntry> {
        self.policies.get(uid)
    }

    /// Whether the node of an attachment is there.
    pub(super) fn presence(&self, node: &str, now: Mono) -> Presence {
        match self.awaited.get(node) {
            _ if self.nodes.contains(node) => Presence::There,
            Some(since) if now.saturating_sub(*since) < NODE_MISSING => Presence::Awaited(*since),
            Some(_) => Presence::NeverCame,
            None => Presence::Gone,
        }
    }

    /// Whether every node has answered for a policy, as its roll-up found.
    pub fn settle(&mut self, uid: &Uid, behind: bool, now: Mono) {
        if let Some(entry) = self.policies.get_mut(uid) {
            entry.behind_since = behind.then(|| entry.behind_since.unwrap_or(now));
        }
    }

    /// Nodes that exist and have a consumer of some policy: those whose lease is renewed, and those of which nobody can
    /// say.
    #[must_use]
    pub fn lives(&self, now: Mono) -> Lives {
        let mut lives = Lives::default();
        for (node, policies) in &self.on_node {
            let consumes = |uid: &Uid| {
                let share = self.policies.get(uid).and_then(|entry| entry.shares.get(node));
                share.is_some_and(|share| share.consumers > 0)
            };
            if !self.nodes.contains(node) || !policies.iter().any(consumes) {
                continue;
            }
            match self.life(node, now) {
                Life::Live(_) => lives.live += 1,
                Life::Unsure | Life::Dead(_) => lives.unknown += 1,
            }
        }
        lives
    }

    /// The policies that some node has not answered for yet, since when.
    pub fn behind(&self) -> impl Iterator<Item = (&ObjectName, Mono)> {
        self.policies
            .values()
            .filter_map(|entry| Some((&entry.policy.name, entry.behind_since?)))
    }
}

impl PolicyEntry {
    /// Adds an attachment to its node's share, or takes it away. Whether the policy selects it at all.
    fn count(&mut self, attachment: &Attachment, add: bool) -> bool {
        let selects = |selector: Option<&Selector>| {
            selector.is_some_and(|selector| selector.matches(&attachment.labels))
        };
        let consumer = selects(self.policy.consumers());
        let producer = selects(self.policy.producers());
        if !consumer && !producer {
            return false;
        }
        let share = self.shares.entry(attachment.node.clone()).or_default();
        for (selected, count, summand) in [
            (consumer, &mut share.consumers, attachment.covers.consumer),
            (producer, &mut share.producers, attachment.covers.producer),
        ] {
            if selected && add {
                *count += 1;
                share.covers = share.covers.wrapping_add(summand);
            } else if selected {
                *count -= 1;
                share.covers = share.covers.wrapping_sub(summand);
            }
        }
        if *share == Share::default() {
            self.shares.remove(&attachment.node);
        }
        true
    }
}

fn drop_from(map: &mut BTreeMap<String, BTreeSet<Uid>>, node: &str, uid: &Uid) {
    if let Some(policies) = map.get_mut(node) {
        policies.remove(uid);
        if policies.is_empty() {
            map.remove(node);
        }
    }
}
