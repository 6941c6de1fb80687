//! Which policy slots the entries of an interface lead to, and which of those are on their way out.

use std::collections::BTreeSet;

use super::Port;
use crate::cell::Cell;
use crate::conflict::Claims;
use crate::engine::Engine;
use crate::model::{Entry, Ifindex, RouteKey, SlotId};
use crate::plan::Goal;
use crate::producers::SlotState;

impl Engine {
    /// Keeps the indexes of policy slots, and the counts of what is on its way out.
    pub(super) fn account(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        let mut used = BTreeSet::new();
        let mut removing = BTreeSet::new();
        let mut claimed_away = BTreeSet::new();
        let mut delivering_on = BTreeSet::new();
        let closes = self.passed && port.may_be_open() && !self.frozen(port);
        for (key, cell) in &port.entries {
            let claim = claims.keys.get(key);
            let owner = claim.and_then(|index| {
                let policy = claims.intents[*index].policy;
                self.objects.policies.get(&policy).and_then(|state| state.slot)
            });
            let closes = closes && self.is_to_be_closed(port, claims, key, cell);
            for entry in cell.values().iter().flatten() {
                used.insert(entry.policy);
                let right = owner == Some(entry.policy)
                    && claim.is_some_and(|index| claims.intents[*index].may_deliver());
                if closes && entry.open && !right {
                    delivering_on.insert(entry.policy);
                }
                if owner == Some(entry.policy) || claims.kept.contains(key) || !self.passed {
                    continue;
                }
                removing.insert(entry.policy);
                if claim.is_some() {
                    claimed_away.insert(entry.policy);
                }
            }
        }
        for slot in port.slots_used.difference(&used) {
            if let Some(ports) = self.slot_ports.get_mut(slot) {
                ports.remove(&ifindex);
                if ports.is_empty() {
                    self.slot_ports.remove(slot);
                    self.dirty.slots.insert(*slot);
                }
            }
        }
        for slot in used.difference(&port.slots_used) {
            self.slot_ports.entry(*slot).or_default().insert(ifindex);
        }
        port.slots_used = used;
        for slot in removing.difference(&port.removing) {
            self.summary.intents.removing += 1;
            self.count_removing(*slot, |count| count + 1);
        }
        for slot in port.removing.difference(&removing) {
            self.summary.intents.removing = self.summary.intents.removing.saturating_sub(1);
            self.count_removing(*slot, |count| count.saturating_sub(1));
        }
        // Its policy may let held consumers pass when nothing is claimed away any more.
        self.count_ports(&port.claimed_away, &claimed_away, |slot| &mut slot.claimed_away);
        // Its selector may move when nothing delivers on any more.
        self.count_ports(&port.delivering_on, &delivering_on, |slot| {
            &mut slot.delivering_on
        });
        port.removing = removing;
        port.claimed_away = claimed_away;
        port.delivering_on = delivering_on;
    }

    /// Whether an entry that may be open without the right to it will be closed: nobody keeps it, and nothing failed
    /// that this waits for, or it is being tried again.
    fn is_to_be_closed(
        &self,
        port: &Port,
        claims: &Claims,
        key: &RouteKey,
        cell: &Cell<Option<Entry>>,
    ) -> bool {
        if claims.kept.contains(key) {
            return false;
        }
        if !cell.idle() && !self.is_silent(cell.flight()) {
            return true;
        }
        if [Goal::Unclaimed, Goal::Cleared]
            .iter()
            .any(|goal| port.troubles.contains_key(goal))
        {
            return false;
        }
        // Where nothing is claimed any more the row goes first, and the entries with all the rest.
        let row_is_tried = !port.row.idle() && !self.is_silent(port.row.flight());
        if claims.is_empty() && port.troubles.contains_key(&Goal::RowClosed) && !row_is_tried {
            return false;
        }
        let Some(index) = claims.keys.get(key) else {
            // At the latest once the lists are complete.
            return true;
        };
        let claim = &claims.intents[*index];
        self.intent(claim.policy, claim.attachment)
            .is_none_or(|intent| intent.entries_trouble.is_none() && intent.fallback == 0)
    }

    /// Counts the interfaces that have something to do with a slot; its policy is planned when there is none any more.
    fn count_ports(
        &mut self,
        before: &BTreeSet<SlotId>,
        now: &BTreeSet<SlotId>,
        counter: impl Fn(&mut SlotState) -> &mut u64,
    ) {
        for slot in now.difference(before) {
            if let Some(state) = self.slots.get_mut(slot) {
                *counter(state) += 1;
            }
        }
        for slot in before.difference(now) {
            if let Some(state) = self.slots.get_mut(slot) {
                let count = counter(state);
                *count = count.saturating_sub(1);
                if *count == 0 {
                    self.dirty.policies.extend(state.owner);
                }
            }
        }
    }

    fn count_removing(&mut self, slot: SlotId, count: impl FnOnce(u64) -> u64) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.removing = count(state.removing);
            self.dirty.touched.extend(state.owner);
        }
    }
}
