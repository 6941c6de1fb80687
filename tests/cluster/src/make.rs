//! Builds Kubernetes, etcd and containerd from their Go modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::binaries::{Binaries, KUBERNETES};
use crate::image::{Content, Image};
use crate::node::PAUSE;
use crate::program;

const ETCD: &str = "3.6.16";
const CONTAINERD: &str = "2.3.7";

const PAUSE_SOURCE: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n";

/// A Go module of ours that names what is to be built, in its folder below `src`.
struct Module<'a> {
    folder: PathBuf,
    go: &'a Path,
}

/// Builds what is missing in the cache. Each step is said before it is done. `go` is a Go of 1.26 or later, or one that
/// fetches it by itself (1.21 or later).
///
/// # Errors
/// What the compiler says.
pub fn make(cache: &Path, go: &Path, say: &mut dyn FnMut(&str)) -> anyhow::Result<()> {
    let root = Binaries::folder(cache);
    let bin = root.join("bin");
    fs::create_dir_all(&bin)?;
    // Two at once would spoil each other's modules; the second finds all built.
    let lock = fs::File::create(root.join("lock"))?;
    lock.lock()?;
    let module = |name: &str| -> anyhow::Result<Module<'_>> {
        let folder = root.join("src").join(name);
        fs::create_dir_all(&folder)?;
        Ok(Module { folder, go })
    };
    let is_missing = |name: &str| !bin.join(name).is_file();

    let etcd = "go.etcd.io/etcd/server/v3";
    if is_missing("etcd") {
        say(&format!("building etcd {ETCD} (about a minute)"));
        let module = module("etcd")?;
        module.begin(&[etcd])?;
        module.go(&["get", &format!("{etcd}@v{ETCD}")])?;
        module.go(&["mod", "tidy", "-e"])?;
        module.build("-s -w", "", etcd, &bin)?;
    }
    let of_kubernetes = [
        ("kube-apiserver", "about three minutes"),
        ("kubectl", "half a minute"),
        ("kube-controller-manager", "half a minute"),
        ("kube-scheduler", "some seconds"),
        ("kubelet", "a minute"),
    ];
    let kubernetes = "k8s.io/kubernetes";
    if of_kubernetes.iter().any(|(name, _)| is_missing(name)) {
        let module = module("k8s")?;
        say(&format!("fetching the modules of Kubernetes {KUBERNETES}"));
        let packages = of_kubernetes.map(|(name, _)| format!("{kubernetes}/cmd/{name}"));
        module.begin(&packages.each_ref().map(String::as_str))?;
        module.require_kubernetes(kubernetes)?;
        module.go(&["mod", "tidy", "-e"])?;
        let version = format!("-s -w -X k8s.io/component-base/version.gitVersion=v{KUBERNETES}");
        for (name, time) in of_kubernetes {
            if is_missing(name) {
                say(&format!("building {name} {KUBERNETES} ({time})"));
                module.build(&version, "", &format!("{kubernetes}/cmd/{name}"), &bin)?;
            }
        }
    }
    let containerd = "github.com/containerd/containerd/v2";
    let of_containerd = ["containerd", "containerd-shim-runc-v2", "ctr"];
    if of_containerd.into_iter().any(is_missing) {
        say(&format!("building containerd {CONTAINERD} (about a minute)"));
        let module = module("ctrd")?;
        let packages = of_containerd.map(|name| format!("{containerd}/cmd/{name}"));
        module.begin(&packages.each_ref().map(String::as_str))?;
        module.go(&["get", &format!("{containerd}@v{CONTAINERD}")])?;
        module.go(&["mod", "tidy", "-e"])?;
        for package in &packages {
            module.build("-s -w", "no_btrfs no_devmapper no_zfs", package, &bin)?;
        }
    }
    if is_missing("pause.tar") {
        make_pause(&root.join("src"), &bin.join("pause.tar"))?;
    }
    Ok(())
}

impl Module<'_> {
    /// Writes an empty module that imports these packages, so that `go mod tidy` keeps them.
    fn begin(&self, packages: &[&str]) -> anyhow::Result<()> {
        let imports: String = packages
            .iter()
            .map(|package| format!("\t_ \"{package}\"\n"))
            .collect();
        fs::write(
            self.folder.join("tools.go"),
            format!("//go:build tools\n\npackage tools\n\nimport (\n{imports})\n"),
        )?;
        let name = self.folder.file_name().context("a module without a name")?;
        fs::write(
            self.folder.join("go.mod"),
            format!("module cluster/{}\n\ngo 1.26.0\n", name.to_string_lossy()),
        )?;
        Ok(())
    }

    /// Kubernetes names its own parts by their folders, which a module outside of it must name by their versions.
    fn require_kubernetes(&self, kubernetes: &str) -> anyhow::Result<()> {
        let minor_and_patch = KUBERNETES.strip_prefix("1.").context("not Kubernetes 1")?;
        let parts_version = format!("0.{minor_and_patch}");
        let file = self.folder.join("go.mod");
        let mut text = fs::read_to_string(&file)?;
        text += &format!("\nrequire {kubernetes} v{KUBERNETES}\n");
        fs::write(&file, &text)?;
        let said = program::run(
            self.command()
                .args(["mod", "download", "-json", &format!("{kubernetes}@v{KUBERNETES}")]),
            None,
        )?;
        let said: serde_json::Value = serde_json::from_str(&said)?;
        let source = said["Dir"]
            .as_str()
            .context("go does not say where the module is")?;
        let theirs = fs::read_to_string(Path::new(source).join("go.mod"))?;
        text += "\nreplace (\n";
        for line in theirs.lines() {
            if let Some((part, _)) = line.trim().split_once(" => ./staging/") {
                text += &format!("\t{part} => {part} v{parts_version}\n");
            }
        }
        text += ")\n";
        fs::write(&file, text)?;
        Ok(())
    }

    fn build(&self, linker_flags: &str, tags: &str, package: &str, bin: &Path) -> anyhow::Result<()> {
        let name = match package.rsplit('/').next() {
            Some("v3") => "etcd",
            Some(name) => name,
            None => bail!("a package without a name"),
        };
        // Under its name only when it is whole.
        let new = bin.join(format!(".{name}.new"));
        let output = new.to_string_lossy();
        self.go(&[
            "build",
            "-ldflags",
            linker_flags,
            "-tags",
            tags,
            "-o",
            &output,
            package,
        ])?;
        fs::rename(&new, bin.join(name))?;
        Ok(())
    }

    fn go(&self, words: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command();
        let status = command
            .args(words)
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot run {}", program::show(&command)))?;
        if !status.success() {
            bail!(
                "{} in {} ended with {status}",
                program::show(&command),
                self.folder.display()
            );
        }
        Ok(())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.go);
        command.current_dir(&self.folder);
        command.env("GOFLAGS", "-trimpath").env("CGO_ENABLED", "0");
        command
    }
}

/// The image of the process that holds a pod's namespaces.
fn make_pause(sources: &Path, archive: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(sources)?;
    let source = sources.join("pause.c");
    let binary = sources.join("pause");
    fs::write(&source, PAUSE_SOURCE)?;
    program::run(
        Command::new("gcc")
            .args(["-static", "-Os", "-s", "-o"])
            .arg(&binary)
            .arg(&source),
        None,
    )?;
    let image = Image {
        name: PAUSE.to_owned(),
        entrypoint: vec!["/pause".to_owned()],
        user: String::new(),
        environment: Vec::new(),
        files: vec![("/pause".into(), Content::File(binary))],
    };
    image.write(archive, &sources.join("pause-image"))
}
