//! The program and its links.
//!
//! Everything goes from pins: a pinned link tells the id of its program, and the program is pinned under that id
//! (by id alone nothing can be opened without `CAP_SYS_ADMIN`). A link is attached by ifindex, never by name, and
//! lives by its pin: dropping what is held here detaches nothing.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use aya::Ebpf;
use aya::programs::SchedClassifier;
use holdfast_ebpf::abi::pin;
use holdfast_engine::model::{Device, Ifindex, OpError};
use rustix::io::Errno;

use super::DatapathError;
use super::pins::{self, PinError, Pins};
use super::raw::{self, Chain, LinkInfo, ProgInfo};
use crate::netlink::find;

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

/// The links of an earlier life.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Devices of this namespace that have our program.
    pub(super) attached: BTreeSet<Ifindex>,
    /// Some of them may hold another program of ours still.
    pub(super) left_behind: bool,
}

impl Recovered {
    /// No news of a link: it is taken for what it was.
    fn leave(&mut self, ifindex: Ifindex, error: &dyn Display) {
        tracing::warn!(ifindex, %error, "a link cannot be given the program: it stays as it is");
        self.attached.insert(ifindex);
        self.left_behind = true;
    }
}

/// The directory of links.
#[derive(Clone, Debug)]
pub(super) struct Links {
    pins: Pins,
}

impl Links {
    pub(super) const fn new(pins: Pins) -> Self {
        Self { pins }
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
        let chain = match raw::chain(ifindex) {
            Ok(chain) => chain,
            Err(Errno::NODEV) => Chain::default(),
            Err(errno) => return Err(PinError::bpf("reading the chain of the device of", &path)(errno)),
        };
        if chain.items.iter().any(|item| item.link_id == info.id) {
            Ok(Pinned::Live { link, info, chain })
        } else {
            Ok(Pinned::Defunct {
                link: Some(link),
                why: "its device is in another network namespace".to_owned(),
            })
        }
    }

    /// Attaches `program` to a device, first in its chain, and pins the link. Says how much was done: 0 when it was so.
    pub(super) fn attach(&self, program: &Program, device: Device) -> Result<u32, OpError> {
        let Device { ifindex, .. } = device;
        is_still(device)?;
        match self.look(ifindex).map_err(|error| refused(&error))? {
            Pinned::Live { info, .. } if info.prog_id == program.info.id => return Ok(0),
            Pinned::Live { link, .. } => {
                return match raw::link_update(link.as_fd(), program.fd.as_fd()) {
                    Ok(()) => Ok(1),
                    Err(Errno::NOLINK) => Err(OpError::NoDevice),
                    Err(errno) => Err(failed("replacing the program of", ifindex, errno)),
                };
            }
            Pinned::Defunct { link, why } => {
                self.remove_defunct(ifindex, link, &why)
                    .map_err(|error| refused(&error))?;
            }
            Pinned::Absent => {}
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

    /// Detaches from a device, which may be gone, and unpins. Says how much was done.
    pub(super) fn detach(&self, ifindex: Ifindex) -> Result<u32, OpError> {
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

    /// Finds the devices that have our program, and makes `program` that of all of them. Defunct links are removed.
    ///
    /// One link that cannot be looked at or given the program keeps nobody from serving: it stays as it is.
    pub(super) fn recover(&self, program: &Program) -> Result<Recovered, PinError> {
        let mut recovered = Recovered::default();
        for name in self.pins.link_names()? {
            let path = self.pins.links().join(&name);
            let Some(ifindex) = canonical(&name) else {
                tracing::warn!(pin = %path.display(), "not ours among the links: left alone");
                continue;
            };
            match self.look(ifindex) {
                Ok(Pinned::Absent) => {}
                Ok(Pinned::Defunct { link, why }) => self.remove_defunct(ifindex, link, &why)?,
                Ok(Pinned::Live { link, info, .. }) => {
                    if info.prog_id == program.info.id {
                        recovered.attached.insert(ifindex);
                        continue;
                    }
                    match raw::link_update(link.as_fd(), program.fd.as_fd()) {
                        Ok(()) => {
                            let (old, new) = (info.prog_id, program.info.id);
                            tracing::info!(ifindex, old, new, "replaced the program of a link in its place");
                            recovered.attached.insert(ifindex);
                        }
                        // The device went between the look and the update.
                        Err(Errno::NOLINK) => drop(pins::unpin(&path)?),
                        Err(errno) => recovered.leave(ifindex, &errno),
                    }
                }
                Err(error) => recovered.leave(ifindex, &error),
            }
        }
        Ok(recovered)
    }

    /// Unpins every program but this one: no link leads to another.
    pub(super) fn unpin_programs_but(&self, keep: u32) -> Result<(), PinError> {
        for id in self.pins.programs()? {
            if id != keep {
                pins::unpin(&self.pins.program(id))?;
            }
        }
        Ok(())
    }
}

/// The ifindex that a pin's name says, if it is spelled as we spell it.
fn canonical(name: &str) -> Option<Ifindex> {
    let ifindex: Ifindex = name.parse().ok()?;
    (ifindex != 0 && ifindex.to_string() == name).then_some(ifindex)
}

/// Whether the kernel's device with this number is the one that is meant.
pub(super) fn is_still(device: Device) -> Result<(), OpError> {
    match find::by_index(device.ifindex) {
        Ok(Some(link)) if link.mac == device.mac => Ok(()),
        Ok(_) => Err(OpError::NoDevice),
        Err(error) => Err(OpError::Refused {
            message: format!("asking for device {}: {error}", device.ifindex),
        }),
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
    fn only_our_own_spelling_of_a_number_names_a_link() {
        assert_eq!(canonical("7"), Some(7));
        for other in ["0", "07", "+7", "7 ", "", "x", "4294967296"] {
            assert_eq!(canonical(other), None, "{other:?}");
        }
    }
}
