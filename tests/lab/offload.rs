//! What a device leaves to the next one: checksums and segmentation (`linux/ethtool.h`).

use std::os::fd::OwnedFd;

use anyhow::{Context, ensure};
use rustix::ioctl::{Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::Space;

/// From `linux/sockios.h` and `linux/ethtool.h`: libc does not have them.
const SIOCETHTOOL: u32 = 0x8946;
const ETHTOOL_SGRO: u32 = 0x2c;
const SETTERS: [u32; 5] = [
    0x17, // ETHTOOL_STXCSUM
    0x19, // ETHTOOL_SSG
    0x1f, // ETHTOOL_STSO
    0x24, // ETHTOOL_SGSO
    0x15, // ETHTOOL_SRXCSUM
];

/// `struct ethtool_value`.
#[repr(C)]
#[derive(Debug)]
struct Value {
    command: u32,
    data: u32,
}

/// `struct ifreq` with a pointer in its union.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    data: *mut Value,
    rest: [u8; 16],
}

/// Switches checksums and segmentation of a device: left to the device, or done by the kernel before it.
///
/// # Errors
/// When the device is not there or refuses.
pub fn switch(space: &Space, device: &str, on: bool) -> anyhow::Result<()> {
    SETTERS
        .into_iter()
        .try_for_each(|command| set(space, device, command, on))
}

/// Switches whether the kernel puts packets of one stream together as they come.
///
/// # Errors
/// When the device is not there or refuses.
pub fn switch_gro(space: &Space, device: &str, on: bool) -> anyhow::Result<()> {
    set(space, device, ETHTOOL_SGRO, on)
}

fn set(space: &Space, device: &str, command: u32, on: bool) -> anyhow::Result<()> {
    let socket = space.inside(|| {
        let flags = SocketFlags::CLOEXEC;
        Ok(rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            flags,
            None,
        )?)
    })?;
    ask(&socket, device, command, on)
        .with_context(|| format!("cannot switch offload {command:#x} of {device}"))
}

#[expect(unsafe_code, reason = "ioctl(2) with a pointer in its argument")]
fn ask(socket: &OwnedFd, device: &str, command: u32, on: bool) -> anyhow::Result<()> {
    let mut value = Value {
        command,
        data: on.into(),
    };
    let mut request = Request {
        name: [0; libc::IFNAMSIZ],
        data: &raw mut value,
        rest: [0; 16],
    };
    // The last byte stays 0.
    ensure!(
        device.len() < request.name.len(),
        "{device} is no name of a device"
    );
    request.name[..device.len()].copy_from_slice(device.as_bytes());
    // SAFETY: `SIOCETHTOOL` takes a `struct ifreq` whose pointer leads to the command's own structure, here a `struct
    // ethtool_value`; both live until the call returns.
    unsafe { ioctl(socket, Updater::<SIOCETHTOOL, Request>::new(&mut request))? };
    Ok(())
}
