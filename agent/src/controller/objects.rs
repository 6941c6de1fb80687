//! Objects of the API server as the [`Index`](super::index::Index) takes them.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_engine::model::{FailReason, ObjectName, Refusal, Uid};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use super::index::{Attachment, LEASES_SILENT, Lease, Policy, Selectors};
use crate::api::node_report::NodeReport;
use crate::api::status::RoutePolicyStatus;
use crate::api::v1alpha1::{API_VERSION, LabelSelector, RoutePolicySpec};
use crate::api::{hash, validate};
use crate::apiserver::object::{Body, Fields, Object};
use crate::apiserver::reflect::Collection;
use crate::report::PolicyReport;

/// Group and version of leases.
const COORDINATION: &str = "coordination.k8s.io/v1";

/// Policies, of one namespace or of all.
#[must_use]
pub fn policies(namespace: Option<&str>) -> Collection {
    defined(namespace, "routepolicies")
}

/// Attachments, of one namespace or of all.
#[must_use]
pub fn attachments(namespace: Option<&str>) -> Collection {
    defined(namespace, "attachments")
}

/// Reports of nodes.
#[must_use]
pub fn reports() -> Collection {
    defined(None, "nodereports")
}

/// What goes while its definition is being deleted is not believed to be gone.
fn defined(namespace: Option<&str>, plural: &str) -> Collection {
    Collection::new(API_VERSION, namespace, plural).with_definition(API_VERSION, plural)
}

/// Nodes, of which nothing but their existence is of interest.
#[must_use]
pub fn nodes() -> Collection {
    Collection::new("v1", None, "nodes").metadata_only()
}

/// Leases of nodes.
#[must_use]
pub fn leases(namespace: &str) -> Collection {
    Collection::new(COORDINATION, Some(namespace), "leases").with_round(LEASES_HEARD)
}

/// The silence of all nodes must not look like that of the server: half of what counts as one.
const LEASES_HEARD: Duration = Duration::from_nanos(LEASES_SILENT / 2);

/// What is read of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyBody {
    spec: Result<RoutePolicySpec, String>,
    /// Whose traffic it is about, although the rest may make no sense.
    consumers: Option<LabelSelector>,
    /// Its status; empty if it has none, or one that cannot be read: then it is written anew.
    pub status: RoutePolicyStatus,
}

impl Body for PolicyBody {
    fn read(mut fields: Fields) -> Self {
        let spec: Value = fields
            .take("spec")
            .unwrap_or_default()
            .unwrap_or(Value::Object(serde_json::Map::new()));
        let consumers = spec
            .get("consumers")
            .and_then(|consumers| LabelSelector::deserialize(consumers).ok());
        Self {
            spec: serde_json::from_value(spec).map_err(|error| format!("spec: {error}")),
            consumers,
            status: fields.take("status").ok().flatten().unwrap_or_default(),
        }
    }
}

/// A policy; none without uid and name.
#[must_use]
pub fn policy(object: &Object<PolicyBody>) -> Option<Policy> {
    let metadata = &object.metadata;
    let content = match &object.body.spec {
        Ok(spec) => match validate::policy_spec(spec) {
            Ok(spec) => Ok(Selectors {
                consumers: spec.consumers,
                producers: spec.producers,
            }),
            Err(problems) => Err(validate::refusal(&problems, Some(&spec.consumers))),
        },
        Err(message) => Err(unreadable(message, object.body.consumers.as_ref())),
    };
    let no_annotations = BTreeMap::new();
    let annotations = metadata.annotations.as_ref().unwrap_or(&no_annotations);
    let (origin, origin_problem) = match validate::origin(annotations) {
        Ok(origin) => (origin, None),
        Err(problem) => (None, Some(problem.to_string())),
    };
    Some(Policy {
        name: name(metadata)?,
        uid: uid(metadata)?,
        generation: generation(metadata),
        origin,
        origin_problem,
        content,
    })
}

/// What has not even the shape of a policy.
fn unreadable(message: &str, consumers: Option<&LabelSelector>) -> Refusal {
    let known = validate::refusal(&validate::Problems(Vec::new()), consumers);
    Refusal {
        reason: FailReason::Invalid,
        message: message.to_owned(),
        consumers: known.consumers,
    }
}

/// What is read of an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentBody {
    node: Option<String>,
}

impl Body for AttachmentBody {
    fn read(mut fields: Fields) -> Self {
        #[derive(Deserialize)]
        struct Spec {
            node: Option<String>,
        }
        let spec: Option<Spec> = fields.take("spec").ok().flatten();
        Self {
            node: spec.and_then(|spec| spec.node),
        }
    }
}

/// An attachment; none without uid, name and node.
#[must_use]
pub fn attachment(object: &Object<AttachmentBody>) -> Option<Attachment> {
    let metadata = &object.metadata;
    Some(Attachment {
        name: name(metadata)?,
        node: object.body.node.clone()?,
        labels: metadata.labels.clone().unwrap_or_default(),
        covers: hash::covers(&uid(metadata)?, generation(metadata)),
    })
}

/// What is read of a report. What cannot be read of it counts as not said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportBody(pub NodeReport);

impl Body for ReportBody {
    fn read(mut fields: Fields) -> Self {
        let others: Option<Vec<Value>> = fields.take("others").ok().flatten();
        let others = others
            .unwrap_or_default()
            .into_iter()
            .filter_map(|other| PolicyReport::deserialize(other).ok());
        Self(NodeReport {
            node: fields.take("node").ok().flatten().unwrap_or_default(),
            epoch: fields.take("epoch").ok().flatten().unwrap_or_default(),
            programmed: fields.take("programmed").ok().flatten().unwrap_or_default(),
            others: others.collect(),
        })
    }
}

/// What is read of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseBody {
    holder_identity: Option<String>,
    renew_time: Option<String>,
}

impl Body for LeaseBody {
    fn read(mut fields: Fields) -> Self {
        fields.take("spec").ok().flatten().unwrap_or_default()
    }
}

/// A node's lease, at this time of our wall clock.
#[must_use]
pub fn lease(body: &LeaseBody, wall_ms: i64) -> Lease {
    let renewed = body.renew_time.clone().unwrap_or_default();
    let at = renewed.parse::<jiff::Timestamp>();
    Lease {
        holder: body.holder_identity.clone().unwrap_or_default(),
        renewed,
        apparent_age_ms: at.map_or(i64::MAX, |at| wall_ms.saturating_sub(at.as_millisecond())),
    }
}

fn name(metadata: &ObjectMeta) -> Option<ObjectName> {
    Some(ObjectName {
        namespace: metadata.namespace.clone()?,
        name: metadata.name.clone()?,
    })
}

/// Namespace and name of an object that is gone.
#[must_use]
pub fn object_name<B>(object: &Object<B>) -> ObjectName {
    ObjectName {
        namespace: object.namespace().to_owned(),
        name: object.name().to_owned(),
    }
}

/// The uid of an object.
#[must_use]
pub fn uid(metadata: &ObjectMeta) -> Option<Uid> {
    metadata.uid.clone().map(Uid)
}

fn generation(metadata: &ObjectMeta) -> u64 {
    metadata
        .generation
        .and_then(|generation| u64::try_from(generation).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read<B: Body>(value: Value) -> Object<B> {
        serde_json::from_value(value).unwrap()
    }

    fn metadata() -> Value {
        json!({"namespace": "shop", "name": "dns", "uid": "u1", "generation": 4, "resourceVersion": "9",
            "labels": {"app": "web"}})
    }

    #[test]
    fn a_policy_is_read_with_its_origin_and_its_status() {
        let mut metadata = metadata();
        metadata["annotations"] =
            json!({"holdfast.dev/origin-uid": "hub", "holdfast.dev/origin-generation": "12"});
        let object: Object<PolicyBody> = read(json!({
            "metadata": metadata,
            "spec": {
                "consumers": {"matchLabels": {"app": "web"}},
                "producers": {"matchLabels": {"app": "dns"}},
                "destinations": [{"address": "10.96.0.10", "protocol": "UDP", "port": 53}],
            },
            "status": {"observedGeneration": 3},
        }));
        let policy = policy(&object).unwrap();
        assert_eq!(policy.generation, 4);
        assert_eq!(policy.origin.unwrap().generation, 12);
        assert_eq!(object.body.status.observed_generation, 3);
        assert!(policy.content.is_ok());
    }

    #[test]
    fn f44_an_origin_that_cannot_be_read_counts_as_absent_and_is_said() {
        let mut metadata = metadata();
        metadata["annotations"] = json!({"holdfast.dev/origin-uid": "hub"});
        let object: Object<PolicyBody> = read(json!({"metadata": metadata}));
        let policy = policy(&object).unwrap();
        assert_eq!(policy.origin, None);
        assert!(policy.origin_problem.unwrap().contains("origin-generation"));
    }

    #[test]
    fn a_policy_that_cannot_be_read_still_says_whom_it_is_about() {
        let object: Object<PolicyBody> = read(json!({
            "metadata": metadata(),
            "spec": {"consumers": {"matchLabels": {"app": "web"}}, "destinations": "all of them"},
            "status": "what is this",
        }));
        let refusal = policy(&object).unwrap().content.unwrap_err();
        assert_eq!(refusal.reason, FailReason::Invalid);
        assert!(refusal.consumers.is_some(), "{refusal:?}");
        assert_eq!(object.body.status, RoutePolicyStatus::default());
    }

    #[test]
    fn of_a_report_everything_is_read_that_can_be() {
        let report: Object<ReportBody> = read(json!({
            "metadata": {"name": "edge-1.r"},
            "node": "edge-1",
            "epoch": {"id": "e1", "bootID": "b", "agentStart": "", "agentVersion": "", "layoutVersion": 1},
            "programmed": {"u1": "4 0000000000000000"},
            "others": [{"uid": "u2"}],
        }));
        let ReportBody(report) = report.body;
        assert_eq!((report.node.as_str(), report.epoch.id.as_str()), ("edge-1", "e1"));
        assert_eq!(report.programmed.len(), 1);
        assert!(report.others.is_empty());
    }

    #[test]
    fn a_lease_says_how_old_it_looks() {
        let object: Object<LeaseBody> = read(json!({
            "metadata": {"name": "edge-1"},
            "spec": {"holderIdentity": "edge-1/e1", "renewTime": "1970-01-01T00:00:10.000000Z"},
        }));
        let seen = lease(&object.body, 12_000);
        assert_eq!((seen.holder.as_str(), seen.apparent_age_ms), ("edge-1/e1", 2_000));
        assert_eq!(lease(&LeaseBody::default(), 0).apparent_age_ms, i64::MAX);
    }
}
