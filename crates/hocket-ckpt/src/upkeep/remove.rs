//! Removal of checkpoints, and of single files in them.

use std::collections::HashSet;

use super::list::list;
use crate::checkpoint::head::{read_manifest, read_stored};
use crate::error::{CkptError, Result};
use crate::format::names::{is_data_path, is_plain_name};
use crate::manifest::{HEAD_BYTES, decode_checked};
use crate::place::CheckpointPlace;
use crate::place::files::CheckpointToRemove;
use crate::place::leftovers::LeftoverKind;
use crate::workers::Interrupted;

/// Removes a checkpoint. The manifest is removed first, so that the checkpoint never appears broken, then the data
/// files that it names and other files of its save. Files of other saves are kept: one may be running, and [`gc`]
/// removes those of the dead ones. With `dry_run`, only checks that the removal is possible.
///
/// Without a readable manifest, removes the files of all saves, because none is known to be committed. The caller
/// must know that none of them is running: a file that was completed has no writer.
///
/// With `only_save`, removes the checkpoint only if it is of that save. In a folder this is exact; in an object store
/// another save may replace the manifest between its last read and its removal, which is one request.
///
/// [`gc`]: crate::gc()
///
/// # Errors
/// `Exists` if it is the base of a delta beside it; `NotFound` if nothing of Hocket is there, or not the checkpoint
/// of `only_save`; `Invalid` if `name` is not one plain name, if it or a folder of its data files is a symbolic link,
/// or if there is no readable manifest and a file has a live writer; and errors of the disk or the store.
pub fn delete(
    place: &CheckpointPlace,
    name: &str,
    only_save: Option<&str>,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !is_plain_name(name) {
        return Err(CkptError::Invalid(format!(
            "`{name}`: expected one plain name below `{}`",
            place.uri()
        )));
    }
    let child = place.child(name)?;
    child.files().refuse_link()?;
    loop {
        let (doomed, save) = choose(&child, interrupted)?;
        if let Some(wanted) = only_save
            && save.as_ref().map(|save| save.id.as_str()) != Some(wanted)
        {
            return Err(child.not_found(format!("no checkpoint of the save {wanted} to delete")));
        }
        if let Some(save) = save.filter(|save| save.is_version) {
            refuse_base(place, name, &save.id, interrupted)?;
        }
        child.files().refuse_links(&doomed.paths)?;
        if dry_run || child.files().delete(doomed, interrupted)? {
            return Ok(());
        }
    }
}

/// Returns an error if a delta beside a version needs it.
fn refuse_base(
    place: &CheckpointPlace,
    name: &str,
    save_id: &str,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    for listed in list(place, interrupted)? {
        if listed.head.and_then(|head| head.base).as_deref() != Some(name) {
            continue;
        }
        let delta = place.child(&listed.name)?;
        let document = match read_manifest(&delta, interrupted) {
            Ok(manifest) => manifest.document,
            Err(CkptError::NotFound { .. }) => continue,
            Err(error) => return Err(error),
        };
        if document.delta.is_some_and(|base| base.save_id == save_id) {
            return Err(CkptError::Exists {
                uri: delta.uri().to_owned(),
                reason: format!(
                    "it is a delta to `{name}`, without which it cannot be read. Remove it first"
                ),
            });
        }
    }
    Ok(())
}

/// The save that a readable manifest is of.
struct CommittedSave {
    id: String,
    /// Whether it is a version of published weights, which may have deltas.
    is_version: bool,
}

/// Selects the files of a checkpoint; returns also its save if its manifest can be read.
fn choose(
    child: &CheckpointPlace,
    interrupted: Interrupted<'_>,
) -> Result<(CheckpointToRemove, Option<CommittedSave>)> {
    // Files are listed before the manifest is read, so that a save that begins after a removal of the manifest
    // keeps its files.
    let mut found = child.files().garbage(interrupted)?;
    found.retain(|one| {
        matches!(
            one.waste,
            LeftoverKind::File | LeftoverKind::Manifest | LeftoverKind::Probe
        )
    });
    let stored = match read_stored(child, interrupted) {
        Ok(stored) => Some(stored),
        Err(CkptError::Partial { .. }) => None,
        Err(CkptError::NotFound { .. }) => {
            let reason = "no checkpoint to delete: neither a manifest nor data files";
            return Err(child.not_found(reason));
        }
        Err(error) => return Err(error),
    };
    let decoded = stored
        .as_ref()
        .map(|bytes| decode_checked(bytes, child.uri()));
    let mut save = None;
    let paths = match decoded {
        Some(Ok(manifest)) => {
            let save_id = manifest.document.save_id.as_str();
            save = Some(CommittedSave {
                id: save_id.to_owned(),
                is_version: manifest.document.is_version(),
            });
            // A probe has no content that a checkpoint needs.
            found.retain(|one| one.waste == LeftoverKind::Probe || save_id.starts_with(&one.save));
            manifest.data_paths()
        }
        None | Some(Err(CkptError::Corrupt { .. } | CkptError::Incompatible { .. })) => {
            let files = child.files();
            if let Some(held) = found.iter().find(|one| files.has_writer(&one.path)) {
                return Err(CkptError::Invalid(format!(
                    "`{}`: a running process writes `{}`, and there is no manifest that can be read. Stop the \
                     process or wait for its end, then delete the checkpoint",
                    child.uri(),
                    held.path
                )));
            }
            HashSet::new()
        }
        Some(Err(error)) => return Err(error),
    };
    let start = stored.map(|mut bytes| {
        bytes.truncate(HEAD_BYTES as usize);
        bytes
    });
    let found = found.into_iter().map(|one| one.path);
    let doomed = CheckpointToRemove {
        start,
        paths: paths.into_iter().chain(found).collect(),
    };
    Ok((doomed, save))
}

/// Removes data files of a checkpoint that no manifest names any more, and their folders if these are then
/// empty. Missing files are not an error.
///
/// # Errors
/// `Invalid` if a path is not the name of a data file or leads through a symbolic link, and errors of the disk
/// or the store.
pub fn delete_files(
    place: &CheckpointPlace,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if let Some(bad) = paths.iter().find(|path| !is_data_path(path)) {
        return Err(CkptError::Invalid(format!(
            "`{bad}`: expected a plain path below `data/`"
        )));
    }
    place.files().delete_files(paths, interrupted)
}
