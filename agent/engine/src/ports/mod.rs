//! One interface: its program, consumer row, source addresses and route entries, and what is done about them.
//!
//! Planning is level-triggered: it compares what is wanted with what the kernel answered, and sends what
//! may be sent now. What depends on an answer comes when the answer has made the interface dirty again.

mod account;
mod attachments;
mod entries;
mod kinds;
mod plan;
mod program;
mod proofs;
mod row;
mod states;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::cell::Cell;
use crate::conflict::Claims;
use crate::engine::Engine;
use crate::gate::Known;
use crate::intent::Intent;
use crate::model::{
    Boot, Device, Entry, FailReason, Ifindex, Mac, OpError, OpId, RouteKey, Row, SlotId, Token,
};
use crate::objects::AttachmentId;
use crate::plan::{Goal, Trouble};
use crate::since::Marks;

/// Reads of the registry row.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Read {
    /// When the one that is under way was asked for.
    pub(crate) out: Option<Boot>,
    /// Another one is wanted after it.
    pub(crate) again: bool,
    /// Answers that are still to come, also those that nobody waits for any more. They come in order.
    pub(crate) unanswered: u32,
    /// What the next so many of them say may be about an earlier device.
    pub(crate) void: u32,
    /// Reads that failed are tried again.
    pub(crate) backoff: Option<Backoff>,
    /// When that, or the end of patience, is.
    pub(crate) due: Boot,
}

/// A device on which packets of an attachment may be delivered, program and all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub(crate) attachment: AttachmentId,
    pub(crate) token: Token,
    /// MAC of the workload's side.
    pub(crate) mac: Mac,
    pub(crate) address_v4: Option<IpAddr>,
    pub(crate) address_v6: Option<IpAddr>,
    /// The device by which packets leave to it; none = straight to its peer.
    pub(crate) via: Option<Ifindex>,
}

/// One interface, by ifindex.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Port {
    pub(crate) device: Option<Device>,
    /// Attachments that name it.
    pub(crate) attachments: BTreeSet<AttachmentId>,
    /// The one that has the right to it.
    pub(crate) winner: Option<AttachmentId>,
    /// Readiness of the winner.
    pub(crate) ready: Option<Ready>,
    /// The winner is ready but for the program.
    pub(crate) coming: bool,
    pub(crate) known: Known,
    pub(crate) read: Read,
    /// Some attachment of it could be judged otherwise by another read of the registry.
    pub(crate) hangs_on_identity: bool,
    /// An earlier life left something here, and the device is still the one it was left on.
    adopted: bool,
    /// It was looked at whether that life ended in the middle of a revocation.
    traced: bool,
    /// The incarnation that that life had let go live, until all intents are known that it may have done so for.
    inheritance: Option<(Mac, Token)>,
    /// What is here belongs to a device that is gone.
    stale: bool,
    /// The program is on this device.
    pub(crate) program: Cell<Option<Mac>>,
    pub(crate) row: Cell<Option<Row>>,
    pub(crate) sources: Cell<BTreeSet<IpAddr>>,
    pub(crate) entries: BTreeMap<RouteKey, Cell<Option<Entry>>>,
    /// How often an open entry was taken away under a row that may be open, and up to which the epoch covers it.
    revoked: u32,
    pub(crate) covered: u32,
    /// Operations that take open entries away.
    pub(crate) revoking: BTreeSet<OpId>,
    /// The clear that is out: until its answer nothing is written that it would delete.
    pub(crate) clearing: Option<OpId>,
    /// The last operation (or change of the device) that makes proofs void.
    pub(crate) touched: OpId,
    /// The last operation before the present device came. Neither number nor MAC tells devices apart.
    before_device: OpId,
    pub(crate) troubles: BTreeMap<Goal, Trouble>,
    /// Something about one of its intents failed, as of when they were judged last.
    pub(crate) intents_unwell: bool,
    /// One of them is of a kind that hinders whoever uses the interface.
    pub(crate) hindered: bool,
    /// Since when link, identity and program are there while the row is closed.
    pub(crate) ready_since: Option<Boot>,
    /// Somebody else's programs before ours, as an audit found them.
    pub(crate) foreign: Vec<String>,
    /// Its intents are to be proven again.
    pub(crate) prove_again: bool,
    /// Policy slots that entries may lead to although nobody wants them to.
    removing: BTreeSet<SlotId>,
    /// Those of them whose entries somebody else claims.
    claimed_away: BTreeSet<SlotId>,
    /// Policy slots to which entries still deliver that are about to be closed.
    delivering_on: BTreeSet<SlotId>,
    slots_used: BTreeSet<SlotId>,
    /// The last epoch before the row was deleted.
    last_epoch: Option<u32>,
    #[serde(skip)]
    pub(crate) marks: Marks,
}

impl Default for Port {
    fn default() -> Self {
        Self {
            device: None,
            attachments: BTreeSet::new(),
            winner: None,
            ready: None,
            coming: false,
            known: Known::Unread,
            read: Read::default(),
            hangs_on_identity: false,
            adopted: false,
            traced: false,
            inheritance: None,
            stale: false,
            program: Cell::Sure(None),
            row: Cell::Sure(None),
            sources: Cell::Sure(BTreeSet::new()),
            entries: BTreeMap::new(),
            revoked: 0,
            covered: 0,
            revoking: BTreeSet::new(),
            clearing: None,
            touched: OpId(0),
            before_device: OpId(0),
            troubles: BTreeMap::new(),
            intents_unwell: false,
            hindered: false,
            ready_since: None,
            foreign: Vec::new(),
            prove_again: false,
            removing: BTreeSet::new(),
            claimed_away: BTreeSet::new(),
            delivering_on: BTreeSet::new(),
            slots_used: BTreeSet::new(),
            last_epoch: None,
            marks: Marks::default(),
        }
    }
}

fn is_open(entry: Option<Entry>) -> bool {
    entry.is_some_and(|entry| entry.open)
}

/// What closes an entry that may be open.
fn closed_of(cell: &Cell<Option<Entry>>) -> Option<Entry> {
    let open = cell.values().iter().flatten().find(|entry| entry.open)?;
    Some(Entry { open: false, ..*open })
}

fn row_open(row: Option<Row>) -> bool {
    row.is_some_and(|row| row.token.is_some())
}

impl Port {
    /// Of this device; the kernel has nothing under its number. `last`: the last operation that was sent. What of that is
    /// still to be answered is about a device of before.
    pub(crate) fn new(device: Option<Device>, last: OpId) -> Self {
        Self {
            device,
            before_device: last,
            ..Self::default()
        }
    }

    /// What an earlier life left.
    pub(crate) fn adopted(
        self,
        program: bool,
        row: Option<Row>,
        sources: BTreeSet<IpAddr>,
        entries: BTreeMap<RouteKey, Entry>,
        device: Option<Device>,
    ) -> Self {
        // Until the device is known its MAC is not: the link that is pinned is alive, so it is this device's.
        let mac = device.map_or(Mac::default(), |device| device.mac);
        Self {
            device,
            adopted: true,
            program: Cell::Sure(program.then_some(mac)),
            row: Cell::Sure(row),
            sources: Cell::Sure(sources),
            entries: entries
                .into_iter()
                .map(|(key, entry)| (key, Cell::Sure(Some(entry))))
                .collect(),
            ..self
        }
    }

    /// What an earlier life left under this number belongs to a device that is gone.
    pub(crate) const fn stranded(&mut self) {
        if self.device.is_none() {
            self.adopted = false;
            self.stale = true;
        }
    }

    /// The incarnation that an earlier life let go live here.
    fn adopted_open(&self) -> Option<(Mac, Token)> {
        let mac = self.program.sure().copied().flatten()?;
        let token = self.row.sure().copied().flatten()?.token?;
        self.adopted.then_some((mac, token))
    }

    /// The device is gone for sure: what is here was its own.
    pub(crate) fn gone(&mut self) {
        self.stale |= self.device.is_none();
    }

    /// Another device has this number now, or none. `denied`: an operation did not find that one. `asking`: nobody has
    /// said yet whether it is there.
    pub(crate) fn device_changed(
        &mut self,
        device: Option<Device>,
        denied: Option<Device>,
        asking: bool,
        last: OpId,
    ) {
        let first = self.adopted && self.device.is_none() && !self.stale;
        self.touched = last;
        self.before_device = last;
        self.ready = None;
        self.ready_since = None;
        self.known = Known::Unread;
        self.troubles.clear();
        self.foreign.clear();
        if denied.is_some() && denied == device && !asking {
            // The kernel says that it is gone, the link table says that it is there: no haste.
            self.troubles.insert(
                Goal::Attached,
                Trouble::new(FailReason::AttachFailed, OpError::NoDevice.to_string()),
            );
        }
        match device {
            Some(device) if first => {
                // The device on which an earlier life left all this.
                if self.program.may(Option::is_some) {
                    self.program = Cell::Sure(Some(device.mac));
                }
            }
            Some(_) => {
                self.adopted = false;
                // Is it there? Only an attach can say.
                if self.program.idle() {
                    self.program.doubt(None);
                }
            }
            None => {
                self.adopted = false;
                self.stale |= denied.is_none();
            }
        }
        self.device = device;
    }

    /// Whether this operation was sent for the present device. An answer about an earlier one says nothing.
    pub(crate) fn is_of_this_device(&self, op: OpId) -> bool {
        op > self.before_device
    }

    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        for trouble in self.troubles.values_mut() {
            trouble.blocked = false;
        }
    }

    /// Whether the kernel has nothing under this number, the program aside.
    fn bare(&self) -> bool {
        self.row.is(&None) && self.sources.sure().is_some_and(BTreeSet::is_empty) && self.entries.is_empty()
    }

    /// Nothing is there any more of what failed, the program aside.
    pub(crate) fn forget_content(&mut self) {
        self.troubles
            .retain(|goal, _| matches!(goal, Goal::Attached | Goal::Detached));
    }

    /// Whether nothing is out that writes what a clear deletes.
    fn quiet(&self) -> bool {
        self.row.idle() && self.sources.idle() && self.entries.values().all(Cell::idle)
    }

    /// Entries deliver that nobody wants and that could not be taken away: nothing else may be delivered here.
    fn stuck(&self, claims: &Claims) -> bool {
        let unwanted = |key: &RouteKey| !claims.keys.contains_key(key) && !claims.kept.contains(key);
        self.blocked(Goal::Unclaimed)
            && self
                .entries
                .iter()
                .any(|(key, cell)| unwanted(key) && cell.may(|entry| is_open(*entry)))
    }

    fn may_be_open(&self) -> bool {
        self.row.may(|row| row_open(*row))
    }

    fn blocked(&self, goal: Goal) -> bool {
        self.troubles.get(&goal).is_some_and(|trouble| trouble.blocked)
    }

    /// The program is on the present device, as the kernel answered.
    pub(crate) fn has_program(&self) -> bool {
        self.device
            .is_some_and(|device| self.program.is(&Some(device.mac)))
    }

    /// Its row is open, as the kernel answered.
    pub(crate) fn open_for(&self) -> Option<Token> {
        self.row.sure().copied().flatten().and_then(|row| row.token)
    }

    pub(crate) fn keys_done(&mut self, op: OpId, keys: &[RouteKey]) {
        for key in keys {
            if let Some(cell) = self.entries.get_mut(key) {
                cell.done(op);
                if cell.is(&None) {
                    self.entries.remove(key);
                }
            }
        }
    }

    pub(crate) fn keys_failed(&mut self, op: OpId, keys: &[RouteKey]) {
        for key in keys {
            if let Some(cell) = self.entries.get_mut(key) {
                cell.failed(op);
            }
        }
    }

    pub(crate) fn cleared(&mut self, op: OpId) {
        self.row.done(op);
        self.sources.done(op);
        let keys: Vec<RouteKey> = self.entries.keys().copied().collect();
        self.keys_done(op, &keys);
        self.covered = self.revoked;
    }

    pub(crate) fn clear_failed(&mut self, op: OpId) {
        self.row.failed(op);
        self.sources.failed(op);
        let keys: Vec<RouteKey> = self.entries.keys().copied().collect();
        self.keys_failed(op, &keys);
    }

    /// Whether a recheck has something to do here: to read its identity, or to try again what failed.
    fn is_unwell(&self) -> bool {
        let failed = !self.troubles.is_empty() || self.intents_unwell;
        !self.attachments.is_empty() && (self.hangs_on_identity || failed)
    }

    /// Something planned, out, or failed.
    pub(crate) fn busy(&self) -> bool {
        // Under a closed row a revocation waits for the next opening.
        let uncovered = self.revoked != self.covered && self.may_be_open();
        !self.quiet() || !self.program.idle() || self.read.out.is_some() || uncovered
    }

    /// The latest epoch that its row may have.
    fn present_epoch(&self) -> Option<u32> {
        let epochs = self.row.values().iter().flatten().map(|row| row.epoch);
        epochs.reduce(later)
    }

    /// The epoch of a row that is written now. `raise`: flows of the present one must be looked up anew.
    fn epoch(&self, now: Boot, raise: bool) -> u32 {
        match self.present_epoch() {
            Some(epoch) if raise => epoch.wrapping_add(1),
            Some(epoch) => epoch,
            None => {
                // About a millisecond each: no row that an earlier life wrote for this interface had it. This life may
                // have raised it faster than time goes.
                let fresh = u32::try_from((now.0 >> 20) & u64::from(u32::MAX)).unwrap_or(0);
                self.last_epoch
                    .map_or(fresh, |last| later(fresh, last.wrapping_add(1)))
            }
        }
    }
}

/// The later of two epochs: they go round.
const fn later(a: u32, b: u32) -> u32 {
    if a.wrapping_sub(b) < 1 << 31 { a } else { b }
}

impl Intent {
    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        self.fallback = 0;
        for trouble in [&mut self.entries_trouble, &mut self.proof_trouble]
            .into_iter()
            .flatten()
        {
            trouble.blocked = false;
        }
    }
}

impl Engine {
    /// An identity that could not be read keeps its interface as an earlier life left it.
    pub(crate) fn frozen(&self, port: &Port) -> bool {
        port.adopted
            && port.device.is_some()
            && !port.attachments.is_empty()
            && matches!(port.known, Known::Unread | Known::Unreadable(_))
    }

    pub(crate) fn unblock_intents(&mut self, ifindex: Ifindex) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in &port.attachments {
            let Some(state) = self.objects.attachments.get(attachment) else {
                continue;
            };
            for policy in &state.consumes {
                if let Some(intent) = self
                    .objects
                    .policies
                    .get_mut(policy)
                    .and_then(|policy| policy.intents.get_mut(attachment))
                {
                    intent.unblock();
                }
            }
        }
    }

    /// What was disproved of an incarnation says nothing about the next one.
    pub(crate) fn forget_disproofs(&mut self, ifindex: Ifindex) {
        let Some(port) = self.ports.get(&ifindex) else {
            return;
        };
        for attachment in &port.attachments {
            let state = self.objects.attachments.get(attachment);
            for policy in state.into_iter().flat_map(|state| &state.consumes) {
                let policy = self.objects.policies.get_mut(policy);
                if let Some(intent) = policy.and_then(|policy| policy.intents.get_mut(attachment)) {
                    intent.proof_trouble = None;
                }
            }
        }
    }
}
