//! Proofs: they agree with what is right, name what is wrong, and change nothing. And the fake data path, held against
//! the kernel by random scripts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::time::Instant;

use anyhow::{Context, ensure};
use holdfast::datapath::fake::Fake;
use holdfast::datapath::raw::{self, Map, Plain};
use holdfast::datapath::{Datapath, Kernel, Opened, Packet, filter};
use holdfast_ebpf::abi::{self, Verdict, control, pin, probe};
use holdfast_engine::model::{
    Backend, Device, Entry, IntentProof, Mac, NameHash, Op, OpError, OpResult, PolicySlot, Protocol,
    RouteKey, Row, Selected, Token, UidHash,
};
use holdfast_tests::ground::{Ground, Intent, carry_out, refusal};
use holdfast_tests::tc::{self, Place};
use holdfast_tests::{Space, say, suite};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

suite! {
    needs [Namespaces, Object];
    what_is_right_is_proven_and_nothing_changes,
    every_tampering_is_named,
    a_foreign_program_before_ours_fails_the_proof_unless_it_is_allowed,
    a_link_that_is_not_ours_any_more_fails_the_proof,
    a_set_is_proven_before_its_selector_leads_to_it,
    a_producer_is_proven_by_its_own_device,
    a_packet_cannot_pass_for_a_probe,
    a_consumer_without_an_address_of_the_family_is_proven_to_be_refused,
    a_prefix_is_proven_where_nothing_more_specific_leads,
    the_nodes_own_addresses_are_proven_to_pass,
    a_producer_reached_as_a_neighbour_is_proven_in_the_families_of_its_addresses,
    every_member_of_a_set_is_proven,
    a_destination_of_another_policy_is_proven_as_if_it_had_passed_on,
    a_takeover_that_nobody_would_serve_is_disproved,
    the_fake_agrees_with_the_kernel;
    tc [
        what_is_right_is_proven_and_nothing_changes,
        a_foreign_program_before_ours_fails_the_proof_unless_it_is_allowed,
        a_foreign_filter_before_ours_fails_the_proof_unless_it_is_allowed,
        a_filter_that_is_not_ours_any_more_fails_the_proof,
    ]
}

/// An intent that is complete.
fn written(ground: &mut Ground, kernel: &Kernel) -> anyhow::Result<(Intent, [Space; 2])> {
    let (intent, spaces) = ground.intent(kernel)?;
    for op in intent.writes() {
        carry_out(kernel, &op)?;
    }
    Ok((intent, spaces))
}

fn open_map<K: Plain, V: Plain>(ground: &Ground, name: &str) -> anyhow::Result<Map<K, V>> {
    let path = if name == pin::REGISTRY {
        ground.pins().registry()
    } else {
        ground.pins().map(name)
    };
    Ok(Map::new(raw::obj_get(&path)?)?)
}

fn what_is_right_is_proven_and_nothing_changes() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let before = (kernel.adopt()?, kernel.stats());
        for _ in 0..3 {
            ensure!(carry_out(&kernel, &Op::ProveIntent(intent.proof()))? == 0);
            ensure!(carry_out(&kernel, &intent.set_proof())? == 0);
        }
        let after = (kernel.adopt()?, kernel.stats());
        ensure!(before.0 == after.0 && before.1.packets == after.1.packets);
        ensure!(after.1.proofs_ok == 6 && after.1.proofs_failed == 0);
        let flows = flows(ground)?;
        ensure!(flows == 0, "a probe made {flows} flows");
        let mut took = Vec::new();
        for _ in 0..300 {
            let start = Instant::now();
            carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
            took.push(start.elapsed());
        }
        took.sort_unstable();
        say(format_args!(
            "a proof of three destinations: p50 {:?}, best {:?}",
            took[took.len() / 2],
            took[0]
        ));

        // A closed row and closed entries are proven as if they were open; as things are, the packet is held.
        let closed = Row {
            token: None,
            ..intent.row
        };
        let ifindex = intent.consumer.ifindex;
        carry_out(&kernel, &Op::WriteRow { ifindex, row: closed })?;
        let mut proof = intent.proof();
        ensure!(
            refusal(&kernel, &Op::ProveIntent(proof.clone()))?
                .to_string()
                .contains("row")
        );
        proof.row = closed;
        carry_out(&kernel, &Op::ProveIntent(proof))?;
        let answer = kernel.ask(intent.consumer, &packet_to(&intent))?;
        ensure!(
            answer.verdict == Verdict::DropHeld && answer.policy == intent.slot,
            "{answer:?}"
        );
        carry_out(
            &kernel,
            &Op::WriteRow {
                ifindex,
                row: intent.row,
            },
        )?;
        let answer = kernel.ask(intent.consumer, &packet_to(&intent))?;
        ensure!(
            answer.verdict == Verdict::Delivered && answer.backend == 4,
            "{answer:?}"
        );
        Ok(())
    })
}

fn flows(ground: &Ground) -> anyhow::Result<usize> {
    let map: Map<abi::FlowKey, abi::Flow> = open_map(ground, pin::FLOWS)?;
    Ok(map.dump()?.len())
}

/// A packet to the first destination of an intent, from an address of its own.
fn packet_to(intent: &Intent) -> Packet {
    Packet {
        source: [10, 0, 0, 1].into(),
        destination: [10, 0, 0, 10].into(),
        protocol: Protocol::Udp,
        port: if intent.entries.is_empty() { 0 } else { 53 },
    }
}

fn every_tampering_is_named() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let ifindex = intent.consumer.ifindex;
        let proof = Op::ProveIntent(intent.proof());
        let maps = kernel.maps();
        let registry: Map<u32, abi::RegistryRow> = open_map(ground, pin::REGISTRY)?;
        let producer = intent.backends[&4].ifindex;

        // Each: what is changed behind our back, what the proof says then, and how it is put right.
        let mut tampered = 0;
        let mut tamper = |named: &str, change: &dyn Fn() -> anyhow::Result<()>| -> anyhow::Result<()> {
            carry_out(&kernel, &proof).context("before")?;
            let registered = [ifindex, producer].map(|ifindex| registry.lookup(&ifindex));
            change()?;
            let error = refusal(&kernel, &proof)?;
            ensure!(matches!(error, OpError::Disproved { .. }), "{error:?}");
            ensure!(error.to_string().contains(named), "{error} does not name {named}");
            for (ifindex, row) in [ifindex, producer].iter().zip(registered) {
                registry.update(ifindex, &row?.context("not registered")?)?;
            }
            for op in intent.writes() {
                carry_out(&kernel, &op)?;
            }
            tampered += 1;
            Ok(())
        };

        let row = maps.consumers.lookup(&ifindex)?.context("no row")?;
        tamper("row of device", &|| {
            Ok(maps
                .consumers
                .update(&ifindex, &abi::ConsumerRow { token: 1, ..row })?)
        })?;
        tamper("row of device", &|| {
            maps.consumers.delete(&ifindex)?;
            Ok(())
        })?;
        let entries: Vec<(abi::ServiceKey, abi::RouteEntry)> = maps.services.dump()?;
        let (key, entry) = entries
            .into_iter()
            .find(|(key, _)| key.protocol == 17 && key.family == abi::FAMILY_V4)
            .context("no entry")?;
        tamper("entry 10.0.0.10 UDP 53", &|| {
            Ok(maps
                .services
                .update(&key, &abi::RouteEntry { flags: 0, ..entry })?)
        })?;
        tamper("entry 10.0.0.10 UDP 53", &|| {
            Ok(maps
                .services
                .update(&key, &abi::RouteEntry { policy: 9, ..entry })?)
        })?;
        tamper("entry 10.0.0.10 UDP 53", &|| {
            maps.services.delete(&key)?;
            Ok(())
        })?;
        let policy = maps.policies.lookup(&intent.slot)?.context("no policy")?;
        tamper("selector of policy slot 3", &|| {
            Ok(maps.policies.update(
                &intent.slot,
                &abi::PolicySlot {
                    selector: 0,
                    ..policy
                },
            )?)
        })?;
        tamper("slot 8", &|| Ok(maps.slots.update(&8, &5)?))?;
        let backend = maps.backends.lookup(&4)?.context("no backend")?;
        tamper("backend 4", &|| {
            Ok(maps.backends.update(&4, &abi::Backend { token: 1, ..backend })?)
        })?;
        tamper("backend 4", &|| {
            let target = abi::Target {
                ifindex,
                ..abi::Target::unpack(backend.target)
            };
            let target = target.pack();
            Ok(maps.backends.update(&4, &abi::Backend { target, ..backend })?)
        })?;
        let source: abi::SourceKey = maps.sources.dump()?.first().context("no source")?.0;
        tamper("source", &|| {
            maps.sources.delete(&source)?;
            Ok(())
        })?;
        let identity = registry.lookup(&ifindex)?.context("not registered")?;
        tamper("registered token", &|| {
            Ok(registry.update(&ifindex, &abi::RegistryRow { token: 1, ..identity })?)
        })?;
        tamper("registered for another device", &|| {
            let host_mac = [2, 0, 0, 0, 0, 0xfe];
            Ok(registry.update(&ifindex, &abi::RegistryRow { host_mac, ..identity })?)
        })?;
        // Everything of the intent is as it was written, and the program alone knows better: the producer's
        // identity has changed.
        tamper("DropNoProducer", &|| {
            let row = registry.lookup(&producer)?.context("not registered")?;
            Ok(registry.update(&producer, &abi::RegistryRow { token: 1, ..row })?)
        })?;
        // The policy is served by nobody who is current any more.
        tamper("DropExpired", &|| {
            Ok(maps.policies.update(
                &intent.slot,
                &abi::PolicySlot {
                    stale_after: 1,
                    ..policy
                },
            )?)
        })?;
        ensure!(tampered == 14);
        ensure!(kernel.stats().proofs_failed == 14);
        Ok(())
    })
}

/// A program that is none of ours.
fn a_foreign_program_before_ours_fails_the_proof_unless_it_is_allowed() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let proof = Op::ProveIntent(intent.proof());
        let (program, id) = tc::program(tc::NEXT)?;
        // In the chain of tcx it is asked before all filters, too.
        let link = raw::link_create(program.as_fd(), intent.consumer.ifindex)?;
        for op in [&proof, &intent.set_proof()] {
            let error = refusal(&kernel, op)?.to_string();
            ensure!(
                error.contains(&format!("program {id} (tcx) is asked before our program")),
                "{error}"
            );
        }
        drop(kernel);
        ground.options.allow_foreign_before = true;
        let kernel = ground.open()?.kernel;
        carry_out(&kernel, &proof)?;
        drop((kernel, link));
        ground.options.allow_foreign_before = false;
        let kernel = ground.open()?.kernel;
        carry_out(&kernel, &proof)?;
        Ok(())
    })
}

fn a_foreign_filter_before_ours_fails_the_proof_unless_it_is_allowed() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let proof = Op::ProveIntent(intent.proof());
        let (program, id) = tc::program(tc::NEXT)?;
        // Behind ours it is none of our business.
        let (behind, before) = (Place::ingress(2, 1), Place::ingress(filter::PRIORITY, 1));
        ground.rtnl.filter("hfcons", behind, "later", program.as_fd())?;
        carry_out(&kernel, &proof)?;
        // The newest of a priority is the first.
        ground.rtnl.filter("hfcons", before, "before", program.as_fd())?;
        let named = format!(
            "program {id} (bpf filter \"before\", priority 1, handle 0x1) is asked before our program {}",
            kernel.program_id()
        );
        for op in [&proof, &intent.set_proof()] {
            let error = refusal(&kernel, op)?.to_string();
            ensure!(error.contains(&named) && !error.contains("later"), "{error}");
        }
        drop(kernel);
        ground.options.allow_foreign_before = true;
        carry_out(&ground.open()?.kernel, &proof)?;
        ground.options.allow_foreign_before = false;
        let kernel = ground.open()?.kernel;
        refusal(&kernel, &proof)?;
        ground.rtnl.delete_filter("hfcons", before)?;
        carry_out(&kernel, &proof)?;
        Ok(())
    })
}

fn a_filter_that_is_not_ours_any_more_fails_the_proof() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let proof = Op::ProveIntent(intent.proof());
        let attach = Op::Attach {
            device: intent.consumer,
        };
        let detached = |said: &str| {
            let error = refusal(&kernel, &proof)?;
            ensure!(
                matches!(error, OpError::Detached { .. }) && error.to_string().contains(said),
                "{error:?}"
            );
            ensure!(carry_out(&kernel, &attach)? == 1);
            carry_out(&kernel, &proof)
        };
        let ours = Place::ingress(filter::PRIORITY, filter::HANDLE);
        ground.rtnl.delete_filter("hfcons", ours)?;
        detached("has no filter of ours")?;
        ground.rtnl.delete_qdisc("hfcons")?;
        detached("has no filter of ours")?;
        // Its program was replaced, by somebody who gave it our name.
        let (program, id) = tc::program(tc::NEXT)?;
        ground
            .rtnl
            .replace_filter("hfcons", ours, "holdfast", program.as_fd())?;
        detached(&format!("holds program {id}, which is none that is pinned here"))?;
        ensure!(ground.programs("hfcons")? == [kernel.program_id()]);
        Ok(())
    })
}

fn a_link_that_is_not_ours_any_more_fails_the_proof() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let proof = Op::ProveIntent(intent.proof());
        let ifindex = intent.consumer.ifindex;
        let pin = ground.pins().link(ifindex);

        // Its program was replaced.
        let link = raw::obj_get(&pin)?;
        raw::link_update(link.as_fd(), tc::program(tc::NEXT)?.0.as_fd())?;
        drop(link);
        let error = refusal(&kernel, &proof)?;
        ensure!(matches!(error, OpError::Detached { .. }), "{error:?}");
        ensure!(
            error.to_string().contains("which is none that is pinned here"),
            "{error}"
        );
        ensure!(
            carry_out(
                &kernel,
                &Op::Attach {
                    device: intent.consumer
                }
            )? == 1
        );
        carry_out(&kernel, &proof)?;

        // Its pin was moved away: the program is in the chain, and nobody here holds it.
        let aside = ground.pins().map("aside");
        std::fs::rename(&pin, &aside)?;
        let error = refusal(&kernel, &proof)?;
        ensure!(matches!(error, OpError::Detached { .. }), "{error:?}");
        ensure!(error.to_string().contains("no link is pinned"), "{error}");
        let error = refusal(
            &kernel,
            &Op::Attach {
                device: intent.consumer,
            },
        )?
        .to_string();
        ensure!(error.contains("by a link that is not pinned here"), "{error}");
        std::fs::rename(&aside, &pin)?;
        carry_out(&kernel, &proof)?;

        // Its device is another one, or none.
        let mut other = intent.proof();
        other.device.mac = Mac([2, 0, 0, 0, 0, 0xfe]);
        ensure!(refusal(&kernel, &Op::ProveIntent(other))? == OpError::NoDevice);
        ground.rtnl.delete("hfcons")?;
        ensure!(refusal(&kernel, &proof)? == OpError::NoDevice);
        Ok(())
    })
}

fn a_set_is_proven_before_its_selector_leads_to_it() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in &intent.writes()[..2] {
            carry_out(&kernel, op)?;
        }
        // The policy is there, and selects nothing yet.
        let value = Some(PolicySlot {
            selected: Selected::default(),
            last_set_generation: 4,
            ..intent.policy.clone()
        });
        carry_out(
            &kernel,
            &Op::WritePolicy {
                slot: intent.slot,
                value,
            },
        )?;
        carry_out(&kernel, &intent.set_proof())?;

        let tampered = |op: &Op, named: &str| -> anyhow::Result<()> {
            carry_out(&kernel, op)?;
            let error = refusal(&kernel, &intent.set_proof())?.to_string();
            ensure!(error.contains(named), "{error} does not name {named}");
            for op in &intent.writes()[..2] {
                carry_out(&kernel, op)?;
            }
            carry_out(&kernel, &intent.set_proof())?;
            Ok(())
        };
        tampered(
            &Op::WriteSlots {
                base: 8,
                slots: vec![6],
            },
            "slot 8",
        )?;
        tampered(
            &Op::WriteBackends {
                backends: BTreeMap::from([(4, None)]),
            },
            "backend 4",
        )?;
        let mut wrong = intent.set_proof();
        if let Op::ProveSet { slots, .. } = &mut wrong {
            slots.push(4);
        }
        ensure!(matches!(refusal(&kernel, &wrong)?, OpError::Disproved { .. }));
        // The producer is another incarnation by now.
        ground.register("hfprod")?;
        let error = refusal(&kernel, &intent.set_proof())?.to_string();
        ensure!(error.contains("DropNoProducer"), "{error}");
        Ok(())
    })
}

fn a_producer_is_proven_by_its_own_device() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let mut by_itself = intent.set_proof();
        if let Op::ProveSet { device, .. } = &mut by_itself {
            *device = ground.device("hfprod")?;
        }
        carry_out(&kernel, &by_itself)?;
        Ok(())
    })
}

fn a_packet_cannot_pass_for_a_probe() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = written(ground, &kernel)?;
        let words: Map<u32, u64> = open_map(ground, pin::CONTROL)?;
        let nonce = words.lookup(&control::NONCE)?.unwrap_or_default();
        ensure!(nonce != 0);
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00];
        frame.extend([
            0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 10,
        ]);
        frame.extend([0xc0, 0, 0, 53, 0, 8, 0, 0]);
        let program = raw::obj_get(&ground.pins().program(kernel.program_id()))?;
        let run = |mark, low, high| -> anyhow::Result<u64> {
            let before = kernel.stats().packets[Verdict::Delivered as usize];
            let context = raw::SkbContext::new(mark, intent.consumer.ifindex, [0, 0, 0, low, high]);
            raw::test_run(program.as_fd(), &frame, &context, 1)?;
            Ok(kernel.stats().packets[Verdict::Delivered as usize] - before)
        };
        let (low, high) = (nonce as u32, (nonce >> 32) as u32);
        // A probe is not counted; all others are packets.
        ensure!(run(probe::MARK, low, high)? == 0);
        for (mark, low, high) in [
            (0, low, high),
            (1, low, high),
            (probe::MARK, low ^ 1, high),
            (probe::MARK, 0, 0),
        ] {
            ensure!(run(mark, low, high)? == 1, "{mark:x} {low:x} {high:x}");
        }
        // Another life has another nonce.
        drop(kernel);
        let _later = ground.open()?;
        ensure!(words.lookup(&control::NONCE)? != Some(nonce));
        Ok(())
    })
}

fn a_consumer_without_an_address_of_the_family_is_proven_to_be_refused() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (mut intent, _spaces) = ground.intent(&kernel)?;
        intent.sources.retain(IpAddr::is_ipv4);
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        let from = |source: &str| -> anyhow::Result<Verdict> {
            let packet = Packet {
                source: source.parse()?,
                destination: "fd00::a".parse()?,
                protocol: Protocol::Udp,
                port: 53,
            };
            Ok(kernel.ask(intent.consumer, &packet)?.verdict)
        };
        ensure!(from("fd00::1")? == Verdict::DropSpoofed);
        // Addresses that are not known are not checked.
        intent.sources.clear();
        intent.row.has_sources = false;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        ensure!(from("fd00::1")? == Verdict::Delivered);
        Ok(())
    })
}

fn route(text: &str) -> anyhow::Result<RouteKey> {
    let (address, length) = text.split_once('/').context("no length")?;
    Ok(RouteKey::Prefix {
        address: address.parse()?,
        length: length.parse()?,
    })
}

/// An intent about prefixes beside its services.
fn with_prefixes(
    ground: &mut Ground,
    kernel: &Kernel,
    prefixes: &[&str],
) -> anyhow::Result<(Intent, [Space; 2])> {
    let (mut intent, spaces) = ground.intent(kernel)?;
    let entry = Entry {
        policy: intent.slot,
        open: true,
    };
    for text in prefixes {
        intent.entries.insert(route(text)?, entry);
    }
    intent.row.has_prefixes_v4 = true;
    intent.row.has_prefixes_v6 = true;
    for op in intent.writes() {
        carry_out(kernel, &op)?;
    }
    Ok((intent, spaces))
}

/// What becomes of a packet of the intent's consumer as things are.
fn judged(kernel: &Kernel, intent: &Intent, destination: &str) -> anyhow::Result<(Verdict, u32)> {
    let destination: IpAddr = destination.parse()?;
    let own = intent
        .sources
        .iter()
        .find(|source| source.is_ipv4() == destination.is_ipv4());
    let packet = Packet {
        source: *own.context("no source")?,
        destination,
        protocol: Protocol::Udp,
        port: 4711,
    };
    let answer = kernel.ask(intent.consumer, &packet)?;
    Ok((answer.verdict, answer.policy))
}

fn a_prefix_is_proven_where_nothing_more_specific_leads() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let networks = [
            "0.0.0.0/0",
            "10.96.0.0/16",
            "10.96.0.0/32",
            "::/0",
            "fd00:96::/64",
        ];
        let (intent, _spaces) = with_prefixes(ground, &kernel, &networks)?;
        let ifindex = intent.consumer.ifindex;
        let proof = Op::ProveIntent(intent.proof());
        carry_out(&kernel, &proof)?;
        let delivered = (Verdict::Delivered, intent.slot);
        for destination in ["192.0.2.9", "10.96.0.9", "10.96.0.0", "2001:db8::9", "fd00:96::9"] {
            let judged = judged(&kernel, &intent, destination)?;
            ensure!(judged == delivered, "{destination}: {judged:?}");
        }

        // Another policy's entries take their part, be they open or not, and be there a service at the first address.
        let other = Entry {
            policy: 9,
            open: false,
        };
        let service = RouteKey::Service {
            address: "1.0.0.0".parse()?,
            protocol: Protocol::Udp,
            port: 20_000,
        };
        let mut entries = BTreeMap::from([(service, other)]);
        for text in ["10.96.0.1/32", "10.96.0.2/31", "10.96.0.4/30", "fd00:96::/65"] {
            entries.insert(route(text)?, other);
        }
        carry_out(&kernel, &Op::WriteEntries { ifindex, entries })?;
        ensure!(judged(&kernel, &intent, "10.96.0.5")? == (Verdict::DropHeld, 9));
        ensure!(judged(&kernel, &intent, "10.96.0.9")? == delivered);
        carry_out(&kernel, &proof)?;
        // Of what is covered as a whole there is nothing to ask, and it is as it was written.
        let halves = BTreeMap::from([
            (route("fd00:96:0:0:8000::/65")?, other),
            (route("0.0.0.0/1")?, other),
            (route("128.0.0.0/1")?, other),
        ]);
        carry_out(
            &kernel,
            &Op::WriteEntries {
                ifindex,
                entries: halves,
            },
        )?;
        carry_out(&kernel, &proof)?;

        // What is missing is named, though a shorter one would answer; so is what is another's.
        let maps = kernel.maps();
        let (key, entry) = maps
            .prefixes
            .dump()?
            .into_iter()
            .find(|(_, entry)| entry.length == 16)
            .context("no entry")?;
        maps.prefixes.delete(&key)?;
        let error = refusal(&kernel, &proof)?.to_string();
        ensure!(
            error.contains("entry 10.96.0.0/16") && error.contains("none"),
            "{error}"
        );
        maps.prefixes
            .update(&key, &abi::PrefixEntry { policy: 9, ..entry })?;
        let error = refusal(&kernel, &proof)?.to_string();
        ensure!(error.contains("entry 10.96.0.0/16"), "{error}");
        maps.prefixes.update(&key, &entry)?;
        carry_out(&kernel, &proof)?;
        // The row knows of none: the entries are there, and no packet is looked up among them.
        let row = Row {
            has_prefixes_v4: false,
            ..intent.row
        };
        carry_out(&kernel, &Op::WriteRow { ifindex, row })?;
        let blind = Op::ProveIntent(IntentProof {
            row,
            ..intent.proof()
        });
        let error = refusal(&kernel, &blind)?.to_string();
        ensure!(error.contains("answers") && error.contains("Pass"), "{error}");
        Ok(())
    })
}

fn the_nodes_own_addresses_are_proven_to_pass() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, _spaces) = with_prefixes(ground, &kernel, &["0.0.0.0/0", "::/0", "10.96.0.0/31"])?;
        let proof = Op::ProveIntent(intent.proof());
        let own = ["1.0.0.0", "10.96.0.0", "10.96.0.1", "fd00::5"];
        let delivered = (Verdict::Delivered, intent.slot);
        let each = |wanted: (Verdict, u32)| -> anyhow::Result<()> {
            for address in own {
                let judged = judged(&kernel, &intent, address)?;
                ensure!(judged == wanted, "{address}: {judged:?}");
            }
            Ok(())
        };
        each(delivered)?;
        let add: BTreeSet<IpAddr> = own.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        let none = BTreeSet::new();
        carry_out(
            &kernel,
            &Op::WriteLocals {
                add: add.clone(),
                delete: none.clone(),
            },
        )?;
        each((Verdict::Pass, 0))?;
        carry_out(&kernel, &proof)?;

        // One that is written and that the program does not know: the proof of a prefix that has it in it fails.
        let maps = kernel.maps();
        let (key, check) = maps
            .locals
            .dump()?
            .into_iter()
            .find(|(key, _)| key.family == abi::FAMILY_V6)
            .context("no address")?;
        maps.locals.delete(&key)?;
        let error = refusal(&kernel, &proof)?.to_string();
        ensure!(
            error.contains("fd00::5") && error.contains("node's own"),
            "{error}"
        );
        maps.locals.update(&key, &check)?;
        carry_out(&kernel, &proof)?;
        let (add, delete) = (none, add);
        carry_out(&kernel, &Op::WriteLocals { add, delete })?;
        each(delivered)?;
        carry_out(&kernel, &proof)?;
        Ok(())
    })
}

fn a_producer_reached_as_a_neighbour_is_proven_in_the_families_of_its_addresses() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (mut intent, _spaces) = ground.intent(&kernel)?;
        intent.row.via = Some(intent.consumer.ifindex);
        let producer = intent.backends[&4].clone();
        let via = Some(producer.ifindex);
        let both = intent.entries.clone();
        let of = |v4: bool| {
            let of_family = both.iter().filter(|(key, _)| key.address().is_ipv4() == v4);
            of_family
                .map(|(key, entry)| (*key, *entry))
                .collect::<BTreeMap<_, _>>()
        };
        // With an address of a family it is given that family's packets; the other's are nobody's.
        for (v4, v6) in [(true, true), (true, false), (false, true)] {
            intent.backends = BTreeMap::from([(
                4,
                Backend {
                    via,
                    address_v4: producer.address_v4.filter(|_| v4),
                    address_v6: producer.address_v6.filter(|_| v6),
                    ..producer.clone()
                },
            )]);
            intent.entries = both.clone();
            for op in intent.writes() {
                carry_out(&kernel, &op)?;
            }
            carry_out(&kernel, &intent.set_proof())?;
            for (family, has) in [(true, v4), (false, v6)] {
                intent.entries = of(family);
                let proof = Op::ProveIntent(intent.proof());
                if has {
                    carry_out(&kernel, &proof)?;
                } else {
                    let error = refusal(&kernel, &proof)?.to_string();
                    ensure!(error.contains("DropNoProducer"), "{error}");
                }
            }
        }
        // Without any address it is never proven, though it is as it was written.
        intent.backends = BTreeMap::from([(
            4,
            Backend {
                via,
                address_v4: None,
                address_v6: None,
                ..producer.clone()
            },
        )]);
        carry_out(&kernel, &intent.writes()[0])?;
        let error = refusal(&kernel, &intent.set_proof())?.to_string();
        ensure!(error.contains("has no address"), "{error}");

        // Another device is another way.
        intent.backends = BTreeMap::from([(4, Backend { via, ..producer })]);
        carry_out(&kernel, &intent.writes()[0])?;
        carry_out(&kernel, &intent.set_proof())?;
        let maps = kernel.maps();
        let raw = maps.backends.lookup(&4)?.context("no backend")?;
        for tampered in [
            abi::Backend { device: 77, ..raw },
            abi::Backend {
                target: abi::Target {
                    kind: abi::Target::PEER,
                    ..abi::Target::unpack(raw.target)
                }
                .pack(),
                ..raw
            },
        ] {
            maps.backends.update(&4, &tampered)?;
            let error = refusal(&kernel, &intent.set_proof())?.to_string();
            ensure!(error.contains("backend 4"), "{error}");
            maps.backends.update(&4, &raw)?;
        }
        carry_out(&kernel, &intent.set_proof())?;
        Ok(())
    })
}

fn every_member_of_a_set_is_proven() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (mut intent, _spaces) = ground.intent(&kernel)?;
        let (second, _space) = ground.veth("hfprod2")?;
        let token = ground.register("hfprod2")?.token;
        // One by its peer, one as a neighbour.
        let first = intent.backends[&4].clone();
        let neighbour = Backend {
            ifindex: second.ifindex,
            token,
            via: Some(second.ifindex),
            ..first
        };
        intent.backends.insert(5, neighbour);
        intent.slots = vec![4, 5, 5, 4, 5];
        intent.policy.selected.length = 5;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        carry_out(&kernel, &intent.set_proof())?;
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        // The consumer itself is a member of sets that serve others, and never serves itself: whatever slot its packet
        // falls on.
        let itself = Backend {
            ifindex: intent.consumer.ifindex,
            token: intent.token,
            via: None,
            ..intent.backends[&4].clone()
        };
        let others = (intent.backends.clone(), intent.slots.clone());
        intent.backends = BTreeMap::from([(4, others.0[&4].clone()), (6, itself)]);
        intent.slots = vec![6, 6, 4, 6, 6];
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        carry_out(&kernel, &intent.set_proof())?;
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        for port in 1..200 {
            let packet = Packet {
                port,
                ..packet_to(&intent)
            };
            let answer = kernel.ask(intent.consumer, &packet)?;
            let expected = if port == 53 {
                Verdict::Delivered
            } else {
                Verdict::Pass
            };
            ensure!(
                answer.verdict == expected && answer.target != intent.consumer.ifindex,
                "{answer:?}"
            );
        }
        (intent.backends, intent.slots) = others;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }

        // Each of them is asked for: that one is gone is found wherever its slots are.
        ground.register("hfprod2")?;
        let error = refusal(&kernel, &intent.set_proof())?.to_string();
        ensure!(
            error.contains("backend 5") && error.contains("DropNoProducer"),
            "{error}"
        );
        Ok(())
    })
}

/// The policy slot that destinations pass on from.
const OLDER: u32 = 2;

/// An intent whose destinations are another policy's still, and what is to be proven before they pass on to it.
fn passing_on(ground: &mut Ground, kernel: &Kernel) -> anyhow::Result<(Intent, IntentProof, [Space; 2])> {
    let (mut intent, spaces) = ground.intent(kernel)?;
    for entry in intent.entries.values_mut() {
        entry.policy = OLDER;
    }
    for op in intent.writes() {
        carry_out(kernel, &op)?;
    }
    let value = Some(PolicySlot {
        uid: UidHash([8; 16]),
        selected: Selected::default(),
        ..intent.policy.clone()
    });
    carry_out(kernel, &Op::WritePolicy { slot: OLDER, value })?;
    let proof = IntentProof {
        entries: BTreeMap::new(),
        takeovers: intent.entries.keys().map(|key| (*key, intent.slot)).collect(),
        ..intent.proof()
    };
    Ok((intent, proof, spaces))
}

fn a_destination_of_another_policy_is_proven_as_if_it_had_passed_on() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (mut intent, mut proof, _spaces) = passing_on(ground, &kernel)?;
        let before = (kernel.adopt()?, kernel.stats());
        carry_out(&kernel, &Op::ProveIntent(proof.clone()))?;
        let after = (kernel.adopt()?, kernel.stats());
        ensure!(before.0 == after.0 && before.1.packets == after.1.packets);
        let flows = flows(ground)?;
        ensure!(flows == 0, "a probe made {flows} flows");
        let answer = kernel.ask(intent.consumer, &packet_to(&intent))?;
        ensure!(
            answer.policy == OLDER && answer.verdict == Verdict::DropNoProducer,
            "{answer:?}"
        );

        // Where packets are that are never captured makes no difference: the route is not looked up.
        let slot = intent.slot;
        for prefix in ["0.0.0.0/0", "169.254.0.0/15", "::/0"] {
            proof.takeovers.insert(route(prefix)?, slot);
        }
        carry_out(&kernel, &Op::ProveIntent(proof.clone()))?;

        // The consumer may be a member, and one that serves is enough.
        let itself = Backend {
            ifindex: intent.consumer.ifindex,
            token: intent.token,
            ..intent.backends[&4].clone()
        };
        intent.backends.insert(6, itself);
        intent.slots = vec![6, 6, 4, 6];
        intent.policy.selected.length = 4;
        for op in &intent.writes()[..3] {
            carry_out(&kernel, op)?;
        }
        proof.selected = intent.policy.selected;
        proof.backends = intent.backends.clone();
        carry_out(&kernel, &Op::ProveIntent(proof.clone()))?;

        // Some are there already.
        let (key, entry) = intent.entries.first_entry().context("no entry")?.remove_entry();
        let entry = Entry {
            policy: slot,
            ..entry
        };
        let ifindex = intent.consumer.ifindex;
        let entries = BTreeMap::from([(key, entry)]);
        carry_out(
            &kernel,
            &Op::WriteEntries {
                ifindex,
                entries: entries.clone(),
            },
        )?;
        proof.takeovers.remove(&key);
        proof.entries = entries;
        carry_out(&kernel, &Op::ProveIntent(proof))?;
        Ok(())
    })
}

fn a_takeover_that_nobody_would_serve_is_disproved() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (intent, proof, _spaces) = passing_on(ground, &kernel)?;
        let disproved = |proof: &IntentProof, named: &str| -> anyhow::Result<()> {
            let error = refusal(&kernel, &Op::ProveIntent(proof.clone()))?;
            ensure!(matches!(error, OpError::Disproved { .. }), "{error:?}");
            ensure!(error.to_string().contains(named), "{error} does not name {named}");
            Ok(())
        };
        let restore = || -> anyhow::Result<()> {
            for op in &intent.writes()[..3] {
                carry_out(&kernel, op)?;
            }
            carry_out(&kernel, &Op::ProveIntent(proof.clone()))?;
            Ok(())
        };
        restore()?;

        // The selector of the slot is another, or the slot is.
        let selected = Selected {
            generation: 6,
            ..intent.policy.selected
        };
        let value = Some(PolicySlot {
            selected,
            ..intent.policy.clone()
        });
        let slot = intent.slot;
        carry_out(&kernel, &Op::WritePolicy { slot, value })?;
        disproved(&proof, "selector of policy slot 3")?;
        // All is as it is said, and the member is none of this generation.
        disproved(
            &IntentProof {
                selected,
                ..proof.clone()
            },
            "delivers to none",
        )?;
        restore()?;
        let takeovers = proof.takeovers.keys().map(|key| (*key, OLDER)).collect();
        disproved(
            &IntentProof {
                takeovers,
                ..proof.clone()
            },
            "selector of policy slot 2",
        )?;

        // The member is another policy's, is the consumer itself, or takes packets of the other family alone.
        let member = &intent.backends[&4];
        let wrong = [
            Backend {
                policy: OLDER,
                ..member.clone()
            },
            Backend {
                ifindex: intent.consumer.ifindex,
                token: intent.token,
                ..member.clone()
            },
            Backend {
                via: Some(member.ifindex),
                address_v6: None,
                ..member.clone()
            },
        ];
        for member in wrong {
            let backends = BTreeMap::from([(4, Some(member.clone()))]);
            carry_out(&kernel, &Op::WriteBackends { backends })?;
            disproved(&proof, "backend 4")?;
            let backends = BTreeMap::from([(4, member)]);
            disproved(
                &IntentProof {
                    backends,
                    ..proof.clone()
                },
                "delivers to none",
            )?;
            restore()?;
        }

        // Everything is as it was written, and the program alone knows better.
        ground.register("hfprod")?;
        disproved(&proof, "10.0.0.10")?;
        Ok(())
    })
}

// --- the fake ----------------------------------------------------------------------------------------------

/// Random choices, repeatable by their seed.
struct Dice(ChaCha8Rng);

impl Dice {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0.next_u32() % sides
    }

    fn once_in(&mut self, times: u32) -> bool {
        self.roll(times) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u32) as usize]
    }
}

/// A node with few devices, on which random things happen to the kernel and to the fake alike.
struct Script<'a> {
    ground: &'a Ground,
    kernel: &'a Kernel,
    fake: Fake,
    dice: Dice,
    devices: Vec<(String, Device)>,
    tokens: BTreeSet<Token>,
}

const SERVICES: [(&str, Protocol, u16); 4] = [
    ("10.96.0.1", Protocol::Udp, 53),
    ("10.96.0.1", Protocol::Tcp, 53),
    ("10.96.0.2", Protocol::Udp, 53),
    ("fd00:96::1", Protocol::Udp, 53),
];
const PREFIXES: [&str; 6] = [
    "10.96.0.0/16",
    "10.96.0.1/32",
    "10.96.0.0/30",
    "0.0.0.0/0",
    "fd00:96::/64",
    "::/0",
];
/// Where packets go: to services and beside them.
const DESTINATIONS: [&str; 7] = [
    "10.96.0.1",
    "10.96.0.2",
    "10.96.0.9",
    "192.0.2.9",
    "fd00:96::1",
    "fd00:96::9",
    "2001:db8::9",
];
const SOURCES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"];

impl Script<'_> {
    fn service(&mut self) -> RouteKey {
        let (address, protocol, port) = self.dice.pick(&SERVICES);
        RouteKey::Service {
            address: address.parse().unwrap_or(IpAddr::from([0; 4])),
            protocol,
            port,
        }
    }

    fn route(&mut self) -> RouteKey {
        if self.dice.once_in(2) {
            return self.service();
        }
        let text = self.dice.pick(&PREFIXES);
        route(text).unwrap_or(RouteKey::Prefix {
            address: IpAddr::from([0; 4]),
            length: 0,
        })
    }

    fn destination(&mut self) -> IpAddr {
        self.dice
            .pick(&DESTINATIONS)
            .parse()
            .unwrap_or(IpAddr::from([0; 4]))
    }

    /// Mostly none: straight to the peer.
    fn via(&mut self) -> Option<u32> {
        self.dice.once_in(3).then(|| self.device().ifindex)
    }

    fn source(&mut self) -> IpAddr {
        self.dice.pick(&SOURCES).parse().unwrap_or(IpAddr::from([0; 4]))
    }

    fn device(&mut self) -> Device {
        let index = self.dice.roll(self.devices.len() as u32);
        self.devices[index as usize].1
    }

    /// Mostly the one that is registered.
    fn token_of(&mut self, device: Device) -> Token {
        match self.registered(device) {
            Some(token) if !self.dice.once_in(5) => token,
            _ => self.token(),
        }
    }

    fn token(&mut self) -> Token {
        let tokens: Vec<Token> = self.tokens.iter().copied().collect();
        self.dice.pick(&tokens)
    }

    fn selected(&mut self) -> Selected {
        Selected {
            base: self.dice.roll(2),
            length: if self.dice.once_in(6) {
                0
            } else {
                1 + self.dice.roll(3) as u16
            },
            generation: self.dice.roll(2),
        }
    }

    /// Mostly the one, so that what is written by chance belongs together often enough.
    fn policy(&mut self) -> u32 {
        u32::from(self.dice.once_in(5))
    }

    fn entry(&mut self) -> Entry {
        Entry {
            policy: self.policy(),
            open: !self.dice.once_in(4),
        }
    }

    fn backend(&mut self) -> Backend {
        let device = self.device();
        Backend {
            policy: self.policy(),
            ifindex: device.ifindex,
            token: self.token_of(device),
            mac: Mac::default(),
            address_v4: self.dice.once_in(2).then(|| IpAddr::from([10, 0, 0, 9])),
            address_v6: self
                .dice
                .once_in(2)
                .then(|| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9])),
            via: self.via(),
            last_generation: self.dice.roll(3),
            drain_until: None,
        }
    }

    fn op(&mut self) -> Op {
        let device = self.device();
        let ifindex = device.ifindex;
        match self.dice.roll(26) {
            0 => Op::Attach { device },
            1 if self.dice.once_in(4) => Op::Detach { ifindex },
            2 if self.dice.once_in(3) => Op::ClearInterface { ifindex },
            3..=5 => Op::WriteRow {
                ifindex,
                row: Row {
                    token: if self.dice.once_in(5) {
                        None
                    } else {
                        Some(self.token_of(device))
                    },
                    epoch: self.dice.roll(3),
                    has_services: !self.dice.once_in(6),
                    has_prefixes_v4: !self.dice.once_in(4),
                    has_prefixes_v6: !self.dice.once_in(4),
                    via: self.via(),
                    has_sources: self.dice.once_in(2),
                },
            },
            7 | 8 => Op::WriteSources {
                ifindex,
                add: (0..self.dice.roll(3)).map(|_| self.source()).collect(),
                delete: (0..self.dice.roll(2)).map(|_| self.source()).collect(),
            },
            9..=12 => Op::WriteEntries {
                ifindex,
                entries: (0..self.dice.roll(4))
                    .map(|_| (self.route(), self.entry()))
                    .collect(),
            },
            13 => Op::DeleteEntries {
                ifindex,
                keys: (0..self.dice.roll(3)).map(|_| self.route()).collect(),
            },
            14..=16 => Op::WriteBackends {
                backends: (0..1 + self.dice.roll(2))
                    .map(|_| {
                        let backend = if self.dice.once_in(8) {
                            None
                        } else {
                            Some(self.backend())
                        };
                        (1 + self.dice.roll(2), backend)
                    })
                    .collect(),
            },
            17 | 18 => Op::WriteSlots {
                base: self.dice.roll(2),
                slots: (0..1 + self.dice.roll(3)).map(|_| self.dice.roll(3)).collect(),
            },
            19..=21 => Op::WritePolicy {
                slot: self.policy(),
                value: if self.dice.once_in(10) {
                    None
                } else {
                    Some(PolicySlot {
                        name: NameHash(u64::from(1 + self.dice.roll(3))),
                        uid: UidHash([1; 16]),
                        selected: self.selected(),
                        pass_while_held: self.dice.once_in(3),
                        served_generation: 1,
                        served_since_ms: 1,
                        waiting_since: None,
                        last_set_generation: 3,
                    })
                },
            },
            22 if self.dice.once_in(2) => Op::WriteLocals {
                add: (0..self.dice.roll(2)).map(|_| self.destination()).collect(),
                delete: (0..self.dice.roll(4)).map(|_| self.destination()).collect(),
            },
            23 => Op::DeleteIdentity {
                ifindex,
                token: self.token(),
            },
            _ => self.proof(),
        }
    }

    /// A proof of what is there, mostly; sometimes of something else.
    fn proof(&mut self) -> Op {
        let device = self.device();
        let adoption = self.fake.adopt().unwrap_or_default();
        let policy = self.dice.roll(2);
        let selected = adoption
            .policies
            .get(&policy)
            .map_or_else(Selected::default, |slot| slot.selected);
        let there = adoption.entries.get(&device.ifindex).cloned().unwrap_or_default();
        let (entries, others): (BTreeMap<RouteKey, Entry>, BTreeMap<_, _>) =
            there.into_iter().partition(|(_, entry)| entry.policy == policy);
        let takeovers = if self.dice.once_in(2) {
            others.into_keys().map(|key| (key, policy)).collect()
        } else {
            BTreeMap::new()
        };
        let slots: Vec<u32> = adoption.slots.get(&selected.base).cloned().unwrap_or_default();
        let backends: BTreeMap<u32, Backend> = slots
            .iter()
            .filter_map(|id| Some((*id, adoption.backends.get(id)?.clone())))
            .collect();
        if self.dice.once_in(2) {
            return Op::ProveSet {
                policy,
                device,
                selected,
                backends,
                slots: if selected.length == 0 { Vec::new() } else { slots },
            };
        }
        let row = adoption.rows.get(&device.ifindex).copied().unwrap_or(Row {
            token: None,
            epoch: 0,
            has_services: true,
            has_prefixes_v4: false,
            has_prefixes_v6: false,
            via: None,
            has_sources: false,
        });
        let token = self.registered(device).unwrap_or_else(|| self.token());
        Op::ProveIntent(IntentProof {
            device,
            row,
            token,
            sources: adoption.sources.get(&device.ifindex).cloned().unwrap_or_default(),
            entries,
            takeovers,
            selected: if self.dice.once_in(10) {
                self.selected()
            } else {
                selected
            },
            backends: if selected.length == 0 {
                BTreeMap::new()
            } else {
                backends
            },
        })
    }

    fn registered(&self, device: Device) -> Option<Token> {
        let read = self.fake.read_registry(&BTreeSet::from([device.ifindex]));
        match read.first() {
            Some((_, holdfast_engine::model::RegistryRead::Row(identity))) => Some(identity.token),
            _ => None,
        }
    }

    fn register(&mut self) -> anyhow::Result<()> {
        let index = self.dice.roll(self.devices.len() as u32) as usize;
        let (name, device) = self.devices[index].clone();
        let token = self.ground.register(&name)?.token;
        let identity = self
            .ground
            .registry()?
            .read(device.ifindex)?
            .context("not registered")?;
        self.fake.register(device.ifindex, identity);
        self.tokens.insert(token);
        Ok(())
    }

    fn step(&mut self) -> anyhow::Result<()> {
        if self.dice.once_in(60) {
            return self.register();
        }
        let op = self.op();
        let (real, fake) = (self.kernel.carry_out(&op), self.fake.carry_out(&op));
        ensure!(
            alike(&real, &fake),
            "{op:?}: the kernel says {real:?}, the fake {fake:?}"
        );

        for _ in 0..4 {
            self.ask()?;
        }
        Ok(())
    }

    /// Asks both about one packet.
    fn ask(&mut self) -> anyhow::Result<()> {
        let device = self.device();
        let destination = self.destination();
        let source = self.source();
        if source.is_ipv4() != destination.is_ipv4() {
            return Ok(());
        }
        let packet = Packet {
            source,
            destination,
            protocol: self.dice.pick(&[Protocol::Udp, Protocol::Udp, Protocol::Tcp]),
            port: self.dice.pick(&[53, 53, 80]),
        };
        let attached = self.fake.adopt()?.attached.contains(&device.ifindex);
        if attached {
            let real = self.kernel.ask(device, &packet)?;
            let fake = self.fake.request(device.ifindex, &packet);
            ensure!(
                real == fake,
                "{packet:?} at {device:?}: the kernel says {real:?}, the fake {fake:?}"
            );
        }
        Ok(())
    }
}

/// Whether two answers are the same but for their words.
fn alike(one: &OpResult, other: &OpResult) -> bool {
    match (one, other) {
        (Err(OpError::Disproved { .. }), Err(OpError::Disproved { .. }))
        | (Err(OpError::Detached { .. }), Err(OpError::Detached { .. }))
        | (Err(OpError::Refused { .. }), Err(OpError::Refused { .. })) => true,
        (one, other) => one == other,
    }
}

fn the_fake_agrees_with_the_kernel() -> anyhow::Result<()> {
    const STEPS: u32 = 6_000;
    Ground::run(|ground| {
        ground.options.sizes.services = 12;
        ground.options.sizes.prefixes = 6;
        let Opened { kernel, .. } = ground.open()?;
        let mut devices = Vec::new();
        let mut spaces = Vec::new();
        for name in ["hfa", "hfb", "hfc"] {
            let (device, space) = ground.veth(name)?;
            devices.push((name.to_owned(), device));
            spaces.push(space);
        }
        let seed = std::env::var("HOLDFAST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(|| {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                now.map_or(0, |now| now.as_nanos() as u64)
            });
        say(format_args!("HOLDFAST_SEED={seed}"));
        let fake = Fake::new(ground.options.sizes);
        for (_, device) in &devices {
            fake.add_device(*device);
        }
        let mut script = Script {
            ground,
            kernel: &kernel,
            fake,
            dice: Dice(ChaCha8Rng::seed_from_u64(seed)),
            devices,
            tokens: Token::new(77).into_iter().collect(),
        };
        let mut verdicts = BTreeMap::new();
        for step in 0..STEPS {
            script.step().with_context(|| format!("step {step}"))?;
            if step % 100 == 0 {
                ensure!(kernel.adopt()? == script.fake.adopt()?, "step {step}");
            }
        }
        for (verdict, count) in Verdict::ALL.iter().zip(script.fake.stats().packets) {
            if count > 0 {
                verdicts.insert(format!("{verdict:?}"), count);
            }
        }
        say(format_args!("{verdicts:?}"));
        let wanted = [
            "Pass",
            "Delivered",
            "PassedHeld",
            "DropHeld",
            "DropNoProducer",
            "DropSpoofed",
        ];
        for verdict in wanted {
            ensure!(
                verdicts.contains_key(verdict),
                "never {verdict}: the script is too tame"
            );
        }
        let stats = kernel.stats();
        ensure!(stats.proofs_ok > 0 && stats.proofs_failed > 0, "{stats:?}");
        Ok(())
    })
}
