//! What is to be done about one interface: it is emptied, or its parts are planned one after the other.

use std::collections::BTreeSet;

use super::Port;
use super::kinds::Kinds;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::intent::{Fingerprint, Proof};
use crate::locals::LocalsState;
use crate::model::{Ifindex, Op, OpId, PolicySlot, RouteKey, SlotId, Token};
use crate::objects::{AttachmentId, PolicyId, PolicyState};
use crate::plan::{Goal, What};
use crate::producers::Orphan;

/// What planning needs to know of one intent of an interface.
pub(super) struct Plan {
    pub(super) policy: PolicyId,
    pub(super) attachment: AttachmentId,
    /// The policy slot, if the kernel has it.
    pub(super) slot: Option<SlotId>,
    /// The consumer and its producers are ready and nothing forbids it.
    pub(super) deliverable: bool,
    /// A proof of everything that is there holds.
    pub(super) proven: bool,
    /// Open entries may stay open.
    pub(super) vetted: bool,
    /// It is about to become deliverable or not.
    pub(super) undecided: bool,
}

impl Engine {
    /// Plans one interface.
    pub(crate) fn plan_port(&mut self, ifindex: Ifindex) {
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        self.dirty.proofs.remove(&ifindex);
        if self.passed && !self.frozen(&port) {
            self.plan_content(ifindex, &mut port, &claims);
        }
        self.note_troubles(ifindex, &mut port);
        self.dirty.judged.insert(ifindex);
        self.account(ifindex, &mut port, &claims);
        self.mark(&mut port, &claims);
        self.locals.concern(ifindex, &claims);
        let over = port.device.is_none()
            && port.attachments.is_empty()
            && port.bare()
            && port.program.is(&None)
            && port.read.unanswered == 0;
        if over && self.passed {
            self.ports.remove(&ifindex);
            self.locals.forget(ifindex);
            self.settled_orphan(Orphan::Port(ifindex));
        } else if let Some(place) = self.ports.get_mut(&ifindex) {
            if !port.troubles.keys().any(|goal| goal.is_cleanup())
                && self.orphans.contains(&Orphan::Port(ifindex))
                && port.troubles.is_empty()
            {
                *place = port;
                self.settled_orphan(Orphan::Port(ifindex));
            } else {
                *place = port;
            }
        }
    }

    /// Whoever has to try again what failed here is told: the policies of its producers, or nobody's timer.
    fn note_troubles(&mut self, ifindex: Ifindex, port: &mut Port) {
        let hindered = Self::worst_trouble(&port.troubles).is_some();
        if std::mem::replace(&mut port.hindered, hindered) != hindered {
            let attachments = port
                .attachments
                .iter()
                .filter_map(|id| self.objects.attachments.get(id));
            self.dirty
                .policies
                .extend(attachments.flat_map(|state| &state.produces));
        }
        if port.troubles.keys().any(|goal| self.nobody_retries(port, *goal)) {
            self.orphaned(Orphan::Port(ifindex));
        }
    }

    fn plan_content(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        if port.stale {
            // A device with the same address may be the one that went, and still hold the program: there what is
            // here is closed and rewritten, because nothing may leak in between.
            let may_be_the_same = port
                .device
                .is_some_and(|device| port.program.may(|mac| *mac == Some(device.mac)));
            let cleared = port.bare() && port.quiet();
            if !may_be_the_same && !cleared {
                self.clear(ifindex, port);
                return;
            }
            port.stale = false;
            if port.bare() {
                port.revoked = port.covered;
            }
            port.troubles.remove(&Goal::Cleared);
            // What is left of the program is a defunct link.
            if port.program.idle() && !port.program.is(&None) && port.device.is_some() {
                port.program.doubt(None);
            }
        }
        if port.attachments.is_empty() {
            // Nobody wants the program here.
            port.troubles.remove(&Goal::Attached);
        }
        if port.device.is_none() || (port.attachments.is_empty() && self.may_remove()) {
            self.vacate(ifindex, port);
            return;
        }
        // Somebody is here again: nothing is to be detached any more.
        port.troubles.remove(&Goal::Detached);
        if port.attachments.is_empty() || port.clearing.is_some() {
            return;
        }
        if claims.is_empty() {
            if port.bare() {
                port.forget_content();
            } else if self.may_remove() {
                self.empty(ifindex, port);
            }
        } else {
            // A clear that failed was for an earlier wish: what it left unknown is written anew.
            port.troubles.remove(&Goal::Cleared);
            self.inherit(port, claims);
            self.trace(port, claims);
            self.entitle(claims);
            let plans = self.plans(ifindex, port, claims);
            let target = self.target(port, claims);
            let opening = target.is_some()
                && port
                    .row
                    .sure()
                    .copied()
                    .flatten()
                    .is_some_and(|row| row.token.is_none())
                && plans.iter().any(|plan| plan.proven)
                && !plans.iter().any(|plan| plan.undecided);
            self.plan_sources(ifindex, port);
            self.plan_entries(ifindex, port, claims, &plans, target, opening);
            self.plan_row(ifindex, port, claims, &plans, target);
            if port.prove_again || plans.iter().any(|plan| plan.deliverable && !plan.proven) {
                self.dirty.proofs.insert(ifindex);
            }
        }
        self.plan_program(ifindex, port);
    }

    /// Notes which intents may use the set that their policy leads to now.
    fn entitle(&mut self, claims: &Claims) {
        for claim in &claims.intents {
            let right = claim.may_deliver();
            let Some(state) = self.objects.policies.get_mut(&claim.policy) else {
                continue;
            };
            let current = state.current;
            if let Some(intent) = state.intents.get_mut(&claim.attachment) {
                intent.entitled = right && (current || intent.entitled);
            }
        }
    }

    /// Whoever loses its interface to another has no right from before when it wins it back: what it claims is not even
    /// looked at meanwhile.
    pub(crate) fn disentitle(&mut self, id: AttachmentId, consumes: &BTreeSet<PolicyId>) {
        for policy in consumes {
            if let Some(intent) = self.intent_mut(*policy, id) {
                intent.entitled = false;
            }
        }
    }

    /// What an earlier life let go live may stay so, also of intents that only the complete lists name.
    fn inherit(&mut self, port: &mut Port, claims: &Claims) {
        if !port.traced {
            port.inheritance = port.adopted_open();
        }
        let Some(vetted) = port.inheritance.filter(|_| port.adopted) else {
            return;
        };
        if self.may_remove() {
            port.inheritance = None;
        }
        for claim in &claims.intents {
            if let Some(intent) = self.intent_mut(claim.policy, claim.attachment)
                && intent.touched == OpId(0)
            {
                intent.vetted = Some(vetted);
            }
        }
    }

    /// An earlier life may have ended between the closing of an entry and the new epoch: flows may still be
    /// there that no entry allows. Entries that are closed although nobody wants them so are the trace of it.
    fn trace(&mut self, port: &mut Port, claims: &Claims) {
        if !port.adopted || port.traced {
            return;
        }
        port.traced = true;
        let closed = port.entries.iter().any(|(key, cell)| {
            let owner = claims.keys.get(key).and_then(|index| {
                let policy = claims.intents[*index].policy;
                self.objects.policies.get(&policy).and_then(|state| state.slot)
            });
            cell.may(|entry| entry.is_some_and(|entry| !entry.open && Some(entry.policy) != owner))
        });
        let lost = claims.intents.iter().any(|claim| claim.conflict.is_some());
        if port.may_be_open() && (closed || lost) {
            port.revoked = port.revoked.wrapping_add(1);
        }
    }

    /// Makes an interface bare that has nothing to do any more: the row first.
    fn empty(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.may_be_open() {
            self.close_row(ifindex, port, Kinds::default());
        } else {
            self.clear(ifindex, port);
        }
    }

    fn vacate(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.device.is_none() && self.denied.contains_key(&ifindex) {
            // It may be there under another address, program and all: until that is known its claims stay.
            if port.may_be_open() {
                self.close_row(ifindex, port, Kinds::default());
            }
            return;
        }
        if !port.bare() {
            if port.device.is_some() {
                self.empty(ifindex, port);
            } else {
                self.clear(ifindex, port);
            }
            return;
        }
        port.forget_content();
        if port.program.is(&None) {
            port.troubles.remove(&Goal::Detached);
        } else if port.program.idle() && !port.blocked(Goal::Detached) {
            let op = self.send(What::Detach(ifindex), port.device, Op::Detach { ifindex });
            port.program.send(op, None);
            port.touched = op;
        }
    }

    fn clear(&mut self, ifindex: Ifindex, port: &mut Port) {
        if !port.quiet() || port.blocked(Goal::Cleared) {
            return;
        }
        let keys: Vec<RouteKey> = port.entries.keys().copied().collect();
        // With a device that is gone nobody was deselected.
        let removed = if port.device.is_some() && !port.stale {
            self.removed(port, &keys)
        } else {
            Vec::new()
        };
        let op = self.send(
            What::Clear { ifindex, removed },
            port.device,
            Op::ClearInterface { ifindex },
        );
        // A clear without a row says nothing new.
        port.last_epoch = port.present_epoch().or(port.last_epoch);
        port.clearing = Some(op);
        port.row.send(op, None);
        port.sources.send(op, BTreeSet::new());
        for cell in port.entries.values_mut() {
            cell.send(op, None);
        }
        port.touched = op;
    }

    /// The incarnation that the row may be open for.
    pub(super) fn target(&self, port: &Port, claims: &Claims) -> Option<Token> {
        let ready = port.ready.as_ref()?;
        if port.troubles.contains_key(&Goal::Sources) {
            return None;
        }
        let usable = claims
            .intents
            .iter()
            .any(|claim| claim.attachment == ready.attachment && claim.refused.is_none());
        (usable || !claims.kept.is_empty()).then_some(ready.token)
    }

    /// Whether a packet of this intent may be delivered by what the selector leads to.
    pub(super) fn granted(&self, state: &PolicyState, port: &Port, claim: &Claim, key: &RouteKey) -> bool {
        if state.current {
            return true;
        }
        let Some(slot) = state.slot.and_then(|slot| self.slots.get(&slot)) else {
            return false;
        };
        // Behind an empty selector nobody is reached.
        let empty = |value: &Option<PolicySlot>| value.as_ref().is_some_and(|v| v.selected.length == 0);
        if slot.cell.values().iter().all(empty) {
            return true;
        }
        // What is new in this generation must not reach the set of an earlier one.
        if let Some(spec) = state.served.as_ref().and_then(|served| served.spec.as_ref()) {
            let Some(consumer) = self.objects.attachments.get(&claim.attachment) else {
                return false;
            };
            let entitled = state
                .intents
                .get(&claim.attachment)
                .is_some_and(|intent| intent.entitled);
            return entitled
                && spec.consumers.matches(&consumer.object.labels)
                && crate::conflict::routes(spec, self.config.features).any(|route| route == *key);
        }
        port.entries.get(key).is_some_and(|cell| {
            cell.sure()
                .copied()
                .flatten()
                .is_some_and(|entry| entry.open && Some(entry.policy) == state.slot)
        })
    }

    pub(super) fn plans(&self, ifindex: Ifindex, port: &Port, claims: &Claims) -> Vec<Plan> {
        claims
            .intents
            .iter()
            .map(|claim| self.plan_of(ifindex, port, claim))
            .collect()
    }

    fn plan_of(&self, ifindex: Ifindex, port: &Port, claim: &Claim) -> Plan {
        let mut plan = Plan {
            policy: claim.policy,
            attachment: claim.attachment,
            slot: None,
            deliverable: false,
            proven: false,
            vetted: false,
            undecided: false,
        };
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return plan;
        };
        let Some(intent) = state.intents.get(&claim.attachment) else {
            return plan;
        };
        let slot = state
            .slot
            .and_then(|id| self.slots.get(&id).map(|slot| (id, slot)));
        plan.slot = slot
            .filter(|(_, slot)| slot.cell.may(Option::is_some) && slot.in_kernel())
            .map(|(id, _)| id);
        let locals = self.locals.state(claim);
        let allowed = claim.may_deliver()
            && !matches!(locals, LocalsState::Failed(trouble) if !trouble.silent)
            && state.full.is_empty()
            && intent.fallback == 0
            && intent
                .entries_trouble
                .as_ref()
                .is_none_or(|trouble| trouble.silent);
        let token = port
            .ready
            .as_ref()
            .filter(|ready| ready.attachment == claim.attachment)
            .map(|ready| ready.token);
        let Some((_, slot)) = slot else {
            plan.undecided = allowed && token.is_some() && state.progressing(self);
            return plan;
        };
        let reached = self.families_reached(slot, |member| member.0 != ifindex && self.is_ready(member));
        // An old set may keep a member that is gone for as long as nothing takes its place: nobody goes live over it.
        let whole = state.current
            || slot
                .members()
                .all(|(member, _)| member.0 == ifindex || self.is_ready(member));
        let reachable = claim.keys.iter().any(|key| reached.contain(key.address()));
        let granted = claim.keys.iter().any(|key| self.granted(state, port, claim, key));
        let known = matches!(locals, LocalsState::Known);
        // Of a set that an earlier life selected nobody can say who had the right to it, but for whom it had let go
        // live.
        let vetted = intent.vetted.is_some()
            && intent.vetted == port.device.map(|d| d.mac).zip(token.or(port.open_for()));
        let heir = vetted || state.current || state.served.as_ref().is_some_and(|s| s.spec.is_some());
        plan.deliverable = allowed
            && known
            && token.is_some()
            && reachable
            && whole
            && granted
            && heir
            && !claim.keys.is_empty();
        if let (Proof::Good(op, proven_for, keys), Some(token)) = (intent.proof, token) {
            plan.proven = allowed
                && proven_for == token
                && keys == Fingerprint::of(&claim.keys)
                && op > port.touched
                && op > intent.touched
                && op > slot.touched
                && !slot.is_about_to_move()
                && intent.proof_trouble.is_none();
        }
        plan.vetted = allowed && vetted && intent.proof_trouble.as_ref().is_none_or(|trouble| trouble.silent);
        let asked = match intent.proof {
            Proof::Asked(op, ..) => !self.is_silent(Some(op)),
            Proof::None | Proof::Good(..) => false,
        };
        plan.undecided = allowed
            && token.is_some()
            && !plan.proven
            && intent.proof_trouble.is_none()
            && (asked
                || plan.deliverable
                || matches!(locals, LocalsState::Awaited)
                || state.progressing(self));
        plan
    }

    /// Whether what is at an interface stays as it is, because not everything is known that decides about it.
    pub(crate) fn stays(&self, port: &Port, claims: &Claims) -> bool {
        // What a device that is gone has left is removed whoever it was for.
        let nobodys = port.device.is_some() && (port.attachments.is_empty() || claims.is_empty());
        !self.passed || self.frozen(port) || (nobodys && !self.may_remove())
    }
}
