//! The audit: in turns the kernel is compared with what is believed of it, and what differs becomes what is known.
//!
//! A turn asks bounded questions, one at a time. An answer about something that an operation was sent for or
//! answered about meanwhile says nothing. Whatever else differs makes its cells unsure, which withdraws every
//! acknowledgment that stands on them, and ordinary planning puts it right and proves it anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use crate::belief::{Audited, Belief, Difference, Drift};
use crate::cell::Cell;
use crate::engine::{Engine, Timer};
use crate::gate::Known;
use crate::model::{
    Backend, BackendId, Boot, Entry, Happening, Ifindex, Level, LogLine, Mac, Now, OpId, PolicySlot,
    RouteKey, SlotId,
};
use crate::plan::What;
use crate::ports::Port;
use crate::producers::Phase;
use crate::view::LastAudit;

/// Up to so many interfaces every turn looks at everything.
const ALL_AT_ONCE: usize = 1_000;
/// Beyond that everything is looked at once in this time; intents are proven again as often.
const ROUND: u64 = 300 * Boot::SECOND;
/// About how many elements one question is about.
const BATCH: usize = 1_024;
/// Turns that news bring about begin no more often than this.
const REST: u64 = 5 * Boot::SECOND;
/// Lines that one answer may write; the rest is summed up in one.
const LINES: usize = 16;

/// Something that a turn looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Question {
    /// A policy slot. `whole`: with the slots and backends of its set.
    Slot { slot: SlotId, whole: bool },
    /// An interface. `whole`: with its chain, registry row, sources and entries.
    Port { ifindex: Ifindex, whole: bool },
    /// The node's own addresses.
    Locals,
    /// What nobody believes in.
    Nothing,
}

/// Something that operations are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Item {
    Port(Ifindex),
    Slot(SlotId),
    Backend(BackendId),
    Locals,
}

/// Where the audit is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Audit {
    /// The question that is out.
    out: Option<OpId>,
    /// What operations were sent for, or answered about, since it went out.
    stirred: BTreeSet<Item>,
    /// What the present turn still asks.
    queue: VecDeque<Question>,
    /// What is asked before that: a proof has failed there.
    urgent: BTreeSet<Question>,
    /// What waits for an operation that is out.
    late: BTreeMap<Item, Question>,
    /// What has been put back already in this turn.
    put_back: BTreeSet<Item>,
    /// Interfaces of the question that is out whose intents are proven again if all is right.
    to_prove: BTreeSet<Ifindex>,
    /// Interfaces of the present turn whose intents are to be proven again.
    proving: BTreeSet<Ifindex>,
    /// When the present turn began.
    began: Option<Now>,
    /// When the last turn began.
    last_began: Option<Boot>,
    /// When all devices, and what nobody believes in, were last looked at.
    swept: Option<Boot>,
    /// The next turn looks at everything.
    everything: bool,
    /// Differences of the present turn.
    found: u64,
    /// The interface up to which turns have looked in full.
    looked: Ifindex,
    /// The interface up to which intents were proven again.
    proven: Ifindex,
    /// It was said that something could not be looked at.
    unreadable: bool,
}

impl Engine {
    /// Everything is to be looked at as soon as that may be.
    pub(crate) fn audit_everything(&mut self) {
        if self.config.audit_every == 0 {
            return;
        }
        self.audit.everything = true;
        let due = self
            .audit
            .last_began
            .map_or(self.now.boot, |began| began.plus(REST).max(self.now.boot));
        self.timer(Timer::Audit, Some(due));
    }

    /// A proof has failed: what it stood on is looked at at once.
    pub(crate) fn audit_at_once(&mut self, ifindex: Ifindex, slot: Option<SlotId>) {
        if self.config.audit_every == 0 || !self.passed {
            return;
        }
        let whole = true;
        self.audit.urgent.insert(Question::Port { ifindex, whole });
        if let Some(slot) = slot {
            self.audit_slot_at_once(slot);
        }
    }

    /// What a policy slot leads to is looked at at once.
    pub(crate) fn audit_slot_at_once(&mut self, slot: SlotId) {
        if self.config.audit_every == 0 || !self.passed {
            return;
        }
        self.audit.urgent.insert(Question::Slot { slot, whole: true });
    }

    /// What is at the ingress hooks of these devices is looked at at once, where it concerns us.
    pub(crate) fn hooks_changed(&mut self, ifindexes: &BTreeSet<Ifindex>) {
        for &ifindex in ifindexes {
            if self.ports.contains_key(&ifindex) {
                self.audit_at_once(ifindex, None);
            }
        }
    }

    /// An operation about this was sent or answered: what is being looked at may have been before or after it.
    pub(crate) fn stir(&mut self, what: &What) {
        match what {
            What::Free(ids) => {
                for id in ids {
                    self.stir_item(Item::Backend(*id));
                }
            }
            What::Backends(slot, _) | What::Slots(slot) | What::Policy(slot) => {
                self.stir_item(Item::Slot(*slot));
            }
            What::Locals => self.stir_item(Item::Locals),
            What::ProveSet(_) | What::ProveIntent(..) => {}
            What::DeleteIdentity(ifindex, _) => self.stir_item(Item::Port(*ifindex)),
            other => {
                if let Some(ifindex) = other.ifindex() {
                    self.stir_item(Item::Port(ifindex));
                }
            }
        }
    }

    /// The device or the identity of an interface is another.
    pub(crate) fn stir_port(&mut self, ifindex: Ifindex) {
        self.stir_item(Item::Port(ifindex));
    }

    fn stir_item(&mut self, item: Item) {
        if self.audit.out.is_some() {
            self.audit.stirred.insert(item);
        }
        if let Some(question) = self.audit.late.remove(&item) {
            self.audit.queue.push_back(question);
        }
    }

    // --- turns ---------------------------------------------------------------------------------------------

    /// A turn begins, unless the last one still has a question out.
    pub(crate) fn begin_audit(&mut self) {
        let every = self.config.audit_every;
        if every == 0 || !self.passed {
            return;
        }
        self.timer(Timer::Audit, Some(self.now.boot.plus(every)));
        if self.audit.out.is_some() || !self.audit.queue.is_empty() {
            return;
        }
        self.end_audit();
        let now = self.now;
        let everything = std::mem::take(&mut self.audit.everything);
        let small = self.ports.len() <= ALL_AT_ONCE;
        let turns = usize::try_from((ROUND / every).max(1)).unwrap_or(usize::MAX);
        let share = if everything {
            usize::MAX
        } else {
            self.ports.len().div_ceil(turns)
        };
        let (proving, proven) = self.next_ports(self.audit.proven, share);
        let (looking, looked) = if small || everything {
            (self.ports.keys().copied().collect(), 0)
        } else {
            self.next_ports(self.audit.looked, share)
        };
        let overdue = self
            .audit
            .swept
            .is_none_or(|swept| now.boot.plus(every).since(swept) > ROUND);
        if everything || overdue || self.interfaces.len() <= ALL_AT_ONCE {
            self.out.dump_links = true;
        }
        // Whether it died or came back is told once, and may have been lost.
        self.ask(self.denied.keys().copied().collect());
        let whole_slots = self.whole_slots(small || everything, turns);
        let slots = self.slots.keys().map(|slot| Question::Slot {
            slot: *slot,
            whole: whole_slots.contains(slot),
        });
        self.audit.queue.push_back(Question::Locals);
        self.audit.queue.extend(slots);
        let ports = self.ports.keys().map(|ifindex| Question::Port {
            ifindex: *ifindex,
            whole: looking.contains(ifindex),
        });
        self.audit.queue.extend(ports);
        if small || everything || overdue {
            self.audit.queue.push_back(Question::Nothing);
            self.audit.swept = Some(now.boot);
        }
        // At the start everything is proven anyway.
        self.audit.proving = if self.audit.last_began.is_some() {
            proving
        } else {
            BTreeSet::new()
        };
        self.audit.proven = proven;
        self.audit.looked = looked;
        self.audit.began = Some(now);
        self.audit.last_began = Some(now.boot);
    }

    /// So many interfaces after this one, in a ring; and the last of them.
    fn next_ports(&self, after: Ifindex, count: usize) -> (BTreeSet<Ifindex>, Ifindex) {
        let later = self.ports.range((Bound::Excluded(after), Bound::Unbounded));
        let earlier = self.ports.range(..=after);
        let ring: Vec<Ifindex> = later
            .chain(earlier)
            .map(|(ifindex, _)| *ifindex)
            .take(count)
            .collect();
        let last = ring.last().copied().unwrap_or(after);
        (ring.into_iter().collect(), last)
    }

    /// The policy slots whose sets are looked at in this turn: by their number, so that each has its turn.
    fn whole_slots(&self, all: bool, turns: usize) -> BTreeSet<SlotId> {
        let turns = u64::try_from(turns).unwrap_or(u64::MAX);
        let turn = (self.now.boot.0 / self.config.audit_every) % turns;
        self.slots
            .keys()
            .copied()
            .filter(|slot| all || self.slots.len() <= ALL_AT_ONCE || u64::from(*slot) % turns == turn)
            .collect()
    }

    /// The turn is over.
    fn end_audit(&mut self) {
        let audit = &mut self.audit;
        audit.late.clear();
        audit.put_back.clear();
        audit.proving.clear();
        let Some(began) = audit.began.take() else {
            return;
        };
        self.summary.audit = Some(LastAudit {
            ended: self.now,
            took: self.now.boot.since(began.boot),
            found: std::mem::take(&mut audit.found),
        });
        if audit.everything {
            self.audit_everything();
        }
    }

    /// Asks the next question, if none is out.
    pub(crate) fn audit_on(&mut self) {
        if self.audit.out.is_some() {
            return;
        }
        let mut beliefs = Vec::new();
        let mut weight = 0_usize;
        while weight < BATCH {
            let urgent = self.audit.urgent.pop_first();
            let Some(question) = urgent.or_else(|| self.audit.queue.pop_front()) else {
                break;
            };
            for belief in self.beliefs(question) {
                weight = weight.saturating_add(belief.weight());
                beliefs.push(belief);
            }
        }
        if beliefs.is_empty() {
            if self.audit.began.is_some() && self.audit.late.is_empty() {
                self.end_audit();
            }
            return;
        }
        self.last_op += 1;
        let id = OpId(self.last_op);
        self.audit.out = Some(id);
        self.audit.stirred.clear();
        self.out.audits.push((id, beliefs));
    }

    /// What is believed of this. Nothing, if it has to wait.
    fn beliefs(&mut self, question: Question) -> Vec<Belief> {
        let item = match question {
            Question::Port { ifindex, .. } => Item::Port(ifindex),
            Question::Slot { slot, .. } => Item::Slot(slot),
            Question::Locals => Item::Locals,
            Question::Nothing => return vec![self.believed_links()],
        };
        if self.is_out(item) {
            self.audit.late.insert(item, question);
            return Vec::new();
        }
        match question {
            Question::Port { ifindex, whole } => self.beliefs_of_port(ifindex, whole),
            Question::Slot { slot, whole } => self.beliefs_of_slot(slot, whole),
            Question::Locals => match self.locals.sure() {
                Some(addresses) => vec![Belief::Locals {
                    addresses: addresses.clone(),
                }],
                None => Vec::new(),
            },
            Question::Nothing => Vec::new(),
        }
    }

    /// Whether an operation about it is out.
    fn is_out(&self, item: Item) -> bool {
        match item {
            Item::Port(ifindex) => self.ports.get(&ifindex).is_some_and(Port::busy),
            Item::Slot(slot) => self.slots.get(&slot).is_some_and(|slot| slot.out()),
            Item::Locals => self.locals.out(),
            Item::Backend(id) => self.flights.values().any(|flight| match &flight.what {
                What::Free(ids) => ids.contains(&id),
                _ => false,
            }),
        }
    }

    /// The devices that may have our program.
    pub(crate) fn believed_links(&self) -> Belief {
        let links = self
            .ports
            .iter()
            .filter(|(_, port)| port.program.may(Option::is_some));
        Belief::Nothing {
            links: links.map(|(ifindex, _)| *ifindex).collect(),
        }
    }

    fn beliefs_of_port(&mut self, ifindex: Ifindex, whole: bool) -> Vec<Belief> {
        let Some(beliefs) = self.believed_of_port(ifindex, whole) else {
            return Vec::new();
        };
        if whole && self.audit.proving.remove(&ifindex) {
            self.audit.to_prove.insert(ifindex);
        }
        beliefs
    }

    /// What is believed of an interface; none if nothing is changed there. `whole`: with its chain, registry row,
    /// sources and entries.
    pub(crate) fn believed_of_port(&self, ifindex: Ifindex, whole: bool) -> Option<Vec<Belief>> {
        let port = self.ports.get(&ifindex)?;
        // Nothing is changed there before its identity has been read.
        if port.device.is_none() || self.frozen(port) {
            return None;
        }
        let mut beliefs = Vec::new();
        if port.has_program() {
            let before = whole.then(|| port.foreign.clone());
            beliefs.push(Belief::Program { ifindex, before });
        }
        if let Some(row) = port.row.sure() {
            beliefs.push(Belief::Row { ifindex, row: *row });
        }
        if !whole {
            return Some(beliefs);
        }
        if let Known::Row(identity) = &port.known
            && !self.dead.contains_key(&ifindex)
        {
            let identity = *identity;
            beliefs.push(Belief::Identity { ifindex, identity });
        }
        if let Some(sources) = port.sources.sure().filter(|sources| !sources.is_empty()) {
            let sources = sources.clone();
            beliefs.push(Belief::Sources { ifindex, sources });
        }
        let entries: BTreeMap<RouteKey, Entry> = port
            .entries
            .iter()
            .filter_map(|(key, cell)| Some((*key, cell.sure().copied().flatten()?)))
            .collect();
        if !entries.is_empty() {
            beliefs.push(Belief::Entries { ifindex, entries });
        }
        Some(beliefs)
    }

    pub(crate) fn beliefs_of_slot(&self, slot: SlotId, whole: bool) -> Vec<Belief> {
        // One that must stay as it is could not be put right.
        let Some(state) = self.slots.get(&slot).filter(|_| !self.kept_slots.contains(&slot)) else {
            return Vec::new();
        };
        let mut beliefs = Vec::new();
        if let Some(Some(value)) = state.cell.sure() {
            let value = value.clone();
            beliefs.push(Belief::Policy { slot, value });
        }
        if !whole || state.building.is_some() {
            return beliefs;
        }
        if let Some(set) = state
            .selected_set()
            .filter(|set| !set.table.is_empty() && !state.table_wrong)
        {
            let (base, table) = (set.selected.base, set.table.clone());
            beliefs.push(Belief::Table { slot, base, table });
        }
        let members = state.sets.last().into_iter().flat_map(|set| set.members.values());
        for id in members.chain(&state.draining) {
            if let Some(known) = self.backends.get(id)
                && known.phase != Phase::Freeing
                && !known.unsure
            {
                let (id, backend) = (*id, known.content.clone());
                beliefs.push(Belief::Backend { id, backend });
            }
        }
        beliefs
    }

    // --- answers -------------------------------------------------------------------------------------------

    /// Takes in what an audit has seen.
    pub(crate) fn audited(&mut self, id: OpId, audited: Audited) {
        if self.audit.out != Some(id) {
            return;
        }
        self.audit.out = None;
        if let Some(message) = &audited.unreadable
            && !self.audit.unreadable
        {
            self.say(Level::Warn, Happening::AuditUnreadable(message.clone()));
        }
        self.audit.unreadable = audited.unreadable.is_some();
        let stirred = std::mem::take(&mut self.audit.stirred);
        let mut to_prove = std::mem::take(&mut self.audit.to_prove);
        let mut lines = 0_usize;
        for difference in audited.differences {
            let item = self.item_of(&difference);
            if let Item::Port(ifindex) = item {
                to_prove.remove(&ifindex);
            }
            if stirred.contains(&item) || self.is_out(item) {
                self.put_back(item);
                continue;
            }
            let policy = self.policy_of(&difference);
            if !self.drifted(&difference) {
                continue;
            }
            self.audit.found += 1;
            self.count_drift(difference.kind(), 1);
            lines += 1;
            if lines <= LINES {
                self.out.log.push(LogLine {
                    level: Level::Warn,
                    what: Happening::Drift(difference.kind(), difference.to_string()),
                    policy,
                    consumer: None,
                    ifindex: match item {
                        Item::Port(ifindex) => Some(ifindex),
                        Item::Slot(_) | Item::Backend(_) | Item::Locals => None,
                    },
                });
            }
        }
        if lines > LINES {
            let more = lines - LINES;
            self.say(
                Level::Warn,
                Happening::MoreDrift(u32::try_from(more).unwrap_or(u32::MAX)),
            );
        }
        for ifindex in to_prove {
            if let Some(port) = self.ports.get_mut(&ifindex) {
                port.prove_again = true;
                self.dirty.ports.insert(ifindex);
            }
        }
    }

    /// A dump of all devices, asked for by an audit, found these otherwise than had been told. What else their lost
    /// news would have changed is looked at, too.
    pub(crate) fn devices_drifted(&mut self, ifindexes: &BTreeSet<Ifindex>) {
        self.audit_everything();
        self.count_drift(Drift::Device, ifindexes.len() as u64);
        self.audit.found += ifindexes.len() as u64;
        let shown: Vec<String> = ifindexes.iter().take(LINES).map(u32::to_string).collect();
        let message = format!("nobody told of a change of device {}", shown.join(", "));
        self.say(Level::Warn, Happening::Drift(Drift::Device, message));
        let more = ifindexes.len().saturating_sub(LINES);
        if more > 0 {
            self.say(
                Level::Warn,
                Happening::MoreDrift(u32::try_from(more).unwrap_or(u32::MAX)),
            );
        }
    }

    fn count_drift(&mut self, kind: Drift, count: u64) {
        *self.summary.drift.entry(kind).or_default() += count;
    }

    /// Something moved under the eyes of the audit: it is looked at once more in this turn.
    fn put_back(&mut self, item: Item) {
        let whole = true;
        let question = match item {
            Item::Port(ifindex) => Question::Port { ifindex, whole },
            Item::Slot(slot) => Question::Slot { slot, whole },
            Item::Locals => Question::Locals,
            // Its turn comes again with what nobody believes in.
            Item::Backend(_) => return,
        };
        if self.audit.put_back.insert(item) {
            self.audit.queue.push_back(question);
        }
    }

    fn item_of(&self, difference: &Difference) -> Item {
        match difference {
            Difference::NoProgram { ifindex, .. }
            | Difference::Foreign { ifindex, .. }
            | Difference::Link { ifindex }
            | Difference::Row { ifindex, .. }
            | Difference::Source { ifindex, .. }
            | Difference::Entry { ifindex, .. }
            | Difference::Identity { ifindex } => Item::Port(*ifindex),
            Difference::Policy { slot, .. } | Difference::Table { slot } => Item::Slot(*slot),
            Difference::Local { .. } => Item::Locals,
            Difference::Backend { id, .. } => match self.backends.get(id) {
                Some(backend) => Item::Slot(backend.content.policy),
                None => Item::Backend(*id),
            },
        }
    }

    /// The policy that a difference is about, for the log.
    fn policy_of(&self, difference: &Difference) -> Option<crate::model::ObjectName> {
        let slot = match difference {
            Difference::Policy { slot, .. } | Difference::Table { slot } => Some(*slot),
            Difference::Backend { id, .. } => self.backends.get(id).map(|backend| backend.content.policy),
            Difference::Entry { ifindex, key, .. } => self
                .ports
                .get(ifindex)
                .and_then(|port| port.entries.get(key)?.sure().copied().flatten())
                .map(|entry| entry.policy),
            _ => None,
        };
        let owner = self.slots.get(&slot?)?.owner?;
        Some(self.objects.policies.get(&owner)?.object.name.clone())
    }

    /// What was found is what is known now. Says whether it is anything new.
    fn drifted(&mut self, difference: &Difference) -> bool {
        match difference {
            Difference::Policy { slot, found } => self.policy_drifted(*slot, found.as_ref()),
            Difference::Table { slot } => self.table_drifted(*slot),
            Difference::Backend { id, found } => self.backend_drifted(*id, found.as_ref()),
            Difference::Local { address, found } => self.locals.drifted(*address, *found),
            Difference::Identity { ifindex } => {
                self.read(*ifindex, false);
                true
            }
            Difference::NoProgram { ifindex, .. }
            | Difference::Foreign { ifindex, .. }
            | Difference::Link { ifindex }
            | Difference::Row { ifindex, .. }
            | Difference::Source { ifindex, .. }
            | Difference::Entry { ifindex, .. } => self.port_drifted(*ifindex, difference),
        }
    }

    fn port_drifted(&mut self, ifindex: Ifindex, difference: &Difference) -> bool {
        let last = OpId(self.last_op);
        let device = self.interfaces.link(ifindex).map(|link| link.device());
        let port = self
            .ports
            .entry(ifindex)
            .or_insert_with(|| Port::new(device, last));
        let mut voids_proofs = true;
        match difference {
            Difference::NoProgram { .. } => {
                if !port.has_program() {
                    return false;
                }
                // It is attached anew, under a closed row. A link without a device may be left of it.
                port.program.doubt(None);
            }
            Difference::Foreign { programs, .. } => {
                if port.foreign == *programs {
                    return false;
                }
                port.foreign.clone_from(programs);
            }
            Difference::Link { .. } => {
                if port.program.may(Option::is_some) {
                    return false;
                }
                port.program
                    .doubt(Some(device.map_or(Mac::default(), |device| device.mac)));
            }
            Difference::Row { found, .. } => {
                if port.row.is(found) {
                    return false;
                }
                // Whichever of the two it is: it is closed, and the epoch is above both.
                port.row.doubt(*found);
            }
            Difference::Source { address, found, .. } => {
                let Some(mut sources) = port.sources.sure().cloned() else {
                    return false;
                };
                let new = if *found {
                    sources.insert(*address)
                } else {
                    sources.remove(address)
                };
                if !new {
                    return false;
                }
                port.sources = Cell::Sure(sources);
            }
            Difference::Entry { key, found, .. } => {
                let cell = port.entries.entry(*key).or_insert(Cell::Sure(None));
                let believed = cell.sure().copied().flatten();
                // The same: what the data path keeps beside it is wrong.
                match believed {
                    Some(_) => cell.doubt(*found),
                    None => *cell = Cell::Sure(*found),
                }
                voids_proofs = false;
                if let Some(believed) = believed {
                    self.void_proof(ifindex, believed.policy);
                }
            }
            Difference::Identity { .. }
            | Difference::Policy { .. }
            | Difference::Table { .. }
            | Difference::Local { .. }
            | Difference::Backend { .. } => return false,
        }
        if let Some(port) = self.ports.get_mut(&ifindex) {
            if voids_proofs {
                port.touched = last;
            }
            port.unblock();
        }
        self.unblock_intents(ifindex);
        self.dirty.ports.insert(ifindex);
        self.dirty_interface_of(ifindex);
        self.dirty_producers_of(ifindex);
        true
    }

    /// An entry that leads to this slot was another: what the intent that it belongs to was proven by is void.
    fn void_proof(&mut self, ifindex: Ifindex, slot: SlotId) {
        let last = OpId(self.last_op);
        let Some(owner) = self.slots.get(&slot).and_then(|slot| slot.owner) else {
            return;
        };
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in port.attachments.clone() {
            if let Some(intent) = self.intent_mut(owner, attachment) {
                intent.touched = last;
            }
        }
    }

    fn policy_drifted(&mut self, slot: SlotId, found: Option<&PolicySlot>) -> bool {
        if !self.slots.contains_key(&slot) {
            let Some(found) = found else { return false };
            self.adopt_stray_slot(slot, found);
            return true;
        }
        self.spoil_slot(slot, |state| {
            if state.cell.sure().is_some_and(|sure| sure.as_ref() == found) {
                return false;
            }
            state.cell.doubt(found.cloned());
            true
        })
    }

    fn table_drifted(&mut self, slot: SlotId) -> bool {
        self.spoil_slot(slot, |state| !std::mem::replace(&mut state.table_wrong, true))
    }

    fn backend_drifted(&mut self, id: BackendId, found: Option<&Backend>) -> bool {
        let Some(known) = self.backends.get_mut(&id) else {
            let Some(found) = found else { return false };
            self.adopt_stray_backend(id, found);
            return true;
        };
        if known.phase == Phase::Freeing || known.unsure || found == Some(&known.content) {
            return false;
        }
        known.unsure = true;
        let slot = known.content.policy;
        self.spoil_slot(slot, |_| true)
    }

    /// Something of a policy slot is not as it was believed: its proofs are void.
    fn spoil_slot(
        &mut self,
        slot: SlotId,
        spoil: impl FnOnce(&mut crate::producers::SlotState) -> bool,
    ) -> bool {
        let last = OpId(self.last_op);
        let Some(state) = self.slots.get_mut(&slot) else {
            return false;
        };
        if !spoil(state) {
            return false;
        }
        state.touched = last;
        if let Some(trouble) = &mut state.trouble {
            trouble.blocked = false;
        }
        let owner = state.owner;
        match owner {
            Some(owner) => {
                self.dirty.policies.insert(owner);
                let policy = self.objects.policies.get_mut(&owner);
                for intent in policy.into_iter().flat_map(|policy| policy.intents.values_mut()) {
                    intent.unblock();
                }
            }
            None => drop(self.dirty.slots.insert(slot)),
        }
        true
    }
}
