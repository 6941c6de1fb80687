//! What an operator asks and is told: each kind of "no" from the real agent about the real kernel, and what can be told
//! while no agent runs.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::Output;

use anyhow::{Context, ensure};
use holdfast::cli::down::{Down, DownWhy};
use holdfast::datapath::raw;
use holdfast::serve::diff::Diff;
use holdfast::serve::why::{Chain, Step, StepName, Told, Why};
use holdfast_ebpf::abi::{self, ConsumerRow, RouteEntry, ServiceKey, pin};
use holdfast_tests::lab::DNS;
use holdfast_tests::objects::{Attachment, NAMESPACE};
use holdfast_tests::tamper::{foreign, key_of_c0};
use holdfast_tests::{EVENT_BUDGET, Lab, suite};
use rustix::process::Signal;
use serde::de::DeserializeOwned;

suite! {
    needs [Namespaces, Agent];
    a_programmed_consumer_is_a_yes,
    an_interface_that_is_missing_down_or_without_carrier,
    an_identity_that_is_missing_or_anothers,
    a_producer_that_is_not_ready,
    a_program_that_cannot_be_attached,
    a_program_before_ours,
    tampered_entries_are_seen_before_an_audit_comes,
    a_proof_that_fails,
    the_policy_as_a_whole,
    differences_are_shown_side_by_side,
    while_no_agent_runs_the_pins_tell,
    the_readme_shows_what_is_said;
    tc [a_programmed_consumer_is_a_yes, a_program_that_cannot_be_attached]
}

/// The usual scene. Its audits are so far apart that what is changed is not put right while it is looked at.
fn scene() -> anyhow::Result<Lab> {
    let lab = Lab::programmed_with_chaos(&[("HOLDFAST_AUDIT_INTERVAL", "5m")])?;
    // The first audit, and the proofs after it, are over: nothing is being changed.
    holdfast_tests::until(4 * EVENT_BUDGET, "the first audit is over", || {
        let said = lab.node.cli("status", &["-o", "json"])?;
        let status: serde_json::Value = serde_json::from_slice(&said.stdout)?;
        Ok(status
            .get("audit")
            .is_some_and(|audit| !audit.is_null())
            .then_some(()))
    })?;
    Ok(lab)
}

fn name(object: &str) -> String {
    format!("{NAMESPACE}/{object}")
}

/// The answer as JSON, with this exit code.
fn asked<T: DeserializeOwned>(output: &Output, code: i32) -> anyhow::Result<T> {
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(code),
        "exits with {}, not {code}: {said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_str(&said).with_context(|| format!("no JSON: {said}"))
}

fn why(lab: &Lab, consumer: &str, code: i32) -> anyhow::Result<Chain> {
    let output = lab
        .node
        .cli("why", &[&name(DNS), &name(consumer), "-o", "json"])?;
    let mut why: Why = asked(&output, code)?;
    ensure!(why.consumers.len() == 1, "{why:#?}");
    why.consumers.pop().context("one chain")
}

fn step(chain: &Chain, step: StepName) -> anyhow::Result<&Step> {
    let found = chain.steps.iter().find(|found| found.step == step);
    found.with_context(|| format!("no step {}", step.name()))
}

/// The consumer is not programmed because of this step, which says so, since when, and what to do.
fn is_no(lab: &Lab, consumer: &str, cause: StepName, words: &[&str]) -> anyhow::Result<Chain> {
    let chain = why(lab, consumer, 1)?;
    ensure!(
        chain.cause == Some(cause),
        "because of {:?}: {chain:#?}",
        chain.cause
    );
    let found = step(&chain, cause)?;
    let told = format!(
        "{} {} {}",
        found.found,
        found.remedy.as_deref().unwrap_or_default(),
        found.command.as_deref().unwrap_or_default()
    );
    for word in words {
        ensure!(told.contains(word), "{word:?} is not said: {found:#?}");
    }
    ensure!(
        found.remedy.is_some() && found.command.is_some(),
        "nothing to do: {found:#?}"
    );
    ensure!(
        chain.state == "Programmed" || found.since.is_some(),
        "since when? {found:#?}"
    );
    // Before the cause everything is as it should be.
    let before = chain.steps.iter().take_while(|step| step.step != cause);
    for step in before {
        ensure!(step.answer == Told::Yes && step.since.is_some(), "{step:#?}");
    }
    Ok(chain)
}

fn is_yes(lab: &Lab, consumer: &str) -> anyhow::Result<()> {
    lab.node.until_verdict(DNS, "Programmed", 4 * EVENT_BUDGET)?;
    let chain = why(lab, consumer, 0)?;
    for step in &chain.steps {
        ensure!(step.answer == Told::Yes && step.since.is_some(), "{step:#?}");
    }
    Ok(())
}

fn a_programmed_consumer_is_a_yes() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        is_yes(lab, "c0")?;
        lab.served(0, 0)?;
        // Nobody of that name, and one that the policy does not select.
        for (consumer, word) in [("c9", "no attachment lab/c9"), ("c2", "labels do not match")] {
            let output = lab.node.cli("why", &[&name(DNS), &name(consumer)])?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.code() == Some(1) && said.contains(word), "{said}");
        }
        lab.node.unregister("hfc0")?;
        lab.not_served(0, 0)
    })
}

fn an_interface_that_is_missing_down_or_without_carrier() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.consumers[0].carrier_off()?;
        lab.node.until_verdict(DNS, "Held(NoCarrier)", EVENT_BUDGET)?;
        is_no(
            lab,
            "c0",
            StepName::Interface,
            &["no carrier", "ip -details link show dev hfc0"],
        )?;
        lab.consumers[0].carrier_on(&mut lab.node)?;
        is_yes(lab, "c0")?;
        lab.node.rtnl.down("hfc0")?;
        lab.node.until_verdict(DNS, "Held(InterfaceDown)", EVENT_BUDGET)?;
        let chain = is_no(
            lab,
            "c0",
            StepName::Interface,
            &["not up", "ip link set dev hfc0 up"],
        )?;
        // What follows from it is told as such.
        ensure!(step(&chain, StepName::Identity)?.answer == Told::Yes);
        ensure!(step(&chain, StepName::Attach)?.answer == Told::Yes);
        ensure!(step(&chain, StepName::Entries)?.answer == Told::No);
        ensure!(step(&chain, StepName::Proof)?.answer == Told::Unknown);
        lab.consumers[0].up(&mut lab.node)?;
        is_yes(lab, "c0")?;
        lab.consumers[0].delete(&mut lab.node)?;
        lab.node
            .until_verdict(DNS, "Held(InterfaceMissing)", EVENT_BUDGET)?;
        let chain = is_no(
            lab,
            "c0",
            StepName::Interface,
            &["no interface hfc0", "ip link show dev hfc0"],
        )?;
        ensure!(step(&chain, StepName::Identity)?.answer == Told::Unknown);
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

fn an_identity_that_is_missing_or_anothers() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        let words = [
            "nobody is registered",
            "holdfast attachment register --interface hfc0",
        ];
        is_no(lab, "c0", StepName::Identity, &words)?;
        let attachment = Attachment {
            identity: Some(lab.consumers[0].identity()),
            ..lab.consumers[0].attachment()
        };
        lab.node.put_attachment(&attachment)?;
        lab.node.register("hfc0", "somebody-else")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMismatch)", EVENT_BUDGET)?;
        let words = ["expects incarnation", "holdfast attachment list"];
        is_no(lab, "c0", StepName::Identity, &words)?;
        lab.consumers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

fn a_producer_that_is_not_ready() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.node.unregister("hfp0")?;
        lab.node
            .until_verdict(DNS, "Held(NoReadyProducer)", EVENT_BUDGET)?;
        let words = [
            "0 of 1 producer is ready",
            "lab/p0 (hfp0): IdentityMissing",
            "holdfast attachment register --interface hfp0",
        ];
        let chain = is_no(lab, "c0", StepName::Producer, &words)?;
        ensure!(chain.reason.as_deref() == Some("NoReadyProducer"));
        lab.producers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

fn a_program_that_cannot_be_attached() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.consumers[0].delete(&mut lab.node)?;
        lab.node.chaos("attach@hfc0=EPERM")?;
        lab.consumers[0].create(&mut lab.node)?;
        lab.consumers[0].register(&lab.node)?;
        lab.node
            .until_verdict(DNS, "Failed(AttachFailed)", EVENT_BUDGET)?;
        is_no(lab, "c0", StepName::Attach, &["on purpose", "holdfast preflight"])?;
        lab.node.chaos("")?;
        lab.consumers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)?;
        lab.node.forgive_errors();
        Ok(())
    })
}

fn a_program_before_ours() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let program = foreign()?;
        let id = raw::prog_info(program.as_fd())?.id;
        let link = lab
            .node
            .space()
            .inside(|| Ok(raw::link_create(program.as_fd(), ifindex)?))?;
        // No audit has come yet: this is the kernel's word alone.
        let named = format!("program {id} (tcx)");
        let chain = is_no(
            lab,
            "c0",
            StepName::Position,
            &[&named, "bpftool net show dev hfc0"],
        )?;
        ensure!(chain.state == "Programmed", "{chain:#?}");
        ensure!(step(&chain, StepName::Attach)?.answer == Told::Yes);
        let diff = differing(lab, &[], 1)?;
        ensure!(
            diff.things.len() == 1
                && diff.things[0].kernel.as_deref() == Some(&format!("attached, after {named}")),
            "{diff:#?}"
        );
        drop(link);
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

fn tampered_entries_are_seen_before_an_audit_comes() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        let key = key_of_c0(lab)?;
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let right = services.lookup(&key)?.context("c0 has no entry")?;
        services.update(&key, &RouteEntry { flags: 0, ..right })?;
        let words = ["the entry for 10.96.0.10 UDP 53", "holdfast diff lab/dns"];
        let chain = is_no(lab, "c0", StepName::Entries, &words)?;
        ensure!(step(&chain, StepName::Proof)?.answer == Told::Unknown);
        // The neighbour that shares the policy has nothing to do with it.
        let other = why(lab, "c1", 0)?;
        ensure!(other.answer == Told::Yes);
        services.update(&key, &right)?;
        is_yes(lab, "c0")?;
        let rows = lab.node.rows()?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let row = rows.lookup(&ifindex)?.context("no row")?;
        rows.update(
            &ifindex,
            &ConsumerRow {
                token: row.token ^ 1,
                ..row
            },
        )?;
        is_no(lab, "c0", StepName::Entries, &["the consumer row"])?;
        rows.update(&ifindex, &row)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

fn a_proof_that_fails() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.node.unregister("hfc0")?;
        lab.node.chaos("prove-intent@hfc0=EIO")?;
        lab.consumers[0].register(&lab.node)?;
        lab.node.until_verdict(DNS, "Failed(ProofFailed)", EVENT_BUDGET)?;
        let chain = why(lab, "c0", 1)?;
        let proof = step(&chain, StepName::Proof)?;
        ensure!(
            proof.answer == Told::No && proof.found.contains("on purpose"),
            "{chain:#?}"
        );
        ensure!(chain.cause == Some(StepName::Proof), "{chain:#?}");
        lab.node.chaos("")?;
        lab.consumers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)?;
        lab.node.forgive_errors();
        Ok(())
    })
}

fn the_policy_as_a_whole() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        let whole = |lab: &Lab, more: &[&str], code| -> anyhow::Result<Why> {
            let policy = name(DNS);
            let mut arguments = vec![policy.as_str(), "-o", "json"];
            arguments.extend(more);
            asked(&lab.node.cli("why", &arguments)?, code)
        };
        let all_served = whole(lab, &[], 0)?;
        ensure!(
            all_served.consumers.is_empty() && all_served.looked_at == 2,
            "{all_served:#?}"
        );
        ensure!(whole(lab, &["--all"], 0)?.consumers.len() == 2);
        lab.node.unregister("hfc1")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        let one_held = whole(lab, &[], 1)?;
        let named: Vec<&str> = one_held
            .consumers
            .iter()
            .map(|chain| chain.consumer.as_str())
            .collect();
        ensure!(named == ["lab/c1"], "{one_held:#?}");
        let output = lab.node.cli("why", &["lab/nobody"])?;
        ensure!(output.status.code() == Some(1));
        lab.consumers[1].register(&lab.node)?;
        is_yes(lab, "c1")?;
        lab.served(1, 0)
    })
}

// --- diff --------------------------------------------------------------------------------------------------

fn differing(lab: &Lab, more: &[&str], code: i32) -> anyhow::Result<Diff> {
    let mut arguments = vec!["-o", "json"];
    arguments.extend(more);
    asked(&lab.node.cli("diff", &arguments)?, code)
}

/// Exactly this differs.
fn only(lab: &Lab, kind: &str, interface: Option<&str>) -> anyhow::Result<()> {
    let diff = differing(lab, &[], 1)?;
    ensure!(diff.differing == 1 && diff.things.len() == 1, "{diff:#?}");
    let line = &diff.things[0];
    ensure!(
        line.kind == kind && line.interface.as_deref() == interface,
        "{line:#?}"
    );
    ensure!(
        line.wanted == line.believed && line.kernel.is_some() && line.kernel != line.believed,
        "{line:#?}"
    );
    Ok(())
}

fn differences_are_shown_side_by_side() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        let same = differing(lab, &[], 0)?;
        ensure!(same.things.is_empty() && same.compared > 30, "{same:#?}");
        let policy = differing(lab, &[&name(DNS), "--all"], 0)?;
        for kind in [
            "program", "row", "entry", "selector", "slots", "producer", "source",
        ] {
            ensure!(
                policy.things.iter().any(|line| line.kind == kind),
                "{kind}: {policy:#?}"
            );
        }

        let key = key_of_c0(lab)?;
        let services = lab.node.map::<ServiceKey, RouteEntry>(pin::SERVICES)?;
        let right = services.lookup(&key)?.context("c0 has no entry")?;
        services.update(&key, &RouteEntry { flags: 0, ..right })?;
        only(lab, "entry", Some("hfc0"))?;
        services.update(&key, &right)?;

        let rows = lab.node.rows()?;
        let ifindex = lab.node.rtnl.ifindex("hfc0")?;
        let row = rows.lookup(&ifindex)?.context("no row")?;
        rows.update(
            &ifindex,
            &ConsumerRow {
                token: row.token ^ 1,
                ..row
            },
        )?;
        only(lab, "row", Some("hfc0"))?;
        rows.update(&ifindex, &row)?;

        let policies = lab.node.map::<u32, abi::PolicySlot>(pin::POLICIES)?;
        let slot = policies.lookup(&right.policy)?.context("no slot")?;
        let nobody = abi::Selector {
            length: 0,
            ..abi::Selector::unpack(slot.selector)
        };
        let selector = nobody.pack();
        policies.update(&right.policy, &abi::PolicySlot { selector, ..slot })?;
        only(lab, "selector", None)?;
        policies.update(&right.policy, &slot)?;

        // Of a device that never was: found, and not taken for known by being looked at.
        let stray = ConsumerRow {
            ifindex: 70_000,
            ..row
        };
        rows.update(&70_000, &stray)?;
        for _ in 0..2 {
            let diff = differing(lab, &[], 1)?;
            ensure!(
                diff.things.len() == 1 && diff.things[0].ifindex == Some(70_000),
                "{diff:#?}"
            );
        }
        rows.delete(&70_000)?;

        // This reference is the last one: the link goes with it at once.
        let pin = lab.node.pins()?.link(ifindex);
        let link = raw::obj_get(&pin)?;
        std::fs::remove_file(pin)?;
        drop(link);
        only(lab, "program", Some("hfc0"))?;
        let output = lab.node.cli("diff", &[&name("nobody")])?;
        ensure!(output.status.code() == Some(1), "there is no such policy");
        Ok(())
    })
}

// --- without an agent --------------------------------------------------------------------------------------

fn while_no_agent_runs_the_pins_tell() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.node.end_agent(Signal::TERM)?;
        let output = lab.node.cli::<&str>("status", &[])?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.code() == Some(2) && said.contains("no agent runs"),
            "{said}"
        );
        let down: Down = asked(&lab.node.cli("status", &["-o", "json"])?, 2)?;
        ensure!(
            down.agent == "down" && down.last_seen.is_some() && down.pinned,
            "{down:#?}"
        );
        let served = |policy: &str| {
            let found = down
                .policies
                .iter()
                .find(|found| found.name.as_deref() == Some(policy));
            found.map(|found| (found.served, found.consumers, found.producers))
        };
        ensure!(
            served("lab/dns") == Some((2, 2, 1)) && served("lab/web") == Some((2, 2, 1)),
            "{down:#?}"
        );
        ensure!(
            down.interfaces.len() == 5 && down.interfaces.iter().all(|one| one.attached && one.registered),
            "{down:#?}"
        );
        // It is so.
        lab.served(0, 0)?;

        let policy = name(DNS);
        let why: DownWhy = asked(&lab.node.cli("why", &[&policy, "-o", "json"])?, 2)?;
        ensure!(
            why.interfaces.len() == 2 && why.interfaces.iter().all(|one| one.answer == Told::Unknown),
            "{why:#?}"
        );
        let diff: Diff = asked(&lab.node.cli("diff", &["-o", "json"])?, 2)?;
        ensure!(
            diff.same == Told::Unknown
                && diff
                    .things
                    .iter()
                    .all(|line| line.wanted.is_none() && line.kernel.is_some()),
            "{diff:#?}"
        );
        ensure!(
            diff.things
                .iter()
                .any(|line| line.kind == "entry" && line.policy.as_deref() == Some(&policy))
        );

        // What the kernel says no to is a no, whoever asks.
        lab.node.unregister_silently("hfc0")?;
        let why: DownWhy = asked(&lab.node.cli("why", &[&policy, "-o", "json"])?, 1)?;
        let chain = why
            .interfaces
            .iter()
            .find(|one| one.interface.as_deref() == Some("hfc0"));
        let chain = chain.context("hfc0 is not told of")?;
        let told = |step| {
            chain
                .steps
                .iter()
                .find(|found| found.step == step)
                .map(|found| found.answer)
        };
        ensure!(
            told(StepName::Interface) == Some(Told::Yes)
                && told(StepName::Identity) == Some(Told::No)
                && told(StepName::Attach) == Some(Told::Yes)
                && told(StepName::Entries) == Some(Told::No)
                && told(StepName::Proof) == Some(Told::Unknown),
            "{chain:#?}"
        );
        lab.not_served(0, 0)?;

        // After a kill the socket's file is there still, and nobody listens.
        lab.node.start_agent()?;
        lab.node.end_agent(Signal::KILL)?;
        let down: Down = asked(&lab.node.cli("status", &["-o", "json"])?, 2)?;
        ensure!(down.agent == "down", "{down:#?}");
        lab.node.start_agent()?;
        lab.consumers[0].register(&lab.node)?;
        is_yes(lab, "c0")?;
        lab.served(0, 0)
    })
}

// --- the session in the README -----------------------------------------------------------------------------

const BEGIN: &str =
    "<!-- recorded: `HOLDFAST_BLESS=1 cargo xtask test tests:operate` writes it anew -->\n```console\n";
const END: &str = "```\n<!-- end of what is recorded -->\n";

/// An operator finds out why a consumer is held, from the first look to the proof that it is served.
fn the_readme_shows_what_is_said() -> anyhow::Result<()> {
    scene()?.run(|lab| {
        lab.node.unregister("hfc0")?;
        lab.node
            .until_verdict(DNS, "Held(IdentityMissing)", EVENT_BUDGET)?;
        let mut session = String::new();
        for (command, code) in [
            ("status", 0),
            ("why lab/dns lab/c0", 1),
            ("attachment register --interface hfc0", 0),
            ("wait lab/dns --attachment lab/c0", 0),
            ("why lab/dns lab/c0", 0),
        ] {
            session.push_str(&said(lab, command, code)?);
        }
        let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
        let text = std::fs::read_to_string(&readme)?;
        let (before, rest) = text
            .split_once(BEGIN)
            .context("the README has no recorded session")?;
        let (recorded, after) = rest.split_once(END).context("the recorded session has no end")?;
        if std::env::var_os("HOLDFAST_BLESS").is_some() {
            std::fs::write(
                &readme,
                format!("{before}{BEGIN}{}{END}{after}", session.trim_start()),
            )?;
            return Ok(());
        }
        let (recorded, session) = (lasting(recorded), lasting(&session));
        for (recorded, now) in recorded.iter().zip(&session) {
            ensure!(
                recorded == now,
                "the README shows\n  {recorded}\nand now it is\n  {now}"
            );
        }
        ensure!(
            recorded.len() == session.len(),
            "the README's session is another: {session:#?}"
        );
        Ok(())
    })
}

/// A command, and what it says.
fn said(lab: &Lab, command: &str, code: i32) -> anyhow::Result<String> {
    let mut words = command.split(' ');
    let subcommand = words.next().context("a command")?;
    let output = lab.node.cli(subcommand, &words.collect::<Vec<_>>())?;
    ensure!(
        output.status.code() == Some(code) && output.stderr.is_empty(),
        "{command} exits with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    ensure!(
        !text.contains('\u{1b}'),
        "colours where there is no terminal: {text:?}"
    );
    let code = match code {
        0 => String::new(),
        code => format!("$ echo $?\n{code}\n"),
    };
    Ok(format!("\n$ holdfast {command}\n{text}{code}"))
}

/// What is the same in every run: lines without times, ids, and the widths of columns.
fn lasting(text: &str) -> Vec<String> {
    let line = |line: &str| {
        let words = line.split_whitespace().scan("", |before, word| {
            let lasting = lasting_word(word, before);
            *before = word;
            Some(lasting)
        });
        let text = words.collect::<Vec<String>>().join(" ");
        // An audit may or may not have met the registrations at the start.
        if text.starts_with("audit ") {
            "audit".to_owned()
        } else {
            text
        }
    };
    text.lines().filter(|line| !line.is_empty()).map(line).collect()
}

fn lasting_word(word: &str, before: &str) -> String {
    // The plus of `5m+` is no part of the age, and lasts: whether this life saw it become so.
    let bare = word.trim_matches(|c: char| ",;:()+".contains(c));
    let is_digits = !bare.is_empty() && bare.bytes().all(|c| c.is_ascii_digit());
    let is_age = bare.ends_with(['s', 'm', 'h', 'd'])
        && bare.starts_with(|c: char| c.is_ascii_digit())
        && bare.chars().all(|c| c.is_ascii_digit() || "smhd".contains(c));
    let is_id = bare.len() >= 16 && bare.bytes().all(|c| c.is_ascii_hexdigit());
    let is_time = bare.ends_with('Z') && bare.contains('T') && bare.contains('-');
    let is_number = is_digits && (before.starts_with("hf") || before == "number" || before == "ifindex");
    let shown = if is_age {
        "AGE"
    } else if is_time {
        "TIME"
    } else if is_id {
        "ID"
    } else if is_number {
        "NUMBER"
    } else if before == "agent" {
        "VERSION"
    } else {
        return word.to_owned();
    };
    word.replace(bare, shown)
}
