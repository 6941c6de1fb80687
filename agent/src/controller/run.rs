//! The controller: watches, one task that owns what is known, and the writes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::{Boot, Now, ObjectName};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::election::Candidate;
use super::index::Lives;
use super::keeper::{Keeper, Outcome, Seen, Watched};
use super::news::{self, News};
use super::rollup::Clock;
use super::{objects, serve, writer};
use crate::apiserver::object::Body;
use crate::apiserver::reflect::Collection;
use crate::apiserver::{ApiServer, Cause};
use crate::report::Stamps;
use crate::serve::http::ListenError;

/// News that wait; who finds no place waits too.
const QUEUE: usize = 1024;
/// News that are taken in before anything is decided.
const BATCH: usize = 256;

/// What a controller is run with.
#[derive(Clone)]
pub struct Settings {
    /// The API server.
    pub api: ApiServer,
    /// Namespace of the nodes' leases.
    pub lease_namespace: String,
    /// Namespace of the leader's lease.
    pub namespace: String,
    /// Under which name it stands for that; nobody else has it.
    pub identity: String,
    /// `/metrics`, `/livez`, `/readyz`.
    pub listen: SocketAddr,
    /// Both clocks.
    pub clock: Arc<dyn crate::clock::Clock>,
}

/// A controller that runs. It ends when this is dropped, and frees the lease only by [`Running::end`].
pub struct Running {
    /// Where metrics and health are served.
    pub address: SocketAddr,
    candidate: Candidate,
    task: JoinHandle<()>,
    others: JoinSet<()>,
}

impl Running {
    /// When it has ended by itself, which it never should.
    pub async fn ended(&mut self) {
        // Either way it is over.
        let _ = (&mut self.task).await;
    }

    /// Whether it leads.
    #[must_use]
    pub fn leads(&self) -> watch::Receiver<bool> {
        self.candidate.leads.clone()
    }

    /// Ends it.
    pub async fn end(mut self) {
        self.others.abort_all();
        self.task.abort();
        self.candidate.end().await;
    }
}

/// What is shown of a controller.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Whether it leads.
    pub leads: bool,
    /// Watches that have not brought their list yet.
    pub missing: Vec<Watched>,
    /// Nodes with a consumer.
    pub lives: Lives,
    /// Nodes that are not programmed, counted once for each policy.
    pub laggards: u64,
    /// Policies that some node has not answered for yet, and since when on the boot clock.
    pub behind: Vec<(ObjectName, Boot)>,
    /// Writes of status so far, by how they went.
    pub writes: Writes,
    /// When each watch was last heard of.
    pub heard: BTreeMap<Watched, Boot>,
}

/// Writes by how they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    /// Done.
    pub ok: u64,
    /// The policy had another version by then.
    pub conflict: u64,
    /// Failed.
    pub error: u64,
}

/// Asks the task.
#[derive(Clone, Debug)]
pub(super) struct Handle(mpsc::Sender<oneshot::Sender<Figures>>);

impl Handle {
    /// What there is to show; none if the task does not come round in this time.
    pub(super) async fn figures(&self, patience: Duration) -> Option<Figures> {
        let ask = async {
            let (answer, answered) = oneshot::channel();
            self.0.send(answer).await.ok()?;
            answered.await.ok()
        };
        tokio::time::timeout(patience, ask).await.ok().flatten()
    }
}

/// Starts a controller.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn start(settings: Settings) -> Result<Running, ListenError> {
    let (seen, inbox) = mpsc::channel(QUEUE);
    let (ask, questions) = mpsc::channel(16);
    let stamps = Stamps::default();
    let mut others = JoinSet::new();
    let address = serve::spawn(
        &mut others,
        settings.listen,
        Handle(ask),
        Arc::clone(&settings.clock),
        stamps.clone(),
    )
    .await?;
    let candidate = Candidate::spawn(
        settings.api.client().clone(),
        &settings.namespace,
        settings.identity.clone(),
    );
    let mut follow = Follow {
        api: &settings.api,
        clock: &settings.clock,
        seen: &seen,
        tasks: &mut others,
    };
    follow.one(objects::policies(None), Seen::Policies);
    follow.one(objects::attachments(None), Seen::Attachments);
    follow.one(objects::nodes(), Seen::Nodes);
    follow.one(objects::reports(), Seen::Reports);
    follow.one(objects::leases(&settings.lease_namespace), Seen::Leases);
    let controller = Controller {
        api: settings.api,
        clock: settings.clock,
        stamps,
        keeper: Keeper::default(),
        writes: JoinSet::new(),
        counts: Writes::default(),
        heard: BTreeMap::new(),
        silent: BTreeMap::new(),
        failing: false,
    };
    let task = tokio::spawn(controller.run(inbox, questions, candidate.leads.clone()));
    Ok(Running {
        address,
        candidate,
        task,
        others,
    })
}

struct Follow<'a> {
    api: &'a ApiServer,
    clock: &'a Arc<dyn crate::clock::Clock>,
    seen: &'a mpsc::Sender<Seen>,
    tasks: &'a mut JoinSet<()>,
}

impl Follow<'_> {
    fn one<B: Body>(&mut self, collection: Collection, wrap: fn(News<B>) -> Seen) {
        self.tasks.spawn(news::follow(
            self.api.clone(),
            collection,
            Arc::clone(self.clock),
            self.seen.clone(),
            wrap,
        ));
    }
}

struct Controller {
    api: ApiServer,
    clock: Arc<dyn crate::clock::Clock>,
    stamps: Stamps,
    keeper: Keeper,
    writes: JoinSet<writer::Done>,
    counts: Writes,
    heard: BTreeMap<Watched, Boot>,
    /// Watches that fail, in the way that has been said.
    silent: BTreeMap<Watched, Cause>,
    failing: bool,
}

impl Controller {
    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Seen>,
        mut questions: mpsc::Receiver<oneshot::Sender<Figures>>,
        mut leads: watch::Receiver<bool>,
    ) {
        let mut complete = false;
        loop {
            let clock = self.now();
            for write in self.keeper.decide(clock) {
                self.writes.spawn(writer::write(self.api.clone(), write));
            }
            if !complete && self.keeper.missing().next().is_none() {
                complete = true;
                tracing::info!("all that is watched is known");
            }
            let wait = self
                .keeper
                .next_deadline(clock.mono)
                .map(|at| Duration::from_nanos(at.saturating_sub(clock.mono)));
            // Cancel safety: channels and the set lose nothing when they are not chosen.
            tokio::select! {
                seen = inbox.recv() => {
                    let Some(seen) = seen else { return };
                    self.take(seen);
                    for _ in 0..BATCH {
                        let Ok(seen) = inbox.try_recv() else { break };
                        self.take(seen);
                    }
                }
                Some(done) = self.writes.join_next() => {
                    // A task that panics ends the process; none is aborted.
                    if let Ok(done) = done {
                        self.done(done);
                    }
                }
                changed = leads.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let leads = *leads.borrow_and_update();
                    self.keeper.lead(leads);
                }
                Some(answer) = questions.recv() => {
                    let figures = self.figures();
                    // Whoever asked may have gone.
                    let _ = answer.send(figures);
                }
                () = sleep(wait.unwrap_or(IDLE)) => {}
            }
        }
    }

    fn now(&self) -> Clock {
        let now: Now = self.clock.now();
        self.stamps.observe(now);
        Clock {
            mono: now.boot.0,
            distance_ms: self.stamps.distance_ms(),
        }
    }

    fn take(&mut self, seen: Seen) {
        let clock = self.now();
        match seen.of() {
            // Each kind of failure is said once, and that it is over.
            (watched, Some(failure)) => {
                if self.silent.insert(watched, failure.cause) != Some(failure.cause) {
                    let (what, reason) = (watched.as_str(), &failure.message);
                    tracing::warn!(what, reason, "cannot be watched; what is known of it stays");
                }
            }
            (watched, None) => {
                self.heard.insert(watched, Boot(clock.mono));
                if self.silent.remove(&watched).is_some() {
                    tracing::info!(what = watched.as_str(), "can be watched again");
                }
            }
        }
        self.keeper.take(seen, clock);
    }

    fn done(&mut self, done: writer::Done) {
        *match done.outcome {
            Outcome::Written { .. } => &mut self.counts.ok,
            Outcome::Conflict => &mut self.counts.conflict,
            Outcome::Failed => &mut self.counts.error,
        } += 1;
        match &done.problem {
            Some(reason) if !std::mem::replace(&mut self.failing, true) => {
                tracing::warn!(reason, "a status cannot be written; it is tried again");
            }
            None if std::mem::take(&mut self.failing) => tracing::info!("a status is written again"),
            _ => {}
        }
        let now = self.now().mono;
        self.keeper.written(&done.uid, done.outcome, now);
    }

    fn figures(&self) -> Figures {
        Figures {
            leads: self.keeper.leads(),
            missing: self.keeper.missing().collect(),
            lives: self.keeper.lives(self.now().mono),
            laggards: self.keeper.laggards(),
            behind: self
                .keeper
                .behind()
                .map(|(name, since)| (name.clone(), Boot(since)))
                .collect(),
            writes: self.counts,
            heard: self.heard.clone(),
        }
    }
}

/// How long nothing is looked at when nothing is known that could come.
const IDLE: Duration = Duration::from_secs(60);
