//! The answer to "diff": what is wanted, believed and there, side by side.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use holdfast_engine::belief::Difference;
use holdfast_engine::compare::{Compared, Page, Thing, Value};
use holdfast_engine::model::{Entry, Ifindex, PolicySlot, Row};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::look::{Question, Seen};
use super::why::Told;

/// Lines of one answer, unless all are wanted.
pub const LINES: usize = 1_000;

/// Answer of `GET /v1/diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Diff {
    /// `yes`: nothing differs; `no`: something does; `unknown`: something could not be compared.
    pub same: Told,
    /// Clock of who answers, RFC 3339.
    pub now: String,
    /// Things that were compared.
    pub compared: u64,
    /// Things that differ.
    pub differing: u64,
    /// Lines that were left off.
    pub left_off: u64,
    /// Something could not be looked at: why.
    pub unreadable: Option<String>,
    /// What differs; or everything, if that was asked for.
    pub things: Vec<Line>,
}

/// One thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// `program`, `row`, `source`, `entry`, `identity`, `selector`, `slots`, `producer` or `address`.
    pub kind: String,
    /// Its key: a destination, an address, the number of a slot; none where the interface says all.
    pub key: Option<String>,
    /// The policy that it belongs to, `namespace/name`.
    pub policy: Option<String>,
    /// The interface that it belongs to.
    pub interface: Option<String>,
    /// Its number.
    pub ifindex: Option<u32>,
    /// What is wanted; none = the agent was not asked.
    pub wanted: Option<String>,
    /// What the agent believes; none = it is writing it, or does not know.
    pub believed: Option<String>,
    /// What the kernel has; none = it could not be compared.
    pub kernel: Option<String>,
    /// Whether they differ.
    pub differs: bool,
}

impl Diff {
    /// Nothing has been compared yet.
    #[must_use]
    pub const fn new(now: String) -> Self {
        Self {
            same: Told::Yes,
            now,
            compared: 0,
            differing: 0,
            left_off: 0,
            unreadable: None,
            things: Vec::new(),
        }
    }

    /// Adds a page: as it was known before and after the look, and what was seen. `all`: also what does not differ.
    pub fn add(&mut self, before: &Page, after: &Page, seen: &Seen, all: bool) {
        if self.unreadable.is_none() {
            self.unreadable.clone_from(&seen.audited.unreadable);
        }
        let mut found: BTreeMap<Thing, &Difference> = BTreeMap::new();
        for difference in &seen.audited.differences {
            found.insert(difference.found().0, difference);
        }
        let steady: BTreeMap<Thing, &Compared> = before
            .things
            .iter()
            .map(|compared| (compared.thing, compared))
            .collect();
        for compared in &after.things {
            let there = found
                .remove(&compared.thing)
                .map(|difference| difference.found().1);
            let is_steady = steady.get(&compared.thing) == Some(&compared);
            let kernel = (is_steady && seen.audited.unreadable.is_none())
                .then(|| there.unwrap_or_else(|| compared.looked.clone()));
            self.push(Line::of(compared, kernel.as_ref()), all);
        }
        let beside = before.beside == after.beside;
        for (thing, difference) in found {
            // What was believed before the look, and is not any more, is no stray.
            if beside && !before.beside.is_empty() {
                self.push(Line::stray(thing, &difference.found().1), all);
            }
        }
        self.same = if self.differing > 0 {
            Told::No
        } else if self.unreadable.is_some() {
            Told::Unknown
        } else {
            self.same
        };
    }

    fn push(&mut self, line: Line, all: bool) {
        self.compared += 1;
        if line.kernel.is_none() && self.same == Told::Yes {
            self.same = Told::Unknown;
        }
        self.differing += u64::from(line.differs);
        if !line.differs && !all {
            return;
        }
        if all || self.things.len() < LINES {
            self.things.push(line);
        } else {
            self.left_off += 1;
        }
    }
}

/// What must be looked at for a page.
#[must_use]
pub fn question(page: &Page) -> Question {
    let things = page.things.iter().map(|compared| &compared.look);
    Question {
        beliefs: things.chain(&page.beside).cloned().collect(),
        ..Question::default()
    }
}

/// Whether a look at what was known before tells of what is known after.
#[must_use]
pub fn is_steady(before: &Page, after: &Page, seen: &Seen) -> bool {
    seen.audited.unreadable.is_some() || before == after
}

impl Line {
    fn of(compared: &Compared, kernel: Option<&Value>) -> Self {
        let (kind, key, ifindex) = parts(&compared.thing);
        let believed = compared.believed.as_ref();
        let differs =
            believed != Some(&compared.wanted) || kernel.is_some_and(|kernel| Some(kernel) != believed);
        Self {
            kind: kind.to_owned(),
            key,
            policy: compared.policy.as_ref().map(ToString::to_string),
            interface: compared.interface.clone(),
            ifindex,
            wanted: Some(text(&compared.wanted)),
            believed: believed.map(text),
            kernel: kernel.map(text),
            differs,
        }
    }

    /// Of something that nobody wants and nobody believes in; or that is missing where it is both.
    fn stray(thing: Thing, found: &Value) -> Self {
        let (kind, key, ifindex) = parts(&thing);
        let other = if *found == Value::Absent {
            Value::Present
        } else {
            Value::Absent
        };
        Self {
            kind: kind.to_owned(),
            key,
            policy: None,
            interface: None,
            ifindex,
            wanted: Some(text(&other)),
            believed: Some(text(&other)),
            kernel: Some(text(found)),
            differs: true,
        }
    }

    /// What is there, and nobody was asked what is wanted.
    #[must_use]
    pub fn there(thing: &Thing, interface: Option<String>, policy: Option<String>, found: &Value) -> Self {
        let (kind, key, ifindex) = parts(thing);
        Self {
            kind: kind.to_owned(),
            key,
            policy,
            interface,
            ifindex,
            wanted: None,
            believed: None,
            kernel: Some(text(found)),
            differs: false,
        }
    }
}

/// Kind, key and interface of a thing.
fn parts(thing: &Thing) -> (&'static str, Option<String>, Option<Ifindex>) {
    match thing {
        Thing::Program(ifindex) => ("program", None, Some(*ifindex)),
        Thing::Row(ifindex) => ("row", None, Some(*ifindex)),
        Thing::Source(ifindex, address) => ("source", Some(address.to_string()), Some(*ifindex)),
        Thing::Entry(ifindex, key) => ("entry", Some(key.to_string()), Some(*ifindex)),
        Thing::Identity(ifindex) => ("identity", None, Some(*ifindex)),
        Thing::Selector(slot) => ("selector", Some(slot.to_string()), None),
        Thing::Slots(slot) => ("slots", Some(slot.to_string()), None),
        Thing::Backend(id) => ("producer", Some(id.to_string()), None),
        Thing::Local(address) => ("address", Some(address.to_string()), None),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Absent => "nothing".to_owned(),
        Value::Present => "there".to_owned(),
        Value::Program(before) if before.is_empty() => "attached, first".to_owned(),
        Value::Program(before) => format!("attached, after {}", before.join(" and ")),
        Value::Other(found) => found.clone(),
        Value::Row(row) => row_text(row),
        Value::Entry(Entry { policy, open }) => {
            format!("to selector {policy}, {}", if *open { "open" } else { "closed" })
        }
        Value::Policy(policy) => policy_text(policy),
        Value::Set(devices) => format!("a set of devices {}", list(devices)),
        Value::Slots(table) => format!("to producers {}", list(table)),
        Value::Backend(backend) => {
            let drains = if backend.drain_until.is_some() {
                ", draining"
            } else {
                ""
            };
            format!(
                "device {}, token {:016x}, up to set generation {}{drains}",
                backend.ifindex,
                backend.token.get(),
                backend.last_generation
            )
        }
    }
}

fn row_text(row: &Row) -> String {
    let mut text = match row.token {
        Some(token) => format!("open for token {:016x}", token.get()),
        None => "closed".to_owned(),
    };
    for (is, what) in [
        (row.has_services, "services"),
        (row.has_prefixes_v4, "IPv4 prefixes"),
        (row.has_prefixes_v6, "IPv6 prefixes"),
        (row.has_sources, "sources checked"),
    ] {
        if is {
            text.push_str(", ");
            text.push_str(what);
        }
    }
    if let Some(via) = row.via {
        let _ = write!(text, ", answers via device {via}");
    }
    let _ = write!(text, ", epoch {}", row.epoch);
    text
}

fn policy_text(policy: &PolicySlot) -> String {
    let selected = policy.selected;
    format!(
        "{} slots from {}, set generation {}, for generation {}{}",
        selected.length,
        selected.base,
        selected.generation,
        policy.served_generation,
        if policy.pass_while_held {
            ", passes while held"
        } else {
            ""
        }
    )
}

/// The first of them.
fn list<'a, T: ToString + Ord + 'a>(items: impl IntoIterator<Item = &'a T>) -> String {
    const SHOWN: usize = 8;
    let all: std::collections::BTreeSet<&T> = items.into_iter().collect();
    let mut shown: Vec<String> = all.iter().take(SHOWN).map(|item| item.to_string()).collect();
    if all.len() > SHOWN {
        shown.push(format!("and {} more", all.len() - SHOWN));
    }
    if shown.is_empty() {
        "none".to_owned()
    } else {
        shown.join(", ")
    }
}
