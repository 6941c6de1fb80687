//! Suite `scrape`: what a scrape of a large node costs. The engine's task copies the figures of the policies in trouble
//! (everything else waits meanwhile), and another thread makes a page of them. The floor is a copy of the finished page.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use holdfast::api::hash;
use holdfast::datapath::{Kernel, Stats};
use holdfast::driver::{MetricsSnapshot, PolicyFigures};
use holdfast::report::Stamps;
use holdfast::serve::metrics::{Scrape, render};
use holdfast_engine::Engine;
use holdfast_engine::model::{
    Boot, Capacity, Config, Event, FailReason, Now, ObjectChange, ObjectName, Policy, Refusal, Uid,
};

use crate::report::{AA, Beside, Figure, Floor, Machine, Report, Samples, load};

/// Policies of a large node.
const POLICIES: usize = 10_000;
/// Those of them in trouble: on a bad day, and when all of them are.
const TROUBLED: [usize; 2] = [100, POLICIES];
/// What a scrape should take at most, microseconds.
const GOAL: f64 = 10_000.0;
/// Series of a policy that is in trouble in every way.
const SERIES: usize = 10;

const NOW: Now = Now {
    boot: Boot(1_000 * Boot::SECOND),
    wall_ms: 1_767_225_600_123,
};

/// Policies in trouble, and what is measured of them.
struct Scene {
    troubled: usize,
    engine: Engine,
    copied: Samples,
    made: Samples,
    both: Samples,
    again: Samples,
}

/// Measures.
pub(crate) fn measure(rounds: usize, revision: String) -> anyhow::Result<Report> {
    let mut machine = Machine::here();
    let mut scenes = TROUBLED.map(Scene::new);
    let mut floor = Samples::default();
    for round in 0..=rounds {
        let copy = one_round(&mut scenes, round > 0)?;
        if round > 0 {
            floor.0.push(copy);
        }
    }
    machine.load[1] = load();
    Ok(Report {
        suite: "scrape",
        revision,
        machine,
        profile: if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
        rounds,
        unit: "microseconds a scrape",
        floor: Floor {
            what: format!("a copy of the page of {POLICIES} policies"),
            median: floor.median(),
            min: floor.min(),
        },
        a_a: scenes
            .iter()
            .map(|scene| AA {
                what: format!("page of {} policies, made twice", scene.troubled),
                ratio: scene.again.with(&scene.made, |a, b| a / b).median(),
            })
            .collect(),
        figures: scenes.iter().flat_map(Scene::figures).collect(),
    })
}

/// Measures each scene once; gives what a copy of the largest page takes. The first round is not counted: it takes memory
/// from the kernel.
fn one_round(scenes: &mut [Scene], counted: bool) -> anyhow::Result<f64> {
    let mut copy = 0.0;
    for scene in scenes {
        let (copied, figures) = timed(|| scene.figures_of_policies());
        let again = figures.clone();
        let (made, page) = timed(|| page(figures));
        let (made_again, _) = timed(|| self::page(again));
        let series = page.lines().filter(|line| line.contains("policy=")).count();
        ensure!(series == scene.troubled * SERIES, "{series} series");
        copy = timed(|| page.clone()).0;
        if counted {
            scene.copied.0.push(copied);
            scene.made.0.push(made);
            scene.again.0.push(made_again);
            scene.both.0.push(copied + made);
        }
    }
    Ok(copy)
}

/// Microseconds that it takes.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let begun = Instant::now();
    let done = black_box(work());
    (begun.elapsed().as_secs_f64() * 1e6, done)
}

fn page(policies: Vec<PolicyFigures>) -> String {
    render(&Scrape {
        snapshot: MetricsSnapshot {
            now_wall_ms: NOW.wall_ms,
            now_boot_ns: NOW.boot.0,
            policies,
            ..MetricsSnapshot::default()
        },
        stats: Stats::default(),
        stamps: Stamps::default(),
        started: NOW,
        source: "dir",
        foreign_allowed: false,
    })
}

impl Scene {
    /// So many policies that cannot be read, whoever they are about.
    fn new(troubled: usize) -> Self {
        let policies = (0..troubled).map(|number| {
            ObjectChange::Policy(Policy {
                name: ObjectName {
                    namespace: "shop".to_owned(),
                    name: format!("policy-{number:05}"),
                },
                uid: Uid(format!("3f0c6a1e-9d4f-4c8b-8a53-{number:012}")),
                generation: 3,
                created_ms: 1,
                origin: None,
                content: Err(Refusal {
                    reason: FailReason::Invalid,
                    message: "spec.destinations[0].port: 0 is not a port".to_owned(),
                    consumers: None,
                }),
            })
        });
        let mut engine = Engine::new(Config {
            capacity: Capacity {
                policies: 16_384,
                slots: 65_536,
                backends: 4_096,
            },
            features: Kernel::FEATURES,
            neighbour_only: false,
            hashes: hash::hashes(),
            audit_every: 0,
        });
        for event in [
            Event::Adopted(Box::default()),
            Event::LinkDump(Vec::new()),
            Event::Objects(policies.collect()),
            Event::SourceComplete,
        ] {
            engine.handle(event, NOW);
        }
        engine.poll(NOW);
        Self {
            troubled,
            engine,
            copied: Samples::default(),
            made: Samples::default(),
            both: Samples::default(),
            again: Samples::default(),
        }
    }

    /// As the driver copies them; held and behind besides.
    fn figures_of_policies(&self) -> Vec<PolicyFigures> {
        let troubled = self.engine.view().troubled();
        troubled
            .map(|policy| PolicyFigures {
                held_since: Some(NOW),
                behind_since: Some(NOW),
                ..PolicyFigures::new(policy)
            })
            .collect()
    }

    fn figures(&self) -> Vec<Figure> {
        let line = |what: &str, samples: &Samples, goal| Figure {
            what: format!("{what}, {} of {POLICIES} policies in trouble", self.troubled),
            family: None,
            routes: None,
            keys: None,
            min: samples.min(),
            median: samples.median(),
            beside: vec![Beside {
                what: "in all",
                value: samples.median(),
                best: samples.min(),
                within_noise: false,
                goal,
            }],
        };
        vec![
            line("copied by the engine's task", &self.copied, None),
            line("made into a page", &self.made, None),
            line("both", &self.both, Some(GOAL)),
        ]
    }
}
