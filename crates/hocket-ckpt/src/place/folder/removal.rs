//! Discovery and removal of files on a disk.

use std::collections::{BTreeMap, HashSet};
use std::fs::Metadata;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hocket_store::durable::{has_writer, name_of_hidden, sync_folder};

use super::FolderPlace;
use super::commit::{LOCK_NAME, ManifestLock};
use super::local_file::{found, list_folder, read_start};
use crate::error::{CkptError, Result};
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME};
use crate::place::files::{CheckpointToRemove, PlaceCleanup};
use crate::place::leftovers::{LeftoverItem, LeftoverKind};
use crate::workers::{self, Interrupted};

impl PlaceCleanup for FolderPlace {
    fn refuse_link(&self) -> Result<()> {
        if !self.root.is_symlink() {
            return Ok(());
        }
        Err(CkptError::Invalid(format!(
            "`{}` is a symbolic link: expected the checkpoint's own folder. Delete that, or remove the link by hand",
            self.uri
        )))
    }

    fn refuse_links(&self, paths: &HashSet<String>) -> Result<()> {
        refuse_links(&self.root, paths)?;
        refuse_links(&self.root, [&"data/any".to_owned()])
    }

    fn delete(&self, doomed: CheckpointToRemove, interrupted: Interrupted<'_>) -> Result<bool> {
        let root = self.root.clone();
        workers::detached(interrupted, move || delete(&root, &doomed))
    }

    fn delete_files(&self, paths: &[String], _: Interrupted<'_>) -> Result<()> {
        let root = &self.root;
        refuse_links(root, paths)?;
        paths.iter().try_for_each(|path| remove(&root.join(path)))?;
        // Each removal fails if the folder is not empty.
        let _ = std::fs::remove_dir(root.join("data")).and_then(|()| std::fs::remove_dir(root));
        Ok(())
    }

    fn has_writer(&self, path: &str) -> bool {
        has_writer(&self.root.join(path)) == Some(true)
    }

    fn garbage(&self, _: Interrupted<'_>) -> Result<Vec<LeftoverItem>> {
        let mut all = data_files(&self.root)?;
        all.extend(temporary_manifests(&self.root)?);
        all.extend(hidden_files(&self.root)?);
        Ok(all)
    }

    fn garbage_beside(&self, _: Interrupted<'_>) -> Result<BTreeMap<String, Vec<LeftoverItem>>> {
        // A conversion to a single file writes it beside the checkpoints.
        Ok(BTreeMap::from([(
            ".".to_owned(),
            hidden_files(&self.root)?,
        )]))
    }

    fn sweep(
        &self,
        waste: &[(LeftoverItem, Duration)],
        is_partial: bool,
        _: Interrupted<'_>,
    ) -> Result<()> {
        let root = self.root.as_path();
        let is_hidden = |waste: LeftoverKind| {
            matches!(waste, LeftoverKind::Manifest | LeftoverKind::Unfinished)
        };
        for (one, _) in waste.iter().filter(|(one, _)| is_hidden(one.waste)) {
            remove(&root.join(&one.path))?;
        }
        let data = root.join("data");
        let is_of_saves = waste
            .iter()
            .any(|(one, _)| one.waste != LeftoverKind::Unfinished);
        if is_of_saves && std::fs::remove_dir(&data).is_ok() && is_partial {
            remove(&root.join(LOCK_NAME))?;
        }
        if is_partial {
            let _ = std::fs::remove_dir(root);
        }
        for folder in [data.as_path(), root] {
            if folder.is_dir() {
                sync_folder(folder)?;
            }
        }
        Ok(())
    }
}

fn data_files(root: &Path) -> Result<Vec<LeftoverItem>> {
    let look = |path: &Path, name: &str| {
        let Some((bytes, changed)) = look_at(path, path.metadata())? else {
            return Ok(None);
        };
        let is_held = name_of_hidden(name).is_some() && has_writer(path) == Some(true);
        let file = LeftoverItem::data_file(name, bytes, changed);
        Ok(file.map(|file| LeftoverItem { is_held, ..file }))
    };
    let data = root.join("data");
    // The target of a link may belong to something else.
    if data.is_symlink() {
        return Ok(Vec::new());
    }
    each(&data, look)
}

fn temporary_manifests(root: &Path) -> Result<Vec<LeftoverItem>> {
    let look = |path: &Path, name: &str| {
        let Some(save) = save_of_temporary(name) else {
            return Ok(None);
        };
        let found = look_at(path, path.metadata())?;
        Ok(found.map(|(bytes, changed)| {
            LeftoverItem::new(name, LeftoverKind::Manifest, save, bytes, changed)
        }))
    };
    each(root, look)
}

/// Returns files that conversions to other formats are writing, or were writing when they were killed. Each
/// counts as a save of its own, because a conversion writes one file after the other.
fn hidden_files(root: &Path) -> Result<Vec<LeftoverItem>> {
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
        Ok(Some(LeftoverItem {
            is_held: has_writer(path) == Some(true),
            ..LeftoverItem::new(name, LeftoverKind::Unfinished, name, bytes, changed)
        }))
    };
    each(root, look)
}

/// Collects the results of `look` for the files of a folder; `look` receives path and name.
fn each(
    dir: &Path,
    look: impl Fn(&Path, &str) -> Result<Option<LeftoverItem>>,
) -> Result<Vec<LeftoverItem>> {
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

/// Returns the save of a temporary manifest.
fn save_of_temporary(name: &str) -> Option<&str> {
    let id = name.strip_prefix(&format!(".{MANIFEST_NAME}."))?;
    // `id` is a save's 32 digits and a process id; of the lock it is shorter.
    id.get(..8).filter(|save| id.len() > 32 && save.is_ascii())
}

fn delete(root: &Path, doomed: &CheckpointToRemove) -> Result<bool> {
    let name = root.join(MANIFEST_NAME);
    let _lock = match &doomed.start {
        // The lock prevents a concurrent replacement of the manifest.
        Some(_) => match ManifestLock::take(root)? {
            Some(lock) => Some(lock),
            None => return Ok(false),
        },
        None => None,
    };
    if read_start(&name, HEAD_BYTES, "read the file")? != doomed.start {
        return Ok(false);
    }
    remove(&name)?;
    sync_folder(root)?;
    let mut paths = doomed.paths.iter();
    paths.try_for_each(|path| remove(&root.join(path)))?;
    remove(&root.join(LOCK_NAME))?;
    // Fails if other files remain, which keeps the folder.
    let _ = std::fs::remove_dir(root.join("data"));
    let _ = std::fs::remove_dir(root);
    Ok(true)
}

/// Rejects symbolic links: their target may belong to something else, such as another checkpoint's data.
fn refuse_links<'a>(root: &Path, paths: impl IntoIterator<Item = &'a String>) -> Result<()> {
    let folders = paths
        .into_iter()
        .flat_map(|path| Path::new(path).ancestors().skip(1));
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

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CkptError::io(path, "remove the file", &error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn another_manifest_than_the_expected_one_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("one");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join(MANIFEST_NAME), b"new").unwrap();
        let doomed = |start: Option<&[u8]>| CheckpointToRemove {
            start: start.map(<[u8]>::to_vec),
            paths: HashSet::from([MANIFEST_NAME.to_owned()]),
        };
        for start in [None, Some(b"old".as_slice())] {
            assert!(!delete(&root, &doomed(start)).unwrap());
            assert!(root.join(MANIFEST_NAME).is_file());
        }
        assert!(delete(&root, &doomed(Some(b"new"))).unwrap());
        assert!(!root.exists());
        assert!(!delete(&root, &doomed(Some(b"new"))).unwrap());
    }

    #[test]
    fn a_temporary_manifest_is_told_from_the_lock_and_from_other_files() {
        let save = "0123456789abcdef0123456789abcdef";
        let name = format!(".{MANIFEST_NAME}.{save}.17");
        assert_eq!(save_of_temporary(&name), Some("01234567"));
        let short = format!(".{MANIFEST_NAME}.0123456789");
        for other in [LOCK_NAME, MANIFEST_NAME, short.as_str()] {
            assert_eq!(save_of_temporary(other), None, "{other}");
        }
    }

    #[test]
    fn a_lock_that_was_removed_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let lock = ManifestLock::take(folder.path()).unwrap().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ManifestLock::take(folder.path()).unwrap().unwrap());
            std::thread::sleep(Duration::from_millis(50));
            remove(&folder.path().join(LOCK_NAME)).unwrap();
            drop(lock);
            let _held = waiting.join().unwrap();
            let file = std::fs::File::open(folder.path().join(LOCK_NAME)).unwrap();
            assert!(!hocket_store::durable::try_lock(&file).unwrap());
        });
    }
}
