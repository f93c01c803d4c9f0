//! Columns of integers that follow a rule for long stretches, such as the offsets of equal cuts.
//!
//! The chunks of a checkpoint of thousands of ranks are millions, and most columns of them are a few arithmetic
//! progressions: these are kept in place of the integers.

use std::fmt;
use std::iter::FusedIterator;

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde::{Serialize, Serializer};

/// The most runs of a short column; beyond it, a run has to stand for four integers on average.
const FREE_RUNS: usize = 4;

/// A column of integers, kept as arithmetic progressions if they are few.
#[derive(Clone, Default)]
pub struct IntegerColumn {
    len: usize,
    /// The integer that continues the last run, and the step to the one after it; none without a run of two.
    next: Option<(u64, u64)>,
    values: Values,
}

#[derive(Clone)]
enum Values {
    Runs(Vec<Run>),
    Plain(Vec<u64>),
}

/// An arithmetic progression, up to the next run or the end.
#[derive(Clone, Copy)]
struct Run {
    /// Index of the first integer.
    from: usize,
    first: u64,
    /// The difference between neighbours, modulo 2^64.
    step: u64,
}

impl Default for Values {
    fn default() -> Self {
        Self::Runs(Vec::new())
    }
}

impl Run {
    fn at(&self, index: usize) -> u64 {
        let steps = (index - self.from) as u64;
        self.first.wrapping_add(self.step.wrapping_mul(steps))
    }
}

impl IntegerColumn {
    /// Returns the number of integers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no integers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an integer at the end.
    #[inline]
    pub fn push(&mut self, value: u64) {
        match self.next {
            Some((next, step)) if next == value => {
                self.next = Some((next.wrapping_add(step), step));
                self.len += 1;
            }
            _ => self.push_other(value),
        }
    }

    /// Adds an integer that does not continue the last run.
    fn push_other(&mut self, value: u64) {
        let index = self.len;
        self.len += 1;
        let runs = match &mut self.values {
            Values::Plain(values) => {
                values.push(value);
                return;
            }
            Values::Runs(runs) => runs,
        };
        self.next = None;
        let has_room = runs.len() < FREE_RUNS + index / 4;
        match runs.last_mut() {
            Some(run) if index - run.from == 1 => {
                run.step = value.wrapping_sub(run.first);
                self.next = Some((value.wrapping_add(run.step), run.step));
            }
            _ if has_room => {
                let (from, first, step) = (index, value, 0);
                runs.push(Run { from, first, step });
            }
            _ => {
                let mut values = Vec::with_capacity(2 * index);
                values.extend(Runs::new(runs, index));
                values.push(value);
                self.values = Values::Plain(values);
            }
        }
    }

    /// Returns the integer at an index, which must be less than the length.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn at(&self, index: usize) -> u64 {
        assert!(index < self.len, "index {index} of {} integers", self.len);
        match &self.values {
            Values::Plain(values) => values[index],
            Values::Runs(runs) => {
                let behind = runs.partition_point(|run| run.from <= index);
                runs[behind - 1].at(index)
            }
        }
    }

    /// Returns the integers in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let (runs, values) = match &self.values {
            Values::Plain(values) => (Runs::new(&[], 0), values.as_slice()),
            Values::Runs(runs) => (Runs::new(runs, self.len), &[][..]),
        };
        runs.chain(values.iter().copied())
    }

    /// Returns whether all integers are `value`.
    pub(crate) fn is_all(&self, value: u64) -> bool {
        match &self.values {
            Values::Plain(values) => values.iter().all(|one| *one == value),
            Values::Runs(runs) => {
                let mut ends = runs.iter().skip(1).map(|run| run.from);
                runs.iter().all(|run| {
                    let end = ends.next().unwrap_or(self.len);
                    run.first == value && (run.step == 0 || end - run.from == 1)
                })
            }
        }
    }

    /// Returns the index of the first integer for which `is_before` is false, in a column that has those for which
    /// it is true first.
    pub(crate) fn partition_point(&self, is_before: impl Fn(u64) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len);
        while low < high {
            let middle = low + (high - low) / 2;
            if is_before(self.at(middle)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// The integers of runs, in order.
struct Runs<'a> {
    runs: &'a [Run],
    value: u64,
    step: u64,
    /// Integers that the current run still has.
    left: usize,
    len: usize,
}

impl<'a> Runs<'a> {
    fn new(runs: &'a [Run], len: usize) -> Self {
        let mut all = Self {
            runs,
            value: 0,
            step: 0,
            left: 0,
            len,
        };
        all.turn();
        all
    }

    /// Goes on to the next run, if there is one.
    fn turn(&mut self) {
        if let Some((run, rest)) = self.runs.split_first() {
            let end = rest.first().map_or(self.len, |next| next.from);
            (self.value, self.step, self.left) = (run.first, run.step, end - run.from);
            self.runs = rest;
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        if self.left == 0 {
            return None;
        }
        let value = self.value;
        self.value = value.wrapping_add(self.step);
        self.left -= 1;
        if self.left == 0 {
            self.turn();
        }
        Some(value)
    }
}

impl FusedIterator for Runs<'_> {}

impl FromIterator<u64> for IntegerColumn {
    fn from_iter<I: IntoIterator<Item = u64>>(values: I) -> Self {
        let mut column = Self::default();
        values.into_iter().for_each(|value| column.push(value));
        column
    }
}

impl From<Vec<u64>> for IntegerColumn {
    fn from(values: Vec<u64>) -> Self {
        values.into_iter().collect()
    }
}

impl Serialize for IntegerColumn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for IntegerColumn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(IntegerColumnVisitor)
    }
}

struct IntegerColumnVisitor;

impl<'de> Visitor<'de> for IntegerColumnVisitor {
    type Value = IntegerColumn;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of integers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<IntegerColumn, A::Error> {
        let mut column = IntegerColumn::default();
        while let Some(value) = list.next_element()? {
            column.push(value);
        }
        Ok(column)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_cuts_are_few_runs_and_random_integers_are_kept_as_they_are() {
        let cuts: IntegerColumn = (0..1000).map(|rank| rank * 8).chain([8003]).collect();
        assert!(matches!(&cuts.values, Values::Runs(runs) if runs.len() == 2));
        let drawn: IntegerColumn = (0..1000).map(|index: u64| index * index % 997).collect();
        assert!(matches!(&drawn.values, Values::Plain(values) if values.len() == 1000));
    }

    proptest! {
        /// A column holds what was pushed, whether it is regular, irregular, or turns from one to the other.
        #[test]
        fn a_column_holds_what_was_pushed(
            stretches in prop::collection::vec(
                (prop_oneof![0_u64..9, any::<u64>()], prop_oneof![Just(0), 0_u64..9, any::<u64>()], 0_usize..30),
                0..30,
            ),
            value in 0_u64..9,
        ) {
            let stretch = |(first, step, count): (u64, u64, usize)| {
                (0..count as u64).map(move |index| first.wrapping_add(step.wrapping_mul(index)))
            };
            let expected: Vec<u64> = stretches.into_iter().flat_map(stretch).collect();
            let column = IntegerColumn::from(expected.clone());
            prop_assert_eq!(column.len(), expected.len());
            prop_assert_eq!(column.iter().collect::<Vec<_>>(), &*expected);
            let one_by_one: Vec<u64> = (0..column.len()).map(|index| column.at(index)).collect();
            prop_assert_eq!(&one_by_one, &expected);
            prop_assert_eq!(column.is_all(value), expected.iter().all(|one| *one == value));
            let json = serde_json::to_string(&column).unwrap();
            prop_assert_eq!(&json, &serde_json::to_string(&expected).unwrap());
            let parsed: IntegerColumn = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(parsed.iter().collect::<Vec<_>>(), &*expected);
            let mut sorted = expected;
            sorted.sort_unstable();
            let column = IntegerColumn::from(sorted.clone());
            prop_assert_eq!(column.partition_point(|one| one < value), sorted.partition_point(|one| *one < value));
        }
    }
}
