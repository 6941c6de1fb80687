//! `report.yaml` in the run directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast_engine::model::{Boot, Now, ObjectName};
use holdfast_engine::view::{Barrier, PolicyView};
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{PolicyReport, Stamps};
use crate::driver::Snapshot;
use crate::files::{self, Durability};

/// Name of the report in the run directory.
pub const NAME: &str = "report.yaml";

/// Names and states are no secret on the node, and control planes without root read them.
const MODE: u32 = 0o644;

/// How long a write that failed waits before it is tried again although nothing changed.
const RETRY: Duration = Duration::from_secs(1);

/// Writes counted by result; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct WriteCounts {
    counts: Arc<[AtomicU64; 2]>,
}

impl WriteCounts {
    /// Label `result` of `holdfast_report_writes_total`, with its count.
    #[must_use]
    pub fn by_result(&self) -> BTreeMap<&'static str, u64> {
        let [ok, error] = &*self.counts;
        BTreeMap::from([
            ("ok", ok.load(Ordering::Relaxed)),
            ("error", error.load(Ordering::Relaxed)),
        ])
    }

    pub(super) fn count(&self, ok: bool) {
        self.counts[usize::from(!ok)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Starts the task that keeps the file up to date with the newest snapshot. It ends, after a last write, when the
/// sender is dropped.
#[must_use]
pub fn spawn(
    run_dir: &Path,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    stamps: Stamps,
    counts: WriteCounts,
) -> JoinHandle<()> {
    let writer = Writer {
        path: run_dir.join(NAME),
        stamps,
        counts,
        rendered: BTreeMap::new(),
        distance: 0,
        written: None,
        failing: false,
    };
    tokio::spawn(writer.run(snapshots))
}

struct Writer {
    path: PathBuf,
    stamps: Stamps,
    counts: WriteCounts,
    /// The text of each policy and what it was made of: only what changed is rendered again.
    rendered: BTreeMap<ObjectName, (PolicyView, String)>,
    /// The clocks' distance at that time: a step of the clock changes every stamp.
    distance: i64,
    written: Option<String>,
    failing: bool,
}

impl Writer {
    async fn run(mut self, mut snapshots: watch::Receiver<Arc<Snapshot>>) {
        // Cancel safety: nothing is cancelled here; `changed` loses no value, it only skips to the newest.
        loop {
            let news = if self.failing {
                tokio::time::timeout(RETRY, snapshots.changed())
                    .await
                    .unwrap_or(Ok(()))
            } else {
                snapshots.changed().await
            };
            let snapshot = Arc::clone(&snapshots.borrow_and_update());
            let started = Instant::now();
            self.write(&snapshot).await;
            if news.is_err() {
                return;
            }
            // At most half of the time goes into writing, however large the report and however slow the disk.
            tokio::time::sleep(started.elapsed()).await;
        }
    }

    async fn write(&mut self, snapshot: &Snapshot) {
        // A life that has not read its objects yet knows less than the report of the life before it.
        if snapshot.policies.is_empty() && snapshot.summary.waiting_for.contains(&Barrier::Objects)
            || snapshot.node.is_empty()
        {
            return;
        }
        let text = match self.render(snapshot) {
            Ok(text) => text,
            Err(error) => return self.failed(&error),
        };
        if self.written.as_ref() == Some(&text) {
            return;
        }
        let path = self.path.clone();
        let result = tokio::task::spawn_blocking(move || {
            files::replace(&path, text.as_bytes(), MODE, Durability::Process).map(|()| text)
        })
        .await;
        match result {
            Ok(Ok(text)) => {
                self.written = Some(text);
                self.counts.count(true);
                if std::mem::take(&mut self.failing) {
                    tracing::info!(path = %self.path.display(), "the report is written again");
                }
            }
            Ok(Err(error)) => self.failed(&error),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &dyn std::error::Error) {
        self.counts.count(false);
        // Said once, counted each time.
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(path = %self.path.display(), %error, "the report could not be written");
        }
    }

    fn render(&mut self, snapshot: &Snapshot) -> Result<String, serde_saphyr::ser::Error> {
        self.stamps.observe(Now {
            boot: Boot(snapshot.now_boot_ns),
            wall_ms: snapshot.now_wall_ms,
        });
        if self.distance != self.stamps.distance_ms() {
            self.distance = self.stamps.distance_ms();
            self.rendered.clear();
        }
        let mut before = std::mem::take(&mut self.rendered);
        for policy in &snapshot.policies {
            let (name, entry) = match before.remove_entry(&policy.name) {
                Some((name, entry)) if entry.0 == *policy => (name, entry),
                _ => {
                    let item = [PolicyReport::new(policy, &self.stamps)];
                    (
                        policy.name.clone(),
                        (policy.clone(), serde_saphyr::to_string(&item)?),
                    )
                }
            };
            self.rendered.insert(name, entry);
        }
        let mut text = serde_saphyr::to_string(&Header {
            node: &snapshot.node,
            epoch: &snapshot.epoch,
        })?;
        if self.rendered.is_empty() {
            text.push_str("policies: []\n");
        } else {
            text.push_str("policies:\n");
            for (_, item) in self.rendered.values() {
                text.push_str(item);
            }
        }
        Ok(text)
    }
}

/// The top of the report; the policies follow.
#[derive(Serialize)]
struct Header<'a> {
    node: &'a str,
    epoch: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_engine::model::{HoldReason, Origin, State, Uid};
    use holdfast_engine::view::{Counts, Serving};
    use serde::Deserialize;

    #[derive(Debug, Deserialize, PartialEq, Eq)]
    struct Report {
        node: String,
        epoch: String,
        policies: Vec<PolicyReport>,
    }

    fn at(boot_ms: u64) -> Now {
        Now {
            boot: Boot(boot_ms * 1_000_000),
            wall_ms: 0,
        }
    }

    fn held() -> PolicyView {
        PolicyView {
            name: ObjectName {
                namespace: "shop".to_owned(),
                name: "dns".to_owned(),
            },
            uid: Uid("1e3".to_owned()),
            generation: 8,
            origin: Some(Origin {
                uid: Uid("hub".to_owned()),
                generation: 3,
            }),
            covers: 0x1234_5678_9012_3456,
            state: State::Held(HoldReason::NoReadyProducer),
            intents: Counts {
                held: 2,
                programmed: 1,
                ..Counts::default()
            },
            since: at(5_000),
            held_since: Some(at(4_000)),
            serving: Some(Serving {
                generation: 7,
                since_ms: 1_700_000_000_000,
            }),
            message: Some("web: no producer\nis ready".to_owned()),
            applied: 8,
            proven: 7,
            behind_since: None,
        }
    }

    fn snapshot(policies: Vec<PolicyView>) -> Snapshot {
        Snapshot {
            node: "edge-1".to_owned(),
            epoch: "00112233".to_owned(),
            now_wall_ms: 1_700_000_010_000,
            now_boot_ns: 10_000 * 1_000_000,
            policies,
            ..Snapshot::default()
        }
    }

    struct Rig {
        dir: tempfile::TempDir,
        send: watch::Sender<Arc<Snapshot>>,
        counts: WriteCounts,
        task: JoinHandle<()>,
    }

    impl Rig {
        fn new(dir: tempfile::TempDir) -> Self {
            let (send, receive) = watch::channel(Arc::new(Snapshot::default()));
            let counts = WriteCounts::default();
            let task = spawn(dir.path(), receive, Stamps::default(), counts.clone());
            Self {
                dir,
                send,
                counts,
                task,
            }
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.dir.path().join(NAME)).unwrap_or_default()
        }

        /// Waits for a condition that real writes bring about.
        async fn until(&self, what: impl Fn(&Self) -> bool) {
            for _ in 0..2_000 {
                if what(self) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            panic!("not within two seconds: {}", self.text());
        }
    }

    #[tokio::test]
    async fn every_field_reads_back() {
        let rig = Rig::new(tempfile::tempdir().unwrap());
        rig.send.send_replace(Arc::new(snapshot(vec![held()])));
        rig.until(|rig| !rig.text().is_empty()).await;
        let report: Report = serde_saphyr::from_str(&rig.text()).unwrap();
        assert_eq!(
            report,
            Report {
                node: "edge-1".to_owned(),
                epoch: "00112233".to_owned(),
                policies: vec![PolicyReport {
                    namespace: "shop".to_owned(),
                    name: "dns".to_owned(),
                    uid: Uid("1e3".to_owned()),
                    generation: 8,
                    origin: Some(super::super::OriginReport {
                        uid: Uid("hub".to_owned()),
                        generation: 3
                    }),
                    covers: "1234567890123456".to_owned(),
                    state: "Held".to_owned(),
                    intents: super::super::IntentCounts {
                        desired: 3,
                        programmed: 1,
                        held: 2,
                        failed: 0,
                        pending: 0
                    },
                    since: "2023-11-14T22:13:25.000Z".to_owned(),
                    held_since: Some("2023-11-14T22:13:24.000Z".to_owned()),
                    serving: Some(super::super::ServingReport {
                        generation: 7,
                        since: "2023-11-14T22:13:20.000Z".to_owned()
                    }),
                    reason: Some("NoReadyProducer".to_owned()),
                    message: Some("web: no producer\nis ready".to_owned()),
                }]
            }
        );
        // Other YAML readers take plain digits for a number.
        assert!(
            rig.text().contains("covers: \"1234567890123456\""),
            "{}",
            rig.text()
        );
        assert!(rig.text().contains("epoch: \"00112233\""), "{}", rig.text());
        assert!(rig.text().contains("uid: \"1e3\""), "{}", rig.text());
    }

    #[tokio::test]
    async fn the_same_content_is_not_written_again_and_the_last_word_is() {
        let rig = Rig::new(tempfile::tempdir().unwrap());
        rig.send.send_replace(Arc::new(snapshot(vec![held()])));
        rig.until(|rig| !rig.text().is_empty()).await;
        // A later look at the same state: only the clocks went on.
        let mut later = snapshot(vec![held()]);
        later.now_boot_ns += 5_000_000_000;
        later.now_wall_ms += 5_001;
        rig.send.send_replace(Arc::new(later));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(rig.counts.by_result(), BTreeMap::from([("ok", 1), ("error", 0)]));
        rig.send.send_replace(Arc::new(snapshot(vec![])));
        let Rig {
            dir,
            send,
            counts,
            task,
        } = rig;
        drop(send);
        task.await.unwrap();
        assert_eq!(counts.by_result()["ok"], 2);
        assert_eq!(
            std::fs::read_to_string(dir.path().join(NAME)).unwrap(),
            "node: edge-1\nepoch: \"00112233\"\npolicies: []\n"
        );
    }

    #[tokio::test]
    async fn a_life_that_knows_nothing_yet_leaves_the_report_of_the_last_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(NAME), "old").unwrap();
        let rig = Rig::new(dir);
        let mut empty = snapshot(vec![]);
        empty.summary.waiting_for = vec![Barrier::Objects];
        rig.send.send_replace(Arc::new(empty));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(rig.text(), "old");
        rig.send.send_replace(Arc::new(snapshot(vec![])));
        rig.until(|rig| rig.text().contains("policies: []")).await;
    }

    #[tokio::test]
    async fn a_failed_write_is_counted_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        // A directory of that name is in the way of the rename.
        std::fs::create_dir(path.join(NAME)).unwrap();
        let rig = Rig::new(dir);
        rig.send.send_replace(Arc::new(snapshot(vec![held()])));
        rig.until(|rig| rig.counts.by_result()["error"] > 0).await;
        std::fs::remove_dir(path.join(NAME)).unwrap();
        rig.until(|rig| rig.counts.by_result()["ok"] == 1).await;
        assert!(rig.text().starts_with("node: edge-1\n"));
    }
}
