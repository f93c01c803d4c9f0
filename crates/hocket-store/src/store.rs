//! The store handle and its operations on whole objects.

use crate::client::{self, Remote};
use crate::counters::{Counters, Counts};
use crate::env::Env;
use crate::error::{Result, StoreError};
use crate::meta::{ObjectMeta, PutMode};
use crate::object::Object;
use crate::options::StoreOptions;
use crate::retry::{Fault, Load, Tries};
use crate::upload::Upload;
use crate::uri::{Location, check_key};
use crate::{local, process};
use bytes::Bytes;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, ObjectStoreExt, PutOptions, UpdateVersion};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Unconditional writes above this size use a multipart upload.
const MULTIPART_BYTES: usize = 64 << 20;

/// A handle on a store: its URI, its options, and the service's variables as of `open`, but no client. It is
/// cheap to clone, `Send`, `Sync`, and safe to keep across a `fork`. Methods may be called from any tokio
/// runtime; [`crate::runtime`] provides the process's own.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    uri: String,
    location: Location,
    options: StoreOptions,
    env: Env,
    counters: Counters,
}

/// The implementation behind a handle in this process.
pub(crate) enum Backend {
    Local,
    Remote(Arc<Remote>),
}

impl Store {
    /// Opens a handle on `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
    /// `abfss://container@account.dfs.core.windows.net/prefix`, `oci://bucket@namespace/prefix`,
    /// `https://host/path` (read-only), `memory://name/prefix`, `file:///dir`, or a path, absolute or relative
    /// to the current working directory. Does no I/O; the store need not exist yet.
    ///
    /// # Errors
    /// [`StoreError::Config`] for an invalid URI or option.
    pub fn open(uri: &str, options: StoreOptions) -> Result<Self> {
        options.validate()?;
        let location = Location::parse(uri)?;
        let env = match &location {
            Location::Bucket { bucket, .. } => Env::read(bucket.service.variables()),
            _ => Env::default(),
        };
        let uri = location.uri();
        Ok(Self {
            inner: Arc::new(Inner {
                uri,
                location,
                options,
                env,
                counters: Counters::default(),
            }),
        })
    }

    /// Returns the store's normalized URI; an absolute path for a directory.
    pub fn uri(&self) -> &str {
        &self.inner.uri
    }

    /// Returns the options given to [`open`](Self::open).
    pub fn options(&self) -> &StoreOptions {
        &self.inner.options
    }

    /// Returns the counts of this handle and its clones, in this process and before it was forked.
    pub fn counts(&self) -> Counts {
        self.inner.counters.now()
    }

    /// Updates the counters of the handle and of the process, if requests cross a network.
    pub(crate) fn count(&self, remote: &Remote, note: impl Fn(&Counters)) {
        if remote.is_http() {
            note(&self.inner.counters);
            note(&remote.counters);
        }
    }

    /// Returns the full URI of `key`.
    pub fn object_uri(&self, key: &str) -> String {
        match key {
            "" => self.inner.uri.clone(),
            _ => format!("{}/{key}", self.inner.uri.trim_end_matches('/')),
        }
    }

    /// Returns the directory of a store of local files.
    pub fn local_root(&self) -> Option<&Path> {
        match &self.inner.location {
            Location::Local { root } => Some(root),
            _ => None,
        }
    }

    /// Returns size, ETag and modification time of an object.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] and the errors of every request: `Permission`, `Config`, `Transient`, `Io`.
    pub async fn head(&self, key: &str) -> Result<ObjectMeta> {
        check_key(self.uri(), key)?;
        match self.backend().await? {
            Backend::Local => local::head(self.clone(), key.to_owned()).await,
            Backend::Remote(remote) => {
                let path = self.path(key)?;
                let mut tries = Tries::new(self, key, Load::None);
                loop {
                    match tries.attempt(&remote, remote.objects.head(&path)).await {
                        Ok(meta) => return Ok(self.meta(key, &meta)),
                        Err(fault) => tries.pause(fault).await?,
                    }
                }
            }
        }
    }

    /// Returns a handle on the object `key` for several reads of the same version. Makes no request.
    pub fn object(&self, key: &str) -> Object {
        Object::new(self, key)
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
        self.check_verb("put")?;
        let remote = match self.backend().await? {
            Backend::Local => return local::put(self.clone(), key.to_owned(), data, mode).await,
            Backend::Remote(remote) => remote,
        };
        if data.len() > MULTIPART_BYTES && mode == PutMode::Overwrite {
            let mut upload = self.upload(key, Some(data.len() as u64)).await?;
            upload.write(data).await?;
            return Ok(upload.finish().await?.etag);
        }
        self.put_once(&remote, key, data, &mode).await
    }

    /// Sends one PUT request, with retries, until its outcome is known.
    pub(crate) async fn put_once(
        &self,
        remote: &Remote,
        key: &str,
        data: Bytes,
        mode: &PutMode,
    ) -> Result<Option<String>> {
        let size = data.len() as u64;
        let path = self.path(key)?;
        let options = PutOptions::from(match mode {
            PutMode::Overwrite => object_store::PutMode::Overwrite,
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Match(etag) => object_store::PutMode::Update(UpdateVersion {
                e_tag: Some(etag.clone()),
                version: self.generation(remote, key, etag).await?,
            }),
        });
        let _bytes = process::budget()
            .take(size, self.options().budget_bytes)
            .await;
        let mut tries = Tries::new(self, key, Load::Up(size));
        loop {
            let request = remote
                .objects
                .put_opts(&path, data.clone().into(), options.clone());
            match tries.attempt(remote, request).await {
                Ok(result) => return Ok(result.e_tag),
                // An earlier attempt of ours may have caused the violated condition.
                Err(Fault::Final(StoreError::Exists { .. }) | Fault::Precondition)
                    if tries.may_have_landed() =>
                {
                    return Err(tries.give_up("the answer to an earlier try was lost, and now the condition is broken; read the object back to see whose write it was"));
                }
                Err(Fault::Precondition) => {
                    let expected = if let PutMode::Match(etag) = mode {
                        etag.clone()
                    } else {
                        "(none)".to_owned()
                    };
                    return Err(self.changed(key, expected).await);
                }
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Returns the generation of the object with `etag`, on services whose conditions use generations.
    async fn generation(&self, remote: &Remote, key: &str, etag: &str) -> Result<Option<String>> {
        if !remote.has_generations {
            return Ok(None);
        }
        let path = self.path(key)?;
        let mut tries = Tries::new(self, key, Load::None);
        let meta = loop {
            match tries.attempt(remote, remote.objects.head(&path)).await {
                Ok(meta) => break Some(meta),
                Err(Fault::Final(StoreError::NotFound { .. })) => break None,
                Err(fault) => tries.pause(fault).await?,
            }
        };
        match meta {
            Some(meta) if meta.e_tag.as_deref() == Some(etag) && meta.version.is_some() => {
                Ok(meta.version)
            }
            _ => Err(self.changed(key, etag.to_owned()).await),
        }
    }

    /// Starts a streaming write of an object, with several parts in flight. Pass `size_hint` if the size is
    /// known; above 80 GB it must be right within a factor of ten.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub async fn upload(&self, key: &str, size_hint: Option<u64>) -> Result<Upload> {
        check_key(self.uri(), key)?;
        self.check_verb("upload")?;
        Upload::start(self, key, size_hint).await
    }

    /// Deletes an object. A missing object is not an error, as on S3.
    ///
    /// # Errors
    /// As [`head`](Self::head), without `NotFound`.
    pub async fn delete(&self, key: &str) -> Result<()> {
        check_key(self.uri(), key)?;
        self.check_verb("delete")?;
        let remote = match self.backend().await? {
            Backend::Local => return local::delete(self.clone(), key.to_owned()).await,
            Backend::Remote(remote) => remote,
        };
        let path = self.path(key)?;
        let mut tries = Tries::new(self, key, Load::None);
        loop {
            match tries.attempt(&remote, remote.objects.delete(&path)).await {
                Ok(()) | Err(Fault::Final(StoreError::NotFound { .. })) => return Ok(()),
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Returns the implementation behind this handle in this process.
    pub(crate) async fn backend(&self) -> Result<Backend> {
        Ok(match &self.inner.location {
            Location::Local { .. } => Backend::Local,
            Location::Memory { name, .. } => Backend::Remote(client::memory(name, self.options())),
            Location::Bucket { bucket, .. } => {
                Backend::Remote(client::open(bucket, self.options(), &self.inner.env).await?)
            }
        })
    }

    /// Rejects an operation that the service does not support.
    pub(crate) fn check_verb(&self, verb: &str) -> Result<()> {
        self.inner.location.check_verb(verb)
    }

    /// Returns `key` with the store's prefix, as the client's path type.
    pub(crate) fn path(&self, key: &str) -> Result<ObjectPath> {
        ObjectPath::parse(self.inner.location.full_key(key)).map_err(|error| {
            StoreError::config(format!("`{}` is no key: {error}", self.object_uri(key)))
        })
    }

    /// Returns the store's prefix inside its bucket or memory.
    pub(crate) fn prefix(&self) -> &str {
        self.inner.location.prefix()
    }

    /// Converts the client's metadata to ours.
    pub(crate) fn meta(&self, key: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        ObjectMeta {
            key: key.to_owned(),
            size: meta.size,
            etag: meta.e_tag.clone(),
            modified_ms: meta.last_modified.timestamp_millis(),
        }
    }

    /// Builds the error for a violated ETag condition, with the current ETag.
    pub(crate) async fn changed(&self, key: &str, expected: String) -> StoreError {
        let actual = match self.head(key).await {
            Ok(meta) => meta.etag.unwrap_or_else(|| "(no ETag)".to_owned()),
            Err(StoreError::NotFound { .. }) => "(deleted)".to_owned(),
            Err(_) => "(unknown)".to_owned(),
        };
        StoreError::Changed {
            uri: self.object_uri(key),
            expected,
            actual,
        }
    }
}

/// Returns GET options for one range, conditional on an ETag if one is known. A weak ETag never matches (RFC
/// 9110, 13.1.1), so it is left out; the caller compares the response's ETag in any case.
pub(crate) fn get_options(range: Option<Range<u64>>, if_match: Option<String>) -> GetOptions {
    GetOptions {
        range: range.map(Into::into),
        if_match: if_match.filter(|etag| !etag.starts_with("W/")),
        ..GetOptions::default()
    }
}
