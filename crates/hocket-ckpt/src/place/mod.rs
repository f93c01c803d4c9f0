//! The place of a checkpoint: a folder on a disk or a prefix in an object store.

pub(crate) mod blob;
pub(crate) mod files;
pub(crate) mod folder;
pub(crate) mod leftovers;
mod prefix;
mod remote;

use std::path::Path;
use std::sync::Arc;

use hocket_store::{Store, StoreOptions};

use crate::error::{CkptError, Result};
use files::PlaceFiles;
use folder::FolderPlace;
use prefix::PrefixPlace;

/// A folder or an object prefix. It holds no client and may be kept across a fork.
#[derive(Debug, Clone)]
pub struct CheckpointPlace {
    files: Arc<dyn PlaceFiles>,
    is_remote: bool,
    is_whole: bool,
}

impl CheckpointPlace {
    /// Parses a URI or a path; does no I/O.
    ///
    /// # Errors
    /// `Invalid` for an unknown scheme.
    pub fn open(uri: &str) -> Result<Self> {
        let store = Store::open(uri, StoreOptions::default())?;
        let root = store.local_root().map(Path::to_path_buf);
        let (is_remote, is_whole) = (root.is_none(), store.is_whole());
        let files: Arc<dyn PlaceFiles> = match root {
            Some(root) => Arc::new(FolderPlace::new(uri, &root, &store)),
            None => Arc::new(PrefixPlace::new(uri, store)),
        };
        Ok(Self {
            files,
            is_remote,
            is_whole,
        })
    }

    /// Returns whether this is a whole bucket or repository, so that it is no file.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Returns whether this is an object prefix.
    pub(crate) fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// Returns the URI as it was given.
    #[must_use]
    pub fn uri(&self) -> &str {
        self.files.uri()
    }

    pub(crate) fn files(&self) -> &dyn PlaceFiles {
        &*self.files
    }

    /// Returns the place of a child.
    pub(crate) fn child(&self, name: &str) -> Result<Self> {
        Self::open(&format!("{}/{name}", self.uri().trim_end_matches('/')))
    }

    /// Builds the error that nothing exists here.
    pub(crate) fn not_found(&self, reason: impl Into<String>) -> CkptError {
        CkptError::not_found(self.uri(), reason)
    }
}
