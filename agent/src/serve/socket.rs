//! The local API: HTTP on a Unix socket that only root can open. The command line uses nothing else.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use holdfast_engine::compare::{NoSuchPolicy, Page, Scope};
use holdfast_engine::explain::Asked;
use holdfast_engine::model::{ObjectName, Token};
use holdfast_engine::view::Settled;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use super::diff::{self, Diff};
use super::look::Seen;
use super::why::{self, Why};
use super::wire::{
    AskDiff, AskWhy, LogFilter, Poke, Poked, PolicyDetail, Problem, SetLog, Status, Wait, Waited,
};
use super::{PATIENCE, Sources, VERSION};
use crate::driver::Gone;
use crate::report::rfc3339;

/// Name of the socket in the run directory.
pub const NAME: &str = "holdfast.sock";

/// Longest wait that one request may ask for.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3_600);

/// The socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody answers there.
    #[error("{}: another agent listens there", .0.display())]
    InUse(PathBuf),
    /// The system said no.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The socket while it is served. Dropped: not served any more, and the file is removed if it is still ours.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: u64,
    task: JoinHandle<()>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.task.abort();
        // A successor may have put its own there.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens the socket in the run directory and starts serving. The file of a dead agent is replaced.
///
/// # Errors
/// [`SocketError`].
pub fn serve(sources: Sources, run_dir: &Path) -> Result<Socket, SocketError> {
    let path = run_dir.join(NAME);
    if UnixStream::connect(&path).is_ok() {
        return Err(SocketError::InUse(path));
    }
    // Bound under another name, so that nobody finds it before it has its mode; the rename replaces a stale file.
    let early = run_dir.join(format!(".{NAME}.tmp"));
    let failed = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| SocketError::Io { doing, path, source }
    };
    match fs::remove_file(&early) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", &early)(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&early).map_err(failed("bind", &early))?;
    fs::set_permissions(&early, fs::Permissions::from_mode(0o600)).map_err(failed("chmod", &early))?;
    let inode = fs::symlink_metadata(&early)
        .map_err(failed("stat", &early))?
        .ino();
    fs::rename(&early, &path).map_err(failed("rename to", &path))?;
    let router = router(sources);
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "the local socket is not served any more");
        }
    });
    Ok(Socket { path, inode, task })
}

fn router(sources: Sources) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/policies/{namespace}/{name}", get(policy))
        .route("/v1/why", get(why))
        .route("/v1/diff", get(diff))
        .route("/v1/poke", post(poke))
        .route("/v1/wait", get(wait))
        .route("/v1/log", get(log).put(set_log))
        .fallback(async || refused(StatusCode::NOT_FOUND, "this agent has no such path"))
        .with_state(sources)
}

fn refused(status: StatusCode, error: impl ToString) -> Response {
    let error = error.to_string();
    (status, Json(Problem { error })).into_response()
}

impl IntoResponse for Gone {
    fn into_response(self) -> Response {
        refused(StatusCode::SERVICE_UNAVAILABLE, self)
    }
}

async fn in_time<T>(answer: impl Future<Output = Result<T, Gone>>) -> Result<T, Response> {
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(answer) => answer.map_err(IntoResponse::into_response),
        Err(_) => Err(refused(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("no answer of the engine's loop within {PATIENCE:?}"),
        )),
    }
}

async fn status(State(sources): State<Sources>) -> Result<Json<Status>, Response> {
    let snapshot = in_time(sources.driver.snapshot()).await?;
    sources.stamps.observe(sources.clock.now());
    Ok(Json(Status::new(
        &snapshot,
        &sources.stamps,
        sources.started,
        sources.source,
        VERSION,
    )))
}

async fn policy(
    State(sources): State<Sources>,
    UrlPath((namespace, name)): UrlPath<(String, String)>,
) -> Result<Json<PolicyDetail>, Response> {
    let name = ObjectName { namespace, name };
    match in_time(sources.driver.policy(name.clone())).await? {
        Some(found) => {
            sources.stamps.observe(sources.clock.now());
            Ok(Json(PolicyDetail::new(&found, &sources.stamps)))
        }
        None => Err(refused(
            StatusCode::NOT_FOUND,
            format!("no policy {name} selects a consumer on this node"),
        )),
    }
}

async fn log(State(sources): State<Sources>) -> Json<LogFilter> {
    Json(LogFilter {
        filter: sources.log.present(),
        configured: sources.log.configured().to_owned(),
    })
}

async fn set_log(
    State(sources): State<Sources>,
    body: Result<Json<SetLog>, JsonRejection>,
) -> Result<Json<LogFilter>, Response> {
    let Json(wanted) = body.map_err(|wrong| refused(StatusCode::BAD_REQUEST, wrong.body_text()))?;
    sources
        .log
        .set(wanted.filter.as_deref())
        .map_err(|error| refused(StatusCode::BAD_REQUEST, error))?;
    Ok(log(State(sources)).await)
}

/// So many consumers are looked at unless all are wanted.
const WORST: usize = 20;
/// So often is looked while the engine goes on.
const LOOKS: usize = 4;
/// How long a look may take: the kernel's own slowness is an answer.
const LOOK_PATIENCE: Duration = Duration::from_secs(5);

async fn why(
    State(sources): State<Sources>,
    query: Result<Query<AskWhy>, QueryRejection>,
) -> Result<Json<Why>, Response> {
    let Query(ask) = query.map_err(|wrong| refused(StatusCode::BAD_REQUEST, wrong.body_text()))?;
    let policy = object_name("policy", &ask.policy).map_err(wrong)?;
    let asked = match &ask.consumer {
        Some(consumer) => Asked::One(object_name("consumer", consumer).map_err(wrong)?),
        None if ask.all => Asked::Worst(usize::MAX),
        None => Asked::Worst(WORST),
    };
    let explain = async || {
        let explained = in_time(sources.driver.explain(policy.clone(), asked.clone())).await?;
        explained.map_err(|error| refused(StatusCode::NOT_FOUND, error))
    };
    let mut explained = explain().await?;
    let mut seen = Seen::nothing("the agent is changing what is to be looked at");
    for _ in 0..LOOKS {
        let looked = sources
            .looker
            .look(why::question(&explained), LOOK_PATIENCE)
            .await;
        let after = explain().await?;
        let steady = why::is_steady(&explained, &after);
        explained = after;
        // What differs because the agent was changing it is no difference.
        if steady || looked.audited.differences.is_empty() {
            seen = looked;
            break;
        }
    }
    let now = sources.clock.now();
    sources.stamps.observe(now);
    let every = ask.all || ask.consumer.is_some();
    Ok(Json(Why::new(
        &explained,
        &seen,
        &sources.stamps,
        now.wall_ms,
        every,
    )))
}

async fn diff(
    State(sources): State<Sources>,
    query: Result<Query<AskDiff>, QueryRejection>,
) -> Result<Json<Diff>, Response> {
    let Query(ask) = query.map_err(|wrong| refused(StatusCode::BAD_REQUEST, wrong.body_text()))?;
    let policy = ask.policy.as_deref().map(|policy| object_name("policy", policy));
    let mut scope = match policy.transpose().map_err(wrong)? {
        Some(policy) => Scope::Policy(policy),
        None => Scope::Interfaces(0),
    };
    let now = sources.clock.now();
    let mut answer = Diff::new(rfc3339(now.wall_ms));
    loop {
        let next = compare(&sources, &scope, &mut answer, ask.all).await?;
        match next {
            Some(next) => scope = next,
            None => return Ok(Json(answer)),
        }
    }
}

/// Compares one page.
async fn compare(
    sources: &Sources,
    scope: &Scope,
    answer: &mut Diff,
    all: bool,
) -> Result<Option<Scope>, Response> {
    let page = async || -> Result<Page, Response> {
        let page = in_time(sources.driver.compare(scope.clone())).await?;
        page.map_err(|NoSuchPolicy| refused(StatusCode::NOT_FOUND, "no such policy is known on this node"))
    };
    let mut before = page().await?;
    for look in 1.. {
        let seen = sources.looker.look(diff::question(&before), LOOK_PATIENCE).await;
        let after = page().await?;
        if look == LOOKS || diff::is_steady(&before, &after, &seen) {
            answer.add(&before, &after, &seen, all);
            return Ok(after.next);
        }
        before = after;
    }
    Ok(None)
}

/// The name of an object in a question, or what is wrong with it.
fn object_name(what: &str, text: &str) -> Result<ObjectName, String> {
    let (namespace, name) = text
        .split_once('/')
        .ok_or_else(|| format!("{what}: namespace/name"))?;
    Ok(ObjectName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    })
}

fn wrong(error: String) -> Response {
    refused(StatusCode::BAD_REQUEST, error)
}

async fn poke(
    State(sources): State<Sources>,
    body: Result<Json<Poke>, JsonRejection>,
) -> Result<Json<Poked>, Response> {
    let Json(poke) = body.map_err(|wrong| refused(StatusCode::BAD_REQUEST, wrong.body_text()))?;
    let token = match poke.token.as_deref().map(token) {
        None => None,
        Some(Some(token)) => Some(token),
        Some(None) => {
            return Err(refused(
                StatusCode::BAD_REQUEST,
                "token: 16 hex digits that are not all 0",
            ));
        }
    };
    if !poke.wait {
        let driver = sources.driver.clone();
        tokio::spawn(async move { driver.poke(poke.ifindex, token).await });
        return Ok(Json(Poked {
            settled: Settled::Working,
        }));
    }
    // As long as it takes: the caller has its own patience, and drops the question with its connection.
    let settled = sources
        .driver
        .poke(poke.ifindex, token)
        .await
        .map_err(IntoResponse::into_response)?;
    Ok(Json(Poked { settled }))
}

fn token(text: &str) -> Option<Token> {
    (text.len() == 16)
        .then(|| u64::from_str_radix(text, 16).ok())
        .flatten()
        .and_then(Token::new)
}

async fn wait(
    State(sources): State<Sources>,
    query: Result<Query<Wait>, QueryRejection>,
) -> Result<Json<Waited>, Response> {
    let Query(wait) = query.map_err(|wrong| refused(StatusCode::BAD_REQUEST, wrong.body_text()))?;
    let name = object_name("policy", &wait.policy).map_err(wrong)?;
    let attachment = wait
        .attachment
        .as_deref()
        .map(|name| object_name("attachment", name));
    let attachment = attachment.transpose().map_err(wrong)?;
    let deadline = tokio::time::Instant::now() + Duration::from_millis(wait.timeout_ms).min(LONGEST_WAIT);
    let mut reports = sources.reports.clone();
    loop {
        // Seen before the question: a change between the two is not missed.
        reports.mark_unchanged();
        let found = in_time(sources.driver.policy(name.clone())).await?;
        sources.stamps.observe(sources.clock.now());
        let waited = Waited::new(found.as_ref(), attachment.as_ref(), &wait, &sources.stamps);
        if waited.met {
            return Ok(Json(waited));
        }
        match tokio::time::timeout_at(deadline, reports.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Gone.into_response()),
            Err(_) => return Ok(Json(waited)),
        }
    }
}
