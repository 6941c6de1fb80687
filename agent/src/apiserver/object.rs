//! Objects, read field by field.
//!
//! One object that cannot be read must not end a list or a watch of ten thousand others, and even of that one name, uid and
//! generation are needed, to say so. So the metadata are always read, and what else is wanted of an object is read by a
//! [`Body`], which cannot fail as a whole.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::reflect::Shown;

/// An object.
#[derive(Clone, Debug, PartialEq)]
pub struct Object<B> {
    /// Its metadata, without managed fields.
    pub metadata: ObjectMeta,
    /// The rest of it.
    pub body: B,
}

/// What is wanted of an object beside its metadata.
pub trait Body: Clone + Send + Sync + 'static {
    /// Reads it. What cannot be read is kept as such: see [`Fields::take`].
    fn read(fields: Fields) -> Self;
}

/// Of the object nothing is wanted but its metadata.
impl Body for () {
    fn read(_: Fields) -> Self {}
}

/// Top-level fields of an object.
#[derive(Clone, Debug, Default)]
pub struct Fields(Map<String, Value>);

impl Fields {
    /// A field; none if it is absent or null.
    ///
    /// # Errors
    /// Why it cannot be read as this type.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|error| format!("{name}: {error}")),
        }
    }
}

impl<'de, B: Body> Deserialize<'de> for Object<B> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let metadata = match fields.remove("metadata") {
            Some(Value::Object(mut metadata)) => {
                metadata.remove("managedFields");
                serde_json::from_value(Value::Object(metadata)).unwrap_or_default()
            }
            _ => ObjectMeta::default(),
        };
        Ok(Self {
            metadata,
            body: B::read(Fields(fields)),
        })
    }
}

impl<B> Object<B> {
    /// Its name, empty if it has none (which an API server does not let happen).
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its namespace, empty if it has none.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }
}

impl<B: Body> Object<B> {
    /// Reads one, as JSON.
    ///
    /// # Errors
    /// When it cannot be told which object it is.
    pub fn read(json: &str) -> Result<Self, String> {
        match serde_json::from_str::<Self>(json) {
            Ok(object) if object.metadata.name.is_none() => Err("an object without a name".to_owned()),
            Ok(object) => Ok(object),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl<B> Shown for Object<B> {
    fn version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Port(Result<Option<u16>, String>);

    impl Body for Port {
        fn read(mut fields: Fields) -> Self {
            Self(fields.take("port"))
        }
    }

    #[test]
    fn an_object_that_cannot_be_read_keeps_its_metadata() {
        let read = |text: &str| Object::<Port>::read(text);
        let good =
            read(r#"{"metadata": {"name": "good", "managedFields": [{"x": 1}]}, "port": 80}"#).unwrap();
        assert_eq!(good.body, Port(Ok(Some(80))));
        assert_eq!(good.metadata.managed_fields, None);
        let bad = read(r#"{"metadata": {"name": "bad", "generation": 3}, "port": "eighty"}"#).unwrap();
        assert_eq!((bad.name(), bad.metadata.generation), ("bad", Some(3)));
        let Port(Err(why)) = &bad.body else {
            panic!("{:?}", bad.body)
        };
        assert!(why.starts_with("port: "), "{why}");
        let none = read(r#"{"metadata": {"name": "none", "resourceVersion": "7"}, "port": null}"#).unwrap();
        assert_eq!((&none.body, none.version()), (&Port(Ok(None)), "7"));
        assert!(read(r#"{"metadata": "what is this"}"#).is_err());
        assert!(read("[]").is_err());
    }
}
