//! The directory source, from files to changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::model::{Attachment, FailReason, ObjectChange, ObjectName, Policy};
use proptest::prelude::*;
use tempfile::TempDir;
use tokio::sync::mpsc;

use super::scan::{Dirty, Scanner};
use super::{Config, LEDGER, spawn};
use crate::clock::System;
use crate::source::SourceNews;

/// What the engine would know: every change applied, and checked on the way.
#[derive(Debug, Default)]
struct World {
    attachments: BTreeMap<String, Attachment>,
    policies: BTreeMap<String, Policy>,
    /// The last good one of each.
    good: BTreeMap<String, Policy>,
    /// No pair names two contents.
    pairs: BTreeMap<(String, u64), String>,
}

impl World {
    fn apply(&mut self, changes: Vec<ObjectChange>) {
        for change in changes {
            match change {
                ObjectChange::Attachment(attachment) => {
                    let content = format!("{} {:?}", attachment.interface, attachment.labels);
                    self.pair(&attachment.uid.0, attachment.generation, content);
                    self.attachments.insert(attachment.name.to_string(), attachment);
                }
                ObjectChange::AttachmentGone(name) => {
                    self.attachments.remove(&name.to_string()).expect("known");
                }
                ObjectChange::Policy(policy) => {
                    let content = format!("{:?}", policy.content);
                    self.pair(&policy.uid.0, policy.generation, content);
                    let name = policy.name.to_string();
                    if policy.content.is_ok() {
                        self.good.insert(name.clone(), policy.clone());
                    }
                    self.policies.insert(name, policy);
                }
                ObjectChange::PolicyGone(name) => {
                    self.policies.remove(&name.to_string()).expect("known");
                    self.good.remove(&name.to_string());
                }
            }
        }
    }

    fn pair(&mut self, uid: &str, generation: u64, content: String) {
        let before = self.pairs.insert((uid.to_owned(), generation), content.clone());
        if let Some(before) = before {
            assert_eq!(before, content, "{uid}/{generation} names two contents");
        }
    }
}

struct Rig {
    files: TempDir,
    state: TempDir,
    scanner: Scanner,
    world: World,
}

impl Rig {
    fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        let scanner = Scanner::new(files.path(), "edge-1", state.path());
        Self {
            files,
            state,
            scanner,
            world: World::default(),
        }
    }

    /// Another life over the same files and state. The pairs of all lives are checked against each other.
    fn restart(&mut self) {
        self.scanner = Scanner::new(self.files.path(), "edge-1", self.state.path());
        self.world = World {
            pairs: std::mem::take(&mut self.world.pairs),
            ..World::default()
        };
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.files.path().join(name), text).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.files.path().join(name)).unwrap();
    }

    fn scan(&mut self) -> Vec<ObjectChange> {
        let changes = self.scanner.scan(&Dirty::All, 1_000).unwrap();
        self.world.apply(changes.clone());
        changes
    }

    fn problems(&self) -> Vec<String> {
        self.scanner
            .status()
            .problems
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    fn attachment(&self, name: &str) -> &Attachment {
        &self.world.attachments[name]
    }

    fn policy(&self, name: &str) -> &Policy {
        &self.world.policies[name]
    }
}

fn attachment(name: &str, interface: &str) -> String {
    format!(
        "apiVersion: holdfast.dev/v1alpha1\nkind: Attachment\nmetadata: {{namespace: shop, name: {name}, labels: {{app: {name}}}}}\n\
         spec: {{node: edge-1, interface: {interface}}}\n"
    )
}

fn policy(name: &str, port: u32) -> String {
    format!(
        "apiVersion: holdfast.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{namespace: shop, name: {name}}}\n\
         spec:\n  consumers: {{matchLabels: {{app: web}}}}\n  producers: {{matchLabels: {{app: dns}}}}\n  \
         destinations: [{{address: 10.96.0.10, protocol: UDP, port: {port}}}]\n"
    )
}

fn versioned(text: &str, version: &str) -> String {
    text.replace("namespace: shop,", &format!("namespace: shop, {version},"))
}

fn shop(name: &str) -> ObjectName {
    ObjectName {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
    }
}

#[test]
fn f47_a_clock_that_is_set_back_makes_nobody_older() {
    let mut rig = Rig::new();
    let mut seen = |name: &str, now_ms| {
        rig.write(&format!("{name}.yaml"), &policy(name, 53));
        let changes = rig.scanner.scan(&Dirty::All, now_ms).unwrap();
        rig.world.apply(changes);
        if name == "third" {
            // The next life knows it from what the last one kept.
            rig.restart();
        }
    };
    seen("first", 600_000);
    seen("second", 1_000);
    seen("third", 2_000);
    seen("fourth", 3_000);
    seen("fifth", 700_000);
    let ages = ["first", "second", "third", "fourth", "fifth"];
    let ages = ages.map(|name| rig.policy(&format!("shop/{name}")).created_ms);
    assert!(ages.is_sorted_by(|older, younger| older < younger), "{ages:?}");
    assert_eq!((ages[0], ages[4]), (600_000, 700_000));
}

#[test]
fn a_scan_is_the_difference_to_what_was_in_force() {
    let mut rig = Rig::new();
    rig.write(
        "all.yaml",
        &format!("{}---\n{}", attachment("web", "hfweb0"), policy("dns", 53)),
    );
    let changes = rig.scan();
    assert_eq!(changes.len(), 2);
    assert_eq!(rig.attachment("shop/web").interface, "hfweb0");
    assert_eq!(rig.attachment("shop/web").created_ms, 1_000);
    let first = rig.policy("shop/dns").clone();
    assert_eq!(first.generation, 1);
    assert_eq!(rig.scan(), []);

    // Another spelling of the same content is no change.
    rig.write(
        "all.yaml",
        &format!(
            "# a comment\n{}---\n{}",
            policy("dns", 53),
            attachment("web", "hfweb0")
        ),
    );
    assert_eq!(rig.scan(), []);

    rig.write(
        "all.yaml",
        &format!("{}---\n{}", attachment("web", "hfweb0"), policy("dns", 54)),
    );
    let changes = rig.scan();
    assert!(matches!(&changes[..], [ObjectChange::Policy(_)]));
    let second = rig.policy("shop/dns").clone();
    assert_eq!((second.uid, second.generation), (first.uid, 2));

    rig.remove("all.yaml");
    assert_eq!(
        rig.scan(),
        [
            ObjectChange::AttachmentGone(shop("web")),
            ObjectChange::PolicyGone(shop("dns"))
        ]
    );
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn destinations_in_another_order_are_another_generation_and_equal_content() {
    let mut rig = Rig::new();
    let text = policy("dns", 53);
    let two = text.replace("port: 53}]", "port: 53}, {address: 10.0.0.1}]");
    let swapped = text.replace("[{address", "[{address: 10.0.0.1}, {address");
    rig.write("p.yaml", &two);
    rig.scan();
    let before = rig.policy("shop/dns").clone();
    rig.write("p.yaml", &swapped);
    rig.scan();
    let after = rig.policy("shop/dns");
    assert_eq!(after.generation, 2);
    assert_eq!(after.content, before.content);
}

#[test]
fn a_label_of_an_attachment_is_part_of_what_its_generation_stands_for() {
    let mut rig = Rig::new();
    rig.write("a.yaml", &attachment("web", "hfweb0"));
    rig.scan();
    let before = rig.attachment("shop/web").clone();
    rig.write(
        "a.yaml",
        &attachment("web", "hfweb0").replace("app: web", "app: db"),
    );
    rig.scan();
    let after = rig.attachment("shop/web");
    assert_eq!((&after.uid, after.generation), (&before.uid, 2));
    assert_ne!(after.covers, before.covers);
}

#[test]
fn uid_generation_and_age_survive_a_restart_and_an_edit_meanwhile() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("dns", 53));
    rig.write("a.yaml", &attachment("web", "hfweb0"));
    rig.scan();
    let policy_before = rig.policy("shop/dns").clone();
    let attachment_before = rig.attachment("shop/web").clone();

    rig.restart();
    rig.scan();
    assert_eq!(rig.policy("shop/dns"), &policy_before);
    assert_eq!(rig.attachment("shop/web"), &attachment_before);

    rig.write("p.yaml", &policy("dns", 54));
    rig.restart();
    rig.scan();
    let after = rig.policy("shop/dns");
    assert_eq!((&after.uid, after.generation), (&policy_before.uid, 2));
    assert_eq!(after.created_ms, policy_before.created_ms);
}

#[test]
fn a_file_that_went_and_came_back_is_another_object() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("dns", 53));
    rig.scan();
    let before = rig.policy("shop/dns").uid.clone();
    rig.remove("p.yaml");
    rig.scan();
    rig.write("p.yaml", &policy("dns", 53));
    rig.scan();
    assert_ne!(rig.policy("shop/dns").uid, before);

    // The same while the agent was down.
    let before = rig.policy("shop/dns").uid.clone();
    let text = policy("dns", 53);
    rig.remove("p.yaml");
    rig.restart();
    rig.scan();
    rig.write("p.yaml", &text);
    rig.scan();
    assert_ne!(rig.policy("shop/dns").uid, before);
}

#[test]
fn lost_state_is_new_uids() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("dns", 53));
    rig.scan();
    let before = rig.policy("shop/dns").uid.clone();
    fs::remove_file(rig.state.path().join(LEDGER)).unwrap();
    rig.restart();
    rig.scan();
    assert_ne!(rig.policy("shop/dns").uid, before);
}

#[test]
fn state_that_is_removed_under_a_running_agent_is_written_anew() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("a", 53));
    rig.write("q.yaml", &policy("b", 53));
    rig.scan();
    let before = rig.policy("shop/a").clone();
    fs::remove_file(rig.state.path().join(LEDGER)).unwrap();
    rig.write("q.yaml", &policy("b", 54));
    rig.scan();
    assert_eq!(rig.problems(), [""; 0]);
    rig.restart();
    rig.scan();
    assert_eq!(rig.policy("shop/a"), &before);
    assert_eq!(rig.policy("shop/b").generation, 2);
}

#[test]
fn damaged_state_is_said_and_costs_only_what_is_damaged() {
    let mut rig = Rig::new();
    for name in ["a", "b", "c"] {
        rig.write(&format!("{name}.yaml"), &policy(name, 53));
    }
    rig.scan();
    let uids = |rig: &Rig| ["a", "b", "c"].map(|name| rig.policy(&format!("shop/{name}")).uid.clone());
    let before = uids(&rig);
    let path = rig.state.path().join(LEDGER);
    let text = fs::read_to_string(&path).unwrap();
    let (good, bad): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| !line.contains("\"name\":\"b\""));
    assert_eq!(bad.len(), 1);
    let damaged = bad[0].replace("\"generation\":1", "\"generation\":2");
    fs::write(&path, format!("{}\n{damaged}\n", good.join("\n"))).unwrap();
    rig.restart();
    rig.scan();
    let after = uids(&rig);
    assert_eq!((&after[0], &after[2]), (&before[0], &before[2]));
    assert_ne!(after[1], before[1]);
    assert_eq!(rig.problems().len(), 1);
    assert!(
        rig.problems()[0].contains("1 damaged lines are left out"),
        "{:?}",
        rig.problems()
    );

    // Cut short in the last line, as by a crash: not even worth a word.
    let text = fs::read(&path).unwrap();
    fs::write(&path, [&text[..], b"0123"].concat()).unwrap();
    rig.restart();
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn a_given_generation_never_names_two_contents_and_never_goes_back() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &versioned(&policy("dns", 53), "uid: u1, generation: 3"));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").uid.0, "u1");
    assert_eq!(rig.policy("shop/dns").generation, 3);

    rig.write("p.yaml", &versioned(&policy("dns", 54), "uid: u1, generation: 3"));
    assert_eq!(rig.scan(), []);
    assert_eq!(
        rig.problems(),
        [
            "p.yaml:1:1: RoutePolicy shop/dns: metadata.generation: 3 was seen with another content: raise it, or leave it out"
        ]
    );
    rig.restart();
    // The last good one is told, and it is what generation 3 stood for.
    assert_eq!(rig.scan().len(), 1);
    assert_eq!(rig.policy("shop/dns").generation, 3);
    assert!(format!("{:?}", rig.policy("shop/dns").content).contains("port: 53"));

    rig.write("p.yaml", &versioned(&policy("dns", 54), "uid: u1, generation: 4"));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").generation, 4);
    assert_eq!(rig.problems(), [""; 0]);
    rig.write("p.yaml", &versioned(&policy("dns", 53), "uid: u1, generation: 3"));
    assert_eq!(rig.scan(), []);
    assert!(rig.problems()[0].contains("3 is older than 4, which was seen already"));
}

#[test]
fn a_given_uid_goes_on_counting_where_it_was() {
    let mut rig = Rig::new();
    let with = |uid: &str, port| versioned(&policy("dns", port), &format!("uid: {uid}"));
    rig.write("p.yaml", &with("u1", 53));
    rig.scan();
    rig.write("p.yaml", &with("u2", 53));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").generation, 1);
    rig.restart();
    rig.write("p.yaml", &with("u1", 54));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").uid.0, "u1");
    assert_eq!(rig.policy("shop/dns").generation, 2);
    rig.remove("p.yaml");
    rig.scan();
    rig.write("p.yaml", &with("u1", 54));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").generation, 2);
}

#[test]
fn a_uid_belongs_to_one_object() {
    let mut rig = Rig::new();
    rig.write("a.yaml", &versioned(&policy("a", 53), "uid: u1"));
    rig.write("b.yaml", &versioned(&policy("b", 53), "uid: u1"));
    rig.scan();
    assert_eq!(rig.world.policies.len(), 1);
    assert_eq!(
        rig.problems(),
        ["b.yaml:1:1: RoutePolicy shop/b: metadata.uid: u1 is the uid of RoutePolicy shop/a"]
    );
    rig.remove("a.yaml");
    rig.scan();
    assert_eq!(rig.problems(), [""; 0]);
    assert_eq!(rig.policy("shop/b").uid.0, "u1");
}

#[test]
fn a_syntax_error_keeps_the_file_and_nothing_else() {
    let mut rig = Rig::new();
    rig.write(
        "a.yaml",
        &format!("{}---\n{}", attachment("web", "hfweb0"), policy("dns", 53)),
    );
    rig.write("b.yaml", &attachment("db", "hfdb0"));
    rig.scan();
    rig.write(
        "a.yaml",
        &format!("{}---\nkind: [\n", attachment("web", "hfweb1")),
    );
    rig.write("b.yaml", &attachment("db", "hfdb1"));
    let changes = rig.scan();
    assert!(matches!(&changes[..], [ObjectChange::Attachment(a)] if a.interface == "hfdb1"));
    let problem = &rig.scanner.status().problems[0];
    assert_eq!(problem.file, "a.yaml");
    assert!(
        problem.line.is_some_and(|line| (6..=7).contains(&line)),
        "{problem:?}"
    );
    assert!(problem.excerpt.is_some());

    // A restart does not change that: what the file said last is in the state directory.
    rig.restart();
    let changes = rig.scan();
    assert_eq!(changes.len(), 3);
    assert_eq!(rig.attachment("shop/web").interface, "hfweb0");
    assert_eq!(rig.policy("shop/dns").generation, 1);

    rig.write("a.yaml", &attachment("web", "hfweb2"));
    let changes = rig.scan();
    assert!(matches!(
        &changes[..],
        [ObjectChange::Attachment(a), ObjectChange::PolicyGone(_)] if a.interface == "hfweb2" && a.generation == 2
    ));
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn a_file_without_a_document_is_broken_not_empty() {
    let mut rig = Rig::new();
    rig.write("a.yaml", &attachment("web", "hfweb0"));
    rig.scan();
    for text in ["", "# later\n", "---\n---\n"] {
        rig.write("a.yaml", text);
        assert_eq!(rig.scan(), []);
        assert_eq!(
            rig.problems(),
            ["a.yaml: no document: to delete its objects, delete the file"]
        );
    }
    fs::write(rig.files.path().join("a.yaml"), b"a\nb\xff").unwrap();
    assert_eq!(rig.scan(), []);
    assert_eq!(rig.problems(), ["a.yaml: line 2 is no UTF-8"]);
}

#[test]
fn a_bad_policy_is_refused_at_its_own_generation() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("dns", 53));
    rig.scan();
    let good = rig.policy("shop/dns").clone();
    rig.write("p.yaml", &policy("dns", 0));
    rig.scan();
    let refused = rig.policy("shop/dns").clone();
    assert_eq!((&refused.uid, refused.generation), (&good.uid, 2));
    let refusal = refused.content.unwrap_err();
    assert_eq!(refusal.reason, FailReason::Invalid);
    assert_eq!(
        refusal.message,
        "spec.destinations[0].port: a service needs one with protocol UDP"
    );
    assert!(refusal.consumers.is_some());
    assert_eq!(
        rig.problems(),
        [
            "p.yaml:7:55: RoutePolicy shop/dns: spec.destinations[0].port: a service needs one with protocol UDP"
        ]
    );

    // A new life first says what stays in force, then that it is refused.
    rig.restart();
    let changes = rig.scan();
    assert!(matches!(
        &changes[..],
        [ObjectChange::Policy(first), ObjectChange::Policy(second)]
            if *first == good && second.generation == 2 && second.content.is_err()
    ));

    rig.write("p.yaml", &policy("dns", 53));
    rig.scan();
    let mended = rig.policy("shop/dns");
    assert_eq!((mended.generation, &mended.content), (3, &good.content));
}

#[test]
fn typos_and_values_of_another_release_are_told_apart() {
    let mut rig = Rig::new();
    let good = policy("dns", 53);
    for (text, reason, message) in [
        (
            good.replace("  producers", "  producer"),
            FailReason::Invalid,
            "spec.producer: unknown field `producer`, expected one of",
        ),
        (
            format!("{good}  delivery: Bounce\n"),
            FailReason::Unsupported,
            "spec.delivery: unknown value \"Bounce\"",
        ),
        (
            good.replace("v1alpha1", "v1alpha2"),
            FailReason::Unsupported,
            "apiVersion: unknown version \"holdfast.dev/v1alpha2\"",
        ),
        (
            good.replace("name: dns", "name: dns, label: {a: b}"),
            FailReason::Invalid,
            "metadata.label: unknown field `label`",
        ),
        (
            format!("{good}extra: 1\n"),
            FailReason::Invalid,
            "extra: unknown field",
        ),
    ] {
        rig.write("p.yaml", &text);
        rig.scan();
        let refusal = rig.policy("shop/dns").content.clone().unwrap_err();
        assert_eq!(refusal.reason, reason, "{text}");
        assert!(refusal.message.starts_with(message), "{}", refusal.message);
    }
    // What an API server adds is no typo.
    rig.write(
        "p.yaml",
        &format!(
            "{}status: {{observedGeneration: 1}}\n",
            good.replace(
                "name: dns",
                "name: dns, resourceVersion: \"5\", creationTimestamp: 2026-01-01T00:00:00Z, managedFields: [{a: 1}]"
            )
        ),
    );
    rig.scan();
    assert!(rig.policy("shop/dns").content.is_ok());
}

#[test]
fn a_bad_attachment_keeps_its_last_good_version_alone() {
    let mut rig = Rig::new();
    let both = |first: &str| format!("{first}---\n{}", attachment("db", "hfdb0"));
    rig.write("a.yaml", &both(&attachment("web", "hfweb0")));
    rig.scan();
    rig.write("a.yaml", &both(&attachment("web", "name-much-too-long")));
    assert_eq!(rig.scan(), []);
    assert_eq!(
        rig.problems(),
        [
            "a.yaml:4:22: Attachment shop/web: spec.interface: \"name-much-too-long\" has 18 bytes, 1 to 15 are allowed"
        ]
    );
    rig.restart();
    rig.scan();
    assert_eq!(rig.attachment("shop/web").interface, "hfweb0");
    assert_eq!(rig.attachment("shop/db").interface, "hfdb0");
}

#[test]
fn a_document_that_cannot_be_told_keeps_what_its_file_no_longer_says() {
    let mut rig = Rig::new();
    rig.write(
        "a.yaml",
        &format!(
            "{}---\n{}",
            attachment("web", "hfweb0"),
            attachment("db", "hfdb0")
        ),
    );
    rig.scan();
    rig.write(
        "a.yaml",
        &format!(
            "{}---\n{}",
            attachment("web", "hfweb0").replace("kind: Attachment", "kind: Atachment"),
            attachment("db", "hfdb1")
        ),
    );
    let changes = rig.scan();
    assert!(matches!(&changes[..], [ObjectChange::Attachment(a)] if a.interface == "hfdb1"));
    assert_eq!(
        rig.problems(),
        ["a.yaml:2:1: kind: must be Attachment or RoutePolicy"]
    );
    rig.write("a.yaml", &attachment("db", "hfdb1"));
    assert_eq!(rig.scan(), [ObjectChange::AttachmentGone(shop("web"))]);
}

#[test]
fn of_two_files_that_say_one_object_the_first_name_counts() {
    let mut rig = Rig::new();
    rig.write("b.yaml", &attachment("web", "hfb"));
    rig.scan();
    let uid = rig.attachment("shop/web").uid.clone();
    rig.write("a.yaml", &attachment("web", "hfa"));
    rig.scan();
    assert_eq!(rig.attachment("shop/web").interface, "hfa");
    assert_eq!(
        rig.problems(),
        ["b.yaml:1:1: Attachment shop/web: also in a.yaml, which comes first by name and counts"]
    );
    // The loser's edits change nothing, and it takes over when the first goes.
    rig.write("b.yaml", &attachment("web", "hfc"));
    assert_eq!(rig.scan(), []);
    rig.remove("a.yaml");
    rig.scan();
    assert_eq!(rig.attachment("shop/web").interface, "hfc");
    assert_eq!(rig.attachment("shop/web").uid, uid);
    assert_eq!(rig.problems(), [""; 0]);

    rig.write(
        "b.yaml",
        &format!("{}---\n{}", attachment("web", "hfc"), attachment("web", "hfd")),
    );
    assert_eq!(rig.scan(), []);
    assert_eq!(
        rig.problems(),
        ["b.yaml:6:1: Attachment shop/web: again; what line 1 says counts"]
    );
}

#[test]
fn attachments_of_other_nodes_do_not_exist_here() {
    let mut rig = Rig::new();
    let elsewhere = attachment("web", "hfweb0").replace("edge-1", "edge-2");
    rig.write("a.yaml", &elsewhere);
    assert_eq!(rig.scan(), []);
    rig.write("a.yaml", &attachment("web", "hfweb0"));
    assert_eq!(rig.scan().len(), 1);
    rig.write("a.yaml", &elsewhere);
    assert_eq!(rig.scan(), [ObjectChange::AttachmentGone(shop("web"))]);
    // Not even its faults.
    rig.write("a.yaml", &elsewhere.replace("hfweb0", "name-much-too-long"));
    assert_eq!(rig.scan(), []);
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn only_yaml_and_json_files_count() {
    let mut rig = Rig::new();
    rig.write(".a.yaml", &attachment("a", "hfa"));
    rig.write("b.yaml~", &attachment("b", "hfb"));
    rig.write("c.yml", &attachment("c", "hfc"));
    rig.write(
        "d.json",
        r#"{"apiVersion": "holdfast.dev/v1alpha1", "kind": "Attachment", "metadata": {"name": "d"},
            "spec": {"node": "edge-1", "interface": "hfd"}}"#,
    );
    fs::create_dir(rig.files.path().join("e.yaml")).unwrap();
    rig.scan();
    let names: Vec<&str> = rig.world.attachments.keys().map(String::as_str).collect();
    assert_eq!(names, ["default/d", "shop/c"]);
}

#[test]
fn an_origin_is_carried_and_an_unreadable_one_is_said() {
    let mut rig = Rig::new();
    let with = |annotations: &str| {
        policy("dns", 53).replace("name: dns", &format!("name: dns, annotations: {{{annotations}}}"))
    };
    rig.write(
        "p.yaml",
        &with("holdfast.dev/origin-uid: hub, holdfast.dev/origin-generation: \"8\""),
    );
    rig.scan();
    assert_eq!(rig.policy("shop/dns").origin.as_ref().unwrap().generation, 8);
    // Another origin is another word, not another generation.
    rig.write(
        "p.yaml",
        &with("holdfast.dev/origin-uid: hub, holdfast.dev/origin-generation: \"9\""),
    );
    assert_eq!(rig.scan().len(), 1);
    assert_eq!(rig.policy("shop/dns").generation, 1);
    rig.write("p.yaml", &with("holdfast.dev/origin-uid: hub"));
    rig.scan();
    assert_eq!(rig.policy("shop/dns").origin, None);
    assert!(rig.policy("shop/dns").content.is_ok());
    assert!(rig.problems()[0].contains("missing beside the origin's uid"));
}

#[test]
fn while_the_state_cannot_be_written_no_version_is_told_twice() {
    let mut rig = Rig::new();
    rig.write("p.yaml", &policy("free", 53));
    rig.write("q.yaml", &versioned(&policy("fixed", 53), "uid: u1"));
    rig.scan();
    let before = rig.policy("shop/free").clone();

    // A directory of the temporary's name is in the way of every write.
    let ledger = rig.state.path().join(LEDGER);
    let saved = fs::read(&ledger).unwrap();
    let obstacle = rig.state.path().join(format!(".{LEDGER}.tmp"));
    fs::create_dir(&obstacle).unwrap();
    rig.restart();
    rig.scan();
    rig.write("p.yaml", &policy("free", 54));
    rig.write("q.yaml", &versioned(&policy("fixed", 54), "uid: u1"));
    rig.scan();
    // The one gets a uid that no later life can know, the other waits.
    assert_ne!(rig.policy("shop/free").uid, before.uid);
    assert_eq!(rig.policy("shop/fixed").generation, 1);
    assert_eq!(rig.problems().len(), 2, "{:?}", rig.problems());
    assert_eq!(fs::read(&ledger).unwrap(), saved);

    // A life later the files say something else again: the pairs are checked against those of all lives.
    rig.write("p.yaml", &policy("free", 55));
    rig.write("q.yaml", &versioned(&policy("fixed", 55), "uid: u1"));
    rig.restart();
    fs::remove_dir(&obstacle).unwrap();
    rig.scan();
    assert_eq!(rig.policy("shop/fixed").generation, 2);
    assert_eq!(rig.problems(), [""; 0]);
}

// --- against a model ---------------------------------------------------------------------------------------

/// What the model does with the files.
#[derive(Clone, Debug)]
enum Step {
    /// File, and the objects in it: name and content.
    Write(usize, Vec<(usize, u32)>),
    Break(usize),
    Remove(usize),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_usize, prop::collection::vec((0..3_usize, 1..4_u32), 1..4)).prop_map(|(file, mut objects)| {
            let mut seen = BTreeSet::new();
            objects.retain(|(name, _)| seen.insert(*name));
            Step::Write(file, objects)
        }),
        1 => (0..3_usize).prop_map(Step::Break),
        2 => (0..3_usize).prop_map(Step::Remove),
        1 => Just(Step::Restart),
    ]
}

const FILES: [&str; 3] = ["a.yaml", "b.json", "c.yml"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any steps the engine knows exactly what the files say, with the first name winning and broken files
    /// keeping what was in force; nothing is told twice; a restart changes no version.
    #[test]
    fn the_sum_of_all_changes_is_what_the_files_say(steps in prop::collection::vec(step(), 1..24)) {
        let mut rig = Rig::new();
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Write(file, objects) => {
                    let text: Vec<String> =
                        objects.iter().map(|(name, port)| policy(&format!("p{name}"), *port)).collect();
                    rig.write(FILES[file], &text.join("---\n"));
                    let said = objects.into_iter().map(|(name, port)| (name, Some(port)));
                    model.files.insert(file, said.collect());
                }
                Step::Break(file) => {
                    rig.write(FILES[file], "kind: {{");
                    for said in model.files.entry(file).or_default().values_mut() {
                        *said = None;
                    }
                }
                Step::Remove(file) => {
                    let _ = fs::remove_file(rig.files.path().join(FILES[file]));
                    model.files.remove(&file);
                }
                Step::Restart => {
                    let before = rig.world.policies.clone();
                    rig.restart();
                    rig.scan();
                    prop_assert_eq!(&rig.world.policies, &before);
                    model.forget_losers();
                }
            }
            rig.scan();
            model.settle();
            prop_assert_eq!(rig.scan(), vec![]);
            let told: BTreeMap<usize, u32> = rig.world.policies.values().map(number_and_port).collect();
            prop_assert_eq!(&told, &model.in_force);
        }
    }
}

/// What should be in force.
#[derive(Debug, Default)]
struct Model {
    /// What each file says of each object; nothing where it is broken and said it before.
    files: BTreeMap<usize, BTreeMap<usize, Option<u32>>>,
    in_force: BTreeMap<usize, u32>,
}

impl Model {
    fn settle(&mut self) {
        let mut now = BTreeMap::new();
        for objects in self.files.values() {
            for (name, said) in objects {
                let in_force = said.or(self.in_force.get(name).copied());
                now.entry(*name).or_insert(in_force.expect("said once"));
            }
        }
        self.in_force = now;
    }

    /// Of a broken file, a new life knows only the objects for which it counted.
    fn forget_losers(&mut self) {
        let mut seen = BTreeSet::new();
        for objects in self.files.values_mut() {
            objects.retain(|name, said| seen.insert(*name) || said.is_some());
        }
    }
}

fn number_and_port(policy: &Policy) -> (usize, u32) {
    let spec = policy.content.as_ref().expect("good");
    match spec.destinations.first() {
        Some(holdfast_engine::model::Destination::Service { port, .. }) => {
            (policy.name.name[1..].parse().expect("a number"), u32::from(*port))
        }
        other => panic!("no service: {other:?}"),
    }
}

// --- with inotify ------------------------------------------------------------------------------------------

struct Live {
    directory: std::path::PathBuf,
    news: mpsc::Receiver<SourceNews>,
    world: World,
    complete: bool,
    problems: Vec<String>,
    failing: bool,
    arrived: Vec<u64>,
    _dirs: [TempDir; 2],
}

impl Live {
    /// Follows `objects` in a directory of its own.
    fn new(prepare: impl FnOnce(&Path)) -> Self {
        let [parent, state] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let directory = parent.path().join("objects");
        fs::create_dir(&directory).unwrap();
        prepare(&directory);
        let (send, news) = mpsc::channel(16);
        let config = Config {
            directory: directory.clone(),
            node: "edge-1".to_owned(),
            state_dir: state.path().to_owned(),
        };
        drop(spawn(config, send, Arc::new(System), Arc::default()));
        Self {
            directory,
            news,
            world: World::default(),
            complete: false,
            problems: Vec::new(),
            failing: false,
            arrived: Vec::new(),
            _dirs: [parent, state],
        }
    }

    /// Takes news until `what` is true.
    async fn until(&mut self, what: impl Fn(&Self) -> bool) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(8);
        while !what(self) {
            let news = tokio::time::timeout_at(deadline, self.news.recv())
                .await
                .unwrap_or_else(|_| panic!("too late: {:?} {:?}", self.world, self.problems))
                .expect("the task runs");
            match news {
                SourceNews::Changes(changes) => self.world.apply(changes),
                SourceNews::Complete => {
                    assert!(!self.complete, "said once");
                    self.complete = true;
                }
                SourceNews::Status(status) => {
                    self.failing = false;
                    self.problems = status.problems.iter().map(ToString::to_string).collect();
                }
                SourceNews::Condition(_) => self.failing = true,
                SourceNews::Arrived(ages) => self.arrived.extend(ages),
                news => panic!("a directory says {news:?}"),
            }
        }
    }

    fn interface(&self, name: &str) -> Option<&str> {
        self.world
            .attachments
            .get(name)
            .map(|attachment| attachment.interface.as_str())
    }
}

#[tokio::test]
async fn files_are_followed_as_editors_and_tools_change_them() {
    let mut live = Live::new(|directory| {
        fs::write(directory.join("a.yaml"), attachment("web", "hf0")).unwrap();
    });
    live.until(|live| live.complete).await;
    assert_eq!(live.interface("shop/web"), Some("hf0"));

    // In place.
    fs::write(live.directory.join("a.yaml"), attachment("web", "hf1")).unwrap();
    live.until(|live| live.interface("shop/web") == Some("hf1")).await;
    // Beside it, then renamed over it.
    fs::write(live.directory.join(".a.yaml.swp"), attachment("web", "hf2")).unwrap();
    fs::rename(live.directory.join(".a.yaml.swp"), live.directory.join("a.yaml")).unwrap();
    live.until(|live| live.interface("shop/web") == Some("hf2")).await;
    // A hard link, a symbolic link.
    fs::write(live.directory.join("x.txt"), attachment("db", "hf3")).unwrap();
    fs::hard_link(live.directory.join("x.txt"), live.directory.join("b.yaml")).unwrap();
    live.until(|live| live.interface("shop/db") == Some("hf3")).await;
    fs::write(live.directory.join("y.txt"), attachment("dns", "hf4")).unwrap();
    std::os::unix::fs::symlink("y.txt", live.directory.join("c.yaml")).unwrap();
    live.until(|live| live.interface("shop/dns") == Some("hf4")).await;
    // Moved out, deleted.
    fs::rename(live.directory.join("a.yaml"), live.directory.join("a.off")).unwrap();
    fs::remove_file(live.directory.join("b.yaml")).unwrap();
    live.until(|live| live.world.attachments.len() == 1).await;
}

/// A policy whose origin became what it is so many seconds ago.
fn copied(name: &str, port: u32, age: i64) -> String {
    let time = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(age);
    let annotations = format!("annotations: {{holdfast.dev/origin-time: \"{time}\"}}");
    policy(name, port).replace(&format!("name: {name}"), &format!("name: {name}, {annotations}"))
}

#[tokio::test]
async fn the_way_from_the_origin_is_measured_for_what_arrives() {
    let mut live = Live::new(|directory| {
        fs::write(directory.join("old.yaml"), copied("old", 53, 3_600)).unwrap();
    });
    live.until(|live| live.complete).await;
    for (name, port, age) in [("new", 53, 7), ("old", 54, 5), ("ahead", 53, -60)] {
        fs::write(live.directory.join("staged"), copied(name, port, age)).unwrap();
        fs::rename(
            live.directory.join("staged"),
            live.directory.join(format!("{name}.yaml")),
        )
        .unwrap();
        live.until(|live| live.world.policies.contains_key(&format!("shop/{name}")))
            .await;
    }
    // What has been told already when the next one comes.
    fs::write(live.directory.join("a.yaml"), attachment("web", "hf0")).unwrap();
    live.until(|live| live.interface("shop/web").is_some()).await;
    // What was there before, and what the clocks disagree about, says nothing.
    let seconds: Vec<u64> = live.arrived.iter().map(|nanos| nanos / 1_000_000_000).collect();
    assert_eq!(seconds, [7, 5], "{:?}", live.arrived);
    assert!(live.problems.is_empty(), "{:?}", live.problems);
    let unreadable = copied("bad", 53, 0).replace("origin-time: \"2", "origin-time: \"x");
    fs::write(live.directory.join("b.yaml"), unreadable).unwrap();
    live.until(|live| {
        live.problems
            .iter()
            .any(|problem| problem.contains("no time as in"))
    })
    .await;
}

#[tokio::test]
async fn a_file_that_is_open_for_writing_is_left_alone() {
    use std::io::Write;
    let mut live = Live::new(|directory| {
        fs::write(
            directory.join("a.yaml"),
            format!("{}---\n{}", attachment("web", "hf0"), attachment("db", "hf1")),
        )
        .unwrap();
    });
    live.until(|live| live.complete).await;
    // Truncated, half written, and well formed by accident.
    let mut file = fs::File::create(live.directory.join("a.yaml")).unwrap();
    write!(file, "{}", attachment("web", "hf0")).unwrap();
    file.flush().unwrap();
    fs::write(live.directory.join("b.yaml"), attachment("dns", "hf2")).unwrap();
    live.until(|live| live.interface("shop/dns").is_some()).await;
    assert_eq!(live.interface("shop/db"), Some("hf1"));
    write!(file, "---\n{}", attachment("db", "hf1")).unwrap();
    drop(file);
    fs::write(live.directory.join("b.yaml"), attachment("dns", "hf3")).unwrap();
    live.until(|live| live.interface("shop/dns") == Some("hf3")).await;
    assert_eq!(live.interface("shop/db"), Some("hf1"));
}

#[tokio::test]
async fn a_volume_that_swaps_all_files_by_one_link_is_one_change() {
    fn volume(directory: &Path, name: &str, interface: &str) {
        fs::create_dir(directory.join(name)).unwrap();
        for file in ["a", "b"] {
            let path = directory.join(name).join(format!("{file}.yaml"));
            fs::write(path, attachment(file, &format!("{interface}{file}"))).unwrap();
        }
    }
    let mut live = Live::new(|directory| {
        volume(directory, "..1", "hf1");
        std::os::unix::fs::symlink("..1", directory.join("..data")).unwrap();
        for file in ["a.yaml", "b.yaml"] {
            std::os::unix::fs::symlink(format!("..data/{file}"), directory.join(file)).unwrap();
        }
    });
    live.until(|live| live.complete).await;
    assert_eq!(live.interface("shop/a"), Some("hf1a"));
    volume(&live.directory, "..2", "hf2");
    std::os::unix::fs::symlink("..2", live.directory.join("..data_tmp")).unwrap();
    fs::rename(live.directory.join("..data_tmp"), live.directory.join("..data")).unwrap();
    live.until(|live| live.interface("shop/a") == Some("hf2a")).await;
    assert_eq!(live.interface("shop/b"), Some("hf2b"));
}

#[tokio::test]
async fn a_directory_that_is_gone_is_no_news_and_is_found_again() {
    let mut live = Live::new(|directory| {
        fs::write(directory.join("a.yaml"), attachment("web", "hf0")).unwrap();
    });
    live.until(|live| live.complete).await;
    // Moved away as a whole: nothing was deleted.
    let away = live.directory.with_file_name("away");
    fs::rename(&live.directory, &away).unwrap();
    live.until(|live| live.failing).await;
    assert_eq!(live.interface("shop/web"), Some("hf0"));
    fs::create_dir(&live.directory).unwrap();
    fs::write(live.directory.join("b.yaml"), attachment("db", "hf1")).unwrap();
    live.until(|live| live.interface("shop/db") == Some("hf1")).await;
    live.until(|live| live.interface("shop/web").is_none()).await;
    // And it is watched.
    fs::write(live.directory.join("b.yaml"), attachment("db", "hf2")).unwrap();
    live.until(|live| live.interface("shop/db") == Some("hf2")).await;
}

#[tokio::test]
async fn a_missing_directory_is_not_a_complete_set() {
    let mut live = Live::new(|directory| fs::remove_dir(directory).unwrap());
    live.until(|live| live.failing).await;
    assert!(!live.complete);
    fs::create_dir(&live.directory).unwrap();
    live.until(|live| live.complete).await;
}
