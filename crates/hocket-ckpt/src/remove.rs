//! Removing checkpoints, and single files of them.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use hocket_store::Store;

use crate::durable::sync_folder;
use crate::error::{CkptError, Result};
use crate::leftover;
use crate::manifest::{MANIFEST_NAME, data_paths, read_document};
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, found, is_data_path, is_ours, is_plain_name};
use crate::remote;
use crate::replace::{Lock, save_of_probe};

/// Removes a checkpoint: its manifest first, so that no instant shows a broken one, then its data: the files that the
/// manifest names, and those that have a data file's name. Whatever else stands there stays. With `dry_run` it only says
/// whether it would.
///
/// # Errors
/// `NotFound` where there is nothing of ours, `Invalid` where `name` is not one plain name, or it or a folder of its data
/// files is a symbolic link, and what the disk or the store says.
pub fn delete(
    place: &Place,
    name: &str,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !is_plain_name(name) {
        return Err(CkptError::Invalid(format!(
            "`{name}`: expected one plain name below `{}`",
            place.uri()
        )));
    }
    let child = place.child(name)?;
    if let Kind::Local(root) = child.kind()
        && root.is_symlink()
    {
        return Err(CkptError::Invalid(format!(
            "`{}` is a symbolic link: expected the checkpoint's own folder. Delete that, or remove the link by hand",
            child.uri()
        )));
    }
    let has_manifest = child.get_start(MANIFEST_NAME, 1, interrupted)?.is_some();
    if !has_manifest && !child.has_data(interrupted)? {
        return Err(child.not_found("no checkpoint to delete: neither a manifest nor data files"));
    }
    let named = match read_document(&child, interrupted) {
        Ok(document) => data_paths(&document, child.uri())?,
        // Without a manifest that reads, the files' own names have to do.
        Err(
            CkptError::Partial { .. }
            | CkptError::NotFound { .. }
            | CkptError::Corrupt { .. }
            | CkptError::Incompatible { .. },
        ) => HashSet::new(),
        Err(error) => return Err(error),
    };
    if let Kind::Local(root) = child.kind() {
        named.iter().try_for_each(|path| refuse_links(root, path))?;
        refuse_links(root, "data/any")?;
    }
    if dry_run {
        return Ok(());
    }
    match child.kind() {
        Kind::Local(root) => {
            let root = root.to_owned();
            pace::detached(interrupted, move || {
                delete_local(&root, has_manifest, &named)
            })
        }
        Kind::Remote(store) => delete_remote(store, &named, interrupted),
    }
}

fn delete_remote(
    store: &Store,
    named: &HashSet<String>,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let handle = store.clone();
    let begin = async move {
        handle.delete(MANIFEST_NAME).await?;
        let mut objects = handle.list("data").await?;
        // Probes of commits that were cut short.
        let beside = handle.list_dirs("").await?.objects.into_iter();
        objects.extend(beside.filter(|object| save_of_probe(&object.key).is_some()));
        Ok(objects)
    };
    let mut objects = remote::wait(begin, interrupted)?;
    objects.retain(|object| {
        let key = &object.key;
        named.contains(key) || is_ours(key) || save_of_probe(key).is_some()
    });
    let remove = |index: usize| {
        let (store, key) = (store.clone(), objects[index].key.clone());
        async move { Ok(store.delete(&key).await?) }
    };
    remote::gather(objects.len(), remove, |_, ()| Ok(()), interrupted)
}

fn delete_local(root: &Path, has_manifest: bool, named: &HashSet<String>) -> Result<()> {
    // Nobody replaces the manifest meanwhile.
    let _lock = if has_manifest {
        Some(Lock::take(root)?)
    } else {
        None
    };
    remove(&root.join(MANIFEST_NAME))?;
    sync_folder(root)?;
    named.iter().try_for_each(|path| remove(&root.join(path)))?;
    let data = root.join("data");
    for entry in folder(&data)?.unwrap_or_default() {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        if is_ours(&format!("data/{name}")) {
            remove(&entry)?;
        }
    }
    // Manifests of commits that were cut short.
    for entry in folder(root)?.unwrap_or_default() {
        let name = entry
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name.starts_with(&format!(".{MANIFEST_NAME}.")) {
            remove(&entry)?;
        }
    }
    // What is not ours stays, and so does its folder.
    let _ = std::fs::remove_dir(&data);
    let _ = std::fs::remove_dir(root);
    Ok(())
}

/// Whatever stands beyond a symbolic link is somebody else's: perhaps another checkpoint's data.
fn refuse_links(root: &Path, path: &str) -> Result<()> {
    let folders = Path::new(path).ancestors().skip(1);
    let mut folders = folders.filter(|folder| !folder.as_os_str().is_empty());
    match folders.find(|folder| root.join(folder).is_symlink()) {
        Some(folder) => Err(CkptError::Invalid(format!(
            "`{}` is a symbolic link: expected the checkpoint's own folder, and files beyond it are not removed. Remove \
             the link by hand",
            root.join(folder).display()
        ))),
        None => Ok(()),
    }
}

pub(crate) fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CkptError::io(path, "remove the file", &error))
        }
        _ => Ok(()),
    }
}

/// The files of a folder; none where there is no such folder.
pub(crate) fn folder(path: &Path) -> Result<Option<Vec<std::path::PathBuf>>> {
    let read = || -> io::Result<Vec<_>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    };
    // A file in its place is somebody else's.
    found(read(), path, "list the folder")
}

/// Removes a data file that its writer did not finish: it was killed.
///
/// # Errors
/// `Exists` where somebody is writing it, `Invalid` where `path` is no data file's, and what the disk or the store says.
pub fn discard_file(place: &Place, path: &str, interrupted: Interrupted<'_>) -> Result<()> {
    // An object appears when it is whole: nobody is writing one that is there.
    if let Kind::Local(root) = place.kind()
        && leftover::has_writer(&root.join(path)) == Some(true)
    {
        return Err(CkptError::Exists {
            uri: format!("{}/{path}", place.uri().trim_end_matches('/')),
            reason: "another run is writing it. Wait for that one, or stop it first".to_owned(),
        });
    }
    delete_files(place, &[path.to_owned()], interrupted)
}

/// Removes data files of a checkpoint that no manifest names any more, and their folders where nothing else is in
/// them; those that are gone already are no error.
///
/// # Errors
/// `Invalid` where a path is no data file's or leads through a symbolic link, and what the disk or the store says.
pub fn delete_files(place: &Place, paths: &[String], interrupted: Interrupted<'_>) -> Result<()> {
    if let Some(bad) = paths.iter().find(|path| !is_data_path(path)) {
        return Err(CkptError::Invalid(format!(
            "`{bad}`: expected a plain path below `data/`"
        )));
    }
    match place.kind() {
        Kind::Local(root) => {
            paths.iter().try_for_each(|path| refuse_links(root, path))?;
            paths.iter().try_for_each(|path| remove(&root.join(path)))?;
            // Each refuses as long as something is in it.
            let _ = std::fs::remove_dir(root.join("data")).and_then(|()| std::fs::remove_dir(root));
            Ok(())
        }
        Kind::Remote(store) => {
            let remove = |index: usize| {
                let (store, key) = (store.clone(), paths[index].clone());
                async move { Ok(store.delete(&key).await?) }
            };
            remote::gather(paths.len(), remove, |_, ()| Ok(()), interrupted)
        }
    }
}
