//! From written objects to the engine's model: every rule, with field and reason.
//!
//! The rules live in the CRD too, but an agent must survive objects that predate a rule, and a directory has no CRD.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use holdfast_engine::model::{
    self, Attachment, FailReason, ObjectName, Operator, Origin, Policy, PolicySpec, Refusal, Requirement,
    Selector, Uid,
};

use super::hash;
use super::v1alpha1::{self as written, Delivery, OnDeadline, Protocol, SelectorOperator, WhileHeld};

/// Most destinations of a policy.
pub const MAX_DESTINATIONS: usize = 64;
/// Most addresses of an attachment.
pub const MAX_ADDRESSES: usize = 16;
/// Most `matchLabels` of a selector.
pub const MAX_MATCH_LABELS: usize = 32;
/// Most `matchExpressions` of a selector, and most values of one.
pub const MAX_MATCH_EXPRESSIONS: usize = 16;
/// See [`MAX_MATCH_EXPRESSIONS`].
pub const MAX_VALUES: usize = 64;
/// Longest identity string in bytes.
pub const MAX_IDENTITY: usize = 253;
/// Longest interface name in bytes: `IFNAMSIZ` less the terminating zero.
pub const MAX_INTERFACE: usize = 15;

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 24 * 3_600 * SECOND;

/// One thing that is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Which field: `spec.destinations[2].port`.
    pub path: String,
    /// What is wrong, for people.
    pub message: String,
    /// The value may be right for another release.
    pub unsupported: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// Everything that is wrong with an object; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", list(.0))]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// What an engine is told: `Unsupported` only if nothing else is wrong.
    #[must_use]
    pub fn reason(&self) -> FailReason {
        if self.0.iter().all(|problem| problem.unsupported) {
            FailReason::Unsupported
        } else {
            FailReason::Invalid
        }
    }
}

fn list(problems: &[Problem]) -> String {
    problems
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// Where an object comes from decides what it must say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// A file on the node: whoever writes it owns the node.
    File,
    /// An API server, where an attachment without identity would be a right to any tenant's interface.
    ApiServer,
}

/// What an object is called and which version of it this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Namespace and name.
    pub name: ObjectName,
    /// Uid.
    pub uid: Uid,
    /// Generation.
    pub generation: u64,
    /// Creation, milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The object that it is a copy of.
    pub origin: Option<Origin>,
}

/// Collects problems with their path.
struct Check {
    problems: Vec<Problem>,
}

impl Check {
    const fn new() -> Self {
        Self { problems: Vec::new() }
    }

    fn invalid(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem {
            path: path.into(),
            message: message.into(),
            unsupported: false,
        });
    }

    fn unknown(&mut self, path: impl Into<String>, value: &str, known: &[&str]) {
        self.problems.push(Problem {
            path: path.into(),
            message: format!("unknown value {value:?}, this release knows {}", known.join(", ")),
            unsupported: true,
        });
    }

    fn finish<T>(self, value: Option<T>) -> Result<T, Problems> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => Err(Problems(self.problems)),
        }
    }
}

/// An attachment as the engine knows it.
///
/// # Errors
/// Everything that is wrong with it.
pub fn attachment(
    meta: &Meta,
    spec: &written::AttachmentSpec,
    provenance: Provenance,
) -> Result<Attachment, Problems> {
    let mut check = Check::new();
    if let Err(message) = node_name(&spec.node) {
        check.invalid("spec.node", message);
    }
    if let Err(message) = interface_name(&spec.interface) {
        check.invalid("spec.interface", message);
    }
    match &spec.identity {
        Some(identity) => {
            if let Err(message) = self::identity(identity) {
                check.invalid("spec.identity", message);
            }
        }
        None if provenance == Provenance::ApiServer => {
            check.invalid("spec.identity", "required in objects of an API server");
        }
        None => {}
    }
    let addresses = workload_addresses(&mut check, &spec.addresses);
    check.finish(Some(Attachment {
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        generation: meta.generation,
        created_ms: meta.created_ms,
        interface: spec.interface.clone(),
        expected: spec.identity.as_deref().map(hash::incarnation),
        addresses,
        labels: meta.labels.clone(),
        covers: hash::covers(&meta.uid, meta.generation),
    }))
}

fn workload_addresses(check: &mut Check, written: &[String]) -> BTreeSet<IpAddr> {
    if written.len() > MAX_ADDRESSES {
        check.invalid(
            "spec.addresses",
            format!("{} addresses, at most {MAX_ADDRESSES}", written.len()),
        );
    }
    let mut addresses = BTreeSet::new();
    for (index, text) in written.iter().enumerate() {
        let path = format!("spec.addresses[{index}]");
        match address(text).and_then(|address| unicast(address).map(|()| address)) {
            Ok(address) if !addresses.insert(address) => check.invalid(path, format!("{text} twice")),
            Ok(_) => {}
            Err(message) => check.invalid(path, message),
        }
    }
    addresses
}

/// A policy as the engine knows it: with its content, or with the reason why there is none.
#[must_use]
pub fn policy(meta: &Meta, content: Result<PolicySpec, Refusal>) -> Policy {
    Policy {
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        generation: meta.generation,
        created_ms: meta.created_ms,
        origin: meta.origin.clone(),
        content,
    }
}

/// The content of a policy.
///
/// # Errors
/// Everything that is wrong with it.
pub fn policy_spec(spec: &written::RoutePolicySpec) -> Result<PolicySpec, Problems> {
    let mut check = Check::new();
    let consumers = selector(&mut check, "spec.consumers", &spec.consumers);
    let producers = selector(&mut check, "spec.producers", &spec.producers);
    let destinations = destinations(&mut check, spec);
    let delivery = match &spec.delivery {
        Delivery::Direct => Some(model::Delivery::Direct),
        Delivery::Translate => Some(model::Delivery::Translate),
        Delivery::Unknown(value) => {
            check.unknown("spec.delivery", value, Delivery::KNOWN);
            None
        }
    };
    let while_held = match &spec.while_held {
        WhileHeld::Drop => Some(model::WhileHeld::Drop),
        WhileHeld::Pass => Some(model::WhileHeld::Pass),
        WhileHeld::Unknown(value) => {
            check.unknown("spec.whileHeld", value, WhileHeld::KNOWN);
            None
        }
    };
    let switchover = switchover(&mut check, &spec.switchover);
    let max_staleness = spec
        .max_staleness
        .as_deref()
        .and_then(|text| bounded_duration(&mut check, "spec.maxStaleness", text, 10 * SECOND));
    let content = (|| {
        Some(PolicySpec {
            consumers: consumers?,
            producers: producers?,
            destinations,
            delivery: delivery?,
            while_held: while_held?,
            switchover: switchover?,
            max_staleness,
        })
    })();
    check.finish(content)
}

/// What the engine is told of a policy that cannot be used. `consumers` is the selector as far as it could be read.
#[must_use]
pub fn refusal(problems: &Problems, consumers: Option<&written::LabelSelector>) -> Refusal {
    Refusal {
        reason: problems.reason(),
        message: problems.to_string(),
        consumers: consumers.and_then(|written| selector(&mut Check::new(), "", written)),
    }
}

fn switchover(check: &mut Check, written: &written::Switchover) -> Option<model::Switchover> {
    let deadline = bounded_duration(check, "spec.switchover.deadline", &written.deadline, SECOND);
    let drain = match duration(&written.drain) {
        Ok(0) => Some(0),
        _ => bounded_duration(check, "spec.switchover.drain", &written.drain, SECOND),
    };
    let on_deadline = match &written.on_deadline {
        OnDeadline::KeepOld => Some(model::OnDeadline::KeepOld),
        OnDeadline::Cut => Some(model::OnDeadline::Cut),
        OnDeadline::Unknown(value) => {
            check.unknown("spec.switchover.onDeadline", value, OnDeadline::KNOWN);
            None
        }
    };
    Some(model::Switchover {
        deadline: deadline?,
        on_deadline: on_deadline?,
        drain: drain?,
    })
}

// --- selectors ---------------------------------------------------------------------------------------------

fn selector(check: &mut Check, path: &str, written: &written::LabelSelector) -> Option<Selector> {
    let before = check.problems.len();
    if written.match_labels.is_empty() && written.match_expressions.is_empty() {
        check.invalid(path, "empty: it would select every attachment of the namespace");
    }
    if written.match_labels.len() > MAX_MATCH_LABELS {
        check.invalid(
            format!("{path}.matchLabels"),
            format!("at most {MAX_MATCH_LABELS}"),
        );
    }
    if written.match_expressions.len() > MAX_MATCH_EXPRESSIONS {
        check.invalid(
            format!("{path}.matchExpressions"),
            format!("at most {MAX_MATCH_EXPRESSIONS}"),
        );
    }
    for (key, value) in &written.match_labels {
        if let Err(message) = label_key(key).and_then(|()| label_value(value)) {
            check.invalid(format!("{path}.matchLabels[{key}]"), message);
        }
    }
    let mut requirements = Vec::new();
    for (index, requirement) in written.match_expressions.iter().enumerate() {
        let path = format!("{path}.matchExpressions[{index}]");
        requirements.extend(self::requirement(check, &path, requirement));
    }
    (check.problems.len() == before).then(|| Selector {
        match_labels: written.match_labels.clone(),
        match_expressions: requirements,
    })
}

fn requirement(check: &mut Check, path: &str, written: &written::LabelRequirement) -> Option<Requirement> {
    let before = check.problems.len();
    if let Err(message) = label_key(&written.key) {
        check.invalid(format!("{path}.key"), message);
    }
    if written.values.len() > MAX_VALUES {
        check.invalid(format!("{path}.values"), format!("at most {MAX_VALUES}"));
    }
    for (index, value) in written.values.iter().enumerate() {
        if let Err(message) = label_value(value) {
            check.invalid(format!("{path}.values[{index}]"), message);
        }
    }
    let values: BTreeSet<String> = written.values.iter().cloned().collect();
    let operator = match &written.operator {
        SelectorOperator::In | SelectorOperator::NotIn if values.is_empty() => {
            check.invalid(format!("{path}.values"), "needs at least one value");
            None
        }
        SelectorOperator::Exists | SelectorOperator::DoesNotExist if !values.is_empty() => {
            check.invalid(
                format!("{path}.values"),
                format!("operator {} takes no values", written.operator.as_str()),
            );
            None
        }
        SelectorOperator::In => Some(Operator::In(values)),
        SelectorOperator::NotIn => Some(Operator::NotIn(values)),
        SelectorOperator::Exists => Some(Operator::Exists),
        SelectorOperator::DoesNotExist => Some(Operator::DoesNotExist),
        SelectorOperator::Unknown(value) => {
            check.unknown(format!("{path}.operator"), value, SelectorOperator::KNOWN);
            None
        }
    };
    let operator = operator?;
    (check.problems.len() == before).then(|| Requirement {
        key: written.key.clone(),
        operator,
    })
}

// --- destinations ------------------------------------------------------------------------------------------

fn destinations(check: &mut Check, spec: &written::RoutePolicySpec) -> BTreeSet<model::Destination> {
    let written = &spec.destinations;
    if written.is_empty() {
        check.invalid("spec.destinations", "at least one is needed");
    }
    if written.len() > MAX_DESTINATIONS {
        check.invalid(
            "spec.destinations",
            format!("{} destinations, at most {MAX_DESTINATIONS}", written.len()),
        );
    }
    let mut destinations = BTreeSet::new();
    let mut seen = BTreeMap::new();
    for (index, item) in written.iter().enumerate() {
        let path = format!("spec.destinations[{index}]");
        let Some(destination) = destination(check, &path, item, &spec.delivery) else {
            continue;
        };
        // The target port is no part of what a packet is matched by.
        let key = match destination {
            model::Destination::Service {
                address,
                protocol,
                port,
                ..
            } => (address, u16::from(protocol.number()), port),
            // Above every protocol number, so that a prefix never equals a service.
            model::Destination::Prefix { address, length } => (address, 256, u16::from(length)),
        };
        if let Some(first) = seen.insert(key, index) {
            check.invalid(path, format!("the same as spec.destinations[{first}]"));
        }
        destinations.insert(destination);
    }
    destinations
}

fn destination(
    check: &mut Check,
    path: &str,
    written: &written::Destination,
    delivery: &Delivery,
) -> Option<model::Destination> {
    let before = check.problems.len();
    let range = match range(&written.address) {
        Ok(range) => Some(range),
        Err(message) => {
            check.invalid(format!("{path}.address"), message);
            None
        }
    };
    let protocol = match &written.protocol {
        Protocol::Any => None,
        Protocol::Tcp => Some(model::Protocol::Tcp),
        Protocol::Udp => Some(model::Protocol::Udp),
        Protocol::Unknown(value) => {
            check.unknown(format!("{path}.protocol"), value, Protocol::KNOWN);
            return None;
        }
    };
    match (protocol, written.port) {
        (Some(protocol), 0) => check.invalid(
            format!("{path}.port"),
            format!("a service needs one with protocol {}", written_protocol(protocol)),
        ),
        (None, port) if port != 0 => {
            check.invalid(format!("{path}.protocol"), "a port needs TCP or UDP");
        }
        _ => {}
    }
    if let Some(target) = written.target_port {
        if protocol.is_none() || *delivery != Delivery::Translate {
            check.invalid(
                format!("{path}.targetPort"),
                "only with delivery Translate and protocol TCP or UDP",
            );
        } else if target == 0 {
            check.invalid(format!("{path}.targetPort"), "must be 1 to 65535");
        }
    }
    let range = range?;
    if let Some(what) = never_captured(range) {
        check.invalid(
            format!("{path}.address"),
            format!("{what} traffic is never captured"),
        );
    }
    let destination = match protocol {
        Some(protocol) if range.plain => model::Destination::Service {
            address: range.address,
            protocol,
            port: written.port,
            target_port: written.target_port,
        },
        Some(_) => {
            check.invalid(
                format!("{path}.address"),
                "a service has one address; a prefix has neither protocol nor port",
            );
            return None;
        }
        None => model::Destination::Prefix {
            address: range.address,
            length: range.length,
        },
    };
    (check.problems.len() == before).then_some(destination)
}

const fn written_protocol(protocol: model::Protocol) -> &'static str {
    match protocol {
        model::Protocol::Tcp => "TCP",
        model::Protocol::Udp => "UDP",
    }
}

/// An address or a CIDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    address: IpAddr,
    length: u8,
    /// Written without a length.
    plain: bool,
}

fn range(text: &str) -> Result<Range, String> {
    let Some((network, length)) = text.split_once('/') else {
        let address = address(text)?;
        return Ok(Range {
            address,
            length: bits(address),
            plain: true,
        });
    };
    let address = address(network)?;
    let bits = bits(address);
    // Leading zeros and signs parse, but are not how a length is written.
    let length: u8 = length
        .parse()
        .ok()
        .filter(|parsed: &u8| *parsed <= bits && parsed.to_string() == length)
        .ok_or_else(|| format!("/{length} is no prefix length of {network}"))?;
    if length == bits {
        return Err(format!("write {network}, not {text}: one address has no length"));
    }
    let masked = masked(address, length);
    if masked != address {
        return Err(format!("host bits are set: the network is {masked}/{length}"));
    }
    Ok(Range {
        address,
        length,
        plain: false,
    })
}

const fn bits(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

fn masked(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            IpAddr::V6((u128::from(v6) & mask).into())
        }
    }
}

/// A canonical address: one spelling each, so that equal destinations are equal text.
fn address(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| format!("{text:?} is no IP address"))?;
    if let IpAddr::V6(v6) = address
        && let Some(v4) = v6.to_ipv4_mapped()
    {
        return Err(format!("IPv4-mapped: write {v4}"));
    }
    if address.to_string() != text {
        return Err(format!("not canonical: write {address}"));
    }
    Ok(address)
}

/// What the packet program passes before it looks at any route: a policy for nothing else could never be proven.
const NEVER_CAPTURED: [(IpAddr, u8, &str); 9] = [
    (IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16, "link-local"),
    (IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 4, "multicast"),
    (IpAddr::V4(Ipv4Addr::BROADCAST), 32, "broadcast"),
    (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8, "loopback"),
    (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 32, "unspecified"),
    (
        IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)),
        10,
        "link-local",
    ),
    (
        IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)),
        8,
        "multicast",
    ),
    (IpAddr::V6(Ipv6Addr::LOCALHOST), 128, "loopback"),
    (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 128, "unspecified"),
];

/// What kind of never captured traffic a range is wholly made of.
fn never_captured(range: Range) -> Option<&'static str> {
    NEVER_CAPTURED
        .into_iter()
        .find(|(network, length, _)| {
            network.is_ipv4() == range.address.is_ipv4()
                && range.length >= *length
                && masked(range.address, *length) == *network
        })
        .map(|(_, _, what)| what)
}

/// Whether a single host can have this address.
fn unicast(address: IpAddr) -> Result<(), String> {
    let what = if address.is_unspecified() {
        "the unspecified address"
    } else if address.is_loopback() {
        "a loopback address"
    } else if address.is_multicast() {
        "a multicast address"
    } else if address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        "the broadcast address"
    } else {
        return Ok(());
    };
    Err(format!("{address} is {what}, no workload has it"))
}

// --- durations ---------------------------------------------------------------------------------------------

/// A duration as objects and the command line write it: hours, minutes and seconds, each at most once and in this
/// order (`90s`, `5m`, `1h30m`). In nanoseconds.
///
/// # Errors
/// What is wrong with the text.
pub fn duration(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no duration: write it like 30s, 5m or 1h30m");
    let mut total: u64 = 0;
    let mut rest = text;
    let mut largest = u64::MAX;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        // Nine digits are 31 years in seconds, and do not overflow.
        if digits == 0 || digits > 9 {
            return Err(wrong());
        }
        let (number, tail) = rest.split_at(digits);
        let unit = match tail.bytes().next() {
            Some(b'h') => 3_600,
            Some(b'm') => 60,
            Some(b's') => 1,
            _ => return Err(wrong()),
        };
        if unit >= largest {
            return Err(wrong());
        }
        largest = unit;
        let number: u64 = number.parse().map_err(|_| wrong())?;
        total = total.saturating_add(number.saturating_mul(unit));
        rest = &tail[1..];
    }
    if text.is_empty() {
        return Err(wrong());
    }
    Ok(total.saturating_mul(SECOND))
}

fn bounded_duration(check: &mut Check, path: &str, text: &str, least: u64) -> Option<u64> {
    match duration(text) {
        Ok(nanos) if (least..=DAY).contains(&nanos) => Some(nanos),
        Ok(_) => {
            check.invalid(path, format!("{text} is not within {}s to 24h", least / SECOND));
            None
        }
        Err(message) => {
            check.invalid(path, message);
            None
        }
    }
}

// --- names -------------------------------------------------------------------------------------------------

/// Whether the kernel takes it as an interface name (`dev_valid_name`), and it can be printed.
///
/// # Errors
/// What is wrong with it.
pub fn interface_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > MAX_INTERFACE {
        return Err(format!(
            "{name:?} has {} bytes, 1 to {MAX_INTERFACE} are allowed",
            name.len()
        ));
    }
    if name == "." || name == ".." {
        return Err(format!("{name:?} is no interface name"));
    }
    match name
        .chars()
        .find(|c| !c.is_ascii_graphic() || matches!(c, '/' | ':'))
    {
        Some(wrong) => Err(format!("{wrong:?} cannot be in an interface name")),
        None => Ok(()),
    }
}

/// Whether it can stand for a workload incarnation.
///
/// # Errors
/// What is wrong with it.
pub fn identity(text: &str) -> Result<(), String> {
    if text.is_empty() || text.len() > MAX_IDENTITY {
        return Err(format!("{} bytes, 1 to {MAX_IDENTITY} are allowed", text.len()));
    }
    match text.chars().find(|c| c.is_control() || c.is_whitespace()) {
        Some(wrong) => Err(format!("{wrong:?} cannot be in an identity")),
        None => Ok(()),
    }
}

/// Whether it can be the name of a node.
///
/// # Errors
/// What is wrong with it.
pub fn node_name(text: &str) -> Result<(), String> {
    subdomain(text)
}

/// Whether it can be a namespace and a name.
///
/// # Errors
/// Everything that is wrong with them.
pub fn object_name(name: &ObjectName) -> Result<(), Problems> {
    let mut check = Check::new();
    if let Err(message) = label(&name.namespace) {
        check.invalid("metadata.namespace", message);
    }
    if let Err(message) = subdomain(&name.name) {
        check.invalid("metadata.name", message);
    }
    check.finish(Some(()))
}

/// Whether these can be the labels of an object.
///
/// # Errors
/// Everything that is wrong with them.
pub fn labels(labels: &BTreeMap<String, String>) -> Result<(), Problems> {
    let mut check = Check::new();
    for (key, value) in labels {
        if let Err(message) = label_key(key).and_then(|()| label_value(value)) {
            check.invalid(format!("metadata.labels[{key}]"), message);
        }
    }
    check.finish(Some(()))
}

/// The origin that the annotations name, if both are there and readable; else what is wrong with them.
///
/// # Errors
/// What is wrong; the origin then counts as absent.
pub fn origin(annotations: &BTreeMap<String, String>) -> Result<Option<Origin>, Problem> {
    let uid = annotations.get(written::ORIGIN_UID);
    let generation = annotations.get(written::ORIGIN_GENERATION);
    let problem = |annotation: &str, message: &str| Problem {
        path: format!("metadata.annotations[{annotation}]"),
        message: message.to_owned(),
        unsupported: false,
    };
    match (uid, generation) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(problem(
            written::ORIGIN_GENERATION,
            "missing beside the origin's uid",
        )),
        (None, Some(_)) => Err(problem(
            written::ORIGIN_UID,
            "missing beside the origin's generation",
        )),
        // Acknowledgments carry it between spaces.
        (Some(uid), Some(_))
            if !(1..=128).contains(&uid.len()) || !uid.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            Err(problem(
                written::ORIGIN_UID,
                "must be 1 to 128 printable characters without spaces",
            ))
        }
        (Some(uid), Some(generation)) => match generation.parse::<u64>() {
            Ok(number) if number > 0 && number.to_string() == *generation => Ok(Some(Origin {
                uid: Uid(uid.clone()),
                generation: number,
            })),
            _ => Err(problem(
                written::ORIGIN_GENERATION,
                "no generation: a positive integer",
            )),
        },
    }
}

/// When the origin became what it is, milliseconds since the Unix epoch, if the annotation says so.
///
/// # Errors
/// When it is no time; it then counts as absent.
pub fn origin_time(annotations: &BTreeMap<String, String>) -> Result<Option<i64>, Problem> {
    let Some(text) = annotations.get(written::ORIGIN_TIME) else {
        return Ok(None);
    };
    match text.parse::<jiff::Timestamp>() {
        Ok(time) => Ok(Some(time.as_millisecond())),
        Err(_) => Err(Problem {
            path: format!("metadata.annotations[{}]", written::ORIGIN_TIME),
            message: "no time as in 2026-01-31T12:00:00Z".to_owned(),
            unsupported: false,
        }),
    }
}

/// RFC 1123 label.
fn label(text: &str) -> Result<(), String> {
    if text.len() <= 63 && dns_part(text) {
        Ok(())
    } else {
        Err(format!(
            "{text:?} is no DNS label: at most 63 of a-z, 0-9 and -, with a letter or digit at both ends"
        ))
    }
}

/// RFC 1123 subdomain, as Kubernetes has it: only the whole is bounded.
fn subdomain(text: &str) -> Result<(), String> {
    if text.len() <= 253 && text.split('.').all(dns_part) {
        Ok(())
    } else {
        Err(format!(
            "{text:?} is no DNS name: parts of a-z, 0-9 and -, separated by dots"
        ))
    }
}

fn dns_part(text: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    text.bytes().all(inner) && !text.is_empty() && !text.starts_with('-') && !text.ends_with('-')
}

fn label_key(key: &str) -> Result<(), String> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if let Some(prefix) = prefix {
        subdomain(prefix)?;
    }
    if name.is_empty() {
        return Err(format!("{key:?} is no label key: the name is empty"));
    }
    qualified(name).map_err(|()| format!("{key:?} is no label key"))
}

fn label_value(value: &str) -> Result<(), String> {
    if value.is_empty() {
        return Ok(());
    }
    qualified(value).map_err(|()| format!("{value:?} is no label value"))
}

/// What label names and values are made of.
fn qualified(text: &str) -> Result<(), ()> {
    let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    if text.len() <= 63
        && text.bytes().all(inner)
        && edge(text.bytes().next())
        && edge(text.bytes().next_back())
    {
        Ok(())
    } else {
        Err(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn policy_of(yaml: &str) -> Result<PolicySpec, Problems> {
        policy_spec(&serde_saphyr::from_str(yaml).unwrap())
    }

    fn with_destination(destination: &str, rest: &str) -> Result<PolicySpec, Problems> {
        policy_of(&format!(
            "consumers: {{matchLabels: {{app: web}}}}\nproducers: {{matchLabels: {{app: dns}}}}\n\
             destinations: [{destination}]\n{rest}"
        ))
    }

    fn complaint(result: Result<PolicySpec, Problems>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_said_has_a_default() {
        let spec = with_destination("{address: 10.96.0.10, protocol: UDP, port: 53}", "").unwrap();
        assert_eq!(spec.delivery, model::Delivery::Direct);
        assert_eq!(spec.while_held, model::WhileHeld::Drop);
        assert_eq!(
            spec.switchover,
            model::Switchover {
                deadline: 30 * SECOND,
                on_deadline: model::OnDeadline::KeepOld,
                drain: 60 * SECOND
            }
        );
        assert_eq!(spec.max_staleness, None);
        assert_eq!(
            spec.destinations,
            BTreeSet::from([model::Destination::Service {
                address: "10.96.0.10".parse().unwrap(),
                protocol: model::Protocol::Udp,
                port: 53,
                target_port: None
            }])
        );
    }

    #[test]
    fn prefixes_are_networks_and_a_plain_address_is_all_of_its_traffic() {
        for (text, network, length) in [
            ("0.0.0.0/0", "0.0.0.0", 0),
            ("\"::/0\"", "::", 0),
            ("10.1.0.0/16", "10.1.0.0", 16),
            ("\"fd00:53::/64\"", "fd00:53::", 64),
            ("10.1.2.3", "10.1.2.3", 32),
            ("\"fd00::1\"", "fd00::1", 128),
        ] {
            let spec = with_destination(&format!("{{address: {text}}}"), "").unwrap();
            let expected = model::Destination::Prefix {
                address: network.parse().unwrap(),
                length,
            };
            assert_eq!(spec.destinations, BTreeSet::from([expected]), "{text}");
        }
    }

    #[test]
    fn every_other_spelling_of_an_address_is_refused() {
        for (text, message) in [
            (
                "10.0.0.1/32",
                "write 10.0.0.1, not 10.0.0.1/32: one address has no length",
            ),
            (
                "fd00::1/128",
                "write fd00::1, not fd00::1/128: one address has no length",
            ),
            ("10.0.0.0/33", "/33 is no prefix length of 10.0.0.0"),
            ("10.0.0.0/08", "/08 is no prefix length of 10.0.0.0"),
            ("10.0.0.0/+8", "/+8 is no prefix length of 10.0.0.0"),
            ("10.0.0.1/8", "host bits are set: the network is 10.0.0.0/8"),
            ("fd00:53::1/64", "host bits are set: the network is fd00:53::/64"),
            ("fd00:0053::", "not canonical: write fd00:53::"),
            ("FD00::1", "not canonical: write fd00::1"),
            ("::ffff:10.1.0.0/112", "IPv4-mapped: write 10.1.0.0"),
            ("010.0.0.1", "\"010.0.0.1\" is no IP address"),
            ("10.0.0", "\"10.0.0\" is no IP address"),
            ("fe80::1%eth0", "\"fe80::1%eth0\" is no IP address"),
            ("web.example", "\"web.example\" is no IP address"),
        ] {
            assert_eq!(
                complaint(with_destination(&format!("{{address: \"{text}\"}}"), "")),
                format!("spec.destinations[0].address: {message}"),
            );
        }
    }

    #[test]
    fn a_destination_is_a_service_or_a_prefix_and_nothing_between() {
        for (text, rest, message) in [
            (
                "{address: 10.0.0.1, protocol: TCP}",
                "",
                "[0].port: a service needs one with protocol TCP",
            ),
            (
                "{address: 10.0.0.1, port: 53}",
                "",
                "[0].protocol: a port needs TCP or UDP",
            ),
            (
                "{address: 10.0.0.0/8, protocol: TCP, port: 80}",
                "",
                "[0].address: a service has one address; a prefix has neither protocol nor port",
            ),
            (
                "{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 8080}",
                "",
                "[0].targetPort: only with delivery Translate and protocol TCP or UDP",
            ),
            (
                "{address: 10.0.0.1, targetPort: 8080}",
                "delivery: Translate",
                "[0].targetPort: only with delivery Translate and protocol TCP or UDP",
            ),
            (
                "{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 0}",
                "delivery: Translate",
                "[0].targetPort: must be 1 to 65535",
            ),
            (
                "{address: 224.0.0.1, protocol: UDP, port: 53}",
                "",
                "[0].address: multicast traffic is never captured",
            ),
        ] {
            assert_eq!(
                complaint(with_destination(text, rest)),
                format!("spec.destinations{message}"),
            );
        }
        assert!(
            with_destination(
                "{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 8080}",
                "delivery: Translate"
            )
            .is_ok()
        );
    }

    #[test]
    fn a_destination_that_is_never_captured_is_refused_and_what_contains_it_is_not() {
        for (address, what) in [
            ("169.254.20.10", "link-local"),
            ("169.254.0.0/17", "link-local"),
            ("224.0.0.0/4", "multicast"),
            ("255.255.255.255", "broadcast"),
            ("127.0.0.1", "loopback"),
            ("0.0.0.0", "unspecified"),
            ("fe80::1", "link-local"),
            ("ff02::/16", "multicast"),
            ("::1", "loopback"),
            ("::", "unspecified"),
        ] {
            assert_eq!(
                complaint(with_destination(&format!("{{address: \"{address}\"}}"), "")),
                format!("spec.destinations[0].address: {what} traffic is never captured")
            );
        }
        for address in ["0.0.0.0/0", "::/0", "128.0.0.0/1", "169.252.0.0/14", "fe00::/7"] {
            assert!(
                with_destination(&format!("{{address: \"{address}\"}}"), "").is_ok(),
                "{address}"
            );
        }
    }

    #[test]
    fn destinations_are_unique_by_address_protocol_and_port() {
        assert_eq!(
            complaint(with_destination(
                "{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 1}, \
                 {address: 10.0.0.1, protocol: UDP, port: 80}, \
                 {address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 2}",
                "delivery: Translate"
            )),
            "spec.destinations[2]: the same as spec.destinations[0]"
        );
        let many: Vec<String> = (0..65)
            .map(|last| format!("{{address: 10.0.0.{last}}}"))
            .collect();
        assert_eq!(
            complaint(with_destination(&many.join(", "), "")),
            "spec.destinations: 65 destinations, at most 64"
        );
        assert!(with_destination(&many[..64].join(", "), "").is_ok());
        assert_eq!(
            complaint(with_destination("", "")),
            "spec.destinations: at least one is needed"
        );
    }

    #[test]
    fn selectors_are_never_empty_and_operators_have_their_values() {
        let check = |consumers: &str| {
            policy_of(&format!(
                "consumers: {consumers}\nproducers: {{matchLabels: {{app: dns}}}}\n\
                 destinations: [{{address: 10.0.0.1}}]"
            ))
        };
        for (consumers, message) in [
            (
                "{}",
                "spec.consumers: empty: it would select every attachment of the namespace",
            ),
            (
                "{matchExpressions: [{key: app, operator: In}]}",
                "spec.consumers.matchExpressions[0].values: needs at least one value",
            ),
            (
                "{matchExpressions: [{key: app, operator: Exists, values: [a]}]}",
                "spec.consumers.matchExpressions[0].values: operator Exists takes no values",
            ),
            (
                "{matchExpressions: [{key: \"a b\", operator: Exists}]}",
                "spec.consumers.matchExpressions[0].key: \"a b\" is no label key",
            ),
            (
                "{matchLabels: {app: \"-x\"}}",
                "spec.consumers.matchLabels[app]: \"-x\" is no label value",
            ),
        ] {
            assert_eq!(complaint(check(consumers)), message);
        }
        let spec =
            check("{matchExpressions: [{key: example.org/app, operator: NotIn, values: [a, b]}]}").unwrap();
        assert!(spec.consumers.matches(&BTreeMap::new()));
        assert!(
            !spec
                .consumers
                .matches(&BTreeMap::from([("example.org/app".to_owned(), "a".to_owned())]))
        );
    }

    #[test]
    fn a_value_of_another_release_is_unsupported_unless_something_is_plainly_wrong() {
        let service = "{address: 10.0.0.1, protocol: TCP, port: 80}";
        for (rest, message) in [
            (
                "delivery: Bounce",
                "spec.delivery: unknown value \"Bounce\", this release knows Direct, Translate",
            ),
            (
                "whileHeld: Reject",
                "spec.whileHeld: unknown value \"Reject\", this release knows Drop, Pass",
            ),
            (
                "switchover: {onDeadline: Ask}",
                "spec.switchover.onDeadline: unknown value \"Ask\", this release knows KeepOld, Cut",
            ),
        ] {
            let problems = with_destination(service, rest).unwrap_err();
            assert_eq!(problems.to_string(), message);
            assert_eq!(problems.reason(), FailReason::Unsupported);
        }
        let problems = with_destination("{address: 10.0.0.1, protocol: SCTP, port: 80}", "").unwrap_err();
        assert_eq!(problems.reason(), FailReason::Unsupported);
        let problems = with_destination("{address: x}", "delivery: Bounce").unwrap_err();
        assert_eq!(problems.reason(), FailReason::Invalid);
    }

    #[test]
    fn a_refusal_keeps_the_consumers_if_they_can_be_read() {
        let written: written::RoutePolicySpec = serde_saphyr::from_str(
            "consumers: {matchLabels: {app: web}}\nproducers: {}\ndestinations: [{address: 10.0.0.1}]",
        )
        .unwrap();
        let problems = policy_spec(&written).unwrap_err();
        let refused = refusal(&problems, Some(&written.consumers));
        assert_eq!(refused.reason, FailReason::Invalid);
        assert_eq!(
            refused.message,
            "spec.producers: empty: it would select every attachment of the namespace"
        );
        assert_eq!(
            refused.consumers.map(|selector| selector.match_labels),
            Some(BTreeMap::from([("app".to_owned(), "web".to_owned())]))
        );
        assert_eq!(refusal(&problems, Some(&written.producers)).consumers, None);
        assert_eq!(refusal(&problems, None).consumers, None);
    }

    #[test]
    fn durations_have_one_spelling_and_bounds() {
        for (text, seconds) in [
            ("0s", 0),
            ("30s", 30),
            ("5m", 300),
            ("1h30m", 5_400),
            ("24h", 86_400),
            ("90s", 90),
        ] {
            assert_eq!(duration(text), Ok(seconds * SECOND), "{text}");
        }
        for text in [
            "",
            "30",
            "s",
            "-1s",
            "1.5s",
            "500ms",
            "1m1h",
            "1s1s",
            "1 s",
            "9999999999s",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
        let service = "{address: 10.0.0.1}";
        assert!(with_destination(service, "switchover: {deadline: 24h, drain: 0s}").is_ok());
        for (rest, message) in [
            (
                "switchover: {deadline: 0s}",
                "spec.switchover.deadline: 0s is not within 1s to 24h",
            ),
            (
                "switchover: {drain: 25h}",
                "spec.switchover.drain: 25h is not within 1s to 24h",
            ),
            (
                "maxStaleness: 9s",
                "spec.maxStaleness: 9s is not within 10s to 24h",
            ),
        ] {
            assert_eq!(complaint(with_destination(service, rest)), message);
        }
        let spec = with_destination(service, "maxStaleness: 10s").unwrap();
        assert_eq!(spec.max_staleness, Some(10 * SECOND));
    }

    fn meta() -> Meta {
        Meta {
            name: ObjectName {
                namespace: "shop".to_owned(),
                name: "web-0".to_owned(),
            },
            uid: Uid("u1".to_owned()),
            generation: 7,
            created_ms: 5,
            labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
            origin: None,
        }
    }

    fn attachment_of(yaml: &str, provenance: Provenance) -> Result<Attachment, Problems> {
        attachment(&meta(), &serde_saphyr::from_str(yaml).unwrap(), provenance)
    }

    #[test]
    fn an_attachment_becomes_what_the_engine_knows() {
        let got = attachment_of(
            "{node: edge-1, interface: hfweb0, identity: pod-1, addresses: [10.0.0.11, \"fd00::11\"]}",
            Provenance::ApiServer,
        )
        .unwrap();
        assert_eq!(
            got,
            Attachment {
                name: meta().name,
                uid: meta().uid,
                generation: 7,
                created_ms: 5,
                interface: "hfweb0".to_owned(),
                expected: Some(hash::incarnation("pod-1")),
                addresses: BTreeSet::from(["10.0.0.11".parse().unwrap(), "fd00::11".parse().unwrap()]),
                labels: meta().labels,
                covers: hash::covers(&meta().uid, 7),
            }
        );
    }

    #[test]
    fn an_attachment_without_identity_is_for_files_only() {
        let spec = "{node: edge-1, interface: hfweb0}";
        assert_eq!(attachment_of(spec, Provenance::File).unwrap().expected, None);
        assert_eq!(
            attachment_of(spec, Provenance::ApiServer)
                .unwrap_err()
                .to_string(),
            "spec.identity: required in objects of an API server"
        );
    }

    #[test]
    fn every_problem_of_an_object_is_said_at_once() {
        assert_eq!(
            attachment_of(
                "{node: Edge, interface: \"a/b\", identity: \"\", addresses: [10.0.0.1, 10.0.0.1, 127.0.0.1]}",
                Provenance::File
            )
            .unwrap_err()
            .to_string(),
            "spec.node: \"Edge\" is no DNS name: parts of a-z, 0-9 and -, separated by dots; \
             spec.interface: '/' cannot be in an interface name; \
             spec.identity: 0 bytes, 1 to 253 are allowed; \
             spec.addresses[1]: 10.0.0.1 twice; \
             spec.addresses[2]: 127.0.0.1 is a loopback address, no workload has it"
        );
    }

    #[test]
    fn interface_names_are_what_the_kernel_takes() {
        for name in ["a", "hfweb0", "eth0.100", "123456789012345", "veth-%x"] {
            assert_eq!(interface_name(name), Ok(()), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a b",
            "a/b",
            "a:b",
            "1234567890123456",
            "\u{e4}",
            "a\t",
        ] {
            assert!(interface_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn an_origin_needs_both_annotations() {
        let annotations = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        assert_eq!(origin(&annotations(&[])), Ok(None));
        assert_eq!(
            origin(&annotations(&[
                (written::ORIGIN_UID, "hub"),
                (written::ORIGIN_GENERATION, "8")
            ])),
            Ok(Some(Origin {
                uid: Uid("hub".to_owned()),
                generation: 8
            }))
        );
        for wrong in [
            annotations(&[(written::ORIGIN_UID, "hub")]),
            annotations(&[(written::ORIGIN_GENERATION, "8")]),
            annotations(&[(written::ORIGIN_UID, "hub"), (written::ORIGIN_GENERATION, "08")]),
            annotations(&[(written::ORIGIN_UID, "hub"), (written::ORIGIN_GENERATION, "0")]),
        ] {
            assert!(origin(&wrong).is_err());
        }
    }

    proptest! {
        /// Masking is what a bit-by-bit model does, and the text of a network reads back as itself.
        #[test]
        fn networks_of_any_address_and_length(bits in any::<u128>(), length in 0u8..=127, v4: bool) {
            let (address, length) = if v4 {
                (IpAddr::V4((bits as u32).into()), length % 32)
            } else {
                (IpAddr::V6(bits.into()), length)
            };
            let network = masked(address, length);
            let bytes = |address: IpAddr| match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            let bit = |bytes: &[u8], at: u8| bytes[usize::from(at / 8)] >> (7 - at % 8) & 1;
            let (whole, kept) = (bytes(address), bytes(network));
            for at in 0..self::bits(address) {
                prop_assert_eq!(bit(&kept, at), if at < length { bit(&whole, at) } else { 0 });
            }
            let text = format!("{network}/{length}");
            match range(&text) {
                Ok(got) => prop_assert_eq!(got, Range { address: network, length, plain: false }),
                // The one thing that is a network and refused.
                Err(message) => prop_assert!(message.starts_with("IPv4-mapped"), "{text}: {message}"),
            }
            if network != address {
                let with_host_bits = format!("{address}/{length}");
                prop_assert!(range(&with_host_bits).is_err());
            }
        }

        /// Nothing that people can write makes a check panic.
        #[test]
        fn any_text_is_judged(text in ".{0,40}") {
            let _ = (range(&text), duration(&text), interface_name(&text), identity(&text), label_key(&text));
        }
    }
}
