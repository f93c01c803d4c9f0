//! Files under hidden names: whose writer was killed they are nobody's.
//!
//! A writer holds a lock on its file, which the system takes back when the process ends, however it ends.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

const SUFFIX: &str = ".unfinished";

/// What this process calls a file until it is whole.
pub(crate) fn hidden_name(name: &str) -> String {
    format!(".{name}.{}{SUFFIX}", std::process::id())
}

/// Says that a hidden file has a writer. Where the file system has no locks, it says nothing.
pub(crate) fn mark_alive(file: &File) {
    let _ = flock(file, FlockOperation::NonBlockingLockExclusive);
}

/// Removes what killed writers of a file left beside it. Best effort: what stays is only waste.
pub(crate) fn sweep(target: &Path) {
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        return;
    };
    let prefix = format!(".{}.", name.to_string_lossy());
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let found = entry.file_name();
        let found = found.to_string_lossy();
        let Some(writer) = found
            .strip_prefix(&prefix)
            .and_then(|rest| rest.strip_suffix(SUFFIX))
        else {
            continue;
        };
        let is_ours = !writer.is_empty() && writer.bytes().all(|byte| byte.is_ascii_digit());
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        if is_ours && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
