//! Row groups of Parquet files: fetched by byte ranges, or read in place, and decoded.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;
use hocket_store::{Interrupted, Object, StoreError};
use memmap2::Mmap;

use super::Cache;
use crate::cache::remote;
use crate::error::{Result, StreamError};
use crate::parquet::transcode::transcode;
use crate::shard::info::{FileInfo, ShardInfo};
use crate::shard::row_group::RowGroup;

impl Cache {
    /// Returns a row group as the bytes of an MDS shard.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`]; [`StoreError::Changed`] for a file that is not the one whose footer was
    /// read; those of [`transcode`]; the store's own errors.
    pub(super) fn decoded(
        &self,
        shard: &ShardInfo,
        group: &RowGroup,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<u8>> {
        let Some(remote) = &self.remote else {
            let path = self.options.local.join(&group.file);
            let parts = in_place(&path, group)?;
            return transcode(shard, group, &path.display().to_string(), parts);
        };
        let whole = FileInfo {
            basename: group.file.clone(),
            bytes: group.file_bytes,
            hashes: Vec::new(),
        };
        let read = |object: &Object| {
            let found = remote::get_ranges(object, &group.reads(), interrupted);
            check_same(group, &object.uri(), object.size(), object.etag())?;
            let parts = found?.ok_or_else(|| missing(group, object.uri()))?;
            let bytes = parts.iter().map(|part| part.len() as u64).sum();
            self.counters.fetched(bytes);
            transcode(shard, group, &object.uri(), parts)
        };
        self.versions.read(remote, &whole, false, read)
    }
}

/// Returns the byte ranges of a row group of a local file, without a copy.
fn in_place(path: &Path, group: &RowGroup) -> Result<Vec<Bytes>> {
    let file = File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => missing(group, path.display().to_string()),
        _ => StreamError::io(path, "open", &error),
    })?;
    let size = file.metadata().map(|metadata| metadata.len());
    let size = size.map_err(|error| StreamError::io(path, "look at", &error))?;
    check_same(group, &path.display().to_string(), Some(size), None)?;
    // SAFETY: the map is only read. It is the user's file: a program that truncates it during the run would end
    // this process, as with every reader of mapped files; writers of Parquet make new files.
    let map = unsafe { Mmap::map(&file) };
    let whole = Bytes::from_owner(map.map_err(|error| StreamError::io(path, "map", &error))?);
    let part = |range: std::ops::Range<u64>| {
        let end = range.end.min(size);
        whole.slice(range.start.min(end) as usize..end as usize)
    };
    Ok(group.reads().into_iter().map(part).collect())
}

/// Refuses a file with another size or entity tag than it had when its footer was read.
fn check_same(group: &RowGroup, uri: &str, size: Option<u64>, etag: Option<&str>) -> Result<()> {
    let changed = |expected: String, actual: String| {
        StreamError::Store(StoreError::Changed {
            uri: uri.to_owned(),
            expected,
            actual,
        })
    };
    if let Some(size) = size.filter(|&size| size != group.file_bytes) {
        return Err(changed(
            format!("[of a file of {} bytes]", group.file_bytes),
            format!("[of one of {size} bytes]"),
        ));
    }
    match (group.etag.as_deref(), etag) {
        (Some(expected), Some(actual)) if expected != actual => {
            Err(changed(expected.to_owned(), actual.to_owned()))
        }
        _ => Ok(()),
    }
}

fn missing(group: &RowGroup, uri: String) -> StreamError {
    StreamError::ShardNotFound {
        shard: group.file.clone(),
        uri,
    }
}
