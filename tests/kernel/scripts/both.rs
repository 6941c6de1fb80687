//! A script in the world and on a node, in step.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use holdfast_tests::node::BREAK;
use holdfast_tests::until;

use crate::place::{Place, Surroundings};
use crate::script::{Action, Script};
use crate::shown::{self, Either, Names};
use crate::traffic;
use crate::world::World;

/// How long the node may take to show the same.
const CALM: Duration = Duration::from_secs(10);
/// The same where nobody was told and deadlines pass: rechecks, audits, switches that wait.
const REST: Duration = Duration::from_secs(30);

/// The same for an agent that is broken on purpose and will not.
const BROKEN: Duration = Duration::from_secs(5);

/// Both of them.
struct Both<'a> {
    /// Another script has failed: this one need not end.
    stop: &'a AtomicBool,
    world: World,
    place: Place,
    names: Names,
    /// When the world's clock was last set.
    followed: Instant,
    /// Something has happened that the agent may not have taken in.
    stirred: bool,
    /// The agent has died over it: nobody knows how far it had got.
    unknown: bool,
    /// An agent has died.
    crashed: bool,
}

/// Runs a script, unless it is to stop, and says what is not the same.
pub(crate) fn run(script: &Script, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut both = Both {
        stop,
        world: World::new(script.setup),
        place: Place::new(script.setup)?,
        names: Names::of(script),
        followed: Instant::now(),
        stirred: false,
        unknown: false,
        crashed: false,
    };
    let from_the_first = Surroundings::of(&both.world);
    both.place.follow(&Surroundings::default(), &from_the_first)?;
    for (number, action) in script.actions.iter().enumerate() {
        let outcome = both.act(action);
        outcome.with_context(|| both.explanation(script, number))?;
    }
    let errors = both.place.node.error_lines();
    if !errors.is_empty() {
        bail!("the agent logged errors:\n{}", errors.join("\n"));
    }
    Ok(())
}

impl Both<'_> {
    fn explanation(&self, script: &Script, number: usize) -> String {
        let action = |action: &Action| serde_json::to_string(action).unwrap_or_default();
        let actions: Vec<String> = script.actions[..=number].iter().map(action).collect();
        let log = self.place.node.log();
        let tail = log.len().saturating_sub(30);
        format!(
            "after {} actions, the last of which are\n{}\nthe agent's last lines:\n{}",
            number + 1,
            actions[actions.len().saturating_sub(6)..].join("\n"),
            log[tail..].join("\n")
        )
    }

    fn act(&mut self, action: &Action) -> anyhow::Result<()> {
        self.follow()?;
        match action {
            Action::Calm if self.unknown => return Ok(()),
            Action::Calm => return self.meet(action, CALM),
            Action::Rest => {
                self.in_world(action)?;
                self.place.start()?;
                self.unknown = false;
                return self.meet(&Action::Calm, REST);
            }
            _ => {}
        }
        let before = Surroundings::of(&self.world);
        self.in_world(action)?;
        let now = Surroundings::of(&self.world);
        self.names.learn(&self.world);
        self.place.follow(&before, &now)?;
        self.on_node(action, &now)
    }

    fn in_world(&mut self, action: &Action) -> anyhow::Result<()> {
        self.world
            .act(action)
            .map_err(|violation| anyhow!("the world breaks a rule: {}: {}", violation.rule, violation.story))
    }

    /// What an action does besides changing the surroundings.
    fn on_node(&mut self, action: &Action, now: &Surroundings) -> anyhow::Result<()> {
        match action {
            Action::Start { .. } => {
                self.unknown = false;
                self.place.start()?;
            }
            Action::Crash { .. } => {
                self.unknown |= self.stirred && self.place.is_up;
                self.crashed |= self.place.is_up;
                return self.place.crash();
            }
            Action::Strip { interface } => {
                if let Some(dev) = self.world.kernel.named(interface) {
                    self.place.strip(dev.link.ifindex)?;
                }
            }
            Action::Relist => self.place.relist(now)?,
            Action::Register {
                interface,
                poke: true,
                ..
            }
            | Action::Unregister {
                interface,
                poke: true,
            }
            | Action::Poke { interface }
                if self.world.kernel.named(interface).is_some() =>
            {
                self.place.poke(interface)?;
            }
            _ => {}
        }
        self.stirred = true;
        Ok(())
    }

    /// The world's clock goes as the real one does.
    fn follow(&mut self) -> anyhow::Result<()> {
        let ms = self.followed.elapsed().as_millis().max(1);
        self.followed = Instant::now();
        let ms = u32::try_from(ms).context("a long time")?;
        self.in_world(&Action::Advance { ms, jump: false })
    }

    /// Both show the same, and packets arrive where they should.
    fn meet(&mut self, action: &Action, patience: Duration) -> anyhow::Result<()> {
        let mut differences = String::new();
        let broken = std::env::var_os(BREAK).is_some();
        let patience = if broken { patience.min(BROKEN) } else { patience };
        let met = until(patience, "the node shows what the world shows", || {
            ensure!(!self.stop.load(Ordering::Relaxed), "another script has failed");
            self.follow()?;
            self.in_world(action)?;
            let either = if self.crashed {
                shown::either(&self.world)
            } else {
                Either::new()
            };
            let shown = shown::by_world(&self.world, &self.names, &either);
            let found = shown::by_node(&mut self.place, &self.world, &self.names, &either)?;
            differences = shown::differences(&shown, &found);
            if !differences.is_empty() {
                return Ok(None);
            }
            let wanted = traffic::wanted(&self.world, &self.place);
            let Some(wrong) = traffic::compare(&mut self.place, &self.world, &wanted)? else {
                return Ok(Some(()));
            };
            // Packets say something of the node as it was only if it still is: a deadline may have passed.
            let still = shown::by_node(&mut self.place, &self.world, &self.names, &either)? == found;
            self.follow()?;
            self.in_world(action)?;
            if still && shown::by_world(&self.world, &self.names, &either) == shown {
                bail!("{wrong}");
            }
            differences = wrong;
            Ok(None)
        });
        met.context(differences)?;
        self.stirred = false;
        Ok(())
    }
}
