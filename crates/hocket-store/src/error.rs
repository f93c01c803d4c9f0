//! The errors of this crate, named by what the caller can do about them.

use crate::service::Service;
use std::time::Duration;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, StoreError>;

/// The error of a store operation. Messages contain the full URI, and never a secret or a signed URL.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The object or the bucket does not exist.
    #[error("`{uri}` does not exist; check the key, the bucket and the endpoint")]
    NotFound {
        /// Full URI of the object.
        uri: String,
    },
    /// The repository or its revision does not exist, which is not the same as a missing object in it.
    #[error("`{uri}`: {reason}")]
    RepositoryNotFound {
        /// Full URI of the object or of the store.
        uri: String,
        /// The part that is missing, and the remedy.
        reason: String,
    },
    /// A conditional create found an existing object.
    #[error(
        "`{uri}` exists already, but the write requires that it does not; choose another key or delete the object first"
    )]
    Exists {
        /// Full URI of the object.
        uri: String,
    },
    /// The object is not the version that the caller, or an earlier part of the same read, saw.
    #[error(
        "`{uri}` was replaced meanwhile: expected ETag `{expected}`, found `{actual}`; read it again from the start"
    )]
    Changed {
        /// Full URI of the object.
        uri: String,
        /// The expected ETag.
        expected: String,
        /// The ETag found, or a bracketed word if there is none.
        actual: String,
    },
    /// The object's size differs from the one that the caller expected.
    #[error(
        "`{uri}` has {actual} bytes, expected {expected}; check whether it was replaced or truncated"
    )]
    Size {
        /// Full URI of the object.
        uri: String,
        /// The expected number of bytes.
        expected: u64,
        /// The actual number of bytes.
        actual: u64,
    },
    /// The store rejects the credentials, or none were given.
    #[error("no access to `{uri}`: {reason}")]
    Permission {
        /// Full URI of the object or of the store.
        uri: String,
        /// The store's message, or the variables to set.
        reason: String,
    },
    /// An invalid URI, key or option; a retry does not help.
    #[error("{message}")]
    Config {
        /// The value, what was expected, and the remedy.
        message: String,
    },
    /// The store was unreachable, or kept failing until the retries or the deadline ran out. After a
    /// conditional put the outcome is unknown, because the response was lost: read the object back to find out.
    #[error(
        "`{uri}` failed {attempts} times in {:.1} s and is not retried again; last error: {reason}; check that the store \
         is running and that its endpoint{} is reachable from this machine, then try again",
        elapsed.as_secs_f64(), endpoint_variable(uri)
    )]
    Transient {
        /// Full URI of the object.
        uri: String,
        /// Number of requests made.
        attempts: u32,
        /// Time from the first request to the last failure.
        elapsed: Duration,
        /// The last failure.
        reason: String,
    },
    /// The store or the file system failed for another reason.
    #[error("`{uri}`: {reason}")]
    Io {
        /// Full URI of the object.
        uri: String,
        /// The store's or the system's message, with the byte range where one applies.
        reason: String,
    },
    /// The wait was interrupted (Ctrl-C) and the operation abandoned.
    #[error("interrupted while waiting for the store")]
    Interrupted,
}

impl StoreError {
    /// Builds a configuration error with `message`.
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config {
            message: message.into(),
        }
    }

    /// Builds an I/O error for `uri`.
    pub(crate) fn io(uri: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Io {
            uri: uri.into(),
            reason: reason.into(),
        }
    }

    /// Builds the error for the use of an upload after it failed.
    pub(crate) fn upload_ended(uri: &str) -> Self {
        Self::io(uri, "the upload failed earlier; start a new upload")
    }

    /// Maps an operating-system error on `uri` to an error of this crate.
    pub(crate) fn from_io(uri: &str, doing: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let uri = uri.to_owned();
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Self::NotFound { uri },
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Self::Permission {
                uri,
                reason: io_reason(doing, error),
            },
            _ => Self::Io {
                uri,
                reason: io_reason(doing, error),
            },
        }
    }
}

/// Returns the endpoint variable to check when the service of `uri` is unreachable, in brackets.
fn endpoint_variable(uri: &str) -> String {
    let scheme = uri.split_once("://").map_or("", |(scheme, _)| scheme);
    let variable = Service::of(scheme).and_then(Service::endpoint_variable);
    variable.map_or_else(String::new, |name| format!(" (`{name}`)"))
}

/// Returns the reason that the system grants no thread, with the limits to raise.
#[must_use]
pub fn thread_refused(error: &std::io::Error) -> String {
    format!(
        "cannot start a worker: {error}; raise the limit of processes (`ulimit -u`, or `pids.max` of the cgroup)"
    )
}

/// Describes an operating-system error, with the remedy where only the user can act.
pub fn io_reason(doing: &str, error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    let remedy = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "; free space there or raise its limit, or write elsewhere"
        }
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            "; raise the limit of open files (`ulimit -n`)"
        }
        _ => "",
    };
    format!("{doing}: {error}{remedy}")
}
