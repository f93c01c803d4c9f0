//! Page-aligned buffers for direct I/O.

use super::direct::PAGE_BYTES;
use memmap2::MmapMut;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

/// Size of a buffer in bytes.
pub const BUFFER_BYTES: usize = 4 << 20;

/// The kernel may back an aligned range of this size with one huge page, whose first access costs a fraction of
/// that of small pages of the same total size.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Number of free buffers kept for reuse: the first access to new memory costs as much as filling it.
const MOST_KEPT: usize = 16;

/// Only locked with `try_lock`: a child forked while another thread holds the lock would block forever.
static KEPT: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

/// A page-aligned buffer, as direct I/O requires. It contains the data of its previous use.
pub struct PageBuffer(Option<MmapMut>);

impl PageBuffer {
    /// Returns a reused or a new buffer.
    ///
    /// # Errors
    /// `OutOfMemory` if the system has no memory.
    pub fn new() -> io::Result<Self> {
        if let Some(pages) = KEPT.try_lock().ok().and_then(|mut kept| kept.pop()) {
            return Ok(Self(Some(pages)));
        }
        // Untouched pages take no memory, so the bytes beside the aligned range cost nothing.
        let pages = MmapMut::map_anon(BUFFER_BYTES + HUGE_PAGE_BYTES).map_err(|error| {
            let reason = format!("cannot allocate a buffer of {BUFFER_BYTES} bytes: {error}");
            io::Error::new(io::ErrorKind::OutOfMemory, reason)
        })?;
        // Only a hint: other systems choose the size of pages themselves.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        Ok(Self(Some(pages)))
    }

    /// Returns all bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Some(pages) => &pages[aligned(pages)],
            None => &[],
        }
    }

    /// Returns all bytes of the buffer.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Some(pages) => {
                let range = aligned(pages);
                &mut pages[range]
            }
            None => &mut [],
        }
    }

    /// Returns the first `length` bytes, padded with zeros to the end of a page.
    pub fn padded(&mut self, length: usize) -> &[u8] {
        let end = length.next_multiple_of(PAGE_BYTES);
        let bytes = &mut self.bytes_mut()[..end];
        bytes[length..].fill(0);
        bytes
    }
}

/// Returns the range of the buffer within `pages`; it starts at the boundary of a huge page.
fn aligned(pages: &[u8]) -> Range<usize> {
    let start = pages.as_ptr().align_offset(HUGE_PAGE_BYTES);
    start..start + BUFFER_BYTES
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        if let Ok(mut kept) = KEPT.try_lock()
            && kept.len() < MOST_KEPT
        {
            kept.extend(self.0.take());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_buffer_begins_at_a_page_and_is_padded_with_zeros() {
        let mut buffer = PageBuffer::new().unwrap();
        assert_eq!(buffer.bytes().len(), BUFFER_BYTES);
        assert_eq!(buffer.bytes().as_ptr().align_offset(PAGE_BYTES), 0);
        buffer.bytes_mut().fill(7);
        let padded = buffer.padded(PAGE_BYTES + 1);
        assert_eq!(padded.len(), 2 * PAGE_BYTES);
        assert!(padded[..=PAGE_BYTES].iter().all(|&byte| byte == 7));
        assert!(padded[PAGE_BYTES + 1..].iter().all(|&byte| byte == 0));
        assert!(
            buffer
                .padded(BUFFER_BYTES)
                .iter()
                .rev()
                .take(9)
                .all(|&byte| byte == 7)
        );
    }
}
