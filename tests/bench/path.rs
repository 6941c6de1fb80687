//! Suite `path`: what a packet costs from a consumer's socket to a producer's, by the CPU time of one thread.
//!
//! Both ends are in the hands of that thread, and on one CPU: sending runs the whole way (the kernel hands a packet from
//! one namespace to the next before the call returns), and nobody has to be woken.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use holdfast_tests::until;
use rustix::time::{ClockId, clock_gettime};

use crate::asm::Family;
use crate::packets::Order;
use crate::plane::{self, PORT};
use crate::report::{AA, Beside, Figure, Floor, Machine, Report, Samples, load};
use crate::scene::{Scene, Way};

/// How much is measured.
pub(crate) struct Scale {
    pub(crate) rounds: usize,
    pub(crate) services: u32,
}

impl Scale {
    pub(crate) const FULL: Self = Self {
        rounds: 140,
        services: 10_000,
    };
    pub(crate) const SMOKE: Self = Self {
        rounds: 5,
        services: 1_000,
    };
}

/// All traffic together takes no longer than this; on a machine that is busy there are fewer rounds then.
const BUDGET: Duration = Duration::from_secs(50);

/// What is sent at once before the producer reads.
const BURST: usize = 32;
const ROUNDS_AT_LEAST: usize = 5;
const PAYLOAD: [u8; 64] = [0x5a; 64];
/// How long the way may take to come into being, or a packet to arrive, before something is wrong.
const PATIENCE: Duration = Duration::from_secs(10);
/// Columns.
const X_ROUTING: &str = "x routing";
const X_PEER: &str = "x redirect_peer";

/// A kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    /// Datagrams of one flow.
    Udp(Family),
    /// Datagrams to all services in random order.
    UdpToAll,
    /// A question and its answer by UDP.
    Request,
    /// A TCP connection, one byte of answer, and its end.
    Connect,
    /// A TCP stream in as large packets as the kernel makes.
    Stream,
}

impl Traffic {
    const ALL: [Self; 6] = [
        Self::Udp(Family::V4),
        Self::Udp(Family::V6),
        Self::UdpToAll,
        Self::Request,
        Self::Connect,
        Self::Stream,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Udp(_) => "UDP, one flow",
            Self::UdpToAll => "UDP, all services",
            Self::Request => "UDP request/response",
            Self::Connect => "TCP connect/response",
            Self::Stream => "TCP stream, 64 KiB",
        }
    }

    const fn family(self) -> Family {
        match self {
            Self::Udp(family) => family,
            _ => Family::V4,
        }
    }

    /// How long one way has it in each round.
    const fn slice(self) -> Duration {
        match self {
            Self::Udp(_) | Self::UdpToAll => Duration::from_millis(20),
            _ => Duration::from_millis(5),
        }
    }

    /// Its part of the whole.
    fn budget(self) -> Duration {
        let all: Duration = Self::ALL.into_iter().map(Self::slice).sum();
        BUDGET.mul_f64(self.slice().as_secs_f64() / all.as_secs_f64())
    }

    /// Against kernel routing, and against a bare hand-over.
    const fn goals(self) -> (Option<f64>, Option<f64>) {
        match self {
            Self::Udp(_) | Self::UdpToAll => (Some(0.75), Some(1.15)),
            // As much for its CPU time as routing, or more.
            Self::Stream => (Some(1.0), None),
            _ => (None, None),
        }
    }
}

/// Measures.
pub(crate) fn measure(scale: &Scale, revision: String) -> anyhow::Result<Report> {
    let mut machine = Machine::here();
    let scenes = Way::ALL
        .into_iter()
        .map(|way| Scene::new(way, scale.services))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut figures = Vec::new();
    let mut a_a = Vec::new();
    let mut floor = None;
    let mut fewest = scale.rounds;
    for traffic in Traffic::ALL {
        let samples = rounds(traffic, &scenes, scale).with_context(|| traffic.name())?;
        let [routing, again, _, peer, _] = &samples;
        fewest = fewest.min(routing.0.len());
        floor.get_or_insert_with(|| Floor {
            what: format!("{}, {}", Way::RedirectPeer.name(), traffic.name()),
            median: peer.median(),
            min: peer.min(),
        });
        let ratio = again.with(routing, |a, b| a / b).median();
        a_a.push(AA {
            what: format!(
                "kernel routing, {}, IPv{}, measured twice",
                traffic.name(),
                traffic.family().number()
            ),
            ratio,
        });
        for (way, own) in Way::ALL.into_iter().zip(&samples) {
            if way != Way::RoutingAgain {
                figures.push(figure(traffic, way, scale.services, own, [routing, peer], ratio));
            }
        }
    }
    machine.load[1] = load();
    Ok(Report {
        suite: "path",
        revision,
        machine,
        profile: if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
        rounds: fewest,
        unit: "nanoseconds of the sending thread's CPU time a packet, exchange, connection or 64 KiB",
        floor: floor.context("nothing was measured")?,
        a_a,
        figures,
    })
}

fn figure(
    traffic: Traffic,
    way: Way,
    services: u32,
    own: &Samples,
    [routing, peer]: [&Samples; 2],
    a_a: f64,
) -> Figure {
    let (to_routing, to_peer) = traffic.goals();
    let against = |what, other: &Samples, goal: Option<f64>| {
        let value = own.with(other, |a, b| a / b).median();
        Beside {
            what,
            value,
            best: own.min() / other.min(),
            within_noise: (value - 1.0).abs() <= 3.0 * (a_a - 1.0).abs(),
            goal: goal.filter(|_| way == Way::Holdfast),
        }
    };
    let mut beside = Vec::new();
    if way != Way::Routing {
        beside.push(against(X_ROUTING, routing, to_routing));
    }
    if way == Way::Holdfast {
        beside.push(against(X_PEER, peer, to_peer));
    }
    Figure {
        what: format!("{}: {}", traffic.name(), way.name()),
        family: Some(traffic.family().number()),
        routes: Some(services),
        keys: None,
        min: own.min(),
        median: own.median(),
        beside,
    }
}

/// One kind of traffic by all ways, in turn: nanoseconds by way and round.
fn rounds(traffic: Traffic, scenes: &[Scene], scale: &Scale) -> anyhow::Result<[Samples; Way::ALL.len()]> {
    let mut sessions = scenes
        .iter()
        .map(|scene| Session::open(traffic, scene, scale.services).with_context(|| scene.way.name()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut samples: [Samples; Way::ALL.len()] = Default::default();
    let started = Instant::now();
    for round in 0..=scale.rounds {
        if round > ROUNDS_AT_LEAST && started.elapsed() > traffic.budget() {
            break;
        }
        for turn in 0..scenes.len() {
            // Each way is sometimes the first.
            let at = (round + turn) % scenes.len();
            let scene = &scenes[at];
            let nanos = scene
                .consumer
                .inside(|| sessions[at].slice(traffic.slice()))
                .with_context(|| scene.way.name())?;
            // The first round warms up.
            if round > 0 {
                samples[at].0.push(nanos);
            }
        }
    }
    Ok(samples)
}

/// Both ends of some traffic.
enum Session {
    Udp {
        client: UdpSocket,
        server: UdpSocket,
        /// In the order in which they are asked.
        services: Vec<SocketAddr>,
        next: usize,
    },
    Request {
        client: UdpSocket,
        server: UdpSocket,
    },
    Connect {
        listener: TcpListener,
        to: SocketAddr,
    },
    Stream {
        from: TcpStream,
        to: TcpStream,
        block: Vec<u8>,
    },
}

impl Session {
    fn open(traffic: Traffic, scene: &Scene, services: u32) -> anyhow::Result<Self> {
        let family = traffic.family();
        let (service, at) = (Scene::service(family), scene.listens_at(family));
        until_open(scene, family)?;
        Ok(match traffic {
            Traffic::Udp(_) => {
                let (client, server) = datagrams(scene, family, at)?;
                Self::Udp {
                    client,
                    server,
                    services: vec![service],
                    next: 0,
                }
            }
            Traffic::UdpToAll => {
                let (client, server) = datagrams(scene, family, SocketAddr::new(any(family), PORT))?;
                let numbers = Order::Random.numbers(services).into_iter();
                Self::Udp {
                    client,
                    server,
                    services: numbers
                        .map(|number| SocketAddr::new(plane::service(family, number), PORT))
                        .collect(),
                    next: 0,
                }
            }
            Traffic::Request => {
                let (client, server) = datagrams(scene, family, at)?;
                client.connect(service)?;
                Self::Request { client, server }
            }
            Traffic::Connect => {
                let listener = scene.producer.inside(|| Ok(TcpListener::bind(at)?))?;
                listener.set_nonblocking(true)?;
                Self::Connect {
                    listener,
                    to: service,
                }
            }
            Traffic::Stream => {
                let listener = scene.producer.inside(|| Ok(TcpListener::bind(at)?))?;
                let connect = || Ok(TcpStream::connect_timeout(&service, PATIENCE)?);
                let from = scene.consumer.inside(connect)?;
                let (to, _) = listener.accept()?;
                from.set_nonblocking(true)?;
                to.set_nonblocking(true)?;
                Self::Stream {
                    from,
                    to,
                    block: vec![0x5a; 64 << 10],
                }
            }
        })
    }

    /// Keeps the traffic up for so long: CPU time for one of its units, in nanoseconds.
    fn slice(&mut self, length: Duration) -> anyhow::Result<f64> {
        let started = Instant::now();
        let (mut spent, mut units) = (0.0, 0.0);
        while started.elapsed() < length || units == 0.0 {
            let (more, of) = self.burst()?;
            spent += more;
            units += of;
        }
        Ok(spent / units)
    }

    /// CPU time, and for how many units.
    fn burst(&mut self) -> anyhow::Result<(f64, f64)> {
        let mut buffer = [0; 256];
        match self {
            Self::Udp {
                client,
                server,
                services,
                next,
            } => {
                let before = cpu_nanos();
                for _ in 0..BURST {
                    client.send_to(&PAYLOAD, services[*next % services.len()])?;
                    *next += 1;
                }
                let spent = cpu_nanos() - before;
                for _ in 0..BURST {
                    at_once(|| server.recv(&mut buffer)).context("a datagram is lost")?;
                }
                Ok((spent, BURST as f64))
            }
            Self::Request { client, server } => {
                let before = cpu_nanos();
                for _ in 0..BURST {
                    client.send(&PAYLOAD)?;
                    let (length, from) =
                        at_once(|| server.recv_from(&mut buffer)).context("a question is lost")?;
                    server.send_to(&buffer[..length], from)?;
                    at_once(|| client.recv(&mut buffer)).context("an answer is lost")?;
                }
                Ok((cpu_nanos() - before, BURST as f64))
            }
            Self::Connect { listener, to } => {
                let before = cpu_nanos();
                let mut client = TcpStream::connect_timeout(to, PATIENCE)?;
                let (mut server, _) = at_once(|| listener.accept()).context("nobody connects")?;
                server.write_all(&PAYLOAD)?;
                client.read_exact(&mut buffer[..PAYLOAD.len()])?;
                // A reset, so that nothing of it stays behind: the next would find its port in use some day.
                rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO))?;
                drop(client);
                drop(server);
                Ok((cpu_nanos() - before, 1.0))
            }
            Self::Stream { from, to, block } => {
                let mut received = 0;
                let mut into = vec![0; block.len()];
                let before = cpu_nanos();
                let mut sent = 0;
                while sent < block.len() {
                    sent += match from.write(&block[sent..]) {
                        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                        other => other?,
                    };
                    while received < sent {
                        let length = at_once(|| to.read(&mut into)).context("the stream stands still")?;
                        ensure!(length > 0, "the stream has ended");
                        received += length;
                    }
                }
                Ok((cpu_nanos() - before, 1.0))
            }
        }
    }
}

/// A socket of the consumer, and one of the producer that listens there.
fn datagrams(scene: &Scene, family: Family, at: SocketAddr) -> anyhow::Result<(UdpSocket, UdpSocket)> {
    let own = SocketAddr::new(plane::source(family, 0), 0);
    let bind = |at: SocketAddr| UdpSocket::bind(at).with_context(|| format!("cannot bind {at}"));
    let client = scene.consumer.inside(|| bind(own))?;
    let server = scene.producer.inside(|| bind(at))?;
    client.set_nonblocking(true)?;
    server.set_nonblocking(true)?;
    Ok((client, server))
}

const fn any(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Waits until datagrams get through and back: carriers and IPv6 addresses come a moment after they are made.
fn until_open(scene: &Scene, family: Family) -> anyhow::Result<()> {
    let mut why = String::new();
    let outcome = until(PATIENCE, "the way is open", || {
        let tried = datagrams(scene, family, scene.listens_at(family))
            .and_then(|(client, server)| exchange(&client, &server, Scene::service(family)));
        why = tried
            .as_ref()
            .map_or_else(|error| format!("{error:#}"), |()| String::new());
        Ok(tried.ok())
    });
    outcome.with_context(|| why.clone())
}

/// A question and its answer.
fn exchange(client: &UdpSocket, server: &UdpSocket, service: SocketAddr) -> anyhow::Result<()> {
    let mut buffer = [0; 64];
    let patience = Some(Duration::from_millis(50));
    for socket in [client, server] {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(patience)?;
    }
    client.send_to(b"?", service).context("cannot ask")?;
    let (_, from) = server.recv_from(&mut buffer).context("no question comes")?;
    server.send_to(b"!", from).context("cannot answer")?;
    let (_, by) = client.recv_from(&mut buffer).context("no answer comes")?;
    ensure!(by == service, "answered by {by}");
    Ok(())
}

/// Does something that should be possible by now.
fn at_once<T>(mut call: impl FnMut() -> std::io::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    bail!("not within {PATIENCE:?}");
                }
                std::thread::yield_now();
            }
            other => return Ok(other?),
        }
    }
}

/// CPU time of this thread.
fn cpu_nanos() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}
