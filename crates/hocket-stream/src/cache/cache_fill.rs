//! Cache fills: download, decompress and verify a temporary file, then rename it.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Cache;
use super::limit::{CacheLimit, LimitLock};
use super::mapped::{MappedFile, map, stamp};
use super::origin::ShardMark;
use crate::cache::remote::{self, DatasetRemote};
use crate::error::{Result, StreamError};
use crate::shard::codec::Compression;
use crate::shard::files::UnfinishedFile;
use crate::shard::info::{FileInfo, ShardInfo, StoredFile};
use hocket_store::{Interrupted, Object};

/// After this many removals of one unfinished file, its shard is held in memory.
const MAX_REMOVALS: u32 = 3;

impl Cache {
    /// Creates a raw file, or waits for the process that is creating it. The file is held in memory if the
    /// limit leaves no room for it or shards are not kept. A part in the result contains the file's bytes, and
    /// the caller must commit it. If the cache folder is removed in the meantime, the file is created again.
    pub(super) fn admit(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        interrupted: Interrupted<'_>,
    ) -> Result<(MappedFile, Option<UnfinishedFile>)> {
        if !self.can_refetch(file) {
            return Err(StreamError::ShardNotFound {
                shard: file.raw.basename.clone(),
                uri: path.display().to_string(),
            });
        }
        // A file that a folder without write access lacks is refused below, with the folder's name.
        if !self.is_keeping() && (!self.is_unpacking_in_memory || self.is_packed_here(file)) {
            return Ok((self.in_memory(shard, file, interrupted)?, None));
        }
        let mut removals = 0;
        while removals < MAX_REMOVALS {
            match self.admit_once(shard, file, path, interrupted) {
                Ok(Some(admitted)) => return Ok(admitted),
                Ok(None) => {}
                Err(StreamError::Removed { .. }) => removals += 1,
                Err(error) => return Err(error),
            }
        }
        self.note(format!(
            "`{}` was removed {removals} times while it was being fetched, and is kept in memory instead; look for a program that deletes files in this folder",
            path.display()
        ));
        Ok((self.in_memory(shard, file, interrupted)?, None))
    }

    /// Makes one attempt of [`admit`](Self::admit); returns none if the file was evicted or replaced right after
    /// its creation.
    fn admit_once(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<(MappedFile, Option<UnfinishedFile>)>> {
        let Some(part) = self.part(path, file.raw.bytes, interrupted)? else {
            return Ok(Some((self.in_memory(shard, file, interrupted)?, None)));
        };
        // Another process may have created it while this one waited for the lock.
        if let Some(bytes) = self.map(path, Some(interrupted))?
            && self.check_held(shard, file, path, &bytes).is_ok()
        {
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Some((bytes, None)));
        }
        if !self.has_room(interrupted)? {
            drop(part);
            return Ok(Some((self.pass_through(shard, file, interrupted)?, None)));
        }
        self.attempt(|| self.make(shard, file, &part, interrupted))?;
        self.mark(&part);
        if self.limit.is_none() {
            let bytes = map(part.path())?;
            return match bytes {
                Some(bytes) if !part.is_removed() => Ok(Some((bytes, Some(part)))),
                _ => Err(StreamError::removed(part.path())),
            };
        }
        // A lock on the final name protects the file from eviction.
        let made = fs::metadata(part.path()).ok().and_then(|part| stamp(&part));
        if let Some(part) = self.commit(part, interrupted)? {
            self.counters.passed.fetch_add(1, Ordering::Relaxed);
            let bytes = fs::read(part.path());
            let bytes = bytes.map_err(|e| read_error(&part, "read", &e))?;
            return Ok(Some((MappedFile::memory(bytes), None)));
        }
        // The file may be evicted or replaced before the lock is taken; it is then checked or created again.
        let bytes = self.map(path, Some(interrupted))?;
        let bytes = bytes.filter(|bytes| bytes.stamp() == made);
        Ok(bytes.map(|bytes| (bytes, None)))
    }

    /// Returns the lock for creating a file of `bytes`; none if another process has held it for too long.
    fn part(
        &self,
        path: &Path,
        bytes: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<UnfinishedFile>> {
        let wait = self
            .options
            .wait
            .saturating_add(Duration::from_secs(bytes >> 20));
        let until = Instant::now().checked_add(wait);
        let is_late = || until.is_some_and(|until| Instant::now() > until);
        match UnfinishedFile::lock(path, &|| interrupted() || is_late()) {
            Err(StreamError::Closed) if !interrupted() => {
                self.note(format!(
                    "`{}` is locked by a process that makes no progress on it, and is kept in memory here instead; look for a stopped process",
                    path.display()
                ));
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// Returns the bytes of a raw file that does not fit under the limit.
    fn pass_through(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        interrupted: Interrupted<'_>,
    ) -> Result<MappedFile> {
        let is_first = self.counters.passed.fetch_add(1, Ordering::Relaxed) == 0;
        let is_late = self.limit.as_ref().is_some_and(|limit| limit.is_late());
        if is_first && !is_late {
            self.note(format!(
                "`cache_limit` has no room for shard `{}` beside the shards in use, so it is kept in memory and fetched again for each use; a larger limit is faster",
                file.raw.basename
            ));
        }
        self.in_memory(shard, file, interrupted)
    }

    /// Returns the bytes of a raw file, held in memory only.
    fn in_memory(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        interrupted: Interrupted<'_>,
    ) -> Result<MappedFile> {
        let raw = self.attempt(|| {
            if let Some(group) = &shard.row_group {
                return self.decoded(shard, group, interrupted);
            }
            if let (Some(zip), Some(compression)) = (&file.zip, shard.compression) {
                return self.unpacked(shard, file, zip, compression, interrupted);
            }
            self.get(&file.raw, interrupted, |origin, bytes| {
                self.check_raw(shard, file, origin, &bytes)?;
                Ok(bytes)
            })
        })?;
        Ok(MappedFile::memory(raw))
    }

    /// Calls `make` again after wrong bytes, as often as the options allow.
    fn attempt<T>(&self, make: impl Fn() -> Result<T>) -> Result<T> {
        let mut attempt = 1;
        loop {
            match make() {
                Err(error @ StreamError::ShardCorrupt { .. })
                    if attempt < self.options.download_retry =>
                {
                    self.note(format!(
                        "{error}; attempt {attempt} of {}",
                        self.options.download_retry
                    ));
                    attempt += 1;
                }
                other => return other,
            }
        }
    }

    /// Makes one attempt to fill `part` with the verified raw file.
    fn make(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        part: &UnfinishedFile,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let raw = match (&shard.row_group, &file.zip, shard.compression) {
            (Some(group), ..) => Some(self.decoded(shard, group, interrupted)?),
            (None, Some(zip), Some(compression)) => {
                Some(self.unpacked(shard, file, zip, compression, interrupted)?)
            }
            _ => None,
        };
        if let Some(raw) = raw {
            check_is_there(part)?;
            return fs::write(part.path(), &raw).map_err(|e| read_error(part, "write", &e));
        }
        self.download(&file.raw, part, interrupted, |origin, bytes| {
            self.check_raw(shard, file, origin, bytes)
        })
    }

    /// Makes one attempt to unpack a raw file from its compressed file, which is kept in the cache if the
    /// option `keep_zip` is set.
    fn unpacked(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        zip: &FileInfo,
        compression: Compression,
        interrupted: Interrupted<'_>,
    ) -> Result<Vec<u8>> {
        let unpack = |origin: &str, packed: &[u8]| {
            self.check(zip, origin, packed)?;
            let raw = compression
                .unpack(packed, file.raw.bytes)
                .map_err(|actual| StreamError::ShardCorrupt {
                    shard: zip.basename.clone(),
                    object: origin.into(),
                    expected: format!("{} bytes packed as {compression}", file.raw.bytes),
                    actual,
                })?;
            self.check_raw(shard, file, origin, &raw)?;
            Ok(raw)
        };
        let path = self.options.local.join(&zip.basename);
        if let Some(bytes) = self.map(&path, Some(interrupted))? {
            let is_ours = self.check_origin(zip, &path, &bytes);
            match is_ours.and_then(|()| unpack(&path.display().to_string(), &bytes)) {
                Err(error @ StreamError::ShardCorrupt { .. }) if self.remote.is_some() => {
                    self.note(format!("{error}; it is fetched again"));
                }
                other => return other,
            }
        }
        // Under a limit, or if shards are not kept, a compressed file that is not kept is unpacked from memory,
        // so that it takes up no room in the folder.
        if !self.options.keep_zip && (self.limit.is_some() || !self.is_keeping()) {
            return self.get(zip, interrupted, |origin, bytes| unpack(origin, &bytes));
        }
        let packed = match self.part(&path, zip.bytes, interrupted)? {
            Some(part) if self.has_room(interrupted)? => Some(part),
            _ => None,
        };
        let Some(packed) = packed else {
            return self.get(zip, interrupted, |origin, bytes| unpack(origin, &bytes));
        };
        let raw = match self.download(zip, &packed, interrupted, unpack) {
            Err(StreamError::Removed { .. }) => {
                return self.get(zip, interrupted, |origin, bytes| unpack(origin, &bytes));
            }
            other => other?,
        };
        if self.options.keep_zip {
            self.mark(&packed);
            match self.commit(packed, interrupted) {
                // The raw file was unpacked already; the compressed one is not kept.
                Err(StreamError::Removed { .. }) => {}
                other => drop(other?),
            }
        }
        Ok(raw)
    }

    /// Evicts files as needed and returns whether the existing parts now fit under the limit.
    fn has_room(&self, interrupted: Interrupted<'_>) -> Result<bool> {
        let Some(limit) = &self.limit else {
            return Ok(true);
        };
        let turn = self.turn(limit, interrupted)?;
        turn.map_or(Ok(false), |turn| limit.make_room(&turn))
    }

    /// Returns the lock for changes to the cache folders; none if another process has held it for too long.
    fn turn(&self, limit: &CacheLimit, interrupted: Interrupted<'_>) -> Result<Option<LimitLock>> {
        let was_late = limit.is_late();
        let turn = limit.turn(self.options.wait, interrupted)?;
        if turn.is_none() && !was_late {
            self.note(format!(
                "`{}` is locked by a process that makes no progress, and shards are kept in memory here until it releases the lock; look for a stopped process",
                self.options.local.display()
            ));
        }
        Ok(turn)
    }

    /// Records the data set of a part in its mark.
    fn mark(&self, part: &UnfinishedFile) {
        if let Some(mark) = &self.mark {
            if self.is_ambiguous() {
                ShardMark::provisional().write(part.path());
            } else {
                mark.write(part.path());
            }
        }
    }

    /// Commits a part; returns it if the lock of another process prevents the rename.
    fn commit(
        &self,
        part: UnfinishedFile,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<UnfinishedFile>> {
        part.sync()?;
        let Some(limit) = &self.limit else {
            return part.commit().map(|()| None);
        };
        // The rename must not happen while another process sums up the folder, which could then miss both
        // names.
        match self.turn(limit, interrupted)? {
            Some(_turn) => part.commit().map(|()| None),
            None => Ok(Some(part)),
        }
    }

    /// Fetches a file from the remote and returns the result of `take` for its bytes and their origin.
    fn get<T>(
        &self,
        file: &FileInfo,
        interrupted: Interrupted<'_>,
        take: impl FnOnce(&str, Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        self.fetch(file, interrupted, |object| {
            let bytes = remote::get(object, Some(file.bytes), &interrupted)?;
            let bytes = bytes.ok_or_else(|| missing(file, object.uri()))?;
            self.counters.fetched(file.bytes);
            take(&object.uri(), bytes)
        })
    }

    /// Fetches like [`get`](Self::get), but through `part`, which keeps the bytes.
    fn download<T>(
        &self,
        file: &FileInfo,
        part: &UnfinishedFile,
        interrupted: Interrupted<'_>,
        take: impl FnOnce(&str, &[u8]) -> Result<T>,
    ) -> Result<T> {
        self.fetch(file, interrupted, |object| {
            check_is_there(part)?;
            let is_found = match remote::download(object, file.bytes, part.path(), interrupted) {
                Err(StreamError::Io { .. }) if part.is_removed() => {
                    return Err(StreamError::removed(part.path()));
                }
                other => other?,
            };
            if !is_found {
                return Err(missing(file, object.uri()));
            }
            self.counters.fetched(file.bytes);
            let bytes = map(part.path())?;
            check_is_there(part)?;
            take(&object.uri(), bytes.as_ref().map_or(&[], |bytes| bytes))
        })
    }

    /// Reads a whole file from the remote; without a digest, its version must equal that of earlier reads.
    fn fetch<T>(
        &self,
        file: &FileInfo,
        interrupted: Interrupted<'_>,
        read: impl FnOnce(&Object) -> Result<T>,
    ) -> Result<T> {
        let is_checked = self.digest(file).is_some();
        let remote = self.remote_of(file)?;
        self.versions.read(remote, file, is_checked, |object| {
            let value = read(object)?;
            self.check_version(file, object, interrupted)?;
            Ok(value)
        })
    }

    fn remote_of(&self, file: &FileInfo) -> Result<&DatasetRemote> {
        let path = || self.options.local.join(&file.basename);
        self.remote
            .as_ref()
            .ok_or_else(|| missing(file, path().display().to_string()))
    }

    /// Returns whether the raw file can be created again, from a remote or from the compressed file beside it.
    pub(super) fn can_refetch(&self, file: &StoredFile) -> bool {
        self.remote.is_some() || self.is_decoding_in_memory || self.is_packed_here(file)
    }

    /// Returns whether the compressed file is in the folder.
    fn is_packed_here(&self, file: &StoredFile) -> bool {
        let zip = file.zip.as_ref();
        zip.is_some_and(|zip| self.options.local.join(&zip.basename).exists())
    }
}

/// Returns an error if the part was removed.
fn check_is_there(part: &UnfinishedFile) -> Result<()> {
    if part.is_removed() {
        return Err(StreamError::removed(part.path()));
    }
    Ok(())
}

/// Builds the error of a failed call on a part, which another program may have removed.
fn read_error(part: &UnfinishedFile, doing: &str, error: &std::io::Error) -> StreamError {
    if part.is_removed() {
        return StreamError::removed(part.path());
    }
    StreamError::io(part.path(), doing, error)
}

fn missing(file: &FileInfo, uri: String) -> StreamError {
    StreamError::ShardNotFound {
        shard: file.basename.clone(),
        uri,
    }
}
