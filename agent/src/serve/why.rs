//! The answer to "why": link by link, from the interface to the proof, what is there, what is not, and what to do.

use std::collections::BTreeSet;

use holdfast_engine::belief::{Belief, Difference};
use holdfast_engine::explain::{ConsumerFacts, Explained, IdentityFacts, ProofFacts, SetFacts, Supply};
use holdfast_engine::model::{FailReason, HoldReason, Identity, Link, RegistryRead, State};
use holdfast_engine::since::Since;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::health;
use super::look::{Question, Seen};
use crate::files::hex;
use crate::report::{PolicyReport, Stamps, rfc3339, state_and_reason};

/// Whether something is so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Told {
    /// It is.
    Yes,
    /// It is not.
    No,
    /// It cannot be told.
    Unknown,
}

/// Answer of `GET /v1/why`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Why {
    /// Whether the policy (or the consumer that was asked about) is programmed, and the kernel agrees.
    pub answer: Told,
    /// Clock of who answers, RFC 3339.
    pub now: String,
    /// The policy, as in the report.
    pub policy: PolicyReport,
    /// Consumers that are not programmed, worst first; or the one that was asked about.
    pub consumers: Vec<Chain>,
    /// Consumers that were looked at.
    pub looked_at: u64,
    /// Consumers that were not, because there are too many: not one of them is in a worse state.
    pub left_off: u64,
}

/// One consumer, from its interface to the proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Chain {
    /// The consumer's attachment, `namespace/name`.
    pub consumer: String,
    /// Its host-side interface.
    pub interface: String,
    /// Its number, if it is there.
    pub ifindex: Option<u32>,
    /// `Programmed`, `Held`, `Failed` or `Pending`, as the agent says.
    pub state: String,
    /// Why.
    pub reason: Option<String>,
    /// Start of the present state and reason, RFC 3339.
    pub since: String,
    /// Start of the hold, RFC 3339.
    pub held_since: Option<String>,
    /// Whether it is programmed, and the kernel agrees.
    pub answer: Told,
    /// The first step that says no.
    pub cause: Option<StepName>,
    /// All steps, in their order.
    pub steps: Vec<Step>,
}

/// What a consumer needs, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepName {
    /// The policy is accepted, and has the right to its destinations for this consumer.
    Policy,
    /// The interface is there, up, with carrier.
    Interface,
    /// The expected incarnation is registered for it.
    Identity,
    /// A producer is ready, and the policy leads to it.
    Producer,
    /// The program is attached.
    Attach,
    /// Nobody is asked before it.
    Position,
    /// Row and entries are in the kernel, open.
    Entries,
    /// The kernel's own answer is the right one.
    Proof,
}

impl StepName {
    /// As the JSON spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Interface => "interface",
            Self::Identity => "identity",
            Self::Producer => "producer",
            Self::Attach => "attach",
            Self::Position => "position",
            Self::Entries => "entries",
            Self::Proof => "proof",
        }
    }
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Which.
    pub step: StepName,
    /// Whether it is there.
    pub answer: Told,
    /// Since when, RFC 3339; none: that cannot be told.
    pub since: Option<String>,
    /// It was so already then, when the agent looked for the first time.
    pub earlier: bool,
    /// What was found, for people.
    pub found: String,
    /// What to do about it, for people.
    pub remedy: Option<String>,
    /// A command that does it, or shows more.
    pub command: Option<String>,
}

impl Step {
    /// A step without more.
    #[must_use]
    pub fn new(step: StepName, answer: Told, found: impl Into<String>) -> Self {
        Self {
            step,
            answer,
            since: None,
            earlier: false,
            found: found.into(),
            remedy: None,
            command: None,
        }
    }

    fn yes(step: StepName, found: impl Into<String>) -> Self {
        Self::new(step, Told::Yes, found)
    }

    fn no(step: StepName, found: impl Into<String>) -> Self {
        Self::new(step, Told::No, found)
    }

    fn unknown(step: StepName, found: impl Into<String>) -> Self {
        Self::new(step, Told::Unknown, found)
    }

    /// With what to do.
    #[must_use]
    pub fn remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }

    /// With the command for it.
    #[must_use]
    pub fn command(self, command: impl Into<String>) -> Self {
        Self {
            command: Some(command.into()),
            ..self
        }
    }
}

/// What the agent does by itself about what differs in the kernel.
const BY_ITSELF: &str = "the agent finds this at its next audit, names it in its log and puts it right; if it comes back, \
    find out who changes it";

/// What must be looked at to explain this.
#[must_use]
pub fn question(explained: &Explained) -> Question {
    let of_consumers = explained.consumers.iter();
    Question {
        beliefs: of_consumers
            .clone()
            .flat_map(|consumer| &consumer.beliefs)
            .chain(&explained.set.beliefs)
            .cloned()
            .collect(),
        devices: of_consumers
            .map(|consumer| consumer.intent.interface.clone())
            .collect(),
    }
}

/// Whether the engine knew the same before and after the look.
#[must_use]
pub fn is_steady(before: &Explained, after: &Explained) -> bool {
    before.set == after.set && before.consumers == after.consumers
}

impl Why {
    /// The answer. `every`: also of consumers that are programmed.
    #[must_use]
    pub fn new(explained: &Explained, seen: &Seen, stamps: &Stamps, now_wall_ms: i64, every: bool) -> Self {
        let all = explained.consumers.iter();
        let mut consumers: Vec<Chain> = all
            .map(|facts| {
                let look = Look {
                    explained,
                    facts,
                    seen,
                    stamps,
                };
                look.chain()
            })
            .collect();
        let looked_at = consumers.len() as u64;
        let told = |told| consumers.iter().any(|chain| chain.answer == told);
        let answer = if told(Told::No) || matches!(explained.policy.state, State::Failed(_)) {
            Told::No
        } else if told(Told::Unknown) || looked_at == 0 {
            Told::Unknown
        } else {
            Told::Yes
        };
        consumers.retain(|chain| every || chain.answer != Told::Yes);
        Self {
            answer,
            now: rfc3339(now_wall_ms),
            policy: PolicyReport::new(&explained.policy, stamps),
            consumers,
            looked_at,
            left_off: explained.left_off,
        }
    }
}

/// One consumer, as it is known and as it is.
struct Look<'a> {
    explained: &'a Explained,
    facts: &'a ConsumerFacts,
    seen: &'a Seen,
    stamps: &'a Stamps,
}

impl Look<'_> {
    fn chain(&self) -> Chain {
        let stamps = self.stamps;
        let intent = &self.facts.intent;
        let mut steps = vec![self.policy()];
        steps.push(self.interface());
        steps.push(self.identity());
        steps.push(self.producer());
        steps.push(self.attach());
        steps.push(self.position());
        steps.push(self.entries(is_blocked(&steps)));
        steps.push(self.proof(is_blocked(&steps), self.differs()));
        let cause = steps.iter().find(|step| step.answer == Told::No);
        let cause = cause.map(|step| step.step);
        let programmed = intent.state == State::Programmed;
        for step in &mut steps {
            // The start of a state outlasts the agent: it is known better than anything that this life has seen.
            let told = match step.answer {
                Told::Yes => programmed && step.step == StepName::Proof,
                Told::No => cause == Some(step.step) && says(intent.state).contains(&step.step),
                Told::Unknown => false,
            };
            if told {
                step.since = Some(stamps.rfc3339(intent.since));
                step.earlier = false;
            }
        }
        let all = |told| steps.iter().all(|step| step.answer == told);
        let (state, reason) = state_and_reason(intent.state);
        Chain {
            consumer: intent.consumer.to_string(),
            interface: intent.interface.clone(),
            ifindex: self.device().ok().flatten().map(|link| link.ifindex),
            state: state.to_owned(),
            reason,
            since: stamps.rfc3339(intent.since),
            held_since: intent.held_since.map(|at| stamps.rfc3339(at)),
            answer: match cause {
                Some(_) => Told::No,
                None if all(Told::Yes) && programmed => Told::Yes,
                None => Told::Unknown,
            },
            cause,
            steps,
        }
    }

    /// With the time since when it is so, if that is known.
    fn timed(&self, step: Step, since: Option<Since>) -> Step {
        Step {
            since: since.map(|since| self.stamps.rfc3339(since.at)),
            earlier: since.is_some_and(|since| since.earlier),
            ..step
        }
    }

    fn name(&self) -> String {
        self.facts.intent.consumer.to_string()
    }

    fn interface_name(&self) -> &str {
        &self.facts.intent.interface
    }

    /// The device as the kernel has it; as the agent knows it, if the kernel was not asked.
    fn device(&self) -> Result<Option<&Link>, &str> {
        match self.seen.devices.get(self.interface_name()) {
            Some(Ok(found)) => Ok(found.as_ref().map(|(link, _)| link)),
            Some(Err(error)) => Err(error),
            None => Ok(self.facts.device.as_ref()),
        }
    }

    /// Where the kernel is not as the agent believes.
    fn differences(&self) -> impl Iterator<Item = &Difference> {
        let theirs = |belief: &&Belief| matches!(belief, Belief::Entries { .. });
        let keys: BTreeSet<_> = self
            .facts
            .beliefs
            .iter()
            .filter(theirs)
            .flat_map(|belief| match belief {
                Belief::Entries { entries, .. } => entries.keys().copied().collect(),
                _ => Vec::new(),
            })
            .collect();
        let of_slot = self.explained.set.beliefs.clone();
        let port = self.facts.intent.ifindex;
        self.seen
            .audited
            .differences
            .iter()
            .filter(move |difference| match difference {
                Difference::NoProgram { ifindex, .. }
                | Difference::Foreign { ifindex, .. }
                | Difference::Row { ifindex, .. }
                | Difference::Source { ifindex, .. }
                | Difference::Identity { ifindex } => port == Some(*ifindex),
                Difference::Entry { ifindex, key, .. } => port == Some(*ifindex) && keys.contains(key),
                Difference::Policy { slot, .. } | Difference::Table { slot } => of_slot
                    .iter()
                    .any(|belief| matches!(belief, Belief::Policy { slot: own, .. } if own == slot)),
                Difference::Backend { id, .. } => of_slot
                    .iter()
                    .any(|belief| matches!(belief, Belief::Backend { id: own, .. } if own == id)),
                Difference::Link { .. } | Difference::Local { .. } => false,
            })
    }

    fn differs(&self) -> bool {
        self.differences().next().is_some()
    }

    fn policy(&self) -> Step {
        const STEP: StepName = StepName::Policy;
        let facts = self.facts;
        if let Some((reason, message)) = &facts.refused {
            return Step::no(STEP, format!("{reason}: {message}"))
                .remedy("correct the policy; its last good version stays in force");
        }
        if let Some(conflict) = &facts.conflict {
            return Step::no(STEP, conflict.clone()).remedy("change or delete one of the two objects");
        }
        if let Some(why) = &facts.unreachable {
            return Step::no(STEP, why.clone()).remedy(format!(
                "give attachment {} its addresses (spec.addresses)",
                self.name()
            ));
        }
        if !self.explained.waiting_for.is_empty() {
            let missing = health::waiting(&self.explained.waiting_for).join(", ");
            return Step::unknown(
                STEP,
                format!("the start of the agent is not complete: it waits for {missing}"),
            );
        }
        let found = format!("accepted at generation {}", self.explained.policy.generation);
        self.timed(Step::yes(STEP, found), Some(self.explained.seen))
    }

    fn interface(&self) -> Step {
        const STEP: StepName = StepName::Interface;
        let name = self.interface_name();
        let show = format!("ip -details link show dev {name}");
        let device = match self.device() {
            Ok(device) => device,
            Err(error) => return Step::unknown(STEP, format!("{name} could not be asked for: {error}")),
        };
        let Some(link) = device else {
            return Step::no(STEP, format!("there is no interface {name} in the agent's network namespace"))
                .remedy(
                    "whoever starts the workload makes it (a CNI, a hypervisor): nothing is to be done while the workload \
                     starts; else find out why it does not",
                )
                .command(format!("ip link show dev {name}"));
        };
        let told = self.facts.device.as_ref() == Some(link);
        let since = self.facts.times.interface.filter(|_| told);
        if !link.up {
            let step = Step::no(STEP, format!("{name} is not up"))
                .remedy("set it up")
                .command(format!("ip link set dev {name} up"));
            return self.timed(step, since);
        }
        if !link.carrier {
            let step = Step::no(
                STEP,
                format!("{name} has no carrier: the workload's side is down or not open"),
            )
            .remedy("bring the workload's side up")
            .command(show);
            return self.timed(step, since);
        }
        let mut found = format!("{name} is there and up, number {}", link.ifindex);
        if !told {
            found.push_str("; the agent is being told of it");
        }
        self.timed(Step::yes(STEP, found), since)
    }

    fn identity(&self) -> Step {
        const STEP: StepName = StepName::Identity;
        let name = self.interface_name();
        let Some((link, read)) = self.row() else {
            return Step::unknown(STEP, "an identity is registered for a device: there is none");
        };
        let row = match read {
            Ok(row) => row,
            Err(error) => {
                return Step::unknown(STEP, format!("the registry could not be read: {error}"))
                    .command("holdfast attachment list");
            }
        };
        let of_device = row.filter(|row| row.host_mac_shared || row.host_mac == link.mac);
        let told = matches!(&self.facts.identity, IdentityFacts::Row(row) if *row == of_device);
        let since = self.facts.times.identity.filter(|_| told);
        let Some(identity) = of_device else {
            let found = match row {
                Some(_) => format!(
                    "what is registered for number {} was registered for an earlier device",
                    link.ifindex
                ),
                None => format!("nobody is registered behind {name}"),
            };
            let step = Step::no(STEP, found)
                .remedy(self.register())
                .command(self.registering());
            return self.timed(step, since);
        };
        let expected = self.facts.expected;
        if expected.is_some() && identity.incarnation != expected {
            let shown = |incarnation: Option<_>| {
                incarnation.map_or_else(
                    || "no incarnation".to_owned(),
                    |incarnation: holdfast_engine::model::Incarnation| {
                        format!("incarnation {}", hex(incarnation.0.get(..4).unwrap_or_default()))
                    },
                )
            };
            let step = Step::no(
                STEP,
                format!(
                    "{} is registered behind {name}, attachment {} expects {}",
                    shown(identity.incarnation),
                    self.name(),
                    shown(expected)
                ),
            )
            .remedy(format!(
                "either the workload was recreated and spec.identity of attachment {} is still the earlier one's (whoever \
                 writes the object is late), or the new one has not been registered yet",
                self.name()
            ))
            .command("holdfast attachment list");
            return self.timed(step, since);
        }
        let found = format!("registered, token {:016x}", identity.token.get());
        self.timed(Step::yes(STEP, found), since)
    }

    /// The device, and what the registry says of it: fresh, or as the agent knows it if nothing could be seen.
    fn row(&self) -> Option<(&Link, Result<Option<Identity>, String>)> {
        match self.seen.devices.get(self.interface_name()) {
            Some(Ok(Some((link, read)))) => Some((
                link,
                match read {
                    RegistryRead::Row(identity) => Ok(Some(*identity)),
                    RegistryRead::Absent => Ok(None),
                    RegistryRead::Failed(error) => Err(error.clone()),
                },
            )),
            Some(Ok(None) | Err(_)) => None,
            None => self.facts.device.as_ref().map(|link| {
                let read = match &self.facts.identity {
                    IdentityFacts::Unread => Err("it has not been read yet".to_owned()),
                    IdentityFacts::Unreadable(error) => Err(error.clone()),
                    IdentityFacts::Row(row) => Ok(*row),
                };
                (link, read)
            }),
        }
    }

    fn register(&self) -> String {
        let identity = match self.facts.expected {
            Some(_) => format!(" (ID is spec.identity of attachment {})", self.name()),
            None => String::new(),
        };
        format!(
            "a CNI registers a workload when it starts it; if yours does not, do it once the workload runs{identity}"
        )
    }

    fn registering(&self) -> String {
        let identity = if self.facts.expected.is_some() {
            " --identity ID"
        } else {
            ""
        };
        format!(
            "holdfast attachment register --interface {}{identity}",
            self.interface_name()
        )
    }

    fn producer(&self) -> Step {
        const STEP: StepName = StepName::Producer;
        let set = &self.explained.set;
        let wrong = self.differences().find(|difference| {
            matches!(
                difference,
                Difference::Policy { .. } | Difference::Table { .. } | Difference::Backend { .. }
            )
        });
        if let Some(difference) = wrong {
            let what = match difference {
                Difference::Policy { .. } => "the selector of the policy",
                Difference::Table { .. } => "a slot of the policy's set",
                _ => "a producer of the policy's set",
            };
            return self.changed(STEP, what);
        }
        let counted = match set.selected {
            0 => "no attachment of this node matches spec.producers".to_owned(),
            1 => format!("{} of 1 producer is ready", set.ready),
            all => format!("{} of {all} producers are ready", set.ready),
        };
        match &self.facts.supply {
            Supply::Ready if set.ready == 0 => {
                Step::unknown(STEP, format!("{counted}; one is being made ready"))
            }
            Supply::Ready if !set.current => {
                Step::unknown(STEP, format!("{counted}; the policy is being switched to them"))
            }
            Supply::Ready => Step {
                since: set.since_ms.map(rfc3339),
                ..Step::yes(STEP, counted)
            },
            Supply::Missing(why) => {
                // Where some are ready it is this consumer that has none: nobody has noted since when.
                let since = set.supplied.filter(|_| set.ready == 0);
                self.timed(missing(set, why.clone().unwrap_or(counted)), since)
            }
            Supply::Awaited { serving } => {
                let old = if *serving {
                    "the earlier set goes on serving"
                } else {
                    "the earlier set was cut off"
                };
                self.timed(missing(set, format!("{counted}; {old}")), set.waiting)
            }
        }
    }

    fn attach(&self) -> Step {
        const STEP: StepName = StepName::Attach;
        let facts = self.facts;
        if let Some(Difference::NoProgram { found, .. }) = self
            .differences()
            .find(|difference| matches!(difference, Difference::NoProgram { .. }))
        {
            return Step::no(STEP, found.clone())
                .remedy(BY_ITSELF)
                .command(format!("bpftool net show dev {}", self.interface_name()));
        }
        if let Some(trouble) = &facts.attach_trouble {
            let step = Step::no(STEP, trouble.clone())
                .remedy("the agent tries again by itself, at most 30 s later; preflight says what this kernel lacks")
                .command("holdfast preflight");
            return self.timed(step, facts.times.attach);
        }
        if facts.attached {
            let found = format!("the program is attached to {}", self.interface_name());
            return self.timed(Step::yes(STEP, found), facts.times.attach);
        }
        match self.device() {
            Ok(Some(_)) => Step::unknown(STEP, "the program is being attached"),
            Ok(None) | Err(_) => Step::unknown(STEP, "a program is attached to a device: there is none"),
        }
    }

    fn position(&self) -> Step {
        const STEP: StepName = StepName::Position;
        let facts = self.facts;
        let foreign = self.differences().find_map(|difference| match difference {
            Difference::Foreign { programs, .. } => Some(programs),
            _ => None,
        });
        let gone = self
            .differences()
            .any(|difference| matches!(difference, Difference::NoProgram { .. }));
        if !facts.attached || gone {
            return Step::unknown(STEP, "the program is not attached");
        }
        let programs = foreign.unwrap_or(&facts.foreign);
        let since = facts.times.position.filter(|_| *programs == facts.foreign);
        if programs.is_empty() {
            return self.timed(Step::yes(STEP, "no program is asked before ours"), since);
        }
        let found = format!(
            "{} is asked before our program and could let packets pass",
            programs.join(" and ")
        );
        if foreign.is_none() && facts.intent.state == State::Programmed {
            return self.timed(Step::yes(STEP, format!("{found}; that is allowed here")), since);
        }
        let step = Step::no(STEP, found)
            .remedy(
                "have its owner attach it behind ours, or remove it; if it is harmless, run the agent with \
                 --allow-foreign-before",
            )
            .command(format!("bpftool net show dev {}", self.interface_name()));
        self.timed(step, since)
    }

    /// `blocked`: something before is missing, of which this is a consequence.
    fn entries(&self, blocked: bool) -> Step {
        const STEP: StepName = StepName::Entries;
        let facts = self.facts;
        let wrong = self.differences().find_map(|difference| match difference {
            Difference::Row { .. } => Some("the consumer row".to_owned()),
            Difference::Source { address, .. } => Some(format!("the source address {address}")),
            Difference::Entry { key, .. } => Some(format!("the entry for {key}")),
            _ => None,
        });
        if let Some(what) = wrong {
            return self.changed(STEP, &what);
        }
        if let Some(trouble) = &facts.write_trouble {
            return Step::no(STEP, trouble.clone())
                .remedy(
                    "the agent tries again by itself; where a map is full, remove policies, or give the agent larger maps \
                     (--map-..., from the next boot on)",
                )
                .command(self.diff());
        }
        let Some(row) = facts.row else {
            return Step::unknown(STEP, "the consumer row is being written");
        };
        let is_open = row.is_some_and(|row| row.token.is_some());
        let found = format!(
            "{} of {} entries written, {} open; the consumer's row is {}",
            facts.written,
            facts.destinations,
            facts.open,
            match row {
                None => "not there",
                Some(_) if is_open => "open",
                Some(_) => "closed",
            }
        );
        let right = is_open && facts.open == facts.destinations && facts.destinations > 0;
        // Both must be there: it is so since the later of them. A closed row alone is enough for no.
        let (row, entries) = (facts.times.row, facts.times.entries);
        let later = row
            .zip(entries)
            .map(|(row, entries)| if row.at > entries.at { row } else { entries });
        match (right, blocked) {
            (true, _) => self.timed(Step::yes(STEP, found), later),
            (false, true) if is_open => self.timed(Step::no(STEP, found), entries),
            (false, true) => self.timed(Step::no(STEP, found), row),
            (false, false) => Step::unknown(STEP, found),
        }
    }

    fn proof(&self, blocked: bool, differs: bool) -> Step {
        const STEP: StepName = StepName::Proof;
        match &self.facts.proof {
            // What failed under other circumstances says nothing of these.
            ProofFacts::Failed(message) if self.facts.intent.state == State::Failed(FAILED) => {
                Step::no(STEP, message.clone())
                    .remedy("the agent looks at what the proof stood on, and proves again by itself")
                    .command(self.diff())
            }
            ProofFacts::Good if differs => Step::unknown(
                STEP,
                "it was proven, and something in the kernel has changed since",
            ),
            ProofFacts::Good if self.seen.audited.unreadable.is_some() => {
                let why = self.seen.audited.unreadable.as_deref().unwrap_or_default();
                Step::unknown(
                    STEP,
                    format!("it was proven, but the kernel could not be looked at now: {why}"),
                )
            }
            ProofFacts::Good => Step::yes(
                STEP,
                "the program that the interface holds gives the right answers",
            ),
            ProofFacts::Asked => Step::unknown(STEP, "the program is being asked"),
            ProofFacts::Failed(_) | ProofFacts::None if blocked => {
                Step::unknown(STEP, "not asked while something before it is missing")
            }
            ProofFacts::Failed(_) | ProofFacts::None => Step::unknown(STEP, "not asked yet"),
        }
    }

    fn changed(&self, step: StepName, what: &str) -> Step {
        Step::no(step, format!("{what} is not as the agent left it in the kernel"))
            .remedy(BY_ITSELF)
            .command(self.diff())
    }

    fn diff(&self) -> String {
        format!("holdfast diff {}", self.explained.policy.name)
    }
}

const FAILED: FailReason = FailReason::ProofFailed;

/// The steps of which one says no when an intent is in this state.
const fn says(state: State) -> &'static [StepName] {
    match state {
        State::Pending | State::Programmed => &[],
        State::Held(HoldReason::InterfaceMissing | HoldReason::InterfaceDown | HoldReason::NoCarrier) => {
            &[StepName::Interface]
        }
        State::Held(HoldReason::IdentityMissing | HoldReason::IdentityMismatch)
        | State::Failed(FailReason::RegistryUnreadable) => &[StepName::Identity],
        State::Held(HoldReason::NoReadyProducer) => &[StepName::Producer],
        State::Failed(FailReason::AttachFailed) => &[StepName::Attach],
        State::Failed(FailReason::MapWriteFailed | FailReason::MapFull) => &[StepName::Entries],
        State::Failed(FailReason::ProofFailed) => &[StepName::Position, StepName::Proof],
        State::Failed(FailReason::Conflict | FailReason::Invalid | FailReason::Unsupported) => {
            &[StepName::Policy]
        }
    }
}

fn is_blocked(steps: &[Step]) -> bool {
    steps.iter().any(|step| step.answer == Told::No)
}

/// No producer, and why those that are selected are not ready.
fn missing(set: &SetFacts, found: String) -> Step {
    let lacking: Vec<_> = set.producers.iter().filter(|producer| !producer.ready).collect();
    let why = |producer: &&holdfast_engine::explain::ProducerFacts| {
        let why = match (producer.hold, &producer.why) {
            (Some(reason), _) => reason.to_string(),
            (None, Some(why)) => why.clone(),
            (None, None) => "not ready".to_owned(),
        };
        format!("{} ({}): {why}", producer.name, producer.interface)
    };
    let listed: Vec<String> = lacking.iter().map(why).collect();
    let step = if listed.is_empty() {
        Step::no(StepName::Producer, found)
    } else {
        Step::no(StepName::Producer, format!("{found}; {}", listed.join("; ")))
    };
    let Some(first) = lacking.first() else {
        return step.remedy("create the producer's attachment, or correct labels and spec.producers");
    };
    let interface = &first.interface;
    let command = match first.hold {
        Some(HoldReason::InterfaceMissing | HoldReason::NoCarrier) => {
            format!("ip -details link show dev {interface}")
        }
        Some(HoldReason::InterfaceDown) => format!("ip link set dev {interface} up"),
        Some(HoldReason::IdentityMissing) => format!("holdfast attachment register --interface {interface}"),
        Some(HoldReason::IdentityMismatch) => "holdfast attachment list".to_owned(),
        Some(HoldReason::NoReadyProducer) | None => "holdfast status".to_owned(),
    };
    step.remedy("bring a producer up: what it lacks is what a consumer would lack")
        .command(command)
}
