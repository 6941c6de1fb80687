//! Our filter at the clsact hook of a device: what serves on kernels without tcx.
//!
//! It has a place of its own, priority 1 and a fixed handle, so that it is replaced in place and never twice there.
//! Nothing of it is pinned: it lives in the device, and goes with it (a device that moves to another namespace loses its
//! qdiscs, `dev_shutdown`). It is known again by its place, its name and its program, which is pinned.
//!
//! A filter needs a qdisc. One that is there serves, whoever made it, also the older `ingress` kind. One that we made is
//! noted in our filter's name, which lives exactly as long: it goes with our filter, unless another filter is on it by
//! then. Whoever adds a filter between that look and the removal loses it; they would have to take a qdisc for their own
//! that they did not make, at the very moment at which an attachment ends.

use std::fmt;
use std::os::fd::BorrowedFd;

use holdfast_engine::model::Ifindex;
use rustix::io::Errno;

use crate::netlink::tc::{self, Filter, Hook, NewFilter, TcError};

/// The lowest priority there is: no filter of another priority comes before ours. Of those of this priority the newest
/// runs first.
pub const PRIORITY: u16 = 1;
/// "hold". Handles that the kernel chooses begin at 1.
pub const HANDLE: u32 = u32::from_be_bytes(*b"hold");

const NAME: &str = "holdfast";
/// The name where the qdisc was made for it.
const NAME_WITH_QDISC: &str = "holdfast_and_qdisc";

/// Our filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ours {
    /// Id of its program.
    pub(super) program: u32,
    /// The qdisc was made for it.
    made_qdisc: bool,
}

impl Ours {
    fn of(filter: &Filter) -> Option<Self> {
        let program = filter.program.as_ref().filter(|_| in_our_place(filter))?;
        let made_qdisc = match program.name.as_str() {
            NAME => false,
            NAME_WITH_QDISC => true,
            _ => return None,
        };
        Some(Self {
            program: program.id,
            made_qdisc,
        })
    }
}

/// Whether a filter is ours, with this program.
#[must_use]
pub fn is_ours(filter: &Filter, program: u32) -> bool {
    Ours::of(filter).is_some_and(|ours| ours.program == program)
}

fn in_our_place(filter: &Filter) -> bool {
    (filter.chain, filter.priority, filter.handle) == (0, PRIORITY, HANDLE)
}

/// Somebody else's filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign(Filter);

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(filter) = self;
        let (priority, handle, kind) = (filter.priority, filter.handle, &filter.kind);
        match &filter.program {
            Some(program) => write!(
                f,
                "program {} ({kind} filter {:?}, priority {priority}, handle {handle:#x})",
                program.id, program.name
            ),
            None => write!(f, "a {kind} filter (priority {priority}, handle {handle:#x})"),
        }
    }
}

/// What packets meet at the ingress hook of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hooked {
    /// Ours.
    pub(super) ours: Option<Ours>,
    /// Filters that packets meet before ours; all, if ours is not there.
    pub(super) before: Vec<Foreign>,
}

/// Looks at the ingress hook of a device; nothing is there if the device is not.
pub(super) fn look(ifindex: Ifindex) -> Result<Hooked, TcError> {
    let mut hooked = Hooked::default();
    // Of the other chains none is met before a filter of chain 0 sends a packet there.
    for filter in tc::filters(ifindex, Hook::Ingress)? {
        if filter.chain != 0 {
            continue;
        }
        hooked.ours = Ours::of(&filter);
        if hooked.ours.is_some() {
            break;
        }
        hooked.before.push(Foreign(filter));
    }
    Ok(hooked)
}

/// Why our filter could not be put in its place.
#[derive(Debug, thiserror::Error)]
pub(super) enum PutError {
    /// The device is gone.
    #[error("the device is gone")]
    NoDevice,
    /// Somebody else's filter keeps ours out.
    #[error("{0} is in the place of ours: give it another priority")]
    Taken(Foreign),
    /// This kernel lacks something.
    #[error("this kernel has no {what} ({option})")]
    Unknown {
        /// What.
        what: &'static str,
        /// The option that it was built without.
        option: &'static str,
    },
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] TcError),
}

/// Puts a program in our place, whatever of ours is there already: a new filter, or the old one with another program.
pub(super) fn put(ifindex: Ifindex, program: BorrowedFd<'_>, there: Option<Ours>) -> Result<(), PutError> {
    let filter = |made_qdisc| NewFilter {
        priority: PRIORITY,
        handle: HANDLE,
        name: if made_qdisc { NAME_WITH_QDISC } else { NAME },
        program,
    };
    if let Some(ours) = there {
        return tc::replace_filter(ifindex, &filter(ours.made_qdisc)).map_err(|error| match error.errno() {
            Some(Errno::NODEV) => PutError::NoDevice,
            _ => error.into(),
        });
    }
    let made_qdisc = tc::make_clsact(ifindex).map_err(|error| match error.errno() {
        Some(Errno::NODEV) => PutError::NoDevice,
        Some(Errno::NOENT) => PutError::Unknown {
            what: "clsact qdisc",
            option: "CONFIG_NET_SCH_INGRESS",
        },
        _ => error.into(),
    })?;
    let added = tc::add_filter(ifindex, &filter(made_qdisc));
    if added.is_err() && made_qdisc {
        remove_unused_qdisc(ifindex)?;
    }
    added.map_err(|error| refused(error, ifindex))
}

/// What a refusal to add a filter means.
fn refused(error: TcError, ifindex: Ifindex) -> PutError {
    match error.errno() {
        Some(Errno::NODEV) => PutError::NoDevice,
        Some(Errno::NOENT) => PutError::Unknown {
            what: "BPF classifier",
            option: "CONFIG_NET_CLS_BPF",
        },
        // The handle is taken, or the priority by another kind or protocol.
        Some(Errno::EXIST | Errno::INVAL) => match taken(ifindex) {
            Some(foreign) => PutError::Taken(foreign),
            None => error.into(),
        },
        _ => error.into(),
    }
}

/// Who has what ours needs.
fn taken(ifindex: Ifindex) -> Option<Foreign> {
    let in_the_way = |filter: &Filter| {
        let other_kind = filter.kind != tc::BPF || i32::from(filter.protocol) != libc::ETH_P_ALL;
        filter.chain == 0 && filter.priority == PRIORITY && (other_kind || filter.handle == HANDLE)
    };
    let filters = tc::filters(ifindex, Hook::Ingress).ok()?;
    filters.into_iter().find(in_the_way).map(Foreign)
}

/// Removes our filter, and its qdisc if it was made for it and nobody else uses it. Says whether ours was there.
pub(super) fn remove(ifindex: Ifindex) -> Result<bool, TcError> {
    let Some(ours) = look(ifindex)?.ours else {
        return Ok(false);
    };
    if let Err(error) = tc::delete_filter(ifindex, PRIORITY, HANDLE) {
        // It, its qdisc or its device may have gone meanwhile.
        return match look(ifindex)?.ours {
            Some(_) => Err(error),
            None => Ok(true),
        };
    }
    if ours.made_qdisc {
        remove_unused_qdisc(ifindex)?;
    }
    Ok(true)
}

fn remove_unused_qdisc(ifindex: Ifindex) -> Result<(), TcError> {
    for hook in [Hook::Ingress, Hook::Egress] {
        if !tc::filters(ifindex, hook)?.is_empty() {
            return Ok(());
        }
    }
    match tc::delete_clsact(ifindex) {
        // It is not there any more, or its device.
        Err(error) if matches!(error.errno(), Some(Errno::NODEV | Errno::NOENT | Errno::INVAL)) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use crate::netlink::tc::FilterProgram;

    use super::*;

    fn filter(name: &str) -> Filter {
        Filter {
            chain: 0,
            priority: PRIORITY,
            protocol: 3,
            handle: HANDLE,
            kind: tc::BPF.to_owned(),
            program: Some(FilterProgram {
                id: 7,
                name: name.to_owned(),
                direct_action: true,
            }),
        }
    }

    #[test]
    fn ours_is_known_by_its_place_and_its_name() {
        for (name, made_qdisc) in [(NAME, false), (NAME_WITH_QDISC, true)] {
            let expected = Ours {
                program: 7,
                made_qdisc,
            };
            assert_eq!(Ours::of(&filter(name)), Some(expected));
        }
        let right = filter(NAME);
        let others = [
            filter("holdfas"),
            filter(""),
            Filter {
                chain: 1,
                ..right.clone()
            },
            Filter {
                priority: 2,
                ..right.clone()
            },
            Filter {
                handle: 1,
                ..right.clone()
            },
            Filter {
                program: None,
                ..right
            },
        ];
        for other in others {
            assert_eq!(Ours::of(&other), None, "{other:?}");
        }
    }

    #[test]
    fn a_foreign_filter_is_named() {
        let program = Foreign(Filter {
            handle: 1,
            ..filter("cil_from_container")
        });
        assert_eq!(
            program.to_string(),
            "program 7 (bpf filter \"cil_from_container\", priority 1, handle 0x1)"
        );
        let flower = Foreign(Filter {
            kind: "flower".to_owned(),
            handle: 1,
            program: None,
            ..filter("")
        });
        assert_eq!(flower.to_string(), "a flower filter (priority 1, handle 0x1)");
    }
}
