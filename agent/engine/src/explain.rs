//! Why an intent is as it is: everything that decides about it, link by link, and what is believed of the kernel for it.

use crate::belief::Belief;
use crate::conflict::Claim;
use crate::engine::Engine;
use crate::gate::{Gate, Known, classify, of_device};
use crate::intent::{Intent, Producers, Proof};
use crate::locals::LocalsState;
use crate::model::{FailReason, HoldReason, Identity, Ifindex, Incarnation, Link, ObjectName, Row, State};
use crate::objects::{AttachmentId, PolicyId, PolicyState};
use crate::plan::Goal;
use crate::ports::Port;
use crate::since::{Entries, Since, Times};
use crate::view::{Barrier, IntentView, PolicyView, Serving, View};

/// Producers that are named.
const PRODUCERS: usize = 8;

/// A policy and, worst first, its consumers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    /// The policy.
    pub policy: PolicyView,
    /// First sight of its generation.
    pub seen: Since,
    /// What the start barrier still waits for.
    pub waiting_for: Vec<Barrier>,
    /// Its producers.
    pub set: SetFacts,
    /// Consumers, worst first.
    pub consumers: Vec<ConsumerFacts>,
    /// Consumers that were left off.
    pub left_off: u64,
}

/// Which consumers are asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// This one.
    One(ObjectName),
    /// So many, worst first.
    Worst(usize),
}

/// Why there is nothing to explain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unexplained {
    /// It is not known, or it is, and selects nobody.
    #[error("no policy {policy} selects a consumer on this node ({})", if *.known { "it is known" } else { "it is not known" })]
    NoPolicy {
        /// Its name.
        policy: ObjectName,
        /// It is known.
        known: bool,
    },
    /// It is not known.
    #[error("no attachment {0} is known on this node")]
    NoConsumer(ObjectName),
    /// Its labels are not what the policy asks for.
    #[error("attachment {consumer} is not a consumer of {policy}: its labels do not match spec.consumers")]
    NotSelected {
        /// The policy.
        policy: ObjectName,
        /// The attachment.
        consumer: ObjectName,
    },
}

/// The producers of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetFacts {
    /// How many are selected.
    pub selected: u64,
    /// How many of them are ready.
    pub ready: u64,
    /// Some of them, those that are not ready first.
    pub producers: Vec<ProducerFacts>,
    /// The selector leads to exactly the set that is wanted.
    pub current: bool,
    /// What the selector leads to, if that is another generation than the policy's.
    pub serving: Option<Serving>,
    /// Since when the selected set serves, milliseconds since the Unix epoch.
    pub since_ms: Option<i64>,
    /// Since when some producer is ready, or none.
    pub supplied: Option<Since>,
    /// Since when a switch waits for one.
    pub waiting: Option<Since>,
    /// What is believed of slot, set and backends.
    pub beliefs: Vec<Belief>,
}

/// One producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProducerFacts {
    /// Its attachment.
    pub name: ObjectName,
    /// Its interface.
    pub interface: String,
    /// It can be delivered to.
    pub ready: bool,
    /// Why link and identity are not there.
    pub hold: Option<HoldReason>,
    /// Why else it is not ready.
    pub why: Option<String>,
}

/// What is known of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityFacts {
    /// Not read yet.
    Unread,
    /// It could not be read.
    Unreadable(String),
    /// The row of the registry.
    Row(Option<Identity>),
}

/// What is known of the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProofFacts {
    /// The kernel was not asked, or what it said is void.
    None,
    /// The question is out.
    Asked,
    /// It gives the verdict that the intent wants.
    Good,
    /// It said something else.
    Failed(String),
}

/// Whether there are producers for a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Supply {
    /// Yes.
    Ready,
    /// None, or not for every family of the destinations: why, for people.
    Missing(Option<String>),
    /// A switch waits for one.
    Awaited {
        /// The old set serves meanwhile.
        serving: bool,
    },
}

/// One consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerFacts {
    /// Its intent.
    pub intent: IntentView,
    /// The policy cannot be done, for anybody or for this consumer.
    pub refused: Option<(FailReason, String)>,
    /// Another object has the right.
    pub conflict: Option<String>,
    /// Its device.
    pub device: Option<Link>,
    /// The registered identity.
    pub identity: IdentityFacts,
    /// The incarnation that must be registered.
    pub expected: Option<Incarnation>,
    /// Producers for it.
    pub supply: Supply,
    /// Answers cannot be delivered to it.
    pub unreachable: Option<String>,
    /// The kernel has answered that the program is attached.
    pub attached: bool,
    /// Why it could not be.
    pub attach_trouble: Option<String>,
    /// Somebody else's programs before ours, as the last audit found them.
    pub foreign: Vec<String>,
    /// Its row; the outer none = it is being written.
    pub row: Option<Option<Row>>,
    /// Destinations that it claims.
    pub destinations: u64,
    /// Those whose entry is in the kernel.
    pub written: u64,
    /// Those of them that are open.
    pub open: u64,
    /// Why something could not be written.
    pub write_trouble: Option<String>,
    /// The proof.
    pub proof: ProofFacts,
    /// Since when the links of its chain are as they are.
    pub times: Times,
    /// What is believed of the kernel at its interface.
    pub beliefs: Vec<Belief>,
}

impl View<'_> {
    /// Why a policy is as it is. Costs follow the consumers that are asked about.
    ///
    /// # Errors
    /// [`Unexplained`].
    pub fn explain(&self, name: &ObjectName, asked: &Asked) -> Result<Explained, Unexplained> {
        self.engine.explain(name, asked)
    }
}

impl Engine {
    fn explain(&self, name: &ObjectName, asked: &Asked) -> Result<Explained, Unexplained> {
        let known = self.objects.policy_names.get(name);
        let found = known.and_then(|id| Some((*id, self.objects.policies.get(id)?)));
        let Some((id, state, view)) = found.and_then(|(id, state)| Some((id, state, state.view.clone()?)))
        else {
            return Err(Unexplained::NoPolicy {
                policy: name.clone(),
                known: known.is_some(),
            });
        };
        let attachments: Vec<AttachmentId> = match asked {
            Asked::One(consumer) => vec![self.consumer_named(state, consumer)?],
            Asked::Worst(count) => state.order.iter().take(*count).map(|(_, _, id)| *id).collect(),
        };
        let consumers: Vec<ConsumerFacts> = attachments
            .iter()
            .filter_map(|attachment| self.consumer_facts(id, state, *attachment))
            .collect();
        Ok(Explained {
            waiting_for: self.summary.waiting_for.clone(),
            set: self.set_facts(state, view.serving),
            left_off: match asked {
                Asked::One(_) => 0,
                Asked::Worst(_) => state.intents.len().saturating_sub(consumers.len()) as u64,
            },
            policy: view,
            seen: self.since(state.seen.boot),
            consumers,
        })
    }

    fn consumer_named(
        &self,
        state: &PolicyState,
        consumer: &ObjectName,
    ) -> Result<AttachmentId, Unexplained> {
        let id = self.objects.attachment_names.get(consumer);
        let id = *id.ok_or_else(|| Unexplained::NoConsumer(consumer.clone()))?;
        if state.intents.contains_key(&id) {
            return Ok(id);
        }
        Err(Unexplained::NotSelected {
            policy: state.object.name.clone(),
            consumer: consumer.clone(),
        })
    }

    fn set_facts(&self, state: &PolicyState, serving: Option<Serving>) -> SetFacts {
        let mut producers: Vec<ProducerFacts> = state
            .producers
            .iter()
            .filter_map(|id| self.producer_facts(state, *id))
            .collect();
        producers.sort_by(|a, b| a.ready.cmp(&b.ready).then_with(|| a.name.cmp(&b.name)));
        producers.truncate(PRODUCERS);
        SetFacts {
            selected: state.producers.len() as u64,
            ready: state.ready.len() as u64,
            producers,
            current: state.current,
            serving,
            since_ms: state.served.as_ref().map(|served| served.since_ms),
            supplied: state
                .supplied
                .of(&!state.ready.is_empty())
                .map(|at| self.since(at)),
            waiting: state
                .waiting_since
                .filter(|_| state.waiting)
                .map(|at| self.since(at)),
            beliefs: state
                .slot
                .map(|slot| self.beliefs_of_slot(slot, true))
                .unwrap_or_default(),
        }
    }

    fn producer_facts(&self, policy: &PolicyState, id: AttachmentId) -> Option<ProducerFacts> {
        let state = self.objects.attachments.get(&id)?;
        let port = state.port.and_then(|ifindex| self.ports.get(&ifindex));
        let link = state.port.and_then(|ifindex| self.interfaces.link(ifindex));
        let known = port.map_or(Known::Unread, |port| port.known.clone());
        let (hold, unknown) = match classify(link, &known, state.object.expected) {
            Gate::Ready(_) => (None, None),
            Gate::Held(reason) => (Some(reason), None),
            Gate::Unread => (None, Some("its identity has not been read yet".to_owned())),
            Gate::Unreadable(error) => (None, Some(error)),
        };
        let attaching = || {
            let port = port?;
            let trouble = port.troubles.get(&Goal::Attached);
            match trouble {
                Some(trouble) => Some(trouble.message.to_string()),
                None => (!port.has_program()).then(|| "the program is not attached yet".to_owned()),
            }
        };
        let ready = policy.ready.contains_key(&id);
        let why = state
            .lost()
            .cloned()
            .or(unknown)
            .or_else(attaching)
            .or_else(|| policy.unreached.clone());
        Some(ProducerFacts {
            name: state.object.name.clone(),
            interface: state.object.interface.clone(),
            ready,
            hold,
            why: why.filter(|_| !ready && hold.is_none()),
        })
    }

    fn consumer_facts(
        &self,
        policy: PolicyId,
        state: &PolicyState,
        id: AttachmentId,
    ) -> Option<ConsumerFacts> {
        let attachment = self.objects.attachments.get(&id)?;
        let intent = state.intents.get(&id)?;
        let nowhere;
        let port = match attachment.port.and_then(|ifindex| self.ports.get(&ifindex)) {
            Some(port) => port,
            None => {
                nowhere = self.nowhere(&attachment.object.interface);
                &nowhere
            }
        };
        let device = port
            .device
            .and_then(|device| self.interfaces.link(device.ifindex))
            .cloned();
        let claims = self.claims(port);
        let claim = claims
            .intents
            .iter()
            .find(|claim| claim.policy == policy && claim.attachment == id);
        let refused = claim.and_then(|claim| claim.refused.clone()).or_else(|| {
            state
                .refusal()
                .map(|(reason, message)| (reason, message.to_owned()))
        });
        let conflict = attachment
            .lost()
            .cloned()
            .or_else(|| claim.and_then(|claim| claim.conflict.clone()));
        let there = claim.map(|claim| Entries::of(port, state, claim));
        let entries = there.unwrap_or_default();
        Some(ConsumerFacts {
            intent: IntentView::of(state, attachment, intent),
            refused,
            conflict,
            identity: match &port.known {
                Known::Unread => IdentityFacts::Unread,
                Known::Unreadable(error) => IdentityFacts::Unreadable(error.clone()),
                Known::Row(row) => {
                    IdentityFacts::Row(device.as_ref().and_then(|device| of_device(device, row.as_ref())))
                }
            },
            device,
            expected: attachment.object.expected,
            supply: match self.producers_of(state, id) {
                Producers::Ready => Supply::Ready,
                Producers::Missing(why) => Supply::Missing(why.map(str::to_owned)),
                Producers::Awaited { serving } => Supply::Awaited { serving },
            },
            unreachable: claim.and_then(|claim| claim.unreachable.clone()),
            attached: port.has_program(),
            attach_trouble: port
                .troubles
                .get(&Goal::Attached)
                .map(|trouble| trouble.message.to_string()),
            foreign: port.foreign.clone(),
            row: port.row.sure().copied(),
            destinations: entries.claimed.into(),
            written: entries.written.into(),
            open: entries.open.into(),
            write_trouble: self.write_trouble(port, state, intent, claim),
            proof: proof(intent),
            times: self.times(port, intent, there.as_ref()),
            beliefs: self.believed_for(attachment.port, claim),
        })
    }

    /// What is believed of an interface as far as it concerns one intent.
    fn believed_for(&self, port: Option<Ifindex>, claim: Option<&Claim>) -> Vec<Belief> {
        let mut beliefs = port
            .and_then(|ifindex| self.believed_of_port(ifindex, true))
            .unwrap_or_default();
        for belief in &mut beliefs {
            if let Belief::Entries { entries, .. } = belief {
                entries.retain(|key, _| claim.is_some_and(|claim| claim.keys.contains(key)));
            }
        }
        beliefs
    }

    /// Why something that an intent stands on could not be written.
    fn write_trouble(
        &self,
        port: &Port,
        state: &PolicyState,
        intent: &Intent,
        claim: Option<&Claim>,
    ) -> Option<String> {
        let full = self.full(state);
        let locals = claim.and_then(|claim| match self.locals.state(claim) {
            LocalsState::Failed(trouble) => Some(trouble),
            LocalsState::Known | LocalsState::Awaited => None,
        });
        let rows = port
            .troubles
            .iter()
            .find(|(goal, _)| goal.concerns_intents() && **goal != Goal::Attached);
        rows.map(|(_, trouble)| trouble)
            .or(full.as_ref())
            .or(locals)
            .or_else(|| self.set_trouble(state))
            .or(intent.entries_trouble.as_ref())
            .map(|trouble| trouble.message.to_string())
    }
}

fn proof(intent: &Intent) -> ProofFacts {
    match (&intent.proof_trouble, intent.proof) {
        (Some(trouble), _) => ProofFacts::Failed(trouble.message.to_string()),
        (None, Proof::Asked(..)) => ProofFacts::Asked,
        (None, Proof::Good(..)) if intent.state == State::Programmed => ProofFacts::Good,
        (None, Proof::Good(..) | Proof::None) => ProofFacts::None,
    }
}
