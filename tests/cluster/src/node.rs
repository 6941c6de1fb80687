//! One node of a cluster: namespaces, containerd, kubelet, and the bridge plugin's settings.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;

use crate::binaries::Binaries;
use crate::enclosure::{Enclosure, Room};
use crate::program;
use crate::wait::until;

/// The image of the process that holds a pod's namespaces.
pub(crate) const PAUSE: &str = "localhost/pause:1";

const CONTAINERD_READY: Duration = Duration::from_secs(30);

/// What a node's own mounts hide of the machine, and give instead. `$own` is the node's folder.
///
/// The control groups stay the machine's, below a /sys of the node's network. Everything is shared at the end, so that
/// what kubelet and plugins mount is seen in pods that ask for it.
const MOUNTS: &str = "
mkdir -p $own/lib/kubelet $own/lib/containerd $own/log $own/groups
mount --rbind /sys/fs/cgroup $own/groups
mount -t sysfs node /sys
mount --rbind $own/groups /sys/fs/cgroup
mount -t bpf node /sys/fs/bpf
mount -t tmpfs -o mode=0755 node /run
mount --bind $own/lib /var/lib
mount --bind $own/log /var/log
mount --make-rshared /
ip link set lo up
";

/// One node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Its place among the nodes: the last part of its addresses.
    pub(crate) index: usize,
    pub(crate) room: Room,
    folder: PathBuf,
}

impl Node {
    pub(crate) fn address(index: usize) -> String {
        format!("10.77.0.{}", 10 + index)
    }

    /// The addresses of its pods.
    pub(crate) fn pods(index: usize) -> String {
        format!("10.244.{index}.0/24")
    }

    /// Makes its namespaces and writes its settings.
    pub(crate) fn new(enclosure: &Enclosure, name: &str, index: usize) -> anyhow::Result<Self> {
        let folder = enclosure.folder().join(name);
        fs::create_dir(&folder)?;
        let room = enclosure.room(name, &format!("own={}{MOUNTS}", folder.display()))?;
        let node = Self {
            name: name.to_owned(),
            index,
            room,
            folder,
        };
        node.write_settings(enclosure)?;
        Ok(node)
    }

    /// One that was made before.
    pub(crate) fn open(enclosure: &Enclosure, name: &str, index: usize) -> anyhow::Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            index,
            room: enclosure.room_of(name)?,
            folder: enclosure.folder().join(name),
        })
    }

    pub(crate) fn containerd(&self) -> String {
        format!("{}-containerd", self.name)
    }

    pub(crate) fn kubelet(&self) -> String {
        format!("{}-kubelet", self.name)
    }

    pub(crate) fn start_containerd(&self, enclosure: &Enclosure, binaries: &Binaries) -> anyhow::Result<()> {
        let settings = self.folder.join("containerd.toml");
        let argv = [
            binaries.word("containerd"),
            "--config".to_owned(),
            settings.to_string_lossy().into_owned(),
        ];
        enclosure.start(&self.room, &self.containerd(), &argv, &binaries.path())
    }

    pub(crate) fn until_containerd_answers(
        &self,
        enclosure: &Enclosure,
        binaries: &Binaries,
    ) -> anyhow::Result<()> {
        until(
            CONTAINERD_READY,
            format!("containerd of {} answers", self.name),
            || self.ctr(enclosure, binaries, &["version"]).map(|_| Some(())),
        )
    }

    pub(crate) fn start_kubelet(&self, enclosure: &Enclosure, binaries: &Binaries) -> anyhow::Result<()> {
        let kubeconfig = enclosure.folder().join(format!("node-{}.kubeconfig", self.name));
        let argv = [
            binaries.word("kubelet"),
            format!("--config={}", self.folder.join("kubelet.json").display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={}", Self::address(self.index)),
        ];
        enclosure.start(&self.room, &self.kubelet(), &argv, &binaries.path())
    }

    /// Asks its containerd.
    pub(crate) fn ctr(
        &self,
        enclosure: &Enclosure,
        binaries: &Binaries,
        words: &[&str],
    ) -> anyhow::Result<String> {
        let mut command = enclosure.command(&self.room, binaries.get("ctr"));
        command.args(["--namespace", "k8s.io"]).args(words);
        program::run(&mut command, None)
    }

    /// Runs a command on it, whatever it ends with.
    pub(crate) fn output(&self, enclosure: &Enclosure, argv: &[&str]) -> anyhow::Result<Output> {
        program::output(&mut self.command(enclosure, argv)?, None)
    }

    /// A command on it.
    pub(crate) fn command(&self, enclosure: &Enclosure, argv: &[&str]) -> anyhow::Result<Command> {
        let (program, rest) = argv.split_first().context("no command")?;
        let mut command = enclosure.command(&self.room, program);
        command.args(rest);
        Ok(command)
    }

    fn write_settings(&self, enclosure: &Enclosure) -> anyhow::Result<()> {
        let groups = control_groups(enclosure, &self.name)?;
        let plugins = self.folder.join("cni");
        fs::create_dir(&plugins)?;
        fs::write(self.folder.join("containerd.toml"), containerd_settings(&plugins))?;
        let bridge = json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [{
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": Self::pods(self.index)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }],
        });
        fs::write(plugins.join("10-pods.conflist"), bridge.to_string())?;
        let kubelet = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "address": Self::address(self.index),
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": enclosure.folder().join("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": groups,
            "failCgroupV1": false,
            "failSwapOn": false,
            "healthzPort": 0,
            "makeIPTablesUtilChains": false,
            "resolvConf": "",
            // A disk that is full of something else is no reason to throw pods out.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "50Mi"},
            "syncFrequency": "5s",
            "nodeStatusUpdateFrequency": "5s",
        });
        fs::write(self.folder.join("kubelet.json"), kubelet.to_string())?;
        Ok(())
    }
}

/// Rights, groups and weights that this machine may not have are not asked for: no AppArmor, no negative
/// `oom_score_adj` (which needs CAP_SYS_RESOURCE).
fn containerd_settings(plugins: &Path) -> String {
    format!(
        r#"version = 3
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "{plugins}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "/usr/sbin/runc"
  SystemdCgroup = false
"#,
        plugins = plugins.display()
    )
}

/// Makes the control group under which a node keeps those of its pods, in every hierarchy that can be written; gives
/// its name. The caretaker removes what has the name of the enclosure.
fn control_groups(enclosure: &Enclosure, node: &str) -> anyhow::Result<String> {
    let cluster = enclosure
        .folder()
        .file_name()
        .context("a folder without a name")?;
    let root = Path::new("/sys/fs/cgroup");
    let unified = root.join("cgroup.controllers").is_file();
    let hierarchies = if unified {
        vec![root.to_path_buf()]
    } else {
        fs::read_dir(root)?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .collect()
    };
    let mut made = 0;
    for hierarchy in hierarchies {
        let above = hierarchy.join(cluster);
        let group = above.join(node);
        // A link to a hierarchy, or one that only its mounter may write.
        if hierarchy.is_symlink() || fs::create_dir_all(&group).is_err() {
            continue;
        }
        made += 1;
        if unified {
            for parent in [&hierarchy, &above] {
                pass_controllers_on(parent)?;
            }
        }
        // A new cpuset has neither processors nor memory, and takes no process.
        for parent_and_child in [[&hierarchy, &above], [&above, &group]] {
            for name in ["cpuset.cpus", "cpuset.mems"] {
                let [parent, child] = parent_and_child.map(|folder| folder.join(name));
                if !unified && parent.is_file() {
                    fs::write(child, fs::read_to_string(parent)?.trim())?;
                }
            }
        }
    }
    ensure!(made > 0, "no control groups under {}", root.display());
    Ok(format!("/{}/{node}", cluster.to_string_lossy()))
}

/// Lets groups below this one have all controllers.
fn pass_controllers_on(group: &Path) -> anyhow::Result<()> {
    let controllers = fs::read_to_string(group.join("cgroup.controllers"))?;
    for controller in controllers.split_whitespace() {
        fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"))
            .with_context(|| format!("cannot pass {controller} on in {}", group.display()))?;
    }
    Ok(())
}
