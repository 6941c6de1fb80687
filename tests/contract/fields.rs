//! `agent/JSON.md` names every field of what commands say as JSON.

use std::path::Path;

use anyhow::{Context, ensure};
use holdfast::cli::fields::{self, Field};
use holdfast::serve::diff::Diff;
use holdfast::serve::why::Why;
use holdfast::serve::wire::{PolicyDetail, Status, Waited};
use serde_json::Value;

/// Whatever is in the golden files has its line, which says something.
pub(super) fn every_field_of_the_json_is_documented() -> anyhow::Result<()> {
    for (name, fields) in [
        ("status.json", fields::of::<Status>()),
        ("status-early.json", fields::of::<Status>()),
        ("policy.json", fields::of::<PolicyDetail>()),
        ("wait.json", fields::of::<Vec<Waited>>()),
        ("why.json", fields::of::<Vec<Why>>()),
        ("diff.json", fields::of::<Vec<Diff>>()),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("contract/golden")
            .join(name);
        let value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        is_documented("", &value, &fields).context(name)?;
    }
    for line in fields::document().lines().filter(|line| line.starts_with("| `")) {
        ensure!(!line.contains("|  |"), "says nothing: {line}");
    }
    Ok(())
}

fn is_documented(path: &str, value: &Value, fields: &[Field]) -> anyhow::Result<()> {
    match value {
        Value::Array(items) => items
            .iter()
            .try_for_each(|item| is_documented(&format!("{path}[]"), item, fields)),
        Value::Object(members) => members.iter().try_for_each(|(name, member)| {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            let field = fields.iter().find(|field| field.path == path);
            let field = field.with_context(|| format!("{path} is not documented"))?;
            // Reasons and kinds are names of their own.
            if field.kind.contains("by name") {
                return Ok(());
            }
            is_documented(&path, member, fields)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}
