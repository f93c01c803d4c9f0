//! Reads of one object, all of the same version (ETag).

use crate::error::{Result, StoreError};
use crate::meta::ObjectMeta;
use crate::store::{Backend, Store};
use crate::uri::check_key;
use crate::{local, read};
use bytes::Bytes;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A handle on one object, created by [`Store::object`] without a request. The first response pins the version;
/// every later read through it or its clones that meets another version fails with [`StoreError::Changed`].
#[derive(Debug, Clone)]
pub struct Object {
    store: Store,
    key: String,
    pin: Pin,
}

impl Object {
    pub(crate) fn new(store: &Store, key: &str) -> Self {
        Self {
            store: store.clone(),
            key: key.to_owned(),
            pin: Pin::default(),
        }
    }

    /// Returns the object's full URI.
    pub fn uri(&self) -> String {
        self.store.object_uri(&self.key)
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

    /// Reads the object as [`Store::get`] does. If `size` is given, an object of another size is rejected after
    /// its first part.
    ///
    /// # Errors
    /// As [`Store::get`]; [`StoreError::Size`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the requests; the same holds for the other reads.
    pub async fn get(&self, size: Option<u64>) -> Result<Bytes> {
        check_key(self.store.uri(), &self.key)?;
        let (store, key, pin) = self.parts();
        match store.backend().await? {
            Backend::Local => local::get(store, key, pin, size).await,
            Backend::Remote(remote) => {
                read::Source::new(&store, &key, remote, pin)?
                    .get(size)
                    .await
            }
        }
    }

    /// Reads ranges as [`Store::get_ranges`] does.
    ///
    /// # Errors
    /// As [`Store::get_ranges`].
    pub async fn get_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        check_key(self.store.uri(), &self.key)?;
        if let Some(range) = ranges.iter().find(|range| range.start > range.end) {
            let (start, end) = (range.start, range.end);
            return Err(StoreError::config(format!(
                "range {start}..{end} of `{}` ends before it starts",
                self.uri()
            )));
        }
        let (store, key, pin) = self.parts();
        match store.backend().await? {
            Backend::Local => local::get_ranges(store, key, pin, ranges.to_vec()).await,
            Backend::Remote(remote) => {
                read::Source::new(&store, &key, remote, pin)?
                    .get_ranges(ranges)
                    .await
            }
        }
    }

    /// Downloads the object as [`Store::download`] does.
    ///
    /// # Errors
    /// As [`Store::download`].
    pub async fn download(&self, path: &Path, size: Option<u64>) -> Result<ObjectMeta> {
        check_key(self.store.uri(), &self.key)?;
        let (store, key, pin) = self.parts();
        match store.backend().await? {
            Backend::Local => local::download(store, key, pin, path.to_owned(), size).await,
            Backend::Remote(remote) => {
                read::Source::new(&store, &key, remote, pin)?
                    .download(path, size)
                    .await
            }
        }
    }

    fn parts(&self) -> (Store, String, Pin) {
        (self.store.clone(), self.key.clone(), self.pin.clone())
    }
}

/// The version set by the first response, shared between clones.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pin(Arc<OnceLock<Seen>>);

/// The attributes that distinguish two versions.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) etag: Option<String>,
    pub(crate) size: u64,
    modified_ms: i64,
}

impl Pin {
    pub(crate) fn seen(&self) -> Option<&Seen> {
        self.0.get()
    }

    /// Pins the version of the first response, and rejects a response of any other version.
    pub(crate) fn check(&self, uri: String, meta: &ObjectMeta) -> Result<()> {
        let seen = self.0.get_or_init(|| Seen {
            etag: meta.etag.clone(),
            size: meta.size,
            modified_ms: meta.modified_ms,
        });
        // Plain HTTP servers may omit ETags; the modification time is the fallback.
        let is_same_time = meta.etag.is_some() || seen.modified_ms == meta.modified_ms;
        if seen.etag == meta.etag && seen.size == meta.size && is_same_time {
            return Ok(());
        }
        let text = |etag: &Option<String>, size| {
            let size = || format!("({size} bytes)");
            etag.clone().unwrap_or_else(size)
        };
        Err(StoreError::Changed {
            uri,
            expected: text(&seen.etag, seen.size),
            actual: text(&meta.etag, meta.size),
        })
    }
}
