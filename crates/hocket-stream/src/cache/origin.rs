//! The origin of cached files: the data set, and the version of it, that they belong to.
//!
//! A rewritten data set may have an index with the same bytes and shards of the same sizes. The same holds for
//! another data set that shares the folder. In both cases the time or the location of the index differs. Each
//! shard file carries a mark with both in an extended attribute. The copy of the index carries them as text,
//! together with the time from which cached files belong to it, for files that other programs placed there
//! without a mark. On a file system without extended attributes, only digests distinguish them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use hocket_store::Interrupted;
use rustix::fs::{XattrFlags, getxattr, setxattr};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Result, StreamError};
use crate::index::version::IndexVersion;
use crate::shard::files::UnfinishedFile;
use crate::shard::info::INDEX_NAME;

const ATTRIBUTE: &str = "user.hocket.origin";
/// Writing an index takes moments; a process that holds its lock for this long is assumed to be suspended.
const INDEX_WAIT: Duration = Duration::from_secs(2);

/// The extended attribute of the local copy of an index.
struct IndexOrigin {
    /// The version of the remote index.
    version: IndexVersion,
    /// Time from which cached files belong to it, by the clock of the cache's file system.
    since: Duration,
    /// A hash of the remote's URI; missing if an earlier release stored the index.
    place: Option<u64>,
}

impl IndexOrigin {
    fn read(path: &Path) -> Option<Self> {
        let text = attribute(path)?;
        let mut words = text.split(' ');
        let modified_ms = words.next()?.parse().ok()?;
        let since = Duration::from_nanos(words.next()?.parse().ok()?);
        let place = words.next().and_then(|word| word.parse().ok());
        let etag_hash = words.next().and_then(|word| word.parse().ok());
        Some(Self {
            version: IndexVersion {
                modified_ms,
                etag_hash: etag_hash.unwrap_or_default(),
            },
            since,
            place,
        })
    }

    fn write(&self, path: &Path) {
        let place = self.place.unwrap_or_default();
        let IndexVersion {
            modified_ms,
            etag_hash,
        } = self.version;
        let since = self.since.as_nanos();
        set_attribute(path, &format!("{modified_ms} {since} {place} {etag_hash}"));
    }

    /// Returns whether it is known to belong to a location other than `uri`.
    fn is_elsewhere(&self, uri: &str) -> bool {
        self.place
            .is_some_and(|place| place != xxh3_64(uri.as_bytes()))
    }
}

fn attribute(path: &Path) -> Option<String> {
    let mut buffer = [0; 96];
    let filled = getxattr(path, ATTRIBUTE, &mut buffer[..]).ok()?;
    String::from_utf8(buffer.get(..filled)?.to_vec()).ok()
}

fn set_attribute(path: &Path, text: &str) {
    // Some file systems have no extended attributes.
    let _ = setxattr(path, ATTRIBUTE, text.as_bytes(), XattrFlags::empty());
}

/// The mark of shard files: the location of their data set, the time of its index, and a fingerprint of its
/// content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShardMark(String);

impl ShardMark {
    pub(super) fn new(uri: &str, version: Option<IndexVersion>, fingerprint: &str) -> Self {
        let (modified_ms, etag_hash) = version.map_or((0, 0), |v| (v.modified_ms, v.etag_hash));
        let text = format!("{modified_ms} {etag_hash} {fingerprint} {uri}");
        Self(format!("{:016x}", xxh3_64(text.as_bytes())))
    }

    /// Returns the mark of a file that only the process that fetched it may use.
    pub(super) fn provisional() -> Self {
        Self("provisional".into())
    }

    /// Reads the mark of a file; returns none if it has none.
    pub(super) fn read(path: &Path) -> Option<Self> {
        attribute(path).map(Self)
    }

    pub(super) fn write(&self, path: &Path) {
        set_attribute(path, &self.0);
    }
}

/// Returns the time from which unmarked files of the folder belong to its index.
pub(super) fn valid_since(folder: &Path) -> SystemTime {
    let origin = IndexOrigin::read(&folder.join(INDEX_NAME));
    let since = origin.map_or(Duration::ZERO, |origin| origin.since);
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Returns whether the index in the folder is known to belong to a location other than `uri`.
pub(super) fn is_elsewhere(folder: &Path, uri: &str) -> bool {
    IndexOrigin::read(&folder.join(INDEX_NAME)).is_some_and(|origin| origin.is_elsewhere(uri))
}

/// Returns the version of the index at `uri` whose copy is in the folder, if known.
pub(super) fn kept_version(folder: &Path, uri: &str) -> Option<IndexVersion> {
    let origin = IndexOrigin::read(&folder.join(INDEX_NAME))?;
    (!origin.is_elsewhere(uri)).then_some(origin.version)
}

/// Stores a `version` of the index of the remote at `uri` at `path`. If another process holds the lock for too
/// long, or removes the folder, the index is not stored.
///
/// # Errors
/// [`StreamError::Io`] if the folder is not writable; [`StreamError::Closed`] once `interrupted` returns true.
pub(super) fn keep(
    path: &Path,
    data: &[u8],
    uri: &str,
    version: IndexVersion,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if is_kept(path, data, uri, version) {
        return Ok(());
    }
    let until = Instant::now() + INDEX_WAIT;
    let part = match UnfinishedFile::lock(path, &|| interrupted() || Instant::now() > until) {
        Err(StreamError::Closed) if !interrupted() => return Ok(()),
        // The folder cannot be written to, and has what would be written: a cache that was copied there.
        Err(StreamError::Io { .. }) if is_copy(path, data, uri, version) => return Ok(()),
        part => part?,
    };
    // Another process may have stored it in the meantime.
    if is_kept(path, data, uri, version) {
        return Ok(());
    }
    let is_removed = |error: std::io::Error| match part.is_removed() {
        true => StreamError::removed(part.path()),
        false => StreamError::io(part.path(), "write", &error),
    };
    match fs::write(part.path(), data).map_err(is_removed) {
        Err(StreamError::Removed { .. }) => return Ok(()),
        other => other?,
    }
    let before = IndexOrigin::read(path);
    let is_other = match (&before, fs::read(path)) {
        (_, Err(_)) => false,
        (Some(before), Ok(held)) => {
            before.version != version || before.is_elsewhere(uri) || held != data
        }
        (None, Ok(held)) => held != data,
    };
    let since = if is_other {
        written(part.path())
    } else {
        before.map_or(Duration::ZERO, |before| before.since)
    };
    let origin = IndexOrigin {
        version,
        since,
        place: Some(xxh3_64(uri.as_bytes())),
    };
    origin.write(part.path());
    match part.commit() {
        Err(StreamError::Removed { .. }) => Ok(()),
        other => other,
    }
}

fn is_kept(path: &Path, data: &[u8], uri: &str, version: IndexVersion) -> bool {
    let is_of_then = |origin: IndexOrigin| {
        origin.version == version && origin.place == Some(xxh3_64(uri.as_bytes()))
    };
    fs::read(path).is_ok_and(|held| held == data) && IndexOrigin::read(path).is_some_and(is_of_then)
}

/// Returns whether a file is a copy of the index without a mark, or with that of this version: extended
/// attributes are seldom copied.
fn is_copy(path: &Path, data: &[u8], uri: &str, version: IndexVersion) -> bool {
    let is_other = |origin: IndexOrigin| origin.version != version || origin.is_elsewhere(uri);
    fs::read(path).is_ok_and(|held| held == data) && !IndexOrigin::read(path).is_some_and(is_other)
}

/// Returns the time of a file's last write, since 1970.
fn written(path: &Path) -> Duration {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    let since = modified
        .ok()
        .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.unwrap_or_default()
}
