//! Garbage collection of the files of unfinished or replaced saves and of unfinished conversions.
//!
//! The order of operations protects committed data: files are listed first and the manifest is read afterwards,
//! so the manifest names everything committed by then. A save that commits later is still running and therefore
//! has files younger than the minimum age.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, SystemTime};

use super::remove::delete_files;
use crate::checkpoint::head::{read_head, read_manifest};
use crate::error::{CkptError, Result};
use crate::manifest::DecodedManifest;
use crate::place::CheckpointPlace;
use crate::place::leftovers::{LeftoverItem, LeftoverKind};
use crate::workers::Interrupted;

/// An item that was or would be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GarbageFile {
    /// The checkpoint's name below the prefix; `.` for a file in the prefix itself.
    pub name: String,
    /// The file inside it.
    pub path: String,
    /// The kind of the item.
    pub waste: LeftoverKind,
    /// Size in bytes; 0 for an upload, whose parts are not counted.
    pub bytes: u64,
    /// Time since the last change to any file of its save.
    pub age: Duration,
}

/// The result of a collection.
#[derive(Debug, Clone, Default)]
pub struct GcReport {
    /// The items that were removed, or would be removed if `dry_run` is set.
    pub garbage: Vec<GarbageFile>,
    /// Checkpoints that were skipped because they cannot be read or changed, each with the reason.
    pub skipped: Vec<(String, String)>,
}

/// Removes the items under a prefix that no checkpoint needs and no running save can still use.
///
/// Removes data files that their folder's manifest does not name, temporary manifests, probes, hidden files of
/// conversions, and unfinished uploads, if the youngest file of their save is at least `min_age` old. Files not
/// written by Hocket are never touched.
///
/// # Errors
/// `NotFound` if the prefix does not exist, and errors of the disk or the store.
pub fn gc(
    place: &CheckpointPlace,
    min_age: Duration,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<GcReport> {
    let mut beside = place.files().garbage_beside(interrupted)?;
    let outside = beside.remove(".").unwrap_or_default();
    let mut names = match place.files().folders(interrupted) {
        Err(CkptError::NotFound { .. }) if !beside.is_empty() => Vec::new(),
        names => names?,
    };
    names.extend(
        beside
            .keys()
            .filter(|name| !names.contains(name))
            .cloned()
            .collect::<Vec<_>>(),
    );
    let mut collection = GcRun {
        min_age,
        dry_run,
        now: SystemTime::now(),
        collected: GcReport::default(),
    };
    let waste = collection.choose(outside, None);
    let taken = collection.take(place, ".", waste, false, interrupted);
    collection.skip_failed(".", taken)?;
    for name in names {
        let uploads = beside.remove(&name).unwrap_or_default();
        let visited = collection.visit(&place.child(&name)?, &name, uploads, interrupted);
        collection.skip_failed(&name, visited)?;
    }
    Ok(collection.collected)
}

/// A collection in progress.
struct GcRun {
    min_age: Duration,
    dry_run: bool,
    now: SystemTime,
    collected: GcReport,
}

impl GcRun {
    /// Examines one checkpoint, and the unfinished uploads to it.
    fn visit(
        &mut self,
        child: &CheckpointPlace,
        name: &str,
        uploads: Vec<LeftoverItem>,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let mut found = child.files().garbage(interrupted)?;
        found.extend(uploads);
        if found.is_empty() {
            return Ok(());
        }
        let committed =
            if_committed(read_manifest(child, interrupted))?.map(DecodedManifest::data_paths);
        let waste = self.choose(found, committed.as_ref());
        let is_partial = committed.is_none();
        // A manifest published during the scan shows a running save; the next collection handles the rest.
        if is_partial && !waste.is_empty() && if_committed(read_head(child, interrupted))?.is_some()
        {
            return Ok(());
        }
        self.take(child, name, waste, is_partial, interrupted)
    }

    /// Goes on after the failure of one checkpoint that cannot be read or changed, and keeps the reason.
    fn skip_failed(&mut self, name: &str, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if error.is_of_one_checkpoint() => {
                self.collected
                    .skipped
                    .push((name.to_owned(), error.to_string()));
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Selects the items to remove, each with the age of its save. A young file protects all files of its save,
    /// and so does a file that is being written, whatever the minimum age.
    fn choose(
        &self,
        found: Vec<LeftoverItem>,
        committed: Option<&HashSet<String>>,
    ) -> Vec<(LeftoverItem, Duration)> {
        let held: HashSet<String> = found
            .iter()
            .filter(|one| one.is_held)
            .map(|one| one.save.clone())
            .collect();
        let mut youngest: BTreeMap<String, Duration> = BTreeMap::new();
        for one in &found {
            // A time in the future, from a clock ahead of this machine's, counts as age 0.
            let age = self
                .now
                .duration_since(one.changed)
                .unwrap_or(Duration::ZERO);
            let least = youngest.entry(one.save.clone()).or_insert(age);
            *least = age.min(*least);
        }
        let mut chosen: Vec<_> = found
            .into_iter()
            .filter(|one| committed.is_none_or(|paths| !paths.contains(&one.path)))
            .filter(|one| !held.contains(&one.save))
            .filter_map(|one| {
                let age = youngest.get(&one.save).copied().unwrap_or_default();
                (age >= self.min_age).then_some((one, age))
            })
            .collect();
        chosen.sort_by(|(a, _), (b, _)| {
            (&a.path, a.waste, &a.upload).cmp(&(&b.path, b.waste, &b.upload))
        });
        chosen
    }

    /// Removes the selected items and records them.
    fn take(
        &mut self,
        place: &CheckpointPlace,
        name: &str,
        waste: Vec<(LeftoverItem, Duration)>,
        is_partial: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        if !self.dry_run && !waste.is_empty() {
            sweep(place, &waste, is_partial, interrupted)?;
        }
        let garbage = waste.into_iter().map(|(one, age)| GarbageFile {
            name: name.to_owned(),
            path: one.path,
            waste: one.waste,
            bytes: one.bytes,
            age,
        });
        self.collected.garbage.extend(garbage);
        Ok(())
    }
}

/// Maps a missing manifest to none. After any other error, a manifest may exist.
fn if_committed<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(manifest) => Ok(Some(manifest)),
        Err(CkptError::Partial { .. } | CkptError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn sweep(
    place: &CheckpointPlace,
    waste: &[(LeftoverItem, Duration)],
    is_partial: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let files: Vec<String> = waste
        .iter()
        .filter(|(one, _)| one.waste == LeftoverKind::File)
        .map(|(one, _)| one.path.clone())
        .collect();
    if !files.is_empty() {
        delete_files(place, &files, interrupted)?;
    }
    place.files().sweep(waste, is_partial, interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_manifest_counts_as_none() {
        let uri = || "run/one".to_owned();
        assert!(matches!(if_committed(Ok(())), Ok(Some(()))));
        for missing in [
            CkptError::not_found("run/one", "nothing"),
            CkptError::Partial { uri: uri() },
        ] {
            assert!(matches!(if_committed::<()>(Err(missing)), Ok(None)));
        }
        let reason = || "cannot read".to_owned();
        for other in [
            CkptError::Interrupted,
            CkptError::process(reason()),
            CkptError::bad_manifest("run/one", reason()),
            CkptError::Incompatible {
                uri: uri(),
                reason: reason(),
            },
        ] {
            assert!(if_committed::<()>(Err(other)).is_err());
        }
    }
}
