//! Training data in shards, for Hocket: format, index, order, cache, prefetch, decoding.
//!
//! The path of a batch: [`index::Index`] lists the shards; [`order::Order`] computes the samples of batch `k` from
//! seed, epoch and position; [`cache::Cache`] fetches and checks shards on local disk; [`shard::Shard`] reads
//! samples from a shard's bytes; [`reader::Reader`] runs these steps ahead of the consumer on its own threads and
//! returns whole batches as contiguous columns.

pub mod batch;
mod batched_open;
pub mod buffers;
pub mod cache;
pub mod codec;
mod entry;
pub mod error;
pub mod files;
pub mod hash;
pub mod index;
mod index_version;
pub mod lookup;
pub mod order;
mod packed;
pub mod permute;
pub mod raw_file;
pub mod reader;
pub mod remote;
pub mod samples;
pub mod schema;
mod semaphore;
pub mod shard;
pub mod shard_info;
pub mod sources;
mod text;
mod window;
pub mod writer;

pub use error::{Result, StreamError};
