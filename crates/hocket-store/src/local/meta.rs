//! The object metadata derived from a local file, and the errors of writes.

use crate::error::{Result, StoreError};
use crate::values::meta::ObjectMeta;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;

pub(crate) fn describe(key: &str, uri: &str, metadata: &Metadata) -> Result<ObjectMeta> {
    if !metadata.is_file() {
        return Err(StoreError::NotFound {
            uri: uri.to_owned(),
        });
    }
    Ok(ObjectMeta {
        key: key.to_owned(),
        size: metadata.len(),
        etag: Some(etag(metadata)),
        modified_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
    })
}

/// Derives an ETag from the inode, modification time and size.
pub(crate) fn etag(metadata: &Metadata) -> String {
    let time_ns = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    format!("{:x}-{time_ns:x}-{:x}", metadata.ino(), metadata.len())
}

/// Maps the error of a write. It is never `NotFound`, because the object need not exist.
pub(crate) fn write_error(uri: &str, doing: &str, error: &io::Error) -> StoreError {
    match StoreError::from_io(uri, doing, error) {
        StoreError::NotFound { uri } => StoreError::io(uri, format!("{doing}: {error}")),
        other => other,
    }
}
