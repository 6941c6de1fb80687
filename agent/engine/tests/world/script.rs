//! World actions, and the files that hold lists of them.
//!
//! An action is complete in itself and does nothing where it does not apply, so that any part of a script is a script.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use holdfast_engine::model::{
    Delivery, Destination, HoldReason, Incarnation, Lane, ObjectName, OnDeadline, Operator, PolicySpec,
    Protocol, Requirement, RouteKey, Selector, Switchover, WhileHeld,
};
use serde::{Deserialize, Serialize};

use crate::kernel::{OpKind, Outcome};

/// Seconds in the nanoseconds of the engine.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A stored run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    /// The rule that it broke when it was found.
    pub(crate) rule: String,
    /// What happened then.
    pub(crate) story: String,
    #[serde(default)]
    pub(crate) setup: Setup,
    pub(crate) actions: Vec<Action>,
}

/// What a world is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Setup {
    /// The build does several producers a policy.
    pub(crate) several_producers: bool,
    /// It does ranges of addresses.
    pub(crate) prefixes: bool,
    /// The kernel is compared with what is believed of it, every 30 s.
    pub(crate) audits: bool,
    /// Sizes of the arenas.
    pub(crate) policies: u32,
    pub(crate) slots: u32,
    pub(crate) backends: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            several_producers: false,
            prefixes: false,
            audits: false,
            policies: 64,
            slots: 65_536,
            backends: 256,
        }
    }
}

impl Setup {
    /// The arenas are smaller than usual.
    pub(crate) fn is_tight(self) -> bool {
        let usual = Self::default();
        (self.policies, self.slots, self.backends) != (usual.policies, usual.slots, usual.backends)
    }
}

/// Something that happens in the world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "kebab-case",
    deny_unknown_fields
)]
pub(crate) enum Action {
    // --- devices
    /// A device appears. `reuse`: with the lowest number that is free.
    Create {
        interface: String,
        #[serde(default)]
        reuse: bool,
        #[serde(default)]
        down: bool,
        #[serde(default)]
        no_carrier: bool,
        #[serde(default)]
        tap: bool,
    },
    /// A device goes, and its program with it. Its registry row stays: the CNI's delete is an action of its own.
    Delete {
        interface: String,
    },
    /// A device goes and another one of its name and number is there at once.
    Replace {
        interface: String,
    },
    Rename {
        interface: String,
        to: String,
    },
    /// To another network namespace.
    MoveOut {
        interface: String,
    },
    MoveBack {
        interface: String,
    },
    Up {
        interface: String,
        up: bool,
    },
    Carrier {
        interface: String,
        carrier: bool,
    },
    /// The address of the host side changes.
    ChangeMac {
        interface: String,
    },
    /// An attribute that matters to nobody changes.
    ChangeMtu {
        interface: String,
    },

    /// The node gets an address, or loses it.
    Own {
        number: u8,
    },

    // --- the registry
    /// The CNI registers an identity. `poke`: and says so.
    Register {
        interface: String,
        #[serde(default)]
        identity: Option<u8>,
        #[serde(default)]
        poke: bool,
        /// This CNI gives all host sides one address.
        #[serde(default)]
        shared: bool,
    },
    Unregister {
        interface: String,
        #[serde(default)]
        poke: bool,
    },
    /// The CNI deletes the row of a device that is gone.
    UnregisterNumber {
        ifindex: u32,
    },
    /// Somebody says that the identity may have changed.
    Poke {
        interface: String,
    },
    /// The registry row of this interface can be read, or not.
    Readable {
        interface: String,
        readable: bool,
    },

    // --- objects
    PutAttachment {
        name: String,
        interface: String,
        #[serde(default)]
        identity: Option<u8>,
        app: String,
        #[serde(default)]
        addresses: Addresses,
        /// The object is another one of that name.
        #[serde(default)]
        fresh: bool,
    },
    DropAttachment {
        name: String,
    },
    PutPolicy {
        name: String,
        spec: Spec,
        #[serde(default)]
        fresh: bool,
        /// It was created long ago.
        #[serde(default)]
        old: bool,
    },
    /// The content of a policy becomes one that cannot be used.
    SpoilPolicy {
        name: String,
        #[serde(default)]
        unsupported: bool,
        /// Whom it meant can still be read.
        #[serde(default)]
        consumers: Option<String>,
    },
    /// An edit that changes nothing here.
    TouchPolicy {
        name: String,
    },
    DropPolicy {
        name: String,
    },
    /// The source tells everything again.
    Relist,

    // --- the agent
    /// It dies. Of what waits in each lane (write, attach, prove) so many operations still happened, unanswered.
    Crash {
        #[serde(default)]
        done: [u8; 3],
    },
    /// It starts. `saved`: a saved set of objects goes before what the source tells.
    Start {
        #[serde(default)]
        policies_first: bool,
        #[serde(default)]
        saved: bool,
    },
    /// The driver keeps the times of intents.
    Save,

    // --- faults
    /// Operations of a kind are refused, for one interface or all.
    Refuse {
        kind: OpKind,
        #[serde(default)]
        interface: Option<String>,
    },
    /// So many entries fit into the map of route entries.
    Capacity {
        services: u32,
    },
    /// A worker hangs in its next operation, after it happened or before.
    Hang {
        lane: WorldLane,
        done: bool,
    },
    /// Somebody takes our program away.
    Strip {
        interface: String,
    },
    /// Somebody changes what is in our maps. (This and what follows is for worlds with audits: nobody tells.)
    Tamper {
        interface: String,
        how: Tamper,
    },
    /// Somebody puts a program before ours, or takes it away again. `tell`: and that is heard of.
    Foreign {
        interface: String,
        there: bool,
        #[serde(default)]
        tell: bool,
    },
    /// News of what others do at the hooks are lost.
    HooksUnknown,
    /// The next news of a link is lost.
    LoseLink,
    /// All faults are mended, but for workers that hang.
    Mend,

    // --- time and order
    /// The next news of a link reaches the engine. `skip`: unless newer news of that link wait.
    TellLink {
        #[serde(default)]
        skip: bool,
        /// It is told twice.
        #[serde(default)]
        twice: bool,
    },
    /// So many changes of objects reach the engine.
    TellObjects {
        count: u8,
    },
    TellPoke,
    TellAnswer {
        lane: WorldLane,
    },
    /// The engine is polled.
    Poll,
    /// A worker does its next work.
    Work {
        lane: WorldLane,
        #[serde(default = "done")]
        outcome: Outcome,
    },
    /// Somebody answers the engine's question after a link.
    AnswerAsk,
    /// The dump that an audit asked for is compared with what was told.
    CheckLinks,
    /// Notifications are lost, and a dump is taken.
    Overrun,
    /// Time passes, deadlines are kept. `jump`: all at once (a suspended machine).
    Advance {
        ms: u32,
        #[serde(default)]
        jump: bool,
    },
    /// Everything that waits is told, done and answered, in no time.
    Calm,
    /// Faults are mended and time passes until nothing happens any more.
    Rest,
    /// Nothing happens for so many seconds.
    Quiet {
        seconds: u16,
    },
    /// At rest, this intent must be in this state.
    Expect {
        policy: String,
        consumer: String,
        state: ExpectedState,
    },
}

const fn done() -> Outcome {
    Outcome::Done
}

/// States that scripts name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ExpectedState {
    Pending,
    Programmed,
    Held(HoldReason),
    Failed(holdfast_engine::model::FailReason),
}

/// What somebody does to our maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Tamper {
    RowGone,
    RowOpen,
    RowClosed,
    EntriesGone,
    EntriesOpened,
    EntriesClosed,
    EntriesElsewhere,
    SourcesGone,
    StraySource,
    StrayRow,
    StrayEntry,
    StrayLink,
    SelectorEmpty,
    PassFlag,
    PolicyGone,
    StrayPolicy,
    Slots,
    BackendGone,
    BackendElsewhere,
    StrayBackend,
    LocalGone,
    StrayLocal,
}

impl Tamper {
    pub(crate) const ALL: [Self; 22] = [
        Self::RowGone,
        Self::RowOpen,
        Self::RowClosed,
        Self::EntriesGone,
        Self::EntriesOpened,
        Self::EntriesClosed,
        Self::EntriesElsewhere,
        Self::SourcesGone,
        Self::StraySource,
        Self::StrayRow,
        Self::StrayEntry,
        Self::StrayLink,
        Self::SelectorEmpty,
        Self::PassFlag,
        Self::PolicyGone,
        Self::StrayPolicy,
        Self::Slots,
        Self::BackendGone,
        Self::BackendElsewhere,
        Self::StrayBackend,
        Self::LocalGone,
        Self::StrayLocal,
    ];
}

/// One of the engine's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WorldLane {
    Write,
    Attach,
    Prove,
    Audit,
}

impl WorldLane {
    pub(crate) const ALL: [Self; 4] = [Self::Write, Self::Attach, Self::Prove, Self::Audit];

    pub(crate) const fn of(lane: Lane) -> Self {
        match lane {
            Lane::Write => Self::Write,
            Lane::Attach => Self::Attach,
            Lane::Prove => Self::Prove,
            Lane::Audit => Self::Audit,
        }
    }
}

/// Addresses of an attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Addresses {
    /// One of each family, its own.
    #[default]
    Own,
    /// Those and one more.
    More,
    /// Others.
    Other,
    /// Unknown.
    None,
    /// The first attachment's.
    Shared,
}

impl Addresses {
    /// For the attachment of this number.
    pub(crate) fn of(self, number: u8) -> BTreeSet<IpAddr> {
        let v4 = |third, last| IpAddr::V4(Ipv4Addr::new(10, 0, third, last));
        let v6 = |third, last| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, third, last));
        let own = [v4(0, number), v6(0, u16::from(number))];
        match self {
            Self::Own => own.into(),
            Self::More => own.into_iter().chain([v4(1, number)]).collect(),
            Self::Other => [v4(2, number), v6(2, u16::from(number))].into(),
            Self::None => BTreeSet::new(),
            Self::Shared => [v4(0, 0), v6(0, 0)].into(),
        }
    }
}

/// Content of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Spec {
    pub(crate) consumers: String,
    pub(crate) producers: String,
    /// Numbers in [`destination`].
    pub(crate) destinations: BTreeSet<u8>,
    #[serde(default)]
    pub(crate) pass: bool,
    #[serde(default)]
    pub(crate) cut: bool,
    #[serde(default = "deadline")]
    pub(crate) deadline_s: u8,
    #[serde(default)]
    pub(crate) drain_s: u8,
    #[serde(default)]
    pub(crate) translate: bool,
}

const fn deadline() -> u8 {
    5
}

impl Spec {
    pub(crate) fn build(&self) -> PolicySpec {
        PolicySpec {
            consumers: selector(&self.consumers),
            producers: selector(&self.producers),
            destinations: self
                .destinations
                .iter()
                .map(|number| destination(*number))
                .collect(),
            delivery: if self.translate {
                Delivery::Translate
            } else {
                Delivery::Direct
            },
            while_held: if self.pass {
                WhileHeld::Pass
            } else {
                WhileHeld::Drop
            },
            switchover: Switchover {
                deadline: u64::from(self.deadline_s) * SECOND,
                on_deadline: if self.cut {
                    OnDeadline::Cut
                } else {
                    OnDeadline::KeepOld
                },
                drain: u64::from(self.drain_s) * SECOND,
            },
            max_staleness: None,
        }
    }
}

/// `a` = label `app` is `a`; `a|b` = one of them; `!a` = not `a`; `any` = has the label.
pub(crate) fn selector(text: &str) -> Selector {
    let app = "app".to_owned();
    let expression = |operator| Selector {
        match_labels: BTreeMap::new(),
        match_expressions: vec![Requirement {
            key: "app".into(),
            operator,
        }],
    };
    if text == "any" {
        return expression(Operator::Exists);
    }
    if let Some(not) = text.strip_prefix('!') {
        return expression(Operator::NotIn(BTreeSet::from([not.to_owned()])));
    }
    if text.contains('|') {
        return expression(Operator::In(text.split('|').map(str::to_owned).collect()));
    }
    Selector {
        match_labels: BTreeMap::from([(app, text.to_owned())]),
        match_expressions: Vec::new(),
    }
}

/// How many of [`route`] are services; they come first.
pub(crate) const SERVICES: u8 = 5;
/// How many destinations there are; those that are no services are ranges.
pub(crate) const DESTINATIONS: u8 = 9;
/// How many kinds of packets there are. Each of the first goes to the destination of its number.
pub(crate) const PACKETS: u8 = 11;

/// The destinations of this world, as policies name them.
pub(crate) fn destination(number: u8) -> Destination {
    match route(number) {
        RouteKey::Service {
            address,
            protocol,
            port,
        } => Destination::Service {
            address,
            protocol,
            port,
            target_port: None,
        },
        RouteKey::Prefix { address, length } => Destination::Prefix { address, length },
    }
}

/// The destinations of this world.
pub(crate) const fn route(number: u8) -> RouteKey {
    const fn service(address: IpAddr, protocol: Protocol, port: u16) -> RouteKey {
        RouteKey::Service {
            address,
            protocol,
            port,
        }
    }
    const fn v4(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 96, 0, last))
    }
    const V6: [u16; 3] = [0xfd00, 0x96, 0];
    const fn v6(last: u16) -> IpAddr {
        IpAddr::V6(Ipv6Addr::new(V6[0], V6[1], V6[2], 0, 0, 0, 0, last))
    }
    let (address, length) = match number {
        0 => return service(v4(10), Protocol::Udp, 53),
        1 => return service(v4(10), Protocol::Tcp, 53),
        2 => return service(v4(11), Protocol::Tcp, 80),
        3 => return service(v6(0x10), Protocol::Udp, 53),
        4 => return service(v4(12), Protocol::Tcp, 443),
        5 => (IpAddr::V4(Ipv4Addr::new(10, 97, 0, 0)), 16),
        // These two have services in them.
        6 => (v4(0), 24),
        7 => (v6(0), 64),
        // The node's own addresses are in this one.
        _ => (IpAddr::V4(Ipv4Addr::new(172, 16, 0, 0)), 24),
    };
    RouteKey::Prefix { address, length }
}

/// The number of a destination.
pub(crate) fn number_of(key: &RouteKey) -> Option<u8> {
    (0..DESTINATIONS).find(|number| route(*number) == *key)
}

/// An address of the node.
pub(crate) const fn own_address(number: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(172, 16, 0, number))
}

/// A packet, as far as routes tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) address: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
}

/// The packets of this world: one to each destination (to ranges one that goes to no service), then to the node.
pub(crate) const fn packet(number: u8) -> Packet {
    let address = match number {
        5 => IpAddr::V4(Ipv4Addr::new(10, 97, 1, 1)),
        6 => IpAddr::V4(Ipv4Addr::new(10, 96, 0, 99)),
        7 => IpAddr::V6(Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x99)),
        8 => own_address(99),
        9 => own_address(0),
        10 => own_address(1),
        _ => match route(number) {
            RouteKey::Service {
                address,
                protocol,
                port,
            } => {
                return Packet {
                    address,
                    protocol,
                    port,
                };
            }
            RouteKey::Prefix { address, .. } => address,
        },
    };
    Packet {
        address,
        protocol: Protocol::Tcp,
        port: 99,
    }
}

/// The destinations that a packet may go to, the most exact first. None for those to the node.
pub(crate) const fn ways(packet: u8) -> &'static [u8] {
    match packet {
        0 => &[0, 6],
        1 => &[1, 6],
        2 => &[2, 6],
        3 => &[3, 7],
        4 => &[4, 6],
        5 => &[5],
        6 => &[6],
        7 => &[7],
        8 => &[8],
        _ => &[],
    }
}

/// Whether a range contains an address.
pub(crate) fn contains(range: IpAddr, length: u8, address: IpAddr) -> bool {
    match (range, address) {
        (IpAddr::V4(range), IpAddr::V4(address)) => {
            let apart = u32::from(range) ^ u32::from(address);
            apart.leading_zeros() >= u32::from(length)
        }
        (IpAddr::V6(range), IpAddr::V6(address)) => {
            let apart = u128::from(range) ^ u128::from(address);
            apart.leading_zeros() >= u32::from(length)
        }
        _ => false,
    }
}

/// `namespace/name`; the namespace may be left out.
pub(crate) fn object_name(text: &str) -> ObjectName {
    let (namespace, name) = text.split_once('/').unwrap_or(("shop", text));
    ObjectName {
        namespace: namespace.into(),
        name: name.into(),
    }
}

pub(crate) const fn incarnation(number: u8) -> Incarnation {
    Incarnation([number; 16])
}

// --- real nodes --------------------------------------------------------------------------------------------

impl Action {
    /// What becomes of it on a real node, which has an order of its own: nothing, if it is about the order in which news
    /// and answers come, or about time. None if no node can do it, or not at a script's command.
    pub(crate) fn on_a_node(&self) -> Option<Vec<Self>> {
        let mut action = self.clone();
        match &mut action {
            Self::Create { tap: true, .. }
            | Self::Readable { .. }
            | Self::Refuse { .. }
            | Self::Capacity { .. }
            | Self::Hang { .. }
            | Self::Tamper { .. }
            | Self::Foreign { .. }
            | Self::HooksUnknown
            | Self::LoseLink
            | Self::Overrun => return None,
            Self::Work { outcome, .. } => return (*outcome == Outcome::Done).then(Vec::new),
            Self::TellLink { .. }
            | Self::TellObjects { .. }
            | Self::TellPoke
            | Self::TellAnswer { .. }
            | Self::Poll
            | Self::AnswerAsk
            | Self::CheckLinks
            | Self::Save
            | Self::Mend
            | Self::Advance { .. }
            | Self::Quiet { .. } => return Some(Vec::new()),
            Self::PutPolicy { spec, old, .. } => {
                // Labs have services only, and files no age.
                if spec.destinations.iter().any(|number| *number >= SERVICES) {
                    return None;
                }
                *old = false;
            }
            Self::Crash { done } => *done = [0; 3],
            Self::Start { saved, .. } => *saved = false,
            _ => {}
        }
        Some(match action {
            // Without audits only a new life finds that in this world.
            Self::Strip { .. } => vec![
                action,
                Self::Crash { done: [0; 3] },
                Self::Start {
                    policies_first: false,
                    saved: false,
                },
            ],
            action => vec![action],
        })
    }

    /// After which a node and the world must show the same; none for an action that only looks, or that is no end.
    pub(crate) const fn meeting(&self) -> Option<Self> {
        match self {
            Self::Calm | Self::Rest | Self::Expect { .. } | Self::Crash { .. } | Self::Strip { .. } => None,
            // Nobody is told: it is found as time passes.
            Self::Register { poke: false, .. }
            | Self::Unregister { poke: false, .. }
            | Self::UnregisterNumber { .. } => Some(Self::Rest),
            _ => Some(Self::Calm),
        }
    }
}

impl Script {
    /// The script as a real node can run it, in step with the world; none if it cannot.
    pub(crate) fn on_a_node(&self) -> Option<Self> {
        // Who of the losers of a conflict gives its slot back before another asks for it is a matter of order.
        let policies: BTreeSet<&String> = self
            .actions
            .iter()
            .filter_map(|action| match action {
                Action::PutPolicy { name, .. } => Some(name),
                _ => None,
            })
            .collect();
        if policies.len() > self.setup.policies as usize {
            return None;
        }
        let mut actions = Vec::new();
        let mut spoiled = false;
        for action in &self.actions {
            for action in action.on_a_node()? {
                spoiled |= matches!(action, Action::SpoilPolicy { .. });
                // What was said well before, a directory tells a new life again, and this world does not.
                if spoiled && matches!(action, Action::Start { .. } | Action::Crash { .. }) {
                    return None;
                }
                let meeting = action.meeting();
                actions.push(action);
                actions.extend(meeting);
            }
        }
        actions.push(Action::Rest);
        actions.dedup();
        Some(Self {
            setup: Setup {
                several_producers: true,
                prefixes: false,
                audits: false,
                ..self.setup
            },
            actions,
            ..self.clone()
        })
    }
}

// --- files -------------------------------------------------------------------------------------------------

/// All scripts that are stored in this folder, or in the one that `HF_SCRIPTS` names, by file name.
pub(crate) fn stored(folder: &Path) -> BTreeMap<String, Script> {
    let named = std::env::var_os("HF_SCRIPTS");
    let folder = named.as_deref().map_or(folder, Path::new);
    let mut scripts = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("the folder of scripts") {
        let path = entry.expect("an entry of the folder").path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a readable script");
        let script =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        scripts.insert(name, script);
    }
    scripts
}

/// One action a line, so that people can read and edit it.
pub(crate) fn write(script: &Script) -> String {
    let line = |action: &Action| serde_json::to_string(action).expect("an action is plain data");
    let actions: Vec<String> = script
        .actions
        .iter()
        .map(|action| format!("    {}", line(action)))
        .collect();
    let json = |value: &str| serde_json::to_string(value).expect("text");
    format!(
        "{{\n  \"rule\": {},\n  \"story\": {},\n  \"setup\": {},\n  \"actions\": [\n{}\n  ]\n}}\n",
        json(&script.rule),
        json(&script.story),
        serde_json::to_string(&script.setup).expect("a setup is plain data"),
        actions.join(",\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_comes_back_from_its_file() {
        let script = Script {
            rule: "a rule".into(),
            story: "what \"happened\"".into(),
            setup: Setup::default(),
            actions: vec![
                Action::Create {
                    interface: "hf0".into(),
                    reuse: true,
                    down: false,
                    no_carrier: false,
                    tap: false,
                },
                Action::PutPolicy {
                    name: "p0".into(),
                    spec: Spec {
                        consumers: "web|api".into(),
                        producers: "!web".into(),
                        destinations: BTreeSet::from([0, 5]),
                        pass: false,
                        cut: true,
                        deadline_s: 3,
                        drain_s: 0,
                        translate: false,
                    },
                    fresh: false,
                    old: false,
                },
                Action::Work {
                    lane: WorldLane::Write,
                    outcome: Outcome::RefusedAfter,
                },
                Action::Rest,
            ],
        };
        let back: Script = serde_json::from_str(&write(&script)).unwrap();
        assert_eq!(back, script);
    }

    #[test]
    fn numbers_name_destinations_and_packets() {
        for number in 0..DESTINATIONS {
            assert_eq!(number_of(&route(number)), Some(number));
            assert_eq!(route(number).is_prefix(), number >= SERVICES);
        }
        for number in 0..PACKETS {
            let Packet {
                address,
                protocol,
                port,
            } = packet(number);
            let takes = |key: RouteKey| match key {
                RouteKey::Prefix {
                    address: range,
                    length,
                } => contains(range, length, address),
                service => {
                    service
                        == RouteKey::Service {
                            address,
                            protocol,
                            port,
                        }
                }
            };
            let taken: Vec<u8> = (0..DESTINATIONS).filter(|number| takes(route(*number))).collect();
            let own = address == own_address(0) || address == own_address(1);
            assert_eq!(taken, if own { &[8] } else { ways(number) });
        }
    }
}
