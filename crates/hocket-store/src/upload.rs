//! Streamed writes: multipart uploads with several parts in flight, or a hidden local file.

use crate::client::Remote;
use crate::error::{Result, StoreError};
use crate::local::{Staged, blocking};
use crate::process;
use crate::ranges::split;
use crate::retry::{Fault, Tries};
use crate::runtime;
use crate::store::{Backend, ObjectMeta, PutMode, Store};
use bytes::{Buf, Bytes};
use object_store::PutPayload;
use object_store::multipart::PartId;
use object_store::path::Path as ObjectPath;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

/// Smallest part, whatever the options say: stores want at least 5 MiB.
const MIN_PART_BYTES: u64 = 8 << 20;

/// Most parts that S3 takes.
const MAX_PARTS: u64 = 10_000;

/// A write under way. Nothing is visible under the key before [`finish`](Self::finish); an upload that is dropped
/// or aborted leaves what was there before. It belongs to the process that started it.
#[derive(Debug)]
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
        for range in split(0..size, MIN_PART_BYTES) {
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

/// A multipart upload, begun at the first full part: a small object goes as a plain PUT.
struct Parts {
    remote: Arc<Remote>,
    path: ObjectPath,
    part_bytes: u64,
    pending: Vec<Bytes>,
    pending_bytes: u64,
    id: Option<Arc<str>>,
    /// ETag of what stood under the key before, to tell a completion of ours from what was there.
    before: Option<String>,
    sending: JoinSet<Result<(usize, PartId)>>,
    sent: Vec<Option<PartId>>,
    pid: u32,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(staged) => f.debug_tuple("Local").field(staged).finish(),
            Self::Parts(parts) => f
                .debug_struct("Parts")
                .field("path", &parts.path)
                .field("sent", &parts.sent.len())
                .finish(),
        }
    }
}

impl Upload {
    pub(crate) async fn start(store: &Store, key: &str, size_hint: Option<u64>) -> Result<Self> {
        let target = match store.backend()? {
            Backend::Local => {
                let (store, key) = (store.clone(), key.to_owned());
                Target::Local(Some(blocking(move || Staged::create(&store, &key)).await?))
            }
            Backend::Remote(remote) => {
                let least = store.options().part_bytes.max(MIN_PART_BYTES);
                Target::Parts(Box::new(Parts {
                    remote,
                    path: store.path(key)?,
                    part_bytes: least.max(size_hint.unwrap_or(0).div_ceil(MAX_PARTS)),
                    pending: Vec::new(),
                    pending_bytes: 0,
                    id: None,
                    before: None,
                    sending: JoinSet::new(),
                    sent: Vec::new(),
                    pid: std::process::id(),
                }))
            }
        };
        Ok(Self {
            store: store.clone(),
            key: key.to_owned(),
            size: 0,
            target,
        })
    }

    /// Appends `data`; returns once there is room for more, so that no more than the budget is in flight.
    ///
    /// # Errors
    /// What any earlier part met; the upload is then of no further use.
    ///
    /// # Cancel safety
    /// None: after a dropped `write` only `abort` makes sense.
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
            Target::Parts(parts) => parts.write(&self.store, &self.key, data).await,
        }
    }

    /// Makes the object visible under its key, whole.
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
            Target::Parts(parts) => parts.finish(&self.store, &self.key, self.size).await?,
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

    /// Gives the upload up, and waits until the store has forgotten its parts.
    ///
    /// # Errors
    /// As [`Store::delete`](crate::Store::delete). Dropping the upload does the same without waiting.
    pub async fn abort(mut self) -> Result<()> {
        match &mut self.target {
            Target::Local(slot) => drop(slot.take()),
            Target::Parts(parts) => {
                parts.sending.shutdown().await;
                if let Some(id) = parts.id.take() {
                    abort(&self.store, &self.key, &parts.remote, &parts.path, &id).await?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // A forked child's copy must not end its parent's upload.
        if let Target::Parts(parts) = &mut self.target
            && parts.pid == std::process::id()
            && let Some(id) = parts.id.take()
        {
            parts.sending.abort_all();
            let (store, key) = (self.store.clone(), self.key.clone());
            let (remote, path) = (Arc::clone(&parts.remote), parts.path.clone());
            runtime::spawn(async move {
                // Nobody is left to tell; the bucket's lifecycle rule takes what remains.
                let _ = abort(&store, &key, &remote, &path, &id).await;
            });
        }
    }
}

impl Parts {
    async fn write(&mut self, store: &Store, key: &str, mut data: Bytes) -> Result<()> {
        if self.pid != std::process::id() {
            return Err(StoreError::config(format!(
                "the upload of `{}` belongs to another process",
                store.object_uri(key)
            )));
        }
        while self.pending_bytes + data.len() as u64 >= self.part_bytes {
            let head = data.split_to((self.part_bytes - self.pending_bytes) as usize);
            self.push(head);
            self.send(store, key).await?;
        }
        self.push(data);
        self.collect(false).await
    }

    fn push(&mut self, data: Bytes) {
        if data.has_remaining() {
            self.pending_bytes += data.len() as u64;
            self.pending.push(data);
        }
    }

    /// Sends what is pending as the next part, once the budget has room for it.
    async fn send(&mut self, store: &Store, key: &str) -> Result<()> {
        let id = match &self.id {
            Some(id) => Arc::clone(id),
            None => self.begin(store, key).await?,
        };
        let size = std::mem::take(&mut self.pending_bytes);
        let payload: PutPayload = std::mem::take(&mut self.pending).into_iter().collect();
        let index = self.sent.len();
        self.sent.push(None);
        // Of an unknown size: parts grow so that their number stays within bounds.
        if (index as u64 + 1).is_multiple_of(MAX_PARTS / 10) {
            self.part_bytes *= 2;
        }
        let bytes = process::budget()
            .take(size, store.options().budget_bytes)
            .await;
        while self.sending.len() >= store.options().max_requests {
            self.collect_one().await?;
        }
        let (store, uri) = (store.clone(), store.object_uri(key));
        let (remote, path) = (Arc::clone(&self.remote), self.path.clone());
        self.sending.spawn(async move {
            let _bytes = bytes;
            let id = id.to_string();
            let mut tries = Tries::new(store.options(), uri, size);
            loop {
                match tries
                    .attempt(
                        &remote,
                        remote
                            .multipart
                            .put_part(&path, &id, index, payload.clone()),
                    )
                    .await
                {
                    Ok(part) => return Ok((index, part)),
                    Err(fault) => tries.pause(fault).await?,
                }
            }
        });
        Ok(())
    }

    async fn begin(&mut self, store: &Store, key: &str) -> Result<Arc<str>> {
        self.before = match store.head(key).await {
            Ok(meta) => meta.etag,
            Err(StoreError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let mut tries = Tries::new(store.options(), store.object_uri(key), 0);
        loop {
            match tries
                .attempt(
                    &self.remote,
                    self.remote.multipart.create_multipart(&self.path),
                )
                .await
            {
                Ok(id) => return Ok(Arc::clone(self.id.insert(id.into()))),
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Notes parts that have arrived; with `all`, waits for every one.
    async fn collect(&mut self, all: bool) -> Result<()> {
        while let Some(outcome) = self.sending.try_join_next() {
            self.note(outcome)?;
        }
        while all && !self.sending.is_empty() {
            self.collect_one().await?;
        }
        Ok(())
    }

    async fn collect_one(&mut self) -> Result<()> {
        match self.sending.join_next().await {
            Some(outcome) => self.note(outcome),
            None => Ok(()),
        }
    }

    fn note(
        &mut self,
        outcome: std::result::Result<Result<(usize, PartId)>, tokio::task::JoinError>,
    ) -> Result<()> {
        let (index, part) = outcome.unwrap_or_else(|error| {
            Err(StoreError::io(
                self.path.as_ref(),
                format!("a part ended without an answer: {error}"),
            ))
        })?;
        self.sent[index] = Some(part);
        Ok(())
    }

    /// The ETag of the finished object.
    async fn finish(&mut self, store: &Store, key: &str, size: u64) -> Result<Option<String>> {
        if self.id.is_none() {
            let data = join(std::mem::take(&mut self.pending));
            return store
                .put_once(&self.remote, key, data, &PutMode::Overwrite)
                .await;
        }
        if self.pending_bytes > 0 {
            self.send(store, key).await?;
        }
        self.collect(true).await?;
        let etag = self.complete(store, key, size).await?;
        self.id = None;
        Ok(etag)
    }

    /// Completes the upload. Where an answer is lost, the object itself says whether it was completed.
    async fn complete(&mut self, store: &Store, key: &str, size: u64) -> Result<Option<String>> {
        let id = self.id.as_deref().unwrap_or_default().to_owned();
        let parts: Vec<PartId> = self.sent.iter().flatten().cloned().collect();
        let mut tries = Tries::new(store.options(), store.object_uri(key), 0);
        loop {
            let request = self
                .remote
                .multipart
                .complete_multipart(&self.path, &id, parts.clone());
            let fault = match tries.attempt(&self.remote, request).await {
                Ok(result) => return Ok(result.e_tag),
                Err(fault) => fault,
            };
            // "No such upload" after a lost answer: it was completed, and the object that stands there is
            // ours even if it has the ETag of before, as one of the same content does.
            let is_gone = matches!(fault, Fault::Final(StoreError::NotFound { .. }))
                && tries.may_have_landed();
            if tries.may_have_landed()
                && let Ok(meta) = tries
                    .attempt(
                        &self.remote,
                        self.remote.objects.get_opts(&self.path, head_options()),
                    )
                    .await
                    .map(|answer| answer.meta)
                && meta.size == size
                && (is_gone || meta.e_tag != self.before)
            {
                return Ok(meta.e_tag);
            }
            if is_gone {
                return Err(tries.give_up("the answer to the completion was lost, and neither upload nor object is there; write it again"));
            }
            tries.pause(fault).await?;
        }
    }
}

fn head_options() -> object_store::GetOptions {
    object_store::GetOptions {
        head: true,
        ..object_store::GetOptions::default()
    }
}

async fn abort(
    store: &Store,
    key: &str,
    remote: &Remote,
    path: &ObjectPath,
    id: &str,
) -> Result<()> {
    let id = id.to_owned();
    let mut tries = Tries::new(store.options(), store.object_uri(key), 0);
    loop {
        match tries
            .attempt(remote, remote.multipart.abort_multipart(path, &id))
            .await
        {
            Ok(()) | Err(Fault::Final(StoreError::NotFound { .. })) => return Ok(()),
            Err(fault) => tries.pause(fault).await?,
        }
    }
}

fn ended(uri: &str) -> StoreError {
    StoreError::io(uri, "the upload ended with an earlier error; start it anew")
}

/// One buffer of all pieces; a single one is not copied.
fn join(mut pieces: Vec<Bytes>) -> Bytes {
    match pieces.len() {
        0 | 1 => pieces.pop().unwrap_or_default(),
        _ => pieces.concat().into(),
    }
}
