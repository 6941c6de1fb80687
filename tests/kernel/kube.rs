//! Objects of an API server in, packets, acknowledgments out: the real agent with the rights and the token that it is shipped
//! with, beside a real API server on its node.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use holdfast_tests::codegen::in_repository;
use holdfast_tests::kubernetes::{ApiServer, api_server_in};
use holdfast_tests::lab::{DNS, WEB};
use holdfast_tests::objects::{NAMESPACE, NODE};
use holdfast_tests::{EVENT_BUDGET, Lab, say, throughout, until};
use rustix::process::Signal;
use serde_json::{Value, json};

holdfast_tests::suite! {
    needs [Agent, ApiServer];
    objects_in_packets_flow_acknowledgments_out,
    another_nodes_token_starts_no_agent,
    what_cannot_be_used_is_said_with_its_generation,
    f07_an_edit_that_changes_nothing_here,
    f11_a_restart_while_the_api_server_is_away,
    f12_a_policy_deleted_while_no_agent_ran,
    f16_nothing_is_written_at_rest,
    f18_interfaces_change_while_the_api_server_is_away,
    f20_a_boot_without_the_api_server,
    f26_a_copy_is_acknowledged_as_its_origin,
    f51_definitions_that_go_and_come_back,
}

/// How long an acknowledgment may take to be seen by a client that is started for each look.
const SEEN: Duration = Duration::from_secs(10);
/// How long an agent may take to hear of an API server that is back: its longest wait and what a test machine adds.
const BACK: Duration = Duration::from_secs(45);
/// Packets a second of a flow that must not be interrupted.
const RATE: u64 = 500;

/// The agents' service account, and its namespace.
const ACCOUNT: [&str; 2] = ["holdfast-agent", "holdfast-system"];

// --- the scene ---------------------------------------------------------------------------------------------

/// The usual scene with its objects at an API server, programmed.
fn scene(test: impl FnOnce(&mut Lab, &ApiServer) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let lab = Lab::new()?;
    let api = api_server_in(lab.node.space())?;
    let lab = lab.set_up(|lab| {
        install(&api)?;
        lab.node.objects_from(&kubeconfig(lab, &api, NODE)?);
        lab.create_workloads()?;
        put_objects(lab, &api)?;
        lab.node.start_agent()?;
        lab.register_all()?;
        lab.until_set_up()
    })?;
    lab.run(|lab| test(lab, &api))
}

/// What `kubectl apply -k` brings beside the workloads: definitions, namespaces, rights.
fn install(api: &ApiServer) -> anyhow::Result<()> {
    define(api)?;
    for file in ["namespaces", "agent-rbac", "agent-admission"] {
        let path = in_repository(&format!("deploy/kustomize/base/{file}.yaml"));
        api.kubectl().run(&["apply", "-f", &path.to_string_lossy()])?;
    }
    api.kubectl().run(&["create", "namespace", NAMESPACE])?;
    for node in [NODE, "edge-2"] {
        let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
        api.kubectl().feed(&["apply", "-f", "-"], &object.to_string())?;
    }
    Ok(())
}

/// The definitions of the objects.
fn define(api: &ApiServer) -> anyhow::Result<()> {
    for plural in ["attachments", "routepolicies", "nodereports"] {
        let path = in_repository(&format!("deploy/crds/{plural}.yaml"));
        api.kubectl().run(&["apply", "-f", &path.to_string_lossy()])?;
    }
    api.kubectl()
        .run(&[
            "wait",
            "--for=condition=Established",
            "crd",
            "--all",
            "--timeout=60s",
        ])
        .map(drop)
}

/// The settings of an agent whose token is bound to this node.
fn kubeconfig(lab: &Lab, api: &ApiServer, node: &str) -> anyhow::Result<std::path::PathBuf> {
    let [account, namespace] = ACCOUNT;
    let token = api.kubectl().run(&[
        "create",
        "token",
        account,
        "--namespace",
        namespace,
        "--bound-object-kind=Node",
        "--bound-object-name",
        node,
    ])?;
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab",
            "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": true}}],
        "users": [{"name": "agent", "user": {"token": token.trim()}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "agent"}}],
        "current-context": "lab",
    });
    let name = format!("kubeconfig-{node}");
    std::fs::write(lab.node.outside(&name)?, config.to_string())?;
    Ok(std::path::Path::new(holdfast_tests::space::ROOT).join(name))
}

fn put_objects(lab: &Lab, api: &ApiServer) -> anyhow::Result<()> {
    let attachments = lab.workloads().map(|workload| {
        let mut attachment = workload.attachment();
        attachment.identity = Some(workload.identity());
        attachment.to_string()
    });
    let policies = [DNS, WEB].map(|name| lab.policy(name).to_string());
    let objects: Vec<String> = attachments.chain(policies).collect();
    apply(api, &objects.join("---\n"))
}

fn apply(api: &ApiServer, objects: &str) -> anyhow::Result<()> {
    api.kubectl().feed(&["apply", "-f", "-"], objects).map(drop)
}

fn patch(api: &ApiServer, policy: &str, patch: &Value) -> anyhow::Result<()> {
    let patch = patch.to_string();
    api.kubectl()
        .run(&[
            "patch",
            "routepolicy",
            policy,
            "-n",
            NAMESPACE,
            "--type=merge",
            "-p",
            &patch,
        ])
        .map(drop)
}

fn get(api: &ApiServer, words: &[&str]) -> anyhow::Result<Value> {
    let said = api.kubectl().run(&[&["get", "-o", "json"], words].concat())?;
    serde_json::from_str(&said).with_context(|| said)
}

/// Uid and generation of a policy.
fn version(api: &ApiServer, policy: &str) -> anyhow::Result<(String, u64)> {
    let object = get(api, &["routepolicy", policy, "-n", NAMESPACE])?;
    let metadata = &object["metadata"];
    let uid = metadata["uid"].as_str().context("no uid")?.to_owned();
    Ok((uid, metadata["generation"].as_u64().context("no generation")?))
}

/// What all reports of the node say, by uid.
fn said(api: &ApiServer) -> anyhow::Result<BTreeMap<String, Value>> {
    let reports = get(api, &["nodereports"])?;
    let mut said = BTreeMap::new();
    for report in reports["items"].as_array().context("no list")? {
        for (uid, ack) in report["programmed"].as_object().into_iter().flatten() {
            said.insert(uid.clone(), ack.clone());
        }
        for other in report["others"].as_array().into_iter().flatten() {
            said.insert(
                other["uid"].as_str().unwrap_or_default().to_owned(),
                other.clone(),
            );
        }
    }
    Ok(said)
}

/// Waits until a policy is acknowledged as it is now.
fn until_acknowledged(api: &ApiServer, policy: &str) -> anyhow::Result<String> {
    let (uid, generation) = version(api, policy)?;
    let wanted = format!("{generation} ");
    until(SEEN, format!("{policy} is acknowledged at {generation}"), || {
        let said = said(api)?;
        let ack = said.get(&uid).and_then(Value::as_str);
        Ok(ack.filter(|ack| ack.starts_with(&wanted)).map(str::to_owned))
    })
}

/// Waits until a report says this state of a policy.
fn until_said(api: &ApiServer, uid: &str, state: &str) -> anyhow::Result<Value> {
    until(SEEN, format!("{state} is reported of {uid}"), || {
        Ok(said(api)?.get(uid).filter(|said| said["state"] == state).cloned())
    })
}

fn writes(lab: &Lab) -> anyhow::Result<u64> {
    let metrics = lab.node.metrics()?;
    Ok(metrics.count("holdfast_report_writes_total", &[("result", "ok")]))
}

/// Elements that this life has written and deleted, in all maps.
fn map_writes(lab: &Lab) -> anyhow::Result<u64> {
    Ok(lab.node.metrics()?.count("holdfast_map_writes_total", &[]))
}

/// The same as `not_served` while other packets flow.
fn nobody_answers(lab: &Lab, consumer: usize, service: usize) -> anyhow::Result<()> {
    let by = lab.answered(consumer, service, EVENT_BUDGET / 10)?;
    ensure!(by.is_none(), "c{consumer} is answered by {by:?}");
    Ok(())
}

/// Seconds since the set on the disk was the API server's.
fn saved_age(lab: &Lab) -> anyhow::Result<Option<f64>> {
    let metrics = lab.node.metrics()?;
    let saved = metrics.get("holdfast_saved_set_timestamp_seconds", &[]);
    Ok(metrics
        .get("holdfast_time_seconds", &[])
        .zip(saved)
        .map(|(now, saved)| now - saved))
}

/// Waits until the disk has the set as it is.
fn until_saved(lab: &Lab) -> anyhow::Result<()> {
    let path = lab.node.outside("state/kube-objects.json")?;
    until(SEEN, "the set is saved", || Ok(path.exists().then_some(())))?;
    until(SEEN, "its age is told", || Ok(saved_age(lab)?.map(drop)))
}

// --- the main job ------------------------------------------------------------------------------------------

fn objects_in_packets_flow_acknowledgments_out() -> anyhow::Result<()> {
    scene(|lab, api| {
        for (consumer, service) in [(0, 0), (1, 0), (1, 1), (2, 1)] {
            lab.served(consumer, service)?;
        }
        let ack = until_acknowledged(api, DNS)?;
        until_acknowledged(api, WEB)?;
        let words: Vec<&str> = ack.split(' ').collect();
        ensure!(words.len() == 2 && words[1].len() == 16, "{ack}");
        let lease = until(SEEN, "the lease", || {
            let found = api.kubectl().output(
                &["get", "lease", NODE, "-n", "holdfast-node-lease", "-o", "json"],
                None,
            )?;
            Ok(found.status.success().then_some(found.stdout))
        })?;
        let lease: Value = serde_json::from_slice(&lease)?;
        let report = get(api, &["nodereport", "edge-1.r"])?;
        let holder = format!("{NODE}/{}", report["epoch"]["id"].as_str().unwrap_or_default());
        ensure!(lease["spec"]["holderIdentity"] == holder.as_str(), "{lease}");
        let node = get(api, &["node", NODE])?;
        ensure!(
            report["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"],
            "{report}"
        );
        ensure!(
            lease["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"],
            "{lease}"
        );

        // A hold withdraws what was acknowledged; its end brings it back.
        let (uid, generation) = version(api, DNS)?;
        lab.node.unregister("hfc0")?;
        let held = until_said(api, &uid, "Held")?;
        ensure!(
            held["reason"] == "IdentityMissing" && held["generation"] == generation,
            "{held}"
        );
        ensure!(held["name"] == DNS && held["intents"]["held"] == 1, "{held}");
        lab.not_served(0, 0)?;
        lab.consumers[0].register(&lab.node)?;
        until_acknowledged(api, DNS)?;
        lab.served(0, 0)?;

        // An edit, and a consumer that goes.
        let mut policy = lab.policy(DNS);
        policy.drain = Some("1s".to_owned());
        policy.services.truncate(1);
        apply(api, &policy.to_string())?;
        ensure!(version(api, DNS)?.1 == generation + 1);
        until_acknowledged(api, DNS)?;
        let before = until_acknowledged(api, WEB)?;
        api.kubectl()
            .run(&["delete", "attachment", "c2", "-n", NAMESPACE])?;
        until(SEEN, "other attachments went into it", || {
            let (uid, _) = version(api, WEB)?;
            let now = said(api)?.get(&uid).and_then(Value::as_str).map(str::to_owned);
            Ok(now.filter(|now| *now != before).map(drop))
        })?;
        lab.not_served(2, 1)?;
        lab.served(1, 1)
    })
}

fn another_nodes_token_starts_no_agent() -> anyhow::Result<()> {
    scene(|lab, api| {
        lab.node.end_agent(Signal::TERM)?;
        let own = kubeconfig(lab, api, NODE)?;
        lab.node.objects_from(&kubeconfig(lab, api, "edge-2")?);
        lab.node.launch_agent(&[])?;
        let status = lab.node.until_ended()?;
        ensure!(status.code() == Some(1), "{status}");
        let said = lab.node.log().join("\n");
        ensure!(said.contains("bound to node edge-2"), "{said}");
        lab.served(0, 0)?;
        // An API server that is away hides it; then nothing of it is believed.
        api.away()?;
        let runs = |lab: &Lab| {
            let lines = lab.node.log();
            lines
                .iter()
                .filter(|line| line.contains("the agent runs"))
                .count()
        };
        let before = runs(lab);
        lab.node.launch_agent(&[])?;
        // One that hears of it while it starts ends at once.
        until(BACK, "it runs without it", || {
            Ok((runs(lab) > before).then_some(()))
        })?;
        api.again()?;
        until(BACK, "it is said", || {
            let lines = lab.node.error_lines();
            Ok(lines
                .iter()
                .any(|line| line.contains("nothing is read"))
                .then_some(()))
        })?;
        lab.served(0, 0)?;
        lab.node.end_agent(Signal::TERM)?;
        lab.node.forgive_errors();
        lab.node.objects_from(&own);
        lab.node.start_agent()?;
        until_acknowledged(api, DNS)?;
        lab.served(0, 0)
    })
}

fn what_cannot_be_used_is_said_with_its_generation() -> anyhow::Result<()> {
    scene(|lab, api| {
        let (uid, _) = version(api, DNS)?;
        until_acknowledged(api, DNS)?;
        // A release whose definition knows more than this agent.
        let definition = get(api, &["crd", "routepolicies.holdfast.dev"])?;
        let mut newer = definition.clone();
        let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
        let spec = newer.pointer_mut(spec).context("no schema")?;
        spec["x-kubernetes-preserve-unknown-fields"] = true.into();
        // A watch that was begun before shows objects as the older definition has them.
        lab.node.end_agent(Signal::TERM)?;
        api.kubectl().feed(&["replace", "-f", "-"], &newer.to_string())?;
        until(SEEN, "the definition is in force", || {
            patch(api, DNS, &json!({"spec": {"teleport": "yes"}}))?;
            let object = get(api, &["routepolicy", DNS, "-n", NAMESPACE])?;
            Ok((object["spec"]["teleport"] == "yes").then_some(()))
        })?;
        lab.node.start_agent()?;
        until(SEEN, "an agent that does not know it says so", || {
            let said = said(api)?;
            let found = said.get(&uid).filter(|said| said["state"] == "Failed");
            Ok(found.filter(|said| said["reason"] == "Unsupported").map(drop))
        })?;
        let failed = until_said(api, &uid, "Failed")?;
        ensure!(failed["generation"] == version(api, DNS)?.1, "{failed}");
        ensure!(failed["message"].to_string().contains("teleport"), "{failed}");
        // The last good content goes on being served, and the other policy does not notice.
        lab.served(0, 0)?;
        until_acknowledged(api, WEB)?;
        // Also after a restart.
        lab.node.end_agent(Signal::KILL)?;
        lab.node.start_agent()?;
        lab.served(0, 0)?;
        until_said(api, &uid, "Failed")?;
        patch(api, DNS, &json!({"spec": {"teleport": null}}))?;
        until_acknowledged(api, DNS)?;
        lab.served(0, 0)
    })
}

// --- cases -------------------------------------------------------------------------------------------------

fn f07_an_edit_that_changes_nothing_here() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        let (_, generation) = version(api, DNS)?;
        let since = |lab: &Lab| -> anyhow::Result<String> {
            let report = lab.node.report()?.context("no report")?;
            Ok(report.policy(DNS).context("not reported")?.since.clone())
        };
        let (before, writes) = (since(lab)?, map_writes(lab)?);
        let mut policy = lab.policy(DNS);
        policy.services.reverse();
        apply(api, &policy.to_string())?;
        let edited = Instant::now();
        until(SEEN, "the node knows the next generation", || {
            let report = lab.node.report()?.context("no report")?;
            let line = report.policy(DNS).context("not reported")?;
            Ok((line.generation == generation + 1 && line.state == "Programmed").then_some(()))
        })?;
        until_acknowledged(api, DNS)?;
        say(format_args!(
            "acknowledged and seen {:?} after the edit",
            edited.elapsed()
        ));
        ensure!(since(lab)? == before, "it is another moment");
        ensure!(map_writes(lab)? == writes, "the kernel was written to");
        Ok(())
    })
}

fn f11_a_restart_while_the_api_server_is_away() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        until_saved(lab)?;
        let before = get(api, &["nodereport", "edge-1.r"])?["programmed"].clone();
        let flow = lab.flow(0, 0, RATE)?;
        api.away()?;
        lab.node.end_agent(Signal::KILL)?;
        lab.node.start_agent()?;
        throughout(Duration::from_secs(5), "the saved set is in force", || {
            let metrics = lab.node.metrics()?;
            Ok(metrics.intents("programmed") == 4
                && metrics.count(
                    "holdfast_map_writes_total",
                    &[("map", "services"), ("op", "delete")],
                ) == 0)
        })?;
        let age = saved_age(lab)?.context("no age of the saved set")?;
        ensure!((4.0..300.0).contains(&age), "{age}");
        api.again()?;
        until(BACK, "the API server is heard of", || {
            let metrics = lab.node.metrics()?;
            let labels = [("source", "kube")];
            Ok(metrics
                .get("holdfast_source_last_activity_timestamp_seconds", &labels)
                .map(drop))
        })?;
        until(SEEN, "the set is current", || {
            Ok(saved_age(lab)?.filter(|age| *age < 4.0).map(drop))
        })?;
        ensure!(map_writes(lab)? == 0, "the kernel was written to");
        let tally = flow.finish(Some(&lab.serving[0]))?;
        say(format_args!("{tally}"));
        tally.perfect()?;
        until(SEEN, "this life has reported", || {
            let report = get(api, &["nodereport", "edge-1.r"])?;
            Ok((report["programmed"] == before).then_some(()))
        })
    })
}

fn f12_a_policy_deleted_while_no_agent_ran() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, WEB)?;
        until_saved(lab)?;
        let (uid, _) = version(api, WEB)?;
        let flow = lab.flow(0, 0, RATE)?;
        lab.node.end_agent(Signal::TERM)?;
        api.kubectl()
            .run(&["delete", "routepolicy", WEB, "-n", NAMESPACE])?;
        lab.served(2, 1)?;
        lab.node.start_agent()?;
        until(SEEN, "the policy is gone from the node", || {
            Ok(lab
                .node
                .report()?
                .filter(|report| report.policy(WEB).is_none())
                .map(drop))
        })?;
        // Nothing is removed before the links are known too, and until then nothing is said to be leaving.
        until(SEEN, "its entries too: nobody answers", || {
            let by = lab.answered(2, 1, EVENT_BUDGET / 10)?;
            Ok((by.is_none() && lab.node.metrics()?.intents("removing") == 0).then_some(()))
        })?;
        nobody_answers(lab, 2, 1)?;
        until(SEEN, "and its acknowledgment", || {
            Ok((!said(api)?.contains_key(&uid)).then_some(()))
        })?;
        let text = lab.node.get("/metrics")?.body;
        ensure!(
            !text.contains(&format!("policy=\"{WEB}\"")),
            "series of it are left"
        );
        until_acknowledged(api, DNS)?;
        let tally = flow.finish(Some(&lab.serving[0]))?;
        say(format_args!("{tally}"));
        tally.perfect()
    })
}

fn f16_nothing_is_written_at_rest() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        until_acknowledged(api, WEB)?;
        let version = |api| -> anyhow::Result<Value> {
            Ok(get(api, &["nodereport", "edge-1.r"])?["metadata"]["resourceVersion"].clone())
        };
        let (before, written, entries) = (version(api)?, writes(lab)?, map_writes(lab)?);
        throughout(Duration::from_secs(15), "nothing is written", || {
            std::thread::sleep(Duration::from_millis(500));
            Ok(writes(lab)? == written && map_writes(lab)? == entries)
        })?;
        ensure!(version(api)? == before);
        Ok(())
    })
}

fn f18_interfaces_change_while_the_api_server_is_away() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        let (uid, generation) = version(api, DNS)?;
        let identity = lab.consumers[0].identity();
        api.away()?;
        let flow = lab.flow(1, 1, RATE)?;
        for _ in 0..3 {
            lab.consumers[0].delete(&mut lab.node)?;
            lab.node
                .until_verdict(DNS, "Held(InterfaceMissing)", EVENT_BUDGET)?;
            lab.consumers[0].create(&mut lab.node)?;
            nobody_answers(lab, 0, 0)?;
            // The incarnation that the object names.
            lab.node.register("hfc0", &identity)?;
            lab.node.until_verdict(DNS, "Programmed", EVENT_BUDGET)?;
            lab.served(0, 0)?;
        }
        let written = writes(lab)?;
        api.again()?;
        until(BACK, "it is acknowledged still", || {
            let said = said(api)?;
            let ack = said.get(&uid).and_then(Value::as_str);
            Ok(ack
                .filter(|ack| ack.starts_with(&format!("{generation} ")))
                .map(drop))
        })?;
        // Only of what is now: the holds in between are nobody's news any more. (The local report counts too.)
        ensure!(writes(lab)? - written <= 3, "{} writes", writes(lab)? - written);
        let tally = flow.finish(Some(&lab.serving[1]))?;
        say(format_args!("{tally}"));
        tally.perfect()
    })
}

fn f20_a_boot_without_the_api_server() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        until_saved(lab)?;
        let epoch = |api| -> anyhow::Result<Value> {
            Ok(get(api, &["nodereport", "edge-1.r"])?["epoch"]["id"].clone())
        };
        let before = epoch(api)?;
        api.away()?;
        reboot(lab)?;
        lab.node.start_agent()?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        lab.register_all()?;
        lab.until_set_up()?;
        lab.served(0, 0)?;
        ensure!(
            saved_age(lab)?.is_some_and(|age| age < 300.0),
            "{:?}",
            saved_age(lab)?
        );

        // Without a saved set: said clearly, alive, not ready, and no crash.
        reboot(lab)?;
        std::fs::remove_file(lab.node.outside("state/kube-objects.json")?)?;
        lab.node.launch_agent(&[])?;
        until(SEEN, "it lives", || {
            Ok(lab
                .node
                .get("/livez")
                .ok()
                .filter(|answer| answer.status == 200)
                .map(drop))
        })?;
        throughout(Duration::from_secs(3), "it is not ready", || {
            Ok(lab.node.get("/readyz")?.status == 503)
        })?;
        ensure!(saved_age(lab)?.is_none());
        let log = lab.node.log().join("\n");
        ensure!(log.contains("no set of objects is saved"), "{log}");
        lab.not_served(0, 0)?;
        api.again()?;
        until(BACK, "ready", || {
            Ok(lab
                .node
                .get("/readyz")
                .ok()
                .filter(|answer| answer.status == 200)
                .map(drop))
        })?;
        lab.register_all()?;
        lab.until_set_up()?;
        lab.served(0, 0)?;
        // Another life of the pins: the report says so before it counts.
        until(SEEN, "another epoch is reported", || {
            Ok((epoch(api)? != before).then_some(()))
        })?;
        until_acknowledged(api, DNS).map(drop)
    })
}

/// What a reboot leaves of us: the state directory.
fn reboot(lab: &mut Lab) -> anyhow::Result<()> {
    lab.node.end_agent(Signal::KILL)?;
    std::fs::remove_dir_all(lab.node.outside("bpf/holdfast")?).context("the pins")
}

fn f26_a_copy_is_acknowledged_as_its_origin() -> anyhow::Result<()> {
    scene(|lab, api| {
        let (uid, generation) = version(api, DNS)?;
        until_acknowledged(api, DNS)?;
        for origin in ["8", "9"] {
            let annotations =
                json!({"holdfast.dev/origin-uid": "hub", "holdfast.dev/origin-generation": origin});
            patch(api, DNS, &json!({"metadata": {"annotations": annotations}}))?;
            ensure!(
                version(api, DNS)?.1 == generation,
                "an annotation is no generation"
            );
            let end = format!(" hub {origin}");
            until(SEEN, format!("origin {origin} is acknowledged"), || {
                let said = said(api)?;
                Ok(said
                    .get(&uid)
                    .and_then(Value::as_str)
                    .filter(|ack| ack.ends_with(&end))
                    .map(drop))
            })?;
        }
        lab.served(0, 0)
    })
}

fn f51_definitions_that_go_and_come_back() -> anyhow::Result<()> {
    scene(|lab, api| {
        until_acknowledged(api, DNS)?;
        let flow = lab.flow(0, 0, RATE)?;
        for name in ["routepolicies", "attachments"] {
            let name = format!("{name}.holdfast.dev");
            api.kubectl().run(&["delete", "crd", &name, "--timeout=60s"])?;
        }
        throughout(Duration::from_secs(8), "nothing is removed", || {
            Ok(lab.node.metrics()?.intents("programmed") == 4)
        })?;
        let warnings = |lab: &Lab| {
            let lines = lab.node.log();
            lines
                .iter()
                .filter(|line| line.contains("does the cluster have the CRD"))
                .count()
        };
        ensure!((1..=2).contains(&warnings(lab)), "said {} times", warnings(lab));
        let tally = flow.finish(Some(&lab.serving[0]))?;
        say(format_args!("{tally}"));
        tally.perfect()?;
        define(api)?;
        put_objects(lab, api)?;
        until(BACK, "the new objects are acknowledged", || {
            let (uid, generation) = version(api, DNS)?;
            let said = said(api)?;
            let ack = said.get(&uid).and_then(Value::as_str);
            Ok(ack
                .filter(|ack| ack.starts_with(&format!("{generation} ")))
                .map(drop))
        })?;
        lab.served(0, 0)?;
        ensure!((1..=2).contains(&warnings(lab)), "said {} times", warnings(lab));
        // Access that is forbidden for a while.
        api.kubectl()
            .run(&["delete", "clusterrolebinding", "holdfast-agent"])?;
        let forbidden = Instant::now();
        patch(api, DNS, &json!({"spec": {"switchover": {"drain": "1s"}}}))?;
        until(Duration::from_secs(90), "it is noticed", || {
            let lines = lab.node.log();
            Ok(lines
                .iter()
                .any(|line| line.contains("may this agent list and watch"))
                .then_some(()))
        })?;
        say(format_args!("noticed after {:?}", forbidden.elapsed()));
        ensure!(lab.node.metrics()?.intents("programmed") == 4);
        lab.served(0, 0)?;
        let rights = in_repository("deploy/kustomize/base/agent-rbac.yaml");
        api.kubectl().run(&["apply", "-f", &rights.to_string_lossy()])?;
        until(BACK, "it is acknowledged", || {
            let (uid, generation) = version(api, DNS)?;
            let said = said(api)?;
            let ack = said.get(&uid).and_then(Value::as_str);
            Ok(ack
                .filter(|ack| ack.starts_with(&format!("{generation} ")))
                .map(drop))
        })
    })
}
