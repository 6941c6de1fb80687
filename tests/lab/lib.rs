//! The lab: nodes and workloads as network namespaces, identities registered as a CNI does, senders that number their
//! packets, receivers that count.
//!
//! Nothing here has a name outside: namespaces are held by open files, mounts are in a mount namespace, processes die
//! with the thread that started them. So whatever ends a test, also SIGKILL, takes everything with it.

pub mod alerts;
pub mod bulk;
pub mod cases;
pub mod codegen;
pub mod counters;
pub mod floor;
pub mod ground;
pub mod guest;
pub mod kubernetes;
pub mod lab;
pub mod node;
pub mod objects;
pub mod offload;
pub mod process;
pub mod prometheus;
pub mod rtnl;
pub mod space;
pub mod suite;
pub mod sysctl;
pub mod tamper;
pub mod tc;
pub mod told;
pub mod traffic;
pub mod unit;
mod until;
pub mod workload;

pub use lab::Lab;
pub use node::{EVENT_BUDGET, Node};
pub use space::Space;
pub use suite::{Reason, say, skip};
pub use until::{throughout, until};
pub use workload::Workload;
