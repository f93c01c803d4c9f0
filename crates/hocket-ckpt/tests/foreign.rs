//! Tests of corrupt foreign files: any content is either listed or rejected.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Write;
use std::path::Path;

use hocket_ckpt::foreign::{contents, verify_zips};
use hocket_ckpt::{Checkpoint, CkptError};
use proptest::prelude::*;

fn never() -> bool {
    false
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::File::create(&path)
        .unwrap()
        .write_all(bytes)
        .unwrap();
    path.to_str().unwrap().to_owned()
}

fn crc(bytes: &[u8]) -> [u8; 4] {
    hocket_ckpt::foreign::crc32(bytes, 0).to_le_bytes()
}

/// Builds a zip of stored members.
fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in members {
        let start = (file.len() as u32).to_le_bytes();
        let (size, name_bytes) = (
            (content.len() as u32).to_le_bytes(),
            (name.len() as u16).to_le_bytes(),
        );
        let shared = [
            [0; 8].as_slice(),
            &crc(content),
            &size,
            &size,
            &name_bytes,
            &[0, 0],
        ]
        .concat();
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
    let count = (members.len() as u16).to_le_bytes();
    let (bytes, offset) = (
        (directory.len() as u32).to_le_bytes(),
        (file.len() as u32).to_le_bytes(),
    );
    let end = [
        b"PK\x05\x06\0\0\0\0".as_slice(),
        &count,
        &count,
        &bytes,
        &offset,
        &[0, 0],
    ]
    .concat();
    [file, directory, end].concat()
}

/// `{'w': tensor of four bytes}`, as torch.save pickles it.
const PICKLE: &[u8] = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage\
ctorch\nByteStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs.";

fn torch_file() -> Vec<u8> {
    zip(&[
        ("a/data.pkl", PICKLE),
        ("a/byteorder", b"little"),
        ("a/data/0", b"abcd"),
        ("a/version", b"3\n"),
    ])
}

#[test]
fn a_file_of_torch_save_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let uri = put(folder.path(), "x.pt", &torch_file());
    let checkpoint = Checkpoint::open_foreign(&uri, &never).unwrap();
    let tensor = checkpoint.tensors().iter().next().unwrap();
    let offset = tensor.columns().unwrap().offset.at(0) as usize;
    assert_eq!(&torch_file()[offset..offset + 4], b"abcd");
    assert_eq!((tensor.name(), tensor.dtype()), ("w", "U8"));
}

#[test]
fn a_corrupt_member_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = torch_file();
    let at = bytes.windows(4).position(|four| four == b"abcd").unwrap();
    bytes[at] ^= 1;
    put(folder.path(), "x.pt", &bytes);
    let place = hocket_ckpt::CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
    let bad = verify_zips(&place, "x.pt", &[(0, bytes.len() as u64, false)], &never).unwrap();
    assert_eq!(
        (bad.len(), bad[0].member.as_str(), bad[0].offset),
        (1, "a/data/0", at as u64)
    );
}

fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [
        (header.len() as u64).to_le_bytes().as_slice(),
        header.as_bytes(),
        data,
    ]
    .concat()
}

/// Returns the files that the contents of a folder list, or the error.
fn listed(files: &[&str]) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let header =
        |name: &str| format!(r#"{{"{name}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#);
    for name in files {
        let bytes = match name.rsplit_once('.').unwrap() {
            ("model.safetensors.index", _) => {
                br#"{"weight_map":{"b.safetensors":"b.safetensors"}}"#.to_vec()
            }
            ("pytorch_model.bin.index", _) => br#"{"weight_map":{"w":"part.bin"}}"#.to_vec(),
            (_, "safetensors") => safetensors(&header(name), b"abcd"),
            (_, "pt" | "pt2" | "bin") => torch_file(),
            _ => b"text".to_vec(),
        };
        put(folder.path(), name, &bytes);
    }
    let found =
        contents(folder.path().to_str().unwrap(), &never).map_err(|error| error.to_string())?;
    Ok(found.files().map(|(path, _)| path.to_owned()).collect())
}

#[test]
fn a_folder_is_searched_for_formats_in_order() {
    let index = "model.safetensors.index.json";
    for (files, expected) in [
        (
            &["model.safetensors", index, "b.safetensors"][..],
            "model.safetensors",
        ),
        (
            &[index, "b.safetensors", "pytorch_model.bin"],
            "b.safetensors",
        ),
        (
            &["a.safetensors", "x.pt", "pytorch_model.bin.index.json"],
            "a.safetensors",
        ),
        (
            &["pytorch_model.bin.index.json", "part.bin", "x.pt"],
            "part.bin",
        ),
        (
            &[
                "pytorch_model.bin",
                "pytorch_model.bin.index.json",
                "part.bin",
            ],
            "pytorch_model.bin",
        ),
        (&["a.pt2", "x.pt"], "x.pt"),
        (&["a.pt2"], "a.pt2"),
    ] {
        assert_eq!(listed(files).unwrap(), [expected], "{files:?}");
    }
    for (files, expected) in [
        (&["model.safetensors", ".metadata"][..], "`.metadata`"),
        (
            &["x.pt", "a.bin"],
            "2 files could be meant, without an index that says how they belong together; name one, such as `x.pt`",
        ),
        (
            &["b.safetensors", "a.safetensors"],
            "name one, such as `a.safetensors`",
        ),
        (&["a.distcp"], "without its `.metadata`"),
        (&["zero_to_fp32.py"], "a checkpoint of DeepSpeed"),
        (&["readme.md"], "this is not a checkpoint"),
        (&[], "this folder is empty"),
    ] {
        let refused = listed(files).unwrap_err();
        assert!(refused.contains(expected), "{files:?}: {refused}");
    }
}

#[test]
fn hostile_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |bytes: &[u8]| {
        let uri = put(folder.path(), "x.safetensors", bytes);
        assert!(
            matches!(contents(&uri, &never), Err(CkptError::Corrupt { .. })),
            "{bytes:?}"
        );
    };
    refused(b"1234567");
    refused(&[(1_u64 << 63).to_le_bytes().as_slice(), b"{}"].concat());
    for header in [
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}"#,
        r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#,
        r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#,
        r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"X8","shape":[4],"data_offsets":[0,4]}}"#,
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#,
        r#"{"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
        r#"[1]"#,
    ] {
        refused(&safetensors(header, b"abcd"));
    }
    let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let uri = put(folder.path(), "x.safetensors", &safetensors(twice, b"abcd"));
    contents(&uri, &never).unwrap();
}

#[test]
fn an_index_cannot_name_files_outside_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let index = r#"{"weight_map":{"a":"../secret.safetensors"}}"#;
    put(
        folder.path(),
        "model.safetensors.index.json",
        index.as_bytes(),
    );
    let error = contents(folder.path().to_str().unwrap(), &never).unwrap_err();
    assert!(error.to_string().contains("no plain name"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_spoiled_zip_is_listed_or_refused(spoils in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<prop::sample::Index>(), is_cut in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = torch_file();
        for (at, byte) in spoils {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let uri = put(folder.path(), "x.pt", &bytes);
        let _ = contents(&uri, &never);
        let place = hocket_ckpt::CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
        let _ = verify_zips(&place, "x.pt", &[(0, bytes.len() as u64, false)], &never);
    }

    #[test]
    fn a_spoiled_header_is_listed_or_refused(spoils in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let folder = tempfile::tempdir().unwrap();
        let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{"format":"pt"}}"#;
        let mut bytes = safetensors(header, b"abcd");
        for (at, byte) in spoils {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let uri = put(folder.path(), "x.safetensors", &bytes);
        let _ = contents(&uri, &never);
    }
}
