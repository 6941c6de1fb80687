//! The program with its maps, and a node to run it on: a consumer, two producers, a policy.
#![expect(unsafe_code, reason = "map values as bytes")]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, ensure};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, MapData, PerCpuArray, RingBuf};
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use aya::{Ebpf, EbpfLoader};
use holdfast::datapath::object::object;
use holdfast_ebpf::abi::{
    self, Backend, ConsumerRow, Flow, FlowKey, Fragment, FragmentKey, LocalKey, PolicySlot, PrefixEntry,
    PrefixKey, RegistryRow, RouteEntry, Selector, ServiceKey, SourceKey, Target, Verdict, control, pin,
    probe,
};
use holdfast_tests::Space;
use holdfast_tests::rtnl::{End, Mac, Rtnl};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::frame::{ACK, Frame, SYN, Transport};

/// A value of the layout, as aya wants it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain<T>(pub(crate) T);

// SAFETY: used with the types of `abi` alone: `repr(C)`, copied, without implicit padding.
unsafe impl<T: Copy + 'static> aya::Pod for Plain<T> {}

/// What TCX and clsact understand.
pub(crate) const NEXT: i32 = -1;
pub(crate) const SHOT: i32 = 2;
pub(crate) const REDIRECT: i32 = 7;

/// The policy of the standard plane, its slot's flags aside.
pub(crate) const POLICY: u32 = 5;
/// Where its slots begin.
pub(crate) const BASE: u32 = 100;
/// Generation of its first set.
pub(crate) const GENERATION: u32 = 3;
/// Entries of the flow table: each test makes its own.
pub(crate) const FLOWS: u32 = 16_384;
/// Tokens.
pub(crate) const CONSUMER_TOKEN: u64 = 0xc0c0_c0c0_c0c0_c0c0;
pub(crate) const PRODUCER_TOKEN: u64 = 0x0101_0101_0101_0101;
pub(crate) const OTHER_TOKEN: u64 = 0x0202_0202_0202_0202;
pub(crate) const SECOND_TOKEN: u64 = CONSUMER_TOKEN + 7;
/// MACs of the workloads.
pub(crate) const SECOND_MAC: [u8; 6] = [2, 0xc, 0, 0, 0, 2];
pub(crate) const CONSUMER_MAC: [u8; 6] = [2, 0xc, 0, 0, 0, 1];
pub(crate) const PRODUCER_MAC: [u8; 6] = [2, 0xd, 0, 0, 0, 1];

pub(crate) const NONCE: u64 = 0x1234_5678_9abc_def0;

/// Addresses of the consumer and of what the policy claims.
pub(crate) const CONSUMER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 11));
pub(crate) const CONSUMER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x11));
pub(crate) const SERVICE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));
pub(crate) const SERVICE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0x53, 0, 0, 0, 0, 0, 1));
pub(crate) const PORT: u16 = 53;

/// The loaded program on a node.
pub(crate) struct Plane {
    pub(crate) ebpf: Ebpf,
    /// Host-side interfaces: the consumer, two producers, and one that nobody knows.
    pub(crate) consumer: u32,
    pub(crate) producer: u32,
    pub(crate) other: u32,
    pub(crate) stranger: u32,
    /// The node itself.
    pub(crate) node: Space,
    /// What is behind them.
    pub(crate) consumer_space: Space,
    pub(crate) producer_space: Space,
    pub(crate) stranger_space: Space,
}

/// What a probe says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) verdict: Verdict,
    pub(crate) target: u32,
    pub(crate) policy: u32,
    pub(crate) generation: u32,
    pub(crate) backend: u32,
}

/// What a run of the program did.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) action: i32,
    pub(crate) frame: Vec<u8>,
    pub(crate) mark: u32,
    pub(crate) cb: [u32; 5],
}

/// Runs a test on a fresh node with the shipped capabilities and nothing written yet.
pub(crate) fn bare(test: impl FnOnce(&mut Plane) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    let node = Space::node()?;
    let consumer = workload(&node, "hfc0", CONSUMER_MAC)?;
    let producer = workload(&node, "hfp0", PRODUCER_MAC)?;
    let other = workload(&node, "hfp1", [2, 0xd, 0, 0, 0, 2])?;
    let stranger = workload(&node, "hfx0", [2, 0xe, 0, 0, 0, 1])?;
    node.inside(|| {
        shipped_rights()?;
        let mut plane = Plane {
            ebpf: load()?,
            node: node.clone(),
            consumer: consumer.1,
            producer: producer.1,
            other: other.1,
            stranger: stranger.1,
            consumer_space: consumer.0,
            producer_space: producer.0,
            stranger_space: stranger.0,
        };
        test(&mut plane)
    })
}

/// A namespace with one end of a veth, and the number of the other, which is the node's.
fn workload(node: &Space, name: &str, mac: Mac) -> anyhow::Result<(Space, u32)> {
    let space = Space::network()?;
    let mut rtnl = Rtnl::open(node)?;
    let inside = End {
        mac: Some(mac),
        ..End::named("eth0")
    };
    rtnl.veth(End::named(name), inside, Some(space.net()))?;
    rtnl.up(name)?;
    Rtnl::open(&space)?.up("eth0")?;
    Ok((space, rtnl.ifindex(name)?))
}

/// Runs a test on a node where one policy serves the consumer's UDP and TCP on both families by one producer.
pub(crate) fn served(test: impl FnOnce(&mut Plane) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    bare(|plane| {
        plane.register(plane.consumer, CONSUMER_TOKEN, CONSUMER_MAC)?;
        plane.register(plane.producer, PRODUCER_TOKEN, PRODUCER_MAC)?;
        plane.register(plane.other, OTHER_TOKEN, [0; 6])?;
        plane.backend(0, plane.producer, PRODUCER_TOKEN, GENERATION)?;
        plane.slots(BASE, &[0])?;
        plane.policy(POLICY, BASE, 1, GENERATION, 0)?;
        for address in [SERVICE_V4, SERVICE_V6] {
            for protocol in [6, 17] {
                plane.entry(address, protocol, PORT, POLICY, RouteEntry::OPEN)?;
            }
        }
        for address in [CONSUMER_V4, CONSUMER_V6] {
            plane.source(address)?;
        }
        plane.row(CONSUMER_TOKEN, 1)?;
        plane.set_control(control::NONCE, NONCE)?;
        test(plane)
    })
}

/// From now on this thread may do what the agent may do: it runs with these capabilities and no others.
pub(crate) fn shipped_rights() -> anyhow::Result<()> {
    rights(CapabilitySet::BPF | CapabilitySet::NET_ADMIN | CapabilitySet::PERFMON)
}

/// From now on this thread may do again what a test may do.
pub(crate) fn all_rights() -> anyhow::Result<()> {
    rights(capabilities(None)?.permitted)
}

fn rights(effective: CapabilitySet) -> anyhow::Result<()> {
    let sets = CapabilitySets {
        effective,
        ..capabilities(None)?
    };
    set_capabilities(None, sets).context("cannot change capabilities")
}

/// Loads the object with its maps, pinned nowhere.
fn load() -> anyhow::Result<Ebpf> {
    let mut ebpf = EbpfLoader::new()
        .map_max_entries(pin::FLOWS, FLOWS)
        .load(object()?)
        .context("cannot load the object")?;
    program(&mut ebpf)?
        .load()
        .context("the verifier refuses the program")?;
    Ok(ebpf)
}

pub(crate) fn program(ebpf: &mut Ebpf) -> anyhow::Result<&mut SchedClassifier> {
    Ok(ebpf
        .program_mut(pin::PROGRAM)
        .context("there is no program")?
        .try_into()?)
}

/// The address as keys have it.
pub(crate) fn address(address: IpAddr) -> (u8, abi::Address) {
    let mut bytes = [0; 16];
    match address {
        IpAddr::V4(address) => {
            bytes[..4].copy_from_slice(&address.octets());
            (abi::FAMILY_V4, bytes)
        }
        IpAddr::V6(address) => {
            bytes = address.octets();
            (abi::FAMILY_V6, bytes)
        }
    }
}

/// A request of the consumer to the service.
pub(crate) fn request(transport: Transport, v6: bool) -> Frame {
    let (source, destination) = if v6 {
        (CONSUMER_V6, SERVICE_V6)
    } else {
        (CONSUMER_V4, SERVICE_V4)
    };
    Frame::new((source, 40_000), (destination, PORT), transport)
}

impl Plane {
    pub(crate) fn hash<K: Copy + 'static, V: Copy + 'static>(
        &mut self,
        name: &str,
    ) -> anyhow::Result<HashMap<&mut MapData, Plain<K>, Plain<V>>> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("there is no map {name}"))?;
        Ok(HashMap::try_from(map)?)
    }

    pub(crate) fn array<V: Copy + 'static>(
        &mut self,
        name: &str,
    ) -> anyhow::Result<Array<&mut MapData, Plain<V>>> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("there is no map {name}"))?;
        Ok(Array::try_from(map)?)
    }

    pub(crate) fn register(&mut self, ifindex: u32, token: u64, mac: [u8; 6]) -> anyhow::Result<()> {
        let row = RegistryRow {
            token,
            mac,
            ..RegistryRow::default()
        };
        Ok(self.hash(pin::REGISTRY)?.insert(Plain(ifindex), Plain(row), 0)?)
    }

    pub(crate) fn unregister(&mut self, ifindex: u32) -> anyhow::Result<()> {
        Ok(self
            .hash::<u32, RegistryRow>(pin::REGISTRY)?
            .remove(&Plain(ifindex))?)
    }

    /// The consumer's row.
    pub(crate) fn row(&mut self, token: u64, epoch: u32) -> anyhow::Result<()> {
        let flags = ConsumerRow::HAS_SERVICES | ConsumerRow::HAS_SOURCES;
        self.row_of(self.consumer, token, epoch, flags)
    }

    pub(crate) fn row_of(&mut self, ifindex: u32, token: u64, epoch: u32, flags: u32) -> anyhow::Result<()> {
        self.row_with(ifindex, token, epoch, flags, 0)
    }

    pub(crate) fn row_with(
        &mut self,
        ifindex: u32,
        token: u64,
        epoch: u32,
        flags: u32,
        device: u32,
    ) -> anyhow::Result<()> {
        let row = ConsumerRow {
            ifindex,
            epoch,
            token,
            flags,
            device,
        };
        Ok(self.hash(pin::CONSUMERS)?.insert(Plain(ifindex), Plain(row), 0)?)
    }

    pub(crate) fn key(&self, to: IpAddr, protocol: u8, port: u16) -> ServiceKey {
        let (family, address) = address(to);
        ServiceKey {
            ifindex: self.consumer,
            port: port.to_be(),
            protocol,
            family,
            address,
        }
    }

    /// An entry of the consumer.
    pub(crate) fn entry(
        &mut self,
        to: IpAddr,
        protocol: u8,
        port: u16,
        policy: u32,
        flags: u32,
    ) -> anyhow::Result<()> {
        let key = self.key(to, protocol, port);
        self.entry_at(key, policy, flags)
    }

    pub(crate) fn entry_at(&mut self, key: ServiceKey, policy: u32, flags: u32) -> anyhow::Result<()> {
        let entry = RouteEntry {
            check: key.check(),
            pad: 0,
            policy,
            flags,
        };
        Ok(self.hash(pin::SERVICES)?.insert(Plain(key), Plain(entry), 0)?)
    }

    pub(crate) fn remove_entry(&mut self, to: IpAddr, protocol: u8, port: u16) -> anyhow::Result<()> {
        let key = self.key(to, protocol, port);
        Ok(self
            .hash::<ServiceKey, RouteEntry>(pin::SERVICES)?
            .remove(&Plain(key))?)
    }

    /// Makes a backend one that is reached as a neighbour.
    pub(crate) fn neighbour(
        &mut self,
        id: u32,
        device: u32,
        v4: Option<Ipv4Addr>,
        v6: Option<Ipv6Addr>,
    ) -> anyhow::Result<()> {
        self.backend_with(id, |backend| {
            backend.device = device;
            backend.address_v4 = v4.map_or([0; 4], |address| address.octets());
            backend.address_v6 = v6.map_or([0; 16], |address| address.octets());
            backend.target = Target {
                kind: Target::NEIGH,
                ..Target::unpack(backend.target)
            }
            .pack();
        })
    }

    /// A second consumer without known addresses at the stranger's interface, which may ask what the first may.
    pub(crate) fn second_consumer(&mut self) -> anyhow::Result<u32> {
        let second = self.stranger;
        self.register(second, SECOND_TOKEN, SECOND_MAC)?;
        self.row_of(second, SECOND_TOKEN, 1, ConsumerRow::HAS_SERVICES)?;
        for address in [SERVICE_V4, SERVICE_V6] {
            for protocol in [6, 17] {
                let key = ServiceKey {
                    ifindex: second,
                    ..self.key(address, protocol, PORT)
                };
                self.entry_at(key, POLICY, RouteEntry::OPEN)?;
            }
        }
        Ok(second)
    }

    /// The mark that some port of an address is claimed.
    pub(crate) fn claim(&mut self, to: IpAddr) -> anyhow::Result<()> {
        let (family, address) = address(to);
        let key = ServiceKey::claim(self.consumer, family, address);
        Ok(self
            .hash(pin::SERVICES)?
            .insert(Plain(key), Plain(RouteEntry::claim(&key)), 0)?)
    }

    /// A prefix entry of the consumer.
    pub(crate) fn prefix(&mut self, to: IpAddr, length: u8, policy: u32, flags: u32) -> anyhow::Result<()> {
        let key = self.prefix_key(to, length);
        let entry = PrefixEntry {
            check: key.check(),
            length: length.into(),
            policy,
            flags,
        };
        self.prefixes()?
            .insert(&trie_key(&key), Plain(entry), 0)
            .context("cannot write a prefix")
    }

    pub(crate) fn remove_prefix(&mut self, to: IpAddr, length: u8) -> anyhow::Result<()> {
        let key = self.prefix_key(to, length);
        Ok(self.prefixes()?.remove(&trie_key(&key))?)
    }

    pub(crate) fn prefix_key(&self, to: IpAddr, length: u8) -> PrefixKey {
        let (family, address) = address(to);
        PrefixKey::new(self.consumer, family, &address, length.into())
    }

    pub(crate) fn prefixes(&mut self) -> anyhow::Result<LpmTrie<&mut MapData, [u8; 24], Plain<PrefixEntry>>> {
        let map = self
            .ebpf
            .map_mut(pin::PREFIXES)
            .context("there are no prefixes")?;
        Ok(LpmTrie::try_from(map)?)
    }

    /// One of the node's own addresses.
    pub(crate) fn local(&mut self, of: IpAddr) -> anyhow::Result<()> {
        let key = local_key(of);
        Ok(self
            .hash(pin::LOCALS)?
            .insert(Plain(key), Plain(key.check()), 0)?)
    }

    pub(crate) fn remove_local(&mut self, of: IpAddr) -> anyhow::Result<()> {
        Ok(self
            .hash::<LocalKey, u64>(pin::LOCALS)?
            .remove(&Plain(local_key(of)))?)
    }

    /// One of the consumer's own addresses.
    pub(crate) fn source(&mut self, of: IpAddr) -> anyhow::Result<()> {
        let (family, address) = address(of);
        let key = SourceKey {
            ifindex: self.consumer,
            family,
            pad: [0; 3],
            address,
        };
        Ok(self
            .hash(pin::SOURCES)?
            .insert(Plain(key), Plain(key.check()), 0)?)
    }

    pub(crate) fn backend(
        &mut self,
        id: u32,
        ifindex: u32,
        token: u64,
        last_generation: u32,
    ) -> anyhow::Result<()> {
        self.backend_with(id, |backend| {
            backend.token = token;
            backend.policy = POLICY;
            backend.mac = if ifindex == 0 { [0; 6] } else { PRODUCER_MAC };
            backend.target = Target {
                ifindex,
                kind: Target::PEER,
                last_generation,
            }
            .pack();
        })
    }

    /// Changes a backend.
    pub(crate) fn backend_with(&mut self, id: u32, change: impl FnOnce(&mut Backend)) -> anyhow::Result<()> {
        let mut map = self.array::<Backend>(pin::BACKENDS)?;
        let Plain(mut backend) = map.get(&id, 0)?;
        change(&mut backend);
        Ok(map.set(id, Plain(backend), 0)?)
    }

    pub(crate) fn slots(&mut self, base: u32, backends: &[u32]) -> anyhow::Result<()> {
        let mut map = self.array::<u32>(pin::SLOTS)?;
        for (slot, backend) in (base..).zip(backends) {
            map.set(slot, Plain(*backend), 0)?;
        }
        Ok(())
    }

    pub(crate) fn policy(
        &mut self,
        id: u32,
        base: u32,
        length: u16,
        generation: u32,
        flags: u64,
    ) -> anyhow::Result<()> {
        let selector = Selector {
            base,
            length,
            generation,
        };
        self.policy_with(id, |slot| {
            slot.selector = selector.pack();
            slot.flags = flags;
        })
    }

    /// Changes a policy slot.
    pub(crate) fn policy_with(
        &mut self,
        id: u32,
        change: impl FnOnce(&mut PolicySlot),
    ) -> anyhow::Result<()> {
        let mut map = self.array::<PolicySlot>(pin::POLICIES)?;
        let Plain(mut slot) = map.get(&id, 0)?;
        change(&mut slot);
        Ok(map.set(id, Plain(slot), 0)?)
    }

    pub(crate) fn set_control(&mut self, word: u32, value: u64) -> anyhow::Result<()> {
        Ok(self.array(pin::CONTROL)?.set(word, Plain(value), 0)?)
    }

    /// Packets by verdict.
    pub(crate) fn counters(&mut self) -> anyhow::Result<Vec<u64>> {
        let map = self
            .ebpf
            .map_mut(pin::COUNTERS)
            .context("there are no counters")?;
        let map: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
        (0..Verdict::ALL.len() as u32)
            .map(|index| Ok(map.get(&index, 0)?.iter().sum()))
            .collect()
    }

    /// Every flow entry.
    pub(crate) fn flows(&mut self) -> anyhow::Result<BTreeMap<[u8; 44], Flow>> {
        let flows = self.hash::<[u8; 44], Flow>(pin::FLOWS)?;
        let entries: Result<BTreeMap<_, _>, _> = flows
            .iter()
            .map(|entry| entry.map(|(key, flow)| (key.0, flow.0)))
            .collect();
        Ok(entries?)
    }

    /// Forgets every flow.
    pub(crate) fn forget_flows(&mut self) -> anyhow::Result<()> {
        let keys: Vec<_> = self.flows()?.into_keys().collect();
        let mut flows = self.hash::<[u8; 44], Flow>(pin::FLOWS)?;
        for key in keys {
            flows.remove(&Plain(key))?;
        }
        Ok(())
    }

    /// Forgets every datagram whose fragments are on their way.
    pub(crate) fn forget_fragments(&mut self) -> anyhow::Result<()> {
        let mut fragments = self.hash::<FragmentKey, Fragment>(pin::FRAGMENTS)?;
        let keys: Result<Vec<_>, _> = fragments.keys().collect();
        for key in keys? {
            fragments.remove(&key)?;
        }
        Ok(())
    }

    /// Removes one flow entry.
    pub(crate) fn forget_flow(&mut self, ifindex: u32, frame: &Frame) -> anyhow::Result<()> {
        let key = flow_key(ifindex, frame);
        Ok(self.hash::<FlowKey, Flow>(pin::FLOWS)?.remove(&Plain(key))?)
    }

    /// The entry of a packet, if there is one.
    pub(crate) fn flow(&mut self, ifindex: u32, frame: &Frame) -> anyhow::Result<Option<Flow>> {
        let key = flow_key(ifindex, frame);
        match self.hash::<FlowKey, Flow>(pin::FLOWS)?.get(&Plain(key), 0) {
            Ok(flow) => Ok(Some(flow.0)),
            Err(aya::maps::MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Runs the program `repeat` times on a frame that arrives at an interface.
    pub(crate) fn run(
        &mut self,
        ifindex: u32,
        frame: &[u8],
        mark: u32,
        cb: [u32; 5],
        repeat: u32,
    ) -> anyhow::Result<Run> {
        // `struct __sk_buff`: mark at 8, ifindex at 40, cb at 48.
        let mut context = [0u8; 192];
        context[8..12].copy_from_slice(&mark.to_ne_bytes());
        context[40..44].copy_from_slice(&ifindex.to_ne_bytes());
        for (index, word) in cb.iter().enumerate() {
            context[48 + index * 4..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        let mut after = [0u8; 192];
        let mut out = vec![0u8; frame.len() + 64];
        let result = program(&mut self.ebpf)?.test_run(TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ctx_in: Some(&context),
            ctx_out: Some(&mut after),
            repeat,
            ..TestRunOptions::default()
        })?;
        out.truncate(result.data_size_out as usize);
        let word = |at: usize| u32::from_ne_bytes([after[at], after[at + 1], after[at + 2], after[at + 3]]);
        Ok(Run {
            action: result.return_value.cast_signed(),
            frame: out,
            mark: word(8),
            cb: std::array::from_fn(|index| word(48 + index * 4)),
        })
    }

    /// Sends a frame, and says what became of it by the one counter that moved.
    pub(crate) fn send(&mut self, ifindex: u32, frame: &[u8]) -> anyhow::Result<Verdict> {
        // A mark and dirty control bytes, as real packets have them.
        Ok(self.send_whole(ifindex, frame, 7, [1, 2, 3, 4, 5])?.0)
    }

    pub(crate) fn send_whole(
        &mut self,
        ifindex: u32,
        frame: &[u8],
        mark: u32,
        cb: [u32; 5],
    ) -> anyhow::Result<(Verdict, Run)> {
        let before = self.counters()?;
        let run = self.run(ifindex, frame, mark, cb, 1)?;
        let after = self.counters()?;
        let moved: Vec<_> = Verdict::ALL
            .into_iter()
            .filter(|verdict| after[*verdict as usize] != before[*verdict as usize])
            .collect();
        let [verdict] = moved[..] else {
            anyhow::bail!("counters that moved: {moved:?}");
        };
        ensure!(after[verdict as usize] == before[verdict as usize] + 1);
        let expected = match verdict {
            Verdict::Pass | Verdict::PassedHeld => NEXT,
            Verdict::Delivered | Verdict::Answered => REDIRECT,
            _ => SHOT,
        };
        // Whoever sent what is too big is told: the packet goes back, as the answer.
        let told = verdict == Verdict::DropTooBig && run.action == REDIRECT;
        ensure!(
            told || run.action == expected,
            "{verdict:?} with action {}",
            run.action
        );
        if matches!(verdict, Verdict::Pass | Verdict::PassedHeld) {
            ensure!(
                run.frame == frame && run.mark == mark,
                "a packet that passes was changed"
            );
        }
        Ok((verdict, run))
    }

    /// The consumer sends.
    pub(crate) fn ask(&mut self, frame: &Frame) -> anyhow::Result<Verdict> {
        self.send(self.consumer, &frame.bytes())
    }

    /// The producer sends.
    pub(crate) fn tell(&mut self, frame: &Frame) -> anyhow::Result<Verdict> {
        self.send(self.producer, &frame.bytes())
    }

    /// Probes; a probe changes nothing.
    pub(crate) fn probe(
        &mut self,
        ifindex: u32,
        frame: &Frame,
        base: u32,
        length: u32,
        flags: u32,
    ) -> anyhow::Result<Answer> {
        let before = (self.counters()?, self.flows()?);
        let nonce = [NONCE as u32, (NONCE >> 32) as u32];
        let bytes = frame.bytes();
        let run = self.run(
            ifindex,
            &bytes,
            probe::MARK,
            [base, length, flags, nonce[0], nonce[1]],
            1,
        )?;
        ensure!(
            run.frame == bytes && run.mark == probe::MARK,
            "a probe changed the packet"
        );
        ensure!(
            before == (self.counters()?, self.flows()?),
            "a probe changed a map"
        );
        let verdict = Verdict::from_u32(run.cb[0]).with_context(|| format!("no verdict: {}", run.cb[0]))?;
        let expected = match verdict {
            Verdict::Pass | Verdict::PassedHeld => NEXT,
            Verdict::Delivered | Verdict::Answered => REDIRECT,
            _ => SHOT,
        };
        ensure!(run.action == expected, "{verdict:?} with action {}", run.action);
        Ok(Answer {
            verdict,
            target: run.cb[1],
            policy: run.cb[2],
            generation: run.cb[3],
            backend: run.cb[4],
        })
    }

    /// Ifindexes in the ring buffer of wakes.
    pub(crate) fn wakes(&mut self) -> anyhow::Result<Vec<u32>> {
        let map = self.ebpf.map_mut(pin::WAKES).context("there are no wakes")?;
        let mut ring: RingBuf<_> = RingBuf::try_from(map)?;
        let mut ifindexes = Vec::new();
        while let Some(item) = ring.next() {
            ifindexes.push(u32::from_ne_bytes((*item).try_into()?));
        }
        Ok(ifindexes)
    }

    /// Lines in the ring buffer of debug lines.
    pub(crate) fn lines(&mut self) -> anyhow::Result<usize> {
        let map = self.ebpf.map_mut(pin::LOGS).context("there are no logs")?;
        let mut ring: RingBuf<_> = RingBuf::try_from(map)?;
        let mut count = 0;
        while ring.next().is_some() {
            count += 1;
        }
        Ok(count)
    }
}

/// As aya wants it: the length apart.
pub(crate) fn trie_key(key: &PrefixKey) -> Key<[u8; 24]> {
    let mut data = [0; 24];
    data[..4].copy_from_slice(&key.ifindex.to_ne_bytes());
    data[4] = key.family;
    data[8..].copy_from_slice(&key.address);
    Key::new(key.length, data)
}

fn local_key(of: IpAddr) -> LocalKey {
    let (family, address) = address(of);
    LocalKey {
        family,
        pad: [0; 3],
        address,
    }
}

fn flow_key(ifindex: u32, frame: &Frame) -> FlowKey {
    let (family, source) = address(frame.source.0);
    let (_, destination) = address(frame.destination.0);
    FlowKey {
        ifindex,
        source_port: frame.source.1.to_be(),
        destination_port: frame.destination.1.to_be(),
        source,
        destination,
        protocol: frame.transport.number(),
        family,
        pad: [0; 2],
    }
}

/// Both families, both transports.
pub(crate) const KINDS: [(Transport, bool); 4] = [
    (Transport::Udp, false),
    (Transport::Udp, true),
    (Transport::Tcp(SYN), false),
    (Transport::Tcp(SYN), true),
];

/// A request that is not the first of its connection.
pub(crate) fn data(frame: &Frame) -> Frame {
    match frame.transport {
        Transport::Tcp(_) => frame.with(Transport::Tcp(ACK)),
        _ => frame.clone(),
    }
}

pub(crate) fn is(found: Verdict, expected: Verdict, what: &str) -> anyhow::Result<()> {
    ensure!(found == expected, "{what}: {found:?} instead of {expected:?}");
    Ok(())
}

/// A lone later fragment is dropped; behind its first, it and those after it go where that went.
pub(crate) fn later_fragments_follow_the_first(plane: &mut Plane, frame: &Frame) -> anyhow::Result<()> {
    for (offset, more, verdict, what) in [
        (8, false, Verdict::DropFragment, "without its first"),
        (0, true, Verdict::Delivered, "the first"),
        (8, true, Verdict::Delivered, "the second"),
        (16, false, Verdict::Delivered, "the last"),
    ] {
        is(plane.ask(&frame.fragment(offset, more, 1))?, verdict, what)?;
    }
    Ok(())
}

pub(crate) fn boot_ns() -> anyhow::Result<u64> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Ok(u64::try_from(now.tv_sec)? * 1_000_000_000 + u64::try_from(now.tv_nsec)?)
}
