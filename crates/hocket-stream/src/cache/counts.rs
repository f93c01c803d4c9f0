//! Counters of a cache.

use std::sync::atomic::{AtomicU64, Ordering};

use hocket_store::CounterSnapshot;

/// Monotonic counters.
#[derive(Debug, Default)]
pub(super) struct CacheCounters {
    pub(super) hits: AtomicU64,
    pub(super) fetches: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) passed: AtomicU64,
}

/// A snapshot of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Shard files found locally when they were opened.
    pub hits: u64,
    /// Files fetched from the remote, including repeated fetches.
    pub fetches: u64,
    /// Bytes of these files.
    pub fetched_bytes: u64,
    /// Files held in memory because the limit left no room.
    pub passed: u64,
    /// Requests to the remote, including retries; 0 if the remote is a folder.
    pub requests: u64,
    /// Requests repeated after a failed attempt.
    pub retries: u64,
}

impl CacheCounters {
    pub(super) fn fetched(&self, bytes: u64) {
        self.fetches.fetch_add(1, Ordering::Relaxed);
        self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns a snapshot that includes the counts of the remote.
    pub(super) fn now(&self, remote: CounterSnapshot) -> CacheCounts {
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
