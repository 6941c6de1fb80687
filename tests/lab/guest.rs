//! A workload behind a tap, as a hypervisor has it: the guest's kernel lives in its own namespace behind a second tap,
//! and two threads carry frames between the two, as they are, with all that the guest has left to its device.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::ioctl::{IntegerSetter, Updater, ioctl};

use crate::{Reason, Space, offload, skip};

/// From `linux/if_tun.h`: libc does not have them.
const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETOFFLOAD: u32 = 0x4004_54d0;
const IFF_TAP: u16 = 0x0002;
const IFF_NAPI: u16 = 0x0010;
const IFF_NAPI_FRAGS: u16 = 0x0020;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
/// `TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6`.
const OFFLOADS: usize = 0x1 | 0x2 | 0x4;

/// `struct virtio_net_hdr`, which stands before each frame.
const HEADER: usize = 10;
/// Of an Ethernet header: what a guest can leave linear of its frames, at the least.
const ETHERNET: usize = 14;
/// The kernel takes no longer piece of a frame.
const PAGE: usize = 4096;
/// The largest frame, with its header.
const LARGEST: usize = HEADER + ETHERNET + (64 << 10);

/// How long a thread waits before it looks whether it shall end.
const TICK: Duration = Duration::from_millis(20);

/// How the guest's frames are laid out in the node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frames {
    /// As the kernel likes it: small ones in one piece.
    Whole,
    /// Fourteen bytes, and the rest elsewhere.
    Scattered,
}

/// The two taps of one guest.
#[derive(Debug)]
pub struct Guest {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Guest {
    /// Makes tap `name` on the node and tap `inside` in the guest's namespace, and joins them until this value is
    /// dropped: then both are gone.
    ///
    /// # Errors
    /// [`Reason::NoTap`], which skips the test; the kernel's refusal.
    pub fn start(
        node: &Space,
        name: &str,
        guest: &Space,
        inside: &str,
        frames: Frames,
    ) -> anyhow::Result<Self> {
        let scattered = match frames {
            Frames::Whole => 0,
            Frames::Scattered => IFF_NAPI | IFF_NAPI_FRAGS,
        };
        let outer = Arc::new(tap(node, name, scattered)?);
        let inner = Arc::new(tap(guest, inside, 0)?);
        if frames == Frames::Scattered {
            // Else the kernel pulls the headers together before anybody sees the frame (`dev_gro_receive`).
            offload::switch_gro(node, name, false)?;
        }
        let stop = Arc::<AtomicBool>::default();
        let carry = |from: &Arc<File>, to: &Arc<File>, frames| {
            let (from, to, stop) = (Arc::clone(from), Arc::clone(to), Arc::clone(&stop));
            std::thread::spawn(move || carry(&from, &to, frames, &stop))
        };
        let threads = vec![
            carry(&inner, &outer, frames),
            carry(&outer, &inner, Frames::Whole),
        ];
        Ok(Self { stop, threads })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            _ = thread.join();
        }
    }
}

/// `struct ifreq` with flags in its union.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

/// Makes a tap whose frames carry what their sender has left to the device.
fn tap(space: &Space, name: &str, flags: u16) -> anyhow::Result<File> {
    let mut request = Request {
        name: [0; libc::IFNAMSIZ],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | flags,
        rest: [0; 22],
    };
    // The last byte stays 0.
    ensure!(name.len() < request.name.len(), "{name} is no name of a device");
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    space.inside(|| {
        let file = File::options()
            .read(true)
            .write(true)
            .open("/dev/net/tun")
            .map_err(|_| skip(Reason::NoTap))?;
        configure(&file, &mut request).with_context(|| format!("cannot make tap {name}"))?;
        Ok(file)
    })
}

#[expect(unsafe_code, reason = "ioctl(2)")]
fn configure(file: &File, request: &mut Request) -> rustix::io::Result<()> {
    // SAFETY: `TUNSETIFF` takes a `struct ifreq` and writes it; `TUNSETOFFLOAD` takes a number (`__tun_chr_ioctl`).
    unsafe {
        ioctl(file, Updater::<TUNSETIFF, Request>::new(request))?;
        ioctl(file, IntegerSetter::<TUNSETOFFLOAD>::new_usize(OFFLOADS))
    }
}

/// Carries frames in one direction.
fn carry(mut from: &File, to: &File, frames: Frames, stop: &AtomicBool) {
    let mut buffer = vec![0; LARGEST];
    while !stop.load(Ordering::Relaxed) {
        if !something_comes(from) {
            continue;
        }
        // A device that is down takes and gives nothing: what was on its way is lost, as on a wire.
        let Ok(length) = from.read(&mut buffer) else {
            std::thread::sleep(TICK);
            continue;
        };
        _ = put(to, &buffer[..length], frames);
    }
}

/// Waits for a frame, for a moment.
#[expect(unsafe_code, reason = "poll(2)")]
fn something_comes(from: &File) -> bool {
    let mut waiting = libc::pollfd {
        fd: from.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one `struct pollfd`, and its number.
    unsafe { libc::poll(&raw mut waiting, 1, TICK.as_millis() as i32) == 1 }
}

fn put(mut to: &File, frame: &[u8], frames: Frames) -> std::io::Result<usize> {
    match frame.split_at_checked(HEADER + ETHERNET) {
        Some((head, rest)) if frames == Frames::Scattered => {
            let (header, ethernet) = head.split_at(HEADER);
            let pieces = [header, ethernet].into_iter().chain(rest.chunks(PAGE));
            let pieces: Vec<IoSlice<'_>> = pieces.map(IoSlice::new).collect();
            to.write_vectored(&pieces)
        }
        _ => to.write(frame),
    }
}
