//! `/livez` and `/readyz`.

use holdfast_engine::model::Lane;
use holdfast_engine::view::{Barrier, Summary};

use super::{PATIENCE, Sources};

/// What keeps the process from being alive; empty = alive. Depends on nothing outside of the process and its kernel:
/// a restart must be able to mend what this says.
pub async fn failing(sources: &Sources) -> Vec<String> {
    let mut failing: Vec<String> = sources
        .lanes
        .stuck(sources.clock.now().boot)
        .into_iter()
        .map(|lane| {
            format!(
                "{}: one call to the kernel takes longer than 10 s",
                lane_name(lane)
            )
        })
        .collect();
    match tokio::time::timeout(PATIENCE, sources.driver.ping()).await {
        Ok(Ok(())) => {}
        Ok(Err(gone)) => failing.push(gone.to_string()),
        Err(_) => failing.push(format!("the engine's loop has not come round for {PATIENCE:?}")),
    }
    failing
}

const fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Write => "map writes",
        Lane::Attach => "attaches",
        Lane::Prove => "proofs",
        Lane::Audit => "audits",
    }
}

/// What is missing for readiness; empty = ready. A held intent does not make the agent unready.
#[must_use]
pub fn missing(summary: &Summary) -> Vec<String> {
    let mut missing = waiting(&summary.waiting_for);
    if !summary.first_pass_done {
        missing.push("the first pass over all intents".to_owned());
    }
    missing
}

/// As [`missing`], asked of the driver.
pub async fn not_ready(sources: &Sources) -> Vec<String> {
    match tokio::time::timeout(PATIENCE, sources.driver.metrics(false)).await {
        Ok(Ok(metrics)) => missing(&metrics.summary),
        Ok(Err(gone)) => vec![gone.to_string()],
        Err(_) => vec![format!("an answer of the engine's loop within {PATIENCE:?}")],
    }
}

/// What a start still waits for, in words.
#[must_use]
pub fn waiting(barriers: &[Barrier]) -> Vec<String> {
    let word = |barrier: &Barrier| {
        match barrier {
            Barrier::Adoption => "the read-back of the pins",
            Barrier::Objects => "a complete set of objects from the source",
            Barrier::Links => "a complete list of the network devices",
            Barrier::Registry => "the identity of every interface in use",
        }
        .to_owned()
    };
    barriers.iter().map(word).collect()
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
