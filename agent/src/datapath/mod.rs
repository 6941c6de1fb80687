//! The kernel side: maps, links, programs, proofs.

pub mod object;
pub mod pins;
pub mod raw;

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Adoption, Ifindex, Op, OpResult, RegistryRead};

/// What the engine's operations are carried out on.
///
/// All calls block for as long as the kernel takes and are made from worker threads, one per lane.
pub trait Datapath: Send + Sync + 'static {
    /// Carries one operation out.
    fn carry_out(&self, op: &Op) -> OpResult;

    /// Reads registry rows, one answer per asked ifindex. A failed read is [`RegistryRead::Failed`], never `Absent`.
    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)>;

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
    /// Anything, with what to do about it.
    #[error("{0}")]
    Other(String),
}
