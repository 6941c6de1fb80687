//! Where things are: the workspace, the user's cache, programs that we call.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The root of the workspace.
pub(crate) fn workspace_root() -> anyhow::Result<PathBuf> {
    // Cargo sets the variable at run time too, so that a moved clone is found.
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    Ok(here
        .parent()
        .context("xtask has no parent directory")?
        .to_path_buf())
}

/// Holdfast's directory in the user's cache.
pub(crate) use holdfast_cluster::cache_dir;

/// Where `setup` installs programs.
pub(crate) fn tools_dir() -> anyhow::Result<PathBuf> {
    Ok(cache_dir()?.join("tools"))
}

/// A program of [`tools_dir`], else of `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let own = tools_dir().ok().map(|dir| dir.join("bin").join(program));
    own.into_iter()
        .chain(
            std::env::var_os("PATH")
                .iter()
                .flat_map(std::env::split_paths)
                .map(|dir| dir.join(program)),
        )
        .find(|path| is_executable(path))
}

/// `PATH` with [`tools_dir`] before it.
pub(crate) fn path_with_tools() -> anyhow::Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = std::iter::once(tools_dir()?.join("bin"));
    Ok(std::env::join_paths(own.chain(std::env::split_paths(&path)))?)
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// A command that inherits nothing of the `cargo run` that started us.
///
/// `cargo run` sets a library path, its own compiler and the variables of the xtask package; another toolchain
/// must not see them.
pub(crate) fn clean(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        let ours = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"]
            .iter()
            .any(|prefix| text.starts_with(prefix));
        let one = [
            "CARGO",
            "CARGO_PRIMARY_PACKAGE",
            "LD_LIBRARY_PATH",
            "RUSTUP_TOOLCHAIN",
            "RUST_RECURSION_COUNT",
        ]
        .contains(&text);
        if ours || one {
            command.env_remove(&name);
        }
    }
    command
}

/// The cargo that runs us.
pub(crate) fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// The compiler's own target.
pub(crate) fn host() -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = answer(Command::new(rustc).arg("-vV")).context("rustc does not answer")?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not say its host")?.to_owned())
}

/// Runs a command with its output shown; anything but success is an error that names the command.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", show(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", show(command));
    }
    Ok(())
}

/// What a command says on standard output; none if it cannot be run or fails.
pub(crate) fn answer(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
