//! What survives a restart of the agent: since when each intent is in its state. Without it a crash loop would
//! make every hold look young.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::Remembered;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Stamps;
use crate::api::hash::sha256;
use crate::files::{self, Durability, FileError};
use crate::loops::Counter;

/// Name of the file in the state directory.
pub const NAME: &str = "intents.json";
const WHAT: &str = "holdfast-intents 1";
const MODE: u32 = 0o600;
/// Far above 100,000 intents.
const LIMIT: u64 = 256 << 20;
/// How long a write that failed waits before it is tried again although nothing changed.
const RETRY: Duration = Duration::from_secs(10);
/// So many times the cost of a write pass before the next one.
const REST: u32 = 100;

/// Content of the file, as it is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// The boot clock starts anew with each of these.
    boot: String,
    /// See [`Stamps::distance_ms`]: with it, stamps of the same moment are the same text over a restart.
    distance_ms: i64,
    intents: Vec<Remembered>,
}

/// Content of the file, as it is written.
#[derive(Serialize)]
struct Keep<'a> {
    boot: &'a str,
    distance_ms: i64,
    intents: &'a [Remembered],
}

/// What an earlier life of this boot left.
#[derive(Debug, Default)]
pub struct Memory {
    /// For [`holdfast_engine::model::Event::Remembered`].
    pub intents: Vec<Remembered>,
    /// For everybody who stamps.
    pub stamps: Stamps,
}

/// Reads what an earlier life left. Nothing if there is no file, or if the machine was booted since: the moments are
/// on the boot clock.
///
/// # Errors
/// When there is something and it cannot be used; the agent then starts without.
pub fn load(state_dir: &Path, boot_id: &str) -> Result<Memory, FileError> {
    let path = state_dir.join(NAME);
    let sealed = match files::read(&path, LIMIT) {
        Ok(sealed) => sealed,
        Err(error) if error.is_not_found() => return Ok(Memory::default()),
        Err(error) => return Err(error),
    };
    let body = files::unseal(&path, WHAT, &sealed)?;
    let kept: Kept = serde_json::from_slice(body).map_err(|_| FileError::Damaged {
        path,
        what: "written by another release",
    })?;
    if kept.boot != boot_id {
        return Ok(Memory::default());
    }
    Ok(Memory {
        intents: kept.intents,
        stamps: Stamps::resume(kept.distance_ms),
    })
}

/// Id of this boot of the machine.
///
/// # Errors
/// When procfs does not say.
pub fn boot_id() -> Result<String, FileError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let content = files::read(path, 64)?;
    Ok(String::from_utf8_lossy(&content).trim().to_owned())
}

/// Starts the task that keeps the file up to date with the newest value. It ends, after a last write, when the
/// sender is dropped. `rounds` counts writes.
#[must_use]
pub fn spawn(
    state_dir: &Path,
    boot_id: String,
    values: watch::Receiver<Arc<Vec<Remembered>>>,
    stamps: Stamps,
    rounds: Arc<Counter>,
) -> JoinHandle<()> {
    let keeper = Keeper {
        path: state_dir.join(NAME),
        boot_id,
        stamps,
        rounds,
        written: None,
        failing: false,
    };
    tokio::spawn(keeper.run(values))
}

struct Keeper {
    path: PathBuf,
    boot_id: String,
    stamps: Stamps,
    rounds: Arc<Counter>,
    /// Hash of what the file says.
    written: Option<[u8; 32]>,
    failing: bool,
}

impl Keeper {
    async fn run(mut self, mut values: watch::Receiver<Arc<Vec<Remembered>>>) {
        let closing = values.clone();
        loop {
            let news = if self.failing {
                tokio::time::timeout(RETRY, values.changed())
                    .await
                    .unwrap_or(Ok(()))
            } else {
                values.changed().await
            };
            let value = Arc::clone(&values.borrow_and_update());
            let started = Instant::now();
            self.write(value).await;
            if news.is_err() {
                return;
            }
            // Bounded by its cost, but the last word of a life is not kept waiting: `wait_for` ends early only when
            // the sender is gone.
            let mut closing = closing.clone();
            let _ = tokio::time::timeout(started.elapsed() * REST, closing.wait_for(|_| false)).await;
        }
    }

    async fn write(&mut self, intents: Arc<Vec<Remembered>>) {
        self.rounds.run();
        let path = self.path.clone();
        let boot_id = self.boot_id.clone();
        let distance_ms = self.stamps.distance_ms();
        let written = self.written;
        let result = tokio::task::spawn_blocking(move || {
            let body = serde_json::to_vec(&Keep {
                boot: &boot_id,
                distance_ms,
                intents: &intents,
            })
            .map_err(|error| FileError::Io {
                doing: "encode",
                path: path.clone(),
                source: error.into(),
            })?;
            let hash = sha256(&body);
            if written != Some(hash) {
                // Moments on the boot clock mean nothing after the machine died: no need to wait for the disk.
                files::replace(&path, &files::seal(WHAT, &body), MODE, Durability::Process)?;
            }
            Ok(hash)
        })
        .await;
        match result {
            Ok(Ok(hash)) => {
                self.written = Some(hash);
                if std::mem::take(&mut self.failing) {
                    tracing::info!(path = %self.path.display(), "times of intents are kept again");
                }
            }
            Ok(Err::<_, FileError>(error)) => self.failed(&error),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &dyn std::error::Error) {
        self.rounds.error();
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(
                path = %self.path.display(),
                %error,
                "times of intents cannot be kept: after a restart they would start anew"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_engine::model::{Boot, HoldReason, Now, State, Token, Uid};

    fn remembered(name: &str) -> Remembered {
        Remembered {
            policy: Uid(name.to_owned()),
            attachment: Uid("a".to_owned()),
            token: Token::new(7),
            state: State::Held(HoldReason::InterfaceMissing),
            since: Now {
                boot: Boot(5),
                wall_ms: 6,
            },
            held_since: Some(Now {
                boot: Boot(3),
                wall_ms: 4,
            }),
        }
    }

    #[tokio::test]
    async fn the_last_value_of_a_life_is_the_first_of_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let (send, receive) = watch::channel(Arc::new(Vec::new()));
        let rounds = Arc::new(Counter::default());
        let stamps = Stamps::resume(123);
        let task = spawn(
            dir.path(),
            "boot-1".to_owned(),
            receive,
            stamps,
            Arc::clone(&rounds),
        );
        for name in ["p", "q"] {
            send.send_replace(Arc::new(vec![remembered(name)]));
            tokio::task::yield_now().await;
        }
        drop(send);
        task.await.unwrap();
        assert_eq!(rounds.read().errors, 0);

        let memory = load(dir.path(), "boot-1").unwrap();
        assert_eq!(memory.intents, vec![remembered("q")]);
        assert_eq!(memory.stamps.distance_ms(), 123);
        assert!(load(dir.path(), "boot-2").unwrap().intents.is_empty());
    }

    #[test]
    fn no_file_is_nothing_and_a_damaged_one_is_said() {
        let dir = tempfile::tempdir().unwrap();
        assert!(load(dir.path(), "boot-1").unwrap().intents.is_empty());
        std::fs::write(dir.path().join(NAME), b"holdfast-intents 1 sha256:00\n{}").unwrap();
        assert!(matches!(
            load(dir.path(), "boot-1"),
            Err(FileError::Damaged {
                what: "checksum differs",
                ..
            })
        ));
    }

    #[tokio::test]
    async fn a_missing_state_directory_is_counted_and_ends_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (send, receive) = watch::channel(Arc::new(Vec::new()));
        let rounds = Arc::new(Counter::default());
        let task = spawn(
            &dir.path().join("gone"),
            "boot-1".to_owned(),
            receive,
            Stamps::default(),
            Arc::clone(&rounds),
        );
        send.send_replace(Arc::new(vec![remembered("p")]));
        while rounds.read().errors == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(send);
        task.await.unwrap();
    }
}
