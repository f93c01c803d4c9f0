//! The version of a data set's index in a store.

use xxhash_rust::xxh3::xxh3_64;

/// The version of an index in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexVersion {
    /// Time of the index in milliseconds since 1970, by the store's clock.
    pub(crate) modified_ms: i64,
    /// A hash of its ETag; 0 if there is none or it is unknown.
    pub(crate) etag_hash: u64,
}

impl IndexVersion {
    /// Returns the version of an object with this time and ETag.
    pub(crate) fn new(modified_ms: i64, etag: Option<&str>) -> Self {
        Self {
            modified_ms,
            etag_hash: etag.map_or(0, |etag| xxh3_64(etag.as_bytes())),
        }
    }

    /// Returns whether the two versions cannot be distinguished.
    pub(crate) fn is_like(self, other: Self) -> bool {
        let is_etag_known = self.etag_hash != 0 && other.etag_hash != 0;
        self.modified_ms == other.modified_ms
            && (!is_etag_known || self.etag_hash == other.etag_hash)
    }
}
