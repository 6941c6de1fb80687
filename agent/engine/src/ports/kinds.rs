//! Which kinds of entries a row announces.

use crate::model::{Ifindex, RouteKey, Row, Token};

/// Which kinds of entries a row announces: the program looks up no others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kinds {
    pub(super) services: bool,
    pub(super) prefixes_v4: bool,
    pub(super) prefixes_v6: bool,
}

impl Kinds {
    pub(super) fn of<'a>(keys: impl Iterator<Item = &'a RouteKey>) -> Self {
        keys.fold(Self::default(), |kinds, key| match key {
            RouteKey::Service { .. } => Self {
                services: true,
                ..kinds
            },
            RouteKey::Prefix { address, .. } => Self {
                prefixes_v4: kinds.prefixes_v4 || address.is_ipv4(),
                prefixes_v6: kinds.prefixes_v6 || address.is_ipv6(),
                ..kinds
            },
        })
    }

    pub(super) const fn of_row(row: &Row) -> Self {
        Self {
            services: row.has_services,
            prefixes_v4: row.has_prefixes_v4,
            prefixes_v6: row.has_prefixes_v6,
        }
    }

    pub(super) const fn with(self, other: Self) -> Self {
        Self {
            services: self.services || other.services,
            prefixes_v4: self.prefixes_v4 || other.prefixes_v4,
            prefixes_v6: self.prefixes_v6 || other.prefixes_v6,
        }
    }

    pub(super) fn contain(self, other: Self) -> bool {
        self.with(other) == self
    }

    pub(super) const fn row(
        self,
        token: Option<Token>,
        epoch: u32,
        has_sources: bool,
        via: Option<Ifindex>,
    ) -> Row {
        Row {
            token,
            epoch,
            has_services: self.services,
            has_prefixes_v4: self.prefixes_v4,
            has_prefixes_v6: self.prefixes_v6,
            has_sources,
            via,
        }
    }
}
