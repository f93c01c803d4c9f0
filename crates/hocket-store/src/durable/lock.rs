//! Locks on open files (`flock`).
//!
//! The system releases a lock when the last handle of its opened file closes, also when the process is killed. A
//! forked child has a copy of the handle, so a holder that may be forked unlocks the file, which releases the lock
//! for both.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A file with an exclusive lock, which is released when this is dropped.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// Waits for the lock.
    ///
    /// # Errors
    /// The error of the system call, for example of a file system without locks.
    pub fn wait(file: File) -> io::Result<Self> {
        loop {
            match file.lock() {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => return outcome.map(|()| Self(file)),
            }
        }
    }

    /// Takes the lock; returns none if there is another lock.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn take(file: File) -> io::Result<Option<Self>> {
        Ok(try_lock(&file)?.then_some(Self(file)))
    }

    /// Returns the file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}

/// Takes an exclusive lock, which ends with the last handle of the opened file; returns false if there is another
/// lock.
///
/// # Errors
/// The error of the system call, for example of a file system without locks.
pub fn try_lock(file: &File) -> io::Result<bool> {
    is_taken(file.try_lock())
}

/// Takes a shared lock; returns false if there is an exclusive one.
///
/// # Errors
/// As [`try_lock`].
pub fn try_lock_shared(file: &File) -> io::Result<bool> {
    is_taken(file.try_lock_shared())
}

fn is_taken(outcome: Result<(), TryLockError>) -> io::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        // On a network file system the call waits for the server, and a signal may interrupt it.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Interrupted => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Releases the lock, even if a forked child has a copy of the handle. A failure is ignored: the lock ends with
/// the handle.
pub fn unlock(file: &File) {
    let _ = file.unlock();
}

/// Returns whether `path` still refers to the open file.
#[must_use]
pub fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => open.ino() == named.ino() && open.dev() == named.dev(),
        _ => false,
    }
}

/// Opens a file for reading. Anything but a regular file counts as missing. Opening a named pipe does not block.
///
/// # Errors
/// The error of the system call, or `NotFound`.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(
        ErrorKind::NotFound,
        "it is not a regular file",
    ))
}

/// Returns whether a writer holds the lock of a file; none if the file system has no locks or the file is gone.
#[must_use]
pub fn has_writer(path: &Path) -> Option<bool> {
    let is_free = try_lock(&open_regular(path).ok()?).ok()?;
    Some(!is_free)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_writer_is_detected_until_its_handle_closes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(has_writer(&path), None);
        let file = File::create(&path).unwrap();
        assert_eq!(has_writer(&path), Some(false));
        let held = FileLock::wait(file).unwrap();
        let copy = held.file().try_clone().unwrap();
        assert_eq!(has_writer(&path), Some(true));
        assert!(!try_lock_shared(&File::open(&path).unwrap()).unwrap());
        assert!(
            FileLock::take(File::open(&path).unwrap())
                .unwrap()
                .is_none()
        );
        drop(held);
        assert_eq!(
            has_writer(&path),
            Some(false),
            "a copy of the handle is open"
        );
        let (first, second) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        assert!(try_lock_shared(&first).unwrap() && try_lock_shared(&second).unwrap());
        assert!(!try_lock(&copy).unwrap());
        assert_eq!(has_writer(folder.path()), None, "a folder");
    }

    #[test]
    fn a_path_with_another_file_is_not_the_open_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        let file = File::create(&path).unwrap();
        assert!(is_same_file(&file, &path));
        fs::write(&other, b"").unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(!is_same_file(&file, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_same_file(&file, &path));
    }
}
