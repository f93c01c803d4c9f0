//! Tests of a cache whose data set is rewritten, or whose objects are replaced.
use super::*;
use hocket_store::StoreError;
use std::fs::{File, FileTimes};

const BIG: usize = 128 << 10;

/// Creates twelve samples of 128 KiB, each filled with its number: a shard large enough for range reads.
fn big(hashes: &[&str]) -> Fixture {
    let samples: Vec<Vec<u8>> = (0u8..12).map(|number| vec![number; BIG]).collect();
    Fixture::of(&samples, None, hashes)
}

fn hours(number: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(3600 * number)
}

fn set_time(path: &Path, time: SystemTime) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
}

/// Replaces a file by another one of the same size, as a store does.
fn replace(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    let other = path.with_extension("new");
    fs::write(&other, bytes).unwrap();
    fs::rename(other, path).unwrap();
}

fn pick(cache: &Cache, numbers: &[u32]) -> Result<Option<Vec<Vec<u8>>>> {
    let Some(shard) = cache.read_ranges(0, numbers, &|| false)? else {
        return Ok(None);
    };
    let value = |number: &u32| {
        let mut value = Vec::new();
        shard.sample(*number, |_, bytes| value = bytes.to_vec())?;
        Ok(value)
    };
    numbers.iter().map(value).collect::<Result<_>>().map(Some)
}

/// Opens a cache as a new process does: the index is read first.
fn begin(fixture: &Fixture) -> Cache {
    begin_at(fixture, fixture.local.path(), false)
}

/// Opens a cache like [`begin`], in another folder.
fn begin_at(fixture: &Fixture, local: &Path, keep_zip: bool) -> Cache {
    let remote = fixture.cache(keep_zip).remote.unwrap();
    let (_, written_ms) = load_index(local, Some(&remote), &|| false).unwrap();
    let cache = fixture.cache_at(local, Some(remote), keep_zip);
    cache.written(written_ms)
}

fn fourth(shard: &Shard) -> u8 {
    let mut value = 0;
    shard.sample(3, |_, bytes| value = bytes[0]).unwrap();
    value
}

#[test]
fn a_rewritten_data_set_without_digests_is_fetched_again() {
    for (hashes, is_kept) in [(&[][..], false), (&["xxh3_64"][..], true)] {
        let fixture = Fixture::of(&[[1u8; 4], [2; 4], [3; 4], [4; 4]], None, hashes);
        let index = fixture.remote.path().join(INDEX_NAME);
        let held = fixture.local.path().join("s.mds");
        set_time(&index, hours(1));
        open(&begin(&fixture)).unwrap();
        set_time(&held, hours(2));
        open(&begin(&fixture)).unwrap();
        assert_eq!(fs::metadata(&held).unwrap().modified().unwrap(), hours(2));

        // The same index to the byte, and samples of the same sizes.
        set_time(&index, hours(3));
        if !is_kept {
            replace(&fixture.remote.path().join("s.mds"), |bytes| {
                let end = bytes.len() - 4;
                bytes[end..].fill(9);
            });
        }
        let cache = begin(&fixture);
        if cache.valid_since == SystemTime::UNIX_EPOCH {
            // On a file system without extended attributes, only digests distinguish them.
            continue;
        }
        let shard = open(&cache).unwrap();
        let mut last = Vec::new();
        shard.sample(3, |_, bytes| last = bytes.to_vec()).unwrap();
        assert_eq!(last, if is_kept { [4; 4] } else { [9; 4] });
        assert_eq!(cache.counts().fetches, u64::from(!is_kept));
        assert_eq!(cache.take_notices().len(), usize::from(!is_kept));
    }
}

#[test]
fn samples_of_a_large_shard_are_fetched_alone() {
    let fixture = big(&["xxh3_64"]);
    let cache = fixture.cache(false);
    let of = |number: u8| vec![number; BIG];
    assert_eq!(pick(&cache, &[0]).unwrap(), Some(vec![of(0)]));
    assert_eq!(
        pick(&cache, &[3, 4, 11]).unwrap(),
        Some(vec![of(3), of(4), of(11)])
    );
    let shard = cache.read_ranges(0, &[3, 11], &|| false).unwrap().unwrap();
    assert!(shard.sample(4, |_, _| ()).is_err());
    assert!(fixture.local_names().is_empty());
    // Four samples of twelve are too many for a range read.
    assert_eq!(pick(&cache, &[0, 1, 2, 3]).unwrap(), None);
    // A shard with repeated range reads is fetched whole.
    let times = (0..10).take_while(|_| pick(&cache, &[5]).unwrap().is_some());
    assert_eq!(times.count(), 5);
    let small = Fixture::new(None, "xxh3_64");
    assert_eq!(pick(&small.cache(false), &[5]).unwrap(), None);
}

#[test]
fn invalid_offsets_are_named_and_not_read() {
    for (at, offset) in [(4, 0u32), (8, 7), (8, u32::MAX)] {
        let fixture = big(&[]);
        replace(&fixture.remote.path().join("s.mds"), |bytes| {
            bytes[at..at + 4].copy_from_slice(&offset.to_le_bytes());
        });
        let error = pick(&fixture.cache(false), &[0]).unwrap_err();
        let StreamError::ShardCorrupt { expected, .. } = &error else {
            panic!("{error}")
        };
        assert!(expected.starts_with("sample 0 between "), "{error}");
    }
}

#[test]
fn samples_of_an_object_replaced_between_two_reads_are_not_mixed() {
    let fixture = big(&[]);
    let object = fixture.remote.path().join("s.mds");
    let cache = fixture.cache(false);
    assert!(pick(&cache, &[1]).unwrap().is_some());
    replace(&object, |bytes| *bytes.last_mut().unwrap() = 99);
    for _ in 0..2 {
        let error = pick(&cache, &[11]).unwrap_err();
        assert!(
            matches!(error, StreamError::Store(StoreError::Changed { .. })),
            "{error}"
        );
    }
    // The whole shard must have the same version, unless a digest shows that it is the same.
    let error = open(&cache).unwrap_err();
    assert!(
        matches!(error, StreamError::Store(StoreError::Changed { .. })),
        "{error}"
    );
}

#[test]
fn an_object_replaced_by_an_equal_one_is_read_on_once_its_digest_matches() {
    let fixture = big(&["xxh3_64"]);
    let cache = fixture.cache(false);
    assert!(pick(&cache, &[1]).unwrap().is_some());
    replace(&fixture.remote.path().join("s.mds"), |_| ());
    assert!(pick(&cache, &[1]).is_err());
    open(&cache).unwrap();
    assert_eq!(pick(&cache, &[1]).unwrap(), Some(vec![vec![1; BIG]]));
}

#[test]
fn a_corrupt_object_read_first_does_not_stay_the_expected_version() {
    let fixture = big(&[]);
    let object = fixture.remote.path().join("s.mds");
    replace(&object, |bytes| bytes.push(0));
    let cache = fixture.cache(false);
    let error = pick(&cache, &[1]).unwrap_err();
    assert!(matches!(error, StreamError::ShardCorrupt { .. }), "{error}");
    replace(&object, |bytes| bytes.truncate(bytes.len() - 1));
    assert!(pick(&cache, &[1]).unwrap().is_some());
}

#[test]
fn a_file_replaced_after_its_check_is_checked_again() {
    for limit in [None, Some(1 << 20)] {
        let fixture = Fixture::new(None, "xxh3_64");
        let mut cache = fixture.cache(false);
        if let Some(bytes) = limit {
            let folders = vec![(fixture.local.path().into(), fixture.index.clone())];
            cache = cache.limited(Arc::new(CacheLimit::new(bytes, folders).unwrap()));
        }
        let held = fixture.local.path().join("s.mds");
        let other = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
        let open_map = open(&cache).unwrap();
        // Replace the file as another data set in the same folder would.
        replace(&held, other);
        assert!(cache.take_notices().is_empty());
        open(&cache).unwrap();
        assert!(cache.take_notices().concat().contains("fetched again"));
        assert_eq!(third(&open(&cache).unwrap()), third(&open_map));
        assert_eq!((cache.counts().fetches, cache.counts().hits), (2, 1));
        // Replace the file as another process would after the data set was rewritten.
        replace(&fixture.remote.path().join("s.mds"), other);
        replace(&held, other);
        let error = open(&cache).unwrap_err();
        assert!(matches!(error, StreamError::ShardCorrupt { .. }), "{error}");
    }
}

#[test]
fn two_data_sets_without_digests_in_one_folder_are_not_mixed() {
    for (compression, keep_zip) in [(None, false), (Some("zstd"), true)] {
        let [one, other] = [1, 2].map(|value| Fixture::of(&[[value; 4]; 9], compression, &[]));
        let local = tempfile::tempdir().unwrap();
        let begin = |fixture: &Fixture| begin_at(fixture, local.path(), keep_zip);
        let (first, second) = (begin(&one), begin(&other));
        if second.valid_since == SystemTime::UNIX_EPOCH {
            // On a file system without extended attributes, only digests distinguish them.
            continue;
        }
        assert_eq!(fourth(&open(&first).unwrap()), 1);
        for _ in 0..2 {
            assert_eq!(fourth(&open(&second).unwrap()), 2);
            assert_eq!(fourth(&open(&begin(&one)).unwrap()), 1);
            assert_eq!(fourth(&open(&first).unwrap()), 1);
        }
        assert!(second.take_notices().concat().contains("the same `local`"));
        // The raw file is evicted; the compressed file beside it belongs to the other data set.
        open(&second).unwrap();
        fs::remove_file(local.path().join("s.mds")).unwrap();
        assert_eq!(fourth(&open(&first).unwrap()), 1);
    }
}

#[test]
fn a_process_started_before_a_rewrite_does_not_continue_with_the_new_data() {
    for is_held in [true, false] {
        let fixture = Fixture::of(&[[1u8; 4]; 9], None, &[]);
        let (index, object) = (
            fixture.remote.path().join(INDEX_NAME),
            fixture.remote.path().join("s.mds"),
        );
        set_time(&object, hours(1));
        set_time(&index, hours(1));
        let before = begin(&fixture);
        if is_held {
            open(&before).unwrap();
        }
        replace(&object, |bytes| {
            bytes.last_chunk_mut::<36>().unwrap().fill(9)
        });
        set_time(&object, hours(3));
        set_time(&index, hours(3));
        let after = begin(&fixture);
        if after.valid_since == SystemTime::UNIX_EPOCH {
            continue;
        }
        assert_eq!(fourth(&open(&after).unwrap()), 9);
        let error = open(&before).unwrap_err();
        assert!(
            matches!(error, StreamError::Store(StoreError::Changed { .. })),
            "{error}"
        );
        assert_eq!(after.counts().fetches, 1);
        assert_eq!(fourth(&open(&after).unwrap()), 9);
    }
}

#[test]
fn a_shard_written_later_is_an_error_once_the_index_has_changed() {
    let fixture = Fixture::of(&[[1u8; 4]; 9], None, &[]);
    let (index, object) = (
        fixture.remote.path().join(INDEX_NAME),
        fixture.remote.path().join("s.mds"),
    );
    set_time(&index, hours(1));
    // A copied data set: the shard is newer than its index.
    set_time(&object, hours(2));
    let before = begin(&fixture);
    assert_eq!(fourth(&open(&before).unwrap()), 1);
    fs::remove_file(fixture.local.path().join("s.mds")).unwrap();
    let before = begin(&fixture);
    // Rewritten while this cache is in use, before any process has read the new index.
    replace(&object, |bytes| {
        bytes.last_chunk_mut::<36>().unwrap().fill(9)
    });
    set_time(&object, hours(3));
    replace(&index, |_| ());
    set_time(&index, hours(3));
    let error = open(&before).unwrap_err();
    assert!(
        matches!(error, StreamError::Store(StoreError::Changed { .. })),
        "{error}"
    );
    assert_eq!(fourth(&open(&begin(&fixture)).unwrap()), 9);
    // A replacement of a data set starts with the index.
    let before = begin(&fixture);
    fs::remove_file(fixture.local.path().join("s.mds")).unwrap();
    fs::remove_file(&index).unwrap();
    assert!(open(&before).is_err());
}

#[test]
fn a_file_fetched_within_the_second_of_its_index_is_fetched_again_by_the_next_process() {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    let this_second = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs());
    let fixture = Fixture::of(&[[1u8; 4]; 9], None, &[]);
    let (index, object) = (
        fixture.remote.path().join(INDEX_NAME),
        fixture.remote.path().join("s.mds"),
    );
    for path in [&index, &object] {
        set_time(path, this_second);
    }
    let first = begin(&fixture);
    assert_eq!(fourth(&open(&first).unwrap()), 1);
    assert_eq!(fourth(&open(&first).unwrap()), 1);
    assert_eq!(first.counts().fetches, 1);
    replace(&object, |bytes| {
        bytes.last_chunk_mut::<36>().unwrap().fill(9)
    });
    set_time(&object, this_second);
    // A later index with the same bytes and time looks the same in a store whose ETags are digests.
    let second = begin(&fixture);
    assert_eq!(fourth(&open(&second).unwrap()), 9);
}

#[test]
fn files_without_a_mark_from_other_programs_are_used() {
    let fixture = Fixture::of(&[[1u8; 4]; 9], None, &[]);
    for name in [INDEX_NAME, "s.mds"] {
        let copy = fixture.local.path().join(name);
        fs::copy(fixture.remote.path().join(name), copy).unwrap();
    }
    let cache = begin(&fixture);
    assert_eq!(fourth(&open(&cache).unwrap()), 1);
    assert_eq!(cache.counts().fetches, 0);
}

#[test]
fn a_kept_index_of_another_data_set_is_not_used() {
    let [one, other] = [1, 2].map(|value| Fixture::of(&[[value; 4]; 9], None, &["xxh3_64"]));
    let remotes = [&one, &other].map(|fixture| fixture.cache(false).remote.unwrap());
    let local = one.local.path();
    let kept = |remote| load_kept_index(local, remote).unwrap();
    assert_eq!(kept(&remotes[0]), None);
    let loaded = load_index(local, Some(&remotes[0]), &|| false).unwrap();
    if origin::kept_version(local, remotes[0].uri()).is_some() {
        assert_eq!(kept(&remotes[0]), Some(loaded));
        assert_eq!(kept(&remotes[1]), None);
    }
}
