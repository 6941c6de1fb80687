//! Suite `classifier`: what a packet costs in the program, by test runs.
//!
//! A test run repeats one packet, and a program that rewrites sees its own output. So a wrapper writes the next of
//! 65,536 packets into it and tail-calls the real program; the same wrapper before a program that does nothing is
//! what is subtracted. One measurement is of a quarter of those packets: the next one goes on where it stopped.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast::datapath::raw::{self, SkbContext};
use holdfast_ebpf::abi::Verdict;
use holdfast_engine::model::Protocol;
use holdfast_tests::ground::Ground;
use holdfast_tests::{Space, sysctl};

use crate::asm::{self, FOUND, Family, PACKETS, Wrapping};
use crate::packets::{self, Flags, Order};
use crate::plane::{self, PORT, Plane};
use crate::report::{AA, Beside, Figure, Floor, Machine, Report, Samples, load};
use crate::table::{Kind, Table};

/// How much is measured.
pub(crate) struct Scale {
    pub(crate) rounds: usize,
    /// Routes of each plane.
    pub(crate) routes: &'static [u32],
}

impl Scale {
    pub(crate) const FULL: Self = Self {
        rounds: 15,
        routes: &[10, MIDDLE, 1_000_000],
    };
    pub(crate) const SMOKE: Self = Self {
        rounds: 3,
        routes: &[10, MIDDLE],
    };
}

/// Routes of the plane on which what does not depend on them is measured.
const MIDDLE: u32 = 10_000;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// Packets of one measurement.
const RUNS: usize = PACKETS / 4;
/// Measurements of new flows before the first that counts: as many as fill a flow table twice.
const FILLING: usize = 16;

/// So long after the start there is no further round, on a machine that is busy.
const BUDGET: Duration = Duration::from_secs(55);
const ROUNDS_AT_LEAST: usize = 3;

/// Columns.
const OVER_EMPTY: &str = "over empty";
const X_HASH: &str = "x hash";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// The wrapper and a program that does nothing. `true`: the wrapper that makes new flows.
    Empty(bool),
    Established,
    /// The same again.
    EstablishedAgain,
    Answer,
    /// A SYN, which chooses anew, of a flow that is known: two entries are replaced.
    Reopened,
    /// A SYN of a new flow while the flow table is full: two entries are made, and two others pushed out.
    FirstPacket,
    Held,
    Unmatched,
    Unknown,
    Array,
    Hash,
    Trie,
    Fib,
}

impl What {
    const fn name(self) -> &'static str {
        match self {
            Self::Empty(_) => "empty program",
            Self::Established => "established flow",
            Self::EstablishedAgain => "established again",
            Self::Answer => "answer of it",
            Self::Reopened => "first packet again",
            Self::FirstPacket => "first packet, table full",
            Self::Held => "held",
            Self::Unmatched => "unmatched",
            Self::Unknown => "unknown interface",
            Self::Array => "(array read)",
            Self::Hash => "(hash look-up)",
            Self::Trie => "(LPM trie)",
            Self::Fib => "(bpf_fib_lookup)",
        }
    }

    /// What the program says of every packet; none for what is not Holdfast's.
    const fn verdict(self) -> Option<Verdict> {
        match self {
            Self::Established | Self::EstablishedAgain | Self::Reopened | Self::FirstPacket => {
                Some(Verdict::Delivered)
            }
            Self::Answer => Some(Verdict::Answered),
            Self::Held => Some(Verdict::DropHeld),
            Self::Unmatched | Self::Unknown => Some(Verdict::Pass),
            Self::Empty(_) | Self::Array | Self::Hash | Self::Trie | Self::Fib => None,
        }
    }

    /// What a run returns.
    const fn action(self) -> i32 {
        const DROP: i32 = 2;
        const REDIRECT: i32 = 7;
        match self.verdict() {
            Some(Verdict::Delivered | Verdict::Answered) => REDIRECT,
            Some(Verdict::DropHeld) => DROP,
            _ => FOUND,
        }
    }

    /// Nanoseconds over the empty program.
    const fn goal(self, routes: u32) -> Option<f64> {
        Some(match (self, routes) {
            (Self::Established, 10) => 130.0,
            (Self::Established, MIDDLE) => 180.0,
            (Self::Reopened | Self::FirstPacket, 10 | MIDDLE) => 450.0,
            (Self::Held, 10) => 70.0,
            (Self::Held, MIDDLE) => 110.0,
            (Self::Unmatched, 10 | MIDDLE) => 100.0,
            (Self::Unknown, _) => 20.0,
            _ => return None,
        })
    }

    const fn packets(self) -> Packets {
        match self {
            Self::Answer => Packets::Answers,
            Self::Reopened => Packets::Syn,
            Self::FirstPacket | Self::Empty(true) => Packets::FreshSyn,
            Self::Unmatched => Packets::Unmatched,
            _ => Packets::Data,
        }
    }
}

/// What a wrapper makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packets {
    /// Of connections that are there.
    Data,
    /// Their first packets.
    Syn,
    /// First packets of connections that never were.
    FreshSyn,
    Answers,
    /// To destinations that no route leads to.
    Unmatched,
}

/// A wrapper with the program that it calls.
struct Wrapper {
    program: OwnedFd,
    /// The kernel empties an array of programs when nobody holds a descriptor of it.
    _programs: Table,
    frame: Vec<u8>,
}

impl Wrapper {
    fn new(family: Family, kind: Packets, numbers: &Table, program: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let source = plane::source(family, 0);
        let service = plane::service(family, 0);
        let frame = match kind {
            Packets::Data => packets::request(source, service, PORT, Flags::Ack),
            Packets::Syn | Packets::FreshSyn => packets::request(source, service, PORT, Flags::Syn),
            Packets::Answers => packets::answer(source, service, PORT),
            Packets::Unmatched => packets::request(source, plane::nobody(family, 0), PORT, Flags::Ack),
        }?;
        let count = Table::new(Kind::Array, 4, 8, 1)?;
        let programs = Table::of_program(program)?;
        let program = asm::wrapper(&Wrapping {
            count: count.as_fd(),
            numbers: numbers.as_fd(),
            programs: programs.as_fd(),
            frame: &frame,
            family,
            answers: kind == Packets::Answers,
            fresh: kind == Packets::FreshSyn,
        })?;
        Ok(Self {
            program,
            _programs: programs,
            frame,
        })
    }

    /// Runs the next packets: nanoseconds each.
    fn run(&self, ifindex: u32, action: i32, packets: usize) -> anyhow::Result<f64> {
        run(&self.program, &self.frame, ifindex, action, packets)
    }
}

fn run(program: &OwnedFd, frame: &[u8], ifindex: u32, action: i32, packets: usize) -> anyhow::Result<f64> {
    let context = SkbContext::new(0, ifindex, [0; 5]);
    let run = raw::test_run(program.as_fd(), frame, &context, packets as u32)?;
    let found = run.returned.cast_signed();
    ensure!(
        found == action,
        "the last packet: returned {found} instead of {action}"
    );
    Ok(run.nanos.into())
}

/// One line of the table.
struct Cell {
    what: What,
    family: Family,
    routes: u32,
    order: Order,
    wrapper: Wrapper,
    /// Where the packets arrive.
    ifindex: u32,
    /// The plane that it is measured on, and what opens its flows: indexes.
    plane: usize,
    opener: usize,
    samples: Samples,
}

impl Cell {
    /// Runs the next packets: nanoseconds each.
    fn run(&self, packets: usize) -> anyhow::Result<f64> {
        self.wrapper.run(self.ifindex, self.what.action(), packets)
    }
}

/// What opens flows: every packet once, at the consumer.
struct Opener {
    wrapper: Wrapper,
    consumer: u32,
}

/// Everything that is there to be measured.
#[derive(Default)]
struct Bench {
    planes: Vec<Plane>,
    openers: Vec<Opener>,
    cells: Vec<Cell>,
    /// A device without a row.
    stranger: u32,
    _spaces: Vec<Space>,
}

/// Measures.
pub(crate) fn measure(scale: &Scale, revision: String) -> anyhow::Result<Report> {
    let started = Instant::now();
    let mut machine = Machine::here();
    let mut ground = Ground::new()?;
    let node = ground.space().clone();
    node.inside(|| {
        sysctl::for_node()?;
        let mut bench = Bench::new(&mut ground, scale)?;
        let alone = bench.rounds(scale.rounds, started)?;
        machine.load[1] = load();
        bench.report(machine, revision, &alone)
    })
}

impl Bench {
    fn new(ground: &mut Ground, scale: &Scale) -> anyhow::Result<Self> {
        let (stranger, space) = ground.veth("hfstranger")?;
        let mut bench = Self {
            stranger: stranger.ifindex,
            _spaces: vec![space],
            ..Self::default()
        };
        for &routes in scale.routes {
            let plane = Plane::new(ground, &routes.to_string(), routes, Protocol::Tcp)
                .with_context(|| format!("a plane of {routes} routes"))?;
            plane.no_flow_rate();
            bench.planes.push(plane);
            for family in FAMILIES {
                bench.add_holdfast(family, routes)?;
            }
        }
        for family in FAMILIES {
            route_all(ground, family)?;
        }
        Ok(bench)
    }

    /// All cells of the plane that was made last, for one family.
    fn add_holdfast(&mut self, family: Family, routes: u32) -> anyhow::Result<()> {
        let at = self.planes.len() - 1;
        let plane = &self.planes[at];
        let program = plane.program.try_clone()?;
        let (consumer, producer) = (plane.intent.consumer.ifindex, plane.producer);
        // Of ten routes none is popular.
        let orders: &[Order] = if routes == 10 {
            &[Order::Random]
        } else {
            &[Order::Random, Order::Zipf]
        };
        let array = array(family, routes)?;
        let hash = hash(family, routes, consumer)?;
        let trie = trie(family, routes)?;
        for &order in orders {
            let numbers = numbers(order, routes)?;
            let opener = self.openers.len();
            self.openers.push(Opener {
                wrapper: Wrapper::new(family, Packets::Data, &numbers, program.as_fd())?,
                consumer,
            });
            let mut add = |what: What, program: BorrowedFd<'_>, ifindex| -> anyhow::Result<()> {
                self.cells.push(Cell {
                    what,
                    family,
                    routes,
                    order,
                    wrapper: Wrapper::new(family, what.packets(), &numbers, program)?,
                    ifindex,
                    plane: at,
                    opener,
                    samples: Samples::default(),
                });
                Ok(())
            };
            let real = program.as_fd();
            let on_middle = routes == MIDDLE && order == Order::Random;
            if on_middle {
                let empty = asm::empty()?;
                add(What::Empty(false), empty.as_fd(), consumer)?;
                add(What::Empty(true), empty.as_fd(), consumer)?;
                add(What::Unknown, real, self.stranger)?;
                add(What::Fib, asm::fib(family)?.as_fd(), consumer)?;
            }
            add(What::Established, real, consumer)?;
            if on_middle {
                add(What::EstablishedAgain, real, consumer)?;
            }
            add(What::Answer, real, producer)?;
            add(What::Held, real, consumer)?;
            if order == Order::Random {
                add(What::Unmatched, real, consumer)?;
            }
            add(What::Array, array.as_fd(), consumer)?;
            add(What::Hash, hash.as_fd(), consumer)?;
            add(What::Trie, trie.as_fd(), consumer)?;
            add(What::Reopened, real, consumer)?;
            // Last: its flows push others out.
            add(What::FirstPacket, real, consumer)?;
        }
        Ok(())
    }

    /// Measures everything once a round; gives the empty program without a wrapper.
    fn rounds(&mut self, rounds: usize, started: Instant) -> anyhow::Result<Samples> {
        let empty = asm::empty()?;
        let (source, service) = (plane::source(Family::V4, 0), plane::service(Family::V4, 0));
        let frame = packets::request(source, service, PORT, Flags::Ack)?;
        let mut alone = Samples::default();
        // The first round is not counted: it fills the flow tables.
        for round in 0..=rounds {
            if round > ROUNDS_AT_LEAST && started.elapsed() > BUDGET {
                break;
            }
            let nanos = run(&empty, &frame, self.stranger, FOUND, RUNS)?;
            let mut measured = vec![nanos];
            for cell in &self.cells {
                let fills = cell.family == Family::V4 && cell.order == Order::Random;
                if round == 0 && cell.what == What::FirstPacket && fills {
                    cell.run(RUNS * FILLING)?;
                }
                let nanos = self
                    .measure(cell)
                    .with_context(|| format!("{}, {} routes", cell.what.name(), cell.routes))?;
                measured.push(nanos);
            }
            if round == 0 {
                continue;
            }
            let samples =
                std::iter::once(&mut alone).chain(self.cells.iter_mut().map(|cell| &mut cell.samples));
            for (samples, nanos) in samples.zip(measured) {
                samples.0.push(nanos);
            }
        }
        Ok(alone)
    }

    fn measure(&self, cell: &Cell) -> anyhow::Result<f64> {
        let plane = &self.planes[cell.plane];
        // The first of its kind in a round: the others that need the flows follow, and then those that push them out.
        if cell.what == What::Established {
            let opener = &self.openers[cell.opener];
            opener
                .wrapper
                .run(opener.consumer, cell.what.action(), PACKETS)
                .context("opening flows")?;
        }
        let Some(verdict) = cell.what.verdict() else {
            return cell.run(RUNS);
        };
        if cell.what == What::Held {
            plane.hold(true)?;
        }
        let before = plane.packets(verdict);
        let nanos = cell.run(RUNS)?;
        let counted = plane.packets(verdict) - before;
        if cell.what == What::Held {
            plane.hold(false)?;
        }
        // First packets may have pushed out the answer entry of a flow, which a request mends once a second: among a
        // million routes more than one in a hundred.
        ensure!(
            counted as usize >= RUNS - RUNS / 20,
            "{counted} of {RUNS} packets were counted as {verdict:?}"
        );
        Ok(nanos)
    }

    fn find(&self, what: What, of: &Cell) -> Option<&Cell> {
        self.cells.iter().find(|cell| {
            let same = cell.routes == of.routes && cell.order == of.order;
            cell.what == what && cell.family == of.family && (same || matches!(what, What::Empty(_)))
        })
    }

    fn report(&self, machine: Machine, revision: String, alone: &Samples) -> anyhow::Result<Report> {
        let mut figures = Vec::new();
        let mut a_a = Vec::new();
        for cell in &self.cells {
            if cell.what == What::EstablishedAgain {
                let first = self.find(What::Established, cell).context("nothing to compare")?;
                let ratio = cell.samples.with(&first.samples, |a, b| a / b).median();
                let what = format!("established flow, IPv{}, measured twice", cell.family.number());
                a_a.push(AA { what, ratio });
                continue;
            }
            figures.push(self.figure(cell)?);
        }
        figures.sort_by_key(|figure| figure.what.starts_with('('));
        Ok(Report {
            suite: "classifier",
            revision,
            machine,
            profile: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
            rounds: alone.0.len(),
            unit: "nanoseconds a packet, by test runs of 16,384 packets",
            floor: Floor {
                what: "an empty program, without the wrapper that changes the packet".into(),
                median: alone.median(),
                min: alone.min(),
            },
            a_a,
            figures,
        })
    }

    fn figure(&self, cell: &Cell) -> anyhow::Result<Figure> {
        let over = |cell: &Cell| -> anyhow::Result<(Samples, f64)> {
            let empty = self
                .find(What::Empty(cell.what == What::FirstPacket), cell)
                .context("the empty program was not measured")?;
            let over = cell.samples.with(&empty.samples, |a, b| a - b);
            Ok((over, cell.samples.min() - empty.samples.min()))
        };
        let mut beside = Vec::new();
        if !matches!(cell.what, What::Empty(_)) {
            let (samples, best) = over(cell)?;
            beside.push(Beside {
                what: OVER_EMPTY,
                value: samples.median(),
                best,
                within_noise: false,
                goal: cell.what.goal(cell.routes),
            });
            if let Some(hash) = self.find(What::Hash, cell)
                && cell.what != What::Hash
            {
                let (hash, hash_best) = over(hash)?;
                beside.push(Beside {
                    what: X_HASH,
                    value: samples.with(&hash, |a, b| a / b).median(),
                    best: best / hash_best,
                    within_noise: false,
                    goal: None,
                });
            }
        }
        Ok(Figure {
            what: cell.what.name().into(),
            family: Some(cell.family.number()),
            routes: Some(cell.routes),
            keys: Some(cell.order.name()),
            min: cell.samples.min(),
            median: cell.samples.median(),
            beside,
        })
    }
}

/// A map of one value: the services that packets are of.
fn numbers(order: Order, routes: u32) -> anyhow::Result<Table> {
    let bytes: Vec<u8> = order
        .numbers(routes)
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    let table = Table::new(Kind::Array, 4, bytes.len(), 1)?;
    table.put(&0_u32.to_ne_bytes(), &bytes)?;
    Ok(table)
}

/// Reads one cache line by the destination's number.
fn array(family: Family, routes: u32) -> anyhow::Result<OwnedFd> {
    let size = routes.next_power_of_two();
    let table = Table::new(Kind::Array, 4, 64, size as usize)?;
    asm::array(family, table.as_fd(), size - 1)
}

/// A hash with the keys that `services` has.
fn hash(family: Family, routes: u32, ifindex: u32) -> anyhow::Result<OwnedFd> {
    const TCP: u8 = 6;
    let table = Table::new(Kind::Hash, 24, 16, routes as usize)?;
    let mut keys = Vec::new();
    for number in 0..routes {
        keys.extend(ifindex.to_ne_bytes());
        keys.extend(PORT.to_be_bytes());
        keys.extend([TCP, family.number()]);
        let end = keys.len() + 16;
        keys.extend(packets::octets(plane::service(family, number)));
        keys.resize(end, 0);
    }
    table.put_all(&keys, &vec![0; routes as usize * 16])?;
    asm::hash(family, table.as_fd())
}

/// A trie with every destination as a prefix of its own.
fn trie(family: Family, routes: u32) -> anyhow::Result<OwnedFd> {
    let bytes = packets::octets(plane::service(family, 0)).len();
    let table = Table::new(Kind::Trie, 4 + bytes, 16, routes as usize)?;
    let mut keys = Vec::new();
    for number in 0..routes {
        keys.extend((bytes as u32 * 8).to_ne_bytes());
        keys.extend(packets::octets(plane::service(family, number)));
    }
    table.put_all(&keys, &vec![0; routes as usize * 16])?;
    asm::trie(family, table.as_fd())
}

/// Routes every destination of the middle plane by itself, for the kernel's own look-up.
fn route_all(ground: &mut Ground, family: Family) -> anyhow::Result<()> {
    const DEVICE: &str = "hfstranger";
    for number in 0..MIDDLE {
        let to = plane::service(family, number);
        let bits = packets::octets(to).len() as u8 * 8;
        ground.rtnl.route(to, bits, None, DEVICE)?;
        ground.rtnl.neighbour(to, [2, 0, 0, 0, 0, 9], DEVICE)?;
    }
    Ok(())
}
