//! Where desired objects come from.

pub mod dir;
pub mod document;
mod good;
pub mod kube;

use std::fmt;

use holdfast_engine::model::{Boot, Now, ObjectChange};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a source says.
#[derive(Clone, Debug)]
pub enum SourceNews {
    /// One scan or one batch of changes.
    Changes(Vec<ObjectChange>),
    /// The objects so far are the last complete set of an earlier life.
    SavedComplete,
    /// The set is complete since the start.
    Complete,
    /// Policies that name the time of their origin were seen for the first time so many nanoseconds after it.
    Arrived(Vec<u64>),
    /// Proof of life, and what is wrong with objects that could not be used at all. Replaces the earlier one.
    Status(SourceStatus),
    /// The same without a proof of life: a source that cannot be read, or one that proves its life by [`Self::Alive`]. What
    /// it said stays.
    Condition(SourceStatus),
    /// It was heard of at this moment.
    Alive(Now),
    /// What the disk has of the set.
    Saved(SavedAt),
}

/// Until when a saved set was what the source had: `age_ms` before `seen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedAt {
    /// A moment of this life.
    pub seen: Now,
    /// Milliseconds before it, by the wall clock.
    pub age_ms: i64,
}

impl SavedAt {
    /// How old it is, nanoseconds.
    #[must_use]
    pub fn age_ns(self, now: Now) -> u64 {
        let before = u64::try_from(self.age_ms).unwrap_or_default();
        now.boot
            .since(self.seen.boot)
            .saturating_add(before.saturating_mul(Boot::MILLI))
    }
}

/// How a source is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// Objects in force by kind.
    pub objects: std::collections::BTreeMap<String, u64>,
    /// Broken input, one line each for people: file, line, reason.
    pub problems: Vec<SourceProblem>,
}

/// A piece of input that could not be used. What it last said well stays in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SourceProblem {
    /// File, relative to the directory; or the object.
    pub file: String,
    /// Line, from 1, if known.
    pub line: Option<u64>,
    /// Column, from 1, if known.
    pub column: Option<u64>,
    /// What is wrong.
    pub reason: String,
    /// The lines around it.
    pub excerpt: Option<String>,
}

impl fmt::Display for SourceProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
            if let Some(column) = self.column {
                write!(f, ":{column}")?;
            }
        }
        write!(f, ": {}", self.reason)
    }
}
