//! The plan of a checkpoint whose tensors are cut along their first dim for a number of ranks.
//!
//! A plan for thousands of ranks has millions of chunks. They are columns, as in the manifest, and the entries of a
//! file are made when the file is written.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::error::{CkptError, Result};
use crate::format::dtypes::Dtype;
use crate::format::names::entry_name;
use crate::format::safetensors::{entry_order, pad};
use crate::manifest::{IntegerColumn, ManifestChunks, ManifestDocument, encode_document};
use crate::read::boxes::pieces;

/// A tensor to cut.
pub struct ShardedTensor {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// A planned file.
struct ShardFile {
    rank: u64,
    /// Number of the file among those of its rank.
    number: u64,
    /// Tensor and chunk of each entry, in the order of the file.
    entries: Vec<(u32, u32)>,
}

/// An entry of a planned file.
pub struct ShardEntry {
    /// Index of the tensor.
    pub tensor: usize,
    /// Offsets in the tensor.
    pub start: Vec<u64>,
    /// Shape.
    pub size: Vec<u64>,
}

/// The files and chunks of a checkpoint for a number of ranks.
pub struct ShardPlan {
    tensors: Vec<ShardedTensor>,
    chunks: Vec<ManifestChunks>,
    files: Vec<ShardFile>,
}

impl ShardPlan {
    /// Cuts tensors as `torch.chunk` does along dim 0; rank 0 gets those without dims. A rank's files have at most
    /// `file_bytes` of data each, and a larger part of a tensor is cut further.
    ///
    /// # Errors
    /// `Invalid` if a file would have two entries of one name, or one with a name that safetensors reserves.
    pub fn new(tensors: Vec<ShardedTensor>, ranks: u64, file_bytes: u64) -> Result<Self> {
        if tensors.iter().any(|tensor| tensor.name == "__metadata__") {
            return Err(CkptError::Invalid(
                "a tensor is called `__metadata__`, a key that safetensors reserves for a file's metadata. \
                 Rename it: `--rename __metadata__=NAME`"
                    .to_owned(),
            ));
        }
        let chunks = tensors.iter();
        let mut plan = Self {
            chunks: chunks
                .map(|tensor| ManifestChunks::empty(tensor.shape.len()))
                .collect(),
            tensors,
            files: Vec::new(),
        };
        let rows = plan.tensors.iter().map(|tensor| tensor.shape.first());
        // Ranks beyond the row count of the longest tensor hold nothing.
        let holders = rows.map(|rows| rows.copied().unwrap_or(1)).max();
        for rank in 0..ranks.min(holders.unwrap_or(0)) {
            plan.add_rank(rank, ranks, file_bytes)?;
        }
        Ok(plan)
    }

    fn add_rank(&mut self, rank: u64, ranks: u64, file_bytes: u64) -> Result<()> {
        let (mut filled, mut number) = (0, 0);
        let mut entries: Vec<(u32, u32)> = Vec::new();
        for tensor in 0..self.tensors.len() {
            let Some((from, size)) = self.part(tensor, rank, ranks) else {
                continue;
            };
            let item_bytes = self.tensors[tensor].dtype.item_bytes();
            for (mut start, size) in pieces(&size, (file_bytes / item_bytes).max(1)) {
                if let Some(first) = start.first_mut() {
                    *first += from;
                }
                let bytes = size.iter().product::<u64>() * item_bytes;
                if !entries.is_empty() && filled + bytes > file_bytes {
                    self.finish_file(rank, number, std::mem::take(&mut entries))?;
                    (filled, number) = (0, number + 1);
                }
                filled += bytes;
                let columns = &mut self.chunks[tensor];
                entries.push((tensor as u32, columns.file.len() as u32));
                columns.file.push(self.files.len() as u64);
                columns.length.push(bytes);
                for dim in 0..size.len() {
                    columns.start[dim].push(start[dim]);
                    columns.size[dim].push(size[dim]);
                }
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        self.finish_file(rank, number, entries)
    }

    /// Returns the first row and the size of a rank's part of a tensor; none if it is empty.
    fn part(&self, tensor: usize, rank: u64, ranks: u64) -> Option<(u64, Vec<u64>)> {
        let shape = &self.tensors[tensor].shape;
        let Some(&rows) = shape.first() else {
            return (rank == 0).then(|| (0, Vec::new()));
        };
        let piece = rows.div_ceil(ranks);
        let from = rank.saturating_mul(piece).min(rows);
        let mut size = shape.clone();
        size[0] = piece.min(rows - from);
        (!size.contains(&0)).then_some((from, size))
    }

    /// Orders the entries of a file, and sets the offsets of their chunks.
    fn finish_file(&mut self, rank: u64, number: u64, entries: Vec<(u32, u32)>) -> Result<()> {
        let named = entries.iter().map(|entry| (self.name(*entry), *entry));
        let mut named: Vec<(String, (u32, u32))> = named.collect();
        let dtype = |entry: (u32, u32)| self.tensors[entry.0 as usize].dtype;
        named.sort_by(|a, b| entry_order((dtype(a.1), &a.0), (dtype(b.1), &b.0)));
        let mut names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CkptError::Invalid(format!(
                "two entries of a file would be called `{}`: a part of one tensor, and another tensor. \
                 Rename one of them with `hocket-ckpt convert --rename`",
                pair[0]
            )));
        }
        let mut offsets = Vec::with_capacity(named.len());
        let mut offset = 0;
        for (_, (tensor, chunk)) in &named {
            offsets.push((*tensor, *chunk, offset));
            offset += self.chunks[*tensor as usize].length.at(*chunk as usize);
        }
        offsets.sort_unstable();
        for (tensor, _, offset) in offsets {
            self.chunks[tensor as usize].offset.push(offset);
        }
        self.files.push(ShardFile {
            rank,
            number,
            entries: named.into_iter().map(|(_, entry)| entry).collect(),
        });
        Ok(())
    }

    fn name(&self, (tensor, chunk): (u32, u32)) -> String {
        let entry = self.entry((tensor, chunk));
        let tensor = &self.tensors[entry.tensor];
        entry_name(&tensor.name, &entry.start, entry.size == tensor.shape)
    }

    fn entry(&self, (tensor, chunk): (u32, u32)) -> ShardEntry {
        let columns = &self.chunks[tensor as usize];
        let at = |column: &IntegerColumn| column.at(chunk as usize);
        ShardEntry {
            tensor: tensor as usize,
            start: columns.start.iter().map(at).collect(),
            size: columns.size.iter().map(at).collect(),
        }
    }

    /// Returns the rank of each file and the file's number among those of its rank.
    pub fn files(&self) -> impl Iterator<Item = (u64, u64)> {
        self.files.iter().map(|file| (file.rank, file.number))
    }

    /// Returns the header of a file and its entries in order; none if there is no such file.
    ///
    /// # Errors
    /// `Invalid` if the header is larger than readers accept.
    pub fn file(
        &self,
        index: usize,
        metadata: &BTreeMap<String, String>,
    ) -> Option<Result<(Vec<u8>, Vec<ShardEntry>)>> {
        let file = self.files.get(index)?;
        let mut header = Map::with_capacity(file.entries.len() + 1);
        header.insert("__metadata__".to_owned(), json!(metadata));
        for &(tensor, chunk) in &file.entries {
            let columns = &self.chunks[tensor as usize];
            let offset = columns.offset.at(chunk as usize);
            let end = offset + columns.length.at(chunk as usize);
            let dtype = self.tensors[tensor as usize].dtype.name();
            let shape = self.entry((tensor, chunk)).size;
            header.insert(
                self.name((tensor, chunk)),
                json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}),
            );
        }
        let entries = file.entries.iter().map(|entry| self.entry(*entry));
        Some(pad(&Value::Object(header)).map(|header| (header, entries.collect())))
    }

    /// Returns the chunks of a tensor.
    #[must_use]
    pub fn chunks(&self, tensor: usize) -> Option<&ManifestChunks> {
        let chunks = self.chunks.get(tensor)?;
        (!chunks.file.is_empty()).then_some(chunks)
    }

    /// Returns the manifest with the chunks of the plan.
    ///
    /// # Arguments
    /// - `document`: the document as JSON without chunks.
    ///
    /// # Errors
    /// `Invalid` for another document, and those of [`crate::encode`].
    pub fn encode(&self, document: &[u8]) -> Result<Vec<u8>> {
        let mut document: ManifestDocument = serde_json::from_slice(document)
            .map_err(|error| CkptError::Invalid(format!("the document: {error}")))?;
        let named = self.tensors.iter().enumerate();
        let mut numbers: BTreeMap<&str, usize> = named
            .map(|(number, tensor)| (tensor.name.as_str(), number))
            .collect();
        for (name, tensor) in &mut document.tensors.0 {
            let number = numbers.remove(name.as_str());
            tensor.chunks = number.and_then(|number| self.chunks(number)).cloned();
        }
        if let Some(name) = numbers.keys().next() {
            return Err(CkptError::Invalid(format!(
                "the document lacks the tensor `{name}` of the plan"
            )));
        }
        encode_document(document)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use proptest::prelude::*;

    use super::*;
    use crate::manifest::tiling;

    fn tensor(name: &str, dtype: &str, shape: &[u64]) -> ShardedTensor {
        ShardedTensor {
            name: name.to_owned(),
            dtype: Dtype::parse(dtype).unwrap(),
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn one_file_cannot_have_two_entries_of_a_name() {
        let plan = |names: [&str; 2]| {
            let tensors = names.map(|name| tensor(name, "F32", &[4])).into();
            ShardPlan::new(tensors, 2, 1 << 20)
                .err()
                .map(|error| error.to_string())
        };
        assert_eq!(plan(["a", "b"]), None);
        assert!(plan(["a", "__metadata__"]).unwrap().contains("reserves"));
        let tensors = vec![tensor("a", "F32", &[4]), tensor("a@2", "F32", &[1])];
        assert!(ShardPlan::new(tensors, 2, 1 << 20).is_ok());
        let tensors = vec![tensor("a", "F32", &[4]), tensor("a@0", "F32", &[1])];
        let error = ShardPlan::new(tensors, 2, 1 << 20).err().unwrap();
        assert!(error.to_string().contains("would be called `a@0`"));
    }

    proptest! {
        #[test]
        fn the_chunks_tile_each_tensor_and_lie_end_to_end_in_files_within_the_limit(
            shapes in prop::collection::vec((0_usize..3, prop::collection::vec(0_u64..9, 0..3)), 1..5),
            ranks in 1_u64..12,
            file_bytes in 1_u64..200,
        ) {
            let dtypes = ["U8", "F32", "F64"];
            let tensors: Vec<_> = shapes
                .iter()
                .enumerate()
                .map(|(number, (dtype, shape))| tensor(&format!("t{number}"), dtypes[*dtype], shape))
                .collect();
            let plan = ShardPlan::new(tensors, ranks, file_bytes).unwrap();
            let mut files: Vec<Vec<(u64, u64)>> = vec![Vec::new(); plan.files.len()];
            for (number, tensor) in plan.tensors.iter().enumerate() {
                let columns = &plan.chunks[number];
                let count = columns.file.len();
                prop_assert_eq!(tiling::check_columns(&tensor.shape, count, &columns.start, &columns.size), Ok(()));
                for chunk in 0..count {
                    let rank = plan.files[columns.file.at(chunk) as usize].rank;
                    if let Some(rows) = tensor.shape.first() {
                        let piece = rows.div_ceil(ranks);
                        let start = columns.start[0].at(chunk);
                        prop_assert!(start >= rank * piece && start < (rank + 1) * piece);
                    }
                    files[columns.file.at(chunk) as usize].push((columns.offset.at(chunk), columns.length.at(chunk)));
                }
            }
            for ranges in &mut files {
                ranges.sort_unstable();
                let mut end = 0;
                for &(offset, length) in ranges.iter() {
                    prop_assert_eq!(offset, end);
                    end += length;
                }
                prop_assert!(end <= file_bytes || ranges.len() == 1);
            }
        }
    }
}
