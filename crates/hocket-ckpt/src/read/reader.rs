//! A data file open for reading: through the page cache if it is cached or may be kept there, by direct I/O
//! otherwise.
//!
//! Several threads read the blocks of one file, each a contiguous part. For a file that is read into the page
//! cache, the reader advises the kernel of sequential access: the kernel's own read-ahead uses large pages,
//! which explicit requests for ranges (`POSIX_FADV_WILLNEED`) do not. The kernel tracks the read position of
//! each open file description, so each thread opens its own; on a shared one the kernel detects no sequence.
//! With direct I/O each request reaches the disk unchanged, and other cached data of the training process is
//! not evicted.

use std::fs::File;
#[cfg(target_os = "linux")]
use std::fs::OpenOptions;
use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
#[cfg(target_os = "linux")]
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use hocket_store::durable::{BUFFER_BYTES, PageBuffer, open_regular};
#[cfg(target_os = "linux")]
use memmap2::MmapOptions;

use crate::format::safetensors::ALIGNMENT;

/// Smaller files go through the page cache; direct I/O has no advantage for them.
const DIRECT_MIN_BYTES: u64 = 64 << 20;

/// Smaller reads also go through the page cache: the check of the cache alone takes as long as a few small
/// reads.
const LOOK_MIN_BYTES: u64 = 16 << 20;

/// Number of sampled ranges that represent the whole file, and the size of each: the check takes time for every
/// page.
#[cfg(target_os = "linux")]
const PLACES: usize = 16;
#[cfg(target_os = "linux")]
const PLACE_BYTES: usize = 256 << 10;

/// The treatment of a file that is not in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CachePolicy {
    /// The file is read into the page cache, where the next read finds it.
    Keep,
    /// The file is read without the page cache.
    Bypass,
}

/// A data file with an optional second handle for direct I/O.
pub(crate) struct DataReader {
    cached: File,
    direct: Option<File>,
    is_refused: AtomicBool,
    /// Whether the file is not cached yet and will be.
    is_sequential: bool,
}

/// The state that a reading thread keeps between reads.
#[derive(Default)]
pub(crate) struct ReaderState {
    /// For direct I/O; created when needed.
    buffer: Option<PageBuffer>,
    /// The descriptor that was read last, with this thread's own open file description of the same file; none
    /// if the system provides none.
    #[cfg(target_os = "linux")]
    file: Option<(RawFd, Option<File>)>,
}

impl DataReader {
    /// Opens `path`, of which about `wanted` bytes will be read.
    pub(crate) fn open(path: &Path, wanted: u64, caching: CachePolicy) -> io::Result<Self> {
        let cached = open_regular(path)?;
        let size = cached.metadata()?.len();
        let is_long = size >= DIRECT_MIN_BYTES && wanted >= LOOK_MIN_BYTES;
        let is_cold = is_long && !is_cached(&cached, size as usize);
        let is_kept = caching == CachePolicy::Keep;
        let is_sequential = is_cold && is_kept;
        if is_sequential {
            advise(&cached, AccessAdvice::Sequential);
        }
        Ok(Self {
            is_sequential,
            direct: (is_cold && !is_kept).then(|| open_direct(path)).flatten(),
            cached,
            is_refused: AtomicBool::new(false),
        })
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn size(&self) -> io::Result<u64> {
        Ok(self.cached.metadata()?.len())
    }

    /// Fills `target` with the bytes at `at`. `own` belongs to the calling thread.
    pub(crate) fn read_exact_at(
        &self,
        target: &mut [u8],
        at: u64,
        own: &mut ReaderState,
    ) -> io::Result<()> {
        if self.is_sequential {
            return own.file_of(&self.cached).read_exact_at(target, at);
        }
        let direct = self.direct.as_ref();
        let Some(direct) = direct.filter(|_| !self.is_refused.load(Ordering::Relaxed)) else {
            return self.cached.read_exact_at(target, at);
        };
        let buffer = match &mut own.buffer {
            Some(buffer) => buffer,
            none => none.insert(PageBuffer::new()?),
        };
        let mut at = at;
        for piece in target.chunks_mut(BUFFER_BYTES - 2 * ALIGNMENT as usize) {
            match read_direct(direct, buffer, piece, at) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    // The file system allows opening for direct I/O, but not reading.
                    tracing::debug!(
                        "direct I/O is refused ({error}); the file is read through the page cache"
                    );
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

impl ReaderState {
    /// Returns this thread's own open file description of an open file, or the given one if there is none.
    #[cfg(target_os = "linux")]
    fn file_of<'a>(&'a mut self, file: &'a File) -> &'a File {
        let key = file.as_raw_fd();
        if self.file.as_ref().is_none_or(|(of, _)| *of != key) {
            // The path may refer to another file by now.
            let own = File::open(format!("/proc/self/fd/{key}"));
            let own = own
                .inspect(|own| advise(own, AccessAdvice::Sequential))
                .ok();
            self.file = Some((key, own));
        }
        let own = self.file.as_ref().and_then(|(_, own)| own.as_ref());
        own.unwrap_or(file)
    }

    #[cfg(not(target_os = "linux"))]
    fn file_of<'a>(&'a mut self, file: &'a File) -> &'a File {
        file
    }
}

/// Reads the whole pages around the requested bytes and copies those.
fn read_direct(file: &File, buffer: &mut PageBuffer, target: &mut [u8], at: u64) -> io::Result<()> {
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

/// Opens a second handle for direct I/O, if the system and the file system support it.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    let refused = |error: &io::Error| {
        let path = path.display();
        tracing::debug!("`{path}` is read through the page cache: direct I/O is refused ({error})");
    };
    options.open(path).inspect_err(refused).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}

/// The advice about a file's access pattern.
#[derive(Clone, Copy)]
enum AccessAdvice {
    Sequential,
    #[cfg(test)]
    DontNeed,
}

/// Passes advice about a file's access pattern to the kernel. A failure is ignored, because it makes reads
/// slower but not wrong.
#[cfg(target_os = "linux")]
fn advise(file: &File, advice: AccessAdvice) {
    let advice = match advice {
        AccessAdvice::Sequential => rustix::fs::Advice::Sequential,
        #[cfg(test)]
        AccessAdvice::DontNeed => rustix::fs::Advice::DontNeed,
    };
    let _ = rustix::fs::fadvise(file, 0, None, advice);
}

#[cfg(not(target_os = "linux"))]
fn advise(_file: &File, _advice: AccessAdvice) {}

/// Returns true, because the query of the page cache used here exists only on Linux.
#[cfg(not(target_os = "linux"))]
fn is_cached(_file: &File, _size: usize) -> bool {
    true
}

/// Returns whether the page cache holds most of a file of `size` bytes, estimated from the sampled ranges. If
/// the kernel does not report it, returns true.
#[cfg(target_os = "linux")]
fn is_cached(file: &File, size: usize) -> bool {
    // The mapping is never read, because another process may change the file.
    let Ok(map) = MmapOptions::new().len(size).map_raw_read_only(file) else {
        return true;
    };
    let page = ALIGNMENT as usize;
    let mut resident = [0_u8; PLACE_BYTES / ALIGNMENT as usize];
    let (mut found, mut is_known) = (0, true);
    for place in 0..PLACES {
        let at = size.saturating_sub(PLACE_BYTES) / PLACES * place / page * page;
        // SAFETY: the range is inside the mapping; a page has at least `ALIGNMENT` bytes, so each page has its
        // byte.
        let answer = unsafe {
            libc::mincore(
                map.as_mut_ptr().add(at).cast(),
                PLACE_BYTES,
                resident.as_mut_ptr(),
            )
        };
        is_known &= answer == 0;
        found += resident.iter().filter(|&&page| page & 1 == 1).count();
    }
    !is_known || 2 * found >= PLACES * resident.len()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Covers odd offsets, lengths and ends, cached or not, on the file system of the temporary folder.
    #[test]
    fn direct_and_cached_reads_return_the_same_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let data: Vec<u8> = (0..(9 << 20) + 77_u32)
            .map(|i| ((i * 31) >> 3) as u8)
            .collect();
        std::fs::write(file.path(), &data).unwrap();
        file.as_file().sync_all().unwrap();
        let mut opened = DataReader::open(file.path(), u64::MAX, CachePolicy::Bypass).unwrap();
        assert!(opened.direct.is_none(), "small");
        opened.direct = open_direct(file.path());
        let mut own = ReaderState::default();
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
                .read_exact_at(&mut target, at as u64, &mut own)
                .unwrap();
            assert_eq!(target, data[at..at + length], "{length} at {at}");
        }
        let beyond = opened.read_exact_at(&mut [0; 6], data.len() as u64 - 5, &mut own);
        assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn the_page_cache_is_checked_only_for_large_reads() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // A sparse file; none of its pages are cached.
        file.as_file().set_len(DIRECT_MIN_BYTES).unwrap();
        let open = |wanted, caching| DataReader::open(file.path(), wanted, caching).unwrap();
        let has_direct = |wanted| open(wanted, CachePolicy::Bypass).direct.is_some();
        let direct = open_direct(file.path());
        assert!(!has_direct(LOOK_MIN_BYTES - 1));
        assert_eq!(has_direct(LOOK_MIN_BYTES), direct.is_some());
        assert!(open(LOOK_MIN_BYTES, CachePolicy::Keep).direct.is_none());
    }

    #[test]
    fn a_file_read_with_keep_is_in_the_page_cache_afterwards() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; DIRECT_MIN_BYTES as usize]).unwrap();
        file.as_file().sync_all().unwrap();
        advise(file.as_file(), AccessAdvice::DontNeed);
        let size = DIRECT_MIN_BYTES as usize;
        if is_cached(file.as_file(), size) {
            return; // a file system in memory
        }
        let kept = DataReader::open(file.path(), DIRECT_MIN_BYTES, CachePolicy::Keep).unwrap();
        let mut read = vec![0; size];
        let mut own = ReaderState::default();
        kept.read_exact_at(&mut read, 0, &mut own).unwrap();
        if cfg!(target_os = "linux") {
            assert!(own.file.is_some(), "no description of its own");
        }
        assert!(read.iter().all(|&byte| byte == 7));
        assert!(is_cached(file.as_file(), size));
    }
}
