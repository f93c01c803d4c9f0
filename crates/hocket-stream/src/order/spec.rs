//! What the order depends on beside the data and the epoch.

use crate::error::{Result, StreamError};
use crate::order::gcd;

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

/// How the samples of several streams come together in batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// All streams' shards are shuffled as those of one data set.
    Random,
    /// Each batch holds the same number of samples of each stream.
    Stratified,
    /// Each batch is of one stream.
    PerStream,
}

/// Whether a part of a stream is drawn anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// In each epoch.
    Balanced,
    /// Never: every epoch has the same part.
    Fixed,
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
            _ => Err(unknown("tail", name, "`short`, `drop` or `pad`")),
        }
    }
}

impl Batching {
    /// The method called `name`: `random`, `stratified` or `per_stream`.
    ///
    /// # Errors
    /// [`StreamError::Config`] for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "random" => Ok(Self::Random),
            "stratified" => Ok(Self::Stratified),
            "per_stream" => Ok(Self::PerStream),
            _ => Err(unknown(
                "batching_method",
                name,
                "`random`, `stratified` or `per_stream`",
            )),
        }
    }
}

impl Sampling {
    /// The method called `name`: `balanced` or `fixed`.
    ///
    /// # Errors
    /// [`StreamError::Config`] for any other name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "balanced" => Ok(Self::Balanced),
            "fixed" => Ok(Self::Fixed),
            _ => Err(unknown("sampling_method", name, "`balanced` or `fixed`")),
        }
    }
}

fn unknown(argument: &str, name: &str, expected: &str) -> StreamError {
    StreamError::config(format!("`{argument}` is `{name}`: expected {expected}"))
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
    /// The seed of the permutations and draws.
    pub seed: u64,
    /// Samples of a block; at least 1.
    pub block: u64,
    /// The policy for the last batch.
    pub tail: Tail,
    /// How streams come together.
    pub batching: Batching,
    /// Whether parts of streams are drawn anew each epoch.
    pub sampling: Sampling,
    /// Samples drawn from one shard at a time where a part of a stream is taken; at least 1.
    pub granularity: u64,
}

impl OrderSpec {
    /// Refuses sizes that mean nothing.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a size of 0, or lanes that do not divide the batch.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("global_batch_size", self.global_batch),
            ("num_canonical_nodes", self.lanes),
            ("shuffle_block_size", self.block),
            ("sampling_granularity", self.granularity),
        ] {
            if value == 0 {
                return Err(StreamError::config(format!(
                    "`{name}` is 0: expected at least 1"
                )));
            }
        }
        if !self.global_batch.is_multiple_of(self.lanes) {
            return Err(StreamError::config(format!(
                "`num_canonical_nodes` is {} and the global batch {} samples: expected a divisor of it, such as {}",
                self.lanes,
                self.global_batch,
                gcd(self.global_batch, self.lanes)
            )));
        }
        Ok(())
    }
}
