//! The native order: which samples batch `k` of an epoch holds, and in which order.
//!
//! Let `B` be the global batch in samples, `C` the number of lanes (canonical nodes; `C` divides `B`).
//!
//! 1. Shards are permuted by a keyed bijection of (seed, epoch).
//! 2. Their samples, `N` in that order, are cut into `C` lanes at `⌊iN/C⌋`.
//! 3. Each lane is cut into blocks of `block` samples, each permuted by a keyed bijection of
//!    (seed, epoch, lane, block).
//! 4. Global batch `k` is lane 0's next `B/C` samples, then lane 1's, and so on; of `M` samples, rank
//!    `r` of `W` takes `⌊rM/W⌋ .. ⌊(r+1)M/W⌋`.
//!
//! Lanes differ by at most one sample, so every batch but the last is full and the last holds `N mod B`
//! samples. Without shuffling, steps 1 and 3 are the identity, in every epoch.
//!
//! An epoch costs one prefix sum over shards, a position `O(log shards)`; nothing is `O(samples)`.
//! The numbers of ranks and workers appear nowhere but in the slice of step 4.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, StreamError};
use crate::permute::{Permutation, derive_key};

/// What becomes of the last batch when the samples do not fill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// It is short.
    Short,
    /// It is left out.
    Drop,
    /// It is filled with the epoch's first samples, in the epoch's order.
    Pad,
}

impl Tail {
    /// The policy called `name`: `short`, `drop` or `pad`.
    ///
    /// # Errors
    /// [`StreamError::Config`] for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "short" => Ok(Self::Short),
            "drop" => Ok(Self::Drop),
            "pad" => Ok(Self::Pad),
            _ => Err(StreamError::config(format!(
                "`tail` is `{name}`: expected `short`, `drop` or `pad`"
            ))),
        }
    }
}

/// Everything the order depends on beside the data and the epoch.
#[derive(Clone, Debug)]
pub struct OrderSpec {
    /// `B`, samples of a batch over all ranks.
    pub global_batch: u64,
    /// `C`, a divisor of `global_batch`.
    pub lanes: u64,
    /// Whether shards and blocks are permuted at all.
    pub shuffle: bool,
    /// The seed of the permutations.
    pub seed: u64,
    /// Samples of a block; at least 1.
    pub block: u64,
    /// The policy for the last batch.
    pub tail: Tail,
}

/// One sample: a shard by its number in the index, and the sample's number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The shard's number in storage order.
    pub shard: u32,
    /// The sample's number in the shard.
    pub sample: u32,
}

/// A rank's part of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The batch to read from and the positions in it. Never empty: see `local`.
    pub from: u64,
    /// Positions in batch `from`.
    pub range: Range<u64>,
    /// How many of them count. 0 for a rank without a share of a short batch: it reads one sample, to
    /// make its step with, that weighs nothing.
    pub local: u64,
    /// How many count over all ranks.
    pub global: u64,
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct Order {
    spec: OrderSpec,
    epoch: u64,
    num_samples: u64,
    full_batches: u64,
    storage: Arc<[u64]>,
    /// Samples before each shard in the epoch's order of shards; one more entry than shards.
    starts: Arc<[u64]>,
    shards: Permutation,
}

impl Order {
    /// Plans an epoch over shards of which `storage[i]` samples lie before shard `i`.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a batch, lane or block size that is 0, or lanes that do not divide
    /// the batch.
    pub fn new(spec: OrderSpec, storage: Arc<[u64]>, epoch: u64) -> Result<Self> {
        for (name, value) in [
            ("global_batch_size", spec.global_batch),
            ("num_canonical_nodes", spec.lanes),
            ("shuffle_block_size", spec.block),
        ] {
            if value == 0 {
                return Err(StreamError::config(format!(
                    "`{name}` is 0: expected at least 1"
                )));
            }
        }
        if !spec.global_batch.is_multiple_of(spec.lanes) {
            return Err(StreamError::config(format!(
                "`num_canonical_nodes` is {} and the global batch {} samples: expected a divisor of it, such as {}",
                spec.lanes,
                spec.global_batch,
                gcd(spec.global_batch, spec.lanes)
            )));
        }
        let num_shards = storage.len().saturating_sub(1) as u64;
        let num_samples = storage.last().copied().unwrap_or(0);
        let shards = Permutation::new(num_shards, derive_key(b"hkt-shrd", &[spec.seed, epoch]));
        let starts = if spec.shuffle {
            permuted_starts(&storage, &shards)
        } else {
            storage.clone()
        };
        let full_batches = num_samples / spec.global_batch;
        Ok(Self {
            spec,
            epoch,
            num_samples,
            full_batches,
            storage,
            starts,
            shards,
        })
    }

    /// How many batches the epoch has, the same for every rank.
    pub fn num_batches(&self) -> u64 {
        match self.spec.tail {
            Tail::Drop => self.full_batches,
            Tail::Short | Tail::Pad => self.num_samples.div_ceil(self.spec.global_batch),
        }
    }

    /// How many samples batch `k` holds over all ranks, repeated ones included.
    pub fn batch_len(&self, k: u64) -> u64 {
        if self.spec.tail == Tail::Pad {
            self.spec.global_batch
        } else {
            self.own_len(k)
        }
    }

    /// Samples that the epoch leaves out (under [`Tail::Drop`]).
    pub fn num_dropped(&self) -> u64 {
        if self.spec.tail == Tail::Drop {
            self.num_samples % self.spec.global_batch
        } else {
            0
        }
    }

    /// Samples that the epoch repeats (under [`Tail::Pad`]).
    pub fn num_repeated(&self) -> u64 {
        match self.spec.tail {
            Tail::Pad => self.num_batches() * self.spec.global_batch - self.num_samples,
            Tail::Short | Tail::Drop => 0,
        }
    }

    /// The part of batch `k` that rank `rank` of `world` reads. `k` must be below
    /// [`num_batches`](Self::num_batches) and `rank` below `world`.
    pub fn share(&self, k: u64, rank: u64, world: u64) -> Share {
        let global = self.batch_len(k);
        let range = slice(global, rank, world);
        if !range.is_empty() {
            return Share {
                from: k,
                local: range.end - range.start,
                range,
                global,
            };
        }
        // A sample that this rank has read just before needs no shard that it would not open anyway.
        let from = k.saturating_sub(1);
        let len = self.batch_len(from);
        let first = slice(len, rank, world).start.min(len.saturating_sub(1));
        Share {
            from,
            range: first..first + 1,
            local: 0,
            global,
        }
    }

    /// Appends where positions `range` of batch `k` lie to `out`.
    pub fn locate(&self, k: u64, range: Range<u64>, out: &mut Vec<Location>) {
        let mut block: Option<Block> = None;
        for place in range {
            out.push(self.location(self.position(k, place, &mut block)));
        }
    }

    /// The number of a sample in storage order, the same in every epoch.
    pub fn storage_id(&self, location: Location) -> u64 {
        self.storage
            .get(location.shard as usize)
            .copied()
            .unwrap_or(0)
            + u64::from(location.sample)
    }

    /// How many different samples batch `k` holds.
    fn own_len(&self, k: u64) -> u64 {
        let batch = self.spec.global_batch;
        self.num_samples
            .saturating_sub(k.saturating_mul(batch))
            .min(batch)
    }

    /// The position, in the epoch's order of shards, of place `place` of batch `k`.
    fn position(&self, k: u64, place: u64, block: &mut Option<Block>) -> u64 {
        let own = self.own_len(k);
        if place >= own {
            // Padding: the epoch's samples once more from its start.
            let again = (place - own) % self.num_samples.max(1);
            let batch = self.spec.global_batch;
            return self.position(again / batch, again % batch, block);
        }
        let per_lane = self.spec.global_batch / self.spec.lanes;
        let (lane, offset) = if k < self.full_batches {
            (place / per_lane, k * per_lane + place % per_lane)
        } else {
            let taken = self.full_batches * per_lane;
            let lane = self.lane_of_rest(place, taken);
            (lane, taken + place - self.rest_before(lane, taken))
        };
        self.shuffled(lane, offset, block)
    }

    /// Where lane `lane` begins.
    fn lane_start(&self, lane: u64) -> u64 {
        (u128::from(lane) * u128::from(self.num_samples) / u128::from(self.spec.lanes)) as u64
    }

    /// Samples that the lanes before `lane` have left when each has given `taken`.
    fn rest_before(&self, lane: u64, taken: u64) -> u64 {
        self.lane_start(lane) - lane * taken
    }

    /// The lane that holds place `place` of the last, short batch.
    fn lane_of_rest(&self, place: u64, taken: u64) -> u64 {
        let (mut low, mut high) = (0, self.spec.lanes);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if self.rest_before(middle, taken) <= place {
                low = middle
            } else {
                high = middle
            }
        }
        low
    }

    /// Sample `offset` of lane `lane` after its block was permuted.
    fn shuffled(&self, lane: u64, offset: u64, block: &mut Option<Block>) -> u64 {
        let start = self.lane_start(lane);
        if !self.spec.shuffle {
            return start + offset;
        }
        let number = offset / self.spec.block;
        let known = match block.take() {
            Some(known) if known.lane == lane && known.number == number => known,
            _ => self.block(lane, number),
        };
        let position = start + known.first + known.permutation.apply(offset - known.first);
        *block = Some(known);
        position
    }

    fn block(&self, lane: u64, number: u64) -> Block {
        let first = number * self.spec.block;
        let len = self
            .spec
            .block
            .min(self.lane_start(lane + 1) - self.lane_start(lane) - first);
        let key = derive_key(b"hkt-blok", &[self.spec.seed, self.epoch, lane, number]);
        Block {
            lane,
            number,
            first,
            permutation: Permutation::new(len, key),
        }
    }

    fn location(&self, position: u64) -> Location {
        // Empty shards begin where the next one does: the last that begins here holds the sample.
        let place = self
            .starts
            .partition_point(|&start| start <= position)
            .saturating_sub(1);
        let sample = position - self.starts.get(place).copied().unwrap_or(0);
        let shard = if self.spec.shuffle {
            self.shards.apply(place as u64)
        } else {
            place as u64
        };
        Location {
            shard: shard as u32,
            sample: sample as u32,
        }
    }
}

/// The block that was asked for last: neighbours in a batch mostly share it.
struct Block {
    lane: u64,
    number: u64,
    first: u64,
    permutation: Permutation,
}

/// Rank `rank`'s contiguous part of `len` places.
pub fn slice(len: u64, rank: u64, world: u64) -> Range<u64> {
    let cut = |r: u64| (u128::from(r) * u128::from(len) / u128::from(world.max(1))) as u64;
    cut(rank)..cut(rank + 1)
}

/// The greatest common divisor; the default number of lanes is `gcd(global batch, 64)`.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn permuted_starts(storage: &[u64], shards: &Permutation) -> Arc<[u64]> {
    let mut starts = Vec::with_capacity(storage.len());
    let mut total = 0;
    starts.push(total);
    for place in 0..storage.len().saturating_sub(1) as u64 {
        let shard = shards.apply(place) as usize;
        total += storage[shard + 1] - storage[shard];
        starts.push(total);
    }
    starts.into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    fn storage(sizes: &[u64]) -> Arc<[u64]> {
        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts.last().unwrap() + size);
        }
        starts.into()
    }

    fn spec(global_batch: u64, lanes: u64, shuffle: bool) -> OrderSpec {
        OrderSpec {
            global_batch,
            lanes,
            shuffle,
            seed: 9176,
            block: 16,
            tail: Tail::Short,
        }
    }

    fn ids(order: &Order, k: u64, range: Range<u64>) -> Vec<u64> {
        let mut out = Vec::new();
        order.locate(k, range, &mut out);
        out.into_iter()
            .map(|location| order.storage_id(location))
            .collect()
    }

    fn epoch_ids(order: &Order) -> Vec<Vec<u64>> {
        (0..order.num_batches())
            .map(|k| ids(order, k, 0..order.batch_len(k)))
            .collect()
    }

    #[test]
    fn without_shuffling_one_lane_is_storage_order_in_every_epoch() {
        for epoch in 0..2 {
            let order = Order::new(spec(4, 1, false), storage(&[3, 0, 7]), epoch).unwrap();
            assert_eq!(
                epoch_ids(&order),
                [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]
            );
        }
    }

    #[test]
    fn lanes_take_turns_and_leave_their_rest_to_the_last_batch() {
        // 11 samples in 2 lanes: 0..5 and 5..11.
        let order = Order::new(spec(4, 2, false), storage(&[11]), 0).unwrap();
        assert_eq!(
            epoch_ids(&order),
            [vec![0, 1, 5, 6], vec![2, 3, 7, 8], vec![4, 9, 10]]
        );
    }

    #[test]
    fn the_order_is_pinned() {
        // Saved runs carry on in this order: it may never change.
        let order = Order::new(spec(8, 4, true), storage(&[5, 7, 0, 4, 9]), 3).unwrap();
        let expected = [
            vec![8, 6, 4, 1, 17, 15, 24, 19],
            vec![7, 10, 0, 3, 13, 14, 21, 22],
            vec![5, 9, 2, 11, 12, 16, 23, 20],
            vec![18],
        ];
        assert_eq!(epoch_ids(&order), expected);
    }

    #[test]
    fn tails_do_what_they_say() {
        let with = |tail| {
            Order::new(
                OrderSpec {
                    tail,
                    ..spec(4, 2, true)
                },
                storage(&[6, 4]),
                1,
            )
            .unwrap()
        };
        let (short, drop, pad) = (with(Tail::Short), with(Tail::Drop), with(Tail::Pad));
        assert_eq!(
            (short.num_batches(), drop.num_batches(), pad.num_batches()),
            (3, 2, 3)
        );
        assert_eq!((drop.num_dropped(), pad.num_repeated()), (2, 2));
        assert_eq!(epoch_ids(&drop)[..], epoch_ids(&short)[..2]);
        let (padded, plain) = (epoch_ids(&pad), epoch_ids(&short));
        assert_eq!(padded[2][..2], plain[2][..]);
        assert_eq!(padded[2][2..], plain[0][..2]);
    }

    #[test]
    fn padding_goes_round_when_there_are_fewer_samples_than_places() {
        let order = Order::new(
            OrderSpec {
                tail: Tail::Pad,
                ..spec(8, 1, false)
            },
            storage(&[3]),
            0,
        )
        .unwrap();
        assert_eq!(epoch_ids(&order), [vec![0, 1, 2, 0, 1, 2, 0, 1]]);
        assert_eq!(order.num_repeated(), 5);
    }

    #[test]
    fn a_rank_without_a_share_reads_one_sample_of_its_own() {
        let order = Order::new(spec(4, 1, false), storage(&[9]), 0).unwrap();
        let share = order.share(2, 0, 4);
        assert_eq!(
            share,
            Share {
                from: 1,
                range: 0..1,
                local: 0,
                global: 1
            }
        );
        assert_eq!(
            order.share(2, 3, 4),
            Share {
                from: 2,
                range: 0..1,
                local: 1,
                global: 1
            }
        );
    }

    #[test]
    fn lanes_must_divide_the_batch() {
        let message = Order::new(spec(6, 4, true), storage(&[9]), 0)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains('4') && message.contains('6') && message.contains("divisor"),
            "{message}"
        );
    }

    #[test]
    fn a_hundred_million_samples_cost_only_their_shards() {
        // 6,104 shards of 16,384: were anything of the order of the samples, this test would take seconds.
        let order = Order::new(
            OrderSpec {
                block: 1 << 18,
                ..spec(1024, 64, true)
            },
            storage(&[16_384; 6104]),
            0,
        )
        .unwrap();
        let k = order.num_batches() * 99 / 100;
        assert_eq!(ids(&order, k, 0..1024).len(), 1024);
    }

    prop_compose! {
        fn cases()(
            sizes in prop::collection::vec(0u64..40, 1..8),
            per_lane in 1u64..6,
            lanes in 1u64..6,
            block in 1u64..60,
            seed: u64,
            epoch in 0u64..4,
            shuffle: bool,
        ) -> (OrderSpec, Vec<u64>, u64) {
            (OrderSpec { global_batch: per_lane * lanes, lanes, shuffle, seed, block, tail: Tail::Short }, sizes, epoch)
        }
    }

    proptest! {
        #[test]
        fn every_sample_comes_once((spec, sizes, epoch) in cases()) {
            let order = Order::new(spec, storage(&sizes), epoch).unwrap();
            let mut seen = epoch_ids(&order).concat();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..sizes.iter().sum::<u64>()));
        }

        #[test]
        fn ranks_together_are_the_batch((spec, sizes, epoch) in cases(), world in 1u64..9) {
            let order = Order::new(spec, storage(&sizes), epoch).unwrap();
            for k in 0..order.num_batches() {
                let mut together = Vec::new();
                for rank in 0..world {
                    let share = order.share(k, rank, world);
                    prop_assert_eq!(share.range.end - share.range.start, share.local.max(1));
                    let read = ids(&order, share.from, share.range);
                    if share.local > 0 { together.extend(read) }
                }
                prop_assert_eq!(together, ids(&order, k, 0..order.batch_len(k)));
            }
        }

        #[test]
        fn epochs_and_seeds_differ(seed: u64, epoch in 0u64..1000) {
            let at = |seed, epoch| {
                let spec = OrderSpec { seed, ..spec(8, 2, true) };
                epoch_ids(&Order::new(spec, storage(&[20, 20, 20]), epoch).unwrap())
            };
            prop_assert_ne!(at(seed, epoch), at(seed, epoch + 1));
            prop_assert_ne!(at(seed, epoch), at(seed.wrapping_add(1), epoch));
            prop_assert_eq!(at(seed, epoch), at(seed, epoch));
        }
    }
}
