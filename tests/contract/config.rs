//! Settings: file, variables, flags; what the agent prints of them, and how it refuses them.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use clap::CommandFactory;
use holdfast::cli::Cli;
use holdfast_tests::node::agent_binary;
use holdfast_tests::{Reason, skip};

use crate::golden;

const FILE: &str = "\
# What this node is about
node = \"edge-7\"
audit-interval = \"10s\"
map-flows = 0x1_0000

allow-foreign-before = true
run-dir = \"/srv/hold\\\"fast\"
";

/// Runs the agent's command line with nothing around it.
fn run(dir: &Path, variables: &[(&str, &str)], words: &[&str]) -> anyhow::Result<Output> {
    let Ok(agent) = agent_binary() else {
        return Err(skip(Reason::NoAgent));
    };
    let mut command = Command::new(agent);
    command.env_clear().envs(variables.iter().copied());
    command
        .current_dir(dir)
        .args(words)
        .output()
        .context("the agent does not run")
}

fn printed(dir: &Path, variables: &[(&str, &str)], words: &[&str]) -> anyhow::Result<String> {
    let output = run(
        dir,
        variables,
        &[&["agent", "--print-config", "--node", "edge-1"], words].concat(),
    )?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Each setting has its value from the nearest that says anything, and says from where.
pub(super) fn a_flag_goes_before_a_variable_before_the_file() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("agent.toml"), FILE)?;
    let variables = [
        ("HOLDFAST_LISTEN", "127.0.0.1:9700"),
        ("HOLDFAST_AUDIT_INTERVAL", "20s"),
        ("HOLDFAST_LOG", "debug"),
    ];
    let flags = [
        "--config",
        "agent.toml",
        "--log",
        "warn",
        "--allow-foreign-before=false",
    ];
    golden("print-config.txt", &printed(dir.path(), &variables, &flags)?)
}

/// What is printed is a file again, and the whole of it.
pub(super) fn a_printed_configuration_is_a_file() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("agent.toml"), FILE)?;
    let first = printed(dir.path(), &[("HOLDFAST_CONFIG", "agent.toml")], &[])?;
    std::fs::write(dir.path().join("again.toml"), &first)?;
    let again = printed(dir.path(), &[], &["--config", "again.toml"])?;
    let values = |text: &str| -> Vec<String> {
        let value = |line: &str| line.split("  # ").next().unwrap_or_default().to_owned();
        text.lines().map(value).collect()
    };
    ensure!(values(&first) == values(&again), "{first}\n{again}");
    for (at, line) in again.lines().enumerate() {
        let from = format!("  # again.toml:{}", at + 1);
        ensure!(
            line.ends_with(&from) || line.ends_with(" is not set") || line.ends_with("--node"),
            "{line}"
        );
    }
    Ok(())
}

/// Everything that is wrong is named with its place, and nothing is started.
pub(super) fn what_is_wrong_is_named_with_its_place() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    for (name, content) in [
        (
            "wrong.toml",
            "nodes = \"x\"\naudit-intervall = \"1s\"\nmap-flows = \"12\"\nmap-slots = 0\nattach = \"xdp\"\n\
             listen = [1]\nlog = \"holdfast=loud\"\nprint-config = true\nmap-sources = -1\n\n[agent]\nnode = \"a\"\n",
        ),
        ("torn.toml", "node = \"edge-1\"\nlisten = \n"),
        ("twice.toml", "node = \"a\"\nnode = \"b\"\n"),
        ("directory.toml", "run-dir = 7\n"),
        ("later.toml", "a-setting-of-a-later-release = 1\n"),
    ] {
        std::fs::write(dir.path().join(name), content)?;
    }
    let mut text = String::new();
    for (variables, words) in [
        (&[][..], "agent --config wrong.toml"),
        (&[], "agent --config torn.toml"),
        (&[], "agent --config twice.toml"),
        (&[], "agent --config missing.toml"),
        (&[], "agent --config ."),
        (&[("HOLDFAST_ATTACH", "xdp")], "agent"),
        (&[("HOLDFAST_MAP_FLOWS", "0")], "agent"),
        (&[("HOLDFAST_NODE", "")], "agent"),
        (&[("HOLDFAST_ALLOW_FOREIGN_BEFORE", "perhaps")], "agent"),
        (
            &[("HOLDFAST_ATTACH", "xdp")],
            "agent --attach tcx --print-config=1",
        ),
        (&[], "agent --audit-interval 6m"),
        // Others look for what they need of it only. To a CNI exit code 2 would mean that it is registered.
        (&[], "status --config directory.toml"),
        (&[], "attachment register --interface hf0 --config directory.toml"),
        (
            &[],
            "status --run-dir . --state-dir . --bpffs-dir . --config torn.toml",
        ),
        (&[], "status --run-dir . --config later.toml"),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let output = run(dir.path(), variables, &words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let given: String = variables
            .iter()
            .map(|(name, value)| format!("{name}={value} "))
            .collect();
        writeln!(
            text,
            "$ {given}holdfast {}\n{}exit code {}\n",
            words.join(" "),
            said,
            output.status.code().context("ended by a signal")?
        )?;
    }
    golden("config-errors.txt", &text)
}

/// No setting without its variable, and each by the same name.
pub(super) fn every_setting_has_its_variable() -> anyhow::Result<()> {
    let cli = Cli::command();
    let agent = cli.find_subcommand("agent").context("no agent")?;
    let mut seen = 0;
    for arg in cli.get_arguments().chain(agent.get_arguments()) {
        let Some(flag) = arg.get_long() else { continue };
        if ["help", "version", "print-config"].contains(&flag) {
            continue;
        }
        let expected = format!("HOLDFAST_{}", flag.to_uppercase().replace('-', "_"));
        ensure!(
            arg.get_env() == Some(OsStr::new(&expected)),
            "--{flag} has {:?}",
            arg.get_env()
        );
        seen += 1;
    }
    ensure!(seen > 20, "only {seen} settings");
    Ok(())
}
