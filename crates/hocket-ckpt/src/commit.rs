//! The commit: the manifest gets its name if and only if nobody has it yet.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use crate::durable::{sync_folder, sync_parent};
use crate::error::{CkptError, Result};
use crate::manifest::{MANIFEST_NAME, decode, decode_head};
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place, open_file};
use crate::replace::{Put, probe, replace};

/// On which condition a checkpoint is committed.
#[derive(Debug, Clone, Default)]
pub struct CommitOptions {
    /// Commit although the store lets two conditional writes through.
    pub unfenced: bool,
    /// The save whose manifest is replaced; without, there must be none.
    pub replaces: Option<String>,
}

/// Commits a checkpoint: writes `manifest` to its name, conditionally and durably.
///
/// Committing the same save twice is success both times. A save that replaces another changes the manifest in one step,
/// and only if it is still that other's; what that one's files are is left to the caller. Where the other has gone
/// meanwhile, it is committed as if there had been none.
///
/// # Errors
/// `Exists` where a third save's manifest is there, `Unfenced` where the store cannot tell (and `unfenced` is not given),
/// `Corrupt` or `Invalid` where `manifest` is none of `save_id`, and what the disk or the store says.
pub fn commit(
    place: &Place,
    manifest: Vec<u8>,
    save_id: &str,
    options: &CommitOptions,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    decode(&manifest, place.uri())?;
    let (head, _, _) = decode_head(&manifest, place.uri())?;
    if head.save_id != save_id {
        return Err(CkptError::Invalid(format!(
            "the manifest is of save `{}`, not of `{save_id}`",
            head.save_id
        )));
    }
    match place.kind() {
        Kind::Local(root) => {
            let (place, root, save_id) = (place.clone(), root.to_owned(), save_id.to_owned());
            let options = options.clone();
            // A flush cannot be cut short: an interrupt leaves the commit to happen or not, as a kill would.
            pace::detached(interrupted, move || {
                commit_local(&place, &root, &manifest, &save_id, &options)
            })
        }
        Kind::Remote(store) => {
            let write = Put {
                place,
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
    place: &Place,
    root: &Path,
    manifest: &[u8],
    save_id: &str,
    options: &CommitOptions,
) -> Result<()> {
    let name = root.join(MANIFEST_NAME);
    std::fs::create_dir_all(root)
        .map_err(|error| CkptError::io(root, "make the folder", &error))?;
    let data = root.join("data");
    if data.is_dir() {
        sync_folder(&data)?;
    }
    sync_folder(root)?;
    // Processes that race have names of their own; threads of one process have save ids of their own.
    let temporary = root.join(format!(".{MANIFEST_NAME}.{save_id}.{}", std::process::id()));
    let outcome = write_temporary(&temporary, manifest)
        .and_then(|()| match &options.replaces {
            Some(old) => replace(place, &temporary, &name, old, options.unfenced),
            None => publish(&temporary, &name, options.unfenced),
        })
        .and_then(|is_ours| {
            if is_ours {
                Ok(())
            } else {
                settle(place, &name, save_id)
            }
        });
    // Renamed away, or a name too many; a failure leaves a dot file that nothing reads.
    let _ = std::fs::remove_file(&temporary);
    outcome?;
    sync_folder(root)?;
    sync_parent(root)
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

/// Gives the file its name; false where the name is taken.
pub(crate) fn publish(temporary: &Path, name: &Path, unfenced: bool) -> Result<bool> {
    match std::fs::hard_link(temporary, name) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        // File systems without hard links say so in many ways; the rename below tells what is really wrong.
        Err(_) => {}
    }
    let (from, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::NOREPLACE);
    match rustix::fs::renameat_with(from, temporary, from, name, flags) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
            if !unfenced {
                return Err(CkptError::Unfenced {
                    uri: name.display().to_string(),
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

/// The name is taken: by us (an answer was lost, or this is a second try) or by another.
fn settle(place: &Place, name: &Path, save_id: &str) -> Result<()> {
    let mut bytes = Vec::new();
    open_file(name)
        .and_then(|mut file| io::Read::read_to_end(&mut file, &mut bytes))
        .map_err(|error| CkptError::io(name, "read back the manifest", &error))?;
    compare(place, &bytes, save_id)
}

/// Success if the manifest that is there is that of `save_id`.
pub(crate) fn compare(place: &Place, there: &[u8], save_id: &str) -> Result<()> {
    let theirs = match decode_head(there, place.uri()) {
        Ok((head, _, _)) if head.save_id == save_id => return Ok(()),
        Ok((head, _, _)) => format!(
            "save `{}` of step {} was committed there",
            head.save_id, head.step
        ),
        Err(error) => format!("something is there that is no manifest ({error})"),
    };
    Err(CkptError::Exists {
        uri: place.uri().to_owned(),
        reason: format!(
            "{theirs}, and was not touched. Save under another name, or delete it first"
        ),
    })
}
