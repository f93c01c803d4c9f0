//! The native order: the samples of batch `k` of an epoch, and their order.
//!
//! Let `B` be the global batch in samples, `C` the number of lanes (canonical nodes; `C` divides `B`).
//!
//! 1. Shards are permuted by a keyed bijection of (seed, epoch).
//! 2. Their samples, `N` in that order, are divided into `C` lanes at `⌊iN/C⌋`.
//! 3. Each lane is divided into blocks of `block` samples, each permuted by a keyed bijection of (seed, epoch,
//!    lane, block).
//! 4. Global batch `k` is lane 0's next `B/C` samples, then lane 1's, and so on; of `M` samples, rank `r` of
//!    `W` takes `⌊rM/W⌋ .. ⌊(r+1)M/W⌋`.
//!
//! Lanes differ by at most one sample, so every batch except the last is full and the last has `N mod B`
//! samples. Without shuffling, steps 1 and 3 are the identity in every epoch.
//!
//! An epoch may take a stream several times, or only a part of it: `units` determines the shards, and their
//! samples, that replace the shards of step 1. Several streams (`mix`) are combined in one of three ways.
//! *Random*: their units form one pool, dealt out as above. *Stratified*: each stream is a separate pool that
//! gives the same number of samples to each batch, by largest remainder. Within the batch the streams are
//! interleaved (`interleave`), so that a rank's slice has their proportions too. The epoch ends with the
//! first stream that cannot fill its part: the last batch contains what each stream has left of its part, and
//! further samples are left out. *Per stream*: each stream is a pool and a sequence of batches, and the streams
//! alternate by batches; the last batch of each may be short.
//!
//! Weights that change during the run (`schedule`) make each stream an endless sequence of its own passes, of which
//! every position of the run takes the next sample of its stream.
//!
//! Planning an epoch takes one pass over the shards; a position takes `O(log shards)` and at most one step per
//! stream. Nothing is `O(samples)`. The numbers of ranks and workers affect only the slice of step 4.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, StreamError};

mod interleave;
mod location;
mod mix;
pub mod permute;
mod plan;
mod pool;
mod schedule;
mod settings;
mod units;

pub use location::SamplePlace;
pub use mix::StreamMix;
pub use schedule::MixSchedule;
pub use settings::{Batching, OrderSettings, Sampling, TailPolicy, gcd};

use plan::{PoolRule, alternate, pool, scheduled, stratify, together};
use pool::{PoolBlock, SamplePool};

/// A rank's part of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchShare {
    /// The batch to read from. It differs from the share's own batch if `local` is 0.
    pub from: u64,
    /// Positions in batch `from`; never empty.
    pub range: Range<u64>,
    /// Number of samples that count. 0 for a rank without a share of a short batch: it reads one sample with
    /// weight zero, so that it can run the step.
    pub local: u64,
    /// Number of samples that count over all ranks.
    pub global: u64,
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct Order {
    global_batch_size: u64,
    tail: TailPolicy,
    num_samples: u64,
    num_batches: u64,
    /// Number of distinct samples in the batches.
    num_used: u64,
    storage: Arc<[u64]>,
    pools: Vec<SamplePool>,
    deal: PoolRule,
}

impl Order {
    /// Plans an epoch.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a batch, lane or block size of 0, lanes that do not divide the batch, a
    /// stream without a sample in a stratified batch, or a stream with too many repeats.
    pub fn new(settings: OrderSettings, mix: &StreamMix, epoch: u64) -> Result<Self> {
        settings.check()?;
        let pools = match settings.batching_method {
            Batching::Random => vec![pool(&settings, mix, &mix.streams, epoch, None)?],
            Batching::Stratified | Batching::PerStream => {
                let parts = if settings.batching_method == Batching::Stratified {
                    stratify(&settings, mix)?
                } else {
                    vec![settings.global_batch_size; mix.streams.len()]
                };
                let numbered = mix.streams.chunks(1).zip(parts).enumerate();
                numbered
                    .map(|(number, (stream, part))| {
                        pool(&settings, mix, stream, epoch, Some((number as u64, part)))
                    })
                    .collect::<Result<_>>()?
            }
        };
        let is_tail_used = settings.tail != TailPolicy::Drop;
        let (deal, num_batches, num_used) = if settings.batching_method == Batching::PerStream {
            alternate(&pools, settings.global_batch_size, is_tail_used)
        } else {
            together(&pools, is_tail_used)
        };
        Ok(Self {
            global_batch_size: settings.global_batch_size,
            tail: settings.tail,
            num_samples: mix.num_samples(),
            num_batches,
            num_used,
            storage: mix.storage.clone(),
            pools,
            deal,
        })
    }

    /// Plans an epoch of `epoch_size` samples of a mix whose weights change at samples of the run. The run has as many
    /// samples before this epoch as all epochs before it.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`StreamError::Config`] if settings do not apply to such a mix, or a stream without
    /// samples has a weight.
    pub fn scheduled(
        settings: OrderSettings,
        mix: &StreamMix,
        schedule: &MixSchedule,
        epoch_size: u64,
        epoch: u64,
    ) -> Result<Self> {
        settings.check()?;
        let (pools, plan) = scheduled(&settings, mix, schedule, epoch_size, epoch)?;
        Ok(Self {
            global_batch_size: settings.global_batch_size,
            tail: settings.tail,
            num_samples: epoch_size,
            num_batches: plan.len.div_ceil(settings.global_batch_size),
            num_used: plan.len,
            storage: mix.storage.clone(),
            pools,
            deal: PoolRule::Scheduled(plan),
        })
    }

    /// Creates an order from an external plan: batch `k` is `ids[edges[k]..edges[k + 1]]`, by the samples'
    /// numbers in storage order, over the streams in sequence.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a sample that `mix` does not have, or edges that do not ascend from 0 to the
    /// number of ids.
    pub fn listed(mix: &StreamMix, ids: Vec<u64>, edges: Vec<u64>) -> Result<Self> {
        let held = mix.storage.last().copied().unwrap_or(0);
        if let Some(id) = ids.iter().find(|&&id| id >= held) {
            return Err(StreamError::config(format!(
                "sample {id} is listed: expected a number below {held}"
            )));
        }
        let ends = (edges.first().copied(), edges.last().copied());
        if ends != (Some(0), Some(ids.len() as u64)) || !edges.is_sorted_by(|a, b| a < b) {
            return Err(StreamError::config(format!(
                "the batches of {} listed samples begin at {:?} and end at {:?}: expected ascending edges from 0 to their number",
                ids.len(),
                ends.0,
                ends.1
            )));
        }
        Ok(Self {
            global_batch_size: 0,
            tail: TailPolicy::Short,
            num_samples: ids.len() as u64,
            num_batches: edges.len() as u64 - 1,
            num_used: ids.len() as u64,
            storage: mix.storage.clone(),
            pools: Vec::new(),
            deal: PoolRule::Listed { ids, edges },
        })
    }

    /// Returns the number of batches in the epoch, which is the same for every rank.
    pub fn num_batches(&self) -> u64 {
        self.num_batches
    }

    /// Returns the number of samples in batch `k` over all ranks, including repeated ones.
    pub fn batch_len(&self, k: u64) -> u64 {
        match &self.deal {
            _ if self.tail == TailPolicy::Pad => self.global_batch_size,
            PoolRule::Together {
                full_batches,
                full,
                rest,
            } => match k.cmp(full_batches) {
                std::cmp::Ordering::Less => full.total(),
                std::cmp::Ordering::Equal => rest.total(),
                std::cmp::Ordering::Greater => 0,
            },
            PoolRule::Alternate(turns) => {
                let (stream, number) = turns.at(k);
                self.pools
                    .get(stream)
                    .map_or(0, |pool| pool.own_len(number))
            }
            PoolRule::Scheduled(plan) => plan.batch_len(k),
            PoolRule::Listed { edges, .. } => match edges.get(k as usize..k as usize + 2) {
                Some(&[start, end]) => end - start,
                _ => 0,
            },
        }
    }

    /// Returns the number of samples of all batches that count on rank `rank` of `world`.
    pub fn num_local_samples(&self, rank: u64, world: u64) -> u64 {
        let of = |len| {
            let range = slice(len, rank, world);
            range.end - range.start
        };
        match &self.deal {
            _ if self.tail == TailPolicy::Pad => self.num_batches * of(self.global_batch_size),
            PoolRule::Together {
                full_batches, full, ..
            } => {
                let last = (*full_batches..self.num_batches).map(|k| of(self.batch_len(k)));
                full_batches * of(full.total()) + last.sum::<u64>()
            }
            PoolRule::Alternate(_) => {
                let rest = |pool: &SamplePool| match self.tail {
                    TailPolicy::Drop => 0,
                    _ => of(pool.own_len(pool.full_batches())),
                };
                let each = self.pools.iter();
                each.map(|pool| pool.full_batches() * of(self.global_batch_size) + rest(pool))
                    .sum()
            }
            PoolRule::Scheduled(plan) => {
                let full = plan.len / self.global_batch_size;
                full * of(self.global_batch_size) + of(plan.len % self.global_batch_size)
            }
            PoolRule::Listed { edges, .. } => {
                edges.windows(2).map(|ends| of(ends[1] - ends[0])).sum()
            }
        }
    }

    /// Returns the number of samples that the epoch leaves out: those of its last batch under [`TailPolicy::Drop`],
    /// and those of streams that are longer than the others in stratified batches.
    pub fn num_dropped(&self) -> u64 {
        self.num_samples - self.num_used
    }

    /// Returns the number of samples that the epoch repeats (under [`TailPolicy::Pad`]).
    pub fn num_repeated(&self) -> u64 {
        match self.tail {
            TailPolicy::Pad => self.num_batches * self.global_batch_size - self.num_used,
            TailPolicy::Short | TailPolicy::Drop => 0,
        }
    }

    /// Returns the part of batch `k` that rank `rank` of `world` reads. `k` must be below
    /// [`num_batches`](Self::num_batches) and `rank` below `world`.
    pub fn share(&self, k: u64, rank: u64, world: u64) -> BatchShare {
        let global = self.batch_len(k);
        let range = slice(global, rank, world);
        if !range.is_empty() {
            return BatchShare {
                from: k,
                local: range.end - range.start,
                range,
                global,
            };
        }
        // A sample that this rank has just read requires no additional shard.
        let from = k.saturating_sub(1);
        let len = self.batch_len(from);
        let first = slice(len, rank, world).start.min(len.saturating_sub(1));
        BatchShare {
            from,
            range: first..first + 1,
            local: 0,
            global,
        }
    }

    /// Appends the locations of positions `range` of batch `k` to `out`.
    pub fn locate(&self, k: u64, range: Range<u64>, out: &mut Vec<SamplePlace>) {
        let mut blocks: Vec<Option<PoolBlock>> = self.pools.iter().map(|_| None).collect();
        let mixed = match &self.deal {
            PoolRule::Scheduled(plan) => Some(plan.arrange(k)),
            _ => None,
        };
        for place in range {
            let (stream, batch, place) = match &self.deal {
                PoolRule::Together {
                    full_batches,
                    full,
                    rest,
                } => {
                    let is_full = k < *full_batches || self.tail == TailPolicy::Pad;
                    let (stream, place) = if is_full { full } else { rest }.at(place);
                    (stream, k, place)
                }
                PoolRule::Alternate(turns) => {
                    let (stream, batch) = turns.at(k);
                    (stream, batch, place)
                }
                PoolRule::Scheduled(plan) => {
                    let Some(mixed) = &mixed else { return };
                    let (number, position) = plan.find(mixed, place);
                    if let (Some(pool), Some(block)) =
                        (self.pools.get(number), blocks.get_mut(number))
                    {
                        out.push(pool.locate(position / plan.lanes, position % plan.lanes, block));
                    }
                    continue;
                }
                PoolRule::Listed { ids, edges } => {
                    let start = edges.get(k as usize).copied().unwrap_or(0);
                    let id = ids.get((start + place) as usize).copied().unwrap_or(0);
                    out.push(self.find(id));
                    continue;
                }
            };
            if let (Some(pool), Some(block)) = (self.pools.get(stream), blocks.get_mut(stream)) {
                out.push(pool.locate(batch, place, block));
            }
        }
    }

    /// Returns the location of the sample with a number in storage order.
    pub fn find(&self, id: u64) -> SamplePlace {
        let shard = self.storage.partition_point(|&start| start <= id);
        let shard = shard.saturating_sub(1);
        SamplePlace {
            shard: shard as u32,
            sample: (id - self.storage.get(shard).copied().unwrap_or(0)) as u32,
        }
    }

    /// Returns the number of a sample in storage order, over the streams in sequence; it is the same in every
    /// epoch.
    pub fn storage_id(&self, location: SamplePlace) -> u64 {
        self.storage
            .get(location.shard as usize)
            .copied()
            .unwrap_or(0)
            + u64::from(location.sample)
    }
}

/// Returns rank `rank`'s contiguous part of `len` positions.
pub fn slice(len: u64, rank: u64, world: u64) -> Range<u64> {
    let cut = |r: u64| (u128::from(r) * u128::from(len) / u128::from(world.max(1))) as u64;
    cut(rank)..cut(rank + 1)
}

#[cfg(test)]
mod tests;
