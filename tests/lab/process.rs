//! Children that die with the thread that started them, with exactly the rights that they are given.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, set_parent_process_death_signal, waitid,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use crate::{Reason, Space, skip, until};

/// What the agent is shipped with.
pub const SHIPPED: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::PERFMON);

/// Makes the child of this command live in these namespaces and die with the calling thread. With `rights`, it has
/// exactly these capabilities and can never get others.
#[expect(
    unsafe_code,
    reason = "pre_exec is unsafe: the child may only make system calls before exec"
)]
pub fn confine(command: &mut Command, space: &Space, rights: Option<CapabilitySet>) {
    let space = space.clone();
    let confine = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        space.enter()?;
        if let Some(rights) = rights {
            restrict(rights)?;
        }
        Ok(())
    };
    // SAFETY: the closure only makes system calls on values that it owns already; it allocates nothing and takes no
    // lock.
    unsafe {
        command.pre_exec(confine);
    }
}

/// Leaves the calling thread these capabilities alone, for good. Root gets at exec what the bounding set leaves: so
/// that is what has to be cut. Also for between fork and exec: no allocation.
///
/// # Errors
/// What the kernel says.
pub fn restrict(rights: CapabilitySet) -> rustix::io::Result<()> {
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if !rights.contains(one) {
            match remove_capability_from_bounding_set(one) {
                // The kernel has no capability of this number.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    clear_ambient_capability_set()?;
    let sets = CapabilitySets {
        effective: rights,
        permitted: rights,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    set_no_new_privs(true)
}

/// Where a program of this machine is.
///
/// # Errors
/// [`Reason::NoProgram`], which skips the test.
pub fn program(name: &'static str) -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Servers are in `sbin`, which a user's path may lack.
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = places.map(|place| place.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| skip(Reason::NoProgram(name)))
}

/// Runs a command to its end.
///
/// # Errors
/// When it cannot be started.
pub fn run(command: &mut Command, space: &Space) -> anyhow::Result<Output> {
    confine(command, space, None);
    command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {command:?}"))
}

/// The lines that a process has written, while it writes.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// All lines so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, line: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn follow(&self, stream: impl Read + Send + 'static) -> JoinHandle<()> {
        let log = self.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                log.push(line);
            }
        })
    }
}

/// A child that runs until it is ended.
#[derive(Debug)]
pub struct Running {
    child: Child,
    readers: Vec<JoinHandle<()>>,
}

impl Running {
    /// Starts it; what it writes to its outputs goes to the log.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut command: Command, log: &Log) -> anyhow::Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let mut readers = Vec::new();
        readers.extend(child.stdout.take().map(|stdout| log.follow(stdout)));
        readers.extend(child.stderr.take().map(|stderr| log.follow(stderr)));
        Ok(Self { child, readers })
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the kernel cannot say.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        if status.is_some() {
            for reader in self.readers.drain(..) {
                _ = reader.join();
            }
        }
        Ok(status)
    }

    /// Waits for its end by itself.
    ///
    /// # Errors
    /// When it has not ended within the deadline.
    pub fn wait(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        until(deadline, format!("process {} has ended", self.id()), || {
            self.ended()
        })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.child), signal).context("cannot send a signal")
    }

    /// Stops it, and returns when all of it stands still: on a busy machine that is a while after the signal. It goes on
    /// with SIGCONT.
    ///
    /// # Errors
    /// When it is gone.
    pub fn stop(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        let child = WaitId::Pid(Pid::from_child(&self.child));
        let status = waitid(
            child,
            WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        );
        let stopped = status.context("cannot wait until it stands still")?;
        ensure!(stopped.is_some_and(|status| status.stopped()), "it has ended");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        _ = self.child.kill();
        _ = self.child.wait();
        for reader in self.readers.drain(..) {
            _ = reader.join();
        }
    }
}
