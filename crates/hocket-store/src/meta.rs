//! What a store tells of its objects, and on which condition it writes one.

use crate::error::{Result, StoreError};

/// One object of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// The key, below the store's own prefix.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// The entity tag, as the store writes it (S3: with its quotes); it changes whenever the object does.
    pub etag: Option<String>,
    /// Last change, in milliseconds since 1970 (UTC).
    pub modified_ms: i64,
}

impl ObjectMeta {
    /// Refuses another size than the `expected` one, if one is.
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
pub struct Listing {
    /// Keys of the "directories", without a slash at the end, sorted; below the store's own prefix.
    pub dirs: Vec<String>,
    /// The objects, sorted by key.
    pub objects: Vec<ObjectMeta>,
}

/// On which condition an object is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PutMode {
    /// On none.
    Overwrite,
    /// Only if the key is free.
    Create,
    /// Only if the object still has this ETag.
    Match(String),
}
