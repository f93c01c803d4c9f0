//! The commit on a disk: a link or a rename of a temporary manifest.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hocket_store::durable::{
    FileLock, is_same_file, link_as_new, open_regular, sync_folder, sync_parent,
};

use super::local_file::{create_folder, found, is_unsupported, read_start};
use crate::error::{CkptError, Result};
use crate::manifest::write::ManifestWrite;
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME};

/// Name of the lock's file.
pub(super) const LOCK_NAME: &str = ".checkpoint.json.zst.lock";

/// The lock for replacing or removing a folder's manifest. Creating one needs no lock, because a link is
/// atomic.
pub(super) struct ManifestLock(#[expect(dead_code, reason = "dropped, it unlocks")] FileLock);

impl ManifestLock {
    /// Waits for the lock; call it on a thread that may block. Returns none if the folder does not exist.
    pub(super) fn take(root: &Path) -> Result<Option<Self>> {
        let path = root.join(LOCK_NAME);
        loop {
            let opened = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .custom_flags(libc::O_NONBLOCK)
                .open(&path);
            let Some(file) = found(opened, &path, "open the lock")? else {
                return Ok(None);
            };
            let locked = FileLock::wait(file)
                .map_err(|error| CkptError::io(&path, "lock the manifest", &error))?;
            // The removal of a checkpoint deletes the file of its lock, and others may wait for it.
            if is_same_file(locked.file(), &path) {
                return Ok(Some(Self(locked)));
            }
        }
    }
}

pub(super) fn commit(root: &Path, manifest: &ManifestWrite) -> Result<()> {
    let name = root.join(MANIFEST_NAME);
    create_folder(root)?;
    let data = root.join("data");
    if data.is_dir() {
        sync_folder(&data)?;
    }
    sync_folder(root)?;
    // The name is unique: processes differ in the pid, threads of one process in the save id.
    let pid = std::process::id();
    let temporary = root.join(format!(".{MANIFEST_NAME}.{}.{pid}", manifest.save_id));
    let unfenced = manifest.options.unfenced;
    let outcome = write_temporary(&temporary, &manifest.bytes)
        .and_then(|()| match &manifest.options.replaces {
            Some(old) => replace(manifest, &temporary, &name, old),
            None => publish(&temporary, &name, unfenced),
        })
        .and_then(|is_ours| {
            if is_ours {
                Ok(())
            } else {
                settle(manifest, &name)
            }
        });
    // The file was renamed, or its second link is not needed; if this fails, a hidden file remains that nothing
    // reads.
    let _ = std::fs::remove_file(&temporary);
    outcome?;
    sync_folder(root)?;
    Ok(sync_parent(root)?)
}

fn write_temporary(path: &Path, manifest: &[u8]) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        file.write_all(manifest)?;
        file.sync_all()
    };
    write().map_err(|error| CkptError::io(path, "write the manifest", &error))
}

/// Renames the file to the manifest if the current manifest belongs to the save `old` or does not exist;
/// returns false if it belongs to another save.
fn replace(manifest: &ManifestWrite, temporary: &Path, name: &Path, old: &str) -> Result<bool> {
    let _lock = ManifestLock::take(temporary.parent().unwrap_or(Path::new(".")))?;
    let Some(start) = read_start(name, HEAD_BYTES, "read the manifest")? else {
        manifest.allow_missing()?;
        return publish(temporary, name, manifest.options.unfenced);
    };
    if !manifest.is_of(&start, old) {
        return Ok(false);
    }
    std::fs::rename(temporary, name)
        .map(|()| true)
        .map_err(|error| CkptError::io(name, "replace the manifest", &error))
}

/// Gives the file its final name; returns false if the name exists.
fn publish(temporary: &Path, name: &Path, unfenced: bool) -> Result<bool> {
    // File systems without hard links report different errors; the rename below reports the actual cause.
    if let Ok(is_new) = link_as_new(temporary, name) {
        return Ok(is_new);
    }
    let (from, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    match rustix::fs::renameat_with(from, temporary, from, name, flags) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(error) if is_unsupported(error) => {
            if !unfenced {
                return Err(CkptError::Unfenced {
                    uri: name.display().to_string(),
                    reason: "has neither hard links nor a rename that keeps an existing file"
                        .to_owned(),
                });
            }
            if name.exists() {
                return Ok(false);
            }
            std::fs::rename(temporary, name)
                .map(|()| true)
                .map_err(|error| CkptError::io(name, "name the manifest", &error))
        }
        Err(error) => Err(CkptError::io(name, "name the manifest", &error.into())),
    }
}

/// Compares an existing manifest with this save's: it belongs to this save (after a lost response or in a
/// second attempt) or to another one.
fn settle(manifest: &ManifestWrite, name: &Path) -> Result<()> {
    let mut bytes = Vec::new();
    open_regular(name)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(|error| CkptError::io(name, "read back the manifest", &error))?;
    manifest.compare(&bytes)
}
