//! The unit of `deploy/systemd`.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use clap::CommandFactory;
use holdfast::cli::Cli;
use holdfast_tests::process::{SHIPPED, program};
use holdfast_tests::unit;
use rustix::thread::CapabilitySet;

/// Exposure in tenths, by systemd's own count, that the unit may have at most; without a line of it it is 96.
const EXPOSURE: &str = "30";

/// The command that it starts is one that the command line knows, and where its defaults lead is where it may write.
pub(super) fn the_unit_starts_what_the_command_line_knows() -> anyhow::Result<()> {
    let words = unit::command()?;
    let matches = Cli::command().try_get_matches_from(&words)?;
    ensure!(matches.subcommand_name() == Some("agent"), "{words:?}");
    let default = |flag: &str| -> anyhow::Result<String> {
        let cli = Cli::command();
        let arg = cli
            .get_arguments()
            .find(|arg| arg.get_long() == Some(flag))
            .context("no such flag")?;
        let value = arg.get_default_values().first().context("no default")?;
        Ok(value.to_string_lossy().into_owned())
    };
    for (flag, directory) in [
        ("run-dir", format!("/run/{}", unit::value("RuntimeDirectory")?)),
        (
            "state-dir",
            format!("/var/lib/{}", unit::value("StateDirectory")?),
        ),
    ] {
        ensure!(default(flag)? == directory, "--{flag} is not {directory}");
    }
    let writable = unit::value("ReadWritePaths")?;
    let pins = default("bpffs-dir")?;
    ensure!(
        Path::new(&pins).starts_with(writable),
        "{pins} is not below {writable}"
    );
    ensure!(unit::value("RequiresMountsFor")? == writable);
    // The lock of the registry must be there for CNIs while no agent runs.
    ensure!(unit::value("RuntimeDirectoryPreserve")? == "yes");
    // By it the agent says that its settings are wrong, and nothing else.
    ensure!(unit::value("RestartPreventExitStatus")? == "2");
    Ok(())
}

/// The rights of the unit are those that every agent of the lab has.
pub(super) fn the_unit_has_the_rights_of_the_lab() -> anyhow::Result<()> {
    for key in ["CapabilityBoundingSet", "AmbientCapabilities"] {
        let rights = unit::value(key)?
            .split(' ')
            .map(|name| match name {
                "CAP_BPF" => Ok(CapabilitySet::BPF),
                "CAP_NET_ADMIN" => Ok(CapabilitySet::NET_ADMIN),
                "CAP_PERFMON" => Ok(CapabilitySet::PERFMON),
                other => Err(anyhow::anyhow!("{key}: {other}")),
            })
            .collect::<anyhow::Result<CapabilitySet>>()?;
        ensure!(rights == SHIPPED, "{key}: {rights:?}");
    }
    ensure!(unit::value("NoNewPrivileges")? == "yes");
    Ok(())
}

/// systemd's own opinion.
pub(super) fn systemd_finds_nothing_wrong_with_the_unit() -> anyhow::Result<()> {
    let analyze = program("systemd-analyze")?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("holdfast.service");
    // It looks for the program, which need not be installed here.
    let here = std::env::current_exe()?;
    let start = unit::command()?[0];
    std::fs::write(&path, unit::TEXT.replace(start, &here.display().to_string()))?;
    let ask = |words: &[&str]| -> anyhow::Result<Output> {
        Ok(Command::new(&analyze).args(words).arg(&path).output()?)
    };
    let verified = ask(&["verify"])?;
    let said = String::from_utf8_lossy(&verified.stderr);
    // It speaks of other units of this machine, too.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("holdfast")).collect();
    ensure!(ours.is_empty(), "{said}");
    let exposed = ask(&["security", "--offline=true", "--threshold", EXPOSURE])?;
    ensure!(
        exposed.status.success(),
        "{}{}",
        String::from_utf8_lossy(&exposed.stdout),
        String::from_utf8_lossy(&exposed.stderr)
    );
    Ok(())
}
