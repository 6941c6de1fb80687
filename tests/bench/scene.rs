//! A consumer, a node and a producer, in as many ways as there are of leading packets through a node. Each way has a
//! node of its own: what one sets up (connection tracking, programs) costs the others nothing.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Command;

use anyhow::{Context, ensure};
use holdfast::datapath::raw::link_create;
use holdfast_engine::model::Protocol;
use holdfast_tests::ground::Ground;
use holdfast_tests::process::run;
use holdfast_tests::rtnl::{End, Rtnl};
use holdfast_tests::{Reason, Space, skip, sysctl};

use crate::asm::{self, Family};
use crate::plane::{self, PORT, Plane};

/// The producer's own addresses.
const PRODUCER: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
];
/// Gateways of the workloads: neighbour entries and no more.
const GATEWAYS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1)),
];
const CONSUMER_END: &str = "hfcbench";
const PRODUCER_END: &str = "hfpbench";
const INSIDE: &str = "eth0";

/// How packets get through the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The node routes them to the producer, who owns the services' addresses.
    Routing,
    /// The same again.
    RoutingAgain,
    /// nftables looks the service up in a map and translates its address, the node routes.
    Dnat,
    /// A program that does nothing but hand packets over.
    RedirectPeer,
    /// The real program with maps that the agent's data path has written.
    Holdfast,
}

impl Way {
    pub(crate) const ALL: [Self; 5] = [
        Self::Routing,
        Self::RoutingAgain,
        Self::Dnat,
        Self::RedirectPeer,
        Self::Holdfast,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Routing => "kernel routing",
            Self::RoutingAgain => "kernel routing again",
            Self::Dnat => "nftables DNAT map",
            Self::RedirectPeer => "bare redirect_peer",
            Self::Holdfast => "Holdfast",
        }
    }
}

/// Everything of one way.
pub(crate) struct Scene {
    pub(crate) way: Way,
    pub(crate) consumer: Space,
    pub(crate) producer: Space,
    _node: Node,
}

/// What must stay.
enum Node {
    Plain {
        _space: Space,
        _links: Vec<OwnedFd>,
    },
    Holdfast {
        _ground: Box<Ground>,
        _plane: Box<Plane>,
    },
}

impl Scene {
    /// Sets it up, with so many services.
    pub(crate) fn new(way: Way, services: u32) -> anyhow::Result<Self> {
        let scene = match way {
            Way::Holdfast => Self::holdfast(services),
            _ => Self::plain(way, services),
        };
        scene.with_context(|| way.name())
    }

    fn plain(way: Way, services: u32) -> anyhow::Result<Self> {
        let node = Space::network()?;
        node.inside(sysctl::for_node)?;
        let mut rtnl = Rtnl::open(&node)?;
        // Else both ends of the first veth have one number, and the kernel is late to tell its carrier.
        rtnl.simple("hfpad", "bridge")?;
        let mut workload = |name| -> anyhow::Result<Space> {
            let space = Space::network()?;
            rtnl.veth(End::named(name), End::named(INSIDE), Some(space.net()))?;
            rtnl.up(name)?;
            Rtnl::open(&space)?.up(INSIDE)?;
            Ok(space)
        };
        let consumer = workload(CONSUMER_END)?;
        let producer = workload(PRODUCER_END)?;
        configure(&mut rtnl, &consumer, &producer, CONSUMER_END, PRODUCER_END)?;
        let mut links = Vec::new();
        match way {
            Way::Dnat => translate(&node, services)?,
            Way::RedirectPeer => {
                let (from, to) = (rtnl.ifindex(CONSUMER_END)?, rtnl.ifindex(PRODUCER_END)?);
                node.inside(|| {
                    for (at, target) in [(from, to), (to, from)] {
                        links.push(link_create(asm::redirect_peer(target)?.as_fd(), at)?);
                    }
                    Ok(())
                })?;
            }
            _ => {}
        }
        Ok(Self {
            way,
            consumer,
            producer,
            _node: Node::Plain {
                _space: node,
                _links: links,
            },
        })
    }

    fn holdfast(services: u32) -> anyhow::Result<Self> {
        let mut ground = Ground::new()?;
        let node = ground.space().clone();
        let plane = node.inside(|| {
            sysctl::for_node()?;
            ground.rtnl.simple("hfpad", "bridge")?;
            Plane::new(&mut ground, "bench", services, Protocol::Udp)
        })?;
        let [consumer, producer] = plane.spaces.clone();
        configure(&mut ground.rtnl, &consumer, &producer, CONSUMER_END, PRODUCER_END)?;
        Ok(Self {
            way: Way::Holdfast,
            consumer,
            producer,
            _node: Node::Holdfast {
                _ground: Box::new(ground),
                _plane: Box::new(plane),
            },
        })
    }

    /// Where the first service is asked.
    pub(crate) const fn service(family: Family) -> SocketAddr {
        SocketAddr::new(plane::service(family, 0), PORT)
    }

    /// Where the producer listens for it.
    pub(crate) const fn listens_at(&self, family: Family) -> SocketAddr {
        match (self.way, family) {
            (Way::Dnat, Family::V4) => SocketAddr::new(PRODUCER[0], PORT),
            (Way::Dnat, Family::V6) => SocketAddr::new(PRODUCER[1], PORT),
            _ => Self::service(family),
        }
    }
}

/// Gives the workloads addresses and the way to the node, and the node the way to them.
fn configure(
    node: &mut Rtnl,
    consumer: &Space,
    producer: &Space,
    consumer_end: &str,
    producer_end: &str,
) -> anyhow::Result<()> {
    const SERVICES: [(Family, u8); 2] = [(Family::V4, 12), (Family::V6, 64)];
    let own = [plane::source(Family::V4, 0), plane::source(Family::V6, 0)];
    for (space, addresses, end) in [(consumer, own, consumer_end), (producer, PRODUCER, producer_end)] {
        space.inside(sysctl::for_workload)?;
        let mut rtnl = Rtnl::open(space)?;
        let host = node.device(end)?.context("the veth is gone")?;
        let inside = rtnl.device(INSIDE)?.context("the veth is gone")?;
        for (address, gateway) in addresses.into_iter().zip(GATEWAYS) {
            let (bits, any): (u8, IpAddr) = if address.is_ipv4() {
                (32, Ipv4Addr::UNSPECIFIED.into())
            } else {
                (128, Ipv6Addr::UNSPECIFIED.into())
            };
            rtnl.address(INSIDE, address, bits)?;
            rtnl.neighbour(gateway, host.mac, INSIDE)?;
            rtnl.route(any, 0, Some(gateway), INSIDE)?;
            node.route(address, bits, None, end)?;
            node.neighbour(address, inside.mac, end)?;
        }
    }
    let mut rtnl = Rtnl::open(producer)?;
    for ((family, bits), via) in SERVICES.into_iter().zip(PRODUCER) {
        rtnl.local_prefix(plane::service(family, 0), bits)?;
        // An IPv6 socket can only be bound to an address that is named.
        let whole = if via.is_ipv4() { 32 } else { 128 };
        rtnl.address("lo", plane::service(family, 0), whole)?;
        node.route(plane::service(family, 0), bits, Some(via), producer_end)?;
    }
    Ok(())
}

/// Translates every service to the producer's address, as a node's service proxy does.
fn translate(node: &Space, services: u32) -> anyhow::Result<()> {
    let mut rules = String::new();
    for (family, kind, keyword, own) in [
        (Family::V4, "ipv4_addr", "ip", PRODUCER[0]),
        (Family::V6, "ipv6_addr", "ip6", PRODUCER[1]),
    ] {
        let first = plane::service(family, 0);
        let mut elements = format!("{first} . tcp . {PORT} : {own} . {PORT}");
        for number in 0..services {
            let service = plane::service(family, number);
            write!(elements, ", {service} . udp . {PORT} : {own} . {PORT}")?;
        }
        write!(
            rules,
            "table {keyword} bench {{
               map services {{
                 type {kind} . inet_proto . inet_service : {kind} . inet_service
                 elements = {{ {elements} }}
               }}
               chain prerouting {{
                 type nat hook prerouting priority dstnat
                 dnat {keyword} to {keyword} daddr . meta l4proto . th dport map @services
               }}
             }}\n"
        )?;
    }
    let mut file = tempfile::NamedTempFile::new()?;
    std::io::Write::write_all(&mut file, rules.as_bytes())?;
    let mut command = Command::new("nft");
    command.arg("-f").arg(file.path());
    let output = match run(&mut command, node) {
        Err(error) if is_missing(&error) => return Err(skip(Reason::NoProgram("nft"))),
        other => other?,
    };
    ensure!(
        output.status.success(),
        "nft: {}",
        String::from_utf8_lossy(&output.stderr)
            .lines()
            .next()
            .unwrap_or_default()
    );
    Ok(())
}

fn is_missing(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}
