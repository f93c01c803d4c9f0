//! Property tests of invalid files. For any bytes of an index, a shard or a compressed file, no reader panics,
//! and memory depends on the size of the file and not on the lengths that it states.
//!
//! `HOCKET_FUZZ_CASES` sets the number of cases of each property.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use hocket_stream::index::Index;
use hocket_stream::shard::Shard;
use hocket_stream::shard::codec::Compression;
use proptest::prelude::*;
use proptest::sample::Index as Pick;
use proptest::test_runner::{Config, TestRunner};

/// The largest single allocation since it was last set to zero.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watching;

// SAFETY: every call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantee is forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantee is forwarded.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller's guarantee is forwarded.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Limit of a single allocation: more than any decoder's own tables, less than an invalid length would
/// allocate.
const MOST_BYTES: usize = 16 << 20;

/// Changes to bytes: for each one the position, four new bytes, and the number of them that are used.
type Changes = Vec<(Pick, [u8; 4], usize)>;

fn changes() -> impl Strategy<Value = Changes> {
    let word = prop_oneof![
        any::<[u8; 4]>(),
        any::<u8>().prop_map(|byte| [byte, 0, 0, 0]),
        Just([0xff; 4]),
        Just([0, 0, 0, 0x80]),
    ];
    prop::collection::vec((any::<Pick>(), word, 1..5usize), 0..4)
}

fn apply(mut bytes: Vec<u8>, changes: &Changes, cut: Option<Pick>) -> Vec<u8> {
    for (place, word, len) in changes {
        let at = place.index(bytes.len().max(1));
        let end = bytes.len().min(at + len);
        if let Some(part) = bytes.get_mut(at..end) {
            part.copy_from_slice(&word[..end - at]);
        }
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len() + 1));
    }
    bytes
}

fn shard() -> Vec<u8> {
    let samples = (0..5u8)
        .map(|n| [&[n, 0, 0, 0][..], &[7; 8], &vec![b'x'; n.into()]].concat())
        .collect();
    let file = hocket_stream::shard::raw_file::assemble(String::new(), b"{}", samples).unwrap();
    file.into_contents().to_vec()
}

fn index(kind: &str, samples: u64, bytes: usize) -> String {
    let file = |name: &str, bytes: usize| serde_json::json!({"basename": name, "bytes": bytes, "hashes": {}});
    let mut shard = serde_json::json!({
        "compression": null, "format": kind, "hashes": [], "samples": samples, "size_limit": 9, "version": 2,
        "raw_data": file("a", bytes), "zip_data": null,
    });
    if kind == "mds" {
        shard["column_names"] = serde_json::json!(["a", "b"]);
        shard["column_encodings"] = serde_json::json!(["int", "str"]);
        shard["column_sizes"] = serde_json::json!([8, null]);
    } else {
        shard["columns"] = serde_json::json!({"a": "int", "b": "str"});
        shard["column_names"] = serde_json::json!(["a", "b"]);
        shard["column_encodings"] = serde_json::json!(["int", "str"]);
        shard["raw_meta"] = file("a.meta", 100);
    }
    serde_json::json!({"version": 2, "shards": [shard.clone(), shard]}).to_string()
}

/// Reads all samples and returns the number of their bytes.
fn read(index: &Index, data: Vec<u8>, meta: Option<Vec<u8>>) -> usize {
    let Some(info) = index.shard(0) else {
        return 0;
    };
    let (len, meta) = (data.len(), meta.map(|meta| Box::new(meta) as _));
    let Ok(shard) = Shard::open(&info, "there", Box::new(data), meta) else {
        return 0;
    };
    let mut total = 0;
    for number in 0..shard.samples() {
        let _ = shard.sample(number, |_, value| total += value.len());
    }
    assert!(shard.samples() as usize <= len.max(16));
    total
}

fn watch<T>(act: impl FnOnce() -> T) -> T {
    LARGEST.store(0, Ordering::Relaxed);
    let value = act();
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= MOST_BYTES, "{largest} bytes at once");
    value
}

/// All properties in one test, because other tests' allocations would be counted, too.
#[test]
fn any_file_is_read_or_is_a_typed_error() {
    let cases = std::env::var("HOCKET_FUZZ_CASES").map_or(3000, |text| text.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    });
    let kinds = prop::sample::select(vec!["mds", "json", "csv"]);
    let hostile_index = (kinds, changes(), any::<Option<Pick>>());
    runner
        .run(&hostile_index, |(kind, changes, cut)| {
            let bytes = apply(index(kind, 5, 100).into_bytes(), &changes, cut);
            watch(|| Index::parse(&bytes, "there").is_ok());
            Ok(())
        })
        .unwrap();
    let hostile_shard = (0..8u64, changes(), any::<Option<Pick>>());
    runner
        .run(&hostile_shard, |(samples, changes, cut)| {
            let bytes = apply(shard(), &changes, cut);
            let index =
                Index::parse(index("mds", samples, bytes.len()).as_bytes(), "there").unwrap();
            let len = bytes.len();
            assert!(watch(|| read(&index, bytes, None)) <= len);
            Ok(())
        })
        .unwrap();
    let lines = prop::collection::vec(
        "(\\{\"a\": -?[0-9]{1,20}, \"b\": \"[a-z\\\\]{0,4}\"\\}|[0-9]{0,3},\\PC{0,4}|\\PC{0,9})\n",
        0..5,
    );
    let hostile_text = (
        prop::sample::select(vec!["json", "csv"]),
        lines,
        changes(),
        any::<Option<Pick>>(),
    );
    runner
        .run(&hostile_text, |(kind, lines, changes, cut)| {
            let samples = lines.iter().collect();
            let (data, meta) =
                hocket_stream::shard::raw_file::assemble_text(String::new(), b"{}", b"", samples)
                    .unwrap();
            let (data, meta) = (data.into_contents().to_vec(), meta.into_contents().to_vec());
            let meta = apply(meta, &changes, cut);
            let index = index(kind, lines.len() as u64, data.len());
            let index = Index::parse(index.as_bytes(), "there").unwrap();
            watch(|| read(&index, data, Some(meta)));
            Ok(())
        })
        .unwrap();
    let codecs =
        ["br:5", "bz2:1", "gz:1", "snappy", "zstd:1"].map(|text| Compression::parse(text).unwrap());
    let packed = codecs.map(|codec| codec.pack(&[7; 3000], &|| false).unwrap());
    let hostile_packed = (
        0..codecs.len(),
        changes(),
        any::<Option<Pick>>(),
        any::<u32>(),
    );
    runner
        .run(&hostile_packed, |(which, changes, cut, said)| {
            let bytes = apply(packed[which].clone(), &changes, cut);
            if let Ok(raw) = watch(|| codecs[which].unpack(&bytes, u64::from(said))) {
                assert_eq!(raw.len(), said as usize);
            }
            let _ = watch(|| codecs[which].unpack(&bytes, 3000));
            Ok(())
        })
        .unwrap();
}
