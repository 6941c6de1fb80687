//! `deploy/monitoring/METRICS.md`.

use std::fmt::Write as _;

use super::{CONTROLLER_FAMILIES, FAMILIES, Family, Type, Values};

/// The page, in Markdown.
#[must_use]
pub fn document() -> String {
    let mut page = HEAD.to_owned();
    for family in FAMILIES {
        page += &section(family, "##");
    }
    page += CONTROLLER;
    for family in CONTROLLER_FAMILIES {
        page += &section(family, "###");
    }
    page
}

const HEAD: &str = "\
# Metrics of the agent

<!-- Written by `cargo xtask codegen` from agent/src/serve/metrics/catalogue.rs. Do not edit. -->

Served at `/metrics` of `--listen` (127.0.0.1:9643), and of `--metrics-listen`. Every series is made from the present
state when it is scraped, so it goes with its object. Closed label sets are always there, also at 0. No label carries an
interface name, a token, an address or an error text. Per-policy series are there for policies with a consumer on this
node that are held, failed or behind: ten for each (`--policy-metrics all`: for every policy).

Clocks of edge nodes are wrong. Compute ages against `holdfast_time_seconds` of the same node, never against `time()`:
both are taken from one clock that does not step. Counters begin at 0 when the agent starts; times do not.
";

const CONTROLLER: &str = "
## The controller

Served at `/metrics` of `holdfast controller --listen`. Those that stand by export the same, from what they know: the
alerts take the largest.
";

fn section(family: &Family, level: &str) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    _ = writeln!(
        text,
        "\n{level} {}\n\n{}. {}\n",
        family.name,
        kind(family.kind),
        family.help
    );
    for label in family.labels {
        let values = match label.values {
            Values::Closed(values) => values()
                .iter()
                .map(|value| format!("`{value}`"))
                .collect::<Vec<_>>()
                .join(", "),
            Values::Open(what) => what.to_owned(),
        };
        _ = writeln!(text, "- `{}`: {values}", label.name);
    }
    let absent = if family.absent.is_empty() {
        "never"
    } else {
        family.absent
    };
    _ = writeln!(text, "- absent: {absent}");
    text
}

const fn kind(kind: Type) -> &'static str {
    match kind {
        Type::Gauge => "Gauge",
        Type::Counter => "Counter",
        Type::Histogram => "Histogram",
    }
}
