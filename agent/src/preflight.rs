//! What this machine must have, found out by trying it. The agent refuses to start with the same list.
//!
//! Nothing here touches an interface, and what is made is gone afterwards.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use caps::{CapSet, Capability};
use holdfast_ebpf::abi::{MapLayout, capacity};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::datapath::pins::{self, Pins};
use crate::datapath::raw::{self, Insn, MapShape, SkbContext};
use crate::datapath::{self, AttachMode, DatapathError};
use crate::netlink::tc;

/// What to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wants {
    /// Where pins go.
    pub bpffs_dir: PathBuf,
    /// Where sockets, locks and reports go.
    pub run_dir: PathBuf,
    /// Where the saved state goes.
    pub state_dir: PathBuf,
    /// Where the program is to be attached.
    pub attach: AttachMode,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// What it is; the same in every release.
    pub name: String,
    /// Whether it is there.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do about it; none when it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// The list of everything that is missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine lacks what holdfast needs:{}", list(.0))]
pub struct Missing(pub Vec<Check>);

fn list(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        text.push_str("\n  ");
        text.push_str(&check.name);
        text.push_str(": ");
        text.push_str(&check.detail);
        if let Some(remedy) = &check.remedy {
            text.push_str(" (");
            text.push_str(remedy);
            text.push(')');
        }
    }
    text
}

/// Looks at everything.
#[must_use]
pub fn run(wants: &Wants) -> Vec<Check> {
    let mut checks = surroundings(wants);
    checks.push(program());
    checks
}

fn surroundings(wants: &Wants) -> Vec<Check> {
    let mut checks = capabilities();
    checks.push(bpffs(&wants.bpffs_dir));
    checks.push(directory("run-dir", &wants.run_dir));
    checks.push(directory("state-dir", &wants.state_dir));
    checks.extend(kernel(wants.attach));
    checks
}

/// Looks at everything, for those who cannot go on without it.
///
/// Where an agent has been before, the program is not tried here: that costs the verifier's time at every restart, and
/// one that is refused when it is loaded leaves the one in force that serves.
///
/// # Errors
/// The checks that failed.
pub fn require(wants: &Wants) -> Result<(), Missing> {
    let first_life = !Pins::new(&wants.bpffs_dir).version().exists();
    let checks = if first_life {
        run(wants)
    } else {
        surroundings(wants)
    };
    let failed: Vec<Check> = checks.into_iter().filter(|check| !check.ok).collect();
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Missing(failed))
    }
}

fn passed(name: &str, detail: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: true,
        detail: detail.into(),
        remedy: None,
    }
}

fn failed(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        ok: false,
        detail: detail.into(),
        remedy: Some(remedy.into()),
    }
}

// --- capabilities ------------------------------------------------------------------------------------------

/// What the agent runs with, and what for.
const CAPABILITIES: [(Capability, &str, &str); 3] = [
    (Capability::CAP_BPF, "CAP_BPF", "maps and programs"),
    (
        Capability::CAP_NET_ADMIN,
        "CAP_NET_ADMIN",
        "attaching to interfaces",
    ),
    (
        Capability::CAP_PERFMON,
        "CAP_PERFMON",
        "a program that reads packets through pointers",
    ),
];

fn capabilities() -> Vec<Check> {
    CAPABILITIES
        .into_iter()
        .map(
            |(capability, name, purpose)| match caps::has_cap(None, CapSet::Effective, capability) {
                Ok(true) => passed(name, "effective"),
                Ok(false) => failed(
                    name,
                    format!("not effective; needed for {purpose}"),
                    format!(
                        "add {} to securityContext.capabilities.add, or AmbientCapabilities={name} in the unit",
                        name.trim_start_matches("CAP_")
                    ),
                ),
                Err(error) => failed(name, format!("cannot be read: {error}"), "mount /proc"),
            },
        )
        .collect()
}

/// Whether a seccomp filter is on this process (`Seccomp:` of /proc/self/status is 2).
fn under_seccomp() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status.lines().any(|line| {
            line.strip_prefix("Seccomp:")
                .is_some_and(|mode| mode.trim() == "2")
        })
    })
}

/// What to do when bpf(2) was refused.
fn remedy(errno: Errno, otherwise: &str) -> String {
    let capable = matches!(
        caps::has_cap(None, CapSet::Effective, Capability::CAP_BPF),
        Ok(true)
    );
    match errno {
        Errno::PERM | Errno::ACCESS if capable && under_seccomp() => {
            "CAP_BPF is there and a seccomp filter is on this process: use a profile that allows bpf(2) \
             (seccompProfile RuntimeDefault does for processes with CAP_BPF)"
                .to_owned()
        }
        Errno::PERM | Errno::ACCESS if capable => {
            "CAP_BPF is there: look for a security module (lockdown, SELinux, AppArmor) or a user namespace that \
             refuses bpf(2)"
                .to_owned()
        }
        Errno::PERM | Errno::ACCESS => "add the capabilities above".to_owned(),
        _ => otherwise.to_owned(),
    }
}

// --- directories -------------------------------------------------------------------------------------------

/// The nearest directory on the way to `path` that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(path)
}

fn bpffs(path: &Path) -> Check {
    const NAME: &str = "bpffs";
    const MOUNT: &str = "mount -t bpf bpf /sys/fs/bpf on the node and give the agent that directory, or name another with --bpffs-dir";
    // The agent makes its directory, not the way to it.
    let near = if path.exists() {
        path
    } else {
        path.parent().unwrap_or(path)
    };
    match pins::is_bpffs(near) {
        Ok(true) => {}
        Ok(false) => {
            return failed(
                NAME,
                format!("{} is not on a BPF file system", near.display()),
                MOUNT,
            );
        }
        Err(error) => return failed(NAME, format!("{}: {error}", near.display()), MOUNT),
    }
    match try_pin(near) {
        Ok(()) => passed(NAME, format!("{} takes pins", near.display())),
        Err(errno) => failed(
            NAME,
            format!("{}: a map cannot be pinned: {errno}", near.display()),
            remedy(
                errno,
                "make the directory writable for the agent's user, and the mount read-write",
            ),
        ),
    }
}

fn try_pin(directory: &Path) -> Result<(), Errno> {
    let map = create(MapLayout::ARRAY, 4, 4, 1, 0)?;
    let path = directory.join(format!("preflight_{}", std::process::id()));
    raw::obj_pin(map.as_fd(), &path)?;
    fs::remove_file(&path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

fn directory(name: &str, path: &Path) -> Check {
    let near = existing(path);
    let probe = near.join(format!(".holdfast-preflight-{}", std::process::id()));
    let tried = fs::write(&probe, []).and_then(|()| fs::remove_file(&probe));
    match tried {
        Ok(()) if near == path => passed(name, format!("{} is writable", path.display())),
        Ok(()) => passed(name, format!("{} can be made", path.display())),
        Err(error) => failed(
            name,
            format!("{}: {}", near.display(), describe(&error)),
            format!("make it writable, or name another with --{name}"),
        ),
    }
}

fn describe(error: &io::Error) -> String {
    format!("not writable: {error}")
}

// --- kernel ------------------------------------------------------------------------------------------------

fn create(map_type: u32, key: u32, value: u32, entries: u32, flags: u32) -> Result<OwnedFd, Errno> {
    raw::map_create(
        "preflight",
        MapShape {
            map_type,
            key_size: key,
            value_size: value,
            max_entries: entries,
            flags,
        },
    )
}

/// `BPF_FUNC_*` of the helpers that the program calls and that not every kernel has.
const HELPERS: [(&str, i32, &str); 2] = [
    ("bpf_redirect_peer", 155, "5.10"),
    ("bpf_ktime_get_boot_ns", 125, "5.8"),
];

fn kernel(attach: AttachMode) -> Vec<Check> {
    let mut checks = vec![outcome(
        "map-types",
        maps(),
        "hash, array, per-CPU array, LRU hash, ring buffer, mappable array",
        "Linux 5.8 or later with CONFIG_BPF_SYSCALL",
    )];
    let program = raw::load_classifier("preflight", &returning_zero());
    match program {
        Ok(program) => {
            checks.push(passed("program-load", "a classifier loads"));
            checks.push(outcome(
                "test-run",
                test_run(&program),
                "a classifier runs on a synthetic packet with a context",
                "Linux 5.8 or later: proofs need BPF_PROG_TEST_RUN with ctx_in",
            ));
            checks.push(hook(attach, &program));
        }
        Err(errno) => {
            let text = format!("a classifier cannot be loaded: {errno}");
            checks.push(failed(
                "program-load",
                text,
                remedy(errno, "Linux with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF"),
            ));
            for name in ["test-run", "attach"] {
                checks.push(failed(name, "not tried: no program", "see program-load"));
            }
        }
    }
    for (helper, number, since) in HELPERS {
        checks.push(outcome(
            helper,
            raw::load_classifier("preflight", &calling(number)).map(drop),
            "there",
            &format!("Linux {since} or later"),
        ));
    }
    checks.push(outcome(
        "btf",
        raw::load_btf(&smallest_btf()).map(drop),
        "type information loads",
        "Linux 5.8 or later with CONFIG_BPF_SYSCALL",
    ));
    checks
}

/// The very program that will be attached, with maps of one entry each.
fn program() -> Check {
    const NAME: &str = "program";
    match datapath::try_load() {
        Ok(instructions) => passed(
            NAME,
            format!("passes this kernel's verifier ({instructions} instructions)"),
        ),
        Err(DatapathError::NotBuilt(error)) => failed(NAME, "not part of this binary", error.to_string()),
        Err(error) => failed(
            NAME,
            error.to_string(),
            "see the checks above; if all of them passed, report this",
        ),
    }
}

fn outcome(name: &str, result: Result<(), Errno>, good: &str, otherwise: &str) -> Check {
    match result {
        Ok(()) => passed(name, good),
        Err(errno) => failed(name, format!("refused: {errno}"), remedy(errno, otherwise)),
    }
}

fn maps() -> Result<(), Errno> {
    create(MapLayout::HASH, 4, 8, 1, 0)?;
    create(MapLayout::ARRAY, 4, 8, 1, 0)?;
    create(MapLayout::ARRAY, 4, 8, 1, MapLayout::MMAPABLE)?;
    create(MapLayout::PER_CPU_ARRAY, 4, 8, 1, 0)?;
    create(MapLayout::LRU_HASH, 4, 8, 1, 0)?;
    // A power of two of pages, whatever the size of a page.
    create(MapLayout::RING_BUFFER, 0, 0, capacity::WAKES_BYTES, 0)?;
    Ok(())
}

fn test_run(program: &OwnedFd) -> Result<(), Errno> {
    let mut frame = [0u8; 14 + 20];
    frame[12] = 0x08;
    frame[14] = 0x45;
    let context = SkbContext::new(1, 0, [1, 2, 3, 4, 5]);
    let run = raw::test_run(program.as_fd(), &frame, &context, 1)?;
    // A kernel that takes the context in gives it back.
    if run.context.mark == context.mark && run.context.cb == context.cb {
        Ok(())
    } else {
        Err(Errno::NOTSUP)
    }
}

/// The hook that the mode asks for; for `auto` one of the two.
fn hook(attach: AttachMode, program: &OwnedFd) -> Check {
    const NAME: &str = "attach";
    let tcx = || {
        raw::try_tcx(program.as_fd()).map_err(|errno| {
            let remedy = remedy(errno, "Linux 6.6 or later with CONFIG_NET_XGRESS");
            (format!("tcx is refused: {errno}"), remedy)
        })
    };
    // That there are filters of programs too cannot be tried without a device: the first attach says it.
    let clsact = || {
        tc::try_clsact().map_err(|error| {
            let without = "Linux with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF, or their modules loaded: \
                           modprobe sch_ingress cls_bpf";
            let remedy = error.errno().map_or_else(|| without.to_owned(), |errno| remedy(errno, without));
            (format!("clsact is refused: {error}"), remedy)
        })
    };
    let tcx_is_there = "links at the ingress hook (tcx)";
    let clsact_is_there = "filters of the clsact qdisc";
    match attach {
        AttachMode::Tcx => found(NAME, tcx().map(|()| tcx_is_there.to_owned())),
        AttachMode::Tc => found(NAME, clsact().map(|()| clsact_is_there.to_owned())),
        AttachMode::Auto => {
            let either =
                tcx()
                    .map(|()| tcx_is_there.to_owned())
                    .or_else(|(no_tcx, to_do)| {
                        clsact().map(|()| format!("{clsact_is_there}; {no_tcx}")).map_err(
                            |(no_clsact, or)| (format!("{no_tcx}; {no_clsact}"), format!("{to_do}; or {or}")),
                        )
                    });
            found(NAME, either)
        }
    }
}

fn found(name: &str, result: Result<String, (String, String)>) -> Check {
    match result {
        Ok(detail) => passed(name, detail),
        Err((detail, remedy)) => failed(name, detail, remedy),
    }
}

const fn instruction(code: u8, registers: u8, immediate: i32) -> Insn {
    Insn {
        code,
        registers,
        offset: 0,
        immediate,
    }
}

/// `BPF_ALU64 | BPF_MOV | BPF_K`.
const MOVE: u8 = 0xb7;
/// `BPF_JMP | BPF_CALL`.
const CALL: u8 = 0x85;
/// `BPF_JMP | BPF_EXIT`.
const EXIT: u8 = 0x95;

fn returning_zero() -> Vec<Insn> {
    vec![instruction(MOVE, 0, 0), instruction(EXIT, 0, 0)]
}

/// Calls a helper that takes at most two numbers: the verifier refuses one that the kernel does not have.
fn calling(helper: i32) -> Vec<Insn> {
    vec![
        instruction(MOVE, 1, 1),
        instruction(MOVE, 2, 0),
        instruction(CALL, 0, helper),
        instruction(MOVE, 0, 0),
        instruction(EXIT, 0, 0),
    ]
}

/// A header, one type (`int`, 32 bit) and its name.
fn smallest_btf() -> Vec<u8> {
    let mut blob = Vec::new();
    for half in [0xeb9f_u16, 0x0001] {
        blob.extend(half.to_ne_bytes());
    }
    // Length of the header; offset and length of the types; offset and length of the strings.
    for word in [24_u32, 0, 16, 16, 5] {
        blob.extend(word.to_ne_bytes());
    }
    // Name at 1; BTF_KIND_INT; 4 bytes; 32 bits from bit 0.
    for word in [1_u32, 1 << 24, 4, 32] {
        blob.extend(word.to_ne_bytes());
    }
    blob.extend(b"\0int\0");
    blob
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_directory_is_no_bpffs_and_the_remedy_says_how_to_mount_one() {
        let directory = tempfile::tempdir().unwrap();
        let check = bpffs(&directory.path().join("holdfast"));
        assert!(!check.ok);
        assert!(
            check.detail.contains("not on a BPF file system"),
            "{}",
            check.detail
        );
        assert!(check.remedy.unwrap().contains("mount -t bpf"));
    }

    #[test]
    fn a_directory_that_can_be_made_is_no_problem_and_is_not_made() {
        let directory = tempfile::tempdir().unwrap();
        let wanted = directory.path().join("run").join("holdfast");
        let check = super::directory("run-dir", &wanted);
        assert!(check.ok, "{}", check.detail);
        assert!(!directory.path().join("run").exists());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_missing_is_listed_with_its_remedies() {
        let missing = Missing(vec![
            failed("CAP_BPF", "not effective", "add BPF"),
            failed("bpffs", "/x is not on a BPF file system", "mount one"),
        ]);
        assert_eq!(
            missing.to_string(),
            "this machine lacks what holdfast needs:\n  CAP_BPF: not effective (add BPF)\n  bpffs: /x is not on a BPF \
             file system (mount one)"
        );
    }

    #[test]
    fn every_check_has_a_name_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let checks = run(&Wants {
            bpffs_dir: directory.path().to_owned(),
            run_dir: directory.path().to_owned(),
            state_dir: directory.path().to_owned(),
            attach: AttachMode::default(),
        });
        let mut names: Vec<&str> = checks.iter().map(|check| check.name.as_str()).collect();
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
        assert!(checks.iter().all(|check| check.ok == check.remedy.is_none()));
    }
}
