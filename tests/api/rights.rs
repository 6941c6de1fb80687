//! Who may write what, asked of the server with the very tokens that pods have.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use holdfast_tests::{say, until};
use serde_json::{Value, json};

use crate::server::{APPLY, GROUP, MERGE, Refusal, Server, User, server};
use crate::shown::report;

const SYSTEM: &str = "/api/v1/namespaces/holdfast-system";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces";
const JSON: &str = "application/json";

/// What somebody tries.
struct Try {
    method: &'static str,
    path: String,
    content: &'static str,
    body: Option<Value>,
    allowed: bool,
}

fn may(method: &'static str, path: impl Into<String>, body: impl Into<Option<Value>>) -> Try {
    Try {
        method,
        path: path.into(),
        content: JSON,
        body: body.into(),
        allowed: true,
    }
}

fn may_not(method: &'static str, path: impl Into<String>, body: impl Into<Option<Value>>) -> Try {
    Try {
        allowed: false,
        ..may(method, path, body)
    }
}

impl Try {
    fn by(self, content: &'static str) -> Self {
        Self { content, ..self }
    }

    fn ask(&self, user: &User<'_>) -> anyhow::Result<Result<Value, Refusal>> {
        user.ask(self.method, &self.path, self.content, self.body.as_ref())
    }
}

/// Each is as it should be; a refusal is one of rights, unless the objects' own rules say no before.
fn all_are_as_they_should(who: &str, user: &User<'_>, tries: &[Try]) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    for one in tries {
        let told = format!("{who}: {} {}", one.method, one.path);
        match (one.ask(user)?, one.allowed) {
            (Ok(_), true) => {}
            (Err(refusal), false) if refusal.code == 403 || refusal.message.contains("the name must be") => {}
            (Ok(_), false) => wrong.push(format!("{told}: allowed")),
            (Err(refusal), _) => wrong.push(format!("{told}: {refusal}")),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let allowed = tries.iter().filter(|one| one.allowed).count();
    say(format_args!(
        "{who}: {allowed} allowed, {} refused",
        tries.len() - allowed
    ));
    Ok(())
}

/// A pod of the agent on a node, and a token that is bound to it, as a kubelet asks for one.
fn agent_on(server: &Server, node: &str) -> anyhow::Result<String> {
    let user = server.administrator();
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
    user.post("/api/v1/nodes", &object)?;
    let name = format!("agent-{node}");
    let pod = user.post(
        &format!("{SYSTEM}/pods"),
        &json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": node,
                "serviceAccountName": "holdfast-agent",
                "containers": [{"name": "agent", "image": "holdfast"}],
            },
        }),
    )?;
    let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]});
    token(&user, "holdfast-agent", json!({"boundObjectRef": bound}))
}

fn token(user: &User<'_>, account: &str, spec: Value) -> anyhow::Result<String> {
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let answer = user.post(&format!("{SYSTEM}/serviceaccounts/{account}/token"), &request)?;
    let token = answer["status"]["token"].as_str();
    token.map(str::to_owned).context("no token")
}

fn lease(name: &str, holder: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 40},
    })
}

fn with_finalizer(mut object: Value) -> Value {
    object["metadata"]["finalizers"] = json!(["example.org/stays"]);
    object
}

/// An admission policy takes a moment until it is in force.
fn until_admission_is_in_force(agent: &User<'_>) -> anyhow::Result<()> {
    let foreign = may_not(
        "POST",
        format!("{GROUP}/nodereports?dryRun=All"),
        report("nobody.r", "nobody"),
    );
    until(
        Duration::from_secs(30),
        "the admission policy is in force",
        || match foreign.ask(agent)? {
            Err(refusal) if refusal.code == 403 => Ok(Some(())),
            Err(refusal) => bail!("{refusal}"),
            Ok(_) => Ok(None),
        },
    )
}

pub(crate) fn an_agent_writes_about_its_own_node_and_nothing_else() -> anyhow::Result<()> {
    let server = server()?;
    let administrator = server.administrator();
    let reports = format!("{GROUP}/nodereports");
    let own = "r-edge";
    let agent = server.bearer(&agent_on(server, own)?)?;
    until_admission_is_in_force(&agent)?;

    // What others have, so that a refusal is not for want of it.
    let others = format!("{LEASES}/holdfast-node-lease/leases");
    let systems = format!("{LEASES}/holdfast-system/leases");
    administrator.post(&reports, &report("r-other.r", "r-other"))?;
    administrator.post(&others, &lease("r-other", "r-other/e1"))?;
    administrator.post(&systems, &lease("r-leader", "leader"))?;
    let shop = format!("{GROUP}/namespaces/shop");
    let policy = json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "RoutePolicy", "metadata": {"name": "rights"},
        "spec": {
            "consumers": {"matchLabels": {"app": "web"}}, "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": "10.0.0.1"}],
        },
    });
    administrator.post(&format!("{shop}/routepolicies"), &policy)?;
    let attachment = json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "Attachment", "metadata": {"name": "rights"},
        "spec": {"node": own, "interface": "hfweb0", "identity": "pod-1"},
    });
    administrator.post(&format!("{shop}/attachments"), &attachment)?;
    let another = |mut object: Value| {
        object["metadata"]["name"] = "another".into();
        object
    };
    let change = json!({"programmed": {"u-9": "1 0000000000000000"}});
    let finalizers = json!({"metadata": {"finalizers": ["example.org/stays"]}});
    let holder = json!({"spec": {"holderIdentity": "r-edge/e2"}});
    let nothing = json!({"metadata": {"labels": {"x": "y"}}});

    all_are_as_they_should(
        "the agent of a node, about its own",
        &agent,
        &[
            may("POST", &reports, report("r-edge.r", own)),
            may("PATCH", format!("{reports}/r-edge.r"), change.clone()).by(MERGE),
            may(
                "PATCH",
                format!("{reports}/r-edge.r0?fieldManager=agent"),
                report("r-edge.r0", own),
            )
            .by(APPLY),
            may(
                "PATCH",
                format!("{reports}/r-edge.r0f?fieldManager=agent"),
                report("r-edge.r0f", own),
            )
            .by(APPLY),
            may("GET", format!("{reports}?fieldSelector=node%3Dr-edge"), None),
            may("GET", format!("{reports}/r-edge.r"), None),
            may("POST", &others, lease(own, "r-edge/e1")),
            may("PATCH", format!("{others}/r-edge"), holder.clone()).by(MERGE),
            may("GET", format!("{others}/r-edge"), None),
            may(
                "GET",
                format!("{GROUP}/attachments?fieldSelector=spec.node%3Dr-edge"),
                None,
            ),
            may("GET", format!("{shop}/routepolicies"), None),
            may(
                "POST",
                "/apis/authentication.k8s.io/v1/selfsubjectreviews",
                json!({
                    "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview",
                }),
            ),
        ],
    )?;
    all_are_as_they_should(
        "the agent of a node, about reports",
        &agent,
        &[
            may_not("POST", &reports, report("r-third.r", "r-third")),
            may_not("POST", &reports, report("r-edge", own)),
            may_not("POST", &reports, report("r-edge.rx", own)),
            may_not("POST", &reports, report("r-edge.r000", own)),
            may_not("POST", &reports, report("r-edge.r1", "r-other")),
            may_not("POST", &reports, report("r-edge0.r", "r-edge0")),
            may_not("POST", &reports, report("r-edge.r0.r", "r-edge.r0")),
            may_not("POST", &reports, with_finalizer(report("r-edge.r2", own))),
            may_not("PATCH", format!("{reports}/r-other.r"), change.clone()).by(MERGE),
            may_not(
                "PATCH",
                format!("{reports}/r-other.r?fieldManager=agent&force=true"),
                report("r-other.r", "r-other"),
            )
            .by(APPLY),
            may_not(
                "PATCH",
                format!("{reports}/r-fourth.r?fieldManager=agent"),
                report("r-fourth.r", "r-fourth"),
            )
            .by(APPLY),
            may_not("PATCH", format!("{reports}/r-edge.r"), finalizers.clone()).by(MERGE),
            may_not(
                "PUT",
                format!("{reports}/r-other.r"),
                report("r-other.r", "r-other"),
            ),
            may_not("PATCH", format!("{reports}/r-other.r/status"), change).by(MERGE),
            may_not("DELETE", format!("{reports}/r-other.r"), None),
            may_not("DELETE", format!("{reports}/r-edge.r"), None),
            may_not("DELETE", &reports, None),
        ],
    )?;
    all_are_as_they_should(
        "the agent of a node, about leases",
        &agent,
        &[
            may_not("POST", &others, lease("r-third", "r-third/e1")),
            may_not("POST", &systems, lease(own, "r-edge/e1")),
            may_not("POST", &systems, lease("holdfast-controller", "r-edge")),
            may_not(
                "POST",
                format!("{LEASES}/kube-node-lease/leases"),
                lease(own, own),
            ),
            may_not(
                "POST",
                format!("{LEASES}/kube-system/leases"),
                lease("kube-scheduler", own),
            ),
            may_not("PATCH", format!("{others}/r-other"), holder.clone()).by(MERGE),
            may_not(
                "PATCH",
                format!("{others}/r-other?fieldManager=agent&force=true"),
                lease("r-other", "x"),
            )
            .by(APPLY),
            may_not("PATCH", format!("{systems}/r-leader"), holder).by(MERGE),
            may_not("PATCH", format!("{others}/r-edge"), finalizers).by(MERGE),
            may_not("PUT", format!("{others}/r-other"), lease("r-other", "x")),
            may_not("DELETE", format!("{others}/r-edge"), None),
            may_not("DELETE", format!("{others}/r-other"), None),
            may_not("DELETE", &others, None),
        ],
    )?;
    all_are_as_they_should(
        "the agent of a node, about all else",
        &agent,
        &[
            may_not("POST", format!("{shop}/attachments"), another(attachment)),
            may_not("PATCH", format!("{shop}/attachments/rights"), nothing.clone()).by(MERGE),
            may_not("DELETE", format!("{shop}/attachments/rights"), None),
            may_not("POST", format!("{shop}/routepolicies"), another(policy)),
            may_not("PATCH", format!("{shop}/routepolicies/rights"), nothing.clone()).by(MERGE),
            may_not(
                "PATCH",
                format!("{shop}/routepolicies/rights/status"),
                json!({"status": {}}),
            )
            .by(MERGE),
            may_not("DELETE", format!("{shop}/routepolicies/rights"), None),
            may_not("PATCH", format!("/api/v1/nodes/{own}"), nothing.clone()).by(MERGE),
            may_not("PATCH", format!("/api/v1/nodes/{own}/status"), nothing.clone()).by(MERGE),
            may_not(
                "POST",
                format!("{SYSTEM}/pods"),
                json!({
                    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "more"},
                    "spec": {"containers": [{"name": "c", "image": "i"}]},
                }),
            ),
            may_not("DELETE", format!("{SYSTEM}/pods/agent-{own}"), None),
            may_not(
                "POST",
                format!("{SYSTEM}/serviceaccounts/holdfast-agent/token"),
                json!({
                    "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {},
                }),
            ),
            may_not("GET", format!("{SYSTEM}/secrets"), None),
            may_not(
                "PATCH",
                "/apis/apps/v1/namespaces/holdfast-system/daemonsets/holdfast-agent",
                nothing.clone(),
            )
            .by(MERGE),
            may_not(
                "PATCH",
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/holdfast-agent",
                nothing.clone(),
            )
            .by(MERGE),
            may_not(
                "DELETE",
                "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/holdfast-agent",
                None,
            ),
            may_not(
                "PATCH",
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodereports.holdfast.dev",
                nothing.clone(),
            )
            .by(MERGE),
            may_not(
                "PATCH",
                "/apis/rbac.authorization.k8s.io/v1/clusterroles/holdfast-agent",
                nothing,
            )
            .by(MERGE),
        ],
    )?;

    // All of it is still there, and a node whose name has the form of a report's writes its own.
    for path in [
        format!("{reports}/r-other.r"),
        format!("{reports}/r-edge.r0f"),
        format!("{others}/r-other"),
    ] {
        administrator.get(&path)?;
    }
    let tricky = server.bearer(&agent_on(server, "r-edge.r0")?)?;
    all_are_as_they_should(
        "the agent of a node called r-edge.r0",
        &tricky,
        &[
            may("POST", &reports, report("r-edge.r0.r", "r-edge.r0")),
            may_not("PATCH", format!("{reports}/r-edge.r0"), json!({"programmed": {}})).by(MERGE),
            may_not("PATCH", format!("{reports}/r-edge.r"), json!({"programmed": {}})).by(MERGE),
        ],
    )
}

/// A token of the same account that no kubelet gave.
pub(crate) fn a_token_of_no_node_writes_nothing() -> anyhow::Result<()> {
    let server = server()?;
    let administrator = server.administrator();
    let agent = server.bearer(&token(&administrator, "holdfast-agent", json!({}))?)?;
    until_admission_is_in_force(&agent)?;
    let reports = format!("{GROUP}/nodereports");
    administrator.post(&reports, &report("n-edge.r", "n-edge"))?;
    all_are_as_they_should(
        "a token of no node",
        &agent,
        &[
            may("GET", &reports, None),
            may_not("POST", &reports, report("n-new.r", "n-new")),
            may_not("PATCH", format!("{reports}/n-edge.r"), json!({"programmed": {}})).by(MERGE),
            may_not(
                "POST",
                format!("{LEASES}/holdfast-node-lease/leases"),
                lease("n-edge", "n-edge/e1"),
            ),
            may_not(
                "POST",
                format!("{LEASES}/holdfast-node-lease/leases"),
                lease("holdfast-agent", "x"),
            ),
        ],
    )
}

pub(crate) fn the_controller_writes_statuses_and_nothing_else() -> anyhow::Result<()> {
    let server = server()?;
    let administrator = server.administrator();
    let controller = server.bearer(&token(&administrator, "holdfast-controller", json!({}))?)?;
    let other = format!("{GROUP}/namespaces/other");
    let policy = json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "RoutePolicy", "metadata": {"name": "controlled"},
        "spec": {
            "consumers": {"matchLabels": {"app": "web"}}, "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": "10.0.0.1"}],
        },
    });
    administrator.post(&format!("{other}/routepolicies"), &policy)?;
    administrator.post(&format!("{GROUP}/nodereports"), &report("c-edge.r", "c-edge"))?;
    let leases = format!("{LEASES}/holdfast-system/leases");
    administrator.post(&leases, &lease("c-another", "x"))?;
    let node_leases = format!("{LEASES}/holdfast-node-lease/leases");
    administrator.post(&node_leases, &lease("c-edge", "c-edge/e1"))?;
    let holder = json!({"spec": {"holderIdentity": "c"}});
    let one = format!("{other}/routepolicies/controlled");
    let nothing = json!({"metadata": {"labels": {"x": "y"}}});
    all_are_as_they_should(
        "the controller",
        &controller,
        &[
            may(
                "PATCH",
                format!("{one}/status"),
                json!({"status": {"observedGeneration": 1}}),
            )
            .by(MERGE),
            may("GET", format!("{GROUP}/routepolicies"), None),
            may("GET", format!("{GROUP}/attachments"), None),
            may("GET", format!("{GROUP}/nodereports"), None),
            may("GET", "/api/v1/nodes", None),
            may("GET", &node_leases, None),
            may("POST", &leases, lease("holdfast-controller", "c")),
            may("GET", format!("{leases}/holdfast-controller"), None),
            may("PATCH", format!("{leases}/holdfast-controller"), holder.clone()).by(MERGE),
            may_not("PATCH", format!("{leases}/c-another"), holder.clone()).by(MERGE),
            may_not("DELETE", format!("{leases}/holdfast-controller"), None),
            may_not("PATCH", format!("{node_leases}/c-edge"), holder).by(MERGE),
            may_not("POST", &node_leases, lease("c-new", "c")),
            may_not("PATCH", &one, json!({"spec": {"delivery": "Translate"}})).by(MERGE),
            may_not("DELETE", &one, None),
            may_not("PATCH", format!("{GROUP}/nodereports/c-edge.r"), nothing.clone()).by(MERGE),
            may_not("DELETE", format!("{GROUP}/nodereports/c-edge.r"), None),
            may_not(
                "POST",
                format!("{other}/attachments"),
                json!({
                    "apiVersion": "holdfast.dev/v1alpha1", "kind": "Attachment", "metadata": {"name": "controlled"},
                    "spec": {"node": "c-edge", "interface": "hfweb0", "identity": "pod-1"},
                }),
            ),
            may_not("PATCH", "/api/v1/nodes/c-edge", nothing).by(MERGE),
            may_not("GET", format!("{SYSTEM}/secrets"), None),
            may_not("GET", "/api/v1/pods", None),
        ],
    )
}

/// By the roles that become part of `edit`; and a CNI by the one that you bind.
pub(crate) fn tenants_write_policies_and_no_attachments() -> anyhow::Result<()> {
    let server = server()?;
    let administrator = server.administrator();
    // What joins roles is a controller, which does not run here: so that they would be joined is read, what they give is tried.
    let joins = |role: &str| -> anyhow::Result<Vec<String>> {
        let role = administrator.get(&format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}"))?;
        let labels = role["metadata"]["labels"].as_object().context("labels")?;
        let joined = labels
            .keys()
            .filter_map(|key| key.strip_prefix("rbac.authorization.k8s.io/aggregate-to-"));
        Ok(joined.map(str::to_owned).collect())
    };
    ensure!(joins("holdfast-edit")? == ["admin", "edit"]);
    ensure!(joins("holdfast-view")? == ["admin", "edit", "view"]);
    ensure!(joins("holdfast-attachment-writer")?.is_empty());
    ensure!(joins("holdfast-agent")?.is_empty() && joins("holdfast-controller")?.is_empty());

    let accounts = [
        ("tenant", vec!["holdfast-edit", "holdfast-view"]),
        ("cni", vec!["holdfast-attachment-writer"]),
    ];
    for (account, roles) in accounts {
        let object = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}});
        administrator.post(&format!("{SYSTEM}/serviceaccounts"), &object)?;
        for role in roles {
            administrator.post(
                "/apis/rbac.authorization.k8s.io/v1/namespaces/shop/rolebindings",
                &json!({
                    "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                    "metadata": {"name": format!("{account}-{role}")},
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                    "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "holdfast-system"}],
                }),
            )?;
        }
    }
    let policy = json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "RoutePolicy", "metadata": {"name": "tenants"},
        "spec": {
            "consumers": {"matchLabels": {"app": "web"}}, "producers": {"matchLabels": {"app": "dns"}},
            "destinations": [{"address": "10.0.0.1"}],
        },
    });
    let attachment = json!({
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "Attachment", "metadata": {"name": "tenants"},
        "spec": {"node": "edge-1", "interface": "hfweb0", "identity": "pod-1"},
    });
    let shop = format!("{GROUP}/namespaces/shop");
    let elsewhere = format!("{GROUP}/namespaces/other");
    let one = format!("{shop}/routepolicies/tenants");
    let tenant = server.bearer(&token(&administrator, "tenant", json!({}))?)?;
    all_are_as_they_should(
        "a tenant",
        &tenant,
        &[
            may("POST", format!("{shop}/routepolicies"), policy.clone()),
            may("PATCH", &one, json!({"spec": {"whileHeld": "Pass"}})).by(MERGE),
            may("GET", format!("{shop}/attachments"), None),
            may_not("POST", format!("{shop}/attachments"), attachment.clone()),
            may_not("PATCH", format!("{one}/status"), json!({"status": {}})).by(MERGE),
            may_not("POST", format!("{elsewhere}/routepolicies"), policy.clone()),
            may_not("POST", format!("{GROUP}/nodereports"), report("t.r", "t")),
            may_not("GET", format!("{GROUP}/nodereports"), None),
            may("DELETE", &one, None),
        ],
    )?;
    let cni = server.bearer(&token(&administrator, "cni", json!({}))?)?;
    let one = format!("{shop}/attachments/tenants");
    all_are_as_they_should(
        "a CNI",
        &cni,
        &[
            may("POST", format!("{shop}/attachments"), attachment.clone()),
            may("PATCH", &one, json!({"spec": {"identity": "pod-2"}})).by(MERGE),
            may("DELETE", &one, None),
            may_not("POST", format!("{elsewhere}/attachments"), attachment),
            may_not("POST", format!("{shop}/routepolicies"), policy),
        ],
    )
}
