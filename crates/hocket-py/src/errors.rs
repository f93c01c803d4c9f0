//! Conversion of the crates' errors to Python exceptions: one function per crate, one class per variant.
//!
//! The classes are defined in Python and looked up by module and name when an error is raised. The extension
//! therefore imports nothing in advance, and `except hocket.native.errors.StoreError` refers to the class in
//! that module.

use hocket_ckpt::CkptError;
use hocket_store::StoreError;
use hocket_stream::StreamError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Returns `module.class(message)` as an exception.
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

/// Converts an error of a store to its class in `hocket.native.errors`.
pub fn store_error(py: Python<'_>, error: &StoreError) -> PyErr {
    let class = match error {
        StoreError::NotFound { .. } | StoreError::RepositoryNotFound { .. } => "StoreNotFoundError",
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

/// Converts an error of a data set to its class in `hocket.stream.errors`; a store's error keeps its own class.
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
        StreamError::Io { .. } | StreamError::Removed { .. } => "StreamIOError",
        _ => "StreamError",
    };
    instance(py, "hocket.stream.errors", class, &error.to_string())
}

// --- ckpt -------------------------------------------------------------------------------------

/// Converts an error of a checkpoint to its class in `hocket.ckpt.errors`. For a corrupt block, the exception
/// also has the block's location.
pub fn ckpt_error(py: Python<'_>, error: &CkptError) -> PyErr {
    let class = match error {
        CkptError::Store(error) => return store_error(py, error),
        CkptError::Invalid(message) => return PyValueError::new_err(message.clone()),
        CkptError::NotFound { .. } => "CheckpointNotFoundError",
        CkptError::Partial { .. } => "CheckpointPartialError",
        CkptError::Exists { .. } => "CheckpointExistsError",
        CkptError::Corrupt { .. } | CkptError::CorruptTensor { .. } => "CheckpointCorruptError",
        CkptError::Incompatible { .. } => "CheckpointIncompatibleError",
        CkptError::Unsafe { .. } => "CheckpointUnsafeError",
        CkptError::Unfenced { .. } => "CheckpointUnfencedError",
        _ => "CheckpointError",
    };
    let exception = instance(py, "hocket.ckpt.errors", class, &error.to_string());
    let corrupt = match error {
        CkptError::CorruptTensor { error, .. } => error,
        error => error,
    };
    if let CkptError::Corrupt { file, offset, .. } = corrupt {
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
