//! What the engine has been told in this life: rules can only bind it to that.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;

use holdfast_engine::belief::Difference;
use holdfast_engine::model::{
    Attachment, Device, Event, Identity, Ifindex, Link, Mac, ObjectChange, ObjectName, Op, OpError, Policy,
    PolicySpec, RegistryRead, Token, UidHash,
};

/// What is known of a registry row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Every read of it failed.
    Unreadable,
    /// What the last good read said.
    Row(Option<Identity>),
}

/// A policy as it was told of.
#[derive(Clone, Debug)]
pub(crate) struct ToldPolicy {
    pub(crate) object: Policy,
    /// The last content that could be used, and its generation.
    pub(crate) good: Option<(u64, Rc<PolicySpec>)>,
}

/// All that was told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// Raised with everything that is new.
    pub(crate) version: u64,
    pub(crate) adopted: bool,
    /// A saved set is complete.
    pub(crate) saved: bool,
    pub(crate) complete: bool,
    pub(crate) dumped: bool,
    /// The start barrier has passed; with a saved set this is so for everything but removals.
    pub(crate) passed: bool,
    pub(crate) links: BTreeMap<Ifindex, Link>,
    /// The node's own addresses.
    pub(crate) locals: Option<BTreeSet<IpAddr>>,
    /// When each link was last told of.
    order: BTreeMap<Ifindex, u64>,
    /// Raised when a number stands for another device, or for none.
    pub(crate) devices: BTreeMap<Ifindex, u64>,
    pub(crate) rows: BTreeMap<Ifindex, Known>,
    pub(crate) policies: BTreeMap<ObjectName, ToldPolicy>,
    pub(crate) attachments: BTreeMap<ObjectName, Attachment>,
    /// Devices that hold the program, as the kernel said.
    pub(crate) attached: BTreeMap<Ifindex, Mac>,
    /// Those of them at which an audit did not find it. (Whether that counts depends on what was sent meanwhile.)
    pub(crate) doubted: BTreeSet<Ifindex>,
    /// The same of an earlier life, whose devices nobody has named yet.
    attached_before: BTreeSet<Ifindex>,
    /// Attachments whose interface or identity an edit has changed in this batch.
    pub(crate) reborn: BTreeSet<ObjectName>,
    /// Attachments whose labels an edit has changed in this batch.
    pub(crate) relabelled: BTreeSet<ObjectName>,
    /// How often each object changed in this batch: what goes and comes back in one may be another or the same.
    pub(crate) changed: BTreeMap<ObjectName, u32>,
    /// Identities of devices that are gone, by number: whatever the registry says, nobody has them any more. With the
    /// address that the row names, by which the device is known if it comes back.
    dead: BTreeMap<(Ifindex, Token), Option<Mac>>,
    /// Identities whose deletion is out, and the address of the device that had the number when it was sent.
    pub(crate) deleting: BTreeMap<(Ifindex, Token), Option<Mac>>,
    /// The same of devices that only an operation did not find: dead if they are not seen again.
    suspects: BTreeMap<Ifindex, (Device, Identity)>,
    /// Identities of before this life whose devices nobody has told of.
    unattended: BTreeMap<Ifindex, Identity>,
    /// The generation that an earlier life served, of each policy, by the hash of its uid.
    served_before: BTreeMap<UidHash, u64>,
    /// What an earlier life left anything on, and whose row has not been read.
    pub(crate) left_behind: BTreeSet<Ifindex>,
}

impl Told {
    /// Nothing, in a new life.
    pub(crate) fn anew(&self) -> Self {
        Self {
            // Never again a version that something was computed for.
            version: self.version + 1,
            ..Self::default()
        }
    }

    /// The device with this name; of several the one that was told of last.
    pub(crate) fn named(&self, name: &str) -> Option<&Link> {
        self.links
            .values()
            .filter(|link| link.name == name)
            .max_by_key(|link| self.order.get(&link.ifindex))
    }

    /// Whether names of devices are clear: one device each.
    pub(crate) fn names_are_clear(&self) -> bool {
        let names: BTreeSet<&str> = self.links.values().map(|link| link.name.as_str()).collect();
        names.len() == self.links.len()
    }

    pub(crate) fn device(&self, ifindex: Ifindex) -> Option<Device> {
        self.links.get(&ifindex).map(|link| Device {
            ifindex,
            mac: link.mac,
        })
    }

    /// The identity that is registered for the device that has this number.
    pub(crate) fn identity(&self, ifindex: Ifindex) -> Option<Identity> {
        let link = self.links.get(&ifindex)?;
        match self.rows.get(&ifindex)? {
            Known::Row(Some(identity)) if self.dead.contains_key(&(ifindex, identity.token)) => None,
            Known::Row(Some(identity)) => {
                (identity.host_mac_shared || identity.host_mac == link.mac).then_some(*identity)
            }
            Known::Row(None) | Known::Unreadable => None,
        }
    }

    /// What [`Told::devices`] is for the device that an operation is about.
    pub(crate) fn number_of(&self, op: &Op) -> BTreeMap<Ifindex, u64> {
        let number = |ifindex: Ifindex| self.devices.get(&ifindex).copied().unwrap_or(0);
        device_of(op)
            .map(|device| (device.ifindex, number(device.ifindex)))
            .into_iter()
            .collect()
    }

    /// Whether an answer is about the device that has this number now: neither number nor address tells devices apart,
    /// and what was sent for an earlier one says nothing (ENGINE 21).
    fn is_of(&self, device: Device, asked: &BTreeMap<Ifindex, u64>) -> bool {
        let current = self.devices.get(&device.ifindex).copied().unwrap_or(0);
        self.device(device.ifindex) == Some(device)
            && asked.get(&device.ifindex).is_none_or(|asked| *asked == current)
    }

    /// Takes an event in. `op`: for answers the operation. `asked`: what [`Told::devices`] was when a read was asked
    /// for, or an operation sent.
    pub(crate) fn take(&mut self, event: &Event, op: Option<&Op>, asked: &BTreeMap<Ifindex, u64>) {
        if says_something(event, op) {
            self.version += 1;
        }
        match event {
            Event::Adopted(adoption) => {
                self.adopted = true;
                self.attached_before = adoption.attached.clone();
                self.unattended = adoption.identities.clone();
                self.left_behind = adoption.attached.clone();
                self.left_behind.extend(adoption.rows.keys());
                self.left_behind.extend(adoption.entries.keys());
                let slots = adoption.policies.values();
                self.served_before = slots.map(|slot| (slot.uid, slot.served_generation)).collect();
            }
            Event::Remembered(_)
            | Event::Poke(_)
            | Event::Tick
            | Event::DevicesDrifted(_)
            | Event::HooksChanged(_)
            | Event::HooksUnknown => {}
            Event::Audited(_, audited) => {
                let missing = audited
                    .differences
                    .iter()
                    .filter_map(|difference| match difference {
                        Difference::NoProgram { ifindex, .. } => Some(*ifindex),
                        _ => None,
                    });
                self.doubted.extend(missing);
            }
            Event::Objects(changes) => changes.iter().for_each(|change| self.object(change)),
            Event::SavedComplete => self.saved = true,
            Event::SourceComplete => self.complete = true,
            Event::Locals(addresses) => self.locals = Some(addresses.clone()),
            Event::Link(link) => self.link(link),
            Event::LinkGone(ifindex) => self.dies(*ifindex),
            Event::LinkDump(links) => {
                // The first may be older than what it is compared with.
                let unattended: Vec<Ifindex> = if self.dumped {
                    self.unattended.keys().copied().collect()
                } else {
                    Vec::new()
                };
                self.dumped = true;
                let there: BTreeSet<Ifindex> = links.iter().map(|link| link.ifindex).collect();
                let gone: Vec<Ifindex> = self
                    .links
                    .keys()
                    .chain(&self.attached_before)
                    .copied()
                    .filter(|ifindex| !there.contains(ifindex))
                    .collect();
                let gone: BTreeSet<Ifindex> = gone
                    .into_iter()
                    .chain(
                        self.suspects
                            .keys()
                            .copied()
                            .chain(unattended)
                            .filter(|ifindex| !there.contains(ifindex)),
                    )
                    .collect();
                gone.into_iter().for_each(|ifindex| self.dies(ifindex));
                links.iter().for_each(|link| self.link(link));
            }
            Event::Registry(reads) => {
                for (ifindex, read) in reads {
                    let current = self.devices.get(ifindex).copied().unwrap_or(0);
                    let void = asked.get(ifindex).is_some_and(|asked| *asked != current);
                    self.read(*ifindex, read, void);
                }
            }
            Event::Answer(_, result) => match (op, result) {
                (Some(Op::Attach { device }), Ok(_)) if self.device(device.ifindex) == Some(*device) => {
                    self.attached.insert(device.ifindex, device.mac);
                    self.doubted.remove(&device.ifindex);
                }
                (Some(Op::Detach { ifindex }), Ok(_)) => {
                    self.attached.remove(ifindex);
                }
                (Some(Op::DeleteIdentity { ifindex, token }), result) => {
                    self.deleting.remove(&(*ifindex, *token));
                    if let (Err(_), Some(mac)) = (result, self.links.get(ifindex).map(|link| link.mac)) {
                        self.revive(*ifindex, mac);
                    }
                }
                (Some(op), Err(OpError::NoDevice)) => {
                    if let Some(device) = device_of(op)
                        && self.is_of(device, asked)
                    {
                        if let Some(identity) = self.identity(device.ifindex) {
                            self.suspects.insert(device.ifindex, (device, identity));
                        }
                        self.gone(device.ifindex);
                    }
                }
                (Some(op), Err(OpError::Detached { .. })) => {
                    if let Some(device) = device_of(op)
                        && self.device(device.ifindex) == Some(device)
                    {
                        self.attached.remove(&device.ifindex);
                    }
                }
                _ => {}
            },
        }
    }

    /// The batch is complete: whether the barrier has passed is judged now.
    pub(crate) fn judge_barrier(&mut self) {
        if !self.passed && self.barrier() {
            self.passed = true;
            self.version += 1;
        }
    }

    fn barrier(&self) -> bool {
        self.adopted
            && (self.complete || self.saved)
            && self.dumped
            && self.attachments.values().all(|attachment| {
                self.named(&attachment.interface)
                    .is_none_or(|link| self.rows.contains_key(&link.ifindex))
            })
    }

    /// Whether an earlier life served a later content of a policy than the last one that is known and can be used.
    pub(crate) fn is_outdated(&self, policy: &ToldPolicy) -> bool {
        let served = self.served_before.iter().find(|(uid, _)| {
            crate::oracle::number_of_hash(**uid) == crate::rules::number(&policy.object.uid)
        });
        let known = policy.good.as_ref().map_or(0, |(generation, _)| *generation);
        served.is_some_and(|(_, served)| *served > known)
    }

    /// A detach is sent: from now on nobody can say that the program is there.
    pub(crate) fn detaches(&mut self, ifindex: Ifindex) {
        self.attached.remove(&ifindex);
        self.version += 1;
    }

    /// A registry row is being deleted.
    pub(crate) fn deletes(&mut self, ifindex: Ifindex, token: Token) {
        // Of a device that went, and whose address others have too, nobody can say whether it is back.
        let known = self.dead.get(&(ifindex, token)).is_none_or(Option::is_some);
        let mac = self.links.get(&ifindex).map(|link| link.mac).filter(|_| known);
        self.deleting.insert((ifindex, token), mac);
    }

    /// A device with this address is there: if it is one that had gone, its identity lives on, unless it is being deleted.
    fn revive(&mut self, ifindex: Ifindex, mac: Mac) {
        let deleting = &self.deleting;
        self.dead.retain(|row, theirs| {
            row.0 != ifindex || *theirs != Some(mac) || deleting.keys().any(|(other, _)| *other == ifindex)
        });
    }

    /// Whether an intent may be another than it was before this batch, although its objects are the same.
    pub(crate) fn may_be_anew(&self, policy: &ObjectName, consumer: &ObjectName) -> bool {
        self.reborn.contains(consumer) || self.changes(policy) + self.changes(consumer) > 1
    }

    /// How often an object changed in this batch.
    pub(crate) fn changes(&self, name: &ObjectName) -> u32 {
        self.changed.get(name).copied().unwrap_or(0)
    }

    /// A new batch begins.
    pub(crate) fn batch_ends(&mut self) {
        self.reborn.clear();
        self.relabelled.clear();
        self.changed.clear();
    }

    fn object(&mut self, change: &ObjectChange) {
        let (ObjectChange::Policy(Policy { name, .. })
        | ObjectChange::Attachment(Attachment { name, .. })
        | ObjectChange::PolicyGone(name)
        | ObjectChange::AttachmentGone(name)) = change;
        let there = match change {
            ObjectChange::Policy(_) | ObjectChange::PolicyGone(_) => self.policies.contains_key(name),
            ObjectChange::Attachment(_) | ObjectChange::AttachmentGone(_) => {
                self.attachments.contains_key(name)
            }
        };
        let same = match change {
            ObjectChange::Policy(policy) => {
                self.policies.get(name).map(|before| &before.object) == Some(policy)
            }
            ObjectChange::Attachment(attachment) => self.attachments.get(name) == Some(attachment),
            ObjectChange::PolicyGone(_) | ObjectChange::AttachmentGone(_) => false,
        };
        if !same && (there || self.changed.contains_key(name)) {
            *self.changed.entry(name.clone()).or_default() += 1;
        }
        match change {
            ObjectChange::Policy(policy) => {
                let good = match &policy.content {
                    Ok(spec) => Some((policy.generation, Rc::new(spec.clone()))),
                    Err(_) => self
                        .policies
                        .get(&policy.name)
                        .filter(|before| before.object.uid == policy.uid)
                        .and_then(|before| before.good.clone()),
                };
                self.policies.insert(
                    policy.name.clone(),
                    ToldPolicy {
                        object: policy.clone(),
                        good,
                    },
                );
            }
            ObjectChange::PolicyGone(name) => drop(self.policies.remove(name)),
            ObjectChange::Attachment(attachment) => {
                let before = self.attachments.get(&attachment.name);
                if before.is_some_and(|before| {
                    (&before.interface, before.expected) != (&attachment.interface, attachment.expected)
                }) {
                    self.reborn.insert(attachment.name.clone());
                }
                if before.is_some_and(|before| before.labels != attachment.labels) {
                    self.relabelled.insert(attachment.name.clone());
                }
                self.attachments
                    .insert(attachment.name.clone(), attachment.clone());
            }
            ObjectChange::AttachmentGone(name) => drop(self.attachments.remove(name)),
        }
    }

    fn link(&mut self, link: &Link) {
        let ifindex = link.ifindex;
        if let Some((device, identity)) = self.suspects.remove(&ifindex)
            && device.mac != link.mac
            && named_by(&identity).is_some()
        {
            self.dead.insert((ifindex, identity.token), named_by(&identity));
        }
        self.unattended.remove(&ifindex);
        self.revive(ifindex, link.mac);
        match self.links.get(&ifindex) {
            // A rename is a new device too: whoever looks by name may meet another.
            Some(before) if before.mac == link.mac && before.name == link.name => {}
            Some(_) => self.another(ifindex),
            None => {
                if self.attached_before.remove(&ifindex) {
                    self.attached.insert(ifindex, link.mac);
                    // A read that is under way was asked for before anybody knew of the device.
                    *self.devices.entry(ifindex).or_default() += 1;
                } else {
                    self.another(ifindex);
                }
            }
        }
        self.order.insert(ifindex, self.version);
        self.links.insert(ifindex, link.clone());
    }

    /// A device is gone for sure, and its identity with it.
    fn dies(&mut self, ifindex: Ifindex) {
        let identity = self.identity(ifindex);
        let suspect = self.suspects.remove(&ifindex).map(|(_, identity)| identity);
        let unattended = self.unattended.remove(&ifindex);
        let died = identity.or(suspect).or(unattended);
        self.dead
            .extend(died.map(|identity| ((ifindex, identity.token), named_by(&identity))));
        self.gone(ifindex);
    }

    fn gone(&mut self, ifindex: Ifindex) {
        self.attached_before.remove(&ifindex);
        self.links.remove(&ifindex);
        self.another(ifindex);
    }

    /// The number stands for another device, or for none.
    fn another(&mut self, ifindex: Ifindex) {
        *self.devices.entry(ifindex).or_default() += 1;
        self.rows.remove(&ifindex);
        self.attached.remove(&ifindex);
        self.doubted.remove(&ifindex);
        self.left_behind.remove(&ifindex);
    }

    /// A read failed.
    pub(crate) fn unreadable(&mut self, ifindex: Ifindex) {
        if self.links.contains_key(&ifindex) && !self.rows.contains_key(&ifindex) {
            self.rows.insert(ifindex, Known::Unreadable);
            self.version += 1;
        }
    }

    fn read(&mut self, ifindex: Ifindex, read: &RegistryRead, void: bool) {
        // A read that was under way when the number became another device's may speak of the earlier one.
        if void || !self.links.contains_key(&ifindex) {
            return;
        }
        let row = match read {
            RegistryRead::Row(identity) => Some(*identity),
            RegistryRead::Absent => None,
            RegistryRead::Failed(_) => return self.unreadable(ifindex),
        };
        let before = self.rows.insert(ifindex, Known::Row(row));
        if self.left_behind.remove(&ifindex) || before != Some(Known::Row(row)) {
            self.version += 1;
        }
    }
}

/// Whether an event may change what is wanted, whatever it says. (Reads count what they change themselves.)
const fn says_something(event: &Event, op: Option<&Op>) -> bool {
    match event {
        Event::Remembered(_)
        | Event::Poke(_)
        | Event::Tick
        | Event::Registry(_)
        | Event::HooksChanged(_)
        | Event::HooksUnknown => false,
        Event::Answer(_, Ok(_)) => matches!(op, Some(Op::Attach { .. } | Op::Detach { .. })),
        // The row of an identity that could not be deleted may be of use again.
        Event::Answer(_, Err(_)) if matches!(op, Some(Op::DeleteIdentity { .. })) => true,
        Event::Answer(_, Err(error)) => matches!(error, OpError::NoDevice | OpError::Detached { .. }),
        _ => true,
    }
}

/// The address by which a row names its one device.
fn named_by(identity: &Identity) -> Option<Mac> {
    (!identity.host_mac_shared).then_some(identity.host_mac)
}

/// The device that an operation names with its address.
pub(crate) const fn device_of(op: &Op) -> Option<Device> {
    match op {
        Op::Attach { device } | Op::ProveSet { device, .. } => Some(*device),
        Op::ProveIntent(proof) => Some(proof.device),
        _ => None,
    }
}
