//! The remote of a data set: its folder in an object store.

use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use hocket_store::{
    CounterSnapshot, Interrupted, Object, Store, StoreError, StoreOptions, runtime,
};

use crate::error::{Result, StreamError};
use crate::index::version::IndexVersion;
use crate::shard::info::INDEX_NAME;

/// A handle on the remote of a data set. It may be kept across a fork.
#[derive(Clone)]
pub struct DatasetRemote {
    store: Store,
}

impl DatasetRemote {
    /// Opens the data set at `uri`; makes no request.
    ///
    /// # Errors
    /// [`StreamError::Store`] for an invalid URI or invalid options.
    pub fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        Ok(Self {
            store: Store::open(uri, options)?,
        })
    }

    /// Returns the URI.
    pub fn uri(&self) -> &str {
        self.store.uri()
    }

    /// Returns the counts of requests.
    pub fn counts(&self) -> CounterSnapshot {
        self.store.counts()
    }

    /// Returns the current version of the index; none if there is no index. Blocks.
    ///
    /// # Errors
    /// The store's errors; [`StreamError::Closed`] once `interrupted` returns true.
    pub(crate) fn index_version(
        &self,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<IndexVersion>> {
        let store = self.store.clone();
        let answer = runtime::wait(async move { store.head(INDEX_NAME).await }, interrupted);
        let meta = settle(INDEX_NAME, answer)?;
        Ok(meta.map(|meta| IndexVersion::new(meta.modified_ms, meta.etag.as_deref())))
    }

    /// Returns a handle on one object, whose reads all have the same version. Makes no request.
    pub fn object(&self, key: &str) -> Object {
        self.store.object(key)
    }
}

/// Reads an object; returns none if it does not exist. Blocks.
///
/// # Errors
/// The store's errors; [`StreamError::ShardCorrupt`] if its size is not `bytes`, after at most the first part
/// was fetched; [`StreamError::Closed`] once `interrupted` returns true.
pub fn get(
    object: &Object,
    bytes: Option<u64>,
    interrupted: Interrupted<'_>,
) -> Result<Option<Vec<u8>>> {
    let handle = object.clone();
    let answer = runtime::wait(async move { handle.get(bytes).await }, interrupted);
    let data = settle(object.key(), answer)?;
    Ok(data.map(Vec::from))
}

/// Reads ranges of an object, with nearby ones in one request; returns none if it does not exist. Blocks.
///
/// # Errors
/// As [`get`].
pub fn get_ranges(
    object: &Object,
    ranges: &[Range<u64>],
    interrupted: Interrupted<'_>,
) -> Result<Option<Vec<Bytes>>> {
    let (handle, ranges) = (object.clone(), ranges.to_owned());
    let answer = async move { handle.get_ranges(&ranges).await };
    settle(object.key(), runtime::wait(answer, interrupted))
}

/// Writes an object of `bytes` bytes to the file `into`; returns whether the object exists. Blocks.
///
/// # Errors
/// As [`get`]; [`StreamError::Io`] if the disk reports an error.
pub fn download(
    object: &Object,
    bytes: u64,
    into: &Path,
    interrupted: Interrupted<'_>,
) -> Result<bool> {
    let (handle, target) = (object.clone(), into.to_owned());
    let download = async move { handle.download(&target, Some(bytes)).await };
    let answer = runtime::wait(download, interrupted);
    match settle(object.key(), answer) {
        // An error of the disk, not of the store.
        Err(StreamError::Store(StoreError::Io { uri, reason })) if Path::new(&uri) == into => {
            Err(StreamError::Io { path: uri, reason })
        }
        other => Ok(other?.is_some()),
    }
}

/// Maps a missing object to none, because the caller can describe it better, and a wrong size to a corrupt
/// shard.
fn settle<T>(
    key: &str,
    answer: hocket_store::Result<hocket_store::Result<T>>,
) -> Result<Option<T>> {
    match answer.and_then(|inner| inner) {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(StoreError::Interrupted) => Err(StreamError::Closed),
        Err(StoreError::Size {
            uri,
            expected,
            actual,
        }) => Err(StreamError::ShardCorrupt {
            shard: key.to_owned(),
            object: uri,
            expected: format!("{expected} bytes"),
            actual: format!("{actual} bytes"),
        }),
        Err(error) => Err(error.into()),
    }
}
