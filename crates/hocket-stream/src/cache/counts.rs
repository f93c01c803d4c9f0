//! What a cache did, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use hocket_store::Counts;

/// Counts that only grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: AtomicU64,
    pub(super) fetches: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) passed: AtomicU64,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Files of shards that were here when they were opened.
    pub hits: u64,
    /// Files fetched from the remote, those fetched again included.
    pub fetches: u64,
    /// Bytes of these.
    pub fetched_bytes: u64,
    /// Files held in memory because the limit left no room.
    pub passed: u64,
    /// Requests to the remote, tries again included; none where that is a folder.
    pub requests: u64,
    /// Requests that were made again because one before had failed.
    pub retries: u64,
}

impl Counters {
    pub(super) fn fetched(&self, bytes: u64) {
        self.fetches.fetch_add(1, Ordering::Relaxed);
        self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The counts now, with those of the remote.
    pub(super) fn now(&self, remote: Counts) -> CacheCounts {
        CacheCounts {
            hits: self.hits.load(Ordering::Relaxed),
            fetches: self.fetches.load(Ordering::Relaxed),
            fetched_bytes: self.fetched_bytes.load(Ordering::Relaxed),
            passed: self.passed.load(Ordering::Relaxed),
            requests: remote.requests,
            retries: remote.retries,
        }
    }
}
