//! A workload: a network namespace that a CNI would have made, with one link to the node.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::Context;

use crate::guest::{Frames, Guest};
use crate::node::Node;
use crate::objects::Attachment;
use crate::rtnl::{End, Mac, Rtnl};
use crate::{Space, sysctl, until};

/// The gateway that every workload has: it exists only as a neighbour entry in front of the node.
const GATEWAY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
const GATEWAY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// A bridge of the node, as a bridge CNI makes it: it has the gateway's addresses itself.
pub const BRIDGE: &str = "hfbr";
const BRIDGE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 91, 0, 1));
const BRIDGE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x91, 0, 0, 0, 0, 0, 1));

/// How long the kernel may take to let a device send: it gets round to that about once a second, for all namespaces.
const CARRIER_BUDGET: Duration = Duration::from_secs(20);

/// Of `/proc/net/ipv6_route`: packets to this destination are for this host (`linux/ipv6_route.h`).
const RTF_LOCAL: u32 = 0x8000_0000;

/// Name of the interface inside.
pub const INSIDE: &str = "eth0";

/// How a workload hangs on its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// By a veth to which the node routes. The gateway is nothing but a neighbour entry.
    #[default]
    Veth,
    /// By a veth that is a port of the node's bridge, in the bridge's networks.
    Bridged,
    /// By a tap: a virtual machine.
    Tap(Frames),
}

/// A workload and its present incarnation.
#[derive(Debug)]
pub struct Workload {
    /// Name, also of its attachment.
    pub name: String,
    /// Host-side interface.
    pub interface: String,
    /// Its own addresses.
    pub addresses: [IpAddr; 2],
    /// Addresses that it serves at.
    pub served: Vec<IpAddr>,
    /// Labels of its attachment.
    pub labels: Vec<(String, String)>,
    /// Which incarnation this is.
    pub incarnation: u32,
    /// How it hangs on the node.
    pub link: Link,
    /// The node must ask for its hardware address, as most CNIs leave it.
    pub asked_for: bool,
    /// There is no IPv6 on its host side.
    pub no_ipv6: bool,
    number: u8,
    guest: Option<Guest>,
    space: Option<Space>,
}

impl Workload {
    /// A workload that is not there yet. `number` makes its addresses.
    #[must_use]
    pub fn new(name: &str, number: u8, labels: &[(&str, &str)], served: &[IpAddr]) -> Self {
        Self {
            name: name.to_owned(),
            interface: format!("hf{name}"),
            addresses: [
                Ipv4Addr::new(10, 90, 0, number).into(),
                Ipv6Addr::new(0xfd00, 0x90, 0, 0, 0, 0, 0, number.into()).into(),
            ],
            served: served.to_vec(),
            labels: labels
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            incarnation: 0,
            link: Link::default(),
            asked_for: false,
            no_ipv6: false,
            number,
            guest: None,
            space: None,
        }
    }

    /// The same workload, linked otherwise.
    #[must_use]
    pub fn linked(mut self, link: Link) -> Self {
        self.link = link;
        if link == Link::Bridged {
            let number = self.number;
            self.addresses = [
                Ipv4Addr::new(10, 91, 0, number).into(),
                Ipv6Addr::new(0xfd00, 0x91, 0, 0, 0, 0, 0, number.into()).into(),
            ];
        }
        self
    }

    /// Its attachment object; without an expected incarnation, as in files.
    #[must_use]
    pub fn attachment(&self) -> Attachment {
        Attachment {
            name: self.name.clone(),
            interface: self.interface.clone(),
            labels: self.labels.clone(),
            identity: None,
            addresses: self.addresses.to_vec(),
        }
    }

    /// What a CNI registers for the present incarnation.
    #[must_use]
    pub fn identity(&self) -> String {
        format!("{}-{}", self.name, self.incarnation)
    }

    /// Its namespace.
    ///
    /// # Errors
    /// When it is not there.
    pub fn space(&self) -> anyhow::Result<&Space> {
        self.space
            .as_ref()
            .with_context(|| format!("{} is not there", self.name))
    }

    /// Makes a new incarnation: a namespace, a veth, addresses, routes, neighbours, all up.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create(&mut self, node: &mut Node) -> anyhow::Result<()> {
        self.create_down(node)?;
        self.up(node)
    }

    /// The same, with the host side down and without the node's routes.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create_down(&mut self, node: &mut Node) -> anyhow::Result<()> {
        self.create_as(node, 0)
    }

    /// The same, with this number for the host side: one that was another device's.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create_as(&mut self, node: &mut Node, ifindex: u32) -> anyhow::Result<()> {
        self.incarnation += 1;
        let space = Space::network()?;
        space.inside(sysctl::for_workload)?;
        if let Link::Tap(frames) = self.link {
            let guest = Guest::start(node.space(), &self.interface, &space, INSIDE, frames)?;
            self.guest = Some(guest);
            Rtnl::open(&space)?.set_mac(INSIDE, self.mac())?;
        } else {
            // Its address is the kernel's choice: random, as a CNI leaves it.
            let host = End {
                ifindex,
                ..End::named(&self.interface)
            };
            let inside = End {
                mac: Some(self.mac()),
                ..End::named(INSIDE)
            };
            node.rtnl.veth(host, inside, Some(space.net()))?;
        }
        if self.link == Link::Bridged {
            let bridge = bridge(node)?;
            node.rtnl.set_master(&self.interface, bridge)?;
        }
        if self.no_ipv6 {
            let name = format!("ipv6/conf/{}/disable_ipv6", self.interface);
            node.space().inside(|| sysctl::write(&name, "1"))?;
        }
        let host = node.rtnl.device(&self.interface)?.context("the link is gone")?;
        self.set_up_inside(&space, host.mac)?;
        self.space = Some(space);
        Ok(())
    }

    /// Sets the host side up and routes its addresses there: a device that goes down loses its routes.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn up(&self, node: &mut Node) -> anyhow::Result<()> {
        node.rtnl.up(&self.interface)?;
        if self.link != Link::Bridged {
            let addresses = self.addresses.into_iter().zip([32, 128]);
            for (address, prefix) in addresses.take(if self.no_ipv6 { 1 } else { 2 }) {
                node.rtnl.route(address, prefix, None, &self.interface)?;
                if !self.asked_for {
                    node.rtnl.neighbour(address, self.mac(), &self.interface)?;
                }
            }
        }
        self.until_it_can_send(node)
    }

    /// A device drops all that it shall send until the kernel has got round to its new carrier (`linkwatch_do_dev`),
    /// a moment later. A CNI that returns before would lose the first packet of its workload, whatever the node does.
    fn until_it_can_send(&self, node: &mut Node) -> anyhow::Result<()> {
        let mut inside = Rtnl::open(self.space()?)?;
        let what = format!("{} can send", self.name);
        until(CARRIER_BUDGET, what, || {
            // A bridge carries what its first port carries.
            let way = if self.link == Link::Bridged {
                BRIDGE
            } else {
                &self.interface
            };
            let devices = [
                node.rtnl.device(&self.interface)?,
                node.rtnl.device(way)?,
                inside.device(INSIDE)?,
            ];
            let all = devices
                .iter()
                .flatten()
                .filter(|device| device.operational)
                .count()
                == devices.len();
            Ok(all.then_some(()))
        })?;
        self.until_it_can_receive()
    }

    /// An IPv6 address is shown, and can be bound, before packets to it are taken in: its local route is made later, by a
    /// work queue (`addrconf_dad_work`), also without duplicate address detection.
    fn until_it_can_receive(&self) -> anyhow::Result<()> {
        let addresses = self.addresses.iter().chain(&self.served);
        let wanted: Vec<String> = addresses
            .filter_map(|address| match address {
                IpAddr::V6(address) => Some(format!("{:032x} 80 ", address.to_bits())),
                IpAddr::V4(_) => None,
            })
            .collect();
        until(CARRIER_BUDGET, format!("{} can receive", self.name), || {
            let routes = self
                .space()?
                .inside(|| Ok(std::fs::read_to_string("/proc/thread-self/net/ipv6_route")?))?;
            let is_local = |line: &str| {
                let flags = line
                    .split_whitespace()
                    .nth(8)
                    .and_then(|flags| u32::from_str_radix(flags, 16).ok());
                flags.is_some_and(|flags| flags & RTF_LOCAL != 0)
            };
            let all = wanted.iter().all(|address| {
                routes
                    .lines()
                    .any(|line| line.starts_with(address) && is_local(line))
            });
            Ok(all.then_some(()))
        })
    }

    const fn mac(&self) -> Mac {
        [0x02, 0x68, 0x66, 0, 0, self.number]
    }

    fn set_up_inside(&self, space: &Space, gateway: Mac) -> anyhow::Result<()> {
        let mut rtnl = Rtnl::open(space)?;
        rtnl.up(INSIDE)?;
        let prefixes = if self.link == Link::Bridged {
            [24, 64]
        } else {
            [32, 128]
        };
        for (address, prefix) in self.addresses.into_iter().zip(prefixes) {
            rtnl.address(INSIDE, address, prefix)?;
        }
        for &address in &self.served {
            rtnl.address("lo", address, if address.is_ipv4() { 32 } else { 128 })?;
        }
        if self.link != Link::Bridged {
            return route_to_node(&mut rtnl, gateway);
        }
        for via in [BRIDGE_V4, BRIDGE_V6] {
            rtnl.route(any(via), 0, Some(via), INSIDE)?;
        }
        Ok(())
    }

    /// Takes the workload's own side down: the host side loses its carrier.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn carrier_off(&self) -> anyhow::Result<()> {
        Rtnl::open(self.space()?)?.down(INSIDE)
    }

    /// Sets the workload's own side up again, with what a device that goes down loses.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn carrier_on(&self, node: &mut Node) -> anyhow::Result<()> {
        let mut rtnl = Rtnl::open(self.space()?)?;
        rtnl.up(INSIDE)?;
        // IPv6 addresses go with the device, IPv4 addresses stay.
        rtnl.address(INSIDE, self.addresses[1], 128)?;
        self.meet_node(node)?;
        self.until_it_can_send(node)
    }

    /// Tells the workload the present address of its host side: it may have changed.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn meet_node(&self, node: &mut Node) -> anyhow::Result<()> {
        let host = node.rtnl.device(&self.interface)?.context("the veth is gone")?;
        route_to_node(&mut Rtnl::open(self.space()?)?, host.mac)
    }

    /// Deletes the interface, and with it the present incarnation.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn delete(&mut self, node: &mut Node) -> anyhow::Result<()> {
        node.rtnl.delete(&self.interface)?;
        self.guest = None;
        self.space = None;
        Ok(())
    }

    /// Registers the present incarnation, as a CNI does that tells nobody.
    ///
    /// # Errors
    /// When the row cannot be written.
    pub fn register_silently(&self, node: &Node) -> anyhow::Result<()> {
        node.register_silently(&self.interface, &self.identity())
    }

    /// Registers the present incarnation, as a CNI does.
    ///
    /// # Errors
    /// When `holdfast attachment register` does not exit with 0.
    pub fn register(&self, node: &Node) -> anyhow::Result<()> {
        node.register(&self.interface, &self.identity())
    }
}

/// Everything goes to the node, which the gateway's address stands for.
fn route_to_node(rtnl: &mut Rtnl, gateway: Mac) -> anyhow::Result<()> {
    for via in [GATEWAY_V4, GATEWAY_V6] {
        rtnl.neighbour(via, gateway, INSIDE)?;
        rtnl.route(any(via), 0, Some(via), INSIDE)?;
    }
    Ok(())
}

/// The unspecified address of the same family.
const fn any(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Number of the node's bridge, which is made if it is not there.
fn bridge(node: &mut Node) -> anyhow::Result<u32> {
    if let Some(bridge) = node.rtnl.device(BRIDGE)? {
        return Ok(bridge.ifindex);
    }
    node.rtnl.simple(BRIDGE, "bridge")?;
    node.rtnl.address(BRIDGE, BRIDGE_V4, 24)?;
    node.rtnl.address(BRIDGE, BRIDGE_V6, 64)?;
    node.rtnl.up(BRIDGE)?;
    node.rtnl.ifindex(BRIDGE)
}
