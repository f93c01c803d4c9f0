//! From each crate's errors to Python's: one function per crate, one class per variant.
//!
//! The classes are Python's own, looked up by module and name when an error is raised: the extension imports
//! nothing before it must, and `except hocket.native.errors.StoreError` means the class in that module.

use hocket_ckpt::CkptError;
use hocket_store::StoreError;
use hocket_stream::StreamError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// `module.class(message)` as an exception.
fn instance(py: Python<'_>, module: &str, class: &str, message: &str) -> PyErr {
    match py
        .import(module)
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((message,)))
    {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

// --- store ------------------------------------------------------------------------------------

/// The class in `hocket.native.errors` for a failure of the store.
pub fn store_error(py: Python<'_>, error: &StoreError) -> PyErr {
    let class = match error {
        StoreError::NotFound { .. } => "StoreNotFoundError",
        StoreError::Exists { .. } => "StoreExistsError",
        StoreError::Changed { .. } => "StoreChangedError",
        StoreError::Permission { .. } => "StorePermissionError",
        StoreError::Config { .. } => "StoreConfigError",
        StoreError::Transient { .. } => "StoreTransientError",
        StoreError::Size { .. } | StoreError::Io { .. } => "StoreIOError",
        _ => "StoreError",
    };
    instance(py, "hocket.native.errors", class, &error.to_string())
}

// --- stream -----------------------------------------------------------------------------------

/// The class in `hocket.stream.errors` for a failure of a data set; a store's failure stays what it is.
pub fn stream_error(py: Python<'_>, error: &StreamError) -> PyErr {
    let class = match error {
        StreamError::Store(error) => return store_error(py, error),
        StreamError::IndexNotFound { .. } => "IndexNotFoundError",
        StreamError::IndexCorrupt { .. } => "IndexCorruptError",
        StreamError::ShardNotFound { .. } => "ShardNotFoundError",
        StreamError::ShardCorrupt { .. } => "ShardCorruptError",
        StreamError::SampleCorrupt { .. } => "SampleCorruptError",
        StreamError::Config { .. } => "ConfigError",
        StreamError::Exists { .. } => "DatasetExistsError",
        StreamError::Io { .. } => "StreamIOError",
        _ => "StreamError",
    };
    instance(py, "hocket.stream.errors", class, &error.to_string())
}

// --- ckpt -------------------------------------------------------------------------------------

/// The class in `hocket.ckpt.errors` for an error of a checkpoint. A corrupt block says where it is, too.
pub fn ckpt_error(py: Python<'_>, error: &CkptError) -> PyErr {
    let class = match error {
        CkptError::Store(error) => return store_error(py, error),
        CkptError::Invalid(message) => return PyValueError::new_err(message.clone()),
        CkptError::NotFound { .. } => "CheckpointNotFoundError",
        CkptError::Partial { .. } => "CheckpointPartialError",
        CkptError::Exists { .. } => "CheckpointExistsError",
        CkptError::Corrupt { .. } => "CheckpointCorruptError",
        CkptError::Incompatible { .. } => "CheckpointIncompatibleError",
        CkptError::Unsafe { .. } => "CheckpointUnsafeError",
        CkptError::Unfenced { .. } => "CheckpointUnfencedError",
        _ => "CheckpointError",
    };
    let exception = instance(py, "hocket.ckpt.errors", class, &error.to_string());
    if let CkptError::Corrupt { file, offset, .. } = error {
        let value = exception.value(py);
        let set = value
            .setattr("file", file)
            .and_then(|()| value.setattr("offset", offset));
        if let Err(error) = set {
            return error;
        }
    }
    exception
}
