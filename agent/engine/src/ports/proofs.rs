//! What the kernel is asked about intents, and what its answers say.

use std::collections::BTreeMap;

use super::plan::Plan;
use super::{Port, is_open};
use crate::cell::Cell;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::families::Families;
use crate::intent::{Fingerprint, Proof};
use crate::model::{
    Boot, Device, Entry, FailReason, IntentProof, Leg, Op, OpError, OpId, OpResult, RouteKey, SlotId, State,
    Token,
};
use crate::objects::{AttachmentId, PolicyId};
use crate::plan::{Trouble, What};

impl Engine {
    /// Asks the kernel about intents that are complete and not proven.
    pub(super) fn plan_proofs(
        &mut self,
        port: &mut Port,
        claims: &Claims,
        plans: &[Plan],
        target: Option<Token>,
    ) {
        let again = std::mem::take(&mut port.prove_again);
        let (Some(token), Some(device)) = (target, port.device) else {
            return;
        };
        let sources = self.wanted_sources(port);
        let row = port.row.sure().copied().flatten();
        // The opening of a closed row covers what was revoked.
        let covered = port.revoked == port.covered || !port.may_be_open();
        let quiet = port.has_program() && port.sources.is(&sources) && covered;
        let Some(row) = row.filter(|_| quiet) else {
            return;
        };
        for (index, plan) in plans.iter().enumerate() {
            let again = again && plan.proven && self.may_prove_again(plan);
            if !plan.deliverable || (plan.proven && !again) {
                continue;
            }
            let current = self
                .objects
                .policies
                .get(&plan.policy)
                .is_some_and(|state| state.current);
            let claim = &claims.intents[index];
            if !current && plan.vetted && row.token == Some(token) && !self.is_wrongly_closed(port, claim) {
                // The old set serves on; there is nothing to say and nothing to open.
                continue;
            }
            let Some(intent) = self.intent(plan.policy, plan.attachment) else {
                continue;
            };
            // One question at a time, also where the last one is no longer of use.
            if matches!(intent.proof, Proof::Asked(..))
                || intent.asked_again.is_some()
                || self.proofs_left.contains_key(&(device.ifindex, plan.policy))
                || intent
                    .proof_trouble
                    .as_ref()
                    .is_some_and(|trouble| trouble.blocked)
            {
                continue;
            }
            // What no member can be reached for is not asked about: the answer would be that there is no producer.
            let reached = plan
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .map_or_else(Families::default, |slot| {
                    self.families_reached(slot, |(member, _)| member != device.ifindex)
                });
            let asked = claim.keys.iter().filter(|key| reached.contain(key.address()));
            let questions = self.questions(port, claims, plan, asked, target);
            let Some(((entries, takeovers), (selected, backends))) =
                questions.zip(plan.slot.and_then(|slot| self.proof_of_set(slot, device.ifindex)))
            else {
                continue;
            };
            let proof = IntentProof {
                device,
                row,
                token,
                sources: sources.clone(),
                entries,
                takeovers,
                selected,
                backends,
            };
            let (policy, attachment) = (plan.policy, plan.attachment);
            let keys = Fingerprint::of(&claim.keys);
            let op = self.send(
                What::ProveIntent(policy, attachment),
                Some(device),
                Op::ProveIntent(proof),
            );
            if let Some(intent) = self.intent_mut(policy, attachment) {
                if again {
                    intent.asked_again = Some(op);
                } else {
                    intent.proof = Proof::Asked(op, token, keys);
                }
            }
        }
    }

    /// The entries of an intent that are there, and those that may become its own. None if something is missing.
    fn questions<'a>(
        &self,
        port: &Port,
        claims: &Claims,
        plan: &Plan,
        keys: impl Iterator<Item = &'a RouteKey>,
        target: Option<Token>,
    ) -> Option<(BTreeMap<RouteKey, Entry>, BTreeMap<RouteKey, SlotId>)> {
        let slot = plan.slot?;
        let (mut entries, mut takeovers) = (BTreeMap::new(), BTreeMap::new());
        for key in keys {
            let entry = port.entries.get(key)?.sure().copied().flatten()?;
            if entry.policy == slot {
                entries.insert(*key, entry);
            } else if entry.open && self.may_take_over(port, claims, plan, key, target) {
                takeovers.insert(*key, slot);
            } else {
                return None;
            }
        }
        Some((entries, takeovers))
    }

    /// Whether an entry of this intent is closed that may be open, as after an audit has found it to be another.
    fn is_wrongly_closed(&self, port: &Port, claim: &Claim) -> bool {
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return false;
        };
        claim.keys.iter().any(|key| {
            let cell = port.entries.get(key);
            let closed = cell.and_then(Cell::sure).is_some_and(|entry| !is_open(*entry));
            closed && self.granted(state, port, claim, key)
        })
    }

    /// What is programmed, and not being asked about, may be asked about again: nothing opens meanwhile.
    fn may_prove_again(&self, plan: &Plan) -> bool {
        self.intent(plan.policy, plan.attachment)
            .is_some_and(|intent| intent.state == State::Programmed)
    }

    /// The program gave the verdict that an intent wants, or not.
    pub(crate) fn proof_answered(
        &mut self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
        sent: Boot,
        result: OpResult,
    ) {
        self.dirty_attachment(attachment);
        self.proof_left(op, policy, device);
        self.facts_of(op, device, result.as_ref().err());
        let ifindex = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port);
        let known = ifindex
            .and_then(|ifindex| self.ports.get(&ifindex))
            .and_then(|port| port.known.token());
        let current = ifindex
            .and_then(|ifindex| self.ports.get(&ifindex))
            .is_some_and(|port| port.is_of_this_device(op));
        let took = self.now.boot.since(sent);
        let same = self.is_as_asked(op, policy, attachment, device);
        let Some(intent) = self.intent_mut(policy, attachment) else {
            return;
        };
        let again = intent.asked_again == Some(op);
        if again {
            intent.asked_again = None;
        }
        let Proof::Asked(asked, token, keys) = intent.proof else {
            if again && current {
                self.proven_again(op, policy, attachment, device, result);
            }
            return;
        };
        if asked != op {
            return;
        }
        intent.proof = Proof::None;
        if !current {
            return;
        }
        match result {
            Ok(_) => {
                intent.proof = Proof::Good(op, token, keys);
                intent.proof_trouble = None;
                self.out.measured.push((Leg::WrittenToProven, took));
            }
            // What has changed since, by our own doing or because it is another incarnation, is asked about anew.
            Err(error) if error == OpError::NoDevice || known != Some(token) || !same => {}
            Err(error) => self.disproved(policy, attachment, &error),
        }
    }

    /// Whoever came in the place of an intent that had asked may ask now.
    fn proof_left(&mut self, op: OpId, policy: PolicyId, device: Option<Device>) {
        let Some(ifindex) = device.map(|device| device.ifindex) else {
            return;
        };
        if self.proofs_left.get(&(ifindex, policy)) == Some(&op) {
            self.proofs_left.remove(&(ifindex, policy));
            self.dirty.ports.insert(ifindex);
        }
    }

    /// What an answer says about a device and its program, whoever has asked and whether he still wants to know.
    fn facts_of(&mut self, op: OpId, device: Option<Device>, error: Option<&OpError>) {
        match (error, device) {
            (Some(OpError::NoDevice), device) => self.no_device(op, device),
            (Some(OpError::Detached { .. }), Some(device)) => {
                let port = self.ports.get(&device.ifindex);
                if port.is_some_and(|port| port.is_of_this_device(op)) {
                    self.program_gone(device.ifindex);
                }
            }
            _ => {}
        }
    }

    /// Whether nothing was sent since that changes what a proof has asked about.
    fn is_as_asked(
        &self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
    ) -> bool {
        let port = device.and_then(|device| self.ports.get(&device.ifindex));
        let slot = self.objects.policies.get(&policy).and_then(|state| state.slot);
        let slot = slot.and_then(|slot| self.slots.get(&slot));
        let intent = self.intent(policy, attachment);
        port.is_some_and(|port| op > port.touched)
            && slot.is_some_and(|slot| op > slot.touched)
            && intent.is_some_and(|intent| op > intent.touched)
    }

    /// A proof that was good has been asked for again. What was asked about may have changed since.
    fn proven_again(
        &mut self,
        op: OpId,
        policy: PolicyId,
        attachment: AttachmentId,
        device: Option<Device>,
        result: OpResult,
    ) {
        let same = self.is_as_asked(op, policy, attachment, device)
            && self
                .intent(policy, attachment)
                .is_some_and(|intent| matches!(intent.proof, Proof::Good(..)));
        match result {
            Ok(_) => {
                if let Some(intent) = self.intent_mut(policy, attachment) {
                    intent.proof_trouble = None;
                }
            }
            Err(error) if same && error != OpError::NoDevice => {
                if let Some(intent) = self.intent_mut(policy, attachment) {
                    intent.proof = Proof::None;
                }
                self.disproved(policy, attachment, &error);
            }
            Err(_) => {}
        }
    }

    /// The kernel says something else than an intent wants.
    fn disproved(&mut self, policy: PolicyId, attachment: AttachmentId, error: &OpError) {
        if let Some(intent) = self.intent_mut(policy, attachment) {
            intent.proof_trouble = Some(Trouble::of(error, FailReason::ProofFailed));
            intent.vetted = None;
        }
        let Some(ifindex) = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port)
        else {
            return;
        };
        // The identity may be another, and nobody has said so.
        self.read(ifindex, false);
        let slot = self.objects.policies.get(&policy).and_then(|state| state.slot);
        self.audit_at_once(ifindex, slot);
    }
}
