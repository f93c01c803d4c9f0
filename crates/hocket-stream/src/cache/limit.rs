//! A limit on the bytes of cache folders, enforced jointly by all processes of a machine without a coordinator.
//!
//! There is no shared state besides the folders: each admission scans them under a kernel lock on the folders
//! themselves. A locked part counts with its final size, so room is reserved before a download begins; a part
//! without a lock belongs to a dead process and is removed. Other files are evicted in LRU order, except those
//! that a process holds open. Files are unlinked and never truncated.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use hocket_store::Interrupted;
use hocket_store::durable::{FileLock, create_folder, is_same_file};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Result, StreamError};
use crate::index::Index;
use crate::shard::files::part_target;
use crate::shard::info::{FileInfo, INDEX_NAME, ShardInfo};

/// Interval between attempts to take a lock that is only held briefly.
pub(super) const LOCK_POLL: Duration = Duration::from_millis(2);

/// Time to wait for a lock after a previous wait has timed out.
const LATE_WAIT: Duration = Duration::from_millis(10);

/// Approximate block size in which file systems allocate space.
const BLOCK_BYTES: u64 = 4096;

/// A limit on the total bytes of the caches of several data sets. Only for data sets with a remote.
pub struct CacheLimit {
    bytes: u64,
    /// Sorted by inode, so that all processes lock them in the same order, whatever their names.
    folders: Vec<CacheFolder>,
    evicted: AtomicU64,
    /// Whether the last wait for the folders timed out and no later one succeeded in this process.
    is_late: AtomicBool,
}

/// The cache folder of one data set.
struct CacheFolder {
    path: PathBuf,
    index: Arc<Index>,
    /// Every file of the index by a hash of its name, with its shard and its position in the shard.
    by_name: Vec<(u64, u32, u8)>,
    /// The subfolders that contain shards, as relative paths.
    below: Vec<PathBuf>,
}

/// A candidate for eviction.
struct EvictionCandidate {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl CacheLimit {
    /// Creates a limit of `bytes` for the folders of these data sets, which must contain their indexes.
    ///
    /// # Errors
    /// [`StreamError::Config`] if the indexes alone reach the limit; [`StreamError::Io`] if a folder does not
    /// exist.
    pub fn new(bytes: u64, data_sets: Vec<(PathBuf, Arc<Index>)>) -> Result<Self> {
        // Two streams may share a data set and refer to its folder by different links.
        let mut folders = BTreeMap::new();
        for (path, index) in data_sets {
            let created = create_folder(&path).map_err(|failed| failed.error);
            let metadata = created.and_then(|()| fs::metadata(&path));
            let metadata = metadata.map_err(|e| StreamError::io(&path, "look at", &e))?;
            folders
                .entry((metadata.ino(), metadata.dev()))
                .or_insert_with(|| CacheFolder::new(path, index));
        }
        let folders: Vec<CacheFolder> = folders.into_values().collect();
        let indexes = folders
            .iter()
            .filter_map(|folder| fs::metadata(folder.path.join(INDEX_NAME)).ok());
        let least = indexes.map(|index| on_disk(&index)).sum();
        if bytes <= least {
            return Err(StreamError::config(format!(
                "`cache_limit` is {bytes} bytes, but the index files alone take {least}: expected more than that; shards that do not fit are kept in memory"
            )));
        }
        Ok(Self {
            bytes,
            folders,
            evicted: AtomicU64::new(0),
            is_late: AtomicBool::new(false),
        })
    }

    /// Returns the limit in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of files that this process has evicted.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Takes the lock for changes to the folders; returns none if another process holds it for longer than
    /// `wait`.
    ///
    /// # Errors
    /// [`StreamError::Io`] if a folder cannot be locked; [`StreamError::Closed`] if interrupted.
    pub(super) fn turn(
        &self,
        wait: Duration,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<LimitLock>> {
        let until = self.deadline(wait);
        let folders = self.folders.iter();
        let turn: Option<Vec<FileLock>> = folders
            .map(|folder| lock_folder(&folder.path, until, interrupted))
            .collect::<Result<_>>()?;
        self.is_late.store(turn.is_none(), Ordering::Relaxed);
        Ok(turn.map(LimitLock))
    }

    /// Returns whether the last wait for the folders timed out.
    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }

    /// Returns the end of a wait for another process; none means no limit.
    pub(super) fn deadline(&self, wait: Duration) -> Option<Instant> {
        let wait = if self.is_late() {
            wait.min(LATE_WAIT)
        } else {
            wait
        };
        Instant::now().checked_add(wait)
    }

    /// Evicts files to make room for the existing parts, including the caller's. Returns whether all parts now
    /// fit.
    ///
    /// # Errors
    /// [`StreamError::Io`] if a folder cannot be read.
    pub(super) fn make_room(&self, _turn: &LimitLock) -> Result<bool> {
        let mut total = 0;
        let mut candidates = Vec::new();
        for folder in &self.folders {
            total += folder.survey(&mut candidates)?;
        }
        candidates.sort_by_key(|candidate| candidate.used);
        loop {
            // First take all locks, then remove: if the locked files do not free enough room, they are kept.
            let (mut left, mut taken) = (total, Vec::new());
            for candidate in &candidates {
                if left <= self.bytes {
                    break;
                }
                if let Some(lock) = lock_unused(&candidate.path) {
                    left = left.saturating_sub(candidate.bytes);
                    taken.push((candidate, lock));
                }
            }
            if left > self.bytes {
                return Ok(false);
            }
            let mut tried = BTreeSet::new();
            for (candidate, _lock) in &taken {
                match fs::remove_file(&candidate.path) {
                    // A file of another user in a sticky folder, which only the owner may remove; other files
                    // are evicted instead.
                    Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {}
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(StreamError::io(&candidate.path, "remove", &error));
                    }
                    _ => {
                        total = total.saturating_sub(candidate.bytes);
                        self.evicted.fetch_add(1, Ordering::Relaxed);
                    }
                }
                tried.insert(candidate.path.clone());
            }
            if total <= self.bytes {
                return Ok(true);
            }
            candidates.retain(|candidate| !tried.contains(&candidate.path));
        }
    }
}

impl CacheFolder {
    fn new(path: PathBuf, index: Arc<Index>) -> Self {
        let mut by_name = Vec::new();
        let mut below = BTreeSet::from([PathBuf::new()]);
        for number in 0..index.num_shards() as u32 {
            for (place, file) in files(&index, number).into_iter().enumerate() {
                by_name.push((xxh3_64(file.basename.as_bytes()), number, place as u8));
                let parent = Path::new(&file.basename).parent();
                if let Some(parent) = parent.filter(|parent| !below.contains(*parent)) {
                    below.insert(parent.to_owned());
                }
            }
        }
        by_name.sort_unstable();
        Self {
            path,
            index,
            by_name,
            below: below.into_iter().collect(),
        }
    }

    /// Returns the index's file of this name.
    fn find(&self, wanted: &Path) -> Option<FileInfo> {
        let wanted = wanted.to_str()?;
        let hash = xxh3_64(wanted.as_bytes());
        let first = self.by_name.partition_point(|&(known, ..)| known < hash);
        let same_hash = self.by_name.get(first..)?.iter();
        same_hash
            .take_while(|&&(known, ..)| known == hash)
            .filter_map(|&(_, number, place)| {
                files(&self.index, number).into_iter().nth(place.into())
            })
            .find(|file| file.basename == wanted)
    }

    /// Returns the bytes of all files and of pending parts, and collects the candidates for eviction.
    fn survey(&self, candidates: &mut Vec<EvictionCandidate>) -> Result<u64> {
        let mut total = 0;
        for below in &self.below {
            let folder = self.path.join(below);
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(StreamError::io(&folder, "list", &error)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| StreamError::io(&folder, "list", &e))?;
                // A file removed during the scan takes no room.
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                if metadata.is_file() {
                    total += self.weigh(&below.join(entry.file_name()), &metadata, candidates);
                }
            }
        }
        Ok(total)
    }

    /// Returns the bytes that one file counts for.
    fn weigh(
        &self,
        name: &Path,
        metadata: &Metadata,
        candidates: &mut Vec<EvictionCandidate>,
    ) -> u64 {
        let path = self.path.join(name);
        let bytes = on_disk(metadata);
        if self.find(name).is_some() {
            let used = metadata.accessed().unwrap_or(SystemTime::UNIX_EPOCH);
            candidates.push(EvictionCandidate { path, bytes, used });
            return bytes;
        }
        let Some(target) = part_target(name).and_then(|target| self.find(&target)) else {
            return bytes;
        };
        if let Some(_lock) = lock_unused(&path)
            && fs::remove_file(&path).is_ok()
        {
            return 0;
        }
        bytes.max(target.bytes.next_multiple_of(BLOCK_BYTES))
    }
}

fn files(index: &Index, number: u32) -> Vec<FileInfo> {
    let shard = index.shard(number as usize);
    shard
        .iter()
        .flat_map(ShardInfo::files)
        .flat_map(|file| [Some(&file.raw), file.zip.as_ref()])
        .flatten()
        .cloned()
        .collect()
}

/// Returns the disk space that a file takes, or will take when completely written.
fn on_disk(metadata: &Metadata) -> u64 {
    let blocks = metadata.blocks().saturating_mul(512);
    blocks.max(metadata.len().next_multiple_of(BLOCK_BYTES))
}

/// The lock for admitting, renaming and evicting files in the folders, held by one thread of the machine at a
/// time.
pub(super) struct LimitLock(
    #[expect(dead_code, reason = "it is what its drop does")] Vec<FileLock>,
);

/// Takes the lock on one folder; returns none if another process still holds it at `until`. A folder that was
/// removed is created again.
fn lock_folder(
    folder: &Path,
    until: Option<Instant>,
    interrupted: Interrupted<'_>,
) -> Result<Option<FileLock>> {
    let open = || match File::open(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let created = create_folder(folder).map_err(|failed| failed.error);
            created.and_then(|()| File::open(folder))
        }
        opened => opened,
    };
    loop {
        let lock = match open() {
            Ok(file) => FileLock::take(file).map_err(|e| StreamError::io(folder, "lock", &e))?,
            // Another process removed it again in between.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(StreamError::io(folder, "open", &error)),
        };
        if let Some(lock) = lock.filter(|lock| is_same_file(lock.file(), folder)) {
            return Ok(Some(lock));
        }
        if interrupted() {
            return Err(StreamError::Closed);
        }
        if is_past(until) {
            return Ok(None);
        }
        std::thread::sleep(LOCK_POLL);
    }
}

/// Returns whether there is a deadline and it has passed.
pub(super) fn is_past(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() > until)
}

/// Locks an unused file exclusively, which prevents new uses while the lock is held.
fn lock_unused(path: &Path) -> Option<FileLock> {
    // NFS grants exclusive locks only for writable files; another user's file may be read-only.
    let both = File::options().read(true).write(true).open(path);
    let file = both.or_else(|_| File::open(path)).ok()?;
    let lock = FileLock::take(file).ok()??;
    is_same_file(lock.file(), path).then_some(lock)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl};

    #[test]
    fn evictable_files_are_opened_for_writing_which_nfs_needs_to_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.mds");
        fs::write(&path, b"x").unwrap();
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        let lock = lock_unused(&path).unwrap();
        assert!(fcntl_getfl(lock.file()).unwrap().contains(OFlags::RDWR));
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
        assert!(lock_unused(&path).is_none(), "it is held");
        assert!(lock_unused(&folder.path().join("none")).is_none());
        assert!(!folder.path().join("none").exists());
    }
}
