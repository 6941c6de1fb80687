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
        loop {
            match lines.next().await {
                Ok(None) => {
                    self.hear();
                    return Ok(Ended::Well);
                }
                Err(failure) => return Ok(ended(failure)),
                Ok(Some(line)) => {
                    self.hear();
                    if let Some(ended) = self.line(&line, version).await? {
                        return Ok(ended);
                    }
                }
            }
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
    async fn line(&mut self, line: &[u8], version: &mut String) -> Result<Option<Ended>, Closed> {
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
                    self.say(match kind {
                        "DELETED" => News::Deleted(Box::new(seen)),
                        _ => News::Shown(Box::new(seen)),
                    })
                    .await?;
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
