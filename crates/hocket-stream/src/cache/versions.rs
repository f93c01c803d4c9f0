//! The version of each remote object that this data set is read from.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hocket_store::Object;

use crate::cache::remote::DatasetRemote;
use crate::error::{Result, StreamError};
use crate::shard::info::FileInfo;

/// The objects read so far, each pinned to the version that was seen first.
#[derive(Default)]
pub(super) struct PinnedVersions(Mutex<HashMap<String, Object>>);

impl PinnedVersions {
    /// Reads `file` in the version of earlier reads.
    ///
    /// If the digest of the whole file `is_checked`, that is sufficient: the object may be rewritten with the
    /// same bytes, and the version just read is then pinned for range reads.
    ///
    /// # Errors
    /// Those of `read`; a [`StreamError::ShardCorrupt`] pins no version.
    pub(super) fn read<T>(
        &self,
        remote: &DatasetRemote,
        file: &FileInfo,
        is_checked: bool,
        read: impl FnOnce(&Object) -> Result<T>,
    ) -> Result<T> {
        let fresh = || remote.object(&file.basename);
        if is_checked {
            let object = fresh();
            let outcome = read(&object)?;
            self.with(|objects| objects.insert(file.basename.clone(), object));
            return Ok(outcome);
        }
        let object = self.with(|objects| {
            let object = objects.entry(file.basename.clone()).or_insert_with(fresh);
            object.clone()
        });
        let was_seen = object.size().is_some();
        let outcome = read(&object);
        if !was_seen && matches!(outcome, Err(StreamError::ShardCorrupt { .. })) {
            self.with(|objects| objects.remove(&file.basename));
        }
        outcome
    }

    fn with<T>(&self, work: impl FnOnce(&mut HashMap<String, Object>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
