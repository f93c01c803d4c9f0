//! Removal of checkpoints, and of single files in them.

use std::collections::HashSet;

use crate::error::{CkptError, Result};
use crate::fetch::read_manifest;
use crate::file_names::{is_data_path, is_plain_name};
use crate::location::Location;
use crate::manifest::MANIFEST_NAME;
use crate::workers::Interrupted;

/// Removes a checkpoint. The manifest is removed first, so that the checkpoint never appears broken, then its
/// data: the files that the manifest names, and files with the name of a data file. Other files are kept. With
/// `dry_run`, only checks that the removal is possible.
///
/// # Errors
/// `NotFound` if nothing of Hocket is there; `Invalid` if `name` is not one plain name, or if it or a folder of
/// its data files is a symbolic link; and errors of the disk or the store.
pub fn delete(
    location: &Location,
    name: &str,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !is_plain_name(name) {
        return Err(CkptError::Invalid(format!(
            "`{name}`: expected one plain name below `{}`",
            location.uri()
        )));
    }
    let child = location.child(name)?;
    child.files().refuse_link()?;
    let has_manifest = child
        .files()
        .get_start(MANIFEST_NAME, 1, interrupted)?
        .is_some();
    if !has_manifest && !child.files().has_data(interrupted)? {
        return Err(child.not_found("no checkpoint to delete: neither a manifest nor data files"));
    }
    let named = match read_manifest(&child, interrupted) {
        Ok(manifest) => manifest.data_paths(),
        // Without a readable manifest, data files are recognized by name only.
        Err(
            CkptError::Partial { .. }
            | CkptError::NotFound { .. }
            | CkptError::Corrupt { .. }
            | CkptError::Incompatible { .. },
        ) => HashSet::new(),
        Err(error) => return Err(error),
    };
    child.files().refuse_links(&named)?;
    if dry_run {
        return Ok(());
    }
    child.files().delete(has_manifest, named, interrupted)
}

/// Removes data files of a checkpoint that no manifest names any more, and their folders if these are then
/// empty. Missing files are not an error.
///
/// # Errors
/// `Invalid` if a path is not the name of a data file or leads through a symbolic link, and errors of the disk
/// or the store.
pub fn delete_files(
    location: &Location,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if let Some(bad) = paths.iter().find(|path| !is_data_path(path)) {
        return Err(CkptError::Invalid(format!(
            "`{bad}`: expected a plain path below `data/`"
        )));
    }
    location.files().delete_files(paths, interrupted)
}
