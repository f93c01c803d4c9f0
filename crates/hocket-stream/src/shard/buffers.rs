//! Memory pools for batches and shards.
//!
//! The first access to a new page costs the kernel more than the copy into it. The memory of a batch that its
//! consumer has dropped is therefore reused for a later batch, and that of a written shard for the next shard.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, TryLockError, Weak};

use hocket_store::memory::prefer_huge_pages;

/// Limit of free buffers kept; more are free only if a consumer drops many batches at once.
const MOST_KEPT: usize = 4;

/// A memory pool for the batches of one column, or for the shards of one writer.
#[derive(Debug, Default)]
pub struct BufferPool {
    kept: Mutex<Vec<Vec<u8>>>,
}

impl BufferPool {
    /// Returns an empty buffer with a capacity of `bytes`, reused or new.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let kept = self.kept.try_lock().ok().and_then(|mut kept| kept.pop());
        let mut kept = kept.unwrap_or_default();
        if kept.capacity() < bytes {
            kept.reserve_exact(bytes);
            prefer_huge_pages(kept.spare_capacity_mut());
        }
        Buffer {
            bytes: kept,
            home: Arc::downgrade(self),
        }
    }

    fn give_back(&self, mut bytes: Vec<u8>) {
        // Never blocks: a forked child may have inherited a lock that no thread there will release.
        match self.kept.try_lock() {
            Ok(mut kept) if kept.len() < MOST_KEPT => {
                bytes.clear();
                kept.push(bytes);
            }
            Ok(_) | Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
        }
    }
}

/// Bytes that return to their pool when dropped, if the pool still exists.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    home: Weak<BufferPool>,
}

impl From<Vec<u8>> for Buffer {
    /// Wraps memory that belongs to no pool.
    fn from(bytes: Vec<u8>) -> Self {
        let home = Weak::new();
        Self { bytes, home }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for Buffer {
    type Target = Vec<u8>;
    fn deref(&self) -> &Vec<u8> {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.give_back(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_and_returned_empty() {
        let buffers = Arc::new(BufferPool::default());
        let mut first = buffers.take(1000);
        first.extend_from_slice(&[7; 1000]);
        let place = first.as_ptr();
        let other = buffers.take(1000);
        assert_ne!(other.as_ptr(), place);
        drop(first);
        let again = buffers.take(10);
        assert_eq!((again.as_ptr(), again.len()), (place, 0));
    }

    #[test]
    fn only_a_few_buffers_are_kept_and_none_after_the_reader() {
        let buffers = Arc::new(BufferPool::default());
        let taken: Vec<Buffer> = (0..3 * MOST_KEPT).map(|_| buffers.take(10)).collect();
        drop(taken);
        assert_eq!(
            buffers.kept.lock().map(|kept| kept.len()).ok(),
            Some(MOST_KEPT)
        );
        let buffer = buffers.take(10);
        drop(buffers);
        assert!(buffer.home.upgrade().is_none());
    }
}
