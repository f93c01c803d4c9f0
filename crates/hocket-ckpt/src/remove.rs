//! Removal of checkpoints, and of single files in them.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use hocket_store::Store;
use hocket_store::durable::{has_writer, sync_folder};

use crate::error::{CkptError, Result};
use crate::file_names::{is_data_path, is_ours, is_plain_name};
use crate::local_file::list_folder;
use crate::location::{Kind, Location};
use crate::manifest::{MANIFEST_NAME, data_paths, read_document};
use crate::remote;
use crate::replace::{Lock, save_of_probe};
use crate::workers::{self, Interrupted};

/// Removes a checkpoint. The manifest goes first, so that the checkpoint never appears broken, followed by its
/// data: the files that the manifest names, and files with the name of a data file. Other files are kept. With
/// `dry_run`, only checks that the removal is possible.
///
/// # Errors
/// `NotFound` if nothing of Hocket is there; `Invalid` if `name` is not one plain name, or if it or a folder of
/// its data files is a symbolic link; and errors of the disk or the store.
pub fn delete(
    location: &Location,
    name: &str,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !is_plain_name(name) {
        return Err(CkptError::Invalid(format!(
            "`{name}`: expected one plain name below `{}`",
            location.uri()
        )));
    }
    let child = location.child(name)?;
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
        // Without a readable manifest, data files are recognized by name only.
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
            workers::detached(interrupted, move || {
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
        // Probes of interrupted commits.
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
    // The lock prevents a concurrent replacement of the manifest.
    let _lock = if has_manifest {
        Some(Lock::take(root)?)
    } else {
        None
    };
    remove(&root.join(MANIFEST_NAME))?;
    sync_folder(root)?;
    named.iter().try_for_each(|path| remove(&root.join(path)))?;
    let data = root.join("data");
    for entry in list_folder(&data)?.unwrap_or_default() {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        if is_ours(&format!("data/{name}")) {
            remove(&entry)?;
        }
    }
    // Temporary manifests of interrupted commits.
    for entry in list_folder(root)?.unwrap_or_default() {
        let name = entry
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name.starts_with(&format!(".{MANIFEST_NAME}.")) {
            remove(&entry)?;
        }
    }
    // Fails if files of others remain, and so keeps their folder.
    let _ = std::fs::remove_dir(&data);
    let _ = std::fs::remove_dir(root);
    Ok(())
}

/// Rejects symbolic links: their target may belong to something else, such as another checkpoint's data.
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

/// Removes a data file whose writer was killed.
///
/// # Errors
/// `Exists` if it has a live writer, `Invalid` if `path` is not the name of a data file, and errors of the disk
/// or the store.
pub fn discard_file(location: &Location, path: &str, interrupted: Interrupted<'_>) -> Result<()> {
    // An object appears only when complete, so an existing object has no writer.
    if let Kind::Local(root) = location.kind()
        && has_writer(&root.join(path)) == Some(true)
    {
        return Err(CkptError::Exists {
            uri: format!("{}/{path}", location.uri().trim_end_matches('/')),
            reason: "another run is writing it. Wait for that one, or stop it first".to_owned(),
        });
    }
    delete_files(location, &[path.to_owned()], interrupted)
}

/// Removes data files of a checkpoint that no manifest names any more, and their folders if these are then
/// empty. Missing files are not an error.
///
/// # Errors
/// `Invalid` if a path is not the name of a data file or leads through a symbolic link, and errors of the disk
/// or the store.
pub fn delete_files(
    location: &Location,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if let Some(bad) = paths.iter().find(|path| !is_data_path(path)) {
        return Err(CkptError::Invalid(format!(
            "`{bad}`: expected a plain path below `data/`"
        )));
    }
    match location.kind() {
        Kind::Local(root) => {
            paths.iter().try_for_each(|path| refuse_links(root, path))?;
            paths.iter().try_for_each(|path| remove(&root.join(path)))?;
            // Each removal fails if the folder is not empty.
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
