//! What `deploy/kustomize` says.

use anyhow::{Context, ensure};
use clap::{CommandFactory, Parser};
use holdfast::cli::Cli;
use holdfast_tests::codegen::in_repository;
use holdfast_tests::process::SHIPPED;
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

use crate::server::server;

/// All objects of a kustomization.
fn rendered(path: &str) -> anyhow::Result<Vec<Value>> {
    let path = in_repository(path);
    let text = server()?.kubectl().run(&["kustomize", &path.to_string_lossy()])?;
    Ok(serde_saphyr::from_multiple(&text)?)
}

fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> anyhow::Result<&'a Value> {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
        .with_context(|| format!("no {kind} {name}"))
}

/// The pod, and its one container.
fn pod(workload: &Value) -> anyhow::Result<(&Value, &Value)> {
    let pod = &workload["spec"]["template"]["spec"];
    let containers = pod["containers"].as_array().context("containers")?;
    ensure!(containers.len() == 1, "{} containers", containers.len());
    Ok((pod, &containers[0]))
}

/// A variable of a container, or the field that it is from.
fn variable<'a>(container: &'a Value, name: &str) -> anyhow::Result<&'a Value> {
    let variables = container["env"].as_array().context("env")?;
    let mut found = variables.iter().filter(|variable| variable["name"] == name);
    let one = found.next().with_context(|| format!("no {name}"))?;
    ensure!(found.next().is_none(), "{name} twice");
    Ok(one
        .get("value")
        .unwrap_or(&one["valueFrom"]["fieldRef"]["fieldPath"]))
}

fn says(what: &str, found: &Value, expected: Value) -> anyhow::Result<()> {
    ensure!(*found == expected, "{what} is {found}, not {expected}");
    Ok(())
}

pub(crate) fn the_base_says_what_it_must() -> anyhow::Result<()> {
    let objects = rendered("deploy/kustomize/base")?;
    let namespace = object(&objects, "Namespace", "holdfast-system")?;
    let labels = &namespace["metadata"]["labels"];
    says(
        "pod security",
        &labels["pod-security.kubernetes.io/enforce"],
        json!("privileged"),
    )?;
    object(&objects, "Namespace", "holdfast-node-lease")?;

    let agent = object(&objects, "DaemonSet", "holdfast-agent")?;
    says(
        "namespace",
        &agent["metadata"]["namespace"],
        json!("holdfast-system"),
    )?;
    let rolling = json!({"maxSurge": 0, "maxUnavailable": "10%"});
    says(
        "update",
        &agent["spec"]["updateStrategy"]["rollingUpdate"],
        rolling,
    )?;
    let (pod_, container) = pod(agent)?;
    says(
        "priority",
        &pod_["priorityClassName"],
        json!("system-node-critical"),
    )?;
    says("network", &pod_["hostNetwork"], json!(true))?;
    says(
        "tolerations",
        &pod_["tolerations"],
        json!([{"operator": "Exists"}]),
    )?;
    says(
        "node",
        variable(container, "HOLDFAST_NODE")?,
        json!("spec.nodeName"),
    )?;
    says("source", variable(container, "HOLDFAST_SOURCE")?, json!("kube"))?;
    says(
        "listen",
        variable(container, "HOLDFAST_LISTEN")?,
        json!("127.0.0.1:9643"),
    )?;
    says("host", variable(container, "HOST_IP")?, json!("status.hostIP"))?;
    says(
        "metrics",
        variable(container, "HOLDFAST_METRICS_LISTEN")?,
        json!("$(HOST_IP):9643"),
    )?;
    let port = json!([{"name": "metrics", "containerPort": 9643, "hostPort": 9643, "protocol": "TCP"}]);
    let mut ports = container["ports"].clone();
    ports[0]["protocol"] = json!("TCP");
    says("ports", &ports, port)?;
    for (probe, path) in [("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        let get = json!({"host": "127.0.0.1", "port": 9643, "path": path});
        says(probe, &container[probe]["httpGet"], get)?;
    }
    let mounts: Vec<(&Value, &Value)> = container["volumeMounts"]
        .as_array()
        .context("mounts")?
        .iter()
        .map(|mount| (&mount["mountPath"], &mount["mountPropagation"]))
        .collect();
    let expected = [
        (json!("/sys/fs/bpf"), json!("HostToContainer")),
        (json!("/var/lib/holdfast"), Value::Null),
        (json!("/run/holdfast"), Value::Null),
    ];
    ensure!(
        mounts
            .iter()
            .zip(&expected)
            .all(|(found, expected)| *found.0 == expected.0 && *found.1 == expected.1)
            && mounts.len() == expected.len(),
        "{mounts:?}"
    );
    let host: Vec<&Value> = pod_["volumes"]
        .as_array()
        .context("volumes")?
        .iter()
        .map(|v| &v["hostPath"])
        .collect();
    let created = |path: &str, kind: &str| json!({"path": path, "type": kind});
    ensure!(
        host == [
            &created("/sys/fs/bpf", "Directory"),
            &created("/var/lib/holdfast", "DirectoryOrCreate"),
            &created("/run/holdfast", "DirectoryOrCreate"),
        ],
        "{host:?}"
    );
    // Every variable is one that the command knows, and the command is one.
    knows_its_variables(container, "agent")?;

    let controller = object(&objects, "Deployment", "holdfast-controller")?;
    let (pod_, container) = pod(controller)?;
    says(
        "account",
        &pod_["serviceAccountName"],
        json!("holdfast-controller"),
    )?;
    says("user", &pod_["securityContext"]["runAsNonRoot"], json!(true))?;
    says("host's network", &pod_["hostNetwork"], Value::Null)?;
    let term = &pod_["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0];
    says(
        "apart",
        &term["podAffinityTerm"]["topologyKey"],
        json!("kubernetes.io/hostname"),
    )?;
    let context = json!({
        "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
    });
    says("rights", &container["securityContext"], context)?;
    knows_its_variables(container, "controller")
}

/// Every variable is one that the command knows, and its value one that it takes.
fn knows_its_variables(container: &Value, subcommand: &str) -> anyhow::Result<()> {
    says("command", &container["command"], json!(["holdfast", subcommand]))?;
    let command = Cli::command();
    let command = command.find_subcommand(subcommand).context("no such command")?;
    for variable in container["env"].as_array().context("env")? {
        let name = variable["name"].as_str().unwrap_or_default();
        if !name.starts_with("HOLDFAST_") {
            continue;
        }
        let argument = command
            .get_arguments()
            .find(|argument| argument.get_env().is_some_and(|env| env == name))
            .with_context(|| format!("holdfast {subcommand} knows no {name}"))?;
        let flag = argument.get_long().context("a variable without a flag")?;
        let value = variable["value"]
            .as_str()
            .unwrap_or("name")
            .replace("$(HOST_IP)", "10.0.0.1");
        Cli::try_parse_from(["holdfast", subcommand, &format!("--{flag}={value}")])
            .with_context(|| format!("{name}={value}"))?;
    }
    Ok(())
}

pub(crate) fn the_agent_runs_with_the_rights_of_the_lab() -> anyhow::Result<()> {
    let objects = rendered("deploy/kustomize/base")?;
    let (_, container) = pod(object(&objects, "DaemonSet", "holdfast-agent")?)?;
    has_the_rights_of_the_lab(&container["securityContext"])
}

fn has_the_rights_of_the_lab(context: &Value) -> anyhow::Result<()> {
    says("dropped", &context["capabilities"]["drop"], json!(["ALL"]))?;
    let rights = context["capabilities"]["add"]
        .as_array()
        .context("capabilities")?
        .iter()
        .map(|name| match name.as_str() {
            Some("BPF") => Ok(CapabilitySet::BPF),
            Some("NET_ADMIN") => Ok(CapabilitySet::NET_ADMIN),
            Some("PERFMON") => Ok(CapabilitySet::PERFMON),
            _ => Err(anyhow::anyhow!("{name}")),
        })
        .collect::<anyhow::Result<CapabilitySet>>()?;
    ensure!(rights == SHIPPED, "{rights:?}");
    for (what, expected) in [
        ("privileged", Value::Null),
        ("allowPrivilegeEscalation", json!(false)),
        ("readOnlyRootFilesystem", json!(true)),
        ("seccompProfile", json!({"type": "RuntimeDefault"})),
        ("appArmorProfile", json!({"type": "Unconfined"})),
    ] {
        says(what, &context[what], expected)?;
    }
    Ok(())
}

pub(crate) fn the_overlay_changes_image_and_level() -> anyhow::Result<()> {
    let base = rendered("deploy/kustomize/base")?;
    let overlay = rendered("deploy/kustomize/overlays/dev")?;
    ensure!(
        base.len() == overlay.len(),
        "{} objects, {} in the base",
        overlay.len(),
        base.len()
    );
    for (kind, name) in [
        ("DaemonSet", "holdfast-agent"),
        ("Deployment", "holdfast-controller"),
    ] {
        let mut changed = object(&overlay, kind, name)?.clone();
        let container = &mut changed["spec"]["template"]["spec"]["containers"][0];
        says("image", &container["image"], json!("localhost/holdfast:dev"))?;
        says("pull", &container["imagePullPolicy"], json!("Never"))?;
        says(
            "level",
            variable(container, "HOLDFAST_LOG")?,
            json!("info,holdfast=debug"),
        )?;
        // And nothing else.
        container["image"] = json!("holdfast");
        container
            .as_object_mut()
            .context("a container")?
            .remove("imagePullPolicy");
        for variable in container["env"].as_array_mut().context("env")? {
            if variable["name"] == "HOLDFAST_LOG" {
                variable["value"] = json!("info");
            }
        }
        let sorted = |object: &Value| {
            let env = &object["spec"]["template"]["spec"]["containers"][0]["env"];
            let mut env: Vec<String> = env
                .as_array()
                .into_iter()
                .flatten()
                .map(Value::to_string)
                .collect();
            env.sort();
            env
        };
        let original = object(&base, kind, name)?;
        ensure!(
            sorted(original) == sorted(&changed),
            "{kind} {name}: other variables"
        );
        let mut original = original.clone();
        for object in [&mut original, &mut changed] {
            object["spec"]["template"]["spec"]["containers"][0]["env"] = Value::Null;
        }
        ensure!(original == changed, "{kind} {name} differs in more: {changed}");
    }
    Ok(())
}

/// It has the agent's rights and directories, and its command is one that there is.
pub(crate) fn the_uninstall_job_is_the_agent_on_its_way_out() -> anyhow::Result<()> {
    let path = in_repository("deploy/kustomize/uninstall/job.yaml");
    let text = std::fs::read_to_string(&path)?;
    let filled = text
        .replace("\"NODE\"", "edge-1")
        .replace("\"IMAGE\"", "localhost/holdfast:dev");
    let job: Value = serde_saphyr::from_str(&filled)?;
    let objects = rendered("deploy/kustomize/base")?;
    let (agent_pod, agent) = pod(object(&objects, "DaemonSet", "holdfast-agent")?)?;
    let (job_pod, container) = pod(&job)?;
    has_the_rights_of_the_lab(&container["securityContext"])?;
    for what in ["hostNetwork", "volumes", "tolerations"] {
        says(what, &job_pod[what], agent_pod[what].clone())?;
    }
    says(
        "mounts",
        &container["volumeMounts"],
        agent["volumeMounts"].clone(),
    )?;
    says("node", &job_pod["nodeName"], json!("edge-1"))?;
    says("account", &job_pod["automountServiceAccountToken"], json!(false))?;
    let words = container["command"].as_array().context("command")?;
    let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    Cli::try_parse_from(&words).with_context(|| words.join(" "))?;
    ensure!(words == ["holdfast", "uninstall", "--yes"]);
    // A server takes it.
    server()?
        .kubectl()
        .feed(&["create", "--dry-run=server", "-f", "-"], &filled)?;
    Ok(())
}
