//! A directory of YAML or JSON files: what a node without a cluster uses.
//!
//! Files are acted on when they have been closed after writing, moved in, moved out or deleted, never on a first
//! byte: editors truncate before they write. One scan is one set difference. What is broken keeps what it last said
//! well; what a restart needs for that is in the state directory ([`ledger`]).

mod ledger;
mod object;
mod scan;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::BTreeMap;

use holdfast_engine::model::{ObjectName, Origin};

use crate::api::validate::Meta;

pub use ledger::NAME as LEDGER;
pub use watch::{Config, spawn};

fn meta(
    name: &ObjectName,
    version: &ledger::Version,
    labels: &BTreeMap<String, String>,
    origin: Option<&Origin>,
) -> Meta {
    Meta {
        name: name.clone(),
        uid: version.uid.clone(),
        generation: version.generation,
        created_ms: version.created_ms,
        labels: labels.clone(),
        origin: origin.cloned(),
    }
}
