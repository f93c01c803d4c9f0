//! The settings of an order, apart from the data and the epoch.

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

/// All settings that an order depends on, apart from the data and the epoch, by their names in Python.
#[derive(Clone, Copy, Debug)]
pub struct OrderSettings {
    /// `B`, the number of samples in a batch over all ranks.
    pub global_batch_size: u64,
    /// `C`, the number of lanes, a divisor of `global_batch_size`.
    pub num_canonical_nodes: u64,
    /// Whether shards and blocks are permuted.
    pub shuffle: bool,
    /// The seed of the permutations and draws.
    pub shuffle_seed: u64,
    /// Number of samples per block; at least 1.
    pub shuffle_block_size: u64,
    /// The policy for the last batch.
    pub tail: TailPolicy,
    /// The method that combines streams.
    pub batching_method: Batching,
    /// The method that draws parts of streams.
    pub sampling_method: Sampling,
    /// Number of samples drawn from one shard at a time if a part of a stream is taken; at least 1.
    pub sampling_granularity: u64,
}

impl OrderSettings {
    /// Rejects invalid sizes.
    ///
    /// # Errors
    /// [`StreamError::Config`] for a size of 0, or lanes that do not divide the batch.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("global_batch_size", self.global_batch_size),
            ("num_canonical_nodes", self.num_canonical_nodes),
            ("shuffle_block_size", self.shuffle_block_size),
            ("sampling_granularity", self.sampling_granularity),
        ] {
            if value == 0 {
                return Err(StreamError::config(format!(
                    "`{name}` is 0: expected at least 1"
                )));
            }
        }
        if !self
            .global_batch_size
            .is_multiple_of(self.num_canonical_nodes)
        {
            return Err(StreamError::config(format!(
                "`num_canonical_nodes` is {} and the global batch {} samples: expected a divisor of it, such as {}",
                self.num_canonical_nodes,
                self.global_batch_size,
                gcd(self.global_batch_size, self.num_canonical_nodes)
            )));
        }
        Ok(())
    }
}

/// Returns the greatest common divisor; the default number of lanes is `gcd(global batch, 64)`.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
