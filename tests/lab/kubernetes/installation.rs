//! A cluster with Holdfast on it, installed as README says.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_cluster::{Cluster, Kubectl};
use serde_json::Value;

use crate::told::Metrics;
use crate::{codegen, node};

/// Where the workloads and their policies are.
pub const NAMESPACE: &str = "shop";
/// Where Holdfast is.
pub const SYSTEM: &str = "holdfast-system";
/// What installs it, from the root of the repository.
pub const OVERLAY: &str = "deploy/kustomize/overlays/dev";
/// What must be rolled out then.
pub const PARTS: [&str; 2] = ["daemonset/holdfast-agent", "deployment/holdfast-controller"];

/// Rolled out within this, on a machine that does much else.
const ROLLED_OUT: Duration = Duration::from_secs(120);

/// See the module.
#[derive(Debug)]
pub struct Installation {
    cluster: Cluster,
    agent: PathBuf,
}

impl Installation {
    /// Of this cluster, on which nothing is installed yet.
    ///
    /// # Errors
    /// When the agent is not built.
    pub fn of(cluster: Cluster) -> anyhow::Result<Self> {
        let agent = node::agent_binary()?;
        Ok(Self { cluster, agent })
    }

    /// Installs this image on it, and makes the namespace of the workloads.
    ///
    /// # Errors
    /// What the cluster says, and its pods.
    pub fn install(&self, image: &Path) -> anyhow::Result<()> {
        self.cluster.load(image)?;
        let overlay = codegen::in_repository(OVERLAY);
        self.kubectl()
            .run(&["apply", "-k", overlay.to_str().context("no text")?])?;
        for part in PARTS {
            self.rolled_out(part)?;
        }
        self.cluster.make_namespace(NAMESPACE)
    }

    /// Waits until every pod of it is new and ready.
    ///
    /// # Errors
    /// When they are not in time; with what they say.
    pub fn rolled_out(&self, what: &str) -> anyhow::Result<()> {
        let timeout = format!("--timeout={}s", ROLLED_OUT.as_secs());
        let said = self
            .kubectl()
            .run(&["rollout", "status", what, "--namespace", SYSTEM, &timeout]);
        said.map(drop).with_context(|| self.pods_of_ours())
    }

    /// What our pods say, for an error.
    #[must_use]
    pub fn pods_of_ours(&self) -> String {
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

    /// The cluster itself.
    #[must_use]
    pub const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// As its administrator.
    #[must_use]
    pub const fn kubectl(&self) -> &Kubectl {
        self.cluster.kubectl()
    }

    /// Applies this.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn apply(&self, text: &str) -> anyhow::Result<()> {
        self.kubectl().feed(&["apply", "-f", "-"], text).map(drop)
    }

    /// Runs our command on a node, as a CNI plugin there does.
    ///
    /// # Errors
    /// When it does not succeed.
    pub fn holdfast(&self, node: &str, words: &[&str]) -> anyhow::Result<()> {
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
    ///
    /// # Errors
    /// When there is none.
    pub fn agent_pod(&self, node: &str) -> anyhow::Result<String> {
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
    ///
    /// # Errors
    /// What kubectl says.
    pub fn restarts(&self) -> anyhow::Result<u64> {
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
    ///
    /// # Errors
    /// When it does not answer.
    pub fn metrics(&self, node: &str) -> anyhow::Result<Metrics> {
        let pod = self.agent_pod(node)?;
        let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{pod}:9643/proxy/metrics");
        Ok(Metrics::parse(&self.kubectl().run(&["get", "--raw", &path])?))
    }

    /// The acknowledgments of a node: what its reports say in `programmed` and in `others`, by uid of the policy.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn acknowledged(&self, node: &str, uid: &str) -> anyhow::Result<Vec<String>> {
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
    ///
    /// # Errors
    /// When there is no agent.
    pub fn error_lines(&self, node: &str) -> anyhow::Result<Vec<String>> {
        let pod = self.agent_pod(node)?;
        let log = self.kubectl().run(&["logs", "--namespace", SYSTEM, &pod])?;
        Ok(log
            .lines()
            .filter(|line| line.contains("ERROR") || line.contains("\"level\":\"error\""))
            .map(str::to_owned)
            .collect())
    }

    /// The token that the agent's pod on a node has.
    ///
    /// # Errors
    /// When it has none.
    pub fn token(&self, node: &str) -> anyhow::Result<String> {
        let pod = self.agent_pod(node)?;
        let path = "var/run/secrets/kubernetes.io/serviceaccount/token";
        let root = self.cluster.pod_root(node, SYSTEM, &pod)?;
        std::fs::read_to_string(root.join(path)).context("the pod has no token")
    }

    /// `holdfast wait` for a policy as it is now, through the API server.
    ///
    /// # Errors
    /// When it does not pass in time.
    pub fn wait(&self, policy: &str) -> anyhow::Result<()> {
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

    /// Lets the cluster live on when this process ends.
    ///
    /// # Errors
    /// When it has ended already.
    pub fn outlive(mut self) -> anyhow::Result<()> {
        self.cluster.outlive()
    }

    /// Takes everything down.
    ///
    /// # Errors
    /// When something is left.
    pub fn down(self) -> anyhow::Result<()> {
        self.cluster.down()
    }
}
