//! Follows the objects of one collection: lists them, watches them, and begins again when that ends. It never gives up, and
//! says what it hears to one queue.
//!
//! A watch ends after a while by its own parameter, and nothing is waited for longer than that and a little: a connection
//! that somebody swallows is noticed, and every line, bookmark and end of a watch is a proof of life.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::http::Request;
use hyper::http::header::{ACCEPT_ENCODING, HeaderValue};
use kube::core::params::{ListParams, WatchParams};
use kube::core::{Request as Path, Status};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{ApiServer, Backoff, Cause, Chunks, Failure, PATIENCE};
use crate::clock::Clock;
use crate::loops::Counter;

/// Objects of a page: what is in memory at once.
const PAGE: u32 = 500;
/// A watch ends by itself after so long, unless its collection says otherwise.
const ROUND: Duration = Duration::from_secs(60);
/// A watch that has said nothing for so much longer is not there any more.
const GRACE: Duration = Duration::from_secs(10);
/// A watch that ends sooner has not lived: the next one waits.
const LIVED: Duration = Duration::from_secs(5);
/// Longest line of a watch: an object has at most 1.5 MiB in etcd.
const MAX_LINE: usize = 8 << 20;
/// A watch that failed so often in a row does not go on from where it was.
const RESUMES: u32 = 3;
/// So long after a deletion was shown it is asked whether objects of that kind can still be: when their definition is deleted,
/// so are they, one by one.
const DOUBT: Duration = Duration::from_millis(200);

/// What is followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collection {
    /// Its path: `/apis/holdfast.dev/v1alpha1/namespaces/shop/routepolicies`.
    path: String,
    /// Only objects with these fields: `spec.node=edge-1`.
    fields: Option<String>,
    /// Only metadata are asked for.
    metadata_only: bool,
    /// How long one request of the watch lasts: the longest time between two proofs of life.
    round: Duration,
    /// Its objects are what a definition says, which may be deleted.
    definition: Option<Definition>,
}

/// Where it is said what a definition brings.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Definition {
    path: String,
    plural: String,
}

impl Collection {
    /// All objects of a resource, in one namespace or in all. `api` is group and version, `v1` for the core group.
    #[must_use]
    pub fn new(api: &str, namespace: Option<&str>, plural: &str) -> Self {
        let root = if api.contains('/') { "apis" } else { "api" };
        let namespace = namespace.map_or_else(String::new, |namespace| format!("namespaces/{namespace}/"));
        Self {
            path: format!("/{root}/{api}/{namespace}{plural}"),
            fields: None,
            metadata_only: false,
            round: ROUND,
            definition: None,
        }
    }

    /// Its objects are what a definition (CRD) of this group and version says. While that is being deleted, so are they, one
    /// by one: then nothing that goes is believed to be gone.
    #[must_use]
    pub fn with_definition(self, api: &str, plural: &str) -> Self {
        Self {
            definition: Some(Definition {
                path: format!("/apis/{api}"),
                plural: plural.to_owned(),
            }),
            ..self
        }
    }

    /// Only objects with these fields.
    #[must_use]
    pub fn with_fields(self, fields: impl Into<String>) -> Self {
        Self {
            fields: Some(fields.into()),
            ..self
        }
    }

    /// Only their metadata: for what has much else.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self {
            metadata_only: true,
            ..self
        }
    }

    /// With a proof of life at least as often.
    #[must_use]
    pub fn with_round(self, round: Duration) -> Self {
        Self { round, ..self }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    fn request(&self) -> Path {
        Path::new(&self.path)
    }
}

/// An object, as whoever follows reads it.
pub trait Shown: Sized {
    /// Its resource version; empty if it has none.
    fn version(&self) -> &str;
}

/// What a follower says.
#[derive(Debug)]
pub enum News<T> {
    /// A list begins; what an earlier one had not finished is void.
    Began,
    /// A part of it, and what is wrong with objects of which nobody knows which they are.
    Part(Vec<T>, Vec<String>),
    /// It is complete.
    Listed,
    /// An object is there, new or changed.
    Shown(Box<T>),
    /// An object was deleted.
    Deleted(Box<T>),
    /// An object changed, and nobody knows which.
    Unknown(String),
    /// A watch has begun, or says that nothing happens.
    Alive,
    /// It does not go, for now.
    Failing(Failure),
    /// It goes again.
    Going,
}

/// Nobody listens any more.
struct Closed;

/// When something was heard last, on the boot clock.
#[derive(Debug, Default)]
pub struct LastHeard(AtomicU64);

impl LastHeard {
    /// On the boot clock, nanoseconds; 0 = never.
    #[must_use]
    pub fn boot_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Reads an object, as JSON; or says why it cannot be told which object it is.
pub type Read<T> = Box<dyn Fn(&str) -> Result<T, String> + Send + Sync>;

/// Follows one collection.
pub struct Reflector<T, W, M> {
    /// The API server.
    pub api: ApiServer,
    /// What is followed.
    pub collection: Collection,
    /// Reads its objects.
    pub read: Read<T>,
    /// Makes the listener's own kind of news, if it wants any.
    pub wrap: W,
    /// Who listens.
    pub out: mpsc::Sender<M>,
    /// When something was heard last.
    pub heard: Arc<LastHeard>,
    /// By which clock.
    pub clock: Arc<dyn Clock>,
    /// Lists and watches, and those that failed.
    pub rounds: Arc<Counter>,
}

/// How a watch ended.
enum Ended {
    /// As it should.
    Well,
    /// What it wanted to go on from is too old.
    Expired,
    /// Something that it has shown could not be believed: it begins anew.
    Void(Failure),
    /// It did not go.
    Failed(Failure),
}

impl<T: Shown, W: FnMut(News<T>) -> Option<M>, M> Reflector<T, W, M> {
    /// Runs until nobody listens.
    pub async fn run(mut self) {
        // Ends with an error only when nobody listens any more.
        let _ = self.follow().await;
    }

    async fn follow(&mut self) -> Result<(), Closed> {
        let mut backoff = Backoff::default();
        let mut failed = false;
        loop {
            self.rounds.run();
            let wait = match self.list().await? {
                Ok(mut version) => self.watch_on(&mut version, &mut backoff, &mut failed).await?,
                Err(failure) => {
                    let wait = backoff.next(failure.retry_after);
                    self.failing(failure, &mut failed).await?;
                    Some(wait)
                }
            };
            if let Some(wait) = wait {
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Watches from this version on, again and again, until a new list is needed: after this wait.
    async fn watch_on(
        &mut self,
        version: &mut String,
        backoff: &mut Backoff,
        failed: &mut bool,
    ) -> Result<Option<Duration>, Closed> {
        let mut failures = 0;
        loop {
            let begun = Instant::now();
            self.rounds.run();
            let ended = self.watch(version, failed).await?;
            let lived = begun.elapsed() >= LIVED;
            if lived {
                backoff.reset();
                failures = 0;
            }
            match ended {
                Ended::Well if lived => {}
                Ended::Well => tokio::time::sleep(backoff.next(None)).await,
                Ended::Expired => return Ok((!lived).then(|| backoff.next(None))),
                Ended::Void(failure) => {
                    let wait = backoff.next(failure.retry_after);
                    self.failing(failure, failed).await?;
                    return Ok(Some(wait));
                }
                Ended::Failed(failure) => {
                    failures += 1;
                    let wait = backoff.next(failure.retry_after);
                    self.failing(failure, failed).await?;
                    if failures >= RESUMES {
                        return Ok(Some(wait));
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    /// Lists everything; gives the version to go on from.
    async fn list(&mut self) -> Result<Result<String, Failure>, Closed> {
        self.say(News::Began).await?;
        let mut token = None;
        loop {
            let page = match self.page(token.as_deref()).await {
                Ok(page) => page,
                Err(failure) => return Ok(Err(failure)),
            };
            self.hear();
            let (mut seen, mut unknown) = (Vec::new(), Vec::new());
            for item in &page.items {
                match (self.read)(item.get()) {
                    Ok(object) => seen.push(object),
                    Err(why) => unknown.push(why),
                }
            }
            self.say(News::Part(seen, unknown)).await?;
            match page.metadata.r#continue {
                Some(next) if !next.is_empty() => token = Some(next),
                _ => {
                    // An empty list is a reason to remove everything.
                    if let Err(failure) = self.defined().await {
                        return Ok(Err(failure));
                    }
                    self.say(News::Listed).await?;
                    return Ok(Ok(page.metadata.resource_version));
                }
            }
        }
    }

    async fn page(&self, token: Option<&str>) -> Result<Page, Failure> {
        let mut params = ListParams::default().limit(PAGE);
        params.field_selector.clone_from(&self.collection.fields);
        params.continue_token = token.map(str::to_owned);
        let request = self.collection.request();
        let request = if self.collection.metadata_only {
            request.list_metadata(&params)
        } else {
            request.list(&params)
        };
        let request = request.map_err(|error| Failure::garbled(error.to_string()))?;
        self.api.read(request, PATIENCE).await
    }

    /// Watches once.
    async fn watch(&mut self, version: &mut String, failed: &mut bool) -> Result<Ended, Closed> {
        let request = match self.watch_request(version) {
            Ok(request) => request,
            Err(failure) => return Ok(Ended::Failed(failure)),
        };
        let chunks = match self.api.open(request, PATIENCE).await {
            Ok(chunks) => chunks,
            Err(failure) => return Ok(ended(failure)),
        };
        self.hear();
        if std::mem::take(failed) {
            self.say(News::Going).await?;
        }
        self.say(News::Alive).await?;
        let mut lines = Lines::new(chunks, self.collection.round + GRACE);
        let mut deleted = Deleted::default();
        loop {
            // Cancel safety: a line that is not whole yet stays where it is.
            let line = tokio::select! {
                biased;
                line = lines.next() => line,
                () = deleted.due() => {
                    if let Err(failure) = self.believe(&mut deleted).await? {
                        return Ok(Ended::Void(failure));
                    }
                    continue;
                }
            };
            let ended = match line {
                Ok(None) => {
                    self.hear();
                    Some(Ended::Well)
                }
                Err(failure) => Some(ended(failure)),
                Ok(Some(line)) => {
                    self.hear();
                    self.line(&line, version, &mut deleted).await?
                }
            };
            if let Some(ended) = ended {
                deleted.due_if_any().await;
                return Ok(match self.believe(&mut deleted).await? {
                    Ok(()) => ended,
                    Err(failure) => Ended::Void(failure),
                });
            }
        }
    }

    /// Tells deletions, if they are such.
    async fn believe(&mut self, deleted: &mut Deleted<T>) -> Result<Result<(), Failure>, Closed> {
        let objects = std::mem::take(&mut deleted.objects);
        if objects.is_empty() {
            return Ok(Ok(()));
        }
        if let Err(failure) = self.defined().await {
            return Ok(Err(failure));
        }
        for object in objects {
            self.say(News::Deleted(object)).await?;
        }
        Ok(Ok(()))
    }

    /// Whether objects of this kind can be: not while their definition is being deleted, which an API server shows by taking
    /// none any more.
    async fn defined(&self) -> Result<(), Failure> {
        let Some(definition) = &self.collection.definition else {
            return Ok(());
        };
        let request = Request::get(&definition.path)
            .body(Vec::new())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        let found: Discovery = match self.api.read(request, PATIENCE).await {
            Ok(found) => found,
            // Who may not know it goes by the objects alone.
            Err(failure) if failure.code() == Some(403) => return Ok(()),
            Err(failure) => return Err(failure),
        };
        let takes = |resource: &DiscoveryResource| {
            resource.name == definition.plural && resource.verbs.iter().any(|verb| verb == "create")
        };
        if found.resources.iter().any(takes) {
            Ok(())
        } else {
            Err(Failure::from_status(404, None))
        }
    }

    fn watch_request(&self, version: &str) -> Result<Request<Vec<u8>>, Failure> {
        let seconds = u32::try_from(self.collection.round.as_secs()).unwrap_or(u32::MAX);
        let mut params = WatchParams::default().timeout(seconds);
        params.field_selector.clone_from(&self.collection.fields);
        let request = self.collection.request();
        let request = if self.collection.metadata_only {
            request.watch_metadata(&params, version)
        } else {
            request.watch(&params, version)
        };
        let mut request = request.map_err(|error| Failure::garbled(error.to_string()))?;
        // A compressed stream may keep a line until there are more of them.
        request
            .headers_mut()
            .insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Ok(request)
    }

    /// Takes a line of a watch in; gives how the watch ends, if it does.
    async fn line(
        &mut self,
        line: &[u8],
        version: &mut String,
        deleted: &mut Deleted<T>,
    ) -> Result<Option<Ended>, Closed> {
        let event: Event<'_> = match serde_json::from_slice(line) {
            Ok(event) => event,
            Err(error) => return Ok(Some(Ended::Failed(Failure::garbled(error.to_string())))),
        };
        match event.kind {
            "BOOKMARK" => {
                if let Ok(bookmark) = serde_json::from_str::<Bookmark>(event.object.get()) {
                    *version = bookmark.metadata.resource_version;
                }
                self.say(News::Alive).await?;
            }
            "ERROR" => {
                let status: Option<Status> = serde_json::from_str(event.object.get()).ok();
                let code = status.as_ref().map_or(500, |status| status.code);
                return Ok(Some(ended(Failure::from_status(code, status.as_ref()))));
            }
            kind => match (self.read)(event.object.get()) {
                Ok(seen) => {
                    if !seen.version().is_empty() {
                        seen.version().clone_into(version);
                    }
                    match (kind, &self.collection.definition) {
                        ("DELETED", Some(_)) => deleted.add(seen),
                        ("DELETED", None) => self.say(News::Deleted(Box::new(seen))).await?,
                        _ => self.say(News::Shown(Box::new(seen))).await?,
                    }
                }
                Err(why) => self.say(News::Unknown(why)).await?,
            },
        }
        Ok(None)
    }

    fn hear(&self) {
        self.heard.0.store(self.clock.now().boot.0, Ordering::Relaxed);
    }

    async fn failing(&mut self, failure: Failure, failed: &mut bool) -> Result<(), Closed> {
        self.rounds.error();
        *failed = true;
        self.say(News::Failing(failure)).await
    }

    async fn say(&mut self, news: News<T>) -> Result<(), Closed> {
        match (self.wrap)(news) {
            Some(news) => self.out.send(news).await.map_err(|_| Closed),
            None => Ok(()),
        }
    }
}

fn ended(failure: Failure) -> Ended {
    if failure.cause == Cause::Answer(410) {
        Ended::Expired
    } else {
        Ended::Failed(failure)
    }
}

#[derive(Deserialize)]
struct Page {
    metadata: PageMetadata,
    items: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    resource_version: String,
    #[serde(default)]
    r#continue: Option<String>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata {
    resource_version: String,
}

#[derive(Deserialize)]
struct Discovery {
    resources: Vec<DiscoveryResource>,
}

#[derive(Deserialize)]
struct DiscoveryResource {
    name: String,
    verbs: Vec<String>,
}

/// Deletions that are not believed yet.
struct Deleted<T> {
    objects: Vec<Box<T>>,
    /// When the first of them is.
    due: Option<Instant>,
}

impl<T> Default for Deleted<T> {
    fn default() -> Self {
        Self {
            objects: Vec::new(),
            due: None,
        }
    }
}

impl<T> Deleted<T> {
    fn add(&mut self, object: T) {
        if self.objects.is_empty() {
            self.due = Some(Instant::now() + DOUBT);
        }
        self.objects.push(Box::new(object));
    }

    /// Returns when there is something to believe; never if there is nothing.
    async fn due(&self) {
        match self.due {
            Some(due) if !self.objects.is_empty() => tokio::time::sleep_until(due).await,
            _ => std::future::pending().await,
        }
    }

    /// The same, at once if there is nothing.
    async fn due_if_any(&self) {
        if !self.objects.is_empty() {
            self.due().await;
        }
    }
}

/// The lines of an answer that does not end.
struct Lines {
    chunks: Chunks,
    patience: Duration,
    buffer: Vec<u8>,
    /// So much of the buffer has no end of a line in it.
    looked: usize,
}

impl Lines {
    const fn new(chunks: Chunks, patience: Duration) -> Self {
        Self {
            chunks,
            patience,
            buffer: Vec::new(),
            looked: 0,
        }
    }

    /// The next line; none at the end, where half a line is nothing.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        loop {
            let rest = self.buffer.get(self.looked..).unwrap_or_default();
            if let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                let end = self.looked + at;
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.looked = 0;
                if !line.is_empty() {
                    return Ok(Some(line));
                }
                continue;
            }
            self.looked = self.buffer.len();
            if self.buffer.len() > MAX_LINE {
                return Err(Failure::garbled(format!("a line of more than {MAX_LINE} bytes")));
            }
            match self.chunks.next(self.patience).await? {
                Some(data) => self.buffer.extend_from_slice(&data),
                None => return Ok(None),
            }
        }
    }
}
