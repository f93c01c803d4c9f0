//! Checkpoints for Hocket: manifest, safetensors, durable and conditional writes, checked reads.
//!
//! A checkpoint is a folder or an object prefix: data files under `data/`, each a plain safetensors
//! file, and a manifest `checkpoint.json.zst`, written last, whose presence is the commit. The
//! format is described in `packages/ckpt/docs/format.md`.
//!
//! Verbs here are synchronous: they run on threads of their own and call `interrupted` on the
//! calling thread at least every 50 ms. Nothing lives longer than a call, so a fork is harmless.

mod aligned;
mod block;
mod commit;
mod digest;
mod durable;
mod error;
mod finished;
pub mod foreign;
mod gc;
mod leftover;
mod list;
mod manifest;
mod opened;
mod pace;
mod place;
mod plan;
mod read;
mod remote;
mod remove;
mod replace;
mod safetensors;
mod sink;
mod squeeze;
mod stream;
mod traces;
mod verify;
mod write;

pub use commit::{CommitOptions, commit};
pub use digest::{BLOCK_BYTES, xxh3_128};
pub use error::{CkptError, Result};
pub use gc::{Collected, Garbage, Waste, gc};
pub use list::{Listed, Status, list, sizes};
pub use manifest::{
    DataFile, FORMAT, Head, MANIFEST_NAME, decode, encode, read_document, read_head,
};
pub use pace::Interrupted;
pub use place::Place;
pub use plan::Read;
pub use read::read;
pub use remove::{delete, delete_files, discard_file};
pub use safetensors::{Dtype, Entry, Memory};
pub use sink::{Sink, SinkOptions, Sunk};
pub use verify::verify_file;
pub use write::{WriteOptions, Written, describe_file, write_file};
