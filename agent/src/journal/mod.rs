//! The journal: every input of the engine on disk, so that what it decided can be asked again.
//!
//! A journal is a directory of segments. A segment begins with one line that names the release, then come frames: 4 bytes
//! length, 4 bytes checksum (little endian; the first bytes of the SHA-256 of the rest), and records of
//! [`holdfast_engine::journal`] as [postcard](https://postcard.jamesmunns.com) writes them, one batch of the driver a
//! frame. The first record of a segment is a life that begins, or the whole state of the engine, so that older segments
//! can go. What has been handed to write(2) outlives the process, however that ends; a frame that was torn is the end of
//! its segment.

pub mod read;
#[cfg(test)]
mod tests;
pub mod text;
mod write;

use std::io;
use std::path::PathBuf;

use crate::api::hash::sha256;

pub use read::{Piece, Reader, replay};
pub use write::{Encoder, Journal, Options, TooLarge, start, write_segment};

/// Directory of the journal in the state directory.
pub const DIRECTORY: &str = "journal";
/// How the name of a segment ends.
const EXTENSION: &str = "journal";
/// What the first line of a segment begins with, before the release.
const MAGIC: &str = "holdfast journal 1 of ";
/// No frame is larger.
const LARGEST_FRAME: u32 = 1 << 28;

/// The first line of a segment.
fn header() -> String {
    format!("{MAGIC}{}\n", env!("CARGO_PKG_VERSION"))
}

/// Checksum of a frame.
fn checksum(payload: &[u8]) -> u32 {
    let [a, b, c, d, ..] = sha256(payload);
    u32::from_le_bytes([a, b, c, d])
}

/// Why a journal could not be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system said no.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is nothing to read.
    #[error("{}: there is no journal", path.display())]
    Nothing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Not a journal.
    #[error("{}: not a journal", path.display())]
    Foreign {
        /// Which file.
        path: PathBuf,
    },
    /// Written by another release: its records, and its decisions, are others.
    #[error("{}: written by release {release}; this one is {}", path.display(), env!("CARGO_PKG_VERSION"))]
    Release {
        /// Which file.
        path: PathBuf,
        /// Who wrote it.
        release: String,
    },
    /// A frame is whole and its records make no sense.
    #[error("{}: the frame at byte {at} has no sense: {what}", path.display())]
    Senseless {
        /// Which file.
        path: PathBuf,
        /// Where the frame begins.
        at: u64,
        /// What is wrong.
        what: String,
    },
}

impl JournalError {
    fn io(doing: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }
}
