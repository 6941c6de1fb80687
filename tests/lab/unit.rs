//! The unit by which systemd runs the agent, as a test reads it.

use anyhow::{Context, ensure};

/// The whole file.
pub const TEXT: &str = include_str!("../../deploy/systemd/holdfast.service");

/// What a key says, line by line, in its order.
#[must_use]
pub fn values(key: &str) -> Vec<&'static str> {
    TEXT.lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(found, _)| *found == key)
        .map(|(_, value)| value)
        .collect()
}

/// What a key says that stands there once.
///
/// # Errors
/// When it does not.
pub fn value(key: &str) -> anyhow::Result<&'static str> {
    let values = values(key);
    ensure!(values.len() == 1, "{key} stands there {} times", values.len());
    values.into_iter().next().context("one")
}

/// The words of the command that it starts, the program first.
///
/// # Errors
/// When there is not one command.
pub fn command() -> anyhow::Result<Vec<&'static str>> {
    Ok(value("ExecStart")?.split_whitespace().collect())
}
