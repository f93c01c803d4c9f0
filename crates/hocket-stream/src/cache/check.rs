//! Verification of shard files against the index. A file that fails stays out of the cache and is fetched
//! again.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hocket_store::{Interrupted, Object, StoreError};

use super::Cache;
use super::mapped::{MappedFile, stamp};
use super::origin::ShardMark;
use crate::error::{Result, StreamError};
use crate::shard::check_table;
use crate::shard::hash::{Algorithm, NAMES};
use crate::shard::info::{FileInfo, ShardInfo, StoredFile};

/// Time after the reading of the index during which a later version of it may have the same timestamp.
const AMBIGUOUS: Duration = Duration::from_secs(2);

const MAX_CLOCK_DIFFERENCE_MS: i64 = 60_000;

impl Cache {
    /// Verifies a raw file from the cache as [`check_raw`](Self::check_raw) does, and that it belongs to this
    /// data set.
    pub(super) fn check_held(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        bytes: &MappedFile,
    ) -> Result<()> {
        // The name of a row group's file has a digest of its origin, which stays valid when other files are added.
        if shard.row_group.is_none() {
            self.check_origin(&file.raw, path, bytes)?;
        }
        self.check_raw(shard, file, &path.display().to_string(), bytes)
    }

    /// Rejects a file without a digest that belongs to another data set or to another version of this one. The
    /// sizes of such files may be equal.
    pub(super) fn check_origin(
        &self,
        file: &FileInfo,
        path: &Path,
        bytes: &MappedFile,
    ) -> Result<()> {
        let (Some(remote), false) = (&self.remote, has_digest(file)) else {
            return Ok(());
        };
        let mark = ShardMark::read(path);
        let named = fs::metadata(path).ok();
        let modified = named.as_ref().and_then(|named| named.modified().ok());
        let is_ours = match &mark {
            Some(_) => mark == self.mark,
            None => modified.is_some_and(|modified| modified > self.valid_since),
        };
        // The file that was examined by name is still the file that was mapped.
        if is_ours && named.and_then(|named| stamp(&named)) == bytes.stamp() {
            return Ok(());
        }
        let actual = match mark {
            Some(_) => {
                "a file of another data set with the same `local`, or of another version of this one,"
            }
            None => "a file older than the index,",
        };
        Err(StreamError::ShardCorrupt {
            shard: file.basename.clone(),
            object: path.display().to_string(),
            expected: format!("a file of the current version of `{}`", remote.uri()),
            actual: format!("{actual} without a digest that shows whether it is still valid"),
        })
    }

    /// Rejects an object that may belong to a later version of the data set.
    ///
    /// For an object without a digest that is not older than the index of this cache, the current version of
    /// the index is requested. A copied data set may have such objects beside an unchanged index.
    pub(super) fn check_version(
        &self,
        file: &FileInfo,
        object: &Object,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let (Some(remote), Some(version)) = (&self.remote, self.version) else {
            return Ok(());
        };
        let is_older = object
            .modified_ms()
            .is_none_or(|time| time < version.modified_ms);
        if has_digest(file) || is_older {
            return Ok(());
        }
        let now = remote.index_version(interrupted)?;
        if now.is_some_and(|now| now.is_like(version)) {
            return Ok(());
        }
        Err(StreamError::Store(StoreError::Changed {
            uri: object.uri(),
            expected: "[written with the index that this run started with]".into(),
            actual: "[written later, and the index has changed since]".into(),
        }))
    }

    /// Returns whether a file fetched now may belong to an earlier version than an index that looks the same.
    ///
    /// Most stores give times in seconds, and an index without digests may have identical bytes after the data
    /// set was rewritten. A file fetched within the same second as the index cannot be distinguished from a
    /// later one. That second ends some time after the index was read; the store's clock is assumed to be
    /// within a minute of this machine's.
    pub(super) fn is_ambiguous(&self) -> bool {
        let Some(version) = self.version else {
            return false;
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = now.map_or(0, |now| now.as_millis() as i64);
        version.modified_ms % 1000 == 0
            && now_ms - version.modified_ms < MAX_CLOCK_DIFFERENCE_MS
            && self.made.elapsed() < AMBIGUOUS
    }

    /// Verifies the bytes of a shard's raw file: size, digest, and the table of offsets if it has one.
    pub(super) fn check_raw(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        origin: &str,
        bytes: &[u8],
    ) -> Result<()> {
        if shard.row_group.is_some() {
            return check_table(shard, origin, bytes, bytes.len());
        }
        self.check(&file.raw, origin, bytes)?;
        if file.holds_offsets {
            check_table(shard, origin, bytes, shard.data.raw.bytes as usize)?;
        }
        Ok(())
    }

    /// Compares bytes with the file's record in the index: first size, then digest.
    pub(super) fn check(&self, file: &FileInfo, origin: &str, bytes: &[u8]) -> Result<()> {
        let corrupt = |expected: String, actual: String| StreamError::ShardCorrupt {
            shard: file.basename.clone(),
            object: origin.into(),
            expected,
            actual,
        };
        if bytes.len() as u64 != file.bytes {
            return Err(corrupt(
                format!("{} bytes", file.bytes),
                format!("{} bytes", bytes.len()),
            ));
        }
        let Some((name, algorithm, digest)) = self.digest(file) else {
            return Ok(());
        };
        let actual = algorithm.hex(bytes);
        if actual.eq_ignore_ascii_case(digest) {
            Ok(())
        } else {
            Err(corrupt(
                format!("{name} {digest}"),
                format!("{name} {actual}"),
            ))
        }
    }

    /// Returns the digest that a file is checked against, if it has one.
    pub(super) fn digest<'a>(
        &self,
        file: &'a FileInfo,
    ) -> Option<(&'static str, Algorithm, &'a str)> {
        let wanted = self.options.validate_hash.as_deref();
        let mut names = NAMES
            .iter()
            .filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name));
        names.find_map(|&(name, algorithm)| {
            let (_, digest) = file.hashes.iter().find(|(known, _)| known == name)?;
            Some((name, algorithm, digest.as_str()))
        })
    }
}

fn has_digest(file: &FileInfo) -> bool {
    let is_known = |name: &str| NAMES.iter().any(|(known, _)| *known == name);
    file.hashes.iter().any(|(name, _)| is_known(name))
}
