//! Shards on local disk: brought there whole, checked, by one process of a node for all of them.

mod admission;
mod check;
mod counts;
mod limit;
mod mapped;
mod origin;
mod pick;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

pub use self::counts::CacheCounts;
pub use self::limit::CacheLimit;

use self::counts::Counters;
use self::mapped::{Mapped, Stamp, hold, map};
use self::origin::Mark;
use self::versions::Versions;
use crate::error::{Result, StreamError};
use crate::files::Part;
use crate::hash::Algorithm;
use crate::index::{INDEX_NAME, Index, ShardInfo, StoredFile};
use crate::remote::{self, Remote};
use crate::shard::{Shard, ShardBytes};

/// How a cache behaves.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The folder; where there is no remote, the data set itself.
    pub local: PathBuf,
    /// Whether a downloaded compressed file stays beside the raw one.
    pub keep_zip: bool,
    /// How often a shard is fetched before a wrong size or digest is final; at least 1.
    pub attempts: u32,
    /// The digest to check; the quickest known one of each file if `None`.
    pub validate_hash: Option<String>,
    /// How long to wait for another process that has a lock, beside the time that the bytes may take where it
    /// makes a file; then the file is held in memory.
    pub wait: Duration,
}

/// The shards of one data set, as this process sees them. Threads may share it; a forked child makes its
/// own.
pub struct Cache {
    index: Arc<Index>,
    remote: Option<Remote>,
    options: CacheOptions,
    /// The bytes that the folder may have; of no account without a remote.
    limit: Option<Arc<CacheLimit>>,
    counters: Counters,
    /// Files without a mark of before this are of other data, unless a digest says that they are not.
    valid_since: SystemTime,
    /// When the index was last written, as the store says; 0 where that is not known.
    written_ms: i64,
    /// What files carry that this cache made; none without a remote.
    mark: Option<Mark>,
    /// The files of each shard whose bytes this process has checked.
    checked: Mutex<HashMap<u32, [Option<Stamp>; 2]>>,
    /// How often samples of a shard that is not here were picked out of it.
    picked: Mutex<HashMap<u32, u32>>,
    versions: Versions,
    notices: Mutex<Vec<String>>,
}

/// Files of a shard that are whole and read, and not yet on the disk under their names. Dropped, they are gone.
#[derive(Default)]
pub(crate) struct Unsettled(Vec<Part>);

impl Unsettled {
    /// Waits until they are.
    ///
    /// # Errors
    /// [`StreamError::Io`] where the disk refuses.
    pub(crate) fn commit(self) -> Result<()> {
        self.0.into_iter().try_for_each(Part::commit)
    }
}

/// Reads `index.json` of the data set; with a remote from there, leaving a copy in `local`. Also when it was last
/// written, in milliseconds since 1970; 0 where that is not known, or of no account.
///
/// # Errors
/// [`StreamError::IndexNotFound`]; the store's own errors.
pub fn load_index(
    local: &Path,
    remote: Option<&Remote>,
    interrupted: &dyn Fn() -> bool,
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
    // Always the remote's own: a copy may be of a data set that was since written anew.
    let object = remote.object(INDEX_NAME);
    let data = remote::get(&object, None, interrupted)?
        .ok_or_else(|| StreamError::IndexNotFound { uri: object.uri() })?;
    let modified_ms = object.modified_ms().unwrap_or_default();
    origin::keep(&path, &data, remote.uri(), modified_ms, interrupted)?;
    Ok((data, modified_ms))
}

/// The copy that [`load_index`] left in `local` of the index at `remote`, for want of that; `None` where there is
/// none, or one of another data set.
///
/// # Errors
/// [`StreamError::Io`].
pub fn load_kept_index(local: &Path, remote: &Remote) -> Result<Option<(Vec<u8>, i64)>> {
    let path = local.join(INDEX_NAME);
    if !path.exists() || origin::is_elsewhere(local, remote.uri()) {
        return Ok(None);
    }
    let data = fs::read(&path).map_err(|error| StreamError::io(&path, "read", &error))?;
    let written_ms = origin::last_modified_ms(local, remote.uri());
    Ok(Some((data, written_ms.unwrap_or_default())))
}

impl Cache {
    /// A cache for `index`, fed from `remote` if there is one.
    ///
    /// # Errors
    /// [`StreamError::Config`] where `validate_hash` is unknown or not in the index.
    pub fn new(index: Arc<Index>, remote: Option<Remote>, options: CacheOptions) -> Result<Self> {
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
                    "`validate_hash` is `{name}`, and shard `{}` carries {known:?}: expected one of those; write the data set with `hashes=[\"{name}\"]` or leave `validate_hash` out",
                    file.raw.basename
                )));
            }
        }
        let valid_since = match &remote {
            Some(_) => origin::valid_since(&options.local),
            None => SystemTime::UNIX_EPOCH,
        };
        let cache = Self {
            index,
            remote,
            options,
            valid_since,
            written_ms: 0,
            mark: None,
            limit: None,
            counters: Counters::default(),
            checked: Mutex::default(),
            picked: Mutex::default(),
            versions: Versions::default(),
            notices: Mutex::default(),
        };
        Ok(cache.written(0))
    }

    /// This cache of an index that was last written at `written_ms`, as [`load_index`] says.
    #[must_use]
    pub fn written(mut self, written_ms: i64) -> Self {
        let fingerprint = self.index.fingerprint();
        let remote = self.remote.as_ref();
        self.mark = remote.map(|remote| Mark::new(remote.uri(), written_ms, fingerprint));
        self.written_ms = written_ms;
        self
    }

    /// This cache under a limit, which may be one for several. Without a remote there is nothing to limit:
    /// what is there is all there is.
    #[must_use]
    pub fn limited(mut self, limit: Arc<CacheLimit>) -> Self {
        self.limit = self.remote.is_some().then_some(limit);
        self
    }

    /// The limit in bytes, if there is one.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.limit.as_ref().map(|limit| limit.bytes())
    }

    /// What it did since it was made.
    pub fn counts(&self) -> CacheCounts {
        let remote = self.remote.as_ref().map(Remote::counts);
        self.counters.now(remote.unwrap_or_default())
    }

    /// What this cache holds shards of.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Takes what happened that a person may want to know, such as a shard fetched twice.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Opens a shard, bringing it here first where it is not. Blocks; gives up once `stop` is set.
    ///
    /// # Errors
    /// [`StreamError::ShardNotFound`], [`StreamError::ShardCorrupt`] when no attempt brought the right
    /// bytes, [`StreamError::Io`], the store's own errors, [`StreamError::Closed`].
    pub fn open(&self, number: u32, stop: &AtomicBool) -> Result<Shard> {
        let (shard, unsettled) = self.open_early(number, stop)?;
        unsettled.commit()?;
        Ok(shard)
    }

    /// As [`open`](Self::open), but what was brought here may still have to be committed.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_early(&self, number: u32, stop: &AtomicBool) -> Result<(Shard, Unsettled)> {
        let shard = self.shard(number)?;
        let mut unsettled = Unsettled::default();
        let mut bring = |file: &StoredFile| -> Result<Mapped> {
            if let Some(bytes) = self.find(number, &shard, file, Some(stop))? {
                return Ok(bytes);
            }
            let (bytes, part) = self.admit(&shard, file, &self.path(file), stop)?;
            unsettled.0.extend(part);
            Ok(bytes)
        };
        let data = bring(&shard.data)?;
        let meta = shard.meta.as_ref().map(bring).transpose()?;
        Ok((self.assemble(number, &shard, data, meta)?, unsettled))
    }

    /// Opens a shard if all of it is here; downloads and unpacks nothing, and waits for nobody.
    ///
    /// # Errors
    /// As [`open`](Self::open); a shard with wrong bytes that can be fetched again is not here.
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
        data: Mapped,
        meta: Option<Mapped>,
    ) -> Result<Shard> {
        let origin = self.path(&shard.data).display().to_string();
        let stamps = [data.stamp(), meta.as_ref().and_then(Mapped::stamp)];
        let meta = meta.map(|bytes| Box::new(bytes) as ShardBytes);
        let opened = Shard::open(shard, &origin, Box::new(data), meta)?;
        self.checked().insert(number, stamps);
        Ok(opened)
    }

    /// A raw file's bytes, if it is here and they are right; if they are wrong and there are others to be had,
    /// it is not here.
    fn find(
        &self,
        number: u32,
        shard: &ShardInfo,
        file: &StoredFile,
        stop: Option<&AtomicBool>,
    ) -> Result<Option<Mapped>> {
        let path = self.path(file);
        let Some(bytes) = self.map(&path, stop)? else {
            return Ok(None);
        };
        // Another process may have put another file there since.
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

    /// Maps a file of the cache, kept from eviction while the map lives.
    fn map(&self, path: &Path, stop: Option<&AtomicBool>) -> Result<Option<Mapped>> {
        match &self.limit {
            None => map(path),
            Some(limit) => hold(path, limit.deadline(self.options.wait), stop),
        }
    }

    fn note(&self, notice: String) {
        self.notices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(notice);
    }
}
