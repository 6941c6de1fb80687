//! `NodeReport`: what one agent says about its own node.
//!
//! An acknowledgment that says nothing but "programmed" is one short line in a flat map, because that is the usual
//! case and a list of objects would cost an API server twenty times as much. Everything else is in `others`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use holdfast_engine::model::{Origin, Uid};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema;
use crate::report::PolicyReport;

/// A report of one node, or one shard of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Name of the node. Immutable.
    #[schemars(transform = schema::node)]
    pub node: String,
    /// Who wrote it, and about which life of the pins.
    pub epoch: Epoch,
    /// Of each policy that is programmed, by its uid: `generation covers [origin-uid origin-generation]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(with = "BTreeMap<String, String>", transform = schema::atomic_map)]
    pub programmed: BTreeMap<Uid, String>,
    /// The policies that are not programmed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(transform = schema::atomic_list)]
    pub others: Vec<PolicyReport>,
}

/// Who wrote a report, and about which life of the pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Epoch {
    /// Names the life of the pins: another one after a reboot or a wiped bpffs.
    pub id: String,
    /// Boot of the machine.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Start of the agent, RFC 3339.
    pub agent_start: String,
    /// Its version.
    pub agent_version: String,
    /// Layout of its maps.
    pub layout_version: u32,
}

/// What was programmed: `generation covers [origin-uid origin-generation]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Generation of the policy.
    pub generation: u64,
    /// Which attachments of the node, at which generations, went into it.
    pub covers: u64,
    /// The object that the policy is a copy of.
    pub origin: Option<Origin>,
}

impl fmt::Display for Ack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:016x}", self.generation, self.covers)?;
        match &self.origin {
            Some(origin) => write!(f, " {} {}", origin.uid, origin.generation),
            None => Ok(()),
        }
    }
}

/// A line that is no acknowledgment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not `generation covers [origin-uid origin-generation]`")]
pub struct NoAck;

impl FromStr for Ack {
    type Err = NoAck;

    fn from_str(text: &str) -> Result<Self, NoAck> {
        let mut words = text.split(' ');
        let generation = number(words.next())?;
        let covers = covers(words.next().ok_or(NoAck)?)?;
        let origin = match words.next() {
            None => None,
            Some("") => return Err(NoAck),
            Some(uid) => Some(Origin {
                uid: Uid(uid.to_owned()),
                generation: number(words.next())?,
            }),
        };
        match words.next() {
            None => Ok(Self {
                generation,
                covers,
                origin,
            }),
            Some(_) => Err(NoAck),
        }
    }
}

fn number(word: Option<&str>) -> Result<u64, NoAck> {
    word.and_then(|word| word.parse().ok()).ok_or(NoAck)
}

/// The 16 hex digits of a `covers`.
///
/// # Errors
/// When it is something else.
pub fn covers(text: &str) -> Result<u64, NoAck> {
    if text.len() != 16 || !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(NoAck);
    }
    u64::from_str_radix(text, 16).map_err(|_| NoAck)
}

/// Which part of a node's policies a report speaks of: those whose uid begins with these hex digits (none to two).
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard(String);

/// Digits that tell shards apart.
const DIGITS: &str = "0123456789abcdef";
/// Most digits of one.
const MAX_DIGITS: usize = 2;

impl Shard {
    /// Of a report's name: `NODE.r`, `NODE.r0`, `NODE.r0f`. None for a name that is not of this node.
    ///
    /// The suffix is always there, because a node may itself be called `a.r0`.
    #[must_use]
    pub fn of(name: &str, node: &str) -> Option<Self> {
        let digits = name.strip_prefix(node)?.strip_prefix(".r")?;
        let hex = digits
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        (digits.len() <= 2 && hex).then(|| Self(digits.to_owned()))
    }

    /// The name of this shard of a node's report.
    #[must_use]
    pub fn name(&self, node: &str) -> String {
        format!("{node}.r{}", self.0)
    }

    /// The shards that may speak of a policy, deepest first: the first one that exists is its only authority.
    pub fn for_uid(uid: &Uid) -> impl Iterator<Item = Self> {
        let digits: String = uid
            .0
            .chars()
            .take(2)
            .take_while(|c| matches!(c, '0'..='9' | 'a'..='f'))
            .collect();
        (0..=digits.len())
            .rev()
            .map(move |length| Self(digits[..length].to_owned()))
    }

    /// The shards that this one gives policies to: one for each further digit.
    pub fn children(&self) -> impl Iterator<Item = Self> + use<> {
        let digits = if self.has_children() { DIGITS } else { "" };
        let prefix = self.0.clone();
        digits.chars().map(move |digit| Self(format!("{prefix}{digit}")))
    }

    /// Whether there are such.
    #[must_use]
    pub const fn has_children(&self) -> bool {
        self.0.len() < MAX_DIGITS
    }

    /// Whether this shard may speak of a policy at all.
    #[must_use]
    pub fn may_hold(&self, uid: &Uid) -> bool {
        uid.0.starts_with(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> Uid {
        Uid(text.to_owned())
    }

    #[test]
    fn an_ack_is_read_as_it_is_written() {
        let plain = Ack {
            generation: 7,
            covers: 0x9f3a_b1c2_d3e4_f506,
            origin: None,
        };
        assert_eq!(plain.to_string(), "7 9f3ab1c2d3e4f506");
        let copy = Ack {
            origin: Some(Origin {
                uid: uid("hub-1"),
                generation: 12,
            }),
            ..plain.clone()
        };
        assert_eq!(copy.to_string(), "7 9f3ab1c2d3e4f506 hub-1 12");
        for ack in [plain, copy] {
            assert_eq!(ack.to_string().parse(), Ok(ack));
        }
    }

    #[test]
    fn what_is_no_ack_is_refused() {
        for text in [
            "",
            "7",
            "7 9f3a",
            "7 9F3AB1C2D3E4F506",
            "x 9f3ab1c2d3e4f506",
            "7 9f3ab1c2d3e4f506 ",
            "7 9f3ab1c2d3e4f506 uid",
            "7 9f3ab1c2d3e4f506 uid 1 more",
            "7  9f3ab1c2d3e4f506",
        ] {
            assert_eq!(text.parse::<Ack>(), Err(NoAck), "{text:?}");
        }
    }

    #[test]
    fn a_shard_belongs_to_the_node_whose_name_is_before_the_suffix() {
        assert_eq!(Shard::of("edge-1.r", "edge-1"), Some(Shard::default()));
        assert_eq!(Shard::of("edge-1.r0f", "edge-1"), Some(Shard("0f".to_owned())));
        for (name, node) in [
            ("edge-1", "edge-1"),
            ("edge-1.r0f0", "edge-1"),
            ("edge-1.rx", "edge-1"),
            ("edge-10.r", "edge-1"),
            ("a.r0", "a.r0"),
        ] {
            assert_eq!(Shard::of(name, node), None, "{name} of {node}");
        }
        assert_eq!(Shard::of("a.r0.r", "a.r0"), Some(Shard::default()));
    }

    #[test]
    fn the_deepest_prefix_comes_first() {
        let names = |text| {
            Shard::for_uid(&uid(text))
                .map(|shard| shard.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(names("3f0c6a1e"), ["3f", "3", ""]);
        assert_eq!(names("3-x"), ["3", ""]);
        assert_eq!(names("policy"), [""]);
        assert!(Shard("3f".to_owned()).may_hold(&uid("3f0c")));
        assert!(!Shard("3f".to_owned()).may_hold(&uid("3e0c")));
    }
}
