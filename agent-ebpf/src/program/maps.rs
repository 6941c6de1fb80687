//! The maps, as [`holdfast_ebpf::abi`] describes them. User space may create them with other sizes.

use aya_ebpf::bindings::BPF_F_MMAPABLE;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf};
use aya_ebpf::macros::btf_map;
use holdfast_ebpf::abi::{
    self, Answerers, Backend, ConsumerRow, Flow, FlowKey, Fragment, FragmentKey, LocalKey, PolicySlot,
    PrefixEntry, RegistryRow, RouteEntry, ServiceKey, SourceKey, capacity,
};

#[btf_map(name = "registry_v1")]
pub(super) static REGISTRY: HashMap<u32, RegistryRow, { capacity::REGISTRY as usize }> = HashMap::new();

#[btf_map(name = "consumers")]
pub(super) static CONSUMERS: HashMap<u32, ConsumerRow, { capacity::CONSUMERS as usize }> = HashMap::new();

#[btf_map(name = "sources")]
pub(super) static SOURCES: HashMap<SourceKey, u64, { capacity::SOURCES as usize }> = HashMap::new();

#[btf_map(name = "services")]
pub(super) static SERVICES: HashMap<ServiceKey, RouteEntry, { capacity::SERVICES as usize }> = HashMap::new();

/// The key behind its length, as words: [`abi::PrefixKey`].
#[btf_map(name = "prefixes")]
pub(super) static PREFIXES: LpmTrie<[u32; 6], PrefixEntry, { capacity::PREFIXES as usize }> = LpmTrie::new();

#[btf_map(name = "locals")]
pub(super) static LOCALS: HashMap<LocalKey, u64, { capacity::LOCALS as usize }> = HashMap::new();

#[btf_map(name = "policies")]
pub(super) static POLICIES: Array<PolicySlot, { capacity::POLICIES as usize }> = Array::new();

#[btf_map(name = "slots")]
pub(super) static SLOTS: Array<u32, { capacity::SLOTS as usize }> = Array::new();

#[btf_map(name = "backends")]
pub(super) static BACKENDS: Array<Backend, { capacity::BACKENDS as usize }> = Array::new();

#[btf_map(name = "flows")]
pub(super) static FLOWS: LruHashMap<FlowKey, Flow, { capacity::FLOWS as usize }> = LruHashMap::new();

#[btf_map(name = "counters")]
pub(super) static COUNTERS: PerCpuArray<u64, { abi::COUNTERS as usize }> = PerCpuArray::new();

#[btf_map(name = "control")]
pub(super) static CONTROL: Array<u64, { abi::control::LEN as usize }, { BPF_F_MMAPABLE as usize }> =
    Array::new();

/// A word of `control`.
#[inline(always)]
pub(super) fn control(index: u32) -> u64 {
    match CONTROL.get_ptr(index) {
        // SAFETY: a map value.
        Some(word) => unsafe { super::once(word) },
        None => 0,
    }
}

#[btf_map(name = "wakes")]
pub(super) static WAKES: RingBuf<u32, { capacity::WAKES_BYTES as usize }> = RingBuf::new();

#[btf_map(name = "wake_marks")]
pub(super) static WAKE_MARKS: LruHashMap<u32, u64, { capacity::WAKE_MARKS as usize }> = LruHashMap::new();

#[btf_map(name = "rates")]
pub(super) static RATES: LruHashMap<u32, u64, { capacity::RATES as usize }> = LruHashMap::new();

#[btf_map(name = "fragments")]
pub(super) static FRAGMENTS: LruHashMap<FragmentKey, Fragment, { capacity::FRAGMENTS as usize }> =
    LruHashMap::new();

#[btf_map(name = "answerers")]
pub(super) static ANSWERERS: Array<Answerers, { capacity::ANSWERERS as usize }> = Array::new();
