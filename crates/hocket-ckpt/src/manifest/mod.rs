//! The manifest: the document, its encoding in frames, and its rules.

mod document;
mod frames;
mod rules;
mod table;
pub(crate) mod tiling;
pub(crate) mod write;

pub use document::{
    Chunks, DataFile, Document, FORMAT, Leaf, Pairs, PerRank, Policy, Step, Tensor,
};
pub(crate) use frames::{Decoded, HEAD_BYTES, check_digests, decode_checked, decode_head};
pub use frames::{Head, MANIFEST_NAME, decode, encode};
pub(crate) use table::Table;
