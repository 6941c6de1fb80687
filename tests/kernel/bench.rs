//! What measures is measured: every suite of `cargo xtask bench` runs to its end with few rounds, and says what it should.
//!
//! Figures fail here only where a suite says so: ratios within one run, when they are off by a factor of two in their
//! best round.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

holdfast_tests::suite! {
    needs [Namespaces, Object];
    classifier_says_what_each_packet_costs,
    path_says_what_each_way_costs,
    scrape_says_what_a_large_node_costs,
}

fn classifier_says_what_each_packet_costs() -> anyhow::Result<()> {
    let report = smoke("classifier")?;
    // Two families; both sizes; random order and, of the larger, the order of popularity.
    for (what, lines) in [
        ("established flow", 6),
        ("answer of it", 6),
        ("first packet again", 6),
        ("first packet, table full", 6),
        ("held", 6),
        ("unmatched", 4),
        ("unknown interface", 2),
        ("(array read)", 6),
        ("(hash look-up)", 6),
        ("(LPM trie)", 6),
        ("(bpf_fib_lookup)", 2),
    ] {
        let found = figures(&report, |name| name == what)?;
        ensure!(found.len() == lines, "{what}: {} lines", found.len());
    }
    Ok(())
}

fn path_says_what_each_way_costs() -> anyhow::Result<()> {
    let report = smoke("path")?;
    for way in [
        "kernel routing",
        "nftables DNAT map",
        "bare redirect_peer",
        "Holdfast",
    ] {
        let found = figures(&report, |name| name.ends_with(&format!(": {way}")))?;
        ensure!(found.len() == 6, "{way}: {} lines", found.len());
    }
    Ok(())
}

fn scrape_says_what_a_large_node_costs() -> anyhow::Result<()> {
    let report = smoke("scrape")?;
    for what in ["copied by the engine's task", "made into a page", "both"] {
        let found = figures(&report, |name| name.starts_with(what))?;
        ensure!(found.len() == 2, "{what}: {} lines", found.len());
    }
    Ok(())
}

/// Runs a suite with few rounds: its result, of which every figure is a time.
fn smoke(suite: &str) -> anyhow::Result<Value> {
    let directory = tempfile::tempdir()?;
    let json = directory.path().join("result.json");
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args([suite, "--smoke", "--revision", "test", "--json"])
        .arg(&json)
        .output()
        .context("cannot run the program")?;
    ensure!(
        output.status.success(),
        "{suite}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout)
    );
    let report = read(&json)?;
    for field in ["revision", "kernel", "cpu", "floor", "a_a", "rounds"] {
        ensure!(!report[field].is_null(), "{suite} does not say its {field}");
    }
    Ok(report)
}

fn read(path: &Path) -> anyhow::Result<Value> {
    let text = std::fs::read_to_string(path).context("no result was written")?;
    Ok(serde_json::from_str(&text)?)
}

/// The figures with such a name; each must have been measured.
fn figures(report: &Value, is: impl Fn(&str) -> bool) -> anyhow::Result<Vec<&Value>> {
    let all = report["figures"].as_array().context("there are no figures")?;
    let found: Vec<&Value> = all
        .iter()
        .filter(|figure| figure["what"].as_str().is_some_and(&is))
        .collect();
    for figure in &found {
        let (min, median) = (figure["min"].as_f64(), figure["median"].as_f64());
        ensure!(min > Some(0.0) && median >= min, "{figure}");
    }
    Ok(found)
}
