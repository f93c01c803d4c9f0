//! Whether bytes are what the index promises. What is not stays out of the cache, and is fetched again.

use std::fs;
use std::path::Path;

use hocket_store::{Object, StoreError};

use super::Cache;
use super::mapped::{Mapped, stamp};
use super::origin::{self, Mark};
use crate::error::{Result, StreamError};
use crate::hash::{Algorithm, NAMES};
use crate::index::{FileInfo, ShardInfo, StoredFile};
use crate::shard::check_table;

impl Cache {
    /// Whether a raw file that was here is right: as [`check_raw`](Self::check_raw), and of this data.
    pub(super) fn check_held(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        path: &Path,
        bytes: &Mapped,
    ) -> Result<()> {
        self.check_origin(&file.raw, path, bytes)?;
        self.check_raw(shard, file, &path.display().to_string(), bytes)
    }

    /// Refuses a file without a digest that is of another data set, or of another writing of this one: sizes may
    /// be alike.
    pub(super) fn check_origin(&self, file: &FileInfo, path: &Path, bytes: &Mapped) -> Result<()> {
        let (Some(remote), false) = (&self.remote, has_digest(file)) else {
            return Ok(());
        };
        let mark = Mark::read(path);
        let named = fs::metadata(path).ok();
        let came = named.as_ref().and_then(|named| named.modified().ok());
        let is_ours = match &mark {
            Some(_) => mark == self.mark,
            None => came.is_some_and(|came| came > self.valid_since),
        };
        // What was looked at by its name is still what was mapped.
        if is_ours && named.and_then(|named| stamp(&named)) == bytes.stamp() {
            return Ok(());
        }
        let actual = match mark {
            Some(_) => {
                "one of another data set that has the same `local`, or of another writing of this one,"
            }
            None => "one of before,",
        };
        Err(StreamError::ShardCorrupt {
            shard: file.basename.clone(),
            object: path.display().to_string(),
            expected: format!("a file of `{}` as it was last written", remote.uri()),
            actual: format!("{actual} without a digest to tell whether it still holds"),
        })
    }

    /// Refuses an object without a digest that was written after the index of this cache, if that was written
    /// anew, too: it is of the later one.
    pub(super) fn check_version(&self, file: &FileInfo, object: &Object) -> Result<()> {
        let is_late = |time: Option<i64>| time.is_some_and(|time| time > self.written_ms);
        let Some(remote) = &self.remote else {
            return Ok(());
        };
        let known = || origin::last_modified_ms(&self.options.local, remote.uri());
        if has_digest(file) || !is_late(object.modified_ms()) || !is_late(known()) {
            return Ok(());
        }
        Err(StreamError::Store(StoreError::Changed {
            uri: object.uri(),
            expected: "[of the index that this run began with]".into(),
            actual: "[of a later one]".into(),
        }))
    }

    /// Whether `bytes` are a shard's raw file: size and digest, and the table of offsets if it has it.
    pub(super) fn check_raw(
        &self,
        shard: &ShardInfo,
        file: &StoredFile,
        origin: &str,
        bytes: &[u8],
    ) -> Result<()> {
        self.check(&file.raw, origin, bytes)?;
        if file.holds_offsets {
            check_table(shard, origin, bytes, shard.data.raw.bytes as usize)?;
        }
        Ok(())
    }

    /// Compares bytes with what the index says of the file: size, then digest.
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

    /// The digest by which a file is checked, if it has one.
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
