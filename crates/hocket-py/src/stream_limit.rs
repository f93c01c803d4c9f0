//! Python bindings for the limit of cache folders.

use std::path::PathBuf;
use std::sync::Arc;

use hocket_stream::cache;
use pyo3::prelude::*;

use crate::shard_index::{ShardIndex, raise};

/// A limit on the total bytes of several cache folders.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct CacheLimit {
    pub(crate) limit: Arc<cache::CacheLimit>,
}

#[pymethods]
impl CacheLimit {
    #[new]
    fn new(
        py: Python<'_>,
        num_bytes: u64,
        folders: Vec<(PathBuf, PyRef<'_, ShardIndex>)>,
    ) -> PyResult<Self> {
        let folders = folders
            .into_iter()
            .map(|(path, index)| (path, index.index.clone()))
            .collect();
        let limit = py.detach(|| cache::CacheLimit::new(num_bytes, folders));
        Ok(Self {
            limit: Arc::new(raise(py, limit)?),
        })
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.limit.bytes()
    }

    #[getter]
    fn num_evicted(&self) -> u64 {
        self.limit.evicted()
    }
}

/// Adds this module's class to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CacheLimit>()
}
