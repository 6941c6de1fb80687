//! The objects that people and control planes write, and the way from them to the engine's model.
//!
//! [`v1alpha1`] is the written form, [`validate`] is the only way from there to
//! [`holdfast_engine::model`], [`hash`] is the SHA-256 that the engine is given from outside.

pub mod hash;
pub mod node_report;
pub mod status;
pub mod v1alpha1;
pub mod validate;
