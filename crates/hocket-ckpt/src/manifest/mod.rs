//! The manifest: the document, its encoding in frames, and its rules.

mod column;
mod document;
mod frames;
mod ranges;
mod rules;
mod table;
pub(crate) mod tiling;
pub(crate) mod write;

pub use column::IntegerColumn;
pub use document::{
    DataFile, DeltaBase, FORMAT, LATEST_FORMAT, ManifestChunks, ManifestDocument, ManifestTensor,
    PathStep, PerRank, PerRankPolicy, ThinnedState, UniquePairs, VERSION_WRITER, ValueLeaf,
};
pub(crate) use frames::{
    DecodedManifest, HEAD_BYTES, TRAILER_BYTES, check_digests, compress, decode_checked,
    decode_head, decompress, digest_at_end, encode_document,
};
pub use frames::{MANIFEST_NAME, ManifestHead, decode, encode};
pub(crate) use rules::dtype_of;
pub use rules::{INLINE_BYTES, INLINE_TOTAL_BYTES, MAX_DIMS};
pub(crate) use table::BlockTable;
