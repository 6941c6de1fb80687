//! What a panic means: this life is over. Whatever serves is pinned and goes on; the next life adopts it.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::process;

/// Exit code of a life that a panic ended, as Rust's own.
const EXIT_CODE: i32 = 101;

thread_local! {
    static TOLERATED: Cell<bool> = const { Cell::new(false) };
}

/// Makes a panic in any thread or task end the process: a task that is silently gone would be a hold that nobody
/// sees. The panic is logged first.
pub fn end_process_on_panic() {
    panic::set_hook(Box::new(|panic| {
        if TOLERATED.get() {
            return;
        }
        tracing::error!(%panic, "a bug ended this life of the agent; what is programmed stays in force");
        process::exit(EXIT_CODE);
    }));
}

/// Calls what may panic for reasons that are not ours.
///
/// # Errors
/// What it panicked with.
pub fn tolerate<T>(call: impl FnOnce() -> T) -> Result<T, Box<dyn Any + Send>> {
    let before = TOLERATED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    TOLERATED.set(before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tolerated_panic_comes_back_as_an_error() {
        assert!(tolerate(|| panic!("somebody else's")).is_err());
        assert_eq!(tolerate(|| 7).unwrap(), 7);
        assert!(!TOLERATED.get());
    }
}
