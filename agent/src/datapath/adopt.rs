//! Reading back what an earlier life of the agent left in the pins.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_ebpf::abi::pin;
use holdfast_engine::model::{Adoption, BackendId, Ifindex, Selected};
use rustix::io::Errno;

use super::DatapathError;
use super::convert;
use super::maps::Maps;
use super::write::Known;

/// Reads every map in full. Writes nothing.
///
/// An element that the program takes for a miss (its value is not its key's) delivers nothing and is no part of what
/// is adopted; it is known, so that it goes when its interface is cleared.
pub(super) fn read(maps: &Maps, attached: BTreeSet<Ifindex>) -> Result<(Adoption, Known), DatapathError> {
    let failed = |map: &'static str| move |errno: Errno| DatapathError::map("reading", map, errno);
    let mut adoption = Adoption {
        attached,
        ..Adoption::default()
    };
    let mut known = Known::default();

    for (ifindex, value) in maps.consumers.dump().map_err(failed(pin::CONSUMERS))? {
        known.rows.insert(ifindex);
        match convert::row_of(ifindex, &value) {
            Some(row) => drop(adoption.rows.insert(ifindex, row)),
            None => senseless(pin::CONSUMERS, ifindex),
        }
    }
    for (key, value) in maps.sources.dump().map_err(failed(pin::SOURCES))? {
        known.add_source(&key);
        match convert::address_of(key.family, key.address) {
            Some(address) if value == key.check() => {
                adoption.sources.entry(key.ifindex).or_default().insert(address);
            }
            _ => senseless(pin::SOURCES, key.ifindex),
        }
    }
    for (key, value) in maps.services.dump().map_err(failed(pin::SERVICES))? {
        known.add_service(&key);
        if convert::is_claim(&key) {
            continue;
        }
        match (convert::service_key_of(&key), convert::entry_of(&key, &value)) {
            (Some(service), Some(entry)) => {
                let entries = adoption.entries.entry(key.ifindex).or_default();
                entries.insert(service, entry);
            }
            _ => senseless(pin::SERVICES, key.ifindex),
        }
    }
    for (key, value) in maps.prefixes.dump().map_err(failed(pin::PREFIXES))? {
        known.add_prefix(&key);
        let ifindex = convert::interface_of(&key);
        match (
            convert::prefix_key_of(&key),
            convert::prefix_entry_of(&key, &value),
        ) {
            (Some(prefix), Some(entry)) => {
                adoption.entries.entry(ifindex).or_default().insert(prefix, entry);
            }
            _ => senseless(pin::PREFIXES, ifindex),
        }
    }
    for (key, value) in maps.locals.dump().map_err(failed(pin::LOCALS))? {
        match convert::address_of(key.family, key.address) {
            // One with a senseless value is known too: it is written anew, or deleted.
            Some(address) => {
                known.locals.insert(address);
                if value == key.check() {
                    adoption.locals.insert(address);
                }
            }
            None => tracing::warn!(
                map = pin::LOCALS,
                ?key,
                "a key that is no address: it matches no packet"
            ),
        }
    }
    for (slot, value) in maps.policies.dump().map_err(failed(pin::POLICIES))? {
        if let Some(policy) = convert::policy_of(&value) {
            known.policies.insert(slot);
            adoption.policies.insert(slot, policy);
        }
    }
    for (id, value) in maps.backends.dump().map_err(failed(pin::BACKENDS))? {
        if let Some(backend) = convert::backend_of(&value) {
            known.backends.insert(id);
            adoption.backends.insert(id, backend);
        }
    }
    adoption.slots = adoption
        .policies
        .values()
        .filter(|policy| policy.selected.length > 0)
        .map(|policy| Ok((policy.selected.base, slots(maps, policy.selected)?)))
        .collect::<Result<BTreeMap<_, _>, DatapathError>>()?;
    Ok((adoption, known))
}

/// The slots that a selector leads to.
fn slots(maps: &Maps, selected: Selected) -> Result<Vec<BackendId>, DatapathError> {
    let failed = |errno| DatapathError::map("reading", pin::SLOTS, errno);
    (0..u32::from(selected.length))
        .map_while(|offset| selected.base.checked_add(offset))
        .map(|index| maps.slots.lookup(&index).map_err(failed))
        // Beyond the arena there is nothing: the program drops what leads there.
        .filter_map(Result::transpose)
        .collect()
}

fn senseless(map: &str, ifindex: Ifindex) {
    tracing::warn!(
        map,
        ifindex,
        "an element whose value is not its key's: it delivers nothing and is not adopted"
    );
}
