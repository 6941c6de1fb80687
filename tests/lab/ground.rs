//! A node on which the test itself is the agent: it holds the data path, under exactly the shipped capabilities.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context, ensure};
use holdfast::datapath::pins::Pins;
use holdfast::datapath::raw;
use holdfast::datapath::{AgentLock, Datapath, DatapathError, Kernel, Opened, Options, Sizes};
use holdfast::registry::{Registered, Registration, Registry};
use holdfast_engine::model::{
    Backend, BackendId, Boot, Device, Entry, Ifindex, IntentProof, Mac, NameHash, Op, OpError, PolicySlot,
    Protocol, RouteKey, Row, Selected, SlotId, Token, UidHash,
};

use crate::process::{SHIPPED, restrict};
use crate::rtnl::{End, Rtnl};
use crate::space::ROOT;
use crate::tc;
use crate::{Space, suite};

/// The node.
#[derive(Debug)]
pub struct Ground {
    space: Space,
    root: Root,
    /// Its devices, with full rights.
    pub rtnl: Rtnl,
    /// What the data path is opened with.
    pub options: Options,
}

/// A thread that keeps the rights that the test gives up.
#[derive(Debug)]
struct Root {
    jobs: mpsc::Sender<Job>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Root {
    /// It ends when this value is dropped.
    fn start() -> Self {
        let (jobs, incoming) = mpsc::channel::<Job>();
        std::thread::spawn(move || incoming.into_iter().for_each(|job| job()));
        Self { jobs }
    }
}

/// What an intent is made of in the kernel.
#[derive(Clone, Debug)]
pub struct Intent {
    /// The consumer.
    pub consumer: Device,
    /// Its token.
    pub token: Token,
    /// Its row, open.
    pub row: Row,
    /// Its addresses.
    pub sources: BTreeSet<IpAddr>,
    /// Its entries, open.
    pub entries: BTreeMap<RouteKey, Entry>,
    /// Its policy's slot.
    pub slot: SlotId,
    /// What is in it.
    pub policy: PolicySlot,
    /// Its set.
    pub backends: BTreeMap<BackendId, Backend>,
    /// Backend of each slot of the set.
    pub slots: Vec<BackendId>,
}

impl Ground {
    /// A new node, with small maps.
    ///
    /// # Errors
    /// When the kernel or the rights do not allow it.
    pub fn new() -> anyhow::Result<Self> {
        let root = Root::start();
        let space = Space::node()?;
        let rtnl = Rtnl::open(&space)?;
        let options = Options {
            bpffs_dir: Path::new(ROOT).join("bpf/holdfast"),
            run_dir: Path::new(ROOT).join("holdfast"),
            sizes: Sizes {
                consumers: 64,
                sources: 64,
                locals: 64,
                services: 64,
                prefixes: 64,
                policies: 16,
                slots: 256,
                backends: 32,
                flows: 1024,
            },
            attach: suite::way().attach,
            allow_foreign_before: false,
        };
        Ok(Self {
            space,
            root,
            rtnl,
            options,
        })
    }

    /// Makes a node and does something as its agent would: in its namespaces, with the shipped capabilities alone.
    ///
    /// # Errors
    /// What `test` says.
    pub fn run(test: impl FnOnce(&mut Self) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
        let mut ground = Self::new()?;
        let space = ground.space.clone();
        space.inside(|| {
            restrict(SHIPPED).context("cannot give up capabilities")?;
            test(&mut ground)
        })
    }

    /// Does something with full rights: what an agent never does, but those around it do.
    ///
    /// # Errors
    /// What `work` says.
    pub fn as_root<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (answer, answered) = mpsc::channel();
        let job = move || {
            // Nobody waits for the answer only if the test has panicked.
            let _ = answer.send(work());
        };
        self.root.jobs.send(Box::new(job)).ok().context("root has gone")?;
        answered.recv().context("root has gone")?
    }

    /// Its namespaces.
    #[must_use]
    pub const fn space(&self) -> &Space {
        &self.space
    }

    /// Its pins.
    #[must_use]
    pub fn pins(&self) -> Pins {
        Pins::new(&self.options.bpffs_dir)
    }

    /// Opens the data path, as a new life of the agent.
    ///
    /// # Errors
    /// As [`Kernel::open`].
    pub fn open(&self) -> Result<Opened, DatapathError> {
        Kernel::open(&self.options, AgentLock::take(&self.options.bpffs_dir)?)
    }

    /// The registry, as a CNI has it.
    ///
    /// # Errors
    /// When it can be neither opened nor created.
    pub fn registry(&self) -> anyhow::Result<Registry> {
        Ok(Registry::open_or_create(
            &self.options.bpffs_dir,
            &self.options.run_dir,
        )?)
    }

    /// Makes a veth whose other end is in a namespace of its own, and sets both up.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn veth(&mut self, name: &str) -> anyhow::Result<(Device, Space)> {
        let workload = self.as_root(Space::network)?;
        let (end, peer) = (End::named(name), End::named("eth0"));
        self.rtnl.veth(end, peer, Some(workload.net()))?;
        self.rtnl.up(name)?;
        let inside = workload.clone();
        self.as_root(move || Rtnl::open(&inside)?.up("eth0"))?;
        Ok((self.device(name)?, workload))
    }

    /// Makes a veth with this number, both ends here: what a CNI can do to a number that was another device's.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn veth_as(&mut self, name: &str, ifindex: Ifindex) -> anyhow::Result<Device> {
        let end = End {
            ifindex,
            ..End::named(name)
        };
        let peer = format!("{name}p");
        self.rtnl.veth(end, End::named(&peer), None)?;
        self.device(name)
    }

    /// The device of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn device(&mut self, name: &str) -> anyhow::Result<Device> {
        let found = self
            .rtnl
            .device(name)?
            .with_context(|| format!("no device {name}"))?;
        Ok(Device {
            ifindex: found.ifindex,
            mac: Mac(found.mac),
        })
    }

    /// Programs that packets meet at the ingress of a device, in their order: the chain of tcx, then filters.
    ///
    /// # Errors
    /// When the device is not there.
    pub fn programs(&mut self, device: &str) -> anyhow::Result<Vec<u32>> {
        let chain = raw::chain(self.rtnl.ifindex(device)?)?;
        let filters = self.rtnl.filters(device, tc::INGRESS)?;
        let chain = chain.items.iter().map(|item| item.prog_id);
        Ok(chain.chain(filters.iter().map(|filter| filter.program)).collect())
    }

    /// Registers an interface, as a CNI does.
    ///
    /// # Errors
    /// As [`Registry::register`].
    pub fn register(&self, interface: &str) -> anyhow::Result<Registered> {
        let registration = Registration {
            interface: interface.to_owned(),
            identity: Some(format!("{interface}-1")),
            ..Registration::default()
        };
        Ok(self.registry()?.register(&registration)?)
    }

    /// A consumer and a producer that are registered and attached, and what an intent between them is made of.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn intent(&mut self, kernel: &Kernel) -> anyhow::Result<(Intent, [Space; 2])> {
        self.intent_between(kernel, "hfcons", "hfprod")
    }

    /// The same, between interfaces of these names.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn intent_between(
        &mut self,
        kernel: &Kernel,
        consumer: &str,
        producer: &str,
    ) -> anyhow::Result<(Intent, [Space; 2])> {
        let names = [consumer, producer];
        let (consumer, consumer_space) = self.veth(names[0])?;
        let (producer, producer_space) = self.veth(names[1])?;
        let token = self.register(names[0])?.token;
        let producer_token = self.register(names[1])?.token;
        for device in [consumer, producer] {
            carry_out(kernel, &Op::Attach { device })?;
        }
        let slot = 3;
        let selected = Selected {
            base: 8,
            length: 1,
            generation: 5,
        };
        let backend = 4;
        let addresses = |last: u16| -> [IpAddr; 2] {
            [
                [10, 0, 0, last as u8].into(),
                [0xfd00, 0, 0, 0, 0, 0, 0, last].into(),
            ]
        };
        let [address_v4, address_v6] = addresses(2);
        let entry = Entry {
            policy: slot,
            open: true,
        };
        let service = |address: IpAddr, protocol, port| RouteKey::Service {
            address,
            protocol,
            port,
        };
        let [service_v4, service_v6] = addresses(10);
        let intent = Intent {
            consumer,
            token,
            row: Row {
                token: Some(token),
                epoch: 7,
                has_services: true,
                has_prefixes_v4: false,
                has_prefixes_v6: false,
                via: None,
                has_sources: true,
            },
            sources: addresses(1).into(),
            entries: BTreeMap::from([
                (service(service_v4, Protocol::Udp, 53), entry),
                (service(service_v4, Protocol::Tcp, 53), entry),
                (service(service_v6, Protocol::Udp, 53), entry),
            ]),
            slot,
            policy: PolicySlot {
                name: NameHash(0x1234_5678),
                uid: UidHash([9; 16]),
                selected,
                pass_while_held: false,
                served_generation: 2,
                served_since_ms: 1_700_000_000_000,
                waiting_since: Some(Boot(77)),
                last_set_generation: 5,
            },
            backends: BTreeMap::from([(
                backend,
                Backend {
                    policy: slot,
                    ifindex: producer.ifindex,
                    token: producer_token,
                    mac: Mac([2, 0, 0, 0, 0, 9]),
                    address_v4: Some(address_v4),
                    address_v6: Some(address_v6),
                    via: None,
                    last_generation: 5,
                    drain_until: None,
                },
            )]),
            slots: vec![backend],
        };
        Ok((intent, [consumer_space, producer_space]))
    }
}

impl Intent {
    /// The writes of it, in their order.
    #[must_use]
    pub fn writes(&self) -> Vec<Op> {
        let ifindex = self.consumer.ifindex;
        vec![
            Op::WriteBackends {
                backends: self
                    .backends
                    .iter()
                    .map(|(id, backend)| (*id, Some(backend.clone())))
                    .collect(),
            },
            Op::WriteSlots {
                base: self.policy.selected.base,
                slots: self.slots.clone(),
            },
            Op::WritePolicy {
                slot: self.slot,
                value: Some(self.policy.clone()),
            },
            Op::WriteSources {
                ifindex,
                add: self.sources.clone(),
                delete: BTreeSet::new(),
            },
            Op::WriteEntries {
                ifindex,
                entries: self.entries.clone(),
            },
            Op::WriteRow {
                ifindex,
                row: self.row,
            },
        ]
    }

    /// What must be proven of it.
    #[must_use]
    pub fn proof(&self) -> IntentProof {
        IntentProof {
            device: self.consumer,
            row: self.row,
            token: self.token,
            sources: self.sources.clone(),
            entries: self.entries.clone(),
            takeovers: BTreeMap::new(),
            selected: self.policy.selected,
            backends: self.backends.clone(),
        }
    }

    /// What must be proven of its set.
    #[must_use]
    pub fn set_proof(&self) -> Op {
        Op::ProveSet {
            policy: self.slot,
            device: self.consumer,
            selected: self.policy.selected,
            backends: self.backends.clone(),
            slots: self.slots.clone(),
        }
    }
}

/// Carries an operation out and says how much was written.
///
/// # Errors
/// The data path's.
pub fn carry_out(kernel: &dyn Datapath, op: &Op) -> anyhow::Result<u32> {
    let done = kernel.carry_out(op).with_context(|| format!("{op:?}"))?;
    Ok(done.writes)
}

/// That an operation fails, and with what.
///
/// # Errors
/// When it does not.
pub fn refusal(kernel: &dyn Datapath, op: &Op) -> anyhow::Result<OpError> {
    match kernel.carry_out(op) {
        Err(error) => Ok(error),
        Ok(done) => anyhow::bail!("{op:?} was carried out: {done:?}"),
    }
}

/// That a pin is there or is not.
///
/// # Errors
/// When it is otherwise.
pub fn pinned(path: &Path, wanted: bool) -> anyhow::Result<()> {
    let found = std::fs::symlink_metadata(path).is_ok();
    ensure!(found == wanted, "{}: there is {found}", path.display());
    Ok(())
}

/// Names in a directory of pins.
///
/// # Errors
/// When it cannot be read.
pub fn names(directory: &Path) -> anyhow::Result<BTreeSet<String>> {
    std::fs::read_dir(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// The pin of a device's link.
#[must_use]
pub fn link_pin(ground: &Ground, ifindex: Ifindex) -> PathBuf {
    ground.pins().link(ifindex)
}
