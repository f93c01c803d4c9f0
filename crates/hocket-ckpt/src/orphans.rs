//! Discovery of the files, uploads and probes that saves and conversions leave in a folder or under a prefix,
//! by name.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hocket_store::Store;
use hocket_store::durable::{has_writer, name_of_hidden};

use crate::error::{CkptError, Result};
use crate::file_names::save_of;
use crate::local_file::{found, list_folder};
use crate::location::{Kind, Location};
use crate::manifest::MANIFEST_NAME;
use crate::remote;
use crate::replace::save_of_probe;
use crate::workers::Interrupted;

/// The kind of a collected item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waste {
    /// A data file that no manifest names.
    File,
    /// An unfinished multipart upload.
    Upload,
    /// A temporary manifest that was never published.
    Manifest,
    /// A key that a commit wrote to test whether its store honours conditions.
    Probe,
    /// A hidden file outside `data/`, from an unfinished conversion to another format.
    Unfinished,
}

/// A file, an upload or a probe that may be garbage.
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) waste: Waste,
    /// The save it belongs to: the first digits of its id, or another key that its files share.
    pub(crate) save: String,
    pub(crate) bytes: u64,
    pub(crate) changed: SystemTime,
    /// The store's id of the upload.
    pub(crate) upload: Option<String>,
    /// Whether it has a live writer.
    pub(crate) is_held: bool,
}

impl Found {
    fn new(
        path: impl Into<String>,
        waste: Waste,
        save: &str,
        bytes: u64,
        changed: SystemTime,
    ) -> Self {
        Self {
            path: path.into(),
            waste,
            save: save.to_owned(),
            bytes,
            changed,
            upload: None,
            is_held: false,
        }
    }

    /// Recognizes a data file by its name, final or hidden; returns none if the name is not one of ours.
    fn data_file(name: &str, bytes: u64, changed: SystemTime) -> Option<Self> {
        let save = save_of(name_of_hidden(name).unwrap_or(name))?;
        let path = format!("data/{name}");
        Some(Self::new(path, Waste::File, save, bytes, changed))
    }
}

/// Returns the items in a checkpoint's folder or under its prefix.
pub(crate) fn files_of(child: &Location, interrupted: Interrupted<'_>) -> Result<Vec<Found>> {
    match child.kind() {
        Kind::Local(root) => {
            let mut all = data_files(root)?;
            all.extend(temporary_manifests(root)?);
            all.extend(hidden_files(root)?);
            Ok(all)
        }
        Kind::Remote(store) => remote_files(store.clone(), interrupted),
    }
}

fn data_files(root: &Path) -> Result<Vec<Found>> {
    let look = |path: &Path, name: &str| {
        let Some((bytes, changed)) = look_at(path, path.metadata())? else {
            return Ok(None);
        };
        let is_held = name_of_hidden(name).is_some() && has_writer(path) == Some(true);
        let file = Found::data_file(name, bytes, changed);
        Ok(file.map(|file| Found { is_held, ..file }))
    };
    let data = root.join("data");
    // The target of a link may belong to something else.
    if data.is_symlink() {
        return Ok(Vec::new());
    }
    each(&data, look)
}

fn temporary_manifests(root: &Path) -> Result<Vec<Found>> {
    let look = |path: &Path, name: &str| {
        let Some(save) = save_of_temporary(name) else {
            return Ok(None);
        };
        let found = look_at(path, path.metadata())?;
        Ok(found.map(|(bytes, changed)| Found::new(name, Waste::Manifest, save, bytes, changed)))
    };
    each(root, look)
}

/// Returns files that conversions to other formats are writing, or were writing when they were killed. Each
/// counts as a save of its own, because a run writes one after the other.
pub(crate) fn hidden_files(root: &Path) -> Result<Vec<Found>> {
    let look = |path: &Path, name: &str| {
        if name_of_hidden(name).is_none() {
            return Ok(None);
        }
        // A link, folder or pipe of that name was not created by Hocket.
        let metadata = path.symlink_metadata();
        if metadata.as_ref().is_ok_and(|metadata| !metadata.is_file()) {
            return Ok(None);
        }
        let Some((bytes, changed)) = look_at(path, metadata)? else {
            return Ok(None);
        };
        Ok(Some(Found {
            is_held: has_writer(path) == Some(true),
            ..Found::new(name, Waste::Unfinished, name, bytes, changed)
        }))
    };
    each(root, look)
}

/// Collects the results of `look` for the files of a folder; `look` receives path and name.
fn each(dir: &Path, look: impl Fn(&Path, &str) -> Result<Option<Found>>) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for path in list_folder(dir)?.unwrap_or_default() {
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            all.extend(look(&path, name)?);
        }
    }
    Ok(all)
}

/// Returns size and modification time of a file; none if it is gone since the listing, because its save has
/// ended.
fn look_at(path: &Path, metadata: io::Result<Metadata>) -> Result<Option<(u64, SystemTime)>> {
    let Some(metadata) = found(metadata, path, "look at the file")? else {
        return Ok(None);
    };
    let changed = metadata
        .modified()
        .map_err(|error| CkptError::io(path, "look at the file", &error))?;
    Ok(Some((metadata.len(), changed)))
}

/// Returns data files and probes.
fn remote_files(store: Store, interrupted: Interrupted<'_>) -> Result<Vec<Found>> {
    let look = async move {
        let mut objects = store.list_dirs("").await?.objects;
        objects.extend(store.list_dirs("data").await?.objects);
        Ok(objects)
    };
    let found = remote::wait(look, interrupted)?
        .into_iter()
        .filter_map(|object| {
            let changed = at_ms(object.modified_ms);
            if let Some(name) = object.key.strip_prefix("data/") {
                return Found::data_file(name, object.size, changed);
            }
            let save = save_of_probe(&object.key)?;
            Some(Found::new(
                object.key.as_str(),
                Waste::Probe,
                save,
                object.size,
                changed,
            ))
        });
    Ok(found.collect())
}

/// Returns the save of a temporary manifest.
fn save_of_temporary(name: &str) -> Option<&str> {
    let id = name.strip_prefix(&format!(".{MANIFEST_NAME}."))?;
    id.get(..8)
        .filter(|save| *save != "lock" && id.len() > 32 && save.is_ascii())
}

/// Returns unfinished uploads of data files, grouped by the name of their checkpoint.
pub(crate) fn uploads_by_name(
    location: &Location,
    interrupted: Interrupted<'_>,
) -> Result<BTreeMap<String, Vec<Found>>> {
    let Kind::Remote(store) = location.kind() else {
        return Ok(BTreeMap::new());
    };
    let store = store.clone();
    let uploads = remote::wait(async move { Ok(store.list_uploads().await?) }, interrupted)?;
    let mut by_name: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    for upload in uploads {
        if let Some((name, path)) = upload.key.split_once('/')
            && let Some(save) = path.strip_prefix("data/").and_then(save_of)
        {
            let begun = at_ms(upload.initiated_ms);
            by_name.entry(name.to_owned()).or_default().push(Found {
                upload: Some(upload.id.clone()),
                ..Found::new(path, Waste::Upload, save, 0, begun)
            });
        }
    }
    Ok(by_name)
}

fn at_ms(milliseconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}
