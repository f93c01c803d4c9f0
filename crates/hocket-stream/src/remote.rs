//! Where shards come from: a data set's folder in an object store.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::error::{Result, StreamError};

/// The remote side of a data set.
#[derive(Clone, Debug)]
pub struct Remote {
    root: PathBuf,
}

impl Remote {
    /// The data set at `uri`; no request is made.
    ///
    /// # Errors
    /// The store's errors for a URI it does not know.
    pub fn open(uri: &str) -> Result<Self> {
        Ok(Self { root: uri.into() })
    }

    /// The full URI of one of its objects.
    pub fn object_uri(&self, key: &str) -> String {
        self.root.join(key).display().to_string()
    }

    /// An object's bytes, or `None` where there is none.
    ///
    /// # Errors
    /// The store's errors; [`StreamError::Closed`] once `stop` is set.
    pub fn get(&self, key: &str, _stop: &AtomicBool) -> Result<Option<Vec<u8>>> {
        let path = self.root.join(key);
        match fs::read(&path) {
            Ok(data) => Ok(Some(data)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StreamError::io(&path, "read", &error)),
        }
    }

    /// Writes an object into the file `into`; whether there is one.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn download(&self, key: &str, into: &Path, stop: &AtomicBool) -> Result<bool> {
        let Some(data) = self.get(key, stop)? else {
            return Ok(false);
        };
        fs::write(into, data).map_err(|e| StreamError::io(into, "write", &e))?;
        Ok(true)
    }
}
