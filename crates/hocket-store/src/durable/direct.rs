//! Direct (unbuffered) writes to local files, from any number of threads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
#[cfg(target_os = "linux")]
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The alignment of memory, offsets and sizes that direct I/O requires.
pub const PAGE_BYTES: usize = 4096;

/// Smaller files go through the page cache, because their flush costs more than their copy.
pub const DIRECT_MIN_BYTES: u64 = 8 << 20;

/// A file written with direct I/O until the file system refuses it, and through the page cache from then on.
#[derive(Debug)]
pub struct DirectFile {
    buffered: File,
    direct: Option<File>,
    is_refused: AtomicBool,
}

impl DirectFile {
    /// Opens a writer for `file`, which is at `path` and will have `num_bytes`.
    ///
    /// # Errors
    /// An I/O error if no file handle is available.
    pub fn open(path: &Path, file: &File, num_bytes: u64) -> io::Result<Self> {
        let open = || {
            let mut options = OpenOptions::new();
            options.write(true);
            // Elsewhere the second handle writes through the page cache, too.
            #[cfg(target_os = "linux")]
            options.custom_flags(libc::O_DIRECT);
            let opened = options.open(path);
            opened.inspect_err(|error| note_buffered(path, error)).ok()
        };
        Ok(Self {
            buffered: file.try_clone()?,
            direct: (num_bytes >= DIRECT_MIN_BYTES).then(open).flatten(),
            is_refused: AtomicBool::new(false),
        })
    }

    /// Returns whether [`write`](Self::write) accepts these bytes unpadded: direct I/O needs whole pages.
    pub fn takes(&self, bytes: &[u8]) -> bool {
        let is_whole =
            bytes.len().is_multiple_of(PAGE_BYTES) && bytes.as_ptr().align_offset(PAGE_BYTES) == 0;
        is_whole || self.direct.is_none() || self.is_refused.load(Ordering::Relaxed)
    }

    /// Writes the first `length` bytes of `padded` at `offset`, a multiple of a page. Direct I/O writes all of
    /// `padded`, so the caller [sets](Self::set_len) the file's length at the end.
    ///
    /// # Errors
    /// The I/O error of the write.
    pub fn write(&self, padded: &[u8], length: usize, offset: u64) -> io::Result<()> {
        if self.write_direct(padded, offset)? {
            return Ok(());
        }
        let bytes = padded.get(..length).unwrap_or(padded);
        self.buffered.write_all_at(bytes, offset)
    }

    /// Writes the bytes with direct I/O; returns false if the file system does not support it.
    fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<bool> {
        let Some(direct) = &self.direct else {
            return Ok(false);
        };
        if self.is_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match direct.write_all_at(bytes, offset) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                tracing::debug!(
                    "direct I/O is refused ({error}); the file is written through the page cache"
                );
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            outcome => outcome.map(|()| true),
        }
    }

    /// Truncates or extends the file to `num_bytes`.
    ///
    /// # Errors
    /// The I/O error of the call.
    pub fn set_len(&self, num_bytes: u64) -> io::Result<()> {
        self.buffered.set_len(num_bytes)
    }
}

fn note_buffered(path: &Path, error: &io::Error) {
    let path = path.display();
    tracing::debug!("`{path}` is written through the page cache: direct I/O is refused ({error})");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Bytes that begin between two pages are refused wherever direct I/O is supported.
    #[test]
    fn a_refused_write_and_all_later_ones_go_through_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        let written = DirectFile::open(&path, &file, DIRECT_MIN_BYTES).unwrap();
        let bytes: Vec<u8> = (0..3 * PAGE_BYTES + 1).map(|i| (i % 251) as u8).collect();
        let odd = bytes.as_ptr().align_offset(2) + 1;
        let padded = &bytes[odd..odd + 2 * PAGE_BYTES];
        written.write(padded, PAGE_BYTES + 7, 0).unwrap();
        let is_refused = written.is_refused.load(Ordering::Relaxed);
        if is_refused {
            assert!(written.takes(&bytes[..5]));
        }
        written.write(padded, 5, 4 * PAGE_BYTES as u64).unwrap();
        written.set_len(PAGE_BYTES as u64 + 7).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), padded[..PAGE_BYTES + 7]);
    }
}
