//! Listing of the checkpoints under a prefix.

use std::io;

use crate::error::{CkptError, Result};
use crate::local_file::found;
use crate::location::{Kind, Location};
use crate::manifest::{HEAD_BYTES, Head, MANIFEST_NAME, decode_head};
use crate::remote;
use crate::workers::Interrupted;

/// The status of a child of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// A manifest exists and can be read.
    Committed,
    /// Data files of Hocket without a manifest.
    Partial,
    /// Neither of the two.
    Foreign,
}

/// A child of a prefix.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its name below the prefix.
    pub name: String,
    /// Its status.
    pub status: Status,
    /// The head of its manifest, if it is committed.
    pub head: Option<Head>,
    /// Why it counts as foreign although it has a manifest.
    pub problem: Option<String>,
}

/// Lists the children of a prefix: first the uncommitted by name, then the committed by step, creation time and
/// name.
///
/// # Errors
/// `NotFound` if the prefix does not exist, and errors of the disk or the store.
pub fn list(location: &Location, interrupted: Interrupted<'_>) -> Result<Vec<Listed>> {
    let names = folders(location, interrupted)?;
    let mut listed = Vec::with_capacity(names.len());
    match location.kind() {
        Kind::Local(_) => {
            for name in names {
                listed.push(look(&location.child(&name)?, name, interrupted)?);
            }
        }
        Kind::Remote(_) => {
            let looks =
                |index: usize| look_remote(location.child(&names[index]), names[index].clone());
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

/// Returns the names of the folders under a prefix. Symbolic links are left out: they are second names of other
/// folders.
pub(crate) fn folders(location: &Location, interrupted: Interrupted<'_>) -> Result<Vec<String>> {
    match location.kind() {
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
                .ok_or_else(|| location.not_found("there is no such folder"))
        }
        Kind::Remote(store) => {
            let store = store.clone();
            let listing = remote::wait(async move { Ok(store.list_dirs("").await?) }, interrupted)?;
            if listing.dirs.is_empty() && listing.objects.is_empty() {
                return Err(location.not_found("nothing exists under this prefix"));
            }
            Ok(listing.dirs)
        }
    }
}

fn look(location: &Location, name: String, interrupted: Interrupted<'_>) -> Result<Listed> {
    let start = location.get_start(MANIFEST_NAME, HEAD_BYTES, interrupted)?;
    let has_data = start.is_none() && location.has_data(interrupted)?;
    Ok(judge(location, name, start, has_data))
}

async fn look_remote(location: Result<Location>, name: String) -> Result<Listed> {
    let location = location?;
    let Kind::Remote(store) = location.kind() else {
        return Err(CkptError::Invalid(format!(
            "`{name}` is not a valid object prefix"
        )));
    };
    let start = remote::get_start(store.clone(), MANIFEST_NAME.to_owned(), HEAD_BYTES).await?;
    let has_data = start.is_none() && remote::has_data(store.clone()).await?;
    Ok(judge(&location, name, start, has_data))
}

fn judge(location: &Location, name: String, start: Option<Vec<u8>>, has_data: bool) -> Listed {
    let (status, head, problem) = match start.map(|bytes| decode_head(&bytes, location.uri())) {
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

/// Returns the size of each file in bytes as visible to this process; none for a missing file.
///
/// # Errors
/// Errors of the disk or the store.
pub fn sizes(
    location: &Location,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<Vec<Option<u64>>> {
    let store = match location.kind() {
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
