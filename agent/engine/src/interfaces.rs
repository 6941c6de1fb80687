//! The table of network devices, and which device has which name.
//!
//! News of links may come late, twice or in the wrong order (a dump is not ordered against notifications).
//! So a name may seem to belong to two devices for a moment. The device that had it keeps it until the
//! kernel, asked for each of them, says who is gone; whoever is right, nothing has been torn down.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::model::{Device, Ifindex, Link, LinkKind};

/// The devices that are known.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Interfaces {
    links: BTreeMap<Ifindex, Link>,
    /// By name: the device that has it, then others that claim it, in the order in which they came.
    names: BTreeMap<String, Vec<Ifindex>>,
    contested: BTreeSet<String>,
    /// By master: its ports.
    ports: BTreeMap<Ifindex, BTreeSet<Ifindex>>,
}

/// What one piece of news changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    /// Names whose device, or whose device's state, may be another now.
    pub names: BTreeSet<String>,
    /// Another device stands behind this number now (also: none, or under another name).
    pub replaced: bool,
}

impl Interfaces {
    /// One device.
    pub(crate) fn link(&self, ifindex: Ifindex) -> Option<&Link> {
        self.links.get(&ifindex)
    }

    /// The device that has this name.
    pub(crate) fn named(&self, name: &str) -> Option<Ifindex> {
        self.names.get(name).and_then(|claims| claims.first()).copied()
    }

    /// The bridge that a device is a port of.
    pub(crate) fn bridge_of(&self, link: &Link) -> Option<Ifindex> {
        link.master.filter(|master| self.is_bridge(*master))
    }

    fn is_bridge(&self, ifindex: Ifindex) -> bool {
        self.link(ifindex)
            .is_some_and(|link| link.kind == LinkKind::Bridge)
    }

    /// Whether there is IPv6 on a device.
    pub(crate) fn speaks_ipv6(&self, ifindex: Ifindex) -> bool {
        self.link(ifindex).is_some_and(|link| link.ipv6)
    }

    /// Names of the ports of a device.
    fn names_of_ports(&self, master: Ifindex) -> impl Iterator<Item = String> + '_ {
        let ports = self.ports.get(&master).into_iter().flatten();
        ports.filter_map(|port| self.link(*port).map(|link| link.name.clone()))
    }

    fn enslave(&mut self, port: Ifindex, before: Option<Ifindex>, after: Option<Ifindex>) {
        if let Some(master) = before.filter(|_| before != after)
            && let Some(ports) = self.ports.get_mut(&master)
        {
            ports.remove(&port);
            if ports.is_empty() {
                self.ports.remove(&master);
            }
        }
        if let Some(master) = after {
            self.ports.entry(master).or_default().insert(port);
        }
    }

    /// Every number in use.
    pub(crate) fn ifindexes(&self) -> impl Iterator<Item = Ifindex> + '_ {
        self.links.keys().copied()
    }

    /// How many devices there are.
    pub(crate) fn len(&self) -> usize {
        self.links.len()
    }

    /// Devices that must be asked for, because a name seems to belong to several.
    pub(crate) fn contested(&self) -> BTreeSet<Ifindex> {
        self.contested
            .iter()
            .filter_map(|name| self.names.get(name))
            .flatten()
            .copied()
            .collect()
    }

    /// A device is there, new or changed. `None`: it is known exactly like that.
    pub(crate) fn present(&mut self, link: Link) -> Option<Change> {
        let mut change = Change::default();
        if let Some(old) = self.links.get(&link.ifindex) {
            if *old == link {
                return None;
            }
            change.replaced = old.mac != link.mac || old.name != link.name;
            if old.name != link.name {
                let name = old.name.clone();
                self.unclaim(&name, link.ifindex);
                change.names.insert(name);
            }
        } else {
            change.replaced = true;
        }
        let claims = self.names.entry(link.name.clone()).or_default();
        if !claims.contains(&link.ifindex) {
            claims.push(link.ifindex);
        }
        if claims.len() > 1 {
            self.contested.insert(link.name.clone());
        }
        change.names.insert(link.name.clone());
        let is_bridge = link.kind == LinkKind::Bridge;
        let spoke_ipv6 = self.speaks_ipv6(link.ifindex);
        if self.is_bridge(link.ifindex) != is_bridge || is_bridge && spoke_ipv6 != link.ipv6 {
            // Its ports are reached by it from now on, or no longer, or by other families.
            change.names.extend(self.names_of_ports(link.ifindex));
        }
        let before = self.links.get(&link.ifindex).and_then(|old| old.master);
        self.enslave(link.ifindex, before, link.master);
        self.links.insert(link.ifindex, link);
        Some(change)
    }

    /// A device is gone. `None`: it was not known.
    pub(crate) fn gone(&mut self, ifindex: Ifindex) -> Option<Change> {
        let link = self.links.remove(&ifindex)?;
        self.unclaim(&link.name, ifindex);
        self.enslave(ifindex, link.master, None);
        let mut names = BTreeSet::from([link.name]);
        if link.kind == LinkKind::Bridge {
            names.extend(self.names_of_ports(ifindex));
        }
        Some(Change {
            names,
            replaced: true,
        })
    }

    fn unclaim(&mut self, name: &str, ifindex: Ifindex) {
        let Some(claims) = self.names.get_mut(name) else {
            return;
        };
        let had_it = claims.first() == Some(&ifindex);
        claims.retain(|claim| *claim != ifindex);
        if had_it && let Some(newest) = claims.pop() {
            claims.insert(0, newest);
        }
        if claims.len() < 2 {
            self.contested.remove(name);
        }
        if claims.is_empty() {
            self.names.remove(name);
        }
    }
}

impl Link {
    /// The device that an operation on this link names.
    pub(crate) const fn device(&self) -> Device {
        Device {
            ifindex: self.ifindex,
            mac: self.mac,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Mac;

    fn link(ifindex: Ifindex, name: &str) -> Link {
        Link {
            ifindex,
            name: name.into(),
            mac: Mac([2, 0, 0, 0, 0, u8::try_from(ifindex).unwrap()]),
            up: true,
            carrier: true,
            kind: LinkKind::Other,
            master: None,
            mtu: 1500,
            ipv6: true,
        }
    }

    #[test]
    fn a_name_stays_with_its_device_until_that_is_gone() {
        let mut table = Interfaces::default();
        table.present(link(10, "x"));
        table.present(link(11, "x"));
        assert_eq!(table.named("x"), Some(10));
        assert_eq!(table.contested(), BTreeSet::from([10, 11]));
        table.gone(10);
        assert_eq!(table.named("x"), Some(11));
        assert_eq!(table.contested(), BTreeSet::new());
    }

    #[test]
    fn a_late_add_of_a_dead_device_takes_nothing_away() {
        let mut table = Interfaces::default();
        table.present(link(11, "x"));
        table.gone(10);
        table.present(link(10, "x"));
        assert_eq!(table.named("x"), Some(11));
        table.gone(10);
        assert_eq!(table.named("x"), Some(11));
    }

    #[test]
    fn a_rename_frees_the_old_name_and_is_another_device() {
        let mut table = Interfaces::default();
        table.present(link(10, "x"));
        let change = table.present(link(10, "y")).unwrap();
        assert_eq!(change.names, BTreeSet::from(["x".to_owned(), "y".to_owned()]));
        assert!(change.replaced);
        assert_eq!(table.named("x"), None);
        assert_eq!(table.named("y"), Some(10));
    }

    #[test]
    fn a_bridge_that_comes_or_goes_concerns_its_ports() {
        let mut table = Interfaces::default();
        let port = Link {
            master: Some(20),
            ..link(10, "x")
        };
        table.present(port.clone());
        assert_eq!(table.bridge_of(&port), None, "nobody knows what its master is");
        let bridge = Link {
            kind: LinkKind::Bridge,
            ..link(20, "br")
        };
        let both = BTreeSet::from(["x".to_owned(), "br".to_owned()]);
        assert_eq!(table.present(bridge.clone()).unwrap().names, both);
        assert_eq!(table.bridge_of(&port), Some(20));
        // What changes of it otherwise is its own affair.
        let up = Link {
            mtu: 9000,
            ..bridge.clone()
        };
        let names = table.present(up).unwrap().names;
        assert_eq!(names, BTreeSet::from(["br".to_owned()]));
        assert_eq!(table.gone(20).unwrap().names, both);
        assert_eq!(table.bridge_of(&port), None);
        // A port that left is told of no more.
        table.present(link(10, "x"));
        let names = table.present(bridge).unwrap().names;
        assert_eq!(names, BTreeSet::from(["br".to_owned()]));
    }

    #[test]
    fn the_same_news_twice_is_no_news() {
        let mut table = Interfaces::default();
        assert!(table.present(link(10, "x")).is_some());
        assert_eq!(table.present(link(10, "x")), None);
        assert!(table.gone(10).is_some());
        assert_eq!(table.gone(10), None);
    }
}
