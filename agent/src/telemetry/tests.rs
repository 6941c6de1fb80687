use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_engine::model::{
    Boot, FailReason, Happening, HoldReason, Level, LogLine, Now, ObjectName, State,
};

use super::limit::{BURST, PER_SECOND};
use super::*;
use crate::clock::Clock;

/// A clock that a test moves.
#[derive(Clone, Default)]
struct Moved(Arc<AtomicU64>);

impl Clock for Moved {
    fn now(&self) -> Now {
        Now {
            boot: Boot(self.0.load(Ordering::Relaxed)),
            wall_ms: 0,
        }
    }
}

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A log, what was written to it, and its clock.
struct Rig {
    subscriber: tracing::Dispatch,
    control: Control,
    buffer: Buffer,
    clock: Moved,
}

impl Rig {
    fn new(format: LogFormat, filter: &str) -> Self {
        let (buffer, clock) = (Buffer::default(), Moved::default());
        let (writer, limit) = (buffer.clone(), Limit::new(Arc::new(clock.clone())));
        let (subscriber, control) = subscriber(format, filter, limit, move || writer.clone()).unwrap();
        Self {
            subscriber: tracing::Dispatch::new(subscriber),
            control,
            buffer,
            clock,
        }
    }

    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        tracing::dispatcher::with_default(&self.subscriber, work)
    }

    fn text(&self) -> String {
        String::from_utf8(self.buffer.0.lock().unwrap().clone()).unwrap()
    }

    fn pass(&self, nanos: u64) {
        self.clock.0.fetch_add(nanos, Ordering::Relaxed);
    }
}

fn written(format: LogFormat, filter: &str, lines: &[LogLine]) -> String {
    let rig = Rig::new(format, filter);
    rig.during(|| lines.iter().for_each(log));
    rig.text()
}

fn line(level: Level, what: Happening) -> LogLine {
    let name = |name: &str| ObjectName {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    };
    LogLine {
        level,
        what,
        policy: Some(name("dns")),
        consumer: Some(name("web-0")),
        ifindex: Some(7),
    }
}

#[test]
fn a_line_says_what_people_search_for() {
    let text = written(
        LogFormat::Human,
        "info",
        &[
            line(Level::Info, Happening::HoldStarted(HoldReason::IdentityMissing)),
            line(
                Level::Info,
                Happening::HoldEnded(1_500_000_000, State::Programmed),
            ),
            line(Level::Debug, Happening::Programmed),
            line(
                Level::Warn,
                Happening::Failed(FailReason::MapFull, "map services is full".to_owned()),
            ),
        ],
    );
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    for (line, parts) in lines.iter().zip([
        " INFO holdfast::engine: held policy=shop/dns consumer=shop/web-0 ifindex=7 reason=\"IdentityMissing\"",
        "no longer held policy=shop/dns consumer=shop/web-0 ifindex=7 state=\"Programmed\" duration=1.5s",
        " WARN holdfast::engine: failed policy=shop/dns consumer=shop/web-0 ifindex=7 reason=\"MapFull\" \
         detail=\"map services is full\"",
    ]) {
        assert!(line.ends_with(parts), "{line}\n{parts}");
    }
}

#[test]
fn json_lines_have_the_same_fields() {
    let text = written(
        LogFormat::Json,
        "info",
        &[line(
            Level::Error,
            Happening::Failed(FailReason::AttachFailed, "EPERM".to_owned()),
        )],
    );
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, expected) in [
        ("level", "ERROR"),
        ("message", "failed"),
        ("policy", "shop/dns"),
        ("consumer", "shop/web-0"),
        ("reason", "AttachFailed"),
        ("detail", "EPERM"),
    ] {
        assert_eq!(value[field], expected, "{text}");
    }
    assert_eq!(value["ifindex"], 7);
}

#[test]
fn a_summary_is_four_numbers() {
    let summary = LogLine {
        level: Level::Info,
        what: Happening::Summary {
            programmed: 3,
            held: 2,
            failed: 1,
            pending: 0,
        },
        policy: None,
        consumer: None,
        ifindex: None,
    };
    let text = written(LogFormat::Human, "info", &[summary]);
    assert!(
        text.ends_with("intents on this node programmed=3 held=2 failed=1 pending=0\n"),
        "{text}"
    );
}

#[test]
fn a_filter_that_makes_no_sense_is_refused() {
    assert!(filter("holdfast=loud").is_err());
    assert_eq!(
        filter("info,holdfast::netlink=debug").unwrap(),
        "info,holdfast::netlink=debug"
    );
}

// --- levels at run time --------------------------------------------------------------------------------------

#[test]
fn levels_change_while_it_runs_and_go_back() {
    let rig = Rig::new(LogFormat::Human, "info");
    let say = |number: u32| rig.during(|| tracing::debug!(number, "a detail"));
    say(1);
    rig.control.set(Some("warn,holdfast::telemetry=debug")).unwrap();
    say(2);
    assert_eq!(rig.control.present(), "warn,holdfast::telemetry=debug");
    // What makes no sense changes nothing.
    assert!(rig.control.set(Some("holdfast=loud")).is_err());
    say(3);
    rig.control.set(None).unwrap();
    say(4);
    assert_eq!(
        (rig.control.present().as_str(), rig.control.configured()),
        ("info", "info")
    );
    let text = rig.text();
    for (number, written) in [(1, false), (2, true), (3, true), (4, false)] {
        assert_eq!(text.contains(&format!("number={number}")), written, "{text}");
    }
}

// --- text of others ------------------------------------------------------------------------------------------

const FORGED: &str =
    "web\n2026-01-01T00:00:00Z ERROR holdfast: forged\r\u{1b}[2K\u{9b}1A\u{2028}x \" state=\"Programmed";

fn say_forged() {
    tracing::info!(
        name = %FORGED,
        text = FORGED,
        debugged = ?FORGED,
        "said {FORGED}"
    );
    log(&line(
        Level::Warn,
        Happening::Failed(FailReason::AttachFailed, FORGED.to_owned()),
    ));
}

#[test]
fn no_text_makes_a_line_or_a_field_of_its_own() {
    let rig = Rig::new(LogFormat::Human, "info");
    rig.during(say_forged);
    let text = rig.text();
    assert_eq!(text.lines().count(), 2, "{text}");
    for line in text.lines() {
        assert!(!line.contains(|char: char| char.is_control()), "{line:?}");
    }
    // Behind the message each field is one word or one text in quotes.
    for field in [" name=\"web", " text=\"web", " debugged=\"web", " detail=\"web"] {
        assert!(text.contains(field), "{field}: {text}");
    }
    let (_, fields) = text.lines().next().unwrap().split_once(" name=").unwrap();
    assert!(!fields.contains(" state=\"Programmed"), "{fields}");
}

#[test]
fn nor_does_it_in_json() {
    let rig = Rig::new(LogFormat::Json, "info");
    rig.during(say_forged);
    let text = rig.text();
    assert!(
        !text
            .trim_end_matches('\n')
            .replace('\n', "")
            .contains(|char: char| char.is_control())
    );
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!(lines[0]["name"], FORGED);
    assert_eq!(lines[0]["text"], FORGED);
    assert_eq!(lines[0]["message"], format!("said {FORGED}"));
    assert_eq!(
        (&lines[1]["detail"], &lines[1]["reason"]),
        (&FORGED.into(), &"AttachFailed".into())
    );
}

// --- storms --------------------------------------------------------------------------------------------------

/// A line of consumer number so and so.
fn of(number: u64, level: Level, what: Happening) -> LogLine {
    let mut line = line(level, what);
    line.consumer = Some(ObjectName {
        namespace: "shop".to_owned(),
        name: format!("web-{number}"),
    });
    line
}

#[test]
fn ten_thousand_changes_within_a_second_are_some_lines_and_one_that_counts_the_rest() {
    for format in [LogFormat::Human, LogFormat::Json] {
        let rig = Rig::new(format, "info");
        rig.during(|| {
            for number in 0..5_000 {
                log(&of(
                    number,
                    Level::Info,
                    Happening::HoldStarted(HoldReason::NoCarrier),
                ));
                log(&of(
                    number,
                    Level::Info,
                    Happening::HoldEnded(1, State::Programmed),
                ));
                rig.pass(Boot::SECOND / 5_000);
            }
            // Another kind is not kept from speaking.
            log(&of(0, Level::Warn, Happening::CleanupFailed("EIO".to_owned())));
            rig.control.flush();
            rig.control.flush();
        });
        let text = rig.text();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count() as u64;
        let most = BURST + PER_SECOND;
        let kept = count(": held policy") + count(":\"held\"");
        assert!((BURST..=most).contains(&kept), "{kept}");
        assert!(
            text.lines().count() as u64 <= 2 * most + 2,
            "{}",
            text.lines().count()
        );
        assert_eq!(count("a cleanup failed"), 1);
        assert_eq!(count("lines were left out"), 1);
        let left_out = text.lines().last().unwrap();
        let each = 5_000 - kept;
        assert!(
            left_out.contains(&format!("held: {each}, no longer held: {each}")),
            "{left_out}"
        );
        assert!(left_out.contains(&(2 * each).to_string()), "{left_out}");
        assert_eq!(count("ERROR"), 0);
    }
}

#[test]
fn after_a_storm_lines_come_again() {
    let rig = Rig::new(LogFormat::Human, "info");
    let storm = || (0..BURST + 100).for_each(|number| log(&of(number, Level::Info, Happening::Programmed)));
    rig.during(storm);
    assert_eq!(rig.text().lines().count() as u64, BURST);
    rig.pass(3 * Boot::SECOND);
    rig.during(storm);
    assert_eq!(rig.text().lines().count() as u64, BURST + 3 * PER_SECOND);
    rig.pass(600 * Boot::SECOND);
    rig.during(storm);
    assert_eq!(rig.text().lines().count() as u64, 2 * BURST + 3 * PER_SECOND);
}

#[test]
fn lines_of_other_parts_are_limited_by_their_place() {
    let rig = Rig::new(LogFormat::Human, "info");
    rig.during(|| {
        for number in 0..2 * BURST {
            tracing::warn!(number, "one place");
            tracing::warn!(number, "another place");
        }
        rig.control.flush();
    });
    let text = rig.text();
    assert_eq!(text.lines().count() as u64, 2 * BURST + 1);
    assert!(text.contains("holdfast::telemetry::tests:"), "{text}");
}

#[test]
fn f29_two_hundred_holds_and_their_changes_are_a_line_each() {
    let rig = Rig::new(LogFormat::Human, "info");
    let held = |what: Happening| (0..200).for_each(|number| log(&of(number, Level::Info, what.clone())));
    rig.during(|| {
        held(Happening::HoldStarted(HoldReason::InterfaceMissing));
        for _ in 0..60 {
            rig.pass(60 * Boot::SECOND);
            log(&LogLine {
                policy: None,
                consumer: None,
                ifindex: None,
                ..line(
                    Level::Info,
                    Happening::Summary {
                        programmed: 0,
                        held: 200,
                        failed: 0,
                        pending: 0,
                    },
                )
            });
        }
        held(Happening::HoldChanged(HoldReason::InterfaceDown));
        rig.control.flush();
    });
    let text = rig.text();
    assert_eq!(text.lines().count(), 200 + 60 + 200);
    assert!(text.lines().all(|line| line.contains(" INFO ")), "{text}");
    for number in 0..200 {
        let of = text
            .lines()
            .filter(|line| line.contains(&format!("consumer=shop/web-{number} ")))
            .count();
        assert_eq!(of, 2, "{number}");
    }
}

#[test]
fn f32_fifty_texts_are_one_kind() {
    let rig = Rig::new(LogFormat::Human, "info");
    rig.during(|| {
        for number in 0..10_000 {
            let text = format!("errno {}", number % 50);
            log(&of(
                number,
                Level::Warn,
                Happening::Failed(FailReason::AttachFailed, text),
            ));
            // A day's worth of them.
            rig.pass(86_400 * Boot::SECOND / 10_000);
        }
    });
    // Spread over a day nothing is lost.
    assert_eq!(rig.text().lines().count(), 10_000);
    rig.during(|| {
        for number in 0..10_000 {
            let text = format!("errno {}", number % 50);
            log(&of(
                number,
                Level::Warn,
                Happening::Failed(FailReason::AttachFailed, text),
            ));
        }
        rig.control.flush();
    });
    let text = rig.text();
    assert_eq!(text.lines().count() as u64, 10_000 + BURST + 1);
    let last = text.lines().last().unwrap();
    assert!(last.ends_with("count=9500 kinds=\"failed: 9500\""), "{last}");
}
