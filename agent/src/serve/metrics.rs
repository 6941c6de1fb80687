//! The metrics, made from the current state at each scrape: a series goes with its object by construction.
//!
//! [`FAMILIES`] says what there is; `deploy/monitoring/METRICS.md` is written from it. Families with closed label sets
//! are always there, also at 0. No label ever carries an interface name, a token, an address or an error text.

mod catalogue;
mod document;

use std::fmt;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{FailReason, HoldReason, Now};
use holdfast_engine::view::{Counts, PolicyView};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, MetricEncoder, prometheus_text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::VERSION;
use crate::api::v1alpha1::Kind;
use crate::datapath::Stats;
use crate::driver::{Histogram, MetricsSnapshot};
use crate::loops;
use crate::report::Stamps;

pub use catalogue::{FAMILIES, Family, Label, Type, Values};
pub use document::document;
pub use prometheus_text::CONTENT_TYPE;

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

/// As text, in the format that Prometheus (and promtool) reads.
///
/// # Errors
/// Never in practice: writing to a string does not fail.
pub fn render(scrape: Scrape) -> Result<String, fmt::Error> {
    scrape.stamps.observe(scrape.snapshot.now());
    let mut registry = Registry::default();
    registry.register_collector(Box::new(scrape));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(&mut encoder);
        self.intents(&mut out)?;
        self.policies(&mut out)?;
        self.engine(&mut out)?;
        self.kernel(&mut out)?;
        self.source(&mut out)?;
        self.agent(&mut out)
    }
}

impl Scrape {
    fn intents(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let summary = &self.snapshot.summary;
        out.family(&catalogue::INTENTS, |family| {
            by_state(summary.intents)
                .into_iter()
                .try_for_each(|(state, count)| family.gauge(&[("state", state)], count))
        })?;
        out.family(&catalogue::HELD_INTENTS, |family| {
            HoldReason::ALL.into_iter().try_for_each(|reason| {
                let count = summary.held.get(&reason).copied().unwrap_or(0);
                family.gauge(&[("reason", reason.to_string())], count)
            })
        })?;
        out.family(&catalogue::FAILED_INTENTS, |family| {
            FailReason::ALL.into_iter().try_for_each(|reason| {
                let count = summary.failed.get(&reason).copied().unwrap_or(0);
                family.gauge(&[("reason", reason.to_string())], count)
            })
        })?;
        out.family(&catalogue::HOLDS, |family| {
            HoldReason::ALL.into_iter().try_for_each(|reason| {
                let count = summary.holds_begun.get(&reason).copied().unwrap_or(0);
                family.counter(&[("reason", reason.to_string())], count)
            })
        })
    }

    fn policies(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let policies = &self.snapshot.policies;
        out.family(&catalogue::POLICY_INTENTS, |family| {
            for policy in policies {
                for (state, count) in by_state(policy.intents) {
                    family.gauge(&policy_labels(policy, "state", state), count)?;
                }
            }
            Ok(())
        })?;
        out.family(&catalogue::POLICY_GENERATION, |family| {
            for policy in policies {
                for (stage, generation) in [
                    ("seen", policy.generation),
                    ("applied", policy.applied),
                    ("proven", policy.proven),
                ] {
                    family.gauge(&policy_labels(policy, "stage", stage), generation)?;
                }
            }
            Ok(())
        })?;
        self.policy_stamps(out, &catalogue::POLICY_HOLD_START, |policy| policy.held_since)?;
        self.policy_stamps(out, &catalogue::POLICY_BEHIND_SINCE, |policy| policy.behind_since)
    }

    fn policy_stamps(
        &self,
        out: &mut Out<'_, '_>,
        family: &Family,
        stamp: impl Fn(&PolicyView) -> Option<Now>,
    ) -> fmt::Result {
        out.family(family, |family| {
            for policy in &self.snapshot.policies {
                if let Some(at) = stamp(policy) {
                    family.gauge(&owner(policy), self.stamp(at))?;
                }
            }
            Ok(())
        })
    }

    fn engine(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let snapshot = &self.snapshot;
        let never = Histogram::default();
        out.family(&catalogue::PROGRAMMING_DURATION, |family| {
            for (leg, label) in catalogue::LEGS {
                let histogram = snapshot.durations.get(&leg).unwrap_or(&never);
                family.histogram(&[("leg", label)], histogram)?;
            }
            family.histogram(&[("leg", catalogue::ORIGIN_TO_SEEN)], &snapshot.origin_to_seen)
        })?;
        out.family(&catalogue::QUEUE_DEPTH, |family| {
            family.plain_gauge(snapshot.queue_depth)
        })?;
        out.family(&catalogue::QUEUE_WAIT, |family| {
            family.plain_histogram(&snapshot.queue_wait)
        })?;
        out.family(&catalogue::PASS_DURATION, |family| {
            family.plain_histogram(&snapshot.pass_duration)
        })?;
        out.family(&catalogue::LOOP_RUNS, |family| {
            loops::NAMES
                .into_iter()
                .try_for_each(|name| family.counter(&[("loop", name)], self.loop_count(name).runs))
        })?;
        out.family(&catalogue::LOOP_ERRORS, |family| {
            loops::NAMES
                .into_iter()
                .try_for_each(|name| family.counter(&[("loop", name)], self.loop_count(name).errors))
        })?;
        out.family(&catalogue::REPORT_WRITES, |family| {
            for result in catalogue::WRITE_RESULTS {
                let count = snapshot.report_writes.get(result).copied().unwrap_or(0);
                family.counter(&[("result", result)], count)?;
            }
            Ok(())
        })?;
        out.family(&catalogue::NETLINK_OVERRUNS, |family| {
            family.plain_counter(snapshot.netlink_overruns)
        })?;
        out.family(&catalogue::NETLINK_RESYNCS, |family| {
            family.plain_counter(snapshot.netlink_resyncs)
        })?;
        out.family(&catalogue::DRIFT_REPAIRS, |family| {
            Drift::ALL.into_iter().try_for_each(|kind| {
                let count = snapshot.summary.drift.get(&kind).copied().unwrap_or(0);
                family.counter(&[("kind", kind.label())], count)
            })
        })?;
        out.family(&catalogue::FOREIGN_BEFORE, |family| {
            for (label, allowed) in [("false", false), ("true", true)] {
                let applies = allowed == self.foreign_allowed;
                let count = if applies { snapshot.foreign_before } else { 0 };
                family.gauge(&[("allowed", label)], count)?;
            }
            Ok(())
        })
    }

    fn loop_count(&self, name: &str) -> loops::Count {
        self.snapshot.loops.get(name).copied().unwrap_or_default()
    }

    fn kernel(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let maps = &self.stats.maps;
        out.family(&catalogue::MAP_ENTRIES, |family| {
            // Not every map can be counted for nothing.
            for (map, stats) in maps {
                if let Some(entries) = stats.entries {
                    family.gauge(&[("map", *map)], entries)?;
                }
            }
            Ok(())
        })?;
        out.family(&catalogue::MAP_CAPACITY, |family| {
            maps.iter()
                .try_for_each(|(map, stats)| family.gauge(&[("map", *map)], stats.capacity))
        })?;
        out.family(&catalogue::MAP_WRITES, |family| {
            for (map, stats) in maps {
                family.counter(&[("map", *map), ("op", "update")], stats.updates)?;
                family.counter(&[("map", *map), ("op", "delete")], stats.deletes)?;
            }
            Ok(())
        })?;
        out.family(&catalogue::PACKETS, |family| {
            for verdict in Verdict::ALL {
                let count = self.stats.packets.get(verdict as usize).copied().unwrap_or(0);
                let labels = [
                    ("verdict", verdict.verdict_label()),
                    ("reason", verdict.reason_label()),
                ];
                family.counter(&labels, count)?;
            }
            Ok(())
        })?;
        out.family(&catalogue::PROOFS, |family| {
            let [ok, failed] = catalogue::PROOF_RESULTS;
            family.counter(&[("result", ok)], self.stats.proofs_ok)?;
            family.counter(&[("result", failed)], self.stats.proofs_failed)
        })
    }

    fn source(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let snapshot = &self.snapshot;
        out.family(&catalogue::SOURCE_LAST_ACTIVITY, |family| {
            match snapshot.source_last_activity {
                Some(at) => family.gauge(&[("source", self.source)], self.stamp(at)),
                None => Ok(()),
            }
        })?;
        out.family(&catalogue::SAVED_SET, |family| match snapshot.saved {
            Some(saved) => {
                let until = self.stamps.wall_ms(saved.seen).saturating_sub(saved.age_ms);
                family.plain_gauge(seconds(until))
            }
            None => Ok(()),
        })?;
        out.family(&catalogue::SOURCE_OBJECTS, |family| {
            for kind in Kind::ALL {
                let count = snapshot.source.objects.get(kind.as_str()).copied().unwrap_or(0);
                family.gauge(&[("kind", kind.as_str())], count)?;
            }
            Ok(())
        })?;
        out.family(&catalogue::SOURCE_PROBLEMS, |family| {
            family.plain_gauge(snapshot.source.problems.len() as u64)
        })
    }

    fn agent(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        out.family(&catalogue::TIME, |family| {
            family.plain_gauge(self.stamp(self.snapshot.now()))
        })?;
        out.family(&catalogue::AGENT_START, |family| {
            family.plain_gauge(self.stamp(self.started))
        })?;
        out.family(&catalogue::BUILD_INFO, |family| {
            family.gauge(&[("version", VERSION)], 1_u64)
        })
    }

    /// Seconds since the Unix epoch. All stamps of a scrape, and its own time, are the boot clock's at one distance: their
    /// differences are right however wrong the wall clock is.
    fn stamp(&self, at: Now) -> f64 {
        seconds(self.stamps.wall_ms(at))
    }
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

fn owner(policy: &PolicyView) -> [(&'static str, &str); 2] {
    [
        ("namespace", &policy.name.namespace),
        ("policy", &policy.name.name),
    ]
}

fn policy_labels<'a>(
    policy: &'a PolicyView,
    key: &'static str,
    value: &'a str,
) -> [(&'static str, &'a str); 3] {
    let [namespace, name] = owner(policy);
    [namespace, name, (key, value)]
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

/// Writes families.
struct Out<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Out<'_, '_> {
    fn family(
        &mut self,
        family: &Family,
        samples: impl FnOnce(&mut Samples<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let kind = match family.kind {
            Type::Gauge => MetricType::Gauge,
            Type::Counter => MetricType::Counter,
            Type::Histogram => MetricType::Histogram,
        };
        // The encoder adds it again.
        let name = family.name.strip_suffix("_total").unwrap_or(family.name);
        let encoder = self.0.encode_descriptor(name, family.help, None, kind)?;
        samples(&mut Samples(encoder))
    }
}

/// Writes samples of one family.
struct Samples<'a>(MetricEncoder<'a>);

impl Samples<'_> {
    fn gauge(&mut self, labels: &impl EncodeLabelSet, value: impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_family(labels)?.encode_gauge(&value)
    }

    fn plain_gauge(&mut self, value: impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_gauge(&value)
    }

    fn counter(&mut self, labels: &impl EncodeLabelSet, value: u64) -> fmt::Result {
        Self::encode_counter(&mut self.0.encode_family(labels)?, value)
    }

    fn plain_counter(&mut self, value: u64) -> fmt::Result {
        Self::encode_counter(&mut self.0, value)
    }

    fn encode_counter(encoder: &mut MetricEncoder<'_>, value: impl EncodeCounterValue) -> fmt::Result {
        encoder.encode_counter::<[(&str, &str); 0], _, u64>(&value, None)
    }

    fn histogram(&mut self, labels: &impl EncodeLabelSet, value: &Histogram) -> fmt::Result {
        Self::encode_histogram(&mut self.0.encode_family(labels)?, value)
    }

    fn plain_histogram(&mut self, value: &Histogram) -> fmt::Result {
        Self::encode_histogram(&mut self.0, value)
    }

    fn encode_histogram(encoder: &mut MetricEncoder<'_>, value: &Histogram) -> fmt::Result {
        // Ours are cumulative, the encoder wants single buckets.
        let mut below = 0;
        let buckets: Vec<(f64, u64)> = Histogram::BOUNDS_NS
            .into_iter()
            .zip(value.buckets)
            .map(|(bound, upto)| {
                let single = upto.saturating_sub(below);
                below = upto;
                (nanos_to_seconds(bound), single)
            })
            .collect();
        encoder.encode_histogram::<[(&str, &str); 0]>(
            nanos_to_seconds(value.sum_ns),
            value.count,
            &buckets,
            None,
        )
    }
}
