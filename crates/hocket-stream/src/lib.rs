//! Training data in shards, for Hocket: format, index, order, cache, prefetch, decoding.
//!
//! The path of a batch: [`index::Index`] lists the shards; [`order::Order`] computes the samples of batch `k` from
//! seed, epoch and position; [`cache::Cache`] fetches and checks shards on local disk; [`shard::Shard`] reads
//! samples from a shard's bytes; [`reader::Reader`] runs these steps ahead of the consumer on its own threads and
//! returns whole batches as contiguous columns.
//!
//! | module | contents |
//! |---|---|
//! | [`reader`] | the threads that prefetch batches, and the lookup of single samples |
//! | [`writer`] | the threads that compress, hash and store finished shards |
//! | [`cache`] | shards on local disk, fetched and checked once per node, within a limit of bytes |
//! | [`order`] | the samples of a batch, computed from seed, epoch and position |
//! | [`index`] | `index.json`: parsing, validation, packed entries |
//! | [`shard`] | shard files: samples, columns, compression, digests, assembly |
//! | [`parquet`] | row groups of Parquet files, read as shards |
//! | `semaphore` | the limit of concurrent threads, for the reader and the writer |
//! | [`error`] | the errors, by what the caller can do about them |

pub mod cache;
pub mod error;
pub mod index;
pub mod order;
pub mod parquet;
pub mod reader;
mod semaphore;
pub mod shard;
pub mod writer;

pub use error::{Result, StreamError};
