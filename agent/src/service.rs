//! What a service manager is told: systemd, with `Type=notify`, or whoever sets `NOTIFY_SOCKET`. Without one nothing is said.

use std::io;

use sd_notify::NotifyState;

use crate::serve::{Sources, health};

/// The agent runs. Not that it is ready: a source that is late must not have the manager end what serves.
pub fn running(node: &str) {
    let status = format!("serves node {node}; see `holdfast status`");
    said(sd_notify::notify(&[
        NotifyState::Ready,
        NotifyState::Status(&status),
    ]));
}

/// The agent ends.
pub fn ending() {
    said(sd_notify::notify(&[NotifyState::Stopping]));
}

/// Tells the watchdog twice in its period that the agent is alive, and nothing while it is not: then the manager starts a
/// new life. Never returns. Safe to cancel.
pub async fn watchdog(sources: Sources) {
    let Some(period) = sd_notify::watchdog_enabled() else {
        return std::future::pending().await;
    };
    loop {
        let wrong: Vec<String> = health::alive(&sources)
            .await
            .iter()
            .filter(|check| check.wrong.is_some())
            .map(ToString::to_string)
            .collect();
        if wrong.is_empty() {
            said(sd_notify::notify(&[NotifyState::Watchdog]));
        } else {
            tracing::error!(wrong = wrong.join("; "), "not alive: the watchdog is not told");
        }
        tokio::time::sleep(period / 2).await;
    }
}

fn said(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the service manager could not be told");
    }
}
