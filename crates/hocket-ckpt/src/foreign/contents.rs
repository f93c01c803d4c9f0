//! The contents of a foreign checkpoint, for listing and reading.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::Value as Json;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{CkptError, Result};
use crate::format::digest::hex;
use crate::format::dtypes::Dtype;
use crate::manifest::PathStep;

/// Returns the name of a path: its steps joined by `.`.
pub(crate) fn join(path: &[PathStep]) -> String {
    let steps = path.iter().map(PathStep::to_string);
    steps.collect::<Vec<_>>().join(".")
}

/// The contents of a foreign checkpoint. An open checkpoint has taken the tensors out of it.
#[derive(Debug, Serialize)]
pub struct ForeignContents {
    /// `dcp`, `torch` or `safetensors`.
    pub format: &'static str,
    /// The folder or prefix of the files.
    pub root: String,
    /// Path below the root, and size in bytes.
    pub(crate) files: Vec<(String, u64)>,
    /// Tensors by name, in the order of the source.
    pub(crate) tensors: IndexMap<String, TensorRow>,
    /// Other leaves by name.
    pub values: IndexMap<String, ForeignValue>,
    /// Leaves that cannot be represented, by name, with the reason.
    pub opaque: IndexMap<String, String>,
    /// Zips inside files: file, offset, bytes, how the zip is enclosed, and the name of the leaf that owns it.
    pub items: Vec<(usize, u64, u64, ChunkWrapping, String)>,
    /// The `__metadata__` of safetensors files.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Paths of mappings with integer keys, which would otherwise look like lists.
    pub integer_keyed: Vec<Vec<PathStep>>,
}

impl ForeignContents {
    pub(crate) fn new(format: &'static str, root: &str) -> Self {
        Self {
            format,
            root: root.to_owned(),
            files: Vec::new(),
            tensors: IndexMap::new(),
            values: IndexMap::new(),
            opaque: IndexMap::new(),
            items: Vec::new(),
            metadata: BTreeMap::new(),
            integer_keyed: Vec::new(),
        }
    }

    /// Returns the path below the root and the size of each file.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
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
                self.opaque.insert(name, reason.to_owned());
            }
        }
    }

    /// Reports a tensor that two files hold, without an index that says which of them counts.
    pub(crate) fn set_ambiguous(&mut self, name: String, file: &str) {
        self.tensors.shift_remove(&name);
        let reason =
            format!("a tensor that `{file}` and another file hold, and the index does not list");
        self.opaque.insert(name, reason);
    }

    /// Returns whether a name is in use.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
            || self.values.contains_key(name)
            || self.opaque.contains_key(name)
    }

    /// Returns the digest of the contents in hexadecimal: the XXH3-128 of its JSON text. Ids of saves, and thereby
    /// names of files, are derived from it, so the text must not change.
    ///
    /// # Errors
    /// None in practice, because every key is a string.
    pub(crate) fn digest(&self) -> Result<String> {
        let mut text = BufWriter::new(HashWriter(Box::default()));
        serde_json::to_writer(&mut text, self)
            .map_err(io::Error::from)
            .and_then(|()| text.flush())
            .map_err(|error| CkptError::Invalid(format!("no JSON form: {error}")))?;
        Ok(hex(&text.get_ref().0.digest128().to_be_bytes()))
    }
}

/// The hash of a text that is never in memory as a whole.
struct HashWriter(Box<Xxh3>);

impl Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A leaf that is not a tensor.
#[derive(Debug, Serialize)]
pub struct ForeignValue {
    /// The path in the state tree.
    pub path: Vec<PathStep>,
    /// The value as JSON.
    pub value: Json,
}

/// A tensor.
#[derive(Debug, Serialize)]
pub(crate) struct TensorRow {
    pub(crate) dtype: Dtype,
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
pub enum ChunkWrapping {
    /// In a zip of its own, which must be located before reading.
    Torch,
    /// In a compressed zip.
    Zstd,
}

impl ChunkWrapping {
    /// Returns the name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Zstd => "zstd",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::format::digest::xxh3_128;

    /// A convert that is run again finds its files by their names, also with a later version of this crate.
    #[test]
    fn the_digest_is_that_of_a_text_that_stays() {
        let key = |key: &str| PathStep::Key(key.to_owned());
        let mut contents = ForeignContents::new("torch", "/models");
        contents.files.push(("a.pt".to_owned(), 99));
        let chunk = ChunkRow {
            file: 0,
            offset: 64,
            length: 8,
            start: vec![0, 0],
            size: vec![2, 1],
            strides: Some(vec![1, 2]),
            wrapped: Some(ChunkWrapping::Zstd),
        };
        let row = TensorRow {
            dtype: Dtype::parse("F32").unwrap(),
            shape: vec![2, 1],
            path: vec![key("w"), PathStep::Position(0)],
            same_as: None,
            chunks: vec![chunk],
        };
        contents.tensors.insert("w.0".to_owned(), row);
        let leaf = ForeignValue {
            path: vec![key("v")],
            value: Json::from(1.5),
        };
        contents.values.insert("v".to_owned(), leaf);
        contents
            .opaque
            .insert("o".to_owned(), "a \"set\"".to_owned());
        contents
            .items
            .push((0, 1, 2, ChunkWrapping::Torch, "v".to_owned()));
        let text = concat!(
            r#"{"format":"torch","root":"/models","files":[["a.pt",99]],"tensors":{"w.0":{"dtype":"F32","shape":[2,1],"#,
            r#""path":["w",0],"chunks":[{"file":0,"offset":64,"length":8,"start":[0,0],"size":[2,1],"strides":[1,2],"#,
            r#""wrapped":"zstd"}]}},"values":{"v":{"path":["v"],"value":1.5}},"opaque":{"o":"a \"set\""},"#,
            r#""items":[[0,1,2,"torch","v"]],"integer_keyed":[]}"#,
        );
        assert_eq!(contents.digest().unwrap(), hex(&xxh3_128(text.as_bytes())));
    }
}
