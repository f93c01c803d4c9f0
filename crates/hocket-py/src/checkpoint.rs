//! Python bindings of an open checkpoint.

use std::sync::{Mutex, PoisonError};

use hocket_ckpt::manifest::{Chunks, Document, PerRank, Policy, Step, Tensor};
use hocket_ckpt::{Checkpoint, Contents, DataFile, DataFiles, Memory, Read, xxh3_128};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::ckpt::{call, file_to_dict};

/// Adds this module's class to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<OpenedCheckpoint>()
}

/// An open checkpoint of any format.
#[pyclass(module = "hocket.native._native", name = "Checkpoint", frozen)]
pub struct OpenedCheckpoint {
    /// None once the contents were converted to Python objects, so that they are in memory only once.
    contents: Mutex<Option<Contents>>,
    files: DataFiles,
}

impl From<Checkpoint> for OpenedCheckpoint {
    fn from(Checkpoint { contents, files }: Checkpoint) -> Self {
        Self {
            contents: Mutex::new(Some(contents)),
            files,
        }
    }
}

#[pymethods]
impl OpenedCheckpoint {
    #[new]
    fn new(py: Python<'_>, uri: &str) -> PyResult<Self> {
        let opened = call(py, |interrupted| Checkpoint::open(uri, interrupted))?;
        Ok(opened.into())
    }

    #[staticmethod]
    fn open_foreign(py: Python<'_>, uri: &str) -> PyResult<Self> {
        let opened = call(py, |interrupted| Checkpoint::open_foreign(uri, interrupted))?;
        Ok(opened.into())
    }

    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Contents::Manifest(document)) = held.as_ref() else {
            return Err(PyValueError::new_err(
                "the contents were taken before, or are of another format",
            ));
        };
        let dict = PyDict::new(py);
        dict.set_item("save_id", &document.save_id)?;
        dict.set_item("step", document.step)?;
        dict.set_item("paths", PyTuple::new(py, self.files.paths())?)?;
        dict.set_item("user", from_json(py, document.user.get().as_bytes())?)?;
        Ok(dict)
    }

    fn take_contents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let contents = self.contents.lock().ok().and_then(|mut held| held.take());
        match contents {
            Some(Contents::Manifest(document)) => {
                manifest_to_dict(py, document, self.files.records())
            }
            Some(Contents::Catalogue(catalogue)) => {
                let json = call(py, |_| catalogue.to_json())?;
                let contents = from_json(py, &json)?.cast_into::<PyDict>()?;
                let digest = u128::from_be_bytes(xxh3_128(&json));
                contents.set_item("digest", format!("{digest:032x}"))?;
                Ok(contents)
            }
            None => Err(PyValueError::new_err("the contents were taken before")),
        }
    }

    #[pyo3(signature = (reads, *, check = true))]
    fn read(
        &self,
        py: Python<'_>,
        reads: Vec<(usize, u64, usize, usize)>,
        check: bool,
    ) -> PyResult<()> {
        let reads: Vec<Read> = reads
            .into_iter()
            .map(|(file, offset, bytes, address)| {
                // SAFETY: the caller keeps the memory alive and exclusive during the call, as the stub requires.
                let memory = unsafe { Memory::new(address, bytes) };
                Read {
                    file,
                    offset,
                    memory,
                }
            })
            .collect();
        call(py, |interrupted| {
            self.files.read(&reads, check, interrupted)
        })
    }
}

fn manifest_to_dict<'py>(
    py: Python<'py>,
    document: Document,
    files: impl Iterator<Item = DataFile>,
) -> PyResult<Bound<'py, PyDict>> {
    let files = files
        .map(|file| file_to_dict(py, file))
        .collect::<PyResult<Vec<_>>>()?;
    let tensors = PyDict::new(py);
    for (name, tensor) in document.tensors.0 {
        tensors.set_item(name, tensor_to_tuple(py, &tensor)?)?;
    }
    let leaves = document.values.0.iter();
    let decoded = decode_all(py, leaves.clone().map(|(_, leaf)| leaf.value.get()))?;
    let values = PyDict::new(py);
    for ((name, leaf), value) in leaves.zip(decoded) {
        values.set_item(name, (path_to_tuple(py, &leaf.path)?, value))?;
    }
    let per_rank = document.per_rank.as_ref();
    let keyed = document.integer_keyed.iter();
    let keyed = keyed.map(|path| path_to_tuple(py, path));
    let mesh = document.mesh.as_ref().map(|mesh| {
        let axes = PyDict::new(py);
        for (axis, size) in &mesh.0 {
            axes.set_item(axis, size)?;
        }
        PyResult::Ok(axes)
    });
    let dict = PyDict::new(py);
    dict.set_item("format", document.format)?;
    dict.set_item("version", &document.version)?;
    dict.set_item("save_id", &document.save_id)?;
    dict.set_item("step", document.step)?;
    dict.set_item("created", &document.created)?;
    dict.set_item("writer", &document.writer)?;
    dict.set_item("world_size", document.world_size)?;
    dict.set_item("mesh", mesh.transpose()?)?;
    dict.set_item("files", PyTuple::new(py, files)?)?;
    dict.set_item("tensors", tensors)?;
    dict.set_item("values", values)?;
    dict.set_item(
        "per_rank",
        per_rank.map(|own| own_values(py, own)).transpose()?,
    )?;
    dict.set_item("user", from_json(py, document.user.get().as_bytes())?)?;
    dict.set_item("integer_keyed", keyed.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

/// Returns dtype, shape, path, `same_as`, the chunks' columns and the base64 of inlined data.
fn tensor_to_tuple<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyTuple>> {
    let chunks = tensor.chunks.as_ref();
    (
        &tensor.dtype,
        PyTuple::new(py, &tensor.shape)?,
        path_to_tuple(py, &tensor.path)?,
        &tensor.same_as,
        chunks.map(|chunks| columns(py, chunks)).transpose()?,
        &tensor.data,
    )
        .into_pyobject(py)
}

fn columns<'py>(py: Python<'py>, chunks: &Chunks) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item(intern!(py, "file"), &chunks.file)?;
    dict.set_item(intern!(py, "offset"), &chunks.offset)?;
    dict.set_item(intern!(py, "length"), &chunks.length)?;
    dict.set_item(intern!(py, "start"), &chunks.start)?;
    dict.set_item(intern!(py, "size"), &chunks.size)?;
    Ok(dict)
}

fn path_to_tuple<'py>(py: Python<'py>, path: &[Step]) -> PyResult<Bound<'py, PyTuple>> {
    let steps = path.iter().map(|step| match step {
        Step::Key(key) => Ok(key.into_pyobject(py)?.into_any()),
        Step::Position(position) => Ok(position.into_pyobject(py)?.into_any()),
    });
    PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)
}

/// Returns the policy and the values of the ranks.
fn own_values<'py>(py: Python<'py>, own: &PerRank) -> PyResult<(&'static str, Bound<'py, PyList>)> {
    let policy = match own.policy {
        Policy::Reseed => "reseed",
        Policy::Require => "require",
        Policy::Drop => "drop",
    };
    Ok((
        policy,
        decode_all(py, own.ranks.iter().map(|value| value.get()))?,
    ))
}

/// Decodes JSON texts in one call.
fn decode_all<'py, 'a>(
    py: Python<'py>,
    texts: impl Iterator<Item = &'a str>,
) -> PyResult<Bound<'py, PyList>> {
    let list = format!("[{}]", texts.collect::<Vec<_>>().join(","));
    Ok(from_json(py, list.as_bytes())?.cast_into::<PyList>()?)
}

/// Decodes JSON with Python's `json` module, whose integers have no size limit.
fn from_json<'py>(py: Python<'py>, text: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?
        .call_method1("loads", (PyBytes::new(py, text),))
}
