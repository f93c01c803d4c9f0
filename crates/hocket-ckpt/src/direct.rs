//! Local files written past the page cache, by any number of threads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::aligned::Buffer;
use crate::safetensors::ALIGNMENT;

/// Smaller files go through the page cache: their flush costs more than their copy.
const DIRECT_MIN_BYTES: u64 = 8 << 20;

/// Where buffers go: past the page cache until the file system says no, then through it.
pub(crate) struct Direct {
    buffered: File,
    direct: Option<File>,
    is_refused: AtomicBool,
}

impl Direct {
    /// For `file`, which stands at `path` and will have `num_bytes`.
    ///
    /// # Errors
    /// There is no handle left to be had.
    pub(crate) fn open(path: &Path, file: &File, num_bytes: u64) -> io::Result<Self> {
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

    /// Writes the first `length` bytes of `buffer` at `offset`, a multiple of a page; the last ones are padded to
    /// one, so the file's length is to be set in the end.
    ///
    /// # Errors
    /// What the disk says.
    pub(crate) fn write(&self, buffer: &mut Buffer, length: usize, offset: u64) -> io::Result<()> {
        if self.is_direct() {
            let padded = length.next_multiple_of(ALIGNMENT as usize);
            buffer.bytes_mut()[length..padded].fill(0);
            if self.write_direct(&buffer.bytes()[..padded], offset)? {
                return Ok(());
            }
        }
        self.buffered
            .write_all_at(&buffer.bytes()[..length], offset)
    }

    /// Whether [`write_memory`](Self::write_memory) takes these bytes: past the page cache only whole pages go.
    pub(crate) fn takes(&self, bytes: &[u8]) -> bool {
        let page = ALIGNMENT as usize;
        let is_whole = bytes.len().is_multiple_of(page) && bytes.as_ptr().align_offset(page) == 0;
        is_whole || !self.is_direct()
    }

    /// Writes bytes that it [`takes`](Self::takes) at `offset`, a multiple of a page, from where they lie.
    ///
    /// # Errors
    /// What the disk says.
    pub(crate) fn write_memory(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.write_direct(bytes, offset)? {
            return Ok(());
        }
        self.buffered.write_all_at(bytes, offset)
    }

    fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.is_refused.load(Ordering::Relaxed)
    }

    /// Whether the bytes are written; if not, the file system does not write past the page cache.
    fn write_direct(&self, bytes: &[u8], offset: u64) -> io::Result<bool> {
        let Some(direct) = self.direct.as_ref().filter(|_| self.is_direct()) else {
            return Ok(false);
        };
        match direct.write_all_at(bytes, offset) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
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
    pub(crate) fn set_len(&self, num_bytes: u64) -> io::Result<()> {
        self.buffered.set_len(num_bytes)
    }
}
