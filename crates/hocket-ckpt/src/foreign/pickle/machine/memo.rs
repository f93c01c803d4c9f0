//! The memo of a pickle.

use std::collections::HashMap;

use crate::foreign::pickle::tree::PickleValue;

/// The values that a pickle refers to again, by index. Every pickler counts from 0, so only a hostile file has gaps.
#[derive(Default)]
pub(super) struct PickleMemo {
    counted: Vec<PickleValue>,
    others: HashMap<u64, PickleValue>,
}

impl PickleMemo {
    pub(super) fn len(&self) -> usize {
        self.counted.len() + self.others.len()
    }

    pub(super) fn get(&self, index: u64) -> Option<PickleValue> {
        let counted = self.counted.get(usize::try_from(index).ok()?);
        counted.or_else(|| self.others.get(&index)).copied()
    }

    pub(super) fn insert(&mut self, index: u64, value: PickleValue) {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        if let Some(known) = self.counted.get_mut(at) {
            *known = value;
        } else if at == self.counted.len() {
            self.others.remove(&index);
            self.counted.push(value);
        } else {
            self.others.insert(index, value);
        }
    }
}
