//! Reads of a checkpoint's manifest.

use crate::error::{CkptError, Result};
use crate::manifest::{Decoded, HEAD_BYTES, MANIFEST_NAME, decode_checked, decode_head};
use crate::place::location::Location;
use crate::workers::Interrupted;

/// Limit of the stored manifest in bytes.
const MANIFEST_LIMIT: u64 = 1 << 30;

/// Reads and validates a checkpoint's manifest.
///
/// # Errors
/// `NotFound`, `Partial` (data without a manifest), `Corrupt`, `Incompatible`, and errors of the disk or the
/// store.
pub(crate) fn read_manifest(location: &Location, interrupted: Interrupted<'_>) -> Result<Decoded> {
    decode_checked(&read_stored(location, interrupted)?, location.uri())
}

/// Reads the stored bytes of a checkpoint's manifest without a check.
///
/// # Errors
/// `NotFound`, `Partial` (data without a manifest), and errors of the disk or the store.
pub(crate) fn read_stored(location: &Location, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    fetch(location, MANIFEST_LIMIT, interrupted)
}

/// Reads the first frame of a checkpoint's manifest and returns its JSON.
///
/// # Errors
/// As `Checkpoint::open`; the document itself is not checked.
pub fn read_head(location: &Location, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    let bytes = fetch(location, HEAD_BYTES, interrupted)?;
    decode_head(&bytes, location.uri()).map(|(_, json, _)| json)
}

/// Reads the first `limit` bytes of the manifest. If there is none, the error describes what exists instead.
fn fetch(location: &Location, limit: u64, interrupted: Interrupted<'_>) -> Result<Vec<u8>> {
    match location.files().get_start(MANIFEST_NAME, limit, interrupted)? {
        Some(bytes) => Ok(bytes),
        None if location.files().has_data(interrupted)? => Err(CkptError::Partial {
            uri: location.uri().to_owned(),
        }),
        None => Err(location.not_found(format!(
            "expected a checkpoint, a folder with `{MANIFEST_NAME}` in it. `hocket-ckpt ls` lists the checkpoints of a folder"
        ))),
    }
}
