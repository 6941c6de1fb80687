//! A netlink socket of the route family.

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use rustix::net::sockopt;

use super::NetlinkError;

/// What the monitor subscribes to, as bits of the mask that bind(2) takes.
const GROUPS: u32 =
    group(libc::RTNLGRP_LINK) | group(libc::RTNLGRP_IPV4_IFADDR) | group(libc::RTNLGRP_IPV6_IFADDR);

pub(super) const fn group(number: libc::c_uint) -> u32 {
    1 << (number - 1)
}

/// More than the kernel ever puts into one datagram: dumps come in at most 32 KiB (`netlink_recvmsg`), and a
/// notification about one device without its virtual functions is about 1 KiB.
const DATAGRAM: usize = 64 << 10;

/// What a read gave.
#[derive(Debug)]
pub(super) enum Received {
    /// A datagram of the kernel's; it is in the buffer.
    Datagram,
    /// A datagram that did not fit.
    Truncated,
    /// Nothing of the kernel's: anybody in the namespace may send a datagram.
    Foreign,
    /// Nothing more for now.
    Empty,
    /// The kernel had to drop datagrams.
    Overrun,
    /// The socket is of no more use.
    Closed(io::Error),
}

/// The socket.
pub(super) struct Socket(TokioSocket);

impl Socket {
    /// A socket that hears of links and addresses: bound to the groups before it is returned.
    pub(super) fn subscribe(receive_buffer: usize) -> Result<Self, NetlinkError> {
        Self::hear_of(GROUPS, receive_buffer)
    }

    /// A socket that hears of these groups.
    pub(super) fn hear_of(groups: u32, receive_buffer: usize) -> Result<Self, NetlinkError> {
        let mut socket = open()?;
        // FORCE goes beyond the system's limit and wants CAP_NET_ADMIN; without it the limit applies.
        let fd = socket.socket_ref();
        sockopt::set_socket_recv_buffer_size_force(fd, receive_buffer)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(fd, receive_buffer))
            .map_err(|errno| failed("size the receive buffer")(errno.into()))?;
        bind(&mut socket, groups)?;
        Ok(Self(socket))
    }

    /// A socket for questions.
    pub(super) fn questions() -> Result<Self, NetlinkError> {
        let mut socket = open()?;
        bind(&mut socket, 0)?;
        Ok(Self(socket))
    }

    /// Sends a request. The kernel takes it in within the call, so that it never waits.
    pub(super) fn send(&self, request: &[u8]) -> Result<(), NetlinkError> {
        let sent = self.0.socket_ref().send(request, 0);
        sent.map(drop).map_err(failed("send a request"))
    }

    /// Waits for a datagram. Safe to cancel.
    pub(super) async fn next(&self, buffer: &mut Vec<u8>) -> Received {
        buffer.clear();
        buffer.reserve_exact(DATAGRAM);
        let from = self.0.recv_from(buffer).await;
        received(from, buffer)
    }

    /// Takes a datagram that is there already.
    pub(super) fn next_now(&self, buffer: &mut Vec<u8>) -> Received {
        buffer.clear();
        buffer.reserve_exact(DATAGRAM);
        let from = self.0.socket_ref().recv_from(buffer, 0);
        received(from.map(|(_, from)| from), buffer)
    }
}

fn open() -> Result<TokioSocket, NetlinkError> {
    TokioSocket::new(NETLINK_ROUTE).map_err(failed("open a socket"))
}

fn bind(socket: &mut TokioSocket, groups: u32) -> Result<(), NetlinkError> {
    let bound = socket.socket_mut().bind(&SocketAddr::new(0, groups));
    bound.map_err(failed("bind a socket"))
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> NetlinkError {
    move |source| NetlinkError::Socket { what, source }
}

fn received(from: io::Result<SocketAddr>, buffer: &[u8]) -> Received {
    match from {
        // The kernel is port 0.
        Ok(from) if from.port_number() != 0 => Received::Foreign,
        Ok(_) if buffer.is_empty() => Received::Closed(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) if buffer.len() >= DATAGRAM => Received::Truncated,
        Ok(_) => Received::Datagram,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Received::Empty,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Received::Foreign,
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Received::Overrun,
        Err(error) => Received::Closed(error),
    }
}
