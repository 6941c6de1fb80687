//! An API server in this process, for tests: no sockets, so that it works on a paused clock, and it fails on demand.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use futures::stream;
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::ApiServer;

/// What a request meets instead of its answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// This status.
    Status(u16),
    /// No answer ever.
    Hang,
    /// An answer after so long.
    Slow(Duration),
    /// It is carried out, and its answer is lost.
    Lost,
    /// A list that lacks this object.
    Lacks(&'static str),
    /// A watch that stays open and says nothing, not even its end.
    Swallow,
    /// A watch that says this status and ends.
    MidStream(u16),
    /// A watch that says this line first.
    Line(String),
    /// A list with this item alone.
    Only(String),
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// When.
    pub at: Instant,
    /// `GET`, `POST`, `PATCH`; `WATCH` for a watch.
    pub verb: String,
    /// Path.
    pub path: String,
    /// Query.
    pub query: BTreeMap<String, String>,
    /// Body.
    pub body: Value,
}

struct Planned {
    verb: &'static str,
    path: &'static str,
    left: usize,
    fault: Fault,
}

type Id = (String, String, String);

#[derive(Default)]
struct Shared {
    version: u64,
    /// Plural, namespace, name.
    objects: BTreeMap<Id, Value>,
    history: Vec<(u64, &'static str, Id, Value)>,
    /// Versions up to this one cannot be watched from.
    compacted: u64,
    planned: Vec<Planned>,
    asked: Vec<Asked>,
    node: Option<String>,
    /// Kinds whose definitions are being deleted.
    ending: bool,
}

/// The API server. Cheap to clone.
#[derive(Clone)]
pub struct Mock {
    shared: Arc<Mutex<Shared>>,
    changed: watch::Sender<u64>,
}

impl Default for Mock {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
            changed: watch::channel(0).0,
        }
    }
}

impl Mock {
    /// The way to it.
    pub fn api(&self) -> ApiServer {
        let router = axum::Router::new().fallback(answer).with_state(self.clone());
        kube::Client::new(router, "default").into()
    }

    fn with<T>(&self, work: impl FnOnce(&mut Shared) -> T) -> T {
        work(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Tokens are bound to this node.
    pub fn bind(&self, node: &str) {
        self.with(|shared| shared.node = Some(node.to_owned()));
    }

    /// The next `times` requests of this verb whose path contains this meet a fault.
    pub fn plan(&self, verb: &'static str, path: &'static str, times: usize, fault: Fault) {
        let planned = Planned {
            verb,
            path,
            left: times,
            fault,
        };
        self.with(|shared| shared.planned.push(planned));
    }

    /// No more faults.
    pub fn heal(&self) {
        self.with(|shared| shared.planned.clear());
    }

    /// The definitions of all kinds are being deleted, or are there again.
    pub fn end(&self, ending: bool) {
        self.with(|shared| shared.ending = ending);
    }

    /// Watches from versions so far meet 410.
    pub fn compact(&self) {
        self.with(|shared| {
            shared.version += 1;
            shared.compacted = shared.version;
        });
    }

    /// Requests so far.
    pub fn asked(&self, verb: &str, path: &str) -> Vec<Asked> {
        self.with(|shared| {
            let fits = |asked: &&Asked| asked.verb == verb && asked.path.contains(path);
            shared.asked.iter().filter(fits).cloned().collect()
        })
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.with(|shared| shared.asked.clear());
    }

    /// Creates or replaces an object: its generation and uid are its own business.
    pub fn put(&self, plural: &str, object: Value) {
        self.change(plural, object, false);
    }

    /// Deletes one.
    pub fn delete(&self, plural: &str, namespace: &str, name: &str) {
        let id = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        let object = self.with(|shared| shared.objects.get(&id).cloned());
        if let Some(object) = object {
            self.change(plural, object, true);
        }
    }

    /// One object as it is.
    pub fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let id = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.with(|shared| shared.objects.get(&id).cloned())
    }

    /// Names of all objects.
    pub fn names(&self, plural: &str) -> Vec<String> {
        self.with(|shared| {
            let of = |(kind, _, name): &Id| (kind == plural).then(|| name.clone());
            shared.objects.keys().filter_map(of).collect()
        })
    }

    fn change(&self, plural: &str, mut object: Value, gone: bool) -> Value {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let id = (plural.to_owned(), text("namespace"), text("name"));
        let version = self.with(|shared| {
            shared.version += 1;
            let version = shared.version;
            object["metadata"]["resourceVersion"] = version.to_string().into();
            let kind = if gone {
                shared.objects.remove(&id);
                "DELETED"
            } else if shared.objects.insert(id.clone(), object.clone()).is_some() {
                "MODIFIED"
            } else {
                "ADDED"
            };
            shared.history.push((version, kind, id, object.clone()));
            version
        });
        self.changed.send_replace(version);
        object
    }

    /// What an API server says of a definition that is being deleted: nothing can be created any more.
    fn discovery(&self) -> Response {
        let verbs = if self.with(|shared| shared.ending) {
            json!(["delete", "get", "list", "watch"])
        } else {
            json!(["create", "delete", "get", "list", "patch", "watch"])
        };
        let kinds = ["attachments", "routepolicies", "nodereports"];
        let resources = kinds.map(|name| json!({"name": name, "verbs": verbs}));
        good(&json!({"resources": resources}))
    }

    fn fault(&self, verb: &str, path: &str) -> Option<Fault> {
        self.with(|shared| {
            let planned = shared
                .planned
                .iter_mut()
                .find(|planned| planned.left > 0 && planned.verb == verb && path.contains(planned.path))?;
            planned.left -= 1;
            Some(planned.fault.clone())
        })
    }
}

/// What a path names.
struct Target {
    plural: String,
    namespace: Option<String>,
    name: Option<String>,
}

impl Target {
    fn of(path: &str) -> Option<Self> {
        let mut parts = path.trim_matches('/').split('/').skip(3).map(str::to_owned);
        let mut plural = parts.next()?;
        let mut namespace = None;
        if plural == "namespaces" {
            namespace = parts.next();
            plural = parts.next()?;
        }
        Some(Self {
            plural,
            namespace,
            name: parts.next(),
        })
    }

    fn has(&self, id: &Id, object: &Value, query: &BTreeMap<String, String>) -> bool {
        let selected = query.get("fieldSelector").is_none_or(|selector| {
            let (field, value) = selector.split_once('=').unwrap_or_default();
            let pointer = format!("/{}", field.replace('.', "/"));
            object.pointer(&pointer).and_then(Value::as_str) == Some(value)
        });
        self.plural == id.0 && self.namespace.as_ref().is_none_or(|namespace| *namespace == id.1) && selected
    }
}

async fn answer(State(mock): State<Mock>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, 1 << 24).await.unwrap_or_default();
    let query: BTreeMap<String, String> =
        axum::extract::Query::try_from_uri(&parts.uri).map_or_else(|_| BTreeMap::new(), |query| query.0);
    let path = parts.uri.path().to_owned();
    let verb = if query.contains_key("watch") {
        "WATCH".to_owned()
    } else {
        parts.method.to_string()
    };
    let asked = Asked {
        at: Instant::now(),
        verb: verb.clone(),
        path: path.clone(),
        query: query.clone(),
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    };
    mock.with(|shared| shared.asked.push(asked.clone()));
    let fault = mock.fault(&verb, &path);
    match &fault {
        Some(Fault::Status(code)) => return refusal(*code),
        Some(Fault::Hang) => return std::future::pending().await,
        Some(Fault::Slow(wait)) => tokio::time::sleep(*wait).await,
        _ => {}
    }
    if path.ends_with("/selfsubjectreviews") {
        let node = mock.with(|shared| shared.node.clone());
        let extra = node.map_or(json!({}), |node| {
            json!({"authentication.kubernetes.io/node-name": [node], "authentication.kubernetes.io/node-uid": ["uid-of-node"]})
        });
        return good(&json!({"status": {"userInfo": {"username": "agent", "extra": extra}}}));
    }
    if path == "/apis/holdfast.dev/v1alpha1" {
        return mock.discovery();
    }
    let Some(target) = Target::of(&path) else {
        return refusal(404);
    };
    if let ("GET", Some(name)) = (verb.as_str(), &target.name) {
        let found = mock.get(
            &target.plural,
            target.namespace.as_deref().unwrap_or_default(),
            name,
        );
        return found.map_or_else(|| refusal(404), |object| good(&object));
    }
    let answer = match verb.as_str() {
        "WATCH" => return watch_from(&mock, target, query, fault),
        "GET" => list(&mock, &target, &query, fault.as_ref()),
        "POST" => create(&mock, &target, asked.body),
        "PATCH" => patch(&mock, &target, &asked.body),
        _ => refusal(405),
    };
    if matches!(fault, Some(Fault::Lost)) {
        return std::future::pending().await;
    }
    answer
}

fn good(value: &Value) -> Response {
    Response::new(Body::from(value.to_string()))
}

fn status(code: u16) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "message": format!("as planned: {code}")})
}

fn refusal(code: u16) -> Response {
    let mut response = good(&status(code));
    *response.status_mut() = hyper::StatusCode::from_u16(code).unwrap_or_default();
    response
}

fn list(mock: &Mock, target: &Target, query: &BTreeMap<String, String>, fault: Option<&Fault>) -> Response {
    mock.with(|shared| {
        let fits = |(id, object): &(&Id, &Value)| {
            target.has(id, object, query) && !matches!(fault, Some(Fault::Lacks(name)) if *name == id.2)
        };
        let all: Vec<&Value> = shared
            .objects
            .iter()
            .filter(fits)
            .map(|(_, object)| object)
            .collect();
        let from: usize = query.get("continue").and_then(|at| at.parse().ok()).unwrap_or(0);
        let limit: usize = query
            .get("limit")
            .and_then(|limit| limit.parse().ok())
            .unwrap_or(usize::MAX);
        let to = from.saturating_add(limit).min(all.len());
        let mut metadata = json!({"resourceVersion": shared.version.to_string()});
        if to < all.len() {
            metadata["continue"] = to.to_string().into();
        }
        let mut items: Vec<String> = all[from..to].iter().map(ToString::to_string).collect();
        if let Some(Fault::Only(item)) = fault {
            items = vec![item.clone()];
        }
        let items = items.join(",");
        Response::new(Body::from(format!(
            r#"{{"metadata":{metadata},"items":[{items}]}}"#
        )))
    })
}

fn create(mock: &Mock, target: &Target, mut object: Value) -> Response {
    if let Some(namespace) = &target.namespace {
        object["metadata"]["namespace"] = namespace.as_str().into();
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let namespace = target.namespace.clone().unwrap_or_default();
    if mock.get(&target.plural, &namespace, name).is_some() {
        return refusal(409);
    }
    good(&mock.change(&target.plural, object, false))
}

fn patch(mock: &Mock, target: &Target, patch: &Value) -> Response {
    let namespace = target.namespace.clone().unwrap_or_default();
    let name = target.name.clone().unwrap_or_default();
    let Some(object) = mock.get(&target.plural, &namespace, &name) else {
        return refusal(404);
    };
    let wanted = &patch["metadata"]["resourceVersion"];
    if !wanted.is_null() && *wanted != object["metadata"]["resourceVersion"] {
        return refusal(409);
    }
    let mut changed = object.clone();
    merge(&mut changed, patch);
    if changed == object {
        return good(&object);
    }
    good(&mock.change(&target.plural, changed, false))
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let Value::Object(target) = target else { return };
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn watch_from(
    mock: &Mock,
    target: Target,
    query: BTreeMap<String, String>,
    fault: Option<Fault>,
) -> Response {
    let number = |key: &str| query.get(key).and_then(|value| value.parse::<u64>().ok());
    let mut from = number("resourceVersion").unwrap_or(0);
    if mock.with(|shared| from < shared.compacted) {
        return refusal(410);
    }
    let end = Instant::now() + Duration::from_secs(number("timeoutSeconds").unwrap_or(300));
    let (lines, mut said) = mpsc::channel::<Bytes>(1);
    let mock = mock.clone();
    tokio::spawn(async move {
        match fault {
            Some(Fault::Swallow) => return lines.closed().await,
            Some(Fault::MidStream(code)) => {
                let line = json!({"type": "ERROR", "object": status(code)});
                let _ = lines.send(format!("{line}\n").into()).await;
                return;
            }
            Some(Fault::Line(line)) => {
                let _ = lines.send(format!("{line}\n").into()).await;
            }
            _ => {}
        }
        let mut changed = mock.changed.subscribe();
        loop {
            let news: Vec<String> = mock.with(|shared| {
                let fits = |(version, _, id, object): &&(u64, &'static str, Id, Value)| {
                    *version > from && target.has(id, object, &query)
                };
                let line = |(_, kind, _, object): &(u64, &'static str, Id, Value)| {
                    json!({"type": kind, "object": object}).to_string()
                };
                let news = shared.history.iter().filter(fits).map(line).collect();
                from = shared.version;
                news
            });
            for line in news {
                // In two pieces, as a network may.
                let (head, tail) = line.split_at(line.len() / 2);
                let (head, tail) = (head.to_owned(), format!("{tail}\n"));
                if lines.send(head.into()).await.is_err() || lines.send(tail.into()).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = lines.closed() => return,
                _ = changed.changed() => {}
                () = tokio::time::sleep_until(end) => {
                    let bookmark = json!({"type": "BOOKMARK", "object":
                        {"metadata": {"resourceVersion": from.to_string()}}});
                    let _ = lines.send(format!("{bookmark}\n").into()).await;
                    return;
                }
            }
        }
    });
    let lines =
        stream::poll_fn(move |context| said.poll_recv(context).map(|line| line.map(Ok::<_, Infallible>)));
    Response::new(Body::from_stream(lines))
}
