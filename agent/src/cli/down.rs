//! What can be told while no agent runs: what is pinned, and the report that the last one left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use holdfast_engine::compare::{Thing, Value};
use holdfast_engine::model::{Entry, Ifindex, Link, ObjectName, SlotId, Token};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Answer;
use super::output::{self, BAD, Format, GOOD, OPEN, STRONG, age, or_dash, paint};
use super::{diff, why};
use crate::api::hash;
use crate::config::Directories;
use crate::datapath::DatapathError;
use crate::datapath::left::Left;
use crate::journal;
use crate::netlink::find;
use crate::report::{PolicyReport, file, memory, rfc3339};
use crate::serve::diff::{Diff, Line};
use crate::serve::why::{Step, StepName, Told};

/// Answer of `status` while no agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Down {
    /// Always `down`.
    pub agent: String,
    /// Clock of this command, RFC 3339.
    pub now: String,
    /// Last sign of life: when the last agent wrote its report, its memory or its journal, RFC 3339.
    pub last_seen: Option<String>,
    /// Name of the node, as the last report says.
    pub node: Option<String>,
    /// Whether anything is pinned.
    pub pinned: bool,
    /// Why what is pinned could not be read.
    pub unreadable: Option<String>,
    /// Policies that are in the kernel.
    pub policies: Vec<DownPolicy>,
    /// Interfaces of which something is in the kernel.
    pub interfaces: Vec<DownInterface>,
}

/// A policy in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DownPolicy {
    /// `namespace/name`, if the last report names it.
    pub name: Option<String>,
    /// Number of its selector.
    pub selector: u32,
    /// Generation that is served.
    pub generation: u64,
    /// Producers in its set.
    pub producers: u64,
    /// Interfaces with entries of it.
    pub consumers: u64,
    /// Those of them that it serves.
    pub served: u64,
    /// What the last report says.
    pub last_state: Option<String>,
}

/// An interface of which something is in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DownInterface {
    /// Number.
    pub ifindex: u32,
    /// Name, if the device is there.
    pub interface: Option<String>,
    /// It is up, with carrier.
    pub up: bool,
    /// Somebody is registered behind it.
    pub registered: bool,
    /// Our program is attached.
    pub attached: bool,
    /// Its row is open for the incarnation that is registered.
    pub open: bool,
    /// Entries.
    pub entries: u64,
    /// Those of them that are open.
    pub open_entries: u64,
}

/// Everything that can be read.
struct Found {
    left: Option<Left>,
    unreadable: Option<String>,
    devices: BTreeMap<Ifindex, Link>,
    report: Option<Report>,
    now: String,
    last_seen: Option<String>,
}

#[derive(Deserialize)]
struct Report {
    node: String,
    policies: Vec<PolicyReport>,
}

fn milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

impl Found {
    fn read(directories: &Directories) -> Self {
        let left = Left::read(&directories.bpffs_dir, &directories.run_dir);
        let (left, unreadable) = match left {
            Ok(left) => (left, None),
            Err(error) => (None, Some(explained(&error))),
        };
        let ifindexes = left.as_ref().map(ifindexes).unwrap_or_default();
        let devices = ifindexes
            .into_iter()
            .filter_map(|ifindex| Some((ifindex, find::by_index(ifindex).ok()??)))
            .collect();
        let report = fs::read_to_string(directories.run_dir.join(file::NAME));
        let report = report.ok().and_then(|text| serde_saphyr::from_str(&text).ok());
        Self {
            left,
            unreadable,
            devices,
            report,
            now: rfc3339(milliseconds(SystemTime::now())),
            last_seen: last_seen(directories).map(|time| rfc3339(milliseconds(time))),
        }
    }

    fn name_of(&self, slot: SlotId) -> Option<&PolicyReport> {
        let name = self.left.as_ref()?.maps.policies.get(&slot)?.name;
        let policies = &self.report.as_ref()?.policies;
        policies.iter().find(|policy| {
            let named = ObjectName {
                namespace: policy.namespace.clone(),
                name: policy.name.clone(),
            };
            hash::name_hash(&named) == name
        })
    }
}

fn explained(error: &DatapathError) -> String {
    error.to_string()
}

fn ifindexes(left: &Left) -> BTreeSet<Ifindex> {
    let rows = left.maps.rows.keys().chain(left.maps.entries.keys());
    let registered = left.registry.iter().map(|row| row.ifindex);
    rows.chain(left.programs.keys())
        .copied()
        .chain(registered)
        .collect()
}

/// When an agent wrote anything last.
fn last_seen(directories: &Directories) -> Option<SystemTime> {
    let written = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let journal = fs::read_dir(directories.state_dir.join(journal::DIRECTORY));
    let segments = journal.into_iter().flatten().flatten();
    segments
        .filter_map(|entry| written(&entry.path()))
        .chain(written(&directories.run_dir.join(file::NAME)))
        .chain(written(&directories.state_dir.join(memory::NAME)))
        .max()
}

/// The token that is registered for the device that has this number now.
fn registered(left: &Left, ifindex: Ifindex) -> Option<Token> {
    let row = left.registry.iter().find(|row| row.ifindex == ifindex)?;
    row.interface.is_some().then_some(row.identity.token)
}

fn is_open(left: &Left, ifindex: Ifindex) -> bool {
    let open_for = left.maps.rows.get(&ifindex).and_then(|row| row.token);
    open_for.is_some() && open_for == registered(left, ifindex)
}

fn entries_to(left: &Left, ifindex: Ifindex, slot: SlotId) -> impl Iterator<Item = &Entry> {
    let entries = left.maps.entries.get(&ifindex).into_iter().flatten();
    entries
        .map(|(_, entry)| entry)
        .filter(move |entry| entry.policy == slot)
}

/// Producers that a policy's selector leads to.
fn producers(left: &Left, slot: SlotId) -> BTreeSet<Ifindex> {
    let selected = left.maps.policies.get(&slot).map(|policy| policy.selected);
    let table = selected
        .filter(|selected| selected.length > 0)
        .and_then(|selected| left.maps.slots.get(&selected.base));
    let backends = table.into_iter().flatten();
    backends
        .filter_map(|id| Some(left.maps.backends.get(id)?.ifindex))
        .collect()
}

// --- status ------------------------------------------------------------------------------------------------

/// Prints what can be told without an agent. It is never the answer to what was asked.
pub(super) fn status(directories: &Directories, format: Format) -> Answer {
    let down = Down::new(&Found::read(directories));
    match format {
        Format::Json => drop(output::json(&down)),
        Format::Table => output::print(&text(&down)),
    }
    Answer::Unknown
}

impl Down {
    fn new(found: &Found) -> Self {
        let left = found.left.as_ref();
        Self {
            agent: "down".to_owned(),
            now: found.now.clone(),
            last_seen: found.last_seen.clone(),
            node: found.report.as_ref().map(|report| report.node.clone()),
            pinned: left.is_some() || found.unreadable.is_some(),
            unreadable: found.unreadable.clone(),
            policies: left
                .into_iter()
                .flat_map(|left| {
                    left.maps
                        .policies
                        .keys()
                        .map(|slot| DownPolicy::new(found, left, *slot))
                })
                .collect(),
            interfaces: left
                .into_iter()
                .flat_map(|left| {
                    ifindexes(left)
                        .into_iter()
                        .map(|ifindex| DownInterface::new(found, left, ifindex))
                })
                .collect(),
        }
    }
}

impl DownPolicy {
    fn new(found: &Found, left: &Left, slot: SlotId) -> Self {
        let report = found.name_of(slot);
        let consumers: Vec<Ifindex> = left
            .maps
            .entries
            .keys()
            .copied()
            .filter(|ifindex| entries_to(left, *ifindex, slot).next().is_some())
            .collect();
        let producers = producers(left, slot);
        let is_served = |ifindex: &&Ifindex| {
            let ifindex = **ifindex;
            let attached = left.programs.get(&ifindex).is_some_and(Result::is_ok);
            attached
                && is_open(left, ifindex)
                && entries_to(left, ifindex, slot).any(|entry| entry.open)
                && !producers.is_empty()
        };
        Self {
            name: report.map(|policy| format!("{}/{}", policy.namespace, policy.name)),
            selector: slot,
            generation: left
                .maps
                .policies
                .get(&slot)
                .map_or(0, |policy| policy.served_generation),
            producers: producers.len() as u64,
            served: consumers.iter().filter(is_served).count() as u64,
            consumers: consumers.len() as u64,
            last_state: report.map(|policy| policy.state.clone()),
        }
    }
}

impl DownInterface {
    fn new(found: &Found, left: &Left, ifindex: Ifindex) -> Self {
        let device = found.devices.get(&ifindex);
        let entries = left.maps.entries.get(&ifindex);
        let open = entries.map_or(0, |entries| entries.values().filter(|entry| entry.open).count());
        Self {
            ifindex,
            interface: device.map(|link| link.name.clone()),
            up: device.is_some_and(|link| link.up && link.carrier),
            registered: registered(left, ifindex).is_some(),
            attached: left.programs.get(&ifindex).is_some_and(Result::is_ok),
            open: is_open(left, ifindex),
            entries: entries.map_or(0, BTreeMap::len) as u64,
            open_entries: open as u64,
        }
    }
}

/// For people.
#[must_use]
pub fn text(down: &Down) -> String {
    let seen = match &down.last_seen {
        Some(stamp) => format!("its last sign of life was {} ago", age(stamp, &down.now)),
        None => "there is no trace of an earlier one".to_owned(),
    };
    let node = down
        .node
        .as_ref()
        .map_or_else(String::new, |node| format!("{node}: "));
    let mut text = format!("{node}{}; {seen}\n", paint(BAD, "no agent runs"));
    if let Some(why) = &down.unreadable {
        text.push_str(&format!("what is pinned could not be read: {why}\n"));
        return text;
    }
    if !down.pinned {
        text.push_str("nothing is pinned: nothing is steered, and nothing is held\n");
        return text;
    }
    text.push_str("what is pinned goes on: what is open is served, what is closed is held\n");
    if !down.policies.is_empty() {
        let rows = down.policies.iter().map(policy_row).collect();
        let header = [
            "POLICY",
            "SELECTOR",
            "GENERATION",
            "PRODUCERS",
            "SERVED",
            "LAST-STATE",
        ];
        text.push_str(&format!("\n{}", output::table(&header, rows)));
    }
    if !down.interfaces.is_empty() {
        let rows = down.interfaces.iter().map(interface_row).collect();
        let header = [
            "INTERFACE",
            "IFINDEX",
            "UP",
            "REGISTERED",
            "ATTACHED",
            "OPEN",
            "ENTRIES",
        ];
        text.push_str(&format!("\n{}", output::table(&header, rows)));
    }
    text.push_str(&format!(
        "\nto do: start the agent; {} says what this machine lacks\n",
        paint(STRONG, "holdfast preflight")
    ));
    text
}

fn policy_row(policy: &DownPolicy) -> Vec<String> {
    let style = if policy.served == policy.consumers {
        GOOD
    } else {
        OPEN
    };
    vec![
        or_dash(policy.name.as_ref()),
        policy.selector.to_string(),
        policy.generation.to_string(),
        policy.producers.to_string(),
        paint(style, format!("{}/{}", policy.served, policy.consumers)),
        or_dash(policy.last_state.as_ref()),
    ]
}

fn interface_row(interface: &DownInterface) -> Vec<String> {
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    vec![
        or_dash(interface.interface.as_ref()),
        interface.ifindex.to_string(),
        yes(interface.up),
        yes(interface.registered),
        yes(interface.attached),
        yes(interface.open),
        format!("{}/{}", interface.open_entries, interface.entries),
    ]
}

// --- why ---------------------------------------------------------------------------------------------------

/// Answer of `why` while no agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DownWhy {
    /// Always `down`.
    pub agent: String,
    /// `no` where the kernel says no; else `unknown`: what is wanted only an agent can tell.
    pub answer: Told,
    /// Clock of this command, RFC 3339.
    pub now: String,
    /// What there is of the policy.
    pub policy: Option<DownPolicy>,
    /// Interfaces with entries of it, as far as the kernel tells.
    pub interfaces: Vec<DownChain>,
}

/// One interface with entries of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DownChain {
    /// Its number.
    pub ifindex: u32,
    /// Its name, if it is there.
    pub interface: Option<String>,
    /// `no` or `unknown`.
    pub answer: Told,
    /// What the kernel tells.
    pub steps: Vec<Step>,
}

/// Prints what the kernel tells of a policy.
pub(super) fn why(directories: &Directories, args: &why::Args) -> Answer {
    let found = Found::read(directories);
    if let Some(why) = &found.unreadable {
        output::complain(format!("what is pinned could not be read: {why}"));
        return Answer::Unknown;
    }
    let answer = DownWhy::new(&found, &args.policy);
    match args.format.output {
        Format::Json => drop(output::json(&answer)),
        Format::Table => output::print(&why_text(&answer, args)),
    }
    answer.answer.into()
}

impl DownWhy {
    fn new(found: &Found, policy: &ObjectName) -> Self {
        let name = hash::name_hash(policy);
        let slot = found.left.as_ref().and_then(|left| {
            let slot = left.maps.policies.iter().find(|(_, value)| value.name == name);
            slot.map(|(slot, _)| (left, *slot))
        });
        let interfaces: Vec<DownChain> = slot
            .into_iter()
            .flat_map(|(left, slot)| {
                let entries = left.maps.entries.keys().copied();
                let of_policy =
                    entries.filter(move |ifindex| entries_to(left, *ifindex, slot).next().is_some());
                of_policy.map(move |ifindex| DownChain::new(found, left, slot, ifindex))
            })
            .collect();
        let any_no = interfaces.iter().any(|chain| chain.answer == Told::No);
        Self {
            agent: "down".to_owned(),
            answer: if any_no { Told::No } else { Told::Unknown },
            now: found.now.clone(),
            policy: slot.map(|(left, slot)| DownPolicy::new(found, left, slot)),
            interfaces,
        }
    }
}

impl DownChain {
    fn new(found: &Found, left: &Left, slot: SlotId, ifindex: Ifindex) -> Self {
        let device = found.devices.get(&ifindex);
        let told =
            |step, is: bool, text: String| Step::new(step, if is { Told::Yes } else { Told::No }, text);
        let unasked = |step, text: &str| Step::new(step, Told::Unknown, text);
        let interface = match device {
            None => told(
                StepName::Interface,
                false,
                format!("there is no interface with number {ifindex}"),
            ),
            Some(link) => told(
                StepName::Interface,
                link.up && link.carrier,
                format!(
                    "{} is {}",
                    link.name,
                    match (link.up, link.carrier) {
                        (true, true) => "there and up",
                        (true, false) => "without carrier",
                        (false, _) => "not up",
                    }
                ),
            ),
        };
        let token = registered(left, ifindex);
        let identity = told(
            StepName::Identity,
            token.is_some(),
            token.map_or_else(
                || "nobody is registered behind it".to_owned(),
                |token| {
                    format!(
                        "registered, token {:016x}; whether it is the expected one only an agent tells",
                        token.get()
                    )
                },
            ),
        );
        let members = producers(left, slot);
        let producer = told(
            StepName::Producer,
            !members.is_empty(),
            format!("the policy's set has {} producers", members.len()),
        );
        let program = left.programs.get(&ifindex);
        let attach = match program {
            Some(Ok(id)) => told(StepName::Attach, true, format!("program {id} is attached")),
            Some(Err(why)) => told(StepName::Attach, false, why.clone()),
            None => told(StepName::Attach, false, "no link is pinned for it".to_owned()),
        };
        let before = left
            .before
            .get(&ifindex)
            .filter(|_| matches!(program, Some(Ok(_))));
        let position = match before {
            None => unasked(StepName::Position, "the program is not attached"),
            Some(before) if before.is_empty() => told(
                StepName::Position,
                true,
                "no program is asked before it".to_owned(),
            ),
            Some(before) => told(
                StepName::Position,
                false,
                format!("{} is asked before it", before.join(" and ")),
            ),
        };
        let all = entries_to(left, ifindex, slot).count();
        let open = entries_to(left, ifindex, slot).filter(|entry| entry.open).count();
        let row = if is_open(left, ifindex) { "open" } else { "closed" };
        let entries = told(
            StepName::Entries,
            open > 0 && open == all && is_open(left, ifindex),
            format!("{all} entries, {open} open; the consumer's row is {row}"),
        );
        let steps = vec![
            unasked(StepName::Policy, "no agent runs"),
            interface,
            identity,
            producer,
            attach,
            position,
            entries,
            unasked(StepName::Proof, "no agent runs"),
        ];
        Self {
            ifindex,
            interface: device.map(|link| link.name.clone()),
            answer: if steps.iter().any(|step| step.answer == Told::No) {
                Told::No
            } else {
                Told::Unknown
            },
            steps,
        }
    }
}

fn why_text(answer: &DownWhy, args: &why::Args) -> String {
    let mut text = format!("{}; this is what is pinned\n", paint(BAD, "no agent runs"));
    let Some(policy) = &answer.policy else {
        text.push_str(&format!("{}: the kernel has nothing of it\n", args.policy));
        return text;
    };
    text.push_str(&format!(
        "{}: generation {} is in the kernel, {} of {} consumers are served{}\n",
        args.policy,
        policy.generation,
        policy.served,
        policy.consumers,
        match &policy.last_state {
            Some(state) => format!("; the last report says {state}"),
            None => String::new(),
        }
    ));
    if args.consumer.is_some() {
        text.push_str("which interface is whose only an agent tells: here are all\n");
    }
    for chain in &answer.interfaces {
        let name = chain
            .interface
            .clone()
            .unwrap_or_else(|| format!("number {}", chain.ifindex));
        text.push_str(&format!("\n{}\n", paint(STRONG, name)));
        text.push_str(&why::steps_text(&chain.steps, &answer.now));
    }
    text
}

// --- diff --------------------------------------------------------------------------------------------------

/// Prints what the kernel has; beside what it should be nobody knows.
pub(super) fn diff(directories: &Directories, args: &diff::Args) -> Answer {
    let found = Found::read(directories);
    let mut answer = Diff::new(found.now.clone());
    answer.same = Told::Unknown;
    answer.unreadable = Some(match &found.unreadable {
        Some(why) => format!("no agent runs, and what is pinned could not be read: {why}"),
        None => "no agent runs: what is wanted and believed is not known".to_owned(),
    });
    let name = args.policy.as_ref().map(hash::name_hash);
    if let Some(left) = &found.left {
        let only = name.map(|name| {
            let slot = left.maps.policies.iter().find(|(_, value)| value.name == name);
            slot.map(|(slot, _)| *slot)
        });
        answer.things = lines(&found, left, only);
        answer.compared = answer.things.len() as u64;
    }
    match args.format.output {
        Format::Json => drop(output::json(&answer)),
        Format::Table => output::print(&diff::text(&answer)),
    }
    Answer::Unknown
}

/// What is there; `only`: of this policy slot (inside none: it is not there).
fn lines(found: &Found, left: &Left, only: Option<Option<SlotId>>) -> Vec<Line> {
    let is_wanted = |slot: SlotId| only.is_none_or(|only| only == Some(slot));
    let is_consumer = |ifindex: Ifindex| match only {
        None => true,
        Some(None) => false,
        Some(Some(slot)) => entries_to(left, ifindex, slot).next().is_some(),
    };
    let interface = |ifindex: Ifindex| found.devices.get(&ifindex).map(|link| link.name.clone());
    let policy = |slot: SlotId| {
        let report = found.name_of(slot);
        report.map(|policy| format!("{}/{}", policy.namespace, policy.name))
    };
    let mut lines = Vec::new();
    let mut add = |thing: Thing, ifindex: Option<Ifindex>, slot: Option<SlotId>, value: Value| {
        lines.push(Line::there(
            &thing,
            ifindex.and_then(interface),
            slot.and_then(policy),
            &value,
        ));
    };
    for (ifindex, program) in left.programs.iter().filter(|(ifindex, _)| is_consumer(**ifindex)) {
        let before = left.before.get(ifindex).cloned().unwrap_or_default();
        let value = match program {
            Ok(_) => Value::Program(before),
            Err(why) => Value::Other(why.clone()),
        };
        add(Thing::Program(*ifindex), Some(*ifindex), None, value);
    }
    for (ifindex, row) in left
        .maps
        .rows
        .iter()
        .filter(|(ifindex, _)| is_consumer(**ifindex))
    {
        add(Thing::Row(*ifindex), Some(*ifindex), None, Value::Row(*row));
    }
    for (ifindex, entries) in &left.maps.entries {
        for (key, entry) in entries.iter().filter(|(_, entry)| is_wanted(entry.policy)) {
            let thing = Thing::Entry(*ifindex, *key);
            add(thing, Some(*ifindex), Some(entry.policy), Value::Entry(*entry));
        }
    }
    for (slot, value) in left.maps.policies.iter().filter(|(slot, _)| is_wanted(**slot)) {
        let value = Value::Policy(Box::new(value.clone()));
        add(Thing::Selector(*slot), None, Some(*slot), value);
    }
    for (id, backend) in left
        .maps
        .backends
        .iter()
        .filter(|(_, backend)| is_wanted(backend.policy))
    {
        let value = Value::Backend(Box::new(backend.clone()));
        add(
            Thing::Backend(*id),
            Some(backend.ifindex),
            Some(backend.policy),
            value,
        );
    }
    lines
}
