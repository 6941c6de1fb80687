//! `holdfast wait` at an API server.
//!
//! For a policy the controller's condition is read, together with the generation and the origin that it speaks of. Whether
//! an attachment is served cannot be read there (a moment ago all was served, and so it says), so for one the reports of its
//! node are judged by the controller's own rule: an acknowledgment that does not cover it does not count.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::ObjectName;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::Args;
use crate::api::status::{ConditionKind, Truth};
use crate::apiserver::object::{Body, Object};
use crate::apiserver::reflect::Collection;
use crate::apiserver::{ApiServer, ConnectError, Failure};
use crate::cli::Answer;
use crate::cli::output::{self, Format};
use crate::clock::{Clock as _, System};
use crate::controller::keeper::{Keeper, Seen, Watched};
use crate::controller::news::{News, follow};
use crate::controller::objects::{self, PolicyBody};
use crate::controller::rollup::{Clock, on_node};
use crate::report::Stamps;
use crate::serve::wire::Goal;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct Found {
    /// Whether it came true in time.
    met: bool,
    /// Each policy that was looked at, as it is.
    policies: Vec<State>,
    /// What is missing to say more.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// A policy, or what it is at one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct State {
    /// Its namespace.
    namespace: String,
    /// Its name.
    name: String,
    /// Generation of the policy.
    generation: u64,
    /// Generation that the answer is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    answered: Option<u64>,
    /// The node, when one attachment was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// `Programmed`, `Held`, `Failed`, `Pending`, `Unknown` or `NoConsumers`.
    state: String,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The same for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error(transparent)]
    Access(#[from] ConnectError),
    #[error("{0}")]
    Failing(String),
    #[error("name a policy, or an attachment with --attachment")]
    NoQuestion,
    #[error("--generation is about a policy: name one")]
    NoPolicy,
}

pub(super) fn run(kubeconfig: Option<&Path>, args: &Args) -> Answer {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let found = match runtime {
        Ok(runtime) => runtime.block_on(ask(kubeconfig, args)),
        Err(error) => Err(NoAnswer::Failing(error.to_string())),
    };
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            output::complain(error);
            return Answer::Unknown;
        }
    };
    match args.format.output {
        Format::Json => {
            output::json(&found);
        }
        Format::Table => output::print(&sentences(&found)),
    }
    if found.met { Answer::Yes } else { Answer::No }
}

async fn ask(kubeconfig: Option<&Path>, args: &Args) -> Result<Found, NoAnswer> {
    let api = ApiServer::configured(kubeconfig).await?;
    let end = Instant::now() + args.timeout.max(LEAST);
    match (&args.policy, &args.attachment) {
        (None, Some(_)) if args.generation.is_some() => Err(NoAnswer::NoPolicy),
        (policy, Some(attachment)) => {
            Attached::new(api, policy.as_ref(), attachment, args)
                .until(end)
                .await
        }
        (Some(policy), None) => until_policy(api, policy, args, end).await,
        (None, None) => Err(NoAnswer::NoQuestion),
    }
}

/// How long one look takes at most, where only one is wanted.
const LEAST: Duration = Duration::from_secs(5);
/// News that wait.
const QUEUE: usize = 256;

// --- a policy ------------------------------------------------------------------------------------------------

async fn until_policy(
    api: ApiServer,
    name: &ObjectName,
    args: &Args,
    end: Instant,
) -> Result<Found, NoAnswer> {
    let policies =
        objects::policies(Some(&name.namespace)).with_fields(format!("metadata.name={}", name.name));
    let (sender, mut news) = mpsc::channel(QUEUE);
    let mut tasks = JoinSet::new();
    tasks.spawn(follow(
        api,
        policies,
        Arc::new(System),
        sender,
        |news: News<PolicyBody>| news,
    ));
    let mut last = Last::default();
    let once = args.timeout.is_zero();
    loop {
        let news = tokio::select! {
            news = news.recv() => news,
            () = sleep_until(end) => None,
        };
        let found = match news {
            None => return last.told(),
            Some(News::Failing(failure)) => {
                last.failing(failure)?;
                continue;
            }
            Some(News::Alive) => continue,
            Some(News::All(objects)) => objects.first().map(|object| policy_found(object, args)),
            Some(News::Changed(object)) => Some(policy_found(&object, args)),
            Some(News::Gone(_)) => None,
        };
        let found = found.unwrap_or_else(|| Found {
            message: Some(format!("{name}: there is no such policy")),
            ..Found::default()
        });
        if found.met || once {
            return Ok(found);
        }
        last.found(found);
    }
}

fn policy_found(object: &Object<PolicyBody>, args: &Args) -> Found {
    let status = &object.body.status;
    let generation = object
        .metadata
        .generation
        .and_then(|number| u64::try_from(number).ok());
    let generation = generation.unwrap_or_default();
    let condition = status.condition(ConditionKind::Programmed);
    let origin = objects::policy(object).and_then(|policy| policy.origin);
    let same_origin = status
        .origin
        .as_ref()
        .map(|origin| (&origin.uid, origin.generation))
        == origin.as_ref().map(|origin| (&origin.uid, origin.generation));
    // What is said of an earlier generation, or of another origin, is no answer to this one.
    let least = args.generation.unwrap_or(generation);
    let current = condition.filter(|condition| condition.observed_generation >= least && same_origin);
    let state = match current.map(|condition| (condition.status, condition.reason.as_str())) {
        Some((Truth::True, _)) => "Programmed",
        Some((_, "Held")) => "Held",
        Some((_, "PartialFailure")) => "Failed",
        Some((_, "NodeUnknown")) => "Unknown",
        Some((_, "NoConsumers")) => "NoConsumers",
        _ => "Pending",
    };
    Found {
        met: state == args.goal.state() && (current.is_some() || args.goal == Goal::Pending),
        policies: vec![State {
            namespace: object.namespace().to_owned(),
            name: object.name().to_owned(),
            generation,
            answered: condition.map(|condition| condition.observed_generation),
            node: None,
            state: state.to_owned(),
            reason: current.map(|condition| condition.reason.clone()),
            message: current.map(|condition| condition.message.clone()),
        }],
        message: None,
    }
}

/// What was found last, and what failed last.
#[derive(Default)]
struct Last {
    found: Option<Found>,
    failure: Option<Failure>,
}

impl Last {
    fn found(&mut self, found: Found) {
        self.found = Some(found);
        self.failure = None;
    }

    /// # Errors
    /// When it is of no use to go on.
    fn failing(&mut self, failure: Failure) -> Result<(), NoAnswer> {
        if matches!(failure.code(), Some(401 | 403)) {
            return Err(NoAnswer::Failing(failure.message));
        }
        self.failure = Some(failure);
        Ok(())
    }

    /// The time is over.
    fn told(self) -> Result<Found, NoAnswer> {
        match (self.found, self.failure) {
            (Some(found), None) => Ok(found),
            (_, Some(failure)) => Err(NoAnswer::Failing(failure.message)),
            (None, None) => Err(NoAnswer::Failing(
                "the API server did not answer in time".to_owned(),
            )),
        }
    }
}

// --- an attachment -------------------------------------------------------------------------------------------

struct Attached<'a> {
    api: ApiServer,
    policy: Option<&'a ObjectName>,
    attachment: &'a ObjectName,
    args: &'a Args,
    keeper: Keeper,
    stamps: Stamps,
    sender: mpsc::Sender<Seen>,
    news: mpsc::Receiver<Seen>,
    /// Watches of the namespace.
    tasks: JoinSet<()>,
    /// Watches of the node.
    of_node: Option<(String, JoinSet<()>)>,
}

impl<'a> Attached<'a> {
    fn new(
        api: ApiServer,
        policy: Option<&'a ObjectName>,
        attachment: &'a ObjectName,
        args: &'a Args,
    ) -> Self {
        let (sender, news) = mpsc::channel(QUEUE);
        Self {
            api,
            policy,
            attachment,
            args,
            keeper: Keeper::default(),
            stamps: Stamps::default(),
            sender,
            news,
            tasks: JoinSet::new(),
            of_node: None,
        }
    }

    async fn until(mut self, end: Instant) -> Result<Found, NoAnswer> {
        let namespace = Some(self.attachment.namespace.as_str());
        let mut tasks = std::mem::take(&mut self.tasks);
        self.follow(&mut tasks, objects::policies(namespace), Seen::Policies);
        self.follow(&mut tasks, objects::attachments(namespace), Seen::Attachments);
        self.tasks = tasks;
        let mut last = Last::default();
        let once = self.args.timeout.is_zero();
        loop {
            // Leases run out without any news.
            let look = Instant::now() + Duration::from_secs(1);
            let seen = tokio::select! {
                seen = self.news.recv() => seen,
                () = sleep_until(look.min(end)) => None,
            };
            if let Some(failure) = seen.as_ref().and_then(|seen| seen.of().1) {
                last.failing(failure.clone())?;
            }
            if let Some(seen) = seen {
                let clock = self.clock();
                self.keeper.take(seen, clock);
            }
            self.follow_node();
            let found = self.found();
            if let Some(found) = found {
                if found.met || once {
                    return Ok(found);
                }
                last.found(found);
            }
            if Instant::now() >= end {
                return last.told();
            }
        }
    }

    fn clock(&self) -> Clock {
        let now = System.now();
        self.stamps.observe(now);
        Clock {
            mono: now.boot.0,
            distance_ms: self.stamps.distance_ms(),
        }
    }

    fn follow<B: Body>(&self, tasks: &mut JoinSet<()>, collection: Collection, wrap: fn(News<B>) -> Seen) {
        tasks.spawn(follow(
            self.api.clone(),
            collection,
            Arc::new(System),
            self.sender.clone(),
            wrap,
        ));
    }

    /// Watches what the attachment's node says, once it is known which that is.
    fn follow_node(&mut self) {
        let node = self
            .keeper
            .index()
            .consumer(self.attachment)
            .map(|(node, _)| node.to_owned());
        let (Some(node), followed) = (node, self.of_node.as_ref()) else {
            return;
        };
        if followed.is_some_and(|(followed, _)| *followed == node) {
            return;
        }
        let mut tasks = JoinSet::new();
        let named = format!("metadata.name={node}");
        self.follow(&mut tasks, objects::nodes().with_fields(&named), Seen::Nodes);
        self.follow(
            &mut tasks,
            objects::reports().with_fields(format!("node={node}")),
            Seen::Reports,
        );
        let leases = objects::leases(&self.args.lease_namespace).with_fields(named);
        self.follow(&mut tasks, leases, Seen::Leases);
        self.of_node = Some((node, tasks));
    }

    /// How it is; none while not all is known.
    fn found(&self) -> Option<Found> {
        let missing: Vec<Watched> = self.keeper.missing().collect();
        if missing.contains(&Watched::Policies) || missing.contains(&Watched::Attachments) {
            return None;
        }
        let Some((node, policies)) = self.keeper.index().consumer(self.attachment) else {
            return Some(Found {
                message: Some(format!("{}: there is no such attachment", self.attachment)),
                ..Found::default()
            });
        };
        if !missing.is_empty() {
            return None;
        }
        let clock = self.clock();
        let policies: Vec<State> = policies
            .into_iter()
            .filter(|policy| self.policy.is_none_or(|wanted| *wanted == policy.name))
            .filter_map(|policy| {
                let at = on_node(self.keeper.index(), &policy.uid, node, clock)?;
                Some(State {
                    namespace: policy.name.namespace.clone(),
                    name: policy.name.name.clone(),
                    generation: policy.generation,
                    answered: at.generation,
                    node: Some(at.node),
                    state: at.state,
                    reason: at.reason,
                    message: None,
                })
            })
            .collect();
        let least = self.args.generation.unwrap_or(0);
        let fits = |state: &State| state.state == self.args.goal.state() && state.generation >= least;
        Some(Found {
            met: match self.args.goal {
                Goal::Programmed => !policies.is_empty() && policies.iter().all(fits),
                Goal::Held | Goal::Failed | Goal::Pending => policies.iter().any(fits),
            },
            message: policies
                .is_empty()
                .then(|| format!("{}: no policy is about its traffic", self.attachment)),
            policies,
        })
    }
}

fn sentences(found: &Found) -> String {
    let mut text: String = found.policies.iter().map(sentence).collect();
    if let Some(message) = &found.message {
        text += &format!("{message}\n");
    }
    text
}

fn sentence(state: &State) -> String {
    let mut text = format!(
        "{}/{}: {} at generation {}",
        state.namespace, state.name, state.state, state.generation
    );
    if let Some(node) = &state.node {
        text += &format!(" on {node}");
    }
    if let Some(reason) = state.reason.as_ref().filter(|reason| **reason != state.state) {
        text += &format!(" ({reason})");
    }
    match state.answered {
        Some(answered) if answered != state.generation => {
            text += &format!("; the last answer is about generation {answered}");
        }
        None => text += "; there is no answer yet",
        Some(_) => {}
    }
    if let Some(message) = &state.message {
        text += &format!(": {message}");
    }
    text + "\n"
}
