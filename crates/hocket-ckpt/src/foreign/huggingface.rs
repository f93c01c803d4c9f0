//! Foreign safetensors files, single or sharded with an index.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use serde_json::Value as Json;

use super::catalogue::{ChunkRow, ForeignCatalogue, TensorRow};
use super::unsupported::{POINTER, is_pointer};
use crate::error::{CkptError, Result};
use crate::format::dtypes::{Dtype, fractional_bits};
use crate::format::json_pairs::JsonPairs;
use crate::format::names::is_plain_name;
use crate::format::safetensors::HEADER_LIMIT;
use crate::manifest::PathStep;
use crate::manifest::tiling::{self, TensorBox};
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Suffix of an index file; the rest of the name differs between publishers.
pub(crate) const INDEX_SUFFIX: &str = ".safetensors.index.json";

const INDEX_LIMIT: u64 = 256 << 20;

/// The fields of an entry.
const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];

/// An entry of a header.
pub(crate) struct HeaderEntry {
    name: String,
    /// `None` for a dtype with a fractional number of bytes per item.
    pub(crate) dtype: Option<Dtype>,
    dtype_name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) begin: u64,
    end: u64,
}

/// A header that has passed the checks of the safetensors package and the further rules of the format's
/// specification.
pub(crate) struct SafetensorsHeader {
    /// Offset of the data in the file.
    pub(crate) data_start: u64,
    parsed: ParsedHeader,
}

/// The parsed contents of a header.
#[derive(Default)]
pub(crate) struct ParsedHeader {
    entries: Vec<HeaderEntry>,
    /// Indices of the entries by name.
    places: HashMap<String, usize>,
    /// Violated rules of the specification that other readers tolerate.
    lax: Vec<String>,
    /// `__metadata__`, without [`SHARDING`], which describes this file alone.
    metadata: BTreeMap<String, String>,
    /// Start of an entry within its tensor, as torch's distributed writer records it.
    starts: Option<HashMap<String, Vec<u64>>>,
}

/// The key of `__metadata__` under which torch's distributed writer records the part of its tensor that each
/// entry holds.
const SHARDING: &str = "DCP_SHARDING_INFO";

impl SafetensorsHeader {
    /// Reads the header of the safetensors file in `range` of a file.
    pub(crate) fn read(
        blob: &Blob,
        range: Range<u64>,
        interrupted: Interrupted<'_>,
    ) -> Result<Self> {
        let bad = |reason: String| {
            blob.corrupt(
                (range.start > 0).then_some(range.start),
                format!("it is not a safetensors file: {reason}"),
            )
        };
        let size = range.end.saturating_sub(range.start);
        if size < 8 {
            return Err(bad(format!("it has only {size} bytes")));
        }
        let begin = range.start + 8;
        let length = blob.read(range.start..begin, interrupted)?;
        if is_pointer(&length) {
            return Err(CkptError::Incompatible {
                uri: format!("{}/{}", blob.uri().trim_end_matches('/'), blob.name()),
                reason: POINTER.to_owned(),
            });
        }
        let length = length
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte));
        if length > HEADER_LIMIT as u64 || length > size - 8 {
            return Err(bad(format!(
                "its header is to have {length} bytes, and the file has {size} (a header has at most {HEADER_LIMIT})"
            )));
        }
        let json = blob.read(begin..begin + length, interrupted)?;
        Ok(Self {
            data_start: begin + length,
            parsed: parse(&json, size - 8 - length).map_err(bad)?,
        })
    }

    /// Reads the header of a whole file.
    pub(crate) fn of(blob: &Blob, interrupted: Interrupted<'_>) -> Result<Self> {
        Self::read(blob, 0..blob.size(), interrupted)
    }

    pub(crate) fn entries(&self) -> &[HeaderEntry] {
        &self.parsed.entries
    }

    /// Returns the entry of this name.
    pub(crate) fn entry(&self, name: &str) -> Option<&HeaderEntry> {
        let index = self.parsed.places.get(name)?;
        self.parsed.entries.get(*index)
    }
}

pub(crate) fn parse(json: &[u8], data_bytes: u64) -> std::result::Result<ParsedHeader, String> {
    let mut parsed = ParsedHeader::default();
    let ParsedHeader {
        entries,
        places,
        lax,
        metadata,
        starts,
    } = &mut parsed;
    if json.first() != Some(&b'{') {
        lax.push("its header does not begin with `{`".to_owned());
    }
    let JsonPairs::<Json, false>(pairs) =
        serde_json::from_slice(json).map_err(|error| format!("header: {error}"))?;
    let mut has_metadata = false;
    for (name, value) in pairs {
        if name == "__metadata__" {
            if has_metadata {
                return Err("`__metadata__` occurs twice".to_owned());
            }
            has_metadata = true;
            *metadata = read_metadata(value, lax)?;
            if let Some(text) = metadata.remove(SHARDING) {
                *starts = read_starts(&text, lax)?;
            }
            continue;
        }
        let entry = entry(name, value, lax)?;
        match places.get(&entry.name).and_then(|&at| entries.get_mut(at)) {
            // The last duplicate wins, as in the safetensors package.
            Some(slot) => {
                lax.push(format!("`{}` is listed twice", entry.name));
                *slot = entry;
            }
            None => {
                places.insert(entry.name.clone(), entries.len());
                entries.push(entry);
            }
        }
    }
    check_order(entries, data_bytes, lax)?;
    Ok(parsed)
}

/// Parses the starts; returns none if the text is not in torch's form, because only torch's distributed reader
/// uses it.
fn read_starts(
    text: &str,
    lax: &mut Vec<String>,
) -> std::result::Result<Option<HashMap<String, Vec<u64>>>, String> {
    #[derive(serde::Deserialize)]
    struct Saved {
        saved_offsets: Json,
    }
    let Ok(saved) = serde_json::from_str::<HashMap<String, Saved>>(text) else {
        lax.push(format!("its `{SHARDING}` is not as torch writes it"));
        return Ok(None);
    };
    let offsets = |(name, saved): (String, Saved)| match serde_json::from_value(saved.saved_offsets)
    {
        Ok(start) => Ok((name, start)),
        Err(error) => Err(format!("its `{SHARDING}` points outside the file: {error}")),
    };
    saved
        .into_iter()
        .map(offsets)
        .collect::<std::result::Result<_, _>>()
        .map(Some)
}

fn read_metadata(
    value: Json,
    lax: &mut Vec<String>,
) -> std::result::Result<BTreeMap<String, String>, String> {
    if value.is_null() {
        lax.push("`__metadata__` is null".to_owned());
        return Ok(BTreeMap::new());
    }
    serde_json::from_value(value)
        .map_err(|_| "`__metadata__` is not a mapping of strings to strings".to_owned())
}

fn entry(
    name: String,
    value: Json,
    lax: &mut Vec<String>,
) -> std::result::Result<HeaderEntry, String> {
    let numbers = |key: &str| -> Option<Vec<u64>> {
        value
            .get(key)?
            .as_array()?
            .iter()
            .map(Json::as_u64)
            .collect()
    };
    let dtype_name = value.get("dtype").and_then(Json::as_str).map(str::to_owned);
    let (Some(dtype_name), Some(shape), Some(offsets)) =
        (dtype_name, numbers("shape"), numbers("data_offsets"))
    else {
        return Err(format!("`{name}` has no dtype, shape and data_offsets"));
    };
    let &[begin, end] = offsets.as_slice() else {
        return Err(format!(
            "`{name}` has data_offsets that are not a pair of integers"
        ));
    };
    let dtype = Dtype::parse(&dtype_name);
    let bytes = match (dtype, fractional_bits(&dtype_name)) {
        (Some(dtype), _) => dtype.num_bytes(&shape),
        (None, Some(bits)) => shape
            .iter()
            .try_fold(bits, |bits, &extent| bits.checked_mul(extent))
            .filter(|bits| bits % 8 == 0)
            .map(|bits| bits / 8),
        (None, None) => {
            return Err(format!(
                "`{name}` has the dtype `{dtype_name}`, which is none of safetensors'"
            ));
        }
    };
    if begin > end || bytes != Some(end - begin) {
        return Err(format!(
            "`{name}`, {dtype_name} of shape {shape:?}, cannot stand at data_offsets [{begin}, {end}]"
        ));
    }
    if let Some(object) = value.as_object() {
        let unknown = object.keys().filter(|key| !FIELDS.contains(&key.as_str()));
        lax.extend(unknown.map(|key| {
            format!("`{name}` has the field `{key}`, which the format does not define")
        }));
    }
    Ok(HeaderEntry {
        name,
        dtype,
        dtype_name,
        shape,
        begin,
        end,
    })
}

/// Checks that the entries have no gap and no overlap, and that nothing follows the last.
fn check_order(
    entries: &[HeaderEntry],
    data_bytes: u64,
    lax: &mut Vec<String>,
) -> std::result::Result<(), String> {
    let mut order: Vec<&HeaderEntry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.begin, entry.end));
    let mut at = 0;
    for entry in order {
        if entry.begin != at {
            return Err(format!(
                "`{}` begins at {} of the data; expected {at}",
                entry.name, entry.begin
            ));
        }
        let item = entry.dtype.map_or(1, Dtype::item_bytes);
        if entry.begin % item != 0 {
            lax.push(format!(
                "`{}` begins at {}, which is no multiple of its item size",
                entry.name, entry.begin
            ));
        }
        at = entry.end;
    }
    if at != data_bytes {
        return Err(format!(
            "its entries end at {at} of the data, which has {data_bytes} bytes"
        ));
    }
    Ok(())
}

fn add(catalogue: &mut ForeignCatalogue, file: usize, data_start: u64, entry: &HeaderEntry) {
    let name = entry.name.clone();
    let Some(dtype) = entry.dtype else {
        let reason = format!(
            "a tensor of {}, whose elements are not whole bytes",
            entry.dtype_name
        );
        catalogue.opaque.insert(name, reason);
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
    catalogue.tensors.insert(name, row);
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
) -> Result<ForeignCatalogue> {
    let header = SafetensorsHeader::of(blob, interrupted)?;
    let starts = header.parsed.starts.iter().flat_map(HashMap::values);
    if starts.flatten().any(|&start| start > 0) {
        return Err(CkptError::Incompatible {
            uri: format!("{}/{}", root.trim_end_matches('/'), blob.name()),
            reason: "it holds parts of tensors, as one of several files; name the folder that holds them all"
                .to_owned(),
        });
    }
    let mut catalogue = ForeignCatalogue::new("safetensors", root);
    catalogue.files.push((blob.name().to_owned(), blob.size()));
    catalogue.add_metadata(&header.parsed.metadata);
    for entry in header.entries() {
        add(&mut catalogue, 0, header.data_start, entry);
    }
    Ok(catalogue)
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
) -> Result<ForeignCatalogue> {
    let bad = |reason: String| index.corrupt(None, reason);
    let weight_map = read_index(index, interrupted)?;
    let mut catalogue = ForeignCatalogue::new("safetensors", place.uri());
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
        catalogue.files.push((file.to_owned(), blob.size()));
        catalogue.add_metadata(&header.parsed.metadata);
        if let Some(missing) = names.iter().find(|name| header.entry(name).is_none()) {
            return Err(bad(format!(
                "it says that `{missing}` is in `{file}`, and it is not"
            )));
        }
        for entry in header.entries() {
            match weight_map.get(&entry.name) {
                Some(owner) if owner != file => {}
                None if catalogue.has(&entry.name) => {
                    catalogue.set_ambiguous(entry.name.clone(), file);
                }
                _ => add(&mut catalogue, number, header.data_start, entry),
            }
        }
    }
    Ok(catalogue)
}

/// Lists shards that torch's distributed writer left without an index: each header records which parts of which
/// tensors the shard contains. Returns none if one of the files has no such record.
pub(crate) fn scattered(
    place: &CheckpointPlace,
    names: &[&str],
    interrupted: Interrupted<'_>,
) -> Result<Option<ForeignCatalogue>> {
    let mut catalogue = ForeignCatalogue::new("safetensors", place.uri());
    let mut rows: Vec<(String, TensorRow)> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (number, name) in names.iter().enumerate() {
        let blob = Blob::open(place, name, interrupted)?;
        let header = SafetensorsHeader::of(&blob, interrupted)?;
        let Some(starts) = &header.parsed.starts else {
            return Ok(None);
        };
        catalogue.files.push(((*name).to_owned(), blob.size()));
        catalogue.add_metadata(&header.parsed.metadata);
        for entry in header.entries() {
            let Some(dtype) = entry.dtype else {
                add(&mut catalogue, number, header.data_start, entry);
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
        let mut regions = Vec::new();
        row.chunks.retain(|chunk| !chunk.size.contains(&0));
        regions.extend(row.chunks.iter().map(|chunk| TensorBox {
            start: chunk.start.clone(),
            size: chunk.size.clone(),
        }));
        tiling::check(&row.shape, &mut regions).map_err(|reason| CkptError::Corrupt {
            uri: place.uri().to_owned(),
            file: None,
            offset: None,
            reason: format!("the shards of `{name}` do not tile it: {reason}"),
        })?;
        catalogue.tensors.insert(name, row);
    }
    Ok(Some(catalogue))
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
