//! The plan of an epoch: the pools that its batches are taken from, and the rule for taking them.

use crate::error::{Result, StreamError};
use crate::order::interleave::{StreamInterleave, apportion};
use crate::order::mix::{MixStream, StreamMix};
use crate::order::permute::derive_key;
use crate::order::pool::SamplePool;
use crate::order::settings::{Batching, OrderSettings, gcd};
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
