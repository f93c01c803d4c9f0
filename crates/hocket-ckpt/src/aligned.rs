//! Page-aligned buffers for direct I/O.

use std::alloc::{Layout as Allocation, alloc, dealloc};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Mutex;

use hocket_store::memory::prefer_huge_pages;

use crate::error::{CkptError, Result};
use crate::safetensors::ALIGNMENT;

/// Size of a buffer in bytes.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;

/// Number of free buffers kept for reuse: the first access to new memory costs as much as filling it.
const MOST_KEPT: usize = 16;

/// Only locked with `try_lock`: a child forked while another thread holds the lock would block forever.
static KEPT: Mutex<Vec<Pages>> = Mutex::new(Vec::new());

/// A page-aligned buffer, as `O_DIRECT` requires. It contains the data of its previous use.
pub(crate) struct Buffer(Pages);

/// Initialized memory of [`Buffer::ALLOCATION`].
struct Pages(NonNull<u8>);

// SAFETY: it owns its memory exclusively, as a box does.
unsafe impl Send for Pages {}

impl Buffer {
    // Aligned for huge pages, which the kernel may provide, and therefore also for small pages.
    const ALLOCATION: Allocation = match Allocation::from_size_align(BUFFER_BYTES, 2 << 20) {
        Ok(allocation) => allocation,
        Err(_) => unreachable!(),
    };

    pub(crate) fn new() -> Result<Self> {
        if let Some(pages) = KEPT.try_lock().ok().and_then(|mut kept| kept.pop()) {
            return Ok(Self(pages));
        }
        // SAFETY: the size of the allocation is not 0.
        let pointer = unsafe { alloc(Self::ALLOCATION) };
        let pointer = NonNull::new(pointer)
            .ok_or_else(|| CkptError::process(format!("no {BUFFER_BYTES} bytes for a buffer")))?;
        // SAFETY: allocated with this length and not shared; any contents are valid as uninitialized memory.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(pointer.as_ptr().cast::<MaybeUninit<u8>>(), BUFFER_BYTES)
        };
        prefer_huge_pages(memory);
        memory.fill(MaybeUninit::new(0));
        Ok(Self(Pages(pointer)))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialized, and borrowed with self.
        unsafe { std::slice::from_raw_parts(self.0.0.as_ptr(), BUFFER_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, initialized, and borrowed exclusively with self.
        unsafe { std::slice::from_raw_parts_mut(self.0.0.as_ptr(), BUFFER_BYTES) }
    }

    /// Returns the first `length` bytes, padded with zeros to the end of a page.
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
