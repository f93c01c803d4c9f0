//! The location of a checkpoint, with simple queries on it.

use std::io::{self, Read};
use std::path::Path;

use hocket_store::durable::open_regular;
use hocket_store::{Store, StoreOptions};

use crate::error::{CkptError, Result};
use crate::file_names::is_ours;
use crate::local_file::found;
use crate::remote;
use crate::workers::Interrupted;

/// A folder or an object prefix. It holds no client and may be kept across a fork.
#[derive(Debug, Clone)]
pub struct Location {
    uri: String,
    store: Store,
}

/// The kind of access to a place.
pub(crate) enum Kind<'a> {
    /// A folder, through system calls (aligned, direct I/O, hard links).
    Local(&'a Path),
    /// An object store.
    Remote(&'a Store),
}

impl Location {
    /// Parses a URI or a path; does no I/O.
    ///
    /// # Errors
    /// `Invalid` for an unknown scheme.
    pub fn open(uri: &str) -> Result<Self> {
        let store = Store::open(uri, StoreOptions::default())?;
        Ok(Self {
            uri: uri.to_owned(),
            store,
        })
    }

    /// Returns the URI as it was given.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn kind(&self) -> Kind<'_> {
        match self.store.local_root() {
            Some(root) => Kind::Local(root),
            None => Kind::Remote(&self.store),
        }
    }

    /// Returns the place of a child.
    pub(crate) fn child(&self, name: &str) -> Result<Self> {
        Self::open(&format!("{}/{name}", self.uri.trim_end_matches('/')))
    }

    /// Reads at most the first `limit` bytes of a file; returns none if it does not exist.
    pub(crate) fn get_start(
        &self,
        key: &str,
        limit: u64,
        interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let root = match self.kind() {
            Kind::Local(root) => root,
            Kind::Remote(store) => {
                return remote::wait(
                    remote::get_start(store.clone(), key.to_owned(), limit),
                    interrupted,
                );
            }
        };
        let path = root.join(key);
        let mut bytes = Vec::new();
        let mut read = || open_regular(&path)?.take(limit).read_to_end(&mut bytes);
        found(read(), &path, "read the file").map(|read| read.map(|_| bytes))
    }

    /// Returns whether data files of Hocket exist, or only the empty folder for them, which a save leaves if it
    /// dies before its first file.
    pub(crate) fn has_data(&self, interrupted: Interrupted<'_>) -> Result<bool> {
        let root = match self.kind() {
            Kind::Local(root) => root,
            Kind::Remote(store) => {
                return remote::wait(remote::has_data(store.clone()), interrupted);
            }
        };
        let path = root.join("data");
        let look = || -> io::Result<bool> {
            let mut is_empty = true;
            for entry in path.read_dir()? {
                let name = entry?.file_name();
                if is_ours(&format!("data/{}", name.to_string_lossy())) {
                    return Ok(true);
                }
                is_empty = false;
            }
            Ok(is_empty && root.read_dir()?.count() == 1)
        };
        Ok(found(look(), &path, "list the folder")?.unwrap_or(false))
    }

    /// Builds the error that nothing exists here.
    pub(crate) fn not_found(&self, reason: impl Into<String>) -> CkptError {
        CkptError::NotFound {
            uri: self.uri.clone(),
            reason: reason.into(),
        }
    }
}
