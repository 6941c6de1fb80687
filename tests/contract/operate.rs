//! What an operator is told, word for word, of a node that is made up.

use std::collections::BTreeMap;

use holdfast::cli;
use holdfast::serve::diff::Diff;
use holdfast::serve::look::{Look, Seen};
use holdfast::serve::why::Why;
use holdfast_engine::belief::{Audited, Belief, Difference};
use holdfast_engine::compare::{Compared, Page, Thing, Value};
use holdfast_engine::explain::{
    Asked, ConsumerFacts, Explained, IdentityFacts, ProducerFacts, ProofFacts, SetFacts, Supply, Unexplained,
};
use holdfast_engine::model::{
    Entry, FailReason, HoldReason, Identity, Ifindex, Incarnation, Link, LinkKind, Mac, ObjectName, Protocol,
    RegistryRead, RouteKey, Row, State, Token, Uid,
};
use holdfast_engine::since::{Since, Times};
use holdfast_engine::view::IntentView;

use super::{at, golden, policies, pretty, shop, stamps};

const MAC: Mac = Mac([2, 0, 0, 0, 0, 7]);
const DNS: RouteKey = RouteKey::Service {
    address: std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 96, 0, 10)),
    protocol: Protocol::Udp,
    port: 53,
};

fn link(name: &str) -> Link {
    Link {
        ifindex: 7,
        name: name.to_owned(),
        mac: MAC,
        up: true,
        carrier: true,
        kind: LinkKind::Veth { peer_elsewhere: true },
        master: None,
        mtu: 1500,
        ipv6: true,
    }
}

fn token() -> Token {
    Token::new(0x8f14_e45f_ceea_167a).unwrap_or(Token(std::num::NonZeroU64::MIN))
}

fn identity(incarnation: u8) -> Identity {
    Identity {
        token: token(),
        mac: Mac::default(),
        host_mac: MAC,
        host_mac_shared: false,
        incarnation: Some(Incarnation([incarnation; 16])),
    }
}

fn row(open: bool) -> Row {
    Row {
        token: open.then(token),
        epoch: 3,
        has_services: true,
        has_prefixes_v4: false,
        has_prefixes_v6: false,
        has_sources: true,
        via: None,
    }
}

/// A consumer that has everything.
fn served(name: &str) -> ConsumerFacts {
    let interface = format!("hf{name}");
    ConsumerFacts {
        intent: IntentView {
            policy: shop("dns"),
            policy_uid: Uid("uid-dns".to_owned()),
            consumer: shop(name),
            consumer_uid: Uid(format!("uid-{name}")),
            interface: interface.clone(),
            ifindex: Some(7),
            token: Some(token()),
            state: State::Programmed,
            since: at(900),
            held_since: None,
            message: None,
        },
        refused: None,
        conflict: None,
        device: Some(link(&interface)),
        identity: IdentityFacts::Row(Some(identity(1))),
        expected: Some(Incarnation([1; 16])),
        supply: Supply::Ready,
        unreachable: None,
        attached: true,
        attach_trouble: None,
        foreign: Vec::new(),
        row: Some(Some(row(true))),
        destinations: 2,
        written: 2,
        open: 2,
        write_trouble: None,
        proof: ProofFacts::Good,
        times: Times {
            interface: Some(since(500, true)),
            identity: Some(since(600, false)),
            attach: Some(since(610, false)),
            position: Some(since(610, false)),
            row: Some(since(650, false)),
            entries: Some(since(640, false)),
        },
        beliefs: vec![Belief::Entries {
            ifindex: 7,
            entries: BTreeMap::from([(
                DNS,
                Entry {
                    policy: 4,
                    open: true,
                },
            )]),
        }],
    }
}

fn since(second: u64, earlier: bool) -> Since {
    Since {
        at: at(second),
        earlier,
    }
}

/// One that is held for this reason.
fn held(name: &str, reason: HoldReason) -> ConsumerFacts {
    let mut facts = served(name);
    facts.intent.state = State::Held(reason);
    facts.intent.held_since = Some(at(800));
    facts.row = Some(Some(row(false)));
    facts.proof = ProofFacts::None;
    facts
}

fn failed(name: &str, reason: FailReason) -> ConsumerFacts {
    let mut facts = held(name, HoldReason::IdentityMissing);
    facts.intent.state = State::Failed(reason);
    facts.intent.held_since = None;
    facts
}

/// Everything that can be missing, one each; and what the kernel shows where it is something else.
fn scenes() -> Vec<(ConsumerFacts, Seen)> {
    let there = |facts: &ConsumerFacts, change: &dyn Fn(&mut Link), read: RegistryRead| {
        let mut device = link(&facts.intent.interface);
        change(&mut device);
        Seen {
            devices: BTreeMap::from([(facts.intent.interface.clone(), Ok(Some((device, read))))]),
            audited: Audited::default(),
        }
    };
    let right = |facts: &ConsumerFacts| there(facts, &|_| {}, RegistryRead::Row(identity(1)));
    let differs = |facts: &ConsumerFacts, difference: Difference| {
        let mut seen = right(facts);
        seen.audited.differences.push(difference);
        seen
    };
    let mut scenes = Vec::new();
    let mut scene = |facts: ConsumerFacts, seen: Seen| scenes.push((facts, seen));

    let facts = served("served");
    scene(facts.clone(), right(&facts));
    let mut facts = failed("younger", FailReason::Conflict);
    facts.conflict =
        Some("10.96.0.10 UDP 53 of this consumer belongs to the older policy shop/names".to_owned());
    scene(facts.clone(), right(&facts));
    let mut facts = held("missing", HoldReason::InterfaceMissing);
    (facts.device, facts.intent.ifindex, facts.row) = (None, None, Some(None));
    (facts.attached, facts.written, facts.open) = (false, 0, 0);
    let seen = Seen {
        devices: BTreeMap::from([(facts.intent.interface.clone(), Ok(None))]),
        audited: Audited::default(),
    };
    scene(facts, seen);
    for (name, reason) in [
        ("down", HoldReason::InterfaceDown),
        ("silent", HoldReason::NoCarrier),
    ] {
        let mut facts = held(name, reason);
        let change = |link: &mut Link| match reason {
            HoldReason::InterfaceDown => link.up = false,
            _ => link.carrier = false,
        };
        facts.device.iter_mut().for_each(change);
        let seen = there(&facts, &change, RegistryRead::Row(identity(1)));
        scene(facts, seen);
    }
    let mut facts = held("nobody", HoldReason::IdentityMissing);
    facts.identity = IdentityFacts::Row(None);
    let seen = there(&facts, &|_| {}, RegistryRead::Absent);
    scene(facts, seen);
    let mut facts = held("other", HoldReason::IdentityMismatch);
    facts.identity = IdentityFacts::Row(Some(identity(2)));
    let seen = there(&facts, &|_| {}, RegistryRead::Row(identity(2)));
    scene(facts, seen);
    // A moment ago it was there: the agent is not told yet.
    let facts = served("vanishing");
    let seen = Seen {
        devices: BTreeMap::from([(facts.intent.interface.clone(), Ok(None))]),
        audited: Audited::default(),
    };
    scene(facts, seen);
    let mut facts = held("unserved", HoldReason::NoReadyProducer);
    facts.supply = Supply::Missing(None);
    scene(facts.clone(), right(&facts));
    let mut facts = failed("refused", FailReason::AttachFailed);
    facts.attach_trouble =
        Some("attaching to device 7: EPERM; the traffic of this interface takes the default path".to_owned());
    facts.attached = false;
    scene(facts.clone(), right(&facts));
    let mut facts = failed("behind", FailReason::ProofFailed);
    facts.foreign = vec!["program 99 (tcx)".to_owned()];
    scene(facts.clone(), right(&facts));
    let facts = served("tampered");
    let seen = differs(
        &facts,
        Difference::Entry {
            ifindex: 7,
            key: DNS,
            found: None,
        },
    );
    scene(facts, seen);
    let mut facts = failed("full", FailReason::MapFull);
    facts.write_trouble = Some("map services is full: 4 entries needed, 2 in all".to_owned());
    (facts.written, facts.open) = (0, 0);
    scene(facts.clone(), right(&facts));
    let mut facts = failed("unproven", FailReason::ProofFailed);
    facts.row = Some(Some(row(true)));
    facts.proof = ProofFacts::Failed(
        "asked for 10.96.0.10 UDP port 53, the program of device 7 answers Pass".to_owned(),
    );
    scene(facts.clone(), right(&facts));
    let facts = served("hanging");
    scene(facts, Seen::nothing("no answer of the kernel within 5s"));
    scenes
}

fn set(ready: u64) -> SetFacts {
    SetFacts {
        selected: 2,
        ready,
        producers: vec![
            ProducerFacts {
                name: shop("dns-1"),
                interface: "hfdns1".to_owned(),
                ready: false,
                hold: Some(HoldReason::IdentityMissing),
                why: None,
            },
            ProducerFacts {
                name: shop("dns-0"),
                interface: "hfdns0".to_owned(),
                ready: ready > 0,
                hold: None,
                why: (ready == 0).then(|| "the program is not attached yet".to_owned()),
            },
        ],
        current: true,
        serving: None,
        since_ms: Some(at(700).wall_ms),
        supplied: Some(since(690, false)),
        waiting: None,
        beliefs: Vec::new(),
    }
}

fn explain(facts: ConsumerFacts) -> Explained {
    Explained {
        policy: policies().remove(0),
        seen: since(450, false),
        waiting_for: Vec::new(),
        set: set(u64::from(facts.supply == Supply::Ready)),
        consumers: vec![facts],
        left_off: 0,
    }
}

/// What the driver says when it is asked.
pub(crate) fn explained(name: &ObjectName, asked: &Asked) -> Result<Box<Explained>, Unexplained> {
    let facts = match asked {
        _ if *name == shop("nobody") => {
            return Err(Unexplained::NoPolicy {
                policy: name.clone(),
                known: false,
            });
        }
        Asked::One(consumer) if consumer.name == "web-1" => held("web-1", HoldReason::InterfaceMissing),
        Asked::One(consumer) if consumer.name == "web-0" => served("web-0"),
        Asked::One(consumer) => return Err(Unexplained::NoConsumer(consumer.clone())),
        Asked::Worst(_) => held("web-1", HoldReason::InterfaceMissing),
    };
    Ok(Box::new(explain(facts)))
}

/// A kernel as the agent believes it, but for one interface that is missing.
pub(crate) struct Sight;

impl Look for Sight {
    fn audit(&self, _: &[Belief]) -> Audited {
        Audited::default()
    }

    fn device(&self, name: &str) -> std::io::Result<Option<Link>> {
        Ok((name != "hfweb-1").then(|| link(name)))
    }

    fn identity(&self, _: Ifindex) -> RegistryRead {
        RegistryRead::Row(identity(1))
    }
}

/// Every kind of answer: the JSON of all, then what people read.
pub(crate) fn why_answers() -> anyhow::Result<()> {
    let answers: Vec<Why> = scenes()
        .into_iter()
        .map(|(facts, seen)| Why::new(&explain(facts), &seen, &stamps(), at(1_000).wall_ms, true))
        .collect();
    golden("why.json", &pretty(&answers)?)?;
    let mut text = String::new();
    for (at, why) in answers.iter().enumerate() {
        if at > 0 {
            text.push('\n');
        }
        text.push_str(&cli::output::plain(&cli::why::text(why)));
    }
    golden("why.txt", &text)
}

/// What is compared when the driver is asked.
pub(crate) fn compared() -> Page {
    let row_at = |ifindex, wanted, believed: bool| Compared {
        thing: Thing::Row(ifindex),
        policy: None,
        interface: Some(format!("hfweb{ifindex}")),
        wanted: Value::Row(row(wanted)),
        believed: Some(Value::Row(row(believed))),
        look: Belief::Row {
            ifindex,
            row: Some(row(believed)),
        },
        looked: Value::Row(row(believed)),
    };
    let entry = Value::Entry(Entry {
        policy: 4,
        open: true,
    });
    Page {
        things: vec![
            row_at(7, true, true),
            row_at(8, true, false),
            Compared {
                thing: Thing::Entry(7, DNS),
                policy: Some(shop("dns")),
                interface: Some("hfweb7".to_owned()),
                wanted: entry.clone(),
                believed: Some(entry.clone()),
                look: Belief::Nothing {
                    links: Default::default(),
                },
                looked: entry,
            },
            Compared {
                thing: Thing::Program(8),
                policy: None,
                interface: None,
                wanted: Value::Program(Vec::new()),
                believed: None,
                look: Belief::Program {
                    ifindex: 8,
                    before: None,
                },
                looked: Value::Program(vec!["program 99 (tcx)".to_owned()]),
            },
        ],
        beside: vec![Belief::Nothing {
            links: Default::default(),
        }],
        next: None,
    }
}

pub(crate) fn diff_answers() -> anyhow::Result<()> {
    let seen = Seen {
        audited: Audited {
            differences: vec![
                Difference::Entry {
                    ifindex: 7,
                    key: DNS,
                    found: Some(Entry {
                        policy: 5,
                        open: true,
                    }),
                },
                Difference::Row {
                    ifindex: 70_000,
                    found: Some(row(true)),
                },
            ],
            unreadable: None,
        },
        devices: BTreeMap::new(),
    };
    let page = compared();
    let mut differing = Diff::new("2023-11-14T22:30:00.000Z".to_owned());
    differing.add(&page, &page, &seen, false);
    let mut all = Diff::new("2023-11-14T22:30:00.000Z".to_owned());
    all.add(&page, &page, &seen, true);
    let mut hanging = Diff::new("2023-11-14T22:30:00.000Z".to_owned());
    let right = Page {
        things: page.things.into_iter().take(1).collect(),
        ..Page::default()
    };
    hanging.add(
        &right,
        &right,
        &Seen::nothing("no answer of the kernel within 5s"),
        true,
    );
    let mut same = Diff::new("2023-11-14T22:30:00.000Z".to_owned());
    same.add(&right, &right, &Seen::default(), false);
    let answers = [&differing, &all, &hanging, &same];
    golden("diff.json", &pretty(&answers)?)?;
    let texts = answers.map(|diff| cli::output::plain(&cli::diff::text(diff)));
    golden("diff.txt", &texts.join("\n"))
}
