//! Who has the right: of two attachments to one interface or address, of two policies to one destination.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::engine::Engine;
use crate::families::Families;
use crate::gate::{Known, of_device};
use crate::model::{Destination, FailReason, Features, Ifindex, Incarnation, PolicySpec, RouteKey};
use crate::objects::{AttachmentId, AttachmentState, PolicyId, PolicyState};
use crate::ports::Port;

/// What one intent claims on its interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) policy: PolicyId,
    pub(crate) attachment: AttachmentId,
    /// Destinations that are its own.
    pub(crate) keys: Vec<RouteKey>,
    /// All that it would have.
    pub(crate) wanted: BTreeSet<RouteKey>,
    /// Who has the right to one of them.
    pub(crate) conflict: Option<String>,
    /// It cannot be done: what it claims stays closed.
    pub(crate) refused: Option<(FailReason, String)>,
    /// Answers cannot be delivered to the consumer: what it claims stays closed.
    pub(crate) unreachable: Option<String>,
}

impl Claim {
    /// Whether nothing about the objects and the device forbids it.
    pub(crate) fn may_deliver(&self) -> bool {
        self.conflict.is_none() && self.refused.is_none() && self.unreachable.is_none()
    }
}

/// Everything that is claimed on one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    pub(crate) intents: Vec<Claim>,
    /// Owner of each destination, as an index into `intents`.
    pub(crate) keys: BTreeMap<RouteKey, usize>,
    /// Entries of policies whose content is not known: they stay as they are.
    pub(crate) kept: BTreeSet<RouteKey>,
}

impl Claims {
    /// Whether the kernel needs to know nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.kept.is_empty()
    }
}

/// What a policy claims, as far as the data plane can claim it.
pub(crate) fn routes(spec: &PolicySpec, features: Features) -> impl Iterator<Item = RouteKey> + '_ {
    spec.destinations
        .iter()
        .filter_map(move |destination| match destination {
            Destination::Service {
                address,
                protocol,
                port,
                target_port: _,
            } => Some(RouteKey::Service {
                address: *address,
                protocol: *protocol,
                port: *port,
            }),
            Destination::Prefix { address, length } if features.prefixes => Some(RouteKey::Prefix {
                address: *address,
                length: *length,
            }),
            Destination::Prefix { .. } => None,
        })
}

impl PolicyState {
    /// Why nothing of its present content is done.
    pub(crate) fn refusal(&self) -> Option<(FailReason, &str)> {
        self.refused
            .as_ref()
            .map(|(reason, message)| (*reason, message.as_str()))
            .or_else(|| {
                self.unsupported
                    .as_deref()
                    .map(|message| (FailReason::Unsupported, message))
            })
    }
}

impl Engine {
    /// What is claimed on an interface. Of two policies that claim one destination the older has all of its
    /// own; the younger fails as a whole and claims, closed, what no valid one takes.
    pub(crate) fn claims(&self, port: &Port) -> Claims {
        let mut claims = Claims::default();
        let mut candidates: Vec<(&PolicyState, PolicyId, &AttachmentState, AttachmentId)> = Vec::new();
        for id in &port.attachments {
            let Some(attachment) = self.objects.attachments.get(id) else {
                continue;
            };
            if attachment.interface_lost.is_some() {
                continue;
            }
            for policy in &attachment.consumes {
                if let Some(state) = self.objects.policies.get(policy) {
                    candidates.push((state, *policy, attachment, *id));
                }
            }
        }
        candidates.sort_by(|(p, _, a, _), (q, _, b, _)| p.age.cmp(&q.age).then(a.age().cmp(&b.age())));
        for (state, policy, attachment, id) in &candidates {
            let mut claim = Claim {
                policy: *policy,
                attachment: *id,
                keys: Vec::new(),
                wanted: BTreeSet::new(),
                conflict: None,
                refused: None,
                unreachable: None,
            };
            if let Some(spec) = state.spec.as_ref().filter(|_| !self.is_outdated(*policy)) {
                // What cannot be done is claimed all the same, closed: it fails closed.
                claim.wanted = routes(spec, self.config.features).collect();
                if let Some(message) = &state.unsupported {
                    claim.refused = Some((FailReason::Unsupported, message.clone()));
                }
            }
            let families = Families::of(claim.wanted.iter().map(RouteKey::address));
            claim.unreachable = self.unreachable(port, attachment, families);
            let winner = claim.wanted.iter().find_map(|key| {
                let owner = &claims.intents[*claims.keys.get(key)?];
                (owner.policy != *policy).then_some((key, owner.policy))
            });
            let index = claims.intents.len();
            if let Some((key, winner)) = winner {
                let name = self
                    .objects
                    .policies
                    .get(&winner)
                    .map(|winner| winner.object.name.to_string())
                    .unwrap_or_default();
                claim.conflict = Some(format!(
                    "{key} of this consumer belongs to the older policy {name}"
                ));
            } else {
                for key in &claim.wanted {
                    claims.keys.insert(*key, index);
                }
                claim.keys = claim.wanted.iter().copied().collect();
            }
            claims.intents.push(claim);
        }
        // What the losers claim although they have no right to deliver.
        for index in 0..claims.intents.len() {
            if claims.intents[index].conflict.is_none() {
                continue;
            }
            let left: Vec<RouteKey> = claims.intents[index]
                .wanted
                .iter()
                .filter(|key| !claims.keys.contains_key(key))
                .copied()
                .collect();
            for key in &left {
                claims.keys.insert(*key, index);
            }
            claims.intents[index].keys = left;
        }
        for claim in &mut claims.intents {
            let attachment = self.objects.attachments.get(&claim.attachment);
            if claim.conflict.is_none() {
                claim.conflict = attachment.and_then(|state| state.lost().cloned());
            }
        }
        self.keep(port, &mut claims);
        claims
    }

    /// What is left as it is: entries of policies whose content is not known and, before the lists are complete, of
    /// policies that are not known at all, whoever else claims them.
    fn keep(&self, port: &Port, claims: &mut Claims) {
        let complete = self.may_remove();
        if complete && self.kept_slots.is_empty() {
            return;
        }
        for (key, cell) in &port.entries {
            // What was written over it since, on the strength of a claim, was no longer theirs.
            let Some(entry) = cell.values().last().copied().flatten() else {
                continue;
            };
            let owner = self.slots.get(&entry.policy).and_then(|slot| slot.owner);
            let kept = self.kept_slots.contains(&entry.policy) || (!complete && owner.is_none());
            if !kept || (complete && claims.keys.contains_key(key)) {
                continue;
            }
            claims.keys.remove(key);
            claims.kept.insert(*key);
        }
    }

    /// Why answers of these families cannot be delivered to this consumer.
    fn unreachable(&self, port: &Port, attachment: &AttachmentState, families: Families) -> Option<String> {
        let via = self.answers_via(port)?;
        let object = &attachment.object;
        if !self.config.features.neighbour_delivery {
            return Some(format!(
                "interface {} is not a veth with its peer in another namespace: answers to such a consumer come with a later version (neighbour delivery)",
                object.interface
            ));
        }
        let lacks = if object.addresses.is_empty() {
            format!("attachment {} names none", object.name)
        } else if families.v6
            && !self.interfaces.speaks_ipv6(via)
            && object.addresses.iter().any(IpAddr::is_ipv6)
        {
            format!("device {via}, by which they leave, has no IPv6")
        } else {
            return None;
        };
        Some(format!(
            "answers reach interface {} by the address of its workload, and {lacks}",
            object.interface
        ))
    }

    /// Decides who of several attachments has the right to an interface, and to their addresses.
    pub(crate) fn contest_interface(&mut self, holder: Option<Ifindex>, ids: &[AttachmentId]) {
        let row = holder.and_then(|ifindex| {
            let link = self.interfaces.link(ifindex)?;
            match &self.ports.get(&ifindex)?.known {
                Known::Row(row) => of_device(link, row.as_ref()),
                Known::Unread | Known::Unreadable(_) => None,
            }
        });
        let winner = self.interface_winner(ids, row.map(|identity| identity.incarnation));
        for id in ids {
            let interface_lost = self.interface_loss(*id, ids, winner);
            let Some(state) = self.objects.attachments.get_mut(id) else {
                continue;
            };
            if state.interface_lost != interface_lost {
                state.interface_lost = interface_lost;
                let consumes = state.consumes.clone();
                let addresses = state.object.addresses.clone();
                self.forget_tries(*id, &consumes);
                self.disentitle(*id, &consumes);
                self.judge_sharers(*id, &addresses);
            }
        }
        for id in ids {
            let address_lost = self.address_loss(*id);
            let Some(state) = self.objects.attachments.get_mut(id) else {
                continue;
            };
            if state.address_lost != address_lost {
                state.address_lost = address_lost;
                let produces = state.produces.clone();
                self.dirty.policies.extend(produces);
            }
            self.dirty_attachment(*id);
        }
    }

    /// Who wins an interface for sure: the registered identity; else, among those that name none, the oldest.
    fn interface_winner(
        &self,
        ids: &[AttachmentId],
        registered: Option<Option<Incarnation>>,
    ) -> Option<(AttachmentId, &'static str)> {
        let oldest = |like: &dyn Fn(&AttachmentState) -> bool| {
            ids.iter()
                .filter_map(|id| self.objects.attachments.get(id).map(|state| (state, *id)))
                .filter(|(state, _)| like(state))
                .min_by(|(a, _), (b, _)| a.age().cmp(&b.age()))
                .map(|(_, id)| id)
        };
        if let Some(Some(incarnation)) = registered
            && let Some(id) = oldest(&|state| state.object.expected == Some(incarnation))
        {
            return Some((id, "its identity is the registered one"));
        }
        let nameless = oldest(&|state| state.object.expected.is_none());
        let all_nameless = ids.iter().all(|id| {
            self.objects
                .attachments
                .get(id)
                .is_none_or(|state| state.object.expected.is_none())
        });
        nameless
            .filter(|_| all_nameless || registered.is_some())
            .map(|id| (id, "it is the oldest that names no identity"))
    }

    fn interface_loss(
        &self,
        id: AttachmentId,
        ids: &[AttachmentId],
        winner: Option<(AttachmentId, &'static str)>,
    ) -> Option<String> {
        if ids.len() < 2 {
            return None;
        }
        let (winner, why) = winner?;
        if winner == id {
            return None;
        }
        let state = self.objects.attachments.get(&winner)?;
        Some(format!(
            "interface {} belongs to attachment {}: {why}",
            state.object.interface, state.object.name
        ))
    }

    /// Whether an older attachment of another interface has one of its addresses.
    fn address_loss(&self, id: AttachmentId) -> Option<String> {
        let state = self.objects.attachments.get(&id)?;
        state.object.addresses.iter().find_map(|address| {
            let sharers = self.objects.by_address.get(address)?;
            if sharers.len() < 2 {
                return None;
            }
            sharers
                .iter()
                .filter_map(|other| self.objects.attachments.get(other))
                .find(|other| {
                    other.interface_lost.is_none()
                        && other.object.interface != state.object.interface
                        && other.age() < state.age()
                })
                .map(|other| {
                    format!(
                        "address {address} belongs to the older attachment {}",
                        other.object.name
                    )
                })
        })
    }

    fn judge_sharers(&mut self, id: AttachmentId, addresses: &BTreeSet<IpAddr>) {
        for address in addresses {
            for other in self.objects.by_address.get(address).into_iter().flatten() {
                if *other != id
                    && let Some(state) = self.objects.attachments.get(other)
                {
                    self.dirty.names.insert(state.object.interface.clone());
                }
            }
        }
    }
}
