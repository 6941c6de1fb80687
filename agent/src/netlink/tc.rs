//! The traffic-control hooks of devices: the clsact qdisc and its filters, asked for and changed within the call.
//!
//! Only what the agent needs: BPF filters in direct-action mode are made, all kinds are listed. Structures and numbers
//! are those of `linux/rtnetlink.h`, `linux/pkt_sched.h` and `linux/pkt_cls.h`; what the kernel does with them is in
//! `net/sched/cls_api.c`, `sch_api.c` and `cls_bpf.c`. Everything happens in the calling thread's network namespace.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use holdfast_engine::model::Ifindex;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;

use super::parse::{
    Attributes, Frame, Malformed, NLMSG_DONE, NLMSG_ERROR, i32_at, take_frame, u32_at, until_nul,
};

/// `struct tcmsg`: family, padding, ifindex, handle, parent, info.
const TCMSG: usize = 20;

/// `TC_H_CLSACT`, which is `TC_H_INGRESS` too: a device has one of the two qdiscs or none.
const PARENT_CLSACT: u32 = 0xffff_fff1;
/// The handle that the kernel gives to either (`TC_H_MAKE(TC_H_INGRESS, 0)`).
const HANDLE_CLSACT: u32 = 0xffff_0000;

/// Attributes of every message of traffic control, `TCA_*`.
mod tca {
    pub(super) const KIND: u16 = libc::TCA_KIND;
    pub(super) const OPTIONS: u16 = libc::TCA_OPTIONS;
    pub(super) const CHAIN: u16 = 11;
    pub(super) const INGRESS_BLOCK: u16 = 13;
}

/// Attributes of a BPF filter, `TCA_BPF_*`.
mod tca_bpf {
    pub(super) const FD: u16 = 6;
    pub(super) const NAME: u16 = 7;
    pub(super) const FLAGS: u16 = 8;
    pub(super) const ID: u16 = 11;
    /// `TCA_BPF_FLAG_ACT_DIRECT`: what the program returns is the verdict.
    pub(super) const ACT_DIRECT: u32 = 1;
}

/// The error came with attributes (`NLM_F_ACK_TLVS`), one of which is a text (`NLMSGERR_ATTR_MSG`).
const ACK_TLVS: u16 = 0x200;
const ATTRIBUTE_MESSAGE: u16 = 1;

/// Kind of the filters that are programs.
pub const BPF: &str = "bpf";

/// The two hooks of the qdisc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Packets that the device receives. The older `ingress` qdisc has this one alone, and answers to it.
    Ingress,
    /// Packets that it sends.
    Egress,
}

impl Hook {
    /// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)` and its like.
    const fn parent(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}

/// One filter at a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Chain; packets begin in chain 0, and others are reached by a filter's action alone.
    pub chain: u32,
    /// Lower ones run first.
    pub priority: u16,
    /// Ethernet protocol, host byte order.
    pub protocol: u16,
    /// Number within its priority.
    pub handle: u32,
    /// Classifier.
    pub kind: String,
    /// Name and program, if it is a program.
    pub program: Option<FilterProgram>,
}

/// The program of a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterProgram {
    /// Its id; 0 for a classic one.
    pub id: u32,
    /// What whoever made the filter calls it.
    pub name: String,
    /// What it returns is the verdict, not a class.
    pub direct_action: bool,
}

/// A BPF filter of all protocols in chain 0, in direct-action mode, to be put at the ingress hook.
#[derive(Clone, Copy, Debug)]
pub struct NewFilter<'a> {
    /// Priority.
    pub priority: u16,
    /// Number within the priority.
    pub handle: u32,
    /// Name: at most 255 bytes, no NUL.
    pub name: &'a str,
    /// Program.
    pub program: BorrowedFd<'a>,
}

/// Why the kernel did not do or tell it.
#[derive(Debug, thiserror::Error)]
pub enum TcError {
    /// It refused, perhaps with words.
    #[error("{}{}", io::Error::from(*errno), said.as_ref().map(|said| format!(" ({said})")).unwrap_or_default())]
    Refused {
        /// Why.
        errno: Errno,
        /// Its words (`extack`).
        said: Option<String>,
    },
    /// It could not be asked.
    #[error("netlink: {0}")]
    Socket(#[from] io::Error),
    /// Its answer makes no sense.
    #[error("netlink: an answer that cannot be understood")]
    Senseless,
}

impl From<Malformed> for TcError {
    fn from(Malformed: Malformed) -> Self {
        Self::Senseless
    }
}

impl TcError {
    /// The kernel's errno, if it has refused.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::Socket(_) | Self::Senseless => None,
        }
    }
}

/// The filters at a hook in the order in which packets meet them; none if the device has no such hook, or is not there.
///
/// The order is that of the dump: chains, then priorities, then, among BPF filters of one priority, the newest first
/// (`cls_bpf_change` puts a new one before the others and a replaced one in its place).
///
/// # Errors
/// [`TcError`].
pub fn filters(ifindex: Ifindex, hook: Hook) -> Result<Vec<Filter>, TcError> {
    let mut request = Request::new(libc::RTM_GETTFILTER, libc::NLM_F_DUMP);
    request.tcmsg(ifindex, 0, hook.parent(), 0);
    let mut found = Vec::new();
    dump(&request.finish(), |frame| {
        if frame.kind == libc::RTM_NEWTFILTER {
            found.extend(filter(frame.payload)?);
        }
        Ok(())
    })?;
    Ok(found)
}

/// The devices of this namespace that have an ingress hook for filters, by a qdisc of kind `clsact` or `ingress`.
///
/// # Errors
/// [`TcError`].
pub fn hooked() -> Result<BTreeSet<Ifindex>, TcError> {
    let mut request = Request::new(libc::RTM_GETQDISC, libc::NLM_F_DUMP);
    request.tcmsg(0, 0, 0, 0);
    let mut found = BTreeSet::new();
    dump(&request.finish(), |frame| {
        if frame.kind == libc::RTM_NEWQDISC {
            let (message, _) = tcmsg(frame.payload)?;
            if message.parent == PARENT_CLSACT {
                found.insert(message.ifindex);
            }
        }
        Ok(())
    })?;
    Ok(found)
}

/// Gives a device a clsact qdisc. Says whether it was made: false if there was one, or an `ingress` one.
///
/// # Errors
/// [`TcError`]: `ENODEV`; `ENOENT` when this kernel has no clsact.
pub fn make_clsact(ifindex: Ifindex) -> Result<bool, TcError> {
    match change(&new_clsact(ifindex).finish()) {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == Some(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Finds out whether this kernel has clsact, by asking for one on the loopback device that it cannot give: a block with
/// number 0 is refused after the kind was looked up (`qdisc_create`), so that nothing is made.
///
/// # Errors
/// [`TcError`]: `ENOENT` when there is no such kind, `EPERM` without `CAP_NET_ADMIN`.
pub fn try_clsact() -> Result<(), TcError> {
    const LOOPBACK: Ifindex = 1;
    let mut request = new_clsact(LOOPBACK);
    request.attribute(tca::INGRESS_BLOCK, &0_u32.to_ne_bytes());
    match change(&request.finish()) {
        Err(error) if matches!(error.errno(), Some(Errno::INVAL | Errno::EXIST)) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(TcError::Senseless),
    }
}

fn new_clsact(ifindex: Ifindex) -> Request {
    let mut request = Request::new(
        libc::RTM_NEWQDISC,
        libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL,
    );
    request.tcmsg(ifindex, HANDLE_CLSACT, PARENT_CLSACT, 0);
    request.text(tca::KIND, "clsact");
    request
}

/// Takes the clsact qdisc from a device, with all filters that are on it.
///
/// # Errors
/// [`TcError`].
pub fn delete_clsact(ifindex: Ifindex) -> Result<(), TcError> {
    let mut request = Request::new(libc::RTM_DELQDISC, libc::NLM_F_ACK);
    request.tcmsg(ifindex, HANDLE_CLSACT, PARENT_CLSACT, 0);
    change(&request.finish())
}

/// Puts a filter at the ingress hook of a device, before those of its own priority.
///
/// # Errors
/// [`TcError`]: `EEXIST` when its place is taken, `EINVAL` when the priority is that of another kind or protocol or
/// the device has no clsact, `ENOENT` when this kernel has no BPF classifier.
pub fn add_filter(ifindex: Ifindex, filter: &NewFilter<'_>) -> Result<(), TcError> {
    put_filter(ifindex, filter, libc::NLM_F_CREATE | libc::NLM_F_EXCL)
}

/// Gives the filter in this place another program and name, between two packets. Makes none.
///
/// # Errors
/// [`TcError`]: `ENOENT` when no filter is in this place.
pub fn replace_filter(ifindex: Ifindex, filter: &NewFilter<'_>) -> Result<(), TcError> {
    put_filter(ifindex, filter, libc::NLM_F_REPLACE)
}

fn put_filter(ifindex: Ifindex, filter: &NewFilter<'_>, flags: i32) -> Result<(), TcError> {
    let mut request = Request::new(libc::RTM_NEWTFILTER, libc::NLM_F_ACK | flags);
    request.place(ifindex, filter.priority, filter.handle);
    request.text(tca::KIND, BPF);
    request.nested(tca::OPTIONS, |options| {
        options.attribute(tca_bpf::FD, &filter.program.as_raw_fd().to_ne_bytes());
        options.text(tca_bpf::NAME, filter.name);
        options.attribute(tca_bpf::FLAGS, &tca_bpf::ACT_DIRECT.to_ne_bytes());
    });
    change(&request.finish())
}

/// Removes the BPF filter in this place from the ingress hook of a device.
///
/// # Errors
/// [`TcError`]: `ENOENT` or `EINVAL` when none is there, `ENODEV`.
pub fn delete_filter(ifindex: Ifindex, priority: u16, handle: u32) -> Result<(), TcError> {
    let mut request = Request::new(libc::RTM_DELTFILTER, libc::NLM_F_ACK);
    request.place(ifindex, priority, handle);
    request.text(tca::KIND, BPF);
    change(&request.finish())
}

// --- reading -----------------------------------------------------------------------------------------------

/// What a `struct tcmsg` says.
struct TcMessage {
    ifindex: Ifindex,
    handle: u32,
    parent: u32,
    info: u32,
}

/// A message of traffic control, and its attributes.
fn tcmsg(payload: &[u8]) -> Result<(TcMessage, &[u8]), Malformed> {
    let word = |at| u32_at(payload, at).ok_or(Malformed);
    let message = TcMessage {
        ifindex: word(4)?,
        handle: word(8)?,
        parent: word(12)?,
        info: word(16)?,
    };
    Ok((message, payload.get(TCMSG..).ok_or(Malformed)?))
}

/// A notification about the ingress hook of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// The device.
    pub(super) ifindex: Ifindex,
    /// The filter that it is about; none if it is about a qdisc.
    pub(super) filter: Option<Filter>,
}

/// What a notification is about; none if it is about another hook, or a block that is no device's alone.
pub(super) fn told(kind: u16, payload: &[u8]) -> Result<Option<Told>, Malformed> {
    /// `TCM_IFINDEX_MAGIC_BLOCK`.
    const BLOCK: u32 = 0xffff_ffff;
    let (message, _) = tcmsg(payload)?;
    // The qdisc, its hook, or the hook as the older qdisc spells it.
    let ingress = [PARENT_CLSACT, Hook::Ingress.parent(), HANDLE_CLSACT].contains(&message.parent);
    let ifindex = message.ifindex;
    if !ingress || ifindex == 0 || ifindex == BLOCK {
        return Ok(None);
    }
    let filter = match kind {
        libc::RTM_NEWTFILTER | libc::RTM_DELTFILTER => filter(payload)?,
        _ => None,
    };
    Ok(Some(Told { ifindex, filter }))
}

fn kind_of(attributes: &[u8]) -> Result<Option<String>, Malformed> {
    for attribute in (Attributes { rest: attributes }) {
        let (kind, value) = attribute.ok_or(Malformed)?;
        if kind == tca::KIND {
            return Ok(Some(String::from_utf8_lossy(until_nul(value)).into_owned()));
        }
    }
    Ok(None)
}

/// The filter that a message tells of; none for the message that the kernel sends before the filters of a priority.
fn filter(payload: &[u8]) -> Result<Option<Filter>, Malformed> {
    let (message, attributes) = tcmsg(payload)?;
    if message.handle == 0 {
        return Ok(None);
    }
    let mut filter = Filter {
        chain: 0,
        // `TC_H_MAKE(prio << 16, protocol)`, the protocol in network order.
        priority: (message.info >> 16) as u16,
        protocol: u16::from_be(message.info as u16),
        handle: message.handle,
        kind: kind_of(attributes)?.ok_or(Malformed)?,
        program: None,
    };
    for attribute in (Attributes { rest: attributes }) {
        let (kind, value) = attribute.ok_or(Malformed)?;
        match kind {
            tca::CHAIN => filter.chain = u32_at(value, 0).ok_or(Malformed)?,
            tca::OPTIONS if filter.kind == BPF => filter.program = Some(program(value)?),
            _ => {}
        }
    }
    Ok(Some(filter))
}

fn program(options: &[u8]) -> Result<FilterProgram, Malformed> {
    let mut program = FilterProgram {
        id: 0,
        name: String::new(),
        direct_action: false,
    };
    for attribute in (Attributes { rest: options }) {
        let (kind, value) = attribute.ok_or(Malformed)?;
        match kind {
            tca_bpf::ID => program.id = u32_at(value, 0).ok_or(Malformed)?,
            tca_bpf::NAME => program.name = String::from_utf8_lossy(until_nul(value)).into_owned(),
            tca_bpf::FLAGS => {
                program.direct_action = u32_at(value, 0).ok_or(Malformed)? & tca_bpf::ACT_DIRECT != 0;
            }
            _ => {}
        }
    }
    Ok(program)
}

/// What an `NLMSG_ERROR` says; `Ok` for an acknowledgment.
fn refusal(frame: &Frame<'_>) -> Result<(), TcError> {
    /// The errno, and the header of the request that it is about; its payload is left out (`NETLINK_CAP_ACK`).
    const FIXED: usize = 4 + 16;
    let errno = i32_at(frame.payload, 0).ok_or(Malformed)?;
    if errno == 0 {
        return Ok(());
    }
    let mut said = None;
    if frame.flags & ACK_TLVS != 0 {
        let rest = frame.payload.get(FIXED..).unwrap_or_default();
        // Words are no reason to fail.
        for (kind, value) in (Attributes { rest }).flatten() {
            if kind == ATTRIBUTE_MESSAGE {
                said = Some(String::from_utf8_lossy(until_nul(value)).into_owned());
            }
        }
    }
    Err(TcError::Refused {
        errno: Errno::from_raw_os_error(errno.saturating_neg()),
        said,
    })
}

// --- asking ------------------------------------------------------------------------------------------------

/// The socket is asked once: any number will do.
const SEQUENCE: u32 = 1;

fn open() -> io::Result<Socket> {
    // As in `find`: a socket a question, and only the kernel may write to it.
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.set_ext_ack(true)?;
    socket.set_cap_ack(true)?;
    Ok(socket)
}

fn change(request: &[u8]) -> Result<(), TcError> {
    let socket = open()?;
    socket.send(request, 0)?;
    let (datagram, _) = socket.recv_from_full()?;
    let (frame, _) = take_frame(&datagram)?;
    if frame.kind != NLMSG_ERROR || frame.sequence != SEQUENCE {
        return Err(TcError::Senseless);
    }
    refusal(&frame)
}

/// Asks for a list and gives each message of it to `take`.
fn dump(request: &[u8], mut take: impl FnMut(&Frame<'_>) -> Result<(), TcError>) -> Result<(), TcError> {
    let socket = open()?;
    socket.send(request, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        if rest.is_empty() {
            return Err(TcError::Senseless);
        }
        while !rest.is_empty() {
            let (frame, next) = take_frame(rest)?;
            rest = next;
            match frame.kind {
                _ if frame.sequence != SEQUENCE => return Err(TcError::Senseless),
                NLMSG_DONE => return refusal(&frame),
                NLMSG_ERROR => {
                    refusal(&frame)?;
                    return Err(TcError::Senseless);
                }
                _ => take(&frame)?,
            }
        }
    }
}

/// A request under construction.
struct Request {
    bytes: Vec<u8>,
}

impl Request {
    fn new(kind: u16, flags: i32) -> Self {
        let mut request = Self {
            bytes: Vec::with_capacity(128),
        };
        // nlmsghdr: length (known at the end), kind, flags, sequence, port.
        request.bytes(&[0; 4]);
        request.bytes(&kind.to_ne_bytes());
        request.bytes(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
        request.bytes(&SEQUENCE.to_ne_bytes());
        request.bytes(&[0; 4]);
        request
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn tcmsg(&mut self, ifindex: Ifindex, handle: u32, parent: u32, info: u32) {
        self.bytes(&[0; 4]);
        for word in [ifindex, handle, parent, info] {
            self.bytes(&word.to_ne_bytes());
        }
    }

    /// A filter of all protocols at the ingress hook.
    fn place(&mut self, ifindex: Ifindex, priority: u16, handle: u32) {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let info = u32::from(priority) << 16 | u32::from(protocol);
        self.tcmsg(ifindex, handle, Hook::Ingress.parent(), info);
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = value.len() as u16 + 4;
        self.bytes(&length.to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.pad();
    }

    fn text(&mut self, kind: u16, text: &str) {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
    }

    fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let mut inner = Self { bytes: Vec::new() };
        fill(&mut inner);
        self.attribute(kind, &inner.bytes);
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        for (to, from) in self.bytes.iter_mut().zip(length.to_ne_bytes()) {
            *to = from;
        }
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The payload of a message: a tcmsg and attributes.
    fn payload(handle: u32, info: u32, fill: impl FnOnce(&mut Request)) -> Vec<u8> {
        let mut request = Request { bytes: Vec::new() };
        request.tcmsg(7, handle, Hook::Ingress.parent(), info);
        fill(&mut request);
        request.bytes
    }

    fn bpf(handle: u32) -> Vec<u8> {
        let info = 5 << 16 | u32::from((libc::ETH_P_ALL as u16).to_be());
        payload(handle, info, |message| {
            message.text(tca::KIND, BPF);
            message.attribute(tca::CHAIN, &2_u32.to_ne_bytes());
            message.nested(tca::OPTIONS, |options| {
                options.text(tca_bpf::NAME, "them");
                options.attribute(tca_bpf::FLAGS, &tca_bpf::ACT_DIRECT.to_ne_bytes());
                options.attribute(tca_bpf::ID, &9_u32.to_ne_bytes());
                // One of a newer kernel.
                options.attribute(99, &[1, 2, 3]);
            });
        })
    }

    #[test]
    fn a_filter_that_is_a_program() {
        let expected = Filter {
            chain: 2,
            priority: 5,
            protocol: libc::ETH_P_ALL as u16,
            handle: 1,
            kind: BPF.to_owned(),
            program: Some(FilterProgram {
                id: 9,
                name: "them".to_owned(),
                direct_action: true,
            }),
        };
        assert_eq!(filter(&bpf(1)).unwrap(), Some(expected));
        // The message before those of a priority.
        assert_eq!(filter(&bpf(0)).unwrap(), None);
    }

    #[test]
    fn options_of_another_kind_are_not_read() {
        let other = payload(1, 1 << 16, |message| {
            message.text(tca::KIND, "flower");
            message.attribute(tca::OPTIONS, &[0xff; 7]);
        });
        let other = filter(&other).unwrap().unwrap();
        assert_eq!(
            (other.kind.as_str(), other.priority, other.program),
            ("flower", 1, None)
        );
        assert!(filter(&payload(1, 0, |_| {})).is_err(), "no kind");
    }

    #[test]
    fn a_refusal_carries_the_kernels_words() {
        let mut message = (-libc::EINVAL).to_ne_bytes().to_vec();
        message.extend([0; 16]);
        let mut words = Request { bytes: Vec::new() };
        words.text(ATTRIBUTE_MESSAGE, "Parent Qdisc doesn't exists");
        message.extend(words.bytes);
        let mut frame = Frame {
            kind: NLMSG_ERROR,
            flags: ACK_TLVS,
            sequence: SEQUENCE,
            payload: &message,
        };
        let said = refusal(&frame).unwrap_err();
        assert_eq!(said.errno(), Some(Errno::INVAL));
        assert!(
            said.to_string().ends_with("(Parent Qdisc doesn't exists)"),
            "{said}"
        );
        frame.flags = 0;
        assert!(!refusal(&frame).unwrap_err().to_string().contains("Qdisc"));
        frame.payload = &[0; 4];
        assert!(refusal(&frame).is_ok());
    }

    #[test]
    fn a_device_that_is_not_there_has_no_filters() {
        assert_eq!(filters(0x7fff_fff0, Hook::Ingress).unwrap(), []);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_do_harm(bytes: Vec<u8>) {
            let _ = filter(&bytes);
        }

        #[test]
        fn no_cut_and_no_flipped_byte_does_harm(at in 0_usize..80, with: u8, cut in 0_usize..80) {
            let mut bytes = bpf(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = with;
            }
            bytes.truncate(cut);
            let _ = filter(&bytes);
        }
    }
}
