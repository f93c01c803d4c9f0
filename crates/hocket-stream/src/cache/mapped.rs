//! Files as bytes, and the lock that says that they are in use.

use std::fs::{File, FileTimes, Metadata};
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use memmap2::{Advice, Mmap};
use rustix::fs::{FlockOperation, flock};
use xxhash_rust::xxh3::Xxh3Default;

use super::limit::{LOCK_POLL, is_past};
use crate::error::{Result, StreamError};
use crate::files::is_same_file;

/// The bytes of a file, on disk or in memory.
pub(super) struct Mapped {
    contents: Contents,
    /// Of the file; memory has none.
    stamp: Option<Stamp>,
    _in_use: Option<InUse>,
}

/// Which file it was, in one word: one that was put in its place, or that was written to, has another.
pub(super) type Stamp = NonZeroU64;

/// The stamp of a file.
pub(super) fn stamp(metadata: &Metadata) -> Option<Stamp> {
    let mut hasher = Xxh3Default::new();
    // Without the times of reading and of changes to the entry alone: holding a file sets them.
    for word in [metadata.dev(), metadata.ino(), metadata.len()] {
        hasher.update(&word.to_le_bytes());
    }
    for word in [metadata.mtime(), metadata.mtime_nsec()] {
        hasher.update(&word.to_le_bytes());
    }
    Stamp::new(hasher.digest())
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
            stamp: None,
            _in_use: None,
        }
    }

    /// Which file it is, if it is one.
    pub(super) fn stamp(&self) -> Option<Stamp> {
        self.stamp
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
    contents(path, &file).map(Some)
}

/// Maps a file that may be evicted, and keeps it from that while the map lives; `None` where there is none, and
/// also where somebody is about to evict it: at once without a `stop` to wait by, else if he is still at `until`.
pub(super) fn hold(
    path: &Path,
    until: Option<Instant>,
    stop: Option<&AtomicBool>,
) -> Result<Option<Mapped>> {
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
                if is_past(until) {
                    return Ok(None);
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
        let mut mapped = contents(path, &in_use.file)?;
        mapped._in_use = Some(in_use);
        return Ok(Some(mapped));
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

fn contents(path: &Path, file: &File) -> Result<Mapped> {
    let metadata = file
        .metadata()
        .map_err(|e| StreamError::io(path, "look at", &e))?;
    let mapped = |contents| Mapped {
        contents,
        stamp: stamp(&metadata),
        _in_use: None,
    };
    if metadata.len() == 0 {
        return Ok(mapped(Contents::Empty));
    }
    // SAFETY: the map is only read. Files under a final name are replaced by rename or unlinked and never
    // shortened in place by this crate; a part is shortened only by the holder of its lock, who is the one
    // mapping it.
    let map = unsafe { Mmap::map(file) }.map_err(|e| StreamError::io(path, "map", &e))?;
    // Now, in a thread that works ahead, rather than page by page where batches are made. Older kernels cannot.
    let _ = map.advise(Advice::PopulateRead);
    Ok(mapped(Contents::File(map)))
}
