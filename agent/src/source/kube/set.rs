//! What is in force: what the API server has shown, less what it took back. Pure: no clock, no connection.
//!
//! Of each object one line of JSON is kept, which is also how it is saved; types are made of it only when they are needed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use holdfast_engine::model::{FailReason, ObjectChange, Origin, Refusal, Uid};
use serde::{Deserialize, Serialize};

use super::object::{Content, Seen};
use crate::api::v1alpha1::{Kind, LabelSelector};
use crate::api::validate::{self, Meta, Problem, Problems, Provenance};
use crate::source::good::{Good, Key, bounded, nanos_between, plain_problem};
use crate::source::{SourceProblem, SourceStatus};

/// So many objects that were deleted are remembered: a list that is older than the deletion shows them again.
const MAX_DELETED: usize = 1_024;

/// Objects that are listed and watched together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    /// Attachments of this node, in all namespaces.
    Attachments,
    /// Policies of one namespace.
    Namespace(String),
    /// Policies of all namespaces.
    Everything,
}

impl Scope {
    pub(super) const fn kind(&self) -> Kind {
        match self {
            Self::Attachments => Kind::Attachment,
            Self::Namespace(_) | Self::Everything => Kind::RoutePolicy,
        }
    }

    /// Whether an object is one of these.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.kind() == key.kind
            && match self {
                Self::Namespace(namespace) => *namespace == key.name.namespace,
                Self::Attachments | Self::Everything => true,
            }
    }
}

/// An object as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Line {
    key: Key,
    uid: Uid,
    generation: u64,
    created_ms: i64,
    /// The content that is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    good: Option<Good>,
    /// Why the content of `generation` is not in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<Refused>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Refused {
    reason: FailReason,
    message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    consumers: Option<LabelSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<Origin>,
}

/// What is known of an object.
#[derive(Debug)]
struct Known {
    uid: Uid,
    generation: u64,
    /// Labels and origin: they change without the generation.
    rest: Rest,
    /// The API server has shown it in this life.
    live: bool,
    /// Something of it is in force.
    in_force: bool,
    /// [`Line`], as JSON.
    line: Box<str>,
    /// What is wrong with it.
    problem: Option<Box<str>>,
}

/// What counts of an object's metadata beside its generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rest {
    /// Of an attachment.
    labels: BTreeMap<String, String>,
    /// Of a policy.
    origin: Option<Origin>,
    origin_problem: Option<Problem>,
}

impl Rest {
    fn of(seen: &Seen) -> Self {
        match seen.key.kind {
            Kind::Attachment => Self {
                labels: seen.labels.clone(),
                ..Self::default()
            },
            Kind::RoutePolicy => Self {
                origin: seen.origin().cloned(),
                origin_problem: seen.origin.clone().err(),
                ..Self::default()
            },
        }
    }
}

/// Everything that is in force.
#[derive(Debug)]
pub(super) struct Set {
    node: String,
    objects: BTreeMap<Key, Known>,
    /// Objects of a list that is not complete yet.
    listing: BTreeMap<Scope, Listing>,
    deleted: VecDeque<Uid>,
    /// Counts changes of what would be saved.
    revision: u64,
    /// How long after the time of their origin policies were seen for the first time, nanoseconds.
    arrived: Vec<u64>,
}

#[derive(Debug, Default)]
struct Listing {
    shown: BTreeSet<Key>,
    /// It has objects of which nobody knows which they are: so nobody knows what it lacks.
    unknown: Vec<String>,
}

impl Set {
    pub(super) fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            objects: BTreeMap::new(),
            listing: BTreeMap::new(),
            deleted: VecDeque::new(),
            revision: 0,
            arrived: Vec::new(),
        }
    }

    /// Changes whenever what would be saved does.
    pub(super) const fn revision(&self) -> u64 {
        self.revision
    }

    /// Namespaces that have an attachment here.
    pub(super) fn namespaces(&self) -> BTreeSet<String> {
        self.objects
            .keys()
            .filter(|key| key.kind == Kind::Attachment)
            .map(|key| key.name.namespace.clone())
            .collect()
    }

    /// See the field.
    pub(super) fn arrived(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.arrived)
    }

    // --- what was saved ------------------------------------------------------------------------------------

    /// Puts what an earlier life saved in force: first what was good, then what was refused of it.
    pub(super) fn load(&mut self, lines: Vec<Line>) -> Vec<ObjectChange> {
        let mut changes = Vec::new();
        for line in lines {
            let Ok(text) = serde_json::to_string(&line) else {
                continue;
            };
            let good = line
                .good
                .as_ref()
                .and_then(|good| line.put_in_force(good, &self.node));
            let refusal = line.refusal();
            let known = Known {
                uid: line.uid.clone(),
                generation: line.generation,
                rest: Rest::default(),
                live: false,
                in_force: good.is_some() || refusal.is_some(),
                line: text.into(),
                problem: line
                    .refused
                    .as_ref()
                    .map(|refused| refused.message.as_str().into()),
            };
            changes.extend(good);
            changes.extend(refusal);
            self.objects.insert(line.key, known);
        }
        changes
    }

    /// What would be saved, an object a line.
    pub(super) fn lines(&self) -> impl Iterator<Item = &str> {
        self.objects.values().map(|known| &*known.line)
    }

    // --- what is shown -------------------------------------------------------------------------------------

    /// An object is there, new or changed. `fresh`: it came after the set was complete, at this wall-clock time.
    pub(super) fn show(&mut self, seen: &Seen, fresh: Option<i64>, changes: &mut Vec<ObjectChange>) {
        if self.deleted.contains(&seen.uid) {
            return;
        }
        let rest = Rest::of(seen);
        let known = self.objects.get(&seen.key);
        if let Some(known) = known.filter(|known| known.uid == seen.uid)
            && (seen.generation < known.generation
                || (known.live && seen.generation == known.generation && rest == known.rest))
        {
            return;
        }
        let before: Option<Line> = known.and_then(|known| serde_json::from_str(&known.line).ok());
        let is_new = known.is_none_or(|known| {
            known.uid != seen.uid || known.generation != seen.generation || known.rest.origin != rest.origin
        });
        let (line, change) = match seen.content(&self.node) {
            Content::Elsewhere => return self.remove(&seen.key, changes),
            Content::Good(good) => {
                let change = good.change(&seen.meta(), &self.node, Provenance::ApiServer);
                (Line::new(seen, Some(*good), None), change)
            }
            Content::Bad(problems, consumers) => {
                let good = before
                    .as_ref()
                    .filter(|line| line.uid == seen.uid)
                    .and_then(|line| line.good.clone());
                let refused = Refused {
                    reason: problems.reason(),
                    message: problems.to_string(),
                    consumers: consumers.map(|selector| *selector),
                    origin: seen.origin().cloned(),
                };
                let line = Line::new(seen, good, Some(refused));
                let change = line.refusal();
                (line, change)
            }
        };
        let in_force = line.in_force();
        if before.as_ref() != Some(&line) {
            self.revision += 1;
            match change {
                Some(change) => changes.push(change),
                // An attachment that cannot be used: another one of that name is not there any more.
                None if known.is_some_and(|known| known.in_force) && !in_force => {
                    changes.push(seen.key.gone());
                }
                None => {}
            }
            if let (Some(now_ms), Some(then_ms), true) = (fresh, seen.origin_time_ms, is_new) {
                self.arrived.extend(nanos_between(then_ms, now_ms));
            }
        }
        let problem = line.refused.as_ref().map(|refused| refused.message.clone());
        let problem = problem.or_else(|| rest.origin_problem.as_ref().map(ToString::to_string));
        let known = Known {
            uid: seen.uid.clone(),
            generation: seen.generation,
            rest,
            live: true,
            in_force,
            // What cannot be written as JSON is not saved: no object is like that.
            line: serde_json::to_string(&line).unwrap_or_default().into(),
            problem: problem.map(Into::into),
        };
        self.objects.insert(seen.key.clone(), known);
    }

    /// An object was deleted.
    pub(super) fn delete(&mut self, seen: &Seen, changes: &mut Vec<ObjectChange>) {
        if self.deleted.len() == MAX_DELETED {
            self.deleted.pop_front();
        }
        self.deleted.push_back(seen.uid.clone());
        if self
            .objects
            .get(&seen.key)
            .is_some_and(|known| known.uid == seen.uid)
        {
            self.remove(&seen.key, changes);
        }
    }

    fn remove(&mut self, key: &Key, changes: &mut Vec<ObjectChange>) {
        if self.objects.remove(key).is_some() {
            self.revision += 1;
            changes.push(key.gone());
        }
    }

    // --- lists ---------------------------------------------------------------------------------------------

    /// A list begins, or begins anew.
    pub(super) fn begin(&mut self, scope: &Scope) {
        self.listing.insert(scope.clone(), Listing::default());
    }

    /// A part of a list; `unknown` says what is wrong with objects of which nobody knows which they are.
    pub(super) fn part(&mut self, scope: &Scope, seen: &[Seen], unknown: Vec<String>) {
        if let Some(listing) = self.listing.get_mut(scope) {
            listing.shown.extend(seen.iter().map(|seen| seen.key.clone()));
            listing.unknown.extend(unknown);
        }
    }

    /// A list is complete: what it lacks is gone. Gives what is wrong with it.
    pub(super) fn complete(&mut self, scope: &Scope, changes: &mut Vec<ObjectChange>) -> Vec<String> {
        let Some(listing) = self.listing.remove(scope) else {
            return Vec::new();
        };
        if listing.unknown.is_empty() {
            self.retain(scope, changes, |key| listing.shown.contains(key));
        }
        listing.unknown
    }

    /// Policies of other namespaces than these are not followed any more.
    pub(super) fn keep_namespaces(&mut self, namespaces: &BTreeSet<String>, changes: &mut Vec<ObjectChange>) {
        self.retain(&Scope::Everything, changes, |key| {
            namespaces.contains(&key.name.namespace)
        });
    }

    fn retain(&mut self, scope: &Scope, changes: &mut Vec<ObjectChange>, keep: impl Fn(&Key) -> bool) {
        let gone: Vec<Key> = self
            .objects
            .keys()
            .filter(|key| scope.has(key) && !keep(key))
            .cloned()
            .collect();
        for key in &gone {
            self.remove(key, changes);
        }
    }

    // --- how it is -----------------------------------------------------------------------------------------

    /// How many objects are in force, and what is wrong, `first` first.
    pub(super) fn status(&self, first: Vec<SourceProblem>) -> SourceStatus {
        let mut status = SourceStatus::default();
        let mut problems = first;
        for (key, known) in &self.objects {
            *status.objects.entry(key.kind.as_str().to_owned()).or_default() += 1;
            if let Some(problem) = &known.problem {
                problems.push(plain_problem(&key.to_string(), problem.to_string()));
            }
        }
        status.problems = bounded(problems);
        status
    }
}

impl Line {
    fn new(seen: &Seen, good: Option<Good>, refused: Option<Refused>) -> Self {
        Self {
            key: seen.key.clone(),
            uid: seen.uid.clone(),
            generation: seen.generation,
            created_ms: seen.created_ms,
            good,
            refused,
        }
    }

    /// Something of it is in force, be it that it was refused.
    const fn in_force(&self) -> bool {
        self.good.is_some() || matches!(self.key.kind, Kind::RoutePolicy)
    }

    fn meta(&self, generation: u64, origin: Option<Origin>) -> Meta {
        Meta {
            name: self.key.name.clone(),
            uid: self.uid.clone(),
            generation,
            created_ms: self.created_ms,
            labels: BTreeMap::new(),
            origin,
        }
    }

    /// What was good, for the engine.
    fn put_in_force(&self, good: &Good, node: &str) -> Option<ObjectChange> {
        let meta = Meta {
            labels: good.labels.clone(),
            ..self.meta(good.generation, good.origin.clone())
        };
        good.change(&meta, node, Provenance::ApiServer)
    }

    /// What was refused, for the engine: it knows refused policies only.
    fn refusal(&self) -> Option<ObjectChange> {
        let refused = self.refused.as_ref()?;
        if self.key.kind != Kind::RoutePolicy {
            return None;
        }
        let problems = Problems(vec![Problem {
            path: String::new(),
            message: refused.message.clone(),
            unsupported: refused.reason == FailReason::Unsupported,
        }]);
        let refusal = Refusal {
            message: refused.message.clone(),
            ..validate::refusal(&problems, refused.consumers.as_ref())
        };
        let meta = self.meta(self.generation, refused.origin.clone());
        Some(ObjectChange::Policy(validate::policy(&meta, Err(refusal))))
    }
}
