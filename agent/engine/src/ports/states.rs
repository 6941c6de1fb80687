//! The states of the intents of an interface, judged once nothing more is planned.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Port;
use super::kinds::Kinds;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::families::Families;
use crate::gate::{Known, classify};
use crate::intent::{Facts, Fingerprint, Intent, Producers, Proof, judge};
use crate::locals::LocalsState;
use crate::model::{Entry, Ifindex};
use crate::objects::{AttachmentId, PolicyState};
use crate::plan::{Goal, Trouble};

/// What the row of an interface must say when it is open, beside token and epoch.
struct RowFacts {
    sources: BTreeSet<IpAddr>,
    kinds: Kinds,
    via: Option<Ifindex>,
}

impl Engine {
    /// What is wrong with a policy's slot or set.
    pub(crate) fn set_trouble<'a>(&'a self, state: &'a PolicyState) -> Option<&'a Trouble> {
        state.slot_trouble.as_ref().or_else(|| {
            state
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .and_then(|slot| slot.trouble.as_ref())
        })
    }

    /// A policy that does not fit fails as a whole, with need and have.
    pub(crate) fn full(&self, state: &PolicyState) -> Option<Trouble> {
        let first = state.full.first().and_then(|id| state.intents.get(id))?;
        let trouble = first.entries_trouble.clone()?;
        let destinations = state.spec.as_ref().map_or(0, |spec| spec.destinations.len());
        Some(Trouble {
            message: format!(
                "{}; the policy needs {} entries on this node; those of {} consumers were not written and take the default path",
                trouble.message,
                destinations * state.intents.len(),
                state.full.len(),
            )
            .into(),
            ..trouble
        })
    }

    /// Once nothing more is planned: asks the kernel about the intents of an interface, if there is anything to ask, and
    /// judges them. A state that a later plan takes back at once was never there.
    pub(crate) fn conclude(&mut self, ifindex: Ifindex) {
        let asks = self.dirty.proofs.remove(&ifindex);
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        if asks {
            let plans = self.plans(ifindex, &port, &claims);
            let target = self.target(&port, &claims);
            self.plan_proofs(&mut port, &claims, &plans, target);
        }
        port.intents_unwell = self.judge_port(&port, &claims);
        if port.is_unwell() {
            self.unwell.insert(ifindex);
        } else {
            self.unwell.remove(&ifindex);
        }
        self.ports.insert(ifindex, port);
    }

    /// Judges the intents of an interface. Whether something about one of them failed.
    fn judge_port(&mut self, port: &Port, claims: &Claims) -> bool {
        let mut unwell = false;
        let link = port
            .device
            .and_then(|device| self.interfaces.link(device.ifindex))
            .cloned();
        let facts = RowFacts {
            sources: self.wanted_sources(port),
            kinds: self.kinds(port, claims),
            via: self.answers_via(port),
        };
        let stuck = port.troubles.get(&Goal::Unclaimed).filter(|_| port.stuck(claims));
        for id in &port.attachments {
            let Some(attachment) = self.objects.attachments.get(id) else {
                continue;
            };
            let gate = classify(link.as_ref(), &port.known, attachment.object.expected);
            let lost = attachment.lost().cloned();
            let token = match &port.known {
                Known::Row(row) => link
                    .as_ref()
                    .and_then(|link| crate::gate::of_device(link, row.as_ref()))
                    .map(|identity| identity.token),
                Known::Unread | Known::Unreadable(_) => None,
            };
            for policy in attachment.consumes.clone() {
                let Some(state) = self.objects.policies.get(&policy) else {
                    continue;
                };
                let Some(intent) = state.intents.get(id) else {
                    continue;
                };
                unwell |= intent.has_trouble();
                let claim = claims
                    .intents
                    .iter()
                    .find(|claim| claim.policy == policy && claim.attachment == *id);
                let full = self.full(state);
                let refused = claim
                    .and_then(|claim| claim.refused.as_ref())
                    .map(|(reason, message)| (*reason, message.as_str()))
                    .or_else(|| state.refusal());
                let conflict = lost
                    .as_deref()
                    .or_else(|| claim.and_then(|claim| claim.conflict.as_deref()));
                let locals = claim.and_then(|claim| match self.locals.state(claim) {
                    LocalsState::Failed(trouble) => Some(trouble),
                    LocalsState::Known | LocalsState::Awaited => None,
                });
                let of_port = Self::worst_trouble(&port.troubles).or(stuck);
                let hindered = of_port.is_some() || full.is_some() || intent.entries_trouble.is_some();
                let trouble = of_port
                    .or(full.as_ref())
                    .or(locals)
                    .or_else(|| self.set_trouble(state))
                    .or(intent.entries_trouble.as_ref())
                    .or_else(|| {
                        intent
                            .proof_trouble
                            .as_ref()
                            .filter(|_| gate.token().is_some() && state.ready_for(*id) && !state.waiting)
                    });
                let judged = Facts {
                    refused,
                    conflict,
                    passed: self.passed,
                    trouble,
                    gate: &gate,
                    unreachable: claim.and_then(|claim| claim.unreachable.as_deref()),
                    unreadable: state.unreadable.as_deref(),
                    producers: self.producers_of(state, *id),
                    done: claim.is_some_and(|claim| self.done(port, state, intent, claim, &facts)),
                };
                let judged = judge(intent.state, &judged);
                self.set_hindered(policy, *id, hindered);
                self.set_state(policy, *id, judged, token);
            }
        }
        unwell
    }

    pub(crate) fn producers_of<'a>(&self, state: &'a PolicyState, consumer: AttachmentId) -> Producers<'a> {
        let coming = || state.unread || state.coming.iter().any(|coming| *coming != consumer);
        let ready = state.ready_for(consumer);
        let lacking = state.lacking_for(consumer).within(self.families_of(consumer));
        if (ready && lacking.is_empty()) || (!state.waiting && coming()) {
            Producers::Ready
        } else if ready {
            Producers::Missing(state.unreached.as_deref())
        } else if state.waiting {
            let serving = state
                .slot
                .and_then(|slot| self.slots.get(&slot))
                .is_some_and(|slot| slot.serves());
            Producers::Awaited { serving }
        } else {
            Producers::Missing(state.unreached.as_deref())
        }
    }

    /// Families in which a workload can send anything.
    fn families_of(&self, consumer: AttachmentId) -> Families {
        match self.objects.attachments.get(&consumer) {
            Some(state) if !state.object.addresses.is_empty() => {
                Families::of(state.object.addresses.iter().copied())
            }
            Some(_) | None => Families::BOTH,
        }
    }

    /// Everything that the intent needs is in the kernel, answered and proven.
    fn done(
        &self,
        port: &Port,
        state: &PolicyState,
        intent: &Intent,
        claim: &Claim,
        facts: &RowFacts,
    ) -> bool {
        let Some(ready) = port
            .ready
            .as_ref()
            .filter(|ready| ready.attachment == claim.attachment)
        else {
            return false;
        };
        let Some((id, slot)) = state
            .slot
            .and_then(|id| self.slots.get(&id).map(|slot| (id, slot)))
        else {
            return false;
        };
        let epoch = port.row.sure().copied().flatten().map_or(0, |row| row.epoch);
        let row = facts
            .kinds
            .row(Some(ready.token), epoch, !facts.sources.is_empty(), facts.via);
        let proven = match intent.proof {
            Proof::Good(op, token, keys) => {
                token == ready.token
                    && keys == Fingerprint::of(&claim.keys)
                    && op > port.touched
                    && op > intent.touched
                    && op > slot.touched
            }
            Proof::None | Proof::Asked(..) => false,
        };
        proven
            && state.current
            && slot.settled()
            && port.has_program()
            && port.row.is(&Some(row))
            && port.sources.is(&facts.sources)
            && port.revoked == port.covered
            && !claim.keys.is_empty()
            && claim.keys.iter().all(|key| {
                port.entries.get(key).is_some_and(|cell| {
                    cell.is(&Some(Entry {
                        policy: id,
                        open: true,
                    }))
                })
            })
    }
}
