//! Listing of the checkpoints under a prefix.

use crate::error::Result;
use crate::manifest::{ManifestHead, decode_head, digest_at_end};
use crate::place::CheckpointPlace;
use crate::place::files::{FileEnds, FolderPeek};
use crate::workers::Interrupted;

/// The status of a child of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointStatus {
    /// A manifest exists and can be read.
    Committed,
    /// Data files of Hocket without a manifest.
    Partial,
    /// Neither a manifest nor data files of Hocket.
    Foreign,
}

/// A child of a prefix.
#[derive(Debug, Clone)]
pub struct ListedCheckpoint {
    /// Its name below the prefix.
    pub name: String,
    /// Its status.
    pub status: CheckpointStatus,
    /// The head of its manifest, if it is committed.
    pub head: Option<ManifestHead>,
    /// The reason why it counts as foreign although it has a manifest.
    pub problem: Option<String>,
}

/// Lists the children of a prefix: first the uncommitted by name, then the committed by step, creation time and
/// name.
///
/// # Errors
/// `NotFound` if the prefix does not exist, and errors of the disk or the store.
pub fn list(
    place: &CheckpointPlace,
    interrupted: Interrupted<'_>,
) -> Result<Vec<ListedCheckpoint>> {
    let names = place.files().folders(interrupted)?;
    let children = names.iter().map(|name| place.child(name));
    let children = children.collect::<Result<Vec<_>>>()?;
    let looks = place.files().peek(&names, interrupted)?;
    let looks = names.into_iter().zip(&children).zip(looks);
    let mut listed: Vec<ListedCheckpoint> = looks
        .map(|((name, child), look)| judge(child, name, look))
        .collect();
    listed.sort_by(|a, b| {
        let key = |one: &ListedCheckpoint| {
            one.head
                .as_ref()
                .map(|head| (head.step, head.created.clone()))
        };
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
    Ok(listed)
}

fn judge(place: &CheckpointPlace, name: String, look: FolderPeek) -> ListedCheckpoint {
    let head_of = |ends: FileEnds| {
        let (head, _, _) = decode_head(&ends.start, place.uri())?;
        // A manifest that was cut behind its head would be taken for a whole one.
        digest_at_end(&ends.end, place.uri()).map(|_| head)
    };
    let (status, head, problem) = match look.manifest.map(head_of) {
        Some(Ok(head)) => (CheckpointStatus::Committed, Some(head), None),
        Some(Err(error)) => (CheckpointStatus::Foreign, None, Some(error.to_string())),
        None if look.problem.is_some() => (CheckpointStatus::Foreign, None, look.problem),
        None if look.has_data => (CheckpointStatus::Partial, None, None),
        None => (CheckpointStatus::Foreign, None, None),
    };
    ListedCheckpoint {
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
    place: &CheckpointPlace,
    paths: &[String],
    interrupted: Interrupted<'_>,
) -> Result<Vec<Option<u64>>> {
    place.files().sizes(paths, interrupted)
}
