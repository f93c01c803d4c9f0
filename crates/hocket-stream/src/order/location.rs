//! The location of a sample.

/// The location of a sample: its shard's number over all streams, and its number in the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SamplePlace {
    /// The shard's number in storage order, over the streams in sequence.
    pub shard: u32,
    /// The sample's number in the shard.
    pub sample: u32,
}
