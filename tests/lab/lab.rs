//! The usual scene: three consumers, two policies that share one of them, two producers, and a bystander.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::node::{EVENT_BUDGET, Node};
use crate::objects::Policy;
use crate::traffic::{Flow, Producer, ask, ask_tcp};
use crate::{Workload, say, until};

/// Policy of the consumers 0 and 1, served by producer 0.
pub const DNS: &str = "dns";
/// Policy of the consumers 1 and 2, served by producer 1.
pub const WEB: &str = "web";

/// How long a scene may take to come about. That is no measurement: another may be coming about beside it.
const SET_UP: Duration = Duration::from_secs(30);
/// Packets that the bystander sends a second.
const BYSTANDER_RATE: u64 = 500;

/// Where the bystander's packets go.
const BYSTANDER_PORT: u16 = 7000;

/// How long a question waits for its answer.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// A service: one address of each family, one port.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// Addresses.
    pub addresses: [IpAddr; 2],
    /// Port.
    pub port: u16,
}

impl Service {
    /// Service number `number`.
    #[must_use]
    pub fn new(number: u8, port: u16) -> Self {
        Self {
            addresses: [
                Ipv4Addr::new(10, 96, 0, number).into(),
                Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, number.into()).into(),
            ],
            port,
        }
    }

    /// Where it is asked by IPv4.
    #[must_use]
    pub const fn v4(&self) -> SocketAddr {
        SocketAddr::new(self.addresses[0], self.port)
    }

    /// Where it is asked by IPv6.
    #[must_use]
    pub const fn v6(&self) -> SocketAddr {
        SocketAddr::new(self.addresses[1], self.port)
    }

    /// Both.
    #[must_use]
    pub const fn both(&self) -> [SocketAddr; 2] {
        [self.v4(), self.v6()]
    }
}

/// The scene.
#[derive(Debug)]
pub struct Lab {
    bystander: Option<(Flow, Producer)>,
    /// What serves, by producer.
    pub serving: Vec<Producer>,
    /// The node.
    pub node: Node,
    /// c0, c1, c2.
    pub consumers: Vec<Workload>,
    /// p0, p1.
    pub producers: Vec<Workload>,
    _bystanders: Vec<Workload>,
    /// What each policy's producer serves.
    pub services: [Service; 2],
}

impl Lab {
    /// A node with the bystander's traffic, without agent, objects or workloads.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn new() -> anyhow::Result<Self> {
        let services = [Service::new(10, 53), Service::new(11, 80)];
        let mut node = Node::new()?;
        let mut bystanders = vec![
            Workload::new("b0", 201, &[], &[]),
            Workload::new("b1", 202, &[], &[]),
        ];
        for bystander in &mut bystanders {
            bystander.create(&mut node)?;
        }
        let (from, to) = (&bystanders[0], &bystanders[1]);
        let at = SocketAddr::new(to.addresses[0], BYSTANDER_PORT);
        let receiver = Producer::serve(to.space()?, 99, &[at])?;
        let flow = Flow::start(from.space()?, at, BYSTANDER_RATE, receiver.id())?;
        flow.flows(10, SET_UP)
            .context("the bystander's packets do not arrive")?;
        let consumer = |name, number, roles: &[(&str, &str)]| Workload::new(name, number, roles, &[]);
        let producer = |name, number, app, service: Service| {
            Workload::new(name, number, &[("app", app)], &service.addresses)
        };
        Ok(Self {
            bystander: Some((flow, receiver)),
            serving: Vec::new(),
            node,
            consumers: vec![
                consumer("c0", 11, &[("dns", "yes")]),
                consumer("c1", 12, &[("dns", "yes"), ("web", "yes")]),
                consumer("c2", 13, &[("web", "yes")]),
            ],
            producers: vec![
                producer("p0", 21, DNS, services[0]),
                producer("p1", 22, WEB, services[1]),
            ],
            _bystanders: bystanders,
            services,
        })
    }

    /// Everything: workloads that exist and are registered, policies, an agent that is ready and has programmed them.
    ///
    /// # Errors
    /// When something of it does not come about.
    pub fn programmed() -> anyhow::Result<Self> {
        Self::new()?.set_up(|lab| lab.program(&[]))
    }

    /// The same, with an agent that can be made to fail ([`Node::chaos`](crate::Node::chaos)) and has these variables in its
    /// environment.
    ///
    /// # Errors
    /// When something of it does not come about.
    pub fn programmed_with_chaos(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        Self::new()?.set_up(|lab| {
            lab.node.chaos("")?;
            lab.program(environment)
        })
    }

    /// Makes everything, with an agent that has these variables in its environment, and waits until it is programmed.
    ///
    /// # Errors
    /// When something of it does not come about.
    pub fn program(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        self.put_objects()?;
        self.create_workloads()?;
        self.node.launch_agent(environment)?;
        self.node.until_ready()?;
        self.register_all()?;
        self.until_set_up()
    }

    /// Sets a scene up; if that fails, says what the agent said.
    ///
    /// # Errors
    /// What `work` says.
    pub fn set_up(mut self, work: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<Self> {
        let outcome = work(&mut self);
        self.explained(outcome)?;
        Ok(self)
    }

    /// Adds to a failure what the agent has said.
    fn explained(&self, outcome: anyhow::Result<()>) -> anyhow::Result<()> {
        outcome.with_context(|| {
            let log = self.node.log();
            let tail = log.len().saturating_sub(60);
            let report = self
                .node
                .report_path()
                .and_then(|path| Ok(std::fs::read_to_string(path)?));
            format!(
                "the agent's last lines:\n{}\nits report:\n{}",
                log[tail..].join("\n"),
                report.unwrap_or_default()
            )
        })
    }

    /// Writes both policies and the attachments of all workloads.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn put_objects(&self) -> anyhow::Result<()> {
        self.put_attachments()?;
        self.node.put_policy(&self.policy(DNS))?;
        self.node.put_policy(&self.policy(WEB))
    }

    /// Writes the attachments of all workloads.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn put_attachments(&self) -> anyhow::Result<()> {
        self.workloads()
            .try_for_each(|workload| self.node.put_attachment(&workload.attachment()))
    }

    /// One of the two policies.
    #[must_use]
    pub fn policy(&self, name: &str) -> Policy {
        let service = self.services[usize::from(name != DNS)];
        Policy {
            name: name.to_owned(),
            consumers: (name.to_owned(), "yes".to_owned()),
            producers: ("app".to_owned(), name.to_owned()),
            services: service
                .addresses
                .into_iter()
                .map(|address| (address, service.port))
                .collect(),
            ..Policy::default()
        }
    }

    /// Creates all workloads, and lets the producers serve.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create_workloads(&mut self) -> anyhow::Result<()> {
        for workload in self.consumers.iter_mut().chain(&mut self.producers) {
            workload.create(&mut self.node)?;
        }
        self.serve()
    }

    /// Lets the producers serve.
    ///
    /// # Errors
    /// When an address cannot be bound.
    pub fn serve(&mut self) -> anyhow::Result<()> {
        self.serving.clear();
        for (id, (producer, service)) in (1..).zip(self.producers.iter().zip(self.services)) {
            let serving = Producer::serve(producer.space()?, id, &service.both())?;
            self.serving.push(serving);
        }
        Ok(())
    }

    /// Registers all workloads.
    ///
    /// # Errors
    /// When a registration does not exit with 0.
    pub fn register_all(&self) -> anyhow::Result<()> {
        self.workloads()
            .try_for_each(|workload| workload.register(&self.node))
    }

    /// Consumers and producers.
    pub fn workloads(&self) -> impl Iterator<Item = &Workload> {
        self.consumers.iter().chain(&self.producers)
    }

    /// Waits until both policies are programmed.
    ///
    /// # Errors
    /// When they are not within the event budget, and 20 ms for the attach of each interface.
    pub fn until_programmed(&self) -> anyhow::Result<()> {
        self.until_programmed_within(EVENT_BUDGET + Duration::from_millis(100))
    }

    /// The same of a scene that is coming about, beside whatever else is.
    ///
    /// # Errors
    /// When they are not within half a minute.
    pub fn until_set_up(&self) -> anyhow::Result<()> {
        self.until_programmed_within(SET_UP)
    }

    fn until_programmed_within(&self, time: Duration) -> anyhow::Result<()> {
        self.node.until_verdict(DNS, "Programmed", time)?;
        self.node.until_verdict(WEB, "Programmed", time)
    }

    /// Asks a service once by each protocol and family, and wants the right answer each time.
    ///
    /// # Errors
    /// When an answer is missing or another producer's.
    pub fn served(&self, consumer: usize, service: usize) -> anyhow::Result<()> {
        let space = self.consumers[consumer].space()?;
        let expected = self.serving[service].id();
        for to in self.services[service].both() {
            let by = ask(space, to, PATIENCE)?;
            ensure!(
                by == Some(expected),
                "c{consumer} asks {to} by UDP: answered by {by:?}"
            );
            let by = ask_tcp(space, to, PATIENCE).with_context(|| format!("c{consumer} asks {to}"))?;
            ensure!(by == expected, "c{consumer} asks {to} by TCP: answered by {by}");
        }
        Ok(())
    }

    /// The very first question is answered.
    ///
    /// # Errors
    /// When it is not.
    pub fn served_at_once(&self, consumer: usize, service: usize) -> anyhow::Result<()> {
        let by = self.answered(consumer, service, PATIENCE)?;
        let expected = self.serving[service].id();
        ensure!(
            by == Some(expected),
            "c{consumer} asks service {service} once: answered by {by:?}"
        );
        Ok(())
    }

    /// Asks a service once, by UDP and IPv4: who answers within this time?
    ///
    /// # Errors
    /// When the consumer is not there.
    pub fn answered(
        &self,
        consumer: usize,
        service: usize,
        patience: Duration,
    ) -> anyhow::Result<Option<u32>> {
        ask(
            self.consumers[consumer].space()?,
            self.services[service].v4(),
            patience,
        )
    }

    /// Asks a service by each family, and wants that nothing of it arrives anywhere.
    ///
    /// # Errors
    /// When a producer receives something, or somebody answers.
    pub fn not_served(&self, consumer: usize, service: usize) -> anyhow::Result<()> {
        let before = self.received();
        for to in self.services[service].both() {
            // Long beside the way of a packet, which takes microseconds.
            let by = ask(self.consumers[consumer].space()?, to, Duration::from_millis(100))?;
            ensure!(
                by.is_none(),
                "c{consumer} is held and asks {to}: answered by {by:?}"
            );
        }
        let after = self.received();
        ensure!(
            before == after,
            "packets of c{consumer}, which is held, arrived at a producer"
        );
        Ok(())
    }

    fn received(&self) -> Vec<u64> {
        self.serving.iter().map(Producer::received).collect()
    }

    /// A steady flow from a consumer to a service, by IPv4.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn flow(&self, consumer: usize, service: usize, rate: u64) -> anyhow::Result<Flow> {
        let space = self.consumers[consumer].space()?;
        Flow::start(
            space,
            self.services[service].v4(),
            rate,
            self.serving[service].id(),
        )
    }

    /// Ends the scene: the bystander must have lost nothing, and the agent must have logged no error.
    ///
    /// # Errors
    /// When it has.
    pub fn finish(mut self) -> anyhow::Result<()> {
        if let Some((flow, receiver)) = self.bystander.take() {
            let tally = flow.finish(Some(&receiver))?;
            say(format_args!("bystander: {tally}"));
            tally.perfect().context("the bystander's traffic suffered")?;
        }
        let errors = self.node.error_lines();
        ensure!(
            errors.is_empty(),
            "the agent logged errors:\n{}",
            errors.join("\n")
        );
        Ok(())
    }

    /// Runs a test in this scene and ends it; if it fails, says what the agent said.
    ///
    /// # Errors
    /// What the test or the end of the scene says.
    pub fn run(mut self, test: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let outcome = test(&mut self);
        self.explained(outcome)?;
        self.finish()
    }

    /// Waits until so many intents are in this state, as the gauge says.
    ///
    /// # Errors
    /// When they are not within the deadline.
    pub fn until_intents(&self, state: &str, count: u64, deadline: Duration) -> anyhow::Result<()> {
        until(deadline, format!("{count} intents are {state}"), || {
            Ok((self.node.metrics()?.intents(state) == count).then_some(()))
        })
    }
}
