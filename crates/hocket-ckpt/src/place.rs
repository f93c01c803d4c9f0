//! Where a checkpoint is, and the small questions that are asked of it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hocket_store::{Store, StoreError, StoreOptions};

use crate::error::{CkptError, Result};
use crate::leftover;
use crate::pace::Interrupted;
use crate::remote;

/// A folder or an object prefix. A handle: it holds no client and may be kept across a fork.
#[derive(Debug, Clone)]
pub struct Place {
    uri: String,
    store: Store,
}

/// How a place is reached.
pub(crate) enum Kind<'a> {
    /// A folder, by system calls of our own: aligned, direct, linked.
    Local(&'a Path),
    /// An object store.
    Remote(&'a Store),
}

impl Place {
    /// Parses a URI or a path; no I/O.
    ///
    /// # Errors
    /// `Invalid` for a scheme that is not known.
    pub fn open(uri: &str) -> Result<Self> {
        let store = Store::open(uri, StoreOptions::default())?;
        Ok(Self {
            uri: uri.to_owned(),
            store,
        })
    }

    /// The URI as it was given.
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

    /// The place of a child.
    pub(crate) fn child(&self, name: &str) -> Result<Self> {
        Self::open(&format!("{}/{name}", self.uri.trim_end_matches('/')))
    }

    /// At most the first `limit` bytes of a file; none where it is not there.
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
        let mut read = || open_file(&path)?.take(limit).read_to_end(&mut bytes);
        found(read(), &path, "read the file").map(|read| read.map(|_| bytes))
    }

    /// Whether data files of ours are there, or nothing but the empty folder for them: a save that died before its first.
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

    /// Says that nothing is here.
    pub(crate) fn not_found(&self, reason: impl Into<String>) -> CkptError {
        CkptError::NotFound {
            uri: self.uri.clone(),
            reason: reason.into(),
        }
    }
}

/// Opens a file for reading; what is there and no regular file counts as not there. A pipe in its place makes nobody
/// wait.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let reason = "it is no regular file";
    Err(io::Error::new(io::ErrorKind::NotFound, reason))
}

/// None where there is no such file.
pub(crate) fn found<T>(result: io::Result<T>, path: &Path, action: &str) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(CkptError::io(path, action, &error)),
    }
}

/// None where there is no such object.
pub(crate) fn found_remote<T>(result: hocket_store::Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What the names of compressed data files end with.
pub(crate) const BLOCKS_SUFFIX: &str = ".blocks";

/// Whether a name ends as a data file's does.
fn is_data_file(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(BLOCKS_SUFFIX)
}

/// The save that a data file belongs to, the first 8 digits of its id, by the file's name; none where it is not ours.
pub(crate) fn save_of(name: &str) -> Option<&str> {
    let (save, rest) = name.split_once("-r")?;
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_ours = save.len() == 8
        && save.bytes().all(is_hex)
        && rest.starts_with(|c: char| c.is_ascii_digit())
        && is_data_file(rest);
    is_ours.then_some(save)
}

/// Whether a path inside a checkpoint is that of a data file of ours by its name, be it the hidden one of a file in the
/// making.
pub(crate) fn is_ours(path: &str) -> bool {
    let name = path.strip_prefix("data/");
    name.is_some_and(|name| save_of(leftover::name_of(name).unwrap_or(name)).is_some())
}

/// Whether `path` is a plain relative path below `data/`: what a data file may be called.
pub(crate) fn is_data_path(path: &str) -> bool {
    path.len() <= 1024 && path.starts_with("data/") && path.split('/').all(is_plain_name)
}

/// Whether `name` is one plain path component.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name != "."
        && name != ".."
        && !name
            .chars()
            .any(|c| c == '/' || c == '\\' || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_file_of_ours_is_told_by_its_save_and_its_rank() {
        for good in [
            "data/0badc0de-r00000-000.safetensors",
            "data/0badc0de-r12-1.blocks",
        ] {
            assert!(is_ours(good), "{good}");
        }
        for bad in [
            "data/model.safetensors",
            "data/model-r00000.safetensors",
            "data/0badc0de-rank0.safetensors",
            "data/0badc0de-r00000-000.bin",
            "0badc0de-r00000-000.safetensors",
        ] {
            assert!(!is_ours(bad), "{bad}");
        }
    }

    #[test]
    fn only_plain_paths_below_data_are_data_files() {
        for good in ["data/a.safetensors", "data/x/y"] {
            assert!(is_data_path(good), "{good}");
        }
        for bad in [
            "",
            "a",
            "/data/a",
            "data/",
            "data/../a",
            "data//a",
            "data/./a",
            "data/a\\b",
            "data/a\n",
            "../data/a",
        ] {
            assert!(!is_data_path(bad), "{bad}");
        }
    }
}
