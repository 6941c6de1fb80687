//! What is to be written, and when. Pure: it is told what the watches bring and how writes went, and says what to write
//! and when to ask it again.
//!
//! A status is decided on one version of its policy and carries that version: if the policy has another one by then, the
//! API server refuses, and it is decided again. So a controller that is late, or that leads no more and does not know it,
//! cannot overwrite what is newer.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{ObjectName, Uid};

use super::index::{Index, Lives, Mono};
use super::news::News;
use super::objects::{self, AttachmentBody, LeaseBody, PolicyBody, ReportBody};
use super::pace::{Change, Pace};
use super::rollup::{Clock, rollup};
use crate::api::status::{NodeCounts, RoutePolicyStatus};
use crate::apiserver::Failure;
use crate::apiserver::object::Object;
use crate::apiserver::reflect::Shown as _;

/// Most writes that are on their way at a time.
const MOST_WRITES: usize = 16;

/// What a watch brought.
#[derive(Clone, Debug)]
pub enum Seen {
    /// Policies.
    Policies(News<PolicyBody>),
    /// Attachments.
    Attachments(News<AttachmentBody>),
    /// Nodes.
    Nodes(News<()>),
    /// Reports of nodes.
    Reports(News<ReportBody>),
    /// Leases of nodes.
    Leases(News<LeaseBody>),
}

/// The watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Watched {
    /// Policies.
    Policies,
    /// Attachments.
    Attachments,
    /// Nodes.
    Nodes,
    /// Reports of nodes.
    Reports,
    /// Leases of nodes.
    Leases,
}

impl Watched {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Policies,
        Self::Attachments,
        Self::Nodes,
        Self::Reports,
        Self::Leases,
    ];

    /// In one word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Policies => "policies",
            Self::Attachments => "attachments",
            Self::Nodes => "nodes",
            Self::Reports => "reports",
            Self::Leases => "leases",
        }
    }
}

impl Seen {
    /// Which watch, and how it fails if it does; else it is alive.
    #[must_use]
    pub const fn of(&self) -> (Watched, Option<&Failure>) {
        const fn failure<B>(news: &News<B>) -> Option<&Failure> {
            match news {
                News::Failing(failure) => Some(failure),
                _ => None,
            }
        }
        match self {
            Self::Policies(news) => (Watched::Policies, failure(news)),
            Self::Attachments(news) => (Watched::Attachments, failure(news)),
            Self::Nodes(news) => (Watched::Nodes, failure(news)),
            Self::Reports(news) => (Watched::Reports, failure(news)),
            Self::Leases(news) => (Watched::Leases, failure(news)),
        }
    }
}

/// A status to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Of this policy.
    pub name: ObjectName,
    /// And of no other of that name.
    pub uid: Uid,
    /// The version of the policy that it was decided on.
    pub version: String,
    /// What it is to be.
    pub status: RoutePolicyStatus,
}

/// How a write went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The policy has this version and status now.
    Written {
        /// Its version.
        version: String,
        /// Its status.
        status: Box<RoutePolicyStatus>,
    },
    /// It had another version by then.
    Conflict,
    /// It could not be written, or nobody knows.
    Failed,
}

/// A policy as the API server has it.
#[derive(Clone, Debug)]
struct Known {
    name: ObjectName,
    version: String,
    status: RoutePolicyStatus,
    pace: Pace,
    /// As they would be written.
    nodes: NodeCounts,
    /// What waits for its time.
    wanted: Option<Wanted>,
    /// A write is on its way.
    busy: bool,
}

#[derive(Clone, Debug)]
struct Wanted {
    due: Mono,
    change: Change,
    status: RoutePolicyStatus,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Keeper {
    index: Index,
    known: BTreeMap<Uid, Known>,
    /// Policies with something that waits, by its time.
    queue: BTreeSet<(Mono, Uid)>,
    /// Writes on their way.
    busy: usize,
    listed: BTreeSet<Watched>,
    leads: bool,
}

impl Keeper {
    // --- what is seen ----------------------------------------------------------------------------------------

    /// Takes in what a watch brought.
    pub fn take(&mut self, seen: Seen, clock: Clock) {
        let now = clock.mono;
        match seen {
            Seen::Policies(news) => self.take_policies(news, now),
            Seen::Attachments(news) => self.take_attachments(news, now),
            Seen::Nodes(news) => self.take_nodes(news),
            Seen::Reports(news) => self.take_reports(news),
            Seen::Leases(news) => self.take_leases(news, clock),
        }
    }

    fn take_policies(&mut self, news: News<PolicyBody>, now: Mono) {
        match news {
            News::All(objects) => {
                let present: BTreeSet<Uid> = objects
                    .iter()
                    .filter_map(|object| objects::uid(&object.metadata))
                    .collect();
                let gone: Vec<Uid> = self
                    .known
                    .keys()
                    .filter(|uid| !present.contains(uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.policy_gone(&uid);
                }
                for object in objects {
                    self.policy(object, now);
                }
                self.listed.insert(Watched::Policies);
            }
            News::Changed(object) => self.policy(*object, now),
            News::Gone(object) => {
                if let Some(uid) = objects::uid(&object.metadata) {
                    self.policy_gone(&uid);
                }
            }
            News::Alive | News::Failing(_) => {}
        }
    }

    fn policy(&mut self, object: Object<PolicyBody>, now: Mono) {
        let Some(policy) = objects::policy(&object) else {
            return;
        };
        let (uid, name) = (policy.uid.clone(), policy.name.clone());
        let version = object.version().to_owned();
        let status = object.body.status;
        match self.known.get_mut(&uid) {
            Some(known) if is_earlier(&version, &known.version) => return,
            Some(known) => {
                if known.version != version {
                    known.version = version;
                    known.status = status;
                    // What failed was about another version.
                    known.pace.unpause();
                    self.index.touch(&uid);
                }
            }
            None => {
                self.known.insert(
                    uid,
                    Known {
                        name,
                        version,
                        status,
                        pace: Pace::default(),
                        nodes: NodeCounts::default(),
                        wanted: None,
                        busy: false,
                    },
                );
            }
        }
        self.index.policy(policy, now);
    }

    fn policy_gone(&mut self, uid: &Uid) {
        self.unqueue(uid);
        if self.known.remove(uid).is_some_and(|known| known.busy) {
            self.busy -= 1;
        }
        self.index.policy_gone(uid);
    }

    fn take_attachments(&mut self, news: News<AttachmentBody>, now: Mono) {
        let mut put = |object: &Object<AttachmentBody>| match objects::attachment(object) {
            Some(attachment) => self.index.attachment(attachment, now),
            // Nobody knows any more where it is.
            None => self.index.attachment_gone(&objects::object_name(object)),
        };
        match news {
            News::All(objects) => {
                objects.iter().for_each(put);
                let present: BTreeSet<ObjectName> = objects.iter().map(objects::object_name).collect();
                self.index.keep_attachments(&present);
                self.listed.insert(Watched::Attachments);
            }
            News::Changed(object) => put(&object),
            News::Gone(object) => self.index.attachment_gone(&objects::object_name(&object)),
            News::Alive | News::Failing(_) => {}
        }
    }

    fn take_nodes(&mut self, news: News<()>) {
        match news {
            News::All(objects) => {
                for object in &objects {
                    self.index.node(object.name());
                }
                let present: BTreeSet<&str> = objects.iter().map(Object::name).collect();
                self.index.keep_nodes(&present);
                self.listed.insert(Watched::Nodes);
            }
            News::Changed(object) => self.index.node(object.name()),
            News::Gone(object) => self.index.node_gone(object.name()),
            News::Alive | News::Failing(_) => {}
        }
    }

    fn take_reports(&mut self, news: News<ReportBody>) {
        match news {
            News::All(objects) => {
                for object in &objects {
                    self.index.report(object.name(), &object.body.0);
                }
                let present: BTreeSet<&str> = objects.iter().map(Object::name).collect();
                self.index.keep_reports(&present);
                self.listed.insert(Watched::Reports);
            }
            News::Changed(object) => self.index.report(object.name(), &object.body.0),
            News::Gone(object) => self.index.report_gone(object.name(), &object.body.0.node),
            News::Alive | News::Failing(_) => {}
        }
    }

    fn take_leases(&mut self, news: News<LeaseBody>, clock: Clock) {
        let now = clock.mono;
        if matches!(news, News::Failing(_)) {
            return;
        }
        self.index.leases_heard(now);
        let put = |index: &mut Index, object: &Object<LeaseBody>| {
            let lease = objects::lease(&object.body, clock.wall_ms());
            index.lease(object.name(), &lease, now);
        };
        match news {
            News::All(objects) => {
                for object in &objects {
                    put(&mut self.index, object);
                }
                let present: BTreeSet<&str> = objects.iter().map(Object::name).collect();
                self.index.keep_leases(&present);
                self.listed.insert(Watched::Leases);
            }
            News::Changed(object) => put(&mut self.index, &object),
            News::Gone(object) => self.index.lease_gone(object.name()),
            News::Alive | News::Failing(_) => {}
        }
    }

    /// Whether this controller leads now. One that has won derives every status anew.
    pub fn lead(&mut self, leads: bool) {
        if leads && !self.leads {
            self.index.touch_all();
        }
        self.leads = leads;
    }

    // --- what is written -------------------------------------------------------------------------------------

    /// What is to be written now. Nothing before every watch has brought its list: what is not known yet would look as
    /// if it were not there.
    pub fn decide(&mut self, clock: Clock) -> Vec<Write> {
        if self.missing().next().is_some() {
            return Vec::new();
        }
        self.index.tick(clock.mono);
        for uid in self.index.take_dirty() {
            self.evaluate(&uid, clock);
        }
        let mut writes = Vec::new();
        while let Some(uid) = self.next_write(clock.mono) {
            writes.extend(self.start(&uid, clock.mono));
        }
        writes
    }

    fn evaluate(&mut self, uid: &Uid, clock: Clock) {
        self.unqueue(uid);
        let Some(known) = self.known.get_mut(uid) else {
            return;
        };
        let Some(roll) = rollup(&self.index, uid, &known.status, clock) else {
            return;
        };
        self.index.settle(uid, roll.behind, clock.mono);
        known.nodes = roll.status.nodes;
        // One that is on its way is looked at again when it has arrived.
        if known.busy || !roll.sure || roll.status == known.status {
            return;
        }
        let change = Change::between(&known.status, &roll.status);
        let due = known.pace.due(change);
        known.wanted = Some(Wanted {
            due,
            change,
            status: roll.status,
        });
        self.queue.insert((due, uid.clone()));
    }

    fn unqueue(&mut self, uid: &Uid) {
        let wanted = self.known.get_mut(uid).and_then(|known| known.wanted.take());
        if let Some(wanted) = wanted {
            self.queue.remove(&(wanted.due, uid.clone()));
        }
    }

    fn next_write(&self, now: Mono) -> Option<Uid> {
        let (due, uid) = self.queue.first()?;
        (self.leads && self.busy < MOST_WRITES && *due <= now).then(|| uid.clone())
    }

    fn start(&mut self, uid: &Uid, now: Mono) -> Option<Write> {
        let known = self.known.get_mut(uid)?;
        let wanted = known.wanted.take()?;
        self.queue.remove(&(wanted.due, uid.clone()));
        known.pace.written(wanted.change, now);
        known.busy = true;
        self.busy += 1;
        Some(Write {
            name: known.name.clone(),
            uid: uid.clone(),
            version: known.version.clone(),
            status: wanted.status,
        })
    }

    /// A write has come to its end.
    pub fn written(&mut self, uid: &Uid, outcome: Outcome, now: Mono) {
        let Some(known) = self.known.get_mut(uid).filter(|known| known.busy) else {
            return;
        };
        known.busy = false;
        self.busy -= 1;
        match outcome {
            Outcome::Written { version, status } => {
                if !is_earlier(&version, &known.version) {
                    known.version = version;
                    known.status = *status;
                }
                known.pace.unpause();
            }
            Outcome::Conflict | Outcome::Failed => known.pace.failed(now),
        }
        self.index.touch(uid);
    }

    /// When [`Self::decide`] may have something to say that nothing that is seen brings about.
    #[must_use]
    pub fn next_deadline(&self, now: Mono) -> Option<Mono> {
        let write = self
            .queue
            .first()
            .map(|(due, _)| *due)
            .filter(|_| self.leads && self.busy < MOST_WRITES);
        write.into_iter().chain(self.index.next_deadline(now)).min()
    }

    // --- what is told ----------------------------------------------------------------------------------------

    /// The watches that have not brought their list yet.
    pub fn missing(&self) -> impl Iterator<Item = Watched> {
        Watched::ALL
            .into_iter()
            .filter(|watched| !self.listed.contains(watched))
    }

    /// All that is known.
    #[must_use]
    pub const fn index(&self) -> &Index {
        &self.index
    }

    /// Whether this controller leads.
    #[must_use]
    pub const fn leads(&self) -> bool {
        self.leads
    }

    /// Nodes with a consumer.
    #[must_use]
    pub fn lives(&self, now: Mono) -> Lives {
        self.index.lives(now)
    }

    /// Nodes that are not programmed, counted once for each policy.
    #[must_use]
    pub fn laggards(&self) -> u64 {
        self.known
            .values()
            .map(|known| known.nodes.desired.saturating_sub(known.nodes.programmed))
            .sum()
    }

    /// The policies that some node has not answered for yet, since when; none while not all is known.
    pub fn behind(&self) -> impl Iterator<Item = (&ObjectName, Mono)> {
        let complete = self.missing().next().is_none();
        self.index.behind().filter(move |_| complete)
    }
}

/// Whether a version is an earlier one. Versions are numbers of one sequence in every API server that there is; where they
/// are not, the one that came last counts.
fn is_earlier(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
