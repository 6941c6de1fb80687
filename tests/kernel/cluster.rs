//! The real Kubernetes that other suites stand on: it gets ready, its pods reach each other, single processes of it can be
//! stopped, and nothing of it stays, however it ends.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use holdfast_tests::kubernetes::{
    Cluster, Content, Image, Options, Process, api_server, api_server_in, cluster,
};
use holdfast_tests::{Space, until};

holdfast_tests::suite! {
    needs [ApiServer];
    api_server_is_ready_and_comes_back,
    api_server_serves_in_a_namespace_of_the_lab,
    nothing_is_left_of_what_is_killed,
    nodes_run_pods_that_reach_each_other,
}

/// Pods start within this, on a machine that does much else.
const PODS: Duration = Duration::from_secs(60);

/// Started anew in this executable, it starts an API server, says so, and waits to be killed.
const VICTIM: &str = "HOLDFAST_TEST_VICTIM";
/// How it says so.
const TOLD: &str = "kubeconfig ";

fn api_server_is_ready_and_comes_back() -> anyhow::Result<()> {
    let api = api_server()?;
    let kubectl = api.kubectl();
    kubectl.feed(&["create", "-f", "-"], &config_map("before"))?;
    api.away()?;
    ensure!(
        kubectl.run(&["get", "configmaps"]).is_err(),
        "a server that is away answers"
    );
    api.again()?;
    let kept = kubectl.run(&["get", "configmap", "before", "--output=name"])?;
    ensure!(kept.trim() == "configmap/before", "{kept}");
    Ok(())
}

fn api_server_serves_in_a_namespace_of_the_lab() -> anyhow::Result<()> {
    let space = Space::network()?;
    let api = api_server_in(&space)?;
    let served =
        |inside: &Space| inside.inside(|| Ok(std::net::TcpStream::connect(("127.0.0.1", 6443)).is_ok()));
    ensure!(served(&space)?, "not served in its namespace");
    ensure!(!served(&Space::network()?)?, "served in another one");
    api.kubectl().run(&["get", "--raw", "/version"])?;
    Ok(())
}

/// Killed by a signal that nothing can answer, a test leaves no process, folder or control group.
fn nothing_is_left_of_what_is_killed() -> anyhow::Result<()> {
    if std::env::var_os(VICTIM).is_some() {
        let api = api_server()?;
        holdfast_tests::say(format_args!("{TOLD}{}", api.kubectl().kubeconfig().display()));
        loop {
            std::thread::park();
        }
    }
    let mut victim = Command::new(std::env::current_exe()?)
        .args(["--exact", "nothing_is_left_of_what_is_killed", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let folder = told_folder(&mut victim)?;
    ensure!(processes_of(&folder)? >= 2, "etcd and the API server do not run");
    victim.kill()?;
    victim.wait()?;
    until(Duration::from_secs(10), "everything is gone", || {
        Ok((processes_of(&folder)? == 0 && !folder.exists()).then_some(()))
    })
}

fn nodes_run_pods_that_reach_each_other() -> anyhow::Result<()> {
    let started = std::time::Instant::now();
    let cluster = cluster(&Options::default())?;
    holdfast_tests::say(format_args!(
        "two nodes Ready after {:.1} s",
        started.elapsed().as_secs_f64()
    ));
    let folder = tempfile::tempdir()?;
    load_busybox(&cluster, folder.path())?;
    let kubectl = cluster.kubectl();
    cluster.make_namespace("smoke")?;
    kubectl.feed(&["apply", "--namespace=smoke", "-f", "-"], PODS_OF_EACH_NODE)?;
    let addresses = until(PODS, "a pod runs on each node", || {
        let said = kubectl.run(&[
            "get",
            "pods",
            "--namespace=smoke",
            "--field-selector=status.phase=Running",
            "--output=jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName} {.status.podIP}{\"\\n\"}{end}",
        ])?;
        let pods: Vec<_> = said
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').map(str::to_owned);
                Some([words.next()?, words.next()?, words.next()?])
            })
            .collect();
        Ok(<[_; 2]>::try_from(pods).ok())
    })?;
    let [[first, node_of_first, _], [_, node_of_second, address]] = &addresses;
    ensure!(
        node_of_first != node_of_second,
        "both pods are on {node_of_first}"
    );
    let answer = until(PODS, "one pod is served by the other", || {
        let url = format!("http://{address}:8080/");
        let said = kubectl.output(
            &["exec", "--namespace=smoke", first, "--", "wget", "-qO-", &url],
            None,
        )?;
        Ok(said.status.success().then_some(said.stdout))
    })?;
    ensure!(answer == b"served\n", "{}", String::from_utf8_lossy(&answer));
    let devices = cluster.on(node_of_first, &["ip", "-brief", "link"])?;
    let devices = String::from_utf8_lossy(&devices.stdout).into_owned();
    ensure!(devices.contains("cni0") && devices.contains("veth"), "{devices}");

    kubelet_is_stopped(&cluster, node_of_first)?;
    let folder = cluster.logs().parent().context("no folder")?.to_path_buf();
    cluster.down()?;
    ensure!(processes_of(&folder)? == 0, "processes are left");
    let groups = groups_of(&folder)?;
    ensure!(groups.is_empty(), "control groups are left: {groups:?}");
    Ok(())
}

/// A pod is killed while its kubelet is stopped, and stays so until that is started again.
fn kubelet_is_stopped(cluster: &Cluster, node: &str) -> anyhow::Result<()> {
    let kubelet = Process::Kubelet(node);
    cluster.stop(kubelet, "TERM")?;
    ensure!(!cluster.is_running(kubelet), "the kubelet runs on");
    let kubectl = cluster.kubectl();
    let pod = kubectl.run(&[
        "get",
        "pods",
        "--namespace=smoke",
        &format!("--field-selector=spec.nodeName={node}"),
        "--output=jsonpath={.items[0].metadata.name}",
    ])?;
    cluster.kill_pod(node, "smoke", &pod, "KILL")?;
    cluster.start_again(kubelet)?;
    until(PODS, "the container is started again", || {
        let query = "--output=jsonpath={.status.containerStatuses[0].restartCount}";
        let said = kubectl.run(&["get", "pod", "--namespace=smoke", &pod, query])?;
        Ok((said == "1").then_some(()))
    })
}

const PODS_OF_EACH_NODE: &str = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: web
        image: localhost/holdfast-busybox:1
        imagePullPolicy: Never
        command: [sh, -c, "mkdir -p /www && echo served > /www/index.html && exec httpd -f -p 8080 -h /www"]
"#;

fn config_map(name: &str) -> String {
    format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}}}")
}

/// The folder of the API server that a victim has started.
fn told_folder(victim: &mut Child) -> anyhow::Result<PathBuf> {
    let stdout = victim.stdout.take().context("no output")?;
    let lines = BufReader::new(stdout).lines().map_while(Result::ok);
    let mut said = lines.filter_map(|line| line.split_once(TOLD).map(|(_, path)| PathBuf::from(path)));
    let kubeconfig = said.next().context("the victim has started nothing")?;
    Ok(kubeconfig.parent().context("no folder")?.to_path_buf())
}

/// How many processes have this folder in their command line.
fn processes_of(folder: &Path) -> anyhow::Result<usize> {
    let folder = folder.to_str().context("no text")?;
    let found = std::fs::read_dir("/proc")?
        .filter_map(Result::ok)
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(folder));
    Ok(found.count())
}

/// Control groups that have the name of this folder.
fn groups_of(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let name = folder.file_name().context("no name")?;
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(root)?
        .filter_map(Result::ok)
        .map(|entry| entry.path());
    let places = hierarchies
        .chain([root.to_path_buf()])
        .map(|place| place.join(name));
    Ok(places.filter(|place| place.exists()).collect())
}

/// What a test runs in pods.
fn load_busybox(cluster: &Cluster, folder: &Path) -> anyhow::Result<()> {
    let applets = ["sh", "mkdir", "echo", "httpd", "wget"];
    let links = applets.map(|name| (Path::new("/bin").join(name), Content::Link("busybox".into())));
    let image = Image {
        name: "localhost/holdfast-busybox:1".to_owned(),
        entrypoint: vec!["/bin/sh".to_owned()],
        user: String::new(),
        environment: vec!["PATH=/bin".to_owned()],
        files: [("/bin/busybox".into(), Content::File("/bin/busybox".into()))]
            .into_iter()
            .chain(links)
            .collect(),
    };
    let archive = folder.join("busybox.tar");
    image.write(&archive, &folder.join("scratch"))?;
    cluster.load(&archive)
}
