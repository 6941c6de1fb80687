//! The whole cluster.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::api::{self, Address, Kubectl, unique_name};
use crate::binaries::{Binaries, cache_dir, lacking};
use crate::enclosure::{Enclosure, Network, Room};
use crate::node::Node;
use crate::pki::{self, User};
use crate::program;
use crate::wait::until;

/// Nodes may take so long to be Ready, on a machine that does much else.
const NODES_READY: Duration = Duration::from_secs(120);

/// Beginning of the names of all clusters.
const PREFIX: &str = "hfk";

/// Where the API server of a cluster is, in the cluster's own network.
const ADDRESS: Address = Address {
    ip: Ipv4Addr::new(10, 77, 0, 1),
    port: 6443,
    etcd: [2379, 2380],
};

/// What a cluster shall be.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names of its nodes.
    pub nodes: Vec<String>,
    /// Its name, if it is to be found again ([`Cluster::open`]); else it gets one that no other has.
    pub name: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: vec!["edge-a".to_owned(), "edge-b".to_owned()],
            name: None,
        }
    }
}

/// A process of a cluster. Those of a node are named with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process<'a> {
    /// Where the API server keeps what it knows.
    Etcd,
    /// The API server.
    ApiServer,
    /// Makes pods of DaemonSets, marks nodes as lost, and so on.
    ControllerManager,
    /// Gives pods to nodes.
    Scheduler,
    /// Runs containers.
    Containerd(&'a str),
    /// Runs pods.
    Kubelet(&'a str),
}

/// What is known of a cluster to whoever opens it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    nodes: Vec<String>,
    binaries: PathBuf,
}

/// A cluster. Gone when dropped, unless it was told to outlive its owner.
#[derive(Debug)]
pub struct Cluster {
    enclosure: Enclosure,
    binaries: Binaries,
    nodes: Vec<Node>,
    kubectl: Kubectl,
}

impl Cluster {
    /// Starts one and waits until its nodes are Ready.
    ///
    /// # Errors
    /// [`Lacking`](crate::Lacking) when this machine cannot run it as it is; or when it does not get ready.
    pub fn start(options: &Options) -> anyhow::Result<Self> {
        ensure!(
            (1..=200).contains(&options.nodes.len()),
            "a cluster has 1 to 200 nodes"
        );
        let cache = cache_dir()?;
        if let Some(first) = lacking(&cache).into_iter().next() {
            return Err(first.into());
        }
        let binaries = Binaries::built(&cache).context("Kubernetes is not built")?;
        let name = options.name.clone().unwrap_or_else(unique_name);
        ensure!(name.starts_with(PREFIX), "names of clusters begin with {PREFIX}");
        let enclosure = Enclosure::new(&name, Network::New)?;
        let kubectl = Self::kubectl_of(&enclosure, &binaries);
        let mut cluster = Self {
            enclosure,
            binaries,
            nodes: Vec::new(),
            kubectl,
        };
        match cluster.bring_up(&options.nodes) {
            Ok(()) => Ok(cluster),
            Err(error) => Err(error.context(cluster.enclosure.last_lines())),
        }
    }

    /// The one of this name, which outlives whoever started it.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(name: &str) -> anyhow::Result<Self> {
        let Some(enclosure) = Enclosure::open(name) else {
            bail!("no cluster runs (cargo xtask cluster up)");
        };
        let text = fs::read_to_string(enclosure.folder().join("cluster.json"))
            .context("the cluster is not up yet, or its start was broken off (cargo xtask cluster down)")?;
        let record: Record = serde_json::from_str(&text)?;
        let binaries = Binaries::at(record.binaries);
        let nodes = record.nodes.iter().enumerate();
        let nodes = nodes
            .map(|(index, name)| Node::open(&enclosure, name, index))
            .collect::<anyhow::Result<_>>()?;
        let kubectl = Self::kubectl_of(&enclosure, &binaries);
        Ok(Self {
            enclosure,
            binaries,
            nodes,
            kubectl,
        })
    }

    /// Removes the one of this name, whatever state it is in, and what is left of others that were broken off. Gives
    /// the names of those that were removed.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove(name: &str) -> anyhow::Result<Vec<String>> {
        let mut removed = Vec::new();
        if let Some(mut enclosure) = Enclosure::open(name) {
            enclosure.end()?;
            removed.push(name.to_owned());
        }
        removed.extend(Enclosure::tidy(PREFIX)?);
        Ok(removed)
    }

    /// Lets it live on when this process ends.
    ///
    /// # Errors
    /// When it has ended already.
    pub fn outlive(&mut self) -> anyhow::Result<()> {
        self.enclosure.outlive()
    }

    /// Ends it, and waits until nothing of it is left.
    ///
    /// # Errors
    /// When something is left.
    pub fn down(mut self) -> anyhow::Result<()> {
        self.enclosure.end()
    }

    /// As the cluster's administrator.
    #[must_use]
    pub const fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// The file of the network namespace in which the API server listens.
    #[must_use]
    pub fn network(&self) -> PathBuf {
        self.enclosure.hall().network().to_path_buf()
    }

    /// Names of its nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().map(|node| node.name.as_str())
    }

    /// Its processes, and whether they run.
    ///
    /// # Errors
    /// When its folder cannot be read.
    pub fn processes(&self) -> anyhow::Result<Vec<(String, bool)>> {
        self.enclosure.processes()
    }

    /// Where its processes write what they say.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.enclosure.folder().join("log")
    }

    /// Gives an image to all nodes: a docker-archive tar.
    ///
    /// # Errors
    /// What containerd says.
    pub fn load(&self, tar: &Path) -> anyhow::Result<()> {
        let tar = std::path::absolute(tar)?;
        let tar = tar.to_str().context("a path that is no text")?;
        // `/var/tmp`, `/home` and so on are the machine's on every node.
        for node in &self.nodes {
            node.ctr(&self.enclosure, &self.binaries, &["images", "import", tar])
                .with_context(|| format!("{} does not take {tar}", node.name))?;
        }
        Ok(())
    }

    /// Runs a command on a node, whatever it ends with.
    ///
    /// # Errors
    /// When there is no such node, or the command cannot be run.
    pub fn on(&self, node: &str, argv: &[&str]) -> anyhow::Result<Output> {
        self.node(node)?.output(&self.enclosure, argv)
    }

    /// A command on a node, for a caller who runs it as he likes.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn command_on(&self, node: &str, argv: &[&str]) -> anyhow::Result<Command> {
        self.node(node)?.command(&self.enclosure, argv)
    }

    /// Sends a signal (`KILL`, `TERM`) to the first process of each container of a pod.
    ///
    /// # Errors
    /// When no container of it runs.
    pub fn kill_pod(&self, node: &str, namespace: &str, pod: &str, signal: &str) -> anyhow::Result<()> {
        let node = self.node(node)?;
        for (container, _) in self.containers(node, namespace, pod)? {
            node.ctr(
                &self.enclosure,
                &self.binaries,
                &["tasks", "kill", "--signal", signal, &container],
            )?;
        }
        Ok(())
    }

    /// The file of a pod's network namespace, as long as the pod runs.
    ///
    /// # Errors
    /// When no container of it runs.
    pub fn pod_network(&self, node: &str, namespace: &str, pod: &str) -> anyhow::Result<PathBuf> {
        Ok(self.pod_process(node, namespace, pod)?.join("ns/net"))
    }

    /// The file system of the first container of a pod, as this process can open it.
    ///
    /// # Errors
    /// When no container of it runs.
    pub fn pod_root(&self, node: &str, namespace: &str, pod: &str) -> anyhow::Result<PathBuf> {
        Ok(self.pod_process(node, namespace, pod)?.join("root"))
    }

    fn pod_process(&self, node: &str, namespace: &str, pod: &str) -> anyhow::Result<PathBuf> {
        let containers = self.containers(self.node(node)?, namespace, pod)?;
        let (_, process) = containers.first().context("a pod without containers")?;
        Ok(self.enclosure.inner(process))
    }

    /// The containers of a pod that run, each with its first process.
    fn containers(&self, node: &Node, namespace: &str, pod: &str) -> anyhow::Result<Vec<(String, String)>> {
        let label = |name: &str, value: &str| format!("labels.\"{name}\"=={value}");
        let filter = [
            label("io.kubernetes.pod.namespace", namespace),
            label("io.kubernetes.pod.name", pod),
            label("io.cri-containerd.kind", "container"),
        ]
        .join(",");
        let ctr = |words: &[&str]| node.ctr(&self.enclosure, &self.binaries, words);
        let of_pod = ctr(&["containers", "ls", "--quiet", &filter])?;
        let tasks = ctr(&["tasks", "ls"])?;
        let running: Vec<_> = tasks
            .lines()
            .filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
                [container, process, "RUNNING"] => Some((container.to_owned(), process.to_owned())),
                _ => None,
            })
            .filter(|(container, _)| of_pod.lines().any(|line| line == container))
            .collect();
        ensure!(
            !running.is_empty(),
            "no container of {namespace}/{pod} runs on {}",
            node.name
        );
        Ok(running)
    }

    /// Whether a process runs.
    #[must_use]
    pub fn is_running(&self, process: Process<'_>) -> bool {
        self.enclosure.is_running(&process.name())
    }

    /// Ends a process by a signal (`TERM`, `KILL`) and waits for its end.
    ///
    /// # Errors
    /// When it does not run, or does not end.
    pub fn stop(&self, process: Process<'_>, signal: &str) -> anyhow::Result<()> {
        self.enclosure.stop(&process.name(), signal)
    }

    /// Starts a process again that was stopped. Of the API server and of containerd, waits until they answer.
    ///
    /// # Errors
    /// When it runs, or does not get ready.
    pub fn start_again(&self, process: Process<'_>) -> anyhow::Result<()> {
        let (enclosure, binaries) = (&self.enclosure, &self.binaries);
        let hall = enclosure.hall();
        match process {
            Process::Etcd => api::start_etcd(enclosure, &hall, binaries, ADDRESS),
            Process::ApiServer => {
                api::start_server(enclosure, &hall, binaries, ADDRESS)?;
                api::until_server_ready(&self.kubectl, enclosure, &hall, binaries, ADDRESS)
            }
            Process::ControllerManager => self.start_controllers(&hall),
            Process::Scheduler => self.start_scheduler(&hall),
            Process::Containerd(node) => {
                let node = self.node(node)?;
                node.start_containerd(enclosure, binaries)?;
                node.until_containerd_answers(enclosure, binaries)
            }
            Process::Kubelet(node) => self.node(node)?.start_kubelet(enclosure, binaries),
        }
    }

    /// A new namespace in which pods can be made: one that has its service account.
    ///
    /// # Errors
    /// What the API server says.
    pub fn make_namespace(&self, name: &str) -> anyhow::Result<()> {
        self.kubectl.run(&["create", "namespace", name])?;
        until(NODES_READY, format!("{name} has its service account"), || {
            self.kubectl
                .run(&["get", "serviceaccount", "default", "--namespace", name])
                .map(|_| Some(()))
        })
    }

    /// Waits until all nodes are Ready.
    ///
    /// # Errors
    /// When they are not within the deadline.
    pub fn until_ready(&self, deadline: Duration) -> anyhow::Result<()> {
        until(deadline, "all nodes are Ready", || {
            let said = self.kubectl.run(&["get", "nodes", "--no-headers"])?;
            let ready = said
                .lines()
                .filter(|line| line.split_whitespace().nth(1) == Some("Ready"));
            Ok((ready.count() == self.nodes.len()).then_some(()))
        })
    }

    fn kubectl_of(enclosure: &Enclosure, binaries: &Binaries) -> Kubectl {
        let kubeconfig = enclosure.folder().join("admin.kubeconfig");
        Kubectl::new(
            binaries.get("kubectl"),
            Some(enclosure.hall().network()),
            kubeconfig,
        )
    }

    fn node(&self, name: &str) -> anyhow::Result<&Node> {
        let found = self.nodes.iter().find(|node| node.name == name);
        found.with_context(|| format!("there is no node {name}"))
    }

    fn bring_up(&mut self, names: &[String]) -> anyhow::Result<()> {
        let hall = self.enclosure.hall();
        pki::make(self.enclosure.folder())?;
        let mut users = vec![
            User::new("admin", "admin", "system:masters"),
            User::new("controllers", "system:kube-controller-manager", ""),
            User::new("scheduler", "system:kube-scheduler", ""),
        ];
        users.extend(names.iter().map(|name| {
            User::new(
                format!("node-{name}"),
                format!("system:node:{name}"),
                "system:nodes",
            )
        }));
        pki::users(self.enclosure.folder(), &ADDRESS.url(), &users)?;
        self.hall_network(&hall)?;
        api::start_etcd(&self.enclosure, &hall, &self.binaries, ADDRESS)?;
        api::start_server(&self.enclosure, &hall, &self.binaries, ADDRESS)?;
        for (index, name) in names.iter().enumerate() {
            let node = Node::new(&self.enclosure, name, index)?;
            self.connect(&hall, &node, names.len())?;
            node.start_containerd(&self.enclosure, &self.binaries)?;
            self.nodes.push(node);
        }
        api::until_server_ready(&self.kubectl, &self.enclosure, &hall, &self.binaries, ADDRESS)?;
        self.start_controllers(&hall)?;
        self.start_scheduler(&hall)?;
        let pause = self.binaries.word("pause.tar");
        for node in &self.nodes {
            node.until_containerd_answers(&self.enclosure, &self.binaries)?;
            node.ctr(&self.enclosure, &self.binaries, &["images", "import", &pause])?;
            node.start_kubelet(&self.enclosure, &self.binaries)?;
        }
        self.until_ready(NODES_READY)?;
        let record = Record {
            nodes: names.to_vec(),
            binaries: self.binaries.path_of_all().to_path_buf(),
        };
        fs::write(
            self.enclosure.folder().join("cluster.json"),
            serde_json::to_string(&record)?,
        )?;
        Ok(())
    }

    /// The network of the control plane: a bridge to which the nodes are connected.
    fn hall_network(&self, hall: &Room) -> anyhow::Result<()> {
        self.ip(
            hall,
            &[
                "link set lo up".to_owned(),
                "link add fabric type bridge".to_owned(),
                format!("addr add {}/24 dev fabric", ADDRESS.ip),
                "link set fabric up".to_owned(),
            ],
        )
    }

    /// Connects a node with the control plane and with the pods of all others.
    fn connect(&self, hall: &Room, node: &Node, nodes: usize) -> anyhow::Result<()> {
        let address = Node::address(node.index);
        let port = format!("node{}", node.index);
        // Made on the node: there it can be told which namespace the other end belongs to.
        self.ip(
            hall,
            &[format!("link add {port} type veth peer name up{}", node.index)],
        )?;
        let holder = self.enclosure.holder_of(&node.name)?;
        self.ip(
            hall,
            &[
                format!("link set dev {port} master fabric up"),
                format!("link set dev up{} netns {holder} name eth0", node.index),
                format!("route add {} via {address}", Node::pods(node.index)),
            ],
        )?;
        let mut lines = vec![
            format!("addr add {address}/24 dev eth0"),
            "link set eth0 up".to_owned(),
            format!("route add default via {}", ADDRESS.ip),
        ];
        let others = (0..nodes).filter(|index| *index != node.index);
        lines.extend(
            others.map(|index| format!("route add {} via {}", Node::pods(index), Node::address(index))),
        );
        self.ip(&node.room, &lines)?;
        // The service `kubernetes`, which the client of every pod uses, without kube-proxy.
        let script = format!(
            "set -e
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
for chain in PREROUTING OUTPUT; do
  iptables -w -t nat -A $chain -d 10.96.0.1 -p tcp --dport 443 -j DNAT --to {}:{}
done",
            ADDRESS.ip, ADDRESS.port
        );
        program::run(
            self.enclosure.command(&node.room, "sh").args(["-c", &script]),
            None,
        )
        .map(drop)
    }

    fn ip(&self, room: &Room, lines: &[String]) -> anyhow::Result<()> {
        let mut command = self.enclosure.command(room, "ip");
        program::run(command.args(["-batch", "-"]), Some(&lines.join("\n"))).map(drop)
    }

    fn start_controllers(&self, hall: &Room) -> anyhow::Result<()> {
        let folder = self.enclosure.folder();
        let file = |flag: &str, name: &str| format!("--{flag}={}", folder.join(name).display());
        let more = [
            file("service-account-private-key-file", "accounts.key"),
            file("root-ca-file", "ca.crt"),
            "--use-service-account-credentials".to_owned(),
            // A lost node is marked soon.
            "--node-monitor-grace-period=20s".to_owned(),
        ];
        self.start_client(
            hall,
            Process::ControllerManager,
            "kube-controller-manager",
            "controllers",
            &more,
        )
    }

    fn start_scheduler(&self, hall: &Room) -> anyhow::Result<()> {
        self.start_client(hall, Process::Scheduler, "kube-scheduler", "scheduler", &[])
    }

    fn start_client(
        &self,
        hall: &Room,
        process: Process<'_>,
        program: &str,
        user: &str,
        more: &[String],
    ) -> anyhow::Result<()> {
        let kubeconfig = self.enclosure.folder().join(format!("{user}.kubeconfig"));
        let mut argv = vec![self.binaries.word(program)];
        for flag in [
            "kubeconfig",
            "authentication-kubeconfig",
            "authorization-kubeconfig",
        ] {
            argv.push(format!("--{flag}={}", kubeconfig.display()));
        }
        argv.extend([
            "--leader-elect=false".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
        ]);
        argv.extend_from_slice(more);
        self.enclosure
            .start(hall, &process.name(), &argv, &self.binaries.path())
    }
}

impl Process<'_> {
    fn name(self) -> String {
        match self {
            Self::Etcd => api::ETCD.to_owned(),
            Self::ApiServer => api::SERVER.to_owned(),
            Self::ControllerManager => "controllers".to_owned(),
            Self::Scheduler => "scheduler".to_owned(),
            Self::Containerd(node) => format!("{node}-containerd"),
            Self::Kubelet(node) => format!("{node}-kubelet"),
        }
    }
}
