//! Which report says what of which policy, and what is to be written next. Pure: no clock, no connection.
//!
//! A report that has become too large gives the policies of one hexadecimal digit to a report of their own, which is written
//! before they are taken out of the larger one: the deepest report that exists is a policy's only authority, so at no moment
//! is there none. Reports are never put together again while the agent lives.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::Uid;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::node_report::{Epoch, Shard};

/// Above so many bytes a report gives policies away.
pub(super) const LIMIT: usize = 16 << 10;

/// What is said of one policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    /// It is programmed: an [`crate::api::node_report::Ack`].
    Programmed(String),
    /// It is not: a [`crate::report::PolicyReport`].
    Other(Value),
}

/// What a report contains.
#[derive(Clone, Debug, Default, PartialEq)]
struct Content {
    programmed: BTreeMap<Uid, String>,
    others: Vec<Value>,
    /// About so many bytes.
    size: usize,
}

impl Content {
    fn add(&mut self, uid: &Uid, said: &Said) {
        match said {
            Said::Programmed(ack) => {
                self.size += uid.0.len() + ack.len() + 6;
                self.programmed.insert(uid.clone(), ack.clone());
            }
            Said::Other(report) => {
                self.size += report.to_string().len() + 1;
                self.others.push(report.clone());
            }
        }
    }
}

/// What the API server has of a report.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stored {
    version: String,
    epoch: Value,
    programmed: BTreeMap<Uid, String>,
    others: Value,
}

#[derive(Deserialize)]
struct Object {
    metadata: ObjectMetadata,
    #[serde(default)]
    epoch: Value,
    #[serde(default)]
    programmed: BTreeMap<Uid, String>,
    #[serde(default)]
    others: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ObjectMetadata {
    resource_version: String,
}

impl Stored {
    /// A report as the API server shows it.
    pub(super) fn read(object: &[u8]) -> Result<Self, serde_json::Error> {
        let object: Object = serde_json::from_slice(object)?;
        Ok(Self {
            version: object.metadata.resource_version,
            epoch: object.epoch,
            programmed: object.programmed,
            others: if object.others.is_null() {
                json!([])
            } else {
                object.others
            },
        })
    }
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Read all reports of this node.
    List,
    /// Read this report, if it is there.
    Read(Shard),
    /// Make this report.
    Create(Shard, Value),
    /// Change this one by a merge patch that carries the version it was decided on.
    Patch(Shard, Value),
}

/// How a step went.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The report is so now.
    Now(Option<Stored>),
    /// It was read or written: only its version is another.
    Written(String),
    /// Somebody else wrote it, or it is not known whether this write did: it is read before the next.
    Unsure,
}

/// All reports of this node.
#[derive(Debug)]
pub(super) struct Shards {
    node: String,
    epoch: Epoch,
    /// All reports that exist have been read.
    listed: bool,
    stored: BTreeMap<Shard, Stored>,
    to_read: BTreeSet<Shard>,
    /// Reports of earlier lives that this one has not yet found right or put right.
    unconfirmed: BTreeSet<Shard>,
    /// Since which turn a report has not been as it should.
    waiting: BTreeMap<Shard, u64>,
    turn: u64,
    /// What is stored once the step that was given last is carried out.
    sent: Option<(Shard, Stored)>,
}

impl Shards {
    /// Nothing is known of the reports yet: all that exist are read first.
    pub(super) fn new(node: &str, epoch: Epoch) -> Self {
        Self {
            node: node.to_owned(),
            epoch,
            listed: false,
            stored: BTreeMap::new(),
            to_read: BTreeSet::new(),
            unconfirmed: BTreeSet::from([Shard::default()]),
            waiting: BTreeMap::new(),
            turn: 0,
            sent: None,
        }
    }

    /// Whether this life has found right, or put right, whatever an earlier one reported.
    pub(super) fn is_reported(&self) -> bool {
        self.listed && self.to_read.is_empty() && self.unconfirmed.is_empty()
    }

    /// Policies that some report speaks of.
    pub(super) fn speaks_of(&self, uid: &Uid) -> bool {
        self.stored.values().any(|stored| {
            stored.programmed.contains_key(uid)
                || stored
                    .others
                    .as_array()
                    .is_some_and(|others| others.iter().any(|other| other["uid"] == uid.0.as_str()))
        })
    }

    /// What to do next, if this is what is to be said; none if it is said.
    pub(super) fn next(&mut self, wanted: &BTreeMap<Uid, Said>) -> Option<Step> {
        if !self.listed {
            return Some(Step::List);
        }
        if let Some(shard) = self.to_read.first() {
            return Some(Step::Read(shard.clone()));
        }
        let root = Shard::default();
        if !self.stored.contains_key(&root) {
            let mut content = self.contents(wanted).remove(&root).unwrap_or_default();
            if content.size > LIMIT {
                // What does not fit goes to the others at once.
                content = Content::default();
            }
            return Some(self.create(root, content));
        }
        let mut contents = self.contents(wanted);
        self.turn += 1;
        let mut best: Option<(bool, u64, Shard)> = None;
        for shard in self.stored.keys() {
            let content = contents.get(shard);
            let large = content.is_some_and(|content| content.size > LIMIT && shard.has_children());
            let differs = large || self.differs(shard, content);
            if !differs {
                self.waiting.remove(shard);
                self.unconfirmed.remove(shard);
                continue;
            }
            let since = *self.waiting.entry(shard.clone()).or_insert(self.turn);
            // What was acknowledged and is not so any more goes first.
            let waits = !self.withdraws(shard, wanted);
            let rank = (waits, since, shard.clone());
            if best.as_ref().is_none_or(|best| rank < *best) {
                best = Some(rank);
            }
        }
        let (waits, _, shard) = best?;
        let content = contents.remove(&shard).unwrap_or_default();
        if waits
            && content.size > LIMIT
            && let Some(child) = self.largest_child(&shard, wanted)
        {
            let mut moved = Content::default();
            for (uid, said) in wanted.iter().filter(|(uid, _)| child.may_hold(uid)) {
                moved.add(uid, said);
            }
            return Some(self.create(child, moved));
        }
        Some(self.patch(shard, content))
    }

    /// What each report should contain, as they are cut now.
    fn contents(&self, wanted: &BTreeMap<Uid, Said>) -> BTreeMap<Shard, Content> {
        let mut contents: BTreeMap<Shard, Content> = BTreeMap::new();
        for (uid, said) in wanted {
            contents.entry(self.authority(uid)).or_default().add(uid, said);
        }
        contents
    }

    fn authority(&self, uid: &Uid) -> Shard {
        Shard::for_uid(uid)
            .find(|shard| self.stored.contains_key(shard))
            .unwrap_or_default()
    }

    /// The child that does not exist yet and would take most.
    fn largest_child(&self, shard: &Shard, wanted: &BTreeMap<Uid, Said>) -> Option<Shard> {
        let mut sizes: BTreeMap<Shard, usize> = BTreeMap::new();
        for child in shard.children().filter(|child| !self.stored.contains_key(child)) {
            let count = wanted.keys().filter(|uid| child.may_hold(uid)).count();
            if count > 0 {
                sizes.insert(child, count);
            }
        }
        sizes
            .into_iter()
            .max_by_key(|(_, count)| *count)
            .map(|(child, _)| child)
    }

    fn differs(&self, shard: &Shard, content: Option<&Content>) -> bool {
        let Some(stored) = self.stored.get(shard) else {
            return true;
        };
        let same = match content {
            Some(content) => {
                stored.programmed == content.programmed
                    && stored
                        .others
                        .as_array()
                        .is_some_and(|others| *others == content.others)
            }
            None => stored.programmed.is_empty() && stored.others.as_array().is_some_and(Vec::is_empty),
        };
        !same || self.epoch_differs(shard, stored)
    }

    /// A restart changes what only people read: of that the first report speaks.
    fn epoch_differs(&self, shard: &Shard, stored: &Stored) -> bool {
        if *shard == Shard::default() {
            stored.epoch != self.epoch_value()
        } else {
            stored.epoch["id"] != self.epoch.id.as_str()
        }
    }

    fn epoch_value(&self) -> Value {
        // A struct of texts and numbers is always JSON.
        serde_json::to_value(&self.epoch).unwrap_or_default()
    }

    /// Whether the report acknowledges something that is not so any more.
    fn withdraws(&self, shard: &Shard, wanted: &BTreeMap<Uid, Said>) -> bool {
        self.stored.get(shard).is_some_and(|stored| {
            stored
                .programmed
                .keys()
                .any(|uid| !matches!(wanted.get(uid), Some(Said::Programmed(_))))
        })
    }

    fn create(&mut self, shard: Shard, content: Content) -> Step {
        let others = Value::Array(content.others);
        let report = json!({
            "node": self.node,
            "epoch": self.epoch_value(),
            "programmed": content.programmed,
            "others": others,
        });
        self.sent = Some((
            shard.clone(),
            Stored {
                version: String::new(),
                epoch: self.epoch_value(),
                programmed: content.programmed,
                others,
            },
        ));
        Step::Create(shard, report)
    }

    fn patch(&mut self, shard: Shard, content: Content) -> Step {
        let stored = self.stored.get(&shard).cloned().unwrap_or(Stored {
            version: String::new(),
            epoch: Value::Null,
            programmed: BTreeMap::new(),
            others: Value::Null,
        });
        let mut patch = Map::new();
        patch.insert("metadata".to_owned(), json!({"resourceVersion": stored.version}));
        let epoch = self.epoch_value();
        if stored.epoch != epoch {
            patch.insert("epoch".to_owned(), epoch.clone());
        }
        let mut programmed = Map::new();
        for uid in stored
            .programmed
            .keys()
            .filter(|uid| !content.programmed.contains_key(uid))
        {
            programmed.insert(uid.0.clone(), Value::Null);
        }
        for (uid, ack) in &content.programmed {
            if stored.programmed.get(uid) != Some(ack) {
                programmed.insert(uid.0.clone(), ack.as_str().into());
            }
        }
        if !programmed.is_empty() {
            patch.insert("programmed".to_owned(), programmed.into());
        }
        let others = Value::Array(content.others);
        if stored.others != others {
            patch.insert("others".to_owned(), others.clone());
        }
        self.sent = Some((
            shard.clone(),
            Stored {
                version: String::new(),
                epoch,
                programmed: content.programmed,
                others,
            },
        ));
        Step::Patch(shard, patch.into())
    }

    /// These are all reports of this node.
    pub(super) fn listed(&mut self, reports: BTreeMap<Shard, Stored>) {
        self.listed = true;
        self.unconfirmed.extend(reports.keys().cloned());
        self.stored = reports;
    }

    /// How the step went that was given last.
    pub(super) fn done(&mut self, shard: &Shard, outcome: Outcome) {
        let sent = self.sent.take().filter(|(sent, _)| sent == shard);
        match outcome {
            Outcome::Now(Some(stored)) => {
                self.to_read.remove(shard);
                self.stored.insert(shard.clone(), stored);
            }
            Outcome::Now(None) => {
                self.to_read.remove(shard);
                self.stored.remove(shard);
                if *shard != Shard::default() {
                    self.unconfirmed.remove(shard);
                }
                self.waiting.remove(shard);
            }
            Outcome::Written(version) => {
                if let Some((_, stored)) = sent {
                    self.stored.insert(shard.clone(), Stored { version, ..stored });
                }
                self.unconfirmed.remove(shard);
                self.waiting.remove(shard);
            }
            Outcome::Unsure => {
                self.to_read.insert(shard.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an API server would have.
    #[derive(Default)]
    struct Server {
        version: u64,
        reports: BTreeMap<String, Value>,
        writes: usize,
    }

    impl Server {
        /// Carries a step out; the shards hear of it.
        fn carry_out(&mut self, shards: &mut Shards, step: Step) {
            match step {
                Step::List => {
                    let stored = |(name, report): (&String, &Value)| {
                        let stored = Stored::read(report.to_string().as_bytes()).unwrap();
                        (Shard::of(name, "n").unwrap(), stored)
                    };
                    shards.listed(self.reports.iter().map(stored).collect());
                }
                Step::Read(shard) => {
                    let found = self
                        .reports
                        .get(&shard.name("n"))
                        .map(|report| Stored::read(report.to_string().as_bytes()).unwrap());
                    shards.done(&shard, Outcome::Now(found));
                }
                Step::Create(shard, mut report) => {
                    self.version += 1;
                    self.writes += 1;
                    report["metadata"] = json!({"resourceVersion": self.version.to_string()});
                    let before = self.reports.insert(shard.name("n"), report);
                    assert!(before.is_none(), "made twice");
                    shards.done(&shard, Outcome::Written(self.version.to_string()));
                }
                Step::Patch(shard, patch) => {
                    self.version += 1;
                    self.writes += 1;
                    let report = self
                        .reports
                        .get_mut(&shard.name("n"))
                        .expect("patched before made");
                    assert_eq!(
                        patch["metadata"], report["metadata"],
                        "decided on another version"
                    );
                    for key in ["epoch", "others"] {
                        if let Some(value) = patch.get(key) {
                            report[key] = value.clone();
                        }
                    }
                    for (uid, ack) in patch
                        .get("programmed")
                        .and_then(Value::as_object)
                        .into_iter()
                        .flatten()
                    {
                        let map = report["programmed"].as_object_mut().unwrap();
                        if ack.is_null() {
                            assert!(map.remove(uid).is_some(), "{uid} was not there");
                        } else {
                            map.insert(uid.clone(), ack.clone());
                        }
                    }
                    report["metadata"]["resourceVersion"] = self.version.to_string().into();
                    shards.done(&shard, Outcome::Written(self.version.to_string()));
                }
            }
        }

        /// What the deepest report that exists says of a policy.
        fn says(&self, uid: &Uid) -> Option<String> {
            let shard = Shard::for_uid(uid).find(|shard| self.reports.contains_key(&shard.name("n")))?;
            let report = &self.reports[&shard.name("n")];
            if let Some(ack) = report["programmed"].get(&uid.0) {
                return Some(ack.as_str().unwrap().to_owned());
            }
            let others = report["others"].as_array().unwrap();
            let other = others.iter().find(|other| other["uid"] == uid.0.as_str())?;
            Some(other["state"].as_str().unwrap().to_owned())
        }
    }

    fn epoch(id: &str, start: &str) -> Epoch {
        Epoch {
            id: id.to_owned(),
            agent_start: start.to_owned(),
            ..Epoch::default()
        }
    }

    fn uid(number: usize) -> Uid {
        Uid(format!(
            "{:08x}-0000-4000-8000-000000000000",
            (number as u32).wrapping_mul(0x9e37_79b1)
        ))
    }

    fn acks(count: usize, generation: u64) -> BTreeMap<Uid, Said> {
        (0..count)
            .map(|number| {
                (
                    uid(number),
                    Said::Programmed(format!("{generation} 00000000000000ff")),
                )
            })
            .collect()
    }

    fn held(uid: &Uid) -> Said {
        Said::Other(json!({"uid": uid.0, "state": "Held", "message": "x".repeat(200)}))
    }

    /// Writes until all is said; after each write no policy has less said of it than before, and none something wrong.
    fn settle(server: &mut Server, shards: &mut Shards, wanted: &BTreeMap<Uid, Said>) {
        let mut said: BTreeMap<Uid, Option<String>> =
            wanted.keys().map(|uid| (uid.clone(), server.says(uid))).collect();
        while let Some(step) = shards.next(wanted) {
            server.carry_out(shards, step);
            for (uid, before) in &mut said {
                let now = server.says(uid);
                assert!(
                    now.is_some() || before.is_none(),
                    "{uid:?} was said, and is not while reports are cut"
                );
                *before = now;
            }
            assert!(server.writes < 2_000, "no end");
        }
        for (uid, said) in wanted {
            match said {
                Said::Programmed(ack) => assert_eq!(server.says(uid).as_ref(), Some(ack)),
                Said::Other(other) => assert_eq!(server.says(uid).as_deref(), other["state"].as_str()),
            }
        }
        assert!(shards.is_reported());
    }

    #[test]
    fn a_few_policies_are_one_report_and_a_change_is_one_small_patch() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        let mut wanted = acks(10, 1);
        settle(&mut server, &mut shards, &wanted);
        assert_eq!((server.writes, server.reports.len()), (1, 1));
        assert_eq!(shards.next(&wanted), None);

        wanted.insert(uid(3), Said::Programmed("2 00000000000000ff".to_owned()));
        wanted.remove(&uid(4));
        wanted.insert(uid(5), held(&uid(5)));
        let Some(Step::Patch(shard, patch)) = shards.next(&wanted) else {
            panic!("no patch")
        };
        assert_eq!(shard, Shard::default());
        let keys: Vec<_> = patch.as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["metadata", "others", "programmed"]);
        assert_eq!(patch["programmed"].as_object().unwrap().len(), 3);
        server.carry_out(&mut shards, Step::Patch(shard, patch));
        assert_eq!(server.says(&uid(4)), None);
        assert_eq!(shards.next(&wanted), None);
    }

    #[test]
    fn what_grows_is_cut_and_at_no_moment_is_anything_unsaid() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        for count in [100, 300, 1_000, 6_000] {
            settle(&mut server, &mut shards, &acks(count, 1));
            for (name, report) in &server.reports {
                let length = report["programmed"].to_string().len() + report["others"].to_string().len();
                let leaf = name.trim_start_matches("n.r").len() == 2;
                assert!(leaf || length <= LIMIT + 256, "{name}: {length}");
            }
        }
        let (reports, writes) = (server.reports.len(), server.writes);
        // All at another generation: each report once.
        settle(&mut server, &mut shards, &acks(6_000, 2));
        assert!(
            server.writes - writes <= reports,
            "{} for {reports}",
            server.writes - writes
        );
        // What shrinks is not put together again.
        settle(&mut server, &mut shards, &acks(3, 2));
        assert_eq!(server.reports.len(), reports);
        let writes = server.writes;
        settle(&mut server, &mut shards, &acks(4, 2));
        assert_eq!(server.writes, writes + 1);
    }

    #[test]
    fn many_that_are_held_are_cut_too() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        let wanted: BTreeMap<Uid, Said> = (0..400).map(|number| (uid(number), held(&uid(number)))).collect();
        settle(&mut server, &mut shards, &wanted);
        assert!(server.reports.len() > 5, "{}", server.reports.len());
    }

    #[test]
    fn another_life_reads_first_and_writes_what_differs() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        let wanted = acks(1_000, 1);
        settle(&mut server, &mut shards, &wanted);
        let before = server.writes;
        // A restart: only the first report has another start in it.
        let mut shards = Shards::new("n", epoch("e", "2"));
        assert!(!shards.is_reported());
        settle(&mut server, &mut shards, &wanted);
        assert_eq!(server.writes - before, 1);
        // A reboot: every report is of another epoch, and only then all is reported.
        let before = server.writes;
        let mut shards = Shards::new("n", epoch("f", "3"));
        let mut steps = 0;
        while let Some(step) = shards.next(&wanted) {
            assert!(!shards.is_reported(), "reported after {steps} steps");
            server.carry_out(&mut shards, step);
            steps += 1;
        }
        assert!(shards.is_reported());
        assert_eq!(server.writes - before, server.reports.len());
    }

    #[test]
    fn what_is_withdrawn_goes_before_what_is_new() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        let mut wanted = acks(1_000, 1);
        settle(&mut server, &mut shards, &wanted);
        wanted = acks(1_000, 2);
        let last = wanted.keys().next_back().cloned().unwrap();
        wanted.insert(last.clone(), held(&last));
        let step = shards.next(&wanted).unwrap();
        server.carry_out(&mut shards, step);
        assert_eq!(server.says(&last).as_deref(), Some("Held"));
    }

    #[test]
    fn a_conflict_and_a_report_that_somebody_deleted_are_read_and_put_right() {
        let (mut server, mut shards) = (Server::default(), Shards::new("n", epoch("e", "1")));
        let wanted = acks(1_000, 1);
        settle(&mut server, &mut shards, &wanted);
        let child = server.reports.keys().next_back().cloned().unwrap();
        server.reports.remove(&child);
        let wanted = acks(1_000, 2);
        while let Some(step) = shards.next(&wanted) {
            match step {
                Step::Patch(shard, _) if !server.reports.contains_key(&shard.name("n")) => {
                    shards.done(&shard, Outcome::Now(None));
                }
                step => server.carry_out(&mut shards, step),
            }
        }
        settle(&mut server, &mut shards, &wanted);

        let wanted = acks(1_000, 3);
        let Some(Step::Patch(shard, _)) = shards.next(&wanted) else {
            panic!("no patch")
        };
        shards.done(&shard, Outcome::Unsure);
        assert_eq!(shards.next(&wanted), Some(Step::Read(shard)));
        settle(&mut server, &mut shards, &wanted);
    }
}
