//! The objects of the world, written as an operator writes them.

use std::collections::BTreeMap;

use holdfast_engine::model::{
    Attachment, Delivery, Destination, FailReason, ObjectName, OnDeadline, Operator, Policy, PolicySpec,
    Selector, Uid, WhileHeld,
};
use holdfast_tests::objects::NODE;
use serde_json::{Value, json};

use crate::script::SECOND;
use crate::world::Objects;

/// A uid as files name it: the world gives them in order, and equally old objects are told apart by it.
pub(crate) fn uid(uid: &Uid) -> String {
    format!("{}{:08}", &uid.0[..1], crate::rules::number(uid))
}

/// What stands for an incarnation of the world in files and in the registry.
pub(crate) fn identity(first_byte: u8) -> String {
    format!("incarnation-{first_byte}")
}

/// One file an object, by name.
pub(crate) fn of(objects: &Objects) -> BTreeMap<String, String> {
    let attachments = objects
        .attachments
        .values()
        .map(|object| (file("attachment", &object.name), attachment(object)));
    let policies = objects
        .policies
        .values()
        .map(|object| (file("policy", &object.name), policy(object)));
    attachments
        .chain(policies)
        .map(|(name, value)| (name, format!("{value:#}\n")))
        .collect()
}

fn file(kind: &str, name: &ObjectName) -> String {
    format!("{kind}-{}-{}.json", name.namespace, name.name)
}

fn object(kind: &str, name: &ObjectName, uid_: &Uid, generation: u64, spec: &Value) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": kind,
        "metadata": {
            "namespace": name.namespace,
            "name": name.name,
            "uid": uid(uid_),
            "generation": generation,
        },
        "spec": spec,
    })
}

fn attachment(attachment: &Attachment) -> Value {
    let mut spec = json!({
        "node": NODE,
        "interface": attachment.interface,
        "addresses": attachment.addresses,
    });
    if let Some(expected) = attachment.expected {
        spec["identity"] = identity(expected.0[0]).into();
    }
    let mut value = object(
        "Attachment",
        &attachment.name,
        &attachment.uid,
        attachment.generation,
        &spec,
    );
    value["metadata"]["labels"] = json!(attachment.labels);
    value
}

fn policy(policy: &Policy) -> Value {
    let spec = match &policy.content {
        Ok(spec) => self::spec(spec),
        Err(refusal) => {
            // Refused for its delivery, or for its consumers too if nobody is to know them.
            let unsupported = refusal.reason == FailReason::Unsupported;
            let consumers = match (&refusal.consumers, unsupported) {
                (Some(consumers), _) => selector(consumers),
                (None, true) => json!({"matchExpressions": [{"key": "app", "operator": "Resembles"}]}),
                (None, false) => json!({}),
            };
            let port = if unsupported { 53 } else { 0 };
            json!({
                "consumers": consumers,
                "producers": {"matchLabels": {"app": "dns"}},
                "destinations": [{"address": "10.96.0.10", "protocol": "UDP", "port": port}],
                "delivery": if unsupported { "Guess" } else { "Direct" },
            })
        }
    };
    object("RoutePolicy", &policy.name, &policy.uid, policy.generation, &spec)
}

fn spec(spec: &PolicySpec) -> Value {
    let seconds = |nanos: u64| format!("{}s", nanos / SECOND);
    let destinations: Vec<Value> = spec.destinations.iter().map(destination).collect();
    json!({
        "consumers": selector(&spec.consumers),
        "producers": selector(&spec.producers),
        "destinations": destinations,
        "delivery": match spec.delivery {
            Delivery::Direct => "Direct",
            Delivery::Translate => "Translate",
        },
        "whileHeld": match spec.while_held {
            WhileHeld::Drop => "Drop",
            WhileHeld::Pass => "Pass",
        },
        "switchover": {
            "deadline": seconds(spec.switchover.deadline),
            "onDeadline": match spec.switchover.on_deadline {
                OnDeadline::KeepOld => "KeepOld",
                OnDeadline::Cut => "Cut",
            },
            "drain": seconds(spec.switchover.drain),
        },
    })
}

fn destination(destination: &Destination) -> Value {
    match destination {
        Destination::Service {
            address,
            protocol,
            port,
            ..
        } => json!({
            "address": address,
            "protocol": format!("{protocol:?}").to_uppercase(),
            "port": port,
        }),
        Destination::Prefix { address, length } => json!({"address": format!("{address}/{length}")}),
    }
}

fn selector(selector: &Selector) -> Value {
    let expressions: Vec<Value> = selector
        .match_expressions
        .iter()
        .map(|requirement| {
            let key = &requirement.key;
            match &requirement.operator {
                Operator::In(values) => json!({"key": key, "operator": "In", "values": values}),
                Operator::NotIn(values) => json!({"key": key, "operator": "NotIn", "values": values}),
                Operator::Exists => json!({"key": key, "operator": "Exists"}),
                Operator::DoesNotExist => json!({"key": key, "operator": "DoesNotExist"}),
            }
        })
        .collect();
    json!({"matchLabels": selector.match_labels, "matchExpressions": expressions})
}
