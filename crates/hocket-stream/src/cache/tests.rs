#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use crate::shard::codec::Compression;
use crate::shard::info::FileInfo;
use crate::shard::raw_file::assemble;
use crate::writer::{WriterOptions, place};
use hocket_store::StoreOptions;
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

mod removal;
mod versions;

/// A data set of one shard, with a cache in another folder.
struct Fixture {
    remote: TempDir,
    local: TempDir,
    index: Arc<Index>,
}

impl Fixture {
    /// Creates ten 4-byte samples.
    fn new(compression: Option<&str>, hash: &str) -> Self {
        let samples: Vec<[u8; 4]> = (0u32..10).map(u32::to_le_bytes).collect();
        Self::of(&samples, compression, &[hash])
    }

    /// Creates a data set of samples of equal size.
    fn of<T: AsRef<[u8]>>(samples: &[T], compression: Option<&str>, hashes: &[&str]) -> Self {
        let remote = tempfile::tempdir().unwrap();
        let algorithm = |name: &&str| (name.to_string(), Algorithm::parse(name).unwrap());
        let options = WriterOptions {
            local: Some(remote.path().into()),
            remote: None,
            compression: compression.map(|text| Compression::parse(text).unwrap()),
            hashes: hashes.iter().map(algorithm).collect(),
            only_new: true,
            threads: 1,
        };
        let file = assemble("s.mds".into(), b"{}", samples.iter().collect()).unwrap();
        let placed = place(&options, file, &|| false).unwrap();
        let written = placed.commit().unwrap();
        let file = |file: &FileInfo| {
            let hashes: std::collections::HashMap<_, _> = file.hashes.iter().cloned().collect();
            json!({"basename": file.basename, "bytes": file.bytes, "hashes": hashes})
        };
        let shard = json!({
            "column_encodings": ["uint32"], "column_names": ["a"], "column_sizes": [samples[0].as_ref().len()],
            "compression": compression, "format": "mds", "hashes": hashes, "samples": samples.len(),
            "size_limit": null, "version": 2, "raw_data": file(&written.raw),
            "zip_data": written.zip.as_ref().map_or(Value::Null, file),
        });
        let text = json!({"version": 2, "shards": [shard]}).to_string();
        fs::write(remote.path().join(INDEX_NAME), &text).unwrap();
        let index = Arc::new(Index::parse(text.as_bytes(), "index.json").unwrap());
        Self {
            remote,
            local: tempfile::tempdir().unwrap(),
            index,
        }
    }

    fn cache(&self, keep_zip: bool) -> Cache {
        let remote = DatasetRemote::open(
            self.remote.path().to_str().unwrap(),
            StoreOptions::default(),
        )
        .unwrap();
        self.cache_at(self.local.path(), Some(remote), keep_zip)
    }

    fn cache_at(&self, local: &Path, remote: Option<DatasetRemote>, keep_zip: bool) -> Cache {
        let options = CacheOptions {
            local: local.into(),
            keep_zip,
            keep_shards: true,
            download_retry: 3,
            validate_hash: None,
            wait: std::time::Duration::from_secs(60),
        };
        Cache::new(self.index.clone(), remote, options).unwrap()
    }

    fn local_names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.local.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

fn open(cache: &Cache) -> Result<Shard> {
    cache.open(0, &|| false)
}

fn third(shard: &Shard) -> Vec<u8> {
    let mut value = Vec::new();
    shard.sample(3, |_, bytes| value = bytes.to_vec()).unwrap();
    value
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn the_cache_has_the_fetched_shards_and_no_other_files() {
    for (level, keep_zip, expected) in [
        (None, false, vec!["s.mds"]),
        (Some("zstd"), false, vec!["s.mds"]),
        (Some("zstd:7"), true, vec!["s.mds", "s.mds.zstd"]),
        (Some("br:1"), true, vec!["s.mds", "s.mds.br"]),
        (Some("bz2"), false, vec!["s.mds"]),
        (Some("gz"), true, vec!["s.mds", "s.mds.gz"]),
        (Some("snappy"), true, vec!["s.mds", "s.mds.snappy"]),
    ] {
        let fixture = Fixture::new(level, "xxh3_64");
        assert_eq!(
            third(&open(&fixture.cache(keep_zip)).unwrap()),
            [3, 0, 0, 0]
        );
        assert_eq!(fixture.local_names(), expected);
    }
}

#[test]
fn a_shard_can_be_read_before_it_is_committed() {
    let fixture = Fixture::new(None, "xxh3_64");
    let cache = fixture.cache(false);
    let early = || cache.open_early(0, &|| false).unwrap();
    let (shard, unsettled) = early();
    assert_eq!(third(&shard), [3, 0, 0, 0]);
    assert_eq!(fixture.local_names(), [".s.mds.part"]);
    drop(unsettled);
    assert!(fixture.local_names().is_empty());
    assert_eq!(third(&shard), [3, 0, 0, 0]);
    early().1.commit().unwrap();
    assert_eq!(fixture.local_names(), ["s.mds"]);
}

#[test]
fn without_a_remote_shards_are_read_in_place() {
    for level in [None, Some("zstd:3")] {
        let fixture = Fixture::new(level, "sha1");
        let cache = fixture.cache_at(fixture.remote.path(), None, false);
        assert_eq!(third(&open(&cache).unwrap()), [3, 0, 0, 0]);
    }
}

#[test]
fn an_altered_cached_shard_is_fetched_again_with_a_notice() {
    let fixture = Fixture::new(None, "xxh3_64");
    open(&fixture.cache(false)).unwrap();
    flip(&fixture.local.path().join("s.mds"));
    let cache = fixture.cache(false);
    assert_eq!(third(&open(&cache).unwrap()), [3, 0, 0, 0]);
    assert!(cache.take_notices().concat().contains("fetched again"));
    fs::write(fixture.local.path().join("s.mds"), b"short").unwrap();
    assert_eq!(third(&open(&fixture.cache(false)).unwrap()), [3, 0, 0, 0]);
}

#[test]
fn an_altered_remote_is_retried_and_then_named() {
    for (level, name) in [(None, "s.mds"), (Some("zstd"), "s.mds.zstd")] {
        let fixture = Fixture::new(level, "xxh64");
        let object = fixture.remote.path().join(name);
        flip(&object);
        let cache = fixture.cache(false);
        let error = open(&cache).unwrap_err();
        let StreamError::ShardCorrupt {
            shard,
            object: named,
            expected,
            actual,
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(shard, name);
        assert!(named.ends_with(object.to_str().unwrap()), "{named}");
        assert!(
            expected.starts_with("xxh64 ") && actual.starts_with("xxh64 ") && expected != actual
        );
        assert_eq!(cache.take_notices().len(), 2);
        assert!(fixture.local_names().is_empty());
    }
}

#[test]
fn a_truncated_remote_is_named_with_both_sizes() {
    let fixture = Fixture::new(None, "xxh3_64");
    let object = fixture.remote.path().join("s.mds");
    let bytes = fs::read(&object).unwrap();
    fs::write(&object, &bytes[..20]).unwrap();
    let message = open(&fixture.cache(false)).unwrap_err().to_string();
    assert!(
        message.contains("20 bytes") && message.contains(&format!("{} bytes", bytes.len())),
        "{message}"
    );
}

#[test]
fn a_missing_shard_is_not_a_corrupt_one() {
    let fixture = Fixture::new(None, "xxh3_64");
    fs::remove_file(fixture.remote.path().join("s.mds")).unwrap();
    for cache in [
        fixture.cache(false),
        fixture.cache_at(fixture.remote.path(), None, false),
    ] {
        assert!(matches!(
            open(&cache).unwrap_err(),
            StreamError::ShardNotFound { .. }
        ));
    }
}

#[test]
fn a_killed_processs_partial_file_is_replaced() {
    let fixture = Fixture::new(None, "xxh3_64");
    fs::write(fixture.local.path().join(".s.mds.part"), b"half").unwrap();
    assert_eq!(third(&open(&fixture.cache(false)).unwrap()), [3, 0, 0, 0]);
    assert_eq!(fixture.local_names(), ["s.mds"]);
}

#[test]
fn the_index_comes_from_the_remote_and_its_absence_is_named() {
    let fixture = Fixture::new(None, "xxh3_64");
    fs::write(fixture.local.path().join(INDEX_NAME), b"of yesterday").unwrap();
    let remote = DatasetRemote::open(
        fixture.remote.path().to_str().unwrap(),
        StoreOptions::default(),
    )
    .unwrap();
    let (data, _) = load_index(fixture.local.path(), Some(&remote), &|| false).unwrap();
    assert_eq!(
        data,
        fs::read(fixture.local.path().join(INDEX_NAME)).unwrap()
    );
    fs::remove_file(fixture.remote.path().join(INDEX_NAME)).unwrap();
    let error = load_index(fixture.local.path(), Some(&remote), &|| false).unwrap_err();
    assert!(matches!(error, StreamError::IndexNotFound { .. }));
}

#[test]
fn a_folder_with_two_names_is_locked_once() {
    let fixture = Fixture::new(None, "xxh3_64");
    let name = fixture.local.path();
    let above = tempfile::tempdir().unwrap();
    let link = above.path().join("link");
    std::os::unix::fs::symlink(name, &link).unwrap();
    let again = name.join("..").join(name.file_name().unwrap());
    let folders = [name.to_owned(), again, link];
    let folders = folders.map(|path| (path, fixture.index.clone())).to_vec();
    let limit = CacheLimit::new(1 << 20, folders).unwrap();
    // With `stop` set, a wait for a lock fails; this succeeds because no folder is locked twice.
    let wait = std::time::Duration::MAX;
    assert!(limit.turn(wait, &|| true).unwrap().is_some());
}

/// Opens like [`open`], but with a time limit.
fn open_in_time(cache: &Cache) -> Result<Shard> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| cache.open(0, &|| stop.load(Ordering::Relaxed)));
        let begun = std::time::Instant::now();
        while !opening.is_finished() && begun.elapsed().as_secs() < 30 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        opening.join().unwrap()
    })
}

#[test]
fn a_stopped_process_that_holds_a_lock_does_not_block_others() {
    for name in ["", "s.mds"] {
        let fixture = Fixture::new(None, "xxh3_64");
        let mut cache = fixture.cache(false);
        cache.options.wait = std::time::Duration::from_millis(50);
        let folders = vec![(fixture.local.path().into(), fixture.index.clone())];
        let cache = cache.limited(Arc::new(CacheLimit::new(1 << 20, folders).unwrap()));
        if !name.is_empty() {
            open(&cache).unwrap();
        }
        let held = fs::File::open(fixture.local.path().join(name)).unwrap();
        held.lock().unwrap();
        for _ in 0..2 {
            assert_eq!(third(&open_in_time(&cache).unwrap()), [3, 0, 0, 0]);
        }
        let notices = cache.take_notices();
        if name.is_empty() {
            assert!(fixture.local_names().is_empty());
            assert_eq!((notices.len(), cache.counts().passed), (1, 2));
            assert!(notices.concat().contains("look for a stopped process"));
        }
        drop(held);
        open(&cache).unwrap();
        assert_eq!(fixture.local_names(), ["s.mds"]);
    }
}
