//! Local files written past the page cache, by any number of threads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// What disks that are written past the page cache ask memory, offsets and sizes to be multiples of.
pub const PAGE_BYTES: usize = 4096;

/// Smaller files go through the page cache: their flush costs more than their copy.
pub const DIRECT_MIN_BYTES: u64 = 8 << 20;

/// Where bytes go: past the page cache until the file system says no, then through it.
#[derive(Debug)]
pub struct Direct {
    buffered: File,
    direct: Option<File>,
    is_refused: AtomicBool,
}

impl Direct {
    /// For `file`, which stands at `path` and will have `num_bytes`.
    ///
    /// # Errors
    /// There is no handle left to be had.
    pub fn open(path: &Path, file: &File, num_bytes: u64) -> io::Result<Self> {
        let open = || {
            OpenOptions::new()
                .write(true)
                .custom_flags(libc::O_DIRECT)
                .open(path)
                .ok()
        };
        Ok(Self {
            buffered: file.try_clone()?,
            direct: (num_bytes >= DIRECT_MIN_BYTES).then(open).flatten(),
            is_refused: AtomicBool::new(false),
        })
    }

    /// Whether [`write`](Self::write) takes these bytes as they lie: past the page cache only whole pages go.
    pub fn takes(&self, bytes: &[u8]) -> bool {
        let is_whole =
            bytes.len().is_multiple_of(PAGE_BYTES) && bytes.as_ptr().align_offset(PAGE_BYTES) == 0;
        is_whole || self.direct.is_none() || self.is_refused.load(Ordering::Relaxed)
    }

    /// Writes the first `length` bytes of `padded` at `offset`, a multiple of a page. Past the page cache all of
    /// `padded` is written, so the file's length is to be [set](Self::set_len) in the end.
    ///
    /// # Errors
    /// What the disk says.
    pub fn write(&self, padded: &[u8], length: usize, offset: u64) -> io::Result<()> {
        if self.write_direct(padded, offset)? {
            return Ok(());
        }
        let bytes = padded.get(..length).unwrap_or(padded);
        self.buffered.write_all_at(bytes, offset)
    }

    /// Whether the bytes are written; if not, the file system does not write past the page cache.
    fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<bool> {
        let Some(direct) = &self.direct else {
            return Ok(false);
        };
        if self.is_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match direct.write_all_at(bytes, offset) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            outcome => outcome.map(|()| true),
        }
    }

    /// Cuts the file to its length, or makes it that long.
    ///
    /// # Errors
    /// What the disk says.
    pub fn set_len(&self, num_bytes: u64) -> io::Result<()> {
        self.buffered.set_len(num_bytes)
    }
}
