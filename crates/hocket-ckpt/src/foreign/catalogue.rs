//! What a foreign checkpoint holds, as one JSON document for whoever shows it or reads from it.

use serde::Serialize;
use serde_json::{Map, Value as Json};

/// A step of a leaf's path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Step {
    Key(String),
    Position(i64),
}

/// The name of a path: its steps joined by `.`.
pub(crate) fn join(path: &[Step]) -> String {
    let steps = path.iter().map(|step| match step {
        Step::Key(key) => key.clone(),
        Step::Position(position) => position.to_string(),
    });
    steps.collect::<Vec<_>>().join(".")
}

/// A table of contents.
#[derive(Debug, Serialize)]
pub struct Catalogue {
    /// `dcp`, `torch` or `safetensors`.
    pub(crate) format: &'static str,
    /// The folder or prefix that the files stand in.
    pub(crate) root: String,
    /// Path below the root, and bytes.
    pub(crate) files: Vec<(String, u64)>,
    /// By name, in the source's order.
    pub(crate) tensors: Map<String, Json>,
    /// By name: path and value.
    pub(crate) values: Map<String, Json>,
    /// What has no form here, by name, and why.
    pub(crate) opaque: Map<String, Json>,
    /// Zips inside files: file, offset, bytes, `torch` or `zstd`, and whose they are.
    pub(crate) items: Vec<(usize, u64, u64, &'static str, String)>,
    /// Paths of mappings whose keys are integers, which would else look like lists.
    pub(crate) integer_keyed: Vec<Vec<Step>>,
}

impl Catalogue {
    pub(crate) fn new(format: &'static str, root: &str) -> Self {
        Self {
            format,
            root: root.to_owned(),
            files: Vec::new(),
            tensors: Map::new(),
            values: Map::new(),
            opaque: Map::new(),
            items: Vec::new(),
            integer_keyed: Vec::new(),
        }
    }

    /// Whether a name is taken.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
            || self.values.contains_key(name)
            || self.opaque.contains_key(name)
    }

    /// The document.
    ///
    /// # Errors
    /// Never in practice: every key is text.
    pub fn to_json(&self) -> crate::Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|error| crate::CkptError::Invalid(format!("no JSON form: {error}")))
    }
}

/// A tensor.
#[derive(Debug, Serialize)]
pub(crate) struct TensorRow {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<u64>,
    pub(crate) path: Vec<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) same_as: Option<String>,
    pub(crate) chunks: Vec<ChunkRow>,
}

impl TensorRow {
    /// Adds a box, and makes the tensor as large as it asks for; none where it has other dimensions, or ends nowhere.
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

    pub(crate) fn into_json(self) -> Json {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// A box of a tensor.
#[derive(Debug, Serialize)]
pub(crate) struct ChunkRow {
    pub(crate) file: usize,
    /// Where it begins in the file: its first item, or the zip that holds it.
    pub(crate) offset: u64,
    /// Bytes: of its items, or of the zip that holds it.
    pub(crate) length: u64,
    pub(crate) start: Vec<u64>,
    pub(crate) size: Vec<u64>,
    /// In items; none where it lies in C order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) strides: Option<Vec<u64>>,
    /// `torch`: a zip of its own, to be located before it is read. `zstd`: that, compressed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wrapped: Option<&'static str>,
}
