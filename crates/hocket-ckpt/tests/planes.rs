//! Tests that write, read, verify and damage files with byte planes, on a disk and in an in-memory object store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use hocket_ckpt::{
    BlockEncoding, ByteRead, CallerMemory, CheckpointPlace, CkptError, DataFiles, Dtype,
    StreamOptions, StreamWriter, TensorEntry, WriteOptions, WrittenDataFile,
};

const PLANES: BlockEncoding = BlockEncoding {
    level: 1,
    planes: true,
};

fn never() -> bool {
    false
}

/// Returns bytes of which every fourth is 63, as in weights of one sign and size.
fn weights(bytes: usize) -> Vec<u8> {
    let mut state = bytes as u64;
    let mut next = |at: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        if at % 4 == 3 { 63 } else { (state >> 56) as u8 }
    };
    (0..bytes).map(&mut next).collect()
}

/// The tensors of a file, in its order: blocks end within each, and the last block is short.
fn tensors() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    vec![
        ("a", "C64", weights(8)),
        ("b", "F64", weights((1 << 20) + 8)),
        ("c", "I64", weights(16)),
        ("d", "F32", weights(2 * (1 << 20) + 4)),
        ("e", "BF16", weights(700_002)),
        ("f", "F8_E4M3", weights(1)),
    ]
}

fn entries(tensors: &[(&'static str, &'static str, Vec<u8>)]) -> Vec<TensorEntry> {
    let entry = |(name, dtype, bytes): &(&str, &str, Vec<u8>)| {
        let dtype = Dtype::parse(dtype).unwrap();
        TensorEntry {
            name: (*name).to_owned(),
            dtype,
            shape: vec![bytes.len() as u64 / dtype.item_bytes()],
            // SAFETY: every test keeps the bytes until its operation has returned.
            memory: unsafe { CallerMemory::new(bytes.as_ptr() as usize, bytes.len()) },
        }
    };
    tensors.iter().map(entry).collect()
}

fn write(
    place: &CheckpointPlace,
    tensors: &[(&'static str, &'static str, Vec<u8>)],
    encoding: Option<BlockEncoding>,
) -> WrittenDataFile {
    let options = WriteOptions {
        sync: false,
        encoding,
        background: false,
    };
    let suffix = if encoding.is_some() {
        "blocks"
    } else {
        "safetensors"
    };
    let path = format!("data/00000000-r00000-000.{suffix}");
    let metadata = BTreeMap::new();
    hocket_ckpt::write_file(place, &path, entries(tensors), &metadata, options, &never).unwrap()
}

fn read(
    place: &CheckpointPlace,
    written: &WrittenDataFile,
    offset: u64,
    length: usize,
    check: bool,
) -> hocket_ckpt::Result<Vec<u8>> {
    let mut bytes = vec![0_u8; length];
    let read = ByteRead {
        file: 0,
        offset,
        // SAFETY: the bytes stay until the read has returned.
        memory: unsafe { CallerMemory::new(bytes.as_mut_ptr() as usize, length) },
    };
    DataFiles::new(place.clone(), vec![written.file.clone()])?.read(&[read], check, &never)?;
    Ok(bytes)
}

#[test]
fn every_range_of_a_file_with_planes_is_read_as_that_of_a_plain_one() {
    let tensors = tensors();
    let data: Vec<u8> = tensors
        .iter()
        .flat_map(|(_, _, bytes)| bytes.clone())
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let memory = format!("memory://planes-{}", std::process::id());
    for root in [folder.path().to_str().unwrap(), &memory] {
        let place = CheckpointPlace::open(&format!("{root}/one")).unwrap();
        let plain = write(&place, &tensors, None);
        let written = write(&place, &tensors, Some(PLANES));
        let expected = vec![
            (4, 8),
            (8, (1 << 20) + 8),
            (1, 16),
            (4, 2 * (1 << 20) + 4),
            (2, 700_002),
            (1, 1),
        ];
        assert_eq!(written.file.planes, Some(expected));
        assert_eq!(
            (&written.file.digests, &written.entries),
            (&plain.file.digests, &plain.entries)
        );
        for (offset, length) in [
            (0, data.len()),
            (3, 1 << 20),
            ((1 << 20) + 5, 30),
            (data.len() - 1, 1),
            (17, 0),
        ] {
            for check in [true, false] {
                let bytes = read(&place, &written, offset as u64, length, check).unwrap();
                assert!(
                    bytes == data[offset..offset + length],
                    "{length} at {offset}"
                );
            }
        }
        let bad = hocket_ckpt::verify_file(&place, &written.file, &never).unwrap();
        assert!(bad.is_empty());
    }
}

#[test]
fn a_file_written_in_pieces_is_the_same_file() {
    let tensors = tensors();
    let folder = tempfile::tempdir().unwrap();
    let at =
        |name: &str| CheckpointPlace::open(folder.path().join(name).to_str().unwrap()).unwrap();
    let plain = write(&at("plain"), &tensors, None);
    let once = write(&at("once"), &tensors, Some(PLANES));
    let bytes = std::fs::read(folder.path().join("plain").join(&plain.file.path)).unwrap();
    let options = StreamOptions {
        data_start: Some(plain.file.data_start),
        encoding: Some(PLANES),
        replaces: false,
    };
    let size = bytes.len() as u64;
    let place = at("pieces");
    let mut writer = StreamWriter::create(&place, &once.file.path, size, options, &never).unwrap();
    for piece in bytes.chunks(70_001) {
        writer.write(piece, &never).unwrap();
    }
    assert_eq!(writer.finish(&never).unwrap().file, Some(once.file.clone()));
    let stored =
        |name: &str| std::fs::read(folder.path().join(name).join(&once.file.path)).unwrap();
    assert!(stored("once") == stored("pieces"));
}

#[test]
fn planes_are_smaller_and_damage_is_reported_at_its_block() {
    let tensors = tensors();
    let folder = tempfile::tempdir().unwrap();
    let at =
        |name: &str| CheckpointPlace::open(folder.path().join(name).to_str().unwrap()).unwrap();
    let zstd = BlockEncoding {
        planes: false,
        ..PLANES
    };
    let stored = |name: &str, written: &WrittenDataFile| {
        std::fs::metadata(folder.path().join(name).join(&written.file.path))
            .unwrap()
            .len()
    };
    let (without, place) = (write(&at("zstd"), &tensors, Some(zstd)), at("planes"));
    let written = write(&place, &tensors, Some(PLANES));
    assert_eq!(without.file.planes, None);
    assert!(stored("planes", &written) < stored("zstd", &without));

    let path = folder.path().join("planes").join(&written.file.path);
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let bad = hocket_ckpt::verify_file(&place, &written.file, &never).unwrap();
    assert_eq!(bad, [(3, 3 << 20)]);
    let failed = read(&place, &written, 3 << 20, 10, true).unwrap_err();
    assert!(
        matches!(failed, CkptError::Corrupt { offset: Some(at), .. } if at == 3 << 20),
        "{failed}"
    );
    assert!(read(&place, &written, 0, 3 << 20, true).is_ok());
}

#[test]
fn a_file_without_a_wide_floating_dtype_has_no_planes() {
    let tensors = vec![("a", "I64", weights(64)), ("b", "F8_E5M2", weights(8))];
    let folder = tempfile::tempdir().unwrap();
    let place = CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(write(&place, &tensors, Some(PLANES)).file.planes, None);
}
