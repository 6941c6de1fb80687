//! Holdfast in the kernel: maps as the agent writes them, by the agent's own data path.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::Context;
use holdfast::datapath::raw::obj_get;
use holdfast::datapath::{Datapath as _, Kernel, Opened, Sizes};
use holdfast_ebpf::abi::{Verdict, control};
use holdfast_engine::model::{Entry, Op, Protocol, RouteKey, Row};
use holdfast_tests::Space;
use holdfast_tests::ground::{Ground, Intent, carry_out};
use holdfast_tests::space::ROOT;

use crate::asm::Family;

/// Port of every service.
pub(crate) const PORT: u16 = 53;
/// Source addresses of a consumer: a wrapper changes the last four bits.
pub(crate) const SOURCES: u8 = 16;
/// Entries that one operation writes.
const BATCH: usize = 4096;

/// The address of a service.
pub(crate) const fn service(family: Family, number: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(0x0a40_0000 + number)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits((0xfd00_0096 << 96) + number as u128)),
    }
}

/// An address that no route leads to.
pub(crate) const fn nobody(family: Family, number: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(0x0a80_0000 + number)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits((0xfd00_0097 << 96) + number as u128)),
    }
}

/// One of the consumer's own addresses.
pub(crate) const fn source(family: Family, number: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::new(10, 0, 0, 16 + number)),
        Family::V6 => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 16 + number as u16)),
    }
}

/// One consumer, one producer, and a policy between them.
pub(crate) struct Plane {
    pub(crate) kernel: Kernel,
    pub(crate) intent: Intent,
    /// The very program that the interfaces hold.
    pub(crate) program: OwnedFd,
    /// Number of the producer's interface.
    pub(crate) producer: u32,
    /// The consumer's namespace, and the producer's.
    pub(crate) spaces: [Space; 2],
}

impl Plane {
    /// Makes the devices, opens a data path with pins of its own, and writes what an intent of so many routes (of each
    /// family, by this protocol) is made of; the first service is there by both. `name` tells it from others on the
    /// same node.
    pub(crate) fn new(
        ground: &mut Ground,
        name: &str,
        routes: u32,
        protocol: Protocol,
    ) -> anyhow::Result<Self> {
        ground.options.bpffs_dir = Path::new(ROOT).join("bpf").join(name);
        // A route has a claim beside it, and there are two families.
        let services = 4 * routes + 64;
        ground.options.sizes = Sizes {
            services: services.max(Sizes::default().services),
            ..Sizes::default()
        };
        let Opened { kernel, .. } = ground.open()?;
        let (consumer, producer) = (format!("hfc{name}"), format!("hfp{name}"));
        let (mut intent, spaces) = ground.intent_between(&kernel, &consumer, &producer)?;
        intent.sources = (0..SOURCES)
            .flat_map(|number| [source(Family::V4, number), source(Family::V6, number)])
            .collect();
        intent.entries = [Family::V4, Family::V6]
            .into_iter()
            .flat_map(|family| [Protocol::Tcp, Protocol::Udp].map(|protocol| key(family, 0, protocol)))
            .map(|key| (key, entry(&intent)))
            .collect();
        let program = obj_get(&ground.pins().program(kernel.program_id())).context("no program is pinned")?;
        let plane = Self {
            producer: ground.device(&producer)?.ifindex,
            kernel,
            intent,
            program,
            spaces,
        };
        plane.write_routes(routes, protocol)?;
        for op in plane.intent.writes() {
            carry_out(&plane.kernel, &op)?;
        }
        Ok(plane)
    }

    fn write_routes(&self, routes: u32, protocol: Protocol) -> anyhow::Result<()> {
        let numbers: Vec<u32> = (0..routes).collect();
        for family in [Family::V4, Family::V6] {
            for batch in numbers.chunks(BATCH) {
                let entries: BTreeMap<_, _> = batch
                    .iter()
                    .map(|&number| (key(family, number, protocol), entry(&self.intent)))
                    .collect();
                let ifindex = self.intent.consumer.ifindex;
                carry_out(&self.kernel, &Op::WriteEntries { ifindex, entries })?;
            }
        }
        Ok(())
    }

    /// Opens or closes the consumer's row.
    pub(crate) fn hold(&self, held: bool) -> anyhow::Result<()> {
        let row = Row {
            token: self.intent.row.token.filter(|_| !held),
            ..self.intent.row
        };
        let ifindex = self.intent.consumer.ifindex;
        carry_out(&self.kernel, &Op::WriteRow { ifindex, row })?;
        Ok(())
    }

    /// Lets the consumer open as many flows as it likes, at the cost of being asked.
    pub(crate) fn no_flow_rate(&self) {
        self.kernel.maps().control.store(control::FLOW_INTERVAL, 1);
    }

    /// Packets by verdict.
    pub(crate) fn packets(&self, verdict: Verdict) -> u64 {
        let packets = self.kernel.stats().packets;
        packets.get(verdict as usize).copied().unwrap_or_default()
    }
}

fn key(family: Family, number: u32, protocol: Protocol) -> RouteKey {
    RouteKey::Service {
        address: service(family, number),
        protocol,
        port: PORT,
    }
}

const fn entry(intent: &Intent) -> Entry {
    Entry {
        policy: intent.slot,
        open: true,
    }
}
