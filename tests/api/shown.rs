//! What the server fills in, keeps, selects by and shows.

use anyhow::{Context, ensure};
use holdfast::api::resources::{Attachment, NodeReport, RoutePolicy};
use holdfast::api::v1alpha1::{AttachmentSpec, RoutePolicySpec};
use kube::Api;
use kube::api::PostParams;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::server::{GROUP, MERGE, server};

fn policy(name: &str) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "RoutePolicy",
        "metadata": {"name": name},
        "spec": {
            "consumers": {"matchLabels": {"app": "web"}},
            "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": "10.0.0.0/8"}],
        },
    })
}

fn attachment(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Attachment",
        "metadata": {"name": name},
        "spec": {"node": node, "interface": "hfweb0", "identity": "pod-1"},
    })
}

pub(crate) fn report(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "NodeReport",
        "metadata": {"name": name},
        "node": node,
        "epoch": {
            "id": "e1", "bootID": "b1", "agentStart": "2026-01-31T12:00:00Z", "agentVersion": "0.1.0", "layoutVersion": 1,
        },
        "programmed": {"u-1": "7 9f3ab1c2d3e4f506"},
        "others": [],
    })
}

pub(crate) fn defaults_are_filled_in() -> anyhow::Result<()> {
    let user = server()?.administrator();
    let path = format!("{GROUP}/namespaces/shop/routepolicies");
    let made = user.post(&path, &policy("defaults"))?;
    let expected = json!({
        "consumers": {"matchLabels": {"app": "web"}},
        "producers": {"matchLabels": {"app": "dns"}},
        "destinations": [{"address": "10.0.0.0/8", "protocol": "Any", "port": 0}],
        "delivery": "Direct",
        "whileHeld": "Drop",
        "switchover": {"deadline": "30s", "onDeadline": "KeepOld", "drain": "60s"},
    });
    ensure!(made["spec"] == expected, "{}", made["spec"]);

    // What is given stays, and the rest is filled in; so does what a file leaves out, by the agent's own defaults.
    let mut partly = policy("partly");
    partly["spec"]["switchover"] = json!({"drain": "0s"});
    let made = user.post(&path, &partly)?;
    let filled = json!({"deadline": "30s", "onDeadline": "KeepOld", "drain": "0s"});
    ensure!(made["spec"]["switchover"] == filled, "{}", made["spec"]);
    let (from_file, from_server) = (spec::<RoutePolicySpec>(&partly)?, spec::<RoutePolicySpec>(&made)?);
    ensure!(from_file == from_server, "{from_file:?} is not {from_server:?}");

    // No status comes with an object, and nothing is filled into one that is written.
    let mut told = policy("told");
    told["status"] = json!({"observedGeneration": 9});
    let made = user.post(&path, &told)?;
    ensure!(made.get("status").is_none(), "{made}");
    let status = json!({"status": {"observedGeneration": 1}});
    let made = user.patch(&format!("{path}/told/status"), &status)?;
    ensure!(made["status"] == status["status"], "{}", made["status"]);
    ensure!(made["metadata"]["generation"] == 1, "a status is no edit: {made}");
    Ok(())
}

fn spec<T: DeserializeOwned>(object: &Value) -> anyhow::Result<T> {
    Ok(serde_json::from_value(object["spec"].clone())?)
}

pub(crate) fn what_must_stay_stays() -> anyhow::Result<()> {
    let user = server()?.administrator();
    let attachments = format!("{GROUP}/namespaces/shop/attachments");
    user.post(&attachments, &attachment("stays", "edge-1"))?;
    let one = format!("{attachments}/stays");
    let refused = |path: &str, change: Value| -> anyhow::Result<String> {
        let answer = user.ask("PATCH", path, MERGE, Some(&change))?;
        let refusal = answer.err().with_context(|| format!("{path} took {change}"))?;
        ensure!(refusal.code == 422, "{refusal}");
        Ok(refusal.message)
    };
    let said = refused(&one, json!({"spec": {"node": "edge-2"}}))?;
    ensure!(
        said.contains("spec.node") && said.contains("cannot be changed"),
        "{said}"
    );
    user.patch(&one, &json!({"spec": {"node": "edge-1", "interface": "hfweb1"}}))?;

    let reports = format!("{GROUP}/nodereports");
    user.post(&reports, &report("stays.r0f", "stays"))?;
    let said = refused(&format!("{reports}/stays.r0f"), json!({"node": "stays.r0f"}))?;
    ensure!(
        said.contains("node: Invalid value") && said.contains("cannot be changed"),
        "{said}"
    );
    user.patch(
        &format!("{reports}/stays.r0f"),
        &json!({"programmed": {"u-2": "1 0000000000000000"}}),
    )?;

    // Which node a report speaks of is in its name, and in no other way than one.
    for (name, node) in [
        ("other.r", "stays"),
        ("stays", "stays"),
        ("stays.r000", "stays"),
        ("stays.rx", "stays"),
        ("stays.r0.r", "stays"),
        ("stays2.r", "stays"),
    ] {
        let answer = user.ask("POST", &reports, "application/json", Some(&report(name, node)))?;
        let refusal = answer
            .err()
            .with_context(|| format!("a report {name} of {node} was taken"))?;
        ensure!(refusal.message.contains("the name must be"), "{refusal}");
    }
    user.post(&reports, &report("stays.r0.r", "stays.r0"))?;
    Ok(())
}

/// The types that a client has are those that the server has.
pub(crate) fn objects_are_read_as_they_are_written() -> anyhow::Result<()> {
    let user = server()?.administrator();
    user.run(async {
        let parameters = PostParams::default();
        let policies: Api<RoutePolicy> = Api::namespaced(user.client.clone(), "shop");
        let mut written: RoutePolicy = serde_json::from_value(policy("typed"))?;
        written.spec = serde_json::from_value(json!({
            "consumers": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]},
            "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [
                {"address": "10.96.0.10", "protocol": "UDP", "port": 53, "targetPort": 5353},
                {"address": "fd00:53::/64"},
            ],
            "delivery": "Translate",
            "whileHeld": "Pass",
            "switchover": {"deadline": "1m", "onDeadline": "Cut", "drain": "0s"},
            "maxStaleness": "10m",
        }))?;
        let made = policies.create(&parameters, &written).await?;
        ensure!(made.spec == written.spec, "{:?}", made.spec);
        ensure!(policies.get("typed").await? == made);

        let attachments: Api<Attachment> = Api::namespaced(user.client.clone(), "shop");
        let mut written: Attachment = serde_json::from_value(attachment("typed", "edge-1"))?;
        written.spec = AttachmentSpec {
            addresses: vec!["10.0.0.11".to_owned(), "fd00::11".to_owned()],
            ..written.spec
        };
        let made = attachments.create(&parameters, &written).await?;
        ensure!(made.spec == written.spec, "{:?}", made.spec);

        let reports: Api<NodeReport> = Api::all(user.client.clone());
        let mut written = report("typed.r", "typed");
        written["others"] = json!([{
            "namespace": "shop", "name": "dns", "uid": "u-2", "generation": 3, "covers": "0000000000000001",
            "origin": {"uid": "hub", "generation": 8},
            "state": "Held", "reason": "IdentityMissing", "message": "nobody is registered behind hfweb0",
            "intents": {"desired": 1, "programmed": 0, "held": 1, "failed": 0, "pending": 0},
            "since": "2026-01-31T12:00:00Z", "heldSince": "2026-01-31T12:00:00Z",
            "serving": {"generation": 2, "since": "2026-01-31T11:00:00Z"},
        }]);
        let written: NodeReport = serde_json::from_value(written)?;
        let made = reports.create(&parameters, &written).await?;
        ensure!(made.report == written.report, "{:?}", made.report);
        Ok(())
    })
}

pub(crate) fn objects_of_a_node_are_selected() -> anyhow::Result<()> {
    let user = server()?.administrator();
    for namespace in ["shop", "other"] {
        let path = format!("{GROUP}/namespaces/{namespace}/attachments");
        for node in ["selected-1", "selected-2"] {
            user.post(&path, &attachment(node, node))?;
        }
    }
    for name in ["selected-1.r", "selected-1.r0", "selected-2.r"] {
        let node = name.split_once('.').context("a name of a report")?.0;
        user.post(&format!("{GROUP}/nodereports"), &report(name, node))?;
    }
    let names = |path: &str| -> anyhow::Result<Vec<String>> {
        let list = user.get(&format!("{GROUP}/{path}"))?;
        let items = list["items"].as_array().context("items")?;
        let name = |item: &Value| item["metadata"]["name"].as_str().map(str::to_owned);
        Ok(items.iter().filter_map(name).collect())
    };
    let selected = names("attachments?fieldSelector=spec.node%3Dselected-1")?;
    ensure!(selected == ["selected-1", "selected-1"], "{selected:?}");
    let selected = names("namespaces/other/attachments?fieldSelector=spec.node%3Dselected-2")?;
    ensure!(selected == ["selected-2"], "{selected:?}");
    let selected = names("nodereports?fieldSelector=node%3Dselected-1")?;
    ensure!(selected == ["selected-1.r", "selected-1.r0"], "{selected:?}");
    let all = "attachments?fieldSelector=spec.interface%3Dhfweb0";
    ensure!(names(all).is_err(), "selected by what is not declared");
    Ok(())
}

/// The rows of what kubectl shows, as words.
fn table(words: &[&str]) -> anyhow::Result<Vec<Vec<String>>> {
    let text = server()?.kubectl().run(words)?;
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    Ok(text.lines().map(words).collect())
}

fn condition(kind: &str, status: &str, generation: u64) -> Value {
    json!({
        "type": kind, "status": status, "observedGeneration": generation, "reason": "Told", "message": "",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    })
}

pub(crate) fn columns_say_how_a_policy_is_doing() -> anyhow::Result<()> {
    let user = server()?.administrator();
    let path = format!("{GROUP}/namespaces/other/routepolicies");
    user.post(&path, &policy("shown"))?;
    let status = json!({"status": {
        "observedGeneration": 1,
        "conditions": [condition("Accepted", "True", 1), condition("Programmed", "False", 1)],
        "nodes": {"desired": 5, "programmed": 3, "held": 1, "failed": 0, "pending": 1, "unknown": 0},
        "programmedNodes": "3/5",
        "intents": {"desired": 9, "programmed": 6, "held": 2, "failed": 0, "pending": 1},
    }});
    user.patch(&format!("{path}/shown/status"), &status)?;
    let shown = table(&["get", "rp", "-n", "other", "shown"])?;
    ensure!(
        shown[0] == ["NAME", "ACCEPTED", "PROGRAMMED", "NODES", "HELD", "AGE"],
        "{shown:?}"
    );
    ensure!(
        shown[1][..5] == ["shown", "True", "False", "3/5", "2"],
        "{shown:?}"
    );

    // Conditions are one of each type.
    let twice =
        json!({"status": {"conditions": [condition("Ready", "True", 1), condition("Ready", "False", 1)]}});
    let answer = user.ask("PATCH", &format!("{path}/shown/status"), MERGE, Some(&twice))?;
    let refusal = answer.err().context("two conditions of a type were taken")?;
    ensure!(refusal.message.contains("Duplicate value"), "{refusal}");

    let path = format!("{GROUP}/namespaces/other/attachments");
    user.post(&path, &attachment("shown", "edge-1"))?;
    let shown = table(&["get", "att", "-n", "other", "shown", "-o", "wide"])?;
    ensure!(
        shown[0] == ["NAME", "NODE", "INTERFACE", "IDENTITY", "AGE"],
        "{shown:?}"
    );
    ensure!(
        shown[1][..4] == ["shown", "edge-1", "hfweb0", "pod-1"],
        "{shown:?}"
    );

    user.post(&format!("{GROUP}/nodereports"), &report("shown.r", "shown"))?;
    let shown = table(&["get", "nr", "shown.r"])?;
    ensure!(shown[0] == ["NAME", "NODE", "AGENT", "SINCE", "AGE"], "{shown:?}");
    ensure!(shown[1][..3] == ["shown.r", "shown", "0.1.0"], "{shown:?}");

    let all = server()?
        .kubectl()
        .run(&["get", "holdfast", "-n", "other", "-o", "name"])?;
    for kind in ["attachment", "nodereport", "routepolicy"] {
        let name = format!("{kind}.holdfast.dev/shown");
        ensure!(all.contains(&name), "{name} is not in the category: {all}");
    }
    Ok(())
}

/// What `kubectl wait` needs so that it is not content with the answer to an earlier question: every condition names the
/// generation that it speaks of.
pub(crate) fn f46_wait_is_not_content_with_an_old_answer() -> anyhow::Result<()> {
    let user = server()?.administrator();
    let path = format!("{GROUP}/namespaces/shop/routepolicies");
    let one = format!("{path}/waited");
    user.post(&path, &policy("waited"))?;
    let tell = |status: &str, generation: u64| {
        let conditions = json!({"status": {
            "observedGeneration": generation,
            "conditions": [condition("Programmed", status, generation)],
        }});
        user.patch(&format!("{one}/status"), &conditions)
    };
    let waited = |timeout: &str| -> anyhow::Result<bool> {
        let words = [
            "wait",
            "-n",
            "shop",
            "rp/waited",
            "--for=condition=Programmed",
            "--timeout",
            timeout,
        ];
        Ok(server()?.kubectl().output(&words, None)?.status.success())
    };
    tell("True", 1)?;
    ensure!(waited("10s")?, "the answer is there");
    let edited = user.patch(
        &one,
        &json!({"spec": {"destinations": [{"address": "10.0.0.0/9"}]}}),
    )?;
    ensure!(edited["metadata"]["generation"] == 2, "{edited}");
    ensure!(!waited("2s")?, "content with the answer to generation 1");
    tell("False", 2)?;
    ensure!(!waited("1s")?, "content with no");

    // While it waits the answer comes.
    let server = server()?;
    let mut waiting = server
        .kubectl()
        .command(&[
            "wait",
            "-n",
            "shop",
            "rp/waited",
            "--for=condition=Programmed",
            "--timeout=30s",
        ])
        .spawn()?;
    tell("True", 2)?;
    ensure!(waiting.wait()?.success(), "the answer came");
    Ok(())
}
