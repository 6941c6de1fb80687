//! The definitions of the objects for an API server, made from the types.

use kube::Resource;
use kube::core::schema::StructuralSchemaRewriter;
use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::resources::{Attachment, NodeReport, RoutePolicy};
use super::v1alpha1::VERSION;

/// The definition of a kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Definition {
    /// Plural, in lower case: `routepolicies`.
    pub plural: String,
    /// The object.
    pub object: Value,
}

impl Definition {
    /// As YAML.
    ///
    /// # Errors
    /// When a value cannot be written.
    pub fn yaml(&self) -> Result<String, serde_saphyr::ser::Error> {
        serde_saphyr::to_string(&self.object)
    }
}

/// All definitions, in the order in which they are read best.
#[must_use]
pub fn all() -> [Definition; 3] {
    [
        definition::<RoutePolicy>(&Shape {
            scope: "Namespaced",
            short: "rp",
            columns: vec![
                condition("Accepted", "Whether it is well formed"),
                condition(
                    "Programmed",
                    "Whether every node that should serves this very generation",
                ),
                column(
                    "Nodes",
                    "string",
                    ".status.programmedNodes",
                    "Programmed nodes of those that should be",
                ),
                column(
                    "Held",
                    "integer",
                    ".status.intents.held",
                    "Consumers that are held",
                ),
                age(),
            ],
            selectable: None,
            subresources: json!({"status": {}}),
        }),
        definition::<Attachment>(&Shape {
            scope: "Namespaced",
            short: "att",
            columns: vec![
                column("Node", "string", ".spec.node", "Node of the workload"),
                column(
                    "Interface",
                    "string",
                    ".spec.interface",
                    "Its host-side interface",
                ),
                wide(column(
                    "Identity",
                    "string",
                    ".spec.identity",
                    "The incarnation that must stand behind it",
                )),
                age(),
            ],
            selectable: Some(".spec.node"),
            subresources: Value::Null,
        }),
        definition::<NodeReport>(&Shape {
            scope: "Cluster",
            short: "nr",
            columns: vec![
                column("Node", "string", ".node", "Node that it speaks of"),
                column("Agent", "string", ".epoch.agentVersion", "Version of its agent"),
                column("Since", "date", ".epoch.agentStart", "Start of the agent"),
                age(),
            ],
            selectable: Some(".node"),
            subresources: Value::Null,
        }),
    ]
}

/// What a definition says beside the schema.
struct Shape {
    scope: &'static str,
    short: &'static str,
    columns: Vec<Value>,
    /// Path by which objects can be selected.
    selectable: Option<&'static str>,
    subresources: Value,
}

fn column(name: &str, kind: &str, path: &str, description: &str) -> Value {
    json!({"name": name, "type": kind, "jsonPath": path, "description": description})
}

fn condition(kind: &str, description: &str) -> Value {
    let path = format!(".status.conditions[?(@.type==\"{kind}\")].status");
    column(kind, "string", &path, description)
}

fn age() -> Value {
    column(
        "Age",
        "date",
        ".metadata.creationTimestamp",
        "Since when it is there",
    )
}

/// Shown with `-o wide` only.
fn wide(mut column: Value) -> Value {
    column["priority"] = 1.into();
    column
}

fn definition<K: Resource<DynamicType = ()> + JsonSchema>(shape: &Shape) -> Definition {
    let (kind, plural, group) = (K::kind(&()), K::plural(&()), K::group(&()));
    let mut version = json!({
        "name": VERSION,
        "served": true,
        "storage": true,
        "schema": {"openAPIV3Schema": schema::<K>()},
        "additionalPrinterColumns": shape.columns,
    });
    if let Some(path) = shape.selectable {
        version["selectableFields"] = json!([{"jsonPath": path}]);
    }
    if !shape.subresources.is_null() {
        version["subresources"] = shape.subresources.clone();
    }
    let object = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{plural}.{group}"),
            "labels": {"app.kubernetes.io/part-of": "holdfast"},
        },
        "spec": {
            "group": group,
            "scope": shape.scope,
            "names": {
                "kind": kind,
                "listKind": format!("{kind}List"),
                "plural": plural,
                "singular": kind.to_lowercase(),
                "shortNames": [shape.short],
                "categories": ["holdfast"],
            },
            "versions": [version],
        },
    });
    Definition {
        plural: plural.into_owned(),
        object,
    }
}

fn schema<K: JsonSchema>() -> Schema {
    let mut settings = SchemaSettings::openapi3();
    settings.meta_schema = None;
    settings.inline_subschemas = true;
    settings
        .with_transform(StructuralSchemaRewriter)
        .with_transform(Plain)
        .into_generator()
        .into_root_schema_for::<K>()
}

/// What an API server calls structural, and what it would not know how to take.
#[derive(Clone, Copy, Debug)]
struct Plain;

impl Transform for Plain {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        schema.remove("title");
        // Formats of Rust's integers; their bounds stay.
        if schema
            .get("format")
            .and_then(Value::as_str)
            .is_some_and(|format| format.contains("int"))
        {
            let long = matches!(
                schema.get("format").and_then(Value::as_str),
                Some("uint64" | "int64")
            );
            schema.insert("format".to_owned(), if long { "int64" } else { "int32" }.into());
        }
        // Absent is absent: an API server drops a null before it looks.
        if let Some(Value::Array(types)) = schema.get_mut("type") {
            types.retain(|kind| kind != "null");
            if let [kind] = types.as_slice() {
                let kind = kind.clone();
                schema.insert("type".to_owned(), kind);
            }
        }
        schema.remove("nullable");
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

    use super::*;

    /// Words that an API server does not know would be dropped without a word.
    #[test]
    fn an_api_server_knows_every_word_of_a_definition() {
        /// It keeps bounds as fractions.
        fn fractions(value: &mut Value) {
            match value {
                Value::Number(number) => *value = number.as_f64().into(),
                Value::Array(items) => items.iter_mut().for_each(fractions),
                Value::Object(fields) => fields.values_mut().for_each(fractions),
                Value::Null | Value::Bool(_) | Value::String(_) => {}
            }
        }
        for definition in all() {
            let known: CustomResourceDefinition = serde_json::from_value(definition.object.clone()).unwrap();
            let [mut known, mut said] = [serde_json::to_value(known).unwrap(), definition.object];
            fractions(&mut known);
            fractions(&mut said);
            assert_eq!(known, said);
        }
    }

    #[test]
    fn the_text_says_what_the_definition_says() {
        for definition in all() {
            let read: Value = serde_saphyr::from_str(&definition.yaml().unwrap()).unwrap();
            assert_eq!(read, definition.object);
        }
    }

    #[test]
    fn every_field_is_described() {
        fn walk(schema: &Value, path: &str, bare: &mut Vec<String>) {
            for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                let path = format!("{path}.{name}");
                let text = field["description"].as_str().unwrap_or_default();
                // Links are for the reader of the code.
                if text.is_empty() || text.contains("[`") {
                    bare.push(format!("{path}: {text:?}"));
                }
                walk(field, &path, bare);
                walk(&field["items"], &format!("{path}[]"), bare);
            }
        }
        let mut bare = Vec::new();
        for definition in all() {
            let schema = &definition.object["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            walk(schema, &definition.plural, &mut bare);
        }
        assert_eq!(bare, Vec::<String>::new());
    }
}
