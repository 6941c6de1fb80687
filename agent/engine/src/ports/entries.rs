//! The route entries of an interface: claimed, opened, closed, passed on, taken away.

use std::collections::{BTreeMap, BTreeSet};

use super::kinds::Kinds;
use super::plan::Plan;
use super::{Port, closed_of, is_open};
use crate::cell::Cell;
use crate::conflict::{Claim, Claims};
use crate::engine::Engine;
use crate::model::{Entry, FailReason, Ifindex, Op, OpError, OpResult, RouteKey, SlotId, Token, WhileHeld};
use crate::objects::{AttachmentId, PolicyId};
use crate::plan::{Goal, Removed, Trouble, What};
use crate::producers::{MemberKey, SlotState};

impl Engine {
    /// Brings the route entries towards what is wanted.
    pub(super) fn plan_entries(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        claims: &Claims,
        plans: &[Plan],
        target: Option<Token>,
        opening: bool,
    ) {
        let row_may_be_open = port.may_be_open();
        let live = row_may_be_open || opening;
        let uncovered = port.revoked != port.covered;
        // The row is about to be closed: what is open behind it may stay so, unless that fails.
        let closing = row_may_be_open
            && port.open_for().is_none_or(|token| target != Some(token))
            && !port.troubles.contains_key(&Goal::RowClosed);
        let keys: BTreeSet<RouteKey> = claims.keys.keys().chain(port.entries.keys()).copied().collect();
        let mut deletes: Vec<RouteKey> = Vec::new();
        // Of these what a write that failed may have left of what is still wanted: no news, however often it is tried.
        let mut leftovers: BTreeSet<RouteKey> = BTreeSet::new();
        let mut revokes: BTreeMap<RouteKey, Entry> = BTreeMap::new();
        let mut writes: BTreeMap<usize, BTreeMap<RouteKey, Entry>> = BTreeMap::new();
        let nothing = Cell::Sure(None);
        for key in keys {
            let cell = port.entries.get(&key).unwrap_or(&nothing);
            if !cell.idle() {
                continue;
            }
            let may_deliver = row_may_be_open && cell.may(|entry| is_open(*entry));
            let claim = claims.keys.get(&key).copied();
            let slot = claim.and_then(|index| plans[index].slot);
            let (Some(index), Some(slot)) = (claim, slot) else {
                if claims.kept.contains(&key) {
                    // Nobody can say what it wants any more: it does not go live with the others, and what somebody
                    // else changed is put back closed.
                    let goes_live = opening && cell.may(|entry| is_open(*entry));
                    if self.may_remove() && (goes_live || cell.sure().is_none()) {
                        let left = cell.values().last().copied().flatten();
                        revokes.extend(left.map(|entry| (key, Entry { open: false, ..entry })));
                    }
                    continue;
                }
                if claim.is_none() && !self.may_remove() {
                    continue;
                }
                // Nobody's, or its new owner has no slot yet: closed first, so that a crash in the middle
                // leaves a trace, then gone. There is no slot for a new owner as long as entries keep one in
                // use that is nobody's; but a claim that lost stands in for the one that won and has no room.
                let no_room = claim.is_some_and(|index| {
                    let policy = self.objects.policies.get(&plans[index].policy);
                    policy.is_some_and(|state| state.slot_trouble.is_some())
                });
                let stands_in = no_room && self.is_claimed_by_its_owner(cell, claims, &key);
                let stays = (row_may_be_open && uncovered)
                    || cell.is(&None)
                    || self.stands_in_for_another(port, claims, &key);
                let homeless = claim.is_none() || (no_room && !stands_in && self.may_remove());
                // It does not go live with the others, either.
                let stays_closed = stands_in || (opening && claim.is_some());
                if may_deliver || (stays_closed && cell.may(|entry| is_open(*entry))) {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                } else if homeless && !stays {
                    deletes.push(key);
                }
                continue;
            };
            let plan = &plans[index];
            let claim = &claims.intents[index];
            let Some(state) = self.objects.policies.get(&plan.policy) else {
                continue;
            };
            let Some(intent) = state.intents.get(&plan.attachment) else {
                continue;
            };
            if intent.fallback == 2 && cell.sure().is_none() {
                // What may be there of it goes.
                deletes.push(key);
                leftovers.insert(key);
                continue;
            }
            if intent.entries_trouble.as_ref().is_some_and(|t| t.blocked) && cell.is(&None) {
                continue;
            }
            let other = cell.may(|entry| entry.is_some_and(|entry| entry.open && entry.policy != slot));
            let forbidden = !claim.may_deliver()
                || !state.full.is_empty()
                || intent.fallback > 0
                || intent
                    .proof_trouble
                    .as_ref()
                    .is_some_and(|trouble| !trouble.silent)
                || !self.granted(state, port, claim, &key);
            let open_here = cell
                .sure()
                .copied()
                .flatten()
                .is_some_and(|entry| entry.open && entry.policy == slot);
            let open = if forbidden {
                false
            } else if !live {
                true
            } else if row_may_be_open && other {
                // A destination passes to another policy: claimed in between, unless it can be proven before
                // that one's set delivers for it.
                let passes_on = self.may_take_over(port, claims, plan, &key, target);
                if passes_on && !plan.proven && plan.undecided {
                    continue;
                }
                passes_on && plan.proven
            } else {
                // What was open behind a row that was closed meanwhile goes live anew with it.
                let goes_on = row_may_be_open && (plan.vetted || closing);
                (plan.proven && plan.deliverable) || (open_here && goes_on)
            };
            let wanted = Entry { policy: slot, open };
            let closes = !open && cell.may(|entry| is_open(*entry));
            let others = cell.may(|entry| entry.is_some_and(|entry| entry.policy != slot));
            if closes && !others && self.stops_passing(claim) {
                continue;
            }
            if others && self.catches_another(port, claims, &key) {
                if may_deliver {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                }
                continue;
            }
            if (!closes || others) && !self.slots.get(&slot).is_some_and(|slot| slot.cell.idle()) {
                // What opens or claims stands on the slot; while that is being written it waits, and what delivers
                // to somebody else's is closed where it is: this one may still let pass what its policy does not.
                if may_deliver && closes {
                    revokes.extend(closed_of(cell).map(|entry| (key, entry)));
                }
                continue;
            }
            if !cell.is(&Some(wanted)) {
                writes.entry(index).or_default().insert(key, wanted);
            }
        }
        if revokes.is_empty() && deletes.is_empty() {
            port.troubles.remove(&Goal::Unclaimed);
        }
        if row_may_be_open && !deletes.is_empty() {
            // What a wider one would deliver that is about to be closed goes when that is closed; what a wider one would
            // deliver to somebody who is gone, when its set has moved on.
            let closed = writes.values().flatten().chain(&revokes);
            let closing: BTreeSet<RouteKey> = closed
                .filter(|(_, entry)| !entry.open)
                .map(|(key, _)| *key)
                .chain(
                    port.entries
                        .iter()
                        .filter(|(_, cell)| !cell.idle())
                        .map(|(key, _)| *key),
                )
                .filter(|key| {
                    port.entries
                        .get(key)
                        .is_some_and(|cell| cell.may(|entry| is_open(*entry)))
                })
                .collect();
            deletes.retain(|key| {
                let closes = closing.iter().any(|other| other != key && other.overlaps(key));
                let delivers_wrongly = || {
                    port.entries.iter().any(|(wider, cell)| {
                        wider.is_wider_than(key) && self.delivers_to_somebody_gone(ifindex, cell)
                    })
                };
                !closes && !delivers_wrongly()
            });
        }
        for (index, claim) in claims.intents.iter().enumerate() {
            if !writes.contains_key(&index) && self.is_claimed_after_all(port, claim, plans[index].slot) {
                self.entries_right(claim.policy, claim.attachment);
                // What failed kept it from more than its entries.
                self.dirty.ports.insert(ifindex);
            }
        }
        for (index, entries) in writes {
            self.write_entries(ifindex, port, &plans[index], entries, live, target);
        }
        if !port.blocked(Goal::Unclaimed) {
            self.take_entries_away(ifindex, port, revokes, deletes, &leftovers);
        } else if !revokes.is_empty() {
            // It goes on delivering although nobody wants it: the whole interface is closed.
            port.troubles.remove(&Goal::RowOpen);
        }
    }

    /// Whether the set that an entry may deliver to has a member, beside the consumer itself, that is not ready any more.
    fn delivers_to_somebody_gone(&self, consumer: Ifindex, cell: &Cell<Option<Entry>>) -> bool {
        let open = cell.values().iter().flatten().filter(|entry| entry.open);
        open.filter_map(|entry| self.slots.get(&entry.policy))
            .flat_map(|slot| &slot.sets)
            .flat_map(|set| set.members.keys())
            .any(|member| member.0 != consumer && !self.is_ready(*member))
    }

    /// Whether an incarnation is ready that a set leads to.
    pub(super) fn is_ready(&self, (member, token): MemberKey) -> bool {
        let ready = self.ports.get(&member).and_then(|port| port.ready.as_ref());
        ready.is_some_and(|ready| ready.token == token)
    }

    /// Whether entries that could not be written once are there although nothing is left to be written.
    fn is_claimed_after_all(&self, port: &Port, claim: &Claim, slot: Option<SlotId>) -> bool {
        let tried_again = self.intent(claim.policy, claim.attachment).is_some_and(|intent| {
            let trouble = intent.entries_trouble.as_ref();
            trouble.is_some_and(|trouble| !trouble.blocked) && intent.fallback == 0
        });
        tried_again
            && claim.keys.iter().all(|key| {
                let entry = port.entries.get(key).and_then(Cell::sure).copied().flatten();
                entry.is_some_and(|entry| Some(entry.policy) == slot)
            })
    }

    /// The entries of an intent are in the kernel.
    fn entries_right(&mut self, policy: PolicyId, attachment: AttachmentId) {
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let trouble = state
            .intents
            .get_mut(&attachment)
            .and_then(|intent| intent.entries_trouble.take());
        if trouble.is_some() {
            self.dirty.touched.insert(policy);
        }
        if state.full.remove(&attachment) {
            self.dirty.policies.insert(policy);
        }
    }

    /// Whether packets to a destination that is claimed, and about to be written, would leak without this entry: of two
    /// that overlap the one goes when the other is there.
    pub(super) fn stands_in_for_another(&self, port: &Port, claims: &Claims, key: &RouteKey) -> bool {
        claims.keys.iter().any(|(claimed, index)| {
            claimed != key && claimed.overlaps(key) && self.is_coming(port, &claims.intents[*index], claimed)
        })
    }

    /// Whether packets to another destination, whose own entry is about to be written, are caught by this entry until
    /// then: it goes on leading to the policy that has caught them so far.
    fn catches_another(&self, port: &Port, claims: &Claims, key: &RouteKey) -> bool {
        claims.keys.iter().any(|(claimed, index)| {
            key.is_wider_than(claimed)
                && port
                    .entries
                    .get(claimed)
                    .is_none_or(|cell| cell.may(Option::is_none))
                && self.is_coming(port, &claims.intents[*index], claimed)
        })
    }

    /// Whether a destination is not claimed in the kernel yet, and nothing failed that it waits for.
    fn is_coming(&self, port: &Port, claim: &Claim, key: &RouteKey) -> bool {
        let announced = port.row.sure().copied().flatten().is_some_and(|row| {
            let kinds = Kinds::of(std::iter::once(key));
            Kinds::of_row(&row).contain(kinds)
        });
        let nothing = Cell::Sure(None);
        let cell = port.entries.get(key).unwrap_or(&nothing);
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return false;
        };
        let there = cell.sure().copied().flatten().map(|entry| entry.policy);
        if announced && there.is_some() && there == state.slot {
            return false;
        }
        // A set that is in trouble keeps no entry from being written: one without a slot has nothing to lead to.
        let slot = state.slot.and_then(|slot| self.slots.get(&slot));
        let homeless = self.set_trouble(state).is_some() && !slot.is_some_and(SlotState::in_kernel);
        let failed = homeless
            || !state.full.is_empty()
            || port.blocked(Goal::RowClosed)
            || port.blocked(Goal::RowOpen)
            || state
                .intents
                .get(&claim.attachment)
                .is_none_or(|intent| intent.entries_trouble.is_some() || intent.fallback > 0);
        !failed || !cell.idle()
    }

    /// Whether the policy that an entry leads to claims this destination too, without the right to it.
    fn is_claimed_by_its_owner(&self, cell: &Cell<Option<Entry>>, claims: &Claims, key: &RouteKey) -> bool {
        cell.values().iter().flatten().all(|entry| {
            let owner = self.slots.get(&entry.policy).and_then(|slot| slot.owner);
            claims
                .intents
                .iter()
                .any(|claim| Some(claim.policy) == owner && claim.wanted.contains(key))
        })
    }

    /// Whether one write may make a destination that another policy has one of this intent: the row is open for it,
    /// its set is selected, and what is left of the old owner will be seen after a crash.
    pub(super) fn may_take_over(
        &self,
        port: &Port,
        claims: &Claims,
        plan: &Plan,
        key: &RouteKey,
        target: Option<Token>,
    ) -> bool {
        let current = self
            .objects
            .policies
            .get(&plan.policy)
            .is_some_and(|state| state.current);
        let row_right = target.is_some()
            && port.open_for() == target
            && !port.troubles.contains_key(&Goal::RowOpen)
            && !port.troubles.contains_key(&Goal::RowClosed);
        let cell = port.entries.get(key).filter(|cell| cell.sure().is_some());
        plan.deliverable
            && current
            && row_right
            && cell.is_some_and(|cell| self.leaves_a_trace(cell, claims, key))
    }

    /// Whether the next life would see that flows of the old owner may still be there.
    fn leaves_a_trace(&self, cell: &Cell<Option<Entry>>, claims: &Claims, key: &RouteKey) -> bool {
        cell.values().iter().flatten().all(|entry| {
            let owner = self.slots.get(&entry.policy).and_then(|slot| slot.owner);
            match owner {
                None => true,
                Some(owner) => claims.intents.iter().any(|claim| {
                    claim.policy == owner && claim.conflict.is_some() && claim.wanted.contains(key)
                }),
            }
        })
    }

    fn write_entries(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        plan: &Plan,
        entries: BTreeMap<RouteKey, Entry>,
        live: bool,
        target: Option<Token>,
    ) {
        let nothing = Cell::Sure(None);
        let row_may_be_open = port.may_be_open();
        let mut revoking = false;
        let mut only_opens = true;
        for (key, entry) in &entries {
            let cell = port.entries.get(key).unwrap_or(&nothing);
            revoking |= row_may_be_open
                && cell.may(|old| {
                    old.is_some_and(|old| old.open && (!entry.open || old.policy != entry.policy))
                });
            only_opens &= entry.open
                && cell.is(&Some(Entry {
                    open: false,
                    ..*entry
                }));
        }
        let opens = entries.values().any(|entry| entry.open);
        let keys: Vec<RouteKey> = entries.keys().copied().collect();
        let (policy, attachment) = (plan.policy, plan.attachment);
        let fallback = self
            .intent(policy, attachment)
            .map_or(0, |intent| intent.fallback);
        let what = What::Entries {
            ifindex,
            policy,
            attachment,
            keys,
            revoking,
            fallback,
        };
        let op = self.send(
            what,
            port.device,
            Op::WriteEntries {
                ifindex,
                entries: entries.clone(),
            },
        );
        for (key, entry) in entries {
            port.entries
                .entry(key)
                .or_insert(Cell::Sure(None))
                .send(op, Some(entry));
        }
        if revoking {
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
        let mac = port.device.map(|device| device.mac);
        if let Some(intent) = self.intent_mut(policy, attachment) {
            // An opening on the strength of a proof leaves the proof good.
            if !(only_opens && live && plan.proven) {
                intent.touched = op;
            }
            if opens && live {
                intent.vetted = mac.zip(target);
            } else if opens {
                intent.vetted = None;
            }
        }
    }

    fn take_entries_away(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        revokes: BTreeMap<RouteKey, Entry>,
        deletes: Vec<RouteKey>,
        leftovers: &BTreeSet<RouteKey>,
    ) {
        if !revokes.is_empty() {
            let keys: Vec<RouteKey> = revokes.keys().copied().collect();
            let op = self.send(
                What::Revoke { ifindex, keys },
                port.device,
                Op::WriteEntries {
                    ifindex,
                    entries: revokes.clone(),
                },
            );
            for (key, entry) in revokes {
                if let Some(cell) = port.entries.get_mut(&key) {
                    cell.send(op, Some(entry));
                }
            }
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
        if deletes.is_empty() {
            return;
        }
        let unwanted: Vec<RouteKey> = deletes
            .iter()
            .filter(|key| !leftovers.contains(key))
            .copied()
            .collect();
        let removed = self.removed(port, &unwanted);
        let delivering = port.may_be_open()
            && deletes.iter().any(|key| {
                port.entries
                    .get(key)
                    .is_some_and(|cell| cell.may(|entry| is_open(*entry)))
            });
        let op = self.send(
            What::Delete {
                ifindex,
                keys: deletes.clone(),
                removed,
            },
            port.device,
            Op::DeleteEntries {
                ifindex,
                keys: deletes.iter().copied().collect(),
            },
        );
        for key in deletes {
            if let Some(cell) = port.entries.get_mut(&key) {
                cell.send(op, None);
            }
        }
        if delivering {
            port.revoked = port.revoked.wrapping_add(1);
            port.revoking.insert(op);
        }
    }

    /// Who loses how many entries.
    pub(super) fn removed(&self, port: &Port, keys: &[RouteKey]) -> Vec<Removed> {
        let mut counts: BTreeMap<SlotId, u32> = BTreeMap::new();
        for key in keys {
            let slot = port.entries.get(key).and_then(|cell| {
                cell.values()
                    .iter()
                    .flatten()
                    .next_back()
                    .map(|entry| entry.policy)
            });
            if let Some(slot) = slot {
                *counts.entry(slot).or_default() += 1;
            }
        }
        let consumer = port
            .attachments
            .first()
            .and_then(|id| self.objects.attachments.get(id))
            .map(|state| state.object.name.clone());
        counts
            .into_iter()
            .map(|(slot, keys)| Removed {
                slot,
                consumer: consumer.clone(),
                keys,
            })
            .collect()
    }

    /// Whether the slot of a policy that drops is being written and may still let pass: what is closed before the answer
    /// leaks.
    pub(super) fn stops_passing(&self, claim: &Claim) -> bool {
        self.objects.policies.get(&claim.policy).is_some_and(|state| {
            let spec = state.spec.as_ref();
            let slot = state.slot.and_then(|slot| self.slots.get(&slot));
            spec.is_some_and(|spec| spec.while_held == WhileHeld::Drop)
                && slot.is_some_and(|slot| slot.may_pass() && !slot.cell.idle())
                && !self.is_silent(slot.and_then(|slot| slot.cell.flight()))
        })
    }

    /// Whether a destination is claimed as far as it can be.
    pub(super) fn claimed(&self, port: &Port, key: &RouteKey, claim: &Claim) -> bool {
        let Some(state) = self.objects.policies.get(&claim.policy) else {
            return true;
        };
        let written = port
            .entries
            .get(key)
            .and_then(Cell::sure)
            .copied()
            .flatten()
            .is_some_and(|entry| Some(entry.policy) == state.slot);
        let failed = state
            .intents
            .get(&claim.attachment)
            .is_some_and(|intent| intent.entries_trouble.is_some());
        written || failed || self.set_trouble(state).is_some()
    }

    /// The entries of an intent were written, or not.
    pub(crate) fn entries_answered(
        &mut self,
        (policy, attachment): (PolicyId, AttachmentId),
        keys: &[RouteKey],
        fallback: u8,
        result: OpResult,
    ) {
        let port = self
            .objects
            .attachments
            .get(&attachment)
            .and_then(|state| state.port)
            .and_then(|ifindex| self.ports.get(&ifindex));
        let all_exist = port.is_some_and(|port| {
            let mut cells = keys.iter().filter_map(|key| port.entries.get(key));
            cells.all(|cell| !cell.may(Option::is_none))
        });
        // Who has lost all of them to another meanwhile has nothing that failed: that one writes them anew.
        let lost = result.is_err()
            && port.is_none_or(|port| {
                let claims = self.claims(port);
                let mut owners = keys.iter().filter_map(|key| claims.keys.get(key));
                !owners.any(|index| {
                    let owner = &claims.intents[*index];
                    (owner.policy, owner.attachment) == (policy, attachment)
                })
            });
        if lost {
            return;
        }
        let Some(state) = self.objects.policies.get_mut(&policy) else {
            return;
        };
        let Some(intent) = state.intents.get_mut(&attachment) else {
            return;
        };
        match result {
            Ok(_) => {
                if fallback == 0 && intent.fallback == 0 {
                    self.entries_right(policy, attachment);
                }
            }
            Err(error) => {
                if matches!(error, OpError::Full { .. }) && state.full.insert(attachment) {
                    self.dirty.policies.insert(policy);
                }
                let mut trouble = Trouble::of(&error, FailReason::MapWriteFailed);
                if !all_exist {
                    trouble.message =
                        format!("{error}; the traffic to what could not be claimed takes the default path")
                            .into();
                }
                intent.entries_trouble = Some(trouble);
                self.dirty.touched.insert(policy);
                // What may be open is closed if it is sure to exist, else deleted.
                intent.fallback = if all_exist && fallback == 0 { 1 } else { 2 };
            }
        }
    }
}
