//! A real API server, or a whole cluster, for a test; see the crate `holdfast-cluster`. And Holdfast on it, with workloads as
//! pods, and what is said of a policy.

mod installation;
mod pod;
mod status;

use std::path::{Path, PathBuf};

use holdfast_cluster::Lacking;
pub use holdfast_cluster::{ApiServer, Cluster, Content, Image, Kubectl, Options, Process};
pub use installation::{Installation, NAMESPACE, OVERLAY, PARTS, SYSTEM};
pub use pod::{Pod, Workload};
pub use status::{Condition, Laggard, Metadata, Nodes, Policy, Recorder, Seen, Status};

use crate::{Reason, skip};

/// An API server: that of `$HOLDFAST_TEST_KUBECONFIG`, else a new one, gone when dropped.
///
/// # Errors
/// [`Reason`], which skips the test; or when it does not get ready.
pub fn api_server() -> anyhow::Result<ApiServer> {
    ApiServer::start().map_err(or_skip)
}

/// A new API server on port 6443 of a lab's node or workload, where its agents find it at 127.0.0.1.
///
/// # Errors
/// As [`api_server`].
pub fn api_server_in(space: &crate::Space) -> anyhow::Result<ApiServer> {
    ApiServer::start_in(&space.net_file()).map_err(or_skip)
}

/// A cluster whose nodes are Ready, gone when dropped.
///
/// # Errors
/// As [`api_server`].
pub fn cluster(options: &Options) -> anyhow::Result<Cluster> {
    Cluster::start(options).map_err(or_skip)
}

/// The image of the agent that was built for the tests, `localhost/holdfast:dev`, as a docker-archive in this folder.
///
/// # Errors
/// [`Reason`], which skips the test; or when it cannot be made.
pub fn agent_image(folder: &Path) -> anyhow::Result<PathBuf> {
    let agent = crate::node::agent_binary()?;
    let archive = folder.join("holdfast.tar");
    Image::of_agent(&agent)?.write(&archive, &folder.join("scratch"))?;
    Ok(archive)
}

/// What keeps this machine from running an API server.
pub(crate) fn missing() -> Option<Reason> {
    let cache = holdfast_cluster::cache_dir().ok()?;
    holdfast_cluster::lacking_for_api(&cache).as_ref().map(reason)
}

/// What a machine lacks skips a test; everything else fails it.
fn or_skip(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Lacking>() {
        Some(lacking) => skip(reason(lacking)),
        None => error,
    }
}

const fn reason(lacking: &Lacking) -> Reason {
    match lacking {
        Lacking::Root => Reason::NotRoot,
        Lacking::Kubernetes => Reason::NoKubernetes,
        Lacking::Package(name) => Reason::NoProgram(name),
        Lacking::Memory => Reason::NoMemory,
    }
}
