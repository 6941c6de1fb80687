use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::sync_channel;

use holdfast_engine::Engine;
use holdfast_engine::model::{
    Attachment, Boot, Capacity, Config, Covers, Effect, Event, Features, Link, LinkKind, Mac, Now,
    ObjectChange, ObjectName, OpDone, RegistryRead, Uid,
};

use super::read::{Found, segments};
use super::write::write_segment;
use super::{Encoder, Journal, JournalError, Options, replay, start};
use crate::api::hash;

fn engine() -> Engine {
    Engine::new(Config {
        capacity: Capacity {
            policies: 16,
            slots: 1_024,
            backends: 64,
        },
        features: Features {
            prefixes: true,
            translate: false,
            several_producers: true,
            neighbour_delivery: true,
            max_staleness: false,
        },
        neighbour_only: false,
        hashes: hash::hashes(),
        audit_every: 30 * Boot::SECOND,
    })
}

fn attachment(name: &str) -> ObjectChange {
    ObjectChange::Attachment(Attachment {
        name: ObjectName {
            namespace: "shop".into(),
            name: name.into(),
        },
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        created_ms: 0,
        interface: name.into(),
        expected: None,
        addresses: ["10.0.0.1".parse().unwrap()].into(),
        labels: BTreeMap::new(),
        covers: Covers::default(),
    })
}

fn link(ifindex: u32, name: &str, mtu: u32) -> Link {
    Link {
        ifindex,
        name: name.into(),
        mac: Mac([2, 0, 0, 0, 0, 1]),
        up: true,
        carrier: true,
        kind: LinkKind::Veth { peer_elsewhere: true },
        master: None,
        mtu,
        ipv6: true,
    }
}

/// An engine that is driven as the driver does, and what it decided.
struct Life {
    engine: Engine,
    now: Now,
    decided: Vec<String>,
    answers: Vec<Event>,
}

impl Life {
    fn new() -> Self {
        Self {
            engine: engine(),
            now: Now {
                boot: Boot(5 * Boot::SECOND),
                wall_ms: 1_700_000_000_000,
            },
            decided: Vec::new(),
            answers: Vec::new(),
        }
    }

    fn events(&mut self, round: u32) -> Vec<Event> {
        let mut events = std::mem::take(&mut self.answers);
        if round == 0 {
            events.extend([
                Event::Adopted(Box::default()),
                Event::LinkDump(vec![link(5, "web", 1500)]),
                Event::Objects(vec![attachment("web")]),
                Event::SourceComplete,
            ]);
        }
        // The device dies and comes back.
        events.push(if round % 2 == 1 {
            Event::LinkGone(5)
        } else {
            Event::Link(link(5, "web", 1500 + round))
        });
        events
    }

    /// Handles and polls; the answers come with the next round.
    fn round(&mut self, round: u32, journal: &mut impl Tape) {
        // The wall clock does not run as the other one does.
        self.now = Now {
            boot: self.now.boot.plus(1_234_567),
            wall_ms: self.now.wall_ms + i64::from(round % 3),
        };
        for event in self.events(round) {
            journal.handled(&event, self.now);
            self.engine.handle(event, self.now);
        }
        journal.polled(self.now);
        let effects = self.engine.poll(self.now);
        journal.flush(&self.engine, self.now);
        for effect in effects {
            let line = super::text::effect(&effect);
            self.decided
                .push(format!("{} {line}", super::text::moment(self.now)));
            match effect {
                Effect::Kernel(id, _) => {
                    self.answers.push(Event::Answer(id, Ok(OpDone { writes: 1 })));
                }
                Effect::ReadRegistry(ifindexes) => {
                    let reads = ifindexes
                        .into_iter()
                        .map(|ifindex| (ifindex, RegistryRead::Absent));
                    self.answers.push(Event::Registry(reads.collect()));
                }
                _ => {}
            }
        }
    }
}

/// What records.
trait Tape {
    fn handled(&mut self, event: &Event, now: Now);
    fn polled(&mut self, now: Now);
    fn flush(&mut self, engine: &Engine, now: Now);
}

impl Tape for Journal {
    fn handled(&mut self, event: &Event, now: Now) {
        Self::handled(self, event, now);
    }
    fn polled(&mut self, now: Now) {
        Self::polled(self, now);
    }
    fn flush(&mut self, engine: &Engine, now: Now) {
        Self::flush(self, engine, now);
    }
}

/// Batches in memory.
struct Memory(Encoder, Vec<Vec<u8>>);

impl Tape for Memory {
    fn handled(&mut self, event: &Event, now: Now) {
        self.0.handled(event, now).unwrap();
    }
    fn polled(&mut self, now: Now) {
        self.0.polled(now).unwrap();
    }
    fn flush(&mut self, _: &Engine, _: Now) {
        self.1.push(self.0.take().0);
    }
}

/// All lines, and those among them that are decisions.
fn lines(path: &Path) -> (Found, Vec<String>, Vec<String>) {
    let mut all = Vec::new();
    let found = replay(path, hash::hashes(), |line| {
        all.push(line.to_owned());
        Ok(())
    })
    .unwrap();
    let decided = all
        .iter()
        .filter(|line| !line.starts_with('#'))
        .cloned()
        .collect();
    (found, all, decided)
}

/// One segment of so many rounds, and what was decided then.
fn segment(path: &Path, rounds: u32) -> (Vec<Vec<u8>>, Vec<String>) {
    let mut life = Life::new();
    let mut memory = Memory(Encoder::new(usize::MAX), Vec::new());
    memory.0.made(&life.engine, life.now).unwrap();
    for round in 0..rounds {
        life.round(round, &mut memory);
    }
    write_segment(path, memory.1.clone()).unwrap();
    (memory.1, life.decided)
}

#[test]
fn the_same_inputs_give_the_same_decisions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("one");
    let (_, decided) = segment(&path, 40);
    let (found, _, again) = lines(&path);
    assert_eq!(again, decided);
    assert!(decided.len() > 40, "{decided:#?}");
    assert_eq!(
        (found.lives, found.polls, found.missing, found.torn),
        (1, 40, 0, 0)
    );
}

#[test]
fn a_torn_end_is_said_wherever_it_is_torn_and_costs_one_batch() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("one");
    let (batches, _) = segment(&path, 6);
    let whole = fs::read(&path).unwrap();
    let last = batches.last().unwrap().len() + 8;
    let (_, _, decided) = lines(&path);
    write_segment(&path, batches[..5].to_vec()).unwrap();
    let (_, _, but_the_last) = lines(&path);
    assert!(decided.len() > but_the_last.len());
    for missing in 1..last {
        fs::write(&path, &whole[..whole.len() - missing]).unwrap();
        let (found, all, rest) = lines(&path);
        assert_eq!(rest, but_the_last);
        assert_eq!(found.torn, 1);
        let said = format!("# torn: {} bytes of the end are left out", last - missing);
        assert_eq!(all.last(), Some(&said));
    }
    // A flipped bit is an end, too.
    let mut flipped = whole.clone();
    let at = flipped.len() - 1;
    flipped[at] ^= 1;
    fs::write(&path, &flipped).unwrap();
    assert_eq!(lines(&path).2, but_the_last);
}

#[test]
fn segments_go_round_within_the_limit_and_each_can_be_read_by_itself() {
    let directory = tempfile::tempdir().unwrap();
    let limit = 64 << 10;
    let options = Options {
        directory: directory.path().join("journal"),
        limit,
    };
    let mut life = Life::new();
    let (mut journal, thread) = start(options.clone(), &life.engine, life.now).unwrap();
    for round in 0..4_000 {
        life.round(round, &mut journal);
        // As fast as the disk takes it: here nothing shall be lost.
        while round % 32 == 0 && journal.queued() > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    drop(journal);
    thread.join().unwrap();
    let kept = segments(&options.directory).unwrap();
    assert!(kept.len() > 1, "{kept:?}");
    assert!(kept[0].0 > 1, "the oldest are gone: {kept:?}");
    let size: u64 = kept
        .iter()
        .map(|(_, path)| fs::metadata(path).unwrap().len())
        .sum();
    assert!(size <= limit, "{size}");
    let (found, _, decided) = lines(&options.directory);
    assert_eq!((found.missing, found.torn, found.differing), (0, 0, 0));
    assert!(life.decided.ends_with(&decided));
    for (_, path) in &kept {
        let (found, _, part) = lines(path);
        assert_eq!(found.missing, 0);
        assert!(life.decided.windows(part.len()).any(|window| window == part));
    }
    // Another life begins another segment.
    let (mut journal, thread) = start(options.clone(), &life.engine, life.now).unwrap();
    Life::new().round(0, &mut journal);
    drop(journal);
    thread.join().unwrap();
    assert_eq!(lines(&options.directory).0.lives, 1);
    assert_eq!(
        segments(&options.directory).unwrap().last().unwrap().0,
        kept.last().unwrap().0 + 1
    );
}

#[test]
fn what_a_slow_disk_costs_is_said_and_the_journal_goes_on_from_the_state() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("one");
    let mut life = Life::new();
    let (sender, receiver) = sync_channel(2);
    let mut journal = Journal::to(sender, 1 << 20, Arc::new(AtomicBool::new(false)));
    journal.begin(&life.engine, life.now);
    let mut batches = Vec::new();
    for round in 0..30 {
        life.round(round, &mut journal);
        if !(5..15).contains(&round) {
            batches.extend(receiver.try_iter().map(super::write::Batch::into_bytes));
        }
    }
    write_segment(&path, batches).unwrap();
    let (found, all, decided) = lines(&path);
    assert!(found.missing > 0);
    assert!(
        all.iter().any(|line| line.ends_with("records are missing")),
        "{all:#?}"
    );
    assert!(all.iter().any(|line| line.ends_with("the state is read")));
    assert!(decided.len() < life.decided.len());
    // After the gap nothing differs from what was decided.
    let (last, lived) = (decided.last().unwrap(), life.decided.last().unwrap());
    assert_eq!(last, lived);
}

#[test]
fn what_does_not_fit_ends_the_journal_and_nothing_else() {
    let mut life = Life::new();
    let (sender, receiver) = sync_channel(8);
    let mut journal = Journal::to(sender, 100, Arc::new(AtomicBool::new(false)));
    journal.begin(&life.engine, life.now);
    for round in 0..10 {
        life.round(round, &mut journal);
    }
    assert_eq!(receiver.try_iter().count(), 0);
}

#[test]
fn what_is_no_journal_of_this_release_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("one");
    let open = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        replay(&path, hash::hashes(), |_| Ok(()))
    };
    assert!(matches!(open(b""), Err(JournalError::Foreign { .. })));
    assert!(matches!(open(&[b'x'; 4096]), Err(JournalError::Foreign { .. })));
    assert!(matches!(
        open(b"holdfast journal 1 of 0.0.1\n"),
        Err(JournalError::Release { release, .. }) if release == "0.0.1"
    ));
    assert!(matches!(
        replay(directory.path(), hash::hashes(), |_| Ok(())),
        Err(JournalError::Nothing { .. })
    ));
    // A frame that is whole and means nothing.
    write_segment(&path, [vec![0xff; 9]]).unwrap();
    assert!(matches!(
        replay(&path, hash::hashes(), |_| Ok(())),
        Err(JournalError::Senseless { .. })
    ));
}
