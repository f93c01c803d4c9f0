//! The store handle and its operations on whole objects.

use crate::connect::backend;
use crate::error::{Result, StoreError};
use crate::object::Object;
use crate::process::counters::CounterSnapshot;
use crate::process::runtime::blocking;
use crate::remote::part_sizes::PART_BYTES;
use crate::upload::Upload;
use crate::values::handle::StoreHandle;
use crate::values::keys::{check_key, check_segments};
use crate::values::meta::{LevelListing, ObjectMeta, OpenUpload, PutMode};
use crate::values::options::StoreOptions;
use crate::values::ranges::split;
use bytes::Bytes;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A handle on a store: its URI, its options, and the service's variables as of `open`, but no client. It is
/// cheap to clone, `Send`, `Sync`, and safe to keep across a `fork`. Methods may be called from any tokio
/// runtime; [`crate::process::runtime`] provides the process's own.
#[derive(Debug, Clone)]
pub struct Store {
    handle: StoreHandle,
}

impl Store {
    /// Opens a handle on `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
    /// `abfss://container@account.dfs.core.windows.net/prefix`, `oci://bucket@namespace/prefix`,
    /// `https://host/path` and `hf://datasets/owner/name@revision/path` (read-only), `memory://name/prefix`, `file:///dir`, or a path, absolute or relative
    /// to the current working directory. Does no I/O; the store need not exist yet.
    ///
    /// # Errors
    /// [`StoreError::Config`] for an invalid URI or option.
    pub fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        let handle = StoreHandle::open(uri, options)?;
        Ok(Self { handle })
    }

    /// Returns the store's normalized URI; an absolute path for a directory.
    pub fn uri(&self) -> &str {
        self.handle.uri()
    }

    /// Returns the options given to [`open`](Self::open).
    pub fn options(&self) -> &StoreOptions {
        self.handle.options()
    }

    /// Returns the counts of this handle and its clones, in this process and before it was forked.
    pub fn counts(&self) -> CounterSnapshot {
        self.handle.counters().now()
    }

    /// Returns the full URI of `key`.
    pub fn object_uri(&self, key: &str) -> String {
        self.handle.object_uri(key)
    }

    /// Returns the directory of a store of local files.
    pub fn local_root(&self) -> Option<&Path> {
        self.handle.local_root()
    }

    /// Returns whether the store is a whole bucket or repository, and not a part of one.
    pub fn is_whole(&self) -> bool {
        self.local_root().is_none() && self.handle.prefix().is_empty()
    }

    /// Returns the address that requests are sent to, as given by options, variables and the profile; empty for the
    /// service's own. Stores with one URI and different addresses are different stores. Makes no request.
    ///
    /// # Errors
    /// `Config` and `Permission`, as the first request of this store.
    pub async fn address(&self) -> Result<String> {
        Ok(backend(&self.handle).await?.address())
    }

    /// Returns the store's URI with the commit that its revision is now, in place of a branch or a tag; none for
    /// stores without revisions. A repository of a hub has them.
    ///
    /// # Errors
    /// [`StoreError::RepositoryNotFound`] and the errors of every request.
    pub async fn pinned_uri(&self) -> Result<Option<String>> {
        if self.handle.location().is_pinned() {
            return Ok(Some(self.uri().to_owned()));
        }
        let commit = backend(&self.handle).await?.current_commit().await?;
        Ok(commit.and_then(|commit| self.handle.location().with_revision(&commit)))
    }

    /// Returns size, ETag and modification time of an object.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] and the errors of every request: `Permission`, `Config`, `Transient`, `Io`.
    pub async fn head(&self, key: &str) -> Result<ObjectMeta> {
        check_key(self.uri(), key)?;
        backend(&self.handle).await?.head(key).await
    }

    /// Returns a handle on the object `key` for several reads of the same version. Makes no request.
    pub fn object(&self, key: &str) -> Object {
        Object::new(&self.handle, key)
    }

    /// Reads a whole object. A large object is read by parallel ranged GETs with the same ETag.
    ///
    /// # Errors
    /// As [`head`](Self::head); [`StoreError::Changed`] if the object was replaced during the read.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the requests.
    pub async fn get(&self, key: &str) -> Result<Bytes> {
        self.object(key).get(None).await
    }

    /// Reads the bytes `range` (end exclusive) of an object.
    ///
    /// # Errors
    /// As [`get`](Self::get); [`StoreError::Io`] if the range does not lie within the object.
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes> {
        let mut pieces = self.get_ranges(key, std::slice::from_ref(&range)).await?;
        Ok(pieces.pop().unwrap_or_default())
    }

    /// Reads several ranges of one object and returns them in the order given. Nearby ranges share a request;
    /// distant ones are read in parallel.
    ///
    /// # Errors
    /// As [`get_range`](Self::get_range).
    pub async fn get_ranges(&self, key: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.object(key).get_ranges(ranges).await
    }

    /// Writes an object to the local file `path` (created or truncated), each part in place. Neither durable
    /// nor atomic: the caller syncs and renames. After an error the file's content is undefined. `size` is the
    /// object's size if the caller knows it: all parts are then requested at once.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`StoreError::Io`] or `Permission` for `path`; [`StoreError::Size`] after the
    /// first response, if the object does not have `size` bytes.
    pub async fn download(&self, key: &str, path: &Path, size: Option<u64>) -> Result<ObjectMeta> {
        self.object(key).download(path, size).await
    }

    /// Writes a whole object and returns its ETag. Readers see the old object or the new one, never a mixture;
    /// a local file is durable when this returns.
    ///
    /// # Errors
    /// `Create`: [`StoreError::Exists`]. `Match`: [`StoreError::Changed`]. Both: [`StoreError::Transient`] if a
    /// response was lost and a retry found the condition violated. The object may then be the caller's own
    /// write; read it back to find out.
    pub async fn put(&self, key: &str, data: Bytes, mode: PutMode) -> Result<Option<String>> {
        check_key(self.uri(), key)?;
        self.handle.check_verb("put")?;
        backend(&self.handle).await?.put(key, data, mode).await
    }

    /// Starts a streaming write of an object, with several parts in flight. Pass `size_hint` if the size, or an
    /// upper bound of it, is known: all parts but the last then have one size, as Cloudflare's R2 requires. Above
    /// 80 GB the size must not exceed the hint.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub async fn upload(&self, key: &str, size_hint: Option<u64>) -> Result<Upload> {
        check_key(self.uri(), key)?;
        self.handle.check_verb("upload")?;
        let writer = backend(&self.handle).await?.writer(key, size_hint).await?;
        Ok(Upload::new(self.object_uri(key), writer))
    }

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

    /// Deletes an object. A missing object is not an error, as on S3.
    ///
    /// # Errors
    /// As [`head`](Self::head), without `NotFound`.
    pub async fn delete(&self, key: &str) -> Result<()> {
        check_key(self.uri(), key)?;
        self.handle.check_verb("delete")?;
        backend(&self.handle).await?.delete(key).await
    }

    /// Lists all objects below `prefix`, sorted by key. The prefix matches whole path segments: `a` matches
    /// `a/b`, not `ab`.
    ///
    /// # Errors
    /// As [`head`](Self::head). A prefix without objects gives an empty list.
    pub async fn list(&self, prefix: &str) -> Result<Vec<ObjectMeta>> {
        Ok(self.list_level(prefix, false).await?.objects)
    }

    /// Lists one level below `prefix`.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub async fn list_dirs(&self, prefix: &str) -> Result<LevelListing> {
        self.list_level(prefix, true).await
    }

    async fn list_level(&self, prefix: &str, one_level: bool) -> Result<LevelListing> {
        let prefix = prefix.trim_end_matches('/');
        check_segments(self.uri(), prefix)?;
        self.handle.check_verb("list")?;
        let backend = backend(&self.handle).await?;
        let mut listing = backend.list(prefix, one_level).await?;
        listing.dirs.sort_unstable();
        listing
            .objects
            .sort_unstable_by(|left, right| left.key.cmp(&right.key));
        Ok(listing)
    }

    /// Returns the unfinished uploads below the store's prefix; none if the store does not support multipart
    /// uploads.
    ///
    /// # Errors
    /// As [`head`](Self::head), without `NotFound`.
    pub async fn list_uploads(&self) -> Result<Vec<OpenUpload>> {
        backend(&self.handle).await?.list_uploads().await
    }

    /// Aborts an unfinished upload and frees its parts. A missing upload is not an error.
    ///
    /// # Errors
    /// As [`list_uploads`](Self::list_uploads).
    pub async fn abort_upload(&self, key: &str, id: &str) -> Result<()> {
        check_key(self.uri(), key)?;
        backend(&self.handle).await?.abort_upload(key, id).await
    }
}
