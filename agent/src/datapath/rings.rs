//! What the program sends by itself: identities that changed, and debug lines. Each is a task that sleeps until the
//! kernel has something.

use std::io;
use std::os::fd::AsFd;

use holdfast_engine::model::Ifindex;
use tokio::sync::mpsc;

pub use super::maps::{Logs, Wakes};
use super::raw;
use crate::fault;

impl Wakes {
    /// Sends every ifindex on; ends when nobody listens any more. Safe to cancel, at the cost of one ifindex.
    ///
    /// # Errors
    /// When the ring cannot be waited for.
    pub async fn run(mut self, to: mpsc::Sender<Ifindex>) -> io::Result<()> {
        let ring = raw::readable(self.as_fd().try_clone_to_owned()?)?;
        loop {
            let mut ready = ring.readable().await?;
            while let Some(ifindex) = self.next() {
                if to.send(ifindex).await.is_err() {
                    return Ok(());
                }
            }
            ready.clear_ready();
        }
    }
}

impl Logs {
    /// Writes every line as a tracing event, for ever. Safe to cancel.
    ///
    /// # Errors
    /// When the ring cannot be waited for.
    pub async fn run(mut self) -> io::Result<()> {
        let ring = raw::readable(self.as_fd().try_clone_to_owned()?)?;
        loop {
            let mut ready = ring.readable().await?;
            // aya-log unwraps what it reads. A program of another build may have left a record that it does not
            // understand, and debug lines must never end the agent. The record is consumed while the stack unwinds.
            while fault::tolerate(|| self.flush()).is_err() {
                tracing::debug!("a debug line of the program could not be read");
            }
            ready.clear_ready();
        }
    }
}
