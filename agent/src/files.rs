//! Files that are replaced as a whole: whoever reads one sees the old content or the new one, never half of either.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::api::hash::sha256;

/// Why a file could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
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
    /// The file is not what was written once.
    #[error("{}: {what}", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The file is larger than anything that is written there.
    #[error("{}: {size} bytes, at most {limit} are read", path.display())]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
}

impl FileError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }

    /// Whether there is no such file.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Whether a write must survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Only the process may die: for files that mean nothing after a reboot.
    Process,
    /// The machine may die: data and directory entry are on the disk when the call returns.
    Machine,
}

/// Replaces a file by one rename. One writer a file: the temporary name is fixed, so that nothing piles up after
/// crashes.
///
/// # Errors
/// What the system says.
pub fn replace(path: &Path, content: &[u8], mode: u32, durability: Durability) -> Result<(), FileError> {
    let temporary = temporary_name(path);
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temporary)
        .map_err(FileError::io("create", &temporary))?;
    file.write_all(content)
        .map_err(FileError::io("write", &temporary))?;
    if durability == Durability::Machine {
        file.sync_data().map_err(FileError::io("sync", &temporary))?;
    }
    fs::rename(&temporary, path).map_err(FileError::io("rename to", path))?;
    if durability == Durability::Machine {
        sync_directory(path)?;
    }
    Ok(())
}

/// The name under which a replacement is prepared. A dot file: directory readers skip it.
pub(crate) fn temporary_name(path: &Path) -> PathBuf {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    path.with_file_name(format!(".{name}.tmp"))
}

pub(crate) fn sync_directory(path: &Path) -> Result<(), FileError> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(FileError::io("sync", directory))
}

/// Reads a file of at most `limit` bytes.
///
/// # Errors
/// What the system says; [`FileError::TooLarge`].
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let file = File::open(path).map_err(FileError::io("open", path))?;
    let size = file.metadata().map_err(FileError::io("stat", path))?.len();
    let mut content = Vec::with_capacity(usize::try_from(size.min(limit)).unwrap_or(0));
    // The size may be a lie (a growing file): the limit holds for what is read.
    file.take(limit + 1)
        .read_to_end(&mut content)
        .map_err(FileError::io("read", path))?;
    let size = content.len() as u64;
    if size > limit {
        return Err(FileError::TooLarge {
            path: path.to_owned(),
            size,
            limit,
        });
    }
    Ok(content)
}

/// Puts a line in front of `body` that says what it is and lets [`unseal`] notice damage.
#[must_use]
pub fn seal(what: &str, body: &[u8]) -> Vec<u8> {
    let mut sealed = format!("{what} sha256:{}\n", hex(&sha256(body))).into_bytes();
    sealed.extend_from_slice(body);
    sealed
}

/// What [`seal`] was given, if it is whole and of the wanted kind.
///
/// # Errors
/// [`FileError::Damaged`].
pub fn unseal<'a>(path: &Path, what: &str, sealed: &'a [u8]) -> Result<&'a [u8], FileError> {
    let damaged = |what| FileError::Damaged {
        path: path.to_owned(),
        what,
    };
    let end = sealed
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or_else(|| damaged("no first line"))?;
    let (line, body) = (&sealed[..end], &sealed[end + 1..]);
    let expected = format!("{what} sha256:{}", hex(&sha256(body)));
    if line == expected.as_bytes() {
        Ok(body)
    } else if line.starts_with(what.as_bytes()) {
        Err(damaged("checksum differs"))
    } else {
        Err(damaged("written by another release"))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_replaced_file_has_its_content_and_mode_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.yaml");
        replace(&path, b"one", 0o600, Durability::Process).unwrap();
        replace(&path, b"two", 0o600, Durability::Machine).unwrap();
        assert_eq!(read(&path, 3).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, b"four").unwrap();
        assert!(matches!(
            read(&path, 3),
            Err(FileError::TooLarge {
                size: 4,
                limit: 3,
                ..
            })
        ));
        assert!(read(&dir.path().join("y"), 3).unwrap_err().is_not_found());
    }

    #[test]
    fn a_seal_notices_any_change() {
        let path = Path::new("x");
        let sealed = seal("holdfast-test 1", b"body");
        assert_eq!(unseal(path, "holdfast-test 1", &sealed).unwrap(), b"body");
        assert!(unseal(path, "holdfast-test 2", &sealed).is_err());
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(unseal(path, "holdfast-test 1", &changed).is_err(), "byte {at}");
        }
        assert!(unseal(path, "holdfast-test 1", &sealed[..sealed.len() - 1]).is_err());
        assert!(unseal(path, "holdfast-test 1", b"").is_err());
    }
}
