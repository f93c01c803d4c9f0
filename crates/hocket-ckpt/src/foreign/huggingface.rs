//! Foreign safetensors files, single or sharded with an index.

use std::collections::{BTreeMap, HashMap};

use super::contents::{ChunkRow, ForeignContents, TensorRow};
use super::safetensors_header::{HeaderEntry, SHARDING, SafetensorsHeader};
use crate::error::{CkptError, Result};
use crate::format::names::is_plain_name;
use crate::manifest::PathStep;
use crate::manifest::tiling;
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Suffix of an index file; the rest of the name differs between publishers.
pub(crate) const INDEX_SUFFIX: &str = ".safetensors.index.json";

const INDEX_LIMIT: u64 = 256 << 20;

fn add(contents: &mut ForeignContents, file: usize, data_start: u64, entry: &HeaderEntry) {
    let name = entry.name.clone();
    let Some(dtype) = entry.dtype else {
        let reason = format!(
            "a tensor of {}, whose elements are not whole bytes",
            entry.dtype_name
        );
        contents.opaque.insert(name, reason);
        return;
    };
    let row = TensorRow {
        dtype,
        shape: entry.shape.clone(),
        path: vec![PathStep::Key(name.clone())],
        same_as: None,
        chunks: if entry.begin == entry.end {
            Vec::new()
        } else {
            let start = vec![0; entry.shape.len()];
            vec![chunk(file, data_start, entry, start)]
        },
    };
    contents.tensors.insert(name, row);
}

fn chunk(file: usize, data_start: u64, entry: &HeaderEntry, start: Vec<u64>) -> ChunkRow {
    ChunkRow {
        file,
        offset: data_start + entry.begin,
        length: entry.end - entry.begin,
        start,
        size: entry.shape.clone(),
        strides: None,
        wrapped: None,
    }
}

/// Lists one safetensors file.
pub(crate) fn single(
    root: &str,
    blob: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    let header = SafetensorsHeader::of(blob, interrupted)?;
    let starts = header.parsed.starts.iter().flat_map(HashMap::values);
    if starts.flatten().any(|&start| start > 0) {
        return Err(CkptError::Incompatible {
            uri: format!("{}/{}", root.trim_end_matches('/'), blob.name()),
            reason: "it holds parts of tensors, as one of several files; name the folder that holds them all"
                .to_owned(),
        });
    }
    let mut contents = ForeignContents::new("safetensors", root);
    contents.files.push((blob.name().to_owned(), blob.size()));
    contents.add_metadata(&header.parsed.metadata);
    for entry in header.entries() {
        add(&mut contents, 0, header.data_start, entry);
    }
    Ok(contents)
}

/// Reads the `weight_map` of an index, from tensor names to files: plain names or paths below the folder.
pub(crate) fn read_index(
    index: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bad = |reason: String| index.corrupt(None, reason);
    if index.size() > INDEX_LIMIT {
        return Err(bad(format!(
            "it has {} bytes; expected at most {INDEX_LIMIT}",
            index.size()
        )));
    }
    let bytes = index.read(0..index.size(), interrupted)?;
    let Index { weight_map } =
        serde_json::from_slice(&bytes).map_err(|error| bad(format!("it is no index: {error}")))?;
    for file in weight_map.values() {
        if !file.split('/').all(is_plain_name) {
            return Err(bad(format!(
                "it names the file `{}`, which is no plain name or path below its folder",
                file.escape_debug()
            )));
        }
    }
    Ok(weight_map)
}

/// Lists a sharded checkpoint. `weight_map` determines the file of a tensor, independent of the names of the
/// files. Tensors that it does not list are read, too, unless two files hold them.
pub(crate) fn sharded(
    place: &CheckpointPlace,
    index: &Blob,
    interrupted: Interrupted<'_>,
) -> Result<ForeignContents> {
    let bad = |reason: String| index.corrupt(None, reason);
    let weight_map = read_index(index, interrupted)?;
    let mut contents = ForeignContents::new("safetensors", place.uri());
    let files: BTreeMap<&str, Vec<&str>> =
        weight_map
            .iter()
            .fold(BTreeMap::new(), |mut files, (name, file)| {
                files
                    .entry(file.as_str())
                    .or_insert_with(Vec::new)
                    .push(name.as_str());
                files
            });
    for (number, (file, names)) in files.into_iter().enumerate() {
        let blob = Blob::open(place, file, interrupted)?;
        let header = SafetensorsHeader::of(&blob, interrupted)?;
        contents.files.push((file.to_owned(), blob.size()));
        contents.add_metadata(&header.parsed.metadata);
        if let Some(missing) = names.iter().find(|name| header.entry(name).is_none()) {
            return Err(bad(format!(
                "it says that `{missing}` is in `{file}`, and it is not"
            )));
        }
        for entry in header.entries() {
            match weight_map.get(&entry.name) {
                Some(owner) if owner != file => {}
                None if contents.has(&entry.name) => {
                    contents.set_ambiguous(entry.name.clone(), file);
                }
                _ => add(&mut contents, number, header.data_start, entry),
            }
        }
    }
    Ok(contents)
}

/// Lists shards that torch's distributed writer left without an index: each header records which parts of which
/// tensors the shard contains. Returns none if one of the files has no such record.
pub(crate) fn scattered(
    place: &CheckpointPlace,
    names: &[&str],
    interrupted: Interrupted<'_>,
) -> Result<Option<ForeignContents>> {
    let mut contents = ForeignContents::new("safetensors", place.uri());
    let mut rows: Vec<(String, TensorRow)> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (number, name) in names.iter().enumerate() {
        let blob = Blob::open(place, name, interrupted)?;
        let header = SafetensorsHeader::of(&blob, interrupted)?;
        let Some(starts) = &header.parsed.starts else {
            return Ok(None);
        };
        contents.files.push(((*name).to_owned(), blob.size()));
        contents.add_metadata(&header.parsed.metadata);
        for entry in header.entries() {
            let Some(dtype) = entry.dtype else {
                add(&mut contents, number, header.data_start, entry);
                continue;
            };
            let at = *known.entry(entry.name.clone()).or_insert(rows.len());
            if at == rows.len() {
                let row = TensorRow {
                    dtype,
                    shape: vec![0; entry.shape.len()],
                    path: vec![PathStep::Key(entry.name.clone())],
                    same_as: None,
                    chunks: Vec::new(),
                };
                rows.push((entry.name.clone(), row));
            }
            let row = rows.get_mut(at).filter(|(_, row)| row.dtype == dtype);
            let joined = starts
                .get(&entry.name)
                .zip(row)
                .and_then(|(start, (_, row))| {
                    row.join(chunk(number, header.data_start, entry, start.clone()))
                });
            if joined.is_none() {
                return Err(blob.corrupt(
                    None,
                    format!(
                        "its `{SHARDING}` or another file says otherwise of the place, the dtype or the shape of `{}`",
                        entry.name
                    ),
                ));
            }
        }
    }
    for (name, mut row) in rows {
        row.chunks.retain(|chunk| !chunk.size.contains(&0));
        let boxes = row.chunks.iter();
        let boxes = boxes.map(|chunk| (&chunk.start[..], &chunk.size[..]));
        tiling::check_rows(&row.shape, boxes).map_err(|reason| CkptError::Corrupt {
            uri: place.uri().to_owned(),
            file: None,
            offset: None,
            reason: format!("the shards of `{name}` do not tile it: {reason}"),
        })?;
        contents.tensors.insert(name, row);
    }
    Ok(Some(contents))
}

/// Returns the rules of the specification that a file violates although readers accept it.
///
/// # Errors
/// `Corrupt` if no reader accepts it, and errors of the disk or the store.
pub fn lax_rules(
    place: &CheckpointPlace,
    path: &str,
    interrupted: Interrupted<'_>,
) -> Result<Vec<String>> {
    let header = SafetensorsHeader::of(&Blob::open(place, path, interrupted)?, interrupted)?;
    Ok(header.parsed.lax)
}
