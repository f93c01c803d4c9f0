//! The handle, and its verbs on whole objects.

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

/// Objects above this size are written in parts, where the write has no condition.
const MULTIPART_BYTES: usize = 64 << 20;

/// A handle on a store: its URI and options, never a client; also the service's variables as they were when it was
/// opened. Cheap to clone, `Send`, `Sync`, and safe to keep across a `fork`. Verbs may be called from any tokio runtime; [`crate::runtime`] offers the process's own.
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

/// What serves a handle in this process.
pub(crate) enum Backend {
    Local,
    Remote(Arc<Remote>),
}

impl Store {
    /// A handle on `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
    /// `abfss://container@account.dfs.core.windows.net/prefix`, `oci://bucket@namespace/prefix`, `https://host/path`
    /// (to read), `memory://name/prefix`, `file:///dir`, or a path, absolute or from the working directory of now.
    /// No I/O: nothing need exist yet.
    ///
    /// # Errors
    /// [`StoreError::Config`] for a URI or an option that cannot work.
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

    /// The store's URI in its normal form; an absolute path for a directory.
    pub fn uri(&self) -> &str {
        &self.inner.uri
    }

    /// The options it was opened with.
    pub fn options(&self) -> &StoreOptions {
        &self.inner.options
    }

    /// The requests of this handle and its clones, in this process and before it was forked.
    pub fn counts(&self) -> Counts {
        self.inner.counters.now()
    }

    /// Counts something for the handle and for the process, where requests travel.
    pub(crate) fn count(&self, remote: &Remote, note: impl Fn(&Counters)) {
        if remote.is_http() {
            note(&self.inner.counters);
            note(&remote.counters);
        }
    }

    /// The full URI of `key`.
    pub fn object_uri(&self, key: &str) -> String {
        match key {
            "" => self.inner.uri.clone(),
            _ => format!("{}/{key}", self.inner.uri.trim_end_matches('/')),
        }
    }

    /// The directory of a store of local files.
    pub fn local_root(&self) -> Option<&Path> {
        match &self.inner.location {
            Location::Local { root } => Some(root),
            _ => None,
        }
    }

    /// Size, ETag and time of an object.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] and what every request may meet: `Permission`, `Config`, `Transient`, `Io`.
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

    /// The object `key`, to be read several times and always of one version. Makes no request.
    pub fn object(&self, key: &str) -> Object {
        Object::new(self, key)
    }

    /// A whole object. A larger one comes by parallel ranged GETs, all of the same ETag.
    ///
    /// # Errors
    /// As [`head`](Self::head); [`StoreError::Changed`] when the object was replaced under way.
    ///
    /// # Cancel safety
    /// Dropping the future stops the requests.
    pub async fn get(&self, key: &str) -> Result<Bytes> {
        self.object(key).get(None).await
    }

    /// The bytes `range` (end exclusive) of an object.
    ///
    /// # Errors
    /// As [`get`](Self::get); [`StoreError::Io`] when the range does not lie within the object.
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes> {
        let mut pieces = self.get_ranges(key, std::slice::from_ref(&range)).await?;
        Ok(pieces.pop().unwrap_or_default())
    }

    /// Several ranges of one object, in the order asked for; near ones travel together, far ones in parallel.
    ///
    /// # Errors
    /// As [`get_range`](Self::get_range).
    pub async fn get_ranges(&self, key: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.object(key).get_ranges(ranges).await
    }

    /// Writes an object into the local file `path` (made or truncated), part by part in place. Not durable and
    /// not atomic: sync and rename are the caller's. After an error the file's content is undefined. `size` is
    /// what the caller knows the object to have: all parts are then asked for at once.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`StoreError::Io`] or `Permission` for `path`; [`StoreError::Size`], as soon as
    /// the first answer tells it, where the object has other than `size` bytes.
    pub async fn download(&self, key: &str, path: &Path, size: Option<u64>) -> Result<ObjectMeta> {
        self.object(key).download(path, size).await
    }

    /// Writes a whole object and returns its ETag. Readers see the old object or the new one, never a mixture;
    /// on local files it is on disk when this returns.
    ///
    /// # Errors
    /// `Create`: [`StoreError::Exists`]. `Match`: [`StoreError::Changed`]. Both: [`StoreError::Transient`] when an
    /// answer was lost and a later try found the condition broken: the write may be one's own, so read the
    /// object back.
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

    /// One PUT request, tried until it is settled.
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
                // The condition may be broken by an earlier try of our own.
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

    /// The generation of the object that has `etag`, where the service's conditions are on generations.
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

    /// A streamed write of an object: in parts, several in flight. Give `size_hint` when the size is known; above
    /// 80 GB it must be right within a factor of ten.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub async fn upload(&self, key: &str, size_hint: Option<u64>) -> Result<Upload> {
        check_key(self.uri(), key)?;
        self.check_verb("upload")?;
        Upload::start(self, key, size_hint).await
    }

    /// Deletes an object; one that is not there is no error, as S3 has it.
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

    /// What serves this handle in this process.
    pub(crate) async fn backend(&self) -> Result<Backend> {
        Ok(match &self.inner.location {
            Location::Local { .. } => Backend::Local,
            Location::Memory { name, .. } => Backend::Remote(client::memory(name, self.options())),
            Location::Bucket { bucket, .. } => {
                Backend::Remote(client::open(bucket, self.options(), &self.inner.env).await?)
            }
        })
    }

    /// Refuses a verb that the service does not have.
    pub(crate) fn check_verb(&self, verb: &str) -> Result<()> {
        self.inner.location.check_verb(verb)
    }

    /// `key` with the store's prefix, as the client wants it.
    pub(crate) fn path(&self, key: &str) -> Result<ObjectPath> {
        ObjectPath::parse(self.inner.location.full_key(key)).map_err(|error| {
            StoreError::config(format!("`{}` is no key: {error}", self.object_uri(key)))
        })
    }

    /// The store's prefix inside its bucket or memory.
    pub(crate) fn prefix(&self) -> &str {
        self.inner.location.prefix()
    }

    /// The client's description of an object as ours.
    pub(crate) fn meta(&self, key: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        ObjectMeta {
            key: key.to_owned(),
            size: meta.size,
            etag: meta.e_tag.clone(),
            modified_ms: meta.last_modified.timestamp_millis(),
        }
    }

    /// The error of a broken ETag condition: asks what is there now.
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

/// GET options for one range, pinned to an ETag where one is known. A weak one matches nothing (RFC 9110, 13.1.1); the
/// answer's own is compared in any case.
pub(crate) fn get_options(range: Option<Range<u64>>, if_match: Option<String>) -> GetOptions {
    GetOptions {
        range: range.map(Into::into),
        if_match: if_match.filter(|etag| !etag.starts_with("W/")),
        ..GetOptions::default()
    }
}
