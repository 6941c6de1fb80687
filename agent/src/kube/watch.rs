//! One watch: a complete list, then its changes, again and again.
//!
//! A watch that has gone silent looks like one to which nothing happens. So the server is asked to end each after
//! [`ROUND`] and to send bookmarks, and whatever comes is passed on as a proof of life; a connection that brings nothing
//! for longer is dead, and is replaced. The set is listed again only when the server has forgotten where the watch was.

use std::fmt;
use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt;
use kube::Client;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::request::Request;
use rand::TryRng;
use rand::rngs::SysRng;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::object::{Body, List, Object};

/// How long one request of a watch lasts.
pub const ROUND: Duration = Duration::from_secs(60);
/// How much longer it may take to end before the connection counts as dead.
const GRACE: Duration = Duration::from_secs(10);
/// How long a list may take: one of ten thousand policies has 18 MB.
const LISTED: Duration = Duration::from_secs(60);
/// How long a watch may take to begin.
const BEGUN: Duration = Duration::from_secs(15);
/// The first pause after a failure; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What is watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Path of the collection: `/apis/holdfast.dev/v1alpha1/namespaces/shop/routepolicies`.
    pub path: String,
    /// Only objects with these fields: `spec.node=edge-1`.
    pub fields: Option<String>,
    /// Only metadata are asked for: for what has much else.
    pub metadata_only: bool,
}

impl Target {
    /// All objects of a resource of an API group (empty: the core group), in one namespace or in all.
    #[must_use]
    pub fn new(group: &str, version: &str, namespace: Option<&str>, plural: &str) -> Self {
        let root = if group.is_empty() { "/api" } else { "/apis/" };
        let namespace = namespace.map_or_else(String::new, |namespace| format!("namespaces/{namespace}/"));
        Self {
            path: format!("{root}{group}/{version}/{namespace}{plural}"),
            fields: None,
            metadata_only: false,
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

    /// Only their metadata.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self {
            metadata_only: true,
            ..self
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.trim_start_matches("/apis/").trim_start_matches("/api/");
        f.write_str(path)?;
        match &self.fields {
            Some(fields) => write!(f, "?{fields}"),
            None => Ok(()),
        }
    }
}

/// What a watch brings.
#[derive(Clone, Debug)]
pub enum News<B> {
    /// All there is: whatever is not in it is gone.
    All(Vec<Object<B>>),
    /// An object was created or changed.
    Changed(Object<B>),
    /// An object is gone; this was its last state.
    Gone(Object<B>),
    /// The server has been heard of. Everything above says so, too.
    Alive,
    /// It cannot be watched. What was known stays known: that nothing comes is no news.
    Failing(Failure),
}

/// Why nothing comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// In which way.
    pub kind: FailureKind,
    /// For people.
    pub message: String,
}

/// Ways to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The server does not know the resource: a definition that is not installed, or not yet.
    Missing,
    /// It is known, and not for us.
    Forbidden,
    /// It has forgotten where the watch was: a complete list follows, and nobody need know.
    Expired,
    /// Everything else: no server, no answer in time, an answer that makes no sense.
    Broken,
}

impl Failure {
    fn broken(message: impl Into<String>) -> Self {
        Self {
            kind: FailureKind::Broken,
            message: message.into(),
        }
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self {
                kind: match status.code {
                    404 => FailureKind::Missing,
                    401 | 403 => FailureKind::Forbidden,
                    410 => FailureKind::Expired,
                    _ => FailureKind::Broken,
                },
                message: match status.message.as_str() {
                    "" => format!("status {}", status.code),
                    message => message.to_owned(),
                },
            },
            error => Self::broken(chain(&error)),
        }
    }
}

/// An error with what is behind it: the outermost says "service error" and no more.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        source = inner.source();
    }
    text
}

/// Watches until nobody listens any more. `wrap` makes the listener's own kind of news.
///
/// The first failure of a kind is said in the log, and its end, nothing between. Safe to cancel.
pub async fn run<B: Body, M: Send>(
    client: Client,
    target: Target,
    listener: mpsc::Sender<M>,
    wrap: impl Fn(News<B>) -> M + Send,
) {
    let mut watch = Watch {
        client,
        target,
        listener,
        wrap,
        version: None,
        heard: false,
        _body: std::marker::PhantomData,
    };
    let mut failures = Failures::default();
    loop {
        let began = Instant::now();
        watch.heard = false;
        let end = watch.round().await;
        if watch.heard {
            failures.over(&watch.target);
        }
        let failure = match end {
            Ok(()) if began.elapsed() >= FIRST_PAUSE => continue,
            // A server that ends every watch at once must not be asked as fast as it answers.
            Ok(()) => {
                sleep(FIRST_PAUSE).await;
                continue;
            }
            Err(End::NobodyListens) => return,
            Err(End::Failed(failure)) if failure.kind == FailureKind::Expired && watch.version.is_some() => {
                watch.version = None;
                continue;
            }
            Err(End::Failed(failure)) => failure,
        };
        if matches!(failure.kind, FailureKind::Missing | FailureKind::Expired) {
            // Another definition under the same name would count from elsewhere.
            watch.version = None;
        }
        failures.one_more(&watch.target, &failure);
        let told = watch.tell(News::Failing(failure)).await;
        if told.is_err() {
            return;
        }
        sleep(failures.pause()).await;
    }
}

struct Watch<B, M, W> {
    client: Client,
    target: Target,
    listener: mpsc::Sender<M>,
    wrap: W,
    /// From where it goes on; none before the first list, and when the server has forgotten it.
    version: Option<String>,
    /// Whether this round has brought anything.
    heard: bool,
    _body: std::marker::PhantomData<fn() -> B>,
}

enum End {
    NobodyListens,
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<kube::Error> for End {
    fn from(error: kube::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl<B: Body, M: Send, W: Fn(News<B>) -> M + Send> Watch<B, M, W> {
    async fn round(&mut self) -> Result<(), End> {
        let version = match &self.version {
            Some(version) => version.clone(),
            None => self.list().await?,
        };
        self.follow(&version).await
    }

    /// A complete list, from whatever the server has newest.
    async fn list(&mut self) -> Result<String, End> {
        let parameters = ListParams {
            field_selector: self.target.fields.clone(),
            ..ListParams::default()
        };
        let request = Request::new(&self.target.path);
        let request = if self.target.metadata_only {
            request.list_metadata(&parameters)
        } else {
            request.list(&parameters)
        }
        .map_err(kube::Error::BuildRequest)?;
        let list: List<B> = timeout(LISTED, self.client.request(request))
            .await
            .map_err(|_| Failure::broken(format!("no list within {LISTED:?}")))??;
        let Some(version) = list.metadata.resource_version else {
            return Err(Failure::broken("a list without a version").into());
        };
        self.tell(News::All(list.items.unwrap_or_default())).await?;
        self.version = Some(version.clone());
        Ok(version)
    }

    /// The changes since a version, until the server ends the request.
    async fn follow(&mut self, version: &str) -> Result<(), End> {
        let parameters = WatchParams {
            field_selector: self.target.fields.clone(),
            timeout: Some(ROUND.as_secs().try_into().unwrap_or(u32::MAX)),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request = Request::new(&self.target.path);
        let request = if self.target.metadata_only {
            request.watch_metadata(&parameters, version)
        } else {
            request.watch(&parameters, version)
        }
        .map_err(kube::Error::BuildRequest)?;
        let events = timeout(BEGUN, self.client.request_events::<Object<B>>(request))
            .await
            .map_err(|_| Failure::broken(format!("no watch within {BEGUN:?}")))??;
        self.tell(News::Alive).await?;
        let mut events = pin!(events);
        loop {
            let event = timeout(ROUND + GRACE, events.try_next())
                .await
                .map_err(|_| Failure::broken(format!("nothing for {:?}", ROUND + GRACE)))??;
            match event {
                None => return Ok(()),
                Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                    self.version = object.version().map(str::to_owned);
                    self.tell(News::Changed(object)).await?;
                }
                Some(WatchEvent::Deleted(object)) => {
                    self.version = object.version().map(str::to_owned);
                    self.tell(News::Gone(object)).await?;
                }
                Some(WatchEvent::Bookmark(bookmark)) => {
                    self.version = Some(bookmark.metadata.resource_version);
                    self.tell(News::Alive).await?;
                }
                Some(WatchEvent::Error(status)) => return Err(kube::Error::Api(status).into()),
            }
        }
    }

    async fn tell(&mut self, news: News<B>) -> Result<(), End> {
        self.heard |= !matches!(news, News::Failing(_));
        let news = (self.wrap)(news);
        self.listener.send(news).await.map_err(|_| End::NobodyListens)
    }
}

/// Failures in a row.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    said: Option<FailureKind>,
}

impl Failures {
    fn one_more(&mut self, target: &Target, failure: &Failure) {
        self.count += 1;
        if self.said.replace(failure.kind) != Some(failure.kind) {
            tracing::warn!(%target, reason = failure.message, "cannot be watched; what is known of it stays");
        }
    }

    fn over(&mut self, target: &Target) {
        if self.said.is_some() {
            tracing::info!(%target, "is watched again");
        }
        *self = Self::default();
    }

    /// Twice as long each time, and not the same for all who wait for one server.
    fn pause(&self) -> Duration {
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.count.saturating_sub(1).min(6));
        jittered(doubled.min(LONGEST_PAUSE))
    }
}

/// Three quarters to all of a time, at random.
#[must_use]
pub fn jittered(time: Duration) -> Duration {
    let random = SysRng.try_next_u32().unwrap_or(u32::MAX);
    time.mul_f64(0.75 + 0.25 * f64::from(random) / f64::from(u32::MAX))
}
