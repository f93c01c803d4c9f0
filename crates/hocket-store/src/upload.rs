//! Streaming writes: multipart uploads with several parts in flight, or a hidden local file.

use crate::error::{Result, StoreError};
use crate::local::blocking;
use crate::meta::{ObjectMeta, PutMode};
use crate::parts::{PART_BYTES, Parts, ended};
use crate::ranges::split;
use crate::staged::Staged;
use crate::store::{Backend, Store};
use bytes::Bytes;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A write in progress. Nothing is visible under the key before [`finish`](Self::finish); dropping or aborting
/// the upload leaves the existing object unchanged. An upload is only valid in the process that started it.
pub struct Upload {
    store: Store,
    key: String,
    size: u64,
    target: Target,
}

enum Target {
    Local(Option<Staged>),
    Parts(Box<Parts>),
}

impl Store {
    /// Writes the local file `path` under `key`, in parts as [`upload`](Self::upload) does.
    ///
    /// # Errors
    /// As [`put`](Self::put) without a condition; [`StoreError::NotFound`], `Permission` or `Io` naming `path`; and
    /// [`StoreError::Changed`] when the file grew or shrank while it was read.
    pub async fn upload_file(&self, key: &str, path: &Path) -> Result<ObjectMeta> {
        let name: Arc<str> = path.to_string_lossy().into();
        let (label, path) = (Arc::clone(&name), path.to_owned());
        let failed = move |error: std::io::Error| StoreError::from_io(&label, "read", &error);
        let opened = failed.clone();
        let (file, size) = blocking(move || {
            let file = File::open(&path).map_err(&opened)?;
            let size = file.metadata().map_err(&opened)?.len();
            Ok((Arc::new(file), size))
        })
        .await?;
        let mut upload = self.upload(key, Some(size)).await?;
        for range in split(0..size, PART_BYTES) {
            let (file, failed) = (Arc::clone(&file), failed.clone());
            let data = blocking(move || {
                let mut data = vec![0; (range.end - range.start) as usize];
                file.read_exact_at(&mut data, range.start)
                    .map_err(&failed)?;
                Ok(Bytes::from(data))
            })
            .await?;
            upload.write(data).await?;
        }
        let now = blocking(move || file.metadata().map_err(&failed))
            .await?
            .len();
        if now != size {
            let (expected, actual) = (format!("{size} bytes"), format!("{now} bytes"));
            return Err(StoreError::Changed {
                uri: name.to_string(),
                expected,
                actual,
            });
        }
        upload.finish().await
    }
}

impl Upload {
    pub(crate) async fn start(store: &Store, key: &str, size_hint: Option<u64>) -> Result<Self> {
        let target = match store.backend().await? {
            Backend::Local => {
                let (store, key) = (store.clone(), key.to_owned());
                Target::Local(Some(blocking(move || Staged::create(&store, &key)).await?))
            }
            Backend::Remote(remote) => {
                Target::Parts(Box::new(Parts::new(store, key, remote, size_hint)?))
            }
        };
        Ok(Self {
            store: store.clone(),
            key: key.to_owned(),
            size: 0,
            target,
        })
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
        match &mut self.target {
            Target::Local(slot) => {
                let mut staged = slot
                    .take()
                    .ok_or_else(|| ended(&self.store.object_uri(&self.key)))?;
                *slot = Some(blocking(move || staged.write(&data).map(|()| staged)).await?);
                Ok(())
            }
            Target::Parts(parts) => parts.write(data).await,
        }
    }

    /// Makes the complete object visible under its key.
    ///
    /// Returns its size and ETag; `modified_ms` is this machine's clock for remote stores.
    ///
    /// # Errors
    /// As [`Store::put`](crate::Store::put) without a condition.
    pub async fn finish(mut self) -> Result<ObjectMeta> {
        let etag = match &mut self.target {
            Target::Local(slot) => {
                let staged = slot
                    .take()
                    .ok_or_else(|| ended(&self.store.object_uri(&self.key)))?;
                return blocking(move || staged.publish(&PutMode::Overwrite)).await;
            }
            Target::Parts(parts) => parts.finish(self.size).await?,
        };
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Ok(ObjectMeta {
            key: self.key.clone(),
            size: self.size,
            etag,
            modified_ms: now.as_millis() as i64,
        })
    }

    /// Aborts the upload, and waits until the store has discarded its parts.
    ///
    /// # Errors
    /// As [`Store::delete`](crate::Store::delete). Dropping the upload does the same without waiting.
    pub async fn abort(mut self) -> Result<()> {
        match &mut self.target {
            Target::Local(slot) => drop(slot.take()),
            Target::Parts(parts) => parts.abort().await?,
        }
        Ok(())
    }
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let uri = self.store.object_uri(&self.key);
        f.debug_struct("Upload")
            .field("uri", &uri)
            .field("size", &self.size)
            .finish()
    }
}
