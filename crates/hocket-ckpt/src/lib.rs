//! Checkpoints for Hocket: manifests, safetensors files, durable and conditional writes, verified reads.
//!
//! A checkpoint is a folder or an object prefix with data files under `data/`, each a plain safetensors file,
//! and a manifest `checkpoint.json.zst`, which is written last and whose presence is the commit. The format is
//! described in `packages/ckpt/docs/format.md`.
//!
//! All operations are synchronous: they run on their own threads and call `interrupted` on the calling thread
//! at least every 50 ms. No thread outlives its call, so a fork between calls is safe.

mod block;
mod commit;
mod compress;
mod data_files;
mod data_reader;
mod digest;
mod error;
mod existing_file;
mod file_names;
pub mod foreign;
mod free_memory;
mod gc;
mod json_pairs;
mod list;
mod local_file;
mod location;
mod manifest;
mod orphans;
mod plan;
mod publish;
mod read;
mod remote;
mod remove;
mod replace;
mod safetensors;
mod stream_writer;
mod verify;
mod workers;
mod write;

pub use commit::{CommitOptions, commit};
pub use data_files::DataFiles;
pub use digest::{BLOCK_BYTES, xxh3_128};
pub use error::{CkptError, Result};
pub use gc::{Collected, Garbage, gc};
pub use list::{Listed, Status, list, sizes};
pub use location::Location;
pub use manifest::{
    DataFile, FORMAT, Head, MANIFEST_NAME, decode, encode, read_document, read_head,
};
pub use orphans::Waste;
pub use plan::Read;
pub use remove::{delete, delete_files, discard_file};
pub use safetensors::{Dtype, Entry, Memory};
pub use stream_writer::{StreamOptions, StreamWriter, Streamed};
pub use verify::verify_file;
pub use workers::Interrupted;
pub use write::{WriteOptions, Written, describe_file, write_file};
