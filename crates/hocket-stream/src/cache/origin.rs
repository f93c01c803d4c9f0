//! Which writing of a data set the files of a cache are of.
//!
//! A data set that is written anew may have an index of the same bytes, and shards of the same sizes. Its index
//! has another time then. The cache's copy of the index carries that time, and since when files of the cache
//! are of this writing, in an extended attribute. Where a file system has none, digests alone tell.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{XattrFlags, fsetxattr, getxattr};

use crate::error::{Result, StreamError};
use crate::files::Part;

const ATTRIBUTE: &str = "user.hocket.origin";
/// Writing an index takes moments; whoever has been at it for so long is stopped.
const INDEX_WAIT: Duration = Duration::from_secs(2);

/// What the copy of an index remembers.
struct Origin {
    /// When the remote index was written, in milliseconds since 1970, as the store says.
    modified_ms: i64,
    /// Since when files of the cache are of it, by the clock of the cache's file system.
    since: Duration,
}

impl Origin {
    fn read(path: &Path) -> Option<Self> {
        let mut buffer = [0; 64];
        let filled = getxattr(path, ATTRIBUTE, &mut buffer[..]).ok()?;
        let text = std::str::from_utf8(buffer.get(..filled)?).ok()?;
        let (modified, since) = text.split_once(' ')?;
        Some(Self {
            modified_ms: modified.parse().ok()?,
            since: Duration::from_nanos(since.parse().ok()?),
        })
    }

    fn write(&self, path: &Path) {
        let text = format!("{} {}", self.modified_ms, self.since.as_nanos());
        // Some file systems have no attributes.
        let _ = File::open(path)
            .map(|file| fsetxattr(&file, ATTRIBUTE, text.as_bytes(), XattrFlags::empty()));
    }
}

/// From when on files beside the index at `path` are of it.
pub(super) fn valid_since(path: &Path) -> SystemTime {
    let since = Origin::read(path).map_or(Duration::ZERO, |origin| origin.since);
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Keeps the remote's index, last written at `modified_ms`, at `path`. Where another process has been at it for
/// too long, it is not kept.
///
/// # Errors
/// [`StreamError::Io`] where the folder is not writable; [`StreamError::Closed`] once `interrupted` says so.
pub(super) fn keep(
    path: &Path,
    data: &[u8],
    modified_ms: i64,
    interrupted: &dyn Fn() -> bool,
) -> Result<()> {
    if is_kept(path, data, modified_ms) {
        return Ok(());
    }
    let until = Instant::now() + INDEX_WAIT;
    let part = match Part::lock_unless(path, &|| interrupted() || Instant::now() > until) {
        Err(StreamError::Closed) if !interrupted() => return Ok(()),
        part => part?,
    };
    // Another process may have kept it meanwhile.
    if is_kept(path, data, modified_ms) {
        return Ok(());
    }
    fs::write(part.path(), data).map_err(|e| StreamError::io(part.path(), "write", &e))?;
    let before = Origin::read(path);
    let is_other = match (&before, fs::read(path)) {
        (_, Err(_)) => false,
        (Some(before), Ok(held)) => before.modified_ms != modified_ms || held != data,
        (None, Ok(held)) => held != data,
    };
    let since = if is_other {
        written(part.path())
    } else {
        before.map_or(Duration::ZERO, |before| before.since)
    };
    let origin = Origin { modified_ms, since };
    origin.write(part.path());
    part.commit()
}

fn is_kept(path: &Path, data: &[u8], modified_ms: i64) -> bool {
    let is_of_then = || Origin::read(path).is_some_and(|origin| origin.modified_ms == modified_ms);
    fs::read(path).is_ok_and(|held| held == data) && is_of_then()
}

/// When a file was last written, since 1970.
fn written(path: &Path) -> Duration {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    let since = modified
        .ok()
        .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.unwrap_or_default()
}
