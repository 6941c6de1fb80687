//! From what the nodes acknowledge to the status of each policy.
//!
//! [`index`] keeps what the watches have brought, [`rollup`] says of one policy what follows from it. Both are pure:
//! no client, no task, and a clock that is handed in.

pub mod index;
pub mod objects;
pub mod rollup;

#[cfg(test)]
mod model;
