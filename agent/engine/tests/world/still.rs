//! What is checked when nothing is under way: everything told, done and answered ("calm"), or the same with nothing
//! left that time would change ("rest").

use std::collections::{BTreeMap, BTreeSet};

use holdfast_engine::Engine;
use holdfast_engine::model::{Backend, Ifindex, Now, ObjectName, OnDeadline, RouteKey, SlotId, State};
use holdfast_engine::view::Settled;

use crate::coverage::Stage;
use crate::kernel::Kernel;
use crate::oracle::{Checked, Oracle, announces, ensure, number_of_hash, slot_of};
use crate::rules::{Gate, Intent, Must, Right};
use crate::script::{number_of, packet, route};
use crate::told::Known;

impl Oracle {
    /// Everything has been told, done and answered; nothing waits but for time.
    pub(crate) fn calm(&mut self, engine: &Engine, kernel: &Kernel, now: Now) -> Checked {
        if !self.told.passed || !self.told.complete || !self.told.names_are_clear() {
            return Ok(());
        }
        self.programs_follow_attachments(kernel)?;
        self.no_foreign_entries(kernel)?;
        for (key, intent) in &self.wants.intents {
            if self.is_troubled(&key.0, intent) {
                continue;
            }
            self.claims_are_written(key, intent, kernel)?;
            self.calm_state(key, intent, kernel, now)?;
        }
        self.deliveries(kernel, now)?;
        self.rows(kernel)?;
        self.flows(kernel, now)?;
        self.settled(engine)?;
        self.acks()?;
        let locals = self.told.locals.as_ref();
        ensure!(
            self.trouble.locals
                || self.trouble.everything
                || locals.is_none_or(|locals| *locals == kernel.locals),
            "DATAPLANE: the node's own addresses are never captured",
            "told {locals:?}, the kernel has {:?}",
            kernel.locals
        );
        for ((ifindex, number), fate) in &self.fates {
            let own = locals.is_some_and(|locals| locals.contains(&packet(*number).address));
            ensure!(
                !own || self.trouble.locals || self.trouble.everything || fate.policy.is_none(),
                "DATAPLANE: the node's own addresses are never captured",
                "device {ifindex}, packet {number}: {fate:?}"
            );
        }
        self.waits(kernel, now);
        for (place, fate) in &self.fates {
            let owner = self.wants.owner(place.0, place.1).filter(|_| fate.delivers());
            if let Some((_, owner)) = owner {
                self.served.insert(*place, self.wants.intents[owner].consumer_uid);
            }
        }
        Ok(())
    }

    fn programs_follow_attachments(&self, kernel: &Kernel) -> Checked {
        const RULE: &str = "ENGINE 30: programs follow attachments";
        let excused = |ifindex: &Ifindex| self.trouble.everything || self.trouble.devices.contains(ifindex);
        for ifindex in self.wants.of_device.keys() {
            ensure!(
                kernel.attached(*ifindex) || excused(ifindex),
                RULE,
                "device {ifindex} has an attachment and not the program"
            );
        }
        for ifindex in kernel.pins.keys() {
            ensure!(
                self.wants.of_device.contains_key(ifindex) || excused(ifindex),
                RULE,
                "a link is pinned for {ifindex}, which has no attachment"
            );
        }
        Ok(())
    }

    fn no_foreign_entries(&self, kernel: &Kernel) -> Checked {
        const RULE: &str = "DESIGN 2.7, 2.8: nothing is left of what is gone";
        for (ifindex, entries) in &kernel.entries {
            if self.trouble.everything || self.trouble.devices.contains(ifindex) {
                continue;
            }
            for (key, entry) in entries {
                let uid = kernel
                    .policies
                    .get(&entry.policy)
                    .map(|policy| number_of_hash(policy.uid));
                let number = number_of(key);
                let wanted = number.is_some_and(|number| {
                    self.wants.intents.iter().any(|((policy, _), intent)| {
                        let here = intent.device.map(|device| device.ifindex) == Some(*ifindex);
                        let theirs = Some(intent.policy_uid) == uid || self.is_troubled(policy, intent);
                        here && theirs
                            && (intent.keys.contains(&number) || intent.may_claim.contains(&number))
                    })
                });
                let unknown = uid.map_or_else(|| self.lost_its_slot(kernel), |uid| self.is_unknown(uid));
                let troubled = uid.is_some_and(|uid| {
                    self.trouble.policies.contains(&uid) || self.trouble.pairs.contains(&(uid, *ifindex))
                });
                ensure!(
                    wanted || unknown || troubled,
                    RULE,
                    "device {ifindex} has {key:?} -> {entry:?} of policy {uid:?}, which nobody wants"
                );
            }
        }
        for (ifindex, sources) in &kernel.sources {
            if self.trouble.everything || self.trouble.devices.contains(ifindex) {
                continue;
            }
            ensure!(
                self.wants.of_device.contains_key(ifindex),
                RULE,
                "device {ifindex} has sources {sources:?} and no attachment"
            );
        }
        for ifindex in kernel.rows.keys() {
            ensure!(
                self.wants.of_device.contains_key(ifindex)
                    || self.trouble.everything
                    || self.trouble.devices.contains(ifindex),
                RULE,
                "device {ifindex} has a row and no attachment"
            );
        }
        Ok(())
    }

    /// Whether nobody knows what this policy wants: what it had stays as it is.
    pub(crate) fn is_unknown(&self, uid: u32) -> bool {
        self.wants
            .policies
            .values()
            .any(|policy| policy.uid == uid && policy.spec.is_none())
    }

    /// Whether somebody else took the slot of a policy away whose wishes nobody knows: it is left alone then, too.
    fn lost_its_slot(&self, kernel: &Kernel) -> bool {
        let mut unknown = self
            .wants
            .policies
            .values()
            .filter(|policy| policy.spec.is_none());
        unknown.any(|policy| slot_of(policy.uid, kernel).is_none())
    }

    fn claims_are_written(
        &self,
        key: &(ObjectName, ObjectName),
        intent: &Intent,
        kernel: &Kernel,
    ) -> Checked {
        const RULE: &str = "DESIGN 2.12: every claimed destination has its entry, held or not";
        let Some(device) = intent.device else {
            return Ok(());
        };
        let slot = slot_of(intent.policy_uid, kernel);
        if self.has_no_room(intent, kernel) {
            return Ok(());
        }
        for number in &intent.keys {
            let entry = kernel
                .entries
                .get(&device.ifindex)
                .and_then(|entries| entries.get(&route(*number)));
            ensure!(
                entry.is_some_and(|entry| Some(entry.policy) == slot),
                RULE,
                "{key:?} claims destination {number} on {device:?} in slot {slot:?}, there is {entry:?}"
            );
            let row = kernel.rows.get(&device.ifindex);
            ensure!(
                row.is_some_and(|row| announces(*row, &[*number].into())),
                RULE,
                "{key:?} claims destination {number} on {device:?} with row {row:?}"
            );
        }
        let flag = slot
            .and_then(|slot| kernel.policies.get(&slot))
            .map(|policy| policy.pass_while_held);
        ensure!(
            flag.is_none_or(|pass| pass != intent.drop)
                || intent.keys.is_empty()
                || !intent.valid
                || (!intent.drop && slot.is_some_and(|slot| self.stands_in(slot, kernel))),
            "DESIGN 2.12: whileHeld is the policy's choice",
            "{key:?} drops: {}, its slot passes: {flag:?}",
            intent.drop
        );
        Ok(())
    }

    /// Whether entries that lead to this slot stand in for claims of another policy that finds no room, or whose own are
    /// kept from being written by something that failed: as long as they do it lets nothing pass.
    fn stands_in(&self, slot: SlotId, kernel: &Kernel) -> bool {
        let entries = kernel
            .entries
            .iter()
            .flat_map(|(ifindex, entries)| entries.iter().map(move |(key, entry)| (*ifindex, key, entry)));
        entries
            .filter(|(_, _, entry)| entry.policy == slot)
            .filter_map(|(ifindex, key, _)| self.wants.owners.get(&(ifindex, number_of(key)?)))
            .filter_map(|owner| Some((&owner.0, self.wants.intents.get(owner)?)))
            .any(|(policy, owner)| {
                slot_of(owner.policy_uid, kernel) != Some(slot)
                    && (self.has_no_room(owner, kernel)
                        || owner.gate == Gate::Unreadable
                        || self.is_troubled(policy, owner))
            })
    }

    fn calm_state(
        &self,
        key: &(ObjectName, ObjectName),
        intent: &Intent,
        kernel: &Kernel,
        now: Now,
    ) -> Checked {
        let view = &self.view.intents[key];
        let mut allowed = intent.must.allows(view.state);
        // The identity of a producer that could never be read says nothing about the producer.
        if self.producer_unreadable(&key.0) {
            allowed |= view.state == State::Failed(holdfast_engine::model::FailReason::RegistryUnreadable);
        }
        if intent.must
            == Must::Be(vec![State::Failed(
                holdfast_engine::model::FailReason::Unsupported,
            )])
            && let (State::Held(a), Gate::Held(b)) = (view.state, intent.gate)
        {
            allowed |= a == b;
        }
        ensure!(
            allowed,
            "ENGINE, The model world: rest is reached, in the state that the rules want",
            "{key:?} is {:?} ({:?}), must be {:?}",
            view.state,
            view.message,
            intent.must
        );
        if !intent.must.programmed() || self.producer_unreadable(&key.0) {
            return Ok(());
        }
        // Delivered, as far as what was told is still so.
        let Some(device) = intent.device else {
            return Ok(());
        };
        let true_token = |ifindex: &Ifindex| {
            kernel.registry.get(ifindex).map(|identity| identity.token)
                == self.wants.tokens.get(ifindex).copied()
        };
        let policy = &self.wants.policies[&key.0];
        let current = true_token(&device.ifindex)
            && policy
                .ready
                .values()
                .all(|(device, _)| true_token(&device.ifindex));
        if !current {
            return Ok(());
        }
        for number in 0..kernel.packets {
            let owner = self.wants.owner(device.ifindex, number);
            let Some((destination, _)) = owner.filter(|(_, owner)| *owner == key) else {
                continue;
            };
            let address = packet(number).address;
            if self.wants.source(device.ifindex, address).is_none() || kernel.locals.contains(&address) {
                continue;
            }
            let fate = &self.fates[&(device.ifindex, number)];
            // What nobody knows the wishes of keeps what it had, also of what others claim as a range.
            let kept = fate.policy.and_then(|slot| kernel.policies.get(&slot));
            if kept.is_some_and(|slot| self.is_unknown(number_of_hash(slot.uid))) {
                continue;
            }
            ensure!(
                fate.delivers() && fate.key == Some(route(destination)),
                "DESIGN 2.14: what is Programmed is delivered",
                "{key:?}, packet {number}, destination {destination}, {device:?} at {now:?}: {fate:?}"
            );
            for id in fate.backends() {
                let backend = &kernel.backends[&id];
                let right = policy
                    .ready
                    .values()
                    .any(|(device, token)| (device.ifindex, *token) == (backend.ifindex, backend.token));
                ensure!(
                    right,
                    "DESIGN 2.14: what is Programmed is delivered to the producers of its generation",
                    "{key:?}, packet {number}: {backend:?}, ready are {:?}",
                    policy.ready
                );
            }
        }
        Ok(())
    }

    fn producer_unreadable(&self, policy: &ObjectName) -> bool {
        self.wants.policies.get(policy).is_some_and(|policy| {
            self.wants.attachments.values().any(|judged| {
                policy.producers.contains(&judged.uid)
                    && judged
                        .device
                        .is_some_and(|device| self.told.rows.get(&device.ifindex) == Some(&Known::Unreadable))
            })
        })
    }

    /// Nobody is delivered to whom the rules do not allow.
    fn deliveries(&self, kernel: &Kernel, now: Now) -> Checked {
        const RULE: &str = "DESIGN 2.1, 2.8, ENGINE 9: what is not allowed is not delivered";
        for ((ifindex, number), fate) in &self.fates {
            if !fate.delivers() || self.trouble.everything || self.trouble.devices.contains(ifindex) {
                continue;
            }
            let Some(policy) = fate.policy.and_then(|slot| kernel.policies.get(&slot)) else {
                continue;
            };
            let Some(destination) = fate.key.as_ref().and_then(number_of) else {
                continue;
            };
            let uid = number_of_hash(policy.uid);
            if self.trouble.policies.contains(&uid) || self.trouble.pairs.contains(&(uid, *ifindex)) {
                continue;
            }
            let row = kernel.rows.get(ifindex).and_then(|row| row.token);
            let what = || format!("device {ifindex}, packet {number}, policy {uid}, {now:?}: {fate:?}");
            ensure!(
                row.is_some() && row == self.wants.tokens.get(ifindex).copied(),
                RULE,
                "{}; the row is open for {row:?}, told {:?}",
                what(),
                self.wants.tokens.get(ifindex)
            );
            let described = kernel.row_is_of_device(*ifindex) || self.told.device(*ifindex).is_none();
            ensure!(
                described,
                "ENGINE 5: the old token never serves the new device",
                "{}",
                what()
            );
            for id in fate.backends() {
                let backend = &kernel.backends[&id];
                if self.is_unknown(uid) {
                    continue;
                }
                let consumers = self.wants.of_device.get(ifindex);
                let producers = self.wants.of_device.get(&backend.ifindex);
                let allowed = consumers.into_iter().flatten().any(|consumer| {
                    producers
                        .into_iter()
                        .flatten()
                        .any(|producer| self.granted.contains(&(uid, *consumer, destination, *producer)))
                });
                ensure!(allowed, RULE, "{}; {backend:?}", what());
                let unread = self.told.left_behind.contains(&backend.ifindex);
                ensure!(
                    unread || self.wants.tokens.get(&backend.ifindex) == Some(&backend.token),
                    RULE,
                    "{}; {backend:?} is not ready",
                    what()
                );
            }
        }
        Ok(())
    }

    fn rows(&self, kernel: &Kernel) -> Checked {
        for (ifindex, row) in &kernel.rows {
            if self.trouble.everything || self.trouble.devices.contains(ifindex) {
                continue;
            }
            let Some(token) = row.token else { continue };
            let frozen = self.told.rows.get(ifindex) == Some(&Known::Unreadable);
            ensure!(
                self.wants.tokens.get(ifindex) == Some(&token) || frozen,
                "DESIGN 2.5: the row of what is held is closed",
                "row {ifindex} is open for {token:?}, ready is {:?}",
                self.wants.tokens.get(ifindex)
            );
        }
        Ok(())
    }

    /// Established flows obey too.
    fn flows(&self, kernel: &Kernel, now: Now) -> Checked {
        for flow in &kernel.flows {
            if !kernel.flow_holds(flow, now.boot)
                || self.trouble.everything
                || self.trouble.devices.contains(&flow.consumer)
            {
                continue;
            }
            let Some(policy) = kernel.policies.get(&flow.policy) else {
                continue;
            };
            let uid = number_of_hash(policy.uid);
            if self.trouble.policies.contains(&uid) || self.trouble.pairs.contains(&(uid, flow.consumer)) {
                continue;
            }
            let number = number_of(&flow.key).unwrap_or_default();
            let unknown = self
                .wants
                .policies
                .values()
                .any(|policy| policy.uid == uid && policy.spec.is_none());
            let consumers = self.wants.of_device.get(&flow.consumer);
            let wanted = consumers
                .into_iter()
                .flatten()
                .any(|consumer| self.wants.pairs.contains(&(uid, *consumer, number)));
            ensure!(
                wanted || unknown,
                "ENGINE 9: what is taken away closes at once, also for established flows",
                "{flow:?} of policy {uid} still holds"
            );
        }
        Ok(())
    }

    fn settled(&self, engine: &Engine) -> Checked {
        const RULE: &str = "DESIGN 4: register returns when the agent has taken it in";
        for (ifindex, link) in &self.told.links {
            if self.trouble.everything || self.trouble.devices.contains(ifindex) {
                continue;
            }
            let identity = self.told.identity(*ifindex);
            let said = engine
                .view()
                .settled(*ifindex, identity.map(|identity| identity.token));
            if !self.wants.of_device.contains_key(ifindex) {
                ensure!(
                    said == Settled::NotOurs,
                    RULE,
                    "{said:?}: {link:?} has no attachment"
                );
                continue;
            }
            let readable = matches!(self.told.rows.get(ifindex), Some(Known::Row(_)));
            let troubled = self
                .wants
                .intents
                .iter()
                .any(|((policy, _), intent)| self.is_troubled(policy, intent));
            let pending = self
                .view
                .intents
                .values()
                .any(|intent| intent.state == State::Pending);
            ensure!(
                said == Settled::Done || !readable || troubled || pending,
                RULE,
                "{said:?}: {link:?} with {identity:?}, and all is done"
            );
        }
        Ok(())
    }

    fn acks(&self) -> Checked {
        for (name, view) in &self.view.policies {
            let pending = view.intents.pending > 0;
            ensure!(
                pending || view.applied == view.generation || !self.trouble.is_empty(),
                "DESIGN 2.17: every generation is acked when all of it was tried",
                "{name}: {view:?}"
            );
        }
        Ok(())
    }

    /// For the coverage: which stage of a switch this is.
    fn waits(&mut self, kernel: &Kernel, now: Now) {
        for (slot, policy) in &kernel.policies {
            let uid = number_of_hash(policy.uid);
            let Some(spec) = self
                .wants
                .policies
                .values()
                .find(|policy| policy.uid == uid)
                .and_then(|policy| policy.spec.clone())
            else {
                continue;
            };
            if let Some(since) = policy.waiting_since {
                let over = now.boot >= since.plus(spec.switchover.deadline);
                self.coverage.stage(match (over, spec.switchover.on_deadline) {
                    (false, _) => Stage::Waiting,
                    (true, OnDeadline::KeepOld) => Stage::KeptOld,
                    (true, OnDeadline::Cut) => Stage::Cut,
                });
            }
            let drains = kernel.backends.values().any(|backend| {
                backend.policy == *slot && backend.drain_until.is_some_and(|until| until > now.boot)
            });
            if drains {
                self.coverage.stage(Stage::Draining);
            }
        }
    }

    /// Nothing is left that time would change.
    pub(crate) fn rest(&mut self, engine: &Engine, kernel: &Kernel, now: Now) -> Checked {
        const LEFT: &str = "ENGINE, The model world: at rest the kernel has exactly what the rules want";
        if !self.told.names_are_clear() {
            return Ok(());
        }
        self.look_again(engine)?;
        ensure!(
            self.told.passed && self.told.complete && self.flights.is_empty(),
            "ENGINE, The model world: rest is reached",
            "passed {}, out {:?}",
            self.told.passed,
            self.flights
        );
        let stray = kernel
            .pins
            .keys()
            .find(|ifindex| !self.wants.of_device.contains_key(ifindex));
        ensure!(
            stray.is_none(),
            LEFT,
            "a link is pinned for {stray:?}, which has no attachment"
        );
        // Whoever waits for an identity has been looked at again and again.
        for (policy, view) in &self.view.policies {
            if view.intents.held == 0 {
                continue;
            }
            let wanted = &self.wants.policies[policy];
            for (name, judged) in &self.wants.attachments {
                let Some(device) = judged.device else { continue };
                let matters = matches!(judged.gate, Gate::Held(_))
                    && (wanted.consumers.contains(&judged.uid) || wanted.producers.contains(&judged.uid));
                let told = match self.told.rows.get(&device.ifindex) {
                    Some(Known::Row(row)) => *row,
                    _ => None,
                };
                let there = kernel.registry.get(&device.ifindex).copied();
                let identity = matches!(
                    judged.gate,
                    Gate::Held(
                        holdfast_engine::model::HoldReason::IdentityMissing
                            | holdfast_engine::model::HoldReason::IdentityMismatch
                    )
                );
                ensure!(
                    !matters || !identity || told == there,
                    "DESIGN 2.4: a silent identity is found by the recheck",
                    "{policy} holds; {name} has {there:?}, told {told:?}"
                );
            }
        }
        let mut used = BTreeSet::new();
        for (slot, policy) in &kernel.policies {
            let uid = number_of_hash(policy.uid);
            let wanted = self.wants.policies.iter().find(|(_, wanted)| wanted.uid == uid);
            ensure!(
                wanted.is_some_and(|(_, wanted)| !wanted.consumers.is_empty() || wanted.spec.is_none()),
                LEFT,
                "slot {slot} {policy:?} is nobody's"
            );
            used.extend(kernel.members(policy.selected).iter().copied());
            let Some((name, wanted)) = wanted else { continue };
            let stale = self.wants.intents.iter().any(|((policy, _), intent)| {
                policy == name && (matches!(intent.must, Must::NotDeliver) || intent.gate == Gate::Unreadable)
            });
            // Who is refused for another reason says nothing of what does not fit.
            let refused = self
                .view
                .policies
                .get(name)
                .is_some_and(|view| view.intents.failed > 0);
            let full = self.trouble.policies.contains(&uid) || (self.tight && refused);
            if wanted.spec.is_none() || wanted.unsupported || wanted.unclear || stale || full {
                continue;
            }
            let members: BTreeMap<_, _> = kernel
                .members(policy.selected)
                .iter()
                .filter_map(|id| kernel.backends.get(id))
                .map(|backend| (backend.ifindex, backend.token))
                .collect();
            let ready: BTreeMap<_, _> = wanted
                .ready
                .values()
                .map(|(device, token)| (device.ifindex, *token))
                .collect();
            let told = ready.keys().all(|ifindex| {
                kernel.registry.get(ifindex).map(|row| row.token) == ready.get(ifindex).copied()
            });
            if !ready.is_empty() && told {
                ensure!(
                    members == ready && policy.waiting_since.is_none(),
                    LEFT,
                    "slot {slot} {policy:?} of {name} selects {members:?}, ready are {ready:?}"
                );
            }
        }
        // Whose wishes nobody knows is left alone, also where somebody else has emptied its selector.
        let kept = |backend: &Backend| {
            let owner = kernel.policies.get(&backend.policy);
            owner.map_or_else(
                || self.lost_its_slot(kernel),
                |owner| self.is_unknown(number_of_hash(owner.uid)),
            )
        };
        let left: Vec<_> = kernel
            .backends
            .iter()
            .filter(|(id, backend)| !used.contains(id) && !kept(backend))
            .collect();
        ensure!(left.is_empty(), LEFT, "backends {left:?} are in no set");
        for (ifindex, sources) in &kernel.sources {
            let names = &self.wants.of_device[ifindex];
            let right = self.told.attachments.values().any(|attachment| {
                let judged = &self.wants.attachments[&attachment.name];
                names.contains(&judged.uid) && attachment.addresses == *sources
            });
            ensure!(right, LEFT, "device {ifindex} has sources {sources:?}");
        }
        for (ifindex, row) in &kernel.rows {
            let sources = kernel.sources.contains_key(ifindex);
            let entries = kernel.entries.get(ifindex).into_iter().flatten();
            let entries: BTreeSet<u8> = entries.filter_map(|(key, _)| number_of(key)).collect();
            let kinds = [row.has_services, row.has_prefixes_v4, row.has_prefixes_v6];
            let there = |is: &dyn Fn(RouteKey) -> bool| entries.iter().any(|number| is(route(*number)));
            let right = [
                there(&|key| !key.is_prefix()),
                there(&|key| key.is_prefix() && key.address().is_ipv4()),
                there(&|key| key.is_prefix() && key.address().is_ipv6()),
            ];
            // Claims for which there is no room are announced all the same.
            let no_room = self.wants.intents.values().any(|intent| {
                intent.device.map(|device| device.ifindex) == Some(*ifindex)
                    && self.has_no_room(intent, kernel)
            });
            let right = kinds == right || (no_room && right.into_iter().zip(kinds).all(|(a, b)| a <= b));
            // A closed row is written when it opens.
            ensure!(
                row.token.is_none() || (row.has_sources == sources && right),
                LEFT,
                "device {ifindex}: {row:?}, sources {sources}, entries {entries:?}"
            );
        }
        for flow in kernel
            .flows
            .iter()
            .filter(|flow| kernel.flow_holds(flow, now.boot))
        {
            let uid = number_of_hash(kernel.policies[&flow.policy].uid);
            let number = number_of(&flow.key).unwrap_or_default();
            let consumers = self.wants.of_device.get(&flow.consumer);
            let producers = self.wants.of_device.get(&flow.producer);
            let unknown = self
                .wants
                .policies
                .values()
                .any(|policy| policy.uid == uid && policy.spec.is_none());
            let allowed = consumers.into_iter().flatten().any(|consumer| {
                producers
                    .into_iter()
                    .flatten()
                    .any(|producer| self.granted.contains(&(uid, *consumer, number, *producer)))
            });
            ensure!(
                allowed || unknown,
                "DESIGN 2.10: after the drain no flow stays on a producer that left",
                "{flow:?} of policy {uid}"
            );
        }
        // What nobody has room for stays as it is.
        let full = self.tight;
        for (name, view) in &self.view.policies {
            let judged = self
                .wants
                .intents
                .range((name.clone(), name_before())..)
                .take_while(|((policy, _), _)| policy == name)
                .all(|(_, intent)| !matches!(intent.must, Must::NotDeliver));
            ensure!(
                !judged
                    || (view.intents.pending == 0
                        && view.behind_since.is_none()
                        && (full || view.intents.removing == 0)),
                "ENGINE, The model world: rest is reached",
                "{name}: {view:?}"
            );
        }
        ensure!(
            (full || self.view.summary.intents.removing == 0) && self.view.summary.first_pass_done,
            "ENGINE, The model world: rest is reached",
            "{:?}",
            self.view.summary
        );
        let idle = self
            .view
            .policies
            .values()
            .all(|view| view.state == State::Programmed || matches!(view.state, State::Failed(_)));
        let contested = self
            .wants
            .attachments
            .values()
            .any(|judged| judged.right != Right::Fine);
        ensure!(
            !idle
                || contested
                || full
                || engine.next_deadline().is_none()
                || self.audits
                || self.view.policies.values().any(|view| view.intents.held > 0),
            "DESIGN 2.4: a policy that holds nothing has no recheck timer",
            "nothing is held, and something is due at {:?}",
            engine.next_deadline()
        );
        Ok(())
    }

    /// Devices of which somebody would have to tell the agent: their registry row is not what was told, and nobody
    /// waits for it.
    pub(crate) fn silent_changes(&self, kernel: &Kernel) -> Vec<Ifindex> {
        self.wants
            .of_device
            .keys()
            .copied()
            .filter(|ifindex| {
                let told = match self.told.rows.get(ifindex) {
                    Some(Known::Row(row)) => *row,
                    Some(Known::Unreadable) | None => None,
                };
                told != kernel.registry.get(ifindex).copied()
            })
            .collect()
    }

    /// Packets of this world that somebody has claimed: for people.
    pub(crate) fn shown_fates(&self) -> String {
        let mut text = String::new();
        for ((ifindex, number), fate) in &self.fates {
            if fate.policy.is_some() {
                text.push_str(&format!("    device {ifindex} packet {number}: {fate:?}\n"));
            }
        }
        text
    }
}

fn name_before() -> ObjectName {
    ObjectName {
        namespace: String::new(),
        name: String::new(),
    }
}
