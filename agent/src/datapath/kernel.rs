//! The real data path.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_ebpf::abi::{control, pin};
use holdfast_engine::belief::{Audited, Belief};
use holdfast_engine::model::{
    Adoption, Capacity, Device, Features, Ifindex, Op, OpDone, OpError, OpResult, RegistryRead, Token,
};
use rand::TryRng;
use rand::rngs::SysRng;
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::attach::{self, AttachMode, Hook, Links, Program};
use super::audit::Auditor;
use super::maps::{self, Counters, Maps, Prepared};
use super::object::object;
use super::pins::{AgentLock, Pins, Sizes};
use super::proof::{Answer, Packet, Prover, Question};
use super::raw;
use super::write::{Known, Tally, Writer};
use super::{Datapath, DatapathError, Logs, MapStats, Stats, Wakes, adopt};
use crate::registry::{Registry, RegistryError};

/// How long a worker waits for the registry's lock: other writes wait behind it, and the engine tries again.
const REGISTRY_PATIENCE: Duration = Duration::from_millis(100);

/// New flows that one consumer may open a second ...
const FLOW_RATE: u64 = 10_000;
/// ... and at once, before the rate binds it.
const FLOW_BURST: u64 = 20_000;

/// Words of the pinned `epoch` map.
mod epoch_word {
    /// First half of the epoch.
    pub(super) const EPOCH_HIGH: u32 = 0;
    /// Second half.
    pub(super) const EPOCH_LOW: u32 = 1;
    /// Digest of the object whose program is the current one.
    pub(super) const OBJECT: u32 = 2;
    /// Digest of the ids of the maps that it was loaded with.
    pub(super) const MAPS: u32 = 3;
    /// Its tag.
    pub(super) const TAG: u32 = 4;
    /// Its id. Written last: without it the rest means nothing.
    pub(super) const PROGRAM: u32 = 5;
}

/// What a [`Kernel`] is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where pins go.
    pub bpffs_dir: PathBuf,
    /// Where the registry's lock is.
    pub run_dir: PathBuf,
    /// Sizes of the maps that are made.
    pub sizes: Sizes,
    /// Where the program is attached.
    pub attach: AttachMode,
    /// A foreign program before ours does not fail a proof.
    pub allow_foreign_before: bool,
}

/// The real data path, and what comes with it.
pub struct Opened {
    /// The data path.
    pub kernel: Kernel,
    /// Ifindexes whose identity the program found changed. To be run as a task.
    pub wakes: Wakes,
    /// The program's debug lines, if it has any. To be run as a task.
    pub logs: Option<Logs>,
    /// Names the life of the pins: survives restart and upgrade, not reboot or a wiped bpffs.
    pub epoch: String,
    /// Sizes of the arenas that the engine hands out.
    pub capacity: Capacity,
}

/// Maps, links and the program of this node.
///
/// Dropping it detaches nothing: whatever serves is pinned.
pub struct Kernel {
    pins: Pins,
    links: Links,
    maps: Maps,
    counters: Counters,
    registry: Registry,
    program: Program,
    allow_foreign_before: bool,
    known: Mutex<Known>,
    tally: Tally,
    proofs: Proofs,
    _lock: AgentLock,
}

#[derive(Debug, Default)]
struct Proofs {
    agreed: AtomicU64,
    disagreed: AtomicU64,
}

impl Kernel {
    /// What this data path does.
    pub const FEATURES: Features = Features {
        prefixes: true,
        translate: false,
        several_producers: true,
        neighbour_delivery: true,
        max_staleness: false,
    };

    /// Finds in the pins what an earlier life left, and makes what is missing.
    ///
    /// Nothing that serves is touched, but for the program: another one than this binary's is replaced in the place
    /// of each link, between two packets.
    ///
    /// # Errors
    /// When this node cannot be served; each error says what to do.
    pub fn open(options: &Options, lock: AgentLock) -> Result<Opened, DatapathError> {
        let pins = Pins::new(&options.bpffs_dir);
        pins.make_directories()?;
        let registry = Registry::open_or_create(&options.bpffs_dir, &options.run_dir)?;
        let Prepared {
            mut ebpf,
            maps,
            fresh,
        } = maps::prepare(&pins, &options.sizes)?;
        let epoch = epoch(&maps, fresh)?;

        let record = Record::wanted(&maps, &registry)?;
        let program = match record.current(&maps, &pins)? {
            Some(program) => program,
            None => {
                let program = Program::load(&mut ebpf, &pins)?;
                record.write(&maps, &program)?;
                program
            }
        };
        let hook =
            Hook::choose(options.attach, || raw::try_tcx(program.fd.as_fd())).map_err(DatapathError::Tcx)?;
        let links = Links::new(pins.clone(), hook);
        let recovered = links.recover(&program)?;
        if !recovered.left_behind {
            // Only now does no link and no filter lead to another program any more.
            links.unpin_programs_but(program.info.id)?;
        }
        let (_, known) = adopt::read(&maps, recovered.attached)?;

        maps.control.store(control::DEBUG, 0);
        maps.control.store(
            control::FLOW_INTERVAL,
            Duration::from_secs(1).as_nanos() as u64 / FLOW_RATE,
        );
        maps.control.store(
            control::FLOW_BURST,
            FLOW_BURST * (Duration::from_secs(1).as_nanos() as u64 / FLOW_RATE),
        );
        maps.control.store(control::PORTS, control::DEFAULT_PORTS);
        maps.control.store(control::NONCE, random()?);

        let capacity = Capacity {
            policies: maps.policies.info().shape.max_entries,
            slots: maps.slots.info().shape.max_entries,
            backends: maps.backends.info().shape.max_entries,
        };
        Ok(Opened {
            wakes: Wakes::take(&mut ebpf)?,
            logs: Logs::take(&mut ebpf),
            kernel: Self {
                links,
                counters: Counters::take(&mut ebpf)?,
                registry,
                program,
                allow_foreign_before: options.allow_foreign_before,
                known: Mutex::new(known),
                tally: Tally::default(),
                proofs: Proofs::default(),
                _lock: lock,
                maps,
                pins,
            },
            epoch,
            capacity,
        })
    }

    /// Where the program is attached.
    #[must_use]
    pub const fn hook(&self) -> Hook {
        self.links.hook()
    }

    /// The kernel's id of the program that every attached device holds.
    #[must_use]
    pub const fn program_id(&self) -> u32 {
        self.program.info.id
    }

    /// The maps, for those who compare or tamper with them.
    #[must_use]
    pub const fn maps(&self) -> &Maps {
        &self.maps
    }

    /// Asks the program of a device what it would do with a packet, as things are.
    ///
    /// # Errors
    /// As a proof: the device is gone, or does not hold our program in its place.
    pub fn ask(&self, device: Device, packet: &Packet) -> Result<Answer, OpError> {
        let prover = self.prover();
        let program = prover.program_of(device)?;
        prover.ask(&program, device.ifindex, packet, Question::AS_IS)
    }

    const fn prover(&self) -> Prover<'_> {
        Prover {
            pins: &self.pins,
            links: &self.links,
            maps: &self.maps,
            registry: &self.registry,
            program: &self.program,
            known: &self.known,
            allow_foreign_before: self.allow_foreign_before,
        }
    }

    const fn auditor(&self, learns: bool) -> Auditor<'_> {
        Auditor {
            links: &self.links,
            maps: &self.maps,
            registry: &self.registry,
            program: self.program.info.id,
            known: &self.known,
            learns,
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // What is known is right after every single element.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, op: impl FnOnce(&mut Writer<'_>) -> Result<(), OpError>) -> Result<u32, OpError> {
        let mut known = self.known();
        let mut writer = Writer {
            maps: &self.maps,
            known: &mut known,
            tally: &self.tally,
            writes: 0,
        };
        op(&mut writer)?;
        Ok(writer.writes)
    }

    fn prove(&self, proof: impl FnOnce(&Prover<'_>) -> Result<(), OpError>) -> Result<u32, OpError> {
        let outcome = proof(&self.prover());
        let count = match outcome {
            Ok(()) => &self.proofs.agreed,
            Err(_) => &self.proofs.disagreed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        outcome.map(|()| 0)
    }

    fn delete_identity(&self, ifindex: Ifindex, token: Token) -> Result<u32, OpError> {
        match self.registry.unregister_within(ifindex, token, REGISTRY_PATIENCE) {
            Ok(deleted) => Ok(u32::from(deleted)),
            // It belongs to a later incarnation: ours is gone, which is what was asked for.
            Err(RegistryError::OtherIncarnation { .. }) => Ok(0),
            Err(error) => Err(OpError::Refused {
                message: error.to_string(),
            }),
        }
    }

    fn map_stats(&self) -> BTreeMap<&'static str, MapStats> {
        let known = self.known();
        let mut stats: BTreeMap<&'static str, MapStats> = self
            .maps
            .all
            .iter()
            .map(|(name, info)| {
                let entries = match *name {
                    pin::CONSUMERS => Some(known.rows.len() as u64),
                    pin::SOURCES => Some(known.sources_len()),
                    pin::LOCALS => Some(known.locals.len() as u64),
                    pin::SERVICES => Some(known.services_len()),
                    pin::PREFIXES => Some(known.prefixes_len()),
                    pin::POLICIES => Some(known.policies.len() as u64),
                    pin::BACKENDS => Some(known.backends.len() as u64),
                    // The arena is the engine's; flows and rates come and go in the kernel.
                    _ => None,
                };
                let (updates, deletes) = self.tally.read(name);
                let stats = MapStats {
                    entries,
                    capacity: u64::from(info.shape.max_entries),
                    updates,
                    deletes,
                };
                (*name, stats)
            })
            .collect();
        stats.insert(
            pin::REGISTRY,
            MapStats {
                entries: self.registry.len().ok().map(|rows| rows as u64),
                capacity: u64::from(self.registry.capacity()),
                ..MapStats::default()
            },
        );
        stats
    }
}

impl Datapath for Kernel {
    fn carry_out(&self, op: &Op) -> OpResult {
        let writes = match op {
            Op::Attach { device } => self.links.attach(&self.program, *device),
            Op::Detach { ifindex } => self.links.detach(*ifindex),
            Op::ClearInterface { ifindex } => self.write(|writer| writer.clear(*ifindex)),
            Op::WriteRow { ifindex, row } => self.write(|writer| writer.write_row(*ifindex, row)),
            Op::WriteSources { ifindex, add, delete } => {
                self.write(|writer| writer.write_sources(*ifindex, add, delete))
            }
            Op::WriteLocals { add, delete } => self.write(|writer| writer.write_locals(add, delete)),
            Op::WriteEntries { ifindex, entries } => {
                self.write(|writer| writer.write_entries(*ifindex, entries))
            }
            Op::DeleteEntries { ifindex, keys } => self.write(|writer| writer.delete_entries(*ifindex, keys)),
            Op::WriteBackends { backends } => self.write(|writer| writer.write_backends(backends)),
            Op::WriteSlots { base, slots } => self.write(|writer| writer.write_slots(*base, slots)),
            Op::WritePolicy { slot, value } => {
                self.write(|writer| writer.write_policy(*slot, value.as_ref()))
            }
            Op::DeleteIdentity { ifindex, token } => self.delete_identity(*ifindex, *token),
            Op::ProveSet {
                policy,
                device,
                selected,
                backends,
                slots,
            } => self.prove(|prover| prover.set(*policy, *device, *selected, backends, slots)),
            Op::ProveIntent(proof) => self.prove(|prover| prover.intent(proof)),
        };
        writes.map(|writes| OpDone { writes })
    }

    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)> {
        ifindexes
            .iter()
            .map(|&ifindex| {
                let read = match self.registry.read(ifindex) {
                    Ok(Some(identity)) => RegistryRead::Row(identity),
                    Ok(None) => RegistryRead::Absent,
                    Err(errno) => RegistryRead::Failed(io::Error::from(errno).to_string()),
                };
                (ifindex, read)
            })
            .collect()
    }

    fn audit(&self, beliefs: &[Belief]) -> Audited {
        self.auditor(true).audit(beliefs)
    }

    fn look(&self, beliefs: &[Belief]) -> Audited {
        self.auditor(false).audit(beliefs)
    }

    fn adopt(&self) -> Result<Adoption, DatapathError> {
        let recovered = self.links.recover(&self.program)?;
        let (mut adoption, known) = adopt::read(&self.maps, recovered.attached)?;
        adoption.identities = self
            .registry
            .identities()
            .map_err(|errno| DatapathError::map("reading", pin::REGISTRY, errno))?;
        *self.known() = known;
        Ok(adoption)
    }

    fn stats(&self) -> Stats {
        Stats {
            maps: self.map_stats(),
            packets: self.counters.read(),
            proofs_ok: self.proofs.agreed.load(Ordering::Relaxed),
            proofs_failed: self.proofs.disagreed.load(Ordering::Relaxed),
        }
    }

    fn set_debug(&self, level: u64) -> Result<(), DatapathError> {
        self.maps.control.store(control::DEBUG, level);
        Ok(())
    }
}

/// Loads the object with maps of one entry each, to see whether this kernel takes it. Says how many instructions the
/// verifier walked through.
///
/// # Errors
/// The verifier's, or [`DatapathError::NotBuilt`].
pub fn try_load() -> Result<u32, DatapathError> {
    let mut ebpf = maps::unpinned(&Sizes::SMALLEST)?;
    attach::load(&mut ebpf).map(|info| info.verified_instructions)
}

fn read_word(maps: &Maps, word: u32) -> Result<u64, DatapathError> {
    maps.epoch
        .lookup(&word)
        .map(Option::unwrap_or_default)
        .map_err(|errno| DatapathError::map("reading", super::pins::EPOCH, errno))
}

fn write_word(maps: &Maps, word: u32, value: u64) -> Result<(), DatapathError> {
    maps.epoch
        .update(&word, &value)
        .map_err(|errno| DatapathError::map("writing", super::pins::EPOCH, errno))
}

/// The life of the pins; another one when some of them had to be made.
fn epoch(maps: &Maps, fresh: bool) -> Result<String, DatapathError> {
    let mut high = read_word(maps, epoch_word::EPOCH_HIGH)?;
    let mut low = read_word(maps, epoch_word::EPOCH_LOW)?;
    if fresh || (high, low) == (0, 0) {
        (high, low) = (random()?, random()?);
        write_word(maps, epoch_word::EPOCH_HIGH, high)?;
        write_word(maps, epoch_word::EPOCH_LOW, low)?;
    }
    Ok(format!("{high:016x}{low:016x}"))
}

fn random() -> Result<u64, DatapathError> {
    loop {
        match SysRng.try_next_u64() {
            Ok(0) => {}
            Ok(random) => return Ok(random),
            Err(_) => return Err(DatapathError::map("asking for", "random numbers", Errno::IO)),
        }
    }
}

/// What the pinned program was loaded from and with. It is used again only if all of it is the same: the tag alone
/// says nothing of constants and maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    object: u64,
    maps: u64,
}

impl Record {
    fn wanted(maps: &Maps, registry: &Registry) -> Result<Self, DatapathError> {
        let mut ids = Sha256::new();
        ids.update(registry.map_id().to_ne_bytes());
        for (name, info) in &maps.all {
            ids.update(name.as_bytes());
            ids.update(info.id.to_ne_bytes());
        }
        Ok(Self {
            object: head(&Sha256::digest(object()?)),
            maps: head(&ids.finalize()),
        })
    }

    /// The pinned program, if it was loaded from this object with these maps.
    fn current(self, maps: &Maps, pins: &Pins) -> Result<Option<Program>, DatapathError> {
        let recorded = Self {
            object: read_word(maps, epoch_word::OBJECT)?,
            maps: read_word(maps, epoch_word::MAPS)?,
        };
        if recorded != self {
            return Ok(None);
        }
        let Ok(id) = u32::try_from(read_word(maps, epoch_word::PROGRAM)?) else {
            return Ok(None);
        };
        let tag = read_word(maps, epoch_word::TAG)?;
        Ok(Program::open(pins, id)?.filter(|program| program.info.tag == tag))
    }

    fn write(self, maps: &Maps, program: &Program) -> Result<(), DatapathError> {
        write_word(maps, epoch_word::PROGRAM, 0)?;
        write_word(maps, epoch_word::OBJECT, self.object)?;
        write_word(maps, epoch_word::MAPS, self.maps)?;
        write_word(maps, epoch_word::TAG, program.info.tag)?;
        write_word(maps, epoch_word::PROGRAM, u64::from(program.info.id))
    }
}

fn head(digest: &[u8]) -> u64 {
    digest
        .first_chunk()
        .copied()
        .map(u64::from_be_bytes)
        .unwrap_or_default()
}
