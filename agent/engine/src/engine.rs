//! The engine as its driver sees it.

use crate::model::{Boot, Config, Effect, Event, Now};
use crate::view::View;

/// Desired and plumbed state, and the way from the one to the other.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    queue: Vec<Event>,
}

impl Engine {
    /// An engine that knows nothing yet.
    #[must_use]
    pub const fn new(config: Config) -> Self {
        Self {
            config,
            queue: Vec::new(),
        }
    }

    /// Takes one event in. Never emits: call [`Engine::poll`] after a batch.
    pub fn handle(&mut self, event: Event, _now: Now) {
        self.queue.push(event);
    }

    /// What is to be done now, in order.
    pub fn poll(&mut self, _now: Now) -> Vec<Effect> {
        self.queue.clear();
        Vec::new()
    }

    /// When to poll next although nothing happened; none = only an event changes anything.
    #[must_use]
    pub const fn next_deadline(&self) -> Option<Boot> {
        None
    }

    /// What is known.
    #[must_use]
    pub const fn view(&self) -> View<'_> {
        View::new(self)
    }

    /// What the engine was made with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }
}
