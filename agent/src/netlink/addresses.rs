//! The node's own addresses: which there are, and whether that is told. No I/O, no clock.

use std::collections::BTreeSet;
use std::net::IpAddr;

use holdfast_engine::model::Ifindex;

/// One address at one interface, as the kernel tells addresses apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Own {
    /// The node's own.
    pub(super) address: IpAddr,
    /// Where it is.
    pub(super) ifindex: Ifindex,
    /// Prefix length and `IFA_ADDRESS` (the peer, where there is one) of an IPv4 address, which one interface can have
    /// once for each. An IPv6 address it has once, and may change the peer of.
    pub(super) network: Option<(u8, IpAddr)>,
}

impl Own {
    /// Whether its traffic could be captured at all. Link-local traffic never is, and every interface that is up has
    /// such an address: they would fill the map.
    const fn counts(&self) -> bool {
        match self.address {
            IpAddr::V4(address) => !address.is_link_local(),
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        }
    }
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    known: BTreeSet<Own>,
    dump: Option<Dump>,
    /// There was a whole dump: what is known is all there is.
    complete: bool,
    told: Option<BTreeSet<IpAddr>>,
    /// Something has changed since it was told last.
    changed: bool,
}

/// A dump under way. As with devices, what a notification says since it was asked for wins.
#[derive(Debug, Default)]
struct Dump {
    sequence: u32,
    seen: BTreeSet<Own>,
    overtaken: BTreeSet<Own>,
    interrupted: bool,
}

impl Addresses {
    /// A notification says that an address is there, or no more.
    pub(super) fn notified(&mut self, own: Own, there: bool) {
        if let Some(dump) = &mut self.dump {
            dump.overtaken.insert(own);
        }
        self.put(own, there);
    }

    fn put(&mut self, own: Own, there: bool) {
        self.changed |= if there {
            own.counts() && self.known.insert(own)
        } else {
            self.known.remove(&own)
        };
    }

    /// A dump is under way.
    pub(super) const fn dumping(&self) -> bool {
        self.dump.is_some()
    }

    /// The dump under way has this number.
    pub(super) fn is_dump(&self, sequence: u32) -> bool {
        self.dump.as_ref().is_some_and(|dump| dump.sequence == sequence)
    }

    /// A dump was asked for.
    pub(super) fn dump_begun(&mut self, sequence: u32) {
        self.dump = Some(Dump {
            sequence,
            ..Dump::default()
        });
    }

    /// It will not come to an end.
    pub(super) fn give_up_dump(&mut self) {
        self.dump = None;
    }

    /// The dump shows an address.
    pub(super) fn dumped(&mut self, own: Own) {
        if let Some(dump) = &mut self.dump {
            dump.seen.insert(own);
        }
    }

    /// The list changed while it was being dumped.
    pub(super) fn interrupted(&mut self) {
        if let Some(dump) = &mut self.dump {
            dump.interrupted = true;
        }
    }

    /// The dump is at its end. An interrupted one may lack what has been there all the time, and single addresses
    /// cannot be asked for: it counts for nothing. Says whether it was.
    pub(super) fn dump_ended(&mut self) -> bool {
        let Some(dump) = self.dump.take() else {
            return false;
        };
        if dump.interrupted {
            return true;
        }
        let gone: Vec<Own> = self.known.difference(&dump.seen).copied().collect();
        for own in gone {
            if !dump.overtaken.contains(&own) {
                self.put(own, false);
            }
        }
        for own in dump.seen.difference(&dump.overtaken) {
            self.put(*own, true);
        }
        self.changed |= !self.complete;
        self.complete = true;
        false
    }

    /// Whether there may be something to tell.
    pub(super) const fn has_news(&self) -> bool {
        self.complete && self.changed
    }

    /// All of them, if they are others than those told last.
    pub(super) fn next_news(&mut self) -> Option<BTreeSet<IpAddr>> {
        if !self.has_news() {
            return None;
        }
        self.changed = false;
        let all: BTreeSet<IpAddr> = self.known.iter().map(|own| own.address).collect();
        if self.told.as_ref() == Some(&all) {
            return None;
        }
        self.told = Some(all.clone());
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn own(address: &str, ifindex: Ifindex) -> Own {
        Own {
            address: address.parse().unwrap(),
            ifindex,
            network: None,
        }
    }

    fn dumped(addresses: &mut Addresses, sequence: u32, seen: &[Own]) {
        addresses.dump_begun(sequence);
        for own in seen {
            addresses.dumped(*own);
        }
        assert!(!addresses.dump_ended());
    }

    fn all(addresses: &[&str]) -> Option<BTreeSet<IpAddr>> {
        Some(addresses.iter().map(|address| address.parse().unwrap()).collect())
    }

    #[test]
    fn nothing_is_told_before_all_is_known() {
        let mut addresses = Addresses::default();
        addresses.notified(own("10.0.0.1", 2), true);
        assert_eq!(addresses.next_news(), None);
        addresses.dump_begun(1);
        assert_eq!(addresses.next_news(), None);
        addresses.dumped(own("10.0.0.1", 2));
        addresses.dumped(own("127.0.0.1", 1));
        assert!(!addresses.dump_ended());
        assert_eq!(addresses.next_news(), all(&["10.0.0.1", "127.0.0.1"]));
        assert_eq!(addresses.next_news(), None);
    }

    #[test]
    fn none_at_all_is_news_too() {
        let mut addresses = Addresses::default();
        dumped(&mut addresses, 1, &[]);
        assert_eq!(addresses.next_news(), all(&[]));
    }

    #[test]
    fn an_address_is_there_until_the_last_interface_has_lost_it() {
        let mut addresses = Addresses::default();
        dumped(&mut addresses, 1, &[own("10.0.0.1", 2), own("10.0.0.1", 3)]);
        assert_eq!(addresses.next_news(), all(&["10.0.0.1"]));
        addresses.notified(own("10.0.0.1", 2), false);
        assert_eq!(addresses.next_news(), None, "the other has it still");
        addresses.notified(own("10.0.0.1", 3), false);
        assert_eq!(addresses.next_news(), all(&[]));
    }

    #[test]
    fn link_local_addresses_do_not_count() {
        let mut addresses = Addresses::default();
        dumped(&mut addresses, 1, &[own("fe80::1", 2), own("169.254.1.1", 2)]);
        assert_eq!(addresses.next_news(), all(&[]));
        addresses.notified(own("fe80::2", 2), true);
        assert!(!addresses.has_news());
    }

    #[test]
    fn a_notification_wins_over_the_dump_that_was_under_way() {
        let mut addresses = Addresses::default();
        dumped(&mut addresses, 1, &[own("10.0.0.1", 2)]);
        addresses.dump_begun(2);
        addresses.dumped(own("10.0.0.1", 2));
        addresses.notified(own("10.0.0.1", 2), false);
        addresses.notified(own("10.0.0.2", 2), true);
        assert!(!addresses.dump_ended());
        assert_eq!(addresses.next_news(), all(&["10.0.0.2"]));
    }

    #[test]
    fn an_interrupted_dump_counts_for_nothing() {
        let mut addresses = Addresses::default();
        dumped(&mut addresses, 1, &[own("10.0.0.1", 2)]);
        assert_eq!(addresses.next_news(), all(&["10.0.0.1"]));
        addresses.dump_begun(2);
        addresses.dumped(own("10.0.0.2", 2));
        addresses.interrupted();
        assert!(addresses.dump_ended(), "interrupted");
        assert_eq!(addresses.next_news(), None);
    }

    /// A kernel with its two queues: what a dump shows is what was there when that part was made.
    #[derive(Default)]
    struct World {
        there: BTreeSet<Own>,
        queue: VecDeque<(Own, bool)>,
        lost: bool,
        addresses: Addresses,
        sequence: u32,
        /// Parts of a dump that are made and not taken in yet; the kernel is one part ahead of the reader.
        parts: VecDeque<Vec<Own>>,
        next_interface: Ifindex,
        reader: Option<BTreeSet<IpAddr>>,
    }

    const INTERFACES: Ifindex = 4;

    impl World {
        fn step(&mut self, action: u8, last: u8, ifindex: Ifindex) {
            let own = own(&format!("10.0.0.{last}"), ifindex);
            match action {
                0 | 1 if self.there.insert(own) => self.queue.push_back((own, true)),
                2 if self.there.remove(&own) => self.queue.push_back((own, false)),
                3 => {
                    self.queue.clear();
                    self.lost = true;
                }
                4 => _ = self.notify_one(),
                5 if !self.addresses.dumping() => self.begin(),
                6 | 7 => _ = self.take_part(),
                _ => self.read_one(),
            }
        }

        fn begin(&mut self) {
            self.lost = false;
            self.sequence += 1;
            self.addresses.dump_begun(self.sequence);
            self.next_interface = 1;
            self.make_part();
        }

        fn make_part(&mut self) {
            if self.next_interface <= INTERFACES {
                let of = self.next_interface;
                let part = self.there.iter().filter(|own| own.ifindex == of).copied();
                self.parts.push_back(part.collect());
                self.next_interface += 1;
            }
        }

        /// As the task does: it catches up before it takes an answer in.
        fn take_part(&mut self) -> bool {
            let Some(part) = self.parts.pop_front() else {
                return false;
            };
            self.make_part();
            while self.notify_one() {}
            for own in part {
                self.addresses.dumped(own);
            }
            if self.parts.is_empty() {
                assert!(!self.addresses.dump_ended());
            }
            true
        }

        fn notify_one(&mut self) -> bool {
            let next = self.queue.pop_front();
            if let Some((own, there)) = next {
                self.addresses.notified(own, there);
            }
            next.is_some()
        }

        fn read_one(&mut self) {
            if let Some(all) = self.addresses.next_news() {
                self.reader = Some(all);
            }
        }

        fn settle(&mut self) {
            while self.take_part() {}
            if self.lost {
                self.begin();
                while self.take_part() {}
            }
            while self.notify_one() {}
            self.read_one();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn whatever_the_order_the_reader_ends_with_what_is_there(
            steps in prop::collection::vec((0_u8..10, 1_u8..4, 1..=INTERFACES), 0..100)
        ) {
            let mut world = World::default();
            world.begin();
            for (action, last, ifindex) in steps {
                world.step(action, last, ifindex);
            }
            world.settle();
            let there = world.there.iter().map(|own| own.address).collect();
            prop_assert_eq!(world.reader, Some(there));
        }
    }
}
