//! The local shard cache: one process of a node downloads and verifies each shard, for all processes.

mod cache_fill;
mod check;
mod counts;
pub mod footers;
mod limit;
mod mapped;
mod origin;
mod range_read;
pub mod remote;
mod row_group;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hocket_store::Interrupted;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

pub use self::counts::CacheCounts;
pub use self::limit::CacheLimit;

use self::counts::CacheCounters;
use self::mapped::{MappedFile, Stamp, hold, map};
use self::origin::ShardMark;
use self::versions::PinnedVersions;
use crate::cache::remote::DatasetRemote;
use crate::error::{Result, StreamError};
use crate::index::Index;
use crate::index::version::IndexVersion;
use crate::shard::files::UnfinishedFile;
use crate::shard::hash::Algorithm;
use crate::shard::info::{INDEX_NAME, ShardInfo, StoredFile};
use crate::shard::{Shard, ShardBytes};

/// The options of a cache.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The cache folder; without a remote, the folder of the data set itself.
    pub local: PathBuf,
    /// Whether a downloaded compressed file is kept beside the raw one.
    pub keep_zip: bool,
    /// Whether fetched shards are kept in the folder. If not, they are in memory while they are open.
    pub keep_shards: bool,
    /// Number of fetches of a shard before a wrong size or digest is reported; at least 1.
    pub download_retry: u32,
    /// The digest to check; `None`: the fastest supported one of each file.
    pub validate_hash: Option<String>,
    /// Time to wait for another process that holds a lock, in addition to the expected transfer time if it is
    /// creating a file. After that the file is held in memory.
    pub wait: Duration,
}

/// The shards of one data set, as seen by this process. Threads may share it; a forked child must create its
/// own.
pub struct Cache {
    index: Arc<Index>,
    remote: Option<DatasetRemote>,
    options: CacheOptions,
    /// The limit on the bytes of the folder; unused without a remote.
    limit: Option<Arc<CacheLimit>>,
    counters: CacheCounters,
    /// Whether the folder cannot be written to and the data set has packed files, which are then unpacked in memory.
    is_unpacking_in_memory: bool,
    /// Whether the data set is a folder of Parquet files, to which nothing is added.
    is_decoding_in_memory: bool,
    /// Files without a mark that are older than this belong to other data, unless a digest shows otherwise.
    valid_since: SystemTime,
    /// The version of the remote index that was read; `None` if unknown.
    version: Option<IndexVersion>,
    /// The creation time of this cache.
    made: Instant,
    /// The mark of files that this cache creates; `None` without a remote.
    mark: Option<ShardMark>,
    /// The stamps of each shard's files whose bytes this process has verified.
    checked: Mutex<HashMap<u32, [Option<Stamp>; 2]>>,
    /// Number of range reads of each shard.
    range_reads: Mutex<HashMap<u32, u32>>,
    versions: PinnedVersions,
    notices: Mutex<Vec<String>>,
}

/// Verified files of a shard that are not yet durable under their final names. Dropping them removes them.
#[derive(Default)]
pub(crate) struct Unsettled(Vec<UnfinishedFile>);

impl Unsettled {
    /// Makes the files durable and renames them. A file that was removed in the meantime is not kept; its shard
    /// is in use already.
    ///
    /// # Errors
    /// [`StreamError::Io`] if the disk reports an error.
    pub(crate) fn commit(self) -> Result<()> {
        self.0.into_iter().try_for_each(|part| match part.commit() {
            Err(StreamError::Removed { .. }) => Ok(()),
            other => other,
        })
    }
}

/// Reads `index.json` of the data set; from the remote, if there is one, with a copy stored in `local`.
///
/// Returns the bytes, and the time of the index in milliseconds since 1970; 0 without a remote, or if the store
/// does not report it.
///
/// # Errors
/// [`StreamError::IndexNotFound`]; the store's own errors.
pub fn load_index(
    local: &Path,
    remote: Option<&DatasetRemote>,
    interrupted: Interrupted<'_>,
) -> Result<(Vec<u8>, i64)> {
    let path = local.join(INDEX_NAME);
    let Some(remote) = remote else {
        let data = fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                StreamError::IndexNotFound {
                    uri: path.display().to_string(),
                }
            }
            _ => StreamError::io(&path, "read", &error),
        })?;
        return Ok((data, 0));
    };
    // Always read from the remote: a local copy may belong to a data set that has since been rewritten.
    let object = remote.object(INDEX_NAME);
    let data = remote::get(&object, None, interrupted)?
        .ok_or_else(|| StreamError::IndexNotFound { uri: object.uri() })?;
    let version = IndexVersion::new(object.modified_ms().unwrap_or_default(), object.etag());
    origin::keep(&path, &data, remote.uri(), version, interrupted)?;
    Ok((data, version.modified_ms))
}

/// Reads the copy that [`load_index`] stored in `local`, for use when the index at `remote` is unavailable.
/// Returns none if there is no copy, or only one of another data set.
///
/// # Errors
/// [`StreamError::Io`].
pub fn load_kept_index(local: &Path, remote: &DatasetRemote) -> Result<Option<(Vec<u8>, i64)>> {
    let path = local.join(INDEX_NAME);
    if !path.exists() || origin::is_elsewhere(local, remote.uri()) {
        return Ok(None);
    }
    let data = fs::read(&path).map_err(|error| StreamError::io(&path, "read", &error))?;
    let version = origin::kept_version(local, remote.uri());
    Ok(Some((
        data,
        version.map_or(0, |version| version.modified_ms),
    )))
}

/// Returns whether a folder exists that this process may not write to.
fn is_read_only(folder: &Path) -> bool {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    let refused = accessat(CWD, folder, wanted, AtFlags::EACCESS).err();
    matches!(refused, Some(Errno::ACCESS | Errno::ROFS | Errno::PERM))
}

impl Cache {
    /// Creates a cache for `index`, filled from `remote` if there is one.
    ///
    /// # Errors
    /// [`StreamError::Config`] if `validate_hash` is unknown or not in the index.
    pub fn new(
        index: Arc<Index>,
        remote: Option<DatasetRemote>,
        options: CacheOptions,
    ) -> Result<Self> {
        if let Some(name) = &options.validate_hash {
            Algorithm::parse(name)?;
            let lacks =
                |file: &&StoredFile| !file.raw.hashes.iter().any(|(known, _)| known == name);
            let mut shards = index.shards();
            let lacking = shards.find_map(|shard| shard.files().find(lacks).cloned());
            if let Some(file) = lacking {
                let known: Vec<&str> = file
                    .raw
                    .hashes
                    .iter()
                    .map(|(known, _)| known.as_str())
                    .collect();
                return Err(StreamError::config(format!(
                    "`validate_hash` is `{name}`, but shard `{}` has the digests {known:?}: expected one of those; write the data set with `hashes=[\"{name}\"]` or leave `validate_hash` out",
                    file.raw.basename
                )));
            }
        }
        let valid_since = match &remote {
            Some(_) => origin::valid_since(&options.local),
            None => SystemTime::UNIX_EPOCH,
        };
        let is_packed = || {
            index
                .shards()
                .any(|shard| shard.files().any(|it| it.zip.is_some()))
        };
        let is_decoding_in_memory =
            remote.is_none() && index.shards().any(|shard| shard.row_group.is_some());
        let is_unpacking_in_memory = is_read_only(&options.local) && is_packed();
        let cache = Self {
            index,
            remote,
            options,
            is_unpacking_in_memory,
            is_decoding_in_memory,
            valid_since,
            version: None,
            made: Instant::now(),
            mark: None,
            limit: None,
            counters: CacheCounters::default(),
            checked: Mutex::default(),
            range_reads: Mutex::default(),
            versions: PinnedVersions::default(),
            notices: Mutex::default(),
        };
        Ok(cache.written(0))
    }

    /// Sets the time of this cache's index, as returned by [`load_index`].
    #[must_use]
    pub fn written(mut self, written_ms: i64) -> Self {
        let fingerprint = self.index.fingerprint();
        let remote = self.remote.as_ref();
        // The copy stored by `load_index` also records the ETag.
        let kept = remote.and_then(|it| origin::kept_version(&self.options.local, it.uri()));
        let kept = kept.filter(|kept| kept.modified_ms == written_ms);
        let version = kept.unwrap_or_else(|| IndexVersion::new(written_ms, None));
        let version = (written_ms != 0).then_some(version);
        self.mark = remote.map(|remote| ShardMark::new(remote.uri(), version, fingerprint));
        self.version = version;
        self
    }

    /// Applies a limit, which several caches may share. Without a remote it has no effect, because nothing can
    /// be evicted.
    #[must_use]
    pub fn limited(mut self, limit: Arc<CacheLimit>) -> Self {
        self.limit = self.remote.is_some().then_some(limit);
        self
    }

    /// Returns the limit in bytes, if there is one. If shards are not kept, open shards take up memory: the
    /// result is then the largest possible limit, so that the reader closes shards as early as it does under a
    /// limit.
    pub fn limit_bytes(&self) -> Option<u64> {
        let limit = self.limit.as_ref().map(|limit| limit.bytes());
        limit.or((!self.is_keeping()).then_some(u64::MAX))
    }

    /// Returns whether fetched and unpacked shards are kept in the folder.
    pub(super) fn is_keeping(&self) -> bool {
        (self.options.keep_shards || self.remote.is_none())
            && !self.is_unpacking_in_memory
            && !self.is_decoding_in_memory
    }

    /// Returns the counts since the cache was created.
    pub fn counts(&self) -> CacheCounts {
        let remote = self.remote.as_ref().map(DatasetRemote::counts);
        self.counters.now(remote.unwrap_or_default())
    }

    /// Returns the index of the data set.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Removes and returns the notices for the user, such as a shard that was fetched twice.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Opens a shard and fetches it first if necessary. Blocks; stops if interrupted.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`], [`StreamError::ShardCorrupt`] if no attempt returned the right bytes,
    /// [`StreamError::Io`], the store's own errors, [`StreamError::Closed`].
    pub fn open(&self, number: u32, interrupted: Interrupted<'_>) -> Result<Shard> {
        let (shard, unsettled) = self.open_early(number, interrupted)?;
        unsettled.commit()?;
        Ok(shard)
    }

    /// Opens a shard like [`open`](Self::open), but leaves the commit of fetched files to the caller.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_early(
        &self,
        number: u32,
        interrupted: Interrupted<'_>,
    ) -> Result<(Shard, Unsettled)> {
        let shard = self.shard(number)?;
        let mut unsettled = Unsettled::default();
        let mut find_or_fetch = |file: &StoredFile| -> Result<MappedFile> {
            if let Some(bytes) = self.find(number, &shard, file, Some(interrupted))? {
                return Ok(bytes);
            }
            let (bytes, part) = self.admit(&shard, file, &self.path(file), interrupted)?;
            unsettled.0.extend(part);
            Ok(bytes)
        };
        let data = find_or_fetch(&shard.data)?;
        let meta = shard.meta.as_ref().map(find_or_fetch).transpose()?;
        Ok((self.assemble(number, &shard, data, meta)?, unsettled))
    }

    /// Opens a shard if all of it is available locally. Neither downloads nor unpacks, and does not wait for
    /// other processes.
    ///
    /// # Errors
    /// As [`open`](Self::open). A shard with wrong bytes that can be fetched again counts as not available.
    pub fn open_here(&self, number: u32) -> Result<Option<Shard>> {
        let shard = self.shard(number)?;
        let Some(data) = self.find(number, &shard, &shard.data, None)? else {
            return Ok(None);
        };
        let meta = match &shard.meta {
            Some(file) => match self.find(number, &shard, file, None)? {
                None => return Ok(None),
                found => found,
            },
            None => None,
        };
        self.assemble(number, &shard, data, meta).map(Some)
    }

    fn shard(&self, number: u32) -> Result<ShardInfo> {
        self.index.shard(number as usize).ok_or_else(|| {
            StreamError::config(format!(
                "shard {number}: expected a number below {}",
                self.index.num_shards()
            ))
        })
    }

    fn path(&self, file: &StoredFile) -> PathBuf {
        self.options.local.join(&file.raw.basename)
    }

    fn assemble(
        &self,
        number: u32,
        shard: &ShardInfo,
        data: MappedFile,
        meta: Option<MappedFile>,
    ) -> Result<Shard> {
        let origin = self.path(&shard.data).display().to_string();
        let stamps = [data.stamp(), meta.as_ref().and_then(MappedFile::stamp)];
        let meta = meta.map(|bytes| Box::new(bytes) as ShardBytes);
        let opened = Shard::open(shard, &origin, Box::new(data), meta)?;
        self.checked().insert(number, stamps);
        Ok(opened)
    }

    /// Returns the bytes of a raw file if it is in the cache and valid. An invalid file that can be replaced
    /// counts as missing.
    fn find(
        &self,
        number: u32,
        shard: &ShardInfo,
        file: &StoredFile,
        interrupted: Option<Interrupted<'_>>,
    ) -> Result<Option<MappedFile>> {
        let path = self.path(file);
        let Some(bytes) = self.map(&path, interrupted)? else {
            return Ok(None);
        };
        // Another process may have replaced the file since its last check.
        let stamps = self.checked().get(&number).copied().unwrap_or_default();
        let is_checked = bytes.stamp().is_some() && stamps.contains(&bytes.stamp());
        if !is_checked && let Err(error) = self.check_held(shard, file, &path, &bytes) {
            if !self.can_refetch(file) {
                return Err(error);
            }
            self.note(format!("{error}; it is fetched again"));
            return Ok(None);
        }
        self.counters.hits.fetch_add(1, Ordering::Relaxed);
        Ok(Some(bytes))
    }

    fn checked(&self) -> MutexGuard<'_, HashMap<u32, [Option<Stamp>; 2]>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a file of the cache and protects it from eviction while the map lives.
    fn map(&self, path: &Path, interrupted: Option<Interrupted<'_>>) -> Result<Option<MappedFile>> {
        match &self.limit {
            None => map(path),
            Some(limit) => hold(path, limit.deadline(self.options.wait), interrupted),
        }
    }

    fn note(&self, notice: String) {
        self.notices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(notice);
    }
}
