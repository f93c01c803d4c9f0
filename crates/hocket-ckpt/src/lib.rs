//! Checkpoints for Hocket: manifests, safetensors files, durable and conditional writes, verified reads.
//!
//! A checkpoint is a folder or an object prefix with data files under `data/`, each a plain safetensors file,
//! and a manifest `checkpoint.json.zst`, which is written last and whose presence marks the checkpoint as
//! committed. The format is described in `packages/ckpt/docs/format.md`.
//!
//! All operations are synchronous: they run on their own threads and call `interrupted` on the calling thread
//! at least every 50 ms. No thread outlives its call, so a fork between calls is safe.

mod blob;
mod block;
mod boxes;
mod checkpoint;
mod commit;
mod compress;
mod data_files;
mod data_reader;
mod digest;
mod error;
mod existing_file;
mod fetch;
mod file_names;
mod files;
mod folder;
pub mod foreign;
mod free_memory;
mod gc;
mod json_pairs;
mod list;
mod local_file;
mod location;
pub mod manifest;
mod manifest_write;
mod orphans;
mod plan;
mod prefix;
mod read;
mod remote;
mod remove;
mod safetensors;
mod stored;
mod stream_writer;
mod verify;
mod workers;
mod write;
mod written;

pub use checkpoint::{BoxRead, Checkpoint, Contents, Strided};
pub use commit::commit;
pub use data_files::{DataFiles, verify_file};
pub use digest::{BLOCK_BYTES, xxh3_128};
pub use error::{CkptError, Result};
pub use fetch::read_head;
pub use gc::{Collected, Garbage, gc};
pub use list::{Listed, Status, list, sizes};
pub use location::Location;
pub use manifest::{DataFile, FORMAT, Head, MANIFEST_NAME, decode, encode};
pub use manifest_write::CommitOptions;
pub use orphans::Waste;
pub use plan::Read;
pub use remove::{delete, delete_files};
pub use safetensors::{Dtype, Entry, Memory};
pub use stored::{StoredTensor, StoredTensors};
pub use stream_writer::{StreamOptions, StreamWriter, Streamed};
pub use workers::Interrupted;
pub use write::write_file;
pub use written::{WriteOptions, Written};
