//! The objects that people and control planes write, and the way from them to the engine's model.
//!
//! [`v1alpha1`] is the written form, [`validate`] is the only way from there to
//! [`holdfast_engine::model`], [`hash`] is the SHA-256 that the engine is given from outside. An API server has the
//! same objects as [`resources`], by the definitions in [`crd`], with the rules of [`schema`].

pub mod crd;
pub mod hash;
pub mod node_report;
pub mod resources;
pub mod schema;
pub mod status;
pub mod v1alpha1;
pub mod validate;
