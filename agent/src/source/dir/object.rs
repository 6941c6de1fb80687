//! One document of a file: whose it is, what it says, what is wrong with it.

use std::collections::BTreeMap;

use holdfast_engine::model::{FailReason, ObjectName, Origin, Refusal};

use super::ledger::{Claim, content_hash};
use crate::api::v1alpha1::{
    API_VERSION, AttachmentSpec, GROUP, Kind, LabelSelector, Metadata, RoutePolicySpec,
};
use crate::api::validate::{self, Problem, Problems};
use crate::source::document::{Node, Place, Value};
use crate::source::good::Key;

/// What a document is.
#[derive(Debug)]
pub(super) enum Document {
    /// Whose object it is cannot be told.
    Unknown(Wrong),
    /// An attachment of another node.
    Elsewhere(Key, Place),
    /// An object that matters here.
    Object(Box<Object>),
}

/// Something that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// Where.
    pub place: Place,
    /// What.
    pub reason: String,
}

/// An object.
#[derive(Clone, Debug)]
pub(super) struct Object {
    /// Which.
    pub key: Key,
    /// Where it begins.
    pub place: Place,
    /// Its version, as far as the file says; none if that cannot be read.
    pub claim: Option<Claim>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// What it is a copy of.
    pub origin: Option<Origin>,
    /// When that became what it is, milliseconds since the Unix epoch.
    pub origin_time_ms: Option<i64>,
    /// What it says.
    pub content: Content,
    /// What is wrong with it.
    pub wrong: Vec<Wrong>,
}

/// See [`Object::content`].
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// A good attachment.
    Attachment(AttachmentSpec),
    /// A good policy.
    Policy(RoutePolicySpec),
    /// A bad attachment.
    BadAttachment,
    /// A bad policy, and what the engine is told of it.
    BadPolicy(Refusal),
}

/// Judges a document, on the node of this name.
pub(super) fn read(document: &Node, node: &str) -> Document {
    let key = match identify(document) {
        Ok(key) => key,
        Err(wrong) => return Document::Unknown(wrong),
    };
    let spec_node = document
        .get("spec")
        .and_then(|spec| spec.get("node"))
        .and_then(Node::text);
    if key.kind == Kind::Attachment && spec_node.is_some_and(|named| named != node) {
        return Document::Elsewhere(key, document.place);
    }
    Document::Object(Box::new(judge(document, key)))
}

/// Kind, namespace and name: without them nobody knows whose last good version stays in force.
fn identify(document: &Node) -> Result<Key, Wrong> {
    let wrong = |path: &str, reason: String| Wrong {
        place: document.find(path),
        reason,
    };
    if !matches!(document.value, Value::Map(_)) {
        return Err(wrong(
            "",
            "a document is a mapping: apiVersion, kind, metadata, spec".to_owned(),
        ));
    }
    let group = document
        .get("apiVersion")
        .and_then(Node::text)
        .and_then(|text| text.split_once('/'))
        .map(|(group, _)| group);
    if group != Some(GROUP) {
        return Err(wrong("apiVersion", format!("apiVersion: must be {API_VERSION}")));
    }
    let kind = document.get("kind").and_then(Node::text);
    let Some(kind) = Kind::ALL.into_iter().find(|known| Some(known.as_str()) == kind) else {
        return Err(wrong(
            "kind",
            "kind: must be Attachment or RoutePolicy".to_owned(),
        ));
    };
    let metadata = |field: &str| document.get("metadata").and_then(|metadata| metadata.get(field));
    let Some(name) = metadata("name").and_then(Node::text) else {
        return Err(wrong(
            "metadata.name",
            format!("metadata.name: a {kind} needs one, as text"),
        ));
    };
    let namespace = match metadata("namespace") {
        None => "default",
        Some(node) => match node.text() {
            Some(text) => text,
            None => {
                return Err(wrong(
                    "metadata.namespace",
                    "metadata.namespace: must be text".to_owned(),
                ));
            }
        },
    };
    let name = ObjectName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    match validate::object_name(&name) {
        Ok(()) => Ok(Key { kind, name }),
        Err(problems) => Err(Wrong {
            place: problems
                .0
                .first()
                .map_or(document.place, |problem| document.find(&problem.path)),
            reason: problems.to_string(),
        }),
    }
}

/// Collects what is wrong with one document.
struct Judge<'a> {
    document: &'a Node,
    problems: Vec<Problem>,
    wrong: Vec<Wrong>,
}

impl Judge<'_> {
    fn problem(&mut self, problem: Problem) {
        let place = self.document.find(&problem.path);
        self.problem_at(place, problem);
    }

    fn problem_at(&mut self, place: Place, problem: Problem) {
        self.wrong.push(Wrong {
            place,
            reason: problem.to_string(),
        });
        self.problems.push(problem);
    }

    fn problems(&mut self, found: Result<(), Problems>) {
        for problem in found.err().into_iter().flat_map(|problems| problems.0) {
            self.problem(problem);
        }
    }

    /// A part of the document as a type.
    fn read<T: serde::de::DeserializeOwned>(&mut self, field: &str) -> Option<T> {
        let Some(node) = self.document.get(field) else {
            self.problem(Problem {
                path: field.to_owned(),
                message: "missing".to_owned(),
                unsupported: false,
            });
            return None;
        };
        match node.read() {
            Ok(value) => Some(value),
            Err(error) => {
                let dot = if error.path.is_empty() || error.path.starts_with('[') {
                    ""
                } else {
                    "."
                };
                let problem = Problem {
                    path: format!("{field}{dot}{}", error.path),
                    message: error.message,
                    unsupported: false,
                };
                self.problem_at(error.place, problem);
                None
            }
        }
    }
}

fn judge(document: &Node, key: Key) -> Object {
    let mut judge = Judge {
        document,
        problems: Vec::new(),
        wrong: Vec::new(),
    };
    let version = document.get("apiVersion").and_then(Node::text);
    let known_version = version == Some(API_VERSION);
    let mut metadata = Metadata::default();
    if known_version {
        for (field, _) in document.entries() {
            // What an API server says of an object is no part of what is wanted.
            if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&field.text.as_str()) {
                judge.problem(Problem {
                    path: field.text.clone(),
                    message: "unknown field, expected one of apiVersion, kind, metadata, spec".to_owned(),
                    unsupported: false,
                });
            }
        }
        metadata = judge.read("metadata").unwrap_or_default();
        judge.problems(validate::labels(&metadata.labels));
    } else {
        judge.problem(Problem {
            path: "apiVersion".to_owned(),
            message: format!(
                "unknown version {:?}, this release knows {API_VERSION}",
                version.unwrap_or_default()
            ),
            unsupported: true,
        });
    }
    // Said, but no reason to refuse the object: an unreadable origin counts as absent.
    let mut unreadable = Vec::new();
    let mut say = |problem: Problem| {
        unreadable.push(Wrong {
            place: document.find(&problem.path),
            reason: problem.to_string(),
        });
    };
    let origin = validate::origin(&metadata.annotations).unwrap_or_else(|problem| {
        say(problem);
        None
    });
    let origin_time_ms = validate::origin_time(&metadata.annotations).unwrap_or_else(|problem| {
        say(problem);
        None
    });
    // The version must be known before the content is judged by it: what is wrong with the metadata is part of what a
    // generation stands for, since it decides between good and refused.
    let claim = claim(&mut judge, key.kind, &metadata, origin.as_ref());
    let content = if known_version {
        content(&mut judge, key.kind, &metadata)
    } else {
        None
    };
    let content = match (content, judge.problems.is_empty()) {
        (Some(content), true) => content,
        _ if key.kind == Kind::Attachment => Content::BadAttachment,
        _ => Content::BadPolicy(refusal(document, &judge.problems)),
    };
    judge.wrong.extend(unreadable);
    for wrong in &mut judge.wrong {
        wrong.reason = format!("{key}: {}", wrong.reason);
    }
    Object {
        key,
        place: document.place,
        claim,
        labels: metadata.labels,
        origin,
        origin_time_ms,
        content,
        wrong: judge.wrong,
    }
}

fn claim(judge: &mut Judge<'_>, kind: Kind, metadata: &Metadata, origin: Option<&Origin>) -> Option<Claim> {
    let document = judge.document;
    let field = |name: &str| {
        document
            .get("metadata")
            .and_then(|metadata| metadata.get(name))
            .filter(|node| node.value != Value::Null)
    };
    let mut readable = true;
    let mut refuse = |field: &str, message: &str| {
        readable = false;
        // A type that does not fit has been said already.
        if judge.problems.is_empty() {
            judge.problem(Problem {
                path: format!("metadata.{field}"),
                message: message.to_owned(),
                unsupported: false,
            });
        }
    };
    let uid = match field("uid").map(|node| node.text()) {
        None => None,
        Some(Some(uid)) if (1..=128).contains(&uid.len()) && uid.bytes().all(|c| c.is_ascii_graphic()) => {
            Some(uid.to_owned())
        }
        Some(_) => {
            refuse("uid", "must be 1 to 128 printable characters without spaces");
            None
        }
    };
    let generation = match field("generation").map(|node| &node.value) {
        None => None,
        // An API server has no more bits.
        Some(Value::Number(generation)) if (1..=i64::MAX as u64).contains(generation) => Some(*generation),
        Some(_) => {
            refuse("generation", "must be a positive integer");
            None
        }
    };
    if !readable {
        return None;
    }
    let nothing = String::new();
    let canonical = |name: &str| document.get(name).map_or(nothing.clone(), Node::canonical);
    let spec = format!(
        "{} {} {}",
        canonical("apiVersion"),
        canonical("spec"),
        Problems(judge.problems.clone())
    );
    let labels = format!("{:?}", metadata.labels);
    let (content, rest) = match kind {
        Kind::Attachment => (format!("{spec} {labels}"), labels),
        Kind::RoutePolicy => (spec.clone(), format!("{origin:?}")),
    };
    Some(Claim {
        uid,
        generation,
        spec: content_hash(&spec),
        content: content_hash(&content),
        rest: content_hash(&rest),
    })
}

/// The spec, if it is good.
fn content(judge: &mut Judge<'_>, kind: Kind, metadata: &Metadata) -> Option<Content> {
    match kind {
        Kind::Attachment => {
            let spec: AttachmentSpec = judge.read("spec")?;
            let meta = super::meta(
                &ObjectName {
                    namespace: String::new(),
                    name: metadata.name.clone(),
                },
                &super::ledger::Version::unknown(),
                &metadata.labels,
                None,
            );
            let good = validate::attachment(&meta, &spec, validate::Provenance::File).map(|_| ());
            let is_good = good.is_ok();
            judge.problems(good);
            is_good.then_some(Content::Attachment(spec))
        }
        Kind::RoutePolicy => {
            let spec: RoutePolicySpec = judge.read("spec")?;
            let good = validate::policy_spec(&spec).map(|_| ());
            let is_good = good.is_ok();
            judge.problems(good);
            is_good.then_some(Content::Policy(spec))
        }
    }
}

fn refusal(document: &Node, problems: &[Problem]) -> Refusal {
    let consumers: Option<LabelSelector> = document
        .get("spec")
        .and_then(|spec| spec.get("consumers"))
        .and_then(|consumers| consumers.read().ok());
    if problems.is_empty() {
        // Not reached: a policy is bad because of something. Said rather than assumed.
        return Refusal {
            reason: FailReason::Invalid,
            message: "it could not be read".to_owned(),
            consumers: None,
        };
    }
    validate::refusal(&Problems(problems.to_vec()), consumers.as_ref())
}
