//! Workloads as pods: made by kubelet and the bridge plugin, registered as a CNI plugin that knows Holdfast does it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_tests::rtnl::Rtnl;
use holdfast_tests::traffic::Producer;
use holdfast_tests::{Space, until};
use serde_json::Value;

use crate::ground::{Ground, NAMESPACE};

/// Pods start within this, on a machine that does much else.
pub(crate) const STARTED: Duration = Duration::from_secs(60);

/// What a workload shall be: one incarnation after another under one name.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// Name of the pod and of its attachment.
    pub(crate) name: &'static str,
    /// Where it runs.
    pub(crate) node: &'static str,
    /// What policies select it by.
    pub(crate) app: &'static str,
}

impl Workload {
    /// Its host-side interface.
    pub(crate) fn interface(&self) -> String {
        format!("hf{}", self.name)
    }

    /// The attachment of this incarnation.
    pub(crate) fn attachment(&self, incarnation: &str, address: Option<IpAddr>) -> String {
        let (Self { name, node, app }, interface) = (self, self.interface());
        let addresses = address.map(|address| address.to_string()).unwrap_or_default();
        format!(
            "apiVersion: holdfast.dev/v1alpha1\nkind: Attachment\n\
             metadata: {{namespace: {NAMESPACE}, name: {name}, labels: {{app: {app}}}}}\n\
             spec: {{node: {node}, interface: {interface}, identity: {incarnation}, addresses: [{addresses}]}}\n"
        )
    }

    /// Makes the pod and waits until it runs. Nobody has registered it yet.
    pub(crate) fn create(&self, ground: &Ground) -> anyhow::Result<Pod> {
        let Self { name, node, .. } = self;
        let kubectl = ground.kubectl();
        kubectl.feed(
            &["apply", "-f", "-"],
            &format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{namespace: {NAMESPACE}, name: {name}}}\n\
                 spec:\n  nodeName: {node}\n  terminationGracePeriodSeconds: 0\n  automountServiceAccountToken: false\n  \
                 tolerations: [{{operator: Exists}}]\n  \
                 containers: [{{name: pause, image: \"localhost/pause:1\", imagePullPolicy: Never}}]\n"
            ),
        )?;
        let address = until(STARTED, format!("{name} runs"), || {
            let said = kubectl.run(&["get", "pod", name, "--namespace", NAMESPACE, "-o", "json"])?;
            let pod: Value = serde_json::from_str(&said)?;
            let running = pod["status"]["phase"] == "Running";
            Ok(pod["status"]["podIP"]
                .as_str()
                .filter(|_| running)
                .map(str::to_owned))
        })?;
        let space = Space::of_file(&ground.cluster().pod_network(node, NAMESPACE, name)?)?;
        let pod = Pod {
            workload: self.clone(),
            address: address.parse()?,
            space,
        };
        pod.name_interface(ground)?;
        Ok(pod)
    }

    /// Deletes the pod and waits until it is gone, with its interface.
    pub(crate) fn delete(&self, ground: &Ground) -> anyhow::Result<()> {
        ground
            .kubectl()
            .run(&["delete", "pod", self.name, "--namespace", NAMESPACE])
            .map(drop)
    }
}

/// One that runs.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) workload: Workload,
    pub(crate) address: IpAddr,
    /// Its network namespace.
    pub(crate) space: Space,
}

impl Pod {
    /// Gives the plugin's interface on the node the name that the attachment has.
    fn name_interface(&self, ground: &Ground) -> anyhow::Result<()> {
        let node = self.workload.node;
        let inside = self.space.inside(|| {
            let said = std::process::Command::new("ip")
                .args(["-json", "link", "show", "eth0"])
                .output()?;
            Ok(serde_json::from_slice::<Value>(&said.stdout)?)
        })?;
        let index = inside[0]["link_index"].as_u64().context("eth0 is no veth")?;
        let said = ground.cluster().on(node, &["ip", "-json", "link"])?;
        let devices: Vec<Value> = serde_json::from_slice(&said.stdout)?;
        let outside = devices
            .iter()
            .find(|device| device["ifindex"].as_u64() == Some(index))
            .and_then(|device| device["ifname"].as_str())
            .with_context(|| format!("{node} has no device {index}"))?;
        let wanted = self.workload.interface();
        let renamed = ground
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
    pub(crate) fn register(&self, ground: &Ground, incarnation: &str) -> anyhow::Result<()> {
        ground.holdfast(
            self.workload.node,
            &[
                "attachment",
                "register",
                "--interface",
                &self.workload.interface(),
                "--identity",
                incarnation,
            ],
        )
    }

    /// Answers with this number at addresses of services, which become its own.
    pub(crate) fn serve(&self, number: u32, at: &[SocketAddr]) -> anyhow::Result<Producer> {
        let mut devices = Rtnl::open(&self.space)?;
        for address in at {
            devices.address("lo", address.ip(), 32)?;
        }
        Producer::serve(&self.space, number, at)
    }
}
