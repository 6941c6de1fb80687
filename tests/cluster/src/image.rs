//! Container images without a daemon: a docker-archive tar of plain files, the same bytes from the same files.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde_json::json;

use crate::program;

/// An image of one layer.
#[derive(Clone, Debug)]
pub struct Image {
    /// As pods name it.
    pub name: String,
    /// What runs if a pod does not say.
    pub entrypoint: Vec<String>,
    /// Who runs it (`UID:GID`); root if empty.
    pub user: String,
    /// `NAME=VALUE`.
    pub environment: Vec<String>,
    /// What is in it: path in the image, and what is there.
    pub files: Vec<(PathBuf, Content)>,
}

/// What is at a path of an image.
#[derive(Clone, Debug)]
pub enum Content {
    /// A copy of this file.
    File(PathBuf),
    /// A copy of this program without what only debuggers read: three quarters of an agent that was built for tests.
    Program(PathBuf),
    /// A file of these bytes.
    Bytes(Vec<u8>),
    /// A link to another path of the image.
    Link(PathBuf),
    /// An empty folder.
    Folder,
}

impl Image {
    /// Writes the archive. `scratch` is a folder that may be filled meanwhile.
    ///
    /// # Errors
    /// When a file cannot be read, or the archive not be written.
    pub fn write(&self, archive: &Path, scratch: &Path) -> anyhow::Result<()> {
        let tree = scratch.join("tree");
        if scratch.exists() {
            fs::remove_dir_all(scratch)?;
        }
        self.write_tree(&tree)?;
        let layer = scratch.join("layer.tar");
        pack(&tree, &layer)?;
        let digest = sha256(&layer)?;
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {"Entrypoint": self.entrypoint, "Env": self.environment, "User": self.user},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        });
        let outer = scratch.join("archive");
        fs::create_dir_all(outer.join(&digest))?;
        fs::rename(&layer, outer.join(&digest).join("layer.tar"))?;
        let unnamed = scratch.join("config.json");
        fs::write(&unnamed, config.to_string())?;
        let config = format!("{}.json", sha256(&unnamed)?);
        fs::rename(&unnamed, outer.join(&config))?;
        let manifest = json!([{
            "Config": config,
            "RepoTags": [self.name],
            "Layers": [format!("{digest}/layer.tar")],
        }]);
        fs::write(outer.join("manifest.json"), manifest.to_string())?;
        // Under its name only when it is whole.
        let whole = scratch.join("whole.tar");
        pack(&outer, &whole)?;
        let folder = archive.parent().context("an archive without a folder")?;
        fs::create_dir_all(folder)?;
        fs::rename(&whole, archive)
            .or_else(|_| fs::copy(&whole, archive).map(drop))
            .with_context(|| format!("cannot write {}", archive.display()))?;
        fs::remove_dir_all(scratch)?;
        Ok(())
    }

    /// Writes what is in it as a folder, which is emptied first.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn write_tree(&self, tree: &Path) -> anyhow::Result<()> {
        if tree.exists() {
            fs::remove_dir_all(tree)?;
        }
        fs::create_dir_all(tree)?;
        for (path, content) in &self.files {
            put(tree, path, content).with_context(|| format!("{} of the image", path.display()))?;
        }
        Ok(())
    }
}

fn put(tree: &Path, path: &Path, content: &Content) -> anyhow::Result<()> {
    let to = tree.join(path.strip_prefix("/").unwrap_or(path));
    fs::create_dir_all(to.parent().context("no folder")?)?;
    match content {
        Content::File(from) => {
            fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        Content::Program(from) => {
            let mut strip = Command::new("strip");
            program::run(strip.args(["--strip-debug", "-o"]).arg(&to).arg(from), None)?;
        }
        Content::Bytes(bytes) => {
            fs::write(&to, bytes)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o644))?;
        }
        Content::Link(target) => symlink(target, &to)?,
        Content::Folder => fs::create_dir_all(&to)?,
    }
    Ok(())
}

/// Sorted, without times and owners.
fn pack(tree: &Path, archive: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("tar");
    command
        .args([
            "--create",
            "--format=gnu",
            "--sort=name",
            "--mtime=@0",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
        ])
        .args(["--mode=u=rwX,go=rX", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(tree);
    // Without a leading `./`: not every reader of `manifest.json` takes one.
    let mut names: Vec<_> = fs::read_dir(tree)?
        .filter_map(Result::ok)
        .map(|entry| entry.file_name())
        .collect();
    names.sort();
    program::run(command.arg("--").args(names), None).map(drop)
}

fn sha256(file: &Path) -> anyhow::Result<String> {
    let said = program::run(Command::new("sha256sum").arg("--").arg(file), None)?;
    Ok(said
        .split(' ')
        .next()
        .context("sha256sum says nothing")?
        .to_owned())
}

/// As images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
