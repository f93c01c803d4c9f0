//! The commit: writes the manifest under its final name if no other save has done so.

use crate::error::{CkptError, Result};
use crate::manifest::check_digests;
use crate::manifest::write::{CommitOptions, ManifestWrite};
use crate::place::CheckpointPlace;
use crate::workers::Interrupted;

/// Commits a checkpoint: writes `manifest` under its final name, conditionally and durably.
///
/// Committing the same save twice succeeds both times. A save that replaces another swaps the manifest in one
/// step, and only if it still belongs to that save; the caller removes the replaced save's files. If the other
/// save's manifest no longer exists, the commit proceeds as if there had been none.
///
/// # Errors
/// `Exists` if the manifest of a third save is there; `Unfenced` if the store ignores conditions and `unfenced`
/// is not set; `Corrupt` or `Invalid` if `manifest` does not belong to `save_id`; and errors of the disk or the
/// store.
pub fn commit(
    place: &CheckpointPlace,
    manifest: Vec<u8>,
    save_id: &str,
    options: &CommitOptions,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    // `encode` has checked the document; a manifest of many tensors takes long to parse again.
    let (head, _) = check_digests(&manifest, place.uri())?;
    if head.save_id != save_id {
        return Err(CkptError::Invalid(format!(
            "the manifest is of save `{}`, not of `{save_id}`",
            head.save_id
        )));
    }
    let write = ManifestWrite {
        uri: place.uri().to_owned(),
        bytes: manifest.into(),
        save_id: save_id.to_owned(),
        options: options.clone(),
    };
    place.files().commit(&write, interrupted)
}

/// Tests, before anything is written, whether a store honours the conditional write of a commit. A folder on a
/// disk shows it at the commit.
///
/// # Errors
/// `Unfenced` if the store ignores or rejects conditions, and errors of the store.
pub fn check_fence(
    place: &CheckpointPlace,
    save_id: &str,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    place.files().check_fence(save_id, interrupted)
}
