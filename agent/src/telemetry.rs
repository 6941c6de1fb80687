//! Lines for people.

use holdfast_engine::model::LogLine;

/// Writes one line of the engine.
pub fn log(line: &LogLine) {
    tracing::info!(?line);
}
