//! The errors of data sets, named by what the caller does about them.

use std::path::Path;

use hocket_store::{StoreError, io_reason};

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, StreamError>;

/// A failure to read, check or write a data set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The data set has no `index.json`.
    #[error(
        "there is no index at `{uri}`: expected the `index.json` of an MDS data set; check the location and `split`"
    )]
    IndexNotFound {
        /// The location that was looked up.
        uri: String,
    },
    /// The index exists but is invalid.
    #[error(
        "the index `{origin}` is not valid: {reason}; restore it from its source or write the data set again"
    )]
    IndexCorrupt {
        /// The index's URI or path.
        origin: String,
        /// The value found and the one expected.
        reason: String,
    },
    /// A shard of the index is neither in the cache nor in the remote.
    #[error(
        "shard `{shard}` was not found at `{uri}`; restore the missing file or write the data set again"
    )]
    ShardNotFound {
        /// The shard's base name in the index.
        shard: String,
        /// The URI or path that was tried last.
        uri: String,
    },
    /// A shard's bytes do not match the index.
    #[error(
        "shard `{shard}` is corrupt: `{object}` has {actual}, expected {expected}; restore it from its source or write the data set again"
    )]
    ShardCorrupt {
        /// The shard's base name in the index.
        shard: String,
        /// The path or URI of the wrong bytes.
        object: String,
        /// The content that the index or the format requires.
        expected: String,
        /// The content found.
        actual: String,
    },
    /// The bytes of a sample do not match its columns, although the shard matches the index.
    #[error(
        "sample {sample} of shard `{shard}` is corrupt: in `{object}` it has {actual}, expected {expected}; write the data set again, or pass `on_bad_sample='replace'`"
    )]
    SampleCorrupt {
        /// The sample's number in the shard.
        sample: u32,
        /// The shard's base name in the index.
        shard: String,
        /// The path or URI of the shard.
        object: String,
        /// The content that the format requires.
        expected: String,
        /// The content found.
        actual: String,
    },
    /// An argument, or a feature of the data set, that is not supported.
    #[error("{message}")]
    Config {
        /// The value, what was expected, and the remedy.
        message: String,
    },
    /// A file that was to be created exists.
    #[error(
        "`{path}` exists already, because another writer appends to this data set; run one writer after the other"
    )]
    Exists {
        /// The path of the file.
        path: String,
    },
    /// An error of the local file system.
    #[error("`{path}`: {reason}")]
    Io {
        /// The path of the file or folder.
        path: String,
        /// The operation that failed, and the system's message.
        reason: String,
    },
    /// An unfinished file was removed, with its folder or alone, while it was being written.
    #[error(
        "`{path}` was removed while it was being written; keep other programs from deleting files in this folder"
    )]
    Removed {
        /// The path of the unfinished file.
        path: String,
    },
    /// An error of the object store, passed on unchanged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The reader was closed while it waited.
    #[error("the reader was closed")]
    Closed,
}

impl StreamError {
    /// Builds a configuration error with this message.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config {
            message: message.into(),
        }
    }

    /// Builds the error of an unfinished file that was removed.
    pub(crate) fn removed(path: &Path) -> Self {
        Self::Removed {
            path: path.display().to_string(),
        }
    }

    /// Builds the error of a failed call on a local path.
    pub fn io(path: &Path, doing: &str, error: &std::io::Error) -> Self {
        Self::Io {
            path: path.display().to_string(),
            reason: io_reason(&format!("could not {doing}"), error),
        }
    }
}
