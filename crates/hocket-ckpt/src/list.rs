//! What stands under a prefix.

use std::io;

use crate::error::{CkptError, Result};
use crate::manifest::{HEAD_BYTES, Head, MANIFEST_NAME, decode_head};
use crate::pace::Interrupted;
use crate::place::{Kind, Place, found};
use crate::remote;

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
    let names = folders(place, interrupted)?;
    let mut listed = Vec::with_capacity(names.len());
    match place.kind() {
        Kind::Local(_) => {
            for name in names {
                listed.push(look(&place.child(&name)?, name, interrupted)?);
            }
        }
        Kind::Remote(_) => {
            let looks =
                |index: usize| look_remote(place.child(&names[index]), names[index].clone());
            remote::gather(
                names.len(),
                looks,
                |_, one| {
                    listed.push(one);
                    Ok(())
                },
                interrupted,
            )?;
        }
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

/// Names of the folders under a prefix. A symbolic link is none of them: it is a second name of another's.
pub(crate) fn folders(place: &Place, interrupted: Interrupted<'_>) -> Result<Vec<String>> {
    match place.kind() {
        Kind::Local(root) => {
            let look = || -> io::Result<Vec<String>> {
                let mut names = Vec::new();
                for entry in root.read_dir()? {
                    let entry = entry?;
                    if entry.file_type()?.is_dir() {
                        names.push(entry.file_name().to_string_lossy().into_owned());
                    }
                }
                Ok(names)
            };
            found(look(), root, "list the folder")?
                .ok_or_else(|| place.not_found("there is no such folder"))
        }
        Kind::Remote(store) => {
            let store = store.clone();
            let listing = remote::wait(async move { Ok(store.list_dirs("").await?) }, interrupted)?;
            if listing.dirs.is_empty() && listing.objects.is_empty() {
                return Err(place.not_found("nothing stands under this prefix"));
            }
            Ok(listing.dirs)
        }
    }
}

fn look(place: &Place, name: String, interrupted: Interrupted<'_>) -> Result<Listed> {
    let start = place.get_start(MANIFEST_NAME, HEAD_BYTES, interrupted)?;
    let has_data = start.is_none() && place.has_data(interrupted)?;
    Ok(judge(place, name, start, has_data))
}

async fn look_remote(place: Result<Place>, name: String) -> Result<Listed> {
    let place = place?;
    let Kind::Remote(store) = place.kind() else {
        return Err(CkptError::Invalid(format!("`{name}` is no object prefix")));
    };
    let start = remote::get_start(store.clone(), MANIFEST_NAME.to_owned(), HEAD_BYTES).await?;
    let has_data = start.is_none() && remote::has_data(store.clone()).await?;
    Ok(judge(&place, name, start, has_data))
}

fn judge(place: &Place, name: String, start: Option<Vec<u8>>, has_data: bool) -> Listed {
    let (status, head, problem) = match start.map(|bytes| decode_head(&bytes, place.uri())) {
        Some(Ok((head, _, _))) => (Status::Committed, Some(head), None),
        Some(Err(error)) => (Status::Foreign, None, Some(error.to_string())),
        None if has_data => (Status::Partial, None, None),
        None => (Status::Foreign, None, None),
    };
    Listed {
        name,
        status,
        head,
        problem,
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
    let store = match place.kind() {
        Kind::Local(root) => {
            let size = |path: &String| {
                let path = root.join(path);
                Ok(found(path.metadata(), &path, "look at the file")?
                    .map(|metadata| metadata.len()))
            };
            return paths.iter().map(size).collect();
        }
        Kind::Remote(store) => store,
    };
    let mut sizes = vec![None; paths.len()];
    let look = |index: usize| remote::size(store.clone(), paths[index].clone());
    let take = |index: usize, size: Option<u64>| {
        sizes[index] = size;
        Ok(())
    };
    remote::gather(paths.len(), look, take, interrupted)?;
    Ok(sizes)
}
