//! How a shard comes into the cache: downloaded, unpacked and checked as a part, then named.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Cache;
use super::limit::{CacheLimit, Turn};
use super::mapped::{Mapped, map, stamp};
use crate::codec::Compression;
use crate::error::{Result, StreamError};
use crate::files::Part;
use crate::index::{FileInfo, ShardInfo, StoredFile};
use crate::remote::{self, Remote};
use hocket_store::Object;

impl Cache {
    /// Makes a raw file, or waits for the process that does. Where there is no room for it, it stays in memory.
    /// A part among the answer holds the bytes and has to be committed.
    pub(super) fn admit(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        stop: &AtomicBool,
    ) -> Result<(Mapped, Option<Part>)> {
        if !self.can_refetch(file) {
            return Err(StreamError::ShardNotFound {
                shard: file.raw.basename.clone(),
                uri: path.display().to_string(),
            });
        }
        loop {
            let Some(part) = self.part(path, file.raw.bytes, stop)? else {
                return Ok((self.in_memory(shard, file, stop)?, None));
            };
            // Another process may have admitted it while this one waited for the lock.
            if let Some(bytes) = self.map(path, Some(stop))?
                && self.check_held(shard, file, path, &bytes).is_ok()
            {
                self.counters.hits.fetch_add(1, Ordering::Relaxed);
                return Ok((bytes, None));
            }
            if !self.has_room(stop)? {
                drop(part);
                return Ok((self.pass_through(shard, file, stop)?, None));
            }
            self.attempt(|| self.make(shard, file, &part, stop))?;
            self.mark(&part);
            if self.limit.is_none()
                && let Some(bytes) = map(part.path())?
            {
                return Ok((bytes, Some(part)));
            }
            // What may be evicted is held by a lock on its final name.
            let made = fs::metadata(part.path()).ok().and_then(|part| stamp(&part));
            if let Some(part) = self.commit(part, stop)? {
                self.counters.passed.fetch_add(1, Ordering::Relaxed);
                let bytes = fs::read(part.path());
                let bytes = bytes.map_err(|e| StreamError::io(part.path(), "read", &e))?;
                return Ok((Mapped::memory(bytes), None));
            }
            // It may be evicted or replaced before it is held, and then it is looked at or made again.
            if let Some(bytes) = self.map(path, Some(stop))?
                && bytes.stamp() == made
            {
                return Ok((bytes, None));
            }
        }
    }

    /// The right to make a file of so many bytes; `None` where another process has had it for too long.
    fn part(&self, path: &Path, bytes: u64, stop: &AtomicBool) -> Result<Option<Part>> {
        let wait = self
            .options
            .wait
            .saturating_add(Duration::from_secs(bytes >> 20));
        let until = Instant::now().checked_add(wait);
        let is_late = || until.is_some_and(|until| Instant::now() > until);
        let is_stopped = || stop.load(Ordering::Relaxed);
        match Part::lock_unless(path, &|| is_stopped() || is_late()) {
            Err(StreamError::Closed) if !is_stopped() => {
                self.note(format!(
                    "`{}` is being made by a process that does not get on with it: it is held in memory here; look for one that is stopped",
                    path.display()
                ));
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// A raw file's bytes, for which there is no room.
    fn pass_through(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        stop: &AtomicBool,
    ) -> Result<Mapped> {
        let is_first = self.counters.passed.fetch_add(1, Ordering::Relaxed) == 0;
        let is_late = self.limit.as_ref().is_some_and(|limit| limit.is_late());
        if is_first && !is_late {
            self.note(format!(
                "`cache_limit` leaves no room for shard `{}` beside those in use: it is held in memory, and fetched again when it is needed again; a larger limit is faster",
                file.raw.basename
            ));
        }
        self.in_memory(shard, file, stop)
    }

    /// A raw file's bytes, in memory alone.
    fn in_memory(&self, shard: &ShardInfo, file: &StoredFile, stop: &AtomicBool) -> Result<Mapped> {
        let raw = self.attempt(|| {
            if let (Some(zip), Some(compression)) = (&file.zip, shard.compression) {
                return self.unpacked(shard, file, zip, compression, stop);
            }
            self.get(&file.raw, stop, |origin, bytes| {
                self.check_raw(shard, file, origin, &bytes)?;
                Ok(bytes)
            })
        })?;
        Ok(Mapped::memory(raw))
    }

    /// Tries again what brought wrong bytes, as often as the options say.
    fn attempt<T>(&self, make: impl Fn() -> Result<T>) -> Result<T> {
        let mut attempt = 1;
        loop {
            match make() {
                Err(error @ StreamError::ShardCorrupt { .. })
                    if attempt < self.options.attempts =>
                {
                    self.note(format!(
                        "{error}; attempt {attempt} of {}",
                        self.options.attempts
                    ));
                    attempt += 1;
                }
                other => return other,
            }
        }
    }

    /// One attempt: `part` holds the raw file, checked, or the attempt failed.
    fn make(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        part: &Part,
        stop: &AtomicBool,
    ) -> Result<()> {
        if let (Some(zip), Some(compression)) = (&file.zip, shard.compression) {
            let raw = self.unpacked(shard, file, zip, compression, stop)?;
            return fs::write(part.path(), &raw)
                .map_err(|e| StreamError::io(part.path(), "write", &e));
        }
        self.download(&file.raw, part.path(), stop, |origin, bytes| {
            self.check_raw(shard, file, origin, bytes)
        })
    }

    /// One attempt at a raw file out of its compressed one, which stays in the cache if the options say so.
    fn unpacked(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        zip: &FileInfo,
        compression: Compression,
        stop: &AtomicBool,
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
        if let Some(bytes) = self.map(&path, Some(stop))? {
            let is_ours = self.check_origin(zip, &path, &bytes);
            match is_ours.and_then(|()| unpack(&path.display().to_string(), &bytes)) {
                Err(error @ StreamError::ShardCorrupt { .. }) if self.remote.is_some() => {
                    self.note(format!("{error}; it is fetched again"));
                }
                other => return other,
            }
        }
        // Under a limit, a file that is not to stay takes no room for the time of its unpacking either.
        if self.limit.is_some() && !self.options.keep_zip {
            return self.get(zip, stop, |origin, bytes| unpack(origin, &bytes));
        }
        let packed = match self.part(&path, zip.bytes, stop)? {
            Some(part) if self.has_room(stop)? => Some(part),
            _ => None,
        };
        let Some(packed) = packed else {
            return self.get(zip, stop, |origin, bytes| unpack(origin, &bytes));
        };
        let raw = self.download(zip, packed.path(), stop, unpack)?;
        if self.options.keep_zip {
            self.mark(&packed);
            self.commit(packed, stop)?;
        }
        Ok(raw)
    }

    /// Whether the parts that there are fit under the limit, now that what had to go for them went.
    fn has_room(&self, stop: &AtomicBool) -> Result<bool> {
        let Some(limit) = &self.limit else {
            return Ok(true);
        };
        let turn = self.turn(limit, stop)?;
        turn.map_or(Ok(false), |turn| limit.make_room(&turn))
    }

    /// The right to change what is there; `None` where another process has had it for too long.
    fn turn(&self, limit: &CacheLimit, stop: &AtomicBool) -> Result<Option<Turn>> {
        let was_late = limit.is_late();
        let turn = limit.turn(self.options.wait, stop)?;
        if turn.is_none() && !was_late {
            self.note(format!(
                "`{}` is locked by a process that does not get on with it: shards are held in memory here until it does; look for one that is stopped",
                self.options.local.display()
            ));
        }
        Ok(turn)
    }

    /// Leaves word in a part of what data it is.
    fn mark(&self, part: &Part) {
        if let Some(mark) = &self.mark {
            mark.write(part.path());
        }
    }

    /// Gives the part back where another process keeps this one from naming it.
    fn commit(&self, part: Part, stop: &AtomicBool) -> Result<Option<Part>> {
        part.sync()?;
        let Some(limit) = &self.limit else {
            return part.commit().map(|()| None);
        };
        // Not while another process adds up what is there: it might meet the file under neither name.
        match self.turn(limit, stop)? {
            Some(_turn) => part.commit().map(|()| None),
            None => Ok(Some(part)),
        }
    }

    /// What `take` makes of a file's bytes from the remote, told where they are from.
    fn get<T>(
        &self,
        file: &FileInfo,
        stop: &AtomicBool,
        take: impl FnOnce(&str, Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        self.fetch(file, |object| {
            let interrupted = || stop.load(Ordering::Relaxed);
            let bytes = remote::get(object, Some(file.bytes), &interrupted)?;
            let bytes = bytes.ok_or_else(|| missing(file, object.uri()))?;
            self.counters.fetched(file.bytes);
            take(&object.uri(), bytes)
        })
    }

    /// As [`get`](Self::get), by way of the file `into`, where the bytes stay.
    fn download<T>(
        &self,
        file: &FileInfo,
        into: &Path,
        stop: &AtomicBool,
        take: impl FnOnce(&str, &[u8]) -> Result<T>,
    ) -> Result<T> {
        self.fetch(file, |object| {
            if !remote::download(object, file.bytes, into, stop)? {
                return Err(missing(file, object.uri()));
            }
            self.counters.fetched(file.bytes);
            let bytes = map(into)?;
            take(&object.uri(), bytes.as_ref().map_or(&[], |bytes| bytes))
        })
    }

    /// Reads a whole file of the remote, of the version that it had before unless it has a digest.
    fn fetch<T>(&self, file: &FileInfo, read: impl FnOnce(&Object) -> Result<T>) -> Result<T> {
        let is_checked = self.digest(file).is_some();
        let remote = self.remote_of(file)?;
        self.versions.read(remote, file, is_checked, |object| {
            let value = read(object)?;
            self.check_version(file, object)?;
            Ok(value)
        })
    }

    fn remote_of(&self, file: &FileInfo) -> Result<&Remote> {
        let path = || self.options.local.join(&file.basename);
        self.remote
            .as_ref()
            .ok_or_else(|| missing(file, path().display().to_string()))
    }

    /// Whether the raw file can be made anew: from a remote, or from the compressed file beside it.
    pub(super) fn can_refetch(&self, file: &StoredFile) -> bool {
        self.remote.is_some()
            || file
                .zip
                .as_ref()
                .is_some_and(|zip| self.options.local.join(&zip.basename).exists())
    }
}

fn missing(file: &FileInfo, uri: String) -> StreamError {
    StreamError::ShardNotFound {
        shard: file.basename.clone(),
        uri,
    }
}
