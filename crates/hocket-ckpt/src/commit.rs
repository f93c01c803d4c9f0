//! The commit: the manifest gets its name if and only if nobody has it yet.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

use bytes::Bytes;
use hocket_store::{PutMode, Store};

use crate::durable::{sync_folder, sync_parent};
use crate::error::{CkptError, Result};
use crate::manifest::{HEAD_BYTES, MANIFEST_NAME, decode, decode_head};
use crate::pace::{self, Interrupted};
use crate::place::{Kind, Place};
use crate::remote;

/// Commits a checkpoint: writes `manifest` to its name, conditionally and durably.
///
/// Committing the same save twice is success both times.
///
/// # Errors
/// `Exists` where another save's manifest is there, `Unfenced` where the store cannot tell (and `unfenced` is not given),
/// `Corrupt` or `Invalid` where `manifest` is none of `save_id`, and what the disk or the store says.
pub fn commit(
    place: &Place,
    manifest: Vec<u8>,
    save_id: &str,
    unfenced: bool,
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
            // A flush cannot be cut short: an interrupt leaves the commit to happen or not, as a kill would.
            pace::detached(interrupted, move || {
                commit_local(&place, &root, &manifest, &save_id, unfenced)
            })
        }
        Kind::Remote(store) => commit_remote(
            place,
            store,
            manifest.into(),
            save_id,
            unfenced,
            interrupted,
        ),
    }
}

fn commit_local(
    place: &Place,
    root: &Path,
    manifest: &[u8],
    save_id: &str,
    unfenced: bool,
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
        .and_then(|()| publish(&temporary, &name, unfenced))
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
fn publish(temporary: &Path, name: &Path, unfenced: bool) -> Result<bool> {
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
    File::open(name)
        .and_then(|mut file| io::Read::read_to_end(&mut file, &mut bytes))
        .map_err(|error| CkptError::io(name, "read back the manifest", &error))?;
    compare(place, &bytes, save_id)
}

fn commit_remote(
    place: &Place,
    store: &Store,
    manifest: Bytes,
    save_id: &str,
    unfenced: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    if !unfenced {
        probe(place, store, save_id, interrupted)?;
    }
    let handle = store.clone();
    let put = async move { Ok(handle.put(MANIFEST_NAME, manifest, PutMode::Create).await) };
    match remote::wait(put, interrupted)? {
        Ok(_) => Ok(()),
        Err(error) if remote::is_unsettled(&error) => {
            // Whose write it was, only the object itself tells.
            match place.get_start(MANIFEST_NAME, HEAD_BYTES, interrupted)? {
                Some(there) => compare(place, &there, save_id),
                None => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Endpoints and buckets that were seen to honour conditional writes, by this process or by the one it was forked from.
static FENCED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Tries a conditional write twice on a key of its own: a store that lets both through fences nobody.
fn probe(place: &Place, store: &Store, save_id: &str, interrupted: Interrupted<'_>) -> Result<()> {
    let bucket: Vec<&str> = store.uri().splitn(4, '/').take(3).collect();
    let endpoint = std::env::var("AWS_ENDPOINT_URL").unwrap_or_default();
    let place_of_keys = format!("{endpoint} {}", bucket.join("/"));
    // A lock that is held (or was, when this process was forked) costs a probe too many, never a wait.
    if FENCED
        .try_lock()
        .is_ok_and(|fenced| fenced.contains(&place_of_keys))
    {
        return Ok(());
    }
    let (handle, key) = (
        store.clone(),
        format!(".hocket-probe-{save_id}-{}", std::process::id()),
    );
    let attempt = async move {
        let put = || handle.put(&key, Bytes::from_static(b"probe"), PutMode::Create);
        let first = put().await;
        let second = match &first {
            Err(error) if !remote::is_unsettled(error) => None,
            _ => Some(put().await),
        };
        handle.delete(&key).await?;
        match (first, second) {
            (Err(error), None) => Err(error.into()),
            (_, Some(Ok(_)) | None) => Ok(false),
            // A lost answer followed by a broken condition is told as `Transient`: fenced, too.
            (_, Some(Err(error))) if remote::is_unsettled(&error) => Ok(true),
            (_, Some(Err(error))) => Err(error.into()),
        }
    };
    if !remote::wait(attempt, interrupted)? {
        return Err(CkptError::Unfenced {
            uri: place.uri().to_owned(),
        });
    }
    if let Ok(mut fenced) = FENCED.try_lock() {
        fenced.insert(place_of_keys);
    }
    Ok(())
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
