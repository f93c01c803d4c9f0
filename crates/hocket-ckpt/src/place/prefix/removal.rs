//! Discovery and removal of objects and of unfinished uploads.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::PrefixPlace;
use crate::error::Result;
use crate::format::names::{save_of, save_of_probe};
use crate::manifest::MANIFEST_NAME;
use crate::place::files::{CheckpointToRemove, PlaceCleanup};
use crate::place::leftovers::{LeftoverItem, LeftoverKind};
use crate::place::remote;
use crate::workers::Interrupted;

impl PlaceCleanup for PrefixPlace {
    fn delete(&self, doomed: CheckpointToRemove, interrupted: Interrupted<'_>) -> Result<bool> {
        // No service compares a version when it deletes; the manifest was read just before.
        let handle = self.store.clone();
        let begin = async move { Ok(handle.delete(MANIFEST_NAME).await?) };
        remote::wait(begin, interrupted)?;
        let paths: Vec<String> = doomed.paths.into_iter().collect();
        self.delete_files(&paths, interrupted)?;
        Ok(true)
    }

    fn delete_files(&self, paths: &[String], interrupted: Interrupted<'_>) -> Result<()> {
        let remove = |index: usize| {
            let (store, key) = (self.store.clone(), paths[index].clone());
            async move { Ok(store.delete(&key).await?) }
        };
        remote::gather(paths.len(), remove, |_, ()| Ok(()), interrupted)
    }

    fn garbage(&self, interrupted: Interrupted<'_>) -> Result<Vec<LeftoverItem>> {
        let store = self.store.clone();
        let look = async move {
            let mut objects = store.list_dirs("").await?.objects;
            objects.extend(store.list_dirs("data").await?.objects);
            Ok(objects)
        };
        let found = remote::wait(look, interrupted)?
            .into_iter()
            .filter_map(|object| {
                let changed = at_ms(object.modified_ms);
                if let Some(name) = object.key.strip_prefix("data/") {
                    return LeftoverItem::data_file(name, object.size, changed);
                }
                let save = save_of_probe(&object.key)?;
                Some(LeftoverItem::new(
                    object.key.as_str(),
                    LeftoverKind::Probe,
                    save,
                    object.size,
                    changed,
                ))
            });
        Ok(found.collect())
    }

    fn garbage_beside(
        &self,
        interrupted: Interrupted<'_>,
    ) -> Result<BTreeMap<String, Vec<LeftoverItem>>> {
        let store = self.store.clone();
        let uploads = remote::wait(async move { Ok(store.list_uploads().await?) }, interrupted)?;
        let mut by_name: BTreeMap<String, Vec<LeftoverItem>> = BTreeMap::new();
        for upload in uploads {
            if let Some((name, path)) = upload.key.split_once('/')
                && let Some(save) = path.strip_prefix("data/").and_then(save_of)
            {
                let begun = at_ms(upload.initiated_ms);
                by_name
                    .entry(name.to_owned())
                    .or_default()
                    .push(LeftoverItem {
                        upload: Some(upload.id.clone()),
                        ..LeftoverItem::new(path, LeftoverKind::Upload, save, 0, begun)
                    });
            }
        }
        Ok(by_name)
    }

    fn sweep(
        &self,
        waste: &[(LeftoverItem, Duration)],
        _is_partial: bool,
        interrupted: Interrupted<'_>,
    ) -> Result<()> {
        let others: Vec<_> = waste
            .iter()
            .filter(|(one, _)| matches!(one.waste, LeftoverKind::Upload | LeftoverKind::Probe))
            .map(|(one, _)| (one.path.clone(), one.upload.clone()))
            .collect();
        let end = |index: usize| {
            let (store, (key, upload)) = (self.store.clone(), others[index].clone());
            async move {
                match upload {
                    Some(id) => Ok(store.abort_upload(&key, &id).await?),
                    None => Ok(store.delete(&key).await?),
                }
            }
        };
        remote::gather(others.len(), end, |_, ()| Ok(()), interrupted)
    }
}

fn at_ms(milliseconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}
