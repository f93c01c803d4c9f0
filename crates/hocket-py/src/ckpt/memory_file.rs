//! Python bindings of hocket-ckpt's data files in shared memory.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{EntryItem, call, entry, written_to_dict};

/// Adds this module's class to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CkptMemoryFile>()
}

#[pyclass(module = "hocket.native._native")]
struct CkptMemoryFile(hocket_ckpt::MemoryFile);

#[pymethods]
impl CkptMemoryFile {
    #[staticmethod]
    fn create(py: Python<'_>, path: &str) -> PyResult<Option<Self>> {
        let made = call(py, |_| hocket_ckpt::MemoryFile::create(Path::new(path)))?;
        Ok(made.map(Self))
    }

    fn fill(
        &mut self,
        py: Python<'_>,
        entries: Vec<EntryItem>,
        metadata: HashMap<String, String>,
    ) -> PyResult<Vec<usize>> {
        let entries = entries
            .into_iter()
            .map(entry)
            .collect::<PyResult<Vec<_>>>()?;
        let metadata: BTreeMap<_, _> = metadata.into_iter().collect();
        let file = &mut self.0;
        call(py, |interrupted| file.fill(entries, &metadata, interrupted))
    }

    fn publish<'py>(
        &mut self,
        py: Python<'py>,
        root: &str,
        path: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        let file = &mut self.0;
        let written = call(py, |interrupted| {
            file.publish(Path::new(root), path, interrupted)
        })?;
        written_to_dict(py, written)
    }
}
