//! A property test of garbage collection. After any sequence of begun, committed, replaced, removed and interrupted
//! saves, a collection removes all of Hocket's old files that no checkpoint needs, and never a committed byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hocket_ckpt::{
    BlockEncoding, CallerMemory, CheckpointPlace, CommitOptions, DataFile, Dtype, TensorEntry,
    WriteOptions,
};
use proptest::prelude::*;
use serde_json::json;

const DAY: Duration = Duration::from_secs(86_400);

const NAMES: [&str; 3] = ["a", "b", "c"];

fn never() -> bool {
    false
}

#[derive(Debug, Clone)]
enum Step {
    /// A save writes its files, with the age of each in hours.
    Write(usize, Vec<u8>),
    /// The last written save is committed; it replaces the committed one if there is one.
    Commit(usize),
    /// The files of all saves that are not committed, including replaced ones, are removed, as after a commit.
    Clean(usize),
    /// An interrupted commit leaves a temporary manifest, with its age in hours.
    Temporary(usize, u8),
    /// A killed conversion to another format leaves a hidden file, with its age in hours.
    Hidden(usize, u8),
    /// The checkpoint is removed; without a manifest, the files of all its saves.
    Remove(usize),
    Gc,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let name = 0..NAMES.len();
    let hours = prop::sample::select(vec![0_u8, 23, 25, 200]);
    let step = prop_oneof![
        4 => (name.clone(), prop::collection::vec(hours.clone(), 1..4)).prop_map(|(name, ages)| Step::Write(name, ages)),
        3 => name.clone().prop_map(Step::Commit),
        1 => name.clone().prop_map(Step::Clean),
        1 => (name.clone(), hours.clone()).prop_map(|(name, age)| Step::Temporary(name, age)),
        1 => (name.clone(), hours).prop_map(|(name, age)| Step::Hidden(name, age)),
        1 => name.prop_map(Step::Remove),
        2 => Just(Step::Gc),
    ];
    prop::collection::vec(step, 1..14)
}

/// The test's record of a save.
#[derive(Debug, Clone)]
struct Save {
    id: String,
    files: Vec<DataFile>,
    hours: Vec<u8>,
    documents: serde_json::Value,
}

#[derive(Default)]
struct Model {
    written: Vec<Save>,
    committed: Option<Save>,
    temporaries: Vec<(PathBuf, u8)>,
}

fn age(path: &Path, hours: u8) {
    let then = SystemTime::now() - Duration::from_secs(3600 * u64::from(hours));
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(then)
        .unwrap();
}

fn write(place: &CheckpointPlace, root: &Path, number: usize, hours: &[u8]) -> Save {
    let id = format!("{number:08x}").repeat(4);
    let mut files = Vec::new();
    let mut tensors = serde_json::Map::new();
    for (rank, &hours) in hours.iter().enumerate() {
        let bytes = vec![number as u8; 100 + rank];
        // SAFETY: the bytes outlive the call.
        let memory = unsafe { CallerMemory::new(bytes.as_ptr() as usize, bytes.len()) };
        let name = format!("t{rank}");
        let shape = vec![bytes.len() as u64];
        let entry = TensorEntry {
            name: name.clone(),
            dtype: Dtype::parse("U8").unwrap(),
            shape: shape.clone(),
            memory,
        };
        let level = number.is_multiple_of(2).then_some(1);
        let suffix = if level.is_some() {
            "blocks"
        } else {
            "safetensors"
        };
        let path = format!("data/{}-r{rank:05}-000.{suffix}", &id[..8]);
        let options = WriteOptions {
            sync: false,
            encoding: level.map(|level| BlockEncoding {
                level,
                planes: false,
            }),
            background: false,
        };
        let written =
            hocket_ckpt::write_file(place, &path, vec![entry], &BTreeMap::new(), options, &never)
                .unwrap();
        let chunks = json!({"file": [rank], "offset": [0], "length": shape, "start": [[0]], "size": [shape]});
        tensors.insert(
            name.clone(),
            json!({"dtype": "U8", "shape": shape, "path": [name], "chunks": chunks}),
        );
        files.push(written.file);
        age(&root.join(&path), hours);
    }
    let documents = json!({
        "format": 1, "version": "0.1.0", "save_id": id, "step": number, "created": "2026-01-01T00:00:00.000000Z",
        "writer": "test", "world_size": 1, "mesh": null, "files": files, "tensors": tensors, "values": {},
        "per_rank": null, "user": null,
    });
    Save {
        id,
        files,
        hours: hours.to_vec(),
        documents,
    }
}

fn commit(place: &CheckpointPlace, save: &Save, replaces: Option<&Save>) {
    let manifest = hocket_ckpt::encode(save.documents.to_string().as_bytes()).unwrap();
    let options = CommitOptions {
        unfenced: false,
        replaces: replaces.map(|old| old.id.clone()),
        ..CommitOptions::default()
    };
    hocket_ckpt::commit(place, manifest, &save.id, &options, &never).unwrap();
}

/// Returns all files below a folder except locks.
fn files_below(root: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    let mut pending = vec![root.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in folder.read_dir().into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path);
            } else if !path.to_string_lossy().ends_with(".lock") {
                files.insert(path);
            }
        }
    }
    files
}

impl Model {
    /// Returns the files that a collection must keep if they exist.
    fn survivors(&self, root: &Path) -> BTreeSet<PathBuf> {
        let mut kept = BTreeSet::new();
        if let Some(committed) = &self.committed {
            kept.insert(root.join("checkpoint.json.zst"));
            kept.extend(committed.files.iter().map(|file| root.join(&file.path)));
        }
        for save in self
            .written
            .iter()
            .filter(|save| save.hours.iter().any(|&hours| hours < 24))
        {
            kept.extend(save.files.iter().map(|file| root.join(&file.path)));
        }
        kept.extend(
            self.temporaries
                .iter()
                .filter(|(_, hours)| *hours < 24)
                .map(|(path, _)| path.clone()),
        );
        kept
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn gc_removes_old_unreferenced_files_and_nothing_else(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = CheckpointPlace::open(folder.path().to_str().unwrap()).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "not ours").unwrap();
        let mut models: Vec<Model> = NAMES.iter().map(|_| Model::default()).collect();
        for (number, step) in steps.iter().chain([&Step::Gc]).enumerate() {
            let at = |name: usize| {
                let root = folder.path().join(NAMES[name]);
                (CheckpointPlace::open(root.to_str().unwrap()).unwrap(), root)
            };
            match step {
                Step::Write(name, hours) => {
                    let (place, root) = at(*name);
                    models[*name].written.push(write(&place, &root, number + 1, hours));
                }
                Step::Commit(name) => {
                    if let Some(save) = models[*name].written.pop() {
                        commit(&at(*name).0, &save, models[*name].committed.as_ref());
                        let old = models[*name].committed.replace(save);
                        models[*name].written.extend(old);
                    }
                }
                Step::Clean(name) => {
                    let paths: Vec<String> = models[*name].written.drain(..).flat_map(|save| save.files).map(|file| file.path).collect();
                    hocket_ckpt::delete_files(&at(*name).0, &paths, &never).unwrap();
                }
                Step::Temporary(name, hours) => {
                    let (_, root) = at(*name);
                    if root.is_dir() {
                        let path = root.join(format!(".checkpoint.json.zst.{}.77", format!("f{number:07x}").repeat(4)));
                        std::fs::write(&path, "cut short").unwrap();
                        age(&path, *hours);
                        models[*name].temporaries.push((path, *hours));
                    }
                }
                Step::Hidden(name, hours) => {
                    let (_, root) = at(*name);
                    std::fs::create_dir_all(&root).unwrap();
                    let path = root.join(format!(".model.pt.{number}.hocket-unfinished"));
                    std::fs::write(&path, "cut short").unwrap();
                    age(&path, *hours);
                    models[*name].temporaries.push((path, *hours));
                }
                Step::Remove(name) => {
                    let model = &mut models[*name];
                    let (is_committed, is_there) = (model.committed.is_some(), !model.written.is_empty());
                    let removed = hocket_ckpt::delete(&prefix, NAMES[*name], None, false, &never);
                    prop_assert_eq!(removed.is_ok(), is_committed || is_there, "{:?}", removed);
                    if model.committed.take().is_none() && is_there {
                        model.written.clear();
                        model.temporaries.retain(|(path, _)| path.to_string_lossy().ends_with("-unfinished"));
                    }
                    let before = files_below(folder.path());
                    prop_assert!(model.survivors(&at(*name).1).is_subset(&before));
                }
                Step::Gc => {
                    let before = files_below(folder.path());
                    let planned = hocket_ckpt::gc(&prefix, DAY, true, &never).unwrap().garbage;
                    prop_assert_eq!(&files_below(folder.path()), &before);
                    let done = hocket_ckpt::gc(&prefix, DAY, false, &never).unwrap().garbage;
                    let paths = |garbage: &[hocket_ckpt::GarbageFile]| -> BTreeSet<PathBuf> {
                        garbage.iter().map(|one| folder.path().join(&one.name).join(&one.path)).collect()
                    };
                    prop_assert_eq!(paths(&planned), paths(&done));
                    let mut expected = BTreeSet::from([folder.path().join("notes.txt")]);
                    for (name, model) in NAMES.iter().zip(&mut models) {
                        let root = folder.path().join(name);
                        expected.extend(model.survivors(&root).into_iter().filter(|path| before.contains(path)));
                        if let Some(committed) = &model.committed {
                            let place = CheckpointPlace::open(root.to_str().unwrap()).unwrap();
                            for file in &committed.files {
                                prop_assert_eq!(hocket_ckpt::verify_file(&place, file, &never).unwrap(), vec![]);
                            }
                        }
                        model.written.retain(|save| save.hours.iter().any(|&hours| hours < 24));
                    }
                    let left = files_below(folder.path());
                    prop_assert_eq!(&left, &expected);
                    prop_assert_eq!(&before - &left, paths(&done));
                }
            }
        }
    }
}
