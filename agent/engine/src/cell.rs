//! What is known of one thing in the kernel: nothing but what the kernel answered.

use serde::{Deserialize, Serialize};

use crate::model::OpId;

/// One thing in the kernel.
///
/// An operation that is out, or that failed, leaves every value that may be there now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cell<T> {
    /// The kernel said so.
    Sure(T),
    /// One of several values is there.
    Unsure(Box<Unsure<T>>),
}

/// What may be there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unsure<T> {
    /// Without repetition; the last one is the one that was sent last.
    values: Vec<T>,
    /// The operation that is out.
    flight: Option<OpId>,
}

impl<T: PartialEq> Cell<T> {
    /// The value, if the kernel said it and nothing has been sent since.
    pub(crate) fn sure(&self) -> Option<&T> {
        match self {
            Self::Sure(value) => Some(value),
            Self::Unsure(_) => None,
        }
    }

    /// Whether this very value is there for sure.
    pub(crate) fn is(&self, value: &T) -> bool {
        self.sure() == Some(value)
    }

    /// Whether no operation is out.
    pub(crate) fn idle(&self) -> bool {
        self.flight().is_none()
    }

    /// The operation that is out.
    pub(crate) fn flight(&self) -> Option<OpId> {
        match self {
            Self::Sure(_) => None,
            Self::Unsure(unsure) => unsure.flight,
        }
    }

    /// Every value that may be there.
    pub(crate) fn values(&self) -> &[T] {
        match self {
            Self::Sure(value) => std::slice::from_ref(value),
            Self::Unsure(unsure) => &unsure.values,
        }
    }

    /// Whether one of the values that may be there is like this.
    pub(crate) fn may(&self, like: impl FnMut(&T) -> bool) -> bool {
        self.values().iter().any(like)
    }

    /// An operation that makes it `value` is sent.
    pub(crate) fn send(&mut self, op: OpId, value: T) {
        let mut values = match std::mem::replace(
            self,
            Self::Unsure(Box::new(Unsure {
                values: Vec::new(),
                flight: Some(op),
            })),
        ) {
            Self::Sure(value) => vec![value],
            Self::Unsure(unsure) => unsure.values,
        };
        values.retain(|old| *old != value);
        values.push(value);
        if let Self::Unsure(unsure) = self {
            unsure.values = values;
        }
    }

    /// The operation that is out was carried out.
    pub(crate) fn done(&mut self, op: OpId) {
        if let Self::Unsure(unsure) = self
            && unsure.flight == Some(op)
            && let Some(value) = unsure.values.pop()
        {
            *self = Self::Sure(value);
        }
    }

    /// The operation that is out failed: it may have been carried out or not.
    pub(crate) fn failed(&mut self, op: OpId) {
        if let Self::Unsure(unsure) = self
            && unsure.flight == Some(op)
        {
            unsure.flight = None;
        }
    }

    /// What is there is the named value or what was thought before.
    pub(crate) fn doubt(&mut self, value: T)
    where
        T: Clone,
    {
        let (mut values, flight) = match self {
            Self::Sure(old) => (vec![old.clone()], None),
            Self::Unsure(unsure) => (std::mem::take(&mut unsure.values), unsure.flight),
        };
        if !values.contains(&value) {
            values.insert(0, value);
        }
        *self = Self::Unsure(Box::new(Unsure { values, flight }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_known_only_after_the_answer() {
        let mut cell = Cell::Sure(1);
        cell.send(OpId(7), 2);
        assert_eq!(cell.sure(), None);
        assert_eq!(cell.values(), [1, 2]);
        assert!(!cell.idle());
        cell.done(OpId(7));
        assert_eq!(cell.sure(), Some(&2));
    }

    #[test]
    fn a_failure_leaves_both_values_possible() {
        let mut cell = Cell::Sure(1);
        cell.send(OpId(7), 2);
        cell.failed(OpId(7));
        assert!(cell.idle());
        assert!(cell.may(|value| *value == 1) && cell.may(|value| *value == 2));
        cell.send(OpId(8), 1);
        assert_eq!(cell.values(), [2, 1]);
        cell.done(OpId(8));
        assert!(cell.is(&1));
    }

    #[test]
    fn an_answer_to_another_operation_changes_nothing() {
        let mut cell = Cell::Sure(1);
        cell.send(OpId(7), 2);
        cell.done(OpId(6));
        cell.failed(OpId(6));
        assert_eq!(cell.flight(), Some(OpId(7)));
    }
}
