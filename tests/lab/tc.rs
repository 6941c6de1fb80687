//! Qdiscs and filters as others make them, and what there is of them.
//!
//! As with devices, the tests do not speak to the kernel through the code that they test (`linux/rtnetlink.h`,
//! `linux/pkt_sched.h`, `linux/pkt_cls.h`).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::Context;
use holdfast::datapath::raw::{self, Insn};

use crate::rtnl::{CREATE, REQUEST, Request, Rtnl, attributes};

/// `TC_H_CLSACT`, which is `TC_H_INGRESS`.
const CLSACT: u32 = 0xffff_fff1;
/// The qdisc's own number.
const QDISC: u32 = 0xffff_0000;
/// Parent of the filters of received packets.
pub const INGRESS: u32 = 0xffff_fff2;
/// Parent of the filters of sent packets.
pub const EGRESS: u32 = 0xffff_fff3;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const ETH_P_ALL: u16 = 3;

const LIST: u16 = libc::NLM_F_REQUEST as u16 | libc::NLM_F_DUMP as u16;

/// `TC_ACT_UNSPEC`: the next one is asked.
pub const NEXT: i32 = -1;
/// `TC_ACT_OK`: the packet goes its way, and nobody else is asked.
pub const PASS: i32 = 0;

/// Where a filter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// [`INGRESS`] or [`EGRESS`].
    pub parent: u32,
    /// Priority.
    pub priority: u16,
    /// Number within it.
    pub handle: u32,
}

/// A filter, as the kernel tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Where it is.
    pub place: Place,
    /// Chain.
    pub chain: u32,
    /// Classifier.
    pub kind: String,
    /// Name of a program's filter.
    pub name: String,
    /// Program's id; 0 = none.
    pub program: u32,
    /// All that the kernel says, byte by byte: to see that nothing has changed.
    pub all: Vec<u8>,
}

impl Place {
    /// At the ingress hook.
    #[must_use]
    pub const fn ingress(priority: u16, handle: u32) -> Self {
        Self {
            parent: INGRESS,
            priority,
            handle,
        }
    }
}

/// A program that answers this to every packet (`TC_ACT_*`), and its id.
///
/// # Errors
/// When the kernel does not take it.
pub fn program(verdict: i32) -> anyhow::Result<(OwnedFd, u32)> {
    let instruction = |code, immediate| Insn {
        code,
        registers: 0,
        offset: 0,
        immediate,
    };
    // r0 = verdict; exit.
    let instructions = [instruction(0xb7, verdict), instruction(0x95, 0)];
    let program = raw::load_classifier("hfforeign", &instructions)?;
    let id = raw::prog_info(program.as_fd())?.id;
    Ok((program, id))
}

fn tcmsg(request: &mut Request, ifindex: u32, handle: u32, parent: u32, info: u32) {
    request.bytes(&[0; 4]);
    for word in [ifindex, handle, parent, info] {
        request.bytes(&word.to_ne_bytes());
    }
}

fn info(priority: u16, protocol: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(protocol.to_be())
}

fn text(request: &mut Request, kind: u16, text: &str) {
    request.attribute(kind, &[text.as_bytes(), b"\0"].concat());
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk().copied());
    word.map_or(0, u32::from_ne_bytes)
}

fn string(bytes: &[u8]) -> String {
    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

impl Rtnl {
    /// Gives a device a qdisc of this kind: `clsact` or `ingress`.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn qdisc(&mut self, device: &str, kind: &str) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_NEWQDISC, CREATE);
        tcmsg(&mut request, ifindex, QDISC, CLSACT, 0);
        text(&mut request, TCA_KIND, kind);
        self.ask(request)
            .with_context(|| format!("cannot give {device} {kind}"))
    }

    /// Takes that qdisc from a device, with every filter.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_qdisc(&mut self, device: &str) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_DELQDISC, REQUEST);
        tcmsg(&mut request, ifindex, QDISC, CLSACT, 0);
        self.ask(request)
            .with_context(|| format!("cannot take the qdisc from {device}"))
    }

    /// Kind of the qdisc of this place that a device has.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn qdisc_of(&mut self, device: &str) -> anyhow::Result<Option<String>> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_GETQDISC, LIST);
        tcmsg(&mut request, 0, 0, 0, 0);
        let found = self
            .list(request)?
            .into_iter()
            .find(|(_, payload)| (word(payload, 4), word(payload, 12)) == (ifindex, CLSACT));
        Ok(found.and_then(|(_, payload)| {
            let mut all = attributes(payload.get(20..)?);
            all.find_map(|(kind, value)| (kind == TCA_KIND).then(|| string(value)))
        }))
    }

    /// Puts a program at a hook of a device, as a filter of its own.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn filter(
        &mut self,
        device: &str,
        place: Place,
        name: &str,
        program: BorrowedFd<'_>,
    ) -> anyhow::Result<()> {
        self.put_filter(device, place, name, program, CREATE)
    }

    /// Gives a filter another program and name.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn replace_filter(
        &mut self,
        device: &str,
        place: Place,
        name: &str,
        program: BorrowedFd<'_>,
    ) -> anyhow::Result<()> {
        self.put_filter(device, place, name, program, REQUEST)
    }

    fn put_filter(
        &mut self,
        device: &str,
        place: Place,
        name: &str,
        program: BorrowedFd<'_>,
        flags: u16,
    ) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_NEWTFILTER, flags);
        tcmsg(
            &mut request,
            ifindex,
            place.handle,
            place.parent,
            info(place.priority, ETH_P_ALL),
        );
        text(&mut request, TCA_KIND, "bpf");
        request.nested(TCA_OPTIONS, |options| {
            options.attribute(TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
            text(options, TCA_BPF_NAME, name);
            options.attribute(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
        });
        self.ask(request)
            .with_context(|| format!("cannot put a filter at {device}"))
    }

    /// Puts a filter that is no program and matches nothing (`u32` without an action) at a hook of a device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn other_filter(&mut self, device: &str, parent: u32, priority: u16) -> anyhow::Result<()> {
        /// A selector without keys would match all: one key, on the source port 0.
        const TCA_U32_SEL: u16 = 5;
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_NEWTFILTER, CREATE);
        tcmsg(
            &mut request,
            ifindex,
            0,
            parent,
            info(priority, libc::ETH_P_IP as u16),
        );
        text(&mut request, TCA_KIND, "u32");
        request.nested(TCA_OPTIONS, |options| {
            // tc_u32_sel: flags, offset shift, one key; offset mask, offset, their offset, hash offset, hash mask; key:
            // mask, value, offset, offset mask.
            let mut selector = vec![0, 0, 1, 0];
            selector.extend([0; 12]);
            selector.extend(u32::MAX.to_be_bytes());
            selector.extend(0x0102_0304_u32.to_be_bytes());
            selector.extend([0; 8]);
            options.attribute(TCA_U32_SEL, &selector);
        });
        self.ask(request)
            .with_context(|| format!("cannot put a filter at {device}"))
    }

    /// Removes a program's filter.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete_filter(&mut self, device: &str, place: Place) -> anyhow::Result<()> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_DELTFILTER, REQUEST);
        tcmsg(
            &mut request,
            ifindex,
            place.handle,
            place.parent,
            info(place.priority, ETH_P_ALL),
        );
        text(&mut request, TCA_KIND, "bpf");
        self.ask(request)
            .with_context(|| format!("cannot remove a filter from {device}"))
    }

    /// The filters at a hook of a device, in the order in which packets meet them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn filters(&mut self, device: &str, parent: u32) -> anyhow::Result<Vec<Filter>> {
        let ifindex = self.ifindex(device)?;
        let mut request = Request::new(libc::RTM_GETTFILTER, LIST);
        tcmsg(&mut request, ifindex, 0, parent, 0);
        let mut filters: Vec<Filter> = self
            .list(request)?
            .into_iter()
            .map(|(_, payload)| filter(payload))
            .collect();
        // Before the filters of a priority there is a message that is about none of them.
        filters.retain(|filter| filter.place.handle != 0);
        Ok(filters)
    }
}

fn filter(payload: Vec<u8>) -> Filter {
    let mut filter = Filter {
        place: Place {
            parent: word(&payload, 12),
            priority: (word(&payload, 16) >> 16) as u16,
            handle: word(&payload, 8),
        },
        chain: 0,
        kind: String::new(),
        name: String::new(),
        program: 0,
        all: Vec::new(),
    };
    for (kind, value) in attributes(payload.get(20..).unwrap_or_default()) {
        match kind {
            TCA_KIND => filter.kind = string(value),
            TCA_CHAIN => filter.chain = word(value, 0),
            _ => {}
        }
    }
    if filter.kind == "bpf" {
        for (kind, options) in attributes(payload.get(20..).unwrap_or_default()) {
            for (inner, value) in attributes(options).filter(|_| kind == TCA_OPTIONS) {
                match inner {
                    TCA_BPF_ID => filter.program = word(value, 0),
                    TCA_BPF_NAME => filter.name = string(value),
                    _ => {}
                }
            }
        }
    }
    filter.all = payload;
    filter
}
