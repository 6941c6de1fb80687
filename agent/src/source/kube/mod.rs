//! An API server: this node's attachments, and the policies of the namespaces that have one here.
//!
//! | | |
//! | --- | --- |
//! | `object` | one object: whose it is first, what it says later |
//! | `set` | what is in force |
//! | `saved` | the last complete set, on the disk |
//! | `follow` | which scopes there are, and what the engine is told |

mod follow;
mod object;
mod saved;
mod set;
#[cfg(test)]
mod tests;

pub use follow::{Config, spawn};
pub use saved::NAME as SAVED;
