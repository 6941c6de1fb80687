//! Candidates on a paused clock, at a server that has nothing but the lease.

use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::*;

#[derive(Default)]
struct Stored {
    lease: Option<Value>,
    version: u64,
    away: bool,
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<Stored>>);

impl Server {
    fn client(&self) -> Client {
        Client::new(Router::new().fallback(answer).with_state(self.clone()), "default")
    }

    fn with<T>(&self, work: impl FnOnce(&mut Stored) -> T) -> T {
        work(&mut self.0.lock().unwrap())
    }

    fn candidate(&self, name: &str) -> Candidate {
        Candidate::spawn(self.client(), "holdfast-system", name.to_owned())
    }

    fn holder(&self) -> Option<String> {
        self.with(|stored| {
            Some(
                stored.lease.as_ref()?["spec"]["holderIdentity"]
                    .as_str()?
                    .to_owned(),
            )
        })
    }

    /// Somebody else's lease.
    fn put(&self, holder: &str, renewed: &str) {
        self.with(|stored| {
            stored.version += 1;
            stored.lease = Some(json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": LEASE, "resourceVersion": stored.version.to_string()},
                "spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15},
            }));
        });
    }
}

async fn answer(State(server): State<Server>, method: Method, body: String) -> Response {
    if server.with(|stored| stored.away) {
        return std::future::pending().await;
    }
    server.with(|stored| {
        let refuse = |code: u16, reason: &str| {
            let status =
                json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "as planned"});
            (StatusCode::from_u16(code).unwrap(), Json(status)).into_response()
        };
        if method == Method::GET {
            return match &stored.lease {
                Some(lease) => Json(lease.clone()).into_response(),
                None => refuse(404, "NotFound"),
            };
        }
        let mut lease: Value = serde_json::from_str(&body).unwrap();
        let present = stored
            .lease
            .as_ref()
            .map(|lease| lease["metadata"]["resourceVersion"].clone());
        let fits = match present {
            Some(present) => method == Method::PUT && lease["metadata"]["resourceVersion"] == present,
            None => method == Method::POST,
        };
        if !fits {
            return refuse(409, "Conflict");
        }
        stored.version += 1;
        lease["metadata"]["resourceVersion"] = stored.version.to_string().into();
        stored.lease = Some(lease.clone());
        Json(lease).into_response()
    })
}

async fn seconds(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

fn leads(candidate: &Candidate) -> bool {
    *candidate.leads.borrow()
}

#[tokio::test(start_paused = true)]
async fn of_two_one_leads_and_goes_on_leading() {
    let server = Server::default();
    let first = server.candidate("a");
    seconds(1).await;
    let second = server.candidate("b");
    for _ in 0..100 {
        seconds(1).await;
        assert!(leads(&first) && !leads(&second));
    }
    assert_eq!(server.holder().as_deref(), Some("a"));
    assert_eq!(
        server.with(|stored| stored.lease.clone().unwrap()["spec"]["leaseTransitions"].clone()),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn who_is_gone_is_followed_when_its_lease_has_been_still_for_its_time() {
    let server = Server::default();
    let first = server.candidate("a");
    seconds(1).await;
    let second = server.candidate("b");
    seconds(4).await;
    first.task.abort();
    seconds(12).await;
    assert!(!leads(&second), "sooner than the lease says");
    seconds(8).await;
    assert!(leads(&second));
    assert_eq!(server.holder().as_deref(), Some("b"));
}

#[tokio::test(start_paused = true)]
async fn no_clock_is_held_against_another() {
    for renewed in ["2001-01-01T00:00:00.000000Z", "2101-01-01T00:00:00.000000Z"] {
        let server = Server::default();
        let candidate = server.candidate("b");
        // Somebody whose clock is wrong has it, and renews it.
        candidate.task.abort();
        server.put("a", renewed);
        let candidate = server.candidate("b");
        for second in 0..60 {
            seconds(1).await;
            if second % 5 == 0 {
                server.put("a", &renewed.replace("00:00:00", &format!("00:00:{:02}", second)));
            }
            assert!(!leads(&candidate), "{renewed}: taken from whoever renews it");
        }
        seconds(20).await;
        assert!(leads(&candidate), "{renewed}: not taken from whoever is gone");
    }
}

#[tokio::test(start_paused = true)]
async fn who_cannot_renew_stops_before_another_may_begin() {
    let server = Server::default();
    let candidate = server.candidate("a");
    seconds(1).await;
    assert!(leads(&candidate));
    server.with(|stored| stored.away = true);
    seconds(7).await;
    assert!(leads(&candidate));
    seconds(4).await;
    assert!(!leads(&candidate), "it leads although nobody can know");
    server.with(|stored| stored.away = false);
    seconds(8).await;
    assert!(leads(&candidate), "its own lease is still there");
}

#[tokio::test(start_paused = true)]
async fn who_ends_frees_the_lease() {
    let server = Server::default();
    let first = server.candidate("a");
    seconds(1).await;
    let second = server.candidate("b");
    seconds(3).await;
    first.end().await;
    assert_eq!(server.holder(), None);
    seconds(3).await;
    assert!(leads(&second));
    // One that does not have it takes it from nobody.
    let third = server.candidate("c");
    seconds(3).await;
    third.end().await;
    assert_eq!(server.holder().as_deref(), Some("b"));
}
