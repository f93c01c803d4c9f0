//! Local files and folders, where a missing one is no error.

use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hocket_store::durable;
use rustix::io::Errno;

use crate::error::{CkptError, Result};
use crate::place::files::FileEnds;

/// Creates a folder and its parents.
///
/// # Errors
/// `NotFound` if one of them exists as a file or a dangling link, and errors of the disk.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    durable::create_folder(path).map_err(|failed| match failed.error.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => CkptError::NotFound {
            uri: path.display().to_string(),
            reason: "expected a folder, but a file or a dangling link is in its place, or in that of a folder \
                     above it"
                .to_owned(),
        },
        _ => failed.into(),
    })
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

/// Reads at most the first `limit` bytes of a file; returns none if nothing has its name.
///
/// # Errors
/// Errors of the disk; also for a dangling link, a folder or a pipe in the place of the file, which may hide one.
pub(crate) fn read_start(path: &Path, limit: u64, action: &str) -> Result<Option<Vec<u8>>> {
    Ok(read_ends(path, limit, 0, action)?.map(|ends| ends.start))
}

/// Reads as [`read_start`] does, and the last `last` bytes of the same file, which may be fewer.
///
/// # Errors
/// As [`read_start`].
pub(crate) fn read_ends(
    path: &Path,
    limit: u64,
    last: usize,
    action: &str,
) -> Result<Option<FileEnds>> {
    let read = || {
        let mut file = durable::open_regular(path)?;
        let mut start = Vec::new();
        (&mut file).take(limit).read_to_end(&mut start)?;
        let size = file.metadata()?.len();
        let last = last.min(size as usize);
        let mut end = vec![0; last];
        file.read_exact_at(&mut end, size - last as u64)?;
        Ok(FileEnds { start, end })
    };
    let bytes = found(read(), path, action)?;
    match path.symlink_metadata() {
        // It has appeared meanwhile.
        Ok(there) if bytes.is_none() && there.is_file() => found(read(), path, action),
        Ok(_) if bytes.is_none() => {
            let reason = io::Error::other("a dangling link, a folder or a pipe is in its place");
            Err(CkptError::io(path, action, &reason))
        }
        _ => Ok(bytes),
    }
}

/// Lists the files of a folder; returns none if it does not exist.
pub(crate) fn list_folder(path: &Path) -> Result<Option<Vec<PathBuf>>> {
    let read = || -> io::Result<Vec<_>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    };
    // A file at the folder's path was not written by Hocket.
    found(read(), path, "list the folder")
}

/// Returns whether a file system, or the system, lacks a call. macOS has two numbers for it where Linux has one.
pub(super) fn is_unsupported(error: Errno) -> bool {
    [Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOSYS, Errno::INVAL].contains(&error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_system_lacks_is_told_from_failures() {
        for number in [libc::EOPNOTSUPP, libc::ENOTSUP, libc::ENOSYS, libc::EINVAL] {
            assert!(is_unsupported(Errno::from_raw_os_error(number)));
        }
        for number in [libc::ENOSPC, libc::EDQUOT, libc::EEXIST, libc::EACCES] {
            assert!(!is_unsupported(Errno::from_raw_os_error(number)));
        }
    }
}
