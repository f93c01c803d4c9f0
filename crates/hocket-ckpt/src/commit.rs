//! The commit: writes the manifest under its final name if no other save has done so.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use hocket_store::durable::{open_regular, sync_folder, sync_parent};

use crate::error::{CkptError, Result};
use crate::local_file::create_folder;
use crate::location::{Kind, Location};
use crate::manifest::{MANIFEST_NAME, decode, decode_head};
use crate::publish::{compare, publish};
use crate::replace::{Put, probe, replace};
use crate::workers::{self, Interrupted};

/// The conditions of a commit.
#[derive(Debug, Clone, Default)]
pub struct CommitOptions {
    /// Commit even if the store ignores the conditions of conditional writes.
    pub unfenced: bool,
    /// The id of the save whose manifest is replaced; without it, no manifest may exist.
    pub replaces: Option<String>,
}

/// Commits a checkpoint: writes `manifest` under its final name, conditionally and durably.
///
/// Committing the same save twice succeeds both times. A save that replaces another swaps the manifest in one
/// step, and only if it still belongs to that save; the caller removes the replaced save's files. If the other
/// save's manifest is gone by then, the commit proceeds as if there had been none.
///
/// # Errors
/// `Exists` if the manifest of a third save is there; `Unfenced` if the store ignores conditions and `unfenced`
/// is not set; `Corrupt` or `Invalid` if `manifest` does not belong to `save_id`; and errors of the disk or the
/// store.
pub fn commit(
    location: &Location,
    manifest: Vec<u8>,
    save_id: &str,
    options: &CommitOptions,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    decode(&manifest, location.uri())?;
    let (head, _, _) = decode_head(&manifest, location.uri())?;
    if head.save_id != save_id {
        return Err(CkptError::Invalid(format!(
            "the manifest is of save `{}`, not of `{save_id}`",
            head.save_id
        )));
    }
    match location.kind() {
        Kind::Local(root) => {
            let (location, root, save_id) = (location.clone(), root.to_owned(), save_id.to_owned());
            let options = options.clone();
            // A flush cannot be cancelled: after an interrupt the commit may or may not take effect, as after a
            // kill.
            workers::detached(interrupted, move || {
                commit_local(&location, &root, &manifest, &save_id, &options)
            })
        }
        Kind::Remote(store) => {
            let write = Put {
                location,
                store,
                manifest: manifest.into(),
                save_id,
                interrupted,
            };
            if !options.unfenced {
                probe(&write, options.replaces.is_some())?;
            }
            match &options.replaces {
                Some(old) => write.replace(old),
                None => write.create(),
            }
        }
    }
}

fn commit_local(
    location: &Location,
    root: &Path,
    manifest: &[u8],
    save_id: &str,
    options: &CommitOptions,
) -> Result<()> {
    let name = root.join(MANIFEST_NAME);
    create_folder(root)?;
    let data = root.join("data");
    if data.is_dir() {
        sync_folder(&data)?;
    }
    sync_folder(root)?;
    // The name is unique: processes differ in the pid, threads of one process in the save id.
    let temporary = root.join(format!(".{MANIFEST_NAME}.{save_id}.{}", std::process::id()));
    let outcome = write_temporary(&temporary, manifest)
        .and_then(|()| match &options.replaces {
            Some(old) => replace(location, &temporary, &name, old, options.unfenced),
            None => publish(&temporary, &name, options.unfenced),
        })
        .and_then(|is_ours| {
            if is_ours {
                Ok(())
            } else {
                settle(location, &name, save_id)
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

/// Resolves an existing name: it is either ours (a lost response or a second attempt) or another save's.
fn settle(location: &Location, name: &Path, save_id: &str) -> Result<()> {
    let mut bytes = Vec::new();
    open_regular(name)
        .and_then(|mut file| io::Read::read_to_end(&mut file, &mut bytes))
        .map_err(|error| CkptError::io(name, "read back the manifest", &error))?;
    compare(location, &bytes, save_id)
}
