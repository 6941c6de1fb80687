//! The programs that the real one is measured beside, and the wrapper that gives each run another packet.
//!
//! They are put together by hand. So a floor is as low as it can be (no compiler adds a test or a copy), measuring needs
//! no BPF toolchain, and nothing of it can get into the product's object.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use anyhow::Context;
use holdfast::datapath::raw::{Insn, load_classifier};

/// Registers: 0 is what is returned, 1 to 5 are arguments, 6 to 9 survive calls, 10 is the frame.
type Register = u8;

/// Offsets in `struct __sk_buff` (`linux/bpf.h`).
const SKB_IFINDEX: i16 = 40;
const SKB_DATA: i16 = 76;
const SKB_DATA_END: i16 = 80;

/// Numbers of helpers (`linux/bpf.h`).
const MAP_LOOKUP_ELEM: i32 = 1;
const TAIL_CALL: i32 = 12;
const FIB_LOOKUP: i32 = 69;
const REDIRECT_PEER: i32 = 155;

/// Kinds of the constant that `LD_IMM64` loads: a map, or the value of a map of one element.
const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_MAP_VALUE: u8 = 2;

/// What every comparison program returns when it has found what it looked for: the next program's turn
/// (`TC_ACT_UNSPEC`).
pub(crate) const FOUND: i32 = -1;
/// What a wrapper returns when it could not call.
const NOT_CALLED: i32 = 77;
/// What a comparison program returns when it has not found anything.
const NOT_FOUND: i32 = 78;

/// Packets that a wrapper goes through in turn: a power of two.
pub(crate) const PACKETS: usize = 1 << 16;
/// Where a wrapper begins to write: behind the Ethernet header. Words from here on hold each field whole, so that a
/// read never waits for two writes.
const HEADERS_AT: usize = 14;
/// IP protocol of all packets.
const TCP: i32 = 6;

/// Address family of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    /// Words that hold the headers up to the ports.
    const fn words(self) -> usize {
        match self {
            Self::V4 => 3,
            Self::V6 => 6,
        }
    }

    /// Offset in the packet, and bytes, of the source address.
    const fn source(self) -> (i16, i16) {
        match self {
            Self::V4 => (26, 4),
            Self::V6 => (22, 16),
        }
    }

    /// Offset in the packet, and bytes, of the destination address.
    const fn destination(self) -> (i16, i16) {
        match self {
            Self::V4 => (30, 4),
            Self::V6 => (38, 16),
        }
    }

    /// 4 or 6.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::V4 => 4,
            Self::V6 => 6,
        }
    }
}

/// A program under construction.
#[derive(Default)]
struct Code {
    instructions: Vec<Insn>,
    /// Jumps to the end, to be filled in.
    exits: Vec<usize>,
}

impl Code {
    fn put(&mut self, code: u8, to: Register, from: Register, offset: i16, immediate: i32) -> &mut Self {
        self.instructions.push(Insn {
            code,
            registers: from << 4 | to,
            offset,
            immediate,
        });
        self
    }

    /// `to = from`.
    fn copy(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0xbf, to, from, 0, 0)
    }

    /// `to = value`.
    fn set(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0xb7, to, 0, 0, value)
    }

    /// `to += value`.
    fn add(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x07, to, 0, 0, value)
    }

    /// `to &= value`.
    fn and(&mut self, to: Register, value: i32) -> &mut Self {
        self.put(0x57, to, 0, 0, value)
    }

    /// `to <<= bits`.
    fn left(&mut self, to: Register, bits: i32) -> &mut Self {
        self.put(0x67, to, 0, 0, bits)
    }

    /// `to >>= bits`.
    fn right(&mut self, to: Register, bits: i32) -> &mut Self {
        self.put(0x77, to, 0, 0, bits)
    }

    /// `to += from`.
    fn plus(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0x0f, to, from, 0, 0)
    }

    /// `to |= from`.
    fn or(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0x4f, to, from, 0, 0)
    }

    /// `to ^= from`.
    fn xor(&mut self, to: Register, from: Register) -> &mut Self {
        self.put(0xaf, to, from, 0, 0)
    }

    /// The low `bits` of `to` from network order, or into it.
    fn swap(&mut self, to: Register, bits: i32) -> &mut Self {
        self.put(0xdc, to, 0, 0, bits)
    }

    /// `to = value`, all 64 bits.
    fn set64(&mut self, to: Register, value: u64) -> &mut Self {
        self.put(0x18, to, 0, 0, value as i32)
            .put(0, 0, 0, 0, (value >> 32) as i32)
    }

    /// `to = *(u32 *)(from + offset)`.
    fn load32(&mut self, to: Register, from: Register, offset: i16) -> &mut Self {
        self.put(0x61, to, from, offset, 0)
    }

    /// `to = *(u16 *)(from + offset)`.
    fn load16(&mut self, to: Register, from: Register, offset: i16) -> &mut Self {
        self.put(0x69, to, from, offset, 0)
    }

    /// `to = *(u64 *)(from + offset)`.
    fn load64(&mut self, to: Register, from: Register, offset: i16) -> &mut Self {
        self.put(0x79, to, from, offset, 0)
    }

    /// `*(u32 *)(to + offset) = from`.
    fn store32(&mut self, to: Register, offset: i16, from: Register) -> &mut Self {
        self.put(0x63, to, from, offset, 0)
    }

    /// `*(u64 *)(to + offset) = from`.
    fn store64(&mut self, to: Register, offset: i16, from: Register) -> &mut Self {
        self.put(0x7b, to, from, offset, 0)
    }

    /// `*(u64 *)(to + offset) = value`.
    fn put64(&mut self, to: Register, offset: i16, value: i32) -> &mut Self {
        self.put(0x7a, to, 0, offset, value)
    }

    /// `*(u32 *)(to + offset) = value`.
    fn put32(&mut self, to: Register, offset: i16, value: i32) -> &mut Self {
        self.put(0x62, to, 0, offset, value)
    }

    fn constant(&mut self, to: Register, kind: u8, fd: BorrowedFd<'_>) -> &mut Self {
        self.put(0x18, to, kind, 0, fd.as_raw_fd()).put(0, 0, 0, 0, 0)
    }

    /// `to` = this map.
    fn map(&mut self, to: Register, map: BorrowedFd<'_>) -> &mut Self {
        self.constant(to, PSEUDO_MAP_FD, map)
    }

    /// `to` = address of the one value of this array.
    fn value(&mut self, to: Register, map: BorrowedFd<'_>) -> &mut Self {
        self.constant(to, PSEUDO_MAP_VALUE, map)
    }

    fn call(&mut self, helper: i32) -> &mut Self {
        self.put(0x85, 0, 0, 0, helper)
    }

    /// Ends the program with what register 0 holds if `register` is 0.
    fn exit_if_zero(&mut self, register: Register) -> &mut Self {
        self.exits.push(self.instructions.len());
        self.put(0x15, register, 0, 0, 0)
    }

    /// Ends the program with what register 0 holds if `a > b`.
    fn exit_if_above(&mut self, a: Register, b: Register) -> &mut Self {
        self.exits.push(self.instructions.len());
        self.put(0x2d, a, b, 0, 0)
    }

    /// Register 2 = the packet, which has at least this many bytes.
    fn packet(&mut self, bytes: i32, otherwise: i32) -> &mut Self {
        self.load32(2, 1, SKB_DATA)
            .load32(3, 1, SKB_DATA_END)
            .copy(4, 2)
            .add(4, bytes)
            .set(0, otherwise)
            .exit_if_above(4, 3)
    }

    /// Copies bytes of the packet (register 2) to the frame, by register 3.
    fn copy_to_frame(&mut self, frame_at: i16, (packet_at, bytes): (i16, i16)) -> &mut Self {
        for at in (0..bytes).step_by(4) {
            self.load32(3, 2, packet_at + at).store32(10, frame_at + at, 3);
        }
        self
    }

    /// Reads the first word of what is found under the key in the frame, and ends.
    fn look_up(&mut self, map: BorrowedFd<'_>, key_at: i16) -> &mut Self {
        self.map(1, map)
            .copy(2, 10)
            .add(2, key_at.into())
            .call(MAP_LOOKUP_ELEM)
            .copy(6, 0)
            .set(0, NOT_FOUND)
            .exit_if_zero(6)
            .load64(1, 6, 0)
            .set(0, FOUND)
    }

    /// Ends and loads the program.
    fn load(&mut self, name: &str) -> anyhow::Result<OwnedFd> {
        for &jump in &self.exits {
            self.instructions[jump].offset = (self.instructions.len() - jump - 1) as i16;
        }
        self.put(0x95, 0, 0, 0, 0);
        load_classifier(name, &self.instructions).with_context(|| format!("cannot load program {name}"))
    }
}

/// Bytes that every program here may read.
const fn headers(family: Family) -> i32 {
    (HEADERS_AT + 8 * family.words()) as i32
}

/// What a wrapper works with.
pub(crate) struct Wrapping<'a> {
    /// An array of one word: how many packets it has made.
    pub(crate) count: BorrowedFd<'a>,
    /// An array of one value: [`PACKETS`] numbers of services, 32 bits each.
    pub(crate) numbers: BorrowedFd<'a>,
    /// An array of programs: the first is called.
    pub(crate) programs: BorrowedFd<'a>,
    /// The packet of service 0.
    pub(crate) frame: &'a [u8],
    pub(crate) family: Family,
    /// The service's address is the source.
    pub(crate) answers: bool,
    /// Every packet is of another flow: source port and last byte of the source address (by 0 to 15) are changed, as
    /// the count says.
    pub(crate) fresh: bool,
}

/// A program that writes the next packet and calls another.
///
/// All headers are written, whatever the other program has made of them. Only a number is read: what the wrapper reads
/// and writes must not push what is measured out of the caches.
pub(crate) fn wrapper(of: &Wrapping<'_>) -> anyhow::Result<OwnedFd> {
    let mut code = Code::default();
    code.copy(6, 1).packet(headers(of.family), NOT_CALLED);
    code.value(1, of.count)
        .load64(7, 1, 0)
        .copy(8, 7)
        .add(8, 1)
        .store64(1, 0, 8);
    code.copy(8, 7)
        .and(8, PACKETS as i32 - 1)
        .left(8, 2)
        .value(1, of.numbers)
        .plus(1, 8)
        .load32(9, 1, 0);
    // The word that holds the last bytes of the service's address, how far up, and in how many bits.
    let (number_word, number_shift, bits) = match (of.family, of.answers) {
        (Family::V4, false) => (2, 0, 32),
        (Family::V4, true) => (1, 32, 32),
        (Family::V6, false) => (4, 0, 64),
        (Family::V6, true) => (2, 0, 64),
    };
    // The words that hold the last byte of the source address, in their highest byte, and the source port.
    let (source_word, port_word, port_shift) = match of.family {
        Family::V4 => (1, 2, 32),
        Family::V6 => (2, 5, 0),
    };
    code.swap(9, bits).left(9, number_shift);
    let words = of.frame.get(HEADERS_AT..).unwrap_or_default().as_chunks().0;
    for (word, bytes) in words.iter().enumerate().take(of.family.words()) {
        code.set64(4, u64::from_ne_bytes(*bytes));
        if word == number_word {
            code.xor(4, 9);
        }
        if of.fresh && word == source_word {
            code.copy(5, 7)
                .right(5, PACKETS.trailing_zeros() as i32)
                .and(5, 15)
                .left(5, 56)
                .xor(4, 5);
        }
        if of.fresh && word == port_word {
            code.copy(5, 7).and(5, 0xffff).left(5, port_shift).xor(4, 5);
        }
        code.store64(2, (HEADERS_AT + 8 * word) as i16, 4);
    }
    code.copy(1, 6).map(2, of.programs).set(3, 0).call(TAIL_CALL);
    code.set(0, NOT_CALLED).load("wrapper")
}

/// A program that does nothing.
pub(crate) fn empty() -> anyhow::Result<OwnedFd> {
    Code::default().set(0, FOUND).load("empty")
}

/// Reads the element of an array that the low bits of the destination address say.
pub(crate) fn array(family: Family, map: BorrowedFd<'_>, mask: u32) -> anyhow::Result<OwnedFd> {
    let (at, bytes) = family.destination();
    let mut code = Code::default();
    code.packet(headers(family), NOT_FOUND);
    code.load32(3, 2, at + bytes - 4)
        .swap(3, 32)
        .and(3, mask as i32)
        .store32(10, -4, 3);
    code.look_up(map, -4).load("array")
}

/// Looks the destination up in a hash with the keys of `services`.
pub(crate) fn hash(family: Family, map: BorrowedFd<'_>) -> anyhow::Result<OwnedFd> {
    const KEY: i16 = -24;
    let (at, bytes) = family.destination();
    let mut code = Code::default();
    code.load32(7, 1, SKB_IFINDEX).packet(headers(family), NOT_FOUND);
    // The destination port lies behind the source port; protocol and family are constants of these packets.
    let ports = at + bytes;
    code.store32(10, KEY, 7)
        .load16(3, 2, ports + 2)
        .set(4, i32::from(family.number()) << 8 | TCP)
        .left(4, 16)
        .or(3, 4)
        .store32(10, KEY + 4, 3);
    code.put64(10, KEY + 8, 0).put64(10, KEY + 16, 0);
    code.copy_to_frame(KEY + 8, family.destination())
        .look_up(map, KEY)
        .load("hash")
}

/// Looks the destination up in an LPM trie.
pub(crate) fn trie(family: Family, map: BorrowedFd<'_>) -> anyhow::Result<OwnedFd> {
    const KEY: i16 = -24;
    let (_, bytes) = family.destination();
    let mut code = Code::default();
    code.packet(headers(family), NOT_FOUND)
        .put32(10, KEY, i32::from(bytes) * 8)
        .copy_to_frame(KEY + 4, family.destination());
    code.look_up(map, KEY).load("trie")
}

/// Asks the kernel's routing table for the way to the destination (`bpf_fib_lookup`).
pub(crate) fn fib(family: Family) -> anyhow::Result<OwnedFd> {
    // `struct bpf_fib_lookup`: family 0, protocol 1, ifindex 8, source 16, destination 32.
    const PARAMETERS: i16 = -64;
    let number = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let mut code = Code::default();
    code.load32(7, 1, SKB_IFINDEX)
        .copy(6, 1)
        .packet(headers(family), NOT_FOUND);
    for at in (0..64).step_by(8) {
        code.put64(10, PARAMETERS + at, 0);
    }
    code.put32(10, PARAMETERS, TCP << 8 | number)
        .store32(10, PARAMETERS + 8, 7)
        .copy_to_frame(PARAMETERS + 16, family.source())
        .copy_to_frame(PARAMETERS + 32, family.destination());
    code.copy(1, 6)
        .copy(2, 10)
        .add(2, PARAMETERS.into())
        .set(3, 64)
        .set(4, 0)
        .call(FIB_LOOKUP);
    // 0 is BPF_FIB_LKUP_RET_SUCCESS.
    code.copy(6, 0)
        .set(0, NOT_FOUND)
        .put(0x55, 6, 0, 1, 0)
        .set(0, FOUND)
        .load("fib")
}

/// Hands every packet to the other end of a device, as Holdfast's delivery does, and does nothing else.
pub(crate) fn redirect_peer(ifindex: u32) -> anyhow::Result<OwnedFd> {
    Code::default()
        .set(1, ifindex as i32)
        .set(2, 0)
        .call(REDIRECT_PEER)
        .load("peer")
}
