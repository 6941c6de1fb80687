//! Storms: of each kind of line so many are written and no more; then one line says how many were left out, by kind.
//!
//! A kind is a place in the code, or, of the engine's lines, what they say. Never a name or an error text: ten thousand
//! failures with fifty texts are one kind.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use holdfast_engine::model::Boot;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::lines::ENGINE;
use crate::clock::Clock;

/// Lines of one kind that may come at once. A node of a few hundred consumers whose producers go away is below.
pub(super) const BURST: u64 = 500;

/// Lines of one kind that may come each second, on and on.
pub(super) const PER_SECOND: u64 = 10;

/// How long lines are left out before it is said.
const PERIOD: Duration = Duration::from_secs(2);

/// What the lines of this file are filtered by: they are never left out.
const TARGET: &str = "holdfast::log";

/// Lets so many lines of each kind through. Cheap to clone.
#[derive(Clone)]
pub(super) struct Limit {
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
}

type Kinds = BTreeMap<String, Bucket>;

#[derive(Default)]
struct Shared {
    kinds: Mutex<Kinds>,
    left_out: Condvar,
}

/// Lines that one kind may still write, and how many it was kept from.
struct Bucket {
    /// Nanoseconds of lines: a line costs [`COST`].
    credit: u64,
    at: Boot,
    left_out: u64,
}

/// What a line costs: the time in which it is earned.
const COST: u64 = Boot::SECOND / PER_SECOND;

impl Bucket {
    const fn new(at: Boot) -> Self {
        Self {
            credit: BURST * COST,
            at,
            left_out: 0,
        }
    }

    fn take(&mut self, now: Boot) -> bool {
        let earned = self.credit.saturating_add(now.since(self.at));
        self.credit = earned.min(BURST * COST);
        self.at = now;
        let enough = self.credit >= COST;
        if enough {
            self.credit -= COST;
        } else {
            self.left_out += 1;
        }
        enough
    }
}

impl Limit {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            shared: Arc::default(),
        }
    }

    fn kinds(&self) -> MutexGuard<'_, Kinds> {
        self.shared.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line of this kind may be written now.
    fn take(&self, kind: String) -> bool {
        let now = self.clock.now().boot;
        let mut kinds = self.kinds();
        let bucket = kinds.entry(kind).or_insert_with(|| Bucket::new(now));
        let granted = bucket.take(now);
        if !granted && bucket.left_out == 1 {
            self.shared.left_out.notify_one();
        }
        granted
    }

    /// Says what was left out since it was last said.
    pub(super) fn tell(&self) {
        let mut count = 0;
        let mut kinds = String::new();
        for (kind, bucket) in &mut *self.kinds() {
            let left_out = std::mem::take(&mut bucket.left_out);
            if left_out > 0 {
                count += left_out;
                let comma = if kinds.is_empty() { "" } else { ", " };
                // Writing to a string does not fail.
                let _ = write!(kinds, "{comma}{kind}: {left_out}");
            }
        }
        if count > 0 {
            tracing::warn!(target: TARGET, count, kinds, "a storm: lines were left out");
        }
    }

    /// Starts the thread that tells. It sleeps until something is left out.
    pub(super) fn spawn(self) -> io::Result<()> {
        let thread = thread::Builder::new().name("hf-log".to_owned());
        thread
            .spawn(move || {
                loop {
                    self.wait();
                    // A storm goes on for a while: what it leaves out becomes one line.
                    thread::sleep(PERIOD);
                    self.tell();
                }
            })
            .map(drop)
    }

    fn wait(&self) {
        let nothing = |kinds: &mut Kinds| kinds.values().all(|bucket| bucket.left_out == 0);
        // A poisoned lock is as good as any: no more than counts are in it.
        drop(self.shared.left_out.wait_while(self.kinds(), nothing));
    }
}

/// Keeps a layer from the lines of a storm. A layer of its own and no filter: what a filter refuses event by event, other
/// filters of the same thread stumble over.
pub(super) struct Limited<L> {
    pub(super) limit: Limit,
    pub(super) layer: L,
}

impl<S: Subscriber, L: Layer<S>> Layer<S> for Limited<L> {
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        if metadata.target() == TARGET || self.limit.take(kind(event, metadata)) {
            self.layer.on_event(event, context);
        }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.layer.on_new_span(attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        self.layer.on_record(id, values, context);
    }
}

fn kind(event: &Event<'_>, metadata: &Metadata<'_>) -> String {
    if metadata.target() == ENGINE {
        let mut what = Message(String::new());
        event.record(&mut what);
        return what.0;
    }
    format!("{}:{}", metadata.target(), metadata.line().unwrap_or_default())
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // Writing to a string does not fail.
            let _ = write!(self.0, "{value:?}");
        }
    }
}
