//! A journal: everything that went into an engine, in order, and what comes out when it goes in again.
//!
//! The engine decides by nothing but its inputs. So whoever has them, and the time of each, can ask it again what it
//! decided then, and gets the same answer. How records are written down is no affair of this module.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::Engine;
use crate::model::{Boot, Capacity, Config, Effect, Event, Features, Hashes, NameHash, Now, UidHash};

/// One record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Record<'a> {
    /// An engine was made: a life begins.
    Made(Now, Made),
    /// What an engine knows right after a poll: what it has handled since, it has not decided on yet, and would forget.
    /// Whoever has it needs nothing of before.
    State(Now, Made, Box<Cow<'a, Engine>>),
    /// An event was handled.
    Handled(At, Cow<'a, Event>),
    /// The engine was polled.
    Polled(At),
    /// So many records could not be kept. What follows means nothing until a life begins or a state is written.
    Lost(u64),
}

/// What an engine was made with, but for its hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Sizes.
    pub capacity: Capacity,
    /// What the data plane could do.
    pub features: Features,
    /// [`Config::neighbour_only`].
    pub neighbour_only: bool,
    /// [`Config::audit_every`].
    pub audit_every: u64,
}

/// A moment, as a distance from that of the record before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    /// Nanoseconds of the boot clock.
    boot: u64,
    /// Milliseconds by which the wall clock went ahead of the boot clock.
    wall: i64,
}

impl At {
    /// `now` as seen from `last`.
    #[must_use]
    pub fn from(last: Now, now: Now) -> Self {
        let boot = now.boot.since(last.boot);
        Self {
            boot,
            wall: now.wall_ms.wrapping_sub(last.wall_ms).wrapping_sub(millis(boot)),
        }
    }

    /// The moment that was written down.
    #[must_use]
    pub fn after(self, last: Now) -> Now {
        Now {
            boot: last.boot.plus(self.boot),
            wall_ms: last
                .wall_ms
                .wrapping_add(millis(self.boot))
                .wrapping_add(self.wall),
        }
    }
}

fn millis(nanos: u64) -> i64 {
    i64::try_from(nanos / Boot::MILLI).unwrap_or(i64::MAX)
}

impl Made {
    /// What this engine was made with.
    #[must_use]
    pub const fn of(config: &Config) -> Self {
        Self {
            capacity: config.capacity,
            features: config.features,
            neighbour_only: config.neighbour_only,
            audit_every: config.audit_every,
        }
    }

    const fn config(self, hashes: Hashes) -> Config {
        Config {
            capacity: self.capacity,
            features: self.features,
            neighbour_only: self.neighbour_only,
            hashes,
            audit_every: self.audit_every,
        }
    }
}

impl Config {
    /// What an engine has that was read back and not been given its own yet.
    pub(crate) fn nothing() -> Self {
        Self {
            capacity: Capacity {
                policies: 0,
                slots: 0,
                backends: 0,
            },
            features: Features {
                prefixes: false,
                translate: false,
                several_producers: false,
                neighbour_delivery: false,
                max_staleness: false,
            },
            neighbour_only: false,
            hashes: Hashes {
                name: |_| NameHash(0),
                uid: |_| UidHash([0; 16]),
            },
            audit_every: 0,
        }
    }
}

/// Puts a journal into engines.
#[derive(Debug)]
pub struct Replay {
    hashes: Hashes,
    engine: Option<Engine>,
    now: Now,
}

/// What a record brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Played {
    /// A life begins.
    Began,
    /// A state was read.
    Resumed,
    /// An event was handled.
    Handled,
    /// The engine was polled, and decided this.
    Decided(Vec<Effect>),
    /// It means nothing: records before it are missing.
    Meaningless,
    /// So many records are missing.
    Lost(u64),
}

impl Replay {
    /// A replay from the beginning. The hashes are those that the recorded engine had.
    #[must_use]
    pub const fn new(hashes: Hashes) -> Self {
        Self {
            hashes,
            engine: None,
            now: Now {
                boot: Boot(0),
                wall_ms: 0,
            },
        }
    }

    /// The moment of the last record.
    #[must_use]
    pub const fn now(&self) -> Now {
        self.now
    }

    /// The engine as it is after the last record; none while records are missing.
    #[must_use]
    pub const fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref()
    }

    /// Forgets the engine: what follows means nothing until a life begins or a state is read.
    pub fn interrupt(&mut self) {
        self.engine = None;
    }

    /// Takes the next record.
    pub fn play(&mut self, record: Record<'_>) -> Played {
        match record {
            Record::Made(now, made) => {
                self.now = now;
                self.engine = Some(Engine::new(made.config(self.hashes)));
                Played::Began
            }
            Record::State(now, made, state) => {
                self.now = now;
                let mut engine = state.into_owned();
                engine.config = made.config(self.hashes);
                self.engine = Some(engine);
                Played::Resumed
            }
            Record::Handled(at, event) => {
                self.now = at.after(self.now);
                let Some(engine) = &mut self.engine else {
                    return Played::Meaningless;
                };
                engine.handle(event.into_owned(), self.now);
                Played::Handled
            }
            Record::Polled(at) => {
                self.now = at.after(self.now);
                match &mut self.engine {
                    Some(engine) => Played::Decided(engine.poll(self.now)),
                    None => Played::Meaningless,
                }
            }
            Record::Lost(records) => {
                self.engine = None;
                Played::Lost(records)
            }
        }
    }
}
