//! Python bindings of the rules of the checkpoint format that writers in Python follow.

use hocket_ckpt::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyTuple;

/// Adds this module's constants and functions to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CKPT_BLOCK_BYTES", hocket_ckpt::BLOCK_BYTES)?;
    module.add("CKPT_FORMAT", hocket_ckpt::FORMAT)?;
    module.add("CKPT_INLINE_BYTES", hocket_ckpt::INLINE_BYTES)?;
    module.add("CKPT_INLINE_TOTAL_BYTES", hocket_ckpt::INLINE_TOTAL_BYTES)?;
    module.add("CKPT_MANIFEST_NAME", hocket_ckpt::MANIFEST_NAME)?;
    module.add("CKPT_MAX_DIMS", hocket_ckpt::MAX_DIMS)?;
    let suffixes = PyTuple::new(module.py(), hocket_ckpt::foreign::TORCH_SUFFIXES)?;
    module.add("FOREIGN_TORCH_SUFFIXES", suffixes)?;
    module.add_function(wrap_pyfunction!(ckpt_data_path, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_is_data_path, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_entry_name, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_entry_order, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_c_strides, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_pieces, module)?)
}

#[pyfunction]
#[pyo3(signature = (save_id, rank, number, *, compressed))]
fn ckpt_data_path(save_id: &str, rank: u64, number: u64, compressed: bool) -> String {
    hocket_ckpt::data_path(save_id, rank, number, compressed)
}

#[pyfunction]
fn ckpt_is_data_path(path: &str) -> bool {
    hocket_ckpt::is_saved_path(path)
}

#[pyfunction]
#[pyo3(signature = (name, start, *, is_whole))]
fn ckpt_entry_name(name: &str, start: Vec<u64>, is_whole: bool) -> String {
    hocket_ckpt::entry_name(name, &start, is_whole)
}

#[pyfunction]
fn ckpt_entry_order(entries: Vec<(PyBackedStr, PyBackedStr)>) -> PyResult<Vec<usize>> {
    let entries = entries.iter().enumerate().map(|(number, (dtype, name))| {
        let unknown = || PyValueError::new_err(format!("`{dtype}` is not a dtype of safetensors"));
        Ok((number, Dtype::parse(dtype).ok_or_else(unknown)?, &**name))
    });
    let mut entries = entries.collect::<PyResult<Vec<_>>>()?;
    entries.sort_by(|a, b| hocket_ckpt::entry_order((a.1, a.2), (b.1, b.2)));
    Ok(entries.into_iter().map(|(number, ..)| number).collect())
}

#[pyfunction]
fn ckpt_c_strides(py: Python<'_>, shape: Vec<u64>) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, hocket_ckpt::c_strides(&shape))
}

#[pyfunction]
fn ckpt_pieces(size: Vec<u64>, limit: u64) -> Vec<(Vec<u64>, Vec<u64>)> {
    hocket_ckpt::pieces(&size, limit)
}
