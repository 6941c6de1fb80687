//! The one classification of an interface and its identity. Apply, repair and start-up all use it.

use serde::{Deserialize, Serialize};

use crate::model::{HoldReason, Identity, Incarnation, Link, RegistryRead, Token};

/// What is known of the registry row of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Known {
    /// Nobody has read it yet for this device.
    #[default]
    Unread,
    /// It was never read for this device because every read failed. The text is for people.
    Unreadable(String),
    /// What the last successful read said.
    Row(Option<Identity>),
}

impl Known {
    /// The registered token, as far as is known.
    pub(crate) const fn token(&self) -> Option<Token> {
        match self {
            Self::Row(Some(identity)) => Some(identity.token),
            Self::Row(None) | Self::Unread | Self::Unreadable(_) => None,
        }
    }

    /// What is known after one more read. A failed read is no news.
    pub(crate) fn after(self, read: RegistryRead) -> Self {
        match (self, read) {
            (_, RegistryRead::Row(identity)) => Self::Row(Some(identity)),
            (_, RegistryRead::Absent) => Self::Row(None),
            (Self::Row(row), RegistryRead::Failed(_)) => Self::Row(row),
            (Self::Unread | Self::Unreadable(_), RegistryRead::Failed(error)) => Self::Unreadable(error),
        }
    }
}

/// Whether packets of an attachment may be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// Link and identity are there.
    Ready(Token),
    /// They are not.
    Held(HoldReason),
    /// The identity has not been read yet.
    Unread,
    /// The identity could not be read, and never was.
    Unreadable(String),
}

impl Gate {
    /// The token, if ready.
    pub(crate) const fn token(&self) -> Option<Token> {
        match self {
            Self::Ready(token) => Some(*token),
            Self::Held(_) | Self::Unread | Self::Unreadable(_) => None,
        }
    }

    /// Whether another read of the registry could change it.
    pub(crate) const fn hangs_on_identity(&self) -> bool {
        match self {
            Self::Unread
            | Self::Unreadable(_)
            | Self::Held(HoldReason::IdentityMissing | HoldReason::IdentityMismatch) => true,
            Self::Ready(_) | Self::Held(_) => false,
        }
    }
}

/// The row, if it speaks of this very device. A row of an earlier device of that number does not.
pub(crate) fn of_device(link: &Link, row: Option<&Identity>) -> Option<Identity> {
    row.filter(|identity| identity.host_mac_shared || identity.host_mac == link.mac)
        .copied()
}

/// Judges one attachment.
pub(crate) fn classify(link: Option<&Link>, known: &Known, expected: Option<Incarnation>) -> Gate {
    let Some(link) = link else {
        return Gate::Held(HoldReason::InterfaceMissing);
    };
    if !link.up {
        return Gate::Held(HoldReason::InterfaceDown);
    }
    if !link.carrier {
        return Gate::Held(HoldReason::NoCarrier);
    }
    match known {
        Known::Unread => Gate::Unread,
        Known::Unreadable(error) => Gate::Unreadable(error.clone()),
        Known::Row(row) => match of_device(link, row.as_ref()) {
            None => Gate::Held(HoldReason::IdentityMissing),
            Some(identity) if expected.is_some() && identity.incarnation != expected => {
                Gate::Held(HoldReason::IdentityMismatch)
            }
            Some(identity) => Gate::Ready(identity.token),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LinkKind, Mac};

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    fn link(up: bool, carrier: bool) -> Link {
        Link {
            ifindex: 5,
            name: "hf0".into(),
            mac: MAC,
            up,
            carrier,
            kind: LinkKind::Tap,
            master: None,
            mtu: 1500,
            ipv6: true,
        }
    }

    fn identity(host_mac: Mac, shared: bool, incarnation: Option<Incarnation>) -> Identity {
        Identity {
            token: Token::new(9).unwrap(),
            mac: Mac::default(),
            host_mac,
            host_mac_shared: shared,
            incarnation,
        }
    }

    #[test]
    fn every_condition_has_its_reason() {
        let row = |identity| Known::Row(Some(identity));
        let mine = Some(Incarnation([1; 16]));
        let other = Mac([2, 0, 0, 0, 0, 2]);
        let good = row(identity(MAC, false, mine));
        let ready = Gate::Ready(Token::new(9).unwrap());
        let up = link(true, true);
        let cases = [
            (None, good.clone(), mine, Gate::Held(HoldReason::InterfaceMissing)),
            (
                Some(link(false, true)),
                good.clone(),
                mine,
                Gate::Held(HoldReason::InterfaceDown),
            ),
            (
                Some(link(true, false)),
                good.clone(),
                mine,
                Gate::Held(HoldReason::NoCarrier),
            ),
            (Some(up.clone()), Known::Unread, mine, Gate::Unread),
            (
                Some(up.clone()),
                Known::Unreadable("EIO".into()),
                mine,
                Gate::Unreadable("EIO".into()),
            ),
            (
                Some(up.clone()),
                Known::Row(None),
                mine,
                Gate::Held(HoldReason::IdentityMissing),
            ),
            (
                Some(up.clone()),
                row(identity(other, false, mine)),
                mine,
                Gate::Held(HoldReason::IdentityMissing),
            ),
            (
                Some(up.clone()),
                row(identity(other, true, mine)),
                mine,
                ready.clone(),
            ),
            (
                Some(up.clone()),
                row(identity(MAC, false, None)),
                mine,
                Gate::Held(HoldReason::IdentityMismatch),
            ),
            (
                Some(up.clone()),
                row(identity(MAC, false, Some(Incarnation([2; 16])))),
                mine,
                Gate::Held(HoldReason::IdentityMismatch),
            ),
            (
                Some(up.clone()),
                row(identity(MAC, false, None)),
                None,
                ready.clone(),
            ),
            (Some(up), good, mine, ready),
        ];
        for (link, known, expected, gate) in cases {
            assert_eq!(classify(link.as_ref(), &known, expected), gate);
        }
    }

    #[test]
    fn a_failed_read_is_no_news() {
        let row = Known::Row(Some(identity(MAC, false, None)));
        assert_eq!(row.clone().after(RegistryRead::Failed("EIO".into())), row);
        assert_eq!(
            Known::Row(None).after(RegistryRead::Failed("EIO".into())),
            Known::Row(None)
        );
        assert_eq!(
            Known::Unread.after(RegistryRead::Failed("EIO".into())),
            Known::Unreadable("EIO".into())
        );
        assert_eq!(row.after(RegistryRead::Absent), Known::Row(None));
    }
}
