//! `/metrics`, `/livez` and `/readyz` of the controller.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::task::JoinSet;

use super::keeper::Watched;
use super::run::Handle;
use crate::clock::Clock;
use crate::report::Stamps;
use crate::serve::health::Check;
use crate::serve::http::{self, ListenError};
use crate::serve::metrics;

/// How long the controller's task may take to come round.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone)]
struct Shown {
    handle: Handle,
    clock: Arc<dyn Clock>,
    stamps: Stamps,
}

/// Starts to serve; port 0 takes any. Gives what was bound.
pub(super) async fn spawn(
    tasks: &mut JoinSet<()>,
    listen: SocketAddr,
    handle: Handle,
    clock: Arc<dyn Clock>,
    stamps: Stamps,
) -> Result<SocketAddr, ListenError> {
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(Shown {
            handle,
            clock,
            stamps,
        });
    let (address, serving) = http::open(listen, router).await?;
    tasks.spawn(serving);
    Ok(address)
}

fn alive(round: bool) -> Check {
    Check {
        name: "controller",
        wrong: (!round).then(|| format!("it has not come round for {PATIENCE:?}")),
    }
}

/// Whether the task comes round. Nothing that an API server does has a part in it.
async fn livez(State(shown): State<Shown>, RawQuery(query): RawQuery) -> Response {
    let round = shown.handle.figures(PATIENCE).await.is_some();
    http::verdict(&[alive(round)], query.as_deref(), |check, wrong| {
        format!("{}: {wrong}\n", check.name)
    })
}

/// Whether all is known that statuses are made from. One that does not lead is ready, too.
async fn readyz(State(shown): State<Shown>, RawQuery(query): RawQuery) -> Response {
    let figures = shown.handle.figures(PATIENCE).await;
    let mut checks = vec![alive(figures.is_some())];
    if let Some(figures) = figures {
        checks.extend(Watched::ALL.map(|watched| {
            Check {
                name: watched.as_str(),
                wrong: figures
                    .missing
                    .contains(&watched)
                    .then(|| format!("a complete list of the {}", watched.as_str())),
            }
        }));
    }
    http::verdict(&checks, query.as_deref(), |_, wrong| format!("{wrong}\n"))
}

async fn scrape(State(shown): State<Shown>) -> Response {
    let Some(figures) = shown.handle.figures(PATIENCE).await else {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("no answer of the controller within {PATIENCE:?}\n"),
        )
            .into_response();
    };
    let now = shown.clock.now();
    shown.stamps.observe(now);
    let text = metrics::render_controller(&figures, now, &shown.stamps);
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}
