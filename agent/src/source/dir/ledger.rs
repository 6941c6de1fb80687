//! Which (uid, generation) stands for which content: kept in the state directory, so that a pair never names two
//! contents, over restarts too. Beside it the last good content of each object, which stays in force while its file
//! is broken.
//!
//! An append-only file of checksummed lines, one an object: the cost of a change follows the change, not the number
//! of objects. A change is on the disk before anybody hears of it. Rewritten as a whole at start and when most of it
//! is outdated.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use holdfast_engine::model::Uid;
use rand::TryRng;
use serde::{Deserialize, Serialize};

use crate::api::hash::sha256;
use crate::files::{self, FileError};
use crate::source::good::{Good, Key};

/// Name of the file in the state directory.
pub const NAME: &str = "objects.log";
const HEADER: &str = "holdfast-objects 1";
const MODE: u32 = 0o600;
/// Far above 100,000 objects.
const LIMIT: u64 = 1 << 30;
/// So many uids that files named once are remembered after their object has gone.
const MAX_RETIRED: usize = 4_096;
/// Outdated lines that are tolerated beside as many as there are objects.
const SLACK: usize = 1_000;

/// First 16 bytes of SHA-256 of a content, in hex.
pub(super) type ContentHash = String;

pub(super) fn content_hash(canonical: &str) -> ContentHash {
    files::hex(&sha256(canonical.as_bytes())[..16])
}

/// What a file says about an object's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    /// `metadata.uid`, if given.
    pub uid: Option<String>,
    /// `metadata.generation`, if given.
    pub generation: Option<u64>,
    /// Hash of what a given generation stands for: the spec.
    pub spec: ContentHash,
    /// Hash of what a counted generation stands for: also the labels, where they matter.
    pub content: ContentHash,
    /// Hash of everything else that is kept with the last good content.
    pub rest: ContentHash,
}

/// The version that an object has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version {
    /// Uid.
    pub uid: Uid,
    /// Generation.
    pub generation: u64,
    /// First seen under this uid, milliseconds since the Unix epoch.
    pub created_ms: i64,
}

impl Version {
    /// Stands in where a version does not matter: to judge a content.
    pub(super) fn unknown() -> Self {
        Self {
            uid: Uid(String::new()),
            generation: 0,
            created_ms: 0,
        }
    }
}

/// A line of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Line {
    /// An object as it is now.
    Put {
        key: Key,
        slot: Slot,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        good: Option<Box<Good>>,
    },
    /// An object is gone.
    Gone { key: Key },
    /// A uid that a file named, and that no object has now.
    Retired { uid: Uid, retired: Retired },
}

/// What is known of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Slot {
    uid: Uid,
    /// The file named the uid.
    given: bool,
    generation: u64,
    created_ms: i64,
    spec: ContentHash,
    content: ContentHash,
    rest: ContentHash,
    /// The file that said it.
    file: String,
}

/// See [`Line::Retired`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Retired {
    generation: u64,
    spec: ContentHash,
    content: ContentHash,
    /// Counts up: the oldest are forgotten first.
    order: u64,
}

/// Where the last line of an object is.
#[derive(Clone, Copy, Debug)]
struct Span {
    offset: u64,
    length: usize,
}

impl Span {
    fn of(self, content: &[u8]) -> Option<&[u8]> {
        let start = usize::try_from(self.offset).ok()?;
        content.get(start..start.checked_add(self.length)?)
    }
}

#[derive(Debug)]
struct Known {
    slot: Slot,
    /// The generation is counted here, not given by the file.
    counted: bool,
    /// What the disk says.
    saved: Option<Saved>,
}

#[derive(Debug)]
struct Saved {
    uid: Uid,
    generation: u64,
    span: Span,
}

/// The ledger.
#[derive(Debug)]
pub(super) struct Ledger {
    path: PathBuf,
    objects: BTreeMap<Key, Known>,
    /// When the youngest object that was ever here was first seen.
    newest_ms: i64,
    /// Whose a uid is that a file named.
    given: BTreeMap<Uid, Key>,
    retired: BTreeMap<Uid, Retired>,
    retired_count: u64,
    file: Option<File>,
    /// Length of the file as far as it is whole.
    end: u64,
    /// Lines in the file.
    lines: usize,
    /// Lines that could not be written yet, newest of each object.
    unsaved: BTreeMap<Key, Vec<u8>>,
    unsaved_retired: BTreeMap<Uid, Vec<u8>>,
    /// Objects whose version must not be told before it is on the disk.
    blocked: BTreeSet<Key>,
    error: Option<String>,
}

/// Why a version cannot be given.
pub(super) type Refused = String;

impl Ledger {
    /// Reads what an earlier life left. Never fails: what is damaged is left out and said, what cannot be written is
    /// tried again.
    pub(super) fn open(state_dir: &Path) -> (Self, Vec<String>) {
        let mut ledger = Self {
            path: state_dir.join(NAME),
            objects: BTreeMap::new(),
            newest_ms: i64::MIN,
            given: BTreeMap::new(),
            retired: BTreeMap::new(),
            retired_count: 0,
            file: None,
            end: 0,
            lines: 0,
            unsaved: BTreeMap::new(),
            unsaved_retired: BTreeMap::new(),
            blocked: BTreeSet::new(),
            error: None,
        };
        let mut complaints = Vec::new();
        match files::read(&ledger.path, LIMIT) {
            Ok(content) => complaints.extend(ledger.load(&content)),
            Err(error) if error.is_not_found() => {}
            Err(error) => complaints.push(format!(
                "{error}: objects without a uid of their own get new ones"
            )),
        }
        ledger.save();
        (ledger, complaints)
    }

    fn load(&mut self, content: &[u8]) -> Option<String> {
        let mut damaged = 0;
        let mut offset = 0;
        for (index, raw) in content.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let at = offset;
            offset += raw.len() as u64;
            let line = raw.strip_suffix(b"\n");
            match line.map(check) {
                Some(Some(body)) if index == 0 && body == HEADER.as_bytes() => {}
                Some(Some(body)) if index > 0 => match serde_json::from_slice(body) {
                    Ok(line) => self.take(
                        line,
                        Span {
                            offset: at,
                            length: raw.len(),
                        },
                    ),
                    Err(_) => damaged += 1,
                },
                // A last line without its end is a write that nobody was told of.
                None => {}
                Some(_) => damaged += 1,
            }
            self.lines = index + 1;
        }
        self.end = offset;
        self.bound_retired();
        (damaged > 0).then(|| {
            format!(
                "{}: {damaged} damaged lines are left out: their objects get new uids",
                self.path.display()
            )
        })
    }

    fn take(&mut self, line: Line, span: Span) {
        match line {
            Line::Put { key, slot, .. } => {
                self.forget_given(&key);
                if slot.given {
                    self.given.insert(slot.uid.clone(), key.clone());
                    self.retired.remove(&slot.uid);
                }
                let saved = Some(Saved {
                    uid: slot.uid.clone(),
                    generation: slot.generation,
                    span,
                });
                let known = Known {
                    slot,
                    counted: true,
                    saved,
                };
                self.insert(key, known);
            }
            Line::Gone { key } => {
                self.forget_given(&key);
                self.objects.remove(&key);
            }
            Line::Retired { uid, retired } => {
                self.retired_count = self.retired_count.max(retired.order + 1);
                self.retired.insert(uid, retired);
            }
        }
    }

    fn forget_given(&mut self, key: &Key) {
        if let Some(known) = self.objects.get(key)
            && self.given.get(&known.slot.uid) == Some(key)
        {
            self.given.remove(&known.slot.uid);
        }
    }

    /// The version of an object whose file says `claim`. To be noted, and told after a save.
    pub(super) fn version(&self, key: &Key, claim: &Claim, now_ms: i64) -> Result<Version, Refused> {
        if let Some(uid) = &claim.uid
            && let Some(other) = self.given.get(&Uid(uid.clone()))
            && other != key
        {
            return Err(format!("metadata.uid: {uid} is the uid of {other}"));
        }
        let known = self.objects.get(key).map(|known| &known.slot);
        let same = known.filter(|slot| match &claim.uid {
            Some(uid) => slot.uid.0 == *uid,
            None => !slot.given,
        });
        if let Some(slot) = same {
            return Ok(Version {
                uid: slot.uid.clone(),
                generation: next(slot.generation, &slot.spec, &slot.content, claim)?,
                created_ms: slot.created_ms,
            });
        }
        let before = claim
            .uid
            .as_ref()
            .and_then(|uid| self.retired.get(&Uid(uid.clone())));
        let generation = match before {
            Some(retired) => next(retired.generation, &retired.spec, &retired.content, claim)?,
            None => claim.generation.unwrap_or(1),
        };
        let uid = match &claim.uid {
            Some(uid) => Uid(uid.clone()),
            None => random_uid()?,
        };
        Ok(Version {
            uid,
            generation,
            created_ms: self.first_seen(now_ms),
        })
    }

    /// Notes that an object has this version. `good` is its content if that is good; else the last good one of the
    /// same uid is kept.
    pub(super) fn note(
        &mut self,
        key: &Key,
        claim: &Claim,
        version: &Version,
        file: &str,
        good: Option<Good>,
    ) {
        let slot = Slot {
            uid: version.uid.clone(),
            given: claim.uid.is_some(),
            generation: version.generation,
            created_ms: version.created_ms,
            spec: claim.spec.clone(),
            content: claim.content.clone(),
            rest: claim.rest.clone(),
            file: file.to_owned(),
        };
        let known = self.objects.get(key);
        if known.is_some_and(|known| known.slot == slot) {
            return;
        }
        let same_uid = known.is_some_and(|known| known.slot.uid == slot.uid);
        let good = good.or_else(|| same_uid.then(|| self.good(key)).flatten());
        if !same_uid {
            self.retire(key);
        }
        self.forget_given(key);
        if slot.given {
            self.given.insert(slot.uid.clone(), key.clone());
            self.retired.remove(&slot.uid);
        }
        self.put_line(key, &slot, good);
        let saved = self.objects.remove(key).and_then(|known| known.saved);
        let known = Known {
            slot,
            counted: claim.generation.is_none(),
            saved,
        };
        self.insert(key.clone(), known);
    }

    fn insert(&mut self, key: Key, known: Known) {
        self.newest_ms = self.newest_ms.max(known.slot.created_ms);
        self.objects.insert(key, known);
    }

    /// When an object counts as first seen that is seen now. Age decides conflicts: a clock that was set back must make
    /// nobody older than who was there before.
    fn first_seen(&self, now_ms: i64) -> i64 {
        if now_ms < self.newest_ms {
            self.newest_ms.saturating_add(1)
        } else {
            now_ms
        }
    }

    /// Notes that another file counts for an object now, though it says nothing new: so a next life knows whose last
    /// good content it is.
    pub(super) fn moved(&mut self, key: &Key, file: &str) {
        if self.objects.get(key).is_none_or(|known| known.slot.file == file) {
            return;
        }
        let good = self.good(key);
        if let Some(known) = self.objects.get_mut(key) {
            file.clone_into(&mut known.slot.file);
            let slot = known.slot.clone();
            self.put_line(key, &slot, good);
        }
    }

    fn put_line(&mut self, key: &Key, slot: &Slot, good: Option<Good>) {
        let line = encode(&Line::Put {
            key: key.clone(),
            slot: slot.clone(),
            good: good.map(Box::new),
        });
        self.unsaved.insert(key.clone(), line);
    }

    /// Notes that an object is gone.
    pub(super) fn gone(&mut self, key: &Key) {
        if self.objects.contains_key(key) {
            self.retire(key);
            self.forget_given(key);
            self.objects.remove(key);
            let line = encode(&Line::Gone { key: key.clone() });
            self.unsaved.insert(key.clone(), line);
        }
    }

    /// A uid that a file named may come back: its generations must go on.
    fn retire(&mut self, key: &Key) {
        let Some(slot) = self.objects.get(key).map(|known| &known.slot) else {
            return;
        };
        if !slot.given {
            return;
        }
        let retired = Retired {
            generation: slot.generation,
            spec: slot.spec.clone(),
            content: slot.content.clone(),
            order: self.retired_count,
        };
        let uid = slot.uid.clone();
        self.retired_count += 1;
        let line = encode(&Line::Retired {
            uid: uid.clone(),
            retired: retired.clone(),
        });
        self.unsaved_retired.insert(uid.clone(), line);
        self.retired.insert(uid, retired);
        self.bound_retired();
    }

    fn bound_retired(&mut self) {
        while self.retired.len() > MAX_RETIRED
            && let Some(oldest) = self
                .retired
                .iter()
                .min_by_key(|(_, retired)| retired.order)
                .map(|(uid, _)| uid.clone())
        {
            self.retired.remove(&oldest);
        }
    }

    /// What each file said.
    pub(super) fn by_file(&self) -> BTreeMap<String, Vec<Key>> {
        let mut files: BTreeMap<String, Vec<Key>> = BTreeMap::new();
        for (key, known) in &self.objects {
            files
                .entry(known.slot.file.clone())
                .or_default()
                .push(key.clone());
        }
        files
    }

    /// All objects.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.objects.keys()
    }

    /// The version that an object has.
    pub(super) fn current(&self, key: &Key) -> Option<Version> {
        self.objects.get(key).map(|known| Version {
            uid: known.slot.uid.clone(),
            generation: known.slot.generation,
            created_ms: known.slot.created_ms,
        })
    }

    /// The last good content of an object under its present uid.
    pub(super) fn good(&self, key: &Key) -> Option<Good> {
        let raw = match self.unsaved.get(key) {
            Some(line) => line.clone(),
            None => self.read(self.objects.get(key)?.saved.as_ref()?.span).ok()?,
        };
        match serde_json::from_slice(check(raw.strip_suffix(b"\n")?)?).ok()? {
            Line::Put { good, .. } => good.map(|good| *good),
            Line::Gone { .. } | Line::Retired { .. } => None,
        }
    }

    fn read(&self, span: Span) -> io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(span.offset))?;
        let mut line = vec![0; span.length];
        file.read_exact(&mut line)?;
        Ok(line)
    }

    /// Why the last save failed; none if everything is on the disk.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Where it is kept.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the version of an object must not be told yet: the disk does not know it, and a next life would give
    /// it to another content.
    pub(super) fn is_blocked(&self, key: &Key) -> bool {
        self.blocked.contains(key)
    }

    /// Brings everything that was noted onto the disk, before it is told. What fails is kept and tried again with the
    /// next save; meanwhile no version is told that a next life could give to another content.
    pub(super) fn save(&mut self) {
        let outdated = self.lines > 2 * (self.objects.len() + self.retired.len()) + SLACK;
        if self.file.as_ref().is_some_and(|file| !is_still(file, &self.path)) {
            self.file = None;
        }
        let result = if self.file.is_none() || outdated || self.error.is_some() {
            self.rewrite()
        } else if self.unsaved.is_empty() && self.unsaved_retired.is_empty() {
            Ok(())
        } else {
            self.append()
        };
        self.error = result.err().map(|error| error.to_string());
        self.blocked.clear();
        if self.error.is_some() {
            self.guard();
        }
    }

    /// After a save that failed: what has a uid of ours gets another one, which no next life can know; what has a
    /// given uid and a counted generation waits.
    fn guard(&mut self) {
        let keys: Vec<Key> = self.unsaved.keys().cloned().collect();
        for key in keys {
            let Some(known) = self.objects.get(&key) else {
                continue;
            };
            let slot = &known.slot;
            let on_disk = known.saved.as_ref().filter(|saved| saved.uid == slot.uid);
            let moved = on_disk.is_some_and(|saved| saved.generation != slot.generation);
            if slot.given {
                if known.counted && (moved || on_disk.is_none()) {
                    self.blocked.insert(key);
                }
            } else if moved {
                let good = self.good(&key);
                match (random_uid(), self.objects.get_mut(&key)) {
                    (Ok(uid), Some(known)) => {
                        known.slot.uid = uid;
                        let slot = known.slot.clone();
                        self.put_line(&key, &slot, good);
                    }
                    _ => {
                        self.blocked.insert(key);
                    }
                }
            }
        }
    }

    fn append(&mut self) -> Result<(), FileError> {
        let Some(mut file) = self.file.take() else {
            return self.rewrite();
        };
        let mut block = Vec::new();
        let mut spans = Vec::new();
        for line in self.unsaved_retired.values() {
            block.extend_from_slice(line);
        }
        for (key, line) in &self.unsaved {
            let span = Span {
                offset: self.end + block.len() as u64,
                length: line.len(),
            };
            block.extend_from_slice(line);
            spans.push((key.clone(), span));
        }
        // After an error here the file handle is not put back, and the next save writes the file anew.
        file.write_all(&block)
            .map_err(FileError::io("write", &self.path))?;
        file.sync_data().map_err(FileError::io("sync", &self.path))?;
        self.file = Some(file);
        self.end += block.len() as u64;
        self.lines += self.unsaved.len() + self.unsaved_retired.len();
        self.saved(spans);
        Ok(())
    }

    fn saved(&mut self, spans: Vec<(Key, Span)>) {
        for (key, span) in spans {
            if let Some(known) = self.objects.get_mut(&key) {
                known.saved = Some(Saved {
                    uid: known.slot.uid.clone(),
                    generation: known.slot.generation,
                    span,
                });
            }
        }
        self.unsaved.clear();
        self.unsaved_retired.clear();
    }

    /// Writes the file anew, with one line an object, and replaces the old one by a rename.
    fn rewrite(&mut self) -> Result<(), FileError> {
        let temporary = files::temporary_name(&self.path);
        let mut content = framed(HEADER.as_bytes());
        let mut spans = Vec::new();
        // Somebody may have removed or cut it: versions are known here, only last good contents are lost then.
        let old = if self.objects.keys().all(|key| self.unsaved.contains_key(key)) {
            Vec::new()
        } else {
            files::read(&self.path, LIMIT).unwrap_or_default()
        };
        for (uid, retired) in &self.retired {
            content.extend(encode(&Line::Retired {
                uid: uid.clone(),
                retired: retired.clone(),
            }));
        }
        for (key, known) in &self.objects {
            let line = match (self.unsaved.get(key), &known.saved) {
                (Some(line), _) => line.clone(),
                (None, Some(saved)) if saved.span.of(&old).is_some_and(is_whole) => {
                    saved.span.of(&old).unwrap_or_default().to_vec()
                }
                (None, _) => encode(&Line::Put {
                    key: key.clone(),
                    slot: known.slot.clone(),
                    good: None,
                }),
            };
            let offset = content.len() as u64;
            let length = line.len();
            content.extend(line);
            spans.push((key.clone(), Span { offset, length }));
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(MODE)
            .open(&temporary)
            .map_err(FileError::io("create", &temporary))?;
        file.write_all(&content)
            .map_err(FileError::io("write", &temporary))?;
        file.sync_data().map_err(FileError::io("sync", &temporary))?;
        std::fs::rename(&temporary, &self.path).map_err(FileError::io("rename to", &self.path))?;
        // From here on the spans are those of the new file, also if the directory cannot be synced.
        self.end = content.len() as u64;
        self.lines = 1 + self.retired.len() + spans.len();
        self.saved(spans);
        self.file = Some(file);
        files::sync_directory(&self.path)
    }
}

/// The generation that follows `(generation, spec, content)` when the file says `claim`.
fn next(generation: u64, spec: &str, content: &str, claim: &Claim) -> Result<u64, Refused> {
    match claim.generation {
        Some(given) if given < generation => Err(format!(
            "metadata.generation: {given} is older than {generation}, which was seen already"
        )),
        Some(given) if given == generation && claim.spec != spec => Err(format!(
            "metadata.generation: {given} was seen with another content: raise it, or leave it out"
        )),
        Some(given) => Ok(given),
        None if claim.content == content => Ok(generation),
        None => Ok(generation + 1),
    }
}

fn random_uid() -> Result<Uid, Refused> {
    let mut bytes = [0_u8; 16];
    rand::rngs::SysRng
        .try_fill_bytes(&mut bytes)
        .map_err(|error| format!("the system gives no random numbers: {error}"))?;
    // RFC 9562: version 4, variant 10.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let text = files::hex(&bytes);
    Ok(Uid(format!(
        "{}-{}-{}-{}-{}",
        &text[..8],
        &text[8..12],
        &text[12..16],
        &text[16..20],
        &text[20..]
    )))
}

/// A line with its checksum in front.
fn framed(body: &[u8]) -> Vec<u8> {
    let mut line = files::hex(&sha256(body)[..8]).into_bytes();
    line.push(b' ');
    line.extend_from_slice(body);
    line.push(b'\n');
    line
}

fn encode(line: &Line) -> Vec<u8> {
    // Strings, numbers and maps with string keys: encoding cannot fail. An empty body would be left out at load.
    framed(&serde_json::to_vec(line).unwrap_or_default())
}

/// Whether the path still leads to this file: else lines would be written where nobody reads them.
fn is_still(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => (ours.dev(), ours.ino()) == (theirs.dev(), theirs.ino()),
        _ => false,
    }
}

fn is_whole(line: &[u8]) -> bool {
    line.strip_suffix(b"\n").and_then(check).is_some()
}

/// The body of a line, if its checksum is right.
fn check(line: &[u8]) -> Option<&[u8]> {
    let (sum, body) = line.split_at_checked(16)?;
    let body = body.strip_prefix(b" ")?;
    (sum == files::hex(&sha256(body)[..8]).as_bytes()).then_some(body)
}
