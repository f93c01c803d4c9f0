//! The streams of a run: where their shards are, and how many samples an epoch takes of each.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, StreamError};

/// Several streams' shards, numbered as those of one data set in the order of the streams.
#[derive(Clone, Debug)]
pub struct Mix {
    /// `storage[i]` samples lie before shard `i`; one more entry than shards.
    pub(super) storage: Arc<[u64]>,
    pub(super) streams: Vec<Stream>,
}

/// One of them.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// Its shards.
    pub(super) shards: Range<usize>,
    /// Samples of an epoch, more or fewer than it has.
    pub(super) wanted: u64,
}

impl Mix {
    /// One stream, taken whole: `storage[i]` samples lie before its shard `i`.
    pub fn whole(storage: Arc<[u64]>) -> Self {
        let wanted = storage.last().copied().unwrap_or(0);
        let shards = 0..storage.len().saturating_sub(1);
        Self {
            storage,
            streams: vec![Stream { shards, wanted }],
        }
    }

    /// Streams by their prefix sums (as in [`whole`](Self::whole)) and the samples an epoch takes of each.
    ///
    /// # Errors
    /// [`StreamError::Config`] where the two lists differ in length, samples are wanted of a stream that has
    /// none, or numbers of shards or samples leave their types.
    pub fn new(storages: &[Arc<[u64]>], wanted: &[u64]) -> Result<Self> {
        if storages.len() != wanted.len() {
            return Err(StreamError::config(format!(
                "{} streams and {} counts: expected one count for each",
                storages.len(),
                wanted.len()
            )));
        }
        let too_large = || {
            StreamError::config("the streams together have 2^63 samples or more: expected fewer")
        };
        let mut storage = vec![0u64];
        let mut streams = Vec::with_capacity(storages.len());
        let mut total = 0u64;
        for (number, (starts, &wanted)) in storages.iter().zip(wanted).enumerate() {
            let first = storage.len() - 1;
            let before = storage.last().copied().unwrap_or(0);
            let held = starts.last().copied().unwrap_or(0);
            if held == 0 && wanted > 0 {
                return Err(StreamError::config(format!(
                    "{wanted} samples are wanted of stream {number}, which has none: expected a stream with samples; leave it out"
                )));
            }
            total = total
                .checked_add(wanted)
                .filter(|&all| all < 1 << 63)
                .ok_or_else(too_large)?;
            before
                .checked_add(held)
                .filter(|&all| all < 1 << 63)
                .ok_or_else(too_large)?;
            storage.extend(starts.iter().skip(1).map(|start| before + start));
            let shards = first..storage.len() - 1;
            streams.push(Stream { shards, wanted });
        }
        if u32::try_from(storage.len()).is_err() {
            return Err(StreamError::config(format!(
                "the streams together have {} shards: expected fewer than 2^32",
                storage.len() - 1
            )));
        }
        Ok(Self {
            storage: storage.into(),
            streams,
        })
    }

    /// How many samples an epoch takes of all streams.
    pub fn num_samples(&self) -> u64 {
        self.streams.iter().map(|stream| stream.wanted).sum()
    }
}
