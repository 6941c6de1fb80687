//! The fields of what the commands say with `-o json`: `agent/JSON.md` is written from the types that say it.

use std::fmt::Write as _;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::attachment::{ListedJson, RegisteredJson, UnregisteredJson};
use super::down::{Down, DownWhy};
use super::wait::WaitedInCluster;
use crate::preflight;
use crate::serve::diff::Diff;
use crate::serve::why::Why;
use crate::serve::wire::{LogFilter, PolicyDetail, Status, Waited};

/// A field, by its way from the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// `policies[].intents.held`: of each item of a list, of an object in it.
    pub path: String,
    /// Its type, for people.
    pub kind: String,
    /// What it means.
    pub meaning: String,
}

/// Every field of this type, and of what is in it.
#[must_use]
pub fn of<T: JsonSchema>() -> Vec<Field> {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let generator = settings
        .with(|settings| settings.inline_subschemas = true)
        .into_generator();
    let mut fields = Vec::new();
    walk("", generator.into_root_schema_for::<T>().as_value(), &mut fields);
    fields
}

fn walk(path: &str, schema: &Value, fields: &mut Vec<Field>) {
    let schema = there(schema);
    if let Some(items) = schema.get("items") {
        return walk(&format!("{path}[]"), items, fields);
    }
    let required = schema.get("required").and_then(Value::as_array);
    let is_required = |name: &String| required.is_some_and(|names| names.iter().any(|found| found == name));
    for (name, property) in schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        let mut kind = kind(property);
        if !is_required(name) {
            // What would be null is left out.
            kind = format!("{}, or absent", kind.strip_suffix(" or null").unwrap_or(&kind));
        }
        let text = property.get("description").and_then(Value::as_str);
        fields.push(Field {
            path: path.clone(),
            kind,
            meaning: text
                .unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" "),
        });
        walk(&path, property, fields);
    }
}

/// What may be null is a choice between null and this.
fn there(schema: &Value) -> &Value {
    let choices = schema.get("anyOf").and_then(Value::as_array);
    let is_null = |choice: &&Value| choice.get("type").is_some_and(|kind| kind == "null");
    choices
        .and_then(|choices| choices.iter().find(|choice| !is_null(choice)))
        .unwrap_or(schema)
}

fn kind(schema: &Value) -> String {
    let inner = there(schema);
    let values = inner.get("enum").or_else(|| inner.get("oneOf"));
    let mut words: Vec<String> = match (values.and_then(Value::as_array), inner.get("type")) {
        (Some(values), _) => {
            let words = values
                .iter()
                .filter_map(|value| value.get("const").unwrap_or(value).as_str());
            vec![
                words
                    .map(|word| format!("`{word}`"))
                    .collect::<Vec<_>>()
                    .join(", "),
            ]
        }
        (None, Some(Value::String(only))) => vec![word(only, inner)],
        (None, Some(Value::Array(all))) => {
            let names = all.iter().filter_map(Value::as_str);
            names.map(|name| word(name, inner)).collect()
        }
        (None, _) => Vec::new(),
    };
    if !std::ptr::eq(inner, schema) {
        words.push("null".to_owned());
    }
    words.join(" or ")
}

fn word(name: &str, schema: &Value) -> String {
    match name {
        "string" => "text".to_owned(),
        "integer" => "number".to_owned(),
        "boolean" => "true or false".to_owned(),
        "array" => {
            let items = schema.get("items").map(kind).unwrap_or_default();
            format!("list of {items}")
        }
        "object" => match schema
            .get("additionalProperties")
            .filter(|values| values.is_object())
        {
            Some(values) => format!("{} by name", kind(values)),
            None => "object".to_owned(),
        },
        other => other.to_owned(),
    }
}

const HEAD: &str = "\
# What the commands say as JSON

<!-- Written by `cargo xtask codegen` from the types that say it (agent/src/cli/fields.rs). Do not edit. -->

With `-o json` a command prints one value. Fields are added, never renamed or removed; words of a closed set may come to have more.
Times are RFC 3339 in UTC, names of objects `namespace/name`. `list[].field` is a field of each item of a list. The exit code says
the same as without `-o json`; what went wrong is on the error output, in words.
";

/// The page, in Markdown.
#[must_use]
pub fn document() -> String {
    let mut page = HEAD.to_owned();
    for (command, fields) in [
        ("`holdfast status`", of::<Status>()),
        ("`holdfast status NAMESPACE/POLICY`", of::<PolicyDetail>()),
        ("`holdfast status` while no agent runs", of::<Down>()),
        ("`holdfast why`", of::<Why>()),
        ("`holdfast why` while no agent runs", of::<DownWhy>()),
        ("`holdfast wait`", of::<Waited>()),
        ("`holdfast wait` at an API server", of::<WaitedInCluster>()),
        ("`holdfast diff`", of::<Diff>()),
        ("`holdfast preflight`", of::<Vec<preflight::Check>>()),
        ("`holdfast attachment register`", of::<RegisteredJson<'static>>()),
        ("`holdfast attachment unregister`", of::<UnregisteredJson>()),
        ("`holdfast attachment list`", of::<Vec<ListedJson>>()),
        ("`holdfast agent log`", of::<LogFilter>()),
    ] {
        // Writing to a string does not fail.
        _ = writeln!(
            page,
            "\n## {command}\n\n| field | type | what |\n| --- | --- | --- |"
        );
        for field in fields {
            _ = writeln!(page, "| `{}` | {} | {} |", field.path, field.kind, field.meaning);
        }
    }
    page
}
