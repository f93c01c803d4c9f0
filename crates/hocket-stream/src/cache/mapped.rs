//! Files as bytes, and the lock that says that they are in use.

use std::fs::{File, FileTimes};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use memmap2::{Advice, Mmap};
use rustix::fs::{FlockOperation, flock};

use super::limit::LOCK_POLL;
use crate::error::{Result, StreamError};
use crate::files::is_same_file;

/// The bytes of a file, on disk or in memory.
pub(super) struct Mapped {
    contents: Contents,
    _in_use: Option<InUse>,
}

enum Contents {
    /// An empty file cannot be mapped.
    Empty,
    File(Mmap),
    Memory(Vec<u8>),
}

impl Mapped {
    /// Bytes that are in no file.
    pub(super) fn memory(bytes: Vec<u8>) -> Self {
        Self {
            contents: Contents::Memory(bytes),
            _in_use: None,
        }
    }
}

impl std::ops::Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.contents {
            Contents::Empty => &[],
            Contents::File(map) => map,
            Contents::Memory(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// A shared lock on a file, which keeps every process from evicting it.
struct InUse {
    file: File,
    process: u32,
}

impl Drop for InUse {
    fn drop(&mut self) {
        // A forked child holds the same lock open: its parent lets go for both, and the child for neither.
        if self.process == std::process::id() {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// Maps a file; `None` where there is none.
pub(super) fn map(path: &Path) -> Result<Option<Mapped>> {
    let Some(file) = open(path)? else {
        return Ok(None);
    };
    Ok(Some(Mapped {
        contents: contents(path, &file)?,
        _in_use: None,
    }))
}

/// Maps a file that may be evicted, and keeps it from that while the map lives; `None` where there is none, and
/// without a `stop` to wait by also where somebody is about to evict it.
pub(super) fn hold(path: &Path, stop: Option<&AtomicBool>) -> Result<Option<Mapped>> {
    loop {
        let Some(file) = open(path)? else {
            return Ok(None);
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => {}
            // Somebody is about to evict it; that takes a moment.
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                let Some(stop) = stop else {
                    return Ok(None);
                };
                if stop.load(Ordering::Relaxed) {
                    return Err(StreamError::Closed);
                }
                std::thread::sleep(LOCK_POLL);
                continue;
            }
            Err(error) => return Err(StreamError::io(path, "lock", &error.into())),
        }
        let in_use = InUse {
            file,
            process: std::process::id(),
        };
        // Evicted or replaced while we waited: look again.
        if !is_same_file(&in_use.file, path) {
            continue;
        }
        // The time by which the least recently used is found; another user's file keeps its own.
        let now = FileTimes::new().set_accessed(SystemTime::now());
        let _ = in_use.file.set_times(now);
        return Ok(Some(Mapped {
            contents: contents(path, &in_use.file)?,
            _in_use: Some(in_use),
        }));
    }
}

fn open(path: &Path) -> Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(StreamError::io(path, "open", &error)),
    }
}

fn contents(path: &Path, file: &File) -> Result<Contents> {
    let metadata = file
        .metadata()
        .map_err(|e| StreamError::io(path, "look at", &e))?;
    if metadata.len() == 0 {
        return Ok(Contents::Empty);
    }
    // SAFETY: the map is only read. Files under a final name are replaced by rename or unlinked and never
    // shortened in place by this crate; a part is shortened only by the holder of its lock, who is the one
    // mapping it.
    let map = unsafe { Mmap::map(file) }.map_err(|e| StreamError::io(path, "map", &e))?;
    // Now, in a thread that works ahead, rather than page by page where batches are made. Older kernels cannot.
    let _ = map.advise(Advice::PopulateRead);
    Ok(Contents::File(map))
}
