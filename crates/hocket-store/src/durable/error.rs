//! The error of a failed system call on a local file.

use std::io;
use std::path::{Path, PathBuf};

/// The result of an operation on durable files.
pub type Result<T> = std::result::Result<T, DurableError>;

/// A failed system call.
#[derive(Debug, thiserror::Error)]
#[error("`{}`: cannot {action}: {error}", path.display())]
pub struct DurableError {
    /// The file or folder.
    pub path: PathBuf,
    /// The action that failed, as an imperative verb with its object.
    pub action: &'static str,
    /// The system's error.
    #[source]
    pub error: io::Error,
}

impl DurableError {
    /// Returns a function that builds the error of `action` on `path`, for `map_err`.
    pub fn of<E: Into<io::Error>>(path: &Path, action: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self {
            path: path.to_owned(),
            action,
            error: error.into(),
        }
    }
}
