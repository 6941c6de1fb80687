//! A node that is made to look like the world: devices, registry, objects, addresses. What an action does there is
//! decided once, in the world; here it is done with real devices.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Context;
use holdfast::registry::Registration;
use holdfast_engine::model::{Identity, Ifindex};
use holdfast_tests::rtnl::Rtnl;
use holdfast_tests::{Node, Space, Workload};
use rustix::process::Signal;

use crate::files;
use crate::kernel::{Dev, Instance};
use crate::script::{Addresses, SERVICES, Setup, packet};
use crate::traffic::{FIRST_PORT, Servers};
use crate::world::World;

/// The number of a device on the node is that in the world and this: lower ones are the node's own.
const OFFSET: Ifindex = 100;

/// On the node, the number that the world has for a device.
pub(crate) const fn on_node(ifindex: Ifindex) -> Ifindex {
    ifindex + OFFSET
}

/// In the world, the number that the node has for a device; none if it is the node's own.
pub(crate) const fn in_world(ifindex: Ifindex) -> Option<Ifindex> {
    ifindex.checked_sub(OFFSET)
}

/// Where every consumer's packet arrives that no policy is about.
pub(crate) const UNCLAIMED: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 31, 255, 1));

/// What a world has besides the agent and what that has made.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    /// Devices by what they really are; whether each was moved away.
    devices: BTreeMap<Instance, (Dev, bool)>,
    registry: BTreeMap<Ifindex, Identity>,
    files: BTreeMap<String, String>,
    own: BTreeSet<IpAddr>,
}

impl Surroundings {
    pub(crate) fn of(world: &World) -> Self {
        let here = world.kernel.devices.values().map(|dev| (dev, false));
        let away = world.kernel.elsewhere.values().map(|dev| (dev, true));
        Self {
            devices: here
                .chain(away)
                .map(|(dev, away)| (dev.instance, (dev.clone(), away)))
                .collect(),
            registry: world.kernel.registry.clone(),
            files: files::of(&world.objects),
            own: world.own.clone(),
        }
    }
}

/// A workload, and who answers in it.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its number in the world.
    pub(crate) number: Ifindex,
    pub(crate) workload: Workload,
    pub(crate) servers: Servers,
    /// Where its host side was moved to.
    away: Option<Space>,
    /// Its own side is up.
    inside: bool,
}

/// The node.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) node: Node,
    pub(crate) members: BTreeMap<Instance, Member>,
    /// Who takes what reaches nobody else.
    pub(crate) servers: Servers,
    /// The last port that a packet came from.
    pub(crate) ports: u16,
    setup: Setup,
    /// An agent runs.
    pub(crate) is_up: bool,
}

/// Addresses of the services.
fn served() -> BTreeSet<IpAddr> {
    (0..SERVICES).map(|number| packet(number).address).collect()
}

impl Place {
    /// A node without workloads, objects or an agent.
    pub(crate) fn new(setup: Setup) -> anyhow::Result<Self> {
        let mut node = Node::new()?;
        node.rtnl.address("lo", UNCLAIMED, 32)?;
        // Packets that no program takes arrive here, though these are no addresses of the node.
        node.rtnl.local_prefix(Ipv4Addr::new(10, 96, 0, 0).into(), 24)?;
        node.rtnl
            .local_prefix(Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0).into(), 64)?;
        let servers = Servers::of_node(node.space())?;
        Ok(Self {
            node,
            members: BTreeMap::new(),
            servers,
            ports: FIRST_PORT,
            setup,
            is_up: false,
        })
    }

    // --- the agent -----------------------------------------------------------------------------------------

    pub(crate) fn start(&mut self) -> anyhow::Result<()> {
        if self.is_up {
            return Ok(());
        }
        let Setup {
            policies,
            slots,
            backends,
            ..
        } = self.setup;
        let sizes = [policies, slots, backends].map(|size| size.to_string());
        self.node.launch_agent(&[
            // So often, that it can be waited for.
            ("HOLDFAST_AUDIT_INTERVAL", "1s"),
            ("HOLDFAST_MAP_POLICIES", &sizes[0]),
            ("HOLDFAST_MAP_SLOTS", &sizes[1]),
            ("HOLDFAST_MAP_BACKENDS", &sizes[2]),
            ("HOLDFAST_MAP_SERVICES", "1024"),
            ("HOLDFAST_MAP_FLOWS", "4096"),
        ])?;
        self.is_up = true;
        self.node.until_ready()
    }

    pub(crate) fn crash(&mut self) -> anyhow::Result<()> {
        if self.is_up {
            self.is_up = false;
            self.node.end_agent(Signal::KILL)?;
        }
        Ok(())
    }

    /// Somebody takes the program away.
    pub(crate) fn strip(&mut self, ifindex: Ifindex) -> anyhow::Result<()> {
        let pin = self.node.pins()?.link(on_node(ifindex));
        match std::fs::remove_file(&pin) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| pin.display().to_string())
            }
            _ => Ok(()),
        }
    }

    /// Somebody says that the identity of an interface may have changed.
    pub(crate) fn poke(&mut self, interface: &str) -> anyhow::Result<()> {
        if self.is_up {
            self.node.poke(interface)
        } else {
            Ok(())
        }
    }

    // --- its surroundings ----------------------------------------------------------------------------------

    /// Changes what the world has changed.
    pub(crate) fn follow(&mut self, before: &Surroundings, now: &Surroundings) -> anyhow::Result<()> {
        for instance in before.devices.keys() {
            if !now.devices.contains_key(instance) {
                self.delete(*instance)?;
            }
        }
        for (instance, (dev, away)) in &now.devices {
            match before.devices.get(instance) {
                None => self.create(dev)?,
                Some((was, was_away)) => self.change(was, *was_away, dev, *away)?,
            }
        }
        self.register(before, now)?;
        for name in before.files.keys() {
            if !now.files.contains_key(name) {
                self.node.remove_file(name)?;
            }
        }
        for (name, text) in &now.files {
            if before.files.get(name) != Some(text) {
                self.node.put_file(name, text)?;
            }
        }
        for &address in now.own.difference(&before.own) {
            self.node.rtnl.address("lo", address, 32)?;
        }
        for &address in before.own.difference(&now.own) {
            self.node.rtnl.delete_address("lo", address, 32)?;
        }
        Ok(())
    }

    /// All objects are told again.
    pub(crate) fn relist(&self, now: &Surroundings) -> anyhow::Result<()> {
        now.files
            .iter()
            .try_for_each(|(name, text)| self.node.put_file(name, text))
    }

    fn register(&self, before: &Surroundings, now: &Surroundings) -> anyhow::Result<()> {
        for ifindex in before.registry.keys() {
            if !now.registry.contains_key(ifindex) {
                let ifindex = on_node(*ifindex);
                self.node.with_registry(|registry| {
                    if let Some(identity) = registry.read(ifindex)? {
                        registry.unregister(ifindex, identity.token)?;
                    }
                    Ok(())
                })?;
            }
        }
        for (ifindex, identity) in &now.registry {
            if before.registry.get(ifindex) == Some(identity) {
                continue;
            }
            let dev = now
                .devices
                .values()
                .find(|(dev, away)| !away && dev.link.ifindex == *ifindex);
            let (dev, _) = dev.context("a device that is not there is registered")?;
            let registration = Registration {
                interface: dev.link.name.clone(),
                identity: identity
                    .incarnation
                    .map(|incarnation| files::identity(incarnation.0[0])),
                host_mac_shared: identity.host_mac_shared,
                ..Registration::default()
            };
            self.node
                .with_registry(|registry| Ok(registry.register(&registration)?))?;
        }
        Ok(())
    }

    fn member(&mut self, dev: &Dev) -> anyhow::Result<(&mut Node, &mut Member)> {
        let member = self.members.get_mut(&dev.instance).context("no such workload")?;
        Ok((&mut self.node, member))
    }

    fn create(&mut self, dev: &Dev) -> anyhow::Result<()> {
        let link = &dev.link;
        let number = number_of(&link.name);
        let served: Vec<IpAddr> = served().into_iter().collect();
        let mut workload = Workload::new(&link.name, number, &[], &served);
        workload.interface.clone_from(&link.name);
        let own: Vec<IpAddr> = Addresses::Own.of(number).into_iter().collect();
        workload.addresses = own.try_into().ok().context("one address of each family")?;
        workload.create_as(&mut self.node, on_node(link.ifindex))?;
        let servers = Servers::of_workload(workload.space()?)?;
        let mut member = Member {
            number: link.ifindex,
            workload,
            servers,
            away: None,
            inside: true,
        };
        if link.up && !link.carrier {
            member.workload.carrier_off()?;
            member.inside = false;
        }
        if link.up {
            self.node.rtnl.up(&link.name)?;
        }
        if link.carrier {
            member.workload.up(&mut self.node)?;
        }
        self.members.insert(dev.instance, member);
        Ok(())
    }

    fn delete(&mut self, instance: Instance) -> anyhow::Result<()> {
        let mut member = self.members.remove(&instance).context("no such workload")?;
        match &member.away {
            Some(elsewhere) => Rtnl::open(elsewhere)?.delete(&member.workload.interface),
            None => member.workload.delete(&mut self.node),
        }
    }

    fn change(&mut self, was: &Dev, was_away: bool, dev: &Dev, away: bool) -> anyhow::Result<()> {
        let (node, member) = self.member(dev)?;
        let (before, now) = (&was.link, &dev.link);
        if !was_away && away {
            let elsewhere = Space::network()?;
            node.rtnl.move_to(&before.name, elsewhere.net())?;
            member.away = Some(elsewhere);
        }
        if was_away && !away {
            let elsewhere = member.away.take().context("it was not moved away")?;
            Rtnl::open(&elsewhere)?.move_as(&before.name, node.space().net(), on_node(now.ifindex))?;
            member.number = now.ifindex;
            // On its way a device goes down.
            if now.up {
                node.rtnl.up(&now.name)?;
            }
            if now.carrier {
                member.workload.up(node)?;
            }
        }
        if before.name != now.name {
            node.rtnl.rename(&before.name, &now.name)?;
            member.workload.interface.clone_from(&now.name);
        }
        if before.mac != now.mac {
            node.rtnl.set_mac(&now.name, now.mac.0)?;
            if member.inside {
                member.workload.meet_node(node)?;
            }
        }
        if before.mtu != now.mtu {
            node.rtnl.set_mtu(&now.name, now.mtu)?;
        }
        match (before.up, now.up) {
            (true, false) => return node.rtnl.down(&now.name),
            (false, true) => node.rtnl.up(&now.name)?,
            _ => {}
        }
        if now.carrier && !before.carrier {
            if !member.inside {
                member.workload.carrier_on(node)?;
                member.inside = true;
            }
            member.workload.up(node)?;
        }
        if now.up && before.carrier && !now.carrier {
            member.workload.carrier_off()?;
            member.inside = false;
        }
        Ok(())
    }
}

/// Interfaces of the world are `hf0` and so on, and a few others.
fn number_of(interface: &str) -> u8 {
    let digit = interface.strip_prefix("hf").and_then(|digit| digit.parse().ok());
    digit.unwrap_or(9)
}
