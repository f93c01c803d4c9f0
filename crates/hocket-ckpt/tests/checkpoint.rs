//! Tests that write, commit, read, corrupt and list checkpoints, on a disk and in an in-memory object store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use hocket_ckpt::{
    ByteRead, CallerMemory, Checkpoint, CheckpointContents, CheckpointPlace, CheckpointStatus,
    CkptError, CommitOptions, DataFile, DataFiles, Dtype, MANIFEST_NAME, TensorEntry, WriteOptions,
    WrittenDataFile,
};
use hocket_store::{PutMode, Store, StoreOptions, runtime};
use proptest::prelude::*;
use serde_json::json;

const MIB: usize = 1 << 20;

const DURABLE: WriteOptions = WriteOptions {
    sync: true,
    encoding: None,
    background: false,
};

fn never() -> bool {
    false
}

/// Runs `test` on a disk and on an object store, each time with an unused prefix.
fn with_places(test: impl Fn(&str)) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let folder = tempfile::tempdir().unwrap();
    test(folder.path().to_str().unwrap());
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    test(&format!("memory://tests-{}/{number}", std::process::id()));
}

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn entry(name: &str, bytes: &[u8]) -> TensorEntry {
    TensorEntry {
        name: name.to_owned(),
        dtype: Dtype::parse("U8").unwrap(),
        shape: vec![bytes.len() as u64],
        memory: memory(bytes),
    }
}

fn memory(bytes: &[u8]) -> CallerMemory {
    // SAFETY: every test keeps the bytes until its operation has returned.
    unsafe { CallerMemory::new(bytes.as_ptr() as usize, bytes.len()) }
}

fn write(place: &CheckpointPlace, path: &str, entries: Vec<TensorEntry>) -> WrittenDataFile {
    let metadata = BTreeMap::from([("format".to_owned(), "hocket-ckpt/1".to_owned())]);
    hocket_ckpt::write_file(place, path, entries, &metadata, DURABLE, &never).unwrap()
}

/// Returns a document of one-dimensional byte tensors.
fn document(save_id: &str, step: u64, written: &WrittenDataFile) -> serde_json::Value {
    let tensors: serde_json::Map<_, _> = written
        .entries
        .iter()
        .map(|(name, offset, bytes)| {
            let chunks = json!({"file": [0], "offset": [offset], "length": [bytes], "start": [[0]], "size": [[bytes]]});
            (name.clone(), json!({"dtype": "U8", "shape": [bytes], "path": [name], "chunks": chunks}))
        })
        .collect();
    json!({
        "format": 1, "version": "0.1.0", "save_id": save_id, "step": step, "created": "2026-01-01T00:00:00.000000Z",
        "writer": "test", "world_size": 1, "mesh": null, "files": [written.file], "tensors": tensors, "values": {},
        "per_rank": null, "user": null,
    })
}

fn encoded(document: &serde_json::Value) -> Vec<u8> {
    hocket_ckpt::encode(document.to_string().as_bytes()).unwrap()
}

fn read(
    place: &CheckpointPlace,
    written: &WrittenDataFile,
    reads: &[ByteRead],
    check: bool,
) -> hocket_ckpt::Result<()> {
    DataFiles::new(place.clone(), vec![written.file.clone()])?.read(reads, check, &never)
}

fn commit(
    place: &CheckpointPlace,
    save_id: &str,
    step: u64,
    written: &WrittenDataFile,
) -> hocket_ckpt::Result<()> {
    let manifest = encoded(&document(save_id, step, written));
    hocket_ckpt::commit(place, manifest, save_id, &CommitOptions::default(), &never)
}

fn id(digit: char) -> String {
    digit.to_string().repeat(32)
}

#[test]
fn written_bytes_are_read_back() {
    with_places(|root| {
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let (large, small) = (noise(5 * MIB + 77, 1), noise(3, 2));
        let written = write(
            &place,
            "data/a.safetensors",
            vec![entry("small", &small), entry("large", &large)],
        );
        assert_eq!(written.file.data_start % 4096, 0);
        assert_eq!(
            written.file.size,
            written.file.data_start + (large.len() + small.len()) as u64
        );
        for check in [true, false] {
            let (mut whole, mut middle) = (vec![0_u8; large.len()], vec![0_u8; 2 * MIB]);
            let mut tail = vec![0_u8; 3];
            let reads = [
                ByteRead {
                    file: 0,
                    offset: 0,
                    memory: memory_mut(&mut whole),
                },
                ByteRead {
                    file: 0,
                    offset: 1000,
                    memory: memory_mut(&mut middle),
                },
                ByteRead {
                    file: 0,
                    offset: large.len() as u64,
                    memory: memory_mut(&mut tail),
                },
            ];
            read(&place, &written, &reads, check).unwrap();
            assert!(whole == large && middle == large[1000..1000 + 2 * MIB] && tail == small);
        }
        assert!(
            hocket_ckpt::verify_file(&place, &written.file, &never)
                .unwrap()
                .is_empty()
        );
    });
}

/// Contiguous entries, at any alignment, and separately allocated ones produce the same file.
#[test]
fn contiguous_and_separate_entries_produce_the_same_file() {
    let folder = tempfile::tempdir().unwrap();
    let all = noise(13 * MIB + 4100, 3);
    let edges = [0, 0, 100, 5 * MIB, 5 * MIB, 9 * MIB + 3, all.len()];
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut files = Vec::new();
    // The start of a page, from which direct writes are possible, and two other alignments.
    for start in [0, 1, 64] {
        let mut memory = vec![0; all.len() + 2 * 4096];
        let first = memory.as_ptr().align_offset(4096) + start;
        memory[first..first + all.len()].copy_from_slice(&all);
        let inside =
            |range: std::ops::Range<usize>| &memory[first + range.start..first + range.end];
        let own: Vec<Vec<u8>> = edges
            .windows(2)
            .map(|edge| all[edge[0]..edge[1]].to_vec())
            .collect();
        for is_own in [false, true] {
            let entries = edges
                .windows(2)
                .zip(names)
                .zip(&own)
                .map(|((edge, name), own)| {
                    entry(
                        name,
                        if is_own {
                            own
                        } else {
                            inside(edge[0]..edge[1])
                        },
                    )
                });
            let root = folder.path().join(format!("{start}-{is_own}"));
            let place = CheckpointPlace::open(root.to_str().unwrap()).unwrap();
            let written = write(&place, "data/a.safetensors", entries.collect());
            let bytes = std::fs::read(root.join("data/a.safetensors")).unwrap();
            assert!(bytes[written.file.data_start as usize..] == all);
            files.push((bytes, written.file.digests));
        }
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));
}

fn memory_mut(bytes: &mut [u8]) -> CallerMemory {
    // SAFETY: every test keeps the bytes, untouched, until its operation has returned.
    unsafe { CallerMemory::new(bytes.as_mut_ptr() as usize, bytes.len()) }
}

#[test]
fn a_data_file_is_never_replaced() {
    with_places(|root| {
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let bytes = noise(10, 3);
        write(&place, "data/a.safetensors", vec![entry("t", &bytes)]);
        let again = hocket_ckpt::write_file(
            &place,
            "data/a.safetensors",
            vec![entry("t", &bytes)],
            &BTreeMap::new(),
            DURABLE,
            &never,
        );
        assert!(matches!(again, Err(CkptError::Exists { .. })), "{again:?}");
    });
}

#[test]
fn one_of_two_commits_wins_and_can_be_repeated() {
    with_places(|root| {
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let bytes = noise(10, 4);
        let ours = write(&place, "data/a.safetensors", vec![entry("t", &bytes)]);
        let theirs = write(&place, "data/b.safetensors", vec![entry("t", &bytes)]);
        commit(&place, &id('a'), 1, &ours).unwrap();
        commit(&place, &id('a'), 1, &ours).unwrap();
        let lost = commit(&place, &id('b'), 1, &theirs);
        assert!(matches!(lost, Err(CkptError::Exists { .. })), "{lost:?}");
        let opened = Checkpoint::open(place.uri(), &never).unwrap();
        let Some(CheckpointContents::Manifest(document)) = opened.take_contents() else {
            panic!("contents of another format")
        };
        assert_eq!(document.save_id, id('a'));
        let files: Vec<_> = opened.files().records().collect();
        assert_eq!(files, [ours.file]);
    });
}

#[test]
fn a_listing_distinguishes_committed_partial_and_foreign() {
    with_places(|root| {
        let (prefix, bytes) = (CheckpointPlace::open(root).unwrap(), noise(10, 5));
        for (name, step) in [("late", 20), ("early", 3)] {
            let place = CheckpointPlace::open(&format!("{root}/{name}")).unwrap();
            let written = write(&place, "data/a.safetensors", vec![entry("t", &bytes)]);
            commit(&place, &id('c'), step, &written).unwrap();
        }
        let partial = CheckpointPlace::open(&format!("{root}/partial")).unwrap();
        write(
            &partial,
            "data/0badc0de-r00000-000.safetensors",
            vec![entry("t", &bytes)],
        );
        let foreign = CheckpointPlace::open(&format!("{root}/zoo/data/x")).unwrap();
        write(&foreign, "data/a.safetensors", vec![entry("t", &bytes)]);

        let listed = hocket_ckpt::list(&prefix, &never).unwrap();
        let statuses: Vec<_> = listed
            .iter()
            .map(|one| (one.name.as_str(), one.status))
            .collect();
        assert_eq!(
            statuses,
            [
                ("partial", CheckpointStatus::Partial),
                ("zoo", CheckpointStatus::Foreign),
                ("early", CheckpointStatus::Committed),
                ("late", CheckpointStatus::Committed)
            ]
        );
        let unread = Checkpoint::open(partial.uri(), &never).err();
        assert!(
            matches!(unread, Some(CkptError::Partial { .. })),
            "{unread:?}"
        );

        hocket_ckpt::delete(&prefix, "late", None, false, &never).unwrap();
        let gone = hocket_ckpt::delete(&prefix, "late", None, false, &never);
        assert!(matches!(gone, Err(CkptError::NotFound { .. })), "{gone:?}");
        assert_eq!(hocket_ckpt::list(&prefix, &never).unwrap().len(), 3);
    });
}

#[test]
fn a_removal_keeps_the_files_of_another_save() {
    with_places(|root| {
        let (prefix, bytes) = (CheckpointPlace::open(root).unwrap(), noise(10, 5));
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let save = |digit: char, step| {
            let path = format!("data/{}-r00000-000.safetensors", &id(digit)[..8]);
            (step, write(&place, &path, vec![entry("t", &bytes)]))
        };
        let ((step, old), (next_step, next)) = (save('c', 3), save('d', 4));
        commit(&place, &id('c'), step, &old).unwrap();

        hocket_ckpt::delete(&prefix, "one", None, false, &never).unwrap();
        let sizes = |file: &WrittenDataFile| {
            hocket_ckpt::sizes(&place, std::slice::from_ref(&file.file.path), &never).unwrap()
        };
        assert_eq!(sizes(&old), [None]);
        commit(&place, &id('d'), next_step, &next).unwrap();
        let other = hocket_ckpt::delete(&prefix, "one", Some(&id('c')), false, &never);
        assert!(
            matches!(other, Err(CkptError::NotFound { .. })),
            "{other:?}"
        );
        assert_eq!(
            hocket_ckpt::verify_file(&place, &next.file, &never).unwrap(),
            []
        );

        hocket_ckpt::delete(&prefix, "one", None, false, &never).unwrap();
        assert_eq!(sizes(&next), [None]);
        let gone = hocket_ckpt::delete(&prefix, "one", None, false, &never);
        assert!(matches!(gone, Err(CkptError::NotFound { .. })), "{gone:?}");
    });
}

#[test]
fn a_removal_takes_the_files_of_all_saves_if_no_manifest_can_be_read() {
    with_places(|root| {
        let (prefix, bytes) = (CheckpointPlace::open(root).unwrap(), noise(10, 5));
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        for is_spoiled in [false, true] {
            let files = [id('c'), id('d')].map(|id| {
                let path = format!("data/{}-r00000-000.safetensors", &id[..8]);
                write(&place, &path, vec![entry("t", &bytes)])
            });
            if is_spoiled {
                let store = Store::open(place.uri(), StoreOptions::default()).unwrap();
                let put = async move {
                    let spoiled = "spoiled".into();
                    store.put(MANIFEST_NAME, spoiled, PutMode::Overwrite).await
                };
                runtime::wait(put, &never).unwrap().unwrap();
            }
            hocket_ckpt::delete(&prefix, "one", None, true, &never).unwrap();
            let paths = files.map(|written| written.file.path);
            let sizes = || hocket_ckpt::sizes(&place, &paths, &never).unwrap();
            assert!(sizes().iter().all(Option::is_some));
            hocket_ckpt::delete(&prefix, "one", None, false, &never).unwrap();
            assert_eq!(sizes(), [None, None]);
            let gone = hocket_ckpt::delete(&prefix, "one", None, false, &never);
            assert!(matches!(gone, Err(CkptError::NotFound { .. })), "{gone:?}");
        }
    });
}

#[test]
fn a_partial_checkpoint_with_a_live_writer_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_str().unwrap();
    let (prefix, bytes) = (CheckpointPlace::open(root).unwrap(), noise(10, 5));
    let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
    let paths = [0, 1].map(|rank| format!("data/0badc0de-r0000{rank}-000.safetensors"));
    for path in &paths {
        write(&place, path, vec![entry("t", &bytes)]);
    }
    let writer = std::fs::File::open(folder.path().join("one").join(&paths[1])).unwrap();
    writer.lock().unwrap();
    for dry_run in [true, false] {
        let error = hocket_ckpt::delete(&prefix, "one", None, dry_run, &never).unwrap_err();
        assert!(
            matches!(&error, CkptError::Invalid(message) if message.contains(&paths[1])),
            "{error}"
        );
    }
    drop(writer);
    hocket_ckpt::delete(&prefix, "one", None, false, &never).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn sizes_are_none_for_missing_files() {
    with_places(|root| {
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let written = write(
            &place,
            "data/a.safetensors",
            vec![entry("t", b"1234567890")],
        );
        let paths = [
            "data/a.safetensors".to_owned(),
            "data/b.safetensors".to_owned(),
        ];
        let sizes = hocket_ckpt::sizes(&place, &paths, &never).unwrap();
        assert_eq!(sizes, [Some(written.file.size), None]);
    });
}

#[test]
fn a_spoiled_block_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let place = CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
    let bytes = noise(3 * MIB, 6);
    let written = write(&place, "data/a.safetensors", vec![entry("t", &bytes)]);
    let path = folder.path().join("data/a.safetensors");
    let mut stored = std::fs::read(&path).unwrap();
    stored[written.file.data_start as usize + MIB + 5] ^= 1;
    std::fs::write(&path, &stored).unwrap();
    let mut target = vec![0_u8; bytes.len()];
    let reads = [ByteRead {
        file: 0,
        offset: 0,
        memory: memory_mut(&mut target),
    }];
    let error = read(&place, &written, &reads, true).unwrap_err();
    let CkptError::Corrupt { file, offset, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        (file.as_deref(), offset),
        (Some("data/a.safetensors"), Some(MIB as u64))
    );
    assert_eq!(
        hocket_ckpt::verify_file(&place, &written.file, &never).unwrap(),
        [(1, MIB as i64)]
    );
}

#[test]
fn an_interrupt_ends_a_write_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let place = CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
    let bytes = noise(64 * MIB, 7);
    let outcome = hocket_ckpt::write_file(
        &place,
        "data/a.safetensors",
        vec![entry("t", &bytes)],
        &BTreeMap::new(),
        DURABLE,
        &|| true,
    );
    // The write may finish before the first check for an interrupt.
    if outcome.is_err() {
        assert!(
            matches!(outcome, Err(CkptError::Interrupted)),
            "{outcome:?}"
        );
        assert!(!folder.path().join("data/a.safetensors").exists());
    }
}

fn sample() -> serde_json::Value {
    let file = DataFile {
        path: "data/a.safetensors".to_owned(),
        size: 4096 + 112,
        data_start: 4096,
        header: "AAAAAAAAAAAAAAAAAAAAAA==".to_owned(),
        digests: "AAAAAAAAAAAAAAAAAAAAAA==".to_owned(),
        frames: None,
        planes: None,
    };
    json!({
        "format": 1, "version": "0.1.0", "save_id": id('d'), "step": 7, "created": "2026-01-01T00:00:00.000000Z",
        "writer": "test", "world_size": 2, "mesh": {"shard": 2}, "files": [file],
        "tensors": {
            "w": {"dtype": "F32", "shape": [7, 4], "path": ["w"], "chunks": {
                "file": [0, 0], "offset": [0, 64], "length": [64, 48], "start": [[0, 4], [0, 0]], "size": [[4, 3], [4, 4]]}},
            "tied": {"dtype": "F32", "shape": [7, 4], "path": ["tied"], "same_as": "w"},
            "steps.0": {"dtype": "I64", "shape": [], "path": ["steps", 0], "data": "BwAAAAAAAAA="}},
        "values": {"lr": {"path": ["lr"], "value": 0.1}},
        "per_rank": {"policy": "reseed", "ranks": [1, {"$bytes": ""}]}, "user": {"note": "näher"},
    })
}

#[test]
fn a_manifest_decodes_to_the_document_it_was_made_of() {
    let document = sample().to_string();
    let manifest = hocket_ckpt::encode(document.as_bytes()).unwrap();
    assert_eq!(
        hocket_ckpt::decode(&manifest, "x").unwrap(),
        document.as_bytes()
    );
}

/// Each case changes one field and gives a part of the expected message; an empty text marks a valid document.
#[test]
fn documents_that_break_a_rule_are_refused() {
    let cases: Vec<(&str, serde_json::Value, &str)> = vec![
        (
            "/files/0/path",
            json!("data/../../etc/passwd"),
            "plain path",
        ),
        ("/files/0/path", json!("/etc/passwd"), "plain path"),
        ("/files/0/size", json!(4095), "data_start"),
        ("/files/0/size", json!(u64::MAX), "digest"),
        ("/files/0/digests", json!(""), "digest"),
        ("/save_id", json!("../../x"), "save_id"),
        ("/world_size", json!(0), "world_size"),
        ("/world_size", json!(3), "per_rank"),
        ("/per_rank/policy", json!("guess"), "unknown variant"),
        ("/tensors/w/dtype", json!("F33"), "dtype"),
        ("/tensors/w/shape", json!([8, 4]), "tensor `w`"),
        ("/tensors/w/shape", json!([u64::MAX, u64::MAX]), "64-bit"),
        ("/tensors/w/shape", json!([-1, 4]), "invalid value"),
        ("/tensors/w/path", json!(["v"]), "path of `v`"),
        ("/tensors/w/chunks/start/0/1", json!(3), "overlap"),
        ("/tensors/w/chunks/start/0/1", json!(5), "outside"),
        ("/tensors/w/chunks/start/0", json!([0, 0]), "tensor `w`"),
        ("/tensors/w/chunks/size/0", json!([4, 4]), "length"),
        ("/tensors/w/chunks/file/0", json!(1), "in file 1"),
        ("/tensors/w/chunks/offset/1", json!(u64::MAX), "ends beyond"),
        ("/tensors/w/chunks/offset/1", json!(0), "same bytes"),
        ("/tensors/w/chunks/length", json!([64]), "columns"),
        ("/tensors/tied/same_as", json!("nobody"), "does not exist"),
        ("/tensors/tied/same_as", json!("tied"), "itself an alias"),
        ("/tensors/steps.0/data", json!("BwA="), "base64"),
        ("/values/lr/path", json!(["w"]), "path of `w`"),
        ("/user", json!(null), ""),
    ];
    for (pointer, value, word) in cases {
        let mut document = sample();
        *document.pointer_mut(pointer).unwrap() = value.clone();
        let outcome = hocket_ckpt::encode(document.to_string().as_bytes());
        if word.is_empty() {
            assert!(outcome.is_ok(), "{pointer} = {value}: {outcome:?}");
            continue;
        }
        let message = outcome.expect_err(pointer).to_string();
        assert!(message.contains(word), "{pointer} = {value}: {message}");
    }
    let twice = sample().to_string().replacen("\"tied\":", "\"w\":", 1);
    let message = hocket_ckpt::encode(twice.as_bytes())
        .unwrap_err()
        .to_string();
    assert!(message.contains("twice"), "{message}");
    let unknown = sample()
        .to_string()
        .replacen("\"user\":", "\"more\":1,\"user\":", 1);
    assert!(hocket_ckpt::encode(unknown.as_bytes()).is_err());
    for field in ["per_rank", "user", "values"] {
        let mut document = sample();
        document.as_object_mut().unwrap().remove(field);
        let refused = hocket_ckpt::encode(document.to_string().as_bytes()).expect_err(field);
        assert!(refused.to_string().contains("missing field"), "{refused}");
    }
}

#[test]
fn a_later_format_is_refused_with_the_version_that_reads_it() {
    let mut later = sample();
    later["format"] = json!(2);
    let refused = hocket_ckpt::encode(later.to_string().as_bytes());
    assert!(
        matches!(refused, Err(CkptError::Incompatible { .. })),
        "{refused:?}"
    );
    // The manifest of a later version: the same frames around a head with format 9.
    let head = json!({"format": 9, "version": "7.3.0", "news": true}).to_string() + "\n";
    let mut manifest = zstd::bulk::compress(head.as_bytes(), 3).unwrap();
    manifest.extend(zstd::bulk::compress(b"{}", 3).unwrap());
    let digest = hocket_ckpt::xxh3_128(&manifest);
    manifest.extend([0x50, 0x2a, 0x4d, 0x18, 16, 0, 0, 0]);
    manifest.extend(digest);
    let error = hocket_ckpt::decode(&manifest, "x").unwrap_err();
    assert!(matches!(error, CkptError::Incompatible { .. }), "{error}");
    assert!(error.to_string().contains("hocket-ckpt>=7.3.0"), "{error}");
}

#[test]
fn a_small_frame_that_claims_a_huge_document_is_refused() {
    let mut manifest = zstd::bulk::compress(b"{\"format\":1}", 3).unwrap();
    // A zstd header that states 2^62 bytes: magic, single segment with an 8-byte length, the length, an empty
    // last block.
    manifest.clear();
    manifest.extend([0x28, 0xb5, 0x2f, 0xfd, 0xe0]);
    manifest.extend((1_u64 << 62).to_le_bytes());
    manifest.extend([1, 0, 0]);
    let digest = hocket_ckpt::xxh3_128(&manifest);
    manifest.extend([0x50, 0x2a, 0x4d, 0x18, 16, 0, 0, 0]);
    manifest.extend(digest);
    let error = hocket_ckpt::decode(&manifest, "x").unwrap_err().to_string();
    assert!(error.contains("at most"), "{error}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        prop_assert!(hocket_ckpt::decode(&bytes, "x").is_err());
    }

    #[test]
    fn arbitrary_documents_never_panic(text in "[\\[\\]{}:,\"a-z0-9.]{0,200}") {
        prop_assert!(hocket_ckpt::encode(text.as_bytes()).is_err());
    }

    #[test]
    fn a_flipped_bit_or_a_cut_is_refused(position in any::<prop::sample::Index>(), bit in 0_u8..8, cut in any::<bool>()) {
        let mut manifest = encoded(&sample());
        let at = position.index(manifest.len());
        if cut { manifest.truncate(at) } else { manifest[at] ^= 1 << bit }
        let outcome = hocket_ckpt::decode(&manifest, "x");
        prop_assert!(matches!(outcome, Err(CkptError::Corrupt { .. })), "{:?}", outcome);
    }
}

proptest! {
    // Each case writes and flushes a file.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any ranges, overlapping or not, return the bytes written there, with and without verification.
    #[test]
    fn any_ranges_are_read(
        length in 1..3 * MIB,
        ranges in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
        check in any::<bool>(),
    ) {
        let bytes = noise(length, 8);
        with_places(|root| {
            let place = CheckpointPlace::open(root).unwrap();
            let written = write(&place, "data/a.safetensors", vec![entry("t", &bytes)]);
            let spans: Vec<_> = ranges
                .iter()
                .map(|(from, size)| {
                    let from = from.index(length);
                    from..from + size.index(length - from + 1)
                })
                .collect();
            let mut targets: Vec<Vec<u8>> = spans.iter().map(|span| vec![0; span.len()]).collect();
            let reads: Vec<_> = spans
                .iter()
                .zip(&mut targets)
                .map(|(span, target)| ByteRead { file: 0, offset: span.start as u64, memory: memory_mut(target) })
                .collect();
            read(&place, &written, &reads, check).unwrap();
            for (span, target) in spans.into_iter().zip(targets) {
                assert!(target == bytes[span]);
            }
        });
    }
}
