//! What was done, in numbers: for the whole process, and for each handle.

use crate::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts that only grow. Memory and local files make no requests and are not counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    requests: AtomicU64,
    retries: AtomicU64,
    bytes_received: AtomicU64,
    bytes_sent: AtomicU64,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests made, tries again included.
    pub requests: u64,
    /// Requests that were made again because one before had failed.
    pub retries: u64,
    /// Bytes of objects received, those of broken answers included.
    pub bytes_received: u64,
    /// Bytes of objects handed over for sending, those sent again included.
    pub bytes_sent: u64,
}

impl Counters {
    /// Counts a request that carries `bytes`, and whether it is one that failed before.
    pub(crate) fn request(&self, bytes: u64, is_again: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.retries
            .fetch_add(u64::from(is_again), Ordering::Relaxed);
        self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that arrived.
    pub(crate) fn received(&self, bytes: u64) {
        self.bytes_received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The counts now.
    pub(crate) fn now(&self) -> Counts {
        Counts {
            requests: self.requests.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
        }
    }
}

/// The counts of this process: of all stores since it began, or since it was forked.
pub fn counts() -> Counts {
    process::counters().now()
}

/// Bytes in flight in this process now, and the most there ever were.
pub fn bytes_in_flight() -> (u64, u64) {
    process::budget().now()
}
