//! The interface implemented by stores of local files and by remote stores.

use crate::error::Result;
use crate::values::meta::{LevelListing, ObjectMeta, OpenUpload, PutMode};
use crate::values::pin::VersionPin;
use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::path::Path;

/// The implementation behind a handle in this process. The caller has checked keys and prefixes, and that the
/// service supports the operation. The methods are those of [`Store`](crate::Store) and
/// [`Object`](crate::Object) with the same names.
#[async_trait]
pub(crate) trait StoreBackend: Send + Sync {
    /// Returns the address of the service; empty for files and memory.
    fn address(&self) -> String {
        String::new()
    }

    /// Returns the commit that the revision of the store's URI is now; none for stores without revisions.
    async fn current_commit(&self) -> Result<Option<String>> {
        Ok(None)
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta>;

    /// Reads a whole object of the version in `pin`. If `size` is given, an object of another size is rejected.
    async fn get(&self, key: &str, pin: VersionPin, size: Option<u64>) -> Result<Bytes>;

    async fn get_ranges(
        &self,
        key: &str,
        pin: VersionPin,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>>;

    async fn download(
        &self,
        key: &str,
        pin: VersionPin,
        path: &Path,
        size: Option<u64>,
    ) -> Result<ObjectMeta>;

    async fn put(&self, key: &str, data: Bytes, mode: PutMode) -> Result<Option<String>>;

    /// Begins a streaming write.
    async fn writer(&self, key: &str, size_hint: Option<u64>) -> Result<Box<dyn Writer>>;

    async fn delete(&self, key: &str) -> Result<()>;

    /// Lists all objects below `prefix`, or one level of them; the result is unsorted.
    async fn list(&self, prefix: &str, one_level: bool) -> Result<LevelListing>;

    async fn list_uploads(&self) -> Result<Vec<OpenUpload>>;

    async fn abort_upload(&self, key: &str, id: &str) -> Result<()>;
}

/// A streaming write of one object, invisible until it is finished.
#[async_trait]
pub(crate) trait Writer: Send + Sync {
    async fn write(&mut self, data: Bytes) -> Result<()>;

    /// Makes the object of `size` bytes visible.
    async fn finish(&mut self, size: u64) -> Result<ObjectMeta>;

    async fn abort(&mut self) -> Result<()>;
}
