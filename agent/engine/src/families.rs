//! The two families of IP, and for which of them something holds.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// None, one or both of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Families {
    pub(crate) v4: bool,
    pub(crate) v6: bool,
}

impl Families {
    /// Both.
    pub(crate) const BOTH: Self = Self { v4: true, v6: true };

    /// Those that these addresses are of.
    pub(crate) fn of(addresses: impl Iterator<Item = IpAddr>) -> Self {
        addresses.fold(Self::default(), |families, address| Self {
            v4: families.v4 || address.is_ipv4(),
            v6: families.v6 || address.is_ipv6(),
        })
    }

    /// Those of either.
    pub(crate) const fn with(self, other: Self) -> Self {
        Self {
            v4: self.v4 || other.v4,
            v6: self.v6 || other.v6,
        }
    }

    /// Those of both.
    pub(crate) const fn within(self, other: Self) -> Self {
        Self {
            v4: self.v4 && other.v4,
            v6: self.v6 && other.v6,
        }
    }

    /// Those that are not in `other`.
    pub(crate) const fn without(self, other: Self) -> Self {
        Self {
            v4: self.v4 && !other.v4,
            v6: self.v6 && !other.v6,
        }
    }

    /// Neither.
    pub(crate) const fn is_empty(self) -> bool {
        !self.v4 && !self.v6
    }

    /// Whether this address is of one of them.
    pub(crate) const fn contain(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(_) => self.v4,
            IpAddr::V6(_) => self.v6,
        }
    }
}

impl fmt::Display for Families {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.v4, self.v6) {
            (true, true) => "IPv4 or IPv6",
            (true, false) => "IPv4",
            (false, true) => "IPv6",
            (false, false) => "neither family",
        })
    }
}
