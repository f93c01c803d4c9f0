//! The parameters of an order, apart from the data and the epoch.

use crate::error::{Result, StreamError};

/// The policy for the last batch if the samples do not fill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailPolicy {
    /// The batch is short.
    Short,
    /// The batch is left out.
    Drop,
    /// The batch is filled with the epoch's first samples, in the epoch's order.
    Pad,
}

/// The method that combines several streams in batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// The shards of all streams are shuffled together, as one data set.
    Random,
    /// Each batch contains the same number of samples of each stream.
    Stratified,
    /// Each batch comes from one stream.
    PerStream,
}

/// The method that draws a part of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// A new part in each epoch.
    Balanced,
    /// The same part in every epoch.
    Fixed,
}

impl TailPolicy {
    /// Parses a policy: `short`, `drop` or `pad`.
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
    /// Parses a method: `random`, `stratified` or `per_stream`.
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
    /// Parses a method: `balanced` or `fixed`.
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

/// All parameters of an order, apart from the data and the epoch.
#[derive(Clone, Debug)]
pub struct OrderSpec {
    /// `B`, the number of samples in a batch over all ranks.
    pub global_batch: u64,
    /// `C`, the number of lanes, a divisor of `global_batch`.
    pub lanes: u64,
    /// Whether shards and blocks are permuted.
    pub shuffle: bool,
    /// The seed of the permutations and draws.
    pub seed: u64,
    /// Number of samples per block; at least 1.
    pub block: u64,
    /// The policy for the last batch.
    pub tail: TailPolicy,
    /// The method that combines streams.
    pub batching: Batching,
    /// The method that draws parts of streams.
    pub sampling: Sampling,
    /// Number of samples drawn from one shard at a time if a part of a stream is taken; at least 1.
    pub granularity: u64,
}

impl OrderSpec {
    /// Rejects invalid sizes.
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

/// Returns the greatest common divisor; the default number of lanes is `gcd(global batch, 64)`.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
