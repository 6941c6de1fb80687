//! Waiting, with a deadline.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::bail;

/// Between two looks. Most looks start a process.
const BETWEEN: Duration = Duration::from_millis(50);

/// Looks until there is something. What the last look said is part of the error.
pub(crate) fn until<T>(
    deadline: Duration,
    what: impl Display,
    mut probe: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        let said = match probe() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => String::new(),
            Err(error) => format!(": {error:#}"),
        };
        if start.elapsed() >= deadline {
            bail!("not within {deadline:?}: {what}{said}");
        }
        std::thread::sleep(BETWEEN);
    }
}
