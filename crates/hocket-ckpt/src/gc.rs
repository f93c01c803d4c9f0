//! Collecting what saves that never finished, or were replaced, left behind.
//!
//! The order of looking is what keeps a committed byte safe: files are listed first and the manifest is read after, so
//! whatever was committed by then is named by it. A save that commits later is still running, and so has files younger
//! than the least age.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hocket_store::Unfinished;

use crate::durable::sync_folder;
use crate::error::{CkptError, Result};
use crate::leftover;
use crate::list::folders;
use crate::manifest::{MANIFEST_NAME, data_paths, read_document, read_head};
use crate::pace::Interrupted;
use crate::place::{Kind, Place, found, save_of};
use crate::remote;
use crate::remove::{delete_files, folder, remove};
use crate::replace::save_of_probe;

/// What kind of thing is collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waste {
    /// A data file that no manifest names.
    File,
    /// An upload that was never finished.
    Upload,
    /// A manifest on its way that never came to its name.
    Manifest,
    /// A key on which a commit tried whether its store keeps writers apart.
    Probe,
}

/// Something collected, or to be collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Garbage {
    /// The name of the checkpoint below the prefix.
    pub name: String,
    /// The file inside it.
    pub path: String,
    /// What it is.
    pub waste: Waste,
    /// Its bytes; 0 for an upload, whose parts nobody counts.
    pub bytes: u64,
    /// How long its save has been still.
    pub age: Duration,
}

/// What was found, and where nothing could be told.
#[derive(Debug, Clone, Default)]
pub struct Collected {
    /// What was removed; with `dry_run`, what would be.
    pub garbage: Vec<Garbage>,
    /// Checkpoints that were left alone, each with the reason: their manifest does not read.
    pub skipped: Vec<(String, String)>,
}

/// A file, a temporary manifest, an upload or a probe of a save.
struct Found {
    path: String,
    waste: Waste,
    /// The save it belongs to: the first digits of its id.
    save: String,
    bytes: u64,
    changed: SystemTime,
    /// The upload's own name.
    upload: Option<String>,
    /// Whether somebody is writing it.
    is_held: bool,
}

/// Removes what no checkpoint under a prefix needs and no running save can still want.
///
/// Taken are data files that their folder's manifest does not name, temporary manifests, probes, and unfinished uploads,
/// if the youngest of their save is at least `min_age` old. Files that are not ours are never touched.
///
/// # Errors
/// `NotFound` where there is no such prefix, and what the disk or the store says.
pub fn gc(
    place: &Place,
    min_age: Duration,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<Collected> {
    let uploads = uploads_by_name(place, interrupted)?;
    let mut names = match folders(place, interrupted) {
        Err(CkptError::NotFound { .. }) if !uploads.is_empty() => Vec::new(),
        names => names?,
    };
    names.extend(
        uploads
            .keys()
            .filter(|name| !names.contains(name))
            .cloned()
            .collect::<Vec<_>>(),
    );
    let now = SystemTime::now();
    let mut collected = Collected::default();
    for name in names {
        let child = place.child(&name)?;
        let mut found = files_of(&child, interrupted)?;
        found.extend(uploads.get(&name).into_iter().flatten().map(upload_found));
        if found.is_empty() {
            continue;
        }
        let committed = match read_document(&child, interrupted) {
            Ok(document) => Some(data_paths(&document, child.uri())?),
            Err(CkptError::Partial { .. } | CkptError::NotFound { .. }) => None,
            Err(error @ (CkptError::Corrupt { .. } | CkptError::Incompatible { .. })) => {
                collected.skipped.push((name, error.to_string()));
                continue;
            }
            Err(error) => return Err(error),
        };
        let waste = choose(found, committed.as_ref(), min_age, now);
        let is_partial = committed.is_none();
        if waste.is_empty() {
            continue;
        }
        // A manifest that came while we looked says that somebody is at work here: the next collection will see.
        if is_partial && read_head(&child, interrupted).is_ok() {
            continue;
        }
        if !dry_run {
            sweep(&child, &waste, is_partial, interrupted)?;
        }
        collected
            .garbage
            .extend(waste.into_iter().map(|(one, age)| Garbage {
                name: name.clone(),
                path: one.path,
                waste: one.waste,
                bytes: one.bytes,
                age,
            }));
    }
    Ok(collected)
}

/// What may go, each with the age of its save. One young file keeps all of its save's, and so does one that is being
/// written, whatever the least age is.
fn choose(
    found: Vec<Found>,
    committed: Option<&HashSet<String>>,
    min_age: Duration,
    now: SystemTime,
) -> Vec<(Found, Duration)> {
    let held: HashSet<String> = found
        .iter()
        .filter(|one| one.is_held)
        .map(|one| one.save.clone())
        .collect();
    let mut youngest: BTreeMap<String, Duration> = BTreeMap::new();
    for one in &found {
        // What comes from a clock that is ahead of ours is young.
        let age = now.duration_since(one.changed).unwrap_or(Duration::ZERO);
        let least = youngest.entry(one.save.clone()).or_insert(age);
        *least = age.min(*least);
    }
    let mut chosen: Vec<_> = found
        .into_iter()
        .filter(|one| committed.is_none_or(|paths| !paths.contains(&one.path)))
        .filter(|one| !held.contains(&one.save))
        .filter_map(|one| {
            let age = youngest.get(&one.save).copied().unwrap_or_default();
            (age >= min_age).then_some((one, age))
        })
        .collect();
    chosen.sort_by(|(a, _), (b, _)| {
        (&a.path, a.waste, &a.upload).cmp(&(&b.path, b.waste, &b.upload))
    });
    chosen
}

fn sweep(
    child: &Place,
    waste: &[(Found, Duration)],
    is_partial: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let files: Vec<String> = waste
        .iter()
        .filter(|(one, _)| one.waste == Waste::File)
        .map(|(one, _)| one.path.clone())
        .collect();
    delete_files(child, &files, interrupted)?;
    let root = match child.kind() {
        Kind::Local(root) => root,
        Kind::Remote(store) => {
            let others: Vec<_> = waste
                .iter()
                .filter(|(one, _)| matches!(one.waste, Waste::Upload | Waste::Probe))
                .map(|(one, _)| (one.path.clone(), one.upload.clone()))
                .collect();
            let end = |index: usize| {
                let (store, (key, upload)) = (store.clone(), others[index].clone());
                async move {
                    match upload {
                        Some(id) => Ok(store.abort_upload(&key, &id).await?),
                        None => Ok(store.delete(&key).await?),
                    }
                }
            };
            return remote::gather(others.len(), end, |_, ()| Ok(()), interrupted);
        }
    };
    for (one, _) in waste.iter().filter(|(one, _)| one.waste == Waste::Manifest) {
        remove(&root.join(&one.path))?;
    }
    // Folders that this leaves empty go too; what is not ours stays, and so do they.
    let data = root.join("data");
    if std::fs::remove_dir(&data).is_ok() && is_partial {
        remove(&root.join(format!(".{MANIFEST_NAME}.lock")))?;
        let _ = std::fs::remove_dir(root);
    } else {
        for folder in [data.as_path(), root] {
            if folder.is_dir() {
                sync_folder(folder)?;
            }
        }
    }
    Ok(())
}

/// The data files and temporary manifests of a folder, or the data files and probes of a prefix.
fn files_of(child: &Place, interrupted: Interrupted<'_>) -> Result<Vec<Found>> {
    let found_at =
        |path: String, waste: Waste, save: &str, bytes: u64, changed: SystemTime| Found {
            path,
            waste,
            save: save.to_owned(),
            bytes,
            changed,
            upload: None,
            is_held: false,
        };
    let data_file = |name: &str, bytes: u64, changed: SystemTime| {
        let path = format!("data/{name}");
        let save = save_of(leftover::name_of(name).unwrap_or(name))?;
        Some(found_at(path, Waste::File, save, bytes, changed))
    };
    let root = match child.kind() {
        Kind::Local(root) => root,
        Kind::Remote(store) => {
            let store = store.clone();
            let look = async move {
                let mut objects = store.list_dirs("").await?.objects;
                objects.extend(store.list_dirs("data").await?.objects);
                Ok(objects)
            };
            let objects = remote::wait(look, interrupted)?;
            let found = objects.into_iter().filter_map(|object| {
                let changed = at_ms(object.modified_ms);
                if let Some(name) = object.key.strip_prefix("data/") {
                    return data_file(name, object.size, changed);
                }
                let save = save_of_probe(&object.key)?.to_owned();
                Some(found_at(
                    object.key,
                    Waste::Probe,
                    &save,
                    object.size,
                    changed,
                ))
            });
            return Ok(found.collect());
        }
    };
    let mut all = Vec::new();
    for (below, dir) in [("data", root.join("data")), ("", root.to_owned())] {
        for path in folder(&dir)?.unwrap_or_default() {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            // Gone since it was listed: a save that has ended.
            let Some(metadata) = found(path.metadata(), &path, "look at the file")? else {
                continue;
            };
            let changed = metadata
                .modified()
                .map_err(|error| CkptError::io(&path, "look at the file", &error))?;
            if below == "data" {
                let is_held =
                    leftover::name_of(name).is_some() && leftover::has_writer(&path) == Some(true);
                let file = data_file(name, metadata.len(), changed);
                all.extend(file.map(|file| Found { is_held, ..file }));
            } else if let Some(save) = save_of_temporary(name) {
                let path = name.to_owned();
                all.push(found_at(
                    path,
                    Waste::Manifest,
                    save,
                    metadata.len(),
                    changed,
                ));
            }
        }
    }
    Ok(all)
}

/// The save of a manifest that never came to its name.
fn save_of_temporary(name: &str) -> Option<&str> {
    let id = name.strip_prefix(&format!(".{MANIFEST_NAME}."))?;
    id.get(..8)
        .filter(|save| *save != "lock" && id.len() > 32 && save.is_ascii())
}

/// Unfinished uploads of data files, by the name of their checkpoint.
fn uploads_by_name(
    place: &Place,
    interrupted: Interrupted<'_>,
) -> Result<BTreeMap<String, Vec<(String, Unfinished)>>> {
    let Kind::Remote(store) = place.kind() else {
        return Ok(BTreeMap::new());
    };
    let store = store.clone();
    let uploads = remote::wait(async move { Ok(store.list_uploads().await?) }, interrupted)?;
    let mut by_name: BTreeMap<String, Vec<(String, Unfinished)>> = BTreeMap::new();
    for upload in uploads {
        if let Some((name, path)) = upload.key.split_once('/')
            && path.strip_prefix("data/").and_then(save_of).is_some()
        {
            let path = path.to_owned();
            by_name
                .entry(name.to_owned())
                .or_default()
                .push((path, upload));
        }
    }
    Ok(by_name)
}

fn upload_found((path, upload): &(String, Unfinished)) -> Found {
    let save = path.strip_prefix("data/").and_then(save_of);
    Found {
        path: path.clone(),
        waste: Waste::Upload,
        save: save.unwrap_or_default().to_owned(),
        bytes: 0,
        changed: at_ms(upload.initiated_ms),
        upload: Some(upload.id.clone()),
        is_held: false,
    }
}

fn at_ms(milliseconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}
