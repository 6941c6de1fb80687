//! What is wanted of the kernel, beside what is believed of it: thing by thing, for whoever compares both with what is
//! there.
//!
//! Planning sends what is wanted at once, so at rest the two differ only where something is out or has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::ops::Bound;

use crate::belief::{Belief, Difference};
use crate::conflict::Claims;
use crate::engine::Engine;
use crate::gate::Known;
use crate::model::{
    Backend, BackendId, Entry, Ifindex, ObjectName, PolicySlot, RouteKey, Row, SlotId, State,
};
use crate::objects::PolicyState;
use crate::ports::Port;
use crate::producers::Phase;
use crate::view::View;

/// Interfaces and policy slots of one page.
const PAGE: usize = 64;

/// One thing in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// Our program at a device, and who is asked before it.
    Program(Ifindex),
    /// A consumer row.
    Row(Ifindex),
    /// A source address.
    Source(Ifindex, IpAddr),
    /// A route entry.
    Entry(Ifindex, RouteKey),
    /// A row of the registry, as it was read last.
    Identity(Ifindex),
    /// The selector of a policy.
    Selector(SlotId),
    /// The slots of its set.
    Slots(SlotId),
    /// A producer of its set.
    Backend(BackendId),
    /// An address of the node itself.
    Local(IpAddr),
}

/// What it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Not there.
    Absent,
    /// There.
    Present,
    /// There, and these are asked before it.
    Program(Vec<String>),
    /// Something else is there.
    Other(String),
    /// A consumer row.
    Row(Row),
    /// A route entry.
    Entry(Entry),
    /// A policy slot.
    Policy(Box<PolicySlot>),
    /// A set of these devices.
    Set(BTreeSet<Ifindex>),
    /// Slots.
    Slots(Vec<BackendId>),
    /// A backend.
    Backend(Box<Backend>),
}

/// One thing, as it is wanted and as it is believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Which.
    pub thing: Thing,
    /// The policy that it belongs to.
    pub policy: Option<ObjectName>,
    /// The interface that it belongs to.
    pub interface: Option<String>,
    /// What is wanted.
    pub wanted: Value,
    /// What is believed; none = one of several, because an operation is out or failed.
    pub believed: Option<Value>,
    /// What is to be looked at: what is believed, or was sent last.
    pub look: Belief,
    /// What the look finds unless it finds a difference.
    pub looked: Value,
}

/// Which things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of a policy: of its set, and of its consumers as far as they are its own.
    Policy(ObjectName),
    /// Those of some interfaces after this one.
    Interfaces(Ifindex),
    /// Those of some policy slots from this one on.
    Slots(SlotId),
    /// The node's own addresses, and what nobody believes in.
    Rest,
}

/// Some things, and where to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The things.
    pub things: Vec<Compared>,
    /// What is to be looked at beside: only what differs is a thing.
    pub beside: Vec<Belief>,
    /// The next page.
    pub next: Option<Scope>,
}

/// There is no such policy here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchPolicy;

impl Difference {
    /// The thing that differs, and what is there.
    #[must_use]
    pub fn found(&self) -> (Thing, Value) {
        fn some<T>(found: Option<&T>, value: impl FnOnce(&T) -> Value) -> Value {
            found.map_or(Value::Absent, value)
        }
        let there = |found: bool| if found { Value::Present } else { Value::Absent };
        match self {
            Self::NoProgram { ifindex, found } => (Thing::Program(*ifindex), Value::Other(found.clone())),
            Self::Foreign { ifindex, programs } => {
                (Thing::Program(*ifindex), Value::Program(programs.clone()))
            }
            Self::Link { ifindex } => (Thing::Program(*ifindex), Value::Present),
            Self::Row { ifindex, found } => {
                (Thing::Row(*ifindex), some(found.as_ref(), |row| Value::Row(*row)))
            }
            Self::Source {
                ifindex,
                address,
                found,
            } => (Thing::Source(*ifindex, *address), there(*found)),
            Self::Entry { ifindex, key, found } => (
                Thing::Entry(*ifindex, *key),
                some(found.as_ref(), |entry| Value::Entry(*entry)),
            ),
            Self::Identity { ifindex } => (
                Thing::Identity(*ifindex),
                Value::Other("another row than was read last".to_owned()),
            ),
            Self::Policy { slot, found } => (
                Thing::Selector(*slot),
                some(found.as_ref(), |policy| Value::Policy(Box::new(policy.clone()))),
            ),
            Self::Table { slot } => (Thing::Slots(*slot), Value::Other("another table".to_owned())),
            Self::Backend { id, found } => (
                Thing::Backend(*id),
                some(found.as_ref(), |backend| {
                    Value::Backend(Box::new(backend.clone()))
                }),
            ),
            Self::Local { address, found } => (Thing::Local(*address), there(*found)),
        }
    }
}

impl fmt::Display for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program(ifindex) => write!(f, "program at device {ifindex}"),
            Self::Row(ifindex) => write!(f, "row of device {ifindex}"),
            Self::Source(ifindex, address) => write!(f, "source {address} of device {ifindex}"),
            Self::Entry(ifindex, key) => write!(f, "entry {key} of device {ifindex}"),
            Self::Identity(ifindex) => write!(f, "identity of device {ifindex}"),
            Self::Selector(slot) => write!(f, "selector {slot}"),
            Self::Slots(slot) => write!(f, "set of selector {slot}"),
            Self::Backend(id) => write!(f, "producer {id}"),
            Self::Local(address) => write!(f, "the node's own address {address}"),
        }
    }
}

impl View<'_> {
    /// What is wanted and believed, a page of it.
    ///
    /// # Errors
    /// [`NoSuchPolicy`].
    pub fn compare(&self, scope: &Scope) -> Result<Page, NoSuchPolicy> {
        self.engine.compare(scope)
    }
}

/// A page while it is filled.
struct Filling<'a> {
    engine: &'a Engine,
    /// Only what belongs to this policy.
    only: Option<&'a PolicyState>,
    things: Vec<Compared>,
}

impl Engine {
    fn compare(&self, scope: &Scope) -> Result<Page, NoSuchPolicy> {
        match scope {
            Scope::Policy(name) => {
                let id = self.objects.policy_names.get(name).ok_or(NoSuchPolicy)?;
                let policy = self.objects.policies.get(id).ok_or(NoSuchPolicy)?;
                Ok(self.compare_policy(policy))
            }
            Scope::Interfaces(after) => {
                let after = (Bound::Excluded(*after), Bound::Unbounded);
                let some: Vec<Ifindex> = self.ports.range(after).map(|(id, _)| *id).take(PAGE).collect();
                let next = some.last().filter(|_| some.len() == PAGE);
                let next = next.map_or(Scope::Slots(0), |last| Scope::Interfaces(*last));
                Ok(self.page(next, |page| some.iter().for_each(|ifindex| page.port(*ifindex))))
            }
            Scope::Slots(from) => {
                let some: Vec<SlotId> = self.slots.range(*from..).map(|(id, _)| *id).take(PAGE).collect();
                let next = some.last().filter(|_| some.len() == PAGE);
                let next = next.map_or(Scope::Rest, |last| Scope::Slots(last.saturating_add(1)));
                Ok(self.page(next, |page| some.iter().for_each(|slot| page.slot(*slot))))
            }
            Scope::Rest => {
                let addresses = self.locals.sure().cloned();
                Ok(Page {
                    things: Vec::new(),
                    beside: std::iter::once(self.believed_links())
                        .chain(addresses.map(|addresses| Belief::Locals { addresses }))
                        .collect(),
                    next: None,
                })
            }
        }
    }

    fn page(&self, next: Scope, fill: impl FnOnce(&mut Filling<'_>)) -> Page {
        let mut page = Filling::new(self, None);
        fill(&mut page);
        Page {
            things: page.things,
            beside: Vec::new(),
            next: Some(next),
        }
    }

    fn compare_policy(&self, policy: &PolicyState) -> Page {
        let mut page = Filling::new(self, Some(policy));
        let consumers = policy.intents.keys();
        let ports: BTreeSet<Ifindex> = consumers
            .filter_map(|id| self.objects.attachments.get(id)?.port)
            .collect();
        ports.into_iter().for_each(|ifindex| page.port(ifindex));
        if let Some(slot) = policy.slot {
            page.slot(slot);
        }
        Page {
            things: page.things,
            ..Page::default()
        }
    }

    fn name_of_slot(&self, slot: SlotId) -> Option<ObjectName> {
        self.slots.get(&slot).and_then(|slot| slot.of.clone())
    }
}

impl<'a> Filling<'a> {
    const fn new(engine: &'a Engine, only: Option<&'a PolicyState>) -> Self {
        Self {
            engine,
            only,
            things: Vec::new(),
        }
    }

    // --- interfaces ----------------------------------------------------------------------------------------

    fn port(&mut self, ifindex: Ifindex) {
        let engine = self.engine;
        let Some(port) = engine.ports.get(&ifindex) else {
            return;
        };
        let claims = engine.claims(port);
        self.program(ifindex, port, &claims);
        self.row(ifindex, port, &claims);
        if let Known::Row(identity) = &port.known
            && port.device.is_some()
            && !engine.dead.contains_key(&ifindex)
        {
            let identity = *identity;
            let value = identity.map_or(Value::Absent, |_| Value::Present);
            self.push(Compared {
                thing: Thing::Identity(ifindex),
                policy: None,
                interface: self.interface(ifindex),
                wanted: value.clone(),
                believed: Some(value.clone()),
                look: Belief::Identity { ifindex, identity },
                looked: value,
            });
        }
        self.sources(ifindex, port, &claims);
        self.entries(ifindex, port, &claims);
    }

    fn program(&mut self, ifindex: Ifindex, port: &Port, claims: &Claims) {
        let engine = self.engine;
        let there = port.program.may(Option::is_some);
        let somebodys = port.device.is_some() && !port.attachments.is_empty();
        let wanted = somebodys || (there && engine.stays(port, claims));
        if !wanted && !there {
            return;
        }
        // Where intents are programmed although somebody is asked before, that is allowed.
        let serves = port.attachments.iter().any(|id| {
            let state = engine.objects.attachments.get(id);
            state.is_some_and(|state| {
                state.consumes.iter().any(|policy| {
                    let intent = engine.intent(*policy, *id);
                    intent.is_some_and(|intent| intent.state == State::Programmed)
                })
            })
        });
        let allowed = if serves { port.foreign.clone() } else { Vec::new() };
        let before = port.foreign.clone();
        self.push(Compared {
            thing: Thing::Program(ifindex),
            policy: None,
            interface: self.interface(ifindex),
            wanted: if wanted {
                Value::Program(allowed)
            } else {
                Value::Absent
            },
            believed: if port.has_program() {
                Some(Value::Program(before.clone()))
            } else if port.program.is(&None) {
                Some(Value::Absent)
            } else {
                None
            },
            looked: Value::Program(before.clone()),
            look: Belief::Program {
                ifindex,
                before: Some(before),
            },
        });
    }

    fn row(&mut self, ifindex: Ifindex, port: &Port, claims: &Claims) {
        let row_value = |row: Option<Row>| row.map_or(Value::Absent, Value::Row);
        let last = port.row.values().last().copied().flatten();
        let wanted = self.engine.wanted_row(ifindex, port, claims, last);
        let believed = port.row.sure().copied();
        if wanted.is_none() && believed == Some(None) {
            return;
        }
        let look = Belief::Row { ifindex, row: last };
        self.push(Compared {
            thing: Thing::Row(ifindex),
            policy: None,
            interface: self.interface(ifindex),
            wanted: row_value(wanted),
            believed: believed.map(row_value),
            look,
            looked: row_value(last),
        });
    }

    fn sources(&mut self, ifindex: Ifindex, port: &Port, claims: &Claims) {
        let wanted = if self.engine.stays(port, claims) {
            port.sources.values().last().cloned().unwrap_or_default()
        } else if claims.is_empty() {
            BTreeSet::new()
        } else {
            self.engine.wanted_sources(port)
        };
        let there: BTreeSet<IpAddr> = port.sources.values().iter().flatten().copied().collect();
        for address in wanted.union(&there).copied() {
            let there = |is: bool| if is { Value::Present } else { Value::Absent };
            let sure = port
                .sources
                .sure()
                .map(|sources| there(sources.contains(&address)));
            self.push(Compared {
                thing: Thing::Source(ifindex, address),
                policy: None,
                interface: self.interface(ifindex),
                wanted: there(wanted.contains(&address)),
                believed: sure,
                look: Belief::Sources {
                    ifindex,
                    sources: BTreeSet::from([address]),
                },
                looked: Value::Present,
            });
        }
    }

    fn entries(&mut self, ifindex: Ifindex, port: &Port, claims: &Claims) {
        let engine = self.engine;
        let keys: BTreeSet<RouteKey> = claims.keys.keys().chain(port.entries.keys()).copied().collect();
        for key in keys {
            let cell = port.entries.get(&key);
            let last = cell.and_then(|cell| cell.values().last()).copied().flatten();
            let owner = claims
                .keys
                .get(&key)
                .and_then(|index| engine.objects.policies.get(&claims.intents[*index].policy));
            let wanted = match owner {
                // Whether it may be open is decided where it is sent.
                Some(owner) => owner.slot.map(|policy| Entry {
                    policy,
                    open: last.is_none_or(|last| last.policy != policy || last.open),
                }),
                None if claims.kept.contains(&key) || !engine.may_remove() => last,
                None => None,
            };
            let believed = match cell {
                None => Some(None),
                Some(cell) => cell.sure().copied(),
            };
            let slot = wanted.or(last).map(|entry| entry.policy);
            let policy = owner
                .map(|owner| owner.object.name.clone())
                .or_else(|| engine.name_of_slot(slot?));
            if self
                .only
                .is_some_and(|only| policy.as_ref() != Some(&only.object.name))
            {
                continue;
            }
            let value = |entry: Option<Entry>| entry.map_or(Value::Absent, Value::Entry);
            let Some(look) = wanted.or(last) else { continue };
            let look = last.unwrap_or(look);
            self.push(Compared {
                thing: Thing::Entry(ifindex, key),
                policy,
                interface: self.interface(ifindex),
                wanted: value(wanted),
                believed: believed.map(value),
                look: Belief::Entries {
                    ifindex,
                    entries: BTreeMap::from([(key, look)]),
                },
                looked: Value::Entry(look),
            });
        }
    }

    // --- producer sets -------------------------------------------------------------------------------------

    fn slot(&mut self, slot: SlotId) {
        let engine = self.engine;
        let Some(state) = engine.slots.get(&slot) else {
            return;
        };
        let name = state.of.clone();
        let owner = state.owner.and_then(|owner| engine.objects.policies.get(&owner));
        let value = |policy: Option<&PolicySlot>| {
            policy.map_or(Value::Absent, |policy| Value::Policy(Box::new(policy.clone())))
        };
        let last = state.cell.values().last().and_then(Option::as_ref);
        let moving = owner.filter(|owner| {
            !owner.current
                && !owner.waiting
                && !owner.unread
                && owner.unreadable.is_none()
                && owner.spec.is_some()
        });
        let wanted = match (owner, moving) {
            (None, _) if engine.may_remove() => Value::Absent,
            (_, None) => value(last),
            (_, Some(owner)) => Value::Set(engine.devices_of_ready(owner)),
        };
        if let Some(policy) = last {
            self.push(Compared {
                thing: Thing::Selector(slot),
                policy: name.clone(),
                interface: None,
                wanted,
                believed: state.cell.sure().map(|sure| value(sure.as_ref())),
                look: Belief::Policy {
                    slot,
                    value: policy.clone(),
                },
                looked: value(last),
            });
        }
        if let Some(set) = state.selected_set().filter(|set| !set.table.is_empty()) {
            let table = Value::Slots(set.table.clone());
            self.push(Compared {
                thing: Thing::Slots(slot),
                policy: name.clone(),
                interface: None,
                wanted: table.clone(),
                believed: (!state.table_wrong).then(|| table.clone()),
                look: Belief::Table {
                    slot,
                    base: set.selected.base,
                    table: set.table.clone(),
                },
                looked: table,
            });
        }
        let members = state.sets.last().into_iter().flat_map(|set| set.members.values());
        let ids: BTreeSet<BackendId> = members.chain(&state.draining).copied().collect();
        for id in ids {
            self.backend(id, name.clone());
        }
    }

    fn backend(&mut self, id: BackendId, policy: Option<ObjectName>) {
        let Some(state) = self
            .engine
            .backends
            .get(&id)
            .filter(|state| state.phase != Phase::Freeing)
        else {
            return;
        };
        let value = Value::Backend(Box::new(state.content.clone()));
        let interface = self.interface(state.content.ifindex);
        self.push(Compared {
            thing: Thing::Backend(id),
            policy,
            interface,
            wanted: value.clone(),
            believed: (!state.unsure).then(|| value.clone()),
            look: Belief::Backend {
                id,
                backend: state.content.clone(),
            },
            looked: value,
        });
    }

    // --- helpers -------------------------------------------------------------------------------------------

    fn interface(&self, ifindex: Ifindex) -> Option<String> {
        self.engine.interfaces.link(ifindex).map(|link| link.name.clone())
    }

    fn push(&mut self, compared: Compared) {
        self.things.push(compared);
    }
}
