//! `/livez` and `/readyz`.

use std::fmt;
use std::time::Duration;

use holdfast_engine::model::Lane;
use holdfast_engine::view::{Barrier, Summary};
use tokio::sync::oneshot;

use super::{PATIENCE, Sources};

/// One thing that must be so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What it is called, in one word.
    pub name: &'static str,
    /// Why it is not so; none = it is.
    pub wrong: Option<String>,
}

impl fmt::Display for Check {
    /// As in the answers to `?verbose`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.wrong {
            None => write!(f, "[+]{} ok", self.name),
            Some(wrong) => write!(f, "[-]{} failed: {wrong}", self.name),
        }
    }
}

/// Whether each loop comes round that a new life would bring back: the driver's, those of the kernel's lanes, and the one
/// that hears of devices. Depends on nothing outside of the process and its kernel, least of all on a source, a report or a
/// directory: what hangs there would hang in the next life too.
pub async fn alive(sources: &Sources) -> Vec<Check> {
    let (engine, links) = tokio::join!(engine(sources), links(sources));
    let now = sources.clock.now().boot;
    let stuck = sources.lanes.stuck(now);
    let mut checks = vec![
        Check {
            name: "engine",
            wrong: engine,
        },
        Check {
            name: "links",
            wrong: links,
        },
    ];
    checks.extend(LANES.map(|lane| Check {
        name: lane_name(lane),
        wrong: stuck.contains(&lane).then(|| {
            let age = sources.lanes.busy_for(lane, now).unwrap_or_default();
            format!("one call to the kernel has lasted for {}", seconds(age))
        }),
    }));
    checks
}

async fn engine(sources: &Sources) -> Option<String> {
    match tokio::time::timeout(PATIENCE, sources.driver.ping()).await {
        Ok(Ok(())) => None,
        Ok(Err(gone)) => Some(gone.to_string()),
        Err(_) => Some(match sources.lanes.round_for(sources.clock.now().boot) {
            Some(age) => format!("one round has lasted for {}", seconds(age)),
            None => format!("it has not come round for {PATIENCE:?}"),
        }),
    }
}

async fn links(sources: &Sources) -> Option<String> {
    let answer: oneshot::Receiver<()> = (sources.links)();
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(Ok(())) => None,
        Ok(Err(_)) => Some("it has ended".to_owned()),
        Err(_) => Some(format!("it has not come round for {PATIENCE:?}")),
    }
}

const LANES: [Lane; 4] = [Lane::Write, Lane::Attach, Lane::Prove, Lane::Audit];

fn seconds(nanos: u64) -> String {
    format!("{:.1}s", Duration::from_nanos(nanos).as_secs_f64())
}

const fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Write => "writes",
        Lane::Attach => "attaches",
        Lane::Prove => "proofs",
        Lane::Audit => "audits",
    }
}

/// Whether each thing is there that readiness needs. A held intent does not make the agent unready, nor does a source that
/// is away while its saved set is in force.
fn readiness(summary: &Summary) -> [Check; 5] {
    let check = |name, barrier| Check {
        name,
        wrong: (summary.waiting_for.contains(&barrier)
            // The first pass is done: over a saved set, if the live one is still waited for.
            && !(barrier == Barrier::Objects && summary.first_pass_done))
            .then(|| word(&barrier).to_owned()),
    };
    [
        check("pins", Barrier::Adoption),
        check("objects", Barrier::Objects),
        check("links", Barrier::Links),
        check("registry", Barrier::Registry),
        Check {
            name: "first-pass",
            wrong: (!summary.first_pass_done).then(|| "the first pass over all intents".to_owned()),
        },
    ]
}

/// What is missing for readiness; empty = ready.
#[must_use]
pub fn missing(summary: &Summary) -> Vec<String> {
    readiness(summary)
        .into_iter()
        .filter_map(|check| check.wrong)
        .collect()
}

/// As [`missing`], asked of the driver, with what is there.
pub async fn ready(sources: &Sources) -> Vec<Check> {
    let answer = tokio::time::timeout(PATIENCE, sources.driver.metrics(false)).await;
    let (wrong, summary) = match answer {
        Ok(Ok(metrics)) => (None, Some(metrics.summary)),
        Ok(Err(gone)) => (Some(gone.to_string()), None),
        Err(_) => (
            Some(format!("an answer of the engine's loop within {PATIENCE:?}")),
            None,
        ),
    };
    let mut checks = vec![Check {
        name: "engine",
        wrong,
    }];
    checks.extend(summary.iter().flat_map(readiness));
    checks
}

/// What a start still waits for, in words.
#[must_use]
pub fn waiting(barriers: &[Barrier]) -> Vec<String> {
    barriers.iter().map(|barrier| word(barrier).to_owned()).collect()
}

const fn word(barrier: &Barrier) -> &'static str {
    match barrier {
        Barrier::Adoption => "the read-back of the pins",
        Barrier::Objects => "a complete set of objects from the source",
        Barrier::Links => "a complete list of the network devices",
        Barrier::Registry => "the identity of every interface in use",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let summary = Summary {
            waiting_for: vec![Barrier::Objects, Barrier::Registry],
            ..Summary::default()
        };
        assert_eq!(
            missing(&summary),
            [
                "a complete set of objects from the source",
                "the identity of every interface in use",
                "the first pass over all intents"
            ]
        );
        let ready = Summary {
            first_pass_done: true,
            ..Summary::default()
        };
        assert!(missing(&ready).is_empty());
    }
}
