//! Durable creation of folders, and flushes of directory entries.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::error::{CkptError, Result};

/// Flushes a folder, so that its entries survive a power failure.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder =
        File::open(path).map_err(|error| CkptError::io(path, "open the folder", &error))?;
    match folder.sync_all() {
        Ok(()) => Ok(()),
        // Some network file systems do not support a flush of a folder.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        Err(error) => Err(CkptError::io(path, "flush the folder", &error)),
    }
}

/// Flushes the parent folder of `path`, if it can be opened.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
}

/// Creates a folder and its parents.
///
/// # Errors
/// `NotFound` if one of them exists as a file or a dangling link, and errors of the disk.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => CkptError::NotFound {
            uri: path.display().to_string(),
            reason: "expected a folder, but a file or a dangling link is in its place, or in that of a folder \
                     above it"
                .to_owned(),
        },
        _ => CkptError::io(path, "create the folder", &error),
    })
}
