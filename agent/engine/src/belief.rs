//! What an audit asks and answers: the engine's beliefs about the kernel, piece by piece, and where the kernel differs.
//!
//! An audit changes nothing. What it finds is treated as news about the kernel, and ordinary planning puts it right.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::model::{
    Adoption, Backend, BackendId, Entry, Identity, Ifindex, PolicySlot, RouteKey, Row, SlotId,
};

/// One thing that the engine believes of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Belief {
    /// Our program, the current one, is at this device by its pinned link.
    Program {
        /// Number of the device.
        ifindex: Ifindex,
        /// Somebody else's programs that are asked before ours; none = they are not looked at this time.
        before: Option<Vec<String>>,
    },
    /// The consumer row; none = there is none.
    Row {
        /// Key.
        ifindex: Ifindex,
        /// Value.
        row: Option<Row>,
    },
    /// These source addresses are there.
    Sources {
        /// Number of the device.
        ifindex: Ifindex,
        /// Addresses.
        sources: BTreeSet<IpAddr>,
    },
    /// These route entries are there, with whatever the data path keeps beside them.
    Entries {
        /// Number of the device.
        ifindex: Ifindex,
        /// Key and value of each.
        entries: BTreeMap<RouteKey, Entry>,
    },
    /// The row of the registry; none = there is none.
    Identity {
        /// Key.
        ifindex: Ifindex,
        /// Value.
        identity: Option<Identity>,
    },
    /// A policy slot.
    Policy {
        /// Key.
        slot: SlotId,
        /// Value.
        value: PolicySlot,
    },
    /// The slots of the selected set of a policy.
    Table {
        /// The policy slot.
        slot: SlotId,
        /// First slot in the arena.
        base: u32,
        /// Backend of each slot.
        table: Vec<BackendId>,
    },
    /// A backend.
    Backend {
        /// Key.
        id: BackendId,
        /// Value.
        backend: Backend,
    },
    /// The node's own addresses.
    Locals {
        /// All of them.
        addresses: BTreeSet<IpAddr>,
    },
    /// Nothing of ours is there beside what operations have written, and no link is pinned but for these devices.
    Nothing {
        /// Devices with a link.
        links: BTreeSet<Ifindex>,
    },
}

impl Belief {
    /// About how many elements must be looked at.
    #[must_use]
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Program { .. } | Self::Row { .. } | Self::Identity { .. } => 1,
            Self::Policy { .. } | Self::Backend { .. } => 1,
            Self::Sources { sources, .. } => sources.len(),
            Self::Locals { addresses } => addresses.len(),
            Self::Entries { entries, .. } => entries.len(),
            Self::Table { table, .. } => table.len(),
            Self::Nothing { .. } => usize::MAX,
        }
    }
}

/// One thing in the kernel that is not as it was believed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Difference {
    /// The program is not at this device by its pinned link, or the link leads to another program.
    NoProgram {
        /// Number of the device.
        ifindex: Ifindex,
        /// What was found instead, for people.
        found: String,
    },
    /// Somebody else's programs are asked before ours at this device (empty = not any more).
    Foreign {
        /// Number of the device.
        ifindex: Ifindex,
        /// What is known of each.
        programs: Vec<String>,
    },
    /// A link is pinned for a device that has none by what is believed.
    Link {
        /// Number of the device, which may be gone.
        ifindex: Ifindex,
    },
    /// A consumer row.
    Row {
        /// Key.
        ifindex: Ifindex,
        /// What is there.
        found: Option<Row>,
    },
    /// A source address.
    Source {
        /// Number of the device.
        ifindex: Ifindex,
        /// The address.
        address: IpAddr,
        /// Whether it is there.
        found: bool,
    },
    /// A route entry, or what the data path keeps beside it.
    Entry {
        /// Number of the device.
        ifindex: Ifindex,
        /// Key.
        key: RouteKey,
        /// What is there.
        found: Option<Entry>,
    },
    /// The row of the registry: it is to be read.
    Identity {
        /// Key.
        ifindex: Ifindex,
    },
    /// A policy slot.
    Policy {
        /// Key.
        slot: SlotId,
        /// What is there.
        found: Option<PolicySlot>,
    },
    /// One of the node's own addresses.
    Local {
        /// The address.
        address: IpAddr,
        /// Whether it is there.
        found: bool,
    },
    /// Some slot of the selected set of a policy.
    Table {
        /// The policy slot.
        slot: SlotId,
    },
    /// A backend.
    Backend {
        /// Key.
        id: BackendId,
        /// What is there.
        found: Option<Backend>,
    },
}

impl Difference {
    /// Its kind, for counting.
    #[must_use]
    pub const fn kind(&self) -> Drift {
        match self {
            Self::NoProgram { .. } | Self::Link { .. } => Drift::Program,
            Self::Foreign { .. } => Drift::Foreign,
            Self::Row { .. } => Drift::Row,
            Self::Source { .. } => Drift::Source,
            Self::Entry { .. } => Drift::Entry,
            Self::Identity { .. } => Drift::Identity,
            Self::Policy { .. } => Drift::Policy,
            Self::Table { .. } => Drift::Slot,
            Self::Backend { .. } => Drift::Backend,
            Self::Local { .. } => Drift::Local,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn some<T: fmt::Debug>(found: Option<&T>) -> String {
            found.map_or_else(|| "nothing".to_owned(), |found| format!("{found:?}"))
        }
        match self {
            Self::NoProgram { found, .. } => f.write_str(found),
            Self::Foreign { programs, .. } if programs.is_empty() => {
                f.write_str("nobody is asked before our program any more")
            }
            Self::Foreign { programs, .. } => {
                write!(
                    f,
                    "{} is asked before our program and could let packets pass",
                    programs.join(" and ")
                )
            }
            Self::Link { .. } => f.write_str("a link is pinned that nobody wants"),
            Self::Row { found, .. } => write!(f, "row: found {}", some(found.as_ref())),
            Self::Source { address, found, .. } => {
                write!(
                    f,
                    "source {address}: {}",
                    if *found { "found" } else { "missing" }
                )
            }
            Self::Local { address, found } => write!(
                f,
                "the node's own address {address}: {}",
                if *found { "found" } else { "missing" }
            ),
            Self::Entry { key, found, .. } => write!(f, "entry {key}: found {}", some(found.as_ref())),
            Self::Identity { .. } => f.write_str("the registry has another row than was read last"),
            Self::Policy { slot, found } => {
                write!(f, "policy slot {slot}: found {}", some(found.as_ref()))
            }
            Self::Table { slot } => write!(f, "a slot of the set of policy slot {slot} is another"),
            Self::Backend { id, found } => write!(f, "backend {id}: found {}", some(found.as_ref())),
        }
    }
}

/// What drifted: label `kind` of `holdfast_drift_repairs_total`. A closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Drift {
    /// News of a network device were lost.
    Device,
    /// Our program was not where it should be, or was where it should not.
    Program,
    /// Somebody else's program came before ours. It is named and left alone.
    Foreign,
    /// A consumer row.
    Row,
    /// A source address.
    Source,
    /// A route entry.
    Entry,
    /// The row of the registry changed, and nobody told.
    Identity,
    /// A policy slot: selector and flags.
    Policy,
    /// A slot of a producer set.
    Slot,
    /// A backend.
    Backend,
    /// One of the node's own addresses.
    Local,
}

impl Drift {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Device,
        Self::Program,
        Self::Foreign,
        Self::Row,
        Self::Source,
        Self::Entry,
        Self::Identity,
        Self::Policy,
        Self::Slot,
        Self::Backend,
        Self::Local,
    ];

    /// As the label says it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Program => "program",
            Self::Foreign => "foreign",
            Self::Row => "row",
            Self::Source => "source",
            Self::Entry => "entry",
            Self::Identity => "identity",
            Self::Policy => "policy",
            Self::Slot => "slot",
            Self::Backend => "backend",
            Self::Local => "local",
        }
    }
}

/// What an audit has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audited {
    /// Where the kernel differs.
    pub differences: Vec<Difference>,
    /// Something could not be looked at, which is no news: why, for people.
    pub unreadable: Option<String>,
}

/// A kernel in memory, as an audit looks at it.
///
/// Data paths that are no kernel answer audits with [`There::differs`]; the real one is held against it.
#[derive(Clone, Copy)]
pub struct There<'a> {
    /// Maps and links.
    pub pins: &'a Adoption,
    /// The registry.
    pub registry: &'a BTreeMap<Ifindex, Identity>,
    /// Somebody else's programs before ours, by device.
    pub foreign: &'a BTreeMap<Ifindex, Vec<String>>,
}

impl fmt::Debug for There<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("There").finish_non_exhaustive()
    }
}

impl There<'_> {
    /// Where it differs from a belief. (Of what nobody believes in, only links: a kernel in memory must say itself
    /// which elements no operation has written.)
    #[must_use]
    pub fn differs(&self, belief: &Belief) -> Vec<Difference> {
        let pins = self.pins;
        let one = |differs: bool, difference: Difference| if differs { vec![difference] } else { Vec::new() };
        match belief {
            Belief::Program { ifindex, before } => self.program(*ifindex, before.as_deref()),
            Belief::Row { ifindex, row } => {
                let (ifindex, found) = (*ifindex, pins.rows.get(ifindex).copied());
                one(found != *row, Difference::Row { ifindex, found })
            }
            Belief::Sources { ifindex, sources } => {
                let there = pins.sources.get(ifindex);
                let missing = |address: &&IpAddr| there.is_none_or(|there| !there.contains(address));
                let missing = sources.iter().filter(missing).copied();
                missing
                    .map(|address| Difference::Source {
                        ifindex: *ifindex,
                        address,
                        found: false,
                    })
                    .collect()
            }
            Belief::Entries { ifindex, entries } => {
                let there = |key: &RouteKey| {
                    pins.entries
                        .get(ifindex)
                        .and_then(|there| there.get(key))
                        .copied()
                };
                let others = entries.iter().filter(|(key, entry)| there(key) != Some(**entry));
                others
                    .map(|(key, _)| Difference::Entry {
                        ifindex: *ifindex,
                        key: *key,
                        found: there(key),
                    })
                    .collect()
            }
            Belief::Identity { ifindex, identity } => {
                let there = self.registry.get(ifindex).copied();
                one(there != *identity, Difference::Identity { ifindex: *ifindex })
            }
            Belief::Policy { slot, value } => {
                let (slot, found) = (*slot, pins.policies.get(slot).cloned());
                one(found.as_ref() != Some(value), Difference::Policy { slot, found })
            }
            Belief::Table { slot, base, table } => {
                let there = pins.slots.get(base);
                one(there != Some(table), Difference::Table { slot: *slot })
            }
            Belief::Backend { id, backend } => {
                let (id, found) = (*id, pins.backends.get(id).cloned());
                one(found.as_ref() != Some(backend), Difference::Backend { id, found })
            }
            Belief::Locals { addresses } => {
                let missing = addresses.difference(&pins.locals).map(|address| (address, false));
                let more = pins.locals.difference(addresses).map(|address| (address, true));
                missing
                    .chain(more)
                    .map(|(address, found)| Difference::Local {
                        address: *address,
                        found,
                    })
                    .collect()
            }
            Belief::Nothing { links } => {
                let stray = pins.attached.difference(links);
                stray
                    .map(|ifindex| Difference::Link { ifindex: *ifindex })
                    .collect()
            }
        }
    }

    fn program(&self, ifindex: Ifindex, before: Option<&[String]>) -> Vec<Difference> {
        if !self.pins.attached.contains(&ifindex) {
            let found = "no link is pinned for the device".to_owned();
            return vec![Difference::NoProgram { ifindex, found }];
        }
        let programs = self.foreign.get(&ifindex).cloned().unwrap_or_default();
        if before.is_some_and(|before| *before != programs) {
            return vec![Difference::Foreign { ifindex, programs }];
        }
        Vec::new()
    }
}
