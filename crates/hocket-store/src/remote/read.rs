//! Reads from a remote store: parts in parallel, all with the same ETag.

use crate::error::{Result, StoreError};
use crate::process::budget;
use crate::process::memory::prefer_huge_pages;
use crate::process::runtime::blocking;
use crate::remote::failed_attempt::FailedAttempt;
use crate::remote::requests::{RemoteStore, get_options};
use crate::remote::retry::{RetryState, TransferBytes};
use crate::values::meta::ObjectMeta;
use crate::values::pin::VersionPin;
use crate::values::ranges::{COALESCE_GAP_BYTES, coalesce, covering, split};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use object_store::path::Path as ObjectPath;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// An object being read. Clones share the pinned ETag of the first response.
#[derive(Clone)]
pub(crate) struct RemoteObject {
    remote: RemoteStore,
    key: String,
    path: ObjectPath,
    pin: VersionPin,
}

impl RemoteObject {
    pub(crate) fn new(remote: &RemoteStore, key: &str, pin: VersionPin) -> Result<Self> {
        let path = remote.handle.path(key)?;
        Ok(Self {
            remote: remote.clone(),
            key: key.to_owned(),
            path,
            pin,
        })
    }

    /// See [`Object::get`](crate::Object::get).
    pub(crate) async fn get(self, size: Option<u64>) -> Result<Bytes> {
        let (first, meta) = self.first_part().await?;
        meta.check_size(self.uri(), size)?;
        if first.len() as u64 == meta.size {
            return Ok(first.freeze());
        }
        // The size comes from the server; an allocation that cannot succeed must not abort the process.
        if Vec::<u8>::new()
            .try_reserve_exact(meta.size as usize)
            .is_err()
        {
            let size = meta.size;
            return Err(StoreError::io(
                self.uri(),
                format!(
                    "its {size} bytes do not fit into memory; read it in ranges, or download it"
                ),
            ));
        }
        // One allocation, split into one slice per part: parts fill it in parallel and are joined without a
        // copy.
        let mut whole = BytesMut::with_capacity(meta.size as usize);
        prefer_huge_pages(whole.spare_capacity_mut());
        let mut rest = whole.split_off(first.len());
        whole.extend_from_slice(&first);
        let parts = split(first.len() as u64..meta.size, self.part_bytes());
        drop(first);
        let mut tasks = JoinSet::new();
        for (index, range) in parts.iter().cloned().enumerate() {
            let after = rest.split_off((range.end - range.start) as usize);
            let mut place = std::mem::replace(&mut rest, after);
            let source = self.clone();
            tasks.spawn(async move {
                source.fetch(range, &mut place).await?;
                Ok((index, place))
            });
        }
        let mut places: Vec<BytesMut> = vec![BytesMut::new(); parts.len()];
        while let Some((index, place)) = next(&mut tasks).await? {
            places[index] = place;
        }
        for place in places {
            whole.unsplit(place);
        }
        Ok(whole.freeze())
    }

    /// See [`Store::get_ranges`](crate::Store::get_ranges).
    pub(crate) async fn get_ranges(self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let cover = coalesce(ranges, COALESCE_GAP_BYTES);
        if cover.is_empty() {
            // Nothing to fetch, but the request still checks that the object exists and is long enough.
            let meta = self.remote.head(&self.key).await?;
            self.pin.check(self.uri(), &meta)?;
            let size = meta.size;
            let beyond = ranges.iter().find(|range| range.end > size);
            return beyond.map_or_else(
                || Ok(vec![Bytes::new(); ranges.len()]),
                |range| Err(self.beyond(range, size)),
            );
        }
        let mut tasks = JoinSet::new();
        let mut wholes: Vec<Vec<Bytes>> = Vec::new();
        for (index, range) in cover.iter().enumerate() {
            let parts = split(range.clone(), self.part_bytes());
            wholes.push(vec![Bytes::new(); parts.len()]);
            for (part, range) in parts.into_iter().enumerate() {
                let source = self.clone();
                tasks.spawn(async move {
                    let mut data = BytesMut::new();
                    source.fetch(range, &mut data).await?;
                    Ok(((index, part), data.freeze()))
                });
            }
        }
        // An error for a part beyond the end names the range that the caller asked for.
        let beyond = |error| {
            let size = self.pin.seen().map_or(u64::MAX, |seen| seen.size);
            let range = ranges.iter().find(|range| range.end > size);
            range.map_or(error, |range| self.beyond(range, size))
        };
        while let Some(((index, part), data)) = next(&mut tasks).await.map_err(beyond)? {
            wholes[index][part] = data;
        }
        let wholes: Vec<Bytes> = wholes.into_iter().map(join).collect();
        let size = self.pin.seen().map_or(u64::MAX, |seen| seen.size);
        let cut = |range: &Range<u64>| match covering(&cover, range) {
            Some(index) if !range.is_empty() => {
                let start = (range.start - cover[index].start) as usize;
                Ok(wholes[index].slice(start..start + (range.end - range.start) as usize))
            }
            _ if range.end > size => Err(self.beyond(range, size)),
            _ => Ok(Bytes::new()),
        };
        ranges.iter().map(cut).collect()
    }

    /// See [`Store::download`](crate::Store::download).
    pub(crate) async fn download(self, path: &Path, size: Option<u64>) -> Result<ObjectMeta> {
        let (writing, mut written) = mpsc::channel(1);
        let outcome = self.download_with(path, size, &writing).await;
        drop(writing);
        if outcome.is_err() {
            // The tasks are aborted, but not the writes that they have started; the caller may truncate the file
            // for the next attempt. No value is sent: this waits until all tasks and writes have ended.
            written.recv().await;
        }
        outcome
    }

    /// Makes a download whose tasks and writes hold clones of `writing`.
    async fn download_with(
        &self,
        path: &Path,
        size: Option<u64>,
        writing: &mpsc::Sender<()>,
    ) -> Result<ObjectMeta> {
        let (name, to): (Arc<str>, _) = (path.to_string_lossy().into(), path.to_owned());
        let failed = {
            let name = Arc::clone(&name);
            move |error: std::io::Error| StoreError::from_io(&name, "write", &error)
        };
        let file = {
            let failed = failed.clone();
            blocking(move || File::create(&to).map(Arc::new).map_err(failed)).await?
        };
        // With a known size, all parts start without waiting for the first response.
        let known = size.unwrap_or(0);
        let mut tasks = self.download_parts(self.part_bytes()..known, &file, &name, writing);
        let (first, meta) = self.first_part().await?;
        meta.check_size(self.uri(), size)?;
        if size.is_none() {
            tasks = self.download_parts(first.len() as u64..meta.size, &file, &name, writing);
        }
        let size = meta.size;
        blocking(move || {
            file.set_len(size)
                .and_then(|()| file.write_all_at(&first, 0))
                .map_err(failed)
        })
        .await?;
        while next(&mut tasks).await?.is_some() {}
        Ok(meta)
    }

    /// Starts to fetch `range`, part by part, into its position in `file`; `name` is the file's name in error
    /// messages.
    fn download_parts(
        &self,
        range: Range<u64>,
        file: &Arc<File>,
        name: &Arc<str>,
        writing: &mpsc::Sender<()>,
    ) -> JoinSet<Result<()>> {
        let mut tasks = JoinSet::new();
        for range in split(range, self.part_bytes()) {
            let (source, file, name) = (self.clone(), Arc::clone(file), Arc::clone(name));
            let writing = writing.clone();
            tasks.spawn(async move {
                let start = range.start;
                let mut data = BytesMut::new();
                let _bytes = source.fetch(range, &mut data).await?;
                let failed =
                    move |error: std::io::Error| StoreError::from_io(&name, "write", &error);
                blocking(move || {
                    let _writing = writing;
                    file.write_all_at(&data, start).map_err(failed)
                })
                .await
            });
        }
        tasks
    }

    /// Fetches the first part, or the whole of a smaller object, with the object's metadata, in one request.
    async fn first_part(&self) -> Result<(BytesMut, ObjectMeta)> {
        // Not `with_retries`: a rejected range is the answer for an empty object, and another request shows which
        // it is.
        let mut tries = RetryState::new(
            &self.remote.handle,
            &self.key,
            TransferBytes::Down(self.part_bytes()),
        );
        let _bytes = budget::of_process()
            .take(self.part_bytes(), self.remote.handle.options().budget_bytes)
            .await;
        let want = self.remote.client.is_http().then(|| 0..self.part_bytes());
        loop {
            let mut data = BytesMut::new();
            match tries
                .attempt(&self.remote.client, self.request(want.clone(), &mut data))
                .await
            {
                Ok(meta) => {
                    let meta = self.check(meta)?;
                    return Ok((data, meta));
                }
                // An empty object has no first byte, so a ranged GET fails.
                Err(FailedAttempt::Range(_)) => {
                    let meta = self.remote.head(&self.key).await?;
                    if meta.size == 0 {
                        self.pin.check(self.uri(), &meta)?;
                        return Ok((BytesMut::new(), meta));
                    }
                    tries
                        .pause(FailedAttempt::Again {
                            reason: "the object grew while it was read".to_owned(),
                            landed: false,
                        })
                        .await?;
                }
                Err(FailedAttempt::Precondition) => return Err(self.changed().await),
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Appends the bytes of `range` to `data`, and resumes where a response was truncated. The bytes count as
    /// in flight until the returned guard is dropped.
    async fn fetch(
        &self,
        range: Range<u64>,
        data: &mut BytesMut,
    ) -> Result<crate::process::budget::BudgetShare> {
        let size = range.end - range.start;
        // Not `with_retries`: each attempt requests only the bytes that the attempts before it did not receive.
        let mut tries = RetryState::new(&self.remote.handle, &self.key, TransferBytes::Down(size));
        let bytes = budget::of_process()
            .take(size, self.remote.handle.options().budget_bytes)
            .await;
        if data.capacity() < size as usize {
            data.reserve(size as usize);
            prefer_huge_pages(data.spare_capacity_mut());
        }
        loop {
            let missing = range.start + data.len() as u64..range.end;
            match tries
                .attempt(&self.remote.client, self.request(Some(missing), data))
                .await
            {
                Ok(meta) => {
                    let meta = self.check(meta)?;
                    if data.len() as u64 == size {
                        return Ok(bytes);
                    }
                    return Err(self.beyond(&range, meta.size));
                }
                Err(FailedAttempt::Precondition) => return Err(self.changed().await),
                Err(FailedAttempt::Range(_)) => {
                    // The rejection did not include the size, which the message needs.
                    let meta = self.remote.head(&self.key).await?;
                    self.pin.check(self.uri(), &meta)?;
                    return Err(self.beyond(&range, meta.size));
                }
                Err(fault) => tries.pause(fault).await?,
            }
        }
    }

    /// Makes one GET, appends its body to `data`, and returns the object's metadata.
    async fn request(
        &self,
        range: Option<Range<u64>>,
        data: &mut BytesMut,
    ) -> object_store::Result<object_store::ObjectMeta> {
        let answer = self
            .remote
            .client
            .objects
            .get_opts(&self.path, get_options(range, self.pinned()))
            .await?;
        // Parts of two versions must not mix in one buffer, so the body of another version is not read.
        let is_ours = self
            .pinned()
            .is_none_or(|pinned| answer.meta.e_tag == Some(pinned));
        let (meta, expected) = (
            answer.meta.clone(),
            (answer.range.end - answer.range.start) as usize,
        );
        if !is_ours {
            return Ok(meta);
        }
        let before = data.len();
        data.reserve(expected);
        let mut body = answer.into_stream();
        while let Some(chunk) = body.next().await {
            let chunk = chunk?;
            data.extend_from_slice(&chunk);
            self.remote.client.count(&self.remote.handle, |counters| {
                counters.received(chunk.len() as u64)
            });
        }
        match data.len() - before {
            got if got == expected => Ok(meta),
            got => Err(object_store::Error::Generic {
                store: "S3",
                source: format!("the body ended after {got} of {expected} bytes").into(),
            }),
        }
    }

    /// Converts the client's metadata to this crate's, and rejects a version other than the pinned one.
    fn check(&self, meta: object_store::ObjectMeta) -> Result<ObjectMeta> {
        let meta = self.remote.handle.meta(&self.key, &meta);
        self.pin.check(self.uri(), &meta)?;
        Ok(meta)
    }

    fn pinned(&self) -> Option<String> {
        self.pin.seen()?.etag.clone()
    }

    /// Builds the error for a violated ETag condition.
    async fn changed(&self) -> StoreError {
        let expected = self.pinned().unwrap_or_default();
        self.remote.changed(&self.key, expected).await
    }

    fn part_bytes(&self) -> u64 {
        self.remote.handle.options().part_bytes
    }

    fn uri(&self) -> String {
        self.remote.handle.object_uri(&self.key)
    }

    fn beyond(&self, range: &Range<u64>, size: u64) -> StoreError {
        let (start, end) = (range.start, range.end);
        StoreError::io(
            self.uri(),
            format!("range {start}..{end} does not lie within the object's {size} bytes"),
        )
    }
}

/// Returns the next finished task's value. The first failure cancels the other tasks.
async fn next<T: 'static>(tasks: &mut JoinSet<Result<T>>) -> Result<Option<T>> {
    match tasks.join_next().await {
        None => Ok(None),
        Some(Ok(outcome)) => outcome.map(Some),
        Some(Err(error)) => Err(StoreError::io(
            "hocket",
            format!("the task of a part ended without a result: {error}"),
        )),
    }
}

/// Joins consecutive parts into one buffer; a single part is not copied.
fn join(mut parts: Vec<Bytes>) -> Bytes {
    if parts.len() == 1 {
        return parts.pop().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
    parts.iter().for_each(|part| whole.extend_from_slice(part));
    whole.freeze()
}
