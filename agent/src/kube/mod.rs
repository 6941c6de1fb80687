//! What agent and controller share of an API server: a client, objects that can always be read as far as they make sense,
//! and watches that do not go silent without being noticed.

pub mod client;
pub mod object;
pub mod watch;
