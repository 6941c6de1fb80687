//! The program of an interface: attached once nothing is missing that it would stand on.

use super::Port;
use super::kinds::Kinds;
use crate::conflict::Claims;
use crate::engine::Engine;
use crate::model::{Ifindex, Op};
use crate::plan::{Goal, What};

impl Engine {
    pub(super) fn plan_program(&mut self, ifindex: Ifindex, port: &mut Port) {
        if port.has_program() {
            port.troubles.remove(&Goal::Attached);
        } else {
            // Once nothing more is planned that the program would stand on.
            self.dirty.programs.insert(ifindex);
        }
    }

    /// Attaches the program to a device, if everything is ready for it.
    pub(crate) fn attach(&mut self, ifindex: Ifindex) {
        let Some(place) = self.ports.get_mut(&ifindex) else {
            return;
        };
        let mut port = std::mem::take(place);
        let claims = self.claims(&port);
        self.attach_over(ifindex, &mut port, &claims);
        self.ports.insert(ifindex, port);
    }

    fn attach_over(&mut self, ifindex: Ifindex, port: &mut Port, claims: &Claims) {
        let Some(device) = port.device else {
            return;
        };
        if port.has_program() || !port.program.idle() || port.blocked(Goal::Attached) {
            return;
        }
        // Only onto an interface whose row is closed and whose entries are what is wanted now.
        let row_right = if claims.is_empty() {
            port.bare() || (!self.may_remove() && port.row.idle() && !port.may_be_open())
        } else {
            let kinds = self.kinds(port, claims);
            port.row
                .sure()
                .copied()
                .flatten()
                .is_some_and(|row| row.token.is_none() && Kinds::of_row(&row).contain(kinds))
        };
        let keys_right = port.entries.iter().all(|(key, cell)| {
            cell.idle() && (claims.keys.contains_key(key) || claims.kept.contains(key) || !self.may_remove())
        }) && claims
            .keys
            .iter()
            .all(|(key, index)| self.claimed(port, key, &claims.intents[*index]));
        if row_right && keys_right {
            let op = self.send(What::Attach(ifindex), Some(device), Op::Attach { device });
            port.program.send(op, Some(device.mac));
            port.touched = op;
        }
    }

    /// A proof found that the program is gone: it is attached anew, under a closed row.
    pub(crate) fn program_gone(&mut self, ifindex: Ifindex) {
        if let Some(port) = self.ports.get_mut(&ifindex)
            && port.program.idle()
        {
            // A link without a device may be left of it.
            port.program.doubt(None);
            self.dirty.ports.insert(ifindex);
        }
        self.dirty_interface_of(ifindex);
    }
}
