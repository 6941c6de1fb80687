//! The program and where it is attached.
//!
//! Two hooks are known. **tcx**: a link in the chain of the device, first, pinned under the device's number. **clsact**,
//! for kernels without tcx: a filter in a place of its own (see [`filter`]). Which one is used is decided once, at start;
//! what an earlier life left at the other hook is replaced: ours is put at this hook first and taken from the other one
//! then, so that no packet meets neither (one that the first lets pass meets both, and is counted twice).
//!
//! Everything goes from pins: a pinned link tells the id of its program, a filter too, and the program is pinned under
//! that id (by id alone nothing can be opened without `CAP_SYS_ADMIN`). A device is meant by its ifindex, never by its
//! name, and what is attached lives by its pin or with the device: dropping what is held here detaches nothing.

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aya::Ebpf;
use aya::programs::SchedClassifier;
use holdfast_ebpf::abi::pin;
use holdfast_engine::model::{Device, Ifindex, OpError};
use rustix::io::Errno;

use super::DatapathError;
use super::filter::{self, Hooked, Ours, PutError};
use super::pins::{self, PinError, Pins};
use super::raw::{self, Chain, ChainItem, LinkInfo, ProgInfo};
use crate::netlink::find;
use crate::netlink::tc::{self, TcError};

/// A loaded program that is pinned under its id.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) fd: OwnedFd,
    pub(super) info: ProgInfo,
}

impl Program {
    /// Loads the object's program and pins it, before any link can lead to it: a kill at any moment leaves no link
    /// whose program has no pin.
    pub(super) fn load(ebpf: &mut Ebpf, pins: &Pins) -> Result<Self, DatapathError> {
        let info = load(ebpf)?;
        let path = pins.program(info.id);
        // Ids are not reused while a program lives: what is there is of an earlier boot of the same bpffs, or foreign.
        if std::fs::symlink_metadata(&path).is_ok() {
            pins::set_aside(&path)?;
        }
        classifier(ebpf)?
            .pin(&path)
            .map_err(|error| DatapathError::object("pinning its program", &error))?;
        pins::make_private(&path)?;
        Self::open(pins, info.id)?.ok_or_else(|| PinError::bpf("opening the pin", &path)(Errno::NOENT).into())
    }

    /// Opens the program that is pinned under this id; none if it is not there, or another program is.
    pub(super) fn open(pins: &Pins, id: u32) -> Result<Option<Self>, PinError> {
        let path = pins.program(id);
        let fd = match raw::obj_get(&path) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(PinError::bpf("opening the pin", &path)(errno)),
        };
        match raw::prog_info(fd.as_fd()) {
            Ok(info) if info.id == id => Ok(Some(Self { fd, info })),
            Ok(_) | Err(Errno::INVAL) => Ok(None),
            Err(errno) => Err(PinError::bpf("describing", &path)(errno)),
        }
    }
}

fn classifier(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier, DatapathError> {
    let program = ebpf
        .program_mut(pin::PROGRAM)
        .ok_or(DatapathError::ProgramNotInObject)?;
    program.try_into().map_err(|_| DatapathError::ProgramNotInObject)
}

/// Loads the object's program, to be used or to see whether this kernel takes it.
pub(super) fn load(ebpf: &mut Ebpf) -> Result<ProgInfo, DatapathError> {
    let program = classifier(ebpf)?;
    program
        .load()
        .map_err(|error| DatapathError::object("loading its program", &error))?;
    let fd = program
        .fd()
        .map_err(|error| DatapathError::object("opening its program", &error))?;
    raw::prog_info(fd.as_fd()).map_err(|errno| DatapathError::map("describing", pin::PROGRAM, errno))
}

/// What a pinned link turned out to be.
#[derive(Debug)]
pub(super) enum Pinned {
    /// Nothing is pinned for this device.
    Absent,
    /// The link is at the hook of this device, in this network namespace.
    Live {
        /// The link.
        link: OwnedFd,
        /// As the kernel describes it.
        info: LinkInfo,
        /// The device's chain, of which it is a part.
        chain: Chain,
    },
    /// Its device is dead or in another namespace, or it is no link of ours at all.
    Defunct {
        /// The link, if it is one: whoever closes it after its pin is gone detaches at once.
        link: Option<OwnedFd>,
        /// Why, for people.
        why: String,
    },
}

/// Where the program is to be attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum AttachMode {
    /// By tcx, or by clsact if the kernel has no tcx
    #[default]
    Auto,
    /// By tcx
    Tcx,
    /// By a filter of clsact
    Tc,
}

/// Where it is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// In the chain of links (tcx), first.
    Tcx,
    /// As a filter of the clsact qdisc.
    Clsact,
}

impl Hook {
    /// What the mode means on this kernel: found out by trying, not by its version.
    pub(super) fn choose(
        mode: AttachMode,
        try_tcx: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<Self, Errno> {
        match mode {
            AttachMode::Tcx => Ok(Self::Tcx),
            AttachMode::Tc => Ok(Self::Clsact),
            AttachMode::Auto => match try_tcx() {
                Ok(()) => Ok(Self::Tcx),
                Err(Errno::INVAL) => Ok(Self::Clsact),
                Err(errno) => Err(errno),
            },
        }
    }
}

/// What an earlier life left at the devices.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Devices of this namespace that have our program.
    pub(super) attached: BTreeSet<Ifindex>,
    /// Some of them may hold another program of ours still.
    pub(super) left_behind: bool,
}

impl Recovered {
    /// No news of a device: it is taken for what it was.
    fn leave(&mut self, ifindex: Ifindex, error: &dyn Display) {
        tracing::warn!(ifindex, %error, "a device cannot be given the program: it stays as it is");
        self.attached.insert(ifindex);
        self.left_behind = true;
    }
}

/// Ours at a device, and who is asked before it.
#[derive(Debug)]
pub(super) struct Inspection {
    /// Id of the program that is ours; if there is none, why.
    pub(super) program: Result<u32, String>,
    /// Whom packets meet before it, in their order. Any of them may let a packet pass without asking ours.
    pub(super) before: Vec<Foreign>,
}

/// A program that is not ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    /// In the chain of tcx. Its name could be read with `CAP_SYS_ADMIN` only.
    Tcx {
        /// Its id.
        program: u32,
    },
    /// A filter.
    Filter(filter::Foreign),
}

impl Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcx { program } => write!(f, "program {program} (tcx)"),
            Self::Filter(filter) => filter.fmt(f),
        }
    }
}

/// What there is of ours at the two hooks of a device.
#[derive(Debug, Default)]
struct Found {
    link: Option<(OwnedFd, LinkInfo)>,
    filter: Option<Ours>,
}

impl Found {
    fn program_of_link(&self) -> Option<u32> {
        self.link.as_ref().map(|(_, info)| info.prog_id)
    }

    fn program_of_filter(&self) -> Option<u32> {
        self.filter.map(|ours| ours.program)
    }
}

/// The program at the devices: pinned links, or filters.
#[derive(Clone, Debug)]
pub(super) struct Links {
    pins: Pins,
    hook: Hook,
}

impl Links {
    pub(super) const fn new(pins: Pins, hook: Hook) -> Self {
        Self { pins, hook }
    }

    pub(super) const fn hook(&self) -> Hook {
        self.hook
    }

    /// Looks at the link that is pinned for a device.
    ///
    /// A dead device's link says ifindex 0. A device that was moved to another namespace keeps its link, and the
    /// link then says the ifindex it has *there*: only a chain of *this* namespace that names the link's own id
    /// proves that the device is here.
    pub(super) fn look(&self, ifindex: Ifindex) -> Result<Pinned, PinError> {
        let path = self.pins.link(ifindex);
        let link = match raw::obj_get(&path) {
            Ok(link) => link,
            Err(Errno::NOENT) => return Ok(Pinned::Absent),
            Err(Errno::ACCESS) if !path.is_file() => {
                return Ok(Pinned::Defunct {
                    link: None,
                    why: "it is no pin".to_owned(),
                });
            }
            Err(errno) => return Err(PinError::bpf("opening the pin", &path)(errno)),
        };
        let info = match raw::link_info(link.as_fd()) {
            Ok(info) => info,
            Err(Errno::INVAL) => {
                return Ok(Pinned::Defunct {
                    link: None,
                    why: "it is no link".to_owned(),
                });
            }
            Err(errno) => return Err(PinError::bpf("describing", &path)(errno)),
        };
        if info.link_type != raw::LINK_TYPE_TCX {
            return Ok(Pinned::Defunct {
                link: Some(link),
                why: format!("it is a link of type {}, not tcx", info.link_type),
            });
        }
        if info.ifindex != ifindex {
            return Ok(Pinned::Defunct {
                link: Some(link),
                why: match info.ifindex {
                    0 => "its device is gone".to_owned(),
                    other => format!("its device has the number {other} now"),
                },
            });
        }
        let chain = chain(ifindex).map_err(PinError::bpf("reading the chain of the device of", &path))?;
        if chain.items.iter().any(|item| item.link_id == info.id) {
            Ok(Pinned::Live { link, info, chain })
        } else {
            Ok(Pinned::Defunct {
                link: Some(link),
                why: "its device is in another network namespace".to_owned(),
            })
        }
    }

    /// Finds ours at the ingress of a device, and whom packets meet before it: first all of tcx, then the filters. Should
    /// ours be at both hooks, the first is the one that decides.
    pub(super) fn inspect(&self, ifindex: Ifindex) -> Result<Inspection, OpError> {
        let foreign = |item: &ChainItem| Foreign::Tcx {
            program: item.prog_id,
        };
        let look = self.look(ifindex).map_err(|error| refused(&error))?;
        if let Pinned::Live { info, chain, .. } = &look {
            let before = chain.items.iter().take_while(|item| item.link_id != info.id);
            return Ok(Inspection {
                program: Ok(info.prog_id),
                before: before.map(foreign).collect(),
            });
        }
        let Hooked {
            ours,
            before: filters,
        } = filter::look(ifindex).map_err(|error| tc_failed("reading the filters of", ifindex, &error))?;
        let chain = chain(ifindex).map_err(|errno| failed("reading the chain of", ifindex, errno))?;
        Ok(Inspection {
            program: ours
                .map(|ours| ours.program)
                .ok_or_else(|| match (look, self.hook) {
                    (Pinned::Defunct { why, .. }, _) => {
                        format!("the link of device {ifindex} is defunct: {why}")
                    }
                    (_, Hook::Tcx) => format!("no link is pinned for device {ifindex}"),
                    (_, Hook::Clsact) => format!("device {ifindex} has no filter of ours"),
                }),
            before: chain
                .items
                .iter()
                .map(foreign)
                .chain(filters.into_iter().map(Foreign::Filter))
                .collect(),
        })
    }

    /// Makes `program` that of a device. Says how much was done: 0 when it was so.
    pub(super) fn attach(&self, program: &Program, device: Device) -> Result<u32, OpError> {
        is_still(device)?;
        let found = self.find(device.ifindex)?;
        self.install(program, device, found)
    }

    /// What there is of ours at a device. Defunct links are removed.
    fn find(&self, ifindex: Ifindex) -> Result<Found, OpError> {
        let link = match self.look(ifindex).map_err(|error| refused(&error))? {
            Pinned::Live { link, info, .. } => Some((link, info)),
            Pinned::Absent => None,
            Pinned::Defunct { link, why } => {
                self.remove_defunct(ifindex, link, &why)
                    .map_err(|error| refused(&error))?;
                None
            }
        };
        let hooked =
            filter::look(ifindex).map_err(|error| tc_failed("reading the filters of", ifindex, &error))?;
        Ok(Found {
            link,
            filter: hooked.ours,
        })
    }

    fn install(&self, program: &Program, device: Device, found: Found) -> Result<u32, OpError> {
        let Found { link, filter } = found;
        let mut writes = match self.hook {
            Hook::Tcx => self.put_link(program, device, link.as_ref())?,
            Hook::Clsact => Self::put_filter(program, device, filter)?,
        };
        let other = match self.hook {
            Hook::Tcx => filter.is_some(),
            Hook::Clsact => link.is_some(),
        };
        // The last descriptor of a link that goes must not be this one: see `detach_link`.
        drop(link);
        if other {
            let ifindex = device.ifindex;
            tracing::info!(ifindex, hook = ?self.hook, "the program has changed its hook");
            writes += match self.hook {
                Hook::Tcx => Self::remove_filter(ifindex)?,
                Hook::Clsact => self.detach_link(ifindex)?,
            };
        }
        Ok(writes)
    }

    /// By tcx: first in the chain, and pinned.
    fn put_link(
        &self,
        program: &Program,
        device: Device,
        there: Option<&(OwnedFd, LinkInfo)>,
    ) -> Result<u32, OpError> {
        let Device { ifindex, .. } = device;
        if let Some((link, info)) = there {
            if info.prog_id == program.info.id {
                return Ok(0);
            }
            return match raw::link_update(link.as_fd(), program.fd.as_fd()) {
                Ok(()) => {
                    replaced(ifindex, info.prog_id, program);
                    Ok(1)
                }
                Err(Errno::NOLINK) => Err(OpError::NoDevice),
                Err(errno) => Err(failed("replacing the program of", ifindex, errno)),
            };
        }
        let link = match raw::link_create(program.fd.as_fd(), ifindex) {
            Ok(link) => link,
            Err(Errno::NODEV) => return Err(OpError::NoDevice),
            Err(Errno::EXIST) => {
                return Err(OpError::Refused {
                    message: format!(
                        "attaching to device {ifindex}: our program {} is in its chain already, by a link that is not \
                         pinned here: another bpffs is mounted over the one it is pinned in, or somebody else holds it",
                        program.info.id
                    ),
                });
            }
            Err(errno) => return Err(failed("attaching to", ifindex, errno)),
        };
        // Between the question and the attach the device may have been replaced by another one with its number. The
        // link then goes with its descriptor.
        is_still(device)?;
        let path = self.pins.link(ifindex);
        raw::obj_pin(link.as_fd(), &path)
            .map_err(|errno| refused(&PinError::bpf("pinning", &path)(errno)))?;
        Ok(1)
    }

    /// By clsact.
    fn put_filter(program: &Program, device: Device, there: Option<Ours>) -> Result<u32, OpError> {
        let Device { ifindex, .. } = device;
        if there.is_some_and(|ours| ours.program == program.info.id) {
            return Ok(0);
        }
        filter::put(ifindex, program.fd.as_fd(), there).map_err(|error| match error {
            PutError::NoDevice => OpError::NoDevice,
            error => OpError::Refused {
                message: format!("attaching to device {ifindex}: {error}"),
            },
        })?;
        if let Some(ours) = there {
            replaced(ifindex, ours.program, program);
        } else if let Err(error) = is_still(device) {
            // As with a link: it was put at another device than was meant.
            Self::remove_filter(ifindex)?;
            return Err(error);
        }
        Ok(1)
    }

    /// Removes the pin of a defunct link; what is no pin at all is set aside.
    fn remove_defunct(&self, ifindex: Ifindex, link: Option<OwnedFd>, why: &str) -> Result<(), PinError> {
        let path = self.pins.link(ifindex);
        tracing::info!(ifindex, why, "removing a defunct link");
        if path.is_file() {
            pins::unpin(&path)?;
        } else {
            pins::set_aside(&path)?;
        }
        // The last descriptor: a device that is elsewhere loses the program before this returns.
        drop(link);
        Ok(())
    }

    /// Detaches from a device, which may be gone, at both hooks. Says how much was done.
    pub(super) fn detach(&self, ifindex: Ifindex) -> Result<u32, OpError> {
        Ok(self.detach_link(ifindex)? + Self::remove_filter(ifindex)?)
    }

    fn detach_link(&self, ifindex: Ifindex) -> Result<u32, OpError> {
        let path = self.pins.link(ifindex);
        // The pin goes first, and the last descriptor detaches within close(2); the other way round, the removal of
        // the pin would leave it to a kernel worker, some time after the answer.
        let link = match raw::obj_get(&path) {
            Ok(link) => Some(link),
            Err(Errno::NOENT) => return Ok(0),
            Err(_) => None,
        };
        pins::unpin(&path).map_err(|error| refused(&error))?;
        drop(link);
        Ok(1)
    }

    fn remove_filter(ifindex: Ifindex) -> Result<u32, OpError> {
        filter::remove(ifindex)
            .map(u32::from)
            .map_err(|error| tc_failed("removing the filter of", ifindex, &error))
    }

    /// Finds the devices that have our program, and makes `program` that of all of them, at this life's hook. Defunct
    /// links are removed.
    ///
    /// One device that cannot be looked at or given the program keeps nobody from serving: it stays as it is.
    pub(super) fn recover(&self, program: &Program) -> Result<Recovered, DatapathError> {
        let programs: BTreeSet<u32> = self.pins.programs()?.into_iter().collect();
        let mut devices = self.linked()?;
        devices.extend(tc::hooked()?);
        let mut recovered = Recovered::default();
        for ifindex in devices {
            match self.recover_one(program, ifindex, &programs) {
                Ok(true) => _ = recovered.attached.insert(ifindex),
                Ok(false) => {}
                Err(error) => recovered.leave(ifindex, &error),
            }
        }
        Ok(recovered)
    }

    /// Says whether the device has our program, by a link or filter of an earlier life.
    fn recover_one(
        &self,
        program: &Program,
        ifindex: Ifindex,
        programs: &BTreeSet<u32>,
    ) -> Result<bool, OpError> {
        let mut found = self.find(ifindex)?;
        if let Some(ours) = found.filter.take_if(|ours| !programs.contains(&ours.program)) {
            tracing::warn!(
                ifindex,
                program = ours.program,
                "a filter of ours whose program is not pinned here: its pins are lost, or it is another agent's; it stays \
                 until an attachment names its device"
            );
        }
        let right = match self.hook {
            Hook::Tcx => found.program_of_link(),
            Hook::Clsact => found.program_of_filter(),
        } == Some(program.info.id);
        match &found {
            Found {
                link: None,
                filter: None,
            } => return Ok(false),
            Found { link: None, .. } | Found { filter: None, .. } if right => return Ok(true),
            Found { .. } => {}
        }
        let installed = match device(ifindex)? {
            Some(device) => self.install(program, device, found),
            None => Err(OpError::NoDevice),
        };
        match installed {
            Ok(_) => Ok(true),
            // It went between the look and the change.
            Err(OpError::NoDevice) => {
                self.detach_link(ifindex)?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The devices that have a pinned link.
    fn linked(&self) -> Result<BTreeSet<Ifindex>, PinError> {
        let mut devices = BTreeSet::new();
        for name in self.pins.link_names()? {
            match canonical(&name) {
                Some(ifindex) => _ = devices.insert(ifindex),
                None => {
                    let pin = self.pins.links().join(&name);
                    tracing::warn!(pin = %pin.display(), "not ours among the links: left alone");
                }
            }
        }
        Ok(devices)
    }

    /// Devices beside these that have this program of ours, or a pin of ours under their number.
    pub(super) fn strays(
        &self,
        wanted: &BTreeSet<Ifindex>,
        program: u32,
    ) -> Result<BTreeSet<Ifindex>, DatapathError> {
        let names = self.pins.link_names()?;
        let mut strays: BTreeSet<Ifindex> = names.iter().filter_map(|name| canonical(name)).collect();
        if self.hook == Hook::Clsact {
            // A filter may be another agent's: its program says whose.
            let hooked = tc::hooked()?;
            let ours = |ifindex: &&Ifindex| {
                filter::look(**ifindex)
                    .is_ok_and(|found| found.ours.is_some_and(|ours| ours.program == program))
            };
            strays.extend(hooked.difference(wanted).filter(ours));
        }
        Ok(strays.difference(wanted).copied().collect())
    }

    /// Unpins every program but this one: no link and no filter leads to another.
    pub(super) fn unpin_programs_but(&self, keep: u32) -> Result<(), PinError> {
        for id in self.pins.programs()? {
            if id != keep {
                pins::unpin(&self.pins.program(id))?;
            }
        }
        Ok(())
    }
}

/// The chain of a device; empty if the device is gone, or the kernel has no tcx.
fn chain(ifindex: Ifindex) -> Result<Chain, Errno> {
    match raw::chain(ifindex) {
        Err(Errno::NODEV | Errno::INVAL) => Ok(Chain::default()),
        result => result,
    }
}

fn replaced(ifindex: Ifindex, old: u32, program: &Program) {
    let new = program.info.id;
    tracing::info!(ifindex, old, new, "replaced the program of a device in its place");
}

/// The ifindex that a pin's name says, if it is spelled as we spell it.
fn canonical(name: &str) -> Option<Ifindex> {
    let ifindex: Ifindex = name.parse().ok()?;
    (ifindex != 0 && ifindex.to_string() == name).then_some(ifindex)
}

/// The kernel's device with this number.
fn device(ifindex: Ifindex) -> Result<Option<Device>, OpError> {
    match find::by_index(ifindex) {
        Ok(link) => Ok(link.map(|link| Device {
            ifindex,
            mac: link.mac,
        })),
        Err(error) => Err(OpError::Refused {
            message: format!("asking for device {ifindex}: {error}"),
        }),
    }
}

/// Whether the kernel's device with this number is the one that is meant.
pub(super) fn is_still(meant: Device) -> Result<(), OpError> {
    if device(meant.ifindex)? == Some(meant) {
        Ok(())
    } else {
        Err(OpError::NoDevice)
    }
}

fn tc_failed(operation: &str, ifindex: Ifindex, error: &TcError) -> OpError {
    if error.errno() == Some(Errno::NODEV) {
        return OpError::NoDevice;
    }
    OpError::Refused {
        message: format!("{operation} device {ifindex}: {error}"),
    }
}

pub(super) fn failed(operation: &str, ifindex: Ifindex, errno: Errno) -> OpError {
    if errno == Errno::NODEV {
        return OpError::NoDevice;
    }
    OpError::Refused {
        message: format!("{operation} device {ifindex}: {}", io::Error::from(errno)),
    }
}

pub(super) fn refused(error: &PinError) -> OpError {
    OpError::Refused {
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hook_is_chosen_by_what_the_kernel_answers() {
        let chosen = |mode, answer| Hook::choose(mode, || answer);
        assert_eq!(chosen(AttachMode::Auto, Ok(())), Ok(Hook::Tcx));
        assert_eq!(chosen(AttachMode::Auto, Err(Errno::INVAL)), Ok(Hook::Clsact));
        assert_eq!(chosen(AttachMode::Auto, Err(Errno::PERM)), Err(Errno::PERM));
        assert_eq!(chosen(AttachMode::Tcx, Err(Errno::INVAL)), Ok(Hook::Tcx));
        assert_eq!(chosen(AttachMode::Tc, Ok(())), Ok(Hook::Clsact));
    }

    #[test]
    fn only_our_own_spelling_of_a_number_names_a_link() {
        assert_eq!(canonical("7"), Some(7));
        for other in ["0", "07", "+7", "7 ", "", "x", "4294967296"] {
            assert_eq!(canonical(other), None, "{other:?}");
        }
    }
}
