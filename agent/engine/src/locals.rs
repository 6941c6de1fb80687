//! The node's own addresses: traffic to them is never captured, whatever range a policy claims.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::cell::Cell;
use crate::engine::Engine;
use crate::model::{FailReason, Op, OpId, OpResult};
use crate::plan::{Trouble, What};
use crate::producers::Orphan;

/// What they are, and what the kernel knows of them.
#[derive(Clone, Debug)]
pub(crate) struct Locals {
    /// All of them; none = nobody has said yet.
    wanted: Option<BTreeSet<IpAddr>>,
    cell: Cell<BTreeSet<IpAddr>>,
    trouble: Option<Trouble>,
}

impl Default for Locals {
    fn default() -> Self {
        Self {
            wanted: None,
            cell: Cell::Sure(BTreeSet::new()),
            trouble: None,
        }
    }
}

impl Locals {
    /// All addresses of the node, as the kernel has them now.
    pub(crate) fn told(&mut self, addresses: BTreeSet<IpAddr>) {
        if self.wanted.as_ref() != Some(&addresses) {
            self.wanted = Some(addresses);
            self.unblock();
        }
    }

    /// What an earlier life wrote.
    pub(crate) fn adopt(&mut self, addresses: BTreeSet<IpAddr>) {
        self.cell = Cell::Sure(addresses);
    }

    /// What failed may be tried again.
    pub(crate) fn unblock(&mut self) {
        if let Some(trouble) = &mut self.trouble {
            trouble.blocked = false;
        }
    }
}

impl Engine {
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
        self.orphaned(Orphan::Locals);
    }

    /// They were written, or not.
    pub(crate) fn locals_answered(&mut self, op: OpId, result: OpResult) {
        match result {
            Ok(_) => {
                self.locals.cell.done(op);
                self.locals.trouble = None;
                self.settled_orphan(Orphan::Locals);
            }
            Err(error) => {
                self.locals.cell.failed(op);
                self.locals_trouble(Trouble::of(&error, FailReason::MapWriteFailed));
            }
        }
    }
}
