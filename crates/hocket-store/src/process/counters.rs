//! Counters of requests and bytes, per process and per handle.

use crate::process::table;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Monotonic counters. Memory stores and local files make no requests and are not counted.
#[derive(Debug, Default)]
pub(crate) struct RequestCounters {
    requests: AtomicU64,
    retries: AtomicU64,
    bytes_received: AtomicU64,
    bytes_sent: AtomicU64,
}

/// A snapshot of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CounterSnapshot {
    /// Requests made, including retries.
    pub requests: u64,
    /// Requests repeated after a failed attempt.
    pub retries: u64,
    /// Object bytes received, including those of truncated responses.
    pub bytes_received: u64,
    /// Object bytes passed to the client for sending, including those sent again.
    pub bytes_sent: u64,
}

impl RequestCounters {
    /// Counts a request that carries `bytes`; `is_again` marks a retry.
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

    /// Returns a snapshot.
    pub(crate) fn now(&self) -> CounterSnapshot {
        CounterSnapshot {
            requests: self.requests.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            bytes_received: self.bytes_received.load(Ordering::Relaxed),
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
        }
    }
}

/// Returns the process's counters.
pub(crate) fn of_process() -> Arc<RequestCounters> {
    table::with(|counters: &mut Arc<RequestCounters>| Arc::clone(counters))
}

/// Returns the counts of this process over all stores, since it started or was forked.
pub fn counts() -> CounterSnapshot {
    of_process().now()
}
