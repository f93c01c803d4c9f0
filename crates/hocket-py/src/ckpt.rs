//! Python bindings of hocket-ckpt.

pub mod memory_file;
pub mod reports;

use std::collections::{BTreeMap, HashMap};

use crate::errors::ckpt_error;
use crate::wait::listen;
use hocket_ckpt::{
    BlockEncoding, CallerMemory, CheckpointPlace, CheckpointStatus, CkptError, CommitOptions,
    DataFile, Dtype, Interrupted, ListedCheckpoint, TensorEntry, WriteOptions, WrittenDataFile,
};
use pyo3::exceptions::{PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyTuple};

/// Adds this module's functions and classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    register_rules(module)?;
    module.add_function(wrap_pyfunction!(ckpt_write_file, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_manifest_encode, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_manifest_decode, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_manifest_head, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_manifest_stored, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_check_fence, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_commit, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_verify_file, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_list, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(xxh3_128, module)?)?;
    Ok(())
}

/// Adds the rules of the format that writers in Python follow.
fn register_rules(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("CKPT_BLOCK_BYTES", hocket_ckpt::BLOCK_BYTES)?;
    module.add("CKPT_FORMAT", hocket_ckpt::FORMAT)?;
    module.add("CKPT_INLINE_BYTES", hocket_ckpt::INLINE_BYTES)?;
    module.add("CKPT_INLINE_TOTAL_BYTES", hocket_ckpt::INLINE_TOTAL_BYTES)?;
    module.add("CKPT_MANIFEST_NAME", hocket_ckpt::MANIFEST_NAME)?;
    module.add("CKPT_MAX_DIMS", hocket_ckpt::MAX_DIMS)?;
    module.add("CKPT_VERSION_WRITER", hocket_ckpt::VERSION_WRITER)?;
    let suffixes = PyTuple::new(module.py(), hocket_ckpt::foreign::TORCH_SUFFIXES)?;
    module.add("FOREIGN_TORCH_SUFFIXES", suffixes)?;
    module.add_function(wrap_pyfunction!(ckpt_data_path, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_is_data_path, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_entry_name, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_entry_order, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_c_strides, module)?)?;
    module.add_function(wrap_pyfunction!(ckpt_pieces, module)?)
}

/// Runs an operation without the interpreter lock; re-raises the exception of a signal handler.
pub(crate) fn call<T: Send>(
    py: Python<'_>,
    verb: impl FnOnce(Interrupted<'_>) -> hocket_ckpt::Result<T> + Send,
) -> PyResult<T> {
    match listen(py, verb)? {
        Ok(value) => Ok(value),
        Err(CkptError::Interrupted) => Err(PyKeyboardInterrupt::new_err(())),
        Err(error) => Err(ckpt_error(py, &error)),
    }
}

/// A data file of the manifest, as a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FileItem {
    path: String,
    size: u64,
    data_start: u64,
    header: String,
    digests: String,
    #[pyo3(default)]
    frames: Option<String>,
    #[pyo3(default)]
    planes: Option<Vec<(u64, u64)>>,
}

impl From<FileItem> for DataFile {
    fn from(item: FileItem) -> Self {
        let FileItem {
            path,
            size,
            data_start,
            header,
            digests,
            frames,
            planes,
        } = item;
        Self {
            path,
            size,
            data_start,
            header,
            digests,
            frames,
            planes,
        }
    }
}

/// Name, dtype, shape, address, bytes.
type EntryItem = (String, String, Vec<u64>, usize, usize);

/// Returns the dtype of an entry by its name.
pub(crate) fn known_dtype(name: &str, dtype: &str) -> PyResult<Dtype> {
    Dtype::parse(dtype).ok_or_else(|| {
        PyValueError::new_err(format!(
            "entry `{name}`: `{dtype}` is not a dtype of safetensors; expected a name such as `F32` or `BF16`"
        ))
    })
}

fn entry(item: EntryItem) -> PyResult<TensorEntry> {
    let (name, dtype, shape, address, bytes) = item;
    let dtype = known_dtype(&name, &dtype)?;
    // SAFETY: the caller keeps the memory alive and unchanged during the call, as the stub requires.
    let memory = unsafe { CallerMemory::new(address, bytes) };
    Ok(TensorEntry {
        name,
        dtype,
        shape,
        memory,
    })
}

#[pyfunction]
#[pyo3(signature = (uri, path, *, entries, metadata, sync = true, compression = None, background = false))]
#[expect(clippy::too_many_arguments, reason = "keywords of one Python call")]
fn ckpt_write_file<'py>(
    py: Python<'py>,
    uri: &str,
    path: &str,
    entries: Vec<EntryItem>,
    metadata: HashMap<String, String>,
    sync: bool,
    compression: Option<(i32, bool)>,
    background: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let entries = entries
        .into_iter()
        .map(entry)
        .collect::<PyResult<Vec<_>>>()?;
    let metadata: BTreeMap<_, _> = metadata.into_iter().collect();
    let written = call(py, |interrupted| {
        hocket_ckpt::write_file(
            &CheckpointPlace::open(uri)?,
            path,
            entries,
            &metadata,
            WriteOptions {
                sync,
                encoding: encoding(compression),
                background,
            },
            interrupted,
        )
    })?;
    written_to_dict(py, written)
}

/// Returns the encoding of a file's blocks, given the zstd level and whether planes are made; none for a plain file.
pub(crate) fn encoding(compression: Option<(i32, bool)>) -> Option<BlockEncoding> {
    compression.map(|(level, planes)| BlockEncoding { level, planes })
}

fn written_to_dict(py: Python<'_>, written: WrittenDataFile) -> PyResult<Bound<'_, PyDict>> {
    let entries = PyDict::new(py);
    for (name, offset, bytes) in written.entries {
        entries.set_item(name, (offset, bytes))?;
    }
    let dict = file_to_dict(py, written.file)?;
    dict.set_item("entries", entries)?;
    Ok(dict)
}

/// Converts a data file to a mapping, the form that [`FileItem`] accepts.
pub(crate) fn file_to_dict(py: Python<'_>, file: DataFile) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", file.path)?;
    dict.set_item("size", file.size)?;
    dict.set_item("data_start", file.data_start)?;
    dict.set_item("header", file.header)?;
    dict.set_item("digests", file.digests)?;
    if let Some(frames) = file.frames {
        dict.set_item("frames", frames)?;
    }
    if let Some(planes) = file.planes {
        dict.set_item("planes", planes)?;
    }
    Ok(dict)
}

#[pyfunction]
fn ckpt_manifest_encode<'py>(py: Python<'py>, document: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let manifest = call(py, |_| hocket_ckpt::encode(document))?;
    Ok(PyBytes::new(py, &manifest))
}

#[pyfunction]
#[pyo3(signature = (manifest, *, uri = ""))]
fn ckpt_manifest_decode<'py>(
    py: Python<'py>,
    manifest: &[u8],
    uri: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let document = call(py, |_| hocket_ckpt::decode(manifest, uri))?;
    Ok(PyBytes::new(py, &document))
}

#[pyfunction]
fn ckpt_manifest_head<'py>(py: Python<'py>, uri: &str) -> PyResult<Bound<'py, PyBytes>> {
    let head = call(py, |interrupted| {
        hocket_ckpt::read_head(&CheckpointPlace::open(uri)?, interrupted)
    })?;
    Ok(PyBytes::new(py, &head))
}

#[pyfunction]
fn ckpt_manifest_stored<'py>(py: Python<'py>, uri: &str) -> PyResult<Bound<'py, PyBytes>> {
    let stored = call(py, |interrupted| {
        hocket_ckpt::read_stored(&CheckpointPlace::open(uri)?, interrupted)
    })?;
    Ok(PyBytes::new(py, &stored))
}

#[pyfunction]
fn ckpt_check_fence(py: Python<'_>, uri: &str, save_id: &str) -> PyResult<()> {
    call(py, |interrupted| {
        hocket_ckpt::check_fence(&CheckpointPlace::open(uri)?, save_id, interrupted)
    })
}

#[pyfunction]
#[pyo3(signature = (uri, manifest, save_id, *, unfenced = false, replaces = None, must_exist = false))]
fn ckpt_commit(
    py: Python<'_>,
    uri: &str,
    manifest: &[u8],
    save_id: &str,
    unfenced: bool,
    replaces: Option<String>,
    must_exist: bool,
) -> PyResult<()> {
    let options = CommitOptions {
        unfenced,
        replaces,
        must_exist,
    };
    call(py, |interrupted| {
        hocket_ckpt::commit(
            &CheckpointPlace::open(uri)?,
            manifest.to_vec(),
            save_id,
            &options,
            interrupted,
        )
    })
}

#[pyfunction]
fn ckpt_verify_file(py: Python<'_>, uri: &str, file: FileItem) -> PyResult<Vec<(i64, i64)>> {
    let file = DataFile::from(file);
    call(py, |interrupted| {
        hocket_ckpt::verify_file(&CheckpointPlace::open(uri)?, &file, interrupted)
    })
}

#[pyfunction]
fn ckpt_list<'py>(py: Python<'py>, uri: &str) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let listed = call(py, |interrupted| {
        hocket_ckpt::list(&CheckpointPlace::open(uri)?, interrupted)
    })?;
    listed
        .into_iter()
        .map(|one| listed_to_dict(py, one))
        .collect()
}

fn listed_to_dict(py: Python<'_>, listed: ListedCheckpoint) -> PyResult<Bound<'_, PyDict>> {
    let status = match listed.status {
        CheckpointStatus::Committed => "committed",
        CheckpointStatus::Partial => "partial",
        CheckpointStatus::Foreign => "foreign",
    };
    let head = listed.head.as_ref();
    let dict = PyDict::new(py);
    dict.set_item("name", listed.name)?;
    dict.set_item("status", status)?;
    dict.set_item("step", head.map(|head| head.step))?;
    dict.set_item("created", head.map(|head| &head.created))?;
    dict.set_item("save_id", head.map(|head| &head.save_id))?;
    dict.set_item("format", head.map(|head| head.format))?;
    dict.set_item("version", head.map(|head| &head.version))?;
    dict.set_item("files", head.map(|head| head.files))?;
    dict.set_item("tensors", head.map(|head| head.tensors))?;
    dict.set_item("bytes", head.map(|head| head.bytes))?;
    dict.set_item("thinned", head.is_some_and(|head| head.thinned))?;
    dict.set_item("base", head.and_then(|head| head.base.as_ref()))?;
    dict.set_item("problem", listed.problem)?;
    Ok(dict)
}

#[pyfunction]
fn ckpt_sizes(py: Python<'_>, uri: &str, paths: Vec<String>) -> PyResult<Vec<Option<u64>>> {
    call(py, |interrupted| {
        hocket_ckpt::sizes(&CheckpointPlace::open(uri)?, &paths, interrupted)
    })
}

#[pyfunction]
fn xxh3_128<'py>(py: Python<'py>, buffer: &[u8]) -> Bound<'py, PyBytes> {
    let digest = py.detach(|| hocket_ckpt::xxh3_128(buffer));
    PyBytes::new(py, &digest)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use pyo3::exceptions::PyKeyError;
    use pyo3::ffi::PyErr_SetInterruptEx;

    #[test]
    fn the_exception_of_a_signal_handler_is_raised_after_any_outcome() {
        Python::initialize();
        Python::attach(|py| {
            let code = c"import signal\ndef handle(number, frame): raise KeyError(number)\nsignal.signal(2, handle)";
            py.run(code, None, None).unwrap();
            for is_done in [true, false] {
                let outcome = call(py, |interrupted| {
                    // SAFETY: the function can be called from any thread and without the interpreter lock.
                    assert_eq!(unsafe { PyErr_SetInterruptEx(2) }, 0);
                    assert!(interrupted() && !interrupted());
                    if is_done {
                        Ok(())
                    } else {
                        Err(CkptError::Interrupted)
                    }
                });
                assert!(outcome.unwrap_err().is_instance_of::<PyKeyError>(py));
            }
            assert_eq!(call(py, |_| Ok(7)).unwrap(), 7);
        });
    }
}
