//! The streams of a run: their shards, and the number of samples that an epoch takes from each.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, StreamError};

/// The shards of several streams, numbered consecutively in the order of the streams.
#[derive(Clone, Debug)]
pub struct StreamMix {
    /// `storage[i]` is the number of samples before shard `i`; one more entry than shards.
    pub(super) storage: Arc<[u64]>,
    pub(super) streams: Vec<MixStream>,
}

/// One of the streams.
#[derive(Clone, Debug)]
pub(super) struct MixStream {
    /// Its shards.
    pub(super) shards: Range<usize>,
    /// Number of samples per epoch; may differ from the number that the stream has.
    pub(super) wanted: u64,
}

impl StreamMix {
    /// Creates a mix of one whole stream: `storage[i]` samples are before its shard `i`.
    pub fn whole(storage: Arc<[u64]>) -> Self {
        let wanted = storage.last().copied().unwrap_or(0);
        let shards = 0..storage.len().saturating_sub(1);
        Self {
            storage,
            streams: vec![MixStream { shards, wanted }],
        }
    }

    /// Creates a mix from the streams' prefix sums (as in [`whole`](Self::whole)) and the samples that an epoch
    /// takes from each.
    ///
    /// # Errors
    /// [`StreamError::Config`] if the two lists differ in length, samples are requested from an empty stream,
    /// or the numbers of shards or samples overflow their types.
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
                    "{wanted} samples are requested from stream {number}, which is empty: expected a stream with samples; leave this stream out"
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
            streams.push(MixStream { shards, wanted });
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

    /// Returns the number of samples that an epoch takes from all streams.
    pub fn num_samples(&self) -> u64 {
        self.streams.iter().map(|stream| stream.wanted).sum()
    }
}
