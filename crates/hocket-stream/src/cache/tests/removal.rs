//! Tests in which another program removes the cache folder while shards are fetched.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};

/// Opens the shard repeatedly while a thread removes the folder, and returns the number of removals.
fn open_while_removing(cache: &Cache, folder: &Path) -> u32 {
    let (is_over, removed) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if fs::remove_dir_all(folder).is_ok() {
                    removed.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // Repeats until the removing thread has run often enough, which takes longer on a busy machine.
        let (begun, mut opened) = (Instant::now(), Vec::<Result<Shard>>::new());
        while opened.len() < 300
            || (removed.load(Ordering::Relaxed) <= 10 && begun.elapsed() < Duration::from_secs(30))
        {
            opened.push(open(cache));
        }
        is_over.store(true, Ordering::Relaxed);
        for shard in opened {
            assert_eq!(third(&shard.unwrap()), [3, 0, 0, 0]);
        }
    });
    removed.into_inner()
}

#[test]
fn a_folder_removed_at_any_moment_is_created_again() {
    for compression in [None, Some("zstd")] {
        for is_limited in [false, true] {
            let fixture = Fixture::new(compression, "xxh3_64");
            let folder = fixture.local.path();
            let mut cache = fixture.cache(compression.is_some());
            if is_limited {
                let folders = vec![(folder.into(), fixture.index.clone())];
                cache = cache.limited(Arc::new(CacheLimit::new(1 << 20, folders).unwrap()));
            }
            let removed = open_while_removing(&cache, folder);
            assert!(removed > 10, "{removed}");
            assert_eq!(third(&open(&cache).unwrap()), [3, 0, 0, 0]);
            assert!(folder.join("s.mds").exists());
        }
    }
}

#[test]
fn a_removed_part_neither_replaces_nor_removes_the_part_of_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("below").join("s.mds");
    for is_committed in [false, true] {
        let removed = UnfinishedFile::lock(&target, &|| false).unwrap();
        fs::remove_dir_all(target.parent().unwrap()).unwrap();
        let other = UnfinishedFile::lock(&target, &|| false).unwrap();
        fs::write(other.path(), b"half").unwrap();
        if is_committed {
            let error = removed.commit().unwrap_err();
            assert!(matches!(error, StreamError::Removed { .. }), "{error}");
        } else {
            drop(removed);
        }
        assert!(!target.exists());
        assert_eq!(fs::read(other.path()).unwrap(), b"half");
    }
}

#[test]
fn the_index_is_read_from_the_remote_while_the_folder_is_removed() {
    let fixture = Fixture::new(None, "xxh3_64");
    let local = fixture.local.path();
    let uri = fixture.remote.path().to_str().unwrap();
    let remote = DatasetRemote::open(uri, StoreOptions::default()).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = fs::remove_dir_all(local);
            }
        });
        let read = (0..300).map(|_| load_index(local, Some(&remote), &|| false));
        let read: Vec<_> = read.collect();
        is_over.store(true, Ordering::Relaxed);
        assert!(read.into_iter().all(|index| !index.unwrap().0.is_empty()));
    });
}
