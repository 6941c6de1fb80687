//! The way to an API server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a request may take to be written.
const WRITE: Duration = Duration::from_secs(10);
/// How long an answer may take, where not even a large one takes as long.
pub const ANSWER: Duration = Duration::from_secs(10);

/// Where there is no way to an API server.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The file is not there, or is no kubeconfig.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KubeconfigError,
    },
    /// There is no service account to be found.
    #[error("not in a pod with a service account ({0}): name a kubeconfig")]
    NotInCluster(#[from] InClusterError),
    /// What is written there does not make a client.
    #[error("the way to the API server: {0}")]
    Client(#[from] kube::Error),
}

/// A client for the API server of a kubeconfig, or else for that of the pod's own service account. Nothing is asked yet.
///
/// Failed requests are not tried again: whoever asks knows better when. Answers have no time limit, because watches
/// last; use [`ANSWER`] for everything else.
///
/// # Errors
/// [`AccessError`].
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, AccessError> {
    let mut config = match kubeconfig {
        Some(path) => from_file(path).await.map_err(|source| AccessError::File {
            path: path.to_owned(),
            source,
        })?,
        None => Config::incluster()?,
    };
    config.connect_timeout = Some(CONNECT);
    config.write_timeout = Some(WRITE);
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    let kubeconfig = Kubeconfig::read_from(path)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
}
