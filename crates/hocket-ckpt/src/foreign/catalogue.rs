//! The contents of a foreign checkpoint as one JSON document, for listing and reading.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::error::{CkptError, Result};
use crate::manifest::PathStep;

/// Returns the name of a path: its steps joined by `.`.
pub(crate) fn join(path: &[PathStep]) -> String {
    let steps = path.iter().map(PathStep::to_string);
    steps.collect::<Vec<_>>().join(".")
}

/// The catalogue of a foreign checkpoint.
#[derive(Debug, Serialize)]
pub struct ForeignCatalogue {
    /// `dcp`, `torch` or `safetensors`.
    pub(crate) format: &'static str,
    /// The folder or prefix of the files.
    pub(crate) root: String,
    /// Path below the root, and size in bytes.
    pub(crate) files: Vec<(String, u64)>,
    /// Tensors by name, in the order of the source.
    pub(crate) tensors: IndexMap<String, TensorRow>,
    /// Other leaves by name: path and value.
    pub(crate) values: Map<String, Json>,
    /// Leaves that cannot be represented, by name, with the reason.
    pub(crate) opaque: Map<String, Json>,
    /// Zips inside files: file, offset, bytes, how the zip is enclosed, and the name of the leaf that owns it.
    pub(crate) items: Vec<(usize, u64, u64, ChunkWrapping, String)>,
    /// The `__metadata__` of safetensors files.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) metadata: BTreeMap<String, String>,
    /// Paths of mappings with integer keys, which would otherwise look like lists.
    pub(crate) integer_keyed: Vec<Vec<PathStep>>,
}

impl ForeignCatalogue {
    pub(crate) fn new(format: &'static str, root: &str) -> Self {
        Self {
            format,
            root: root.to_owned(),
            files: Vec::new(),
            tensors: IndexMap::new(),
            values: Map::new(),
            opaque: Map::new(),
            items: Vec::new(),
            metadata: BTreeMap::new(),
            integer_keyed: Vec::new(),
        }
    }

    /// Returns the folder or prefix of the files.
    pub(crate) fn root(&self) -> &str {
        &self.root
    }

    /// Returns the path below the root and the size of each file.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|(path, size)| (path.as_str(), *size))
    }

    /// Adds the metadata of one more file. A key whose value differs between files has none of them.
    pub(crate) fn add_metadata(&mut self, metadata: &BTreeMap<String, String>) {
        for (key, value) in metadata {
            let name = format!("__metadata__.{key}");
            if self.opaque.contains_key(&name) {
                continue;
            }
            let known = self
                .metadata
                .entry(key.clone())
                .or_insert_with(|| value.clone());
            if known != value {
                self.metadata.remove(key);
                let reason = "metadata of safetensors files that differs between them";
                self.opaque.insert(name, reason.into());
            }
        }
    }

    /// Reports a tensor that two files hold, without an index that says which of them counts.
    pub(crate) fn set_ambiguous(&mut self, name: String, file: &str) {
        self.tensors.shift_remove(&name);
        let reason =
            format!("a tensor that `{file}` and another file hold, and the index does not list");
        self.opaque.insert(name, reason.into());
    }

    /// Returns whether a name is in use.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
            || self.values.contains_key(name)
            || self.opaque.contains_key(name)
    }

    /// Returns the JSON document.
    ///
    /// # Errors
    /// None in practice, because every key is a string.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| CkptError::Invalid(format!("no JSON form: {error}")))
    }
}

/// A tensor.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TensorRow {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) path: Vec<PathStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) same_as: Option<String>,
    pub(crate) chunks: Vec<ChunkRow>,
}

impl TensorRow {
    /// Adds a chunk and extends the tensor's shape to contain it. Returns none if the number of dims differs or
    /// an end overflows.
    pub(crate) fn join(&mut self, chunk: ChunkRow) -> Option<()> {
        if chunk.start.len() != self.shape.len() || chunk.size.len() != self.shape.len() {
            return None;
        }
        for (extent, (start, size)) in self
            .shape
            .iter_mut()
            .zip(chunk.start.iter().zip(&chunk.size))
        {
            *extent = (*extent).max(start.checked_add(*size)?);
        }
        self.chunks.push(chunk);
        Some(())
    }
}

/// A chunk of a tensor.
#[derive(Debug, Serialize)]
pub(crate) struct ChunkRow {
    pub(crate) file: usize,
    /// Offset in the file of its first item, or of the zip that contains it.
    pub(crate) offset: u64,
    /// Bytes of its items, or of the zip that contains it.
    pub(crate) length: u64,
    pub(crate) start: Vec<u64>,
    pub(crate) size: Vec<u64>,
    /// Strides in items; none for C order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) strides: Option<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wrapped: Option<ChunkWrapping>,
}

/// How a chunk is enclosed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChunkWrapping {
    /// In a zip of its own, which must be located before reading.
    Torch,
    /// In a compressed zip.
    Zstd,
}
