//! What the schema of an object says beyond the types: sizes, patterns, and rules in CEL.
//!
//! Each function is named at the field that it is about, in [`super::v1alpha1`], and says there what
//! [`super::validate`] demands of it: an API server and an agent must take the same objects. Every size is bounded, for
//! an API server refuses a schema whose rules could cost too much.

use schemars::Schema;
use schemars::transform::transform_subschemas;
use serde_json::{Value, json};

use super::validate::{
    MAX_ADDRESSES, MAX_DESTINATIONS, MAX_IDENTITY, MAX_INTERFACE, MAX_MATCH_EXPRESSIONS, MAX_MATCH_LABELS,
    MAX_VALUES,
};

/// Parts of a DNS subdomain. (A backslash would be one too few in CEL, where it begins an escape.)
const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
/// Longest DNS subdomain.
const MAX_SUBDOMAIN: usize = 253;
/// What label names and values are made of.
const QUALIFIED: &str = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";
/// Longest label name and value.
const MAX_QUALIFIED: usize = 63;
/// Longest label key: a subdomain, a slash, a name.
const MAX_KEY: usize = MAX_SUBDOMAIN + 1 + MAX_QUALIFIED;
/// Three numbers of nine digits, with a unit each.
const MAX_DURATION: usize = 30;

fn set(schema: &mut Schema, key: &str, value: impl Into<Value>) {
    schema.insert(key.to_owned(), value.into());
}

/// Adds a rule in CEL, and what is said where it does not hold.
fn rule(schema: &mut Schema, rule: &str, message: &str) {
    let rule = json!({"rule": rule, "message": message});
    match schema.get_mut("x-kubernetes-validations") {
        Some(Value::Array(rules)) => rules.push(rule),
        _ => set(schema, "x-kubernetes-validations", json!([rule])),
    }
}

/// A text of a pattern, which holds for all of it.
fn text(schema: &mut Schema, pattern: &str, longest: usize) {
    set(schema, "pattern", format!("^{pattern}$"));
    set(schema, "maxLength", longest);
}

/// Must stay what it was made with.
pub fn immutable(schema: &mut Schema) {
    rule(schema, "self == oldSelf", "cannot be changed");
}

/// Name of a node.
pub fn node(schema: &mut Schema) {
    text(schema, SUBDOMAIN, MAX_SUBDOMAIN);
    immutable(schema);
}

/// Name of an interface.
pub fn interface(schema: &mut Schema) {
    // Printable ASCII but for `/` and `:`.
    text(
        schema,
        &format!("[!-.0-9;-~]{{1,{MAX_INTERFACE}}}"),
        MAX_INTERFACE,
    );
    rule(
        schema,
        "self != '.' && self != '..'",
        "no interface has this name",
    );
}

/// Identity of an incarnation.
pub fn identity(schema: &mut Schema) {
    text(schema, r"[^\p{Z}\p{Cc}]+", MAX_IDENTITY);
    rule(
        schema,
        &format!("size(bytes(self)) <= {MAX_IDENTITY}"),
        &format!("at most {MAX_IDENTITY} bytes"),
    );
}

/// The fields that only an API server demands.
pub fn attachment(schema: &mut Schema) {
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.push("identity".into());
    }
}

/// Addresses of a workload.
pub fn workload_addresses(schema: &mut Schema) {
    set(schema, "maxItems", MAX_ADDRESSES);
    set(schema, "x-kubernetes-list-type", "set");
    items(schema, |address| {
        set(address, "maxLength", 45);
        rule(
            address,
            "isIP(self) && ip.isCanonical(self) && (ip(self).isGlobalUnicast() || ip(self).isLinkLocalUnicast())",
            "must be an address that a workload can have, in its canonical form",
        );
    });
}

/// Changes what the items of a list are.
fn items(schema: &mut Schema, change: impl FnOnce(&mut Schema)) {
    change_at(schema, "items", change);
}

fn change_at(schema: &mut Schema, key: &str, change: impl FnOnce(&mut Schema)) {
    if let Some(Ok(inner)) = schema.get_mut(key).map(<&mut Schema>::try_from) {
        change(inner);
    }
}

/// Destinations of a policy.
pub fn destinations(schema: &mut Schema) {
    set(schema, "minItems", 1);
    set(schema, "maxItems", MAX_DESTINATIONS);
    // Two that claim the same traffic are one too many.
    set(schema, "x-kubernetes-list-type", "map");
    set(
        schema,
        "x-kubernetes-list-map-keys",
        json!(["address", "protocol", "port"]),
    );
}

/// A destination as a whole.
pub fn destination(schema: &mut Schema) {
    rule(
        schema,
        "(self.protocol == 'Any') == (self.port == 0)",
        "a service has a protocol, TCP or UDP, and a port; a prefix has neither",
    );
    rule(
        schema,
        "self.protocol == 'Any' || isIP(self.address)",
        "a service has one address; a prefix has neither protocol nor port",
    );
    rule(
        schema,
        "self.protocol != 'Any' || !has(self.targetPort)",
        "targetPort only with protocol TCP or UDP",
    );
}

/// Address of a destination.
pub fn destination_address(schema: &mut Schema) {
    set(schema, "maxLength", 49);
    rule(
        schema,
        "isIP(self) ? ip.isCanonical(self) : isCIDR(self) && cidr(self) == cidr(self).masked() \
         && string(cidr(self)) == self && cidr(self).prefixLength() < (cidr(self).ip().family() == 4 ? 32 : 128)",
        "must be an address or a CIDR in its canonical form, without host bits; one address has no length",
    );
    rule(
        schema,
        "isIP(self) ? ip(self).isGlobalUnicast() : !isCIDR(self) || !['127.0.0.0/8', '169.254.0.0/16', '224.0.0.0/4', \
         'fe80::/10', 'ff00::/8'].exists(net, cidr(net).containsCIDR(cidr(self)))",
        "loopback, link-local, multicast, broadcast and unspecified traffic is never captured",
    );
}

/// Protocol of a destination: a key of the list, so it has a default.
pub fn protocol(schema: &mut Schema) {
    set(schema, "default", "Any");
}

/// Port of a destination: a key of the list, so it has a default.
pub fn port(schema: &mut Schema) {
    set(schema, "default", 0);
}

/// Port at the producer.
pub fn target_port(schema: &mut Schema) {
    set(schema, "minimum", 1);
}

/// A policy as a whole.
pub fn policy(schema: &mut Schema) {
    rule(
        schema,
        "self.delivery == 'Translate' || !self.destinations.exists(d, has(d.targetPort))",
        "targetPort only with delivery Translate",
    );
}

/// A selector as a whole.
pub fn selector(schema: &mut Schema) {
    rule(
        schema,
        "(has(self.matchLabels) && size(self.matchLabels) > 0) \
         || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",
        "empty: it would select every attachment of the namespace",
    );
}

/// Labels that must have values.
pub fn match_labels(schema: &mut Schema) {
    set(schema, "maxProperties", MAX_MATCH_LABELS);
    change_at(schema, "additionalProperties", label_value);
    rule(
        schema,
        &format!(
            "self.all(key, key.indexOf('/') <= {MAX_SUBDOMAIN} && key.matches('^{}$'))",
            label_key_pattern()
        ),
        "not a label key",
    );
}

/// Set-based requirements.
pub fn match_expressions(schema: &mut Schema) {
    set(schema, "maxItems", MAX_MATCH_EXPRESSIONS);
    atomic_list(schema);
}

/// A requirement as a whole.
pub fn requirement(schema: &mut Schema) {
    rule(
        schema,
        "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
        "In and NotIn need values, Exists and DoesNotExist take none",
    );
}

/// Key of a label.
pub fn label_key(schema: &mut Schema) {
    text(schema, &label_key_pattern(), MAX_KEY);
    rule(
        schema,
        &format!("self.indexOf('/') <= {MAX_SUBDOMAIN}"),
        "the part before the slash is too long",
    );
}

fn label_key_pattern() -> String {
    format!("({SUBDOMAIN}/)?{QUALIFIED}")
}

/// Values of a requirement.
pub fn label_values(schema: &mut Schema) {
    set(schema, "maxItems", MAX_VALUES);
    atomic_list(schema);
    items(schema, label_value);
}

fn label_value(schema: &mut Schema) {
    text(schema, &format!("({QUALIFIED})?"), MAX_QUALIFIED);
}

/// A duration, with the least and the most that it may be.
fn duration(schema: &mut Schema, allowed: &str, message: &str) {
    set(schema, "minLength", 2);
    text(schema, "([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?", MAX_DURATION);
    rule(schema, allowed, message);
}

/// A list that is replaced as a whole.
pub fn atomic_list(schema: &mut Schema) {
    set(schema, "x-kubernetes-list-type", "atomic");
}

/// A map that is replaced as a whole: tracking who owns which of thousands of keys is what would cost.
pub fn atomic_map(schema: &mut Schema) {
    set(schema, "x-kubernetes-map-type", "atomic");
}

/// A status: whoever writes it writes all of it, and nothing is put in by an API server.
pub fn status(schema: &mut Schema) {
    schema.remove("default");
    transform_subschemas(&mut status, schema);
}

/// Conditions: one of each type.
pub fn conditions(schema: &mut Schema) {
    set(schema, "x-kubernetes-list-type", "map");
    set(schema, "x-kubernetes-list-map-keys", json!(["type"]));
}

/// A report as a whole: which node it speaks of is in its name, and the shard.
pub fn node_report(schema: &mut Schema) {
    rule(
        schema,
        "self.metadata.name.startsWith(self.node + '.r') \
         && self.metadata.name.substring(size(self.node) + 2).matches('^[0-9a-f]{0,2}$')",
        "the name must be that of the node, `.r`, and up to two hex digits",
    );
}

/// How long a switch may wait.
pub fn deadline(schema: &mut Schema) {
    duration(
        schema,
        "duration(self) >= duration('1s') && duration(self) <= duration('24h')",
        "must be within 1s to 24h",
    );
}

/// How long flows may stay.
pub fn drain(schema: &mut Schema) {
    duration(
        schema,
        "duration(self) == duration('0s') || duration(self) >= duration('1s') && duration(self) <= duration('24h')",
        "must be 0s, or within 1s to 24h",
    );
}

/// How long a node may serve without news.
pub fn max_staleness(schema: &mut Schema) {
    duration(
        schema,
        "duration(self) >= duration('10s') && duration(self) <= duration('24h')",
        "must be within 10s to 24h",
    );
}
