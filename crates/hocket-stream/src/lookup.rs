//! Samples by number, without threads and outside of any order.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::batch::{BatchColumn, Gatherer};
use crate::error::Result;
use crate::order::Location;
use crate::sources::Sources;

/// The samples at `locations`: out of shards that are here, and of others by their ranges. `None` where a shard
/// should be fetched whole first, which is a reader's work.
///
/// # Errors
/// As [`Cache::open_here`](crate::cache::Cache::open_here), [`Cache::pick`](crate::cache::Cache::pick) and
/// [`Gatherer::gather`].
pub fn look_up(
    sources: &Sources,
    locations: &[Location],
    interrupted: &dyn Fn() -> bool,
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
            // Under a limit an open shard is an open file, and takes room that others wait for.
            Some(shard) if is_limited => shard.excerpt(&samples)?,
            Some(shard) => shard,
            None => match sources.pick(number, &samples, interrupted)? {
                Some(shard) => shard,
                None => return Ok(None),
            },
        };
        shards.insert(number, Arc::new(shard));
    }
    let mut gatherer = Gatherer::new(sources.columns().clone());
    gatherer.gather(locations, &shards).map(Some)
}
