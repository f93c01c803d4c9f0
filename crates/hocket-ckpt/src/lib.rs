//! Checkpoints for Hocket: manifest, safetensors, durable and conditional writes, checked reads.
//!
//! A checkpoint is a folder or an object prefix: data files under `data/`, each a plain safetensors
//! file, and a manifest `checkpoint.json.zst`, written last, whose presence is the commit. The
//! format is described in `packages/ckpt/docs/format.md`.
//!
//! Verbs here are synchronous: they run on threads of their own and call `interrupted` on the
//! calling thread at least every 50 ms. Nothing lives longer than a call, so a fork is harmless.

mod commit;
mod digest;
mod durable;
mod error;
pub mod foreign;
mod list;
mod manifest;
mod pace;
mod place;
mod read;
mod remote;
mod safetensors;
mod sink;
mod verify;
mod write;

pub use commit::commit;
pub use digest::{BLOCK_BYTES, xxh3_128};
pub use error::{CkptError, Result};
pub use list::{Listed, Status, delete, list, sizes};
pub use manifest::{
    DataFile, FORMAT, Head, MANIFEST_NAME, decode, encode, read_document, read_head,
};
pub use pace::Interrupted;
pub use place::Place;
pub use read::{Read, read};
pub use safetensors::{Dtype, Entry, Memory};
pub use sink::{Sink, Sunk};
pub use verify::verify_file;
pub use write::{Written, write_file};
