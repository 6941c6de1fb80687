//! What every source keeps of an object: the last content of it that was good.

use std::collections::BTreeMap;
use std::fmt;

use holdfast_engine::model::{ObjectChange, ObjectName, Origin};
use serde::{Deserialize, Serialize};

use super::SourceProblem;
use crate::api::v1alpha1::{AttachmentSpec, Kind, RoutePolicySpec};
use crate::api::validate::{self, Meta, Provenance};

/// Problems that are told one by one; the rest as a number.
const MAX_PROBLEMS: usize = 1_000;

/// Names an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: ObjectName,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl Key {
    /// Says that the object is gone.
    pub(super) fn gone(&self) -> ObjectChange {
        match self.kind {
            Kind::Attachment => ObjectChange::AttachmentGone(self.name.clone()),
            Kind::RoutePolicy => ObjectChange::PolicyGone(self.name.clone()),
        }
    }
}

/// A content that was good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Good {
    /// Generation that it had.
    pub(super) generation: u64,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) labels: BTreeMap<String, String>,
    /// Origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) origin: Option<Origin>,
    /// The rest.
    pub(super) spec: GoodSpec,
}

/// See [`Good::spec`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GoodSpec {
    /// Of an attachment.
    Attachment(AttachmentSpec),
    /// Of a policy.
    RoutePolicy(RoutePolicySpec),
}

impl Good {
    /// As the engine of this node knows it; none of another node's attachment, and none if an earlier release took for
    /// good what this one does not.
    pub(super) fn change(&self, meta: &Meta, node: &str, provenance: Provenance) -> Option<ObjectChange> {
        match &self.spec {
            GoodSpec::Attachment(spec) if spec.node != node => None,
            GoodSpec::Attachment(spec) => validate::attachment(meta, spec, provenance)
                .ok()
                .map(ObjectChange::Attachment),
            GoodSpec::RoutePolicy(spec) => validate::policy_spec(spec)
                .ok()
                .map(|spec| ObjectChange::Policy(validate::policy(meta, Ok(spec)))),
        }
    }
}

/// Nanoseconds from one wall-clock time to another; none if the clocks disagree about which is first.
pub(super) fn nanos_between(then_ms: i64, now_ms: i64) -> Option<u64> {
    let ms = u64::try_from(now_ms.checked_sub(then_ms)?).ok()?;
    Some(ms.saturating_mul(1_000_000))
}

/// A problem without a place.
pub(super) fn plain_problem(file: &str, reason: String) -> SourceProblem {
    SourceProblem {
        file: file.to_owned(),
        line: None,
        column: None,
        reason,
        excerpt: None,
    }
}

/// So many problems as anybody reads, and the number of the others.
pub(super) fn bounded(mut problems: Vec<SourceProblem>) -> Vec<SourceProblem> {
    if problems.len() > MAX_PROBLEMS {
        let more = problems.len() - MAX_PROBLEMS;
        problems.truncate(MAX_PROBLEMS);
        problems.push(plain_problem("", format!("{more} more problems")));
    }
    problems
}
