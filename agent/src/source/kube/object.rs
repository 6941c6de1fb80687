//! One object as an API server shows it: whose it is first, what it says later. So whatever is wrong with what it says,
//! its uid and its generation are known.

use std::collections::BTreeMap;

use holdfast_engine::model::{ObjectName, Origin, Uid};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::set::Scope;
use crate::api::v1alpha1::{API_VERSION, AttachmentSpec, Kind, LabelSelector, RoutePolicySpec};
use crate::api::validate::{self, Meta, Problem, Problems, Provenance};
use crate::apiserver::reflect::{Collection, Shown};
use crate::source::document::Node;
use crate::source::good::{Good, GoodSpec, Key};

/// An object that was shown. What nobody here needs (`managedFields`, `status`) is not kept.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Which.
    pub key: Key,
    /// Its uid.
    pub uid: Uid,
    /// Its generation.
    pub generation: u64,
    /// Created, milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Its resource version.
    pub version: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// What it is a copy of; an unreadable annotation counts as absent, and is said.
    pub origin: Result<Option<Origin>, Problem>,
    /// When that became what it is, milliseconds since the Unix epoch.
    pub origin_time_ms: Option<i64>,
    /// Its spec, as JSON.
    spec: Option<Box<str>>,
}

/// What a spec says.
#[derive(Debug)]
pub(super) enum Content {
    /// It can be used.
    Good(Box<Good>),
    /// An attachment of another node.
    Elsewhere,
    /// It cannot be used; with the selector of its consumers, as far as that can be read.
    Bad(Problems, Option<Box<LabelSelector>>),
}

#[derive(Deserialize)]
struct Raw<'a> {
    metadata: Metadata,
    #[serde(borrow, default)]
    spec: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    namespace: String,
    uid: String,
    generation: u64,
    creation_timestamp: jiff::Timestamp,
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Shown for Seen {
    fn version(&self) -> &str {
        &self.version
    }
}

impl Seen {
    /// Reads an object of this kind, as JSON.
    ///
    /// # Errors
    /// When it cannot be told which object it is.
    pub(super) fn read(kind: Kind, json: &str) -> Result<Self, String> {
        let raw: Raw<'_> = serde_json::from_str(json).map_err(|error| error.to_string())?;
        let Metadata {
            name,
            namespace,
            uid,
            generation,
            creation_timestamp,
            resource_version,
            labels,
            annotations,
        } = raw.metadata;
        Ok(Self {
            key: Key {
                kind,
                name: ObjectName { namespace, name },
            },
            uid: Uid(uid),
            generation,
            created_ms: creation_timestamp.as_millisecond(),
            version: resource_version,
            labels,
            origin: validate::origin(&annotations),
            origin_time_ms: validate::origin_time(&annotations).unwrap_or_default(),
            spec: raw.spec.map(|spec| spec.get().into()),
        })
    }

    /// What it is a copy of, if that can be read.
    pub(super) fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref().ok().and_then(Option::as_ref)
    }

    /// What it is called, for the engine.
    pub(super) fn meta(&self) -> Meta {
        Meta {
            name: self.key.name.clone(),
            uid: self.uid.clone(),
            generation: self.generation,
            created_ms: self.created_ms,
            labels: self.labels.clone(),
            origin: self.origin().cloned(),
        }
    }

    /// What it says, for this node.
    pub(super) fn content(&self, node: &str) -> Content {
        let spec = self.spec.as_deref().unwrap_or("null");
        let tree: Node = match serde_json::from_str::<serde_json::Value>(spec) {
            Ok(value) => value.into(),
            Err(error) => return Content::Bad(invalid("spec", error.to_string()), None),
        };
        match self.key.kind {
            Kind::Attachment => {
                if tree
                    .get("node")
                    .and_then(Node::text)
                    .is_some_and(|named| named != node)
                {
                    return Content::Elsewhere;
                }
                let read = read::<AttachmentSpec>(&tree).and_then(|spec| {
                    validate::attachment(&self.meta(), &spec, Provenance::ApiServer).map(|_| spec)
                });
                match read {
                    Ok(spec) => self.good(GoodSpec::Attachment(spec)),
                    Err(problems) => Content::Bad(problems, None),
                }
            }
            Kind::RoutePolicy => {
                let read = read::<RoutePolicySpec>(&tree)
                    .and_then(|spec| validate::policy_spec(&spec).map(|_| spec));
                match read {
                    Ok(spec) => self.good(GoodSpec::RoutePolicy(spec)),
                    Err(problems) => {
                        let consumers = tree.get("consumers").and_then(|node| node.read().ok());
                        Content::Bad(problems, consumers.map(Box::new))
                    }
                }
            }
        }
    }

    fn good(&self, spec: GoodSpec) -> Content {
        Content::Good(Box::new(Good {
            generation: self.generation,
            labels: match self.key.kind {
                Kind::Attachment => self.labels.clone(),
                // Nothing selects a policy.
                Kind::RoutePolicy => BTreeMap::new(),
            },
            origin: self.origin().cloned(),
            spec,
        }))
    }
}

fn invalid(path: &str, message: String) -> Problems {
    Problems(vec![Problem {
        path: path.to_owned(),
        message,
        unsupported: false,
    }])
}

fn read<T: serde::de::DeserializeOwned>(spec: &Node) -> Result<T, Problems> {
    spec.read().map_err(|error| {
        let dot = if error.path.is_empty() || error.path.starts_with('[') {
            ""
        } else {
            "."
        };
        Problems(vec![Problem {
            path: format!("spec{dot}{}", error.path),
            // The API server drops fields that its schema does not have: one that it keeps is a later release's.
            unsupported: error.message.starts_with("unknown field"),
            message: error.message,
        }])
    })
}

/// What a scope is at an API server.
pub(super) fn collection(scope: &Scope, node: &str) -> Collection {
    let plural = match scope.kind() {
        Kind::Attachment => "attachments",
        Kind::RoutePolicy => "routepolicies",
    };
    let namespace = match scope {
        Scope::Namespace(namespace) => Some(namespace.as_str()),
        Scope::Attachments | Scope::Everything => None,
    };
    let collection = Collection::new(API_VERSION, namespace, plural).with_definition(API_VERSION, plural);
    match scope {
        Scope::Attachments => collection.with_fields(format!("spec.node={node}")),
        Scope::Namespace(_) | Scope::Everything => collection,
    }
}
