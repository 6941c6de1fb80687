//! The one way to wait.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::bail;

/// Between two looks. Short beside every budget that is tested, long beside what a look costs.
const BETWEEN: Duration = Duration::from_millis(2);

/// Looks until there is something, and fails with `what` when the deadline has passed.
///
/// # Errors
/// When the deadline has passed, or what `probe` says.
pub fn until<T>(
    deadline: Duration,
    what: impl Display,
    mut probe: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = probe()? {
            return Ok(found);
        }
        if start.elapsed() >= deadline {
            bail!("not within {deadline:?}: {what}");
        }
        std::thread::sleep(BETWEEN);
    }
}

/// Lets time pass while `probe` must stay true all along: the way to say that something does *not* happen.
///
/// # Errors
/// As soon as it is not, or what `probe` says.
pub fn throughout(
    time: Duration,
    what: impl Display,
    mut probe: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        if !probe()? {
            bail!("no longer after {:?}: {what}", start.elapsed());
        }
        std::thread::sleep(BETWEEN);
    }
    Ok(())
}
