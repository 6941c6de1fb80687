//! The kernel side: maps, links, programs, proofs.

mod adopt;
mod attach;
mod audit;
#[cfg(any(test, feature = "chaos"))]
pub mod chaos;
mod convert;
#[cfg(any(test, feature = "chaos"))]
pub mod fake;
pub mod filter;
mod gap;
mod kernel;
pub mod left;
mod maps;
pub mod object;
pub mod pins;
mod proof;
pub mod raw;
mod rings;
pub mod uninstall;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use holdfast_engine::belief::{Audited, Belief};
use holdfast_engine::model::{Adoption, Ifindex, Op, OpResult, RegistryRead};
use rustix::io::Errno;

use crate::netlink::tc::TcError;
use crate::registry::RegistryError;

pub use attach::{AttachMode, Hook};
pub use kernel::{Kernel, Opened, Options, try_load};
pub use maps::Maps;
pub use object::NotBuilt;
pub use pins::{AgentLock, PinError, Sizes};
pub use proof::{Answer, Packet};
pub use rings::{Logs, Wakes};

/// What the engine's operations are carried out on.
///
/// All calls block for as long as the kernel takes and are made from worker threads, one per lane.
pub trait Datapath: Send + Sync + 'static {
    /// Carries one operation out.
    fn carry_out(&self, op: &Op) -> OpResult;

    /// Reads registry rows, one answer per asked ifindex. A failed read is [`RegistryRead::Failed`], never `Absent`.
    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)>;

    /// Compares what is believed of the kernel with what is there. Changes nothing.
    fn audit(&self, beliefs: &[Belief]) -> Audited;

    /// The same for whoever only wants to see: also what nobody believes in stays unknown to later operations, so that
    /// the next audit finds it.
    fn look(&self, beliefs: &[Belief]) -> Audited;

    /// What earlier lives left in the pins.
    ///
    /// # Errors
    /// When a pin cannot be read back; the agent then refuses to start.
    fn adopt(&self) -> Result<Adoption, DatapathError>;

    /// Numbers for the metrics.
    fn stats(&self) -> Stats;

    /// Sets the debug level in the control map: 0 = no log lines.
    ///
    /// # Errors
    /// When the control map cannot be written.
    fn set_debug(&self, level: u64) -> Result<(), DatapathError>;
}

/// Numbers for the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Entries and capacity of each map.
    pub maps: BTreeMap<&'static str, MapStats>,
    /// Packets by verdict, summed over the CPUs, indexed by [`holdfast_ebpf::abi::Verdict`].
    pub packets: Vec<u64>,
    /// Proofs that agreed.
    pub proofs_ok: u64,
    /// Proofs that did not.
    pub proofs_failed: u64,
}

/// One map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStats {
    /// Entries in use; none where counting them would cost too much (flows).
    pub entries: Option<u64>,
    /// Capacity.
    pub capacity: u64,
    /// Elements written by this process.
    pub updates: u64,
    /// Elements deleted by this process.
    pub deletes: u64,
}

/// Why the kernel side cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// There is no BPF object in this binary.
    #[error(transparent)]
    NotBuilt(#[from] NotBuilt),
    /// A pin, or the directory of pins.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The devices' filters could not be listed.
    #[error("listing the qdiscs of all devices: {0}")]
    Filters(#[from] TcError),
    /// It could not be found out whether this kernel has tcx.
    #[error("trying tcx: {0}; `holdfast preflight` says what this kernel lacks")]
    Tcx(Errno),
    /// The BPF object was refused, by its parser or by the kernel.
    #[error("the BPF object: {doing}: {message}; `holdfast preflight` says what this kernel lacks")]
    Object {
        /// What was done with it.
        doing: &'static str,
        /// Why it was refused, with the verifier's words.
        message: String,
    },
    /// The BPF object has no such map, or of another shape than this binary: they were built from different sources.
    #[error("the BPF object has no map {name}: build it anew (`cargo xtask build-ebpf`)")]
    MapNotInObject {
        /// Its name.
        name: &'static str,
    },
    /// The BPF object has no such program.
    #[error("the BPF object has no classifier: build it anew (`cargo xtask build-ebpf`)")]
    ProgramNotInObject,
    /// A map could not be used.
    #[error("{doing} {map}: {errno}")]
    Map {
        /// What was done with it.
        doing: &'static str,
        /// Its name.
        map: &'static str,
        /// Why it failed.
        errno: Errno,
    },
}

impl DatapathError {
    fn map(doing: &'static str, map: &'static str, errno: Errno) -> Self {
        Self::Map { doing, map, errno }
    }

    /// Keeps the whole chain of causes: the verifier's words are at its end.
    fn object(doing: &'static str, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            cause = error.source();
        }
        Self::Object { doing, message }
    }
}
