//! Faults on purpose, for tests: a data path that fails, dawdles or forgets a rule as it is told.
//!
//! The instructions are those of `HOLDFAST_CHAOS`; `@PATH` names a file of them, which is read again before every
//! operation, so that a test can change its mind. They are separated by `;` or lines, `#` begins a comment:
//!
//! ```text
//! attach=EPERM:3              the next three attaches fail
//! entries@7=EINVAL            writing entries of device 7 (a number, or a name) fails, for ever
//! registry=EIO for 5s         reads of the registry fail for five seconds, counted from the first sight of the line
//! row=slow 300ms              writing a row takes so long (and then happens)
//! row=panic                   whoever writes a row panics
//! wall=+600s                  the wall clock is ten minutes ahead, from the next operation on
//! detach-on-exit              a rule is broken: see [`Broken`]
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use holdfast_ebpf::abi::pin;
use holdfast_engine::belief::{Audited, Belief};
use holdfast_engine::model::{Adoption, Ifindex, Op, OpDone, OpError, OpResult, RegistryRead, Row};
use rustix::io::Errno;

use super::{Datapath, DatapathError, Stats};
use crate::clock;
use crate::netlink::{faults, find};

/// The name of the environment variable.
pub const VARIABLE: &str = "HOLDFAST_CHAOS";

/// A rule of the agent that is broken on purpose, so that the test that guards it can be seen to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Broken {
    /// `detach-on-exit`: links go when the agent ends.
    DetachOnExit,
    /// `ignore-host-mac`: the registry's row is believed for whatever device has its number.
    IgnoreHostMac,
    /// `failed-read-is-absent`: a registry row that could not be read counts as not there.
    FailedReadIsAbsent,
    /// `believe-attach`: an attach that failed is reported as done.
    BelieveAttach,
    /// `believe-proofs`: every proof agrees, unasked.
    BelieveProofs,
    /// `forget-pins`: nothing is adopted.
    ForgetPins,
    /// `forget-locals`: the node's own addresses are not written.
    ForgetLocals,
    /// `forget-sources`: rows say nothing of the addresses that a consumer may use.
    ForgetSources,
    /// `forget-prefixes`: rows say nothing of the prefixes of a consumer.
    ForgetPrefixes,
    /// `all-are-peers`: everybody is said to be reached at the other end of a veth.
    AllArePeers,
    /// `blind-audit`: audits find nothing, also among the devices.
    BlindAudit,
    /// `audits-hold`: an audit closes for a moment every row that it looks at.
    AuditsHold,
    /// `deaf-links`: what the kernel tells of devices is not heard.
    DeafLinks,
    /// `keep-rows`: no row is ever written again or deleted once it is open.
    KeepRows,
}

impl Broken {
    const ALL: [(&'static str, Self); 14] = [
        ("detach-on-exit", Self::DetachOnExit),
        ("ignore-host-mac", Self::IgnoreHostMac),
        ("failed-read-is-absent", Self::FailedReadIsAbsent),
        ("believe-attach", Self::BelieveAttach),
        ("believe-proofs", Self::BelieveProofs),
        ("forget-pins", Self::ForgetPins),
        ("forget-locals", Self::ForgetLocals),
        ("forget-sources", Self::ForgetSources),
        ("forget-prefixes", Self::ForgetPrefixes),
        ("all-are-peers", Self::AllArePeers),
        ("blind-audit", Self::BlindAudit),
        ("audits-hold", Self::AuditsHold),
        ("deaf-links", Self::DeafLinks),
        ("keep-rows", Self::KeepRows),
    ];
}

/// What an instruction is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Attach,
    Detach,
    Clear,
    Row,
    Sources,
    Locals,
    Entries,
    DeleteEntries,
    Backends,
    Slots,
    Policy,
    Identity,
    ProveSet,
    ProveIntent,
    Registry,
    Audit,
}

impl Target {
    const ALL: [(&'static str, Self); 16] = [
        ("attach", Self::Attach),
        ("detach", Self::Detach),
        ("clear", Self::Clear),
        ("row", Self::Row),
        ("sources", Self::Sources),
        ("locals", Self::Locals),
        ("entries", Self::Entries),
        ("delete-entries", Self::DeleteEntries),
        ("backends", Self::Backends),
        ("slots", Self::Slots),
        ("policy", Self::Policy),
        ("identity", Self::Identity),
        ("prove-set", Self::ProveSet),
        ("prove-intent", Self::ProveIntent),
        ("registry", Self::Registry),
        ("audit", Self::Audit),
    ];

    const fn of(op: &Op) -> (Self, Option<Ifindex>) {
        match op {
            Op::Attach { device } => (Self::Attach, Some(device.ifindex)),
            Op::Detach { ifindex } => (Self::Detach, Some(*ifindex)),
            Op::ClearInterface { ifindex } => (Self::Clear, Some(*ifindex)),
            Op::WriteRow { ifindex, .. } => (Self::Row, Some(*ifindex)),
            Op::WriteSources { ifindex, .. } => (Self::Sources, Some(*ifindex)),
            Op::WriteLocals { .. } => (Self::Locals, None),
            Op::WriteEntries { ifindex, .. } => (Self::Entries, Some(*ifindex)),
            Op::DeleteEntries { ifindex, .. } => (Self::DeleteEntries, Some(*ifindex)),
            Op::WriteBackends { .. } => (Self::Backends, None),
            Op::WriteSlots { .. } => (Self::Slots, None),
            Op::WritePolicy { .. } => (Self::Policy, None),
            Op::DeleteIdentity { ifindex, .. } => (Self::Identity, Some(*ifindex)),
            Op::ProveSet { device, .. } => (Self::ProveSet, Some(device.ifindex)),
            Op::ProveIntent(proof) => (Self::ProveIntent, Some(proof.device.ifindex)),
        }
    }
}

/// What happens then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Errno(Errno),
    Slow(Duration),
    Panic,
}

/// How long it goes on happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Always,
    Times(u32),
    For(Duration),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// As it was written: names the rule between two readings of a file.
    text: String,
    target: Target,
    /// A number or a name.
    device: Option<String>,
    fault: Fault,
    extent: Extent,
}

/// A line that is no instruction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{VARIABLE}: {text:?}: {reason}")]
pub struct BadInstruction {
    text: String,
    reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Plan {
    rules: Vec<Rule>,
    broken: BTreeSet<Broken>,
    /// How far the wall clock is ahead, milliseconds.
    wall_ms: i64,
}

impl Plan {
    fn parse(text: &str) -> Result<Self, BadInstruction> {
        let mut plan = Self::default();
        for line in text.split(['\n', ';']) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            if let Some((_, broken)) = Broken::ALL.iter().find(|(name, _)| *name == line) {
                plan.broken.insert(*broken);
                continue;
            }
            let bad = |reason| BadInstruction {
                text: line.to_owned(),
                reason,
            };
            match line.strip_prefix("wall=") {
                Some(ahead) => plan.wall_ms = parse_ahead(ahead).map_err(bad)?,
                None => plan.rules.push(Rule::parse(line).map_err(bad)?),
            }
        }
        Ok(plan)
    }
}

impl Rule {
    fn parse(line: &str) -> Result<Self, String> {
        let (subject, fault) = line
            .split_once('=')
            .ok_or("neither a rule that can be broken nor TARGET=FAULT")?;
        let (target, device) = match subject.split_once('@') {
            Some((target, device)) => (target, Some(device.trim().to_owned())),
            None => (subject, None),
        };
        let target = target.trim();
        let (_, target) = Target::ALL
            .into_iter()
            .find(|(name, _)| *name == target)
            .ok_or_else(|| format!("no such target: {target}"))?;
        let (fault, extent) = if let Some((fault, duration)) = fault.split_once(" for ") {
            (fault, Extent::For(parse_duration(duration)?))
        } else if let Some((fault, times)) = fault.split_once(':') {
            let times = times.trim().parse().map_err(|_| format!("no number: {times}"))?;
            (fault, Extent::Times(times))
        } else {
            (fault, Extent::Always)
        };
        let fault = match fault.trim().split_once(' ') {
            Some(("slow", duration)) => Fault::Slow(parse_duration(duration)?),
            None if fault.trim() == "panic" => Fault::Panic,
            _ => Fault::Errno(parse_errno(fault.trim())?),
        };
        Ok(Self {
            text: line.to_owned(),
            target,
            device,
            fault,
            extent,
        })
    }

    fn is_about(&self, device: Option<Ifindex>) -> bool {
        let Some(wanted) = &self.device else { return true };
        let Some(device) = device else { return false };
        if let Ok(number) = wanted.parse::<Ifindex>() {
            return number == device;
        }
        matches!(find::by_name(wanted), Ok(Some(link)) if link.ifindex == device)
    }
}

/// `+600s` or `-600s`, in milliseconds.
fn parse_ahead(text: &str) -> Result<i64, String> {
    let (sign, duration) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(duration), _) => (1, duration),
        (_, Some(duration)) => (-1, duration),
        _ => return Err(format!("neither + nor -: {text}")),
    };
    let ms = i64::try_from(parse_duration(duration)?.as_millis());
    Ok(sign * ms.map_err(|_| format!("too far: {text}"))?)
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1),
        None => (
            text.strip_suffix('s')
                .ok_or_else(|| format!("no duration: {text}"))?,
            1000,
        ),
    };
    let number: u64 = number.parse().map_err(|_| format!("no duration: {text}"))?;
    Ok(Duration::from_millis(number * unit))
}

fn parse_errno(text: &str) -> Result<Errno, String> {
    Ok(match text {
        "EPERM" => Errno::PERM,
        "ENOENT" => Errno::NOENT,
        "EIO" => Errno::IO,
        "E2BIG" => Errno::TOOBIG,
        "ENOSPC" => Errno::NOSPC,
        "EAGAIN" => Errno::AGAIN,
        "ENOMEM" => Errno::NOMEM,
        "EBUSY" => Errno::BUSY,
        "EEXIST" => Errno::EXIST,
        "ENODEV" => Errno::NODEV,
        "EINVAL" => Errno::INVAL,
        _ => return Err(format!("no errno that is known here: {text}")),
    })
}

/// A data path that does as the instructions say, and else as the one inside.
pub struct Chaos {
    inside: Arc<dyn Datapath>,
    source: Source,
    state: Mutex<State>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Text(String),
    File(PathBuf),
}

#[derive(Debug, Default)]
struct State {
    text: String,
    plan: Plan,
    /// Of each rule by its text: when it was first seen, and how often it has struck.
    struck: BTreeMap<String, (Option<Instant>, u32)>,
    /// Devices that this process has attached to, or found attached.
    attached: BTreeSet<Ifindex>,
    open_rows: BTreeSet<Ifindex>,
}

impl fmt::Debug for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chaos")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

impl Chaos {
    /// A data path with these instructions (or `@PATH`).
    ///
    /// # Errors
    /// [`BadInstruction`]: a test that breaks nothing by a slip of the pen would prove nothing.
    pub fn new(inside: Arc<dyn Datapath>, instructions: &str) -> Result<Self, BadInstruction> {
        let source = match instructions.strip_prefix('@') {
            Some(path) => Source::File(PathBuf::from(path)),
            None => Source::Text(instructions.to_owned()),
        };
        let chaos = Self {
            inside,
            source,
            state: Mutex::new(State::default()),
        };
        chaos.state().reread(&chaos.source)?;
        Ok(chaos)
    }

    /// `inside` itself when the variable is not set.
    ///
    /// # Errors
    /// [`BadInstruction`].
    pub fn from_environment(inside: Arc<dyn Datapath>) -> Result<Arc<dyn Datapath>, BadInstruction> {
        match std::env::var(VARIABLE) {
            Ok(instructions) if !instructions.trim().is_empty() => {
                tracing::warn!(instructions, "faults on purpose");
                Ok(Arc::new(Self::new(inside, &instructions)?))
            }
            _ => Ok(inside),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to happen to this call. Waits, if that is it.
    fn strike(&self, target: Target, device: Option<Ifindex>) -> Option<Errno> {
        let fault = {
            let mut state = self.state();
            if let Err(error) = state.reread(&self.source) {
                tracing::warn!(%error, "the faults stay as they were");
            }
            state.strike(target, device)
        };
        match fault? {
            Fault::Errno(errno) => Some(errno),
            Fault::Slow(duration) => {
                thread::sleep(duration);
                None
            }
            Fault::Panic => panic_on_purpose(),
        }
    }

    fn is_broken(&self, broken: Broken) -> bool {
        self.state().plan.broken.contains(&broken)
    }

    /// What is carried out instead of an operation, where a broken rule says so.
    fn distorted(&self, op: &Op) -> Op {
        let mut op = op.clone();
        let all_are_peers = self.is_broken(Broken::AllArePeers);
        match &mut op {
            Op::WriteRow { row, .. } => {
                row.has_sources &= !self.is_broken(Broken::ForgetSources);
                row.has_prefixes_v4 &= !self.is_broken(Broken::ForgetPrefixes);
                row.has_prefixes_v6 &= !self.is_broken(Broken::ForgetPrefixes);
                row.via = row.via.filter(|_| !all_are_peers);
            }
            Op::WriteBackends { backends } if all_are_peers => {
                let backends = backends.values_mut().flatten();
                backends.for_each(|backend| backend.via = None);
            }
            _ => {}
        }
        op
    }

    fn note(&self, op: &Op) {
        let mut state = self.state();
        match op {
            Op::Attach { device } => drop(state.attached.insert(device.ifindex)),
            Op::Detach { ifindex } => drop(state.attached.remove(ifindex)),
            Op::WriteRow { ifindex, row } if row.token.is_some() => drop(state.open_rows.insert(*ifindex)),
            _ => {}
        }
    }
}

impl State {
    fn reread(&mut self, source: &Source) -> Result<(), BadInstruction> {
        let text = match source {
            Source::Text(text) => text.clone(),
            // Not there yet, or not any more: nothing happens.
            Source::File(path) => std::fs::read_to_string(path).unwrap_or_default(),
        };
        if text == self.text && !text.is_empty() {
            return Ok(());
        }
        self.plan = Plan::parse(&text)?;
        self.text = text;
        for (broken, switch) in [
            (Broken::BlindAudit, &faults::BLIND),
            (Broken::DeafLinks, &faults::DEAF),
        ] {
            switch.store(self.plan.broken.contains(&broken), Ordering::Relaxed);
        }
        clock::faults::WALL_AHEAD_MS.store(self.plan.wall_ms, Ordering::Relaxed);
        let rules: BTreeSet<&str> = self.plan.rules.iter().map(|rule| rule.text.as_str()).collect();
        self.struck.retain(|rule, _| rules.contains(rule.as_str()));
        let now = Instant::now();
        for rule in &self.plan.rules {
            let struck = self.struck.entry(rule.text.clone()).or_default();
            struck.0.get_or_insert(now);
        }
        Ok(())
    }

    fn strike(&mut self, target: Target, device: Option<Ifindex>) -> Option<Fault> {
        for rule in &self.plan.rules {
            if rule.target != target || !rule.is_about(device) {
                continue;
            }
            let (since, times) = self.struck.entry(rule.text.clone()).or_default();
            let strikes = match rule.extent {
                Extent::Always => true,
                Extent::Times(limit) => *times < limit,
                Extent::For(limit) => since.is_some_and(|since| since.elapsed() < limit),
            };
            if strikes {
                *times += 1;
                return Some(rule.fault);
            }
        }
        None
    }
}

#[expect(clippy::panic, reason = "what is asked for")]
fn panic_on_purpose() -> ! {
    panic!("on purpose")
}

/// The map that an operation writes to.
const fn map_of(op: &Op) -> &'static str {
    match op {
        Op::WriteSources { .. } => pin::SOURCES,
        Op::WriteLocals { .. } => pin::LOCALS,
        Op::WriteEntries { .. } | Op::DeleteEntries { .. } => pin::SERVICES,
        Op::WriteBackends { .. } => pin::BACKENDS,
        Op::WriteSlots { .. } => pin::SLOTS,
        Op::WritePolicy { .. } => pin::POLICIES,
        _ => pin::CONSUMERS,
    }
}

/// As the kernel would say it.
fn failure(op: &Op, errno: Errno) -> OpError {
    match errno {
        Errno::NODEV => OpError::NoDevice,
        Errno::TOOBIG | Errno::NOSPC => OpError::Full {
            map: map_of(op).to_owned(),
            need: 1,
            have: 0,
        },
        errno if matches!(op, Op::ProveSet { .. } | Op::ProveIntent(_)) => OpError::Disproved {
            message: format!("on purpose: {}", std::io::Error::from(errno)),
        },
        errno => OpError::Refused {
            message: format!("on purpose: {}", std::io::Error::from(errno)),
        },
    }
}

impl Datapath for Chaos {
    fn carry_out(&self, op: &Op) -> OpResult {
        let (target, device) = Target::of(op);
        if matches!(op, Op::ProveSet { .. } | Op::ProveIntent(_)) && self.is_broken(Broken::BelieveProofs) {
            return Ok(OpDone { writes: 0 });
        }
        if matches!(op, Op::WriteLocals { .. }) && self.is_broken(Broken::ForgetLocals) {
            return Ok(OpDone { writes: 0 });
        }
        let keeps = match op {
            Op::WriteRow { ifindex, .. } | Op::ClearInterface { ifindex } => {
                self.is_broken(Broken::KeepRows) && self.state().open_rows.contains(ifindex)
            }
            _ => false,
        };
        if keeps {
            return Ok(OpDone { writes: 0 });
        }
        let result = match self.strike(target, device) {
            Some(errno) => Err(failure(op, errno)),
            None => self.inside.carry_out(&self.distorted(op)),
        };
        if result.is_err() && matches!(op, Op::Attach { .. }) && self.is_broken(Broken::BelieveAttach) {
            return Ok(OpDone { writes: 1 });
        }
        if result.is_ok() {
            self.note(op);
        }
        result
    }

    fn read_registry(&self, ifindexes: &BTreeSet<Ifindex>) -> Vec<(Ifindex, RegistryRead)> {
        ifindexes
            .iter()
            .flat_map(|ifindex| match self.strike(Target::Registry, Some(*ifindex)) {
                Some(errno) => {
                    let message = format!("on purpose: {}", std::io::Error::from(errno));
                    vec![(*ifindex, RegistryRead::Failed(message))]
                }
                None => self.inside.read_registry(&BTreeSet::from([*ifindex])),
            })
            .map(|(ifindex, read)| {
                let read = match read {
                    RegistryRead::Failed(_) if self.is_broken(Broken::FailedReadIsAbsent) => {
                        RegistryRead::Absent
                    }
                    RegistryRead::Row(mut identity) if self.is_broken(Broken::IgnoreHostMac) => {
                        identity.host_mac_shared = true;
                        RegistryRead::Row(identity)
                    }
                    read => read,
                };
                (ifindex, read)
            })
            .collect()
    }

    fn look(&self, beliefs: &[Belief]) -> Audited {
        self.inside.look(beliefs)
    }

    fn audit(&self, beliefs: &[Belief]) -> Audited {
        if self.is_broken(Broken::BlindAudit) {
            return Audited::default();
        }
        match self.strike(Target::Audit, None) {
            Some(errno) => Audited {
                unreadable: Some(format!("on purpose: {}", std::io::Error::from(errno))),
                ..Audited::default()
            },
            None => {
                if self.is_broken(Broken::AuditsHold) {
                    self.hold_for_a_moment(beliefs);
                }
                self.inside.audit(beliefs)
            }
        }
    }

    fn adopt(&self) -> Result<Adoption, DatapathError> {
        let adoption = self.inside.adopt()?;
        self.state().attached.extend(&adoption.attached);
        if self.is_broken(Broken::ForgetPins) {
            return Ok(Adoption::default());
        }
        Ok(adoption)
    }

    fn stats(&self) -> Stats {
        self.inside.stats()
    }

    fn set_debug(&self, level: u64) -> Result<(), DatapathError> {
        self.inside.set_debug(level)
    }
}

impl Chaos {
    /// Closes the rows that are believed open, and opens them again.
    fn hold_for_a_moment(&self, beliefs: &[Belief]) {
        const MOMENT: Duration = Duration::from_millis(20);
        let open: Vec<(Ifindex, Row)> = beliefs
            .iter()
            .filter_map(|belief| match belief {
                Belief::Row { ifindex, row } => {
                    row.filter(|row| row.token.is_some()).map(|row| (*ifindex, row))
                }
                _ => None,
            })
            .collect();
        let write = |ifindex, row| self.inside.carry_out(&Op::WriteRow { ifindex, row });
        for &(ifindex, row) in &open {
            // One that cannot be closed is not held: the test that should fail says so.
            let _ = write(ifindex, Row { token: None, ..row });
        }
        thread::sleep(MOMENT);
        for &(ifindex, row) in &open {
            let _ = write(ifindex, row);
        }
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        if !self.is_broken(Broken::DetachOnExit) {
            return;
        }
        let attached = std::mem::take(&mut self.state().attached);
        for ifindex in attached {
            if let Err(error) = self.inside.carry_out(&Op::Detach { ifindex }) {
                tracing::warn!(ifindex, %error, "could not be detached on purpose");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::model::{Device, Mac};

    use super::*;
    use crate::datapath::fake::Fake;

    const DEVICE: Device = Device {
        ifindex: 7,
        mac: Mac([2, 0, 0, 0, 0, 7]),
    };

    fn inside() -> Arc<Fake> {
        let fake = Fake::default();
        fake.add_device(DEVICE);
        Arc::new(fake)
    }

    fn attach(chaos: &Chaos) -> OpResult {
        chaos.carry_out(&Op::Attach { device: DEVICE })
    }

    #[test]
    fn a_fault_strikes_as_often_as_it_is_told() {
        let chaos = Chaos::new(inside(), "attach=EPERM:2").unwrap();
        for _ in 0..2 {
            assert!(matches!(attach(&chaos), Err(OpError::Refused { .. })));
        }
        assert_eq!(attach(&chaos), Ok(OpDone { writes: 1 }));
    }

    #[test]
    fn a_fault_of_one_device_leaves_the_others() {
        let chaos = Chaos::new(inside(), "attach@8=EPERM").unwrap();
        assert_eq!(attach(&chaos), Ok(OpDone { writes: 1 }));
    }

    #[test]
    fn reads_of_the_registry_fail_for_a_while() {
        let chaos = Chaos::new(inside(), "registry=EIO for 20ms").unwrap();
        let asked = BTreeSet::from([7]);
        assert!(matches!(
            chaos.read_registry(&asked)[..],
            [(7, RegistryRead::Failed(_))]
        ));
        thread::sleep(Duration::from_millis(30));
        assert_eq!(chaos.read_registry(&asked), [(7, RegistryRead::Absent)]);
    }

    #[test]
    fn a_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("faults");
        let chaos = Chaos::new(inside(), &format!("@{}", path.display())).unwrap();
        assert_eq!(attach(&chaos), Ok(OpDone { writes: 1 }));
        std::fs::write(&path, "detach@7=EIO # for a while\n").unwrap();
        let detach = Op::Detach { ifindex: 7 };
        assert!(chaos.carry_out(&detach).is_err());
        std::fs::write(&path, "").unwrap();
        assert_eq!(chaos.carry_out(&detach), Ok(OpDone { writes: 1 }));
    }

    #[test]
    fn detaching_on_exit_is_off_unless_it_is_asked_for() {
        let fake = inside();
        let chaos = Chaos::new(fake.clone(), "").unwrap();
        attach(&chaos).unwrap();
        drop(chaos);
        assert_eq!(fake.adopt().unwrap().attached, BTreeSet::from([7]));

        let chaos = Chaos::new(fake.clone(), "detach-on-exit").unwrap();
        chaos.adopt().unwrap();
        drop(chaos);
        assert_eq!(fake.adopt().unwrap().attached, BTreeSet::new());
    }

    #[test]
    fn what_is_no_instruction_is_refused() {
        for bad in [
            "atach=EPERM",
            "attach=EWHAT",
            "attach=EPERM:x",
            "detach-on-exit=EIO",
            "row=slow 3",
            "wall=600s",
            "wall=+600",
            "nonsense",
        ] {
            assert!(Chaos::new(inside(), bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_word_is_unique() {
        let words: BTreeSet<&str> = Target::ALL.iter().map(|(word, _)| *word).collect();
        assert_eq!(words.len(), Target::ALL.len());
        let words: BTreeSet<&str> = Broken::ALL.iter().map(|(word, _)| *word).collect();
        assert_eq!(words.len(), Broken::ALL.len());
    }
}
