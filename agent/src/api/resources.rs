//! The objects as an API server has them: what a [`kube::Api`] reads and writes.
//!
//! Written by hand and not derived, so that a spec stays what a file has too, and a report has its fields at the top.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::node_report;
use super::schema;
use super::status::RoutePolicyStatus;
use super::v1alpha1::{API_VERSION, AttachmentSpec, GROUP, RoutePolicySpec, VERSION};

/// One network interface of one workload incarnation on one node: the right to steer it.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
pub struct Attachment {
    /// Metadata.
    #[serde(default)]
    #[schemars(skip)]
    pub metadata: ObjectMeta,
    /// What it is.
    pub spec: AttachmentSpec,
}

/// Which consumers may reach which destinations through which producers.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
pub struct RoutePolicy {
    /// Metadata.
    #[serde(default)]
    #[schemars(skip)]
    pub metadata: ObjectMeta,
    /// What is wanted.
    pub spec: RoutePolicySpec,
    /// What the nodes say about it, rolled up by the controller.
    #[serde(default)]
    #[schemars(transform = schema::status)]
    pub status: Option<RoutePolicyStatus>,
}

/// What one agent says about its own node, or a part of it.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[schemars(transform = schema::node_report)]
pub struct NodeReport {
    /// Metadata.
    #[serde(default)]
    #[schemars(skip)]
    pub metadata: ObjectMeta,
    /// What it says, at the top of the object: nothing of it is desired by anyone.
    #[serde(flatten)]
    pub report: node_report::NodeReport,
}

/// Makes a type a resource: its fields are written behind version, kind and metadata.
macro_rules! resource {
    ($type:ident, $scope:ident, $plural:literal, { $($name:ident: $($field:ident).+),* } $(optional $optional:ident)?) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($type).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                GROUP.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                VERSION.into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut object = serializer.serialize_map(None)?;
                object.serialize_entry("apiVersion", API_VERSION)?;
                object.serialize_entry("kind", stringify!($type))?;
                object.serialize_entry("metadata", &self.metadata)?;
                $(object.serialize_entry(stringify!($name), &self.$($field).+)?;)*
                $(if let Some(value) = &self.$optional {
                    object.serialize_entry(stringify!($optional), value)?;
                })?
                object.end()
            }
        }
    };
}

resource!(Attachment, NamespaceResourceScope, "attachments", { spec: spec });
resource!(RoutePolicy, NamespaceResourceScope, "routepolicies", { spec: spec } optional status);
resource!(NodeReport, ClusterResourceScope, "nodereports", {
    node: report.node, epoch: report.epoch, programmed: report.programmed, others: report.others
});
