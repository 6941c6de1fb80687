//! One policy: its slot, who of its producers is ready, and what its intents see of it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Face, MemberKey, Orphan, SlotState, Wanted};
use crate::backoff::Backoff;
use crate::conflict::routes;
use crate::engine::{Engine, Timer};
use crate::families::Families;
use crate::gate::Known;
use crate::model::{Delivery, Destination, FailReason, Ifindex, OpError, OpId, PolicySpec, Selected, SlotId};
use crate::objects::{AttachmentId, PolicyId, PolicyState, Served};
use crate::plan::Trouble;

/// What the data plane does not do yet.
fn unsupported(spec: &PolicySpec, features: crate::model::Features) -> Option<String> {
    if spec.delivery == Delivery::Translate && !features.translate {
        return Some("delivery: Translate comes with a later version; this one delivers Direct".to_owned());
    }
    if spec.max_staleness.is_some() && !features.max_staleness {
        return Some("maxStaleness comes with a later version".to_owned());
    }
    spec.destinations.iter().find_map(|destination| match destination {
        Destination::Prefix { address, length } if !features.prefixes => Some(format!(
            "destination {address}/{length}: prefixes come with a later version, and until then their traffic takes the default path; this one takes an address with protocol and port"
        )),
        Destination::Prefix { .. } | Destination::Service { .. } => None,
    })
}

impl Engine {
    /// Plans the set of a policy.
    pub(crate) fn plan_policy(&mut self, id: PolicyId) {
        self.recall_served(id);
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let mut ready: BTreeMap<MemberKey, Wanted> = BTreeMap::new();
        let mut ready_ids = BTreeMap::new();
        let mut coming = BTreeSet::new();
        let mut trouble = false;
        // Until an identity has been read that an earlier life knew, the set stays as that life left it.
        let mut stays = false;
        let mut unreadable = None;
        let mut undeliverable = None;
        let features = self.config.features;
        let families = state.spec.as_deref().map_or_else(Families::default, |spec| {
            Families::of(routes(spec, features).map(|route| route.address()))
        });
        let mut unreached = None;
        for producer in &state.producers {
            let Some(attachment) = self.objects.attachments.get(producer) else {
                continue;
            };
            let Some(port) = attachment.port.and_then(|ifindex| self.ports.get(&ifindex)) else {
                continue;
            };
            trouble |= port.hindered;
            if port.coming && port.winner == Some(*producer) {
                coming.insert(*producer);
            }
            if self.frozen(port) {
                stays = true;
                if matches!(port.known, Known::Unreadable(_)) {
                    unreadable = Some(format!(
                        "the identity of producer {} could not be read yet",
                        attachment.object.name
                    ));
                }
            }
            let Some(member) = port
                .ready
                .as_ref()
                .filter(|member| member.attachment == *producer)
            else {
                continue;
            };
            let Some(ifindex) = attachment.port else {
                continue;
            };
            if member.via.is_some() && !features.neighbour_delivery {
                undeliverable = Some(format!(
                    "producer {} ({}) is not a veth with its peer in another namespace: such producers come with a later version (neighbour delivery)",
                    attachment.object.name, attachment.object.interface
                ));
            }
            let serves = member.families().within(families);
            let lacks = families.without(serves);
            if !lacks.is_empty() {
                let named = Families::of(attachment.object.addresses.iter().copied());
                let why = if lacks.within(named).is_empty() {
                    format!("names none of {lacks}")
                } else {
                    "there is no IPv6 on the way to it".to_owned()
                };
                unreached = Some(format!(
                    "producer {} is reached by its address on interface {}, and {why}",
                    attachment.object.name, attachment.object.interface
                ));
            }
            if serves.is_empty() && features.neighbour_delivery {
                continue;
            }
            ready_ids.insert(*producer, serves);
            ready.insert((ifindex, member.token), Wanted::of(member));
        }
        let several = (ready.len() > 1 && !features.several_producers).then(|| {
            format!(
                "{} producers are ready: more than one comes with a later version",
                ready.len()
            )
        });
        let refused = state
            .spec
            .as_deref()
            .and_then(|spec| unsupported(spec, features))
            .or(undeliverable)
            .or(several);
        let has_intents = !state.intents.is_empty();
        // Whom an outdated content selects says nothing about whom the later one does, nor whether that can be done.
        let outdated = state.is_outdated();
        let knows_content = state.spec.is_some() && !outdated;
        let refused = refused.filter(|_| !outdated);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.unsupported = refused.clone();
            state.families = families;
            state.ready = ready_ids;
            state.supplied.note(!state.ready.is_empty(), self.now.boot);
            state.unreached = unreached;
            state.coming = coming;
            if std::mem::replace(&mut state.producer_trouble, trouble) != trouble {
                if trouble {
                    state.recheck = Some(Backoff::begin(self.now.boot));
                }
                self.dirty.touched.insert(id);
            }
        }
        if self.passed {
            let wanted = has_intents || !knows_content;
            self.plan_slot(id, wanted, knows_content, &ready, stays, unreadable);
        }
        self.look(id);
    }

    fn plan_slot(
        &mut self,
        id: PolicyId,
        wanted: bool,
        knows_content: bool,
        ready: &BTreeMap<MemberKey, Wanted>,
        mut stays: bool,
        mut unreadable: Option<String>,
    ) {
        if !wanted {
            self.timer(Timer::Deadline(id), None);
            if !self.may_remove() {
                return;
            }
            if let Some(state) = self.objects.policies.get_mut(&id) {
                state.slot_trouble = None;
                state.unread = false;
                state.unreadable = None;
                state.current = false;
                state.waiting = false;
                state.waiting_since = None;
                state.served = None;
                if let Some(slot) = state.slot.take() {
                    self.disown(slot);
                }
            }
            return;
        }
        let Some(slot) = self.own_slot(id, knows_content) else {
            return;
        };
        // What is known is older than what is there.
        let outdated = self.is_outdated(id);
        let knows_content = knows_content && !outdated;
        if knows_content {
            if self.kept_slots.remove(&slot) {
                // What was kept because nobody knew better is judged now.
                self.dirty
                    .ports
                    .extend(self.slot_ports.get(&slot).into_iter().flatten());
                // No audit has looked at it as long as nothing could be put right there.
                self.audit_slot_at_once(slot);
            }
        } else {
            self.kept_slots.insert(slot);
        }
        for ifindex in self.frozen_members(slot) {
            stays = true;
            if let Some(Known::Unreadable(_)) = self.ports.get(&ifindex).map(|port| &port.known) {
                unreadable = Some(format!(
                    "the identity behind interface {ifindex}, which serves, could not be read yet"
                ));
            }
        }
        stays |= outdated;
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.unread = stays && unreadable.is_none();
            state.unreadable = unreadable;
        }
        if !knows_content {
            return;
        }
        if !stays {
            self.drive(id, slot, ready);
            return;
        }
        self.not_current(id);
        if self.slots.get(&slot).is_some_and(|slot| slot.cell.is(&None)) {
            // There is nothing yet that could stay; destinations can be claimed all the same.
            self.write_selector(id, slot, Selected::default(), None, true);
        }
    }

    /// What an earlier life served, as soon as that is known.
    fn recall_served(&mut self, id: PolicyId) {
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        if self.passed || state.served.is_some() {
            return;
        }
        let uid = (self.config.hashes.uid)(&state.object.uid);
        let slot = self.slot_by_uid.get(&uid).and_then(|slot| self.slots.get(slot));
        let served = slot
            .and_then(|slot| slot.cell.sure()?.as_ref())
            .map(Served::before);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.served = served;
        }
    }

    /// Whether an earlier life served a later generation than the last one that is known and can be used, as after a
    /// saved set: what it wanted is not known, and stays.
    pub(crate) fn is_outdated(&self, id: PolicyId) -> bool {
        self.objects
            .policies
            .get(&id)
            .is_some_and(PolicyState::is_outdated)
    }

    /// The selector does not lead to what this generation wants, or nobody has looked.
    pub(super) fn not_current(&mut self, id: PolicyId) {
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.current = false;
        }
    }

    /// Interfaces of members of the selected set whose identity an earlier life knew and this one has not read yet.
    pub(super) fn frozen_members(&self, slot: SlotId) -> BTreeSet<Ifindex> {
        let sets = self.slots.get(&slot).into_iter().flat_map(|slot| &slot.sets);
        sets.flat_map(|set| set.members.keys())
            .map(|(ifindex, _)| *ifindex)
            .filter(|ifindex| self.ports.get(ifindex).is_some_and(|port| self.frozen(port)))
            .collect()
    }

    /// The slot of a policy: the one that an earlier life gave it, or a new one.
    fn own_slot(&mut self, id: PolicyId, may_take: bool) -> Option<SlotId> {
        let state = self.objects.policies.get(&id)?;
        if let Some(slot) = state.slot {
            return Some(slot);
        }
        let uid = (self.config.hashes.uid)(&state.object.uid);
        let name = (self.config.hashes.name)(&state.object.name);
        let known = self.slot_by_uid.get(&uid).copied().filter(|slot| {
            self.slots
                .get(slot)
                .is_some_and(|slot| slot.owner.is_none() && slot.in_kernel())
        });
        let slot = match known {
            Some(slot) => slot,
            None if !may_take => return None,
            None => {
                let Some(slot) = self.slot_ids.take() else {
                    let have = self.config.capacity.policies;
                    let error = OpError::Full {
                        map: "policies".to_owned(),
                        need: have + 1,
                        have,
                    };
                    self.no_room(id, &error);
                    return None;
                };
                self.slots.insert(slot, SlotState::new(name, uid));
                self.slot_by_uid.insert(uid, slot);
                slot
            }
        };
        let of = state.object.name.clone();
        let value = {
            let slot_state = self.slots.get_mut(&slot)?;
            slot_state.owner = Some(id);
            slot_state.of = Some(of);
            slot_state.policy_gone = false;
            slot_state.removed = 0;
            slot_state.name = name;
            slot_state.trouble = None;
            slot_state.cell.sure().cloned().flatten()
        };
        self.settled_orphan(Orphan::Slot(slot));
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.slot = Some(slot);
            state.slot_trouble = None;
            if let Some(value) = value {
                state.waiting_since = value.waiting_since;
                state.served = Some(Served::before(&value));
            }
        }
        // Entries that lead there have an owner again.
        if let Some(ports) = self.slot_ports.get(&slot) {
            self.dirty.ports.extend(ports);
        }
        Some(slot)
    }

    fn no_room(&mut self, id: PolicyId, error: &OpError) {
        let trouble = Trouble::of(error, FailReason::MapFull);
        if let Some(state) = self.objects.policies.get_mut(&id) {
            state.slot_trouble = Some(trouble);
            self.dirty.touched.insert(id);
        }
    }

    /// What nobody owns any more is removed once no entry leads there.
    pub(crate) fn disown(&mut self, slot: SlotId) {
        if let Some(state) = self.slots.get_mut(&slot) {
            state.owner = None;
            // To remove it is a new operation, whatever failed before.
            state.trouble = None;
        }
        self.kept_slots.remove(&slot);
        if let Some(ports) = self.slot_ports.get(&slot) {
            self.dirty.ports.extend(ports);
        }
        self.dirty.slots.insert(slot);
    }

    /// Devices of the producers of a policy that are ready.
    pub(crate) fn devices_of_ready(&self, policy: &PolicyState) -> BTreeSet<Ifindex> {
        let ready = policy.ready.keys();
        ready
            .filter_map(|id| self.objects.attachments.get(id)?.port)
            .collect()
    }

    /// Compares what the intents of a policy see of it, and has them planned again if it changed.
    fn look(&mut self, id: PolicyId) {
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let outdated = state.is_outdated();
        let another = |face: &Face| face.spec != state.spec || face.outdated != outdated;
        if state.face.as_ref().is_none_or(another) {
            // Once its interfaces are planned by the new content, it may let held consumers pass.
            self.dirty.late.insert(id);
        }
        let slot = state.slot.and_then(|slot| self.slots.get(&slot));
        let face = Face {
            slot: state.slot,
            value: slot
                .and_then(|slot| slot.cell.sure().cloned().flatten())
                .map(|value| (value.selected, value.pass_while_held)),
            current: state.current,
            waiting: state.waiting,
            ready: state.ready.clone(),
            unreached: state.unreached.clone(),
            coming: state.coming.clone(),
            refusal: state
                .refusal()
                .map(|(reason, message)| (reason, message.to_owned())),
            unread: state.unread,
            unreadable: state.unreadable.clone(),
            trouble: state
                .slot_trouble
                .clone()
                .or_else(|| slot.and_then(|slot| slot.trouble.clone())),
            full: state.full.clone(),
            settled: slot.is_some_and(SlotState::settled),
            progressing: state.progressing(self),
            touched: slot.map_or(OpId(0), |slot| slot.touched),
            spec: state.spec.clone(),
            outdated,
        };
        if state.face.as_ref() == Some(&face) {
            return;
        }
        let consumers: Vec<AttachmentId> = state.intents.keys().copied().collect();
        if let Some(state) = self.objects.policies.get_mut(&id) {
            let other = state
                .face
                .as_ref()
                .is_none_or(|before| before.value != face.value || before.spec != face.spec);
            state.face = Some(face);
            if other {
                // What was disproved of another set, or of another content, says nothing about this one.
                for intent in state.intents.values_mut() {
                    intent.proof_trouble = None;
                }
            }
        }
        for consumer in consumers {
            self.dirty_attachment(consumer);
        }
        self.dirty.touched.insert(id);
    }
}
