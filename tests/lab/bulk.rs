//! A lot of bytes by one TCP connection, each of them compared.
//!
//! Both ends run on one CPU: segments that the kernel takes on two would overtake each other, and be sent again.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::Space;
use crate::traffic::on_one_cpu;

/// What is sent over and over. Of a prime length, so that bytes in a wrong place differ.
const PATTERN: usize = 65_521;

/// How much is written and read at once.
const CHUNK: usize = 256 << 10;

/// How long nothing may come, and how long a listener waits before it looks whether it shall end.
const STALLED: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(20);

/// Takes connections, compares what comes with what should, and says at the end how much was right.
#[derive(Debug)]
pub struct Sink {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sink {
    /// Listens in this namespace.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(space: &Space, at: SocketAddr) -> anyhow::Result<Self> {
        let listener =
            space.inside(|| TcpListener::bind(at).with_context(|| format!("cannot listen on {at}")))?;
        set_socket_timeout(listener.as_fd(), Timeout::Recv, Some(TICK))?;
        let stop = Arc::<AtomicBool>::default();
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                on_one_cpu();
                while !stop.load(Ordering::Relaxed) {
                    if let Ok((stream, _)) = listener.accept() {
                        // A connection that breaks is told by its other end.
                        _ = take(stream);
                    }
                }
            }
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// Reads to the end, and answers with the count of bytes that were right up to the first wrong one.
fn take(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(STALLED))?;
    let pattern = pattern();
    let mut buffer = vec![0; CHUNK];
    let (mut right, mut wrong) = (0_u64, false);
    loop {
        let length = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if !wrong {
            wrong = buffer[..length] != pattern[phase(right)..][..length];
        }
        if !wrong {
            right += length as u64;
        }
    }
    stream.write_all(&right.to_be_bytes())
}

/// Sends so many bytes from this namespace, and says how long it took until the other end had them all.
///
/// # Errors
/// When the connection breaks or stalls, or something else arrives than was sent.
pub fn send(space: &Space, to: SocketAddr, bytes: u64) -> anyhow::Result<Duration> {
    space.inside(|| {
        on_one_cpu();
        let stream =
            TcpStream::connect_timeout(&to, STALLED).with_context(|| format!("no connection to {to}"))?;
        give(stream, bytes)
    })
}

fn give(mut stream: TcpStream, bytes: u64) -> anyhow::Result<Duration> {
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))?;
    let pattern = pattern();
    let start = Instant::now();
    let mut sent = 0;
    while sent < bytes {
        let length = (bytes - sent).min(CHUNK as u64) as usize;
        let count = stream
            .write(&pattern[phase(sent)..][..length])
            .with_context(|| format!("after {sent} bytes"))?;
        sent += count as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut right = [0; 8];
    stream.read_exact(&mut right).context("no answer")?;
    let right = u64::from_be_bytes(right);
    ensure!(
        right == bytes,
        "of {bytes} bytes, {right} came before a wrong one"
    );
    Ok(start.elapsed())
}

const fn phase(offset: u64) -> usize {
    (offset % PATTERN as u64) as usize
}

/// The pattern, long enough to take a chunk from any place of it. Not a constant: it repeats nowhere within itself.
fn pattern() -> Vec<u8> {
    let mut state = 1_u32;
    let once: Vec<u8> = (0..PATTERN)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    once.iter().copied().cycle().take(PATTERN + CHUNK).collect()
}
