//! Decisions in one line each, in words that stay the same.

use std::collections::BTreeMap;
use std::fmt::Display;

use holdfast_engine::model::{
    Backend, BackendId, Boot, Effect, Entry, Happening, Ifindex, IntentProof, Leg, LogLine, Now, Op,
    PolicySlot, RouteKey, Row, Selected, SlotId, State,
};

/// A moment: seconds and nanoseconds of the boot clock.
#[must_use]
pub fn moment(now: Now) -> String {
    format!("{}.{:09}", now.boot.0 / Boot::SECOND, now.boot.0 % Boot::SECOND)
}

/// What the engine wants done.
#[must_use]
pub fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Kernel(id, op) => format!("op {} {}", id.0, operation(op)),
        Effect::ReadRegistry(ifindexes) => format!("read registry {}", list(ifindexes)),
        Effect::AskLink(ifindex) => format!("ask link {ifindex}"),
        Effect::DumpLinks => "compare all devices".to_owned(),
        Effect::Audit(id, beliefs) => format!("audit {} {beliefs:?}", id.0),
        Effect::Report(policies) => format!("report {}", list(policies)),
        Effect::Measured(leg, nanos) => format!("measured {} {nanos} ns", name_of(*leg)),
        Effect::Log(line) => log(line),
    }
}

fn name_of(leg: Leg) -> &'static str {
    match leg {
        Leg::SeenToProgrammed => "seen to programmed",
        Leg::ReadyToProgrammed => "ready to programmed",
        Leg::WrittenToProven => "written to proven",
    }
}

fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(" ")
}

fn operation(op: &Op) -> String {
    match op {
        Op::Attach { device } => format!("attach {} {}", device.ifindex, device.mac),
        Op::Detach { ifindex } => format!("detach {ifindex}"),
        Op::ClearInterface { ifindex } => format!("clear {ifindex}"),
        Op::WriteRow { ifindex, row: value } => format!("row {ifindex} {}", row(value)),
        Op::WriteSources { ifindex, add, delete } => {
            format!("sources {ifindex} add [{}] delete [{}]", list(add), list(delete))
        }
        Op::WriteLocals { add, delete } => format!("locals add [{}] delete [{}]", list(add), list(delete)),
        Op::WriteEntries {
            ifindex,
            entries: all,
        } => format!("entries {ifindex} {}", entries(all)),
        Op::DeleteEntries { ifindex, keys } => format!("delete entries {ifindex} [{}]", joined(keys)),
        Op::WriteBackends { backends } => format!("backends {}", freed(backends)),
        Op::WriteSlots { base, slots } => format!("slots {base} [{}]", runs(slots)),
        Op::WritePolicy { slot, value: None } => format!("policy {slot} free"),
        Op::WritePolicy {
            slot,
            value: Some(value),
        } => format!("policy {slot} {}", policy(value)),
        Op::DeleteIdentity { ifindex, token } => format!("delete identity {ifindex} {:016x}", token.get()),
        Op::ProveSet {
            policy,
            device,
            selected: set,
            backends,
            ..
        } => format!(
            "prove set of policy {policy} at {}: {} with {}",
            device.ifindex,
            selected(*set),
            list(backends.keys())
        ),
        Op::ProveIntent(intent) => proof(intent),
    }
}

fn row(row: &Row) -> String {
    let mut text = row.token.map_or_else(
        || "closed".to_owned(),
        |token| format!("open for {:016x}", token.get()),
    );
    text += &format!(" epoch {}", row.epoch);
    for (has, what) in [
        (row.has_services, " services"),
        (row.has_prefixes_v4, " prefixes4"),
        (row.has_prefixes_v6, " prefixes6"),
        (row.has_sources, " sources"),
    ] {
        text += if has { what } else { "" };
    }
    text + &via(row.via)
}

fn via(via: Option<Ifindex>) -> String {
    via.map_or_else(String::new, |via| format!(" via {via}"))
}

fn joined<'a>(keys: impl IntoIterator<Item = &'a RouteKey>) -> String {
    let keys: Vec<String> = keys.into_iter().map(RouteKey::to_string).collect();
    keys.join(", ")
}

fn entries(entries: &BTreeMap<RouteKey, Entry>) -> String {
    let entries: Vec<String> = entries
        .iter()
        .map(|(key, entry)| {
            let gate = if entry.open { "open" } else { "closed" };
            format!("{key} to {} {gate}", entry.policy)
        })
        .collect();
    format!("[{}]", entries.join(", "))
}

fn freed(backends: &BTreeMap<BackendId, Option<Backend>>) -> String {
    let backends: Vec<String> = backends
        .iter()
        .map(|(id, value)| match value {
            None => format!("{id} free"),
            Some(value) => format!("{id} {}", backend(value)),
        })
        .collect();
    format!("[{}]", backends.join(", "))
}

fn backend(backend: &Backend) -> String {
    let drain = backend
        .drain_until
        .map_or_else(String::new, |until| format!(" drains until {}", until.0));
    let addresses = backend.address_v4.iter().chain(&backend.address_v6);
    format!(
        "{} {:016x} of {} generation {} [{}]{}{drain}",
        backend.ifindex,
        backend.token.get(),
        backend.policy,
        backend.last_generation,
        list(addresses),
        via(backend.via)
    )
}

/// So many runs of slots are shown; more are summed up.
const RUNS: usize = 8;

/// Slots, with how often each backend comes in a row; of a table that is mixed how many each has, and a checksum.
fn runs(slots: &[BackendId]) -> String {
    let mut runs: Vec<(BackendId, usize)> = Vec::new();
    for slot in slots {
        match runs.last_mut() {
            Some((backend, times)) if backend == slot => *times += 1,
            _ => runs.push((*slot, 1)),
        }
    }
    let shown = |(backend, times): (BackendId, usize)| match times {
        1 => backend.to_string(),
        times => format!("{backend}x{times}"),
    };
    if runs.len() <= RUNS {
        return list(runs.into_iter().map(shown));
    }
    let mut shares: BTreeMap<BackendId, usize> = BTreeMap::new();
    for slot in slots {
        *shares.entry(*slot).or_default() += 1;
    }
    let bytes: Vec<u8> = slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
    let mixed = list(shares.into_iter().map(shown));
    format!("{mixed} mixed as {:08x}", super::checksum(&bytes))
}

fn selected(selected: Selected) -> String {
    format!(
        "{}+{} generation {}",
        selected.base, selected.length, selected.generation
    )
}

fn policy(slot: &PolicySlot) -> String {
    let pass = if slot.pass_while_held {
        " passes while held"
    } else {
        ""
    };
    let waiting = slot
        .waiting_since
        .map_or_else(String::new, |since| format!(" waits since {}", since.0));
    format!(
        "to {} serves {}{pass}{waiting}",
        selected(slot.selected),
        slot.served_generation
    )
}

fn proof(proof: &IntentProof) -> String {
    format!(
        "prove {} for {:016x}: {}{} by {} with {}",
        proof.device.ifindex,
        proof.token.get(),
        entries(&proof.entries),
        takeovers(&proof.takeovers),
        selected(proof.selected),
        list(proof.backends.keys())
    )
}

fn takeovers(takeovers: &BTreeMap<RouteKey, SlotId>) -> String {
    if takeovers.is_empty() {
        return String::new();
    }
    let takeovers = takeovers.iter().map(|(key, slot)| format!("{key} to {slot}"));
    format!(" and to take over [{}]", takeovers.collect::<Vec<_>>().join(", "))
}

fn log(line: &LogLine) -> String {
    let mut text = format!("log {:?} {}", line.level, happening(&line.what)).to_lowercase();
    if let Some(policy) = &line.policy {
        text += &format!(" policy {policy}");
    }
    if let Some(consumer) = &line.consumer {
        text += &format!(" consumer {consumer}");
    }
    if let Some(ifindex) = line.ifindex {
        text += &format!(" ifindex {ifindex}");
    }
    text
}

fn state(state: State) -> String {
    match state {
        State::Pending => "Pending".to_owned(),
        State::Programmed => "Programmed".to_owned(),
        State::Held(reason) => format!("Held({reason})"),
        State::Failed(reason) => format!("Failed({reason})"),
    }
}

fn happening(what: &Happening) -> String {
    match what {
        Happening::HoldStarted(reason) => format!("hold starts: {reason}"),
        Happening::HoldChanged(reason) => format!("hold changes: {reason}"),
        Happening::HoldEnded(nanos, new) => format!("hold ends after {nanos} ns: {}", state(*new)),
        Happening::Programmed => "programmed".to_owned(),
        Happening::Failed(reason, message) => format!("failed: {reason}: {message}"),
        Happening::Recovered => "recovered".to_owned(),
        Happening::SwitchOverdue(choice) => format!("switch overdue: {choice:?}"),
        Happening::Removed(entries) => format!("removed {entries} entries of a consumer"),
        Happening::PolicyRemoved(entries) => format!("removed {entries} entries of a policy"),
        Happening::Summary {
            programmed,
            held,
            failed,
            pending,
        } => format!("summary: programmed {programmed} held {held} failed {failed} pending {pending}"),
        Happening::RegistryUnreadable(message) => format!("registry unreadable: {message}"),
        Happening::CleanupFailed(message) => format!("cleanup failed: {message}"),
        Happening::Drift(kind, message) => format!("drift: {}: {message}", kind.label()),
        Happening::MoreDrift(more) => format!("drift: {more} more"),
        Happening::AuditUnreadable(message) => format!("audit: unreadable: {message}"),
    }
}
