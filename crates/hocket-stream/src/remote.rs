//! Where shards come from: a data set's folder in an object store.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use hocket_store::{Counts, Object, Store, StoreError, StoreOptions, runtime};

use crate::error::{Result, StreamError};

/// The remote side of a data set. A handle: it may cross a fork.
#[derive(Clone)]
pub struct Remote {
    store: Store,
}

impl Remote {
    /// The data set at `uri`; no request is made.
    ///
    /// # Errors
    /// [`StreamError::Store`] for a URI or options that the store does not take.
    pub fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        Ok(Self {
            store: Store::open(uri, options)?,
        })
    }

    /// Where it is.
    pub fn uri(&self) -> &str {
        self.store.uri()
    }

    /// The requests made of it.
    pub fn counts(&self) -> Counts {
        self.store.counts()
    }

    /// One of its objects; reads of it are all of one version. No request is made.
    pub fn object(&self, key: &str) -> Object {
        self.store.object(key)
    }
}

/// An object's bytes, or `None` where there is none. Blocks.
///
/// # Errors
/// The store's errors; [`StreamError::ShardCorrupt`] where it has another size than `bytes`, of which no more than
/// the first part is fetched; [`StreamError::Closed`] once `interrupted` says so.
pub fn get(
    object: &Object,
    bytes: Option<u64>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Vec<u8>>> {
    let handle = object.clone();
    let answer = runtime::wait(async move { handle.get(bytes).await }, interrupted);
    let data = settle(object.key(), answer)?;
    Ok(data.map(Vec::from))
}

/// Ranges of an object, near ones in one request, or `None` where there is none. Blocks.
///
/// # Errors
/// As [`get`].
pub fn get_ranges(
    object: &Object,
    ranges: &[Range<u64>],
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Vec<Bytes>>> {
    let (handle, ranges) = (object.clone(), ranges.to_owned());
    let answer = async move { handle.get_ranges(&ranges).await };
    settle(object.key(), runtime::wait(answer, interrupted))
}

/// Writes an object, which should have `bytes`, into the file `into`; whether there is one. Blocks.
///
/// # Errors
/// As [`get`]; [`StreamError::Io`] where the disk refuses.
pub fn download(object: &Object, bytes: u64, into: &Path, stop: &AtomicBool) -> Result<bool> {
    let (handle, target) = (object.clone(), into.to_owned());
    let download = async move { handle.download(&target, Some(bytes)).await };
    let answer = runtime::wait(download, &|| stop.load(Ordering::Relaxed));
    match settle(object.key(), answer) {
        // The disk's refusal and not the store's.
        Err(StreamError::Store(StoreError::Io { uri, reason })) if Path::new(&uri) == into => {
            Err(StreamError::Io { path: uri, reason })
        }
        other => Ok(other?.is_some()),
    }
}

/// Takes absence out of the errors, since who asked says better what is missing, and says of another size that the
/// shard is another one.
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
