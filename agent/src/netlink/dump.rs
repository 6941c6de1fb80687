//! Questions to the kernel: after all devices, and after single ones.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Ifindex, Link};

/// `RTEXT_FILTER_SKIP_STATS`: without the counters an answer is a third of its size.
const SKIP_STATS: u32 = 1 << 3;

/// The bytes of an `RTM_GETLINK`: nlmsghdr, ifinfomsg, and one attribute.
pub(super) fn request(sequence: u32, what: Question) -> Vec<u8> {
    let (flags, ifindex) = match what {
        Question::All => (libc::NLM_F_REQUEST | libc::NLM_F_DUMP, 0),
        Question::One(ifindex) => (libc::NLM_F_REQUEST, ifindex),
    };
    let mut bytes = Vec::with_capacity(40);
    bytes.extend(40u32.to_ne_bytes());
    bytes.extend(libc::RTM_GETLINK.to_ne_bytes());
    bytes.extend((flags as u16).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
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
}

/// A dump under way.
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
    /// The list changed meanwhile: it proves presence, not absence.
    pub(super) interrupted: bool,
}
