//! Writes one status.

use std::time::Duration;

use holdfast_engine::model::Uid;
use kube::api::{Patch, PatchParams};
use kube::core::request::Request;
use serde_json::{Value, json};

use super::keeper::{Outcome, Write};
use super::objects::{self, PolicyBody};
use crate::api::status::RoutePolicyStatus;
use crate::apiserver::object::Object;
use crate::apiserver::reflect::Shown as _;
use crate::apiserver::{ApiServer, Failure};

/// Who the API server says has written.
const MANAGER: &str = "holdfast-controller";

/// A write, and why it failed if it did.
pub(super) struct Done {
    pub(super) uid: Uid,
    pub(super) outcome: Outcome,
    /// For people; none if it succeeded, or if another version was there, which is nobody's fault.
    pub(super) problem: Option<String>,
}

/// How long the API server may take for one.
const PATIENCE: Duration = Duration::from_secs(10);

/// Writes a status. Ends in bounded time.
pub(super) async fn write(api: ApiServer, write: Write) -> Done {
    let uid = write.uid.clone();
    let (outcome, problem) = match patch(&api, &write).await {
        Ok(object) => (
            Outcome::Written {
                version: object.version().to_owned(),
                status: Box::new(object.body.status),
            },
            None,
        ),
        Err(failure) if failure.code() == Some(409) => (Outcome::Conflict, None),
        Err(failure) => (Outcome::Failed, Some(failure.message)),
    };
    Done {
        uid,
        outcome,
        problem,
    }
}

async fn patch(api: &ApiServer, write: &Write) -> Result<Object<PolicyBody>, Failure> {
    let policies = objects::policies(Some(&write.name.namespace));
    let parameters = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let status = written(&write.status).map_err(|error| Failure::garbled(error.to_string()))?;
    let body = json!({
        "metadata": {"uid": write.uid, "resourceVersion": write.version},
        "status": status,
    });
    let request = Request::new(policies.path())
        .patch_subresource("status", &write.name.name, &parameters, &Patch::Merge(&body))
        .map_err(|error| Failure::garbled(error.to_string()))?;
    api.read(request, PATIENCE).await
}

/// The status as a merge patch: what it does not have must be said to be gone.
fn written(status: &RoutePolicyStatus) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(status)?;
    if let Value::Object(fields) = &mut value {
        for optional in ["origin", "laggards"] {
            fields.entry(optional).or_insert(Value::Null);
        }
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_status_does_not_have_any_more_is_taken_away() {
        let value = written(&RoutePolicyStatus::default()).unwrap();
        assert_eq!(value["origin"], Value::Null);
        assert!(value.as_object().unwrap().contains_key("laggards"));
        assert_eq!(value["nodes"]["desired"], 0);
    }
}
