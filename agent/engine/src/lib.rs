//! The pure core of Holdfast: it decides what is held, what is programmed, and in which order the kernel is told.
//!
//! [`Engine::handle`] takes events, [`Engine::poll`] gives effects, [`Engine::next_deadline`] says when to
//! poll although nothing happened, [`Engine::view`] shows what is known. No sockets, no tasks, no clock.

mod audit;
mod backoff;
pub mod belief;
mod cell;
pub mod compare;
mod conflict;
mod engine;
pub mod explain;
mod families;
mod gate;
mod intent;
mod interfaces;
pub mod journal;
mod locals;
pub mod model;
mod objects;
mod plan;
mod ports;
mod producers;
pub mod since;
mod slots;
pub mod view;

pub use engine::Engine;
