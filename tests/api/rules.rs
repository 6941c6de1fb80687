//! Every rule of the objects with what it takes and what it refuses.

use holdfast::api::v1alpha1::Kind;

/// A rule: fragments of a spec, which replace the fields of that name in [`base`]; `null` takes a field away.
pub(crate) struct Rule {
    /// What it says.
    pub(crate) about: &'static str,
    pub(crate) kind: Kind,
    /// The field that a refusal names.
    pub(crate) field: &'static str,
    pub(crate) accepted: Vec<String>,
    pub(crate) refused: Vec<String>,
}

/// A spec that is right.
pub(crate) const fn base(kind: Kind) -> &'static str {
    match kind {
        Kind::Attachment => "{node: edge-1, interface: hfweb0, identity: pod-1}",
        Kind::RoutePolicy => {
            "{consumers: {matchLabels: {app: web}}, producers: {matchLabels: {app: dns}}, \
             destinations: [{address: 10.96.0.10, protocol: UDP, port: 53}]}"
        }
    }
}

fn attachment<const A: usize, const R: usize>(
    about: &'static str,
    field: &'static str,
    accepted: [&str; A],
    refused: [&str; R],
) -> Rule {
    rule(Kind::Attachment, about, field, accepted, refused)
}

fn policy<const A: usize, const R: usize>(
    about: &'static str,
    field: &'static str,
    accepted: [&str; A],
    refused: [&str; R],
) -> Rule {
    rule(Kind::RoutePolicy, about, field, accepted, refused)
}

fn rule<const A: usize, const R: usize>(
    kind: Kind,
    about: &'static str,
    field: &'static str,
    accepted: [&str; A],
    refused: [&str; R],
) -> Rule {
    Rule {
        about,
        kind,
        field,
        accepted: accepted.map(str::to_owned).into(),
        refused: refused.map(str::to_owned).into(),
    }
}

/// A list of numbered items.
fn list(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(", ")
}

/// All of them.
pub(crate) fn all() -> Vec<Rule> {
    [attachments(), selectors(), destinations(), addresses(), rest()]
        .into_iter()
        .flatten()
        .collect()
}

fn attachments() -> Vec<Rule> {
    let long = |count: usize, text: &str| text.repeat(count);
    vec![
        attachment(
            "a node has the name of one",
            "spec.node",
            [
                "node: edge-1",
                "node: a.b-c.0",
                &format!("node: {}", long(253, "x")),
            ],
            [
                "node: Edge",
                "node: ''",
                "node: a..b",
                "node: -a",
                "node: a-",
                "node: a_b",
                "node: é",
                &format!("node: {}", long(254, "x")),
            ],
        ),
        attachment("a node is named", "", [], ["node: null"]),
        attachment(
            "an interface has a name that the kernel takes",
            "spec.interface",
            [
                "interface: a",
                "interface: eth0.100",
                "interface: 'veth-%x'",
                "interface: abcdefghijklmno",
                "interface: '...'",
            ],
            [
                "interface: ''",
                "interface: '.'",
                "interface: '..'",
                "interface: a b",
                "interface: a/b",
                "interface: 'a:b'",
                "interface: abcdefghijklmnop",
                "interface: ä",
                r#"interface: "a\t""#,
            ],
        ),
        attachment("an interface is named", "", [], ["interface: null"]),
        attachment(
            "an identity is a word of up to 253 bytes, and must be there",
            "spec.identity",
            [
                "identity: 3f0c6a1e-6f0a-4a4e-9a51-0d1c1d3a7b11",
                &format!("identity: {}", long(253, "x")),
                &format!("identity: {}", long(126, "é")),
            ],
            [
                "identity: null",
                "identity: ''",
                "identity: a b",
                r#"identity: "a\tb""#,
                r#"identity: "a\u00a0b""#,
                r#"identity: "a\u2003b""#,
                r#"identity: "a\u0085b""#,
                &format!("identity: {}", long(254, "x")),
                &format!("identity: {}", long(127, "é")),
            ],
        ),
        attachment(
            "addresses are those of a workload, canonical, each once",
            "spec.addresses",
            [
                "addresses: []",
                "addresses: [10.0.0.11, 'fd00::11']",
                "addresses: [169.254.1.1, 'fe80::1']",
                "addresses: ['1::', '::102:304']",
                &format!("addresses: [{}]", list(16, |last| format!("10.0.0.{last}"))),
            ],
            [
                "addresses: [x]",
                "addresses: ['']",
                "addresses: [10.0.0.0/8]",
                "addresses: [10.0.0.01]",
                "addresses: [10.0.0]",
                "addresses: ['FD00::11']",
                "addresses: ['fd00:0::11']",
                "addresses: ['::1.2.3.4']",
                "addresses: ['::ffff:10.0.0.1']",
                "addresses: ['fe80::1%eth0']",
                "addresses: [0.0.0.0]",
                "addresses: [127.0.0.1]",
                "addresses: [224.0.0.1]",
                "addresses: [255.255.255.255]",
                "addresses: ['::']",
                "addresses: ['::1']",
                "addresses: ['ff02::1']",
                "addresses: [10.0.0.1, 10.0.0.1]",
                &format!("addresses: [{}]", list(17, |last| format!("10.0.0.{last}"))),
            ],
        ),
        attachment("fields are those that there are", "", [], ["nodes: edge-1"]),
    ]
}

fn selectors() -> Vec<Rule> {
    let labels = |count| {
        format!(
            "consumers: {{matchLabels: {{{}}}}}",
            list(count, |index| format!("l{index}: x"))
        )
    };
    let expressions = |count| {
        let list = list(count, |index| format!("{{key: l{index}, operator: Exists}}"));
        format!("consumers: {{matchExpressions: [{list}]}}")
    };
    let values = |count| {
        let list = list(count, |index| format!("v{index}"));
        format!("consumers: {{matchExpressions: [{{key: app, operator: In, values: [{list}]}}]}}")
    };
    let key = |key: &str| format!("consumers: {{matchExpressions: [{{key: {key}, operator: Exists}}]}}");
    let label = |key: &str, value: &str| format!("consumers: {{matchLabels: {{{key}: {value}}}}}");
    let (long, longest) = ("x".repeat(64), "x".repeat(63));
    let (prefix, long_prefix) = ("p".repeat(253), "p".repeat(254));
    vec![
        policy(
            "a selector selects by something",
            "spec.consumers",
            [
                "consumers: {matchLabels: {app: web}}",
                "consumers: {matchExpressions: [{key: app, operator: Exists}]}",
                "consumers: {matchLabels: {}, matchExpressions: [{key: app, operator: Exists}]}",
            ],
            [
                "consumers: {}",
                "consumers: {matchLabels: {}}",
                "consumers: {matchLabels: {}, matchExpressions: []}",
            ],
        ),
        policy(
            "so does the one of producers",
            "spec.producers",
            ["producers: {matchExpressions: [{key: app, operator: In, values: [dns]}]}"],
            ["producers: {}", "producers: {matchExpressions: []}"],
        ),
        policy("both are there", "", [], ["consumers: null", "producers: null"]),
        policy(
            "at most 32 labels",
            "spec.consumers.matchLabels",
            [&labels(32)],
            [&labels(33)],
        ),
        policy(
            "at most 16 expressions",
            "spec.consumers.matchExpressions",
            [&expressions(16)],
            [&expressions(17)],
        ),
        policy(
            "at most 64 values",
            "spec.consumers.matchExpressions[0].values",
            [&values(64)],
            [&values(65)],
        ),
        policy(
            "the key of an expression is a label's",
            "spec.consumers.matchExpressions[0].key",
            [
                &key("app"),
                &key("example.org/app"),
                &key("A.b_c-d"),
                &key(&longest),
                &key(&format!("{prefix}/{longest}")),
            ],
            [
                &key("''"),
                &key("a b"),
                &key("-a"),
                &key("a-"),
                &key("/a"),
                &key("a/"),
                &key("a/b/c"),
                &key("Example.org/app"),
                &key("a..b/app"),
                &key(&long),
                &key(&format!("{long_prefix}/app")),
            ],
        ),
        policy(
            "so is that of a label",
            "spec.consumers.matchLabels",
            [
                &label("example.org/app", "web"),
                &label(&format!("{prefix}/{longest}"), "x"),
            ],
            [
                &label("''", "web"),
                &label("a b", "web"),
                &label("Example.org/app", "web"),
                &label(&long, "web"),
                &label(&format!("{long_prefix}/app"), "web"),
            ],
        ),
        policy(
            "values are those of labels",
            "spec.consumers.match",
            [
                &label("app", "''"),
                &label("app", &longest),
                "consumers: {matchExpressions: [{key: app, operator: NotIn, values: ['', a.b]}]}",
            ],
            [
                &label("app", "-x"),
                &label("app", "a b"),
                &label("app", &long),
                "consumers: {matchExpressions: [{key: app, operator: NotIn, values: [x-]}]}",
            ],
        ),
        policy(
            "operators are those that there are, with their values",
            "spec.consumers.matchExpressions[0]",
            [
                "consumers: {matchExpressions: [{key: app, operator: In, values: [a]}]}",
                "consumers: {matchExpressions: [{key: app, operator: NotIn, values: [a, b]}]}",
                "consumers: {matchExpressions: [{key: app, operator: Exists, values: []}]}",
                "consumers: {matchExpressions: [{key: app, operator: DoesNotExist}]}",
            ],
            [
                "consumers: {matchExpressions: [{key: app, operator: In}]}",
                "consumers: {matchExpressions: [{key: app, operator: NotIn, values: []}]}",
                "consumers: {matchExpressions: [{key: app, operator: Exists, values: [a]}]}",
                "consumers: {matchExpressions: [{key: app, operator: DoesNotExist, values: [a]}]}",
                "consumers: {matchExpressions: [{key: app, operator: Gt, values: ['1']}]}",
            ],
        ),
    ]
}

fn destinations() -> Vec<Rule> {
    let some = |count| {
        format!(
            "destinations: [{}]",
            list(count, |last| format!("{{address: 10.0.0.{last}}}"))
        )
    };
    vec![
        policy(
            "1 to 64 destinations",
            "spec.destinations",
            [&some(1), &some(64)],
            ["destinations: []", &some(65)],
        ),
        policy("destinations are there", "", [], ["destinations: null"]),
        policy(
            "destinations are unique by address, protocol and port",
            "spec.destinations",
            [
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 80}, {address: 10.0.0.1, protocol: UDP, port: 80}, \
                 {address: 10.0.0.1, protocol: TCP, port: 81}, {address: 10.0.0.1}]",
                "destinations: [{address: 10.0.0.0/8}, {address: 10.0.0.0/9}]",
            ],
            [
                "destinations: [{address: 10.0.0.1}, {address: 10.0.0.1, protocol: Any, port: 0}]",
                "destinations: [{address: 10.0.0.0/8}, {address: 10.0.0.0/8}]",
                "{delivery: Translate, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 1}, \
                 {address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 2}]}",
            ],
        ),
        policy(
            "a service has a protocol and a port, a prefix neither",
            "spec.destinations[0]",
            [
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 65535}]",
                "destinations: [{address: 'fd00::1', protocol: UDP, port: 1}]",
                "destinations: [{address: 10.0.0.0/8, protocol: Any, port: 0}]",
            ],
            [
                "destinations: [{address: 10.0.0.1, protocol: TCP}]",
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 0}]",
                "destinations: [{address: 10.0.0.1, port: 53}]",
                "destinations: [{address: 10.0.0.1, protocol: SCTP, port: 53}]",
                "destinations: [{address: 10.0.0.1, protocol: udp, port: 53}]",
                "destinations: [{address: 10.0.0.0/8, protocol: TCP, port: 80}]",
            ],
        ),
        policy(
            "a port has sixteen bits",
            "",
            [],
            [
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 65536}]",
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: -1}]",
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 1.5}]",
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: '80'}]",
                "{delivery: Translate, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 65536}]}",
            ],
        ),
        policy(
            "a target port is for services that are translated",
            "spec",
            [
                "{delivery: Translate, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 8080}]}",
                "{delivery: Translate, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80}, {address: 10.0.0.0/8}]}",
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: null}]",
            ],
            [
                "destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 8080}]",
                "{delivery: Direct, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 8080}]}",
                "{delivery: Translate, destinations: [{address: 10.0.0.1, targetPort: 8080}]}",
                "{delivery: Translate, destinations: [{address: 10.0.0.1, protocol: TCP, port: 80, targetPort: 0}]}",
            ],
        ),
        policy(
            "fields are those that there are",
            "",
            [],
            [
                "destinations: [{address: 10.0.0.1, ports: 53}]",
                "consumer: {matchLabels: {app: web}}",
            ],
        ),
    ]
}

/// The addresses of a destination, those of the field among them.
pub(crate) fn addresses() -> Vec<Rule> {
    let rule = |about, accepted: &[&str], refused: &[&str]| {
        let spec = |addresses: &[&str]| {
            let spec = |address| format!("destinations: [{{address: '{address}'}}]");
            addresses.iter().map(spec).collect()
        };
        Rule {
            about,
            kind: Kind::RoutePolicy,
            field: "spec.destinations[0].address",
            accepted: spec(accepted),
            refused: spec(refused),
        }
    };
    vec![
        rule(
            "a destination is an address or a network, canonical, without host bits",
            &[
                "0.0.0.0/0",
                "::/0",
                "10.96.0.10",
                "10.0.0.0/8",
                "10.1.0.0/31",
                "128.0.0.0/1",
                "fd00:53::/64",
                "fd00:53::10",
                "fd00::2/127",
                "1::",
                "::102:304",
                "64:ff9b::/96",
            ],
            &[
                "",
                "x",
                "10.0.0.1/32",
                "fd00::1/128",
                "10.0.0.1/8",
                "fd00::1/64",
                "10.0.0.0/33",
                "fd00::/129",
                "::ffff:10.1.0.0/112",
                "::ffff:10.1.2.3",
                "10.0.0.0/08",
                "10.0.0.0/+8",
                "10.0.0.0/",
                "10.0.0.0/-1",
                "010.0.0.0/8",
                "10.0.0.01",
                "10.0.0",
                "FD00::/64",
                "fd00:0::/64",
                "fd00:53:0:0::/64",
                "fe80::1%eth0",
                "::1.2.3.4",
                " 10.0.0.1",
                "10.0.0.1 ",
                "10.0.0.0/255.0.0.0",
            ],
        ),
        rule(
            "what is never captured is no destination, and what contains it is",
            &[
                "169.252.0.0/14",
                "fe00::/7",
                "168.0.0.0/5",
                "192.0.0.0/2",
                "126.0.0.0/7",
                "254.0.0.0/7",
            ],
            &[
                "169.254.20.10",
                "169.254.0.0/16",
                "169.254.0.0/17",
                "224.0.0.0/4",
                "239.0.0.0/8",
                "224.0.0.1",
                "255.255.255.255",
                "127.0.0.1",
                "127.0.0.0/8",
                "127.1.0.0/16",
                "0.0.0.0",
                "fe80::1",
                "fe80::/10",
                "febf::/16",
                "ff02::/16",
                "ff00::/8",
                "ff02::1",
                "::1",
                "::",
            ],
        ),
    ]
}

fn rest() -> Vec<Rule> {
    vec![
        policy(
            "delivery is one that there is",
            "spec.delivery",
            ["delivery: Direct", "delivery: Translate"],
            ["delivery: Bounce", "delivery: direct", "delivery: ''"],
        ),
        policy(
            "whileHeld is one that there is",
            "spec.whileHeld",
            ["whileHeld: Drop", "whileHeld: Pass"],
            ["whileHeld: Reject"],
        ),
        policy(
            "onDeadline is one that there is",
            "spec.switchover.onDeadline",
            [
                "switchover: {onDeadline: KeepOld}",
                "switchover: {onDeadline: Cut}",
            ],
            ["switchover: {onDeadline: Ask}"],
        ),
        policy(
            "a deadline is 1 s to 24 h",
            "spec.switchover.deadline",
            [
                "switchover: {}",
                "switchover: {deadline: 1s}",
                "switchover: {deadline: 24h}",
                "switchover: {deadline: 1h30m}",
                "switchover: {deadline: 23h59m60s}",
                "switchover: {deadline: 000000090s}",
            ],
            [
                "switchover: {deadline: 0s}",
                "switchover: {deadline: 24h1s}",
                "switchover: {deadline: 999999999h}",
                "switchover: {deadline: ''}",
                "switchover: {deadline: '30'}",
                "switchover: {deadline: s}",
                "switchover: {deadline: -1s}",
                "switchover: {deadline: 1.5s}",
                "switchover: {deadline: 1500ms}",
                "switchover: {deadline: 1m1h}",
                "switchover: {deadline: 1s1s}",
                "switchover: {deadline: 1 s}",
                "switchover: {deadline: 0000000001s}",
            ],
        ),
        policy(
            "a drain is 0 s, or 1 s to 24 h",
            "spec.switchover.drain",
            [
                "switchover: {drain: 0s}",
                "switchover: {drain: 0h0m0s}",
                "switchover: {drain: 1s}",
                "switchover: {drain: 24h}",
            ],
            [
                "switchover: {drain: 25h}",
                "switchover: {drain: ''}",
                "switchover: {drain: '0'}",
            ],
        ),
        policy(
            "a staleness is 10 s to 24 h",
            "spec.maxStaleness",
            ["maxStaleness: null", "maxStaleness: 10s", "maxStaleness: 24h"],
            [
                "maxStaleness: 9s",
                "maxStaleness: 0s",
                "maxStaleness: 24h1s",
                "maxStaleness: ''",
            ],
        ),
        policy(
            "fields of a switch are those that there are",
            "",
            [],
            ["switchover: {deadLine: 30s}"],
        ),
    ]
}
