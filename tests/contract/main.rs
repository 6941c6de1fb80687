//! What others script against, word for word: help, metrics, JSON, report, exit codes.
//!
//! `HOLDFAST_BLESS=1` writes the golden files anew; what it changes there is a change of the contract, and is read as
//! one.

mod config;
mod fields;
mod journal;
mod operate;
mod unit;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::CommandFactory;
use config::{
    a_flag_goes_before_a_variable_before_the_file, a_printed_configuration_is_a_file,
    every_setting_has_its_variable, what_is_wrong_is_named_with_its_place,
};
use fields::every_field_of_the_json_is_documented;
use holdfast::cli::{self, Cli};
use holdfast::clock::System;
use holdfast::config::layers::Refusal;
use holdfast::datapath::{MapStats, Stats};
use holdfast::driver::lanes::LanesHealth;
use holdfast::driver::{self, Handle, Histogram, MetricsSnapshot, PolicyFigures, PolicyStatus, Snapshot};
use holdfast::loops;
use holdfast::report::Stamps;
use holdfast::report::file::{self, WriteCounts};
use holdfast::serve::look::Looker;
use holdfast::serve::metrics::{FAMILIES, Scrape, Values, render};
use holdfast::serve::wire::{Goal, PolicyDetail, Status, Wait, Waited};
use holdfast::serve::{self, Sources, socket};
use holdfast::source::{SavedAt, SourceProblem, SourceStatus};
use holdfast::telemetry::Control;
use holdfast_engine::belief::Drift;
use holdfast_engine::model::{
    Boot, FailReason, HoldReason, Leg, Mac, Now, ObjectName, Origin, State, Token, Uid,
};
use holdfast_engine::view::{
    AttachmentView, Barrier, Counts, IntentView, LastAudit, PolicyView, Serving, Settled, Summary,
};
use holdfast_tests::{Reason, codegen, say, skip};
use journal::a_long_journal_gives_the_same_decisions;
use operate::{Sight, compared, diff_answers, explained, why_answers};
use tokio::sync::{mpsc, oneshot, watch};
use unit::{
    systemd_finds_nothing_wrong_with_the_unit, the_unit_has_the_rights_of_the_lab,
    the_unit_starts_what_the_command_line_knows,
};

holdfast_tests::suite!(needs [];
    help_texts,
    metric_names_and_labels,
    metrics_pass_promtool,
    closed_families_are_there_from_the_start,
    families_are_as_documented,
    f32_a_scrape_of_ten_thousand_policies_is_quick_and_bounded,
    generated_files_are_current,
    status_json,
    policy_json,
    wait_json,
    why_answers,
    diff_answers,
    report_fields,
    every_field_of_the_json_is_documented,
    exit_codes,
    a_long_journal_gives_the_same_decisions,
    a_flag_goes_before_a_variable_before_the_file,
    a_printed_configuration_is_a_file,
    what_is_wrong_is_named_with_its_place,
    every_setting_has_its_variable,
    the_unit_starts_what_the_command_line_knows,
    the_unit_has_the_rights_of_the_lab,
    systemd_finds_nothing_wrong_with_the_unit,
);

/// Compares with a golden file, or writes it.
fn golden(name: &str, text: &str) -> anyhow::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("contract/golden")
        .join(name);
    if std::env::var_os("HOLDFAST_BLESS").is_some() {
        return std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()));
    }
    let expected =
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if expected == text {
        return Ok(());
    }
    let mut difference = String::new();
    let (before, now): (Vec<_>, Vec<_>) = (expected.lines().collect(), text.lines().collect());
    for at in 0..before.len().max(now.len()) {
        let (before, now) = (before.get(at), now.get(at));
        if before != now {
            writeln!(difference, "line {}", at + 1)?;
            for (mark, line) in [('-', before), ('+', now)] {
                if let Some(line) = line {
                    writeln!(difference, "{mark} {line}")?;
                }
            }
        }
    }
    bail!("the contract in {name} differs:\n{difference}")
}

fn pretty(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

// --- an example of everything ------------------------------------------------------------------------------

/// The boot clock was 0 at this time; all moments below are seconds after it.
const BOOTED_MS: i64 = 1_700_000_000_000;

fn at(seconds: u64) -> Now {
    Now {
        boot: Boot(seconds * Boot::SECOND),
        wall_ms: BOOTED_MS + i64::try_from(seconds).unwrap_or(0) * 1_000,
    }
}

fn stamps() -> Stamps {
    let stamps = Stamps::default();
    stamps.observe(at(1_000));
    stamps
}

fn shop(name: &str) -> ObjectName {
    ObjectName {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    }
}

fn policies() -> Vec<PolicyView> {
    let view = |name: &str, state| PolicyView {
        name: shop(name),
        uid: Uid(format!("uid-{name}")),
        generation: 1,
        origin: None,
        covers: 0x9f3a_b1c2_d3e4_f506,
        state,
        intents: Counts {
            programmed: 1,
            ..Counts::default()
        },
        since: at(900),
        held_since: None,
        serving: None,
        message: None,
        applied: 1,
        proven: 1,
        behind_since: None,
    };
    vec![
        PolicyView {
            generation: 8,
            origin: Some(Origin {
                uid: Uid("uid-hub".to_owned()),
                generation: 3,
            }),
            intents: Counts {
                programmed: 1,
                held: 2,
                ..Counts::default()
            },
            held_since: Some(at(800)),
            serving: Some(Serving {
                generation: 7,
                since_ms: at(700).wall_ms,
            }),
            message: Some("shop/web-1: no producer is ready".to_owned()),
            applied: 8,
            proven: 7,
            ..view("dns", State::Held(HoldReason::NoReadyProducer))
        },
        PolicyView {
            generation: 2,
            intents: Counts {
                failed: 1,
                ..Counts::default()
            },
            message: Some("shop/web-0: map services is full: 4 entries needed, 2 in all".to_owned()),
            applied: 2,
            ..view("mail", State::Failed(FailReason::MapFull))
        },
        PolicyView {
            intents: Counts {
                pending: 1,
                removing: 1,
                ..Counts::default()
            },
            behind_since: Some(at(950)),
            ..view("new", State::Pending)
        },
        view("web", State::Programmed),
    ]
}

fn summary() -> Summary {
    Summary {
        intents: Counts {
            pending: 1,
            programmed: 2,
            held: 2,
            failed: 1,
            removing: 1,
        },
        held: HoldReason::ALL
            .map(|reason| (reason, u64::from(reason == HoldReason::NoReadyProducer) * 2))
            .into(),
        failed: FailReason::ALL
            .map(|reason| (reason, u64::from(reason == FailReason::MapFull)))
            .into(),
        holds_begun: HoldReason::ALL.map(|reason| (reason, 5)).into(),
        policies: 4,
        attachments: 2,
        waiting_for: Vec::new(),
        first_pass_done: true,
        drift: Drift::ALL
            .map(|kind| (kind, u64::from(kind == Drift::Entry) * 3))
            .into(),
        audit: Some(LastAudit {
            ended: at(990),
            took: 4_000_000,
            found: 1,
        }),
    }
}

fn source() -> SourceStatus {
    SourceStatus {
        objects: BTreeMap::from([("Attachment".to_owned(), 2), ("RoutePolicy".to_owned(), 4)]),
        problems: vec![SourceProblem {
            file: "shop.yaml".to_owned(),
            line: Some(12),
            column: Some(9),
            reason: "RoutePolicy shop/old: spec.destinations[0].port: a service needs one with protocol UDP"
                .to_owned(),
            excerpt: Some(">   12 |   port: 0\n".to_owned()),
        }],
    }
}

fn snapshot() -> Snapshot {
    let attachment = |name: &str, ifindex, hold: Option<HoldReason>| AttachmentView {
        name: shop(name),
        uid: Uid(format!("uid-{name}")),
        interface: format!("hf{name}"),
        ifindex,
        mac: ifindex.map(|_| Mac([2, 0, 0, 0, 0, 7])),
        hold,
        attached: hold.is_none(),
        open: hold.is_none(),
    };
    Snapshot {
        node: "edge-1".to_owned(),
        epoch: "8c1f8e0b5a3d4f60".to_owned(),
        now_wall_ms: at(1_000).wall_ms,
        now_boot_ns: at(1_000).boot.0,
        summary: summary(),
        policies: policies(),
        attachments: vec![
            attachment("web-0", Some(7), None),
            attachment("web-1", None, Some(HoldReason::InterfaceMissing)),
        ],
        source: source(),
        source_age_ns: Some(2 * Boot::SECOND),
        saved_age_ns: Some(60 * Boot::SECOND),
        settled: true,
        removing: BTreeSet::new(),
    }
}

fn policy_status() -> PolicyStatus {
    let intent = |consumer: &str, state, message: Option<&str>| IntentView {
        policy: shop("dns"),
        policy_uid: Uid("uid-dns".to_owned()),
        consumer: shop(consumer),
        consumer_uid: Uid(format!("uid-{consumer}")),
        interface: format!("hf{consumer}"),
        ifindex: Some(7),
        token: Token::new(1),
        state,
        since: at(900),
        held_since: matches!(state, State::Held(_)).then_some(at(800)),
        message: message.map(str::to_owned),
    };
    PolicyStatus {
        policy: policies().remove(0),
        intents: vec![
            intent("web-0", State::Programmed, None),
            intent(
                "web-1",
                State::Held(HoldReason::NoReadyProducer),
                Some("no producer is ready"),
            ),
        ],
    }
}

fn metrics_snapshot() -> MetricsSnapshot {
    let mut histogram = Histogram::default();
    histogram.observe(120_000);
    histogram.observe(4_000_000);
    MetricsSnapshot {
        now_wall_ms: at(1_000).wall_ms,
        now_boot_ns: at(1_000).boot.0,
        summary: summary(),
        policies: policies().iter().map(PolicyFigures::new).collect(),
        source: source(),
        source_last_activity: Some(at(998)),
        saved: Some(SavedAt {
            seen: at(998),
            age_ms: 58_000,
        }),
        durations: BTreeMap::from([(Leg::ReadyToProgrammed, histogram.clone())]),
        queue_depth: 3,
        queue_wait: histogram.clone(),
        pass_duration: histogram,
        report_writes: BTreeMap::from([("ok", 9), ("error", 1)]),
        loops: BTreeMap::from([("netlink", loops::Count { runs: 3, errors: 1 })]),
        origin_to_seen: Histogram::default(),
        foreign_before: 1,
        netlink_overruns: 1,
        netlink_resyncs: 1,
    }
}

fn scrape(snapshot: MetricsSnapshot, stats: Stats) -> String {
    render(&Scrape {
        snapshot,
        stats,
        stamps: stamps(),
        started: at(10),
        source: "kube",
        foreign_allowed: false,
    })
}

fn full_scrape() -> String {
    let map = |entries, capacity| MapStats {
        entries,
        capacity,
        updates: 5,
        deletes: 2,
    };
    let stats = Stats {
        maps: BTreeMap::from([("flows", map(None, 262_144)), ("services", map(Some(3), 131_072))]),
        packets: (100..120).collect(),
        proofs_ok: 11,
        proofs_failed: 1,
    };
    scrape(metrics_snapshot(), stats)
}

// --- help --------------------------------------------------------------------------------------------------

fn help_texts() -> anyhow::Result<()> {
    let mut text = String::new();
    help(&mut Cli::command(), &mut Vec::new(), &mut text)?;
    golden("help.txt", &text)
}

fn help(command: &mut clap::Command, path: &mut Vec<String>, text: &mut String) -> anyhow::Result<()> {
    path.push(command.get_name().to_owned());
    let mut shown = command
        .clone()
        .term_width(100)
        .bin_name(path.join(" "))
        .mut_args(|argument| argument.hide_env_values(true));
    let shown = shown.render_long_help().to_string();
    ensure!(
        shown.contains("Example"),
        "{}: its help gives no example",
        path.join(" ")
    );
    writeln!(text, "=== {} ===\n{shown}", path.join(" "))?;
    for subcommand in command.get_subcommands_mut() {
        help(subcommand, path, text)?;
    }
    path.pop();
    Ok(())
}

// --- metrics -----------------------------------------------------------------------------------------------

/// Families with their types, and the series of each without their values.
fn metric_names_and_labels() -> anyhow::Result<()> {
    let text = full_scrape().replace(serve::VERSION, "VERSION");
    let mut shown = String::new();
    for line in text.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            writeln!(shown, "{family}")?;
        } else if !line.starts_with('#') {
            let (series, _) = line.rsplit_once(' ').context("a sample has a value")?;
            writeln!(shown, "  {series}")?;
        }
    }
    golden("metrics.txt", &shown)
}

fn metrics_pass_promtool() -> anyhow::Result<()> {
    let mut promtool = match Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(promtool) => promtool,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(skip(Reason::NoProgram("promtool")));
        }
        Err(error) => return Err(error.into()),
    };
    promtool
        .stdin
        .take()
        .context("piped")?
        .write_all(full_scrape().as_bytes())?;
    let output = promtool.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && said.trim().is_empty(),
        "promtool says: {said}"
    );
    Ok(())
}

/// A dashboard must not wait for the first hold to learn that the series exists.
fn closed_families_are_there_from_the_start() -> anyhow::Result<()> {
    let series = |text: &str| -> BTreeSet<String> {
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned()))
            .collect()
    };
    let empty = series(&scrape(MetricsSnapshot::default(), Stats::default()));
    let open = [
        "holdfast_policy_",
        "holdfast_map_",
        "holdfast_source_last_activity_",
        "holdfast_saved_set_",
    ];
    let missing: Vec<String> = series(&full_scrape())
        .into_iter()
        .filter(|series| !open.iter().any(|open| series.starts_with(open)))
        .filter(|series| !empty.contains(series))
        .collect();
    ensure!(missing.is_empty(), "not there at the start: {missing:?}");
    ensure!(
        !empty.iter().any(|series| series.contains("policy=")),
        "a series without its policy"
    );
    Ok(())
}

/// Name, type and labels of every series that is exported are those of the list that the documentation is made from.
fn families_are_as_documented() -> anyhow::Result<()> {
    let text = full_scrape();
    let exported: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .collect();
    let listed: Vec<String> = FAMILIES
        .iter()
        .map(|family| format!("{} {}", family.name, format!("{:?}", family.kind).to_lowercase()))
        .collect();
    ensure!(exported == listed, "exported {exported:?}\nlisted {listed:?}");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').context("a sample has a value")?;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let family = FAMILIES
            .iter()
            .find(|family| {
                let rest = name.strip_prefix(family.name);
                rest.is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest))
            })
            .with_context(|| format!("{name} is not listed"))?;
        let labels: Vec<(&str, &str)> = labels
            .trim_end_matches('}')
            .split(',')
            .filter_map(|label| label.split_once('='))
            .filter(|(label, _)| *label != "le")
            .collect();
        let names: Vec<&str> = labels.iter().map(|(label, _)| *label).collect();
        let expected: Vec<&str> = family.labels.iter().map(|label| label.name).collect();
        ensure!(names == expected, "{series}: labels {expected:?} are listed");
        for ((_, value), label) in labels.iter().zip(family.labels) {
            if let Values::Closed(values) = label.values {
                let value = value.trim_matches('"');
                ensure!(
                    values().iter().any(|known| known == value),
                    "{series}: {value} is not listed"
                );
            }
        }
    }
    Ok(())
}

/// Policies of a large node.
const MANY: usize = 10_000;
/// Those of them in trouble on a bad day, without a storm.
const TROUBLED: usize = 100;
/// What a scrape may take, twice over: this build is not the one that is shipped.
const SCRAPE_BUDGET: Duration = Duration::from_millis(2 * 10);
/// Series of one policy that is held and behind: five states, three stages, two times.
const SERIES_OF_A_POLICY: usize = 10;

fn f32_a_scrape_of_ten_thousand_policies_is_quick_and_bounded() -> anyhow::Result<()> {
    let constant = count_of(&scrape(MetricsSnapshot::default(), Stats::default()));
    let quick = measured(TROUBLED)?;
    ensure!(
        count_of(&quick.text) == constant + TROUBLED * SERIES_OF_A_POLICY,
        "{} series for {TROUBLED} policies in trouble, {constant} without",
        count_of(&quick.text)
    );
    // All at once: the number of series is that of the policies, and the time follows it.
    let storm = measured(MANY)?;
    ensure!(count_of(&storm.text) == constant + MANY * SERIES_OF_A_POLICY);
    say(format_args!(
        "{MANY} policies: {TROUBLED} in trouble {:?}, {} series, {} bytes; all of them {:?}, {} series, {} bytes",
        quick.best,
        count_of(&quick.text),
        quick.text.len(),
        storm.best,
        count_of(&storm.text),
        storm.text.len()
    ));
    ensure!(quick.best <= SCRAPE_BUDGET, "a scrape takes {:?}", quick.best);
    Ok(())
}

/// Samples of a scrape.
fn count_of(text: &str) -> usize {
    text.lines().filter(|line| !line.starts_with('#')).count()
}

struct Measured {
    best: Duration,
    text: String,
}

/// The best of a few scrapes of a node with so many policies in trouble, with what the engine's task copies for it.
fn measured(troubled: usize) -> anyhow::Result<Measured> {
    let held = policies().remove(0);
    let policies: Vec<PolicyView> = (0..MANY)
        .map(|number| PolicyView {
            name: shop(&format!("policy-{number:05}")),
            // As many error texts as one likes: none becomes a label.
            message: Some(format!("error {}", number % 50)),
            behind_since: Some(at(950)),
            ..held.clone()
        })
        .collect();
    let policies = policies.iter().take(troubled);
    let mut snapshot = metrics_snapshot();
    // What the empty scrape lacks too.
    (snapshot.source_last_activity, snapshot.saved) = (None, None);
    let mut measured = Measured {
        best: Duration::MAX,
        text: String::new(),
    };
    for _ in 0..10 {
        let begun = Instant::now();
        snapshot.policies = policies.clone().map(PolicyFigures::new).collect();
        measured.text = scrape(snapshot.clone(), Stats::default());
        measured.best = measured.best.min(begun.elapsed());
    }
    Ok(measured)
}

fn generated_files_are_current() -> anyhow::Result<()> {
    let stale = codegen::stale()?;
    ensure!(
        stale.is_empty(),
        "{}: run `cargo xtask codegen`",
        stale.join(", ")
    );
    Ok(())
}

// --- JSON and the report -----------------------------------------------------------------------------------

fn status_json() -> anyhow::Result<()> {
    let status = Status::new(&snapshot(), &stamps(), at(10), "kube", "VERSION");
    golden("status.json", &pretty(&status)?)?;
    let mut text = cli::status::node(&status, false);
    text.push_str(&format!("\n--- with --all\n{}", cli::status::node(&status, true)));
    let detail = PolicyDetail::new(&policy_status(), &stamps());
    text.push_str(&format!("\n--- of one policy\n{}", cli::status::policy(&detail)));
    golden("status.txt", &cli::output::plain(&text))?;
    let mut early = snapshot();
    early.summary = Summary {
        waiting_for: vec![Barrier::Objects, Barrier::Links],
        ..Summary::default()
    };
    (early.policies, early.attachments, early.source) = Default::default();
    (early.source_age_ns, early.saved_age_ns) = (None, None);
    let status = Status::new(&early, &stamps(), at(10), "dir", "VERSION");
    golden("status-early.json", &pretty(&status)?)
}

fn policy_json() -> anyhow::Result<()> {
    golden(
        "policy.json",
        &pretty(&PolicyDetail::new(&policy_status(), &stamps()))?,
    )
}

fn wait_json() -> anyhow::Result<()> {
    let wait = |goal, generation| Wait {
        policy: "shop/dns".to_owned(),
        attachment: None,
        goal,
        generation,
        timeout_ms: 0,
    };
    let status = policy_status();
    let waited = [
        Waited::new(Some(&status), None, &wait(Goal::Held, Some(8)), &stamps()),
        Waited::new(None, None, &wait(Goal::Programmed, None), &stamps()),
        Waited::new(
            Some(&status),
            Some(&shop("web-0")),
            &wait(Goal::Programmed, None),
            &stamps(),
        ),
        Waited::new(
            Some(&status),
            Some(&shop("web-9")),
            &wait(Goal::Programmed, None),
            &stamps(),
        ),
    ];
    golden("wait.json", &pretty(&waited)?)
}

fn report_fields() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    runtime()?.block_on(async {
        let (send, receive) = watch::channel(Arc::new(Snapshot::default()));
        let writer = file::spawn(dir.path(), receive, stamps(), WriteCounts::default());
        send.send_replace(Arc::new(snapshot()));
        drop(send);
        writer.await
    })?;
    golden(
        "report.yaml",
        &std::fs::read_to_string(dir.path().join(file::NAME))?,
    )
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
}

// --- exit codes --------------------------------------------------------------------------------------------

/// Runs commands as `main` does, first without an agent, then with one that knows the policies above.
fn exit_codes() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mut text = String::new();
    writeln!(text, "without an agent")?;
    for command in [
        "status",
        "status shop/dns",
        "wait shop/dns --timeout 0s",
        "wait shop/dns --timeout 1s",
        "why shop/dns",
        "diff",
        "attachment list",
        "uninstall",
        "agent log",
        "attachment unregister --ifindex 7 --token 00000000000000ff",
        "attachment register --interface hf-nobody",
    ] {
        writeln!(text, "{} {command}", code(dir.path(), command)?)?;
    }
    let runtime = runtime()?;
    let _inside = runtime.enter();
    let (commands, receiver) = mpsc::channel(16);
    runtime.spawn(drive(receiver));
    let (_reports, reports) = watch::channel(Arc::new(snapshot()));
    let socket = socket::serve(
        Sources {
            driver: Handle::new(commands),
            lanes: LanesHealth::default(),
            links: Arc::new(|| oneshot::channel().1),
            stats: Arc::new(Stats::default),
            looker: Looker::new(Sight),
            reports,
            clock: Arc::new(System),
            stamps: stamps(),
            started: at(10),
            source: "dir",
            all_policies: false,
            foreign_allowed: false,
            log: Control::detached("info"),
        },
        dir.path(),
    )?;
    writeln!(text, "with an agent")?;
    for command in [
        "status",
        "status -o json",
        "status shop/dns",
        "status shop/nobody",
        "wait shop/web --timeout 0s",
        "wait shop/web --generation 2 --timeout 0s",
        "wait shop/dns --timeout 0s",
        "wait shop/dns --for held --timeout 0s",
        "wait shop/mail --for failed --timeout 0s",
        "wait shop/dns --attachment shop/web-0 --timeout 0s",
        "wait shop/dns --attachment shop/web-1 --timeout 0s",
        "wait shop/dns --attachment shop/web-9 --timeout 0s",
        "wait shop/nobody --timeout 0s",
        "why shop/dns",
        "why shop/dns shop/web-0",
        "why shop/dns shop/web-1",
        "why shop/dns shop/web-9",
        "why shop/nobody",
        "diff",
        "diff shop/dns",
        "agent log",
        "agent log debug -o json",
        "agent log --reset",
    ] {
        writeln!(text, "{} {command}", code(dir.path(), command)?)?;
    }
    drop(socket);
    writeln!(text, "wrong words")?;
    for command in [
        "",
        "stat",
        "status dns",
        "wait",
        "wait shop/dns --for served",
        "why",
        "why dns",
        "why shop/dns web-0",
        "diff dns",
        "wait shop/dns --timeout 5",
        "attachment register",
        "attachment register --interface a/b",
        "attachment unregister --ifindex 7 --token 0",
        "agent --attach xdp",
        "agent --delivery peer",
        "agent --source etcd",
        "agent log holdfast=loud",
        "agent log debug --reset",
        "agent --node edge-1 log",
    ] {
        writeln!(text, "{} {command}", code(dir.path(), command)?)?;
    }
    golden("exit-codes.txt", &text)
}

/// Nothing here touches this machine's own directories.
fn code(dir: &Path, command: &str) -> anyhow::Result<i32> {
    let directory = |name: &str| -> [PathBuf; 2] { [format!("--{name}-dir").into(), dir.into()] };
    let mut arguments: Vec<PathBuf> = vec!["holdfast".into()];
    arguments.extend(command.split_whitespace().map(PathBuf::from));
    arguments.extend(["bpffs", "state", "run"].into_iter().flat_map(directory));
    arguments.extend(["--config".into(), "/dev/null".into()]);
    Ok(match cli::read(arguments) {
        Ok(invocation) => match cli::run(invocation) {
            cli::Answer::Yes => 0,
            cli::Answer::No => 1,
            cli::Answer::Unknown => 2,
        },
        Err(Refusal::Words(error)) => error.exit_code(),
        Err(refusal) => bail!("{refusal}"),
    })
}

async fn drive(mut commands: mpsc::Receiver<driver::Command>) {
    while let Some(command) = commands.recv().await {
        match command {
            driver::Command::Ping(reply) => {
                let _ = reply.send(());
            }
            driver::Command::Snapshot(reply) => {
                let _ = reply.send(snapshot());
            }
            driver::Command::Explain(name, asked, reply) => {
                let _ = reply.send(explained(&name, &asked));
            }
            driver::Command::Compare(_, reply) => {
                let _ = reply.send(Ok(compared()));
            }
            driver::Command::Metrics(_, reply) => {
                let _ = reply.send(metrics_snapshot());
            }
            driver::Command::Policy(name, reply) => {
                let found = policies().into_iter().find(|policy| policy.name == name);
                let _ = reply.send(found.map(|policy| PolicyStatus {
                    policy,
                    intents: policy_status().intents,
                }));
            }
            driver::Command::Poke { reply, .. } => {
                let _ = reply.send(Settled::Done);
            }
        }
    }
}
