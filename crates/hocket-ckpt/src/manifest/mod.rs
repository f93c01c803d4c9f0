//! The manifest: the document, its encoding in frames, and its rules.

mod document;
mod fetch;
mod frames;
mod rules;
pub(crate) mod tiling;

pub use document::{DataFile, FORMAT};
pub use fetch::{MANIFEST_NAME, read_document, read_head};
pub(crate) use frames::{HEAD_BYTES, data_paths, decode_head};
pub use frames::{Head, decode, encode};
