//! Desired objects, and which of them belong together. Every lookup goes through an index: what one edit
//! costs follows what it touches.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::engine::Engine;
use crate::families::Families;
use crate::intent::Intent;
use crate::model::{
    Age, Attachment, Boot, Destination, FailReason, Ifindex, Now, ObjectChange, ObjectName, Policy,
    PolicySlot, PolicySpec, Selector, SlotId, State,
};
use crate::plan::Trouble;
use crate::since::Mark;
use crate::view::{Counts, PolicyView};

/// Names a policy (one uid) within this life.
pub(crate) type PolicyId = u32;
/// Names an attachment (one uid) within this life.
pub(crate) type AttachmentId = u32;

/// An attachment and what hangs on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AttachmentState {
    pub(crate) object: Attachment,
    /// The device that has its interface name.
    pub(crate) port: Option<Ifindex>,
    /// Policies that select it as a consumer.
    pub(crate) consumes: BTreeSet<PolicyId>,
    /// Policies that select it as a producer.
    pub(crate) produces: BTreeSet<PolicyId>,
    /// Another attachment has the right to its interface.
    pub(crate) interface_lost: Option<String>,
    /// Another attachment has the right to one of its addresses.
    pub(crate) address_lost: Option<String>,
}

impl AttachmentState {
    pub(crate) fn age(&self) -> (i64, &str) {
        (self.object.created_ms, &self.object.uid.0)
    }

    /// Why it has no right to its interface or address.
    pub(crate) fn lost(&self) -> Option<&String> {
        self.interface_lost.as_ref().or(self.address_lost.as_ref())
    }
}

/// What the selected set serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Served {
    pub(crate) generation: u64,
    pub(crate) since_ms: i64,
    /// The content of that generation; not known of one that an earlier life switched to.
    pub(crate) spec: Option<Arc<PolicySpec>>,
}

impl Served {
    /// What an earlier life switched to.
    pub(crate) const fn before(value: &PolicySlot) -> Self {
        Self {
            generation: value.served_generation,
            since_ms: value.served_since_ms,
            spec: None,
        }
    }
}

/// A policy (one uid) and what hangs on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PolicyState {
    pub(crate) object: Policy,
    pub(crate) age: Age,
    /// What is in force: the content, or the last good one.
    pub(crate) spec: Option<Arc<PolicySpec>>,
    pub(crate) spec_generation: u64,
    /// The present content was refused.
    pub(crate) refused: Option<(FailReason, String)>,
    /// The data plane does not do what it asks for.
    pub(crate) unsupported: Option<String>,
    pub(crate) intents: BTreeMap<AttachmentId, Intent>,
    pub(crate) producers: BTreeSet<AttachmentId>,
    pub(crate) covers: u64,

    pub(crate) slot: Option<SlotId>,
    /// There is no slot to be had.
    pub(crate) slot_trouble: Option<Trouble>,
    /// Families of its destinations.
    pub(crate) families: Families,
    /// Producers that are selected and ready, and for which of these families.
    pub(crate) ready: BTreeMap<AttachmentId, Families>,
    /// Why one that is ready does not serve every family.
    pub(crate) unreached: Option<String>,
    /// Producers that are selected and ready but for the program, which is on its way.
    pub(crate) coming: BTreeSet<AttachmentId>,
    /// Something failed on the interface of a selected producer, and is tried again.
    pub(crate) producer_trouble: bool,
    /// A switch waits for a ready producer.
    pub(crate) waiting: bool,
    pub(crate) waiting_since: Option<Boot>,
    pub(crate) overdue_said: bool,
    /// The selector leads to exactly the set that this generation wants.
    pub(crate) current: bool,
    pub(crate) served: Option<Served>,
    /// A producer's identity has not been read yet: the set stays as adopted.
    pub(crate) unread: bool,
    /// A producer's identity could never be read: the set stays as adopted.
    pub(crate) unreadable: Option<String>,
    /// Consumers whose entries did not fit.
    pub(crate) full: BTreeSet<AttachmentId>,
    /// What its intents see of it.
    pub(crate) face: Option<crate::producers::Face>,

    /// Intents, worst state first, oldest first.
    pub(crate) order: BTreeSet<(u8, Boot, AttachmentId)>,
    /// Held intents, oldest hold first.
    pub(crate) holds: BTreeSet<(Boot, AttachmentId)>,
    pub(crate) counts: Counts,
    pub(crate) recheck: Option<Backoff>,

    /// First sight of the present generation.
    pub(crate) seen: Now,
    pub(crate) applied: u64,
    pub(crate) proven: u64,
    pub(crate) behind_since: Option<Now>,
    /// A selected producer is ready.
    #[serde(skip)]
    pub(crate) supplied: Mark<bool>,
    pub(crate) view: Option<PolicyView>,
}

/// Where a selector is found: its namespace and one pair that it demands, if it demands any.
type IndexKey = (String, Option<(String, String)>);

/// All objects.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Objects {
    pub(crate) policies: BTreeMap<PolicyId, PolicyState>,
    pub(crate) policy_names: BTreeMap<ObjectName, PolicyId>,
    pub(crate) attachments: BTreeMap<AttachmentId, AttachmentState>,
    pub(crate) attachment_names: BTreeMap<ObjectName, AttachmentId>,
    pub(crate) by_interface: BTreeMap<String, BTreeSet<AttachmentId>>,
    pub(crate) by_address: BTreeMap<IpAddr, BTreeSet<AttachmentId>>,
    /// Policies whose consumers or producers are found there.
    selectors: BTreeMap<IndexKey, BTreeSet<PolicyId>>,
    /// Attachments that carry the pair (or, without a pair, that are in the namespace).
    labelled: BTreeMap<IndexKey, BTreeSet<AttachmentId>>,
    next_policy: PolicyId,
    next_attachment: AttachmentId,
}

fn index_key(namespace: &str, selector: &Selector) -> IndexKey {
    let pair = selector.match_labels.iter().next();
    (
        namespace.to_owned(),
        pair.map(|(key, value)| (key.clone(), value.clone())),
    )
}

fn label_keys(object: &Attachment) -> impl Iterator<Item = IndexKey> + '_ {
    let namespace = &object.name.namespace;
    std::iter::once((namespace.clone(), None)).chain(
        object
            .labels
            .iter()
            .map(|(key, value)| (namespace.clone(), Some((key.clone(), value.clone())))),
    )
}

fn index_add<K: Ord, V: Ord>(index: &mut BTreeMap<K, BTreeSet<V>>, key: K, value: V) {
    index.entry(key).or_default().insert(value);
}

fn index_remove<K: Ord, V: Ord>(index: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(values) = index.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            index.remove(key);
        }
    }
}

impl PolicyState {
    /// Whose traffic, as far as it can be known.
    pub(crate) fn consumers(&self) -> Option<&Selector> {
        match &self.spec {
            Some(spec) => Some(&spec.consumers),
            None => self
                .object
                .content
                .as_ref()
                .err()
                .and_then(|r| r.consumers.as_ref()),
        }
    }

    /// Consumers that are held or failed.
    pub(crate) fn worst(&self) -> impl Iterator<Item = AttachmentId> {
        self.order
            .iter()
            .take_while(|(rank, _, _)| *rank < crate::intent::rank(State::Pending))
            .map(|(_, _, attachment)| *attachment)
    }

    /// Producers that it selects and that are not ready, or whose interfaces may be in trouble.
    pub(crate) fn unready_producers(&self) -> impl Iterator<Item = AttachmentId> {
        let concerned = |producer: &&AttachmentId| self.is_concerned_by(producer);
        self.producers.iter().filter(concerned).copied()
    }

    /// Whether a recheck looks at this producer of it.
    pub(crate) fn is_concerned_by(&self, producer: &AttachmentId) -> bool {
        self.producer_trouble || !self.ready.contains_key(producer)
    }

    fn index_keys(&self) -> BTreeSet<IndexKey> {
        let namespace = &self.object.name.namespace;
        let producers = self.spec.as_ref().map(|spec| &spec.producers);
        self.consumers()
            .into_iter()
            .chain(producers)
            .map(|selector| index_key(namespace, selector))
            .collect()
    }
}

impl Objects {
    /// Attachments that a selector matches.
    fn matching(&self, namespace: &str, selector: &Selector) -> BTreeSet<AttachmentId> {
        let candidates = self.labelled.get(&index_key(namespace, selector));
        candidates
            .into_iter()
            .flatten()
            .filter(|id| {
                self.attachments
                    .get(id)
                    .is_some_and(|attachment| selector.matches(&attachment.object.labels))
            })
            .copied()
            .collect()
    }
}

impl Engine {
    /// Takes object changes in.
    pub(crate) fn objects_changed(&mut self, changes: Vec<ObjectChange>) {
        for change in changes {
            match change {
                ObjectChange::Policy(policy) => self.policy_shown(policy),
                ObjectChange::PolicyGone(name) => {
                    if let Some(id) = self.objects.policy_names.remove(&name) {
                        self.policy_gone(id);
                    }
                }
                ObjectChange::Attachment(attachment) => self.attachment_shown(attachment),
                ObjectChange::AttachmentGone(name) => {
                    if let Some(id) = self.objects.attachment_names.remove(&name) {
                        self.attachment_gone(id);
                    }
                }
            }
        }
        self.summary.policies = self.objects.policies.len() as u64;
        self.summary.attachments = self.objects.attachments.len() as u64;
    }

    fn policy_shown(&mut self, policy: Policy) {
        if let Some(&id) = self.objects.policy_names.get(&policy.name) {
            let Some(state) = self.objects.policies.get_mut(&id) else {
                return;
            };
            if state.object.uid == policy.uid {
                // A source never goes back: an older generation is an echo.
                if state.object == policy || policy.generation < state.object.generation {
                    return;
                }
                self.policy_edited(id, policy);
                return;
            }
            // The same name with another uid is another policy.
            self.objects.policy_names.remove(&policy.name);
            self.policy_gone(id);
        }
        let id = self.objects.next_policy;
        self.objects.next_policy += 1;
        self.objects.policy_names.insert(policy.name.clone(), id);
        let age = Age {
            created_ms: policy.created_ms,
            uid: policy.uid.clone(),
        };
        let now = self.now;
        let state = PolicyState {
            age,
            spec: None,
            spec_generation: 0,
            refused: None,
            unsupported: None,
            intents: BTreeMap::new(),
            producers: BTreeSet::new(),
            covers: 0,
            slot: None,
            slot_trouble: None,
            families: Families::default(),
            ready: BTreeMap::new(),
            unreached: None,
            coming: BTreeSet::new(),
            producer_trouble: false,
            waiting: false,
            waiting_since: None,
            overdue_said: false,
            current: false,
            served: None,
            unread: false,
            unreadable: None,
            full: BTreeSet::new(),
            face: None,
            order: BTreeSet::new(),
            holds: BTreeSet::new(),
            counts: Counts::default(),
            recheck: None,
            seen: now,
            applied: 0,
            proven: 0,
            behind_since: None,
            supplied: Mark::default(),
            view: None,
            object: policy.clone(),
        };
        self.objects.policies.insert(id, state);
        self.policy_edited(id, policy);
    }

    fn policy_edited(&mut self, id: PolicyId, policy: Policy) {
        let Some(state) = self.objects.policies.get_mut(&id) else {
            return;
        };
        if state.object.generation != policy.generation {
            state.seen = self.now;
        }
        let old_keys = state.index_keys();
        match &policy.content {
            Ok(spec) => {
                state.refused = None;
                // What one generation takes away is new when a later one gives it back, whatever set is still served.
                if let Some(given) = state.served.as_mut().and_then(|served| served.spec.as_mut()) {
                    let stays =
                        |given: &Destination| spec.destinations.iter().any(|now| now.claims_as(given));
                    if !given.destinations.iter().all(stays) {
                        Arc::make_mut(given).destinations.retain(stays);
                    }
                }
                if state.spec.as_deref() != Some(spec) {
                    state.spec = Some(Arc::new(spec.clone()));
                }
                state.spec_generation = policy.generation;
            }
            Err(refusal) => state.refused = Some((refusal.reason, refusal.message.clone())),
        }
        state.object = policy;
        let new_keys = state.index_keys();
        let consumers = state.consumers().cloned();
        let producers = state.spec.as_ref().map(|spec| spec.producers.clone());
        let namespace = state.object.name.namespace.clone();
        for key in old_keys.difference(&new_keys) {
            index_remove(&mut self.objects.selectors, key, &id);
        }
        for key in new_keys {
            index_add(&mut self.objects.selectors, key, id);
        }
        let consumers = consumers.map_or_else(BTreeSet::new, |s| self.objects.matching(&namespace, &s));
        let producers = producers.map_or_else(BTreeSet::new, |s| self.objects.matching(&namespace, &s));
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let touched: BTreeSet<AttachmentId> = state
            .intents
            .keys()
            .chain(&state.producers)
            .chain(&consumers)
            .chain(&producers)
            .copied()
            .collect();
        for attachment in touched {
            self.select(
                id,
                attachment,
                consumers.contains(&attachment),
                producers.contains(&attachment),
            );
        }
        self.dirty.policies.insert(id);
        self.dirty.touched.insert(id);
    }

    fn policy_gone(&mut self, id: PolicyId) {
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        for key in state.index_keys() {
            index_remove(&mut self.objects.selectors, &key, &id);
        }
        let Some(state) = self.objects.policies.get(&id) else {
            return;
        };
        let touched: BTreeSet<AttachmentId> = state.intents.keys().chain(&state.producers).copied().collect();
        for attachment in touched {
            self.select(id, attachment, false, false);
        }
        if let Some(state) = self.objects.policies.remove(&id) {
            if let Some(slot) = state.slot {
                if let Some(slot) = self.slots.get_mut(&slot) {
                    slot.policy_gone = true;
                }
                self.disown(slot);
            }
            if state.view.is_some() {
                self.dirty.reports.insert(state.object.name.clone());
                self.troubled.remove(&state.object.name);
            }
        }
        self.dirty.policies.remove(&id);
        self.dirty.touched.remove(&id);
        self.timer(crate::engine::Timer::Recheck(id), None);
        self.timer(crate::engine::Timer::Deadline(id), None);
    }

    fn attachment_shown(&mut self, attachment: Attachment) {
        if let Some(&id) = self.objects.attachment_names.get(&attachment.name) {
            let Some(state) = self.objects.attachments.get(&id) else {
                return;
            };
            let same = state.object.uid == attachment.uid
                && state.object.interface == attachment.interface
                && state.object.expected == attachment.expected;
            if state.object == attachment
                || (state.object.uid == attachment.uid && attachment.generation < state.object.generation)
            {
                return;
            }
            if same {
                self.attachment_edited(id, attachment);
                return;
            }
            // Another uid, interface or identity is another incarnation.
            self.objects.attachment_names.remove(&attachment.name);
            self.attachment_gone(id);
        }
        let id = self.objects.next_attachment;
        self.objects.next_attachment += 1;
        self.objects.attachment_names.insert(attachment.name.clone(), id);
        index_add(&mut self.objects.by_interface, attachment.interface.clone(), id);
        self.index_attachment(id, &attachment);
        self.dirty.names.insert(attachment.interface.clone());
        let state = AttachmentState {
            object: attachment,
            port: None,
            consumes: BTreeSet::new(),
            produces: BTreeSet::new(),
            interface_lost: None,
            address_lost: None,
        };
        self.objects.attachments.insert(id, state);
        self.reselect(id);
    }

    fn attachment_edited(&mut self, id: AttachmentId, attachment: Attachment) {
        let Some(state) = self.objects.attachments.get(&id) else {
            return;
        };
        let old = state.object.clone();
        self.unindex_attachment(id, &old);
        self.index_attachment(id, &attachment);
        self.dirty.names.insert(attachment.interface.clone());
        // Its summands are those of its generation.
        let (consumes, produces) = (
            state_set(&self.objects, id, true),
            state_set(&self.objects, id, false),
        );
        for policy in &consumes {
            self.cover(*policy, old.covers.consumer, attachment.covers.consumer);
        }
        for policy in &produces {
            self.cover(*policy, old.covers.producer, attachment.covers.producer);
            self.dirty.policies.insert(*policy);
        }
        if let Some(state) = self.objects.attachments.get_mut(&id) {
            state.object = attachment;
        }
        self.reselect(id);
    }

    fn attachment_gone(&mut self, id: AttachmentId) {
        let Some(state) = self.objects.attachments.get(&id) else {
            return;
        };
        let object = state.object.clone();
        let touched: BTreeSet<PolicyId> = state.consumes.union(&state.produces).copied().collect();
        for policy in touched {
            self.select(policy, id, false, false);
        }
        self.unindex_attachment(id, &object);
        index_remove(&mut self.objects.by_interface, &object.interface, &id);
        let state = self.objects.attachments.remove(&id);
        if let Some(ifindex) = state.and_then(|state| state.port) {
            if let Some(port) = self.ports.get_mut(&ifindex) {
                port.attachments.remove(&id);
                if port.winner == Some(id) {
                    port.winner = None;
                    port.ready = None;
                    port.coming = false;
                }
                // What is to be taken away now is a new operation, whatever failed before.
                port.unblock();
            }
            self.dirty_producers_of(ifindex);
            self.dirty.ports.insert(ifindex);
        }
        self.dirty.loose.remove(&id);
        self.dirty.names.insert(object.interface);
    }

    fn index_attachment(&mut self, id: AttachmentId, object: &Attachment) {
        for key in label_keys(object) {
            index_add(&mut self.objects.labelled, key, id);
        }
        for address in &object.addresses {
            index_add(&mut self.objects.by_address, *address, id);
            self.address_contest(*address);
        }
    }

    fn unindex_attachment(&mut self, id: AttachmentId, object: &Attachment) {
        for key in label_keys(object) {
            index_remove(&mut self.objects.labelled, &key, &id);
        }
        for address in &object.addresses {
            index_remove(&mut self.objects.by_address, address, &id);
            self.address_contest(*address);
        }
    }

    /// Everybody who claims this address must be judged again.
    fn address_contest(&mut self, address: IpAddr) {
        let claims = self.objects.by_address.get(&address);
        for id in claims.into_iter().flatten() {
            if let Some(state) = self.objects.attachments.get(id) {
                self.dirty.names.insert(state.object.interface.clone());
            }
        }
    }

    /// Finds anew which policies select an attachment.
    fn reselect(&mut self, id: AttachmentId) {
        let Some(state) = self.objects.attachments.get(&id) else {
            return;
        };
        let mut candidates: BTreeSet<PolicyId> = state.consumes.union(&state.produces).copied().collect();
        for key in label_keys(&state.object) {
            candidates.extend(self.objects.selectors.get(&key).into_iter().flatten());
        }
        let selected: Vec<(PolicyId, bool, bool)> = candidates
            .into_iter()
            .filter_map(|policy| {
                let labels = &state.object.labels;
                let policy_state = self.objects.policies.get(&policy)?;
                if policy_state.object.name.namespace != state.object.name.namespace {
                    return None;
                }
                let consumer = policy_state.consumers().is_some_and(|s| s.matches(labels));
                let producer = policy_state
                    .spec
                    .as_ref()
                    .is_some_and(|spec| spec.producers.matches(labels));
                Some((policy, consumer, producer))
            })
            .collect();
        for (policy, consumer, producer) in selected {
            self.select(policy, id, consumer, producer);
        }
    }

    /// Makes an attachment a consumer and a producer of a policy, or not.
    fn select(&mut self, policy: PolicyId, id: AttachmentId, consumer: bool, producer: bool) {
        let Some(attachment) = self.objects.attachments.get_mut(&id) else {
            return;
        };
        let covers = attachment.object.covers;
        let was_consumer = attachment.consumes.contains(&policy);
        let was_producer = attachment.produces.contains(&policy);
        if consumer != was_consumer {
            if consumer {
                attachment.consumes.insert(policy);
                self.cover(policy, 0, covers.consumer);
                self.intent_begins(policy, id);
            } else {
                attachment.consumes.remove(&policy);
                self.cover(policy, covers.consumer, 0);
                self.intent_ends(policy, id);
            }
            self.dirty_attachment(id);
        }
        let Some(attachment) = self.objects.attachments.get_mut(&id) else {
            return;
        };
        if producer != was_producer {
            let state = self.objects.policies.get_mut(&policy);
            if producer {
                attachment.produces.insert(policy);
                if let Some(state) = state {
                    state.producers.insert(id);
                }
                self.cover(policy, 0, covers.producer);
            } else {
                attachment.produces.remove(&policy);
                if let Some(state) = state {
                    state.producers.remove(&id);
                }
                self.cover(policy, covers.producer, 0);
                self.retry_elsewhere(id);
            }
            self.dirty.policies.insert(policy);
        }
    }

    /// What failed on the interface of an attachment may be left to no policy's timer now.
    fn retry_elsewhere(&mut self, id: AttachmentId) {
        let port = self.objects.attachments.get(&id).and_then(|state| state.port);
        if let Some(ifindex) = port
            && self.ports.get(&ifindex).is_some_and(|port| port.hindered)
        {
            self.dirty.ports.insert(ifindex);
        }
    }

    fn cover(&mut self, policy: PolicyId, old: u64, new: u64) {
        if let Some(state) = self.objects.policies.get_mut(&policy) {
            state.covers = state.covers.wrapping_sub(old).wrapping_add(new);
            self.dirty.touched.insert(policy);
        }
    }

    /// The intents of this attachment must be planned again.
    pub(crate) fn dirty_attachment(&mut self, id: AttachmentId) {
        match self.objects.attachments.get(&id).and_then(|state| state.port) {
            Some(ifindex) => {
                self.dirty.ports.insert(ifindex);
            }
            None => {
                self.dirty.loose.insert(id);
            }
        }
    }
}

fn state_set(objects: &Objects, id: AttachmentId, consumes: bool) -> BTreeSet<PolicyId> {
    objects.attachments.get(&id).map_or_else(BTreeSet::new, |state| {
        if consumes {
            state.consumes.clone()
        } else {
            state.produces.clone()
        }
    })
}
