//! The layout of every map: what the programs and user space both read.
//!
//! All values are in host byte order unless a field says otherwise. Padding is explicit and always
//! zero: hash maps compare keys byte by byte. Sizes and offsets are asserted below, so that a change
//! of layout cannot be made by accident; a change also needs another [`LAYOUT_VERSION`], which is
//! part of the pin path.

/// Version of all layouts but the registry's. Part of the pin path (`v1/`).
pub const LAYOUT_VERSION: u32 = 1;

/// Pin names. bpffs forbids `.` in names.
pub mod pin {
    /// CNI-written identities; pinned directly under the bpffs directory, outside the layout version.
    pub const REGISTRY: &str = "registry_v1";
    /// Consumer rows by ifindex.
    pub const CONSUMERS: &str = "consumers";
    /// Source addresses that an interface may use.
    pub const SOURCES: &str = "sources";
    /// Route entries for one address, protocol and port.
    pub const SERVICES: &str = "services";
    /// Route entries for prefixes.
    pub const PREFIXES: &str = "prefixes";
    /// The node's own addresses.
    pub const LOCALS: &str = "locals";
    /// Policy slots by policy id.
    pub const POLICIES: &str = "policies";
    /// Backend ids by slot.
    pub const SLOTS: &str = "slots";
    /// Backends by backend id.
    pub const BACKENDS: &str = "backends";
    /// Flow entries.
    pub const FLOWS: &str = "flows";
    /// Packets per verdict and reason, per CPU.
    pub const COUNTERS: &str = "counters";
    /// Run-time switches, mapped into the agent's memory.
    pub const CONTROL: &str = "control";
    /// Ifindexes whose registered token differs from their row's.
    pub const WAKES: &str = "wakes";
    /// When an ifindex was last written to `wakes`.
    pub const WAKE_MARKS: &str = "wake_marks";
    /// How much of its allowance of new flows each consumer has used.
    pub const RATES: &str = "rates";
    /// Ports of datagrams whose later fragments are still to come.
    pub const FRAGMENTS: &str = "fragments";
    /// Interfaces towards which flows were made, so that answers may come from there.
    pub const ANSWERERS: &str = "answerers";
    /// Debug lines, read by `aya-log` (which looks for the map by this name).
    pub const LOGS: &str = "AYA_LOGS";
    /// The name of the program (and the prefix of its pin: `classifier_<program id>`).
    pub const PROGRAM: &str = "classifier";
}

/// Default number of entries of each map that a flag can size.
pub mod capacity {
    /// Fixed: CNIs create this map too, and everybody checks the number.
    pub const REGISTRY: u32 = 16_384;
    /// Consumer rows.
    pub const CONSUMERS: u32 = 16_384;
    /// Source addresses.
    pub const SOURCES: u32 = 65_536;
    /// Route entries.
    pub const SERVICES: u32 = 131_072;
    /// Route entries for prefixes. (The kernel takes memory for those that are there only.)
    pub const PREFIXES: u32 = 65_536;
    /// The node's own addresses.
    pub const LOCALS: u32 = 4_096;
    /// Policy slots.
    pub const POLICIES: u32 = 16_384;
    /// The arena of slots: at most 2^24, the width of a selector's base.
    pub const SLOTS: u32 = 262_144;
    /// Backends.
    pub const BACKENDS: u32 = 65_536;
    /// Flow entries (two a flow).
    pub const FLOWS: u32 = 262_144;
    /// Bytes of the ring buffer of wakes.
    pub const WAKES_BYTES: u32 = 65_536;
    /// Rate marks of wakes.
    pub const WAKE_MARKS: u32 = 16_384;
    /// Consumers whose rate of new flows is watched.
    pub const RATES: u32 = 16_384;
    /// Fragmented datagrams on their way.
    pub const FRAGMENTS: u32 = 8_192;
    /// One value that holds all.
    pub const ANSWERERS: u32 = 1;
    /// Bytes of the ring buffer of debug lines (`aya-log-ebpf` sets it).
    pub const LOGS_BYTES: u32 = 131_072;
}

/// What the kernel must say of a map before it is used: a pin may be somebody else's, or of another layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapLayout {
    /// Name in the object, and of the pin.
    pub name: &'static str,
    /// `BPF_MAP_TYPE_...`.
    pub kind: u32,
    /// Bytes of a key.
    pub key: u32,
    /// Bytes of a value.
    pub value: u32,
    /// Entries unless a flag says otherwise (bytes for a ring buffer).
    pub entries: u32,
    /// `BPF_F_...`.
    pub flags: u32,
}

impl MapLayout {
    /// `BPF_MAP_TYPE_HASH`.
    pub const HASH: u32 = 1;
    /// `BPF_MAP_TYPE_ARRAY`.
    pub const ARRAY: u32 = 2;
    /// `BPF_MAP_TYPE_PERCPU_ARRAY`.
    pub const PER_CPU_ARRAY: u32 = 6;
    /// `BPF_MAP_TYPE_LRU_HASH`.
    pub const LRU_HASH: u32 = 9;
    /// `BPF_MAP_TYPE_LPM_TRIE`.
    pub const LPM_TRIE: u32 = 11;
    /// `BPF_MAP_TYPE_RINGBUF`.
    pub const RING_BUFFER: u32 = 27;
    /// `BPF_F_NO_PREALLOC`: the kernel demands it of a trie.
    pub const NO_PREALLOC: u32 = 1;
    /// `BPF_F_MMAPABLE`.
    pub const MMAPABLE: u32 = 1 << 10;

    const fn new<K, V>(name: &'static str, kind: u32, entries: u32, flags: u32) -> Self {
        Self {
            name,
            kind,
            key: size_of::<K>() as u32,
            value: size_of::<V>() as u32,
            entries,
            flags,
        }
    }

    /// The map with this name.
    pub fn of(name: &str) -> Option<&'static Self> {
        MAPS.iter().find(|map| map.name == name)
    }
}

/// All maps of the object.
pub const MAPS: [MapLayout; 18] = {
    use MapLayout as M;
    [
        M::new::<u32, RegistryRow>(pin::REGISTRY, M::HASH, capacity::REGISTRY, 0),
        M::new::<u32, ConsumerRow>(pin::CONSUMERS, M::HASH, capacity::CONSUMERS, 0),
        M::new::<SourceKey, u64>(pin::SOURCES, M::HASH, capacity::SOURCES, 0),
        M::new::<ServiceKey, RouteEntry>(pin::SERVICES, M::HASH, capacity::SERVICES, 0),
        M::new::<PrefixKey, PrefixEntry>(pin::PREFIXES, M::LPM_TRIE, capacity::PREFIXES, M::NO_PREALLOC),
        M::new::<LocalKey, u64>(pin::LOCALS, M::HASH, capacity::LOCALS, 0),
        M::new::<u32, PolicySlot>(pin::POLICIES, M::ARRAY, capacity::POLICIES, 0),
        M::new::<u32, u32>(pin::SLOTS, M::ARRAY, capacity::SLOTS, 0),
        M::new::<u32, Backend>(pin::BACKENDS, M::ARRAY, capacity::BACKENDS, 0),
        M::new::<FlowKey, Flow>(pin::FLOWS, M::LRU_HASH, capacity::FLOWS, 0),
        M::new::<u32, u64>(pin::COUNTERS, M::PER_CPU_ARRAY, COUNTERS, 0),
        M::new::<u32, u64>(pin::CONTROL, M::ARRAY, control::LEN, M::MMAPABLE),
        M::new::<(), ()>(pin::WAKES, M::RING_BUFFER, capacity::WAKES_BYTES, 0),
        M::new::<u32, u64>(pin::WAKE_MARKS, M::LRU_HASH, capacity::WAKE_MARKS, 0),
        M::new::<u32, u64>(pin::RATES, M::LRU_HASH, capacity::RATES, 0),
        M::new::<FragmentKey, Fragment>(pin::FRAGMENTS, M::LRU_HASH, capacity::FRAGMENTS, 0),
        M::new::<u32, Answerers>(pin::ANSWERERS, M::ARRAY, capacity::ANSWERERS, 0),
        M::new::<(), ()>(pin::LOGS, M::RING_BUFFER, capacity::LOGS_BYTES, 0),
    ]
};

/// Value of `registry_v1`: the identity behind one ifindex, written by a CNI. 40 bytes.
///
/// Read `token`, the rest, `token` again; a difference is a write in progress: read once more.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistryRow {
    /// Names the incarnation. Random, never 0.
    pub token: u64,
    /// MAC of the workload's side of the interface; all 0 if unknown.
    pub mac: [u8; 6],
    /// MAC of the host's side when the identity was registered: it names the device (ifindexes are reused).
    pub host_mac: [u8; 6],
    /// A hint: [`RegistryRow::KIND_UNKNOWN`], [`RegistryRow::KIND_VETH`] or [`RegistryRow::KIND_TAP`].
    pub kind: u8,
    /// [`RegistryRow::FLAG_HOST_MAC_SHARED`].
    pub flags: u8,
    /// Zero.
    pub pad: [u8; 2],
    /// The first 16 bytes of SHA-256 of the identity string; all 0 if none was given.
    pub incarnation: [u8; 16],
}

impl RegistryRow {
    /// `kind`: not said.
    pub const KIND_UNKNOWN: u8 = 0;
    /// `kind`: a veth.
    pub const KIND_VETH: u8 = 1;
    /// `kind`: a tap.
    pub const KIND_TAP: u8 = 2;
    /// `flags`: this CNI gives all host sides one MAC, so `host_mac` does not name the device.
    pub const FLAG_HOST_MAC_SHARED: u8 = 1;
}

/// Value of `consumers`: the gate of one interface. 24 bytes.
///
/// A packet that matches a route entry is delivered only if `token` is not 0 and equals the
/// registry's. `ifindex` repeats the key: under replacement a hash value can turn into another key's. The kernel
/// copies a value upwards, so what proves the key stands first and is read last, here and in the other values.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerRow {
    /// The key again.
    pub ifindex: u32,
    /// Flows carry it; raised when a route entry of this interface is revoked, so that they are looked up anew.
    pub epoch: u32,
    /// The token it was programmed for; 0 = closed.
    pub token: u64,
    /// [`ConsumerRow::HAS_SERVICES`] and others.
    pub flags: u32,
    /// Where answers leave if [`ConsumerRow::NEIGH`] says so: the interface, or the bridge that it is a port of. Else 0.
    pub device: u32,
}

impl ConsumerRow {
    /// `flags`: there are entries in `services`.
    pub const HAS_SERVICES: u32 = 1;
    /// `flags`: the addresses of the attachment are known and in `sources`; others are `spoofed`.
    pub const HAS_SOURCES: u32 = 1 << 1;
    /// `flags`: there are IPv4 entries in `prefixes`.
    pub const HAS_PREFIXES_V4: u32 = 1 << 2;
    /// `flags`: there are IPv6 entries in `prefixes`.
    pub const HAS_PREFIXES_V6: u32 = 1 << 3;
    /// `flags`: answers leave by `bpf_redirect_neigh` out of `device`; else by `bpf_redirect_peer`.
    pub const NEIGH: u32 = 1 << 4;
}

/// Address family in keys: 4 or 6, so that an IPv4 address never equals an IPv6 one.
pub const FAMILY_V4: u8 = 4;
/// See [`FAMILY_V4`].
pub const FAMILY_V6: u8 = 6;

/// IPv4 addresses fill the first four bytes, network order; the others are 0.
pub type Address = [u8; 16];

/// Key of `services`. 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceKey {
    /// The consumer's host-side interface.
    pub ifindex: u32,
    /// Destination port, network order.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Destination address.
    pub address: Address,
}

/// Value of `services`: where a destination leads. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouteEntry {
    /// [`ServiceKey::check`] of its key: a value that turned into another key's is a miss.
    pub check: u32,
    /// Zero.
    pub pad: u32,
    /// Index into `policies`.
    pub policy: u32,
    /// [`RouteEntry::OPEN`] or [`RouteEntry::CLAIM`].
    pub flags: u32,
}

impl RouteEntry {
    /// `flags`: the pair's own gate. A closed entry still claims its destination.
    pub const OPEN: u32 = 1;
    /// `flags`: no route but the mark that some port of this address is claimed (see [`ServiceKey::claim`]).
    pub const CLAIM: u32 = 1 << 1;

    /// The value under [`ServiceKey::claim`].
    #[inline(always)]
    pub const fn claim(key: &ServiceKey) -> Self {
        Self {
            policy: 0,
            flags: Self::CLAIM,
            check: key.check(),
            pad: 0,
        }
    }
}

impl ServiceKey {
    /// The key of the mark that some port of this address is claimed by this interface: protocol 0, port 0.
    ///
    /// Packets whose ports cannot be known (later fragments without their first, no transport header) are
    /// dropped where the mark is there, and pass where it is not. User space writes it before the first entry
    /// of an (interface, address) and deletes it after the last.
    #[inline(always)]
    pub const fn claim(ifindex: u32, family: u8, address: Address) -> Self {
        Self {
            ifindex,
            port: 0,
            protocol: 0,
            family,
            address,
        }
    }
}

/// Key of `prefixes`. 28 bytes. What is masked away of the address is 0.
///
/// The kernel compares the bits behind `length` from the first byte on, so the interface is in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixKey {
    /// Number of bits that count: [`PrefixKey::HEAD`] and those of the address.
    pub length: u32,
    /// The consumer's host-side interface, network order.
    pub ifindex: u32,
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Zero.
    pub pad: [u8; 3],
    /// Destination address.
    pub address: Address,
}

impl PrefixKey {
    /// Bits of a key in front of the address: all of them always count.
    pub const HEAD: u32 = 64;

    /// The key of the first `length` bits of an address.
    #[inline(always)]
    pub const fn new(ifindex: u32, family: u8, address: &Address, length: u32) -> Self {
        let (first, second) = masked(words(address), length);
        Self {
            length: Self::HEAD + length,
            ifindex: ifindex.to_be(),
            family,
            pad: [0; 3],
            address: address_of(first, second),
        }
    }

    /// The key of a packet's destination: its whole address counts.
    #[inline(always)]
    pub const fn of_packet(ifindex: u32, family: u8, address: Address) -> Self {
        Self {
            length: Self::HEAD + 128,
            ifindex: ifindex.to_be(),
            family,
            pad: [0; 3],
            address,
        }
    }

    /// What [`PrefixEntry::check`] must say of the entry under this key.
    #[inline(always)]
    pub const fn check(&self) -> u32 {
        self.check_of(self.length.wrapping_sub(Self::HEAD))
    }

    /// What [`PrefixEntry::check`] must say if the entry that was found has this prefix length.
    #[inline(always)]
    pub const fn check_of(&self, length: u32) -> u32 {
        let (first, second) = masked(words(&self.address), length);
        let head = (self.ifindex as u64) << 32 | (length as u64 & 0xff) << 8 | self.family as u64;
        let hash = spread([head, first, second]);
        (hash ^ (hash >> 32)) as u32
    }
}

/// Value of `prefixes`: where a prefix leads. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixEntry {
    /// [`PrefixKey::check`] of its key: a value that turned into another key's is a miss.
    pub check: u32,
    /// The prefix length: how much of a packet's address the check is over.
    pub length: u32,
    /// Index into `policies`.
    pub policy: u32,
    /// [`RouteEntry::OPEN`].
    pub flags: u32,
}

/// Key of `locals`. 20 bytes. The value is the [`LocalKey::check`] of the key (u64).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalKey {
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Zero.
    pub pad: [u8; 3],
    /// One of the node's own addresses.
    pub address: Address,
}

/// Key of `sources`. 24 bytes. The value is the [`SourceKey::check`] of the key (u64).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceKey {
    /// Host-side interface.
    pub ifindex: u32,
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Zero.
    pub pad: [u8; 3],
    /// Source address.
    pub address: Address,
}

/// Value of `policies`: one policy slot. 96 bytes. The program reads single words of it, each once.
///
/// From `name_hash` on it describes itself to the next life of the agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySlot {
    /// [`Selector`] as one word: the only thing that decides which set is used. Length 0: no set.
    pub selector: u64,
    /// Nanoseconds (boot clock) without a live, current agent after which nothing is served; 0 = no bound.
    pub max_staleness: u64,
    /// [`PolicySlot::PASS_WHILE_HELD`].
    pub flags: u64,
    /// Its own deadline on the boot clock in nanoseconds, while the policy itself is behind; 0 = none.
    pub stale_after: u64,
    /// First 8 bytes of SHA-256 of `namespace/name`; 0 = the slot is free.
    pub name_hash: u64,
    /// First 16 bytes of SHA-256 of the policy's uid.
    pub uid: [u8; 16],
    /// Generation of the policy that the selected set serves.
    pub served_generation: u64,
    /// Since when (Unix milliseconds) it serves that generation.
    pub served_since: u64,
    /// When a switch began to wait (boot clock, nanoseconds); 0 = none waits.
    pub waiting_since: u64,
    /// The last set generation that was given out (24 bits): never goes back within a slot.
    pub last_set_generation: u64,
    /// Zero.
    pub reserved: u64,
}

impl PolicySlot {
    /// `flags`: `whileHeld: Pass`. Otherwise packets of held intents are dropped.
    pub const PASS_WHILE_HELD: u64 = 1;
}

/// What a policy's selector word says: base 24 bits | length 16 | generation 24.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// First slot of the set.
    pub base: u32,
    /// Number of slots; 0 = the empty set.
    pub length: u16,
    /// Generation of the set, counted per policy slot, 24 bits, wraps.
    pub generation: u32,
}

impl Selector {
    /// Mask of a generation.
    pub const GENERATION_MASK: u32 = 0x00ff_ffff;

    /// As the word in [`PolicySlot::selector`].
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        ((self.base as u64 & 0x00ff_ffff) << 40)
            | ((self.length as u64) << 24)
            | (self.generation & Self::GENERATION_MASK) as u64
    }

    /// From the word in [`PolicySlot::selector`].
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            base: (word >> 40) as u32,
            length: (word >> 24) as u16,
            generation: word as u32 & Self::GENERATION_MASK,
        }
    }
}

/// Whether generation `a` (24 bits, wrapping) is at least `b`.
#[inline(always)]
pub const fn generation_at_least(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) & Selector::GENERATION_MASK) < 0x0080_0000
}

/// Value of `backends`: one producer of one policy. 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// The producer's token when the set was made; delivered only while the registry says the same. 0 = free.
    pub token: u64,
    /// [`Target`] as one word.
    pub target: u64,
    /// Until when (boot clock, nanoseconds) established flows may stay after it left its set; 0 = not at all.
    pub drain_until: u64,
    /// Its IPv4 address, network order; 0 = none.
    pub address_v4: [u8; 4],
    /// MAC of the workload's side; all 0 if unknown.
    pub mac: [u8; 6],
    /// Zero.
    pub pad: [u8; 6],
    /// Its IPv6 address; all 0 = none.
    pub address_v6: [u8; 16],
    /// Index of the policy slot that owns it.
    pub policy: u32,
    /// Where packets leave if the target is [`Target::NEIGH`]: the interface, or the bridge that it is a port of. Else 0.
    pub device: u32,
}

/// How a packet reaches a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Host-side interface.
    pub ifindex: u32,
    /// [`Target::PEER`] or others.
    pub kind: u8,
    /// Selector generation up to which it is a member of its set (24 bits).
    pub last_generation: u32,
}

impl Target {
    /// `kind`: `bpf_redirect_peer` to `ifindex`.
    pub const PEER: u8 = 1;
    /// `kind`: `bpf_redirect_neigh` out of [`Backend::device`], to the backend's own address of the packet's family. Without
    /// one it serves no packet of that family.
    pub const NEIGH: u8 = 2;

    /// As the word in [`Backend::target`].
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        (((self.last_generation & Selector::GENERATION_MASK) as u64) << 40)
            | ((self.kind as u64) << 32)
            | self.ifindex as u64
    }

    /// From the word in [`Backend::target`].
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            ifindex: word as u32,
            kind: (word >> 32) as u8,
            last_generation: (word >> 40) as u32,
        }
    }
}

/// Key of `flows`: the packet as it arrives. 44 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowKey {
    /// Interface where the packet arrives.
    pub ifindex: u32,
    /// Source port, network order.
    pub source_port: u16,
    /// Destination port, network order.
    pub destination_port: u16,
    /// Source address.
    pub source: Address,
    /// Destination address.
    pub destination: Address,
    /// IP protocol number.
    pub protocol: u8,
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Zero.
    pub pad: [u8; 2],
}

/// Jiffies shifted right by this are ticks: 1 s at 250 Hz, 0.26 s at 1000, 2.6 s at 100. The kernel makes of
/// `bpf_jiffies64` the load of one word, where its clocks cost a call.
pub const TICK: u32 = 8;

/// Value of `flows`: both directions of a flow have one, requests at the consumer and answers at the producer. 56 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// [`FlowKey::hash`] of its key: a value that turned into another key's is a miss.
    pub check: u64,
    /// The consumer's token.
    pub consumer_token: u64,
    /// The producer's token.
    pub producer_token: u64,
    /// The consumer's interface.
    pub consumer: u32,
    /// The producer's interface.
    pub producer: u32,
    /// [`ConsumerRow::epoch`] when the route was last looked up.
    pub epoch: u32,
    /// Backend id.
    pub backend: u32,
    /// Policy slot.
    pub policy: u32,
    /// When the twin entry was last seen to exist, in ticks (see [`TICK`]).
    pub twin_checked: u32,
    /// [`Flow::ANSWER`].
    pub flags: u32,
    /// 0, or the port that was chosen anew for the answers' sake, network order: in a request's entry the source port that
    /// the producer sees, in an answer's entry the one that the consumer knows.
    pub port: u16,
    /// Zero.
    pub pad: u16,
}

impl Flow {
    /// `flags`: the entry is for answers (it arrives at the producer).
    pub const ANSWER: u32 = 1;
}

/// Key of `fragments`: one fragmented datagram. 44 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentKey {
    /// Interface where it arrives.
    pub ifindex: u32,
    /// Identification of the datagram, network order.
    pub id: u32,
    /// Source address.
    pub source: Address,
    /// Destination address.
    pub destination: Address,
    /// IP protocol number, as the fragments carry it.
    pub protocol: u8,
    /// [`FAMILY_V4`] or [`FAMILY_V6`].
    pub family: u8,
    /// Zero.
    pub pad: [u8; 2],
}

/// Value of `fragments`: what only the first fragment says. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragment {
    /// [`FragmentKey::hash`] of its key: a value that turned into another key's is a miss.
    pub check: u64,
    /// When the first fragment came, in ticks (see [`TICK`]). Identifications come again: believed for
    /// [`Fragment::TICKS`].
    pub seen: u16,
    /// Protocol behind all extension headers.
    pub protocol: u8,
    /// Zero.
    pub pad: u8,
    /// Source port, network order.
    pub source_port: u16,
    /// Destination port, network order.
    pub destination_port: u16,
}

impl Fragment {
    /// How long later fragments may follow the first.
    pub const TICKS: u16 = 2;
}

/// Value of `answerers`: one byte an interface, by the low 16 bits of its ifindex (those above share a byte with lower
/// ones). The program sets it when it makes a flow towards the interface; nobody clears it: a byte that is out of
/// date costs time only.
pub type Answerers = [u8; 65_536];

/// Words of the `control` array (u64 each).
pub mod control {
    /// The nonce that a probe carries in cb[3] (low half) and cb[4] (high half); 0 = probes are off.
    pub const NONCE: u32 = 0;
    /// Boot clock, nanoseconds, when the agent last was current with its source.
    pub const LAST_CURRENT: u32 = 1;
    /// Debug level: 0 = no log lines, 1 = drops and holds, 2 = every packet.
    pub const DEBUG: u32 = 2;
    /// Nanoseconds between two new flows of one consumer at its full rate; 0 = no limit.
    pub const FLOW_INTERVAL: u32 = 3;
    /// How many nanoseconds' worth of new flows a consumer may open at once, before the rate binds it.
    pub const FLOW_BURST: u32 = 4;
    /// Counts the writes of user space to `consumers`, `services` and `locals`: odd while one goes on. (A trie such as
    /// `prefixes` hides nothing while it is written.)
    ///
    /// While an element is replaced, a look-up of any other can miss. A miss is final only if this word was even
    /// and has not changed since before the look-up; else it is looked up again.
    pub const WRITES: u32 = 5;
    /// Source ports that a new flow may get instead of its own if the answers to that would be another flow's: the first
    /// in the low 16 bits, the last in the next 16, host order. 0 = none.
    pub const PORTS: u32 = 6;
    /// Number of words.
    pub const LEN: u32 = 8;

    /// The word [`PORTS`] for a range.
    pub const fn ports(first: u16, last: u16) -> u64 {
        first as u64 | (last as u64) << 16
    }

    /// What [`PORTS`] is unless somebody says otherwise: behind the ephemeral ports of Linux.
    pub const DEFAULT_PORTS: u64 = ports(61_001, 65_535);
}

/// What the program did with a packet: index into `counters`, and low byte of a probe's answer.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Not ours: never captured, or no route entry of this interface matches.
    Pass = 0,
    /// Request delivered to a producer.
    Delivered = 1,
    /// Answer delivered to a consumer.
    Answered = 2,
    /// A route matched, its gate is closed and its policy says `whileHeld: Pass`.
    PassedHeld = 3,
    /// Dropped: consumer row, entry or selector is closed.
    DropHeld = 4,
    /// Dropped: the set of the policy is empty, or its producer is not the one that was programmed.
    DropNoProducer = 5,
    /// Dropped: the source address is none of the attachment's.
    DropSpoofed = 6,
    /// Dropped: more new flows than the consumer may open.
    DropFlowRate = 7,
    /// Dropped: the answer key of a new flow belongs to another flow.
    DropFlowCollision = 8,
    /// Dropped: an answer whose tokens or policy are not current.
    DropStale = 9,
    /// Dropped: the policy's `maxStaleness` has passed.
    DropExpired = 10,
    /// Dropped: a later fragment without its first, towards a claimed destination.
    DropFragment = 11,
    /// Dropped: no complete header could be read.
    DropMalformed = 12,
    /// Dropped: larger than the way to the producer takes.
    DropTooBig = 13,
}

impl Verdict {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::Pass,
        Self::Delivered,
        Self::Answered,
        Self::PassedHeld,
        Self::DropHeld,
        Self::DropNoProducer,
        Self::DropSpoofed,
        Self::DropFlowRate,
        Self::DropFlowCollision,
        Self::DropStale,
        Self::DropExpired,
        Self::DropFragment,
        Self::DropMalformed,
        Self::DropTooBig,
    ];

    /// From the number in a counter index or a probe's answer.
    pub fn from_u32(value: u32) -> Option<Self> {
        Self::ALL.get(value as usize).copied()
    }

    /// Label `verdict` of `holdfast_packets_total`.
    pub const fn verdict_label(self) -> &'static str {
        match self {
            Self::Pass | Self::PassedHeld => "pass",
            Self::Delivered | Self::Answered => "delivered",
            _ => "drop",
        }
    }

    /// Label `reason` of `holdfast_packets_total`.
    pub const fn reason_label(self) -> &'static str {
        match self {
            Self::Pass => "unmatched",
            Self::Delivered => "request",
            Self::Answered => "answer",
            Self::PassedHeld | Self::DropHeld => "held",
            Self::DropNoProducer => "no_producer",
            Self::DropSpoofed => "spoofed",
            Self::DropFlowRate => "flow_rate",
            Self::DropFlowCollision => "flow_collision",
            Self::DropStale => "stale",
            Self::DropExpired => "expired",
            Self::DropFragment => "fragment",
            Self::DropMalformed => "malformed",
            Self::DropTooBig => "too_big",
        }
    }
}

/// Entries of `counters`.
pub const COUNTERS: u32 = 16;

/// A probe: a test run that asks what would happen, and changes nothing.
///
/// `mark` is not 0 and cb[3], cb[4] are the nonce. In: cb[0] = base and cb[1] = length of the slots to
/// use instead of the selector (length 0 = use the selector), cb[2] = flags | policy << 8. Out: cb[0] =
/// [`Verdict`], cb[1] = target ifindex, cb[2] = policy, cb[3] = set generation, cb[4] = backend id.
pub mod probe {
    /// The mark a probe carries.
    pub const MARK: u32 = 0x4846_0001;
    /// cb[2]: judge as if the consumer's row and the entry were open.
    pub const AS_IF_OPEN: u32 = 1;
    /// cb[2]: look up no route and no row: judge the slots of cb[0], cb[1] for the policy in the upper bits.
    pub const SET_ONLY: u32 = 2;
    /// cb[1] is this in an answer when there is no target.
    pub const NO_TARGET: u32 = 0;
}

/// FNV-1a over bytes: spreads keys, guards nothing secret.
#[inline(always)]
fn fnv1a(mut hash: u64, bytes: &[u8]) -> u64 {
    for &byte in bytes {
        hash = (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash
}

/// Odd numbers without a pattern, one a word.
const MULTIPLIERS: [u64; 6] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0xd6e8_feb8_6659_fd93,
    0xa076_1d64_78bd_642f,
    0xe703_7ed1_a0b4_28db,
];

/// Spreads words over 64 bits: one multiplication each, none waiting for another, and one at the end.
#[inline(always)]
const fn spread<const N: usize>(words: [u64; N]) -> u64 {
    let mut sum = 0u64;
    let mut index = 0;
    while index < N {
        sum = sum.wrapping_add(words[index].wrapping_mul(MULTIPLIERS[index]));
        index += 1;
    }
    let mixed = (sum ^ (sum >> 32)).wrapping_mul(MULTIPLIERS[0]);
    mixed ^ (mixed >> 32)
}

/// An address as two words.
#[cfg(not(target_arch = "bpf"))]
const fn words(address: &Address) -> (u64, u64) {
    let value = u128::from_ne_bytes(*address);
    if cfg!(target_endian = "little") {
        (value as u64, (value >> 64) as u64)
    } else {
        ((value >> 64) as u64, value as u64)
    }
}

/// An address as two words.
#[cfg(target_arch = "bpf")]
#[inline(always)]
#[expect(
    unsafe_code,
    reason = "the compiler would read it byte by byte, and keep every byte on the small stack"
)]
const fn words(address: &Address) -> (u64, u64) {
    // SAFETY: sixteen bytes; all keys have their addresses at multiples of four.
    let [a, b, c, d] = unsafe { *core::ptr::from_ref(address).cast::<[u32; 4]>() };
    (a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32)
}

/// The first `length` bits of an address, which is given and returned as words that lay in memory.
#[inline(always)]
const fn masked((first, second): (u64, u64), length: u32) -> (u64, u64) {
    if length >= 128 {
        (first, second)
    } else if length >= 64 {
        (first, second & upper(length - 64))
    } else {
        (first & upper(length), 0)
    }
}

/// A mask of the first `length` (below 64) bits of eight bytes in memory.
#[inline(always)]
const fn upper(length: u32) -> u64 {
    (!(u64::MAX >> (length & 63))).to_be()
}

/// The address of two words that lay in memory.
const fn address_of(first: u64, second: u64) -> Address {
    let (first, second) = (first.to_ne_bytes(), second.to_ne_bytes());
    let mut address = [0; 16];
    let mut index = 0;
    while index < 8 {
        address[index] = first[index];
        address[index + 8] = second[index];
        index += 1;
    }
    address
}

impl LocalKey {
    /// What the value must say.
    #[inline(always)]
    pub const fn check(&self) -> u64 {
        let (a, b) = words(&self.address);
        spread([self.family as u64, a, b])
    }
}

impl ServiceKey {
    /// What [`RouteEntry::check`] must say.
    #[inline(always)]
    pub const fn check(&self) -> u32 {
        let (a, b) = words(&self.address);
        let head = (self.ifindex as u64) << 32
            | (self.port as u64) << 16
            | (self.protocol as u64) << 8
            | self.family as u64;
        let hash = spread([head, a, b]);
        (hash ^ (hash >> 32)) as u32
    }
}

impl SourceKey {
    /// What the value must say.
    #[inline(always)]
    pub const fn check(&self) -> u64 {
        let (a, b) = words(&self.address);
        spread([(self.ifindex as u64) << 8 | self.family as u64, a, b])
    }
}

impl FlowKey {
    /// Hash of the whole key: picks the slot of a new flow, and is [`Flow::check`].
    #[inline(always)]
    pub const fn hash(&self) -> u64 {
        let (s1, s2) = words(&self.source);
        let (d1, d2) = words(&self.destination);
        let head =
            (self.ifindex as u64) << 32 | (self.source_port as u64) << 16 | self.destination_port as u64;
        let tail = (self.protocol as u64) << 8 | self.family as u64;
        spread([head, s1, s2, d1, d2, tail])
    }
}

impl FragmentKey {
    /// What [`Fragment::check`] must say.
    #[inline(always)]
    pub const fn hash(&self) -> u64 {
        let (s1, s2) = words(&self.source);
        let (d1, d2) = words(&self.destination);
        let head = (self.ifindex as u64) << 32 | self.id as u64;
        let tail = (self.protocol as u64) << 8 | self.family as u64;
        spread([head, s1, s2, d1, d2, tail])
    }
}

/// A checksum over all that [`MAPS`] says but the sizes that flags can change: kept in a test, so that a layout
/// is not changed without a new [`LAYOUT_VERSION`].
pub fn layout_fingerprint() -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for map in MAPS {
        hash = fnv1a(hash, map.name.as_bytes());
        for number in [map.kind, map.key, map.value, map.flags] {
            hash = fnv1a(hash, &number.to_le_bytes());
        }
    }
    hash
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<RegistryRow>() == 40);
    assert!(offset_of!(RegistryRow, mac) == 8);
    assert!(offset_of!(RegistryRow, host_mac) == 14);
    assert!(offset_of!(RegistryRow, kind) == 20);
    assert!(offset_of!(RegistryRow, flags) == 21);
    assert!(offset_of!(RegistryRow, incarnation) == 24);
    assert!(size_of::<ConsumerRow>() == 24);
    assert!(offset_of!(ConsumerRow, ifindex) == 0);
    assert!(offset_of!(ConsumerRow, token) == 8);
    assert!(offset_of!(ConsumerRow, flags) == 16);
    assert!(offset_of!(ConsumerRow, device) == 20);
    assert!(size_of::<ServiceKey>() == 24);
    assert!(offset_of!(ServiceKey, address) == 8);
    assert!(size_of::<RouteEntry>() == 16);
    assert!(offset_of!(RouteEntry, check) == 0);
    assert!(offset_of!(RouteEntry, policy) == 8);
    assert!(size_of::<PrefixKey>() == 28);
    assert!(offset_of!(PrefixKey, family) == 8);
    assert!(offset_of!(PrefixKey, address) == 12);
    assert!(size_of::<PrefixEntry>() == 16);
    assert!(offset_of!(PrefixEntry, policy) == 8);
    assert!(size_of::<LocalKey>() == 20);
    assert!(size_of::<SourceKey>() == 24);
    assert!(size_of::<PolicySlot>() == 96);
    assert!(offset_of!(PolicySlot, selector) == 0);
    assert!(offset_of!(PolicySlot, name_hash) == 32);
    assert!(offset_of!(PolicySlot, waiting_since) == 72);
    assert!(size_of::<Backend>() == 64);
    assert!(offset_of!(Backend, target) == 8);
    assert!(offset_of!(Backend, address_v4) == 24);
    assert!(offset_of!(Backend, address_v6) == 40);
    assert!(offset_of!(Backend, device) == 60);
    assert!(size_of::<FlowKey>() == 44);
    assert!(size_of::<Flow>() == 56);
    assert!(offset_of!(Flow, check) == 0);
    assert!(offset_of!(Flow, port) == 52);
    assert!(size_of::<FragmentKey>() == 44);
    assert!(size_of::<Fragment>() == 16);
    assert!(Verdict::ALL.len() <= COUNTERS as usize);
};

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_layout_is_not_changed_without_a_new_version() {
        // Another value here needs another LAYOUT_VERSION, once a version has been released.
        assert_eq!((LAYOUT_VERSION, layout_fingerprint()), (1, 0x09a5_8c25_a538_51eb));
    }

    #[test]
    fn maps_have_names_that_the_kernel_takes_whole() {
        let names: BTreeSet<_> = MAPS.iter().map(|map| map.name).collect();
        assert_eq!(names.len(), MAPS.len());
        // BPF_OBJ_NAME_LEN is 16 with the zero; bpffs forbids dots.
        assert!(names.iter().all(|name| name.len() < 16 && !name.contains('.')));
    }

    #[test]
    fn verdicts_have_their_own_numbers_and_labels() {
        let labels: BTreeSet<_> = Verdict::ALL
            .iter()
            .map(|verdict| (verdict.verdict_label(), verdict.reason_label()))
            .collect();
        assert_eq!(labels.len(), Verdict::ALL.len());
        for (number, verdict) in Verdict::ALL.into_iter().enumerate() {
            assert_eq!(verdict as usize, number);
            assert_eq!(Verdict::from_u32(number as u32), Some(verdict));
        }
        assert_eq!(Verdict::from_u32(14), None);
    }

    #[test]
    fn generations_wrap() {
        assert!(generation_at_least(5, 5));
        assert!(generation_at_least(6, 5));
        assert!(!generation_at_least(4, 5));
        assert!(generation_at_least(0, Selector::GENERATION_MASK));
        assert!(!generation_at_least(Selector::GENERATION_MASK, 0));
    }

    /// Hashes of flows that differ in one port only, as one client makes them, fill slots evenly.
    #[test]
    fn flows_spread_over_slots() {
        let mut counts = [0u32; 16];
        for port in 0..16_000u16 {
            let key = FlowKey {
                ifindex: 7,
                source_port: port.to_be(),
                destination_port: 53u16.to_be(),
                protocol: 17,
                family: FAMILY_V4,
                ..FlowKey::default()
            };
            counts[(((key.hash() >> 32) * 16) >> 32) as usize] += 1;
        }
        assert!(
            counts.iter().all(|count| (900..1100).contains(count)),
            "{counts:?}"
        );
    }

    proptest! {
        #[test]
        fn a_prefix_is_the_first_bits_of_an_address(ifindex: u32, address: [u8; 16], length in 0u32..=128, bit in 0usize..128) {
            let key = PrefixKey::new(ifindex, FAMILY_V6, &address, length);
            let expected = u128::from_be_bytes(address) & u128::MAX.checked_shl(128 - length).unwrap_or(0);
            prop_assert_eq!(u128::from_be_bytes(key.address), expected);
            // What is found for a packet proves its key by the bits that count, and by no others.
            let mut other = address;
            other[bit / 8] ^= 0x80 >> (bit % 8);
            let found = PrefixKey::of_packet(ifindex, FAMILY_V6, other).check_of(length);
            prop_assert_eq!(found == key.check(), bit >= length as usize);
            prop_assert_eq!(PrefixKey::of_packet(ifindex, FAMILY_V6, address).check_of(length), key.check());
            prop_assert_ne!(PrefixKey::of_packet(ifindex ^ 1, FAMILY_V6, address).check_of(length), key.check());
            prop_assert_ne!(PrefixKey::of_packet(ifindex, FAMILY_V4, address).check_of(length), key.check());
        }

        #[test]
        fn words_are_what_was_packed(base in 0u32..1 << 24, length: u16, generation in 0u32..1 << 24, ifindex: u32, kind: u8) {
            let selector = Selector { base, length, generation };
            prop_assert_eq!(Selector::unpack(selector.pack()), selector);
            let target = Target { ifindex, kind, last_generation: generation };
            prop_assert_eq!(Target::unpack(target.pack()), target);
        }

        #[test]
        fn a_check_names_its_key(ifindex: u32, port: u16, protocol: u8, address: [u8; 16], bit in 0usize..192) {
            let key = ServiceKey { ifindex, port, protocol, family: FAMILY_V6, address };
            let mut other = key;
            match bit {
                0..32 => other.ifindex ^= 1 << bit,
                32..48 => other.port ^= 1 << (bit - 32),
                48..56 => other.protocol ^= 1 << (bit - 48),
                56..64 => other.family ^= 1 << (bit - 56),
                _ => other.address[(bit - 64) / 8] ^= 1 << (bit % 8),
            }
            prop_assert_ne!(key.check(), other.check());
        }
    }
}
