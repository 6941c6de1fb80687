//! A real Kubernetes in namespaces: etcd, API server, controller manager and scheduler on one network, and nodes with
//! containerd, a kubelet and the bridge plugin, each in network and mount namespaces of its own. `cargo xtask cluster`
//! keeps one for people, the tests start their own. [`ApiServer`] is the half of it that tests of the API need.
//!
//! All processes of a cluster are in one process namespace ([`enclosure`]), whose first process ends with whoever started
//! it: the kernel then takes processes, mounts, devices and namespaces back, however that end came. Nothing of the
//! machine's own network is touched.

mod agent;
mod api;
mod binaries;
mod cluster;
mod enclosure;
mod image;
mod make;
mod node;
mod pki;
mod program;
mod wait;

pub use agent::AGENT_IMAGE;
pub use api::{ApiServer, Kubectl};
pub use binaries::{Binaries, Lacking, cache_dir, lacking, lacking_for_api, packages};
pub use cluster::{Cluster, Options, Process};
pub use image::{Content, Image};
pub use make::make;
