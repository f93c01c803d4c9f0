//! Multipart uploads with several parts in flight; the object becomes visible at completion.

use crate::error::{Result, StoreError};
use crate::process::budget;
use crate::process::runtime;
use crate::remote::failed_attempt::FailedAttempt;
use crate::remote::part_sizes::{first_part_bytes, next_part_bytes};
use crate::remote::requests::{RemoteStore, found};
use crate::remote::retry::{RetryState, TransferBytes};
use crate::values::meta::PutMode;
use bytes::{Buf, Bytes};
use object_store::PutPayload;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as ObjectPath;
use std::sync::Arc;
use tokio::task::JoinSet;

/// A multipart upload, started with the first full part; a small object is sent as a plain PUT.
pub(crate) struct MultipartUpload {
    remote: RemoteStore,
    key: String,
    service: Arc<dyn MultipartStore>,
    path: ObjectPath,
    part_bytes: u64,
    /// Whether the part size grows with the number of parts, because the total size is unknown. Otherwise all
    /// parts but the last have one size: Cloudflare's R2 refuses others.
    grows: bool,
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

impl MultipartUpload {
    /// Prepares an upload to `key` of `remote`; makes no request.
    pub(crate) fn new(remote: &RemoteStore, key: &str, size_hint: Option<u64>) -> Result<Self> {
        let Some(service) = remote.client.multipart.clone() else {
            return Err(StoreError::upload_ended(remote.handle.uri())); // normally rejected by `check_verb`
        };
        Ok(Self {
            path: remote.handle.path(key)?,
            remote: remote.clone(),
            key: key.to_owned(),
            service,
            part_bytes: first_part_bytes(size_hint),
            grows: size_hint.is_none(),
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
        if self.grows {
            self.part_bytes = next_part_bytes(self.part_bytes, self.sent.len() as u64);
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
            let request = || service.put_part(&path, &id, index, payload.clone());
            let part = remote.with_retries(&key, TransferBytes::Up(size), request);
            Ok((index, part.await?))
        });
        Ok(())
    }

    async fn begin(&mut self) -> Result<Arc<str>> {
        let before = found(self.remote.head(&self.key).await)?;
        self.before = before.and_then(|meta| meta.etag);
        let request = || self.service.create_multipart(&self.path);
        let id = (self.remote).with_retries(&self.key, TransferBytes::None, request);
        let id = id.await?;
        Ok(Arc::clone(self.id.insert(id.into())))
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
        // Not `with_retries`: after a lost response, another request finds out whether the completion took effect.
        let mut tries = RetryState::new(&self.remote.handle, &self.key, TransferBytes::None);
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
            let is_gone = matches!(fault, FailedAttempt::Final(StoreError::NotFound { .. }))
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
            let request = || service.abort_multipart(&path, &id);
            let aborted = remote.with_retries(&key, TransferBytes::None, request);
            found(aborted.await).map(Option::unwrap_or_default)
        }
    }

    fn uri(&self) -> String {
        self.remote.handle.object_uri(&self.key)
    }
}

impl Drop for MultipartUpload {
    fn drop(&mut self) {
        // The copy in a forked child must not end the parent's upload.
        if self.pid != std::process::id() {
            return;
        }
        if let Some(id) = self.id.take() {
            self.sending.abort_all();
            let abandoned = self.abandon(id);
            // This runs in a drop and cannot report an error; the bucket's lifecycle rule removes the rest.
            let _ = runtime::spawn(async move {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::client;
    use crate::remote::part_sizes::{MAX_PART_BYTES, MAX_PARTS, PART_BYTES};
    use crate::values::handle::StoreHandle;
    use crate::values::options::StoreOptions;
    use async_trait::async_trait;
    use object_store::{MultipartId, PutResult};
    use std::sync::Mutex;

    const GIB: u64 = 1 << 30;

    /// A service that keeps only the sizes of the parts, by their number.
    #[derive(Default)]
    struct Sizes(Mutex<Vec<(usize, u64)>>);

    #[async_trait]
    impl MultipartStore for Sizes {
        async fn create_multipart(&self, _: &ObjectPath) -> object_store::Result<MultipartId> {
            Ok("1".to_owned())
        }

        async fn put_part(
            &self,
            _: &ObjectPath,
            _: &MultipartId,
            index: usize,
            data: PutPayload,
        ) -> object_store::Result<PartId> {
            let mut sizes = self.0.lock().unwrap();
            sizes.push((index, data.content_length() as u64));
            Ok(PartId {
                content_id: String::new(),
            })
        }

        async fn complete_multipart(
            &self,
            _: &ObjectPath,
            _: &MultipartId,
            _: Vec<PartId>,
        ) -> object_store::Result<PutResult> {
            Ok(PutResult {
                e_tag: None,
                version: None,
                extensions: Default::default(),
            })
        }

        async fn abort_multipart(
            &self,
            _: &ObjectPath,
            _: &MultipartId,
        ) -> object_store::Result<()> {
            Ok(())
        }
    }

    /// Uploads an object of `size` bytes; returns the sizes of the parts in order.
    fn upload(size: u64, size_hint: Option<u64>) -> Vec<u64> {
        let service = Arc::new(Sizes::default());
        let multipart = Arc::clone(&service);
        let upload = async move {
            let handle = StoreHandle::open("memory://parts", StoreOptions::default())?;
            let client = client::memory("parts", handle.options());
            let mut parts = MultipartUpload::new(&RemoteStore { handle, client }, "k", size_hint)?;
            parts.service = multipart;
            // All parts share one buffer.
            let piece = Bytes::from(vec![0; 3 << 20]);
            let mut left = size;
            while left > 0 {
                let data = piece.slice(..piece.len().min(left as usize));
                left -= data.len() as u64;
                parts.write(data).await?;
            }
            parts.finish(size).await
        };
        runtime::wait(upload, &|| false).unwrap().unwrap();
        let mut sizes = std::mem::take(&mut *service.0.lock().unwrap());
        sizes.sort_unstable();
        sizes.into_iter().map(|(_, size)| size).collect()
    }

    #[test]
    fn all_parts_of_an_upload_of_known_size_have_one_size() {
        for size in [20 << 20, 9 * GIB + 1] {
            let sizes = upload(size, Some(size));
            let (last, others) = sizes.split_last().unwrap();
            assert!(others.iter().all(|part| *part == PART_BYTES), "{size}");
            assert!(*last <= PART_BYTES);
            assert_eq!(sizes.iter().sum::<u64>(), size);
        }
    }

    #[test]
    fn parts_of_an_upload_of_unknown_size_grow() {
        let sizes = upload(9 * GIB, None);
        assert_eq!(sizes[..1000], [PART_BYTES; 1000]);
        assert_eq!(sizes[1000], 2 * PART_BYTES);
        let largest = (0..MAX_PARTS).fold((0, PART_BYTES), |(sum, part), num_parts| {
            (sum + part, next_part_bytes(part, num_parts + 1))
        });
        assert!(largest.0 > 5120 * GIB && largest.1 <= MAX_PART_BYTES);
    }
}
