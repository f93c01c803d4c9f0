//! A mix of streams whose weights change at given samples of the run.
//!
//! Each stream is an endless sequence: its samples in the order of its own pass 0, then in that of pass 1, and so
//! on. The weights of a phase are whole numbers, the slots of its streams in a turn. The samples of the run take
//! turns after turns of the phase, interleaved within a turn, so that position `p` of the run has an owner, and a
//! number in the owner's sequence, which follow from the phases alone. The counts of all streams before `p` do too:
//! a later phase continues each sequence where the earlier one left it.
//!
//! Positions count the samples of all epochs. A batch has the samples of its positions; within it, the samples of a
//! stream are arranged by lanes, so that neighbouring ranks read neighbouring lanes, as in the other orders.

use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::order::interleave::StreamInterleave;

/// A stretch of the run with constant weights.
#[derive(Clone, Debug)]
struct MixPhase {
    /// The first position.
    start: u64,
    /// Number of samples that each stream gave before it.
    given: Vec<u64>,
    turn: StreamInterleave,
}

/// The weights of streams by position in the run.
#[derive(Clone, Debug)]
pub struct MixSchedule {
    phases: Arc<[MixPhase]>,
}

impl MixSchedule {
    /// Creates a schedule from the first position of each phase and the whole weights of its streams.
    ///
    /// # Errors
    /// [`StreamError::Config`] if the first phase does not start at 0, positions do not ascend, the phases differ in
    /// the number of streams, or weights are all 0 or too large.
    pub fn new(phases: &[(u64, Vec<u64>)]) -> Result<Self> {
        let mut made: Vec<MixPhase> = Vec::with_capacity(phases.len());
        for (number, (start, weights)) in phases.iter().enumerate() {
            let total = weights
                .iter()
                .try_fold(0u64, |sum, &weight| sum.checked_add(weight));
            if !total.is_some_and(|total| (1..1 << 62).contains(&total)) {
                return Err(StreamError::config(format!(
                    "the weights of phase {number} are {weights:?}: expected a sum from 1 to below 2^62"
                )));
            }
            let before = made.last();
            let is_next = before.map_or(*start == 0, |before| {
                before.start < *start && before.given.len() == weights.len()
            });
            if !is_next {
                return Err(StreamError::config(format!(
                    "phase {number} starts at sample {start} with {} weights: expected ascending starts from 0, and the same streams in each phase",
                    weights.len()
                )));
            }
            let given =
                before.map_or_else(|| vec![0; weights.len()], |phase| phase.given_at(*start));
            made.push(MixPhase {
                start: *start,
                given,
                turn: StreamInterleave::new(weights.clone()),
            });
        }
        if made.is_empty() {
            return Err(StreamError::config(
                "the schedule has no phase: expected one from 0",
            ));
        }
        Ok(Self {
            phases: made.into(),
        })
    }

    /// Returns the number of streams.
    pub fn num_streams(&self) -> usize {
        self.phases.first().map_or(0, |phase| phase.given.len())
    }

    /// Returns the number of samples that each stream gives before `position`.
    pub fn given(&self, position: u64) -> Vec<u64> {
        self.phase(position)
            .map_or_else(Vec::new, |phase| phase.given_at(position))
    }

    /// Returns the stream of `position`, and the sample's number in the stream's sequence.
    pub(super) fn at(&self, position: u64) -> (usize, u64) {
        self.phase(position).map_or((0, 0), |phase| {
            let total = phase.turn.total().max(1);
            let offset = position - phase.start;
            let (owner, number) = phase.turn.at(offset % total);
            let given = phase.given.get(owner).copied().unwrap_or(0);
            (
                owner,
                given + offset / total * phase.turn.count(owner) + number,
            )
        })
    }

    fn phase(&self, position: u64) -> Option<&MixPhase> {
        let number = self.phases.partition_point(|phase| phase.start <= position);
        self.phases.get(number.saturating_sub(1))
    }
}

impl MixPhase {
    fn given_at(&self, position: u64) -> Vec<u64> {
        let total = self.turn.total().max(1);
        let offset = position - self.start;
        let within = self.turn.before(offset % total);
        let given = self.given.iter().zip(within).enumerate();
        given
            .map(|(owner, (given, within))| {
                given + offset / total * self.turn.count(owner) + within
            })
            .collect()
    }
}

/// The positions of an epoch, and where the sequences of its streams are.
#[derive(Clone, Debug)]
pub(super) struct ScheduledEpoch {
    pub(super) schedule: MixSchedule,
    /// The position of the epoch's first sample.
    pub(super) first: u64,
    /// Number of samples of the epoch, and of a batch.
    pub(super) len: u64,
    pub(super) batch: u64,
    /// Number of lanes.
    pub(super) lanes: u64,
    /// Of each stream: its size, its first pass in the epoch, and the pool of that pass.
    pub(super) streams: Vec<(u64, u64, usize)>,
}

impl ScheduledEpoch {
    pub(super) fn batch_len(&self, k: u64) -> u64 {
        self.len
            .saturating_sub(k.saturating_mul(self.batch))
            .min(self.batch)
    }

    /// Returns the arrangement of batch `k`.
    pub(super) fn arrange(&self, k: u64) -> BatchMix {
        let start = self.first + k * self.batch;
        BatchMix {
            start,
            from: self.schedule.given(start),
            to: self.schedule.given(start + self.batch_len(k)),
        }
    }

    /// Returns the pool and the sample in it at `place` of a batch.
    pub(super) fn find(&self, mix: &BatchMix, place: u64) -> (usize, u64) {
        let (owner, number) = self.schedule.at(mix.start + place);
        let (size, first_pass, first_pool) = self.streams.get(owner).copied().unwrap_or((1, 0, 0));
        let of = |list: &[u64]| list.get(owner).copied().unwrap_or(0);
        // The part of this stream in this batch that is of the same pass.
        let pass = number / size;
        let begin = of(&mix.from).max(pass * size) - pass * size;
        let end = of(&mix.to).min((pass + 1) * size) - pass * size;
        let arranged = by_lanes(begin, end - begin, self.lanes, number - pass * size - begin);
        (first_pool + (pass - first_pass) as usize, arranged)
    }
}

/// The samples that the streams give to a batch, by their numbers in the streams' sequences.
pub(super) struct BatchMix {
    start: u64,
    from: Vec<u64>,
    to: Vec<u64>,
}

/// Arranges `start .. start + len` by the remainder of the division by `lanes`, and returns number `place`.
fn by_lanes(start: u64, len: u64, lanes: u64, place: u64) -> u64 {
    let (each, more) = (len / lanes, len % lanes);
    let first = start % lanes;
    // Lanes `first .. first + more`, in a circle, have one sample more than the others.
    let extra = |lane: u64| {
        let wrapped = (first + more).saturating_sub(lanes);
        lane.min(wrapped) + lane.saturating_sub(first).min(more - wrapped)
    };
    let before = |lane: u64| lane * each + extra(lane);
    let (mut low, mut high) = (0, lanes);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if before(middle) <= place {
            low = middle
        } else {
            high = middle
        }
    }
    start + (low + lanes - first) % lanes + (place - before(low)) * lanes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lanes_arrange_a_range_without_loss(start in 0u64..100, len in 1u64..100, lanes in 1u64..20) {
            let arranged: Vec<u64> = (0..len).map(|place| by_lanes(start, len, lanes, place)).collect();
            prop_assert!(arranged.is_sorted_by_key(|number| number % lanes));
            let mut sorted = arranged.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (start..start + len).collect::<Vec<_>>());
        }

        #[test]
        fn streams_advance_one_by_one_through_all_phases(
            phases in prop::collection::vec((1u64..60, prop::collection::vec(0u64..9, 3)), 1..5)
        ) {
            let mut start = 0;
            let mut made = Vec::new();
            for (len, mut weights) in phases {
                weights[0] += 1;
                made.push((start, weights));
                start += len;
            }
            let schedule = MixSchedule::new(&made).unwrap();
            let mut given = vec![0u64; 3];
            let mut exact = [0f64; 3];
            for position in 0..start + 50 {
                prop_assert_eq!(&schedule.given(position), &given);
                let (owner, number) = schedule.at(position);
                prop_assert_eq!(number, given[owner]);
                given[owner] += 1;
                let (_, weights) = made.iter().rev().find(|(start, _)| *start <= position).unwrap();
                let total: u64 = weights.iter().sum();
                prop_assert!(weights[owner] > 0);
                for stream in 0..3 {
                    exact[stream] += weights[stream] as f64 / total as f64;
                }
            }
            for stream in 0..3 {
                prop_assert!((given[stream] as f64 - exact[stream]).abs() < 2.0 * made.len() as f64);
            }
        }
    }

    #[test]
    fn phases_that_do_not_follow_each_other_are_an_error() {
        let cases: [&[(u64, Vec<u64>)]; 5] = [
            &[],
            &[(1, vec![1])],
            &[(0, vec![0, 0])],
            &[(0, vec![1]), (0, vec![1])],
            &[(0, vec![1]), (5, vec![1, 2])],
        ];
        for phases in cases {
            assert!(matches!(
                MixSchedule::new(phases),
                Err(StreamError::Config { .. })
            ));
        }
    }
}
