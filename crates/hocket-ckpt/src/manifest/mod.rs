//! The manifest: the document, the frames around it, the rules it keeps.

mod document;
mod frames;
mod rules;
pub(crate) mod tiling;

pub use document::{DataFile, FORMAT};
pub use frames::{Head, decode, encode};
pub(crate) use frames::{data_paths, decode_head};

use crate::error::{CkptError, Result};
use crate::pace::Interrupted;
use crate::place::Place;

/// The manifest's name inside a checkpoint; its presence is the commit.
pub const MANIFEST_NAME: &str = "checkpoint.json.zst";

/// Bytes that hold the first frame of every manifest.
pub(crate) const HEAD_BYTES: u64 = 4096;

/// A manifest has at most so many bytes as it is stored.
const MANIFEST_LIMIT: u64 = 1 << 30;

/// Reads and validates a checkpoint's manifest; returns the document, JSON.
///
/// # Errors
/// `NotFound`, `Partial` (data without a manifest), `Corrupt`, `Incompatible`, and what the disk or the store says.
pub fn read_document(place: &Place, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    let bytes = fetch(place, MANIFEST_LIMIT, interrupted)?;
    decode(&bytes, place.uri())
}

/// Reads the first frame of a checkpoint's manifest; returns the JSON in it.
///
/// # Errors
/// As `read_document`; the document itself is not looked at.
pub fn read_head(place: &Place, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    let bytes = fetch(place, HEAD_BYTES, interrupted)?;
    decode_head(&bytes, place.uri()).map(|(_, json, _)| json)
}

/// The first `limit` bytes of the manifest. Says what is there instead where there is none.
fn fetch(place: &Place, limit: u64, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    match place.get_start(MANIFEST_NAME, limit, interrupted)? {
        Some(bytes) => Ok(bytes),
        None if place.has_data(interrupted)? => Err(CkptError::Partial {
            uri: place.uri().to_owned(),
        }),
        None => Err(place.not_found(format!(
            "expected a checkpoint, a folder with `{MANIFEST_NAME}` in it. `hocket-ckpt ls` lists the checkpoints of a folder"
        ))),
    }
}
