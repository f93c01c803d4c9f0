//! Training data in shards, for Hocket: format, index, order, cache, prefetch, decoding.
//!
//! The way of a batch: [`index::Index`] says which shards there are; [`order::Order`] says which
//! samples batch `k` of an epoch holds, as a function of seed, epoch and position alone;
//! [`cache::Cache`] brings a shard to local disk, whole and checked; [`shard::Shard`] reads samples
//! out of its bytes; [`reader::Reader`] runs all of it ahead of the consumer in threads of its own and
//! hands over whole batches as contiguous columns.

pub mod batch;
pub mod buffers;
pub mod cache;
pub mod codec;
mod entry;
pub mod error;
pub mod files;
pub mod hash;
pub mod index;
pub mod lookup;
pub mod order;
mod packed;
mod permits;
pub mod permute;
pub mod raw_file;
pub mod reader;
pub mod remote;
pub mod samples;
pub mod schema;
pub mod shard;
pub mod sources;
mod text;
mod waves;
mod window;
pub mod writer;

pub use error::{Result, StreamError};
