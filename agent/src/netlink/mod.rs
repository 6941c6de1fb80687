//! Network devices, as the kernel tells of them.

use holdfast_engine::model::{Ifindex, Link};

/// What the monitor says. Order is meaning: later news win.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkNews {
    /// All devices there are (after a start, an overrun, a closed socket).
    Dump(Vec<Link>),
    /// A device is there, new or changed.
    Present(Link),
    /// A device is gone, or moved to another namespace.
    Gone(Ifindex),
}
