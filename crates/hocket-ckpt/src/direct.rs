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
        if let Some(direct) = self
            .direct
            .as_ref()
            .filter(|_| !self.is_refused.load(Ordering::Relaxed))
        {
            let padded = length.next_multiple_of(ALIGNMENT as usize);
            buffer.bytes_mut()[length..padded].fill(0);
            match direct.write_all_at(&buffer.bytes()[..padded], offset) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    self.is_refused.store(true, Ordering::Relaxed);
                }
                other => return other,
            }
        }
        self.buffered
            .write_all_at(&buffer.bytes()[..length], offset)
    }

    /// Cuts the file to its length, or makes it that long.
    ///
    /// # Errors
    /// What the disk says.
    pub(crate) fn set_len(&self, num_bytes: u64) -> io::Result<()> {
        self.buffered.set_len(num_bytes)
    }
}
