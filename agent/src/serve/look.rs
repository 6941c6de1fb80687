//! Looking at the kernel for whoever asks, beside the lanes: nothing is changed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use holdfast_engine::belief::{Audited, Belief};
use holdfast_engine::model::{Ifindex, Link, RegistryRead};
use tokio::sync::Semaphore;

use crate::datapath::Datapath;
use crate::netlink::find;

/// What can be looked at.
pub trait Look: Send + Sync + 'static {
    /// Compares what is believed with what is there.
    fn audit(&self, beliefs: &[Belief]) -> Audited;

    /// The device with this name.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    fn device(&self, name: &str) -> io::Result<Option<Link>>;

    /// The row of the registry.
    fn identity(&self, ifindex: Ifindex) -> RegistryRead;
}

/// The kernel of this node, for as long as the agent uses it.
pub struct Kernel(pub Weak<dyn Datapath>);

impl Look for Kernel {
    fn audit(&self, beliefs: &[Belief]) -> Audited {
        match self.0.upgrade() {
            Some(datapath) => datapath.look(beliefs),
            None => Audited {
                unreadable: Some(ENDING.to_owned()),
                ..Audited::default()
            },
        }
    }

    fn device(&self, name: &str) -> io::Result<Option<Link>> {
        find::by_name(name)
    }

    fn identity(&self, ifindex: Ifindex) -> RegistryRead {
        let read = self
            .0
            .upgrade()
            .map(|datapath| datapath.read_registry(&BTreeSet::from([ifindex])));
        match read.and_then(|read| read.into_iter().next()) {
            Some((_, read)) => read,
            None => RegistryRead::Failed(ENDING.to_owned()),
        }
    }
}

const ENDING: &str = "the agent is shutting down";

/// What is to be looked at.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// What is believed.
    pub beliefs: Vec<Belief>,
    /// Names of devices, with whose registry rows.
    pub devices: BTreeSet<String>,
}

/// What is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Where it is not as it was believed.
    pub audited: Audited,
    /// Devices by name: why it could not be asked for, or the device with what the registry says of it.
    pub devices: BTreeMap<String, Result<Option<(Link, RegistryRead)>, String>>,
}

impl Seen {
    /// Nothing could be looked at.
    #[must_use]
    pub fn nothing(why: impl Into<String>) -> Self {
        Self {
            audited: Audited {
                differences: Vec::new(),
                unreadable: Some(why.into()),
            },
            devices: BTreeMap::new(),
        }
    }
}

/// One look at a time: a kernel that does not answer keeps one thread, not one for everybody who asks.
#[derive(Clone)]
pub struct Looker {
    kernel: Arc<dyn Look>,
    one: Arc<Semaphore>,
}

impl Looker {
    /// Looks at this kernel.
    #[must_use]
    pub fn new(kernel: impl Look) -> Self {
        Self {
            kernel: Arc::new(kernel),
            one: Arc::new(Semaphore::new(1)),
        }
    }

    /// Looks; what cannot be seen in time is unreadable.
    pub async fn look(&self, question: Question, patience: Duration) -> Seen {
        let looking = async {
            let permit = Arc::clone(&self.one).acquire_owned().await.ok()?;
            let kernel = Arc::clone(&self.kernel);
            let seen = tokio::task::spawn_blocking(move || {
                let seen = see(&*kernel, &question);
                drop(permit);
                seen
            });
            seen.await.ok()
        };
        match tokio::time::timeout(patience, looking).await {
            Ok(Some(seen)) => seen,
            Ok(None) => Seen::nothing(ENDING),
            Err(_) => Seen::nothing(format!("no answer of the kernel within {patience:?}")),
        }
    }
}

fn see(kernel: &dyn Look, question: &Question) -> Seen {
    let device = |name: &String| {
        let found = kernel.device(name).map_err(|error| error.to_string());
        let found = found.map(|link| link.map(|link| (kernel.identity(link.ifindex), link)));
        (
            name.clone(),
            found.map(|found| found.map(|(identity, link)| (link, identity))),
        )
    };
    Seen {
        devices: question.devices.iter().map(device).collect(),
        audited: kernel.audit(&question.beliefs),
    }
}
