//! Go, which Kubernetes is built with. Debian 12's own is too old for that, but not for fetching a newer one, which is a Go
//! module like any other.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::tools;

/// What is fetched.
pub(crate) const VERSION: &str = "1.26.8";

/// The oldest that fetches by itself what a module asks for.
const OLDEST: (u32, u32) = (1, 21);

/// What of Debian fetches it.
const DEBIAN_PACKAGES: [&str; 2] = ["golang-1.19-go", "golang-1.19-src"];

/// A Go that can build Kubernetes; none if there is none.
pub(crate) fn find() -> Option<PathBuf> {
    let places = [
        fetched().ok(),
        tools::find("go"),
        Some(PathBuf::from("/usr/local/go/bin/go")),
    ];
    places.into_iter().flatten().find(|go| is_new_enough(go))
}

fn is_new_enough(go: &Path) -> bool {
    let said = tools::answer(tools::clean(go).args(["env", "GOVERSION"])).unwrap_or_default();
    version(&said).is_some_and(|version| version >= OLDEST)
}

/// `go1.26.8` and what else releases are called.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut parts = said.trim().strip_prefix("go")?.split(['.', '-', 'r', 'b']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Where [`fetch`] puts it.
fn fetched() -> anyhow::Result<PathBuf> {
    Ok(root()?.join("bin/go"))
}

fn root() -> anyhow::Result<PathBuf> {
    Ok(tools::tools_dir()?.join(format!("go-{VERSION}")))
}

/// Fetches it into the cache. Nothing is installed: Debian's is unpacked, used once, and thrown away.
pub(crate) fn fetch() -> anyhow::Result<()> {
    let work = tools::cache_dir()?.join("go");
    let root = root()?;
    println!("fetching Go {VERSION} into {}", root.display());
    let fetch = || -> anyhow::Result<()> {
        let tree = crate::setup::unpack(&DEBIAN_PACKAGES, &work)?;
        let old = tree.join("usr/lib/go-1.19");
        let modules = work.join("modules");
        let platform = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let module = format!("golang.org/toolchain@v0.0.1-go{VERSION}.linux-{platform}");
        let said = tools::answer(
            tools::clean(old.join("bin/go"))
                .current_dir(&work)
                .env("GOROOT", &old)
                .env("GOMODCACHE", &modules)
                .env("GOFLAGS", "-modcacherw")
                .args(["mod", "download", "-json", &module]),
        )
        .with_context(|| format!("cannot fetch {module}"))?;
        let said: serde_json::Value = serde_json::from_str(&said)?;
        let unpacked = said["Dir"]
            .as_str()
            .context("go does not say where the module is")?;
        _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.parent().context("no folder")?)?;
        fs::rename(unpacked, &root)?;
        // Modules have no executables.
        for folder in ["bin", &format!("pkg/tool/linux_{platform}")] {
            for entry in fs::read_dir(root.join(folder))? {
                fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
            }
        }
        fs::remove_dir_all(&work)?;
        Ok(())
    };
    fetch().context("by hand: put a Go of 1.21 or later on the PATH")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version("go1.26.8\n"), Some((1, 26)));
        assert_eq!(version("go1.21rc2"), Some((1, 21)));
        assert_eq!(version("devel"), None);
        assert!(version("go1.19.8") < Some(OLDEST));
    }
}
