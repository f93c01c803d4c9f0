//! Python bindings of an open checkpoint.

use std::sync::Arc;

use hocket_ckpt::foreign::ForeignContents;
use hocket_ckpt::manifest::{
    IntegerColumn, ManifestChunks, ManifestDocument, PathStep, PerRank, PerRankPolicy,
};
use hocket_ckpt::{
    BoxRead, Checkpoint, CheckpointContents, ShardPlan, StoredTensor, StoredTensors, Strided,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::ckpt::{call, file_to_dict};

/// Adds this module's classes to the extension.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ChunkColumns>()?;
    module.add_class::<OpenedCheckpoint>()
}

/// An open checkpoint of any format.
#[pyclass(module = "hocket.native._native", name = "Checkpoint", frozen)]
pub struct OpenedCheckpoint(Checkpoint);

/// Tensor, start, size, address, strides.
type BoxItem = (PyBackedStr, Vec<u64>, Vec<u64>, usize, Option<Vec<isize>>);

fn box_reads(boxes: &[BoxItem]) -> Vec<BoxRead<'_>> {
    let reads = boxes.iter().map(|(tensor, start, size, address, strides)| {
        let (start, size, strides) = (start.clone(), size.clone(), strides.clone());
        // SAFETY: the caller keeps the memory alive and exclusive during the call, as the stub requires.
        unsafe { BoxRead::new(tensor, start, size, *address, strides) }
    });
    reads.collect()
}

#[pymethods]
impl OpenedCheckpoint {
    #[new]
    #[pyo3(signature = (uri, stored = None))]
    fn new(py: Python<'_>, uri: &str, stored: Option<PyBackedBytes>) -> PyResult<Self> {
        call(py, |interrupted| match stored {
            None => Checkpoint::open(uri, interrupted),
            Some(stored) => Checkpoint::open_stored(uri, &stored),
        })
        .map(Self)
    }

    #[staticmethod]
    fn open_foreign(py: Python<'_>, uri: &str) -> PyResult<Self> {
        call(py, |interrupted| Checkpoint::open_foreign(uri, interrupted)).map(Self)
    }

    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.0.with_contents(|contents| {
            let Some(CheckpointContents::Manifest(document)) = contents else {
                return Err(PyValueError::new_err(
                    "the contents were taken before, or are of another format",
                ));
            };
            let dict = PyDict::new(py);
            dict.set_item("save_id", &document.save_id)?;
            dict.set_item("step", document.step)?;
            dict.set_item("paths", PyTuple::new(py, self.0.files().paths())?)?;
            dict.set_item("user", from_json(py, document.user.get().as_bytes())?)?;
            Ok(dict)
        })
    }

    fn take_contents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.0.take_contents() {
            Some(CheckpointContents::Manifest(document)) => manifest_to_dict(py, document, &self.0),
            Some(CheckpointContents::Foreign(foreign, digest)) => {
                foreign_to_dict(py, foreign, &digest, &self.0)
            }
            None => Err(PyValueError::new_err("the contents were taken before")),
        }
    }

    #[pyo3(signature = (boxes, *, check = true, scratch_bytes = 67_108_864))]
    fn read_boxes(
        &self,
        py: Python<'_>,
        boxes: Vec<BoxItem>,
        check: bool,
        scratch_bytes: u64,
    ) -> PyResult<()> {
        let boxes = box_reads(&boxes);
        call(py, |interrupted| {
            self.0.read_boxes(&boxes, check, scratch_bytes, interrupted)
        })
    }

    fn open_bases(&self, py: Python<'_>) -> PyResult<()> {
        call(py, |interrupted| self.0.open_bases(interrupted))
    }

    #[pyo3(signature = (boxes, *, with_bases = true, scratch_bytes = 67_108_864))]
    fn check_boxes(
        &self,
        py: Python<'_>,
        boxes: Vec<BoxItem>,
        with_bases: bool,
        scratch_bytes: u64,
    ) -> PyResult<()> {
        let boxes = box_reads(&boxes);
        call(py, |interrupted| {
            self.0
                .check_boxes(&boxes, with_bases, scratch_bytes, interrupted)
        })
    }

    #[pyo3(signature = (boxes, *, scratch_bytes = 67_108_864))]
    fn apply_delta(&self, py: Python<'_>, boxes: Vec<BoxItem>, scratch_bytes: u64) -> PyResult<()> {
        let boxes = box_reads(&boxes);
        call(py, |interrupted| {
            self.0.apply_delta(&boxes, scratch_bytes, interrupted)
        })
    }

    fn strides(&self, py: Python<'_>, names: Vec<PyBackedStr>) -> PyResult<Vec<Strided>> {
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        call(py, |interrupted| self.0.strides(&names, interrupted))
    }

    #[pyo3(signature = (path, offset = None))]
    fn in_block(&self, path: &str, offset: Option<u64>) -> Vec<(&str, String)> {
        self.0.in_block(path, offset)
    }
}

/// The columns of a tensor's chunks, converted to Python objects when asked for.
#[pyclass(module = "hocket.native._native", frozen)]
pub struct ChunkColumns {
    source: ChunkSource,
    number: usize,
}

/// The owner of the columns of chunks.
pub(crate) enum ChunkSource {
    /// In an open checkpoint.
    Stored(Arc<StoredTensors>),
    /// In a plan.
    Planned(Arc<ShardPlan>),
}

#[pymethods]
impl ChunkColumns {
    fn __len__(&self) -> usize {
        self.chunks().map_or(0, |chunks| chunks.file.len())
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        if let Some(chunks) = self.chunks() {
            let integers = |column: &IntegerColumn| column.iter().collect::<Vec<u64>>();
            let each = |columns: &[IntegerColumn]| columns.iter().map(integers).collect::<Vec<_>>();
            dict.set_item("file", integers(&chunks.file))?;
            dict.set_item("offset", integers(&chunks.offset))?;
            dict.set_item("length", integers(&chunks.length))?;
            dict.set_item("start", each(&chunks.start))?;
            dict.set_item("size", each(&chunks.size))?;
        }
        Ok(dict)
    }
}

impl ChunkColumns {
    fn chunks(&self) -> Option<&ManifestChunks> {
        match &self.source {
            ChunkSource::Stored(tensors) => tensors.at(self.number).and_then(StoredTensor::columns),
            ChunkSource::Planned(plan) => plan.chunks(self.number),
        }
    }

    pub(crate) fn new(source: ChunkSource, number: usize) -> Self {
        Self { source, number }
    }
}

fn manifest_to_dict<'py>(
    py: Python<'py>,
    document: ManifestDocument,
    checkpoint: &Checkpoint,
) -> PyResult<Bound<'py, PyDict>> {
    let files = checkpoint.files().records();
    let files = files
        .map(|file| file_to_dict(py, file))
        .collect::<PyResult<Vec<_>>>()?;
    let leaves = document.values.0.iter();
    let decoded = decode_all(py, leaves.clone().map(|(_, leaf)| leaf.value.get()))?;
    let leaves = leaves.map(|(name, leaf)| (name.as_str(), leaf.path.as_slice()));
    let per_rank = document.per_rank.as_ref();
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
    dict.set_item("tensors", tensors_to_dict(py, checkpoint.tensors())?)?;
    dict.set_item("values", values_to_dict(py, leaves, decoded)?)?;
    dict.set_item(
        "per_rank",
        per_rank.map(|own| own_values(py, own)).transpose()?,
    )?;
    dict.set_item("user", from_json(py, document.user.get().as_bytes())?)?;
    dict.set_item("integer_keyed", paths_to_list(py, &document.integer_keyed)?)?;
    if let Some(thinned) = &document.thinned {
        let (tensors, bytes) = (thinned.tensors, thinned.bytes);
        let fields = (&thinned.save_id, &thinned.dropped, tensors, bytes);
        dict.set_item("thinned", fields)?;
    }
    if let Some(delta) = &document.delta {
        dict.set_item("delta", (&delta.base, &delta.save_id))?;
    }
    Ok(dict)
}

fn foreign_to_dict<'py>(
    py: Python<'py>,
    foreign: ForeignContents,
    digest: &str,
    checkpoint: &Checkpoint,
) -> PyResult<Bound<'py, PyDict>> {
    let leaves = foreign.values.iter();
    let texts: Vec<String> = leaves
        .clone()
        .map(|(_, leaf)| leaf.value.to_string())
        .collect();
    let decoded = decode_all(py, texts.iter().map(String::as_str))?;
    let leaves = leaves.map(|(name, leaf)| (name.as_str(), leaf.path.as_slice()));
    let items = foreign.items.iter();
    let items = items.map(|(file, offset, bytes, wrapped, name)| {
        (*file, *offset, *bytes, wrapped.name(), name.as_str())
    });
    let opaque = PyDict::new(py);
    for (name, reason) in &foreign.opaque {
        opaque.set_item(name, reason)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("format", foreign.format)?;
    dict.set_item("digest", digest)?;
    dict.set_item("root", &foreign.root)?;
    dict.set_item("files", foreign.files().collect::<Vec<_>>())?;
    dict.set_item("tensors", tensors_to_dict(py, checkpoint.tensors())?)?;
    dict.set_item("values", values_to_dict(py, leaves, decoded)?)?;
    dict.set_item("opaque", opaque)?;
    dict.set_item("items", PyTuple::new(py, items.collect::<Vec<_>>())?)?;
    dict.set_item("metadata", &foreign.metadata)?;
    dict.set_item("integer_keyed", paths_to_list(py, &foreign.integer_keyed)?)?;
    Ok(dict)
}

/// Returns the tensors by name; their chunks stay in columns.
fn tensors_to_dict<'py>(
    py: Python<'py>,
    tensors: &Arc<StoredTensors>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (number, tensor) in tensors.iter().enumerate() {
        dict.set_item(tensor.name(), tensor_to_tuple(py, tensors, number, tensor)?)?;
    }
    Ok(dict)
}

/// Returns the path and the decoded value of each leaf by name.
fn values_to_dict<'py, 'a>(
    py: Python<'py>,
    leaves: impl Iterator<Item = (&'a str, &'a [PathStep])>,
    decoded: Bound<'py, PyList>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for ((name, path), value) in leaves.zip(decoded) {
        dict.set_item(name, (path_to_tuple(py, path)?, value))?;
    }
    Ok(dict)
}

fn paths_to_list<'py>(
    py: Python<'py>,
    paths: &[Vec<PathStep>],
) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    paths.iter().map(|path| path_to_tuple(py, path)).collect()
}

/// Returns dtype, shape, path, `same_as`, the chunks' columns and the inlined data.
fn tensor_to_tuple<'py>(
    py: Python<'py>,
    tensors: &Arc<StoredTensors>,
    number: usize,
    tensor: &StoredTensor,
) -> PyResult<Bound<'py, PyTuple>> {
    let stored = || ChunkSource::Stored(Arc::clone(tensors));
    let columns = tensor.columns();
    let columns = columns.map(|_| ChunkColumns::new(stored(), number));
    (
        tensor.dtype(),
        PyTuple::new(py, tensor.shape())?,
        path_to_tuple(py, tensor.path())?,
        tensors.alias_of(tensor).map(StoredTensor::name),
        columns,
        tensor.data().map(|data| PyBytes::new(py, data)),
    )
        .into_pyobject(py)
}

fn path_to_tuple<'py>(py: Python<'py>, path: &[PathStep]) -> PyResult<Bound<'py, PyTuple>> {
    let steps = path.iter().map(|step| match step {
        PathStep::Key(key) => Ok(key.into_pyobject(py)?.into_any()),
        PathStep::Position(position) => Ok(position.into_pyobject(py)?.into_any()),
    });
    PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)
}

/// Returns the policy and the values of the ranks.
fn own_values<'py>(py: Python<'py>, own: &PerRank) -> PyResult<(&'static str, Bound<'py, PyList>)> {
    let policy = match own.policy {
        PerRankPolicy::Reseed => "reseed",
        PerRankPolicy::Require => "require",
        PerRankPolicy::Drop => "drop",
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
