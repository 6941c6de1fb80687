//! Follows the objects of one scope: lists them, watches them, and begins again when that ends. It never gives up, and
//! says what it hears to one queue.
//!
//! A watch ends after a minute by its own parameter, and nothing is waited for longer than that and a little: a connection
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

use super::object::{self, Seen};
use super::set::Scope;
use crate::apiserver::{ApiServer, Backoff, Cause, Chunks, Failure, PATIENCE};
use crate::clock::Clock;
use crate::loops::Counter;

/// Objects of a page: what is in memory at once.
const PAGE: u32 = 500;
/// A watch ends by itself after so many seconds.
const WATCH: u32 = 60;
/// A watch that has said nothing for so long is not there any more.
pub(super) const SILENCE: Duration = Duration::from_secs(WATCH as u64 + 10);
/// A watch that ends sooner has not lived: the next one waits.
const LIVED: Duration = Duration::from_secs(5);
/// Longest line of a watch: an object has at most 1.5 MiB in etcd.
const MAX_LINE: usize = 8 << 20;
/// A watch that failed so often in a row does not go on from where it was.
const RESUMES: u32 = 3;

/// What a follower says.
#[derive(Debug)]
pub(super) enum News {
    /// A list begins; what an earlier one had not finished is void.
    Began,
    /// A part of it, and what is wrong with objects of which nobody knows which they are.
    Part(Vec<Seen>, Vec<String>),
    /// It is complete.
    Listed,
    /// An object is there, new or changed.
    Shown(Box<Seen>),
    /// An object was deleted.
    Deleted(Box<Seen>),
    /// An object changed, and nobody knows which.
    Unknown(String),
    /// It does not go, for now.
    Failing(Failure),
    /// It goes again.
    Going,
}

/// Nobody listens any more.
struct Closed;

/// When something was heard last, on the boot clock.
#[derive(Debug)]
pub(super) struct LastHeard(AtomicU64);

impl LastHeard {
    pub(super) const fn new(boot_ns: u64) -> Self {
        Self(AtomicU64::new(boot_ns))
    }

    pub(super) fn boot_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Follows one scope.
pub(super) struct Reflector {
    pub(super) api: ApiServer,
    pub(super) scope: Scope,
    /// Attachments of other nodes are not asked for.
    pub(super) node: String,
    /// Names this follower in what it says.
    pub(super) id: u64,
    pub(super) out: mpsc::Sender<(u64, News)>,
    pub(super) heard: Arc<LastHeard>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) rounds: Arc<Counter>,
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

impl Reflector {
    /// Runs until nobody listens.
    pub(super) async fn run(self) {
        // Ends with an error only when nobody listens any more.
        let _ = self.follow().await;
    }

    async fn follow(&self) -> Result<(), Closed> {
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
        &self,
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
    async fn list(&self) -> Result<Result<String, Failure>, Closed> {
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
                match Seen::read(self.scope.kind(), item.get()) {
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
        params.field_selector = self.selector();
        params.continue_token = token.map(str::to_owned);
        let request = self.path().list(&params);
        let request = request.map_err(|error| Failure::garbled(error.to_string()))?;
        self.api.read(request, PATIENCE).await
    }

    fn selector(&self) -> Option<String> {
        match &self.scope {
            Scope::Attachments => Some(format!("spec.node={}", self.node)),
            Scope::Namespace(_) | Scope::Everything => None,
        }
    }

    fn path(&self) -> Path {
        let namespace = match &self.scope {
            Scope::Namespace(namespace) => Some(namespace.as_str()),
            Scope::Attachments | Scope::Everything => None,
        };
        Path::new(object::path(self.scope.kind(), namespace))
    }

    /// Watches once.
    async fn watch(&self, version: &mut String, failed: &mut bool) -> Result<Ended, Closed> {
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
        let mut lines = Lines::new(chunks);
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
        let mut params = WatchParams::default().timeout(WATCH);
        params.field_selector = self.selector();
        let request = self.path().watch(&params, version);
        let mut request = request.map_err(|error| Failure::garbled(error.to_string()))?;
        // A compressed stream may keep a line until there are more of them.
        request
            .headers_mut()
            .insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Ok(request)
    }

    /// Takes a line of a watch in; gives how the watch ends, if it does.
    async fn line(&self, line: &[u8], version: &mut String) -> Result<Option<Ended>, Closed> {
        let event: Event<'_> = match serde_json::from_slice(line) {
            Ok(event) => event,
            Err(error) => return Ok(Some(Ended::Failed(Failure::garbled(error.to_string())))),
        };
        match event.kind {
            "BOOKMARK" => {
                if let Ok(bookmark) = serde_json::from_str::<Bookmark>(event.object.get()) {
                    *version = bookmark.metadata.resource_version;
                }
            }
            "ERROR" => {
                let status: Option<Status> = serde_json::from_str(event.object.get()).ok();
                let code = status.as_ref().map_or(500, |status| status.code);
                return Ok(Some(ended(Failure::from_status(code, status.as_ref()))));
            }
            kind => match Seen::read(self.scope.kind(), event.object.get()) {
                Ok(seen) => {
                    if !seen.version.is_empty() {
                        version.clone_from(&seen.version);
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

    async fn failing(&self, failure: Failure, failed: &mut bool) -> Result<(), Closed> {
        self.rounds.error();
        *failed = true;
        self.say(News::Failing(failure)).await
    }

    async fn say(&self, news: News) -> Result<(), Closed> {
        self.out.send((self.id, news)).await.map_err(|_| Closed)
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
    buffer: Vec<u8>,
    /// So much of the buffer has no end of a line in it.
    looked: usize,
}

impl Lines {
    const fn new(chunks: Chunks) -> Self {
        Self {
            chunks,
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
            match self.chunks.next(SILENCE).await? {
                Some(data) => self.buffer.extend_from_slice(&data),
                None => return Ok(None),
            }
        }
    }
}
