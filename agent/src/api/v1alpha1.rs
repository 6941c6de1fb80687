//! `holdfast.dev/v1alpha1`: the objects as they are written.
//!
//! The types take whatever has the right shape; what a value may be is [`super::validate`]'s business, so that a
//! refusal can name field and reason. Enumerations keep a value that they do not know: it may come from a newer
//! release, and is `Unsupported` rather than malformed. Unknown fields are refused, because they are typos.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::schema;

/// API group and version of everything here.
pub const API_VERSION: &str = "holdfast.dev/v1alpha1";
/// API group.
pub const GROUP: &str = "holdfast.dev";
/// Version in the group.
pub const VERSION: &str = "v1alpha1";

/// Annotation: uid of the object that this one is a copy of.
pub const ORIGIN_UID: &str = "holdfast.dev/origin-uid";
/// Annotation: generation of the object that this one is a copy of.
pub const ORIGIN_GENERATION: &str = "holdfast.dev/origin-generation";
/// Annotation: when that object became what it is, RFC 3339. Only measured by.
pub const ORIGIN_TIME: &str = "holdfast.dev/origin-time";

/// Kinds that users write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// See [`AttachmentSpec`].
    Attachment,
    /// See [`RoutePolicySpec`].
    RoutePolicy,
}

impl Kind {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Attachment, Self::RoutePolicy];

    /// As `kind:` says it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Attachment => "Attachment",
            Self::RoutePolicy => "RoutePolicy",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Metadata of an object, with Kubernetes' names. What only an API server needs is accepted and ignored, so that an
/// exported object can be put into a directory as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Namespace; `default` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
    /// Uid; the source makes one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Generation; the source counts if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing)]
    creation_timestamp: Ignored,
    #[serde(default, skip_serializing)]
    deletion_timestamp: Ignored,
    #[serde(default, skip_serializing)]
    deletion_grace_period_seconds: Ignored,
    #[serde(default, skip_serializing)]
    finalizers: Ignored,
    #[serde(default, skip_serializing)]
    generate_name: Ignored,
    #[serde(default, skip_serializing)]
    managed_fields: Ignored,
    #[serde(default, skip_serializing)]
    owner_references: Ignored,
    #[serde(default, skip_serializing)]
    resource_version: Ignored,
    #[serde(default, skip_serializing)]
    self_link: Ignored,
}

/// Accepted and not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ignored;

impl<'de> Deserialize<'de> for Ignored {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// One network interface of one workload incarnation on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::attachment)]
pub struct AttachmentSpec {
    /// Name of the node. Immutable.
    #[schemars(transform = schema::node)]
    pub node: String,
    /// Host-side interface name, 1 to 15 bytes.
    #[schemars(transform = schema::interface)]
    pub interface: String,
    /// The incarnation that must be registered: a pod UID, an instance id. Required in objects of an API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = schema::identity)]
    pub identity: Option<String>,
    /// Addresses of the workload. None given: its source addresses are not checked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = schema::workload_addresses)]
    pub addresses: Vec<String>,
}

/// Which consumers may reach which destinations through which producers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::policy)]
pub struct RoutePolicySpec {
    /// Attachments of the same namespace whose traffic it is about.
    pub consumers: LabelSelector,
    /// Attachments of the same namespace that serve it.
    pub producers: LabelSelector,
    /// The traffic, 1 to 64 of them, unique by address, protocol and port.
    #[schemars(transform = schema::destinations)]
    pub destinations: Vec<Destination>,
    /// How packets reach a producer.
    #[serde(default)]
    pub delivery: Delivery,
    /// What happens to the traffic while its consumer is held.
    #[serde(default)]
    pub while_held: WhileHeld,
    /// How the policy moves from one producer set to another.
    #[serde(default)]
    pub switchover: Switchover,
    /// Past it, without a live agent that is current with its source, the kernel stops serving. At least `10s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = schema::max_staleness)]
    pub max_staleness: Option<String>,
}

/// Selects attachments by label: all requirements must hold. The empty selector would select everything and is
/// refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::selector)]
pub struct LabelSelector {
    /// Labels that must have these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(transform = schema::match_labels)]
    pub match_labels: BTreeMap<String, String>,
    /// Set-based requirements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = schema::match_expressions)]
    pub match_expressions: Vec<LabelRequirement>,
}

/// One set-based requirement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::requirement)]
pub struct LabelRequirement {
    /// Label key.
    #[schemars(transform = schema::label_key)]
    pub key: String,
    /// What is asked of it.
    pub operator: SelectorOperator,
    /// Values, for `In` and `NotIn` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = schema::label_values)]
    pub values: Vec<String>,
}

/// A service (one address, protocol and port) or a prefix (neither; a plain address is all of its traffic).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::destination)]
pub struct Destination {
    /// Canonical address, or canonical CIDR without host bits.
    #[schemars(transform = schema::destination_address)]
    pub address: String,
    /// Transport protocol of a service.
    #[serde(default, skip_serializing_if = "is_any")]
    #[schemars(transform = schema::protocol)]
    pub protocol: Protocol,
    /// Port of a service, 1 to 65535; 0 = no service.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(transform = schema::port)]
    pub port: u16,
    /// Port at the producer, with `delivery: Translate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(transform = schema::target_port)]
    pub target_port: Option<u16>,
}

fn is_any(protocol: &Protocol) -> bool {
    *protocol == Protocol::Any
}

fn is_zero(port: &u16) -> bool {
    *port == 0
}

/// How a policy moves from one producer set to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Switchover {
    /// How long it may wait for a ready producer, 1 s to 24 h.
    #[schemars(transform = schema::deadline)]
    pub deadline: String,
    /// What happens then.
    pub on_deadline: OnDeadline,
    /// How long established flows stay on a leaving producer: `0s` cuts at once, else 1 s to 24 h.
    #[schemars(transform = schema::drain)]
    pub drain: String,
}

impl Default for Switchover {
    fn default() -> Self {
        Self {
            deadline: "30s".to_owned(),
            on_deadline: OnDeadline::default(),
            drain: "60s".to_owned(),
        }
    }
}

/// An enumeration that keeps a value it does not know.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
            /// A value that this release does not know.
            Unknown(String),
        }

        impl $name {
            /// All values that this release knows, as they are written.
            pub const KNOWN: &[&str] = &[$($text),+];

            /// As it is written.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)+
                    Self::Unknown(text) => text,
                }
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                match text.as_str() {
                    $($text => Self::$variant,)+
                    _ => Self::Unknown(text),
                }
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer).map(Self::from)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            // An API server of this release takes no others.
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "enum": Self::KNOWN})
            }
        }
    };
}

open_enum! {
    /// How packets reach a producer.
    #[derive(Default)]
    Delivery {
        /// Unchanged.
        #[default]
        Direct = "Direct",
        /// The destination becomes the producer's address, replies are translated back.
        Translate = "Translate",
    }
}

open_enum! {
    /// What happens to claimed traffic of a held consumer.
    #[derive(Default)]
    WhileHeld {
        /// Dropped and counted.
        #[default]
        Drop = "Drop",
        /// Takes the default path.
        Pass = "Pass",
    }
}

open_enum! {
    /// What happens to the old set when a switch has waited for its deadline.
    #[derive(Default)]
    OnDeadline {
        /// It goes on serving.
        #[default]
        KeepOld = "KeepOld",
        /// It is cut off.
        Cut = "Cut",
    }
}

open_enum! {
    /// Transport protocol of a destination.
    #[derive(Default)]
    Protocol {
        /// Not a service.
        #[default]
        Any = "Any",
        /// TCP.
        Tcp = "TCP",
        /// UDP.
        Udp = "UDP",
    }
}

open_enum! {
    /// What a label requirement asks.
    SelectorOperator {
        /// The value is one of these.
        In = "In",
        /// The value is none of these, or the label is absent.
        NotIn = "NotIn",
        /// The label is there.
        Exists = "Exists",
        /// The label is absent.
        DoesNotExist = "DoesNotExist",
    }
}
