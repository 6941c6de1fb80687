//! The story on a real Kubernetes of two nodes, through kubectl.

use std::net::SocketAddr;
use std::path::{Path, absolute};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use holdfast::api::hash;
use holdfast_engine::model::Uid;
use holdfast_tests::kubernetes::{
    Installation, NAMESPACE, OVERLAY, Options, PARTS, Pod, Policy, Recorder, SYSTEM, Workload, cluster,
};
use holdfast_tests::traffic::{Producer, ask};
use holdfast_tests::{codegen, until};

use crate::telling::{Telling, indent, say};

/// What the control plane may take for a change, on a machine that does much else.
const TOLD: Duration = Duration::from_secs(30);
/// How long a question waits for its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two questions.
const PACE: Duration = Duration::from_millis(2);
/// For so long who was asked before a switch may still answer: the policy's `drain`.
const DRAIN: Duration = Duration::from_secs(1);
/// So many questions before and after a switch.
const ENOUGH: usize = 200;

const NODE: &str = "edge-a";
const WEB: Workload = Workload {
    name: "web-0",
    node: NODE,
    app: "web",
};
const DNS: Workload = Workload {
    name: "dns",
    node: NODE,
    app: "dns",
};
const DNS_NEXT: Workload = Workload {
    name: "dns-next",
    node: NODE,
    app: "dns-next",
};
/// By these numbers producers answer.
const BY_DNS: u32 = 1;
const BY_DNS_NEXT: u32 = 2;

/// The service.
const ADDRESS: &str = "10.97.0.10";
const PORT: u16 = 53;

/// Where `kubectl get routepolicy` shows what.
const PROGRAMMED: usize = 2;
const NODES: usize = 3;
const HELD: usize = 4;

/// Tells it with this image of the agent. The cluster is gone afterwards, unless it has a name.
pub(crate) fn tell(image: &Path, name: Option<&str>) -> anyhow::Result<()> {
    let image = absolute(image)?;
    ensure!(image.is_file(), "there is no {}", image.display());
    // The commands that are shown name files from there.
    std::env::set_current_dir(codegen::in_repository("."))?;
    let mut story = Story::begin(name)?;
    story.is_installed(&image)?;
    let producers = story.producers_come()?;
    let watched = Recorder::start(story.ground.kubectl(), NAMESPACE, "dns")?;
    story.held_before_the_interface(&watched)?;
    let pod = story.interface_and_identity(&watched)?;
    let pod = story.redeployed(&watched, pod)?;
    story.switched(&pod)?;
    story.acknowledged(&watched)?;
    drop((producers, watched));
    story.end(name)
}

struct Story {
    ground: Installation,
    telling: Telling,
}

impl Story {
    fn begin(name: Option<&str>) -> anyhow::Result<Self> {
        println!(
            "\
The same story on a real Kubernetes of two nodes, each in namespaces of its own. What is behind `$` is what is done: with
`cargo xtask cluster up` you can do the same. A pod `{}` will want to ask the name service {ADDRESS} port {PORT}; the pods `{}`
and `{}` can serve it.",
            WEB.name, DNS.name, DNS_NEXT.name
        );
        let mut telling = Telling::default();
        telling.title(
            "A cluster comes up: etcd, API server, controllers, and nodes with containerd and kubelet.",
        );
        let started = Instant::now();
        let options = Options {
            name: name.map(str::to_owned),
            ..Options::default()
        };
        let ground = Installation::of(cluster(&options)?)?;
        println!("  after {:.1} s:", started.elapsed().as_secs_f64());
        let story = Self { ground, telling };
        story.kubectl(&["get", "nodes"])?;
        Ok(story)
    }

    fn is_installed(&mut self, image: &Path) -> anyhow::Result<()> {
        self.telling.title(
            "Holdfast is installed: an agent on each node, and a controller that sums up what agents say.",
        );
        let here = std::env::current_dir()?;
        let shown = image.strip_prefix(here).unwrap_or(image);
        println!("\n  $ cargo xtask cluster load {}", shown.display());
        self.ground.cluster().load(image)?;
        self.kubectl(&["apply", "-k", OVERLAY])?;
        for part in PARTS {
            self.kubectl(&["-n", SYSTEM, "rollout", "status", part, "--timeout=120s"])
                .with_context(|| self.ground.pods_of_ours())?;
        }
        self.kubectl(&["-n", SYSTEM, "get", "pods", "-o", "wide"])?;
        self.ground.cluster().make_namespace(NAMESPACE)
    }

    fn producers_come(&mut self) -> anyhow::Result<[Producer; 2]> {
        self.telling.title(
            "Two producers come, as any workload does: a pod, an attachment that names its interface, and the CNI's word.",
        );
        remark("\
An Attachment says: behind this interface of this node there will be this incarnation of that workload. Its labels are what
policies select by.");
        let come = |workload: &Workload, number| {
            self.apply(&workload.manifest())?;
            let pod = workload.running(&self.ground)?;
            let incarnation = format!("{}-i1", workload.name);
            self.apply(&workload.attachment(&incarnation, Some(pod.address)))?;
            self.register(&pod, &incarnation)?;
            pod.serve(number, &[service()?])
        };
        let producers = [come(&DNS, BY_DNS)?, come(&DNS_NEXT, BY_DNS_NEXT)?];
        self.kubectl(&["-n", NAMESPACE, "get", "attachments"])?;
        Ok(producers)
    }

    fn held_before_the_interface(&mut self, watched: &Recorder) -> anyhow::Result<()> {
        self.telling.title(
            "HOLD. The policy is there, and so is the attachment of `web-0`. Its pod is not: no interface, no packet.",
        );
        self.apply(&WEB.attachment("web-0-i1", None))?;
        self.apply(&policy(DNS.app))?;
        self.held_for(watched, "InterfaceMissing")?;
        remark("\
It is well formed (Accepted), and served on 0 nodes of 1. That is no error, and no success either: it is held, with a reason, and
the node that lags behind is named.");
        Ok(())
    }

    fn interface_and_identity(&mut self, watched: &Recorder) -> anyhow::Result<Pod> {
        self.telling.title(
            "INSTALL. The pod of `web-0` is made; kubelet and the bridge plugin give it an interface.",
        );
        self.apply(&WEB.manifest())?;
        let pod = WEB.running(&self.ground)?;
        self.held_for(watched, "IdentityMissing")?;
        remark(
            "\
An interface is only a name. Nobody has said yet which incarnation of `web-0` is behind it.",
        );
        self.unanswered(&pod)?;
        remark("Now the CNI vouches for it:");
        self.register(&pod, "web-0-i1")?;
        self.programmed()?;
        self.answered(&pod, BY_DNS)?;
        Ok(pod)
    }

    fn redeployed(&mut self, watched: &Recorder, pod: Pod) -> anyhow::Result<Pod> {
        self.telling
            .title("REDEPLOY. `web-0` is deleted, and made anew under its own name.");
        drop(pod);
        self.kubectl(&["-n", NAMESPACE, "delete", "pod", WEB.name])?;
        self.held_for(watched, "InterfaceMissing")?;
        self.apply(&WEB.attachment("web-0-i2", None))?;
        self.apply(&WEB.manifest())?;
        let pod = WEB.running(&self.ground)?;
        self.held_for(watched, "IdentityMissing")?;
        remark(
            "\
The same name, the same interface, another incarnation: what was programmed for its predecessor is not for it.",
        );
        self.unanswered(&pod)?;
        self.register(&pod, "web-0-i2")?;
        self.programmed()?;
        self.answered(&pod, BY_DNS)?;
        Ok(pod)
    }

    fn switched(&mut self, pod: &Pod) -> anyhow::Result<()> {
        self.telling.title(&format!(
            "SWITCH. The policy is edited: `{}` shall serve instead. `{}` keeps asking.",
            DNS_NEXT.name, WEB.name
        ));
        let asking = Asking::start(pod)?;
        until(TOLD, "questions before the switch", || asking.so_many(ENOUGH))?;
        self.apply(&policy(DNS_NEXT.app))?;
        self.programmed()?;
        // Until then what was asked before may still be answered, and a port that is used again is no new conversation.
        std::thread::sleep(DRAIN);
        let drained = Instant::now();
        let before = asking.count();
        until(TOLD, "questions after the switch", || {
            asking.so_many(before + ENOUGH)
        })?;
        let questions = asking.finish()?;
        let by = |who: Option<u32>| questions.iter().filter(|question| question.by == who).count();
        let (old, new, nobody) = (by(Some(BY_DNS)), by(Some(BY_DNS_NEXT)), by(None));
        let after: Vec<_> = questions
            .iter()
            .filter(|question| question.asked > drained)
            .collect();
        println!(
            "\n  {} questions, each from a port of its own: {old} answered by `{}`, {new} by `{}`, {nobody} without an answer",
            questions.len(),
            DNS.name,
            DNS_NEXT.name
        );
        ensure!(nobody == 0, "{nobody} questions were not answered");
        ensure!(
            old + new == questions.len(),
            "somebody else answered: {questions:?}"
        );
        let late = after
            .iter()
            .filter(|question| question.by != Some(BY_DNS_NEXT))
            .count();
        ensure!(
            late == 0,
            "{late} questions were answered by `{}` after the policy was said to be programmed, and drained",
            DNS.name
        );
        println!(
            "  Of the {} that were asked a second after `kubectl wait` had returned (`drain`), {} were answered by `{}`.",
            after.len(),
            after.len() - late,
            DNS_NEXT.name
        );
        Ok(())
    }

    fn acknowledged(&mut self, watched: &Recorder) -> anyhow::Result<()> {
        self.telling
            .title("ACK. What a node acknowledges, and what a status is made of.");
        let policy = watched.last().context("the policy was never told")?;
        let (uid, generation) = (policy.metadata.uid, policy.metadata.generation);
        self.kubectl(&["get", "nodereports"])?;
        remark(&format!(
            "\
Each agent has one report. In it is a line for each policy that it has programmed: the generation, and a sum over the attachments
that went into it (`covers`). The policy's uid is {uid}:"
        ));
        let report = format!("{NODE}.r");
        let path = format!("jsonpath={{.programmed['{uid}']}}");
        let line = self.kubectl(&["get", "nodereport", &report, "-o", &path])?;
        let columns = "custom-columns=NAME:.metadata.name,UID:.metadata.uid,GENERATION:.metadata.generation";
        let listed = self.kubectl(&["-n", NAMESPACE, "get", "attachments", "-o", columns])?;
        let summand = |workload: &Workload| {
            let row = listed
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>())
                .find(|row| row.first() == Some(&workload.name));
            match row.as_deref() {
                Some([_, uid, generation]) => Ok(hash::covers(&Uid((*uid).to_owned()), generation.parse()?)),
                _ => Err(anyhow!("{} has no attachment", workload.name)),
            }
        };
        let covers = summand(&WEB)?.consumer.wrapping_add(summand(&DNS_NEXT)?.producer);
        ensure!(
            line.trim() == format!("{generation} {covers:016x}"),
            "{NODE} acknowledges `{line}`, and it should be generation {generation} with {covers:016x}"
        );
        remark(&format!(
            "\
Generation {generation}, and {covers:016x} is what these attachments give: `{}` as consumer and `{}` as producer, at just these
generations. The controller says True only when that is so on every node; so nothing that was true before an edit is taken for
what is true after it. Therefore a pipeline simply waits:",
            WEB.name, DNS_NEXT.name
        ));
        self.programmed()
    }

    fn end(self, name: Option<&str>) -> anyhow::Result<()> {
        if name.is_some() {
            self.ground.outlive()?;
            println!(
                "\nThat is the main job. The cluster stays, and nobody serves in its pods any more:\n  \
                 cargo xtask cluster kubectl get routepolicies -A\n  cargo xtask cluster down"
            );
            return Ok(());
        }
        self.ground.down()?;
        println!("\nThat is the main job. The cluster that was made for this is gone again.");
        Ok(())
    }

    // --- what is done, and shown -----------------------------------------------------------------------------

    fn kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        self.kubectl_with(words, None)
    }

    fn apply(&self, manifest: &str) -> anyhow::Result<()> {
        self.kubectl_with(&["apply", "-f", "-"], Some(manifest)).map(drop)
    }

    fn kubectl_with(&self, words: &[&str], input: Option<&str>) -> anyhow::Result<String> {
        let line = words
            .iter()
            .map(|word| quoted(word))
            .collect::<Vec<_>>()
            .join(" ");
        match input {
            None => println!("\n  $ kubectl {line}"),
            Some(text) => println!("\n  $ kubectl {line} <<END\n{}\n  END", indent(text)),
        }
        let output = self.ground.kubectl().output(words, input)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        say(&said);
        ensure!(
            output.status.success(),
            "kubectl {line}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(said)
    }

    fn register(&self, pod: &Pod, incarnation: &str) -> anyhow::Result<()> {
        let Workload { node, .. } = pod.workload;
        println!("\n  {node}$ holdfast {}", pod.workload.registration(incarnation));
        pod.register(&self.ground, incarnation)
    }

    /// The policy as it is listed.
    fn listed(&self) -> anyhow::Result<Vec<String>> {
        let said = self.kubectl(&["-n", NAMESPACE, "get", "routepolicy", "dns"])?;
        let row = said.lines().nth(1).context("no policy is listed")?;
        Ok(row.split_whitespace().map(str::to_owned).collect())
    }

    fn lists(&self, wanted: &[(usize, &str)]) -> anyhow::Result<()> {
        let row = self.listed()?;
        for &(column, what) in wanted {
            let shown = row.get(column).map(String::as_str);
            ensure!(
                shown == Some(what),
                "`{what}` should be listed of it, and it is {shown:?}"
            );
        }
        Ok(())
    }

    /// Waits until it is held for this, and shows that.
    fn held_for(&self, watched: &Recorder, reason: &str) -> anyhow::Result<()> {
        watched.until(TOLD, &format!("held for {reason}"), |policy: &Policy| {
            policy.programmed().reason == "Held"
                && policy
                    .status
                    .laggards
                    .iter()
                    .any(|laggard| laggard.reason == reason)
        })?;
        self.lists(&[(PROGRAMMED, "False"), (NODES, "0/1"), (HELD, "1")])?;
        let path = "jsonpath={.status.laggards}";
        let laggards = self.kubectl(&["-n", NAMESPACE, "get", "routepolicy", "dns", "-o", path])?;
        ensure!(
            laggards.contains(NODE) && laggards.contains(reason),
            "{NODE} with {reason} should be named, and it is {laggards}"
        );
        Ok(())
    }

    /// Waits as a pipeline does, and shows what is true then.
    fn programmed(&self) -> anyhow::Result<()> {
        self.kubectl(&[
            "-n",
            NAMESPACE,
            "wait",
            "routepolicy/dns",
            "--for=condition=Programmed",
            "--timeout=30s",
        ])?;
        self.lists(&[(PROGRAMMED, "True"), (NODES, "1/1")])
    }

    fn unanswered(&self, pod: &Pod) -> anyhow::Result<()> {
        if let Some(by) = ask(&pod.space, service()?, PATIENCE)? {
            bail!("a held pod is answered, by producer {by}");
        }
        println!("\n  `{}` asks {ADDRESS}: no answer, as it should be", WEB.name);
        Ok(())
    }

    fn answered(&self, pod: &Pod, by: u32) -> anyhow::Result<()> {
        let answer = ask(&pod.space, service()?, PATIENCE)?;
        ensure!(
            answer == Some(by),
            "producer {by} should answer, and {answer:?} does"
        );
        println!("\n  `{}` asks {ADDRESS}: answered by producer {by}", WEB.name);
        Ok(())
    }
}

/// Says something below what a command has said.
fn remark(text: &str) {
    println!();
    say(text);
}

fn service() -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(ADDRESS.parse()?, PORT))
}

fn policy(producers: &str) -> String {
    format!(
        "apiVersion: holdfast.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{namespace: {NAMESPACE}, name: dns}}\n\
         spec:\n  consumers: {{matchLabels: {{app: web}}}}\n  producers: {{matchLabels: {{app: {producers}}}}}\n  \
         switchover: {{drain: 1s}}\n  \
         destinations: [{{address: {ADDRESS}, protocol: UDP, port: {PORT}}}]\n"
    )
}

/// A word as a shell takes it. None of ours has a character that is special between the quotes it gets.
fn quoted(word: &str) -> String {
    let quote = if word.contains('\'') {
        "\""
    } else if word.contains(['{', '[', '*', ' ']) {
        "'"
    } else {
        ""
    };
    format!("{quote}{word}{quote}")
}

/// A question, and who answered it.
#[derive(Clone, Copy, Debug)]
struct Question {
    asked: Instant,
    by: Option<u32>,
}

/// A pod that asks all the time, each question a flow of its own.
struct Asking {
    count: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<Vec<Question>>>,
}

impl Asking {
    fn start(pod: &Pod) -> anyhow::Result<Self> {
        let (space, to) = (pod.space.clone(), service()?);
        let (count, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (counted, ends) = (Arc::clone(&count), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut questions = Vec::new();
            while !ends.load(Ordering::Relaxed) {
                let asked = Instant::now();
                let by = ask(&space, to, PATIENCE)?;
                questions.push(Question { asked, by });
                counted.store(questions.len(), Ordering::Relaxed);
                std::thread::sleep(PACE);
            }
            Ok(questions)
        });
        Ok(Self { count, stop, thread })
    }

    fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn so_many(&self, wanted: usize) -> anyhow::Result<Option<()>> {
        Ok((self.count() >= wanted).then_some(()))
    }

    fn finish(self) -> anyhow::Result<Vec<Question>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("who asks has panicked"))?
    }
}
