//! The image of the agent: the program, the libraries that it is linked to, and the names of users. No shell.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::image::{Content, Image};
use crate::program;

/// As deploy/kustomize/overlays/dev names it.
pub const AGENT_IMAGE: &str = "localhost/holdfast:dev";

/// The program in the image.
const PROGRAM: &str = "/usr/bin/holdfast";

const USERS: &str = "root:x:0:0::/:/usr/bin/holdfast\nnonroot:x:65532:65532::/:/usr/bin/holdfast\n";
const GROUPS: &str = "root:x:0:\nnonroot:x:65532:\n";

impl Image {
    /// That of an agent that was built on this machine.
    ///
    /// # Errors
    /// When it cannot be found out what it is linked to.
    pub fn of_agent(program: &Path) -> anyhow::Result<Self> {
        let bytes = |text: &str| Content::Bytes(text.as_bytes().to_vec());
        let mut files = vec![
            (PathBuf::from(PROGRAM), Content::Program(program.to_path_buf())),
            ("/etc/passwd".into(), bytes(USERS)),
            ("/etc/group".into(), bytes(GROUPS)),
            ("/etc/nsswitch.conf".into(), bytes("hosts: files dns\n")),
            ("/tmp".into(), Content::Folder),
        ];
        let said = program::run(Command::new("ldd").arg(program), None)?;
        let libraries = linked(&said).with_context(|| format!("ldd {}", program.display()))?;
        files.extend(
            libraries
                .into_iter()
                .map(|path| (path.clone(), Content::File(path))),
        );
        Ok(Self {
            name: AGENT_IMAGE.to_owned(),
            entrypoint: vec![PROGRAM.to_owned()],
            user: String::new(),
            environment: vec!["PATH=/usr/bin".to_owned()],
            files,
        })
    }
}

/// Reads what ldd says: `NAME => PATH (ADDRESS)`, or for the loader `PATH (ADDRESS)`.
fn linked(said: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in said.lines() {
        ensure!(!line.contains("not found"), "a library is missing:{line}");
        let path = line.split_once("=> ").map_or(line, |(_, path)| path);
        let path = path.split_whitespace().next().unwrap_or_default();
        // What has no path is not a file: linux-vdso.
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    ensure!(!found.is_empty(), "linked to nothing: {said}");
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read() {
        let said = "\tlinux-vdso.so.1 (0x00007f7d)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f7d)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f7d)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(linked(said).unwrap(), expected.map(PathBuf::from));
        assert!(linked("\tlibx.so => not found").is_err());
    }
}
