//! etcd and the API server: half of a cluster, and all that tests of the API need.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::Context;

use crate::binaries::{Binaries, Lacking, cache_dir, lacking_for_api};
use crate::enclosure::{Enclosure, Network, Room};
use crate::pki::{self, User};
use crate::program;
use crate::wait::until;

/// How long an API server may take until it is ready, on a machine that does much else.
const READY: Duration = Duration::from_secs(60);

/// The kubeconfig of a cluster that tests of the API may use as they like.
const FOREIGN: &str = "HOLDFAST_TEST_KUBECONFIG";

/// Calls kubectl.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    /// Whose network the server is in.
    network: Option<PathBuf>,
    kubeconfig: PathBuf,
}

impl Kubectl {
    pub(crate) fn new(program: PathBuf, network: Option<&Path>, kubeconfig: PathBuf) -> Self {
        Self {
            program,
            network: network.map(Path::to_path_buf),
            kubeconfig,
        }
    }

    /// As a command, for a caller who streams its output, say. When it is killed, so is kubectl.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = match &self.network {
            Some(network) => {
                let mut command = Command::new("nsenter");
                command
                    .arg(format!("--net={}", network.display()))
                    .arg("--")
                    .arg(&self.program);
                command
            }
            None => Command::new(&self.program),
        };
        command.arg(format!("--kubeconfig={}", self.kubeconfig.display()));
        command.args(words);
        command
    }

    /// Runs it; it must succeed. Gives its output.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        program::run(&mut self.command(words), None)
    }

    /// Runs it with this input (`apply -f -`); it must succeed.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn feed(&self, words: &[&str], input: &str) -> anyhow::Result<String> {
        program::run(&mut self.command(words), Some(input))
    }

    /// Runs it whatever it ends with.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn output(&self, words: &[&str], input: Option<&str>) -> anyhow::Result<Output> {
        program::output(&mut self.command(words), input)
    }

    /// Its settings, for another client.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    fn until_ready(&self) -> anyhow::Result<()> {
        until(READY, "the API server is ready", || self.is_ready())
    }

    fn is_ready(&self) -> anyhow::Result<Option<()>> {
        Ok((self.run(&["get", "--raw", "/readyz"])? == "ok").then_some(()))
    }
}

/// Where a server listens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) ip: Ipv4Addr,
    pub(crate) port: u16,
    /// etcd's own, for clients and for peers.
    pub(crate) etcd: [u16; 2],
}

impl Address {
    pub(crate) fn url(self) -> String {
        format!("https://{}:{}", self.ip, self.port)
    }
}

pub(crate) const ETCD: &str = "etcd";
pub(crate) const SERVER: &str = "apiserver";

/// Starts etcd.
pub(crate) fn start_etcd(
    enclosure: &Enclosure,
    room: &Room,
    binaries: &Binaries,
    address: Address,
) -> anyhow::Result<()> {
    let [clients, peers] = address.etcd.map(|port| format!("http://127.0.0.1:{port}"));
    let data = enclosure.folder().join("etcd");
    let argv = [
        binaries.word("etcd"),
        format!("--data-dir={}", data.display()),
        format!("--listen-client-urls={clients}"),
        format!("--advertise-client-urls={clients}"),
        format!("--listen-peer-urls={peers}"),
        format!("--initial-advertise-peer-urls={peers}"),
        format!("--initial-cluster=default={peers}"),
        "--unsafe-no-fsync".to_owned(),
        "--log-level=error".to_owned(),
    ];
    enclosure.start(room, ETCD, &argv, &binaries.path())
}

/// Starts the API server. It is ready a little later.
pub(crate) fn start_server(
    enclosure: &Enclosure,
    room: &Room,
    binaries: &Binaries,
    address: Address,
) -> anyhow::Result<()> {
    let folder = enclosure.folder();
    let file = |flag: &str, name: &str| format!("--{flag}={}", folder.join(name).display());
    let argv = [
        binaries.word("kube-apiserver"),
        format!("--etcd-servers=http://127.0.0.1:{}", address.etcd[0]),
        format!("--secure-port={}", address.port),
        format!("--bind-address={}", address.ip),
        format!(
            "--advertise-address={}",
            if address.ip.is_loopback() {
                API_ALONE
            } else {
                address.ip
            }
        ),
        file("tls-cert-file", "server.crt"),
        file("tls-private-key-file", "server.key"),
        file("client-ca-file", "ca.crt"),
        file("requestheader-client-ca-file", "ca.crt"),
        "--requestheader-allowed-names=nobody".to_owned(),
        file("kubelet-client-certificate", "client.crt"),
        file("kubelet-client-key", "client.key"),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        file("token-auth-file", "tokens.csv"),
        file("service-account-key-file", "accounts.pub"),
        file("service-account-signing-key-file", "accounts.key"),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged".to_owned(),
    ];
    enclosure.start(room, SERVER, &argv, &binaries.path())
}

/// Waits until the server that was started is ready. It ends by itself when etcd is slow while it starts; what keeps a
/// server running elsewhere starts it once more, and so does this.
pub(crate) fn until_server_ready(
    kubectl: &Kubectl,
    enclosure: &Enclosure,
    room: &Room,
    binaries: &Binaries,
    address: Address,
) -> anyhow::Result<()> {
    let ready = until(READY, "the API server is ready", || {
        if !enclosure.is_running(SERVER) {
            start_server(enclosure, room, binaries, address)?;
        }
        kubectl.is_ready()
    });
    ready.with_context(|| enclosure.last_lines())
}

/// What an API server without a cluster says of its address: loopback is refused, and nobody asks.
const API_ALONE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// A name that no other enclosure has.
pub(crate) fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("hfk{}x{number}", std::process::id())
}

/// An API server for tests, with nothing behind it: no controller runs, so that namespaces get no service account and
/// never finish to be deleted, and owners that go take nothing along. Gone when dropped.
#[derive(Debug)]
pub struct ApiServer {
    kubectl: Kubectl,
    own: Option<Own>,
}

#[derive(Debug)]
struct Own {
    enclosure: Enclosure,
    binaries: Binaries,
    address: Address,
}

impl ApiServer {
    /// The server behind `$HOLDFAST_TEST_KUBECONFIG` if that is set. Else a new one, on a free port of 127.0.0.1, from
    /// the programs in `$KUBEBUILDER_ASSETS` if that is set, else from those that `cargo xtask cluster build` makes.
    ///
    /// # Errors
    /// [`Lacking`] when there are none; or when it does not get ready.
    pub fn start() -> anyhow::Result<Self> {
        if let Some(kubeconfig) = std::env::var_os(FOREIGN) {
            let program = Binaries::for_api(&cache_dir()?)
                .map_or_else(|| "kubectl".into(), |found| found.get("kubectl"));
            let kubectl = Kubectl::new(program, None, PathBuf::from(kubeconfig));
            kubectl.until_ready()?;
            return Ok(Self { kubectl, own: None });
        }
        // Released at once, and taken a moment later: as near as one gets to asking the kernel for free ones.
        let free = [(); 3].map(|()| TcpListener::bind(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)));
        let mut ports = [0; 3];
        for (port, listener) in ports.iter_mut().zip(free) {
            *port = listener?.local_addr()?.port();
        }
        Self::start_on(Network::Callers, ports)
    }

    /// A new one on 127.0.0.1 of another network namespace, that of a lab's node, say. `file` names the namespace, also
    /// for other processes: `/proc/PID/fd/N`, not `/proc/self/…`.
    ///
    /// # Errors
    /// As [`ApiServer::start`].
    pub fn start_in(file: &Path) -> anyhow::Result<Self> {
        Self::start_on(Network::Of(file), [6443, 2379, 2380])
    }

    fn start_on(network: Network<'_>, ports: [u16; 3]) -> anyhow::Result<Self> {
        let cache = cache_dir()?;
        if let Some(lacking) = lacking_for_api(&cache) {
            return Err(lacking.into());
        }
        let binaries = Binaries::for_api(&cache).ok_or(Lacking::Kubernetes)?;
        let enclosure = Enclosure::new(&unique_name(), network)?;
        let [port, clients, peers] = ports;
        let address = Address {
            ip: Ipv4Addr::LOCALHOST,
            port,
            etcd: [clients, peers],
        };
        pki::make(enclosure.folder())?;
        pki::users(
            enclosure.folder(),
            &address.url(),
            &[User::new("admin", "admin", "system:masters")],
        )?;
        let hall = enclosure.hall();
        let kubeconfig = enclosure.folder().join("admin.kubeconfig");
        let kubectl = Kubectl::new(binaries.get("kubectl"), Some(hall.network()), kubeconfig);
        start_etcd(&enclosure, &hall, &binaries, address)?;
        start_server(&enclosure, &hall, &binaries, address)?;
        until_server_ready(&kubectl, &enclosure, &hall, &binaries, address)?;
        Ok(Self {
            kubectl,
            own: Some(Own {
                enclosure,
                binaries,
                address,
            }),
        })
    }

    /// As its administrator.
    #[must_use]
    pub const fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// Ends the server as a machine ends that loses its power (etcd stays), to start it again with [`ApiServer::again`].
    ///
    /// # Errors
    /// When it is not ours.
    pub fn away(&self) -> anyhow::Result<()> {
        self.own()?.enclosure.stop(SERVER, "KILL")
    }

    /// Starts it again and waits until it is ready.
    ///
    /// # Errors
    /// When it is not ours, or does not get ready.
    pub fn again(&self) -> anyhow::Result<()> {
        let own = self.own()?;
        let hall = own.enclosure.hall();
        start_server(&own.enclosure, &hall, &own.binaries, own.address)?;
        until_server_ready(&self.kubectl, &own.enclosure, &hall, &own.binaries, own.address)
    }

    fn own(&self) -> anyhow::Result<&Own> {
        self.own
            .as_ref()
            .with_context(|| format!("the server behind ${FOREIGN} is not ours to stop"))
    }
}
