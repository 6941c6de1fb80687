//! The registry: which workload incarnation stands behind which interface, as CNIs say.
//!
//! A pinned hash map, so that it is alive while the agent is not. Whoever comes first creates it; everybody checks it.
//! Register and unregister hold a lock file in the run directory; reading needs none (see [`Registry::read`]).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use holdfast_ebpf::abi::RegistryRow;
use holdfast_engine::model::{Device, Identity, Ifindex, Incarnation, Mac, Token};
use rand::TryRng;
use rand::rngs::SysRng;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::api::hash;
use crate::datapath::pins::{self, PinError, Pins};
use crate::datapath::raw::Map;
use crate::netlink::find;

/// Name of the lock file in the run directory.
const LOCK_FILE: &str = "registry.lock";
/// How long a registrant waits for another one. Holding it takes microseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Why a call on the registry failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// There is no registry yet.
    #[error("no registry is pinned at {}: nothing was registered since the last boot", path.display())]
    Missing {
        /// Where it would be.
        path: PathBuf,
    },
    /// The pin or its directory cannot be used.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The interface to register is not there.
    #[error("no interface {name} in this network namespace")]
    NoInterface {
        /// Its name.
        name: String,
    },
    /// The name cannot be that of an interface.
    #[error("{name:?} is no interface name: 1 to 15 bytes without blanks, `/` and `:`")]
    BadName {
        /// The name.
        name: String,
    },
    /// Another process holds the lock.
    #[error("{} is held by another process for more than {patience:?}", path.display())]
    Busy {
        /// The lock file.
        path: PathBuf,
        /// How long was waited.
        patience: Duration,
    },
    /// The map takes no more rows.
    #[error(
        "the registry is full: {capacity} rows; a running agent removes those of interfaces that are gone"
    )]
    Full {
        /// Number of rows it takes.
        capacity: u32,
    },
    /// The row is not the caller's: another incarnation is registered. Nothing was changed.
    #[error("interface number {ifindex} is registered with another token: nothing was removed")]
    OtherIncarnation {
        /// The interface.
        ifindex: Ifindex,
    },
    /// A system call failed.
    #[error("{operation}: {errno}")]
    System {
        /// What was tried.
        operation: String,
        /// Why it failed.
        errno: Errno,
    },
    /// The lock file cannot be used.
    #[error("{operation} {}: {source}", path.display())]
    Lock {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn system(operation: impl Into<String>) -> impl FnOnce(Errno) -> RegistryError {
    let operation = operation.into();
    move |errno| RegistryError::System { operation, errno }
}

/// What stands behind an interface, as far as the registrant knows. A hint: delivery asks the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Not said.
    #[default]
    Unknown,
    /// A veth.
    Veth,
    /// A tap.
    Tap,
}

impl Kind {
    const fn number(self) -> u8 {
        match self {
            Self::Unknown => RegistryRow::KIND_UNKNOWN,
            Self::Veth => RegistryRow::KIND_VETH,
            Self::Tap => RegistryRow::KIND_TAP,
        }
    }

    const fn of(number: u8) -> Self {
        match number {
            RegistryRow::KIND_VETH => Self::Veth,
            RegistryRow::KIND_TAP => Self::Tap,
            _ => Self::Unknown,
        }
    }
}

/// What a CNI says of a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registration {
    /// Name of the host-side interface.
    pub interface: String,
    /// The identity string: a pod UID, an instance id.
    pub identity: Option<String>,
    /// MAC of the workload's side.
    pub mac: Option<Mac>,
    /// What the interface is.
    pub kind: Kind,
    /// All host-side interfaces of this CNI have one MAC, so that it does not name the device.
    pub host_mac_shared: bool,
}

/// A row that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The device.
    pub device: Device,
    /// The token of the new incarnation: needed to unregister.
    pub token: Token,
    /// The token that was there before.
    pub replaced: Option<Token>,
}

/// A row of the registry, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Number of the interface.
    pub ifindex: Ifindex,
    /// Name of the device that has this number now, if there is one and it is the one that was registered.
    pub interface: Option<String>,
    /// What was registered.
    pub identity: Identity,
    /// What the interface is.
    pub kind: Kind,
}

/// The pinned map and its lock.
#[derive(Debug)]
pub struct Registry {
    map: Map<u32, RegistryRow>,
    lock: PathBuf,
}

impl Registry {
    /// Opens the registry; creates and pins it if it is not there yet.
    ///
    /// # Errors
    /// [`RegistryError::Pin`] when the directory is on no bpffs or another map is pinned there;
    /// [`RegistryError::Busy`] when the lock is not to be had.
    pub fn open_or_create(bpffs_dir: &Path, run_dir: &Path) -> Result<Self, RegistryError> {
        let lock = run_dir.join(LOCK_FILE);
        let _held = take_lock(&lock, LOCK_PATIENCE)?;
        let pins = Pins::new(bpffs_dir);
        pins::make_root(pins.root())?;
        let path = pins.registry();
        let (map, _, _) = pins::registry_layout().open_or_create(&path)?;
        pins::make_private(&path)?;
        Self::of(map, lock)
    }

    /// Opens the registry that is there.
    ///
    /// # Errors
    /// [`RegistryError::Missing`] when none is pinned, [`RegistryError::Pin`] when another map is.
    pub fn open(bpffs_dir: &Path, run_dir: &Path) -> Result<Self, RegistryError> {
        let path = Pins::new(bpffs_dir).registry();
        match pins::registry_layout().open(&path)? {
            Some((map, _)) => Self::of(map, run_dir.join(LOCK_FILE)),
            None => Err(RegistryError::Missing { path }),
        }
    }

    fn of(map: std::os::fd::OwnedFd, lock: PathBuf) -> Result<Self, RegistryError> {
        let map = Map::new(map).map_err(system("opening the registry"))?;
        Ok(Self { map, lock })
    }

    /// The kernel's id of the map.
    #[must_use]
    pub const fn map_id(&self) -> u32 {
        self.map.info().id
    }

    /// Number of rows it takes.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.map.info().shape.max_entries
    }

    /// Registers the workload that is behind an interface now, as a new incarnation with a random token.
    ///
    /// # Errors
    /// [`RegistryError::NoInterface`] when it is not there; [`RegistryError::Full`]; [`RegistryError::Busy`].
    pub fn register(&self, registration: &Registration) -> Result<Registered, RegistryError> {
        let name = &registration.interface;
        if !is_interface_name(name) {
            return Err(RegistryError::BadName { name: name.clone() });
        }
        let _held = take_lock(&self.lock, LOCK_PATIENCE)?;
        let device = device_named(name)?;
        let token = random_token()?;
        let replaced = self
            .read_raw(device.ifindex)
            .map_err(system("reading the registry"))?;
        let row = RegistryRow {
            token: token.get(),
            mac: registration.mac.unwrap_or_default().0,
            host_mac: device.mac.0,
            kind: registration.kind.number(),
            flags: if registration.host_mac_shared {
                RegistryRow::FLAG_HOST_MAC_SHARED
            } else {
                0
            },
            pad: [0; 2],
            incarnation: registration
                .identity
                .as_deref()
                .map_or([0; 16], |identity| hash::incarnation(identity).0),
        };
        match self.map.update(&device.ifindex, &row) {
            Ok(()) => {}
            Err(Errno::TOOBIG | Errno::NOSPC) => {
                return Err(RegistryError::Full {
                    capacity: self.capacity(),
                });
            }
            Err(errno) => return Err(system("writing the registry")(errno)),
        }
        // The device may have gone between the question and the write. Its row would be harmless (it names the
        // device), but the caller must not be told that it is registered.
        match device_named(name) {
            Ok(now) if now == device => Ok(Registered {
                device,
                token,
                replaced: replaced.and_then(|row| Token::new(row.token)),
            }),
            Ok(_) | Err(RegistryError::NoInterface { .. }) => {
                self.map
                    .delete(&device.ifindex)
                    .map_err(system("removing the row of an interface that has gone"))?;
                Err(RegistryError::NoInterface { name: name.clone() })
            }
            Err(error) => Err(error),
        }
    }

    /// Removes the row of this very incarnation; says whether it was there.
    ///
    /// # Errors
    /// [`RegistryError::OtherIncarnation`] when the number now belongs to another one; [`RegistryError::Busy`].
    pub fn unregister(&self, ifindex: Ifindex, token: Token) -> Result<bool, RegistryError> {
        self.unregister_within(ifindex, token, LOCK_PATIENCE)
    }

    pub(crate) fn unregister_within(
        &self,
        ifindex: Ifindex,
        token: Token,
        patience: Duration,
    ) -> Result<bool, RegistryError> {
        let _held = take_lock(&self.lock, patience)?;
        let row = self.read_raw(ifindex).map_err(system("reading the registry"))?;
        match row {
            None => Ok(false),
            Some(row) if row.token == token.get() => self
                .map
                .delete(&ifindex)
                .map_err(system("removing a row of the registry")),
            Some(_) => Err(RegistryError::OtherIncarnation { ifindex }),
        }
    }

    /// The row of an interface; none if there is none (a typed condition, unlike a failed read).
    ///
    /// # Errors
    /// As bpf(2).
    pub fn read(&self, ifindex: Ifindex) -> Result<Option<Identity>, Errno> {
        Ok(self.read_raw(ifindex)?.and_then(|row| identity(&row)))
    }

    /// A hash value can be read while it is being replaced: token, rest, token must agree, else it is read once more.
    fn read_raw(&self, ifindex: Ifindex) -> Result<Option<RegistryRow>, Errno> {
        // A writer is done within nanoseconds; two equal readings in a row are a row.
        const ATTEMPTS: u32 = 8;
        let mut last = self.map.lookup(&ifindex)?;
        for _ in 0..ATTEMPTS {
            let again = self.map.lookup(&ifindex)?;
            if again == last {
                return Ok(last);
            }
            last = again;
        }
        Err(Errno::AGAIN)
    }

    /// All rows, by interface number.
    ///
    /// # Errors
    /// [`RegistryError::System`].
    pub fn list(&self) -> Result<Vec<Listed>, RegistryError> {
        let mut rows = self.map.dump().map_err(system("reading the registry"))?;
        rows.sort_unstable_by_key(|(ifindex, _)| *ifindex);
        rows.iter()
            .filter_map(|(ifindex, row)| Some((*ifindex, row, identity(row)?)))
            .map(|(ifindex, row, identity)| {
                let found = find::by_index(ifindex)
                    .map_err(|error| system("asking for an interface")(errno_of(&error)))?;
                Ok(Listed {
                    ifindex,
                    interface: found
                        .filter(|found| identity.host_mac_shared || identity.host_mac == found.mac)
                        .map(|found| found.name),
                    identity,
                    kind: Kind::of(row.kind),
                })
            })
            .collect()
    }

    /// What is registered, by interface number.
    ///
    /// # Errors
    /// As bpf(2).
    pub(crate) fn identities(&self) -> Result<BTreeMap<Ifindex, Identity>, Errno> {
        let rows = self.map.dump()?;
        Ok(rows
            .iter()
            .filter_map(|(ifindex, row)| Some((*ifindex, identity(row)?)))
            .collect())
    }

    /// Number of rows.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn len(&self) -> Result<usize, Errno> {
        Ok(self.map.dump()?.len())
    }

    /// Whether there is no row.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn is_empty(&self) -> Result<bool, Errno> {
        Ok(self.len()? == 0)
    }
}

/// A row as the engine knows it; none for a token of 0, which no registrant writes.
fn identity(row: &RegistryRow) -> Option<Identity> {
    Some(Identity {
        token: Token::new(row.token)?,
        mac: Mac(row.mac),
        host_mac: Mac(row.host_mac),
        host_mac_shared: row.flags & RegistryRow::FLAG_HOST_MAC_SHARED != 0,
        incarnation: (row.incarnation != [0; 16]).then_some(Incarnation(row.incarnation)),
    })
}

fn device_named(name: &str) -> Result<Device, RegistryError> {
    let found = find::by_name(name)
        .map_err(|error| system(format!("asking for interface {name}"))(errno_of(&error)))?;
    match found {
        Some(link) => Ok(Device {
            ifindex: link.ifindex,
            mac: link.mac,
        }),
        None => Err(RegistryError::NoInterface {
            name: name.to_owned(),
        }),
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// As `dev_valid_name` of the kernel.
fn is_interface_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 15
        && name != "."
        && name != ".."
        && !name
            .chars()
            .any(|c| c == '/' || c == ':' || c == '\0' || c.is_ascii_whitespace())
}

fn random_token() -> Result<Token, RegistryError> {
    loop {
        let random = SysRng
            .try_next_u64()
            .map_err(|_| system("asking for a random token")(Errno::IO))?;
        if let Some(token) = Token::new(random) {
            return Ok(token);
        }
    }
}

/// Held while it lives. The file stays: removing it would let two holders in.
struct Held(#[expect(dead_code, reason = "closing it gives the lock up")] File);

fn take_lock(path: &Path, patience: Duration) -> Result<Held, RegistryError> {
    let failed = |operation| {
        move |source| RegistryError::Lock {
            operation,
            path: path.to_owned(),
            source,
        }
    };
    if let Some(run_dir) = path.parent() {
        fs::create_dir_all(run_dir).map_err(failed("making the directory of"))?;
    }
    let file = fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(failed("opening"))?;
    let started = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Held(file)),
            Err(Errno::WOULDBLOCK | Errno::INTR) if started.elapsed() < patience => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                return Err(RegistryError::Busy {
                    path: path.to_owned(),
                    patience,
                });
            }
            Err(errno) => return Err(failed("locking")(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_token_0_is_no_identity() {
        assert_eq!(identity(&RegistryRow::default()), None);
    }

    #[test]
    fn a_row_without_identity_string_names_no_incarnation() {
        let row = RegistryRow {
            token: 9,
            ..RegistryRow::default()
        };
        assert_eq!(identity(&row).unwrap().incarnation, None);
    }

    #[test]
    fn names_that_the_kernel_refuses_are_refused() {
        for bad in ["", ".", "..", "a/b", "a b", "a:b", "0123456789abcdef"] {
            assert!(!is_interface_name(bad), "{bad:?}");
        }
        for good in ["a", "hfweb0", "0123456789abcde", "veth.1"] {
            assert!(is_interface_name(good), "{good:?}");
        }
    }

    #[test]
    fn a_held_lock_is_an_error_after_a_while_and_free_afterwards() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run").join(LOCK_FILE);
        let held = take_lock(&path, Duration::ZERO).unwrap();
        let busy = take_lock(&path, Duration::from_millis(5)).err().unwrap();
        assert!(matches!(busy, RegistryError::Busy { .. }), "{busy}");
        drop(held);
        take_lock(&path, Duration::ZERO).unwrap();
    }

    #[test]
    fn tokens_differ() {
        assert_ne!(random_token().unwrap(), random_token().unwrap());
    }
}
