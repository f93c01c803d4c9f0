//! The manifest: the document, its encoding in frames, and its rules.

mod document;
mod frames;
mod rules;
pub(crate) mod tiling;

pub use document::{DataFile, FORMAT};
pub(crate) use frames::{HEAD_BYTES, data_paths, decode_head};
pub use frames::{Head, MANIFEST_NAME, decode, encode};
