//! Namespaces that have no name: an open file holds each, so that none outlives the process that made it, however
//! that process ends.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// Where a node keeps its files: a file system of its own in its mount namespace.
pub const ROOT: &str = "/run";

/// A network namespace, and for a node also a mount namespace. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Space {
    net: Arc<OwnedFd>,
    mounts: Option<Arc<Mounts>>,
}

#[derive(Debug)]
struct Mounts {
    namespace: OwnedFd,
    /// The root of the node's own file system.
    root: OwnedFd,
}

impl Space {
    /// A new network namespace with its loopback up.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn network() -> anyhow::Result<Self> {
        let net = on_thread(|| {
            unshare(UnshareFlags::NEWNET).context("cannot make a network namespace")?;
            open("/proc/thread-self/ns/net")
        })?;
        let space = Self {
            net: Arc::new(net),
            mounts: None,
        };
        crate::rtnl::Rtnl::open(&space)?.up("lo")?;
        Ok(space)
    }

    /// The network namespace behind this file, which lives on as long as this value does.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn of_file(file: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            net: Arc::new(open(file)?),
            mounts: None,
        })
    }

    /// A new network namespace and a new mount namespace: what is mounted there is seen nowhere else. It has a
    /// temporary file system at [`ROOT`], and in its `bpf` a bpffs.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn node() -> anyhow::Result<Self> {
        let network = Self::network()?;
        let mounts = on_thread(|| {
            unshare(UnshareFlags::NEWNS).context("cannot make a mount namespace")?;
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private).context("cannot make the mounts private")?;
            mount("hf", ROOT, "tmpfs", MountFlags::empty(), c"mode=0755").context("cannot mount a tmpfs")?;
            let bpf = Path::new(ROOT).join("bpf");
            std::fs::create_dir(&bpf)?;
            mount("hf", &bpf, "bpf", MountFlags::empty(), c"mode=0700").context("cannot mount a bpffs")?;
            Ok(Mounts {
                namespace: open("/proc/thread-self/ns/mnt")?,
                root: open(ROOT)?,
            })
        })?;
        Ok(Self {
            mounts: Some(Arc::new(mounts)),
            ..network
        })
    }

    /// Does something in these namespaces, on a thread of its own. Sockets opened there stay there.
    ///
    /// # Errors
    /// What `work` says, or when the namespaces cannot be entered.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        on_thread(|| {
            self.enter().context("cannot enter a namespace")?;
            work()
        })
    }

    /// Moves the calling thread into these namespaces, for good. Also for between fork and exec: no allocation.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn enter(&self) -> rustix::io::Result<()> {
        move_into_link_name_space(self.net.as_fd(), Some(LinkNameSpaceType::Network))?;
        if let Some(mounts) = &self.mounts {
            // A thread that shares its working directory with others may not change its mount namespace.
            unshare(UnshareFlags::FS)?;
            move_into_link_name_space(mounts.namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
        }
        Ok(())
    }

    /// The network namespace, for moving devices there.
    #[must_use]
    pub fn net(&self) -> BorrowedFd<'_> {
        self.net.as_fd()
    }

    /// The network namespace as a file that other processes can open too, as long as this one lives.
    #[must_use]
    pub fn net_file(&self) -> PathBuf {
        PathBuf::from(format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.net.as_raw_fd()
        ))
    }

    /// A path under the node's [`ROOT`] as this process can open it.
    ///
    /// # Errors
    /// When this is not a node.
    pub fn from_outside(&self, path: &Path) -> anyhow::Result<PathBuf> {
        let mounts = self.mounts.as_ref().context("not a node")?;
        let below = path
            .strip_prefix(ROOT)
            .with_context(|| format!("{} is not the node's own", path.display()))?;
        Ok(Path::new(&format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            mounts.root.as_raw_fd()
        ))
        .join(below))
    }
}

fn open(path: impl AsRef<Path>) -> anyhow::Result<OwnedFd> {
    let (path, flags) = (path.as_ref(), OFlags::RDONLY | OFlags::CLOEXEC);
    openat(CWD, path, flags, Mode::empty()).with_context(|| format!("cannot open {}", path.display()))
}

/// Unshares parts of the calling thread's context.
#[expect(
    unsafe_code,
    reason = "unshare(2) is unsafe for CLONE_FILES alone, which nobody asks for here"
)]
fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: the file table stays shared, so that no file descriptor changes its meaning.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Runs something on a thread of its own, so that the namespaces it enters are left with it.
fn on_thread<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    std::thread::scope(|scope| scope.spawn(work).join()).map_err(|_| anyhow!("a helper thread panicked"))?
}
