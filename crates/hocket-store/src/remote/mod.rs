//! Remote stores: services, or the in-memory store in their place.

mod failed_attempt;
mod list;
pub(crate) mod part_sizes;
mod parts;
mod read;
pub(crate) mod requests;
mod retry;
mod uploads;

use crate::backend::{StoreBackend, Writer};
use crate::error::Result;
use crate::remote::parts::MultipartUpload;
use crate::remote::read::RemoteObject;
use crate::remote::requests::RemoteStore;
use crate::remote::retry::TransferBytes;
use crate::values::meta::{LevelListing, ObjectMeta, OpenUpload, PutMode};
use crate::values::pin::VersionPin;
use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Unconditional writes above this size use a multipart upload.
const MULTIPART_BYTES: usize = 64 << 20;

#[async_trait]
impl StoreBackend for RemoteStore {
    fn address(&self) -> String {
        self.client.address.clone()
    }

    async fn current_commit(&self) -> Result<Option<String>> {
        let Some(repository) = &self.client.repository else {
            return Ok(None);
        };
        let request = || repository.current_commit();
        let commit = self.with_retries("", TransferBytes::None, request).await?;
        Ok(Some(commit))
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        self.head(key).await
    }

    async fn get(&self, key: &str, pin: VersionPin, size: Option<u64>) -> Result<Bytes> {
        RemoteObject::new(self, key, pin)?.get(size).await
    }

    async fn get_ranges(
        &self,
        key: &str,
        pin: VersionPin,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>> {
        RemoteObject::new(self, key, pin)?.get_ranges(ranges).await
    }

    async fn download(
        &self,
        key: &str,
        pin: VersionPin,
        path: &Path,
        size: Option<u64>,
    ) -> Result<ObjectMeta> {
        RemoteObject::new(self, key, pin)?
            .download(path, size)
            .await
    }

    async fn put(&self, key: &str, data: Bytes, mode: PutMode) -> Result<Option<String>> {
        if data.len() > MULTIPART_BYTES && mode == PutMode::Overwrite {
            let size = data.len() as u64;
            let mut parts = MultipartUpload::new(self, key, Some(size))?;
            parts.write(data).await?;
            return parts.finish(size).await;
        }
        self.put_once(key, data, &mode).await
    }

    async fn writer(&self, key: &str, size_hint: Option<u64>) -> Result<Box<dyn Writer>> {
        let (parts, key) = (MultipartUpload::new(self, key, size_hint)?, key.to_owned());
        Ok(Box::new(MultipartWriter { key, parts }))
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.delete(key).await
    }

    async fn list(&self, prefix: &str, one_level: bool) -> Result<LevelListing> {
        self.list(prefix, one_level).await
    }

    async fn list_uploads(&self) -> Result<Vec<OpenUpload>> {
        self.list_uploads().await
    }

    async fn abort_upload(&self, key: &str, id: &str) -> Result<()> {
        self.abort_upload(key, id).await
    }
}

/// A streaming write in parts.
struct MultipartWriter {
    key: String,
    parts: MultipartUpload,
}

#[async_trait]
impl Writer for MultipartWriter {
    async fn write(&mut self, data: Bytes) -> Result<()> {
        self.parts.write(data).await
    }

    async fn finish(&mut self, size: u64) -> Result<ObjectMeta> {
        let etag = self.parts.finish(size).await?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Ok(ObjectMeta {
            key: self.key.clone(),
            size,
            etag,
            modified_ms: now.as_millis() as i64,
        })
    }

    async fn abort(&mut self) -> Result<()> {
        self.parts.abort().await
    }
}
