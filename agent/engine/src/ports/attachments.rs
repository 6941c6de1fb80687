//! Who is on which interface, who has the right to it, and whether he is ready.

use std::collections::BTreeSet;

use super::{Port, Ready};
use crate::engine::Engine;
use crate::gate::{Gate, Known, classify};
use crate::intent::{Facts, Producers, Proof, judge};
use crate::model::{Ifindex, Mac, OpId};
use crate::objects::{AttachmentId, PolicyId};
use crate::plan::Goal;

impl Engine {
    /// Finds the device of an interface name, who has the right to it, and whether it is ready.
    pub(crate) fn judge_interface(&mut self, name: &str) {
        let holder = self.interfaces.named(name);
        let ids: Vec<AttachmentId> = self
            .objects
            .by_interface
            .get(name)
            .into_iter()
            .flatten()
            .copied()
            .collect();
        for id in &ids {
            self.move_attachment(*id, holder);
        }
        self.contest_interface(holder, &ids);
        let Some(ifindex) = holder.filter(|_| !ids.is_empty()) else {
            self.dirty.loose.extend(ids);
            return;
        };
        let link = self.interfaces.link(ifindex).cloned();
        let via = link.as_ref().and_then(|link| self.way_to(link));
        let Some(port) = self.ports.get_mut(&ifindex) else {
            return;
        };
        port.winner = ids
            .iter()
            .copied()
            .find(|id| {
                self.objects
                    .attachments
                    .get(id)
                    .is_some_and(|state| state.interface_lost.is_none())
            })
            .filter(|_| {
                // Several that nobody has the right over: none is served.
                ids.iter()
                    .filter(|id| {
                        self.objects
                            .attachments
                            .get(id)
                            .is_some_and(|state| state.interface_lost.is_none())
                    })
                    .count()
                    == 1
            });
        let mut ready = None;
        let mut coming = false;
        // Where there is none, there is no neighbour with such an address.
        let has_ipv6 = via.is_none_or(|device| self.interfaces.speaks_ipv6(device));
        port.hangs_on_identity = false;
        for id in &ids {
            let Some(state) = self.objects.attachments.get(id) else {
                continue;
            };
            let gate = classify(link.as_ref(), &port.known, state.object.expected);
            port.hangs_on_identity |= gate.hangs_on_identity();
            if port.winner == Some(*id)
                && state.address_lost.is_none()
                && let Gate::Ready(token) = gate
            {
                if !port.has_program() {
                    coming = !port.troubles.contains_key(&Goal::Attached);
                    continue;
                }
                let mac = match &port.known {
                    Known::Row(Some(identity)) => identity.mac,
                    Known::Row(None) | Known::Unread | Known::Unreadable(_) => Mac::default(),
                };
                ready = Some(Ready {
                    attachment: *id,
                    token,
                    mac,
                    address_v4: state.object.addresses.iter().find(|a| a.is_ipv4()).copied(),
                    address_v6: state
                        .object
                        .addresses
                        .iter()
                        .find(|a| a.is_ipv6())
                        .copied()
                        .filter(|_| has_ipv6),
                    via,
                });
            }
        }
        if port.ready != ready || port.coming != coming {
            port.ready = ready;
            port.coming = coming;
            self.dirty_producers_of(ifindex);
        }
        self.dirty.ports.insert(ifindex);
    }

    fn move_attachment(&mut self, id: AttachmentId, holder: Option<Ifindex>) {
        let Some(state) = self.objects.attachments.get_mut(&id) else {
            return;
        };
        if state.port == holder {
            return;
        }
        let before = state.port;
        state.port = holder;
        let consumes = state.consumes.clone();
        let produces = state.produces.clone();
        self.dirty.policies.extend(produces);
        if let Some(port) = before.and_then(|ifindex| self.ports.get_mut(&ifindex)) {
            port.attachments.remove(&id);
            if port.winner == Some(id) {
                port.winner = None;
                port.ready = None;
                port.coming = false;
            }
            // What is to be taken away now is a new operation, whatever failed before.
            port.unblock();
        }
        if let Some(before) = before {
            self.dirty_producers_of(before);
        }
        self.dirty.ports.extend(before);
        if let Some(ifindex) = holder {
            let device = self.interfaces.link(ifindex).map(|link| link.device());
            let last = OpId(self.last_op);
            let port = self
                .ports
                .entry(ifindex)
                .or_insert_with(|| Port::new(device, last));
            port.attachments.insert(id);
            let unread = port.known == Known::Unread && port.read.out.is_none();
            if unread {
                self.read(ifindex, false);
            }
        }
        self.forget_tries(id, &consumes);
    }

    /// Whatever was tried for an attachment on an interface says nothing any more: it left, or has no right to it.
    pub(crate) fn forget_tries(&mut self, id: AttachmentId, consumes: &BTreeSet<PolicyId>) {
        for policy in consumes.iter().copied() {
            self.leave_proof(policy, id);
            if let Some(intent) = self.intent_mut(policy, id) {
                intent.proof = Proof::None;
                intent.asked_again = None;
                intent.vetted = None;
                intent.entries_trouble = None;
                intent.proof_trouble = None;
                intent.fallback = 0;
            }
            self.dirty.touched.insert(policy);
            if let Some(state) = self.objects.policies.get_mut(&policy)
                && state.full.remove(&id)
            {
                self.dirty.policies.insert(policy);
            }
        }
    }

    /// Judges the intents of an attachment whose interface is missing.
    pub(crate) fn judge_loose(&mut self, id: AttachmentId) {
        let Some(state) = self.objects.attachments.get(&id) else {
            return;
        };
        if state.port.is_some() {
            return;
        }
        let gate = classify(None, &Known::Unread, state.object.expected);
        let lost = state.lost().cloned();
        let claims = self.claims(&self.nowhere(&state.object.interface));
        for policy in state.consumes.clone() {
            let Some(policy_state) = self.objects.policies.get(&policy) else {
                continue;
            };
            let conflict = claims
                .intents
                .iter()
                .find(|claim| claim.policy == policy && claim.attachment == id)
                .and_then(|claim| claim.conflict.as_deref());
            let full = self.full(policy_state);
            let facts = Facts {
                refused: policy_state.refusal(),
                conflict: lost.as_deref().or(conflict),
                passed: self.passed,
                trouble: full.as_ref().or_else(|| self.set_trouble(policy_state)),
                gate: &gate,
                unreachable: None,
                unreadable: None,
                producers: Producers::Ready,
                done: false,
            };
            let before = policy_state.intents.get(&id).map(|intent| intent.state);
            if let Some(before) = before {
                let judged = judge(before, &facts);
                let hindered = full.is_some();
                self.set_hindered(policy, id, hindered);
                self.set_state(policy, id, judged, None);
            }
        }
    }

    /// An interface that is missing. Conflicts are between objects: they are judged without a device too.
    pub(crate) fn nowhere(&self, interface: &str) -> Port {
        Port {
            attachments: self
                .objects
                .by_interface
                .get(interface)
                .cloned()
                .unwrap_or_default(),
            ..Port::default()
        }
    }
}
