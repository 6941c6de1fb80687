//! What the rules want, computed from what the engine was told, without any knowledge of how it gets there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use holdfast_engine::model::{
    Attachment, Delivery, Destination, Device, FailReason, Features, HoldReason, Ifindex, LinkKind,
    ObjectName, PolicySpec, RouteKey, State, Token, Uid, WhileHeld,
};

use crate::kernel::stranger;
use crate::script::{DESTINATIONS, number_of, route, ways};
use crate::told::{Known, Told, ToldPolicy};

/// The number in a uid of this world.
pub(crate) fn number(uid: &Uid) -> u32 {
    uid.0[1..].parse().expect("a uid of this world")
}

/// Policy uid, consumer uid, service.
pub(crate) type Pair = (u32, u32, u8);
/// Policy uid, consumer uid, service, producer uid.
pub(crate) type Triple = (u32, u32, u8, u32);

/// Whether packets of an attachment may be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Ready(Token),
    Held(HoldReason),
    /// Not read yet.
    Unread,
    /// Never readable.
    Unreadable,
}

/// Whether an attachment has the right to its interface and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    Fine,
    Lost,
    /// Nobody has it: none is served.
    Nobody,
}

/// An attachment as the rules judge it.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    pub(crate) uid: u32,
    pub(crate) interface: String,
    pub(crate) device: Option<Device>,
    pub(crate) gate: Gate,
    pub(crate) right: Right,
    pub(crate) attached: bool,
    /// An audit did not find the program there.
    pub(crate) doubted: bool,
    /// Packets reach the workload: straight to its peer, or by its address.
    pub(crate) reachable: bool,
}

/// What an intent must be once everything has been told, done and answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Must {
    /// One of these.
    Be(Vec<State>),
    /// Nothing can be said, but it must not deliver.
    NotDeliver,
}

impl Must {
    pub(crate) fn allows(&self, state: State) -> bool {
        match self {
            Self::Be(states) => states.contains(&state),
            Self::NotDeliver => matches!(state, State::Failed(_) | State::Held(_) | State::Pending),
        }
    }

    pub(crate) fn may_be(&self, reason: FailReason) -> bool {
        matches!(self, Self::Be(states) if states.contains(&State::Failed(reason)))
    }

    pub(crate) fn programmed(&self) -> bool {
        *self == Self::Be(vec![State::Programmed])
    }
}

/// An intent as the rules want it.
#[derive(Clone, Debug)]
pub(crate) struct Intent {
    pub(crate) policy_uid: u32,
    pub(crate) consumer_uid: u32,
    pub(crate) device: Option<Device>,
    pub(crate) gate: Gate,
    pub(crate) must: Must,
    /// What it claims: an entry must be there. Empty for those whose content is not known.
    pub(crate) keys: BTreeSet<u8>,
    /// What it may claim, closed.
    pub(crate) may_claim: BTreeSet<u8>,
    /// Held traffic is dropped.
    pub(crate) drop: bool,
    /// Selected producers that are ready and not itself.
    pub(crate) producers: BTreeSet<u32>,
    /// Nothing but readiness stands between it and delivery.
    pub(crate) valid: bool,
    /// What its policy allows it, also while nobody can say yet whose the interface is.
    allowed: BTreeSet<u8>,
    /// It wants ranges: the node's own addresses must be known.
    pub(crate) ranges: bool,
}

/// A policy as the rules want it.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) uid: u32,
    pub(crate) generation: u64,
    pub(crate) covers: u64,
    pub(crate) consumers: BTreeSet<u32>,
    /// Selected producers.
    pub(crate) producers: BTreeSet<u32>,
    /// Those that are ready: device, token.
    pub(crate) ready: BTreeMap<u32, (Device, Token)>,
    /// What is in force.
    pub(crate) spec: Option<std::rc::Rc<PolicySpec>>,
    pub(crate) refused: Option<FailReason>,
    /// The build does not do what it asks for: always, or with the producers that are ready now.
    pub(crate) unsupported: bool,
    /// With the producers that are ready now, unless an audit is right about a program that is gone.
    pub(crate) doubtful: bool,
    /// Who is a producer is not clear.
    pub(crate) unclear: bool,
    /// A selected producer may be ready in a moment: its identity is being read, or its program attached.
    pub(crate) undecided: bool,
}

/// Everything that is wanted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wants {
    pub(crate) attachments: BTreeMap<ObjectName, Judged>,
    pub(crate) policies: BTreeMap<ObjectName, Policy>,
    pub(crate) intents: BTreeMap<(ObjectName, ObjectName), Intent>,
    /// Who owns a destination of a device.
    pub(crate) owners: BTreeMap<(Ifindex, u8), (ObjectName, ObjectName)>,
    /// Attachments of each device.
    pub(crate) of_device: BTreeMap<Ifindex, Vec<u32>>,
    /// Tokens that are ready.
    pub(crate) tokens: BTreeMap<Ifindex, Token>,
    pub(crate) pairs: BTreeSet<Pair>,
    pub(crate) triples: BTreeSet<Triple>,
    /// Where packets of each device come from: IPv4, IPv6; none if it has no address of that family.
    pub(crate) sources: BTreeMap<Ifindex, [Option<IpAddr>; 2]>,
}

impl Wants {
    /// The interface that an attachment names.
    pub(crate) fn interface(&self, uid: u32) -> Option<&str> {
        self.attachments
            .values()
            .find(|judged| judged.uid == uid)
            .map(|judged| judged.interface.as_str())
    }

    /// Who owns the packets of a kind that arrive at a device, and by which destination.
    pub(crate) fn owner(&self, ifindex: Ifindex, packet: u8) -> Option<(u8, &(ObjectName, ObjectName))> {
        ways(packet)
            .iter()
            .find_map(|number| Some((*number, self.owners.get(&(ifindex, *number))?)))
    }

    /// Where packets of a device to this address come from.
    pub(crate) fn source(&self, ifindex: Ifindex, destination: IpAddr) -> Option<IpAddr> {
        match self.sources.get(&ifindex) {
            Some(sources) => sources[usize::from(destination.is_ipv6())],
            None => Some(stranger(destination)),
        }
    }
}

fn gate(told: &Told, attachment: &Attachment) -> Gate {
    let Some(link) = told.named(&attachment.interface) else {
        return Gate::Held(HoldReason::InterfaceMissing);
    };
    if !link.up {
        return Gate::Held(HoldReason::InterfaceDown);
    }
    if !link.carrier {
        return Gate::Held(HoldReason::NoCarrier);
    }
    match told.rows.get(&link.ifindex) {
        None => return Gate::Unread,
        Some(Known::Unreadable) => return Gate::Unreadable,
        Some(Known::Row(_)) => {}
    }
    match told.identity(link.ifindex) {
        None => Gate::Held(HoldReason::IdentityMissing),
        Some(identity) if attachment.expected.is_some() && identity.incarnation != attachment.expected => {
            Gate::Held(HoldReason::IdentityMismatch)
        }
        Some(identity) => Gate::Ready(identity.token),
    }
}

fn age(attachment: &Attachment) -> (i64, &Uid) {
    (attachment.created_ms, &attachment.uid)
}

/// The registered identity wins an interface; else, among those that name none, the older.
fn rights_to_interfaces(told: &Told) -> BTreeMap<&ObjectName, Right> {
    let mut rights = BTreeMap::new();
    let mut by_interface: BTreeMap<&str, Vec<&Attachment>> = BTreeMap::new();
    for attachment in told.attachments.values() {
        by_interface
            .entry(&attachment.interface)
            .or_default()
            .push(attachment);
    }
    for (interface, mut claimants) in by_interface {
        if claimants.len() == 1 {
            rights.insert(&claimants[0].name, Right::Fine);
            continue;
        }
        claimants.sort_by(|a, b| age(a).cmp(&age(b)));
        let registered = told.named(interface).and_then(|link| told.identity(link.ifindex));
        let incarnation = registered.and_then(|identity| identity.incarnation);
        let matching = claimants
            .iter()
            .find(|claimant| incarnation.is_some() && claimant.expected == incarnation);
        let nameless = claimants.iter().find(|claimant| claimant.expected.is_none());
        let all_nameless = claimants.iter().all(|claimant| claimant.expected.is_none());
        let winner = matching.or(nameless.filter(|_| all_nameless || registered.is_some()));
        for claimant in &claimants {
            let right = match winner {
                Some(winner) if winner.name == claimant.name => Right::Fine,
                Some(_) => Right::Lost,
                None => Right::Nobody,
            };
            rights.insert(&claimant.name, right);
        }
    }
    rights
}

/// Of two attachments with one address the younger has lost.
fn right_to_addresses(told: &Told, rights: &BTreeMap<&ObjectName, Right>, attachment: &Attachment) -> Right {
    let mut right = Right::Fine;
    for other in told.attachments.values() {
        let shares = other.interface != attachment.interface
            && age(other) < age(attachment)
            && !other.addresses.is_disjoint(&attachment.addresses);
        if shares {
            match rights[&other.name] {
                Right::Fine => return Right::Lost,
                Right::Nobody => right = Right::Nobody,
                Right::Lost => {}
            }
        }
    }
    right
}

fn judge(told: &Told) -> BTreeMap<ObjectName, Judged> {
    let interfaces = rights_to_interfaces(told);
    told.attachments
        .values()
        .map(|attachment| {
            let link = told.named(&attachment.interface);
            let right = match interfaces[&attachment.name] {
                Right::Fine => right_to_addresses(told, &interfaces, attachment),
                other => other,
            };
            let judged = Judged {
                uid: number(&attachment.uid),
                interface: attachment.interface.clone(),
                device: link.map(|link| Device {
                    ifindex: link.ifindex,
                    mac: link.mac,
                }),
                gate: gate(told, attachment),
                right,
                attached: link.is_some_and(|link| told.attached.get(&link.ifindex) == Some(&link.mac)),
                doubted: link.is_some_and(|link| told.doubted.contains(&link.ifindex)),
                reachable: !attachment.addresses.is_empty()
                    || link.is_none_or(|link| link.kind == LinkKind::Veth { peer_elsewhere: true }),
            };
            (attachment.name.clone(), judged)
        })
        .collect()
}

/// Destinations of a policy that can be claimed, as numbers.
fn destinations(spec: &PolicySpec, features: Features) -> BTreeSet<u8> {
    spec.destinations
        .iter()
        .filter_map(|destination| match *destination {
            Destination::Service {
                address,
                protocol,
                port,
                ..
            } => number_of(&RouteKey::Service {
                address,
                protocol,
                port,
            }),
            Destination::Prefix { address, length } if features.prefixes => {
                number_of(&RouteKey::Prefix { address, length })
            }
            Destination::Prefix { .. } => None,
        })
        .collect()
}

fn asks_too_much(spec: &PolicySpec, features: Features) -> bool {
    let prefixes = spec
        .destinations
        .iter()
        .any(|destination| matches!(destination, Destination::Prefix { .. }));
    (prefixes && !features.prefixes)
        || (spec.delivery == Delivery::Translate && !features.translate)
        || (spec.max_staleness.is_some() && !features.max_staleness)
}

fn policy_of(
    told: &Told,
    policy: &ToldPolicy,
    judged: &BTreeMap<ObjectName, Judged>,
    features: Features,
) -> (Policy, Vec<ObjectName>) {
    let shown = policy.good.as_ref().map(|(_, spec)| std::rc::Rc::clone(spec));
    // What is older than what an earlier life served says nothing about what is wanted.
    let spec = shown.clone().filter(|_| !told.is_outdated(policy));
    let refusal = policy.object.content.as_ref().err();
    let consumer_selector = shown
        .as_ref()
        .map(|spec| &spec.consumers)
        .or_else(|| refusal.and_then(|refusal| refusal.consumers.as_ref()));
    let mut wanted = Policy {
        uid: number(&policy.object.uid),
        generation: policy.object.generation,
        covers: 0,
        consumers: BTreeSet::new(),
        producers: BTreeSet::new(),
        ready: BTreeMap::new(),
        refused: refusal.map(|refusal| refusal.reason),
        unsupported: spec.as_ref().is_some_and(|spec| asks_too_much(spec, features)),
        doubtful: false,
        unclear: false,
        undecided: false,
        spec: spec.clone(),
    };
    let mut consumers = Vec::new();
    for attachment in told.attachments.values() {
        if attachment.name.namespace != policy.object.name.namespace {
            continue;
        }
        let one = &judged[&attachment.name];
        if consumer_selector.is_some_and(|selector| selector.matches(&attachment.labels)) {
            wanted.covers = wanted.covers.wrapping_add(attachment.covers.consumer);
            wanted.consumers.insert(one.uid);
            consumers.push(attachment.name.clone());
        }
        let produces = shown
            .as_ref()
            .is_some_and(|spec| spec.producers.matches(&attachment.labels));
        if produces {
            wanted.covers = wanted.covers.wrapping_add(attachment.covers.producer);
            wanted.producers.insert(one.uid);
            let soon = matches!(one.gate, Gate::Unread | Gate::Ready(_)) && one.device.is_some();
            wanted.undecided |= soon && !(one.attached && matches!(one.gate, Gate::Ready(_)));
            let usable = one.attached && one.reachable;
            if let (Gate::Ready(token), Some(device), true) = (one.gate, one.device, usable) {
                match one.right {
                    Right::Fine => {
                        wanted.ready.insert(one.uid, (device, token));
                    }
                    Right::Lost => {}
                    Right::Nobody => wanted.unclear = true,
                }
            }
        }
    }
    // Of a content that is outdated nobody says whether it can be done.
    let several = |count: usize| spec.is_some() && count > 1 && !features.several_producers;
    let doubted = |(device, _): &&(Device, Token)| told.doubted.contains(&device.ifindex);
    let sure = wanted.ready.len() - wanted.ready.values().filter(doubted).count();
    wanted.doubtful = several(wanted.ready.len()) && !several(sure);
    wanted.unsupported |= several(sure);
    (wanted, consumers)
}

/// Computes all of it.
pub(crate) fn wants(told: &Told, features: Features) -> Wants {
    let mut wants = Wants {
        attachments: judge(told),
        ..Wants::default()
    };
    for (name, attachment) in &told.attachments {
        let judged = &wants.attachments[name];
        let Some(device) = judged.device else { continue };
        wants
            .of_device
            .entry(device.ifindex)
            .or_default()
            .push(judged.uid);
        if let Gate::Ready(token) = judged.gate {
            wants.tokens.insert(device.ifindex, token);
        }
        if judged.right == Right::Fine {
            let of_family = |v6: bool| {
                let like = route(if v6 { 3 } else { 0 }).address();
                let own = attachment
                    .addresses
                    .iter()
                    .copied()
                    .find(|address| address.is_ipv6() == v6);
                if attachment.addresses.is_empty() {
                    Some(stranger(like))
                } else {
                    own
                }
            };
            wants
                .sources
                .insert(device.ifindex, [of_family(false), of_family(true)]);
        }
    }
    let mut selected: Vec<(&ToldPolicy, ObjectName)> = Vec::new();
    for (name, policy) in &told.policies {
        let (wanted, consumers) = policy_of(told, policy, &wants.attachments, features);
        wants.policies.insert(name.clone(), wanted);
        selected.extend(consumers.into_iter().map(|consumer| (policy, consumer)));
    }
    selected.sort_by(|(a, x), (b, y)| {
        let age = |policy: &ToldPolicy| (policy.object.created_ms, policy.object.uid.clone());
        x.cmp(y).then_with(|| age(a).cmp(&age(b)))
    });
    let mut rest = &selected[..];
    while let Some((_, consumer)) = rest.first() {
        let count = rest.iter().take_while(|(_, other)| other == consumer).count();
        let (of_consumer, others) = rest.split_at(count);
        rest = others;
        consumer_wants(told, &mut wants, consumer, of_consumer, features);
    }
    for (key, intent) in &wants.intents {
        for service in &intent.allowed {
            wants
                .pairs
                .insert((intent.policy_uid, intent.consumer_uid, *service));
            for producer in &wants.policies[&key.0].producers {
                if *producer != intent.consumer_uid {
                    wants
                        .triples
                        .insert((intent.policy_uid, intent.consumer_uid, *service, *producer));
                }
            }
        }
    }
    wants
}

/// The intents of one consumer; `policies` are its policies, the oldest first.
fn consumer_wants(
    told: &Told,
    wants: &mut Wants,
    consumer: &ObjectName,
    policies: &[(&ToldPolicy, ObjectName)],
    features: Features,
) {
    let judged = wants.attachments[consumer].clone();
    let mut taken: BTreeSet<u8> = BTreeSet::new();
    let mut contested: BTreeSet<u8> = BTreeSet::new();
    let mut losers = Vec::new();
    for (policy, _) in policies {
        let wanted = &wants.policies[&policy.object.name];
        let all = wanted
            .spec
            .as_deref()
            .map(|spec| destinations(spec, features))
            .unwrap_or_default();
        let refused = wanted.unsupported || wanted.spec.is_none() || !judged.reachable;
        let conflict = !all.is_disjoint(&taken);
        // Who is held or failed still has the right of the older.
        let takes = !conflict && judged.right == Right::Fine;
        let valid = takes && !refused;
        if takes {
            taken.extend(&all);
        }
        let may_come = judged.right == Right::Nobody && all.is_disjoint(&contested);
        if may_come {
            contested.extend(&all);
        }
        let producers = wanted
            .ready
            .keys()
            .copied()
            .filter(|uid| *uid != judged.uid)
            .collect();
        let intent = Intent {
            policy_uid: wanted.uid,
            consumer_uid: judged.uid,
            device: judged.device,
            gate: judged.gate,
            must: state_of(told, wanted, &judged, conflict),
            keys: if takes { all.clone() } else { BTreeSet::new() },
            may_claim: if wanted.spec.is_some() {
                all.clone()
            } else {
                (0..DESTINATIONS).collect()
            },
            drop: wanted
                .spec
                .as_deref()
                .is_none_or(|spec| spec.while_held == WhileHeld::Drop),
            producers,
            valid,
            allowed: if valid || (may_come && !refused) {
                all.clone()
            } else {
                BTreeSet::new()
            },
            ranges: all.iter().any(|number| route(*number).is_prefix()),
        };
        let key = (policy.object.name.clone(), consumer.clone());
        if conflict && judged.right == Right::Fine {
            losers.push((key.clone(), all));
        }
        own(wants, judged.device, &key, &intent.keys);
        wants.intents.insert(key, intent);
    }
    // Who may not deliver still claims, closed, what nobody valid takes.
    for (key, all) in losers {
        let left: BTreeSet<u8> = all.difference(&taken).copied().collect();
        taken.extend(&left);
        own(wants, judged.device, &key, &left);
        if let Some(intent) = wants.intents.get_mut(&key) {
            intent.keys = left;
        }
    }
}

fn own(wants: &mut Wants, device: Option<Device>, key: &(ObjectName, ObjectName), services: &BTreeSet<u8>) {
    if let Some(device) = device {
        for service in services {
            wants.owners.insert((device.ifindex, *service), key.clone());
        }
    }
}

fn state_of(told: &Told, policy: &Policy, consumer: &Judged, conflict: bool) -> Must {
    let be = |state| Must::Be(vec![state]);
    let mut reasons: Vec<State> = policy.refused.map(State::Failed).into_iter().collect();
    if policy.unsupported {
        reasons.push(State::Failed(FailReason::Unsupported));
    }
    if (conflict || consumer.right == Right::Lost) && policy.refused.is_none() {
        reasons.push(State::Failed(FailReason::Conflict));
    }
    if policy.doubtful && reasons.is_empty() {
        let held = HoldReason::ALL.map(State::Held);
        reasons.extend(held.into_iter().chain([
            State::Failed(FailReason::Unsupported),
            State::Pending,
            State::Programmed,
        ]));
    }
    if !reasons.is_empty() {
        return Must::Be(reasons);
    }

    if consumer.right == Right::Nobody || policy.spec.is_none() {
        return Must::NotDeliver;
    }
    if !told.passed {
        return be(State::Pending);
    }
    match consumer.gate {
        Gate::Held(reason) => return be(State::Held(reason)),
        Gate::Unread => {
            // No news: what was held stays so until it has been read.
            let held = HoldReason::ALL.map(State::Held);
            return Must::Be(held.into_iter().chain([State::Pending]).collect());
        }
        Gate::Unreadable => return be(State::Failed(FailReason::RegistryUnreadable)),
        Gate::Ready(_) => {}
    }
    if !consumer.reachable {
        return be(State::Failed(FailReason::Unsupported));
    }
    if policy.unclear {
        return Must::Be(vec![State::Programmed, State::Held(HoldReason::NoReadyProducer)]);
    }
    if policy.ready.keys().any(|uid| *uid != consumer.uid) {
        be(State::Programmed)
    } else if policy.undecided {
        Must::Be(vec![State::Held(HoldReason::NoReadyProducer), State::Pending])
    } else {
        be(State::Held(HoldReason::NoReadyProducer))
    }
}
