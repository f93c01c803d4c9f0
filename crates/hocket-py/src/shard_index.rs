//! Python bindings of a data set's index.

use std::sync::Arc;

use hocket_stream::index::Index;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors::stream_error;

pub(crate) fn raise<T>(py: Python<'_>, result: hocket_stream::Result<T>) -> PyResult<T> {
    result.map_err(|error| stream_error(py, &error))
}

/// The index of a data set. Immutable and without locks; safe in forked children.
#[pyclass(frozen, module = "hocket.native._native")]
pub struct ShardIndex {
    pub(crate) index: Arc<Index>,
}

#[pymethods]
impl ShardIndex {
    #[staticmethod]
    fn parse(py: Python<'_>, data: PyBackedBytes, origin: &str) -> PyResult<Self> {
        let index = py.detach(|| Index::parse(&data, origin));
        Ok(Self {
            index: Arc::new(raise(py, index)?),
        })
    }

    #[getter]
    fn num_samples(&self) -> u64 {
        self.index.num_samples()
    }

    #[getter]
    fn num_shards(&self) -> usize {
        self.index.num_shards()
    }

    #[getter]
    fn fingerprint(&self) -> &str {
        self.index.fingerprint()
    }

    #[getter]
    fn columns(&self) -> Vec<(String, String, Option<u32>)> {
        let columns = self.index.schema().columns.iter();
        columns
            .map(|column| (column.name.clone(), column.encoding.clone(), column.width))
            .collect()
    }

    #[getter]
    fn mixed_columns(&self) -> Vec<&str> {
        self.index.mixed_columns().collect()
    }
}
