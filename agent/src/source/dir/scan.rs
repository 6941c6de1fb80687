//! From files to changes: what the files say now, less what was in force before.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use holdfast_engine::model::{ObjectChange, Uid};

use super::ledger::{Claim, Ledger, Version};
use super::meta;
use super::object::{self, Content, Document, Object};
use crate::api::hash::sha256;
use crate::api::validate::{self, Provenance};
use crate::source::document::{self, Place};
use crate::source::good::{Good, GoodSpec, Key, bounded, nanos_between, plain_problem};
use crate::source::{SourceProblem, SourceStatus};

/// Largest file that is read.
pub(super) const MAX_FILE: u64 = 16 << 20;

/// Which files may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Dirty {
    /// Any.
    All,
    /// Any, for all that is known: what is being written just now is left to its own event.
    Audit,
    /// These; may be empty.
    Files(BTreeSet<String>),
}

impl Dirty {
    /// Adds a file.
    pub(super) fn add(&mut self, name: &str) {
        if let Self::Files(names) = self
            && !names.contains(name)
        {
            names.insert(name.to_owned());
        }
    }
}

/// Whether a file of this name is one of ours.
pub(super) fn is_ours(name: &str) -> bool {
    !name.starts_with('.')
        && Path::new(name)
            .extension()
            .is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

/// What a file said when it was read last.
#[derive(Debug, Default)]
struct FileState {
    /// SHA-256 of its content; none if it could not be read.
    hash: Option<[u8; 32]>,
    /// Why nothing of it could be used; `objects` is what it said before.
    problem: Option<SourceProblem>,
    /// Documents that could not be told whose they are, and repetitions.
    loose: Vec<SourceProblem>,
    objects: BTreeMap<Key, Said>,
}

/// What a file said of one object.
#[derive(Clone, Debug, Default)]
struct Said {
    place: Place,
    problems: Vec<SourceProblem>,
    /// Why the version that it claims is refused.
    refused: Option<SourceProblem>,
    /// It does not say it now, but something in it is broken that may have been this object.
    kept: bool,
}

/// What the engine was told of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    uid: Uid,
    generation: u64,
    good: bool,
    rest: String,
}

/// What is to be told of an object, once its version is safe on the disk.
enum Verdict {
    /// Nobody says it any more, or it is not of this node.
    Gone,
    /// What was in force stays.
    Keep,
    /// It is good; with the time of its origin.
    Good(Claim, Box<Good>, Option<i64>),
    /// It is a policy that is refused.
    Refused(Claim, holdfast_engine::model::Refusal),
}

/// What is known of the directory.
pub(super) struct Scanner {
    directory: PathBuf,
    node: String,
    ledger: Ledger,
    complaints: Vec<SourceProblem>,
    files: BTreeMap<String, FileState>,
    /// Which files say an object; the first by name counts.
    claims: BTreeMap<Key, BTreeSet<String>>,
    told: BTreeMap<Key, Told>,
    /// Objects whose version could not be made safe.
    blocked: BTreeSet<Key>,
    /// Objects whose version was refused.
    refused: BTreeSet<Key>,
    /// What each file said in an earlier life; empty after the first scan.
    left: BTreeMap<String, Vec<Key>>,
    started: bool,
    /// How long after the time of their origin policies were seen for the first time, nanoseconds.
    arrived: Vec<u64>,
}

impl Scanner {
    pub(super) fn new(directory: &Path, node: &str, state_dir: &Path) -> Self {
        let (ledger, complaints) = Ledger::open(state_dir);
        let file = ledger.path().display().to_string();
        let left = ledger.by_file();
        Self {
            directory: directory.to_owned(),
            node: node.to_owned(),
            ledger,
            complaints: complaints
                .into_iter()
                .map(|reason| plain_problem(&file, reason))
                .collect(),
            files: BTreeMap::new(),
            claims: BTreeMap::new(),
            told: BTreeMap::new(),
            blocked: BTreeSet::new(),
            refused: BTreeSet::new(),
            left,
            started: false,
            arrived: Vec::new(),
        }
    }

    /// How long after the time of their origin policies were seen for the first time since the last call, nanoseconds.
    pub(super) fn arrived(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.arrived)
    }

    /// Whether something waits for the state directory.
    pub(super) fn is_unsaved(&self) -> bool {
        self.ledger.error().is_some()
    }

    /// Reads what may have changed; the difference to what was in force. Only files whose content changed are parsed.
    ///
    /// # Errors
    /// When the directory cannot be listed: that is no news about any object.
    pub(super) fn scan(&mut self, dirty: &Dirty, now_ms: i64) -> io::Result<Vec<ObjectChange>> {
        let names: BTreeSet<String> = match dirty {
            Dirty::Files(names) => names.clone(),
            Dirty::All | Dirty::Audit => {
                let mut names = list(&self.directory)?;
                names.extend(self.files.keys().cloned());
                names
            }
        };
        let mut parsed = BTreeMap::new();
        let mut affected = std::mem::take(&mut self.blocked);
        for name in &names {
            if *dirty == Dirty::Audit && is_fresh(&self.directory.join(name)) {
                continue;
            }
            self.read_file(name, &mut parsed, &mut affected);
        }
        if !affected.is_empty() {
            // What stood in their way may have gone.
            affected.append(&mut self.refused);
        }
        if !self.started && *dirty == Dirty::All {
            self.started = true;
            self.left.clear();
            let left: Vec<Key> = self
                .ledger
                .keys()
                .filter(|key| !self.claims.contains_key(key))
                .cloned()
                .collect();
            affected.extend(left);
        }
        let mut verdicts = BTreeMap::new();
        while let Some(key) = affected.pop_first() {
            let verdict = self.judge(&key, now_ms, &mut parsed, &mut affected);
            verdicts.insert(key, verdict);
        }
        self.ledger.save();
        let mut changes = Vec::new();
        for (key, verdict) in verdicts {
            self.tell(&key, verdict, now_ms, &mut changes);
        }
        Ok(changes)
    }

    // --- files ---------------------------------------------------------------------------------------------

    fn read_file(
        &mut self,
        name: &str,
        parsed: &mut BTreeMap<String, BTreeMap<Key, Object>>,
        affected: &mut BTreeSet<Key>,
    ) {
        let text = match read_text(&self.directory.join(name)) {
            Ok(None) => {
                if let Some(state) = self.files.remove(name) {
                    for key in state.objects.into_keys() {
                        self.unclaim(&key, name);
                        affected.insert(key);
                    }
                }
                return;
            }
            Ok(Some(text)) => text,
            Err(reason) => {
                self.file_problem(name, None, plain_problem(name, reason), affected);
                return;
            }
        };
        let hash = sha256(text.as_bytes());
        if self.files.get(name).is_some_and(|state| state.hash == Some(hash)) {
            return;
        }
        let documents = match document::parse(&text) {
            Ok(documents) if documents.is_empty() => {
                let reason = "no document: to delete its objects, delete the file".to_owned();
                self.file_problem(name, Some(hash), plain_problem(name, reason), affected);
                return;
            }
            Ok(documents) => documents,
            Err(error) => {
                let problem = problem(name, &text, error.place, error.message);
                self.file_problem(name, Some(hash), problem, affected);
                return;
            }
        };
        let mut state = FileState {
            hash: Some(hash),
            ..FileState::default()
        };
        let mut objects = BTreeMap::new();
        let mut something_unknown = false;
        for node in &documents {
            let (key, place, object) = match object::read(node, &self.node) {
                Document::Unknown(wrong) => {
                    something_unknown = true;
                    state.loose.push(problem(name, &text, wrong.place, wrong.reason));
                    continue;
                }
                Document::Elsewhere(key, place) => (key, place, None),
                Document::Object(object) => (object.key.clone(), object.place, Some(object)),
            };
            if let Some(first) = state.objects.get(&key) {
                let reason = format!("{key}: again; what line {} says counts", first.place.line);
                state.loose.push(problem(name, &text, place, reason));
                continue;
            }
            let wrong = object.iter().flat_map(|object| &object.wrong);
            let said = Said {
                place,
                problems: wrong
                    .map(|wrong| problem(name, &text, wrong.place, wrong.reason.clone()))
                    .collect(),
                ..Said::default()
            };
            state.objects.insert(key.clone(), said);
            if let Some(object) = object {
                objects.insert(key, *object);
            }
        }
        let before = self.objects_of(name);
        for key in before {
            if !state.objects.contains_key(&key) {
                if something_unknown {
                    let kept = Said {
                        kept: true,
                        ..Said::default()
                    };
                    state.objects.insert(key.clone(), kept);
                } else {
                    self.unclaim(&key, name);
                }
            }
            affected.insert(key);
        }
        for key in state.objects.keys() {
            self.claims
                .entry(key.clone())
                .or_default()
                .insert(name.to_owned());
            affected.insert(key.clone());
        }
        self.files.insert(name.to_owned(), state);
        parsed.insert(name.to_owned(), objects);
    }

    /// Nothing of the file can be used: what it said before stays.
    fn file_problem(
        &mut self,
        name: &str,
        hash: Option<[u8; 32]>,
        problem: SourceProblem,
        affected: &mut BTreeSet<Key>,
    ) {
        if !self.files.contains_key(name) {
            let mut state = FileState::default();
            for key in self.objects_of(name) {
                let kept = Said {
                    kept: true,
                    ..Said::default()
                };
                state.objects.insert(key.clone(), kept);
                self.claims
                    .entry(key.clone())
                    .or_default()
                    .insert(name.to_owned());
                affected.insert(key);
            }
            self.files.insert(name.to_owned(), state);
        }
        if let Some(state) = self.files.get_mut(name) {
            state.hash = hash;
            state.problem = Some(problem);
        }
    }

    /// What a file said before: in this life, or, at the start, in an earlier one.
    fn objects_of(&self, name: &str) -> Vec<Key> {
        match self.files.get(name) {
            Some(state) => state.objects.keys().cloned().collect(),
            None => self.left.get(name).cloned().unwrap_or_default(),
        }
    }

    fn unclaim(&mut self, key: &Key, name: &str) {
        if let Some(files) = self.claims.get_mut(key) {
            files.remove(name);
            if files.is_empty() {
                self.claims.remove(key);
            }
        }
    }

    // --- objects -------------------------------------------------------------------------------------------

    fn judge(
        &mut self,
        key: &Key,
        now_ms: i64,
        parsed: &mut BTreeMap<String, BTreeMap<Key, Object>>,
        affected: &mut BTreeSet<Key>,
    ) -> Verdict {
        let Some(file) = self.first_claim(key) else {
            self.ledger.gone(key);
            return Verdict::Gone;
        };
        if self.is_kept(&file, key) {
            self.ledger.moved(key, &file);
            return Verdict::Keep;
        }
        if !parsed.contains_key(&file) {
            // The file did not change, but its word counts only now. Read as if it had.
            if let Some(state) = self.files.get_mut(&file) {
                state.hash = None;
            }
            self.read_file(&file, parsed, affected);
            affected.insert(key.clone());
            if !parsed.contains_key(&file) {
                // It has changed to something broken in this very moment, or is gone: its own event follows.
                affected.remove(key);
                return Verdict::Keep;
            }
            return self.judge(key, now_ms, parsed, affected);
        }
        let Some(object) = parsed.get(&file).and_then(|objects| objects.get(key)).cloned() else {
            // An attachment of another node.
            self.ledger.gone(key);
            return Verdict::Gone;
        };
        self.judge_object(key, &file, object, now_ms)
    }

    fn judge_object(&mut self, key: &Key, file: &str, object: Object, now_ms: i64) -> Verdict {
        let Some(claim) = object.claim else {
            return Verdict::Keep;
        };
        let (spec, refusal) = match object.content {
            Content::BadAttachment => return Verdict::Keep,
            Content::BadPolicy(refusal) => (None, Some(refusal)),
            Content::Attachment(spec) => (Some(GoodSpec::Attachment(spec)), None),
            Content::Policy(spec) => (Some(GoodSpec::RoutePolicy(spec)), None),
        };
        let version = match self.ledger.version(key, &claim, now_ms) {
            Ok(version) => version,
            Err(reason) => {
                let reason = format!("{key}: {reason}");
                self.refuse(key, file, object.place, reason);
                return Verdict::Keep;
            }
        };
        let good = spec.map(|spec| Good {
            generation: version.generation,
            labels: object.labels,
            origin: object.origin,
            spec,
        });
        self.ledger.note(key, &claim, &version, file, good.clone());
        match (good, refusal) {
            (Some(good), _) => Verdict::Good(claim, Box::new(good), object.origin_time_ms),
            (None, Some(refusal)) => Verdict::Refused(claim, refusal),
            (None, None) => Verdict::Keep,
        }
    }

    fn refuse(&mut self, key: &Key, file: &str, place: Place, reason: String) {
        let text = read_text(&self.directory.join(file))
            .ok()
            .flatten()
            .unwrap_or_default();
        if let Some(said) = self
            .files
            .get_mut(file)
            .and_then(|state| state.objects.get_mut(key))
        {
            said.refused = Some(problem(file, &text, place, reason));
            self.refused.insert(key.clone());
        }
    }

    fn first_claim(&self, key: &Key) -> Option<String> {
        self.claims.get(key)?.first().cloned()
    }

    /// Whether the file does not say the object now, but what it said stays.
    fn is_kept(&self, file: &str, key: &Key) -> bool {
        self.files.get(file).is_some_and(|state| {
            state.problem.is_some() || state.objects.get(key).is_some_and(|said| said.kept)
        })
    }

    // --- telling -------------------------------------------------------------------------------------------

    fn tell(&mut self, key: &Key, verdict: Verdict, now_ms: i64, changes: &mut Vec<ObjectChange>) {
        if self.ledger.is_blocked(key) {
            self.blocked.insert(key.clone());
            return;
        }
        match verdict {
            Verdict::Gone => {
                if self.told.remove(key).is_some() {
                    changes.push(key.gone());
                }
            }
            Verdict::Keep => self.tell_last_good(key, changes),
            Verdict::Good(claim, good, origin_time_ms) => {
                let Some(version) = self.ledger.current(key) else {
                    return;
                };
                let told = Told {
                    uid: version.uid.clone(),
                    generation: version.generation,
                    good: true,
                    rest: claim.rest,
                };
                if self.told.get(key) != Some(&told) {
                    changes.extend(self.change(key, &version, &good));
                    self.told.insert(key.clone(), told);
                    self.arrived
                        .extend(origin_time_ms.and_then(|then| nanos_between(then, now_ms)));
                }
            }
            Verdict::Refused(claim, refusal) => {
                // A new life tells first what stays in force.
                self.tell_last_good(key, changes);
                let Some(version) = self.ledger.current(key) else {
                    return;
                };
                let told = Told {
                    uid: version.uid.clone(),
                    generation: version.generation,
                    good: false,
                    rest: claim.rest,
                };
                if self.told.get(key) != Some(&told) {
                    let meta = meta(&key.name, &version, &BTreeMap::new(), None);
                    changes.push(ObjectChange::Policy(validate::policy(&meta, Err(refusal))));
                    self.told.insert(key.clone(), told);
                }
            }
        }
    }

    /// Tells the last good content of an object of which nothing was told in this life.
    fn tell_last_good(&mut self, key: &Key, changes: &mut Vec<ObjectChange>) {
        if self.told.contains_key(key) {
            return;
        }
        let (Some(current), Some(good)) = (self.ledger.current(key), self.ledger.good(key)) else {
            return;
        };
        let version = Version {
            generation: good.generation,
            ..current
        };
        let Some(change) = self.change(key, &version, &good) else {
            return;
        };
        changes.push(change);
        let told = Told {
            uid: version.uid,
            generation: version.generation,
            good: true,
            rest: String::new(),
        };
        self.told.insert(key.clone(), told);
    }

    /// A good content as the engine knows it; none if an earlier release took for good what this one does not.
    fn change(&self, key: &Key, version: &Version, good: &Good) -> Option<ObjectChange> {
        let meta = meta(&key.name, version, &good.labels, good.origin.as_ref());
        good.change(&meta, &self.node, Provenance::File)
    }

    /// How the directory is doing.
    pub(super) fn status(&self) -> SourceStatus {
        let mut status = SourceStatus::default();
        for key in self.told.keys() {
            *status.objects.entry(key.kind.as_str().to_owned()).or_default() += 1;
        }
        let state_file = self.ledger.path().display().to_string();
        let mut problems = self.complaints.clone();
        if let Some(error) = self.ledger.error() {
            problems.push(plain_problem(
                &state_file,
                format!("{error}: after a restart, objects without a uid of their own get new ones"),
            ));
        }
        for state in self.files.values() {
            problems.extend(state.problem.iter().cloned());
            problems.extend(state.loose.iter().cloned());
            for said in state.objects.values() {
                problems.extend(said.problems.iter().cloned());
                problems.extend(said.refused.iter().cloned());
            }
        }
        for key in &self.blocked {
            if let Some(file) = self.first_claim(key) {
                let reason = format!("{key}: waits until the state directory can be written");
                problems.push(plain_problem(&file, reason));
            }
        }
        for (key, files) in self.claims.iter().filter(|(_, files)| files.len() > 1) {
            let mut files = files.iter();
            let Some(first) = files.next() else { continue };
            for file in files {
                let place = self
                    .files
                    .get(file)
                    .and_then(|state| state.objects.get(key))
                    .map(|said| said.place)
                    .unwrap_or_default();
                let reason = format!("{key}: also in {first}, which comes first by name and counts");
                problems.push(problem(file, "", place, reason));
            }
        }
        problems.sort_by(|a, b| {
            (&a.file, a.line, a.column, &a.reason).cmp(&(&b.file, b.line, b.column, &b.reason))
        });
        status.problems = bounded(problems);
        status
    }
}

fn problem(file: &str, text: &str, place: Place, reason: String) -> SourceProblem {
    let known = |number: u64| (number > 0).then_some(number);
    SourceProblem {
        file: file.to_owned(),
        line: known(place.line),
        column: known(place.column),
        reason,
        excerpt: document::excerpt(text, place),
    }
}

/// Whether a file was written within the last second, by the file system's own clock.
fn is_fresh(path: &Path) -> bool {
    fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .is_ok_and(|modified| {
            // A file from the future is not being written.
            modified.elapsed().is_ok_and(|age| age.as_secs() == 0)
        })
}

/// Names of the files of a directory.
fn list(directory: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        // A name that is no text cannot be reported, and nobody gives one by accident.
        if let Ok(name) = entry?.file_name().into_string()
            && is_ours(&name)
        {
            names.insert(name);
        }
    }
    Ok(names)
}

/// The text of a file; none if there is no such file, or it is something else than a file.
fn read_text(path: &Path) -> Result<Option<String>, String> {
    // Non-blocking, so that a fifo of that name keeps nobody waiting.
    let file = match fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
    {
        Ok(file) => file,
        // Also a symbolic link that leads nowhere, as between the two steps of replacing it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("open: {error}")),
    };
    let metadata = file.metadata().map_err(|error| format!("stat: {error}"))?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let too_large = || format!("larger than {} MiB", MAX_FILE >> 20);
    if metadata.len() > MAX_FILE {
        return Err(too_large());
    }
    let mut content = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, MAX_FILE + 1), &mut content)
        .map_err(|error| format!("read: {error}"))?;
    if content.len() as u64 > MAX_FILE {
        return Err(too_large());
    }
    match String::from_utf8(content) {
        Ok(text) => Ok(Some(text)),
        Err(error) => {
            let upto = error.utf8_error().valid_up_to();
            let line = 1 + error.as_bytes()[..upto]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count();
            Err(format!("line {line} is no UTF-8"))
        }
    }
}
