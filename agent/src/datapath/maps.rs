//! The maps of the object: found in the pins or made, checked, and opened for use.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use aya::maps::{MapData, PerCpuArray, RingBuf};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use holdfast_ebpf::abi::{self, pin};
use tracing_log::log::{Log, Metadata, Record};

use super::DatapathError;
use super::object::object;
use super::pins::{self, Layout, PinError, Pins, Sizes};
use super::raw::{Map, MapInfo, Trie, Words};

/// The maps that the agent reads and writes.
#[derive(Debug)]
pub struct Maps {
    /// Consumer rows.
    pub consumers: Map<u32, abi::ConsumerRow>,
    /// Source addresses.
    pub sources: Map<abi::SourceKey, u64>,
    /// Route entries.
    pub services: Map<abi::ServiceKey, abi::RouteEntry>,
    /// Route entries for prefixes.
    pub prefixes: Trie<abi::PrefixKey, abi::PrefixEntry>,
    /// The node's own addresses.
    pub locals: Map<abi::LocalKey, u64>,
    /// Policy slots.
    pub policies: Map<u32, abi::PolicySlot>,
    /// The arena of slots.
    pub slots: Map<u32, u32>,
    /// Backends.
    pub backends: Map<u32, abi::Backend>,
    /// The life of the pins, and which program is the current one.
    pub epoch: Map<u32, u64>,
    /// Switches, in our memory.
    pub control: Words,
    /// Name, id and capacity of every map of the layout.
    pub all: Vec<(&'static str, MapInfo)>,
}

impl Maps {
    /// How many prefixes there may be. One element stays free: before Linux 6.13 a trie that is full refuses also to replace
    /// what is there, and an entry that is there must be openable.
    pub(super) const fn room_for_prefixes(&self) -> u32 {
        self.prefixes.info().shape.max_entries.saturating_sub(1)
    }

    /// Writes an element, and says so to the program meanwhile: while an element is replaced, a look-up of another
    /// can miss ([`abi::control::WRITES`]). One thread at a time.
    pub(super) fn writing<T>(&self, write: impl FnOnce() -> T) -> T {
        // Odd already: an earlier life ended within a write.
        let odd = self.control.load(abi::control::WRITES) | 1;
        self.control.store(abi::control::WRITES, odd);
        fence(Ordering::SeqCst);
        let written = write();
        fence(Ordering::SeqCst);
        self.control.store(abi::control::WRITES, odd.wrapping_add(1));
        written
    }
}

/// The object, parsed, its maps found in the pins or made; the program is not loaded yet.
pub(super) struct Prepared {
    pub(super) ebpf: Ebpf,
    pub(super) maps: Maps,
    /// Some map of this layout had to be made, so that nothing of an earlier life can be complete.
    pub(super) fresh: bool,
}

/// Finds or makes every map. What is pinned under a name of ours and does not fit is set aside first.
///
/// # Errors
/// When the object is not built in, a pin cannot be used, or a map cannot be made.
pub(super) fn prepare(pins: &Pins, sizes: &Sizes) -> Result<Prepared, DatapathError> {
    let layouts = pins::layout(sizes);
    let mut fresh = false;
    for layout in layouts.iter().chain([&pins::EPOCH_LAYOUT]) {
        fresh |= !is_usable(pins, layout)?;
    }

    let mut loader = loader();
    let registry = pins.registry();
    loader.map_pin_path(pin::REGISTRY, registry.as_path());
    let paths: Vec<_> = layouts.iter().map(|layout| pins.map(layout.name)).collect();
    for (layout, path) in layouts.iter().zip(&paths) {
        loader.map_pin_path(layout.name, path.as_path());
        if layout.sized {
            loader.map_max_entries(layout.name, layout.shape.max_entries);
        }
    }
    let ebpf = loader
        .load(object()?)
        .map_err(|error| DatapathError::object("making its maps", &error))?;

    // aya takes what is pinned as it is, and makes what is not: only now is it sure that every pin is what the
    // programs and this process agree on.
    let open = |layout: &Layout| -> Result<(OwnedFd, MapInfo), DatapathError> {
        let path = pins.map(layout.name);
        let found = layout.open(&path)?;
        let found = found.ok_or(DatapathError::MapNotInObject { name: layout.name })?;
        pins::make_private(&path)?;
        Ok(found)
    };
    pins::EPOCH_LAYOUT.open_or_create(&pins.map(pins::EPOCH))?;
    let maps = Maps::open(&layouts, open)?;
    Ok(Prepared { ebpf, maps, fresh })
}

/// A loader without the kernel's own type information: the program has no relocations against it, and reading it costs
/// megabytes.
fn loader<'a>() -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    loader
}

/// The object with maps of its own, which go with it.
pub(super) fn unpinned(sizes: &Sizes) -> Result<Ebpf, DatapathError> {
    let mut loader = loader();
    for layout in pins::layout(sizes) {
        if layout.sized {
            loader.map_max_entries(layout.name, layout.shape.max_entries);
        }
    }
    loader
        .load(object()?)
        .map_err(|error| DatapathError::object("making its maps", &error))
}

/// Whether a usable map is pinned; something else under its name is set aside.
fn is_usable(pins: &Pins, layout: &Layout) -> Result<bool, DatapathError> {
    let path = pins.map(layout.name);
    match layout.open(&path) {
        Ok(None) => Ok(false),
        Ok(Some((_, info))) => {
            if info.shape.max_entries != layout.shape.max_entries {
                tracing::warn!(
                    map = layout.name,
                    entries = info.shape.max_entries,
                    configured = layout.shape.max_entries,
                    "a pinned map keeps the number of entries it was made with; the next boot makes it anew"
                );
            }
            Ok(true)
        }
        Err(PinError::Layout { path, difference }) => {
            let aside = pins::set_aside(&path)?;
            tracing::warn!(
                pin = %path.display(), aside = %aside.display(), %difference,
                "something else was pinned under the name of a map: set aside, not used"
            );
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

impl Maps {
    pub(super) fn open(
        layouts: &[Layout],
        open: impl Fn(&Layout) -> Result<(OwnedFd, MapInfo), DatapathError>,
    ) -> Result<Self, DatapathError> {
        let mut all = Vec::new();
        for layout in layouts {
            all.push((layout.name, open(layout)?.1));
        }
        let named = |name: &'static str| -> Result<OwnedFd, DatapathError> {
            let layout = layouts.iter().find(|layout| layout.name == name);
            let layout = layout.ok_or(DatapathError::MapNotInObject { name })?;
            Ok(open(layout)?.0)
        };
        let failed = |name: &'static str| move |errno| DatapathError::map("opening", name, errno);
        let control = Map::new(named(pin::CONTROL)?).map_err(failed(pin::CONTROL))?;
        Ok(Self {
            consumers: Map::new(named(pin::CONSUMERS)?).map_err(failed(pin::CONSUMERS))?,
            sources: Map::new(named(pin::SOURCES)?).map_err(failed(pin::SOURCES))?,
            services: Map::new(named(pin::SERVICES)?).map_err(failed(pin::SERVICES))?,
            prefixes: Trie::new(named(pin::PREFIXES)?).map_err(failed(pin::PREFIXES))?,
            locals: Map::new(named(pin::LOCALS)?).map_err(failed(pin::LOCALS))?,
            policies: Map::new(named(pin::POLICIES)?).map_err(failed(pin::POLICIES))?,
            slots: Map::new(named(pin::SLOTS)?).map_err(failed(pin::SLOTS))?,
            backends: Map::new(named(pin::BACKENDS)?).map_err(failed(pin::BACKENDS))?,
            epoch: Map::new(open(&pins::EPOCH_LAYOUT)?.0).map_err(failed(pins::EPOCH))?,
            control: Words::map(&control).map_err(failed(pin::CONTROL))?,
            all,
        })
    }
}

/// Packets per verdict, as the program counts them.
pub(super) struct Counters(PerCpuArray<MapData, u64>);

impl Counters {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let map = ebpf
            .take_map(pin::COUNTERS)
            .ok_or(DatapathError::MapNotInObject { name: pin::COUNTERS })?;
        PerCpuArray::try_from(map)
            .map(Self)
            .map_err(|error| DatapathError::object("opening its counters", &error))
    }

    /// Sums over the CPUs, by verdict.
    pub(super) fn read(&self) -> Vec<u64> {
        abi::Verdict::ALL
            .iter()
            .map(|verdict| {
                self.0
                    .get(&(*verdict as u32), 0)
                    .map(|values| values.iter().sum())
                    .unwrap_or_default()
            })
            .collect()
    }
}

/// Ifindexes whose registered token is not their row's, as the program sees packets of them.
pub struct Wakes(RingBuf<MapData>);

impl Wakes {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let map = ebpf
            .take_map(pin::WAKES)
            .ok_or(DatapathError::MapNotInObject { name: pin::WAKES })?;
        RingBuf::try_from(map)
            .map(Self)
            .map_err(|error| DatapathError::object("opening its ring of wakes", &error))
    }

    /// The next one that is there.
    pub(super) fn next(&mut self) -> Option<u32> {
        loop {
            let record = self.0.next()?;
            if let Some(bytes) = record.first_chunk() {
                return Some(u32::from_ne_bytes(*bytes));
            }
        }
    }
}

impl AsFd for Wakes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The program's debug lines.
pub struct Logs(EbpfLogger<ToTracing>);

/// Turns records into tracing events, whatever the process-wide `log` logger is.
struct ToTracing;

impl Log for ToTracing {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // It fails for nothing but a sink of its own, and there is nobody to tell.
        let _ = tracing_log::format_trace(record);
    }

    fn flush(&self) {}
}

impl Logs {
    /// None when the program logs nothing: the object has no such map then.
    pub(super) fn take(ebpf: &mut Ebpf) -> Option<Self> {
        EbpfLogger::init_with_logger(ebpf, ToTracing).ok().map(Self)
    }

    /// Writes what is there as tracing events.
    pub(super) fn flush(&mut self) {
        self.0.flush();
    }
}

impl AsFd for Logs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
