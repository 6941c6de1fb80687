//! What is pinned where, what each pinned map must look like, and who may use the directory.
//!
//! ```text
//! <bpffs dir>/registry_v1            written by CNIs too, outside the layout version
//! <bpffs dir>/v1/<map>               every other map
//! <bpffs dir>/v1/classifier_<id>     the program, under its kernel id: a link's info names only the id
//! <bpffs dir>/v1/links/<ifindex>     one link a device (tcx)
//! ```
//! A pin is never trusted for its name: aya takes whatever is pinned there and checks nothing, so the shape of
//! every map is compared with [`layout`] first. What does not fit is set aside under another name.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use holdfast_ebpf::abi::{self, MapLayout, capacity, pin};
use holdfast_engine::model::Ifindex;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::raw::{self, MapInfo, MapShape};

/// `BPF_FS_MAGIC` of `include/uapi/linux/magic.h`.
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// Pin name of the map that names the life of the pins, and records which program is the current one.
pub const EPOCH: &str = "epoch";
/// Number of words of [`EPOCH`].
pub const EPOCH_WORDS: u32 = 8;

/// Number of entries of the maps that flags can size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Consumer rows.
    pub consumers: u32,
    /// Source addresses.
    pub sources: u32,
    /// The node's own addresses.
    pub locals: u32,
    /// Route entries for services.
    pub services: u32,
    /// Route entries for prefixes.
    pub prefixes: u32,
    /// Policy slots.
    pub policies: u32,
    /// The arena of slots.
    pub slots: u32,
    /// Backends.
    pub backends: u32,
    /// Flow entries (two a flow).
    pub flows: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            consumers: capacity::CONSUMERS,
            sources: capacity::SOURCES,
            locals: capacity::LOCALS,
            services: capacity::SERVICES,
            prefixes: capacity::PREFIXES,
            policies: capacity::POLICIES,
            slots: capacity::SLOTS,
            backends: capacity::BACKENDS,
            flows: capacity::FLOWS,
        }
    }
}

impl Sizes {
    /// One entry each: enough for the verifier to judge the program.
    pub const SMALLEST: Self = Self {
        consumers: 1,
        sources: 1,
        locals: 1,
        services: 1,
        prefixes: 1,
        policies: 1,
        slots: 1,
        backends: 1,
        flows: 1,
    };

    /// What a flag says of the map with this name; none if no flag does.
    fn of(&self, name: &str) -> Option<u32> {
        Some(match name {
            pin::CONSUMERS => self.consumers,
            pin::SOURCES => self.sources,
            pin::LOCALS => self.locals,
            pin::SERVICES => self.services,
            pin::PREFIXES => self.prefixes,
            pin::POLICIES => self.policies,
            pin::SLOTS => self.slots,
            pin::BACKENDS => self.backends,
            pin::FLOWS => self.flows,
            _ => return None,
        })
    }
}

/// A map of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Pin name, which is also the name in the ELF object.
    pub name: &'static str,
    /// What it must be.
    pub shape: MapShape,
    /// A flag sets its number of entries; one that is pinned already keeps the number it was made with.
    pub sized: bool,
}

impl Layout {
    const fn of(map: &MapLayout) -> Self {
        Self {
            name: map.name,
            shape: MapShape {
                map_type: map.kind,
                key_size: map.key,
                value_size: map.value,
                max_entries: map.entries,
                flags: map.flags,
            },
            sized: false,
        }
    }
}

/// The map that CNIs share.
#[must_use]
pub fn registry_layout() -> Layout {
    let [registry, ..] = &abi::MAPS;
    Layout::of(registry)
}

/// The map of [`EPOCH`].
pub const EPOCH_LAYOUT: Layout = Layout {
    name: EPOCH,
    shape: MapShape {
        map_type: MapLayout::ARRAY,
        key_size: 4,
        value_size: 8,
        max_entries: EPOCH_WORDS,
        flags: 0,
    },
    sized: false,
};

/// Every map of this layout version but the registry and the epoch.
#[must_use]
pub fn layout(sizes: &Sizes) -> Vec<Layout> {
    abi::MAPS
        .iter()
        .filter(|map| map.name != pin::REGISTRY)
        .map(|map| {
            let mut layout = Layout::of(map);
            if let Some(entries) = sizes.of(map.name) {
                layout.shape.max_entries = entries;
                layout.sized = true;
            }
            layout
        })
        .collect()
}

/// Why pins cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The directory is on no BPF file system.
    #[error(
        "{} is not on a BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf) or name another directory with --bpffs-dir",
        path.display()
    )]
    NotBpffs {
        /// The directory.
        path: PathBuf,
    },
    /// Another agent holds the directory.
    #[error(
        "another holdfast agent uses {}: one agent a node; stop it first, or give this one another --bpffs-dir",
        path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// A file system call failed.
    #[error("{} {}: {source}", operation, path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A call of bpf(2) failed.
    #[error("{operation} {}: {errno}", path.display())]
    Bpf {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        errno: Errno,
    },
    /// The pinned map is not what it must be.
    #[error(
        "{} is no map of this layout ({difference}): it was made by something else; remove it, or name another directory with --bpffs-dir",
        path.display()
    )]
    Layout {
        /// The pin.
        path: PathBuf,
        /// What differs.
        difference: Difference,
    },
}

impl PinError {
    pub(super) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            operation,
            path,
            source,
        }
    }

    pub(super) fn bpf(operation: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        let path = path.to_owned();
        move |errno| Self::Bpf {
            operation,
            path,
            errno,
        }
    }
}

/// How a pinned object differs from what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// It is no map at all.
    NotAMap(raw::Kind),
    /// It is another map.
    Shape {
        /// What it must be.
        wanted: MapShape,
        /// What it is.
        found: MapShape,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAMap(kind) => write!(f, "it is not a map but {kind:?}"),
            Self::Shape { wanted, found } => {
                let fields = [
                    ("type", wanted.map_type, found.map_type),
                    ("key size", wanted.key_size, found.key_size),
                    ("value size", wanted.value_size, found.value_size),
                    ("entries", wanted.max_entries, found.max_entries),
                    ("flags", wanted.flags, found.flags),
                ];
                let mut separator = "";
                for (name, wanted, found) in fields {
                    if wanted != found {
                        write!(f, "{separator}{name} {found} instead of {wanted}")?;
                        separator = ", ";
                    }
                }
                Ok(())
            }
        }
    }
}

impl Layout {
    /// Compares a map with this layout; what a flag sizes may have any number of entries.
    ///
    /// # Errors
    /// What differs.
    pub fn check(&self, found: &MapInfo) -> Result<(), Difference> {
        let mut wanted = self.shape;
        if self.sized && found.shape.max_entries > 0 {
            wanted.max_entries = found.shape.max_entries;
        }
        if wanted == found.shape {
            Ok(())
        } else {
            Err(Difference::Shape {
                wanted: self.shape,
                found: found.shape,
            })
        }
    }

    /// Opens the map that is pinned at `path` and checks it; none if nothing is there.
    ///
    /// # Errors
    /// [`PinError::Layout`] when something else is there; [`PinError::Bpf`] when it cannot be opened.
    pub fn open(&self, path: &Path) -> Result<Option<(OwnedFd, MapInfo)>, PinError> {
        let object = match raw::obj_get(path) {
            Ok(object) => object,
            Err(Errno::NOENT) => return Ok(None),
            // A directory, or a file of another kind: bpf_inode_type says EACCES.
            Err(Errno::ACCESS) if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) => {
                return Err(PinError::Layout {
                    path: path.to_owned(),
                    difference: Difference::NotAMap(raw::Kind::Other),
                });
            }
            Err(errno) => return Err(PinError::bpf("opening the pin", path)(errno)),
        };
        let kind = raw::kind(object.as_fd()).map_err(PinError::bpf("reading /proc/self/fd for", path))?;
        if kind != raw::Kind::Map {
            return Err(PinError::Layout {
                path: path.to_owned(),
                difference: Difference::NotAMap(kind),
            });
        }
        let info = raw::map_info(object.as_fd()).map_err(PinError::bpf("describing", path))?;
        self.check(&info).map_err(|difference| PinError::Layout {
            path: path.to_owned(),
            difference,
        })?;
        Ok(Some((object, info)))
    }

    /// Creates the map and pins it at `path`; whoever was faster wins, and is checked. Says whether it is new.
    ///
    /// # Errors
    /// As [`Self::open`], and when the map can be neither created nor pinned.
    pub fn open_or_create(&self, path: &Path) -> Result<(OwnedFd, MapInfo, bool), PinError> {
        if let Some((map, info)) = self.open(path)? {
            return Ok((map, info, false));
        }
        let map = raw::map_create(self.name, self.shape).map_err(PinError::bpf("creating the map", path))?;
        match raw::obj_pin(map.as_fd(), path) {
            Ok(()) => {
                let info = raw::map_info(map.as_fd()).map_err(PinError::bpf("describing", path))?;
                Ok((map, info, true))
            }
            Err(Errno::EXIST) => match self.open(path)? {
                Some((map, info)) => Ok((map, info, false)),
                None => Err(PinError::bpf("opening the pin", path)(Errno::NOENT)),
            },
            Err(errno) => Err(PinError::bpf("pinning", path)(errno)),
        }
    }
}

/// Where everything is pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    root: PathBuf,
    version: PathBuf,
}

impl Pins {
    /// The pins under this directory.
    #[must_use]
    pub fn new(bpffs_dir: &Path) -> Self {
        Self {
            root: bpffs_dir.to_owned(),
            version: bpffs_dir.join(format!("v{}", abi::LAYOUT_VERSION)),
        }
    }

    /// The directory itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of this layout version.
    #[must_use]
    pub fn version(&self) -> &Path {
        &self.version
    }

    /// The registry.
    #[must_use]
    pub fn registry(&self) -> PathBuf {
        self.root.join(pin::REGISTRY)
    }

    /// A map of this layout version.
    #[must_use]
    pub fn map(&self, name: &str) -> PathBuf {
        self.version.join(name)
    }

    /// The program with this id.
    #[must_use]
    pub fn program(&self, id: u32) -> PathBuf {
        self.version.join(format!("{}_{id}", pin::PROGRAM))
    }

    /// The directory of links.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.version.join("links")
    }

    /// The link of a device.
    #[must_use]
    pub fn link(&self, ifindex: Ifindex) -> PathBuf {
        self.links().join(ifindex.to_string())
    }

    /// Makes the directories that are missing, all 0700.
    ///
    /// # Errors
    /// [`PinError::NotBpffs`] or [`PinError::Io`].
    pub fn make_directories(&self) -> Result<(), PinError> {
        make_root(&self.root)?;
        for directory in [self.version.clone(), self.links()] {
            make_directory(&directory)?;
        }
        Ok(())
    }

    /// Ids of the programs that are pinned.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn programs(&self) -> Result<Vec<u32>, PinError> {
        let mut ids: Vec<u32> = names(&self.version)?
            .iter()
            .filter_map(|name| name.strip_prefix(pin::PROGRAM)?.strip_prefix('_')?.parse().ok())
            .collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Names in the directory of links.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn link_names(&self) -> Result<Vec<String>, PinError> {
        names(&self.links())
    }
}

fn names(directory: &Path) -> Result<Vec<String>, PinError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(PinError::io("reading", directory))? {
        let entry = entry.map_err(PinError::io("reading", directory))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Whether `path` is on a BPF file system.
///
/// # Errors
/// As statfs(2).
pub fn is_bpffs(path: &Path) -> io::Result<bool> {
    let found = rustix::fs::statfs(path)?;
    // The width of `f_type` differs between architectures; the magic number fits all of them.
    Ok(found.f_type as u64 & 0xffff_ffff == BPF_FS_MAGIC)
}

/// Makes the bpffs directory if it is missing: its parent must be on a BPF file system then.
///
/// # Errors
/// [`PinError::NotBpffs`] or [`PinError::Io`].
pub fn make_root(root: &Path) -> Result<(), PinError> {
    let existing = if root.exists() {
        root
    } else {
        root.parent().unwrap_or(root)
    };
    match is_bpffs(existing) {
        Ok(true) => make_directory(root),
        Ok(false) => Err(PinError::NotBpffs {
            path: root.to_owned(),
        }),
        Err(error) => Err(PinError::io("looking at", existing)(error)),
    }
}

/// Makes a directory with mode 0700, or gives it that mode.
fn make_directory(path: &Path) -> Result<(), PinError> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(path).map_err(PinError::io("looking at", path))?;
            if !found.is_dir() {
                return Err(PinError::io("opening the directory", path)(io::Error::from(
                    io::ErrorKind::NotADirectory,
                )));
            }
            if found.permissions().mode() & 0o777 == 0o700 {
                return Ok(());
            }
            fs::set_permissions(path, fs::Permissions::from_mode(0o700))
                .map_err(PinError::io("setting the mode of", path))
        }
        Err(error) => Err(PinError::io("making", path)(error)),
    }
}

/// Gives a pin mode 0600, if it has another.
pub(crate) fn make_private(path: &Path) -> Result<(), PinError> {
    let found = fs::symlink_metadata(path).map_err(PinError::io("looking at", path))?;
    if found.permissions().mode() & 0o777 == 0o600 {
        return Ok(());
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(PinError::io("setting the mode of", path))
}

/// Removes a pin; not there is done. Says whether it was there.
///
/// # Errors
/// [`PinError::Io`].
pub fn unpin(path: &Path) -> Result<bool, PinError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(PinError::io("removing", path)(error)),
    }
}

/// What the name of a pin that was set aside begins with.
pub(super) const FOREIGN: &str = "foreign_";

/// Gives a foreign pin another name beside it, so that it is neither used nor lost. Returns the new path.
///
/// # Errors
/// [`PinError::Io`].
pub fn set_aside(path: &Path) -> Result<PathBuf, PinError> {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    for number in 0..1000 {
        let aside = path.with_file_name(format!("{FOREIGN}{name}_{number}"));
        if fs::symlink_metadata(&aside).is_ok() {
            continue;
        }
        fs::rename(path, &aside).map_err(PinError::io("setting aside", path))?;
        return Ok(aside);
    }
    Err(PinError::io("setting aside", path)(io::Error::from(
        io::ErrorKind::AlreadyExists,
    )))
}

/// The right to be this node's agent; given up when it is dropped, or the process ends.
#[derive(Debug)]
pub struct AgentLock {
    _directory: OwnedFd,
}

impl AgentLock {
    /// Takes it: `flock` on the opened bpffs directory itself, so that it follows the pins, leaves no stale file, and
    /// two agents with one directory meet, whatever their run directories and mount namespaces are.
    ///
    /// # Errors
    /// [`PinError::Locked`] when another agent has it, [`PinError::NotBpffs`], [`PinError::Io`].
    pub fn take(bpffs_dir: &Path) -> Result<Self, PinError> {
        make_root(bpffs_dir)?;
        let directory = rustix::fs::open(
            bpffs_dir,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| PinError::io("opening", bpffs_dir)(errno.into()))?;
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self {
                _directory: directory,
            }),
            Err(Errno::WOULDBLOCK) => Err(PinError::Locked {
                path: bpffs_dir.to_owned(),
            }),
            Err(errno) => Err(PinError::io("locking", bpffs_dir)(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(shape: MapShape) -> MapInfo {
        MapInfo { id: 7, shape }
    }

    #[test]
    fn names_are_unique_and_without_dots() {
        let mut names: Vec<&str> = layout(&Sizes::default()).iter().map(|map| map.name).collect();
        names.extend([EPOCH, "links"]);
        assert!(names.iter().all(|name| !name.contains('.')));
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
    }

    #[test]
    fn every_field_of_a_shape_is_compared() {
        let registry = registry_layout();
        assert_eq!(registry.name, pin::REGISTRY);
        let right = registry.shape;
        assert_eq!(registry.check(&info(right)), Ok(()));
        let wrong = [
            MapShape { map_type: 2, ..right },
            MapShape { key_size: 8, ..right },
            MapShape {
                value_size: 48,
                ..right
            },
            MapShape {
                max_entries: 64,
                ..right
            },
            MapShape { flags: 1, ..right },
        ];
        for found in wrong {
            assert_eq!(
                registry.check(&info(found)),
                Err(Difference::Shape { wanted: right, found })
            );
        }
    }

    #[test]
    fn a_sized_map_keeps_the_number_of_entries_it_was_made_with() {
        let consumers = layout(&Sizes::default())[0];
        let mut found = consumers.shape;
        found.max_entries = 64;
        assert_eq!(consumers.check(&info(found)), Ok(()));
        found.value_size = 32;
        assert!(consumers.check(&info(found)).is_err());
    }

    #[test]
    fn a_difference_names_what_differs() {
        let found = MapShape {
            value_size: 48,
            flags: 1,
            ..registry_layout().shape
        };
        let difference = registry_layout().check(&info(found)).unwrap_err();
        assert_eq!(
            difference.to_string(),
            "value size 48 instead of 40, flags 1 instead of 0"
        );
    }

    #[test]
    fn a_plain_directory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refused = AgentLock::take(directory.path()).unwrap_err();
        assert!(matches!(refused, PinError::NotBpffs { .. }), "{refused}");
        let refused = AgentLock::take(&directory.path().join("holdfast")).unwrap_err();
        assert!(matches!(refused, PinError::NotBpffs { .. }), "{refused}");
        assert!(!directory.path().join("holdfast").exists());
    }

    #[test]
    fn pins_have_the_documented_paths() {
        let pins = Pins::new(Path::new("/sys/fs/bpf/holdfast"));
        assert_eq!(pins.registry(), Path::new("/sys/fs/bpf/holdfast/registry_v1"));
        assert_eq!(pins.map("slots"), Path::new("/sys/fs/bpf/holdfast/v1/slots"));
        assert_eq!(
            pins.program(12),
            Path::new("/sys/fs/bpf/holdfast/v1/classifier_12")
        );
        assert_eq!(pins.link(7), Path::new("/sys/fs/bpf/holdfast/v1/links/7"));
    }
}
