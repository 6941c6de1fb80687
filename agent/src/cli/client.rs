//! Asks the running agent over its socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::serve::socket;
use crate::serve::wire::Problem;

/// Largest answer that is read: a status of 100,000 policies is below.
const LARGEST: usize = 256 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("no agent is running ({}: {reason})", path.display())]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Not allowed to ask.
    #[error("{}: only root may ask the agent", .0.display())]
    Denied(PathBuf),
    /// It takes too long.
    #[error("no answer of the agent within {0:?}")]
    TooLate(Duration),
    /// The connection broke, or what came over it makes no sense.
    #[error("the agent's answer cannot be used: {0}")]
    Broken(String),
    /// The agent cannot or will not answer.
    #[error("{message}")]
    Refused {
        /// HTTP status.
        status: StatusCode,
        /// What it said.
        message: String,
    },
}

impl ClientError {
    fn broken(error: impl ToString) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Asks one question a connection.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// For the agent with this run directory.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        Self {
            path: run_dir.join(socket::NAME),
        }
    }

    /// `GET` of a path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str, patience: Duration) -> Result<T, ClientError> {
        self.ask(Method::GET, path, Bytes::new(), patience).await
    }

    /// `POST` of a value.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        patience: Duration,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(ClientError::broken)?;
        self.ask(Method::POST, path, body.into(), patience).await
    }

    /// `PUT` of a value.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        patience: Duration,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(ClientError::broken)?;
        self.ask(Method::PUT, path, body.into(), patience).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<T, ClientError> {
        let (status, answer) = tokio::time::timeout(patience, self.exchange(method, path, body))
            .await
            .map_err(|_| ClientError::TooLate(patience))??;
        if status == StatusCode::OK {
            return serde_json::from_slice(&answer).map_err(ClientError::broken);
        }
        let message = match serde_json::from_slice::<Problem>(&answer) {
            Ok(problem) => problem.error,
            Err(_) => format!("the agent answered {status}"),
        };
        Err(ClientError::Refused { status, message })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let stream = UnixStream::connect(&self.path)
            .await
            .map_err(|error| self.no_connection(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(ClientError::broken)?;
        // Ends with the connection; an error of it shows in the request.
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "holdfast")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(ClientError::broken)?;
        let response = sender.send_request(request).await.map_err(ClientError::broken)?;
        let status = response.status();
        let answer = Limited::new(response.into_body(), LARGEST)
            .collect()
            .await
            .map_err(ClientError::broken)?
            .to_bytes();
        connection.abort();
        Ok((status, answer))
    }

    fn no_connection(&self, error: &io::Error) -> ClientError {
        match error.kind() {
            io::ErrorKind::PermissionDenied => ClientError::Denied(self.path.clone()),
            _ => ClientError::NotRunning {
                path: self.path.clone(),
                reason: error.to_string(),
            },
        }
    }
}

/// Runs a question to its end.
///
/// # Errors
/// When the system gives no event loop; the error is one of [`ClientError`].
pub fn block_on<T>(question: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ClientError::broken)?
        .block_on(question)
}
