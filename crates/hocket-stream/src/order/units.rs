//! The units of an epoch: repeated whole shards of a stream, and parts of shards for the remainder.
//!
//! Of `S` samples, `n = qS + r` are requested: each whole shard `q` times, and `r` samples spread over the
//! shards in proportion to their sizes. The spread is a systematic sample. Along the shards in a keyed order,
//! each adds its share `r·s/S` to a credit that starts at a keyed fraction of a grain, and gives as many whole
//! grains (of `granularity` samples) as the credit contains. Every sample is therefore equally likely, the sum
//! is exact, and one pass over the shards suffices. The samples taken from a shard are the first ones of a
//! keyed bijection; without shuffling, evenly spaced ones, so that they stay in storage order.

use std::ops::Range;

use crate::error::{Result, StreamError};
use crate::order::permute::{Permutation, derive_key, scale};
use crate::order::settings::{OrderSettings, Sampling};

/// Limit of units: a plan takes 16 bytes for each.
const MOST_UNITS: u64 = 1 << 26;

/// A shard or a part of it, once per occurrence in the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShuffleUnit {
    /// The shard's number over all streams.
    pub(super) shard: u32,
    /// Number of its samples that are taken.
    pub(super) take: u32,
}

/// The draw of parts of streams.
#[derive(Clone, Debug)]
pub(super) struct UnitDraw {
    settings: OrderSettings,
    /// The epoch, or 0 if every epoch has the same part.
    epoch: u64,
}

impl UnitDraw {
    pub(super) fn new(settings: OrderSettings, epoch: u64) -> Self {
        let epoch = match settings.sampling_method {
            Sampling::Balanced if settings.shuffle => epoch,
            Sampling::Balanced | Sampling::Fixed => 0,
        };
        Self { settings, epoch }
    }

    /// Appends the units for `wanted` samples of the stream with `shards`.
    ///
    /// # Errors
    /// [`StreamError::Config`] if the stream repeats so often that the plan would be too large.
    pub(super) fn units(
        &self,
        storage: &[u64],
        shards: Range<usize>,
        wanted: u64,
        out: &mut Vec<ShuffleUnit>,
    ) -> Result<()> {
        let sizes: Vec<u64> = storage[shards.start..=shards.end]
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect();
        let held: u64 = sizes.iter().sum();
        let (times, part) = (wanted / held.max(1), wanted % held.max(1));
        let planned = times.saturating_mul(sizes.len() as u64);
        if planned.saturating_add(out.len() as u64) > MOST_UNITS {
            return Err(StreamError::config(format!(
                "{wanted} samples are requested from a stream of {held} in {} shards: expected fewer than {MOST_UNITS} repeated shards; write the stream again in larger shards, or request fewer samples",
                sizes.len()
            )));
        }
        let unit = |place: usize, take: u64| ShuffleUnit {
            shard: (shards.start + place) as u32,
            take: take as u32,
        };
        for _ in 0..times {
            out.extend(
                sizes
                    .iter()
                    .enumerate()
                    .map(|(place, &size)| unit(place, size)),
            );
        }
        if part > 0 {
            let takes = self.spread(&sizes, held, part, shards.start as u64);
            let some = takes.iter().enumerate().filter(|&(_, &take)| take > 0);
            out.extend(some.map(|(place, &take)| unit(place, take)));
        }
        Ok(())
    }

    /// Returns how many of `part` samples each shard gives; `part` is below `held`, the sum of `sizes`.
    fn spread(&self, sizes: &[u64], held: u64, part: u64, first: u64) -> Vec<u64> {
        let key = derive_key(
            b"hkt-part",
            &[self.settings.shuffle_seed, self.epoch, first],
        );
        let order = Permutation::new(sizes.len() as u64, key);
        let mut takes = vec![0; sizes.len()];
        let mut left = part;
        // Counted in samples times `held`, so that nothing is rounded.
        let held_wide = u128::from(held);
        let fraction = scale(derive_key(b"hkt-frac", &[key]), held);
        let mut credit = u128::from(self.settings.sampling_granularity) * u128::from(fraction);
        for turn in 0..sizes.len() as u64 {
            let place = order.apply(turn) as usize;
            credit += u128::from(part) * u128::from(sizes[place]);
            let whole = (credit / held_wide) as u64;
            let take = (whole - whole % self.settings.sampling_granularity)
                .min(sizes[place])
                .min(left);
            credit -= u128::from(take) * held_wide;
            takes[place] = take;
            left -= take;
        }
        // The remainder that no shard could give in whole grains.
        for turn in 0..sizes.len() as u64 {
            let place = order.apply(turn) as usize;
            let more = left.min(sizes[place] - takes[place]);
            takes[place] += more;
            left -= more;
        }
        takes
    }

    /// Returns the number, in a shard of `size` samples, of the sample at `offset` of `unit`.
    pub(super) fn sample(&self, unit: ShuffleUnit, size: u64, offset: u64) -> u64 {
        let take = u64::from(unit.take);
        if take == size {
            return offset;
        }
        if !self.settings.shuffle {
            let middle = (2 * u128::from(offset) + 1) * u128::from(size);
            return (middle / (2 * u128::from(take.max(1)))) as u64;
        }
        let shard = u64::from(unit.shard);
        let key = derive_key(
            b"hkt-draw",
            &[self.settings.shuffle_seed, self.epoch, shard],
        );
        Permutation::new(size, key).apply(offset)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use crate::order::settings::{Batching, TailPolicy};
    use proptest::prelude::*;

    fn draw(epoch: u64, granularity: u64, shuffle: bool) -> UnitDraw {
        let settings = OrderSettings {
            global_batch_size: 1,
            num_canonical_nodes: 1,
            shuffle,
            shuffle_seed: 5,
            shuffle_block_size: 1,
            tail: TailPolicy::Short,
            batching_method: Batching::Random,
            sampling_method: Sampling::Balanced,
            sampling_granularity: granularity,
        };
        // Also without shuffling, a draw of an epoch of its own.
        UnitDraw { settings, epoch }
    }

    fn storage(sizes: &[u64]) -> Vec<u64> {
        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts.last().unwrap() + size);
        }
        starts
    }

    fn units(draw: &UnitDraw, sizes: &[u64], wanted: u64) -> Vec<ShuffleUnit> {
        let mut out = Vec::new();
        draw.units(&storage(sizes), 0..sizes.len(), wanted, &mut out)
            .unwrap();
        out
    }

    #[test]
    fn each_repeat_is_a_unit_and_the_remainder_a_partial_one() {
        let all = units(&draw(0, 1, true), &[4, 0, 6], 25);
        let whole = [(0, 4), (1, 0), (2, 6), (0, 4), (1, 0), (2, 6)];
        let expected: Vec<ShuffleUnit> = whole
            .map(|(shard, take)| ShuffleUnit { shard, take })
            .into();
        assert_eq!(all[..6], expected);
        assert_eq!(
            all[6..],
            [
                ShuffleUnit { shard: 0, take: 2 },
                ShuffleUnit { shard: 2, take: 3 }
            ]
        );
    }

    #[test]
    fn a_larger_granularity_draws_from_fewer_shards() {
        let some = units(&draw(0, 32, true), &[32; 100], 320);
        assert!(some.iter().all(|unit| unit.take == 32), "{some:?}");
        let single = units(&draw(0, 1, true), &[32; 100], 320);
        assert!(
            single.iter().all(|unit| (3..=4).contains(&unit.take)),
            "{single:?}"
        );
    }

    #[test]
    fn too_many_repeats_of_a_stream_are_an_error() {
        let error = draw(0, 1, true)
            .units(&[0, 1], 0..1, 1 << 40, &mut Vec::new())
            .unwrap_err();
        assert!(error.to_string().contains("larger shards"), "{error}");
    }

    #[test]
    fn every_sample_is_equally_likely() {
        let sizes = [3u64, 17, 1, 0, 9];
        let mut counts = vec![0u32; 30];
        for epoch in 0..6000 {
            let draw = draw(epoch, 1, true);
            for unit in units(&draw, &sizes, 10) {
                let size = sizes[unit.shard as usize];
                let before: u64 = sizes[..unit.shard as usize].iter().sum();
                for offset in 0..u64::from(unit.take) {
                    counts[(before + draw.sample(unit, size, offset)) as usize] += 1;
                }
            }
        }
        // Expected 2,000 of each, standard deviation 37.
        assert!(
            counts.iter().all(|&count| (1830..2170).contains(&count)),
            "{counts:?}"
        );
    }

    proptest! {
        #[test]
        fn a_part_is_exact_and_without_repetition(
            sizes in prop::collection::vec(0u64..50, 1..20),
            part in 0.0f64..1.0,
            granularity in 1u64..40,
            epoch in 0u64..5,
            shuffle: bool,
        ) {
            let held: u64 = sizes.iter().sum();
            let wanted = (held as f64 * part) as u64;
            let draw = draw(epoch, granularity, shuffle);
            let mut seen = Vec::new();
            for unit in units(&draw, &sizes, wanted).into_iter().filter(|_| wanted < held) {
                let size = sizes[unit.shard as usize];
                let picked: Vec<u64> = (0..u64::from(unit.take)).map(|o| draw.sample(unit, size, o)).collect();
                prop_assert!(shuffle || picked.is_sorted());
                prop_assert!(picked.iter().all(|&sample| sample < size));
                seen.extend(picked.into_iter().map(|sample| (unit.shard, sample)));
            }
            prop_assert_eq!(seen.len() as u64, if wanted < held { wanted } else { 0 });
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len() as u64, if wanted < held { wanted } else { 0 });
        }
    }
}
