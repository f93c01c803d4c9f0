//! A data file open for reading: through the page cache where that has it, past it where not.
//!
//! Several threads read blocks of one file side by side, which the kernel's read-ahead takes for chance. Past
//! the cache each of their requests goes to the disk as it is, and what a trainer has cached stays.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::aligned::{BUFFER_BYTES, Buffer};
use crate::place::open_file;
use crate::safetensors::ALIGNMENT;

/// Smaller files go through the page cache: there is nothing to gain.
const DIRECT_MIN_BYTES: u64 = 64 << 20;

/// Nor where less of a file is read: the look alone takes as long as some small reads.
const LOOK_MIN_BYTES: u64 = 16 << 20;

/// So many places stand for the whole file, each of so many bytes: every page takes time to tell.
const PLACES: usize = 16;
const PLACE_BYTES: usize = 256 << 10;

/// A data file, and a second way to it.
pub(crate) struct Opened {
    cached: File,
    direct: Option<File>,
    is_refused: AtomicBool,
}

impl Opened {
    /// Opens `path`, of which about `wanted` bytes will be read.
    pub(crate) fn open(path: &Path, wanted: u64) -> io::Result<Self> {
        let cached = open_file(path)?;
        let size = cached.metadata()?.len();
        let is_long = size >= DIRECT_MIN_BYTES && wanted >= LOOK_MIN_BYTES;
        let is_cold = is_long && !is_cached(&cached, size as usize);
        let open_direct = || {
            OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECT)
                .open(path)
                .ok()
        };
        Ok(Self {
            direct: is_cold.then(open_direct).flatten(),
            cached,
            is_refused: AtomicBool::new(false),
        })
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> io::Result<u64> {
        Ok(self.cached.metadata()?.len())
    }

    /// Fills `target` with the bytes at `at`; `buffer` is the calling thread's own, made when it is needed.
    pub(crate) fn read_exact_at(
        &self,
        target: &mut [u8],
        at: u64,
        buffer: &mut Option<Buffer>,
    ) -> io::Result<()> {
        let direct = self.direct.as_ref();
        let Some(direct) = direct.filter(|_| !self.is_refused.load(Ordering::Relaxed)) else {
            return self.cached.read_exact_at(target, at);
        };
        let buffer = match buffer {
            Some(buffer) => buffer,
            none => none.insert(Buffer::new().map_err(io::Error::other)?),
        };
        let mut at = at;
        for piece in target.chunks_mut(BUFFER_BYTES - 2 * ALIGNMENT as usize) {
            match read_direct(direct, buffer, piece, at) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    // The file system opens such files, and reads them not.
                    self.is_refused.store(true, Ordering::Relaxed);
                    self.cached.read_exact_at(piece, at)?;
                }
                other => other?,
            }
            at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Reads whole pages around what is asked for, and copies that.
fn read_direct(file: &File, buffer: &mut Buffer, target: &mut [u8], at: u64) -> io::Result<()> {
    let from = at - at % ALIGNMENT;
    let skip = (at - from) as usize;
    let wanted = skip + target.len();
    let pages = wanted.next_multiple_of(ALIGNMENT as usize);
    let mut filled = 0;
    while filled < wanted {
        match file.read_at(&mut buffer.bytes_mut()[filled..pages], from + filled as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    target.copy_from_slice(&buffer.bytes()[skip..wanted]);
    Ok(())
}

/// Whether the page cache has most of a file of `size` bytes, no fewer than the places looked at. Where the kernel
/// does not tell, it is taken to.
fn is_cached(file: &File, size: usize) -> bool {
    // SAFETY: a new map of a file that is open, which nobody reads through.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if map == libc::MAP_FAILED {
        return true;
    }
    let page = ALIGNMENT as usize;
    let mut resident = [0_u8; PLACE_BYTES / ALIGNMENT as usize];
    let (mut found, mut is_told) = (0, true);
    for place in 0..PLACES {
        let at = size.saturating_sub(PLACE_BYTES) / PLACES * place / page * page;
        // SAFETY: the place lies within the map; a page has at least `ALIGNMENT` bytes, so each has its byte.
        let answer = unsafe { libc::mincore(map.add(at), PLACE_BYTES, resident.as_mut_ptr()) };
        is_told &= answer == 0;
        found += resident.iter().filter(|&&page| page & 1 == 1).count();
    }
    // SAFETY: the map made above, which nothing else knows.
    unsafe { libc::munmap(map, size) };
    !is_told || 2 * found >= PLACES * resident.len()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Odd offsets, lengths and ends, cached or not, on whatever file system the temporary folder has.
    #[test]
    fn both_ways_read_the_same() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let data: Vec<u8> = (0..(9 << 20) + 77_u32)
            .map(|i| ((i * 31) >> 3) as u8)
            .collect();
        std::fs::write(file.path(), &data).unwrap();
        file.as_file().sync_all().unwrap();
        let mut opened = Opened::open(file.path(), u64::MAX).unwrap();
        assert!(opened.direct.is_none(), "small");
        opened.direct = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path())
            .ok();
        let mut buffer = None;
        for (at, length) in [
            (0, 1),
            (4095, 2),
            (4097, 3),
            (4096, 1 << 20),
            (123, (9 << 20) - 123),
            (data.len() - 5, 5),
            (data.len(), 0),
        ] {
            let mut target = vec![0; length];
            opened
                .read_exact_at(&mut target, at as u64, &mut buffer)
                .unwrap();
            assert_eq!(target, data[at..at + length], "{length} at {at}");
        }
        let beyond = opened.read_exact_at(&mut [0; 6], data.len() as u64 - 5, &mut buffer);
        assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_where_much_is_read_a_look_tells_whether_the_file_is_cold() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A hole, of which nothing is cached.
        file.as_file().set_len(DIRECT_MIN_BYTES).unwrap();
        let has_direct = |wanted| {
            let opened = Opened::open(file.path(), wanted).unwrap();
            opened.direct.is_some()
        };
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path());
        assert!(!has_direct(LOOK_MIN_BYTES - 1));
        assert_eq!(has_direct(LOOK_MIN_BYTES), direct.is_ok());
    }
}
