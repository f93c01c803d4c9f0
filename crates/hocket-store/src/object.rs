//! Reads of one object, all of the same version (ETag).

use crate::connect::backend;
use crate::error::{Result, StoreError};
use crate::values::handle::StoreHandle;
use crate::values::keys::check_key;
use crate::values::meta::ObjectMeta;
use crate::values::pin::VersionPin;
use bytes::Bytes;
use std::ops::Range;
use std::path::Path;

/// A handle on one object, created by [`Store::object`](crate::Store::object) without a request. The first response
/// pins the version; every later read through it or its clones that meets another version fails with
/// [`StoreError::Changed`].
#[derive(Debug, Clone)]
pub struct Object {
    handle: StoreHandle,
    key: String,
    pin: VersionPin,
}

impl Object {
    pub(crate) fn new(handle: &StoreHandle, key: &str) -> Self {
        Self {
            handle: handle.clone(),
            key: key.to_owned(),
            pin: VersionPin::default(),
        }
    }

    /// Returns the object's full URI.
    pub fn uri(&self) -> String {
        self.handle.object_uri(&self.key)
    }

    /// Returns the object's key in the store.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the size of the pinned version in bytes; `None` before the first read.
    pub fn size(&self) -> Option<u64> {
        self.pin.seen().map(|seen| seen.size)
    }

    /// Returns the time of the pinned version in milliseconds since 1970; `None` before the first read.
    pub fn modified_ms(&self) -> Option<i64> {
        self.pin.seen().map(|seen| seen.modified_ms)
    }

    /// Returns the ETag of the pinned version; `None` before the first read.
    pub fn etag(&self) -> Option<&str> {
        self.pin.seen().and_then(|seen| seen.etag.as_deref())
    }

    /// Reads the object as [`Store::get`](crate::Store::get) does. If `size` is given, an object of another size is
    /// rejected after its first part.
    ///
    /// # Errors
    /// As [`Store::get`](crate::Store::get); [`StoreError::Size`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the requests; the same holds for the other reads.
    pub async fn get(&self, size: Option<u64>) -> Result<Bytes> {
        check_key(self.handle.uri(), &self.key)?;
        let (backend, pin) = (backend(&self.handle).await?, self.pin.clone());
        backend.get(&self.key, pin, size).await
    }

    /// Reads ranges as [`Store::get_ranges`](crate::Store::get_ranges) does.
    ///
    /// # Errors
    /// As [`Store::get_ranges`](crate::Store::get_ranges).
    pub async fn get_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        check_key(self.handle.uri(), &self.key)?;
        if let Some(range) = ranges.iter().find(|range| range.start > range.end) {
            let (start, end) = (range.start, range.end);
            return Err(StoreError::config(format!(
                "range {start}..{end} of `{}` ends before it starts",
                self.uri()
            )));
        }
        let (backend, pin) = (backend(&self.handle).await?, self.pin.clone());
        backend.get_ranges(&self.key, pin, ranges).await
    }

    /// Downloads the object as [`Store::download`](crate::Store::download) does.
    ///
    /// # Errors
    /// As [`Store::download`](crate::Store::download).
    pub async fn download(&self, path: &Path, size: Option<u64>) -> Result<ObjectMeta> {
        check_key(self.handle.uri(), &self.key)?;
        let (backend, pin) = (backend(&self.handle).await?, self.pin.clone());
        backend.download(&self.key, pin, path, size).await
    }
}
