//! Checkpoints for Hocket: manifests, safetensors files, durable and conditional writes, verified reads.
//!
//! A checkpoint is a folder or an object prefix with data files under `data/`, each a plain safetensors file,
//! and a manifest `checkpoint.json.zst`, which is written last and whose presence marks the checkpoint as
//! committed. The format is described in `packages/ckpt/docs/format.md`.
//!
//! All operations are synchronous: they run on their own threads and call `interrupted` on the calling thread
//! at least every 50 ms. No thread outlives its call, so a fork between calls is safe.
//!
//! # Map
//!
//! Each folder uses only those below it.
//!
//! | folder | content |
//! |---|---|
//! | `upkeep` | the checkpoints under a prefix: list, remove, collect garbage |
//! | `checkpoint` | an open checkpoint of any format: its tensors, its data files, its head |
//! | `save` | the verbs of a save: write a file, write one in pieces, join the ranks' reports, commit |
//! | `foreign` | other formats: their recognition, their contents, the bytes inside their zips |
//! | `place` | where a checkpoint is: a folder on a disk or a prefix of an object store |
//! | `read` | the plan of a read, blocks and their verification, boxes in memory with any strides |
//! | `write` | the bytes of a data file, plain or compressed, and its record in the manifest |
//! | `manifest` | the manifest: its document, its frames, its rules |
//! | `format` | safetensors headers, names of files, digests, byte planes, JSON with pairs |
//! | `workers`, `error` | worker threads and their priority; the errors, by what the caller can do about them |

mod checkpoint;
mod error;
pub mod foreign;
mod format;
pub mod manifest;
mod place;
mod read;
mod save;
mod upkeep;
mod workers;
mod write;

pub use checkpoint::data_files::{DataFiles, verify_file};
pub use checkpoint::head::{read_head, read_stored};
pub use checkpoint::stored::{StoredTensor, StoredTensors};
pub use checkpoint::{BoxRead, Checkpoint, CheckpointContents, Strided};
pub use error::{CkptError, Result};
pub use format::digest::{BLOCK_BYTES, xxh3_128};
pub use format::dtypes::Dtype;
pub use format::names::{data_path, entry_name, is_saved_path};
pub use format::safetensors::{CallerMemory, TensorEntry, entry_order};
pub use manifest::write::CommitOptions;
pub use manifest::{
    DataFile, FORMAT, INLINE_BYTES, INLINE_TOTAL_BYTES, LATEST_FORMAT, MANIFEST_NAME, MAX_DIMS,
    ManifestHead, VERSION_WRITER, decode, encode,
};
pub use place::CheckpointPlace;
pub use place::folder::memory_file::MemoryFile;
pub use place::leftovers::LeftoverKind;
pub use read::boxes::{c_strides, pieces};
pub use read::plan::ByteRead;
pub use save::commit::{check_fence, commit};
pub use save::file::write_file;
pub use save::join::{RANK_VALUES_NODE, RankReports, ReportedTrees};
pub use save::report::{WrittenChunk, pack_report};
pub use save::shard_plan::{ShardEntry, ShardPlan, ShardedTensor};
pub use save::stream::{StreamOptions, StreamWriter, StreamedFile};
pub use upkeep::gc::{GarbageFile, GcReport, gc};
pub use upkeep::list::{CheckpointStatus, ListedCheckpoint, list, sizes};
pub use upkeep::remove::{delete, delete_files};
pub use workers::Interrupted;
pub use write::compress::BlockEncoding;
pub use write::written::{WriteOptions, WrittenDataFile};
