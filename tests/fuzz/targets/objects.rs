//! Files of objects: whatever text comes, it is read into no more than it says, and what is accepted is accepted again
//! when it is written down, and means the same.
#![no_main]

use std::collections::BTreeMap;

use holdfast_engine::model::{ObjectName, Uid};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

#[path = "../../../agent/src/api"]
#[allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the agent's files, as they are"
)]
mod api {
    pub mod hash;
    pub mod schema;
    pub mod v1alpha1;
    pub mod validate;
}
#[path = "../../../agent/src/source/document.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "the agent's file, as it is"
)]
mod document;

use api::v1alpha1::{AttachmentSpec, Metadata, RoutePolicySpec};
use api::validate::{self, Meta, Provenance};
use document::{Node, Value};

/// What aliases may add to a text, as `document::parse` limits it.
const REPLAYED: usize = 10_000;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let documents = match document::parse(text) {
        Ok(documents) => documents,
        Err(error) => {
            // What people are shown must not panic either.
            let _ = document::excerpt(text, error.place);
            return;
        }
    };
    let nodes: usize = documents.iter().map(count).sum();
    assert!(
        nodes <= text.len() + 1 + REPLAYED,
        "{nodes} nodes of {} bytes",
        text.len()
    );
    for document in &documents {
        canonical(document);
        for path in ["spec.destinations[0].port", "metadata.name", "spec", ""] {
            let _ = document::excerpt(text, document.find(path));
        }
        // The whole document, and its spec: so that few bytes make an object.
        for node in std::iter::once(document).chain(document.get("spec")) {
            judge(node);
        }
        if let Some(metadata) = document.get("metadata") {
            round_trip::<Metadata>(metadata);
        }
    }
});

/// Values in a document.
fn count(node: &Node) -> usize {
    1 + match &node.value {
        Value::List(items) => items.iter().map(count).sum(),
        Value::Map(entries) => entries.iter().map(|(_, node)| count(node)).sum(),
        _ => 0,
    }
}

/// The one spelling of a value does not depend on the order in which its keys are written.
fn canonical(document: &Node) {
    let mut other = document.clone();
    if let Value::Map(entries) = &mut other.value {
        entries.reverse();
    }
    assert_eq!(other.canonical(), document.canonical());
}

fn judge(node: &Node) {
    if let Some((spec, again)) = round_trip::<RoutePolicySpec>(node) {
        let judged = validate::policy_spec(&spec);
        assert_eq!(judged, validate::policy_spec(&again));
        if let Err(problems) = judged {
            assert!(!problems.0.is_empty());
            let _ = validate::refusal(&problems, Some(&spec.consumers));
        }
    }
    if let Some((spec, again)) = round_trip::<AttachmentSpec>(node) {
        for provenance in [Provenance::File, Provenance::ApiServer] {
            assert_eq!(
                validate::attachment(&meta(), &spec, provenance),
                validate::attachment(&meta(), &again, provenance)
            );
        }
    }
}

/// What a node says as this type, and what it says when that has been written down and read again.
fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(node: &Node) -> Option<(T, T)> {
    let value: T = node.read().ok()?;
    let text = serde_json::to_string(&value).expect("what was read can be written");
    let documents = document::parse(&text).expect("what was written can be parsed");
    let again: T = documents
        .first()
        .expect("it is one document")
        .read()
        .expect("and read");
    assert_eq!(value, again);
    Some((value, again))
}

fn meta() -> Meta {
    Meta {
        name: ObjectName {
            namespace: "shop".into(),
            name: "web-0".into(),
        },
        uid: Uid("u".into()),
        generation: 1,
        created_ms: 0,
        labels: BTreeMap::new(),
        origin: None,
    }
}
