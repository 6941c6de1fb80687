//! The consumer row of an interface, with the source addresses and the kinds of entries that it announces.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::kinds::Kinds;
use super::plan::Plan;
use super::{Port, is_open};
use crate::conflict::Claims;
use crate::engine::Engine;
use crate::model::{Ifindex, Link, LinkKind, Op, Row, Token};
use crate::plan::{Goal, What};

impl Engine {
    pub(super) fn close_row(&mut self, ifindex: Ifindex, port: &mut Port, kinds: Kinds) {
        if !port.row.idle() || port.blocked(Goal::RowClosed) {
            return;
        }
        let rows = || port.row.values().iter().flatten();
        let has_sources = rows().any(|row| row.has_sources);
        let kinds = rows().map(Kinds::of_row).fold(kinds, Kinds::with);
        // Whatever is taken away under the closed row, flows of before it are looked up anew.
        let epoch = port.epoch(self.now.boot, true);
        let row = kinds.row(None, epoch, has_sources, self.answers_via(port));
        self.write_row(ifindex, port, row, Goal::RowClosed, false);
    }

    /// The device by which packets leave to the workload behind a link, with its address as the next hop: the bridge
    /// that it is a port of, or the link itself. None = straight to its peer.
    pub(crate) fn way_to(&self, link: &Link) -> Option<Ifindex> {
        let straight = link.kind == LinkKind::Veth { peer_elsewhere: true } && !self.config.neighbour_only;
        (!straight).then(|| self.interfaces.bridge_of(link).unwrap_or(link.ifindex))
    }

    /// The device by which answers leave to the consumer on this interface; none = straight to its peer.
    pub(crate) fn answers_via(&self, port: &Port) -> Option<Ifindex> {
        let link = self.interfaces.link(port.device?.ifindex)?;
        self.way_to(link)
    }

    /// What the row must announce.
    pub(super) fn kinds(&self, port: &Port, claims: &Claims) -> Kinds {
        let kinds = Kinds::of(claims.keys.keys().chain(&claims.kept));
        if self.may_remove() {
            let left = port.entries.keys().filter(|key| !claims.keys.contains_key(key));
            kinds.with(Kinds::of(
                left.filter(|key| self.stands_in_for_another(port, claims, key)),
            ))
        } else {
            // What nobody claims may yet turn out to be somebody's: it stays as it is.
            kinds.with(Kinds::of(port.entries.keys()))
        }
    }

    fn write_row(&mut self, ifindex: Ifindex, port: &mut Port, row: Row, goal: Goal, opening: bool) {
        // Only another epoch covers what was taken away.
        let raised = port
            .row
            .values()
            .iter()
            .flatten()
            .all(|old| old.epoch != row.epoch);
        let what = What::Row {
            ifindex,
            goal,
            opening,
            revoked: if raised { port.revoked } else { port.covered },
        };
        let op = self.send(what, port.device, Op::WriteRow { ifindex, row });
        port.row.send(op, Some(row));
        if !opening {
            port.touched = op;
        }
    }

    pub(super) fn plan_sources(&mut self, ifindex: Ifindex, port: &mut Port) {
        let wanted = self.wanted_sources(port);
        if port.sources.is(&wanted) {
            port.troubles.remove(&Goal::Sources);
            return;
        }
        if !port.sources.idle() || port.blocked(Goal::Sources) {
            return;
        }
        // A row that still says that sources are known would call everybody spoofed.
        let said = port
            .row
            .may(|row| row.is_some_and(|row| row.has_sources && row.token.is_some()));
        if wanted.is_empty() && said {
            return;
        }
        let there: BTreeSet<IpAddr> = port.sources.values().iter().flatten().copied().collect();
        let add = match port.sources.sure() {
            Some(sure) => wanted.difference(sure).copied().collect(),
            None => wanted.clone(),
        };
        let delete = there.difference(&wanted).copied().collect();
        let op = self.send(
            What::Sources(ifindex),
            port.device,
            Op::WriteSources { ifindex, add, delete },
        );
        port.sources.send(op, wanted);
        port.touched = op;
    }

    pub(crate) fn wanted_sources(&self, port: &Port) -> BTreeSet<IpAddr> {
        port.winner
            .and_then(|id| self.objects.attachments.get(&id))
            .map_or_else(BTreeSet::new, |state| state.object.addresses.clone())
    }

    /// What the row of an interface should say. What only an operation decides is as it was sent last.
    pub(crate) fn wanted_row(
        &self,
        ifindex: Ifindex,
        port: &Port,
        claims: &Claims,
        last: Option<Row>,
    ) -> Option<Row> {
        if self.stays(port, claims) {
            return last;
        }
        if port.device.is_none() || claims.is_empty() {
            return None;
        }
        let kinds = self.kinds(port, claims);
        let open_for = last.and_then(|row| row.token);
        let plans = self.plans(ifindex, port, claims);
        let deliverable = plans.iter().any(|plan| plan.deliverable);
        let token = self
            .target(port, claims)
            .filter(|token| open_for == Some(*token) || deliverable);
        let epoch = last.map_or(0, |row| row.epoch);
        Some(match (token, last) {
            (None, Some(row)) => kinds
                .with(Kinds::of_row(&row))
                .row(None, epoch, row.has_sources, row.via),
            _ => {
                let has_sources = !self.wanted_sources(port).is_empty();
                kinds.row(token, epoch, has_sources, self.answers_via(port))
            }
        })
    }

    /// Closes, opens or rewrites the consumer row.
    pub(super) fn plan_row(
        &mut self,
        ifindex: Ifindex,
        port: &mut Port,
        claims: &Claims,
        plans: &[Plan],
        target: Option<Token>,
    ) {
        if !port.row.idle() {
            return;
        }
        let wanted_sources = self.wanted_sources(port);
        let has_sources = !wanted_sources.is_empty();
        let sources_right = port.sources.is(&wanted_sources);
        let raise = port.revoked != port.covered;
        let kinds = self.kinds(port, claims);
        let via = self.answers_via(port);
        let stuck = port.stuck(claims);
        let Some(row) = port.row.sure().copied() else {
            self.close_row(ifindex, port, kinds);
            return;
        };
        let Some(row) = row else {
            // "No row" passes everything: a closed one makes the claims good.
            if !port.blocked(Goal::RowClosed) {
                let epoch = port.epoch(self.now.boot, true);
                let row = kinds.row(None, epoch, has_sources, via);
                self.write_row(ifindex, port, row, Goal::RowClosed, false);
            }
            return;
        };
        let closed = row.token.is_none();
        let announced = Kinds::of_row(&row);
        if closed && !announced.contain(kinds) {
            // What it does not announce takes the default path.
            if !port.blocked(Goal::RowClosed) {
                let row = announced.with(kinds).row(None, row.epoch, row.has_sources, via);
                self.write_row(ifindex, port, row, Goal::RowClosed, false);
            }
            return;
        }
        match target {
            Some(token) if row.token == Some(token) && !stuck => {
                port.ready_since = None;
                let raise = raise && port.revoking.is_empty();
                let says_sources = has_sources && (sources_right || row.has_sources);
                let epoch = row.epoch.wrapping_add(u32::from(raise));
                // What is being taken away is announced until one write can say both.
                let kinds = if port.revoking.is_empty() {
                    kinds
                } else {
                    kinds.with(announced)
                };
                let wanted = kinds.row(Some(token), epoch, says_sources, via);
                if wanted != row && !port.blocked(Goal::RowOpen) {
                    self.write_row(ifindex, port, wanted, Goal::RowOpen, false);
                }
            }
            Some(token) if closed => {
                port.ready_since.get_or_insert(self.now.boot);
                if !plans.iter().any(|plan| plan.deliverable) {
                    // Nobody wants it open any more.
                    port.troubles.remove(&Goal::RowOpen);
                }
                if sources_right
                    && !stuck
                    && !port.blocked(Goal::RowOpen)
                    && self.may_open(port, claims, plans)
                {
                    let epoch = row.epoch.wrapping_add(u32::from(raise));
                    let wanted = kinds.row(Some(token), epoch, has_sources, via);
                    self.write_row(ifindex, port, wanted, Goal::RowOpen, true);
                    let vetted = port.device.map(|device| (device.mac, token));
                    for plan in plans.iter().filter(|plan| plan.proven) {
                        if let Some(intent) = self.intent_mut(plan.policy, plan.attachment) {
                            intent.vetted = vetted;
                        }
                    }
                }
            }
            _ if closed => {
                port.ready_since = None;
                port.troubles.remove(&Goal::RowOpen);
                port.troubles.remove(&Goal::RowClosed);
            }
            _ => {
                port.ready_since = None;
                port.troubles.remove(&Goal::RowOpen);
                if !claims.intents.iter().any(|claim| self.stops_passing(claim)) {
                    self.close_row(ifindex, port, kinds);
                }
            }
        }
    }

    /// Whether nothing but what is proven would go live.
    fn may_open(&self, port: &Port, claims: &Claims, plans: &[Plan]) -> bool {
        if plans.iter().any(|plan| plan.undecided) || !plans.iter().any(|plan| plan.proven) {
            return false;
        }
        let mut anything = false;
        for (key, cell) in &port.entries {
            if !cell.idle() {
                return false;
            }
            if !cell.may(|entry| is_open(*entry)) {
                continue;
            }
            // What is proven leads where it should.
            let proven = claims.keys.get(key).is_some_and(|index| plans[*index].proven);
            if !proven || cell.sure().is_none() {
                return false;
            }
            anything = true;
        }
        anything
    }
}
