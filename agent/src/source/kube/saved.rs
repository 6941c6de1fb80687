//! The last complete set, on the disk: what is served after a boot without the API server.
//!
//! The file is written when the set has changed, and then not more than a disk of an edge node can take; when nothing
//! changes, its time of modification says until when it was what the API server had.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::set::{Line, Set};
use crate::files::{self, Durability, FileError};

/// Name of the file in the state directory.
pub const NAME: &str = "kube-objects.json";
const WHAT: &str = "holdfast-kube-objects 1";
const MODE: u32 = 0o600;
/// Far above 100,000 objects.
const LIMIT: u64 = 1 << 30;
/// Least time between two writes.
const GAP: Duration = Duration::from_secs(5);
/// Bytes a second that are written at most, over long times.
const RATE: u64 = 100 << 10;
/// How long a write that failed waits before it is tried again.
const RETRY: Duration = Duration::from_secs(10);
/// How often the time of modification is set while nothing changes.
const TOUCH: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    node: String,
    objects: Vec<Line>,
}

#[derive(Serialize)]
struct Head<'a> {
    node: &'a str,
}

/// What an earlier life left.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The objects.
    pub lines: Vec<Line>,
    /// Until when they were what the API server had, milliseconds since the Unix epoch.
    pub until_ms: i64,
}

/// Reads what an earlier life of this node's agent left; none if there is nothing.
///
/// # Errors
/// When there is something and it cannot be used.
pub(super) fn load(state_dir: &Path, node: &str) -> Result<Option<Loaded>, FileError> {
    let path = state_dir.join(NAME);
    let sealed = match files::read(&path, LIMIT) {
        Ok(sealed) => sealed,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error),
    };
    let body = files::unseal(&path, WHAT, &sealed)?;
    let damaged = |what| FileError::Damaged {
        path: path.clone(),
        what,
    };
    let kept: Kept = serde_json::from_slice(body).map_err(|_| damaged("written by another release"))?;
    if kept.node != node {
        return Err(damaged("of another node"));
    }
    let modified = std::fs::metadata(&path)
        .and_then(|metadata| metadata.modified())
        .map_err(FileError::io("stat", &path))?;
    Ok(Some(Loaded {
        lines: kept.objects,
        until_ms: milliseconds(modified),
    }))
}

fn milliseconds(time: SystemTime) -> i64 {
    let after = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(after.as_millis()).unwrap_or(i64::MAX)
}

/// What is being written, and by whom.
#[derive(Debug)]
struct Writing {
    revision: u64,
    size: usize,
    task: JoinHandle<Result<(), FileError>>,
}

/// Keeps the file.
#[derive(Debug)]
pub(super) struct Keeper {
    path: PathBuf,
    node: String,
    /// What the file says.
    saved: Option<u64>,
    writing: Option<Writing>,
    not_before: Instant,
    touched: Instant,
    /// Why it could not be written.
    failure: Option<String>,
}

impl Keeper {
    /// `saved`: the revision of the set that was loaded.
    pub(super) fn new(state_dir: &Path, node: &str, saved: Option<u64>) -> Self {
        Self {
            path: state_dir.join(NAME),
            node: node.to_owned(),
            saved,
            writing: None,
            not_before: Instant::now(),
            touched: Instant::now(),
            failure: None,
        }
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Why it cannot be written.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Whether the file says what this set says.
    pub(super) fn has(&self, set: &Set) -> bool {
        self.saved == Some(set.revision())
    }

    /// Begins to write if it is time to: `set` is complete.
    pub(super) fn keep(&mut self, set: &Set) {
        let now = Instant::now();
        if self.writing.is_some() || self.has(set) || now < self.not_before {
            return;
        }
        let content = self.content(set);
        let (path, size) = (self.path.clone(), content.len());
        let task =
            tokio::task::spawn_blocking(move || files::replace(&path, &content, MODE, Durability::Machine));
        self.writing = Some(Writing {
            revision: set.revision(),
            size,
            task,
        });
    }

    fn content(&self, set: &Set) -> Vec<u8> {
        let mut body = serde_json::to_vec(&Head { node: &self.node }).unwrap_or_default();
        // The head ends with the brace that the objects go before.
        body.pop();
        body.extend_from_slice(b",\"objects\":[");
        for (index, line) in set.lines().enumerate() {
            body.extend_from_slice(if index == 0 { b"\n" } else { b",\n" });
            body.extend_from_slice(line.as_bytes());
        }
        body.extend_from_slice(b"]}\n");
        files::seal(WHAT, &body)
    }

    /// When there may be something to do.
    pub(super) fn due(&self, set: &Set) -> Option<Instant> {
        (self.writing.is_none() && !self.has(set)).then_some(self.not_before)
    }

    /// Returns when a write has ended; never if there is none. Cancel safe.
    pub(super) async fn written(&mut self) {
        let Some(writing) = &mut self.writing else {
            return std::future::pending().await;
        };
        let result = (&mut writing.task).await;
        let (revision, size) = (writing.revision, writing.size);
        self.writing = None;
        let now = Instant::now();
        self.touched = now;
        let error = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        match error {
            None => {
                self.saved = Some(revision);
                self.not_before = now + GAP.max(Duration::from_secs(size as u64 / RATE));
                if self.failure.take().is_some() {
                    tracing::info!(path = %self.path.display(), "the set of objects is saved again");
                }
            }
            Some(error) => {
                self.not_before = now + RETRY;
                if self.failure.is_none() {
                    tracing::warn!(
                        path = %self.path.display(),
                        error,
                        "the set of objects cannot be saved: a boot without the API server would serve an older one"
                    );
                }
                self.failure = Some(error);
            }
        }
    }

    /// The API server has what the file says, until now.
    pub(super) fn touch(&mut self) {
        if self.touched.elapsed() < TOUCH || self.writing.is_some() {
            return;
        }
        self.touched = Instant::now();
        if let Err(error) = set_modified(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the age of the saved set is not kept");
        }
    }

    /// Writes what is not written yet, at the end of a life.
    pub(super) async fn finish(&mut self, set: &Set) {
        if self.writing.is_some() {
            self.written().await;
        }
        self.not_before = Instant::now();
        self.keep(set);
        if self.writing.is_some() {
            self.written().await;
        }
    }
}

fn set_modified(path: &Path) -> io::Result<()> {
    File::options()
        .append(true)
        .open(path)?
        .set_modified(SystemTime::now())
}
