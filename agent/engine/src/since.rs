//! Since when things are as they are, for people who ask why. Nothing is decided by it, so it is no part of the state
//! that is kept in a journal.

use crate::cell::Cell;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::gate::{Known, of_device};
use crate::intent::Intent;
use crate::model::{Boot, Link, Now, Token};
use crate::objects::PolicyState;
use crate::ports::Port;

/// Since when something is so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since {
    /// When it was first seen to be so.
    pub at: Now,
    /// It was so when this life looked for the first time: since when, nobody has told it.
    pub earlier: bool,
}

/// A value, and when it was first seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark<T>(Option<(T, Boot)>);

// Derived, it would ask the same of the value.
impl<T> Default for Mark<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: PartialEq> Mark<T> {
    /// It is so now.
    pub(crate) fn note(&mut self, value: T, now: Boot) {
        if self.0.as_ref().is_none_or(|(before, _)| *before != value) {
            self.0 = Some((value, now));
        }
    }

    /// Since when it is like this, if it is.
    pub(crate) fn of(&self, value: &T) -> Option<Boot> {
        self.0
            .as_ref()
            .filter(|(noted, _)| noted == value)
            .map(|(_, at)| *at)
    }
}

/// What is noted of one interface.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    /// A device is there: up, with carrier.
    device: Mark<Option<(bool, bool)>>,
    /// Who is registered behind it, if that is known.
    identity: Mark<Option<Option<Token>>>,
    program: Mark<bool>,
    /// Somebody is asked before it.
    foreign: Mark<bool>,
    /// Its row is open, if that is known.
    row: Mark<Option<bool>>,
}

/// Since when the links of a consumer's chain are as they are; none = that cannot be told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// The device is there, or up, or has its carrier, or not.
    pub interface: Option<Since>,
    /// This one is registered behind it, or nobody.
    pub identity: Option<Since>,
    /// The program is attached, or not.
    pub attach: Option<Since>,
    /// Somebody else's program is before ours, or none.
    pub position: Option<Since>,
    /// The row is open, or closed.
    pub row: Option<Since>,
    /// As many entries are written and open as there are.
    pub entries: Option<Since>,
}

impl Marks {
    /// What is noted of this port as it is now.
    fn values(port: &Port, link: Option<&Link>) -> Values {
        let registered = match (&port.known, link) {
            (Known::Row(row), Some(link)) => {
                Some(of_device(link, row.as_ref()).map(|identity| identity.token))
            }
            _ => None,
        };
        Values {
            device: link.map(|link| (link.up, link.carrier)),
            identity: registered,
            program: port.has_program(),
            foreign: !port.foreign.is_empty(),
            row: port
                .row
                .sure()
                .map(|row| row.is_some_and(|row| row.token.is_some())),
        }
    }

    fn note(&mut self, values: &Values, now: Boot) {
        self.device.note(values.device, now);
        self.identity.note(values.identity, now);
        self.program.note(values.program, now);
        self.foreign.note(values.foreign, now);
        self.row.note(values.row, now);
    }
}

/// See [`Marks`].
struct Values {
    device: Option<(bool, bool)>,
    identity: Option<Option<Token>>,
    program: bool,
    foreign: bool,
    row: Option<bool>,
}

impl Engine {
    /// Notes how an interface and its intents are now.
    pub(crate) fn mark(&mut self, port: &mut Port, claims: &Claims) {
        let now = self.now.boot;
        let values = Marks::values(port, self.link_of(port));
        port.marks.note(&values, now);
        for claim in &claims.intents {
            let Some(state) = self.objects.policies.get_mut(&claim.policy) else {
                continue;
            };
            let there = Entries::of(port, state, claim);
            if let Some(intent) = state.intents.get_mut(&claim.attachment) {
                intent.entries.note(there, now);
            }
        }
    }

    /// Since when the links of a consumer's chain are as they are.
    pub(crate) fn times(&self, port: &Port, intent: &Intent, there: Option<&Entries>) -> Times {
        let values = Marks::values(port, self.link_of(port));
        let marks = &port.marks;
        let since = |at: Option<Boot>| at.map(|at| self.since(at));
        Times {
            interface: since(marks.device.of(&values.device)),
            identity: since(marks.identity.of(&values.identity)),
            attach: since(marks.program.of(&values.program)),
            position: since(marks.foreign.of(&values.foreign)),
            row: since(marks.row.of(&values.row)),
            entries: since(there.and_then(|there| intent.entries.of(there))),
        }
    }

    /// As a moment that can be told.
    pub(crate) fn since(&self, at: Boot) -> Since {
        Since {
            at: Now { boot: at, wall_ms: 0 },
            earlier: self.passed_at.is_none_or(|passed| at <= passed),
        }
    }

    fn link_of(&self, port: &Port) -> Option<&Link> {
        let device = port.device?;
        self.interfaces.link(device.ifindex)
    }
}

/// Destinations that an intent claims, those whose entry is in the kernel, those of them that are open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) claimed: u32,
    pub(crate) written: u32,
    pub(crate) open: u32,
}

impl Entries {
    pub(crate) fn of(port: &Port, state: &PolicyState, claim: &Claim) -> Self {
        let mut there = Self::default();
        for key in &claim.keys {
            there.claimed += 1;
            let entry = port.entries.get(key).and_then(Cell::sure).copied().flatten();
            if let Some(entry) = entry.filter(|entry| Some(entry.policy) == state.slot) {
                there.written += 1;
                there.open += u32::from(entry.open);
            }
        }
        there
    }
}
