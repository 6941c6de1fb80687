//! The HTTP listeners: `/metrics`, `/livez`, `/readyz`.

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::health::{self, Check};
use super::{PATIENCE, Sources, metrics};

/// A listener could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("listen on {address}: {source}")]
pub struct ListenError {
    /// Where.
    pub address: SocketAddr,
    /// What the system said.
    pub source: io::Error,
}

/// Listeners that run. They end when this value is dropped.
#[derive(Debug)]
pub struct Servers {
    /// Where metrics and health are served.
    pub address: SocketAddr,
    /// Where metrics are served besides.
    pub metrics_address: Option<SocketAddr>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Servers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Opens the listeners and starts serving. Port 0 takes any; the returned addresses are what was bound.
///
/// # Errors
/// When an address cannot be listened on.
pub async fn serve(
    sources: Sources,
    listen: SocketAddr,
    metrics_listen: Option<SocketAddr>,
) -> Result<Servers, ListenError> {
    let everything = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(sources.clone());
    let mut servers = Servers {
        address: listen,
        metrics_address: None,
        tasks: Vec::new(),
    };
    servers.address = servers.open(listen, everything).await?;
    if let Some(metrics_listen) = metrics_listen {
        let metrics_only = Router::new().route("/metrics", get(scrape)).with_state(sources);
        servers.metrics_address = Some(servers.open(metrics_listen, metrics_only).await?);
    }
    Ok(servers)
}

impl Servers {
    async fn open(&mut self, address: SocketAddr, router: Router) -> Result<SocketAddr, ListenError> {
        let (bound, serving) = open(address, router).await?;
        self.tasks.push(tokio::spawn(serving));
        Ok(bound)
    }
}

/// Opens a listener. Gives what was bound, and what serves there until it is dropped.
pub(crate) async fn open(
    address: SocketAddr,
    router: Router,
) -> Result<(SocketAddr, impl Future<Output = ()> + Send), ListenError> {
    let failed = |source| ListenError { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let serving = async move {
        // Accept errors are retried inside.
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%address, %error, "a listener has ended");
        }
    };
    Ok((bound, serving))
}

async fn livez(State(sources): State<Sources>, RawQuery(query): RawQuery) -> Response {
    let checks = health::alive(&sources).await;
    verdict(&checks, query.as_deref(), |check, wrong| {
        format!("{}: {wrong}\n", check.name)
    })
}

async fn readyz(State(sources): State<Sources>, RawQuery(query): RawQuery) -> Response {
    let checks = health::ready(&sources).await;
    verdict(&checks, query.as_deref(), |_, wrong| format!("{wrong}\n"))
}

/// `ok`, or one line for each thing that is wrong; with `?verbose` a line for each check, as Kubernetes' own have it.
pub(crate) fn verdict(
    checks: &[Check],
    query: Option<&str>,
    line: impl Fn(&Check, &str) -> String,
) -> Response {
    let wrong = |check: &Check| check.wrong.as_ref().map(|wrong| line(check, wrong));
    let status = if checks.iter().all(|check| check.wrong.is_none()) {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let verbose = query.is_some_and(|query| query.split('&').any(|word| word == "verbose"));
    let text: String = if verbose {
        checks.iter().map(|check| format!("{check}\n")).collect()
    } else if status == StatusCode::OK {
        "ok\n".to_owned()
    } else {
        checks.iter().filter_map(wrong).collect()
    };
    (status, text).into_response()
}

async fn scrape(State(sources): State<Sources>) -> Response {
    match scraped(&sources).await {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response(),
    }
}

async fn scraped(sources: &Sources) -> Result<String, String> {
    let answer = tokio::time::timeout(PATIENCE, sources.driver.metrics(sources.all_policies)).await;
    let snapshot = answer
        .map_err(|_| format!("no answer of the engine's loop within {PATIENCE:?}"))?
        .map_err(|gone| gone.to_string())?;
    let sources = sources.clone();
    // Counting map entries is a call to the kernel, and a large page takes milliseconds.
    let page = tokio::task::spawn_blocking(move || {
        metrics::render(&metrics::Scrape {
            snapshot,
            stats: (sources.stats)(),
            stamps: sources.stamps,
            started: sources.started,
            source: sources.source,
            foreign_allowed: sources.foreign_allowed,
        })
    });
    page.await.map_err(|error| error.to_string())
}
