//! What people run: a resolver and its clients, a lot of bytes, connections that live long.

use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_tests::bulk::{self, Sink};
use holdfast_tests::counters::{self, Counters};
use holdfast_tests::lab::DNS;
use holdfast_tests::process::{self, Log, Running, confine};
use holdfast_tests::rtnl::Rtnl;
use holdfast_tests::traffic::Conversation;
use holdfast_tests::{EVENT_BUDGET, Lab, Space, offload, say, suite, until};
use rustix::process::Signal;

suite! {
    needs [Namespaces, Agent];
    a_resolver_serves_its_clients_until_a_hold_stops_it,
    f34_a_gigabyte_with_and_without_offloads,
    f34_segments_of_several_sizes,
    long_connections_outlive_the_agent,
    a_lost_segment_is_noticed,
}

/// The hold that ends each of these tests.
fn held(lab: &Lab) -> anyhow::Result<()> {
    lab.node.unregister("hfc0")?;
    lab.node.until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)
}

// --- a resolver ----------------------------------------------------------------------------------------------

/// A name, and what it leads to.
const NAME: &str = "shop.holdfast.test";
const NAMED: [(&str, &str); 2] = [("A", "192.0.2.53"), ("AAAA", "2001:db8::53")];
/// A name with a text that fits into no packet.
const LONG: &str = "long.holdfast.test";
/// Strings of that text. Each is as long as a string can be.
const STRINGS: usize = 12;
/// The exit code of `dig` when nobody answers.
const NO_ANSWER: i32 = 9;

/// dnsmasq in a producer's namespace, at these addresses. It has no upstream.
fn resolver(space: &Space, at: &[IpAddr]) -> anyhow::Result<(Running, Log)> {
    let mut command = Command::new(process::program("dnsmasq")?);
    command.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        "--pid-file=",
        "--user=root",
        "--log-facility=-",
        "--edns-packet-max=4096",
    ]);
    command.args(at.iter().map(|address| format!("--listen-address={address}")));
    command.args(NAMED.map(|(_, address)| format!("--address=/{NAME}/{address}")));
    let strings = vec!["x".repeat(255); STRINGS].join(",");
    command.arg(format!("--txt-record={LONG},{strings}"));
    confine(&mut command, space, None);
    let log = Log::default();
    Ok((Running::start(command, &log)?, log))
}

/// One question of a real client, asked once.
fn dig(space: &Space, server: IpAddr, words: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(process::program("dig")?);
    command
        .env_clear()
        .args(["-r", "+tries=1", "+time=1", &format!("@{server}")]);
    process::run(command.args(words), space)
}

/// The same, and the answer.
fn resolved(space: &Space, server: IpAddr, words: &[&str]) -> anyhow::Result<String> {
    let output = dig(space, server, words)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "dig @{server} {words:?}: {said}");
    Ok(said)
}

fn a_resolver_serves_its_clients_until_a_hold_stops_it() -> anyhow::Result<()> {
    let _ = process::program("dig")?;
    Lab::programmed()?.run(|lab| {
        lab.serving.clear();
        let servers = lab.services[0].addresses;
        let (_resolver, log) = resolver(lab.producers[0].space()?, &servers)?;
        until(5 * EVENT_BUDGET, "dnsmasq listens", || {
            let lines = log.lines();
            Ok(lines.iter().any(|line| line.contains("started")).then_some(()))
        })?;
        for consumer in [0, 1] {
            let space = lab.consumers[consumer].space()?;
            for server in servers {
                asked_in_every_way(space, server)
                    .with_context(|| format!("c{consumer} asks the resolver at {server}"))?;
            }
        }
        held(lab)?;
        for server in servers {
            for by in ["+notcp", "+tcp"] {
                let output = dig(lab.consumers[0].space()?, server, &[NAME, "A", by])?;
                ensure!(
                    output.status.code() == Some(NO_ANSWER),
                    "c0 is held, and dig {by} says: {}",
                    String::from_utf8_lossy(&output.stdout)
                );
            }
            asked_in_every_way(lab.consumers[1].space()?, server)?;
        }
        lab.consumers[0].register(&lab.node)?;
        asked_in_every_way(lab.consumers[0].space()?, servers[0])
    })
}

/// By UDP and TCP, an answer that is cut off and asked for again by TCP, and one in fragments.
fn asked_in_every_way(space: &Space, server: IpAddr) -> anyhow::Result<()> {
    for by in ["+notcp", "+tcp"] {
        for (kind, address) in NAMED {
            let said = resolved(space, server, &["+short", by, NAME, kind])?;
            ensure!(said.trim() == address, "{NAME} {kind} {by}: {said}");
        }
    }
    let whole = |said: &str| said.matches(&"x".repeat(255)).count() == STRINGS;
    let said = resolved(space, server, &["+bufsize=1232", LONG, "TXT"])?;
    ensure!(said.contains("retrying in TCP mode"), "not cut off: {said}");
    ensure!(whole(&said), "after TCP: {said}");
    let said = resolved(
        space,
        server,
        &["+notcp", "+ignore", "+bufsize=4096", LONG, "TXT"],
    )?;
    ensure!(whole(&said) && said.contains("(UDP)"), "in fragments: {said}");
    Ok(())
}

// --- F34 -----------------------------------------------------------------------------------------------------

/// What is sent each way.
const BYTES: u64 = 1_000_000_000;
/// In so many turns with and without offloads: the machine is shared.
const TURNS: u64 = 4;

/// A sink at a service instead of the usual producer, and both namespaces.
fn sink(lab: &mut Lab) -> anyhow::Result<(Vec<Sink>, [Space; 2])> {
    lab.serving.clear();
    let spaces = [
        lab.consumers[0].space()?.clone(),
        lab.producers[0].space()?.clone(),
    ];
    let sinks = lab.services[0].both().map(|at| Sink::listen(&spaces[1], at));
    Ok((sinks.into_iter().collect::<anyhow::Result<_>>()?, spaces))
}

/// Both ends of both veths.
fn devices<'a>(lab: &'a Lab, [consumer, producer]: &'a [Space; 2]) -> [(&'a Space, &'static str); 4] {
    let node = lab.node.space();
    [
        (consumer, "eth0"),
        (node, "hfc0"),
        (producer, "eth0"),
        (node, "hfp0"),
    ]
}

fn count(spaces: &[Space; 2]) -> anyhow::Result<[Counters; 2]> {
    Ok([Counters::read(&spaces[0])?, Counters::read(&spaces[1])?])
}

fn segments_sent(counters: &Counters) -> u64 {
    counters.get("Tcp.OutSegs") + counters.get("Tcp.RetransSegs")
}

/// `Tcp.InSegs` counts what was not segmented yet as one; these count its segments (`ip_rcv_core`, `ip6_rcv_core`).
/// Of IPv6, the kernels of both ends tell each other of their groups and routers now and then.
fn segments_come(counters: &Counters, by_v4: bool) -> u64 {
    if by_v4 {
        counters.get("IpExt.InNoECTPkts")
    } else {
        counters
            .get("Ip6InNoECTPkts")
            .saturating_sub(counters.get("Ip6InMcastPkts"))
    }
}

/// Since then, every segment that one end sent has come to the other, and none had a wrong checksum.
fn all_came(spaces: &[Space; 2], before: &[Counters; 2], by_v4: bool) -> anyhow::Result<()> {
    let mut said = String::new();
    let grown = || -> anyhow::Result<[Counters; 2]> {
        let [consumer, producer] = count(spaces)?;
        Ok([consumer.since(&before[0]), producer.since(&before[1])])
    };
    let equal = until(EVENT_BUDGET, "every segment has come", || {
        let both = grown()?;
        let sent = both.each_ref().map(segments_sent);
        let came = both.each_ref().map(|of| segments_come(of, by_v4));
        said = format!("sent {sent:?}, came to the other end {came:?}");
        Ok((sent[0] == came[1] && sent[1] == came[0]).then_some(()))
    });
    equal.context(said)?;
    for counters in &grown()? {
        let wrong: Vec<_> = ["Csum", "InErr", "HdrErr"]
            .into_iter()
            .flat_map(|part| counters.named(part))
            .collect();
        ensure!(wrong.is_empty(), "packets were refused: {wrong:?}");
        // Whoever does not get the CPU in time sends again what has come long since: no loss, but worth a line.
        let again: Vec<_> = ["RetransSegs", "TCPTimeouts", "TCPLostRetransmit"]
            .into_iter()
            .flat_map(|part| counters.named(part))
            .collect();
        if !again.is_empty() {
            say(format_args!("sent twice without need: {again:?}"));
        }
    }
    Ok(())
}

/// A transfer, and the mean size of the packets that the consumer's own device sent for it.
fn transfer(spaces: &[Space; 2], to: SocketAddr, bytes: u64) -> anyhow::Result<(Duration, u64)> {
    let before = counters::sent_by(&spaces[0], "eth0")?;
    let took = bulk::send(&spaces[0], to, bytes)?;
    let after = counters::sent_by(&spaces[0], "eth0")?;
    let size = (after.1 - before.1) / (after.0 - before.0).max(1);
    Ok((took, size))
}

/// The usual scene with an audit every second, of which traffic must not notice anything.
fn audited() -> anyhow::Result<Lab> {
    Lab::new()?.set_up(|lab| lab.program(&[("HOLDFAST_AUDIT_INTERVAL", "1s")]))
}

/// F34 counts segments. It is run with audits that hold for 20 ms whatever they look at, and must fail.
fn a_lost_segment_is_noticed() -> anyhow::Result<()> {
    suite::each_fails(&[("f34_a_gigabyte_with_and_without_offloads", "audits-hold")])
}

fn f34_a_gigabyte_with_and_without_offloads() -> anyhow::Result<()> {
    audited()?.run(|lab| {
        let (_sinks, spaces) = sink(lab)?;
        for to in lab.services[0].both() {
            let before = count(&spaces)?;
            let mut took = [Duration::ZERO; 2];
            let mut sizes = [0; 2];
            for turn in 0..2 * TURNS {
                let on = turn % 2 == 0;
                for (space, device) in devices(lab, &spaces) {
                    offload::switch(space, device, on)?;
                }
                let (time, size) = transfer(&spaces, to, BYTES / TURNS)
                    .with_context(|| format!("to {to}, offloads on: {on}"))?;
                took[usize::from(!on)] += time;
                sizes[usize::from(!on)] = size;
            }
            all_came(&spaces, &before, to.is_ipv4())?;
            let rate = |time: Duration| BYTES as f64 / 1e6 / time.as_secs_f64();
            say(format_args!(
                "1 GB to {to}: {:.0} MB/s with offloads (packets of {} bytes), {:.0} MB/s without ({} bytes)",
                rate(took[0]),
                sizes[0],
                rate(took[1]),
                sizes[1],
            ));
            ensure!(
                sizes[0] > 3_000 && sizes[1] <= 1_514,
                "offloads were not switched: {sizes:?}"
            );
            ensure!(took[0] <= took[1], "slower with offloads than without");
        }
        ensure!(lab.node.verdict(DNS)? == "Programmed");
        held(lab)?;
        lab.not_served(0, 0)
    })
}

/// MTU of the consumer and of the producer: the smaller one says how large a segment is.
const MTUS: [[u32; 2]; 5] = [
    [1_280, 1_280],
    [1_500, 1_500],
    [9_000, 9_000],
    [9_000, 1_500],
    [1_280, 9_000],
];
/// What is sent for each.
const SOME: u64 = 20_000_000;

fn f34_segments_of_several_sizes() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        let (_sinks, spaces) = sink(lab)?;
        for mtus in MTUS {
            for (mtu, workload, space) in [
                (mtus[0], &lab.consumers[0], &spaces[0]),
                (mtus[1], &lab.producers[0], &spaces[1]),
            ] {
                lab.node.rtnl.set_mtu(&workload.interface, mtu)?;
                Rtnl::open(space)?.set_mtu("eth0", mtu)?;
            }
            for to in lab.services[0].both() {
                for on in [true, false] {
                    let before = count(&spaces)?;
                    for (space, device) in devices(lab, &spaces) {
                        offload::switch(space, device, on)?;
                    }
                    let (_, size) = transfer(&spaces, to, SOME)
                        .and_then(|done| all_came(&spaces, &before, to.is_ipv4()).map(|()| done))
                        .with_context(|| format!("to {to}, MTUs {mtus:?}, offloads on: {on}"))?;
                    let largest = u64::from(mtus[0].min(mtus[1])) + 14;
                    ensure!(
                        on || (largest / 2..=largest).contains(&size),
                        "MTUs {mtus:?}, and packets of {size} bytes"
                    );
                }
            }
        }
        ensure!(lab.node.verdict(DNS)? == "Programmed");
        held(lab)?;
        lab.not_served(0, 0)
    })
}

// --- long connections ------------------------------------------------------------------------------------------

/// Answers that must come before something else happens.
const ANSWERS: u64 = 200;
const SOON: Duration = Duration::from_secs(5);

fn long_connections_outlive_the_agent() -> anyhow::Result<()> {
    Lab::programmed()?.run(|lab| {
        let mut conversations = Vec::new();
        for consumer in [0, 1] {
            for to in lab.services[0].both() {
                let space = lab.consumers[consumer].space()?;
                conversations.push(Conversation::start(space, to)?);
            }
        }
        let all_go_on = |conversations: &[Conversation]| -> anyhow::Result<()> {
            let mut all = conversations.iter();
            all.try_for_each(|conversation| conversation.goes_on(ANSWERS, SOON))
        };
        all_go_on(&conversations)?;
        for signal in [Signal::KILL, Signal::TERM] {
            lab.node.end_agent(signal)?;
            all_go_on(&conversations).with_context(|| format!("after {signal:?}"))?;
            lab.node.start_agent()?;
            lab.until_programmed()?;
            all_go_on(&conversations).context("under the next agent")?;
        }
        for conversation in conversations {
            let answers = conversation.finish()?;
            ensure!(answers > 4 * ANSWERS, "only {answers} answers");
        }
        held(lab)?;
        lab.not_served(0, 0)
    })
}
