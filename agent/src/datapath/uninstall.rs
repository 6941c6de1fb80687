//! Taking everything of ours from a node: links, filters, pins, of every layout version.
//!
//! What others have put aside or beside it stays: their filters and qdiscs, and pins that this program has set aside as
//! foreign. What is steered and what is held goes where the node's own routing takes it from then on.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use holdfast_ebpf::abi::pin;
use holdfast_engine::model::Ifindex;

use super::filter;
use super::pins::{self, AgentLock, PinError};
use super::raw;
use crate::netlink::tc::{self, TcError};

/// Why something could not be taken away, or looked for.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// A pin, or an agent that runs.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The filter of a device.
    #[error("the filter of device {ifindex}: {source}")]
    Filter {
        /// Number of the device.
        ifindex: Ifindex,
        /// What the kernel says.
        source: TcError,
    },
    /// Devices with filters could not be listed.
    #[error("listing the qdiscs of all devices: {0}")]
    Filters(#[from] TcError),
}

/// What of ours is on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Installed {
    /// Pinned links.
    pub links: Vec<PathBuf>,
    /// Devices of this network namespace that have a filter of ours.
    pub filters: BTreeSet<Ifindex>,
    /// Everything else that is pinned: maps, programs, the registry.
    pub pins: Vec<PathBuf>,
    /// What is there and is not ours.
    pub foreign: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Installed {
    /// There is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
            && self.filters.is_empty()
            && self.pins.is_empty()
            && self.directories.is_empty()
    }

    /// Looks for it.
    ///
    /// # Errors
    /// When the kernel or a directory cannot be read.
    pub fn find(bpffs_dir: &Path) -> Result<Self, UninstallError> {
        let mut found = Self::default();
        for ifindex in tc::hooked()? {
            let hooked =
                filter::look(ifindex).map_err(|source| UninstallError::Filter { ifindex, source })?;
            if hooked.ours.is_some() {
                found.filters.insert(ifindex);
            }
        }
        if !bpffs_dir.is_dir() {
            return Ok(found);
        }
        found.directories.push(bpffs_dir.to_owned());
        for path in entries(bpffs_dir)? {
            match name(&path) {
                name if path.is_dir() && numbered(name, "v") => found.version(path)?,
                name if !path.is_dir() && name == pin::REGISTRY => found.pins.push(path),
                _ => found.foreign.push(path),
            }
        }
        Ok(found)
    }

    /// All that is pinned for one layout version.
    fn version(&mut self, directory: PathBuf) -> Result<(), UninstallError> {
        self.directories.push(directory.clone());
        for path in entries(&directory)? {
            match name(&path) {
                name if name.starts_with(pins::FOREIGN) => self.foreign.push(path),
                "links" if path.is_dir() => {
                    for link in entries(&path)? {
                        if numbered(name(&link), "") && link.is_file() {
                            self.links.push(link);
                        } else {
                            self.foreign.push(link);
                        }
                    }
                    self.directories.push(path);
                }
                _ if path.is_file() => self.pins.push(path),
                _ => self.foreign.push(path),
            }
        }
        Ok(())
    }

    /// Takes it away: what delivers packets first. What fails keeps nothing else from being taken away. The caller holds
    /// the lock, so that no agent makes it anew; where there is no directory there is nothing to hold.
    #[must_use]
    pub fn remove(&self, _lock: Option<&AgentLock>) -> Vec<UninstallError> {
        let mut failures = Vec::new();
        for &ifindex in &self.filters {
            if let Err(source) = filter::remove(ifindex) {
                failures.push(UninstallError::Filter { ifindex, source });
            }
        }
        for path in self.links.iter().chain(&self.pins) {
            // The last descriptor of a link detaches within close(2), the removal of its pin some time later.
            let object = raw::obj_get(path);
            if let Err(error) = pins::unpin(path) {
                failures.push(error.into());
            }
            drop(object);
        }
        // The innermost first: each was found after the one it is in.
        for directory in self.directories.iter().rev() {
            match fs::remove_dir(directory) {
                Ok(()) => {}
                // What is not ours is in it, or it is what is mounted.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::DirectoryNotEmpty
                            | io::ErrorKind::NotFound
                            | io::ErrorKind::ResourceBusy
                    ) => {}
                Err(error) => failures.push(PinError::io("removing", directory)(error).into()),
            }
        }
        failures
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, PinError> {
    let failed = PinError::io("reading", directory);
    let read =
        || -> io::Result<Vec<PathBuf>> { fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect() };
    let mut entries = read().map_err(failed)?;
    entries.sort_unstable();
    Ok(entries)
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// Whether a name is this prefix and a number.
fn numbered(name: &str, prefix: &str) -> bool {
    let number = name.strip_prefix(prefix);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_ours() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        for directory in ["v1/links", "v2/links", "other", "vx"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        for file in [
            "registry_v1",
            "mine",
            "v1/services",
            "v1/foreign_services_0",
            "v1/links/7",
            "v1/links/x",
            "v2/flows",
        ] {
            fs::write(root.join(file), []).unwrap();
        }
        let found = Installed::find(root).unwrap();
        let shown = |paths: &[PathBuf]| -> Vec<String> {
            let names = paths.iter().map(|path| path.strip_prefix(root).unwrap());
            names.map(|name| name.display().to_string()).collect()
        };
        assert_eq!(shown(&found.links), ["v1/links/7"]);
        assert_eq!(shown(&found.pins), ["registry_v1", "v1/services", "v2/flows"]);
        assert_eq!(
            shown(&found.foreign),
            ["mine", "other", "v1/foreign_services_0", "v1/links/x", "vx"]
        );
        assert!(found.remove(None).is_empty());
        let left = Installed::find(root).unwrap();
        assert!(left.links.is_empty() && left.pins.is_empty());
        assert_eq!(left.foreign, found.foreign);
        assert!(!root.join("v2").exists());
    }
}
