//! File contents as memory maps, and the lock that marks them as in use.

use std::fs::{File, FileTimes, Metadata};
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Instant, SystemTime};

use hocket_store::Interrupted;
use hocket_store::durable::{is_same_file, try_lock_shared, unlock};
use memmap2::Mmap;
use xxhash_rust::xxh3::Xxh3Default;

use super::limit::{LOCK_POLL, is_past};
use crate::error::{Result, StreamError};

/// The bytes of a file, mapped or in memory.
pub(super) struct MappedFile {
    contents: FileBytes,
    /// The stamp of a mapped file; none for memory.
    stamp: Option<Stamp>,
    _in_use: Option<InUse>,
}

/// A file's identity and state in one word. It differs for a file that replaced another or was written to.
pub(super) type Stamp = NonZeroU64;

/// Returns the stamp of a file.
pub(super) fn stamp(metadata: &Metadata) -> Option<Stamp> {
    let mut hasher = Xxh3Default::new();
    // The access and change times are left out, because `hold` updates them.
    for word in [metadata.dev(), metadata.ino(), metadata.len()] {
        hasher.update(&word.to_le_bytes());
    }
    for word in [metadata.mtime(), metadata.mtime_nsec()] {
        hasher.update(&word.to_le_bytes());
    }
    Stamp::new(hasher.digest())
}

enum FileBytes {
    /// An empty file cannot be mapped.
    Empty,
    File(Mmap),
    Memory(Vec<u8>),
}

impl MappedFile {
    /// Wraps bytes that are in no file.
    pub(super) fn memory(bytes: Vec<u8>) -> Self {
        Self {
            contents: FileBytes::Memory(bytes),
            stamp: None,
            _in_use: None,
        }
    }

    /// Returns the stamp if it is a file.
    pub(super) fn stamp(&self) -> Option<Stamp> {
        self.stamp
    }
}

impl std::ops::Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.contents {
            FileBytes::Empty => &[],
            FileBytes::File(map) => map,
            FileBytes::Memory(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// A shared lock on a file, which prevents its eviction by any process.
struct InUse {
    file: File,
    process: u32,
}

impl Drop for InUse {
    fn drop(&mut self) {
        // A forked child shares the lock. Only the parent unlocks, which releases it for both.
        if self.process == std::process::id() {
            unlock(&self.file);
        }
    }
}

/// Maps a file; returns none if it does not exist.
pub(super) fn map(path: &Path) -> Result<Option<MappedFile>> {
    let Some(file) = open(path)? else {
        return Ok(None);
    };
    contents(path, &file).map(Some)
}

/// Maps a file that may be evicted, and protects it from eviction while the map lives. Returns none if it does
/// not exist, or if another process is about to evict it: at once without `interrupted`, else if that
/// process still holds its lock at `until`.
pub(super) fn hold(
    path: &Path,
    until: Option<Instant>,
    interrupted: Option<Interrupted<'_>>,
) -> Result<Option<MappedFile>> {
    loop {
        let Some(file) = open(path)? else {
            return Ok(None);
        };
        if !try_lock_shared(&file).map_err(|e| StreamError::io(path, "lock", &e))? {
            // Another process is about to evict it, which takes only a moment.
            let Some(interrupted) = interrupted else {
                return Ok(None);
            };
            if interrupted() {
                return Err(StreamError::Closed);
            }
            if is_past(until) {
                return Ok(None);
            }
            std::thread::sleep(LOCK_POLL);
            continue;
        }
        let in_use = InUse {
            file,
            process: std::process::id(),
        };
        // Evicted or replaced during the wait: check again.
        if !is_same_file(&in_use.file, path) {
            continue;
        }
        // Updates the access time, by which the LRU file is found; another user's file keeps its own.
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

fn contents(path: &Path, file: &File) -> Result<MappedFile> {
    let metadata = file
        .metadata()
        .map_err(|e| StreamError::io(path, "look at", &e))?;
    let mapped = |contents| MappedFile {
        contents,
        stamp: stamp(&metadata),
        _in_use: None,
    };
    if metadata.len() == 0 {
        return Ok(mapped(FileBytes::Empty));
    }
    // SAFETY: the map is only read. This crate replaces files under a final name by rename or unlinks them, and
    // never truncates them in place; a part is truncated only by the holder of its lock, which is the thread
    // that maps it.
    let map = unsafe { Mmap::map(file) }.map_err(|e| StreamError::io(path, "map", &e))?;
    // Loads the pages now, in a prefetching thread, rather than one by one during batch assembly. Older kernels
    // do not support it.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::PopulateRead);
    Ok(mapped(FileBytes::File(map)))
}
