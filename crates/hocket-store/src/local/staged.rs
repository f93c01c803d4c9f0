//! Atomic writes of local files: data goes to a hidden file beside the target, which is renamed when complete.
//! Readers see the whole file or none, also after a crash.

use crate::durable::{DurableError, OpenFolder, create_hidden, link_as_new, sweep_folder_once};
use crate::error::{Result, StoreError};
use crate::local::meta::{describe, etag, write_error};
use crate::values::handle::StoreHandle;
use crate::values::meta::{ObjectMeta, PutMode};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A write in progress, in a hidden file beside its target. Dropping it unpublished removes the hidden file.
#[derive(Debug)]
pub(crate) struct HiddenFile {
    key: String,
    uri: String,
    target: PathBuf,
    hidden: PathBuf,
    file: File,
    is_published: bool,
}

impl HiddenFile {
    /// Creates the directories and the hidden file.
    pub(crate) fn create(handle: &StoreHandle, key: &str) -> Result<Self> {
        let (target, uri) = handle.locate(key);
        sweep_folder_once(&target);
        let (hidden, file) = create_hidden(&target)
            .map_err(|failed| write_error(&uri, failed.action, &failed.error))?;
        Ok(Self {
            key: key.to_owned(),
            uri,
            target,
            hidden,
            file,
            is_published: false,
        })
    }

    /// Appends `data`.
    pub(crate) fn write(&mut self, data: &[u8]) -> Result<()> {
        self.file
            .write_all(data)
            .map_err(|error| write_error(&self.uri, "write", &error))
    }

    /// Gives the file its final name under the condition `mode`; durable when this returns.
    pub(crate) fn publish(mut self, mode: &PutMode) -> Result<ObjectMeta> {
        let failed = |doing: &'static str| {
            let uri = self.uri.clone();
            move |error: io::Error| write_error(&uri, doing, &error)
        };
        self.file.sync_all().map_err(failed("sync"))?;
        let folder = OpenFolder::open(self.target.parent().unwrap_or(Path::new("/")))
            .map_err(|failed| self.failed(&failed))?;
        match mode {
            PutMode::Overwrite => {
                fs::rename(&self.hidden, &self.target).map_err(failed("rename to"))?
            }
            PutMode::Create => {
                let action = "link to (the file system must support hard links)";
                if !link_as_new(&self.hidden, &self.target).map_err(failed(action))? {
                    let uri = self.uri.clone();
                    return Err(StoreError::Exists { uri });
                }
            }
            PutMode::Match(expected) => self.replace(&folder, expected)?,
        }
        self.is_published = true;
        folder.sync().map_err(|failed| self.failed(&failed))?;
        describe(
            &self.key,
            &self.uri,
            &self.file.metadata().map_err(failed("look at"))?,
        )
    }

    fn failed(&self, failed: &DurableError) -> StoreError {
        write_error(&self.uri, failed.action, &failed.error)
    }

    /// Compares and renames under the directory's lock, which every conditional write takes.
    fn replace(&self, folder: &OpenFolder, expected: &str) -> Result<()> {
        let _lock = folder.lock().map_err(|failed| self.failed(&failed))?;
        let actual = fs::metadata(&self.target)
            .map_or_else(|_| "(none)".to_owned(), |metadata| etag(&metadata));
        if actual != expected {
            return Err(StoreError::Changed {
                uri: self.uri.clone(),
                expected: expected.to_owned(),
                actual,
            });
        }
        fs::rename(&self.hidden, &self.target)
            .map_err(|error| write_error(&self.uri, "rename to", &error))
    }
}

impl Drop for HiddenFile {
    fn drop(&mut self) {
        if !self.is_published {
            let _ = fs::remove_file(&self.hidden);
        }
    }
}
