//! One device, asked for and answered within the call.
//!
//! For those who cannot wait for the monitor's queue, or run without one. Number, name and hardware address come in one
//! answer, so they belong together; `/sys/class/net` would show the network namespace of whoever mounted it.

use std::io;

use holdfast_engine::model::{Ifindex, Link};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use super::dump::{Question, request};
use super::parse::{Content, messages};

/// The device with this number in the calling thread's network namespace; none when there is none.
///
/// The kernel answers under RTNL: behind an attach it can take some 10 ms.
///
/// # Errors
/// When the kernel cannot be asked, or its answer makes no sense.
pub fn by_index(ifindex: Ifindex) -> io::Result<Option<Link>> {
    if ifindex == 0 {
        return Ok(None);
    }
    ask(&request(SEQUENCE, Question::One(ifindex)))
}

/// The device with this name in the calling thread's network namespace; none when there is none.
///
/// # Errors
/// When the kernel cannot be asked, or its answer makes no sense.
pub fn by_name(name: &str) -> io::Result<Option<Link>> {
    // No device has a longer name, and the kernel would refuse the question with ERANGE.
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Ok(None);
    }
    let mut bytes = request(SEQUENCE, Question::One(0));
    let length = name.len() + 1;
    bytes.extend((4 + length as u16).to_ne_bytes());
    bytes.extend(libc::IFLA_IFNAME.to_ne_bytes());
    bytes.extend(name.as_bytes());
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let total = (bytes.len() as u32).to_ne_bytes();
    for (to, from) in bytes.iter_mut().zip(total) {
        *to = from;
    }
    ask(&bytes)
}

/// The socket is asked once: any number will do.
const SEQUENCE: u32 = 1;

fn ask(request: &[u8]) -> io::Result<Option<Link>> {
    // A socket a question, so that no answer to an earlier one is taken for this one's, and the namespace is that of
    // the calling thread. Only the kernel is port 0, and only it may write to a connected socket.
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(request, 0)?;
    let (datagram, _) = socket.recv_from_full()?;
    let senseless = || io::Error::from(io::ErrorKind::InvalidData);
    match messages(&datagram).next() {
        Some(Ok(message)) if message.sequence == SEQUENCE => match message.content {
            Content::Present(link) | Content::Orphaned(link) => Ok(Some(link)),
            Content::Answer(libc::ENODEV) => Ok(None),
            Content::Answer(errno) if errno != 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Err(senseless()),
        },
        _ => Err(senseless()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_found_by_number_and_by_name() {
        let by_number = by_index(1).unwrap().unwrap();
        assert_eq!(by_number.name, "lo");
        assert!(by_number.mac.is_unknown());
        assert_eq!(by_name("lo").unwrap(), Some(by_number));
    }

    #[test]
    fn a_device_that_is_not_there_is_an_answer_not_an_error() {
        for ifindex in [0, 0x7fff_fff0] {
            assert_eq!(by_index(ifindex).unwrap(), None);
        }
        for name in ["hfnosuchdevice", "", "longer-than-any-interface"] {
            assert_eq!(by_name(name).unwrap(), None, "{name}");
        }
    }
}
