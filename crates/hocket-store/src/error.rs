//! What can go wrong, named by what the caller can do about it.

use crate::uri::Service;
use std::time::Duration;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Why a verb failed. Messages carry the full URI, and never a secret or a signed address.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such object, or no such bucket.
    #[error("nothing at `{uri}`; check the key, the bucket and the endpoint")]
    NotFound {
        /// Full URI of the object.
        uri: String,
    },
    /// A conditional create found the key taken.
    #[error(
        "`{uri}` exists already, and was to be created only if absent; choose another key or delete it first"
    )]
    Exists {
        /// Full URI of the object.
        uri: String,
    },
    /// The object is not the one that the caller, or an earlier part of the same read, saw.
    #[error(
        "`{uri}` changed under way: expected ETag `{expected}`, found `{actual}`; read it again from the start"
    )]
    Changed {
        /// Full URI of the object.
        uri: String,
        /// The ETag that was asked for.
        expected: String,
        /// The ETag found, or a word in brackets where there is none.
        actual: String,
    },
    /// The object is larger or smaller than the caller knew it to be.
    #[error(
        "`{uri}` has {actual} bytes, expected {expected}; look whether it was replaced or cut off"
    )]
    Size {
        /// Full URI of the object.
        uri: String,
        /// The bytes that the caller expected.
        expected: u64,
        /// The bytes that it has.
        actual: u64,
    },
    /// The store refuses these credentials, or none were given.
    #[error("no access to `{uri}`: {reason}")]
    Permission {
        /// Full URI of the object or of the store.
        uri: String,
        /// What the store said, or which variables to set.
        reason: String,
    },
    /// A URI, key or option that no retry makes right.
    #[error("{message}")]
    Config {
        /// Value, expectation and remedy.
        message: String,
    },
    /// The store could not be reached, or kept failing until the retries or the deadline ran out. For a
    /// conditional put it also means that the answer was lost: read the object back to know.
    #[error(
        "`{uri}` failed {attempts} times in {:.1} s and was given up; last: {reason}; check that the store is up \
         and that its endpoint{} is reached from here, then try again",
        elapsed.as_secs_f64(), endpoint_variable(uri)
    )]
    Transient {
        /// Full URI of the object.
        uri: String,
        /// Requests made.
        attempts: u32,
        /// From the first request to the giving up.
        elapsed: Duration,
        /// The last failure.
        reason: String,
    },
    /// The store or the file system refused for a reason of its own.
    #[error("`{uri}`: {reason}")]
    Io {
        /// Full URI of the object.
        uri: String,
        /// What was said, with the range where one applies.
        reason: String,
    },
    /// The wait was interrupted (Ctrl-C); the work was abandoned.
    #[error("interrupted while waiting for the store")]
    Interrupted,
}

impl StoreError {
    /// A configuration error with `message`.
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Config {
            message: message.into(),
        }
    }

    /// An I/O error of `uri`.
    pub(crate) fn io(uri: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Io {
            uri: uri.into(),
            reason: reason.into(),
        }
    }

    /// What an operating-system error on `uri` means.
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

/// The variable to look at when the service of `uri` is not reached, in brackets.
fn endpoint_variable(uri: &str) -> String {
    let scheme = uri.split_once("://").map_or("", |(scheme, _)| scheme);
    let variable = Service::of(scheme).and_then(Service::endpoint_variable);
    variable.map_or_else(String::new, |name| format!(" (`{name}`)"))
}

/// What the operating system said when something was tried, and what to do where only the user can.
pub fn io_reason(doing: &str, error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    let remedy = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "; free space there or raise its limit, or write elsewhere"
        }
        _ => "",
    };
    format!("{doing}: {error}{remedy}")
}
