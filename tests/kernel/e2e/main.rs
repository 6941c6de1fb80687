//! One story on a real cluster: what a policy goes through from its first hold to its end, with agents and controller
//! as the pods that `deploy/` makes, workloads as pods behind the real bridge plugin, and packets as the judge.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use holdfast_tests::kubernetes::{
    Installation, NAMESPACE, Options, Pod, Process, Recorder, SYSTEM, Workload, agent_image, cluster,
};
use holdfast_tests::traffic::{Flow, Producer, ask};
use holdfast_tests::{say, throughout, until};

holdfast_tests::suite! {
    needs [Agent, ApiServer];
    a_policy_from_its_first_hold_to_its_end,
    the_demo_goes_as_it_is_told,
}

/// What the control plane may take for a change, on a machine that does much else. What is measured is said.
const TOLD: Duration = Duration::from_secs(30);
/// How long a question waits for its answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// Longer than a lease counts (40 s).
const LEASE_OVER: Duration = Duration::from_secs(90);

const EDGE_A: &str = "edge-a";
const EDGE_B: &str = "edge-b";

const WEB_0: Workload = Workload {
    name: "web-0",
    node: EDGE_A,
    app: "web",
};
const WEB_1: Workload = Workload {
    name: "web-1",
    node: EDGE_B,
    app: "web",
};
const WEB_2: Workload = Workload {
    name: "web-2",
    node: EDGE_B,
    app: "web",
};
const DNS_A: Workload = Workload {
    name: "dns-a",
    node: EDGE_A,
    app: "dns",
};
const DNS_B: Workload = Workload {
    name: "dns-b",
    node: EDGE_B,
    app: "dns",
};
const WRONG_A: Workload = Workload {
    name: "wrong-a",
    node: EDGE_A,
    app: "wrong",
};

/// Port of the service.
const PORT: u16 = 53;
/// Packets a second of each flow under which nothing may be lost.
const RATE: u64 = 500;

/// A policy from `app: web` to these producers, for one service address.
fn policy(producers: &str, address: &str) -> String {
    format!(
        "apiVersion: holdfast.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{namespace: {NAMESPACE}, name: dns}}\n\
         spec:\n  consumers: {{matchLabels: {{app: web}}}}\n  producers: {{matchLabels: {{app: {producers}}}}}\n  \
         switchover: {{drain: 0s}}\n  \
         destinations: [{{address: {address}, protocol: UDP, port: {PORT}}}]\n"
    )
}

/// The service, at first and after the edit.
const FIRST: &str = "10.97.0.10";
const SECOND: &str = "10.97.0.11";

fn service(address: &str) -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, PORT))
}

/// Everything that the chapters share.
struct Story {
    ground: Installation,
    policies: Recorder,
    pods: BTreeMap<&'static str, Pod>,
    producers: BTreeMap<&'static str, Producer>,
}

fn a_policy_from_its_first_hold_to_its_end() -> anyhow::Result<()> {
    let ground = Installation::of(cluster(&Options::default())?)?;
    let folder = scratch()?;
    ground
        .install(&agent_image(folder.path())?)
        .context("Holdfast is not installed")?;
    let policies = Recorder::start(ground.kubectl(), NAMESPACE, "dns")?;
    let mut story = Story {
        ground,
        policies,
        pods: BTreeMap::new(),
        producers: BTreeMap::new(),
    };
    type Chapter = fn(&mut Story) -> anyhow::Result<()>;
    let chapters: [(&str, Chapter); 12] = [
        ("producers come", Story::producers_come),
        ("policy and attachment before the interface", Story::held_first),
        ("interface and identity come", Story::programmed),
        ("an edit to another destination", Story::edited),
        ("a wrong producer is corrected", Story::corrected),
        ("a consumer is added, and swapped", Story::grown),
        ("a redeploy under the same name", Story::redeployed),
        ("a node's kubelet and agent are away", Story::node_away),
        ("the agents are updated under traffic", Story::updated),
        ("the API server is away", Story::api_away),
        ("a pod's token goes no further than its node", Story::no_further),
        ("the policy is deleted", Story::deleted),
    ];
    for (name, chapter) in chapters {
        let started = Instant::now();
        chapter(&mut story).with_context(|| name.to_owned())?;
        say(format_args!("{:6.1} s  {name}", started.elapsed().as_secs_f64()));
    }
    ensure!(
        story.ground.restarts()? <= 1,
        "containers of ours were started again"
    );
    story.ground.down()
}

/// What `cargo xtask demo --cluster` runs when all is built.
fn the_demo_goes_as_it_is_told() -> anyhow::Result<()> {
    let folder = scratch()?;
    let image = agent_image(folder.path())?;
    let said = Command::new(env!("CARGO_BIN_EXE_demo"))
        .arg("cluster")
        .arg(&image)
        .output()?;
    let told = String::from_utf8_lossy(&said.stdout);
    ensure!(
        said.status.success(),
        "{told}{}",
        String::from_utf8_lossy(&said.stderr)
    );
    // Its checks may be wrong themselves: what a reader must have seen.
    let mut rest = &told[..];
    for line in [
        "$ kubectl apply -k deploy/kustomize/overlays/dev",
        "  dns    True       False        0/1     1",
        "InterfaceMissing",
        "IdentityMissing",
        "edge-a$ holdfast attachment register --interface hfweb-0 --identity web-0-i1",
        "routepolicy.holdfast.dev/dns condition met",
        "  dns    True       True         1/1     0",
        "InterfaceMissing",
        "edge-a$ holdfast attachment register --interface hfweb-0 --identity web-0-i2",
        "routepolicy.holdfast.dev/dns condition met",
        ", 0 without an answer",
        "$ kubectl get nodereport edge-a.r",
    ] {
        let found = rest.find(line);
        let found = found.with_context(|| format!("`{line}` is not told, or not in its place:\n{told}"))?;
        rest = &rest[found + line.len()..];
    }
    Ok(())
}

/// A folder for an image, which nodes can read.
fn scratch() -> anyhow::Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new()
        .prefix("hf-e2e-")
        .tempdir_in("/var/tmp")?)
}

impl Story {
    /// A pod that is registered and attached.
    fn join(&mut self, workload: &Workload, incarnation: &str) -> anyhow::Result<()> {
        let pod = workload.create(&self.ground)?;
        self.ground
            .apply(&workload.attachment(incarnation, Some(pod.address)))?;
        pod.register(&self.ground, incarnation)?;
        self.pods.insert(workload.name, pod);
        Ok(())
    }

    fn pod(&self, workload: &Workload) -> anyhow::Result<&Pod> {
        self.pods
            .get(workload.name)
            .with_context(|| format!("{} is not there", workload.name))
    }

    /// Who answers a question of this consumer at this address.
    fn asks(&self, workload: &Workload, address: &str) -> anyhow::Result<Option<u32>> {
        ask(&self.pod(workload)?.space, service(address)?, PATIENCE)
    }

    fn served(&self, workload: &Workload, address: &str, by: u32) -> anyhow::Result<()> {
        let answer = self.asks(workload, address)?;
        ensure!(
            answer == Some(by),
            "{} asked {address} and was answered by {answer:?}, not by {by}",
            workload.name
        );
        Ok(())
    }

    /// `kubectl wait` for the policy as it is now.
    fn wait(&self) -> anyhow::Result<Instant> {
        let kubectl = self.ground.kubectl();
        kubectl.run(&[
            "wait",
            "--namespace",
            NAMESPACE,
            "routepolicy/dns",
            "--for=condition=Programmed",
            &format!("--timeout={}s", TOLD.as_secs()),
        ])?;
        Ok(Instant::now())
    }

    fn flow(&self, workload: &Workload, by: u32) -> anyhow::Result<Flow> {
        Flow::start(&self.pod(workload)?.space, service(SECOND)?, RATE, by)
    }

    fn producers_come(&mut self) -> anyhow::Result<()> {
        for (workload, number) in [(&DNS_A, 1), (&DNS_B, 2), (&WRONG_A, 9)] {
            self.join(workload, &format!("{}-i1", workload.name))?;
            let producer = self
                .pod(workload)?
                .serve(number, &[service(FIRST)?, service(SECOND)?])?;
            self.producers.insert(workload.name, producer);
        }
        Ok(())
    }

    fn held_first(&mut self) -> anyhow::Result<()> {
        self.ground.apply(&WEB_0.attachment("web-0-i1", None))?;
        self.ground.apply(&policy("dns", FIRST))?;
        let held = self
            .policies
            .until(TOLD, "held, and the laggard is named", |policy| {
                policy.programmed().reason == "Held" && !policy.status.laggards.is_empty()
            })?;
        let condition = held.programmed();
        ensure!(condition.status == "False", "{condition:?}");
        let nodes = held.status.nodes;
        ensure!(
            (nodes.programmed, nodes.desired, nodes.held) == (0, 1, 1),
            "{nodes:?}"
        );
        let laggard = &held.status.laggards[0];
        ensure!(
            (
                laggard.node.as_str(),
                laggard.state.as_str(),
                laggard.reason.as_str()
            ) == (EDGE_A, "Held", "InterfaceMissing"),
            "{laggard:?}"
        );
        let listed = self.ground.kubectl().run(&[
            "get",
            "routepolicy",
            "dns",
            "--namespace",
            NAMESPACE,
            "--no-headers",
        ])?;
        ensure!(listed.contains("0/1"), "{listed}");
        Ok(())
    }

    fn programmed(&mut self) -> anyhow::Result<()> {
        let pod = WEB_0.create(&self.ground)?;
        self.pods.insert(WEB_0.name, pod);
        self.policies.until(TOLD, "held for its identity", |policy| {
            let laggard = policy.status.laggards.first();
            laggard.is_some_and(|laggard| laggard.reason == "IdentityMissing")
        })?;
        ensure!(self.asks(&WEB_0, FIRST)?.is_none(), "a held consumer is served");
        self.pod(&WEB_0)?.register(&self.ground, "web-0-i1")?;
        self.wait()?;
        self.served(&WEB_0, FIRST, 1)?;
        let policy = self
            .policies
            .until(TOLD, "1/1", |policy| policy.is_programmed())?;
        ensure!(policy.status.observed_generation == policy.metadata.generation);
        ensure!(
            (policy.status.nodes.programmed, policy.status.nodes.desired) == (1, 1),
            "{:?}",
            policy.status.nodes
        );
        Ok(())
    }

    /// No wait passes on what was true of the former generation.
    fn edited(&mut self) -> anyhow::Result<()> {
        self.ground.apply(&policy("dns", SECOND))?;
        self.wait()?;
        self.served(&WEB_0, SECOND, 1)?;
        ensure!(
            self.asks(&WEB_0, FIRST)?.is_none(),
            "the former address is served"
        );
        // And by our own command, through the same API server.
        self.ground.apply(&policy("dns", FIRST))?;
        self.ground.wait("shop/dns")?;
        self.served(&WEB_0, FIRST, 1)?;
        self.ground.apply(&policy("dns", SECOND))?;
        self.ground.wait("shop/dns")?;
        self.served(&WEB_0, SECOND, 1)
    }

    fn corrected(&mut self) -> anyhow::Result<()> {
        self.ground.apply(&policy("wrong", SECOND))?;
        self.wait()?;
        self.served(&WEB_0, SECOND, 9)?;
        let (space, to) = (self.pod(&WEB_0)?.space.clone(), service(SECOND)?);
        let before = self.policies.last().context("no policy")?.metadata.generation;
        let corrected = Instant::now();
        self.ground.apply(&policy("dns", SECOND))?;
        // Each question is a new flow: whoever answers is who the policy leads to. The old producer does not drain: the
        // answer that is on its way when the switch comes is nobody's.
        let mut last_wrong = None;
        let mut unanswered = 0;
        let said = until(TOLD, "status says so", || {
            match ask(&space, to, PATIENCE)? {
                Some(9) => last_wrong = Some(Instant::now()),
                Some(1) => {}
                None if unanswered == 0 => unanswered += 1,
                other => bail!("answered by {other:?}"),
            }
            let since = self.policies.since(corrected);
            Ok(since
                .iter()
                .find(|seen| seen.policy.metadata.generation > before && seen.policy.is_programmed())
                .map(|seen| seen.at))
        })?;
        for _ in 0..50 {
            self.served(&WEB_0, SECOND, 1)?;
        }
        ensure!(
            last_wrong.is_none_or(|wrong| wrong <= said),
            "a wrong answer came after status said that all is right"
        );
        Ok(())
    }

    /// What is added is not covered by what was true before.
    fn grown(&mut self) -> anyhow::Result<()> {
        self.not_true_before(&WEB_1, "web-1-i1", None)?;
        self.served(&WEB_1, SECOND, 2)?;
        self.not_true_before(&WEB_2, "web-2-i1", Some(&WEB_1))?;
        self.served(&WEB_2, SECOND, 2)
    }

    /// Adds a consumer (in the place of another), and looks at all that is said until it is registered.
    fn not_true_before(
        &mut self,
        new: &Workload,
        incarnation: &str,
        old: Option<&Workload>,
    ) -> anyhow::Result<()> {
        let pod = new.create(&self.ground)?;
        let address = pod.address;
        self.pods.insert(new.name, pod);
        let kubectl = self.ground.kubectl();
        self.ground.apply(&new.attachment(incarnation, Some(address)))?;
        if let Some(old) = old {
            kubectl.run(&["delete", "attachment", old.name, "--namespace", NAMESPACE])?;
        }
        let lagging = self
            .policies
            .until(TOLD, "the new consumer is missing", |policy| {
                policy.status.nodes.desired == 2 && !policy.is_programmed()
            })?;
        let laggard = lagging.status.laggards.first().context("nobody is named")?;
        ensure!(laggard.node == new.node, "{laggard:?}");
        let from = Instant::now();
        throughout(Duration::from_secs(3), "held", || {
            Ok(!self.policies.last().is_some_and(|policy| policy.is_programmed()))
        })?;
        let before = Instant::now();
        self.pod(new)?.register(&self.ground, incarnation)?;
        self.wait()?;
        let early = self
            .policies
            .since(from)
            .into_iter()
            .filter(|seen| seen.at < before && seen.policy.is_programmed())
            .count();
        ensure!(
            early == 0,
            "True was said {early} times before {} was registered",
            new.name
        );
        if let Some(old) = old {
            old.delete(&self.ground)?;
            self.pods.remove(old.name);
        }
        Ok(())
    }

    fn redeployed(&mut self) -> anyhow::Result<()> {
        let errors = self.ground.error_lines(EDGE_A)?.len();
        WEB_0.delete(&self.ground)?;
        self.pods.remove(WEB_0.name);
        self.policies
            .until(TOLD, "held again", |policy| policy.programmed().reason == "Held")?;
        self.ground.apply(&WEB_0.attachment("web-0-i2", None))?;
        let pod = WEB_0.create(&self.ground)?;
        self.pods.insert(WEB_0.name, pod);
        ensure!(
            self.asks(&WEB_0, SECOND)?.is_none(),
            "served before it is registered"
        );
        self.pod(&WEB_0)?.register(&self.ground, "web-0-i2")?;
        self.wait()?;
        self.served(&WEB_0, SECOND, 1)?;
        let after = self.ground.error_lines(EDGE_A)?;
        ensure!(after.len() == errors, "a redeploy is no error: {after:?}");
        Ok(())
    }

    fn node_away(&mut self) -> anyhow::Result<()> {
        let cluster = self.ground.cluster();
        let agent = self.ground.agent_pod(EDGE_B)?;
        cluster.stop(Process::Kubelet(EDGE_B), "TERM")?;
        let flow = self.flow(&WEB_2, 2)?;
        flow.flows(RATE, TOLD)?;
        cluster.kill_pod(EDGE_B, SYSTEM, &agent, "KILL")?;
        let unknown = self.policies.until(LEASE_OVER, "the node is unknown", |policy| {
            policy.programmed().status == "Unknown"
        })?;
        ensure!(
            unknown.programmed().reason == "NodeUnknown",
            "{:?}",
            unknown.programmed()
        );
        ensure!(unknown.status.nodes.unknown == 1, "{:?}", unknown.status.nodes);
        let laggard = unknown.status.laggards.first().context("nobody is named")?;
        ensure!(laggard.node == EDGE_B, "{laggard:?}");
        flow.flows(RATE, TOLD).context("traffic stopped with the agent")?;
        cluster.start_again(Process::Kubelet(EDGE_B))?;
        self.policies
            .until(LEASE_OVER, "the node is back", |policy| policy.is_programmed())?;
        let tally = flow.finish(self.producers.get(DNS_B.name))?;
        say(format_args!("while the agent was away: {tally}"));
        tally.perfect()
    }

    fn updated(&mut self) -> anyhow::Result<()> {
        let flows = [
            (self.flow(&WEB_0, 1)?, DNS_A.name),
            (self.flow(&WEB_2, 2)?, DNS_B.name),
        ];
        self.ground.kubectl().run(&[
            "rollout",
            "restart",
            "daemonset/holdfast-agent",
            "--namespace",
            SYSTEM,
        ])?;
        self.ground.rolled_out("daemonset/holdfast-agent")?;
        self.policies
            .until(TOLD, "True after the update", |policy| policy.is_programmed())?;
        for (flow, producer) in flows {
            let tally = flow.finish(self.producers.get(producer))?;
            say(format_args!("over the update: {tally}"));
            tally.perfect()?;
        }
        Ok(())
    }

    fn api_away(&mut self) -> anyhow::Result<()> {
        let before = self.policies.last().context("no policy")?;
        let writes = |ground: &Installation| -> anyhow::Result<u64> {
            let mut sum = 0;
            for node in [EDGE_A, EDGE_B] {
                sum += ground.metrics(node)?.count("holdfast_map_writes_total", &[]);
            }
            Ok(sum)
        };
        let (written, restarts) = (writes(&self.ground)?, self.ground.restarts()?);
        let flow = self.flow(&WEB_0, 1)?;
        self.ground.cluster().stop(Process::ApiServer, "KILL")?;
        std::thread::sleep(Duration::from_secs(60));
        self.served(&WEB_2, SECOND, 2)?;
        self.ground.cluster().start_again(Process::ApiServer)?;
        self.ground.cluster().until_ready(LEASE_OVER)?;
        self.policies = Recorder::start(self.ground.kubectl(), NAMESPACE, "dns")?;
        self.policies
            .until(TOLD, "True as before", |policy| policy.is_programmed())?;
        throughout(Duration::from_secs(20), "nothing is withdrawn", || {
            Ok(self.policies.last().is_some_and(|policy| policy.is_programmed()))
        })?;
        let tally = flow.finish(self.producers.get(DNS_A.name))?;
        say(format_args!("while the API server was away: {tally}"));
        tally.perfect()?;
        let after = self.policies.last().context("no policy")?;
        ensure!(after.metadata.generation == before.metadata.generation);
        ensure!(writes(&self.ground)? == written, "maps were written");
        ensure!(
            self.ground.restarts()? == restarts,
            "a container was started again"
        );
        Ok(())
    }

    fn no_further(&mut self) -> anyhow::Result<()> {
        let token = format!("--token={}", self.ground.token(EDGE_A)?);
        let kubectl = self.ground.kubectl();
        let may = |words: &[&str], input: Option<&str>| -> anyhow::Result<bool> {
            let words: Vec<&str> = [token.as_str()]
                .into_iter()
                .chain(words.iter().copied())
                .collect();
            Ok(kubectl.output(&words, input)?.status.success())
        };
        let label = |node: &str| format!("{node}.r");
        let touch = "{\"metadata\":{\"labels\":{\"touched\":\"yes\"}}}";
        let report = |node: &str| {
            may(
                &["patch", "nodereport", &label(node), "--type=merge", "-p", touch],
                None,
            )
        };
        let lease = |node: &str| {
            may(
                &[
                    "patch",
                    "lease",
                    node,
                    "--namespace=holdfast-node-lease",
                    "--type=merge",
                    "-p",
                    touch,
                ],
                None,
            )
        };
        ensure!(report(EDGE_A)? && lease(EDGE_A)?, "its own is refused");
        ensure!(!report(EDGE_B)?, "another node's report is taken");
        ensure!(!lease(EDGE_B)?, "another node's lease is taken");
        ensure!(
            !may(&["delete", "nodereport", &label(EDGE_A)], None)?,
            "a report is deleted"
        );
        ensure!(
            !may(&["apply", "-f", "-"], Some(&WEB_0.attachment("stolen", None)))?,
            "an attachment is written"
        );
        ensure!(
            !may(&["get", "secrets", "--namespace", SYSTEM], None)?,
            "secrets are read"
        );
        Ok(())
    }

    fn deleted(&mut self) -> anyhow::Result<()> {
        let uid = self.policies.last().context("no policy")?.metadata.uid;
        ensure!(
            self.ground.acknowledged(EDGE_A, &uid)?.len() == 1,
            "it is not acknowledged while it is there"
        );
        self.ground
            .kubectl()
            .run(&["delete", "routepolicy", "dns", "--namespace", NAMESPACE])?;
        until(TOLD, "acknowledgments and intents are gone", || {
            for node in [EDGE_A, EDGE_B] {
                let intents: u64 = ["pending", "programmed", "held", "failed", "removing"]
                    .iter()
                    .map(|state| self.ground.metrics(node).map(|metrics| metrics.intents(state)))
                    .sum::<anyhow::Result<u64>>()?;
                if intents > 0 || !self.ground.acknowledged(node, &uid)?.is_empty() {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })?;
        for node in [EDGE_A, EDGE_B] {
            let series = self.ground.metrics(node)?.with("policy", "dns");
            ensure!(series == 0, "{series} series of it are left on {node}");
        }
        ensure!(self.asks(&WEB_0, SECOND)?.is_none(), "it is served after its end");
        Ok(())
    }
}
