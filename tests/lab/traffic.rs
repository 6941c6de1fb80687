//! Numbered packets, and what became of each.
//!
//! Both ends of a flow run on one CPU: the kernel then hands on its packets in order, and whatever arrives out of
//! place was put there by the data plane.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::{Space, until};

/// How long a receiver waits before it looks whether it shall end.
const TICK: Duration = Duration::from_millis(20);

/// Room for a second of packets and more: a receiver that does not get the CPU must lose nothing.
const RECEIVE_BUFFER: usize = 64 << 20;

/// How long the last answers may take.
const LAST_ANSWERS: Duration = Duration::from_secs(3);

const MAGIC: u32 = 0x4846_4c42;

/// A numbered packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    flow: u64,
    number: u64,
    /// Who answered; 0 in a question.
    producer: u32,
}

impl Packet {
    const LEN: usize = 24;

    fn write(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.producer.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.flow.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..at + 8].try_into().map(u64::from_be_bytes).ok();
        let head = word(0)?;
        (head >> 32 == u64::from(MAGIC)).then_some(Self {
            producer: head as u32,
            flow: word(8)?,
            number: word(16)?,
        })
    }
}

/// Which numbers came, and how.
#[derive(Clone, Debug, Default)]
struct Seen {
    came: Vec<u64>,
    count: u64,
    duplicates: u64,
    out_of_place: u64,
    /// One more than the highest that came.
    next: u64,
}

impl Seen {
    fn note(&mut self, number: u64) {
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        if self.came.len() <= word {
            self.came.resize(word + 1, 0);
        }
        if self.came[word] & bit != 0 {
            self.duplicates += 1;
            return;
        }
        self.came[word] |= bit;
        self.count += 1;
        if number < self.next {
            self.out_of_place += 1;
        }
        self.next = self.next.max(number + 1);
    }

    fn has(&self, number: u64) -> bool {
        let word = self.came.get((number / 64) as usize).copied().unwrap_or_default();
        word & (1 << (number % 64)) != 0
    }

    /// Numbers below `sent` that did not come, as ranges.
    fn missing(&self, sent: u64) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for number in (0..sent).filter(|&number| !self.has(number)) {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => ranges.push((number, number)),
            }
        }
        ranges
    }
}

/// Answers questions at one address and port, by UDP and by TCP, and counts what comes.
#[derive(Debug)]
pub struct Producer {
    id: u32,
    seen: Arc<Mutex<BTreeMap<u64, Seen>>>,
    total: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Producer {
    /// Serves in this namespace.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn serve(space: &Space, id: u32, at: &[SocketAddr]) -> anyhow::Result<Self> {
        let mut producer = Self {
            id,
            seen: Arc::default(),
            total: Arc::default(),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        for &address in at {
            let (udp, tcp) = space.inside(|| {
                let udp = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
                let tcp =
                    TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
                Ok((udp, tcp))
            })?;
            prepare(&udp)?;
            set_socket_timeout(&tcp, Timeout::Recv, Some(TICK))?;
            producer.answer_datagrams(udp);
            producer.answer_connections(tcp);
        }
        Ok(producer)
    }

    fn answer_datagrams(&mut self, socket: UdpSocket) {
        let (id, seen, total) = (self.id, Arc::clone(&self.seen), Arc::clone(&self.total));
        let stop = Arc::clone(&self.stop);
        self.threads.push(std::thread::spawn(move || {
            on_one_cpu();
            let mut buffer = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else {
                    continue;
                };
                let Some(packet) = Packet::read(&buffer[..length]) else {
                    continue;
                };
                total.fetch_add(1, Ordering::Relaxed);
                lock(&seen).entry(packet.flow).or_default().note(packet.number);
                let answer = Packet {
                    producer: id,
                    ..packet
                };
                // A consumer that has gone meanwhile is no fault of the producer.
                _ = socket.send_to(&answer.write(), from);
            }
        }));
    }

    fn answer_connections(&mut self, listener: TcpListener) {
        let (id, stop) = (self.id, Arc::clone(&self.stop));
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    continue;
                };
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || answer_connection(stream, id, &stop));
            }
        }));
    }

    /// Datagrams that came, of all flows.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Its number, as answers carry it.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    fn seen(&self, flow: u64) -> Seen {
        lock(&self.seen).get(&flow).cloned().unwrap_or_default()
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            _ = thread.join();
        }
    }
}

fn answer_connection(mut stream: TcpStream, id: u32, stop: &AtomicBool) {
    if stream.set_read_timeout(Some(TICK)).is_err() {
        return;
    }
    _ = stream.set_nodelay(true);
    let mut question = [0; Packet::LEN];
    while !stop.load(Ordering::Relaxed) {
        match stream.read_exact(&mut question) {
            Ok(()) => {
                let Some(packet) = Packet::read(&question) else {
                    return;
                };
                let answer = Packet {
                    producer: id,
                    ..packet
                };
                if stream.write_all(&answer.write()).is_err() {
                    return;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

/// Sends numbered questions at a steady rate, and counts the answers.
#[derive(Debug)]
pub struct Flow {
    id: u64,
    rate: u64,
    started: Instant,
    sent: Arc<AtomicU64>,
    unsent: Arc<AtomicU64>,
    answers: Arc<Mutex<Seen>>,
    misdelivered: Arc<AtomicU64>,
    by: Arc<AtomicU32>,
    stop_sending: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
    receiver: Option<JoinHandle<()>>,
}

impl Flow {
    /// Starts to send from this namespace. Answers of another producer than `expected` are misdelivered; if none is
    /// named, it is the one that answers first.
    ///
    /// # Errors
    /// When there is no socket to be had.
    pub fn start(
        space: &Space,
        to: SocketAddr,
        rate: u64,
        expected: impl Into<Option<u32>>,
    ) -> anyhow::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let from = SocketAddr::new(any(to), 0);
        let socket = Arc::new(connected(space, from, to)?);
        let mut flow = Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            rate,
            started: Instant::now(),
            sent: Arc::default(),
            unsent: Arc::default(),
            answers: Arc::default(),
            misdelivered: Arc::default(),
            by: Arc::new(AtomicU32::new(expected.into().unwrap_or_default())),
            stop_sending: Arc::default(),
            stop: Arc::default(),
            sender: None,
            receiver: None,
        };
        flow.listen(Arc::clone(&socket));
        flow.send(socket);
        Ok(flow)
    }

    fn send(&mut self, socket: Arc<UdpSocket>) {
        let (flow, rate) = (self.id, self.rate);
        let (sent, unsent) = (Arc::clone(&self.sent), Arc::clone(&self.unsent));
        let stop = Arc::clone(&self.stop_sending);
        self.sender = Some(std::thread::spawn(move || {
            on_one_cpu();
            let started = Instant::now();
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                let due = started.elapsed().as_micros() as u64 * rate / 1_000_000;
                while number < due {
                    let packet = Packet {
                        flow,
                        number,
                        producer: 0,
                    };
                    if send_one(&socket, packet) {
                        sent.store(number + 1, Ordering::Relaxed);
                    } else {
                        unsent.fetch_add(1, Ordering::Relaxed);
                    }
                    number += 1;
                }
                pace();
            }
        }));
    }

    fn listen(&mut self, socket: Arc<UdpSocket>) {
        let flow = self.id;
        let (answers, misdelivered) = (Arc::clone(&self.answers), Arc::clone(&self.misdelivered));
        let by = Arc::clone(&self.by);
        let stop = Arc::clone(&self.stop);
        self.receiver = Some(std::thread::spawn(move || {
            on_one_cpu();
            let mut buffer = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                // An error here is an ICMP message about an earlier packet: that one counts as lost already.
                let Ok(length) = socket.recv(&mut buffer) else {
                    continue;
                };
                match Packet::read(&buffer[..length]) {
                    Some(packet) if packet.flow == flow && is_by(&by, packet.producer) => {
                        lock(&answers).note(packet.number);
                    }
                    _ => _ = misdelivered.fetch_add(1, Ordering::Relaxed),
                }
            }
        }));
    }

    /// Who answers, as soon as somebody does.
    #[must_use]
    pub fn by(&self) -> Option<u32> {
        Some(self.by.load(Ordering::Relaxed)).filter(|&by| by != 0)
    }

    /// Packets sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Different answers so far.
    #[must_use]
    pub fn answered(&self) -> u64 {
        lock(&self.answers).count
    }

    /// Waits until so many more answers have come: traffic flows.
    ///
    /// # Errors
    /// When they don't come within the deadline.
    pub fn flows(&self, answers: u64, deadline: Duration) -> anyhow::Result<()> {
        let before = self.answered();
        until(deadline, format!("{answers} more answers"), || {
            Ok((self.answered() >= before + answers).then_some(()))
        })
    }

    /// Stops sending, waits for the last answers, and says what became of all packets.
    ///
    /// # Errors
    /// When a thread has panicked.
    pub fn finish(mut self, producer: Option<&Producer>) -> anyhow::Result<Tally> {
        self.stop_sending.store(true, Ordering::Relaxed);
        let ended = |thread: Option<JoinHandle<()>>| {
            let joined = thread.map_or(Ok(()), JoinHandle::join);
            joined.map_err(|_| anyhow!("a sender or receiver panicked"))
        };
        ended(self.sender.take())?;
        let elapsed = self.started.elapsed();
        let sent = self.sent();
        // Packets that are lost stay lost: their deadline passes, and they are counted below.
        _ = until(LAST_ANSWERS, "the last answers", || {
            Ok((self.answered() >= sent).then_some(()))
        });
        self.stop.store(true, Ordering::Relaxed);
        ended(self.receiver.take())?;
        let answers = lock(&self.answers).clone();
        let questions = producer
            .map(|producer| producer.seen(self.id))
            .unwrap_or_default();
        Ok(Tally {
            sent,
            unsent: self.unsent.load(Ordering::Relaxed),
            rate: sent as f64 / elapsed.as_secs_f64(),
            lost: sent - answers.count,
            lost_ranges: answers.missing(sent),
            duplicated: answers.duplicates + questions.duplicates,
            out_of_place: answers.out_of_place + questions.out_of_place,
            misdelivered: self.misdelivered.load(Ordering::Relaxed),
        })
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop_sending.store(true, Ordering::Relaxed);
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.sender.take().into_iter().chain(self.receiver.take()) {
            _ = thread.join();
        }
    }
}

/// Whether this is the producer that answers; the first one that does is.
fn is_by(by: &AtomicU32, producer: u32) -> bool {
    let first = by.compare_exchange(0, producer, Ordering::Relaxed, Ordering::Relaxed);
    first.is_ok() || first == Err(producer)
}

/// A TCP connection that lives long: one question after the other, each of which must be answered by the same producer.
#[derive(Debug)]
pub struct Conversation {
    by: u32,
    answered: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Conversation {
    /// Connects from this namespace and begins to ask.
    ///
    /// # Errors
    /// When there is no connection, or no first answer.
    pub fn start(space: &Space, to: SocketAddr) -> anyhow::Result<Self> {
        let mut stream = space.inside(|| {
            TcpStream::connect_timeout(&to, LAST_ANSWERS).with_context(|| format!("no connection to {to}"))
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LAST_ANSWERS))?;
        let first = exchange(&mut stream, 0)?;
        let (answered, stop) = (Arc::new(AtomicU64::new(1)), Arc::<AtomicBool>::default());
        let thread = std::thread::spawn({
            let (answered, stop) = (Arc::clone(&answered), Arc::clone(&stop));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let number = answered.load(Ordering::Relaxed);
                    let by =
                        exchange(&mut stream, number).with_context(|| format!("after {number} answers"))?;
                    ensure!(by == first, "answered by {by}, not by {first}");
                    answered.store(number + 1, Ordering::Relaxed);
                    pace();
                }
                Ok(())
            }
        });
        Ok(Self {
            by: first,
            answered,
            stop,
            thread: Some(thread),
        })
    }

    /// Who answers.
    #[must_use]
    pub const fn by(&self) -> u32 {
        self.by
    }

    /// Waits until so many more answers have come.
    ///
    /// # Errors
    /// When they don't come within the deadline.
    pub fn goes_on(&self, answers: u64, deadline: Duration) -> anyhow::Result<()> {
        let before = self.answered.load(Ordering::Relaxed);
        until(deadline, format!("{answers} more answers by TCP"), || {
            Ok((self.answered.load(Ordering::Relaxed) >= before + answers).then_some(()))
        })
    }

    /// Ends it, and says how many answers it had.
    ///
    /// # Errors
    /// When it broke, or somebody else answered.
    pub fn finish(mut self) -> anyhow::Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("a conversation panicked"))??;
        }
        Ok(self.answered.load(Ordering::Relaxed))
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// One question and its answer: who gave it.
fn exchange(stream: &mut TcpStream, number: u64) -> anyhow::Result<u32> {
    let question = Packet {
        flow: 0,
        number,
        producer: 0,
    };
    stream.write_all(&question.write())?;
    let mut answer = [0; Packet::LEN];
    stream.read_exact(&mut answer).context("no answer")?;
    let answer = Packet::read(&answer).context("a garbled answer")?;
    ensure!(answer.number == number, "an answer to another question");
    Ok(answer.producer)
}

/// What became of the packets of a flow.
#[derive(Clone, Debug, PartialEq)]
pub struct Tally {
    /// Numbers used, also those that the kernel did not take.
    pub sent: u64,
    /// That the kernel did not take; they count as lost too.
    pub unsent: u64,
    /// Sent a second.
    pub rate: f64,
    /// Not answered.
    pub lost: u64,
    /// Their numbers, as ranges.
    pub lost_ranges: Vec<(u64, u64)>,
    /// That came more than once, on either way.
    pub duplicated: u64,
    /// That came after a later one, on either way.
    pub out_of_place: u64,
    /// Answers of somebody else.
    pub misdelivered: u64,
}

impl Tally {
    /// Nothing was lost, duplicated, out of place or misdelivered, and something was sent.
    ///
    /// # Errors
    /// Says what was.
    pub fn perfect(&self) -> anyhow::Result<()> {
        let faults = self.unsent + self.lost + self.duplicated + self.out_of_place + self.misdelivered;
        ensure!(self.sent > 0, "nothing was sent");
        ensure!(faults == 0, "traffic suffered: {self}");
        Ok(())
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} sent at {:.0}/s, {} lost, {} duplicated, {} out of place, {} misdelivered",
            self.sent, self.rate, self.lost, self.duplicated, self.out_of_place, self.misdelivered
        )?;
        if self.unsent > 0 {
            write!(f, ", {} not taken by the kernel", self.unsent)?;
        }
        if self.lost > 0 {
            let shown = self.lost_ranges.iter().take(8);
            let shown: Vec<_> = shown.map(|(first, last)| format!("{first}-{last}")).collect();
            write!(f, " (numbers {})", shown.join(", "))?;
        }
        Ok(())
    }
}

/// One question by UDP, sent once: the number of the producer that answered, if one did.
///
/// # Errors
/// When there is no socket to be had.
pub fn ask(space: &Space, to: SocketAddr, patience: Duration) -> anyhow::Result<Option<u32>> {
    ask_from(space, SocketAddr::new(any(to), 0), to, patience)
}

/// The same from this address and port, which the kernel must take for the namespace's own.
///
/// # Errors
/// When there is no such socket to be had.
pub fn ask_from(
    space: &Space,
    from: SocketAddr,
    to: SocketAddr,
    patience: Duration,
) -> anyhow::Result<Option<u32>> {
    let socket = connected(space, from, to)?;
    socket.set_read_timeout(Some(patience))?;
    let question = Packet {
        flow: 0,
        number: 0,
        producer: 0,
    };
    if !send_one(&socket, question) {
        return Ok(None);
    }
    let mut buffer = [0; 2048];
    let answer = socket.recv(&mut buffer);
    Ok(answer
        .ok()
        .and_then(|length| Packet::read(&buffer[..length]))
        .map(|packet| packet.producer))
}

/// One question by TCP: the number of the producer that answered.
///
/// # Errors
/// When no connection or no answer comes within `patience`.
pub fn ask_tcp(space: &Space, to: SocketAddr, patience: Duration) -> anyhow::Result<u32> {
    let mut stream = space.inside(|| {
        TcpStream::connect_timeout(&to, patience).with_context(|| format!("no connection to {to}"))
    })?;
    stream.set_read_timeout(Some(patience))?;
    exchange(&mut stream, 7)
}

/// The unspecified address of the same family.
fn any(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}

/// One echo request, sent once, and whether its answer came.
///
/// # Errors
/// When there is no socket to be had, or no route.
pub fn ping(space: &Space, to: IpAddr, patience: Duration) -> anyhow::Result<bool> {
    let (family, protocol, kinds) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, [8, 0]),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, [128, 129]),
    };
    let socket = space.inside(|| {
        let flags = SocketFlags::CLOEXEC;
        // The kernel fills in identifier and checksum (`ping_v4_sendmsg`), and hands on the answer to this identifier.
        let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, Some(protocol))?;
        let socket = UdpSocket::from(socket);
        socket
            .connect((to, 0))
            .with_context(|| format!("no route to {to}"))?;
        Ok(socket)
    })?;
    socket.set_read_timeout(Some(patience))?;
    let payload = *b"holdfast";
    let mut request = [0; 16];
    request[0] = kinds[0];
    request[8..].copy_from_slice(&payload);
    if socket.send(&request).is_err() {
        return Ok(false);
    }
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer).unwrap_or_default();
    Ok(length == request.len() && answer[0] == kinds[1] && answer[8..16] == payload)
}

fn connected(space: &Space, from: SocketAddr, to: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = space.inside(|| {
        let socket = UdpSocket::bind(from)?;
        socket.connect(to).with_context(|| format!("no route to {to}"))?;
        Ok(socket)
    })?;
    prepare(&socket)?;
    Ok(socket)
}

fn prepare(socket: &UdpSocket) -> anyhow::Result<()> {
    socket.set_read_timeout(Some(TICK))?;
    set_socket_recv_buffer_size_force(socket.as_fd(), RECEIVE_BUFFER)?;
    Ok(())
}

/// Sends a packet. An error of the socket may speak of an earlier packet (ICMP): then once more.
fn send_one(socket: &UdpSocket, packet: Packet) -> bool {
    let bytes = packet.write();
    socket.send(&bytes).is_ok() || socket.send(&bytes).is_ok()
}

/// Between two bursts of a sender: no wait for anything.
fn pace() {
    std::thread::sleep(Duration::from_micros(500));
}

/// Keeps the calling thread on the first CPU that this process may use, so that what it sends is handed on in order.
pub fn on_one_cpu() {
    let mut first = CpuSet::new();
    if let Ok(allowed) = rustix::thread::sched_getaffinity(None)
        && let Some(cpu) = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu))
    {
        first.set(cpu);
        // Where it is refused, packets may change places by themselves, and the tests would say so.
        _ = sched_setaffinity(None, &first);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_as_written() {
        let packet = Packet {
            flow: 3,
            number: 1 << 40,
            producer: 9,
        };
        assert_eq!(Packet::read(&packet.write()), Some(packet));
        assert_eq!(Packet::read(&[0; Packet::LEN]), None);
        assert_eq!(Packet::read(&[]), None);
    }

    #[test]
    fn what_came_is_counted() {
        let mut seen = Seen::default();
        for number in [0, 1, 3, 2, 2, 70] {
            seen.note(number);
        }
        assert_eq!((seen.count, seen.duplicates, seen.out_of_place), (5, 1, 1));
        assert_eq!(seen.missing(72), [(4, 69), (71, 71)]);
    }
}
