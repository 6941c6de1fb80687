//! Workloads as pods: made by kubelet and the bridge plugin, registered as a CNI plugin that knows Holdfast does it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::installation::{Installation, NAMESPACE};
use crate::rtnl::Rtnl;
use crate::traffic::Producer;
use crate::{Space, until};

/// Pods start within this, on a machine that does much else.
const STARTED: Duration = Duration::from_secs(60);

/// What a workload shall be: one incarnation after another under one name.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Name of the pod and of its attachment.
    pub name: &'static str,
    /// Where it runs.
    pub node: &'static str,
    /// What policies select it by.
    pub app: &'static str,
}

impl Workload {
    /// Its host-side interface.
    #[must_use]
    pub fn interface(&self) -> String {
        format!("hf{}", self.name)
    }

    /// The attachment of this incarnation.
    #[must_use]
    pub fn attachment(&self, incarnation: &str, address: Option<IpAddr>) -> String {
        let (Self { name, node, app }, interface) = (self, self.interface());
        let addresses = address.map(|address| address.to_string()).unwrap_or_default();
        format!(
            "apiVersion: holdfast.dev/v1alpha1\nkind: Attachment\n\
             metadata: {{namespace: {NAMESPACE}, name: {name}, labels: {{app: {app}}}}}\n\
             spec: {{node: {node}, interface: {interface}, identity: {incarnation}, addresses: [{addresses}]}}\n"
        )
    }

    /// Its pod.
    #[must_use]
    pub fn manifest(&self) -> String {
        let Self { name, node, .. } = self;
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: {NAMESPACE}, name: {name}}}\n\
             spec:\n  nodeName: {node}\n  terminationGracePeriodSeconds: 0\n  automountServiceAccountToken: false\n  \
             tolerations: [{{operator: Exists}}]\n  \
             containers: [{{name: pause, image: \"localhost/pause:1\", imagePullPolicy: Never}}]\n"
        )
    }

    /// What registers this incarnation of it on its node.
    #[must_use]
    pub fn registration(&self, incarnation: &str) -> String {
        let interface = self.interface();
        format!("attachment register --interface {interface} --identity {incarnation}")
    }

    /// Makes the pod and waits until it runs. Nobody has registered it yet.
    ///
    /// # Errors
    /// When it does not run in time.
    pub fn create(&self, installation: &Installation) -> anyhow::Result<Pod> {
        installation.apply(&self.manifest())?;
        self.running(installation)
    }

    /// Waits until the pod that was made runs, and gives its interface the name that the attachment has.
    ///
    /// # Errors
    /// When it does not run in time.
    pub fn running(&self, installation: &Installation) -> anyhow::Result<Pod> {
        let Self { name, node, .. } = self;
        let kubectl = installation.kubectl();
        let address = until(STARTED, format!("{name} runs"), || {
            let said = kubectl.run(&["get", "pod", name, "--namespace", NAMESPACE, "-o", "json"])?;
            let pod: Value = serde_json::from_str(&said)?;
            let running = pod["status"]["phase"] == "Running";
            Ok(pod["status"]["podIP"]
                .as_str()
                .filter(|_| running)
                .map(str::to_owned))
        })?;
        let space = Space::of_file(&installation.cluster().pod_network(node, NAMESPACE, name)?)?;
        let pod = Pod {
            workload: self.clone(),
            address: address.parse()?,
            space,
        };
        pod.name_interface(installation)?;
        Ok(pod)
    }

    /// Deletes the pod and waits until it is gone, with its interface.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn delete(&self, installation: &Installation) -> anyhow::Result<()> {
        installation
            .kubectl()
            .run(&["delete", "pod", self.name, "--namespace", NAMESPACE])
            .map(drop)
    }
}

/// One that runs.
#[derive(Debug)]
pub struct Pod {
    /// What it was to be.
    pub workload: Workload,
    /// What the plugin gave it.
    pub address: IpAddr,
    /// Its network namespace.
    pub space: Space,
}

impl Pod {
    /// Gives the plugin's interface on the node the name that the attachment has.
    fn name_interface(&self, installation: &Installation) -> anyhow::Result<()> {
        let node = self.workload.node;
        let inside = self.space.inside(|| {
            let said = std::process::Command::new("ip")
                .args(["-json", "link", "show", "eth0"])
                .output()?;
            Ok(serde_json::from_slice::<Value>(&said.stdout)?)
        })?;
        let index = inside[0]["link_index"].as_u64().context("eth0 is no veth")?;
        let said = installation.cluster().on(node, &["ip", "-json", "link"])?;
        let devices: Vec<Value> = serde_json::from_slice(&said.stdout)?;
        let outside = devices
            .iter()
            .find(|device| device["ifindex"].as_u64() == Some(index))
            .and_then(|device| device["ifname"].as_str())
            .with_context(|| format!("{node} has no device {index}"))?;
        let wanted = self.workload.interface();
        let renamed = installation
            .cluster()
            .on(node, &["ip", "link", "set", "dev", outside, "name", &wanted])?;
        ensure!(
            renamed.status.success(),
            "{outside} is not renamed: {}",
            String::from_utf8_lossy(&renamed.stderr)
        );
        Ok(())
    }

    /// Registers this incarnation.
    ///
    /// # Errors
    /// What our command says.
    pub fn register(&self, installation: &Installation, incarnation: &str) -> anyhow::Result<()> {
        let words = self.workload.registration(incarnation);
        installation.holdfast(self.workload.node, &words.split_whitespace().collect::<Vec<_>>())
    }

    /// Answers with this number at addresses of services, which become its own.
    ///
    /// # Errors
    /// When it cannot have them.
    pub fn serve(&self, number: u32, at: &[SocketAddr]) -> anyhow::Result<Producer> {
        let mut devices = Rtnl::open(&self.space)?;
        for address in at {
            devices.address("lo", address.ip(), 32)?;
        }
        Producer::serve(&self.space, number, at)
    }
}
