//! The items that a `.metadata` refers to: small zips, as `torch.save` writes them.

use std::io::Read;
use std::ops::Range;

use serde_json::Value as Json;

use super::contents::{ChunkWrapping, ForeignContents, ForeignValue};
use super::pickle::{AllowedGlobals, LAZY, PickleFault, StorageView, decode, to_json, view};
use super::torch_file::read_pickle;
use super::zip::ZipFile;
use crate::error::{CkptError, Result};
use crate::format::dtypes::Dtype;
use crate::manifest::PathStep;
use crate::place::CheckpointPlace;
use crate::place::blob::Blob;
use crate::workers::Interrupted;

/// Limit of a value's zip in bytes, and of all of them together; larger ones are not read.
const VALUE_LIMIT: u64 = 16 << 20;
const VALUES_LIMIT: u64 = 64 << 20;

/// Limit of the values in one item when expanded: the bytes of its pickle, or this number if that is larger.
const LEAST_VALUES: usize = 1 << 20;

/// Number of values fetched at once.
const BATCH: usize = 512;

/// Bytes fetched of an item's beginning and end, which contain its pickle and its directory.
const EDGE_BYTES: u64 = 4096;

/// The location of an item.
#[derive(Debug, Clone)]
pub(super) struct ItemLocation {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) wrapped: ChunkWrapping,
}

/// Name, path, and location of each value.
pub(super) type Values = Vec<(String, Vec<PathStep>, ItemLocation)>;

/// Reads the leaves that are not tensors, in batches per file.
pub(super) fn read_values(
    place: &CheckpointPlace,
    contents: &mut ForeignContents,
    mut values: Values,
    interrupted: Interrupted<'_>,
) -> Result<()> {
    values.sort_by_key(|(_, _, item)| (item.file, item.offset));
    let mut left = VALUES_LIMIT;
    for group in values.chunk_by(|a, b| a.2.file == b.2.file) {
        let Some(path) = group.first().and_then(|one| contents.files.get(one.2.file)) else {
            continue;
        };
        let blob = Blob::open(place, &path.0.clone(), interrupted)?;
        for batch in group.chunks(BATCH) {
            let (small, large): (Vec<_>, Vec<_>) = batch.iter().partition(|(_, _, item)| {
                let is_small = item.length <= VALUE_LIMIT.min(left);
                left -= if is_small { item.length } else { 0 };
                is_small
            });
            for (name, _, item) in large {
                let reason = format!(
                    "a value of {} bytes, which is too large to decode",
                    item.length
                );
                contents.opaque.insert(name.clone(), reason);
            }
            let ranges: Vec<Range<u64>> = small
                .iter()
                .map(|(_, _, item)| item.offset..item.offset + item.length)
                .collect();
            let pieces = blob.read_many(&ranges, interrupted)?;
            for ((name, path, item), bytes) in small.into_iter().zip(pieces) {
                let read = read_value(&blob, item, bytes, interrupted);
                match read.unwrap_or_else(|error| Err(error.to_string())) {
                    Ok(value) => {
                        let path = path.clone();
                        let leaf = ForeignValue { path, value };
                        contents.values.insert(name.clone(), leaf);
                    }
                    Err(reason) => {
                        contents.opaque.insert(name.clone(), reason);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Reads a value, or returns the reason why it cannot be represented.
fn read_value(
    blob: &Blob,
    item: &ItemLocation,
    bytes: Vec<u8>,
    interrupted: Interrupted<'_>,
) -> Result<std::result::Result<Json, String>> {
    let blob = blob.unpacked(unwrap(blob, item.wrapped, bytes, VALUE_LIMIT)?);
    let zip = ZipFile::open(&blob, 0..blob.size(), interrupted)?;
    let (bytes, _) = read_pickle(&blob, &zip, interrupted)?;
    let fault = |fault: PickleFault| fault.at(blob.uri(), blob.name());
    let pickle = decode(&bytes, AllowedGlobals::TorchSave).map_err(fault)?;
    let mut left = LEAST_VALUES.max(bytes.len());
    Ok(to_json(&pickle, pickle.root, &mut left).map_err(PickleFault::reason))
}

fn unwrap(blob: &Blob, wrapped: ChunkWrapping, bytes: Vec<u8>, limit: u64) -> Result<Vec<u8>> {
    if wrapped != ChunkWrapping::Zstd {
        return Ok(bytes);
    }
    let mut content = Vec::new();
    let mut read = || {
        zstd::stream::read::Decoder::new(bytes.as_slice())?
            .take(limit + 1)
            .read_to_end(&mut content)
    };
    read().map_err(|error| {
        blob.corrupt(
            None,
            format!("an item cannot be decompressed by zstd: {error}"),
        )
    })?;
    if content.len() as u64 > limit {
        return Err(blob.corrupt(None, format!("an item unpacks to more than {limit} bytes")));
    }
    Ok(content)
}

/// A tensor's item, to be located or unpacked.
#[derive(Debug, Clone)]
pub(crate) struct TensorItem {
    /// Offset of its zip in the file.
    pub(crate) offset: u64,
    /// Bytes of the zip, or of its compressed form.
    pub(crate) length: u64,
    /// The dtype according to `.metadata`.
    pub(crate) dtype: Dtype,
    /// The shape according to `.metadata`.
    pub(crate) shape: Vec<u64>,
}

/// The location of a tensor's items: the offset of the first, and the strides if they are not C order.
pub(crate) type Located = (u64, Option<Vec<u64>>);

/// Locates the tensors inside items of one file, with two small reads per item, all batched. `named` gets the index of
/// the item that an error is about, and may name its tensor.
///
/// # Errors
/// `Corrupt` if an item does not match `.metadata`, and errors of the disk or the store.
pub(crate) fn locate(
    place: &CheckpointPlace,
    path: &str,
    items: &[TensorItem],
    named: &dyn Fn(usize, CkptError) -> CkptError,
    interrupted: Interrupted<'_>,
) -> Result<Vec<Located>> {
    let blob = Blob::open(place, path, interrupted)?;
    let mut located = Vec::with_capacity(items.len());
    for batch in items.chunks(BATCH) {
        let edges = batch.iter().flat_map(|item| {
            let (start, end) = (item.offset, item.offset.saturating_add(item.length));
            let edge = EDGE_BYTES.min(item.length);
            [start..start + edge, end - edge..end]
        });
        let edges: Vec<Range<u64>> = edges.collect();
        let pieces = blob.read_many(&edges, interrupted)?;
        let mut pieces = edges.iter().map(|edge| edge.start).zip(pieces);
        for item in batch {
            let known = pieces.by_ref().take(2).collect();
            let (start, strides, _) = find(&blob.with_pieces(known), item, interrupted)
                .map_err(|error| named(located.len(), error))?;
            located.push((start, strides));
        }
    }
    Ok(located)
}

/// Finds the offset, strides and bytes of the tensor in an item.
pub(crate) fn find(
    blob: &Blob,
    item: &TensorItem,
    interrupted: Interrupted<'_>,
) -> Result<(u64, Option<Vec<u64>>, u64)> {
    let from = item.offset;
    let zip = ZipFile::open(blob, from..from.saturating_add(item.length), interrupted)?;
    let (bytes, prefix) = read_pickle(blob, &zip, interrupted)?;
    let fault = |fault: PickleFault| fault.at(blob.uri(), blob.name());
    let pickle = decode(&bytes, AllowedGlobals::TorchSave).map_err(fault)?;
    let view: Option<StorageView> = view(&pickle, pickle.root).transpose().map_err(fault)?;
    let bad = |reason: &str| blob.corrupt(Some(from), reason);
    let view = view.ok_or_else(|| bad("an item holds no tensor where `.metadata` says one"))?;
    if view.is_lazy {
        return Err(CkptError::Incompatible {
            uri: blob.uri().to_owned(),
            reason: format!("at byte {from} of `{}` is {LAZY}", blob.name()),
        });
    }
    if view.readable() != Ok(item.dtype) || view.shape != item.shape {
        return Err(bad(&format!(
            "an item holds {} of shape {:?}; `.metadata` says {} of shape {:?}",
            view.dtype.name(),
            view.shape,
            item.dtype.name(),
            item.shape
        )));
    }
    let member = zip.member(&format!("{prefix}/data/{}", view.key));
    let member = member.filter(|member| member.size == view.storage_bytes);
    let (Some(member), Some(span)) = (member, view.span()) else {
        return Err(bad("an item's tensor does not fit into its storage"));
    };
    let found = zip.locate(blob, &[member], interrupted)?;
    let start = found.first().map_or(0, |range| range.start) + span.start;
    Ok((start, view.odd_strides(), span.end - span.start))
}
