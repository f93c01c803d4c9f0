//! Distributed checkpoints of torch: the pickle `.metadata` and the `.distcp` files that it refers to.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::contents::{ChunkRow, ChunkWrapping, ForeignContents, TensorRow, join};
use super::dcp_items::{ItemLocation, Values, read_values};
use super::pickle::{
    AllowedGlobals, DecodedPickle, GlobalMeaning, PickleFault, PickleValue, decode,
};
use super::safetensors_header::SafetensorsHeader;
use crate::error::{CkptError, Result};
use crate::format::dtypes::TorchDtype;
use crate::format::names::is_plain_name;
use crate::manifest::tiling;
use crate::manifest::{MAX_DIMS, PathStep};
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// The file whose presence marks the checkpoint as committed.
pub(crate) const METADATA_NAME: &str = ".metadata";

const METADATA_LIMIT: u64 = 512 << 20;

const ZSTD_STREAM: &str = "stream.zstd/1";

/// Lists a distributed checkpoint.
pub(crate) fn contents(
    place: &CheckpointPlace,
    metadata: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    if metadata.size() > METADATA_LIMIT {
        return Err(metadata.corrupt(
            None,
            format!(
                "it has {} bytes; expected at most {METADATA_LIMIT}",
                metadata.size()
            ),
        ));
    }
    let bytes = metadata.read(0..metadata.size(), interrupted)?;
    let fault = |fault: PickleFault| fault.at(place.uri(), METADATA_NAME);
    let pickle = decode(&bytes, AllowedGlobals::Metadata).map_err(fault)?;
    let mut contents = ForeignContents::new("dcp", place.uri());
    let listed = MetadataReader::read(&pickle, &mut contents).map_err(fault)?;
    check_sizes(place, &mut contents, &listed.ends, interrupted)?;
    place_safetensors(place, &mut contents, interrupted)?;
    read_values(place, &mut contents, listed.values, interrupted)?;
    Ok(contents)
}

/// What the metadata's three tables hold beside the tensors.
struct DcpTables {
    values: Values,
    /// File and end of each item.
    ends: Vec<(usize, u64)>,
}

/// A reader of the metadata's three tables.
struct MetadataReader<'a, 'p> {
    pickle: &'a DecodedPickle<'p>,
    paths: HashMap<&'a str, Vec<PathStep>>,
    items: HashMap<(&'a str, Vec<u64>), ItemLocation>,
}

fn broken<T>(reason: impl Into<String>) -> std::result::Result<T, PickleFault> {
    Err(PickleFault::Broken(reason.into()))
}

impl<'a, 'p> MetadataReader<'a, 'p> {
    fn read(
        pickle: &'a DecodedPickle<'p>,
        contents: &mut ForeignContents,
    ) -> std::result::Result<DcpTables, PickleFault> {
        let Some((_, state)) = pickle.record(pickle.root, GlobalMeaning::Metadata) else {
            return broken("it is no `Metadata`");
        };
        let table = |name: &str| {
            pickle
                .field(state, name)
                .and_then(|table| pickle.pairs(table))
        };
        let Some(entries) = table("state_dict_metadata") else {
            return broken("it has no `state_dict_metadata`");
        };
        let Some(storage) = table("storage_data") else {
            return broken("it has no `storage_data`; the writer did not say where its items are");
        };
        let mut reader = Self {
            pickle,
            paths: HashMap::new(),
            items: HashMap::with_capacity(storage.len()),
        };
        reader.read_storage(storage, contents)?;
        reader.read_paths(table("planner_data").unwrap_or_default());
        let ends = reader
            .items
            .values()
            .map(|item| (item.file, item.offset.saturating_add(item.length)))
            .collect();
        let mut values = Vec::new();
        for &(name, entry) in entries {
            let Some(name) = pickle.text(name) else {
                return broken("a name in `state_dict_metadata` is no text");
            };
            if contents.has(name) {
                return broken(format!("`{name}` is listed twice"));
            }
            if pickle.record(entry, GlobalMeaning::BytesStorage).is_some() {
                let Some(item) = reader.items.get(&(name, Vec::new())) else {
                    return broken(format!(
                        "`{name}` has no entry in `storage_data`: it was never written"
                    ));
                };
                values.push((name.to_owned(), reader.path(name), item.clone()));
            } else {
                reader.add_tensor(name, entry, contents)?;
            }
        }
        Ok(DcpTables { values, ends })
    }

    fn read_storage(
        &mut self,
        storage: &'a [(PickleValue, PickleValue)],
        contents: &mut ForeignContents,
    ) -> std::result::Result<(), PickleFault> {
        let pickle = self.pickle;
        let mut files: HashMap<&str, usize> = HashMap::new();
        for &(index, info) in storage {
            let index = pickle
                .record(index, GlobalMeaning::Index)
                .map(|(_, state)| state);
            let info = pickle
                .record(info, GlobalMeaning::StorageInfo)
                .map(|(_, state)| state);
            let (Some(index), Some(info)) = (index, info) else {
                return broken("an item of `storage_data` is malformed");
            };
            let name = pickle
                .field(index, "fqn")
                .and_then(|name| pickle.text(name));
            let path = pickle
                .field(info, "relative_path")
                .and_then(|path| pickle.text(path));
            let number = |key| match pickle.field(info, key) {
                Some(PickleValue::Int(number)) => u64::try_from(number).ok(),
                _ => None,
            };
            let (Some(name), Some(path)) = (name, path) else {
                return broken("an item of `storage_data` has no name or no file");
            };
            let (Some(offset), Some(length)) = (number("offset"), number("length")) else {
                return broken(format!(
                    "the item of `{name}` has no offset and length from 0 on"
                ));
            };
            if !is_plain_name(path) {
                return Err(PickleFault::Unsafe(format!(
                    "the item of `{name}` lies in `{}`, which is no plain file name",
                    path.chars().take(80).collect::<String>()
                )));
            }
            let start = match pickle.field(index, "offset") {
                None | Some(PickleValue::None) => Vec::new(),
                Some(offset) => match pickle.extents(offset) {
                    Some(start) => start,
                    None => {
                        return broken(format!("a chunk of `{name}` has no offsets of 0 or more"));
                    }
                },
            };
            let file = *files.entry(path).or_insert_with(|| {
                contents.files.push((path.to_owned(), 0));
                contents.files.len() - 1
            });
            let wrapped = self.wrapping(name, info)?;
            contents
                .items
                .push((file, offset, length, wrapped, name.to_owned()));
            self.items.insert(
                (name, start),
                ItemLocation {
                    file,
                    offset,
                    length,
                    wrapped,
                },
            );
        }
        Ok(())
    }

    fn wrapping(
        &self,
        name: &str,
        info: PickleValue,
    ) -> std::result::Result<ChunkWrapping, PickleFault> {
        let descriptors = match self.pickle.field(info, "transform_descriptors") {
            None | Some(PickleValue::None) => return Ok(ChunkWrapping::Torch),
            Some(list) => self.pickle.items(list).unwrap_or_default(),
        };
        match descriptors {
            [] => Ok(ChunkWrapping::Torch),
            &[one] if self.pickle.text(one) == Some(ZSTD_STREAM) => Ok(ChunkWrapping::Zstd),
            _ => broken(format!(
                "the item of `{name}` was transformed in a way that is not known here"
            )),
        }
    }

    fn read_paths(&mut self, table: &'a [(PickleValue, PickleValue)]) {
        for &(name, path) in table {
            let (Some(name), Some(steps)) = (self.pickle.text(name), self.pickle.items(path))
            else {
                continue;
            };
            let step = |&step: &PickleValue| match step {
                PickleValue::Int(position) => Some(PathStep::Position(position)),
                step => self
                    .pickle
                    .text(step)
                    .map(|key| PathStep::Key(key.to_owned())),
            };
            let steps: Option<Vec<PathStep>> = steps.iter().map(step).collect();
            if let Some(steps) = steps.filter(|steps| join(steps) == name) {
                self.paths.insert(name, steps);
            }
        }
    }

    fn path(&self, name: &str) -> Vec<PathStep> {
        self.paths
            .get(name)
            .cloned()
            .unwrap_or_else(|| vec![PathStep::Key(name.to_owned())])
    }

    fn add_tensor(
        &mut self,
        name: &'a str,
        entry: PickleValue,
        contents: &mut ForeignContents,
    ) -> std::result::Result<(), PickleFault> {
        let pickle = self.pickle;
        let Some((_, state)) = pickle.record(entry, GlobalMeaning::TensorStorage) else {
            return broken(format!("`{name}` is neither a tensor nor a value"));
        };
        let shape = pickle
            .field(state, "size")
            .and_then(|size| pickle.extents(size));
        let chunks = pickle
            .field(state, "chunks")
            .and_then(|chunks| pickle.items(chunks));
        let (Some(shape), Some(chunks), Some(dtype)) = (shape, chunks, self.dtype(state)) else {
            return broken(format!("`{name}` has no size, chunks or dtype"));
        };
        let Some(dtype) = dtype.stored() else {
            let torch_name = dtype.name();
            let reason = format!("a tensor of torch.{torch_name}, which safetensors cannot store");
            contents.opaque.insert(name.to_owned(), reason);
            return Ok(());
        };
        if name.ends_with("_flat_param") || name.contains("_flat_param.") {
            return Err(PickleFault::Broken(format!(
                "`{name}` is a flat parameter of FSDP1's LOCAL_STATE_DICT, which says nothing of the parameters \
                 in it; load it with the model that wrote it and save it with SHARDED_STATE_DICT"
            )));
        }
        let rows = self.chunks(name, &shape, chunks)?;
        if dtype.num_bytes(&shape).is_none() || shape.len() > MAX_DIMS {
            return broken(format!(
                "`{name}` of shape {shape:?} is larger than memory can be"
            ));
        }
        let row = TensorRow {
            dtype,
            shape,
            path: self.path(name),
            same_as: None,
            chunks: rows,
        };
        contents.tensors.insert(name.to_owned(), row);
        Ok(())
    }

    fn dtype(&self, state: PickleValue) -> Option<TorchDtype> {
        let properties = self.pickle.field(state, "properties")?;
        let (_, state) = self.pickle.record(properties, GlobalMeaning::Properties)?;
        let dtype = match self.pickle.items(state) {
            Some(items) => items.first().copied(),
            None => self.pickle.field(state, "dtype"),
        };
        match dtype {
            Some(PickleValue::Name(GlobalMeaning::Dtype(dtype))) => Some(dtype),
            _ => None,
        }
    }

    fn chunks(
        &self,
        name: &'a str,
        shape: &[u64],
        chunks: &[PickleValue],
    ) -> std::result::Result<Vec<ChunkRow>, PickleFault> {
        let mut rows = Vec::with_capacity(chunks.len());
        for &chunk in chunks {
            let state = self
                .pickle
                .record(chunk, GlobalMeaning::ChunkStorage)
                .map(|(_, state)| state);
            let part = |key| self.pickle.extents(self.pickle.field(state?, key)?);
            let (Some(start), Some(size)) = (part("offsets"), part("sizes")) else {
                return broken(format!(
                    "a chunk of `{name}` has no offsets and sizes from 0 on"
                ));
            };
            if start.len() != shape.len() || size.len() != shape.len() {
                return broken(format!(
                    "a chunk of `{name}` has another number of dims than its tensor"
                ));
            }
            if size.contains(&0) {
                continue;
            }
            let is_zero = start.iter().all(|&offset| offset == 0);
            let mut item = self.items.get(&(name, start.clone()));
            if item.is_none() && is_zero {
                item = self.items.get(&(name, Vec::new()));
            }
            let Some(item) = item else {
                return broken(format!(
                    "the chunk of `{name}` at {start:?} has no entry in `storage_data`: it was never written"
                ));
            };
            rows.push(ChunkRow {
                file: item.file,
                offset: item.offset,
                length: item.length,
                start,
                size,
                strides: None,
                wrapped: Some(item.wrapped),
            });
        }
        let boxes = rows.iter().map(|row| (&row.start[..], &row.size[..]));
        match tiling::check_rows(shape, boxes) {
            Ok(()) => Ok(rows),
            Err(reason) => broken(format!("the chunks of `{name}` do not tile it: {reason}")),
        }
    }
}

/// Fills in the sizes of the files and rejects items that end beyond them.
fn check_sizes(
    place: &CheckpointPlace,
    contents: &mut ForeignContents,
    ends: &[(usize, u64)],
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let paths: Vec<String> = contents.files.iter().map(|file| file.0.clone()).collect();
    for (file, size) in contents
        .files
        .iter_mut()
        .zip(place.files().sizes(&paths, interrupted)?)
    {
        file.1 = size.ok_or_else(|| {
            place.not_found(format!(
                "`.metadata` names data file `{}`, which does not exist",
                file.0
            ))
        })?;
    }
    for &(file, end) in ends {
        if let Some((path, size)) = contents.files.get(file).filter(|file| file.1 < end) {
            return Err(CkptError::Corrupt {
                uri: place.uri().to_owned(),
                file: Some(path.clone()),
                offset: Some(*size),
                reason: format!(
                    "it has {size} bytes, and an item of it ends at {end}: it was cut short"
                ),
            });
        }
    }
    Ok(())
}

/// Sets the offsets of tensors in files that torch wrote in its safetensors form. In such a file, one
/// safetensors file with all tensors follows the zips of the values, and the metadata gives its start as the
/// offset of every tensor.
fn place_safetensors(
    place: &CheckpointPlace,
    contents: &mut ForeignContents,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    let mut headers: HashMap<(usize, u64), SafetensorsHeader> = HashMap::new();
    for (name, row) in &mut contents.tensors {
        let dtype = row.dtype;
        for chunk in &mut row.chunks {
            let bytes = dtype.num_bytes(&chunk.size);
            // A zip is longer than the items in it.
            if chunk.wrapped != Some(ChunkWrapping::Torch) || bytes != Some(chunk.length) {
                continue;
            }
            let Some((path, size)) = contents.files.get(chunk.file).cloned() else {
                continue;
            };
            let header = match headers.entry((chunk.file, chunk.offset)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place_of) => {
                    let blob = Blob::open(place, &path, interrupted)?;
                    place_of.insert(SafetensorsHeader::read(
                        &blob,
                        chunk.offset..size,
                        interrupted,
                    )?)
                }
            };
            let found = header
                .entry(name)
                .filter(|entry| entry.dtype == Some(dtype) && entry.shape == chunk.size);
            let Some(entry) = found else {
                return Err(CkptError::Corrupt {
                    uri: place.uri().to_owned(),
                    file: Some(path),
                    offset: Some(chunk.offset),
                    reason: format!(
                        "the safetensors form there has no `{name}` of dtype {} and shape {:?}, as `.metadata` says",
                        dtype.name(),
                        chunk.size
                    ),
                });
            };
            chunk.offset = header.data_start + entry.begin;
            chunk.wrapped = None;
        }
    }
    // Keep only the zips.
    contents.items.retain(|(file, offset, length, ..)| {
        *length > 0 && !headers.contains_key(&(*file, *offset))
    });
    Ok(())
}
