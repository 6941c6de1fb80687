//! A journal in memory: what went into an engine, in the bytes that an agent keeps of it, beside what came out.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test code that is shared; each suite uses its own part"
)]

use std::borrow::Cow;

use holdfast_engine::Engine;
use holdfast_engine::journal::{At, Made, Played, Record, Replay};
use holdfast_engine::model::{Effect, Event, Hashes, Now};

/// So many records lie between two states that are kept, at least.
const STRIDE: usize = 20;

/// One record.
#[derive(Clone, Debug)]
pub struct Kept {
    /// As it is written.
    pub bytes: Vec<u8>,
    /// When it was.
    pub now: Now,
    /// What it must bring when it is played.
    pub brings: Played,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    pub records: Vec<Kept>,
    /// States of the engine, beside the records: how many come before, and its own.
    pub states: Vec<(usize, Vec<u8>)>,
    last: Now,
}

/// As an agent writes it.
pub fn written(record: &Record<'_>) -> Vec<u8> {
    postcard::to_stdvec(record).unwrap()
}

/// As it is read back.
pub fn read(bytes: &[u8]) -> Record<'static> {
    postcard::from_bytes(bytes).unwrap()
}

/// The state of an engine as it is written.
pub fn state(engine: &Engine, now: Now) -> Vec<u8> {
    let made = Made::of(engine.config());
    written(&Record::State(now, made, Box::new(Cow::Borrowed(engine))))
}

impl Journal {
    fn put(&mut self, record: &Record<'_>, now: Now, brings: Played) {
        let bytes = written(record);
        self.records.push(Kept { bytes, now, brings });
        self.last = now;
    }

    /// A life begins.
    pub fn made(&mut self, engine: &Engine, now: Now) {
        let record = Record::Made(now, Made::of(engine.config()));
        self.put(&record, now, Played::Began);
    }

    /// This is going to be handled.
    pub fn handled(&mut self, event: &Event, now: Now) {
        let record = Record::Handled(At::from(self.last, now), Cow::Borrowed(event));
        self.put(&record, now, Played::Handled);
    }

    /// The engine was polled.
    pub fn polled(&mut self, engine: &Engine, now: Now, effects: &[Effect]) {
        let record = Record::Polled(At::from(self.last, now));
        self.put(&record, now, Played::Decided(effects.to_vec()));
        let kept = self.states.last().map_or(0, |(before, _)| *before);
        if self.records.len() >= kept + STRIDE {
            self.states.push((self.records.len(), state(engine, now)));
        }
    }

    /// Plays it, from the beginning and from every state, and demands the decisions of then.
    pub fn check(&self, name: &str, hashes: Hashes) {
        let mut whole = Replay::new(hashes);
        let mut resumed: Option<Replay> = None;
        let mut states = self.states.iter().peekable();
        for (number, kept) in self.records.iter().enumerate() {
            if let Some((_, bytes)) = states.next_if(|(before, _)| *before == number) {
                for replay in std::iter::once(&whole).chain(&resumed) {
                    let engine = replay.engine().expect("nothing is missing");
                    // Bytes: nobody wants to read two engines.
                    assert!(
                        state(engine, replay.now()) == *bytes,
                        "{name}: before record {number} the engine is another one than was kept"
                    );
                }
                let replay = resumed.insert(Replay::new(hashes));
                assert_eq!(replay.play(read(bytes)), Played::Resumed);
            }
            for replay in std::iter::once(&mut whole).chain(&mut resumed) {
                let brought = replay.play(read(&kept.bytes));
                assert_eq!(brought, kept.brings, "{name}: record {number}");
                assert_eq!(replay.now(), kept.now, "{name}: record {number}");
            }
        }
    }
}
