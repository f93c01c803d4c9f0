//! Lookup of samples by number, without threads and independent of any order.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use hocket_store::Interrupted;

use crate::error::Result;
use crate::order::SamplePlace;
use crate::reader::batch::{BatchColumn, BatchGatherer};
use crate::reader::sources::DatasetSources;

/// Returns the samples at `locations`, from local shards or by range reads of remote ones. Returns none if a
/// shard should be fetched whole first, which a reader does.
///
/// # Errors
/// As [`Cache::open_here`](crate::cache::Cache::open_here),
/// [`Cache::read_ranges`](crate::cache::Cache::read_ranges) and [`BatchGatherer::gather`].
pub fn look_up(
    sources: &DatasetSources,
    locations: &[SamplePlace],
    interrupted: Interrupted<'_>,
) -> Result<Option<Vec<BatchColumn>>> {
    let mut wanted: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for location in locations {
        let samples = wanted.entry(location.shard).or_default();
        samples.insert(location.sample);
    }
    let is_limited = sources.limit_bytes().is_some();
    let mut shards = HashMap::with_capacity(wanted.len());
    for (number, samples) in wanted {
        let samples: Vec<u32> = samples.into_iter().collect();
        let shard = match sources.open_here(number)? {
            // Under a limit an open shard is an open file and takes up room that other processes need.
            Some(shard) if is_limited => shard.excerpt(&samples)?,
            Some(shard) => shard,
            None => match sources.read_ranges(number, &samples, interrupted)? {
                Some(shard) => shard,
                None => return Ok(None),
            },
        };
        shards.insert(number, Arc::new(shard));
    }
    let mut gatherer = BatchGatherer::new(sources.columns().clone());
    gatherer.gather(locations, &shards).map(Some)
}
