//! What is known of the devices, what is asked, and what is still to be told. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::model::{Ifindex, Link};

use super::LinkNews;
use super::dump::Dump;
use super::parse::{Content, messages};

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
    /// The list of devices changed meanwhile.
    pub(super) interrupted: bool,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct State {
    known: BTreeMap<Ifindex, Link>,
    dump: Option<Dump>,
    to_ask: BTreeSet<Ifindex>,
    asked: BTreeMap<u32, Asked>,
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
                Content::Gone(ifindex) => {
                    self.overtake(ifindex);
                    self.forget(ifindex);
                }
                // Its answer may be readable; if not, what was known of it stays.
                Content::Unreadable(ifindex) => _ = self.to_ask.insert(ifindex),
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
                Content::Unreadable(ifindex) => _ = dump.unreadable.insert(ifindex),
                Content::Done(0) => finished = self.dump.take().map(|dump| self.take_over(dump)),
                Content::Done(_) | Content::Answer(_) => {
                    self.dump = None;
                    return Err(Trouble::Cut);
                }
                Content::Gone(_) | Content::Overrun | Content::Other => {}
            }
        }
        Ok(finished)
    }

    /// A dump is under way.
    pub(super) const fn dumping(&self) -> bool {
        self.dump.is_some()
    }

    /// A dump was asked for.
    pub(super) fn dump_begun(&mut self, sequence: u32) {
        self.dump = Some(Dump {
            sequence,
            ..Dump::default()
        });
    }

    /// No question will be answered any more: the dump is off, single devices are asked for again.
    pub(super) fn give_up_questions(&mut self) {
        self.dump = None;
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
        !self.untold.is_empty()
    }

    /// Takes the next thing to tell.
    pub(super) fn next_news(&mut self) -> Option<LinkNews> {
        self.untold.next(&self.known)
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

    /// An answer is told in any case: whoever asked does not believe what it knows.
    fn ask_answered(&mut self, sequence: u32, ifindex: Ifindex, overtaken: bool, content: Content) {
        match content {
            Content::Present(link) if link.ifindex == ifindex => {
                if !overtaken {
                    self.known.insert(ifindex, link);
                }
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
        if dump.interrupted {
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
            interrupted: dump.interrupted,
        }
    }
}

/// What the reader does not know yet: at most one dump, and one entry a device. The content is taken from what is known
/// when it is told, so that a slow reader gets the newest; but that a device was gone in between is never left out:
/// the one that is there now is another, even with the same number, name and address.
#[derive(Debug, Default)]
struct Untold {
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
        !self.dump && self.gone_before.is_empty() && self.changes.is_empty()
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
