//! The metrics, made from the current state at each scrape: a series goes with its object by construction.
//!
//! Families with closed label sets are always there, also at 0. No label ever carries an interface name, a token,
//! an address or an error text.

use std::fmt;

use holdfast_ebpf::abi::Verdict;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{Boot, FailReason, HoldReason, Leg, Now};
use holdfast_engine::view::PolicyView;
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
use crate::report::Stamps;

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
}

/// As text, in the format that Prometheus (and promtool) reads.
///
/// # Errors
/// Never in practice: writing to a string does not fail.
pub fn render(scrape: Scrape) -> Result<String, fmt::Error> {
    scrape.stamps.observe(Now {
        boot: Boot(scrape.snapshot.now_boot_ns),
        wall_ms: scrape.snapshot.now_wall_ms,
    });
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
        let counts = summary.intents;
        out.gauge("holdfast_intents", "Intents on this node by state.", |family| {
            for (state, count) in [
                ("pending", counts.pending),
                ("programmed", counts.programmed),
                ("held", counts.held),
                ("failed", counts.failed),
                ("removing", counts.removing),
            ] {
                family.gauge(&[("state", state)], count)?;
            }
            Ok(())
        })?;
        out.gauge(
            "holdfast_held_intents",
            "Intents held on this node by reason.",
            |family| {
                for reason in HoldReason::ALL {
                    let count = summary.held.get(&reason).copied().unwrap_or(0);
                    family.gauge(&[("reason", reason.to_string())], count)?;
                }
                Ok(())
            },
        )?;
        out.gauge(
            "holdfast_failed_intents",
            "Intents failed on this node by reason.",
            |family| {
                for reason in FailReason::ALL {
                    let count = summary.failed.get(&reason).copied().unwrap_or(0);
                    family.gauge(&[("reason", reason.to_string())], count)?;
                }
                Ok(())
            },
        )?;
        out.counter(
            "holdfast_holds",
            "Holds begun since the agent started, by their first reason.",
            |family| {
                for reason in HoldReason::ALL {
                    let count = summary.holds_begun.get(&reason).copied().unwrap_or(0);
                    family.counter(&[("reason", reason.to_string())], count)?;
                }
                Ok(())
            },
        )
    }

    fn policies(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let policies = &self.snapshot.policies;
        out.gauge(
            "holdfast_policy_intents",
            "Intents of a policy on this node by state.",
            |family| {
                for policy in policies {
                    for (state, count) in [
                        ("pending", policy.intents.pending),
                        ("programmed", policy.intents.programmed),
                        ("held", policy.intents.held),
                        ("failed", policy.intents.failed),
                        ("removing", policy.intents.removing),
                    ] {
                        family.gauge(&policy_labels(policy, "state", state), count)?;
                    }
                }
                Ok(())
            },
        )?;
        out.gauge(
            "holdfast_policy_generation",
            "Highest generation of a policy that was seen, tried on every intent, proven.",
            |family| {
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
            },
        )?;
        self.policy_stamps(
            out,
            "holdfast_policy_hold_start_timestamp_seconds",
            "Start of the oldest hold of a policy; absent when nothing is held.",
            |policy| policy.held_since,
        )?;
        self.policy_stamps(
            out,
            "holdfast_policy_behind_since_timestamp_seconds",
            "The oldest moment of a policy that is not served yet; absent when it is current.",
            |policy| policy.behind_since,
        )
    }

    fn policy_stamps(
        &self,
        out: &mut Out<'_, '_>,
        name: &str,
        help: &str,
        stamp: impl Fn(&PolicyView) -> Option<Now>,
    ) -> fmt::Result {
        out.gauge(name, help, |family| {
            for policy in &self.snapshot.policies {
                if let Some(at) = stamp(policy) {
                    let [namespace, name] = owner(policy);
                    family.gauge(&[namespace, name], seconds(self.stamps.wall_ms(at)))?;
                }
            }
            Ok(())
        })
    }

    fn engine(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let snapshot = &self.snapshot;
        let never = Histogram::default();
        out.histograms(
            "holdfast_programming_duration_seconds",
            "Time of each leg of the way into the kernel.",
            |family| {
                for (leg, label) in [
                    (Leg::SeenToProgrammed, "seen_to_programmed"),
                    (Leg::ReadyToProgrammed, "ready_to_programmed"),
                    (Leg::WrittenToProven, "written_to_proven"),
                ] {
                    let histogram = snapshot.durations.get(&leg).unwrap_or(&never);
                    family.histogram(&[("leg", label)], histogram)?;
                }
                Ok(())
            },
        )?;
        out.gauge(
            "holdfast_engine_queue_depth",
            "Events that wait for the engine.",
            |family| family.plain_gauge(snapshot.queue_depth),
        )?;
        out.histograms(
            "holdfast_engine_queue_wait_seconds",
            "How long answers waited for the engine.",
            |family| family.plain_histogram(&snapshot.queue_wait),
        )?;
        out.histograms(
            "holdfast_engine_pass_duration_seconds",
            "How long the engine took for a batch of events.",
            |family| family.plain_histogram(&snapshot.pass_duration),
        )?;
        out.counter(
            "holdfast_loop_errors",
            "Errors of each loop of the agent.",
            |family| {
                for (name, count) in &snapshot.loop_errors {
                    family.counter(&[("loop", *name)], *count)?;
                }
                Ok(())
            },
        )?;
        out.counter(
            "holdfast_report_writes",
            "Reports written, by result.",
            |family| {
                for result in ["ok", "error"] {
                    let count = snapshot.report_writes.get(result).copied().unwrap_or(0);
                    family.counter(&[("result", result)], count)?;
                }
                Ok(())
            },
        )?;
        out.counter(
            "holdfast_netlink_overruns",
            "Times that the kernel dropped notifications of network devices.",
            |family| family.plain_counter(snapshot.netlink_overruns),
        )?;
        out.counter(
            "holdfast_netlink_resyncs",
            "Complete lists of the network devices beyond the first.",
            |family| family.plain_counter(snapshot.netlink_resyncs),
        )?;
        out.counter(
            "holdfast_drift_repairs",
            "What an audit found otherwise than it was left, by kind. All of it is put right but foreign: somebody \
             else's program before ours is named and left alone.",
            |family| {
                for kind in Drift::ALL {
                    let count = snapshot.summary.drift.get(&kind).copied().unwrap_or(0);
                    family.counter(&[("kind", kind.label())], count)?;
                }
                Ok(())
            },
        )
    }

    fn kernel(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let maps = &self.stats.maps;
        out.gauge("holdfast_map_entries", "Entries in use of each map.", |family| {
            // Not every map can be counted for nothing.
            for (map, stats) in maps {
                if let Some(entries) = stats.entries {
                    family.gauge(&[("map", *map)], entries)?;
                }
            }
            Ok(())
        })?;
        out.gauge("holdfast_map_capacity", "Capacity of each map.", |family| {
            maps.iter()
                .try_for_each(|(map, stats)| family.gauge(&[("map", *map)], stats.capacity))
        })?;
        out.counter(
            "holdfast_map_writes",
            "Map elements written and deleted by this agent.",
            |family| {
                for (map, stats) in maps {
                    family.counter(&[("map", *map), ("op", "update")], stats.updates)?;
                    family.counter(&[("map", *map), ("op", "delete")], stats.deletes)?;
                }
                Ok(())
            },
        )?;
        out.counter(
            "holdfast_packets",
            "Packets seen at the interfaces of attachments, by what was done with them and why.",
            |family| {
                for verdict in Verdict::ALL {
                    let count = self.stats.packets.get(verdict as usize).copied().unwrap_or(0);
                    let labels = [
                        ("verdict", verdict.verdict_label()),
                        ("reason", verdict.reason_label()),
                    ];
                    family.counter(&labels, count)?;
                }
                Ok(())
            },
        )?;
        out.counter(
            "holdfast_proofs",
            "Proofs by test run of the attached program, by result.",
            |family| {
                family.counter(&[("result", "ok")], self.stats.proofs_ok)?;
                family.counter(&[("result", "failed")], self.stats.proofs_failed)
            },
        )
    }

    fn source(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let snapshot = &self.snapshot;
        out.gauge(
            "holdfast_source_last_activity_timestamp_seconds",
            "Last proof of life of the source of objects.",
            |family| match snapshot.source_last_activity_ms {
                Some(at) => family.gauge(&[("source", self.source)], seconds(at)),
                None => Ok(()),
            },
        )?;
        out.gauge(
            "holdfast_source_objects",
            "Objects in force on this node by kind.",
            |family| {
                for kind in Kind::ALL {
                    let count = snapshot.source.objects.get(kind.as_str()).copied().unwrap_or(0);
                    family.gauge(&[("kind", kind.as_str())], count)?;
                }
                Ok(())
            },
        )?;
        out.gauge(
            "holdfast_source_problems",
            "Pieces of input that could not be used; what they said last stays in force.",
            |family| family.plain_gauge(snapshot.source.problems.len() as u64),
        )
    }

    fn agent(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        out.gauge(
            "holdfast_time_seconds",
            "The node's clock: what ages are computed against.",
            |family| family.plain_gauge(seconds(self.snapshot.now_wall_ms)),
        )?;
        out.gauge(
            "holdfast_agent_start_timestamp_seconds",
            "When this life of the agent began.",
            |family| family.plain_gauge(seconds(self.stamps.wall_ms(self.started))),
        )?;
        out.gauge(
            "holdfast_build_info",
            "Version of the agent; always 1.",
            |family| family.gauge(&[("version", VERSION)], 1_u64),
        )
    }
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
        name: &str,
        help: &str,
        kind: MetricType,
        samples: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let encoder = self.0.encode_descriptor(name, help, None, kind)?;
        samples(&mut Family(encoder))
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        samples: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, samples)
    }

    /// `_total` is added to the name.
    fn counter(
        &mut self,
        name: &str,
        help: &str,
        samples: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Counter, samples)
    }

    fn histograms(
        &mut self,
        name: &str,
        help: &str,
        samples: impl FnOnce(&mut Family<'_>) -> fmt::Result,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Histogram, samples)
    }
}

/// Writes samples of one family.
struct Family<'a>(MetricEncoder<'a>);

impl Family<'_> {
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
