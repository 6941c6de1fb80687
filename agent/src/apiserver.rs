//! The way to an API server: who it is, what an answer is, when to ask again.
//!
//! Requests are made by hand, because a silent connection must be told from a quiet one: every wait for bytes has an end.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Bytes;
use hyper::http::{Request, Response};
use kube::client::{Body, Client};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use rand::TryRng;
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[cfg(test)]
pub mod mock;
pub mod object;
pub mod reflect;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an API server may take for an answer, or for the next bytes of one.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Largest answer: far above a page of objects.
const MAX_ANSWER: usize = 64 << 20;
/// Largest answer that says why there is none.
const MAX_REFUSAL: usize = 64 << 10;

/// Why an API server cannot be reached at all, by what is configured.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A kubeconfig that cannot be used.
    #[error("kubeconfig {}: {}", path.display(), chain(source))]
    Kubeconfig {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: kube::config::KubeconfigError,
    },
    /// The one that `KUBECONFIG` names cannot be used.
    #[error("the kubeconfig that KUBECONFIG names: {}", chain(.0))]
    Environment(kube::config::KubeconfigError),
    /// There is no kubeconfig, and this is no pod.
    #[error("no API server is configured: give --kubeconfig, or KUBECONFIG, or run in a pod ({})", chain(.0))]
    NotInCluster(kube::config::InClusterError),
    /// Certificates or keys that cannot be used.
    #[error("the connection to the API server: {}", chain(.0))]
    Client(kube::Error),
}

/// An error with all that it came from, on one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

/// What kind of failure it was: who hears of it says each kind once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// No connection, or one that broke.
    Unreachable,
    /// A connection that says nothing.
    Silent,
    /// An answer with this status code.
    Answer(u16),
    /// An answer that cannot be read.
    Garbled,
}

/// Why a request brought nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub cause: Cause,
    /// For people.
    pub message: String,
    /// The API server asks not to be asked again before.
    pub retry_after: Option<Duration>,
}

impl Failure {
    fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
            retry_after: None,
        }
    }

    /// An answer that cannot be read.
    #[must_use]
    pub fn garbled(message: impl Into<String>) -> Self {
        Self::new(Cause::Garbled, message)
    }

    fn silent(patience: Duration) -> Self {
        Self::new(
            Cause::Silent,
            format!("the API server has said nothing for {patience:?}"),
        )
    }

    /// What a status of the API server says.
    #[must_use]
    pub fn from_status(code: u16, status: Option<&Status>) -> Self {
        let message = match status {
            Some(status) if !status.message.is_empty() => format!("{} ({code})", status.message),
            _ => format!("the API server answers {code}"),
        };
        let seconds = status
            .and_then(|status| status.details.as_ref())
            .map_or(0, |details| details.retry_after_seconds);
        Self {
            retry_after: (seconds > 0).then(|| Duration::from_secs(seconds.into())),
            ..Self::new(Cause::Answer(code), message)
        }
    }

    /// The status code, if there was an answer.
    #[must_use]
    pub const fn code(&self) -> Option<u16> {
        match self.cause {
            Cause::Answer(code) => Some(code),
            _ => None,
        }
    }
}

/// An API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiServer {
    client: Client,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiServer")
    }
}

impl From<Client> for ApiServer {
    fn from(client: Client) -> Self {
        Self { client }
    }
}

impl ApiServer {
    /// The API server of this kubeconfig; without one of the one that `KUBECONFIG` names, or else of the cluster that this
    /// process is a pod of. Does not connect yet.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn configured(kubeconfig: Option<&Path>) -> Result<Self, ConnectError> {
        let options = KubeConfigOptions::default();
        let mut config = match kubeconfig {
            Some(path) => {
                let wrong = |source| ConnectError::Kubeconfig {
                    path: path.to_owned(),
                    source,
                };
                let read = Kubeconfig::read_from(path).map_err(wrong)?;
                Config::from_custom_kubeconfig(read, &options)
                    .await
                    .map_err(wrong)?
            }
            None => match Kubeconfig::from_env().map_err(ConnectError::Environment)? {
                Some(read) => Config::from_custom_kubeconfig(read, &options)
                    .await
                    .map_err(ConnectError::Environment)?,
                None => Config::incluster().map_err(ConnectError::NotInCluster)?,
            },
        };
        config.connect_timeout = Some(CONNECT);
        // Who asks knows best when to ask again.
        config.default_retry = false;
        let client = Client::try_from(config).map_err(ConnectError::Client)?;
        Ok(client.into())
    }

    /// The client, for what needs no deadline of its own.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Sends a request; the answer is good, and its body is read piece by piece.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn open(&self, request: Request<Vec<u8>>, patience: Duration) -> Result<Chunks, Failure> {
        let response = tokio::time::timeout(patience, self.client.send(request.map(Body::from)))
            .await
            .map_err(|_| Failure::silent(patience))?
            .map_err(|error| Failure::new(Cause::Unreachable, chain(&error)))?;
        let code = response.status();
        let mut chunks = Chunks {
            body: Response::into_body(response),
        };
        if code.is_success() {
            return Ok(chunks);
        }
        // What cannot be read of it is not said.
        let said = chunks.collect(MAX_REFUSAL, patience).await.unwrap_or_default();
        let status: Option<Status> = serde_json::from_slice(&said).ok();
        Err(Failure::from_status(code.as_u16(), status.as_ref()))
    }

    /// Sends a request and reads its whole answer.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn ask(&self, request: Request<Vec<u8>>, patience: Duration) -> Result<Vec<u8>, Failure> {
        let mut chunks = self.open(request, patience).await?;
        chunks.collect(MAX_ANSWER, patience).await
    }

    /// The same as a type.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn read<T: DeserializeOwned>(
        &self,
        request: Request<Vec<u8>>,
        patience: Duration,
    ) -> Result<T, Failure> {
        let answer = self.ask(request, patience).await?;
        serde_json::from_slice(&answer).map_err(|error| Failure::garbled(error.to_string()))
    }

    /// Who we are, as the token says.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn who_am_i(&self) -> Result<Identity, Failure> {
        let request = Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
            .header("content-type", "application/json")
            .body(br#"{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}"#.to_vec())
            .map_err(|error| Failure::garbled(error.to_string()))?;
        let review: Review = self.read(request, PATIENCE).await?;
        let extra = review.status.user_info.extra;
        let first = |key: &str| extra.get(key).and_then(|values| values.first()).cloned();
        Ok(Identity {
            node: first("authentication.kubernetes.io/node-name"),
            node_uid: first("authentication.kubernetes.io/node-uid"),
        })
    }
}

#[derive(Deserialize)]
struct Review {
    status: ReviewStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewStatus {
    user_info: UserInfo,
}

#[derive(Deserialize)]
struct UserInfo {
    #[serde(default)]
    extra: std::collections::BTreeMap<String, Vec<String>>,
}

/// What a token says of its bearer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The node that it is bound to.
    pub node: Option<String>,
    /// The uid of that node's object.
    pub node_uid: Option<String>,
}

/// The token is another node's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the token is bound to node {token}, and this agent is told that its node is {node}: mend --node")]
pub struct OtherNode {
    /// Whose it is.
    pub token: String,
    /// Who we are told to be.
    pub node: String,
}

impl Identity {
    /// Whether the agent of this node may bear the token.
    ///
    /// # Errors
    /// When it is bound to another node.
    pub fn of_node(&self, node: &str) -> Result<(), OtherNode> {
        match &self.node {
            Some(token) if token != node => Err(OtherNode {
                token: token.clone(),
                node: node.to_owned(),
            }),
            _ => Ok(()),
        }
    }
}

/// The body of an answer.
#[derive(Debug)]
pub struct Chunks {
    body: Body,
}

impl Chunks {
    /// The next piece; none at the end.
    ///
    /// # Errors
    /// When none comes within `patience`, or the connection breaks.
    pub async fn next(&mut self, patience: Duration) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = tokio::time::timeout(patience, self.body.frame())
                .await
                .map_err(|_| Failure::silent(patience))?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => {
                    return Err(Failure::new(Cause::Unreachable, chain(&error)));
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    async fn collect(&mut self, limit: usize, patience: Duration) -> Result<Vec<u8>, Failure> {
        let mut content = Vec::new();
        while let Some(data) = self.next(patience).await? {
            if content.len() + data.len() > limit {
                return Err(Failure::garbled(format!("an answer of more than {limit} bytes")));
            }
            content.extend_from_slice(&data);
        }
        Ok(content)
    }
}

/// How long to wait before asking again: half a second, doubling up to half a minute, each spread over its second half, so
/// that those who failed together do not ask together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(500);
    /// The longest wait.
    pub const LAST: Duration = Duration::from_secs(30);

    /// It went well.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }

    /// It failed: how long to wait.
    pub fn next(&mut self, asked: Option<Duration>) -> Duration {
        let longest = Self::FIRST * 2_u32.saturating_pow(self.failures.min(8));
        self.failures = self.failures.saturating_add(1);
        let longest = longest.min(Self::LAST);
        let wait = longest / 2 + jitter(longest / 2);
        wait.max(asked.unwrap_or_default().min(2 * Self::LAST))
    }
}

/// A random time below this one.
#[must_use]
pub fn jitter(below: Duration) -> Duration {
    // Without random numbers everybody waits equally long, which is no error.
    let random = rand::rngs::SysRng.try_next_u32().unwrap_or(u32::MAX);
    below.mul_f64(f64::from(random) / (f64::from(u32::MAX) + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_half_a_minute_and_are_spread() {
        let mut backoff = Backoff::default();
        let mut longest = Duration::from_millis(500);
        for _ in 0..20 {
            let wait = backoff.next(None);
            assert!(longest / 2 <= wait && wait <= longest, "{wait:?} of {longest:?}");
            longest = (longest * 2).min(Backoff::LAST);
        }
        backoff.reset();
        assert!(backoff.next(None) <= Duration::from_millis(500));
        assert_eq!(backoff.next(Some(Duration::from_secs(7))), Duration::from_secs(7));
        let waits: std::collections::BTreeSet<_> = (0..20).map(|_| jitter(Duration::from_secs(1))).collect();
        assert!(waits.len() > 10, "{waits:?}");
        assert!(waits.iter().all(|wait| *wait < Duration::from_secs(1)));
    }

    #[test]
    fn a_token_of_another_node_is_refused() {
        let identity = |node: Option<&str>| Identity {
            node: node.map(str::to_owned),
            node_uid: None,
        };
        assert_eq!(identity(Some("edge-1")).of_node("edge-1"), Ok(()));
        assert_eq!(identity(None).of_node("edge-1"), Ok(()));
        let refused = identity(Some("edge-2")).of_node("edge-1").unwrap_err();
        assert!(refused.to_string().contains("edge-2"), "{refused}");
    }

    #[test]
    fn a_status_says_why_and_when_to_ask_again() {
        let status: Status = serde_json::from_str(
            r#"{"kind":"Status","status":"Failure","message":"too many","code":429,"details":{"retryAfterSeconds":3}}"#,
        )
        .unwrap();
        let failure = Failure::from_status(429, Some(&status));
        assert_eq!(failure.to_string(), "too many (429)");
        assert_eq!(failure.retry_after, Some(Duration::from_secs(3)));
        assert_eq!(failure.code(), Some(429));
        assert_eq!(
            Failure::from_status(502, None).to_string(),
            "the API server answers 502"
        );
    }
}
