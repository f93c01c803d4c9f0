//! A pool: a sequence of samples from units in a keyed order, divided into lanes and blocks, dealt out by
//! batches.

use std::sync::Arc;

use crate::order::location::SamplePlace;
use crate::order::permute::{Permutation, derive_key};
use crate::order::settings::OrderSettings;
use crate::order::units::{ShuffleUnit, UnitDraw};

/// Samples that are shuffled together.
#[derive(Clone, Debug)]
pub(super) struct SamplePool {
    /// Those of the order, with the pool's own part of a batch, lanes, seed and block.
    settings: OrderSettings,
    epoch: u64,
    draw: UnitDraw,
    num_samples: u64,
    full_batches: u64,
    /// Number of samples before each shard, over all streams.
    storage: Arc<[u64]>,
    units: Vec<ShuffleUnit>,
    order: Permutation,
    /// Number of samples before each unit in the epoch's order of units; one more entry than units.
    starts: Vec<u64>,
}

/// The block used last; neighbours in a batch mostly share it.
#[derive(Debug)]
pub(super) struct PoolBlock {
    lane: u64,
    number: u64,
    first: u64,
    permutation: Permutation,
}

impl SamplePool {
    pub(super) fn new(
        settings: OrderSettings,
        epoch: u64,
        draw: UnitDraw,
        storage: Arc<[u64]>,
        units: Vec<ShuffleUnit>,
    ) -> Self {
        let key = derive_key(b"hkt-shrd", &[settings.shuffle_seed, epoch]);
        let order = Permutation::new(units.len() as u64, key);
        let mut starts = Vec::with_capacity(units.len() + 1);
        let mut total = 0;
        starts.push(total);
        for place in 0..units.len() as u64 {
            let number = if settings.shuffle {
                order.apply(place)
            } else {
                place
            };
            total += u64::from(units[number as usize].take);
            starts.push(total);
        }
        Self {
            full_batches: total / settings.global_batch_size,
            num_samples: total,
            settings,
            epoch,
            draw,
            storage,
            units,
            order,
            starts,
        }
    }

    /// Returns the number of samples that the pool gives to a full batch.
    pub(super) fn batch(&self) -> u64 {
        self.settings.global_batch_size
    }

    pub(super) fn num_samples(&self) -> u64 {
        self.num_samples
    }

    pub(super) fn full_batches(&self) -> u64 {
        self.full_batches
    }

    /// Returns the number of distinct samples that the pool gives to batch `k`.
    pub(super) fn own_len(&self, k: u64) -> u64 {
        let batch = self.settings.global_batch_size;
        self.num_samples
            .saturating_sub(k.saturating_mul(batch))
            .min(batch)
    }

    /// Returns the location of sample `place` that the pool gives to batch `k`. Beyond
    /// [`own_len`](Self::own_len) the pool starts again from its beginning.
    pub(super) fn locate(&self, k: u64, place: u64, block: &mut Option<PoolBlock>) -> SamplePlace {
        let own = self.own_len(k);
        if place < own {
            return self.location(self.position(k, place, block));
        }
        let again = (place - own) % self.num_samples.max(1);
        self.location(self.position(
            again / self.settings.global_batch_size,
            again % self.settings.global_batch_size,
            block,
        ))
    }

    /// Returns the position, in the order of units, of sample `place` of batch `k`.
    fn position(&self, k: u64, place: u64, block: &mut Option<PoolBlock>) -> u64 {
        let per_lane = self.settings.global_batch_size / self.settings.num_canonical_nodes;
        let (lane, offset) = if k < self.full_batches {
            (place / per_lane, k * per_lane + place % per_lane)
        } else {
            let taken = self.full_batches * per_lane;
            let lane = self.lane_of_rest(place, taken);
            (lane, taken + place - self.rest_before(lane, taken))
        };
        self.shuffled(lane, offset, block)
    }

    /// Returns the start of lane `lane`.
    fn lane_start(&self, lane: u64) -> u64 {
        (u128::from(lane) * u128::from(self.num_samples)
            / u128::from(self.settings.num_canonical_nodes)) as u64
    }

    /// Returns the number of samples that the lanes before `lane` have left after each has given `taken`.
    fn rest_before(&self, lane: u64, taken: u64) -> u64 {
        self.lane_start(lane) - lane * taken
    }

    /// Returns the lane that contains sample `place` of the last, short batch.
    fn lane_of_rest(&self, place: u64, taken: u64) -> u64 {
        let (mut low, mut high) = (0, self.settings.num_canonical_nodes);
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

    /// Returns sample `offset` of lane `lane` after the permutation of its block.
    fn shuffled(&self, lane: u64, offset: u64, block: &mut Option<PoolBlock>) -> u64 {
        let start = self.lane_start(lane);
        if !self.settings.shuffle {
            return start + offset;
        }
        let number = offset / self.settings.shuffle_block_size;
        let known = match block.take() {
            Some(known) if known.lane == lane && known.number == number => known,
            _ => self.block(lane, number),
        };
        let position = start + known.first + known.permutation.apply(offset - known.first);
        *block = Some(known);
        position
    }

    fn block(&self, lane: u64, number: u64) -> PoolBlock {
        let settings = &self.settings;
        let first = number * settings.shuffle_block_size;
        let len = self.lane_start(lane + 1) - self.lane_start(lane) - first;
        let key = derive_key(
            b"hkt-blok",
            &[settings.shuffle_seed, self.epoch, lane, number],
        );
        PoolBlock {
            lane,
            number,
            first,
            permutation: Permutation::new(len.min(settings.shuffle_block_size), key),
        }
    }

    fn location(&self, position: u64) -> SamplePlace {
        // An empty unit has the same start as the next one, so the last unit with this start contains the
        // sample.
        let place = self
            .starts
            .partition_point(|&start| start <= position)
            .saturating_sub(1);
        let offset = position - self.starts.get(place).copied().unwrap_or(0);
        let number = if self.settings.shuffle {
            self.order.apply(place as u64) as usize
        } else {
            place
        };
        let unit = self
            .units
            .get(number)
            .copied()
            .unwrap_or(ShuffleUnit { shard: 0, take: 0 });
        let size = self.shard_size(unit.shard as usize);
        SamplePlace {
            shard: unit.shard,
            sample: self.draw.sample(unit, size, offset) as u32,
        }
    }

    fn shard_size(&self, shard: usize) -> u64 {
        match self.storage.get(shard..=shard + 1) {
            Some(&[start, end]) => end - start,
            _ => 0,
        }
    }
}
