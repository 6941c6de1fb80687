//! When to scan: inotify, and a slow audit for what it does not tell.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::scan::{Dirty, Scanner, is_ours};
use crate::clock::Clock;
use crate::loops::Counter;
use crate::source::{SourceNews, SourceProblem, SourceStatus};

/// How often the directory is looked at although nothing happened: whether it is still the watched one. Also the
/// proof of life, so well below the smallest `maxStaleness`.
const LOOK: Duration = Duration::from_secs(5);
/// The same while the directory is missing or cannot be watched.
const LOOK_FAILING: Duration = Duration::from_secs(1);
/// How often all files are read again: symbolic links to elsewhere and remote file systems change without a word.
const AUDIT: Duration = Duration::from_secs(300);

/// Where objects are, and whose.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory.
    pub directory: PathBuf,
    /// Attachments of other nodes are ignored.
    pub node: String,
    /// Where uids, generations and the last good contents are kept.
    pub state_dir: PathBuf,
}

/// Starts the task that follows the directory. It ends when the receiver is gone. `rounds` counts looks at the
/// directory, and failures of it and of its watch.
#[must_use]
pub fn spawn(
    config: Config,
    news: mpsc::Sender<SourceNews>,
    clock: Arc<dyn Clock>,
    rounds: Arc<Counter>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let directory = config.directory.clone();
        let scanner =
            blocking(move || Scanner::new(&config.directory, &config.node, &config.state_dir)).await;
        let follower = Follower {
            directory,
            scanner: Some(scanner),
            watch: None,
            news,
            clock,
            rounds,
            complete: false,
            failure: None,
            said: BTreeSet::new(),
        };
        // Ends with an error only when nobody listens any more.
        let _ = follower.run().await;
    })
}

/// Runs what blocks elsewhere; a panic there is one here.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down: this task is about to be dropped too.
            Err(_) => std::future::pending().await,
        },
    }
}

/// Nobody listens any more.
struct Closed;

struct Follower {
    directory: PathBuf,
    /// None only while a scan runs.
    scanner: Option<Scanner>,
    watch: Option<Watch>,
    news: mpsc::Sender<SourceNews>,
    clock: Arc<dyn Clock>,
    rounds: Arc<Counter>,
    complete: bool,
    /// Why the directory cannot be read.
    failure: Option<String>,
    /// Problems that have been logged.
    said: BTreeSet<String>,
}

impl Follower {
    async fn run(mut self) -> Result<(), Closed> {
        let mut audit = Instant::now() + AUDIT;
        let mut dirty = Dirty::All;
        loop {
            self.rounds.run();
            if self.watch.is_none() {
                // First the watch, then the scan: what changes in between is seen twice rather than never. Without a
                // watch the directory is polled.
                self.open_watch();
                dirty = if self.watch.is_some() || !self.complete {
                    Dirty::All
                } else {
                    Dirty::Audit
                };
            }
            if let Some(watch) = &mut self.watch {
                match watch.drain(&self.directory, &mut dirty) {
                    Ok(()) => {}
                    Err(why) => {
                        self.trouble(&why);
                        self.watch = None;
                        continue;
                    }
                }
            }
            if audit <= Instant::now() {
                audit = Instant::now() + AUDIT;
                if matches!(dirty, Dirty::Files(_)) {
                    dirty = Dirty::Audit;
                }
            }
            self.scan(&dirty).await?;
            dirty = Dirty::Files(BTreeSet::new());
            self.wait().await?;
        }
    }

    /// Returns when there may be something to do.
    async fn wait(&mut self) -> Result<(), Closed> {
        let look = if self.watch.is_some() && self.failure.is_none() {
            LOOK
        } else {
            LOOK_FAILING
        };
        let event = async {
            match &mut self.watch {
                Some(watch) => watch.stream.next().await,
                None => std::future::pending().await,
            }
        };
        // Cancel safety: the stream hands an event out or keeps it, the others hold nothing.
        let event = tokio::select! {
            () = self.news.closed() => return Err(Closed),
            event = event => event,
            () = tokio::time::sleep(look) => return Ok(()),
        };
        if let Some(watch) = &mut self.watch {
            watch.next = event;
        }
        Ok(())
    }

    fn open_watch(&mut self) {
        match Watch::open(&self.directory) {
            Ok(watch) => self.watch = Some(watch),
            // Missing: the scan says it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.trouble(&format!("inotify: {error}")),
        }
    }

    fn trouble(&self, why: &str) {
        self.rounds.error();
        tracing::debug!(directory = %self.directory.display(), why, "the directory is watched anew");
    }

    async fn scan(&mut self, dirty: &Dirty) -> Result<(), Closed> {
        let Some(mut scanner) = self.scanner.take() else {
            return Ok(());
        };
        let now_ms = self.clock.now().wall_ms;
        let idle = *dirty == Dirty::Files(BTreeSet::new()) && !scanner.is_unsaved();
        let dirty = dirty.clone();
        let directory = self.directory.clone();
        let (scanner, changes, status) = blocking(move || {
            let changes = if idle {
                // Nothing to read, but whether the directory is there is asked each time.
                fs::metadata(&directory).map(|_| Vec::new())
            } else {
                scanner.scan(&dirty, now_ms)
            };
            let status = scanner.status();
            (scanner, changes, status)
        })
        .await;
        self.scanner = Some(scanner);
        match changes {
            Ok(changes) => self.tell(changes, status).await,
            Err(error) => self.fail(&error, status).await,
        }
    }

    async fn tell(
        &mut self,
        changes: Vec<holdfast_engine::model::ObjectChange>,
        status: SourceStatus,
    ) -> Result<(), Closed> {
        if self.failure.take().is_some() {
            tracing::info!(directory = %self.directory.display(), "the directory can be read again");
        }
        self.say(&status);
        let arrived = self.scanner.as_mut().map(Scanner::arrived).unwrap_or_default();
        if !changes.is_empty() {
            self.send(SourceNews::Changes(changes)).await?;
        }
        if !std::mem::replace(&mut self.complete, true) {
            // What was there before this life has not arrived now.
            self.send(SourceNews::Complete).await?;
        } else if !arrived.is_empty() {
            self.send(SourceNews::Arrived(arrived)).await?;
        }
        self.send(SourceNews::Status(status)).await
    }

    async fn fail(&mut self, error: &io::Error, mut status: SourceStatus) -> Result<(), Closed> {
        self.rounds.error();
        let reason = error.to_string();
        if self.failure.as_ref() != Some(&reason) {
            tracing::warn!(
                directory = %self.directory.display(),
                %error,
                "the directory cannot be read; what it said stays in force"
            );
            self.failure = Some(reason.clone());
        }
        status.problems.insert(
            0,
            SourceProblem {
                file: self.directory.display().to_string(),
                line: None,
                column: None,
                reason,
                excerpt: None,
            },
        );
        self.send(SourceNews::Condition(status)).await
    }

    async fn send(&self, news: SourceNews) -> Result<(), Closed> {
        self.news.send(news).await.map_err(|_| Closed)
    }

    /// One line when a problem appears; none while it stays.
    fn say(&mut self, status: &SourceStatus) {
        let now: BTreeSet<String> = status.problems.iter().map(ToString::to_string).collect();
        for problem in now.difference(&self.said) {
            tracing::warn!(
                directory = %self.directory.display(),
                "{problem}; what it said last stays in force"
            );
        }
        if now.is_empty() && !self.said.is_empty() {
            tracing::info!(directory = %self.directory.display(), "every file can be used again");
        }
        self.said = now;
    }
}

/// An inotify watch on one directory.
struct Watch {
    stream: EventStream<Vec<u8>>,
    /// An event that was waited for.
    next: Option<io::Result<EventOwned>>,
    /// Device and inode: the path may lead to another directory later.
    identity: (u64, u64),
}

impl Watch {
    fn open(directory: &Path) -> io::Result<Self> {
        let before = identity(directory)?;
        let inotify = Inotify::init()?;
        inotify.watches().add(
            directory,
            WatchMask::CLOSE_WRITE
                | WatchMask::CREATE
                | WatchMask::DELETE
                | WatchMask::DELETE_SELF
                | WatchMask::MOVED_FROM
                | WatchMask::MOVED_TO
                | WatchMask::MOVE_SELF
                | WatchMask::ONLYDIR,
        )?;
        // Else the watch may be on the one and the identity of the other.
        if identity(directory)? != before {
            return Err(io::Error::other("the directory was replaced meanwhile"));
        }
        Ok(Self {
            identity: before,
            stream: inotify.into_event_stream(vec![0; 16_384])?,
            next: None,
        })
    }

    /// Takes everything that has happened into `dirty`; an error when the watch is of no use any more.
    fn drain(&mut self, directory: &Path, dirty: &mut Dirty) -> Result<(), String> {
        match identity(directory) {
            Ok(identity) if identity == self.identity => {}
            Ok(_) => return Err("another directory is there".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
        loop {
            let event = match self.next.take() {
                Some(event) => event,
                None => match self.stream.next().now_or_never() {
                    None => return Ok(()),
                    Some(None) => return Err("the queue was closed".to_owned()),
                    Some(Some(event)) => event,
                },
            };
            let event = event.map_err(|error| error.to_string())?;
            take(directory, event.mask, event.name.as_deref(), dirty)?;
        }
    }
}

fn identity(directory: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(directory).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// One event.
fn take(directory: &Path, mask: EventMask, name: Option<&OsStr>, dirty: &mut Dirty) -> Result<(), String> {
    if mask
        .intersects(EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT)
    {
        return Err("the directory was removed or moved".to_owned());
    }
    if mask.contains(EventMask::Q_OVERFLOW) {
        *dirty = Dirty::All;
        return Ok(());
    }
    let Some(name) = name.and_then(OsStr::to_str) else {
        return Ok(());
    };
    if name == "..data" {
        // A volume whose files are links through this one: all of them have changed at once.
        *dirty = Dirty::All;
    } else if is_ours(name)
        && (!mask.contains(EventMask::CREATE) || is_complete_when_created(&directory.join(name)))
    {
        dirty.add(name);
    }
    Ok(())
}

/// Links are there at once, and nobody closes them after writing.
fn is_complete_when_created(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
}
