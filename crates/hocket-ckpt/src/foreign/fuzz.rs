//! Fuzz tests of the readers of foreign files. Every input is read or rejected, without a panic and within the
//! memory that a file of its size may require.
//!
//! `HOCKET_FUZZ_CASES` sets the number of cases (a sample by default), `HOCKET_FUZZ_SEED` the seed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::pickle::{AllowedGlobals, decode, to_json, view};
use super::zip::ZipFile;
use super::{safetensors_header, torch_file};
use crate::place::blob::Blob;

/// Limit of the memory that a case may hold at once, in addition to its input.
const HELD_BYTES: usize = 100 << 20;

/// An allocator that counts the bytes held per thread.
struct CountingAllocator;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = HELD.try_with(|held| {
            held.set(held.get().wrapping_add(layout.size()));
            let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
        });
        // SAFETY: the caller's guarantee is forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _ = HELD.try_with(|held| held.set(held.get().wrapping_sub(layout.size())));
        // SAFETY: the caller's guarantee is forwarded.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A xorshift generator: fast, and the same on every platform.
struct SeededDice(u64);

impl SeededDice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Boundary values that often break readers.
const EDGES: [u64; 9] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];

/// Mutates a seed in a few places: flips bytes, inserts numbers, and removes, duplicates or moves pieces.
fn spoil(seed: &[u8], words: &[&[u8]], dice: &mut SeededDice) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=dice.below(6) {
        let at = dice.below(bytes.len());
        let end = at + dice.below((bytes.len() - at).min(16) + 1);
        match dice.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            1 if at < bytes.len() => bytes[at] = dice.next() as u8,
            2 => {
                let edge = EDGES[dice.below(EDGES.len())].to_le_bytes();
                let width = [1, 2, 4, 8][dice.below(4)];
                let end = bytes.len().min(at + width);
                bytes.splice(at..end, edge[..width].iter().copied());
            }
            3 => drop(bytes.drain(at..end)),
            4 => {
                let piece = bytes[at..end].to_vec();
                let to = dice.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            5 => {
                let word = words[dice.below(words.len())];
                bytes.splice(at..end, word.iter().copied());
            }
            _ if dice.below(8) == 0 => bytes.truncate(at),
            _ => {}
        }
    }
    bytes
}

/// Passes mutated seeds to `read`, which returns whether it accepted the input.
fn fuzz(name: &str, share: u64, seeds: &[Vec<u8>], words: &[&[u8]], read: impl Fn(&[u8]) -> bool) {
    let number = |variable: &str| std::env::var(variable).ok()?.parse::<u64>().ok();
    let cases = number("HOCKET_FUZZ_CASES").unwrap_or(40_000) / share;
    let seed = number("HOCKET_FUZZ_SEED").unwrap_or(1);
    let mut dice = SeededDice(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut taken = 0_u64;
    for case in 0..cases {
        let input = spoil(&seeds[dice.below(seeds.len())], words, &mut dice);
        MOST.with(|most| most.set(HELD.with(Cell::get)));
        let before = HELD.with(Cell::get);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&input)));
        let held = MOST.with(Cell::get).saturating_sub(before);
        match outcome {
            Ok(is_taken) => taken += u64::from(is_taken),
            Err(_) => panic!("{name}, case {case} of seed {seed} panics: {input:02x?}"),
        }
        assert!(
            held <= HELD_BYTES,
            "{name}, case {case} of seed {seed} takes {held} bytes: {input:02x?}"
        );
    }
    // If every case is rejected, no input gets past the first check.
    assert!(taken > 0, "{name}: none of {cases} was taken");
    println!("{name}: {cases} cases, {taken} taken");
}

fn never() -> bool {
    false
}

/// `{'w': tensor of four bytes, 'n': [1, 2.5, None, True, -3]}` in protocol 2.
const PICKLE: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00\
storageq\x03ctorch\nByteStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x04tQK\x00K\x04\x85K\x01\x85\x89\
ccollections\nOrderedDict\n)RtRX\x01\x00\x00\x00n](K\x01G@\x04\x00\x00\x00\x00\x00\x00N\x88J\xfd\xff\xff\xffeu.";

/// A small `.metadata` in protocol 4, hand-made in torch's form: one tensor of two items in one chunk.
const METADATA: &[u8] = b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93\x94)\x81\x94}\x94\
(\x8c\x13state_dict_metadata\x94}\x94\x8c\x01w\x94h\x00\x8c\x15TensorStorageMetadata\x94\x93\x94)\x81\x94}\x94(\x8c\x04size\
\x94\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94K\x02\x85\x94\x85\x94R\x94\x8c\x06chunks\x94]\x94ubs\x8c\x0cplanner_data\x94}\
\x94\x8c\x0cstorage_data\x94}\x94ub.";

const OPCODES: [&[u8]; 28] = [
    b"(",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"}",
    b"]",
    b")",
    b"u",
    b"s",
    b"a",
    b"e",
    b"q\x00",
    b"h\x00",
    b"j\x00\x00\x00\x00",
    b"\x94",
    b"R",
    b"\x81",
    b"b",
    b"Q",
    b"N",
    b"\x8a\x09",
    b"X\xff\xff\xff\xff",
    b"\x8c\x02ab",
    b"ctorch\nSize\n",
    b"cos\nsystem\n",
    b"\x93",
    b".",
];

#[test]
fn pickles() {
    let read = |input: &[u8]| {
        let mut taken = false;
        for allowed in [AllowedGlobals::TorchSave, AllowedGlobals::Metadata] {
            if let Ok(pickle) = decode(input, allowed) {
                taken = true;
                let _ = to_json(&pickle, pickle.root, &mut 10_000);
                let _ = view(&pickle, pickle.root).map(|view| view.map(|it| it.span()));
            }
        }
        taken
    };
    let seeds = [PICKLE.to_vec(), METADATA.to_vec()];
    fuzz("pickles", 4, &seeds, &OPCODES, read);
}

#[test]
fn safetensors_headers() {
    let headers = [
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]}}"#,
        r#"{"__metadata__":{"DCP_SHARDING_INFO":"{\"a\":{\"saved_offsets\":[4]}}"},"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#,
    ];
    let words: [&[u8]; 12] = [
        b"18446744073709551615",
        b"-1",
        b"1e309",
        b"[[[[",
        b"\"a\"",
        b"}",
        b"{",
        b",",
        b"\\u0000",
        b"\"dtype\":\"F4\"",
        b"9223372036854775808",
        b"\"__metadata__\":{}",
    ];
    let read = |input: &[u8]| {
        let data_bytes = 25 - 17 * u64::from(input.len().is_multiple_of(2));
        safetensors_header::parse(input, data_bytes).is_ok()
    };
    let seeds = headers.map(|header| header.as_bytes().to_vec());
    fuzz("safetensors headers", 4, &seeds, &words, read);
}

/// Builds a zip with two stored members.
fn small_zip() -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in [("a/data.pkl", PICKLE), ("a/data/0", b"abcd".as_slice())] {
        let start = (file.len() as u32).to_le_bytes();
        let size = (content.len() as u32).to_le_bytes();
        let crc = crc32fast::hash(content).to_le_bytes();
        let length = (name.len() as u16).to_le_bytes();
        let shared = [[0; 8].as_slice(), &crc, &size, &size, &length, &[0, 0]].concat();
        file.extend(
            [
                b"PK\x03\x04\x14\0".as_slice(),
                &shared,
                name.as_bytes(),
                content,
            ]
            .concat(),
        );
        let tail = [[0; 10].as_slice(), &start, name.as_bytes()].concat();
        directory.extend([b"PK\x01\x02\x14\0\x14\0".as_slice(), &shared, &tail].concat());
    }
    let (bytes, offset) = (
        (directory.len() as u32).to_le_bytes(),
        (file.len() as u32).to_le_bytes(),
    );
    let end = [
        b"PK\x05\x06\0\0\0\0\x02\0\x02\0".as_slice(),
        &bytes,
        &offset,
        &[0, 0],
    ]
    .concat();
    [file, directory, end].concat()
}

#[test]
fn zip_directories() {
    let words: [&[u8]; 8] = [
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"\x01\x00\x10\x00\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"/data.pkl",
    ];
    let nowhere = Blob::nowhere();
    let read = |input: &[u8]| {
        let blob = nowhere.unpacked(input.to_vec());
        let Ok(zip) = ZipFile::open(&blob, 0..blob.size(), &never) else {
            return false;
        };
        let members: Vec<_> = zip.members.iter().collect();
        let is_located = zip.locate(&blob, &members, &never).is_ok();
        let _ = torch_file::contents("", &blob, &never);
        is_located
    };
    fuzz("zip directories", 4, &[small_zip()], &words, read);
}

#[test]
fn manifests() {
    let document = serde_json::json!({
        "format": 1, "version": "0.1.0", "save_id": "0123456789abcdef0123456789abcdef", "step": 3,
        "created": "2026-01-01T00:00:00.000000Z", "writer": "fuzz", "world_size": 2, "mesh": {"shard": 2},
        "files": [{"path": "data/01234567-r00000-000.safetensors", "size": 4096 + 24, "data_start": 4096,
                   "header": "AAAAAAAAAAAAAAAAAAAAAA==", "digests": "AAAAAAAAAAAAAAAAAAAAAA=="}],
        "tensors": {"w": {"dtype": "F32", "shape": [2, 3], "path": ["w"],
            "chunks": {"file": [0, 0], "offset": [0, 12], "length": [12, 12], "start": [[0, 1], [0, 0]], "size": [[1, 1], [3, 3]]}},
            "tied": {"dtype": "F32", "shape": [2, 3], "path": ["tied"], "same_as": "w"}},
        "values": {"lr": {"path": ["lr"], "value": {"$float": "inf"}}},
        "per_rank": null, "user": {"loss": 0.5}
    });
    let document = serde_json::to_vec(&document).unwrap();
    let sound = crate::manifest::encode(&document).unwrap();
    let words: [&[u8]; 10] = [
        b"18446744073709551615",
        b"-1",
        b"4294967296",
        b"null",
        b"[]",
        b"\"w\"",
        b"data/../x",
        b"{",
        b"]",
        b"9223372036854775807",
    ];
    // A modified document that violates no rule is encoded and must read back equal; modified compressed bytes
    // must be rejected by their digests.
    let read = |input: &[u8]| match input.first() {
        Some(b'{') => crate::manifest::encode(input)
            .is_ok_and(|manifest| crate::manifest::decode(&manifest, "").is_ok()),
        _ => crate::manifest::decode(input, "").is_ok(),
    };
    fuzz("manifests", 4, &[document, sound], &words, read);
}
