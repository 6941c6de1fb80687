//! The metrics, made from the current state at each scrape: a series goes with its object by construction.
//!
//! [`FAMILIES`] says what there is; `deploy/monitoring/METRICS.md` is written from it. Families with closed label sets
//! are always there, also at 0. No label ever carries an interface name, a token, an address or an error text.

mod catalogue;
mod controller;
mod document;
mod text;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, HoldReason, Now};
use holdfast_engine::view::Counts;

use super::VERSION;
use crate::api::v1alpha1::Kind;
use crate::datapath::Stats;
use crate::driver::{Histogram, MetricsSnapshot, PolicyFigures};
use crate::loops;
use crate::report::Stamps;
use text::{Labels, Page, Samples};

pub use catalogue::{CONTROLLER_FAMILIES, FAMILIES, Family, Label, Type, Values};
pub use controller::render_controller;
pub use document::document;
pub use text::CONTENT_TYPE;

/// Everything that one scrape shows.
#[derive(Debug)]
pub struct Scrape {
    /// The engine and its loop.
    pub snapshot: MetricsSnapshot,
    /// The kernel side.
    pub stats: Stats,
    /// One for all who stamp.
    pub stamps: Stamps,
    /// When this life began.
    pub started: Now,
    /// Label `source`.
    pub source: &'static str,
    /// Whether a foreign program before ours is allowed.
    pub foreign_allowed: bool,
}

/// Bytes of a page without policies, and of what a policy in trouble adds to it, with some to spare.
const ROOM: (usize, usize) = (64 * 1024, 1_280);

/// As text, in the format that Prometheus (and promtool) reads.
#[must_use]
pub fn render(scrape: &Scrape) -> String {
    scrape.stamps.observe(scrape.snapshot.now());
    let (constant, each) = ROOM;
    let mut page = Page::with_capacity(constant + each * scrape.snapshot.policies.len());
    scrape.intents(&mut page);
    scrape.policies(&mut page);
    scrape.engine(&mut page);
    scrape.kernel(&mut page);
    scrape.source(&mut page);
    scrape.agent(&mut page);
    page.finish()
}

impl Scrape {
    fn intents(&self, page: &mut Page) {
        let summary = &self.snapshot.summary;
        let mut family = page.family(&catalogue::INTENTS);
        for (state, count) in by_state(summary.intents) {
            family.sample(&[("state", state)], count);
        }
        let mut family = page.family(&catalogue::HELD_INTENTS);
        for reason in HoldReason::ALL {
            let count = summary.held.get(&reason).copied().unwrap_or(0);
            family.sample(&[("reason", &reason.to_string())], count);
        }
        let mut family = page.family(&catalogue::FAILED_INTENTS);
        for reason in FailReason::ALL {
            let count = summary.failed.get(&reason).copied().unwrap_or(0);
            family.sample(&[("reason", &reason.to_string())], count);
        }
        let mut family = page.family(&catalogue::HOLDS);
        for reason in HoldReason::ALL {
            let count = summary.holds_begun.get(&reason).copied().unwrap_or(0);
            family.sample(&[("reason", &reason.to_string())], count);
        }
    }

    fn policies(&self, page: &mut Page) {
        let policies: Vec<(Labels, &PolicyFigures)> = self
            .snapshot
            .policies
            .iter()
            .map(|policy| {
                let name = &policy.name;
                let labels = Labels::new(&[("namespace", &name.namespace), ("policy", &name.name)]);
                (labels, policy)
            })
            .collect();
        let mut family = page.family(&catalogue::POLICY_INTENTS);
        for (labels, policy) in &policies {
            for (state, count) in by_state(policy.intents) {
                family.shared(labels, &[("state", state)], count);
            }
        }
        let mut family = page.family(&catalogue::POLICY_GENERATION);
        for (labels, policy) in &policies {
            for (stage, generation) in [
                ("seen", policy.generation),
                ("applied", policy.applied),
                ("proven", policy.proven),
            ] {
                family.shared(labels, &[("stage", stage)], generation);
            }
        }
        let mut family = page.family(&catalogue::POLICY_HOLD_START);
        for (labels, policy) in &policies {
            if let Some(at) = policy.held_since {
                family.shared(labels, &[], self.stamp(at));
            }
        }
        let mut family = page.family(&catalogue::POLICY_BEHIND_SINCE);
        for (labels, policy) in &policies {
            if let Some(at) = policy.behind_since {
                family.shared(labels, &[], self.stamp(at));
            }
        }
    }

    fn engine(&self, page: &mut Page) {
        let snapshot = &self.snapshot;
        let never = Histogram::default();
        let mut family = page.family(&catalogue::PROGRAMMING_DURATION);
        for (leg, label) in catalogue::LEGS {
            let histogram = snapshot.durations.get(&leg).unwrap_or(&never);
            observed(&mut family, &[("leg", label)], histogram);
        }
        observed(
            &mut family,
            &[("leg", catalogue::ORIGIN_TO_SEEN)],
            &snapshot.origin_to_seen,
        );
        page.family(&catalogue::QUEUE_DEPTH).plain(snapshot.queue_depth);
        observed(
            &mut page.family(&catalogue::QUEUE_WAIT),
            &[],
            &snapshot.queue_wait,
        );
        observed(
            &mut page.family(&catalogue::PASS_DURATION),
            &[],
            &snapshot.pass_duration,
        );
        let mut family = page.family(&catalogue::LOOP_RUNS);
        for name in loops::NAMES {
            family.sample(&[("loop", name)], self.loop_count(name).runs);
        }
        let mut family = page.family(&catalogue::LOOP_ERRORS);
        for name in loops::NAMES {
            family.sample(&[("loop", name)], self.loop_count(name).errors);
        }
        let mut family = page.family(&catalogue::REPORT_WRITES);
        for result in catalogue::WRITE_RESULTS {
            let count = snapshot.report_writes.get(result).copied().unwrap_or(0);
            family.sample(&[("result", result)], count);
        }
        page.family(&catalogue::NETLINK_OVERRUNS)
            .plain(snapshot.netlink_overruns);
        page.family(&catalogue::NETLINK_RESYNCS)
            .plain(snapshot.netlink_resyncs);
        let mut family = page.family(&catalogue::DRIFT_REPAIRS);
        for kind in Drift::ALL {
            let count = snapshot.summary.drift.get(&kind).copied().unwrap_or(0);
            family.sample(&[("kind", kind.label())], count);
        }
        let mut family = page.family(&catalogue::FOREIGN_BEFORE);
        for (label, allowed) in [("false", false), ("true", true)] {
            let applies = allowed == self.foreign_allowed;
            let count = if applies { snapshot.foreign_before } else { 0 };
            family.sample(&[("allowed", label)], count);
        }
    }

    fn loop_count(&self, name: &str) -> loops::Count {
        self.snapshot.loops.get(name).copied().unwrap_or_default()
    }

    fn kernel(&self, page: &mut Page) {
        let maps = &self.stats.maps;
        let mut family = page.family(&catalogue::MAP_ENTRIES);
        for (map, stats) in maps {
            // Not every map can be counted for nothing.
            if let Some(entries) = stats.entries {
                family.sample(&[("map", *map)], entries);
            }
        }
        let mut family = page.family(&catalogue::MAP_CAPACITY);
        for (map, stats) in maps {
            family.sample(&[("map", *map)], stats.capacity);
        }
        let mut family = page.family(&catalogue::MAP_WRITES);
        for (map, stats) in maps {
            family.sample(&[("map", *map), ("op", "update")], stats.updates);
            family.sample(&[("map", *map), ("op", "delete")], stats.deletes);
        }
        let mut family = page.family(&catalogue::PACKETS);
        for verdict in Verdict::ALL {
            let count = self.stats.packets.get(verdict as usize).copied().unwrap_or(0);
            let labels = [
                ("verdict", verdict.verdict_label()),
                ("reason", verdict.reason_label()),
            ];
            family.sample(&labels, count);
        }
        let [ok, failed] = catalogue::PROOF_RESULTS;
        let mut family = page.family(&catalogue::PROOFS);
        family.sample(&[("result", ok)], self.stats.proofs_ok);
        family.sample(&[("result", failed)], self.stats.proofs_failed);
    }

    fn source(&self, page: &mut Page) {
        let snapshot = &self.snapshot;
        let mut family = page.family(&catalogue::SOURCE_LAST_ACTIVITY);
        if let Some(at) = snapshot.source_last_activity {
            family.sample(&[("source", self.source)], self.stamp(at));
        }
        let mut family = page.family(&catalogue::SAVED_SET);
        if let Some(saved) = snapshot.saved {
            let until = self.stamps.wall_ms(saved.seen).saturating_sub(saved.age_ms);
            family.plain(seconds(until));
        }
        let mut family = page.family(&catalogue::SOURCE_OBJECTS);
        for kind in Kind::ALL {
            let count = snapshot.source.objects.get(kind.as_str()).copied().unwrap_or(0);
            family.sample(&[("kind", kind.as_str())], count);
        }
        page.family(&catalogue::SOURCE_PROBLEMS)
            .plain(snapshot.source.problems.len() as u64);
    }

    fn agent(&self, page: &mut Page) {
        page.family(&catalogue::TIME)
            .plain(self.stamp(self.snapshot.now()));
        page.family(&catalogue::AGENT_START)
            .plain(self.stamp(self.started));
        page.family(&catalogue::BUILD_INFO)
            .sample(&[("version", VERSION)], 1_u64);
    }

    /// Seconds since the Unix epoch. All stamps of a scrape, and its own time, are the boot clock's at one distance: their
    /// differences are right however wrong the wall clock is.
    fn stamp(&self, at: Now) -> f64 {
        seconds(self.stamps.wall_ms(at))
    }
}

fn observed(family: &mut Samples<'_>, labels: &[(&str, &str)], value: &Histogram) {
    let buckets = Histogram::BOUNDS_NS
        .into_iter()
        .map(nanos_to_seconds)
        .zip(value.buckets);
    family.histogram(labels, buckets, value.count, nanos_to_seconds(value.sum_ns));
}

fn by_state(counts: Counts) -> [(&'static str, u64); 5] {
    let [pending, programmed, held, failed, removing] = catalogue::STATES;
    [
        (pending, counts.pending),
        (programmed, counts.programmed),
        (held, counts.held),
        (failed, counts.failed),
        (removing, counts.removing),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970 have 41 bits")]
fn seconds(ms: i64) -> f64 {
    ms as f64 / 1e3
}

#[expect(
    clippy::cast_precision_loss,
    reason = "above 2^53 ns (104 days) a microsecond is lost"
)]
fn nanos_to_seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
