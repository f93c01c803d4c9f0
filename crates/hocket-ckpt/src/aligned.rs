//! Memory for disks that are read and written past the page cache.

use std::alloc::{Layout as Allocation, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::error::{CkptError, Result};
use crate::safetensors::ALIGNMENT;

/// Bytes of a buffer.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// A page-aligned buffer, which `O_DIRECT` asks for.
pub(crate) struct Buffer(NonNull<u8>);

// SAFETY: it owns its memory alone, as a box does.
unsafe impl Send for Buffer {}

impl Buffer {
    const ALLOCATION: Allocation =
        match Allocation::from_size_align(BUFFER_BYTES, ALIGNMENT as usize) {
            Ok(allocation) => allocation,
            Err(_) => unreachable!(),
        };

    pub(crate) fn new() -> Result<Self> {
        // SAFETY: the allocation has a size that is not 0.
        let pointer = unsafe { alloc_zeroed(Self::ALLOCATION) };
        NonNull::new(pointer)
            .map(Self)
            .ok_or_else(|| CkptError::process(format!("no {BUFFER_BYTES} bytes for a buffer")))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised, and borrowed with self.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), BUFFER_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, initialised, and borrowed alone with self.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), BUFFER_BYTES) }
    }

    /// The first `length` bytes, and zeros behind them up to the end of a page.
    pub(crate) fn padded(&mut self, length: usize) -> &[u8] {
        let end = length.next_multiple_of(ALIGNMENT as usize);
        let bytes = &mut self.bytes_mut()[..end];
        bytes[length..].fill(0);
        bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with the same layout.
        unsafe { dealloc(self.0.as_ptr(), Self::ALLOCATION) }
    }
}
