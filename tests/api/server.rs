//! The API server of this suite, with everything of `deploy/kustomize/base` in it, and requests that are made of it.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, bail};
use holdfast_tests::codegen::in_repository;
use holdfast_tests::kubernetes::{ApiServer, Kubectl, api_server};
use hyper::Request;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

/// Where the objects are.
pub(crate) const GROUP: &str = "/apis/holdfast.dev/v1alpha1";

/// Which content a patch has.
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

/// One server for all tests: each has names of its own.
pub(crate) fn server() -> anyhow::Result<&'static Server> {
    static SERVER: OnceLock<Server> = OnceLock::new();
    if SERVER.get().is_none() {
        let started = Server::start()?;
        let _ = SERVER.set(started);
    }
    SERVER.get().context("the server that was just started")
}

pub(crate) struct Server {
    api: ApiServer,
    runtime: Runtime,
    administrator: Client,
}

impl Server {
    fn start() -> anyhow::Result<Self> {
        let api = api_server()?;
        let base = in_repository("deploy/kustomize/base");
        let base = base.to_string_lossy();
        api.kubectl().run(&["apply", "--server-side", "-k", &base])?;
        let crds = ["attachments", "nodereports", "routepolicies"];
        let crds = crds.map(|plural| format!("crd/{plural}.holdfast.dev"));
        let mut words = vec!["wait", "--for=condition=Established", "--timeout=60s"];
        words.extend(crds.iter().map(String::as_str));
        api.kubectl().run(&words)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let administrator = runtime.block_on(client(api.kubectl(), None))?;
        let server = Self {
            api,
            runtime,
            administrator,
        };
        for name in ["shop", "other"] {
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            server.administrator().post("/api/v1/namespaces", &namespace)?;
        }
        Ok(server)
    }

    pub(crate) fn kubectl(&self) -> &Kubectl {
        self.api.kubectl()
    }

    pub(crate) fn administrator(&self) -> User<'_> {
        User {
            runtime: &self.runtime,
            client: self.administrator.clone(),
        }
    }

    /// Whoever has this token.
    pub(crate) fn bearer(&self, token: &str) -> anyhow::Result<User<'_>> {
        Ok(User {
            runtime: &self.runtime,
            client: self.runtime.block_on(client(self.kubectl(), Some(token)))?,
        })
    }
}

async fn client(kubectl: &Kubectl, token: Option<&str>) -> anyhow::Result<Client> {
    let file = Kubeconfig::read_from(kubectl.kubeconfig())?;
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    if let Some(token) = token {
        config.auth_info = AuthInfo {
            token: Some(token.to_owned().into()),
            ..AuthInfo::default()
        };
    }
    config.read_timeout = Some(Duration::from_secs(30));
    Ok(Client::try_from(config)?)
}

/// Somebody who asks.
pub(crate) struct User<'a> {
    runtime: &'a Runtime,
    pub(crate) client: Client,
}

/// What the server says no with.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: u16,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.code, self.reason, self.message)
    }
}

impl User<'_> {
    /// What comes of a request: an object, or a refusal.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        content: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Result<Value, Refusal>> {
        let body = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("Content-Type", content)
            .body(body)?;
        match self.runtime.block_on(self.client.request::<Value>(request)) {
            Ok(object) => Ok(Ok(object)),
            Err(kube::Error::Api(status)) => Ok(Err(Refusal {
                code: status.code,
                reason: status.reason.clone(),
                message: status.message.clone(),
            })),
            Err(error) => Err(error).with_context(|| format!("{method} {path}")),
        }
    }

    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.must("GET", path, "application/json", None)
    }

    pub(crate) fn post(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        self.must("POST", path, "application/json", Some(object))
    }

    pub(crate) fn patch(&self, path: &str, change: &Value) -> anyhow::Result<Value> {
        self.must("PATCH", path, MERGE, Some(change))
    }

    fn must(&self, method: &str, path: &str, content: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        match self.ask(method, path, content, body)? {
            Ok(object) => Ok(object),
            Err(refusal) => bail!("{method} {path}: {refusal}"),
        }
    }

    /// Runs what asks by itself.
    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }
}
