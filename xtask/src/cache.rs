//! The build directory: shared between clones, so that a fresh one need not build its dependencies again.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::Context;

use crate::tools;

/// Above this, build directories are dropped, the longest unused first.
const LIMIT_BYTES: u64 = 15 * 1024 * 1024 * 1024;

/// Touched at each use.
const STAMP: &str = ".holdfast-last-used";

/// Where cargo builds for us. Two clones never build into one directory at the same time.
pub(crate) struct BuildDir {
    path: PathBuf,
    /// Held as long as the directory is used.
    _lock: Option<File>,
}

impl BuildDir {
    /// `CARGO_TARGET_DIR` if it is set; else one in the cache for this compiler and this Cargo.lock; if another
    /// clone uses that at the moment, `target` in the workspace.
    pub(crate) fn open() -> anyhow::Result<Self> {
        if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR") {
            let path = std::path::absolute(PathBuf::from(dir))?;
            return Ok(Self { path, _lock: None });
        }
        let root = tools::workspace_root()?;
        let cache = tools::cache_dir()?;
        let path = cache.join(format!("target-{:016x}", key(&root)?));
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let stamp = path.join(STAMP);
        let lock = File::create(&stamp).with_context(|| format!("cannot write {}", stamp.display()))?;
        if !try_lock(&lock) {
            eprintln!(
                "{} is in use by another clone: building in this one",
                path.display()
            );
            return Ok(Self {
                path: root.join("target"),
                _lock: None,
            });
        }
        drop_old(&cache, &path);
        Ok(Self {
            path,
            _lock: Some(lock),
        })
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A cargo command that builds there, with the compiler that runs us, and embeds this clone's BPF object.
    pub(crate) fn cargo(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(tools::cargo());
        command.current_dir(tools::workspace_root()?);
        command.env("CARGO_TARGET_DIR", &self.path);
        command.env("HOLDFAST_BPF_OBJECT", self.bpf_object()?);
        Ok(command)
    }

    /// Where the BPF object lies. In the clone, not in the cache: another clone's must never get into this agent.
    pub(crate) fn bpf_object(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = std::env::var_os("HOLDFAST_BPF_OBJECT") {
            return Ok(std::path::absolute(PathBuf::from(path))?);
        }
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(_) => self.path.clone(),
            None => tools::workspace_root()?.join("target"),
        };
        Ok(target.join("bpf").join("classifier"))
    }
}

/// Names a compiler and a set of dependencies.
fn key(root: &Path) -> anyhow::Result<u64> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let version = tools::answer(Command::new(&rustc).arg("-vV"))
        .with_context(|| format!("{} -vV does not answer", rustc.to_string_lossy()))?;
    let lock = fs::read(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    // FNV-1a.
    let hash = version
        .bytes()
        .chain(lock)
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    Ok(hash)
}

fn try_lock(file: &File) -> bool {
    #[expect(
        unsafe_code,
        reason = "std's File::try_lock cannot tell a lock from an error of the file system"
    )]
    // SAFETY: flock takes an open descriptor and no memory; `file` keeps it open.
    let locked = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    locked == 0
}

/// Drops build directories, the longest unused first, until the rest is below the limit. Those in use stay.
fn drop_old(cache: &Path, own: &Path) {
    let Ok(entries) = fs::read_dir(cache) else {
        return;
    };
    let mut dirs: Vec<(SystemTime, PathBuf, u64)> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("target-"))
        .map(|entry| {
            let path = entry.path();
            let used = path
                .join(STAMP)
                .metadata()
                .and_then(|meta| meta.modified())
                .unwrap_or(SystemTime::UNIX_EPOCH);
            let size = size_of_tree(&path);
            (used, path, size)
        })
        .collect();
    dirs.sort();
    let mut total: u64 = dirs.iter().map(|(_, _, size)| size).sum();
    for (_, path, size) in dirs {
        if total <= LIMIT_BYTES {
            return;
        }
        let free = path == own || File::open(path.join(STAMP)).is_ok_and(|stamp| try_lock(&stamp));
        if !free {
            continue;
        }
        eprintln!(
            "build directories take {} GB: dropping {}",
            total >> 30,
            path.display()
        );
        drop_tree(&path);
        total = total.saturating_sub(size);
    }
}

/// Empties a build directory. Its stamp stays: somebody may hold the lock.
fn drop_tree(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.filter_map(Result::ok) {
        let gone = match entry.file_type() {
            Ok(kind) if kind.is_dir() => fs::remove_dir_all(entry.path()),
            _ if entry.file_name() == STAMP => Ok(()),
            _ => fs::remove_file(entry.path()),
        };
        if let Err(error) = gone {
            eprintln!("cannot remove {}: {error}", entry.path().display());
        }
    }
}

/// Bytes that a tree takes on disk.
fn size_of_tree(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of_tree(&entry.path()),
            // A hard link (cargo makes many) is on disk once.
            Ok(meta) => meta.blocks() * 512 / meta.nlink().max(1),
            Err(_) => 0,
        })
        .sum()
}
