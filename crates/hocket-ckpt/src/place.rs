//! Where a checkpoint is, and the small questions that are asked of it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::error::{CkptError, Result};
use crate::pace::Interrupted;

/// A folder or an object prefix.
#[derive(Debug, Clone)]
pub struct Place {
    uri: String,
    root: PathBuf,
}

impl Place {
    /// Parses a URI; no I/O.
    ///
    /// # Errors
    /// `Invalid` for a scheme that is not known.
    pub fn open(uri: &str) -> Result<Self> {
        let path = match uri.split_once("://") {
            None => uri,
            Some(("file", path)) => path,
            Some((scheme, _)) => {
                return Err(CkptError::Invalid(format!(
                    "`{uri}`: no store speaks `{scheme}://`; expected a path or `file://`"
                )));
            }
        };
        if path.is_empty() {
            return Err(CkptError::Invalid(format!("`{uri}` names no folder")));
        }
        Ok(Self {
            uri: uri.to_owned(),
            root: PathBuf::from(path),
        })
    }

    /// The URI as it was given.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The place of a child.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self {
            uri: format!("{}/{name}", self.uri.trim_end_matches('/')),
            root: self.root.join(name),
        }
    }

    /// At most the first `limit` bytes of a file; none where it is not there.
    pub(crate) fn get_start(
        &self,
        key: &str,
        limit: u64,
        _interrupted: Interrupted<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let path = self.root.join(key);
        let mut bytes = Vec::new();
        let mut read = || File::open(&path)?.take(limit).read_to_end(&mut bytes);
        found(read(), &path, "read the file").map(|read| read.map(|_| bytes))
    }

    /// Bytes of a file; none where it is not there.
    pub(crate) fn size(&self, key: &str, _interrupted: Interrupted<'_>) -> Result<Option<u64>> {
        let path = self.root.join(key);
        Ok(found(path.metadata(), &path, "look at the file")?.map(|metadata| metadata.len()))
    }

    /// Whether data files of ours are there.
    pub(crate) fn has_data(&self, _interrupted: Interrupted<'_>) -> Result<bool> {
        let path = self.root.join("data");
        let look = || -> io::Result<bool> {
            for entry in path.read_dir()? {
                if Path::new(&entry?.file_name())
                    .extension()
                    .is_some_and(|extension| extension == "safetensors")
                {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        Ok(found(look(), &path, "list the folder")?.unwrap_or(false))
    }

    /// Names of the folders in this one.
    ///
    /// # Errors
    /// `NotFound` where there is no such folder.
    pub(crate) fn folders(&self, _interrupted: Interrupted<'_>) -> Result<Vec<String>> {
        let look = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in self.root.read_dir()? {
                let entry = entry?;
                if entry.path().is_dir() {
                    names.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
            Ok(names)
        };
        found(look(), &self.root, "list the folder")?.ok_or_else(|| CkptError::NotFound {
            uri: self.uri.clone(),
            reason: "there is no such folder".to_owned(),
        })
    }
}

/// None where there is no such file.
fn found<T>(result: io::Result<T>, path: &Path, action: &str) -> Result<Option<T>> {
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
