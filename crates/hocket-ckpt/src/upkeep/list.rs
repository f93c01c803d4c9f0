//! Listing of the checkpoints under a prefix.

use crate::error::Result;
use crate::manifest::{Head, decode_head};
use crate::place::files::Peek;
use crate::place::location::Location;
use crate::workers::Interrupted;

/// The status of a child of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// A manifest exists and can be read.
    Committed,
    /// Data files of Hocket without a manifest.
    Partial,
    /// Neither a manifest nor data files of Hocket.
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
    /// The reason why it counts as foreign although it has a manifest.
    pub problem: Option<String>,
}

/// Lists the children of a prefix: first the uncommitted by name, then the committed by step, creation time and
/// name.
///
/// # Errors
/// `NotFound` if the prefix does not exist, and errors of the disk or the store.
pub fn list(location: &Location, interrupted: Interrupted<'_>) -> Result<Vec<Listed>> {
    let names = location.files().folders(interrupted)?;
    let children = names.iter().map(|name| location.child(name));
    let children = children.collect::<Result<Vec<_>>>()?;
    let looks = location.files().peek(&names, interrupted)?;
    let looks = names.into_iter().zip(&children).zip(looks);
    let mut listed: Vec<Listed> = looks
        .map(|((name, child), look)| judge(child, name, look))
        .collect();
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

fn judge(location: &Location, name: String, look: Peek) -> Listed {
    let (status, head, problem) = match look.start.map(|bytes| decode_head(&bytes, location.uri()))
    {
        Some(Ok((head, _, _))) => (Status::Committed, Some(head), None),
        Some(Err(error)) => (Status::Foreign, None, Some(error.to_string())),
        None if look.has_data => (Status::Partial, None, None),
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
    location.files().sizes(paths, interrupted)
}
