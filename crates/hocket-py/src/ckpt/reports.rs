//! Python bindings for saves and reshards of many ranks: the ranks' reports, and the plan of their files.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hocket_ckpt::{
    RankReports, ReportedTrees, ShardPlan, ShardedTensor, WrittenChunk, pack_report,
};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict};

use super::{FileItem, call, known_dtype};
use crate::checkpoint::{ChunkColumns, ChunkSource};

/// Adds this module's functions and classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CKPT_RANK_VALUES_NODE", hocket_ckpt::RANK_VALUES_NODE)?;
    module.add_class::<PyRankReports>()?;
    module.add_class::<PyShardPlan>()?;
    module.add_function(wrap_pyfunction!(ckpt_pack_report, module)?)
}

/// Entry name, index of the tensor, start, size.
type ChunkItem = (PyBackedStr, Option<u32>, Vec<u64>, Vec<u64>);

#[pyfunction]
#[pyo3(signature = (written, chunks, per_rank = None))]
fn ckpt_pack_report<'py>(
    py: Python<'py>,
    written: Option<&Bound<'py, PyDict>>,
    chunks: Vec<ChunkItem>,
    per_rank: Option<String>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (mut files, mut packed) = (Vec::new(), Vec::with_capacity(chunks.len()));
    if let Some(written) = written {
        files.push(written.extract::<FileItem>()?.into());
        let entries = written.get_item("entries")?;
        let entries = entries.ok_or_else(|| PyKeyError::new_err("entries"))?;
        for (name, tensor, start, size) in chunks {
            let (offset, length) = entries.get_item(&name)?.extract()?;
            packed.push(WrittenChunk {
                tensor,
                file: 0,
                offset,
                length,
                start,
                size,
            });
        }
    } else if !chunks.is_empty() {
        return Err(PyValueError::new_err(
            "there are chunks, and no file that holds them",
        ));
    }
    let report = call(py, |_| pack_report(files, &packed, per_rank))?;
    Ok(PyBytes::new(py, &report))
}

/// The reports of the ranks of a save.
#[pyclass(module = "hocket.native._native", name = "CkptReports", frozen)]
struct PyRankReports(RankReports<PyBackedBytes>);

#[pymethods]
impl PyRankReports {
    #[new]
    fn new(py: Python<'_>, reports: Vec<PyBackedBytes>) -> PyResult<Self> {
        call(py, |_| RankReports::new(reports)).map(Self)
    }

    fn files(&self) -> Vec<(usize, &str, u64)> {
        self.0.files().collect()
    }

    #[pyo3(signature = (document, *, trees, tree_of, holders, holders_of, inlined))]
    #[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
    fn join<'py>(
        &self,
        py: Python<'py>,
        document: &[u8],
        trees: Vec<Vec<usize>>,
        tree_of: Vec<usize>,
        holders: Vec<Vec<usize>>,
        holders_of: Vec<usize>,
        inlined: HashMap<String, PyBackedBytes>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let trees = ReportedTrees {
            trees,
            tree_of,
            holders,
            holders_of,
            inlined: inlined
                .into_iter()
                .map(|(name, data)| (name, data.to_vec()))
                .collect(),
        };
        let manifest = call(py, |_| self.0.join(document, &trees))?;
        Ok(PyBytes::new(py, &manifest))
    }
}

/// The files and chunks of a checkpoint for a number of ranks.
#[pyclass(module = "hocket.native._native", name = "CkptShardPlan", frozen)]
struct PyShardPlan(Arc<ShardPlan>);

/// Index of the tensor, start, size.
type EntryTuple = (usize, Vec<u64>, Vec<u64>);

#[pymethods]
impl PyShardPlan {
    #[new]
    #[pyo3(signature = (tensors, *, ranks, file_bytes))]
    fn new(
        py: Python<'_>,
        tensors: Vec<(String, String, Vec<u64>)>,
        ranks: u64,
        file_bytes: u64,
    ) -> PyResult<Self> {
        let tensors = tensors.into_iter().map(|(name, dtype, shape)| {
            let dtype = known_dtype(&name, &dtype)?;
            Ok(ShardedTensor { name, dtype, shape })
        });
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        let plan = call(py, |_| ShardPlan::new(tensors, ranks, file_bytes))?;
        Ok(Self(Arc::new(plan)))
    }

    fn files(&self) -> Vec<(u64, u64)> {
        self.0.files().collect()
    }

    fn file<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        metadata: BTreeMap<String, String>,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<EntryTuple>)> {
        let Some(file) = py.detach(|| self.0.file(index, &metadata)) else {
            return Err(PyValueError::new_err(format!("there is no file {index}")));
        };
        let (header, entries) = call(py, |_| file)?;
        let entries = entries.into_iter();
        let entries = entries.map(|entry| (entry.tensor, entry.start, entry.size));
        Ok((PyBytes::new(py, &header), entries.collect()))
    }

    fn chunks(&self, tensor: usize) -> Option<ChunkColumns> {
        self.0.chunks(tensor)?;
        let source = ChunkSource::Planned(Arc::clone(&self.0));
        Some(ChunkColumns::new(source, tensor))
    }

    fn encode<'py>(&self, py: Python<'py>, document: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let manifest = call(py, |_| self.0.encode(document))?;
        Ok(PyBytes::new(py, &manifest))
    }
}
