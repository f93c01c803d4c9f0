//! What can go wrong; each variant maps to one class of `hocket.ckpt.errors`.

use std::io;
use std::path::Path;

use hocket_store::{StoreError, io_reason};

/// The result of this crate's verbs.
pub type Result<T> = std::result::Result<T, CkptError>;

/// What can go wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    /// There is no such checkpoint or file.
    #[error("nothing found at `{uri}`: {reason}")]
    NotFound {
        /// What was looked for.
        uri: String,
        /// What was expected there and what to do.
        reason: String,
    },
    /// Data files without a manifest.
    #[error(
        "the checkpoint at `{uri}` was never committed: its data files are there, its manifest \
         `checkpoint.json.zst` is not, so the save did not finish. Load an earlier checkpoint \
         (`hocket-ckpt ls` on the folder above lists them); this one may be deleted"
    )]
    Partial {
        /// The checkpoint.
        uri: String,
    },
    /// Something that must not be replaced is there.
    #[error("`{uri}` exists already: {reason}")]
    Exists {
        /// What is there.
        uri: String,
        /// Whose it is and what to do.
        reason: String,
    },
    /// Bytes differ from what was written, or the manifest breaks a rule.
    #[error("{}", corrupt_message(uri, file.as_deref(), *offset, reason))]
    Corrupt {
        /// The checkpoint.
        uri: String,
        /// The data file inside it; none for the manifest.
        file: Option<String>,
        /// Where the bad block begins in the file's data.
        offset: Option<u64>,
        /// What was expected and what was found.
        reason: String,
    },
    /// Sound, but not for this reader.
    #[error("the checkpoint at `{uri}` cannot be read by this version: {reason}")]
    Incompatible {
        /// The checkpoint.
        uri: String,
        /// Which version reads it.
        reason: String,
    },
    /// A foreign file that asks for more than data.
    #[error(
        "file `{file}` of `{uri}` is refused: {reason}. Nothing of it was carried out. Where it comes from \
         somebody you trust, load it with the program that wrote it and save it as safetensors or with Hocket"
    )]
    Unsafe {
        /// The checkpoint.
        uri: String,
        /// The file inside it.
        file: String,
        /// What it asks for.
        reason: String,
    },
    /// The store does not honour conditional writes.
    #[error(
        "`{uri}`: this store lets a conditional write replace what is there, so two savers could \
         both believe that their checkpoint was committed. Use a store that honours \
         `If-None-Match: *`, or pass `unfenced=True` to `CheckpointStore`, `HocketWriter`, `convert` \
         or `reshard` (`--unfenced` to a command) if nothing else ever writes there"
    )]
    Unfenced {
        /// The checkpoint.
        uri: String,
    },
    /// The caller's arguments make no sense.
    #[error("{0}")]
    Invalid(String),
    /// The disk or the store failed.
    #[error(transparent)]
    Store(StoreError),
    /// The caller was interrupted; what was begun has been cleaned up.
    #[error("interrupted")]
    Interrupted,
}

impl CkptError {
    /// A failed system call on `path`; `action` is what was tried, as in "write".
    pub(crate) fn io(path: &Path, action: &str, error: &io::Error) -> Self {
        let uri = path.display().to_string();
        let reason = io_reason(&format!("cannot {action}"), error);
        Self::Store(match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                StoreError::Permission { uri, reason }
            }
            _ => StoreError::Io { uri, reason },
        })
    }

    /// Something of the process's own that was not to be had: a thread, memory.
    pub(crate) fn process(reason: impl Into<String>) -> Self {
        Self::Store(StoreError::Io {
            uri: "hocket-ckpt".to_owned(),
            reason: reason.into(),
        })
    }

    /// A manifest that breaks a rule.
    pub(crate) fn bad_manifest(uri: &str, reason: impl Into<String>) -> Self {
        Self::Corrupt {
            uri: uri.to_owned(),
            file: None,
            offset: None,
            reason: reason.into(),
        }
    }
}

impl From<StoreError> for CkptError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Interrupted => Self::Interrupted,
            StoreError::Config { message } => Self::Invalid(message),
            error => Self::Store(error),
        }
    }
}

fn corrupt_message(uri: &str, file: Option<&str>, offset: Option<u64>, reason: &str) -> String {
    let what = match (file, offset) {
        (None, _) => format!("the manifest of the checkpoint at `{uri}` is corrupt: {reason}"),
        (Some(file), None) => {
            format!("data file `{file}` of the checkpoint at `{uri}` is corrupt: {reason}")
        }
        (Some(file), Some(offset)) => format!(
            "data file `{file}` of the checkpoint at `{uri}` is corrupt at data offset {offset}: {reason}"
        ),
    };
    format!("{what}; restore it from a copy, or load an earlier checkpoint")
}
