//! Atomic writes of objects as local files: readers see the whole object or none, also after a crash.

use crate::durable::{DurableError, HiddenFile, OpenFolder, sweep_folder_once};
use crate::error::{Result, StoreError};
use crate::local::meta::{describe, etag, write_error};
use crate::values::handle::StoreHandle;
use crate::values::meta::{ObjectMeta, PutMode};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// A write of an object in progress, in a hidden file that is published under the conditions of a store.
#[derive(Debug)]
pub(crate) struct ObjectWrite {
    key: String,
    uri: String,
    hidden: HiddenFile,
}

impl ObjectWrite {
    /// Creates the directories and the hidden file.
    pub(crate) fn create(handle: &StoreHandle, key: &str) -> Result<Self> {
        let (target, uri) = handle.locate(key);
        sweep_folder_once(&target);
        let hidden = HiddenFile::create(&target)
            .map_err(|failed| write_error(&uri, failed.action, &failed.error))?;
        Ok(Self {
            key: key.to_owned(),
            uri,
            hidden,
        })
    }

    /// Appends `data`.
    pub(crate) fn write(&mut self, data: &[u8]) -> Result<()> {
        self.hidden
            .file()
            .write_all(data)
            .map_err(|error| write_error(&self.uri, "write", &error))
    }

    /// Gives the file its final name under the condition `mode`; durable when this returns.
    pub(crate) fn publish(self, mode: &PutMode) -> Result<ObjectMeta> {
        let failed = |doing: &'static str| {
            let uri = self.uri.clone();
            move |error: io::Error| write_error(&uri, doing, &error)
        };
        let file = self.hidden.file();
        file.sync_all().map_err(failed("sync"))?;
        let target = self.hidden.target();
        let folder = OpenFolder::open(target.parent().unwrap_or(Path::new("/")))
            .map_err(|failed| self.failed(&failed))?;
        match mode {
            PutMode::Overwrite => self.hidden.replace().map_err(failed("rename to"))?,
            PutMode::Create => {
                let action = "link to (the file system must support hard links)";
                if !self.hidden.link_as_new().map_err(failed(action))? {
                    let uri = self.uri.clone();
                    return Err(StoreError::Exists { uri });
                }
            }
            PutMode::Match(expected) => self.replace(&folder, expected)?,
        }
        folder.sync().map_err(|failed| self.failed(&failed))?;
        describe(
            &self.key,
            &self.uri,
            &file.metadata().map_err(failed("look at"))?,
        )
    }

    fn failed(&self, failed: &DurableError) -> StoreError {
        write_error(&self.uri, failed.action, &failed.error)
    }

    /// Compares and renames under the directory's lock, which every conditional write takes.
    fn replace(&self, folder: &OpenFolder, expected: &str) -> Result<()> {
        let _lock = folder.lock().map_err(|failed| self.failed(&failed))?;
        let actual = fs::metadata(self.hidden.target())
            .map_or_else(|_| "(none)".to_owned(), |metadata| etag(&metadata));
        if actual != expected {
            return Err(StoreError::Changed {
                uri: self.uri.clone(),
                expected: expected.to_owned(),
                actual,
            });
        }
        self.hidden
            .replace()
            .map_err(|error| write_error(&self.uri, "rename to", &error))
    }
}
