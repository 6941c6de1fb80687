//! Holdfast's data plane as code that also builds on the host: the layout of the maps ([`abi`]).
#![no_std]

pub mod abi;
