//! The plan of an epoch: the pools that its batches are taken from, and the rule for taking them.

use crate::error::{Result, StreamError};
use crate::order::interleave::{StreamInterleave, apportion};
use crate::order::mix::{MixStream, StreamMix};
use crate::order::permute::derive_key;
use crate::order::pool::SamplePool;
use crate::order::schedule::{MixSchedule, ScheduledEpoch};
use crate::order::settings::{Batching, OrderSettings, TailPolicy, gcd};
use crate::order::units::UnitDraw;

/// The rule by which batches are taken from pools.
#[derive(Clone, Debug)]
pub(super) enum PoolRule {
    /// Every batch from every pool.
    Together {
        full_batches: u64,
        /// The interleaves of a full batch and of the last one.
        full: StreamInterleave,
        rest: StreamInterleave,
    },
    /// Each batch from one pool.
    Alternate(StreamInterleave),
    /// Each position of the run from the stream whose turn it is.
    Scheduled(ScheduledEpoch),
    /// Batch `k` is `ids[edges[k]..edges[k + 1]]`, by sample numbers in storage order.
    Listed { ids: Vec<u64>, edges: Vec<u64> },
}

/// Returns the pool of all streams, or of stream `number`, which gives `part` samples to a batch.
pub(super) fn pool(
    settings: &OrderSettings,
    mix: &StreamMix,
    streams: &[MixStream],
    epoch: u64,
    own: Option<(u64, u64)>,
) -> Result<SamplePool> {
    let draw = UnitDraw::new(*settings, epoch);
    let mut units = Vec::new();
    for stream in streams {
        draw.units(
            &mix.storage,
            stream.shards.clone(),
            stream.wanted,
            &mut units,
        )?;
    }
    let mut own_settings = *settings;
    if let Some((number, part)) = own {
        // The block of a single stream covers as many batches as a block of all streams together would.
        let wanted: u64 = streams.iter().map(|stream| stream.wanted).sum();
        let (share, all) = match settings.batching_method {
            Batching::Stratified => (part, settings.global_batch_size),
            Batching::Random | Batching::PerStream => (wanted, mix.num_samples()),
        };
        let block = u128::from(settings.shuffle_block_size) * u128::from(share);
        own_settings.shuffle_block_size = ((block / u128::from(all.max(1))) as u64).max(1);
        own_settings.shuffle_seed = derive_key(b"hkt-strm", &[settings.shuffle_seed, number]);
        own_settings.global_batch_size = part;
        own_settings.num_canonical_nodes = gcd(part, settings.num_canonical_nodes);
    }
    let storage = mix.storage.clone();
    Ok(SamplePool::new(own_settings, epoch, draw, storage, units))
}

/// Limit of the shards of all passes of an epoch's streams.
const MOST_PLANNED: u64 = 1 << 26;

/// Returns the pools of all passes over streams that a scheduled epoch touches, and its plan.
pub(super) fn scheduled(
    settings: &OrderSettings,
    mix: &StreamMix,
    schedule: &MixSchedule,
    epoch_size: u64,
    epoch: u64,
) -> Result<(Vec<SamplePool>, ScheduledEpoch)> {
    if settings.batching_method != Batching::Random || settings.tail == TailPolicy::Pad {
        return Err(StreamError::config(
            "weights that change need `batching_method='random'`, and `tail` as 'short' or 'drop': their batches follow from the weights",
        ));
    }
    if schedule.num_streams() != mix.streams.len() {
        return Err(StreamError::config(format!(
            "the schedule has weights for {} streams: expected {}",
            schedule.num_streams(),
            mix.streams.len()
        )));
    }
    let len = match settings.tail {
        TailPolicy::Drop => epoch_size - epoch_size % settings.global_batch_size,
        TailPolicy::Short | TailPolicy::Pad => epoch_size,
    };
    let too_far = || StreamError::config("the run has 2^63 samples or more: expected fewer");
    let first = epoch
        .checked_mul(len)
        .filter(|first| first.checked_add(len).is_some_and(|end| end < 1 << 63));
    let first = first.ok_or_else(too_far)?;
    let (from, to) = (schedule.given(first), schedule.given(first + len));
    let total = mix.storage.last().copied().unwrap_or(0).max(1);
    let (mut pools, mut streams, mut planned) = (Vec::new(), Vec::new(), 0u64);
    for (number, stream) in mix.streams.iter().enumerate() {
        let start = |shard: usize| mix.storage.get(shard).copied().unwrap_or(0);
        let size = start(stream.shards.end) - start(stream.shards.start);
        if size == 0 && to[number] > 0 {
            return Err(StreamError::config(format!(
                "stream {number} has a weight and no samples: expected a weight of 0, or a stream with samples"
            )));
        }
        let passes = from[number] / size.max(1)..to[number].div_ceil(size.max(1));
        streams.push((size.max(1), passes.start, pools.len()));
        planned = planned
            .saturating_add((passes.end - passes.start).saturating_mul(stream.shards.len() as u64));
        if planned > MOST_PLANNED {
            return Err(StreamError::config(format!(
                "stream {number} has {size} samples and is read {} times in an epoch: expected fewer passes; use a smaller weight or a smaller `epoch_size`",
                passes.end - passes.start
            )));
        }
        let block = u128::from(settings.shuffle_block_size) * u128::from(size) / u128::from(total);
        let own = OrderSettings {
            global_batch_size: settings.num_canonical_nodes,
            shuffle_block_size: (block as u64).max(1),
            shuffle_seed: derive_key(b"hkt-strm", &[settings.shuffle_seed, number as u64]),
            ..*settings
        };
        for pass in passes {
            let draw = UnitDraw::new(own, pass);
            let mut units = Vec::new();
            draw.units(&mix.storage, stream.shards.clone(), size, &mut units)?;
            pools.push(SamplePool::new(own, pass, draw, mix.storage.clone(), units));
        }
    }
    let plan = ScheduledEpoch {
        schedule: schedule.clone(),
        first,
        len,
        batch: settings.global_batch_size,
        lanes: settings.num_canonical_nodes,
        streams,
    };
    Ok((pools, plan))
}

/// Returns the number of samples of each stream in a stratified batch.
pub(super) fn stratify(settings: &OrderSettings, mix: &StreamMix) -> Result<Vec<u64>> {
    let wanted: Vec<u64> = mix.streams.iter().map(|stream| stream.wanted).collect();
    let parts = apportion(settings.global_batch_size, &wanted);
    match parts.iter().position(|&part| part == 0) {
        Some(number) => Err(StreamError::config(format!(
            "stream {number} has {} of an epoch's {} samples, too few for one sample in each stratified batch of {}: expected at least one from each stream; use a larger batch, a larger weight for the stream, or `batching_method='random'`",
            wanted[number],
            mix.num_samples(),
            settings.global_batch_size
        ))),
        None => Ok(parts),
    }
}

/// Combines the pools in every batch: returns the deal, the number of batches, and the number of distinct
/// samples.
pub(super) fn together(pools: &[SamplePool], is_tail_used: bool) -> (PoolRule, u64, u64) {
    let full_batches = pools
        .iter()
        .map(SamplePool::full_batches)
        .min()
        .unwrap_or(0);
    let at = |k: u64| StreamInterleave::new(pools.iter().map(|pool| pool.own_len(k)).collect());
    let full = StreamInterleave::new(pools.iter().map(SamplePool::batch).collect());
    let rest = at(full_batches);
    let last = if is_tail_used { rest.total() } else { 0 };
    let used = full_batches * full.total() + last;
    let num_batches = full_batches + u64::from(last > 0);
    let deal = PoolRule::Together {
        full_batches,
        full,
        rest,
    };
    (deal, num_batches, used)
}

/// Takes each batch from one pool: returns the deal, the number of batches, and the number of distinct samples.
pub(super) fn alternate(
    pools: &[SamplePool],
    batch: u64,
    is_tail_used: bool,
) -> (PoolRule, u64, u64) {
    let num = |pool: &SamplePool| {
        if is_tail_used {
            pool.num_samples().div_ceil(batch)
        } else {
            pool.full_batches()
        }
    };
    let turns = StreamInterleave::new(pools.iter().map(num).collect());
    let used = pools
        .iter()
        .map(|pool| (num(pool) * batch).min(pool.num_samples()))
        .sum();
    let num_batches = turns.total();
    (PoolRule::Alternate(turns), num_batches, used)
}
