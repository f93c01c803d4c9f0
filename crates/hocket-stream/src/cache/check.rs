//! Whether bytes are what the index promises. What is not stays out of the cache, and is fetched again.

use std::fs;
use std::path::Path;

use super::Cache;
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
        bytes: &[u8],
    ) -> Result<()> {
        self.check_age(&file.raw, path)?;
        self.check_raw(shard, file, &path.display().to_string(), bytes)
    }

    /// Refuses a file without a digest that came before the data set was written anew: sizes may be alike.
    pub(super) fn check_age(&self, file: &FileInfo, path: &Path) -> Result<()> {
        let has_digest = NAMES
            .iter()
            .any(|(name, _)| file.hashes.iter().any(|(known, _)| known == name));
        let came = fs::metadata(path).and_then(|metadata| metadata.modified());
        if has_digest || came.is_ok_and(|came| came > self.valid_since) {
            return Ok(());
        }
        Err(StreamError::ShardCorrupt {
            shard: file.basename.clone(),
            object: path.display().to_string(),
            expected: "a file of the data set as it was last written".into(),
            actual: "one of before, without a digest to tell whether it still holds".into(),
        })
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
