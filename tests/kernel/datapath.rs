//! Maps, links and programs: written, read back, adopted; all of it with the three shipped capabilities alone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use holdfast::api::hash::incarnation;
use holdfast::datapath::pins::EPOCH;
use holdfast::datapath::raw::{self, MapShape};
use holdfast::datapath::{AttachMode, Datapath, DatapathError, Hook, Kernel, Opened, PinError, filter};
use holdfast::preflight;
use holdfast::registry::{Registration, RegistryError};
use holdfast_ebpf::abi::{MAPS, MapLayout, pin};
use holdfast_engine::model::{
    Adoption, Device, Entry, Mac, Op, OpError, Protocol, RegistryRead, RouteKey, Row, Token,
};
use holdfast_tests::ground::{Ground, Intent, carry_out, link_pin, names, pinned, refusal};
use holdfast_tests::process::restrict;
use holdfast_tests::rtnl::Rtnl;
use holdfast_tests::tc::{self, Place};
use holdfast_tests::traffic::{Flow, Producer};
use holdfast_tests::{EVENT_BUDGET, Space, say, suite, sysctl, until};
use rustix::thread::CapabilitySet;

suite! {
    needs [Namespaces, Object];
    the_capabilities_are_exactly_the_shipped_ones,
    every_operation_is_done_once_and_found_again,
    what_an_earlier_life_left_is_adopted_with_no_write,
    dropping_everything_detaches_nothing,
    a_device_is_attached_by_what_it_is_not_by_its_number,
    ours_is_first_in_the_chain,
    a_dead_devices_link_is_never_adopted,
    a_device_that_moved_away_is_not_ours_any_more,
    another_program_takes_the_place_of_the_old_one,
    a_program_is_replaced_and_a_life_ends_under_traffic_without_a_loss,
    a_foreign_object_at_a_pin_is_set_aside,
    a_map_that_is_pinned_already_keeps_its_size,
    a_second_agent_is_refused,
    entries_are_written_as_a_whole_or_not_at_all,
    prefixes_are_written_found_again_and_replaced_in_their_place,
    a_full_trie_takes_no_more_and_still_replaces,
    the_nodes_own_addresses_are_written_and_found_again,
    what_is_reached_as_a_neighbour_is_found_again,
    an_interface_is_cleared_of_everything_that_is_its_own,
    pins_are_private,
    identities_are_registered_with_the_agent_up_or_down,
    a_foreign_map_in_the_registrys_place_is_refused,
    the_agent_deletes_an_identity_only_by_its_token,
    a_changed_identity_wakes_the_agent,
    debug_lines_are_read_only_when_they_are_asked_for,
    preflight_finds_what_is_there_and_names_what_is_not,
    a_filter_is_first_and_foreign_ones_stay_as_they_are,
    a_qdisc_that_is_there_serves_and_stays,
    our_qdisc_goes_with_our_filter_unless_others_use_it,
    who_is_in_the_place_of_our_filter_is_named,
    a_filter_goes_with_its_device,
    a_filter_whose_pins_are_lost_is_taken_over_when_its_device_is_wanted,
    the_hook_changes_under_traffic_without_a_loss;
    tc [
        every_operation_is_done_once_and_found_again,
        what_an_earlier_life_left_is_adopted_with_no_write,
        dropping_everything_detaches_nothing,
        a_device_is_attached_by_what_it_is_not_by_its_number,
        another_program_takes_the_place_of_the_old_one,
        a_program_is_replaced_and_a_life_ends_under_traffic_without_a_loss,
        preflight_finds_what_is_there_and_names_what_is_not,
    ]
}

// --- helpers -----------------------------------------------------------------------------------------------

/// Ids of everything that is pinned.
#[derive(Debug, PartialEq, Eq)]
struct Ids {
    maps: BTreeMap<String, u32>,
    links: BTreeMap<String, u32>,
    program: u32,
}

fn ids(ground: &Ground) -> anyhow::Result<Ids> {
    let pins = ground.pins();
    let open = |path: &Path| -> anyhow::Result<OwnedFd> {
        raw::obj_get(path).with_context(|| format!("cannot open {}", path.display()))
    };
    let mut maps = BTreeMap::new();
    for name in MAPS.iter().map(|map| map.name).chain([EPOCH]) {
        let path = if name == pin::REGISTRY {
            pins.registry()
        } else {
            pins.map(name)
        };
        maps.insert(name.to_owned(), raw::map_info(open(&path)?.as_fd())?.id);
    }
    let mut links = BTreeMap::new();
    for name in names(&pins.links())? {
        links.insert(
            name.clone(),
            raw::link_info(open(&pins.links().join(&name))?.as_fd())?.id,
        );
    }
    let programs = pins.programs()?;
    ensure!(programs.len() == 1, "programs {programs:?} are pinned");
    Ok(Ids {
        maps,
        links,
        program: programs[0],
    })
}

fn services(addresses: impl IntoIterator<Item = u8>, entry: Entry) -> BTreeMap<RouteKey, Entry> {
    addresses
        .into_iter()
        .map(|last| {
            let key = RouteKey::Service {
                address: IpAddr::from([10, 96, 0, last]),
                protocol: Protocol::Udp,
                port: 53,
            };
            (key, entry)
        })
        .collect()
}

const OPEN: Entry = Entry {
    policy: 3,
    open: true,
};

// --- tests -------------------------------------------------------------------------------------------------

fn the_capabilities_are_exactly_the_shipped_ones() -> anyhow::Result<()> {
    Ground::run(|_| {
        let status = std::fs::read_to_string("/proc/thread-self/status")?;
        let set = |name: &str| -> anyhow::Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            Ok(u64::from_str_radix(line.context("no such line")?.trim(), 16)?)
        };
        // CAP_NET_ADMIN 12, CAP_PERFMON 38, CAP_BPF 39.
        let shipped = 1 << 12 | 1 << 38 | 1 << 39;
        for name in ["CapPrm:", "CapEff:", "CapBnd:"] {
            ensure!(set(name)? == shipped, "{name} {:x}", set(name)?);
        }
        ensure!(set("CapInh:")? == 0 && set("CapAmb:")? == 0, "{status}");
        Ok(())
    })
}

fn every_operation_is_done_once_and_found_again() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        ensure!(kernel.adopt()? == Adoption::default());
        let (intent, _spaces) = ground.intent(&kernel)?;
        let ifindex = intent.consumer.ifindex;
        let counted: Vec<u32> = intent
            .writes()
            .iter()
            .map(|op| carry_out(&kernel, op))
            .collect::<Result<_, _>>()?;
        // Two addresses claimed, three entries.
        ensure!(counted == [1, 1, 1, 2, 5, 1], "{counted:?}");
        carry_out(&kernel, &intent.set_proof())?;
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;

        for op in intent.writes() {
            ensure!(carry_out(&kernel, &op)? == 0, "{op:?} wrote again");
        }
        let device = intent.consumer;
        ensure!(carry_out(&kernel, &Op::Attach { device })? == 0);
        let adoption = kernel.adopt()?;
        ensure!(adoption.attached.contains(&ifindex) && adoption.attached.len() == 2);
        ensure!(adoption.rows == BTreeMap::from([(ifindex, intent.row)]));
        ensure!(adoption.sources == BTreeMap::from([(ifindex, intent.sources.clone())]));
        ensure!(adoption.entries == BTreeMap::from([(ifindex, intent.entries.clone())]));
        ensure!(adoption.policies == BTreeMap::from([(intent.slot, intent.policy.clone())]));
        ensure!(adoption.backends == intent.backends);
        ensure!(adoption.slots == BTreeMap::from([(8, vec![4])]));

        let stats = kernel.stats();
        let entries = |map| stats.maps[map].entries;
        ensure!(entries(pin::SERVICES) == Some(5) && entries(pin::CONSUMERS) == Some(1));
        ensure!(entries(pin::REGISTRY) == Some(2) && entries(pin::FLOWS).is_none());
        ensure!(stats.maps[pin::SERVICES].updates == 5 && stats.proofs_ok == 2);

        // One entry after the other, then the rest.
        for (key, left) in intent.entries.keys().zip([2, 1, 0]) {
            let writes = carry_out(
                &kernel,
                &Op::DeleteEntries {
                    ifindex,
                    keys: BTreeSet::from([*key]),
                },
            )?;
            let claimed: BTreeSet<IpAddr> = intent
                .entries
                .keys()
                .skip(3 - left)
                .map(|key| key.address())
                .collect();
            // The claim of an address goes with its last entry.
            let expected = if claimed.contains(&key.address()) { 1 } else { 2 };
            ensure!(writes == expected, "{writes} writes with {left} left");
        }
        ensure!(kernel.stats().maps[pin::SERVICES].entries == Some(0));
        ensure!(
            carry_out(
                &kernel,
                &Op::WritePolicy {
                    slot: intent.slot,
                    value: None
                }
            )? == 1
        );
        ensure!(
            carry_out(
                &kernel,
                &Op::WritePolicy {
                    slot: intent.slot,
                    value: None
                }
            )? == 0
        );
        ensure!(
            carry_out(
                &kernel,
                &Op::WriteBackends {
                    backends: BTreeMap::from([(4, None)])
                }
            )? == 1
        );
        let sources = Op::WriteSources {
            ifindex,
            add: BTreeSet::new(),
            delete: intent.sources.clone(),
        };
        ensure!(carry_out(&kernel, &sources)? == 2);
        ensure!(carry_out(&kernel, &sources)? == 0);
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex })? == 1);
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex })? == 0);
        let adoption = kernel.adopt()?;
        let empty = Adoption {
            attached: adoption.attached.clone(),
            identities: adoption.identities.clone(),
            ..Adoption::default()
        };
        ensure!(adoption == empty, "{adoption:?}");
        for ifindex in adoption.attached {
            ensure!(carry_out(&kernel, &Op::Detach { ifindex })? == 1);
            ensure!(carry_out(&kernel, &Op::Detach { ifindex })? == 0);
        }
        for device in ["hfcons", "hfprod"] {
            ensure!(
                ground.programs(device)?.is_empty() && ground.rtnl.qdisc_of(device)?.is_none(),
                "detached is detached at once"
            );
        }
        Ok(())
    })
}

fn what_an_earlier_life_left_is_adopted_with_no_write() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let start = Instant::now();
        let Opened { kernel, epoch, .. } = ground.open()?;
        say(format_args!("the first life opens in {:?}", start.elapsed()));
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        let (before, adopted) = (ids(ground)?, kernel.adopt()?);
        drop(kernel);
        for _ in 0..2 {
            drop(kernel_of(ground, &epoch)?);
        }
        let start = Instant::now();
        let kernel = kernel_of(ground, &epoch)?;
        say(format_args!("a later life opens in {:?}", start.elapsed()));
        ensure!(kernel.adopt()? == adopted);
        ensure!(ids(ground)? == before, "{:?} instead of {before:?}", ids(ground)?);
        for op in intent.writes() {
            ensure!(carry_out(&kernel, &op)? == 0, "{op:?} wrote again");
        }
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        let stats = kernel.stats();
        ensure!(
            stats
                .maps
                .values()
                .all(|map| map.updates == 0 && map.deletes == 0)
        );
        Ok(())
    })
}

/// Another life, that names the same life of the pins.
fn kernel_of(ground: &Ground, epoch: &str) -> anyhow::Result<Kernel> {
    let opened = ground.open()?;
    ensure!(opened.epoch == epoch, "another epoch");
    Ok(opened.kernel)
}

fn dropping_everything_detaches_nothing() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let opened = ground.open()?;
        let (device, _workload) = ground.veth("hfa")?;
        carry_out(&opened.kernel, &Op::Attach { device })?;
        let before = ground.programs("hfa")?;
        ensure!(before == [opened.kernel.program_id()], "{before:?}");
        drop(opened);
        ensure!(ground.programs("hfa")? == before);
        Ok(())
    })
}

fn a_device_is_attached_by_what_it_is_not_by_its_number() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let other = Device {
            mac: Mac([2, 0, 0, 0, 0, 0xfe]),
            ..device
        };
        ensure!(refusal(&kernel, &Op::Attach { device: other })? == OpError::NoDevice);
        pinned(&link_pin(ground, device.ifindex), false)?;
        ensure!(ground.programs("hfa")?.is_empty());
        carry_out(&kernel, &Op::Attach { device })?;
        ground.rtnl.delete("hfa")?;
        ensure!(refusal(&kernel, &Op::Attach { device })? == OpError::NoDevice);
        // The pin of a device that is gone still goes; a filter has gone with it.
        let ifindex = device.ifindex;
        let left = u32::from(kernel.hook() == Hook::Tcx);
        ensure!(carry_out(&kernel, &Op::Detach { ifindex })? == left);
        pinned(&link_pin(ground, device.ifindex), false)
    })
}

fn ours_is_first_in_the_chain() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let (program, id) = tc::program(tc::NEXT)?;
        let _link = raw::link_create(program.as_fd(), device.ifindex)?;
        carry_out(&kernel, &Op::Attach { device })?;
        let chain = ground.programs("hfa")?;
        ensure!(chain == [kernel.program_id(), id], "{chain:?}");
        Ok(())
    })
}

fn a_dead_devices_link_is_never_adopted() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let ifindex = device.ifindex;
        carry_out(&kernel, &Op::Attach { device })?;
        drop(kernel);
        ground.rtnl.delete("hfa")?;
        // Another device gets its number.
        let successor = ground.veth_as("hfa", ifindex)?;
        ensure!(successor.ifindex == ifindex && successor.mac != device.mac);
        pinned(&link_pin(ground, ifindex), true)?;

        let kernel = ground.open()?.kernel;
        ensure!(kernel.adopt()?.attached.is_empty());
        pinned(&link_pin(ground, ifindex), false)?;
        // While an agent runs, the attach itself finds out.
        ensure!(carry_out(&kernel, &Op::Attach { device: successor })? == 1);
        ground.rtnl.delete("hfa")?;
        let third = ground.veth_as("hfa", ifindex)?;
        ensure!(refusal(&kernel, &Op::Attach { device: successor })? == OpError::NoDevice);
        ensure!(carry_out(&kernel, &Op::Attach { device: third })? == 1);
        ensure!(kernel.adopt()?.attached == BTreeSet::from([ifindex]));
        Ok(())
    })
}

fn a_device_that_moved_away_is_not_ours_any_more() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let ifindex = device.ifindex;
        carry_out(&kernel, &Op::Attach { device })?;
        let elsewhere = ground.as_root(Space::network)?;
        ground.rtnl.move_to("hfa", elsewhere.net())?;
        let programs_there = |ground: &Ground| {
            let elsewhere = elsewhere.clone();
            ground.as_root(move || elsewhere.inside(|| Ok(raw::chain(ifindex)?.items.len())))
        };
        // It keeps its number there, and its program. Here another device gets the number.
        ensure!(
            programs_there(ground)? == 1,
            "the moved device has lost its program"
        );
        let successor = ground.veth_as("hfb", ifindex)?;
        ensure!(kernel.adopt()?.attached.is_empty(), "adopted");
        ensure!(
            programs_there(ground)? == 0,
            "the moved device still has our program"
        );
        ensure!(carry_out(&kernel, &Op::Attach { device: successor })? == 1);
        ensure!(kernel.adopt()?.attached == BTreeSet::from([ifindex]));
        Ok(())
    })
}

fn another_program_takes_the_place_of_the_old_one() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let Opened { kernel, epoch, .. } = ground.open()?;
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        let (before, adopted) = (ids(ground)?, kernel.adopt()?);
        drop(kernel);
        // As if the pinned program came from another build.
        let record: raw::Map<u32, u64> = raw::Map::new(raw::obj_get(&ground.pins().map(EPOCH))?)?;
        record.update(&2, &0xdead)?;

        let kernel = kernel_of(ground, &epoch)?;
        let after = ids(ground)?;
        ensure!(after.program != before.program && after.program == kernel.program_id());
        ensure!(
            after.links == before.links && after.maps == before.maps,
            "{after:?} {before:?}"
        );
        for device in ["hfcons", "hfprod"] {
            let programs = ground.programs(device)?;
            ensure!(programs == [after.program], "{programs:?}");
        }
        ensure!(kernel.adopt()? == adopted);
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        drop(kernel);

        // A kill between the record and the links: the next life finishes the job.
        let record_before = ids(ground)?;
        let mut lives = 0;
        for word in [2, 3, 4, 5] {
            let old = record.lookup(&word)?.unwrap_or_default();
            record.update(&word, &old.wrapping_add(1))?;
            let kernel = kernel_of(ground, &epoch)?;
            ensure!(kernel.program_id() != record_before.program || word == 0);
            carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
            lives += 1;
        }
        ensure!(lives == 4 && ids(ground)?.links == before.links);
        Ok(())
    })
}

/// Gives the workloads of [`Ground::intent`] what a CNI gives them: addresses, routes, neighbours.
fn plumb(consumer: &Space, producer: &Space, gateways: [Mac; 2]) -> anyhow::Result<()> {
    let [own, service, other] = [[10, 0, 0, 1], [10, 0, 0, 10], [10, 0, 0, 2]].map(IpAddr::from);
    for space in [consumer, producer] {
        space.inside(sysctl::for_workload)?;
    }
    let mut rtnl = Rtnl::open(consumer)?;
    rtnl.address("eth0", own, 32)?;
    rtnl.route(service, 32, None, "eth0")?;
    rtnl.neighbour(service, gateways[0].0, "eth0")?;
    let mut rtnl = Rtnl::open(producer)?;
    rtnl.address("eth0", other, 32)?;
    rtnl.address("lo", service, 32)?;
    rtnl.route(own, 32, None, "eth0")?;
    rtnl.neighbour(own, gateways[1].0, "eth0")
}

/// Traffic of an intent of [`Ground::intent`].
fn traffic(
    ground: &mut Ground,
    intent: &Intent,
    [consumer, producer]: [Space; 2],
) -> anyhow::Result<(Producer, Flow)> {
    let gateways = [intent.consumer.mac, ground.device("hfprod")?.mac];
    ground.as_root(move || {
        plumb(&consumer, &producer, gateways)?;
        let at = "10.0.0.10:53".parse()?;
        let served = Producer::serve(&producer, 7, &[at])?;
        Ok((served, Flow::start(&consumer, at, 2_000, 7)?))
    })
}

fn a_program_is_replaced_and_a_life_ends_under_traffic_without_a_loss() -> anyhow::Result<()> {
    const LIVES: u32 = 6;
    Ground::run(|ground| {
        let Opened { kernel, epoch, .. } = ground.open()?;
        let (intent, [consumer, producer]) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        drop(kernel);
        let (served, flow) = traffic(ground, &intent, [consumer, producer])?;
        flow.flows(200, EVENT_BUDGET)?;
        let record: raw::Map<u32, u64> = raw::Map::new(raw::obj_get(&ground.pins().map(EPOCH))?)?;
        let mut programs = BTreeSet::new();
        for life in 0..LIVES {
            if life % 2 == 0 {
                // As if the pinned program came from another build.
                record.update(&2, &u64::from(life))?;
            }
            programs.insert(kernel_of(ground, &epoch)?.program_id());
            flow.flows(50, EVENT_BUDGET)?;
        }
        ensure!(programs.len() as u32 == LIVES / 2, "{programs:?}");
        let tally = ground.as_root(move || flow.finish(Some(&served)))?;
        say(&tally);
        tally.perfect()
    })
}

fn a_foreign_object_at_a_pin_is_set_aside() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let Opened { kernel, epoch, .. } = ground.open()?;
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        drop(kernel);
        let pins = ground.pins();
        let services = pins.map(pin::SERVICES);
        let real = raw::obj_get(&services)?;
        std::fs::remove_file(&services)?;
        let shape = MapShape {
            map_type: MapLayout::HASH,
            key_size: 24,
            value_size: 24,
            max_entries: 64,
            flags: 0,
        };
        let foreign = raw::map_create("hfforeign", shape)?;
        raw::obj_pin(foreign.as_fd(), &services)?;
        // Neither is a program a map, nor a directory.
        std::fs::remove_file(pins.map(pin::WAKE_MARKS))?;
        let program = raw::obj_get(&pins.program(ids_program(ground)?))?;
        raw::obj_pin(program.as_fd(), &pins.map(pin::WAKE_MARKS))?;
        std::fs::remove_file(pins.map(pin::RATES))?;
        std::fs::create_dir(pins.map(pin::RATES))?;

        let opened = ground.open()?;
        ensure!(opened.epoch != epoch, "what was lost makes another life");
        let kernel = opened.kernel;
        let aside = raw::map_info(raw::obj_get(&pins.map("foreign_services_0"))?.as_fd())?;
        ensure!(aside == raw::map_info(foreign.as_fd())?);
        for name in ["foreign_wake_marks_0", "foreign_rates_0"] {
            pinned(&pins.map(name), true)?;
        }
        let found = raw::map_info(raw::obj_get(&services)?.as_fd())?;
        ensure!(found.shape.value_size == 16 && found.id != raw::map_info(real.as_fd())?.id);
        // The program uses the new map: what is written is what decides.
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
        ensure!(ground.programs("hfcons")? == [kernel.program_id()]);
        Ok(())
    })
}

fn ids_program(ground: &Ground) -> anyhow::Result<u32> {
    let programs = ground.pins().programs()?;
    programs.first().copied().context("no program is pinned")
}

fn a_map_that_is_pinned_already_keeps_its_size() -> anyhow::Result<()> {
    Ground::run(|ground| {
        drop(ground.open()?);
        let before = ids(ground)?;
        ground.options.sizes.services = 128;
        ground.options.sizes.policies = 32;
        let opened = ground.open()?;
        ensure!(ids(ground)? == before);
        ensure!(opened.capacity.policies == 16);
        ensure!(opened.kernel.stats().maps[pin::SERVICES].capacity == 64);
        Ok(())
    })
}

fn a_second_agent_is_refused() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let first = ground.open()?;
        let Err(DatapathError::Pin(PinError::Locked { path })) = ground.open() else {
            anyhow::bail!("not refused");
        };
        ensure!(path == ground.options.bpffs_dir);
        drop(first);
        ground.open()?;
        Ok(())
    })
}

fn entries_are_written_as_a_whole_or_not_at_all() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.sizes.services = 8;
        let kernel = ground.open()?.kernel;
        let closed = Entry { open: false, ..OPEN };
        let write = |ifindex, entries| Op::WriteEntries { ifindex, entries };
        // Three entries and three claims fit.
        ensure!(carry_out(&kernel, &write(7, services(1..=3, closed)))? == 6);
        // One that is there and changes, and two more: 10 elements.
        let mut more = services(3..=5, OPEN);
        let full = refusal(&kernel, &write(7, more.clone()))?;
        let expected = OpError::Full {
            map: pin::SERVICES.to_owned(),
            need: 10,
            have: 8,
        };
        ensure!(full == expected, "{full:?}");
        ensure!(kernel.adopt()?.entries == BTreeMap::from([(7, services(1..=3, closed))]));
        ensure!(kernel.stats().maps[pin::SERVICES].entries == Some(6));
        // Another interface's does not fit either, and leaves nothing.
        let full = refusal(&kernel, &write(8, services(1..=2, OPEN)))?;
        ensure!(
            matches!(
                full,
                OpError::Full {
                    need: 10,
                    have: 8,
                    ..
                }
            ),
            "{full:?}"
        );
        ensure!(kernel.adopt()?.entries.len() == 1);
        // Room is made, and it goes.
        let gone = services([1], closed).into_keys().collect();
        ensure!(
            carry_out(
                &kernel,
                &Op::DeleteEntries {
                    ifindex: 7,
                    keys: gone
                }
            )? == 2
        );
        ensure!(
            carry_out(
                &kernel,
                &write(7, more.split_off(&key_of(4)).into_iter().take(1).collect())
            )? == 2
        );
        ensure!(kernel.stats().maps[pin::SERVICES].entries == Some(6));

        let full = refusal(
            &kernel,
            &Op::WriteSlots {
                base: 250,
                slots: vec![1; 7],
            },
        )?;
        ensure!(
            matches!(
                full,
                OpError::Full {
                    need: 257,
                    have: 256,
                    ..
                }
            ),
            "{full:?}"
        );
        let full = refusal(
            &kernel,
            &Op::WritePolicy {
                slot: 16,
                value: None,
            },
        )?;
        ensure!(
            matches!(
                full,
                OpError::Full {
                    need: 17,
                    have: 16,
                    ..
                }
            ),
            "{full:?}"
        );
        Ok(())
    })
}

fn prefix(text: &str) -> anyhow::Result<RouteKey> {
    let (address, length) = text.split_once('/').context("no length")?;
    Ok(RouteKey::Prefix {
        address: address.parse()?,
        length: length.parse()?,
    })
}

fn prefixes(texts: &[&str], entry: Entry) -> anyhow::Result<BTreeMap<RouteKey, Entry>> {
    texts.iter().map(|text| Ok((prefix(text)?, entry))).collect()
}

fn prefixes_are_written_found_again_and_replaced_in_their_place() -> anyhow::Result<()> {
    const NETWORKS: [&str; 7] = [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.0.0.0/16",
        "10.0.0.1/32",
        "::/0",
        "fd00::/8",
        "fd00::1/128",
    ];
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let closed = Entry { open: false, ..OPEN };
        let mut wanted = BTreeMap::new();
        for (ifindex, entry) in [(7, OPEN), (8, closed)] {
            let mut entries = prefixes(&NETWORKS, entry)?;
            entries.extend(services([1], entry));
            let write = Op::WriteEntries {
                ifindex,
                entries: entries.clone(),
            };
            ensure!(
                carry_out(&kernel, &write)? == 9,
                "seven prefixes, a service and its claim"
            );
            ensure!(carry_out(&kernel, &write)? == 0, "written again");
            wanted.insert(ifindex, entries);
        }
        ensure!(kernel.adopt()?.entries == wanted);

        // The next life finds all of them, and writes none.
        drop(kernel);
        let kernel = ground.open()?.kernel;
        ensure!(kernel.adopt()?.entries == wanted, "{:?}", kernel.adopt()?.entries);
        for (ifindex, entries) in wanted.clone() {
            ensure!(carry_out(&kernel, &Op::WriteEntries { ifindex, entries })? == 0);
        }
        let stats = kernel.stats();
        ensure!(stats.maps[pin::PREFIXES].entries == Some(14) && stats.maps[pin::PREFIXES].updates == 0);

        // One changes, and those around it stay.
        let other = Entry { policy: 9, ..OPEN };
        for network in ["10.0.0.0/8", "::/0"] {
            let entries = prefixes(&[network], other)?;
            let write = Op::WriteEntries { ifindex: 7, entries };
            ensure!(carry_out(&kernel, &write)? == 1);
            if let Some(entries) = wanted.get_mut(&7) {
                entries.insert(prefix(network)?, other);
            }
        }
        ensure!(kernel.adopt()?.entries == wanted);

        // One goes; where only a shorter one is left, there is nothing to delete.
        let delete = Op::DeleteEntries {
            ifindex: 7,
            keys: BTreeSet::from([prefix("10.0.0.0/8")?, prefix("10.7.0.0/16")?]),
        };
        ensure!(carry_out(&kernel, &delete)? == 1);
        ensure!(carry_out(&kernel, &delete)? == 0);
        if let Some(entries) = wanted.get_mut(&7) {
            entries.remove(&prefix("10.0.0.0/8")?);
        }
        ensure!(kernel.adopt()?.entries == wanted);
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex: 7 })? == 8);
        wanted.remove(&7);
        ensure!(kernel.adopt()?.entries == wanted);
        ensure!(kernel.stats().maps[pin::PREFIXES].entries == Some(7));
        Ok(())
    })
}

fn a_full_trie_takes_no_more_and_still_replaces() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.sizes.prefixes = 4;
        let kernel = ground.open()?.kernel;
        let closed = Entry { open: false, ..OPEN };
        let write = |ifindex, entries| Op::WriteEntries { ifindex, entries };
        let there = prefixes(&["10.0.0.0/8", "fd00::/8"], closed)?;
        ensure!(carry_out(&kernel, &write(7, there.clone()))? == 2);
        // One that is there and changes, two more, and a service, which fits by itself.
        let mut more = prefixes(&["10.0.0.0/8", "10.0.0.0/16", "0.0.0.0/0"], OPEN)?;
        more.extend(services([1], OPEN));
        let full = refusal(&kernel, &write(7, more))?;
        // One of the four elements stays free.
        let expected = OpError::Full {
            map: pin::PREFIXES.to_owned(),
            need: 4,
            have: 3,
        };
        ensure!(full == expected, "{full:?}");
        ensure!(kernel.adopt()?.entries == BTreeMap::from([(7, there.clone())]));
        let stats = kernel.stats();
        ensure!(stats.maps[pin::PREFIXES].entries == Some(2) && stats.maps[pin::SERVICES].entries == Some(0));
        // The last one fits, and then all of them can still be opened.
        let last = prefixes(&["::/0"], closed)?;
        ensure!(carry_out(&kernel, &write(8, last))? == 1);
        let open: BTreeMap<RouteKey, Entry> = there.into_keys().map(|key| (key, OPEN)).collect();
        ensure!(carry_out(&kernel, &write(7, open.clone()))? == 2);
        ensure!(kernel.adopt()?.entries.get(&7) == Some(&open));
        // Room is made, and it goes.
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex: 7 })? == 2);
        ensure!(
            carry_out(
                &kernel,
                &write(8, prefixes(&["10.0.0.0/8", "10.0.0.0/16"], OPEN)?)
            )? == 2
        );
        Ok(())
    })
}

fn the_nodes_own_addresses_are_written_and_found_again() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let addresses = |texts: &[&str]| -> anyhow::Result<BTreeSet<IpAddr>> {
            texts.iter().map(|text| Ok(text.parse()?)).collect()
        };
        let first = addresses(&["127.0.0.1", "192.0.2.1", "::1", "2001:db8::1"])?;
        let write = |add: &BTreeSet<IpAddr>, delete: &BTreeSet<IpAddr>| Op::WriteLocals {
            add: add.clone(),
            delete: delete.clone(),
        };
        let none = BTreeSet::new();
        ensure!(carry_out(&kernel, &write(&first, &none))? == 4);
        ensure!(carry_out(&kernel, &write(&first, &none))? == 0);
        drop(kernel);
        let kernel = ground.open()?.kernel;
        ensure!(kernel.adopt()?.locals == first);
        // What is added and deleted at once stays.
        let (add, delete) = (
            addresses(&["192.0.2.2", "::1"])?,
            addresses(&["192.0.2.1", "::1", "192.0.2.9"])?,
        );
        ensure!(carry_out(&kernel, &write(&add, &delete))? == 2);
        let wanted = addresses(&["127.0.0.1", "192.0.2.2", "::1", "2001:db8::1"])?;
        ensure!(kernel.adopt()?.locals == wanted);
        ensure!(kernel.stats().maps[pin::LOCALS].entries == Some(4));

        // More than the map takes is said, with how much it would have to take.
        let many: BTreeSet<IpAddr> = (0..100).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        let full = refusal(&kernel, &write(&many, &none))?;
        let expected = OpError::Full {
            map: pin::LOCALS.to_owned(),
            need: 104,
            have: 64,
        };
        ensure!(full == expected, "{full:?}");
        Ok(())
    })
}

fn what_is_reached_as_a_neighbour_is_found_again() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (mut intent, _spaces) = ground.intent(&kernel)?;
        let ifindex = intent.consumer.ifindex;
        intent.row = Row {
            has_services: false,
            has_prefixes_v4: true,
            has_prefixes_v6: true,
            via: Some(ifindex),
            ..intent.row
        };
        for backend in intent.backends.values_mut() {
            backend.via = Some(77);
        }
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        drop(kernel);
        let kernel = ground.open()?.kernel;
        let adoption = kernel.adopt()?;
        ensure!(
            adoption.rows == BTreeMap::from([(ifindex, intent.row)]),
            "{:?}",
            adoption.rows
        );
        ensure!(adoption.backends == intent.backends, "{:?}", adoption.backends);
        for op in intent.writes() {
            ensure!(carry_out(&kernel, &op)? == 0, "{op:?} wrote again");
        }
        Ok(())
    })
}

fn key_of(last: u8) -> RouteKey {
    RouteKey::Service {
        address: IpAddr::from([10, 96, 0, last]),
        protocol: Protocol::Udp,
        port: 53,
    }
}

fn an_interface_is_cleared_of_everything_that_is_its_own() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let row = Row {
            token: Token::new(5),
            epoch: 1,
            has_services: true,
            has_prefixes_v4: false,
            has_prefixes_v6: false,
            via: None,
            has_sources: true,
        };
        for ifindex in [7, 8] {
            carry_out(
                &kernel,
                &Op::WriteEntries {
                    ifindex,
                    entries: services(1..=2, OPEN),
                },
            )?;
            let add = BTreeSet::from([IpAddr::from([10, 0, 0, 1])]);
            carry_out(
                &kernel,
                &Op::WriteSources {
                    ifindex,
                    add,
                    delete: BTreeSet::new(),
                },
            )?;
            carry_out(&kernel, &Op::WriteRow { ifindex, row })?;
        }
        // What is left behind is found by the next life too.
        drop(kernel);
        let kernel = ground.open()?.kernel;
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex: 7 })? == 6);
        ensure!(carry_out(&kernel, &Op::ClearInterface { ifindex: 7 })? == 0);
        let adoption = kernel.adopt()?;
        ensure!(adoption.rows == BTreeMap::from([(8, row)]));
        ensure!(adoption.entries == BTreeMap::from([(8, services(1..=2, OPEN))]));
        ensure!(adoption.sources.keys().eq([&8]));
        Ok(())
    })
}

fn pins_are_private() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        carry_out(&kernel, &Op::Attach { device })?;
        let pins = ground.pins();
        let mode = |path: &Path| -> anyhow::Result<u32> {
            Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
        };
        for directory in [pins.root().to_owned(), pins.version().to_owned(), pins.links()] {
            ensure!(mode(&directory)? == 0o700, "{}", directory.display());
            for name in names(&directory)? {
                let path = directory.join(name);
                ensure!(path.is_dir() || mode(&path)? == 0o600, "{}", path.display());
            }
        }
        Ok(())
    })
}

fn identities_are_registered_with_the_agent_up_or_down() -> anyhow::Result<()> {
    Ground::run(|ground| {
        // Nobody has been here yet: the CNI makes the registry.
        let registry = ground.registry()?;
        let registration = Registration {
            interface: "hfa".to_owned(),
            identity: Some("incarnation-1".to_owned()),
            mac: Some(Mac([2, 0, 0, 0, 0, 9])),
            ..Registration::default()
        };
        let missing = registry.register(&registration);
        ensure!(
            matches!(missing, Err(RegistryError::NoInterface { .. })),
            "{missing:?}"
        );
        ensure!(registry.is_empty()?);
        let (device, _workload) = ground.veth("hfa")?;
        let first = registry.register(&registration)?;
        ensure!(first.device == device && first.replaced.is_none());

        let kernel = ground.open()?.kernel;
        let read = |ifindex| kernel.read_registry(&BTreeSet::from([ifindex])).remove(0).1;
        let RegistryRead::Row(identity) = read(device.ifindex) else {
            anyhow::bail!("not read");
        };
        ensure!(identity.token == first.token && identity.host_mac == device.mac);
        ensure!(identity.incarnation == Some(incarnation("incarnation-1")));
        ensure!(identity.mac == Mac([2, 0, 0, 0, 0, 9]) && !identity.host_mac_shared);
        ensure!(read(device.ifindex + 1) == RegistryRead::Absent);

        let second = registry.register(&registration)?;
        ensure!(second.replaced == Some(first.token) && second.token != first.token);
        // The late teardown of the first incarnation does not touch the second.
        let late = registry.unregister(device.ifindex, first.token);
        ensure!(
            matches!(late, Err(RegistryError::OtherIncarnation { .. })),
            "{late:?}"
        );
        let listed = registry.list()?;
        ensure!(listed.len() == 1 && listed[0].interface.as_deref() == Some("hfa"));
        ensure!(listed[0].identity.token == second.token);
        // The number's next device is not the one that was registered.
        ground.rtnl.delete("hfa")?;
        ground.veth_as("hfb", device.ifindex)?;
        ensure!(registry.list()?[0].interface.is_none());
        ensure!(registry.unregister(device.ifindex, second.token)?);
        ensure!(!registry.unregister(device.ifindex, second.token)?);
        ensure!(read(device.ifindex) == RegistryRead::Absent);
        Ok(())
    })
}

fn a_foreign_map_in_the_registrys_place_is_refused() -> anyhow::Result<()> {
    Ground::run(|ground| {
        drop(ground.registry()?);
        let path = ground.pins().registry();
        std::fs::remove_file(&path)?;
        let shape = MapShape {
            map_type: MapLayout::HASH,
            key_size: 4,
            value_size: 40,
            max_entries: 64,
            flags: 0,
        };
        raw::obj_pin(raw::map_create("hfforeign", shape)?.as_fd(), &path)?;
        let refused = ground.registry().err().context("accepted")?;
        ensure!(
            refused.to_string().contains("entries 64 instead of 16384"),
            "{refused}"
        );
        let Err(DatapathError::Registry(RegistryError::Pin(PinError::Layout { .. }))) = ground.open() else {
            anyhow::bail!("the agent takes a registry that CNIs do not write to");
        };
        // It may be somebody's: it stays.
        pinned(&path, true)
    })
}

fn the_agent_deletes_an_identity_only_by_its_token() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let ifindex = device.ifindex;
        let first = ground.register("hfa")?.token;
        let second = ground.register("hfa")?.token;
        ensure!(
            carry_out(
                &kernel,
                &Op::DeleteIdentity {
                    ifindex,
                    token: first
                }
            )? == 0
        );
        ensure!(ground.registry()?.read(ifindex)?.is_some());
        ensure!(
            carry_out(
                &kernel,
                &Op::DeleteIdentity {
                    ifindex,
                    token: second
                }
            )? == 1
        );
        ensure!(
            carry_out(
                &kernel,
                &Op::DeleteIdentity {
                    ifindex,
                    token: second
                }
            )? == 0
        );
        ensure!(ground.registry()?.read(ifindex)?.is_none());
        Ok(())
    })
}

/// A packet of the intent's consumer that is none of the agent's probes: the program does what it does to a packet.
fn packet_of(kernel: &Kernel, intent: &Intent) -> anyhow::Result<u32> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00];
    frame.extend([
        0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 10,
    ]);
    frame.extend([0xc0, 0, 0, 53, 0, 8, 0, 0]);
    let program =
        raw::obj_get(&Path::new("/run/bpf/holdfast/v1").join(format!("classifier_{}", kernel.program_id())))?;
    let context = raw::SkbContext::new(0, intent.consumer.ifindex, [0; 5]);
    Ok(raw::test_run(program.as_fd(), &frame, &context, 1)?.returned)
}

fn a_changed_identity_wakes_the_agent() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let Opened { kernel, wakes, .. } = ground.open()?;
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (sender, mut receiver) = tokio::sync::mpsc::channel(16);
        let told = runtime.spawn(wakes.run(sender));
        packet_of(&kernel, &intent)?;
        let quiet =
            runtime.block_on(async { tokio::time::timeout(EVENT_BUDGET / 10, receiver.recv()).await });
        ensure!(quiet.is_err(), "woken without a reason: {quiet:?}");
        // Silently: nobody tells the agent.
        ground.register("hfcons")?;
        packet_of(&kernel, &intent)?;
        let woken = runtime.block_on(async { tokio::time::timeout(EVENT_BUDGET, receiver.recv()).await })?;
        ensure!(woken == Some(intent.consumer.ifindex), "{woken:?}");
        // At most once a second each.
        for _ in 0..100 {
            packet_of(&kernel, &intent)?;
        }
        let more = runtime.block_on(async { tokio::time::timeout(EVENT_BUDGET / 10, receiver.recv()).await });
        ensure!(more.is_err(), "{more:?}");
        told.abort();
        Ok(())
    })
}

fn debug_lines_are_read_only_when_they_are_asked_for() -> anyhow::Result<()> {
    use std::sync::{Arc, Mutex, PoisonError};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Lines {
        fn count(&self) -> usize {
            let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let lines = String::from_utf8_lossy(&lines);
            // The kernel's own packets (a router is asked for, an address is tried) pass; they come when they like.
            lines.matches("verdict ").count() - lines.matches("verdict 0 ").count()
        }
    }
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            lines.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    Ground::run(|ground| {
        let Opened { kernel, logs, .. } = ground.open()?;
        let (intent, _spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let reading = runtime.spawn(logs.context("the program logs nothing")?.run());
        let turn = || runtime.block_on(async { tokio::time::sleep(EVENT_BUDGET / 50).await });

        packet_of(&kernel, &intent)?;
        turn();
        ensure!(lines.count() == 0, "logged although it is off");
        kernel.set_debug(2)?;
        packet_of(&kernel, &intent)?;
        until(EVENT_BUDGET, "a line", || {
            turn();
            Ok((lines.count() == 1).then_some(()))
        })?;
        kernel.set_debug(0)?;
        packet_of(&kernel, &intent)?;
        turn();
        ensure!(lines.count() == 1);
        reading.abort();
        Ok(())
    })
}

fn preflight_finds_what_is_there_and_names_what_is_not() -> anyhow::Result<()> {
    Ground::run(|ground| {
        let wants = preflight::Wants {
            bpffs_dir: ground.options.bpffs_dir.clone(),
            run_dir: ground.options.run_dir.clone(),
            state_dir: Path::new("/run/state").to_owned(),
            attach: ground.options.attach,
        };
        let before = names(Path::new("/run/bpf"))?;
        let start = Instant::now();
        preflight::require(&wants)?;
        say(format_args!("preflight takes {:?}", start.elapsed()));
        let checks = preflight::run(&wants);
        let program = checks
            .iter()
            .find(|check| check.name == "program")
            .context("no such check")?;
        say(&program.detail);
        let attach = checks.iter().find(|check| check.name == "attach");
        let found = if ground.options.attach == AttachMode::Tc {
            "filters of the clsact qdisc"
        } else {
            "links at the ingress hook (tcx)"
        };
        ensure!(attach.is_some_and(|check| check.detail == found), "{attach:?}");
        ensure!(ground.rtnl.qdisc_of("lo")?.is_none(), "a qdisc is left");
        ensure!(names(Path::new("/run/bpf"))? == before, "something is left");
        // An agent is running: still everything is there.
        let _opened = ground.open()?;
        preflight::require(&wants)?;

        let plain = preflight::Wants {
            bpffs_dir: Path::new("/run/holdfast").to_owned(),
            ..wants.clone()
        };
        let missing = preflight::require(&plain)
            .err()
            .context("a plain directory is no bpffs")?;
        ensure!(missing.0.len() == 1 && missing.0[0].name == "bpffs", "{missing}");

        // Every capability is missed by its name, and nothing else is guessed at.
        let with = |rights: CapabilitySet| {
            let (space, wants) = (ground.space().clone(), wants.clone());
            ground.as_root(move || {
                space.inside(|| {
                    restrict(rights)?;
                    Ok(preflight::require(&wants))
                })
            })
        };
        let missing = with(CapabilitySet::BPF | CapabilitySet::NET_ADMIN)?
            .err()
            .context("PERFMON is needed")?;
        ensure!(
            missing.0.iter().any(|check| check.name == "CAP_PERFMON"),
            "{missing}"
        );
        let missing = with(CapabilitySet::empty())?
            .err()
            .context("capabilities are needed")?;
        let names: BTreeSet<&str> = missing.0.iter().map(|check| check.name.as_str()).collect();
        for name in [
            "CAP_BPF",
            "CAP_NET_ADMIN",
            "CAP_PERFMON",
            "bpffs",
            "program-load",
            "attach",
        ] {
            ensure!(names.contains(name), "{name} is not named: {missing}");
        }
        Ok(())
    })
}

// --- clsact ------------------------------------------------------------------------------------------------

/// The filters at both hooks of a device that are not ours.
fn foreign_filters(ground: &mut Ground, device: &str) -> anyhow::Result<Vec<tc::Filter>> {
    let mut filters = ground.rtnl.filters(device, tc::INGRESS)?;
    filters.extend(ground.rtnl.filters(device, tc::EGRESS)?);
    filters.retain(|filter| filter.place.handle != filter::HANDLE);
    Ok(filters)
}

fn a_filter_is_first_and_foreign_ones_stay_as_they_are() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let kernel = ground.open()?.kernel;
        ensure!(kernel.hook() == Hook::Clsact);
        let (device, _workload) = ground.veth("hfa")?;
        let (program, foreign) = tc::program(tc::NEXT)?;
        ground.rtnl.qdisc("hfa", "clsact")?;
        // Of our own priority, of a later one, of another kind, and at the other hook.
        for (place, name) in [
            (Place::ingress(filter::PRIORITY, 1), "same"),
            (Place::ingress(2, 7), "later"),
        ] {
            ground.rtnl.filter("hfa", place, name, program.as_fd())?;
        }
        ground.rtnl.other_filter("hfa", tc::INGRESS, 3)?;
        let egress = Place {
            parent: tc::EGRESS,
            ..Place::ingress(filter::PRIORITY, filter::HANDLE - 1)
        };
        ground.rtnl.filter("hfa", egress, "egress", program.as_fd())?;
        let before = foreign_filters(ground, "hfa")?;
        ensure!(before.len() == 5, "{before:?}");

        ensure!(carry_out(&kernel, &Op::Attach { device })? == 1);
        let ours = kernel.program_id();
        let programs = ground.programs("hfa")?;
        ensure!(programs[..3] == [ours, foreign, foreign], "{programs:?}");
        ensure!(foreign_filters(ground, "hfa")? == before);
        ensure!(carry_out(&kernel, &Op::Attach { device })? == 0);

        // One that comes later comes before ours, and is no reason to touch it or ours.
        ground.rtnl.filter(
            "hfa",
            Place::ingress(filter::PRIORITY, 2),
            "newest",
            program.as_fd(),
        )?;
        let before = foreign_filters(ground, "hfa")?;
        ensure!(ground.programs("hfa")?[..2] == [foreign, ours]);
        ensure!(carry_out(&kernel, &Op::Attach { device })? == 0);
        // Another program, in the place of the old one.
        drop(kernel);
        let record: raw::Map<u32, u64> = raw::Map::new(raw::obj_get(&ground.pins().map(EPOCH))?)?;
        record.update(&2, &0xdead)?;
        let kernel = ground.open()?.kernel;
        ensure!(
            kernel.program_id() != ours && ground.programs("hfa")?[..2] == [foreign, kernel.program_id()]
        );
        ensure!(foreign_filters(ground, "hfa")? == before);

        let ifindex = device.ifindex;
        ensure!(carry_out(&kernel, &Op::Detach { ifindex })? == 1);
        ensure!(
            foreign_filters(ground, "hfa")? == before
                && !ground.programs("hfa")?.contains(&kernel.program_id())
        );
        ensure!(ground.rtnl.qdisc_of("hfa")?.as_deref() == Some("clsact"));
        Ok(())
    })
}

fn a_qdisc_that_is_there_serves_and_stays() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let kernel = ground.open()?.kernel;
        for (name, kind) in [("hfa", "ingress"), ("hfb", "clsact")] {
            let (device, _workload) = ground.veth(name)?;
            ground.rtnl.qdisc(name, kind)?;
            ensure!(carry_out(&kernel, &Op::Attach { device })? == 1);
            ensure!(ground.programs(name)? == [kernel.program_id()], "{kind}");
            ensure!(kernel.adopt()?.attached == BTreeSet::from([device.ifindex]));
            let ifindex = device.ifindex;
            ensure!(carry_out(&kernel, &Op::Detach { ifindex })? == 1);
            // Whoever made it may be about to use it.
            ensure!(
                ground.rtnl.qdisc_of(name)?.as_deref() == Some(kind) && ground.programs(name)?.is_empty()
            );
        }
        Ok(())
    })
}

fn our_qdisc_goes_with_our_filter_unless_others_use_it() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let kernel = ground.open()?.kernel;
        let (program, _) = tc::program(tc::NEXT)?;
        let other = Place::ingress(50, 1);
        for (name, used) in [
            ("hfa", None),
            ("hfb", Some(tc::INGRESS)),
            ("hfc", Some(tc::EGRESS)),
        ] {
            let (device, _workload) = ground.veth(name)?;
            carry_out(&kernel, &Op::Attach { device })?;
            if let Some(parent) = used {
                let place = Place { parent, ..other };
                ground.rtnl.filter(name, place, "user", program.as_fd())?;
            }
            let before = foreign_filters(ground, name)?;
            carry_out(
                &kernel,
                &Op::Detach {
                    ifindex: device.ifindex,
                },
            )?;
            ensure!(ground.rtnl.qdisc_of(name)?.is_some() == used.is_some(), "{name}");
            ensure!(foreign_filters(ground, name)? == before, "{name}");
        }
        Ok(())
    })
}

fn who_is_in_the_place_of_our_filter_is_named() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let kernel = ground.open()?.kernel;
        let (program, foreign) = tc::program(tc::NEXT)?;
        let (taken, _workload) = ground.veth("hfa")?;
        ground.rtnl.qdisc("hfa", "clsact")?;
        ground.rtnl.filter(
            "hfa",
            Place::ingress(filter::PRIORITY, filter::HANDLE),
            "mine",
            program.as_fd(),
        )?;
        let (other_kind, _workload) = ground.veth("hfb")?;
        ground.rtnl.qdisc("hfb", "clsact")?;
        ground.rtnl.other_filter("hfb", tc::INGRESS, filter::PRIORITY)?;
        for (name, device, named) in [
            (
                "hfa",
                taken,
                format!("program {foreign} (bpf filter \"mine\", priority 1"),
            ),
            ("hfb", other_kind, "a u32 filter (priority 1".to_owned()),
        ] {
            let before = foreign_filters(ground, name)?;
            let programs = ground.programs(name)?;
            let error = refusal(&kernel, &Op::Attach { device })?.to_string();
            ensure!(
                error.contains(&named) && error.contains("give it another priority"),
                "{error}"
            );
            carry_out(
                &kernel,
                &Op::Detach {
                    ifindex: device.ifindex,
                },
            )?;
            ensure!(ground.programs(name)? == programs && foreign_filters(ground, name)? == before);
        }
        Ok(())
    })
}

fn a_filter_goes_with_its_device() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let kernel = ground.open()?.kernel;
        let (device, _workload) = ground.veth("hfa")?;
        let ifindex = device.ifindex;
        carry_out(&kernel, &Op::Attach { device })?;
        // Deleted: another device gets its number.
        ground.rtnl.delete("hfa")?;
        let successor = ground.veth_as("hfa", ifindex)?;
        ensure!(kernel.adopt()?.attached.is_empty() && ground.programs("hfa")?.is_empty());
        ensure!(refusal(&kernel, &Op::Attach { device })? == OpError::NoDevice);
        ensure!(carry_out(&kernel, &Op::Attach { device: successor })? == 1);
        // Moved: it has lost its filter there, and here another device gets its number.
        let elsewhere = ground.as_root(Space::network)?;
        ground.rtnl.move_to("hfa", elsewhere.net())?;
        let there = ground.as_root(move || {
            let mut rtnl = Rtnl::open(&elsewhere)?;
            Ok((rtnl.ifindex("hfa")?, rtnl.qdisc_of("hfa")?))
        })?;
        ensure!(there == (ifindex, None), "{there:?}");
        let third = ground.veth_as("hfb", ifindex)?;
        ensure!(kernel.adopt()?.attached.is_empty());
        ensure!(carry_out(&kernel, &Op::Attach { device: third })? == 1);
        ensure!(kernel.adopt()?.attached == BTreeSet::from([ifindex]));
        Ok(())
    })
}

fn a_filter_whose_pins_are_lost_is_taken_over_when_its_device_is_wanted() -> anyhow::Result<()> {
    Ground::run(|ground| {
        ground.options.attach = AttachMode::Tc;
        let Opened { kernel, epoch, .. } = ground.open()?;
        let (device, _workload) = ground.veth("hfa")?;
        carry_out(&kernel, &Op::Attach { device })?;
        let lost = ground.programs("hfa")?;
        drop(kernel);
        std::fs::remove_dir_all(ground.pins().version())?;

        let opened = ground.open()?;
        ensure!(opened.epoch != epoch, "another life of the pins");
        let kernel = opened.kernel;
        ensure!(kernel.adopt()?.attached.is_empty(), "it may be another agent's");
        ensure!(ground.programs("hfa")? == lost, "it may be another agent's");
        ensure!(carry_out(&kernel, &Op::Attach { device })? == 1);
        ensure!(ground.programs("hfa")? == [kernel.program_id()] && lost != [kernel.program_id()]);
        // The qdisc is still the one that was made for it.
        let ifindex = device.ifindex;
        carry_out(&kernel, &Op::Detach { ifindex })?;
        ensure!(ground.rtnl.qdisc_of("hfa")?.is_none());
        Ok(())
    })
}

fn the_hook_changes_under_traffic_without_a_loss() -> anyhow::Result<()> {
    const LIVES: [AttachMode; 5] = [
        AttachMode::Tc,
        AttachMode::Tcx,
        AttachMode::Tc,
        AttachMode::Tc,
        AttachMode::Auto,
    ];
    Ground::run(|ground| {
        let Opened { kernel, epoch, .. } = ground.open()?;
        let (intent, spaces) = ground.intent(&kernel)?;
        for op in intent.writes() {
            carry_out(&kernel, &op)?;
        }
        let adopted = kernel.adopt()?;
        drop(kernel);
        let (served, flow) = traffic(ground, &intent, spaces)?;
        flow.flows(200, EVENT_BUDGET)?;
        for mode in LIVES {
            ground.options.attach = mode;
            let kernel = kernel_of(ground, &epoch)?;
            flow.flows(50, EVENT_BUDGET)?;
            ensure!(kernel.adopt()? == adopted);
            carry_out(&kernel, &Op::ProveIntent(intent.proof()))?;
            let by_tcx = kernel.hook() == Hook::Tcx;
            ensure!(by_tcx == (mode != AttachMode::Tc));
            for device in ["hfcons", "hfprod"] {
                ensure!(ground.programs(device)? == [kernel.program_id()], "{mode:?}");
                let ifindex = ground.rtnl.ifindex(device)?;
                pinned(&link_pin(ground, ifindex), by_tcx)?;
                ensure!(ground.rtnl.qdisc_of(device)?.is_some() != by_tcx, "{mode:?}");
            }
        }
        let tally = ground.as_root(move || flow.finish(Some(&served)))?;
        say(&tally);
        tally.perfect()
    })
}
