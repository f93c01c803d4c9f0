//! The errors of this crate; each variant maps to one class of `hocket.ckpt.errors`.

use std::io;
use std::path::{Path, PathBuf};

use hocket_store::durable::DurableError;
use hocket_store::{StoreError, io_reason};

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, CkptError>;

/// The remedy for a data file that exists already.
pub(crate) const NEVER_REPLACED: &str =
    "data files are never replaced. Save under another name, or delete the old one first";

/// The error of a checkpoint operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CkptError {
    /// The checkpoint or file does not exist.
    #[error("nothing found at `{uri}`: {reason}")]
    NotFound {
        /// The place that was looked up.
        uri: String,
        /// The expected content, and the remedy.
        reason: String,
    },
    /// Data files exist without a manifest.
    #[error(
        "the checkpoint at `{uri}` was never committed: its data files are there, its manifest \
         `checkpoint.json.zst` is not, so the save did not finish. Load an earlier checkpoint \
         (`hocket-ckpt ls` on the folder above lists them); this one may be deleted"
    )]
    Partial {
        /// The checkpoint.
        uri: String,
    },
    /// Something exists that must not be replaced.
    #[error("`{uri}` exists already: {reason}")]
    Exists {
        /// The existing file or object.
        uri: String,
        /// Its owner, and the remedy.
        reason: String,
    },
    /// Bytes differ from those written, or the manifest violates a rule.
    #[error("{}", corrupt_message(uri, file.as_deref(), *offset, reason))]
    Corrupt {
        /// The checkpoint.
        uri: String,
        /// The data file inside the checkpoint; `None` for the manifest.
        file: Option<String>,
        /// Offset of the bad block in the file's data.
        offset: Option<u64>,
        /// The expected and the actual content.
        reason: String,
    },
    /// Tensors whose bytes differ from those written.
    #[error("{subject}: {error}")]
    CorruptTensor {
        /// The tensors, as the subject of a sentence.
        subject: String,
        /// The corrupt bytes: [`CkptError::Corrupt`].
        error: Box<CkptError>,
    },
    /// A temporary file cannot be written.
    #[error(
        "a compressed item of {bytes} bytes, whose tensor is not in C order, could not be unpacked below \
         `{}`: {error}. Set `TMPDIR` to a folder that may be written to and has room for it", folder.display()
    )]
    TempFile {
        /// Size of the tensor in bytes.
        bytes: u64,
        /// The folder of temporary files.
        folder: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
    /// A valid checkpoint that this version cannot read.
    #[error("the checkpoint at `{uri}` cannot be read by this version: {reason}")]
    Incompatible {
        /// The checkpoint.
        uri: String,
        /// The version that can read it.
        reason: String,
    },
    /// A foreign file that requires the execution of code.
    #[error(
        "file `{file}` of `{uri}` is refused: {reason}. Nothing of it was carried out. Where it comes from \
         somebody you trust, load it with the program that wrote it and save it as safetensors or with Hocket"
    )]
    Unsafe {
        /// The checkpoint.
        uri: String,
        /// The file inside it.
        file: String,
        /// The code that it requires.
        reason: String,
    },
    /// The store ignores or rejects the conditions of conditional writes.
    #[error(
        "`{uri}`: this store {reason}, so two savers could \
         both believe that their checkpoint was committed. Use a store that honours \
         `If-None-Match: *`, or pass `unfenced=True` to `CheckpointStore`, `HocketWriter`, `convert` \
         or `reshard` (`--unfenced` to a command) if nothing else ever writes there"
    )]
    Unfenced {
        /// The checkpoint.
        uri: String,
        /// The behaviour of the store, as a predicate.
        reason: String,
    },
    /// Invalid arguments.
    #[error("{0}")]
    Invalid(String),
    /// The disk or the store failed.
    #[error(transparent)]
    Store(StoreError),
    /// The operation was interrupted; its partial results have been removed.
    #[error("interrupted")]
    Interrupted,
}

impl CkptError {
    /// Returns whether one checkpoint cannot be read, which says nothing about the others of its folder.
    pub(crate) fn is_of_one_checkpoint(&self) -> bool {
        matches!(
            self,
            Self::Corrupt { .. }
                | Self::Incompatible { .. }
                | Self::Store(StoreError::Io { .. } | StoreError::Permission { .. })
        )
    }

    /// Builds the error that nothing exists at `uri`.
    pub(crate) fn not_found(uri: &str, reason: impl Into<String>) -> Self {
        Self::NotFound {
            uri: uri.to_owned(),
            reason: reason.into(),
        }
    }

    /// Builds the error of a failed system call on `path`; `action` is a verb such as "write".
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

    /// Builds the error of a thread that panicked; nothing that the caller gave is wrong.
    pub(crate) fn panicked(thread: &str) -> Self {
        Self::process(format!("{thread} panicked; this is a defect of Hocket"))
    }

    /// Builds the error of a missing process resource: a thread, memory.
    pub(crate) fn process(reason: impl Into<String>) -> Self {
        Self::Store(StoreError::Io {
            uri: "hocket-ckpt".to_owned(),
            reason: reason.into(),
        })
    }

    /// Builds the error of a manifest that violates a rule.
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

impl From<DurableError> for CkptError {
    fn from(failed: DurableError) -> Self {
        Self::io(&failed.path, failed.action, &failed.error)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panicked_is_no_invalid_argument() {
        let error = CkptError::panicked("a writer");
        assert!(matches!(error, CkptError::Store(StoreError::Io { .. })));
        assert!(error.to_string().contains("a writer panicked"));
    }
}
