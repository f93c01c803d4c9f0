//! Files and folders that are on the disk when a function returns.

use std::fs::File;
use std::path::Path;

use crate::error::{CkptError, Result};

/// Flushes a folder, so that the names in it survive a power cut.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder =
        File::open(path).map_err(|error| CkptError::io(path, "open the folder", &error))?;
    match folder.sync_all() {
        Ok(()) => Ok(()),
        // Some network file systems know no such thing for a folder.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        Err(error) => Err(CkptError::io(path, "flush the folder", &error)),
    }
}

/// Flushes the folder that `path` stands in, if it has one that can be opened.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
}
