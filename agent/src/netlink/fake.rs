//! A kernel that says what a test tells it to.

use std::collections::BTreeSet;
use std::sync::Arc;

use holdfast_engine::model::Ifindex;
use tokio::sync::mpsc;

use super::{Asks, Counters, LinkNews, Monitor};

/// The kernel's side of a [`Monitor`] that no kernel is behind.
#[derive(Debug)]
pub struct Kernel {
    news: mpsc::Sender<LinkNews>,
    asks: Arc<Asks>,
    counters: Arc<Counters>,
}

/// A monitor and its kernel. `queue` news may wait.
#[must_use]
pub fn monitor(queue: usize) -> (Monitor, Kernel) {
    let (news, monitor) = Monitor::unstarted(queue);
    let asks = Arc::clone(&monitor.asker.0);
    let counters = Arc::clone(&monitor.counters);
    (monitor, Kernel { news, asks, counters })
}

impl Kernel {
    /// Says something; waits while the queue is full. False: nobody listens any more.
    pub async fn say(&self, news: LinkNews) -> bool {
        self.news.send(news).await.is_ok()
    }

    /// Takes what was asked since the last call.
    #[must_use]
    pub fn asked(&self) -> BTreeSet<Ifindex> {
        self.asks.take()
    }

    /// Waits until something is asked that was not taken yet.
    pub async fn until_asked(&self) -> BTreeSet<Ifindex> {
        loop {
            let asked = self.asks.take();
            if !asked.is_empty() {
                return asked;
            }
            self.asks.arrived.notified().await;
        }
    }

    /// Counts an overrun, as if notifications had been lost.
    pub fn overrun(&self) {
        Counters::count(&self.counters.overruns);
    }
}
