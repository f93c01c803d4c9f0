//! Local files and folders, where a missing one is no error.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{CkptError, Result};

/// Opens a file for reading. Anything but a regular file counts as missing. Opening a named pipe does not
/// block.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let reason = "it is no regular file";
    Err(io::Error::new(io::ErrorKind::NotFound, reason))
}

/// Maps a missing file to none.
pub(crate) fn found<T>(result: io::Result<T>, path: &Path, action: &str) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(CkptError::io(path, action, &error)),
    }
}

/// Lists the files of a folder; returns none if it does not exist.
pub(crate) fn list_folder(path: &Path) -> Result<Option<Vec<PathBuf>>> {
    let read = || -> io::Result<Vec<_>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    };
    // A file in the folder's place was not written by Hocket.
    found(read(), path, "list the folder")
}
