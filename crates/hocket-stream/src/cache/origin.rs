//! Which data set, and which writing of it, the files of a cache are of.
//!
//! A data set that is written anew may have an index of the same bytes, and shards of the same sizes; so may
//! another data set that shares the folder. The index has another time then, or another place. Each file of a
//! shard carries a mark of both in an extended attribute. The copy of the index carries them in words, and since
//! when files of the cache are of it, for files that others put there without a mark. Where a file system has no
//! attributes, digests alone tell.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{XattrFlags, getxattr, setxattr};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Result, StreamError};
use crate::files::Part;
use crate::index::INDEX_NAME;

const ATTRIBUTE: &str = "user.hocket.origin";
/// Writing an index takes moments; whoever has been at it for so long is stopped.
const INDEX_WAIT: Duration = Duration::from_secs(2);

/// What the copy of an index remembers.
struct Origin {
    /// When the remote index was written, in milliseconds since 1970, as the store says.
    modified_ms: i64,
    /// Since when files of the cache are of it, by the clock of the cache's file system.
    since: Duration,
    /// A hash of the remote's URI; not there where an earlier version kept the index.
    place: Option<u64>,
}

impl Origin {
    fn read(path: &Path) -> Option<Self> {
        let text = attribute(path)?;
        let mut words = text.split(' ');
        Some(Self {
            modified_ms: words.next()?.parse().ok()?,
            since: Duration::from_nanos(words.next()?.parse().ok()?),
            place: words.next().and_then(|word| word.parse().ok()),
        })
    }

    fn write(&self, path: &Path) {
        let place = self.place.map(|place| format!(" {place}"));
        let (modified_ms, since) = (self.modified_ms, self.since.as_nanos());
        set_attribute(
            path,
            &format!("{modified_ms} {since}{}", place.unwrap_or_default()),
        );
    }

    /// Whether it is of another place than `uri`, as far as is known.
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
    // Some file systems have none.
    let _ = setxattr(path, ATTRIBUTE, text.as_bytes(), XattrFlags::empty());
}

/// What files of shards carry of their data set: its place, the time of its index, and its content as that says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    pub(super) fn new(uri: &str, modified_ms: i64, fingerprint: &str) -> Self {
        let text = format!("{modified_ms} {fingerprint} {uri}");
        Self(format!("{:016x}", xxh3_64(text.as_bytes())))
    }

    /// That of a file; `None` where nobody left one.
    pub(super) fn read(path: &Path) -> Option<Self> {
        attribute(path).map(Self)
    }

    pub(super) fn write(&self, path: &Path) {
        set_attribute(path, &self.0);
    }
}

/// From when on files of the folder that have no mark are of the index there.
pub(super) fn valid_since(folder: &Path) -> SystemTime {
    let origin = Origin::read(&folder.join(INDEX_NAME));
    let since = origin.map_or(Duration::ZERO, |origin| origin.since);
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Whether the index in the folder is of another place than `uri`, as far as is known.
pub(super) fn is_elsewhere(folder: &Path, uri: &str) -> bool {
    Origin::read(&folder.join(INDEX_NAME)).is_some_and(|origin| origin.is_elsewhere(uri))
}

/// When the index at `uri`, of which a copy is in the folder, was last written, as far as that knows.
pub(super) fn last_modified_ms(folder: &Path, uri: &str) -> Option<i64> {
    let origin = Origin::read(&folder.join(INDEX_NAME))?;
    (!origin.is_elsewhere(uri)).then_some(origin.modified_ms)
}

/// Keeps the index of the remote at `uri`, last written at `modified_ms`, at `path`. Where another process has
/// been at it for too long, it is not kept.
///
/// # Errors
/// [`StreamError::Io`] where the folder is not writable; [`StreamError::Closed`] once `interrupted` says so.
pub(super) fn keep(
    path: &Path,
    data: &[u8],
    uri: &str,
    modified_ms: i64,
    interrupted: &dyn Fn() -> bool,
) -> Result<()> {
    if is_kept(path, data, uri, modified_ms) {
        return Ok(());
    }
    let until = Instant::now() + INDEX_WAIT;
    let part = match Part::lock_unless(path, &|| interrupted() || Instant::now() > until) {
        Err(StreamError::Closed) if !interrupted() => return Ok(()),
        part => part?,
    };
    // Another process may have kept it meanwhile.
    if is_kept(path, data, uri, modified_ms) {
        return Ok(());
    }
    fs::write(part.path(), data).map_err(|e| StreamError::io(part.path(), "write", &e))?;
    let before = Origin::read(path);
    let is_other = match (&before, fs::read(path)) {
        (_, Err(_)) => false,
        (Some(before), Ok(held)) => {
            before.modified_ms != modified_ms || before.is_elsewhere(uri) || held != data
        }
        (None, Ok(held)) => held != data,
    };
    let since = if is_other {
        written(part.path())
    } else {
        before.map_or(Duration::ZERO, |before| before.since)
    };
    let origin = Origin {
        modified_ms,
        since,
        place: Some(xxh3_64(uri.as_bytes())),
    };
    origin.write(part.path());
    part.commit()
}

fn is_kept(path: &Path, data: &[u8], uri: &str, modified_ms: i64) -> bool {
    let is_of_then = |origin: Origin| {
        origin.modified_ms == modified_ms && origin.place == Some(xxh3_64(uri.as_bytes()))
    };
    fs::read(path).is_ok_and(|held| held == data) && Origin::read(path).is_some_and(is_of_then)
}

/// When a file was last written, since 1970.
fn written(path: &Path) -> Duration {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    let since = modified
        .ok()
        .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.unwrap_or_default()
}
