//! Sharded Hugging Face models from before safetensors: several files of `torch.save` and an index.

use std::collections::{BTreeMap, HashSet};

use super::contents::ForeignContents;
use super::huggingface::read_index;
use super::torch_file;
use crate::error::Result;
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Suffix of an index file; the rest of the name differs between publishers.
pub(crate) const INDEX_SUFFIX: &str = ".bin.index.json";

/// Lists a sharded checkpoint; `weight_map` determines the file of a tensor.
pub(crate) fn contents(
    place: &CheckpointPlace,
    index: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    let weight_map = read_index(index, interrupted)?;
    let mut files: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    for (name, file) in &weight_map {
        files.entry(file).or_default().insert(name);
    }
    let mut contents = ForeignContents::new("torch", place.uri());
    for (number, (file, names)) in files.into_iter().enumerate() {
        let blob = Blob::open(place, file, interrupted)?;
        let found = torch_file::contents(place.uri(), &blob, interrupted)?;
        if let Some(missing) = names.iter().find(|name| !found.has(name)) {
            return Err(index.corrupt(
                None,
                format!("it says that `{missing}` is in `{file}`, and it is not"),
            ));
        }
        contents.files.push((file.to_owned(), blob.size()));
        for (name, mut row) in found.tensors {
            // Renumbers the file. Below, tensors that the index assigns to another file are left out; tensors that
            // it does not list, such as aliases of listed ones, are kept.
            for chunk in &mut row.chunks {
                chunk.file = number;
            }
            match weight_map.contains_key(&name) {
                true if !names.contains(name.as_str()) => {}
                false if contents.has(&name) => contents.set_ambiguous(name, file),
                _ => {
                    contents.tensors.insert(name, row);
                }
            }
        }
        contents.values.extend(found.values);
        contents.opaque.extend(found.opaque);
    }
    Ok(contents)
}
