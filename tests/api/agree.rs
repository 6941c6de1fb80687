//! Server and agent judge alike: by a table of every rule, and by objects that chance makes of it.

use anyhow::{Context, bail, ensure};
use holdfast::api::v1alpha1::{AttachmentSpec, Kind, RoutePolicySpec};
use holdfast::api::validate::{self, Meta, Provenance};
use holdfast_engine::model::{ObjectName, Uid};
use holdfast_tests::say;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::rules::{self, Rule};
use crate::server::{GROUP, Refusal, server};

pub(crate) fn every_rule_is_kept_by_the_server_and_by_the_agent() -> anyhow::Result<()> {
    let rules = rules::all();
    let counts = rules.iter().map(judge).collect::<anyhow::Result<Vec<_>>>()?;
    let (accepted, refused) = counts.iter().fold((0, 0), |(a, r), (x, y)| (a + x, r + y));
    say(format_args!(
        "{} rules: {accepted} objects accepted, {refused} refused, by both",
        rules.len()
    ));
    Ok(())
}

pub(crate) fn f35_addresses_are_judged_alike() -> anyhow::Result<()> {
    let field = rules::addresses();
    for expected in [
        "0.0.0.0/0",
        "::/0",
        "10.0.0.1/32",
        "fd00::1/128",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "::ffff:10.1.0.0/112",
    ] {
        ensure!(
            field.iter().any(|rule| {
                let mut all = rule.accepted.iter().chain(&rule.refused);
                all.any(|spec| spec.contains(&format!("'{expected}'")))
            }),
            "{expected} is not among them"
        );
    }
    for rule in &field {
        judge(rule)?;
    }
    Ok(())
}

/// Both accept what is to be accepted and refuse the rest, naming the field. How many of each there are.
fn judge(rule: &Rule) -> anyhow::Result<(usize, usize)> {
    for fragment in &rule.accepted {
        let spec = spec(rule.kind, fragment)?;
        let told = format!("{}: {spec}", rule.about);
        if let Err(refusal) = by_server(rule.kind, &spec)? {
            bail!("{told}\nrefused by the server: {refusal}");
        }
        if let Err(refusal) = by_agent(rule.kind, &spec) {
            bail!("{told}\nrefused by the agent: {refusal}");
        }
    }
    for fragment in &rule.refused {
        let spec = spec(rule.kind, fragment)?;
        let told = format!("{}: {spec}", rule.about);
        let Err(server) = by_server(rule.kind, &spec)? else {
            bail!("{told}\naccepted by the server");
        };
        let Err(agent) = by_agent(rule.kind, &spec) else {
            bail!("{told}\naccepted by the agent");
        };
        ensure!(
            server.message.contains(rule.field),
            "{told}\nthe server does not name {}: {server}",
            rule.field
        );
        ensure!(
            agent.contains(rule.field),
            "{told}\nthe agent does not name {}: {agent}",
            rule.field
        );
    }
    Ok((rule.accepted.len(), rule.refused.len()))
}

/// A right spec with some of its fields replaced.
fn spec(kind: Kind, fragment: &str) -> anyhow::Result<Value> {
    let mut spec: Value = serde_saphyr::from_str(rules::base(kind))?;
    let changes: Value = serde_saphyr::from_str(fragment).with_context(|| fragment.to_owned())?;
    let fields = spec.as_object_mut().context("a spec")?;
    for (key, value) in changes.as_object().with_context(|| fragment.to_owned())? {
        fields.insert(key.clone(), value.clone());
    }
    Ok(spec)
}

/// What the server says, which keeps nothing of it.
fn by_server(kind: Kind, spec: &Value) -> anyhow::Result<Result<(), Refusal>> {
    let plural = match kind {
        Kind::Attachment => "attachments",
        Kind::RoutePolicy => "routepolicies",
    };
    let path = format!("{GROUP}/namespaces/shop/{plural}?dryRun=All&fieldValidation=Strict");
    let object = json!({
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": kind.as_str(),
        "metadata": {"name": "judged"},
        "spec": spec,
    });
    let answer = server()?
        .administrator()
        .ask("POST", &path, "application/json", Some(&object))?;
    match answer {
        Ok(_) => Ok(Ok(())),
        // Judged and refused; anything else is no judgement.
        Err(refusal) if matches!(refusal.code, 400 | 422) => Ok(Err(refusal)),
        Err(refusal) => bail!("{refusal}"),
    }
}

/// What the agent says.
fn by_agent(kind: Kind, spec: &Value) -> Result<(), String> {
    match kind {
        Kind::Attachment => {
            let spec = AttachmentSpec::deserialize(spec).map_err(|error| error.to_string())?;
            let judged = validate::attachment(&meta(), &spec, Provenance::ApiServer);
            judged.map(drop).map_err(|problems| problems.to_string())
        }
        Kind::RoutePolicy => {
            let spec = RoutePolicySpec::deserialize(spec).map_err(|error| error.to_string())?;
            let judged = validate::policy_spec(&spec);
            judged.map(drop).map_err(|problems| problems.to_string())
        }
    }
}

fn meta() -> Meta {
    Meta {
        name: ObjectName {
            namespace: "shop".to_owned(),
            name: "judged".to_owned(),
        },
        uid: Uid("u1".to_owned()),
        generation: 1,
        created_ms: 0,
        labels: std::collections::BTreeMap::new(),
        origin: None,
    }
}

/// Objects that chance makes: as many as are judged in a few seconds.
const OBJECTS: u32 = 600;

/// Objects of the table in which characters are changed: most are near the edge of a rule.
pub(crate) fn whatever_comes_is_judged_alike() -> anyhow::Result<()> {
    let seed = std::env::var("HF_SEED").ok().map_or(Ok(1), |text| text.parse())?;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let rules = rules::all();
    let pool: Vec<(Kind, &String)> = rules
        .iter()
        .flat_map(|rule| {
            rule.accepted
                .iter()
                .chain(&rule.refused)
                .map(|text| (rule.kind, text))
        })
        .collect();
    let mut accepted = 0;
    for _ in 0..OBJECTS {
        let (kind, fragment) = pool[below(&mut random, pool.len())];
        let mut spec = spec(kind, fragment)?;
        let changed = fragment_keys(fragment)?;
        for key in changed {
            if let Some(field) = spec.get_mut(&key) {
                spoil(&mut random, field);
            }
        }
        let (server, agent) = (by_server(kind, &spec)?, by_agent(kind, &spec));
        match (server, agent) {
            (Ok(()), Ok(())) => accepted += 1,
            (Err(_), Err(_)) => {}
            (Ok(()), Err(refusal)) => bail!("seed {seed}: only the agent refuses {spec}: {refusal}"),
            (Err(refusal), Ok(())) => bail!("seed {seed}: only the server refuses {spec}: {refusal}"),
        }
    }
    // Neither all nor none, else nothing was asked.
    ensure!(
        (OBJECTS / 20..OBJECTS * 19 / 20).contains(&accepted),
        "{accepted} of {OBJECTS} accepted"
    );
    say(format_args!(
        "{OBJECTS} objects judged alike, {accepted} of them accepted (HF_SEED={seed})"
    ));
    Ok(())
}

fn fragment_keys(fragment: &str) -> anyhow::Result<Vec<String>> {
    let changes: Value = serde_saphyr::from_str(fragment)?;
    Ok(changes
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, _)| key.clone())
        .collect())
}

fn below(random: &mut ChaCha8Rng, bound: usize) -> usize {
    usize::try_from(random.next_u64() % (bound.max(1) as u64)).unwrap_or_default()
}

/// Changes one character of one text in it, one number, or the length of a list.
fn spoil(random: &mut ChaCha8Rng, value: &mut Value) {
    const CHARACTERS: &[char] = &[
        '0', '1', '2', '5', '9', 'a', 'f', 'F', 's', 'm', 'h', ':', '.', '/', '-', '_', ' ', 'é', '\u{a0}',
        '%',
    ];
    match value {
        Value::String(text) => {
            let mut characters: Vec<char> = text.chars().collect();
            let at = below(random, characters.len() + 1);
            let new = CHARACTERS[below(random, CHARACTERS.len())];
            match below(random, 3) {
                0 if at < characters.len() => characters[at] = new,
                1 if at < characters.len() => drop(characters.remove(at)),
                _ => characters.insert(at, new),
            }
            *text = characters.into_iter().collect();
        }
        Value::Number(_) => *value = [0, 1, 65_535, 65_536][below(random, 4)].into(),
        Value::Array(items) => {
            let at = below(random, items.len());
            match (below(random, 4), items.get(at).cloned()) {
                (0, Some(item)) => items.push(item),
                (_, Some(_)) => spoil(random, &mut items[at]),
                (_, None) => {}
            }
        }
        Value::Object(fields) => {
            let at = below(random, fields.len());
            if let Some((_, field)) = fields.iter_mut().nth(at) {
                spoil(random, field);
            }
        }
        Value::Null | Value::Bool(_) => {}
    }
}
