//! YAML and JSON text as documents in which every value knows where it is written.
//!
//! Read first into a tree, then into types: so an error of any kind, of syntax, of type or of meaning, can be said
//! with field, line and column, and one bad document takes no other with it. Scalars have the types that an API
//! server would give them: a port in quotes is a string here too.

use std::fmt;

use serde::de::{self, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_saphyr::Spanned;

/// Line and column, both from 1; 0 = unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line.
    pub line: u64,
    /// Column.
    pub column: u64,
}

/// A value and where it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where it begins.
    pub place: Place,
    /// What it is.
    pub value: Value,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Null,
    /// A truth value.
    Bool(bool),
    /// A negative number.
    Negative(i64),
    /// A number that is not negative.
    Number(u64),
    /// A number with a fraction.
    Float(f64),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// A mapping, in the order of the text; keys are unique.
    Map(Vec<(Key, Node)>),
}

/// A key of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Where it is written.
    pub place: Place,
    /// The key.
    pub text: String,
}

/// What is wrong with a text or a value of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", prefix(.path))]
pub struct DocumentError {
    /// Where, if known.
    pub place: Place,
    /// Which field: `spec.destinations[0].port`; empty for the document itself.
    pub path: String,
    /// What is wrong.
    pub message: String,
}

fn prefix(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!("{path}: ")
    }
}

/// Reads all documents of a text. Empty documents are left out.
///
/// # Errors
/// When the text is no YAML (JSON is YAML); nothing of it can be trusted then.
pub fn parse(text: &str) -> Result<Vec<Node>, DocumentError> {
    // Anchors and merge keys are for people; what multiplies a text is for nobody.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: 32,
            max_documents: 65_536,
            max_events: 8_000_000,
            max_nodes: 4_000_000,
            max_aliases: 1_024,
            max_anchors: 1_024,
            max_recorded_anchor_events: 100_000,
            max_recorded_anchor_bytes: 1 << 20,
            max_merge_keys: 1_024,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 10_000,
            max_replay_stack_depth: 8,
            max_alias_expansions_per_anchor: 1_024,
        },
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_multiple_with_options::<Spanned<Value>>(text, options)
        .map(|documents| documents.into_iter().map(Node::from).collect())
        .map_err(|error| DocumentError {
            place: error.location().map(Place::from).unwrap_or_default(),
            path: String::new(),
            message: without_place(&error.render()),
        })
}

/// The library ends its messages with the place, which is told apart here.
fn without_place(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    match first.split_once(" at line ") {
        Some((what, _)) => what.to_owned(),
        None => first.strip_prefix("error: ").unwrap_or(first).to_owned(),
    }
}

impl From<serde_saphyr::Location> for Place {
    fn from(location: serde_saphyr::Location) -> Self {
        Self {
            line: location.line(),
            column: location.column(),
        }
    }
}

impl From<Spanned<Value>> for Node {
    fn from(spanned: Spanned<Value>) -> Self {
        Self {
            place: spanned.referenced.into(),
            value: spanned.value,
        }
    }
}

/// JSON that was read already: nothing of it has a place.
impl From<serde_json::Value> for Node {
    fn from(json: serde_json::Value) -> Self {
        use serde_json::Value as Json;
        let value = match json {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(value),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => Value::Number(value),
                (None, Some(value)) => Value::Negative(value),
                (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::Text(text),
            Json::Array(items) => Value::List(items.into_iter().map(Self::from).collect()),
            Json::Object(entries) => Value::Map(
                entries
                    .into_iter()
                    .map(|(text, value)| {
                        let place = Place::default();
                        (Key { place, text }, Self::from(value))
                    })
                    .collect(),
            ),
        };
        Self {
            place: Place::default(),
            value,
        }
    }
}

impl Node {
    /// The value under a key of a mapping.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries()
            .iter()
            .find(|(found, _)| found.text == key)
            .map(|(_, node)| node)
    }

    /// The entries of a mapping; none if it is something else.
    #[must_use]
    pub fn entries(&self) -> &[(Key, Self)] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    /// The text, if it is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Where a field is written: its key, or as much of the way to it as there is.
    #[must_use]
    pub fn find(&self, path: &str) -> Place {
        let mut node = self;
        let mut place = self.place;
        let mut rest = path;
        while !rest.is_empty() {
            let (segment, tail) = match rest.strip_prefix('[') {
                Some(inside) => inside.split_once(']').unwrap_or((inside, "")),
                None => rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len())),
            };
            rest = tail.strip_prefix('.').unwrap_or(tail);
            let next = match &node.value {
                Value::List(items) => segment
                    .parse::<usize>()
                    .ok()
                    .and_then(|index| items.get(index))
                    .map(|item| (item.place, item)),
                _ => node
                    .entries()
                    .iter()
                    .find(|(key, _)| key.text == segment)
                    .map(|(key, node)| (key.place, node)),
            };
            let Some((found, next)) = next else { break };
            place = found;
            node = next;
        }
        place
    }

    /// As a type.
    ///
    /// # Errors
    /// The first thing that does not fit.
    pub fn read<T: de::DeserializeOwned>(&self) -> Result<T, DocumentError> {
        T::deserialize(Reader(self)).map_err(|error| DocumentError {
            place: error.place.unwrap_or(self.place),
            path: error.path(),
            message: error.message,
        })
    }

    /// The same value in one spelling: keys sorted, no places. Equal text = equal content.
    #[must_use]
    pub fn canonical(&self) -> String {
        let mut text = String::new();
        self.write_canonical(&mut text);
        text
    }

    fn write_canonical(&self, text: &mut String) {
        use fmt::Write as _;
        // Writing to a string cannot fail.
        let _ = match &self.value {
            Value::Null => write!(text, "null"),
            Value::Bool(value) => write!(text, "{value}"),
            Value::Negative(value) => write!(text, "{value}"),
            Value::Number(value) => write!(text, "{value}"),
            Value::Float(value) => write!(text, "{value:?}"),
            Value::Text(value) => write!(text, "{value:?}"),
            Value::List(items) => {
                text.push('[');
                for item in items {
                    item.write_canonical(text);
                    text.push(',');
                }
                write!(text, "]")
            }
            Value::Map(entries) => {
                let mut entries: Vec<_> = entries.iter().collect();
                entries.sort_by(|(a, _), (b, _)| a.text.cmp(&b.text));
                text.push('{');
                for (key, node) in entries {
                    let _ = write!(text, "{:?}:", key.text);
                    node.write_canonical(text);
                    text.push(',');
                }
                write!(text, "}}")
            }
        };
    }
}

// --- from text to the tree ---------------------------------------------------------------------------------

impl<'de> de::Deserialize<'de> for Value {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(match u64::try_from(value) {
            Ok(value) => Value::Number(value),
            Err(_) => Value::Negative(value),
        })
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_some<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Value>>()? {
            items.push(item.into());
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let key = Key {
                place: key.referenced.into(),
                text: key.value,
            };
            entries.push((key, map.next_value::<Spanned<Value>>()?.into()));
        }
        Ok(Value::Map(entries))
    }
}

// --- from the tree to types --------------------------------------------------------------------------------

/// An error on its way up: each level adds its segment of the path.
#[derive(Debug)]
struct TreeError {
    place: Option<Place>,
    /// Innermost first.
    segments: Vec<String>,
    message: String,
}

impl TreeError {
    fn path(&self) -> String {
        let mut path = String::new();
        for segment in self.segments.iter().rev() {
            if !path.is_empty() && !segment.starts_with('[') {
                path.push('.');
            }
            path.push_str(segment);
        }
        path
    }

    fn at(mut self, place: Place) -> Self {
        self.place.get_or_insert(place);
        self
    }

    fn under(mut self, segment: String) -> Self {
        self.segments.push(segment);
        self
    }
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TreeError {}

impl de::Error for TreeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            place: None,
            segments: Vec::new(),
            message: message.to_string(),
        }
    }
}

/// Reads a node into a type.
struct Reader<'de>(&'de Node);

impl<'de> de::Deserializer<'de> for Reader<'de> {
    type Error = TreeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TreeError> {
        match &self.0.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Negative(value) => visitor.visit_i64(*value),
            Value::Number(value) => visitor.visit_u64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(value) => visitor.visit_borrowed_str(value),
            Value::List(items) => visitor.visit_seq(Items {
                items: items.iter(),
                index: 0,
            }),
            Value::Map(entries) => visitor.visit_map(Entries {
                entries: entries.iter(),
                value: None,
            }),
        }
        .map_err(|error| error.at(self.0.place))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TreeError> {
        match self.0.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, TreeError> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct Items<'de> {
    items: std::slice::Iter<'de, Node>,
    index: usize,
}

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = TreeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, TreeError> {
        let Some(node) = self.items.next() else {
            return Ok(None);
        };
        let segment = format!("[{}]", self.index);
        self.index += 1;
        seed.deserialize(Reader(node))
            .map(Some)
            .map_err(|error| error.under(segment))
    }
}

struct Entries<'de> {
    entries: std::slice::Iter<'de, (Key, Node)>,
    value: Option<&'de (Key, Node)>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = TreeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TreeError> {
        self.value = self.entries.next();
        let Some((key, _)) = self.value else {
            return Ok(None);
        };
        seed.deserialize(key.text.as_str().into_deserializer())
            .map(Some)
            .map_err(|error: TreeError| error.at(key.place).under(key.text.clone()))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, TreeError> {
        let Some((key, node)) = self.value else {
            return Err(de::Error::custom("a value without a key"));
        };
        seed.deserialize(Reader(node))
            .map_err(|error| error.under(key.text.clone()))
    }
}

/// The lines around a place, numbered, with a mark; none if the place is unknown.
#[must_use]
pub fn excerpt(text: &str, place: Place) -> Option<String> {
    /// Longer lines are cut: an excerpt is for a terminal.
    const WIDTH: usize = 120;
    let wanted = usize::try_from(place.line).ok()?.checked_sub(1)?;
    let mut excerpt = String::new();
    for (index, line) in text
        .lines()
        .enumerate()
        .skip(wanted.saturating_sub(1))
        .take(if wanted == 0 { 2 } else { 3 })
    {
        let mark = if index == wanted { '>' } else { ' ' };
        let shown: String = line
            .chars()
            .take(WIDTH)
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        excerpt.push_str(format!("{mark} {:>4} | {shown}", index + 1).trim_end());
        excerpt.push('\n');
    }
    (!excerpt.is_empty()).then_some(excerpt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::v1alpha1::RoutePolicySpec;

    fn one(text: &str) -> Node {
        let mut documents = parse(text).unwrap();
        assert_eq!(documents.len(), 1);
        documents.remove(0)
    }

    const POLICY: &str = "\
# a comment
consumers:
  matchLabels: {app: web}
producers:
  matchExpressions:
  - key: example.org/app
    operator: In
    values: [dns]
destinations:
- address: 10.96.0.10
  protocol: UDP
  port: 53
";

    #[test]
    fn yaml_and_json_are_the_same() {
        let yaml = one(POLICY);
        let json = one(
            r#"{"producers": {"matchExpressions": [{"values": ["dns"], "key": "example.org/app", "operator": "In"}]},
                "destinations": [{"address": "10.96.0.10", "protocol": "UDP", "port": 53}],
                "consumers": {"matchLabels": {"app": "web"}}}"#,
        );
        assert_eq!(yaml.canonical(), json.canonical());
        assert_eq!(
            yaml.read::<RoutePolicySpec>().unwrap(),
            json.read::<RoutePolicySpec>().unwrap()
        );
        assert_eq!(
            yaml.canonical(),
            r#"{"consumers":{"matchLabels":{"app":"web",},},"destinations":[{"address":"10.96.0.10","port":53,"protocol":"UDP",},],"producers":{"matchExpressions":[{"key":"example.org/app","operator":"In","values":["dns",],},],},}"#
        );
    }

    #[test]
    fn every_field_can_be_found() {
        let node = one(POLICY);
        for (path, line, column) in [
            ("", 2, 1),
            ("consumers", 2, 1),
            ("consumers.matchLabels[app]", 3, 17),
            ("producers.matchExpressions[0].values[0]", 8, 14),
            ("destinations[0].port", 12, 3),
            // As much of the way as there is.
            ("destinations[0].targetPort", 10, 3),
            ("destinations[7].port", 9, 1),
            ("delivery", 2, 1),
        ] {
            assert_eq!(node.find(path), Place { line, column }, "{path}");
        }
    }

    #[test]
    fn what_does_not_fit_is_said_with_field_and_place() {
        let wrong = |from: &str, to: &str| {
            one(&POLICY.replace(from, to))
                .read::<RoutePolicySpec>()
                .map(|_| ())
                .unwrap_err()
        };
        let error = wrong("port: 53", "port: 70000");
        assert_eq!(error.path, "destinations[0].port");
        assert_eq!(error.place, Place { line: 12, column: 9 });
        assert_eq!(error.message, "invalid value: integer `70000`, expected u16");

        let error = wrong("  port: 53", "  prot: 53");
        assert_eq!(error.path, "destinations[0].prot");
        assert_eq!(error.place, Place { line: 12, column: 3 });
        assert_eq!(
            error.message,
            "unknown field `prot`, expected one of `address`, `protocol`, `port`, `targetPort`"
        );

        let error = wrong("destinations:", "destination:");
        assert_eq!(error.path, "destination");
        assert_eq!(error.place, Place { line: 9, column: 1 });

        let error = wrong("{app: web}", "{app: 5}");
        assert_eq!(error.path, "consumers.matchLabels.app");
        assert_eq!(error.message, "invalid type: integer `5`, expected a string");

        let error = wrong("port: 53", "port: \"53\"");
        assert_eq!(error.message, "invalid type: string \"53\", expected u16");

        let error = wrong("    operator: In\n", "");
        assert_eq!(
            error.to_string(),
            "producers.matchExpressions[0]: missing field `operator`"
        );
        assert_eq!(error.place, Place { line: 6, column: 5 });
    }

    #[test]
    fn documents_are_told_apart_and_empty_ones_left_out() {
        let documents = parse("---\na: 1\n---\n---\n# nothing\n---\nb: yes\n...\n").unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].place.line, 2);
        assert_eq!(documents[1].place.line, 7);
        assert_eq!(documents[1].get("b").and_then(Node::text), Some("yes"));
        assert_eq!(parse("").unwrap(), []);
        assert_eq!(parse("# only a comment\n").unwrap(), []);
    }

    #[test]
    fn broken_text_is_said_with_its_place() {
        for (text, line) in [
            ("a: 1\nb: [1, 2\n", 3),
            ("a: 1\na: 2\n", 2),
            ("a: 1\n  b: 2\n", 2),
            ("a: *nobody\n", 1),
            ("{\"a\": }}\n", 1),
            ("a: \u{1}\n", 1),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.place.line.abs_diff(line) <= 1, "{text:?}: {error:?}");
            assert!(
                !error.message.is_empty() && !error.message.contains('\n'),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_text_that_multiplies_itself_is_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..10 {
            let before = format!("*a{}, ", level - 1).repeat(9);
            text.push_str(&format!("a{level}: &a{level} [{before}*a{}]\n", level - 1));
        }
        assert!(parse(&text).is_err());
        let deep = "[".repeat(100) + &"]".repeat(100);
        assert!(parse(&deep).is_err());
    }

    #[test]
    fn an_excerpt_marks_the_line() {
        let place = |line| Place { line, column: 1 };
        assert_eq!(
            excerpt("one\ntwo\nthree\nfour\n", place(3)).unwrap(),
            "     2 | two\n>    3 | three\n     4 | four\n"
        );
        assert_eq!(
            excerpt("one\ntwo\n", place(1)).unwrap(),
            ">    1 | one\n     2 | two\n"
        );
        assert_eq!(excerpt("one\n", place(0)), None);
        assert_eq!(excerpt("one\n", place(9)), None);
    }
}
