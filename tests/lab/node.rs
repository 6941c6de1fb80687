//! A node: namespaces of its own, a directory of objects, and the agent that serves it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use holdfast::datapath::pins::Pins;
use holdfast::datapath::raw::{self, Kind, Map, Plain};
use holdfast::registry::{Registration, Registry};
use holdfast_ebpf::abi::{ConsumerRow, pin};
use holdfast_engine::model::Token;
use rustix::process::Signal;
use rustix::thread::CapabilitySet;
use serde::Deserialize;

use crate::objects::{Attachment, NODE, Policy};
use crate::process::{Log, Running, SHIPPED, confine, run};
use crate::rtnl::Rtnl;
use crate::space::ROOT;
use crate::suite::{self, Way};
use crate::told::{self, Answer, Metrics, PORT, Report};
use crate::{Space, sysctl, tc, until};

/// How long anything that should happen at once may take.
pub const EVENT_BUDGET: Duration = Duration::from_secs(1);

/// Breaks a rule in every agent that is started here: for seeing a test fail. See `chaos` of the agent's data path.
pub const BREAK: &str = "HOLDFAST_LAB_BREAK";

/// Where the agent's instructions to fail on purpose are.
const CHAOS: &str = "chaos";

/// How long the agent may take to start or to end.
const START_OR_END: Duration = Duration::from_secs(20);

/// Where it pins, under its root.
const BPFFS: &str = "bpf/holdfast";
/// Its run directory, under its root.
const RUN: &str = "holdfast";

/// A node.
#[derive(Debug)]
pub struct Node {
    agent: Option<Running>,
    log: Log,
    /// Error lines that a test expected.
    forgiven: usize,
    registered: Mutex<BTreeMap<String, Registered>>,
    pokes: Vec<UnixStream>,
    /// How its agents reach their API server, if objects come from one.
    kubeconfig: Option<PathBuf>,
    /// What its agents are told of their ways.
    pub way: Way,
    /// Its devices.
    pub rtnl: Rtnl,
    space: Space,
}

/// What `attachment register` says: a CNI keeps it for the end of the workload.
#[derive(Clone, Debug, Deserialize)]
pub struct Registered {
    /// Number of the interface.
    pub ifindex: u32,
    /// Token, 16 hex digits.
    pub token: String,
}

impl Node {
    /// A node without an agent and without objects.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn new() -> anyhow::Result<Self> {
        let space = Space::node()?;
        space.inside(sysctl::for_node)?;
        let mut rtnl = Rtnl::open(&space)?;
        // The first interface of every workload has number 2. The kernel is up to a second late to tell the carrier of
        // a veth whose ends have the same number, and to let it send (`linkwatch_urgent_event`): none here shall.
        rtnl.simple("hfpad", "bridge")?;
        let node = Self {
            agent: None,
            log: Log::default(),
            forgiven: 0,
            registered: Mutex::default(),
            pokes: Vec::new(),
            kubeconfig: None,
            way: suite::way(),
            rtnl,
            space,
        };
        for directory in ["objects", "staging"] {
            std::fs::create_dir(node.outside(directory)?)?;
        }
        if std::env::var_os(BREAK).is_some() {
            node.chaos("")?;
        }
        Ok(node)
    }

    /// Its namespaces.
    #[must_use]
    pub const fn space(&self) -> &Space {
        &self.space
    }

    /// A path under the node's own root, as this process opens it.
    ///
    /// # Errors
    /// Never for a node.
    pub fn outside(&self, below: &str) -> anyhow::Result<PathBuf> {
        self.space.from_outside(&Path::new(ROOT).join(below))
    }

    // --- objects --------------------------------------------------------------------------------------------

    /// Writes or replaces an attachment.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn put_attachment(&self, attachment: &Attachment) -> anyhow::Result<()> {
        self.put_file(&format!("attachment-{}.yaml", attachment.name), attachment)
    }

    /// Writes or replaces a policy.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn put_policy(&self, policy: &Policy) -> anyhow::Result<()> {
        self.put_file(&format!("policy-{}.yaml", policy.name), policy)
    }

    /// Writes or replaces a file of objects as a whole.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn put_file(&self, name: &str, text: &dyn Display) -> anyhow::Result<()> {
        let staged = self.outside("staging")?.join(name);
        std::fs::write(&staged, text.to_string())?;
        std::fs::rename(&staged, self.outside("objects")?.join(name))?;
        Ok(())
    }

    /// Removes a file of objects.
    ///
    /// # Errors
    /// When it is not there.
    pub fn remove_file(&self, name: &str) -> anyhow::Result<()> {
        std::fs::remove_file(self.outside("objects")?.join(name)).with_context(|| name.to_owned())
    }

    // --- agent ----------------------------------------------------------------------------------------------

    /// Lets agents that are started from now on have their objects from an API server that this file, under its own root, says
    /// how to reach.
    pub fn objects_from(&mut self, kubeconfig: &Path) {
        self.kubeconfig = Some(kubeconfig.to_owned());
    }

    /// Starts the agent and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_agent(&mut self) -> anyhow::Result<()> {
        self.launch_agent(&[])?;
        self.until_ready()
    }

    /// Starts the agent with these variables in its environment, beside what every agent here gets; does not wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch_agent(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        ensure!(self.agent.is_none(), "the agent of this node runs already");
        let mut command = self.agent_command()?;
        command.envs(environment.iter().copied());
        if self.outside(CHAOS)?.exists() {
            command.env("HOLDFAST_CHAOS", format!("@{ROOT}/{CHAOS}"));
        }
        self.agent = Some(Running::start(command, &self.log)?);
        Ok(())
    }

    /// Starts the agent by these words, as a service manager does that says everything else by variables; does not wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch_service(&mut self, words: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
        self.launch_service_under(&[], words, environment)
    }

    /// The same, started by another program, which gets the agent's command line after these words of its own.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch_service_under(
        &mut self,
        starter: &[OsString],
        words: &[&str],
        environment: &[(&str, &str)],
    ) -> anyhow::Result<()> {
        ensure!(self.agent.is_none(), "the agent of this node runs already");
        let agent = agent_binary()?.into_os_string();
        let mut line = starter.iter().chain([&agent]);
        let mut command = Command::new(line.next().context("no program")?);
        command
            .env_clear()
            .args(line)
            .args(words)
            .env("HOLDFAST_CONFIG", "/dev/null")
            .env("HOLDFAST_SOURCE", format!("dir:{ROOT}/objects"))
            .env("HOLDFAST_NODE", NODE)
            .env("HOLDFAST_LISTEN", format!("127.0.0.1:{PORT}"));
        for (variable, below) in [
            ("HOLDFAST_BPFFS_DIR", BPFFS),
            ("HOLDFAST_STATE_DIR", "state"),
            ("HOLDFAST_RUN_DIR", RUN),
        ] {
            command.env(variable, Path::new(ROOT).join(below));
        }
        command.envs(environment.iter().copied());
        confine(&mut command, &self.space, Some(SHIPPED));
        self.agent = Some(Running::start(command, &self.log)?);
        Ok(())
    }

    /// The agent's command line, with exactly the rights that it is shipped with.
    ///
    /// # Errors
    /// When the agent is not built.
    pub fn agent_command(&self) -> anyhow::Result<Command> {
        let mut command = self.command("agent")?;
        match &self.kubeconfig {
            None => command.arg("--source").arg(format!("dir:{ROOT}/objects")),
            Some(path) => command.args(["--source", "kube", "--kubeconfig"]).arg(path),
        };
        command
            .args(["--node", NODE])
            .args(["--listen", &format!("127.0.0.1:{PORT}")])
            .args(self.way.arguments());
        confine(&mut command, &self.space, Some(SHIPPED));
        Ok(command)
    }

    /// A subcommand that has exactly these rights.
    ///
    /// # Errors
    /// When the agent is not built.
    pub fn confined(&self, subcommand: &str, rights: CapabilitySet) -> anyhow::Result<Command> {
        let mut command = self.command(subcommand)?;
        command.stdin(Stdio::null());
        confine(&mut command, &self.space, Some(rights));
        Ok(command)
    }

    /// Says what the agent shall fail in on purpose from now on: instructions by line. An agent that runs looks there
    /// only if something was said before it was started.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn chaos(&self, instructions: &str) -> anyhow::Result<()> {
        let broken = std::env::var(BREAK).unwrap_or_default();
        let staged = self.outside("staging")?.join(CHAOS);
        std::fs::write(&staged, format!("{broken}\n{instructions}\n"))?;
        std::fs::rename(&staged, self.outside(CHAOS)?)?;
        Ok(())
    }

    fn command(&self, subcommand: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(agent_binary()?);
        command.env_clear().args(["--config", "/dev/null"]);
        for (flag, below) in [
            ("--bpffs-dir", BPFFS),
            ("--state-dir", "state"),
            ("--run-dir", RUN),
        ] {
            command.arg(flag).arg(Path::new(ROOT).join(below));
        }
        command.arg(subcommand);
        Ok(command)
    }

    /// Waits until the agent says that it is ready.
    ///
    /// # Errors
    /// When it does not, or has ended.
    pub fn until_ready(&mut self) -> anyhow::Result<()> {
        until(START_OR_END, "the agent is ready", || {
            if let Some(status) = self.running()?.ended()? {
                bail!("the agent has ended: {status}");
            }
            Ok(self
                .get("/readyz")
                .ok()
                .filter(|answer| answer.status == 200)
                .map(drop))
        })
    }

    fn running(&mut self) -> anyhow::Result<&mut Running> {
        self.agent.as_mut().context("no agent runs")
    }

    /// The agent's process id.
    ///
    /// # Errors
    /// When none runs.
    pub fn agent_id(&mut self) -> anyhow::Result<u32> {
        Ok(self.running()?.id())
    }

    /// Ends the agent by this signal and waits for its end.
    ///
    /// # Errors
    /// When it does not end.
    pub fn end_agent(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.running()?.signal(signal)?;
        self.until_ended().map(drop)
    }

    /// Sends the agent a signal.
    ///
    /// # Errors
    /// When none runs.
    pub fn signal_agent(&mut self, signal: Signal) -> anyhow::Result<()> {
        self.running()?.signal(signal)
    }

    /// Stops the agent, and returns when it stands still. SIGCONT lets it go on.
    ///
    /// # Errors
    /// When none runs.
    pub fn stop_agent(&mut self) -> anyhow::Result<()> {
        self.running()?.stop()
    }

    /// Waits until the agent has ended by itself.
    ///
    /// # Errors
    /// When it does not end.
    pub fn until_ended(&mut self) -> anyhow::Result<std::process::ExitStatus> {
        let status = self.running()?.wait(START_OR_END)?;
        self.agent = None;
        Ok(status)
    }

    /// What the agents of this node have written.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.log.lines()
    }

    /// Lines at error level, and whatever the runtime writes when a thread panics; not those that were expected.
    #[must_use]
    pub fn error_lines(&self) -> Vec<String> {
        let mut lines = self.all_error_lines();
        lines.drain(..self.forgiven);
        lines
    }

    fn all_error_lines(&self) -> Vec<String> {
        let mut lines = self.log();
        lines.retain(|line| line.contains("ERROR") || line.contains("panicked at"));
        lines
    }

    /// The error lines so far were the test's intention.
    pub fn forgive_errors(&mut self) {
        self.forgiven = self.all_error_lines().len();
    }

    // --- what a CNI and an operator do -----------------------------------------------------------------------

    /// Runs a subcommand on the node, as root.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn cli<S: AsRef<OsStr>>(&self, subcommand: &str, arguments: &[S]) -> anyhow::Result<Output> {
        run(self.command(subcommand)?.args(arguments), &self.space)
    }

    /// Registers the identity behind an interface, as a CNI does, and waits until the agent has taken it in.
    ///
    /// # Errors
    /// When the command does not exit with 0.
    pub fn register(&self, interface: &str, identity: &str) -> anyhow::Result<()> {
        self.register_with(interface, identity, 0)
    }

    /// The same with the exit code that is right: 2 while no agent runs.
    ///
    /// # Errors
    /// When the command exits with another code.
    pub fn register_with(&self, interface: &str, identity: &str, code: i32) -> anyhow::Result<()> {
        let arguments = [
            "register",
            "--interface",
            interface,
            "--identity",
            identity,
            "-o",
            "json",
        ];
        let said = self.attachment_command(&arguments, code)?;
        let registered: Registered =
            serde_json::from_str(&said).with_context(|| format!("no JSON: {said}"))?;
        let mut all = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(interface.to_owned(), registered);
        Ok(())
    }

    /// Unregisters what was registered last for an interface, as a CNI does.
    ///
    /// # Errors
    /// When nothing was, or the command does not exit with 0.
    pub fn unregister(&self, interface: &str) -> anyhow::Result<()> {
        self.unregister_incarnation(&self.last_registered(interface)?, 0)
    }

    /// Unregisters one incarnation; exit code 1 says that another one is registered.
    ///
    /// # Errors
    /// When the command exits with another code.
    pub fn unregister_incarnation(&self, incarnation: &Registered, code: i32) -> anyhow::Result<()> {
        let ifindex = incarnation.ifindex.to_string();
        let arguments = ["unregister", "--ifindex", &ifindex, "--token", &incarnation.token];
        self.attachment_command(&arguments, code).map(drop)
    }

    /// What was registered last for an interface.
    ///
    /// # Errors
    /// When nothing was.
    pub fn last_registered(&self, interface: &str) -> anyhow::Result<Registered> {
        let all = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let last = all.get(interface).cloned();
        last.with_context(|| format!("{interface} was never registered"))
    }

    /// Registers an identity as a CNI does that knows nothing of the agent: it writes the row and tells nobody.
    ///
    /// # Errors
    /// When the registry is not there or the row cannot be written.
    pub fn register_silently(&self, interface: &str, identity: &str) -> anyhow::Result<()> {
        let registration = Registration {
            interface: interface.to_owned(),
            identity: Some(identity.to_owned()),
            ..Registration::default()
        };
        let registered = self.with_registry(|registry| Ok(registry.register(&registration)?))?;
        let mut all = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let registered = Registered {
            ifindex: registered.device.ifindex,
            token: format!("{:016x}", registered.token.get()),
        };
        all.insert(interface.to_owned(), registered);
        Ok(())
    }

    /// Unregisters what was registered last for an interface, and tells nobody.
    ///
    /// # Errors
    /// When nothing was, or the row cannot be deleted.
    pub fn unregister_silently(&self, interface: &str) -> anyhow::Result<()> {
        let Registered { ifindex, token } = self.last_registered(interface)?;
        let token = Token::new(u64::from_str_radix(&token, 16)?).context("no token")?;
        let deleted = self.with_registry(|registry| Ok(registry.unregister(ifindex, token)?))?;
        ensure!(deleted, "another incarnation of {interface} is registered");
        Ok(())
    }

    /// Does something with the registry, as a CNI does; it is made if it is not there.
    ///
    /// # Errors
    /// What `work` says, or when the registry cannot be had.
    pub fn with_registry<T: Send>(
        &self,
        work: impl FnOnce(&Registry) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let (bpffs, run) = (self.outside(BPFFS)?, self.outside(RUN)?);
        self.space
            .inside(|| work(&Registry::open_or_create(&bpffs, &run)?))
    }

    /// Says to the agent that the identity of an interface may have changed, and does not wait for its answer.
    ///
    /// # Errors
    /// When no agent listens.
    pub fn poke(&mut self, interface: &str) -> anyhow::Result<()> {
        let body = format!("{{\"ifindex\":{}}}", self.rtnl.ifindex(interface)?);
        let socket = self.outside(RUN)?.join("holdfast.sock");
        let mut stream = UnixStream::connect(&socket).context("no agent listens")?;
        write!(
            stream,
            "POST /v1/poke HTTP/1.1\r\nHost: lab\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        // A question whose asker goes away may be forgotten.
        self.pokes.push(stream);
        Ok(())
    }

    fn attachment_command(&self, arguments: &[&str], code: i32) -> anyhow::Result<String> {
        let output = self.cli("attachment", arguments)?;
        ensure!(
            output.status.code() == Some(code),
            "`attachment {}` exits with {}, not {code}: {}{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    // --- what the node tells ----------------------------------------------------------------------------------

    /// Asks the agent by HTTP.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn get(&self, path: &str) -> anyhow::Result<Answer> {
        self.space.inside(|| told::get(path))
    }

    /// One scrape.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn metrics(&self) -> anyhow::Result<Metrics> {
        let answer = self.get("/metrics")?;
        ensure!(answer.status == 200, "/metrics says {}", answer.status);
        Ok(Metrics::parse(&answer.body))
    }

    /// Where the report is, as this process opens it.
    ///
    /// # Errors
    /// Never for a node.
    pub fn report_path(&self) -> anyhow::Result<PathBuf> {
        Ok(self.outside(RUN)?.join("report.yaml"))
    }

    /// The report, if there is one.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn report(&self) -> anyhow::Result<Option<Report>> {
        Report::read(&self.report_path()?)
    }

    /// What the report says of this policy, as `Programmed` or `Held(NoCarrier)`; empty if nothing.
    ///
    /// # Errors
    /// When the report makes no sense.
    pub fn verdict(&self, policy: &str) -> anyhow::Result<String> {
        let report = self.report()?;
        let line = report.as_ref().and_then(|report| report.policy(policy));
        Ok(line.map(told::PolicyLine::verdict).unwrap_or_default())
    }

    /// Waits until the report says this of this policy.
    ///
    /// # Errors
    /// When it does not within the deadline.
    pub fn until_verdict(&self, policy: &str, verdict: &str, deadline: Duration) -> anyhow::Result<()> {
        let mut last = String::new();
        let found = until(deadline, format!("{policy} is {verdict}"), || {
            last = self.verdict(policy)?;
            Ok((last == verdict).then_some(()))
        });
        found.with_context(|| format!("{policy} is {last:?}"))
    }

    // --- what the kernel holds --------------------------------------------------------------------------------

    /// Ids of all that is pinned, by path below the bpffs directory: what is there to stay over a restart.
    ///
    /// # Errors
    /// When a pin cannot be opened.
    pub fn pinned(&self) -> anyhow::Result<BTreeMap<String, u32>> {
        let root = self.outside(BPFFS)?;
        let mut ids = BTreeMap::new();
        let mut directories = vec![root.clone()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(&directory)? {
                let path = entry?.path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let name = path.strip_prefix(&root)?.to_string_lossy().into_owned();
                ids.insert(name, id_of(&path)?);
            }
        }
        Ok(ids)
    }

    /// The consumer rows, for whoever wants to see one change.
    ///
    /// # Errors
    /// When there is no agent yet that has made them.
    pub fn rows(&self) -> anyhow::Result<Map<u32, ConsumerRow>> {
        self.map(pin::CONSUMERS)
    }

    /// A pinned map, for whoever wants to see it change or change it.
    ///
    /// # Errors
    /// When it is not there, or its sizes are others.
    pub fn map<K: Plain, V: Plain>(&self, name: &str) -> anyhow::Result<Map<K, V>> {
        let path = self.pins()?.map(name);
        let map = raw::obj_get(&path).with_context(|| path.display().to_string())?;
        Ok(Map::new(map)?)
    }

    /// Where the pins are, as this process opens them.
    ///
    /// # Errors
    /// Never for a node.
    pub fn pins(&self) -> anyhow::Result<Pins> {
        Ok(Pins::new(&self.outside(BPFFS)?))
    }

    /// Deletes a registry row if it still holds this token, as a late delete of a CNI does; tells nobody.
    ///
    /// # Errors
    /// When the registry is not there.
    pub fn forget(&self, incarnation: &Registered) -> anyhow::Result<()> {
        let token = u64::from_str_radix(&incarnation.token, 16)?;
        let token = Token::new(token).context("no token")?;
        self.with_registry(|registry| {
            // Another incarnation's row stays: that is what a token is for.
            let _ = registry.unregister(incarnation.ifindex, token);
            Ok(())
        })
    }

    /// Ids of the programs that packets meet at the ingress of a device, in their order: the chain of tcx, then filters.
    ///
    /// # Errors
    /// When the device is not there.
    pub fn programs(&mut self, interface: &str) -> anyhow::Result<Vec<u32>> {
        let ifindex = self.rtnl.ifindex(interface)?;
        let chain = self.space.inside(|| Ok(raw::chain(ifindex)?))?;
        let filters = self.rtnl.filters(interface, tc::INGRESS)?;
        let chain = chain.items.iter().map(|item| item.prog_id);
        Ok(chain.chain(filters.iter().map(|filter| filter.program)).collect())
    }
}

fn id_of(path: &Path) -> anyhow::Result<u32> {
    let object = raw::obj_get(path).with_context(|| path.display().to_string())?;
    let object = object.as_fd();
    Ok(match raw::kind(object)? {
        Kind::Map => raw::map_info(object)?.id,
        Kind::Program => raw::prog_info(object)?.id,
        Kind::Link => raw::link_info(object)?.id,
        Kind::Other => bail!("{} is no map, program or link", path.display()),
    })
}

/// The agent's executable, beside the test's own.
///
/// # Errors
/// When it is not built.
pub fn agent_binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    // Test executables are one directory below the others.
    let mut places = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("holdfast"));
    places
        .find(|binary| binary.is_file())
        .context("the agent is not built: cargo build --workspace --bins")
}
