//! The source against an API server in this process, on a paused clock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_engine::model::{Boot, FailReason, Now, ObjectChange, ObjectName, Policy};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Config, spawn};
use crate::apiserver::mock::{Fault, Mock};
use crate::clock::Clock;
use crate::loops::Counter;
use crate::source::{SavedAt, SourceNews, SourceStatus};

const NODE: &str = "edge-1";

/// The boot clock of a paused runtime.
struct Paused {
    began: Instant,
    wall_ms: AtomicI64,
}

impl Clock for Paused {
    fn now(&self) -> Now {
        let since = self.began.elapsed();
        Now {
            boot: Boot(1 + u64::try_from(since.as_nanos()).unwrap()),
            wall_ms: self.wall_ms.load(Ordering::Relaxed) + i64::try_from(since.as_millis()).unwrap(),
        }
    }
}

/// What an engine would know.
#[derive(Debug, Default)]
struct Known {
    /// Name to uid and generation.
    attachments: BTreeMap<String, (String, u64)>,
    policies: BTreeMap<String, Policy>,
    /// Changes so far.
    changes: usize,
    gone: Vec<String>,
    saved_complete: bool,
    complete: bool,
    status: SourceStatus,
    alive: Option<Now>,
    saved: Option<SavedAt>,
    arrived: Vec<u64>,
}

impl Known {
    fn take(&mut self, news: SourceNews) {
        match news {
            SourceNews::Changes(changes) => {
                for change in changes {
                    self.changes += 1;
                    self.change(change);
                }
            }
            SourceNews::SavedComplete => self.saved_complete = true,
            SourceNews::Complete => {
                assert!(!self.complete, "complete twice");
                self.complete = true;
            }
            SourceNews::Condition(status) => self.status = status,
            SourceNews::Alive(at) => {
                assert!(
                    self.alive.is_none_or(|before| before.boot < at.boot),
                    "life goes back"
                );
                self.alive = Some(at);
            }
            SourceNews::Saved(at) => self.saved = Some(at),
            SourceNews::Arrived(ages) => self.arrived.extend(ages),
            SourceNews::Status(_) => panic!("an API server proves its life by itself"),
        }
    }

    fn change(&mut self, change: ObjectChange) {
        match change {
            ObjectChange::Attachment(attachment) => {
                let version = (attachment.uid.0, attachment.generation);
                self.attachments.insert(attachment.name.to_string(), version);
            }
            ObjectChange::Policy(policy) => {
                self.policies.insert(policy.name.to_string(), policy);
            }
            ObjectChange::AttachmentGone(name) => self.goes(&name, true),
            ObjectChange::PolicyGone(name) => self.goes(&name, false),
        }
    }

    fn goes(&mut self, name: &ObjectName, attachment: bool) {
        let name = name.to_string();
        let was = if attachment {
            self.attachments.remove(&name).is_some()
        } else {
            self.policies.remove(&name).is_some()
        };
        assert!(was, "{name} goes without having been there");
        self.gone.push(name);
    }

    fn generation(&self, policy: &str) -> Option<u64> {
        self.policies.get(policy).map(|policy| policy.generation)
    }

    fn refused(&self, policy: &str) -> Option<FailReason> {
        let content = &self.policies.get(policy)?.content;
        content.as_ref().err().map(|refusal| refusal.reason)
    }
}

struct Rig {
    mock: Mock,
    state: tempfile::TempDir,
    clock: Arc<Paused>,
    known: Arc<Mutex<Known>>,
    rounds: Arc<Counter>,
    source: JoinHandle<()>,
    reader: JoinHandle<()>,
}

impl Rig {
    fn new(mock: Mock) -> Self {
        Self::with_state(mock, tempfile::tempdir().unwrap())
    }

    fn with_state(mock: Mock, state: tempfile::TempDir) -> Self {
        let (news, mut inbox) = mpsc::channel(16);
        let known = Arc::new(Mutex::new(Known::default()));
        let rounds = Arc::new(Counter::default());
        let clock = Arc::new(Paused {
            began: Instant::now(),
            wall_ms: AtomicI64::new(jiff::Timestamp::now().as_millisecond()),
        });
        let config = Config {
            api: mock.api(),
            node: NODE.to_owned(),
            state_dir: state.path().to_owned(),
        };
        let source = spawn(config, news, Arc::<Paused>::clone(&clock), Arc::clone(&rounds));
        let sink = Arc::clone(&known);
        let reader = tokio::spawn(async move {
            while let Some(news) = inbox.recv().await {
                sink.lock().unwrap().take(news);
            }
        });
        Self {
            mock,
            state,
            clock,
            known,
            rounds,
            source,
            reader,
        }
    }

    fn known<T>(&self, look: impl FnOnce(&Known) -> T) -> T {
        look(&self.known.lock().unwrap())
    }

    /// Waits until this is so; fails after `most` on the paused clock.
    async fn until(&self, what: &str, most: Duration, so: impl Fn(&Known) -> bool) -> Duration {
        let began = Instant::now();
        while !self.known(&so) {
            assert!(
                began.elapsed() < most,
                "{what}: not within {most:?}: {:#?}",
                self.known.lock().unwrap()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
            // Files are written by threads that the clock does not wait for.
            std::thread::sleep(Duration::from_micros(100));
        }
        began.elapsed()
    }

    async fn complete(&self) {
        self.until("complete", Duration::from_secs(5), |known| known.complete)
            .await;
    }

    async fn saved(&self) {
        self.until("saved", Duration::from_secs(120), |known| {
            known.saved.is_some_and(|at| at.age_ms == 0)
        })
        .await;
    }

    /// Ends this life; the next one has its state.
    async fn end(self) -> (Mock, tempfile::TempDir) {
        self.reader.abort();
        let _ = self.reader.await;
        self.source.await.unwrap();
        (self.mock, self.state)
    }
}

fn metadata(namespace: &str, name: &str, uid: &str, generation: u64) -> Value {
    json!({"namespace": namespace, "name": name, "uid": uid, "generation": generation,
        "creationTimestamp": "2026-01-02T03:04:05Z", "managedFields": [{"manager": "x"}]})
}

fn attachment(namespace: &str, name: &str, generation: u64) -> Value {
    let mut metadata = metadata(namespace, name, &format!("{name}-uid"), generation);
    metadata["labels"] = json!({"app": name});
    json!({"metadata": metadata,
        "spec": {"node": NODE, "interface": format!("hf{name}"), "identity": "pod-1", "addresses": ["10.0.0.1"]}})
}

fn policy(namespace: &str, name: &str, generation: u64) -> Value {
    json!({"metadata": metadata(namespace, name, &format!("{name}-uid"), generation),
        "spec": {"consumers": {"matchLabels": {"app": "web"}}, "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": "10.96.0.10", "protocol": "UDP", "port": 53 + generation}]},
        "status": {"observedGeneration": 1}})
}

/// An API server with one attachment and two policies of its namespace.
fn usual() -> Mock {
    let mock = Mock::default();
    mock.bind(NODE);
    mock.put("attachments", attachment("shop", "web", 1));
    mock.put("routepolicies", policy("shop", "dns", 1));
    mock.put("routepolicies", policy("shop", "cache", 1));
    mock.put("routepolicies", policy("other", "far", 1));
    mock
}

const SOON: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn what_matters_here_is_listed_and_followed() {
    let rig = Rig::new(usual());
    rig.complete().await;
    rig.known(|known| {
        assert_eq!(known.attachments.keys().collect::<Vec<_>>(), ["shop/web"]);
        assert_eq!(
            known.policies.keys().collect::<Vec<_>>(),
            ["shop/cache", "shop/dns"]
        );
        assert_eq!(known.changes, 3);
    });
    let lists = rig.mock.asked("GET", "attachments");
    assert_eq!(lists[0].query["fieldSelector"], "spec.node=edge-1");
    assert!(
        !lists[0].query.contains_key("resourceVersion"),
        "an old list may be given"
    );

    rig.mock.put("routepolicies", policy("shop", "dns", 2));
    rig.mock.delete("routepolicies", "shop", "cache");
    rig.mock.put("attachments", attachment("other", "db", 1));
    rig.until("both, and the other namespace", SOON, |known| {
        known.generation("shop/dns") == Some(2)
            && !known.policies.contains_key("shop/cache")
            && known.policies.contains_key("other/far")
    })
    .await;
    let before = rig.known(|known| known.changes);

    // What changes nothing here is no news: status, resource version.
    let mut same = policy("shop", "dns", 2);
    same["status"] = json!({"observedGeneration": 2});
    rig.mock.put("routepolicies", same);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(rig.known(|known| known.changes), before);
    // Quiet is no silence: a watch a minute and scope, and no list.
    assert_eq!(rig.mock.asked("GET", "attachments").len(), 1);
    assert_eq!(rig.mock.asked("GET", "routepolicies").len(), 2);
    let alive = rig.known(|known| known.alive).unwrap();
    assert!(600 - alive.boot.0 / Boot::SECOND <= 62, "{alive:?}");
}

#[tokio::test(start_paused = true)]
async fn labels_and_origins_change_without_the_generation() {
    let rig = Rig::new(usual());
    rig.complete().await;
    let mut copy = policy("shop", "dns", 1);
    copy["metadata"]["annotations"] =
        json!({"holdfast.dev/origin-uid": "hub", "holdfast.dev/origin-generation": "8"});
    rig.mock.put("routepolicies", copy.clone());
    rig.until("the origin", SOON, |known| {
        known.policies["shop/dns"]
            .origin
            .as_ref()
            .is_some_and(|origin| origin.generation == 8)
    })
    .await;
    copy["metadata"]["annotations"]["holdfast.dev/origin-generation"] = "nine".into();
    rig.mock.put("routepolicies", copy.clone());
    rig.until("no origin, and why", SOON, |known| {
        known.policies["shop/dns"].origin.is_none()
            && known
                .status
                .problems
                .iter()
                .any(|problem| problem.reason.contains("origin-generation"))
    })
    .await;
    let time = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(3);
    copy["metadata"]["annotations"] = json!({"holdfast.dev/origin-uid": "hub",
        "holdfast.dev/origin-generation": "9", "holdfast.dev/origin-time": time.to_string()});
    rig.mock.put("routepolicies", copy);
    rig.until("its time", SOON, |known| !known.arrived.is_empty())
        .await;
    let arrived = rig.known(|known| known.arrived.clone());
    assert!(
        arrived[0] >= 3 * Boot::SECOND && arrived[0] < 20 * Boot::SECOND,
        "{arrived:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_used_is_said_with_its_generation_and_the_last_good_stays() {
    let rig = Rig::new(usual());
    rig.complete().await;
    let mut bad = policy("shop", "dns", 2);
    bad["spec"]["destinations"][0]["address"] = "10.0.0.1/8".into();
    rig.mock.put("routepolicies", bad);
    rig.until("refused", SOON, |known| {
        known.refused("shop/dns") == Some(FailReason::Invalid)
    })
    .await;
    assert_eq!(rig.known(|known| known.generation("shop/dns")), Some(2));

    for (generation, change) in [
        (3, json!({"delivery": "Teleport"})),
        (4, json!({"whileHeld": "Wait"})),
        (5, json!({"anything": "new"})),
    ] {
        let mut later = policy("shop", "dns", generation);
        for (key, value) in change.as_object().unwrap() {
            later["spec"][key] = value.clone();
        }
        rig.mock.put("routepolicies", later);
        rig.until("unsupported", SOON, |known| {
            known.generation("shop/dns") == Some(generation)
                && known.refused("shop/dns") == Some(FailReason::Unsupported)
        })
        .await;
    }
    // What is of another shape altogether, in a stream that goes on.
    let mut shapeless = policy("shop", "dns", 6);
    shapeless["spec"] = json!("nothing");
    rig.mock.put("routepolicies", shapeless);
    let mut nobody = policy("shop", "dns", 7);
    nobody["metadata"]["uid"] = json!(null);
    rig.mock.put("routepolicies", nobody);
    let mut anybody = attachment("shop", "web", 2);
    anybody["spec"]["identity"] = json!(null);
    rig.mock.put("attachments", anybody);
    rig.mock.put("routepolicies", policy("shop", "cache", 2));
    rig.until("the stream goes on", SOON, |known| {
        known.generation("shop/cache") == Some(2)
            && known.generation("shop/dns") == Some(6)
            && known.refused("shop/dns") == Some(FailReason::Invalid)
    })
    .await;
    rig.known(|known| {
        assert_eq!(
            known.attachments["shop/web"].1, 1,
            "the last good attachment stays"
        );
        assert!(known.gone.is_empty(), "{:?}", known.gone);
    });
    rig.until("all of it is said", SOON, |known| {
        known.status.problems.len() == 3
    })
    .await;

    // The last good is in force in the next life too, before the API server answers.
    rig.saved().await;
    let (mock, state) = rig.end().await;
    mock.plan("GET", "", 1_000, Fault::Status(500));
    let rig = Rig::with_state(mock, state);
    rig.until("the saved set", SOON, |known| known.saved_complete)
        .await;
    rig.known(|known| {
        assert_eq!(known.refused("shop/dns"), Some(FailReason::Invalid));
        assert_eq!(known.generation("shop/dns"), Some(6));
        assert_eq!(known.attachments["shop/web"].1, 1);
        // The good one went before.
        assert_eq!(known.changes, 4);
    });
    // Mended.
    rig.mock.heal();
    rig.mock.put("routepolicies", policy("shop", "dns", 8));
    rig.mock.put("attachments", attachment("shop", "web", 3));
    rig.until("good again", Duration::from_secs(60), |known| {
        known.generation("shop/dns") == Some(8)
            && known.refused("shop/dns").is_none()
            && known.status.problems.is_empty()
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_list_with_an_object_that_nobody_knows_removes_nothing() {
    let rig = Rig::new(usual());
    rig.complete().await;
    rig.mock.plan(
        "GET",
        "routepolicies",
        1,
        Fault::Only(r#"{"metadata":{"name":3}}"#.to_owned()),
    );
    rig.mock.plan("WATCH", "routepolicies", 1, Fault::MidStream(410));
    rig.until("it is said", Duration::from_secs(70), |known| {
        known
            .status
            .problems
            .iter()
            .any(|problem| problem.reason.contains("without a name"))
    })
    .await;
    rig.known(|known| assert!(known.gone.is_empty(), "{:?}", known.gone));
    rig.mock.plan("WATCH", "routepolicies", 1, Fault::MidStream(410));
    rig.until("a whole list", Duration::from_secs(70), |known| {
        known.status.problems.is_empty()
    })
    .await;
    rig.known(|known| assert!(known.gone.is_empty(), "{:?}", known.gone));
}

#[tokio::test(start_paused = true)]
async fn an_old_generation_is_an_echo_and_a_deleted_uid_does_not_come_back() {
    let rig = Rig::new(usual());
    rig.mock.put("routepolicies", policy("shop", "dns", 3));
    rig.complete().await;
    let before = rig.known(|known| known.changes);
    rig.mock.put("routepolicies", policy("shop", "dns", 2));
    tokio::time::sleep(SOON).await;
    assert_eq!(
        rig.known(|known| (known.generation("shop/dns"), known.changes)),
        (Some(3), before)
    );
    rig.mock.delete("routepolicies", "shop", "dns");
    rig.until("gone", SOON, |known| known.generation("shop/dns").is_none())
        .await;
    rig.mock.put("routepolicies", policy("shop", "dns", 3));
    tokio::time::sleep(SOON).await;
    assert_eq!(rig.known(|known| known.generation("shop/dns")), None);
    // Another object of that name begins anew.
    let mut next = policy("shop", "dns", 1);
    next["metadata"]["uid"] = "another".into();
    rig.mock.put("routepolicies", next);
    rig.until("another", SOON, |known| known.generation("shop/dns") == Some(1))
        .await;
}

#[tokio::test(start_paused = true)]
async fn f21_a_swallowed_watch_is_noticed_and_its_silence_is_seen() {
    let rig = Rig::new(usual());
    rig.complete().await;
    // From the next watch on nothing comes for ten minutes, not even an end.
    rig.mock.plan("WATCH", "routepolicies", 10, Fault::Swallow);
    tokio::time::sleep(Duration::from_secs(61)).await;
    rig.mock.delete("routepolicies", "shop", "cache");
    rig.mock.put("routepolicies", policy("shop", "new", 1));
    let began = Instant::now();
    let mut oldest = Duration::ZERO;
    while began.elapsed() < Duration::from_secs(600) {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let alive = rig.known(|known| known.alive).unwrap();
        let age = Duration::from_nanos(rig.clock.now().boot.since(alive.boot));
        oldest = oldest.max(age);
        assert!(
            rig.known(|known| known.policies.contains_key("shop/cache")),
            "nobody could know"
        );
    }
    assert!(oldest > Duration::from_secs(60), "{oldest:?}");
    rig.until("both right", Duration::from_secs(200), |known| {
        !known.policies.contains_key("shop/cache") && known.policies.contains_key("shop/new")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f22_whatever_the_api_server_answers_the_source_lives_and_removes_nothing_too_early() {
    let mock = usual();
    mock.plan("GET", "routepolicies", 3, Fault::Status(500));
    let rig = Rig::new(mock);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!rig.known(|known| known.complete));
    rig.until(
        "complete after three failures",
        Duration::from_secs(10),
        |known| known.complete,
    )
    .await;
    let lists = rig.mock.asked("GET", "routepolicies");
    let waits: Vec<Duration> = lists.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    for (index, wait) in waits.iter().enumerate() {
        let longest = Duration::from_millis(500) * 2_u32.pow(u32::try_from(index).unwrap());
        assert!(
            longest / 2 <= *wait && *wait <= longest + Duration::from_millis(20),
            "{waits:?}"
        );
    }
    assert_eq!(waits.len(), 3, "{waits:?}");

    // 410 when it goes on, 410 in the middle, three 500s on the list: and all the while nothing is removed.
    rig.mock.forget();
    rig.mock.plan("WATCH", "routepolicies", 1, Fault::MidStream(410));
    rig.mock.plan("GET", "routepolicies", 3, Fault::Status(500));
    rig.mock.plan("GET", "routepolicies", 1, Fault::Lacks("cache"));
    tokio::time::sleep(Duration::from_secs(61)).await;
    rig.mock.put("routepolicies", policy("shop", "dns", 2));
    rig.until("the list that lacks one", Duration::from_secs(30), |known| {
        assert!(known.complete);
        !known.policies.contains_key("shop/cache")
    })
    .await;
    assert_eq!(rig.mock.asked("GET", "routepolicies").len(), 4);
    assert_eq!(rig.known(|known| known.generation("shop/dns")), Some(2));
    assert_eq!(rig.known(|known| known.gone.clone()), ["shop/cache"]);

    rig.mock.compact();
    rig.mock.forget();
    tokio::time::sleep(Duration::from_secs(130)).await;
    assert!(
        !rig.mock.asked("GET", "routepolicies").is_empty(),
        "410 on resuming is a new list"
    );
    assert!(
        rig.known(|known| known.policies.contains_key("shop/cache")),
        "which has it again"
    );
    assert!(!rig.source.is_finished());
}

#[tokio::test(start_paused = true)]
async fn f51_crds_that_go_and_access_that_is_forbidden_remove_nothing() {
    for code in [404, 403] {
        let rig = Rig::new(usual());
        rig.complete().await;
        for verb in ["GET", "WATCH"] {
            rig.mock.plan(verb, "attachments", 1_000_000, Fault::Status(code));
            rig.mock
                .plan(verb, "routepolicies", 1_000_000, Fault::Status(code));
        }
        rig.mock.forget();
        tokio::time::sleep(Duration::from_secs(1_800)).await;
        rig.known(|known| {
            assert!(known.gone.is_empty(), "{:?}", known.gone);
            assert_eq!(known.policies.len(), 2);
            assert_eq!(known.status.problems.len(), 2, "{:?}", known.status.problems);
        });
        // Every half minute at most, once it has gone on for a while.
        let asked = rig.mock.asked("GET", "").len() + rig.mock.asked("WATCH", "").len();
        assert!((120..=300).contains(&asked), "{asked}");
        rig.mock.heal();
        rig.mock.put("routepolicies", policy("shop", "dns", 2));
        rig.until("by itself", Duration::from_secs(40), |known| {
            known.generation("shop/dns") == Some(2) && known.status.problems.is_empty()
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn f51_objects_that_go_with_their_definition_stay() {
    let rig = Rig::new(usual());
    rig.complete().await;
    // The definitions are deleted: their objects first, then they are not known any more.
    rig.mock.end(true);
    for name in ["dns", "cache"] {
        rig.mock.delete("routepolicies", "shop", name);
    }
    rig.mock.delete("attachments", "shop", "web");
    tokio::time::sleep(Duration::from_secs(5)).await;
    for verb in ["GET", "WATCH"] {
        rig.mock
            .plan(verb, "/apis/holdfast.dev", 1_000_000, Fault::Status(404));
    }
    tokio::time::sleep(Duration::from_secs(600)).await;
    rig.known(|known| {
        assert!(known.gone.is_empty(), "{:?}", known.gone);
        assert_eq!((known.policies.len(), known.attachments.len()), (2, 1));
    });
    // They come back, and their objects with them, as others.
    rig.mock.put("attachments", attachment("shop", "web", 1));
    let mut again = policy("shop", "dns", 1);
    again["metadata"]["uid"] = "again".into();
    rig.mock.put("routepolicies", again);
    rig.mock.end(false);
    rig.mock.heal();
    rig.until("what is there again", Duration::from_secs(40), |known| {
        known
            .policies
            .get("shop/dns")
            .is_some_and(|policy| policy.uid.0 == "again")
            && !known.policies.contains_key("shop/cache")
    })
    .await;
    rig.known(|known| assert_eq!(known.gone, ["shop/cache"]));
}

#[tokio::test(start_paused = true)]
async fn f11_a_saved_set_serves_until_the_first_list_which_removes_what_it_lacks() {
    let rig = Rig::new(usual());
    rig.complete().await;
    rig.saved().await;
    let (mock, state) = rig.end().await;
    mock.delete("routepolicies", "shop", "cache");
    mock.plan("GET", "routepolicies", 1, Fault::Slow(Duration::from_secs(20)));
    let rig = Rig::with_state(mock, state);
    rig.until("the saved set", SOON, |known| known.saved_complete)
        .await;
    rig.known(|known| {
        assert!(!known.complete);
        assert_eq!(
            known.policies.keys().collect::<Vec<_>>(),
            ["shop/cache", "shop/dns"]
        );
        let saved = known.saved.unwrap();
        assert!((0..60_000).contains(&saved.age_ms), "{saved:?}");
    });
    tokio::time::sleep(Duration::from_secs(19)).await;
    rig.known(|known| assert!(known.gone.is_empty() && !known.complete));
    rig.until("the list", Duration::from_secs(4), |known| known.complete)
        .await;
    rig.known(|known| {
        assert_eq!(known.gone, ["shop/cache"]);
        // What the list has as it was saved is no news.
        assert_eq!(known.changes, 4);
    });
}

#[tokio::test(start_paused = true)]
async fn f20_without_a_saved_set_nothing_is_in_force_and_a_damaged_one_is_none() {
    let rig = Rig::new(usual());
    rig.saved().await;
    let (mock, state) = rig.end().await;
    let path = state.path().join(super::SAVED);
    let mut content = std::fs::read(&path).unwrap();
    let last = content.len() - 10;
    content[last] ^= 1;
    std::fs::write(&path, content).unwrap();
    mock.plan("GET", "", 100, Fault::Status(503));
    let rig = Rig::with_state(mock, state);
    tokio::time::sleep(Duration::from_secs(60)).await;
    rig.known(|known| {
        assert!(!known.saved_complete && !known.complete && known.changes == 0);
        assert_eq!(known.saved, None);
        assert_eq!(known.alive, None);
    });
    assert!(rig.rounds.read().errors > 3);
    rig.mock.heal();
    rig.until("complete", Duration::from_secs(40), |known| known.complete)
        .await;
}

#[tokio::test(start_paused = true)]
async fn f18_an_hour_without_the_api_server_is_survived_and_seen() {
    let rig = Rig::new(usual());
    rig.saved().await;
    for verb in ["GET", "WATCH"] {
        rig.mock.plan(verb, "", 1_000_000, Fault::Hang);
    }
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    rig.known(|known| {
        assert!(known.gone.is_empty());
        let (alive, saved) = (known.alive.unwrap(), known.saved.unwrap());
        assert!(alive.boot.0 < 200 * Boot::SECOND, "{alive:?}");
        assert_eq!(saved.seen, alive);
    });
    rig.mock.heal();
    rig.mock.put("routepolicies", policy("shop", "dns", 2));
    rig.until("back", Duration::from_secs(70), |known| {
        known.generation("shop/dns") == Some(2)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_token_of_another_node_shows_nothing() {
    let mock = usual();
    mock.bind("edge-2");
    let rig = Rig::new(mock);
    tokio::time::sleep(Duration::from_secs(100)).await;
    rig.known(|known| {
        assert_eq!(known.changes, 0);
        assert!(
            known.status.problems[0].reason.contains("edge-2"),
            "{:?}",
            known.status
        );
    });
    assert!(rig.mock.asked("GET", "").is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_starts_is_asked_again_who_we_are() {
    let mock = usual();
    mock.bind("edge-2");
    mock.plan("POST", "selfsubjectreviews", 3, Fault::Status(403));
    let rig = Rig::new(mock);
    tokio::time::sleep(Duration::from_secs(60)).await;
    rig.known(|known| assert_eq!(known.changes, 0));
    assert!(rig.mock.asked("GET", "").is_empty());
    // One that never says it is believed in the end.
    let mock = usual();
    mock.plan("POST", "selfsubjectreviews", 1_000, Fault::Status(403));
    let rig = Rig::new(mock);
    rig.until("complete", Duration::from_secs(60), |known| known.complete)
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_namespace_is_followed_for_a_while_after_its_last_attachment() {
    let rig = Rig::new(usual());
    rig.complete().await;
    rig.mock.delete("attachments", "shop", "web");
    rig.until("gone", SOON, |known| known.attachments.is_empty())
        .await;
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(rig.known(|known| known.policies.len()), 2);
    rig.until("the policies too", Duration::from_secs(110), |known| {
        known.policies.is_empty()
    })
    .await;
    let mut again = attachment("shop", "web", 1);
    again["metadata"]["uid"] = "again".into();
    rig.mock.put("attachments", again);
    rig.until("both again", SOON, |known| known.policies.len() == 2)
        .await;
}

#[tokio::test(start_paused = true)]
async fn above_64_namespaces_all_policies_are_followed_together() {
    let mock = usual();
    for number in 0..80 {
        mock.put(
            "routepolicies",
            policy(&format!("ns{number}"), &format!("p{number}"), 1),
        );
    }
    for number in 0..60 {
        mock.put(
            "attachments",
            attachment(&format!("ns{number}"), &format!("a{number}"), 1),
        );
    }
    let rig = Rig::new(mock);
    rig.complete().await;
    assert_eq!(rig.known(|known| known.policies.len()), 62);
    rig.mock.forget();
    for number in 60..80 {
        rig.mock.put(
            "attachments",
            attachment(&format!("ns{number}"), &format!("a{number}"), 1),
        );
    }
    rig.until("everything", SOON, |known| known.policies.len() == 83)
        .await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    rig.mock.forget();
    tokio::time::sleep(Duration::from_secs(120)).await;
    let watches = rig.mock.asked("WATCH", "routepolicies");
    assert!((1..=3).contains(&watches.len()), "{}", watches.len());
    rig.known(|known| assert!(known.gone.is_empty(), "{:?}", known.gone));

    for number in 0..60 {
        rig.mock
            .delete("attachments", &format!("ns{number}"), &format!("a{number}"));
    }
    rig.until("one by one again", Duration::from_secs(320), |known| {
        known.policies.len() == 22
    })
    .await;
    rig.mock.put("routepolicies", policy("ns70", "more", 1));
    rig.until("and followed", SOON, |known| {
        known.policies.contains_key("ns70/more")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_page_at_a_time() {
    let mock = usual();
    for number in 0..1_200 {
        mock.put("routepolicies", policy("shop", &format!("p{number}"), 1));
    }
    let rig = Rig::new(mock);
    rig.complete().await;
    assert_eq!(rig.known(|known| known.policies.len()), 1_202);
    assert_eq!(rig.mock.asked("GET", "routepolicies").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_set_that_does_not_change_is_not_written_again() {
    let rig = Rig::new(usual());
    rig.saved().await;
    let path = rig.state.path().join(super::SAVED);
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
    let before = inode();
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    assert_eq!(inode(), before);
    for generation in 2..40 {
        rig.mock.put("routepolicies", policy("shop", "dns", generation));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let text = || std::fs::read_to_string(&path).unwrap();
    rig.until("the last word", Duration::from_secs(20), |_| {
        text().contains("\"generation\":39")
    })
    .await;
}
