//! News of the ingress hooks of devices: somebody has put, changed or removed a filter or a qdisc there.
//!
//! On a socket of its own: a storm of filters must not cost news of devices. Nothing but promptness depends on it, for
//! the audit looks at every hook in its turn; so news that were lost are one piece of news: anything may have changed.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_engine::model::Ifindex;
use tokio::sync::mpsc;

use super::NetlinkError;
use super::parse::{Malformed, take_frame};
use super::socket::{Received, Socket, group};
use super::tc::{self, Filter, Told};

const GROUP_TC: u32 = group(libc::RTNLGRP_TC);

/// Some thousand notifications.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Datagrams that become one piece of news.
const AT_ONCE: usize = 256;

/// How long a socket that could not be opened is left alone.
const PAUSE: Duration = Duration::from_secs(1);

/// What has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookNews {
    /// The ingress hooks of these devices.
    Changed(BTreeSet<Ifindex>),
    /// Notifications were lost.
    Lost,
}

/// Tells the filters that the agent itself puts: they are no news.
pub type IsOurs = Box<dyn Fn(&Filter) -> bool + Send>;

/// Subscribes in the caller's network namespace, and starts the task that listens. It ends when its news are dropped.
///
/// # Errors
/// When the socket cannot be opened.
///
/// # Panics
/// Outside of a tokio runtime with I/O and time enabled.
pub fn watch(is_ours: IsOurs) -> Result<mpsc::Receiver<HookNews>, NetlinkError> {
    let socket = Socket::hear_of(GROUP_TC, RECEIVE_BUFFER)?;
    // What comes while nobody reads waits in the socket.
    let (sender, news) = mpsc::channel(1);
    tokio::spawn(listen(socket, is_ours, sender));
    Ok(news)
}

async fn listen(mut socket: Socket, is_ours: IsOurs, news: mpsc::Sender<HookNews>) {
    let mut buffer = Vec::new();
    loop {
        let mut received = tokio::select! {
            received = socket.next(&mut buffer) => received,
            () = news.closed() => return,
        };
        let mut gathered = Gathered::default();
        for _ in 0..AT_ONCE {
            if matches!(received, Received::Empty) {
                break;
            }
            gathered.take(received, &buffer, &is_ours);
            received = socket.next_now(&mut buffer);
        }
        if let Some(error) = gathered.closed.take() {
            tracing::warn!(%error, "notifications of filters are incomplete: subscribing anew");
            socket = reopened().await;
        }
        if let Some(told) = gathered.news()
            && news.send(told).await.is_err()
        {
            return;
        }
    }
}

async fn reopened() -> Socket {
    loop {
        match Socket::hear_of(GROUP_TC, RECEIVE_BUFFER) {
            Ok(socket) => return socket,
            Err(error) => tracing::debug!(%error, "not yet"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Of some datagrams.
#[derive(Debug, Default)]
struct Gathered {
    changed: BTreeSet<Ifindex>,
    lost: bool,
    closed: Option<std::io::Error>,
}

impl Gathered {
    fn take(&mut self, received: Received, datagram: &[u8], is_ours: &IsOurs) {
        match received {
            Received::Datagram => self.lost |= self.read(datagram, is_ours).is_err(),
            Received::Foreign | Received::Empty => {}
            Received::Truncated | Received::Overrun => self.lost = true,
            Received::Closed(error) => {
                self.lost = true;
                self.closed = Some(error);
            }
        }
    }

    fn read(&mut self, datagram: &[u8], is_ours: &IsOurs) -> Result<(), Malformed> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let (frame, next) = take_frame(rest)?;
            rest = next;
            // A qdisc that is new has no filters yet.
            if !matches!(
                frame.kind,
                libc::RTM_DELQDISC | libc::RTM_NEWTFILTER | libc::RTM_DELTFILTER
            ) {
                continue;
            }
            let Some(Told { ifindex, filter }) = tc::told(frame.kind, frame.payload)? else {
                continue;
            };
            let put_by_us =
                frame.kind == libc::RTM_NEWTFILTER && filter.is_some_and(|filter| is_ours(&filter));
            if !put_by_us {
                self.changed.insert(ifindex);
            }
        }
        Ok(())
    }

    fn news(self) -> Option<HookNews> {
        if self.lost {
            Some(HookNews::Lost)
        } else if self.changed.is_empty() {
            None
        } else {
            Some(HookNews::Changed(self.changed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A notification: nlmsghdr, tcmsg, kind.
    fn notification(kind: u16, ifindex: u32, parent: u32, handle: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(44_u32.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend([0; 4]);
        for word in [ifindex, handle, parent, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(8_u16.to_ne_bytes());
        bytes.extend(libc::TCA_KIND.to_ne_bytes());
        bytes.extend(b"bpf\0");
        bytes
    }

    const OURS: u32 = 7;

    fn told(datagrams: &[Vec<u8>]) -> Option<HookNews> {
        let is_ours: IsOurs = Box::new(|filter| filter.handle == OURS);
        let mut gathered = Gathered::default();
        for datagram in datagrams {
            gathered.take(Received::Datagram, datagram, &is_ours);
        }
        gathered.news()
    }

    #[test]
    fn only_what_others_do_at_the_ingress_hook_is_news() {
        let news = [
            notification(libc::RTM_DELQDISC, 7, 0xffff_fff1, 0xffff_0000),
            notification(libc::RTM_NEWTFILTER, 8, 0xffff_fff2, 1),
            // As the older qdisc is spelled.
            notification(libc::RTM_DELTFILTER, 9, 0xffff_0000, 1),
            // Whoever removes ours.
            notification(libc::RTM_DELTFILTER, 10, 0xffff_fff2, OURS),
        ];
        assert_eq!(told(&news), Some(HookNews::Changed([7, 8, 9, 10].into())));
        let others = [
            // A qdisc that is new, another one that goes.
            notification(libc::RTM_NEWQDISC, 7, 0xffff_fff1, 0xffff_0000),
            notification(libc::RTM_DELQDISC, 7, 0xffff_ffff, 0x8001_0000),
            // Ours, an egress filter, a filter of a shared block, a device.
            notification(libc::RTM_NEWTFILTER, 7, 0xffff_fff2, OURS),
            notification(libc::RTM_NEWTFILTER, 7, 0xffff_fff3, 1),
            notification(libc::RTM_NEWTFILTER, 0xffff_ffff, 0xffff_fff2, 1),
            notification(libc::RTM_NEWLINK, 7, 0xffff_fff2, 1),
        ];
        assert_eq!(told(&others), None);
    }

    #[test]
    fn what_cannot_be_understood_may_be_anything() {
        let mut cut = notification(libc::RTM_DELQDISC, 7, 0xffff_fff1, 0xffff_0000);
        cut.truncate(30);
        assert_eq!(told(&[cut]), Some(HookNews::Lost));
        let is_ours: IsOurs = Box::new(|_| false);
        let mut gathered = Gathered::default();
        gathered.take(Received::Overrun, &[], &is_ours);
        assert_eq!(gathered.news(), Some(HookNews::Lost));
    }
}
