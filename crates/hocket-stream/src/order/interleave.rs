//! An even interleaving of several sequences, so that any stretch of the result has nearly their proportions.
//!
//! The first sequence takes its `n₀` of `n` slots at equal distances (Bresenham's line), the second its slots of
//! those that are left, and so on. The owner of a slot, and the number of slots the owner had before, follow in one
//! pass over the sequences, without visiting other slots.

/// Interleaved sequences, by their lengths.
#[derive(Clone, Debug)]
pub(super) struct StreamInterleave {
    counts: Vec<u64>,
    total: u64,
}

impl StreamInterleave {
    pub(super) fn new(counts: Vec<u64>) -> Self {
        let total = counts.iter().sum();
        Self { counts, total }
    }

    /// Returns the length of the result.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the length of sequence `owner`.
    pub(super) fn count(&self, owner: usize) -> u64 {
        self.counts.get(owner).copied().unwrap_or(0)
    }

    /// Returns the number of slots that each sequence has before slot `slot`, which may be the end.
    pub(super) fn before(&self, mut slot: u64) -> Vec<u64> {
        let mut left = self.total;
        let share = |&count: &u64| {
            let own = (u128::from(slot) * u128::from(count) / u128::from(left.max(1))) as u64;
            slot -= own;
            left -= count;
            own
        };
        self.counts.iter().map(share).collect()
    }

    /// Returns the sequence that slot `slot` belongs to, and the position in that sequence. `slot` must be
    /// below the total.
    pub(super) fn at(&self, mut slot: u64) -> (usize, u64) {
        let mut left = self.total;
        for (owner, &count) in self.counts.iter().enumerate() {
            if count == left {
                return (owner, slot);
            }
            let taken = |slots: u64| {
                (u128::from(slots) * u128::from(count) / u128::from(left.max(1))) as u64
            };
            let before = taken(slot);
            if taken(slot + 1) > before {
                return (owner, before);
            }
            slot -= before;
            left -= count;
        }
        (0, slot)
    }
}

/// Splits `total` into whole numbers in proportion to `weights`, rounding up those with the largest remainders.
pub(super) fn apportion(total: u64, weights: &[u64]) -> Vec<u64> {
    let all: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    let all = all.max(1);
    let exact = |weight: u64| u128::from(total) * u128::from(weight);
    let mut counts: Vec<u64> = weights.iter().map(|&w| (exact(w) / all) as u64).collect();
    let mut by_rest: Vec<usize> = (0..weights.len()).collect();
    by_rest.sort_by_key(|&place| std::cmp::Reverse(exact(weights[place]) % all));
    let short = total.saturating_sub(counts.iter().sum()) as usize;
    for &place in by_rest.iter().take(short) {
        counts[place] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn streams_are_interleaved_evenly() {
        let sequences = StreamInterleave::new(vec![2, 4, 0, 1]);
        let owners: Vec<usize> = (0..7).map(|slot| sequences.at(slot).0).collect();
        assert_eq!(owners, [3, 1, 1, 0, 1, 1, 0]);
    }

    #[test]
    fn the_largest_remainders_are_rounded_up() {
        assert_eq!(apportion(10, &[945, 55]), [9, 1]);
        assert_eq!(apportion(10, &[955, 45]), [10, 0]);
        assert_eq!(apportion(8, &[1, 1, 1]), [3, 3, 2]);
        assert_eq!(apportion(8, &[]), [0u64; 0]);
    }

    proptest! {
        #[test]
        fn each_slot_has_one_owner_and_owners_advance_in_order(counts in prop::collection::vec(0u64..40, 1..6)) {
            let sequences = StreamInterleave::new(counts.clone());
            let mut had = vec![0u64; counts.len()];
            for slot in 0..sequences.total() {
                let (owner, number) = sequences.at(slot);
                prop_assert_eq!(&sequences.before(slot), &had);
                prop_assert_eq!(number, had[owner]);
                had[owner] += 1;
            }
            prop_assert_eq!(had, counts);
        }

        #[test]
        fn parts_add_up_and_are_within_one_of_the_exact_share(total in 0u64..10_000, weights in prop::collection::vec(1u64..1000, 1..8)) {
            let counts = apportion(total, &weights);
            prop_assert_eq!(counts.iter().sum::<u64>(), total);
            let all: u64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(&weights) {
                let exact = total as f64 * *weight as f64 / all as f64;
                prop_assert!((*count as f64 - exact).abs() < 1.0);
            }
        }
    }
}
