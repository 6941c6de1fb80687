//! Where a cluster lives: a process namespace, and in it network and mount namespaces.
//!
//! The first process of the namespace reads a pipe that its owner holds, and ends when that closes. With it the kernel
//! ends every process in there, among them those that containerd has made independent, and with the last process of a
//! namespace goes what is mounted and connected in it. What has a name outside, the folder and the control groups, a
//! caretaker outside removes then. So it does not matter how the owner ends. An owner that wants to be survived says so
//! ([`Enclosure::outlive`]).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::program;
use crate::wait::until;

/// Under it are the folders of all enclosures. On disk: images and their layers are in there.
const FOLDERS: &str = "/var/tmp";

/// Ends with the enclosure: makes its network, then waits for its owner. `$1` is the folder.
const FIRST_PROCESS: &str = r#"
read -r pid rest </proc/self/stat && mount -t proc proc /proc && echo "$pid" || exit 1
exec >"$1/leash"
head -n 1
read -r word <"$1/leash" && [ "$word" = stay ] && sleep infinity
exit 0"#;

/// Runs the first process, and when it has ended removes what has a name outside. `$1` is the folder, `$2` the prefix.
const CARETAKER: &str = r#"
folder=$1 prefix=$2; shift 2
"$@"
exec >/dev/null 2>&1
for turn in $(seq 100); do
  left=
  for group in /sys/fs/cgroup/"$prefix" /sys/fs/cgroup/*/"$prefix"; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} \; || :
    [ ! -d "$group" ] || left=1
  done
  [ -n "$left" ] || break
  sleep 0.1
done
rm -rf --one-file-system "$folder""#;

/// How long the kernel and the caretaker may take to remove everything.
const REMOVAL: Duration = Duration::from_secs(30);
/// How long a process may take to end when it is asked to.
const ENDING: Duration = Duration::from_secs(20);

/// Which network the first process has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Network<'a> {
    /// That of the process which starts it.
    Callers,
    /// A new one, without connection.
    New,
    /// The one behind this file.
    Of(&'a Path),
}

/// Namespaces in an enclosure.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    mounts: PathBuf,
    network: PathBuf,
}

impl Room {
    /// Those of a process, as its folder of `/proc` names them.
    fn of(process: &Path) -> Self {
        Self {
            mounts: process.join("ns/mnt"),
            network: process.join("ns/net"),
        }
    }

    /// The file of its network namespace.
    pub(crate) fn network(&self) -> &Path {
        &self.network
    }
}

/// A process namespace and what is in it.
#[derive(Debug)]
pub(crate) struct Enclosure {
    folder: PathBuf,
    first: u32,
    /// Whoever holds it owns the enclosure.
    leash: Option<(ChildStdin, Child)>,
}

impl Enclosure {
    /// A new one. Its name is that of its folder and of its control groups.
    pub(crate) fn new(name: &str, network: Network<'_>) -> anyhow::Result<Self> {
        let folder = Self::folder_of(name);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        for inner in ["log", "pid"] {
            fs::create_dir(folder.join(inner))?;
        }
        let mut command = Command::new("sh");
        command.args(["-c", CARETAKER, "sh"]).arg(&folder).arg(name);
        if let Network::Of(file) = network {
            command.arg("nsenter").arg(format!("--net={}", file.display()));
        }
        command.args([
            "unshare",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount",
            "--propagation",
            "private",
        ]);
        if matches!(network, Network::New) {
            command.arg("--net");
        }
        command.args(["sh", "-c", FIRST_PROCESS, "sh"]).arg(&folder);
        // Out of reach of what a terminal sends to those in front: the owner decides.
        command.process_group(0).current_dir("/");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(folder.join("log/first"))?)
            .spawn()
            .context("cannot run sh")?;
        let leash = child.stdin.take().context("the first process has no input")?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let Ok(first) = line.trim().parse() else {
            drop(leash);
            let said = fs::read_to_string(folder.join("log/first")).unwrap_or_default();
            _ = child.wait();
            bail!("cannot make namespaces (as root?): {}", said.trim());
        };
        let born = born(first).context("the first process has ended")?;
        fs::write(folder.join("first"), format!("{first} {born}"))?;
        Ok(Self {
            folder,
            first,
            leash: Some((leash, child)),
        })
    }

    /// One that outlives whoever started it; none if there is none of this name, or it has ended.
    pub(crate) fn open(name: &str) -> Option<Self> {
        let folder = Self::folder_of(name);
        let first = first_of(&folder)?;
        Some(Self {
            folder,
            first,
            leash: None,
        })
    }

    /// Where an enclosure of this name has its files.
    pub(crate) fn folder_of(name: &str) -> PathBuf {
        Path::new(FOLDERS).join(name)
    }

    /// Its files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Lets it live on when its owner ends.
    pub(crate) fn outlive(&mut self) -> anyhow::Result<()> {
        if let Some((mut leash, _)) = self.leash.take() {
            leash
                .write_all(b"stay\n")
                .context("the first process has ended")?;
        }
        Ok(())
    }

    /// Ends it, and waits until nothing of it is left.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        if let Some((leash, mut caretaker)) = self.leash.take() {
            drop(leash);
            caretaker.wait()?;
        } else if first_of(&self.folder) == Some(self.first) {
            program::run(
                Command::new("sh").args(["-c", "kill -KILL \"$1\"", "sh", &self.first.to_string()]),
                None,
            )?;
        }
        until(REMOVAL, format!("{} is removed", self.folder.display()), || {
            Ok((!self.folder.exists()).then_some(()))
        })
    }

    /// Removes what is left of enclosures whose name begins so and that live no more, nor does their caretaker.
    pub(crate) fn tidy(prefix: &str) -> anyhow::Result<Vec<String>> {
        let mut removed = Vec::new();
        for entry in fs::read_dir(FOLDERS)?.filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let folder = entry.path();
            // One without this file is being made, or was never ours.
            let ours = name.starts_with(prefix) && folder.join("first").is_file();
            if !ours || first_of(&folder).is_some() {
                continue;
            }
            let mut command = Command::new("sh");
            command
                .args(["-c", CARETAKER, "sh"])
                .arg(&folder)
                .args([&name, "true"]);
            program::run(&mut command, None)?;
            removed.push(name);
        }
        Ok(removed)
    }

    /// The namespaces of the first process.
    pub(crate) fn hall(&self) -> Room {
        Room::of(&Path::new("/proc").join(self.first.to_string()))
    }

    /// New namespaces, which `setup` prepares as a shell script. They live as long as the enclosure.
    pub(crate) fn room(&self, name: &str, setup: &str) -> anyhow::Result<Room> {
        let log = self.log(&format!("{name}-room"));
        let script = format!("set -e\n{setup}\necho up\nexec >/dev/null\nexec sleep infinity");
        let ready = self.folder.join(format!("{name}-room"));
        let mut command = self.command(&self.hall(), "sh");
        command.args([
            "-c",
            r#"log=$1 ready=$2 script=$3
setsid unshare --mount --net --propagation private sh -c "$script" </dev/null >"$ready" 2>"$log" &
echo $!"#,
            "sh",
        ]);
        command.arg(&log).arg(&ready).arg(script);
        let holder = program::run(&mut command, None)?.trim().to_owned();
        let process = self.inner(&holder);
        until(ENDING, format!("the namespaces of {name}"), || {
            if fs::read_to_string(&ready)? == "up\n" {
                return Ok(Some(()));
            }
            Ok(None)
        })
        .with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
        fs::write(self.folder.join(format!("{name}-holder")), &holder)?;
        Ok(Room::of(&process))
    }

    /// A room that was made before.
    pub(crate) fn room_of(&self, name: &str) -> anyhow::Result<Room> {
        Ok(Room::of(&self.inner(&self.holder_of(name)?)))
    }

    /// The process that holds a room, by its number in the enclosure.
    pub(crate) fn holder_of(&self, name: &str) -> anyhow::Result<String> {
        fs::read_to_string(self.folder.join(format!("{name}-holder")))
            .with_context(|| format!("there is no {name}"))
    }

    /// A command that runs in these namespaces, below the first process. Its working directory is `/`.
    pub(crate) fn command(&self, room: &Room, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--pid=/proc/{}/ns/pid", self.first))
            .arg(format!("--mount={}", room.mounts.display()))
            .arg(format!("--net={}", room.network.display()))
            .arg("--")
            .arg(program.as_ref());
        command
    }

    /// Starts a process that runs until it is ended. What it says goes to its log.
    pub(crate) fn start(&self, room: &Room, name: &str, argv: &[String], path: &str) -> anyhow::Result<()> {
        ensure!(!self.is_running(name), "{name} runs already");
        let mut command = self.command(room, "sh");
        command.args([
            "-c",
            r#"log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!"#,
            "sh",
        ]);
        command.arg(self.log(name)).args(argv).env("PATH", path);
        let id = program::run(&mut command, None)?;
        fs::write(self.folder.join("pid").join(name), id.trim())?;
        Ok(())
    }

    /// Whether a process that was started under this name runs.
    pub(crate) fn is_running(&self, name: &str) -> bool {
        self.id(name).is_some_and(|id| {
            let process = self.inner(&id);
            let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
            // Its first thread may be over while others still hold its sockets.
            let threads = || fs::read_dir(process.join("task")).map_or(0, Iterator::count);
            state(&stat).is_some_and(|state| state != 'Z' || threads() > 1)
        })
    }

    /// Sends a process a signal and waits for its end.
    pub(crate) fn stop(&self, name: &str, signal: &str) -> anyhow::Result<()> {
        ensure!(self.is_running(name), "{name} does not run");
        let id = self
            .id(name)
            .with_context(|| format!("{name} was never started"))?;
        program::run(
            self.command(&self.hall(), "sh")
                .args(["-c", r#"kill -"$1" "$2""#, "sh", signal, &id]),
            None,
        )?;
        until(ENDING, format!("{name} has ended"), || {
            Ok((!self.is_running(name)).then_some(()))
        })
    }

    /// Names of the processes that were started, and whether they run.
    pub(crate) fn processes(&self) -> anyhow::Result<Vec<(String, bool)>> {
        let mut found: Vec<_> = fs::read_dir(self.folder.join("pid"))?
            .filter_map(Result::ok)
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .map(|name| (self.is_running(&name), name))
            .map(|(runs, name)| (name, runs))
            .collect();
        found.sort();
        Ok(found)
    }

    /// Where a process writes what it says.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.folder.join("log").join(name)
    }

    /// The last lines of every log, for an error.
    pub(crate) fn last_lines(&self) -> String {
        let Ok(entries) = fs::read_dir(self.folder.join("log")) else {
            return String::new();
        };
        let mut told = String::new();
        for entry in entries.filter_map(Result::ok) {
            let bytes = fs::read(entry.path()).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text.lines().collect();
            let last = lines.get(lines.len().saturating_sub(4)..).unwrap_or_default();
            if !last.is_empty() {
                told += &format!(
                    "--- {}\n{}\n",
                    entry.file_name().to_string_lossy(),
                    last.join("\n")
                );
            }
        }
        told
    }

    fn id(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.folder.join("pid").join(name)).ok()
    }

    /// The folder of a process that has this number in the enclosure.
    pub(crate) fn inner(&self, id: &str) -> PathBuf {
        Path::new("/proc")
            .join(self.first.to_string())
            .join("root/proc")
            .join(id)
    }
}

impl Drop for Enclosure {
    fn drop(&mut self) {
        if self.leash.is_some() {
            // Whatever cannot be removed now is removed by the caretaker or by the next `tidy`.
            _ = self.end();
        }
    }
}

/// The first process of the enclosure with this folder, if it lives.
fn first_of(folder: &Path) -> Option<u32> {
    let text = fs::read_to_string(folder.join("first")).ok()?;
    let (id, then) = text.split_once(' ')?;
    let id = id.parse().ok()?;
    (born(id)? == then).then_some(id)
}

/// When a living process was started, in the kernel's words: with the number it names one process for ever.
fn born(id: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    if state(&stat)? == 'Z' {
        return None;
    }
    Some(after_name(&stat)?.split(' ').nth(19)?.to_owned())
}

fn state(stat: &str) -> Option<char> {
    after_name(stat)?.chars().next()
}

/// What stands behind the name, which may hold spaces and parentheses itself.
fn after_name(stat: &str) -> Option<&str> {
    stat.rsplit_once(") ").map(|(_, rest)| rest)
}
