//! Memory for disks that are read and written past the page cache.

use std::alloc::{Layout as Allocation, alloc, dealloc};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Mutex;

use hocket_store::memory::prefer_huge_pages;

use crate::error::{CkptError, Result};
use crate::safetensors::ALIGNMENT;

/// Bytes of a buffer.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// Buffers that wait for the next read or write: to touch fresh memory costs as much as to fill it.
const MOST_KEPT: usize = 16;

/// Never waited for, lest a child that was forked while another thread had it waits for ever.
static KEPT: Mutex<Vec<Pages>> = Mutex::new(Vec::new());

/// A page-aligned buffer, which `O_DIRECT` asks for. It holds what the last user left in it.
pub(crate) struct Buffer(Pages);

/// Initialised memory of [`Buffer::ALLOCATION`].
struct Pages(NonNull<u8>);

// SAFETY: it owns its memory alone, as a box does.
unsafe impl Send for Pages {}

impl Buffer {
    // Huge pages, where the kernel gives them, and so whole small ones.
    const ALLOCATION: Allocation = match Allocation::from_size_align(BUFFER_BYTES, 2 << 20) {
        Ok(allocation) => allocation,
        Err(_) => unreachable!(),
    };

    pub(crate) fn new() -> Result<Self> {
        if let Some(pages) = KEPT.try_lock().ok().and_then(|mut kept| kept.pop()) {
            return Ok(Self(pages));
        }
        // SAFETY: the allocation has a size that is not 0.
        let pointer = unsafe { alloc(Self::ALLOCATION) };
        let pointer = NonNull::new(pointer)
            .ok_or_else(|| CkptError::process(format!("no {BUFFER_BYTES} bytes for a buffer")))?;
        // SAFETY: allocated with this length, and nobody else's; memory of any contents may be uninitialised.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(pointer.as_ptr().cast::<MaybeUninit<u8>>(), BUFFER_BYTES)
        };
        prefer_huge_pages(memory);
        memory.fill(MaybeUninit::new(0));
        Ok(Self(Pages(pointer)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised, and borrowed with self.
        unsafe { std::slice::from_raw_parts(self.0.0.as_ptr(), BUFFER_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, initialised, and borrowed alone with self.
        unsafe { std::slice::from_raw_parts_mut(self.0.0.as_ptr(), BUFFER_BYTES) }
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
        if let Ok(mut kept) = KEPT.try_lock()
            && kept.len() < MOST_KEPT
        {
            kept.push(Pages(self.0.0));
            return;
        }
        // SAFETY: allocated by `new` with the same layout.
        unsafe { dealloc(self.0.0.as_ptr(), Self::ALLOCATION) }
    }
}
