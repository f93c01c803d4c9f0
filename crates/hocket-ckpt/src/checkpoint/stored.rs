//! Where the tensors of a checkpoint are stored: boxes and their byte ranges, by name.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use indexmap::IndexMap;

use crate::error::{CkptError, Result};
use crate::foreign::{ChunkRow, ChunkWrapping, TensorRow};
use crate::format::digest::{BLOCK_BYTES, from_base64};
use crate::format::dtypes::Dtype;
use crate::format::names::entry_name;
use crate::manifest::tiling::TensorBox;
use crate::manifest::{IntegerColumn, ManifestChunks, ManifestTensor, PathStep, dtype_of};
use crate::read::boxes::StoredBox;

/// With fewer chunks, a scan of all of them costs less than a search.
const SEARCHED_FROM: usize = 16;

/// Number of tensors that an error names.
const NAMED: usize = 5;

/// The tensors of a checkpoint, in its order.
pub struct StoredTensors {
    tensors: Vec<StoredTensor>,
    by_name: HashMap<Arc<str>, usize>,
    /// The index for lookups of blocks, built at the first one.
    by_block: OnceLock<ByBlock>,
}

/// The chunks by their place, to find those in a block.
struct ByBlock {
    /// The chunks of each file by offset: start, end, tensor, chunk.
    files: HashMap<u64, Vec<(u64, u64, usize, usize)>>,
    /// The tensors that share the storage of each owner, itself included.
    sharing: HashMap<usize, Vec<usize>>,
}

/// A tensor of a checkpoint.
pub struct StoredTensor {
    name: Arc<str>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    path: Vec<PathStep>,
    /// Index of the tensor that owns the storage; its own, unless it is an alias.
    pub(crate) owner: usize,
    pub(crate) chunks: StoredChunks,
    /// The whole tensor, if the manifest contains it.
    pub(crate) data: Option<Vec<u8>>,
}

/// The chunks of a tensor.
pub struct StoredChunks {
    columns: ManifestChunks,
    /// For each chunk, what a manifest's chunks never have; empty if no chunk of the tensor has it.
    foreign: Vec<ForeignChunk>,
    /// Greatest size of a chunk along dim 0; none if they are not sorted along it.
    longest: OnceLock<Option<u64>>,
}

#[derive(Default)]
struct ForeignChunk {
    strides: Option<Vec<u64>>,
    wrapped: Option<ChunkWrapping>,
}

impl StoredTensors {
    /// Takes the tensors of a checked manifest.
    ///
    /// # Errors
    /// `Invalid` for an unknown dtype, which the check has excluded.
    pub(crate) fn of_manifest(rows: Vec<(String, ManifestTensor)>) -> Result<Self> {
        let (mut tensors, mut aliases) = (Vec::new(), Vec::new());
        for (name, row) in rows {
            let chunks = row.chunks;
            let chunks = chunks.unwrap_or_else(|| ManifestChunks::empty(row.shape.len()));
            aliases.push(row.same_as);
            tensors.push(StoredTensor {
                name: name.into(),
                dtype: dtype_of(&row.dtype).map_err(CkptError::Invalid)?,
                owner: 0,
                chunks: StoredChunks::new(chunks, Vec::new()),
                data: row.data.as_deref().and_then(from_base64),
                shape: row.shape,
                path: row.path,
            });
        }
        Ok(Self::new(tensors, aliases))
    }

    /// Takes the tensors of a checkpoint of another format.
    pub(crate) fn of_foreign(rows: IndexMap<String, TensorRow>) -> Self {
        let (mut tensors, mut aliases) = (Vec::new(), Vec::new());
        for (name, row) in rows {
            aliases.push(row.same_as);
            tensors.push(StoredTensor {
                name: name.into(),
                dtype: row.dtype,
                chunks: StoredChunks::of_rows(row.chunks, row.shape.len()),
                shape: row.shape,
                path: row.path,
                owner: 0,
                data: None,
            });
        }
        Self::new(tensors, aliases)
    }

    fn new(mut tensors: Vec<StoredTensor>, aliases: Vec<Option<String>>) -> Self {
        let names = tensors.iter().map(|tensor| Arc::clone(&tensor.name));
        let by_name: HashMap<Arc<str>, usize> = names.zip(0..).collect();
        for (number, alias) in aliases.into_iter().enumerate() {
            let owner = alias.and_then(|name| by_name.get(name.as_str()).copied());
            tensors[number].owner = owner.unwrap_or(number);
        }
        Self {
            tensors,
            by_name,
            by_block: OnceLock::new(),
        }
    }

    /// Returns the tensors in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &StoredTensor> {
        self.tensors.iter()
    }

    /// Returns the tensor whose storage another one shares; none if it has its own.
    #[must_use]
    pub fn alias_of(&self, tensor: &StoredTensor) -> Option<&StoredTensor> {
        let owner = self.tensors.get(tensor.owner)?;
        (!std::ptr::eq(owner, tensor)).then_some(owner)
    }

    /// Returns a tensor by its index.
    #[must_use]
    pub fn at(&self, number: usize) -> Option<&StoredTensor> {
        self.tensors.get(number)
    }

    /// Returns the tensor that owns the storage of the one with this name.
    ///
    /// # Errors
    /// `Invalid` if there is none.
    pub(crate) fn owner_of(&self, name: &str) -> Result<&StoredTensor> {
        let number = self.by_name.get(name).copied();
        let owner = number.and_then(|number| self.tensors.get(self.tensors[number].owner));
        owner.ok_or_else(|| CkptError::Invalid(format!("there is no tensor `{name}`")))
    }

    /// Returns the tensors and chunks that overlap a block, in order.
    ///
    /// Chunks are named as in the data file: `weight@4,0` starts at row 4; a tensor stored whole has its own
    /// name. An alias is listed with the chunks of the tensor that owns the storage.
    ///
    /// # Arguments
    /// - `offset`: the start of the block in the data of the file; none for the whole file.
    /// - `only`: the owners to consider; none for all.
    pub(crate) fn in_block(
        &self,
        file: usize,
        offset: Option<u64>,
        only: Option<&HashSet<usize>>,
    ) -> Vec<(&str, String)> {
        let by_block = self.by_block.get_or_init(|| ByBlock::of(&self.tensors));
        let runs = by_block
            .files
            .get(&(file as u64))
            .map_or(&[][..], Vec::as_slice);
        // Chunks do not overlap, so the order by start is also that by end.
        let runs = match offset {
            None => runs,
            Some(offset) => {
                let first = runs.partition_point(|(_, end, ..)| *end <= offset);
                let behind = offset.saturating_add(BLOCK_BYTES);
                let last = runs.partition_point(|(start, ..)| *start < behind);
                runs.get(first..last).unwrap_or_default()
            }
        };
        let mut found = Vec::new();
        for &(.., owner, chunk) in runs {
            if only.is_none_or(|only| only.contains(&owner)) {
                let sharing = by_block.sharing.get(&owner).map_or(&[][..], Vec::as_slice);
                found.extend(sharing.iter().map(|&number| (number, owner, chunk)));
            }
        }
        found.sort_by_key(|(number, ..)| *number);
        let pairs = found.into_iter().map(|(number, owner, chunk)| {
            let name = &*self.tensors[number].name;
            (name, self.tensors[owner].chunk_name(chunk))
        });
        pairs.collect()
    }

    /// Names the tensors in a block, for an error message: ``Tensor `weight` (chunk `weight@4,0`)``.
    pub(crate) fn describe_block(
        &self,
        file: usize,
        offset: Option<u64>,
        only: &HashSet<usize>,
    ) -> String {
        let pairs = self.in_block(file, offset, Some(only));
        let names: Vec<String> = pairs
            .iter()
            .take(NAMED)
            .map(|(name, chunk)| match *name == chunk {
                true => format!("`{name}`"),
                false => format!("`{name}` (chunk `{chunk}`)"),
            })
            .collect();
        match pairs.len() {
            0 => match only.iter().collect::<Vec<_>>()[..] {
                [number] => format!("Tensor `{}`", self.tensors[*number].name),
                _ => "A tensor".to_owned(),
            },
            count if count > NAMED => {
                format!("Tensor {} and {} more", names.join(", "), count - NAMED)
            }
            _ => format!("Tensor {}", names.join(", ")),
        }
    }

    /// Returns the indices of the owners of these tensors; unknown names are left out.
    pub(crate) fn owners<'a>(&self, names: impl Iterator<Item = &'a str>) -> HashSet<usize> {
        let numbers = names.filter_map(|name| self.by_name.get(name));
        numbers.map(|&number| self.tensors[number].owner).collect()
    }
}

impl StoredTensor {
    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the dtype's safetensors name.
    #[must_use]
    pub fn dtype(&self) -> &str {
        self.dtype.name()
    }

    /// Returns the global shape.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the path in the state tree.
    #[must_use]
    pub fn path(&self) -> &[PathStep] {
        &self.path
    }

    /// Returns the bytes of the whole tensor, if the manifest contains them.
    #[must_use]
    pub fn data(&self) -> Option<&[u8]> {
        self.data.as_deref()
    }

    /// Returns the columns of the chunks; none if the manifest contains the tensor, or for an alias.
    #[must_use]
    pub fn columns(&self) -> Option<&ManifestChunks> {
        let columns = &self.chunks.columns;
        (!columns.file.is_empty()).then_some(columns)
    }

    /// Returns a chunk's name in the data file.
    fn chunk_name(&self, chunk: usize) -> String {
        let columns = &self.chunks.columns;
        let sizes = columns.size.iter().map(|column| column.at(chunk));
        let is_whole = sizes.eq(self.shape.iter().copied());
        entry_name(&self.name, &items(&columns.start, chunk), is_whole)
    }
}

impl StoredChunks {
    fn new(columns: ManifestChunks, foreign: Vec<ForeignChunk>) -> Self {
        Self {
            columns,
            foreign,
            longest: OnceLock::new(),
        }
    }

    fn of_rows(rows: Vec<ChunkRow>, num_dims: usize) -> Self {
        let mut columns = ManifestChunks::empty(num_dims);
        let is_plain = |row: &ChunkRow| row.strides.is_none() && row.wrapped.is_none();
        let has_own = !rows.iter().all(is_plain);
        let mut foreign = Vec::with_capacity(if has_own { rows.len() } else { 0 });
        for row in rows {
            columns.file.push(row.file as u64);
            columns.offset.push(row.offset);
            columns.length.push(row.length);
            for dim in 0..num_dims {
                columns.start[dim].push(row.start[dim]);
                columns.size[dim].push(row.size[dim]);
            }
            if has_own {
                foreign.push(ForeignChunk {
                    strides: row.strides,
                    wrapped: row.wrapped,
                });
            }
        }
        Self::new(columns, foreign)
    }

    pub(crate) fn len(&self) -> usize {
        self.columns.file.len()
    }

    /// Returns a chunk as it is stored, if nothing encloses it.
    pub(crate) fn get(&self, chunk: usize) -> StoredBox {
        StoredBox {
            file: self.file(chunk),
            offset: self.columns.offset.at(chunk),
            region: self.region(chunk),
            strides: self.strides(chunk).map(<[u64]>::to_vec),
        }
    }

    pub(crate) fn region(&self, chunk: usize) -> TensorBox {
        TensorBox {
            start: items(&self.columns.start, chunk),
            size: items(&self.columns.size, chunk),
        }
    }

    /// Returns whether chunks may have strides or be enclosed.
    pub(crate) fn is_foreign(&self) -> bool {
        !self.foreign.is_empty()
    }

    pub(crate) fn file(&self, chunk: usize) -> usize {
        self.columns.file.at(chunk) as usize
    }

    /// Returns a chunk's strides in items, if it is not in C order.
    pub(crate) fn strides(&self, chunk: usize) -> Option<&[u64]> {
        self.foreign.get(chunk)?.strides.as_deref()
    }

    pub(crate) fn length(&self, chunk: usize) -> u64 {
        self.columns.length.at(chunk)
    }

    pub(crate) fn wrapped(&self, chunk: usize) -> Option<ChunkWrapping> {
        self.foreign.get(chunk).and_then(|own| own.wrapped)
    }

    /// Returns the chunks that overlap a box, in order.
    pub(crate) fn near(&self, region: &TensorBox) -> Vec<usize> {
        let mut found: Vec<usize> = self.in_reach(region).collect();
        let dims = self.columns.start.iter().zip(&self.columns.size);
        for (dim, (starts, sizes)) in dims.enumerate() {
            let (low, high) = (region.start[dim], region.start[dim] + region.size[dim]);
            found.retain(|&chunk| {
                let start = starts.at(chunk);
                start < high && start.saturating_add(sizes.at(chunk)) > low
            });
        }
        found
    }

    /// Returns a range that contains all chunks which overlap a box along dim 0.
    fn in_reach(&self, region: &TensorBox) -> std::ops::Range<usize> {
        let count = self.len();
        let (Some(starts), Some(&from)) = (self.columns.start.first(), region.start.first()) else {
            return 0..count;
        };
        if count < SEARCHED_FROM {
            return 0..count;
        }
        // A save writes the chunks of a tensor in this order, mostly; a manifest may have any.
        let longest = self.longest.get_or_init(|| {
            let sizes = self.columns.size.first()?;
            starts.iter().is_sorted().then(|| sizes.iter().max())?
        });
        let Some(longest) = *longest else {
            return 0..count;
        };
        let end = from.saturating_add(region.size[0]);
        let first = starts.partition_point(|start| start.saturating_add(longest) <= from);
        first..starts.partition_point(|start| start < end).max(first)
    }
}

/// Returns the integers of a chunk in columns.
fn items(columns: &[IntegerColumn], chunk: usize) -> Vec<u64> {
    columns.iter().map(|column| column.at(chunk)).collect()
}

impl ByBlock {
    fn of(tensors: &[StoredTensor]) -> Self {
        let mut files: HashMap<u64, Vec<(u64, u64, usize, usize)>> = HashMap::new();
        let mut sharing: HashMap<usize, Vec<usize>> = HashMap::new();
        for (number, tensor) in tensors.iter().enumerate() {
            sharing.entry(tensor.owner).or_default().push(number);
            let columns = &tensor.chunks.columns;
            let places = columns.file.iter().zip(columns.offset.iter());
            let places = places.zip(columns.length.iter()).enumerate();
            for (chunk, ((file, start), length)) in places {
                let end = start.saturating_add(length);
                let of_file = files.entry(file).or_default();
                of_file.push((start, end, number, chunk));
            }
        }
        for runs in files.values_mut() {
            runs.sort_unstable();
        }
        Self { files, sharing }
    }
}

#[cfg(test)]
mod tests;
