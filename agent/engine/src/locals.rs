//! The node's own addresses: traffic to them is never captured, whatever range a policy claims.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::cell::Cell;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::model::{FailReason, Ifindex, Op, OpId, OpResult, RouteKey};
use crate::plan::{Trouble, What};
use crate::producers::Orphan;

/// What an intent with prefixes must know of them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LocalsState<'a> {
    /// The kernel has them all, or the intent claims no range.
    Known,
    /// Nobody has said yet what they are, or the write is out.
    Awaited,
    /// They could not be written.
    Failed(&'a Trouble),
}

/// What they are, and what the kernel knows of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Locals {
    /// All of them; none = nobody has said yet.
    wanted: Option<BTreeSet<IpAddr>>,
    cell: Cell<BTreeSet<IpAddr>>,
    trouble: Option<Trouble>,
    /// Interfaces on which somebody claims a range.
    concerned: BTreeSet<Ifindex>,
    /// Those of them that were planned before the kernel had all addresses.
    waiting: BTreeSet<Ifindex>,
}

impl Default for Locals {
    fn default() -> Self {
        Self {
            wanted: None,
            cell: Cell::Sure(BTreeSet::new()),
            trouble: None,
            concerned: BTreeSet::new(),
            waiting: BTreeSet::new(),
        }
    }
}

impl Locals {
    /// All addresses of the node, as the kernel has them now.
    fn told(&mut self, addresses: BTreeSet<IpAddr>) {
        if self.wanted.as_ref() != Some(&addresses) {
            self.wanted = Some(addresses);
            self.unblock();
        }
    }

    /// What an earlier life wrote.
    pub(crate) fn adopt(&mut self, addresses: BTreeSet<IpAddr>) {
        self.cell = Cell::Sure(addresses);
    }

    /// What this claim must know of them. Addresses that come later take nothing back: what serves goes on while
    /// they are being written.
    pub(crate) fn state(&self, claim: &Claim) -> LocalsState<'_> {
        if !claim.wanted.iter().any(RouteKey::is_prefix) {
            return LocalsState::Known;
        }
        match &self.trouble {
            Some(trouble) => LocalsState::Failed(trouble),
            None if self.complete() => LocalsState::Known,
            None => LocalsState::Awaited,
        }
    }

    /// Whether the kernel has all of them for sure.
    fn complete(&self) -> bool {
        let wanted = self.wanted.as_ref();
        wanted
            .zip(self.cell.sure())
            .is_some_and(|(wanted, there)| wanted.is_subset(there))
    }

    /// An interface was planned.
    pub(crate) fn concern(&mut self, ifindex: Ifindex, claims: &Claims) {
        if claims
            .intents
            .iter()
            .all(|claim| !claim.wanted.iter().any(RouteKey::is_prefix))
        {
            self.forget(ifindex);
            return;
        }
        self.concerned.insert(ifindex);
        if self.complete() {
            self.waiting.remove(&ifindex);
        } else {
            self.waiting.insert(ifindex);
        }
    }

    /// An interface is gone, or nobody claims a range there.
    pub(crate) fn forget(&mut self, ifindex: Ifindex) {
        self.concerned.remove(&ifindex);
        self.waiting.remove(&ifindex);
    }

    /// What the kernel has, if nothing is out.
    pub(crate) fn sure(&self) -> Option<&BTreeSet<IpAddr>> {
        self.cell.sure()
    }

    /// Whether an operation is out.
    pub(crate) fn out(&self) -> bool {
        !self.cell.idle()
    }

    /// An audit found this address, or did not. Says whether that is anything new.
    pub(crate) fn drifted(&mut self, address: IpAddr, found: bool) -> bool {
        let Some(mut addresses) = self.cell.sure().cloned() else {
            return false;
        };
        let new = if found {
            addresses.insert(address)
        } else {
            addresses.remove(&address)
        };
        if new {
            self.cell = Cell::Sure(addresses);
            self.unblock();
        }
        new
    }

    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        if let Some(trouble) = &mut self.trouble {
            trouble.blocked = false;
        }
    }
}

impl Engine {
    /// The node says what its addresses are.
    pub(crate) fn locals_told(&mut self, addresses: BTreeSet<IpAddr>) {
        self.locals.told(addresses);
        self.locals_known();
    }

    /// Interfaces that waited for the addresses are planned again, once the kernel has them all.
    fn locals_known(&mut self) {
        if self.locals.complete() {
            self.dirty.ports.append(&mut self.locals.waiting);
        }
    }

    /// Brings the kernel's list towards what is true.
    pub(crate) fn plan_locals(&mut self) {
        let Some(wanted) = self.locals.wanted.clone().filter(|_| self.passed) else {
            return;
        };
        let blocked = self
            .locals
            .trouble
            .as_ref()
            .is_some_and(|trouble| trouble.blocked);
        if self.locals.cell.is(&wanted) || !self.locals.cell.idle() || blocked {
            return;
        }
        let there: BTreeSet<IpAddr> = self.locals.cell.values().iter().flatten().copied().collect();
        let add = match self.locals.cell.sure() {
            Some(sure) => wanted.difference(sure).copied().collect(),
            None => wanted.clone(),
        };
        let delete = there.difference(&wanted).copied().collect();
        let op = self.send(What::Locals, None, Op::WriteLocals { add, delete });
        self.locals.cell.send(op, wanted);
    }

    /// They could not be written, or nobody answered.
    pub(crate) fn locals_trouble(&mut self, trouble: Trouble) {
        self.locals.trouble = Some(trouble);
        self.dirty.ports.extend(&self.locals.concerned);
        self.orphaned(Orphan::Locals);
    }

    /// They were written, or not.
    pub(crate) fn locals_answered(&mut self, op: OpId, result: OpResult) {
        match result {
            Ok(_) => {
                self.locals.cell.done(op);
                if self.locals.trouble.take().is_some() {
                    self.dirty.ports.extend(&self.locals.concerned);
                }
                self.locals_known();
                self.settled_orphan(Orphan::Locals);
            }
            Err(error) => {
                self.locals.cell.failed(op);
                self.locals_trouble(Trouble::of(&error, FailReason::MapWriteFailed));
            }
        }
    }
}
