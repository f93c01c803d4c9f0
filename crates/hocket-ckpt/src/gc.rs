//! Collecting what saves and conversions that never finished, or were replaced, left behind.
//!
//! The order of looking is what keeps a committed byte safe: files are listed first and the manifest is read after, so
//! whatever was committed by then is named by it. A save that commits later is still running, and so has files younger
//! than the least age.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::{Duration, SystemTime};

use hocket_store::Store;

use crate::durable::sync_folder;
use crate::error::{CkptError, Result};
use crate::list::folders;
use crate::manifest::{MANIFEST_NAME, data_paths, read_document, read_head};
use crate::pace::Interrupted;
use crate::place::{Kind, Place};
use crate::remote;
use crate::remove::{delete_files, remove};
use crate::traces::{Found, files_of, hidden_files, uploads_by_name};

/// What kind of thing is collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waste {
    /// A data file that no manifest names.
    File,
    /// An upload that was never finished.
    Upload,
    /// A manifest on its way that never came to its name.
    Manifest,
    /// A key on which a commit tried whether its store keeps writers apart.
    Probe,
    /// A file outside `data/` that a conversion to another format was writing, under its hidden name.
    Unfinished,
}

/// Something collected, or to be collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Garbage {
    /// The name of the checkpoint below the prefix; `.` for a file in the prefix itself.
    pub name: String,
    /// The file inside it.
    pub path: String,
    /// What it is.
    pub waste: Waste,
    /// Its bytes; 0 for an upload, whose parts nobody counts.
    pub bytes: u64,
    /// How long its save has been still.
    pub age: Duration,
}

/// What was found, and where nothing could be told.
#[derive(Debug, Clone, Default)]
pub struct Collected {
    /// What was removed; with `dry_run`, what would be.
    pub garbage: Vec<Garbage>,
    /// Checkpoints that were left alone, each with the reason: their manifest does not read.
    pub skipped: Vec<(String, String)>,
}

/// Removes what no checkpoint under a prefix needs and no running save can still want.
///
/// Taken are data files that their folder's manifest does not name, temporary manifests, probes, hidden files of
/// conversions, and unfinished uploads, if the youngest of their save is at least `min_age` old. Files that are not ours
/// are never touched.
///
/// # Errors
/// `NotFound` where there is no such prefix, and what the disk or the store says.
pub fn gc(
    place: &Place,
    min_age: Duration,
    dry_run: bool,
    interrupted: Interrupted<'_>,
) -> Result<Collected> {
    let mut uploads = uploads_by_name(place, interrupted)?;
    let mut names = match folders(place, interrupted) {
        Err(CkptError::NotFound { .. }) if !uploads.is_empty() => Vec::new(),
        names => names?,
    };
    names.extend(
        uploads
            .keys()
            .filter(|name| !names.contains(name))
            .cloned()
            .collect::<Vec<_>>(),
    );
    let mut collection = Collection {
        min_age,
        dry_run,
        now: SystemTime::now(),
        collected: Collected::default(),
    };
    if let Kind::Local(root) = place.kind() {
        // A conversion to a single file writes it beside the checkpoints.
        let waste = collection.choose(hidden_files(root)?, None);
        collection.take(place, ".", waste, false, interrupted)?;
    }
    for name in names {
        let uploads = uploads.remove(&name).unwrap_or_default();
        collection.visit(&place.child(&name)?, &name, uploads, interrupted)?;
    }
    Ok(collection.collected)
}

/// A collection under way.
struct Collection {
    min_age: Duration,
    dry_run: bool,
    now: SystemTime,
    collected: Collected,
}

impl Collection {
    /// Looks at one checkpoint, and at unfinished uploads to it.
    fn visit(
        &mut self,
        child: &Place,
        name: &str,
        uploads: Vec<Found>,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let mut found = files_of(child, interrupted)?;
        found.extend(uploads);
        if found.is_empty() {
            return Ok(());
        }
        let committed = match read_document(child, interrupted) {
            Ok(document) => Some(data_paths(&document, child.uri())?),
            Err(CkptError::Partial { .. } | CkptError::NotFound { .. }) => None,
            Err(error @ (CkptError::Corrupt { .. } | CkptError::Incompatible { .. })) => {
                self.collected
                    .skipped
                    .push((name.to_owned(), error.to_string()));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let waste = self.choose(found, committed.as_ref());
        let is_partial = committed.is_none();
        // A manifest that came while we looked says that somebody is at work here: the next collection will see.
        if is_partial && !waste.is_empty() && read_head(child, interrupted).is_ok() {
            return Ok(());
        }
        self.take(child, name, waste, is_partial, interrupted)
    }

    /// What may go, each with the age of its save. One young file keeps all of its save's, and so does one that is being
    /// written, whatever the least age is.
    fn choose(
        &self,
        found: Vec<Found>,
        committed: Option<&HashSet<String>>,
    ) -> Vec<(Found, Duration)> {
        let held: HashSet<String> = found
            .iter()
            .filter(|one| one.is_held)
            .map(|one| one.save.clone())
            .collect();
        let mut youngest: BTreeMap<String, Duration> = BTreeMap::new();
        for one in &found {
            // What comes from a clock that is ahead of ours is young.
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

    /// Removes what was chosen, and remembers it.
    fn take(
        &mut self,
        place: &Place,
        name: &str,
        waste: Vec<(Found, Duration)>,
        is_partial: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        if !self.dry_run && !waste.is_empty() {
            sweep(place, &waste, is_partial, interrupted)?;
        }
        let told = waste.into_iter().map(|(one, age)| Garbage {
            name: name.to_owned(),
            path: one.path,
            waste: one.waste,
            bytes: one.bytes,
            age,
        });
        self.collected.garbage.extend(told);
        Ok(())
    }
}

fn sweep(
    place: &Place,
    waste: &[(Found, Duration)],
    is_partial: bool,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let files: Vec<String> = waste
        .iter()
        .filter(|(one, _)| one.waste == Waste::File)
        .map(|(one, _)| one.path.clone())
        .collect();
    if !files.is_empty() {
        delete_files(place, &files, interrupted)?;
    }
    match place.kind() {
        Kind::Local(root) => sweep_folder(root, waste, is_partial),
        Kind::Remote(store) => sweep_prefix(store, waste, interrupted),
    }
}

/// Removes hidden files, and folders that are then empty; what is not ours stays, and so do they.
fn sweep_folder(root: &Path, waste: &[(Found, Duration)], is_partial: bool) -> Result<()> {
    let is_hidden = |waste: Waste| matches!(waste, Waste::Manifest | Waste::Unfinished);
    for (one, _) in waste.iter().filter(|(one, _)| is_hidden(one.waste)) {
        remove(&root.join(&one.path))?;
    }
    let data = root.join("data");
    let is_of_saves = waste.iter().any(|(one, _)| one.waste != Waste::Unfinished);
    if is_of_saves && std::fs::remove_dir(&data).is_ok() && is_partial {
        remove(&root.join(format!(".{MANIFEST_NAME}.lock")))?;
    }
    if is_partial {
        let _ = std::fs::remove_dir(root);
    }
    for folder in [data.as_path(), root] {
        if folder.is_dir() {
            sync_folder(folder)?;
        }
    }
    Ok(())
}

/// Ends uploads and removes probes.
fn sweep_prefix(
    store: &Store,
    waste: &[(Found, Duration)],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let others: Vec<_> = waste
        .iter()
        .filter(|(one, _)| matches!(one.waste, Waste::Upload | Waste::Probe))
        .map(|(one, _)| (one.path.clone(), one.upload.clone()))
        .collect();
    let end = |index: usize| {
        let (store, (key, upload)) = (store.clone(), others[index].clone());
        async move {
            match upload {
                Some(id) => Ok(store.abort_upload(&key, &id).await?),
                None => Ok(store.delete(&key).await?),
            }
        }
    };
    remote::gather(others.len(), end, |_, ()| Ok(()), interrupted)
}
