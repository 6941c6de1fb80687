//! What is served, asked as others ask it, in front of a driver that says what the test wants.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_engine::belief::Audited;
use holdfast_engine::belief::Belief;
use holdfast_engine::compare::Page;
use holdfast_engine::explain::{Asked, Explained, SetFacts, Unexplained};
use holdfast_engine::model::{
    Boot, HoldReason, Ifindex, Link, Now, ObjectName, RegistryRead, State, Token, Uid,
};
use holdfast_engine::since::Since;
use holdfast_engine::view::{Barrier, Counts, PolicyView, Settled};
use hyper::StatusCode;
use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot, watch};

use super::look::{Look, Looker};
use super::socket::{self, Socket, SocketError};
use super::why::{Told, Why};
use super::wire::{Goal, LogFilter, Poke, Poked, PolicyDetail, SetLog, Status, Waited};
use super::{Sources, health, http};
use crate::cli::client::{Client, ClientError};
use crate::clock::{Clock, System};
use crate::datapath::Stats;
use crate::driver::lanes::{Lanes, LanesHealth};
use crate::driver::{Command, Handle, MetricsSnapshot, PolicyStatus, Snapshot};
use crate::report::Stamps;
use crate::telemetry::Control;

const PATIENCE: Duration = Duration::from_secs(5);

fn policy(state: State, generation: u64) -> PolicyView {
    PolicyView {
        name: ObjectName {
            namespace: "shop".to_owned(),
            name: "dns".to_owned(),
        },
        uid: Uid("u1".to_owned()),
        generation,
        origin: None,
        covers: 7,
        state,
        intents: Counts::default(),
        since: Now::default(),
        held_since: None,
        serving: None,
        message: None,
        applied: generation,
        proven: generation,
        behind_since: None,
    }
}

/// What the driver says, and what it was told.
#[derive(Default)]
struct Known {
    snapshot: Snapshot,
    metrics: MetricsSnapshot,
    policy: Option<PolicyView>,
    pokes: Vec<(u32, Option<Token>)>,
}

impl Known {
    fn explain(&self, name: &ObjectName, asked: &Asked) -> Result<Box<Explained>, Unexplained> {
        match (&self.policy, asked) {
            (Some(policy), Asked::Worst(_)) => Ok(Box::new(Explained {
                policy: policy.clone(),
                seen: Since {
                    at: policy.since,
                    earlier: false,
                },
                waiting_for: Vec::new(),
                set: SetFacts {
                    selected: 0,
                    ready: 0,
                    producers: Vec::new(),
                    current: false,
                    serving: None,
                    since_ms: None,
                    supplied: None,
                    waiting: None,
                    beliefs: Vec::new(),
                },
                consumers: Vec::new(),
                left_off: 0,
            })),
            (Some(_), Asked::One(consumer)) => Err(Unexplained::NoConsumer(consumer.clone())),
            (None, _) => Err(Unexplained::NoPolicy {
                policy: name.clone(),
                known: false,
            }),
        }
    }
}

/// A kernel in which there is nothing.
struct Nothing;

impl Look for Nothing {
    fn audit(&self, _: &[Belief]) -> Audited {
        Audited::default()
    }

    fn device(&self, _: &str) -> std::io::Result<Option<Link>> {
        Ok(None)
    }

    fn identity(&self, _: Ifindex) -> RegistryRead {
        RegistryRead::Absent
    }
}

struct Rig {
    known: Arc<Mutex<Known>>,
    reports: watch::Sender<Arc<Snapshot>>,
    sources: Sources,
    driver: tokio::task::JoinHandle<()>,
    dir: TempDir,
}

impl Rig {
    fn new() -> Self {
        let known = Arc::new(Mutex::new(Known::default()));
        let (commands, receiver) = mpsc::channel(16);
        let (reports, report) = watch::channel(Arc::new(Snapshot::default()));
        let sources = Sources {
            driver: Handle::new(commands),
            lanes: LanesHealth::default(),
            links: Arc::new(comes_round),
            stats: Arc::new(Stats::default),
            looker: Looker::new(Nothing),
            reports: report,
            clock: Arc::new(System),
            stamps: Stamps::default(),
            started: Now::default(),
            source: "dir",
            all_policies: true,
            foreign_allowed: false,
            log: Control::detached("info"),
        };
        Self {
            driver: tokio::spawn(drive(receiver, Arc::clone(&known))),
            known,
            reports,
            sources,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn serve(&self) -> (Socket, Client) {
        let socket = socket::serve(self.sources.clone(), self.dir.path()).unwrap();
        (socket, Client::new(self.dir.path()))
    }

    fn policy_is(&self, policy: PolicyView) {
        self.known.lock().unwrap().policy = Some(policy);
        self.reports.send_replace(Arc::new(Snapshot::default()));
    }
}

/// A loop that does.
fn comes_round() -> oneshot::Receiver<()> {
    let (reply, answer) = oneshot::channel();
    reply.send(()).unwrap();
    answer
}

async fn drive(mut commands: mpsc::Receiver<Command>, known: Arc<Mutex<Known>>) {
    while let Some(command) = commands.recv().await {
        let mut known = known.lock().unwrap();
        match command {
            Command::Ping(reply) => {
                let _ = reply.send(());
            }
            Command::Snapshot(reply) => {
                let _ = reply.send(known.snapshot.clone());
            }
            Command::Explain(name, asked, reply) => {
                let _ = reply.send(known.explain(&name, &asked));
            }
            Command::Compare(_, reply) => {
                let _ = reply.send(Ok(Page::default()));
            }
            Command::Metrics(_, reply) => {
                let _ = reply.send(known.metrics.clone());
            }
            Command::Policy(_, reply) => {
                let found = known.policy.clone();
                let _ = reply.send(found.map(|policy| PolicyStatus {
                    policy,
                    intents: Vec::new(),
                }));
            }
            Command::Poke {
                ifindex,
                token,
                reply,
            } => {
                known.pokes.push((ifindex, token));
                let _ = reply.send(Settled::Done);
            }
        }
    }
}

// --- HTTP --------------------------------------------------------------------------------------------------

async fn get(address: SocketAddr, path: &'static str) -> (u16, String) {
    tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn the_listeners_serve_health_and_metrics_and_the_second_one_only_metrics() {
    let rig = Rig::new();
    let any = "127.0.0.1:0".parse().unwrap();
    let servers = http::serve(rig.sources.clone(), any, Some(any)).await.unwrap();
    let (first, second) = (servers.address, servers.metrics_address.unwrap());
    assert_eq!(get(first, "/livez").await, (200, "ok\n".to_owned()));
    rig.known.lock().unwrap().metrics.summary.waiting_for = vec![Barrier::Links];
    assert_eq!(
        get(first, "/readyz").await,
        (
            503,
            "a complete list of the network devices\nthe first pass over all intents\n".to_owned()
        )
    );
    {
        let mut known = rig.known.lock().unwrap();
        known.metrics.summary.waiting_for.clear();
        known.metrics.summary.first_pass_done = true;
    }
    assert_eq!(get(first, "/readyz").await.0, 200);
    let (status, text) = get(first, "/readyz?verbose").await;
    assert_eq!(status, 200);
    assert_eq!(
        text,
        "[+]engine ok\n[+]pins ok\n[+]objects ok\n[+]links ok\n[+]registry ok\n[+]first-pass ok\n"
    );
    let (status, text) = get(first, "/livez?verbose").await;
    assert_eq!(status, 200);
    assert_eq!(
        text,
        "[+]engine ok\n[+]links ok\n[+]writes ok\n[+]attaches ok\n[+]proofs ok\n[+]audits ok\n"
    );
    for address in [first, second] {
        let (status, text) = get(address, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.contains("holdfast_intents{state=\"held\"} 0\n"), "{text}");
    }
    assert_eq!(get(second, "/livez").await.0, 404);
    // A driver that has gone is what liveness is about.
    rig.driver.abort();
    let (status, text) = get(first, "/livez").await;
    assert_eq!(
        (status, text.as_str()),
        (503, "engine: the agent is shutting down\n")
    );
    assert_eq!(get(first, "/metrics").await.0, 503);
    // Told in the error: which address.
    let error = http::serve(rig.sources.clone(), first, None).await.unwrap_err();
    assert_eq!(error.address, first);
}

/// A clock that stands still.
struct Still;

impl Clock for Still {
    fn now(&self) -> Now {
        Now {
            boot: Boot(1_000 * Boot::SECOND),
            wall_ms: 0,
        }
    }
}

/// On a paused clock, and without a listener: time passes as soon as nothing else can happen.
#[tokio::test(start_paused = true)]
async fn every_loop_that_hangs_is_named_with_its_age() {
    let wrong = async |sources: &Sources| -> Vec<String> {
        let checks = health::alive(sources).await;
        let wrong = |check: &health::Check| check.wrong.is_some().then(|| check.to_string());
        checks.iter().filter_map(wrong).collect()
    };
    let rig = Rig::new();
    let mut sources = rig.sources.clone();
    assert_eq!(wrong(&sources).await, [""; 0]);

    // A driver that hangs takes its commands no more, and has begun a round.
    let (commands, _nobody) = mpsc::channel(16);
    let (lanes, _jobs, health) = Lanes::new();
    lanes.round_begins(Boot(988 * Boot::SECOND));
    sources.clock = Arc::new(Still);
    sources.driver = Handle::new(commands);
    sources.lanes = health;
    assert_eq!(
        wrong(&sources).await,
        ["[-]engine failed: one round has lasted for 12.0s"]
    );
    lanes.round_ends();
    assert_eq!(
        wrong(&sources).await,
        ["[-]engine failed: it has not come round for 3s"]
    );

    // Of devices nobody hears.
    let mut sources = rig.sources.clone();
    let kept = Mutex::new(Vec::new());
    sources.links = Arc::new(move || {
        let (reply, answer) = oneshot::channel();
        kept.lock().unwrap().push(reply);
        answer
    });
    assert_eq!(
        wrong(&sources).await,
        ["[-]links failed: it has not come round for 3s"]
    );
    sources.links = Arc::new(|| oneshot::channel().1);
    assert_eq!(wrong(&sources).await, ["[-]links failed: it has ended"]);
}

// --- socket ------------------------------------------------------------------------------------------------

#[tokio::test]
async fn the_socket_is_for_root_alone_and_replaces_a_stale_one() {
    let rig = Rig::new();
    let path = rig.dir.path().join(socket::NAME);
    // What a killed agent leaves.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let (socket, client) = rig.serve();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    client.get::<Status>("/v1/status", PATIENCE).await.unwrap();
    assert!(matches!(
        socket::serve(rig.sources.clone(), rig.dir.path()),
        Err(SocketError::InUse(_))
    ));
    drop(socket);
    assert!(!path.exists());
    assert_eq!(std::fs::read_dir(rig.dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_successors_socket_is_not_removed_by_its_predecessor() {
    let rig = Rig::new();
    let (first, _) = rig.serve();
    std::fs::remove_file(rig.dir.path().join(socket::NAME)).unwrap();
    let (_second, client) = rig.serve();
    drop(first);
    client.get::<Status>("/v1/status", PATIENCE).await.unwrap();
}

#[tokio::test]
async fn a_question_has_its_answer_or_its_reason() {
    let rig = Rig::new();
    let (_socket, client) = rig.serve();
    rig.known.lock().unwrap().snapshot.node = "edge-1".to_owned();
    let status: Status = client.get("/v1/status", PATIENCE).await.unwrap();
    assert_eq!(status.node, "edge-1");
    assert_eq!(
        status.intents.held_by_reason,
        BTreeMap::from(HoldReason::ALL.map(|reason| (reason, 0)))
    );

    let refused = |error: ClientError| match error {
        ClientError::Refused { status, message } => (status, message),
        other => panic!("{other}"),
    };
    let error = client
        .get::<PolicyDetail>("/v1/policies/shop/dns", PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(
        refused(error),
        (
            StatusCode::NOT_FOUND,
            "no policy shop/dns selects a consumer on this node".to_owned()
        )
    );
    rig.policy_is(policy(State::Programmed, 3));
    let detail: PolicyDetail = client.get("/v1/policies/shop/dns", PATIENCE).await.unwrap();
    assert_eq!(detail.policy.covers, "0000000000000007");

    for (path, status) in [
        ("/v1/other", StatusCode::NOT_FOUND),
        (
            "/v1/wait?policy=dns&for=held&timeoutMs=0",
            StatusCode::BAD_REQUEST,
        ),
        (
            "/v1/wait?policy=shop/dns&attachment=web&for=held&timeoutMs=0",
            StatusCode::BAD_REQUEST,
        ),
        (
            "/v1/wait?policy=shop/dns&for=served&timeoutMs=0",
            StatusCode::BAD_REQUEST,
        ),
        ("/v1/wait?policy=shop/dns", StatusCode::BAD_REQUEST),
        ("/v1/why?policy=shop/dns&consumer=shop/c9", StatusCode::NOT_FOUND),
        ("/v1/why?policy=dns", StatusCode::BAD_REQUEST),
        ("/v1/why?policy=shop/dns&consumer=c9", StatusCode::BAD_REQUEST),
        ("/v1/why", StatusCode::BAD_REQUEST),
        ("/v1/diff?policy=dns", StatusCode::BAD_REQUEST),
        ("/v1/diff?some=true", StatusCode::BAD_REQUEST),
        ("/status", StatusCode::NOT_FOUND),
    ] {
        let error = client.get::<Waited>(path, PATIENCE).await.unwrap_err();
        assert_eq!(refused(error).0, status, "{path}");
    }
    rig.driver.abort();
    let error = client.get::<Status>("/v1/status", PATIENCE).await.unwrap_err();
    assert_eq!(refused(error).0, StatusCode::SERVICE_UNAVAILABLE);
}

/// A policy that was refused before anybody could know whom it is about.
#[tokio::test]
async fn a_policy_that_failed_without_a_consumer_is_a_no() {
    let rig = Rig::new();
    let (_socket, client) = rig.serve();
    rig.policy_is(policy(
        State::Failed(holdfast_engine::model::FailReason::Invalid),
        3,
    ));
    let why: Why = client.get("/v1/why?policy=shop/dns", PATIENCE).await.unwrap();
    assert_eq!((why.answer, why.looked_at, why.left_off), (Told::No, 0, 0));
    assert!(why.consumers.is_empty());
}

#[tokio::test]
async fn the_log_is_asked_and_changed() {
    let rig = Rig::new();
    let (_socket, client) = rig.serve();
    let filter = |filter: &str| LogFilter {
        filter: filter.to_owned(),
        configured: "info".to_owned(),
    };
    let asked: LogFilter = client.get("/v1/log", PATIENCE).await.unwrap();
    assert_eq!(asked, filter("info"));
    let wanted = |text: Option<&str>| SetLog {
        filter: text.map(str::to_owned),
    };
    let changed: LogFilter = client
        .put("/v1/log", &wanted(Some("debug")), PATIENCE)
        .await
        .unwrap();
    assert_eq!(changed, filter("debug"));
    let error = client
        .put::<LogFilter>("/v1/log", &wanted(Some("holdfast=loud")), PATIENCE)
        .await
        .unwrap_err();
    assert!(
        matches!(error, ClientError::Refused { status, .. } if status == StatusCode::BAD_REQUEST),
        "{error}"
    );
    let asked: LogFilter = client.get("/v1/log", PATIENCE).await.unwrap();
    assert_eq!(asked, filter("debug"));
    let back: LogFilter = client.put("/v1/log", &wanted(None), PATIENCE).await.unwrap();
    assert_eq!(back, filter("info"));
}

#[tokio::test]
async fn a_poke_carries_the_token() {
    let rig = Rig::new();
    let (_socket, client) = rig.serve();
    let poke = |token: Option<&str>, wait| Poke {
        ifindex: 7,
        token: token.map(str::to_owned),
        wait,
    };
    let poked: Poked = client
        .post("/v1/poke", &poke(Some("00000000000000ff"), true), PATIENCE)
        .await
        .unwrap();
    assert_eq!(poked.settled, Settled::Done);
    let poked: Poked = client
        .post("/v1/poke", &poke(None, false), PATIENCE)
        .await
        .unwrap();
    assert_eq!(poked.settled, Settled::Working);
    while rig.known.lock().unwrap().pokes.len() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(rig.known.lock().unwrap().pokes, [(7, Token::new(255)), (7, None)]);
    for wrong in ["", "ff", "0000000000000000", "zzzzzzzzzzzzzzzz"] {
        let answer: Result<Poked, _> = client.post("/v1/poke", &poke(Some(wrong), true), PATIENCE).await;
        assert!(
            matches!(answer, Err(ClientError::Refused { status, .. }) if status == StatusCode::BAD_REQUEST),
            "{wrong}"
        );
    }
}

#[tokio::test]
async fn a_wait_ends_with_the_state_the_generation_or_the_time() {
    let rig = Rig::new();
    let (_socket, client) = rig.serve();
    let wait = |query: &'static str| {
        let client = client.clone();
        tokio::spawn(async move {
            let path = format!("/v1/wait?policy=shop/dns&{query}");
            client.get::<Waited>(&path, PATIENCE).await.unwrap()
        })
    };
    // Nothing of it is known.
    assert_eq!(
        wait("for=programmed&timeoutMs=0").await.unwrap(),
        Waited {
            met: false,
            policy: None,
            intent: None
        }
    );
    let waiting = wait("for=programmed&generation=4&timeoutMs=4000");
    let held = policy(State::Held(HoldReason::IdentityMissing), 4);
    for (state, done) in [
        (policy(State::Programmed, 3), false),
        (held, false),
        (policy(State::Programmed, 4), true),
    ] {
        rig.policy_is(state);
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(waiting.is_finished(), done);
    }
    assert!(waiting.await.unwrap().met);
    let waited = wait("for=held&timeoutMs=20").await.unwrap();
    assert_eq!((waited.met, waited.policy.unwrap().generation), (false, 4));
}

#[test]
fn a_goal_is_a_state_at_a_generation() {
    for (goal, generation, met) in [
        (Goal::Programmed, None, true),
        (Goal::Programmed, Some(4), true),
        (Goal::Programmed, Some(3), true),
        (Goal::Programmed, Some(5), false),
        (Goal::Held, None, false),
    ] {
        assert_eq!(
            goal.is_met("Programmed", 4, generation),
            met,
            "{goal:?} {generation:?}"
        );
    }
}

#[tokio::test]
async fn nobody_there_is_told_apart_from_a_broken_answer() {
    let error = Client::new(Path::new("/nonexistent"))
        .get::<Status>("/v1/status", PATIENCE)
        .await
        .unwrap_err();
    assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
}
