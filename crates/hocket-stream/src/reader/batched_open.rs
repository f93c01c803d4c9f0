//! Opening of the shards of one batch, in several groups if they do not all fit in the window at once.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::error::Result;
use crate::order::SamplePlace;
use crate::reader::sources::DatasetSources;
use crate::reader::window::ShardWindow;
use crate::shard::Shard;

/// Opens the shards `numbers` of batch `turn`, which has the samples at `locations`.
///
/// If the window cannot hold all of them at once, they are opened group by group, and the result contains
/// copies of only the samples that the batch needs.
///
/// # Errors
/// As [`ShardWindow::take`]; as [`Shard::excerpt`].
pub(crate) fn open(
    sources: &DatasetSources,
    window: &ShardWindow,
    locations: &[SamplePlace],
    numbers: &[u32],
    turn: u64,
) -> Result<HashMap<u32, Arc<Shard>>> {
    let first = window.room_for(numbers, |number| sources.shard_bytes(number));
    if first == numbers.len() {
        return window.take(numbers, &[], turn);
    }
    let mut wanted: HashMap<u32, BTreeSet<u32>> = HashMap::new();
    for location in locations {
        wanted
            .entry(location.shard)
            .or_default()
            .insert(location.sample);
    }
    let mut excerpts = HashMap::with_capacity(numbers.len());
    let mut rest = numbers;
    while !rest.is_empty() {
        let count = window.room_for(rest, |number| sources.shard_bytes(number));
        let (group, later) = rest.split_at(count);
        for (number, shard) in window.take(group, later, turn)? {
            let samples: Vec<u32> = wanted.remove(&number).into_iter().flatten().collect();
            excerpts.insert(number, Arc::new(shard.excerpt(&samples)?));
        }
        rest = later;
    }
    Ok(excerpts)
}
