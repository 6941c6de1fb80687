//! Holdfast's data plane as code that also builds on the host: the layout of the maps ([`abi`]) and the
//! header parser ([`parse`]).
#![no_std]

pub mod abi;
pub mod parse;
