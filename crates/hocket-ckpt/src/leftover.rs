//! Files under hidden names: whose writer was killed they are nobody's.
//!
//! A writer holds a lock on its file, which the system takes back when the process ends, however it ends.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::place::open_file;

/// How hidden names end. No other program calls its files so: whatever else stands in a folder, these are ours.
const SUFFIX: &str = ".hocket-unfinished";

/// What this process calls a file until it is whole.
pub(crate) fn hidden_name(name: &str) -> String {
    format!(".{name}.{}{SUFFIX}", std::process::id())
}

/// Says that a hidden file has a writer. Where the file system has no locks, it says nothing.
pub(crate) fn mark_alive(file: &File) {
    let _ = flock(file, FlockOperation::NonBlockingLockExclusive);
}

/// What a hidden file was to be called when it is whole; none where the name is no hidden one of ours.
pub(crate) fn name_of(hidden: &str) -> Option<&str> {
    let (name, writer) = hidden
        .strip_prefix('.')?
        .strip_suffix(SUFFIX)?
        .rsplit_once('.')?;
    let is_ours = !writer.is_empty() && writer.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then_some(name)
}

/// Whether a file has a writer; none where the file system does not tell, or the file is gone.
pub(crate) fn has_writer(path: &Path) -> Option<bool> {
    let file = open_file(path).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Some(false),
        Err(Errno::WOULDBLOCK) => Some(true),
        Err(_) => None,
    }
}

/// Removes what killed writers of a file left beside it. Best effort: what stays is only waste.
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
