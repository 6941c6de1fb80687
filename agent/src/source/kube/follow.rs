//! Which scopes are followed, and what the engine is told of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::{Boot, Now, ObjectChange};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::object::{self, Seen};
use super::saved::{self, Keeper};
use super::set::{Scope, Set};
use crate::api::v1alpha1::{API_VERSION, Kind};
use crate::apiserver::reflect::{LastHeard, News, Reflector};
use crate::apiserver::{ApiServer, Backoff, Cause, Failure, OtherNode, jitter};
use crate::clock::Clock;
use crate::loops::Counter;
use crate::source::good::plain_problem;
use crate::source::{SavedAt, SourceNews, SourceProblem, SourceStatus};

/// Namespaces that are followed one by one; when there are more, the policies of all are.
const MANY: usize = 64;
/// So few namespaces are followed one by one again.
const FEW: usize = 48;
/// How long a namespace is followed after its last attachment here has gone: the next one often comes soon.
const LINGER: Duration = Duration::from_secs(300);
/// How often proofs of life are told although nothing happens.
const TICK: Duration = Duration::from_secs(5);
/// Least time between two looks at all objects for their number and their problems.
const LOOK: Duration = Duration::from_millis(200);
/// How long a start waits at most before it asks for anything, when a saved set serves: nodes often start together.
const START_TOGETHER: Duration = Duration::from_secs(1);
/// So often an API server may refuse to say who we are before its objects are believed all the same.
const MAX_REFUSALS: u32 = 5;
/// News that wait; who finds no place waits too.
const QUEUE: usize = 256;
/// News that are taken in at once.
const BATCH: usize = 256;

/// Which API server, and whose objects.
#[derive(Clone, Debug)]
pub struct Config {
    /// The API server.
    pub api: ApiServer,
    /// Attachments of other nodes are not asked for.
    pub node: String,
    /// Where the last complete set is saved.
    pub state_dir: PathBuf,
}

/// Starts the task that follows the objects. It ends when the receiver is gone, after what was not saved yet is. `rounds`
/// counts lists and watches, and those that failed.
#[must_use]
pub fn spawn(
    config: Config,
    news: mpsc::Sender<SourceNews>,
    clock: Arc<dyn Clock>,
    rounds: Arc<Counter>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let (out, inbox) = mpsc::channel(QUEUE);
        let mut follower = Follower {
            set: Set::new(&config.node),
            keeper: Keeper::new(&config.state_dir, &config.node, None),
            config,
            news,
            clock,
            rounds,
            out,
            followed: BTreeMap::new(),
            next_id: 0,
            complete: false,
            lingering: BTreeMap::new(),
            kept: None,
            other_node: None,
            said: BTreeSet::new(),
            status: None,
            status_dirty: true,
            status_not_before: Instant::now(),
            alive: 0,
            saved: 0,
        };
        // Ends with an error only when nobody listens any more.
        let _ = follower.run(inbox).await;
        if follower.is_complete() {
            follower.keeper.finish(&follower.set).await;
        }
    })
}

/// Nobody listens any more.
struct Closed;

struct Follower {
    config: Config,
    news: mpsc::Sender<SourceNews>,
    clock: Arc<dyn Clock>,
    rounds: Arc<Counter>,
    out: mpsc::Sender<(u64, News<Seen>)>,
    set: Set,
    keeper: Keeper,
    followed: BTreeMap<Scope, Followed>,
    next_id: u64,
    /// The set was complete once in this life.
    complete: bool,
    /// Namespaces without an attachment that are still followed, and until when.
    lingering: BTreeMap<String, Instant>,
    /// The namespaces whose policies are in force; none before the attachments are known.
    kept: Option<BTreeSet<String>>,
    other_node: Option<OtherNode>,
    /// Failures that have been logged, until everything goes again.
    said: BTreeSet<(Option<Kind>, Cause)>,
    /// What was told last.
    status: Option<SourceStatus>,
    /// It may be another one now.
    status_dirty: bool,
    status_not_before: Instant,
    /// Proof of life that was told last, on the boot clock.
    alive: u64,
    /// Until when the disk has the set, as that was told last.
    saved: u64,
}

struct Followed {
    id: u64,
    task: JoinHandle<()>,
    heard: Arc<LastHeard>,
    /// It was listed as a whole.
    complete: bool,
    failure: Option<Failure>,
    /// What is wrong with objects of which nobody knows which they are.
    unknown: Vec<String>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follower {
    async fn run(&mut self, mut inbox: mpsc::Receiver<(u64, News<Seen>)>) -> Result<(), Closed> {
        let delay = if self.load().await? {
            jitter(START_TOGETHER)
        } else {
            Duration::ZERO
        };
        self.tell_status().await?;
        self.identify(delay).await?;
        let mut tick = Instant::now() + TICK;
        loop {
            self.settle().await?;
            let due = [Some(tick), self.status_due(), self.save_due()];
            let due = due.into_iter().flatten().min().unwrap_or(tick);
            // Cancel safety: `recv` loses nothing, `written` is cancel safe, the others hold nothing.
            let first = tokio::select! {
                () = self.news.closed() => return Err(Closed),
                first = inbox.recv() => first,
                () = self.keeper.written() => {
                    self.status_dirty = true;
                    None
                }
                () = tokio::time::sleep_until(due) => None,
            };
            if tick <= Instant::now() {
                tick = Instant::now() + TICK;
                self.status_dirty = true;
            }
            let mut changes = Vec::new();
            let mut next = first;
            for _ in 0..BATCH {
                let Some((id, news)) = next else { break };
                self.take(id, news, &mut changes).await?;
                next = inbox.try_recv().ok();
            }
            if let Some((id, news)) = next {
                self.take(id, news, &mut changes).await?;
            }
            self.tell_changes(changes).await?;
        }
    }

    /// Puts the saved set in force; whether there is one.
    async fn load(&mut self) -> Result<bool, Closed> {
        let (state_dir, node) = (self.config.state_dir.clone(), self.config.node.clone());
        let loaded = tokio::task::spawn_blocking(move || saved::load(&state_dir, &node)).await;
        let loaded = match loaded {
            Ok(Ok(Some(loaded))) => loaded,
            Ok(Ok(None)) => {
                tracing::info!(
                    "no set of objects is saved: nothing new is served before the API server answers"
                );
                return Ok(false);
            }
            Ok(Err(error)) => {
                tracing::warn!(
                    %error,
                    "the saved set of objects cannot be used: nothing new is served before the API server answers"
                );
                return Ok(false);
            }
            Err(_) => return Ok(false),
        };
        let now = self.clock.now();
        let age_ms = now.wall_ms.saturating_sub(loaded.until_ms);
        let count = loaded.lines.len();
        let changes = self.set.load(loaded.lines);
        self.keeper = Keeper::new(
            &self.config.state_dir,
            &self.config.node,
            Some(self.set.revision()),
        );
        tracing::info!(
            objects = count,
            age = ?Duration::from_secs(u64::try_from(age_ms / 1_000).unwrap_or_default()),
            "the saved set of objects is in force until the API server answers"
        );
        self.send(SourceNews::Changes(changes)).await?;
        self.send(SourceNews::SavedComplete).await?;
        self.send(SourceNews::Saved(SavedAt { seen: now, age_ms }))
            .await?;
        Ok(true)
    }

    /// Asks who we are until it is known: another node's token shows another node's objects as ours.
    async fn identify(&mut self, delay: Duration) -> Result<(), Closed> {
        let mut backoff = Backoff::default();
        let mut wait = delay;
        let mut refusals = 0;
        loop {
            tokio::select! {
                () = self.news.closed() => return Err(Closed),
                () = tokio::time::sleep(wait) => {}
            }
            self.rounds.run();
            let asked = tokio::select! {
                () = self.news.closed() => return Err(Closed),
                asked = self.config.api.who_am_i() => asked,
            };
            wait = match asked {
                Ok(identity) => match identity.of_node(&self.config.node) {
                    Ok(()) => break,
                    Err(other) => {
                        self.rounds.error();
                        if self.other_node.is_none() {
                            tracing::error!("{other}; nothing is read from the API server");
                        }
                        self.other_node = Some(other);
                        Backoff::LAST
                    }
                },
                // An API server that does not say it shows objects all the same.
                Err(failure) if matches!(failure.code(), Some(404 | 405)) => break,
                Err(failure) => {
                    // It also forbids what it allows while it starts.
                    if failure.code() == Some(403) {
                        refusals += 1;
                    }
                    if refusals > MAX_REFUSALS {
                        break;
                    }
                    self.rounds.error();
                    self.say(None, &failure);
                    backoff.next(failure.retry_after)
                }
            };
            self.tell_status().await?;
        }
        self.other_node = None;
        Ok(())
    }

    // --- what the followers say ------------------------------------------------------------------------------

    async fn take(
        &mut self,
        id: u64,
        news: News<Seen>,
        changes: &mut Vec<ObjectChange>,
    ) -> Result<(), Closed> {
        // What a follower said that has been stopped since is void.
        let Some((scope, followed)) = self.followed.iter_mut().find(|(_, followed)| followed.id == id) else {
            return Ok(());
        };
        self.status_dirty = true;
        let scope = scope.clone();
        let fresh = self.complete.then(|| self.clock.now().wall_ms);
        match news {
            News::Began => {
                followed.unknown.clear();
                self.set.begin(&scope);
            }
            News::Part(seen, unknown) => {
                self.set.part(&scope, &seen, unknown);
                for object in &seen {
                    self.set.show(object, fresh, changes);
                }
            }
            News::Listed => {
                followed.complete = true;
                followed.unknown = self.set.complete(&scope, changes);
                for why in &followed.unknown {
                    say_unknown(&scope, why);
                }
            }
            News::Shown(seen) => self.set.show(&seen, fresh, changes),
            News::Deleted(seen) => self.set.delete(&seen, changes),
            News::Unknown(why) => {
                say_unknown(&scope, &why);
                followed.unknown.push(why);
                followed.unknown.truncate(8);
            }
            News::Alive => {}
            News::Failing(failure) => {
                followed.failure = Some(failure.clone());
                self.say(Some(scope.kind()), &failure);
            }
            News::Going => {
                followed.failure = None;
                if self.followed.values().all(|followed| followed.failure.is_none()) && !self.said.is_empty()
                {
                    self.said.clear();
                    tracing::info!("the API server shows its objects again");
                }
            }
        }
        Ok(())
    }

    /// One line for each kind of failure, until everything goes again.
    fn say(&mut self, kind: Option<Kind>, failure: &Failure) {
        if self.said.insert((kind, failure.cause)) {
            let hint = hint(kind, failure.cause);
            tracing::warn!("{failure}{hint}; what was known stays in force, and it is tried again");
        }
    }

    async fn tell_changes(&mut self, changes: Vec<ObjectChange>) -> Result<(), Closed> {
        if !changes.is_empty() {
            self.send(SourceNews::Changes(changes)).await?;
        }
        let arrived = self.set.arrived();
        if !arrived.is_empty() {
            self.send(SourceNews::Arrived(arrived)).await?;
        }
        Ok(())
    }

    // --- scopes ----------------------------------------------------------------------------------------------

    /// Follows what must be followed, and tells what has come of it.
    async fn settle(&mut self) -> Result<(), Closed> {
        let mut changes = Vec::new();
        self.choose_scopes(&mut changes);
        self.tell_changes(changes).await?;
        if !self.complete && self.is_complete() {
            self.complete = true;
            tracing::info!("the set of objects is complete");
            self.send(SourceNews::Complete).await?;
        }
        if self.is_complete() {
            self.keeper.keep(&self.set);
        }
        if self.status_due().is_some_and(|due| due <= Instant::now()) {
            self.tell_status().await?;
        }
        self.tell_alive().await
    }

    fn choose_scopes(&mut self, changes: &mut Vec<ObjectChange>) {
        self.follow(Scope::Attachments);
        let here = self.set.namespaces();
        let wanted = self.wanted(&here);
        let everything = self.followed.get(&Scope::Everything);
        let many = wanted.len() > if everything.is_some() { FEW } else { MANY };
        if many {
            self.follow(Scope::Everything);
            if self.is_listed(&Scope::Everything) {
                self.followed
                    .retain(|scope, _| !matches!(scope, Scope::Namespace(_)));
                self.kept = None;
            }
            return;
        }
        for namespace in &wanted {
            self.follow(Scope::Namespace(namespace.clone()));
        }
        if wanted
            .iter()
            .all(|namespace| self.is_listed(&Scope::Namespace(namespace.clone())))
        {
            self.followed.remove(&Scope::Everything);
        }
        self.followed.retain(|scope, _| match scope {
            Scope::Namespace(namespace) => wanted.contains(namespace),
            Scope::Attachments | Scope::Everything => true,
        });
        if self.is_listed(&Scope::Attachments)
            && !self.followed.contains_key(&Scope::Everything)
            && self.kept.as_ref() != Some(&wanted)
        {
            self.set.keep_namespaces(&wanted, changes);
            self.kept = Some(wanted);
        }
    }

    /// Namespaces with an attachment here, and those that had one a moment ago.
    fn wanted(&mut self, here: &BTreeSet<String>) -> BTreeSet<String> {
        let now = Instant::now();
        for scope in self.followed.keys() {
            if let Scope::Namespace(namespace) = scope
                && !here.contains(namespace)
            {
                self.lingering.entry(namespace.clone()).or_insert(now + LINGER);
            }
        }
        self.lingering
            .retain(|namespace, until| *until > now && !here.contains(namespace));
        here.iter().chain(self.lingering.keys()).cloned().collect()
    }

    fn is_listed(&self, scope: &Scope) -> bool {
        self.followed.get(scope).is_some_and(|followed| followed.complete)
    }

    /// Whether everything that is followed was listed as a whole.
    fn is_complete(&self) -> bool {
        !self.followed.is_empty()
            && self.is_listed(&Scope::Attachments)
            && (self.is_listed(&Scope::Everything)
                || self.followed.values().all(|followed| followed.complete))
    }

    fn follow(&mut self, scope: Scope) {
        if self.followed.contains_key(&scope) {
            return;
        }
        let id = self.next_id;
        self.next_id += 1;
        let heard = Arc::new(LastHeard::default());
        let kind = scope.kind();
        let reflector = Reflector {
            api: self.config.api.clone(),
            collection: object::collection(&scope, &self.config.node),
            read: Box::new(move |json| Seen::read(kind, json)),
            wrap: move |news| Some((id, news)),
            out: self.out.clone(),
            heard: Arc::clone(&heard),
            clock: Arc::clone(&self.clock),
            rounds: Arc::clone(&self.rounds),
        };
        let followed = Followed {
            id,
            task: tokio::spawn(reflector.run()),
            heard,
            complete: false,
            failure: None,
            unknown: Vec::new(),
        };
        self.followed.insert(scope, followed);
    }

    // --- how it is -------------------------------------------------------------------------------------------

    fn status_due(&self) -> Option<Instant> {
        self.status_dirty.then_some(self.status_not_before)
    }

    fn save_due(&self) -> Option<Instant> {
        self.is_complete().then(|| self.keeper.due(&self.set)).flatten()
    }

    async fn tell_status(&mut self) -> Result<(), Closed> {
        self.status_not_before = Instant::now() + LOOK;
        self.status_dirty = false;
        let status = self.set.status(self.problems());
        if self.status.as_ref() != Some(&status) {
            self.status = Some(status.clone());
            self.send(SourceNews::Condition(status)).await?;
        }
        Ok(())
    }

    /// What is wrong beside the objects.
    fn problems(&self) -> Vec<SourceProblem> {
        let mut problems = Vec::new();
        if let Some(other) = &self.other_node {
            problems.push(plain_problem("API server", other.to_string()));
        }
        let mut failures = BTreeMap::new();
        for (scope, followed) in &self.followed {
            if let Some(failure) = &followed.failure {
                failures.entry((scope.kind(), failure.cause)).or_insert(failure);
            }
        }
        for ((kind, cause), failure) in failures {
            let reason = format!("{failure}{}", hint(Some(kind), cause));
            problems.push(plain_problem(&format!("API server, {kind}"), reason));
        }
        for (scope, followed) in &self.followed {
            for why in &followed.unknown {
                problems.push(plain_problem(
                    scope.kind().as_str(),
                    format!("an object without a name: {why}"),
                ));
            }
        }
        if let Some(failure) = self.keeper.failure() {
            problems.push(plain_problem(
                &self.keeper.path().display().to_string(),
                failure.to_owned(),
            ));
        }
        problems
    }

    /// Tells until when everything that is followed was heard of, and what the disk has of it.
    async fn tell_alive(&mut self) -> Result<(), Closed> {
        let heard = self
            .followed
            .values()
            .map(|followed| followed.heard.boot_ns())
            .min();
        let heard = heard.unwrap_or_default();
        let now = self.clock.now();
        let age = now.boot.since(Boot(heard));
        let at = Now {
            boot: Boot(heard),
            wall_ms: now
                .wall_ms
                .saturating_sub(i64::try_from(age / Boot::MILLI).unwrap_or(i64::MAX)),
        };
        if heard > self.alive {
            self.alive = heard;
            self.send(SourceNews::Alive(at)).await?;
        }
        if heard > self.saved && self.is_complete() && self.keeper.has(&self.set) {
            self.saved = heard;
            self.keeper.touch();
            self.send(SourceNews::Saved(SavedAt { seen: at, age_ms: 0 }))
                .await?;
        }
        Ok(())
    }

    async fn send(&self, news: SourceNews) -> Result<(), Closed> {
        self.news.send(news).await.map_err(|_| Closed)
    }
}

fn say_unknown(scope: &Scope, why: &str) {
    let kind = scope.kind();
    tracing::warn!(%kind, why, "the API server shows an object of which nobody knows which it is: nothing is removed");
}

/// What an operator can do about it.
fn hint(kind: Option<Kind>, cause: Cause) -> String {
    let kind = kind.map_or("objects", Kind::as_str);
    match cause {
        Cause::Answer(404) => format!(" (does the cluster have the CRD of {kind}, {API_VERSION}?)"),
        Cause::Answer(401 | 403) => format!(" (may this agent list and watch {kind}?)"),
        _ => String::new(),
    }
}
