//! The words of the engine: objects, facts about the node, kernel operations, and what comes back.
//!
//! Everything here is plain data. Nothing here reads a clock, a file or the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::belief::{Audited, Belief, Drift};

/// A moment on the boot clock (`CLOCK_BOOTTIME`), in nanoseconds. All arithmetic is done with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Boot(pub u64);

impl Boot {
    /// Nanoseconds in a millisecond.
    pub const MILLI: u64 = 1_000_000;
    /// Nanoseconds in a second.
    pub const SECOND: u64 = 1_000_000_000;

    /// This moment plus `nanos`.
    #[must_use]
    pub const fn plus(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }

    /// Nanoseconds since `earlier`; 0 if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// One moment on both clocks. The wall clock may be wrong or step: it is only ever carried, never computed with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Now {
    /// Boot clock.
    pub boot: Boot,
    /// Milliseconds since the Unix epoch.
    pub wall_ms: i64,
}

/// Number of a network device in the agent's network namespace.
pub type Ifindex = u32;

/// Names one workload incarnation; random, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token(pub NonZeroU64);

impl Token {
    /// The token with this number; none for 0.
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// As a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// A hardware address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Whether it is all zero, which stands for "unknown".
    #[must_use]
    pub fn is_unknown(self) -> bool {
        self.0 == [0; 6]
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The first 16 bytes of SHA-256 of an identity string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub [u8; 16]);

/// Uid of an object: never names two contents with one generation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Uid(pub String);

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Namespace and name of an object; shown as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// How old an object is: creation time first, then uid, so that two nodes agree. Smaller is older.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Age {
    /// Creation, milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Tie-break.
    pub uid: Uid,
}

// --- objects -----------------------------------------------------------------------------------------------

/// One network interface of one workload incarnation on this node. Sources filter out other nodes' attachments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name of the object.
    pub name: ObjectName,
    /// Uid of the object.
    pub uid: Uid,
    /// Generation of the object.
    pub generation: u64,
    /// Creation, milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Host-side interface name, 1 to 15 bytes.
    pub interface: String,
    /// The incarnation that must be registered, if the object names one.
    pub expected: Option<Incarnation>,
    /// Addresses of the workload; empty = not known, no source check.
    pub addresses: BTreeSet<IpAddr>,
    /// What selectors match.
    pub labels: BTreeMap<String, String>,
    /// Its summands of `covers`, as a consumer and as a producer (first 8 bytes, big endian, of SHA-256 of
    /// `role/uid/generation`, role `c` or `p`).
    pub covers: Covers,
}

/// What one attachment adds to the `covers` of a policy that selects it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Covers {
    /// Selected as a consumer.
    pub consumer: u64,
    /// Selected as a producer.
    pub producer: u64,
}

/// A policy as the source saw it, well formed or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Name of the object.
    pub name: ObjectName,
    /// Uid of the object.
    pub uid: Uid,
    /// Generation of the object.
    pub generation: u64,
    /// Creation, milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// The object that this one is a copy of.
    pub origin: Option<Origin>,
    /// Its content, or why there is none that could be used.
    pub content: Result<PolicySpec, Refusal>,
}

/// The object that a policy is a copy of (annotations `holdfast.dev/origin-uid`, `holdfast.dev/origin-generation`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Its uid.
    pub uid: Uid,
    /// Its generation.
    pub generation: u64,
}

/// Why the content of a policy cannot be used at all (unlike [`Features`], which the engine judges).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// `Invalid` or `Unsupported`.
    pub reason: FailReason,
    /// What is wrong and where, for people.
    pub message: String,
    /// Which consumers it meant, if that much could be read.
    pub consumers: Option<Selector>,
}

/// Content of a `RoutePolicy`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySpec {
    /// Whose traffic.
    pub consumers: Selector,
    /// Who serves it.
    pub producers: Selector,
    /// Which traffic; unique, at most 64.
    pub destinations: BTreeSet<Destination>,
    /// How it reaches the producer.
    pub delivery: Delivery,
    /// What happens to it while the consumer is held.
    pub while_held: WhileHeld,
    /// How the policy moves from one producer set to another.
    pub switchover: Switchover,
    /// Bound of staleness in nanoseconds.
    pub max_staleness: Option<u64>,
}

/// Matches labels: all requirements must hold. Never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selector {
    /// Equality.
    pub match_labels: BTreeMap<String, String>,
    /// Set operations.
    pub match_expressions: Vec<Requirement>,
}

/// One `matchExpressions` item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirement {
    /// Label key.
    pub key: String,
    /// Operation and values.
    pub operator: Operator,
}

/// Operators of label selectors, with Kubernetes' meaning: `NotIn` also matches where the key is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// The value is one of these.
    In(BTreeSet<String>),
    /// The value is none of these, or the key is absent.
    NotIn(BTreeSet<String>),
    /// The key is there.
    Exists,
    /// The key is absent.
    DoesNotExist,
}

impl Selector {
    /// Whether `labels` meet every requirement.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| {
                let value = labels.get(&requirement.key);
                match &requirement.operator {
                    Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                    Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                    Operator::Exists => value.is_some(),
                    Operator::DoesNotExist => value.is_none(),
                }
            })
    }
}

/// Transport protocol of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// IP protocol number.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// What a policy claims for its consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Destination {
    /// One address, protocol and port.
    Service {
        /// Address.
        address: IpAddr,
        /// Protocol.
        protocol: Protocol,
        /// Port, 1 to 65535.
        port: u16,
        /// Port at the producer (`Translate` only).
        target_port: Option<u16>,
    },
    /// All traffic to an address range; no host bits are set.
    Prefix {
        /// Network address.
        address: IpAddr,
        /// Prefix length.
        length: u8,
    },
}

impl Destination {
    /// Whether both claim the same packets, whatever port these get at the producer.
    #[must_use]
    pub fn claims_as(&self, other: &Self) -> bool {
        match (*self, *other) {
            (
                Self::Service {
                    address,
                    protocol,
                    port,
                    target_port: _,
                },
                Self::Service {
                    address: other_address,
                    protocol: other_protocol,
                    port: other_port,
                    target_port: _,
                },
            ) => (address, protocol, port) == (other_address, other_protocol, other_port),
            (one, other) => one == other,
        }
    }
}

/// How packets reach a producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// Unchanged.
    Direct,
    /// The destination becomes the producer's address, answers are translated back.
    Translate,
}

/// What happens to claimed traffic of a held consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WhileHeld {
    /// Dropped and counted.
    Drop,
    /// Takes the default path.
    Pass,
}

/// How a policy changes its producer set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switchover {
    /// How long it may wait for a ready producer, nanoseconds.
    pub deadline: u64,
    /// What happens then.
    pub on_deadline: OnDeadline,
    /// How long established flows stay on a leaving producer, nanoseconds.
    pub drain: u64,
}

/// What happens to the old set when a switch has waited for its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDeadline {
    /// It goes on serving.
    KeepOld,
    /// It is cut off.
    Cut,
}

// --- states ------------------------------------------------------------------------------------------------

/// Why an intent is held. A closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum HoldReason {
    /// No such interface.
    InterfaceMissing,
    /// The interface is not administratively up.
    InterfaceDown,
    /// The interface has no carrier.
    NoCarrier,
    /// No identity is registered for this device.
    IdentityMissing,
    /// Another incarnation is registered than the attachment names.
    IdentityMismatch,
    /// No producer is ready.
    NoReadyProducer,
}

impl HoldReason {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::InterfaceMissing,
        Self::InterfaceDown,
        Self::NoCarrier,
        Self::IdentityMissing,
        Self::IdentityMismatch,
        Self::NoReadyProducer,
    ];
}

impl fmt::Display for HoldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why an intent failed. A closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FailReason {
    /// The program could not be attached.
    AttachFailed,
    /// A map could not be written, or the kernel did not answer.
    MapWriteFailed,
    /// A map is too small.
    MapFull,
    /// The kernel's own answer is not what the intent wants.
    ProofFailed,
    /// The identity could not be read, and never was.
    RegistryUnreadable,
    /// Another object has the right.
    Conflict,
    /// The object is not well formed.
    Invalid,
    /// The object asks for something that this agent does not do.
    Unsupported,
}

impl FailReason {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::AttachFailed,
        Self::MapWriteFailed,
        Self::MapFull,
        Self::ProofFailed,
        Self::RegistryUnreadable,
        Self::Conflict,
        Self::Invalid,
        Self::Unsupported,
    ];
}

impl fmt::Display for FailReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// State of an intent, and by precedence Failed > Held > Pending > Programmed of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum State {
    /// Ready, and not everything has been answered and proven yet.
    Pending,
    /// In the kernel, and proven.
    Programmed,
    /// Not ready.
    Held(HoldReason),
    /// Could not be done.
    Failed(FailReason),
}

// --- facts about the node ----------------------------------------------------------------------------------

/// A network device in the agent's network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Its number.
    pub ifindex: Ifindex,
    /// Its name.
    pub name: String,
    /// Its own hardware address: with the ifindex it names the device.
    pub mac: Mac,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Carrier (`IFLA_CARRIER`).
    pub carrier: bool,
    /// What it is.
    pub kind: LinkKind,
    /// Bridge or other master.
    pub master: Option<Ifindex>,
    /// MTU in bytes.
    pub mtu: u32,
    /// It speaks IPv6: without, it has no IPv6 neighbours.
    pub ipv6: bool,
}

/// What a device is, as the kernel says (`IFLA_INFO_KIND`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkKind {
    /// A veth.
    Veth {
        /// Its peer is in another network namespace (`IFLA_LINK_NETNSID`).
        peer_elsewhere: bool,
    },
    /// A tun or tap.
    Tap,
    /// A bridge.
    Bridge,
    /// Anything else.
    Other,
}

/// What the registry says about one ifindex.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegistryRead {
    /// A row.
    Row(Identity),
    /// No row: a typed condition.
    Absent,
    /// The read failed: no news. The text is for people.
    Failed(String),
}

/// A row of the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Names the incarnation.
    pub token: Token,
    /// MAC of the workload's side; may be unknown.
    pub mac: Mac,
    /// MAC of the host's side at registration: names the device.
    pub host_mac: Mac,
    /// `host_mac` does not name the device (all host sides have one MAC): not compared.
    pub host_mac_shared: bool,
    /// The incarnation, if the registrant named it.
    pub incarnation: Option<Incarnation>,
}

// --- the kernel side ---------------------------------------------------------------------------------------

/// Index of a policy slot.
pub type SlotId = u32;
/// Index of a backend.
pub type BackendId = u32;

/// A consumer row (`consumers`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The token it is open for; none = closed.
    pub token: Option<Token>,
    /// Flows carry it; raised when an entry of the interface is revoked.
    pub epoch: u32,
    /// There are route entries in `services`.
    pub has_services: bool,
    /// There are route entries in `prefixes` for IPv4.
    pub has_prefixes_v4: bool,
    /// There are route entries in `prefixes` for IPv6.
    pub has_prefixes_v6: bool,
    /// Source addresses are known.
    pub has_sources: bool,
    /// Answers leave by this device with an explicit next hop (`bpf_redirect_neigh`): the interface itself, or the
    /// bridge that it is a port of. None = straight to the peer (`bpf_redirect_peer`).
    pub via: Option<Ifindex>,
}

/// Key of a route entry beside the ifindex. Services come before prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RouteKey {
    /// One address, protocol and port (map `services`). Goes before any prefix.
    Service {
        /// Destination address.
        address: IpAddr,
        /// Protocol.
        protocol: Protocol,
        /// Destination port.
        port: u16,
    },
    /// All traffic to an address range (map `prefixes`). The longest that matches goes first.
    Prefix {
        /// Network address; no host bits are set.
        address: IpAddr,
        /// Prefix length.
        length: u8,
    },
}

impl RouteKey {
    /// The destination's address, or the first of its range.
    #[must_use]
    pub const fn address(&self) -> IpAddr {
        match self {
            Self::Service { address, .. } | Self::Prefix { address, .. } => *address,
        }
    }

    /// Whether it is a range.
    #[must_use]
    pub const fn is_prefix(&self) -> bool {
        matches!(self, Self::Prefix { .. })
    }

    /// Whether there are packets that either could take.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let length = match (self, other) {
            (Self::Service { .. }, Self::Service { .. }) => return self == other,
            (Self::Prefix { length, .. }, Self::Service { .. })
            | (Self::Service { .. }, Self::Prefix { length, .. }) => *length,
            (Self::Prefix { length: a, .. }, Self::Prefix { length: b, .. }) => *a.min(b),
        };
        let same = match (self.address(), other.address()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a) ^ u128::from(b)).leading_zeros(),
            _ => return false,
        };
        same >= u32::from(length)
    }

    /// Whether its packets come to include those of the other one when that goes.
    pub(crate) fn is_wider_than(&self, other: &Self) -> bool {
        let wider = match (self, other) {
            (Self::Service { .. }, _) => false,
            (Self::Prefix { .. }, Self::Service { .. }) => true,
            (Self::Prefix { length, .. }, Self::Prefix { length: other, .. }) => length < other,
        };
        wider && self.overlaps(other)
    }
}

impl fmt::Display for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service {
                address,
                protocol,
                port,
            } => write!(f, "{address} {protocol} {port}"),
            Self::Prefix { address, length } => write!(f, "{address}/{length}"),
        }
    }
}

/// A route entry (`services`, `prefixes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Which policy slot it leads to.
    pub policy: SlotId,
    /// The pair's own gate.
    pub open: bool,
}

/// A producer as a policy's set has it (`backends`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// The slot that owns it.
    pub policy: SlotId,
    /// The producer's device.
    pub ifindex: Ifindex,
    /// Its token.
    pub token: Token,
    /// Its MAC in the workload; may be unknown.
    pub mac: Mac,
    /// Its first IPv4 address (`IpAddr::V4`), if any.
    pub address_v4: Option<IpAddr>,
    /// Its first IPv6 address (`IpAddr::V6`), if any.
    pub address_v6: Option<IpAddr>,
    /// Packets leave by this device with the address of their family as the next hop (`bpf_redirect_neigh`): the
    /// producer's interface, or the bridge that it is a port of. None = straight to the peer (`bpf_redirect_peer`).
    pub via: Option<Ifindex>,
    /// The set generation up to which it is a member (24 bits, wraps).
    pub last_generation: u32,
    /// Until when established flows may stay after it left; none = it has not left, or is cut at once.
    pub drain_until: Option<Boot>,
}

/// Which slots a policy uses now: one word, switched by one write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Selected {
    /// First slot in the arena.
    pub base: u32,
    /// Number of slots; 0 = empty set.
    pub length: u16,
    /// Set generation (24 bits, wraps, counted per slot).
    pub generation: u32,
}

/// A policy slot (`policies`): its selector and its description for the next life of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySlot {
    /// Whose it is.
    pub name: NameHash,
    /// Uid hash of the policy.
    pub uid: UidHash,
    /// The selector.
    pub selected: Selected,
    /// `whileHeld: Pass`.
    pub pass_while_held: bool,
    /// Generation of the policy that the selected set serves.
    pub served_generation: u64,
    /// Since when it serves it, milliseconds since the Unix epoch.
    pub served_since_ms: i64,
    /// When a switch began to wait.
    pub waiting_since: Option<Boot>,
    /// Last set generation given out.
    pub last_set_generation: u32,
}

/// First 8 bytes (big endian) of SHA-256 of `namespace/name`; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NameHash(pub u64);

/// First 16 bytes of SHA-256 of a uid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UidHash(pub [u8; 16]);

/// Hashes that need SHA-256, which the engine (serde and thiserror only) is given from outside.
#[derive(Clone, Copy, Debug)]
pub struct Hashes {
    /// Hash of a policy's name.
    pub name: fn(&ObjectName) -> NameHash,
    /// Hash of a policy's uid.
    pub uid: fn(&Uid) -> UidHash,
}

/// Names one operation; never used twice in a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OpId(pub u64);

/// A device as an operation names it: carried out only if the kernel's device still has this MAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// Its number.
    pub ifindex: Ifindex,
    /// Its hardware address.
    pub mac: Mac,
}

/// Something the kernel is to do. Carried out by one worker per [`Lane`], in the order given.
///
/// Writes are idempotent: the value replaces what is there. Deletes of what is not there are done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Attach the program at the ingress hook of a device, first in the chain, and pin the link.
    /// A pinned link that is defunct (dead device) is replaced. Already attached is done.
    Attach {
        /// The device.
        device: Device,
    },
    /// Detach and unpin. Not attached is done.
    Detach {
        /// Number of the device, which may be gone.
        ifindex: Ifindex,
    },
    /// Delete everything that is keyed by an ifindex: route entries, sources, then the row.
    /// (What an earlier device of that number left behind.)
    ClearInterface {
        /// Number of the device.
        ifindex: Ifindex,
    },
    /// Write a consumer row.
    WriteRow {
        /// Key.
        ifindex: Ifindex,
        /// Value.
        row: Row,
    },
    /// Make these the source addresses of an interface.
    WriteSources {
        /// Number of the device.
        ifindex: Ifindex,
        /// To add.
        add: BTreeSet<IpAddr>,
        /// To delete.
        delete: BTreeSet<IpAddr>,
    },
    /// Make these the node's own addresses, which no route captures.
    WriteLocals {
        /// To add.
        add: BTreeSet<IpAddr>,
        /// To delete.
        delete: BTreeSet<IpAddr>,
    },
    /// Write the entries of one intent.
    WriteEntries {
        /// Number of the device.
        ifindex: Ifindex,
        /// Key and value of each.
        entries: BTreeMap<RouteKey, Entry>,
    },
    /// Delete entries, whoever's they are.
    DeleteEntries {
        /// Number of the device.
        ifindex: Ifindex,
        /// Keys.
        keys: BTreeSet<RouteKey>,
    },
    /// Write backends.
    WriteBackends {
        /// Key and value of each; none = free it (write zeroes).
        backends: BTreeMap<BackendId, Option<Backend>>,
    },
    /// Write a range of slots.
    WriteSlots {
        /// First slot in the arena.
        base: u32,
        /// Backend of each slot.
        slots: Vec<BackendId>,
    },
    /// Write a policy slot; the selector is switched by this one write.
    WritePolicy {
        /// Key.
        slot: SlotId,
        /// Value; none = free it (write zeroes).
        value: Option<PolicySlot>,
    },
    /// Delete a registry row if it still holds this token (its device is gone).
    DeleteIdentity {
        /// Key.
        ifindex: Ifindex,
        /// The token that it held.
        token: Token,
    },
    /// Ask the program about a set before the selector leads to it: each backend singly, by slot override.
    ProveSet {
        /// The policy slot.
        policy: SlotId,
        /// A device that holds the program and whose program is asked.
        device: Device,
        /// The slots.
        selected: Selected,
        /// What must be found, with the slots of each.
        backends: BTreeMap<BackendId, Backend>,
        /// Backend of each slot.
        slots: Vec<BackendId>,
    },
    /// Read back link, program id, row, entries and selector of one intent, and ask the program that the device
    /// holds about each destination, as if row and entries were open.
    ProveIntent(IntentProof),
}

/// What [`Op::ProveIntent`] must find.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntentProof {
    /// The consumer's device.
    pub device: Device,
    /// The row that must be in the map.
    pub row: Row,
    /// The token that the registry must hold.
    pub token: Token,
    /// Source addresses to ask from; empty = any.
    pub sources: BTreeSet<IpAddr>,
    /// The entries that must be in the map; each is asked.
    pub entries: BTreeMap<RouteKey, Entry>,
    /// Destinations whose entries lead to another policy still: each is asked as if it led to this policy slot, before
    /// one write lets it.
    pub takeovers: BTreeMap<RouteKey, SlotId>,
    /// The selector that must be in the slot.
    pub selected: Selected,
    /// The members, of which one must be the answer to each question.
    pub backends: BTreeMap<BackendId, Backend>,
}

impl IntentProof {
    /// The policy slots that it is about.
    #[must_use]
    pub fn policies(&self) -> BTreeSet<SlotId> {
        let entries = self.entries.values().map(|entry| entry.policy);
        entries.chain(self.takeovers.values().copied()).collect()
    }

    /// Whether it asks about this destination.
    #[must_use]
    pub fn asks(&self, key: &RouteKey) -> bool {
        self.entries.contains_key(key) || self.takeovers.contains_key(key)
    }
}

/// The worker that carries an operation out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Lane {
    /// Map writes: microseconds.
    Write,
    /// Attach and detach: about 10 ms each, under RTNL.
    Attach,
    /// Proofs.
    Prove,
    /// Audits: they look at much, and nothing waits for them.
    Audit,
}

impl Op {
    /// Which worker carries it out.
    #[must_use]
    pub const fn lane(&self) -> Lane {
        match self {
            Self::Attach { .. } | Self::Detach { .. } => Lane::Attach,
            Self::ProveSet { .. } | Self::ProveIntent(_) => Lane::Prove,
            _ => Lane::Write,
        }
    }
}

/// What the kernel answered.
pub type OpResult = Result<OpDone, OpError>;

/// A successful answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpDone {
    /// Number of map elements that were really written or deleted (identical rows are never rewritten).
    pub writes: u32,
}

/// An unsuccessful answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum OpError {
    /// The device is gone, or another device has its number now (ENODEV, or the MAC differs).
    #[error("the device is gone")]
    NoDevice,
    /// The program is not (or no longer) on the device, although it was attached there: found by a proof.
    #[error("{message}")]
    Detached {
        /// What was found instead.
        message: String,
    },
    /// The map is full (E2BIG or ENOSPC).
    #[error("map {map} is full: {need} entries needed, {have} in all")]
    Full {
        /// Which map.
        map: String,
        /// Entries that the operation needs.
        need: u32,
        /// Capacity.
        have: u32,
    },
    /// The kernel or the program said something else than it should.
    #[error("{message}")]
    Disproved {
        /// What was expected and what was found.
        message: String,
    },
    /// Any other refusal.
    #[error("{message}")]
    Refused {
        /// Operation, object and errno.
        message: String,
    },
}

/// What an earlier life left in the pins, read back at start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adoption {
    /// Devices of this namespace on which our program is, by a live pinned link or a filter.
    pub attached: BTreeSet<Ifindex>,
    /// Consumer rows.
    pub rows: BTreeMap<Ifindex, Row>,
    /// Source addresses.
    pub sources: BTreeMap<Ifindex, BTreeSet<IpAddr>>,
    /// Addresses of the node itself.
    pub locals: BTreeSet<IpAddr>,
    /// Route entries.
    pub entries: BTreeMap<Ifindex, BTreeMap<RouteKey, Entry>>,
    /// Policy slots in use.
    pub policies: BTreeMap<SlotId, PolicySlot>,
    /// Backends in use.
    pub backends: BTreeMap<BackendId, Backend>,
    /// Slots that a selector leads to: content of each selected range, by its base.
    pub slots: BTreeMap<u32, Vec<BackendId>>,
    /// Rows of the registry.
    // A journal is not self-describing: nothing in it may be left out when it is empty.
    #[serde(default)]
    pub identities: BTreeMap<Ifindex, Identity>,
}

/// What was kept of an intent over a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// Policy.
    pub policy: Uid,
    /// Consumer.
    pub attachment: Uid,
    /// Its incarnation then; none if it had none.
    pub token: Option<Token>,
    /// Its state then.
    pub state: State,
    /// Start of that state and reason.
    pub since: Now,
    /// Start of the hold, if it was held.
    pub held_since: Option<Now>,
}

// --- in and out --------------------------------------------------------------------------------------------

/// One change of the desired objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectChange {
    /// A policy is there, new or changed.
    Policy(Policy),
    /// A policy is gone.
    PolicyGone(ObjectName),
    /// An attachment of this node is there, new or changed.
    Attachment(Attachment),
    /// An attachment is gone.
    AttachmentGone(ObjectName),
}

/// What the engine is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// What earlier lives left in the pins. Exactly one, before any answer.
    Adopted(Box<Adoption>),
    /// What earlier lives knew of the intents' times. At most one, before the first object.
    Remembered(Vec<Remembered>),
    /// Objects changed; one scan or one batch is one event.
    Objects(Vec<ObjectChange>),
    /// The objects so far are a complete set that an earlier life saved: enough for additions, for holds and for
    /// switches because of what happened on this node, but never a reason to remove anything.
    SavedComplete,
    /// The source has delivered its complete set since the start.
    SourceComplete,
    /// A device is there, new or changed.
    Link(Link),
    /// A device is gone (also: moved to another namespace).
    LinkGone(Ifindex),
    /// All devices there are; others are gone.
    LinkDump(Vec<Link>),
    /// All addresses of the node itself; others are gone.
    Locals(BTreeSet<IpAddr>),
    /// Answer to [`Effect::ReadRegistry`], or news that came by itself.
    Registry(Vec<(Ifindex, RegistryRead)>),
    /// Somebody says that the identity of this interface may have changed: read it.
    Poke(Ifindex),
    /// Answer to an operation.
    Answer(OpId, OpResult),
    /// Answer to an audit.
    Audited(OpId, Audited),
    /// The dump that [`Effect::DumpLinks`] asked for found these devices otherwise than had been told; what they are
    /// now follows as [`Event::Link`] and [`Event::LinkGone`].
    DevicesDrifted(BTreeSet<Ifindex>),
    /// Somebody has changed what is at the ingress hooks of these devices.
    HooksChanged(BTreeSet<Ifindex>),
    /// Somebody may have changed what is at any hook: news of it were lost.
    HooksUnknown,
    /// Time has passed: a deadline may be due.
    Tick,
}

/// What the engine wants done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// Carry this out and answer with [`Event::Answer`].
    Kernel(OpId, Op),
    /// Read these registry rows in one batch and answer with [`Event::Registry`].
    ReadRegistry(BTreeSet<Ifindex>),
    /// Ask for this device by itself and answer with [`Event::Link`] or [`Event::LinkGone`].
    AskLink(Ifindex),
    /// Compare these with the kernel, change nothing, and answer with [`Event::Audited`].
    Audit(OpId, Vec<Belief>),
    /// Compare all devices with what was told of them. Only what nobody told of is news: [`Event::DevicesDrifted`].
    DumpLinks,
    /// What is reported of these policies (by name; some may be gone) has changed.
    Report(BTreeSet<ObjectName>),
    /// How long something took.
    Measured(Leg, u64),
    /// A line for people.
    Log(LogLine),
}

/// Label `leg` of `holdfast_programming_duration_seconds`; the value with it is in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Leg {
    /// From the first sight of a generation to Programmed at it.
    SeenToProgrammed,
    /// From ready (link, identity and program there) to the open row.
    ReadyToProgrammed,
    /// From the last write to the proof.
    WrittenToProven,
}

/// A line for people: one when a hold starts, when its reason changes, when it ends; failures; summaries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// How much it matters. A hold is never above `Info`.
    pub level: Level,
    /// What happened.
    pub what: Happening,
    /// Policy, if it is about one.
    pub policy: Option<ObjectName>,
    /// Consumer, if it is about one.
    pub consumer: Option<ObjectName>,
    /// Device, if there is one.
    pub ifindex: Option<Ifindex>,
}

/// Level of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// For whoever debugs.
    Debug,
    /// Normal course.
    Info,
    /// Somebody should look at it some day.
    Warn,
    /// Somebody must look at it.
    Error,
}

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Happening {
    /// A hold starts.
    HoldStarted(HoldReason),
    /// Its reason changed.
    HoldChanged(HoldReason),
    /// It ended after so many nanoseconds; the intent is now in this state.
    HoldEnded(u64, State),
    /// An intent is programmed (and was not held before).
    Programmed,
    /// An intent failed, with message.
    Failed(FailReason, String),
    /// A failure ended.
    Recovered,
    /// A switch has waited for its deadline.
    SwitchOverdue(OnDeadline),
    /// So many entries were removed because a consumer is no longer selected.
    Removed(u32),
    /// A policy is gone, and so many entries of it, of all its consumers, were removed.
    PolicyRemoved(u32),
    /// Counts by state, periodic while anything is held: programmed, held, failed, pending.
    Summary {
        /// Intents programmed.
        programmed: u64,
        /// Intents held.
        held: u64,
        /// Intents failed.
        failed: u64,
        /// Intents pending.
        pending: u64,
    },
    /// A registry row could not be read.
    RegistryUnreadable(String),
    /// A cleanup failed and will be retried.
    CleanupFailed(String),
    /// An audit found something that is not as it was left: what, and what was found.
    Drift(Drift, String),
    /// So many more of the same audit.
    MoreDrift(u32),
    /// An audit could not look at something. Said once.
    AuditUnreadable(String),
}

/// What the engine is made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sizes of the arenas that the engine hands out itself.
    pub capacity: Capacity,
    /// What this build does; the rest is `Failed(Unsupported)`.
    pub features: Features,
    /// Every packet is delivered by `bpf_redirect_neigh` (`--delivery neigh`), also where the peer could be reached
    /// straight: the egress hooks of the devices are honoured.
    pub neighbour_only: bool,
    /// SHA-256, from outside.
    pub hashes: Hashes,
    /// Nanoseconds between the beginnings of audits; 0 = none.
    pub audit_every: u64,
}

/// Sizes of maps whose indexes the engine hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Policy slots.
    pub policies: u32,
    /// Slots in the arena.
    pub slots: u32,
    /// Backends.
    pub backends: u32,
}

/// What the data plane can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Features {
    /// Prefix destinations.
    pub prefixes: bool,
    /// `delivery: Translate`.
    pub translate: bool,
    /// More than one ready producer a policy.
    pub several_producers: bool,
    /// Producers that are not a veth with its peer in another namespace.
    pub neighbour_delivery: bool,
    /// `maxStaleness`.
    pub max_staleness: bool,
}
