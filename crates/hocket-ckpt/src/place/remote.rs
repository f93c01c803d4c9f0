//! Operations on object stores.
//!
//! Only the calling thread accesses the caller's memory; the I/O threads use their own buffers. An interrupt
//! can therefore abandon requests at once.

use std::future::Future;
use std::sync::mpsc;

use hocket_store::execution::{defect, receive};
use hocket_store::{LevelListing, Store, StoreError, runtime};

use super::files::FileEnds;
use crate::error::{CkptError, Result};
use crate::format::names::is_ours;
use crate::workers::Interrupted;

/// Limit of concurrent requests of one operation.
const WINDOW: usize = 16;

/// Runs a future on the I/O threads and waits for it.
pub(crate) fn wait<T, F>(future: F, interrupted: Interrupted<'_>) -> Result<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    runtime::wait(future, interrupted)?
}

/// Runs `count` futures on the I/O threads, with a limited number in flight, and passes each result to `take`
/// on the calling thread in the order of completion. An error or an interrupt cancels the rest.
pub(crate) fn gather<T, F>(
    count: usize,
    mut make: impl FnMut(usize) -> F,
    mut take: impl FnMut(usize, T) -> Result<()>,
    interrupted: Interrupted<'_>,
) -> Result<()>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel();
    let mut running = TaskGroup(Vec::new());
    let mut begin = |index: usize| {
        let (answer, future) = (
            TaskSlot {
                index,
                sender: sender.clone(),
                is_given: false,
            },
            make(index),
        );
        let task = runtime::spawn(async move { answer.give(future.await) })?;
        running.0.push(task);
        Ok::<(), CkptError>(())
    };
    (0..count.min(WINDOW)).try_for_each(&mut begin)?;
    let mut begun = count.min(WINDOW);
    for _ in 0..count {
        let ended = receive(&receiver, interrupted)?;
        let (index, result) = ended.ok_or_else(|| defect("an I/O task"))?;
        if begun < count {
            begin(begun)?;
            begun += 1;
        }
        take(index, result?)?;
    }
    Ok(())
}

/// Runs futures as [`gather`] does, and returns their results in the order of the futures.
pub(crate) fn gather_all<T, F>(
    count: usize,
    make: impl FnMut(usize) -> F,
    interrupted: Interrupted<'_>,
) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let take = |index: usize, result| {
        results[index] = Some(result);
        Ok(())
    };
    gather(count, make, take, interrupted)?;
    Ok(results.into_iter().flatten().collect())
}

/// The result slot of a task. If it is dropped unset because the task panicked, it sends an error, so that the
/// receiver does not wait forever.
struct TaskSlot<T> {
    index: usize,
    sender: mpsc::Sender<(usize, Result<T>)>,
    is_given: bool,
}

impl<T> TaskSlot<T> {
    fn give(mut self, result: Result<T>) {
        self.is_given = true;
        // The receiver is gone only if the operation has stopped.
        let _ = self.sender.send((self.index, result));
    }
}

impl<T> Drop for TaskSlot<T> {
    fn drop(&mut self) {
        if !self.is_given {
            let error = CkptError::from(defect("an I/O task"));
            let _ = self.sender.send((self.index, Err(error)));
        }
    }
}

/// Tasks that are aborted when the operation that started them ends.
struct TaskGroup(Vec<tokio::task::JoinHandle<()>>);

impl Drop for TaskGroup {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

/// Reads the first `limit` bytes of an object, or all of a smaller one; returns none if it does not exist.
pub(crate) async fn get_start(store: Store, key: String, limit: u64) -> Result<Option<Vec<u8>>> {
    Ok(get_ends(store, key, limit, 0).await?.map(|ends| ends.start))
}

/// Reads as [`get_start`] does, and the last `last` bytes of the same object, which may be fewer.
///
/// An object replaced between the size query and the read is read again, so that a prefix is not taken for the
/// whole.
pub(crate) async fn get_ends(
    store: Store,
    key: String,
    limit: u64,
    last: usize,
) -> Result<Option<FileEnds>> {
    let mut seen = None;
    loop {
        let Some(meta) = found_remote(store.head(&key).await)? else {
            return Ok(None);
        };
        let end = meta.size.saturating_sub(last as u64)..meta.size;
        let pieces = if meta.size <= limit {
            let whole = store.get(&key).await;
            whole.map(|bytes| {
                vec![
                    bytes.clone(),
                    bytes.slice(bytes.len().saturating_sub(last)..),
                ]
            })
        } else {
            store.get_ranges(&key, &[0..limit, end]).await
        };
        match found_remote(pieces) {
            Err(_) if seen.as_ref() != Some(&meta.etag) => seen = Some(meta.etag),
            pieces => {
                let mut pieces = pieces?.into_iter().flatten().map(|bytes| bytes.to_vec());
                return Ok(pieces.next().map(|start| FileEnds {
                    start,
                    end: pieces.next().unwrap_or_default(),
                }));
            }
        }
    }
}

/// Returns whether data files of Hocket exist below `prefix`, which ends with `/` or is empty.
pub(crate) async fn has_data(store: Store, prefix: String) -> Result<bool> {
    let listing = store.list_dirs(&format!("{prefix}data")).await?;
    let mut keys = listing.objects.iter().map(|object| &object.key);
    Ok(keys.any(|key| key.strip_prefix(&prefix).is_some_and(is_ours)))
}

/// Lists the objects and folders directly below the store's prefix.
pub(crate) fn level(store: &Store, interrupted: Interrupted<'_>) -> Result<LevelListing> {
    let store = store.clone();
    wait(async move { Ok(store.list_dirs("").await?) }, interrupted)
}

/// Returns the size of an object in bytes; none if it does not exist.
pub(crate) async fn size(store: Store, key: String) -> Result<Option<u64>> {
    Ok(found_remote(store.head(&key).await)?.map(|meta| meta.size))
}

/// Returns whether an error leaves open which writer succeeded; the object must then be read back.
pub(crate) fn is_unsettled(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Exists { .. } | StoreError::Changed { .. } | StoreError::Transient { .. }
    )
}

/// Maps a missing object to none.
pub(crate) fn found_remote<T>(result: hocket_store::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
