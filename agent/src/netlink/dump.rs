//! Questions to the kernel: after all devices, after single ones, and after all addresses.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Ifindex, Link};

/// `RTEXT_FILTER_SKIP_STATS`: without the counters an answer is a third of its size.
const SKIP_STATS: u32 = 1 << 3;

const DUMP: libc::c_int = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;

/// The bytes of a request.
pub(super) fn request(sequence: u32, what: Question) -> Vec<u8> {
    match what {
        Question::All => get_link(sequence, DUMP, 0),
        Question::One(ifindex) => get_link(sequence, libc::NLM_F_REQUEST, ifindex),
        Question::Addresses => {
            let mut bytes = header(24, libc::RTM_GETADDR, DUMP, sequence);
            // ifaddrmsg: family AF_UNSPEC (all), prefix length, flags, scope; index.
            bytes.extend([0; 8]);
            bytes
        }
    }
}

/// An nlmsghdr: length of the whole, type, flags, sequence, port.
fn header(length: u32, kind: u16, flags: libc::c_int, sequence: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((flags as u16).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes
}

/// An `RTM_GETLINK`: nlmsghdr, ifinfomsg, and one attribute.
fn get_link(sequence: u32, flags: libc::c_int, ifindex: Ifindex) -> Vec<u8> {
    let mut bytes = header(40, libc::RTM_GETLINK, flags, sequence);
    // ifinfomsg: family AF_UNSPEC, padding, type; index; flags; change mask.
    bytes.extend([0; 4]);
    bytes.extend(ifindex.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend(8u16.to_ne_bytes());
    bytes.extend(libc::IFLA_EXT_MASK.to_ne_bytes());
    bytes.extend(SKIP_STATS.to_ne_bytes());
    bytes
}

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// All devices.
    All,
    /// One device.
    One(Ifindex),
    /// All addresses of the node.
    Addresses,
}

/// A dump of devices under way.
///
/// The kernel puts notifications and answers into two queues, and nothing orders one against the other. So whatever
/// a notification says about a device since the question was put wins over the dump: a change that the dump shows and
/// the notification does not has a later notification of its own.
#[derive(Debug, Default)]
pub(super) struct Dump {
    /// Its request.
    pub(super) sequence: u32,
    /// What it said so far.
    pub(super) links: BTreeMap<Ifindex, Link>,
    /// There, but not understood: no news.
    pub(super) unreadable: BTreeSet<Ifindex>,
    /// Told of by a notification since it was asked for.
    pub(super) overtaken: BTreeSet<Ifindex>,
    /// It is only to be compared with what is known.
    pub(super) check: bool,
    /// The list changed meanwhile: it proves presence, not absence.
    pub(super) interrupted: bool,
}
