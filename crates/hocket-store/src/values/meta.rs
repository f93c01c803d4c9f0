//! Object metadata, listings, unfinished uploads and write conditions.

use crate::error::{Result, StoreError};

/// The metadata of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// The key, below the store's own prefix.
    pub key: String,
    /// Size in bytes.
    pub size: u64,
    /// The entity tag as the store returns it (on S3 with quotes). It changes with every write of the object.
    pub etag: Option<String>,
    /// Last change, in milliseconds since 1970 (UTC).
    pub modified_ms: i64,
}

impl ObjectMeta {
    /// Returns an error if `expected` is given and differs from the object's size.
    pub(crate) fn check_size(&self, uri: String, expected: Option<u64>) -> Result<()> {
        match expected.filter(|&expected| expected != self.size) {
            None => Ok(()),
            Some(expected) => Err(StoreError::Size {
                uri,
                expected,
                actual: self.size,
            }),
        }
    }
}

/// One level of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LevelListing {
    /// Keys of the "directories" below the store's own prefix, without a trailing slash, sorted.
    pub dirs: Vec<String>,
    /// The objects, sorted by key.
    pub objects: Vec<ObjectMeta>,
}

/// The condition of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutMode {
    /// Unconditional.
    Overwrite,
    /// Only if the key does not exist.
    Create,
    /// Only if the object still has this ETag.
    Match(String),
}

/// A multipart upload that was neither completed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenUpload {
    /// The key of its object, below the store's own prefix.
    pub key: String,
    /// The store's upload id.
    pub id: String,
    /// Start time in milliseconds since 1970 (UTC).
    pub initiated_ms: i64,
}
