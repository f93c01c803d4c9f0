//! Hidden files of unfinished writes, and detection of those whose writer was killed.
//!
//! A writer holds a lock on its file, which the system releases whenever the process ends.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::local_file::open_file;

/// Suffix of hidden names. No other program uses it, so every file with it was written by Hocket.
const SUFFIX: &str = ".hocket-unfinished";

/// Returns this process's hidden name for a file that is not yet complete.
pub(crate) fn hidden_name(name: &str) -> String {
    format!(".{name}.{}{SUFFIX}", std::process::id())
}

/// Marks a hidden file as having a writer, by a lock. Has no effect if the file system does not support locks.
pub(crate) fn mark_alive(file: &File) {
    let _ = flock(file, FlockOperation::NonBlockingLockExclusive);
}

/// Returns the final name of a hidden file; none if the name is not one of our hidden names.
pub(crate) fn name_of(hidden: &str) -> Option<&str> {
    let (name, writer) = hidden
        .strip_prefix('.')?
        .strip_suffix(SUFFIX)?
        .rsplit_once('.')?;
    let is_ours = !writer.is_empty() && writer.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then_some(name)
}

/// Returns whether a file has a writer; none if the file system has no locks or the file is gone.
pub(crate) fn has_writer(path: &Path) -> Option<bool> {
    let file = open_file(path).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Some(false),
        Err(Errno::WOULDBLOCK) => Some(true),
        Err(_) => None,
    }
}

/// Removes hidden files that killed writers of `target` left beside it. Failures are ignored, because the files
/// only waste space.
pub(crate) fn sweep(target: &Path) {
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        return;
    };
    let name = name.to_string_lossy();
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let is_ours = name_of(&entry.file_name().to_string_lossy()) == Some(&*name);
        if is_ours && has_writer(&entry.path()) == Some(false) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
