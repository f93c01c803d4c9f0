//! Multipart uploads with several parts in flight; the object becomes visible at completion.

use crate::budget;
use crate::error::{Result, StoreError};
use crate::meta::PutMode;
use crate::requests::Requests;
use crate::retry::{Fault, Load, Tries};
use crate::runtime;
use bytes::{Buf, Bytes};
use object_store::PutPayload;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as ObjectPath;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Smallest part size, which S3 prescribes. It is used until the number of parts requires larger ones, because
/// every part in flight occupies memory.
pub(crate) const PART_BYTES: u64 = 5 << 20;

/// Largest number of parts that S3 accepts.
const MAX_PARTS: u64 = 10_000;

/// A multipart upload, started with the first full part; a small object is sent as a plain PUT.
pub(crate) struct Parts {
    remote: Requests,
    key: String,
    service: Arc<dyn MultipartStore>,
    path: ObjectPath,
    part_bytes: u64,
    pending: Vec<Bytes>,
    pending_bytes: u64,
    /// Bytes of the parts passed on for sending.
    sent_bytes: u64,
    id: Option<Arc<str>>,
    /// ETag of the object under the key before the upload, to recognize our own completion.
    before: Option<String>,
    sending: JoinSet<Result<(usize, PartId)>>,
    sent: Vec<Option<PartId>>,
    pid: u32,
}

impl Parts {
    /// Prepares an upload to `key` of `remote`; makes no request.
    pub(crate) fn new(remote: &Requests, key: &str, size_hint: Option<u64>) -> Result<Self> {
        let Some(service) = remote.client.multipart.clone() else {
            return Err(StoreError::upload_ended(remote.handle.uri())); // normally rejected by `check_verb`
        };
        Ok(Self {
            path: remote.handle.path(key)?,
            remote: remote.clone(),
            key: key.to_owned(),
            service,
            part_bytes: PART_BYTES.max(size_hint.unwrap_or(0).div_ceil(MAX_PARTS)),
            pending: Vec::new(),
            pending_bytes: 0,
            sent_bytes: 0,
            id: None,
            before: None,
            sending: JoinSet::new(),
            sent: Vec::new(),
            pid: std::process::id(),
        })
    }

    /// Appends `data` and sends every full part.
    pub(crate) async fn write(&mut self, mut data: Bytes) -> Result<()> {
        if self.pid != std::process::id() {
            return Err(StoreError::config(format!(
                "the upload of `{}` belongs to another process",
                self.uri()
            )));
        }
        while self.pending_bytes + data.len() as u64 >= self.part_bytes {
            let head = data.split_to((self.part_bytes - self.pending_bytes) as usize);
            self.push(head);
            self.send().await?;
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

    /// Sends the pending data as the next part once the budget has room for it.
    async fn send(&mut self) -> Result<()> {
        let id = match &self.id {
            Some(id) => Arc::clone(id),
            None => self.begin().await?,
        };
        let size = std::mem::take(&mut self.pending_bytes);
        let payload: PutPayload = std::mem::take(&mut self.pending).into_iter().collect();
        let index = self.sent.len();
        self.sent.push(None);
        self.sent_bytes += size;
        // The total size may be unknown: part size grows so that the number of parts stays within the limit.
        if (index as u64 + 1).is_multiple_of(MAX_PARTS / 10) {
            self.part_bytes *= 2;
        }
        let bytes = budget::of_process()
            .take(size, self.remote.handle.options().budget_bytes)
            .await;
        while self.sending.len() >= self.remote.handle.options().max_requests {
            self.collect_one().await?;
        }
        let (remote, key, path) = (self.remote.clone(), self.key.clone(), self.path.clone());
        let service = Arc::clone(&self.service);
        self.sending.spawn(async move {
            let _bytes = bytes;
            let id = id.to_string();
            let mut tries = Tries::new(&remote.handle, &key, Load::Up(size));
            loop {
                match tries
                    .attempt(
                        &remote.client,
                        service.put_part(&path, &id, index, payload.clone()),
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

    async fn begin(&mut self) -> Result<Arc<str>> {
        self.before = match self.remote.head(&self.key).await {
            Ok(meta) => meta.etag,
            Err(StoreError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let mut tries = Tries::new(&self.remote.handle, &self.key, Load::None);
        loop {
            match tries
                .attempt(
                    &self.remote.client,
                    self.service.create_multipart(&self.path),
                )
                .await
            {
                Ok(id) => return Ok(Arc::clone(self.id.insert(id.into()))),
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Collects the results of finished parts; with `all`, waits for every part.
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
                format!("the task of a part ended without a result: {error}"),
            ))
        })?;
        self.sent[index] = Some(part);
        Ok(())
    }

    /// Completes the object and returns its ETag.
    pub(crate) async fn finish(&mut self, size: u64) -> Result<Option<String>> {
        // A failed or cancelled `write` leaves a gap; such an upload must not become an object.
        if self.sent_bytes + self.pending_bytes != size {
            return Err(StoreError::upload_ended(&self.uri()));
        }
        if self.id.is_none() {
            let data = join(std::mem::take(&mut self.pending));
            return self
                .remote
                .put_once(&self.key, data, &PutMode::Overwrite)
                .await;
        }
        if self.pending_bytes > 0 {
            self.send().await?;
        }
        self.collect(true).await?;
        if self.sent.iter().any(Option::is_none) {
            return Err(StoreError::upload_ended(&self.uri()));
        }
        let etag = self.complete(size).await?;
        self.id = None;
        Ok(etag)
    }

    /// Completes the upload. If the response is lost, the object itself shows whether the completion took
    /// effect.
    async fn complete(&mut self, size: u64) -> Result<Option<String>> {
        let id = self.id.as_deref().unwrap_or_default().to_owned();
        let parts: Vec<PartId> = self.sent.iter().flatten().cloned().collect();
        let mut tries = Tries::new(&self.remote.handle, &self.key, Load::None);
        loop {
            let request = self
                .service
                .complete_multipart(&self.path, &id, parts.clone());
            let fault = match tries.attempt(&self.remote.client, request).await {
                Ok(result) => return Ok(result.e_tag),
                Err(fault) => fault,
            };
            // "No such upload" after a lost response means that it was completed. The existing object is then
            // this upload's, even if its ETag equals the earlier one, as it does for equal content.
            let is_gone = matches!(fault, Fault::Final(StoreError::NotFound { .. }))
                && tries.may_have_landed();
            if tries.may_have_landed()
                && let Ok(meta) = tries
                    .attempt(
                        &self.remote.client,
                        self.remote
                            .client
                            .objects
                            .get_opts(&self.path, head_options()),
                    )
                    .await
                    .map(|answer| answer.meta)
                && meta.size == size
                && (is_gone || meta.e_tag != self.before)
            {
                return Ok(meta.e_tag);
            }
            if is_gone {
                return Err(tries.give_up("the response to the completion was lost, and neither the upload nor the object exists; write the object again"));
            }
            tries.pause(fault).await?;
        }
    }

    /// Stops sending, and waits until the store has discarded the parts.
    pub(crate) async fn abort(&mut self) -> Result<()> {
        self.sending.shutdown().await;
        match self.id.take() {
            Some(id) => self.abandon(id).await,
            None => Ok(()),
        }
    }

    /// Makes the store discard the upload `id`. Azure has no such request and discards blocks after a week.
    fn abandon(&self, id: Arc<str>) -> impl Future<Output = Result<()>> + use<> {
        let (remote, key, path) = (self.remote.clone(), self.key.clone(), self.path.clone());
        let service = Arc::clone(&self.service);
        async move {
            let id = id.to_string();
            let mut tries = Tries::new(&remote.handle, &key, Load::None);
            loop {
                match tries
                    .attempt(&remote.client, service.abort_multipart(&path, &id))
                    .await
                {
                    Ok(()) | Err(Fault::Final(StoreError::NotFound { .. })) => return Ok(()),
                    Err(fault) => tries.pause(fault).await?,
                }
            }
        }
    }

    fn uri(&self) -> String {
        self.remote.handle.object_uri(&self.key)
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        // The copy in a forked child must not end the parent's upload.
        if self.pid != std::process::id() {
            return;
        }
        if let Some(id) = self.id.take() {
            self.sending.abort_all();
            let abandoned = self.abandon(id);
            runtime::spawn(async move {
                // This runs in a drop and cannot report an error; the bucket's lifecycle rule removes the rest.
                let _ = abandoned.await;
            });
        }
    }
}

fn head_options() -> object_store::GetOptions {
    object_store::GetOptions {
        head: true,
        ..object_store::GetOptions::default()
    }
}

/// Joins all pieces into one buffer; a single piece is not copied.
fn join(mut pieces: Vec<Bytes>) -> Bytes {
    match pieces.len() {
        0 | 1 => pieces.pop().unwrap_or_default(),
        _ => pieces.concat().into(),
    }
}
