//! Network devices and the node's own addresses, as the kernel tells of them.
//!
//! [`Monitor::start`] subscribes to the notifications of this network namespace first and asks for dumps then, on another
//! socket. What it says comes out of one bounded queue; a slow reader loses no meaning, because what waits
//! is kept once per device. The kernel's messages are spoken here and nowhere else.

mod addresses;
mod dump;
pub mod find;
pub mod hooks;
mod monitor;
mod parse;
mod socket;
mod state;
pub mod tc;

#[cfg(any(test, feature = "chaos"))]
pub mod fake;

/// Faults on purpose, for tests: see `chaos` of the data path.
#[cfg(any(test, feature = "chaos"))]
pub(crate) mod faults {
    use std::sync::atomic::AtomicBool;

    /// Notifications are not heard.
    pub(crate) static DEAF: AtomicBool = AtomicBool::new(false);
    /// Nothing is compared with what was heard.
    pub(crate) static BLIND: AtomicBool = AtomicBool::new(false);
}

/// Whether notifications are not heard, on purpose.
fn is_deaf() -> bool {
    #[cfg(any(test, feature = "chaos"))]
    let deaf = faults::DEAF.load(Ordering::Relaxed);
    #[cfg(not(any(test, feature = "chaos")))]
    let deaf = false;
    deaf
}

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_engine::model::{Ifindex, Link};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::loops;

/// What the monitor says. Order is meaning: later news win.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkNews {
    /// All devices there are (after a start, an overrun, a closed socket).
    Dump(Vec<Link>),
    /// A device is there, new or changed.
    Present(Link),
    /// A device is gone, or moved to another namespace.
    Gone(Ifindex),
    /// All addresses of the node, of whatever device and in whatever state, but link-local ones.
    Locals(BTreeSet<IpAddr>),
    /// A dump that was asked for by [`Asker::check`] found these devices otherwise than the kernel had told, and it said
    /// the same when it was asked for each. What they are now follows.
    Drifted(BTreeSet<Ifindex>),
}

/// How a monitor is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Receive buffer of the subscription in bytes (the kernel doubles it, and has a minimum of its own).
    pub receive_buffer: usize,
    /// News that may wait for the reader; what is beyond waits inside, once per device.
    pub queue: usize,
    /// A dump of which nothing was heard for so long has been cut.
    pub dump_timeout: Duration,
    /// A question after a single device is asked again after so long.
    pub ask_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            // About 5,000 notifications: each takes a socket buffer of some 800 bytes of its own.
            receive_buffer: 4 << 20,
            queue: 256,
            dump_timeout: Duration::from_secs(2),
            ask_timeout: Duration::from_secs(1),
        }
    }
}

/// What the monitor counts.
#[derive(Debug, Default)]
pub struct Counters {
    overruns: AtomicU64,
    resyncs: AtomicU64,
    bursts: AtomicU64,
    rounds: loops::Counter,
}

impl Counters {
    /// Times that the kernel said that it had to drop notifications.
    #[must_use]
    pub fn overruns(&self) -> u64 {
        self.overruns.load(Ordering::Relaxed)
    }

    /// Complete dumps of devices beyond the first.
    #[must_use]
    pub fn resyncs(&self) -> u64 {
        self.resyncs.load(Ordering::Relaxed)
    }

    /// Bursts of trouble: one line is logged at the start of each.
    #[must_use]
    pub fn bursts(&self) -> u64 {
        self.bursts.load(Ordering::Relaxed)
    }

    /// Complete dumps and troubles.
    #[must_use]
    pub fn rounds(&self) -> loops::Count {
        self.rounds.read()
    }

    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Why there is no monitor.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// A socket could not be opened, bound or written to.
    #[error("netlink: cannot {what}: {source}")]
    Socket {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// Questions after single devices, each at most once: asking never waits and takes no memory beyond the devices.
#[derive(Debug, Default)]
struct Asks {
    waiting: Mutex<BTreeSet<Ifindex>>,
    pings: Mutex<Vec<oneshot::Sender<()>>>,
    pinged: AtomicBool,
    check: AtomicBool,
    arrived: Notify,
}

impl Asks {
    fn put(&self, ifindex: Ifindex) {
        self.waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(ifindex);
        self.arrived.notify_one();
    }

    fn ping(&self) -> oneshot::Receiver<()> {
        let (reply, answer) = oneshot::channel();
        let mut pings = self.pings.lock().unwrap_or_else(PoisonError::into_inner);
        // Who has lost patience is not answered any more.
        pings.retain(|ping| !ping.is_closed());
        pings.push(reply);
        self.pinged.store(true, Ordering::Release);
        self.arrived.notify_one();
        answer
    }

    fn answer_pings(&self) {
        if self.pinged.swap(false, Ordering::Acquire) {
            let pings = std::mem::take(&mut *self.pings.lock().unwrap_or_else(PoisonError::into_inner));
            for ping in pings {
                // Nothing is owed to who has gone.
                let _ = ping.send(());
            }
        }
    }

    fn put_check(&self) {
        self.check.store(true, Ordering::Relaxed);
        self.arrived.notify_one();
    }

    fn take_check(&self) -> bool {
        self.check.swap(false, Ordering::Relaxed)
    }

    fn take(&self) -> BTreeSet<Ifindex> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Asks the kernel for single devices. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Asker(Arc<Asks>);

impl Asker {
    /// Asks for this one device, without a dump. The answer is a [`LinkNews::Present`] or [`LinkNews::Gone`] of it
    /// among the other news, also when nothing has changed. Never waits.
    pub fn ask(&self, ifindex: Ifindex) {
        self.0.put(ifindex);
    }

    /// Asks the task whether it comes round: the answer comes when it does, however much it has to hear.
    #[must_use]
    pub fn ping(&self) -> oneshot::Receiver<()> {
        self.0.ping()
    }

    /// Asks for a dump that is compared with what the kernel has told. Nothing differs: nothing is said. Else the
    /// devices that do come as [`LinkNews::Drifted`], and news of each after that. Never waits.
    pub fn check(&self) {
        #[cfg(any(test, feature = "chaos"))]
        if faults::BLIND.load(Ordering::Relaxed) {
            return;
        }
        self.0.put_check();
    }
}

/// A running monitor. It ends when its news are dropped.
#[derive(Debug)]
pub struct Monitor {
    /// What it says. The queue only ends by a fault of ours: trouble with the kernel is mended inside.
    pub news: mpsc::Receiver<LinkNews>,
    /// Asks for single devices.
    pub asker: Asker,
    /// What it counts.
    pub counters: Arc<Counters>,
}

impl Monitor {
    /// Opens both sockets in the caller's network namespace, subscribes, asks for the first dump, and starts the
    /// task that listens. Later trouble (an overrun, a closed socket, a cut dump) is mended inside and counted.
    ///
    /// # Errors
    /// When a socket cannot be opened at all: there is nothing to run on.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and time enabled.
    pub fn start(options: Options) -> Result<Self, NetlinkError> {
        let (sender, monitor) = Self::unstarted(options.queue);
        let asks = Arc::clone(&monitor.asker.0);
        monitor::spawn(options, sender, asks, Arc::clone(&monitor.counters))?;
        Ok(monitor)
    }

    fn unstarted(queue: usize) -> (mpsc::Sender<LinkNews>, Self) {
        let (sender, news) = mpsc::channel(queue.max(1));
        let monitor = Self {
            news,
            asker: Asker(Arc::default()),
            counters: Arc::default(),
        };
        (sender, monitor)
    }
}
