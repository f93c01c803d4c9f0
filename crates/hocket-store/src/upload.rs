//! Streaming writes: multipart uploads with several parts in flight, or a hidden local file.

use crate::backend::Writer;
use crate::error::Result;
use crate::values::meta::ObjectMeta;
use bytes::Bytes;

/// A write in progress. Nothing is visible under the key before [`finish`](Self::finish); dropping or aborting
/// the upload leaves the existing object unchanged. An upload is only valid in the process that started it.
pub struct Upload {
    uri: String,
    size: u64,
    writer: Box<dyn Writer>,
}

impl Upload {
    pub(crate) fn new(uri: String, writer: Box<dyn Writer>) -> Self {
        let size = 0;
        Self { uri, size, writer }
    }

    /// Appends `data`; returns once the budget has room for more.
    ///
    /// # Errors
    /// The error of any earlier part; the upload is then unusable.
    ///
    /// # Cancel safety
    /// Not cancel safe: after a dropped `write` the upload can only be aborted.
    pub async fn write(&mut self, data: Bytes) -> Result<()> {
        self.size += data.len() as u64;
        self.writer.write(data).await
    }

    /// Makes the complete object visible under its key.
    ///
    /// Returns its size and ETag; `modified_ms` is this machine's clock for remote stores.
    ///
    /// # Errors
    /// As [`Store::put`](crate::Store::put) without a condition.
    pub async fn finish(mut self) -> Result<ObjectMeta> {
        self.writer.finish(self.size).await
    }

    /// Aborts the upload, and waits until the store has discarded its parts.
    ///
    /// # Errors
    /// As [`Store::delete`](crate::Store::delete). Dropping the upload does the same without waiting.
    pub async fn abort(mut self) -> Result<()> {
        self.writer.abort().await
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload")
            .field("uri", &self.uri)
            .field("size", &self.size)
            .finish()
    }
}
