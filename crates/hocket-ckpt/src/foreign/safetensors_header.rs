//! The header of a foreign safetensors file.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use serde_json::Value as Json;

use super::unsupported::{POINTER, is_pointer};
use crate::error::{CkptError, Result};
use crate::format::dtypes::{Dtype, fractional_bits};
use crate::format::json_pairs::JsonPairs;
use crate::format::safetensors::HEADER_LIMIT;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// The fields of an entry.
const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];

/// An entry of a header.
pub(crate) struct HeaderEntry {
    pub(super) name: String,
    /// `None` for a dtype with a fractional number of bytes per item.
    pub(crate) dtype: Option<Dtype>,
    pub(super) dtype_name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) begin: u64,
    pub(super) end: u64,
}

/// A header that has passed the checks of the safetensors package and the further rules of the format's
/// specification.
pub(crate) struct SafetensorsHeader {
    /// Offset of the data in the file.
    pub(crate) data_start: u64,
    pub(super) parsed: ParsedHeader,
}

/// The parsed contents of a header.
#[derive(Default)]
pub(crate) struct ParsedHeader {
    entries: Vec<HeaderEntry>,
    /// Indices of the entries by name.
    places: HashMap<String, usize>,
    /// Violated rules of the specification that other readers tolerate.
    pub(super) lax: Vec<String>,
    /// `__metadata__`, without [`SHARDING`], which describes this file alone.
    pub(super) metadata: BTreeMap<String, String>,
    /// Start of an entry within its tensor, as torch's distributed writer records it.
    pub(super) starts: Option<HashMap<String, Vec<u64>>>,
}

/// The key of `__metadata__` under which torch's distributed writer records the part of its tensor that each
/// entry holds.
pub(super) const SHARDING: &str = "DCP_SHARDING_INFO";

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
