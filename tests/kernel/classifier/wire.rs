//! Real packets, from one namespace to another.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, TcAttachType};
use holdfast_ebpf::abi::{ConsumerRow, Verdict, control};
use holdfast_tests::rtnl::{Mac, Rtnl};
use holdfast_tests::{Space, offload, say, sysctl};
use rustix::net::{AddressFamily, SocketType};

use crate::plane::{
    CONSUMER_TOKEN, CONSUMER_V4, CONSUMER_V6, PORT, Plane, SECOND_MAC, SERVICE_V4, SERVICE_V6, all_rights,
    program, served, shipped_rights,
};

/// The gateway: only a neighbour entry in front of the node.
const GATEWAY_V4: &str = "169.254.1.1";
const GATEWAY_V6: &str = "fe80::1";
/// How long an answer may take, and how long silence is waited for.
const ANSWER: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_millis(300);
/// Bytes that go each way over TCP.
const BYTES: usize = 1 << 20;

/// Gives the workloads addresses and routes, and attaches the program to both.
fn wire(plane: &mut Plane) -> anyhow::Result<()> {
    for name in ["hfc0", "hfp0"] {
        let options = TcAttachOptions::TcxOrder(LinkOrder::first());
        program(&mut plane.ebpf)?.attach_with_options(name, TcAttachType::Ingress, options)?;
    }
    all_rights()?;
    // No address on the node and no forwarding: whatever arrives came by the program.
    configure(&plane.consumer_space, [CONSUMER_V4, CONSUMER_V6], "eth0")?;
    configure(&plane.producer_space, [SERVICE_V4, SERVICE_V6], "lo")?;
    Ok(())
}

fn configure(space: &Space, addresses: [IpAddr; 2], device: &str) -> anyhow::Result<()> {
    space.inside(sysctl::for_workload)?;
    let mut rtnl = Rtnl::open(space)?;
    // A MAC that nobody has: whoever delivers writes the right one.
    let nobody: Mac = [2, 0xff, 0, 0, 0, 1];
    for address in addresses {
        let (gateway, bits): (IpAddr, u8) = if address.is_ipv4() {
            (GATEWAY_V4.parse()?, 32)
        } else {
            (GATEWAY_V6.parse()?, 128)
        };
        let anywhere: IpAddr = if address.is_ipv4() {
            "0.0.0.0".parse()?
        } else {
            "::".parse()?
        };
        rtnl.address(device, address, bits)?;
        rtnl.neighbour(gateway, nobody, "eth0")?;
        rtnl.route(anywhere, 0, Some(gateway), "eth0")?;
    }
    Ok(())
}

/// Answers each datagram with itself until the socket has been silent.
fn echo_udp(space: &Space, at: SocketAddr) -> anyhow::Result<UdpSocket> {
    space.inside(|| {
        let socket = UdpSocket::bind(at).with_context(|| format!("cannot listen on {at}"))?;
        socket.set_read_timeout(Some(ANSWER))?;
        Ok(socket)
    })
}

/// Asks once by UDP; none is silence.
fn ask_udp(
    plane: &Plane,
    server: &UdpSocket,
    to: SocketAddr,
    wait: Duration,
) -> anyhow::Result<Option<SocketAddr>> {
    let client = plane.consumer_space.inside(|| {
        let socket = UdpSocket::bind((if to.is_ipv4() { CONSUMER_V4 } else { CONSUMER_V6 }, 0))?;
        socket.set_read_timeout(Some(wait))?;
        Ok(socket)
    })?;
    server.set_read_timeout(Some(wait))?;
    client.send_to(b"question", to)?;
    let mut buffer = [0; 64];
    let Ok((length, from)) = server.recv_from(&mut buffer) else {
        return Ok(None);
    };
    ensure!(from == client.local_addr()?, "the source was changed to {from}");
    server.send_to(&buffer[..length], from)?;
    let (length, by) = client.recv_from(&mut buffer).context("no answer")?;
    ensure!(&buffer[..length] == b"question");
    Ok(Some(by))
}

/// Sends and receives [`BYTES`] over TCP.
fn exchange_tcp(plane: &Plane, to: SocketAddr) -> anyhow::Result<()> {
    let listener = plane.producer_space.inside(|| Ok(TcpListener::bind(to)?))?;
    std::thread::scope(|scope| {
        let server = scope.spawn(move || -> anyhow::Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(ANSWER))?;
            let mut received = vec![0; BYTES];
            stream.read_exact(&mut received)?;
            stream.write_all(&received)?;
            Ok(())
        });
        let sent: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
        let mut back = vec![0; BYTES];
        let client = plane
            .consumer_space
            .inside(|| Ok(TcpStream::connect_timeout(&to, ANSWER)?))
            .context("cannot connect")?;
        client.set_read_timeout(Some(ANSWER))?;
        (&client).write_all(&sent)?;
        (&client).read_exact(&mut back)?;
        ensure!(sent == back, "the bytes came back changed");
        server
            .join()
            .map_err(|_| anyhow::anyhow!("the server panicked"))?
    })
}

pub(crate) fn packets_reach_the_producer_and_come_back() -> anyhow::Result<()> {
    served(|plane| {
        wire(plane)?;
        for address in [SERVICE_V4, SERVICE_V6] {
            let to = SocketAddr::new(address, PORT);
            let server = echo_udp(&plane.producer_space, to)?;
            ensure!(
                ask_udp(plane, &server, to, ANSWER)? == Some(to),
                "the answer comes from who was asked"
            );
            exchange_tcp(plane, to)?;
        }
        let counters = plane.counters()?;
        let told: Vec<_> = Verdict::ALL
            .into_iter()
            .map(|verdict| (verdict, counters[verdict as usize]))
            .filter(|(_, count)| *count != 0)
            .collect();
        say(format!("packets by verdict: {told:?}"));
        ensure!(counters[Verdict::Delivered as usize] > 4 && counters[Verdict::Answered as usize] > 4);
        let dropped: u64 = counters.iter().skip(Verdict::DropHeld as usize).sum();
        ensure!(dropped == 0, "{dropped} packets were dropped");
        Ok(())
    })
}

pub(crate) fn a_closed_row_stops_real_packets_and_only_those() -> anyhow::Result<()> {
    served(|plane| {
        wire(plane)?;
        for address in [SERVICE_V4, SERVICE_V6] {
            let to = SocketAddr::new(address, PORT);
            let server = echo_udp(&plane.producer_space, to)?;
            ensure!(ask_udp(plane, &server, to, ANSWER)? == Some(to));
            let before = plane.counters()?[Verdict::DropHeld as usize];
            plane.row(0, 1)?;
            ensure!(ask_udp(plane, &server, to, SILENCE)?.is_none(), "held");
            let held = plane.counters()?[Verdict::DropHeld as usize] - before;
            ensure!(held == 1, "{held} packets counted as held");
            plane.row(CONSUMER_TOKEN, 1)?;
            ensure!(ask_udp(plane, &server, to, ANSWER)? == Some(to), "released");
        }
        shipped_rights()
    })
}

/// The producer's own addresses.
const PRODUCER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 21);
const PRODUCER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x21);

/// As [`wire`], and both ends are reached as neighbours.
fn wire_neighbours(plane: &mut Plane) -> anyhow::Result<()> {
    wire(plane)?;
    let mut rtnl = Rtnl::open(&plane.producer_space)?;
    rtnl.address("eth0", PRODUCER_V4.into(), 32)?;
    rtnl.address("eth0", PRODUCER_V6.into(), 128)?;
    let (consumer, producer) = (plane.consumer, plane.producer);
    plane.neighbour(0, producer, Some(PRODUCER_V4), Some(PRODUCER_V6))?;
    let flags = ConsumerRow::HAS_SERVICES | ConsumerRow::HAS_SOURCES | ConsumerRow::NEIGH;
    plane.row_with(consumer, CONSUMER_TOKEN, 1, flags, consumer)
}

/// As [`wire`], with a second consumer that has the first one's addresses.
fn wire_both(plane: &mut Plane) -> anyhow::Result<()> {
    wire(plane)?;
    plane.second_consumer()?;
    plane.set_control(control::PORTS, control::DEFAULT_PORTS)?;
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    program(&mut plane.ebpf)?.attach_with_options("hfx0", TcAttachType::Ingress, options)?;
    // First: it takes the neighbours along.
    Rtnl::open(&plane.stranger_space)?.set_mac("eth0", SECOND_MAC)?;
    configure(&plane.stranger_space, [CONSUMER_V4, CONSUMER_V6], "eth0")
}

/// Asks until there is an answer: the node's link-local addresses take a moment until they ask for neighbours.
fn ask_until(plane: &Plane, server: &UdpSocket, to: SocketAddr) -> anyhow::Result<()> {
    let client = client(&plane.consumer_space, to, 0)?;
    client.set_read_timeout(Some(SILENCE))?;
    server.set_read_timeout(Some(SILENCE))?;
    let deadline = Instant::now() + ANSWER;
    let mut buffer = [0; 64];
    loop {
        ensure!(Instant::now() < deadline, "{to} is never reached");
        client.send(b"question")?;
        if let Ok((length, from)) = server.recv_from(&mut buffer) {
            server.send_to(&buffer[..length], from)?;
            if client.recv(&mut buffer).is_ok() {
                return Ok(());
            }
        }
    }
}

/// A socket of one of the consumers' that asks a service.
fn client(space: &Space, to: SocketAddr, port: u16) -> anyhow::Result<UdpSocket> {
    space.inside(|| {
        let own = if to.is_ipv4() { CONSUMER_V4 } else { CONSUMER_V6 };
        let socket = UdpSocket::bind((own, port))?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.connect(to)?;
        Ok(socket)
    })
}

pub(crate) fn neighbours_are_reached_and_answer() -> anyhow::Result<()> {
    served(|plane| {
        wire_neighbours(plane)?;
        for offloads in [true, false] {
            for (space, device) in [
                (&plane.consumer_space, "eth0"),
                (&plane.producer_space, "eth0"),
                (&plane.node, "hfc0"),
                (&plane.node, "hfp0"),
            ] {
                offload::switch(space, device, offloads)?;
            }
            for address in [SERVICE_V4, SERVICE_V6] {
                let to = SocketAddr::new(address, PORT);
                let server = echo_udp(&plane.producer_space, to)?;
                ask_until(plane, &server, to)?;
                exchange_tcp(plane, to)?;
            }
        }
        let counters = plane.counters()?;
        let dropped: u64 = counters.iter().skip(Verdict::DropHeld as usize).sum();
        ensure!(dropped == 0, "{counters:?}");
        // One gate for both ways.
        let to = SocketAddr::new(SERVICE_V4, PORT);
        let server = echo_udp(&plane.producer_space, to)?;
        plane.row(0, 1)?;
        ensure!(ask_udp(plane, &server, to, SILENCE)?.is_none(), "held");
        Ok(())
    })
}

pub(crate) fn senders_learn_what_the_way_to_a_neighbour_takes() -> anyhow::Result<()> {
    served(|plane| {
        wire_neighbours(plane)?;
        // The workload's end takes more, so that nobody but us tells how much fits.
        Rtnl::open(&plane.node)?.set_mtu("hfp0", 1_400)?;
        // Whoever comes first learns for both: what a destination takes is remembered.
        for (address, stream_first) in [(SERVICE_V4, false), (SERVICE_V6, true)] {
            let to = SocketAddr::new(address, PORT);
            let server = echo_udp(&plane.producer_space, to)?;
            ask_until(plane, &server, to)?;
            let before = plane.counters()?[Verdict::DropTooBig as usize];
            if stream_first {
                // Streams leave the workload in pieces that are cut later; it is the cuts that are too big.
                push_tcp(plane, to)?;
            }
            send_large(plane, &server, to)?;
            if !stream_first {
                push_tcp(plane, to)?;
            }
            let told = plane.counters()?[Verdict::DropTooBig as usize] - before;
            say(format!(
                "{address}: {told} packets were too big until the sender knew"
            ));
            ensure!((1..20).contains(&told));
        }
        Ok(())
    })
}

/// Sends a datagram as large as the workload's own device takes until it comes.
fn send_large(plane: &mut Plane, server: &UdpSocket, to: SocketAddr) -> anyhow::Result<()> {
    let client = client(&plane.consumer_space, to, 0)?;
    let question = [0x5a; 1_440];
    server.set_read_timeout(Some(SILENCE))?;
    let mut buffer = [0; 2_000];
    let deadline = Instant::now() + ANSWER;
    loop {
        // The kernel reports by the next call what it was told.
        let _ = client.send(&question);
        // A question of before may still wait there: it was asked again when its answer took too long.
        if let Ok((length, from)) = server.recv_from(&mut buffer)
            && buffer[..length] == question
        {
            ensure!(from == client.local_addr()?);
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the client never learns: {:?}",
            plane.counters()?
        );
    }
}

/// Sends [`BYTES`] over TCP, one way.
fn push_tcp(plane: &Plane, to: SocketAddr) -> anyhow::Result<()> {
    let listener = plane.producer_space.inside(|| Ok(TcpListener::bind(to)?))?;
    let client = plane
        .consumer_space
        .inside(|| Ok(TcpStream::connect_timeout(&to, ANSWER)?))?;
    let (mut server, _) = listener.accept()?;
    server.set_read_timeout(Some(ANSWER))?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || (&client).write_all(&[0x5a; BYTES]));
        let mut received = vec![0; BYTES];
        server
            .read_exact(&mut received)
            .context("the stream stands still")?;
        ensure!(received.iter().all(|byte| *byte == 0x5a));
        Ok(sender
            .join()
            .map_err(|_| anyhow::anyhow!("the sender panicked"))??)
    })
}

pub(crate) fn two_consumers_with_one_address_get_their_own_answers() -> anyhow::Result<()> {
    served(|plane| {
        wire_both(plane)?;
        for offloads in [true, false] {
            for space in [
                &plane.consumer_space,
                &plane.producer_space,
                &plane.stranger_space,
            ] {
                offload::switch(space, "eth0", offloads)?;
            }
            for (address, own) in [(SERVICE_V4, CONSUMER_V4), (SERVICE_V6, CONSUMER_V6)] {
                let to = SocketAddr::new(address, PORT);
                let server = echo_udp(&plane.producer_space, to)?;
                let spaces = [&plane.consumer_space, &plane.stranger_space];
                let [first, second] = spaces.map(|space| client(space, to, 45_000));
                let (first, second) = (first?, second?);
                let mut ports = Vec::new();
                let mut buffer = [0; 64];
                for (client, question) in [(&first, b"first"), (&second, b"other")] {
                    client.send(question)?;
                    let (length, from) = server.recv_from(&mut buffer).context("no question")?;
                    ensure!(&buffer[..length] == question);
                    ports.push(from.port());
                }
                ensure!(ports[0] == 45_000 && ports[1] > 61_000, "{ports:?}");
                // Answered in the other order.
                for (port, answer) in [(ports[1], b"OTHER"), (ports[0], b"FIRST")] {
                    server.send_to(answer, (own, port))?;
                }
                for (client, answer) in [(&first, b"FIRST"), (&second, b"OTHER")] {
                    let length = client.recv(&mut buffer).context("no answer")?;
                    ensure!(&buffer[..length] == answer, "another's answer");
                }
                drop(server);
                echo_both(plane, to, own)?;
            }
        }
        let counters = plane.counters()?;
        let dropped: u64 = counters.iter().skip(Verdict::DropHeld as usize).sum();
        ensure!(dropped == 0, "{counters:?}");
        Ok(())
    })
}

/// Two connections with the same four numbers, from two consumers: each gets back what it sent.
fn echo_both(plane: &Plane, to: SocketAddr, own: IpAddr) -> anyhow::Result<()> {
    let listener = plane.producer_space.inside(|| Ok(TcpListener::bind(to)?))?;
    let connect = |space: &Space| {
        space.inside(|| {
            // The same source port, which the standard library cannot ask for.
            let family = if own.is_ipv4() {
                AddressFamily::INET
            } else {
                AddressFamily::INET6
            };
            let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
            rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
            rustix::net::bind(&socket, &SocketAddr::new(own, 46_000))?;
            rustix::net::connect(&socket, &to).context("cannot connect")?;
            let stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(ANSWER))?;
            Ok(stream)
        })
    };
    let mut pairs = Vec::new();
    for space in [&plane.consumer_space, &plane.stranger_space] {
        let client = connect(space)?;
        let (server, _) = listener.accept()?;
        server.set_read_timeout(Some(ANSWER))?;
        pairs.push((client, server));
    }
    for (index, (client, server)) in pairs.iter_mut().enumerate() {
        let sent: Vec<u8> = (0..40_000).map(|at| (at % 251) as u8 ^ index as u8).collect();
        let mut received = vec![0; sent.len()];
        client.write_all(&sent)?;
        server.read_exact(&mut received)?;
        ensure!(received == sent, "another's bytes");
        server.write_all(&sent)?;
        client.read_exact(&mut received)?;
        ensure!(received == sent, "another's bytes");
    }
    Ok(())
}

pub(crate) fn a_closed_port_is_told_to_who_asked() -> anyhow::Result<()> {
    served(|plane| {
        wire_both(plane)?;
        for address in [SERVICE_V4, SERVICE_V6] {
            let to = SocketAddr::new(address, PORT);
            // The second one's flow gets another port; its error must quote the one that it knows, or it hears nothing.
            for space in [plane.consumer_space.clone(), plane.stranger_space.clone()] {
                let client = client(&space, to, 47_000)?;
                client.send(b"question")?;
                let error = client.recv(&mut [0; 8]).err().context("an answer from nobody")?;
                ensure!(
                    error.kind() == std::io::ErrorKind::ConnectionRefused,
                    "{to}: {error}, {:?}",
                    plane.counters()?
                );
            }
        }
        Ok(())
    })
}
