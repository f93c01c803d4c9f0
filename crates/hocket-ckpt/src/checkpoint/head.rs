//! Reads of a checkpoint's manifest.

use crate::error::{CkptError, Result};
use crate::manifest::{DecodedManifest, HEAD_BYTES, MANIFEST_NAME, decode_checked, decode_head};
use crate::place::CheckpointPlace;
use crate::workers::Interrupted;

/// Limit of the stored manifest in bytes.
const MANIFEST_LIMIT: u64 = 1 << 30;

/// Reads and validates a checkpoint's manifest.
///
/// # Errors
/// `NotFound`, `Partial` (data without a manifest), `Corrupt`, `Incompatible`, and errors of the disk or the
/// store.
pub(crate) fn read_manifest(
    place: &CheckpointPlace,
    interrupted: Interrupted<'_>,
) -> Result<DecodedManifest> {
    decode_checked(&read_stored(place, interrupted)?, place.uri())
}

/// Reads the stored bytes of a checkpoint's manifest without a check.
///
/// # Errors
/// `NotFound`, `Partial` (data without a manifest), and errors of the disk or the store.
pub fn read_stored(place: &CheckpointPlace, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    fetch(place, MANIFEST_LIMIT, interrupted)
}

/// Reads the first frame of a checkpoint's manifest and returns its JSON.
///
/// # Errors
/// As `Checkpoint::open`; the document itself is not checked.
pub fn read_head(place: &CheckpointPlace, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    let bytes = fetch(place, HEAD_BYTES, interrupted)?;
    decode_head(&bytes, place.uri()).map(|(_, json, _)| json)
}

/// Reads the first `limit` bytes of the manifest. If there is none, the error describes what exists instead.
fn fetch(place: &CheckpointPlace, limit: u64, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    match place.files().get_start(MANIFEST_NAME, limit, interrupted)? {
        Some(bytes) => Ok(bytes),
        None if place.files().has_data(interrupted)? => Err(CkptError::Partial {
            uri: place.uri().to_owned(),
        }),
        None => Err(place.not_found(format!(
            "expected a checkpoint, a folder with `{MANIFEST_NAME}` in it. `hocket-ckpt ls` lists the checkpoints of a folder"
        ))),
    }
}
