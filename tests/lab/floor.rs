//! The floor: what an event costs that does nothing but write one map element. Everything that the agent does between
//! an event and an open row is measured beside it, in the same run and by the same stick.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use holdfast::datapath::raw::{self, Map, MapShape};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::Space;
use crate::rtnl::{End, Rtnl};

/// How long one event may take before something is wrong.
const PATIENCE: Duration = Duration::from_secs(2);

/// `RTNLGRP_LINK` as a bit of the mask that bind(2) takes.
const GROUP_LINK: u32 = 1 << (libc::RTNLGRP_LINK - 1);

/// `BPF_MAP_TYPE_HASH`.
const HASH: u32 = 1;

/// The interface that is switched.
const INTERFACE: &str = "hffloor";

/// A bare listener that writes one map element at each link event, in namespaces of its own.
#[derive(Debug)]
pub struct Floor {
    rtnl: Rtnl,
    written: Arc<Map<u32, u64>>,
    count: u64,
    stop: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
    _elsewhere: Space,
}

impl Floor {
    /// Starts it.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn new() -> anyhow::Result<Self> {
        let (here, elsewhere) = (Space::network()?, Space::network()?);
        let mut rtnl = Rtnl::open(&here)?;
        rtnl.veth(End::named(INTERFACE), End::named("eth0"), Some(elsewhere.net()))?;
        let shape = MapShape {
            map_type: HASH,
            key_size: 4,
            value_size: 8,
            max_entries: 16,
            flags: 0,
        };
        let written = Arc::new(Map::new(raw::map_create("hf_floor", shape)?)?);
        let socket = here.inside(|| {
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
            rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUP_LINK))?;
            set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        let stop = Arc::<AtomicBool>::default();
        let listener = std::thread::spawn({
            let (stop, written) = (Arc::clone(&stop), Arc::clone(&written));
            move || {
                let mut buffer = vec![0; 64 << 10];
                let mut events = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    if rustix::net::recv(&socket, &mut buffer, RecvFlags::empty()).is_ok() {
                        events += 1;
                        // What cannot be written is never seen, and the round says so.
                        _ = written.update(&0, &events);
                    }
                }
            }
        });
        Ok(Self {
            rtnl,
            written,
            count: 0,
            stop,
            listener: Some(listener),
            _elsewhere: elsewhere,
        })
    }

    /// From the request that switches a link until its event has been written.
    ///
    /// # Errors
    /// When it is not written.
    pub fn round(&mut self) -> anyhow::Result<Duration> {
        self.rtnl.down(INTERFACE)?;
        self.settle()?;
        let before = self.count;
        let start = Instant::now();
        self.rtnl.up(INTERFACE)?;
        while self.now()? == before {
            ensure!(start.elapsed() < PATIENCE, "no event has been written");
        }
        let took = start.elapsed();
        self.settle()?;
        Ok(took)
    }

    /// Lets the events of one change come to their end.
    fn settle(&mut self) -> anyhow::Result<()> {
        let mut last = Instant::now();
        while last.elapsed() < Duration::from_millis(3) {
            let now = self.now()?;
            if now != self.count {
                (self.count, last) = (now, Instant::now());
            }
        }
        Ok(())
    }

    fn now(&self) -> anyhow::Result<u64> {
        Ok(self.written.lookup(&0)?.unwrap_or_default())
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(listener) = self.listener.take() {
            _ = listener.join().map_err(|_| anyhow!("the listener panicked"));
        }
    }
}

/// The median of some rounds.
///
/// # Errors
/// When a round fails.
pub fn event_to_write() -> anyhow::Result<Duration> {
    let mut floor = Floor::new()?;
    let rounds = (0..51).map(|_| floor.round()).collect::<anyhow::Result<_>>()?;
    Ok(Distribution::new(rounds).at(0.5))
}

/// Durations, in order.
#[derive(Clone, Debug, Default)]
pub struct Distribution(Vec<Duration>);

impl Distribution {
    /// Of these.
    #[must_use]
    pub fn new(mut durations: Vec<Duration>) -> Self {
        durations.sort_unstable();
        Self(durations)
    }

    /// The one below which this part of them is; zero if there are none.
    #[must_use]
    pub fn at(&self, part: f64) -> Duration {
        let last = self.0.len().saturating_sub(1);
        let index = (last as f64 * part).round() as usize;
        self.0.get(index).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Distribution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let micros = |part| self.at(part).as_micros();
        write!(
            f,
            "p50 {} us, p90 {} us, p99 {} us, worst {} us ({} rounds)",
            micros(0.5),
            micros(0.9),
            micros(0.99),
            micros(1.0),
            self.0.len()
        )
    }
}
