//! The monitor of links and addresses against the kernel, in network namespaces of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast::netlink::{LinkNews, Monitor, Options};
use holdfast_engine::model::{Ifindex, Link, LinkKind, Mac};
use holdfast_tests::rtnl::{End, Rtnl};
use holdfast_tests::{EVENT_BUDGET, Space, say, suite};
use tokio::runtime::{Builder, Runtime};

suite! {
    needs [Namespaces];
    a_link_is_followed_from_its_making_to_its_end,
    what_was_there_before_is_dumped,
    a_device_that_moves_away_is_gone,
    a_port_that_leaves_its_bridge_is_not_gone,
    a_recreated_device_is_another_one,
    an_identical_message_is_no_news,
    a_single_device_is_asked_for_without_a_dump,
    what_is_not_the_kernels_is_not_believed,
    an_overrun_is_mended_at_once_and_said_once,
    changes_without_end_end_right,
    addresses_are_followed,
    addresses_go_with_their_device,
    addresses_that_an_overrun_hid_are_found,
}

const X: End<'_> = End {
    name: "hfx",
    mac: Some([2, 0, 0, 0, 0, 1]),
    ifindex: 0,
    group: 0,
};
const PEER: End<'_> = End {
    name: "eth0",
    mac: None,
    ifindex: 0,
    group: 0,
};

/// A monitor on this thread, which only runs while it is waited for: a reader that pauses.
struct Watch {
    runtime: Runtime,
    monitor: Monitor,
    /// What the news make of the devices.
    links: BTreeMap<Ifindex, Link>,
    /// All of them that are about devices.
    news: Vec<LinkNews>,
    /// The node's own addresses, as they were told last.
    locals: Option<BTreeSet<IpAddr>>,
}

impl Watch {
    fn start(options: Options) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let monitor = runtime.block_on(async { Monitor::start(options) })?;
        Ok(Self {
            runtime,
            monitor,
            links: BTreeMap::new(),
            news: Vec::new(),
            locals: None,
        })
    }

    /// Takes the next news, if any come within this time.
    fn next(&mut self, patience: Duration) -> anyhow::Result<bool> {
        let next = self.runtime.block_on(async {
            // Timers belong to the runtime: made within it.
            tokio::time::timeout(patience, self.monitor.news.recv()).await
        });
        let Ok(news) = next else { return Ok(false) };
        let news = news.context("the monitor has ended")?;
        match &news {
            LinkNews::Dump(links) => {
                self.links = links.iter().map(|link| (link.ifindex, link.clone())).collect();
            }
            LinkNews::Present(link) => _ = self.links.insert(link.ifindex, link.clone()),
            LinkNews::Gone(ifindex) => _ = self.links.remove(ifindex),
            LinkNews::Locals(addresses) => {
                self.locals = Some(addresses.clone());
                return Ok(true);
            }
            LinkNews::Drifted(_) => {}
        }
        self.news.push(news);
        Ok(true)
    }

    fn until(&mut self, what: &str, mut met: impl FnMut(&Self) -> bool) -> anyhow::Result<()> {
        let end = Instant::now() + EVENT_BUDGET;
        while !met(self) {
            let left = end.saturating_duration_since(Instant::now());
            ensure!(
                self.next(left)?,
                "not within {EVENT_BUDGET:?}: {what}; known: {:?}, {:?}",
                self.links,
                self.locals
            );
        }
        Ok(())
    }

    /// Takes all that still comes: nothing for a while.
    fn settle(&mut self) -> anyhow::Result<()> {
        while self.next(Duration::from_millis(100))? {}
        Ok(())
    }

    /// These are the node's own addresses beside the loopback ones, and no others.
    fn until_locals(&mut self, what: &str, addresses: &[&str]) -> anyhow::Result<()> {
        let wanted: BTreeSet<IpAddr> = ["127.0.0.1", "::1"]
            .iter()
            .chain(addresses)
            .map(|address| address.parse())
            .collect::<Result<_, _>>()?;
        self.until(what, |watch| watch.locals.as_ref() == Some(&wanted))
    }

    fn named(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }
}

/// A namespace, a socket to its devices, and one to move ends of veths to.
fn scene(test: impl FnOnce(&mut Rtnl, &Space) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    let (here, elsewhere) = (Space::network()?, Space::network()?);
    // A lost carrier is told at once only of devices that sit on another one, which the kernel sees by the two numbers
    // (`linkwatch_urgent_event`); of a veth whose ends happen to have the same number it tells up to a second later.
    Rtnl::open(&elsewhere)?.simple("hfpad", "bridge")?;
    let mut rtnl = Rtnl::open(&here)?;
    here.inside(|| test(&mut rtnl, &elsewhere))
}

fn small() -> Options {
    Options {
        // Less than the kernel allows: it takes its minimum.
        receive_buffer: 1,
        ..Options::default()
    }
}

fn a_link_is_followed_from_its_making_to_its_end() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        let mut watch = Watch::start(Options::default())?;
        watch.until("the first dump", |watch| watch.named("lo").is_some())?;
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        watch.until("made", |watch| watch.named("hfx").is_some())?;
        let made = watch.named("hfx").context("x")?.clone();
        let peer_elsewhere = true;
        ensure!(
            made == Link {
                ifindex: rtnl.ifindex("hfx")?,
                name: "hfx".into(),
                mac: Mac([2, 0, 0, 0, 0, 1]),
                up: false,
                carrier: false,
                kind: LinkKind::Veth { peer_elsewhere },
                master: None,
                mtu: 1500,
                ipv6: true,
            },
            "{made:?}"
        );
        let is = |up, carrier| {
            move |watch: &Watch| {
                watch
                    .named("hfx")
                    .is_some_and(|x| (x.up, x.carrier) == (up, carrier))
            }
        };
        let mut there = Rtnl::open(elsewhere)?;
        rtnl.up("hfx")?;
        watch.until("up without carrier", is(true, false))?;
        there.up("eth0")?;
        watch.until("carrier", is(true, true))?;
        there.down("eth0")?;
        watch.until("carrier lost", is(true, false))?;
        there.up("eth0")?;
        watch.until("carrier again", is(true, true))?;
        rtnl.down("hfx")?;
        watch.until("down", |watch| watch.named("hfx").is_some_and(|x| !x.up))?;

        rtnl.set_mac("hfx", [2, 0, 0, 0, 0, 9])?;
        watch.until("another address", |watch| {
            watch
                .named("hfx")
                .is_some_and(|x| x.mac == Mac([2, 0, 0, 0, 0, 9]))
        })?;
        rtnl.rename("hfx", "hfy")?;
        watch.until("renamed", |watch| {
            watch.named("hfx").is_none() && watch.named("hfy").is_some_and(|y| y.ifindex == made.ifindex)
        })?;
        rtnl.delete("hfy")?;
        watch.until("deleted", |watch| !watch.links.contains_key(&made.ifindex))?;
        ensure!(watch.monitor.counters.overruns() + watch.monitor.counters.resyncs() == 0);
        Ok(())
    })
}

fn what_was_there_before_is_dumped() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        rtnl.simple("hfbr", "bridge")?;
        let bridge = rtnl.ifindex("hfbr")?;
        rtnl.set_master("hfx", bridge)?;
        let mut watch = Watch::start(Options::default())?;
        ensure!(watch.next(EVENT_BUDGET)?);
        ensure!(matches!(&watch.news[..], [LinkNews::Dump(links)] if links.len() == 3));
        let x = watch.named("hfx").context("x")?;
        let peer_elsewhere = true;
        ensure!(x.kind == LinkKind::Veth { peer_elsewhere } && x.master == Some(bridge));
        Ok(())
    })
}

fn a_device_that_moves_away_is_gone() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, None)?;
        let ifindex = rtnl.ifindex("hfx")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some())?;
        let kind = watch.named("hfx").context("x")?.kind;
        let peer_elsewhere = false;
        ensure!(
            kind == LinkKind::Veth { peer_elsewhere },
            "both ends are here: {kind:?}"
        );
        rtnl.move_to("hfx", elsewhere.net())?;
        watch.until("moved", |watch| !watch.links.contains_key(&ifindex))?;
        Rtnl::open(elsewhere)?.delete("hfx")
    })
}

fn a_port_that_leaves_its_bridge_is_not_gone() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        rtnl.simple("hfbr", "bridge")?;
        let ifindex = rtnl.ifindex("hfx")?;
        let bridge = rtnl.ifindex("hfbr")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some())?;
        rtnl.set_master("hfx", bridge)?;
        watch.until("a port", |watch| watch.links[&ifindex].master == Some(bridge))?;
        rtnl.set_master("hfx", 0)?;
        watch.until("no port", |watch| watch.links[&ifindex].master.is_none())?;
        watch.settle()?;
        ensure!(!watch.news.contains(&LinkNews::Gone(ifindex)), "{:?}", watch.news);
        Ok(())
    })
}

/// Also for a reader that pauses in between, and although number, name and address are the same.
fn a_recreated_device_is_another_one() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        let ifindex = rtnl.ifindex("hfx")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some())?;
        let before = watch.links[&ifindex].clone();
        watch.news.clear();
        rtnl.delete("hfx")?;
        rtnl.veth(End { ifindex, ..X }, PEER, Some(elsewhere.net()))?;
        watch.until(
            "there again",
            |watch| matches!(watch.news.last(), Some(LinkNews::Present(link)) if link.ifindex == ifindex),
        )?;
        let gone = watch
            .news
            .iter()
            .position(|news| *news == LinkNews::Gone(ifindex));
        ensure!(gone.is_some(), "never said to be gone: {:?}", watch.news);
        let after = &watch.links[&ifindex];
        ensure!((&before.name, before.mac) == (&after.name, after.mac));
        Ok(())
    })
}

fn an_identical_message_is_no_news() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        rtnl.up("hfx")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some_and(|x| x.up))?;
        watch.settle()?;
        watch.news.clear();
        for _ in 0..100 {
            // Each of these is a notification, and none changes anything that we look at.
            rtnl.set_alias("hfx", "a")?;
            rtnl.set_alias("hfx", "b")?;
        }
        watch.settle()?;
        ensure!(watch.news.is_empty(), "{:?}", watch.news);
        rtnl.down("hfx")?;
        watch.until("down", |watch| watch.named("hfx").is_some_and(|x| !x.up))
    })
}

fn a_single_device_is_asked_for_without_a_dump() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        let ifindex = rtnl.ifindex("hfx")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some())?;
        watch.settle()?;
        watch.news.clear();
        watch.monitor.asker.ask(ifindex);
        watch.monitor.asker.ask(ifindex + 1000);
        watch.until("both answers", |watch| watch.news.len() == 2)?;
        let x = watch.links[&ifindex].clone();
        let (there, gone) = (LinkNews::Present(x), LinkNews::Gone(ifindex + 1000));
        ensure!(watch.news == [there, gone], "{:?}", watch.news);
        ensure!(watch.monitor.counters.resyncs() == 0);
        Ok(())
    })
}

/// Anybody with rights in the namespace may send a datagram to the monitor's socket.
fn what_is_not_the_kernels_is_not_believed() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        let ifindex = rtnl.ifindex("hfx")?;
        let mut watch = Watch::start(Options::default())?;
        watch.until("there", |watch| watch.named("hfx").is_some())?;
        watch.settle()?;
        watch.news.clear();
        for port in subscribers()? {
            rtnl.forge_end_of(ifindex, port)?;
        }
        watch.settle()?;
        ensure!(watch.news.is_empty(), "{:?}", watch.news);
        rtnl.up("hfx")?;
        watch.until("up", |watch| watch.named("hfx").is_some_and(|x| x.up))?;
        ensure!(watch.monitor.counters.resyncs() == 0);
        Ok(())
    })
}

/// Ports of the sockets of this namespace that hear of links and addresses.
fn subscribers() -> anyhow::Result<Vec<u32>> {
    let table = std::fs::read_to_string("/proc/thread-self/net/netlink")?;
    let ports: Vec<u32> = table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR.
            let [_, "0", port, "00000111", ..] = fields.as_slice() else {
                return None;
            };
            port.parse().ok()
        })
        .collect();
    ensure!(!ports.is_empty(), "the monitor's socket is not in {table}");
    Ok(ports)
}

/// Links that come and go while the reader pauses.
const STORM: usize = 5_000;
const GROUP: u32 = 4711;

/// Both ends here, and both in the group, so that they go with it.
fn in_group(rtnl: &mut Rtnl, n: usize) -> anyhow::Result<()> {
    let (a, b) = (format!("hfa{n}"), format!("hfb{n}"));
    let end = |name| End {
        name,
        group: GROUP,
        ..End::default()
    };
    rtnl.veth(end(&a), end(&b), None)
}

fn an_overrun_is_mended_at_once_and_said_once() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        let mut watch = Watch::start(small())?;
        watch.until("the first dump", |watch| watch.named("hfx").is_some())?;

        // The reader pauses: it runs only within `until`.
        let storm = |rtnl: &mut Rtnl, from: usize, to: usize| (from..to).try_for_each(|n| in_group(rtnl, n));
        storm(rtnl, 0, STORM / 4)?;
        rtnl.delete("hfx")?;
        rtnl.veth(
            End {
                mac: Some([2, 0, 0, 0, 0, 2]),
                ..X
            },
            PEER,
            Some(elsewhere.net()),
        )?;
        storm(rtnl, STORM / 4, STORM / 2)?;
        ensure!(watch.monitor.counters.overruns() == 0, "the reader did not pause");

        let resumed = Instant::now();
        watch.until("a full dump", |watch| watch.links.len() == STORM + 2)?;
        let counters = &watch.monitor.counters;
        say(format_args!(
            "{} links complete {:?} after the reader resumed; {} overruns, {} dumps more, {} bursts",
            watch.links.len(),
            resumed.elapsed(),
            counters.overruns(),
            counters.resyncs(),
            counters.bursts()
        ));
        ensure!(counters.overruns() >= 1 && counters.resyncs() >= 1 && counters.bursts() == 1);
        let x = watch.named("hfx").context("x")?;
        ensure!(
            x.ifindex == rtnl.ifindex("hfx")? && x.mac == Mac([2, 0, 0, 0, 0, 2]),
            "{x:?}"
        );

        // The same on the way back.
        rtnl.delete_group(GROUP)?;
        watch.until("all gone", |watch| watch.links.len() == 2)?;
        ensure!(watch.named("hfx").is_some());

        // And it is alive.
        rtnl.up("hfx")?;
        watch.until("up", |watch| watch.named("hfx").is_some_and(|x| x.up))?;
        ensure!(watch.monitor.counters.bursts() <= 2);
        Ok(())
    })
}

/// Overruns again and again, also while a dump is under way: it must neither starve nor stay wrong.
fn changes_without_end_end_right() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        rtnl.veth(X, PEER, Some(elsewhere.net()))?;
        for n in 0..250 {
            in_group(rtnl, n)?;
        }
        let mut watch = Watch::start(small())?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let churn = scope.spawn(|| {
                let mut changes = 0;
                while !stop.load(Ordering::Relaxed) {
                    let name = format!("hfa{}", changes % 250);
                    rtnl.set_alias(&name, "a")?;
                    rtnl.up(&name)?;
                    rtnl.down(&name)?;
                    changes += 3;
                }
                rtnl.up("hfx")?;
                anyhow::Ok(changes)
            });
            let end = Instant::now() + Duration::from_secs(2);
            while Instant::now() < end {
                watch.next(Duration::from_millis(10))?;
            }
            stop.store(true, Ordering::Relaxed);
            let changes = churn
                .join()
                .map_err(|_| anyhow::anyhow!("the churn panicked"))??;
            watch.until("the last change", |watch| {
                watch.named("hfx").is_some_and(|x| x.up)
            })?;
            watch.settle()?;
            let counters = &watch.monitor.counters;
            say(format_args!(
                "{changes} changes in 2 s: {} overruns, {} dumps more, {} bursts",
                counters.overruns(),
                counters.resyncs(),
                counters.bursts()
            ));
            ensure!(counters.resyncs() <= 40, "too many dumps");
            ensure!(counters.bursts() <= 2, "said too often");
            let down = watch
                .links
                .values()
                .filter(|link| link.name.starts_with("hfa"))
                .all(|link| !link.up);
            ensure!(down && watch.links.len() == 502, "not what is there");
            Ok(())
        })
    })
}

fn addresses_are_followed() -> anyhow::Result<()> {
    scene(|rtnl, _| {
        rtnl.simple("hfbr", "bridge")?;
        rtnl.address("hfbr", "10.7.0.1".parse()?, 24)?;
        let mut watch = Watch::start(Options::default())?;
        watch.until_locals("those that were there before", &["10.7.0.1"])?;

        rtnl.up("hfbr")?;
        // No duplicate address check ends while there is no carrier: it stays tentative.
        rtnl.tentative_address("hfbr", "fd07::1".parse()?, 64)?;
        rtnl.address("hfbr", "10.7.0.2".parse()?, 32)?;
        let more = ["10.7.0.1", "10.7.0.2", "fd07::1"];
        watch.until_locals("new ones of both families, tentative too", &more)?;

        // One address, two networks: the first that goes changes nothing.
        rtnl.address("hfbr", "10.7.0.1".parse()?, 16)?;
        rtnl.delete_address("hfbr", "10.7.0.1".parse()?, 24)?;
        rtnl.delete_address("hfbr", "fd07::1".parse()?, 64)?;
        watch.until_locals("one gone", &["10.7.0.1", "10.7.0.2"])?;
        rtnl.delete_address("hfbr", "10.7.0.1".parse()?, 16)?;
        watch.until_locals("the other gone", &["10.7.0.2"])?;
        ensure!(watch.monitor.counters.overruns() + watch.monitor.counters.resyncs() == 0);
        Ok(())
    })
}

fn addresses_go_with_their_device() -> anyhow::Result<()> {
    scene(|rtnl, elsewhere| {
        for name in ["hfdead", "hfmoved"] {
            rtnl.veth(
                End {
                    name,
                    ..End::default()
                },
                PEER,
                Some(elsewhere.net()),
            )?;
            Rtnl::open(elsewhere)?.rename("eth0", &format!("{name}p"))?;
        }
        rtnl.address("hfdead", "10.7.0.1".parse()?, 24)?;
        rtnl.address("hfdead", "fd07::1".parse()?, 64)?;
        rtnl.address("hfmoved", "10.7.0.1".parse()?, 24)?;
        rtnl.address("hfmoved", "10.8.0.1".parse()?, 24)?;
        rtnl.address("hfmoved", "fd08::1".parse()?, 64)?;
        let mut watch = Watch::start(Options::default())?;
        watch.until_locals("there", &["10.7.0.1", "10.8.0.1", "fd07::1", "fd08::1"])?;
        rtnl.delete("hfdead")?;
        watch.until_locals("a device is deleted", &["10.7.0.1", "10.8.0.1", "fd08::1"])?;
        rtnl.move_to("hfmoved", elsewhere.net())?;
        watch.until_locals("a device is moved away", &[])
    })
}

fn addresses_that_an_overrun_hid_are_found() -> anyhow::Result<()> {
    scene(|rtnl, _| {
        rtnl.simple("hfbr", "bridge")?;
        rtnl.address("hfbr", "10.7.0.1".parse()?, 24)?;
        // A device that is down changes its alias silently.
        rtnl.up("hfbr")?;
        let mut watch = Watch::start(small())?;
        watch.until_locals("there", &["10.7.0.1"])?;
        // The reader pauses.
        rtnl.delete_address("hfbr", "10.7.0.1".parse()?, 24)?;
        for n in 0..STORM / 4 {
            rtnl.set_alias("hfbr", if n % 2 == 0 { "a" } else { "b" })?;
        }
        rtnl.address("hfbr", "10.7.0.2".parse()?, 24)?;
        watch.until_locals("after the overrun", &["10.7.0.2"])?;
        ensure!(watch.monitor.counters.overruns() >= 1, "there was no overrun");
        Ok(())
    })
}
