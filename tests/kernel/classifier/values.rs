//! The maps themselves: their layout, and values that move under replacement.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use anyhow::{Context, ensure};
use holdfast::datapath::raw::{self, MapShape};
use holdfast_ebpf::abi::{
    ConsumerRow, Flow, MAPS, MapLayout, PrefixEntry, PrefixKey, RegistryRow, RouteEntry, ServiceKey, Verdict,
    control, pin,
};
use holdfast_tests::say;
use holdfast_tests::space::ROOT;

use crate::frame::{SYN, Transport};
use crate::plane::{
    CONSUMER_TOKEN, FLOWS, POLICY, PORT, Plain, SERVICE_V4, bare, is, program, request, served,
};

/// What the verifier may need of its million; beyond half of it, another kernel's verifier may refuse.
const VERIFIER_LIMIT: u32 = 500_000;

pub(crate) fn the_object_is_what_the_layout_says() -> anyhow::Result<()> {
    bare(|plane| {
        for layout in MAPS {
            let map = plane
                .ebpf
                .map(layout.name)
                .with_context(|| format!("there is no map {}", layout.name))?;
            // aya keeps the descriptor to itself, but pins.
            let path = Path::new(ROOT).join("bpf").join(layout.name);
            map.pin(&path)?;
            let shape = raw::map_info(raw::obj_get(&path)?.as_fd())?.shape;
            let expected = MapShape {
                map_type: layout.kind,
                key_size: layout.key,
                value_size: layout.value,
                max_entries: if layout.name == pin::FLOWS {
                    FLOWS
                } else {
                    layout.entries
                },
                flags: layout.flags,
            };
            ensure!(
                shape == expected,
                "{}: {shape:?} instead of {expected:?}",
                layout.name
            );
        }
        let unknown: Vec<_> = plane
            .ebpf
            .maps()
            .map(|(name, _)| name.to_owned())
            .filter(|name| MapLayout::of(name).is_none() && !name.starts_with(".rodata"))
            .collect();
        ensure!(
            unknown.is_empty(),
            "maps that the layout does not know: {unknown:?}"
        );
        let info = program(&mut plane.ebpf)?.info()?;
        let verified = info
            .verified_instruction_count()
            .context("the kernel does not say")?;
        say(format!(
            "the verifier went through {verified} instructions, {} bytes translated",
            info.size_translated().unwrap_or_default()
        ));
        ensure!(verified < VERIFIER_LIMIT);
        ensure!(info.gpl_compatible() == Some(true) && info.btf_id().is_some());
        Ok(())
    })
}

pub(crate) fn values_that_prove_another_key_are_misses() -> anyhow::Result<()> {
    served(|plane| {
        let frame = request(Transport::Udp, false);
        let (consumer, key) = (plane.consumer, plane.key(SERVICE_V4, 17, PORT));
        is(plane.ask(&frame)?, Verdict::Delivered, "before")?;
        plane.forget_flows()?;
        // A route entry of another key.
        let other = RouteEntry {
            check: key.check() ^ 1,
            pad: 0,
            policy: POLICY,
            flags: RouteEntry::OPEN,
        };
        plane.hash(pin::SERVICES)?.insert(Plain(key), Plain(other), 0)?;
        is(plane.ask(&frame)?, Verdict::Pass, "a route of another key")?;
        plane.entry_at(key, POLICY, RouteEntry::OPEN)?;
        is(plane.ask(&frame)?, Verdict::Delivered, "its own route")?;
        // A flow of another key: the route decides.
        let mut flow = plane.flow(consumer, &frame)?.context("no flow")?;
        ensure!(flow.flags & Flow::ANSWER == 0);
        flow.check ^= 1;
        flow.backend = 1;
        let flows = plane.flows()?;
        let raw = flows
            .iter()
            .find(|(_, found)| found.flags & Flow::ANSWER == 0)
            .map(|(key, _)| *key)
            .context("no request entry")?;
        plane.hash(pin::FLOWS)?.insert(Plain(raw), Plain(flow), 0)?;
        is(plane.ask(&frame)?, Verdict::Delivered, "a flow of another key")?;
        ensure!(
            plane.flow(consumer, &frame)?.context("no flow")?.backend == 0,
            "made anew"
        );
        // A consumer row of another interface.
        let row = ConsumerRow {
            ifindex: consumer + 1,
            epoch: 1,
            token: CONSUMER_TOKEN,
            flags: ConsumerRow::HAS_SERVICES,
            device: 0,
        };
        plane
            .hash(pin::CONSUMERS)?
            .insert(Plain(consumer), Plain(row), 0)?;
        is(plane.ask(&frame)?, Verdict::Pass, "a row of another interface")?;
        plane.row(CONSUMER_TOKEN, 1)?;
        // A source entry of another address.
        let mut spoofed = frame.with_source_port(40_001);
        spoofed.source.0 = "10.0.0.12".parse()?;
        let (family, address) = crate::plane::address(spoofed.source.0);
        let source = holdfast_ebpf::abi::SourceKey {
            ifindex: consumer,
            family,
            pad: [0; 3],
            address,
        };
        plane
            .hash(pin::SOURCES)?
            .insert(Plain(source), Plain(source.check() ^ 1), 0)?;
        is(
            plane.ask(&spoofed)?,
            Verdict::DropSpoofed,
            "a source of another key",
        )
    })
}

pub(crate) fn f49_replacement_under_load_leaks_nothing() -> anyhow::Result<()> {
    served(|plane| {
        const ROUNDS: u32 = 60;
        const RUNS: u32 = 20_000;
        let consumer = plane.consumer;
        // Raw handles for the writer: the plane itself runs the packets.
        for name in [pin::REGISTRY, pin::CONSUMERS, pin::SERVICES, pin::CONTROL] {
            let map = plane.ebpf.map(name).context("no map")?;
            map.pin(Path::new(ROOT).join("bpf").join(name))?;
        }
        let path = |name: &str| Path::new(ROOT).join("bpf").join(name);
        let registry = raw::Map::<u32, RegistryRow>::new(raw::obj_get(&path(pin::REGISTRY))?)?;
        let consumers = raw::Map::<u32, ConsumerRow>::new(raw::obj_get(&path(pin::CONSUMERS))?)?;
        let services = raw::Map::<ServiceKey, RouteEntry>::new(raw::obj_get(&path(pin::SERVICES))?)?;
        let control = raw::Words::map(&raw::Map::new(raw::obj_get(&path(pin::CONTROL))?)?)?;
        // As the agent does it: a look-up that finds nothing meanwhile looks again.
        let writing = |turn: u32, odd: u64| {
            fence(Ordering::SeqCst);
            control.store(control::WRITES, u64::from(turn) * 2 + odd);
            fence(Ordering::SeqCst);
        };
        let key = plane.key(SERVICE_V4, 17, PORT);
        let entry = services.lookup(&key)?.context("no entry")?;
        let identity = registry.lookup(&consumer)?.context("no identity")?;
        let row = consumers.lookup(&consumer)?.context("no row")?;
        let stop = AtomicBool::new(false);
        let written = std::thread::scope(|scope| -> anyhow::Result<u64> {
            let writer = scope.spawn(|| -> anyhow::Result<u64> {
                // Neighbours that come and go make elements change their keys.
                let mut written = 0;
                for turn in (0u32..).step_by(2) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let stranger = 1_000_000 + turn % 128;
                    registry.update(&consumer, &identity)?;
                    writing(turn, 1);
                    consumers.update(&consumer, &row)?;
                    services.update(&key, &entry)?;
                    writing(turn, 2);
                    let foreign = RegistryRow {
                        token: u64::from(stranger),
                        ..identity
                    };
                    let foreign_row = ConsumerRow {
                        ifindex: stranger,
                        ..row
                    };
                    let foreign_key = ServiceKey {
                        ifindex: stranger,
                        ..key
                    };
                    registry.update(&stranger, &foreign)?;
                    writing(turn + 1, 1);
                    consumers.update(&stranger, &foreign_row)?;
                    services.update(
                        &foreign_key,
                        &RouteEntry {
                            policy: POLICY + 1,
                            check: foreign_key.check(),
                            ..entry
                        },
                    )?;
                    if turn % 4 == 0 {
                        registry.delete(&stranger)?;
                        consumers.delete(&stranger)?;
                        services.delete(&foreign_key)?;
                    }
                    writing(turn + 1, 2);
                    written += 6;
                }
                Ok(written)
            });
            for round in 0..ROUNDS {
                // Every run of the first half is a new flow: a SYN is routed each time.
                let transport = if round % 2 == 0 {
                    Transport::Tcp(SYN)
                } else {
                    Transport::Udp
                };
                let frame = request(transport, false).bytes();
                plane.run(consumer, &frame, 0, [0; 5], RUNS)?;
            }
            stop.store(true, Ordering::Relaxed);
            writer
                .join()
                .map_err(|_| anyhow::anyhow!("the writer panicked"))?
        })?;
        let counters = plane.counters()?;
        let passed = counters[Verdict::Pass as usize];
        let delivered = counters[Verdict::Delivered as usize];
        let other: Vec<_> = Verdict::ALL
            .into_iter()
            .map(|verdict| (verdict, counters[verdict as usize]))
            .filter(|(_, count)| *count != 0)
            .collect();
        say(format!(
            "{ROUNDS} x {RUNS} packets under {written} writes: {other:?}"
        ));
        ensure!(passed == 0, "{passed} packets leaked past the policy");
        ensure!(delivered >= u64::from(ROUNDS * RUNS) * 999 / 1000);
        Ok(())
    })
}

/// A trie hides nothing while it is written: the program looks once, and nobody counts these writes.
pub(crate) fn f49_prefixes_under_replacement_leak_nothing() -> anyhow::Result<()> {
    served(|plane| {
        const ROUNDS: u32 = 40;
        const RUNS: u32 = 20_000;
        let consumer = plane.consumer;
        let flags = ConsumerRow::HAS_SERVICES | ConsumerRow::HAS_PREFIXES_V4;
        plane.row_of(consumer, CONSUMER_TOKEN, 1, flags)?;
        let map = plane.ebpf.map(pin::PREFIXES).context("no map")?;
        let path = Path::new(ROOT).join("bpf").join(pin::PREFIXES);
        map.pin(&path)?;
        let prefixes = raw::Trie::<PrefixKey, PrefixEntry>::new(raw::obj_get(&path)?)?;
        let entry = |address: [u8; 4], length: u8| {
            let key = plane.prefix_key(address.into(), length);
            let entry = PrefixEntry {
                check: key.check(),
                length: length.into(),
                policy: POLICY,
                flags: RouteEntry::OPEN,
            };
            (key, entry)
        };
        // What is asked for is covered by the second throughout; above, beside and below it others come and go.
        let stays = entry([10, 128, 0, 0], 16);
        let around = [
            entry([10, 128, 7, 9], 32),
            entry([10, 128, 7, 0], 24),
            entry([10, 128, 7, 8], 31),
            entry([10, 128, 0, 0], 15),
            entry([0, 0, 0, 0], 0),
            entry([10, 128, 128, 0], 17),
            entry([10, 0, 0, 0], 8),
            entry([10, 128, 7, 128], 25),
        ];
        prefixes.update(&stays.0, &stays.1)?;
        let frame = |flags| {
            request(Transport::Tcp(flags), false)
                .to_port(7_000)
                .to([10, 128, 7, 9].into())
                .bytes()
        };
        let stop = AtomicBool::new(false);
        let written = std::thread::scope(|scope| -> anyhow::Result<u64> {
            let writer = scope.spawn(|| -> anyhow::Result<u64> {
                let mut written = 0;
                for turn in 0usize.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let (key, value) = &around[turn % around.len()];
                    prefixes.update(&stays.0, &stays.1)?;
                    prefixes.update(key, value)?;
                    if turn % 3 != 0 {
                        prefixes.delete(key)?;
                    }
                    written += 3;
                }
                Ok(written)
            });
            for _ in 0..ROUNDS {
                // A SYN is routed each time.
                plane.run(consumer, &frame(SYN), 0, [0; 5], RUNS)?;
            }
            stop.store(true, Ordering::Relaxed);
            writer
                .join()
                .map_err(|_| anyhow::anyhow!("the writer panicked"))?
        })?;
        let counters = plane.counters()?;
        let all = u64::from(ROUNDS * RUNS);
        say(format!(
            "{all} packets under {written} writes to the trie: {counters:?}"
        ));
        ensure!(counters[Verdict::Delivered as usize] == all);
        Ok(())
    })
}
