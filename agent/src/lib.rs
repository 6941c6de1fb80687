//! Holdfast: an edge-node eBPF dataplane agent that gates on interface and identity readiness.
//!
//! See ARCHITECTURE.md for the way of one event from netlink to map to acknowledgment.

pub mod api;
pub mod apiserver;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod controller;
pub mod datapath;
pub mod driver;
pub mod fault;
pub mod files;
pub mod journal;
pub mod loops;
pub mod netlink;
pub mod preflight;
pub mod registry;
pub mod report;
pub mod serve;
pub mod service;
pub mod source;
pub mod telemetry;
