//! The story on one node, a network namespace.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use holdfast_tests::guest::Frames;
use holdfast_tests::lab::{PATIENCE, Service};
use holdfast_tests::node::EVENT_BUDGET;
use holdfast_tests::objects::Policy;
use holdfast_tests::traffic::{Flow, Producer, ask, ask_tcp};
use holdfast_tests::workload::Link;
use holdfast_tests::{Node, Reason, Workload, floor, until};
use rustix::process::Signal;

use crate::telling::{Telling, indent, say};

/// The policy of the story.
const POLICY: &str = "dns";
/// How many packets a second keep flowing while things happen.
const RATE: u64 = 2_000;
/// How long an instance is away between delete and recreate.
const AWAY: Duration = Duration::from_millis(200);

/// Tells it, and leaves nothing behind.
pub(crate) fn tell() -> anyhow::Result<()> {
    Story::begin().and_then(Story::tell)?;
    println!("\nThat is the main job. Everything that was made for this is gone again.");
    Ok(())
}

/// Who is on stage.
struct Story {
    node: Node,
    service: Service,
    web: Workload,
    shop: Workload,
    vm: Workload,
    dns: Workload,
    dns_too: Workload,
    dns_next: Workload,
    telling: Telling,
}

impl Story {
    fn begin() -> anyhow::Result<Self> {
        let service = Service::new(10, 53);
        let consumer = |name, number| Workload::new(name, number, &[("role", "asks")], &[]);
        let producer = |name, number, app| Workload::new(name, number, &[("app", app)], &service.addresses);
        Ok(Self {
            node: Node::new().context("cannot make a network namespace to play in: are you root?")?,
            service,
            web: consumer("web", 11),
            shop: consumer("shop", 12),
            vm: consumer("vm", 13).linked(Link::Tap(Frames::Whole)),
            dns: producer("dns", 21, "dns"),
            dns_too: producer("dns-too", 23, "dns"),
            dns_next: producer("dns-next", 22, "dns-next"),
            telling: Telling::default(),
        })
    }

    fn tell(mut self) -> anyhow::Result<()> {
        println!(
            "\
On stage: one node (a network namespace of its own) with the real holdfast agent, which has just the capabilities BPF,
NET_ADMIN and PERFMON. Two consumers, `web` and `shop`, want to ask the name service {} port {}; a virtual machine joins them
later. The producer `dns` can serve it now, `dns-too` and `dns-next` later. A policy says who may ask whom:

{}",
            self.service.addresses[0],
            self.service.port,
            indent(&self.policy("dns").to_string()),
        );
        self.neighbours_are_served()?;
        self.policy_before_interface()?;
        self.interface_before_identity()?;
        self.identity_is_registered()?;
        self.redeployed_under_its_own_name()?;
        self.second_producer_comes_and_first_goes()?;
        self.producer_is_switched()?;
        self.virtual_machine_asks()?;
        self.agent_is_killed()?;
        self.what_it_tells()
    }

    fn neighbours_are_served(&mut self) -> anyhow::Result<()> {
        self.telling.title(
            "The node starts. `shop`, `dns` and `dns-next` are there; `web` is not, but its objects are.",
        );
        for workload in [&self.web, &self.shop, &self.dns, &self.dns_next] {
            self.node.put_attachment(&workload.attachment())?;
        }
        self.node.put_policy(&self.policy("dns"))?;
        for workload in [&mut self.shop, &mut self.dns, &mut self.dns_next] {
            workload.create(&mut self.node)?;
        }
        self.node.start_agent()?;
        for workload in [&self.shop, &self.dns, &self.dns_next] {
            workload.register(&self.node)?;
        }
        Ok(())
    }

    fn policy_before_interface(&mut self) -> anyhow::Result<()> {
        self.wait_for("Held(InterfaceMissing)")?;
        say("\
`web` has a policy but no interface. That is not an error, and it is not a success either: it is HELD, with a reason. Its
neighbour `shop` does not wait for it.");
        self.status()
    }

    fn interface_before_identity(&mut self) -> anyhow::Result<()> {
        self.telling.title("The interface of `web` comes up.");
        self.web.create(&mut self.node)?;
        self.wait_for("Held(IdentityMissing)")?;
        say("\
An interface is only a name. Nobody has said yet which incarnation of `web` stands behind it, so it stays held; what it sends
to the claimed address is dropped and counted, and does not leak to the default route.");
        self.status()
    }

    fn identity_is_registered(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("The CNI registers the identity: `holdfast attachment register --interface hfweb`.");
        let _producer = self.serve(1, 0)?;
        let before = self.ready_to_programmed()?;
        self.web.register(&self.node)?;
        let answered = self.ask_once(&self.web)?;
        self.wait_for("Programmed")?;
        let after = self.ready_to_programmed()?;
        let microseconds = (after.1 - before.1) / (after.0 - before.0) * 1e6;
        let bare = floor::event_to_write()?.as_secs_f64() * 1e6;
        say(&format!(
            "\
PROGRAMMED, {microseconds:.0} us after it was ready (the bare floor on this machine, right now: {bare:.0} us from a netlink event to one
map write). Before that write the kernel ran the very program that this interface holds on a synthetic packet, and it gave
the right verdict. The first question after the command returned was answered by producer {answered}."
        ));
        self.tcp_too()?;
        self.status()
    }

    fn redeployed_under_its_own_name(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("`web` is deleted and recreated under its own name, while `shop` keeps asking.");
        let producer = self.serve(1, 0)?;
        let flow = self.flow(&self.shop, &producer)?;
        flow.flows(100, EVENT_BUDGET)?;
        self.web.delete(&mut self.node)?;
        self.wait_for("Held(InterfaceMissing)")?;
        println!("  deleted:    Held(InterfaceMissing)");
        pause(AWAY);
        self.web.create(&mut self.node)?;
        self.wait_for("Held(IdentityMissing)")?;
        println!(
            "  recreated:  Held(IdentityMissing): same name, but nobody vouches for the new incarnation"
        );
        self.web.register(&self.node)?;
        let answered = self.ask_once(&self.web)?;
        self.wait_for("Programmed")?;
        println!("  registered: Programmed; its first question was answered by producer {answered}");
        let tally = flow.finish(Some(&producer))?;
        println!("  meanwhile `shop`: {tally}");
        tally.perfect()?;
        let errors = self.node.error_lines();
        ensure!(errors.is_empty(), "the agent logged errors: {errors:?}");
        println!("  lines at error level in the agent's log: 0");
        Ok(())
    }

    fn second_producer_comes_and_first_goes(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("A second producer comes, `dns-too` with the same labels as `dns`; then `dns` goes.");
        let first = self.serve(1, 0)?;
        let early = self.flow(&self.shop, &first)?;
        early.flows(100, EVENT_BUDGET)?;
        self.node.put_attachment(&self.dns_too.attachment())?;
        self.dns_too.create(&mut self.node)?;
        let second = Producer::serve(self.dns_too.space()?, 3, &self.service.both())?;
        self.dns_too.register(&self.node)?;
        until(EVENT_BUDGET, "both are asked", || {
            let asked = self.asked(20)?;
            Ok((asked[0] > 0 && asked[1] > 0).then_some(()))
        })?;
        let [by_first, by_second] = self.asked(40)?;
        println!("  40 new questions: {by_first} answered by `dns`, {by_second} by `dns-too`");
        let tally = early.finish(Some(&first))?;
        println!("  the conversation that `shop` had with `dns` did not move: {tally}");
        tally.perfect()?;
        // One that has found its way to the second.
        let stays = self.flow_to(&second)?;
        self.dns.delete(&mut self.node)?;
        until(EVENT_BUDGET, "only the second is asked", || {
            Ok((self.asked(10)? == [0, 10]).then_some(()))
        })?;
        self.wait_for("Programmed")?;
        let [by_first, by_second] = self.asked(40)?;
        println!("  `dns` is gone. 40 new questions: {by_first} answered by `dns`, {by_second} by `dns-too`");
        let tally = stays.finish(Some(&second))?;
        println!("  a conversation with `dns-too` over all of that: {tally}");
        tally.perfect()?;
        self.status()
    }

    fn virtual_machine_asks(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("A virtual machine comes: `vm`, behind a tap instead of a veth.");
        self.node.put_attachment(&self.vm.attachment())?;
        match self.vm.create(&mut self.node) {
            Err(error) if error.is::<Reason>() => {
                println!("  left out: {error}");
                return self.node.remove_file("attachment-vm.yaml");
            }
            created => created?,
        }
        let _producer = self.serve(2, 1)?;
        self.wait_for("Held(IdentityMissing)")?;
        self.vm.register(&self.node)?;
        self.wait_for("Programmed")?;
        let by_udp = self.ask_once(&self.vm)?;
        let by_tcp = ask_tcp(self.vm.space()?, self.service.v6(), PATIENCE)?;
        say(&format!(
            "\
Held like any other until its identity is registered. What it sends never sees a bridge or a route: answered by producer
{by_udp} (UDP, IPv4) and {by_tcp} (TCP, IPv6). The answers find it by its address: a tap has no other end to hand them to."
        ));
        Ok(())
    }

    fn producer_is_switched(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("The policy is edited: `dns-next` shall serve instead.");
        let old = Producer::serve(self.dns_too.space()?, 3, &self.service.both())?;
        let new = self.serve(2, 1)?;
        let before = self.generation()?;
        self.node.put_policy(&self.policy("dns-next"))?;
        until(EVENT_BUDGET, "the new generation is programmed", || {
            let report = self.node.report()?;
            let line = report.as_ref().and_then(|report| report.policy(POLICY));
            Ok(line
                .filter(|line| line.generation > before && line.state == "Programmed")
                .map(drop))
        })?;
        let answered = self.ask_once(&self.web)?;
        ensure!(
            answered == new.id(),
            "producer {answered} answers, not the new one"
        );
        say(&format!(
            "\
The new set was written beside the old one, proven, and switched by one write. A question that is asked once the report says
generation {} is answered by producer {answered}. (Established conversations may finish at the old one, for `switchover.drain`.)",
            before + 1
        ));
        drop(old);
        self.status()
    }

    fn agent_is_killed(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("The agent is killed (SIGKILL) and started again, while `shop` keeps asking.");
        let producer = self.serve(2, 1)?;
        let flow = self.flow(&self.shop, &producer)?;
        flow.flows(100, EVENT_BUDGET)?;
        let killed = Instant::now();
        self.node.end_agent(Signal::KILL)?;
        flow.flows(RATE, 4 * EVENT_BUDGET)?;
        println!(
            "  dead for {:.1} s: traffic goes on, the programs are pinned in the kernel",
            killed.elapsed().as_secs_f64()
        );
        self.node.start_agent()?;
        self.wait_for("Programmed")?;
        flow.flows(RATE, 4 * EVENT_BUDGET)?;
        println!("  started again: it found its pins, checked them, and detached or rewrote nothing");
        let tally = flow.finish(Some(&producer))?;
        println!("  `shop` over all of it: {tally}");
        tally.perfect()
    }

    fn what_it_tells(&mut self) -> anyhow::Result<()> {
        self.telling
            .title("What a control plane and an operator read: `report.yaml` and /metrics.");
        let report = std::fs::read_to_string(self.node.report_path()?).context("report.yaml")?;
        println!("{}", indent(&report));
        let scrape = self.node.get("/metrics")?.body;
        let shown = [
            "holdfast_intents{",
            "holdfast_held_intents{",
            "holdfast_holds_total{",
            "holdfast_packets_total{",
        ];
        for line in scrape.lines() {
            let worth = shown.iter().any(|name| line.starts_with(name)) && !line.ends_with(" 0");
            if worth {
                println!("  {line}");
            }
        }
        Ok(())
    }

    // --- how it is told --------------------------------------------------------------------------------------

    /// What `holdfast status` says now.
    fn status(&self) -> anyhow::Result<()> {
        let output = self.node.cli("status", &["--all"])?;
        if !output.status.success() {
            bail!("holdfast status: {}", String::from_utf8_lossy(&output.stderr));
        }
        println!(
            "\n  $ holdfast status --all\n{}",
            indent(&String::from_utf8_lossy(&output.stdout))
        );
        Ok(())
    }

    // --- what happens ------------------------------------------------------------------------------------------

    fn policy(&self, app: &str) -> Policy {
        Policy {
            name: POLICY.to_owned(),
            consumers: ("role".to_owned(), "asks".to_owned()),
            producers: ("app".to_owned(), app.to_owned()),
            services: self
                .service
                .addresses
                .iter()
                .map(|&address: &IpAddr| (address, self.service.port))
                .collect(),
            ..Policy::default()
        }
    }

    fn wait_for(&self, verdict: &str) -> anyhow::Result<()> {
        self.node.until_verdict(POLICY, verdict, EVENT_BUDGET)
    }

    /// Lets one of the producers serve: `dns` is number 1, `dns-next` number 2.
    fn serve(&self, id: u32, which: usize) -> anyhow::Result<Producer> {
        let workload = [&self.dns, &self.dns_next][which];
        Producer::serve(workload.space()?, id, &self.service.both())
    }

    fn flow(&self, from: &Workload, to: &Producer) -> anyhow::Result<Flow> {
        Flow::start(from.space()?, self.service.v4(), RATE, to.id())
    }

    /// A conversation of `shop` with this producer: one of several that are begun.
    fn flow_to(&self, producer: &Producer) -> anyhow::Result<Flow> {
        for _ in 0..64 {
            let flow = Flow::start(self.shop.space()?, self.service.v4(), RATE, None)?;
            flow.flows(10, EVENT_BUDGET)?;
            if flow.by() == Some(producer.id()) {
                return Ok(flow);
            }
        }
        bail!("of 64 conversations none is with producer {}", producer.id())
    }

    /// So many questions of `web`: how many are answered by `dns`, how many by `dns-too`.
    fn asked(&self, questions: usize) -> anyhow::Result<[usize; 2]> {
        let mut by = [0; 2];
        for _ in 0..questions {
            match self.ask_once(&self.web)? {
                1 => by[0] += 1,
                _ => by[1] += 1,
            }
        }
        Ok(by)
    }

    /// One question, sent once: who answers?
    fn ask_once(&self, from: &Workload) -> anyhow::Result<u32> {
        let to: SocketAddr = self.service.v4();
        ask(from.space()?, to, PATIENCE)?.with_context(|| format!("nobody answers {} at {to}", from.name))
    }

    fn tcp_too(&self) -> anyhow::Result<()> {
        let by = ask_tcp(self.web.space()?, self.service.v6(), PATIENCE)?;
        println!("  By TCP over IPv6 too: producer {by}.");
        Ok(())
    }

    fn generation(&self) -> anyhow::Result<u64> {
        let report = self.node.report()?;
        let line = report.as_ref().and_then(|report| report.policy(POLICY));
        Ok(line.context("the policy is not in the report")?.generation)
    }

    /// Count and sum (seconds) of the histogram of the way from ready to programmed.
    fn ready_to_programmed(&self) -> anyhow::Result<(f64, f64)> {
        let metrics = self.node.metrics()?;
        let read = |suffix: &str| {
            metrics
                .get(
                    &format!("holdfast_programming_duration_seconds_{suffix}"),
                    &[("leg", "ready_to_programmed")],
                )
                .unwrap_or_default()
        };
        Ok((read("count"), read("sum")))
    }
}

/// Time that passes in the story itself: an instance that is redeployed is away for a while.
fn pause(length: Duration) {
    std::thread::sleep(length);
}
