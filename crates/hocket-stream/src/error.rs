//! What can go wrong with a data set, by what the caller does about it.

use std::path::Path;

use hocket_store::{StoreError, io_reason};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, StreamError>;

/// A failure to read, check or write a data set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// There is no `index.json` where the data set should be.
    #[error(
        "there is no index at `{uri}`: expected the `index.json` of an MDS data set; check the location and `split`"
    )]
    IndexNotFound {
        /// Where it was looked for.
        uri: String,
    },
    /// The index is there and cannot be trusted.
    #[error(
        "the index `{origin}` is not valid: {reason}; restore it from its source or write the data set again"
    )]
    IndexCorrupt {
        /// The index's URI or path.
        origin: String,
        /// The value found and the one expected.
        reason: String,
    },
    /// The index names a shard that is neither in the cache nor in the remote.
    #[error(
        "shard `{shard}` is not there: looked for `{uri}`; copy the missing file back or write the data set again"
    )]
    ShardNotFound {
        /// The shard's base name in the index.
        shard: String,
        /// The URI or path that was tried last.
        uri: String,
    },
    /// A shard's bytes are not those that the index promises.
    #[error(
        "shard `{shard}` is corrupt: `{object}` has {actual}, expected {expected}; restore it from its source or write the data set again"
    )]
    ShardCorrupt {
        /// The shard's base name in the index.
        shard: String,
        /// The path or URI whose bytes were wrong.
        object: String,
        /// What the index or the format asks for.
        expected: String,
        /// What was found.
        actual: String,
    },
    /// One sample's bytes are not of its columns, although the shard is what the index promises.
    #[error(
        "sample {sample} of shard `{shard}` is corrupt: in `{object}` it has {actual}, expected {expected}; write the data set again, or give `on_bad_sample='replace'`"
    )]
    SampleCorrupt {
        /// The sample's number in the shard.
        sample: u32,
        /// The shard's base name in the index.
        shard: String,
        /// The path or URI of the shard.
        object: String,
        /// What the format asks for.
        expected: String,
        /// What was found.
        actual: String,
    },
    /// An argument or a feature of the data set that this reader does not take.
    #[error("{message}")]
    Config {
        /// The value, what was expected and the remedy.
        message: String,
    },
    /// A file that was to be new is there.
    #[error(
        "`{path}` is there already: another writer appends to this data set; let one end before the next begins"
    )]
    Exists {
        /// The path of the file.
        path: String,
    },
    /// The local file system refused.
    #[error("`{path}`: {reason}")]
    Io {
        /// The path of the file or folder.
        path: String,
        /// What was tried and what the system answered.
        reason: String,
    },
    /// The object store failed; passed on as it came.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The reader was closed while it waited.
    #[error("the reader was closed")]
    Closed,
}

impl StreamError {
    /// A configuration error with this message.
    pub fn config(message: impl Into<String>) -> Self {
        Self::Config {
            message: message.into(),
        }
    }

    /// A failed call on a local path.
    pub fn io(path: &Path, doing: &str, error: &std::io::Error) -> Self {
        Self::Io {
            path: path.display().to_string(),
            reason: io_reason(&format!("could not {doing}"), error),
        }
    }
}
