//! The cluster with Holdfast on it, installed as README says.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_tests::kubernetes::{Cluster, Kubectl, Options, agent_image, cluster};
use holdfast_tests::told::Metrics;
use holdfast_tests::{codegen, node};
use serde_json::Value;

/// Where the workloads and their policies are.
pub(crate) const NAMESPACE: &str = "shop";
/// Where Holdfast is.
pub(crate) const SYSTEM: &str = "holdfast-system";

/// Rolled out within this, on a machine that does much else.
const ROLLED_OUT: Duration = Duration::from_secs(120);

pub(crate) struct Ground {
    cluster: Cluster,
    agent: PathBuf,
    folder: tempfile::TempDir,
}

impl Ground {
    /// A new cluster of two nodes, Holdfast on both of them.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let cluster = cluster(&Options::default())?;
        let folder = tempfile::Builder::new()
            .prefix("hf-e2e-")
            .tempdir_in("/var/tmp")?;
        let agent = node::agent_binary()?;
        let ground = Self {
            cluster,
            agent,
            folder,
        };
        ground.install().context("Holdfast is not installed")?;
        ground.cluster.make_namespace(NAMESPACE)?;
        Ok(ground)
    }

    fn install(&self) -> anyhow::Result<()> {
        self.cluster.load(&agent_image(self.folder.path())?)?;
        let overlay = codegen::in_repository("deploy/kustomize/overlays/dev");
        self.kubectl()
            .run(&["apply", "-k", overlay.to_str().context("no text")?])?;
        self.rolled_out("daemonset/holdfast-agent")?;
        self.rolled_out("deployment/holdfast-controller")
    }

    /// Waits until every pod of it is new and ready.
    pub(crate) fn rolled_out(&self, what: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", ROLLED_OUT.as_secs());
        let said = self
            .kubectl()
            .run(&["rollout", "status", what, "--namespace", SYSTEM, &timeout]);
        said.map(drop).with_context(|| self.pods_of_ours())
    }

    /// What our pods say, for an error.
    fn pods_of_ours(&self) -> String {
        let get = |words: &[&str]| {
            self.kubectl()
                .run(words)
                .unwrap_or_else(|error| error.to_string())
        };
        let pods = get(&["get", "pods", "--namespace", SYSTEM, "-o", "wide"]);
        let events = get(&["get", "events", "--namespace", SYSTEM]);
        let last = |app: &str| get(&["logs", "--namespace", SYSTEM, app, "--tail=20"]);
        format!(
            "{pods}\n{events}\n{}\n{}",
            last("daemonset/holdfast-agent"),
            last("deployment/holdfast-controller")
        )
    }

    pub(crate) const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    pub(crate) const fn kubectl(&self) -> &Kubectl {
        self.cluster.kubectl()
    }

    /// Applies this.
    pub(crate) fn apply(&self, text: &str) -> anyhow::Result<()> {
        self.kubectl().feed(&["apply", "-f", "-"], text).map(drop)
    }

    /// Runs our command on a node, as a CNI plugin there does.
    pub(crate) fn holdfast(&self, node: &str, words: &[&str]) -> anyhow::Result<()> {
        let agent = self.agent.to_str().context("no text")?;
        let argv: Vec<&str> = [agent].into_iter().chain(words.iter().copied()).collect();
        let said = self.cluster.on(node, &argv)?;
        ensure!(
            said.status.success(),
            "{words:?} on {node}: {}{}",
            String::from_utf8_lossy(&said.stdout),
            String::from_utf8_lossy(&said.stderr)
        );
        Ok(())
    }

    /// The pod of the agent on a node.
    pub(crate) fn agent_pod(&self, node: &str) -> anyhow::Result<String> {
        let selector = format!("--field-selector=spec.nodeName={node}");
        let said = self.kubectl().run(&[
            "get",
            "pods",
            "--namespace",
            SYSTEM,
            &selector,
            "--selector=app.kubernetes.io/name=holdfast-agent",
            "-o",
            "name",
        ])?;
        let pod = said.trim().strip_prefix("pod/").context("no agent there")?;
        Ok(pod.to_owned())
    }

    /// How often the containers of our pods were started again.
    pub(crate) fn restarts(&self) -> anyhow::Result<u64> {
        let said = self
            .kubectl()
            .run(&["get", "pods", "--namespace", SYSTEM, "-o", "json"])?;
        let pods: Value = serde_json::from_str(&said)?;
        let items = pods["items"].as_array().context("no list")?.iter();
        let statuses = items.flat_map(|pod| {
            pod["status"]["containerStatuses"]
                .as_array()
                .into_iter()
                .flatten()
        });
        Ok(statuses
            .filter_map(|status| status["restartCount"].as_u64())
            .sum())
    }

    /// What the agent of a node exports.
    pub(crate) fn metrics(&self, node: &str) -> anyhow::Result<Metrics> {
        let pod = self.agent_pod(node)?;
        let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{pod}:9643/proxy/metrics");
        Ok(Metrics::parse(&self.kubectl().run(&["get", "--raw", &path])?))
    }

    /// The acknowledgments of a node: what its reports say in `programmed` and in `others`, by uid of the policy.
    pub(crate) fn acknowledged(&self, node: &str, uid: &str) -> anyhow::Result<Vec<String>> {
        let said = self.kubectl().run(&["get", "nodereports", "-o", "json"])?;
        let reports: Value = serde_json::from_str(&said)?;
        let mut found = Vec::new();
        for report in reports["items"].as_array().into_iter().flatten() {
            if report["node"] != node {
                continue;
            }
            found.extend(report["programmed"][uid].as_str().map(str::to_owned));
            let others = report["others"].as_array().into_iter().flatten();
            found.extend(others.filter(|other| other["uid"] == uid).map(Value::to_string));
        }
        Ok(found)
    }

    /// Lines of the agent on a node at level error.
    pub(crate) fn error_lines(&self, node: &str) -> anyhow::Result<Vec<String>> {
        let pod = self.agent_pod(node)?;
        let log = self.kubectl().run(&["logs", "--namespace", SYSTEM, &pod])?;
        Ok(log
            .lines()
            .filter(|line| line.contains("ERROR") || line.contains("\"level\":\"error\""))
            .map(str::to_owned)
            .collect())
    }

    /// The token that the agent's pod on a node has.
    pub(crate) fn token(&self, node: &str) -> anyhow::Result<String> {
        let pod = self.agent_pod(node)?;
        let path = "var/run/secrets/kubernetes.io/serviceaccount/token";
        let root = self.cluster.pod_root(node, SYSTEM, &pod)?;
        std::fs::read_to_string(root.join(path)).context("the pod has no token")
    }

    /// `holdfast wait` for a policy as it is now, through the API server.
    pub(crate) fn wait(&self, policy: &str) -> anyhow::Result<()> {
        let kubeconfig = self.kubectl().kubeconfig();
        let said = Command::new("nsenter")
            .arg(format!("--net={}", self.cluster.network().display()))
            .arg("--")
            .arg(&self.agent)
            .arg("wait")
            .arg(policy)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--timeout=30s")
            .output()?;
        ensure!(
            said.status.success(),
            "holdfast wait {policy}: {}",
            String::from_utf8_lossy(&said.stderr)
        );
        Ok(())
    }

    /// Takes everything down.
    pub(crate) fn down(self) -> anyhow::Result<()> {
        self.cluster.down()
    }
}
