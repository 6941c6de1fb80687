//! Real packets, from one namespace to another.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, ensure};
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, TcAttachType};
use holdfast_ebpf::abi::Verdict;
use holdfast_tests::rtnl::{Mac, Rtnl};
use holdfast_tests::{Space, say, sysctl};

use crate::plane::{
    CONSUMER_TOKEN, CONSUMER_V4, CONSUMER_V6, PORT, Plane, SERVICE_V4, SERVICE_V6, all_rights, program,
    served, shipped_rights,
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
