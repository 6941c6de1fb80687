//! Runs: random ones, scripts, and how a failing run becomes a short script.

use std::sync::{Arc, Mutex};

use holdfast_engine::Engine;
use holdfast_engine::model::{Effect, Event, Now};

use crate::generate::Generator;
use crate::journal::Journal;
use crate::oracle::Violation;
use crate::script::{Action, Script, Setup};
use crate::tape::Tape;
use crate::world::{Witness, World};

/// What a run gave.
pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) setup: Setup,
    pub(crate) actions: Vec<Action>,
    pub(crate) violation: Option<Violation>,
}

/// A random run of so many steps, and then to rest and through a restart that must write nothing.
pub(crate) fn random(tape: Tape<'_>, steps: u64, digest: bool) -> Run {
    let (mut generator, setup) = Generator::new(tape);
    let mut world = World::new(setup);
    world.digest = digest.then_some(0);
    let mut actions = Vec::new();
    let mut violation = None;
    let last = [
        Action::Rest,
        Action::Quiet { seconds: 100 },
        Action::Save,
        Action::Crash { done: [0; 3] },
        Action::Start {
            policies_first: false,
            saved: false,
        },
        Action::Rest,
        Action::Calm,
    ];
    let mut last = last.into_iter();
    loop {
        let action = if world.steps < steps && actions.len() < 4 * steps as usize {
            generator.next(&world)
        } else {
            match last.next() {
                Some(action) => action,
                None => break,
            }
        };
        actions.push(action);
        if let Some(action) = actions.last()
            && let Err(found) = world.act(action)
        {
            violation = Some(found);
            break;
        }
    }
    Run {
        world,
        setup,
        actions,
        violation,
    }
}

/// Runs a list of actions.
pub(crate) fn replay(setup: Setup, actions: &[Action], verbose: bool) -> (World, Option<Violation>) {
    let mut world = World::new(setup);
    world.verbose = verbose;
    world.digest = Some(0);
    for action in actions {
        if let Err(found) = world.act(action) {
            return (world, Some(found));
        }
    }
    (world, None)
}

/// A journal that a world keeps while somebody else waits for it.
#[derive(Clone, Debug, Default)]
struct Kept(Arc<Mutex<Journal>>);

impl Kept {
    fn with(&self, keep: impl FnOnce(&mut Journal)) {
        keep(&mut self.0.lock().expect("no panic elsewhere"));
    }
}

impl Witness for Kept {
    fn made(&mut self, engine: &Engine, now: Now) {
        self.with(|journal| journal.made(engine, now));
    }

    fn handled(&mut self, event: &Event, now: Now) {
        self.with(|journal| journal.handled(event, now));
    }

    fn polled(&mut self, engine: &Engine, now: Now, effects: &[Effect]) {
        self.with(|journal| journal.polled(engine, now, effects));
    }
}

/// Runs a list of actions and keeps what goes into the engines, by a wall clock that is put back now and then.
pub(crate) fn record(setup: Setup, actions: &[Action]) -> (Journal, Option<Violation>) {
    let kept = Kept::default();
    let mut world = World::new(setup);
    world.witness = Some(Box::new(kept.clone()));
    let mut violation = None;
    for (number, action) in actions.iter().enumerate() {
        if number % 40 == 39 {
            world.now.wall_ms -= 3_600_000;
        }
        violation = world.act(action).err();
        if violation.is_some() {
            break;
        }
    }
    let journal = std::mem::take(&mut *kept.0.lock().expect("no panic elsewhere"));
    (journal, violation)
}

/// The shortest list of actions that can be found which breaks the same rule.
pub(crate) fn shrink(setup: Setup, actions: &[Action], violation: &Violation) -> Vec<Action> {
    let fails = |actions: &[Action]| {
        let (_, found) = replay(setup, actions, false);
        found.is_some_and(|found| found.rule == violation.rule)
    };
    let mut shortest = actions.to_vec();
    if !fails(&shortest) {
        return shortest;
    }
    let mut tries = 0;
    loop {
        let before = shortest.len();
        let mut chunk = (shortest.len() / 2).max(1);
        loop {
            let mut start = shortest.len().saturating_sub(chunk);
            loop {
                let end = (start + chunk).min(shortest.len());
                let mut fewer = shortest[..start].to_vec();
                fewer.extend_from_slice(&shortest[end..]);
                tries += 1;
                if fails(&fewer) {
                    shortest = fewer;
                }
                if start == 0 {
                    break;
                }
                start = start.saturating_sub(chunk);
            }
            if chunk == 1 {
                break;
            }
            chunk /= 2;
        }
        // One "calm" instead of a crowd of single steps makes a script that survives changes of the engine.
        let mut index = 0;
        while index < shortest.len() {
            if is_order(&shortest[index]) {
                let run = shortest[index..]
                    .iter()
                    .take_while(|action| is_order(action))
                    .count();
                let mut calmer = shortest[..index].to_vec();
                calmer.push(Action::Calm);
                calmer.extend_from_slice(&shortest[index + run..]);
                tries += 1;
                if (run > 1 || shortest[index] != Action::Poll) && calmer != shortest && fails(&calmer) {
                    shortest = calmer;
                }
            }
            index += 1;
        }
        if shortest.len() == before || tries > 3_000 {
            return shortest;
        }
    }
}

const fn is_order(action: &Action) -> bool {
    matches!(
        action,
        Action::TellLink { .. }
            | Action::TellObjects { .. }
            | Action::TellPoke
            | Action::TellAnswer { .. }
            | Action::Poll
            | Action::Work { .. }
            | Action::AnswerAsk
    )
}

/// A failing run as a script.
pub(crate) fn script(run: &Run, violation: &Violation) -> Script {
    let actions = shrink(run.setup, &run.actions, violation);
    let (_, found) = replay(run.setup, &actions, false);
    let story = found.map_or_else(|| violation.story.clone(), |found| found.story);
    Script {
        rule: violation.rule.to_owned(),
        story,
        setup: run.setup,
        actions,
    }
}
