//! What happens next, as a tape chooses it.

use std::collections::{BTreeSet, VecDeque};

use crate::kernel::{OpKind, Outcome};
use crate::script::{Action, Addresses, DESTINATIONS, SERVICES, Script, Setup, Spec, Tamper, WorldLane};
use crate::tape::Tape;
use crate::world::World;

/// Interfaces of the workloads.
const INTERFACES: [&str; 6] = ["hf0", "hf1", "hf2", "hf3", "hf4", "hf5"];
const POLICIES: [&str; 5] = ["p0", "p1", "p2", "p3", "other/p4"];

/// The agent starts.
const START: Action = Action::Start {
    policies_first: false,
    saved: false,
};

/// What kind of run this is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mood {
    faults: bool,
    crashes: bool,
    /// Workers hang.
    hangs: bool,
    /// The build does ranges of addresses.
    prefixes: bool,
    /// There are audits, and something for them to find.
    tampering: bool,
    /// Two attachments of one interface or address.
    contests: bool,
    /// Devices and identities change often.
    churn: u32,
    /// How often everything is worked off at once.
    calm: u32,
    /// For a real node: nothing that it cannot do, and times that a test can wait for.
    node: bool,
}

/// Things that happen in a script for a real node.
const LENGTH: usize = 30;

/// The script of a seed for a real node, as it goes in the world.
pub(crate) fn node_script(seed: u64) -> Script {
    let setup = Setup {
        several_producers: true,
        ..Setup::default()
    };
    let mut generator = Generator::on_a_node(Tape::from_seed(seed));
    let mut world = World::new(setup);
    let mut actions = Vec::new();
    let mut happened = 0;
    while happened < LENGTH {
        let action = generator.next_on_a_node(&world);
        // A rule that is broken here is broken again when the script is run.
        let _ = world.act(&action);
        happened += usize::from(!matches!(action, Action::Calm | Action::Rest));
        actions.push(action);
    }
    actions.push(Action::Rest);
    Script {
        rule: "a real node and the model world show the same".into(),
        story: format!("seed {seed}"),
        setup,
        actions,
    }
}

/// Makes actions.
pub(crate) struct Generator<'a> {
    tape: Tape<'a>,
    mood: Mood,
    /// The first actions, which make a world in which something works.
    prologue: Vec<Action>,
    /// What is next in any case.
    queue: VecDeque<Action>,
}

impl<'a> Generator<'a> {
    /// With the setup of the world that it is for.
    pub(crate) fn new(mut tape: Tape<'a>) -> (Self, Setup) {
        let mut setup = Setup {
            several_producers: tape.one_in(2),
            prefixes: !tape.one_in(3),
            audits: tape.one_in(2),
            ..Setup::default()
        };
        if tape.one_in(10) {
            setup.policies = 3;
            setup.slots = if setup.several_producers { 3000 } else { 5 };
            setup.backends = 6;
        }
        let mood = Mood {
            faults: tape.one_in(2),
            crashes: tape.one_in(2),
            hangs: tape.one_in(6),
            prefixes: setup.prefixes,
            tampering: setup.audits && tape.one_in(2),
            contests: tape.one_in(4),
            churn: *tape.pick(&[2, 6, 12]),
            calm: *tape.pick(&[1, 4, 12]),
            node: false,
        };
        (Self::begun(tape, mood), setup)
    }

    /// Makes actions for a real node, one at a time: see [`Generator::next_on_a_node`].
    fn on_a_node(mut tape: Tape<'a>) -> Self {
        let mood = Mood {
            faults: false,
            crashes: true,
            hangs: false,
            prefixes: false,
            tampering: false,
            contests: tape.one_in(4),
            churn: 0,
            calm: 0,
            node: true,
        };
        Self::begun(tape, mood)
    }

    fn begun(tape: Tape<'a>, mood: Mood) -> Self {
        let mut generator = Self {
            tape,
            mood,
            prologue: Vec::new(),
            queue: VecDeque::new(),
        };
        generator.prologue = generator.beginning();
        generator.prologue.reverse();
        generator
    }

    fn beginning(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        let start = Action::Start {
            policies_first: self.tape.one_in(2),
            saved: false,
        };
        let late = self.tape.one_in(3);
        if !late {
            actions.push(start.clone());
        }
        let devices = 2 + self.tape.below(4);
        for (number, interface) in (0_u8..).zip(&INTERFACES[..devices as usize]) {
            let identity = self.tape.one_in(2).then_some(number % 4 + 1);
            actions.push(Action::Create {
                interface: (*interface).into(),
                reuse: true,
                down: self.tape.one_in(12),
                no_carrier: self.tape.one_in(12),
                tap: self.tape.one_in(24),
            });
            if !self.tape.one_in(8) {
                actions.push(Action::Register {
                    interface: (*interface).into(),
                    identity,
                    poke: self.tape.one_in(2),
                    shared: self.tape.one_in(16),
                });
            }
            let app = match number {
                0 => "web",
                1 => "dns",
                _ => *self.tape.pick(&["web", "api", "dns", "log"]),
            };
            actions.push(Action::PutAttachment {
                name: format!("a{number}"),
                interface: (*interface).into(),
                identity,
                app: app.into(),
                addresses: Addresses::Own,
                fresh: false,
            });
        }
        for _ in 0..1 + self.tape.below(3) {
            actions.push(self.put_policy());
        }
        if late {
            actions.push(start);
        }
        if self.tape.one_in(2) {
            actions.push(Action::Calm);
        }
        actions
    }

    fn interface(&mut self) -> String {
        (*self.tape.pick(&INTERFACES)).into()
    }

    fn put_policy(&mut self) -> Action {
        let several = self.tape.below(3) + 1;
        let mut destinations = BTreeSet::new();
        for _ in 0..several {
            destinations.insert(self.tape.below(u32::from(SERVICES)) as u8);
        }
        // Where the build does none, they are asked for now and then.
        if self.tape.one_in(if self.mood.prefixes { 3 } else { 30 }) {
            destinations.insert(SERVICES + self.tape.below(u32::from(DESTINATIONS - SERVICES)) as u8);
        }
        Action::PutPolicy {
            name: (*self.tape.pick(&POLICIES)).into(),
            spec: Spec {
                consumers: (*self.tape.pick(&["web", "web", "web|api", "api", "any", "!dns"])).into(),
                producers: (*self
                    .tape
                    .pick(&["dns", "dns", "log", "log", "dns|log", "api", "any"]))
                .into(),
                destinations,
                pass: self.tape.one_in(6),
                cut: self.tape.one_in(3),
                deadline_s: *self
                    .tape
                    .pick(if self.mood.node { &[1, 2][..] } else { &[1, 5, 8] }),
                drain_s: *self.tape.pick(if self.mood.node {
                    &[0, 1][..]
                } else {
                    &[0, 0, 2, 4]
                }),
                translate: self.tape.one_in(40),
            },
            fresh: self.tape.one_in(6),
            old: self.tape.one_in(6),
        }
    }

    fn put_attachment(&mut self) -> Action {
        let number = self.tape.below(INTERFACES.len() as u32) as u8;
        let other = self.mood.contests && self.tape.one_in(5);
        let interface = if other {
            self.interface()
        } else {
            INTERFACES[number as usize].to_owned()
        };
        Action::PutAttachment {
            name: format!("a{number}"),
            interface,
            identity: self.identity(number),
            app: (*self
                .tape
                .pick(&["web", "web", "api", "dns", "dns", "log", "none"]))
            .into(),
            addresses: match self.tape.below(12) {
                0 => Addresses::More,
                1 => Addresses::Other,
                2 => Addresses::None,
                3 if self.mood.contests => Addresses::Shared,
                _ => Addresses::Own,
            },
            fresh: self.tape.one_in(3),
        }
    }

    /// Mostly the one that goes with the interface.
    fn identity(&mut self, number: u8) -> Option<u8> {
        match self.tape.below(8) {
            0 => Some(self.tape.below(4) as u8 + 1),
            1..=4 => Some(number % 4 + 1),
            _ => None,
        }
    }

    /// What happens next in this world.
    pub(crate) fn next(&mut self, world: &World) -> Action {
        if let Some(action) = self.prologue.pop() {
            return action;
        }
        if !world.is_up() && self.tape.one_in(3) {
            return Action::Start {
                policies_first: self.tape.one_in(2),
                saved: self.tape.one_in(3),
            };
        }
        let waiting = world.waiting();
        let busy = waiting.links
            + waiting.source
            + waiting.pokes
            + waiting.asks
            + usize::from(waiting.checking)
            + waiting.jobs.iter().sum::<usize>()
            + waiting.answers.iter().sum::<usize>()
            + usize::from(waiting.handled);
        let order = if busy > 0 { 80 } else { 0 };
        let weights = [
            order,
            self.mood.churn,
            self.mood.churn.div_ceil(2),
            if self.mood.crashes { 1 } else { 0 },
            if self.mood.faults { 2 } else { 0 },
            2,
            self.mood.calm,
            if self.mood.tampering { 1 } else { 0 },
        ];
        match self.tape.weighted(&weights) {
            0 if self.mood.hangs && self.tape.one_in(60) => self.hang(world),
            0 => self.order(world),
            1 => self.device(),
            2 => self.object(),
            3 => self.agent(world),
            4 => self.fault(world),
            5 => self.time(),
            7 => self.tamper(),
            _ => self.stillness(),
        }
    }

    /// What happens next in this world and on a node that is in step with it: a thing, and then, mostly, that both must
    /// show the same ([`Action::meeting`]).
    fn next_on_a_node(&mut self, world: &World) -> Action {
        loop {
            if let Some(action) = self.queue.pop_front() {
                return action;
            }
            let action = match self.prologue.pop() {
                Some(action) => action,
                None if !world.is_up() && self.tape.one_in(2) => START,
                None => match self.tape.weighted(&[10, 8, u32::from(world.is_up()), 1]) {
                    0 => self.device(),
                    1 => self.object(),
                    2 => Action::Crash { done: [0; 3] },
                    _ => Action::Strip {
                        interface: self.interface(),
                    },
                },
            };
            let Some(actions) = action.on_a_node() else {
                continue;
            };
            // What was said well before, a directory tells a new life again, and this world does not.
            let spoiled = world
                .objects
                .policies
                .values()
                .any(|policy| policy.content.is_err());
            let dies = actions
                .iter()
                .any(|action| matches!(action, Action::Crash { .. }));
            let spoils = actions
                .iter()
                .any(|action| matches!(action, Action::SpoilPolicy { .. }));
            if dies && spoiled || spoils && !world.is_up() {
                continue;
            }
            for action in actions {
                let meeting = action.meeting();
                self.queue.push_back(action);
                self.queue.extend(meeting);
            }
            // The agent may die before it has got round to it.
            let may_die = world.is_up() && !dies && !spoiled && !spoils;
            if may_die
                && self.tape.one_in(12)
                && matches!(self.queue.back(), Some(Action::Calm | Action::Rest))
            {
                self.queue.pop_back();
                let end = [Action::Crash { done: [0; 3] }, START, Action::Calm];
                self.queue.extend(end);
            }
        }
    }

    /// One of the things that wait happens.
    fn order(&mut self, world: &World) -> Action {
        let waiting = world.waiting();
        let weight = |count: usize| u32::from(count > 0) * 2;
        let weights = [
            weight(waiting.links),
            weight(waiting.source),
            weight(waiting.pokes),
            weight(waiting.asks),
            weight(waiting.jobs[0]) * 2,
            weight(waiting.jobs[1]),
            weight(waiting.jobs[2]),
            weight(waiting.answers[0]) * 2,
            weight(waiting.answers[1]),
            weight(waiting.answers[2]),
            weight(usize::from(waiting.handled)) * 3,
            weight(waiting.jobs[3]),
            weight(waiting.answers[3]),
            weight(usize::from(waiting.checking)),
        ];
        let outcome = |tape: &mut Tape<'_>, faults: bool| {
            if faults && tape.one_in(40) {
                *tape.pick(&[Outcome::Refused, Outcome::RefusedAfter, Outcome::RefusedHalf])
            } else {
                Outcome::Done
            }
        };
        let faults = self.mood.faults;
        match self.tape.weighted(&weights) {
            0 if self.mood.tampering && self.tape.one_in(12) => Action::LoseLink,
            0 => Action::TellLink {
                skip: self.tape.one_in(6),
                twice: self.tape.one_in(12),
            },
            1 => Action::TellObjects {
                count: *self.tape.pick(&[1, 1, 2, 30]),
            },
            2 => Action::TellPoke,
            3 => Action::AnswerAsk,
            number @ 4..=6 => Action::Work {
                lane: WorldLane::ALL[number - 4],
                outcome: outcome(&mut self.tape, faults),
            },
            number @ 7..=9 => Action::TellAnswer {
                lane: WorldLane::ALL[number - 7],
            },
            11 => Action::Work {
                lane: WorldLane::Audit,
                outcome: outcome(&mut self.tape, faults),
            },
            12 => Action::TellAnswer {
                lane: WorldLane::Audit,
            },
            13 => Action::CheckLinks,
            _ => Action::Poll,
        }
    }

    /// A worker hangs; those that do what is seldom done rather than others.
    fn hang(&mut self, world: &World) -> Action {
        let fronts = world.waiting().fronts;
        let waiting = || WorldLane::ALL.into_iter().zip(fronts);
        let seldom = |kind: OpKind| {
            !matches!(
                kind,
                OpKind::ReadRegistry | OpKind::WriteEntries | OpKind::WritePolicy | OpKind::WriteBackends
            )
        };
        let mut lanes: Vec<WorldLane> = waiting()
            .filter_map(|(lane, front)| front.filter(|kind| seldom(*kind)).map(|_| lane))
            .collect();
        if lanes.contains(&WorldLane::Prove) && self.tape.one_in(2) {
            lanes = vec![WorldLane::Prove];
        }
        if lanes.is_empty() || self.tape.one_in(12) {
            lanes = waiting()
                .filter_map(|(lane, front)| front.map(|_| lane))
                .collect();
        }
        if lanes.is_empty() {
            return Action::Poll;
        }
        Action::Hang {
            lane: *self.tape.pick(&lanes),
            done: self.tape.one_in(2),
        }
    }

    /// Somebody changes something and tells nobody.
    fn tamper(&mut self) -> Action {
        let interface = self.interface();
        match self.tape.below(12) {
            0 => Action::Strip { interface },
            1 => Action::Foreign {
                interface,
                there: self.tape.one_in(2),
                tell: self.tape.one_in(2),
            },
            2 => Action::HooksUnknown,
            3..=4 => Action::LoseLink,
            _ => Action::Tamper {
                interface,
                how: *self.tape.pick(&Tamper::ALL),
            },
        }
    }

    fn device(&mut self) -> Action {
        let number = self.tape.below(INTERFACES.len() as u32) as u8;
        let interface = INTERFACES[number as usize].to_owned();
        match self.tape.below(41) {
            0..=5 => Action::Create {
                interface,
                reuse: !self.tape.one_in(3),
                down: self.tape.one_in(6),
                no_carrier: self.tape.one_in(6),
                tap: self.tape.one_in(30),
            },
            6..=7 => Action::Delete { interface },
            8..=9 => Action::Replace { interface },
            10 => Action::Rename {
                interface,
                to: (*self.tape.pick(&["hf0", "hf1", "hf2", "x0"])).into(),
            },
            11 => Action::Rename {
                interface: "x0".into(),
                to: interface,
            },
            12 => Action::MoveOut { interface },
            13 => Action::MoveBack { interface },
            14..=17 => Action::Up {
                interface,
                up: !self.tape.one_in(3),
            },
            18..=20 => Action::Carrier {
                interface,
                carrier: !self.tape.one_in(3),
            },
            21 => Action::ChangeMac { interface },
            22 => Action::ChangeMtu { interface },
            23..=32 => Action::Register {
                interface,
                identity: self.identity(number),
                poke: !self.tape.one_in(3),
                shared: self.tape.one_in(30),
            },
            33..=34 => Action::Unregister {
                interface,
                poke: self.tape.one_in(2),
            },
            35 => Action::UnregisterNumber {
                ifindex: 2 + self.tape.below(6),
            },
            36 => Action::Poke { interface },
            37 => Action::Create {
                interface: "x0".into(),
                reuse: self.tape.one_in(2),
                down: false,
                no_carrier: false,
                tap: false,
            },
            38 => Action::Delete {
                interface: "x0".into(),
            },
            39 => Action::Own {
                number: self.tape.below(3) as u8,
            },
            _ => Action::Overrun,
        }
    }

    fn object(&mut self) -> Action {
        let policy: String = (*self.tape.pick(&POLICIES)).into();
        match self.tape.below(16) {
            0..=4 => self.put_attachment(),
            5 => Action::DropAttachment {
                name: format!("a{}", self.tape.below(6)),
            },
            6..=10 => self.put_policy(),
            11 => Action::DropPolicy { name: policy },
            12 => Action::SpoilPolicy {
                name: policy,
                unsupported: self.tape.one_in(2),
                consumers: self.tape.one_in(2).then(|| "web".to_owned()),
            },
            13..=14 => Action::TouchPolicy { name: policy },
            _ => Action::Relist,
        }
    }

    fn agent(&mut self, world: &World) -> Action {
        if !world.is_up() || self.tape.one_in(2) {
            return Action::Save;
        }
        let jobs = world.waiting().jobs;
        Action::Crash {
            done: [
                self.tape.below(jobs[0] as u32 + 1) as u8,
                self.tape.below(jobs[1] as u32 + 1) as u8,
                self.tape.below(jobs[2] as u32 + 1) as u8,
            ],
        }
    }

    fn fault(&mut self, world: &World) -> Action {
        let interface = self.interface();
        match self.tape.below(10) {
            0..=2 => Action::Refuse {
                kind: if self.tape.one_in(10) {
                    OpKind::Attach
                } else {
                    *self.tape.pick(&OpKind::OPS)
                },
                interface: self.tape.one_in(2).then_some(interface),
            },
            3 => Action::Capacity {
                services: self.tape.below(8),
            },
            4 if self.tape.one_in(3) => self.hang(world),
            5 => Action::Strip { interface },
            6 => Action::Readable {
                interface,
                readable: self.tape.one_in(2),
            },
            _ => Action::Mend,
        }
    }

    fn time(&mut self) -> Action {
        let ms = match self.tape.below(8) {
            0..=3 => self.tape.below(1500),
            4..=5 => 1000 * (1 + self.tape.below(8)),
            6 => 10_000 + self.tape.below(3000),
            _ => 30_000 + self.tape.below(30_000),
        };
        Action::Advance {
            ms,
            jump: self.tape.one_in(6),
        }
    }

    fn stillness(&mut self) -> Action {
        match self.tape.below(12) {
            0 => Action::Rest,
            1 => Action::Quiet { seconds: 70 },
            _ => Action::Calm,
        }
    }
}
