//! From what the nodes acknowledge to the status of each policy.
//!
//! [`index`] keeps what the watches have brought, [`rollup`] says of one policy what follows from it, [`keeper`] what is to
//! be written and when ([`pace`]). They are pure: no client, no task, and a clock that is handed in. [`run`] brings them
//! watches, writes and the other controllers ([`election`]).

pub mod election;
pub mod index;
pub mod keeper;
pub mod news;
pub mod objects;
pub mod pace;
pub mod rollup;
pub mod run;
mod serve;
mod writer;

#[cfg(test)]
mod model;
