//! From one set to another: what is kept, what waits, and the one write that switches.

use std::collections::BTreeMap;

use super::{BackendState, GENERATION_MASK, MemberKey, Set, SlotState, Wanted, reached};
use crate::engine::{Engine, Timer};
use crate::families::Families;
use crate::model::{
    BackendId, Happening, Level, LogLine, OnDeadline, Op, PolicySlot, PolicySpec, Selected, SlotId, WhileHeld,
};
use crate::objects::{PolicyId, Served};
use crate::plan::What;
use crate::slots::size_class;

impl Engine {
    /// Members of the serving set that are still the same ready incarnation, selected or not.
    fn still_ready(&self, slot: &SlotState, families: Families) -> BTreeMap<MemberKey, Wanted> {
        slot.sets
            .iter()
            .flat_map(|set| set.members.keys())
            .filter_map(|(ifindex, token)| {
                let ready = self.ports.get(ifindex)?.ready.as_ref()?;
                let serves = ready.token == *token && !ready.families().within(families).is_empty();
                serves.then(|| ((*ifindex, *token), Wanted::of(ready)))
            })
            .collect()
    }

    /// Families for which the selector leads to a member that is like this.
    pub(crate) fn families_reached(&self, slot: &SlotState, like: impl Fn(MemberKey) -> bool) -> Families {
        slot.members()
            .filter(|(member, _)| like(*member))
            .filter_map(|(_, id)| self.backends.get(&id))
            .map(|BackendState { content, .. }| reached(content.via, content.address_v4, content.address_v6))
            .fold(Families::default(), Families::with)
    }

    /// Moves a policy towards the set that it wants.
    pub(super) fn drive(&mut self, id: PolicyId, slot: SlotId, ready: &BTreeMap<MemberKey, Wanted>) {
        let now = self.now;
        let (Some(state), Some(slot_state)) = (self.objects.policies.get(&id), self.slots.get(&slot)) else {
            return;
        };
        let Some(spec) = state.spec.clone() else {
            return;
        };
        if slot_state.cell.is(&None) {
            // The slot comes first, empty: from now on destinations can be claimed.
            self.write_selector(id, slot, Selected::default(), None, true);
            return;
        }
        if self.passes_wrongly(slot, &spec) {
            // Whoever is held leaks until this is written: nothing goes before it, and nobody looks at the set.
            let selected = slot_state
                .cell
                .sure()
                .and_then(|value| value.as_ref().map(|v| v.selected));
            self.write_selector(id, slot, selected.unwrap_or_default(), None, false);
            self.not_current(id);
            return;
        }
        if state.unsupported.is_some() {
            // Nobody is served; the slot is there for the claims, which stay closed.
            self.timer(Timer::Deadline(id), None);
            if let Some(state) = self.objects.policies.get_mut(&id) {
                state.waiting = false;
                state.waiting_since = None;
            }
            self.move_to(id, slot, &BTreeMap::new());
            return;
        }
        let serving = self.still_ready(slot_state, state.families);
        let waits = ready.is_empty() && !serving.is_empty();
        let since = if ready.is_empty() {
            state.waiting_since.or(waits.then_some(now.boot))
        } else {
            None
        };
        let deadline = since.map(|since| since.plus(spec.switchover.deadline));
        let overdue = waits && deadline.is_some_and(|deadline| now.boot >= deadline);
        let cut = overdue && spec.switchover.on_deadline == OnDeadline::Cut;
        let wanted = match (waits, cut) {
            (false, _) => ready.clone(),
            (true, false) => serving,
            (true, true) => BTreeMap::new(),
        };
        self.timer(Timer::Deadline(id), deadline.filter(|_| waits && !overdue));
        // A switch that was cut off waits on: there is no set of this generation to serve.
        let was_cut = ready.is_empty() && since.is_some() && !waits;
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.waiting = waits || (was_cut && state.waiting);
            state.waiting_since = since;
            if !waits && ready.is_empty() && !state.waiting {
                state.overdue_said = false;
            }
            if overdue && !state.overdue_said {
                state.overdue_said = true;
                self.out.log.push(LogLine {
                    level: Level::Info,
                    what: Happening::SwitchOverdue(spec.switchover.on_deadline),
                    policy: Some(state.object.name.clone()),
                    consumer: None,
                    ifindex: None,
                });
            }
            if !ready.is_empty() {
                state.overdue_said = false;
            }
        }
        self.move_to(id, slot, &wanted);
    }

    /// Whether a slot lets packets of held consumers pass although its policy does not any more, and can be written.
    fn passes_wrongly(&self, slot: SlotId, spec: &PolicySpec) -> bool {
        self.slots.get(&slot).is_some_and(|slot| {
            matches!(slot.cell.sure(), Some(Some(value)) if value.pass_while_held)
                && spec.while_held == WhileHeld::Drop
                && !slot.slot_blocked()
        })
    }

    /// Brings the selected set to exactly these members.
    fn move_to(&mut self, id: PolicyId, slot: SlotId, wanted: &BTreeMap<MemberKey, Wanted>) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        let right = |set: &Set| {
            !set.torn
                && set.members.len() == wanted.len()
                && usize::from(size_class(set.members.len())) == set.table.len()
                && wanted.iter().all(|(key, wanted)| {
                    set.members
                        .get(key)
                        .and_then(|id| self.backends.get(id))
                        .is_some_and(|backend| wanted.matches(&backend.content))
                })
        };
        let last_right = slot_state.sets.last().is_some_and(right);
        let building_right = slot_state
            .building
            .as_ref()
            .is_some_and(|building| right(&building.set));
        let sure = slot_state.cell.sure().is_some();
        if !slot_state.cell.idle() {
            // What a switch waits with is right as long as it waits, and yet is no set of this generation: it entitles
            // nobody, whatever is being written.
            let waiting = self.objects.policies.get(&id).is_some_and(|state| state.waiting);
            if !last_right || waiting {
                self.not_current(id);
            }
            return;
        }
        if last_right {
            self.give_up_building(slot);
            if sure {
                self.keep_set(id, slot);
            } else {
                // The write of this very selector failed: once more.
                self.resend_selector(id, slot);
            }
            return;
        }
        self.not_current(id);
        if wanted.is_empty() {
            self.give_up_building(slot);
            self.select_nothing(id, slot);
            return;
        }
        if building_right {
            self.advance(id, slot);
        } else if self.give_up_building(slot) {
            self.build(id, slot, wanted);
        }
        let full = self.slots.get(&slot).is_some_and(|slot| slot.is_full());
        if !sure && full {
            // There is no room for another set: what somebody else changed is put back as it was.
            self.resend_selector(id, slot);
        }
    }

    /// The selector leads where it should. What else the slot and its backends say is brought up to date.
    fn keep_set(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        let blocked = slot_state.blocked();
        if slot_state.table_wrong {
            if slot_state.table_out.is_none() && !blocked {
                self.rewrite_table(slot);
            }
            self.not_current(id);
            return;
        }
        let unsure: Vec<BackendId> = slot_state
            .sets
            .last()
            .into_iter()
            .flat_map(|set| set.members.values())
            .chain(slot_state.draining.iter().filter(|id| self.drains(id)))
            .filter(|id| self.backends.get(id).is_some_and(|backend| backend.unsure))
            .copied()
            .collect();
        if !unsure.is_empty() {
            if slot_state.backends_out.is_empty() && !blocked {
                let backends = unsure
                    .into_iter()
                    .filter_map(|id| self.backends.get(&id).map(|state| (id, state.content.clone())))
                    .collect();
                self.write_backends(slot, backends);
            }
            self.not_current(id);
            return;
        }
        let Some(state) = self.objects.policies.get_mut(&id) else {
            return;
        };
        if !state.waiting {
            let generation = state.spec_generation;
            match &mut state.served {
                Some(served) if served.generation == generation => served.spec = state.spec.clone(),
                served => {
                    *served = Some(Served {
                        generation,
                        since_ms: self.now.wall_ms,
                        spec: state.spec.clone(),
                    });
                }
            }
        }
        state.current = !state.waiting;
        let Some(Some(value)) = slot_state.cell.sure() else {
            return;
        };
        let pass = state
            .spec
            .as_ref()
            .is_some_and(|spec| spec.while_held == WhileHeld::Pass);
        if pass && !value.pass_while_held && self.has_dirty_ports(slot) {
            // It cannot be said yet; it can once those are planned.
            self.dirty.late.insert(id);
        }
        let pass = pass && (value.pass_while_held || self.may_pass(id, slot));
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let described = value.pass_while_held == pass
            && value.waiting_since == state.waiting_since
            && value.uid == slot_state.uid
            && value.name == slot_state.name;
        if described {
            if let Some(slot_state) = self.slots.get_mut(&slot)
                && slot_state.building.is_none()
            {
                slot_state.trouble = None;
            }
        } else if !blocked {
            let selected = value.selected;
            self.write_selector(id, slot, selected, None, false);
        }
    }

    /// Whether this slot may let packets of held consumers pass: not while entries still lead to it that are
    /// somebody else's by now, whose policy may say Drop; and not because a saved content says so, which may be older than
    /// what its entries were written for.
    fn may_pass(&self, id: PolicyId, slot: SlotId) -> bool {
        let planned = self
            .objects
            .policies
            .get(&id)
            .is_some_and(|state| state.face.as_ref().is_some_and(|face| face.spec == state.spec));
        if !self.slot_ports.contains_key(&slot) {
            return true;
        }
        planned
            && self.may_remove()
            && !self.has_dirty_ports(slot)
            && self.slots.get(&slot).is_some_and(|state| state.claimed_away == 0)
    }

    /// Whether interfaces with entries that lead to this slot are still to be planned, or may be when other policies are.
    pub(super) fn has_dirty_ports(&self, slot: SlotId) -> bool {
        self.slot_ports.get(&slot).is_some_and(|ports| {
            !self.dirty.policies.is_empty() || ports.iter().any(|ifindex| self.dirty.ports.contains(ifindex))
        })
    }

    fn resend_selector(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get(&slot) else {
            return;
        };
        // What was taken back of a later set may still be writing into backends of this one.
        if slot_state.out() {
            return;
        }
        if let Some(selected) = slot_state.sets.last().map(|set| set.selected) {
            self.write_selector(id, slot, selected, None, true);
        }
    }

    /// Nobody is left (or the old set is cut off): the empty set.
    fn select_nothing(&mut self, id: PolicyId, slot: SlotId) {
        let Some(slot_state) = self.slots.get_mut(&slot) else {
            return;
        };
        if slot_state.out() || slot_state.slot_blocked() {
            return;
        }
        let generation = slot_state.last_generation.wrapping_add(1) & GENERATION_MASK;
        slot_state.last_generation = generation;
        let selected = Selected {
            base: 0,
            length: 0,
            generation,
        };
        let set = Set {
            selected,
            table: Vec::new(),
            members: BTreeMap::new(),
            torn: false,
        };
        self.write_selector(id, slot, selected, Some(set), true);
    }

    /// Writes the policy slot. `set`: the selector leads there from now on. `moves`: not where it led before.
    pub(super) fn write_selector(
        &mut self,
        id: PolicyId,
        slot: SlotId,
        selected: Selected,
        set: Option<Set>,
        moves: bool,
    ) {
        let wall_ms = self.now.wall_ms;
        let may_pass = self.may_pass(id, slot);
        let (Some(state), Some(slot_state)) = (self.objects.policies.get(&id), self.slots.get_mut(&slot))
        else {
            return;
        };
        if slot_state.slot_blocked() {
            return;
        }
        // A selector that moves serves the present generation, unless that one still waits.
        let served = match &state.served {
            Some(served) if !moves || state.waiting => served.clone(),
            Some(served) if served.generation == state.spec_generation => Served {
                spec: state.spec.clone(),
                ..served.clone()
            },
            Some(_) | None => Served {
                generation: state.spec_generation,
                since_ms: wall_ms,
                spec: state.spec.clone(),
            },
        };
        let value = PolicySlot {
            name: slot_state.name,
            uid: slot_state.uid,
            selected,
            pass_while_held: state
                .spec
                .as_ref()
                .is_some_and(|spec| spec.while_held == WhileHeld::Pass)
                && (may_pass || matches!(slot_state.cell.sure(), Some(Some(value)) if value.pass_while_held)),
            served_generation: served.generation,
            served_since_ms: served.since_ms,
            waiting_since: state.waiting_since,
            last_set_generation: slot_state.last_generation,
        };
        if slot_state.sets.is_empty() && set.is_none() {
            slot_state.sets.push(Set {
                selected,
                table: Vec::new(),
                members: BTreeMap::new(),
                torn: false,
            });
        }
        slot_state.sets.extend(set);
        let op = self.send(
            What::Policy(slot),
            None,
            Op::WritePolicy {
                slot,
                value: Some(value.clone()),
            },
        );
        if let Some(slot_state) = self.slots.get_mut(&slot) {
            slot_state.cell.send(op, Some(value));
            slot_state.sent = moves.then_some(served);
            slot_state.touched = op;
        }
    }
}
