//! Real packets: one of every consumer to every service at once, and where each arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use holdfast_engine::model::{Ifindex, Protocol};
use holdfast_tests::traffic::on_one_cpu;
use holdfast_tests::workload::INSIDE;
use holdfast_tests::{Space, sysctl, throughout, until};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::kernel::{Dev, Verdict};
use crate::place::{Member, Place, UNCLAIMED};
use crate::script::{Packet, SERVICES, packet};
use crate::world::World;

/// Where packets arrive that are about no policy.
const UNCLAIMED_PORT: u16 = 9;
/// How long packets that should arrive may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// After the last packet of a consumer has gone through the node, what is delivered at all has arrived.
const A_MOMENT: Duration = Duration::from_millis(4);

/// The first port that packets come from.
pub(crate) const FIRST_PORT: u16 = 10_000;

/// Who has got a packet: a producer by the number of its interface in the world, or the node itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    Producer(Ifindex),
    Node,
    Nobody,
}

/// Sockets that take packets to the services.
#[derive(Debug)]
pub(crate) struct Servers {
    datagrams: Vec<UdpSocket>,
    connections: Vec<TcpListener>,
}

impl Servers {
    /// A workload answers at every service, from its very address.
    pub(crate) fn of_workload(space: &Space) -> anyhow::Result<Self> {
        let at: Vec<SocketAddr> = packets(Protocol::Udp)
            .map(|packet| SocketAddr::new(packet.address, packet.port))
            .collect();
        // And answers from them must be let in.
        space.inside(|| sysctl::write("ipv4/conf/all/accept_local", "1"))?;
        Self::bound(space, &at)
    }

    /// The node takes what no program has taken; nobody asks it for an answer.
    pub(crate) fn of_node(space: &Space) -> anyhow::Result<Self> {
        let any = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        Self::bound(space, &[any(53), SocketAddr::new(UNCLAIMED, UNCLAIMED_PORT)])
    }

    fn bound(space: &Space, at: &[SocketAddr]) -> anyhow::Result<Self> {
        let ports: BTreeSet<u16> = packets(Protocol::Tcp).map(|packet| packet.port).collect();
        space.inside(|| {
            let datagrams = at
                .iter()
                .map(|at| UdpSocket::bind(at).with_context(|| format!("cannot bind {at}")))
                .collect::<anyhow::Result<Vec<_>>>()?;
            let connections = ports
                .iter()
                .map(|port| {
                    TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port))
                        .with_context(|| format!("cannot listen on {port}"))
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            for socket in &datagrams {
                socket.set_nonblocking(true)?;
            }
            for socket in &connections {
                socket.set_nonblocking(true)?;
            }
            Ok(Self {
                datagrams,
                connections,
            })
        })
    }

    /// Takes what has come; datagrams are answered.
    fn take(&self, mut came: impl FnMut(SocketAddr)) -> anyhow::Result<()> {
        let mut buffer = [0; 64];
        for socket in &self.datagrams {
            while let Some((length, from)) = ready(socket.recv_from(&mut buffer))? {
                came(canonical(from));
                // A consumer that cannot be reached just now has no answer: that is looked at where it matters.
                _ = socket.send_to(&buffer[..length], from);
            }
        }
        for listener in &self.connections {
            while let Some((_, from)) = ready(listener.accept())? {
                came(canonical(from));
            }
        }
        Ok(())
    }
}

/// Packets to the services, by this protocol.
fn packets(protocol: Protocol) -> impl Iterator<Item = Packet> {
    (0..SERVICES)
        .map(packet)
        .filter(move |packet| packet.protocol == protocol)
}

/// Something that has come; none if nothing has. Errors of a socket may speak of an earlier packet.
fn ready<T>(result: std::io::Result<T>) -> anyhow::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::WouldBlock
                    | ErrorKind::ConnectionRefused
                    | ErrorKind::ConnectionAborted
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// A question that was asked; the sockets live as long as it does.
#[derive(Debug)]
struct Question {
    consumer: Ifindex,
    service: u8,
    datagram: Option<UdpSocket>,
    _connection: Option<OwnedFd>,
    /// Who got it.
    by: BTreeSet<Who>,
    answered: bool,
}

/// Where a packet of a consumer to a service may arrive.
pub(crate) type Wanted = BTreeMap<(Ifindex, u8), BTreeSet<Who>>;

/// Where packets may arrive, by consumer and number of the service. Left out: those that cannot be sent, or whose
/// producer cannot receive while no agent sees that.
pub(crate) fn wanted(world: &World, place: &Place) -> Wanted {
    let mut wanted = Wanted::new();
    for dev in world.kernel.devices.values().filter(|dev| works(dev)) {
        let Some(member) = place.members.get(&dev.instance) else {
            continue;
        };
        for number in 0..SERVICES {
            let packet = packet(number);
            let source = own(member, packet.address);
            let fate = world.kernel.forward(dev.link.ifindex, source, packet);
            let arrives: Option<BTreeSet<Who>> = fate
                .verdicts
                .iter()
                .map(|verdict| match verdict {
                    Verdict::Pass | Verdict::PassHeld => Some(Who::Node),
                    Verdict::DropHeld | Verdict::DropNoProducer | Verdict::DropSpoofed => Some(Who::Nobody),
                    Verdict::Deliver(id) => {
                        let backend = world.kernel.backends.get(id)?;
                        let producer = world.kernel.devices.get(&backend.ifindex);
                        let can_receive = producer.is_some_and(works) || world.is_up();
                        can_receive.then_some(Who::Producer(backend.ifindex))
                    }
                })
                .collect();
            if let Some(arrives) = arrives {
                wanted.insert((dev.link.ifindex, number), arrives);
            }
        }
    }
    wanted
}

const fn works(dev: &Dev) -> bool {
    dev.link.up && dev.link.carrier
}

/// A workload's own address of the family of this one.
fn own(member: &Member, like: IpAddr) -> IpAddr {
    let [v4, v6] = member.workload.addresses;
    if like.is_ipv4() { v4 } else { v6 }
}

/// Sends a packet for each pair and says what is not as it is wanted; none if all is.
pub(crate) fn compare(place: &mut Place, world: &World, wanted: &Wanted) -> anyhow::Result<Option<String>> {
    let mut questions: BTreeMap<SocketAddr, Question> = BTreeMap::new();
    let mut last: BTreeSet<SocketAddr> = BTreeSet::new();
    for dev in world.kernel.devices.values() {
        let consumer = dev.link.ifindex;
        let services: Vec<u8> = (0..SERVICES)
            .filter(|service| wanted.contains_key(&(consumer, *service)))
            .collect();
        let Some(member) = place.members.get(&dev.instance).filter(|_| !services.is_empty()) else {
            continue;
        };
        let asked = ask(member, consumer, &services, &mut place.ports)?;
        last.insert(asked.last);
        questions.extend(asked.questions);
    }
    let outcome = until(PATIENCE, "packets have arrived", || {
        take(place, &mut questions, &mut last)?;
        let arrived = questions.values().all(|question| {
            let wanted = &wanted[&(question.consumer, question.service)];
            let delivered = wanted.iter().any(|who| *who != Who::Nobody);
            let answered = question.answered || question.datagram.is_none();
            let by_workload = question.by.iter().any(|who| matches!(who, Who::Producer(_)));
            !delivered || (!question.by.is_empty() && (answered || !by_workload))
        });
        Ok((arrived && last.is_empty()).then_some(()))
    });
    if !last.is_empty() {
        outcome.context("packets that no policy is about do not arrive at the node")?;
    }
    throughout(A_MOMENT, "sockets can be read", || {
        take(place, &mut questions, &mut last)?;
        Ok(true)
    })?;
    let wrong: Vec<String> = questions
        .values()
        .filter_map(|question| wrong(question, &wanted[&(question.consumer, question.service)]))
        .collect();
    Ok((!wrong.is_empty()).then(|| wrong.join("\n")))
}

fn wrong(question: &Question, wanted: &BTreeSet<Who>) -> Option<String> {
    let by = match question.by.first() {
        None => Who::Nobody,
        Some(who) => *who,
    };
    let answered = question.answered || question.datagram.is_none() || !matches!(by, Who::Producer(_));
    let right = question.by.len() <= 1 && wanted.contains(&by) && answered;
    let Packet {
        address,
        protocol,
        port,
    } = packet(question.service);
    (!right).then(|| {
        format!(
            "a packet of {} to {address} {protocol:?} {port} arrives at {:?}{}, the world has it arrive at {wanted:?}",
            question.consumer,
            question.by,
            if answered { "" } else { " and is not answered" },
        )
    })
}

struct Asked {
    questions: BTreeMap<SocketAddr, Question>,
    /// From where a packet was sent last: it arrives at the node when the others have gone through it.
    last: SocketAddr,
}

/// Sends from one workload. Each packet comes from a port that was never used before: it begins a flow.
fn ask(member: &Member, consumer: Ifindex, services: &[u8], ports: &mut u16) -> anyhow::Result<Asked> {
    member.workload.space()?.inside(|| {
        on_one_cpu();
        let mut port = || {
            *ports = ports.checked_add(1).unwrap_or(FIRST_PORT);
            *ports
        };
        let mut questions = BTreeMap::new();
        for &number in services {
            let Packet {
                address,
                protocol,
                port: to_port,
            } = packet(number);
            let (from, to) = (
                SocketAddr::new(own(member, address), port()),
                SocketAddr::new(address, to_port),
            );
            let mut question = Question {
                consumer,
                service: number,
                datagram: None,
                _connection: None,
                by: BTreeSet::new(),
                answered: false,
            };
            match protocol {
                Protocol::Udp => question.datagram = Some(send(from, to)?),
                Protocol::Tcp => question._connection = Some(connect(from, to)?),
            }
            questions.insert(from, question);
        }
        let last = SocketAddr::new(own(member, UNCLAIMED), port());
        send(last, SocketAddr::new(UNCLAIMED, UNCLAIMED_PORT))?;
        Ok(Asked { questions, last })
    })
}

fn send(from: SocketAddr, to: SocketAddr) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind(from).with_context(|| format!("cannot bind {from}"))?;
    out(&socket)?;
    socket.connect(to).with_context(|| format!("no route to {to}"))?;
    socket.set_nonblocking(true)?;
    socket
        .send(b"holdfast")
        .with_context(|| format!("cannot send to {to}"))?;
    Ok(socket)
}

/// A workload has the addresses of the services itself: what it asks others must be made to leave it.
fn out(socket: &impl AsFd) -> anyhow::Result<()> {
    let socket = socket2::SockRef::from(socket);
    socket
        .bind_device(Some(INSIDE.as_bytes()))
        .context("cannot bind to a device")
}

/// Begins to connect.
fn connect(from: SocketAddr, to: SocketAddr) -> anyhow::Result<OwnedFd> {
    let family = if to.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &from).with_context(|| format!("cannot bind {from}"))?;
    out(&socket)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno).with_context(|| format!("cannot connect to {to}")),
    }
}

/// Notes what has arrived anywhere.
fn take(
    place: &Place,
    questions: &mut BTreeMap<SocketAddr, Question>,
    last: &mut BTreeSet<SocketAddr>,
) -> anyhow::Result<()> {
    let mut note = |from: SocketAddr, who: Who| {
        last.remove(&from);
        if let Some(question) = questions.get_mut(&from) {
            question.by.insert(who);
        }
    };
    place.servers.take(|from| note(from, Who::Node))?;
    for member in place.members.values() {
        member
            .servers
            .take(|from| note(from, Who::Producer(member.number)))?;
    }
    let mut buffer = [0; 64];
    for question in questions.values_mut() {
        if let Some(socket) = &question.datagram
            && ready(socket.recv(&mut buffer))?.is_some()
        {
            question.answered = true;
        }
    }
    Ok(())
}
