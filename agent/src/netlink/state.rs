//! What is known of the devices and addresses, what is asked, and what is still to be told. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Ifindex, Link};

use super::LinkNews;
use super::addresses::Addresses;
use super::dump::Dump;
use super::parse::{Content, Message, messages};

/// Questions after single devices that may be unanswered at a time: their answers must fit into a receive buffer.
const ASKS_AT_ONCE: usize = 32;

/// Changes that may wait beyond one a device before they are told as one dump.
const SPARE_CHANGES: usize = 4096;

/// Why what is known can no longer be trusted to be complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Notifications were dropped.
    Overrun,
    /// A datagram could not be understood.
    Undecodable,
    /// A dump ended early or was refused.
    Cut,
}

/// A dump that has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Finished {
    /// What was dumped.
    pub(super) what: Dumped,
    /// The list changed meanwhile.
    pub(super) interrupted: bool,
}

/// What a dump is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dumped {
    /// Devices.
    Links,
    /// Devices, only to be compared with what is known of them.
    Check,
    /// The node's own addresses.
    Addresses,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct State {
    addresses: Addresses,
    known: BTreeMap<Ifindex, Link>,
    dump: Option<Dump>,
    to_ask: BTreeSet<Ifindex>,
    asked: BTreeMap<u32, Asked>,
    /// A check saw them otherwise than is known, and they are asked for: a notification may be on its way.
    suspects: BTreeSet<Ifindex>,
    untold: Untold,
}

#[derive(Debug)]
struct Asked {
    ifindex: Ifindex,
    /// Told of by a notification since it was asked for: that wins.
    overtaken: bool,
}

impl State {
    /// Takes in a datagram of the subscription.
    pub(super) fn notified(&mut self, datagram: &[u8]) -> Result<(), Trouble> {
        for message in messages(datagram) {
            match message.map_err(|_| Trouble::Undecodable)?.content {
                Content::Present(link) => {
                    self.overtake(link.ifindex);
                    self.learn(link);
                }
                Content::Orphaned(link) => {
                    self.overtake(link.ifindex);
                    let link = self.as_it_was(link);
                    self.learn(link);
                }
                Content::Gone(ifindex) => {
                    self.overtake(ifindex);
                    self.forget(ifindex);
                }
                // Its answer may be readable; if not, what was known of it stays.
                Content::Unreadable(ifindex) => _ = self.to_ask.insert(ifindex),
                Content::Address(own) => self.addresses.notified(own, true),
                Content::AddressGone(own) => self.addresses.notified(own, false),
                Content::Overrun => return Err(Trouble::Overrun),
                Content::Done(_) | Content::Answer(_) | Content::Other => {}
            }
        }
        Ok(())
    }

    /// Takes in a datagram of answers.
    pub(super) fn answered(&mut self, datagram: &[u8]) -> Result<Option<Finished>, Trouble> {
        let mut finished = None;
        for message in messages(datagram) {
            let message = message.map_err(|_| Trouble::Undecodable)?;
            if message.content == Content::Overrun {
                return Err(Trouble::Cut);
            }
            if let Some(asked) = self.asked.get(&message.sequence) {
                let (ifindex, overtaken) = (asked.ifindex, asked.overtaken);
                self.ask_answered(message.sequence, ifindex, overtaken, message.content);
                continue;
            }
            if self.addresses.is_dump(message.sequence) {
                finished = self.address_dump(&message)?.or(finished);
                continue;
            }
            let Some(dump) = self
                .dump
                .as_mut()
                .filter(|dump| dump.sequence == message.sequence)
            else {
                // A late answer to a question that was given up.
                continue;
            };
            dump.interrupted |= message.interrupted;
            match message.content {
                Content::Present(link) => _ = dump.links.insert(link.ifindex, link),
                // Its end has a notification of its own; until then it is what it was.
                Content::Orphaned(link) => {
                    let kind = self
                        .known
                        .get(&link.ifindex)
                        .map_or(link.kind, |known| known.kind);
                    dump.links.insert(link.ifindex, Link { kind, ..link });
                }
                Content::Unreadable(ifindex) => _ = dump.unreadable.insert(ifindex),
                Content::Done(0) => finished = self.dump.take().map(|dump| self.take_over(dump)),
                Content::Done(_) | Content::Answer(_) => {
                    self.dump = None;
                    return Err(Trouble::Cut);
                }
                Content::Gone(_)
                | Content::Address(_)
                | Content::AddressGone(_)
                | Content::Overrun
                | Content::Other => {}
            }
        }
        Ok(finished)
    }

    fn address_dump(&mut self, message: &Message) -> Result<Option<Finished>, Trouble> {
        if message.interrupted {
            self.addresses.interrupted();
        }
        match message.content {
            Content::Address(own) => self.addresses.dumped(own),
            Content::Done(0) => {
                return Ok(Some(Finished {
                    what: Dumped::Addresses,
                    interrupted: self.addresses.dump_ended(),
                }));
            }
            Content::Done(_) | Content::Answer(_) => {
                self.addresses.give_up_dump();
                return Err(Trouble::Cut);
            }
            _ => {}
        }
        Ok(None)
    }

    /// A dump is under way.
    pub(super) const fn dumping(&self) -> bool {
        self.dump.is_some() || self.addresses.dumping()
    }

    /// A dump was asked for.
    pub(super) fn dump_begun(&mut self, what: Dumped, sequence: u32) {
        match what {
            Dumped::Links | Dumped::Check => {
                self.dump = Some(Dump {
                    sequence,
                    check: what == Dumped::Check,
                    ..Dump::default()
                });
            }
            Dumped::Addresses => self.addresses.dump_begun(sequence),
        }
    }

    /// News were lost: a dump that was only to be compared with what is known becomes one that is told.
    pub(super) fn distrust(&mut self) {
        if let Some(dump) = &mut self.dump {
            dump.check = false;
        }
        self.suspects.clear();
    }

    /// No question will be answered any more: the dump is off, single devices are asked for again.
    pub(super) fn give_up_questions(&mut self) {
        self.dump = None;
        self.addresses.give_up_dump();
        self.give_up_asks();
    }

    /// Single devices are asked for again.
    pub(super) fn give_up_asks(&mut self) {
        for (_, asked) in std::mem::take(&mut self.asked) {
            self.to_ask.insert(asked.ifindex);
        }
    }

    /// These devices are to be asked for.
    pub(super) fn ask(&mut self, ifindexes: BTreeSet<Ifindex>) {
        self.to_ask.extend(ifindexes);
    }

    /// The next device to ask for, if another question may be put now.
    pub(super) fn next_ask(&mut self) -> Option<Ifindex> {
        (self.asked.len() < ASKS_AT_ONCE)
            .then(|| self.to_ask.pop_first())
            .flatten()
    }

    /// A device was asked for.
    pub(super) fn asked(&mut self, sequence: u32, ifindex: Ifindex) {
        let overtaken = false;
        self.asked.insert(sequence, Asked { ifindex, overtaken });
    }

    /// Questions after single devices are unanswered.
    pub(super) fn asking(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Whether there is something to tell.
    pub(super) fn has_news(&self) -> bool {
        !self.untold.is_empty() || self.addresses.has_news()
    }

    /// Takes the next thing to tell.
    pub(super) fn next_news(&mut self) -> Option<LinkNews> {
        let devices = self.untold.next(&self.known);
        devices.or_else(|| self.addresses.next_news().map(LinkNews::Locals))
    }

    fn overtake(&mut self, ifindex: Ifindex) {
        if let Some(dump) = &mut self.dump {
            dump.overtaken.insert(ifindex);
        }
        for asked in self.asked.values_mut() {
            asked.overtaken |= asked.ifindex == ifindex;
        }
    }

    /// A message that says nothing new is no news.
    fn learn(&mut self, link: Link) {
        let ifindex = link.ifindex;
        if self.known.get(&ifindex) != Some(&link) {
            self.known.insert(ifindex, link);
            self.untold.changed(ifindex, false, &self.known);
        }
    }

    fn forget(&mut self, ifindex: Ifindex) {
        if self.known.remove(&ifindex).is_some() {
            self.untold.changed(ifindex, true, &self.known);
        }
    }

    /// A device that is being deleted, with the kind that it had before.
    fn as_it_was(&self, link: Link) -> Link {
        let kind = self
            .known
            .get(&link.ifindex)
            .map_or(link.kind, |known| known.kind);
        Link { kind, ..link }
    }

    /// An answer is told in any case: whoever asked does not believe what it knows.
    fn ask_answered(&mut self, sequence: u32, ifindex: Ifindex, overtaken: bool, content: Content) {
        let before = self.known.get(&ifindex).cloned();
        match content {
            Content::Present(link) | Content::Orphaned(link) if link.ifindex == ifindex && overtaken => {}
            Content::Present(link) if link.ifindex == ifindex => _ = self.known.insert(ifindex, link),
            Content::Orphaned(link) if link.ifindex == ifindex => {
                let link = self.as_it_was(link);
                self.known.insert(ifindex, link);
            }
            Content::Answer(libc::ENODEV) => {
                if !overtaken {
                    self.known.remove(&ifindex);
                }
            }
            // No news: what is known is all there is to tell.
            Content::Unreadable(_) if self.known.contains_key(&ifindex) => {}
            Content::Unreadable(_) => {
                self.asked.remove(&sequence);
                return;
            }
            // Refused for a moment: it runs into its timeout and is asked again.
            _ => return,
        }
        self.asked.remove(&sequence);
        if self.suspects.remove(&ifindex) && self.known.get(&ifindex) != before.as_ref() {
            self.untold.drifted.insert(ifindex);
        }
        let gone = !self.known.contains_key(&ifindex);
        self.untold.changed(ifindex, gone, &self.known);
    }

    fn take_over(&mut self, dump: Dump) -> Finished {
        let absent: Vec<Ifindex> = self
            .known
            .keys()
            .copied()
            .filter(|ifindex| {
                !dump.links.contains_key(ifindex)
                    && !dump.unreadable.contains(ifindex)
                    && !dump.overtaken.contains(ifindex)
            })
            .collect();
        let Dump {
            interrupted, check, ..
        } = dump;
        if check {
            let other = dump.links.iter().filter(|(ifindex, link)| {
                !dump.overtaken.contains(ifindex) && self.known.get(ifindex) != Some(link)
            });
            self.suspects.extend(other.map(|(ifindex, _)| *ifindex));
            self.suspects.extend(absent);
            self.to_ask.extend(&self.suspects);
            return Finished {
                what: Dumped::Check,
                interrupted,
            };
        }
        if interrupted {
            self.to_ask.extend(absent);
        } else {
            for ifindex in absent {
                self.forget(ifindex);
            }
        }
        for (ifindex, link) in dump.links {
            if !dump.overtaken.contains(&ifindex) {
                self.known.insert(ifindex, link);
            }
        }
        self.untold.dump(&self.known);
        Finished {
            what: Dumped::Links,
            interrupted,
        }
    }
}

/// What the reader does not know yet: at most one dump, and one entry a device. The content is taken from what is known
/// when it is told, so that a slow reader gets the newest; but that a device was gone in between is never left out:
/// the one that is there now is another, even with the same number, name and address.
#[derive(Debug, Default)]
struct Untold {
    /// Devices that a check found otherwise than had been told.
    drifted: BTreeSet<Ifindex>,
    /// Devices of which it must be said before the dump that an earlier one is gone.
    gone_before: BTreeSet<Ifindex>,
    dump: bool,
    /// By device: its place, and whether an earlier one is gone.
    changes: BTreeMap<Ifindex, (u64, bool)>,
    /// Devices in the order of their first change.
    places: BTreeMap<u64, Ifindex>,
    next_place: u64,
}

impl Untold {
    fn is_empty(&self) -> bool {
        !self.dump && self.drifted.is_empty() && self.gone_before.is_empty() && self.changes.is_empty()
    }

    fn changed(&mut self, ifindex: Ifindex, gone: bool, known: &BTreeMap<Ifindex, Link>) {
        if let Some((_, was_gone)) = self.changes.get_mut(&ifindex) {
            *was_gone |= gone;
            return;
        }
        if self.changes.len() >= known.len() + SPARE_CHANGES {
            self.dump(known);
            return;
        }
        self.changes.insert(ifindex, (self.next_place, gone));
        self.places.insert(self.next_place, ifindex);
        self.next_place += 1;
    }

    /// A dump says all that waits but this: what is there now is not what was there before.
    fn dump(&mut self, known: &BTreeMap<Ifindex, Link>) {
        let replaced = self.changes.iter().filter(|(_, (_, gone))| *gone);
        self.gone_before.extend(
            replaced
                .map(|(ifindex, _)| *ifindex)
                .filter(|ifindex| known.contains_key(ifindex)),
        );
        self.changes.clear();
        self.places.clear();
        self.dump = true;
    }

    fn next(&mut self, known: &BTreeMap<Ifindex, Link>) -> Option<LinkNews> {
        if !self.drifted.is_empty() {
            return Some(LinkNews::Drifted(std::mem::take(&mut self.drifted)));
        }
        if let Some(ifindex) = self.gone_before.pop_first() {
            return Some(LinkNews::Gone(ifindex));
        }
        if std::mem::take(&mut self.dump) {
            return Some(LinkNews::Dump(known.values().cloned().collect()));
        }
        while let Some(entry) = self.places.first_entry() {
            let ifindex = *entry.get();
            let gone = self.changes.get_mut(&ifindex).map(|(_, gone)| gone);
            let link = known.get(&ifindex);
            let was_gone = gone.map(std::mem::take).unwrap_or_default();
            if !was_gone || link.is_none() {
                entry.remove();
                self.changes.remove(&ifindex);
            }
            if was_gone {
                return Some(LinkNews::Gone(ifindex));
            }
            if let Some(link) = link {
                return Some(LinkNews::Present(link.clone()));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use holdfast_engine::model::{LinkKind, Mac};
    use proptest::prelude::*;

    use super::*;

    fn link(ifindex: Ifindex, mac: u8) -> Link {
        Link {
            ifindex,
            name: format!("hf{ifindex}"),
            mac: Mac([2, 0, 0, 0, 0, mac]),
            up: true,
            carrier: true,
            kind: LinkKind::Other,
            master: None,
            mtu: 1500,
            ipv6: false,
        }
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((value.len() as u16 + 4).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((payload.len() as u32 + 16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        bytes
    }

    fn ifinfo(ifindex: Ifindex, up: bool) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend(ifindex.to_ne_bytes());
        bytes.extend(u32::from(up).to_ne_bytes());
        bytes.extend([0; 4]);
        bytes
    }

    fn present(sequence: u32, link: &Link) -> Vec<u8> {
        let mut payload = ifinfo(link.ifindex, link.up);
        payload.extend(attribute(libc::IFLA_IFNAME, link.name.as_bytes()));
        payload.extend(attribute(libc::IFLA_ADDRESS, &link.mac.0));
        payload.extend(attribute(libc::IFLA_CARRIER, &[u8::from(link.carrier)]));
        payload.extend(attribute(libc::IFLA_MTU, &link.mtu.to_ne_bytes()));
        message(libc::RTM_NEWLINK, 0, sequence, &payload)
    }

    fn gone(ifindex: Ifindex) -> Vec<u8> {
        message(libc::RTM_DELLINK, 0, 0, &ifinfo(ifindex, false))
    }

    fn done(sequence: u32, errno: i32) -> Vec<u8> {
        message(libc::NLMSG_DONE as u16, 0, sequence, &(-errno).to_ne_bytes())
    }

    fn refused(sequence: u32, errno: i32) -> Vec<u8> {
        message(libc::NLMSG_ERROR as u16, 0, sequence, &(-errno).to_ne_bytes())
    }

    fn news(state: &mut State) -> Vec<LinkNews> {
        std::iter::from_fn(|| state.next_news()).collect()
    }

    fn dumped(links: &[Link]) -> State {
        let mut state = State::default();
        state.dump_begun(Dumped::Links, 1);
        for link in links {
            assert_eq!(state.answered(&present(1, link)), Ok(None));
        }
        let interrupted = false;
        assert_eq!(
            state.answered(&done(1, 0)),
            Ok(Some(Finished {
                what: Dumped::Links,
                interrupted
            }))
        );
        assert_eq!(news(&mut state), [LinkNews::Dump(links.to_vec())]);
        state
    }

    #[test]
    fn an_identical_message_is_no_news() {
        let mut state = dumped(&[link(2, 1)]);
        state.notified(&present(0, &link(2, 1))).unwrap();
        assert_eq!(news(&mut state), []);
        state.notified(&present(0, &link(2, 7))).unwrap();
        state.notified(&present(0, &link(2, 7))).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(link(2, 7))]);
        state.notified(&gone(2)).unwrap();
        state.notified(&gone(2)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Gone(2)]);
    }

    #[test]
    fn a_notification_wins_over_the_dump_that_was_under_way() {
        let mut state = dumped(&[link(2, 1), link(3, 1)]);
        state.dump_begun(Dumped::Links, 2);
        state.answered(&present(2, &link(2, 1))).unwrap();
        state.answered(&present(2, &link(3, 1))).unwrap();
        state.notified(&gone(2)).unwrap();
        state.notified(&present(0, &link(3, 9))).unwrap();
        state.notified(&present(0, &link(4, 4))).unwrap();
        state.answered(&done(2, 0)).unwrap();
        assert_eq!(
            news(&mut state),
            [LinkNews::Dump(vec![link(3, 9), link(4, 4)])],
            "what waited is in the dump"
        );
    }

    #[test]
    fn a_device_that_was_replaced_is_said_to_be_gone_first() {
        let mut state = dumped(&[link(2, 1)]);
        state.notified(&gone(2)).unwrap();
        state.notified(&present(0, &link(2, 1))).unwrap();
        assert_eq!(
            news(&mut state),
            [LinkNews::Gone(2), LinkNews::Present(link(2, 1))]
        );
        // Also when a dump overtakes both.
        state.notified(&gone(2)).unwrap();
        state.notified(&present(0, &link(2, 1))).unwrap();
        state.dump_begun(Dumped::Links, 2);
        state.answered(&present(2, &link(2, 1))).unwrap();
        state.answered(&done(2, 0)).unwrap();
        assert_eq!(
            news(&mut state),
            [LinkNews::Gone(2), LinkNews::Dump(vec![link(2, 1)])]
        );
    }

    #[test]
    fn a_slow_reader_gets_the_newest_once_a_device() {
        let mut state = dumped(&[]);
        for mac in 1..200 {
            state.notified(&present(0, &link(3, mac))).unwrap();
            state.notified(&present(0, &link(2, mac))).unwrap();
        }
        state.notified(&present(0, &link(4, 1))).unwrap();
        state.notified(&gone(4)).unwrap();
        assert_eq!(
            news(&mut state),
            [
                LinkNews::Present(link(3, 199)),
                LinkNews::Present(link(2, 199)),
                LinkNews::Gone(4)
            ]
        );
    }

    #[test]
    fn what_waits_is_bounded_by_the_devices() {
        let mut state = dumped(&[link(1, 1)]);
        for ifindex in 2..20_000 {
            state.notified(&present(0, &link(ifindex, 1))).unwrap();
            state.notified(&gone(ifindex)).unwrap();
        }
        assert!(state.untold.changes.len() <= SPARE_CHANGES + 2);
        assert_eq!(
            news(&mut state).first(),
            Some(&LinkNews::Dump(vec![link(1, 1)])),
            "told as one"
        );
    }

    #[test]
    fn an_answer_is_told_even_if_it_is_old_news() {
        let mut state = dumped(&[link(2, 1)]);
        state.ask([2, 5].into());
        assert_eq!((state.next_ask(), state.next_ask()), (Some(2), Some(5)));
        state.asked(7, 2);
        state.asked(8, 5);
        state.answered(&present(7, &link(2, 1))).unwrap();
        state.answered(&refused(8, libc::ENODEV)).unwrap();
        assert_eq!(
            news(&mut state),
            [LinkNews::Present(link(2, 1)), LinkNews::Gone(5)]
        );
        assert!(!state.asking());
    }

    #[test]
    fn a_notification_wins_over_an_answer_that_was_under_way() {
        let mut state = dumped(&[link(2, 1)]);
        state.asked(7, 2);
        state.notified(&present(0, &link(2, 9))).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(link(2, 9))]);
        state.answered(&present(7, &link(2, 1))).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(link(2, 9))]);
    }

    #[test]
    fn an_interrupted_dump_proves_no_absence() {
        let mut state = dumped(&[link(2, 1), link(3, 1)]);
        state.dump_begun(Dumped::Links, 2);
        let mut part = present(2, &link(3, 1));
        part[6..8].copy_from_slice(&(libc::NLM_F_DUMP_INTR as u16).to_ne_bytes());
        state.answered(&part).unwrap();
        let interrupted = true;
        assert_eq!(
            state.answered(&done(2, 0)),
            Ok(Some(Finished {
                what: Dumped::Links,
                interrupted
            }))
        );
        assert_eq!(news(&mut state), [LinkNews::Dump(vec![link(2, 1), link(3, 1)])]);
        assert_eq!(state.next_ask(), Some(2));
    }

    fn checked(state: &mut State, sequence: u32, links: &[Link]) {
        state.dump_begun(Dumped::Check, sequence);
        for link in links {
            assert_eq!(state.answered(&present(sequence, link)), Ok(None));
        }
        let finished = state.answered(&done(sequence, 0)).unwrap().unwrap();
        assert_eq!(finished.what, Dumped::Check);
    }

    #[test]
    fn a_check_that_finds_what_is_known_says_nothing() {
        let mut state = dumped(&[link(2, 1), link(3, 1)]);
        checked(&mut state, 2, &[link(2, 1), link(3, 1)]);
        assert_eq!(news(&mut state), []);
        assert_eq!(state.next_ask(), None);
    }

    #[test]
    fn what_a_check_finds_otherwise_is_asked_for_and_told() {
        let mut state = dumped(&[link(2, 1), link(3, 1)]);
        // News of both were lost: 2 is gone, 4 has come.
        checked(&mut state, 2, &[link(3, 1), link(4, 1)]);
        assert_eq!(news(&mut state), []);
        for (sequence, ifindex) in [(3, 2), (4, 4)] {
            assert_eq!(state.next_ask(), Some(ifindex));
            state.asked(sequence, ifindex);
        }
        assert_eq!(state.answered(&refused(3, libc::ENODEV)), Ok(None));
        assert_eq!(state.answered(&present(4, &link(4, 1))), Ok(None));
        assert_eq!(
            news(&mut state),
            [
                LinkNews::Drifted(BTreeSet::from([2, 4])),
                LinkNews::Gone(2),
                LinkNews::Present(link(4, 1)),
            ]
        );
    }

    #[test]
    fn what_a_check_finds_before_its_notification_is_no_drift() {
        let mut state = dumped(&[link(2, 1)]);
        checked(&mut state, 2, &[link(2, 1), link(4, 1)]);
        assert_eq!(state.next_ask(), Some(4));
        state.asked(3, 4);
        state.notified(&present(0, &link(4, 1))).unwrap();
        assert_eq!(state.answered(&present(3, &link(4, 1))), Ok(None));
        assert_eq!(news(&mut state), [LinkNews::Present(link(4, 1))]);
    }

    #[test]
    fn a_check_during_which_news_were_lost_is_a_dump() {
        let mut state = dumped(&[link(2, 1)]);
        state.dump_begun(Dumped::Check, 2);
        state.answered(&present(2, &link(3, 1))).unwrap();
        state.distrust();
        state.answered(&done(2, 0)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Dump(vec![link(3, 1)])]);
    }

    #[test]
    fn a_dump_that_ends_early_changes_nothing() {
        let mut state = dumped(&[link(2, 1)]);
        state.dump_begun(Dumped::Links, 2);
        assert_eq!(state.answered(&done(2, libc::EINTR)), Err(Trouble::Cut));
        state.dump_begun(Dumped::Links, 3);
        assert_eq!(state.answered(&refused(3, libc::EBUSY)), Err(Trouble::Cut));
        assert_eq!(state.answered(&done(1, 0)), Ok(None), "an old one's end");
        assert_eq!(news(&mut state), []);
    }

    #[test]
    fn a_veth_that_is_being_deleted_stays_what_it_was() {
        let veth = |peer_elsewhere, up| Link {
            kind: LinkKind::Veth { peer_elsewhere },
            up,
            ..link(2, 1)
        };
        let as_message = |sequence, link: &Link, peer: u32| {
            let mut message = present(sequence, link);
            let mut nested = attribute(libc::IFLA_INFO_KIND, b"veth");
            nested = attribute(libc::IFLA_LINKINFO, &nested);
            nested.extend(attribute(libc::IFLA_LINK, &peer.to_ne_bytes()));
            if link.kind == (LinkKind::Veth { peer_elsewhere: true }) {
                nested.extend(attribute(libc::IFLA_LINK_NETNSID, &[0; 4]));
            }
            message.extend(nested);
            let length = message.len() as u32;
            message[..4].copy_from_slice(&length.to_ne_bytes());
            message
        };
        let mut state = dumped(&[]);
        state.notified(&as_message(0, &veth(true, true), 9)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(veth(true, true))]);
        state.notified(&as_message(0, &veth(false, false), 0)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(veth(true, false))]);
        // Both ends in one namespace: that is said.
        state.notified(&as_message(0, &veth(false, false), 9)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Present(veth(false, false))]);
    }

    #[test]
    fn what_cannot_be_read_is_no_news() {
        let mut state = dumped(&[link(2, 1)]);
        let nameless = message(libc::RTM_NEWLINK, 0, 0, &ifinfo(2, false));
        state.notified(&nameless).unwrap();
        assert_eq!(news(&mut state), []);
        assert_eq!(state.next_ask(), Some(2));
        assert_eq!(state.notified(&[1, 2, 3]), Err(Trouble::Undecodable));
        let overrun = message(libc::NLMSG_OVERRUN as u16, 0, 0, &[]);
        assert_eq!(state.notified(&overrun), Err(Trouble::Overrun));
        // A dump that shows it so keeps what was known.
        state.dump_begun(Dumped::Links, 2);
        let mut part = nameless.clone();
        part[8..12].copy_from_slice(&2_u32.to_ne_bytes());
        state.answered(&part).unwrap();
        state.answered(&done(2, 0)).unwrap();
        assert_eq!(news(&mut state), [LinkNews::Dump(vec![link(2, 1)])]);
    }

    const DEVICES: Ifindex = 7;

    /// A kernel, its two queues, and a reader.
    #[derive(Default)]
    struct World {
        devices: BTreeMap<Ifindex, Link>,
        queue: VecDeque<Vec<u8>>,
        overrun: bool,
        state: State,
        sequence: u32,
        /// Answers wait in the order in which they were made: that to a question after one device when it was put,
        /// the parts of a dump one ahead of the reader.
        answers: VecDeque<(Vec<u8>, Option<Ifindex>)>,
        dump: Option<u32>,
        reader: BTreeMap<Ifindex, Link>,
    }

    impl World {
        fn step(&mut self, action: u8, ifindex: Ifindex, mac: u8) {
            match action {
                0 | 1 => self.put(link(ifindex, mac)),
                2 => {
                    if self.devices.remove(&ifindex).is_some() {
                        self.queue.push_back(gone(ifindex));
                    }
                }
                3 => {
                    if let Some(device) = self.devices.get(&ifindex).cloned() {
                        let up = !device.up;
                        self.put(Link { up, ..device });
                    }
                }
                4 => {
                    self.queue.clear();
                    self.overrun = true;
                    self.state.distrust();
                }
                5 => _ = self.notify_one(),
                6 | 14 if self.dump.is_none() => {
                    // A check is for what nobody lost.
                    let what = if action == 14 && !self.overrun {
                        Dumped::Check
                    } else {
                        Dumped::Links
                    };
                    self.overrun = false;
                    self.sequence += 1;
                    self.dump = Some(self.sequence);
                    self.state.dump_begun(what, self.sequence);
                    self.make_part(1);
                }
                7 | 8 => _ = self.take_answer(),
                9 => {
                    self.sequence += 1;
                    self.state.asked(self.sequence, ifindex);
                    let answer = self.devices.get(&ifindex).map_or_else(
                        || refused(self.sequence, libc::ENODEV),
                        |device| present(self.sequence, device),
                    );
                    self.answers.push_back((answer, None));
                }
                _ => _ = self.read_one(),
            }
        }

        fn put(&mut self, device: Link) {
            self.queue.push_back(present(0, &device));
            self.devices.insert(device.ifindex, device);
        }

        fn notify_one(&mut self) -> bool {
            let datagram = self.queue.pop_front();
            if let Some(datagram) = &datagram {
                self.state.notified(datagram).unwrap();
            }
            datagram.is_some()
        }

        /// Two devices a part, as they are now.
        fn make_part(&mut self, from: Ifindex) {
            let Some(sequence) = self.dump else { return };
            let next = from + 2;
            let mut part: Vec<u8> = (from..next)
                .filter_map(|ifindex| self.devices.get(&ifindex))
                .flat_map(|device| present(sequence, device))
                .collect();
            let last = next > DEVICES;
            if last {
                part.extend(done(sequence, 0));
            }
            self.answers.push_back((part, (!last).then_some(next)));
        }

        /// As the task does: it catches up before it takes an answer in.
        fn take_answer(&mut self) -> bool {
            let Some((answer, next)) = self.answers.pop_front() else {
                return false;
            };
            if let Some(next) = next {
                self.make_part(next);
            }
            while self.notify_one() {}
            if self.state.answered(&answer).unwrap().is_some() {
                self.dump = None;
            }
            true
        }

        fn read_one(&mut self) -> bool {
            let news = self.state.next_news();
            match news.clone() {
                Some(LinkNews::Dump(links)) => {
                    self.reader = links.into_iter().map(|link| (link.ifindex, link)).collect();
                }
                Some(LinkNews::Present(link)) => _ = self.reader.insert(link.ifindex, link),
                Some(LinkNews::Gone(ifindex)) => _ = self.reader.remove(&ifindex),
                Some(LinkNews::Locals(_) | LinkNews::Drifted(_)) | None => {}
            }
            news.is_some()
        }

        fn ask_what_is_to_be_asked(&mut self) {
            while let Some(ifindex) = self.state.next_ask() {
                self.step(9, ifindex, 0);
            }
        }

        fn settle(&mut self) {
            while self.take_answer() {}
            self.ask_what_is_to_be_asked();
            while self.take_answer() {}
            if self.overrun {
                self.step(6, 1, 0);
                while self.take_answer() {}
            }
            while self.notify_one() {}
            while self.read_one() {}
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn whatever_the_order_the_reader_ends_with_what_is_there(
            steps in prop::collection::vec((0_u8..15, 1..=DEVICES, 0_u8..3), 0..120)
        ) {
            let mut world = World::default();
            world.step(6, 1, 0);
            for (action, ifindex, mac) in steps {
                world.step(action, ifindex, mac);
            }
            world.settle();
            prop_assert_eq!(world.reader, world.devices);
        }
    }
}
