//! The real controller at a real API server. What nodes say is written by hand: reports, leases, Node objects.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast::api::hash;
use holdfast_engine::model::Uid;
use holdfast_tests::kubernetes::{ApiServer, Kubectl, api_server};
use holdfast_tests::node::agent_binary;
use holdfast_tests::process::{Log, Running};
use holdfast_tests::{throughout, told, until};
use rustix::process::Signal;
use serde_json::{Value, json};

holdfast_tests::suite! {
    needs [ApiServer];
    f46_a_wait_right_after_an_edit_waits_for_the_edit,
    f26_a_copy_is_true_when_every_node_has_the_origins_generation,
    f27_a_node_without_power_is_unknown_and_a_deleted_one_does_not_count,
    a_new_attachment_is_waited_for,
    of_two_controllers_one_leads_and_the_other_takes_over,
    an_api_server_that_was_away_finds_nothing_rewritten,
    f51_definitions_that_go_are_said_once_and_come_back,
}

/// What is written is read, decided and written within this, on a machine that does much else.
const SOON: Duration = Duration::from_secs(15);
/// A lease that is not renewed has run out, and it has been said.
const SILENT: Duration = Duration::from_secs(75);
/// Between two looks by `kubectl`, which is a process each.
const BETWEEN: Duration = Duration::from_millis(250);
/// Between two renewals of a lease.
const RENEWAL: Duration = Duration::from_secs(8);

// --- the stage -----------------------------------------------------------------------------------------------

struct Stage {
    api: Arc<ApiServer>,
    hearts: Hearts,
}

/// Renews the leases of nodes that live.
struct Hearts {
    living: Arc<Mutex<BTreeMap<String, String>>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hearts {
    fn new(kubectl: Kubectl) -> Self {
        let living: Arc<Mutex<BTreeMap<String, String>>> = Arc::default();
        let end = Arc::new(AtomicBool::new(false));
        let (seen, ends) = (Arc::clone(&living), Arc::clone(&end));
        let thread = std::thread::spawn(move || {
            let mut next = Instant::now();
            while !ends.load(Ordering::Relaxed) {
                if Instant::now() >= next {
                    next = Instant::now() + RENEWAL;
                    let living = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    // While the server is away they cannot.
                    let _ = renew(&kubectl, &living);
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Self {
            living,
            end,
            thread: Some(thread),
        }
    }

    fn set(&self, node: &str, epoch: Option<&str>) {
        let mut living = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        match epoch {
            Some(epoch) => living.insert(node.to_owned(), epoch.to_owned()),
            None => living.remove(node),
        };
    }
}

impl Drop for Hearts {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn renew(kubectl: &Kubectl, living: &BTreeMap<String, String>) -> anyhow::Result<()> {
    if living.is_empty() {
        return Ok(());
    }
    let leases = living.iter().map(|(node, epoch)| {
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"namespace": "holdfast-node-lease", "name": node},
            "spec": {
                "holderIdentity": format!("{node}/{epoch}"), "leaseDurationSeconds": 40,
                "renewTime": now(),
            },
        })
    });
    apply(kubectl, leases.collect())
}

/// As the API server writes it.
fn now() -> String {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let stamp = holdfast::report::rfc3339(i64::try_from(since.as_millis()).unwrap_or_default());
    stamp.replace('Z', "000Z")
}

fn apply(kubectl: &Kubectl, items: Vec<Value>) -> anyhow::Result<()> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    let words = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=test",
        "-f",
        "-",
    ];
    kubectl.feed(&words, &list.to_string()).map(drop)
}

fn policy(name: &str, address: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "RoutePolicy",
        "metadata": {"namespace": "shop", "name": name, "annotations": annotations},
        "spec": {
            "consumers": {"matchLabels": {"app": "web"}},
            "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": address, "protocol": "UDP", "port": 53}],
        },
    })
}

fn attachment(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "Attachment",
        "metadata": {"namespace": "shop", "name": name, "labels": {"app": "web"}},
        "spec": {"node": node, "interface": format!("hf{name}"), "identity": format!("id-{name}")},
    })
}

impl Stage {
    /// A server with our definitions, and nodes that live, each with one consumer `web-NODE`.
    fn new(nodes: &[&str]) -> anyhow::Result<Self> {
        let api = Arc::new(api_server()?);
        let stage = Self {
            hearts: Hearts::new(api.kubectl().clone()),
            api,
        };
        stage.define()?;
        let namespaces = ["shop", "holdfast-system", "holdfast-node-lease"]
            .map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
        apply(stage.kubectl(), namespaces.into())?;
        for node in nodes {
            let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
            apply(
                stage.kubectl(),
                vec![object, attachment(&format!("web-{node}"), node)],
            )?;
            stage.hearts.set(node, Some("e1"));
        }
        Ok(stage)
    }

    fn define(&self) -> anyhow::Result<()> {
        let crds = Command::new(agent_binary()?).arg("crds").output()?;
        ensure!(crds.status.success(), "holdfast crds");
        let text = String::from_utf8(crds.stdout)?;
        self.kubectl()
            .feed(&["apply", "--server-side", "-f", "-"], &text)?;
        self.kubectl()
            .run(&[
                "wait",
                "--for=condition=Established",
                "--timeout=30s",
                "crd",
                "routepolicies.holdfast.dev",
                "attachments.holdfast.dev",
                "nodereports.holdfast.dev",
            ])
            .map(drop)
    }

    fn kubectl(&self) -> &Kubectl {
        self.api.kubectl()
    }

    fn get(&self, kind: &str, name: &str) -> anyhow::Result<Value> {
        let text = self
            .kubectl()
            .run(&["-n", "shop", "get", kind, name, "-o", "json"])?;
        Ok(serde_json::from_str(&text)?)
    }

    fn status(&self, name: &str) -> anyhow::Result<Value> {
        Ok(self.get("routepolicy", name)?["status"].clone())
    }

    /// `Programmed` of a policy: status, reason, generation that it speaks of.
    fn programmed(&self, name: &str) -> anyhow::Result<(String, String, u64)> {
        let status = self.status(name)?;
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let condition = conditions
            .iter()
            .find(|condition| condition["type"] == "Programmed")
            .cloned()
            .unwrap_or_default();
        for condition in &conditions {
            ensure!(condition["observedGeneration"].is_u64(), "{condition}");
        }
        let word = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        let generation = condition["observedGeneration"].as_u64().unwrap_or_default();
        Ok((word("status"), word("reason"), generation))
    }

    fn until_programmed(&self, name: &str, wanted: (&str, &str, u64), time: Duration) -> anyhow::Result<()> {
        let mut last = None;
        until(time, format!("{name} is {wanted:?}"), || {
            std::thread::sleep(BETWEEN);
            let (status, reason, generation) = self.programmed(name)?;
            let met = (status.as_str(), reason.as_str(), generation) == wanted;
            last = Some((status, reason, generation));
            Ok(met.then_some(()))
        })
        .with_context(|| format!("it is {last:?}: {:?}", self.status(name)))
    }

    /// A node has programmed these policies, for all of its attachments, at this origin.
    fn ack(&self, node: &str, policies: &[&str], origin: Option<(&str, u64)>) -> anyhow::Result<()> {
        let text = self
            .kubectl()
            .run(&["-n", "shop", "get", "attachments", "-o", "json"])?;
        let attachments: Value = serde_json::from_str(&text)?;
        let here = attachments["items"].as_array().context("a list")?.iter();
        let covers = here
            .filter(|object| object["spec"]["node"] == node)
            .fold(0_u64, |sum, object| {
                let metadata = &object["metadata"];
                let uid = Uid(metadata["uid"].as_str().unwrap_or_default().to_owned());
                let generation = metadata["generation"].as_u64().unwrap_or_default();
                sum.wrapping_add(hash::covers(&uid, generation).consumer)
            });
        let mut programmed = BTreeMap::new();
        for policy in policies {
            let object = self.get("routepolicy", policy)?;
            let metadata = &object["metadata"];
            let mut line = format!("{} {covers:016x}", metadata["generation"]);
            if let Some((uid, generation)) = origin {
                line += &format!(" {uid} {generation}");
            }
            programmed.insert(metadata["uid"].as_str().context("a uid")?.to_owned(), line);
        }
        let report = json!({
            "apiVersion": "holdfast.dev/v1alpha1", "kind": "NodeReport",
            "metadata": {"name": format!("{node}.r")},
            "node": node,
            "epoch": {
                "id": "e1", "bootID": "b1", "agentStart": now(), "agentVersion": "test", "layoutVersion": 1,
            },
            "programmed": programmed,
        });
        apply(self.kubectl(), vec![report])
    }

    fn controller(&self) -> anyhow::Result<Controller> {
        let mut command = Command::new(agent_binary()?);
        command
            .args(["controller", "--listen", "127.0.0.1:0", "--kubeconfig"])
            .arg(self.kubectl().kubeconfig());
        let log = Log::default();
        Ok(Controller {
            process: Running::start(command, &log)?,
            log,
        })
    }

    /// `holdfast wait` with these words: its exit code and what it says.
    fn wait(&self, words: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
        let output = Command::new(agent_binary()?)
            .arg("wait")
            .args(words)
            .arg("--kubeconfig")
            .arg(self.kubectl().kubeconfig())
            .output()?;
        let said = [output.stdout, output.stderr].concat();
        Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
    }

    fn waits(&self, words: &[&str], code: i32) -> anyhow::Result<String> {
        let (found, said) = self.wait(words)?;
        ensure!(
            found == Some(code),
            "holdfast wait {words:?}: {found:?}, not {code}: {said}"
        );
        Ok(said)
    }
}

struct Controller {
    process: Running,
    log: Log,
}

impl Controller {
    fn leads(&self) -> bool {
        let lines = self.log.lines();
        let last = lines.iter().rev().find(|line| line.contains("leads"));
        last.is_some_and(|line| !line.contains("leads no more"))
    }

    fn until_leading(&self, time: Duration) -> anyhow::Result<()> {
        until(time, "it leads", || Ok(self.leads().then_some(())))
            .with_context(|| self.log.lines().join("\n"))
    }

    fn count(&self, text: &str) -> usize {
        self.log.lines().iter().filter(|line| line.contains(text)).count()
    }

    fn metrics(&self) -> anyhow::Result<String> {
        let lines = self.log.lines();
        let port = lines
            .iter()
            .find_map(|line| {
                let address = line.split_once("address=")?.1.split_whitespace().next()?;
                address.rsplit_once(':')?.1.parse().ok()
            })
            .context("it says where it listens")?;
        Ok(told::get_from(port, "/metrics")?.body)
    }
}

// --- the tests -----------------------------------------------------------------------------------------------

fn f46_a_wait_right_after_an_edit_waits_for_the_edit() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1"])?;
    let controller = stage.controller()?;
    controller.until_leading(SOON)?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.until_programmed("dns", ("False", "Pending", 1), SOON)?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    stage.waits(&["shop/dns", "--timeout", "10s"], 0)?;
    let kubectl_waits = |timeout: &str| {
        let words = [
            "-n",
            "shop",
            "wait",
            "routepolicy/dns",
            "--for=condition=Programmed",
            timeout,
        ];
        Ok::<_, anyhow::Error>(stage.kubectl().output(&words, None)?.status.success())
    };
    ensure!(
        kubectl_waits("--timeout=5s")?,
        "what is programmed is waited for in vain"
    );
    let before = controller.metrics()?;
    for generation in 2..6 {
        let address = format!("10.96.0.{}", 10 + generation);
        // The old status says True when the wait begins.
        apply(stage.kubectl(), vec![policy("dns", &address, &json!({}))])?;
        ensure!(
            !kubectl_waits("--timeout=1s")?,
            "edit {generation}: it passes on the old True"
        );
        stage.waits(&["shop/dns", "--timeout", "0s"], 1)?;
        let number = generation.to_string();
        stage.waits(&["shop/dns", "--generation", &number, "--timeout", "0s"], 1)?;
        stage.ack("n1", &["dns"], None)?;
        ensure!(
            kubectl_waits("--timeout=15s")?,
            "edit {generation}: {:?}",
            stage.status("dns")
        );
        stage.until_programmed("dns", ("True", "Programmed", generation), Duration::ZERO)?;
        stage.waits(&["shop/dns", "--generation", &number, "--timeout", "10s"], 0)?;
    }
    let writes = |text: &str| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("holdfast_controller_status_writes_total{result=\"ok\"} "))?;
        line.parse().ok()
    };
    let after = controller.metrics()?;
    let written = writes(&after).context("a count")? - writes(&before).context("a count")?;
    ensure!(written <= 4 * 4, "{written} writes for four edits");
    ensure!(after.contains("holdfast_controller_leader 1"), "{after}");
    ensure!(
        after.contains("holdfast_controller_nodes{state=\"live\"} 1"),
        "{after}"
    );
    ensure!(
        !after.contains("holdfast_controller_policy_behind_since_timestamp_seconds{"),
        "{after}"
    );
    // Nothing is written that is as it was.
    let version = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    stage.ack("n1", &["dns"], None)?;
    std::thread::sleep(Duration::from_secs(12));
    let later = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    ensure!(version == later, "it was written again as it was");
    Ok(())
}

fn f26_a_copy_is_true_when_every_node_has_the_origins_generation() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1", "n2"])?;
    let controller = stage.controller()?;
    controller.until_leading(SOON)?;
    let annotations = |generation: u64| json!({"holdfast.dev/origin-uid": "hub-1", "holdfast.dev/origin-generation": generation.to_string()});
    for (at, generation) in [(10, 6), (11, 7), (12, 7)] {
        let copy = policy("dns", &format!("10.96.0.{at}"), &annotations(generation));
        apply(stage.kubectl(), vec![copy])?;
    }
    // The copy is at generation 3, the origin at 8: an annotation raises no generation here.
    apply(
        stage.kubectl(),
        vec![policy("dns", "10.96.0.12", &annotations(8))],
    )?;
    stage.ack("n1", &["dns"], Some(("hub-1", 8)))?;
    stage.ack("n2", &["dns"], Some(("hub-1", 7)))?;
    stage.until_programmed("dns", ("False", "Pending", 3), SOON)?;
    until(SOON, "one of two", || {
        std::thread::sleep(BETWEEN);
        Ok((stage.status("dns")?["programmedNodes"] == "1/2").then_some(()))
    })
    .with_context(|| format!("{:?}", stage.status("dns")))?;
    let status = stage.status("dns")?;
    ensure!(
        status["origin"] == json!({"uid": "hub-1", "generation": 8}),
        "{status}"
    );
    ensure!(status["laggards"][0]["node"] == "n2", "{status}");
    stage.waits(&["shop/dns", "--timeout", "1s"], 1)?;
    stage.ack("n2", &["dns"], Some(("hub-1", 8)))?;
    stage.until_programmed("dns", ("True", "Programmed", 3), SOON)?;
    // One that cannot be read counts as none, and is said.
    let broken = json!({"holdfast.dev/origin-uid": "hub-1", "holdfast.dev/origin-generation": "new"});
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.12", &broken)])?;
    until(SOON, "it is said", || {
        std::thread::sleep(BETWEEN);
        let status = stage.status("dns")?;
        let said = status["conditions"].to_string().contains("origin-generation");
        Ok((said && status.get("origin").is_none()).then_some(()))
    })
    .with_context(|| format!("{:?}", stage.status("dns")))
}

fn f27_a_node_without_power_is_unknown_and_a_deleted_one_does_not_count() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1", "n2", "n3"])?;
    let controller = stage.controller()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    for node in ["n1", "n2", "n3"] {
        stage.ack(node, &["dns"], None)?;
    }
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    stage.hearts.set("n1", None);
    stage.until_programmed("dns", ("Unknown", "NodeUnknown", 1), SILENT)?;
    let status = stage.status("dns")?;
    let laggard = &status["laggards"][0];
    ensure!(
        laggard["node"] == "n1" && laggard["state"] == "Unknown" && laggard["since"].is_string(),
        "{status}"
    );
    ensure!(
        status["nodes"]["unknown"] == 1 && status["nodes"]["desired"] == 3,
        "{status}"
    );
    ensure!(
        controller
            .metrics()?
            .contains("holdfast_controller_nodes{state=\"unknown\"} 1"),
        "not counted"
    );
    stage.kubectl().run(&["delete", "node", "n2"])?;
    until(SOON, "it does not count", || {
        std::thread::sleep(BETWEEN);
        Ok((stage.status("dns")?["programmedNodes"] == "1/2").then_some(()))
    })
    .with_context(|| format!("{:?}", stage.status("dns")))?;
    ensure!(
        !stage.status("dns")?.to_string().contains("\"n2\""),
        "it is still named"
    );
    // The first comes back: its report is of the same life of its pins.
    stage.hearts.set("n1", Some("e1"));
    stage.until_programmed("dns", ("True", "Programmed", 1), SILENT)?;
    // It boots: the old report is still there, and does not count.
    stage.hearts.set("n1", Some("e2"));
    stage.until_programmed("dns", ("False", "Pending", 1), SILENT)
}

fn a_new_attachment_is_waited_for() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1"])?;
    let controller = stage.controller()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    stage.waits(&["--attachment", "shop/web-n1", "--timeout", "15s"], 0)?;
    apply(stage.kubectl(), vec![attachment("web-2", "n1")])?;
    // The report does not cover it, so the old one does not count any more either.
    let said = stage.waits(&["--attachment", "shop/web-2", "--timeout", "2s"], 1)?;
    ensure!(said.contains("shop/dns: Pending"), "{said}");
    stage.waits(
        &[
            "shop/dns",
            "--attachment",
            "shop/web-2",
            "--for",
            "pending",
            "--timeout",
            "2s",
        ],
        0,
    )?;
    stage.until_programmed("dns", ("False", "Pending", 1), SOON)?;
    stage.ack("n1", &["dns"], None)?;
    stage.waits(&["--attachment", "shop/web-2", "--timeout", "15s"], 0)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    let said = stage.waits(&["--attachment", "shop/nobody", "--timeout", "1s"], 1)?;
    ensure!(said.contains("no such attachment"), "{said}");
    let said = stage.waits(&["shop/nothing", "--timeout", "1s"], 1)?;
    ensure!(said.contains("no such policy"), "{said}");
    drop(controller);
    stage.api.away()?;
    stage.waits(&["shop/dns", "--timeout", "1s"], 2)?;
    stage
        .waits(&["--attachment", "shop/web-2", "--timeout", "1s"], 2)
        .map(drop)
}

fn of_two_controllers_one_leads_and_the_other_takes_over() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1"])?;
    let first = stage.controller()?;
    first.until_leading(SOON)?;
    let second = stage.controller()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    until(SOON, "the second knows as much", || {
        Ok((second.count("all that is watched is known") == 1).then_some(()))
    })?;
    ensure!(!second.leads(), "both lead");
    // Killed: the lease has to run out.
    first.process.signal(Signal::KILL)?;
    let killed = Instant::now();
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.11", &json!({}))])?;
    second.until_leading(Duration::from_secs(30))?;
    ensure!(
        killed.elapsed() > Duration::from_secs(5),
        "it did not wait for the lease"
    );
    stage.until_programmed("dns", ("False", "Pending", 2), SOON)?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 2), SOON)?;
    // Told to end: the lease is free at once.
    let third = stage.controller()?;
    until(SOON, "the third knows as much", || {
        Ok((third.count("all that is watched is known") == 1).then_some(()))
    })?;
    let version = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    let mut second = second;
    second.process.signal(Signal::TERM)?;
    ensure!(second.process.wait(SOON)?.success(), "an orderly end fails");
    third.until_leading(Duration::from_secs(8))?;
    std::thread::sleep(Duration::from_secs(3));
    let later = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    ensure!(
        version == later,
        "whoever takes over writes again what is as it was"
    );
    Ok(())
}

fn an_api_server_that_was_away_finds_nothing_rewritten() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1"])?;
    let controller = stage.controller()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    let version = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    stage.api.away()?;
    std::thread::sleep(Duration::from_secs(60));
    stage.api.again()?;
    controller.until_leading(Duration::from_secs(60))?;
    std::thread::sleep(Duration::from_secs(15));
    let later = stage.get("routepolicy", "dns")?["metadata"]["resourceVersion"].clone();
    ensure!(
        version == later,
        "{:?}\n{}",
        stage.status("dns"),
        controller.log.lines().join("\n")
    );
    // And it goes on.
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.11", &json!({}))])?;
    stage.until_programmed("dns", ("False", "Pending", 2), Duration::from_secs(60))?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 2), SOON)?;
    ensure!(
        controller.count("ERROR") == 0,
        "{}",
        controller.log.lines().join("\n")
    );
    Ok(())
}

fn f51_definitions_that_go_are_said_once_and_come_back() -> anyhow::Result<()> {
    let stage = Stage::new(&["n1"])?;
    let controller = stage.controller()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), SOON)?;
    let warned = "cannot be watched";
    let said = |times| {
        until(
            Duration::from_secs(40),
            format!("it is said {times} times"),
            || Ok((controller.count(warned) >= times).then_some(())),
        )
    };
    stage
        .kubectl()
        .run(&["delete", "crd", "nodereports.holdfast.dev"])?;
    said(1)?;
    throughout(
        Duration::from_secs(5),
        "reports that went with their definition are not withdrawn",
        || {
            std::thread::sleep(BETWEEN);
            Ok(stage.programmed("dns")?.0 == "True")
        },
    )?;
    stage
        .kubectl()
        .run(&["delete", "crd", "routepolicies.holdfast.dev"])?;
    said(2)?;
    std::thread::sleep(Duration::from_secs(10));
    ensure!(
        controller.count(warned) == 2,
        "{}",
        controller.log.lines().join("\n")
    );
    ensure!(
        controller.count("ERROR") == 0,
        "{}",
        controller.log.lines().join("\n")
    );
    stage.define()?;
    apply(stage.kubectl(), vec![policy("dns", "10.96.0.10", &json!({}))])?;
    stage.ack("n1", &["dns"], None)?;
    stage.until_programmed("dns", ("True", "Programmed", 1), Duration::from_secs(60))
}
