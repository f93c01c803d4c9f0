//! What stands under a prefix, and removing it.

use std::io;
use std::path::Path;

use crate::durable::sync_folder;
use crate::error::{CkptError, Result};
use crate::manifest::{HEAD_BYTES, Head, MANIFEST_NAME, decode_head};
use crate::pace::Interrupted;
use crate::place::{Place, is_plain_name};

/// What a child of a prefix is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Its manifest is there and reads.
    Committed,
    /// Data files of ours without a manifest.
    Partial,
    /// Neither.
    Foreign,
}

/// A child of a prefix.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its name below the prefix.
    pub name: String,
    /// What it is.
    pub status: Status,
    /// Its manifest's head, where it is committed.
    pub head: Option<Head>,
    /// Why it is foreign, where it has a manifest all the same.
    pub problem: Option<String>,
}

/// The children of a prefix: the uncommitted by name, then the committed by step, then created, then name.
///
/// # Errors
/// `NotFound` where there is no such prefix, and what the disk or the store says.
pub fn list(place: &Place, interrupted: Interrupted<'_>) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    for name in place.folders(interrupted)? {
        if interrupted() {
            return Err(CkptError::Interrupted);
        }
        listed.push(look(&place.child(&name), name, interrupted)?);
    }
    listed.sort_by(|a, b| {
        let key = |one: &Listed| {
            one.head
                .as_ref()
                .map(|head| (head.step, head.created.clone()))
        };
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
    Ok(listed)
}

fn look(place: &Place, name: String, interrupted: Interrupted<'_>) -> Result<Listed> {
    if let Some(bytes) = place.get_start(MANIFEST_NAME, HEAD_BYTES, interrupted)? {
        return Ok(match decode_head(&bytes, place.uri()) {
            Ok((head, _, _)) => Listed {
                name,
                status: Status::Committed,
                head: Some(head),
                problem: None,
            },
            Err(error) => Listed {
                name,
                status: Status::Foreign,
                head: None,
                problem: Some(error.to_string()),
            },
        });
    }
    let status = if place.has_data(interrupted)? {
        Status::Partial
    } else {
        Status::Foreign
    };
    Ok(Listed {
        name,
        status,
        head: None,
        problem: None,
    })
}

/// Removes a checkpoint: its manifest first, so that no instant shows a broken one, then its data.
///
/// # Errors
/// `NotFound` where there is nothing of ours, `Invalid` where `name` is not one plain name, and what the disk or the
/// store says.
pub fn delete(place: &Place, name: &str, interrupted: Interrupted<'_>) -> Result<()> {
    if !is_plain_name(name) {
        return Err(CkptError::Invalid(format!(
            "`{name}`: expected one plain name below `{}`",
            place.uri()
        )));
    }
    let child = place.child(name);
    let has_manifest = child.get_start(MANIFEST_NAME, 1, interrupted)?.is_some();
    if !has_manifest && !child.has_data(interrupted)? {
        return Err(CkptError::NotFound {
            uri: child.uri().to_owned(),
            reason: "no checkpoint to delete: neither a manifest nor data files".to_owned(),
        });
    }
    delete_local(child.root())
}

fn delete_local(root: &Path) -> Result<()> {
    remove(&root.join(MANIFEST_NAME))?;
    sync_folder(root)?;
    let data = root.join("data");
    if let Some(entries) = folder(&data)? {
        for entry in entries {
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

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CkptError::io(path, "remove the file", &error))
        }
        _ => Ok(()),
    }
}

/// The files of a folder; none where there is no such folder.
fn folder(path: &Path) -> Result<Option<Vec<std::path::PathBuf>>> {
    let read = || -> io::Result<Vec<_>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    };
    match read() {
        Ok(paths) => Ok(Some(paths)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CkptError::io(path, "list the folder", &error)),
    }
}

/// Bytes of each file as seen from here; none where it is not there.
///
/// # Errors
/// What the disk or the store says.
pub fn sizes(
    place: &Place,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<Vec<Option<u64>>> {
    paths
        .iter()
        .map(|path| place.size(path, interrupted))
        .collect()
}
